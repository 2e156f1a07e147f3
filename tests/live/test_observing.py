"""Attention is observed whatever computes it, and observing changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from tests.limits import failing
from tests.live.models import bert, gpt2, llama
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import wqk
from wqk.errors import CheckpointError
from wqk.live.calls import ObservedCall
from wqk.live.observing import Observer
from wqk.live.statistics import BlockLogits

HEADS, WIDTH, TOKENS = 4, 32, 12
SCALE = (WIDTH // HEADS) ** -0.5

# Schemas of flash-attn 2.8, and of the kernels that the Hub builds from its sources.
FLASH = (
    "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, "
    "bool causal, int window_size_left, int window_size_right, float softcap, "
    "Tensor? alibi_slopes, bool return_softmax) -> (Tensor, Tensor, Tensor, Tensor)"
)
VARLEN = (
    "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, "
    "Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, "
    "float softmax_scale, bool causal, int window_size_left=-1, int window_size_right=-1, "
    "float softcap=0.0, Tensor? alibi_slopes=None, bool return_softmax=False, "
    "Tensor? block_table=None, Tensor? leftpad_k=None, Tensor? seqused_k=None, "
    "bool zero_tensors=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
HUB = (
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor(out_!)? out_, Tensor? alibi_slopes, "
    "float p_dropout, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool return_softmax, Generator? gen_) -> Tensor[]"
)


@pytest.fixture(scope="module")
def flash() -> Iterator[Any]:
    """Stand-ins of flash kernels, under their schemas, which return values that are not used."""
    library = torch.library.Library("flash_stand_in", "FRAGMENT")
    for schema in (FLASH, VARLEN, HUB):
        library.define(schema)
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward"):
        library.impl(name, lambda q, *rest: (q.clone(),) * 4, "CompositeExplicitAutograd")
    library.impl("fwd", lambda q, *rest: [q.clone()], "CompositeExplicitAutograd")
    yield torch.ops.flash_stand_in
    library._destroy()


class Attention(nn.Module):
    """An attention that no family describes, with the kernel that it is given."""

    def __init__(self, kernel: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.kernel = nn.Linear(WIDTH, 3 * WIDTH), kernel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides = (
            side.unflatten(-1, (HEADS, -1)).transpose(1, 2) for side in self.qkv(x).chunk(3, -1)
        )
        return self.kernel(*sides)


def distances(queries: int, keys: int) -> torch.Tensor:
    return torch.arange(queries)[:, None] - torch.arange(keys)


def causal(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(distances(*scores.shape[-2:]) < 0, -math.inf)


def eager(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention as plain operations, whose scores are changed before the softmax."""
    return lambda q, k, v: change(q @ k.mT * SCALE).softmax(-1) @ v


def inputs() -> torch.Tensor:
    return 3 * torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def only(logits: Any) -> BlockLogits:
    (block,) = logits.blocks.values()
    return block


