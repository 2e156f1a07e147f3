"""The three verdicts of a comparison, and the form that each has in every output."""

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
        """Whether the two are the same; None where a comparison could not decide it."""
        return {Verdict.SAME: True, Verdict.DIFFERENT: False}.get(self)

    @property
    def exit_status(self) -> int:
        """Exit status of the command; 2 is that of an error."""
        return {Verdict.SAME: 0, Verdict.DIFFERENT: 1}.get(self, 3)
