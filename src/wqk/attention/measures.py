"""Optional measures of a block: upper bounds of scores, and rotary planes.

The bounds follow only from the weights. Before the projections there is a norm: its output before
the gain, x̂, has length at most √D. With gains and biases folded in, q = Ã x̂ + a has length at
most √D σ₁(Ã) + ‖a‖, which rotary positions do not change, and no score is larger than scale · ‖q‖
‖k‖ at any distance. At distance N the score is at most scale · D σ₁(Ã R(−N) B̃ᵀ), with biases as
one more row and column.

Queries or keys that are themselves normalized, with gains g, have length at most √R max|g| for any
input. Vectors from a normalized latent of width C have length at most √C σ₁(B), with B the weight
that follows the latent.

Rotary positions rotate a head's dimensions plane by plane: fast planes distinguish nearby
positions, slow planes hardly rotate and match content at any distance. A plane's contribution to
the score is bounded by E_k = ‖A_k‖ ‖B_k‖, the norms of its two columns in each factor.

Axes: H query heads, G key heads, R head width, D model width, C latent width, P rotary planes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.attention.factors import BlockWeights, Factor, at_distance, augmented, stacked
from wqk.checkpoints import Part
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan, Composed, Norm, Side
from wqk.forms import BilinearForm
from wqk.forms.spectra import spectral_norm


@dataclass(frozen=True)
class Ceilings:
    """Upper bounds of one block's queries, keys and scores, for each query head.

    The bounds are for scores before a soft cap, without additive position terms.

    Attributes
    ----------
    query_norm, key_norm
        Bounds of the length of a query and of a key.
    any_distance
        Bound of the score at any distance: scale · ‖q‖ ‖k‖, or less without rotary positions.
    at_distance
        Bound of the score by distance.
    """

    query_norm: Float[np.ndarray, " heads"]
    key_norm: Float[np.ndarray, " heads"]
    any_distance: Float[np.ndarray, " heads"]
    at_distance: dict[int, Float[np.ndarray, " heads"]]


def lacks_ceiling(plan: AttentionPlan) -> str:
    """Return the reason why a block's scores have no bound; empty if they have a bound."""
    if not plan.has_softmax:
        return f"{plan.what} has no scores, but products that are added up"
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
    """List the parts of a checkpoint that `ceilings` reads besides the parts in the plan."""
    parts: list[Part] = []
    for side in (plan.query, plan.key):
        if side.input_norm:
            parts += [*side.input_norm.gain, *side.input_norm.bias]
    if plan.positional:
        parts += [*plan.positional.query.parts, *plan.positional.key.parts]
    return tuple(parts)


def ceilings(block: BlockWeights, distances: Sequence[int] = (0,)) -> Ceilings | None:
    """Return the bounds of one block; None if its scores have no bound, see `lacks_ceiling`.

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
        position_query = lengths[2]
        position_key = lengths[3].repeat(len(query) // len(lengths[3]))
        bound = bound + position_query * position_key
        query, key = np.hypot(query, position_query), np.hypot(key, position_key)
    bound = plan.score_scale * bound
    requested = (*distances,) if plan.may_turn else (*distances, 0)
    bounds = _by_distance(block, bound, requested)
    # A form that positions do not turn is the same at every distance.
    any_distance = bound if plan.may_turn else bounds[0]
    return Ceilings(query, key, any_distance, bounds)


def _fed(plan: AttentionPlan, sides: Sequence[Side]) -> list[Side]:
    """Return the sides with input norms; position dimensions get those of queries and keys."""
    norms = [plan.query.input_norm, plan.key.input_norm] * 2
    return [replace(side, input_norm=norm) for side, norm in zip(sides, norms, strict=False)]


def _length(block: BlockWeights, factor: Factor, side: Side) -> Float[np.ndarray, " heads"]:
    """Return the largest possible length of a query or a key, for each head."""
    plan = block.plan
    heads, width, d = factor.stored_weight.shape
    if side.norm is not None:
        length = _normalized_length(factor, side.norm)
    elif isinstance(side.projection, Composed):
        outer = side.projection.outer
        stored, gain = block.read([outer.part, side.projection.norm.gain[0]])
        weight = outer.weight({outer.part: stored}) * gain * side.factor
        length = math.sqrt(weight.shape[-1]) * _largest(weight)
    elif side.input_norm is not None:
        weight, bias = block.linear(factor, side.input_norm)
        length = math.sqrt(d) * _largest(weight)
        if bias is not None:
            length = length + np.linalg.norm(bias, axis=-1)
    else:
        length = np.full(heads, math.inf)
    if plan.clip is not None:
        length = np.minimum(length, plan.clip * math.sqrt(width))
    # If only part of the head turns, only that part is scaled.
    stretch = 1.0 if plan.rotary is None else max(1.0, plan.rotary.amplitude)
    return np.asarray(length * stretch, np.float64)


def _normalized_length(factor: Factor, norm: Norm) -> Float[np.ndarray, " heads"]:
    """Return √R max|g|, or √(H R) max|g| if all heads are normalized together."""
    heads, width, _ = factor.stored_weight.shape
    gain = np.ones(width)
    gain_size = 0
    if factor.gain is not None:
        gain = factor.gain + norm.offset
        gain_size = len(gain)
    dimensions = width  # number normalized together
    if len(norm.axes(gain_size, width)) > 1:
        dimensions = width * heads
    largest_gains = np.abs(gain).reshape(-1, width).max(1)
    length = math.sqrt(dimensions) * largest_gains
    if factor.shift is not None:
        length = length + np.linalg.norm(factor.shift, axis=-1)
    if factor.temperature is not None:
        length = length * factor.temperature.max(axis=-1)
    return np.broadcast_to(np.asarray(length, np.float64), (heads,))


def _largest(weight: Float[np.ndarray, "heads width d"]) -> Float[np.ndarray, " heads"]:
    """Return the largest singular value of each head's weight, in float64."""
    weight = weight.astype(np.float64)
    squares = np.linalg.eigvalsh(weight @ weight.swapaxes(-1, -2))
    return np.asarray(np.sqrt(squares[:, -1].clip(min=0)))


