"""Where a scan stands among the published encoders and decoders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from wqk.atlas.medians import summarise
from wqk.atlas.published import published

if TYPE_CHECKING:
    from collections.abc import Mapping

    import polars as pl

    from wqk.tables import ScoreTable


@dataclass(frozen=True)
class Standing:
    """How many of some published models a scan exceeds, at the two printed decimals.

    Attributes
    ----------
    models
        How many there are.
    less_symmetric
        Those with a smaller median symmetry; None where the scan has none.
    less_directional
        Those with a larger median directionality by excess, in which columns dominate less; None
        where the scan has none.
    """

    models: int
    less_symmetric: int | None
    less_directional: int | None


@dataclass(frozen=True)
class Placement:
    """One stack of a scan among the sound published models; as text, one sentence.

    Attributes
    ----------
    name, stack
        The checkpoint, and which stack of it.
    symmetry, directionality
        Its medians over layers; directionality by excess.
    encoders, decoders
        Where they stand.
    """

    name: str
    stack: str
    symmetry: float | None
    directionality: float | None
    encoders: Standing
    decoders: Standing

    def __str__(self) -> str:
        encoders, decoders = self.encoders, self.decoders
        among = f"{encoders.models} published encoders", f"{decoders.models} decoders"
        parts: list[str] = []
        for what, more, fewer in (
            ("more symmetric than", encoders.less_symmetric, decoders.less_symmetric),
            ("columns dominate more than in", encoders.less_directional, decoders.less_directional),
        ):
            if more is not None and not parts:
                parts.append(f"{what} {more} of {among[0]} and {fewer} of {among[1]}")
            elif more is not None:
                parts.append(f"{what} {more} and {fewer} of them")
        return "; ".join(parts)


def place(table: ScoreTable) -> list[Placement]:
    """Where the medians of a scan stand among the published rows that are sound.

    Every published model counts once, with its last row.

    Returns
    -------
    list of Placement
        One for each checkpoint and stack with plain self-attention scores; empty for tables of
        other forms (folded norms, biases, another circuit, distance or gamma).

    Examples
    --------
    >>> import wqk
    >>> for placement in place(wqk.scan(wqk.demo_model("encoder"))):
    ...     print(placement)
    more symmetric than 18 of 24 published encoders and 15 of 15 decoders;
    columns dominate more than in 0 and 0 of them
    """
    return [
        Placement(
            row["name"],
            row["stack"],
            row["symmetry"],
            row["directionality"],
            _standing(row, "encoder"),
            _standing(row, "decoder"),
        )
        for row in summarise(table).iter_rows(named=True)
        if row["directionality"] is not None
    ]


def _standing(row: Mapping[str, Any], stack: str) -> Standing:
    models = _models().filter(stack=stack)
    symmetry, directionality = (
        None if row[score] is None else round(row[score], 2)
        for score in ("symmetry", "directionality")
    )
    return Standing(
        models.height,
        None if symmetry is None else (models["symmetry"] < symmetry).sum(),
        None if directionality is None else (models["directionality"] > directionality).sum(),
    )


@cache
def _models() -> pl.DataFrame:
    """Every sound published model once."""
    return published().filter("sound").unique(subset="model", keep="last")
