"""Options of a corpus: all settings that, with the text, determine the tokens."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from wqk.errors import CorpusError
from wqk_lab.training.declared import checked, option

# Of BERT, and of the paper (Table S1).
VOCABULARY_SIZE = 30_522
# Leaves room for single characters and special tokens.
FEWEST_PIECES = 100
# With the four special tokens, 128 ids.
ALPHABET = 124

# Held out by default: this share of the documents, but at least 16, or an eighth of fewer than 128.
HELD_OUT, LEAST_HELD_OUT = 0.01, 16

optional = partial(option, default=None)


@dataclass(frozen=True)
class CorpusOptions:
    """Options for turning text into tokens; the fields are the options of ``wqk lab corpus``.

    Attributes
    ----------
    text
        Tokens are word pieces, or characters.
    vocabulary
        vocab.txt, or how many word pieces to learn.  [default: 30522]
    tokenizer
        A tokenizer.json, or the Hub model whose tokenizer to use.
    characters
        Size of the alphabet.  [default: 124]
    lower
        Remove capitals and accents, or keep them.  [default: words lower, characters cased]
    held_out
        Held-out documents: a fraction or a number.  [default: 1 %]
    field
        Column or field with the text.  [default: text]
    document
        How plain text is split into documents.  [default: file, or paragraph for a single file]
    subset
        Configuration of a Hub data set.
    split
        Split of a Hub data set.  [default: train]
    max_documents
        Stop after this many documents.
    max_characters
        Stop after this many characters.

    Raises
    ------
    CorpusError
        A value is out of range, or two options contradict each other.
    """

    text: str = option(default="words", choices=("words", "characters"))
    vocabulary: str | os.PathLike[str] | int | None = optional(metavar="FILE|SIZE")  # noqa: RUF009
    tokenizer: str | os.PathLike[str] | None = optional(metavar="FILE|ID")  # noqa: RUF009
    characters: int | None = optional(least=1, metavar="N")
    lower: bool | None = optional(flags="--lower/--cased")
    held_out: float | None = optional(metavar="SHARE|N")
    field: str | None = optional(metavar="NAME")
    document: str | None = optional(choices=("file", "paragraph", "line"))
    subset: str | None = optional(metavar="NAME")
    split: str | None = optional(metavar="NAME")
    max_documents: int | None = optional(least=1, metavar="N")
    max_characters: int | None = optional(least=1, metavar="N")

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            value = os.fspath(value) if isinstance(value, os.PathLike) else value
            object.__setattr__(self, entry.name, checked(entry, value, CorpusError))
        if self.tokenizer is not None:
            self._excludes("tokenizer", "vocabulary", "characters", "lower")
        if self.text == "characters":
            self._excludes("text", "vocabulary", "tokenizer")
        else:
            self._excludes("text", "characters")
        if isinstance(self.vocabulary, int) and self.vocabulary < FEWEST_PIECES:
            raise CorpusError(f"vocabulary={self.vocabulary} must be at least {FEWEST_PIECES}")
        held_out = self.held_out
        if held_out is not None and not (
            0 <= held_out < 1 or (held_out >= 1 and held_out.is_integer())
        ):
            raise CorpusError(
                f"held_out={held_out} must be a fraction below 1 or a number of documents"
            )
        if held_out is not None and (held_out >= 1 or not held_out):
            object.__setattr__(self, "held_out", int(held_out))

    @property
    def unit(self) -> str:
        """The kind of token."""
        return self.text if self.tokenizer is None else "tokenizer"

    @property
    def lowered(self) -> bool:
        """True to remove capitals and accents; by default for words only."""
        return self.unit == "words" if self.lower is None else self.lower

    @property
    def vocabulary_file(self) -> Path | None:
        """The local file with the vocabulary or the tokenizer; None without a file."""
        named = self.tokenizer if self.tokenizer is not None else self.vocabulary
        if not isinstance(named, str) or (named == self.tokenizer and not Path(named).exists()):
            return None
        return Path(named, "tokenizer.json") if Path(named).is_dir() else Path(named)

    def count_held_out(self, documents: int) -> int:
        """Return the number of documents to hold out.

        Examples
        --------
        >>> [CorpusOptions().count_held_out(documents) for documents in (10_000, 200)]
        [100, 16]
        >>> [CorpusOptions(held_out=some).count_held_out(10) for some in (0.2, 3)]
        [2, 3]
        """
        if self.held_out is None:
            smallest = min(LEAST_HELD_OUT, documents // 8)
            return max(math.ceil(HELD_OUT * documents), smallest, 1)
        if self.held_out >= 1 or self.held_out == 0:
            return int(self.held_out)
        return max(1, round(self.held_out * documents))

    def about(self) -> dict[str, Any]:
        """Return the options for the header, with the names of files instead of their paths."""
        shown = vars(self) | {"lower": self.lowered if self.tokenizer is None else None}
        if self.vocabulary_file is not None:
            field_name = "vocabulary" if self.tokenizer is None else "tokenizer"
            shown[field_name] = self.vocabulary_file.name
        return shown

    def _excludes(self, name: str, *excluded: str) -> None:
        for excluded_name in excluded:
            if (value := getattr(self, excluded_name)) is not None:
                raise CorpusError(
                    f"{name}={getattr(self, name)} and {excluded_name}={value} contradict each "
                    "other; leave one of them out"
                )
