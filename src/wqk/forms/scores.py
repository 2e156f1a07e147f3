"""Symmetry and directionality of a form, their null model, and the coupling of heads.

===========================  =========================================  =======================
paper                        here                                       range
===========================  =========================================  =======================
s, Definition 3.1            `symmetry`                                 [-1, 1]
d, Definition 3.2            `directionality`                           [-1, 1], columns negative
Proposition S1.17            `symmetry_null`                            [0, 1]
sum over heads, S20          `head_terms`, `coupling`                   unbounded, [-1, 1]
===========================  =========================================  =======================

`looks_random` recognizes weights that were never trained. Initial entries are independent and
centered, with one variance, therefore the norms of a weight's rows and columns hardly differ: the
squared norm of n normal entries has the relative variance 2/n; of uniform or truncated entries,
less. Training soon makes some inputs and outputs many times larger than others, before it changes
any score.

Axes: ``...`` a stack of forms, H query heads, G key heads, D width, R rank, in a head its width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import numpy as np

from wqk._typing import Array, Float, Scores
from wqk.errors import FormError, called_as
from wqk.forms.arrays import array_namespace, stacked_as
from wqk.forms.form import BilinearForm
from wqk.forms.kernels import directionalities, quotient, root, times_power

Weight = Literal["norm", "excess"]
WEIGHTS: tuple[Weight, ...] = ("norm", "excess")


@called_as("wqk.symmetry(form), or wqk.symmetry(query, key)")
def symmetry(form: BilinearForm | Any, key: Any = None) -> Scores:
    """Symmetry s = tr(M M) / ‖M‖²_F = (‖M_s‖² − ‖M_n‖²) / ‖M‖²_F, shape (...).

    Definition 3.1: 1 for a symmetric, −1 for a skew-symmetric matrix, 1/d on average for a random
    one (Proposition S1.17; the further factor 2 in Equation 15 is a misprint, which no published
    number has). NaN for the zero matrix.

    Parameters
    ----------
    form
        One form or a stack, or a plain square matrix (..., d, d) as an array or nested lists; or,
        with ``key``, the query factor W_q, (..., d, rank).
    key
        The key factor W_k, (..., d, rank): ``symmetry(w_q, w_k)``.

    Raises
    ------
    FormError
        The form is not square.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> a = np.array([[1.0], [0.0]])
    >>> b = np.array([[0.0], [1.0]])
    >>> [float(symmetry(f)) for f in (BilinearForm(a, a), BilinearForm(a, b))]
    [1.0, 0.0]
    >>> float(symmetry([[0, 1], [-1, 0]])), float(symmetry([[1], [0]], [[1], [0]]))
    (-1.0, 1.0)
    """
    return _as_form(form, key).symmetry


def symmetry_null(form: BilinearForm | Any, key: Any = None) -> Scores:
    """Mean symmetry under random signs of M's rows: Σ_i M_ii² / ‖M‖², shape (...).

    Random signs keep the norms of the rows. Therefore this baseline includes the symmetry due to a
    few outlying dimensions; the mean for independent entries, 1/d, does not.

    Parameters
    ----------
    form, key
        As for `symmetry`.

    Raises
    ------
    FormError
        The form is not square.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> float(symmetry_null(BilinearForm(np.ones((4, 1)), np.ones((4, 1)))))
    0.25
    """
    return _as_form(form, key).symmetry_null


@called_as("wqk.directionality(form), or wqk.directionality(query, key)")
def directionality(
    form: BilinearForm | Any, key: Any = None, *, gamma: float = 2.0, weight: Weight = "norm"
) -> Scores:
    """Directionality d = (R − C) / (R + C), shape (...): negative if a few columns dominate.

    R (C) is the sum over the rows (columns) whose L2 norm exceeds mean + gamma · std of the row
    (column) norms, std with n − 1. 0 if neither side has such outliers, NaN for the zero matrix.

    Parameters
    ----------
    form, key
        As for `symmetry`; the form need not be square.
    gamma
        Threshold of an outlier, in standard deviations above the mean.
    weight
        ``"norm"`` sums the outliers' norms: Definition 3.2 as printed. ``"excess"`` sums norm −
        threshold, which is continuous at the threshold: all published tables and figures.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> columns = np.ones((16, 1)); columns[3] = 10.0
    >>> float(directionality(BilinearForm(np.ones((16, 1)), columns)))
    -1.0
    """
    if isinstance(key, int | float):
        raise FormError(f"write directionality(form, gamma={key}): the second argument is a factor")
    if weight not in WEIGHTS:
        raise FormError(f"weight must be 'norm' or 'excess', got {weight!r}")
    form = _as_form(form, key)
    scores = directionalities(form.moments, gamma)
    if weight == "norm":
        return form.number(scores.directionality)
    return form.number(scores.directionality_excess)


class HeadTerms(NamedTuple):
    """The symmetry of a layer, split into a term within heads and a term between heads.

    The sum of the two terms is the layer's symmetry, but the terms are not shares: if heads cancel
    in the sum, both terms are large. ``within_random``, for comparison, is the expected term within
    heads if the same rank dimensions were assigned to heads at random. The terms are of type
    ``float`` for NumPy factors, and arrays without axes otherwise.
    """

    within: Scores
    between: Scores
    within_random: Scores


def head_terms(heads: BilinearForm, layer: BilinearForm | None = None) -> HeadTerms:
    """Split the symmetry of Σ_h M_h into Σ_h tr(M_h M_h) and Σ_{a≠b} tr(M_a M_b), over ‖M‖².

    The random assignment divides the G·R key dimensions into G groups of R, and each dimension's
    H/G queries among the heads of its group. With a_k the summed queries of dimension k,
    C_kl = b_k · a_l and r = G R, the expected term is the sum of squares of all H R single terms
    plus (R − 1)/(r − 1) · G/H · Σ_{k≠l} C_kl C_lk.

    Parameters
    ----------
    heads
        The heads of one layer: ``block.heads``, or a stack (H,) or (G, H/G). In the latter, query
        (G, H/G, D, R) and key (G, 1, D, R), or the other way round.
    layer
        Their sum, if already computed; by default `BilinearForm.sum`.

    Raises
    ------
    FormError
        The heads are not square, or stacked in another way.

    Examples
    --------
    Two heads, each the transpose of the other: the layer is symmetric, its heads are not.

    >>> query, key = np.random.default_rng(0).standard_normal((2, 256, 8))
    >>> heads = BilinearForm.from_factors(np.stack([query, key]), np.stack([key, query]))
    >>> terms = head_terms(heads)
    >>> round(terms.within, 2), round(terms.between, 2)
    (0.0, 1.0)
    """
    heads = _as_heads(heads)
    heads.require_square("head_terms")
    if len(heads.stack) == 1:
        heads = BilinearForm.from_factors(heads.query[:, None, ...], heads.key[:, None, ...])
    query_stack, key_stack = tuple(heads.query.shape[:-2]), tuple(heads.key.shape[:-2])
    if len(heads.stack) != 2 or (heads.stack[0], 1) not in (query_stack, key_stack):
        raise FormError(
            "heads must be stacked as (H,), or as (G, H/G) over a factor stacked as (G, 1), "
            f"got {query_stack} and {key_stack}"
        )
    xp = array_namespace(heads.query, heads.key)
    layer = heads.sum() if layer is None else layer
    key_heads, queries_per_key = heads.stack
    # Heads and layer have different exponents; the terms need a common exponent.
    power = heads.moments.exponent - layer.moments.exponent
    within = layer.moments.share(xp.sum(times_power(heads.moments.trace_of_square, 2 * power)))
    dots = xp.linalg.vecdot(heads.moments.query, heads.moments.key, axis=-2)
    single_terms = times_power(dots, power[..., None])  # (G, H/G, R)
    diagonal = xp.sum(single_terms, axis=1)  # C_kk, (G, R)
    pair_terms = layer.moments.trace_of_square - xp.sum(diagonal**2)  # Σ_{k≠l} C_kl C_lk
    dimensions = key_heads * heads.rank  # r
    # Probability that two dimensions belong to one key head, and the queries to one head.
    probability = (heads.rank - 1) / max(1, dimensions - 1) / queries_per_key
    between = layer.moments.share(layer.moments.trace_of_square) - within
    within_random = layer.moments.share(xp.sum(single_terms**2) + probability * pair_terms)
    return HeadTerms(
        within=layer.number(within),
        between=layer.number(between),
        within_random=layer.number(within_random),
    )


def coupling(heads: Any, layer: int | None = None) -> Float[Array, "heads heads"]:
    """T[a, b] = tr(M_a M_b) / (‖M_a‖ ‖M_b‖), shape (H, H): 1 if head b is the transpose of head a.

    The diagonal holds the heads' own symmetries. T is symmetric. Zero heads give NaN.

    Parameters
    ----------
    heads
        A stack of square forms of any stack shape; H is its size, in row-major order. Or a block,
        ``model[0]``; or a model with ``layer``.
    layer
        The layer of a model, negative from the end; None for forms and blocks.

    Raises
    ------
    FormError
        ``heads`` has no heads, or its forms are not square.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> a, b = np.array([[1.0], [0.0]]), np.array([[0.0], [1.0]])
    >>> coupling(BilinearForm(np.stack([a, b]), np.stack([b, a])))
    array([[0., 1.],
           [1., 0.]])
    """
    if layer is not None and hasattr(heads, "block"):
        heads = heads[layer]
    heads = _as_heads(heads)
    heads.require_square("coupling")
    xp = array_namespace(heads.query, heads.key)
    moments, stack = heads.moments, heads.stack
    query, key = moments.query, moments.key
    # Query heads that share a key head form a group: (G, H/G) heads. Without sharing, G = H.
    has_shared_keys = len(stack) > 0 and key.ndim == len(stack) + 2 and key.shape[-3] == 1
    heads_per_group = stack[-1] if has_shared_keys else 1
    groups = math.prod(stack) // heads_per_group
    query = stacked_as(query, stack)
    query = xp.reshape(query, (groups, heads_per_group, *query.shape[-2:]))
    if not has_shared_keys:
        key = stacked_as(key, stack)
    key = xp.reshape(key, (groups, *key.shape[-2:]))
    norms = root(xp.reshape(xp.broadcast_to(moments.square_norm, stack), (-1,)), xp)
    traces = _traces_of_products(query, xp.matrix_transpose(key), xp)
    cosines = quotient(traces, norms[:, None] * norms[None, :], xp)
    return xp.clip(cosines, -1.0, 1.0)  # rounding may exceed the bounds


def _traces_of_products(
    query: Float[Array, "groups heads_per_group d r"],
    key_transposed: Float[Array, "groups r d"],
    xp: Any,
) -> Float[Array, "heads heads"]:
    """Return tr(M_a M_b) = Σ_ij (B_bᵀ A_a)_ji (B_aᵀ A_b)_ij of all pairs of heads, (H, H).

    The matrix is symmetric: for heads a of group g, only heads b of groups from g on are computed.

    Parameters
    ----------
    query
        The factors A, (G, H/G, D, R): of G groups of heads that share a key.
    key_transposed
        The factors B of the groups, transposed, (G, R, D).
    xp
        The namespace of the arrays.
    """
    groups, heads_per_group = query.shape[:2]
    # blocks[g][h]: the pairs of a head of group g with a head of group h, (H/G, H/G).
    blocks: list[list[Array]] = []
    for g in range(groups):
        key_of_a, queries_of_a = key_transposed[g, ...], query[g, ...]
        keys_of_b, queries_of_b = key_transposed[g:, None, ...], query[g:, ...]
        forward = xp.matmul(key_of_a, queries_of_b)  # B_aᵀ A_b, (G − g, H/G, R, R)
        backward = xp.matmul(keys_of_b, queries_of_a)  # B_bᵀ A_a, (G − g, H/G, R, R)
        flat = (groups - g, heads_per_group, -1)
        flat_forward = xp.reshape(forward, flat)
        flat_backward = xp.reshape(xp.matrix_transpose(backward), flat)
        traces = xp.matmul(flat_backward, xp.matrix_transpose(flat_forward))
        earlier_groups = [xp.matrix_transpose(row[g]) for row in blocks]
        later_groups = [traces[h, ...] for h in range(groups - g)]
        blocks.append([*earlier_groups, *later_groups])
    rows = [xp.concat(row, axis=1) for row in blocks]
    return xp.concat(rows, axis=0)


def _as_form(form: BilinearForm | Any, key: Any) -> BilinearForm:
    """Return a form, or the form of a block, of a matrix, or of two factors."""
    if key is not None:
        return BilinearForm(form, key)
    form = getattr(form, "form", form)  # a block has its form as an attribute
    return form if isinstance(form, BilinearForm) else BilinearForm.from_matrix(form)


def _as_heads(heads: Any) -> BilinearForm:
    """Return the heads of a stack or a block, grouped by shared factors.

    Raises
    ------
    FormError
        The argument has no heads.
    """
    groups = getattr(heads, "groups", None)
    if not isinstance(groups, BilinearForm):
        raise FormError(
            "heads: expected the heads of one layer, such as wqk.open(ref)[0].heads, or a stack "
            f"of forms, got {type(heads).__name__}"
        )
    return groups


# The corrected p below which a pair of heads is beyond chance.
SIGNIFICANT = 0.01


def holm(p: np.ndarray, tests: int | None = None) -> np.ndarray:
    """Correct p-values for the number of tests, by the method of Holm (1979).

    The correction is valid for any dependence between tests, and costs some power.

    Parameters
    ----------
    p
        P-value of each test, (tests,). NaN marks a missing test and stays NaN.
    tests
        Number of tests, if it differs from the number of values.

    Examples
    --------
    >>> holm(np.array([0.04, 0.01, np.nan, 0.03])).tolist()
    [0.06, 0.03, nan, 0.06]
    """
    if tests is None:
        tests = int(np.count_nonzero(~np.isnan(p)))
    order = np.argsort(p, kind="stable")  # NaN last
    remaining_tests = tests - np.arange(len(p))
    ascending = np.maximum.accumulate(p[order] * remaining_tests)
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(ascending, 1)
    return corrected


# Standard errors by which a statistic may differ from its value for independent entries.
STANDARD_ERRORS = 5.0

# Rows at a time, so that the entries fit a core's cache.
ROWS_AT_ONCE = 64

# Forms drawn for a range: another one falls between the least and the largest with probability
# (n − 1) / (n + 1), which is 95 %.
DRAWS = 39
# D · R² up to which forms are drawn at their own size, in a second or two.
DRAWN = 2e8


@cache
def untrained_range(width: int, rank: int, gamma: float = 2.0) -> dict[str, tuple[float, float]]:
    """Return the 95 % ranges of the scores of untrained weights, from randomly drawn forms.

    Factors (D, R) have independent normal entries. Rotations of the rank dimensions do not change
    their distribution, therefore the ranges hold at every relative distance. Forms above `DRAWN`
    are drawn at a smaller width and rank of the same ratio; their ranges are wider.

    Parameters
    ----------
    width, rank
        D and R of the form.
    gamma
        As for `wqk.directionality`.

    Returns
    -------
    dict
        The ends of the range of ``symmetry`` and of ``directionality_excess``.

    Examples
    --------
    >>> low, high = untrained_range(64, 16)["symmetry"]
    >>> low < 1 / 64 < high, high < 1 / 64 + 4 * 2**0.5 / 64  # 1/D ± √2/D
    (True, True)
    """
    shrink = min(1.0, (DRAWN / (width * rank**2)) ** (1 / 3))
    drawn_width = max(2, round(width * shrink))
    drawn_rank = max(1, round(rank * shrink))
    rng = np.random.default_rng(0)
    symmetries = []
    directionalities = []
    for _ in range(DRAWS):
        query, key = rng.standard_normal((2, drawn_width, drawn_rank))
        form = BilinearForm.from_factors(query, key)
        symmetries.append(float(symmetry(form)))
        directionalities.append(float(directionality(form, gamma=gamma, weight="excess")))
    return {
        "symmetry": (min(symmetries), max(symmetries)),
        "directionality_excess": (min(directionalities), max(directionalities)),
    }


def symmetry_by_chance(d: int) -> tuple[float, float]:
    """Return mean and standard deviation of the symmetry of a form with independent factors.

    They are 1/d and about √2/d at any rank, if the entries have mean zero (paper, Proposition
    S1.17, with its constant corrected).

    Examples
    --------
    >>> mean, spread = symmetry_by_chance(768)
    >>> f"{mean:.4f} ± {spread:.4f}"
    '0.0013 ± 0.0018'
    """
    return 1 / d, math.sqrt(2) / d


def looks_random(weights: Sequence[Float[Array, "_ _ _"]], symmetry: float, d: int) -> bool:
    """Return whether weights and symmetry are as expected of independent random entries.

    The symmetry is compared with `symmetry_by_chance`.

    Parameters
    ----------
    weights
        Query and key weights, each (H, R, D), or the matrices around a latent whose products are
        the query and key weights.
    symmetry
        Symmetry of the form.
    d
        Width of the form.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> drawn = [*rng.standard_normal((2, 4, 16, 64))]
    >>> trained = [weight * np.linspace(0.5, 1.5, 64) for weight in drawn]
    >>> looks_random(drawn, 0.02, 64), looks_random(trained, 0.02, 64), looks_random(drawn, 0.9, 64)
    (True, False, False)
    """
    mean, spread = symmetry_by_chance(d)
    if abs(symmetry - mean) > STANDARD_ERRORS * spread:
        return False
    return all(_is_even(weight.reshape(-1, weight.shape[-1])) for weight in weights)


def _is_even(weight: Float[Array, "outputs inputs"]) -> bool:
    """Return whether the norms of rows and columns vary only as much as by chance."""
    row_squares, column_squares = _square_sums(weight)
    if not 1e-20 < row_squares.max(initial=0) < 1e20:  # squares may have over- or underflowed
        largest = np.abs(weight).max(initial=0)
        if largest == 0:
            return False
        row_squares, column_squares = _square_sums(weight / largest)
    outputs, inputs = weight.shape
    return _vary_by_chance(row_squares, inputs) and _vary_by_chance(column_squares, outputs)


def _vary_by_chance(squares: Float[np.ndarray, " n"], entries: int) -> bool:
    """Return whether n squared norms vary at most as much as with normal entries.

    The squared norm of normal ``entries`` has the relative variance 2 / ``entries``.
    """
    if len(squares) < 2 or not squares.any():
        return False
    relative_variance = squares.var() / squares.mean() ** 2
    # A variance estimated from n norms has the relative standard error √(2/n).
    allowed = 1 + STANDARD_ERRORS * math.sqrt(2 / len(squares))
    return bool(relative_variance <= allowed * 2 / entries)


def _square_sums(weight: Float[Array, "outputs inputs"]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of squares of the rows, (outputs,), and of the columns, (inputs,)."""
    outputs, inputs = weight.shape
    row_squares, column_squares = np.zeros(outputs), np.zeros(inputs)
    with np.errstate(over="ignore"):
        for start in range(0, outputs, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            part = weight[rows]
            row_squares[rows] = np.vecdot(part, part)
            column_squares += np.einsum("oi,oi->i", part, part)
    return row_squares, column_squares
