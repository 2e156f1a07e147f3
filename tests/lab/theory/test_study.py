"""All statements on small models: what is decided, what is refused, and what is taken together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.lab.theory import subjects
from tests.lab.theory.subjects import torch

from wqk import BilinearForm
from wqk.checkpoints import Part
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk_lab.theory import gradients as gradients_file
from wqk_lab.theory.causes import rearranged
from wqk_lab.theory.evidence import Evidence
from wqk_lab.theory.findings import StudyReport
from wqk_lab.theory.studying import STATEMENTS, measure, over_seeds, over_steps, study
from wqk_lab.theory.tails import tails
from wqk_lab.theory.updates import parameter_gradients
from wqk_lab.theory.verdict import VERDICTS, Finding


@pytest.fixture(scope="module")
def causal() -> list[Finding]:
    return measure(Evidence(subjects.subject(subjects.llama(), "causal"), subjects.text()))


@pytest.fixture(scope="module")
def masked() -> list[Finding]:
    return measure(Evidence(subjects.subject(subjects.bert(), "masked"), subjects.text()))


def one(findings: Any, number: str, part: str = "") -> Finding:
    (finding,) = (
        candidate
        for candidate in findings
        if candidate.statement.number == number and part in candidate.statement.says
    )
    return finding


def test_every_statement_is_a_finding_that_says_all_there_is_to_say(causal, masked):
    for findings in (causal, masked):
        assert [f.statement for f in findings] == list(STATEMENTS)
        for finding in findings:
            assert finding.verdict in VERDICTS
            if finding.verdict == "not tested":
                assert finding.why
            else:
                assert finding.estimate is not None
                assert finding.sample is not None
                assert not re.search(r"\bnan\b", str(finding.estimate))
            if finding.verdict == "undecided":
                assert re.search(
                    "would (not )?(decide|be needed)|not as one of|no interval", finding.why
                )


def test_identities_are_shown_and_not_counted_as_support(causal, masked):
    for findings in (causal, masked):
        for finding in findings:
            if finding.statement.direction == "identity":
                assert finding.verdict in ("identity", "not tested"), finding.statement.number
        for number in ("Proposition 2.2", "Proposition 2.1, Equation 2"):
            assert one(findings, number).verdict == "identity"
        assert one(findings, "Proposition S1.17 (3)").verdict == "fails"


def test_the_objective_decides_what_is_tested(causal: list[Finding], masked: list[Finding]) -> None:
    for number in ("Theorem S1.14, assumption", "Corollary S1.13, update"):
        assert "sees what came before" in one(causal, number).why
        assert one(masked, number).verdict != "not tested"
    for number in ("Theorems 2.3 and S1.12, update", "Theorem S1.12, Equation S96 as a cause"):
        assert one(masked, number).verdict == "not tested"
        assert one(causal, number).verdict != "not tested"


def test_numbers_are_those_of_the_forms(causal: list[Finding]) -> None:
    subject = subjects.subject(subjects.llama(), "causal")
    evidence = Evidence(subject, subjects.text())
    sample = one(causal, "Theorems 2.3 and S1.12, W_qk").sample
    assert sample.layers == ("0", "1")
    attention = subject.model.model.layers[1].self_attn
    query, key = (p.weight.detach().numpy() for p in (attention.q_proj, attention.k_proj))
    dense = (query[:8] + query[8:]).T @ key
    np.testing.assert_allclose(evidence.forms["1"].dense(), dense, atol=1e-5)
    expected = tails(BilinearForm(dense, np.eye(16)))
    assert sample.values[0, 1] == pytest.approx(expected.log_variance_ratio, rel=1e-3)
    assert sample.details["reach"][0, 1] == pytest.approx(expected.reach, rel=1e-4)


def test_weights_and_plans_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load = StateDict.read

    def counted(self: StateDict, parts: Sequence[Part]) -> list[Any]:
        read.extend(f"{id(self)} {part.name}" for part in parts)
        return load(self, parts)

    monkeypatch.setattr(StateDict, "read", counted)
    measure(Evidence(subjects.subject(subjects.bert(decoder=True), "causal"), subjects.text()))
    weights = [name for name in read if "query" in name or "key" in name]
    assert len(weights) == len(set(weights))


def test_a_layer_that_is_not_there_is_an_error() -> None:
    subject = subjects.subject(subjects.bert(), "masked")
    assert list(Evidence(subject, subjects.text(), layers=[1]).updates) == ["1"]
    with pytest.raises(CheckpointError, match="no layer 9; layers are numbered from 0 to 1"):
        measure(Evidence(subject, subjects.text(), layers=[0, 9]))


def test_what_has_no_single_form_is_not_tested() -> None:
    updates: list[tuple[str, int, int]] = []
    evidence = Evidence(subjects.subject(subjects.qwen3(), "causal"), subjects.text())
    findings = measure(evidence, lambda *progress: updates.append(progress))
    refused = one(findings, "Theorems 2.3 and S1.12, update")
    assert refused.verdict == "not tested"
    assert "normalized token by token" in refused.why
    # Counts and random matrices need no gradient.
    assert one(findings, "Theorem S1.12, Equation S96", "stream").verdict != "not tested"
    assert [done for _, done, _ in updates] == list(range(len(STATEMENTS)))


@pytest.mark.parametrize(
    ("lacks", "tested"),
    [
        ("cls.predictions.bias", {"text", "nothing", "weights", "forward"}),
        ("bert.embeddings.word_embeddings.weight", {"text", "nothing", "weights"}),
        ("bert.encoder.layer.0.attention.self.query.weight", {"text", "nothing"}),
    ],
)
def test_statements_on_tensors_that_are_not_there_are_not_tested(lacks, tested):
    subject = subjects.subject(subjects.bert(), "masked", missing=(lacks, "cls.x"))
    for finding in measure(Evidence(subject, subjects.text())):
        statement = finding.statement
        if statement.needs not in tested and "masked" in statement.objectives:
            assert finding.verdict == "not tested"
            assert lacks in finding.why
        elif "masked" in statement.objectives:
            assert "checkpoint lacks" not in finding.why


def test_each_token_from_all_others_is_the_sum_over_passes() -> None:
    """β of S9 against a plain loop that masks one position at a time."""
    from wqk_lab.theory.gradients import gradients

    model = subjects.bert()
    subject = subjects.subject(model, "each", batches=1)
    evidence = Evidence(subject, subjects.text())
    blocks, length = subject.blocks[0], subject.blocks.shape[-1]
    layer_gradients = evidence.gradients[0]
    for n, tokens in enumerate(blocks[:1]):
        for i in (0, 5, length - 1):
            inputs, labels = torch.tensor(tokens[None]), torch.full((1, length), -100)
            labels[0, i], inputs = tokens[i], inputs.clone()
            inputs[0, i] = subjects.MASK
            alone = gradients(model, {"input_ids": inputs, "labels": labels})
            for one_pass, together in zip(alone, layer_gradients, strict=True):
                scale = len(blocks) * length  # the loss is the mean over all predictions
                beta = scale * together.beta[n * length + i]
                np.testing.assert_allclose(beta, one_pass.beta[0], atol=1e-4)
    findings = measure(evidence)
    assert one(findings, "Theorem S1.14, assumption").estimate is not None
    assert one(findings, "Remark S1.15, Equation S119").verdict == "not tested"


@pytest.mark.parametrize("objective", ["masked", "each"])
def test_applications_of_a_shared_layer_add_up_to_one_gradient(objective: str) -> None:
    """They are no batches of their own, which would narrow the intervals."""
    model = subjects.albert()
    evidence = Evidence(subjects.subject(model, objective), subjects.text())
    model(**evidence.batches[0]).loss.backward()
    (exact,) = parameter_gradients(model, evidence.plans)
    (layer,) = evidence.gradients[0]
    for implied, expected in zip(layer.factor_gradients(), exact, strict=True):
        np.testing.assert_allclose(implied, expected, atol=1e-5 * np.abs(expected).max())
    findings = measure(evidence)
    for number in ("Corollary S1.13, update", "Theorem S1.14, assumption"):
        estimate = one(findings, number).estimate
        assert estimate.over == "2 batches × layer 0"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four saved steps, of which the last two are one, and two seeds."""
    folder = tmp_path_factory.mktemp("study")
    for seed in (0, 20):
        models = {step: subjects.bert(decoder=True, seed=seed + step) for step in (0, 5, 10)}
        models[12] = models[10]
        subjects.run_of(models, folder / f"run-{seed}")
    subjects.tokens_file(folder)
    return folder


