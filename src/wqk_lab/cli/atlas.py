"""``wqk lab atlas``: the paper's published scores, and how a scan compares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk.cli.options import FILE, FOLDER, json_output
from wqk_lab.training.declared import documented

if TYPE_CHECKING:
    import polars as pl

    from wqk.tables.score_table import ScoreTable
    from wqk_lab.atlas import Comparison


@documented
@click.command()
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--stack", type=click.Choice(["encoder", "decoder"]))
@click.option("--modality", type=click.Choice(["language", "vision", "audio"]))
@click.option("--sound/--flagged", "sound", default=None)
@click.option("--search", metavar="TEXT")
@click.option(
    "--sort",
    type=click.Choice(["table", "name", "symmetry", "directionality", "parameters"]),
    default="table",
)
@click.option("--survey", "surveys", type=FOLDER, multiple=True, envvar="WQK_SURVEY", metavar="DIR")
@click.option("--from", "table_file", type=FILE, metavar="TABLE")
@click.option("--scan", "scanned", is_flag=False, flag_value="", metavar="[REF]")
@json_output
def atlas(
    model: str | None,
    surveys: tuple[Path, ...],
    table_file: Path | None,
    scanned: str | None,
    as_json: bool,
    **choice: Any,
) -> None:
    """Show the paper's published scores, or those of one MODEL.

    Scores of language models are those of Tables S2 and S3; scores of vision, audio and other
    models are medians over the published layers behind the figures. MODEL is a name from the
    tables or a Hub id, such as BERT-base, openai/whisper-tiny or openai-community/gpt2.
    Rows with known problems carry flags. With --scan, --from or --survey, your own scores are
    shown next to the published ones.

    \b
    Examples:
      wqk lab atlas --stack encoder --sound --sort symmetry
      wqk lab atlas Mistral-7B
      wqk lab atlas BERT-base --scan ./bert-base-uncased

    Parameters
    ----------
    stack
        Only models of this stack.
    modality
        Only models of this kind.
    sound
        Only rows that are not artifacts; only rows with a flag.
    search
        Only rows with TEXT in their name or checkpoint.
    sort
        Order of the rows.
    surveys
        Also show a survey's results; repeatable.  [default: WQK_SURVEY]
    table_file
        Compare MODEL with the scores of a saved table.
    scanned
        Scan REF and compare MODEL with it; without REF, MODEL's own checkpoint on the Hub.
    """
    import polars as pl

    from wqk.tables.score_table import read_table
    from wqk_lab.atlas import all_published, lookup, summarize, survey_table
    from wqk_lab.cli import atlas_display

    if model is None and (table_file or scanned is not None):
        raise click.UsageError("--from and --scan compare with one MODEL; name it first")
    if table_file and scanned is not None:
        raise click.UsageError("expected --from or --scan, got both")
    survey = survey_table(*surveys) if surveys else None
    rows = all_published()
    if survey is not None:
        rows = pl.concat([rows, summarize(survey)])
    rows = _chosen(rows, **choice)
    if model is None:
        atlas_display.print_rows(rows, as_json)
        return
    matching = lookup(model, rows)
    if table_file:
        own = read_table(table_file)
    elif scanned is not None:
        own = _scan(scanned, matching)
    else:
        own = None
    compared = [(row, _comparison(row, own, survey)) for row in matching.iter_rows(named=True)]
    atlas_display.print_model(compared, as_json)


def _chosen(
    rows: pl.DataFrame,
    stack: str | None,
    modality: str | None,
    sound: bool | None,
    search: str | None,
    sort: str,
) -> pl.DataFrame:
    """The selected rows, in the selected order."""
    import polars as pl

    if stack:
        rows = rows.filter(pl.col("stack") == stack)
    if modality:
        rows = rows.filter(pl.col("modality") == modality)
    if sound is not None:
        rows = rows.filter(pl.col("sound") if sound else pl.col("flags").list.len() > 0)
    if search:
        text = pl.concat_str("name", "model", separator=" ").str.to_lowercase()
        rows = rows.filter(text.str.contains(search.lower(), literal=True))
    if sort == "table":
        return rows
    key = pl.col("name").str.to_lowercase() if sort == "name" else pl.col(sort)
    return rows.sort(key, descending=sort == "symmetry", nulls_last=True, maintain_order=True)


def _scan(ref: str, matching: pl.DataFrame) -> ScoreTable:
    """Scores of the layers of a checkpoint, by default of the one that the rows are about."""
    from wqk.cli import display
    from wqk.model import open as open_model
    from wqk.scanning.scan import scan

    if not ref:
        ref, *others = matching["model"].unique(maintain_order=True).to_list()
        if others:
            raise click.UsageError(
                f"this name matches {', '.join([ref, *others])}; name one of them"
            )
    with display.bar(ref, display.scan_progress) as on_progress:
        model = open_model(ref)
        table = scan(model, heads=False, on_progress=on_progress)
    display.say_traffic(model.checkpoint)
    return table


def _comparison(
    row: Mapping[str, Any], own: ScoreTable | None, survey: ScoreTable | None
) -> Comparison | None:
    """A published row with a scan of its model, if any; a survey may lack it."""
    from wqk_lab.atlas import compare, summarize
    from wqk_lab.atlas.ranks import of_model

    if row["source"] == "own":
        return None
    if own is None and survey is not None and of_model(summarize(survey), row).height:
        own = survey
    return None if own is None else compare(own, row)
