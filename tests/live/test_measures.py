"""Measures over training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.live.models import llama, train_step
from tests.live.test_monitor import dense, same

import wqk


def test_columns_over_training_are_those_of_a_scan(tmp_path: Path) -> None:
    measures = ["spectrum", "ceiling", "bands"]
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = wqk.Monitor(model, tmp_path / "s.jsonl", every=1, measures=measures, per_layer=True)
    monitor(0)
    before = dense(model)
    train_step(model, optimizer, 0)
    logged = monitor(1)
    assert same(monitor.latest, wqk.scan(model, measures=measures))
    layers = monitor.latest.layers.frame
    assert logged["wqk/score_ceiling_median"] == layers["score_ceiling"].median()
    assert logged["wqk/layer_01/score_ceiling"] == layers["score_ceiling"][1]
    assert logged["wqk/layer_00/update_symmetry"] == monitor.updates.layers.frame["symmetry"][0]
    changes = [new - then for new, then in zip(dense(model), before, strict=True)]
    for row in monitor.updates.frame.iter_rows(named=True):
        change = changes[row["layer"]][0 if row["head"] is None else row["head"] + 1]
        assert row["spectral_norm"] == pytest.approx(np.linalg.norm(change, 2), rel=1e-4)


def test_an_unknown_option_of_the_callback(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        wqk.ScoreCallback(tmp_path, evry=3)
