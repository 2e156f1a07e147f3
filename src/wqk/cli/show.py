"""``wqk show``: one form, or the coupling of a layer's heads, as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from wqk.cli.options import (
    DistanceRanges,
    Reference,
    family_file,
    gamma,
    heads_per_layer,
    json_output,
    key_heads,
    revision,
)


@click.command()
@click.argument("ref", type=Reference())
@click.option("--layer", type=int, required=True, metavar="L", help="Negative: from the end.")
@click.option("--head", type=int, metavar="H", help="Show one head instead of the whole layer.")
@click.option("--coupling", is_flag=True, help="Show how the layer's heads transpose each other.")
@click.option(
    "--distance",
    "distances",
    type=DistanceRanges(),
    metavar="N,N:M",
    help="Show scores over relative distances, such as 0:64 (rotary models).",
)
@click.option("--stack", metavar="NAME", help="encoder or decoder, if the model has both.")
@click.option("--cross", is_flag=True, help="Cross-attention instead of self-attention.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Figure to write: .png, .pdf or .svg.  [default: named after the model and layer]",
)
@gamma
@revision
@family_file
@heads_per_layer
@key_heads
@json_output
def show(
    ref: str,
    layer: int,
    head: int | None,
    coupling: bool,
    distances: tuple[int, ...] | None,
    stack: str | None,
    cross: bool,
    out: Path | None,
    gamma: float,
    revision: str | None,
    family: Path | None,
    heads_per_layer: int | None,
    key_heads: int | None,
    as_json: bool,
) -> None:
    """Draw a form with its norms, or the coupling of heads.

    \b
    Examples:
      wqk show google-bert/bert-base-uncased --layer 3
      wqk show google-bert/bert-base-uncased --layer 3 --coupling --out coupling.pdf
      wqk show meta-llama/Llama-3.2-1B --layer 0 --distance 0:64
    """
    from wqk._style import check_picture
    from wqk.cli import display
    from wqk.reporting.showing import show as show_checkpoint

    if sum((coupling, head is not None, distances is not None)) > 1:
        raise click.UsageError("--head, --coupling and --distance are mutually exclusive; give one")
    if out and not as_json:
        check_picture(out)
    view = show_checkpoint(
        ref,
        layer,
        head=head,
        coupling=coupling,
        distances=distances,
        stack=stack,
        kind="cross" if cross else "self",
        gamma=gamma,
        family=family,
        heads_per_layer=heads_per_layer,
        key_heads=key_heads,
        revision=revision,
    )
    if as_json:
        display.print_object(view.values)
        return
    path = out or Path(f"{view.title.replace(', ', '-').replace(' ', '')}.png")
    view.save(path)
    display.say(f"{view.title}: {view.subtitle}\npicture: {path}")
