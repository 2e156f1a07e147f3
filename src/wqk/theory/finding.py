"""What came out when one statement of the paper was computed on one model and one text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Verdict = Literal["holds", "holds in part", "fails", "not tested"]


@dataclass(frozen=True)
class Finding:
    """One statement, what it assumes and predicts, and what was seen.

    Attributes
    ----------
    statement
        Where it stands in the paper, and what it is about in a few words.
    assumption
        What it rests on, with the measured value beside it.
    prediction, observation
        What should be seen, and what was.
    verdict
        ``holds``, ``holds in part``, ``fails`` or ``not tested`` (then the observation says why).
    numbers
        What the verdict rests on: one mapping from names to numbers for each layer, or whatever the
        statement is about. All mappings have the same keys.

    Examples
    --------
    >>> Finding("Lemma S1.16: norms of the parts", "none", "‖M‖² = ‖M_s‖² + ‖M_n‖²", "equal to "
    ...         "1e-15", "holds").verdict
    'holds'
    """

    statement: str
    assumption: str
    prediction: str
    observation: str
    verdict: Verdict
    numbers: tuple[Mapping[str, Any], ...] = ()


def not_tested(statement: str, reason: str) -> Finding:
    """A statement that could not be computed here, and why.

    Examples
    --------
    >>> not_tested("Theorem 2.4: symmetric updates", "a causal model").observation
    'a causal model'
    """
    return Finding(statement, "", "", reason, "not tested")
