"""How one block's attention can differ from another's: one small type per kind of mismatch.

Each describes the second block: how it was changed, or what it lacks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

if TYPE_CHECKING:
    from wqk.families.rotary import Rotary


@dataclass(frozen=True)
class Mismatch:
    """A difference between two blocks; as text, the reason in one phrase."""

    verdict: ClassVar[str]

    def __str__(self) -> str:
        return self.verdict


@dataclass(frozen=True)
class OtherRotary(Mismatch):
    """The same form at distance 0, but rotated differently by positions.

    ``order`` and ``speed`` belong to the rotation that would make the blocks equal,
    ``other_order`` and ``other_speed`` to that of the second block.
    """

    verdict: ClassVar[str] = "other rotary positions"

    order: str | None = None  # half or interleaved; None without a rotation
    other_order: str | None = None
    speed: float | None = None  # radians per position of the slowest rotated pair
    other_speed: float | None = None
    one_side: str = ""  # query or key, if only its dimensions are in the other order

    @classmethod
    def between(cls, wanted: Rotary | None, has: Rotary | None) -> OtherRotary:
        """The mismatch of a block that would be the same with another rotation."""
        facts = [
            (None, None) if r is None else (r.order, float(np.abs(r.frequencies).min()))
            for r in (wanted, has)
        ]
        (order, speed), (other_order, other_speed) = facts
        return cls(order, other_order, speed, other_speed)

    def __str__(self) -> str:
        if self.one_side:
            return f"other rotary order in the {self.one_side} weights alone"
        if self.order is None or self.other_order is None:
            here, there = self.order or "no", self.other_order or "none"
            return f"same at distance 0; {here} rotary positions expected, {there} found"
        reasons = []
        if self.order != self.other_order:
            reasons.append(f"rotary order: weights lie {self.order}, are read {self.other_order}")
        if self.speed != self.other_speed:
            reasons.append(
                f"rotary base or scaling: slowest frequency {self.speed:.3g} expected, "
                f"{self.other_speed:.3g} found"
            )
        return f"same at distance 0, other {'; '.join(reasons)}"


@dataclass(frozen=True)
class OtherHeadOrder(Mismatch):
    """The same heads in another order."""

    verdict: ClassVar[str] = "same heads in another order"

    heads: tuple[int, ...]  # for each head of the first block, the equal one of the second

    def __str__(self) -> str:
        return f"{self.verdict}: {_listed(self.heads)}"


@dataclass(frozen=True)
class OtherPairing(Mismatch):
    """The same query and key heads, paired differently."""

    verdict: ClassVar[str] = "other pairing of query and key heads"

    query_heads: tuple[int, ...]  # of the second block, for each head of the first
    key_heads: tuple[int, ...]
    groups: int  # number of key heads of the second block

    def __str__(self) -> str:
        pairs = dict(zip(self.query_heads, self.key_heads, strict=True))
        if all(key == head % self.groups for head, key in pairs.items()):
            rule = f"query head h belongs to key head h mod {self.groups}"
        else:
            in_order = sorted(pairs)
            rule = f"query heads {_listed(in_order)} belong to key heads " + _listed(
                [pairs[head] for head in in_order]
            )
        return f"{self.verdict}: {rule}, is read with h // {len(pairs) // self.groups}"


@dataclass(frozen=True)
class Transposed(Mismatch):
    """Queries and keys are exchanged."""

    verdict: ClassVar[str] = "transposed"

    def __str__(self) -> str:
        return f"{self.verdict}: queries and keys have changed places"


@dataclass(frozen=True)
class Scaled(Mismatch):
    """Each head's scores are those of the first block times a factor."""

    verdict: ClassVar[str] = "scaled"

    factors: tuple[float, ...]  # one for each head
    width: int  # of a head: its root is the factor that is most often forgotten, or applied twice

    def __str__(self) -> str:
        low, high = min(self.factors), max(self.factors)
        if high - low > 1e-2 * abs(high):
            return f"{self.verdict}, each head otherwise, by {low:.4g} to {high:.4g}"
        known = {1 / math.sqrt(self.width): "1/√", math.sqrt(self.width): "√"}
        near = [text for value, text in known.items() if math.isclose(high, value, rel_tol=1e-2)]
        named = f" = {near[0]}{self.width}, of the score's scale" if near else ""
        return f"{self.verdict} by {high:.4g}{named}"


@dataclass(frozen=True)
class OtherBias(Mismatch):
    """The same weights with other biases, or other biases of the norms before them."""

    verdict: ClassVar[str] = "same weights, other biases"


@dataclass(frozen=True)
class OtherSetting(Mismatch):
    """A setting outside the form differs."""

    verdict: ClassVar[str] = "other setting"

    name: str
    value: str
    other_value: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value} against {self.other_value}"


@dataclass(frozen=True)
class Unexplained(Mismatch):
    """No known change makes the blocks equal."""

    verdict: ClassVar[str] = "other"

    def __str__(self) -> str:
        return "other: no known mistake"


def _listed(numbers: tuple[int, ...] | list[int]) -> str:
    """A readable list of numbers that fits a line."""
    shown = " ".join(map(str, numbers[:16]))
    return shown + (" …" if len(numbers) > 16 else "")
