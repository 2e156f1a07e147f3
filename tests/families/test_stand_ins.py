"""Layouts of libraries that need not be installed: each library's attention, written out once more.

The tensors have the names and shapes that the library saves, and the forward passes follow its
code.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.families.computing import (
    RNG,
    Fed,
    H,
    N,
    R,
    Tensors,
    applied,
    assert_read,
    block_of,
    by_key_head,
    gain,
    layer,
    linear,
    rms,
    sections,
    split,
    turned,
)

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.families import families, plan_attention

PARTIAL = ("partial",)
LITGPT = {
    "model_type": "litgpt",
    "n_layer": 2,
    "n_head": H,
    "n_query_groups": 2,
    "head_size": R,
    "rotary_percentage": 0.5,
    "rope_base": 500,
    "attention_scores_scalar": 20,
    "attention_logit_softcapping": 3.0,
    "norm_eps": 0.1,
    "norm_qk": True,
}


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
            gain(tensors, f"{at}.{name}", size, norm == "LayerNorm")
    facts = {"unit_offset": True} if norm == "unit offset" else {}
    named = {} if norm == "LayerNorm" else {"norm_class_name": "RMSNorm"}
    config = LITGPT | facts | named
    x, at = RNG.standard_normal((N, width)), "transformer.h.1"
    # At first, each key head came after its queries.
    query, key, value = (by_key_head if older else sections)(
        applied(tensors, f"{at}.{fused}", x), groups
    )

    def normalized(vectors: np.ndarray, name: str) -> np.ndarray:
        gains = tensors[f"{at}.attn.{name}.weight"] + (norm == "unit offset")
        shift = tensors.get(f"{at}.attn.{name}.bias")
        return rms(vectors, gains, 0.1) if shift is None else layer(vectors, gains, shift, 0.1)

    query, key = normalized(query, "norm_q"), normalized(key, "norm_k")
    kind = "layer" if norm == "LayerNorm" else "rms"
    fed = Fed(kind, f"{at}.norm_1.weight", 0.1, float(norm == "unit offset"))
    circuit = value, tensors[f"{at}.attn.proj.weight"]
    half = {"window": "4", "scale": 20**-0.5, "softcap": 3.0}
    unsaid = {k: v for k, v in config.items() if "percent" not in k and "scalar" not in k}
    window = config | {"sliding_window_size": 4}
    for changed, width, base, facts in (
        (config, 4, 500, half | {"window": None}),
        (unsaid, 2, 500, {"softcap": 3.0}),  # a quarter of the width
        (window, 4, 500, half),
        (window | {"rope_local_base_freq": 9.0}, 4, 9, half),
    ):
        assert_read(
            block_of(tensors, changed, "decoder", "self", 1),
            x,
            turned(query, width, base),
            turned(key, width, base),
            fed=fed,
            circuit=circuit,
            causal=True,
            statuses=PARTIAL,
            **facts,
        )


@pytest.mark.parametrize("size", [-4, "6", R + 1])
def test_litgpt_s_width_of_heads_has_to_be_that_of_the_rows(tmp_path: Path, size: object) -> None:
    rows = (H + 2 * 2) * R
    torch.save({"transformer.h.0.attn.qkv.weight": torch.ones(rows, 8)}, tmp_path / "lit_model.pth")
    settings = {"n_layer": 1, "n_head": H, "n_query_groups": 2, "head_size": size}
    (tmp_path / "model_config.yaml").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=f"head_size is .*has {rows} rows for {H} heads"):
        wqk.open(tmp_path)


@pytest.mark.parametrize("within", ["", "text."])
@pytest.mark.parametrize("masked", [True, False])
def test_open_clip(masked: bool, within: str) -> None:
    config = {
        "model_type": "open_clip",
        "vision_cfg": {"layers": 2, "heads": H, "width": 48},
        "text_cfg": {"layers": 3, "heads": H} | ({} if masked else {"no_causal_mask": True}),
    }
    towers = (("vision", "visual.transformer", 2), ("text", f"{within}transformer", 3))
    tensors, width = Tensors(), H * R
    for _, stem, layers in towers:
        for n in range(layers):
            at = f"{stem}.resblocks.{n}"
            tensors[f"{at}.attn.in_proj_weight"] = RNG.standard_normal((3 * width, width)) / 7
            tensors[f"{at}.attn.in_proj_bias"] = RNG.standard_normal(3 * width)
            linear(tensors, f"{at}.attn.out_proj", width, width)
            gain(tensors, f"{at}.ln_1", width, bias=True)
    for stack, stem, layers in towers:
        at, x = f"{stem}.resblocks.{layers - 1}", RNG.standard_normal((N, width))
        packed = x @ tensors[f"{at}.attn.in_proj_weight"].T + tensors[f"{at}.attn.in_proj_bias"]
        query, key, value = sections(packed, H)
        assert_read(
            block_of(tensors, config, stack, "self", layers - 1),
            x,
            query,
            key,
            fed=Fed("layer", f"{at}.ln_1.weight", 1e-5),
            circuit=(value, tensors[f"{at}.attn.out_proj.weight"]),
            causal=masked and stack == "text",
        )


def test_timm() -> None:
    config = {"model_type": "timm", "depth": 2, "num_heads": H, "layer_norm_epsilon": 1e-6}
    tensors, width = Tensors(), H * R
    for n in range(2):
        linear(tensors, f"blocks.{n}.attn.qkv", 3 * width, width)
        linear(tensors, f"blocks.{n}.attn.proj", width, width)
        gain(tensors, f"blocks.{n}.norm1", width, bias=True)
    x = RNG.standard_normal((N, width))
    query, key, value = sections(applied(tensors, "blocks.1.attn.qkv", x), H)
    assert_read(
        block_of(tensors, config, "vision", "self", 1),
        x,
        query,
        key,
        fed=Fed("layer", "blocks.1.norm1.weight", 1e-6),
        circuit=(value, tensors["blocks.1.attn.proj.weight"]),
    )
    # Another part of a larger model with blocks of the same name is none of it.
    more = tensors | {f"aside.{name}": value for name, value in tensors.items()}
    assert len(wqk.open(StateDict(more, config, "stand-in"))) == 2
    # Where attention comes after stages of convolution, it is another architecture's.
    staged = {f"stages.3.{name}": value for name, value in tensors.items()}
    with pytest.raises(CheckpointError, match="none of its 12 tensors"):
        plan_attention(StateDict(staged, config, "stand-in"), families()["timm"])


def test_gradium_phonon_tts_as_its_runtime_stores_it() -> None:
    """The publisher's file also contains a codec, whose layers have names of the same kind.

    Queries, keys and values are a joint projection without biases; pairs of neighbors turn.
    """
    tensors, width = Tensors(), H * R
    codec = [
        f"{tower}.transformer" for tower in ("mimi.encoder_transformer", "mimi.decoder_transformer")
    ]
    for stem, size in [("flow_lm.transformer", width), *((stem, 2 * width) for stem in codec)]:
        for n in range(2):
            at = f"{stem}.layers.{n}"
            linear(tensors, f"{at}.self_attn.in_proj", 3 * size, size, bias=False)
            linear(tensors, f"{at}.self_attn.out_proj", size, size, bias=False)
            gain(tensors, f"{at}.norm1", size, bias=True)
            gain(tensors, f"{at}.norm2", size, bias=True)
    config = {
        "model_type": "gradium_phonon_tts",
        "hidden_size": width,
        "num_attention_heads": H,
        "num_hidden_layers": 2,
        "layer_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    x, at = RNG.standard_normal((N, width)), "flow_lm.transformer.layers.1"
    query, key, value = sections(applied(tensors, f"{at}.self_attn.in_proj", x), H)
    assert_read(
        block_of(tensors, config, "decoder", "self", 1),
        x,
        turned(query, R, 500.0, "interleaved"),
        turned(key, R, 500.0, "interleaved"),
        fed=Fed("layer", f"{at}.norm1.weight", 1e-3),
        circuit=(value, tensors[f"{at}.self_attn.out_proj.weight"]),
        causal=True,
    )


# A stream's projections of queries, keys and values, the norms of the first two, and its output.
JOINT = {
    "image": ["to_q", "to_k", "to_v", "norm_q", "norm_k", "to_out.0"],
    "text": [
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "norm_added_q",
        "norm_added_k",
        "to_add_out",
    ],
}


@pytest.mark.parametrize("kind", ["SD3", "Flux", "QwenImage"])
def test_diffusers_joint_attention(kind: str) -> None:
    """Image and text meet in one softmax; some blocks have one stream, or a second attention.

    The families diffusers-sd3, diffusers-flux and diffusers-qwen-image.
    """
    tensors, width, flux = Tensors(), H * R, kind == "Flux"
    single = [f"single_transformer_blocks.{n}.attn" for n in range(3 if flux else 0)]
    alone = {
        "Flux": [("single", 2, "single_transformer_blocks.2.attn")],
        "SD3": [("image-second", 1, "transformer_blocks.1.attn2")],
        "QwenImage": [],
    }[kind]
    places = {f"transformer_blocks.{n}.attn": [*JOINT.values()] for n in range(2)}
    for place, streams in (
        places | {p: [JOINT["image"]] for p in single or [at for *_, at in alone]}
    ).items():
        for *projections, norm_q, norm_k, output in streams:
            # What single blocks put out is projected along with their MLP's.
            for name in [*projections, *([] if place in single else [output])]:
                linear(tensors, f"{place}.{name}", width, width, bias=False)
            gain(tensors, f"{place}.{norm_q}", R)
            gain(tensors, f"{place}.{norm_k}", R)
    config = {
        "model_type": f"diffusers-{kind}Transformer2DModel",
        "num_attention_heads": H,
        "num_layers": 2,
        "num_single_layers": 3,
        "axes_dims_rope": [2, 2, R - 4],
    }
    # So small that the norms' epsilon counts.
    seen = {stream: RNG.standard_normal((N, width)) / 900 for stream in JOINT}
    place = "transformer_blocks.1.attn"
    cases = [(a, b, place, a, "self" if a == b else "cross", 1) for a in JOINT for b in JOINT]
    cases += [("image", "image", at, stack, "self", n) for stack, n, at in alone]
    blocks = {"Flux": (11, 6), "SD3": (9, 5), "QwenImage": (8, 4)}[kind]
    fewer = config | {"num_layers": 1, "num_single_layers": 2}
    for sizes, count in zip((config, fewer), blocks, strict=True):
        assert len(wqk.open(StateDict(tensors, sizes, "stand-in"))) == count
    for query_stream, key_stream, at, stack, attention, number in cases:
        (q, _, _, q_norm, _, output), (_, k, v, _, k_norm, _) = (
            JOINT[query_stream],
            JOINT[key_stream],
        )
        query, key = (
            rms(split(applied(tensors, f"{at}.{name}", x), H), tensors[f"{at}.{norm}.weight"], 1e-6)
            for name, norm, x in ((q, q_norm, seen[query_stream]), (k, k_norm, seen[key_stream]))
        )
        value = split(applied(tensors, f"{at}.{v}", seen[key_stream]), H)
        written = tensors.get(f"{at}.{output}.weight")
        block = block_of(tensors, config, stack, attention, number)
        assert_read(
            block,
            seen[query_stream],
            query,
            key,
            y=seen[key_stream],
            tolerance=1e-7,
            circuit=None if written is None else (value, written),
            statuses=PARTIAL,
            position="" if kind == "SD3" else "rotary, on three axes",
        )
        if written is None:
            assert block.plan.value.tensor == f"{at}.to_v.weight"


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
            for side in ("to_q", "to_k", "to_v", "to_out.0"):
                linear(tensors, f"{at}.{side}", width, width, bias=not wan)
            for norm in ("norm_q", "norm_k") if wan else ():
                gain(tensors, f"{at}.{norm}", width)
        if wan:
            gain(tensors, f"{stem}.{n}.norm2", width, bias=True)
    name = "WanTransformer3DModel" if wan else f"{kind}Transformer2DModel"
    config = {
        "model_type": f"diffusers-{name}",
        "num_attention_heads": H,
        "attention_head_dim": R,
        "eps": 1e-3,
        "num_layers": 2,
    }
    stack = "video" if wan else "image"
    assert len(wqk.open(StateDict(tensors, config, "stand-in"))) == 2 * len(attentions)
    for attention, kind_of in zip(attentions, ("self", "cross"), strict=False):
        at, sides = f"{stem}.1.{attention}", []
        x, y = RNG.standard_normal((2, N, width)) / 30
        for inputs, side in ((x, "q"), (y, "k")):
            rows = applied(tensors, f"{at}.to_{side}", inputs)
            rows = rms(rows, tensors[f"{at}.norm_{side}.weight"], 1e-3) if wan else rows
            sides.append(split(rows, H))
        value = split(applied(tensors, f"{at}.to_v", y), H)
        is_fed = wan and kind_of == "cross"
        assert_read(
            block_of(tensors, config, stack, kind_of, 1),
            x,
            *sides,
            y=y,
            tolerance=1e-7,
            fed=Fed("layer", f"{stem}.1.norm2.weight", 1e-3) if is_fed else None,
            circuit=(value, tensors[f"{at}.to_out.0.weight"]),
            statuses=PARTIAL if wan else (),
            position="rotary, on three axes" if wan and kind_of == "self" else "",
        )
