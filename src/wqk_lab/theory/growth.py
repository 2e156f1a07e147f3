"""Contribution of one token to rows and columns, as context and as prediction (S1.7-S1.9).

The update Σ_ij β_ij x_i x_jᵀ is a sum over context tokens j of u_j x_jᵀ, with u_j = Σ_i β_ij x_i,
and also a sum over predicted tokens i of x_i v_iᵀ, with v_i = Σ_j β_ij x_j. Each term has rank one:
the sums of the squared norms of its columns and of its rows are equal. Only the distributions over
the D columns and the D rows differ. If predicted tokens have the covariance Σ and the context token
an isotropic covariance, a column grows faster than row m by Tr(Σ)/(D Σ_mm) as context (S62), and
slower as prediction (S67).

Axes: ``...`` batches, N tokens (i predicted, j context), D width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from wqk._typing import Array, Float
from wqk_lab.theory.evidence import Evidence, LayerUpdate, StatementMeasure, of_layers, ratio
from wqk_lab.theory.gradients import LayerGradient
from wqk_lab.theory.verdict import Sample


class Contributions(NamedTuple):
    """Squared norms of the columns and rows of each token's terms, all (..., N, D)."""

    context_columns: np.ndarray
    context_rows: np.ndarray
    prediction_columns: np.ndarray
    prediction_rows: np.ndarray


def contributions(inputs: Float[Array, "... n d"], beta: Float[Array, "... n n"]) -> Contributions:
    """Return the contributions of each token, as context and as prediction (S42-S45).

    ``inputs`` are the inputs x of both projections; the rows of ``beta`` are predicted tokens i,
    its columns context tokens j.

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


def share_above(columns: Float[Array, "... d"], rows: Float[Array, "... d"]) -> np.ndarray:
    """Return the share of pairs of a column and a row with a larger column; ties count half.

    This is Mann and Whitney's U divided by the number of pairs.

    Examples
    --------
    >>> float(share_above(np.array([2.0, 2.0, 2.0]), np.array([1.0, 1.0, 4.0])))
    0.6666666666666666
    """
    from scipy.stats import rankdata  # type: ignore[import-untyped]

    width = columns.shape[-1]
    ranks = rankdata(np.concatenate([columns, rows], axis=-1), axis=-1)[..., :width]
    return np.asarray((ranks.sum(axis=-1) - width * (width + 1) / 2) / width**2)


class Spread(NamedTuple):
    """Distribution of vectors about the origin, for the assumptions of Proposition S1.8.

    Attributes
    ----------
    mean_share
        ‖mean‖² / E‖x‖²: 0 for centered vectors.
    dimensions
        Tr(Σ)² / Tr(Σ²) / D: 1 for an isotropic covariance, 1/D for a line. The contribution of a
        sample of this size to Tr(Σ²) by chance is subtracted.
    below
        Share of coordinates with less than the average variance: the rows m of Equation S53.
    """

    mean_share: float
    dimensions: float
    below: float


def spread_of(vectors: Float[Array, "n d"]) -> Spread:
    """Return the spread of vectors (N, D).

    Examples
    --------
    >>> spread = spread_of(np.random.default_rng(0).standard_normal((400, 100)))
    >>> round(spread.mean_share, 2), round(spread.dimensions, 1)
    (0.0, 1.0)
    """
    vectors = np.asarray(vectors, np.float64)
    count, width = vectors.shape
    mean = vectors.mean(axis=0)
    covariance = (vectors - mean).T @ (vectors - mean) / (count - 1)
    variances = np.diag(covariance)
    total = float(variances.sum())
    squares = float((covariance**2).sum()) - total**2 / (count - 1)
    size = float(mean @ mean)
    return Spread(
        mean_share=ratio(max(0.0, size - total / count), size + total),
        dimensions=ratio(total**2, max(squares, total**2 / width)) / width,
        below=float((variances < variances.mean()).mean()),
    )


def as_printed(update: LayerUpdate) -> float:
    """Return the mean cosine of a predicted token's term and Equation S50.

    S50 has (Σ_j β_ij x_j) x_iᵀ, the transpose of the term x_i (Σ_j β_ij x_j)ᵀ in S46.
    """
    x = update.inputs
    context = update.beta @ x  # Σ_j β_ij x_j of each token i
    square_norms = (x**2).sum(axis=-1) * (context**2).sum(axis=-1)
    inner_products = (x * context).sum(axis=-1) ** 2
    nonzero = square_norms > 0
    if not nonzero.any():
        return np.nan
    cosines = inner_products[nonzero] / square_norms[nonzero]
    return float(cosines.mean())


def _groupings(update: LayerUpdate) -> dict[str, float]:
    """Return the largest difference of the two sums, and of the totals of columns and rows."""
    x, beta = update.inputs.astype(np.float64), update.beta.astype(np.float64)
    by_context = np.einsum("bnm,bnk->mk", beta.swapaxes(-1, -2) @ x, x)
    by_prediction = np.einsum("bnm,bnk->mk", x, beta @ x)
    added = contributions(x, beta)
    context_ratio = ratio(added.context_columns.sum(), added.context_rows.sum())
    prediction_ratio = ratio(added.prediction_columns.sum(), added.prediction_rows.sum())
    errors = (
        ratio(np.abs(by_context - by_prediction).max(), np.abs(by_context).max()),
        abs(context_ratio - 1),
        abs(prediction_ratio - 1),
    )
    return {"largest": max(errors)}


def _growth(update: LayerUpdate) -> dict[str, float]:
    """Return `share_above` of each token's columns and rows, averaged over tokens."""
    added = contributions(*update)
    sides = {"as_context": added[:2], "as_prediction": added[2:]}
    shares = {}
    for name, (columns, rows) in sides.items():
        nonzero = columns.any(axis=-1)
        shares[name] = ratio(share_above(columns[nonzero], rows[nonzero]).sum(), nonzero.sum())
    return shares


def _inputs(evidence: Evidence, first: str) -> Sample:
    """Return the spread of the inputs of context tokens; ``first`` is the quantity."""
    everything = evidence.subject.objective == "causal"

    def measure(layer: LayerGradient, index: int) -> dict[str, float]:
        x = layer.query_input
        width = x.shape[-1]
        if not everything:
            predicted = evidence.predicted[index]
            x = x.reshape(-1, *predicted.shape, width)[:, ~predicted]
        numbers = spread_of(x.reshape(-1, width))._asdict()
        return {first: numbers.pop(first), **numbers}

    return evidence.sample(measure)


def _of_updates(
    measure: Callable[[LayerUpdate], Mapping[str, float]],
) -> Callable[[Evidence], Sample]:
    return of_layers(lambda layer: measure(LayerUpdate.of(layer)))


MEASURES: dict[str, StatementMeasure] = {
    "groupings": _of_updates(_groupings),
    "as_printed": _of_updates(lambda update: {"cosine": as_printed(update)}),
    "as_context": _of_updates(_growth),
    "as_prediction": _of_updates(lambda update: dict(reversed(_growth(update).items()))),
    "centered": lambda evidence: _inputs(evidence, "mean_share"),
    "isotropic": lambda evidence: _inputs(evidence, "dimensions"),
}
