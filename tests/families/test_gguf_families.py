"""llama.cpp's attention by architecture, each written out once more from its graph."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
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
    assert_circuit,
    assert_read,
    block_of,
    gain,
    layer,
    linear,
    rms,
    sections,
    separate,
    sides,
    turned,
)

import wqk
from wqk.checkpoints.gguf import configuration
from wqk.checkpoints.modules import StateDict

WIDTH, EPSILON = 40, 0.01
PARTIAL = ("partial",)


@dataclass(frozen=True)
class Graph:
    """An architecture's graph in llama.cpp, and the metadata that choose its operations."""

    architecture: str
    groups: int = 2
    kind: str = "rms"  # of the norms
    order: str = ""  # of the rotary positions
    norms: str = ""  # of queries and keys, over each "head", with gains for "each head"
    metadata: dict[str, Any] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)  # of layer 0
    base: float = 500.0
    stretch: float = 1.0
    last: dict[str, Any] | None = None  # of the last layer, where it differs
    last_stretch: float = 1.0


ROWS = Path(__file__).with_name("graphs.toml").read_text(encoding="utf-8")
GRAPHS = {name: Graph(**row) for name, row in tomllib.loads(ROWS).items()}


def metadata_of(graph: Graph) -> dict[str, Any]:
    small = "layer_norm_epsilon" if graph.kind == "layer" else "layer_norm_rms_epsilon"
    counts = {
        "block_count": 2,
        "embedding_length": WIDTH,
        "attention.head_count": H,
        "attention.head_count_kv": graph.groups,
        "attention.key_length": R,
        f"attention.{small}": EPSILON,
        "rope.freq_base": 500.0,
        "rope.dimension_count": 4,
    }
    named = {
        f"{graph.architecture}.{key}": value for key, value in (counts | graph.metadata).items()
    }
    return {"general.architecture": graph.architecture, **named}


def tensors_of(graph: Graph, layers: int, fused: bool) -> Tensors:
    tensors, shifted = Tensors(), graph.kind == "layer"
    for n in range(layers):
        if fused:
            linear(tensors, f"blk.{n}.attn_qkv", (H + 2 * graph.groups) * R, WIDTH)
            linear(tensors, f"blk.{n}.attn_output", WIDTH, H * R)
        else:
            separate(tensors, f"blk.{n}.attn_{{}}", WIDTH, graph.groups, output="output")
        gain(tensors, f"blk.{n}.attn_norm", WIDTH, shifted)
        for side in "qk" if graph.norms else "":
            shape = (H if side == "q" else graph.groups, R) if graph.norms == "each head" else (R,)
            gain(tensors, f"blk.{n}.attn_{side}_norm", shape)
    return tensors


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_of_llama_cpp(name: str, fused: bool) -> None:
    graph = GRAPHS[name]
    config = configuration(metadata_of(graph))
    tensors, last = tensors_of(graph, config["block_count"], fused), config["block_count"] - 1
    for n, facts, base, stretch in (
        (0, graph.told, graph.base, graph.stretch),
        (last, graph.last, 500.0, graph.last_stretch),
    ):
        facts = graph.told if facts is None else facts
        at, x = f"blk.{n}", RNG.standard_normal((N, WIDTH))
        if fused:
            query, key, value = sections(applied(tensors, f"{at}.attn_qkv", x), graph.groups)
        else:
            query, key, value = sides(tensors, f"{at}.attn_{{}}", x, graph.groups)
        turning = []
        for side, vectors in (("q", query), ("k", key)):
            vectors = np.clip(vectors, -facts.get("clip", 99), facts.get("clip", 99))
            if graph.norms:
                gains = tensors[f"{at}.attn_{side}_norm.weight"]
                gains = gains[:, None] if gains.ndim == 2 else gains
                small = (EPSILON,) if graph.kind == "rms" else (0.0, EPSILON)
                vectors = (rms if graph.kind == "rms" else layer)(vectors, gains, *small)
            if graph.order:
                vectors = turned(vectors, 4, base, graph.order, stretch)
            turning.append(vectors)
        assert_read(
            block_of(tensors, config, "decoder", "self", n),
            x,
            *turning,
            fed=Fed(graph.kind, f"{at}.attn_norm.weight", EPSILON),
            circuit=(value, tensors[f"{at}.attn_output.weight"]),
            causal=True,
            statuses=PARTIAL if graph.norms or "clip" in facts else (),
            **facts,
        )


