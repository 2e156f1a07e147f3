"""The folder in which a corpus is built: locked, and taken up again after an interruption.

::

    .DIR.building/
    ├── lock             held while a build runs here; names the process
    ├── plan.json        sources and options; another plan starts anew
    ├── texts/           shards of documents, as read: text, its hash, and where it was
    ├── read.json        all has been read
    ├── tokenizer.json   the vocabulary is there
    └── tokens/          one file for each shard

Each file appears whole or not at all, and a file that is there is done.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import polars as pl

from wqk._files import locked, unwritable, write_whole
from wqk.errors import CorpusError, WqkError
from wqk.training.corpus.writing import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# What the disk may say at any step.
UNREADABLE = (OSError, ValueError, KeyError, BadZipFile, pl.exceptions.PolarsError)


class Work:
    """What has been done of a build so far; made by `open_work`.

    Attributes
    ----------
    folder
        Next to the one that is built.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def described(self) -> list[dict[str, Any]] | None:
        """What was read from each source, once all has been."""
        path = self.folder / "read.json"
        return list(json.loads(path.read_bytes())) if path.exists() else None

    def note_described(self, sources: list[dict[str, Any]]) -> None:
        """All has been read."""
        write_whole(self.folder / "read.json", json.dumps(sources).encode())

    def tokenizer(self) -> str | None:
        """The tokenizer, once it is there."""
        path = self.folder / "tokenizer.json"
        return path.read_text(encoding="utf-8") if path.exists() else None

    def note_tokenizer(self, content: str) -> None:
        """The vocabulary has been learned, or read."""
        write_whole(self.folder / "tokenizer.json", content.encode())

    def texts(self) -> list[Path]:
        """Shards of documents that have been read, in order."""
        return sorted((self.folder / "texts").glob("[0-9]*.parquet"))

    def load_texts(self, shard: Path, *columns: str) -> pl.DataFrame:
        """A shard's ``text``, ``hash``, ``source`` and ``row``."""
        with self._whole(shard):
            # Read at once rather than mapped: what is not there must be noticed here.
            return pl.read_parquet(io.BytesIO(shard.read_bytes()), columns=list(columns) or None)

    def save_texts(self, frame: pl.DataFrame) -> None:
        """Add a shard."""
        content = io.BytesIO()
        frame.write_parquet(content, compression="zstd", compression_level=1)
        write_whole(self.folder / "texts" / f"{len(self.texts()):06}.parquet", content.getvalue())

    def tokens(self, shard: Path) -> Path:
        """Where the tokens of a shard lie, once they are there."""
        return self.folder / "tokens" / f"{shard.stem}.npz"

    def save_tokens(self, shard: Path, chunks: Mapping[str, Chunk]) -> None:
        """Keep the tokens of a shard, for each split."""
        arrays = {
            f"{split}_{name}": value
            for split, chunk in chunks.items()
            for name, value in vars(chunk).items()
        }
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_whole(self.tokens(shard), content.getvalue())

    def load_tokens(self, shard: Path, split: str) -> Chunk:
        """The tokens of a shard."""
        path = self.tokens(shard)
        with self._whole(path), np.load(io.BytesIO(path.read_bytes())) as file:
            tokens, lengths, characters = (
                file[f"{split}_{name}"] for name in ("tokens", "lengths", "characters")
            )
            return Chunk(tokens, lengths, int(characters))

    def chunks(self, split: str) -> Iterator[Chunk]:
        """All tokens of a split, shard by shard."""
        return (self.load_tokens(shard, split) for shard in self.texts())

    @contextmanager
    def _whole(self, path: Path) -> Iterator[None]:
        try:
            yield
        except UNREADABLE:
            raise CorpusError(
                f"{path}: damaged; delete {self.folder} and build the corpus again"
            ) from None


@contextmanager
def open_work(folder: Path, plan: Mapping[str, Any]) -> Iterator[Work]:
    """The folder next to ``folder`` in which it is built; it is gone in the end if that exists.

    Raises
    ------
    RunError
        Another process builds there.
    OutputError
        The folder cannot be made.
    """
    folder = folder.resolve()
    place = folder.parent / f".{folder.name}.building"
    with locked(place / "lock", "build"), _removed_if_empty(place):
        wanted = json.dumps(plan, sort_keys=True).encode()
        try:
            if not (place / "plan.json").exists() or (place / "plan.json").read_bytes() != wanted:
                _clear(place)
            for name in ("texts", "tokens"):
                (place / name).mkdir(exist_ok=True)
            # What a kill has left of files that were being written.
            for left in (*place.glob(".*.*"), *place.glob("t*/.*")):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        except OSError as error:
            raise unwritable(place, error) from None
        write_whole(place / "plan.json", wanted)
        work = Work(place)
        try:
            yield work
        except WqkError:
            if not work.texts():
                _clear(place)
            raise
        _clear(place)


def _clear(place: Path) -> None:
    """Take away everything but the lock; the plan first, so that no rest passes for a build."""
    (place / "plan.json").unlink(missing_ok=True)
    for path in place.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


@contextmanager
def _removed_if_empty(place: Path) -> Iterator[None]:
    """Remove a folder in which nothing but the lock is left."""
    try:
        yield
    finally:
        if [entry.name for entry in place.iterdir()] == ["lock"]:
            with contextlib.suppress(OSError):
                (place / "lock").unlink()
                place.rmdir()
