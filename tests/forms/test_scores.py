"""Every score against M written out: A Bᵀ in extended precision, straight from the definitions."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.forms.laws import shares

import wqk
from wqk import BilinearForm, coupling, directionality, symmetry, symmetry_null
from wqk.errors import FormError, NonFiniteWeights
from wqk.forms import kernels, scores
from wqk.forms.kernels import outliers
from wqk.forms.scores import head_terms

TOLERANCE = {np.float32: 1e-5, np.float64: 1e-10}


class Dense(NamedTuple):
    """The reference: M, and bounds of the norms of its rows and columns."""

    entries: np.ndarray
    row_reach: np.ndarray  # ‖row of A‖ ‖B‖
    column_reach: np.ndarray

    @classmethod
    def of(cls, query: np.ndarray, key: np.ndarray) -> Dense:
        query, key = query.astype(np.longdouble), key.astype(np.longdouble)
        row_reach = lengths(query, -1) * lengths(key, (-2, -1))[..., None]
        column_reach = lengths(key, -1) * lengths(query, (-2, -1))[..., None]
        return cls(query @ key.swapaxes(-1, -2), row_reach, column_reach)

    @property
    def square_norm(self) -> np.ndarray:
        return (self.entries**2).sum((-2, -1))

    @property
    def rounding(self) -> np.ndarray:
        """Error of M's entries in float64, relative to ‖M‖."""
        reach = lengths(self.row_reach, -1)
        norm = np.sqrt(self.square_norm)
        return 8 * np.finfo(float).eps * reach / np.where(norm > 0, norm, 1)


def lengths(array: np.ndarray, axis: int | tuple[int, int]) -> np.ndarray:
    return np.sqrt((array**2).sum(axis))


def dense_directionality(rows: np.ndarray, columns: np.ndarray, gamma: float, weight: str) -> float:
    """Definition 3.2 for one form, from the norms of its rows and columns."""
    sums = []
    for norms in (rows, columns):
        threshold = norms.mean() + gamma * norms.std(ddof=1)
        taken = norms[norms > threshold]
        sums.append(taken.sum() if weight == "norm" else (taken - threshold).sum())
    total = sums[0] + sums[1]
    return float((sums[0] - sums[1]) / total) if total else 0.0


# Flaws of a factor's rows and columns, applied to drawn values.
FLAWS = {
    "none": lambda f, rng: f,
    "zero columns": lambda f, rng: f * (rng.random(f.shape[-1]) < 0.5),
    "repeated columns": lambda f, rng: f[..., rng.integers(0, f.shape[-1], f.shape[-1])],
    "outlying rows": lambda f, rng: f * np.where(rng.random(f.shape[-2]) < 0.05, 1e3, 1)[:, None],
    "sparse rows": lambda f, rng: f * (rng.random(f.shape[-2]) < 0.3)[:, None],
    "uneven columns": lambda f, rng: f * 10.0 ** rng.uniform(-4, 0, f.shape[-1]),
}

widths = st.one_of(st.integers(1, 40), st.integers(1, 40), st.integers(41, 300))


