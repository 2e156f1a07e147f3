"""Lines and bands over training against plain Python, seed by seed."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.figures.making import make_run, row, table

from wqk._files import append_lines
from wqk.errors import RunError
from wqk.tables.run import SCORES, Run
from wqk_lab.figures.convert import dose_curves
from wqk_lab.figures.curves import (
    layer_curves,
    loss_curves,
    loss_differences,
    over_seeds,
    score_curves,
)

SCORE = st.floats(-1, 1)


def value(curves: pl.DataFrame, column: str = "value", **place: Any) -> float:
    conditions = [pl.col(name).eq_missing(pl.lit(expected)) for name, expected in place.items()]
    return float(curves.filter(*conditions)[column].item())


@given(st.lists(st.tuples(SCORE, SCORE), min_size=1, max_size=9))
def test_medians_and_quartiles_are_those_of_the_layers(scores: list[tuple[float, float]]) -> None:
    rows = [
        row(layer, step=8, symmetry=symmetry, directionality_excess=excess)
        for layer, (symmetry, excess) in enumerate(scores)
    ]
    curves = layer_curves(table(*rows))
    for index, quantity in enumerate(("symmetry", "directionality_excess")):
        column = [pair[index] for pair in scores]
        place = {"quantity": quantity, "layer": None, "step": 8}
        low, _, high = quantiles(column, n=4, method="inclusive") if len(column) > 1 else column * 3
        assert value(curves, **place) == pytest.approx(median(column))
        assert value(curves, "q25", **place) == pytest.approx(low)
        assert value(curves, "q75", **place) == pytest.approx(high)
    symmetries = [symmetry for symmetry, _ in scores]
    gap = value(curves, quantity="symmetry_gap", layer=None, step=8)
    assert gap == pytest.approx(max(symmetries) - min(symmetries))


@given(st.lists(st.dictionaries(st.integers(0, 5), SCORE), min_size=1, max_size=4))
def test_seeds_are_averaged_where_all_of_them_are(seeds: list[dict[int, float]]) -> None:
    schema = {"quantity": pl.String, "layer": pl.Int64, "step": pl.Int64, "value": pl.Float64}
    frames = []
    for seed in seeds:
        rows = [("symmetry", 0, step, symmetry) for step, symmetry in seed.items()]
        frames.append(pl.DataFrame(rows, schema, orient="row"))
    curves = over_seeds(frames)
    common = sorted(set.intersection(*(set(seed) for seed in seeds)))
    assert curves["step"].to_list() == common
    for step in common:
        values = [seed[step] for seed in seeds]
        average = curves.filter(step=step).row(0, named=True)
        assert average["value"] == pytest.approx(fmean(values))
        assert (average["low"], average["high"]) == (min(values), max(values))
        assert average["runs"] == len(seeds)


def test_only_plain_self_attention_of_whole_layers_counts() -> None:
    plain = [row(0, step=0, symmetry=0.5), row(1, step=0, symmetry=float("nan"))]
    special = [
        row(0, step=0, symmetry=9.0, **changes)
        for changes in ({"head": 0}, {"kind": "cross"}, {"circuit": "ov"}, {"distance": 3})
    ]
    curves = layer_curves(table(*plain, *special)).filter(quantity="symmetry")
    assert curves.select("layer", "value").rows() == [(0, 0.5), (None, 0.5)]


def test_differences_are_taken_seed_by_seed(tmp_path: Path) -> None:
    base = [make_run(tmp_path / f"base-{s}", seed=s) for s in (1, 2, 3)]
    paired = [make_run(tmp_path / f"other-{s}", seed=s, init="paired") for s in (2, 3, 9)]
    differences = loss_differences(paired, base)
    # A run's losses follow from its seed alone, so that those of equal seeds cancel.
    assert differences["value"].to_list() == pytest.approx([0, 0, 0])
    assert differences["runs"].to_list() == [2, 2, 2]
    assert differences["quantity"].unique().to_list() == ["loss_difference"]
    assert loss_differences(paired[-1:], base).is_empty()


def test_a_run_that_goes_on_is_read_as_far_as_it_has_come(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", seed=1), make_run(tmp_path / "b", steps=(0, 20), seed=2)]
    with (runs[1].folder / SCORES).open("a") as file:
        file.write('{"checkpoint": "torn')
    assert score_curves(runs)["step"].unique().sort().to_list() == [0, 20]
    assert loss_curves(runs)["step"].to_list() == [0, 20]
    runs[1] = make_run(tmp_path / "begun", steps=(), seed=2)
    with pytest.raises(RunError, match="a, begun: no step has scores in all of these runs"):
        score_curves(runs)
    with pytest.raises(RunError, match="a, begun: no step has a held-out loss"):
        loss_curves(runs)


def test_updates_are_curves_of_their_own(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", layers=1)
    scores, updates = score_curves([run]), score_curves([run], "updates")
    assert scores["value"].to_list() != updates["value"].to_list()
    expected = run.updates.frame.sort("step")["symmetry"].to_list()
    assert updates.filter(quantity="symmetry", layer=0)["value"].to_list() == expected


def test_one_layer_and_one_look_are_enough(tmp_path: Path) -> None:
    run = Run(tmp_path, {})
    append_lines(tmp_path / SCORES, row(0, step=0, symmetry=0.5))
    curves = score_curves([run])
    place = {"quantity": "symmetry", "layer": None, "step": 0}
    assert [value(curves, c, **place) for c in ("value", "q25", "q75", "low")] == [0.5] * 4


def test_conversions_are_drawn_step_by_step_in_whatever_order_their_rows_come() -> None:
    """Each line has the means over seeds, and the steps of a line ascend."""
    place = {"corpus": "wikipedia", "origin": "decoder", "layer": None}
    rows = pl.DataFrame(
        [
            {"seed": seed, "loss": loss, "attention": attention, "step": step}
            | {"symmetry": step / 1000 + seed / 10, "directionality_excess": -step / 1000}
            for seed in (1, 2, 3)
            for loss, attention in (("masked", "full"), ("causal", "causal"))
            for step in (0, 10, 50, 200)
        ]
    ).with_columns(**{name: pl.lit(text, pl.String) for name, text in place.items()})
    for seed in range(3):
        symmetry, excess = dose_curves(rows.sample(fraction=1, shuffle=True, seed=seed)).axes
        for panel, first, slope in ((symmetry, 0.2, 1e-3), (excess, 0.0, -1e-3)):
            lines = [line for line in panel.lines if len(line.get_xdata()) == 4]
            assert len(lines) == 2
            for line in lines:
                assert list(line.get_xdata()) == [0, 10, 50, 200]
                expected = [first + slope * step for step in (0, 10, 50, 200)]
                assert list(line.get_ydata()) == pytest.approx(expected)
