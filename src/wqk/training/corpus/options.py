"""Options of a corpus: everything besides the text that determines its tokens."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wqk.errors import CorpusError
from wqk.training.corpus.reading import DOCUMENTS
from wqk.training.corpus.store import sha256

# Of BERT, and of the paper (Table S1).
VOCABULARY_SIZE = 30_522
# Leaves room for single characters and special tokens.
FEWEST_PIECES = 100
# With the four special tokens, 128 ids.
ALPHABET = 124

# Held out by default: this share, but at least this many documents if there are 8 times as many.
HELD_OUT, FEWEST_HELD_OUT = 0.01, 16


@dataclass(frozen=True)
class CorpusOptions:
    """How text becomes tokens.

    Attributes
    ----------
    text
        ``words`` (WordPiece, as in BERT) or ``characters``.
    vocabulary
        For words: a ``vocab.txt``, or the number of pieces to learn; 30,522 by default.
    tokenizer
        A ``tokenizer.json``, or a Hub model that has one, instead of words or characters.
    characters
        Size of the alphabet, the most common characters; 124 by default.
    lower
        Whether to remove capitals and accents; by default for words only.
    held_out
        Share or number of documents to hold out; by default 1 %, but no less than 16 of 128 or
        more. They are chosen by a hash of the text, so that equal documents stay together.
    field
        Field or column with the text in JSON, CSV, Parquet or a data set; ``text`` by default.
    document
        What a document is in plain text: ``file``, ``paragraph`` or ``line``.
    subset, split
        Of Hub data sets; ``split`` is ``train`` by default.
    max_documents, max_characters
        Stop reading after the document that reaches this limit.

    Raises
    ------
    CorpusError
        A value is out of range, or two options contradict each other.
    """

    text: str = "words"
    vocabulary: str | os.PathLike[str] | int | None = None
    tokenizer: str | os.PathLike[str] | None = None
    characters: int | None = None
    lower: bool | None = None
    held_out: float | None = None
    field: str | None = None
    document: str = "file"
    subset: str | None = None
    split: str | None = None
    max_documents: int | None = None
    max_characters: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocabulary", "tokenizer"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        _one_of("text", self.text, ("words", "characters"))
        _one_of("document", self.document, DOCUMENTS)
        if self.tokenizer is not None:
            self._excludes("tokenizer", "vocabulary", "characters", "lower")
        if self.text == "characters":
            self._excludes("text", "vocabulary", "tokenizer")
        else:
            self._excludes("text", "characters")
        if isinstance(self.vocabulary, int):
            _at_least("vocabulary", self.vocabulary, FEWEST_PIECES)
        for name in ("characters", "max_documents", "max_characters"):
            _at_least(name, getattr(self, name), 1)
        some = self.held_out
        if some is not None and not (0 <= some < 1 or (some >= 1 and float(some).is_integer())):
            raise CorpusError(
                f"held_out must be a fraction below 1 or a number of documents, got held_out={some}"
            )
        if some is not None and (some >= 1 or not some):
            object.__setattr__(self, "held_out", int(some))

    @property
    def unit(self) -> str:
        """The kind of token."""
        return self.text if self.tokenizer is None else "tokenizer"

    @property
    def lowered(self) -> bool:
        """Whether to remove capitals and accents: by default for words only."""
        return self.unit == "words" if self.lower is None else self.lower

    @property
    def vocabulary_file(self) -> Path | None:
        """The local file with the vocabulary or the tokenizer, if one was given."""
        named = self.tokenizer if self.tokenizer is not None else self.vocabulary
        if not isinstance(named, str) or (named == self.tokenizer and not Path(named).exists()):
            return None
        return Path(named, "tokenizer.json") if Path(named).is_dir() else Path(named)

    def count_held_out(self, documents: int) -> int:
        """How many of this many documents to hold out.

        Examples
        --------
        >>> [CorpusOptions().count_held_out(documents) for documents in (10_000, 200)]
        [100, 16]
        >>> [CorpusOptions(held_out=some).count_held_out(10) for some in (0.2, 3)]
        [2, 3]
        """
        if self.held_out is None:
            few = min(FEWEST_HELD_OUT, documents // 8)
            return max(math.ceil(HELD_OUT * documents), few, 1)
        if self.held_out >= 1 or self.held_out == 0:
            return int(self.held_out)
        return max(1, round(self.held_out * documents))

    def about(self) -> dict[str, Any]:
        """The options for the header, with the names of files instead of their paths."""
        shown = vars(self) | {"lower": self.lowered if self.tokenizer is None else None}
        if self.vocabulary_file is not None:
            given = "vocabulary" if self.tokenizer is None else "tokenizer"
            shown[given] = self.vocabulary_file.name
        return shown

    def state(self) -> Mapping[str, Any]:
        """State for resuming a build: options, and the content of the files that they name."""
        file = self.vocabulary_file
        return vars(self) | {"content": sha256(file) if file else None}

    def _excludes(self, name: str, *others: str) -> None:
        for other in others:
            if (value := getattr(self, other)) is not None:
                raise CorpusError(
                    f"{name}={getattr(self, name)} and {other}={value} contradict each other; "
                    "leave one of them out"
                )


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise CorpusError(f"{name} must be one of {', '.join(choices)}, got {name}={value}")


def _at_least(name: str, value: int | None, fewest: int) -> None:
    if value is not None and value < fewest:
        raise CorpusError(f"{name} must be at least {fewest}, got {name}={value}")
