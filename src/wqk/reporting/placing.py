"""Where scores stand among those of other models, as far as an installed package knows some."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from wqk.tables.score_table import ScoreTable

# The group of entry points: each is a function of a score table, as `wqk_lab.atlas.place` is.
PLACES = "wqk.places"


def place(table: ScoreTable) -> list[Any]:
    """The place of each checkpoint and stack of a table among models that a package knows.

    As text, each is one sentence; it has the ``name`` of the checkpoint, its ``stack``, a second
    sentence, ``meaning``, the values that were compared, and the ``others``.
    """
    return [found for point in entry_points(group=PLACES) for found in point.load()(table)]
