"""What a step does to a form: (A + ΔA)(B + ΔB)ᵀ − A Bᵀ = Δ₂ + Δ₃.

The term of first order, Δ₂ = ΔA Bᵀ + A ΔBᵀ, has rank 2R; that of second order, Δ₃ = ΔA ΔBᵀ, rank R.
Between two steps of training Δ₃ is small; where it is not, the weights move faster than the form's
own gradient says.

Axes: ``...`` a stack of forms, D width, R rank.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from array_api_compat import array_namespace

from wqk.errors import FormError
from wqk.forms.spectra import spectral_norm

if TYPE_CHECKING:
    from wqk.forms.form import BilinearForm


class UpdateTerms(NamedTuple):
    """The two terms of a form's change.

    Attributes
    ----------
    first
        Δ₂ = ΔA Bᵀ + A ΔBᵀ, of rank 2R.
    second
        Δ₃ = ΔA ΔBᵀ, of rank R.
    """

    first: BilinearForm
    second: BilinearForm


def update_terms(before: BilinearForm, after: BilinearForm) -> UpdateTerms:
    """Split a form's change into the terms of first and second order in its factors.

    Examples
    --------
    >>> import numpy as np
    >>> from wqk import BilinearForm
    >>> one = BilinearForm(np.eye(2), np.eye(2))
    >>> terms = update_terms(one, BilinearForm(1.1 * np.eye(2), 1.1 * np.eye(2)))
    >>> terms.first.dense().round(6).tolist(), terms.second.dense().round(6).tolist()
    ([[0.2, 0.0], [0.0, 0.2]], [[0.01, 0.0], [0.0, 0.01]])

    Raises
    ------
    FormError
        The factors have other shapes, so that one is no step from the other.
    """
    shapes = [(form.query.shape, form.key.shape) for form in (before, after)]
    if shapes[0] != shapes[1]:
        raise FormError(f"an update needs factors of the same shape, got {shapes[0]}, {shapes[1]}")
    make = type(before)
    query_step, key_step = after.query - before.query, after.key - before.key
    return UpdateTerms(
        even(make(query_step, before.key)) + even(make(before.query, key_step)),
        even(make(query_step, key_step)),
    )


def change(before: BilinearForm, after: BilinearForm) -> BilinearForm:
    """Δ₂ + Δ₃ = ΔA (B + ΔB)ᵀ + A ΔBᵀ of rank 2R, as `BilinearForm.difference` with even factors."""
    make = type(before)
    return even(make(after.query - before.query, after.key)) + even(
        make(before.query, after.key - before.key)
    )


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


def even(form: BilinearForm) -> BilinearForm:
    """The same form with factors of one size, by a power of two, which rounds nothing.

    A small step next to large weights looks like cancellation to the kernels, for which they take
    twice the digits and several times the time.
    """
    xp = array_namespace(form.query, form.key)
    sizes = [float(xp.max(xp.abs(factor))) for factor in (form.query, form.key)]
    if not all(0 < size < math.inf for size in sizes):
        return form
    power = 2.0 ** round(math.log2(sizes[1] / sizes[0]) / 2)
    return type(form)(form.query * power, form.key / power)
