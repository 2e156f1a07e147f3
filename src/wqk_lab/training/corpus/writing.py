"""Write a token store: chunks of tokens to a folder that appears atomically."""

from __future__ import annotations

import errno
import json
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._files import sync
from wqk.errors import CorpusError
from wqk_lab.training.corpus.store import (
    HEADER,
    SPLITS,
    TOKENIZER,
    Split,
    TokenStore,
    sha256,
    token_dtype,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True)
class TokenChunk:
    """Tokens of consecutive documents."""

    tokens: NDArray[np.integer[Any]]  #: Ids in one dimension, including separators.
    lengths: NDArray[np.integer[Any]]  #: Tokens of each document; they add up to all tokens.
    characters: int = 0  #: Of the documents' text.


def write_store(
    folder: str | PathLike[str],
    splits: Mapping[str, Iterable[TokenChunk]],
    *,
    unit: str,
    vocabulary_size: int,
    special: Mapping[str, int],
    tokenizer: bytes,
    about: Mapping[str, Any] | None = None,
) -> TokenStore:
    """Write a token store from tokens.

    Parameters
    ----------
    folder
        Folder of the store, new or empty.
    splits
        Chunks of ``train`` and of ``held_out``; a missing split is empty.
    unit, vocabulary_size, special, about
        As in `TokenStore`.
    tokenizer
        Content of ``tokenizer.json``.

    Raises
    ------
    CorpusError
        An id is not smaller than the vocabulary, lengths do not add up, or the folder exists or
        cannot be written.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     store = write_store(
    ...         Path(place, "store"),
    ...         {"train": [TokenChunk(np.array([7, 8, 3, 9, 3]), np.array([3, 2]))]},
    ...         unit="characters", vocabulary_size=10, special={"separator": 3}, tokenizer=b"{}",
    ...     )
    ...     store.verify()
    ...     store.tokens("train").tolist(), store.documents("train").tolist()
    ([7, 8, 3, 9, 3], [0, 3, 5])
    """
    path = Path(folder)
    target = path.resolve()
    growing = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        growing.mkdir(parents=True)
        try:
            (growing / TOKENIZER).write_bytes(tokenizer)
            digest = _synced(growing / TOKENIZER)
            parts = {
                name: _write_split(growing, name, splits.get(name, ()), vocabulary_size)
                for name in SPLITS
            }
            store = TokenStore(
                path, unit, vocabulary_size, dict(special), digest, parts, dict(about or {})
            )
            content = json.dumps(store.header, ensure_ascii=False, indent=1) + "\n"
            (growing / HEADER).write_text(content, "utf-8")
            _synced(growing / HEADER)
            sync(growing)
            growing.rename(target)
        finally:
            shutil.rmtree(growing, ignore_errors=True)
        sync(target.parent)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise CorpusError(f"{path}: already exists; choose another folder") from None
        raise CorpusError(f"{path}: cannot be written ({error.strerror})") from None
    return store


def _write_split(
    folder: Path, name: str, chunks: Iterable[TokenChunk], vocabulary_size: int
) -> Split:
    """Write both files of a split, chunk by chunk."""
    dtype = token_dtype(vocabulary_size)
    total = documents = characters = 0
    paths = folder / f"{name}.tokens", folder / f"{name}.documents"
    with paths[0].open("xb") as tokens, paths[1].open("xb") as offsets:
        offsets.write(np.zeros(1, "<i8").tobytes())
        for chunk in chunks:
            ids, lengths = chunk.tokens, chunk.lengths
            if ids.size and not 0 <= ids.min() <= ids.max() < vocabulary_size:
                raise CorpusError(
                    f"tokens: expected ids from 0 to {vocabulary_size - 1}, got {ids.min()} to "
                    f"{ids.max()}"
                )
            if (lengths < 0).any() or lengths.sum() != len(ids):
                raise CorpusError(
                    f"documents: expected lengths that add up to {len(ids)} tokens, got "
                    f"{lengths.sum()}"
                )
            tokens.write(ids.astype(dtype).tobytes())
            offsets.write((total + np.cumsum(lengths, dtype="<i8")).astype("<i8").tobytes())
            total += len(ids)
            documents += len(lengths)
            characters += chunk.characters
    return Split(total, documents, characters, *map(_synced, paths))


def _synced(path: Path) -> str:
    """Wait until a file is on the disk; return its SHA-256."""
    sync(path)
    return sha256(path)
