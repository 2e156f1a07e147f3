"""The largest scores that a block can produce for any input, and that it is likely to produce.

A norm feeds the projections: its output before the gain, x̂, has length at most √D. With gains
and biases folded in, q = Ã x̂ + a has length at most √D σ₁(Ã) + ‖a‖, which rotary positions do not
change, and no score is larger than scale · ‖q‖ ‖k‖ at any distance. At distance N it is at most
scale · D σ₁(Ã R(−N) B̃ᵀ), with biases as one more row and column.

Queries or keys that are themselves normalized, with gains g, have length at most √R max|g|,
whatever feeds them; those from a normalized latent of width C, at most √C σ₁ of what follows it.

Ceilings hold for any input, and no input comes near them. If instead the mean m and the covariance
C of a block's inputs are known, queries and keys have the means and covariances that the weights
make of them, and if they are normal, s = scale · qᵀk is a quadratic form of a normal vector whose
cumulant function is known: with (q, k) = μ + L ξ, and λ, U the eigenvalues and -vectors of its
symmetric matrix,

    ψ(t) = t s₀ + Σ_i [t² c_i² / (2 (1 − 2 t λ_i)) − ln(1 − 2 t λ_i) / 2],   0 < t < 1 / (2 max λ).

The largest of P logits exceeds min_t (ln(P/δ) + ψ(t)) / t with probability at most δ (Chernoff's
bound, and the union of P events), and its expectation is at most that for δ = 1. Two tokens that
depend on each other in an unknown way have no such ψ, but a bound of it.

Axes: H query heads, G key heads, R head width, D model width, C latent width, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk._typing import Float
from wqk.attention.coordinates import at_distance, augmented, stacked
from wqk.attention.factor import Factor, Factors
from wqk.checkpoints import Part
from wqk.errors import FormError
from wqk.families import AttentionPlan, Composed, Norm, Side
from wqk.forms.spectra import spectral_norm

if TYPE_CHECKING:
    from wqk.attention.block import Block


@dataclass(frozen=True)
class Ceilings:
    """Bounds of one block's queries, keys and scores, for each query head.

    Scores are taken before a soft cap and without additive position terms.
    """

    query_norm: Float[np.ndarray, " heads"]  # length of a query
    key_norm: Float[np.ndarray, " heads"]
    any_distance: Float[np.ndarray, " heads"]  # scale · ‖q‖ ‖k‖, or less without rotary positions
    at_distance: dict[int, Float[np.ndarray, " heads"]]  # the largest score by distance


def lacks_ceiling(plan: AttentionPlan) -> str:
    """Why a block's scores have no bound; empty if they have one."""
    sides = [plan.query, plan.key]
    if plan.positional is not None:
        sides += [plan.positional.query, plan.positional.key]
    bounded = (
        side.input_norm or side.norm or isinstance(side.projection, Composed) or plan.clip
        for side in _fed(plan, sides)
    )
    if all(bounded):
        return ""
    return "no norm is known that feeds the block, so its input and its scores may be of any size"


def ceiling_parts(plan: AttentionPlan) -> tuple[Part, ...]:
    """What `ceilings` reads of a checkpoint besides the plan's own parts."""
    norms = [side.input_norm for side in (plan.query, plan.key) if side.input_norm]
    apart = (plan.positional.query, plan.positional.key) if plan.positional else ()
    return (
        *(part for norm in norms for part in (*norm.gain, *norm.bias)),
        *(part for side in apart for part in side.parts),
    )


