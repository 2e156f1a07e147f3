"""The header of a token store: the contents of its files, and its own invariants."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wqk.errors import CorpusError

FORMAT, VERSION = "wqk token store", 1
UNITS = ("words", "characters", "tokenizer")
SPLITS = ("train", "held_out")
STORED = {"uint16": "<u2", "uint32": "<u4"}

# Headers have a few kilobytes; a larger file is something else.
MOST_BYTES = 16 << 20


@dataclass(frozen=True)
class Split:
    """One part of a store: its counts, with separators among the tokens, and its files' hashes."""

    tokens: int
    documents: int
    characters: int
    tokens_sha256: str
    documents_sha256: str


@dataclass(frozen=True)
class Header:
    """The contents of ``store.json``.

    Attributes
    ----------
    unit
        The kind of token: ``words``, ``characters``, or ``tokenizer`` for a given one.
    vocabulary_size
        Number of ids.
    special
        Ids by role: ``padding``, ``mask``, ``unknown``, ``separator``, where they exist.
    tokenizer_sha256
        SHA-256 of ``tokenizer.json``.
    splits
        ``train`` and ``held_out``.
    about
        Source and processing of the text; not part of the fingerprint.
    """

    unit: str
    vocabulary_size: int
    special: Mapping[str, int]
    tokenizer_sha256: str
    splits: Mapping[str, Split]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """Type of the token files: two bytes per token if the vocabulary allows."""
        return token_dtype(self.vocabulary_size)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines what a model sees."""
        content = {name: value for name, value in asdict(self).items() if name != "about"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The file's contents; equal headers give equal objects.

        Examples
        --------
        >>> split = Split(3, 1, 2, "00" * 32, "00" * 32)
        >>> header = Header("characters", 128, {"mask": 1}, "00" * 32,
        ...                 {"train": split, "held_out": split})
        >>> parse(json.dumps(header.to_json())) == header
        True
        """
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "dtype": self.dtype,
            **asdict(self),
        }


def token_dtype(vocabulary_size: int) -> str:
    """The type of a vocabulary's ids; `STORED` has that of the files, which are little-endian."""
    return "uint16" if vocabulary_size <= 65_535 else "uint32"


def read_header(path: Path) -> Header:
    """The header in a file; CorpusError if it is missing, damaged or of another version."""
    try:
        with path.open("rb") as file:
            return parse(file.read(MOST_BYTES))
    except FileNotFoundError:
        raise CorpusError(
            f"{path.parent}: not a token store (it has no {path.name}); make one with wqk corpus"
        ) from None
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CorpusError(
            f"{path}: not the header of a token store ({error}); build the store again"
        ) from None


def parse(content: bytes | str) -> Header:
    """A header from its JSON; ValueError, or another Python error, if it is invalid."""
    fields = json.loads(content, parse_constant=lambda name: _expect(False, f"got {name}"))
    _expect(isinstance(fields, dict), "expected a JSON object")
    _expect(fields["format"] == FORMAT, f"expected the format {FORMAT!r}")
    _expect(fields["version"] == VERSION, f"this wqk reads version {VERSION} of the format")
    _expect(fields["unit"] in UNITS, f"unit: expected one of {', '.join(UNITS)}")
    _expect(isinstance(fields["about"], dict), "about: expected an object")
    header = Header(
        fields["unit"],
        fields["vocabulary_size"],
        fields["special"],
        fields["tokenizer_sha256"],
        {name: Split(**fields["splits"][name]) for name in SPLITS},
        fields["about"],
    )
    size = header.vocabulary_size
    counts = [size, *header.special.values()]
    for split in header.splits.values():
        counts += (split.tokens, split.documents, split.characters)
    counted = all(type(count) is int and 0 <= count < 1 << 62 for count in counts)
    _expect(counted, "a count is out of range")
    _expect(0 < size <= 1 << 32, "vocabulary_size: expected 1 to 2^32")
    _expect(all(id < size for id in header.special.values()), "special: expected smaller ids")
    same = json.dumps(fields, sort_keys=True) == json.dumps(header.to_json(), sort_keys=True)
    _expect(same, "the fingerprint does not match")
    return header


def _expect(good: bool, rule: str) -> None:
    if not good:
        raise ValueError(rule)
