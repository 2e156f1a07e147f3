"""The header of a token store: what its files hold, and the rules that it must obey itself."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from wqk.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT, VERSION = "wqk token store", 1
UNITS = ("words", "characters", "tokenizer")
SPLITS = ("train", "held_out")
STORED = {"uint16": "<u2", "uint32": "<u4"}

# A header is some kilobytes; what is larger is something else.
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Split:
    """One part of a store.

    Attributes
    ----------
    tokens, documents, characters
        How many; separators are among the tokens.
    tokens_sha256, documents_sha256
        Of the two files' bytes.
    """

    tokens: int
    documents: int
    characters: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Header:
    """All that ``store.json`` says.

    Attributes
    ----------
    unit
        What a token is: ``words``, ``characters``, or as a given ``tokenizer`` has it.
    vocabulary_size
        All ids are smaller.
    special
        Ids by role: ``padding``, ``mask``, ``unknown``, ``separator``, as far as there are any.
    tokenizer_sha256
        Of ``tokenizer.json``.
    splits
        ``train`` and ``held_out``.
    about
        Where the text came from, and how it was treated; no part of the fingerprint.
    """

    unit: str
    vocabulary_size: int
    special: Mapping[str, int]
    tokenizer_sha256: str
    splits: Mapping[str, Split]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Of the token files: two bytes a token where the vocabulary allows."""
        return token_dtype(self.vocabulary_size)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides what a model sees."""
        content = {name: value for name, value in asdict(self).items() if name != "about"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> bytes:
        """As the file holds it; equal headers give equal bytes.

        Examples
        --------
        >>> split = Split(3, 1, 2, "00" * 32, "00" * 32)
        >>> header = Header("characters", 128, {"mask": 1}, "00" * 32,
        ...                 {"train": split, "held_out": split})
        >>> from pathlib import Path
        >>> parse(header.to_json(), Path("store.json")) == header
        True
        """
        content = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            **asdict(self),
        }
        return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()


def token_dtype(vocabulary_size: int) -> str:
    """The type of the ids of a vocabulary, little-endian in the files (see `STORED`).

    Examples
    --------
    >>> token_dtype(30_522), STORED[token_dtype(128_256)]
    ('uint16', '<u4')
    """
    return "uint16" if vocabulary_size <= 65_535 else "uint32"


def read_header(path: Path) -> Header:
    """The header in a file.

    Raises
    ------
    CorpusError
        There is no such file, or it is no header.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise CorpusError(
            f"{path.parent}: no token store (it has no {path.name}); make one with wqk corpus"
        ) from None
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror})") from None
    return parse(content, path)


def parse(content: bytes, path: Path) -> Header:
    """A header out of its bytes; ``path`` is for the messages.

    Raises
    ------
    CorpusError
        It breaks one of the rules, which the message names.
    """
    try:
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MB")
        fields = json.loads(content, parse_constant=_no_such_number)
        _expect(isinstance(fields, dict), "expected a JSON object")
        _expect(fields.get("format") == FORMAT, f"expected the format {FORMAT!r}")
        if _count(fields, "version") != VERSION:
            raise CorpusError(
                f"{path}: version {fields['version']} of the format; this wqk reads "
                f"version {VERSION}: build the store again"
            )
        header = _header(fields)
        _expect(fields.get("dtype") == header.dtype, f"expected the dtype {header.dtype!r}")
        _expect(fields.get("fingerprint") == header.fingerprint, "the fingerprint does not fit")
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{path}: not the header of a token store ({error}); build the store again"
        ) from None
    return header


def _header(fields: Mapping[str, Any]) -> Header:
    """The fields that a header is made of, each checked."""
    _expect(fields.get("unit") in UNITS, f"unit: expected one of {', '.join(UNITS)}")
    size = _count(fields, "vocabulary_size")
    _expect(0 < size <= 1 << 32, "vocabulary_size: expected 1 to 2^32")
    special = _object(fields, "special")
    for role in special:
        _expect(_count(special, role) < size, f"{role}: expected an id in the vocabulary")
    splits = _object(fields, "splits")
    _expect(set(splits) == set(SPLITS), f"splits: expected {' and '.join(SPLITS)}")
    return Header(
        fields["unit"],
        size,
        special,
        _digest(fields, "tokenizer_sha256"),
        {name: _split(_object(splits, name)) for name in SPLITS},
        _object(fields, "about"),
    )


def _split(fields: Mapping[str, Any]) -> Split:
    return Split(
        _count(fields, "tokens"),
        _count(fields, "documents"),
        _count(fields, "characters"),
        _digest(fields, "tokens_sha256"),
        _digest(fields, "documents_sha256"),
    )


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    _expect(good, f"{name}: expected a whole number from 0")
    return int(value)  # type: ignore[arg-type]


def _digest(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    good = isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")
    _expect(good, f"{name}: expected 64 hexadecimal digits")
    return str(value)


def _object(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name)
    _expect(isinstance(value, dict), f"{name}: expected an object")
    return dict(value)  # type: ignore[arg-type]


def _expect(good: bool, rule: str) -> None:
    if not good:
        raise ValueError(rule)


def _no_such_number(name: str) -> None:
    raise ValueError(f"{name} is no number of a header")