def ceilings(block: Factors, distances: Sequence[int] = (0,)) -> Ceilings | None:
    """The bounds of one block; None without one, see `lacks_ceiling`.

    Examples
    --------
    >>> import wqk
    >>> block = wqk.open(wqk.demo_model("decoder"))[0]  # holds no norms
    >>> ceilings(block) is None, lacks_ceiling(block.plan)[:16]
    (True, 'no norm is known')
    """
    plan = block.plan
    if lacks_ceiling(plan):
        return None
    factors = [block.query, block.key, *(block.positional or ())]
    sides = _fed(plan, [factor.side for factor in factors])
    lengths = [_length(block, factor, side) for factor, side in zip(factors, sides, strict=True)]
    sharing = block.head_count // block.key_head_count
    query, key = lengths[0], lengths[1].repeat(sharing)
    bound = query * key
    if block.positional:
        apart = lengths[2], lengths[3].repeat(len(query) // len(lengths[3]))
        bound = bound + apart[0] * apart[1]
        query, key = np.hypot(query, apart[0]), np.hypot(key, apart[1])
    bound = plan.scale * bound
    wanted = (*distances,) if plan.may_turn else (*distances, 0)
    bounds = _by_distance(block, bound, wanted)
    # A form that positions do not turn is the same at every distance.
    return Ceilings(query, key, bound if plan.may_turn else bounds[0], bounds)


def _fed(plan: AttentionPlan, sides: Sequence[Side]) -> list[Side]:
    """Queries and keys; their position dimensions are fed by the same norms."""
    norms = [plan.query.input_norm, plan.key.input_norm] * 2
    return [replace(side, input_norm=norm) for side, norm in zip(sides, norms, strict=False)]


def _length(block: Factors, factor: Factor, side: Side) -> Float[np.ndarray, " heads"]:
    """The largest length of a query or a key, for each of its heads."""
    plan = block.plan
    heads, width, d = factor.stored_weight.shape
    if side.norm is not None:
        length = _normalized_length(factor, side.norm)
    elif isinstance(side.projection, Composed):
        outer = side.projection.outer
        stored, gain = block.read([outer.part, side.projection.norm.gain[0]])
        weight = outer.weight({outer.part: stored}) * gain
        length = math.sqrt(weight.shape[-1]) * _largest(weight)
    elif side.input_norm is not None:
        weight, bias = block.linear(factor, side.input_norm)
        length = math.sqrt(d) * _largest(weight)
        length = length if bias is None else length + np.linalg.norm(bias, axis=-1)
    else:
        length = np.full(heads, math.inf)
    if plan.clip is not None:
        length = np.minimum(length, plan.clip * math.sqrt(width))
    # If only part of the head turns, only that part is scaled.
    stretch = 1.0 if plan.rotary is None else max(1.0, plan.rotary.amplitude)
    return np.asarray(length * stretch, np.float64)


def _normalized_length(factor: Factor, norm: Norm) -> Float[np.ndarray, " heads"]:
    """√R max|g|, or √(H R) max|g| if all heads are normalized together."""
    heads, width, _ = factor.stored_weight.shape
    gain = np.ones(width) if factor.gain is None else factor.gain + norm.offset
    together = len(norm.axes(0 if factor.gain is None else len(gain), width)) > 1
    length = math.sqrt(width * (heads if together else 1)) * np.abs(gain).reshape(-1, width).max(1)
    if factor.shift is not None:
        length = length + np.linalg.norm(factor.shift, axis=-1)
    if factor.temperature is not None:
        length = length * factor.temperature[:, 0]
    return np.broadcast_to(np.asarray(length, np.float64), (heads,))


def _largest(weight: Float[np.ndarray, "heads width d"]) -> Float[np.ndarray, " heads"]:
    """σ₁ of each head's weight, in float64."""
    weight = weight.astype(np.float64)
    squares = np.linalg.eigvalsh(weight @ weight.swapaxes(-1, -2))
    return np.asarray(np.sqrt(squares[:, -1].clip(min=0)))


def _by_distance(
    block: Factors, bound: np.ndarray, distances: Sequence[int]
) -> dict[int, np.ndarray]:
    """The smaller of the bound at any distance and that of the form at each."""
    plan = block.plan
    factors = (block.query, block.key)
    is_linear = all(
        f.side.norm is None and f.side.input_norm and not isinstance(f.side.projection, Composed)
        for f in factors
    )
    stretched = plan.rotary is not None and plan.rotary.amplitude != 1
    if not is_linear or plan.clip is not None or plan.positional or stretched:
        return dict.fromkeys(distances, bound)
    linear = [block.linear(f, f.side.input_norm) for f in factors]
    biased = any(bias is not None for _, bias in linear)
    # Biases are weights of one more input, 1/t of them where that is t: every t gives a bound.
    units = (1.0, math.sqrt(linear[0][0].shape[-1])) if biased else (None,)
    bounds: dict[int, np.ndarray] = {}
    for distance in distances:
        best = bound
        for unit in units:
            form = stacked(*(_with_bias(*side, unit) for side in linear))
            size = math.sqrt(math.prod(w.shape[-1] + (unit or 0) ** 2 for w, _ in linear))
            largest = spectral_norm(at_distance(form, plan, distance)).ravel()
            best = np.asarray(np.minimum(best, plan.scale * size * largest))
        bounds[distance] = best
    return bounds


def _with_bias(weight: np.ndarray, bias: np.ndarray | None, unit: float | None) -> np.ndarray:
    """(heads, R, D), with a bias for an input of this size as one more column."""
    if unit is None:
        return weight
    return augmented(weight, None if bias is None else bias / unit)


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
    root = _root(moments.covariance)
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


def _root(covariance: np.ndarray) -> np.ndarray:
    """L with L Lᵀ = C."""
    values, vectors = np.linalg.eigh(covariance)
    return np.asarray(vectors * np.sqrt(values.clip(min=0)))


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
