"""Verdicts on claims: the rule, on planted numbers, and the page that states them."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from wqk.errors import RunError
from wqk_lab.runs.claims import (
    Claim,
    Contrast,
    decide,
    differences,
    evaluate,
    found_at,
    moderate,
    read_definition,
    results,
)

if TYPE_CHECKING:
    from wqk_lab.runs.claims import Records, Result

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results"


def planted(effects: list[float], seeds: int, random: np.random.Generator) -> list[Result]:
    """Contrasts of two cells each, with these true effects and a deviation of 1."""
    loss = {
        f"{side}{k}": dict(enumerate(random.standard_normal(seeds) + effect * (side == "a")))
        for k, effect in enumerate(effects)
        for side in "ab"
    }
    records: Records = {"loss": loss}
    contrasts = [
        Contrast(f"c{k}", "", "loss", {f"a{k}": 1, f"b{k}": -1}) for k in range(len(effects))
    ]
    return evaluate(contrasts, records)


@pytest.mark.parametrize(
    ("name", "maker"), [("index.md", "page"), ("conversion.md", "conversion_page")]
)
def test_the_page_says_what_the_records_say(name: str, maker: str) -> None:
    script = runpy.run_path(str(DOCS / "generate_results.py"))
    text = (RESULTS / name).read_text(encoding="utf-8")
    assert script[maker](text) == text, "run python docs/generate_results.py"


def test_a_changed_record_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in [*RESULTS.rglob("*.csv"), RESULTS / "contrasts.toml"]:
        copy = tmp_path / path.relative_to(RESULTS)
        copy.parent.mkdir(exist_ok=True)
        text = path.read_text(encoding="utf-8")
        copy.write_text(
            text.replace("2.2900,540", "2.2950,540").replace(",2.2899,540", ",2.3899,540")
        )
    before, after = results(RESULTS), results(tmp_path)
    assert before["symmetric"].value != after["symmetric"].value
    assert before["decoder"].value == after["decoder"].value


@pytest.mark.parametrize("folder", [RESULTS, RESULTS / "conversion"])
def test_every_claim_names_a_contrast_and_a_size_that_matters(folder: Path) -> None:
    contrasts, claims = read_definition(folder)
    assert {claim.contrast for claim in claims} <= {contrast.name for contrast in contrasts}
    assert all(claim.matters > 0 for claim in claims)


def test_chance_alone_reproduces_nothing() -> None:
    random = np.random.default_rng(0)
    wrong = 0
    for _ in range(60):
        found = planted([0.0] * 20, 4, random)
        claims = [Claim("", r.contrast.name, "less", 0.5) for r in found]
        wrong += any(
            decide(claim, r) in ("reproduced", "too small")
            for claim, r in zip(claims, found, strict=True)
        )
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
    found = planted([3.0] * 3 + [0.0] * 17, 5, np.random.default_rng(2))
    limit = found_at([r.p for r in found], 0.05)
    for r in found:
        low, high = r.allowed
        assert low <= r.low <= r.high <= high
        assert (r.p <= limit) == (low > 0 or high < 0)


def test_variances_that_differ_are_moderated_less() -> None:
    random = np.random.default_rng(3)
    alike = (random.chisquare(4, 200) / 4).tolist()
    unlike = (random.chisquare(4, 200) / 4 * np.exp(2 * random.standard_normal(200))).tolist()
    assert moderate(unlike, [4] * 200)[1] < 5 < moderate(alike, [4] * 200)[1]


def test_contrasts_that_are_none() -> None:
    with pytest.raises(RunError, match="weights must add up to zero"):
        differences(Contrast("c", "", "loss", {"a": 1}), {"loss": {"a": {1: 1.0}}})
    with pytest.raises(RunError, match="no records of b"):
        differences(Contrast("c", "", "loss", {"a": 1, "b": -1}), {"loss": {"a": {1: 1.0}}})
    with pytest.raises(RunError, match="single seed"):
        evaluate(
            [Contrast("c", "", "loss", {"a": 1, "b": -1})],
            {"loss": {"a": {1: 1.0}, "b": {1: 2.0}}},
        )
