"""Small corpora for the tests, and what is compared between stores."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

from wqk_lab.training.corpus import TokenStore

WORDS = [
    *("the", "a", "cat", "dog", "fish", "sees", "likes", "of", "and", "not,", "(very)", "big"),
    *("café", "Zürich", "naïve", "猫", "12", "3.5"),
]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Different documents of 3 to 40 words, with punctuation, accents, digits and line ends."""
    draw = random.Random(seed)
    return [
        f"{number} " + " ".join(draw.choices(WORDS, k=draw.randint(2, 39))) + draw.choice(".!\n")
        for number in range(count)
    ]


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a store, byte for byte."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(store: TokenStore, split: str) -> list[str]:
    """The texts of a split; separators must be where documents end, and nowhere else."""
    tokens, offsets = store.tokens(split), store.documents(split)
    separator = store.special["separator"]
    assert (tokens == separator).nonzero()[0].tolist() == [end - 1 for end in offsets[1:]]
    return [store.decode(tokens[start : end - 1]) for start, end in itertools.pairwise(offsets)]
