"""Causes of a difference between two blocks: their kinds, and records with words and repairs.

A cause describes the candidate: how it was changed, or what it lacks. Its repair is a program of
steps, see `wqk.sameness.repairs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from wqk.sameness.repairs import Step, merged, program
from wqk.sameness.tolerances import CLOSE, DIFFERENT, NEARLY, SAME

if TYPE_CHECKING:
    import numpy as np


class Kind(StrEnum):
    """What happened to a block, in the same words for every one."""

    # Orders of what is stored.
    ROTARY = "other rotary positions"
    HEADS = "same heads in another order"
    PAIRING = "other pairing of query and key heads"
    DIMENSIONS = "other order of dimensions"
    ROWS = "other order of rows"
    COLUMNS = "other order of columns"
    FUSED = "other layout of the fused weight"
    TRANSPOSED = "stored transposed"
    # Weights in the place of others.
    EXCHANGED = "transposed"
    TENSOR = "another tensor's weights"
    LAYER = "another layer's weights"
    STRANGERS = "heads of other weights"
    COPIES = "heads copied from others"
    AVERAGED = "heads averaged"
    EXPERTS = "experts in another order"
    ADAPTER = "other adapter"
    # Numbers.
    ZERO = "all zero"
    SCALED = "scaled"
    SIGNS = "other signs"
    ROW_FACTORS = "other factors of rows"
    COLUMN_FACTORS = "other factors of columns"
    GAIN_FOLDED = "a norm's gain, folded in as well"
    INTEGERS = "not dequantized"
    BLOCK_SCALES = "scales of other blocks"
    ZERO_POINT = "zero points off"
    GROUPS = "columns in other groups"
    QUANTIZED = "quantized from other weights"
    OFFSET = "a constant added"
    EXPONENTIAL = "stored as an exponential"
    CONSTANT = "all one number"
    BIASES = "same weights, other biases"
    NORM = "same weights, other norm"
    SINKS = "other sinks"
    # Beside the weights.
    SETTING = "other setting"
    SIZES = "other sizes"
    RESIZED = "another number of rows"
    MISSING = "missing from the file"
    # Without a cause.
    CLOSE = "close"
    UNKNOWN = "no known mistake"
    DIFFERENT = "different weights"


UNEXPLAINED = frozenset({Kind.CLOSE, Kind.UNKNOWN, Kind.DIFFERENT})
# One for each head, or of heads.
Numbers: TypeAlias = "Sequence[Any] | np.ndarray"


@dataclass(frozen=True)
class Mismatch:
    """A difference between two blocks, and its cause.

    Attributes
    ----------
    verdict
        Its kind.
    reason
        The cause in one phrase.
    steps
        The steps that undo it; empty where none are known.
    sides
        The sides of the form that it concerns: ``query``, ``key``, or both.
    heads
        The heads that it concerns; empty for all.
    facts
        Numbers behind the reason, by name.
    """

    verdict: Kind
    reason: str
    steps: tuple[Step, ...] = field(default=(), hash=False)
    sides: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.reason

    @property
    def repair(self) -> str:
        """Code that undoes it; empty where none is known."""
        return program(merged(self.steps))

    @property
    def unexplained(self) -> bool:
        """Whether only the distance of two blocks is known, not the cause."""
        return self.verdict in UNEXPLAINED

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "repair": self.repair,
            "sides": self.sides,
            "heads": self.heads,
            **self.facts,
        }


def head_order(heads: Numbers) -> Mismatch:
    """The same heads in another order: the candidate's head for each head of the reference."""
    order = tuple(map(int, heads))
    reason = f"{Kind.HEADS}: {listed(order)}"
    return Mismatch(Kind.HEADS, reason, sides=("query", "key"), heads=order)


def pairing(query_heads: Numbers, key_heads: Numbers, groups: int) -> Mismatch:
    """The same query and key heads, paired otherwise: both for each head of the reference."""
    pairs = dict(zip(map(int, query_heads), map(int, key_heads), strict=True))
    share = len(pairs) // groups
    if all(key == head % groups for head, key in pairs.items()):
        rule = f"query head h belongs to key head h mod {groups}"
    else:
        heads = sorted(pairs)
        met = listed([pairs[head] for head in heads])
        rule = f"query heads {listed(heads)} belong to key heads {met}"
    facts = {"query_heads": tuple(pairs), "key_heads": tuple(pairs.values()), "groups": groups}
    reason = f"{Kind.PAIRING}: {rule}, is read with h // {share}"
    return Mismatch(Kind.PAIRING, reason, sides=("query",), facts=facts)


def scaled(factors: Sequence[float], width: int) -> Mismatch:
    """Each head's scores times a factor; the root of the width is forgotten most often.

    Examples
    --------
    >>> scaled((4.0, 3.98), 16).reason
    "scaled by 4 = √16, of the score's scale"
    >>> scaled((4.0, 3.0), 16).reason
    'scaled, each head by a factor of its own'
    """
    low, high = min(factors), max(factors)
    facts = {"factors": tuple(map(float, factors)), "width": width}
    if high - low > SAME * abs(high):
        reason = f"{Kind.SCALED}, each head by a factor of its own"
        return Mismatch(Kind.SCALED, reason, facts=facts)
    known = {1 / math.sqrt(width): "1/√", math.sqrt(width): "√"}
    near = [text for value, text in known.items() if math.isclose(high, value, rel_tol=SAME)]
    named = f" = {near[0]}{width}, of the score's scale" if near else ""
    return Mismatch(Kind.SCALED, f"scaled by {high:.4g}{named}", facts=facts | {"factor": high})


def setting(name: str, value: Any, other: Any, steps: Sequence[Step] = ()) -> Mismatch:
    """A setting outside the form that differs."""
    texts = ["none" if each is None else str(each) for each in (value, other)]
    facts = {"name": name, "value": texts[0], "other_value": texts[1]}
    reason = f"{name}: {texts[0]} against {texts[1]}"
    return Mismatch(Kind.SETTING, reason, tuple(steps), facts=facts)


def unexplained(distances: Numbers, shares: Numbers) -> Mismatch:
    """No known change makes the blocks equal: how far apart they are, and in which heads.

    ``shares`` are those distances over their tolerances.
    """
    far = [head for head, share in enumerate(shares) if share > 1]
    low, high = (pick(distances[head] for head in far) for pick in (min, max))
    size = f"{high:.2g}" if low > high / 2 else f"{low:.2g} to {high:.2g}"
    if len(far) < len(distances):
        rest = [h for h in range(len(distances)) if h not in far]
        near = [h for h in rest if shares[h] > NEARLY]
        most = max((distances[h] for h in near), default=0.0)
        within = f"; just within the tolerance in {_counted(near)} ({most:.2g})" if near else ""
        reason = f"{Kind.UNKNOWN}: relative distance {size} in {_counted(far)}{within or ' alone'}"
        return Mismatch(Kind.UNKNOWN, reason, heads=tuple(far), facts={"size": high})
    kind = Kind.DIFFERENT if low > DIFFERENT else Kind.CLOSE if high < CLOSE else Kind.UNKNOWN
    words = f"{Kind.CLOSE}, but {Kind.UNKNOWN}" if kind is Kind.CLOSE else str(kind)
    reason = f"{words}: relative distance {size} in all heads"
    return Mismatch(kind, reason, facts={"size": high})


def _counted(heads: Numbers) -> str:
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {listed(heads)}"


def listed(numbers: Numbers) -> str:
    """A readable list of numbers that fits a line."""
    shown = " ".join(map(str, numbers[:16]))
    return shown + (" …" if len(numbers) > 16 else "")
