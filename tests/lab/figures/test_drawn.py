"""Curves, bands, markers, labels and limits of figures, read back from their axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from scipy import stats
from tests.lab.figures.making import make_run, row, table

from wqk._style import SCORE_LABELS, STACK_COLORS, new_figure
from wqk.forms.scores import untrained_range
from wqk.reporting.demo import demo_table
from wqk.reporting.pictures import BAND, shades
from wqk.tables.score_table import ScoreTable
from wqk_lab.atlas import published_training
from wqk_lab.figures import FIGURES, Sources, draw, numbers, read_sources
from wqk_lab.figures.by_layer import (
    coupling_by_layer,
    draw_form,
    examples,
    picture,
    separate_labels,
    terms_by_layer,
)
from wqk_lab.figures.convert import ENOUGH, dose_curves, over_seeds
from wqk_lab.figures.curves import CURVE
from wqk_lab.figures.model_sizes import HOLLOW, by_size, model_rows
from wqk_lab.figures.paired import LABELS, PAIR_SCHEMA, TESTED, pair_tests, paired_panels
from wqk_lab.figures.starts import LOOKS, OTHERS
from wqk_lab.figures.theory import tails

Points = list[tuple[float, float]]

QUARTILES, SEEDS = ("q25", "q75"), ("low", "high")


def curves(axis: Axes) -> list[Line2D]:
    """The lines of an axis in its data, without those at zero."""
    return [line for line in axis.lines if line.get_transform() == axis.transData]


def points(line: Line2D) -> Points:
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def band_of(collection: Any) -> dict[float, tuple[float, float]]:
    """The least and the greatest height of a band, by place."""
    heights: dict[float, list[float]] = {}
    for path in collection.get_paths():
        for x, y in path.vertices:
            heights.setdefault(float(x), []).append(float(y))
    return {x: (min(each), max(each)) for x, each in heights.items()}


def words(figure: Figure) -> set[str]:
    """All that is written on a figure."""
    return {text.get_text().strip() for text in figure.findobj(Text)}


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """An encoder and a decoder, two seeds, two texts; other starts and a penalty on one text."""
    folder = tmp_path_factory.mktemp("runs")
    cells: list[dict[str, Any]] = [
        {},
        {"mode": "decoder"},
        {"init": "symmetric"},
        {"penalty": "skew", "penalty_weight": 0.1},
    ]
    runs = []
    for number, cell in enumerate(cells):
        for seed in (1, 2):
            seed_of_run = 10 * number + seed if "mode" in cell else seed
            folder_of_run = folder / f"{number}-{seed}"
            runs.append(make_run(folder_of_run, layers=2, seed=seed_of_run, **cell))
    return Sources(tuple(runs))


@pytest.fixture(scope="module")
def two_texts(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    folder = tmp_path_factory.mktemp("texts")
    runs = [
        make_run(folder / f"{mode}-{corpus}", corpus=corpus, mode=mode, seed=seed, layers=2)
        for seed, (corpus, mode) in enumerate(
            [("a", "encoder"), ("a", "decoder"), ("b", "encoder"), ("b", "decoder")]
        )
    ]
    return Sources(tuple(runs))


@pytest.fixture(scope="module")
def figure_of(training: Sources, two_texts: Sources) -> Callable[[str], Figure]:
    """Draw a figure of training once."""
    return cache(lambda name: draw(name, two_texts if name in ("s3", "s4") else training))


Panel = tuple[pl.DataFrame, tuple[str, str]]  # curves, and the columns of their bands


def panels_of(name: str, rows: pl.DataFrame) -> Iterator[Panel]:
    """The curves of each panel of a figure of training, in the order of the panels."""
    medians, layers = rows.filter(pl.col("layer").is_null()), rows.drop_nulls("layer")
    if name == "fig3":
        for score in SCORE_LABELS:
            yield medians.filter(quantity=score), QUARTILES
            for mode in STACK_COLORS:
                yield layers.filter(quantity=score, mode=mode), SEEDS
    elif name in ("s3", "updates", "s4"):
        for comparison in rows["comparison"].unique(maintain_order=True):
            for score in SCORE_LABELS:
                place = {"comparison": comparison, "quantity": score}
                if name == "s4":
                    for mode in STACK_COLORS:
                        yield layers.filter(**place, mode=mode), SEEDS
                else:
                    yield medians.filter(**place), QUARTILES
    else:
        yield medians.filter(quantity="held_out_loss"), SEEDS
        if name == "losses":
            yield medians.filter(quantity="loss_difference"), SEEDS
            return
        yield medians.filter(quantity="symmetry"), QUARTILES
        yield medians.filter(quantity="symmetry_gap"), SEEDS
        for start in layers["start"].unique(maintain_order=True):
            yield layers.filter(quantity="symmetry", start=start), SEEDS


def looks(curves_of_panel: list[pl.DataFrame]) -> Iterable[tuple[Any, Any]]:
    """Color and line style of the curves of a panel."""
    cell = "mode" if "mode" in curves_of_panel[0].columns else "start"
    if curves_of_panel[0]["layer"][0] is None:
        for curve in curves_of_panel:
            name = curve[cell][0]
            if cell == "mode":
                yield STACK_COLORS[name], {"encoder": "-", "decoder": "--"}[name]
            else:
                look = LOOKS.get(name, OTHERS[0])
                yield look["color"], look["linestyle"]
        return
    name = curves_of_panel[0][cell][0]
    color = STACK_COLORS[name] if cell == "mode" else LOOKS[name]["color"]
    color = "#767676" if color == "black" else color
    style = "--" if name == "decoder" else "-"
    for shade in shades(color, len(curves_of_panel)):
        yield shade, style


@pytest.mark.parametrize("name", ["fig3", "s3", "s4", "s5", "losses", "updates"])
def test_curves_and_bands_of_training_are_the_numbers(
    name: str, training: Sources, two_texts: Sources, figure_of: Callable[[str], Figure]
) -> None:
    rows = numbers(name, two_texts if name in ("s3", "s4") else training)
    figure = figure_of(name)
    for axis, (shown, band) in zip(figure.axes, panels_of(name, rows), strict=True):
        cell = "mode" if "mode" in shown.columns else "start"
        expected = shown.partition_by(cell, "layer", maintain_order=True)
        lines, bands = curves(axis), axis.collections
        assert len(lines) == len(bands) == len(expected) > 0
        for line, collection, curve, (color, style) in zip(
            lines, bands, expected, looks(expected), strict=True
        ):
            assert points(line) == curve.select("step", "value").rows()
            assert to_rgb(line.get_color()) == to_rgb(color)
            unstyled = Line2D([], [], linestyle=style)
            assert line.get_linestyle() == unstyled.get_linestyle()
            assert tuple(collection.get_facecolor()[0][:3]) == pytest.approx(to_rgb(color))
            ends = curve.select("step", *band).rows()
            assert band_of(collection) == {step: (low, high) for step, low, high in ends}
        # Steps are thousands from 1,000 on.
        assert axis.xaxis.get_major_formatter()(2000) == "2k"
        assert axis.get_xlim() == (0, 40)
    assert {axis.get_xlabel() for axis in figure.axes} >= {"training step"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "fig3",
            {
                *("median over layers", "encoder, by layer", "decoder, by layer", *"abcd"),
                *("symmetry", "directionality (excess)", "encoder", "decoder", "0", "1"),
            },
        ),
        ("s3", {"a", "b", "encoder", "decoder", "symmetry", "directionality (excess)"}),
        ("s4", {"a", "b", "encoder", "decoder", "symmetry", "directionality (excess)", "0", "1"}),
        (
            "s5",
            {
                *("held-out loss (nats)", "median symmetry", "gap between layers", "symmetry"),
                *("random, 2 runs", "symmetric, 2 runs", "random", "symmetric", *"abc"),
            },
        ),
        (
            "losses",
            {
                *(
                    "held-out loss (nats)",
                    "difference from random (nats)",
                    "skew penalty 0.1, 2 runs",
                ),
                *("random, 2 runs", "symmetric, 2 runs"),
            },
        ),
        ("updates", {"wikipedia, random", "encoder", "decoder", "symmetry", "a", "b"}),
    ],
)
def test_panels_of_training_have_their_names(
    name: str, expected: set[str], figure_of: Callable[[str], Figure]
) -> None:
    written = words(figure_of(name))
    assert expected <= written
    if name == "s5":  # the first panel of the layers has the label of its row
        labels = [axis.get_ylabel() for axis in figure_of(name).axes]
        assert labels[1:] == ["median symmetry", "gap between layers", "symmetry", ""]
    notes = [text for text in written if text.endswith(".")]
    assert len(notes) == 1  # what a band or a number is


def test_scores_of_a_row_share_their_scale(figure_of: Callable[[str], Figure]) -> None:
    by_row = [axis.get_ylim() for axis in figure_of("fig3").axes]
    assert len({*by_row[:3]}) == len({*by_row[3:]}) == 1
    of_pairs = [axis.get_ylim() for axis in figure_of("s4").axes]
    for first, second in ((0, 1), (2, 3), (4, 5), (6, 7)):
        assert of_pairs[first] == of_pairs[second]


def test_losses_are_scaled_to_what_comes_after_the_first_tenth(tmp_path: Path) -> None:
    steps = (0, 3, 4, 20, 40)
    runs = [make_run(tmp_path / init, steps, init=init) for init in ("random", "symmetric")]
    rows = numbers("losses", Sources(tuple(runs)))
    for axis, quantity in zip(
        draw("losses", Sources(tuple(runs))).axes, ("held_out_loss",), strict=False
    ):
        ends = rows.filter(pl.col("step") >= 4, quantity=quantity).select(SEEDS).to_numpy()
        margin = 0.05 * (ends.max() - ends.min())
        assert axis.get_ylim() == pytest.approx((ends.min() - margin, ends.max() + margin))


def test_published_runs_are_drawn_without_own_ones_and_below_them(two_texts: Sources) -> None:
    for name, datasets in (("fig3", {"Wikipedia"}), ("s3", {"Jigsaw", "Red Pajama"})):
        published = numbers(name, Sources())
        assert set(published["comparison"]) == {f"published: {d}, 12-layer" for d in datasets}
    both = numbers("s3", Sources(two_texts.runs, published=True))
    assert both.equals(pl.concat([numbers("s3", two_texts), numbers("s3", Sources())]))
    training = Path(__file__).parents[3] / "docs/results/make-train/training.csv"
    of_table = numbers("s3", replace(read_sources(training), published=True))
    assert of_table["comparison"][0] == "these runs"
    starts = numbers("s5", Sources()).group_by("start", "quantity").len().rows()
    assert {(start, quantity) for start, quantity, _ in starts} == {
        *(("random", name) for name in ("training_loss", "symmetry", "symmetry_gap")),
        *(("random", "directionality_excess"), ("symmetric", "training_loss")),
    }


@pytest.mark.parametrize(("modes", "columns"), [(["encoder"], 2), (["encoder", "decoder"], 3)])
def test_figure_3_has_no_panels_of_a_model_that_is_not_there(modes, columns):
    curves = numbers("fig3", Sources()).filter(pl.col("mode").is_in(modes))
    figure = FIGURES["fig3"].draw(curves)
    assert len(figure.axes) == 2 * columns
    assert all(axis.lines for axis in figure.axes)


def conversions(seeds: int) -> pl.DataFrame:
    """Runs on two texts from two parents, under two losses; columns as of `convert_rows`."""
    random = np.random.default_rng(seeds)
    rows = []
    for corpus in ("a", "b"):
        for origin in ("decoder, encoder", "decoder"):
            for loss, attention in (("masked", "full"), ("causal", "causal")):
                for step in (0, 10, 100):
                    for seed in range(seeds):
                        symmetry, excess = random.uniform(-1, 1, 2)
                        place = {"corpus": corpus, "origin": origin, "loss": loss, "seed": seed}
                        place |= {"attention": attention, "step": step, "layer": None}
                        scores = {"symmetry": symmetry, "directionality_excess": excess}
                        rows.append(place | scores)
    return pl.DataFrame(rows, schema_overrides={"layer": pl.Int64})


@pytest.mark.parametrize("seeds", [ENOUGH - 1, ENOUGH])
def test_conversions_are_means_with_students_intervals(seeds: int) -> None:
    rows = conversions(seeds)
    figure = dose_curves(rows)
    panels = [
        (score, corpus, origin)
        for score in ("symmetry", "directionality_excess")
        for corpus in ("a", "b")
        for origin in ("decoder", "decoder, encoder")
    ]
    for axis, (score, corpus, origin) in zip(figure.axes, panels, strict=True):
        lines = {line.get_label(): line for line in curves(axis)}
        assert list(lines) == ["causal loss, causal attention", "masked loss, full attention"]
        for band, (label, line) in zip(axis.collections, lines.items(), strict=True):
            loss = label.partition(" ")[0]
            mode = {"masked": "encoder", "causal": "decoder"}[loss]
            look = (line.get_color(), line.get_linestyle(), line.get_marker())
            styles = {"masked": ("-", "o"), "causal": ("--", "s")}
            assert look == (STACK_COLORS[mode], *styles[loss])
            values = rows.filter(corpus=corpus, origin=origin, loss=loss).sort("step", "seed")
            by_step = values[score].to_numpy().reshape(3, seeds)
            np.testing.assert_allclose(line.get_xydata()[:, 1], by_step.mean(axis=1))
            assert line.get_xdata().tolist() == [0, 10, 100]
            reach = stats.sem(by_step, axis=1) * stats.t.ppf(0.975, seeds - 1)
            ends = band_of(band)
            assert sorted(ends) == ([0, 10, 100] if seeds == ENOUGH else [])
            for step, mean, half in zip((0, 10, 100), by_step.mean(axis=1), reach, strict=True):
                if seeds == ENOUGH:
                    assert ends[step] == pytest.approx((mean - half, mean + half))
        assert axis.get_xticks().tolist() == [0, 10, 100]
        is_first = origin == "decoder"  # whose heights are those of the whole row
        assert axis.yaxis.get_tick_params()["labelleft"] == is_first
        assert axis.get_xscale() == "symlog"
    named = [tick.get_text() for tick in figure.axes[-1].get_xticklabels()]
    assert named == ["0", "10", ""]  # every second step, and the first
    written = words(figure)
    assert {"from: decoder", "from: decoder → encoder", "step after the change"} <= written
    assert {"symmetry\na", "symmetry\nb", "directionality (excess)\na"} <= written
    assert any(f"{seeds} seeds" in text and f"from {ENOUGH} seeds on" in text for text in written)
    limits = [axis.get_ylim() for axis in figure.axes]
    assert len({*limits[:4]}) == len({*limits[4:]}) == 1  # one scale for each score


def test_conversions_over_seeds_have_their_number() -> None:
    rows = over_seeds(conversions(2), ["symmetry"])
    assert set(rows["seeds"]) == {2}
    single = over_seeds(conversions(1), ["symmetry"])
    assert single["low"].null_count() == single["high"].null_count() == single.height
    assert set(single["quantity"]) == {"symmetry"}


def pair_frame(random: np.random.Generator) -> pl.DataFrame:
    """Pairs of three relations, in which the mask was lifted or closed; columns of a survey."""
    relations = {"twins": [1] * 9, "converted": [1] * 8 + [-1], "control": [0]}
    places = [(0, None), (1, None), (2, None), (1, 0)]
    rows: list[dict[str, Any]] = []
    for relation, expected_of_pairs in relations.items():
        for number, expected in enumerate(expected_of_pairs):
            for layer, head in places[:1] if relation == "control" else places:
                values = random.normal(0.3 * expected, 0.2, 4)
                place = {"pair": f"{relation} {number}", "recipe": f"{relation} {number % 3}"}
                place |= {"relation": relation, "expected": expected, "layer": layer}
                place |= {"depth": layer / 2, "head": head}
                scores = dict(zip(LABELS, values, strict=True))
                rows.append(dict.fromkeys(PAIR_SCHEMA) | place | scores)
    return pl.DataFrame(rows, schema=PAIR_SCHEMA)


def test_pairs_are_tested_as_scipy_tests_them() -> None:
    rows = pair_frame(np.random.default_rng(0))
    tests = pair_tests(rows)
    p_values = []
    for test, (relation, quantity) in zip(tests, TESTED, strict=True):
        values, by_recipe = [], {}
        of_relation = rows.filter(pl.col("head").is_null(), relation=relation)
        for of_pair in of_relation.partition_by("pair", maintain_order=True):
            expected = of_pair["expected"][0]
            if quantity == "update_symmetry_excess" and expected != 1:
                continue
            values.append(expected * float(np.median(of_pair[quantity])))
            by_recipe.setdefault(of_pair["recipe"][0], []).append(values[-1])
        assert (test.pairs, test.recipes) == (len(values), 3)
        assert test.agree == sum(value > 0 for value in values)
        assert test.median == pytest.approx(np.median(values))
        p = stats.wilcoxon(values, alternative="greater").pvalue
        means = [np.mean(each) for each in by_recipe.values()]
        of_recipes = stats.wilcoxon(means, alternative="greater").pvalue
        assert (test.p, test.p_recipes) == pytest.approx((p, of_recipes))
        p_values.append(p)
        n = len(values)
        if 2.0**-n > 0.05 / len(TESTED):
            assert test.detectable is None
            continue
        quantiles = stats.t.ppf([1 - 0.05 / len(TESTED), 0.8], n - 1).sum()
        shift = quantiles * np.std(values, ddof=1) * np.sqrt(np.pi / 3 / n)
        assert test.detectable == pytest.approx(shift)
        assert f"{test.agree} as predicted, p = {p:.2g}" in str(test)
        assert f"of {test.recipes} recipes, p = {of_recipes:.2g}" in str(test)
    # Holm's: the least p times the number of tests, and so on, never falling.
    order = np.argsort(p_values)
    scaled = np.array(p_values)[order] * np.arange(len(p_values), 0, -1)
    expected = np.minimum(np.maximum.accumulate(scaled), 1)
    corrected = [tests[index].corrected for index in order]
    assert corrected == pytest.approx(expected.tolist())


def test_each_pair_is_a_line_over_depth_in_each_panel() -> None:
    rows = pair_frame(np.random.default_rng(1))
    figure = paired_panels(rows)
    tests = pair_tests(rows)
    for axis, (quantity, label) in zip(figure.axes, LABELS.items(), strict=True):
        lines = [line for line in curves(axis) if len(line.get_xdata())]
        layers = rows.filter(pl.col("head").is_null())
        pairs = layers.partition_by("pair", maintain_order=True)
        assert len(lines) == len(pairs)
        for line, pair in zip(lines, pairs, strict=True):
            assert points(line) == pair.select("depth", quantity).rows()
            assert line.get_linestyle() == ("--" if pair["expected"][0] == -1 else "-")
            assert line.get_marker() == ("." if pair.height == 1 else "")
        colors = {
            pair["relation"][0]: line.get_color() for pair, line in zip(pairs, lines, strict=True)
        }
        assert len(set(colors.values())) == len(colors) == 3
        assert (axis.get_ylabel(), axis.get_xlim()) == (label, (-0.02, 1.02))
        remarks = [
            f"{test.relation}: {test.agree} of {test.pairs}, p {test.corrected:.2g}"
            for test in tests
            if test.quantity == quantity
        ]
        assert axis.get_title(loc="left") == "; ".join(remarks)
    (dots,) = figure.axes[2].collections
    heads = rows.drop_nulls("head").select("depth", "update_symmetry_excess").rows()
    assert [tuple(map(float, place)) for place in dots.get_offsets()] == heads
    names = [text.get_text() for text in figure.axes[3].get_legend().get_texts()]
    assert names == ["twins", "converted", "control"]


def test_labels_of_points_are_moved_off_markers_bars_and_each_other() -> None:
    figure = new_figure(3, 3)
    axis = figure.subplots()
    axis.errorbar(0, 0, [[0], [0.9]], marker="o", linestyle="")
    axis.errorbar(0.05, 0, marker="o", linestyle="")
    axis.set(xlim=(-1, 1), ylim=(-1, 1))
    labels = []
    for place, name in ((0, "a model"), (0.05, "another")):
        offset = {"xytext": (5, 3), "textcoords": "offset points"}
        labels.append(axis.annotate(name, (place, 0), **offset))
    separate_labels(axis, labels)
    first, second = (label.get_window_extent() for label in labels)
    assert not first.overlaps(second)
    for x, y in ((0, 0), (0.05, 0), (0, 0.45)):
        point = axis.transData.transform((x, y))
        assert not any(box.contains(*point) for box in (first, second))


def test_models_are_markers_with_quartiles_at_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are more than eight own scans, the lowest, highest and largest are named."""
    monkeypatch.setattr("wqk_lab.figures.model_sizes.separate_labels", lambda axis, names: None)
    scans = []
    for number, score in enumerate(np.linspace(-0.4, 0.9, 9)):
        size = 10**12 * (9 - number if number % 2 else number + 1)
        for layer, symmetry in enumerate((score - 0.1, score, score + 0.3)):
            scores = {"symmetry": symmetry, "directionality_excess": -symmetry}
            scans.append(row(layer, checkpoint=f"m{number}", parameters=size, **scores))
    rows = model_rows("fig2", table(*scans))
    published = rows.filter(source="published")
    chosen = [published.filter("sound", stack=stack)[:2] for stack in ("encoder", "decoder")]
    flagged = [published.filter(pl.col("flags").list.contains(flag))[:1] for flag in HOLLOW]
    rows = pl.concat([*chosen, *flagged, rows.filter(source="own")])
    figure = by_size(rows)
    for axis, score in zip(figure.axes, ("symmetry", "directionality"), strict=True):
        shown = rows.drop_nulls(score)
        assert len(axis.containers) == shown.height
        for bar, model in zip(axis.containers, shown.iter_rows(named=True), strict=True):
            marker, _, (quartiles,) = bar
            assert points(marker) == [(model["parameters"], model[score])]
            below, above = (max(model[f"{score}_{side}"], 0) for side in ("below", "above"))
            (segment,) = quartiles.get_segments()
            assert segment[:, 1] == pytest.approx((model[score] - below, model[score] + above))
            reasons = [flag for flag in HOLLOW if flag in model["flags"]]
            if reasons:
                assert marker.get_marker() == HOLLOW[reasons[0]]
                assert marker.get_markerfacecolor() == "white"
                continue
            assert marker.get_marker() == {"encoder": "o", "decoder": "s"}[model["stack"]]
            assert marker.get_color() == STACK_COLORS[model["stack"]]
            assert (marker.get_alpha() < 1) == (model["source"] == "published")
            assert (marker.get_markeredgecolor() == "black") == (model["source"] == "own")
        assert axis.get_xscale() == "log"
        named = {text.get_text() for text in axis.texts if len(text.get_text()) > 1}
        assert named == {"m0", "m8"}
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"encoder, published (2)", "decoder, published (2)", "encoder, own scan (9)"} <= labels
    assert len(labels) == 3 + sum(len(of_flag) for of_flag in flagged)
    assert {"symmetry", "directionality (excess)", "parameters", "a", "b"} <= words(figure)


