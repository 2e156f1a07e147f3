"""``wqk compose``: which heads feed which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wqk.cli.options import (
    COUNT,
    FILE,
    REF,
    gamma,
    json_output,
    opened,
    reading,
    revision,
    table_file,
)


@click.command()
@click.argument("ref", type=REF)
@click.option(
    "--kind", type=click.Choice(["q", "k", "v", "all"]), default="all",
    help="How the later head reads: with its queries, keys or values.",
)  # fmt: skip
@click.option("--layers", is_flag=True, help="Pair whole layers instead of heads.")
@click.option(
    "--zero", type=click.Choice(["outliers", "rotation"]), default="outliers",
    help="Chance: random rotations of the stream that keep its outlying dimensions, or all.",
)  # fmt: skip
@click.option("--fold-norm", is_flag=True, help="Fold in the norms that feed the heads.")
@click.option("--top", type=COUNT, default=20, metavar="N", help="Number of pairs to print.")
@click.option("--picture", type=FILE, help="Draw the pairs as arcs: .png, .pdf or .svg.")
@gamma
@revision
@reading
@table_file
@json_output
def compose(
    ref: str, top: int, out: Path | None, picture: Path | None, as_json: bool, **options: Any
) -> None:
    """Find out which heads read what which earlier heads write.

    Scores every pair of heads of two layers by their composition, ‖W_out W_in‖ / (‖W_out‖
    ‖W_in‖), for the later head's queries (Q), keys (K) and values (V), and compares it with
    chance. Weights only: whether a head attends to the token in question is another matter.

    \b
    Examples:
      wqk compose openai-community/gpt2 --kind k
      wqk compose meta-llama/Llama-3.2-1B --fold-norm --out pairs.parquet
    """
    from wqk._style import check_picture, save_figure
    from wqk.cli import display
    from wqk.inspecting.composition import compose as compose_heads
    from wqk.inspecting.composition import shown
    from wqk.tables.score_table import check_table_output, records

    if out:
        check_table_output(out)
    if picture:
        check_picture(picture)
    with display.bar(ref, display.blocks_progress) as on_progress:
        table = compose_heads(opened(ref, options), on_progress=on_progress, **options)
    value = {"metadata": dict(table.metadata), "rows": records(table.frame.head(top))}
    display.show(value, *shown(table, top), as_json=as_json)
    if out:
        table.write(out)
        display.say(f"{out}: {len(table)} rows")
    if picture:
        save_figure(table.plot(top), picture)
        display.say(f"picture: {picture}")
