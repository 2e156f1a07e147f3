"""Updates with one cause taken away, and the effect of a softmax on the mean of the inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.lab.theory import subjects

from wqk import BilinearForm
from wqk_lab.figures.theory import tails
from wqk_lab.theory.causes import curves, in_isolation, rearranged
from wqk_lab.theory.evidence import Evidence, LayerUpdate
from wqk_lab.theory.gradients import gradients
from wqk_lab.theory.optimizer import MEASURES, Moment, changes, steps
from wqk_lab.theory.studying import STATEMENTS
from wqk_lab.theory.verdict import Finding, Sample, not_tested


def drawn(seed: int, batch: int = 40) -> LayerUpdate:
    """An update of correlated inputs with a mean, and β with rows that sum to 0."""
    random = np.random.default_rng(seed)
    inputs = 3 + random.standard_normal((batch, 6, 5)) @ random.standard_normal((5, 5))
    beta = random.standard_normal((batch, 6, 6))
    return LayerUpdate(inputs, beta - beta.mean(axis=-1, keepdims=True))


def test_the_mean_falls_out_of_the_context_side_alone() -> None:
    update = drawn(1)
    shifted = update.inputs + np.arange(5.0)
    as_it_is = update.form.dense()

    def between(predicted: np.ndarray, context: np.ndarray) -> np.ndarray:
        return np.einsum("bij,bik,bjl->kl", update.beta, predicted, context)

    context, predicted = between(update.inputs, shifted), between(shifted, update.inputs)
    np.testing.assert_allclose(context, as_it_is, atol=1e-9)
    assert np.abs(predicted - as_it_is).max() > 1


def test_isotropic_inputs_have_the_identity_as_covariance() -> None:
    updates = [drawn(seed) for seed in range(3)]
    inputs_of_all = np.concatenate([update.inputs.reshape(-1, 5) for update in updates])
    values, vectors = np.linalg.eigh(np.cov(inputs_of_all, rowvar=False))
    whitened = (
        (inputs_of_all - inputs_of_all.mean(axis=0)) @ (vectors / np.sqrt(values)) @ vectors.T
    )
    np.testing.assert_allclose(np.cov(whitened, rowvar=False), np.eye(5), atol=1e-9)
    inputs = whitened[: updates[0].inputs.size // 5].reshape(updates[0].inputs.shape)
    expected = updates[0]._replace(inputs=inputs).form.dense()
    np.testing.assert_allclose(
        next(in_isolation(updates)["isotropic"]).dense(), expected, atol=1e-8
    )


def test_directions_without_variance_are_left_out() -> None:
    update = drawn(2)
    flat = update._replace(inputs=update.inputs * [1, 1, 1, 1, 0])
    form = next(in_isolation([flat])["isotropic"]).dense()
    assert np.isfinite(form).all()
    np.testing.assert_allclose(form[-1], 0, atol=1e-9)


def test_a_rotation_keeps_all_but_the_coordinates() -> None:
    form, rotated = drawn(3).form.dense(), next(in_isolation([drawn(3)])["rotated"]).dense()
    np.testing.assert_allclose(np.linalg.svd(rotated)[1], np.linalg.svd(form)[1], atol=1e-9)
    assert np.trace(rotated @ rotated) == pytest.approx(np.trace(form @ form))
    assert not np.allclose(rotated, form)


def test_random_signs_keep_the_sizes_of_beta(monkeypatch: pytest.MonkeyPatch) -> None:
    update = drawn(4)
    seen: list[np.ndarray] = []
    form = property(lambda self: seen.append(self.beta) or BilinearForm(np.eye(5), np.eye(5)))
    monkeypatch.setattr(LayerUpdate, "form", form)
    for forms in in_isolation([update]).values():
        assert len([*forms]) == 1
    signed = next(beta for beta in seen if (beta != update.beta).any())
    np.testing.assert_array_equal(np.abs(signed), np.abs(update.beta))


def test_rearranged_texts_have_the_same_tokens_in_each_block() -> None:
    subject = subjects.subject(None, "causal")
    for changed in rearranged(subject).values():
        np.testing.assert_array_equal(
            np.sort(changed.blocks, axis=-1), np.sort(subject.blocks, axis=-1)
        )
    again = rearranged(subject)["shuffled"].blocks
    np.testing.assert_array_equal(rearranged(subject)["shuffled"].blocks, again)
    assert (again != subject.blocks).any()


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_rows_of_a_models_own_beta_sum_to_zero(objective: str) -> None:
    subject = subjects.subject(subjects.bert(decoder=objective == "causal"), objective)
    updates = Evidence(subject, subjects.text()).updates
    assert sorted(updates) == ["0", "1"]
    for updates_of_layer in updates.values():
        assert len(updates_of_layer) == 2
        for update in updates_of_layer:
            assert update.beta.dtype == np.float32  # as the model is
            assert np.abs(update.beta.sum(axis=-1)).max() < 1e-5 * np.abs(update.beta).max()
            future = np.triu(np.ones(update.beta.shape[-2:], bool), 1)
            assert bool((update.beta[:, future] == 0).all()) == (objective == "causal")


def test_steps_are_those_of_the_weights_own_gradients() -> None:
    model = subjects.bert()
    (batch,) = subjects.subject(model, "masked", batches=1).batches()
    layer = gradients(model, batch)[0]
    update = LayerUpdate.of(layer)
    mean = update.inputs.mean(axis=(0, 1))
    made = {kind: form.dense() for kind, form in steps(layer, mean).items()}

    # PyTorch's own gradients, as dense matrices that act on row vectors.
    model(**batch).loss.backward()
    attention = model.bert.encoder.layer[0].attention.self
    weights = [attention.query.weight, attention.key.weight]
    query, key = (weight.detach().numpy().T for weight in weights)
    on_query, on_key = (weight.grad.numpy().T for weight in weights)
    on_bias = attention.query.bias.grad.numpy()
    np.testing.assert_allclose(made["gradient"], update.form.dense(), atol=1e-6)
    for kind, (dq, dk) in {
        "descent": (on_query, on_key),
        "signs": (np.sign(on_query), np.sign(on_key)),
        # The bias's gradient is what all rows of the weight's have in common, per unit of input.
        "centered": (np.sign(on_query - np.outer(mean, on_bias)), np.sign(on_key)),
    }.items():
        expected = -(dq @ key.T + query @ dk.T)
        np.testing.assert_allclose(made[kind], expected, atol=1e-3 * np.abs(expected).max())
    assert not np.allclose(made["centered"], made["signs"], atol=1e-2)


def test_layers_of_several_stacks_are_drawn_apart() -> None:
    values = np.array([[1.0, 2.0, 3.0], [1.5, 2.5, 3.5]])
    layers = ("encoder 0", "decoder 0", "decoder 1")
    sample = Sample(values, "batches", layers, {"as it is": values, "shuffled": values - 1})
    rows = curves([Finding(STATEMENTS[0], "not tested", sample=sample)])
    assert [row["layer"] for row in rows if row["change"] == "shuffled"] == list(layers)
    # Student's interval of two batches that are .5 apart.
    half = 12.7062 * 0.25
    errors = [row["log_variance_ratio_error"] for row in rows]
    assert errors == pytest.approx([half] * 6, rel=1e-4)
    axis = tails(rows, "toy").axes[0]
    (line,) = [line for line in axis.lines if line.get_label() == "as it is"]
    assert line.get_xdata().tolist() == [0, 1, 2]
    assert line.get_ydata().tolist() == [1.25, 2.25, 3.25]
    formatter = axis.xaxis.get_major_formatter()
    assert [formatter(place, 0) for place in (0, 1, 5)] == ["encoder 0", "decoder 0", ""]


def test_curves_are_those_of_updates_and_of_what_was_changed_in_them() -> None:
    """Other statements, and those that were not tested, have none."""
    sample = Sample(np.array([[1.0], [2.0]]), "batches", ("0",))
    quantities = ("ln(Var‖column‖/Var‖row‖) of Σ β K", "symmetry")
    findings = []
    for quantity in quantities:
        statement = replace(STATEMENTS[0], quantity=quantity)
        findings += [Finding(statement, "undecided", sample=sample), not_tested(statement, "why")]
    (row,) = curves(findings)
    assert (row["change"], row["layer"], row["log_variance_ratio"]) == ("as it is", "0", 1.5)


def test_a_run_s_changes_are_from_one_saved_step_to_the_next() -> None:
    random = np.random.default_rng(0)
    sides = random.standard_normal((3, 5, 2)), random.standard_normal((3, 5, 2))
    forms = [BilinearForm(query, key) for query, key in zip(*sides, strict=True)]
    change = forms[1].difference(forms[0])
    moments = [
        Moment({"0": forms[0]}, {"0": change * 2.0}),
        Moment({"0": forms[1]}, {"0": change}),
        Moment({"0": forms[2]}, {"0": forms[0]}),
    ]
    first, second = changes(moments)["0"]
    np.testing.assert_allclose(first.dense(), forms[1].dense() - forms[0].dense(), atol=1e-12)
    np.testing.assert_allclose(second.dense(), forms[2].dense() - forms[1].dense(), atol=1e-12)
    sample = MEASURES["along_the_signs"](moments)
    between = (first.dense() * second.dense()).sum() / (first.norm * second.norm)
    np.testing.assert_allclose(sample.values, [[1.0], [between]])
    assert (sample.unit, sample.layers) == ("changes", ("0",))


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_isotropic_inputs_have_no_scale(factor: float) -> None:
    update = drawn(5)
    scaled = update._replace(inputs=factor * update.inputs)
    form, form_of_scaled = (next(in_isolation([each])["isotropic"]) for each in (update, scaled))
    np.testing.assert_allclose(form_of_scaled.dense(), form.dense(), atol=1e-6)
