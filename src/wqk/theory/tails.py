"""Which norms reach further, the columns' or the rows' (Lemma S1.11, Theorems 2.3 and S1.12).

The squared norms of all columns and those of all rows add up to ‖M‖², so neither side is larger in
total. With equal mean squares, the side whose norms vary more is the side whose mean norm is
smaller: Var(‖column‖) > Var(‖row‖) if and only if mean ‖column‖ < mean ‖row‖.

Axes: D width, T context tokens, N tokens that each of them predicts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk._typing import Array, Float
from wqk.forms import BilinearForm
from wqk.forms.scores import directionality

if TYPE_CHECKING:
    from collections.abc import Mapping


class Tails(NamedTuple):
    """The norms of one form's columns beside those of its rows.

    Attributes
    ----------
    columns_spread, rows_spread
        Standard deviation over root mean square of the norms.
    reach
        Largest column norm over largest row norm: above 1, columns hold the end of the tail.
    beyond
        How many of the leading side's norms exceed every norm of the other side: from there on
        Equation 13 holds for them. A share of the width.
    directionality, directionality_excess
        Definition 3.2 as printed, and by the rule of the published tables; negative where columns
        dominate. Each side has a threshold of its own.
    """

    columns_spread: float
    rows_spread: float
    reach: float
    beyond: float
    directionality: float
    directionality_excess: float

    @property
    def log_variance_ratio(self) -> float:
        """ln(Var ‖column‖ / Var ‖row‖): positive where Theorem S1.12 wants it."""
        return float(2 * np.log(self.columns_spread / self.rows_spread))


def tails(form: BilinearForm, gamma: float = 2.0) -> Tails:
    """Compare the norms of a form's columns and rows; all NaN for the zero matrix.

    Parameters
    ----------
    form
        One form: W_qk, or an update of it.
    gamma
        Of the directionality.

    Examples
    --------
    >>> column = np.ones((16, 1)); column[3] = 10.0
    >>> one = tails(BilinearForm(np.ones((16, 1)), column))
    >>> one.rows_spread, one.reach > 1, one.beyond, one.directionality
    (0.0, True, 0.0625, -1.0)
    """
    columns, rows = (np.asarray(n, np.float64) for n in (form.column_norms, form.row_norms))
    if not columns.any():
        return Tails(*[math.nan] * len(Tails._fields))
    longest, other = (columns, rows) if columns.max() >= rows.max() else (rows, columns)
    return Tails(
        columns_spread=float(columns.std() / np.sqrt((columns**2).mean())),
        rows_spread=float(rows.std() / np.sqrt((rows**2).mean())),
        reach=float(columns.max() / rows.max()),
        beyond=float((longest > other.max()).mean()),
        directionality=float(directionality(form, gamma)),
        directionality_excess=float(directionality(form, gamma, "excess")),
    )


def exceedance(law: Mapping[float, float], z: float) -> float:
    """Pr[X > z] of a variable that takes some values with some probabilities.

    Lemma S1.11 says that of two laws with one mean μ the one with the larger variance exceeds every
    z beyond some bound more often. It does not:

    Examples
    --------
    >>> wide = {-1.0: 0.5, 1.0: 0.5}  # variance 1
    >>> narrow = {-5.0: 0.01, 0.0: 0.98, 5.0: 0.01}  # variance 0.5
    >>> [sum(p * x * x for x, p in law.items()) for law in (wide, narrow)]
    [1.0, 0.5]
    >>> exceedance(wide, 2.0), exceedance(narrow, 2.0)  # beyond √(σ_a σ_b) = 0.84
    (0, 0.01)

    It holds for two laws of one shape, X_a = μ + σ_a Z and X_b = μ + σ_b Z, and every z > μ.
    """
    return sum(probability for value, probability in law.items() if value > z)


def simulate_update(
    variances: Float[Array, " d"],
    *,
    context_share: float = 1.0,
    contexts: int = 256,
    tokens: int = 16,
    seed: int = 0,
) -> BilinearForm:
    """One update under the assumptions of Proposition S1.8 and Theorem S1.12, drawn at random.

    Parameters
    ----------
    variances
        Σ_mm of the tokens that stand opposite: normal, independent, centered.
    context_share
        Share of the tokens t* that act as context, Σ_i β_i x_i yᵀ; the others are predicted,
        y (Σ_j β_j x_j)ᵀ. Every y has the identity as covariance, as the proposition asks.
    contexts
        T: number of tokens t*.
    tokens
        N: tokens opposite to each, with β drawn from a normal law.
    seed
        Of everything.

    Examples
    --------
    >>> few_large = np.exp(np.random.default_rng(0).standard_normal(64))
    >>> seen = tails(simulate_update(few_large))
    >>> seen.rows_spread > 2 * seen.columns_spread, seen.directionality_excess > 0
    (True, True)
    """
    random = np.random.default_rng(seed)
    shape = (contexts, len(variances))
    # Of normal x_i, the sum Σ_i β_i x_i is normal with the covariance Σ_i β_i² Σ.
    sizes = np.linalg.norm(random.standard_normal((contexts, tokens)), axis=1, keepdims=True)
    summed = sizes * random.standard_normal(shape) * np.sqrt(variances)
    own = random.standard_normal(shape)
    as_context = np.arange(contexts)[:, None] < context_share * contexts
    query = np.where(as_context, summed, own)
    key = np.where(as_context, own, summed)
    return BilinearForm(query.T, key.T)
