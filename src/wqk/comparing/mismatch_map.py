"""Where two checkpoints differ, drawn head by head."""

from __future__ import annotations

from textwrap import shorten
from typing import TYPE_CHECKING

import polars as pl

from wqk._console import last_part
from wqk._style import CATEGORIES, style
from wqk.comparing.answer import BlockComparison, CheckpointComparison
from wqk.errors import TableError
from wqk.tables.rendering import head_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# The scale's ends, of relative distances; what lies beyond has the color of the nearer end.
LEAST, MOST = 1e-4, 2.0
# Heads that are the same.
SAME = "#f3f3f1"


@style()
def mismatch_map(comparison: CheckpointComparison) -> Figure:
    """Draw every head's distance from the same head of the other checkpoint, for each attention.

    Heads that are the same, up to rounding, are pale. A bar beside each layer has the color of its
    cause, the most frequent ones with their names below.

    Raises
    ------
    TableError
        No block was compared.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch

    attentions: dict[str, list[BlockComparison]] = {}
    for block in comparison.blocks:
        attentions.setdefault(f"{block.stack} {block.kind}-attention", []).append(block)
    if not attentions:
        raise TableError("no attention block was compared, so there is nothing to draw")
    verdicts = list(dict.fromkeys(cause.mismatch.verdict for cause in comparison.causes))
    color_of = {name: CATEGORIES[min(n, len(CATEGORIES) - 1)] for n, name in enumerate(verdicts)}
    schema = {"layer": pl.Int64, "head": pl.Int64, "distance": pl.Float64}
    kinds = [
        (name, pl.DataFrame([(block.layer, head, far if far > 0 else None) for block in blocks
                             for head, far in enumerate(block.heads)], schema, orient="row"))
        for name, blocks in attentions.items()
    ]  # fmt: skip
    scale = LogNorm(LEAST, MOST, clip=True)
    figure = head_maps(kinds, {"distance": ""}, "relative distance of a head", norm=scale)
    for axis, blocks in zip(figure.axes, attentions.values(), strict=False):
        axis.set_facecolor(SAME)
        left, right = axis.get_xlim()
        for block in blocks:
            for mismatch in block.mismatches[:1]:
                axis.barh(
                    block.layer, 0.025 * (right - left), left=left - 0.035 * (right - left),
                    height=1.0, linewidth=0, color=color_of[mismatch.verdict], clip_on=False,
                )  # fmt: skip
        axis.set_xlim(left, right)
        axis.tick_params(axis="y", length=0, pad=12)
        axis.spines[:].set_visible(False)
    names = [comparison.checkpoint, comparison.other]
    last = [last_part(name) for name in names]
    names = [shorten(name, 40) for name in (names if last[0] == last[1] else last)]
    figure.suptitle(f"{names[1]} against {names[0]}", fontsize=8)
    same = [Patch(color=SAME, label="the same, up to rounding")]
    causes = [Patch(color=color_of[name], label=name) for name in verdicts]
    figure.legend(handles=[*causes, *same], loc="outside lower left", ncols=2)
    return figure
