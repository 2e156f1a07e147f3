"""Verdicts on claims: the rule, on planted numbers, and the page that states them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wqk.errors import RunError
from wqk_lab.runs.contrasts import (
    Contrast,
    ContrastClaim,
    MeasuredContrast,
    Records,
    claims_table,
    contrasts_table,
    decide,
    evaluate,
    found_at,
    moderate,
    read_definition,
    read_records,
    results,
)

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results"
FOLDERS = ("conversion", "parts", "starts", "linear", "directionality", "collator", "larger")
INCLUDED = {"all-contrasts.md"}


def planted(
    effects: list[float], seeds: int, random: np.random.Generator
) -> list[MeasuredContrast]:
    """Contrasts of two cells each, with these true effects and a deviation of 1."""
    loss = {}
    contrasts = []
    for number, effect in enumerate(effects):
        losses = random.standard_normal(seeds) + effect
        loss[f"a{number}"] = dict(enumerate(losses))
        loss[f"b{number}"] = dict(enumerate(random.standard_normal(seeds)))
        weights = {f"a{number}": 1, f"b{number}": -1}
        contrasts.append(Contrast(f"c{number}", "", "loss", weights))
    records: Records = {"loss": loss}
    return evaluate(contrasts, records)


@pytest.mark.parametrize("name", ["index.md", "table-1.md", *(f"{name}.md" for name in FOLDERS)])
def test_the_page_says_what_the_records_say(name: str) -> None:
    script = runpy.run_path(str(DOCS / "generate_results.py"))
    text = (RESULTS / name).read_text(encoding="utf-8")
    assert {*script["PAGES"]} == {path.name for path in RESULTS.glob("*.md")} - INCLUDED
    assert script["regenerated"](name, text) == text, "run python docs/generate_results.py"


def test_a_changed_record_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in [*RESULTS.rglob("*.csv"), RESULTS / "contrasts.toml"]:
        copy = tmp_path / path.relative_to(RESULTS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text(encoding="utf-8").replace("2.2899", "2.3899"))
    before, after = results(RESULTS), results(tmp_path)
    assert before["symmetric"].value != after["symmetric"].value
    assert before["decoder"].value == after["decoder"].value


@pytest.mark.parametrize("folder", [RESULTS, *(RESULTS / name for name in FOLDERS)])
def test_every_claim_names_a_contrast_and_a_size_that_matters(folder: Path) -> None:
    contrasts, claims = read_definition(folder)
    assert {claim.contrast for claim in claims} <= {contrast.name for contrast in contrasts}
    assert all(claim.matters > 0 for claim in claims)


def test_chance_alone_reproduces_nothing() -> None:
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(60):
        results = planted([0.0] * 20, 4, random)
        verdicts = {
            decide(ContrastClaim("", result.contrast.name, "less", 0.5), result)
            for result in results
        }
        wrong += bool(verdicts & {"reproduced", "too small"})
    assert wrong <= 7  # 5 % of 60 tables are 3


def test_a_variance_that_is_small_by_luck_decides_nothing() -> None:
    """Five differences of .017 ± .0065 among others that vary by .03."""
    random = np.random.default_rng(1)
    cells = {"b": dict.fromkeys(range(5), 0.0), "lucky": {}}
    lucky = -0.017 + 0.0065 * np.array([-1.2, -0.4, 0.0, 0.4, 1.2])
    cells["lucky"] = dict(enumerate(lucky.tolist()))
    for k in range(20):
        cells[f"a{k}"] = dict(enumerate((0.03 * random.standard_normal(5)).tolist()))
    contrasts = [Contrast(name, "", "loss", {name: 1, "b": -1}) for name in cells if name != "b"]
    lucky_one = next(r for r in evaluate(contrasts, {"loss": cells}) if r.contrast.name == "lucky")
    assert lucky_one.low < 0 < lucky_one.high
    alone = lucky.mean() / (lucky.std(ddof=1) / 5**0.5)
    assert alone < -4  # what it would be by itself


def test_intervals_allow_for_all_contrasts() -> None:
    results = planted([3.0] * 3 + [0.0] * 17, 5, np.random.default_rng(2))
    limit = found_at([result.p for result in results], 0.05)
    for result in results:
        low, high = result.allowed
        assert low <= result.low <= result.high <= high
        assert (result.p <= limit) == (low > 0 or high < 0)


def test_a_borrowed_verdict_is_one_that_students_interval_of_the_same_level_does_not_give() -> None:
    """One effect among 19 of none: at 95 % its own interval excludes zero, at that level not."""
    random = np.random.default_rng(5)
    cells = {"b": dict.fromkeys(range(5), 0.0)}
    for k in range(19):
        cells[f"a{k}"] = dict(enumerate(random.normal(0, 0.1, 5).tolist()))
    cells["effect"] = dict(enumerate([0.3, 0.75, 0.5, 0.2, 0.9]))
    contrasts = [Contrast(name, "", "loss", {name: 1, "b": -1}) for name in cells if name != "b"]
    effect = evaluate(contrasts, {"loss": cells})[-1]
    assert effect.allowed[0] > 0
    assert effect.alone.low is not None
    assert effect.alone_allowed is not None
    assert effect.alone.low > 0 > effect.alone_allowed[0]
    assert effect.borrows


@pytest.mark.parametrize(
    ("effect", "verdict"),
    [(-0.3, "reproduced"), (0.3, "reversed"), (0.0, "not reproduced"), (0.012, "not reproduced")],
)
def test_an_effect_beyond_chance_on_the_other_side_is_reversed(effect: float, verdict: str) -> None:
    """An effect that is too small to matter is not reversed, as .012 next to .02."""
    noise = np.array([-0.002, 0.001, 0.0, 0.002, -0.001])
    cells = {"a": dict(enumerate((effect + noise).tolist())), "b": dict.fromkeys(range(5), 0.0)}
    (result,) = evaluate([Contrast("c", "", "loss", {"a": 1, "b": -1})], {"loss": cells})
    assert decide(ContrastClaim("", "c", "less", 0.02), result) == verdict


def test_variances_that_differ_are_moderated_less() -> None:
    random = np.random.default_rng(3)
    equal_variances = (random.chisquare(4, 200) / 4).tolist()
    unequal_variances = (
        random.chisquare(4, 200) / 4 * np.exp(2 * random.standard_normal(200))
    ).tolist()
    assert moderate(unequal_variances, [4] * 200)[1] < 5 < moderate(equal_variances, [4] * 200)[1]


def test_records_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for name, loss in (("a", 1.5), ("b", 1.5), ("c", 1.6)):
        Path(tmp_path, f"{name}.csv").write_text(f"start,seed,step,held_out_loss\nr,1,9,{loss}\n")
        if name == "b":
            assert read_records(tmp_path) == {"loss at step 9": {"r": {1: 1.5}}}
    with pytest.raises(
        RunError, match=r"c\.csv: r, seed 1, has loss at step 9 1\.6; another record"
    ):
        read_records(tmp_path)


def test_a_main_effect_has_a_verdict_only_beside_a_small_interaction() -> None:
    """Two effects of opposite sign whose average is zero."""
    noise = np.random.default_rng(4).normal(0, 0.01, (4, 6))
    cells = {
        name: dict(enumerate((mean + row).tolist()))
        for name, mean, row in zip("abcd", (0.3, 0, 0, 0.3), noise, strict=True)
    }
    weights = {"a": 0.5, "b": -0.5, "c": 0.5, "d": -0.5}
    contrasts = [
        Contrast("main", "", "s", weights),
        Contrast("both", "", "s", {"a": 1, "b": -1, "c": -1, "d": 1}),
    ]
    main, interaction = evaluate(contrasts, {"s": cells})
    claim = ContrastClaim("", "main", "more", 0.1, interaction="both")
    assert decide(claim, main) == "not reproduced"
    assert decide(claim, main, interaction) == "depends"
    assert decide(claim, main, main) == "not reproduced"


@pytest.mark.parametrize(
    ("name", "contrast"),
    [("index.md", "no-such-contrast"), ("conversion.md", "published")],
)
def test_a_bold_sentence_without_its_contrast_stops_the_build(name: str, contrast: str) -> None:
    """None of this name, and one of another page."""
    script = runpy.run_path(str(DOCS / "generate_results.py"))
    text = (RESULTS / name).read_text(encoding="utf-8")
    planted = text + f"\n- **It is the mask.** The loss does nothing (`{contrast}`).\n"
    with pytest.raises(RunError, match="no measured contrast named: It is the mask"):
        script["regenerated"](name, planted)


def test_a_claim_whose_runs_are_still_to_be_made_says_so(tmp_path: Path) -> None:
    Path(tmp_path, "a.csv").write_text("start,seed,step,held_out_loss\na,1,9,1.5\nb,1,9,1.6\n")
    contrast = '[[contrast]]\nname = "c"\nsays = ""\nmeasure = "loss at step 9"\n'
    contrast += 'cells = { "a" = 1, "b" = -1 }\n'
    claim = '[[claim]]\nsays = "a"\ncontrast = "c"\npredicts = "less"\nmatters = 0.1\n'
    Path(tmp_path, "contrasts.toml").write_text(f"{contrast}pending = true\n{claim}")
    assert claims_table(tmp_path)[-1] == "| a | not run | `c` | – | – |"
    Path(tmp_path, "contrasts.toml").write_text(contrast + claim)
    with pytest.raises(RunError, match="single seed"):
        claims_table(tmp_path)


@pytest.mark.parametrize(
    ("weights", "cells", "message"),
    [
        ({"a": 1}, {"a": {1: 1.0}}, "weights must add up to zero"),
        ({"a": 1, "b": -1}, {"a": {1: 1.0}}, "no records of b"),
        ({"a": 1, "b": -1}, {"a": {1: 1.0}, "b": {1: 2.0}}, "single seed"),
    ],
)
def test_contrasts_that_are_none(weights: Any, cells: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        evaluate([Contrast("c", "", "loss", weights)], {"loss": cells})


@pytest.mark.parametrize(("carried", "related"), [((0.1, 0.2, 0.9), 1), ((0.9, 0.2, 0.1), -1)])
def test_layers_of_a_run_are_correlated(tmp_path, carried, related):
    lines = ["model,seed,step,layer,part,share,symmetry"]
    for layer, share in enumerate(carried):
        lines += [f"a,1,9,{layer},whole,1,{0.1 * layer}", f"a,1,9,{layer},skew,.05,"]
        lines += [f"a,1,9,{layer},symmetric,{share},"]
    (tmp_path / "shares.csv").write_text("\n".join(lines), encoding="utf-8")
    records = read_records(tmp_path)["rank correlation by layer at step 9"]
    assert records == {"a layers": {1: pytest.approx(related)}, "a no relation": {1: 0.0}}


def test_a_layer_without_a_share_gives_no_correlation(tmp_path):
    """Scores that explain nothing have no share; counted as zero, the layer would carry least."""
    lines = ["model,seed,step,layer,part,share,symmetry"]
    for seed in (1, 2):
        for layer, share in enumerate((0.1, 0.2, 0.9)):
            share = "" if seed == 2 and layer == 1 else share
            lines += [f"a,{seed},9,{layer},whole,1,{0.1 * layer}", f"a,{seed},9,{layer},skew,.05,"]
            lines += [f"a,{seed},9,{layer},symmetric,{share},"]
    (tmp_path / "shares.csv").write_text("\n".join(lines), encoding="utf-8")
    records = read_records(tmp_path)["rank correlation by layer at step 9"]
    assert records["a layers"] == {1: pytest.approx(1)}


def test_every_decided_verdict_on_a_part_has_words() -> None:
    script = runpy.run_path(str(DOCS / "generate_results.py"))
    decided = {"reproduced", "too small", "reversed", "not reproduced"}
    phrases = script["THAN_RANDOM"]
    assert set(phrases) == {(sign, verdict) for sign in ("less", "more") for verdict in decided}
    # A prediction and the opposite prediction, reversed, are one outcome.
    assert phrases["less", "reproduced"] == phrases["more", "reversed"]
    assert phrases["more", "reproduced"] == phrases["less", "reversed"]


def test_verdicts_on_a_part_are_told_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    script = runpy.run_path(str(DOCS / "generate_results.py"))
    result = results(RESULTS)["published"]
    outcomes = [
        (ContrastClaim("", "a-encoder-skew", "less", 0.1), "reproduced", result),
        (ContrastClaim("", "b-encoder-skew", "less", 0.1), "not reproduced", result),
        (ContrastClaim("", "c-encoder-skew", "less", 0.1), "reproduced", result),
        (ContrastClaim("", "d-encoder-skew", "less", 0.1), "not run", None),
    ]
    part_alone = script["part_alone"]
    monkeypatch.setitem(part_alone.__globals__, "verdicts", lambda folder: outcomes)
    texts = {"a-encoder": "A", "b-encoder": "B", "c-encoder": "C", "d-encoder": "D"}
    assert part_alone(texts, "skew") == (
        "worse than random halves on A and C (`a-encoder-skew`, `c-encoder-skew`), "
        "and no worse than random halves on B (`b-encoder-skew`)"
    )


def test_contrasts_are_rows_with_all_their_numbers() -> None:
    def number(value: float, measure: str, form: str = "+") -> str:
        digits = 0 if measure == "end of the plateau" else 3
        return f"{value:{form}.{digits}f}".replace("-", "−")

    measured = results(RESULTS)
    _, _, *rows = contrasts_table(RESULTS)
    for row, (name, result) in zip(rows, measured.items(), strict=True):
        measure = result.contrast.measure
        value, low, high = (
            number(each, measure) for each in (result.value, result.low, result.high)
        )
        students = [number(end, measure) for end in (result.alone.low, result.alone.high)]
        assert row.strip("| ").split(" | ") == [
            f"`{name}`",
            result.contrast.says,
            measure,
            str(result.count),
            f"{value} [{low}, {high}]",
            f"[{', '.join(students)}]",
            f"{result.p:.3f}" if result.p >= 0.001 else "<.001",
            number(result.detectable, measure, ""),
        ]
