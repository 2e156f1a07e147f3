"""Safetensors files built by hand, right and wrong."""

from __future__ import annotations

import json
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_certificates() -> Iterator[None]:
    """No server here speaks HTTPS; reading the system's certificates takes each client 40 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
        yield


@pytest.fixture(scope="session")
def raw_file() -> Callable[..., bytes]:
    """The bytes of a safetensors file from any header: an object, text or bytes."""

    def build(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
        if not isinstance(header, bytes | str):
            header = json.dumps(header)
        text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else header
        return struct.pack("<Q", len(text) if length is None else length) + text + data

    return build
