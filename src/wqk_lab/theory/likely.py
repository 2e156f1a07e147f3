"""The largest logits that inputs with known second moments are likely to produce.

Ceilings hold for any input, and no input comes near them. If instead the mean m and the covariance
C of a block's inputs are known, queries and keys have the means and covariances that the weights
make of them, and if they are normal, s = scale · qᵀk is a quadratic form of a normal vector whose
cumulant function is known: with (q, k) = μ + L ξ, and λ, U the eigenvalues and -vectors of its
symmetric matrix,

    ψ(t) = t s₀ + Σ_i [t² c_i² / (2 (1 − 2 t λ_i)) − ln(1 − 2 t λ_i) / 2],   0 < t < 1 / (2 max λ).

The largest of P logits exceeds min_t (ln(P/δ) + ψ(t)) / t with probability at most δ (Chernoff's
bound, and the union of P events), and its expectation is at most that for δ = 1. Two tokens that
depend on each other in an unknown way have no such ψ, but a bound of it.

Axes: H query heads, R head width, D width, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk._typing import Float
from wqk.attention.factor import Factor
from wqk.errors import FormError
from wqk.families import AttentionPlan, Composed

if TYPE_CHECKING:
    from wqk.attention.block import Block


# Where t is tried, as a share of its limit.
SHARES = np.geomspace(1e-4, 0.999, 200)


class Moments(NamedTuple):
    """Mean (D,) and covariance (D, D) of the inputs of a block's projections."""

    mean: Float[np.ndarray, " d"]
    covariance: Float[np.ndarray, "d d"]

    @classmethod
    def of(cls, inputs: Float[np.ndarray, "*batch d"]) -> Moments:
        """Those of some inputs.

        Examples
        --------
        >>> import numpy as np
        >>> Moments.of(np.array([[0.0, 1.0], [2.0, 1.0]])).covariance.tolist()
        [[1.0, 0.0], [0.0, 0.0]]
        """
        rows = np.asarray(inputs, np.float64).reshape(-1, inputs.shape[-1])
        centered = rows - rows.mean(axis=0)
        return cls(rows.mean(axis=0), centered.T @ centered / len(rows))


def lacks_likely_ceiling(plan: AttentionPlan) -> str:
    """Why moments of the inputs give no likely ceiling; empty if they do."""
    if plan.kind != "self":
        return "queries and keys have different inputs"
    sides = (plan.query, plan.key)
    if any(side.norm is not None or isinstance(side.projection, Composed) for side in sides):
        return "queries and keys are normalized, so that they are not linear in the input"
    if plan.axial is not None or plan.positional is not None or plan.position.startswith("rotary"):
        return f"its positions ({plan.position or 'its own'}) are not computed"
    return ""


