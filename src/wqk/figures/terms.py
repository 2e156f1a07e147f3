"""A layer's symmetry within and between its heads, compared with chance."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from wqk._style import BLUE, CHANCE, GRAY, PAGE, SKY, new_figure, style
from wqk.errors import TableError
from wqk.figures.selection import latest, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wqk.scanning.tables import ScoreTable

TERMS = ("symmetry_within_heads", "symmetry_between_heads", "symmetry_within_random")

LEGEND = ("within heads", "between heads", "within heads by chance", "sum: the symmetry")

# Panels side by side.
COLUMNS = 3


def head_terms(table: ScoreTable | None) -> pl.DataFrame:
    """Each layer's symmetry, its terms within and between heads, and the term within by chance.

    Returns
    -------
    polars.DataFrame
        One row for each layer: ``title`` (the model), ``layer``, ``symmetry``, the three terms.

    Raises
    ------
    TableError
        No layer has the terms.

    Examples
    --------
    >>> import wqk
    >>> head_terms(wqk.scan(wqk.demo_model("encoder"))).select("title", "layer").rows()
    [('encoder', 0), ('encoder', 1), ('encoder', 2), ('encoder', 3)]
    """
    if table is None:
        raise TableError("heads needs scores: wqk scan REF --out FILE, then --from FILE; got none")
    plain = latest(table).layers.filter(pl.col("distance") == 0).frame.drop_nulls(TERMS)
    if plain.is_empty():
        raise TableError("heads needs the terms within and between heads; no layer has them")
    return titled(plain).select("title", "layer", "symmetry", *TERMS)


def terms_by_layer(rows: pl.DataFrame) -> Figure:
    """Draw `head_terms`: bars for the two terms of every layer, and chance across the first.

    Chance is the expected term within heads if the layer's dimensions are assigned to heads at
    random.
    """
    groups = rows.partition_by("title", maintain_order=True)
    columns = min(COLUMNS, len(groups))
    lines = -(-len(groups) // columns)
    with style():
        figure = new_figure(min(PAGE, 0.9 + 2.4 * columns), 0.5 + 1.9 * lines)
        axes = figure.subplots(lines, columns, sharey=True, squeeze=False)
        for axis, group in zip(axes.flat, groups, strict=False):
            _draw_terms(axis, group)
            axis.set_title(group["title"][0])
        for axis in axes.flat[len(groups) :]:
            axis.remove()
        for row in axes:
            row[0].set_ylabel("symmetry")
        handles, _ = axes[0, 0].get_legend_handles_labels()
        handles.sort(key=lambda handle: LEGEND.index(handle.get_label()))
        figure.legend(handles=handles, loc="outside lower center", ncols=2 * min(columns, 2))
    return figure


def _draw_terms(axis: Axes, rows: pl.DataFrame) -> None:
    width = 0.38
    layers = rows["layer"].to_numpy()
    within, between, chance = (rows[term] for term in TERMS)
    names = iter(LEGEND)
    axis.bar(layers - width / 2, within, width, color=BLUE, label=next(names))
    axis.bar(layers + width / 2, between, width, color=SKY, label=next(names))
    axis.plot(layers - width / 2, chance, label=next(names), **CHANCE)
    axis.hlines(
        rows["symmetry"], layers - width, layers + width, color=GRAY, linewidth=1, label=next(names)
    )
    axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
    axis.set_xlabel("layer")
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)
