"""The paper's claims: estimates, verdicts, and the records that come with the package."""

from __future__ import annotations

import csv
import json
import runpy
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import polars as pl
import pytest
from scipy import stats
from tests.command import run

from wqk_lab.atlas import published_training
from wqk_lab.claims import claims
from wqk_lab.claims.comparing import ClaimEstimate, adjusted, mean_difference, separation
from wqk_lab.claims.page import ClaimsPage, PaperClaim, Verdict
from wqk_lab.claims.records import encoder_decoders
from wqk_lab.cli.claims import VERDICTS

DOCS = Path(__file__).parents[3] / "docs"


@cache
def page() -> dict[str, PaperClaim]:
    """The claims by their numbers."""
    return {claim.number: claim for claim in claims().claims}


@pytest.mark.parametrize(
    ("number", "verdict", "value", "result"),
    [
        ("S2", "open", 0.46, "medians .33 and .44"),
        ("S4", "holds", 0.27, "21 of 23 as claimed"),
        ("S5", "holds", 0.64, "6 of 6 as claimed"),
        ("S6", "holds", 0.30, "5 of 5 as claimed"),
        ("S7", "holds", 0.44, "5 of 5 as claimed"),
        ("D3", "contradicted", -0.09, "19 of 23 negative"),
        ("D4", "open", -0.02, "2 of 6 as claimed"),
        ("D9", "holds", -0.55, "5 of 5"),
        ("D11", "holds", -0.59, "5 of 5"),
        ("T5", "open", -0.02, ""),
    ],
)
def test_a_claim_is_what_its_records_say(
    number: str, verdict: str, value: float, result: str
) -> None:
    claim = page()[number]
    assert claim.estimate is not None
    assert claim.verdict == verdict
    assert claim.estimate.value == pytest.approx(value, abs=0.006)
    assert claim.estimate.low < value < claim.estimate.high
    assert result in claim.result


def test_numbers_of_the_summary_have_no_record() -> None:
    assert [page()[number].verdict for number in ("N1", "N2", "N3")] == [
        "no record",
        "no record",
        "count",
    ]
    assert "73% (4-layer), 35% (12-layer)" in page()["N3"].result
    assert "1.9035 to 1.8069 nats" in page()["T2"].result


def test_pairs_of_the_paper_are_its_last_checkpoints() -> None:
    """Recomputed from the layers of each run, without the page's own grouping."""
    layers = published_training().filter(step=200_000)
    directional = 0
    for size in ("4-layer", "12-layer"):
        for dataset in ("Jigsaw", "Wikipedia", "Red Pajama"):
            encoder, decoder = (
                median(layers.filter(size=size, dataset=dataset, mode=mode)["directionality"])
                for mode in ("encoder", "decoder")
            )
            directional += decoder < encoder
    assert directional == 2


def test_encoder_decoders_are_paired_by_model() -> None:
    models = encoder_decoders()
    assert models["model"].n_unique() == models.height == 23
    tiny = models.filter(model="openai/whisper-tiny").to_dicts()[0]
    assert tiny["symmetry_encoder"] == pytest.approx(0.504, abs=0.001)
    assert tiny["symmetry_decoder"] == pytest.approx(0.170, abs=0.001)


def decided_by(value: float, p: float, predicts: Any) -> PaperClaim:
    estimate = ClaimEstimate(value, value - 0.1, value + 0.1, null=0, p=p, detectable=0.2)
    return PaperClaim("S", "", "", "runs", "", predicts, estimate, adjusted_p=p)


@pytest.mark.parametrize(
    ("value", "p", "predicts", "verdict"),
    [
        (0.3, 0.01, "more", "holds"),
        (0.3, 0.01, "less", "contradicted"),
        (0.3, 0.01, "none", "contradicted"),
        (0.3, 0.06, "more", "open"),
        (-0.3, 0.01, "less", "holds"),
    ],
)
def test_the_verdict_follows_from_sign_and_adjusted_p(value, p, predicts, verdict):
    assert decided_by(value, p, predicts).verdict == verdict


