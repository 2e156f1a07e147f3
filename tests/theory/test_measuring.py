"""All statements on small models: verdicts that must come out, refusals that must be rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tests.theory import subjects
from tests.theory.subjects import torch

from wqk import BilinearForm
from wqk.runs.run import open_run
from wqk.theory.finding import Finding, Verdict
from wqk.theory.measuring import MEASUREMENTS, Evidence, measure
from wqk.theory.measuring.tails import CAUSES, measure_tails, over_batches
from wqk.theory.measuring.trajectory import measure_run
from wqk.theory.tails import tails
from wqk.theory.trajectory import follow
from wqk.theory.variants import in_isolation, rearranged


@pytest.fixture(scope="module")
def causal() -> list[Finding]:
    return measure(subjects.subject(subjects.llama(), "causal"), subjects.text())


@pytest.fixture(scope="module")
def masked() -> list[Finding]:
    return measure(subjects.subject(subjects.bert(), "masked"), subjects.text())


def one(findings: list[Finding], start: str) -> Finding:
    (found,) = (finding for finding in findings if finding.statement.startswith(start))
    return found


def test_every_finding_says_all_there_is_to_say(
    causal: list[Finding], masked: list[Finding]
) -> None:
    for findings in (causal, masked):
        statements = [finding.statement for finding in findings]
        assert len(set(statements)) == len(statements) > len(MEASUREMENTS)
        for finding in findings:
            assert finding.verdict in get_args(Verdict)
            assert finding.observation
            assert not re.search(r"\bnan\b", finding.observation)
            if finding.verdict != "not tested":
                assert finding.assumption
                assert finding.prediction
                assert finding.numbers
            assert len({tuple(row) for row in finding.numbers}) <= 1


def test_identities_hold_on_every_model(causal: list[Finding], masked: list[Finding]) -> None:
    for findings in (causal, masked):
        for statement in ("Proposition S1.7", "Lemma S1.16", "Proposition 2.2"):
            assert one(findings, statement).verdict == "holds"
        assert one(findings, "Theorem S1.12, Equations S97").verdict == "fails"
        assert one(findings, "Lemma S1.11").verdict == "fails"
        assert one(findings, "Proposition S1.17(3)").verdict == "holds in part"


def test_the_objective_decides_what_is_predicted(
    causal: list[Finding], masked: list[Finding]
) -> None:
    assert one(causal, "Theorem S1.12, Equation S96").verdict == "fails"
    assert one(causal, "Theorems 2.3 and S1.12: the update's columns")
    assert one(masked, "Proposition S1.10: masked").verdict == "holds"
    assert one(masked, "Corollary S1.13: the update's columns")


def test_numbers_are_those_of_the_forms(causal: list[Finding]) -> None:
    subject = subjects.subject(subjects.llama(), "causal")
    evidence = Evidence(subject, subjects.text())
    rows = one(causal, "Theorems 2.3 and S1.12: the columns of W_qk").numbers
    assert [row["layer"] for row in rows] == [0, 1]
    attention = subject.model.model.layers[1].self_attn
    query, key = (p.weight.detach().numpy() for p in (attention.q_proj, attention.k_proj))
    dense = (query[:8] + query[8:]).T @ key
    np.testing.assert_allclose(evidence.forms[1].dense(), dense, atol=1e-5)
    assert rows[1]["reach"] == pytest.approx(tails(BilinearForm(dense, np.eye(16))).reach, rel=1e-4)


def test_layers_can_be_chosen() -> None:
    subject = subjects.subject(subjects.bert(), "masked")
    evidence = Evidence(subject, subjects.text(), layers=[1])
    assert list(evidence.updates) == list(evidence.forms) == [1]
    findings = measure(subject, subjects.text(), layers=[9])
    refused = one(findings, "Theorems 2.3 and S1.12: column and row tails")
    assert "9" in refused.observation or "layer" in refused.observation


def test_what_has_no_single_form_is_a_row_and_not_a_crash() -> None:
    told: list[tuple[str, int, int]] = []
    findings = measure(
        subjects.subject(subjects.qwen3(), "causal"),
        subjects.text(),
        on_progress=lambda *progress: told.append(progress),
    )
    refused = one(findings, "Theorems 2.3 and S1.12: column and row tails")
    assert refused.verdict == "not tested"
    assert "norm" in refused.observation
    # Counts and random matrices need no gradient.
    assert one(findings, "Theorem S1.12, Equation S96").verdict != "not tested"
    assert [done for _, done, _ in told] == list(range(len(MEASUREMENTS)))


def test_columns_that_are_made_to_vary_are_found() -> None:
    random = np.random.default_rng(0)
    scales = np.exp(random.standard_normal(30))[:, None]
    forms = [
        BilinearForm(random.standard_normal((30, 40)), scales * random.standard_normal((30, 40)))
        for _ in range(5)
    ]
    seen = over_batches(forms)
    assert seen["longer"] == "columns"
    assert seen["log_variance_ratio"] > seen["log_variance_ratio_error"] > 0
    assert over_batches([form.T for form in forms])["longer"] == "rows"
    assert over_batches(forms[:1])["longer"] == "undecided"


def test_causes_are_measured_in_every_variant_and_layer() -> None:
    subject = subjects.subject(subjects.bert(decoder=True), "causal")
    evidence = Evidence(subject, subjects.text())
    rows = one(measure_tails(evidence), CAUSES).numbers
    changes = {*in_isolation(evidence.updates[0]), *rearranged(subject)}
    assert len(changes) == 7
    assert {(row["change"], row["layer"]) for row in rows} == {
        (change, layer) for change in changes for layer in (0, 1)
    }


def test_a_run_is_followed_from_save_to_save(tmp_path: Path) -> None:
    models = {step: subjects.bert(decoder=True, seed=step) for step in (0, 5, 10)}
    models[12] = models[10]
    folder = subjects.run_of(models, tmp_path / "run")
    moments = follow(open_run(folder))
    assert [(moment.step, moment.layer) for moment in moments] == [
        (step, layer) for step in (0, 5, 10, 12) for layer in (0, 1)
    ]
    assert [moment.change is None for moment in moments] == [True, True, *[False] * 6]

    def dense(step: int) -> np.ndarray:
        attention = models[step].bert.encoder.layer[1].attention.self
        with torch.no_grad():
            return (attention.query.weight.T @ attention.key.weight).numpy()

    change, none = moments[-3].change, moments[-1].change
    assert change is not None
    assert none is not None
    assert np.isnan(none.reach)  # nothing changed
    expected = tails(BilinearForm(dense(10) - dense(5), np.eye(16)))
    assert change.reach == pytest.approx(expected.reach, rel=1e-4)
    (finding,) = measure_run(str(folder), "causal")
    assert len(finding.numbers) == 4


def test_a_run_of_one_save_and_what_is_no_run(tmp_path: Path) -> None:
    folder = subjects.run_of({3: subjects.bert()}, tmp_path / "run")
    (finding,) = measure_run(str(folder), "masked")
    assert finding.verdict == "not tested"
    assert measure_run(str(tmp_path), "masked") == []
    assert measure_run("bert", "masked") == []
