"""llama.cpp's attention by architecture, each written out once more from its graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
    assert_read,
    block_of,
    gain,
    layer,
    linear,
    rms,
    sections,
    split,
    turned,
)

from wqk.checkpoints.gguf import configuration

WIDTH, EPSILON = 40, 0.01
PARTIAL = ("partial",)


@dataclass(frozen=True)
class Graph:
    """What an architecture's graph does, and the metadata of which it does so."""

    architecture: str
    groups: int = 2
    fused: bool = False
    kind: str = "rms"  # of the norms
    order: str = ""  # of the rotary positions
    norms: str = ""  # of queries and keys, over each "head", with gains for "each head"
    metadata: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)  # of layer 0
    base: float = 500.0
    stretch: float = 1.0
    last: dict[str, Any] | None = None  # of the last layer, where it differs
    last_stretch: float = 1.0


PAIRS, HALVES = "interleaved", "half"
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
GRAPHS = {
    "llama": Graph("llama", order=PAIRS),
    "llama, fused": Graph("llama", order=PAIRS, fused=True),
    "mistral, whose window llama.cpp does not read": Graph(
        "llama", order=PAIRS, metadata=LINEAR | {"attention.sliding_window": 5},
        stretch=4.0, last_stretch=4.0,
    ),
    "granite": Graph(
        "granite", order=PAIRS, metadata={"attention.scale": 0.2}, told={"scale": 0.2}
    ),
    "granite, fused": Graph(
        "granite", order=PAIRS, fused=True,
        metadata={"attention.scale": 0.2}, told={"scale": 0.2},
    ),
    "xverse": Graph("xverse", order=PAIRS),
    "qwen3": Graph("qwen3", order=HALVES, norms="head"),
    "phi3, whose window llama.cpp turns off": Graph(
        "phi3", order=HALVES, fused=True, metadata={"attention.sliding_window": 5}
    ),
    "gemma2": Graph(
        "gemma2", order=HALVES,
        metadata={"attention.sliding_window": 4, "attn_logit_softcapping": 0.5},
        told={"window": "4", "softcap": 0.5}, last={"softcap": 0.5},
    ),
    "gemma2, whose widest divides the model's width by its heads": Graph(
        "gemma2", order=HALVES, metadata={"attention.sliding_window": 4, "block_count": 46},
        told={"window": "4", "softcap": 50.0, "scale": (WIDTH // H) ** -0.5},
        last={"softcap": 50.0, "scale": (WIDTH // H) ** -0.5},
    ),
    "gemma3": Graph(
        "gemma3", order=HALVES, norms="head", base=9.0,
        metadata=LINEAR | {
            "attention.sliding_window": 4, "rope.freq_base_swa": 9.0, "block_count": 6},
        told={"window": "4"}, last={}, last_stretch=4.0,
    ),
    "gemma3, older": Graph(
        "gemma3", order=HALVES, norms="head", base=10_000.0,
        metadata={"attention.sliding_window": 4, "block_count": 6}, told={"window": "4"}, last={},
    ),
    "gemma3, whose widest divides the model's width by its heads": Graph(
        "gemma3", order=HALVES, norms="head", metadata={"block_count": 62},
        told={"scale": (WIDTH // H) ** -0.5},
    ),
    "jais": Graph(
        "jais", H, kind="layer", fused=True, metadata={"attention.max_alibi_bias": 8.0},
        told={"position": "alibi", "scale": 1 / R},
    ),
    "command-r": Graph("command-r", kind="layer", order=PAIRS, norms="each head"),
    "stablelm": Graph("stablelm", kind="layer", order=HALVES, norms="each head"),
    "gptneox": Graph("gptneox", H, kind="layer", order=HALVES, fused=True),
    "falcon": Graph("falcon", 1, kind="layer", order=HALVES, fused=True),
    "gpt2": Graph("gpt2", H, kind="layer", fused=True),
    "starcoder": Graph("starcoder", 1, kind="layer", fused=True),
    "bloom": Graph("bloom", H, kind="layer", fused=True, told={"position": "alibi"}),
    "mpt": Graph(
        "mpt", H, kind="layer", fused=True,
        metadata={"attention.clamp_kqv": 0.75, "attention.max_alibi_bias": 8.0},
        told={"position": "alibi", "clip": 0.75},
    ),
}  # fmt: skip


def metadata_of(graph: Graph) -> dict[str, Any]:
    small = "layer_norm_epsilon" if graph.kind == "layer" else "layer_norm_rms_epsilon"
    own = {
        "block_count": 2, "embedding_length": WIDTH, "attention.head_count": H,
        "attention.head_count_kv": graph.groups, "attention.key_length": R,
        f"attention.{small}": EPSILON, "rope.freq_base": 500.0, "rope.dimension_count": 4,
    }  # fmt: skip
    named = {f"{graph.architecture}.{key}": value for key, value in (own | graph.metadata).items()}
    return {"general.architecture": graph.architecture, **named}


def tensors_of(graph: Graph, layers: int) -> Tensors:
    tensors, shifted = Tensors(), graph.kind == "layer"
    for n in range(layers):
        heads = {"q": H, "k": graph.groups, "v": graph.groups}
        if graph.fused:
            linear(tensors, f"blk.{n}.attn_qkv", sum(heads.values()) * R, WIDTH)
        else:
            for side, count in heads.items():
                linear(tensors, f"blk.{n}.attn_{side}", count * R, WIDTH)
        linear(tensors, f"blk.{n}.attn_output", WIDTH, H * R)
        gain(tensors, f"blk.{n}.attn_norm", WIDTH, shifted)
        for side in "qk" if graph.norms else "":
            shape = (heads[side], R) if graph.norms == "each head" else (R,)
            gain(tensors, f"blk.{n}.attn_{side}_norm", shape)
    return tensors


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_of_llama_cpp(name: str) -> None:
    graph = GRAPHS[name]
    config = configuration(metadata_of(graph))
    tensors, last = tensors_of(graph, config["block_count"]), config["block_count"] - 1
    for n, told, base, stretch in (
        (0, graph.told, graph.base, graph.stretch),
        (last, graph.last, 500.0, graph.last_stretch),
    ):
        told = graph.told if told is None else told
        at, x = f"blk.{n}", RNG.standard_normal((N, WIDTH))
        if graph.fused:
            query, key, value = sections(applied(tensors, f"{at}.attn_qkv", x), graph.groups)
        else:
            heads = (("q", H), ("k", graph.groups), ("v", graph.groups))
            query, key, value = (split(applied(tensors, f"{at}.attn_{s}", x), h) for s, h in heads)
        sides = []
        for side, vectors in (("q", query), ("k", key)):
            vectors = np.clip(vectors, -told.get("clip", 99), told.get("clip", 99))
            if graph.norms:
                gains = tensors[f"{at}.attn_{side}_norm.weight"]
                gains = gains[:, None] if gains.ndim == 2 else gains
                small = (EPSILON,) if graph.kind == "rms" else (0.0, EPSILON)
                vectors = (rms if graph.kind == "rms" else layer)(vectors, gains, *small)
            if graph.order:
                vectors = turned(vectors, 4, base, graph.order, stretch)
            sides.append(vectors)
        assert_read(
            block_of(tensors, config, "decoder", "self", n), x, *sides,
            fed=Fed(graph.kind, f"{at}.attn_norm.weight", EPSILON),
            circuit=(value, tensors[f"{at}.attn_output.weight"]), causal=True,
            statuses=PARTIAL if graph.norms or "clip" in told else (), **told,
        )  # fmt: skip


def test_a_graph_of_bert() -> None:
    """The first layer is fed by the norm of the embeddings, the others by the layer before."""
    graph = Graph("bert", H, kind="layer")
    config, tensors = configuration(metadata_of(graph)), Tensors()
    for n in range(2):
        for side in ("q", "k", "v", "output"):
            linear(tensors, f"blk.{n}.attn_{side}", H * R, H * R)
        gain(tensors, f"blk.{n}.layer_output_norm", H * R, bias=True)
    gain(tensors, "token_embd_norm", H * R, bias=True)
    x = RNG.standard_normal((N, H * R))
    for n, fed_by in enumerate(("token_embd_norm", "blk.0.layer_output_norm")):
        query, key, value = (split(applied(tensors, f"blk.{n}.attn_{s}", x), H) for s in "qkv")
        assert_read(
            block_of(tensors, config, "encoder", "self", n), x, query, key,
            fed=Fed("layer", f"{fed_by}.weight", EPSILON),
            circuit=(value, tensors[f"blk.{n}.attn_output.weight"]),
        )  # fmt: skip
