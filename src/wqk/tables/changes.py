"""Largest changes of scores from the first to the last step of a run.

Medians over layers do not show the growth of a single head. Changes of heads and layers are
measured the same way: norms by their ratio, other scores by their difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from wqk._console import number

# Columns that a row keeps over the steps of a run.
PLACE = ("run", "stack", "kind", "circuit", "distance", "layer", "head")

# Scores with ratios as changes, and scores with differences as changes.
RATIOS = ("norm",)
DIFFERENCES = ("symmetry", "directionality_excess")

# Smaller changes are not named: half as much again, and a tenth.
SMALLEST_RATIO, SMALLEST_DIFFERENCE = 1.5, 0.1


@dataclass(frozen=True)
class ScoreChange:
    """The change of one score of one layer or head.

    Attributes
    ----------
    score
        Name of the score's column.
    stack, kind, layer, head
        Place of the row; the head is None for the row of a whole layer.
    steps
        First and last step.
    before, after
        Score at these steps.
    """

    score: str
    stack: str
    kind: str
    layer: int
    head: int | None
    steps: tuple[int, int]
    before: float
    after: float

    def __str__(self) -> str:
        place = f"layer {self.layer}"
        if self.head is not None:
            place += f", head {self.head}"
        name = self.score.removesuffix("_excess")
        sentence = f"{name} of {place}: {number(self.before)} to {number(self.after)}"
        if self.score in RATIOS:
            ratio = self.after / self.before
            verb = "grew" if ratio > 1 else "shrank"
            sentence += f", {verb} {number(max(ratio, 1 / ratio), 1)}-fold"
        return sentence


def largest_changes(scores: pl.DataFrame) -> list[ScoreChange]:
    """Return the largest change of each score over the steps, if it is not small.

    ``scores`` is the frame of a score table.

    Examples
    --------
    >>> from wqk.tables.score_table import ScoreTable
    >>> rows = [
    ...     {"checkpoint": f"run/checkpoint-{step}", "step": step, "layer": 0, "head": head,
    ...      "norm": 1.0 + 6.6 * (step == 9) * (head == 1)}
    ...     for step in (0, 9) for head in (0, 1)
    ... ]
    >>> print(*largest_changes(ScoreTable.from_rows(rows).frame))
    norm of layer 0, head 1: 1.000 to 7.600, grew 7.6-fold
    """
    run = pl.col("checkpoint").fill_null("").str.replace(r"[/\\][^/\\]*$", "")
    frame = scores.filter(pl.col("step").is_not_null()).with_columns(run.alias("run"))
    if frame["step"].n_unique() < 2:
        return []
    changes = []
    for score in (*RATIOS, *DIFFERENCES):
        change = _largest(frame, score)
        if change is not None:
            changes.append(change)
    return changes


def _largest(frame: pl.DataFrame, score: str) -> ScoreChange | None:
    """Return the largest change of one score; None if the largest change is small."""
    ordered = frame.filter(pl.col(score).is_finite()).sort("step")
    ends = ordered.group_by(PLACE, maintain_order=True).agg(
        pl.col("step").first().alias("first"),
        pl.col("step").last().alias("last"),
        pl.col(score).first().alias("before"),
        pl.col(score).last().alias("after"),
    )
    if score in RATIOS:
        ends = ends.filter((pl.col("before") > 0) & (pl.col("after") > 0))
        size = (pl.col("after") / pl.col("before")).log().abs()
    else:
        size = (pl.col("after") - pl.col("before")).abs()
    ends = ends.with_columns(size.alias("size")).sort("size", descending=True)
    if not ends.height:
        return None
    row = ends.row(0, named=True)
    if _is_small(score, row["before"], row["after"]):
        return None
    return ScoreChange(
        score=score,
        stack=row["stack"],
        kind=row["kind"],
        layer=row["layer"],
        head=row["head"],
        steps=(row["first"], row["last"]),
        before=row["before"],
        after=row["after"],
    )


def _is_small(score: str, before: float, after: float) -> bool:
    """Return whether a change of a score is too small to report."""
    if score in RATIOS:
        return max(after / before, before / after) < SMALLEST_RATIO
    return abs(after - before) < SMALLEST_DIFFERENCE


def sentences(scores: pl.DataFrame) -> Iterator[str]:
    """Yield a sentence about the largest changes over the steps of a run, if any are large."""
    changes = largest_changes(scores)
    if changes:
        first, last = changes[0].steps
        listed = "; ".join(map(str, changes))
        hint = ""
        if all(change.head is None for change in changes):
            hint = " (--heads names heads)"
        yield f"changed most from step {first:,} to {last:,}: {listed}{hint}"
