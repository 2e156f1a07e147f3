"""A small corpus, and what trains on it: here, or in a child that can be killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.lab.training.making import make_store, tiny

from wqk.tables.run import Run
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.recipe import Recipe
from wqk_lab.training.training import train

Order = Callable[..., tuple[int, str]]
Train = Callable[..., Run]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return make_store(tmp_path_factory.mktemp("corpus") / "store", seed=1)


@pytest.fixture
def trained(corpus: TokenStore, tmp_path: Path) -> Train:
    """Train a small recipe in a folder of this name; any field can be said otherwise."""

    def make(name: str = "run", preset: str = "fast", **recipe: Any) -> Run:
        return train(tiny(preset, **recipe), corpus.folder, tmp_path / name)

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
        order = {"recipe": recipe.to_json(), "corpus": str(corpus.folder), "folder": str(folder)}
        assert helper.stdin
        assert helper.stdout
        helper.stdin.write(json.dumps(order | {"touch": touch, "most": most}) + "\n")
        helper.stdin.flush()
        code, message = json.loads(helper.stdout.readline())
        return code, message

    with helper:
        yield send
        assert helper.stdin
        helper.stdin.close()
