"""Weights that are put into a stored tensor are taken out of it again; nothing else moves.

Axes: H query heads, G key heads, R head width, D width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wqk.checkpoints import Part, open_checkpoint
from wqk.families.layouts import Projection, put_outputs, sectioned, separate, within_heads

small = st.integers(1, 3)


@st.composite
def projections(draw: Any) -> tuple[Projection, tuple[int, int]]:
    """A projection of any layout, and the shape of the tensor that holds it."""
    key_heads, sharing, width, d = (draw(small) for _ in range(4))
    heads = {"q": key_heads * sharing, "k": key_heads, "v": key_heads}
    role = draw(st.sampled_from("qkv"))
    layout = draw(st.sampled_from(["separate", "within", "sectioned", "grouped", "conv1d"]))
    if layout == "separate":
        shape = (heads[role] * width, d)
        return separate("weight", shape, heads[role]), shape
    if layout == "within":
        shape = (heads[role] * (width + 2), d)
        return within_heads("weight", shape, heads[role], 1, 1 + width), shape
    outputs = sum(heads.values()) * width
    order = "".join(draw(st.permutations("qkv")))
    blocks = key_heads if layout == "grouped" else 1
    shape = (d, outputs) if layout == "conv1d" else (outputs, d)
    roles = sectioned("weight", shape, heads, order, blocks, transposed=layout == "conv1d")
    return roles[role], shape


def taken(projection: Projection, tensor: Any) -> np.ndarray:
    (stored,) = open_checkpoint({"weight": tensor}).read([projection.part])
    return projection.take(stored)


@pytest.mark.parametrize("library", ["numpy", "float64", "float32", "bfloat16"])
@given(projections(), st.integers(0, 2**32 - 1))
def test_put_is_the_inverse_of_take(library, case, seed):
    projection, shape = case
    rng = np.random.default_rng(seed)
    # Whole numbers, which bfloat16 holds exactly.
    before = rng.integers(-99, 99, shape).astype(np.float64)
    weight = rng.integers(100, 199, taken(projection, before).shape).astype(np.float64)
    tensor, values = before.copy(), weight
    if library != "numpy":
        dtype = getattr(torch, library)
        tensor, values = (torch.tensor(array, dtype=dtype) for array in (before, weight))
    projection.put(tensor, values)
    after = tensor if library == "numpy" else tensor.double().numpy()
    np.testing.assert_array_equal(taken(projection, after), weight)
    np.testing.assert_array_equal(after != before, after > 99)
    assert (after > 99).sum() == weight.size


def test_a_bias_goes_where_its_outputs_are():
    bias, part = np.zeros(6), Part("bias", ((4, 6), (1, 2)))
    put_outputs(bias, part.rows, np.array([1.0, 2.0, 3.0]))
    assert bias.tolist() == [0, 3, 0, 0, 1, 2]
    (back,) = open_checkpoint({"bias": bias}).read([part])
    assert back.tolist() == [1, 2, 3]
