"""Layouts of code that models are trained or studied with, each written out once more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.families.computing import (
    RNG,
    Fed,
    H,
    N,
    R,
    Tensors,
    applied,
    assert_circuit,
    assert_read,
    block_of,
    by_key_head,
    gain,
    linear,
    normalized,
    rms,
    sections,
    separate,
    sides,
    turned,
)
from tests.small import sizes

import wqk
from wqk.checkpoints.configurations import Opened, configured
from wqk.checkpoints.modules import StateDict

WIDTH, G, EPSILON = 40, 2, 0.01
PARTIAL = ("partial",)


def completed(tensors: Tensors, config: dict[str, Any], **about: Any) -> Mapping[str, Any]:
    """The configuration as it is read from a file."""
    return configured(None, Opened(config, about, StateDict(tensors, {}, "stand-in").tensors()))


@pytest.mark.parametrize("window", [None, 4])
def test_llama_original(window: int | None) -> None:
    tensors, name = Tensors(), "layers.1.attention.w{}"
    for n in range(2):
        separate(tensors, name.replace("1", str(n)), WIDTH, G, bias=False)
        gain(tensors, f"layers.{n}.attention_norm", WIDTH)
    params = {
        "dim": WIDTH,
        "n_layers": 2,
        "n_heads": H,
        "n_kv_heads": G,
        "head_dim": R,
        "norm_eps": EPSILON,
        "rope_theta": 500.0,
        "sliding_window": window,
    }
    x = RNG.standard_normal((N, WIDTH))
    query, key, value = sides(tensors, name, x, G)
    assert_read(
        block_of(tensors, completed(tensors, params), "decoder", "self", 1),
        x,
        turned(query, R, 500.0, "interleaved"),
        turned(key, R, 500.0, "interleaved"),
        fed=Fed("rms", "layers.1.attention_norm.weight", EPSILON),
        circuit=(value, tensors["layers.1.attention.wo.weight"]),
        causal=True,
        window=window and str(window),
    )


@pytest.mark.parametrize("generation", ["gemma", "gemma2"])
def test_gemma_original(generation: str) -> None:
    """One tensor of queries, keys and values; the second generation has windows and a cap."""
    tensors, later = Tensors(), generation == "gemma2"
    for n in range(2):
        linear(tensors, f"layers.{n}.self_attn.qkv_proj", (H + 2 * G) * R, WIDTH, bias=False)
        linear(tensors, f"layers.{n}.self_attn.o_proj", WIDTH, H * R, bias=False)
        gain(tensors, f"layers.{n}.input_layernorm", WIDTH)
    config = {
        "model_type": generation,
        "num_hidden_layers": 2,
        "num_attention_heads": H,
        "num_key_value_heads": G,
        "head_dim": R,
        "rms_norm_eps": EPSILON,
        "rope_theta": 500.0,
    }
    if later:
        config |= {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "sliding_window": 4}
    x = RNG.standard_normal((N, WIDTH))
    facts = {"scale": 20**-0.5, "softcap": 3.0} if later else {}
    for n in range(2):
        rows = applied(tensors, f"layers.{n}.self_attn.qkv_proj", x)
        query, key, value = sections(rows, G)
        windowed = later and n == 0
        assert_read(
            block_of(tensors, config, "decoder", "self", n),
            x,
            turned(query, R, 500.0),
            turned(key, R, 500.0),
            fed=Fed("rms", f"layers.{n}.input_layernorm.weight", EPSILON, 1.0),
            circuit=(value, tensors[f"layers.{n}.self_attn.o_proj.weight"]),
            causal=True,
            window="4" if windowed else None,
            **facts,
        )


ARGUMENTS = {
    "num_layers": 2,
    "group_query_attention": True,
    "num_query_groups": G,
    "rotary_base": 500.0,
    "rotary_percent": 0.5,
    "rotary_interleaved": True,
    "norm_epsilon": EPSILON,
}
OF_TRANSFORMERS = {
    "converted_from": "llama",
    "num_hidden_layers": 2,
    "num_key_value_heads": G,
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": EPSILON,
}


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("with_shifts", [False, True])
@pytest.mark.parametrize(
    ("settings", "norm"),
    [
        (ARGUMENTS, "self_attention.linear_qkv.layer_norm"),
        (OF_TRANSFORMERS, "input_layernorm"),
        (ARGUMENTS | {"position_embedding_type": "none"}, "input_layernorm"),
    ],
    ids=["arguments", "transformers", "no positions"],
)
def test_megatron_core(
    settings: dict[str, Any], norm: str, with_shifts: bool, offset: float
) -> None:
    """Gains may be differences from 1; layer norms have shifts."""
    tensors, width, name = Tensors(), (H + 2 * G) * R, "decoder.layers.{}.self_attention.{}"
    for n in range(2):
        linear(tensors, name.format(n, "linear_qkv"), width, WIDTH)
        linear(tensors, name.format(n, "linear_proj"), WIDTH, H * R)
        gain(tensors, f"decoder.layers.{n}.{norm}", WIDTH, with_shifts)
        for side in "qk":
            gain(tensors, name.format(n, f"{side}_layernorm"), R, with_shifts)
    config = {"model_type": "megatron-core", "num_attention_heads": H, **settings}
    if offset:
        config["apply_layernorm_1p"] = True
    x = RNG.standard_normal((N, WIDTH))
    rows = applied(tensors, name.format(1, "linear_qkv"), x)
    query, key, value = by_key_head(rows, G)
    actual_gains = {
        name: value + offset if "norm" in name and name.endswith("weight") else value
        for name, value in tensors.items()
    }
    query, key = (
        normalized(actual_gains, name.format(1, f"{side}_layernorm"), vectors, EPSILON)
        for side, vectors in (("q", query), ("k", key))
    )
    if "position_embedding_type" not in settings:
        order = "interleaved" if settings.get("rotary_interleaved") else "half"
        query, key = (turned(vectors, R // 2, 500.0, order) for vectors in (query, key))
    kind = "layer" if with_shifts else "rms"
    assert_read(
        block_of(tensors, completed(tensors, config), "decoder", "self", 1),
        x,
        query,
        key,
        fed=Fed(kind, f"decoder.layers.1.{norm}.weight", EPSILON, offset),
        circuit=(value, tensors[name.format(1, "linear_proj.weight")]),
        causal=True,
        statuses=PARTIAL,
    )


@pytest.mark.parametrize(
    "key", ["norm_epsilon", "layernorm_epsilon", "rms_norm_eps", "layer_norm_eps", "norm_eps"]
)
def test_every_norm_of_megatron_core_has_the_epsilon_of_its_configuration(key: str) -> None:
    settings = {name: value for name, value in ARGUMENTS.items() if name != "norm_epsilon"}
    test_megatron_core(settings | {key: EPSILON}, "input_layernorm", False, 0.0)


def test_nanogpt() -> None:
    tensors, width = Tensors(), H * R
    for n in range(2):
        linear(tensors, f"transformer.h.{n}.attn.c_attn", 3 * width, width)
        linear(tensors, f"transformer.h.{n}.attn.c_proj", width, width)
        gain(tensors, f"transformer.h.{n}.ln_1", width, bias=True)
    arguments = {"n_layer": 2, "n_head": H, "n_embd": width, "block_size": 8, "bias": True}
    config = completed(tensors, {}, model_args=arguments)
    x, at = RNG.standard_normal((N, width)), "transformer.h.1"
    query, key, value = sections(applied(tensors, f"{at}.attn.c_attn", x), H)
    assert_read(
        block_of(tensors, config, "decoder", "self", 1),
        x,
        query,
        key,
        fed=Fed("layer", f"{at}.ln_1.weight", 1e-5),
        circuit=(value, tensors[f"{at}.attn.c_proj.weight"]),
        causal=True,
    )


class Nanochat(NamedTuple):
    """A version of nanochat's code: the tensors and the numbers that differ."""

    gate_channels: int  # of the gates of values, which the first version lacks
    has_smear: bool
    factor: float  # of queries, and of keys
    base: float
    short: int  # tokens before a token in a short window, of sequences of 900


