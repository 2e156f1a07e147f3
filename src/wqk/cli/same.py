"""``wqk same``: whether two checkpoints attend the same way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk.cli.options import FILE, REF, Number, json_output, reading, revision_of_each

if TYPE_CHECKING:
    from wqk.comparing.sameness import CheckpointComparison, Place


@click.command()
@click.argument("ref", metavar="A", type=REF)
@click.argument("other", metavar="B", type=REF)
@revision_of_each
@reading
@click.option("--other-family", type=FILE, metavar="FILE.toml", help="Family file of B.")
@click.option(
    "--layers", callback=lambda context, option, text: _numbers(text), metavar="0,-1",
    help="Compare these layers alone; negative numbers count from the last.",
)  # fmt: skip
@click.option(
    "--tolerance", type=Number(min=0), default=0.0, metavar="X",
    help="Accept heads that lie this far apart, relative to their norm.",
)  # fmt: skip
@click.option("--picture", type=FILE, help="Draw where they differ: .png, .pdf or .svg.")
@json_output
@click.pass_context
def same(
    context: click.Context, /, ref: str, other: str, picture: Path | None, as_json: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Check whether B attends as A does, and if not, find out why.

    Compares the weights exactly, across families, layouts and number types. Changes that
    leave attention unchanged are ignored: rotations within heads, folded norms and scales. If the
    two differ, each row of B's queries and keys is searched for among A's, and the mistake is named
    with the code that undoes it: rotary order not converted, converted twice or with the wrong
    number of heads, heads regrouped, copied or left as initialized, queries and keys exchanged or
    transposed, another layer's weights, another layout of a fused weight, biases, gains of norms, a
    factor, rotary base, scaling or width, an adapter that was not merged.

    Exit status: 0 if the two are equal up to the rounding of their number types, 1 if they differ,
    2 if they cannot be compared.

    \b
    Examples:
      wqk same meta-llama/Llama-3.2-1B ./my-conversion
      wqk same meta-llama/Llama-3.2-1B model-Q8_0.gguf --layers 0,-1
    """
    from wqk._style import check_picture, save_figure
    from wqk.cli import display
    from wqk.comparing.sameness import same as compare

    if picture:
        check_picture(picture)

    def changes(done: int, count: int) -> dict[str, Any]:
        return {"completed": done, "total": count, "text": f"{done}/{count} blocks"}

    with display.bar("comparing", changes) as report:
        result = compare(ref, other, on_progress=report, **options)
    display.show(result.to_dict(), *_lines(result), as_json=as_json)
    if picture:
        from wqk.reporting.pictures import mismatch_map

        save_figure(mismatch_map(result), picture)
        display.say(f"picture: {picture}")
    if not result.same:
        context.exit(1)


def _numbers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(piece) for piece in text.split(","))
    except ValueError:
        raise click.BadParameter(f"expected whole numbers such as 0,-1, got {text!r}") from None


def _lines(result: CheckpointComparison) -> Iterator[Any]:
    """What differs, where, and how to mend it; the outcome last."""
    from rich.text import Text

    from wqk.tables.sheet import Cell, Sheet

    yield Text.assemble((result.checkpoint, "bold"), "  and  ", (result.other, "bold"))
    for note in result.notes:
        yield Text(note, style="dim")
    for places, name in ((result.missing, result.checkpoint), (result.added, result.other)):
        if places:
            yield f"only in {name}: {_places(places)}"
    differing = [block for block in result.blocks if not block.same]
    if differing:
        at = list(differing[0].distance)
        headings = ("attention", "layer", *(f"N={n}" for n in at), "reason")
        table = Sheet.of(*headings, text=["attention", "reason"])
        for block in differing:
            distances = (f"{block.distance[n]:.1e}" if n in block.distance else "–" for n in at)
            place = (f"{block.stack} {block.kind}", str(block.layer))
            table.add(*place, *distances, Cell(block.reason, style="bold"))
        yield table
        note = "‖M_A(N) − M_B(N)‖ / ‖M_A(N)‖ of the head farthest off; N tokens from query to key"
        yield Text(note, style="dim")
        for cause in result.causes:
            one = cause.mismatch
            sides = f" ({' and '.join(one.sides)})" if one.sides else ""
            yield Text.assemble((one.reason, "bold"), f"{sides}, {_places(cause.places)}")
            if one.repair:
                yield Text(f"  {one.repair}")
    yield result.sentence


def _places(places: Sequence[Place]) -> str:
    """Blocks in few words: ``decoder self, layers 0-3 5``."""
    layers: dict[str, list[int]] = {}
    for place in places:
        layers.setdefault(f"{place.stack} {place.kind}", []).append(place.layer)
    return "; ".join(f"{name}, {_runs(numbers)}" for name, numbers in layers.items())


def _runs(numbers: Sequence[int]) -> str:
    """Numbers with ends of runs alone.

    Examples
    --------
    >>> _runs([0, 1, 2, 5])
    'layers 0-2 5'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    text = " ".join("-".join(map(str, run)) for run in runs)
    return f"{'layer' if len(numbers) == 1 else 'layers'} {text}"
