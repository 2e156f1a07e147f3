"""Alarms: a norm or a ceiling that grows too fast, or strays from a reference run.

No size is too large in itself: a run is compared with its own past, or with another run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import numpy as np

from wqk.errors import RunError
from wqk.tables.score_table import ScoreTable, read_table

# The columns to compare, if a table has them.
SIZES = (
    "norm",
    "spectral_norm",
    "query_norm",
    "key_norm",
    "score_ceiling",
    "score_ceiling_any_distance",
    "max_logit",
)

# Growth is measured over this many steps.
SPAN = 1000


@dataclass(frozen=True)
class Alarm:
    """A norm or a ceiling of one layer that is out of bounds."""

    step: int
    stack: str
    kind: str
    layer: int
    column: str
    value: float
    compared: float  # the size at an earlier step, or that of the reference
    reason: Literal["growth", "deviation"]

    def __str__(self) -> str:
        """One sentence.

        Examples
        --------
        >>> print(Alarm(900, "decoder", "self", 3, "norm", 8.0, 2.0, "growth"))
        step 900: norm of decoder self-attention, layer 3, is 8, which was 2 within 1000 steps
        """
        beside = {
            "growth": f"which was {self.compared:.3g} within {SPAN} steps",
            "deviation": f"and {self.compared:.3g} in the reference run",
        }[self.reason]
        return (
            f"step {self.step}: {self.column.replace('_', ' ')} of {self.stack} "
            f"{self.kind}-attention, layer {self.layer}, is {self.value:.3g}, {beside}"
        )


class Bounds:
    """What a run's sizes are compared with; a column of a layer gives one alarm for each reason.

    A size may grow by the factor ``growth`` within 1000 steps, and differ by the factor
    ``deviation`` from the reference's at the same step, which is interpolated between steps and
    constant after the last one.
    """

    def __init__(
        self,
        growth: float | None,
        reference: ScoreTable | str | PathLike[str] | None,
        deviation: float,
    ) -> None:
        if growth is None and reference is None:
            raise RunError(
                "on_alarm compares with the run's own past or with another run; give growth=, the "
                "factor by which a size may grow within 1000 steps, or reference=, its scores"
            )
        for name, factor in (("growth", growth), ("deviation", deviation)):
            if factor is not None and not factor > 1:
                raise RunError(f"{name} must be a factor above 1, got {factor}")
        self._growth, self._deviation = growth, deviation
        self._past: dict[Any, list[tuple[int, float]]] = {}
        self._raised: set[Any] = set()
        self._reference: dict[Any, list[tuple[int, float]]] = {}
        if reference is not None:
            table = reference if isinstance(reference, ScoreTable) else read_table(reference)
            for step, key, value in _sizes(table):
                self._reference.setdefault(key, []).append((step, value))

    def look(self, table: ScoreTable) -> Iterator[Alarm]:
        """The alarms of one step's scores."""
        for step, key, value in _sizes(table):
            for reason, compared in (
                ("growth", self._before(key, step, value)),
                ("deviation", self._beside(key, step, value)),
            ):
                if compared is not None and (key, reason) not in self._raised:
                    self._raised.add((key, reason))
                    yield Alarm(step, *key, value, compared, reason)  # type: ignore[arg-type]

    def _before(self, key: Any, step: int, value: float) -> float | None:
        """The smallest earlier size from which this one has grown too fast."""
        if self._growth is None:
            return None
        past = self._past.setdefault(key, [])
        while len(past) > 1 and past[1][0] <= step - SPAN:
            del past[0]
        beyond = [
            old for at, old in past if value > old * self._growth ** max(1.0, (step - at) / SPAN)
        ]
        past.append((step, value))
        return min(beyond, default=None)

    def _beside(self, key: Any, step: int, value: float) -> float | None:
        """The reference's size, if this one differs too much."""
        if key not in self._reference:
            return None
        steps, sizes = np.asarray(self._reference[key]).T
        expected = float(np.interp(step, steps, sizes))
        low, high = expected / self._deviation, expected * self._deviation
        return None if low <= value <= high else expected


def _sizes(table: ScoreTable) -> Iterator[tuple[int, tuple[str, str, int, str], float]]:
    """Step, key (stack, kind, layer, column) and value of every size of every layer."""
    frame = table.layers.frame.sort("step")
    columns = [name for name in SIZES if name in frame.columns]
    for row in frame.iter_rows(named=True):
        for column in columns:
            value = row[column]
            if value is not None and not math.isnan(value):
                yield row["step"], (row["stack"], row["kind"], row["layer"], column), value
