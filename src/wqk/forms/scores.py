"""Symmetry and directionality of a form, their null model, and the coupling of heads.

===========================  =========================================  =======================
paper                        here                                       range
===========================  =========================================  =======================
s, Definition 3.1            `symmetry`                                 [-1, 1]
d, Definition 3.2            `directionality`                           [-1, 1], columns negative
Proposition S1.17            `symmetry_null`                            [0, 1]
sum over heads, S20          `head_terms`, `coupling`                   unbounded, [-1, 1]
===========================  =========================================  =======================

`looks_random` recognizes weights that were never trained. Initial entries are independent, centered
and of one variance, therefore the norms of a weight's rows and columns hardly differ: the squared
norm of n normal entries has the relative variance 2/n, and that of uniform or truncated entries
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
from wqk.errors import FormError
from wqk.forms.form import BilinearForm
from wqk.forms.kernels import array_namespace, directionalities, quotient, root, times_power

Weight = Literal["norm", "excess"]
WEIGHTS: tuple[Weight, ...] = ("norm", "excess")


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

    Random signs keep the norms of the rows. Symmetry that only comes from a few outlying dimensions
    is therefore part of this baseline, but not of 1/d, the mean for independent entries.

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
    by_weight = directionalities(form.moments, gamma)
    return form.number(by_weight[WEIGHTS.index(weight)])


class HeadTerms(NamedTuple):
    """A layer's symmetry, split into a term within its heads and a term between them.

    The two add up to the layer's symmetry but are not shares of it: if heads cancel in the sum,
    both are large. ``within_random``, for comparison, is the expected term within heads if the same
    rank dimensions were assigned to heads at random.
    """

    within: Float[Array, ""]
    between: Float[Array, ""]
    within_random: Float[Array, ""]


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
    """
    heads = _as_heads(heads)
    heads.require_square("head_terms")
    if len(heads.stack) == 1:
        heads = BilinearForm.from_factors(heads.query[:, None, ...], heads.key[:, None, ...])
    stacks = [tuple(factor.shape[:-2]) for factor in (heads.query, heads.key)]
    if len(heads.stack) != 2 or (heads.stack[0], 1) not in stacks:
        raise FormError(
            "heads must be stacked as (H,), or as (G, H/G) over a factor stacked as (G, 1), "
            f"got {stacks[0]} and {stacks[1]}"
        )
    xp = array_namespace(heads.query, heads.key)
    layer = heads.sum() if layer is None else layer
    key_heads, queries_per_key = heads.stack
    # Heads and layer have exponents of their own; the terms need a common one.
    power = heads.moments.exponent - layer.moments.exponent
    within = layer.moments.share(xp.sum(times_power(heads.moments.trace_of_square, 2 * power)))
    dots = xp.linalg.vecdot(heads.moments.query, heads.moments.key, axis=-2)
    singles = times_power(dots, power[..., None])
    diagonal = xp.sum(singles, axis=1)
    pairs = layer.moments.trace_of_square - xp.sum(diagonal**2)
    share = (heads.rank - 1) / max(1, key_heads * heads.rank - 1) / queries_per_key
    return HeadTerms(
        within=within,
        between=layer.moments.share(layer.moments.trace_of_square) - within,
        within_random=layer.moments.share(xp.sum(singles**2) + share * pairs),
    )


