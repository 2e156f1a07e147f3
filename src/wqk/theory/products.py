"""Products of two forms as matrices, from their factors: no d × d matrix is built.

Axes: D width, R and S ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wqk.forms import BilinearForm


def inner_product(one: BilinearForm, other: BilinearForm) -> float:
    """⟨M, N⟩ = Σ_kl M_kl N_kl.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk.forms import BilinearForm
    >>> form = BilinearForm(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]))
    >>> inner_product(form, form), trace_of_product(form, form)
    (125.0, 121.0)
    """
    return float(((one.query.T @ other.query) * (one.key.T @ other.key)).sum())


def trace_of_product(one: BilinearForm, other: BilinearForm) -> float:
    """tr(M N) = ⟨M, Nᵀ⟩."""
    return inner_product(one, other.T)


def cosine(one: BilinearForm, other: BilinearForm) -> float:
    """⟨M, N⟩ / ‖M‖ ‖N‖.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk.forms import BilinearForm
    >>> form = BilinearForm(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]))
    >>> round(cosine(form, form * -2.0), 12)
    -1.0
    """
    return inner_product(one, other) / float(one.norm * other.norm)
