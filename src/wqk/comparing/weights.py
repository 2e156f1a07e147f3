"""A block's weights as stored, with the norms that feed them, and its scores made from these.

What conversions change are stored weights, biases and gains, so that mistakes are looked for there;
whether they matter is told from the scores.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wqk._caching import cached_property
from wqk.attention import Block
from wqk.attention.coordinates import with_norm
from wqk.attention.factor import Factor
from wqk.checkpoints import Part, TensorInfo
from wqk.checkpoints.adapters import AdaptedCheckpoint
from wqk.checkpoints.number_types import rounding
from wqk.comparing import mistakes
from wqk.comparing.blocks import Rows, Scoring
from wqk.comparing.mistakes import Mismatch, of_vector, reorders, to_order
from wqk.families import Composed, Norm, Projection, Rotary, Side

SIDES = ("query", "key")

# Of each floating type: half the distance of neighboring numbers, relative to them.
ROUNDING = {
    "F64": 2.0**-53,
    "F32": 2.0**-24,
    "F16": 2.0**-11,
    "BF16": 2.0**-8,
    "F8_E4M3": 2.0**-4,
    "F8_E5M2": 2.0**-3,
}
# The same at zero, where it is not relative.
AT_ZERO = {"F16": 2.0**-25}


@dataclass(frozen=True, eq=False)
class Weights:
    """One side of a block as stored."""

    factor: Factor
    norm: Norm | None  # that feeds it, if it is known
    gain: np.ndarray | None  # of that norm, as it multiplies
    shift: np.ndarray | None

    @property
    def rows(self) -> np.ndarray:
        """The weight's rows, (heads · R, D)."""
        return np.asarray(
            self.factor.stored_weight.reshape(-1, self.factor.stored_weight.shape[-1])
        )

    @property
    def bias(self) -> np.ndarray | None:
        """The bias, (heads · R,)."""
        bias = self.factor.stored_bias
        return None if bias is None else np.asarray(bias.reshape(-1))

    @property
    def heads(self) -> int:
        """Number of heads."""
        return int(self.factor.stored_weight.shape[0])

    @property
    def width(self) -> int:
        """Width of a head."""
        return int(self.factor.stored_weight.shape[1])

    @property
    def roundings(self) -> float:
        """Of how many factors, each rounded when it was stored, it is the product.

        A temperature is stored as its logarithm, whose rounding is that of the whole head.
        """
        latent = 2 if isinstance(self.factor.side.projection, Composed) else 0
        count = 1.0 + latent + (self.gain is not None) + (self.factor.gain is not None)
        if self.factor.temperature is not None:
            count += 3 * float(np.square(np.log(self.factor.temperature)).max())
        return count

    def folded(self, norms: bool) -> tuple[np.ndarray, np.ndarray | None]:
        """Weight and bias with what comes after them, and if wanted with the norm before them."""
        weight, bias = self.factor.weight, self.factor.bias
        if self.norm is None or self.gain is None or not norms:
            return weight, bias
        return with_norm(weight, bias, self.gain, self.shift, self.norm.kind)

    def unfolded(self, norms: bool, biases: bool = True) -> Rows:
        """The rows with what comes after them, and beside them the norm before them if wanted.

        Without ``biases``, their own and the norm's are left out.
        """
        norm = None
        if norms and self.norm is not None and self.gain is not None:
            norm = (self.gain, self.shift if biases else None, self.norm.kind)
        return Rows(self.factor.weight, self.factor.bias if biases else None, norm)

    def changed(self, **parts: Any) -> Weights:
        """With other ``weight`` rows, ``bias``, or norm before the score (``after``)."""
        names = {"weight": "stored_weight", "bias": "stored_bias", "after": "gain"}
        shape = self.factor.stored_weight.shape
        new = {
            names[key]: value.reshape(shape if key == "weight" else shape[:2])
            if value is not None and key != "after"
            else value
            for key, value in parts.items()
        }
        return replace(self, factor=replace(self.factor, **new))


@dataclass(frozen=True, eq=False)
class StoredBlock:
    """A block as its checkpoint stores it."""

    query: Weights
    key: Weights
    scale: float
    rotary: Rotary | None  # of one axis or of two, with its attention factor
    rounding: float
    norms: bool  # whether the norms before it are folded into its scores
    key_bias: bool  # whether the key's bias counts
    values: Callable[[], np.ndarray | None]  # the values' rows, read when they are needed
    unadapted: Callable[[], tuple[StoredBlock, float] | None] = lambda: None  # without its adapter
    stored_order: str = ""  # of its rotary pairs, if its rows were brought into another one

    def side(self, name: str) -> Weights:
        """Its ``query`` or its ``key``."""
        return self.query if name == "query" else self.key

    def in_order(self, order: str) -> StoredBlock:
        """The same block with its rotary pairs in this order, rows and all."""
        rotary = self.rotary
        if rotary is None or rotary.order == order:
            return self
        sides = []
        for side in (self.query, self.key):
            rows = to_order(order, side.heads, side.width, 2 * len(rotary.frequencies)).rows
            gain = side.factor.gain
            within = rows[: side.width] if gain is None or len(gain) == side.width else rows
            sides.append(
                side.changed(
                    weight=side.rows[rows],
                    bias=None if side.bias is None else side.bias[rows],
                    after=None if gain is None else gain[within],
                )
            )
        turned = replace(rotary, order=order)
        return replace(self, query=sides[0], key=sides[1], rotary=turned, stored_order=rotary.order)

    @cached_property
    def scoring(self) -> Scoring:
        """Its scores."""
        return Scoring(
            self.query.unfolded(self.norms),
            self.key.unfolded(self.norms, self.key_bias),
            self.scale,
            self.rotary,
            self.rounding,
        )


