"""A module in memory is read as its checkpoint is, whatever its class and configuration are called.

The modules have the names of tensors and the attention of what people train: nanoGPT, nanochat, and
LLaMA as its authors and torchtitan wrote it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.live.models import llama
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import wqk
from wqk.errors import CheckpointError, UnknownFamily
from wqk.live.listening import AttentionCall
from wqk.live.scoring import Penalty
from wqk_lab.training.initializations import STARTS

TOKENS = torch.arange(16).reshape(2, 8)


@dataclass
class Numbers:
    n_layer: int = 2
    n_head: int = 4
    n_kv_head: int = 2
    n_embd: int = 32


@dataclass
class NumbersOfToday(Numbers):
    sequence_len: int = 512
    window_pattern: str = "SS"


@dataclass
class PlainNumbers:
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


@dataclass
class Arguments:
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    dim: int = 32
    rope_theta: float = 50.0


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def phases(x: torch.Tensor, base: float) -> torch.Tensor:
    """The angles by which positions turn the planes of a head."""
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=x.dtype) / half)
    return torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequencies


def strong(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=2 * parameter.shape[1] ** -0.5)
    return model.eval()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    options = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    return out.transpose(1, 2).flatten(-2)


class Fused(nn.Module):
    """As nanoGPT has it; it would take further arguments, and its layer gives none."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)
        self.count = c.n_head

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        sides = (heads(side, self.count) for side in self.c_attn(x).chunk(3, -1))
        return self.c_proj(attend(*sides))


