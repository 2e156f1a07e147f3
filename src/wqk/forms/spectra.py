"""Measures of a form's singular values and eigenvalues, and their values by chance.

With A = Q_A S_A and B = Q_B S_B, the columns of each Q orthonormal, the core S_A S_Bᵀ, at most R ×
R, has M's singular values; BᵀA has M's nonzero eigenvalues. For float32 factors, the root S is
computed from the Gram matrix AᵀA = SᵀS in float64: small singular values are more accurate than
from a QR decomposition in float32, in a tenth of the time. Float64 factors take the QR
decomposition.

The largest singular value alone is cheaper: MᵀM and P = AᵀA BᵀB have the same nonzero eigenvalues,
λ₁ = σ₁². For many small forms, P is squared repeatedly, in products of whole matrices; for a large
form, vectors are iterated.

Axes: ``...`` a stack of forms, D width, R rank, K = min(R, D) rows of a root, J steps done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import device

from wqk._typing import Array, Float
from wqk.forms import BilinearForm
from wqk.forms.arrays import array_namespace, bits
from wqk.forms.kernels import gram, square_sum, times_power

# Allowed distance between the bounds of log λ₁, and allowed residual relative to λ₁, by width of
# the floating-point type. The relative error of σ₁ is at most a quarter of the distance, or half
# of the residual.
ENCLOSURE = {32: 4e-7, 64: 2e-12}
RESIDUAL = {32: 1e-6, 64: 1e-11}

# With k equal eigenvalues, the bounds are at last log(k) / 2 ** MOST_SQUARINGS apart.
MOST_SQUARINGS = 48

MOST_ITERATIONS = 160


def by_squaring(
    query_gram: Float[Array, "... r r"], key_gram: Float[Array, "... r r"]
) -> Float[Array, "*stack"]:
    """Return σ₁ of every form of a stack, in float64, by repeated squaring of P.

    No eigenvalue of P is negative, hence tr(P²ⁿ) / tr(Pⁿ) ≤ λ₁ⁿ and λ₁²ⁿ ≤ tr(P²ⁿ): both bounds
    converge to λ₁. Rounding errors grow by ‖A‖ ‖B‖ / σ₁, as in the norm from the same matrices.

    Examples
    --------
    >>> import numpy as np
    >>> by_squaring(np.diag([4.0, 1.0]), np.diag([9.0, 1.0])).round(9)
    np.float64(6.0)
    """
    xp = array_namespace(query_gram, key_gram)
    allowed = ENCLOSURE[bits(query_gram, xp)]
    power = xp.matmul(query_gram, key_gram)  # a multiple of Pⁿ, for n = 1, 2, 4, …
    trace = _trace(power, xp)
    log_trace = xp.log(trace)  # log tr(Pⁿ)
    for squarings in range(MOST_SQUARINGS):
        n = 2.0**squarings
        power = power / xp.astype(trace, power.dtype)[..., None, None]
        power = xp.matmul(power, power)
        trace = _trace(power, xp)  # tr(P²ⁿ) / tr(Pⁿ)²
        lower_bound = (log_trace + xp.log(trace)) / n  # of log λ₁, from tr(P²ⁿ) / tr(Pⁿ)
        log_trace = 2 * log_trace + xp.log(trace)
        upper_bound = log_trace / (2 * n)
        if bool(xp.all(upper_bound - lower_bound <= allowed)):
            break
    return xp.exp((lower_bound + upper_bound) / 4)  # σ₁ = √λ₁, at the middle of the bounds


def by_iteration(query_side: Sequence[Array], key_side: Sequence[Array]) -> float | None:
    """Return σ₁ of one form by Lanczos iteration; None if the iteration did not converge.

    P is self-adjoint in the inner product of BᵀB. Every new vector is made orthogonal to all
    previous vectors, twice, because float32 would otherwise lose the basis. λ₁ is accepted when ‖P
    x − λ₁ x‖ / λ₁ is small: some eigenvalue is at most that far away. AᵀA is the product of the
    query side's matrices, and BᵀB the product of the key side's matrices; the matrices are applied
    to vectors (R,) in turn. The product of no matrices is the identity.

    Examples
    --------
    >>> import numpy as np
    >>> square = np.diag(np.arange(1.0, 9.0))
    >>> round(by_iteration([square], [square]), 9)
    8.0
    """

    def apply(side: Sequence[Array], vector: Array) -> Array:
        return reduce(lambda v, matrix: matrix @ v, side, vector)

    example = query_side[0]
    xp, rank = array_namespace(example), example.shape[-1]
    like_example: dict[str, Any] = {"dtype": example.dtype, "device": device(example)}
    allowed = RESIDUAL[bits(example, xp)]
    start = np.random.default_rng(0).standard_normal(rank)
    new = xp.asarray(start, **like_example)
    image = apply(key_side, new)
    # An orthonormal basis x in that inner product, and w = BᵀB x; in it, P is tridiagonal.
    vectors = xp.zeros((0, rank), **like_example)
    images = xp.zeros((0, rank), **like_example)
    diagonal: list[float] = []
    lengths = [_length(new, image)]
    while len(diagonal) < min(MOST_ITERATIONS, rank) and lengths[-1] > 0:
        vectors = xp.concat([vectors, new[None, :] / lengths[-1]])
        images = xp.concat([images, image[None, :] / lengths[-1]])
        new = apply(query_side, images[-1, :])
        diagonal.append(float(new @ images[-1, :]))
        for _ in range(2):
            new = new - (images @ new) @ vectors
        image = apply(key_side, new)
        lengths.append(_length(new, image))
        steps = len(diagonal)
        if steps % max(2, steps // 8) == 0:
            tridiagonal = np.diag(diagonal) + np.diag(lengths[1:-1], -1)
            values, ritz = np.linalg.eigh(tridiagonal)  # reads the lower half
            if lengths[-1] * abs(ritz[-1, -1]) <= allowed * values[-1]:
                return math.sqrt(values[-1])
    return None


def _trace(square: Array, xp: Any) -> Float[Array, "*stack"]:
    """Return the trace in float64; 1 for the zero matrix."""
    trace = xp.linalg.trace(square, dtype=xp.float64)
    return xp.where(trace > 0, trace, xp.ones_like(trace))


def _length(vector: Array, image: Array) -> float:
    """Return the length of a vector x (R,) in the inner product of BᵀB, from the image BᵀB x."""
    return math.sqrt(max(0.0, float(vector @ image)))


# Up to this rank σ₁ is computed by squaring a matrix, which is faster for many small forms.
LARGEST_SQUARED = 256

# Largest rank of randomly drawn forms: at equal R/D, measures scale with the rank.
LARGEST_DRAW = 256


class Spectrum(NamedTuple):
    """Measures of a form's spectrum, each (...).

    Attributes
    ----------
    spectral_norm
        σ₁, the largest score between vectors of length 1.
    stable_rank
        ‖M‖²_F / σ₁², between 1 and the rank: directions that carry the norm. NaN for the zero
        matrix.
    effective_rank
        exp(−Σ p log p) with p = σ / Σσ, between 1 and the rank: directions in use (Roy & Vetterli,
        2007). NaN for the zero matrix.
    eigenvalue_positivity
        Σ Re λ / Σ |λ|: 1 if all eigenvalues are positive (vectors attend to similar vectors), −1 if
        all are negative (Elhage et al., 2021). NaN if all eigenvalues are 0, None if the form is
        not square.
    """

    spectral_norm: Float[Array, "*stack"]
    stable_rank: Float[Array, "*stack"]
    effective_rank: Float[Array, "*stack"]
    eigenvalue_positivity: Float[Array, "*stack"] | None


class NullSpectrum(NamedTuple):
    """Measures of forms whose factors have independent entries of one variance.

    Attributes
    ----------
    spectral_norm
        Mean of σ₁ / ‖M‖_F.
    stable_rank, effective_rank
        The mean of each measure.
    eigenvalue_positivity_spread
        Standard deviation of the eigenvalue positivity about 0: the root mean square of Σ λ divided
        by the root mean square of Σ |λ|.
    """

    spectral_norm: float
    stable_rank: float
    effective_rank: float
    eigenvalue_positivity_spread: float | None


def spectrum(form: BilinearForm) -> Spectrum:
    """Return all measures of a form, or of a stack, in float64.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> spectrum(BilinearForm(np.eye(3, 2), np.eye(3, 2))).effective_rank.round(6)
    np.float64(2.0)
    """
    moments = form.moments
    xp = array_namespace(moments.query, moments.key)
    factors = _wide(form, xp)
    roots = _roots(form, factors, xp)
    values = _singular_values(form, roots, xp)
    is_zero = moments.square_norm == 0
    values = xp.where(is_zero[..., None], xp.asarray(math.nan, dtype=values.dtype), values)
    largest = values[..., 0]
    shares = values / xp.sum(values, axis=-1, keepdims=True)
    logarithms = xp.log(xp.where(shares > 0, shares, xp.ones_like(shares)))
    return Spectrum(
        spectral_norm=_restored(largest, form, xp),
        stable_rank=xp.sum(values * values, axis=-1) / (largest * largest),
        effective_rank=xp.exp(-xp.sum(shares * logarithms, axis=-1)),
        eigenvalue_positivity=_positivity(factors, roots, xp) if form.is_square else None,
    )


def spectral_norm(form: BilinearForm) -> Float[Array, "*stack"]:
    """Return σ₁ alone, (...), in float64, in a fraction of the time.

    The result is as accurate as the form's norm (`wqk.forms.spectra`).

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> spectral_norm(BilinearForm(np.array([[3.0], [0.0]]), np.array([[0.0], [2.0]]))).round(6)
    np.float64(6.0)
    """
    moments = form.moments
    xp = array_namespace(moments.query, moments.key)
    if form.rank > LARGEST_SQUARED:
        values = _by_iteration(form, xp)
    elif moments.grams is not None:
        values = by_squaring(*moments.grams)
    else:
        values = None
    if values is None:
        values = _singular_values(form, _roots(form, _wide(form, xp), xp), xp)[..., 0]
    return _restored(values, form, xp)


@lru_cache(maxsize=256)
def null_spectrum(d_query: int, d_key: int, rank: int) -> NullSpectrum:
    """Return means over random factors (d_query, rank) and (d_key, rank), with a fixed seed.

    Instead of the factors, their roots are drawn (Bartlett, 1933), so that the time does not grow
    with the width.

    Examples
    --------
    >>> by_chance = null_spectrum(4096, 4096, 128)
    >>> round(by_chance.effective_rank), round(by_chance.eigenvalue_positivity_spread, 3)
    (127, 0.012)
    """
    roots = _random_roots_of_forms(d_query, d_key, rank)
    values = _by_square(roots.query @ roots.key.swapaxes(-1, -2))
    square_norms = (values**2).sum(axis=-1)
    shares = values / values.sum(axis=-1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(axis=-1)
    spread = _null_positivity_spread(roots) if d_query == d_key else None
    return NullSpectrum(
        spectral_norm=null_spectral_norm(d_query, d_key, rank),
        stable_rank=float((square_norms / values[:, 0] ** 2).mean()) * roots.shrink,
        effective_rank=float(np.exp(entropy).mean()) * roots.shrink,
        eigenvalue_positivity_spread=spread,
    )


def _null_positivity_spread(roots: RandomRoots) -> float:
    """Return the standard deviation of the positivity of the eigenvalues of random square forms.

    Given A, BᵀA is a matrix of independent entries times A's root; its trace has the variance ‖A‖².
    """
    draws, query_rows, rank = roots.query.shape
    crossed = roots.random.standard_normal((draws, rank, query_rows)) @ roots.query
    eigenvalue_sums = np.abs(np.linalg.eigvals(crossed)).sum(axis=-1)
    trace_variance = (roots.query**2).sum(axis=(-2, -1)).mean()
    return math.sqrt(trace_variance / (eigenvalue_sums**2).mean()) / roots.shrink


@lru_cache(maxsize=256)
def null_spectral_norm(d_query: int, d_key: int, rank: int) -> float:
    """Return the ``spectral_norm`` of `null_spectrum` alone, in less time."""
    roots = _random_roots_of_forms(d_query, d_key, rank)
    values = _by_square(roots.query @ roots.key.swapaxes(-1, -2))
    relative_norms = values[:, 0] / np.linalg.norm(values, axis=-1)
    return float(relative_norms.mean()) / math.sqrt(roots.shrink)


class RandomRoots(NamedTuple):
    """Roots of randomly drawn factors; K and R are smaller than the forms' by ``shrink``."""

    query: Float[np.ndarray, "draws k_query r"]
    key: Float[np.ndarray, "draws k_key r"]
    shrink: float
    random: np.random.Generator  # has drawn the roots, and can be used for further draws


