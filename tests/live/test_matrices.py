"""Attention matrices are those that the model returns with eager attention, from every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.live.models import gpt2, llama

import wqk
from wqk.errors import CheckpointError

BATCH = {
    "input_ids": torch.arange(16).reshape(2, 8),
    "attention_mask": torch.tensor([[1] * 8, [1] * 5 + [0] * 3]),
}


def returned(model: Any) -> list[np.ndarray]:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return [
            attention.numpy() for attention in model(**BATCH, output_attentions=True).attentions
        ]


@pytest.mark.filterwarnings("ignore")  # of FlexAttention that is not compiled
@pytest.mark.parametrize(
    ("make", "kernel"),
    [(gpt2, "eager"), (gpt2, "sdpa"), (llama, "sdpa"), (llama, "flex_attention")],
)
def test_they_are_those_that_eager_attention_returns(make: Any, kernel: str) -> None:
    model = make().double().eval()
    expected = returned(model)
    model.set_attn_implementation(kernel)
    attention = wqk.attention_matrices(model, BATCH, sequences=None)
    assert len(attention) == 2
    for layer, matrix in enumerate(expected):
        np.testing.assert_allclose(
            attention[layer], matrix, atol=1e-6
        )  # Llama's softmax is in float32
    assert wqk.attention_matrices(model, BATCH, layers=[1])[1].shape == (1, 4, 8, 8)
    np.testing.assert_array_equal(attention["decoder", "self", 1], attention[1])
    np.testing.assert_array_equal(attention[np.int64(1)], attention[1])
    assert attention.frame["keys"].to_list() == [8, 8]
    assert len(attention.plot(0).axes) == 4


def test_tiles_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama().double().eval()
    expected = returned(model)
    model.set_attn_implementation("sdpa")
    untiled = wqk.attention_matrices(model, BATCH, sequences=None)
    monkeypatch.setattr("wqk.live.calls.CACHED_TILE", 64)
    for layer, matrix in enumerate(expected):
        tiled = wqk.attention_matrices(model, BATCH, sequences=None)[layer]
        np.testing.assert_allclose(tiled, matrix, atol=1e-6)
        np.testing.assert_allclose(tiled, untiled[layer], atol=1e-12)


def test_a_block_that_runs_twice_has_two_matrices() -> None:
    layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, _ = self.attention(x, x, x)
            return self.attention(x, x, x)[0]

    attention = wqk.attention_matrices(Twice().eval(), torch.randn(1, 5, 32))
    (runs,) = attention.blocks.values()
    assert [run.shape for run in runs] == [(1, 4, 5, 5)] * 2
    (name,) = attention.blocks
    with pytest.raises(CheckpointError, match="ran 2 times; expected one run"):
        attention[name]


def test_memory_is_bounded_and_wrong_requests_are_refused() -> None:
    model = llama()
    with pytest.raises(CheckpointError, match="take over 1,000 bytes"):
        wqk.attention_matrices(model, BATCH, largest=1000)
    with pytest.raises(CheckpointError, match=r"layers: \[7\] are missing; expected some of \[0"):
        wqk.attention_matrices(model, BATCH, layers=[7])
    with pytest.raises(CheckpointError, match="the batch is missing"):
        wqk.attention_matrices(model)
    with pytest.raises(CheckpointError, match="sequences must be 1 or more"):
        wqk.attention_matrices(model, BATCH, sequences=0)
    with pytest.raises(CheckpointError, match="no attention was observed"):
        wqk.attention_matrices(torch.nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(CheckpointError, match="attention of 5: 0 blocks of this name"):
        wqk.attention_matrices(model, BATCH)[5]


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_scores_that_are_not_numbers_are_not_shown_as_zeros(kernel: str) -> None:
    model = llama().eval()
    model.set_attn_implementation(kernel)
    torch.nn.init.constant_(model.layers[1].self_attn.q_proj.weight, float("nan"))
    attention = wqk.attention_matrices(model, BATCH)
    assert np.isfinite(attention[0]).all()
    assert np.isnan(attention[1][:, :, 0, 0]).all()


def test_a_query_without_keys_has_weights_of_zero() -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, mask)

    (matrix,) = wqk.attention_matrices(Masked(), torch.randn(1, 2, 5, 4)).blocks[""]
    np.testing.assert_allclose(matrix.sum(-1), [[[0, 1, 1, 1, 1]] * 2], rtol=1e-6)


def test_a_block_whose_keys_are_those_around_each_query_has_no_matrix() -> None:
    from transformers import LongformerConfig, LongformerModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = LongformerConfig(**sizes, intermediate_size=32, vocab_size=50, attention_window=[4])
    attention = wqk.attention_matrices(LongformerModel(config).eval(), torch.arange(2, 14)[None])
    assert not attention.blocks
    assert attention.missing == {
        ("encoder", "self", 0): "its keys are those around each query, so it has no matrix"
    }


def test_a_block_that_does_not_run_is_named() -> None:
    model = llama().eval()
    opened = wqk.open(model)
    model.config.num_hidden_layers = 1  # of two
    attention = wqk.attention_matrices(opened, BATCH)
    assert list(attention.blocks) == [("decoder", "self", 0)]
    assert attention.missing == {("decoder", "self", 1): "no attention of its heads was observed"}
