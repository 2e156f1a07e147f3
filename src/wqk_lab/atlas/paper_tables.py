"""Tables 1, S2 and S3 of the paper, with own results next to the printed ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any, Literal

import polars as pl

from wqk._console import number
from wqk.errors import TableError, UnknownName
from wqk.tables.score_table import ScoreTable
from wqk.tables.sheet import Bar, Cell, Sheet, SheetColumn
from wqk_lab.atlas.ranks import (
    ATLAS_COLUMNS,
    flags,
    interquartile,
    marks,
    of_model,
    published,
    split_flags,
    summarize,
)
from wqk_lab.atlas.reference import REFERENCE_FOLDER

TableName = Literal["table1", "tableS2", "tableS3"]

FORMATS: dict[str, Callable[[Sheet], str]] = {"markdown": Sheet.markdown, "latex": Sheet.latex}

SCORE_OF = {"tableS2": "symmetry", "tableS3": "directionality"}

# Heading of own models that are not in the paper's table.
YOUR_MODELS = "Your models"

# Cells in place of a median and the distances to the quartiles.
NO_SCORE = [Cell(""), Cell("")]


@dataclass(frozen=True)
class TrainingResult:
    """One line of Table 1: models of one size, recipe and initialization.

    Attributes
    ----------
    size, dataset, initialization
        ``4-layer``, ``Wikipedia``, ``random`` or ``symmetric`` for printed results; own results may
        have other values. The size of own models includes width, number of training steps and batch
        size.
    loss
        Loss at the end of training, in nats: the mean over seeds.
    loss_interval
        95 % interval of the loss, if there are several seeds.
    speed_up, speed_up_interval
        Share of the training steps saved until the random start's final loss is reached, from −1 to
        1, and the interval over seeds; None for the random start itself.
    seeds
        Number of runs; None for printed results, from one run.
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
    name: TableName,
    format: Literal["markdown", "latex"] = "markdown",
    own: ScoreTable | Iterable[TrainingResult] | None = None,
    *,
    only_own: bool = False,
) -> str:
    r"""Return a table in the paper's layout, with footnotes on rows with known problems.

    Parameters
    ----------
    name
        ``table1`` (symmetric initialization), ``tableS2`` (symmetry) or ``tableS3``
        (directionality).
    format
        ``markdown``, or ``latex`` for a booktabs tabular.
    own
        Results to print next to the published ones. For Tables S2 and S3, a score table, such as
        that of `wqk.scan`, or of a `wqk.survey` of ``paper:language``; of several revisions or
        steps, the last is used. A model of the paper's table, identified by its Hub id or the last
        part of the id, is printed next to the published row. Other models are printed below, with
        their stack. For Table 1, training results, printed on separate lines below.
    only_own
        For Tables S2 and S3, print only the rows with own results, one below the other.

    Raises
    ------
    TableError
        The table or format is unknown, the results are of the wrong kind or not of plain
        self-attention, two training results have the same name, or ``only_own`` is set for Table 1
        or without own results.

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
    for value, kind, names in (
        (name, "table", ("table1", *SCORE_OF)),
        (format, "format", tuple(FORMATS)),
    ):
        if value not in names:
            raise UnknownName(
                f"{value}: no such {kind}; expected {', '.join(names)}", name=value, close=names
            )
    if name == "table1":
        if isinstance(own, ScoreTable):
            raise TableError("table1 accepts training results (TrainingResult), got a score table")
        if only_own:
            raise TableError("only own rows: expected tableS2 or tableS3, got table1; leave it out")
        table = _training(list(own or ()))
    else:
        if not isinstance(own, ScoreTable | None):
            raise TableError(f"{name} accepts a score table, got training results")
        if only_own and own is None:
            raise TableError(f"only own rows of {name}: expected a score table, got none")
        table = _own_scores(SCORE_OF[name], own) if only_own else _scores(SCORE_OF[name], own)
    return FORMATS[format](table)


def _scores(score: str, own: ScoreTable | None) -> Sheet:
    """Return Table S2 or S3: two halves side by side, and the remaining own models below."""
    rows = published().filter(pl.col(score).is_not_null()).to_dicts()
    letters = marks(rows)
    own_rows = _own_rows(own)
    matches = [_own_row(row, own_rows) for row in rows]
    is_matched = any(matches)
    lines = []
    for row, match in zip(rows, matches, strict=True):
        cells = [Cell(row["name"], marks=_letters(row, letters)), *_median_cells(row, score)]
        if is_matched:
            cells += _median_cells(match, score) if match else NO_SCORE
        lines.append(cells)
    columns = [
        SheetColumn("Model", text=True),
        SheetColumn("Median"),
        SheetColumn("Interquartile range", True),
    ]
    if is_matched:
        columns += [SheetColumn("Own median"), SheetColumn("Own range", text=True)]
    sheet = Sheet(columns * 2, _side_by_side(lines), notes=_notes(letters))
    further = [row for row in own_rows.to_dicts() if row not in matches]
    if further:
        sheet.heading(YOUR_MODELS)
        sheet.rows += _side_by_side(_further_lines(further, score, is_matched))
    sheet.caption = f"Median {score} over layers, and the distances to the quartiles, as published"
    if is_matched:
        sheet.caption += ", with own results next to them"
    if further:
        sheet.caption += "; below them, own models that are not in the paper's table"
    sheet.caption += "."
    return sheet


def _own_scores(score: str, own: ScoreTable | None) -> Sheet:
    """Return the own models of Table S2 or S3, a row for each, next to published rows."""
    published_rows = published().filter(pl.col(score).is_not_null()).to_dicts()
    letters = marks(published_rows)
    own_rows = _own_rows(own)
    columns = [
        SheetColumn("Model", text=True),
        SheetColumn("Median"),
        SheetColumn("Interquartile range", True),
        SheetColumn("Own median"),
        SheetColumn("Own range", text=True),
    ]
    sheet = Sheet(columns, [])
    matched: list[Mapping[str, Any]] = []
    used_letters: dict[str, str] = {}
    for row in published_rows:
        match = _own_row(row, own_rows)
        if match and match not in matched:  # the paper prints some models twice
            matched.append(match)
            used_letters |= {flag: letters[flag] for flag in row["flags"]}
            name = Cell(row["name"], marks=_letters(row, letters))
            sheet.add(name, *_median_cells(row, score), *_median_cells(match, score))
    further = [row for row in own_rows.to_dicts() if row not in matched]
    for cells in _further_lines(further, score, is_matched=True):
        sheet.add(*cells)
    sheet.notes = _notes(used_letters)
    sheet.caption = (
        f"Median {score} over layers, and the distances to the quartiles: as published where the "
        "paper has the model, and own results."
    )
    return sheet


def _own_rows(own: ScoreTable | None) -> pl.DataFrame:
    """Return the last row of each stack of each own checkpoint, with distinct names.

    Raises
    ------
    TableError
        The table has scores, but none that can be compared with the published scores.
    """
    if own is None:
        return pl.DataFrame(schema=ATLAS_COLUMNS)
    rows = summarize(own).unique(["model", "stack"], keep="last", maintain_order=True)
    if len(own) and rows.is_empty():
        raise TableError(
            "the published scores are of plain self-attention; the table has none: scan without "
            "--fold-norm, --bias, --circuit, --gamma and --distance"
        )
    has_namesake = pl.struct("name", "stack").is_duplicated()
    return rows.with_columns(name=pl.when(has_namesake).then("model").otherwise("name"))


def _own_row(row: Mapping[str, Any], own_rows: pl.DataFrame) -> dict[str, Any] | None:
    """Return the last own row of a published row's model, if any."""
    matches = of_model(own_rows, row).to_dicts()
    return matches[-1] if matches else None


