"""Ceilings are reached: a bound that is too high by a factor is as wrong as one that is too low."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import small
from tests.small import sizes

import wqk
from wqk.attention import Block
from wqk.attention.measures import Ceilings
from wqk.checkpoints.modules import StateDict

D = 6


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of its own for each test, so that the order of tests changes no number."""
    return np.random.default_rng(4)


def rotary(head_width: int, heads: int = 2, **biases: Any) -> Block:
    """A block whose inputs a norm feeds."""
    sizes = {"layers": 1, "heads": heads, "key_heads": 1, "head_width": head_width, "width": D}
    return wqk.open(small.llama(**sizes, **biases, norms=True, rope_theta=50.0))[0]


def ceiling(block: Block, *distances: int) -> Ceilings:
    ceilings = block.ceiling(distances or (0,))
    assert ceilings is not None
    return ceilings


def gain_of(block: Block) -> np.ndarray:
    return np.asarray(block.read(list(block.plan.query.input_norm.gain))[0])


@pytest.mark.parametrize("distance", [0, 3, 40])
def test_the_ceiling_at_a_distance_is_reached_exactly(distance: int) -> None:
    block = rotary(4)
    gain = gain_of(block)
    # The scores of every pair of coordinates, each an input of the norm's length.
    matrices = block.logits(np.diag(gain), np.diag(gain), distance) * D
    ceilings = ceiling(block, distance)
    reached = np.linalg.norm(matrices, 2, axis=(1, 2))
    np.testing.assert_allclose(ceilings.at_distance[distance], reached)
    left, _, right = np.linalg.svd(matrices)
    for head in range(2):
        x = np.sqrt(D) * gain * left[head, :, 0]
        y = np.sqrt(D) * gain * right[head, 0]
        score = block.logits(x[None], y[None], distance)[head, 0, 0]
        assert score == pytest.approx(ceilings.at_distance[distance][head])


def test_the_ceiling_at_any_distance_is_nearly_reached_where_one_plane_turns() -> None:
    block = rotary(2)
    gain = gain_of(block)
    ceilings = ceiling(block)
    matrices = [block.logits(np.diag(gain), np.diag(gain), n) * D for n in range(300)]
    reached = np.linalg.norm(matrices, 2, axis=(2, 3)).max(0)
    assert (reached <= ceilings.any_distance * (1 + 1e-9)).all()
    assert (reached > 0.999 * ceilings.any_distance).all()
    for side, length in ((block.query, ceilings.query_norm), (block.key, ceilings.key_norm)):
        linear = np.sqrt(D) * np.linalg.norm(side.weight[0] * gain, 2)
        assert length[0] == pytest.approx(linear)


@pytest.mark.parametrize(
    ("biased", "size", "excess"),
    [("q", 1, 1.5), ("k", 1, 1.5), ("qk", 1, 1.5), ("q", 30, 2), ("k", 30, 2)],
)
def test_with_biases_the_ceiling_is_above_all_inputs_and_not_far_above(
    rng: np.random.Generator, biased: str, size: float, excess: float
) -> None:
    block = rotary(4, heads=1, biases=biased, bias_size=size)
    gain = gain_of(block)
    (highest,) = ceiling(block).at_distance[0]
    zero = np.zeros((1, D))

    def best_input(slope: np.ndarray) -> np.ndarray:
        """The input of the norm's length along which a linear score grows most."""
        return (np.sqrt(D) * gain * slope.ravel() / np.linalg.norm(slope))[None]

    scores = []
    for start in rng.standard_normal((8, 1, D)):
        y = start
        for _ in range(40):  # each side's best input for the other's: scores only grow
            x = best_input(block.logits(np.diag(gain), y, 0) - block.logits(zero, y, 0))
            y = best_input(block.logits(x, np.diag(gain), 0) - block.logits(x, zero, 0))
        scores.append(float(block.logits(x, y, 0)[0, 0, 0]))
    assert max(scores) <= highest * (1 + 1e-9)
    assert max(scores) > highest / excess


def test_every_head_s_length_has_its_own_bias() -> None:
    block = rotary(4, heads=2, biases="q")
    ceilings, gain = ceiling(block), gain_of(block)
    for head, length in enumerate(ceilings.query_norm):
        weight, bias = block.query.weight[head] * gain, block.query.bias[head]
        linear = np.sqrt(D) * np.linalg.norm(weight, 2)
        assert length == pytest.approx(linear + np.linalg.norm(bias))