SMALL = {"batches": 2, "batch": 2, "block": 8}


def test_a_run_is_followed_from_save_to_save(place: Path) -> None:
    reports = study([str(place / "run-0")], place / "tokens.npy", steps=(), **SMALL)
    assert [r.model for r in reports] == [
        *(f"run-0, step {step}" for step in (0, 5, 10, 12)),
        "run-0, 4 saved steps",
    ]
    finding = one(reports[-1].findings, "Theorem 2.3, along training")
    assert finding.sample.values.shape == (3, 2)
    assert np.isnan(finding.sample.values[-1]).all()  # nothing changed

    def dense(step: int) -> np.ndarray:
        attention = subjects.bert(decoder=True, seed=step).bert.encoder.layer[1].attention.self
        with torch.no_grad():
            return (attention.query.weight.T @ attention.key.weight).numpy()

    expected = tails(BilinearForm(dense(10) - dense(5), np.eye(16)))
    assert finding.sample.values[1, 1] == pytest.approx(expected.log_variance_ratio, rel=1e-3)
    update = one(reports[-1].findings, "Theorems 2.3 and S1.12, update")
    values = [one(r.findings, "Theorems 2.3 and S1.12, update").sample for r in reports[:-1]]
    mean = np.mean([sample.values for sample in values if sample], axis=0)
    np.testing.assert_allclose(update.sample.values, mean)