def _further_lines(
    rows: Sequence[Mapping[str, Any]], score: str, is_matched: bool
) -> list[list[Cell]]:
    """Return the lines of own models without a published row, in columns of own scores if any."""
    lines = []
    for row in rows:
        cells = _median_cells(row, score)
        if is_matched:
            cells = [*NO_SCORE, *cells]
        lines.append([Cell(row["name"], aside=row["stack"]), *cells])
    return lines


def _side_by_side(lines: list[list[Cell]]) -> list[list[Cell | Bar]]:
    """Return rows of two lines each: the first half on the left, the second on the right."""
    half = (len(lines) + 1) // 2
    rows: list[list[Cell | Bar]] = []
    for left, right in zip_longest(lines[:half], lines[half:]):
        blank = [Cell("")] * len(left)
        rows.append([*left, *(right or blank)])
    return rows


def _median_cells(row: Mapping[str, Any], score: str) -> list[Cell]:
    if row[score] is None:
        return [Cell("–"), Cell("")]
    median = number(row[score], 2).replace("-", "−")
    return [Cell(median), Cell(f"± {interquartile(row, score)}")]


def _training(own: Sequence[TrainingResult]) -> Sheet:
    """Return Table 1, by size, data set and start, with own results below."""
    rows = (
        pl.read_csv(REFERENCE_FOLDER / "table1.csv", comment_prefix="#")
        .with_columns(split_flags())
        .to_dicts()
    )
    letters = marks(rows)
    results = []
    for row in rows:
        mark = _letters(row, letters)
        del row["flags"]
        results.append((f"{row['size']} model", TrainingResult(**row), mark))
    results += [
        (training_result.size, training_result, "")
        for training_result in sorted(own, key=lambda training_result: training_result.size)
    ]
    caption = "Loss at the end of training, and speed-up over the random start, as published" + (
        ", and own results below, with 95 % intervals over seeds." if own else "."
    )
    sheet = Sheet.of("Model", "Loss", "Speed-up", *(["Seeds"] if own else []), text=["Model"])
    sheet.caption, sheet.notes = caption, _notes(letters)
    names = set()
    for heading, group in groupby(results, key=lambda entry: entry[0]):
        sheet.heading(heading)
        for _, result, mark in group:
            name = (result.size, result.dataset, result.initialization)
            if name in names:
                raise TableError(f"table1: two results are called {', '.join(name)}")
            names.add(name)
            start = result.initialization
            label = result.dataset if start == "random" else f"{result.dataset} (+ {start})"
            seeds = [Cell(str(result.seeds or 1))] if own else []
            sheet.add(Cell(label, marks=mark), *_result_cells(result), *seeds)
    return sheet


def _result_cells(result: TrainingResult) -> list[Cell]:
    """Return the loss and the speed-up, with intervals over seeds, if any."""
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
    """Return the footnotes of a table."""
    return {letter: flags()[flag].sentence for flag, letter in letters.items()}
