"""``wqk show``: one form, or the coupling of a layer's heads, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from wqk.cli.options import FILE, REF, gamma, json_output, opened, option, reading, revision, stack


@click.command()
@click.argument("ref", type=REF)
@option("layer", required=True)
@option("head", help="Show one head instead of the whole layer.")
@click.option("--coupling", is_flag=True, help="Show how the layer's heads transpose each other.")
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
def show(ref: str, layer: int, out: Path | None, as_json: bool, **options: Any) -> None:
    """Draw a form with its norms, or the coupling of heads.

    \b
    Examples:
      wqk show google-bert/bert-base-uncased --layer 3
      wqk show google-bert/bert-base-uncased --layer 3 --coupling --out coupling.pdf
    """
    from wqk._style import check_picture
    from wqk.cli import display
    from wqk.inspecting.showing import show as show_checkpoint

    if out and not as_json:
        check_picture(out)
    view = show_checkpoint(opened(ref, options), layer, **options)
    if as_json:
        display.print_object(view.values)
        return
    path = out or Path(f"{view.title.replace(', ', '-').replace(' ', '')}.png")
    view.save(path)
    display.say(f"{view.title}: {view.subtitle}\npicture: {path}")
