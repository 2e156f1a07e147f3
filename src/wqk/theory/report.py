"""Findings about one model, or several states of one, and the files they are written to."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from wqk._files import write_whole
from wqk.errors import TheoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from wqk.theory.finding import Finding
    from wqk.theory.subject import Subject
    from wqk.theory.text import Text

COLUMNS = ("statement", "assumption", "prediction", "observation", "verdict")


@dataclass(frozen=True)
class Report:
    """What was found about one state of one model.

    Attributes
    ----------
    model, step
        Its name, and its step where it is from a training run.
    text
        Name of the text.
    objective
        ``masked`` or ``causal``.
    batches, batch, block
        How much was read: batches, blocks in each, tokens in a block.
    mask_share
        Share of tokens masked; None where every token is predicted.
    seed
        Of blocks, masks and simulations.
    notes
        What one should know before believing the numbers.
    findings
        In the order of the paper.
    """

    model: str
    step: int | None
    text: str
    objective: str
    batches: int
    batch: int
    block: int
    mask_share: float | None
    seed: int
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]

    def numbers(self, statement: str) -> list[dict[str, Any]]:
        """What one statement's verdict rests on; nothing where it was not tested.

        Examples
        --------
        >>> report = Report("m", None, "t", "causal", 1, 1, 8, None, 0, (), ())
        >>> report.numbers("Lemma S1.11")
        []
        """
        found = (f.numbers for f in self.findings if f.statement == statement)
        return [dict(row) for row in next(found, ())]

    def with_also(self, findings: Sequence[Finding]) -> Report:
        """The same with more findings at its end."""
        return replace(self, findings=(*self.findings, *findings))


def report(subject: Subject, text: Text, findings: Sequence[Finding]) -> Report:
    """Findings with what they are about."""
    batches, batch, block = subject.blocks.shape
    return Report(
        model=subject.name,
        step=subject.step,
        text=text.name,
        objective=subject.objective,
        batches=batches,
        batch=batch,
        block=block,
        mask_share=subject.mask_share if subject.objective == "masked" else None,
        seed=subject.seed,
        notes=subject.notes,
        findings=tuple(findings),
    )


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
    """Write reports whole: .json with all numbers, .md and .csv with a line for each statement."""
    check_ending(path, WRITERS)
    write_whole(path, WRITERS[path.suffix](reports).encode())


def as_objects(reports: Sequence[Report]) -> dict[str, Any]:
    """Reports as JSON holds them."""
    return {"reports": [_without_nan(asdict(report)) for report in reports]}


def _json(reports: Sequence[Report]) -> str:
    return json.dumps(as_objects(reports), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def _markdown(reports: Sequence[Report]) -> str:
    lines = []
    for one in reports:
        lines += [f"## {title(one)}", ""]
        lines += [f"- {note}" for note in one.notes] + [""] * bool(one.notes)
        lines += [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for finding in one.findings:
            cells = (_cell(getattr(finding, column)) for column in COLUMNS)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _csv(reports: Sequence[Report]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(("model", "step", "text", "objective", *COLUMNS))
    for one in reports:
        about = (one.model, one.step, one.text, one.objective)
        for finding in one.findings:
            writer.writerow((*about, *(getattr(finding, column) for column in COLUMNS)))
    return buffer.getvalue()


def title(report: Report) -> str:
    """The model, its step, what it predicts, and what it read, in a line."""
    step = "" if report.step is None else f", step {report.step}"
    masks = "" if report.mask_share is None else f", {report.mask_share:.0%} masked"
    read = f"{report.batches} × {report.batch} blocks of {report.block} tokens of {report.text}"
    return f"{report.model}{step}: {report.objective}{masks}; {read}"


def _without_nan(value: Any) -> Any:
    """NaN and infinities as null, which JSON has a word for."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


WRITERS: dict[str, Callable[[Sequence[Report]], str]] = {
    ".json": _json,
    ".md": _markdown,
    ".csv": _csv,
}
