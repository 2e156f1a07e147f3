"""The figure of starts at several scales shows each run where its own start puts it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tests.lab.figures.making import logged

from wqk.errors import RunError
from wqk.tables.run import Run
from wqk_lab.figures import Sources, draw, numbers
from wqk_lab.figures.dose import DOSE_SCHEMA


def run(
    folder: Path,
    init: str,
    norm: float,
    values: float,
    losses: Sequence[float],
    seed: int = 1,
    **recipe: float,
) -> Run:
    """A run with layers of these ratios, and these losses at every hundredth step."""
    scales = [
        {"norm_ratio": norm * layer, "value_ratio": values * layer} for layer in (0.98, 1.0, 1.02)
    ]
    return logged(
        folder / f"{init}-{norm}-{values}-{seed}",
        {"objective": "masked", "steps": 400, "init": init, "seed": seed} | recipe,
        dict(zip(range(100, 500, 100), losses, strict=False)),
        corpus={"folder": "/texts/a", "fingerprint": "a"},
        initialization=scales if norm else [],
    )


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [
        run(tmp_path, "random", 1.0, 1.0, losses=(3.1, 3.0, 2.9, 2.8)),
        run(tmp_path, "random", 1.0, 1.0, losses=(3.1, 3.1, 3.0, 2.9), seed=2),
        run(tmp_path, "random", 4.0, 1.0, losses=(3.0, 2.9, 2.8, 2.7), init_norm=4.0),
        run(tmp_path, "random", 1.0, 2.0, losses=(3.1, 2.9, 2.8, 2.6), init_values=2.0),
        run(tmp_path, "symmetric", 1.4, 1.0, losses=(3.1, 3.1, 3.1, 3.1)),
        run(tmp_path, "symmetric", 4.0, 1.0, losses=(3.0, 2.8, 2.7, 2.5), init_norm=4.0),
        run(tmp_path, "published", 9.0, 2.6, losses=(3.0, 2.8, 2.7, 2.4)),
    ]


def test_runs_stand_at_the_scale_of_their_start(runs: list[Run]) -> None:
    rows = numbers("dose", Sources(tuple(runs), level=2.95))
    assert rows.schema == numbers("dose", Sources(tuple(runs))).schema == pl.Schema(DOSE_SCHEMA)
    losses_by_start = {
        (row["scale"], row["start"], row["factor"], row["seed"]): (
            row["held_out_loss"],
            row["first_below"] and round(row["first_below"], 6),
        )
        for row in rows.to_dicts()
    }
    # Steps are interpolated between the logged ones.
    # A single scale is no dose: published, and the symmetric start's values.
    assert losses_by_start == {
        ("norm_ratio", "random", 1.0, 1): (2.8, 250),
        ("norm_ratio", "random", 1.0, 2): (2.9, 350),
        ("norm_ratio", "random", 4.0, 1): (2.7, 150),
        ("norm_ratio", "symmetric", 1.4, 1): (3.1, None),
        ("norm_ratio", "symmetric", 4.0, 1): (2.5, 125),
        ("value_ratio", "random", 1.0, 1): (2.8, 250),
        ("value_ratio", "random", 1.0, 2): (2.9, 350),
        ("value_ratio", "random", 2.0, 1): (2.6, 175),
    }


def test_lines_join_the_means_over_seeds(runs: list[Run]) -> None:
    figure = draw("dose", Sources(tuple(runs), level=2.95))
    figure.draw_without_rendering()
    losses, values, below, _ = figure.axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in losses.lines}
    # Both seeds of the random start are there at 1 alone, so that no mean is at 4.
    assert lines["random"] == [[1.0, pytest.approx(2.85)]]
    assert lines["symmetric"] == [[1.4, 3.1], [4.0, 2.5]]
    ticks = [[tick.get_text() for tick in axis.get_xticklabels()] for axis in figure.axes[2:]]
    assert ticks == [["1", "1.4", "4"], ["1", "2"]]
    assert losses.get_ylabel() == "held-out loss at step 400 (nats)"
    assert below.get_ylabel() == "step at which training loss < 2.95"
    assert values.get_legend_handles_labels()[1] == ["random"]
    open_triangles = [line for line in below.lines if line.get_marker() == "^"]
    (triangle,) = np.concatenate([line.get_ydata() for line in open_triangles])
    assert triangle == 400.0


def test_all_are_compared_at_the_last_step_of_the_shortest(runs: list[Run], tmp_path: Path) -> None:
    short = run(tmp_path, "symmetric", 2.0, 1.0, losses=(3.0, 2.6), init_norm=2.0)
    assert set(numbers("dose", Sources((*runs, short)))["step"]) == {200}
    assert len(draw("dose", Sources((*runs, short))).axes) == 2  # no level, no steps


def test_what_dose_cannot_draw(runs: list[Run], tmp_path: Path) -> None:
    with pytest.raises(RunError, match="dose needs runs with different initializations"):
        numbers("dose", Sources(tuple(runs[:1])))
    with pytest.raises(RunError, match="dose needs a start at two scales"):
        numbers("dose", Sources((runs[0], runs[4])))
    with pytest.raises(RunError, match=r"level=3 is for dose; got losses: leave it out"):
        numbers("losses", Sources(tuple(runs), level=3.0))
    bare = run(tmp_path, "paired", 0, 0, losses=(3.0, 3.0, 3.0, 3.0))
    with pytest.raises(RunError, match="paired-0-0-1: its start has no report of scales"):
        numbers("dose", Sources((*runs, bare)))