def compare(kernel: Callable[..., Any], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A kernel shows the attention of plain operations."""
    measures, expected = (
        only(wqk.logits(Attention(attention).double(), inputs().double()))
        for attention in (kernel, eager(change))
    )
    for name in BlockLogits._fields:
        np.testing.assert_allclose(
            getattr(measures, name), getattr(expected, name), rtol=1e-9, err_msg=name
        )


def windowed(scores: torch.Tensor) -> torch.Tensor:
    distance = distances(*scores.shape[-2:])
    return scores.masked_fill((distance < 0) | (distance > 3), -math.inf)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])


def biased(scores: torch.Tensor) -> torch.Tensor:
    return causal(scores - SLOPES[:, None, None] * distances(*scores.shape[-2:]).abs())


def test_plain_operations_show_queries_keys_scale_and_mask() -> None:
    model, x = Attention(eager(causal)).double(), inputs().double()
    q, k, _ = (s.unflatten(-1, (HEADS, -1)).transpose(1, 2) for s in model.qkv(x).chunk(3, -1))
    calls: list[ObservedCall] = []
    with torch.no_grad(), Observer(model, calls.append):
        model(x)
    (call,) = calls
    assert call.path == ""
    assert call.scale == SCALE
    torch.testing.assert_close(call.queries, q, rtol=0, atol=0)
    torch.testing.assert_close(call.keys, k, rtol=0, atol=0)
    (tile,) = call.tiles()
    torch.testing.assert_close(tile.logits, q @ k.mT * SCALE)
    assert torch.equal(tile.visible[0, 0], distances(TOKENS, TOKENS) >= 0)


@pytest.mark.parametrize(
    ("kernel", "change"),
    [
        (functional.scaled_dot_product_attention, lambda scores: scores),
        (lambda *s: functional.scaled_dot_product_attention(*s, is_causal=True), causal),
        (
            lambda *s: functional.scaled_dot_product_attention(
                *s, attn_mask=distances(TOKENS, TOKENS) >= 0
            ),
            causal,
        ),
        (
            lambda *s: functional.scaled_dot_product_attention(
                *s, attn_mask=biased(torch.zeros(HEADS, TOKENS, TOKENS).double())
            ),
            biased,
        ),
    ],
    ids=["plain", "causal", "boolean", "added"],
)
def test_fused_kernels_of_pytorch(kernel: Any, change: Any) -> None:
    compare(kernel, change)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention() -> None:
    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, TOKENS, TOKENS, device="cpu", BLOCK_SIZE=TOKENS
    )

    def added(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return score - SLOPES.double()[h] * (i - j)

    compare(lambda *s: flex_attention(*s, block_mask=mask, score_mod=added), biased)


@pytest.mark.parametrize(
    ("window", "softcap", "slopes", "change"),
    [
        ((-1, -1), 0.0, None, causal),
        ((3, 0), 0.0, None, windowed),
        ((-1, -1), 5.0, None, lambda scores: causal(5 * (scores / 5).tanh())),
        ((-1, -1), 0.0, SLOPES, biased),
    ],
    ids=["causal", "window", "cap", "slopes"],
)
@pytest.mark.parametrize("package", ["flash-attn", "varlen", "hub"])
def test_flash_kernels_of_packages(
    flash: Any, package: str, window: Any, softcap: float, slopes: Any, change: Any
) -> None:
    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (side.transpose(1, 2) for side in (q, k, v))
        ends = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)
        if package == "flash-attn":
            return flash._flash_attn_forward(
                q, k, v, 0.0, SCALE, True, *window, softcap, slopes, False
            )[0]
        if package == "hub":
            return flash.fwd(
                q, k, v, None, slopes, 0.0, SCALE, True, *window, softcap, False, None
            )[0]
        q, k, v = (side.flatten(0, 1) for side in (q, k, v))
        return flash._flash_attn_varlen_forward(
            q, k, v, ends, ends, TOKENS, TOKENS, 0.0, SCALE, True, *window, softcap, slopes
        )[0]

    compare(kernel, change)


@pytest.mark.parametrize("inner", [0, -HEADS, 2 * TOKENS, None])
def test_heads_beside_sequences_are_counted_by_the_innermost_module_that_can(inner: Any) -> None:
    """A number that is none, or that does not divide the axis, is another module's business."""

    def folded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        flat = eager(causal)(*(side.flatten(0, 1) for side in (q, k, v)))
        return flat.unflatten(0, (-1, HEADS))

    def measured(kernel: Callable[..., Any]) -> BlockLogits:
        attention = Attention(kernel).double()
        attention.num_heads = inner
        outer = nn.Sequential(attention)
        outer.n_head = HEADS
        return only(wqk.logits(outer, inputs().double()))

    for name, value in measured(folded)._asdict().items():
        np.testing.assert_allclose(value, getattr(measured(eager(causal)), name), rtol=1e-9)


def test_grouped_heads_of_a_flash_kernel_and_fewer_queries_than_keys(flash: Any) -> None:
    """The last query is in the place of the last key."""
    q, k = torch.randn(1, 5, 4, 8).double(), torch.randn(1, 9, 2, 8).double()

    class Step(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return flash._flash_attn_forward(q, k, k, 0.0, SCALE, True, -1, -1, 0.0, None, False)[0]

    measures = only(wqk.logits(Step(), (q, k)))
    scores = q.transpose(1, 2) @ k.repeat_interleave(2, 2).transpose(1, 2).mT * SCALE
    shown = distances(5, 9) + 4 >= 0
    expected = scores.masked_fill(~shown, -math.inf).amax((0, 2, 3))
    np.testing.assert_allclose(measures.max_logit, expected)


class BiasedByAModule(Attention):
    """An attention whose module of biases runs between the product and the softmax (Swin V2)."""

    def __init__(self) -> None:
        super().__init__(self.attend)
        self.biases = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, HEADS))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = q @ k.mT * SCALE
        distance = distances(*scores.shape[-2:]).to(scores)[..., None]
        return (scores + self.biases(distance).permute(2, 0, 1)).softmax(-1) @ v


