"""``wqk lab atlas``: the paper's published scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from wqk.cli.options import csv_output, json_output
from wqk_lab.training.declared import documented

if TYPE_CHECKING:
    import polars as pl


@documented
@click.command()
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--stack", type=click.Choice(["encoder", "decoder"]))
@click.option("--modality", type=click.Choice(["language", "vision", "audio"]))
@click.option("--sound/--flagged", "sound", default=None)
@click.option("--unsound", is_flag=True)
@click.option("--search", metavar="TEXT")
@click.option(
    "--sort",
    type=click.Choice(["table", "name", "symmetry", "-symmetry", "directionality", "parameters"]),
    default="table",
)
@json_output
@csv_output
def atlas(model: str | None, as_json: bool, as_csv: bool, **choice: Any) -> None:
    """Show the paper's published scores, or the scores of one MODEL.

    Scores of language models are from Tables S2 and S3; scores of vision, audio and other
    models are medians over the published layers behind the figures. MODEL is a name from the
    tables or a Hub id, such as BERT-base, openai/whisper-tiny or openai-community/gpt2.
    Rows with known problems carry flags; the column reasons of --csv and --json has them in
    words, and the column printed is true for rows of the two tables. The rank of your own model
    among these rows is shown by wqk scan.

    \b
    Examples:
      wqk lab atlas --stack encoder --sound --sort symmetry
      wqk lab atlas Mistral-7B

    Parameters
    ----------
    stack
        Only models of this stack.
    modality
        Only models of this kind.
    sound
        Only rows with scores of a trained model's own form, also with a flag that is no artifact,
        such as a mislabeled name; only rows with any flag.
    unsound
        Only the other rows than --sound: their scores are not those of a trained model's own form.
    search
        Only rows with TEXT in their name or checkpoint.
    sort
        Order of the rows; symmetry puts the largest first, -symmetry the smallest.
    """
    from wqk.cli import display
    from wqk_lab.atlas import all_published, lookup
    from wqk_lab.cli.atlas_display import explained, in_full, listed, with_reasons

    ending = display.require_one_output(as_csv, None, as_json)
    if choice["sound"] and choice["unsound"]:
        raise click.UsageError("--sound and --unsound exclude each other; choose one of the two")
    chosen = _chosen(all_published(), **choice)
    if model is not None:
        chosen = lookup(model, chosen)
    chosen = with_reasons(chosen)
    rows = chosen.to_dicts()
    if not rows and not (as_json or ending):
        display.say("No row matches.")
        return
    lines = listed(rows) if model is None else in_full(rows)
    value = {"rows": rows, "flags": explained(rows)}
    display.show(value, *lines, as_json=as_json, ending=ending, rows=chosen)


def _chosen(
    rows: pl.DataFrame,
    sound: bool | None,
    unsound: bool,
    search: str | None,
    sort: str,
    **exact: str | None,
) -> pl.DataFrame:
    """Return the selected rows, in the selected order."""
    import polars as pl

    for column, value in exact.items():
        if value:
            rows = rows.filter(pl.col(column) == value)
    if sound is True:
        rows = rows.filter("sound")
    if sound is False:
        rows = rows.filter(pl.col("flags").list.len() > 0)
    if unsound:
        rows = rows.filter(~pl.col("sound"))
    if search:
        text = pl.concat_str("name", "model", separator=" ").str.to_lowercase()
        rows = rows.filter(text.str.contains(search.lower(), literal=True))
    if sort == "table":
        return rows
    column = sort.removeprefix("-")
    key = pl.col("name").str.to_lowercase() if column == "name" else pl.col(column)
    return rows.sort(key, descending=sort == "symmetry", nulls_last=True, maintain_order=True)
