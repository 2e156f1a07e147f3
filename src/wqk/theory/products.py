"""Products of two forms as matrices, from their factors: no d × d matrix is built."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wqk.forms import BilinearForm


def inner_product(one: BilinearForm, other: BilinearForm) -> float:
    """⟨M, N⟩ = Σ_kl M_kl N_kl = tr(M Nᵀ).

    Examples
    --------
    >>> import numpy as np
    >>> from wqk.forms import BilinearForm
    >>> form = BilinearForm(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]))
    >>> inner_product(form, form), inner_product(form, form.T), round(cosine(form, form * -2.0), 12)
    (125.0, 121.0, -1.0)
    """
    return float(((one.query.T @ other.query) * (one.key.T @ other.key)).sum())


def cosine(one: BilinearForm, other: BilinearForm) -> float:
    """⟨M, N⟩ / ‖M‖ ‖N‖; NaN if one of them is the zero matrix."""
    return ratio(inner_product(one, other), float(one.norm * other.norm))


def ratio(part: Any, whole: Any) -> float:
    """One number over another; NaN if that is 0, as in a layer without a gradient."""
    return float(part / whole) if whole else math.nan
