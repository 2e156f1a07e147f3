"""``wqk lab theory``: the paper's statements on a model and a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from wqk.cli.options import COUNT, FILE, PATH, RANGES, REF, Number, json_output, revision
from wqk_lab.training.declared import documented

if TYPE_CHECKING:
    from wqk_lab.theory.findings import StudyReport
    from wqk_lab.theory.verdict import Finding, StatementVerdict

MARKS = {"holds": "✓", "fails": "✗", "undecided": "?", "described": "·"}
MARKS |= {"not tested": "–", "identity": "="}
STYLES = {"holds": "green", "fails": "red", "undecided": "yellow"}
STYLES |= dict.fromkeys(("described", "not tested", "identity"), "dim")

# Width in a pipe: every finding is one line for grep. Details have several lines.
IN_A_PIPE = 400

# Space around the details of a statement: above, right, below, left.
BLOCK_INDENT = (0, 0, 0, 4)

# Seconds between lines of progress in a pipe.
SECONDS_IN_A_PIPE = 30


def some_steps(text: str) -> tuple[int, ...]:
    """Parse the steps of a run: ``all``, which is the empty choice, or numbers and ranges."""
    return () if text == "all" else RANGES(text)


@documented
@click.command()
@click.argument("refs", metavar="REF...", nargs=-1, required=True, type=REF)
@click.option("--corpus", required=True, type=PATH, metavar="PATH")
@click.option("--batches", type=click.IntRange(min=2), default=8)
@click.option("--batch", type=COUNT, default=8)
@click.option(
    "--block",
    type=click.IntRange(min=4),
    show_default="64, or a run's own block or the model's positions if less",
)
@click.option("--objective", type=click.Choice(["masked", "each", "causal"]))
@click.option("--mask-share", type=Number(0, 1, min_open=True, max_open=True), default=0.15)
@click.option("--layers", type=RANGES, metavar="N,N:M")
@click.option("--steps", type=some_steps, metavar="all|N,N")
@click.option("--seed", default=0)
@revision
@click.option("-v", "--verbose", is_flag=True)
@click.option("-o", "--out", type=FILE)
@click.option("--figure", "--picture", "figure", type=FILE)
@json_output
def theory(
    refs: tuple[str, ...],
    corpus: Path,
    objective: Literal["masked", "each", "causal"] | None,
    layers: tuple[int, ...] | None,
    verbose: bool,
    out: Path | None,
    figure: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Test the paper's statements on a model and a text.

    REF is a checkpoint's folder or Hub id, a training run's folder, or, for freshly drawn weights,
    a config.json or a model type such as bert, with a token store as the text. Several that differ
    only in their seed are also evaluated together. Needs PyTorch and transformers (pip install
    '.[train]'). Time and memory grow with --batches and --batch: a small model takes a minute, and
    BERT-base several minutes on one core, with about 2 GB; --batch 4 halves the time.

    \b
    Examples:
      wqk lab theory google-bert/bert-base-uncased --corpus wikitext.txt
      wqk lab theory ./run --corpus ./corpus --steps all --out findings.json
      wqk lab theory ./seed-1 ./seed-2 ./seed-3 --corpus ./corpus -v

    Parameters
    ----------
    corpus
        Token store, text file, or token ids as .npy, (N,) or (B, N).
    batches
        How many batches.
    batch
        Blocks in a batch.
    block
        Tokens in a block.
    objective
        What the model predicts: some masked tokens, each token from all others (one masked at a
        time), or each next token.  [default: by its architecture]
    mask_share
        Fraction of masked tokens.
    layers
        Only these layers.
    steps
        Saved steps of a run.
    seed
        Seed of blocks, masks and fresh weights.
    verbose
        Show what each statement assumes and predicts.
    out
        Save the findings: .json (with all numbers), .md or .csv.
    figure
        Draw the updates' tails by layer: .png, .pdf or .svg.
    """
    from wqk._files import check_output
    from wqk._style import PICTURES, save_figure
    from wqk.cli import display
    from wqk_lab.figures.theory import tails
    from wqk_lab.theory.causes import curves
    from wqk_lab.theory.findings import FINDINGS, FINDINGS_WRITERS, as_objects, save
    from wqk_lab.theory.studying import study

    for path, kind, endings in ((out, FINDINGS, FINDINGS_WRITERS), (figure, "a picture", PICTURES)):
        if path:
            check_output(path, kind, endings)
    with display.bar("model", _progress, seconds=SECONDS_IN_A_PIPE) as on_progress:
        reports = study(
            refs,
            corpus,
            layers=layers,
            objective=objective,
            on_progress=on_progress,
            on_note=display.say,
            **options,
        )
    if as_json:
        display.print_object(as_objects(reports))
    else:
        if len(reports) > 1:
            _print_verdicts(reports)
        _print_findings(reports[-1], verbose)
    if out:
        save(reports, out)
        display.say(f"{out}: {sum(len(report.findings) for report in reports)} findings")
    if figure:
        save_figure(tails(curves(reports[-1].findings), reports[-1].model), figure)
        display.say(f"picture: {figure}")


