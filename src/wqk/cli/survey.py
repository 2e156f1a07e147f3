"""``wqk survey``: many checkpoints, resumable, on processes or a cluster."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk._console import counted, display_name, size
from wqk.cli.options import (
    COUNT,
    PATH,
    REF,
    csv_output,
    every_head,
    gamma,
    json_output,
    picture_file,
)

if TYPE_CHECKING:
    from wqk.scanning.surveys import SurveyProgress
    from wqk.scanning.surveys.planning import SurveyPlan
    from wqk.tables.score_table import ScoreTable

# Number of printed failures; the manifest contains all.
MOST_FAILURES = 20
# Number of refs whose size a dry run prints; JSON contains all.
MOST_REFS = 20


@click.command()
@click.argument("refs", nargs=-1, metavar="SET|REF...", type=REF)
@click.option(
    "--revision",
    "revisions",
    multiple=True,
    metavar="R",
    help="Hub revision, or a pattern of revisions or steps such as 'step*'; repeatable.",
)
@click.option(
    "--jobs",
    type=COUNT,
    metavar="N",
    help="Number of processes.  [default: one per core, at most 8]",
)
@click.option("--dask", metavar="ADDRESS", help="Scheduler of a Dask cluster: tcp://host:8786.")
@click.option(
    "--retry",
    is_flag=True,
    help="Retry checkpoints that failed before; local ones with new or changed files are retried "
    "without it.",
)
@every_head
@gamma
@json_output
@csv_output
@picture_file("Draw a box for each model")
@click.option(
    "-o",
    "--out",
    type=PATH,
    metavar="DIR",
    help="Folder of the survey; an interrupted one resumes. With FILE.csv or another table's "
    "ending, the folder FILE (FILE.csv.survey if FILE is something else), and the table as this "
    "file.",
)
@click.option("--dry-run", is_flag=True, help="List what would be read, and read nothing.")
@click.pass_context
def survey(
    context: click.Context,
    /,
    refs: tuple[str, ...],
    jobs: int | None,
    dask: str | None,
    as_json: bool,
    as_csv: bool,
    picture: Path | None,
    out: Path | None,
    dry_run: bool,
    **options: Any,
) -> None:
    """Score many checkpoints into one table, DIR/scores.parquet.

    DIR also gets the medians of each model, under short names: summary.csv, summary.md and
    summary.tex.

    REF is a folder, a file, a Hub id, a training run's folder, @FILE for a list with one REF per
    line, or a named set: paper:language, paper:vision, paper:audio, paper:encoder-decoder. After an
    interruption, the same command resumes. Exit status 1: some checkpoints failed.

    \b
    Examples:
      wqk survey paper:language --out survey --picture boxes.pdf
      wqk survey @models.txt --out survey
      wqk survey EleutherAI/pythia-160m --revision 'step*' --out pythia
      wqk survey ./run --revision 'checkpoint-*000' --out run-scores
      wqk survey paper:vision --dry-run
    """
    if not refs:
        raise click.UsageError(
            "Missing argument 'SET|REF...': what to survey; an earlier survey goes on with the "
            "names that it had"
        )
    from wqk.cli import display
    from wqk.cli.signals import signals_as_exceptions

    ending = display.require_one_output(as_csv, None, as_json)
    if dry_run:
        _list(refs, options["revisions"], jobs, as_json)
        return
    if out is None:
        raise click.UsageError("a survey needs --out DIR, the folder that it is kept in")
    from wqk._style import check_picture, save_figure
    from wqk.scanning.surveys import dask_executor
    from wqk.scanning.surveys import survey as survey_checkpoints

    if jobs and dask:
        raise click.UsageError(
            "--jobs sets the number of local processes; with --dask, leave it out"
        )
    if picture:
        check_picture(picture)
    out, table_file = display.folder_and_file(out)
    failed_before: set[str] = set()
    with display.bar("survey", survey_progress) as show_progress:

        def on_progress(done: SurveyProgress) -> None:
            failed_before.update(done.failed_before)
            if done.now == 0 and done.done:  # the first call, before anything is scored
                display.say(f"scored before: {counted(done.done, 'checkpoint')}")
            if show_progress:
                show_progress(done)

        try:
            with (
                signals_as_exceptions(),
                dask_executor(dask) if dask else nullcontext() as executor,
            ):
                table = survey_checkpoints(
                    refs, out=out, executor=executor, jobs=jobs, on_progress=on_progress, **options
                )
        except KeyboardInterrupt as interrupt:
            interrupt.args = (f"repeat the command to resume in {out}",)
            raise
    _print(table, out, as_json, ending, failed_before)
    if table_file:
        table.write(table_file)
        display.say(f"{table_file}: {counted(len(table), 'row')}")
    if picture and len(table):
        save_figure(table.plot("models"), picture)
        display.say(f"picture: {picture}")
    context.exit(1 if table.metadata["failed"] else 0)


def _list(
    refs: tuple[str, ...], revisions: tuple[str, ...], jobs: int | None, as_json: bool
) -> None:
    """Print the checkpoints of a survey, the bytes to read, and an estimate of time."""
    from wqk.cli import display
    from wqk.scanning.surveys.planning import plan_survey

    plan = plan_survey(refs, revisions)
    titles = [checkpoint.title for checkpoint in plan.checkpoints]
    seconds = plan.seconds(jobs)
    if as_json:
        sizes = [checkpoint.bytes_to_read for checkpoint in plan.checkpoints]
        value = {
            "checkpoints": titles,
            "bytes_to_read": sizes,
            "refs": [asdict(ref) for ref in plan.refs],
            "seconds": round(seconds, 1),
        }
        display.print_object(value)
        return
    names = map(display_name, titles)
    display.output().print(*names, sep="\n", markup=False, soft_wrap=True)
    for checkpoint in plan.checkpoints:
        if checkpoint.problem:
            reason = checkpoint.problem.removeprefix(f"{checkpoint.title}: ")
            display.say(f"would fail: {checkpoint.title}: {reason}")
    for line in _sizes(plan):
        display.say(line)
    display.say(_planned(plan, seconds))


def _sizes(plan: SurveyPlan) -> Iterator[str]:
    """Yield a line with the size of each ref of known size, if there are several refs."""
    if len(plan.refs) < 2:
        return
    refs = [ref for ref in plan.refs if ref.bytes_to_read is not None]
    for ref in refs[:MOST_REFS]:
        steps = f" ({ref.checkpoints} checkpoints)" if ref.checkpoints > 1 else ""
        yield f"{display_name(ref.ref)}: {size(ref.bytes_to_read or 0)} to read{steps}"
    if len(refs) > MOST_REFS:
        bytes_to_read = sum(ref.bytes_to_read or 0 for ref in refs[MOST_REFS:])
        yield f"and {len(refs) - MOST_REFS} more: {size(bytes_to_read)} to read"


def _planned(plan: SurveyPlan, seconds: float) -> str:
    """Return the number of checkpoints of a plan, the bytes, and the time, as one line."""
    line = counted(len(plan.checkpoints), "checkpoint")
    if plan.unknown < len(plan.checkpoints):
        line += f"; {size(plan.bytes_to_read)} to read, about {duration(seconds)} on this machine"
    remote = sum(not each.problem and each.bytes_to_read is None for each in plan.checkpoints)
    if remote:
        line += f"; the size of {remote} that are not on this machine is not known"
    return line


def duration(seconds: float) -> str:
    """Format a duration in one unit.

    Examples
    --------
    >>> duration(2.4), duration(400), duration(9000)
    ('2 seconds', '7 minutes', '2.5 hours')
    """
    if seconds < 100:
        return counted(max(1, round(seconds)), "second")
    if seconds < 6000:
        return counted(round(seconds / 60), "minute")
    return f"{seconds / 3600:.1f} hours"


def survey_progress(done: SurveyProgress) -> dict[str, Any]:
    """Return the fields of the bar: checkpoints, rates and failures.

    Examples
    --------
    >>> from wqk.scanning.surveys import SurveyProgress
    >>> done = SurveyProgress(jobs=20, done=9, failed=1, now=4, bytes_read=8_000_000, seconds=2.0)
    >>> survey_progress(done)["text"]
    '10/20 checkpoints, 2/s, 4 MB/s, 1 failed'
    """
    finished, seconds = done.done + done.failed, max(done.seconds, 1e-9)
    text = f"{finished}/{done.jobs} checkpoints"
    if done.now:
        text += f", {done.now / seconds:.3g}/s, {size(done.bytes_read / seconds)}/s"
    if done.failed:
        text += f", {done.failed} failed"
    return {"total": done.jobs, "completed": finished, "text": text}


def _print(
    table: ScoreTable, out: Path, as_json: bool, ending: str, failed_before: Collection[str]
) -> None:
    """Print the survey's results and failures, including failures of earlier runs."""
    from wqk.cli import display
    from wqk.tables.rendering import identical_models, overview

    failed, identical = table.metadata["failed"], table.metadata["identical"]
    if as_json:
        display.print_json(table)
    elif ending:
        display.print_table(table, ending)
    elif len(table):
        lines = overview(table, display.output().width)
        display.output().print(*display.from_top(lines), sep="\n")
    if identical and (as_json or ending):  # the overview has this note
        display.say(identical_models(identical))
    for line in failed[:MOST_FAILURES]:
        title = line["checkpoint"]
        reason = line["reason"].removeprefix(f"{title}: ")  # most reasons begin with the name
        if line["revision"]:
            title += f" @ {line['revision']}"
        outcome = "failed before" if title in failed_before else "failed"
        display.say(f"{outcome}: {title}: {reason}")
    if len(failed) > MOST_FAILURES:
        display.say(f"and {len(failed) - MOST_FAILURES} more failures, in manifest.jsonl")
    done = table.frame.select("checkpoint", "revision").unique().height
    content = f"{counted(len(table), 'row')} of {counted(done, 'checkpoint')}"
    if failed:
        content += f"; {len(failed)} failed, --retry tries them again"
    display.say(f"{out / 'scores.parquet'}: {content}")
