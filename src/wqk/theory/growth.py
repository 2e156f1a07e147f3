"""What one token adds to rows and columns, as context and as prediction (Propositions S1.7-S1.9).

The update Σ_ij β_ij x_i x_jᵀ is a sum over context tokens j of u_j x_jᵀ, with u_j = Σ_i β_ij x_i,
and likewise a sum over predicted tokens i of x_i v_iᵀ, with v_i = Σ_j β_ij x_j. Each term has rank
one: the squared norms of its columns and of its rows add up to the same number. What differs is how
they spread over the D columns and the D rows.

Axes: ``...`` batches, N tokens (i predicted, j context), D width, T trials.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wqk._typing import Array, Float


class Contributions(NamedTuple):
    """Squared norms of the columns and rows of each token's own update, all (..., N, D)."""

    context_columns: np.ndarray
    context_rows: np.ndarray
    prediction_columns: np.ndarray
    prediction_rows: np.ndarray


def contributions(inputs: Float[Array, "... n d"], beta: Float[Array, "... n n"]) -> Contributions:
    """Each token's share in the update, as context and as prediction (Equations S42-S45).

    Parameters
    ----------
    inputs
        x, (..., N, D): what the query and key projections are applied to.
    beta
        β_ij of predicted token i and context token j, (..., N, N).

    Examples
    --------
    >>> inputs = np.array([[1.0, 0.0], [3.0, 4.0]])
    >>> added = contributions(inputs, np.array([[0.0, 0.0], [2.0, 0.0]]))
    >>> added.context_columns[0].tolist(), added.context_rows[0].tolist()  # 2 (3, 4) (1, 0)ᵀ
    ([100.0, 0.0], [36.0, 64.0])
    """
    squares = inputs**2
    sizes = squares.sum(axis=-1, keepdims=True)
    predicted = np.swapaxes(beta, -1, -2) @ inputs  # u
    context = beta @ inputs  # v
    return Contributions(
        context_columns=squares * (predicted**2).sum(axis=-1, keepdims=True),
        context_rows=predicted**2 * sizes,
        prediction_columns=context**2 * sizes,
        prediction_rows=squares * (context**2).sum(axis=-1, keepdims=True),
    )


class Growth(NamedTuple):
    """E‖column‖² / E‖row m‖² as context, for each row m, with a 95 % interval; all (D,).

    As prediction of the same tokens, columns and rows change places: E‖row‖² / E‖column k‖².
    """

    expected: np.ndarray
    ratio: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def agrees(self) -> bool:
        """Whether the intervals hold the expected ratios as often as 95 % intervals should."""
        inside = (self.low <= self.expected) & (self.expected <= self.high)
        return bool(inside.mean() >= 0.95 - 3 * np.sqrt(0.05 * 0.95 / len(inside)))


def expected_growth(variances: Float[Array, " d"]) -> Float[Array, " d"]:
    """E‖column‖² / E‖row m‖² = Tr(Σ) / (d Σ_mm) for each row m, (D,) (Equation S62).

    Parameters
    ----------
    variances
        Σ_mm of the predicted tokens' coordinates. The context token's are all alike.

    Examples
    --------
    >>> expected_growth(np.array([1.0, 1.0, 4.0])).tolist()
    [2.0, 2.0, 0.5]
    """
    return np.asarray(variances.mean() / variances)


