"""Growth of rows and columns against dense rank-one matrices and draws made one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from wqk_lab.theory.evidence import LayerUpdate
from wqk_lab.theory.growth import as_printed, contributions, share_above, spread_of

numbers = st.floats(-3, 3, allow_nan=False, width=32).map(float)


@given(arrays(np.float64, (4, 3), elements=numbers), arrays(np.float64, (4, 4), elements=numbers))
def test_contributions_are_the_norms_of_each_tokens_own_matrix(x, beta):
    added = contributions(x, beta)
    for token in range(4):
        as_context = sum(beta[i, token] * np.outer(x[i], x[token]) for i in range(4))
        as_prediction = sum(beta[token, j] * np.outer(x[token], x[j]) for j in range(4))
        for matrix, columns, rows in (
            (as_context, added.context_columns, added.context_rows),
            (as_prediction, added.prediction_columns, added.prediction_rows),
        ):
            np.testing.assert_allclose(columns[token], (matrix**2).sum(axis=0), atol=1e-8)
            np.testing.assert_allclose(rows[token], (matrix**2).sum(axis=1), atol=1e-8)
            assert columns[token].sum() == pytest.approx(rows[token].sum(), abs=1e-8)


def test_contributions_of_a_batch_are_those_of_its_examples() -> None:
    random = np.random.default_rng(0)
    x, beta = random.standard_normal((2, 5, 3)), random.standard_normal((2, 5, 5))
    of_batch = contributions(x, beta)
    for example in range(2):
        for field, alone in zip(of_batch, contributions(x[example], beta[example]), strict=True):
            np.testing.assert_allclose(field[example], alone)


def test_equation_s62_is_what_drawing_whole_matrices_gives() -> None:
    # Proposition S1.8 literally, and Corollary S1.9: the same tokens as context, y as prediction.
    random = np.random.default_rng(2)
    variances, trials = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 7.0]), 20_000
    x = random.standard_normal((trials, 5, 6)) * np.sqrt(variances)
    y = random.standard_normal((trials, 6))
    beta = random.standard_normal((trials, 5))
    as_context = np.einsum("ti,tim,tk->tmk", beta, x, y)
    as_prediction = np.einsum("ti,tm,tik->tmk", beta, y, x)
    expected = variances.sum() / (6 * variances)  # S62
    for matrix, columns, rows in ((as_context, 1, 2), (as_prediction, 2, 1)):
        squares = [(matrix**2).sum(axis=axis).mean(axis=0) for axis in (columns, rows)]
        np.testing.assert_allclose(squares[0].mean() / squares[1], expected, rtol=0.1)


def test_spread_is_that_of_numpys_covariance() -> None:
    random = np.random.default_rng(4)
    vectors = random.standard_normal((5000, 5)) * [1, 1, 2, 3, 4] + [0, 0, 0, 0, 2]
    spread = spread_of(vectors)
    covariance = np.cov(vectors, rowvar=False)
    total, mean = np.trace(covariance), vectors.mean(axis=0)
    share = mean @ mean / (vectors**2).sum(axis=1).mean()
    assert spread.mean_share == pytest.approx(share, rel=1e-2)
    dimensions = total**2 / np.trace(covariance @ covariance) / 5
    assert spread.dimensions == pytest.approx(dimensions, rel=1e-2)
    assert spread.below == 0.6


def test_few_vectors_do_not_pass_for_few_dimensions() -> None:
    random = np.random.default_rng(6)
    dimensions = [spread_of(random.standard_normal((60, 40))).dimensions for _ in range(20)]
    assert np.mean(dimensions) == pytest.approx(1, abs=0.05)


@given(
    arrays(np.float64, 5, elements=st.integers(0, 4).map(float)),
    arrays(np.float64, 5, elements=st.integers(0, 4).map(float)),
)
def test_share_above_counts_pairs(columns: np.ndarray, rows: np.ndarray) -> None:
    larger, equal = columns[:, None] > rows, columns[:, None] == rows
    assert share_above(columns, rows) == pytest.approx((larger + equal / 2).mean())


def test_equation_s50_is_compared_as_a_matrix() -> None:
    random = np.random.default_rng(5)
    x, beta = random.standard_normal((6, 4)), random.random((6, 6))
    cosines = []
    for token, context in zip(x, beta @ x, strict=True):
        added, printed = np.outer(token, context), np.outer(context, token)
        cosines.append((added * printed).sum() / np.linalg.norm(added) / np.linalg.norm(printed))
    assert as_printed(LayerUpdate(x, beta)) == pytest.approx(np.mean(cosines))
