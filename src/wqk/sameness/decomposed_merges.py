"""Wrong merges of a DoRA adapter: the weight that each mistake produces.

The right merge is m · (W + P) / ‖W + P‖, with P = s B A and the norm of each row (the inputs of an
output). Axes: n outputs, D inputs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wqk.attention.rounding import ROUNDING
from wqk.checkpoints.adapters import DoraUpdate, decomposed
from wqk.sameness.tolerances import SAFETY, SAME_SHARE, UNEXPLAINED_BY_FACTORS


def _wrong_merges(base: np.ndarray, update: DoraUpdate) -> Iterator[tuple[str, np.ndarray]]:
    """Yield a phrase for each mistake, and the resulting weight (n, D)."""
    weight = base.astype(np.float64)
    product, magnitudes = update.product, update.magnitudes
    magnitude_by_row = magnitudes[:, None]
    plain_sum = weight + product
    yield "not merged", weight
    yield "merged as LoRA: its magnitudes are forgotten", plain_sum
    norms_of_columns = np.linalg.norm(plain_sum, axis=0, keepdims=True)
    with_wrong_norms = magnitude_by_row * plain_sum / norms_of_columns
    yield "merged with norms along the wrong axis", with_wrong_norms
    if len(magnitudes) == weight.shape[1]:
        along_wrong_axis = magnitudes * plain_sum / norms_of_columns
        yield "merged with norms and magnitudes along the wrong axis", along_wrong_axis
    base_norms = np.linalg.norm(weight, axis=1, keepdims=True)
    with_base_norms = magnitude_by_row * plain_sum / base_norms
    yield "merged with the norms of the base model's weight", with_base_norms
    yield "merged without its update of low rank", decomposed(weight, 0 * product, magnitudes)
    merged = decomposed(weight, product, magnitudes)
    yield "merged twice", decomposed(merged, product, magnitudes)


@np.errstate(divide="ignore", invalid="ignore")
def wrong_merge(base: np.ndarray, update: DoraUpdate, actual: np.ndarray) -> str:
    """Return the mistake that explains a weight, in a phrase; empty if no mistake does.

    A mistake must explain the weight better than the right merge does, because an update of a few
    percent hardly changes the norms of the base model's weight.

    Parameters
    ----------
    base
        The base model's weight, (n, D).
    update
        The update of DoRA.
    actual
        The weight that was merged, (n, D).

    Examples
    --------
    >>> base, product = np.eye(2), np.array([[0.0, 1.0], [0.0, 0.0]])
    >>> update = DoraUpdate(product, np.array([2.0, 3.0]), False)
    >>> wrong_merge(base, update, base + product)
    'merged as LoRA: its magnitudes are forgotten'
    """
    right = decomposed(base, update.product, update.magnitudes)
    distance_of_right = float(np.linalg.norm(actual - right))
    if distance_of_right <= SAFETY * ROUNDING["F32"] * float(np.linalg.norm(right)):
        return ""
    allowed = min(
        SAME_SHARE * float(np.linalg.norm(right - base)), UNEXPLAINED_BY_FACTORS * distance_of_right
    )
    for text, weight in _wrong_merges(base, update):
        if float(np.linalg.norm(actual - weight)) <= allowed:
            return text
    times = _scale_of_merge(base, update.product, actual)
    weight = decomposed(base, times * update.product, update.magnitudes)
    is_other = abs(times - 1) > SAME_SHARE and float(np.linalg.norm(actual - weight)) <= allowed
    return f"merged with {times:.4g} times its scale" if is_other else ""


def _scale_of_merge(base: np.ndarray, product: np.ndarray, actual: np.ndarray) -> float:
    """Return t for rows that are a · (W + t P), with a factor a for each row.

    A row is fitted by least squares with the rows of W and of P; t is the ratio of the two
    coefficients. The result is the median over all rows; 1 if no row has a coefficient of W.
    """
    weight, merged = base.astype(np.float64), actual.astype(np.float64)
    ww = _products_of_rows(weight, weight)
    wp = _products_of_rows(weight, product)
    pp = _products_of_rows(product, product)
    wa = _products_of_rows(weight, merged)
    pa = _products_of_rows(product, merged)
    # Both coefficients, times the determinant of the normal equations.
    coefficients_of_weight = wa * pp - pa * wp
    coefficients_of_product = pa * ww - wa * wp
    has_weight = coefficients_of_weight != 0
    if not has_weight.any():
        return 1.0
    ratios = coefficients_of_product[has_weight] / coefficients_of_weight[has_weight]
    return float(np.median(ratios))


def _products_of_rows(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the scalar product of corresponding rows of two arrays, (n,)."""
    return np.asarray(np.einsum("nd,nd->n", first, second))
