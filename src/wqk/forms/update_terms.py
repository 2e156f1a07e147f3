"""What a step does to a form: (A + ΔA)(B + ΔB)ᵀ − A Bᵀ = Δ₂ + Δ₃.

The first-order term, Δ₂ = ΔA Bᵀ + A ΔBᵀ, has rank 2R, the second-order term, Δ₃ = ΔA ΔBᵀ, rank R.
Between two training steps Δ₃ is small; where it is not, the weights move faster than the form's
gradient says.

Axes: ``...`` a stack of forms, D width, R rank.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from array_api_compat import array_namespace

from wqk.errors import FormError
from wqk.forms.form import BilinearForm
from wqk.forms.spectra import spectral_norm


class UpdateTerms(NamedTuple):
    """Δ₂ = ΔA Bᵀ + A ΔBᵀ, of rank 2R, and Δ₃ = ΔA ΔBᵀ, of rank R."""

    first: BilinearForm
    second: BilinearForm


def update_terms(before: BilinearForm, after: BilinearForm) -> UpdateTerms:
    """Split a form's change into the first-order and the second-order term in its factors.

    Raises
    ------
    FormError
        The factors have different shapes, so that neither form is an update of the other.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> one = BilinearForm(np.eye(2), np.eye(2))
    >>> terms = update_terms(one, BilinearForm(1.1 * np.eye(2), 1.1 * np.eye(2)))
    >>> terms.first.dense().round(6).tolist(), terms.second.dense().round(6).tolist()
    ([[0.2, 0.0], [0.0, 0.2]], [[0.01, 0.0], [0.0, 0.01]])
    """
    shapes = [(form.query.shape, form.key.shape) for form in (before, after)]
    if shapes[0] != shapes[1]:
        raise FormError(f"an update needs factors of the same shape, got {shapes[0]}, {shapes[1]}")
    query_step, key_step = after.query - before.query, after.key - before.key
    make = type(before).from_factors
    return UpdateTerms(
        _rescaled(make(query_step, before.key)) + _rescaled(make(before.query, key_step)),
        _rescaled(make(query_step, key_step)),
    )


def change(before: BilinearForm, after: BilinearForm) -> BilinearForm:
    """Δ₂ + Δ₃ = ΔA (B + ΔB)ᵀ + A ΔBᵀ: `BilinearForm.difference` with rescaled factors."""
    make = type(before).from_factors
    query_step, key_step = after.query - before.query, after.key - before.key
    return _rescaled(make(query_step, after.key)) + _rescaled(make(before.query, key_step))


def update_measures(before: BilinearForm, after: BilinearForm) -> dict[str, Any]:
    """Norm, σ₁ and stable rank of both terms, each (...), by their columns in a table.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> one = BilinearForm(np.eye(2), np.eye(2))
    >>> float(update_measures(one, one * 1.1)["first_order_stable_rank"].round(3))
    2.0
    """
    measures: dict[str, Any] = {}
    for order, term in zip(("first", "second"), update_terms(before, after), strict=True):
        norm, largest = term.norm, spectral_norm(term)
        xp = array_namespace(largest)
        moves = largest > 0
        ratio = norm / xp.where(moves, largest, xp.ones_like(largest))
        measures |= {
            f"{order}_order_norm": norm,
            f"{order}_order_spectral_norm": largest,
            f"{order}_order_stable_rank": xp.where(moves, ratio**2, math.nan * ratio),
        }
    return measures


def _rescaled(form: BilinearForm) -> BilinearForm:
    """The same form with factors of equal size, by an exact power of two.

    To the kernels, a small step next to large weights would look like cancellation, for which they
    need float64 and several times the time.
    """
    xp = array_namespace(form.query, form.key)
    sizes = [float(xp.max(xp.abs(factor))) for factor in (form.query, form.key)]
    if not all(0 < size < math.inf for size in sizes):
        return form
    power = 2.0 ** round(math.log2(sizes[1] / sizes[0]) / 2)
    return type(form).from_factors(form.query * power, form.key / power)
