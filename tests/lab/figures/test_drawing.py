"""Every figure is drawn, from plenty and from little; what is drawn are the numbers."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.text import Text
from tests.lab.figures.making import make_run, row, table

import wqk
from wqk._style import BLUE, SCORE_LABELS, new_figure
from wqk.errors import RunError, TableError, UnknownName
from wqk.forms.scores import untrained_range
from wqk.reporting.demo import demo_table
from wqk.reporting.pictures import shades, spread_apart, with_room
from wqk_lab.figures import FIGURES, Sources, draw, numbers
from wqk_lab.figures.curves import score_curves
from wqk_lab.figures.starts import LOOKS, OTHERS

TRAINING = ("fig3", "s3", "s4", "s5", "losses", "updates")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Two corpora, two modes, two seeds; four starts and a penalty on the first."""
    folder = tmp_path_factory.mktemp("runs")
    changes: list[dict[str, Any]] = [
        {},
        {"mode": "decoder"},
        {"init": "symmetric"},
        {"init": "paired"},
        {"init": "skew"},
        {"init": "mimetic"},
        {"penalty": "symmetric", "penalty_weight": 0.1},
    ]
    made = []
    for index, change in enumerate(changes):
        for seed in (1, 2):
            made.append(make_run(folder / f"{index}-{seed}", seed=seed, **change))
    return Sources(tuple(made))


def several(folder: Path, **seeds: int) -> Sources:
    """An encoder and a decoder on each corpus, with its seed."""
    made = []
    for corpus, seed in seeds.items():
        for mode in ("encoder", "decoder"):
            run = make_run(folder / f"{mode}{corpus}", corpus=corpus, mode=mode, seed=seed)
            made.append(run)
    return Sources(tuple(made))


def laid_out(figure: Figure) -> Figure:
    """Warnings of a layout that does not fit are errors here."""
    figure.draw_without_rendering()
    return figure


@pytest.mark.parametrize("name", ["fig3", "s5", "losses", "updates"])
def test_runs_are_drawn(name: str, runs: Sources) -> None:
    laid_out(draw(name, runs))


@pytest.mark.parametrize("name", ["s3", "s4"])
def test_corpora_are_rows(name: str, tmp_path: Path) -> None:
    figure = laid_out(draw(name, several(tmp_path, a=1, b=1)))
    texts: list[str] = []
    for axis in figure.axes:
        texts += [axis.title.get_text(), axis.get_title(loc="left")]
        texts += [text.get_text() for text in axis.texts]
    assert {"a", "b"} <= set(texts)


@pytest.mark.parametrize("name", ["s3", "s4", "updates"])
def test_no_row_is_cut_off(name: str, tmp_path: Path) -> None:
    for axis in draw(name, several(tmp_path, a=3, b=4, c=5)).axes:
        low, high = axis.get_ylim()
        for line in axis.lines:
            assert low <= min(line.get_ydata()) <= max(line.get_ydata()) <= high


def test_two_corpora_do_not_go_into_figure_3(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="fig3 shows one pair"):
        draw("fig3", several(tmp_path, a=1, b=1))


@pytest.mark.parametrize("name", TRAINING)
def test_one_layer_one_look_one_seed_are_enough(name: str, tmp_path: Path) -> None:
    change = {"init": "skew"} if name in ("s5", "losses") else {"mode": "decoder"}
    pair = [make_run(tmp_path / str(i), (0,), layers=1, **c) for i, c in enumerate(({}, change))]
    laid_out(draw(name, Sources(tuple(pair))))


def test_many_layers_are_not_all_named(tmp_path: Path) -> None:
    pair = [make_run(tmp_path / m, mode=m, layers=30) for m in ("encoder", "decoder")]
    axes = laid_out(draw("fig3", Sources(tuple(pair)))).axes
    assert len(axes[1].lines) == 30 + 1
    labels = [text for text in axes[1].texts if text.get_text().isdigit()]
    assert 2 <= len(labels) <= 12
    # Each is next to the end of its own line.
    ends = [line.get_ydata()[-1] for line in axes[1].lines[:30]]
    low, high = axes[1].get_ylim()
    for text in labels:
        end = (ends[int(text.get_text())] - low) / (high - low)
        assert abs(text.xyann[1] - end) < 0.03