def load_block(block: Block, *, norms: bool, **known: Any) -> StoredBlock:
    """A block's weights, and the norms that feed it if they are to be folded in.

    ``known`` replaces what a guessed plan does not know: ``scale``, ``rotary``, ``key_bias``.
    """
    plan = block.plan
    pairs = ((block.query, plan.query), (block.key, plan.key))
    query, key = (
        _weights(block, factor, side.input_norm if norms else None) for factor, side in pairs
    )

    def unadapted() -> tuple[StoredBlock, float] | None:
        checkpoint = block.checkpoint
        if not isinstance(checkpoint, AdaptedCheckpoint):
            return None
        scales = [checkpoint.scale_of(side.tensor) for side in (plan.query, plan.key)]
        scale = next((scale for scale in scales if scale is not None), 1.0)
        return load_block(Block(checkpoint.base, plan), norms=norms, **known), scale

    stored = StoredBlock(
        query,
        key,
        plan.scale,
        plan.rotary or plan.axial,
        max(
            rounding_of(block, factor, side, weights.roundings)
            for weights, (factor, side) in zip((query, key), pairs, strict=True)
        ),
        norms,
        plan.rotary is not None,
        lambda: _values(block),
        unadapted,
    )
    return replace(stored, **known)


def rounding_of(block: Block, factor: Factor, side: Side, roundings: float = 1.0) -> float:
    """Half the distance of neighboring stored numbers of a side, relative to them.

    ``roundings`` is of how many rounded factors it is the product.
    """
    return max(
        _rounding(info := block.checkpoint.info(part.name), values)
        # Beside quantized weights, gains are stored as floats.
        * (1.0 if info.grid else roundings**0.5)
        for part, values in _stored(block, factor, side)
    )


def _stored(block: Block, factor: Factor, side: Side) -> Iterator[tuple[Part, np.ndarray]]:
    """The parts of a side's weight as they are stored; of a product, each factor."""
    for part in side.projection.roles.values():
        one = isinstance(side.projection, Projection)
        yield part, np.asarray(factor.stored_weight if one else block.read([part])[0])


def _weights(block: Block, factor: Factor, norm: Norm | None) -> Weights:
    if norm is None:
        return Weights(factor, None, None, None)
    return Weights(factor, norm, *block.gain(norm))


def _values(block: Block) -> np.ndarray | None:
    """The rows of the values, (G · R, D)."""
    if block.plan.value is None:
        return None
    projection = block.plan.value.projection
    parts = list(projection.roles.values())
    weight = projection.weight(dict(zip(parts, block.read(parts), strict=True)))
    return np.asarray(weight.reshape(-1, weight.shape[-1]))


def grid(dtype: str, values: np.ndarray) -> str:
    """The coarsest type that holds these values, where they are stored in a wider one.

    Examples
    --------
    >>> grid("F32", np.array([1.0, 0.3], np.float16).astype(np.float32))
    'F16'
    """
    if dtype not in ("F64", "F32", "F16") or values.dtype not in (np.float32, np.float64):
        return dtype
    flat = values.reshape(-1)
    for some in (flat[:4096], flat):  # most weights fail at once
        single = some.astype(np.float32)
        with np.errstate(over="ignore"):
            fits = {
                "BF16": not (single.view(np.uint32) & 0xFFFF).any(),
                "F16": dtype != "F16" and np.array_equal(single, single.astype(np.float16)),
                "F32": dtype == "F64",
            }
        if dtype == "F64" and not np.array_equal(some, single):
            return dtype
        found = next((name for name, holds in fits.items() if holds), dtype)
        if found == dtype:
            return dtype
    return found if flat.any() else dtype


def _rounding(info: TensorInfo, values: np.ndarray) -> float:
    """Half the distance of neighboring stored numbers, relative to the weight's values."""
    if info.grid:
        return rounding(info.grid, values)
    kind = grid(info.dtype, values)
    relative, at_zero = ROUNDING.get(kind, ROUNDING["F8_E5M2"]), AT_ZERO.get(kind, 0.0)
    flat = values.reshape(-1)
    size = float(np.sqrt(np.vdot(flat, flat) / flat.size)) if at_zero and flat.size else 0.0
    return max(relative, at_zero / size if size else 0.0)


