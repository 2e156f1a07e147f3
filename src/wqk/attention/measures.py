"""Measures of a block on request: the largest scores it can produce, and its rotary planes.

The largest scores are bounds from the weights alone. A norm feeds the projections: its output
before the gain, x̂, has length at most √D. With gains and biases folded in, q = Ã x̂ + a has length
at most √D σ₁(Ã) + ‖a‖, which rotary positions do not change, and no score is larger than
scale · ‖q‖ ‖k‖ at any distance. At distance N it is at most scale · D σ₁(Ã R(−N) B̃ᵀ), with biases
as one more row and column.

Queries or keys that are themselves normalized, with gains g, have length at most √R max|g|,
whatever feeds them; those from a normalized latent of width C, at most √C σ₁ of what follows it.

Rotary positions rotate a head's dimensions plane by plane: fast planes distinguish nearby
positions, slow ones hardly rotate and match content at any distance. A plane's contribution to the
score is bounded by E_k = ‖A_k‖ ‖B_k‖, the norms of its two columns in each factor.

Axes: H query heads, G key heads, R head width, D model width, C latent width, P rotary planes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.attention.factors import Factor, Factors, at_distance, augmented, stacked
from wqk.checkpoints import Part
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan, Composed, Norm, Side
from wqk.forms.spectra import spectral_norm


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
        weight = outer.weight({outer.part: stored}) * gain * side.factor
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
        length = length * factor.temperature.max(axis=-1)
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
            # With a bias for an input of this size as one more column.
            form = stacked(
                *(
                    weight if unit is None else augmented(weight, None if b is None else b / unit)
                    for weight, b in linear
                )
            )
            size = math.sqrt(math.prod(w.shape[-1] + (unit or 0) ** 2 for w, _ in linear))
            largest = spectral_norm(at_distance(form, plan, distance)).ravel()
            best = np.asarray(np.minimum(best, plan.scale * size * largest))
        bounds[distance] = best
    return bounds


class Bands(NamedTuple):
    """One block's rotary planes."""

    frequencies: Float[np.ndarray, " planes"]  # |radians per token|, after any scaling
    axes: Int[np.ndarray, " planes"]  # 0; for a picture's patches, 1 where the column turns planes
    energies: Float[np.ndarray, "heads planes"]  # E_k of each query head

    @property
    def shares(self) -> Float[np.ndarray, "heads planes"]:
        """E_k / Σ E_k, (H, P); NaN of a head whose form is zero."""
        size = self.energies.sum(axis=1, keepdims=True)
        return self.energies / np.where(size == 0, np.nan, size)

    @property
    def low_share(self) -> Float[np.ndarray, " heads"]:
        """The share of the slower half of all planes in Σ E_k, (H,); 1/2 by chance."""
        slow = np.argsort(self.frequencies, kind="stable")[: len(self.frequencies) // 2]
        return np.asarray(self.shares[:, slow].sum(axis=1))


def rotary_bands(block: Factors) -> Bands:
    """The rotary planes of one block.

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
    count = len(rotary.frequencies)
    return Bands(
        np.abs(np.asarray(rotary.frequencies, np.float64)),
        np.arange(count) * rotary.axes // count,
        planes[0] * planes[1].repeat(sharing, axis=0),
    )
