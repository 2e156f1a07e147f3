"""Comparing a scan with the published row of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from wqk.errors import TableError
from wqk.tables.score_table import ScoreTable
from wqk_lab.atlas.ranks import of_model, summarize

if TYPE_CHECKING:
    import polars as pl

# Largest differences of medians, both at the two printed decimals, that count as agreement.
# Published symmetries of one model agree to the third decimal. Directionality depends on the few
# norms beyond a threshold: published values of one model differ by up to 0.04, and a slightly
# fine-tuned BERT-base differs from its row by 0.02.
TOLERANCES = {"symmetry": 0.01, "directionality": 0.05}


@dataclass(frozen=True)
class Comparison:
    """A published row and a scan of its model.

    Attributes
    ----------
    row, scan
        Both with the columns of `published`.
    differences
        Scan minus published of the medians, at two decimals, for every score that both have.
    """

    row: Mapping[str, Any]
    scan: Mapping[str, Any]
    differences: Mapping[str, float]

    @property
    def verdict(self) -> Literal["agrees", "differs", "artifact"]:
        """``artifact`` if the row is not sound, ``differs`` if a score is `beyond` tolerance."""
        if not self.row["sound"]:
            return "artifact"
        return "differs" if self.beyond else "agrees"

    @property
    def beyond(self) -> list[str]:
        """The scores that differ by more than 0.01 (symmetry) or 0.05 (directionality)."""
        return [score for score, by in self.differences.items() if abs(by) > TOLERANCES[score]]


def compare(table: ScoreTable, row: Mapping[str, Any]) -> Comparison:
    """Compare a scan with a published row.

    Parameters
    ----------
    table
        A scan of the row's model; of several checkpoints, the one with the row's Hub id is used.
    row
        A row of `published` or `lookup`, as a mapping.

    Raises
    ------
    TableError
        The table has no plain self-attention scores of the row's stack, or several checkpoints of
        which not exactly one has the row's name.

    Examples
    --------
    >>> import wqk
    >>> from wqk_lab.atlas import lookup
    >>> row = lookup("BERT-mini").row(0, named=True)
    >>> result = compare(wqk.scan(wqk.demo_model("encoder")), row)
    >>> result.verdict, result.differences["symmetry"]
    ('differs', -0.02)
    """
    scan = _matching(summarize(table), row)
    differences = {
        score: round(round(scan[score], 2) - row[score], 2)
        for score in TOLERANCES
        if scan[score] is not None and row[score] is not None
    }
    if not differences:
        raise TableError(f"{scan['name']}: none of its layers has a score to compare")
    return Comparison(row, scan, differences)


def _matching(rows: pl.DataFrame, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a scan to compare with a published one."""
    if rows.is_empty():
        raise TableError(
            "published scores are comparable only with self-attention, circuit qk, distance 0 and "
            "gamma 2, without folded norms and biases; the table has no such row"
        )
    named = of_model(rows, row)
    matching = named if named.height else rows
    checkpoints = matching.select("name", "model").unique(maintain_order=True)
    if checkpoints.height > 1:
        which = f"of the name {row['model']}" if named.height else f"none named {row['model']}"
        raise TableError(
            f"expected the scores of one checkpoint, got {checkpoints.height}, {which}; keep one"
        )
    if matching.height > 1:
        matching = matching.filter(stack=row["stack"])
    if matching.height != 1:
        stacks = ", ".join(rows["stack"].unique(maintain_order=True))
        raise TableError(f"{row['name']}: a row of the {row['stack']}; the table has {stacks}")
    return matching.row(0, named=True)
