"""The program that takes the symmetric start apart: each arm has its declared effect."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

STARTS = Path(__file__).parents[3] / "examples" / "starts.py"


@pytest.fixture(scope="module")
def starts() -> dict[str, Any]:
    return runpy.run_path(str(STARTS))


def test_all_arms_have_heads_of_one_norm(starts: dict[str, Any]) -> None:
    norms = []
    for arm in starts["ARMS"].values():
        model, _ = starts["build"](arm, 3)
        layer = model.bert.encoder.layer[0].attention.self
        norms.append(starts["head_norm"](layer) if not arm.tied else norms[0])
    assert max(norms) / min(norms) == pytest.approx(1, abs=1e-5)


def test_the_excess_is_what_the_symmetric_start_adds(starts: dict[str, Any]) -> None:
    tokens = torch.randint(2, 60, (4, starts["BLOCK"]), generator=torch.Generator().manual_seed(0))
    excess = starts["excess"](3, tokens)
    assert excess.shape == (starts["SMALL"].layers, starts["HEADS"])
    assert excess.mean() > 0.1
    # A random start has none, and the negated one its opposite where it reads the same vectors.
    for name, expected in (("random", 0 * excess[0]), ("negated", -excess[0])):
        model, scores = starts["build"](starts["ARMS"][name], 3)
        scores.measured = []
        with torch.no_grad():
            model(input_ids=tokens)
        torch.testing.assert_close(scores.measured[0], expected, atol=0.25, rtol=0)


@pytest.mark.parametrize("name", ["self-bias", "same-token", "tied", "skew part"])
def test_an_arm_changes_its_logits_alone(starts: dict[str, Any], name: str) -> None:
    arm = starts["ARMS"][name]
    model, scores = starts["build"](arm, 0)
    attention = model.bert.encoder.layer[0].attention.self
    if arm.tied:
        x = torch.randn(2, 5, starts["SMALL"].width)
        torch.testing.assert_close(attention.key(x), attention.query(x))
        return
    scores.added.data.fill_(50.0)
    q, k = torch.randn(2, 1, starts["HEADS"], starts["BLOCK"], 8)
    scores.tokens = torch.arange(starts["BLOCK"])[None] % 4
    value = torch.eye(starts["BLOCK"]).expand(1, starts["HEADS"], -1, -1)
    weights = scores.attend(attention, q, k, value, None)[0].transpose(1, 2)
    if name == "skew part":
        logits = q @ k.mT / 8**0.5
        torch.testing.assert_close(weights, ((logits - logits.mT) / 2).softmax(-1))
        return
    equal = scores.tokens[0][:, None] == scores.tokens[0]
    expected = torch.eye(starts["BLOCK"]).bool() if name == "self-bias" else equal
    assert weights[0, 0][expected].sum() == pytest.approx(starts["BLOCK"], rel=1e-4)


def test_larger_models_have_the_same_arms(starts: dict[str, Any]) -> None:
    recipe = starts["Recipe"](layers=3, width=64, rate=1e-3)
    model, scores = starts["build"](starts["ARMS"]["tied"], 0, recipe)
    layers = model.bert.encoder.layer
    assert (len(layers), layers[2].attention.self.query.weight.shape) == (3, (64, 64))
    assert scores.added.shape == (3, starts["HEADS"])
