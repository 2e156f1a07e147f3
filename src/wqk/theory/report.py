"""Findings about one model, or several states of one, and the files they are written to."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wqk._files import write_whole
from wqk.errors import TheoryError
from wqk.theory.verdict import VERDICTS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from wqk.theory.subject import Objective, Subject
    from wqk.theory.text import Text
    from wqk.theory.verdict import Finding

# What a line holds; the first four are what the command prints.
COLUMNS = ("verdict", "number", "says", "estimate", "prediction", "layers", "why")
DETAILS = (*COLUMNS, "assumes", "quantity", "over", "matters", "p")


@dataclass(frozen=True)
class Report:
    """What was found about one state of one model, or about several together.

    Attributes
    ----------
    model
        Its name, and its step if it is from a training run; or what was taken together.
    text
        Name of the text.
    objective
        ``masked``, ``each`` or ``causal``.
    batches, batch, block
        How much was read: batches, blocks in each, tokens in a block.
    mask_share
        Share of tokens masked; None where all tokens are predicted.
    seed
        Of blocks, masks and simulations.
    caveat
        A reason to doubt every finding; empty where there is none.
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
        """The model, what it predicts, and what it read, in a line."""
        masks = "" if self.mask_share is None else f", {self.mask_share:.0%} masked"
        read = f"{self.batches} × {self.batch} blocks of {self.block} tokens of {self.text}"
        return f"{self.model}: {self.objective}{masks}; {read}"

    @property
    def tally(self) -> dict[str, int]:
        """How many findings have each verdict."""
        counted = Counter(finding.verdict for finding in self.findings)
        return {verdict: counted[verdict] for verdict in VERDICTS}

    @property
    def notes(self) -> list[str]:
        """What one should know before believing a finding."""
        lacks = (
            f"{self.missing} tensors are not in the checkpoint; what rests on them is not tested"
        )
        return [self.caveat] * bool(self.caveat) + [lacks] * bool(self.missing)


def report(subject: Subject, text: Text, findings: Sequence[Finding]) -> Report:
    """Findings with what they are about."""
    batches, batch, block = subject.blocks.shape
    return Report(
        model=subject.name + ("" if subject.step is None else f", step {subject.step}"),
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
    )


def line(finding: Finding) -> dict[str, Any]:
    """All there is to say about a finding in a row of a table."""
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


def check_ending(path: Path, endings: Collection[str]) -> None:
    """See that a file can be written under a name, before minutes are spent on it.

    Raises
    ------
    TheoryError
        The name has none of the endings, or its folder does not exist.
    """
    if path.suffix not in endings:
        raise TheoryError(f"{path}: expected {', '.join(endings)}, got {path.suffix!r}")
    if not path.parent.is_dir():
        raise TheoryError(f"{path}: there is no folder {path.parent}; make it first")


def save(reports: Sequence[Report], path: Path) -> None:
    """Write reports: .json with all numbers, .md and .csv with a line for each finding."""
    check_ending(path, WRITERS)
    write_whole(path, WRITERS[path.suffix](reports).encode())


def as_objects(reports: Sequence[Report]) -> dict[str, Any]:
    """Reports as JSON holds them."""
    return {"reports": [_as_object(report) for report in reports]}


def _as_object(report: Report) -> dict[str, Any]:
    about = {name: value for name, value in vars(report).items() if name != "findings"}
    findings = [
        line(finding)
        | {
            "estimate": finding.estimate and vars(finding.estimate),
            "layers": finding.layers and vars(finding.layers),
            "numbers": finding.sample.rows() if finding.sample else [],
        }
        for finding in report.findings
    ]
    whole: dict[str, Any] = _finite(about | {"tally": report.tally, "findings": findings})
    return whole


def _json(reports: Sequence[Report]) -> str:
    return json.dumps(as_objects(reports), ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def _markdown(reports: Sequence[Report]) -> str:
    lines = []
    for one in reports:
        lines += [f"## {one.title}", ""]
        lines += [f"- {note}" for note in one.notes] + [""] * bool(one.notes)
        lines += [", ".join(f"{count} {verdict}" for verdict, count in one.tally.items()), ""]
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for finding in one.findings:
            cells = line(finding)
            lines.append(f"| {' | '.join(_cell(cells[column]) for column in COLUMNS)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _csv(reports: Sequence[Report]) -> str:
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, ("model", "text", "objective", "caveat", *DETAILS))
    writer.writeheader()
    for one in reports:
        about = {name: getattr(one, name) for name in ("model", "text", "objective", "caveat")}
        writer.writerows(about | line(finding) for finding in one.findings)
    return buffer.getvalue()


def _finite(value: Any) -> Any:
    """NaN and infinities as null, which JSON has a word for."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


WRITERS: Mapping[str, Callable[[Sequence[Report]], str]] = {
    ".json": _json,
    ".md": _markdown,
    ".csv": _csv,
}
