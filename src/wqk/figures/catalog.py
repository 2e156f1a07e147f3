"""All figures by name: the numbers behind each, and the function that draws them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import polars as pl

from wqk._files import check_output, write_whole
from wqk._style import PICTURES, save_figure
from wqk.errors import RunError, UnknownName
from wqk.figures import distances, dose, heads, models, starts, terms, training
from wqk.figures.matrix import examples
from wqk.figures.published import published_pairs, published_starts

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.figure import Figure

    from wqk.figures.sources import Sources


@dataclass(frozen=True)
class Entry:
    """One figure.

    Attributes
    ----------
    numbers
        What it shows, as a frame in long form, from the sources.
    draw
        The figure of these numbers.
    stand_in
        Which part of the demo models' scan replaces missing sources.
    with_matrices
        Whether ``draw`` also takes examples of the sources' matrices.
    """

    numbers: Callable[[Sources], pl.DataFrame]
    draw: Callable[..., Figure]
    stand_in: Literal["table", "blocks"] | None = None
    with_matrices: bool = False


def _of_models(name: str, sources: Sources) -> pl.DataFrame:
    return models.model_rows(name, sources.scores)


def _of_pairs(name: str, sources: Sources) -> pl.DataFrame:
    """From the given runs, from the paper's where there are none, or from both."""
    if not sources.runs:
        return published_pairs(name)
    if name == "fig3":
        return training.one_pair(sources.runs)
    own = training.all_pairs(sources.runs, name)
    return pl.concat([own, published_pairs(name)]) if sources.published else own


FIGURES: dict[str, Entry] = {
    "fig2": Entry(partial(_of_models, "fig2"), models.by_size, "blocks", with_matrices=True),
    "s1": Entry(partial(_of_models, "s1"), models.by_size),
    "s2": Entry(partial(_of_models, "s2"), models.by_size),
    "fig3": Entry(partial(_of_pairs, "fig3"), training.medians_and_layers),
    "s3": Entry(partial(_of_pairs, "s3"), training.medians_by_comparison),
    "s4": Entry(partial(_of_pairs, "s4"), training.layers_by_comparison),
    "s5": Entry(
        lambda sources: starts.start_curves(sources.runs) if sources.runs else published_starts(),
        starts.loss_and_symmetry,
    ),
    "losses": Entry(
        lambda sources: starts.losses_by_start(sources.runs), starts.losses_and_differences
    ),
    "dose": Entry(lambda sources: dose.dose_rows(sources.runs, sources.level), dose.loss_by_scale),
    "updates": Entry(
        lambda sources: training.update_curves(sources.runs), training.medians_by_comparison
    ),
    "heads": Entry(
        lambda sources: terms.head_terms(sources.scores), terms.terms_by_layer, stand_in="table"
    ),
    "coupling": Entry(
        lambda sources: heads.coupling_rows(sources.blocks),
        heads.coupling_by_layer,
        stand_in="blocks",
    ),
    "distances": Entry(
        lambda sources: distances.distance_rows(sources.scores), distances.distances_by_layer
    ),
}


# The figures in which the paper's runs have rows of their own below the user's.
WITH_PUBLISHED = ("s3", "s4")

# The figure that shows when a loss falls below a level.
WITH_LEVEL = "dose"

# What a figure is saved as: a picture, or the numbers behind it.
ENDINGS = (*PICTURES, ".csv")


def numbers(name: str, sources: Sources) -> pl.DataFrame:
    """The numbers that a figure shows.

    Raises
    ------
    WqkError
        The figure does not exist, the sources lack what it needs, or it cannot combine them.

    Examples
    --------
    >>> from wqk.figures import Sources
    >>> numbers("fig2", Sources()).height
    74
    """
    entry = _entry(name)
    if sources.published and sources.runs and name not in WITH_PUBLISHED:
        raise RunError(
            f"published=True draws the paper's runs below yours in {' and '.join(WITH_PUBLISHED)}; "
            f"got {name}"
        )
    if sources.level is not None and name != WITH_LEVEL:
        raise RunError(f"level={sources.level:g} is for {WITH_LEVEL}; got {name}: leave it out")
    return entry.numbers(sources)


def draw(name: str, sources: Sources) -> Figure:
    """A figure, for `save_figure` or a notebook.

    Raises
    ------
    WqkError
        As for `numbers`; or matplotlib is not installed.

    Examples
    --------
    >>> from wqk.figures import Sources
    >>> [axis.get_ylabel() for axis in draw("fig2", Sources()).axes]
    ['symmetry', 'directionality (excess)']
    """
    entry, rows = _entry(name), numbers(name, sources)
    return entry.draw(rows, examples(sources.blocks)) if entry.with_matrices else entry.draw(rows)


def save(name: str, sources: Sources, path: Path) -> None:
    """Draw a figure into a file, or write its numbers; whole or not at all.

    Raises
    ------
    WqkError
        As for `draw`; or the file has another ending or cannot be written.
    """
    check_ending(path)
    if path.suffix == ".csv":
        plain = numbers(name, sources).with_columns(pl.col(pl.List(pl.String)).list.join(" "))
        write_whole(path, plain.write_csv().encode())
    else:
        save_figure(draw(name, sources), path)


def check_ending(path: Path) -> None:
    """Raise `OutputError` if no figure can be written to this path."""
    check_output(path, "a figure", ENDINGS)


def _entry(name: str) -> Entry:
    if name not in FIGURES:
        raise UnknownName(
            f"{name}: no such figure; figures are {', '.join(FIGURES)}", name=name, close=[*FIGURES]
        )
    return FIGURES[name]
