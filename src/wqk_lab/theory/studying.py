"""All statements for one subject, for the saved steps of a run, and for several seeds together."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._console import counted
from wqk.errors import TheoryError, WqkError, demo_advice
from wqk_lab.theory import (
    bilinear_scores,
    bounds,
    causes,
    counts,
    growth,
    optimizer,
    pairing,
    softmax,
    tails,
    updates,
)
from wqk_lab.theory.evidence import NOT_FOR, Evidence, obstacle
from wqk_lab.theory.findings import StudyReport, report
from wqk_lab.theory.opening import open_subjects
from wqk_lab.theory.optimizer import Moment
from wqk_lab.theory.subject import ObjectiveName
from wqk_lab.theory.text import Corpus
from wqk_lab.theory.verdict import (
    Finding,
    Sample,
    Statement,
    adjusted_together,
    decide,
    not_tested,
)

if TYPE_CHECKING:
    OnProgress = Callable[[str, int, int], None]

FILES = (
    bilinear_scores,
    softmax,
    updates,
    growth,
    counts,
    tails,
    causes,
    optimizer,
    pairing,
    bounds,
)


def _read() -> list[Statement]:
    """Return the statements in the order of the paper, each with its measure."""
    measures = {}
    for file in FILES:
        file_name = file.__name__.rpartition(".")[2]
        for name, measure in file.MEASURES.items():
            measures[f"{file_name}.{name}"] = measure
    content = tomllib.loads(Path(__file__).with_name("statements.toml").read_text("utf-8"))
    return [
        Statement(**{**entry, "measure": measures[entry["measure"]]})
        for entry in content["statement"]
    ]


EVERY = _read()
RUN_STATEMENTS = tuple(statement for statement in EVERY if statement.needs == "run")
STATEMENTS = tuple(statement for statement in EVERY if statement.needs != "run")


def examine(statement: Statement, evidence: Evidence) -> Finding:
    """Test one statement on some evidence, without correction for other statements."""
    reason = obstacle(statement, evidence)
    if reason:
        return not_tested(statement, reason)
    try:
        return decide(statement, statement.measure(evidence))
    except WqkError as error:
        return not_tested(statement, str(error))


def measure(evidence: Evidence, on_progress: OnProgress | None = None) -> list[Finding]:
    """Test every statement on one model and text; untestable statements also have a finding.

    ``on_progress`` is called with the next statement's number, the number of finished statements,
    and the number of all statements.

    Raises
    ------
    CheckpointError
        The model lacks a chosen layer.
    """
    findings = []
    _ = evidence.plans  # reports a wrong layer before anything is measured
    for done, statement in enumerate(STATEMENTS):
        if on_progress:
            on_progress(statement.number, done, len(STATEMENTS))
        findings.append(examine(statement, evidence))
    return adjusted_together(findings)


def follow(moments: Sequence[Moment], objective: ObjectiveName, lacking: str = "") -> list[Finding]:
    """Return findings on the statements about a run, from its saved steps, before adjustment.

    ``lacking`` is the reason why some saved steps have no moment.
    """
    reason = lacking or f"takes three saved steps, got {len(moments)}"
    findings = []
    for statement in RUN_STATEMENTS:
        if objective not in statement.objectives:
            findings.append(not_tested(statement, NOT_FOR[objective]))
        elif len(moments) < 3:
            findings.append(not_tested(statement, reason))
        else:
            findings.append(decide(statement, statement.measure(moments)))
    return findings


def over_steps(states: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Join the findings on several saved steps of a run: one finding for each statement.

    The units are still the batches, which are equal for all steps: a unit's value is the mean over
    the steps.
    """

    def join(samples: Sequence[Sample]) -> Sample:
        return replace(samples[0], values=_mean([s.values for s in samples]), details={})

    return _together(states, join)


