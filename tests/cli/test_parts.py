"""``wqk parts`` on a saved model and a folder of tokens."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
import transformers
from tests.command import refuse, run
from tests.small import sizes

from wqk_lab.training.corpus import CorpusOptions, build_corpus


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("parts")
    lines = [f"{number} fish, {number + 1} fish\n" for number in range(60)]
    Path(folder, "text.txt").write_text("".join(lines))
    options = CorpusOptions(text="characters", document="line", held_out=30)
    store = build_corpus([folder / "text.txt"], folder / "corpus", options)
    torch.manual_seed(0)
    architecture = sizes(16, 2, 2, intermediate_size=16, vocab_size=store.vocabulary_size)
    config = transformers.BertConfig(**architecture, max_position_embeddings=16)
    transformers.BertForMaskedLM(config).save_pretrained(folder / "model")
    return str(folder / "model"), str(folder / "corpus")


def test_a_table_and_a_picture(places: tuple[str, str], tmp_path: Path) -> None:
    model, corpus = places
    options = ("--corpus", corpus, "--blocks", "8", "--each-layer", "--each-head", "--rank", "2")
    result = run("parts", model, *options, "--curves", "--picture", str(tmp_path / "parts.png"))
    for phrase in ("symmetric", "rank 2", "Masks and position terms stay whole", "16 tokens"):
        assert phrase in result.stdout
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


def test_json_has_every_row(places: tuple[str, str]) -> None:
    model, corpus = places
    options = ("parts", model, "--corpus", corpus, "--blocks", "8")
    value = json.loads(run(*options, "--json").stdout)
    assert value["predicts"] == "masked"
    assert [row["part"] for row in value["shares"]][:4] == ["whole", "none", "half", "symmetric"]
    assert abs(value["settings"]["explained_untrained"]) < 0.01
    rows = list(csv.DictReader(run(*options, "--csv").stdout.splitlines()))
    assert rows == [
        {name: "" if cell is None else str(cell) for name, cell in row.items()}
        for row in value["shares"]
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give one of text, corpus and tokens"),
        (("--stack", "cross", "--corpus", "CORPUS"), "come from different sequences"),
        (("--corpus", "CORPUS", "--block", "99"), "the model has 16 positions"),
        (("--text", "CORPUS/none.txt"), "cannot be read as text"),
    ],
)
def test_what_is_refused_is_one_line(places, options, message):
    model, corpus = places
    stderr = refuse("parts", model, *(option.replace("CORPUS", corpus) for option in options))
    assert message in stderr
