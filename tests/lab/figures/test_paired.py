"""A survey of pairs, from a stand-in hub to the figure: what is planted is found, and no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.checkpoints.serving import own_hub
from tests.command import run
from tests.lab.figures.making import row
from tests.lab.runs.small_pairs import repositories

from wqk.errors import RunError
from wqk.tables.score_table import ScoreTable
from wqk_lab.figures import read_sources
from wqk_lab.figures.paired import (
    LABELS,
    LEVEL,
    PAIR_SCHEMA,
    POWER,
    TESTED,
    detectable_shift,
    pair_rows,
    pair_tests,
    paired_panels,
    sentences,
)
from wqk_lab.runs.pairs import UPDATE_SCHEMA, Pair, PairSurvey, pairs, survey_pairs

MISSING = "JetLM/SDAR-1.7B-Chat"


def surveyed(effect: float, folder: Path, spacing: int = 1) -> PairSurvey:
    """The small set, but for one repository, surveyed from a hub over HTTP; or some of it."""
    with (
        pytest.MonkeyPatch.context() as patch,
        own_hub(folder, patch) as hub,
        ThreadPoolExecutor(4) as executor,
    ):
        hub.repositories |= repositories(effect)
        del hub.repositories[MISSING]
        survey = survey_pairs(folder / "out", executor=executor, chosen=pairs()[::spacing])
        # Weights are asked for in parts, never whole.
        requests = [request for request in hub.cdn.log if request.method == "GET"]
        assert requests
        assert all(request.range is not None for request in requests)
        return survey


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[PairSurvey, Path]:
    folder = tmp_path_factory.mktemp("planted")
    return surveyed(0.3, folder), folder / "out"


def test_a_planted_effect_is_found_in_the_pairs_that_have_it(planted: Any) -> None:
    survey, _ = planted
    rows = pair_rows(survey)
    by_name = {(test.relation, test.quantity): test for test in pair_tests(rows)}
    assert [*by_name] == [*TESTED]
    for relation, pairs_read in (("twins", 7), ("converted", 29)):
        test = by_name[relation, "symmetry"]
        assert (test.pairs, test.agree) == (pairs_read, pairs_read)
        assert test.p < test.corrected < 0.05
        assert test.detectable < test.median
    assert by_name["converted", "update_symmetry_excess"].corrected < 0.001
    # Adding the queries to the keys gives columns no more weight than rows.
    directions = [by_name[relation, "directionality"] for relation in ("twins", "converted")]
    assert all(test.corrected is not None and test.corrected > 0.05 for test in directions)


def test_an_untrained_copy_differs_by_exactly_zero(planted: Any) -> None:
    rows = pair_rows(planted[0]).filter(relation="control")
    assert rows.height == 2 * (1 + 4)
    assert set(rows["symmetry"]) == set(rows["directionality"]) == set(rows["moved"]) == {0.0}
    of_controls = [line for line in sentences(planted[0], rows) if line.startswith("control")]
    assert len(of_controls) == 1
    assert "MOVED" not in of_controls[0]
    moved = rows.with_columns(moved=pl.lit(1e-12))
    assert any("IT MOVED" in line for line in sentences(planted[0], moved))


def test_every_model_is_read_with_the_mask_that_it_attends_with(planted: Any) -> None:
    frame = planted[0].scores.frame.filter(kind="self").select("checkpoint", "stack").unique()
    stacks: dict[str, set[str]] = {}
    for checkpoint, stack in frame.iter_rows():
        stacks.setdefault(checkpoint, set()).add(stack)
    for pair in planted[0].pairs:
        if pair.after == MISSING or pair.recipe == "MLMvsCLM":  # whose class is not known
            continue
        if pair.relation in ("twins", "converted") and not pair.after_stack:
            masks = ({"decoder"}, {"encoder"})
            expected = masks if pair.expected == 1 else masks[::-1]
            assert (stacks[pair.before], stacks[pair.after]) == expected, pair.title


def test_a_repository_that_is_missing_is_skipped_and_said(planted: Any) -> None:
    survey, _ = planted
    assert [*survey.problems] == [p.title for p in survey.pairs if p.after == MISSING]
    note = next(line for line in sentences(survey, pair_rows(survey)) if "skipped" in line)
    assert MISSING in note
    assert pair_rows(survey)["pair"].n_unique() == len(pairs()) - 1


def test_the_update_is_split_and_placed_in_the_parents_span(planted: Any) -> None:
    rows = pair_rows(planted[0]).filter(pl.col("relation") == "converted")
    shares = rows["symmetric_share"] + rows["skew_share"]
    assert np.allclose(shares, 1)
    # c A Aᵀ: one side of it is in the span, and the other as A is to B, which is by chance.
    assert rows.filter(expected=1)["span"].mean() == pytest.approx(8 / 32, abs=0.03)
    assert set(rows["span_chance"]) == {8 / 32}
    assert rows["head"].is_not_null().any()
    assert pair_rows(planted[0]).filter(relation="twins")["head"].is_null().all()


def test_the_figure_and_its_numbers_come_from_the_folder_alone(planted: Any) -> None:
    _, folder = planted
    assert read_sources(folder).pairs is not None
    out = folder.parent / "pairs.png"
    result = run("lab", "figure", "pairs", folder, "--out", out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert f"skipped: {pairs()[-5].before}" in result.output
    assert "twins, change of symmetry: +" in result.output


def test_each_panel_names_the_tests_of_what_it_shows(planted: Any) -> None:
    rows = pair_rows(planted[0])
    panels = paired_panels(rows).axes
    for panel, (quantity, label) in zip(panels, LABELS.items(), strict=True):
        assert label in (panel.get_title(), panel.get_ylabel())
        tests = [test for test in pair_tests(rows) if test.quantity == quantity]
        remarks = [f"{test.relation}: {test.agree} of {test.pairs}" for test in tests]
        title = panel.get_title(loc="left")
        assert all(remark in title for remark in remarks), title
        assert title.count(";") == max(len(tests) - 1, 0)


def test_nothing_is_found_where_nothing_is_planted(tmp_path: Path) -> None:
    tests = pair_tests(pair_rows(surveyed(0.0, tmp_path, spacing=2)))
    assert all(test.corrected is not None and test.corrected > 0.05 for test in tests)


def test_the_power_is_what_it_is_said_to_be() -> None:
    from scipy.stats import wilcoxon

    dice, n = np.random.default_rng(0), 20
    shift = detectable_shift(np.resize([-1.0, 1.0], n) * np.sqrt((n - 1) / n))
    assert shift is not None
    draws = dice.normal(shift, 1, size=(1_000, n))
    is_detected = wilcoxon(draws, alternative="greater", axis=1).pvalue <= LEVEL / len(TESTED)
    assert np.mean(is_detected) == pytest.approx(POWER, abs=0.05)


@pytest.mark.parametrize("factor", [1e-3, 0.5, 40.0])
def test_the_shift_that_can_be_found_has_the_unit_of_the_values(factor: float) -> None:
    values = np.random.default_rng(1).normal(0.3, 1, 12)
    shift = detectable_shift(values)
    assert shift is not None
    assert detectable_shift(factor * values) == pytest.approx(factor * shift)
    assert detectable_shift(values + factor) == pytest.approx(shift)


def test_too_few_pairs_are_said_to_be_too_few() -> None:
    assert detectable_shift(np.arange(6.0)) is None
    assert detectable_shift(np.arange(7.0)) is not None


def survey_of(pair: Pair, scores: ScoreTable, updates: list[dict[str, Any]]) -> PairSurvey:
    """A survey of one pair, with updates of some layers and heads."""
    schema = {"pair": pl.String(), **UPDATE_SCHEMA}
    rows = [{**dict.fromkeys(schema), "pair": pair.title, **update} for update in updates]
    return PairSurvey((pair,), {}, scores, pl.DataFrame(rows, schema=schema))


@pytest.mark.parametrize("relation", ["converted", "twins"])
def test_columns_of_a_pair_are_differences_of_the_same_layers_and_heads(relation: Any) -> None:
    """Heads of models that were trained apart do not correspond; other stacks are left out."""
    rows, scores_of = [], {}
    random = np.random.default_rng(0)
    for checkpoint in ("a", "b"):
        for stack in ("encoder", "decoder"):
            for layer, head in ((0, None), (3, None), (0, 1)):
                symmetry, excess = random.uniform(-1, 1, 2)
                place = {"checkpoint": checkpoint, "stack": stack, "head": head}
                scores = {"symmetry": symmetry, "directionality_excess": excess}
                rows.append(row(layer, **place, **scores, directionality=9.0))
                scores_of[checkpoint, stack, layer, head] = symmetry, excess
        rows.append(row(0, checkpoint=checkpoint, kind="cross", symmetry=9.0))
    stacks = {"before_stack": "decoder", "after_stack": "encoder"}
    pair = Pair("method", relation, "a", "b", **stacks, expected=-1)
    measured = {"symmetry": 0.5, "symmetry_null": 0.125, "directionality_excess": -0.25}
    measured |= {"moved": 2.0, "span": 0.75, "span_chance": 0.0625}
    table = ScoreTable.from_rows(rows)
    survey = survey_of(pair, table, [{"layer": 3, **measured}])
    by_place = {(each["layer"], each["head"]): each for each in pair_rows(survey).to_dicts()}
    places = [(0, None), (3, None), *([(0, 1)] if relation == "converted" else [])]
    assert sorted(by_place, key=str) == sorted(places, key=str)
    for layer, head in places:
        before = scores_of["a", "decoder", layer, head]
        after = scores_of["b", "encoder", layer, head]
        each = by_place[layer, head]
        for score, first, last in zip(("symmetry", "directionality"), before, after, strict=True):
            values = [each[f"{score}_before"], each[f"{score}_after"], each[score]]
            assert values == pytest.approx([first, last, last - first])
        assert (each["pair"], each["recipe"], each["relation"]) == (pair.title, "method", relation)
        assert (each["expected"], each["depth"]) == (-1, layer / 3)
    update = by_place[3, None]
    assert {name: update[f"update_{name}"] for name in ("symmetry", "symmetry_null")} == {
        "symmetry": 0.5,
        "symmetry_null": 0.125,
    }
    assert (update["update_symmetry_excess"], update["update_directionality"]) == (0.375, -0.25)
    assert (update["symmetric_share"], update["skew_share"]) == (0.75, 0.25)
    assert (update["moved"], update["span"], update["span_chance"]) == (2.0, 0.75, 0.0625)
    assert by_place[0, None]["update_symmetry"] is None
    unnamed = survey_of(Pair("method", relation, "a", "b"), table, [])
    with pytest.raises(RunError, match="a has several stacks, and the pair names none"):
        pair_rows(unnamed)


def test_a_survey_without_a_pair_that_was_read_has_no_figure() -> None:
    pair = Pair("method", "control", "a", "b")
    empty = ScoreTable.from_rows([row(0)])
    survey = replace(survey_of(pair, empty, []), problems={pair.title: "a is not there"})
    with pytest.raises(RunError, match="no pair was read: a is not there"):
        pair_rows(survey)
    with pytest.raises(RunError, match="pairs needs the folder of a survey of pairs"):
        pair_rows(None)


def test_sentences_on_controls_and_contrasts_have_their_largest_change() -> None:
    rows = pl.DataFrame(
        [
            {**dict.fromkeys(PAIR_SCHEMA), "pair": relation, "relation": relation, "layer": layer}
            | {"symmetry": symmetry, "moved": moved}
            for relation, changes in (
                ("contrast", [(-0.5, 0.25), (0.125, 0.5), (0.25, 0.1)]),
                ("control", [(0.0, 0.0), (0.0, 0.0)]),
            )
            for layer, (symmetry, moved) in enumerate(changes)
        ],
        schema=PAIR_SCHEMA,
    )
    pair = Pair("method", "control", "a", "b")
    survey = replace(
        survey_of(pair, ScoreTable.from_rows([row(0)]), []), problems={"x → y": "not there"}
    )
    *_, contrast, control, skipped = sentences(survey, rows)
    assert contrast == (
        "contrast (nothing predicted): contrast: symmetry changed by +0.12 in the median layer, by "
        "0.5 at most; the forms moved by 0.5 of their norm at most"
    )
    assert control == (
        "control (must be exactly 0): control: symmetry changed by +0 in the median layer, by 0 at "
        "most; the forms moved by 0 of their norm at most"
    )
    assert skipped == "skipped: x → y: not there"
