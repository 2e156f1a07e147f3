"""``wqk diff``: how far the forms of two checkpoints differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wqk.cli.options import (
    REF,
    both_opened,
    every_head,
    gamma,
    json_output,
    reading,
    revision_of_each,
    table_file,
)


@click.command()
@click.argument("before", metavar="REF", type=REF)
@click.argument("after", metavar="REF", type=REF)
@every_head
@revision_of_each
@click.option(
    "--terms", is_flag=True, help="Add the terms of first and second order in the factors."
)
@gamma
@reading
@table_file
@json_output
def diff(before: str, after: str, out: Path | None, as_json: bool, **options: Any) -> None:
    """Measure how far, and in which direction, the forms moved.

    The two REFs can be a model and its fine-tuned version, two steps of a training run, or two
    seeds.

    \b
    Examples:
      wqk diff EleutherAI/pythia-160m ./my-finetuned-pythia
      wqk diff EleutherAI/pythia-160m EleutherAI/pythia-160m --revision step1000 --revision main
    """
    from wqk.cli import display
    from wqk.comparing.differences import diff as diff_checkpoints
    from wqk.tables.score_table import check_table_output, records

    if out:
        check_table_output(out)
    table = diff_checkpoints(*both_opened(before, after, options), **options)
    value = {"metadata": dict(table.metadata), "rows": records(table.frame)}
    display.show(value, table, as_json=as_json)
    if out:
        table.write(out)
        display.say(f"{out}: {len(table)} rows")
