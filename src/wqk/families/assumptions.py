"""Parts of a plan that a family does not establish: assumed values, and values that are unknown.

A plan of a known family is a fact, except for rotary positions that the family only names. A plan
of a guess is not: names and shapes of tensors do not determine the scale, the positions, the mask,
or the gains' offset. Every such part is listed, with the value that the plan uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wqk.families.plans import AttentionPlan


class Aspect(Enum):
    """A part of a plan."""

    SCALE = "scale"
    ROTATION = "rotation"
    MASK = "mask"
    WINDOW = "window"
    TERMS = "terms added to the score"
    CAP = "soft cap"
    LAYOUT = "order of queries, keys and values"
    GAINS = "gains of the norms of queries and keys"
    INPUT_NORM = "norm that feeds the projections"
    MISSING = "missing tensor"


@dataclass(frozen=True)
class Assumption:
    """A part of a plan that is assumed or unknown.

    Attributes
    ----------
    aspect
        The part.
    value
        The value that the plan uses; None if the plan uses none, because the part is unknown.
    reason
        A clause on why it is not known.
    """

    aspect: Aspect
    value: str | None
    reason: str

    @property
    def is_unknown(self) -> bool:
        """Return whether the plan has no value for this part."""
        return self.value is None

    def __str__(self) -> str:
        shown = "unknown" if self.value is None else f"assumed {self.value}"
        return f"{self.aspect.value}: {shown} ({self.reason})"


def in_one_line(assumptions: Iterable[Assumption]) -> str:
    """Return what a plan assumes and what is unknown of it, as one sentence; empty if nothing is.

    Examples
    --------
    >>> scale = Assumption(Aspect.SCALE, "0.25", "names of tensors are known")
    >>> rotation = Assumption(Aspect.ROTATION, None, "names of tensors are known")
    >>> in_one_line([scale, rotation])
    'assumed: scale 0.25; unknown: rotation'
    """
    assumptions = tuple(assumptions)
    assumed = [f"{one.aspect.value} {one.value}" for one in assumptions if not one.is_unknown]
    unknown = [one.aspect.value for one in assumptions if one.is_unknown]
    lists = {"assumed": dict.fromkeys(assumed), "unknown": dict.fromkeys(unknown)}
    return "; ".join(f"{name}: {', '.join(parts)}" for name, parts in lists.items() if parts)


NAMES_ONLY = "only names and shapes of tensors are known"
ORDERS = {
    "sectioned": "all queries, then all keys, then all values",
    "conv1d": "stored (in, out); all queries, then all keys, then all values",
    "grouped": "for each key head its queries, its key, its value",
}


def assumptions_of(plan: AttentionPlan) -> Iterator[Assumption]:
    """Yield the parts of a plan that its family does not establish."""
    if plan.rule.guess:
        yield from _of_guess(plan)
    elif plan.position.startswith("rotary") and plan.rotary is None and plan.axial is None:
        yield Assumption(
            Aspect.ROTATION, None, f"family {plan.family} only names its positions: {plan.position}"
        )
    if plan.rule.causal_under and not plan.rule.causal_under.keys() & set(
        plan.query.tensor.split(".")
    ):
        yield Assumption(Aspect.MASK, "none", "the class that runs decides, and no name shows it")
    for name in plan.missing:
        yield Assumption(Aspect.MISSING, None, f"models of this type have {name}")


def _of_guess(plan: AttentionPlan) -> Iterator[Assumption]:
    if plan.scale is None:
        scale = f"{plan.score_scale:g}"
        yield Assumption(Aspect.SCALE, scale, f"{NAMES_ONLY}; head_width ** -0.5")
    yield Assumption(Aspect.ROTATION, None, NAMES_ONLY)
    yield Assumption(Aspect.MASK, "causal" if plan.causal else None, NAMES_ONLY)
    yield Assumption(Aspect.WINDOW, None, NAMES_ONLY)
    yield Assumption(Aspect.TERMS, None, NAMES_ONLY)
    yield Assumption(Aspect.CAP, None, NAMES_ONLY)
    if plan.rule.layout in ORDERS:
        module = (plan.rule.fused or plan.rule.query)[0]
        yield Assumption(
            Aspect.LAYOUT,
            ORDERS[plan.rule.layout],
            f"{module} has room for them in several orders",
        )
    norms = [side.norm for side in (plan.query, plan.key) if side.norm is not None]
    if norms:
        offset = norms[0].offset
        value = "as stored" if not offset else f"{offset:g} plus what is stored"
        yield Assumption(Aspect.GAINS, value, "names of tensors do not show what is stored")
    if plan.query.input_norm is None:
        yield Assumption(Aspect.INPUT_NORM, None, NAMES_ONLY)
