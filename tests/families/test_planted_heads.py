"""Forms of known symmetry, through a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.families.architectures import GROUPED, NAMED
from tests.families.proving import edit_tensors, save

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.forms.scores import coupling, head_terms, symmetry
from wqk.live.verification import verify


@pytest.fixture
def planted(tmp_path: Path) -> Block:
    """A layer of 6 heads over 2 key heads, whose forms are planted in a saved model.

    Heads 0 and 1 are symmetric, head 3 is skew, 2 and 4 are each other's transposes across the
    groups, head 5 is zero.
    """
    rng = np.random.default_rng(0)
    width, d = 12, 48
    # Orthonormal columns, so that the heads' norms are those of their cores.
    keys = np.linalg.qr(rng.standard_normal((d, 2 * width)))[0].T.reshape(2, width, d)
    core = rng.standard_normal((width, width))
    queries = np.stack(
        [
            (core + core.T) @ keys[0],
            np.eye(width) @ keys[0],
            keys[1],
            (core - core.T) @ keys[1],
            keys[0],
            0 * keys[1],
        ]
    )
    save(replace(NAMED["llama"], config=GROUPED), tmp_path)

    def plant(tensors: dict[str, Any]) -> dict[str, Any]:
        prefix = "model.layers.1.self_attn"
        return tensors | {
            f"{prefix}.q_proj.weight": torch.tensor(queries.reshape(-1, d)).contiguous(),
            f"{prefix}.k_proj.weight": torch.tensor(keys.reshape(-1, d)).contiguous(),
        }

    edit_tensors(tmp_path, plant)
    checkpoint = open_checkpoint(tmp_path)
    assert verify(tmp_path).ok
    return Block(checkpoint, wqk.open(checkpoint).plans[1])


def test_planted_heads_have_their_known_scores(planted: Block) -> None:
    scores = symmetry(planted.heads).reshape(-1)
    np.testing.assert_allclose(scores[[0, 1, 3]], [1, 1, -1], atol=1e-12)
    assert np.isnan(scores[5])
    pairs = coupling(planted.heads)
    np.testing.assert_allclose([pairs[2, 4], pairs[4, 2]], 1, atol=1e-12)
    np.testing.assert_allclose([pairs[0, 2], pairs[0, 3], pairs[2, 2]], 0, atol=1e-12)


def test_planted_heads_add_up_to_the_known_layer(planted: Block) -> None:
    matrices = [planted[index].dense() for index in range(6)]
    square = np.linalg.norm(sum(matrices)) ** 2
    within = sum(np.trace(m @ m) for m in matrices) / square
    terms = head_terms(planted.heads)
    np.testing.assert_allclose(terms.within, within)
    layer = sum(matrices)
    np.testing.assert_allclose(terms.within + terms.between, np.trace(layer @ layer) / square)
    # The symmetric heads and the transposed pair against the skew one, which is orthogonal to them.
    skew = np.linalg.norm(matrices[3]) ** 2
    np.testing.assert_allclose(symmetry(planted.form), 1 - 2 * skew / square)
