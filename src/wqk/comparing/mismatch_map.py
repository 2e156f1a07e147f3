"""Where two checkpoints differ, drawn head by head."""

from __future__ import annotations

import math
from textwrap import shorten
from typing import TYPE_CHECKING

import numpy as np

from wqk._console import last_part
from wqk._style import CATEGORIES, PAGE, new_figure, style
from wqk.comparing.answer import BlockComparison, CheckpointComparison
from wqk.errors import TableError

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
    depths = [len(blocks) for blocks in attentions.values()]
    height = sum(max(0.55, 0.13 * depth) + 0.45 for depth in depths)
    figure = new_figure(PAGE * 0.8, min(10.0, 0.9 + height + 0.16 * len(verdicts)))
    axes = figure.subplots(len(attentions), 1, squeeze=False, height_ratios=depths)[:, 0]
    for axis, (name, blocks) in zip(axes, attentions.items(), strict=True):
        axis.set_facecolor(SAME)
        values = _distances(blocks)
        drawn = axis.imshow(
            np.ma.masked_less_equal(values, 0).clip(LEAST, MOST), cmap="magma_r", aspect="auto",
            norm=LogNorm(LEAST, MOST), interpolation="nearest",
        )  # fmt: skip
        heads = values.shape[1]
        for row, block in enumerate(blocks):
            for mismatch in block.mismatches[:1]:
                axis.barh(
                    row, 0.025 * heads, left=-0.5 - 0.035 * heads, height=1.0, linewidth=0,
                    color=color_of[mismatch.verdict], clip_on=False,
                )  # fmt: skip
        axis.set_xlim(-0.5, heads - 0.5)
        every = math.ceil(len(blocks) / 12)
        axis.set_yticks(range(0, len(blocks), every), [b.layer for b in blocks[::every]])
        axis.set_xticks(range(0, heads, math.ceil(heads / 16)))
        axis.tick_params(length=0)
        axis.tick_params(axis="y", pad=12)
        axis.spines[:].set_visible(False)
        axis.set(ylabel=f"{name}\nlayer")
    axes[-1].set_xlabel("head")
    bar = figure.colorbar(drawn, ax=list(axes), shrink=min(1.0, 1.6 / figure.get_figheight() * 1.4))
    bar.outline.set_visible(False)
    bar.set_label("relative distance of a head", fontsize=7)
    names = [comparison.checkpoint, comparison.other]
    if len({last_part(name) for name in names}) == 2:
        names = [last_part(name) for name in names]
    names = [shorten(name, 40) for name in names]
    figure.suptitle(f"{names[1]} against {names[0]}", fontsize=8)
    same = [Patch(color=SAME, label="the same, up to rounding")]
    causes = [Patch(color=color_of[name], label=name) for name in verdicts]
    figure.legend(handles=[*causes, *same], loc="outside lower left", ncols=2)
    return figure


def _distances(blocks: list[BlockComparison]) -> np.ndarray:
    """Each block's distances by head (blocks, H); 0 within its tolerance."""
    heads = max((len(block.heads) for block in blocks), default=0)
    values = np.zeros((len(blocks), max(heads, 1)))
    for row, block in enumerate(blocks):
        values[row, : len(block.heads)] = block.heads
    return np.nan_to_num(values)