def test_checkpoints_with_grouped_heads_keep_their_size() -> None:
    """Queries have H/G times as many weights as keys."""
    shape = {"rank": 16, "d_query": 64, "d_key": 64, "heads": 8, "key_heads": 2}
    weights = 16 * 64 * 8 // 2 + 16 * 64
    rows = [
        row(0, checkpoint=name, parameters=int(weights / share), **shape)
        for name, share in (("alone", 0.95), ("whole", 0.85))
    ]
    shown = model_rows("fig2", table(*rows)).filter(source="own")
    assert shown["name"].to_list() == ["whole"]


def test_terms_are_bars_with_their_sum_and_chance() -> None:
    random = np.random.default_rng(0)
    names = ("symmetry", "symmetry_within_heads", "symmetry_between_heads")
    rows = pl.DataFrame(
        [
            {"title": title, "layer": layer, **dict(zip(names, random.normal(size=3), strict=True))}
            | {"symmetry_within_random": random.normal()}
            for title in "wxyz"
            for layer in (3, 4)
        ]
    )
    figure = terms_by_layer(rows)
    assert len(figure.axes) == 4
    for axis, group in zip(figure.axes, rows.partition_by("title"), strict=True):
        within, between = axis.containers
        layers = group["layer"].to_list()
        for bars, name, side in ((within, names[1], -1), (between, names[2], 1)):
            assert [bar.get_height() for bar in bars] == group[name].to_list()
            centers = [bar.get_x() + bar.get_width() / 2 for bar in bars]
            assert centers == pytest.approx([layer + side * 0.19 for layer in layers])
        (chance,) = curves(axis)
        heights = group["symmetry_within_random"].to_list()
        assert points(chance) == [
            (pytest.approx(layer - 0.19), height)
            for layer, height in zip(layers, heights, strict=True)
        ]
        (sums,) = axis.collections
        for segment, layer, symmetry in zip(
            sums.get_segments(), layers, group["symmetry"], strict=True
        ):
            assert segment.ravel() == pytest.approx(
                [layer - 0.38, symmetry, layer + 0.38, symmetry]
            )
        assert axis.get_title(loc="left") == group["title"][0]
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert labels == {
        "within heads",
        "between heads",
        "within heads by chance",
        "sum: the symmetry",
    }
    # Three panels to a row, each row with the label of its axis.
    assert [axis.get_ylabel() for axis in figure.axes] == ["symmetry", "", "", "symmetry"]