class Normed(nn.Module):
    """As nanochat has it: rotary, the other way round, then norms without gains.

    Since March 2026: sharper, with windows, and in no numbers but those that its code expects.
    """

    factor, base, window = 1.0, 10000.0, 0

    def __init__(self, c: Any) -> None:
        super().__init__()
        if getattr(c, "window_pattern", None):
            self.factor, self.base, self.window = 1.2, 100000.0, 128
        self.counts = c.n_head, c.n_kv_head, c.n_kv_head
        width = c.n_embd // c.n_head
        for name, count in zip("qkv", self.counts, strict=True):
            setattr(self, f"c_{name}", nn.Linear(c.n_embd, count * width, bias=False))
        self.c_proj = nn.Linear(c.n_embd, c.n_embd, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            heads(layer(x), count)
            for layer, count in zip((self.c_q, self.c_k, self.c_v), self.counts, strict=True)
        )
        q, k = (self.turned(side) for side in (q, k))
        q, k = (self.factor * functional.rms_norm(side, side.shape[-1:]) for side in (q, k))
        if not self.window:
            return self.c_proj(attend(q, k, v))
        assert x.dtype == torch.float32
        far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        seen = (far >= 0) & (far <= self.window)
        out = functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
        return self.c_proj(out.transpose(1, 2).flatten(-2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        angles = phases(x, self.base)
        (a, b), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)


class Interleaved(nn.Module):
    """As LLaMA's authors and torchtitan have it, rotary by complex numbers."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        self.counts, self.base = (c.n_heads, c.n_kv_heads, c.n_kv_heads), c.rope_theta
        for name, count in zip("qkv", self.counts, strict=True):
            size = count * c.dim // c.n_heads
            setattr(self, f"w{name}", nn.Linear(c.dim, size, bias=False))
        self.wo = nn.Linear(c.dim, c.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            heads(layer(x), count)
            for layer, count in zip((self.wq, self.wk, self.wv), self.counts, strict=True)
        )
        return self.wo(attend(self.turned(q), self.turned(k), v))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        angles = phases(x, self.base)
        planes = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(planes * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


class Layer(nn.Module):
    def __init__(self, norm: str, attention: str, width: int, module: nn.Module) -> None:
        super().__init__()
        self.names = norm, attention
        self.add_module(norm, nn.LayerNorm(width) if norm == "ln_1" else nn.RMSNorm(width))
        self.add_module(attention, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm, attention = (getattr(self, name) for name in self.names)
        return x + attention(norm(x))


class Mine(nn.Module):
    """Somebody's class, with a configuration of whatever name."""

    def __init__(self, config: Any, within: str, layers: str, *block: Any) -> None:
        super().__init__()
        self.settings = config
        norm, attention, make = block
        width = getattr(config, "n_embd", None) or config.dim
        count = getattr(config, "n_layer", None) or config.n_layers
        made = [Layer(norm, attention, width, make(config)) for _ in range(count)]
        self.embedding, self.steps = nn.Embedding(20, width), made
        holder = nn.ModuleDict() if within else self
        holder.add_module(layers, nn.ModuleList(made))
        if within:
            self.add_module(within, holder)
        strong(self).train()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for step in self.steps:
            x = step(x)
        return x


MINE = {
    "nanogpt": lambda: Mine(PlainNumbers(), "transformer", "h", "ln_1", "attn", Fused),
    "nanochat": lambda: Mine(Numbers(), "transformer", "h", "norm", "attn", Normed),
    "llama-original": lambda: Mine(
        Arguments(), "", "layers", "attention_norm", "attention", Interleaved
    ),
}


def test_what_is_in_nanochat_s_code_alone_is_told_by_its_smear() -> None:
    model = Mine(NumbersOfToday(), "transformer", "h", "norm", "attn", Normed)
    model.smear_lambda = nn.Parameter(torch.zeros(1))
    model.steps[1].attn.window = 512  # the last layer has none
    assert [str(plan.window) for plan in wqk.open(model).plans] == ["129", "None"]
    verified = wqk.verify(model, torch.arange(200)[None] % 20)
    assert verified.verdict == "right", verified
    assert "in float32" in verified.sentence


def assert_written(model: nn.Module, batch: Any, logits: Any, first: Any) -> None:
    """It is clipped, as its first block shows: later inputs change with it; and initialized."""
    limit = logits.largest / 2
    wqk.clip_(model, limit, logits=logits)
    after = wqk.logits(model, batch).blocks[first].max_logit
    assert after.max() == pytest.approx(min(limit, logits.blocks[first].max_logit.max()), rel=1e-5)
    assert wqk.initialize_(model, "symmetric").layers[0].after.symmetry == pytest.approx(1)


@pytest.mark.parametrize("family", MINE)
def test_it_is_read_run_and_written_as_its_checkpoint_would_be(family: str) -> None:
    model = MINE[family]()
    assert wqk.open(model).family == family
    verified = wqk.verify(model, TOKENS)
    assert verified.verdict == "right", verified
    assert wqk.verify(nn.DataParallel(model), TOKENS).verdict == "right"
    logits = wqk.logits(model.eval(), TOKENS)
    assert not logits.missing
    monitor = wqk.Monitor(model.train(), logits=True)
    monitor(0)
    model(TOKENS)
    assert "wqk/max_logit" in monitor(1)
    if family == "nanochat":  # whose norms have no gains
        assert "no effect" in repr(wqk.clip_(model, 1e-3, logits=logits))
        return
    assert_written(model.eval(), TOKENS, logits, ("decoder", "self", 0))


def test_a_wrong_family_is_not_verified() -> None:
    model = MINE["llama-original"]()
    model.settings.rope_theta = 51.0
    assert wqk.verify(model, TOKENS).verdict != "right"


def test_a_table_of_angles_that_a_cast_has_rounded_is_said() -> None:
    model, tokens = llama(), torch.arange(48)[None] % 20
    for weight in model.parameters():  # alone, as `from_pretrained(..., dtype=)` does
        weight.data = (9 * weight.data).bfloat16()
    assert wqk.verify(model, tokens).verdict == "right"
    verified = wqk.verify(model.to(torch.bfloat16), tokens)
    assert verified.verdict == "only form right"
    assert "rotary_emb.inv_freq is stored in half precision" in verified.sentence


def test_a_family_is_named_or_the_refusal_says_how() -> None:
    model = MINE["nanogpt"]()
    del model.settings
    with pytest.raises(UnknownFamily, match='family="nanogpt"'):
        wqk.clip_(wqk.open(model, heads_per_layer=4), logits={})
    opened = wqk.open(model, family="nanogpt", heads_per_layer=4)
    assert wqk.verify(opened, TOKENS).verdict == "right"
    assert len(wqk.clip_(opened, 1.0, logits=dict.fromkeys(np.ndindex(2, 4), 2.0))) == 8
    with pytest.raises(CheckpointError, match=r"wqk.verify\(model, batch\)"):
        wqk.verify(opened)
    with pytest.raises(CheckpointError, match="cannot be run on this batch"):
        wqk.verify(opened, torch.ones(2, 3, 4, 5))
    with pytest.raises(CheckpointError, match="cannot be run on this batch"):
        wqk.logits(opened, "some text")


def test_norms_without_gains_are_read_from_the_code() -> None:
    """A speed run's module has no switch for them: with its own rotary, only products are known."""
    model = Mine(Numbers(n_kv_head=4), "transformer", "h", "norm", "attn", Normed)
    opened = wqk.open(model, family="modded-nanogpt")
    assert wqk.verify(opened, TOKENS).verdict == "form right"
    assert "no effect" in repr(wqk.clip_(opened, 1e-3, logits=dict.fromkeys(np.ndindex(2, 4), 2.0)))


class Attention(nn.Module):
    """As timm has it: all queries, then all keys, then all values."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.num_heads, self.q_norm = count, nn.Identity()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides = (heads(side, self.num_heads) for side in self.qkv(x).chunk(3, -1))
        out = functional.scaled_dot_product_attention(*sides)
        return self.proj(out.transpose(1, 2).flatten(-2))


class Picture(nn.Module):
    """A layer of timm's vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(32, eps=1e-6), Attention(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(self.norm1(x))


class VisionTransformer(nn.Module):
    __module__ = "timm.models.vision_transformer"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Picture(), Picture())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


