"""Singular directions of heads, and the matrix of compositions, against dense products."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tests import small
from tests.command import run

import wqk
from wqk.errors import CheckpointError, TableError

INDUCTION = wqk.demo_model("induction")


def dense(head: wqk.Head, circuit: Literal["qk", "ov"]) -> np.ndarray:
    form = getattr(head, circuit)
    return np.asarray(form.query, np.float64) @ np.asarray(form.key, np.float64).T


@pytest.mark.parametrize("kind", ["q", "k", "v"])
def test_the_matrix_has_the_scores_of_transformer_lens(kind: Literal["q", "k", "v"]) -> None:
    model = wqk.open(INDUCTION)
    matrix = wqk.compose(model).matrix(kind)
    assert np.asarray(matrix).shape == (len(matrix.writers), len(matrix.readers))
    for row, writer in enumerate(matrix.writers):
        for column, reader in enumerate(matrix.readers):
            layer, head = map(int, writer.split("."))
            written = dense(model[layer, head], "ov")
            layer, head = map(int, reader.split("."))
            read = dense(model[layer, head], "ov" if kind == "v" else "qk")
            read = read.T if kind == "k" else read
            score = np.linalg.norm(written @ read)
            score /= np.linalg.norm(written) * np.linalg.norm(read)
            assert matrix.values[row, column] == pytest.approx(score, rel=1e-5)


def test_the_matrix_has_no_numbers_before_the_writer(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    model = small.llama(layers=3, heads=2, key_heads=2, sides="qkvo")
    table = wqk.compose(model)
    matrix = table.matrix("q", "excess")
    assert matrix.writers == ("0.0", "0.1", "1.0", "1.1")
    assert matrix.readers == ("1.0", "1.1", "2.0", "2.1")
    assert np.isnan(matrix.values[2:, :2]).all()
    assert np.isfinite(matrix.values).sum() == 12
    assert len(table.plot(matrix=True).axes) == 3 + 1
    with pytest.raises(TableError, match="no pair of the kind 'q'"):
        wqk.compose(model, kind="k").matrix("q")
    with pytest.raises(TableError, match="no column 'scor'; did you mean 'score'"):
        table.matrix("q", "scor")
    run("compose", INDUCTION, "--matrix", "--picture", tmp_path / "map.svg")
    assert "head that writes</text>" in (tmp_path / "map.svg").read_text("utf-8")


@pytest.mark.parametrize("circuit", ["qk", "ov"])
def test_directions_are_singular_vectors_of_the_dense_form(circuit: Literal["qk", "ov"]) -> None:
    tokens = wqk.tokens(INDUCTION, 1, 2, circuit=circuit, directions=3, top=4)
    model = wqk.open(INDUCTION)
    form = dense(model[1, 2], circuit)
    scale = model[1].plan.score_scale if circuit == "qk" else 1.0
    left, values, _ = np.linalg.svd(scale * form)
    embeddings = model.checkpoint.read([wqk.checkpoints.Part(tokens.embeddings)])[0]
    for place, direction in enumerate(tokens.directions):
        assert direction.singular_value == pytest.approx(values[place], rel=1e-4)
        assert direction.share == pytest.approx(values[place] ** 2 / (values**2).sum(), rel=1e-4)
        along = embeddings @ left[:, place]
        ends = {token.token for token in direction.first.plus}
        assert ends in ({*np.argsort(-along)[:4]}, {*np.argsort(along)[:4]})
        assert len(direction.second.minus) == 4


def test_directions_in_the_command() -> None:
    place = ("tokens", INDUCTION, "--layer", "1", "--head", "2")
    assert "σ" in run(*place, "--directions").output
    printed = run(*place, "--directions", "2", "--csv").stdout
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert {row["direction"] for row in rows} == {"0", "1"}
    assert {row["end"] for row in rows} == {"plus", "minus"}
    assert "did you mean --directions [N]?" in run(*place, "--svd", exits=2).stderr
    with pytest.raises(CheckpointError, match="1 or more"):
        wqk.tokens(INDUCTION, 1, 2, directions=0)