def _progress(name: str, done: int, total: int) -> dict[str, Any]:
    """Return the fields of the bar: statement or batches, number done, and total."""
    return {"description": name, "completed": done, "total": total, "text": f"{done}/{total}"}


def _print_findings(report: StudyReport, verbose: bool) -> None:
    """Print the tally, a line for each finding, and the reasons of untested statements."""
    from rich.text import Text

    from wqk.cli import display
    from wqk.tables.sheet import Cell, Sheet, SheetColumn
    from wqk_lab.theory.findings import line, result
    from wqk_lab.theory.verdict import MEANINGS, VERDICTS, times

    console = display.output()
    is_for_grep = not (console.is_terminal or verbose)
    if is_for_grep:
        console.width = IN_A_PIPE
    console.print(Text(f"\n{report.title}", style="bold"), soft_wrap=True)
    tally = [Text(times(n, v), style=STYLES[v]) for v, n in report.tally.items() if n]
    console.print(Text(", ").join(tally), soft_wrap=True)
    if simulated := [f.verdict for f in report.findings if not f.statement.about_model]:
        shown = ", ".join(times(simulated.count(v), v) for v in dict.fromkeys(simulated))
        console.print(Text(f"not counted, about random matrices: {shown}", style="dim"))
    for note in report.notes:
        reservation = "a reservation for every verdict: " if note == report.caveat else "note: "
        console.print(Text(f"{reservation}{note}", style="yellow"), soft_wrap=True)
    if verbose:
        _print_blocks(report)
    table = Sheet([SheetColumn("", text=True) for _ in range(3)])
    untested: dict[str, list[str]] = {}
    for finding in report.findings:
        if verbose:
            continue
        cells = line(finding)
        if finding.verdict == "not tested":
            untested.setdefault(finding.why, []).append(finding.statement.number)
            continue
        verdict = Cell(finding.verdict, style=STYLES[finding.verdict])
        statement = f"{cells['number']}: {cells['says']}"
        table.add(verdict, statement, _facts(finding))
    if not verbose:
        console.print(table)
    for why, numbers in untested.items():
        note = f"not tested, {why}: {'; '.join(dict.fromkeys(numbers))}"
        console.print(Text(f" {note}", style=STYLES["not tested"]), soft_wrap=is_for_grep)
    console.print("")
    verdicts = {finding.verdict for finding in report.findings}
    for kind in VERDICTS:
        if kind in verdicts:
            meaning = Text(f"{kind}: {MEANINGS[kind]}", style="dim")
            console.print(meaning, soft_wrap=is_for_grep)
    console.print(Text(result(report)), soft_wrap=is_for_grep)


def _facts(finding: Finding) -> str:
    """Return the measured number with its prediction, the reason, and the layers of a finding."""
    from wqk_lab.theory.findings import line

    cells = line(finding)
    measured = f"{cells['estimate']} ({cells['prediction']})" if finding.estimate else ""
    layers = cells["layers"] if finding.verdict != "identity" else ""
    return "; ".join(filter(None, [measured, cells["why"], layers]))


def _print_blocks(report: StudyReport) -> None:
    """Print a block of lines for each finding, with the statement's assumptions."""
    from rich.padding import Padding
    from rich.text import Text

    from wqk.cli import display
    from wqk_lab.theory.findings import line

    console = display.output()
    for finding in report.findings:
        cells = line(finding)
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        console.print("")
        console.print(verdict.append(f"  {cells['number']}: {cells['says']}", style="none"))
        if facts := _facts(finding):
            console.print(Padding(Text(facts), BLOCK_INDENT))
        for label in ("quantity", "over", "assumes"):
            if cells[label]:
                detail = Text(f"{label}: {cells[label]}", style="dim")
                console.print(Padding(detail, BLOCK_INDENT))


def _print_verdicts(reports: Sequence[StudyReport]) -> None:
    """Print the verdicts, with statements down and models or steps across."""
    from rich.text import Text

    from wqk.cli import display
    from wqk.tables.sheet import Cell, Sheet

    console = display.output()
    for number, report in enumerate(reports, start=1):
        console.print(Text(f"{number}  {report.title}"))
    numbers = map(str, range(1, len(reports) + 1))
    table = Sheet.of("statement", *numbers, text=["statement"])
    verdicts_of_reports = list(map(_verdicts, reports))
    for key in verdicts_of_reports[-1]:
        cells = []
        for verdict_by_statement in verdicts_of_reports:
            verdict = verdict_by_statement.get(key, "not tested")
            cells.append(Cell(MARKS[verdict], style=STYLES[verdict]))
        table.add(": ".join(key), *cells)
    console.print(table)
    console.print(Text(", ".join(f"{MARKS[v]} {v}" for v in STYLES), style="dim"))


def _verdicts(report: StudyReport) -> dict[tuple[str, str], StatementVerdict]:
    """Return the verdict on each statement, by the statement's number and text."""
    verdict_by_statement = {}
    for finding in report.findings:
        statement = finding.statement
        verdict_by_statement[statement.number, statement.says] = finding.verdict
    return verdict_by_statement
