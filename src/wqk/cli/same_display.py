"""What ``wqk same`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from wqk._console import sheet
from wqk.cli.display import output

if TYPE_CHECKING:
    from wqk.scanning.same import BlockComparison, CheckpointComparison


def print_comparison(result: CheckpointComparison) -> None:
    """The verdict, and one line for each block that differs."""
    console = output()
    console.print(Text.assemble((result.checkpoint, "bold"), "  and  ", (result.other, "bold")))
    differing = [block for block in result.blocks if not block.same]
    count = len(result.blocks)
    if not differing:
        worst = max(result.blocks, key=_largest)
        console.print(
            f"The same attention in all {count} blocks: heads lie at most {_largest(worst):.1e} "
            f"apart, relative to their norm; the rounding of stored numbers explains "
            f"{worst.tolerance:.1e}."
        )
        return
    at = list(differing[0].distance)
    headings = ("attention", "layer", *(f"N={n}" for n in at), "reason")
    table = sheet(*headings, left=["attention", "reason"])
    for block in differing:
        distances = (f"{block.distance[n]:.1e}" for n in at)
        place = (f"{block.stack} {block.kind}", str(block.layer))
        table.add_row(*place, *distances, Text(block.reason, style="bold"))
    console.print(table)
    console.print(f"{len(differing)} of {count} blocks differ.")
    note = "‖M_A(N) − M_B(N)‖ / ‖M_A(N)‖ of the head farthest off; N tokens from query to key"
    console.print(Text(note, style="dim"))


def _largest(block: BlockComparison) -> float:
    return max(block.distance.values())
