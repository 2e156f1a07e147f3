"""A layer's symmetry within and between its heads, compared with chance."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import polars as pl

from wqk._style import CHANCE, GRAY, PAGE, SAND, TEAL, new_figure, style
from wqk.errors import TableError
from wqk.reporting.pictures.panels import panel_grid
from wqk.reporting.pictures.selection import latest, titled
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TERMS = ("symmetry_within_heads", "symmetry_between_heads", "symmetry_within_random")

# Panels side by side.
COLUMNS = 3


def head_terms(table: ScoreTable | None) -> pl.DataFrame:
    """A row for each layer: ``title`` (the model), ``layer``, ``symmetry`` and its `TERMS`.

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


@style()
def terms_by_layer(rows: pl.DataFrame) -> Figure:
    """Draw `head_terms`: bars for the two terms of every layer, a cross for the first by chance.

    Chance is the expected term within heads if the layer's dimensions are assigned to heads at
    random.
    """
    groups = rows.partition_by("title", maintain_order=True)
    columns = min(COLUMNS, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure = new_figure(min(PAGE, 0.9 + 2.4 * columns), 0.5 + 1.9 * lines)
    axes = panel_grid(figure, len(groups), columns, sharey=True)
    width = 0.38
    for axis, group in zip(axes, groups, strict=True):
        layers = group["layer"].to_numpy()
        within, between, chance = (group[term] for term in TERMS)
        axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
        handles = [
            axis.bar(layers - width / 2, within, width, color=TEAL, label="within heads"),
            axis.bar(layers + width / 2, between, width, color=SAND, label="between heads"),
            *axis.plot(layers - width / 2, chance, label="within heads by chance", **CHANCE),
            axis.hlines(
                group["symmetry"], layers - width, layers + width,
                color=GRAY, linewidth=1, label="sum: the symmetry",
            ),
        ]  # fmt: skip
        axis.set(title=group["title"][0], xlabel="layer")
        axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    for axis in axes[::columns]:
        axis.set_ylabel("symmetry")
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * min(columns, 2))
    return figure
