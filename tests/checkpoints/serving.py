"""Servers on this machine: one that serves files in parts, and errs on request; and a small hub."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np
import pytest
from huggingface_hub import close_session, constants
from safetensors.numpy import save
from tests.small import sizes

from wqk.checkpoints import Part
from wqk.storage import patience


class Request(NamedTuple):
    """A request as it came in, and what it was answered with."""

    method: str
    path: str
    range: str | None
    status: int
    body: int


class Site:
    """Files behind HTTP.

    ``files`` are bytes or paths by their path; ``faults`` says what befalls the next requests, one
    each, None for nothing; ``log`` is what was asked.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes | Path] = {}
        self.tags: dict[str, str | None] = {}
        self.faults: deque[Callable[[Handler], bool] | None] = deque()
        self.log: list[Request] = []
        self.released = threading.Event()
        self._lock = threading.Lock()
        site = self

        class BoundHandler(Handler):
            pass

        BoundHandler.site = site
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), BoundHandler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fault(self) -> Callable[[Handler], bool] | None:
        with self._lock:
            return self.faults.popleft() if self.faults else None

    def size(self, path: str) -> int:
        content = self.files[path]
        return content.stat().st_size if isinstance(content, Path) else len(content)

    def read(self, path: str, start: int, stop: int) -> bytes:
        content = self.files[path]
        if isinstance(content, bytes):
            return content[start:stop]
        with content.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)

    def tag(self, path: str) -> str | None:
        content = self.files[path]
        name = digest(content)[:32] if isinstance(content, bytes) else content
        return self.tags.get(path, f'"{name}"')

    def respond(self, handler: Handler) -> None:
        """Answer as a static server does."""
        path = unquote(urlsplit(handler.path).path)
        if path not in self.files:
            handler.answer(404)
            return
        self.serve(handler, path)

    def serve(self, handler: Handler, path: str, headers: dict[str, str] | None = None) -> None:
        size, tag = self.size(path), self.tag(path)
        common = {**({"ETag": tag} if tag else {}), **(headers or {})}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
        if not asked:
            handler.answer(200, common, self.read(path, 0, size))
            return
        start, stop = int(asked[1]), min(int(asked[2]) + 1, size)
        if start >= size:
            handler.answer(416, {"Content-Range": f"bytes */{size}"})
            return
        common["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        handler.answer(206, common, self.read(path, start, stop))

    @property
    def bytes_sent(self) -> int:
        return sum(request.body for request in self.log)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    site: Site
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self) -> None:
        if self.path.startswith("/api/agent-harnesses"):  # the hub's client asks once a day
            self.send_error(404)
            return
        fault = self.site.fault()
        if fault is None or not fault(self):
            self.site.respond(self)

    do_HEAD = do_GET  # noqa: N815 - the server's own name

    def answer(
        self,
        status: int,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        sent: int | None = None,
    ) -> None:
        """Send a whole answer, or only `sent` bytes of its body before hanging up."""
        part = b"" if self.command == "HEAD" else body[:sent]
        asked = self.headers.get("Range")
        self.site.log.append(Request(self.command, self.path, asked, status, len(part)))
        try:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(part)
            self.wfile.flush()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if sent is not None:
            self.close_connection = True

    def handle(self) -> None:
        with contextlib.suppress(ConnectionResetError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def asked_range(self) -> tuple[str, int, int]:
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        return unquote(urlsplit(self.path).path), int(first), int(last) + 1


def status(code: int, **headers: str) -> Callable[[Handler], bool]:
    """Answer with a status instead."""

    def fault(handler: Handler) -> bool:
        handler.answer(code, {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return fault


def part(
    sent: int | None = None,
    *,
    code: int = 206,
    shift: int = 0,
    total: int | str | None = None,
    **headers: str,
) -> Callable[[Handler], bool]:
    """Answer with the range, but hang up early, lie about it, or change its headers."""

    def fault(handler: Handler) -> bool:
        path, start, stop = handler.asked_range()
        site = handler.site
        size = site.size(path)
        body = site.read(path, 0, size) if code == 200 else site.read(path, start, stop)
        claim = f"bytes {start + shift}-{start + shift + len(body) - 1}"
        described = {"ETag": site.tag(path) or "", "Content-Range": f"{claim}/{total or size}"}
        described |= {name.replace("_", "-"): value for name, value in headers.items()}
        if code == 200:
            described.pop("Content-Range")
        described = {name: value for name, value in described.items() if value}
        handler.answer(code, described, body, sent)
        return True

    return fault


def silence(handler: Handler) -> bool:
    """Take the request, and never answer."""
    handler.site.log.append(Request(handler.command, handler.path, None, 0, 0))
    handler.site.released.wait(600)
    handler.close_connection = True
    return True


class Hub(Site):
    """The addresses of the hub that wqk and the hub's client ask, and a CDN behind them.

    ``repositories`` maps a name to its revisions, these to their files.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cdn = Cdn()
        self.repositories: dict[str, dict[str, Mapping[str, bytes | Path]]] = {}
        self.private: dict[str, str] = {}  # repository → token
        self.gated: dict[str, str] = {}
        self.resolved = 0

    def close(self) -> None:
        super().close()
        self.cdn.close()

    def commit(self, repository: str, revision: str) -> str:
        return hashlib.sha1(f"{repository} {revision}".encode()).hexdigest()

    def respond(self, handler: Handler) -> None:
        parts = urlsplit(handler.path)
        path = unquote(parts.path)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            commit_and_files = self._revision(handler, match[1], match[2] or "main")
            if commit_and_files is not None:
                body = self._info(match[1], *commit_and_files, "blobs" in parse_qs(parts.query))
                handler.answer(200, {"Content-Type": "application/json"}, body)
        elif match := re.fullmatch(
            r"/([^/]+/[^/]+)/resolve/([0-9a-f]{40}|refs/[^/]+/[^/]+|[^/]+)/(.+)", path
        ):
            self._resolve(handler, *match.groups())
        else:
            handler.answer(404)

    def _allowed(self, handler: Handler, secrets: dict[str, str], repository: str) -> bool:
        expected = secrets.get(repository)
        return expected is None or handler.headers.get("Authorization") == f"Bearer {expected}"

    def _revision(
        self, handler: Handler, repository: str, revision: str
    ) -> tuple[str, Mapping[str, bytes | Path]] | None:
        """The revision's commit and files; answers itself where there is none."""
        if not self._allowed(handler, self.private, repository):
            handler.answer(401, {"X-Error-Code": "RepoNotFound"})
            return None
        if repository not in self.repositories:
            handler.answer(404, {"X-Error-Code": "RepoNotFound"})
            return None
        for name, files in self.repositories[repository].items():
            if revision in (name, self.commit(repository, name)):
                return self.commit(repository, name), files
        handler.answer(404, {"X-Error-Code": "RevisionNotFound"})
        return None

    def _info(
        self, repository: str, commit: str, files: Mapping[str, bytes | Path], blobs: bool
    ) -> bytes:
        siblings: list[dict[str, Any]] = []
        for path, content in files.items():
            size, digest = describe(content)
            blob: dict[str, Any] = {"size": size, "blobId": digest[:40]}
            if is_large(path):
                blob["lfs"] = {"sha256": digest, "size": size, "pointerSize": 130}
            siblings.append({"rfilename": path} | (blob if blobs else {}))
        info = {"id": repository, "sha": commit, "siblings": siblings, "tags": []}
        return json.dumps(info).encode()

    def _resolve(self, handler: Handler, repository: str, revision: str, path: str) -> None:
        commit_and_files = self._revision(handler, repository, revision)
        if commit_and_files is None:
            return
        if not self._allowed(handler, self.gated, repository):
            handler.answer(403, {"X-Error-Code": "GatedRepo"})
            return
        commit, files = commit_and_files
        if path not in files:
            handler.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        size, digest = describe(files[path])
        key = f"/{digest}"
        self.cdn.files[key] = self.files[key] = files[path]
        common = {"X-Repo-Commit": commit}
        if not is_large(path):
            self.tags[key] = f'"{digest[:40]}"'
            self.serve(handler, key, common)
            return
        self.resolved += 1
        common |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(size)}
        handler.answer(302, {**common, "Location": self.cdn.sign(key)}, b"redirecting")


class Cdn(Site):
    """Serves every client with a signature; a signature is valid for a number of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.good_for = 10**9
        self._left: dict[str, int] = {}

    def sign(self, path: str) -> str:
        signature = f"s{len(self._left)}"
        self._left[signature] = self.good_for
        return f"{self.url}{path}?signature={signature}"

    def respond(self, handler: Handler) -> None:
        assert "Authorization" not in handler.headers, "a login left its origin"
        (signature,) = parse_qs(urlsplit(handler.path).query)["signature"]
        self._left[signature] -= 1
        if self._left[signature] < 0:
            handler.answer(403, body=b"expired")
            return
        super().respond(handler)


def describe(content: bytes | Path) -> tuple[int, str]:
    """Size and hash; of a sparse file, of its path."""
    if isinstance(content, Path):
        return content.stat().st_size, hashlib.sha256(str(content).encode()).hexdigest()
    return len(content), digest(content)


@functools.lru_cache(maxsize=64)
def digest(content: bytes) -> str:
    """Kept, since every request for a file asks for it."""
    return hashlib.sha256(content).hexdigest()


def is_large(path: str) -> bool:
    return path.endswith((".safetensors", ".bin"))


@contextlib.contextmanager
def serving(kind: type[Site] = Site) -> Iterator[Any]:
    """A server for the length of a block."""
    site = kind()
    try:
        yield site
    finally:
        site.close()


@contextlib.contextmanager
def serving_bert() -> Iterator[Site]:
    """A server with a small BERT under ``/m``."""
    with serving() as site:
        site.files |= {f"/m/{name}": content for name, content in bert_folder().items()}
        yield site


def stand_in(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a hub be the public one."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextlib.contextmanager
def own_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that stands in for the public one, with an empty cache and no login."""
    with serving(Hub) as server:
        stand_in(server, monkeypatch)
        for name, value in {
            "HF_HUB_OFFLINE": False,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_ASSETS_CACHE": str(tmp_path / "assets"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_DISABLE_XET": True,
        }.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WQK_CACHE", "WQK_CACHE_LIMIT"):
            monkeypatch.delenv(name, raising=False)
        limits = patience.Patience(first=0.01, longest=0.05)
        monkeypatch.setattr(patience, "PATIENCE", limits)
        yield server
    close_session()


BERT = sizes(128, 4, 4, intermediate_size=512, vocab_size=2000)
BERT |= {"model_type": "bert", "architectures": ["BertModel"]}


def query(layer: int) -> str:
    return f"encoder.layer.{layer}.attention.self.query.weight"


@functools.cache
def bert_weights(seed: int = 0) -> Mapping[str, np.ndarray]:
    """A small BERT's tensors, named and shaped as on the hub."""
    dice = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (0.05 * dice.standard_normal(shape)).astype(np.float32)

    tensors, width = {"embeddings.word_embeddings.weight": draw(2000, 128)}, 128
    for layer in range(4):
        at = f"encoder.layer.{layer}"
        for role in ("query", "key", "value"):
            tensors[f"{at}.attention.self.{role}.weight"] = draw(width, width)
            tensors[f"{at}.attention.self.{role}.bias"] = draw(width)
        tensors[f"{at}.attention.output.dense.weight"] = draw(width, width)
        tensors[f"{at}.intermediate.dense.weight"] = draw(4 * width, width)
        tensors[f"{at}.output.dense.weight"] = draw(width, 4 * width)
    return MappingProxyType(tensors)


def assert_bert(checkpoint: Any, *names: str, seed: int = 0) -> None:
    """It holds the small BERT's tensors: those that are named, or all and no others."""
    expected = bert_weights(seed)
    assert names or checkpoint.tensors().keys() == expected.keys()
    arrays = checkpoint.read([Part(name) for name in names or expected])
    for name, array in zip(names or expected, arrays, strict=True):
        np.testing.assert_array_equal(array, expected[name])


def query_key_bytes(tensors: Mapping[str, np.ndarray]) -> int:
    """Bytes of queries and keys, weights and biases."""
    return sum(t.nbytes for name, t in tensors.items() if re.search(r"self\.(query|key)\.", name))


@functools.cache
def bert_folder(seed: int = 0) -> Mapping[str, bytes | Path]:
    """A repository's files."""
    weights = save(dict(bert_weights(seed)))
    return MappingProxyType(
        {"config.json": json.dumps(BERT).encode(), "model.safetensors": weights}
    )


def sharded_folder(seed: int = 0, shards: int = 3) -> dict[str, bytes | Path]:
    tensors = bert_weights(seed)
    names = sorted(tensors)
    files: dict[str, bytes | Path] = {"config.json": json.dumps(BERT).encode()}
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        files[file] = save({name: tensors[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    return files


def wait_until(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
