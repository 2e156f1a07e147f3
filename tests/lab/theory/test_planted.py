"""Each statement on data where it is true, on data where it is violated, and on data by chance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.lab.theory import rates, subjects
from tests.lab.theory.planted import (
    BY_CHANCE,
    CASES,
    STATEMENTS,
    by_chance,
    columns_vary_e_times,
    drawn,
    each_paired,
    find,
    paired,
    shared_dimensions,
    verdict,
)

from wqk_lab.theory import studying
from wqk_lab.theory.evidence import Evidence
from wqk_lab.theory.verdict import decide


def test_every_statement_has_its_planted_cases() -> None:
    assert set(CASES) == set(STATEMENTS)


@pytest.mark.parametrize("key", CASES)
def test_what_is_true_holds(key: str) -> None:
    finding = decide(*drawn(key, CASES[key][0], 1))
    identity = finding.statement.direction == "identity"
    assert finding.verdict == ("identity" if identity else "holds"), finding.estimate


@pytest.mark.parametrize("key", CASES)
def test_what_is_violated_fails(key: str) -> None:
    finding = decide(*drawn(key, CASES[key][1], 1))
    assert finding.verdict == "fails", finding.estimate


@pytest.mark.parametrize("key", BY_CHANCE)
def test_chance_rarely_decides(key: str) -> None:
    wrong = CASES[key][3]
    assert [decide(*by_chance(key, seed)).verdict for seed in range(3)].count(wrong) <= 1


W_QK = [find("Theorems 2.3 and S1.12, W_qk"), find("Corollary S1.13, W_qk")]


@pytest.mark.parametrize("key", W_QK)
@pytest.mark.parametrize("layers", [4, 24])
def test_one_model_is_described_and_decides_nothing(key: str, layers: int) -> None:
    for seed in range(6):
        finding = verdict(key, shared_dimensions(layers)(seed))
        assert finding.verdict == "described"
        assert finding.estimate is not None
        assert str(finding.estimate) == f"{finding.estimate.value:.2f}"  # no interval
        assert "several seeds would decide" in finding.why
        assert finding.layers is None


@pytest.mark.campaign
@pytest.mark.parametrize("layers", [4, 24])
def test_models_that_share_dimensions_rarely_hold(layers: int) -> None:
    for key, wrong in zip(W_QK, ("holds", "fails"), strict=True):
        verdicts = [decide(*drawn(key, shared_dimensions(layers), s)).verdict for s in range(100)]
        assert rates.Rate(verdicts.count(wrong), 100).low <= 0.05


def test_draws_go_on_where_they_were_interrupted(tmp_path, monkeypatch):
    key = find("Theorem S1.12, Equation S96 as a cause")
    monkeypatch.setattr(rates, "BY_CHANCE", [key])
    path = tmp_path / "draws.jsonl"
    samples = rates.draws(path, 4)[key]
    path.write_bytes(path.read_bytes()[:-30])  # killed while the last line was written
    samples_again = rates.draws(path, 4)[key]
    assert path.read_text().count("\n") == 4
    for sample, sample_again in zip(samples, samples_again, strict=True):
        np.testing.assert_array_equal(sample.values, sample_again.values)
    assert str(rates.rates_of(key, samples_again).planted).startswith("0.0 % [0.0, ")


@pytest.mark.campaign
@pytest.mark.parametrize("key", BY_CHANCE)
def test_chance_decides_at_most_once_in_twenty_times(key: str) -> None:
    for rate in rates.rates_of(key, [by_chance(key, seed)[1] for seed in range(200)]):
        assert rate.low <= 0.05, rate


@pytest.mark.parametrize(("sign", "expected"), [(1, "holds"), (-1, "fails")])
@pytest.mark.parametrize("number", ["Theorem S1.14, assumption", "Theorems 2.4 and S1.14"])
def test_pairs_over_the_passes_that_predict_each(number: str, sign: int, expected: str) -> None:
    assert verdict(find(number), each_paired(sign)(0)).verdict == expected


def test_predicted_pairs_fifty_times_too_large_fail() -> None:
    key = find("Remark S1.15, Equation S119")
    for sign, size in ((1, 50.0), (-1, 1.0), (1, 0.1)):
        assert verdict(key, paired(sign, size)(0)).verdict == "fails"


def test_two_batches_hold_nothing_alike_that_varies() -> None:
    key = find("Corollary S1.13, update")
    for seed in range(5):
        sample = STATEMENTS[key].measure(columns_vary_e_times(seed))
        sample_of_two = replace(sample, values=sample.values[:2], details={})
        assert verdict(key, sample_of_two).verdict != "holds"


def test_an_untrained_model_on_independent_tokens_has_no_order() -> None:
    order = STATEMENTS[find("Theorem S1.12, Equation S96 as a cause")]
    verdicts = []
    for seed in range(2):
        subject = subjects.subject(subjects.bert(decoder=True, seed=seed), "causal", batches=3)
        tokens = np.random.default_rng(seed).integers(4, 40, subject.blocks.shape)
        finding = studying.examine(
            order, Evidence(replace(subject, blocks=tokens), subjects.text())
        )
        verdicts.append(finding.verdict)
    assert "holds" not in verdicts
    masked = Evidence(subjects.subject(subjects.bert(), "masked"), subjects.text())
    assert studying.examine(order, masked).verdict == "not tested"