def test_matrices_of_coupling_are_in_even_rows_under_their_models_names() -> None:
    rows = []
    for title, count in (("thirteen", 13), ("one", 1)):
        for layer in range(count):
            for a in (0, 1):
                for b in (0, 1):
                    value = (layer + 2 * a + b) / 20
                    rows.append({"title": title, "layer": layer, "a": a, "b": b, "coupling": value})
    figure = coupling_by_layer(pl.DataFrame(rows))
    panels = [axis for axis in figure.axes if axis.images]
    assert len(panels) == 14
    grid = panels[0].get_gridspec()
    assert (grid.nrows, grid.ncols) == (4, 5)  # three rows of at most five, and one more model
    for layer, axis in enumerate([*panels[:13]]):
        expected = layer / 20 + np.array([[0, 1], [2, 3]]) / 20
        np.testing.assert_allclose(axis.images[0].get_array(), expected)
        assert axis.get_title(loc="left") == f"\nlayer {layer}"
        assert axis.get_xlabel() == "head b"
        assert axis.get_ylabel() == ("head a" if layer % 5 == 0 else "")
        assert axis.images[0].get_clim() == (-1, 1)
    written = [text.get_text() for axis in panels for text in axis.texts]
    assert written == ["thirteen", "one"]


def test_scores_over_distance_have_the_chance_of_their_own_gamma() -> None:
    size = {"d_query": 64, "d_key": 64, "rank": 16}
    rows = []
    for layer in (0, 1):
        for distance in (0, 4):
            scores = {"symmetry": layer + distance, "directionality_excess": -layer - distance}
            rows.append(row(layer, distance=distance, **size, **scores))
    rows.append(row(0, checkpoint="without distances", **size))
    shown = table(*rows)
    shown = ScoreTable(shown.frame, {"gamma": 1.0})
    numbers_of_figure = numbers("distances", Sources(table=shown))
    assert set(numbers_of_figure["title"]) == {"model"}
    for score in SCORE_LABELS:
        ends = [numbers_of_figure[f"{score}_untrained_{end}"][0] for end in ("low", "high")]
        assert tuple(ends) == untrained_range(64, 16, 1.0)[score]
    assert untrained_range(64, 16, 1.0) != untrained_range(64, 16)
    figure = draw("distances", Sources(table=shown))
    for axis, label, sign in zip(figure.axes, SCORE_LABELS.values(), (1, -1), strict=True):
        lines = curves(axis)
        assert [points(line) for line in lines] == [
            [(0, sign * layer), (4, sign * (layer + 4))] for layer in (0, 1)
        ]
        assert axis.get_ylabel() == label
        assert {"0", "1"} <= {text.get_text() for text in axis.texts}
        assert axis.get_xlabel() == "distance i − j (tokens)"
    assert BAND in words(figure)