def _by_distance(
    block: BlockWeights, bound: np.ndarray, distances: Sequence[int]
) -> dict[int, np.ndarray]:
    """Return, by distance, the smaller of the general bound and the form's bound there."""
    plan = block.plan
    factors = (block.query, block.key)
    is_linear = all(
        factor.side.norm is None
        and factor.side.input_norm
        and not isinstance(factor.side.projection, Composed)
        for factor in factors
    )
    stretched = plan.rotary is not None and plan.rotary.amplitude != 1
    if not is_linear or plan.clip is not None or plan.positional or stretched:
        return dict.fromkeys(distances, bound)
    query_weight, query_bias = block.linear(block.query, block.query.side.input_norm)
    key_weight, key_bias = block.linear(block.key, block.key.side.input_norm)
    d_query, d_key = query_weight.shape[-1], key_weight.shape[-1]
    forms: list[tuple[BilinearForm, float]] = []  # with the largest length of the inputs
    if query_bias is None and key_bias is None:
        forms.append((stacked(query_weight, key_weight), math.sqrt(d_query * d_key)))
    else:
        # A bias is the weight of one more input. If that input is t, the weight is bias / t.
        # Every t gives a bound.
        for t in (1.0, math.sqrt(d_query)):
            query = augmented(query_weight, None if query_bias is None else query_bias / t)
            key = augmented(key_weight, None if key_bias is None else key_bias / t)
            forms.append((stacked(query, key), math.sqrt((d_query + t**2) * (d_key + t**2))))
    bounds: dict[int, np.ndarray] = {}
    for distance in distances:
        smallest = bound
        for form, size in forms:
            largest = spectral_norm(at_distance(form, plan, distance)).ravel()
            smallest = np.asarray(np.minimum(smallest, plan.score_scale * size * largest))
        bounds[distance] = smallest
    return bounds


class Bands(NamedTuple):
    """Rotary planes of one block.

    Attributes
    ----------
    frequencies
        Magnitude of the radians per token of each plane, after any scaling.
    axes
        Axis of the positions that rotate the plane: 0, or 1 for the columns of an image's patches.
    energies
        E_k of each query head.
    """

    frequencies: Float[np.ndarray, " planes"]
    axes: Int[np.ndarray, " planes"]
    energies: Float[np.ndarray, "heads planes"]

    @property
    def shares(self) -> Float[np.ndarray, "heads planes"]:
        """E_k / Σ E_k, (H, P); NaN for a head with a zero form."""
        size = self.energies.sum(axis=1, keepdims=True)
        return self.energies / np.where(size == 0, np.nan, size)

    @property
    def low_share(self) -> Float[np.ndarray, " heads"]:
        """Share of the slower half of all planes in Σ E_k, (H,); 1/2 by chance."""
        slow = np.argsort(self.frequencies, kind="stable")[: len(self.frequencies) // 2]
        return np.asarray(self.shares[:, slow].sum(axis=1))


def rotary_bands(block: BlockWeights) -> Bands:
    """Return the rotary planes of one block.

    Raises
    ------
    CheckpointError
        The block's positions are not rotary.

    Examples
    --------
    >>> import numpy as np, wqk
    >>> weights = {f"layers.0.self_attn.{s}_proj.weight": np.eye(8) for s in "qk"}
    >>> from wqk.checkpoints.modules import StateDict
    >>> config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> bands = wqk.open(StateDict(weights, config, "toy"))[0].bands()
    >>> bands.energies.round(6).tolist(), bands.low_share.round(6).tolist()
    ([[2.0, 2.0], [2.0, 2.0]], [0.5, 0.5])
    """
    rotary = block.plan.rotary or block.plan.axial
    if rotary is None:
        raise CheckpointError(
            f"layer {block.layer} of the {block.plan.stack} has no bands: its positions "
            f"are {block.plan.position or 'not rotary'}"
        )
    first, second = rotary.planes
    planes = []
    for factor in (block.query, block.key):
        squares = np.square(factor.weight.astype(np.float64)).sum(axis=-1)
        planes.append(np.sqrt(squares[:, first] + squares[:, second]))
    sharing = block.head_count // block.key_head_count
    return Bands(
        np.abs(np.asarray(rotary.frequencies, np.float64)),
        rotary.plane_axes,
        planes[0] * planes[1].repeat(sharing, axis=0),
    )
