"""All figures by name: the source of the numbers, and the function that draws the figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import polars as pl

from wqk._console import without_formulas
from wqk._files import check_output, write_atomically
from wqk._style import PICTURES, save_figure
from wqk.errors import RunError, TableError, UnknownName
from wqk_lab.figures import by_layer, convert, dose, dynamics, model_sizes, paired, starts
from wqk_lab.figures.by_layer import examples
from wqk_lab.figures.paper_curves import published_pairs, published_starts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from wqk_lab.figures.sources import Sources


@dataclass(frozen=True)
class FigureEntry:
    """A figure: the numbers as a frame in long form, and the function that draws the figure."""

    numbers: Callable[[Sources], pl.DataFrame]
    draw: Callable[..., Figure]
    # Without sources, this part of a scan of the demo's models is drawn.
    stand_in: Literal["table", "blocks"] | None = None
    # Whether `draw` also takes examples of the sources' matrices.
    with_matrices: bool = False


# Title of given runs next to the paper's, if a table does not name their corpus.
UNNAMED_RUNS = "these runs"


def _models(name: str, sources: Sources) -> pl.DataFrame:
    return model_sizes.model_rows(name, sources.scores, sources.parameters)


def _pairs(name: str, sources: Sources) -> pl.DataFrame:
    """Return the curves of the given runs, by default of the paper's runs, or of both."""
    runs = sources.runs_with_steps
    if not runs:
        _require_steps(name, sources)
        return published_pairs(name)
    curves_of_runs = dynamics.pair_curves(runs, name)
    if not sources.published:
        return curves_of_runs
    named = pl.col("comparison").replace("", UNNAMED_RUNS)
    return pl.concat([curves_of_runs.with_columns(named), published_pairs(name)])


def _starts(sources: Sources) -> pl.DataFrame:
    runs = sources.runs_with_steps
    if not runs:
        _require_steps("s5", sources)
        return published_starts()
    return starts.start_curves(runs)


def _require_steps(name: str, sources: Sources) -> None:
    """Raise `TableError` if published curves would be drawn instead of the given sources."""
    if sources.table is not None:
        raise TableError(
            f"{name} draws scores over training; no model of the table has several steps: expected "
            "a folder of checkpoint-*, runs of wqk lab train, or a table with a column of steps, "
            "as of a monitor, wqk survey, wqk watch, or wqk scan RUN --out FILE"
        )


FIGURES = {
    "fig2": FigureEntry(
        partial(_models, "fig2"), model_sizes.by_size, "blocks", with_matrices=True
    ),
    "s1": FigureEntry(partial(_models, "s1"), model_sizes.by_size),
    "s2": FigureEntry(partial(_models, "s2"), model_sizes.by_size),
    "fig3": FigureEntry(partial(_pairs, "fig3"), dynamics.medians_and_layers),
    "s3": FigureEntry(partial(_pairs, "s3"), dynamics.medians_by_comparison),
    "s4": FigureEntry(partial(_pairs, "s4"), dynamics.layers_by_comparison),
    "s5": FigureEntry(_starts, starts.loss_and_symmetry),
    "losses": FigureEntry(
        lambda sources: starts.losses_by_start(sources.runs), starts.losses_and_differences
    ),
    "dose": FigureEntry(
        lambda sources: dose.dose_rows(sources.runs, sources.level), dose.loss_by_scale
    ),
    "convert": FigureEntry(lambda sources: convert.convert_rows(sources.runs), convert.dose_curves),
    "updates": FigureEntry(
        lambda sources: dynamics.update_curves(sources.runs), dynamics.medians_by_comparison
    ),
    "pairs": FigureEntry(lambda sources: paired.pair_rows(sources.pairs), paired.paired_panels),
    "heads": FigureEntry(
        lambda sources: by_layer.head_terms(sources.scores), by_layer.terms_by_layer, "table"
    ),
    "coupling": FigureEntry(
        lambda sources: by_layer.coupling_rows(sources.blocks), by_layer.coupling_by_layer, "blocks"
    ),
    "distances": FigureEntry(
        lambda sources: by_layer.distance_rows(sources.scores), by_layer.distances_by_layer
    ),
}

# The figures that can show the paper's runs below one's own, and when a loss falls below a level.
WITH_PUBLISHED = ("s3", "s4")
WITH_LEVEL = "dose"


def numbers(name: str, sources: Sources) -> pl.DataFrame:
    """Return the numbers of a figure.

    Raises
    ------
    WqkError
        The figure does not exist, the sources lack its numbers, or the figure cannot combine the
        sources.

    Examples
    --------
    >>> from wqk_lab.figures import Sources
    >>> numbers("fig2", Sources()).height
    74
    """
    if name not in FIGURES:
        raise UnknownName(
            f"{name}: no such figure; figures are {', '.join(FIGURES)}", name=name, close=[*FIGURES]
        )
    if sources.published and sources.runs_with_steps and name not in WITH_PUBLISHED:
        raise RunError(
            f"published=True draws the paper's runs below yours in {' and '.join(WITH_PUBLISHED)}; "
            f"got {name}"
        )
    if sources.level is not None and name != WITH_LEVEL:
        raise RunError(f"level={sources.level:g} is for {WITH_LEVEL}; got {name}: leave it out")
    if sources.parameters and name not in model_sizes.SETS:
        raise RunError(
            f"numbers of parameters are for {', '.join(model_sizes.SETS)}; got {name}: leave them "
            "out"
        )
    return FIGURES[name].numbers(sources)


def draw(name: str, sources: Sources) -> Figure:
    """Draw a figure, for `save_figure` or a notebook.

    Raises
    ------
    WqkError
        As for `numbers`; or matplotlib is not installed.

    Examples
    --------
    >>> from wqk_lab.figures import Sources
    >>> [axis.get_ylabel() for axis in draw("fig2", Sources()).axes]
    ['symmetry', 'directionality (excess)']
    """
    rows = numbers(name, sources)
    entry = FIGURES[name]
    if entry.with_matrices:
        return entry.draw(rows, examples(sources.blocks))
    return entry.draw(rows)


def save(name: str, sources: Sources, path: Path) -> None:
    """Write a figure, or its numbers as ``.csv``, atomically.

    Raises
    ------
    WqkError
        As for `draw`; or the file has an unknown ending, or cannot be written.
    """
    check_ending(path)
    if path.suffix == ".csv":
        plain = numbers(name, sources).with_columns(pl.col(pl.List(pl.String)).list.join(" "))
        write_atomically(path, without_formulas(plain).write_csv().encode())
    else:
        save_figure(draw(name, sources), path)


def check_ending(path: Path) -> None:
    """Raise `OutputError` if no figure can be written to this path."""
    check_output(path, "a figure", (*PICTURES, ".csv"))
