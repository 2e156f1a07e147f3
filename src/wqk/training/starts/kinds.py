"""The ways in which a layer's keys can be set from its queries, as functions of arrays.

All but one keep the queries as they were drawn and turn them into keys, by an orthogonal map T of
the layer's key dimensions. With Q̄_g = Σ_{h in g} Q_h / √(H/G), the queries that share key head g,

    W_k = Q̄ Tᵀ,    W_qk = √(H/G) Q̄ T Q̄ᵀ,

so that the layer's form is symmetric where T is, and skew-symmetric where T is. Its norm, compared
with that of independent keys of the queries' variance, is larger by √(1 + ((tr T)² + tr T²)/(r D)).

==============  =================================================  ==========  ====  =============
kind            T                                                  symmetry    tr T  norm
==============  =================================================  ==========  ====  =============
``symmetric``   leaves every dimension as it is                    1           r     √(1 + (r+1)/D)
``indefinite``  turns the sign of every other plane                1           0     √(1 + 1/D)
``paired``      lets heads 2i and 2i + 1 change places             1           0     √(1 + 1/D)
``skew``        turns every plane by 90°                           −1          0     √(1 − 1/D)
==============  =================================================  ==========  ====  =============

A plane is a pair of dimensions of a head: the two that turn together where positions are rotary, so
that T commutes with their rotation.

Axes: H query heads, G key heads, R head width, D model width, r = G R.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._typing import Array, Float

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wqk.families import AttentionPlan

Shared = Float[Array, "key_heads width d"]


def shared_queries(
    query: Float[Array, "heads width d"], key_heads: int
) -> Float[Array, "key_heads width d"]:
    """Q̄: the queries of each key head, added up and brought back to the variance of one.

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
    """A head's dimensions (R,) in an order in which neighbors, two and two, make its planes."""
    dimensions = np.arange(plan.key.head_width)
    if plan.rotary is None:
        return dimensions
    first, second = plan.rotary.planes
    turned = np.stack([dimensions[first], dimensions[second]], axis=-1).ravel()
    return np.concatenate([turned, dimensions[len(turned) :]])


def symmetric(shared: Shared, order: np.ndarray) -> Shared:
    """Keys that are the queries (paper, S2.1): every head's form is positive semidefinite."""
    return shared


def indefinite(shared: Shared, order: np.ndarray) -> Shared:
    """Keys that are the queries with half of the signs turned; heads begin with + and − in turn.

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
    """A map of queries to keys, and the symmetry that a layer's form then has."""

    keys: Callable[[Shared, np.ndarray], Shared]
    symmetry: float


TURNS: Mapping[str, Turn] = {
    "symmetric": Turn(symmetric, 1.0),
    "indefinite": Turn(indefinite, 1.0),
    "paired": Turn(paired, 1.0),
    "skew": Turn(skew, -1.0),
}


def mimetic(
    heads: int, key_heads: int, width: int, d: int, alpha: float, beta: float, generator: Any
) -> tuple[Float[Array, "heads width d"], Float[Array, "key_heads width d"]]:
    """Queries and keys whose product is nearly α Z + β I (Trockman & Kolter, 2023).

    Of each head's D × D target, with entries of Z drawn from N(0, 1/D), the R largest singular
    values are kept and shared by both sides as their roots. Query heads that share a key head have
    targets of their own: the first one's gives the key, and the others come as near as that lets
    them.

    Parameters
    ----------
    heads, key_heads, width, d
        H, G, R and D.
    alpha, beta
        How large the random part and the identity are.
    generator
        The `torch.Generator` that Z is drawn from.
    """
    import torch

    sharing = heads // key_heads
    query, key = [], []
    for _ in range(key_heads):
        drawn = torch.randn(sharing, d, d, generator=generator, dtype=torch.float64).numpy()
        targets = alpha * drawn / d**0.5 + beta * np.eye(d)
        values, vectors = np.linalg.eigh(targets[0].T @ targets[0])
        right, root = vectors[:, -width:], values[-width:] ** 0.25
        key.append((right * root).T)
        query.append((targets @ (right / root)).swapaxes(-1, -2))
    return np.concatenate(query), np.stack(key)
