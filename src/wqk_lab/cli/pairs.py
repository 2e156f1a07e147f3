"""``wqk lab pairs``: pairs of public models that differ in objective and mask."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from wqk._console import counted
from wqk.cli.options import COUNT, PATH, every_head, gamma, json_output
from wqk_lab.training.declared import documented


@documented
@click.command()
@click.option("--jobs", type=COUNT, metavar="N")
@click.option("--retry", is_flag=True)
@every_head
@gamma
@json_output
@click.option("-o", "--out", type=PATH, metavar="DIR")
@click.option("--dry-run", is_flag=True)
@click.pass_context
def pairs(
    context: click.Context, /, as_json: bool, out: Path | None, dry_run: bool, **options: Any
) -> None:
    """Score encoders next to decoders of one recipe, and decoders before and after conversion.

    Of a model that continues another, what the conversion changed is measured as well. Exit status
    1: some pairs could not be read. wqk lab figure pairs DIR draws the outcome.

    \b
    Examples:
      wqk lab pairs --dry-run
      wqk lab pairs --out pairs

    Parameters
    ----------
    jobs
        Number of processes.  [default: one per core, at most 8]
    retry
        Retry models and pairs that failed before.
    out
        Folder of the survey; an interrupted one resumes.
    dry_run
        List what would be read, and read nothing.
    """
    if dry_run:
        _list(as_json)
        return
    if out is None:
        raise click.UsageError("a survey needs --out DIR, the folder that it is kept in")
    from wqk.cli import display
    from wqk.cli.survey import survey_progress
    from wqk_lab.runs.pairs import survey_pairs

    try:
        with display.bar("pairs", survey_progress) as on_progress:
            outcome = survey_pairs(out, on_progress=on_progress, **options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"repeat the command to resume in {out}") from None
    if as_json:
        display.print_json(outcome.scores)
    for title, reason in outcome.problems.items():
        display.say(f"skipped: {title}: {reason}")
    read = len(outcome.pairs) - len(outcome.problems)
    display.say(
        f"{out}: {read} of {counted(len(outcome.pairs), 'pair')}"
        + ("; --retry tries the others again" if outcome.problems else "")
        + f"; next: wqk lab figure pairs {out}"
    )
    context.exit(1 if outcome.problems else 0)


def _list(as_json: bool) -> None:
    """List the models and pairs that would be read."""
    from wqk._console import size
    from wqk.cli import display
    from wqk.tables.sheet import Sheet
    from wqk_lab.runs.pairs import bytes_to_read, pairs

    listed = pairs()
    if as_json:
        display.print_object({"pairs": [{**asdict(p), "title": p.title} for p in listed]})
        return
    table = Sheet.of("pair", "recipe", "relation", "expected", "bytes", "name", text=["pair"])
    signs = {1: "+", -1: "−", 0: "exactly 0", None: "–"}
    for pair in listed:
        name = "" if pair.checked else "unchecked"
        amount = size(pair.bytes_before + pair.bytes_after)
        table.add(pair.title, pair.recipe, pair.relation, signs[pair.expected], amount, name)
    display.output().print(table)
    unchecked = sum(not pair.checked for pair in listed)
    display.say(
        f"{counted(len(listed), 'pair')}, {size(bytes_to_read(listed))} of queries and keys, "
        "estimated from published shapes; updates read theirs twice, unless they are cached"
    )
    display.say(
        f"{unchecked} have a name that no page confirmed; one that is missing is reported and "
        "skipped"
    )