@dataclass(frozen=True, eq=False)
class Attempt:
    """The second block with the repairs so far, and what they repair."""

    block: StoredBlock
    found: tuple[Mismatch, ...] = ()
    beyond: frozenset[int] = frozenset()  # query heads that no repair brings back

    def with_side(self, side: str, weights: Weights, *found: Mismatch) -> Attempt:
        """With one side repaired."""
        given = {side: weights}
        query, key = given.get("query", self.block.query), given.get("key", self.block.key)
        block = replace(self.block, query=query, key=key)
        return replace(self, block=block, found=(*self.found, *found))


# Values that differ by less than this, relative to the largest, are the same gains or biases.
SAME = 2e-2


def rotated(block: StoredBlock, weights: Weights) -> int:
    """How many dimensions of a head turn with positions; all of them without rotary ones."""
    rotary = block.rotary
    return 2 * len(rotary.frequencies) if rotary is not None else weights.width


def alike(ours: np.ndarray | None, theirs: np.ndarray | None) -> bool:
    """Whether two vectors are the same, up to rounding."""
    if ours is None or theirs is None:
        return (ours is None or not ours.any()) and (theirs is None or not theirs.any())
    if ours.shape != theirs.shape:
        return False
    return bool(np.abs(ours - theirs).max() <= SAME * max(np.abs(ours).max(), 1e-30))


def biases_repaired(a: StoredBlock, attempt: Attempt) -> Attempt:
    """The biases as in the first block."""
    for side in SIDES:
        ours, theirs = a.side(side), attempt.block.side(side)
        bias = theirs.bias
        if alike(ours.bias, bias) or (side == "key" and not a.key_bias):
            continue
        if ours.heads != theirs.heads:
            continue
        other = a.side(SIDES[1 - SIDES.index(side)])
        reason, repair = f"other biases of the {side}", ""
        if bias is None or not bias.any():
            reason = f"biases of the {side} are missing"
            repair = "b = original"
        elif ours.bias is None:
            reason, repair = f"biases of the {side} that the original lacks", "b[:] = 0"
        elif alike(other.bias, bias):
            reason = f"the {side} has the biases of the {SIDES[1 - SIDES.index(side)]}"
            repair = "b_q, b_k = b_k, b_q"
        else:
            for step in reorders(ours.heads, ours.width, rotated(a, ours)):
                if alike(ours.bias, bias[step.rows]):
                    reason = "biases were not reordered along with the weights' rows"
                    repair = of_vector(step.code, "b")
                    break
        named = mistakes.other_bias(f"same weights, {reason}", repair, (side,))
        attempt = attempt.with_side(side, theirs.changed(bias=ours.bias), named)
    return attempt


def norms_repaired(a: StoredBlock, attempt: Attempt) -> Attempt:
    """The gains of norms before and after the projection."""
    start = attempt
    for side in SIDES:
        ours, theirs = a.side(side), attempt.block.side(side)
        for what, gains, offsets in (
            ("before the projection", (ours.gain, theirs.gain), (0.0, 0.0)),
            ("before the score", (ours.factor.gain, theirs.factor.gain), _offsets(ours, theirs)),
        ):
            if gains[0] is None or gains[1] is None or gains[0].shape != gains[1].shape:
                continue
            wanted, has = gains[0] + offsets[0], gains[1] + offsets[1]
            if alike(wanted, has):
                continue
            reason, repair = _gains(wanted, has, ours)
            named = mistakes.other_norm(f"norm {what}: {reason}", repair, (side,))
            weights = attempt.block.side(side)
            if what == "before the projection":
                weights = replace(weights, gain=wanted)
            else:
                weights = weights.changed(after=wanted - offsets[1])
            attempt = attempt.with_side(side, weights, named)
        weights = attempt.block.side(side)
        if not alike(ours.shift, weights.shift):
            named = mistakes.other_norm(
                "norm before the projection: other biases",
                "norm.bias = original",
                (side,),
            )
            attempt = attempt.with_side(side, replace(weights, shift=ours.shift), named)
    return attempt if attempt.found != start.found else start


def _offsets(ours: Weights, theirs: Weights) -> tuple[float, float]:
    first, second = (
        weights.factor.side.norm.offset if weights.factor.side.norm else 0.0
        for weights in (ours, theirs)
    )
    return first, second


def _gains(wanted: np.ndarray, has: np.ndarray, ours: Weights) -> tuple[str, str]:
    if alike(wanted, has + 1):
        return "gains are read as stored, but are differences from 1", "gain = 1 + gain"
    if alike(wanted, has - 1):
        return "gains have 1 added that were not differences from 1", "gain = gain - 1"
    if np.ptp(has) == 0:
        return f"gains were not converted (all are {has[0]:g})", "gain = original"
    if len(wanted) == ours.width:
        for step in reorders(1, ours.width, ours.width):
            if alike(wanted, has[step.rows]):
                return "gains were not reordered along with the rows", of_vector(step.code, "gain")
    return "other gains", "gain = original"
