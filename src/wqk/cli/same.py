"""``wqk same``: whether two checkpoints attend the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from wqk._console import plain_table
from wqk.cli.options import FILE, REF, family_file, json_output, revision_of_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.comparing.sameness import CheckpointComparison


@click.command()
@click.argument("ref", metavar="A", type=REF)
@click.argument("other", metavar="B", type=REF)
@revision_of_each
@family_file
@click.option("--other-family", type=FILE, metavar="FILE.toml", help="The same for B.")
@json_output
@click.pass_context
def same(context: click.Context, /, ref: str, other: str, as_json: bool, **options: Any) -> None:
    """Check whether B attends as A does, and if not, find out why.

    Compares the weights exactly, across families, layouts and number types. Changes that
    leave attention unchanged are ignored: rotations within heads, folded norms and scales. Known
    conversion errors are identified: rotary order or base, the order or the pairing of heads,
    queries and keys exchanged, a factor, biases.

    Exit status: 0 if the two are equal up to the rounding of their number types, 1 if they differ,
    2 if they cannot be compared.

    \b
    Example:
      wqk same meta-llama/Llama-3.2-1B ./my-conversion
    """
    from wqk.cli import display
    from wqk.comparing.sameness import same as compare

    result = compare(ref, other, **options)
    display.show(result.to_dict(), *_lines(result), as_json=as_json)
    if not result.same:
        context.exit(1)


def _lines(result: CheckpointComparison) -> Iterator[Any]:
    """The verdict, and a line for each block that differs."""
    from rich.text import Text

    yield Text.assemble((result.checkpoint, "bold"), "  and  ", (result.other, "bold"))
    differing = [block for block in result.blocks if not block.same]
    count = len(result.blocks)
    if not differing:
        largest, worst = max(
            ((max(block.distance.values()), block) for block in result.blocks),
            key=lambda pair: pair[0],
        )
        yield (
            f"The same attention in all {count} blocks: heads lie at most {largest:.1e} apart, "
            f"relative to their norm; the rounding of stored numbers explains "
            f"{worst.tolerance:.1e}."
        )
        return
    at = list(differing[0].distance)
    headings = ("attention", "layer", *(f"N={n}" for n in at), "reason")
    table = plain_table(*headings, left=["attention", "reason"])
    for block in differing:
        distances = (f"{block.distance[n]:.1e}" for n in at)
        place = (f"{block.stack} {block.kind}", str(block.layer))
        table.add_row(*place, *distances, Text(block.reason, style="bold"))
    yield table
    yield f"{len(differing)} of {count} blocks differ."
    note = "‖M_A(N) − M_B(N)‖ / ‖M_A(N)‖ of the head farthest off; N tokens from query to key"
    yield Text(note, style="dim")