NANOCHATS = {
    "October 2025": Nanochat(0, False, 1.0, 1e4, 450),
    "16 January 2026": Nanochat(32, False, 1.0, 1e4, 450),
    "9 March 2026": Nanochat(12, False, 1.15, 1e5, 384),
    "14 March 2026": Nanochat(12, True, 1.2, 1e5, 256),
}


@pytest.mark.parametrize("version", NANOCHATS)
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanochat(prefix: str, version: str) -> None:
    """Queries and keys turn backward, are normalized without gains, then sharpened.

    A third of the layers, and the last, attend to all tokens before; the others have windows.
    """
    code, tensors, width = NANOCHATS[version], Tensors(), H * R
    name = f"{prefix}transformer.h.{{}}.attn.{{}}"
    for n in range(5):
        separate(tensors, name.format(n, "c_{}"), width, G, bias=False, output="proj")
        if code.gate_channels and n % 2 == 0:
            linear(tensors, name.format(n, "ve_gate"), G, code.gate_channels, bias=False)
    if code.has_smear:
        tensors[f"{prefix}smear_lambda"] = RNG.standard_normal(1)
    numbers = {"n_layer": 5, "n_head": H, "n_kv_head": G, "n_embd": width, "sequence_len": 900}
    # A layer that the configuration does not count is none of the model's.
    stray, name_of_stray = Tensors(), name.replace(".h.{}", ".h.5")
    separate(stray, name_of_stray.format("c_{}"), width, G, bias=False, output="proj")
    patterns: list[dict[str, Any]] = (
        [{}] if version == "October 2025" else [{}, {"window_pattern": "sSL"}]
    )
    x = RNG.standard_normal((N, width))
    for pattern in patterns:
        config = completed(tensors, numbers | pattern)
        assert config["model_type"] == "nanochat"
        opened = wqk.open(StateDict(tensors | stray, config, "stand-in"))
        windows = [code.short + 1, code.short + 1, None, code.short + 1, None]
        assert [plan.window and str(plan.window) for plan in opened.plans] == [
            window and str(window) if pattern else None for window in windows
        ]
        query, key, value = sides(tensors, name.format(4, "c_{}"), x, G)
        query, key = (rms(backward(vectors, code.base), 1.0, 2.0**-23) for vectors in (query, key))
        assert_read(
            block_of(tensors, config, "decoder", "self", 4),
            x,
            query,
            key,
            circuit=(value, tensors[name.format(4, "c_proj.weight")]),
            causal=True,
            scale=code.factor**2 * R**-0.5,
            statuses=PARTIAL,
        )


