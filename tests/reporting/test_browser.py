"""The report as a reader has it: in a browser, with mouse and keyboard, on paper, offline."""

from __future__ import annotations

import csv
import io
import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.reporting.making import EVIL, rows, table, trained, training

import wqk
from wqk.tables.details import Details
from wqk.tables.schema import SCHEMA

WAIT = 60_000  # milliseconds; a machine may be busy
MODELS = ("encoder", "decoder")
STEPS = (0, 20, 100)  # in another order as text
LONG = "a-name-with-many-parts-" * 4 + "and_one_part_that_no_line_of_a_phone_can_hold_as_it_is"


def distant() -> Any:
    return table(*(rows("far", distance=distance, seed=distance) for distance in STEPS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Reports of several kinds, each written once."""
    place = tmp_path_factory.mktemp("reports")
    models = [wqk.demo_model(name) for name in MODELS]
    details = [wqk.scan(model, details=True).details for model in models]
    wqk.write_report([wqk.scan(m) for m in models], place / "pair.html", details=details)
    wqk.write_report(training("run", STEPS), place / "steps.html")
    wqk.write_report(distant(), place / "distances.html")
    runs = list(itertools.chain.from_iterable(trained(place, mode) for mode in MODELS))
    wqk.write_report([run.scores for run in runs], place / "runs.html", runs=runs)
    wqk.write_report([table(rows(f"m{i}", seed=i)) for i in range(7)], place / "many.html")
    wqk.write_report(table(rows(EVIL, layers=2), rows("plain")), place / "evil.html", title=EVIL)
    measured = wqk.scan(wqk.demo_model("decoder"), measures=["spectrum"])
    wqk.write_report(measured, place / "measured.html")
    pairs = wqk.compose(wqk.demo_model("induction"))
    pairs = replace(pairs, frame=pairs.frame.with_columns(checkpoint=pl.lit(LONG)))
    long = table(rows(LONG, layers=2), rows(f"{LONG}-2", layers=2))
    wqk.write_report(long, place / "long.html", compositions=[pairs])
    odd = rows("odd", symmetry=None, symmetry_null=None, status="degenerate", norm=float("nan"))
    scores = [table(odd), table(rows("no layers")).heads]
    wqk.write_report(scores, place / "odd.html", details=Details(()))
    return place


class Reader:
    """A page that is watched: complaints and requests are kept."""

    def __init__(self, browser: Any, path: Any, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1200, "height": 900}, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.own = path.as_uri()

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *error: object) -> None:
        self.context.close()
        assert not self.complaints
        foreign = [url for url in self.requests if not url.startswith((self.own, "data:", "blob:"))]
        assert not foreign


@pytest.fixture
def pair(browser: Any, folder: Any) -> Any:
    """The page of the two models, watched."""
    with Reader(browser, folder / "pair.html") as page:
        yield page


def curves(page: Any, section: str, figure: int = 0) -> dict[str, Any]:
    """The named curves that a figure shows once it follows the last choice: their values."""
    page.evaluate("id => document.getElementById(id).scrollIntoView()", section)
    page.wait_for_function(
        "([id, i]) => document.querySelectorAll(`#${id}:not([aria-busy]) .plot`)[i]?.data",
        arg=[section, figure],
    )
    traces = page.evaluate(
        "([id, i]) => document.querySelectorAll(`#${id} .plot`)[i].data"
        ".map(({name, x, y, z}) => ({name, x, y, z}))",
        [section, figure],
    )
    return {trace.get("name") or str(number): trace for number, trace in enumerate(traces)}


def column(page: Any, name: str) -> list[str]:
    """The cells that the table of rows shows of a column."""
    names = page.locator("#table th").evaluate_all("cells => cells.map(c => c.dataset.column)")
    return page.locator(f"#table tbody td:nth-child({names.index(name) + 1})").all_inner_texts()


def test_measures_on_request_have_a_panel_each_with_their_value_by_chance(browser, folder):
    layers = wqk.scan(wqk.demo_model("decoder"), measures=["spectrum"]).layers.frame
    with Reader(browser, folder / "measured.html") as page:
        drawn = [curves(page, "measures", i) for i in range(4)]
        assert page.locator("#measures figure").count() == 4
    for figure, name in zip(
        drawn,
        ("spectral_norm", "stable_rank", "effective_rank", "eigenvalue_positivity"),
        strict=True,
    ):
        shown = {label: curve["y"] for label, curve in figure.items()}
        of_model = next(y for label, y in shown.items() if label.endswith("decoder"))
        assert of_model == pytest.approx(layers[name].to_list(), rel=1e-5)
        if name != "eigenvalue_positivity":
            by_chance = next(y for label, y in shown.items() if label.endswith("null"))
            assert by_chance == pytest.approx(layers[f"{name}_null"].to_list(), rel=1e-5)
    with Reader(browser, folder / "pair.html") as page:
        assert not page.locator("#measures").is_visible()


@pytest.mark.parametrize("name", ["evil", "odd"])
def test_every_figure_is_drawn_without_a_complaint(browser, folder, name):
    with Reader(browser, folder / f"{name}.html") as page:
        page.evaluate("drawEverything()")
        assert page.locator("section:not([hidden]) .plot .main-svg").count() >= 6
        assert page.title() != "owned"


def test_curves_are_the_scores_and_dots_the_heads(pair):
    for figure, score in enumerate(("symmetry", "directionality_excess")):
        shown = curves(pair, "layers", figure)
        for name in MODELS:
            table = wqk.scan(wqk.demo_model(name))
            np.testing.assert_allclose(
                shown[f"demo:{name}"]["y"], table.layers.frame[score], rtol=1e-5
            )
            dots = shown[f"demo:{name}, heads"]
            assert shown[f"demo:{name}"]["x"] == table.layers.frame["layer"].to_list()
            assert dots["x"] == table.heads.frame["layer"].to_list()
            np.testing.assert_allclose(dots["y"], table.heads.frame[score], rtol=1e-5)


def test_an_encoder_and_a_decoder_have_the_colors_of_every_figure(browser, folder):
    from wqk._style import STACK_COLORS

    with Reader(browser, folder / "pair.html", color_scheme="light") as page:
        curves(page, "layers")
        drawn = page.evaluate(
            "Object.fromEntries(document.querySelector('#layers .plot').data"
            ".filter(({line}) => line).map(({name, line}) => [name, line.color]))"
        )
    for name, color in STACK_COLORS.items():
        red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
        assert drawn[f"demo:{name}"] == f"rgba({red},{green},{blue},1)"


def test_losses_are_means_in_the_colors_of_their_models(browser, folder):
    with Reader(browser, folder / "runs.html", color_scheme="light") as page:
        curves(page, "losses")
        drawn = page.evaluate("document.querySelector('#losses .plot').data")
    shown = {trace["name"]: trace for trace in drawn if trace.get("name")}
    for mode in MODELS:
        name = next(name for name in shown if mode in name)
        assert shown[name]["x"] == [0, 5, 10]
        assert shown[name]["y"] == pytest.approx([3.85, 2.35, 2.85])
        red, _, blue = map(int, re.findall(r"\d+", shown[name]["line"]["color"])[:3])
        assert (blue > red) == (mode == "encoder")
    bands = [trace["y"] for trace in drawn if not trace.get("name")]
    assert [min(losses) for losses in bands] == pytest.approx([2.3] * len(MODELS))
    assert [max(losses) for losses in bands] == pytest.approx([3.9] * len(MODELS))


def test_heads_obey_tabs_keyboard_and_order_and_tell_what_lies_under_the_mouse(pair):
    heads = wqk.scan(wqk.demo_model("encoder")).heads.frame
    for key, score in (
        (None, "symmetry"),
        ("ArrowRight", "directionality_excess"),
        ("End", "norm"),
        ("ArrowRight", "symmetry"),
        ("ArrowLeft", "norm"),
        ("Home", "symmetry"),
    ):
        if key:
            pair.keyboard.press(key)
        else:
            pair.locator(f"#tab-{score}").click()
        tab = pair.locator("[role=tab][aria-selected=true]")
        assert tab.get_attribute("id") == f"tab-{score}"
        assert pair.evaluate("document.activeElement.id") == f"tab-{score}"
        assert pair.locator("[role=tab][tabindex='0']").count() == 1
        (shown,) = curves(pair, "heads").values()
        expected = heads[score].to_numpy().reshape(4, 4)
        np.testing.assert_allclose(shown["z"], expected, rtol=1e-5)
    pair.locator("#order").select_option("score")
    (shown,) = curves(pair, "heads").values()
    expected = -np.sort(-heads["symmetry"].to_numpy().reshape(4, 4))
    np.testing.assert_allclose(shown["z"], expected, rtol=1e-5)

    pair.locator("#heads .plot").first.scroll_into_view_if_needed()
    box = pair.locator("#heads .plot").first.locator(".nsewdrag").bounding_box()
    pair.mouse.move(box["x"] + 0.875 * box["width"], box["y"] + 0.125 * box["height"])
    pair.wait_for_selector("#heads .hovertext")
    tooltip = pair.locator("#heads .hovertext").first.text_content()
    lowest = heads.filter(layer=0).sort("symmetry").row(0, named=True)
    assert f"layer 0, head {lowest['head']}" in tooltip
    assert f"symmetry {lowest['symmetry']:.3f}".replace("-", "−") in tooltip


def test_rows_are_sorted_by_their_headings_and_filtered_by_what_is_typed(pair):
    expected = pl.concat([wqk.scan(wqk.demo_model(name)).frame for name in MODELS])
    heading = pair.locator("#table th[data-column=symmetry]")
    for direction in ("descending", "ascending"):
        heading.locator("button").press("Enter")
        assert heading.get_attribute("aria-sort") == direction
        values = expected["symmetry"].sort(descending=direction == "descending")
        shown = [float(text.replace("−", "-")) for text in column(pair, "symmetry")]
        np.testing.assert_allclose(shown, values, atol=5.1e-4)
    pair.locator("#table th[data-column=symmetry_within_heads] button").click()
    assert column(pair, "symmetry_within_heads")[8:] == ["–"] * 32
    assert pair.locator("#table th[aria-sort=descending]").count() == 1

    frame = expected.filter(checkpoint=str(wqk.demo_model("decoder")))
    pair.locator("#filter").fill("DECODER layer=1 symmetry > 0.03")
    kept = frame.filter(pl.col("layer") == 1, pl.col("symmetry") > 0.03)
    assert 0 < kept.height < 5
    assert len(column(pair, "layer")) == kept.height
    assert pair.locator("#count").inner_text().startswith(f"{kept.height} of 40 rows")
    pair.locator("#filter").fill("")
    pair.locator("#which").select_option("layers")
    assert column(pair, "head") == ["all"] * 8
    pair.locator("#filter").fill("no such model")
    assert column(pair, "head") == []


def test_the_filter_reads_the_words_of_the_table_and_refuses_unknown_columns(pair):
    pair.locator("#filter").fill("head=all model=demo:decoder")
    assert column(pair, "head") == ["all"] * 4
    assert column(pair, "model") == ["demo:decoder"] * 4
    pair.locator("#filter").fill("status=OK null<0")
    assert column(pair, "head") == []
    for typed, message in (("layr=3", "No column “layr”"), ("status>ok", "needs a number")):
        pair.locator("#filter").fill(typed)
        assert message in pair.locator("#count").inner_text()
        assert pair.locator("#filter").get_attribute("aria-invalid") == "true"
    pair.locator("#filter").fill("layer=3")
    assert pair.locator("#filter").get_attribute("aria-invalid") is None
    assert len(column(pair, "layer")) == 10


def test_nothing_leaves_the_page_whatever_is_pressed(pair):
    opened: list[str] = []
    pair.context.on("page", lambda new: opened.append(new.url))
    pair.evaluate(
        "window.open = (...to) => { throw Error(`opened ${to}`); };"
        "HTMLFormElement.prototype.submit = () => { throw Error('submitted'); }; 0"
    )
    pair.evaluate("drawEverything()")
    assert pair.locator(".modebar-btn").count() == 0
    for button in pair.locator("button:visible:enabled").all():
        button.click()
    for key in ("Tab", "Enter", "Space", "ArrowRight", "Delete", "c", "s"):
        for _ in range(8):
            pair.keyboard.press(key)
    assert opened == []
    configuration = pair.evaluate(
        "[...document.querySelectorAll('.plot')].filter((p) => p._context)"
        ".map(({_context: c}) => [c.showSendToCloud, c.displayModeBar, c.plotlyServerURL])"
    )
    assert len(configuration) > 6
    assert {tuple(settings) for settings in configuration} == {(False, False, "")}


def test_one_legend_tells_the_models_apart_without_color(browser, folder):
    with Reader(browser, folder / "many.html") as page:
        page.evaluate("drawEverything()")
        assert page.locator("#legend li span").all_inner_texts() == [f"m{i}" for i in range(7)]
        for legend in page.locator(".plot .legend").all_text_contents():  # of terms, not of models
            assert "within" in legend
            assert not re.search(r"m\d", legend)
        looks = page.evaluate("GROUPS.map((_, i) => `${seriesDash(i)} ${seriesSymbol(i)}`)")
        assert len(set(looks)) == 7
        assert page.locator("#explain-null").is_hidden()
    with Reader(browser, folder / "steps.html") as page:
        assert page.locator("#legend").is_hidden()


def test_scores_can_be_zoomed_and_zoomed_back(pair):
    reach = "document.querySelector('#layers .plot').layout.yaxis.range[1]"
    curves(pair, "layers")
    assert pair.evaluate(reach) == 1.04
    pair.locator("#zoom").click()
    assert pair.evaluate(reach) < 1
    pair.locator("#zoom").click()
    assert pair.evaluate(reach) == 1.04


def test_a_click_on_a_head_shows_its_numbers_and_its_layer(pair):
    heads = wqk.scan(wqk.demo_model("encoder")).heads.frame
    curves(pair, "heads")
    box = pair.locator("#heads .plot").first.locator(".nsewdrag").bounding_box()
    pair.mouse.click(box["x"] + 0.375 * box["width"], box["y"] + 0.625 * box["height"])
    card = pair.locator("#head")
    card.wait_for(state="visible")
    row = heads.filter(layer=2, head=1).row(0, named=True)
    assert "layer 2, head 1" in card.inner_text()
    assert f"{row['symmetry']:.3f}" in card.inner_text()
    assert "Closest to its transpose: head" in card.inner_text()
    card.locator("a").click()
    assert pair.locator("#layer").input_value() == "2"


def test_on_a_phone_rows_become_cards_of_labeled_numbers(pair):
    pair.set_viewport_size({"width": 390, "height": 800})
    cell = pair.locator("#summary td[data-label=symmetry]").first
    box = cell.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390
    assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") == '"symmetry"'
    overflow = "all => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
    assert pair.locator(".wide").evaluate_all(overflow) == 0


def test_long_names_leave_room_for_marks_and_numbers(browser, folder):
    with Reader(browser, folder / "long.html") as page:
        table = page.locator("#table").locator("xpath=ancestor::div[contains(@class, 'wide')]")
        assert table.evaluate("part => part.scrollWidth <= part.clientWidth")
        page.set_viewport_size({"width": 390, "height": 800})
        mark = page.locator("#summary .key").first.bounding_box()
        assert mark["width"] == pytest.approx(mark["height"], abs=0.5)


def test_norms_have_one_number_that_meets_no_number_of_the_matrix(pair):
    pair.set_viewport_size({"width": 390, "height": 800})
    curves(pair, "matrices")
    for axis in ("xaxis2", "yaxis2"):
        numbers = pair.evaluate(
            "axis => document.querySelector('#matrices .plot')._fullLayout[axis].tickvals", axis
        )
        assert len(numbers) == 1
        assert numbers[0] > 0


def test_names_are_shown_and_saved_as_they_are(browser, folder):
    with Reader(browser, folder / "evil.html") as page:
        assert page.locator("h1").inner_text() == EVIL
        legend = page.locator("#legend li span").first.inner_text()
        assert legend == page.locator("#table tbody td").first.inner_text()
        assert EVIL.endswith(legend)
        page.locator("#filter").fill("owned layer<1")
        with page.expect_download() as download:
            page.locator("#csv").click()
        content = download.value.path().read_text(encoding="utf-8")
    lines = list(csv.DictReader(io.StringIO(content)))
    assert list(lines[0]) == list(SCHEMA)
    assert {line["checkpoint"] for line in lines} == {f"'{EVIL}"}  # no formula
    expected = [row["symmetry"] for row in rows(EVIL, layers=1)]
    np.testing.assert_allclose([float(line["symmetry"]) for line in lines], expected, rtol=1e-5)


def test_scripts_that_come_later_do_not_run(browser, folder):
    reader = Reader(browser, folder / "pair.html")
    reader.page.evaluate(
        "const late = document.createElement('script');"
        "late.textContent = 'document.title = `owned`';"
        "document.body.append(late);"
    )
    assert reader.page.title() != "owned"
    assert "Content Security Policy" in reader.complaints.pop()
    reached = "fetch('https://example.org').then(() => true, () => false)"
    assert reader.page.evaluate(reached) is False
    reader.context.close()


def test_distances_and_steps_are_chosen_by_a_slider_and_what_is_absent_is_said(browser, folder):
    scores = training("run", STEPS).layers.frame
    distances = distant().layers.frame
    with Reader(browser, folder / "distances.html") as page:
        for key, distance in (("Home", 0), ("ArrowRight", 20), ("End", 100)):
            page.locator("#distance").press(key)
            expected = distances.filter(distance=distance)["symmetry"]
            np.testing.assert_allclose(curves(page, "layers")["far"]["y"], expected, rtol=1e-5)
        assert curves(page, "course")["far"]["x"] == list(STEPS)
    with Reader(browser, folder / "steps.html") as page:
        slider = page.locator("#step")
        for key, step in ((None, 100), ("ArrowLeft", 20), ("Home", 0)):
            if key:
                slider.press(key)
            assert slider.get_attribute("aria-valuetext") == str(step)
            expected = scores.filter(step=step)["symmetry"]
            np.testing.assert_allclose(curves(page, "layers")["run"]["y"], expected, rtol=1e-5)
        course = curves(page, "course")
        assert course["run"]["x"] == list(STEPS)
        medians = [scores.filter(step=step)["symmetry"].median() for step in STEPS]
        np.testing.assert_allclose(course["run"]["y"], medians, rtol=1e-5)
        layer = scores.filter(layer=2)["symmetry"]
        np.testing.assert_allclose(course["layer 2"]["y"], layer, rtol=1e-5)
        assert "Over training" in page.locator("nav").inner_text()
        assert "not in this report" in page.locator("#matrices").inner_text()
        assert page.locator("#matrices .plot").count() == 0
        assert page.locator("#heads .absent").is_hidden()


def test_of_many_models_one_is_chosen_and_rows_come_in_pages(browser, folder):
    with Reader(browser, folder / "many.html") as page:
        assert len(column(page, "model")) == 50
        assert page.locator("#previous").is_disabled()
        page.locator("#next").click()
        assert len(column(page, "model")) == 13
        assert page.locator("#next").is_disabled()
        assert "page 2 of 2" in page.locator("#count").inner_text()
        page.locator("#group").select_option(label="m5")
        (shown,) = curves(page, "heads").values()
        heads = table(rows("m5", seed=5)).heads.frame["symmetry"].to_numpy().reshape(3, 2)
        np.testing.assert_allclose(shown["z"], heads, rtol=1e-5)


def test_matrices_and_coupling_follow_the_layer(pair):
    details = wqk.scan(wqk.demo_model("decoder"), details=True).details
    curves(pair, "matrices")
    pair.locator("#layer").press("End")
    block = details.blocks[3]
    matrix = curves(pair, "matrices", 2)["0"]
    np.testing.assert_allclose(matrix["z"], block.image * block.image_unit / 127, rtol=1e-4)
    np.testing.assert_allclose(curves(pair, "matrices", 3)["0"]["z"], block.coupling, atol=6e-4)
    caption = pair.locator("#matrices .said").nth(2).inner_text()
    assert caption.startswith(f"{len(block.outlying_rows)} outlying rows")
    outlying = curves(pair, "matrices", 5)
    expected = np.concatenate([layer.outlying_columns for layer in details.blocks])
    assert sorted(outlying["columns"]["x"]) == sorted(expected.tolist())


def test_the_theme_follows_the_system_and_the_button(pair):
    ink = "getComputedStyle(document.body).color"
    drawn = "document.querySelector('#layers .plot').layout.font.color"
    shades = []
    curves(pair, "layers")
    for scheme in ("light", "dark"):
        pair.emulate_media(color_scheme=scheme)
        offered = {"light": "Dark", "dark": "Light"}[scheme]
        pair.locator("#theme", has_text=f"{offered} theme").wait_for()
        shades.append(pair.evaluate(ink))
        assert re.findall(r"\d+", pair.evaluate(drawn))[:3] == re.findall(r"\d+", shades[-1])
    pair.locator("#theme").click()
    assert pair.evaluate(ink) == shades[0] != shades[1]
    assert re.findall(r"\d+", pair.evaluate(drawn))[:3] == re.findall(r"\d+", shades[0])


def test_the_first_stop_of_the_keyboard_skips_to_the_scores(pair):
    pair.keyboard.press("Tab")
    assert pair.evaluate("document.activeElement.className") == "skip"
    assert pair.locator(".skip").bounding_box()["x"] >= 0
    pair.keyboard.press("Enter")
    assert pair.evaluate("location.hash") == "#summary"
    for _ in range(3):
        pair.keyboard.press("Tab")
    assert pair.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"


@pytest.mark.parametrize("name", ["pair", "many", "long"])
def test_narrow_screens_need_no_sideways_scrolling(browser, folder, name):
    with Reader(browser, folder / f"{name}.html") as page:
        for width in (800, 360):
            page.set_viewport_size({"width": width, "height": 740})
            page.evaluate("drawEverything()")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            drawn = page.locator(".plot .main-svg")
            assert max(drawn.evaluate_all("all => all.map(svg => svg.clientWidth)")) <= width


def test_printed_figures_are_drawn_in_light_and_fit_the_sheet(browser, folder):
    with Reader(browser, folder / "pair.html", color_scheme="dark") as page:
        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        assert (
            page.locator("section:not([hidden]) .plot").count()
            == page.locator("section:not([hidden]) .plot .main-svg:first-child").count()
        )
        assert "27" in page.evaluate("document.querySelector('#layers .plot').layout.font.color")
        ends = page.locator(".plot").evaluate_all(
            "all => all.map(plot => plot.getBoundingClientRect().width)"
        )
        assert max(ends) < 720
        page.evaluate("dispatchEvent(new Event('afterprint'))")
        assert page.locator("#theme").inner_text() == "Light theme"
        assert page.pdf()[:5] == b"%PDF-"


@pytest.mark.parametrize("name", ["pair", "runs", "many", "measured"])
def test_all_figures_are_drawn_when_a_small_report_opens(browser, folder, name):
    with Reader(browser, folder / f"{name}.html") as page:
        panels = page.locator("section:not([hidden]) .panels:visible")
        assert panels.count() > 3
        drawn = panels.evaluate_all("all => all.map((one) => one.querySelectorAll('svg').length)")
        assert all(drawn)


def test_a_large_report_draws_the_figures_out_of_sight_without_scrolling(browser, tmp_path):
    path = tmp_path / "large.html"
    wqk.write_report(table(rows("large", layers=60, heads=96)), path)
    with Reader(browser, path) as page:
        for section in ("layers", "heads", "terms"):
            page.wait_for_selector(f"#{section} .plot .main-svg", state="attached")
        assert page.evaluate("scrollY") == 0


def test_the_largest_model_opens_soon(browser, tmp_path):
    path = tmp_path / "large.html"
    wqk.write_report(table(rows("large", layers=126, heads=128)), path)
    assert path.stat().st_size < 9_000_000
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    # The processor time of the page's own thread, which other programs do not lengthen.
    clock = context.new_cdp_session(page)
    clock.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.as_uri())
    page.wait_for_selector("#layers .plot .main-svg", state="attached")
    metrics = clock.send("Performance.getMetrics")["metrics"]
    assert next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration") < 8
    assert page.locator("#count").inner_text().startswith("16,254 of 16,254 rows")
    context.close()