def simulate_growth(
    covariance: Float[Array, "d d"], *, tokens: int = 16, trials: int = 4000, seed: int = 0
) -> Growth:
    """Proposition S1.8 by drawing: one context token y, and predicted tokens x_i, all centered.

    Parameters
    ----------
    covariance
        Σ of the x_i, (D, D); y has the identity's.
    tokens
        Number of predicted tokens.
    trials
        Number of updates (Σ_i β_i x_i) yᵀ that are drawn, with β_i drawn from a normal law.
    seed
        Of everything.

    Examples
    --------
    >>> growth = simulate_growth(np.diag([1.0, 1.0, 1.0, 5.0]))
    >>> growth.expected.tolist(), growth.agrees
    ([2.0, 2.0, 2.0, 0.4], True)
    """
    random = np.random.default_rng(seed)
    width = len(covariance)
    root = np.linalg.cholesky(covariance)
    # Of normal x_i, the sum Σ_i β_i x_i is normal with the covariance Σ_i β_i² Σ.
    sizes = np.linalg.norm(random.standard_normal((trials, tokens)), axis=1, keepdims=True)
    summed = sizes * (random.standard_normal((trials, width)) @ root.T)
    context = random.standard_normal((trials, width))
    columns = (context**2).mean(axis=1) * (summed**2).sum(axis=1)
    rows = summed**2 * (context**2).sum(axis=1, keepdims=True)
    ratio = columns.mean() / rows.mean(axis=0)
    # The error of a ratio of two means, to first order.
    residual = columns[:, None] - ratio * rows
    error = 1.96 * residual.std(axis=0, ddof=1) / np.sqrt(trials) / rows.mean(axis=0)
    return Growth(expected_growth(np.diag(covariance)), ratio, ratio - error, ratio + error)


class Spread(NamedTuple):
    """How vectors lie about the origin: what Proposition S1.8 assumes of embeddings.

    Attributes
    ----------
    mean_share
        ‖mean‖² / E‖x‖²: 0 for centered vectors.
    dimensions
        Tr(Σ)² / Tr(Σ²) / D: 1 for an isotropic covariance, 1/D for a line.
    below
        Share of coordinates with less than the average variance: the rows m of Equation S53.
    largest
        Share of the total variance in the one largest coordinate; 1/D for equal ones.
    growth_low, growth_median, growth_high
        Tr(Σ) / (D Σ_mm) at its 5 %, 50 % and 95 % quantiles over m.
    """

    mean_share: float
    dimensions: float
    below: float
    largest: float
    growth_low: float
    growth_median: float
    growth_high: float


def spread_of(vectors: Float[Array, "n d"], weights: Float[Array, " n"] | None = None) -> Spread:
    """Mean and covariance of vectors (N, D), each weighted, say by how often a token occurs.

    Examples
    --------
    >>> points = np.array([[1.0, 3.0], [1.0, -3.0], [-1.0, 3.0], [-1.0, -3.0]])
    >>> spread = spread_of(points)
    >>> spread.mean_share, spread.below, spread.largest
    (0.0, 0.5, 0.9)
    """
    vectors = np.asarray(vectors, np.float64)
    share = np.full(len(vectors), 1 / len(vectors)) if weights is None else weights / weights.sum()
    mean = share @ vectors
    centered = vectors - mean
    covariance = (centered * share[:, None]).T @ centered
    variances = np.diag(covariance)
    total = variances.sum()
    # A coordinate that never varies has no ratio; it would be infinite.
    growth = expected_growth(variances[variances > 0])
    low, median, high = np.quantile(growth, [0.05, 0.5, 0.95])
    return Spread(
        mean_share=float(mean @ mean / (mean @ mean + total)),
        dimensions=float(total**2 / (covariance**2).sum() / len(mean)),
        below=float((variances < variances.mean()).mean()),
        largest=float(variances.max() / total),
        growth_low=float(low),
        growth_median=float(median),
        growth_high=float(high),
    )


def share_above(columns: Float[Array, "... d"], rows: Float[Array, "... d"]) -> float:
    """For which share of all pairs of a column and a row the column is the larger; ties count half.

    Parameters
    ----------
    columns, rows
        Norms, (..., D): compared within each set, averaged over all sets.

    Examples
    --------
    >>> share_above(np.array([2.0, 2.0, 2.0]), np.array([1.0, 1.0, 4.0]))
    0.6666666666666666
    """
    pairs = [
        (np.searchsorted(some, column, "left") + np.searchsorted(some, column, "right")).mean()
        for some, column in zip(
            np.sort(rows.reshape(-1, rows.shape[-1])),
            columns.reshape(-1, columns.shape[-1]),
            strict=True,
        )
    ]
    return float(np.mean(pairs) / (2 * rows.shape[-1]))
