"""All statements on one subject: what each module of `wqk.theory` computes, as findings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.errors import WqkError
from wqk.theory.finding import Finding, not_tested
from wqk.theory.measuring.bounds import measure_bounds
from wqk.theory.measuring.counts import measure_counts
from wqk.theory.measuring.evidence import Evidence
from wqk.theory.measuring.gradients import measure_gradients
from wqk.theory.measuring.growth import measure_growth
from wqk.theory.measuring.optimizer import measure_optimizer
from wqk.theory.measuring.pairing import measure_pairing
from wqk.theory.measuring.scores import measure_scores
from wqk.theory.measuring.tails import measure_tails
from wqk.theory.measuring.updates import measure_updates

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from wqk.theory.subject import Subject
    from wqk.theory.text import Text

    OnProgress = Callable[[str, int, int], None]

__all__ = ["MEASUREMENTS", "Evidence", "measure"]

# What is measured, in the order of the paper. The names stand for what could not be tested.
MEASUREMENTS: dict[str, Callable[[Evidence], list[Finding]]] = {
    "Proposition 2.1: scores as bilinear forms": measure_scores,
    "Proposition 2.2: gradients as sums over pairs": measure_gradients,
    "Remark S1.6: the implicit update": measure_updates,
    "Propositions S1.7-S1.9: growth of rows and columns": measure_growth,
    "Proposition S1.10: context and prediction counts": measure_counts,
    "Theorems 2.3 and S1.12: column and row tails": measure_tails,
    "Theorem 2.3 through Remark S1.6: what the optimizer does": measure_optimizer,
    "Theorems 2.4 and S1.14: pairs and symmetry": measure_pairing,
    "Propositions S1.16-S1.18: bounds and random matrices": measure_bounds,
}


def measure(
    subject: Subject,
    text: Text,
    *,
    layers: Collection[int] | None = None,
    on_progress: OnProgress | None = None,
) -> list[Finding]:
    """Every statement on one model and text; what cannot be tested is a finding, too.

    Parameters
    ----------
    subject, text
        As `wqk.theory.opening.open_subjects` gives them.
    layers
        Numbers of the layers to look at; all where None.
    on_progress
        Told what is measured next, how many measurements are done, and of how many.
    """
    evidence = Evidence(subject, text, layers)
    findings: list[Finding] = []
    for done, (name, measurement) in enumerate(MEASUREMENTS.items()):
        if on_progress:
            on_progress(name, done, len(MEASUREMENTS))
        try:
            findings += measurement(evidence)
        except WqkError as error:
            findings.append(not_tested(name, str(error)))
    return findings
