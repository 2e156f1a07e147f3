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
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.errors import CorpusError, required_by

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER, TOKENIZER = "store.json", "tokenizer.json"
FORMAT, VERSION = "wqk token store", 1
UNITS = ("words", "characters", "tokenizer")
SPLITS = ("train", "held_out")

# Headers have a few kilobytes; a larger file is something else.
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Split:
    """One part of a store: counts, with separators among the tokens, and hashes of the files."""

    tokens: int
    documents: int
    characters: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True, repr=False)
class TokenStore:
    r"""Tokens of a corpus, on disk; opened by `TokenStore.open`. Needs no PyTorch.

    Examples
    --------
    >>> import tempfile
    >>> from wqk_lab.training.corpus import CorpusOptions, build_corpus
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

    folder: Path
    unit: str  #: The kind of token: ``words``, ``characters``, or that of a given ``tokenizer``.
    vocabulary_size: int  #: Number of ids, including special ids.
    #: Ids of ``padding``, ``mask``, ``unknown`` and ``separator``, if any.
    special: Mapping[str, int]
    tokenizer_sha256: str
    splits: Mapping[str, Split]  #: Counts and hashes of ``train`` and ``held_out``.
    #: Source and processing of the text; not part of the fingerprint.
    about: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        train = self.splits["train"]
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
            Folder written by ``wqk lab corpus``.

        Raises
        ------
        CorpusError
            The store does not exist, or is damaged. `verify` checks the contents.
        """
        store = _read(Path(folder))
        for split in SPLITS:
            for kind in ("tokens", "documents"):
                path, (dtype, count) = store._path(split, kind), store._format(split, kind)
                try:
                    actual = path.stat().st_size
                except OSError as error:
                    raise _damaged(path, f"cannot be read ({error.strerror})") from None
                if actual != (expected := count * dtype.itemsize):
                    raise _damaged(path, f"expected {expected} bytes, got {actual}")
        if not store.tokenizer.is_file():
            raise _damaged(store.folder, f"{TOKENIZER} is missing")
        return store

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all data that a model reads: 64 digits, equal for equal data."""
        content = {k: v for k, v in asdict(self).items() if k not in ("folder", "about")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def header(self) -> dict[str, Any]:
        """The contents of ``store.json``."""
        content = {name: value for name, value in asdict(self).items() if name != "folder"}
        dtype = token_dtype(self.vocabulary_size).name
        identity = {"format": FORMAT, "version": VERSION, "fingerprint": self.fingerprint}
        return identity | {"dtype": dtype} | content

    @property
    def tokenizer(self) -> Path:
        """The file ``tokenizer.json``, as the tokenizers library reads it."""
        return self.folder / TOKENIZER

    def tokens(self, split: str = "train") -> NDArray[np.uint16] | NDArray[np.uint32]:
        """Return the tokens of a split in one dimension: read-only and memory-mapped.

        Raises
        ------
        CorpusError
            The split does not exist, or the file is missing.
        """
        return self._map(split, "tokens")

    def documents(self, split: str = "train") -> NDArray[np.int64]:
        """Return the offsets of the documents of a split, followed by the end of the split.

        The array has one entry more than there are documents: ``splits[split].documents`` is their
        number, and ``numpy.diff`` of the offsets their lengths in tokens, with separators.

        Raises
        ------
        CorpusError
            The split does not exist, or the offsets do not ascend from 0 to the end of the split.
        """
        offsets = self._map(split, "documents")
        end = self.splits[split].tokens
        ascending = bool((offsets[1:] >= offsets[:-1]).all())
        if not ascending or offsets[0] != 0 or offsets[-1] != end:
            rule = f"expected ascending offsets from 0 to {end}"
            raise _damaged(self._path(split, "documents"), rule)
        return offsets

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some tokens; special tokens appear by name, such as ``[SEP]``.

        Characters are restored exactly, except characters outside the alphabet; words are
        normalized by WordPiece.

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
        hashes = {self.tokenizer: self.tokenizer_sha256}
        for split, about in self.splits.items():
            hashes[self._path(split, "tokens")] = about.tokens_sha256
            hashes[self._path(split, "documents")] = about.documents_sha256
        for path, expected in hashes.items():
            if sha256(path) != expected:
                raise _damaged(path, "its content does not match the header's SHA-256")
        for split in SPLITS:
            tokens, documents = self.tokens(split), self.documents(split)
            if tokens.size and tokens.max() >= self.vocabulary_size:
                rule = f"holds the id {tokens.max()}, expected less than {self.vocabulary_size}"
                raise _damaged(self._path(split, "tokens"), rule)
            separator = self.special.get("separator")
            if separator is not None and (tokens[documents[1:] - 1] != separator).any():
                rule = f"a document does not end with the separator ({separator})"
                raise _damaged(self._path(split, "documents"), rule)

    def _path(self, split: str, kind: str) -> Path:
        return self.folder / f"{split}.{kind}"

    def _format(self, split: str, kind: str) -> tuple[np.dtype[Any], int]:
        """Return type and number of entries of a split's file of ``tokens`` or ``documents``."""
        if split not in self.splits:
            raise CorpusError(f"{split!r}: no such split; splits are {', '.join(SPLITS)}")
        if kind == "tokens":
            return token_dtype(self.vocabulary_size), self.splits[split].tokens
        return np.dtype("<i8"), self.splits[split].documents + 1

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

    @cached_property
    def _decoder(self) -> Any:
        with required_by("decoding"):
            from tokenizers import Tokenizer
        try:
            return Tokenizer.from_file(str(self.tokenizer))
        except Exception as error:  # the library raises nothing narrower
            raise _damaged(self.tokenizer, f"cannot be used ({error})") from None


