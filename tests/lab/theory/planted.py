"""For each statement: data where it is true, data where it is violated, and data by chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from tests.lab.theory.planting import (
    B,
    D,
    H,
    L,
    N,
    R,
    U,
    betas,
    evidence,
    inputs,
    layer_of,
    log_normal,
    softmax,
    spread_form,
    weighted,
    with_updates,
)

from wqk.forms import BilinearForm
from wqk.forms.scores import directionality
from wqk_lab.theory import bounds, optimizer, studying, tails
from wqk_lab.theory.evidence import Evidence
from wqk_lab.theory.gradients import LayerGradient
from wqk_lab.theory.optimizer import Moment
from wqk_lab.theory.text import Text
from wqk_lab.theory.verdict import Finding, Sample, Statement, decide

Random = np.random.Generator
Case = Callable[[int], Any]  # what is planted, from a seed

STATEMENTS = {f"{s.number}: {s.says}": s for s in studying.EVERY}


def find(number: str, part: str = "") -> str:
    (key,) = (k for k in STATEMENTS if k.startswith(f"{number}: ") and part in k)
    return key


def measured(key: str, planted: Any) -> tuple[Statement, Sample]:
    """A statement's quantity in evidence, or in the saved steps of a run; or planted as it is."""
    statement = STATEMENTS[key]
    return statement, planted if isinstance(planted, Sample) else statement.measure(planted)


def verdict(key: str, planted: Any) -> Finding:
    return decide(*measured(key, planted))


# Models of different seeds, where one model only describes.
MODELS = 5


def drawn(key: str, case: Case, seed: int) -> tuple[Statement, Sample]:
    """A statement's quantity in what is planted; over several models if one cannot decide."""
    statement, sample = measured(key, case(seed))
    if not sample.one_model:
        return statement, sample
    seeds = range(MODELS * seed, MODELS * (seed + 1))
    rows = [measured(key, case(s))[1].values.mean(axis=0) for s in seeds]
    return statement, Sample(np.array(rows), "seeds", sample.layers)


def errors(size: float) -> Case:
    return lambda seed: Sample(np.full((U, L), size), "batches", tuple("012"))


def noisy(mean: float, spread: float = 0.02) -> Case:
    return lambda seed: Sample(
        mean + spread * np.random.default_rng(seed).standard_normal((U, L)),
        "batches",
        tuple("012"),
    )


# Attention that is, or is not, the softmax of the scores.


def attending(
    change: Callable[[np.ndarray], np.ndarray], tied: bool = False, noise: float = 0.0
) -> Case:
    def planted(seed: int) -> Evidence:
        values: dict[str, Any] = {}

        def make(random: Random, batch: int, layer: int) -> LayerGradient:
            weights_random = np.random.default_rng((seed, layer))
            attention = weighted(layer, weights_random)
            if tied:  # all heads alike: the sum of forms orders as each of them does
                heads = attention.heads.query, attention.heads.key
                sides = (w[:1].repeat(H, axis=0).swapaxes(-1, -2) for w in heads)
                attention = attention.with_weights(*sides)
            x = inputs(random)
            scores = attention.plan.score_scale * attention.groups(
                x[:, None, None], x[:, None, None]
            )
            scores = scores.reshape(B, H, N, N)
            v, bias = (
                weights_random.standard_normal((H, R, D)),
                weights_random.standard_normal((H, R)),
            )
            values[str(layer)] = replace(attention.key, stored_weight=v, stored_bias=bias)
            value = x[:, None] @ v.swapaxes(-1, -2) + bias[:, None]
            mixed = (softmax(scores) @ value).swapaxes(1, 2).reshape(B, N, -1)
            shares = change(scores + noise * random.standard_normal(scores.shape))
            recorded = {"probabilities": shares, "value_input": x, "mixed": mixed}
            return layer_of(attention, x, betas(random), **recorded)

        sample = evidence(make, seed=seed)
        sample.__dict__["values"] = values
        return sample

    return planted


# Gradients.


def layers(make: Callable[[Random, int, int], LayerGradient], **settings: Any) -> Case:
    """Evidence whose gradients a function makes."""
    return lambda seed: evidence(make, seed=seed, **settings)


def gradient(
    change: Callable[[Random, int, LayerGradient], LayerGradient], **settings: Any
) -> Case:
    """Random weights, inputs and β, changed by a function."""

    def make(random: Random, batch: int, layer: int) -> LayerGradient:
        plain = layer_of(weighted(layer, random), inputs(random), betas(random))
        return change(random, batch, plain)

    return layers(make, **settings)


def plain(random: Random, batch: int, layer: LayerGradient) -> LayerGradient:
    return layer


