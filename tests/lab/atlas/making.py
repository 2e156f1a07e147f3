"""Score tables made by hand, for the tests of the atlas."""

from __future__ import annotations

from typing import Any

from tests.lab.figures.making import row

from wqk.tables.score_table import ScoreTable


def layers(
    symmetries: list[float | None],
    directionalities: list[float],
    *,
    metadata: dict[str, Any] | None = None,
    **place: Any,
) -> ScoreTable:
    """A table of one stack, a row for each layer."""
    columns = {"checkpoint": "made/up", "parameters": 1000} | place
    # By the other rule, 0.5: nothing in the atlas may take it.
    rows = [
        row(layer, directionality=0.5, symmetry=symmetry, directionality_excess=excess, **columns)
        for layer, (symmetry, excess) in enumerate(zip(symmetries, directionalities, strict=True))
    ]
    return ScoreTable.from_rows(rows, metadata)
