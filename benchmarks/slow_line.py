"""A scan from a hub over a slow line, next to a download of the file and a loop over its tensors.

``python -m benchmarks.slow_line``: a hub on this machine answers at 20 MB/s in all, and lets 80 ms
pass before each answer. Printed are the requests and bytes, the time to the first layer's scores
and to the last, and the share of the time between the first and the last byte of weights in which
the line was busy.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.checkpoints.serving import Hub, serving

import wqk
from benchmarks.generate import BERT_BASE, write_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

REPOSITORY = "benchmark/bert"
CHUNK = 2**14


@dataclass
class Line:
    """A line that all connections share."""

    rate: float  # bytes a second
    delay: float  # seconds before an answer
    free_at: float = 0.0
    sent: list[tuple[float, float, int]] = field(default_factory=list)  # from, to, bytes
    lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, write: Callable[[bytes], Any], body: bytes) -> None:
        """Send a body piece by piece, each when the line is free."""
        for first in range(0, len(body), CHUNK):
            piece = body[first : first + CHUNK]
            with self.lock:
                start = max(time.perf_counter(), self.free_at)
                self.free_at = start + len(piece) / self.rate
                self.sent.append((start, self.free_at, len(piece)))
                done = self.free_at
            time.sleep(max(0.0, done - time.perf_counter()))
            write(piece)

    def busy(self) -> float:
        """Return the share of the time between first and last byte of weights on the line."""
        start = min(begin for begin, _, _ in self.sent)
        stop = max(end for _, end, _ in self.sent)
        return sum(end - begin for begin, end, _ in self.sent) / (stop - start)


class Slowly:
    """Output of a server that sends bodies of weights over a slow line."""

    def __init__(self, file: Any, line: Line) -> None:
        self._file, self._line = file, line
        self.flush, self.close = file.flush, file.close

    closed = False

    def write(self, data: bytes) -> None:
        """Send headers and small bodies at once, and others at the line's pace."""
        if len(data) <= CHUNK:
            self._file.write(data)
        else:
            self._line.send(lambda piece: (self._file.write(piece), self._file.flush()), data)


def slow(hub: Hub, line: Line) -> None:
    """Let a hub and its CDN answer over this line."""
    for site in (hub, hub.cdn):
        handler: Any = site._server.RequestHandlerClass
        set_up, answer = handler.setup, handler.answer

        def connected(self: Any, set_up: Any = set_up) -> None:
            set_up(self)
            self.wfile = Slowly(self.wfile, line)

        def delayed(self: Any, *arguments: Any, answer: Any = answer, **named: Any) -> None:
            time.sleep(line.delay)
            answer(self, *arguments, **named)

        handler.setup, handler.answer = connected, delayed


def scanned() -> tuple[float, float]:
    """Seconds to the first block's rows and to the whole table."""
    start, firsts = time.perf_counter(), []
    wqk.scan(REPOSITORY, on_progress=lambda _: firsts.append(time.perf_counter() - start))
    return firsts[0], time.perf_counter() - start


def looped() -> tuple[float, float]:
    """Return the same with one read after the other, each scored before the next is asked for."""
    start, first = time.perf_counter(), 0.0
    model = wqk.open(REPOSITORY)
    for block in model:
        wqk.scan(model.select(layers=[block.layer]))
        first = first or time.perf_counter() - start
    return first, time.perf_counter() - start


def downloaded() -> tuple[float, float]:
    """Return the same after the hub's own client has downloaded the repository."""
    from huggingface_hub import snapshot_download

    start = time.perf_counter()
    folder = snapshot_download(REPOSITORY)
    firsts: list[float] = []
    wqk.scan(folder, on_progress=lambda _: firsts.append(time.perf_counter() - start))
    return firsts[0], time.perf_counter() - start


WAYS = {
    "`wqk scan`": scanned,
    "one layer after the other": looped,
    "download, then scan": downloaded,
}


def measure(way: str, folder: Path, line: Line) -> str:
    """One row of the table, in a process with a hub and a cache of its own."""
    with serving(Hub) as hub, tempfile.TemporaryDirectory() as cache:
        files = {name: folder / name for name in ("config.json", "model.safetensors")}
        hub.repositories[REPOSITORY] = {"main": files}
        slow(hub, line)
        places = {"HF_ENDPOINT": hub.url, "WQK_CACHE": f"{cache}/wqk", "HF_HOME": f"{cache}/hf"}
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.slow_line", "--way", way],
            env={**os.environ, **places, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        first, total = json.loads(done.stdout)
        requests = len(hub.log) + len(hub.cdn.log)
        sent = hub.bytes_sent + hub.cdn.bytes_sent
    return (
        f"| {way} | {requests} | {sent / 1e6:.1f} MB | {first:.1f} s | {total:.1f} s | "
        f"{100 * line.busy():.0f} % |"
    )


def main() -> None:
    """Print the table; with ``--way``, one way's seconds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rate", type=float, default=20e6, help="bytes a second")
    parser.add_argument("--delay", type=float, default=0.08, help="seconds before an answer")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        wqk.scan(wqk.demo_model("encoder"))  # imports are no part of it
        print(json.dumps(WAYS[options.way]()))
        return
    with tempfile.TemporaryDirectory() as place:
        file = write_checkpoint(Path(place) / "bert", BERT_BASE, spread=True)
        print("| | requests | sent | first layer | all layers | line busy |\n" + "|:--" * 6 + "|")
        for way in WAYS:
            print(measure(way, file, Line(options.rate, options.delay)), flush=True)


if __name__ == "__main__":
    main()
