"""Starts that only the paper's experiments need: starts of its code, controls, and related work.

`wqk.initialize_` accepts any record of `STARTS`. Two starts have further maps of queries to keys,
and the published starts draw new weights:

============  ==========================================  ==========  ====  ===============
turn          T                                           symmetry    tr T  norm
============  ==========================================  ==========  ====  ===============
``negated``   turns every sign                            1           −r    √(1 + (r+1)/D)
``paired``    lets heads 2i and 2i + 1 change places      1           0     √(1 + 1/D)
============  ==========================================  ==========  ====  ===============

Axes: H query heads, G key heads, R head width, D model width, r = G R.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from wqk.errors import CheckpointError
from wqk.live.initializing import (
    KINDS,
    TURNS,
    Shapes,
    Shared,
    StartKind,
    Turn,
    Weights,
    indefinite,
)


def negated(shared: Shared, order: np.ndarray) -> Shared:
    """Return the negated queries as keys: every head's form is negative semidefinite."""
    return -shared


def paired(shared: Shared, order: np.ndarray) -> Shared:
    """Return the queries of the neighboring head as keys; an odd last head is `indefinite`.

    Examples
    --------
    >>> paired(np.array([[[1.0]], [[2.0]], [[3.0]]]), np.arange(1)).ravel()
    array([2., 1., 3.])
    """
    even = len(shared) // 2 * 2
    head_shape = shared.shape[1:]
    pairs = shared[:even].reshape(-1, 2, *head_shape)
    neighbors = pairs[:, ::-1].reshape(even, *head_shape)
    return np.concatenate([neighbors, indefinite(shared[even:], order)])


def uniform(shapes: Shapes, rng: np.random.Generator, *, roles: tuple[str, ...]) -> Weights:
    """Draw weights between ±1/√D, like a new ``nn.Linear``.

    Weights of all roles are drawn, but only the requested roles are returned, so that starts of one
    seed draw equal values.

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
    """Return queries and keys whose product is nearly α Z + β I (Trockman & Kolter, 2023).

    The R largest singular values of each head's D × D target are kept, with entries of Z drawn from
    N(0, 1/D); each side has the roots of these values. Query heads that share a key head have
    different targets: the first head determines the key, and the remaining queries approximate
    their targets with this key.

    Raises
    ------
    CheckpointError
        A head is wider than the model; the target then has too few singular values.
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


FURTHER_TURNS = {**TURNS, "negated": Turn(negated, 1.0), "paired": Turn(paired, 1.0)}


def _published(name: str, *roles: str, turn: str = "") -> StartKind:
    return StartKind(name, partial(uniform, roles=roles), FURTHER_TURNS.get(turn), biases=False)


STARTS: Mapping[str, StartKind] = {
    kind.name: kind
    for kind in (
        *KINDS.values(),
        StartKind("negated", turn=FURTHER_TURNS["negated"]),
        StartKind("paired", turn=FURTHER_TURNS["paired"]),
        StartKind("mimetic", mimetic),
        _published("published", "query", "value", turn="symmetric"),
        _published("published-independent", "query", "key", "value"),
        _published("published-indefinite", "query", "value", turn="indefinite"),
        _published("published-negated", "query", "value", turn="negated"),
        _published("published-values", "value"),
        _published("published-queries-keys", "query", "key"),
    )
}
