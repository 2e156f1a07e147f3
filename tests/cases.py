"""Tables of cases that are data and no code: in a TOML file beside the tests that read them."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


def cases(tests: str, name: str) -> Any:
    """A table of the file that lies beside a file of tests, and is called like it."""
    return _read(Path(tests).with_suffix(".toml"))[name]


@cache
def _read(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text("utf-8"))