def test_a_graph_of_bert() -> None:
    """The first layer is fed by the norm of the embeddings, the others by the layer before."""
    config, tensors = configuration(metadata_of(Graph("bert", H, kind="layer"))), Tensors()
    for n in range(2):
        separate(tensors, f"blk.{n}.attn_{{}}", H * R, output="output")
        gain(tensors, f"blk.{n}.layer_output_norm", H * R, bias=True)
    gain(tensors, "token_embd_norm", H * R, bias=True)
    x = RNG.standard_normal((N, H * R))
    for n, fed_by in enumerate(("token_embd_norm", "blk.0.layer_output_norm")):
        query, key, value = sides(tensors, f"blk.{n}.attn_{{}}", x)
        assert_read(
            block_of(tensors, config, "encoder", "self", n),
            x,
            query,
            key,
            fed=Fed("layer", f"{fed_by}.weight", EPSILON),
            circuit=(value, tensors[f"blk.{n}.attn_output.weight"]),
        )


# As llama.cpp's loader of towers (`clip.cpp`) names tensors, and counts layers and heads.
TOWERS = {"vision": "v", "audio": "a"}


def tower_metadata(heads_of_keys: int | None) -> dict[str, Any]:
    """Metadata of a file with both towers, of sizes of their own."""
    metadata: dict[str, Any] = {"general.architecture": "clip"}
    for depth, tower in enumerate(TOWERS, start=2):
        metadata |= {
            f"clip.has_{tower}_encoder": True,
            f"clip.{tower}.block_count": depth,
            f"clip.{tower}.attention.head_count": H,
            f"clip.{tower}.attention.layer_norm_epsilon": EPSILON,
        }
        if heads_of_keys:
            metadata[f"clip.{tower}.attention.head_count_kv"] = heads_of_keys
    return metadata


def tower_tensors(groups: int, fused: bool, more: int = 0) -> Tensors:
    """Tensors of both towers; of a joint tensor, only pictures' towers are known.

    Each tower has ``more`` layers than its metadata count.
    """
    tensors = Tensors()
    for depth, (tower, letter) in enumerate(TOWERS.items(), start=2):
        for n in range(depth + more):
            if fused and tower == "vision":
                linear(tensors, f"{letter}.blk.{n}.attn_qkv", (H + 2 * groups) * R, WIDTH)
                linear(tensors, f"{letter}.blk.{n}.attn_out", WIDTH, H * R)
            else:
                name = f"{letter}.blk.{n}.attn_{{}}"
                separate(tensors, name, WIDTH, groups, output="out")
            gain(tensors, f"{letter}.blk.{n}.ln1", WIDTH, bias=True)
    return tensors


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("heads_of_keys", [None, 2])
def test_towers_of_llama_cpp(heads_of_keys: int | None, fused: bool) -> None:
    """Keys have as many heads as queries, unless the file counts them.

    The norms before and the positions differ by projector, and are not read: only forms are
    compared.
    """
    groups = heads_of_keys or H
    config = configuration(tower_metadata(heads_of_keys))
    tensors, x = tower_tensors(groups, fused), RNG.standard_normal((N, WIDTH))
    weights = {name: value for name, value in tensors.items() if name.endswith("weight")}
    for depth, (tower, letter) in enumerate(TOWERS.items(), start=2):
        at = f"{letter}.blk.{depth - 1}"
        if fused and tower == "vision":
            query, key, value = sections(applied(weights, f"{at}.attn_qkv", x), groups)
        else:
            query, key, value = sides(weights, f"{at}.attn_{{}}", x, groups)
        block = block_of(tensors, config, tower, "self", depth - 1)
        assert (block.plan.statuses, block.plan.causal) == (("guessed",), None)
        assert len(block) == H
        for h, form in enumerate(block):
            scores = query[h] @ key[h * groups // H].T
            np.testing.assert_allclose(x @ form.qk.dense() @ x.T, scores, atol=1e-9)
        assert_circuit(block, value, tensors[f"{at}.attn_out.weight"], x)


def test_layers_that_a_tower_of_llama_cpp_does_not_count_are_not_read() -> None:
    """The loader takes the first layers, as many as the metadata count."""
    tensors = tower_tensors(H, fused=False, more=1)
    model = wqk.open(StateDict(tensors, configuration(tower_metadata(None)), "stand-in"))
    assert [(plan.stack, plan.layer) for plan in model.plans] == [
        ("vision", 0),
        ("vision", 1),
        ("audio", 0),
        ("audio", 1),
        ("audio", 2),
    ]