def proportional_error(random: Random, batch: int, layer: LayerGradient) -> LayerGradient:
    return replace(layer, error=3 * layer.beta)


def random_error(random: Random, batch: int, layer: LayerGradient) -> LayerGradient:
    return replace(layer, error=random.standard_normal(layer.beta.shape))


def orthogonal_heads(random: Random, batch: int, layer: LayerGradient) -> LayerGradient:
    """Σ_h W_h W_hᵀ = 1 on both sides, and one β for all heads."""
    query, key = (
        np.linalg.qr(random.standard_normal((D, D)))[0].reshape(H, R, D) for _ in range(2)
    )
    attention = layer.attention.with_weights(query, key)
    return replace(layer, attention=attention, beta=layer.beta[:, :1].repeat(H, axis=1))


def tied_heads(random: Random, batch: int, layer: LayerGradient) -> LayerGradient:
    query = random.standard_normal((H, R, D))
    return replace(layer, attention=layer.attention.with_weights(query, query))


def diagonal(random: Random, batch: int, layer: LayerGradient) -> LayerGradient:
    return replace(layer, beta=layer.beta * np.eye(N))


def two_sides(predicted: bool) -> Callable[..., LayerGradient]:
    """Tokens of the first half are context to those of the second; one half is anisotropic."""

    def change(random: Random, batch: int, layer: LayerGradient) -> LayerGradient:
        scales = np.random.default_rng(5).permutation(np.geomspace(0.05, 3, D))
        x = layer.query_input.copy()
        half = slice(N // 2, None) if predicted else slice(None, N // 2)
        x[:, half] *= scales
        beta = layer.beta.copy()
        beta[:, :, : N // 2] = beta[:, :, :, N // 2 :] = 0
        return replace(layer, beta=beta, query_input=x, key_input=x)

    return change


def moved(by: float, scale: float = 1.0) -> Case:
    """Many inputs with a mean, and unequal variances."""

    def make(random: Random, batch: int, layer: int) -> LayerGradient:
        x = by + inputs(random, 60) * np.geomspace(1, scale, D)
        return layer_of(weighted(layer, random), x, betas(random, 60))

    return layers(make, objective="causal")


# Pairs.


def paired(sign: float, size: float = 1.0) -> Case:
    """β_ji = ± β_ij where both are predicted, orthogonal inputs; the rest is chance."""

    def make(random: Random, batch: int, layer: int) -> LayerGradient:
        predicted = evidence().predicted[batch]
        beta = np.triu(random.choice([-1.0, 1.0], (B, 1, N, N)), 1)
        beta = size * (beta + sign * beta.swapaxes(-1, -2)).repeat(H, axis=1)
        i, j = predicted[:, None, :, None], predicted[:, None, None, :]
        is_predicted_alone = random.choice([-1.0, 1.0], (B, 1, N, N)).repeat(H, axis=1)
        x = np.linalg.qr(random.standard_normal((B, D, D)))[0][:, :N]
        return layer_of(
            weighted(layer, random), x, np.where(i & j, beta, np.where(i, is_predicted_alone, 0))
        )

    return layers(make)


def each_paired(sign: float) -> Case:
    """β_ij of the pass that predicts i is ± β_ji of the one that predicts j."""

    def make(random: Random, batch: int, layer: int) -> LayerGradient:
        errors = np.triu(random.standard_normal((B, H, N, N)), 1)
        errors = errors + sign * errors.swapaxes(-1, -2)
        beta = np.zeros((B, N, H, N, N))
        beta[:, np.arange(N), :, np.arange(N)] = errors.transpose(2, 0, 1, 3)
        x = np.linalg.qr(random.standard_normal((B, D, D)))[0][:, None, :N].repeat(N, axis=1)
        flat = beta.reshape(B * N, H, N, N)
        return layer_of(weighted(layer, random), x.reshape(B * N, N, D), flat)

    return layers(make, objective="each")


def in_common(sign: float) -> Case:
    """A symmetric or skew matrix that all batches share, and chance."""

    def planted(seed: int) -> Evidence:
        random = np.random.default_rng(seed)
        shared = [random.standard_normal((20, 20)) for _ in range(L)]
        shared = [matrix + sign * matrix.T for matrix in shared]

        def form(batch: int, layer: int) -> BilinearForm:
            return BilinearForm(shared[layer] + random.standard_normal((20, 20)), np.eye(20))

        return with_updates(form)

    return planted


# Norms of columns and rows.


def updated(form: Callable[[int, int], BilinearForm], **settings: Any) -> Evidence:
    """Evidence whose updates and weights are forms that a function draws."""
    return with_updates(form, forms={str(layer): form(0, layer) for layer in range(L)}, **settings)


def norms(columns: bool, rows: bool) -> Case:
    """Updates whose columns, rows or both have unequal norms."""

    def planted(seed: int) -> Evidence:
        random = np.random.default_rng(seed)

        def form(batch: int, layer: int) -> BilinearForm:
            scale = log_normal(random)
            return spread_form(*(scale**side for side in (columns, rows)), random)

        return updated(form, objective="causal")

    return planted


def shared_dimensions(layers: int = L) -> Case:
    """A model whose layers share large dimensions, drawn by one law for columns and for rows.

    Nothing favors columns, and yet in one model the same side leads in most of its layers.
    """

    def planted(seed: int) -> Evidence:
        random = np.random.default_rng(seed)
        columns, rows = log_normal(random), log_normal(random)
        forms = {str(layer): spread_form(columns, rows, random) for layer in range(layers)}
        return evidence(forms=forms, objective="causal")

    return planted


def symmetric_forms(seed: int) -> Evidence:
    """Forms whose columns and rows have nearly the same norms."""
    random = np.random.default_rng(seed)

    def form(batch: int, layer: int) -> BilinearForm:
        matrix = random.standard_normal((60, 60))
        return BilinearForm(matrix + matrix.T + random.standard_normal((60, 60)) / 10, np.eye(60))

    return updated(form)


def columns_vary_e_times(seed: int) -> Evidence:
    """Corollary S1.13's planted fault: Var‖column‖ = e Var‖row‖."""
    random = np.random.default_rng(seed)

    def form(batch: int, layer: int) -> BilinearForm:
        deviations = random.standard_normal(400)
        deviations /= deviations.std()
        columns = np.sqrt(1 + 0.3 * np.sqrt(np.e) * np.tanh(deviations))
        rows = np.sqrt(1 + 0.3 * np.tanh(random.permutation(deviations)))
        return BilinearForm(rows[:, None], columns[:, None])

    return updated(form)


def one_shape(seed: int, units: int = 80) -> Evidence:
    """Norms of columns and rows that are one law, wider on one side."""
    random = np.random.default_rng(seed)

    def form(batch: int, layer: int) -> BilinearForm:
        z = np.abs(random.standard_normal(50)) + 1
        return BilinearForm(np.sqrt(z)[:, None], (z**1.5)[:, None])

    return with_updates(form, units)


def two_shapes(seed: int) -> Evidence:
    """Rows that vary more, within bounds; columns that are equal but for one."""
    rows, columns = np.repeat([0.2, 1.2], 8), np.where(np.arange(16) == 3, 1.8, 0.9)
    return with_updates(lambda batch, layer: BilinearForm(rows[:, None], columns[:, None]), 40)


def at_the_edge(seed: int) -> Sample:
    """The side whose norms vary more has the longest in nine updates of ten."""
    agree = np.random.default_rng(seed).random((U, L)) < 0.9
    reach = np.where(agree, 2.0, 0.5)
    return tails.lemma(Sample(np.ones((U, L)), "batches", tuple("012"), {"reach": reach}))


def isotropy(context: bool) -> Case:
    """Inputs that make columns vary on the context side; or β alone, which whitening leaves."""

    def make(random: Random, batch: int, layer: int) -> LayerGradient:
        scales = np.geomspace(0.1, 4, D)
        x = inputs(random, 20)
        beta = betas(random, 20)
        if context:
            beta[:, :, : N // 2] = beta[:, :, :, N // 2 :] = 0
            x[:, : N // 2] *= scales
        return layer_of(weighted(layer, random), x, beta)

    return layers(make, objective="causal")


def factors(query: float, key: float) -> Case:
    """Weights of unequal rows on one side and small ones on the other: whose side the step has."""

    def make(random: Random, batch: int, layer: int) -> LayerGradient:
        fixed = np.random.default_rng(layer)
        scales = np.exp(fixed.standard_normal(D))
        q, k = fixed.standard_normal((2, H, R, D))
        sides = q * (scales if query else 0.01), k * (scales if key else 0.01)
        attention = weighted(layer, random).with_weights(*sides)
        return layer_of(attention, inputs(random), betas(random))

    return layers(make, objective="causal")


def mean_of_inputs(size: float) -> Case:
    def make(random: Random, batch: int, layer: int) -> LayerGradient:
        """Signs of the gradient of W_q that have much in common make columns alone vary."""
        x = inputs(random, 40) + size * np.random.default_rng(layer).standard_normal(D)
        query, key = random.standard_normal((2, H, R, D))
        attention = weighted(layer, random).with_weights(0.1 * query, key)
        return layer_of(attention, x, betas(random, 40))

    return layers(make)


# Texts.


def ordered(first: int, second: int, documents: bool) -> Case:
    """Tokens of `first` kinds in the first half of each block, and `second` kinds in the second."""

    def planted(seed: int) -> Evidence:
        random = np.random.default_rng(seed)
        early = random.integers(0, first, (4000, N // 2))
        late = first + random.integers(0, second, (4000, N // 2))
        tokens = np.concatenate([early, late], axis=1).ravel()
        offsets = np.arange(0, len(tokens) + 1, N) if documents else np.array([0, len(tokens)])
        return evidence(objective="causal", text=Text("t", tokens, offsets, first + second, None))

    return planted


def no_order(seed: int) -> Evidence:
    tokens = np.random.default_rng(seed).integers(0, 30, 32_000)
    return evidence(objective="causal", text=Text("t", tokens, np.arange(0, 32_001, N), 30, None))


# Runs.


def forms_of_layers(stack: np.ndarray) -> dict[str, BilinearForm]:
    """The matrices (L, D, D) as forms, by layer."""
    factors = ((matrix, np.eye(stack.shape[-1])) for matrix in stack)
    return {str(layer): BilinearForm(*pair) for layer, pair in enumerate(factors)}


def changing(columns: bool, rows: bool, along: float = 0.0, symmetric: bool = False) -> Case:
    """A run whose forms grow by random changes, along or against the signs."""

    def planted(seed: int) -> list[Moment]:
        random, width = np.random.default_rng(seed), 24
        moments, total = [], np.zeros((L, width, width))
        for _ in range(9):
            signs, step = random.standard_normal((2, L, width, width))
            step *= log_normal(random, width) if columns else 1
            step *= log_normal(random, width)[:, None] if rows else 1
            step += step.swapaxes(-1, -2) if symmetric else 0
            moments.append(optimizer.Moment(forms_of_layers(total), forms_of_layers(signs)))
            total = total + step + along * signs
        return moments

    return planted


# Random matrices.


def unlike_factors(seed: int) -> np.ndarray:
    """d of products of normal queries and Student's t keys."""
    random = np.random.default_rng(seed)
    query = bounds.LAWS["normal"](random, (300, 24, 4))
    key = bounds.LAWS["student"](random, (300, 24, 4))
    return np.asarray(directionality(BilinearForm(query, key)))


def eightfold(seed: int) -> Sample:
    """n·s of random matrices, n = 16."""
    return Sample(16 * bounds.simulate_scores(16, trials=200, seed=seed).symmetry[:, None], "draws")


# For each statement: where it is true, where it is violated, and where chance alone decides, with
# the verdict that chance must not give more often than once in twenty times.
CASES: dict[str, tuple[Case, Case, Case | None, str]] = {
    find("Proposition 2.1, Equation 2"): (
        attending(softmax),
        attending(lambda s: softmax(1.1 * s)),
        None,
        "",
    ),
    find("Proposition 2.1, Equation S15"): (
        attending(softmax),
        attending(lambda s: softmax(-s)),
        attending(softmax, noise=0.005),
        "fails",
    ),
    find("Proposition 2.1, Equation S16"): (
        attending(softmax),
        attending(lambda s: 0.9 * softmax(s)),
        None,
        "",
    ),
    find("Remark S1.5, Equation S20"): (attending(softmax), errors(1e-2), None, ""),
    find("Remark S1.5, Equation S21"): (
        attending(softmax, tied=True),
        attending(lambda s: softmax(-s), tied=True),
        attending(softmax, tied=True, noise=0.005),
        "fails",
    ),
    find("Proposition 2.2"): (errors(1e-6), errors(1e-2), None, ""),
    find("Proposition 2.2, Equations S33-S36"): (
        gradient(proportional_error),
        gradient(random_error),
        gradient(random_error),
        "holds",
    ),
    find("Remark S1.6, Equation S40"): (
        gradient(orthogonal_heads),
        gradient(plain),
        gradient(plain),
        "holds",
    ),
    find("Remark S1.6 with Theorem S1.14"): (
        gradient(tied_heads),
        gradient(plain),
        gradient(plain),
        "holds",
    ),
    find("Proposition S1.7, Equations S42-S49"): (gradient(plain), errors(1e-2), None, ""),
    find("Proposition S1.7, Equation S50"): (
        gradient(diagonal),
        gradient(plain),
        gradient(plain),
        "holds",
    ),
    find("Proposition S1.8"): (
        gradient(two_sides(True)),
        gradient(two_sides(False)),
        gradient(plain),
        "holds",
    ),
    find("Corollary S1.9"): (
        gradient(two_sides(False)),
        gradient(two_sides(True)),
        gradient(plain),
        "holds",
    ),
    find("Proposition S1.8, assumption", "centered"): (moved(0), moved(1), moved(0), "fails"),
    find("Proposition S1.8, assumption", "isotropic"): (moved(0), moved(0, 20), moved(0), "fails"),
    find("Theorem S1.12, Equation S96", "stream"): (
        ordered(20, 3, False),
        ordered(3, 20, False),
        no_order,
        "holds",
    ),
    find("Theorem S1.12, Equation S96", "documents"): (
        ordered(20, 3, True),
        ordered(3, 20, True),
        no_order,
        "holds",
    ),
    find("Proposition S1.10, Equation S69"): (lambda seed: evidence(), errors(1e-2), None, ""),
    find("Theorem S1.12, Equations S97-S98"): (norms(True, False), errors(1e-2), None, ""),
    find("Lemma S1.11"): (one_shape, two_shapes, at_the_edge, "holds"),
    find("Theorems 2.3 and S1.12, update"): (
        norms(True, False),
        norms(False, True),
        norms(False, False),
        "holds",
    ),
    find("Theorems 2.3 and S1.12, W_qk"): (
        norms(True, False),
        norms(False, True),
        shared_dimensions(),
        "holds",
    ),
    find("Corollary S1.13, update"): (
        symmetric_forms,
        columns_vary_e_times,
        norms(True, True),
        "fails",
    ),
    find("Corollary S1.13, W_qk"): (
        symmetric_forms,
        columns_vary_e_times,
        norms(True, True),
        "fails",
    ),
    find("Theorem S1.12, Equation S96 as a cause"): (
        noisy(0.5),
        noisy(-0.5),
        noisy(0.0, 0.5),
        "holds",
    ),
    find("Theorem S1.12, Cov(x) ≠ σ²I as a cause"): (
        isotropy(True),
        isotropy(False),
        isotropy(False),
        "holds",
    ),
    find("Theorem 2.3 through Remark S1.6"): (
        factors(0, 1),
        factors(1, 0),
        gradient(plain, objective="causal"),
        "holds",
    ),
    find("Remark S1.6 with Adam", "a step"): (
        factors(0, 1),
        factors(1, 0),
        gradient(plain),
        "holds",
    ),
    find("Remark S1.6 with Adam, the cause"): (
        mean_of_inputs(3),
        mean_of_inputs(0),
        mean_of_inputs(0),
        "holds",
    ),
    find("Theorem S1.14, assumption"): (paired(1), paired(-1), gradient(plain), "holds"),
    find("Theorems 2.4 and S1.14"): (paired(1), paired(-1), gradient(plain), "holds"),
    find("Theorem 2.4, on average"): (in_common(1), in_common(-1), in_common(0), "holds"),
    find("Remark S1.15, Equation S119"): (paired(1), paired(-1, 50.0), gradient(plain), "holds"),
    find("Lemma S1.16, Proposition S1.17 (1)"): (norms(True, False), errors(1e-2), None, ""),
    find("Proposition S1.17 (3)"): (
        lambda seed: Sample(8 * np.random.default_rng(seed).exponential(1, (400, 1)), "draws"),
        lambda seed: evidence(),
        eightfold,
        "holds",
    ),
    find("Proposition S1.18 (3)"): (
        lambda seed: evidence(),
        lambda seed: Sample(unlike_factors(seed)[:, None], "draws"),
        lambda seed: Sample(
            bounds.simulate_scores(16, trials=200, seed=seed).directionality[:, None], "draws"
        ),
        "fails",
    ),
    find("Proposition S1.18 (3), limit"): (
        lambda seed: evidence(),
        noisy(0.3),
        noisy(0.0, 0.3),
        "holds",
    ),
    find("Theorem 2.3, along training"): (
        changing(True, False),
        changing(False, True),
        changing(False, False),
        "holds",
    ),
    find("Corollary S1.13, along training"): (
        changing(False, False, symmetric=True),
        changing(True, False),
        changing(False, False),
        "fails",
    ),
    find("Remark S1.6 with Adam, along training"): (
        changing(False, False, 1.0),
        changing(False, False, -1.0),
        changing(False, False),
        "holds",
    ),
}


BY_CHANCE = [key for key in CASES if CASES[key][2]]


def by_chance(key: str, seed: int) -> tuple[Statement, Sample]:
    """Measurement of a statement where chance alone decides."""
    case = CASES[key][2]
    assert case is not None
    return drawn(key, case, seed)
