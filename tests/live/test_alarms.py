"""Alarms on sizes that are known: which one is compared, and which growth is too fast."""

from __future__ import annotations

from typing import Any

import pytest

from wqk.errors import RunError
from wqk.live.scoring import Alarm, Bounds
from wqk.tables.score_table import ScoreTable


def scored(step: int, size: float | None, layer: int = 0, **columns: Any) -> ScoreTable:
    row = {
        "step": step, "stack": "decoder", "kind": "self", "layer": layer, "head": None,
        "circuit": "qk", "distance": 0, "status": "ok", "norm": size,
    }  # fmt: skip
    return ScoreTable.from_rows([row | columns])


def alarms(bounds: Bounds, sizes: dict[int, float | None]) -> list[Alarm]:
    return [alarm for step, size in sizes.items() for alarm in bounds.look(scored(step, size))]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({0: 1.0, 500: 2.0}, None),  # by the factor itself
        ({0: 1.0, 500: 2.01}, (500, 1.0)),
        ({0: 1.0, 100: 0.5, 500: 1.2}, (500, 0.5)),  # the smallest of all
        ({0: 1.2, 100: 0.5, 200: 3.0}, (200, 0.5)),
        ({0: 0.5, 100: 1.2, 200: 3.0}, (100, 0.5)),
        ({0: 1.0, 3000: 8.0}, None),  # twice in every thousand steps
        ({0: 1.0, 3000: 8.1}, (3000, 1.0)),
        ({0: 1.0, 1000: 3.0}, (1000, 1.0)),
        # Only the last size from before the last thousand steps is kept.
        ({0: 1.0, 1000: 2.0, 2000: 4.0, 3000: 8.0, 4000: 16.0}, None),
        ({0: 1.0, 999: 1.9, 1999: 3.7, 2000: 4.1}, (2000, 1.9)),
        ({0: 1.0, 1000: 1.9, 2000: 4.1}, (2000, 1.9)),
        ({0: 1.0, 10: None, 20: float("nan"), 30: 2.5}, (30, 1.0)),
        ({0: 4.0, 10: 1.0}, None),  # shrinking
    ],
)
def test_growth(sizes: dict[int, float | None], expected: tuple[int, float] | None) -> None:
    found = alarms(Bounds(2.0, None, 2.0), sizes)
    assert [(a.step, a.compared) for a in found] == ([expected] if expected else [])
    assert {a.reason for a in found} <= {"growth"}


def test_deviation_from_a_run_between_its_steps_and_after_its_last() -> None:
    reference = ScoreTable.from_rows(
        [scored(step, size).frame.row(0, named=True) for step, size in ((100, 3.0), (0, 1.0))]
    )
    for step, size, expected in (
        (0, 1.5, None), (0, 1.51, 1.0), (50, 3.0, None), (50, 3.01, 2.0), (50, 1.34, None),
        (50, 1.33, 2.0), (100, 4.4, None), (900, 4.4, None), (900, 4.6, 3.0), (900, 1.9, 3.0),
    ):  # fmt: skip
        (found,) = alarms(Bounds(None, reference, 1.5), {step: size}) or [None]
        assert (found and found.compared) == expected, (step, size)
        assert found is None or found.reason == "deviation"


def test_each_column_of_each_layer_gives_one_alarm_for_each_reason() -> None:
    reference = scored(0, 1.0, max_logit=1.0)
    bounds = Bounds(2.0, reference, 3.0)
    told = [
        (a.step, a.layer, a.column, a.reason)
        for step, size in ((0, 1.0), (10, 5.0), (20, 99.0))
        for layer in (0, 1)
        for a in bounds.look(scored(step, size, layer, max_logit=size / 2))
    ]
    assert told == [
        (10, 0, "norm", "growth"), (10, 0, "norm", "deviation"), (10, 0, "max_logit", "growth"),
        (10, 1, "norm", "growth"), (10, 1, "max_logit", "growth"),
        (20, 0, "max_logit", "deviation"),
    ]  # fmt: skip


@pytest.mark.parametrize("factors", [(1.0, 2.0), (0.5, 2.0), (2.0, 1.0), (float("nan"), 2.0)])
def test_factors_that_are_none(factors: tuple[float, float]) -> None:
    with pytest.raises(RunError, match="must be a factor above 1"):
        Bounds(factors[0], None, factors[1])


def test_something_is_compared_with() -> None:
    with pytest.raises(RunError, match="give growth="):
        Bounds(None, None, 2.0)


def test_alarms_in_words() -> None:
    alarm = Alarm(7, "decoder", "cross", 1, "max_logit", 81.25, 20.0, "deviation")
    assert str(alarm) == (
        "step 7: max logit of decoder cross-attention, layer 1, is 81.2, and 20 in the reference "
        "run"
    )