def test_p_values_are_adjusted_as_scipy_does() -> None:
    p = np.random.default_rng(0).uniform(0, 0.2, 12)
    assert adjusted(p.tolist()) == pytest.approx(stats.false_discovery_control(p).tolist())


def test_intervals_of_a_separation_cover_the_truth() -> None:
    """Normal groups that are .8 deviations apart: AUC Φ(.8/√2)."""
    random = np.random.default_rng(1)
    truth = stats.norm.cdf(0.8 / 2**0.5)
    covered = 0
    for _ in range(300):
        measured = separation(random.normal(0.8, 1, 17).tolist(), random.normal(0, 1, 13).tolist())
        covered += measured.low <= truth <= measured.high
    assert 0.92 < covered / 300 < 0.99


def test_a_detectable_difference_is_found_with_power_of_four_fifths() -> None:
    random = np.random.default_rng(2)
    detectable = 0.4  # of 6 pairs with a deviation of .28: 3.49 · .28/√6
    is_detected = [
        mean_difference(random.normal(detectable, 0.28, 6).tolist(), "Student").p < 0.05
        for _ in range(400)
    ]
    assert 0.75 < np.mean(is_detected) < 0.87


def test_records_that_come_with_the_package_are_those_of_the_pages(tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "generate_results.py"))
    script["write_extracts"](tmp_path)
    for path in tmp_path.iterdir():
        shipped = script["SHIPPED"] / path.name
        assert shipped.read_text("utf-8") == path.read_text("utf-8"), (
            "run python docs/generate_results.py"
        )


def test_the_command_prints_every_claim_and_json_has_the_numbers() -> None:
    text = run("lab", "claims", width=250).stdout
    assert "S4 holds: The encoder of an encoder-decoder has a higher degree" in text
    assert "Of 33 claims of the paper: " in text
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("S4 "))
    claim = page()["S4"]
    assert lines[at] == f"S4 holds: {claim.text}"
    assert [line.strip() for line in lines[at + 1 : at + 5]] == [
        f"{claim.measure}: {claim.shown_estimate}, adjusted p {claim.shown_p}, "
        f"detectable {claim.shown_detectable}",
        claim.result,
        claim.evidence,
        f"({claim.source})",
    ]
    counts: dict[str, int] = {}
    for each in page().values():
        counts[each.verdict] = counts.get(each.verdict, 0) + 1
    sentence = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    sentence = sentence.replace("17 holds", "17 hold").replace("3 count", "3 counts")
    assert "17 hold, " in sentence
    assert lines[-2] == f"Of {len(page())} claims of the paper: {sentence}."
    tested = [claim for claim in page().values() if claim.estimate is not None]
    assert f"Benjamini and Hochberg's method over the {len(tested)} tested claims" in lines[-1]
    as_json = json.loads(run("lab", "claims", "--json").stdout)
    assert as_json["counts"] == counts
    rows = as_json["claims"]
    assert [row["number"] for row in rows] == [*page()]
    assert rows[3]["verdict"] == "holds"
    assert rows[3]["value"] == pytest.approx(0.267, abs=0.001)
    assert rows[-1]["value"] is None


def test_claims_are_written_as_markdown_and_chosen_by_verdict(tmp_path: Path) -> None:
    out = tmp_path / "claims.md"
    done = run("lab", "claims", "--verdict", "open", "--verdict", "count", "--out", out)
    chosen = [n for n, claim in page().items() if claim.verdict in ("open", "count")]
    lines = out.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("| | claim | verdict |")
    assert [line.split(" | ")[0].strip("| ") for line in lines[2:]] == chosen
    assert run("lab", "claims", "--out", "-.md").stdout.splitlines()[2].startswith("| S1 | ")
    assert f"\nOf {len(page())} claims of the paper: " in done.stdout
    assert "holds: " not in done.stdout
    refused = run("lab", "claims", "--out", tmp_path / "claims.txt", exits=2)
    assert refused.stdout == ""
    assert "is written as .csv, .json, .md; got the ending '.txt'" in refused.stderr
    assert get_args(Verdict) == VERDICTS


