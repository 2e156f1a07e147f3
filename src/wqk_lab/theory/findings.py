"""Findings about one model, or several states of one, and the files they are written to."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._console import counted, json_value
from wqk._files import check_output, write_atomically
from wqk.tables.sheet import Sheet
from wqk.tables.writers import without_formulas
from wqk_lab.theory.subject import Objective, Subject
from wqk_lab.theory.verdict import VERDICTS, Finding, Verdict

if TYPE_CHECKING:
    from wqk_lab.theory.text import Text

# The columns of a Markdown table; a CSV file has those of `line`.
COLUMNS = ("verdict", "number", "says", "estimate", "prediction", "layers", "why")


@dataclass(frozen=True)
class Report:
    """What was found about one state of one model, or about several together.

    Attributes
    ----------
    model, text
        Their names; the model's with its step, or all models that were evaluated together.
    objective, mask_share
        ``masked``, ``each`` or ``causal``; the fraction of masked tokens, None unless ``masked``.
    batches, batch, block
        Number of batches, blocks in each, tokens in a block.
    seed
        Of blocks, masks and simulations.
    caveat
        A reason to doubt every finding; empty if there is none.
    missing
        How many tensors the checkpoint lacks.
    findings
        In the order of the paper.
    """

    model: str
    text: str
    objective: Objective
    batches: int
    batch: int
    block: int
    mask_share: float | None
    seed: int
    caveat: str
    missing: int
    findings: tuple[Finding, ...]

    @property
    def title(self) -> str:
        """The model, what it predicts, and what it read, in one line."""
        masks = "" if self.mask_share is None else f", {self.mask_share:.0%} masked"
        read = f"{self.batches} × {self.batch} blocks of {self.block} tokens of {self.text}"
        return f"{self.model}: {self.objective}{masks}; {read}"

    @property
    def tally(self) -> dict[str, int]:
        """The number of findings about the model, or its text, with each verdict."""
        counted = Counter(f.verdict for f in self.findings if f.statement.about_model)
        return {verdict: counted[verdict] for verdict in VERDICTS}

    @property
    def notes(self) -> list[str]:
        """What to know before trusting a finding."""
        lacks = f"the checkpoint lacks {self.missing} tensors; statements on them are not tested"
        return [self.caveat] * bool(self.caveat) + [lacks] * bool(self.missing)


def report(subject: Subject, text: Text, findings: Sequence[Finding]) -> Report:
    """Findings on a subject and a text, as a report."""
    batches, batch, block = subject.blocks.shape
    return Report(
        subject.name + ("" if subject.step is None else f", step {subject.step}"),
        text.name,
        subject.objective,
        batches,
        batch,
        block,
        mask_share=subject.mask_share if subject.objective == "masked" else None,
        seed=subject.seed,
        caveat=subject.caveat,
        missing=len(subject.missing),
        findings=tuple(findings),
    )


def line(finding: Finding) -> dict[str, Any]:
    """A finding as a row of a table."""
    statement, estimate = finding.statement, finding.estimate
    return {
        "verdict": finding.verdict,
        "number": statement.number,
        "says": statement.says,
        "estimate": "" if estimate is None else str(estimate),
        "prediction": statement.prediction,
        "layers": "" if finding.layers is None else str(finding.layers),
        "why": finding.why,
        "assumes": statement.assumes,
        "quantity": statement.quantity,
        "over": "" if estimate is None else estimate.over,
        "matters": statement.matters,
        "p": finding.p,
    }


# Statements named in a result, at most.
NAMED = 3


def result(report: Report) -> str:
    """What was found about the model, in one sentence.

    Examples
    --------
    >>> from wqk_lab.theory.studying import STATEMENTS
    >>> from wqk_lab.theory.verdict import Finding, not_tested
    >>> a, b, c, *_ = (s for s in STATEMENTS if s.about_model)
    >>> def found(*findings):
    ...     return result(Report("m", "t", "causal", 8, 8, 64, None, 0, "", 0, findings))
    >>> found(Finding(a, "holds"), Finding(b, "undecided"), not_tested(c, "no way"))
    'Of 2 statements tested on m, 1 holds, none fails and 1 is undecided.'
    >>> found(Finding(a, "fails"), Finding(b, "fails")).partition(". Failing: ")[0]
    'Of 2 statements tested on m, none holds, 2 fail and none is undecided'
    >>> found(not_tested(a, "no way"))
    'None of the statements could be tested on m.'
    """
    tally = report.tally
    tested = sum(tally[verdict] for verdict in ("holds", "fails", "undecided"))
    if not tested:
        others = tally["described"] + tally["identity"]
        beside = f"; {counted(others, 'other')} described or identities" if others else ""
        return f"None of the statements could be tested on {report.model}{beside}."

    def said(verdict: Verdict, one: str, several: str) -> str:
        count = tally[verdict]
        return f"{count or 'none'} {several if count > 1 else one}"

    failing = dict.fromkeys(
        f"{f.statement.number} ({f.statement.says})"
        for f in report.findings
        if f.verdict == "fails" and f.statement.about_model
    )
    named = "; ".join([*failing][:NAMED]) + "; …" * (len(failing) > NAMED)
    doubt = f", if the reservation above does not matter ({report.caveat})" if report.caveat else ""
    return (
        f"Of {counted(tested, 'statement')} tested on {report.model}, "
        f"{said('holds', 'holds', 'hold')}, {said('fails', 'fails', 'fail')} and "
        f"{said('undecided', 'is undecided', 'are undecided')}{doubt}"
        + (f". Failing: {named}." if failing else ".")
    )


def save(reports: Sequence[Report], path: Path) -> None:
    """Write reports: .json with all numbers, .md and .csv with a line for each finding.

    Raises
    ------
    OutputError
        The name has another ending, or the file cannot be written.
    """
    check_output(path, FINDINGS, WRITERS)
    write_atomically(path, WRITERS[path.suffix](reports).encode())


def as_objects(reports: Sequence[Report]) -> dict[str, Any]:
    """Reports as JSON objects, with every measurement."""

    def numbers(finding: Finding) -> dict[str, Any]:
        return line(finding) | {
            "estimate": finding.estimate and vars(finding.estimate),
            "layers": finding.layers and vars(finding.layers),
            "numbers": finding.sample.rows() if finding.sample else [],
        }

    return {
        "reports": [
            vars(one) | {"tally": one.tally, "findings": [numbers(f) for f in one.findings]}
            for one in reports
        ]
    }


def _json(reports: Sequence[Report]) -> str:
    objects = json_value(as_objects(reports))
    return json.dumps(objects, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _markdown(reports: Sequence[Report]) -> str:
    lines = []
    for one in reports:
        lines += [f"## {one.title}", ""]
        lines += [f"- {note}" for note in one.notes] + [""] * bool(one.notes)
        lines += [", ".join(f"{count} {verdict}" for verdict, count in one.tally.items()), ""]
        sheet = Sheet.of(*COLUMNS, text=COLUMNS)
        for finding in one.findings:
            cells = line(finding)
            sheet.add(*(" ".join(cells[name].split()) for name in COLUMNS))
        lines.append(sheet.markdown())
    return "\n".join(lines)


def _csv(reports: Sequence[Report]) -> str:
    rows = [
        {name: getattr(one, name) for name in ("model", "text", "objective", "caveat")}
        | line(finding)
        for one in reports
        for finding in one.findings
    ]
    return without_formulas(pl.DataFrame(rows)).write_csv()


FINDINGS = "a set of findings"
WRITERS: Mapping[str, Callable[[Sequence[Report]], str]] = {
    ".json": _json,
    ".md": _markdown,
    ".csv": _csv,
}
