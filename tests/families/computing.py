"""Attention in NumPy, written once more, and what is read of a layout compared with it.

In float64, with one loop over heads and nothing of wqk. Axes: N tokens, H query heads, G key heads,
R their width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.families.completeness import omissions

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.families import find_family

N, H, R = 7, 6, 8
RNG = np.random.default_rng(0)
Tensors = dict[str, np.ndarray]


def linear(tensors: Tensors, name: str, rows: int, width: int, bias: bool = True) -> None:
    tensors[f"{name}.weight"] = RNG.standard_normal((rows, width)) / np.sqrt(width)
    if bias:
        tensors[f"{name}.bias"] = RNG.standard_normal(rows)


def gain(tensors: Tensors, name: str, shape: int | tuple[int, ...], bias: bool = False) -> None:
    """The gains of a norm, and its shifts if it has some."""
    tensors[f"{name}.weight"] = RNG.uniform(0.5, 2, shape)
    if bias:
        tensors[f"{name}.bias"] = RNG.standard_normal(shape)


def applied(tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    return x @ tensors[f"{name}.weight"].T + tensors.get(f"{name}.bias", 0.0)


def split(vectors: np.ndarray, heads: int) -> np.ndarray:
    """(N, heads R) as (heads, N, R)."""
    return vectors.reshape(len(vectors), heads, -1).swapaxes(0, 1)


def separate(
    tensors: Tensors,
    name: str,
    width: int,
    groups: int = H,
    *,
    bias: bool = True,
    output: str = "o",
    wide: int = 0,
) -> None:
    """Projections of queries, keys, values and outputs; what is read may be wider than the rest."""
    for side, heads in (("q", H), ("k", groups), ("v", groups)):
        linear(tensors, name.format(side), heads * R, wide or width, bias)
    linear(tensors, name.format(output), width, H * R, bias)


def sides(tensors: Tensors, name: str, x: np.ndarray, groups: int = H) -> list[np.ndarray]:
    """Queries, keys and values of separate projections."""
    heads = {"q": H, "k": groups, "v": groups}
    return [split(applied(tensors, name.format(side), x), n) for side, n in heads.items()]


def sections(rows: np.ndarray, groups: int) -> list[np.ndarray]:
    """(N, (H + 2 G) R) as queries, keys and values: all of each, one after the other."""
    parts = np.split(rows, [H * R, (H + groups) * R], axis=1)
    return [split(part, heads) for part, heads in zip(parts, (H, groups, groups), strict=True)]


def by_key_head(rows: np.ndarray, groups: int) -> list[np.ndarray]:
    """The same where each key head's queries come first, then its key, then its value."""
    rows = rows.reshape(len(rows), groups, H // groups + 2, R)
    parts = (rows[:, :, :-2], rows[:, :, -2], rows[:, :, -1])
    return [
        split(part.reshape(len(rows), -1), n)
        for part, n in zip(parts, (H, groups, groups), strict=True)
    ]


def rms(x: np.ndarray, gains: np.ndarray | float, epsilon: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gains


def layer(
    x: np.ndarray, gains: np.ndarray, shift: np.ndarray | float, epsilon: float
) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + epsilon) * gains + shift


def normalized(tensors: Tensors, name: str, x: np.ndarray, epsilon: float) -> np.ndarray:
    """A layer norm if it has shifts, or else one without means."""
    gains, shift = tensors[f"{name}.weight"], tensors.get(f"{name}.bias")
    return rms(x, gains, epsilon) if shift is None else layer(x, gains, shift, epsilon)


def turned(
    x: np.ndarray, width: int, base: float, order: str = "half", stretch: float = 1
) -> np.ndarray:
    """The first dimensions of (H, N, R) turned, in halves or pair by pair, the others as they are.

    Positions are divided by ``stretch``.
    """
    half = width // 2
    angles = np.arange(x.shape[1])[:, None] / stretch * base ** (-np.arange(half) / half)
    first, second = slice(0, half), slice(half, width)
    if order == "interleaved":
        first, second = slice(0, width, 2), slice(1, width, 2)
    a, b, out = x[..., first], x[..., second], x.copy()
    out[..., first] = a * np.cos(angles) - b * np.sin(angles)
    out[..., second] = b * np.cos(angles) + a * np.sin(angles)
    return out


def block_of(
    tensors: Mapping[str, Any], config: Mapping[str, Any], stack: str, kind: str, at: int
) -> wqk.Block:
    """A block of a model that is read, and whose family leaves nothing out."""
    checkpoint = StateDict(tensors, config, "stand-in")
    assert omissions(checkpoint, find_family(checkpoint)) == []
    (block,) = (b for b in wqk.open(checkpoint) if (b.stack, b.kind, b.layer) == (stack, kind, at))
    return block


class Fed(NamedTuple):
    """The norm whose output is projected, by the tensor of its gains."""

    kind: str
    gain: str
    epsilon: float = 0.0
    offset: float = 0.0


# Unless a test says otherwise.
PLAIN = {
    "scale": R**-0.5,
    "softcap": None,
    "clip": None,
    "sinks": None,
    "causal": False,
    "window": None,
    "applications": 1,
    "position": "",
    "statuses": (),
    "whole_score": True,
}


def assert_read(
    block: wqk.Block,
    x: np.ndarray,
    queries: np.ndarray,
    keys: np.ndarray,
    *,
    y: np.ndarray | None = None,
    fed: Fed | None = None,
    key_fed: Fed | None = None,
    circuit: tuple[np.ndarray, np.ndarray] | None = None,
    tolerance: float = 1e-9,
    **told: Any,
) -> None:
    """Compare a block as read with the numbers of its computation; nothing else may be read.

    Parameters
    ----------
    x, y
        Inputs of the queries and of the keys, (N, D).
    queries, keys
        Normalized, limited and rotated, (H, N, R) and (G, N, R).
    fed, key_fed
        The norms before them.
    circuit
        Values (G, N, R), and the weight (D, H R) of the output.
    told
        Parts of the plan, where they are not plain.
    """
    plan, expected = block.plan, PLAIN | told
    actual = {name: getattr(plan, name, getattr(plan.rule, name, None)) for name in expected}
    actual["window"] = None if plan.window is None else str(plan.window)
    assert actual == expected | {"scale": pytest.approx(expected["scale"])}
    share = H // len(keys)
    scores = np.stack([q @ keys[h // share].T * plan.score_scale for h, q in enumerate(queries)])
    cap = expected["softcap"]
    scores = cap * np.tanh(scores / cap) if cap else scores
    logits = block.logits(x, x if y is None else y)
    np.testing.assert_allclose(logits, scores, rtol=tolerance, atol=tolerance)
    key_fed = fed if plan.kind == "self" else key_fed
    for side, expected_gain in ((plan.query, fed), (plan.key, key_fed)):
        norm = side.input_norm
        read = norm and Fed(norm.kind, norm.gain[0].name, norm.epsilon, norm.offset)
        assert read == expected_gain
    assert (plan.output is None) == (circuit is None)
    if circuit is not None:
        assert_circuit(block, *circuit, x if y is None else y)


def assert_circuit(block: wqk.Block, values: np.ndarray, output: np.ndarray, x: np.ndarray) -> None:
    """Compare each head's output-value form with the product of value and output weights."""
    written = x @ block.heads.ov.dense()
    for head, rows in enumerate(written):
        value_of_head = values[head * len(values) // H]
        expected = value_of_head @ output[:, head * R : (head + 1) * R].T
        np.testing.assert_allclose(rows - rows[0], expected - expected[0], rtol=1e-8, atol=1e-9)
