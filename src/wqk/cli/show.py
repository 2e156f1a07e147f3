"""``wqk show``: one form, or the coupling of a layer's heads, as a picture."""

from __future__ import annotations

from pathlib import Path

import click

from wqk.cli.options import family_file, gamma, json_output, revision


@click.command()
@click.argument("ref")
@click.option("--layer", type=int, required=True, metavar="L", help="Negative: from the end.")
@click.option("--head", type=int, metavar="H", help="One head instead of the layer.")
@click.option("--coupling", is_flag=True, help="Show how the layer's heads transpose each other.")
@click.option("--stack", metavar="NAME", help="encoder or decoder, where a model has both.")
@click.option("--cross", is_flag=True, help="Cross-attention instead of self-attention.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Picture to write: .png, .pdf or .svg.  [default: named after the model and layer]",
)
@gamma
@revision
@family_file
@json_output
def show(
    ref: str,
    layer: int,
    head: int | None,
    coupling: bool,
    stack: str | None,
    cross: bool,
    out: Path | None,
    gamma: float,
    revision: str | None,
    family: Path | None,
    as_json: bool,
) -> None:
    r"""Draw a form with its norms, or the coupling of heads.

    \b
    Examples:
      wqk show google-bert/bert-base-uncased --layer 3
      wqk show google-bert/bert-base-uncased --layer 3 --coupling --out coupling.pdf
    """
    from wqk.attention import read_attention
    from wqk.cli import display
    from wqk.views import coupling_view, form_view

    if coupling and head is not None:
        raise click.UsageError("--coupling shows all heads of a layer; leave out --head")
    kind = "cross" if cross else "self"
    attention = read_attention(ref, layer, stack=stack, kind=kind, family=family, revision=revision)
    name = f"{Path(ref).name}, layer {attention.layer}"
    view = coupling_view(attention, name) if coupling else form_view(attention, name, head, gamma)
    if as_json:
        display.print_object(view.values)
        return
    path = out or Path(f"{view.title.replace(', ', '-').replace(' ', '')}.png")
    view.save(path)
    display.say(f"{view.title}: {view.subtitle}\npicture: {path}")
