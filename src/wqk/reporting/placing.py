"""A report's models among the published ones: as sentences, and as points of a figure."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from wqk.atlas import place, sound_models
from wqk.scanning.tables import ScoreTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk.atlas import Placement
    from wqk.reporting.groups import Group


def placements(groups: Sequence[Group]) -> dict[int, Placement]:
    """The rank of each comparable group among the published models, by the group's number."""
    placed = {
        number: place(ScoreTable(group.latest, group.metadata))
        for number, group in enumerate(groups)
    }
    return {number: found[0] for number, found in placed.items() if found}


def placement_list(groups: Sequence[Group], placed: dict[int, Placement]) -> str:
    """One sentence for each, as HTML."""
    items = (
        f"<li>{escape(groups[number].label)}: {escape(str(placement))}.</li>"
        for number, placement in placed.items()
    )
    return f"<ul>{''.join(items)}</ul>"


def points(placed: dict[int, Placement]) -> dict[str, Any] | None:
    """The sound published models and the report's own, as the page's script draws them."""
    own = [
        {"group": number, "symmetry": p.symmetry.value, "directionality": p.directionality.value}
        for number, p in placed.items()
        if p.symmetry and p.directionality
    ]
    rows = sound_models().select("name", "stack", "symmetry", "directionality").drop_nulls()
    return {"models": rows.to_dicts(), "own": own} if own else None
