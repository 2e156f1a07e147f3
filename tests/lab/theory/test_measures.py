"""Numbers of the statements' measures, with their details, recomputed from planted gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.lab.theory.planting import (
    B,
    L,
    N,
    U,
    betas,
    evidence,
    inputs,
    layer_of,
    softmax,
    weighted,
)

from wqk import BilinearForm
from wqk_lab.theory import (
    bilinear_scores,
    bounds,
    causes,
    counts,
    growth,
    optimizer,
    pairing,
    tails,
    updates,
)
from wqk_lab.theory import softmax as softmax_file
from wqk_lab.theory.evidence import Evidence, LayerUpdate
from wqk_lab.theory.gradients import LayerGradient, mixing_error
from wqk_lab.theory.updates import first_order
from wqk_lab.theory.verdict import Sample

Numbers = Mapping[str, float]


@cache
def planted(objective: str = "masked") -> Evidence:
    """Evidence in which weights, inputs, attention, errors and β are all drawn at random."""

    def make(random: np.random.Generator, batch: int, layer: int) -> LayerGradient:
        attention, x, beta = weighted(layer, random), inputs(random), betas(random)
        shares = softmax(random.standard_normal(beta.shape))
        error = random.standard_normal(beta.shape)
        mixed = random.standard_normal((B, N, 32))
        recorded = {"probabilities": shares, "error": error, "value_input": x, "mixed": mixed}
        return layer_of(attention, x, beta, **recorded)

    random = np.random.default_rng(9)
    values = {str(layer): weighted(layer, random).key for layer in range(L)}
    return evidence(make, objective, values=values)


def in_place(sample: Sample, batch: int, layer: int) -> dict[str, float]:
    """All numbers of a place; that of the quantity is called ``value``."""
    details = {name: float(table[batch, layer]) for name, table in sample.details.items()}
    return {"value": float(sample.values[batch, layer]), **details}


def assert_numbers(
    sample: Sample, expected: Callable[[LayerGradient, int], Numbers], objective: str = "masked"
) -> None:
    """Compare each number with that of a function of the layer's gradient and the batch.

    The function's first number is the quantity.
    """
    assert (sample.unit, sample.layers) == ("batches", ("0", "1", "2"))
    assert sample.values.shape == (U, L)
    for batch, layer in ((0, 0), (U - 1, 1), (2, L - 1)):
        numbers = dict(expected(planted(objective).gradients[batch][layer], batch))
        quantity = next(iter(numbers))
        named = {"value": numbers.pop(quantity), **numbers}
        assert in_place(sample, batch, layer) == pytest.approx(named, rel=1e-6, abs=1e-12)


def share_above(matrix: np.ndarray) -> float:
    """Share of the pairs of a column and a row in which the column is larger."""
    squares = matrix**2
    columns, rows = squares.sum(axis=0)[:, None], squares.sum(axis=1)
    return float(((columns > rows) + (columns == rows) / 2).mean())


def grown(layer: LayerGradient) -> dict[str, float]:
    """Mean share over the tokens, each from its own matrix."""
    x, beta = layer.query_input, layer.beta.sum(axis=1)
    as_context, as_prediction = [], []
    for b, token in product(range(B), range(N)):
        as_context.append(share_above(np.outer(beta[b, :, token] @ x[b], x[b, token])))
        as_prediction.append(share_above(np.outer(x[b, token], beta[b, token] @ x[b])))
    means = map(float, (np.mean(as_context), np.mean(as_prediction)))
    return dict(zip(("as_context", "as_prediction"), means, strict=True))


def test_growth_is_that_of_each_tokens_own_matrix() -> None:
    layer = planted().gradients[2][1]
    expected = list(grown(layer).items())
    for name, numbers in (("as_context", expected), ("as_prediction", expected[::-1])):
        measured = growth.MEASURES[name](alone(layer))
        assert list(measured) == [side for side, _ in numbers]  # the quantity is the first
        assert measured == pytest.approx(dict(numbers))
    assert np.abs(growth.MEASURES["groupings"](planted()).values).max() < 1e-12


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize(("name", "first"), [("centered", 0), ("isotropic", 1)])
def test_inputs_are_those_of_context_tokens(name: str, first: int, objective: str) -> None:
    """Masked tokens are context to nothing; from left to right each token is context."""

    def expected(layer: LayerGradient, batch: int) -> Numbers:
        x = layer.query_input
        predicted = planted(objective).predicted[batch]
        chosen = x[~predicted] if objective == "masked" else x.reshape(-1, x.shape[-1])
        numbers = list(growth.spread_of(chosen)._asdict().items())
        return dict([numbers[first], *numbers[:first], *numbers[first + 1 :]])

    assert_numbers(growth.MEASURES[name](planted(objective)), expected, objective)


def test_squares_of_columns_and_rows_are_equal_in_total_and_their_means_are_not() -> None:
    def expected(layer: LayerGradient, _: int) -> Numbers:
        dense = LayerUpdate.of(layer).form.dense()
        columns, rows = np.linalg.norm(dense, axis=0), np.linalg.norm(dense, axis=1)
        return {"squares": 0.0, "means": columns.mean() / rows.mean()}

    assert_numbers(tails.MEASURES["in_total"](planted()), expected)


def test_a_lemma_is_agreement_of_variance_and_reach() -> None:
    values = np.array([[1.0, -1.0, 2.0], [-1.0, 1.0, np.nan]])
    reach = np.array([[2.0, 2.0, 0.5], [0.5, 3.0, 2.0]])
    sample = tails.lemma(Sample(values, "batches", tuple("012"), {"reach": reach}))
    expected = [[1, 0, 0], [1, 1, np.nan], [0, 0, 0], [1, 1, 1]]  # and one of either outcome
    np.testing.assert_array_equal(sample.values, expected)
    assert (sample.unit, sample.layers, sample.added) == ("batches", tuple("012"), 2)


def test_steps_lose_the_mean_of_all_inputs() -> None:
    """The mean is that of the layer's inputs over all tokens and batches, in each dimension."""

    several = [layers[1] for layers in planted().gradients]
    mean = np.concatenate([each.query_input.reshape(-1, 32) for each in several]).mean(axis=0)
    forms = optimizer.steps(several[2], mean)
    ratios = {kind: tails.tails(form).log_variance_ratio for kind, form in forms.items()}
    for name in ("signs", "descent"):
        sample = optimizer.MEASURES[name](planted())
        assert (sample.unit, sample.layers) == ("batches", ("0", "1", "2"))
        assert in_place(sample, 2, 1)["value"] == pytest.approx(ratios[name])
    signs, centered = ratios["signs"], ratios["centered"]
    numbers = in_place(optimizer.MEASURES["centering"](planted()), 2, 1)
    expected = {"value": signs - centered, "signs": signs, "centered": centered}
    assert numbers == pytest.approx(expected)


