"""Causes of a difference between two blocks: their kinds, and records with reasons and repairs.

A cause describes the candidate: the change, or the missing part. The repair is a program of steps,
see `wqk.sameness.repairs`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from wqk._console import rounded_up
from wqk.sameness.repairs import Step, merged_steps, program
from wqk.sameness.round_factors import round_factor
from wqk.sameness.tolerances import (
    CLOSE_BELOW,
    DIFFERENT_ABOVE,
    NEARLY,
    ROUNDING_OF_FACTORS,
    SAME_SHARE,
)

if TYPE_CHECKING:
    import numpy as np

# Numbers that a list in a reason contains at most.
MOST_NUMBERS = 16


class Kind(StrEnum):
    """Kind of a change of a block or of a tensor."""

    # Kinds of wrong order of stored numbers.
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
    LAYERS = "other layers"
    INITIALIZED = "left as initialized"
    STRANGERS = "heads of other weights"
    COPIES = "heads copied from others"
    AVERAGED = "heads averaged"
    EXPERTS = "experts in another order"
    ADAPTER = "other adapter"
    SUM = "another weighted sum of parents"
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
    # Next to the weights.
    SETTING = "other setting"
    SIZES = "other sizes"
    RESIZED = "another number of rows"
    MISSING = "missing from the file"
    # Without a cause.
    CLOSE = "close"
    UNKNOWN = "no known mistake"
    DIFFERENT = "different weights"


UNEXPLAINED = frozenset({Kind.CLOSE, Kind.UNKNOWN, Kind.DIFFERENT})
# A number for each head, or numbers of heads.
Numbers: TypeAlias = "Sequence[Any] | np.ndarray"


@dataclass(frozen=True)
class Mismatch:
    """A difference between two blocks, and its cause.

    Attributes
    ----------
    verdict
        The kind of the cause.
    reason
        The cause in one phrase.
    steps
        The steps that undo the change; empty if unknown.
    sides
        The affected sides of the form: ``query``, ``key``, or both.
    heads
        The affected heads; empty for all.
    facts
        Numbers and names behind the reason; all are part of `to_dict`. Code reads these keys:
        ``circuit``, a circuit besides the scores; ``tensors``, the role of each tensor by name;
        ``name``, of a setting; ``factor`` and ``factors``, of all heads and of each head;
        ``query_heads``, ``key_heads`` and ``groups``, of a pairing, and of an order of heads: the
        candidate's query head and key head for each head of the reference; ``other_layer``, the
        source of a layer; ``missing``, ``repeated`` and ``new``, layers of a stack; ``method``,
        ``mistake`` and ``share``, of a merge. If whole heads of one weight are the cause,
        ``key_heads``, ``value_heads`` or ``output_heads`` are the heads of the weight, and
        ``query_heads`` the query heads that use them.
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
        """Code that undoes the change; empty if unknown."""
        return program(merged_steps(self.steps))

    @property
    def unexplained(self) -> bool:
        """True if only the distance of the blocks is known, and not the cause."""
        return self.verdict in UNEXPLAINED

    @property
    def is_close(self) -> bool:
        """True if the blocks differ only as much as after further training."""
        return self.verdict is Kind.CLOSE

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, for JSON."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "repair": self.repair,
            "sides": self.sides,
            "heads": self.heads,
            **self.facts,
        }


