"""Layouts of libraries that need not be installed: each library's attention, written out once more.

The tensors have the names and shapes that the library saves, and the forward passes follow its
code, in float64, with one loop over heads and nothing of wqk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.families.completeness import omissions

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.families import find_family

N, H, R = 7, 6, 8  # tokens, heads, their width
RNG = np.random.default_rng(0)
Tensors = dict[str, np.ndarray]


def linear(tensors: Tensors, name: str, rows: int, width: int, bias: bool = True) -> None:
    tensors[f"{name}.weight"] = RNG.standard_normal((rows, width)) / np.sqrt(width)
    if bias:
        tensors[f"{name}.bias"] = RNG.standard_normal(rows)


def applied(tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def split(vectors: np.ndarray, heads: int) -> np.ndarray:
    """(N, heads R) as (heads, N, R)."""
    return vectors.reshape(len(vectors), heads, -1).swapaxes(0, 1)


def rms(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gain


def layer(x: np.ndarray, gain: np.ndarray, shift: np.ndarray, epsilon: float) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon) * gain + shift


def turned(x: np.ndarray, width: int, base: float) -> np.ndarray:
    """The first dimensions of (H, N, R) turned in halves, the others as they are."""
    half = width // 2
    angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
    a, b, rest = x[..., :half], x[..., half:width], x[..., width:]
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cosine - b * sine, b * cosine + a * sine, rest], axis=-1)


def block_of(tensors: Tensors, config: dict[str, Any], stack: str, kind: str, at: int) -> wqk.Block:
    checkpoint = StateDict(tensors, config, "stand-in")
    assert omissions(checkpoint, find_family(checkpoint)) == []
    model = wqk.open(checkpoint)
    (block,) = (b for b in model if (b.stack, b.kind, b.layer) == (stack, kind, at))
    return block


LITGPT = {
    "model_type": "litgpt", "n_layer": 2, "n_head": H, "n_query_groups": 2, "head_size": R,
    "rotary_percentage": 0.5, "rope_base": 500, "attention_scores_scalar": 20,
    "attention_logit_softcapping": 3.0, "norm_eps": 0.1, "norm_qk": True,
}  # fmt: skip


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm", "unit offset"])
def test_litgpt(norm: str, older: bool) -> None:
    groups, width, tensors = 2, 48, Tensors()
    fused = "attn.attn" if older else "attn.qkv"
    for n in range(2):
        at = f"transformer.h.{n}"
        linear(tensors, f"{at}.{fused}", (H + 2 * groups) * R, width)
        linear(tensors, f"{at}.attn.proj", width, H * R)
        for name, size in (("norm_1", width), ("attn.norm_q", R), ("attn.norm_k", R)):
            tensors[f"{at}.{name}.weight"] = RNG.uniform(0.5, 2, size)
            if norm == "LayerNorm":
                tensors[f"{at}.{name}.bias"] = RNG.standard_normal(size)
    told = {"unit_offset": True} if norm == "unit offset" else {}
    config = LITGPT | told | {"norm_class_name": norm.replace("unit offset", "RMSNorm")}
    x, at = RNG.standard_normal((N, width)), "transformer.h.1"
    rows = applied(tensors, f"{at}.{fused}", x)
    if older:  # each key head after its queries
        rows = rows.reshape(N, groups, H // groups + 2, R)
        query, key = rows[:, :, :-2].reshape(N, -1), rows[:, :, -2].reshape(N, -1)
        value = rows[:, :, -1].reshape(N, -1)
    else:
        query, key, value = np.split(rows, [H * R, (H + groups) * R], axis=1)

    def normalized(vectors: np.ndarray, name: str) -> np.ndarray:
        gain = tensors[f"{at}.attn.{name}.weight"] + (norm == "unit offset")
        shift = tensors.get(f"{at}.attn.{name}.bias")
        return rms(vectors, gain, 0.1) if shift is None else layer(vectors, gain, shift, 0.1)

    q = turned(normalized(split(query, H), "norm_q"), R // 2, 500)
    k = turned(normalized(split(key, groups), "norm_k"), R // 2, 500)
    expected = [3 * np.tanh(q[h] @ k[h // 3].T / np.sqrt(20) / 3) for h in range(H)]
    block = block_of(tensors, config, "decoder", "self", 1)
    np.testing.assert_allclose(block.logits(x, x), expected, rtol=1e-9, atol=1e-9)
    plain = {k: v for k, v in config.items() if k != "attention_scores_scalar"}
    scale = block_of(tensors, plain, "decoder", "self", 1).plan.scale
    assert scale == pytest.approx(R**-0.5)
    assert block.plan.causal
    fed = block.plan.query.input_norm
    assert fed is not None
    kind = "layer" if norm == "LayerNorm" else "rms"
    assert (fed.kind, fed.offset) == (kind, float(norm == "unit offset"))
    assert fed.gain[0].name == f"{at}.norm_1.weight"
    assert_circuit(block, tensors, f"{at}.attn.proj", split(value, groups), x)
    local = config | {"sliding_window_size": 4, "rope_local_base_freq": 9.0}
    windowed = block_of(tensors, local, "decoder", "self", 1).plan
    assert windowed.rotary is not None
    assert windowed.window == "4"
    np.testing.assert_allclose(windowed.rotary.frequencies, [1, 1 / 3])
    unsaid = {k: v for k, v in config.items() if k != "rotary_percentage"}  # a quarter
    quarter = block_of(tensors, unsaid, "decoder", "self", 1).plan.rotary
    assert quarter is not None
    assert len(quarter.frequencies) == 1


def assert_circuit(
    block: wqk.Block, tensors: Tensors, output: str, values: np.ndarray, x: np.ndarray
) -> None:
    """What each head writes about a difference of inputs, past value and output."""
    written = x @ block.ov.dense().reshape(-1, x.shape[1], x.shape[1])
    weight = tensors[f"{output}.weight"]
    for head, rows in enumerate(written):
        own = values[head * len(values) // len(written)]
        expected = own @ weight[:, head * R : (head + 1) * R].T
        np.testing.assert_allclose(rows - rows[0], expected - expected[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("masked", [True, False])
def test_open_clip(masked: bool) -> None:
    config = {
        "model_type": "open_clip",
        "vision_cfg": {"layers": 2, "heads": H},
        "text_cfg": {"layers": 3, "heads": 4} | ({} if masked else {"no_causal_mask": True}),
    }
    towers = (("vision", "visual.transformer", 2, H, 48), ("text", "transformer", 3, 4, 32))
    tensors = Tensors()
    for _, stem, layers, _, width in towers:
        for n in range(layers):
            at = f"{stem}.resblocks.{n}"
            tensors[f"{at}.attn.in_proj_weight"] = RNG.standard_normal((3 * width, width))
            tensors[f"{at}.attn.in_proj_bias"] = RNG.standard_normal(3 * width)
            linear(tensors, f"{at}.attn.out_proj", width, width)
            tensors[f"{at}.ln_1.weight"] = RNG.uniform(0.5, 2, width)
            tensors[f"{at}.ln_1.bias"] = RNG.standard_normal(width)
    for stack, stem, layers, heads, width in towers:
        at, x = f"{stem}.resblocks.{layers - 1}", RNG.standard_normal((N, width))
        packed = x @ tensors[f"{at}.attn.in_proj_weight"].T + tensors[f"{at}.attn.in_proj_bias"]
        query, key, value = (split(part, heads) for part in np.split(packed, 3, axis=1))
        block = block_of(tensors, config, stack, "self", layers - 1)
        expected = query @ key.swapaxes(1, 2) / np.sqrt(width // heads)
        np.testing.assert_allclose(block.logits(x, x), expected, rtol=1e-9, atol=1e-9)
        assert block.plan.causal == (masked and stack == "text")
        fed = block.plan.query.input_norm
        assert fed is not None
        assert (fed.kind, fed.gain[0].name) == ("layer", f"{at}.ln_1.weight")
        assert_circuit(block, tensors, f"{at}.attn.out_proj", value, x)


def test_timm() -> None:
    config = {"model_type": "timm", "depth": 2, "num_heads": H}
    tensors, width = Tensors(), H * R
    for n in range(2):
        linear(tensors, f"blocks.{n}.attn.qkv", 3 * width, width)
        linear(tensors, f"blocks.{n}.attn.proj", width, width)
        tensors[f"blocks.{n}.norm1.weight"] = RNG.uniform(0.5, 2, width)
        tensors[f"blocks.{n}.norm1.bias"] = RNG.standard_normal(width)
    x = RNG.standard_normal((N, width))
    rows = applied(tensors, "blocks.1.attn.qkv", x).reshape(N, 3, H, R).transpose(1, 2, 0, 3)
    block = block_of(tensors, config, "vision", "self", 1)
    expected = rows[0] @ rows[1].swapaxes(1, 2) / np.sqrt(R)
    np.testing.assert_allclose(block.logits(x, x), expected, rtol=1e-9, atol=1e-9)
    assert not block.plan.causal
    fed = block.plan.query.input_norm
    assert fed is not None
    assert (fed.kind, fed.gain[0].name) == ("layer", "blocks.1.norm1.weight")
    assert_circuit(block, tensors, "blocks.1.attn.proj", rows[2], x)
    # Another part of a larger model with blocks of the same name is none of it.
    more = tensors | {f"aside.{name}": value for name, value in tensors.items()}
    assert len(wqk.open(StateDict(more, config, "stand-in"))) == 2


# A stream's projections of queries and keys, and their norms.
JOINT = {
    "image": (("to_q", "norm_q"), ("to_k", "norm_k")),
    "text": (("add_q_proj", "norm_added_q"), ("add_k_proj", "norm_added_k")),
}


@pytest.mark.parametrize("kind", ["SD3", "Flux"])
def test_diffusers_joint_attention(kind: str) -> None:
    """Image and text meet in one softmax; some blocks have one stream, or a second attention.

    The families diffusers-sd3 and diffusers-flux.
    """
    tensors, width = Tensors(), H * R
    alone = ("transformer_blocks.1.attn2", "image-second", 1)
    if kind == "Flux":
        alone = ("single_transformer_blocks.0.attn", "single", 0)
    places = {f"transformer_blocks.{n}.attn": [*JOINT.values()] for n in range(2)}
    for place, streams in (places | {alone[0]: [JOINT["image"]]}).items():
        for side in (side for stream in streams for side in stream):
            linear(tensors, f"{place}.{side[0]}", width, width, bias=False)
            tensors[f"{place}.{side[1]}.weight"] = RNG.uniform(0.5, 2, R)
    config = {"model_type": f"diffusers-{kind}Transformer2DModel", "num_attention_heads": H}
    place = "transformer_blocks.1.attn"
    # So small that the norms' epsilon counts.
    seen = {stream: RNG.standard_normal((N, width)) / 900 for stream in JOINT}
    cases = [(a, b, place, a, "self" if a == b else "cross", 1) for a in JOINT for b in JOINT]
    cases.append(("image", "image", alone[0], alone[1], "self", alone[2]))
    assert len(wqk.open(StateDict(tensors, config, "stand-in"))) == 9
    for one, other, at, stack, attention, number in cases:
        (q, q_norm), (k, k_norm) = JOINT[one][0], JOINT[other][1]
        query, key = (
            rms(split(applied(tensors, f"{at}.{name}", x), H), tensors[f"{at}.{norm}.weight"], 1e-6)
            for name, norm, x in ((q, q_norm, seen[one]), (k, k_norm, seen[other]))
        )
        block = block_of(tensors, config, stack, attention, number)
        expected = query @ key.swapaxes(1, 2) / np.sqrt(R)
        logits = block.logits(seen[one], seen[other])
        np.testing.assert_allclose(logits, expected, rtol=1e-7, atol=1e-9)
        assert not block.plan.causal
        assert ("rotary" in block.plan.position) == (kind == "Flux")


@pytest.mark.parametrize("kind", ["DiT", "PixArt", "Wan"])
def test_diffusers_attention_to_the_text(kind: str) -> None:
    """The second attention of a block is that to the text; Wan normalizes over all heads.

    The families diffusers-dit and diffusers-wan.
    """
    tensors, width = Tensors(), H * R
    wan, attentions = kind == "Wan", ("attn1", "attn2")[: 1 if kind == "DiT" else 2]
    stem = "blocks" if wan else "transformer_blocks"
    for n in range(2):
        for at in (f"{stem}.{n}.{name}" for name in attentions):
            linear(tensors, f"{at}.to_q", width, width, bias=not wan)
            linear(tensors, f"{at}.to_k", width, width, bias=not wan)
            for norm in ("norm_q", "norm_k") if wan else ():
                tensors[f"{at}.{norm}.weight"] = RNG.uniform(0.5, 2, width)
    name = "WanTransformer3DModel" if wan else f"{kind}Transformer2DModel"
    config = {"model_type": f"diffusers-{name}", "num_attention_heads": H, "eps": 1e-3}
    stack = "video" if wan else "image"
    assert len(wqk.open(StateDict(tensors, config, "stand-in"))) == 2 * len(attentions)
    for attention, kind_of in zip(attentions, ("self", "cross"), strict=False):
        at, sides = f"{stem}.1.{attention}", []
        x, y = RNG.standard_normal((2, N, width)) / 30
        for given, side in ((x, "q"), (y, "k")):
            rows = applied(tensors, f"{at}.to_{side}", given)
            rows = rms(rows, tensors[f"{at}.norm_{side}.weight"], 1e-3) if wan else rows
            sides.append(split(rows, H))
        block = block_of(tensors, config, stack, kind_of, 1)
        expected = sides[0] @ sides[1].swapaxes(1, 2) / np.sqrt(R)
        np.testing.assert_allclose(block.logits(x, y), expected, rtol=1e-7, atol=1e-9)
        assert not block.plan.causal
        assert ("rotary" in block.plan.position) == (wan and kind_of == "self")


GGUF = {
    "block_count": 2, "attention": {"head_count": H, "head_count_kv": 2, "key_length": R},
    "score_scale": R**-0.5,
}  # fmt: skip


def test_gguf_bert() -> None:
    """The first layer is fed by the norm of the embeddings, the others by the layer before."""
    tensors, width = Tensors(), H * R
    for n in range(2):
        for side in ("q", "k", "v", "output"):
            linear(tensors, f"blk.{n}.attn_{side}", width, width)
        tensors[f"blk.{n}.layer_output_norm.weight"] = RNG.uniform(0.5, 2, width)
        tensors[f"blk.{n}.layer_output_norm.bias"] = RNG.standard_normal(width)
    tensors["token_embd_norm.weight"] = RNG.uniform(0.5, 2, width)
    tensors["token_embd_norm.bias"] = RNG.standard_normal(width)
    attention = {"head_count": H, "head_count_kv": H, "layer_norm_epsilon": 0.01}
    config = GGUF | {"model_type": "gguf-bert", "attention": attention}
    x = RNG.standard_normal((N, width))
    for n, fed_by in enumerate(("token_embd_norm", "blk.0.layer_output_norm")):
        block = block_of(tensors, config, "encoder", "self", n)
        q, k, v = (split(applied(tensors, f"blk.{n}.attn_{s}", x), H) for s in "qkv")
        expected = q @ k.swapaxes(1, 2) / np.sqrt(R)
        np.testing.assert_allclose(block.logits(x, x), expected, rtol=1e-9, atol=1e-9)
        assert not block.plan.causal
        fed = block.plan.query.input_norm
        assert fed is not None
        assert (fed.kind, fed.gain[0].name, fed.epsilon) == ("layer", f"{fed_by}.weight", 0.01)
        assert_circuit(block, tensors, f"blk.{n}.attn_output", v, x)


def test_gguf_cohere() -> None:
    """Norms without means of each head with gains of its own, before interleaved positions."""
    tensors, width, groups = Tensors(), 40, 2
    for n in range(2):
        for side, heads in (("q", H), ("k", groups)):
            linear(tensors, f"blk.{n}.attn_{side}", heads * R, width, bias=False)
            tensors[f"blk.{n}.attn_{side}_norm.weight"] = RNG.uniform(0.5, 2, (heads, R))
        tensors[f"blk.{n}.attn_norm.weight"] = RNG.uniform(0.5, 2, width)
    config = GGUF | {
        "model_type": "gguf-command-r", "rope": {"freq_base": 500.0, "dimension_count": R},
    }  # fmt: skip
    x, sides = RNG.standard_normal((N, width)), []
    for side, heads in (("q", H), ("k", groups)):
        rows = split(applied(tensors, f"blk.1.attn_{side}", x), heads)
        gain = tensors[f"blk.1.attn_{side}_norm.weight"][:, None]
        pairs = layer(rows, gain, np.zeros(()), 1e-5).reshape(heads, N, R // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        angles = np.arange(N)[:, None] * 500.0 ** (-np.arange(R // 2) / (R // 2))
        even, odd = a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)
        sides.append(np.stack([even, odd], axis=-1).reshape(heads, N, R))
    expected = [sides[0][h] @ sides[1][h // 3].T / np.sqrt(R) for h in range(H)]
    block = block_of(tensors, config, "decoder", "self", 1)
    np.testing.assert_allclose(block.logits(x, x), expected, rtol=1e-4, atol=1e-4)
    assert block.plan.causal
    fed = block.plan.query.input_norm
    assert fed is not None
    assert (fed.kind, fed.gain[0].name) == ("layer", "blk.1.attn_norm.weight")
