"""The initializations of a layer's queries, keys and values, as functions of arrays.

A start can *draw* weights anew, and it can *turn* the queries into keys by an orthogonal map T of
the layer's key dimensions. With
Q̄_g = Σ_{h in g} Q_h / √(H/G), the sum of the queries that share key head g,

    W_k = Q̄ Tᵀ,    W_qk = √(H/G) Q̄ T Q̄ᵀ,

so that the layer's form is symmetric, or skew-symmetric, if T is. Relative to independent keys of
the same variance, its norm is larger by √(1 + ((tr T)² + tr T²)/(r D)).

==============  =================================================  ==========  ====  =============
turn            T                                                  symmetry    tr T  norm
==============  =================================================  ==========  ====  =============
``symmetric``   keeps every dimension                              1           r     √(1 + (r+1)/D)
``negated``     turns every sign                                   1           −r    √(1 + (r+1)/D)
``indefinite``  turns the sign of every other plane                1           0     √(1 + 1/D)
``paired``      lets heads 2i and 2i + 1 change places             1           0     √(1 + 1/D)
``skew``        turns every plane by 90°                           −1          0     √(1 − 1/D)
==============  =================================================  ==========  ====  =============

A plane is a pair of dimensions of a head: the two that turn together where positions are rotary, so
that T commutes with their rotation.

Axes: H query heads, G key heads, R head width, D model width, r = G R.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from wqk._typing import Array, Float
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan

Shared = Float[Array, "key_heads width d"]


def shared_queries(
    query: Float[Array, "heads width d"], key_heads: int
) -> Float[Array, "key_heads width d"]:
    """Q̄: the sum of the queries that share a key head, scaled to the variance of one query.

    Examples
    --------
    >>> shared_queries(np.ones((4, 1, 2)), key_heads=1)
    array([[[2., 2.]]])
    """
    heads, width, d = query.shape
    sharing = heads // key_heads
    summed: np.ndarray = query.reshape(key_heads, sharing, width, d).sum(1)
    return summed / query.dtype.type(sharing**0.5)


def planes(plan: AttentionPlan) -> np.ndarray:
    """A head's dimensions (R,), ordered so that each pair of neighbors forms a plane."""
    dimensions = np.arange(plan.key.head_width)
    if plan.rotary is None:
        return dimensions
    first, second = plan.rotary.planes
    turned = np.stack([dimensions[first], dimensions[second]], axis=-1).ravel()
    return np.concatenate([turned, dimensions[len(turned) :]])


def symmetric(shared: Shared, order: np.ndarray) -> Shared:
    """Keys that are the queries (paper, S2.1): every head's form is positive semidefinite."""
    return shared


def negated(shared: Shared, order: np.ndarray) -> Shared:
    """Keys that are the negated queries: every head's form is negative semidefinite."""
    return -shared