def test_lines_are_the_numbers(runs: Sources) -> None:
    axes = draw("fig3", runs).axes
    encoders = [run for run in runs.runs if run.name.startswith("0-")]
    curves = score_curves(encoders).filter(quantity="symmetry")
    medians = curves.filter(curves["layer"].is_null())
    assert axes[0].lines[0].get_ydata().tolist() == medians["value"].to_list()
    for layer in range(3):
        drawn = axes[1].lines[layer].get_ydata().tolist()
        assert drawn == curves.filter(layer=layer)["value"].to_list()


def test_starts_keep_their_looks_and_no_two_look_alike() -> None:
    looks = [(look["color"], str(look["linestyle"])) for look in (*LOOKS.values(), *OTHERS)]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize("name", ["fig2"])
def test_the_packages_own_models_stand_in(name: str) -> None:
    assert FIGURES[name].stand_in == FIGURES["coupling"].stand_in == "blocks"
    laid_out(draw(name, Sources(blocks=demo_table().details.blocks)))


def test_own_scans_are_named_in_figure_2_next_to_the_published_extremes() -> None:
    figure = laid_out(draw("fig2", Sources(table=table(row(0, checkpoint="mine")))))
    names = {text.get_text() for text in figure.axes[0].texts}
    assert {"mine", "BERT-2L-128", "LLaMA2-13B-chat"} <= names
    without_own = laid_out(draw("fig2", Sources()))
    assert names - {"mine"} == {text.get_text() for text in without_own.axes[0].texts}
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[:2] == ["encoder, published (21)", "decoder, published (21)"]
    assert "encoder, own scan (1)" in labels
    assert "wrong pairs of heads (17)" in labels


def test_terms_within_and_between_heads() -> None:
    sources = Sources(table=demo_table())
    rows = numbers("heads", sources)
    within, between = (rows[f"symmetry_{where}_heads"] for where in ("within", "between"))
    np.testing.assert_allclose(within + between, rows["symmetry"], atol=1e-6)
    axes = laid_out(draw("heads", sources)).axes
    assert [axis.get_title(loc="left") for axis in axes] == ["encoder", "decoder"]
    assert [bar.get_height() for bar in axes[0].patches[:4]] == within.to_list()[:4]


def test_coupling_is_that_of_the_details_in_even_rows() -> None:
    blocks = demo_table().details.blocks
    panels = [a for a in laid_out(draw("coupling", Sources(blocks=blocks))).axes if a.images]
    assert panels[0].get_gridspec().ncols == 4  # as many as a model has layers
    for panel, block in zip(panels, blocks, strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), block.coupling)
        assert panel.get_xlabel() == "head b"


def test_distances_are_curves_of_the_layers() -> None:
    places = product((0, 1), (4, 0, 2))
    rows = [
        row(layer, distance=distance, symmetry=layer + distance / 10) for layer, distance in places
    ]
    figure = laid_out(draw("distances", Sources(table=table(*rows))))
    lines = figure.axes[0].lines
    assert lines[0].get_xdata().tolist() == [0, 2, 4]
    assert lines[1].get_ydata().tolist() == [1.0, 1.2, 1.4]
    assert not figure.axes[0].patches


def test_distances_are_drawn_over_what_chance_gives() -> None:
    size = {"d_query": 32, "d_key": 32, "rank": 8}
    shown = table(*(row(0, distance=distance, **size) for distance in (0, 2)))
    figure = laid_out(draw("distances", Sources(table=shown)))
    for axis, score in zip(figure.axes, SCORE_LABELS, strict=True):
        (band,) = axis.patches
        low, high = untrained_range(32, 8)[score]
        assert band.get_y() == low
        assert band.get_y() + band.get_height() == pytest.approx(high)
    # At 95 %, about 2 of 40 other forms lie outside, whatever rotates their rank dimensions.
    rng = np.random.default_rng(1)
    turn = np.linalg.qr(rng.normal(size=(8, 8)))[0]
    factors = ((rng.normal(size=(32, 8)) @ turn, rng.normal(size=(32, 8))) for _ in range(40))
    drawn = [wqk.BilinearForm(*pair) for pair in factors]
    low, high = untrained_range(32, 8)["symmetry"]
    assert sum(not low <= float(wqk.symmetry(form)) <= high for form in drawn) <= 6