def _random_roots_of_forms(d_query: int, d_key: int, rank: int) -> RandomRoots:
    """Draw roots of random factors (d_query, rank) and (d_key, rank), with a fixed seed."""
    shrink = max(1.0, min(rank, max(d_query, d_key)) / LARGEST_DRAW)
    small_query, small_key, small_rank = (max(1, round(n / shrink)) for n in (d_query, d_key, rank))
    random = np.random.default_rng(0)
    draws = max(4, 4096 // small_rank)
    return RandomRoots(
        query=_random_roots(random, draws, small_query, small_rank),
        key=_random_roots(random, draws, small_key, small_rank),
        shrink=shrink,
        random=random,
    )


def _by_iteration(form: BilinearForm, xp: Any) -> Float[Array, "*stack"] | None:
    """Return σ₁ / 2**exponent; None if the iteration did not converge for some form."""
    moments = form.moments
    if moments.matrix is not None:  # M = M Iᵀ
        query_side = [moments.matrix, xp.matrix_transpose(moments.matrix)]
        key_side = []
    elif moments.grams is not None:
        query_side, key_side = [moments.grams[0]], [moments.grams[1]]
    else:
        query_side = [moments.query, xp.matrix_transpose(moments.query)]
        key_side = [moments.key, xp.matrix_transpose(moments.key)]

    def flatten(matrix: Array) -> Array:
        shape = tuple(matrix.shape[-2:])
        return xp.reshape(xp.broadcast_to(matrix, (*form.stack, *shape)), (-1, *shape))

    query_side = [flatten(matrix) for matrix in query_side]
    key_side = [flatten(matrix) for matrix in key_side]
    values = []
    for i in range(math.prod(form.stack)):
        value = by_iteration(
            [matrix[i, ...] for matrix in query_side], [matrix[i, ...] for matrix in key_side]
        )
        if value is None:
            return None
        values.append(value)
    norms = xp.asarray(values, dtype=xp.float64, device=device(moments.query))
    return xp.reshape(norms, form.stack)


def _wide(form: BilinearForm, xp: Any) -> list[Array]:
    """Return A and B in float64."""
    factors = form.moments.query, form.moments.key
    return [xp.astype(factor, xp.float64, copy=False) for factor in factors]


def _singular_values(form: BilinearForm, roots: Sequence[Array], xp: Any) -> Float[Array, "... k"]:
    """Return σ / 2**exponent in descending order, from the core S_A S_Bᵀ.

    The Gram matrices of float32 factors resolve no value below 1e-8 of the largest. Therefore the
    square of the core, which takes less time, is accurate enough.
    """
    query_root, key_root = roots
    core = xp.matmul(query_root, xp.matrix_transpose(key_root))
    if bits(form.moments.query, xp) == 64:
        return xp.linalg.svdvals(core)
    return _by_square(core)


def _by_square(core: Float[Array, "... k l"]) -> Float[Array, "... k"]:
    """Return singular values in descending order, from the eigenvalues of core · coreᵀ."""
    xp = array_namespace(core)
    squares = xp.linalg.eigvalsh(xp.matmul(core, xp.matrix_transpose(core)))
    return xp.flip(xp.sqrt(xp.clip(squares, 0.0, None)), axis=-1)


def _roots(form: BilinearForm, factors: Sequence[Array], xp: Any) -> list[Array]:
    """Return S_A and S_B (..., K, R), with SᵀS = AᵀA, of factors widened to float64."""
    roots = []
    for factor in factors:
        if factor.shape[-2] <= factor.shape[-1]:
            roots.append(factor)
        elif bits(form.moments.query, xp) == 32:
            roots.append(root_of(gram(factor, xp)))
        else:
            roots.append(xp.linalg.qr(factor).R)
    return roots


def root_of(square: Float[Array, "... r r"]) -> Float[Array, "... r r"]:
    """S with SᵀS equal to a positive semidefinite matrix.

    Examples
    --------
    >>> import numpy as np
    >>> root = root_of(np.ones((2, 2)))  # of rank one
    >>> np.round(root.T @ root, 9).tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    xp = array_namespace(square)
    try:
        root = xp.matrix_transpose(xp.linalg.cholesky(square))
        if bool(xp.all(xp.isfinite(root))):  # some libraries raise nothing
            return root
    except Exception as error:  # each library has a class of its own for indefinite matrices
        if "LinAlg" not in type(error).__name__:
            raise
    values, vectors = xp.linalg.eigh(square)
    return xp.sqrt(xp.clip(values, 0.0, None))[..., None] * xp.matrix_transpose(vectors)


def _positivity(
    factors: Sequence[Array], roots: Sequence[Array], xp: Any
) -> Float[Array, "*stack"]:
    """Return Σ Re λ / Σ |λ|; NaN if the eigenvalues are only rounding errors."""
    query, key = factors
    width, rank = query.shape[-2:]
    if rank < width:
        crossed = xp.matmul(xp.matrix_transpose(key), query)
    else:
        crossed = xp.matmul(query, xp.matrix_transpose(key))
    absolute_sums = xp.sum(xp.abs(xp.linalg.eigvals(crossed)), axis=-1)  # Σ |λ|
    query_root, key_root = roots
    bound = xp.sqrt(square_sum(query_root, xp) * square_sum(key_root, xp))  # ‖A‖ ‖B‖
    # The eigenvalues of a nilpotent matrix are computed as roots of the rounding error.
    rounding = rank * math.sqrt(float(xp.finfo(xp.float64).eps)) * bound
    is_rounding = absolute_sums <= rounding
    traces = xp.sum(xp.linalg.diagonal(crossed), axis=-1)  # Σ Re λ
    divisors = xp.where(is_rounding, xp.ones_like(absolute_sums), absolute_sums)
    return xp.where(is_rounding, xp.full_like(traces, math.nan), traces / divisors)


def _restored(values: Array, form: BilinearForm, xp: Any) -> Array:
    """Multiply norms by 2**exponent; the norm of the zero matrix becomes 0."""
    exponent = xp.astype(form.moments.exponent, xp.float64)
    values = times_power(values, exponent)
    return xp.where(form.moments.square_norm == 0, xp.zeros_like(values), values)


def _random_roots(random: np.random.Generator, draws: int, d: int, rank: int) -> np.ndarray:
    """Draw roots (draws, min(R, d), R) of factors (d, R) with independent normal entries.

    The triangle of a factor's QR decomposition has normal entries above the diagonal, and roots of
    chi-square variables on the diagonal (Bartlett, 1933).
    """
    if d <= rank:
        return random.standard_normal((draws, d, rank))
    diagonal = np.arange(rank)
    roots = np.triu(random.standard_normal((draws, rank, rank)), 1)
    diagonal_squares = random.chisquare(d - diagonal, (draws, rank))
    roots[:, diagonal, diagonal] = np.sqrt(diagonal_squares)
    return roots