def test_a_changed_record_changes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DOCS.parent / "src" / "wqk_lab" / "claims" / "data"
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with (data / "trained.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["symmetry"] = "0.1" if row["mode"] == "encoder" else str(0.5 + int(row["seed"]) / 100)
    pl.DataFrame(rows).write_csv(tmp_path / "trained.csv")
    monkeypatch.setattr("wqk_lab.claims.records.DATA", tmp_path)
    assert {claim.number: claim.verdict for claim in claims().claims}["S6"] == "contradicted"


def test_groups_that_do_not_overlap_have_wilsons_interval() -> None:
    """All or none of the smaller group's members exceed the second group."""
    low, high = [0.1, 0.2, 0.3], [0.5, 0.6, 0.7, 0.8, 0.9]
    for first, second, share in ((high, low, 3), (low, high, 0)):
        estimate = separation(first, second)
        expected = stats.binomtest(share, 3).proportion_ci(0.95, method="wilson")
        assert (estimate.value, estimate.null) == (share / 3, 0.5)
        assert (estimate.low, estimate.high) == pytest.approx((expected.low, expected.high))
    ties = separation([0.1, 0.3], [0.3, 0.3])
    assert ties.value == 0.25  # a tie is half of a success


def test_a_detectable_separation_is_found_with_power_of_four_fifths() -> None:
    """Its distance from .5 is 2.80 standard errors of groups without a difference."""
    random = np.random.default_rng(3)
    areas = []
    for _ in range(3000):
        first, second = random.normal(size=9), random.normal(size=14)
        areas.append((first[:, None] > second).mean())
    estimate = separation(random.normal(size=9).tolist(), random.normal(size=14).tolist())
    quantiles = stats.norm.ppf([0.975, 0.8]).sum()
    assert estimate.detectable == pytest.approx(quantiles * np.std(areas), rel=0.05)
    assert estimate.p == stats.mannwhitneyu([1, 2, 3], [1.5, 2.5]).pvalue or estimate.p <= 1


@pytest.mark.parametrize("test", ["Wilcoxon", "Student"])
def test_differences_within_pairs_have_students_interval_and_their_own_test(test: Any) -> None:
    values = np.random.default_rng(4).normal(0.3, 0.5, 9)
    estimate = mean_difference(values.tolist(), test)
    student = stats.ttest_1samp(values, 0)
    ends = student.confidence_interval()
    assert (estimate.low, estimate.high) == pytest.approx((ends.low, ends.high))
    assert (estimate.value, estimate.null) == (pytest.approx(values.mean()), 0)
    p = student.pvalue if test == "Student" else stats.wilcoxon(values, method="exact").pvalue
    assert estimate.p == pytest.approx(p)


def test_numbers_of_a_claim_are_shown_with_the_digits_of_their_size() -> None:
    small = ClaimEstimate(-0.25, -0.3, 0.2, null=0, p=0.01, detectable=0.1)
    steps = ClaimEstimate(-25.4, -30.2, 1.6, null=0, p=0.01, detectable=12.3)
    area = ClaimEstimate(0.9, 0.75, 1.0, null=0.5, p=0.01, detectable=0.2)
    shown = []
    for estimate, p in ((small, 0.0004), (steps, 0.02), (area, 0.5)):
        claim = PaperClaim("S", "", "", "runs", estimate=estimate, adjusted_p=p)
        shown.append((claim.shown_estimate, claim.shown_p, claim.shown_detectable))
    assert shown == [
        ("−.25 [−.30, +.20]", "<.001", ".10"),
        ("−25 [−30, +2]", ".020", "12"),
        (".90 [.75, 1.00]", ".500", ".20"),
    ]
    bare = PaperClaim("N", "", "", "")
    assert (bare.shown_estimate, bare.shown_p, bare.shown_detectable) == ("–", "–", "–")


def test_the_table_of_the_page_is_that_of_the_claims() -> None:
    lines = (DOCS / "results" / "paper.md").read_text(encoding="utf-8").splitlines()
    table = ClaimsPage(tuple(page().values())).markdown()
    assert len(table) == len(page()) + 2
    begin = lines.index(table[0])
    assert lines[begin : begin + len(table)] == table
