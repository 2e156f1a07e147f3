"""Real pretrained weights: verified by running them, and scored as is known of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import wqk
from wqk.live.verification import verify

# Symmetry within and between heads, for each layer.
MINILM = [(0.14, 0.26), (0.08, 0.56), (0.10, 0.48), (0.11, 0.47), (0.01, 0.40), (0.05, 0.20)]
BERT_BASE = [
    (0.10, 0.44), (0.15, 0.46), (-0.08, -0.02), (0.10, 0.48), (0.10, 0.40), (0.05, 0.52),
    (0.05, 0.43), (0.04, 0.57), (0.04, 0.47), (0.09, 0.34), (0.12, 0.26), (0.06, 0.33),
]  # fmt: skip


@pytest.fixture
def minilm(shared: Path) -> Path:
    """sentence-transformers/all-MiniLM-L6-v2, complete, where it was put next to the others."""
    folder = shared / "checkpoints" / "all-MiniLM-L6-v2"
    if not folder.exists():
        pytest.skip(f"needs sentence-transformers/all-MiniLM-L6-v2 in {folder}")
    return folder


def within_and_between(table: wqk.ScoreTable) -> np.ndarray:
    columns = ["symmetry_within_heads", "symmetry_between_heads"]
    return table.layers.frame.select(columns).to_numpy()


def test_minilm_attends_with_the_forms_that_are_scored(minilm: Path) -> None:
    result = verify(minilm, text="The form that is scored is the form that the model attends with.")
    assert result.ok
    assert len(result.blocks) == 6


def test_most_of_minilms_symmetry_lies_between_heads(minilm: Path) -> None:
    np.testing.assert_allclose(within_and_between(wqk.scan(minilm)), MINILM, atol=0.006)
    strongest = [
        np.triu(wqk.coupling(wqk.open(minilm)[layer].heads), 1).max() for layer in range(6)
    ]
    assert max(strongest) == pytest.approx(0.69, abs=0.01)


def test_bert_bases_symmetry_is_split_as_known(shared: Path) -> None:
    table = wqk.scan(shared / "checkpoints" / "bert-base-uncased", heads=False)
    np.testing.assert_allclose(within_and_between(table), BERT_BASE, atol=0.006)
    layers = table.layers.frame
    # Where heads are clearly more, and less, symmetric than the same dimensions assigned at random.
    beyond_chance = layers["symmetry_within_heads"] - layers["symmetry_within_random"]
    assert {n for n, margin in enumerate(beyond_chance) if margin > 0.02} == {0, 1, 3, 4, 9, 10}
    assert beyond_chance[7] < -0.02


@pytest.mark.parametrize("folder", ["stories260k", "llama2xs-260k"])
def test_grouped_heads_of_real_models_are_proven(folder: str, shared: Path) -> None:
    verification = verify(shared / "checkpoints" / folder)
    assert len(verification.blocks) == 5
    assert verification.ok
    assert verification.difference < 1e-12


def test_a_given_text_is_read(shared: Path) -> None:
    assert verify(shared / "checkpoints" / "stories260k", tokens=[1, 403, 407, 261, 378]).ok