def head_order(query_heads: Numbers, groups: int) -> Mismatch:
    """Make the cause of equal heads in another order.

    Parameters
    ----------
    query_heads
        The candidate's heads that correspond to the heads of the reference. Each has kept its key
        head.
    groups
        Number of key heads.

    Examples
    --------
    >>> head_order([1, 0, 2], 3).reason
    'same heads in another order: 1 0 2'
    >>> head_order([2, 3, 0, 1], 2).reason
    'same heads in another order: query heads 2 3 0 1, key heads 1 0'
    """
    order = tuple(map(int, query_heads))
    share = len(order) // groups
    key_heads = tuple(head // share for head in order)
    reason = f"{Kind.HEADS}: {listed(order)}"
    if share > 1:
        order_of_keys = listed(key_heads[::share])
        reason = f"{Kind.HEADS}: query heads {listed(order)}, key heads {order_of_keys}"
    facts = {"query_heads": order, "key_heads": key_heads, "groups": groups}
    return Mismatch(Kind.HEADS, reason, sides=("query", "key"), heads=order, facts=facts)


def pairing(query_heads: Numbers, key_heads: Numbers, groups: int) -> Mismatch:
    """Make the cause of query heads that use other key heads.

    Parameters
    ----------
    query_heads, key_heads
        The candidate's query head and key head that correspond to each head of the reference.
    groups
        Number of key heads.

    Examples
    --------
    >>> print(pairing([0, 1, 2, 3], [0, 1, 0, 1], 2).reason.partition(": ")[2])
    query head h belongs to key head h mod 2; the candidate is read with key head h // 2
    """
    key_of_query = dict(zip(map(int, query_heads), map(int, key_heads), strict=True))
    share = len(key_of_query) // groups
    if all(key == query % groups for query, key in key_of_query.items()):
        rule = f"query head h belongs to key head h mod {groups}"
    else:
        queries = sorted(key_of_query)
        keys = [key_of_query[query] for query in queries]
        rule = f"query heads {listed(queries)} belong to key heads {listed(keys)}"
    facts = {
        "query_heads": tuple(key_of_query),
        "key_heads": tuple(key_of_query.values()),
        "groups": groups,
    }
    reason = f"{Kind.PAIRING}: {rule}; the candidate is read with key head h // {share}"
    return Mismatch(Kind.PAIRING, reason, sides=("query",), facts=facts)


def scaled(factors: Sequence[float], width: int, uncertainty: float = 0.0) -> Mismatch:
    """Make the cause of scores that are multiplied by a factor for each head.

    If the factor is the root of the head width, the most frequent mistake, the reason names the
    root.

    Parameters
    ----------
    factors
        The fitted factor of each head.
    width
        The head width.
    uncertainty
        Relative difference of a factor that rounding explains. If all factors equal one round
        number up to this difference, the cause has the round number.

    Examples
    --------
    >>> scaled((4.0, 3.98), 16).reason
    "scaled by 4 = √16, of the score's scale"
    >>> scaled((2.0001, 1.9998), 16, uncertainty=1e-3).facts["factor"]
    2.0
    >>> scaled((4.0, 3.0), 16).reason
    'scaled, each head by a factor of its own'
    """
    low, high = min(factors), max(factors)
    facts: dict[str, Any] = {"factors": tuple(map(float, factors)), "width": width}
    if high - low > SAME_SHARE * abs(high):
        reason = f"{Kind.SCALED}, each head by a factor of its own"
        return Mismatch(Kind.SCALED, reason, facts=facts)
    fitted = sum(factors) / len(factors)
    # Each head is fitted alone: the mean has a smaller uncertainty.
    of_mean = uncertainty / math.sqrt(len(factors)) + ROUNDING_OF_FACTORS
    number = round_factor(fitted, of_mean * abs(fitted))
    largest_difference = (uncertainty + ROUNDING_OF_FACTORS) * abs(number)
    is_round = number != fitted and max(number - low, high - number) <= largest_difference
    factor = number if is_round else high
    facts |= {"factor": factor, "fitted_factor": high}
    root = _root(factor, width)
    origin = f" = {root}, of the score's scale" if root else ""
    return Mismatch(Kind.SCALED, f"scaled by {factor:.4g}{origin}", facts=facts)


def _root(factor: float, width: int) -> str:
    """Name a factor that is the root of a width or its inverse; empty for other factors."""
    root = math.sqrt(width)
    if math.isclose(factor, root, rel_tol=SAME_SHARE):
        return f"√{width}"
    return f"1/√{width}" if math.isclose(factor, 1 / root, rel_tol=SAME_SHARE) else ""


def setting(name: str, expected: Any, actual: Any, steps: Sequence[Step] = ()) -> Mismatch:
    """Make the cause of a setting that differs.

    Examples
    --------
    >>> setting("rope_theta", 10000.0, None).reason
    'rope_theta: 10000.0 against none'
    """
    texts = ["none" if value is None else str(value) for value in (expected, actual)]
    facts = {"name": name, "value": texts[0], "other_value": texts[1]}
    reason = f"{name}: {texts[0]} against {texts[1]}"
    return Mismatch(Kind.SETTING, reason, tuple(steps), facts=facts)


def unexplained(distances: Numbers, shares: Numbers) -> Mismatch:
    """Make the cause of blocks that no known change makes equal: the distance of some heads.

    Parameters
    ----------
    distances
        Relative distance of each head.
    shares
        The distance of each head divided by its tolerance.
    """
    far = [head for head, share in enumerate(shares) if share > 1]
    low = min(distances[head] for head in far)
    high = max(distances[head] for head in far)
    size = rounded_up(high) if low > high / 2 else f"{low:.2g} to {rounded_up(high)}"
    if len(far) < len(distances):
        within = _within_tolerance(distances, shares)
        reason = f"{Kind.UNKNOWN}: relative distance {size} in {_counted(far)}{within or ' alone'}"
        return Mismatch(Kind.UNKNOWN, reason, heads=tuple(far), facts={"size": high})
    kind = Kind.UNKNOWN
    if low > DIFFERENT_ABOVE:
        kind = Kind.DIFFERENT
    elif high < CLOSE_BELOW:
        kind = Kind.CLOSE
    title = f"{Kind.CLOSE}, but {Kind.UNKNOWN}" if kind is Kind.CLOSE else str(kind)
    reason = f"{title}: relative distance {size} in all heads"
    return Mismatch(kind, reason, facts={"size": high})


def _within_tolerance(distances: Numbers, shares: Numbers) -> str:
    """Return a clause on heads whose distance nearly exceeds the tolerance; else empty."""
    near = [head for head, share in enumerate(shares) if NEARLY < share <= 1]
    if not near:
        return ""
    largest = max(distances[head] for head in near)
    return f"; just within the tolerance in {_counted(near)} ({largest:.2g})"


def _counted(heads: Numbers) -> str:
    """Return the word for heads, followed by their numbers."""
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {listed(heads)}"


def listed(numbers: Numbers) -> str:
    """Return numbers as text that fits on a line; an ellipsis replaces further numbers."""
    shown = " ".join(map(str, numbers[:MOST_NUMBERS]))
    return f"{shown} …" if len(numbers) > MOST_NUMBERS else shown