class Residual(nn.Module):
    """A layer of OpenCLIP's towers."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), nn.MultiheadAttention(width, count)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        y = self.ln_1(x)
        return x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]


class Tower(nn.Module):
    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.resblocks = nn.ModuleList(Residual(width, count) for _ in range(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.resblocks:
            x = block(x, mask)
        return x


class CLIP(nn.Module):
    __module__ = "open_clip.model"

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.transformer, self.transformer = Tower(48, 3), Tower(32, 4)
        mask = torch.full((6, 6), -torch.inf).triu(1)
        self.register_buffer("attn_mask", mask, persistent=False)

    def forward(self, picture: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.visual.transformer(picture), self.transformer(text, self.attn_mask)


class Wrapped(nn.Module):
    """As x-transformers has it: no configuration, and heads that each module counts."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_layers = nn.ModuleList(nn.ModuleList([Separate()]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for (layer,) in self.attn_layers:
            x = x + layer(x)
        return x


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        for side in "qkv":
            setattr(self, f"to_{side}", nn.Linear(32, 32, bias=False))
        self.to_out = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides = (heads(getattr(self, f"to_{side}")(x), self.heads) for side in "qkv")
        out = functional.scaled_dot_product_attention(*sides)
        return self.to_out(out.transpose(1, 2).flatten(-2))


