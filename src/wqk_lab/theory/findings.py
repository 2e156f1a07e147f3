"""Findings about one model, or about several states of a model, and their files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._console import counted, json_value, without_formulas
from wqk._files import check_output, write_atomically
from wqk.tables.sheet import Sheet
from wqk_lab.theory.subject import ObjectiveName, Subject
from wqk_lab.theory.verdict import VERDICTS, Finding, StatementVerdict, times

if TYPE_CHECKING:
    from wqk_lab.theory.text import Text

# The columns of a Markdown table; a CSV file has those of `line`.
MARKDOWN_COLUMNS = (
    "verdict",
    "number",
    "says",
    "estimate",
    "prediction",
    "layers",
    "why",
    "assumes",
    "quantity",
)


@dataclass(frozen=True)
class StudyReport:
    """Findings about one state of one model, or about several states together.

    Attributes
    ----------
    model, text
        Name of the model with its step, or names of all joined models; and name of the text.
    objective, mask_share
        ``masked``, ``each`` or ``causal``; the fraction of masked tokens, None unless ``masked``.
    batches, batch, block
        Number of batches, blocks in each, tokens in a block.
    seed
        Seed of blocks, masks and simulations.
    caveat
        A reason to doubt every finding; else empty.
    missing
        Number of tensors that the checkpoint lacks.
    findings
        Findings in the order of the paper.
    is_fresh
        True if all weights were freshly drawn, with ``seed``.
    """

    model: str
    text: str
    objective: ObjectiveName
    batches: int
    batch: int
    block: int
    mask_share: float | None
    seed: int
    caveat: str
    missing: int
    findings: tuple[Finding, ...]
    is_fresh: bool = False

    @property
    def title(self) -> str:
        """The model, its objective, and the text, in one line."""
        weights = f" (weights freshly drawn with seed {self.seed})" if self.is_fresh else ""
        masks = "" if self.mask_share is None else f", {self.mask_share:.0%} masked"
        read = f"{self.batches} × {self.batch} blocks of {self.block} tokens of {self.text}"
        return f"{self.model}{weights}: {self.objective}{masks}; {read}"

    @property
    def tally(self) -> dict[StatementVerdict, int]:
        """Number of findings about the model or its text, by verdict."""
        counted = Counter(f.verdict for f in self.findings if f.statement.about_model)
        return {verdict: counted[verdict] for verdict in VERDICTS}

    @property
    def notes(self) -> list[str]:
        """Reasons to doubt the findings."""
        lacks = f"the checkpoint lacks {self.missing} tensors; statements on them are not tested"
        notes = [self.caveat] if self.caveat else []
        return [*notes, lacks] if self.missing else notes


def report(subject: Subject, text: Text, findings: Sequence[Finding]) -> StudyReport:
    """Make a report of the findings on a subject and a text."""
    batches, batch, block = subject.blocks.shape
    name = subject.name if subject.step is None else f"{subject.name}, step {subject.step}"
    return StudyReport(
        model=name,
        text=text.name,
        objective=subject.objective,
        batches=batches,
        batch=batch,
        block=block,
        mask_share=subject.mask_share if subject.objective == "masked" else None,
        seed=subject.seed,
        caveat=subject.caveat,
        missing=len(subject.missing),
        findings=tuple(findings),
        is_fresh=subject.is_fresh,
    )


def line(finding: Finding) -> dict[str, Any]:
    """Return a finding as a row of a table."""
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
MOST_NAMED = 3


def result(report: StudyReport) -> str:
    """Summarize the findings about the model in one sentence.

    Examples
    --------
    >>> from wqk_lab.theory.studying import STATEMENTS
    >>> from wqk_lab.theory.verdict import Finding, not_tested
    >>> a, b, c, *_ = (s for s in STATEMENTS if s.about_model)
    >>> def found(*findings):
    ...     return result(StudyReport("m", "t", "causal", 8, 8, 64, None, 0, "", 0, findings))
    >>> holds, undecided = Finding(a, "holds"), Finding(b, "undecided")
    >>> found(holds, undecided, not_tested(c, "no way"))
    'Of 2 statements tested on m, 1 holds, none fails and 1 is undecided.'
    >>> failing = Finding(a, "fails"), Finding(b, "fails")
    >>> found(*failing).partition(". Failing: ")[0]
    'Of 2 statements tested on m, none holds, 2 fail and none is undecided'
    >>> found(not_tested(a, "no way"))
    'None of the statements could be tested on m.'
    """
    tally = report.tally
    tested = sum(tally[verdict] for verdict in ("holds", "fails", "undecided"))
    if not tested:
        untested = tally["described"] + tally["identity"]
        remark = f"; {counted(untested, 'other')} described or identities" if untested else ""
        return f"None of the statements could be tested on {report.model}{remark}."

    def with_count(verdict: StatementVerdict, singular: str, plural: str) -> str:
        count = tally[verdict]
        return f"{count or 'none'} {plural if count > 1 else singular}"

    failing = dict.fromkeys(
        f"{f.statement.number} ({f.statement.says})"
        for f in report.findings
        if f.verdict == "fails" and f.statement.about_model
    )
    sentence = (
        f"Of {counted(tested, 'statement')} tested on {report.model}, "
        f"{with_count('holds', 'holds', 'hold')}, {with_count('fails', 'fails', 'fail')} and "
        f"{with_count('undecided', 'is undecided', 'are undecided')}"
    )
    if report.caveat:
        sentence += f", if the reservation above does not matter ({report.caveat})"
    if failing:
        listed = "; ".join([*failing][:MOST_NAMED])
        sentence += f". Failing: {listed}"
    if len(failing) > MOST_NAMED:
        sentence += f"; and {len(failing) - MOST_NAMED} more"
    return f"{sentence}."


def save(reports: Sequence[StudyReport], path: Path) -> None:
    """Write reports: .json with all numbers, .md and .csv with a line for each finding.

    Raises
    ------
    OutputError
        The ending of the name is unknown, or the file cannot be written.
    """
    check_output(path, FINDINGS, FINDINGS_WRITERS)
    write_atomically(path, FINDINGS_WRITERS[path.suffix](reports).encode())


def as_objects(reports: Sequence[StudyReport]) -> dict[str, Any]:
    """Return reports as JSON objects, with every measurement."""

    def numbers(finding: Finding) -> dict[str, Any]:
        return line(finding) | {
            "estimate": finding.estimate and vars(finding.estimate),
            "layers": finding.layers and vars(finding.layers),
            "numbers": finding.sample.rows() if finding.sample else [],
        }

    objects = []
    for model_report in reports:
        findings = [numbers(finding) for finding in model_report.findings]
        objects.append(vars(model_report) | {"tally": model_report.tally, "findings": findings})
    return {"reports": objects}


def _json(reports: Sequence[StudyReport]) -> str:
    objects = json_value(as_objects(reports))
    return json.dumps(objects, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _markdown(reports: Sequence[StudyReport]) -> str:
    lines = []
    for model_report in reports:
        lines += [f"## {model_report.title}", ""]
        if model_report.notes:
            lines += [*(f"- {note}" for note in model_report.notes), ""]
        lines += [
            ", ".join(times(count, verdict) for verdict, count in model_report.tally.items()),
            "",
        ]
        sheet = Sheet.of(*MARKDOWN_COLUMNS, text=MARKDOWN_COLUMNS)
        for finding in model_report.findings:
            cells = line(finding)
            sheet.add(*(" ".join(cells[name].split()) for name in MARKDOWN_COLUMNS))
        lines.append(sheet.markdown())
    return "\n".join(lines)


def _csv(reports: Sequence[StudyReport]) -> str:
    rows = []
    for model_report in reports:
        names = ("model", "text", "objective", "caveat")
        shared = {name: getattr(model_report, name) for name in names}
        rows += [shared | line(finding) for finding in model_report.findings]
    return without_formulas(pl.DataFrame(rows)).write_csv()


FINDINGS = "a set of findings"
FINDINGS_WRITERS: Mapping[str, Callable[[Sequence[StudyReport]], str]] = {
    ".json": _json,
    ".md": _markdown,
    ".csv": _csv,
}