@st.composite
def factor_pairs(draw, dtype: type, *, square: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """A and B of one form or a stack: any rank, any scale, and any flaw."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    d_query = draw(widths)
    d_key = d_query if square else draw(widths)
    rank = draw(st.integers(1, min(64, 2 * d_query)))
    stack, key_stack = draw(
        st.sampled_from([((), ()), ((), ()), ((3,), (3,)), ((2, 3), (2, 1)), ((3, 2), (3, 1))])
    )
    flaws = st.sampled_from(list(FLAWS))
    query = FLAWS[draw(flaws)](rng.standard_normal((*stack, d_query, rank)), rng)
    key = FLAWS[draw(flaws)](rng.standard_normal((*key_stack, d_key, rank)), rng)
    # A ⟂ B in rank space but for a part of 10⁻ᵏ: M is that much smaller than its summands.
    smallest = {np.float32: 8, np.float64: 4}[dtype]
    kept = draw(st.one_of(st.none(), st.integers(1, smallest)))
    if kept is not None:
        remainder = rng.standard_normal(key.shape) * 10.0**-kept
        query = np.concatenate([query, query], axis=-1)
        key = np.concatenate([key, remainder - key], axis=-1)
    exponent = draw(st.integers(-12, 12) | st.sampled_from([-30, 30]))
    key_exponent = draw(st.integers(-12, 12)) if abs(exponent) == 12 else -exponent
    return (query * 10.0**exponent).astype(dtype), (key * 10.0**key_exponent).astype(dtype)


DTYPES = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@DTYPES
@given(data=st.data())
def test_norm_and_symmetry_equal_the_dense_computation(dtype, data):
    query, key = data.draw(factor_pairs(dtype))
    dense, form = Dense.of(query, key), BilinearForm.from_factors(query, key)
    norm = np.sqrt(dense.square_norm)
    tolerance = TOLERANCE[dtype] + dense.rounding
    assert np.all(np.abs(form.norm - norm) <= tolerance * norm)
    terms = dense.entries * dense.entries.mT
    for score, part in (
        (symmetry(form), terms),
        (symmetry_null(form), terms * np.eye(len(terms.T))),
    ):
        with np.errstate(invalid="ignore"):
            expected = shares(dense.entries, part)
        np.testing.assert_array_equal(np.isnan(score), norm == 0)
        assert np.all((norm == 0) | (np.abs(score - expected) <= tolerance))


@DTYPES
@given(data=st.data())
def test_row_and_column_norms_are_right_relative_to_the_factors(dtype, data):
    query, key = data.draw(factor_pairs(dtype, square=False))
    dense, form = Dense.of(query, key), BilinearForm.from_factors(query, key)
    for norms, expected, reach in (
        (form.row_norms, lengths(dense.entries, -1), dense.row_reach),
        (form.column_norms, lengths(dense.entries, -2), dense.column_reach),
    ):
        assert norms.shape == expected.shape
        assert np.all(np.abs(norms - expected) <= TOLERANCE[dtype] * reach)


@DTYPES
@pytest.mark.parametrize("weight", ["norm", "excess"])
@pytest.mark.parametrize("rank", [3, 40])
@pytest.mark.parametrize(("rows", "columns"), [(0, 2), (1, 0), (1, 2), (3, 0), (3, 2)])
@pytest.mark.parametrize(("d_key", "gamma"), [(60, 2.0), (35, 1.0)])
def test_directionality_of_planted_outliers(dtype, weight, rank, rows, columns, d_key, gamma):
    rng = np.random.default_rng(17)
    query, key = rng.standard_normal((60, rank)), rng.standard_normal((d_key, rank))
    query[:rows] *= 8
    key[20 : 20 + columns] *= 6
    query, key = query.astype(dtype), key.astype(dtype)
    dense = Dense.of(query, key).entries
    expected = dense_directionality(lengths(dense, -1), lengths(dense, -2), gamma, weight)
    score = directionality(BilinearForm.from_factors(query, key), gamma=gamma, weight=weight)
    assert float(score) == pytest.approx(expected, abs=10 * TOLERANCE[dtype])
    assert expected != 0


@pytest.mark.parametrize(("d", "rank"), [(1500, 64), (1500, 375), (1200, 1200)])
def test_float32_is_enough_at_the_size_of_a_layer(d, rank):
    query, key = np.random.default_rng(23).standard_normal((2, d, rank), dtype=np.float32)
    # A shared part makes it symmetric, an outlying dimension gives it a direction.
    key += query
    key[17] *= 12
    dense = query.astype(float) @ key.T.astype(float)
    norms = lengths(dense, -1), lengths(dense, -2)
    form, square_norm = BilinearForm.from_factors(query, key), (dense**2).sum()
    assert form.moments.query.dtype == np.float32
    assert float(form.norm) == pytest.approx(math.sqrt(square_norm), rel=1e-6)
    assert float(symmetry(form)) == pytest.approx((dense * dense.T).sum() / square_norm, abs=1e-6)
    assert float(symmetry_null(form)) == pytest.approx(
        (np.diag(dense) ** 2).sum() / square_norm, abs=1e-6
    )
    for weight in ("norm", "excess"):
        expected = dense_directionality(*norms, 2.0, weight)
        assert float(directionality(form, gamma=2.0, weight=weight)) == pytest.approx(
            expected, abs=1e-4
        )


@pytest.mark.filterwarnings("error")
def test_no_norm_lies_beyond_a_huge_gamma():
    query, key = np.random.default_rng(0).standard_normal((2, 64, 8)).astype(np.float32)
    assert float(directionality(BilinearForm.from_factors(query, key), gamma=1e300)) == 0


# Both routes


def heads_of(
    seed: int, stack: tuple[int, int], d: int = 12, rank: int = 3, dtype: type = np.float64
) -> BilinearForm:
    """Heads (G, H/G), of which each group shares its key."""
    groups, sharing = stack
    query = np.random.default_rng(seed).standard_normal((groups, sharing, d, rank))
    key = np.random.default_rng(seed + 1).standard_normal((groups, 1, d, rank))
    return BilinearForm.from_factors(query.astype(dtype), key.astype(dtype))


SUMS = ("square_norm", "trace_of_square", "row_norms", "column_norms")


@pytest.mark.parametrize(
    ("d", "rank", "route"),
    [(40, 10, kernels.Identities), (40, 11, kernels.Tiles), (3, 1, kernels.Tiles)],
)
def test_the_cheaper_route_is_taken(d, rank, route):
    assert type(heads_of(0, (2, 3), d, rank).moments) is route


def test_cancelling_factors_leave_the_identities_for_wider_tiles():
    a, b = np.random.default_rng(3).standard_normal((2, 40, 2)).astype(np.float32)
    query, key = np.concatenate([a, a], -1), np.concatenate([b, -b * np.float32(1.001)], -1)
    moments = BilinearForm.from_factors(query, key).moments
    assert isinstance(moments, kernels.Tiles)
    assert moments.query.dtype == np.float64


@pytest.mark.parametrize("rank", [2, 150])
@pytest.mark.parametrize("d_key", [300, 170])
def test_small_blocks_give_the_same_sums(monkeypatch, rank, d_key):
    rng = np.random.default_rng(5)
    query, key = rng.standard_normal((2, 300, rank)), rng.standard_normal((1, d_key, rank))
    # A row of zero products sends the identities through tiles for that row alone.
    query[:, 7] = 0
    names = [name for name in SUMS if d_key == 300 or name != "trace_of_square"]
    moments = BilinearForm.from_factors(query, key).moments
    expected = [np.array(getattr(moments, name)) for name in names]
    monkeypatch.setattr(kernels, "BLOCK_ENTRIES", 1)
    assert len(list(kernels.block_slices(300, 32))) == 10
    moments_by_blocks = BilinearForm.from_factors(query, key).moments
    for name, value in zip(names, expected, strict=True):
        np.testing.assert_allclose(getattr(moments_by_blocks, name), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e-12])
def test_norms_that_cancel_are_formed_entry_by_entry(scale):
    # The Gram matrix alone would leave no digit of row 3, while ‖M‖ itself is well conditioned.
    rng = np.random.default_rng(8)
    query, key = rng.standard_normal((40, 4)), rng.standard_normal((40, 4))
    key[:, 3] = key[:, 2] * (1 + 1e-7 * rng.standard_normal(40))
    query[3] = [0, 0, 1, -1]
    query, key = query * scale, key / scale
    form = BilinearForm.from_factors(query, key)
    expected = lengths(Dense.of(query, key).entries, -1)[3]
    assert isinstance(form.moments, kernels.Identities)
    assert float(form.row_norms[3]) == pytest.approx(float(expected), rel=1e-7)
    turned = BilinearForm.from_factors(key, query)
    assert float(turned.column_norms[3]) == pytest.approx(float(expected), rel=1e-7)


def test_large_forms_are_drawn_smaller(monkeypatch):
    drawn = scores.untrained_range(48, 12)
    monkeypatch.setattr(scores, "DRAWN", 48 * 12**2)
    assert scores.untrained_range.__wrapped__(96, 24) == drawn


# Invariants


def all_scores(form: BilinearForm) -> np.ndarray:
    leaning = [directionality(form, gamma=1.0, weight=weight) for weight in ("norm", "excess")]
    return np.array([symmetry(form), symmetry_null(form), *leaning], float)


# Products of scales that float32 or float64 cannot hold are among them: scores never see them.
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        (np.float64, (-1.0, 1.0)),
        (np.float64, (1e-12, 1e12)),
        (np.float64, (1e-170, 1e-170)),
        (np.float64, (1e200, 1e200)),
        (np.float64, (5e-320, 1.0)),
        (np.float32, (1e-30, 1e-30)),
        (np.float32, (1e30, 1e30)),
        (np.float32, (1e-30, 1e30)),
        (np.float32, (1e37, 1e-12)),
    ],
)
@pytest.mark.parametrize("rank", [2, 9])
def test_scores_do_not_depend_on_scale(dtype, scales, rank):
    # Integer entries survive even as subnormals, so that the same form is meant on either scale.
    query, key = np.random.default_rng(6).integers(-8, 9, (2, 24, rank)).astype(dtype)
    scaled = BilinearForm.from_factors(query * dtype(scales[0]), key * dtype(scales[1]))
    tolerance = 1e-3 if scales[0] == 5e-320 else 10 * TOLERANCE[dtype]
    expected = all_scores(BilinearForm.from_factors(query, key))
    np.testing.assert_allclose(all_scores(scaled), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_head_terms_and_coupling_do_not_depend_on_scale(scale):
    plain = heads_of(4, (2, 3), 24, 3, np.float32)
    query, key = plain.query.copy(), plain.key
    # One head apart is enough for the whole stack to be balanced head by head.
    query[1, 2] *= 1e-3
    plain = BilinearForm.from_factors(query, key)
    scaled = BilinearForm.from_factors(query * np.float32(scale), key * np.float32(scale))
    np.testing.assert_allclose(coupling(scaled), coupling(plain), rtol=0, atol=1e-5)
    np.testing.assert_allclose(head_terms(scaled), head_terms(plain), rtol=0, atol=1e-5)


# Heads


GROUPS = pytest.mark.parametrize("stack", [(4, 1), (2, 3), (1, 4), (1, 1)])


def traces_of_products(heads: BilinearForm) -> np.ndarray:
    """tr(M_a M_b) for every pair of heads, from the matrices themselves."""
    dense = (heads.query @ heads.key.swapaxes(-1, -2)).reshape(-1, *heads.widths)
    return np.einsum("ade,bed->ab", dense, dense)


@GROUPS
def test_head_terms_split_the_symmetry(stack):
    heads = heads_of(1, stack)
    traces, square_norm = traces_of_products(heads), float(heads.sum().norm) ** 2
    terms = head_terms(heads)
    assert float(terms.within) == pytest.approx(np.trace(traces) / square_norm, abs=1e-12)
    off_diagonal = traces.sum() - np.trace(traces)
    assert float(terms.between) == pytest.approx(off_diagonal / square_norm, abs=1e-12)
    symmetry_of_sum = float(symmetry(heads.sum()))
    assert float(terms.within + terms.between) == pytest.approx(symmetry_of_sum, abs=1e-14)
    np.testing.assert_array_equal(head_terms(heads, heads.sum()), terms)


@GROUPS
def test_coupling_equals_the_dense_traces(stack):
    heads = heads_of(2, stack)
    norms = np.linalg.norm(heads.query @ heads.key.swapaxes(-1, -2), axis=(-2, -1)).ravel()
    expected = traces_of_products(heads) / np.outer(norms, norms)
    result = coupling(heads)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(result, result.T, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.diag(result), symmetry(heads).ravel(), rtol=0, atol=1e-12)


def within_of(query: np.ndarray, key: np.ndarray) -> float:
    """Σ_h tr(M_h M_h) for heads (G, H/G, D, R) over keys (G, D, R)."""
    dense = np.einsum("gadr,ger->gade", query, key)
    return float(np.einsum("gade,gaed->", dense, dense))


def deal(
    query: np.ndarray, key: np.ndarray, order: np.ndarray, turns: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Deal rank dimensions to groups in this order, and the queries of each to the heads."""
    groups, sharing, d, rank = query.shape
    columns = key.transpose(0, 2, 1).reshape(groups * rank, d)[order]
    # (G, R, H/G, D): each rank dimension's queries, one for each head that shares the key.
    rows = query.transpose(0, 3, 1, 2).reshape(groups * rank, sharing, d)[order]
    rows = np.take_along_axis(rows, turns[:, :, None], axis=1)
    dealt_query = rows.reshape(groups, rank, sharing, d).transpose(0, 2, 3, 1)
    return dealt_query, columns.reshape(groups, rank, d).transpose(0, 2, 1)


@pytest.mark.parametrize("sharing", [1, 2])
def test_within_random_is_the_mean_over_every_deal(sharing):
    heads = heads_of(11, (2, sharing), d=5, rank=2)
    query, key = heads.query, heads.key[:, 0]
    orders = map(np.array, itertools.permutations(range(4)))
    head_orders = list(map(np.array, itertools.permutations(range(sharing))))
    turns_of_dimensions = list(map(np.stack, itertools.product(head_orders, repeat=4)))
    deals = []
    for order in orders:
        for turns in turns_of_dimensions:
            deals.append(within_of(*deal(query, key, order, turns)))
    expected = np.mean(deals) / float(heads.sum().norm) ** 2
    assert float(head_terms(heads).within_random) == pytest.approx(expected, abs=1e-12)


# Null models


@pytest.mark.parametrize(("d", "rank"), [(1, 1), (2, 1), (5, 1), (8, 2), (8, 8)])
def test_symmetry_null_is_the_mean_over_all_signs_of_the_rows(d, rank):
    form = BilinearForm.from_factors(*np.random.default_rng(d).standard_normal((2, d, rank)))
    signs = np.array(list(itertools.product([-1.0, 1.0], repeat=d)))
    flipped = BilinearForm(signs[:, :, None] * form.query, form.key)
    assert float(symmetry_null(form)) == pytest.approx(float(symmetry(flipped).mean()), abs=1e-12)


# Degenerate cases


HALVES = np.eye(8)[:, :4], np.eye(8)[:, 4:]
ZERO_FORMS = {
    "zero query": (np.zeros((8, 2)), np.ones((8, 2))),
    "zero factors": (np.zeros((8, 2), np.float32), np.zeros((8, 2), np.float32)),
    # A ⟂ B in rank space: neither factor is zero, their product is.
    "low rank": (np.pad(np.ones((8, 1)), ((0, 0), (0, 1))), np.eye(2)[1] * np.ones((8, 1))),
    "full rank": (np.hstack(HALVES) * (np.arange(8) < 4), np.hstack(HALVES) * (np.arange(8) > 3)),
}


@pytest.mark.parametrize("factors", ZERO_FORMS.values(), ids=ZERO_FORMS)
def test_the_zero_matrix_has_no_score(factors):
    form = BilinearForm.from_factors(*factors)
    assert float(form.norm) == 0
    assert np.all(np.isnan(all_scores(form)))


@DTYPES
@pytest.mark.parametrize(("d", "rank"), [(6, 2), (7, 5), (40, 2), (40, 20)])
def test_a_form_less_itself_is_zero_and_not_its_own_rounding(dtype, d, rank):
    query, key = np.random.default_rng(2).standard_normal((2, d, rank)).astype(dtype)
    form = BilinearForm.from_factors(query, key)
    for nothing in (form.difference(form), form + -form):
        assert float(nothing.norm) == 0
        assert np.all(np.isnan(all_scores(nothing)))


@DTYPES
@pytest.mark.parametrize("rank", [3, 20])
def test_the_difference_of_close_forms_keeps_its_digits(dtype, rank):
    rng = np.random.default_rng(14)
    before = [f.astype(dtype) for f in rng.standard_normal((2, 40, rank))]
    step = [(1e-5 * rng.standard_normal(f.shape)).astype(dtype) for f in before]
    after = [f + s for f, s in zip(before, step, strict=True)]
    update = BilinearForm.from_factors(*after).difference(BilinearForm(*before))
    dense = Dense.of(*after).entries - Dense.of(*before).entries
    norm = math.sqrt((dense**2).sum())
    assert float(update.norm) == pytest.approx(norm, rel=10 * TOLERANCE[dtype])
    expected = float((dense * dense.T).sum()) / norm**2
    assert float(symmetry(update)) == pytest.approx(expected, abs=10 * TOLERANCE[dtype])


def test_a_zero_head_has_no_score_and_leaves_the_others_alone():
    heads = heads_of(5, (2, 2))
    query = heads.query.copy()
    query[0, 1] = 0
    pruned = BilinearForm.from_factors(query, heads.key)
    is_zero = np.array([[False, True], [False, False]])
    for score in (symmetry, symmetry_null, directionality):
        np.testing.assert_array_equal(np.isnan(score(pruned)), is_zero)
        np.testing.assert_allclose(score(pruned)[~is_zero], score(heads)[~is_zero], atol=1e-12)
    result = coupling(pruned)
    np.testing.assert_array_equal(np.isnan(result), is_zero.ravel() | is_zero.ravel()[:, None])
    assert np.all(np.isfinite(head_terms(pruned)))


def test_heads_that_cancel_have_terms_of_nothing():
    heads = heads_of(6, (1, 2))
    opposed = BilinearForm(np.stack([heads.query[0, 0], -heads.query[0, 0]])[None], heads.key)
    assert np.all(np.isnan(head_terms(opposed)))


@DTYPES
@pytest.mark.parametrize("weight", ["norm", "excess"])
def test_norms_without_spread_have_no_direction(dtype, weight):
    basis, _ = np.linalg.qr(np.random.default_rng(4).standard_normal((24, 24)))
    constant = {
        "orthogonal": BilinearForm(basis.astype(dtype), np.eye(24, dtype=dtype)),
        "ones": BilinearForm(np.ones((24, 1), dtype), np.ones((24, 1), dtype)),
        "one by one": BilinearForm.from_factors(np.full((1, 3), 2, dtype), np.ones((1, 3), dtype)),
    }
    for name, form in constant.items():
        assert float(directionality(form, gamma=0.5, weight=weight)) == 0.0, name


def test_one_row_against_many_columns_leaves_the_direction_to_the_columns():
    columns = np.ones((16, 1))
    columns[3] = 10
    assert float(directionality(BilinearForm(np.ones((1, 1)), columns))) == -1


def test_outliers_lie_above_the_threshold():
    norms = np.random.default_rng(1).random((3, 50))
    threshold = norms.mean(-1, keepdims=True) + 1.5 * norms.std(-1, ddof=1, keepdims=True)
    np.testing.assert_array_equal(outliers(norms, 1.5), norms > threshold)
    assert outliers(norms, 1.5).any()
    assert outliers(np.array([1.0, 3.0]), 0.5).tolist() == [False, True]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("rank", [2, 12])
@pytest.mark.parametrize("score", [symmetry, symmetry_null, directionality, coupling])
def test_weights_that_are_no_numbers_are_refused(bad, side, rank, score):
    factors = np.random.default_rng(0).standard_normal((2, 3, 12, rank))
    factors[side, 1, 5, 1] = bad
    with pytest.raises(NonFiniteWeights, match="finite"):
        score(BilinearForm.from_factors(*factors))


@given(st.data(), st.sampled_from([np.float32, np.float64]), st.sampled_from([(20, 4), (12, 16)]))
def test_scores_do_not_depend_on_how_the_factors_share_a_dimension(data, dtype, shape):
    """Each rank dimension may be huge in one factor, and tiny or absent in the other."""
    _, rank = shape
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    query, key = (rng.standard_normal(shape).astype(np.float32) for _ in "qk")
    key[:, : data.draw(st.integers(0, rank - 1))] = 0
    largest = 100 if dtype == np.float32 else 1000
    powers = data.draw(st.lists(st.integers(-largest, largest), min_size=rank, max_size=rank))
    scale = np.exp2(np.array(powers, float))
    plain = BilinearForm.from_factors(query.astype(np.float64), key.astype(np.float64))
    form = BilinearForm.from_factors((query * scale).astype(dtype), (key / scale).astype(dtype))
    assert np.isfinite(form.query).all()
    assert np.isfinite(form.key).all()
    np.testing.assert_allclose(form.norm, plain.norm, rtol=1e-5)
    for score in (symmetry, symmetry_null, directionality):
        np.testing.assert_allclose(score(form), score(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1e10, 1e19, 1e37])
@pytest.mark.parametrize("shared", [True, False])
def test_a_huge_dimension_without_a_partner_is_not_the_form(size, shared):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 2, 24, 4)).astype(np.float32)
    key = rng.standard_normal((2, 1 if shared else 2, 24, 4)).astype(np.float32)
    key[..., 1] = 0
    plain = BilinearForm(query.astype(np.float64), key.astype(np.float64))
    query[..., 1] *= np.float32(size)
    form = BilinearForm(query, key)
    np.testing.assert_allclose(form.norm, plain.norm, rtol=1e-5)
    np.testing.assert_allclose(symmetry(form), symmetry(plain), atol=1e-5)
    np.testing.assert_allclose(coupling(form), coupling(plain), atol=1e-5)
    if shared:
        for actual, expected in zip(head_terms(form), head_terms(plain), strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_coupling_takes_a_layer_of_a_model() -> None:
    model = wqk.open(wqk.demo_model("encoder"))
    expected = coupling(model[-1].heads)
    np.testing.assert_array_equal(coupling(model, layer=-1), expected)
    with pytest.raises(FormError, match=r"wqk.open\(ref\)\[0\].heads"):
        coupling(model)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_scores_keep_their_ranges_despite_rounding(dtype):
    rng = np.random.default_rng(0)
    for _ in range(40):
        query = rng.standard_normal((6, 32, 8)).astype(dtype)
        for sign in (1, -1):
            # Of A Bᵀ ± B Aᵀ, the transpose is the same matrix but for the sign.
            key = rng.standard_normal((6, 32, 8)).astype(dtype)
            form = BilinearForm(
                np.concatenate([query, key], -1), np.concatenate([key, sign * query], -1)
            )
            np.testing.assert_allclose(form.symmetry, sign, rtol=1e-5)
            assert np.all(np.abs(form.symmetry) <= 1)
            assert np.all(np.abs(coupling(form)) <= 1)
        single = np.zeros((6, 32, 1), dtype)
        single[:, 3] = query[:, 3, :1]
        assert np.all(BilinearForm(single, single).symmetry_null <= 1)


def test_the_terms_of_a_layer_are_plain_numbers():
    rng = np.random.default_rng(0)
    heads = BilinearForm(*rng.standard_normal((2, 4, 16, 2)).astype(np.float32))
    assert [type(term) for term in head_terms(heads)] == [float] * 3


@pytest.mark.parametrize(("d", "rank"), [(24, 4), (24, 24), (64, 8)])
def test_the_spread_of_symmetry_by_chance_is_that_of_drawn_factors(d: int, rank: int) -> None:
    mean, spread = wqk.forms.scores.symmetry_by_chance(d)
    drawn = np.random.default_rng(0).standard_normal((2, 4000, d, rank))
    symmetries = symmetry(BilinearForm.from_factors(*drawn))
    assert np.mean(symmetries) == pytest.approx(mean, abs=4 * spread / math.sqrt(4000))
    assert np.std(symmetries) == pytest.approx(spread, rel=0.08)
