"""Score tables made by hand, for the tests of the atlas."""

from __future__ import annotations

from typing import Any

from wqk.tables.score_table import ScoreTable


def layers(
    symmetries: list[float | None],
    directionalities: list[float],
    *,
    metadata: dict[str, Any] | None = None,
    **place: Any,
) -> ScoreTable:
    """A table of one stack, a row for each layer."""
    shared = {
        "checkpoint": "made/up",
        "parameters": 1000,
        "stack": "encoder",
        "kind": "self",
        "circuit": "qk",
        "distance": 0,
        "status": "ok",
    } | place
    rows = [
        {
            **shared,
            "layer": layer,
            "symmetry": symmetry,
            "directionality": 0.5,  # by the other rule; nothing here may take it
            "directionality_excess": directionality,
        }
        for layer, (symmetry, directionality) in enumerate(
            zip(symmetries, directionalities, strict=True)
        )
    ]
    return ScoreTable.from_rows(rows, metadata)