def backward(x: np.ndarray, base: float) -> np.ndarray:
    """Halves of (H, N, R) turned by the negative of the usual angles."""
    half = R // 2
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos + b * sin, b * cos - a * sin], -1)


@pytest.mark.parametrize("normed", [True, False])
def test_modded_nanogpt(normed: bool) -> None:
    """Some runs leave the attention of a layer out."""
    tensors, name = Tensors(), "transformer.h.2.attn.c_{}"
    for n in (0, 2):
        separate(tensors, name.replace("2", str(n)), WIDTH, bias=False, output="proj")
    code = f"n_head : int = {H}\n" + "q, k = norm(q), norm(k)\n" * normed
    config = completed(tensors, {}, code=code)
    x = RNG.standard_normal((N, WIDTH))
    query, key, value = sides(tensors, name, x)
    if normed:
        query, key = rms(query, 1.0, 0.0), rms(key, 1.0, 0.0)
    assert_read(
        block_of(tensors, config, "decoder", "self", 2),
        x,
        query,
        key,
        circuit=(value, tensors[f"{name.format('proj')}.weight"]),
        causal=True,
        position="rotary, of its own kind",
        statuses=PARTIAL if normed else (),
    )


LENS = {
    "n_layers": 2,
    "d_model": WIDTH,
    "n_heads": H,
    "n_key_value_heads": G,
    "d_head": R,
    "positional_embedding_type": "standard",
    "attention_dir": "causal",
    "use_attn_scale": True,
    "attn_scale": R**0.5,
    "eps": EPSILON,
    "attn_scores_soft_cap": -1.0,
    "use_local_attn": False,
    "window_size": None,
}


def lens_tensors(kind: str) -> Tensors:
    """As TransformerLens stores them: with an axis of the heads, fewer keys and values once."""
    tensors = Tensors()
    for n in range(2):
        at = f"blocks.{n}"
        for side, heads in (("Q", H), ("_K", G), ("_V", G)):
            mark, letter = side[:-1], side[-1]
            tensors[f"{at}.attn.{mark}W_{letter}"] = RNG.standard_normal((heads, WIDTH, R)) / 6
            tensors[f"{at}.attn.{mark}b_{letter}"] = RNG.standard_normal((heads, R))
        tensors[f"{at}.attn.W_O"] = RNG.standard_normal((H, R, WIDTH)) / 6
        tensors[f"{at}.attn.b_O"] = RNG.standard_normal(WIDTH)
        tensors[f"{at}.ln1.w"] = RNG.uniform(0.5, 2, WIDTH)
        if kind == "LN":
            tensors[f"{at}.ln1.b"] = RNG.standard_normal(WIDTH)
    return tensors


LENS_CASES = {
    "plain": [{}, {}],
    "rotary": [{"positional_embedding_type": "rotary"}, {}],
    "both directions": [{"attention_dir": "bidirectional"}, {"causal": False}],
    "capped": [{"attn_scores_soft_cap": 0.5}, {"softcap": 0.5}],
    "local": [
        {"use_local_attn": True, "window_size": 4, "attn_types": ["global", "local"]},
        {"window": "4"},
    ],
}


