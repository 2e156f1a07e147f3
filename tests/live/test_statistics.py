"""Statistics of attention by head, next to the same from whole matrices in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wqk.live.calls import Band, ObservedCall
from wqk.live.statistics import BlockLogits, HeadStatistics

BATCH, HEADS, TOKENS, WIDTH = 2, 3, 40, 8


def expected(call: ObservedCall, visible: torch.Tensor) -> BlockLogits:
    """Statistics from the matrix of all logits."""
    logits = (call.queries.double() @ call.keys.double().mT * call.scale).transpose(0, 1)
    visible = visible.expand(BATCH, HEADS, TOKENS, TOKENS).transpose(0, 1)
    columns: list[list[float]] = [[] for _ in BlockLogits._fields]
    for of_head, shown in zip(logits, visible, strict=True):
        values = of_head[shown]
        weights = of_head.masked_fill(~shown, -torch.inf).softmax(-1)[shown.any(-1)]
        numbers = (
            values.max(),
            values.std(correction=0),
            torch.special.entr(weights).sum(-1).mean(),
            weights.amax(-1).mean(),
            values[values.abs().argmax()],
            weights[:, 0].mean(),
        )
        for column, number in zip(columns, numbers, strict=True):
            column.append(float(number))
    return BlockLogits(*map(np.array, columns))


@pytest.mark.parametrize("shift", [0.0, -120.0, 1000.0])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-11)], ids=["f32", "f64"]
)
@pytest.mark.parametrize("masked", ["not", "causal", "randomly"])
def test_statistics_are_those_of_the_whole_matrix(
    masked: str, dtype: torch.dtype, tolerance: float, shift: float
) -> None:
    """Also where all logits of a head lie far from zero, so that squares alone would cancel."""
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(
        2, BATCH, HEADS, TOKENS, WIDTH, generator=generator, dtype=torch.float64
    ).to(dtype)
    queries[..., 0], keys[..., 0] = shift, 1.0
    visible = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    call = ObservedCall(operation="test", queries=queries, keys=keys, scale=0.5)
    if masked == "causal":
        visible = visible.tril()
        call = ObservedCall(
            operation="test", queries=queries, keys=keys, scale=0.5, band=Band(None, 0)
        )
    elif masked == "randomly":
        visible = torch.rand(BATCH, 1, TOKENS, TOKENS, generator=generator) > 0.5
        visible[..., 0] = True
        visible[:, :, 5] = False  # a query that sees no key
        call = ObservedCall(operation="test", queries=queries, keys=keys, scale=0.5, mask=visible)
    statistics = HeadStatistics(HEADS, "cpu")
    statistics.add(call)
    reference = expected(call, visible)
    for name, measured in statistics.result()._asdict().items():
        size = max(1.0, abs(shift) / 100) * tolerance
        np.testing.assert_allclose(
            measured, getattr(reference, name), rtol=size, atol=size, err_msg=name
        )


def test_a_hidden_key_counts_nothing_even_if_it_is_infinite() -> None:
    queries = torch.rand(1, 1, 4, WIDTH)
    keys = torch.rand(1, 1, 4, WIDTH)
    keys[:, :, 3] = torch.inf
    mask = torch.tensor([True, True, True, False])[None, None, None]
    statistics = HeadStatistics(1, "cpu")
    statistics.add(ObservedCall(operation="test", queries=queries, keys=keys, mask=mask))
    largest = (queries[:, :, :3] @ keys[:, :, :3].mT).max()
    assert float(statistics.result().max_logit[0]) == pytest.approx(float(largest))