def test_a_module_between_the_product_and_the_softmax_hides_nothing() -> None:
    model = BiasedByAModule().double()
    calls: list[ObservedCall] = []
    with torch.no_grad(), Observer(model, calls.append):
        model(inputs().double())
    (call,) = calls
    assert call.queries is not None
    assert float(call.scale) == pytest.approx(SCALE)


def test_a_soft_cap_and_a_sink_are_seen_through() -> None:
    """The logit is what the cap took; the sink takes a share of the attention."""
    sink = torch.ones(1, HEADS, 1, 1).double()

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = causal(5 * (q @ k.mT * SCALE / 5).tanh())
        joined = torch.cat([scores, sink.expand(len(q), HEADS, TOKENS, 1)], -1)
        joined = joined - joined.amax(-1, keepdim=True)
        return joined.softmax(-1)[..., :-1] @ v

    capped = only(wqk.logits(Attention(kernel).double(), inputs().double()))
    plain = only(wqk.logits(Attention(eager(causal)).double(), inputs().double()))
    np.testing.assert_allclose(capped.max_logit, plain.max_logit)
    np.testing.assert_allclose(capped.extreme_logit, plain.extreme_logit)
    assert (capped.first_token_share < plain.first_token_share).all()


def test_the_logit_of_largest_magnitude_keeps_its_sign() -> None:
    x = inputs().double()
    low = Attention(eager(lambda scores: scores)).double()
    with torch.no_grad():
        low.qkv.weight.zero_()
        low.qkv.bias[:WIDTH] = 120**0.5
        low.qkv.bias[WIDTH : 2 * WIDTH] = -(120**0.5) / 8 / SCALE
        low.qkv.bias[:8] = 0.1
    measured = wqk.logits(low, x)
    np.testing.assert_allclose(only(measured).extreme_logit[1:], -120)
    assert "-120" in measured.sentence


def test_a_router_is_no_attention() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.attention = nn.Linear(WIDTH, 5), Attention(eager(causal))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x) * self.router(x).softmax(-1)[:, None, :, :1]

    assert wqk.logits(Routed(), inputs()).blocks.keys() == {"attention"}
    with pytest.raises(CheckpointError, match="no attention was observed"):
        wqk.logits(nn.Linear(WIDTH, 2), inputs())


def test_weights_that_multiply_two_values_are_one_attention() -> None:
    class ByDistance(nn.Module):
        """Scores that are no product, and weights that meet two values."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            distances = (x[:, :, None] - x[:, None]).square().sum(-1)
            weights = (-distances)[:, None].softmax(-1)
            values = x[:, None]
            return weights @ values + functional.dropout(weights, 0.5) @ (2 * values)

    module = ByDistance()
    calls: list[ObservedCall] = []
    with Observer(module, calls.append):
        module(torch.arange(20.0).reshape(1, 5, 4))
    (call,) = calls
    assert not call.has_logits
    assert call.shape == (1, 1, 5, 5)


def test_a_product_without_keys_is_passed_over() -> None:
    """An indexer of sparse attention has no pools of keys in a short text (GLM 5)."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert torch.relu(q @ k[..., :0, :].mT * SCALE).numel() == 0
        return eager(causal)(q, k, v)

    plain = only(wqk.logits(Attention(eager(causal)), inputs()))
    measured = only(wqk.logits(Attention(kernel), inputs()))
    np.testing.assert_array_equal(measured.max_logit, plain.max_logit)