def over_seeds(runs: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Join the findings on several runs: one finding for each statement, with runs as units."""

    def join(samples: Sequence[Sample]) -> Sample:
        return Sample(np.array([_mean(s.values) for s in samples]), "seeds", samples[0].layers)

    return _together(runs, join)


def _together(
    several: Sequence[Sequence[Finding]], join: Callable[[Sequence[Sample]], Sample]
) -> list[Finding]:
    findings = []
    for same in zip(*several, strict=True):
        statement = same[0].statement
        samples = [finding.sample for finding in same if finding.sample is not None]
        if statement.needs in ("nothing", "text") or len(samples) < len(same):
            # Measured on the common text, or not tested on one of the runs.
            findings.append(min(same, key=lambda finding: finding.sample is not None))
        elif len({sample.values.shape[1:] for sample in samples}) > 1:
            findings.append(not_tested(statement, "the models have different numbers of layers"))
        else:
            findings.append(decide(statement, join(samples)))
    return adjusted_together(findings)


def _mean(values: Any) -> np.ndarray:
    """Return the mean of finite values over the first axis; NaN without finite values."""
    mean: np.ndarray = np.ma.masked_invalid(values).mean(axis=0).filled(np.nan)
    return mean


def study(
    refs: Sequence[str],
    corpus: Corpus,
    *,
    layers: Collection[int] | None = None,
    on_progress: OnProgress | None = None,
    on_note: Callable[[str], None] | None = None,
    **options: Any,
) -> list[StudyReport]:
    """Test all statements on one model, or on several models of different seeds, on one text.

    Parameters
    ----------
    refs, corpus, options
        The models, the text, and options for reading the text: as for
        `wqk_lab.theory.opening.open_subjects`.
    layers, on_progress
        Numbers of the layers to measure, None for all; and a function as for `measure`.
    on_note
        Called before a model is measured, with shorter blocks and missing tensors as one line.

    Returns
    -------
    list of StudyReport
        A report on each model and saved step; after the reports of a run, a report on all its
        steps; and last, if there are several models, a report on all models.

    Raises
    ------
    CheckpointError
        A model lacks a chosen layer.
    TheoryError
        The models have different objectives.
    WqkError
        As for `open_subjects`.
    """
    runs = [_study_one(ref, corpus, layers, on_progress, on_note, options) for ref in refs]
    if len({states[0].objective for states in runs}) > 1:
        raise TheoryError(
            "models that predict different things cannot be evaluated together; "
            "name only masked or only causal ones"
        )
    reports = list(chain.from_iterable(runs))
    if len(runs) == 1:
        return reports
    together = over_seeds([states[-1].findings for states in runs])
    names = ", ".join(states[-1].model for states in runs)
    joined = replace(
        reports[-1],
        model=f"together: {names}",
        findings=tuple(together),
        is_fresh=all(report.is_fresh for report in reports),
    )
    return [*reports, joined]


def _reporting_batches(on_progress: OnProgress | None) -> Callable[[int, int], None] | None:
    """Return a function that reports the progress of gradients over batches."""
    if on_progress is None:
        return None
    return partial(on_progress, "gradients of batches")


def _lack(evidence: Evidence) -> str:
    """Return a note on missing tensors of a checkpoint, and on statements that need them."""
    subject = evidence.subject
    if not subject.missing:
        return ""
    possible = [s for s in STATEMENTS if subject.objective in s.objectives]
    untested = sum(bool(obstacle(statement, evidence)) for statement in possible)
    return (
        f"the checkpoint lacks {counted(len(subject.missing), 'tensor')}, and "
        f"{untested} of {counted(len(possible), 'statement')} need them and are not tested"
    )


def _study_one(
    ref: str,
    corpus: Corpus,
    layers: Collection[int] | None,
    on_progress: OnProgress | None,
    on_note: Callable[[str], None] | None,
    options: Mapping[str, Any],
) -> list[StudyReport]:
    """Return a report on each state of a model; with several states, also a joint report."""
    text, subjects = open_subjects(ref, corpus, **options)
    reports: list[StudyReport] = []
    moments: list[Moment] = []
    lacking = ""
    for subject in subjects:
        evidence = Evidence(subject, text, layers, _reporting_batches(on_progress))
        note = "; ".join(filter(None, (subject.shortened, _lack(evidence))))
        if note and on_note:
            on_note(f"{subject.name}: {note}{demo_advice(ref) if subject.missing else ''}")
        reports.append(report(subject, text, measure(evidence, on_progress)))
        if options.get("steps") is not None and not subject.missing:
            try:
                moments.append(optimizer.moment(evidence))
            except WqkError as error:
                lacking = str(error)
    if len(reports) == 1:
        return reports
    last = reports[-1]
    findings = [
        *over_steps([r.findings for r in reports]),
        *follow(moments, last.objective, lacking),
    ]
    name = f"{last.model.rpartition(', step ')[0]}, {len(reports)} saved steps"
    return [*reports, replace(last, model=name, findings=tuple(adjusted_together(findings)))]