def test_a_moment_has_the_signs_of_the_gradient_over_all_batches() -> None:
    forms = {str(layer): BilinearForm(np.eye(2), np.eye(2)) for layer in range(L)}
    moment = optimizer.moment(evidence_with(forms=forms))
    assert moment.forms is forms
    for layer in range(L):
        layers = [layers[layer] for layers in planted().gradients]
        sides = zip(*(each.factor_gradients() for each in layers), strict=True)
        query, key = (np.sign(sum(side)) for side in sides)
        expected = first_order(layers[0].attention, query, key).dense()
        np.testing.assert_allclose(moment.signs[str(layer)].dense(), expected)


def evidence_with(**kept: Any) -> Evidence:
    """The planted gradients, with further parts."""
    made = evidence(**kept)
    made.__dict__["gradients"] = planted().gradients
    return made


def test_coordinates_are_changed_one_by_one() -> None:
    sample = causes.MEASURES["coordinates"](planted())
    names = ["as it is", "isotropic", "centered", "rotated", "random signs"]
    assert list(sample.details) == names
    several = [LayerUpdate.of(layers[1]) for layers in planted().gradients]
    forms = {"as it is": [update.form for update in several]}
    forms |= {name: list(each) for name, each in causes.in_isolation(several).items()}
    for name in names:
        ratios = [tails.tails(form).log_variance_ratio for form in forms[name]]
        assert sample.details[name][:, 1].tolist() == pytest.approx(ratios)
    expected = sample.details["as it is"] - sample.details["isotropic"]
    np.testing.assert_allclose(sample.values, expected)


def test_pairs_are_those_of_the_batchs_own_masks() -> None:
    def of(measure: Callable[..., Numbers]) -> Callable[[LayerGradient, int], Numbers]:
        return lambda layer, batch: measure(
            layer, pairing.pairs_of(layer, planted().predicted[batch])
        )

    parts = of(pairing.parts_of_symmetry)
    assert_numbers(pairing.MEASURES["parts"](planted()), parts)
    correlation = of(lambda _, pairs: pairing.correlation(pairs))
    assert_numbers(pairing.MEASURES["correlation"](planted()), correlation)
    share = of(lambda _, pairs: pairing.share_of_predicted(pairs))
    assert_numbers(pairing.MEASURES["share"](planted()), share)
    common = pairing.MEASURES["common"](planted())
    assert common.layers == ("0", "1", "2")
    forms = [update.form for update in planted().updates["1"]]
    assert common.values[:, 1].tolist() == pytest.approx(pairing.common_symmetry(forms).tolist())


def alone(layer: LayerGradient) -> Any:
    """Evidence whose sample is what a measure returns for one layer, in the third batch."""
    return SimpleNamespace(sample=lambda measure: measure(layer, 2))