@pytest.mark.parametrize("over", ["model", "head", "head, shifted"])
def test_normalized_queries_are_as_long_as_the_root_of_what_is_normalized(
    over: str, rng: np.random.Generator
) -> None:
    """Olmo 2 normalizes all heads together, so that one of them may hold all of the length."""
    model_type, count, norm = {
        "model": ("olmo2", 3, "norm"),
        "head": ("qwen3", 1, "norm"),
        "head, shifted": ("phi", 1, "layernorm"),
    }[over]
    prefix, gain = "model.layers.0.self_attn", np.linspace(0.5, 2, 4 * count)
    tensors = {f"{prefix}.{side}_proj.weight": rng.standard_normal((12, D)) for side in "qk"}
    tensors |= {f"{prefix}.{side}_{norm}.weight": gain for side in "qk"}
    shift = rng.standard_normal(4) if "shifted" in over else np.zeros(0)
    if len(shift):
        tensors |= {f"{prefix}.{side}_{norm}.bias": shift for side in "qk"}
    config = sizes(
        D, 1, 3, model_type=model_type, num_key_value_heads=3, head_dim=4, qk_layernorm=True
    )
    ceilings = ceiling(wqk.open(StateDict(tensors, config, "tiny"))[0])
    largest = np.broadcast_to(gain.reshape(count, 4).max(1), 3)
    bounds = np.sqrt(4 * count) * largest + np.linalg.norm(shift)
    np.testing.assert_allclose(ceilings.query_norm, bounds)


def latent(rank: int, rng: np.random.Generator, kind: str = "deepseek_v3") -> Block:
    """One number of content and one turning plane, from latents: of two coordinates."""
    weight_by_name = {
        "self_attn{}.q_a_proj": rng.standard_normal((rank, 2)),
        "self_attn{}.q_a_layernorm": np.linspace(1.7, 0.9, rank),
        "self_attn{}.q_b_proj": rng.standard_normal((3, rank)),
        "self_attn{}.kv_a_proj_with_mqa": rng.standard_normal((3, 2)),
        "self_attn{}.kv_a_layernorm": np.array([0.6]),
        "self_attn{}.kv_b_proj": rng.standard_normal((2, 1)),
        "self_attn{}.o_proj": rng.standard_normal((2, 1)),
        "input_layernorm{}": np.array([0.8, 1.3]),
    }
    suffixes = (".0", ".1") if kind == "longcat_flash" else ("",)  # attentions of a layer
    tensors = {}
    for suffix in suffixes:
        for name, weight in weight_by_name.items():
            tensors[f"model.layers.0.{name.format(suffix)}.weight"] = weight
    config = sizes(2, 1, 1, model_type=kind, num_layers=1, num_key_value_heads=1, rope_theta=50.0)
    config |= {"q_lora_rank": rank, "kv_lora_rank": 1, "v_head_dim": 1}
    config |= {"qk_nope_head_dim": 1, "qk_rope_head_dim": 2}
    return wqk.open(StateDict(tensors, config, "tiny"))[0]


def circle(block: Block) -> np.ndarray:
    """Outputs of a norm with two coordinates, all around."""
    angles = np.linspace(0, 2 * np.pi, 997)
    return np.sqrt(2) * np.stack([np.cos(angles), np.sin(angles)], axis=1) * gain_of(block)


def test_queries_from_latents_are_as_long_as_the_root_of_their_rank(
    rng: np.random.Generator,
) -> None:
    block = latent(rank=2, rng=rng)  # every latent comes from some input
    queries = block.queries(circle(block))
    content, position = queries[..., :1], queries[..., 1:]
    latents = block.plan.query.projection
    whole_weight = latents.outer.part._replace(rows=None)
    query_weight, gain = block.read([whole_weight, latents.norm.gain[0]])
    bounds = [np.sqrt(2) * np.linalg.norm(rows * gain, 2) for rows in np.split(query_weight, [1])]
    # Each part reaches its bound, for some input; both may reach it for different inputs.
    for part, bound in zip((content, position), bounds, strict=True):
        longest = np.linalg.norm(part, axis=-1).max()
        assert 0.99 * bound < longest <= bound * (1 + 1e-9)
    assert ceiling(block).query_norm[0] == pytest.approx(np.hypot(*bounds))


@pytest.mark.parametrize("kind", ["deepseek_v3", "longcat_flash"])  # whose keys have a factor
def test_the_ceiling_of_latent_attention_is_nearly_reached(
    kind: str, rng: np.random.Generator
) -> None:
    block = latent(rank=1, rng=rng, kind=kind)
    inputs = circle(block)[::10]
    best = max(float(block.logits(inputs, inputs, distance).max()) for distance in range(60))
    ceilings = ceiling(block)
    assert best <= ceilings.any_distance[0] * (1 + 1e-9)
    assert best > 0.98 * ceilings.any_distance[0]
    for side, length in ((block.queries, ceilings.query_norm), (block.keys, ceilings.key_norm)):
        longest = np.linalg.norm(side(inputs), axis=-1).max()
        assert 0.98 * length[0] < longest <= length[0] * (1 + 1e-9)
