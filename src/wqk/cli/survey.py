"""``wqk survey``: many checkpoints, resumable, on processes or a cluster."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from wqk.cli.options import COUNT, PATH, REF, every_head, gamma, json_output


@click.command()
@click.argument("refs", nargs=-1, required=True, metavar="SET|REF...", type=REF)
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
@click.option("--retry", is_flag=True, help="Retry checkpoints that failed before.")
@every_head
@gamma
@json_output
@click.option(
    "--out",
    type=PATH,
    required=True,
    metavar="DIR",
    help="Folder of the survey; an interrupted one resumes.",
)
@click.pass_context
def survey(
    context: click.Context,
    /,
    refs: tuple[str, ...],
    jobs: int | None,
    dask: str | None,
    as_json: bool,
    out: Path,
    **options: Any,
) -> None:
    """Score many checkpoints into one table, DIR/scores.parquet.

    REF is a folder, a file, a Hub id, a training run's folder, @FILE for a list with one REF per
    line, or a named set: paper:language, paper:vision, paper:audio, paper:encoder-decoder. After an
    interruption, the same command resumes. Exit status 1: some checkpoints failed.

    \b
    Examples:
      wqk survey paper:language --out survey
      wqk survey EleutherAI/pythia-160m --revision 'step*' --out pythia
      wqk survey ./run --revision 'checkpoint-*000' --out run-scores
    """
    from wqk.cli import survey_display
    from wqk.scanning.surveys import dask_executor
    from wqk.scanning.surveys import survey as survey_checkpoints

    if jobs and dask:
        raise click.UsageError(
            "--jobs sets the number of local processes; with --dask, leave it out"
        )
    with survey_display.progress() as on_progress:
        try:
            with dask_executor(dask) if dask else nullcontext() as executor:
                table = survey_checkpoints(
                    refs, out=out, executor=executor, jobs=jobs, on_progress=on_progress, **options
                )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"repeat the command to resume in {out}") from None
    failed = survey_display.print_survey(table, out, as_json)
    context.exit(1 if failed else 0)
