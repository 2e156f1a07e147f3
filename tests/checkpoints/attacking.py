"""Faults of a server towards a client that trusts it: one by name, or any number by a die."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from itertools import repeat
from random import Random
from typing import Any

from tests.checkpoints.serving import Handler, part, silence, status

Fault = Callable[[Handler], bool]


def one_byte(handler: Handler) -> bool:
    """Answer with the first byte of the range, and call that a range."""
    path, start, _ = handler.asked_range()
    handler.headers.replace_header("Range", f"bytes={start}-{start}")
    handler.site.serve(handler, path)
    return True


def dripping(handler: Handler) -> bool:
    """Send a header that does not end, byte by byte."""
    return _trickle(handler, b"HTTP/1.1 206 Partial Content\r\nX-Long: ", repeat(b"a"))


def interim(handler: Handler) -> bool:
    """Send interim answers without an end."""
    return _trickle(handler, b"", repeat(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"))


def slow_body(handler: Handler) -> bool:
    """Send the body byte by byte."""
    path, start, stop = handler.asked_range()
    content = handler.site.read(path, start, stop)
    header = (
        "HTTP/1.1 206 Partial Content\r\n"
        f"Content-Range: bytes {start}-{stop - 1}/{handler.site.size(path)}\r\n"
        f"ETag: {handler.site.tag(path)}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return _trickle(handler, header.encode(), (bytes([byte]) for byte in content))


def _trickle(handler: Handler, start: bytes, pieces: Iterable[bytes]) -> bool:
    """Send the start, and then piece by piece until the test is over."""
    with contextlib.suppress(OSError):
        handler.wfile.write(start)
        for piece in pieces:
            if handler.site.released.wait(0.05):
                break
            handler.wfile.write(piece)
            handler.wfile.flush()
    handler.close_connection = True
    return True


def redirect(target: str, code: int = 302) -> Fault:
    """Answer that it lies elsewhere."""
    return status(code, Location=target)


NUMBERS = ("", "0", "-1", "x", "1e9", "9" * 5000, "99999999999999999999", "\x80")
TAGS = ("", '"other"', 'W/"weak"', '"' + "x" * 5000 + '"')
RANGES = (
    "",
    "bytes",
    "bytes */5",
    "bytes 0-0/0",
    "bytes 5-1/9",
    "bytes 0-7/" + "9" * 5000,
    "items 0-7/9",
)
DATES = ("Mon, 01 Jan 2024 00:00:00 +99999999", "soon", "Sun, 99 Foo 0000 99:99:99 GMT")
PLACES = (
    "http://[::1",
    "//",
    "http://",
    "file:///etc/passwd",
    "ftp://127.0.0.1/x",
    "",
    "\x80",
    "?",
    "http://127.0.0.1:99999/x",
    "https://127.0.0.1:1/",
    "/nowhere",
    "../" * 50,
    "x" * 9000,
)
ENCODINGS = ("gzip", "identity, gzip", "br", "")


def random_fault(dice: Random, slow: bool = False) -> Fault:
    """One of the faults above, or an answer with some of its headers wrong."""
    kind = dice.randrange(8 if slow else 5)
    if kind == 0:
        code = dice.choice(
            [200, 204, 206, 304, 400, 401, 403, 404, 410, 416, 418, 429, 500, 503, 999]
        )
        return status(code, Retry_After=dice.choice([*NUMBERS[:5], *DATES]))
    if kind == 1:
        return redirect(dice.choice(PLACES), dice.choice([301, 302, 303, 307, 308]))
    if kind == 2:
        return one_byte
    if kind > 4:
        return [dripping, interim, slow_body, silence][dice.randrange(4)]
    headers = {
        "Content_Length": dice.choice(NUMBERS),
        "Content_Range": dice.choice(RANGES),
        "ETag": dice.choice(TAGS),
        "Last_Modified": dice.choice(DATES),
        "Content_Encoding": dice.choice(ENCODINGS),
        "Transfer_Encoding": dice.choice(["chunked", "x"]),
    }
    chosen = dice.sample(sorted(headers), dice.randrange(3))
    return part(
        sent=dice.choice([None, None, 0, 1, 100]),
        code=dice.choice([206, 206, 200]),
        shift=dice.choice([0, 0, 1, -1]),
        total=dice.choice([None, None, 7, "9" * 5000]),
        **{name: headers[name] for name in chosen},
    )


NONSENSE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**63,
    10**400,
    1e308,
    "",
    "12",
    "x" * 5000,
    [],
    {},
    [None],
    {"a": []},
    "../../etc/passwd",
    "a\x00b",
    "\ud800",
    "-" * 40,
    float("nan"),
)


def mutated(value: Any, dice: Random) -> Any:
    """A listing with nonsense at one place of it."""
    changed = copy.deepcopy(value)
    at = changed
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        key = dice.choice(list(keys))
        if not isinstance(at[key], dict | list) or not at[key] or dice.random() < 0.2:
            break
        at = at[key]
    if dice.random() < 0.2:
        del at[key]
    else:
        at[key] = dice.choice(NONSENSE)
    return changed