def test_updates_and_the_softmax_have_all_their_numbers() -> None:
    layer = planted().gradients[2][1]
    assert updates.MEASURES["passed_on"](alone(layer)) == updates.passed_on(layer)
    aligned = updates.MEASURES["alignment"](alone(layer))
    assert aligned == {"cosine": updates.alignment(layer)}
    effect: Any = softmax_file.MEASURES["effect"](alone(layer))
    assert effect == softmax_file.softmax_effect(layer)
    agreement = (np.sign(layer.beta) == np.sign(layer.error)).mean()
    assert effect["agreement"] == pytest.approx(agreement)
    row_sums = np.abs(layer.beta.sum(axis=-1)).max() / np.abs(layer.beta).sum(axis=-1).max()
    assert effect["row_sums"] == pytest.approx(row_sums)


def test_the_largest_error_is_shown_with_each() -> None:
    def convex(layer: LayerGradient, _: int) -> Numbers:
        convexity = float(np.abs(layer.probabilities.sum(axis=-1) - 1).max())
        mixing = mixing_error(layer, planted().values[str(layer.attention.plan.layer)])
        return {"largest": max(convexity, mixing), "convexity": convexity, "mixing": mixing}

    assert_numbers(bilinear_scores.MEASURES["convex"](planted()), convex)

    def bilinear(layer: LayerGradient, _: int) -> Numbers:
        form, attention = bilinear_scores.form_error(layer), bilinear_scores.attention_error(layer)
        return {"largest": max(form, attention), "form": form, "attention": attention}

    assert_numbers(bilinear_scores.MEASURES["bilinear"](planted()), bilinear)
    heads = bilinear_scores.MEASURES["heads"](planted())
    assert np.abs(heads.values).max() < 1e-12


def test_random_matrices_are_compared_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"WIDE": 40, "NARROW": 20, "TRIALS": 40, "GROUPS": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(bounds, name, size)
    drawn = {width: bounds.simulate_scores(width, trials=40, seed=3) for width in (40, 20)}
    random: Any = SimpleNamespace(subject=SimpleNamespace(seed=3))
    random.once = lambda compute: compute(random)
    samples = {name: bounds.MEASURES[name](random) for name in bounds.MEASURES if name != "parts"}
    assert {(sample.unit, sample.layers) for sample in samples.values()} == {("draws", ())}
    np.testing.assert_allclose(samples["symmetry"].values[:, 0], 40 * drawn[40].symmetry)
    np.testing.assert_allclose(samples["directionality"].values[:, 0], drawn[40].directionality)
    means = [np.abs(drawn[width].directionality).reshape(4, 10).mean(axis=1) for width in (40, 20)]
    np.testing.assert_allclose(samples["falling"].values[:, 0], np.log(means[0] / means[1]))
    forms = {"0": BilinearForm(*np.random.default_rng(0).standard_normal((2, 6, 3)))}
    parts = bounds.MEASURES["parts"](SimpleNamespace(forms=forms))  # type: ignore[arg-type]
    matrix = forms["0"].dense()
    symmetry = (matrix * matrix.T).sum() / (matrix**2).sum()
    assert parts.details["s"][0, 0] == pytest.approx(symmetry)
    assert abs(parts.values[0, 0]) < 1e-12


def test_chunks_of_a_text_have_the_shares_of_their_counts() -> None:
    made = planted()
    text, block = made.text, made.subject.blocks.shape[-1]
    for cut in ("stream", "documents"):
        pieces = counts.cut(text.documents, cut, block)  # type: ignore[arg-type]
        counted = counts.count_pairs(text.tokens, pieces, text.vocabulary_size, chunks=32)
        shares = counts.shares_above_one(counted, at_least=8)
        sample = counts.MEASURES[cut](made)
        np.testing.assert_array_equal(sample.values[:, 0], shares["entries"])
        np.testing.assert_array_equal(sample.details["mass"][:, 0], shares["mass"])
        assert (sample.unit, sample.layers) == ("chunks", ())
    total = counts.MEASURES["in_total"](made)
    counted = counts.own_masks(made)
    ratio = counted.context.sum(axis=1) / counted.prediction.sum(axis=1)
    np.testing.assert_allclose(total.values[:, 0], ratio - 1)
    shares = counts.shares_above_one(counted, at_least=1)
    for name in ("entries", "mass"):
        np.testing.assert_array_equal(total.details[name][:, 0], shares[name])
    assert (total.unit, total.layers) == ("batches", ())


def test_chunks_are_runs_of_pieces_with_equally_many_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    documents = np.cumsum([0, *lengths])
    place = np.arange(documents[-1]) * 8 // documents[-1]  # the chunk that a token is near
    counted = counts.count_pairs(place, counts.cut(documents, "documents", 1), 8, chunks=8)
    in_chunks = counted.occurrences.sum(axis=1)
    assert np.abs(in_chunks - documents[-1] / 8).max() <= lengths.max()
    assert np.trace(counted.occurrences) > 0.95 * documents[-1]
