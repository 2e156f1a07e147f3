"""``wqk diff``: how far the forms of one checkpoint lie from another's."""

from __future__ import annotations

from pathlib import Path

import click

from wqk.cli.options import family_file, gamma, json_output


@click.command()
@click.argument("before", metavar="REF")
@click.argument("after", metavar="REF")
@click.option("--heads", is_flag=True, help="Compare every single head, too.")
@gamma
@family_file
@json_output
def diff(
    before: str, after: str, heads: bool, gamma: float, family: Path | None, as_json: bool
) -> None:
    """Say how far, and in which direction, the forms moved.

    The two are a model and its fine-tuned child, two steps of one training, or two seeds.

    \b
    Example:
      wqk diff EleutherAI/pythia-160m ./my-finetuned-pythia
    """
    import polars as pl

    from wqk.cli import display
    from wqk.scanning.differences import diff as diff_checkpoints
    from wqk.scanning.tables import records

    frame = diff_checkpoints(before, after, gamma=gamma, family=family)
    shown = frame if heads else frame.filter(pl.col("head").is_null())
    if as_json:
        display.print_object({"before": before, "after": after, "rows": records(shown)})
    else:
        display.print_difference(shown)
