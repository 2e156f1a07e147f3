"""Tables 1, S2 and S3 of the paper, with one's own results beside the printed ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import polars as pl

from wqk.atlas.medians import hundredths, interquartile, of_model, summarize
from wqk.atlas.published import DATA, flags, marks, published, split_flags
from wqk.atlas.rendering import Cell, Sheet, latex, markdown
from wqk.errors import TableError, UnknownName
from wqk.scanning.tables import ScoreTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

Name = Literal["table1", "tableS2", "tableS3"]

FORMATS: dict[str, Callable[[Sheet], str]] = {"markdown": markdown, "latex": latex}

SCORE_OF = {"tableS2": "symmetry", "tableS3": "directionality"}


@dataclass(frozen=True)
class TrainingResult:
    """One line of Table 1: models of a size, trained alike from one kind of start.

    Attributes
    ----------
    size, dataset, initialization
        ``4-layer``, ``Wikipedia``, ``random`` or ``symmetric`` (the printed ones), or others.
    loss, loss_sd
        At the end of training, in nats: the mean over seeds, and its standard deviation.
    speed_up, speed_up_sd
        Share of the training steps by which the random start's final loss is reached earlier, from
        0 to 1; None for the random start itself.
    """

    size: str
    dataset: str
    initialization: str
    loss: float
    loss_sd: float | None = None
    speed_up: float | None = None
    speed_up_sd: float | None = None


def paper_table(
    name: Name,
    format: Literal["markdown", "latex"] = "markdown",
    own: ScoreTable | Iterable[TrainingResult] | None = None,
) -> str:
    """A table of the paper in its arrangement, with footnotes at rows that are not what they seem.

    Parameters
    ----------
    name
        ``table1`` (symmetric initialization), ``tableS2`` (symmetry) or ``tableS3``
        (directionality).
    format
        ``markdown``, or ``latex`` for a booktabs tabular.
    own
        Results to print beside the published ones: for Tables S2 and S3 a score table, in which
        models are found by their hub ids (such as `wqk.survey` of ``paper:language`` gives), of
        several revisions the last; for Table 1 results of training. Sizes, data sets and starts
        that the paper lacks get lines of their own.

    Raises
    ------
    TableError
        There is no such table or format, or the results are of the other kind.

    Examples
    --------
    >>> for line in paper_table("table1").splitlines()[2:7]:
    ...     print(line)
    | Model | Loss | Speed-up |
    | :-- | --: | --: |
    | **4-layer model** |  |  |
    | Jigsaw | 2.782 |  |
    | Jigsaw (+ symmetric)<sup>a</sup> | 2.758 | 26 % |
    >>> mine = TrainingResult("4-layer", "Jigsaw", "random", loss=2.8, loss_sd=0.02)
    >>> print(paper_table("table1", own=[mine]).splitlines()[5])
    | Jigsaw | 2.782 |  | 2.800 ± 0.020 |  |
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
            raise TableError("table1 takes results of training beside its own, got a score table")
        sheet = _training(list(own or ()))
    else:
        if not isinstance(own, ScoreTable | None):
            raise TableError(f"{name} takes a score table beside its own, got results of training")
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
        + ("." if mine is None else ", with own results beside them."),
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
        found = of_model(mine, row).to_dicts()
        cells += _median_cells(found[-1], score) if found else [Cell(""), Cell("")]
    return cells


def _median_cells(row: Mapping[str, Any], score: str) -> list[Cell]:
    if row[score] is None:
        return [Cell("–"), Cell("")]
    median = hundredths(row[score]).replace("-", "−")
    return [Cell(median), Cell(f"± {interquartile(row, score)}")]


def _training(own: Sequence[TrainingResult]) -> Sheet:
    """Table 1: sizes below each other, in each the data sets, in each the starts."""
    rows = (
        pl.read_csv(DATA / "table1.csv", comment_prefix="#").with_columns(split_flags()).to_dicts()
    )
    letters = marks(rows)
    footnotes = {_key(row): _letters(row, letters) for row in rows}
    printed = {_key(row): TrainingResult(**_without_flags(row)) for row in rows}
    mine = {_key(asdict(result)): result for result in own}
    # Every part of a key ranks by its first appearance, the printed ones first.
    keys = list(dict.fromkeys([*printed, *mine]))
    ranks = [list(dict.fromkeys(parts)) for parts in zip(*keys, strict=True)]
    keys.sort(key=lambda key: [rank.index(part) for rank, part in zip(ranks, key, strict=True)])
    lines: list[list[Cell]] = []
    for size, group in groupby(keys, key=lambda key: key[0]):
        lines.append([Cell(f"{size} model")])
        for key in group:
            _, dataset, start = key
            label = dataset if start == "random" else f"{dataset} (+ {start})"
            cells = [Cell(label, footnotes.get(key, "")), *_result_cells(printed.get(key))]
            lines.append([*cells, *(_result_cells(mine.get(key)) if mine else [])])
    return Sheet(
        "Loss at the end of training, and speed-up over the random start, as published"
        + (", with own results beside them." if mine else "."),
        ["Model", "Loss", "Speed-up", *(["Own loss", "Own speed-up"] if mine else [])],
        "lrrrr" if mine else "lrr",
        lines,
        _notes(letters),
    )


def _key(result: Mapping[str, Any]) -> tuple[str, str, str]:
    return result["size"], result["dataset"], result["initialization"]


def _without_flags(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "flags"}


def _result_cells(result: TrainingResult | None) -> list[Cell]:
    """Loss and speed-up, each with its deviation over seeds where there is one."""
    if result is None:
        return [Cell(""), Cell("")]
    loss = f"{result.loss:.3f}"
    if result.loss_sd is not None:
        loss += f" ± {result.loss_sd:.3f}"
    if result.speed_up is None:
        return [Cell(loss), Cell("")]
    speed_up = f"{100 * result.speed_up:.0f}".replace("-", "−")
    if result.speed_up_sd is not None:
        speed_up += f" ± {100 * result.speed_up_sd:.0f}"
    return [Cell(loss), Cell(f"{speed_up} %")]


def _letters(row: Mapping[str, Any], letters: Mapping[str, str]) -> str:
    return "".join(sorted(letters[flag] for flag in row["flags"]))


def _notes(letters: Mapping[str, str]) -> dict[str, str]:
    """The footnotes of a table: what each letter stands for."""
    known = flags()
    return {mark: known[flag].sentence for flag, mark in letters.items()}