def indefinite(shared: Shared, order: np.ndarray) -> Shared:
    """Keys that are the queries with half of the signs flipped; heads start with + and − in turn.

    Examples
    --------
    >>> indefinite(np.ones((2, 4, 1)), np.arange(4))[..., 0]
    array([[ 1.,  1., -1., -1.],
           [-1., -1.,  1.,  1.]])
    """
    heads, width, _ = shared.shape
    signs = np.empty((heads, width, 1), shared.dtype)
    signs[:, order, 0] = (-1) ** (np.arange(width) // 2 + np.arange(heads)[:, None])
    return shared * signs


def paired(shared: Shared, order: np.ndarray) -> Shared:
    """Each head's keys are its neighbor's queries; an odd last head is `indefinite`.

    Examples
    --------
    >>> paired(np.array([[[1.0]], [[2.0]], [[3.0]]]), np.arange(1)).ravel()
    array([2., 1., 3.])
    """
    even = len(shared) // 2 * 2
    neighbors = shared[:even].reshape(-1, 2, *shared.shape[1:])[:, ::-1]
    return np.concatenate(
        [neighbors.reshape(even, *shared.shape[1:]), indefinite(shared[even:], order)]
    )


def skew(shared: Shared, order: np.ndarray) -> Shared:
    """Keys that are the queries, turned by 90° in every plane; an odd last dimension becomes zero.

    Examples
    --------
    >>> skew(np.array([[[1.0], [2.0]]]), np.arange(2)).ravel()
    array([ 2., -1.])
    """
    first, second = order[: len(order) // 2 * 2].reshape(-1, 2).T
    turned = np.zeros_like(shared)
    turned[:, first], turned[:, second] = shared[:, second], -shared[:, first]
    return turned


class Turn(NamedTuple):
    """A map of queries to keys, and the resulting symmetry of a layer's form."""

    keys: Callable[[Shared, np.ndarray], Shared]
    symmetry: float


TURNS: Mapping[str, Turn] = {
    "symmetric": Turn(symmetric, 1.0),
    "negated": Turn(negated, 1.0),
    "indefinite": Turn(indefinite, 1.0),
    "paired": Turn(paired, 1.0),
    "skew": Turn(skew, -1.0),
}

# (heads, width, D) by role: query, key, value, in this order.
Shapes = dict[str, tuple[int, int, int]]
Weights = dict[str, np.ndarray]


def uniform(shapes: Shapes, rng: np.random.Generator, *, roles: tuple[str, ...]) -> Weights:
    """Weights between ±1/√D, as a new ``nn.Linear`` draws them.

    All roles are drawn and the given ones returned, so that starts of one seed draw equal values.

    Examples
    --------
    >>> shapes = {"query": (2, 3, 16), "key": (2, 3, 16), "value": (2, 3, 16)}
    >>> one, other = (
    ...     uniform(shapes, np.random.default_rng(0), roles=roles)["value"]
    ...     for roles in (("value",), ("query", "key", "value"))
    ... )
    >>> bool((one == other).all()), bool(abs(one).max() < 0.25)
    (True, True)
    """
    drawn = {}
    for role, shape in shapes.items():
        bound = shape[-1] ** -0.5
        drawn[role] = rng.uniform(-bound, bound, shape)
    return {role: drawn[role] for role in roles}


def mimetic(
    shapes: Shapes, rng: np.random.Generator, *, alpha: float = 0.7, beta: float = 0.7
) -> Weights:
    """Queries and keys whose product is nearly α Z + β I (Trockman & Kolter, 2023).

    Of each head's D × D target, with entries of Z drawn from N(0, 1/D), the R largest singular
    values are kept; each side takes their roots. Query heads that share a key head have different
    targets: the first determines the key, and the other queries approximate theirs with that key.

    Raises
    ------
    CheckpointError
        A head is wider than the model, so that the target has too few singular values.
    """
    (heads, width, d), (key_heads, _, _) = shapes["query"], shapes["key"]
    if width > d:
        raise CheckpointError(
            f"mimetic initialization needs heads no wider than the model, got {width} of {d}"
        )
    query, key = [], []
    for _ in range(key_heads):
        noise = rng.standard_normal((heads // key_heads, d, d)) / d**0.5
        targets = alpha * noise + beta * np.eye(d)
        values, vectors = np.linalg.eigh(targets[0].T @ targets[0])
        right, root = vectors[:, -width:], values[-width:] ** 0.25
        key.append((right * root).T)
        query.append((targets @ (right / root)).swapaxes(-1, -2))
    return {"query": np.concatenate(query), "key": np.stack(key)}


class Kind(NamedTuple):
    """A start: which weights it draws, and how it computes keys from queries."""

    draw: Callable[[Shapes, np.random.Generator], Weights] | None = None  # None: keeps all
    turn: Turn | None = None  # None: independent keys
    biases: bool = True  # whether the keys' biases are computed in the same way


def _published(*roles: str, turn: str = "") -> Kind:
    return Kind(partial(uniform, roles=roles), TURNS.get(turn), biases=False)


KINDS: Mapping[str, Kind] = {
    "random": Kind(),
    **{name: Kind(turn=turn) for name, turn in TURNS.items()},
    "mimetic": Kind(mimetic),
    "published": _published("query", "value", turn="symmetric"),
    "published-independent": _published("query", "key", "value"),
    "published-indefinite": _published("query", "value", turn="indefinite"),
    "published-negated": _published("query", "value", turn="negated"),
    "published-values": _published("value"),
    "published-queries-keys": _published("query", "key"),
}