def likely_ceilings(
    attention: Block,
    moments: Moments,
    tokens: int,
    share: float = 0.05,
    distances: Sequence[int] | None = None,
    independent: bool = True,
) -> Float[np.ndarray, " heads"]:
    """What the largest logit of a text exceeds with at most this probability, for each head.

    Logits are before a soft cap and without additive position terms; inputs are taken as normal.

    Parameters
    ----------
    attention
        A block of a model, as `wqk.open` gives it.
    moments
        Of the inputs of its projections.
    tokens
        N, the text's length.
    share
        The probability; 1 for a bound of the expected maximum.
    distances
        For rotary positions, those that are tried; by default powers of 2 up to N.

    independent
        Whether different tokens' inputs are taken as independent. They are not where positions are
        part of the inputs, as in BERT; otherwise the bound holds whatever the dependence.

    Raises
    ------
    FormError
        The share is not a probability, there are no tokens, the moments do not fit the block, or it
        has no likely ceiling: see `lacks_likely_ceiling`.

    Examples
    --------
    >>> import numpy as np, wqk
    >>> attention = wqk.open(wqk.demo_model("decoder"))[0]
    >>> normal = Moments(np.zeros(128), np.eye(128))
    >>> likely_ceilings(attention, normal, tokens=64).shape
    (4,)
    """
    plan = attention.plan
    if not 0 < share <= 1 or tokens < 1:
        raise FormError(
            f"share must be above 0 and at most 1, and tokens at least 1; got {share} and {tokens}"
        )
    if reason := lacks_likely_ceiling(plan):
        raise FormError(f"layer {plan.layer} of the {plan.stack} has no likely ceiling: {reason}")
    size = attention.groups.widths[0]
    if moments.mean.shape != (size,) or moments.covariance.shape != (size, size):
        raise FormError(f"moments must be of {size} dimensions, got {moments.covariance.shape}")
    if distances is None:
        distances = [2**n for n in range(int(math.log2(max(1, tokens - 1))) + 1)]
    values, vectors = np.linalg.eigh(moments.covariance)
    root = np.asarray(vectors * np.sqrt(values.clip(min=0)))  # L with L Lᵀ = C
    pairs = tokens**2 / (2 if plan.causal else 1)
    # Half of the probability for pairs of a token with itself, half for all others.
    own, others = math.log(2 * tokens / share), math.log(2 * pairs / share)
    sharing = attention.head_count // attention.key_head_count
    found = []
    for head in range(attention.head_count):
        query, to_query = _centered(attention.query, head, moments, root)
        key, to_key = _centered(attention.key, head // sharing, moments, root)
        kind = "independent" if independent else "any"
        bounds = [_bound(_Pair.of(query, to_query, key, to_key, plan.scale), own, "same")]
        for distance in distances if plan.rotary is not None else (0,):
            turned, to_turned = query, to_query
            if plan.rotary is not None:
                both = np.concatenate([query.T, to_query[None]])
                both = plan.rotary.turning.rotate(both, np.full(len(both), distance))
                both = plan.rotary.stretch(both)
                turned, to_turned = both[:-1].T, both[-1]
            pair = _Pair.of(turned, to_turned, key, to_key, plan.scale)
            bounds.append(_bound(pair, others, kind))
        found.append(max(bounds))
    return np.array(found)


class _Pair(NamedTuple):
    """s = constant + left·η + right·ξ + ξᵀ form η, for standard normal ξ and η."""

    form: np.ndarray
    left: np.ndarray
    right: np.ndarray
    constant: float

    @classmethod
    def of(
        cls, query: np.ndarray, a: np.ndarray, key: np.ndarray, b: np.ndarray, scale: float
    ) -> _Pair:
        """Of s = scale · (query ξ + a) · (key η + b)."""
        return cls(scale * query.T @ key, scale * a @ key, scale * b @ query, scale * float(a @ b))


def _centered(
    factor: Factor, head: int, moments: Moments, root: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A head's queries or keys as a matrix (R, D) of standard normal numbers, and their mean."""
    weight = factor.weight[head].astype(np.float64)
    bias = 0.0 if factor.bias is None else factor.bias[head]
    return weight @ root, weight @ moments.mean + bias


def _bound(pair: _Pair, level: float, kind: str) -> float:
    """min_t (level + ψ(t)) / t, for η the same as ξ, independent of it, or with any dependence."""
    count = 1.0
    if kind == "same":
        values, vectors = np.linalg.eigh((pair.form + pair.form.T) / 2)
        slopes = vectors.T @ (pair.left + pair.right)
    else:
        u, sizes, v = np.linalg.svd(pair.form, full_matrices=False)
        x, y = u.T @ pair.right, v @ pair.left
        rest = pair.right @ pair.right - x @ x, pair.left @ pair.left - y @ y
        beside = np.sqrt(np.maximum(rest, 0.0))
        if kind == "independent":
            # ξᵀ form η = Σ σ/2 (((u·ξ + v·η)² − (u·ξ − v·η)²) / 2)
            values = np.concatenate([sizes, -sizes, [0.0, 0.0]]) / 2
            slopes = np.concatenate([(x + y) / math.sqrt(2), (x - y) / math.sqrt(2), beside])
        else:
            # At most Σ σ ((u·ξ)² + (v·η)²) / 2, whose two halves Cauchy and Schwarz take apart.
            values = np.concatenate([sizes, sizes, [0.0, 0.0]])
            slopes, count = math.sqrt(2) * np.concatenate([x, y, beside]), 0.5
    largest = float(values.max())
    t = SHARES / (2 * largest) if largest > 0 else SHARES * 1e6
    room = 1 - 2 * t[:, None] * values
    terms = t[:, None] ** 2 * slopes**2 / room - count * np.log(room)
    return float(((level + t * pair.constant + terms.sum(axis=1) / 2) / t).min())
