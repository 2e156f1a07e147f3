"""Composition scores against dense products, and chance against random rotations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk.errors import FormError
from wqk.forms import BilinearForm
from wqk.forms.chaining import chain, end, gamma_tail, sides


def forms(seed: int, groups: int, sharing: int, width: int, rank: int, shared: str) -> BilinearForm:
    """A stack (groups, sharing) whose ``shared`` factor, if any, belongs to whole groups."""
    dice = np.random.default_rng(seed)
    query, key = (
        dice.standard_normal((groups, 1 if side == shared else sharing, width, rank))
        for side in ("query", "key")
    )
    return BilinearForm.from_factors(query, key)


def dense(form: BilinearForm) -> np.ndarray:
    """Every form of the stack as a matrix of norm 1."""
    matrices = np.broadcast_to(form.dense(), form.shape).reshape(-1, *form.widths)
    return matrices / np.linalg.norm(matrices, axis=(1, 2), keepdims=True)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(2, 9),
    st.integers(1, 12),
    st.sampled_from(["query", "key", "none"]),
    st.floats(-30, 30),
)
def test_scores_are_those_of_dense_products(seed, groups, sharing, width, rank, shared, power):
    reader = forms(seed, groups, sharing, width, rank, shared) * 10.0**power
    writer = forms(seed + 1, sharing, groups, width, rank, "query")
    expected = np.linalg.norm(dense(writer)[:, None] @ dense(reader), axis=(-2, -1))
    composition = chain(end(writer.T), end(reader))
    np.testing.assert_allclose(composition.score, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(composition.mean, 1 / width, rtol=1e-9)
    for side, axis in zip(sides(reader), (2, 1), strict=True):
        shares = np.square(dense(reader)).sum(axis=axis).mean(axis=0)
        np.testing.assert_allclose(side.shares, shares, rtol=1e-9, atol=1e-12)


def test_turning_the_stream_for_both_changes_nothing():
    writer, reader = forms(0, 1, 3, 8, 2, "query"), forms(1, 2, 2, 8, 2, "key")
    turn = np.linalg.qr(np.random.default_rng(2).standard_normal((8, 8)))[0]
    turned = chain(
        end(BilinearForm(turn @ writer.key, writer.query)),
        end(BilinearForm(turn @ reader.query, reader.key)),
    )
    plain = chain(end(writer.T), end(reader))
    for actual, expected in zip(plain, turned, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-9)


def uneven(seed: int, width: int, rank: int, large: int) -> BilinearForm:
    """A form with a decaying spectrum that reads its first dimensions ``large`` times as much."""
    dice = np.random.default_rng(seed)
    query = dice.standard_normal((width, rank)) * 0.7 ** np.arange(rank)
    query[:2] *= large
    return BilinearForm(query, dice.standard_normal((width, rank)))


def scaled_singular_vectors(form: BilinearForm) -> np.ndarray:
    """Left singular vectors times the singular values of the form at norm 1."""
    decomposition = form.svd()
    return np.asarray(decomposition.U * (decomposition.S / np.linalg.norm(decomposition.S)))


def by_chance(
    writer: BilinearForm, reader: BilinearForm, fixed: np.ndarray, count: int, seed: int
) -> np.ndarray:
    """Squared scores with random rotations of the dimensions that are not fixed."""
    w, r = map(scaled_singular_vectors, (writer.T, reader))
    # A rotation takes the columns' orthonormal basis to a random one.
    triangle = np.linalg.qr(w[~fixed], mode="r")
    basis = np.random.default_rng(seed).standard_normal((count, int((~fixed).sum()), len(triangle)))
    turned = np.linalg.qr(basis)[0] @ triangle
    core = turned.swapaxes(-1, -2) @ r[~fixed] + w[fixed].T @ r[fixed]
    return np.square(core).sum(axis=(-2, -1))


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("large", [1, 4])
def test_chance_has_the_moments_of_random_rotations(kept: int, large: int):
    width = 12
    writer, reader = uneven(0, width, 3, large).T, uneven(1, width, 5, large)
    fixed = np.arange(width) < kept
    composition = chain(end(writer.T, fixed), end(reader, fixed))
    drawn = by_chance(writer, reader, fixed, 20_000, 2)
    error = drawn.std() / np.sqrt(len(drawn))
    assert composition.mean[0, 0] == pytest.approx(drawn.mean(), abs=4 * error)
    assert composition.variance[0, 0] == pytest.approx(drawn.var(), rel=0.05)
    third = ((drawn - drawn.mean()) ** 3).mean()
    assert composition.third[0, 0] == pytest.approx(third, rel=0.4)  # exact only for wide streams
    assert composition.z == pytest.approx(
        (composition.score**2 - composition.mean) / composition.variance**0.5
    )
    if not kept:  # of wide streams, by the deviations of the eigenvalues of both
        cubes = cubed_deviations(writer, width) * cubed_deviations(reader, width)
        assert composition.third[0, 0] == pytest.approx(8 * cubes / width**3)


def cubed_deviations(form: BilinearForm, width: int) -> float:
    """Sum of the cubed deviations of the squared singular values' shares from their mean."""
    squares = form.svd().S ** 2
    squares = np.pad(squares, (0, width - squares.size))
    deviations = squares / squares.sum() - 1 / width
    return float((deviations**3).sum())