def coupling(heads: Any, layer: int | None = None) -> Float[Array, "heads heads"]:
    """T[a, b] = tr(M_a M_b) / (‖M_a‖ ‖M_b‖), shape (H, H): 1 where head b is head a's transpose.

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
    # Query heads that share a key head are taken together.
    shared = len(stack) > 0 and key.ndim == len(stack) + 2 and key.shape[-3] == 1
    sharing = stack[-1] if shared else 1
    count = math.prod(stack) // sharing
    query = xp.broadcast_to(query, (*stack, *query.shape[-2:]))
    query = xp.reshape(query, (count, sharing, *query.shape[-2:]))
    if not shared:
        key = xp.broadcast_to(key, (*stack, *key.shape[-2:]))
    key = xp.matrix_transpose(xp.reshape(key, (count, *key.shape[-2:])))
    norms = root(xp.reshape(xp.broadcast_to(moments.square_norm, stack), (-1,)), xp)
    return quotient(_traces_of_products(query, key, xp), norms[:, None] * norms[None, :], xp)


def _traces_of_products(query: Array, key: Array, xp: Any) -> Float[Array, "heads heads"]:
    """Return tr(M_a M_b) of all pairs of heads, a symmetric matrix.

    Parameters
    ----------
    query
        The factors A, (G, H/G, D, R): of G groups of heads that share a key.
    key
        The factors B of the groups, transposed, (G, R, D).
    xp
        The namespace of the arrays.
    """
    count, sharing = query.shape[:2]
    # tr(M_a M_b) = Σ_ij (B_aᵀ A_b)_ij (B_bᵀ A_a)_ji, for a in group g and b from it on.
    blocks: list[list[Array]] = []
    for g in range(count):
        forward = xp.matmul(key[g, ...], query[g:, ...])
        backward = xp.matmul(key[g:, None, ...], query[g, ...])
        flat = (count - g, sharing, -1)
        left = xp.reshape(xp.matrix_transpose(backward), flat)
        traces = xp.matmul(left, xp.matrix_transpose(xp.reshape(forward, flat)))
        before = [xp.matrix_transpose(row[g]) for row in blocks]
        blocks.append([*before, *(traces[h, ...] for h in range(count - g))])
    rows = [xp.concat(row, axis=1) for row in blocks]
    return xp.concat(rows, axis=0)


def _as_form(form: BilinearForm | Any, key: Any) -> BilinearForm:
    """Return the form of a form, a block, a matrix or two factors."""
    if key is not None:
        return BilinearForm(form, key)
    form = getattr(form, "form", form)  # a block has its form as an attribute
    return form if isinstance(form, BilinearForm) else BilinearForm.from_matrix(form)


def _as_heads(heads: Any) -> BilinearForm:
    """Return the heads of a stack or a block, grouped by shared factors."""
    groups = getattr(heads, "groups", None)
    if not isinstance(groups, BilinearForm):
        raise FormError(
            "expected the heads of one layer, such as wqk.open(ref)[0].heads, or a stack of forms, "
            f"got {type(heads).__name__}"
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
    order = np.argsort(p, kind="stable")  # NaN last
    count = int(np.count_nonzero(~np.isnan(p))) if tests is None else tests
    remaining = count - np.arange(len(p))
    corrected = np.empty(len(p))
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * remaining), 1)
    return corrected


# Standard errors by which a statistic may differ from its value for independent entries.
STANDARD_ERRORS = 5.0

# Rows taken at a time, so that their entries stay in a core's cache.
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
    shape = max(2, round(width * shrink)), max(1, round(rank * shrink))
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(DRAWS):
        form = BilinearForm.from_factors(*rng.standard_normal((2, *shape)))
        scores.append((symmetry(form), directionality(form, gamma=gamma, weight="excess")))
    symmetries, directionalities = np.array(scores).T
    return {
        "symmetry": (float(symmetries.min()), float(symmetries.max())),
        "directionality_excess": (float(directionalities.min()), float(directionalities.max())),
    }


def looks_random(weights: Sequence[Float[Array, "_ _ _"]], symmetry: float, d: int) -> bool:
    """Return whether weights and symmetry are as expected of independent random entries.

    The weights are the query's and the key's, each (H, R, D), or the matrices around a latent of
    which they are the products. The symmetry of a form of width ``d``
    with random factors is 1/d ± √2/d (paper, Proposition S1.17, with its constant corrected).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> drawn = [*rng.standard_normal((2, 4, 16, 64))]
    >>> trained = [weight * np.linspace(0.5, 1.5, 64) for weight in drawn]
    >>> looks_random(drawn, 0.02, 64), looks_random(trained, 0.02, 64), looks_random(drawn, 0.9, 64)
    (True, False, False)
    """
    if abs(symmetry - 1 / d) > STANDARD_ERRORS * math.sqrt(2) / d:
        return False
    return all(_is_even(weight.reshape(-1, weight.shape[-1])) for weight in weights)


def _is_even(weight: Float[Array, "outputs inputs"]) -> bool:
    """Return whether the norms of rows and columns vary no more than by chance."""
    rows, columns = _square_sums(weight)
    if not 1e-20 < rows.max(initial=0) < 1e20:  # squares may have over- or underflowed
        largest = np.abs(weight).max(initial=0)
        if largest == 0:
            return False
        rows, columns = _square_sums(weight / largest)
    for norms, count in zip((rows, columns), weight.shape[::-1], strict=True):
        if len(norms) < 2 or not norms.any():
            return False
        spread = norms.var() / norms.mean() ** 2
        # A variance estimated from n norms has the relative standard error √(2/n).
        allowed = 1 + STANDARD_ERRORS * math.sqrt(2 / len(norms))
        if spread > allowed * 2 / count:
            return False
    return True


def _square_sums(weight: Float[Array, "outputs inputs"]) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of squares of the rows and of the columns."""
    rows, columns = (np.zeros(count) for count in weight.shape)
    with np.errstate(over="ignore"):
        for start in range(0, len(weight), ROWS_AT_ONCE):
            part = weight[start : start + ROWS_AT_ONCE]
            rows[start : start + ROWS_AT_ONCE] = np.vecdot(part, part)
            columns += np.einsum("oi,oi->i", part, part)
    return rows, columns
