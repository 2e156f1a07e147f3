"""Changes of some rows of a tensor: the rows are named, and the repair changes these rows alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.sameness.mismatches import Kind
from wqk.sameness.tensor_edits import find_scaled_rows

LAYERS, HEADS, WIDTH = 2, 2, 8
NAME = "transformer.h.1.attn.c_attn.weight"

Change = Callable[[np.ndarray], None]


def model(change: Change | None = None) -> StateDict:
    """A model of no known type, whose queries, keys and values are rows of one tensor."""
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        block = f"transformer.h.{layer}.attn"
        tensors[f"{block}.c_attn.weight"] = rng.standard_normal((3 * WIDTH, WIDTH))
        tensors[f"{block}.c_proj.weight"] = rng.standard_normal((WIDTH, WIDTH))
    if change is not None:
        change(tensors[NAME])
    config = {"model_type": "gpt-nano", "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH}
    return StateDict(tensors, config, "m")


def scale_values(weight: np.ndarray) -> None:
    weight[2 * WIDTH :] *= -2


def scale_every_second_pair(weight: np.ndarray) -> None:
    weight[[16, 17, 20, 21]] *= 3


def add_noise_to_values(weight: np.ndarray) -> None:
    weight[2 * WIDTH :] += np.random.default_rng(1).standard_normal((WIDTH, WIDTH))


def change_one_entry(weight: np.ndarray) -> None:
    weight[19, 3] += 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scale_values, "c_attn: rows 16-23 scaled by -2"),
        (scale_every_second_pair, "c_attn: rows 16-17, 20-21 scaled by 3"),
        (add_noise_to_values, "rows 16-23 (neither queries nor keys): relative distance"),
        (
            change_one_entry,
            "(neither queries nor keys): 1 of 64 entries differs, at row 19, column 3",
        ),
    ],
)
def test_the_rows_that_changed_are_named(change: Change, reason: str) -> None:
    comparison = wqk.same(model(), model(change), everything=True)
    assert not comparison.same
    (tensor,) = (tensor for tensor in comparison.tensors if tensor.outcome.differs)
    assert tensor.name == NAME
    assert reason in tensor.reason
    assert reason in comparison.sentence


@pytest.mark.parametrize("change", [scale_values, scale_every_second_pair])
def test_the_repair_changes_these_rows_alone(change: Change) -> None:
    (cause,) = wqk.same(model(), model(change), everything=True).causes
    assert "w[rows] = part" in cause.repair
    assert cause.mismatch.verdict is Kind.SCALED


def test_rows_that_differ_by_rounding_are_not_scaled() -> None:
    weight = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    rounded = weight.copy()
    rounded[2:4] = np.nextafter(rounded[2:4], np.float32(9))
    assert find_scaled_rows(weight, rounded) is None
    assert find_scaled_rows(weight, weight) is None
    columns = weight * np.array([1, 5, 5, 1], np.float32)
    column_edit = find_scaled_rows(weight, columns)
    assert column_edit is not None
    assert column_edit.description == "columns 1-2 scaled by 5"
    np.testing.assert_allclose(column_edit.edit.apply(columns), weight, rtol=1e-6)