@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("rank", [1, 4])
def test_p_values_are_as_frequent_as_they_say(kept: int, rank: int):
    width = 48
    writer, reader = uneven(3, width, rank, 3).T, uneven(4, width, rank, 3)
    fixed = np.arange(width) < kept
    composition = chain(end(writer.T, fixed), end(reader, fixed))
    drawn = by_chance(writer, reader, fixed, 10_000, 5)
    z = (drawn - composition.mean[0, 0]) / np.sqrt(composition.variance[0, 0])
    skewness = composition.third[0, 0] / composition.variance[0, 0] ** 1.5
    p = gamma_tail(z, np.full_like(z, skewness))
    for level, fewest, most in ((0.1, 0.65, 1.25), (0.01, 0.4, 1.35), (0.001, 0, 2)):
        assert fewest <= (p <= level).mean() / level <= most


def test_tails_are_those_of_a_gamma_distribution_or_larger():
    from scipy import stats

    for skewness in (0.05, 0.5, 1.0, 2.0):
        z = np.linspace(-1, 8, 10)
        ratio = gamma_tail(z, np.full_like(z, skewness)) / stats.pearson3.sf(z, skewness)
        assert ((ratio > 0.9) & (ratio < 1.6)).all()


def test_a_form_that_is_zero_has_no_score():
    writer, reader = forms(0, 1, 2, 6, 2, "none"), forms(1, 1, 2, 6, 2, "none")
    is_kept = np.array([1.0, 0.0])[:, None, None]
    reader = BilinearForm(reader.query * is_kept, reader.key)
    composition = chain(end(writer.T), end(reader))
    for values in (composition.score, composition.z, composition.p):
        assert np.isnan(values).tolist() == [[False, True]] * 2


def test_a_form_that_reads_all_alike_leaves_nothing_to_chance():
    writer, reader = forms(0, 1, 1, 6, 2, "none"), BilinearForm.from_matrix(np.eye(6))
    composition = chain(end(writer.T), end(reader))
    assert composition.score[0, 0] == pytest.approx(6**-0.5)
    assert np.isnan(composition.z[0, 0])
    assert np.isnan(composition.p[0, 0])


def test_streams_have_one_width():
    with pytest.raises(FormError, match="width 6, the other reads from one of width 7"):
        chain(end(forms(0, 1, 1, 6, 2, "none").T), end(forms(0, 1, 1, 7, 2, "none")))


def test_something_has_to_rotate():
    with pytest.raises(FormError, match="two dimensions to rotate, got 1 of 6"):
        end(forms(0, 1, 1, 6, 2, "none"), np.arange(6) > 0)
