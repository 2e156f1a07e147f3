"""A small corpus and small recipes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wqk_lab.training.corpus import Chunk, TokenStore, write_store
from wqk_lab.training.recipe import Recipe, make_recipe

VOCABULARY = 40
SPECIAL = {"padding": 0, "mask": 1, "unknown": 2, "separator": 3}

MakeRecipe = Callable[..., Recipe]
Order = Callable[..., tuple[int, str]]


def walk(tokens: int, seed: int) -> np.ndarray:
    """Token numbers that depend on the two before them: something to learn, from both sides."""
    generator = np.random.default_rng(seed)
    steps = generator.choice([1, 2, 5], size=tokens, p=[0.7, 0.2, 0.1])
    return len(SPECIAL) + np.cumsum(steps + np.roll(steps, 1)) % (VOCABULARY - len(SPECIAL))


def one_letter_words(count: int) -> bytes:
    """A tokenizer.json with this many ids: the special tokens, and then letters."""
    names = ["[PAD]", "[MASK]", "[UNK]", "[SEP]", *(chr(97 + n) for n in range(count - 4))]
    vocabulary = {name: number for number, name in enumerate(names)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model}).encode()


def make_store(folder: Path, seed: int) -> TokenStore:
    splits = {
        split: [Chunk(walk(size, seed + number), np.array([size]), size)]
        for number, (split, size) in enumerate({"train": 20_000, "held_out": 2_000}.items())
    }
    return write_store(
        folder,
        splits,
        unit="characters",
        vocabulary_size=VOCABULARY,
        special=SPECIAL,
        tokenizer=one_letter_words(VOCABULARY),
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("corpus") / "store", seed=1)


@pytest.fixture(scope="session")
def other_corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("corpus") / "other", seed=7)


@pytest.fixture(scope="session")
def tiny() -> MakeRecipe:
    """A recipe of milliseconds a step; any field can be said otherwise."""

    def make(preset: str = "fast", **overrides: Any) -> Recipe:
        small: dict[str, Any] = {
            "layers": 2,
            "width": 32,
            "heads": 4,
            "block": 16,
            "batch": 8,
            "accumulation": 1,
            "steps": 12,
            "warmup": 2,
            "log_every": 5,
            "held_out_every": 6,
            "held_out_blocks": 16,
            "score_every": 6,
            "save_every": 4,
            "keep_checkpoints": "last",
        }
        if overrides.get("config"):
            small = {
                name: small[name] for name in small if name not in ("layers", "width", "heads")
            }
        return make_recipe(preset, **{**small, **overrides})

    return make


@pytest.fixture(scope="session")
def order(corpus: TokenStore) -> Iterator[Order]:
    """Train in a child: its exit code, and the error's message.

    It dies at its n-th ``touch`` of the run's files, and finds that a file can have ``most`` bytes;
    neither, where these are 0.
    """
    helper = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("killing.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def send(recipe: Recipe, folder: Path, *, touch: int = 0, most: int = 0) -> tuple[int, str]:
        order = {
            "recipe": recipe.to_json(),
            "corpus": str(corpus.folder),
            "folder": str(folder),
            "touch": touch,
            "most": most,
        }
        assert helper.stdin
        assert helper.stdout
        helper.stdin.write(json.dumps(order) + "\n")
        helper.stdin.flush()
        code, said = json.loads(helper.stdout.readline())
        return code, said

    with helper:
        yield send
        assert helper.stdin
        helper.stdin.close()