@pytest.mark.parametrize("kind", ["LN", "RMS"])
@pytest.mark.parametrize(
    ("changes", "told"),
    {
        **LENS_CASES,
        "by layer": ({"scale_attn_by_inverse_layer_idx": True}, {"scale": R**-0.5 / 2}),
        "scale": ({"attn_scale": 3.0}, {"scale": 1 / 3}),
    }.values(),
)
@pytest.mark.parametrize("order", ["half", "interleaved"])
def test_transformer_lens(kind, order, changes, told):
    tensors, x, at = lens_tensors(kind), RNG.standard_normal((N, WIDTH)), "blocks.1"
    config = (
        LENS
        | changes
        | {
            "normalization_type": kind,
            "rotary_adjacent_pairs": order == "interleaved",
            "rotary_dim": 4,
            "rotary_base": 500.0,
        }
    )
    query, key, value = (
        np.einsum("pd,hdr->hpr", x, tensors[f"{at}.attn.{w}"]) + tensors[f"{at}.attn.{b}"][:, None]
        for w, b in (("W_Q", "b_Q"), ("_W_K", "_b_K"), ("_W_V", "_b_V"))
    )
    if config["positional_embedding_type"] == "rotary":
        query, key = turned(query, 4, 500.0, order), turned(key, 4, 500.0, order)
    stack = "encoder" if config["attention_dir"] == "bidirectional" else "decoder"
    assert_read(
        block_of(tensors, config, stack, "self", 1),
        x,
        query,
        key,
        fed=Fed("layer" if kind == "LN" else "rms", f"{at}.ln1.weight", EPSILON),
        circuit=(value, tensors[f"{at}.attn.W_O"].reshape(H * R, WIDTH).T),
        **{"causal": True} | told,
    )


@pytest.mark.parametrize("kind", ["LN", "RMS"])
def test_transformer_lens_without_its_configuration(kind: str) -> None:
    tensors, x, at = lens_tensors(kind), RNG.standard_normal((N, WIDTH)), "blocks.1"
    block = wqk.open(StateDict(tensors, {}, "stand-in"))[1]
    assert (block.stack, block.plan.causal, block.plan.statuses) == ("decoder", True, ("guessed",))
    query, key = (
        np.einsum("pd,hdr->hpr", x, tensors[f"{at}.attn.{name}"]) for name in ("W_Q", "_W_K")
    )
    for h, form in enumerate(block):
        np.testing.assert_allclose(x @ form.qk.dense() @ x.T, query[h] @ key[h // 3].T, atol=1e-9)
    fed = block.plan.query.input_norm
    assert (fed.kind, fed.gain[0].name) == ("layer" if kind == "LN" else "rms", f"{at}.ln1.weight")
    value = np.einsum("pd,hdr->hpr", x, tensors[f"{at}.attn._W_V"])
    assert_circuit(block, value, tensors[f"{at}.attn.W_O"].reshape(H * R, WIDTH).T, x)


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("adapted", [True, False])
def test_zamba2(adapted: bool, rotary: bool) -> None:
    """The embeddings lie next to the residual stream; some layers share a block of attention."""
    tensors, width, stem = Tensors(), H * R // 2, "model.layers.{}.shared_transformer"
    for n in (1, 4):
        name = stem.format(n) + ".self_attn.{}_proj"
        separate(tensors, name, width, G, bias=False, wide=2 * width)
        gain(tensors, f"{stem.format(n)}.input_layernorm", 2 * width)
    config = sizes(width, 6, H, model_type="zamba2", num_key_value_heads=G, rms_norm_eps=EPSILON)
    config |= {"use_shared_attention_adapter": adapted, "use_mem_rope": rotary, "rope_theta": 500.0}
    x, at = RNG.standard_normal((N, 2 * width)), stem.format(4)
    query, key, value = sides(tensors, at + ".self_attn.{}_proj", x, G)
    if rotary:
        query, key = turned(query, R, 500.0), turned(key, R, 500.0)
    block = block_of(tensors, config, "decoder", "self", 4)
    assert_read(
        block,
        x,
        query,
        key,
        fed=Fed("rms", f"{at}.input_layernorm.weight", EPSILON),
        circuit=(value, tensors[f"{at}.self_attn.o_proj.weight"]),
        causal=True,
        scale=(R / 2) ** -0.5,
        statuses=PARTIAL if adapted else (),
        whole_score=not adapted,
    )
    assert adapted == ("adapter of its own" in block.plan.reason)
