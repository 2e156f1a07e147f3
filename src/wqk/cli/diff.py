"""``wqk diff``: how far the forms of two checkpoints differ."""

from __future__ import annotations

from pathlib import Path

import click

from wqk.cli.options import (
    Reference,
    family_file,
    gamma,
    heads_per_layer,
    json_output,
    key_heads,
    table_file,
)


@click.command()
@click.argument("before", metavar="REF", type=Reference())
@click.argument("after", metavar="REF", type=Reference())
@click.option("--heads", is_flag=True, help="Also compare every head.")
@click.option(
    "--revision",
    "revisions",
    multiple=True,
    metavar="R",
    help="Hub revision; give it twice, for the first and for the second REF.",
)
@gamma
@family_file
@heads_per_layer
@key_heads
@table_file
@json_output
def diff(
    before: str,
    after: str,
    heads: bool,
    revisions: tuple[str, ...],
    gamma: float,
    family: Path | None,
    heads_per_layer: int | None,
    key_heads: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure how far, and in which direction, the forms moved.

    The two REFs can be a model and its fine-tuned version, two steps of a training run, or two
    seeds.

    \b
    Examples:
      wqk diff EleutherAI/pythia-160m ./my-finetuned-pythia
      wqk diff EleutherAI/pythia-160m EleutherAI/pythia-160m --revision step1000 --revision main
    """
    from wqk.cli import display
    from wqk.scanning.differences import diff as diff_checkpoints
    from wqk.scanning.tables import check_table_output, records

    if len(revisions) not in (0, 2):
        raise click.UsageError("expected --revision twice: for the first and for the second REF")
    if out:
        check_table_output(out)
    table = diff_checkpoints(
        before,
        after,
        revisions=(revisions[0], revisions[1]) if revisions else (None, None),
        gamma=gamma,
        heads=heads,
        family=family,
        heads_per_layer=heads_per_layer,
        key_heads=key_heads,
    )
    if as_json:
        display.print_object({"metadata": dict(table.metadata), "rows": records(table.frame)})
    else:
        display.output().print(table)
    if out:
        table.write(out)
        display.say(f"{out}: {len(table)} rows")
