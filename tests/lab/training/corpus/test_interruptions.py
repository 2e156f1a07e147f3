"""A build that ends early leaves nothing behind; a store appears once it is whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.lab.training.corpus.samples import sentences, write_jsonl

from wqk.errors import CorpusError, OutputError
from wqk_lab.training.corpus import CorpusOptions, CorpusProgress, build_corpus


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("stage", ["reading", "learning", "tokenizing", "writing"])
def test_a_build_that_is_stopped_leaves_nothing(text_file, tmp_path, stage):
    def stop(progress: CorpusProgress) -> None:
        assert not (tmp_path / "store").exists()
        if progress.stage == stage:
            raise KeyboardInterrupt

    options = CorpusOptions(vocabulary=300, held_out=20)
    with pytest.raises(KeyboardInterrupt):
        build_corpus([text_file], tmp_path / "store", options, on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_an_error_in_the_text_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", sentences(20), field="body")
    with pytest.raises(CorpusError, match="has no 'text'"):
        build_corpus([path], tmp_path / "store")
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.jsonl"]


def test_a_folder_that_cannot_be_made_is_named(text_file: Path) -> None:
    for folder in (text_file, Path("/proc/nothing")):
        with pytest.raises(OutputError, match="cannot be written"):
            build_corpus([text_file], folder / "store")