def test_tails_are_lines_over_layers_with_the_interval_of_the_first() -> None:
    ratios = {"as it is": (1.0, -0.5), "centered": (0.5, 0.25), "reversed": (-1.0, 0.0)}
    findings = [
        {"change": change, "layer": layer, "log_variance_ratio": ratio}
        | {"log_variance_ratio_error": 0.25}
        for change, ratios_of_change in ratios.items()
        for layer, ratio in zip(("3", "7"), ratios_of_change, strict=True)
    ]
    axis = tails(findings, "a model").axes[0]
    lines = {line.get_label(): points(line) for line in curves(axis)}
    assert lines == {
        change: list(enumerate(ratios_of_change)) for change, ratios_of_change in ratios.items()
    }
    (band,) = axis.collections
    assert band_of(band) == {0.0: (0.75, 1.25), 1.0: (-0.75, -0.25)}
    names = [text.get_text() for text in axis.get_legend().get_texts()]
    assert names == list(ratios)
    assert axis.get_title(loc="left") == "a model"
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("layer", "ln(Var‖column‖ / Var‖row‖)")
    formatter = axis.xaxis.get_major_formatter()
    assert [formatter(place, 0) for place in (0, 1, 2)] == ["3", "7", ""]


def test_names_of_curves_that_end_together_are_both_written(tmp_path: Path) -> None:
    """Numbers of layers are left out where there is no room; names of models are not."""
    runs = [make_run(tmp_path / mode, mode=mode, layers=1) for mode in STACK_COLORS]
    axis = draw("fig3", Sources(tuple(runs))).axes[0]
    first, second = curves(axis)
    assert points(first) == points(second)
    assert set(STACK_COLORS) <= {text.get_text() for text in axis.texts}


