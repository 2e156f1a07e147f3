"""The folder in which a corpus is built: locked, and resumable.

::

    .DIR.building/
    ├── lock             held while a build runs here; names the process
    ├── plan.json        sources and options; a different plan starts over
    ├── texts/           shards of documents: text, its hash, and its source
    ├── read.json        counts of each source; all of them have been read
    ├── tokenizer.json   the vocabulary
    └── tokens/          the tokens of each shard's documents, in order

Each file appears whole or not at all, so an existing file is complete.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from wqk._files import locked, unwritable, write_atomically
from wqk.errors import CorpusError, WqkError


@dataclass(frozen=True)
class Work:
    """The folder of a build, opened by `open_work`."""

    folder: Path

    def once(self, name: str, make: Callable[[], str]) -> str:
        """The content of a small file, which is made if it does not exist."""
        path = self.folder / name
        if not path.exists():
            write_atomically(path, make().encode())
        return path.read_text("utf-8")

    def shards(self) -> list[Path]:
        """Shards of documents that have been read, in order."""
        return sorted((self.folder / "texts").glob("[0-9]*.parquet"))

    def tokens(self, shard: Path) -> Path:
        """Where the tokens of a shard belong."""
        return self.folder / "tokens" / shard.name

    def load(self, path: Path, *columns: str) -> pl.DataFrame:
        """Columns of a shard, or of its tokens, by default all; CorpusError if it is damaged."""
        try:
            # Read rather than mapped, so that missing bytes are noticed here.
            return pl.read_parquet(io.BytesIO(path.read_bytes()), columns=list(columns) or None)
        except (OSError, pl.exceptions.PolarsError):
            raise CorpusError(
                f"{path}: damaged; delete {self.folder} and build the corpus again"
            ) from None

    def save(self, path: Path, frame: pl.DataFrame) -> None:
        """Write a shard, or its tokens."""
        content = io.BytesIO()
        frame.write_parquet(content, compression="zstd", compression_level=1)
        write_atomically(path, content.getvalue())


@contextmanager
def open_work(folder: Path, plan: Mapping[str, Any]) -> Iterator[Work]:
    """The folder in which ``folder`` is built, next to it; removed when the build has succeeded.

    RunError if another build holds it, OutputError if it cannot be created.
    """
    folder = folder.resolve()
    building = folder.parent / f".{folder.name}.building"
    with locked(building / "lock", "build"), _removed_if_empty(building):
        wanted = json.dumps(plan, sort_keys=True).encode()
        work, noted = Work(building), building / "plan.json"
        try:
            if not noted.exists() or noted.read_bytes() != wanted:
                _clear(building)
            for name in ("texts", "tokens"):
                (building / name).mkdir(exist_ok=True)
            # What a killed build has left of unfinished files.
            for left in (*building.glob(".*.*"), *building.glob("t*/.*")):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        except OSError as error:
            raise unwritable(building, error) from None
        write_atomically(noted, wanted)
        try:
            yield work
        except WqkError:
            if not work.shards():
                _clear(building)
            raise
        _clear(building)


def _clear(building: Path) -> None:
    """Remove everything but the lock; the plan first, so that no remnant is taken for a build."""
    (building / "plan.json").unlink(missing_ok=True)
    for path in building.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


@contextmanager
def _removed_if_empty(building: Path) -> Iterator[None]:
    """Remove the folder if only the lock is left."""
    try:
        yield
    finally:
        if [entry.name for entry in building.iterdir()] == ["lock"]:
            with contextlib.suppress(OSError):
                (building / "lock").unlink()
                building.rmdir()
