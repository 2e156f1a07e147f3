"""A scan's rank among the published encoders and decoders."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import polars as pl

from wqk.comparing.medians import summarize
from wqk.comparing.published import published
from wqk.tables.schema import statuses
from wqk.tables.score_table import ScoreTable

# A larger symmetry exceeds a smaller one; a smaller directionality exceeds a larger one.
SIGNS = {"symmetry": 1, "directionality": -1}


@dataclass(frozen=True)
class Standing:
    """How many of the published models with a score a value exceeds."""

    exceeded: int
    models: int

    def __str__(self) -> str:
        return f"{self.exceeded} of {self.models}"


@dataclass(frozen=True)
class Position:
    """A median over layers, and how many published encoders and decoders it exceeds.

    Attributes
    ----------
    value
        The scan's median. A symmetry exceeds smaller ones; a directionality, by excess, exceeds
        larger ones, of models whose columns dominate less.
    encoders, decoders
        Compared at the two printed decimals; equal values are not exceeded.
    """

    value: float
    encoders: Standing
    decoders: Standing


@dataclass(frozen=True)
class Placement:
    """One stack of a scan among the sound published models; as text, one sentence.

    Attributes
    ----------
    name, stack
        The checkpoint, and which stack of it.
    symmetry, directionality
        The ranks of its medians; None without a median.
    """

    name: str
    stack: str
    symmetry: Position | None
    directionality: Position | None

    def __str__(self) -> str:
        return "; ".join(
            f"{what} {position.encoders} published encoders and {position.decoders} decoders"
            for what, position in (
                ("more symmetric than", self.symmetry),
                ("columns more dominant than in", self.directionality),
            )
            if position is not None
        )

    @property
    def meaning(self) -> str:
        """Of which published models such a symmetry is typical, in one sentence.

        Typical is what lies between the 10 % and the 90 % quantile. Empty without a symmetry.
        """
        if self.symmetry is None:
            return ""
        value = round(self.symmetry.value, 2) + 0.0
        ranges = {stack: typical_symmetry(stack) for stack in ("encoder", "decoder")}
        said = {
            stack: f"{stack}s ({low:.2f} to {high:.2f})" for stack, (low, high) in ranges.items()
        }
        holds = [stack for stack, (low, high) in ranges.items() if low <= value <= high]
        others = [stack for stack in ranges if stack not in holds]
        both = f"published {said['encoder']} and {said['decoder']}"
        if not others:
            what = f"found among both {both}"
        elif holds:
            what = f"typical of published {said[holds[0]]}, not of {said[others[0]]}"
        elif value > max(high for _, high in ranges.values()):
            what = f"above most {both}"
        elif value < min(low for low, _ in ranges.values()):
            what = f"below most {both}"
        else:
            what = f"between {both}"
        return f"A median symmetry of {value:.2f} is {what}."


@cache
def typical_symmetry(stack: str) -> tuple[float, float]:
    """The 10 % and the 90 % quantile of the median symmetries of published models.

    Examples
    --------
    >>> typical_symmetry("decoder")[1] < typical_symmetry("encoder")[0]
    True
    """
    values = sound_models().filter(stack=stack)["symmetry"].drop_nulls()
    low, high = (values.quantile(q, "linear") for q in (0.1, 0.9))
    assert low is not None
    assert high is not None
    return round(low, 2) + 0.0, round(high, 2) + 0.0


def place(table: ScoreTable) -> list[Placement]:
    """Rank a scan's medians among those of `sound_models`.

    Returns
    -------
    list of Placement
        One for each checkpoint and stack with plain self-attention scores. Tables of other forms
        (folded norms, biases, another circuit, distance or gamma) give none, nor do models whose
        family was guessed or of which half the layers look untrained.

    Examples
    --------
    >>> import wqk
    >>> for placement in place(wqk.scan(wqk.demo_model("encoder"))):
    ...     print(placement)
    more symmetric than 18 of 24 published encoders and 15 of 15 decoders;
    columns more dominant than in 9 of 24 published encoders and 0 of 13 decoders
    """
    untrained = statuses().list.contains("random-looking").mean()
    known = table.filter(
        pl.col("family").ne_missing("inferred"),
        untrained.over("checkpoint", "revision", "step", "stack", "kind") < 0.5,
    )
    return [
        Placement(row["name"], row["stack"], *positions)
        for row in summarize(known).iter_rows(named=True)
        if any(positions := [_position(row[score], score) for score in SIGNS])
    ]


def _position(value: float | None, score: str) -> Position | None:
    if value is None:
        return None
    standings = []
    for stack in ("encoder", "decoder"):
        others = sound_models().filter(stack=stack)[score].drop_nulls()
        exceeded = SIGNS[score] * others < SIGNS[score] * round(value, 2)
        standings.append(Standing(int(exceeded.sum()), len(others)))
    return Position(value, *standings)


@cache
def sound_models() -> pl.DataFrame:
    """The last row of every sound published model.

    Examples
    --------
    >>> sound_models()["stack"].value_counts(sort=True).rows()
    [('encoder', 24), ('decoder', 15)]
    """
    return published().filter("sound").unique("model", keep="last", maintain_order=True)
