"""A small corpus, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lab.training.corpus.samples import sentences, write_jsonl

from wqk_lab.training.corpus import CorpusOptions, TokenStore, build_corpus, building


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many shards out of little text."""
    monkeypatch.setattr(building, "SHARD", 2_000)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("text") / "text.jsonl", sentences(200))


@pytest.fixture(scope="session")
def store(text_file: Path) -> TokenStore:
    """Characters; not to be changed."""
    options = CorpusOptions(text="characters", held_out=20)
    return build_corpus([text_file], text_file.parent / "store", options)