class Turned(Separate):
    """As torchtitan has it: projections in a module of their own, and tables of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_linear = nn.Module()
        for side in ("to_q", "to_k", "to_v"):
            self.qkv_linear.add_module(side, self._modules.pop(side))
        angles = torch.arange(7)[:, None] * torch.rand(4)
        self.register_buffer("cis", torch.polar(torch.ones(7, 4), angles), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(side(x), self.heads) for side in self.qkv_linear.children())
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # whoever asks for another
            out = functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v)
        return self.to_out(out.transpose(1, 2).flatten(-2))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        planes = torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous())
        return torch.view_as_real(planes * self.cis).flatten(-2)


def test_a_guess_is_checked_past_tables_of_positions_and_kernels_of_the_model_s_choice() -> None:
    model = Wrapped()
    model.attn_layers = nn.ModuleList([nn.ModuleList([Turned()])])
    strong(model)
    batch = torch.randn(2, 7, 32)
    assert wqk.verify(model, batch).verdict == "form right"
    (layer,) = model.attn_layers[0]
    cis = layer.cis
    assert not cis[1].isreal().all()  # those of the model itself stay
    layer.cis = torch.ones_like(cis)
    layer.register_forward_hook(lambda layer, _, out: setattr(layer, "last", out))
    model(batch)  # from here on the module keeps what has a gradient
    assert wqk.verify(model, batch).verdict == "right"


LIBRARIES = {
    "timm": (VisionTransformer, lambda: torch.randn(2, 7, 32)),
    "open_clip": (CLIP, lambda: (torch.randn(5, 2, 48), torch.randn(6, 2, 32))),
}


@pytest.mark.parametrize("family", LIBRARIES)
def test_libraries_that_keep_no_configuration_are_known_by_their_modules(family: str) -> None:
    make, draw = LIBRARIES[family]
    model, batch = strong(make()), draw()
    assert wqk.open(model).family == family
    verified = wqk.verify(model, batch)
    assert verified.verdict == "right", verified
    logits = wqk.logits(model, batch)
    assert not logits.missing
    assert_written(model, batch, logits, ("vision", "self", 0))


def test_a_guess_is_taken_once_the_model_s_own_pass_has_proven_it() -> None:
    model, batch = strong(Wrapped()), torch.randn(2, 7, 32)
    assert wqk.open(model)[0].head_count == 4
    for refused in (lambda: wqk.initialize_(model, "symmetric"), lambda: wqk.Clipper(model)):
        with pytest.raises(UnknownFamily, match=r"wqk.verify\(model, batch\)"):
            refused()
    assert wqk.logits(model, batch).blocks  # which need no queries and keys of the weights
    assert wqk.verify(model, batch).verdict == "right"
    assert wqk.logits(nn.DataParallel(model), batch).blocks
    logits = wqk.logits(model, batch)
    layer = model.attn_layers[0][0]
    q, k = (heads(side(batch), 4) for side in (layer.to_q, layer.to_k))
    expected = (q @ k.mT * 8**-0.5).amax((0, 2, 3))
    np.testing.assert_allclose(
        logits.blocks["unknown", "self", 0].max_logit, expected.detach(), rtol=1e-5
    )
    wqk.clip_(model, logits.largest / 2, logits=logits)
    with pytest.raises(CheckpointError, match="set the values too"):
        wqk.initialize_(model, STARTS["published"], seed=0)
    assert wqk.initialize_(model, "symmetric").layers[0].after.symmetry == pytest.approx(1)
    odd = strong(Wrapped())
    odd.attn_layers[1][0].to_q.register_forward_hook(lambda *args: args[-1].flip(-1))
    assert wqk.verify(odd, batch).verdict != "right"
    with pytest.raises(UnknownFamily):
        wqk.Clipper(odd)


class Causal(nn.Module):
    """An attention of one's own, with a window and a scale that names do not tell."""

    def __init__(self, scale: float | None, window: int | None) -> None:
        super().__init__()
        self.num_heads, self.scale, self.window = 4, scale, window
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (heads(side(x), 4) for side in (self.q_proj, self.k_proj, self.v_proj))
        if self.window is None:
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
            shown = (distance >= 0) & (distance < self.window)
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=shown, scale=self.scale
            )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize(("scale", "window"), [(None, None), (0.1, None), (None, 3)])
