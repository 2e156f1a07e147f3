"""The three verdicts of a comparison, and the value of each verdict in every output."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """Outcome of a comparison.

    Examples
    --------
    >>> [(verdict.value, verdict.same, verdict.exit_status) for verdict in Verdict]
    [('same', True, 0), ('different', False, 1), ('not decided', None, 3)]
    """

    SAME = "same"
    DIFFERENT = "different"
    NOT_DECIDED = "not decided"

    @property
    def same(self) -> bool | None:
        """True if the two models are the same; None if undecided."""
        if self is Verdict.NOT_DECIDED:
            return None
        return self is Verdict.SAME

    @property
    def exit_status(self) -> int:
        """Exit status of the command; 2 is the status of errors."""
        if self is Verdict.NOT_DECIDED:
            return 3
        return 0 if self is Verdict.SAME else 1