def token_dtype(vocabulary_size: int) -> np.dtype[Any]:
    """Return the type of a vocabulary's ids on disk: two little-endian bytes if they suffice."""
    return np.dtype("<u2" if vocabulary_size <= 65_535 else "<u4")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits; `CorpusError` if unreadable."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror})") from None


def _read(folder: Path) -> TokenStore:
    """Return the store described in a folder's header; `CorpusError` for a wrong header."""
    path = folder / HEADER
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES)
        fields = json.loads(content, parse_constant=lambda name: _expect(False, f"got {name}"))
        _expect(isinstance(fields, dict), "expected a JSON object")
        _expect(fields["format"] == FORMAT, f"expected the format {FORMAT!r}")
        _expect(fields["version"] == VERSION, f"this wqk reads version {VERSION} of the format")
        _expect(fields["unit"] in UNITS, f"unit: expected one of {', '.join(UNITS)}")
        _expect(isinstance(fields["about"], dict), "about: expected an object")
        splits = {name: Split(**fields["splits"][name]) for name in SPLITS}
        field_names = ("unit", "vocabulary_size", "special", "tokenizer_sha256", "about")
        values = {name: fields[name] for name in field_names}
        store = TokenStore(folder, splits=splits, **values)
        size, ids = store.vocabulary_size, store.special.values()
        counts = [size, *ids]
        for split in store.splits.values():
            counts += (split.tokens, split.documents, split.characters)
        counted = all(type(count) is int and 0 <= count < 1 << 62 for count in counts)
        _expect(counted, "a count is out of range")
        _expect(0 < size <= 1 << 32, "vocabulary_size: expected 1 to 2^32")
        _expect(all(id < size for id in ids), "special: expected smaller ids")
        same = json.dumps(fields, sort_keys=True) == json.dumps(store.header, sort_keys=True)
        _expect(same, "the fingerprint does not match")
    except FileNotFoundError:
        raise CorpusError(
            f"{folder}: not a token store (it has no {HEADER}); make one with wqk lab corpus"
        ) from None
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _damaged(path, f"not the header of a token store ({error})") from None
    return store


def _expect(good: bool, rule: str) -> None:
    if not good:
        raise ValueError(rule)


def _damaged(path: Path, problem: str) -> CorpusError:
    return CorpusError(f"{path}: {problem}; build the store again")