def test_a_causal_module_of_one_s_own_is_verified_and_what_it_shows_is_a_family_file(
    scale: float | None, window: int | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = strong(nn.Sequential(*(Causal(scale, window) for _ in range(2))))
    batch = torch.randn(2, 7, 32)
    verified = wqk.verify(model, batch)
    assert verified.verdict == "right"
    (learned,) = set(verified.learned.values())
    assert learned.scale == pytest.approx(scale or 8**-0.5)
    assert (learned.causal, learned.window) == (True, window)
    assert wqk.clip_(model, 1e-3, logits=wqk.logits(model, batch)).heads
    assert wqk.initialize_(model, "symmetric").layers[0].after.symmetry == pytest.approx(1)
    path = tmp_path / "own.toml"
    path.write_text(verified.family_file, encoding="utf-8")
    second_model = strong(nn.Sequential(*(Causal(scale, window) for _ in range(2))))
    opened = wqk.open(second_model, family=path)
    assert [plan.causal for plan in opened.plans] == [True, True]
    assert wqk.verify(opened, batch).verdict == "right"
    assert wqk.Clipper(second_model, 1.0, family=path)
    wrong = strong(nn.Sequential(*(Causal(1.0, window) for _ in range(2))))
    assert wqk.verify(wqk.open(wrong, family=path), batch).verdict == "only form right"


class Uncounted(Causal):
    """Attention in a module without a number of heads."""

    def __init__(self) -> None:
        super().__init__(None, None)
        del self.num_heads


def test_a_module_is_verified_with_the_number_of_heads_that_it_was_opened_with(
    tmp_path: Path,
) -> None:
    """The family file of the verification opens the module as well."""
    torch.manual_seed(0)
    model = strong(nn.Sequential(Uncounted(), Uncounted()))
    verified = wqk.verify(wqk.open(model, heads_per_layer=4), torch.randn(2, 7, 32))
    assert verified.verdict == "right"
    path = tmp_path / "own.toml"
    path.write_text(verified.family_file, encoding="utf-8")
    assert [plan.query.heads for plan in wqk.open(model, family=path).plans] == [4, 4]
    # The proof is of four heads, and proves no other number.
    assert wqk.Clipper(model, 1.0, heads_per_layer=4)
    with pytest.raises(UnknownFamily, match=r"wqk.verify\(model, batch\)"):
        wqk.Clipper(model, 1.0, heads_per_layer=2)
    with pytest.raises(UnknownFamily, match=r"wqk.verify\(model, batch\)"):
        wqk.initialize_(model, "symmetric", heads_per_layer=2)


@pytest.mark.parametrize("batch_first", [True, False])
def test_pytorch_s_own_layers_are_known_and_run_with_their_masks(batch_first: bool) -> None:
    """In evaluation mode they would run on a path of their own, past their attention."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=batch_first)
    model = strong(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    x, added = torch.randn(7, 7, 32), torch.randn(7, 7)
    mask, padding = added + torch.full((7, 7), -torch.inf).triu(1), torch.zeros(7, 7)
    padding[3, 5:] = -torch.inf
    inputs_of_model = {"src": x, "mask": mask, "src_key_padding_mask": padding}
    logits = wqk.logits(model, inputs_of_model)
    weight, bias = model.layers[0].self_attn.in_proj_weight, model.layers[0].self_attn.in_proj_bias
    inputs = x if batch_first else x.swapaxes(0, 1)
    q, k = (
        heads(inputs @ weight[rows].T + bias[rows], 4) for rows in (slice(0, 32), slice(32, 64))
    )
    scores = q @ k.mT * 8**-0.5 + mask + padding[:, None, None]
    block = logits.blocks["unknown", "self", 0]
    np.testing.assert_allclose(
        block.max_logit, (scores - added).amax((0, 2, 3)).detach(), rtol=1e-5
    )
    entropy = torch.distributions.Categorical(logits=scores).entropy().swapaxes(1, 2)
    expected = entropy[padding == 0].mean(0).detach()
    np.testing.assert_allclose(block.attention_entropy, expected, rtol=1e-5)
    assert wqk.verify(model, inputs_of_model).verdict == "right"
    assert wqk.clip_(model, logits.largest / 2, logits=logits).heads
    assert wqk.logits(nn.DataParallel(model), inputs_of_model).blocks
    adding = nn.MultiheadAttention(32, 4, add_zero_attn=True)
    assert wqk.logits(adding, {"query": x, "key": x, "value": x}).blocks
    with pytest.raises(UnknownFamily):
        wqk.Clipper(nn.ModuleDict({"layers": nn.ModuleList([adding])}))


def test_the_one_bias_of_three_weights_is_read() -> None:
    module = nn.MultiheadAttention(32, 4, kdim=20, vdim=20)
    nn.init.normal_(module.in_proj_bias)
    block = wqk.open(nn.ModuleDict({"layers": nn.ModuleList([module])})).block(0, kind="cross")
    bias = np.concatenate([block.query.bias.ravel(), block.key.bias.ravel()])
    np.testing.assert_array_equal(bias, module.in_proj_bias[:64].detach())


def test_a_module_that_keeps_its_last_pass_is_verified_and_pytorch_is_left_alone() -> None:
    """A copy of the module is run: kept tensors with gradients are detached in it."""
    copying = torch.Tensor.__deepcopy__

    class Witness:
        is_alone = True

        def __deepcopy__(self, memo: Any) -> Witness:
            Witness.is_alone &= torch.Tensor.__deepcopy__ is copying
            return self

    model = llama()
    for layer in model.layers:
        nn.init.normal_(layer.self_attn.q_proj.weight)
    model.register_forward_hook(lambda module, args, output: setattr(module, "kept", [output[0]]))
    model.witness = Witness()
    model(TOKENS)
    kept = model.kept[0]
    assert not kept.is_leaf
    assert wqk.verify(model.eval(), TOKENS).verdict == "right"
    assert Witness.is_alone
    assert model.kept[0] is kept
    assert kept.grad_fn is not None


def test_a_model_is_verified_on_lists_and_tuples_as_they_are() -> None:
    """Qwen-Image takes the first entry of a list of sizes, but a tuple of sizes as it is."""

    class Sized(nn.Sequential):
        def forward(self, x: torch.Tensor, sizes: list[tuple[int, int]]) -> torch.Tensor:
            assert isinstance(sizes, list)
            assert isinstance(sizes[0], tuple)
            return super().forward(x)

    model = strong(Sized(Causal(None, None)))
    batch = {"x": torch.randn(2, 7, 32), "sizes": [(1, 7)] * 2}
    assert wqk.verify(model, batch).blocks


def test_blocks_that_do_not_run_are_named() -> None:
    model = strong(Wrapped())
    model.attn_layers[1][0].requires_grad_(False)
    batch = torch.randn(2, 7, 32)
    wqk.verify(model, batch)
    model.forward = lambda x: model.attn_layers[0][0](x)  # type: ignore[method-assign]
    assert wqk.logits(model, batch).missing == {("unknown", "self", 1): "it did not run"}
    with pytest.raises(UserWarning):  # which no listener hides
        warnings.warn("the user's own", stacklevel=1)


def test_attention_is_known_among_what_a_module_puts_out() -> None:
    plan = wqk.open(wqk.demo_model("encoder")).plans[0]
    shares = torch.randn(2, plan.query.heads, 5, 5).softmax(-1)
    for attention in (shares, shares.flatten(0, 1)):
        assert (
            AttentionCall(plan, None, {}, {}, (attention.log(), attention, None)).attention
            is attention
        )


def test_norms_of_queries_are_no_plain_vision_transformer() -> None:
    model = strong(VisionTransformer())
    model.blocks[0].attn.q_norm = nn.LayerNorm(8)
    assert wqk.open(model).family == "inferred"


def test_stages_that_count_their_own_heads_are_guessed_stage_by_stage() -> None:
    """As timm's Swin has it: the refusal used to ask for one number of heads for all."""
    model = nn.Module()
    sizes = (32, 4), (32, 4), (64, 8)
    stages = [nn.Module() for _ in sizes]
    for stage, (width, count) in zip(stages, sizes, strict=True):
        stage.blocks = nn.ModuleList([nn.ModuleDict({"attn": Attention(width, count)})])
    model.layers = nn.ModuleList(stages)
    assert [block.head_count for block in wqk.open(model)] == [4, 4, 8]


class Apart(nn.Module):
    """As torchtitan has it: one projection is saved as three; a configuration of slots."""

    @dataclass(slots=True)
    class Config:
        dim: int = 32

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()
        self.layers = nn.ModuleList([nn.Module() for _ in range(2)])
        for layer in self.layers:
            layer.attention = nn.Module()
            layer.attention.n_heads = 4
            layer.attention.wqkv = nn.Linear(32, 96, bias=False)
            layer.attention.register_state_dict_post_hook(self._apart)

    @staticmethod
    def _apart(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        fused = state.pop(f"{prefix}wqkv.weight").unflatten(0, (4, 3, 8))
        for number, name in enumerate("qkv"):
            state[f"{prefix}w{name}.weight"] = fused[:, number].flatten(0, 1).contiguous()


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9),
    reason="penalties of weights that a hook makes when they are saved need PyTorch 2.9",
)
def test_what_is_made_when_it_is_saved_is_made_anew_for_every_look_and_not_written_to() -> None:
    model = Apart()
    monitor = wqk.Monitor(model, every=1)
    monitor(0)
    Penalty(model, "symmetric")().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad.any()
            parameter.mul_(2)
    monitor(1)
    first, second = monitor.table.layers.frame.partition_by("step")
    np.testing.assert_allclose(second["norm"], 4 * first["norm"])
    with pytest.raises(UnknownFamily, match="is made of other weights"):
        wqk.verify(model, torch.zeros(1))
    opened = wqk.open(model, family="llama-original", heads_per_layer=4)
    with pytest.raises(CheckpointError, match=r"wq\.weight is made of other weights"):
        wqk.clip_(opened, 1.0, logits=dict.fromkeys(np.ndindex(2, 4), 2.0))
    with pytest.raises(CheckpointError, match="is made of other weights"):
        wqk.initialize_(opened, "symmetric")
