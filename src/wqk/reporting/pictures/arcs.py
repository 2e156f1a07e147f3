"""Which heads feed which: layers across, heads upward, an arc for each of the strongest pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import polars as pl

from wqk._style import GRAY, PAGE, SKY, YELLOW, new_figure, style
from wqk.errors import TableError
from wqk.forms.scores import SIGNIFICANT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"q": (SKY, "queries"), "k": (YELLOW, "keys"), "v": (GRAY, "values")}

# Arcs that are labeled, from the strongest on.
LABELED = 6


@style()
def composition_arcs(frame: pl.DataFrame, top: int = 30) -> Figure:
    """Draw the strongest pairs of a table of `wqk.compose`: the thicker, the more beyond chance.

    Gray, and said in the title, where no pair of the table is, corrected for their number.

    Attentions of one layer stand side by side, in the order in which they write: an encoder before
    its decoder, cross-attention after self-attention.

    Raises
    ------
    TableError
        The table has no pair with a score.
    """
    strongest = strongest_pairs(frame, top)
    order = attentions(frame)
    column = {place: n for n, place in enumerate(order)}
    heads = head_count(frame)
    figure = new_figure(PAGE, min(8.0, 1.6 + 0.22 * heads))
    axis = figure.subplots()
    axis.scatter(
        [n for n in range(len(order)) for _ in range(heads)],
        [head for _ in order for head in range(heads)],
        s=6, color=GRAY, alpha=0.4, linewidths=0, zorder=1,
    )  # fmt: skip
    largest = float(strongest["excess"][0])
    beyond = bool((frame["p_corrected"] < SIGNIFICANT).any())
    for rank, row in enumerate(strongest.iter_rows(named=True)):
        start, stop = (
            (column[attention(row, end)], row[f"{end}_head"] or 0) for end in ("writer", "reader")
        )
        color = KINDS[row["kind"]][0] if beyond else GRAY
        axis.annotate(
            "", stop, start, zorder=3 if rank < LABELED else 2,
            arrowprops={
                "arrowstyle": "-|>,head_length=0.3,head_width=0.12",
                "connectionstyle": f"arc3,rad={-0.18 if stop[1] >= start[1] else 0.18}",
                "color": color,
                "linewidth": 0.4 + 2.0 * row["excess"] / largest,
                "alpha": 0.35 + 0.65 * row["excess"] / largest,
                "shrinkA": 2, "shrinkB": 2,
            },
        )  # fmt: skip
    labeled: set[tuple[float, int]] = set()
    for row in strongest.head(LABELED).iter_rows(named=True):
        for end, side in (("writer", "right"), ("reader", "left")):
            at = column[attention(row, end)], row[f"{end}_head"] or 0
            if at not in labeled:
                labeled.add(at)
                head = row[f"{end}_head"]
                name = f"{row[f'{end}_layer']}" + ("" if head is None else f".{head}")
                axis.annotate(
                    name, at, xytext=(-5 if side == "right" else 5, 0), ha=side, va="center",
                    textcoords="offset points", fontsize=7,
                )  # fmt: skip
    names = attention_names(order)
    axis.set_xticks(range(len(order)), names, rotation=45 if any(" " in n for n in names) else 0)
    axis.set(xlabel="layer", ylabel="head", xlim=(-0.6, len(order) - 0.4), ylim=(heads - 0.4, -0.6))
    axis.locator_params(axis="y", integer=True)
    if frame["writer_head"].is_null().all():
        axis.set_yticks([])
        axis.set_ylabel("")
    there = [kind for kind in KINDS if kind in set(strongest["kind"])]
    handles = [axis.plot([], [], color=KINDS[kind][0], label=KINDS[kind][1])[0] for kind in there]
    if beyond:
        figure.legend(handles=handles, loc="outside upper right", ncols=3, title="read by")
    said = "" if beyond else ", none of them beyond chance"
    axis.set_title(f"{strongest.height} strongest pairs of {frame.height:,}{said}")
    return figure


Place = tuple[tuple[bool, str], int, bool]


def strongest_pairs(frame: pl.DataFrame, top: int) -> pl.DataFrame:
    """The pairs that exceed chance most.

    Raises
    ------
    TableError
        No pair exceeds it.
    """
    strongest = frame.filter(pl.col("excess") > 0).sort("excess", descending=True).head(top)
    if strongest.is_empty():
        raise TableError("no pair of heads has a score above chance; there is nothing to draw")
    return strongest


def attention(row: dict[str, object], end: str) -> Place:
    """What sorts an attention among all: its stack, encoder first, its layer, and its kind."""
    stack = str(row[f"{end}_stack"])
    layer = row[f"{end}_layer"]
    assert isinstance(layer, int)
    return (stack != "encoder", stack), layer, row[f"{end}_attention"] == "cross"


def attentions(frame: pl.DataFrame) -> list[Place]:
    """All attentions of a table of pairs, in the order in which they write."""
    return sorted(
        {
            attention(row, end)
            for end in ("writer", "reader")
            for row in frame.select(f"{end}_stack", f"{end}_layer", f"{end}_attention")
            .unique()
            .iter_rows(named=True)
        }
    )


def attention_names(order: Sequence[Place]) -> list[str]:
    """What they are called on an axis: the layer's number, with its stack where there are more."""
    stacks = len({place[0] for place in order}) > 1
    return [
        f"{stack + ' ' if stacks else ''}{layer}{' cross' if cross else ''}"
        for (_, stack), layer, cross in order
    ]


def head_count(frame: pl.DataFrame) -> int:
    """The number of heads in the widest layer; 1 where whole layers were paired."""
    largest = [frame[f"{end}_head"].max() for end in ("writer", "reader")]
    return 1 + max(one for one in (*largest, 0) if isinstance(one, int))