def test_a_run_that_cannot_be_followed_says_why(place: Path) -> None:
    run = subjects.run_of(dict.fromkeys((0, 1, 2), subjects.qwen3()), place / "normalized")
    reports = study([str(run)], place / "tokens.npy", steps=(), **SMALL)
    assert (
        "normalized token by token" in one(reports[-1].findings, "Theorem 2.3, along training").why
    )


def test_seeds_are_taken_together(place: Path) -> None:
    refs = [str(place / f"run-{seed}") for seed in (0, 20)]
    updates: list[tuple[str, int, int]] = []
    reports = study(
        refs,
        place / "tokens.npy",
        layers=[1],
        on_progress=lambda *each: updates.append(each),
        **SMALL,
    )
    assert len(reports) == 3
    batches = [each for each in updates if each[0] == "gradients of batches"]
    assert batches[:2] == [("gradients of batches", 0, 2), ("gradients of batches", 1, 2)]
    assert (STATEMENTS[3].number, 3, len(STATEMENTS)) in updates
    together = one(reports[-1].findings, "Theorems 2.3 and S1.12, W_qk")
    assert (together.sample.unit, together.sample.values.shape) == ("seeds", (2, 1))
    # What does not depend on the model is not counted once for each.
    assert one(reports[-1].findings, "Proposition S1.17 (3)").estimate.over == "400 draws"


def test_models_that_differ_in_kind_are_not_taken_together(place, masked, causal):
    assert over_seeds([masked, masked])[0].sample is not None
    assert len(over_steps([causal, causal])) == len(causal)
    subjects.save(subjects.bert(decoder=True, num_hidden_layers=1), place / "shallow")
    refs = [str(place / "run-0"), str(place / "shallow")]
    last: StudyReport = study(refs, place / "tokens.npy", **SMALL)[-1]
    assert "different numbers of layers" in one(last.findings, "Theorems 2.3 and S1.12, W_qk").why


def test_cross_attention_has_values_of_its_own() -> None:
    evidence = Evidence(subjects.subject(subjects.bart(), "masked"), subjects.text())
    for finding in measure(evidence):
        if finding.statement.direction == "identity":
            assert finding.verdict == "identity", finding.statement.number
            layers = ("encoder 0", "encoder 1", "decoder 0", "decoder 1")
            assert finding.sample.layers in (layers, ())


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize("zero", ["output.dense", "self.query"])
def test_a_layer_that_starts_at_zero_leaves_the_others_tested(zero: str, objective: str) -> None:
    """An output projection of zeros leaves no gradient, queries of zeros no form."""
    model = subjects.bert(decoder=objective == "causal")
    torch.nn.init.zeros_(model.get_submodule(f"bert.encoder.layer.0.attention.{zero}").weight)
    for finding in measure(Evidence(subjects.subject(model, objective), subjects.text())):
        if finding.sample is not None and finding.sample.layers:
            assert np.isfinite(finding.sample.values[:2, 1]).all()


def test_batches_are_reported_and_a_pass_holds_as_much_as_it_may(monkeypatch):
    """Two layers of width 16 over two texts of 16 tokens fill a pass here."""
    texts: list[int] = []
    plain = gradients_file.gradients

    def noted(model: Any, batch: Any, *arguments: Any, **options: Any) -> Any:
        texts.append(len(batch["input_ids"]))
        return plain(model, batch, *arguments, **options)

    monkeypatch.setattr(gradients_file, "gradients", noted)
    monkeypatch.setattr("wqk_lab.theory.evidence.NUMBERS_IN_A_PASS", 2 * 16 * 2 * 16)
    batches: list[tuple[int, int]] = []
    subject = subjects.subject(subjects.bert(), "masked")
    evidence = Evidence(subject, subjects.text(), on_batch=lambda *counts: batches.append(counts))
    assert len(evidence.gradients) == 2
    assert batches == [(0, 2), (1, 2)]
    assert texts == [2, 1, 2, 1]


def test_an_order_that_is_lost_is_that_of_the_rearranged_text(causal: list[Finding]) -> None:
    sample = one(causal, "Theorem S1.12, Equation S96 as a cause").sample
    assert list(sample.details) == ["as it is", "shuffled", "reversed"]
    update = one(causal, "Theorems 2.3 and S1.12, update").sample
    np.testing.assert_array_equal(sample.details["as it is"], update.values)
    expected = sample.details["as it is"] - sample.details["shuffled"]
    np.testing.assert_array_equal(sample.values, expected)
    subject = subjects.subject(subjects.llama(), "causal")
    for name, changed in rearranged(subject).items():
        form = Evidence(changed, subjects.text()).updates["1"][0].form
        ratio = tails(form).log_variance_ratio
        assert sample.details[name][0, 1] == pytest.approx(ratio, rel=1e-3)
