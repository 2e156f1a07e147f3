"""Parts of a plan that a family does not establish: assumed values and unknown values.

The plan of a known family is certain, except for rotary positions that the family only names. The
plan of a guessed family is uncertain: names and shapes of tensors do not determine the scale, the
positions, the mask, or the offset of gains. `AttentionPlan.assumptions` lists every such part, with
the value that the plan uses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


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
        The value that the plan uses; None if the part is unknown.
    reason
        A clause with the reason why the part is not known.
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
    """Return assumed and unknown parts of a plan as one sentence; empty without such parts.

    Examples
    --------
    >>> scale = Assumption(Aspect.SCALE, "0.25", "names of tensors are known")
    >>> rotation = Assumption(Aspect.ROTATION, None, "names of tensors are known")
    >>> in_one_line([scale, rotation])
    'assumed: scale 0.25; unknown: rotation'
    """
    assumed: dict[str, None] = {}
    unknown: dict[str, None] = {}
    for assumption in assumptions:
        aspect = assumption.aspect.value
        if assumption.is_unknown:
            unknown[aspect] = None
        else:
            assumed[f"{aspect} {assumption.value}"] = None
    lists = {"assumed": assumed, "unknown": unknown}
    return "; ".join(f"{name}: {', '.join(parts)}" for name, parts in lists.items() if parts)