def test_longformer_is_measured_by_its_scores() -> None:
    """Its keys are those around each query, so that none of them is the first token."""
    from transformers import LongformerConfig, LongformerModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    config = LongformerConfig(**sizes, intermediate_size=32, vocab_size=50, attention_window=[4])
    model = LongformerModel(config).double().eval()
    tokens = torch.arange(2, 26).reshape(2, 12)
    measured = wqk.logits(model, tokens)
    (block,) = measured.blocks.values()
    assert set(measured.scores) == set(measured.blocks)
    with torch.no_grad():
        (weights,) = model(tokens, output_attentions=True).attentions
    entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
    np.testing.assert_allclose(block.attention_entropy, entropy, rtol=1e-6)  # a float32 softmax
    top = weights.amax(-1).mean((0, 2))
    np.testing.assert_allclose(block.attention_top_share, top, rtol=1e-6)
    assert np.isnan(block.first_token_share).all()


def test_a_mask_is_that_of_the_kernel_where_kernels_of_a_model_differ() -> None:
    """Transformers' AIMv2 is causal as plain operations, and not with PyTorch's kernels.

    PyTorch computes the same call with plain operations as well: an independent measurement.
    """
    from transformers import Aimv2TextConfig, Aimv2TextModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    config = Aimv2TextConfig(**sizes, intermediate_size=32, vocab_size=50)
    model = Aimv2TextModel(config).double().eval()
    batch = {"input_ids": torch.arange(24).reshape(2, 12)}
    model.set_attn_implementation("sdpa")
    fused = wqk.logits(model, batch)
    with sdpa_kernel(SDPBackend.MATH):
        plain = wqk.logits(model, batch)
    for name, block in fused.blocks.items():
        np.testing.assert_allclose(block, plain.blocks[name], rtol=1e-9)


@pytest.mark.parametrize("training", [True, False])
def test_pytorch_s_own_layers(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    was_fast = torch.backends.mha.get_fastpath_enabled()
    assert len(wqk.logits(model, inputs()).blocks) == 2
    assert torch.backends.mha.get_fastpath_enabled() == was_fast


@contextmanager
def half() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16):
        yield


@pytest.mark.parametrize("context", [nullcontext, half], ids=["plain", "autocast"])
@pytest.mark.parametrize("make", [bert, gpt2, llama])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_outputs_and_gradients_are_the_same_to_the_last_bit(
    make: Any, kernel: str, context: Any
) -> None:
    model, tokens = make().train(), torch.arange(16).reshape(2, 8)
    model.set_attn_implementation(kernel)

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model.zero_grad()
        with context():
            output = model(tokens).last_hidden_state
        output.float().square().sum().backward()
        gradients = (parameter.grad for parameter in model.parameters())
        return [
            output.detach(),
            *(gradient.clone() for gradient in gradients if gradient is not None),
        ]

    plain = run()
    calls: list[ObservedCall] = []
    with Observer(model, calls.append):
        observed = run()
    assert len(calls) == 2
    assert all(
        torch.equal(tensor, observed_tensor)
        for tensor, observed_tensor in zip(plain, observed, strict=True)
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_passes_that_are_repeated_for_gradients_are_observed_once(reentrant: bool) -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attention(eager(causal))

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, calls = Repeated(), []
    with Observer(model, calls.append):
        model(inputs().requires_grad_()).sum().backward()
    assert len(calls) == 1


def test_all_is_put_back_when_a_pass_fails() -> None:
    model = bert()
    model.encoder.layer[1].register_forward_pre_hook(failing(RuntimeError("out of memory")))
    before = torch.backends.mha.get_fastpath_enabled(), len(_get_current_dispatch_mode_stack())
    ends: list[bool] = []
    observer = Observer(model, lambda call: None, lambda path, complete: ends.append(complete))
    with pytest.raises(RuntimeError, match="out of memory"), observer:
        model(torch.arange(8)[None])
    assert ends == [False]
    after = torch.backends.mha.get_fastpath_enabled(), len(_get_current_dispatch_mode_stack())
    assert after == before
    hooks = (len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert sum(hooks) == 1


def test_two_observers_see_the_same() -> None:
    model, seen = Attention(eager(causal)), ([], [])
    outer = Observer(model, lambda call: seen[0].append([*call.tiles()]))
    inner = Observer(model, lambda call: seen[1].append([*call.tiles()]))
    with outer, inner:
        model(inputs())
    assert len(seen[0]) == len(seen[1]) == 1
