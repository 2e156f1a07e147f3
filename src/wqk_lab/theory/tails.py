"""Tails of the norms of columns and rows (Lemma S1.11, Theorems 2.3 and S1.12).

The squared norms of all columns and of all rows both add up to ‖M‖². Therefore, in a square form,
the side with the larger variance of norms has the smaller mean norm: Var‖column‖ > Var‖row‖ if and
only if mean ‖column‖ < mean ‖row‖.

Axes: D width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from wqk.forms import BilinearForm
from wqk.forms.kernels import directionalities
from wqk_lab.theory.evidence import Evidence, LayerUpdate, StatementMeasure, ratio, sample_of
from wqk_lab.theory.verdict import Sample


class Tails(NamedTuple):
    """Comparison of the norms of one form's columns and rows.

    Attributes
    ----------
    log_variance_ratio
        ln(Var‖column‖ / Var‖row‖), positive according to Theorem S1.12.
    reach
        Largest column norm divided by largest row norm; above 1 if a column has the largest norm.
    beyond
        On the side with the largest norm, share of the norms that exceed all norms of the other
        side; Equation 13 holds from the largest norm of the other side on.
    directionality, directionality_excess
        Definition 3.2 as printed, and by the rule of the published tables; negative if columns
        dominate. Each side has a separate threshold.
    """

    log_variance_ratio: float
    reach: float
    beyond: float
    directionality: float
    directionality_excess: float


def tails(form: BilinearForm) -> Tails:
    """Compare the norms of a form's columns and rows; NaN for the zero matrix.

    Examples
    --------
    >>> from wqk.forms import BilinearForm
    >>> column = np.ones((16, 1)); column[3] = 10.0
    >>> one = tails(BilinearForm(np.arange(1.0, 17.0)[:, None], column))
    >>> one.log_variance_ratio > 0, one.beyond, one.directionality
    (True, 0.0625, -1.0)
    """
    columns, rows = _norms(form)
    if not columns.any():
        return Tails(*[math.nan] * len(Tails._fields))
    longest, opposite = columns, rows
    if rows.max() > columns.max():
        longest, opposite = rows, columns
    with np.errstate(divide="ignore", invalid="ignore"):
        log_ratio = float(np.log(columns.var() / rows.var()))
    return Tails(
        log_variance_ratio=log_ratio,
        reach=float(columns.max() / rows.max()),
        beyond=float((longest > opposite.max()).mean()),
        **{name: float(d) for name, d in directionalities(form.moments)._asdict().items()},
    )


def _norms(form: BilinearForm) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(form.column_norms, np.float64), np.asarray(form.row_norms, np.float64)


def tails_of(forms: Mapping[str, Iterable[BilinearForm]], unit: str = "batches") -> Sample:
    """Return the tails of several forms of each layer; each form is one unit.

    Each form is measured before the next is requested, so that an iterator needs memory for one
    form.
    """
    measured = {
        layer: list(map(tails_and_width, forms_of_layer)) for layer, forms_of_layer in forms.items()
    }
    return sample_of_tails(measured, unit)


def tails_and_width(form: BilinearForm) -> tuple[Tails, int]:
    """Return a form's tails, and the larger of its numbers of columns and rows."""
    return tails(form), max(form.shape)


def sample_of_tails(
    measured: Mapping[str, Sequence[tuple[Tails, int]]], unit: str = "batches"
) -> Sample:
    """Make a sample from the tails and widths of each layer's forms, by unit.

    By chance, the ratio of a matrix with independent entries has a standard deviation of 2/√(d −
    1). The layers of one model, and the changes of one run, are not independent, because they share
    the large dimensions of the residual stream.
    """
    numbers: dict[str, list[dict[str, float]]] = {}
    width = 0
    for layer, forms_of_layer in measured.items():
        numbers[layer] = [tails_of_form._asdict() for tails_of_form, _ in forms_of_layer]
        _, width_of_layer = forms_of_layer[0]
        width = max(width, width_of_layer)
    sample = sample_of(numbers, unit)
    chance = 2 / math.sqrt(max(width - 1, 1))
    return replace(sample, chance=chance, one_model=unit != "batches")


def in_updates(evidence: Evidence) -> Sample:
    """Return the tails of Σ_ij β_ij x_i x_jᵀ in each layer, batch by batch."""
    forms = {layer: _forms_of(updates) for layer, updates in evidence.updates.items()}
    return tails_of(forms)


def _forms_of(updates: Sequence[LayerUpdate]) -> Iterator[BilinearForm]:
    """Yield the form of each update, created on demand."""
    for update in updates:
        yield update.form


def in_weights(evidence: Evidence) -> Sample:
    """Return the tails of W_qk in each layer."""
    return tails_of({layer: [form] for layer, form in evidence.forms.items()}, "models")


def in_total(evidence: Evidence) -> Sample:
    """Return the ratios of the columns and rows of each layer's updates, all taken together."""
    measured = {
        layer: list(map(_ratios_in_total, updates)) for layer, updates in evidence.updates.items()
    }
    return sample_of(measured)


def _ratios_in_total(update: LayerUpdate) -> dict[str, float]:
    """Σ‖column‖²/Σ‖row‖² − 1, and the ratio of the mean norms."""
    columns, rows = _norms(update.form)
    squares = ratio((columns**2).sum(), (rows**2).sum()) - 1
    return {"squares": squares, "means": ratio(columns.mean(), rows.mean())}


def lost(samples: Mapping[str, Sample]) -> Sample:
    """Subtract the second of several samples of tails from the first."""
    first, second, *_ = samples.values()
    details = {name: sample.values for name, sample in samples.items()}
    return Sample(first.values - second.values, first.unit, first.layers, details)


def lemma(sample: Sample) -> Sample:
    """Test whether the side with the larger variance has the largest norm, from a sample of tails.

    One unit of either outcome is added (Laplace's rule of succession), because agreement of a few
    updates does not show that nearly all agree.
    """
    wider = sample.values > 0
    agree = np.where(np.isfinite(sample.values), wider == (sample.details["reach"] > 1), np.nan)
    either = np.repeat([[0.0], [1.0]], agree.shape[1], axis=1)
    return Sample(np.concatenate([agree, either]), sample.unit, sample.layers, added=len(either))


RATIO = "ln(Var‖column‖/Var‖row‖)"

MEASURES: dict[str, StatementMeasure] = {
    "in_total": in_total,
    "lemma": lambda evidence: lemma(evidence.once(in_updates)),
    "in_updates": lambda evidence: evidence.once(in_updates),
    "in_weights": in_weights,
}
