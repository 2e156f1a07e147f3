"""Tables 1, S2 and S3 of the paper, with your own results next to the printed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import polars as pl

from wqk._console import number
from wqk.atlas.medians import interquartile, of_model, summarize
from wqk.atlas.published import DATA, flags, marks, published, split_flags
from wqk.atlas.rendering import Cell, Sheet, latex, markdown
from wqk.errors import TableError, UnknownName
from wqk.scanning.tables import ScoreTable

Name = Literal["table1", "tableS2", "tableS3"]

FORMATS: dict[str, Callable[[Sheet], str]] = {"markdown": markdown, "latex": latex}

SCORE_OF = {"tableS2": "symmetry", "tableS3": "directionality"}


@dataclass(frozen=True)
class TrainingResult:
    """One line of Table 1: models of one size, recipe and initialization.

    Attributes
    ----------
    size, dataset, initialization
        ``4-layer``, ``Wikipedia``, ``random`` or ``symmetric`` (the printed ones), or others. The
        size of own models adds their width, and the number and size of their training steps.
    loss
        At the end of training, in nats: the mean over seeds.
    loss_interval
        Its 95 % interval, where there are several seeds.
    speed_up, speed_up_interval
        Share of the training steps by which the random start's final loss is reached earlier, from
        −1 to 1 and over seeds; None for the random start itself.
    seeds
        How many runs; None for the printed ones (one).
    """

    size: str
    dataset: str
    initialization: str
    loss: float
    loss_interval: tuple[float, float] | None = None
    speed_up: float | None = None
    speed_up_interval: tuple[float, float] | None = None
    seeds: int | None = None


def paper_table(
    name: Name,
    format: Literal["markdown", "latex"] = "markdown",
    own: ScoreTable | Iterable[TrainingResult] | None = None,
) -> str:
    r"""A table of the paper in its own layout, with footnotes at rows with known problems.

    Parameters
    ----------
    name
        ``table1`` (symmetric initialization), ``tableS2`` (symmetry) or ``tableS3``
        (directionality).
    format
        ``markdown``, or ``latex`` for a booktabs tabular.
    own
        Results to print next to the published ones: for Tables S2 and S3 a score table, in which
        models are found by their hub ids (such as `wqk.survey` of ``paper:language`` gives), of
        several revisions the last; for Table 1 results of training, which get lines of their own
        below the printed ones.

    Raises
    ------
    TableError
        There is no such table or format, the results are of the other kind, or a result of training
        has the name of a printed one or of another.

    Examples
    --------
    >>> for line in paper_table("table1").splitlines()[2:7]:
    ...     print(line)
    | Model | Loss | Speed-up |
    | :-- | --: | --: |
    | **4-layer model** |  |  |
    | Jigsaw | 2.782 |  |
    | Jigsaw (+ symmetric)<sup>a</sup> | 2.758 | 26 % |
    >>> mine = TrainingResult("4 layers of width 64", "jigsaw", "random", loss=2.8, seeds=1)
    >>> print("\n".join(paper_table("table1", own=[mine]).splitlines()[18:20]))
    | **4 layers of width 64** |  |  |  |
    | jigsaw | 2.800 |  | 1 |
    """
    if name not in ("table1", *SCORE_OF):
        tables = ("table1", *SCORE_OF)
        raise UnknownName(
            f"{name}: no such table; expected {', '.join(tables)}", name=name, close=tables
        )
    if format not in FORMATS:
        raise UnknownName(
            f"{format}: no such format; expected {' or '.join(FORMATS)}",
            name=format,
            close=[*FORMATS],
        )
    if name == "table1":
        if isinstance(own, ScoreTable):
            raise TableError("table1 accepts training results (TrainingResult), got a score table")
        sheet = _training(list(own or ()))
    else:
        if not isinstance(own, ScoreTable | None):
            raise TableError(f"{name} accepts a score table, got training results")
        sheet = _scores(SCORE_OF[name], own)
    return FORMATS[format](sheet)


def _scores(score: str, own: ScoreTable | None) -> Sheet:
    """Table S2 or S3: two halves side by side."""
    rows = published().filter(pl.col(score).is_not_null()).to_dicts()
    mine = None if own is None else summarize(own)
    letters = marks(rows)
    lines = [_score_cells(row, score, letters, mine) for row in rows]
    half = len(lines) // 2
    header, alignment = ["Model", "Median", "Interquartile range"], "lrl"
    if mine is not None:
        header, alignment = [*header, "Own median", "Own range"], alignment + "rl"
    return Sheet(
        f"Median {score} over layers, and the distances to the quartiles, as published"
        + ("." if mine is None else ", with own results next to them."),
        header * 2,
        alignment * 2,
        [[*left, *right] for left, right in zip(lines[:half], lines[half:], strict=True)],
        _notes(letters),
    )


def _score_cells(
    row: Mapping[str, Any],
    score: str,
    letters: Mapping[str, str],
    mine: pl.DataFrame | None,
) -> list[Cell]:
    cells = [Cell(row["name"], _letters(row, letters)), *_median_cells(row, score)]
    if mine is not None:
        own_rows = of_model(mine, row).to_dicts()
        cells += _median_cells(own_rows[-1], score) if own_rows else [Cell(""), Cell("")]
    return cells


def _median_cells(row: Mapping[str, Any], score: str) -> list[Cell]:
    if row[score] is None:
        return [Cell("–"), Cell("")]
    median = number(row[score], 2).replace("-", "−")
    return [Cell(median), Cell(f"± {interquartile(row, score)}")]


def _training(own: Sequence[TrainingResult]) -> Sheet:
    """Table 1: sizes below each other, in each the data sets, in each the starts."""
    rows = (
        pl.read_csv(DATA / "table1.csv", comment_prefix="#").with_columns(split_flags()).to_dicts()
    )
    letters = marks(rows)
    lines: list[list[Cell]] = []
    for size, group in groupby(rows, key=lambda row: row["size"]):
        lines.append([Cell(f"{size} model")])
        for row in group:
            result = TrainingResult(**{key: row[key] for key in row if key != "flags"})
            cells = [Cell(_label(result), _letters(row, letters)), *_result_cells(result)]
            lines.append([*cells, Cell("1")] if own else cells)
    names = {(row["size"], row["dataset"], row["initialization"]) for row in rows}
    for size, results in groupby(sorted(own, key=lambda one: one.size), key=lambda one: one.size):
        lines.append([Cell(size)])
        for result in results:
            if _name(result) in names:
                raise TableError(f"table1: two results are called {', '.join(_name(result))}")
            names.add(_name(result))
            lines.append([Cell(_label(result)), *_result_cells(result), Cell(str(result.seeds))])
    return Sheet(
        "Loss at the end of training, and speed-up over the random start, as published"
        + (", and own results below, with 95 % intervals over seeds." if own else "."),
        ["Model", "Loss", "Speed-up", *(["Seeds"] if own else [])],
        "lrrr" if own else "lrr",
        lines,
        _notes(letters),
    )


def _name(result: TrainingResult) -> tuple[str, str, str]:
    return result.size, result.dataset, result.initialization


def _label(result: TrainingResult) -> str:
    start = result.initialization
    return result.dataset if start == "random" else f"{result.dataset} (+ {start})"


def _result_cells(result: TrainingResult) -> list[Cell]:
    """Loss and speed-up, each with its interval over seeds where there is one."""
    loss, speed_up = f"{result.loss:.3f}", ""
    if result.loss_interval:
        loss += " [{:.3f}, {:.3f}]".format(*result.loss_interval)
    if result.speed_up is not None:
        speed_up = f"{100 * result.speed_up:.0f}"
        if result.speed_up_interval:
            low, high = (100 * end for end in result.speed_up_interval)
            speed_up += f" [{low:.0f}, {high:.0f}]"
        speed_up = f"{speed_up} %".replace("-", "−")
    return [Cell(loss), Cell(speed_up)]


def _letters(row: Mapping[str, Any], letters: Mapping[str, str]) -> str:
    return "".join(sorted(letters[flag] for flag in row["flags"]))


def _notes(letters: Mapping[str, str]) -> dict[str, str]:
    """The footnotes of a table: what each letter stands for."""
    known = flags()
    return {mark: known[flag].sentence for flag, mark in letters.items()}
