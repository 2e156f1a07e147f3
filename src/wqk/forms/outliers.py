"""Outliers among the norms of a form's rows and columns, and which side has more of them.

Axes: ``...`` a stack of forms.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from array_api_compat import array_namespace

from wqk._typing import Array, Bool, Float
from wqk.errors import FormError
from wqk.forms.kernels import Moments

# A standard deviation below this share of the mean is rounding error.
NO_SPREAD = 1e-6


class Directionalities(NamedTuple):
    """`wqk.directionality` with either weight, named as columns are."""

    directionality: Float[Array, "*stack"]
    directionality_excess: Float[Array, "*stack"]


def directionalities(moments: Moments, gamma: float = 2.0) -> Directionalities:
    """Both kinds of `wqk.directionality` from the same outliers."""
    xp = array_namespace(moments.row_norms)

    def balance(rows: Array, columns: Array) -> Array:
        total = rows + columns
        score = (rows - columns) / xp.where(total == 0, xp.ones_like(total), total)
        return xp.where(moments.square_norm > 0, score, xp.full_like(score, math.nan))

    sums = (_outlier_sums(norms, gamma) for norms in (moments.row_norms, moments.column_norms))
    return Directionalities(*map(balance, *sums))


def outliers(norms: Float[Array, "... n"], gamma: float = 2.0) -> Bool[Array, "... n"]:
    """Which norms exceed mean + gamma · std (n − 1) along the last axis; none if all are equal.

    Examples
    --------
    >>> import numpy as np
    >>> outliers(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0]))
    array([False, False, False, False, False, False,  True])
    """
    return _excess(norms, gamma) > 0


def _outlier_sums(norms: Array, gamma: float) -> tuple[Array, Array]:
    """Sums over the outliers: of their norms, and of what these are above the threshold."""
    xp = array_namespace(norms)
    excess = _excess(norms, gamma)
    zero = xp.zeros_like(norms)
    summands = xp.where(excess > 0, norms, zero), xp.where(excess > 0, excess, zero)
    return xp.sum(summands[0], axis=-1), xp.sum(summands[1], axis=-1)


def _excess(norms: Array, gamma: float) -> Array:
    """Each norm less the threshold mean + gamma · std; zero if all norms are equal."""
    if not 0 <= gamma < math.inf:
        raise FormError(f"gamma must be a finite number from 0 up, got {gamma}")
    xp = array_namespace(norms)
    if norms.shape[-1] < 2:
        return xp.zeros_like(norms)
    mean = xp.mean(norms, axis=-1, keepdims=True)
    spread = xp.std(norms, axis=-1, correction=1, keepdims=True)
    # No norm lies √n deviations above the mean; a larger factor would only overflow.
    deviations = min(gamma, math.sqrt(norms.shape[-1]))
    excess = norms - (mean + deviations * spread)
    return xp.where(spread > NO_SPREAD * mean, excess, xp.zeros_like(excess))