@pytest.mark.parametrize(
    ("name", "needed"),
    [(name, "got no") for name in TRAINING if name not in ("fig3", "s3", "s4", "s5")]
    + [("distances", "--distance 0:64"), ("heads", "wqk scan"), ("coupling", "--details")],
)
def test_what_a_figure_lacks_is_told(name: str, needed: str) -> None:
    with pytest.raises((RunError, TableError), match=needed):
        draw(name, Sources())


def test_there_is_no_other_figure() -> None:
    with pytest.raises(UnknownName, match="no such figure; figures are fig2, s1"):
        draw("fig9", Sources())


@given(st.lists(st.floats(0, 1), max_size=8).map(sorted), st.floats(0.01, 0.2))
def test_names_are_moved_apart_in_order_and_no_others(heights: list[float], gap: float) -> None:
    moved = spread_apart(heights, gap)
    assert (np.diff(moved) >= gap - 1e-9).all()
    if gap * len(heights) < 1:
        assert all(-1e-9 <= height <= 1 + 1e-9 for height in moved)
    if (np.diff(heights) >= gap).all():
        assert moved == pytest.approx(heights)


def test_shades_go_from_light_to_dark() -> None:
    lightness = [sum(shade) for shade in shades(BLUE, 12)]
    assert lightness == sorted(lightness, reverse=True)


def test_no_title_of_a_form_is_cut_off() -> None:
    from wqk.forms.images import matrix
    from wqk_lab.figures.by_layer import picture

    image = picture(demo_table().details.blocks[0])
    scores = "symmetry 0.58, directionality -0.05, directionality (excess) -0.10"
    figure = laid_out(matrix(image, "a-model-with-a-rather-long-name, layer 3, head 11", scores))
    page = figure.bbox
    for text in (figure._suptitle, *(axis._left_title for axis in figure.axes)):
        box = text.get_window_extent()
        assert page.x0 <= box.x0
        assert box.x1 <= page.x1
    assert "−0.10" in figure.axes[1]._left_title.get_text()
    down, across = (len(norms) - 0.5 for norms in (image.row_norms, image.column_norms))
    assert figure.axes[0].images[0].get_extent() == [-0.5, across, down, -0.5]


def test_both_panels_of_losses_show_the_seeds_that_have_a_partner(tmp_path: Path) -> None:
    cells = [("random", 1), ("random", 2), ("random", 3), ("symmetric", 1), ("symmetric", 2)]
    runs = [make_run(tmp_path / f"{init}{seed}", init=init, seed=seed) for init, seed in cells]
    counts = numbers("losses", Sources(tuple(runs))).group_by("start", "quantity").max()
    assert set(counts["runs"]) == {2}


@pytest.mark.parametrize("name", ["fig2", "s2"])
def test_names_of_models_cover_neither_each_other_nor_a_line_nor_an_edge(name: str) -> None:
    figure = draw(name, Sources())
    for axis in figure.axes[:2]:
        boxes = [text.get_window_extent() for text in axis.texts if len(text.get_text()) > 1]
        assert len(boxes) > 3
        assert not any(box.overlaps(other_box) for box, other_box in combinations(boxes, 2))
        assert all(axis.bbox.x0 <= box.x0 and box.x1 <= axis.bbox.x1 for box in boxes)
        _, zero = axis.transData.transform((1, 0))
        assert not any(box.y0 < zero < box.y1 for box in boxes)


@pytest.mark.parametrize("name", ["fig3", "s4", "s5"])
def test_a_note_explains_the_bands_that_are_drawn(name: str) -> None:
    """The paper's own runs have one seed each."""
    figure = draw(name, Sources())
    notes = " ".join(text.get_text() for text in figure.findobj(Text))
    assert "layers" in notes
    assert "seeds" not in notes


def test_layers_that_end_close_together_are_all_named_if_there_is_room() -> None:
    axis = new_figure(4, 3).subplots()
    assert len(with_room(axis, [(0.020, "0", "k"), (0.023, "1", "k")])) == 2
    crowded = [(0.02, str(layer), "k") for layer in range(24)]
    assert [name for _, name, _ in with_room(axis, crowded)] == ["0"]
