"""``wqk show``: one form, or the coupling of a layer's heads, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wqk.cli.options import (
    FILE,
    REF,
    gamma,
    json_output,
    opened,
    option,
    ranges,
    reading,
    revision,
    stack,
)


@click.command()
@click.argument("ref", type=REF)
@option("layer")
@option("head", help="Show one head instead of the whole layer.")
@click.option("--coupling", is_flag=True, help="Show how the layer's heads transpose each other.")
@click.option(
    "--distance", "distances", type=ranges, metavar="N,N:M",
    help="Show scores over relative distances, such as 0:64 (rotary models).",
)  # fmt: skip
@click.option(
    "--bands",
    is_flag=True,
    help="Show rotary planes and how forms change with distance; without --layer, of all layers.",
)
@click.option("--reads", is_flag=True, help="List what the head reads from and writes to.")
@stack
@click.option(
    "--cross", "kind", flag_value="cross", default="self", show_default=False,
    help="Cross-attention instead of self-attention.",
)  # fmt: skip
@click.option("--linear", "kind", flag_value="linear", help="Linear attention instead.")
@click.option("--state-space", "kind", flag_value="state-space", help="State spaces instead.")
@click.option(
    "--out",
    "--picture",
    "out",
    type=FILE,
    help="Figure to write: .png, .pdf or .svg.  [default: named after the model and layer]",
)
@gamma
@revision
@reading
@json_output
def show(
    ref: str, layer: int | None, reads: bool, out: Path | None, as_json: bool, **options: Any
) -> None:
    """Draw a form with its norms, the coupling of heads, or rotary planes.

    \b
    Examples:
      wqk show google-bert/bert-base-uncased --layer 3
      wqk show google-bert/bert-base-uncased --layer 3 --coupling --out coupling.pdf
      wqk show meta-llama/Llama-3.2-1B --layer 0 --distance 0:64
      wqk show meta-llama/Llama-3.2-1B --bands
      wqk show openai-community/gpt2 --layer 5 --head 3 --reads
    """
    from wqk._style import check_picture
    from wqk.cli import display
    from wqk.inspecting.showing import show as show_checkpoint

    views = [options[name] for name in ("head", "coupling", "distances", "bands")]
    if sum(view is not None and view is not False for view in views) > 1:
        raise click.UsageError(
            "--head, --coupling, --distance and --bands are mutually exclusive; give one"
        )
    if layer is None and not options["bands"]:
        raise click.UsageError("Missing option '--layer'.")
    if out and not as_json:
        check_picture(out)
    if reads:
        _show_reads(ref, layer, out, as_json, options)
        return
    view = show_checkpoint(opened(ref, options), layer, **options)
    if as_json:
        display.print_object(view.values)
        return
    path = out or Path(f"{view.title.replace(', ', '-').replace(' ', '')}.png")
    view.save(path)
    display.say(f"{view.title}: {view.subtitle}\npicture: {path}")


def _show_reads(
    ref: str, layer: int | None, out: Path | None, as_json: bool, options: dict[str, Any]
) -> None:
    """A head's place in the composition of the model: a table, and a picture if asked for."""
    from wqk._style import save_figure
    from wqk.cli import display
    from wqk.inspecting.composition import compose, shown
    from wqk.tables.score_table import records

    head = options.pop("head")
    ignored = {name: options.pop(name) for name in ("coupling", "distances", "bands")}
    attention = {name: options.pop(name) for name in ("stack", "kind")}
    if layer is None or head is None or any(ignored.values()):
        raise click.UsageError("--reads lists the neighbors of one head; give --layer and --head")
    table = compose(opened(ref, options), **options).around(layer, head, **attention)
    value = {"metadata": dict(table.metadata), "rows": records(table.frame)}
    display.show(value, *shown(table, 20), as_json=as_json)
    if out and not as_json:
        save_figure(table.plot(), out)
        display.say(f"picture: {out}")
