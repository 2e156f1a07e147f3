"""Wrong merges of a LoRA adapter: the multiple of its product that a weight contains.

A weight W of the base model with an adapter is W + P, with P = s B A. A merged weight C should be
equal to W + P. A mistake of the scale makes C = W + t P with a share t other than 1: 0 if the
adapter is not merged, 2 if the adapter is merged twice. A transposed product makes C = W + t Pᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from wqk.checkpoints.adapters import LoraFactors
from wqk.sameness.axis_orders import Stretches
from wqk.sameness.edits import Edit, LowRank, Then
from wqk.sameness.tolerances import BESIDE_ADAPTER, SAME_SHARE

# Fewest and most digits with which a share is tried.
SHARE_DIGITS = range(2, 10)


@dataclass(frozen=True)
class MergeScale:
    """Scale of an adapter, and the numbers that determine the scale.

    Attributes
    ----------
    scale
        The factor s of the product B A.
    rank
        The rank r.
    stabilized
        Whether s is alpha / √r (rank-stabilized) instead of alpha / r.
    """

    scale: float
    rank: int
    stabilized: bool

    @property
    def formula(self) -> str:
        """The scale as the adapter's configuration defines it."""
        return "alpha / √rank" if self.stabilized else "alpha / rank"

    def known_shares(self) -> Iterator[tuple[float, str]]:
        """Yield known mistakes, each with the resulting share of the product.

        Examples
        --------
        >>> for share, mistake in MergeScale(8.0, 4, False).known_shares():
        ...     print(f"{share:6.3f} {mistake}")
         0.000 not merged
         2.000 merged twice
        -1.000 merged with the wrong sign: subtracted instead of added
         0.125 merged without its scale (8)
         8.000 merged with its scale twice (8 · 8)
         4.000 merged with alpha instead of alpha / rank
         2.000 merged with alpha / √rank (rank-stabilized) instead of alpha / rank
        """
        yield 0.0, "not merged"
        yield 2.0, "merged twice"
        yield -1.0, "merged with the wrong sign: subtracted instead of added"
        if self.scale != 1:
            yield 1 / self.scale, f"merged without its scale ({self.scale:.4g})"
            yield self.scale, f"merged with its scale twice ({self.scale:.4g} · {self.scale:.4g})"
        if self.rank == 1:
            return
        root = math.sqrt(self.rank)
        divisor = root if self.stabilized else self.rank
        yield divisor, f"merged with alpha instead of {self.formula}"
        if self.stabilized:
            yield 1 / root, "merged with alpha / rank instead of alpha / √rank (rank-stabilized)"
        else:
            yield root, "merged with alpha / √rank (rank-stabilized) instead of alpha / rank"


@dataclass(frozen=True)
class FittedMerge:
    """A merged weight as W + t P, or as W + t Pᵀ, fitted by least squares.

    Attributes
    ----------
    share
        The factor t.
    transposed
        Whether the product is transposed.
    residual
        Norm of the part of the change that the product does not explain.
    product
        Norm of P.
    """

    share: float
    transposed: bool
    residual: float
    product: float

    def explains(self, allowed: float) -> bool:
        """Return whether the residual is at most this norm."""
        return self.residual <= 2 * SAME_SHARE * self.product + allowed


def fit_merge(base: np.ndarray, product: np.ndarray, actual: np.ndarray) -> FittedMerge:
    """Fit a merged weight with an adapter's product, or with its transposed product.

    Parameters
    ----------
    base, product, actual
        The base model's weight W, the adapter's product P, and the merged weight; all (n, D).

    Examples
    --------
    >>> base, product = np.eye(2), np.array([[0.0, 1.0], [0.0, 0.0]])
    >>> fit_merge(base, product, base + 2 * product).share
    2.0
    >>> fit_merge(base, product, base + product.T).transposed
    True
    """
    product = product.astype(np.float64)
    change = actual.astype(np.float64) - base
    fitted = _fitted(change, product, transposed=False)
    is_square = product.ndim == 2 and product.shape[0] == product.shape[1]
    if not is_square or fitted.residual <= 2 * SAME_SHARE * fitted.product:
        return fitted
    of_transposed = _fitted(change, product.T, transposed=True)
    return of_transposed if of_transposed.residual < fitted.residual / 2 else fitted


def _fitted(change: np.ndarray, product: np.ndarray, transposed: bool) -> FittedMerge:
    """Return the multiple of a product that is nearest to a change."""
    square = float(np.vdot(product, product))
    share = float(np.vdot(change, product)) / square if square else 0.0
    residual = float(np.linalg.norm(change - share * product))
    return FittedMerge(share, transposed, residual, math.sqrt(square))


def mistake_of(merge: FittedMerge, scale: MergeScale, deviation: float) -> str:
    """Return the mistake of a fitted merge, as a phrase that follows *is*.

    Parameters
    ----------
    merge, scale
        The merge, and the numbers of the right scale.
    deviation
        The difference of shares that chance explains.

    Examples
    --------
    >>> scale = MergeScale(4.0, 4, False)
    >>> mistake_of(FittedMerge(0.3, False, 0.0, 1.0), scale, 0.02)
    'merged with 0.3 times its scale'
    >>> mistake_of(FittedMerge(1.0, True, 0.0, 1.0), scale, 0.02)
    'merged with its product transposed'
    """
    if merge.transposed:
        is_whole = abs(merge.share - 1) < deviation
        times = "" if is_whole else f", and with {merge.share:.4g} times its scale"
        return f"merged with its product transposed{times}"
    fitting = [text for share, text in scale.known_shares() if abs(share - merge.share) < deviation]
    return ", or ".join(fitting) or f"merged with {merge.share:.4g} times its scale"


def unmerged(
    merge: FittedMerge,
    factors: LoraFactors,
    scale: MergeScale,
    *,
    in_reference: bool = True,
    is_transposed: bool = False,
    rows: Stretches | None = None,
    allowed: float = 0.0,
) -> Edit | None:
    """Return the edit of the candidate that undoes a wrong merge; None if no edit does.

    Parameters
    ----------
    merge
        The wrong merge.
    factors, scale
        The factors of the adapter's update, s B A, and the numbers of its scale.
    in_reference
        Whether the reference is the adapter, and the candidate the wrong merge. Otherwise the
        reverse edit makes an adapted candidate equal to the wrong merge, which is the reference.
    is_transposed
        Whether the edited array is the transposed stored tensor.
    rows
        The rows of B, if the array is a part of a fused weight.
    allowed
        The norm that rounding explains.
    """
    if merge.residual > BESIDE_ADAPTER * allowed:
        return None
    a, b = factors.down, factors.up
    transposed = factors.transposed != is_transposed
    share = _plain_share(merge, scale, allowed)
    factor = factors.scale if in_reference else -factors.scale
    if merge.transposed:
        remove_transposed = LowRank(a, b, -share * factor, not transposed, rows)
        add_product = LowRank(a, b, factor, transposed, rows)
        return Then(remove_transposed, add_product)
    return LowRank(a, b, (1 - share) * factor, transposed, rows)


def _plain_share(merge: FittedMerge, scale: MergeScale, allowed: float) -> float:
    """Return the share of a known mistake, or a number of few digits, near the fitted share.

    If rounding does not explain the difference, the fitted share is returned. Therefore layers with
    one mistake have one edit.
    """
    shares = [1.0, *(share for share, _ in scale.known_shares())]
    shares += [float(f"{merge.share:.{digits}g}") for digits in SHARE_DIGITS]
    for share in shares:
        if abs(share - merge.share) * merge.product <= max(allowed, merge.residual):
            return share
    return merge.share