def test_a_form_has_its_title_its_sides_and_its_letter() -> None:
    image = picture(demo_table().details.blocks[0])
    figure = new_figure(3, 3)
    draw_form(figure, figure.add_gridspec(1, 1)[0], image, "a form", "c")
    assert {"a form", "key side", "query side", "c"} <= words(figure)
    drawn = next(axis for axis in figure.axes if axis.images)
    assert [len(drawn.get_xticks()), len(drawn.get_yticks())] == [0, 0]
    np.testing.assert_array_equal(image.outlying_rows, demo_outliers("row"))
    np.testing.assert_array_equal(image.outlying_columns, demo_outliers("column"))


def demo_outliers(side: str) -> np.ndarray:
    block = demo_table().details.blocks[0]
    norms, numbers = getattr(block, f"{side}_norms"), getattr(block, f"outlying_{side}s")
    return np.array([number in numbers for number in range(len(norms))])


def test_figures_of_models_take_their_sets_and_the_matrices_of_the_sources(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = demo_table().details.blocks
    for name in ("fig2", "s1", "s2"):
        assert numbers(name, Sources()).equals(model_rows(name))
        entry = FIGURES[name]
        assert entry.with_matrices == (name == "fig2")
        drawn = replace(entry, draw=lambda *parts: parts)  # type: ignore[arg-type]
        monkeypatch.setitem(FIGURES, name, drawn)
        _, *matrices = draw(name, Sources(blocks=blocks))  # type: ignore[misc]
        assert [list(each) for each in matrices] == [list(examples(blocks))] * (name == "fig2")


def test_published_curves_are_medians_over_the_layers_of_one_run() -> None:
    rows = numbers("fig3", Sources()).filter(pl.col("layer").is_null(), quantity="symmetry")
    place = {"size": "12-layer", "dataset": "Wikipedia"}
    layers = published_training().filter(**place)
    for mode in STACK_COLORS:
        curve = rows.filter(mode=mode)
        for step in (curve["step"][0], curve["step"][-1]):
            symmetry = layers.filter(mode=mode, step=step)["symmetry"].cast(pl.Float64)
            (drawn,) = curve.filter(step=step)["value"]
            assert drawn == pytest.approx(symmetry.median())


def test_numbers_have_their_types_whatever_they_hold(training: Sources) -> None:
    for name in ("fig3", "updates", "s5", "losses"):
        schema = numbers(name, training).schema
        assert {column: schema[column] for column in CURVE} == CURVE
    single = over_seeds(conversions(1), ["symmetry"])
    assert single.schema["low"] == single.schema["high"] == pl.Float64()
