"""A token store: a folder of tokens that can be memory-mapped.

::

    DIR/
    ├── store.json            the header: unit, vocabulary, counts, SHA-256 of each file, sources
    ├── tokenizer.json        turns text into these tokens and back
    ├── train.tokens          little-endian uint16 (uint32 beyond 65,535 ids), one stream
    ├── train.documents       little-endian int64: where each document begins, and the end
    ├── held_out.tokens
    └── held_out.documents

Every document ends with the separator token, if the vocabulary has one: document i, with its
separator, is ``tokens[documents[i]:documents[i + 1]]``. ``held_out`` and ``train`` share no
document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.errors import CorpusError, required_by
from wqk.training.corpus.header import SPLITS, STORED, Header, read_header

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER, TOKENIZER = "store.json", "tokenizer.json"


class TokenStore:
    r"""Tokens of a corpus, on disk; made by `TokenStore.open`. Needs no PyTorch.

    Attributes
    ----------
    folder
        The store's folder.
    header
        The contents of ``store.json``.

    Examples
    --------
    >>> import tempfile
    >>> from wqk.training.corpus import CorpusOptions, build_corpus
    >>> options = CorpusOptions(text="characters", document="paragraph", held_out=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     text = Path(folder, "text.txt")
    ...     _ = text.write_text("one fish\n\ntwo fish\n\nred fish\n\nblue fish\n")
    ...     store = build_corpus([text], Path(folder, "store"), options)
    ...     tokens, documents = store.tokens("train"), store.documents("train")
    ...     store.decode(tokens[: documents[1]])
    'one fish[SEP]'
    >>> tokens.dtype, len(documents) - 1, store.special["mask"]
    (dtype('uint16'), 3, 1)
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.folder = folder
        self.header = header

    def __repr__(self) -> str:
        train = self.header.splits["train"]
        return (
            f"TokenStore({str(self.folder)!r}, {self.unit}, {train.documents:,} documents, "
            f"{train.tokens:,} tokens)"
        )

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> TokenStore:
        """Open a store on disk, and check its header and file sizes.

        Parameters
        ----------
        folder
            As written by ``wqk corpus``.

        Raises
        ------
        CorpusError
            There is no store, or it is damaged. `verify` checks the contents.
        """
        path = Path(folder)
        store = cls(path, read_header(path / HEADER))
        for split in SPLITS:
            for kind in ("tokens", "documents"):
                store._check_size(split, kind)
        if not (path / TOKENIZER).is_file():
            raise CorpusError(f"{path}: {TOKENIZER} is missing; build the store again")
        return store

    @property
    def unit(self) -> str:
        """The kind of token: ``words``, ``characters``, or ``tokenizer`` for a given one."""
        return self.header.unit

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, special ones included."""
        return self.header.vocabulary_size

    @property
    def special(self) -> Mapping[str, int]:
        """Ids of ``padding``, ``mask``, ``unknown`` and ``separator``, where they exist."""
        return self.header.special

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits, equal for stores in which a model sees the same data."""
        return self.header.fingerprint

    @property
    def tokenizer(self) -> Path:
        """The file ``tokenizer.json``, as the tokenizers library reads it."""
        return self.folder / TOKENIZER

    def tokens(self, split: str = "train") -> NDArray[np.uint16] | NDArray[np.uint32]:
        """The tokens of a split in one dimension: read-only and memory-mapped.

        Raises
        ------
        CorpusError
            There is no such split, or the file is missing.
        """
        return self._map(split, "tokens")

    def documents(self, split: str = "train") -> NDArray[np.int64]:
        """Offsets at which the documents of a split begin, followed by its end.

        Raises
        ------
        CorpusError
            There is no such split, or the offsets do not ascend from 0 to its end.
        """
        offsets = self._map(split, "documents")
        end = self.header.splits[split].tokens
        ascending = bool((offsets[1:] >= offsets[:-1]).all())
        if not ascending or offsets[0] != 0 or offsets[-1] != end:
            raise CorpusError(
                f"{self._path(split, 'documents')}: expected ascending offsets from 0 to {end}; "
                "build the store again"
            )
        return offsets

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some tokens; special ones appear by name, such as ``[SEP]``.

        Characters are restored exactly, except those outside the alphabet; words as WordPiece
        normalizes them.

        Raises
        ------
        CorpusError
            An id outside the vocabulary, or ``tokenizer.json`` is damaged.
        MissingPackage
            The tokenizers library is not installed.
        """
        numbers = np.asarray(ids if isinstance(ids, np.ndarray) else list(ids), dtype=np.int64)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.vocabulary_size:
            raise CorpusError(
                f"ids to decode: expected 0 to {self.vocabulary_size - 1}, got "
                f"{numbers.min()} to {numbers.max()}"
            )
        return str(self._decoder.decode(numbers.ravel().tolist(), skip_special_tokens=False))

    def verify(self) -> None:
        """Read every file and compare it with the header.

        Raises
        ------
        CorpusError
            A file differs from the header, or violates the format.
        """
        self._compare(self.tokenizer, self.header.tokenizer_sha256)
        for split, about in self.header.splits.items():
            self._compare(self._path(split, "tokens"), about.tokens_sha256)
            self._compare(self._path(split, "documents"), about.documents_sha256)
            tokens, documents = self.tokens(split), self.documents(split)
            if tokens.size and tokens.max() >= self.vocabulary_size:
                raise CorpusError(
                    f"{self._path(split, 'tokens')}: holds the id {tokens.max()}, expected less "
                    f"than {self.vocabulary_size}; build the store again"
                )
            separator = self.special.get("separator")
            if separator is not None and (tokens[documents[1:] - 1] != separator).any():
                raise CorpusError(
                    f"{self._path(split, 'documents')}: a document does not end with the "
                    f"separator ({separator}); build the store again"
                )

    def _path(self, split: str, kind: str) -> Path:
        return self.folder / f"{split}.{kind}"

    def _format(self, split: str, kind: str) -> tuple[np.dtype[Any], int]:
        """Type and number of what the file of a split's ``tokens`` or ``documents`` holds."""
        if split not in self.header.splits:
            raise CorpusError(f"{split!r}: no such split; splits are {', '.join(SPLITS)}")
        about = self.header.splits[split]
        if kind == "tokens":
            return np.dtype(STORED[self.header.dtype]), about.tokens
        return np.dtype("<i8"), about.documents + 1

    def _check_size(self, split: str, kind: str) -> None:
        path, (dtype, count) = self._path(split, kind), self._format(split, kind)
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise CorpusError(
                f"{path}: cannot be read ({error.strerror}); build the store again"
            ) from None
        if actual != (expected := count * dtype.itemsize):
            raise CorpusError(
                f"{path}: expected {expected} bytes, got {actual}; build the store again"
            )

    def _map(self, split: str, kind: str) -> NDArray[Any]:
        path, (dtype, count) = self._path(split, kind), self._format(split, kind)
        if not count:  # an empty file cannot be mapped
            empty = np.empty(0, dtype)
            empty.flags.writeable = False
            return empty
        try:
            return np.memmap(path, dtype, mode="r", shape=(count,))
        except (OSError, ValueError) as error:
            raise CorpusError(f"{path}: cannot be mapped ({error})") from None

    @staticmethod
    def _compare(path: Path, expected: str) -> None:
        if sha256(path) != expected:
            raise CorpusError(
                f"{path}: its content does not match the header's SHA-256; build the store again"
            )

    @cached_property
    def _decoder(self) -> Any:
        with required_by("decoding"):
            from tokenizers import Tokenizer
        try:
            return Tokenizer.from_file(str(self.tokenizer))
        except Exception as error:  # the library raises nothing narrower
            raise CorpusError(
                f"{self.tokenizer}: cannot be used ({error}); build the store again"
            ) from None


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits; CorpusError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror})") from None
