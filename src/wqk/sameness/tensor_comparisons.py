"""Record of the comparison of two tensors outside the forms: outcome, reason and role."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from wqk.sameness.mismatches import Kind

# Roles of tensors outside the forms.
ATTENTION, MIXER, OTHER = "attention", "mixer", "other"


class Outcome(StrEnum):
    """Outcome of the comparison of two tensors."""

    EQUAL = "equal"
    ROUNDED = "equal up to rounding"
    FOUND = "equal, stored otherwise"
    DIFFERS = "differs"
    MISSING = "only in the reference"
    ADDED = "only in the candidate"
    UNKNOWN = "not compared"

    @property
    def same(self) -> bool:
        """True if the tensors were compared and are equal."""
        return self in (Outcome.EQUAL, Outcome.ROUNDED, Outcome.FOUND)

    @property
    def differs(self) -> bool:
        """True if the tensors were compared and are not equal."""
        return not self.same and self is not Outcome.UNKNOWN


@dataclass(frozen=True)
class TensorComparison:
    """A tensor of the reference next to the same tensor of the candidate.

    Attributes
    ----------
    name, other
        Name in the reference, and in the candidate; empty if the checkpoint lacks the tensor.
    outcome
        Outcome of the comparison.
    reason
        The difference, or the location of the tensor, as a phrase.
    role
        ``attention``, ``mixer`` or ``other``.
    distance
        ‖a − b‖ / ‖a‖; infinite if the tensors were not compared.
    kind
        The cause, if known from the two tensors alone.
    """

    name: str
    other: str
    outcome: Outcome
    reason: str = ""
    role: str = "other"
    distance: float = math.inf
    kind: Kind | None = None

    @property
    def title(self) -> str:
        """The name in the reference; if absent, the name in the candidate."""
        return self.name or self.other

    def __str__(self) -> str:
        return f"{self.title}: {self.reason or self.outcome}"
