"""Steps of an optimizer: rows and columns of the actual change of W_qk.

Adam's first step moves every weight by the sign of its gradient, and later steps are similar. The
gradient of W_q is Σ_i x_i (Σ_j β_ij k_j): the mean of the inputs adds a common part to its rows,
which signs amplify. In the gradient of W_k, Σ_j x_j (Σ_i β_ij q_i), the mean cancels, because every
row of β sums to 0. Therefore the two factors change differently, for any objective.

Statements on a run are measured on the changes between its saved steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from wqk._typing import Array, Float
from wqk.forms import BilinearForm
from wqk_lab.theory.evidence import Evidence, cosine, sample_of
from wqk_lab.theory.gradients import LayerGradient
from wqk_lab.theory.tails import Tails, lost, sample_of_tails, tails_and_width, tails_of
from wqk_lab.theory.updates import first_order
from wqk_lab.theory.verdict import Sample

StepKind = Literal["gradient", "descent", "signs", "centered"]


def steps(gradient: LayerGradient, mean: Float[Array, " d"]) -> dict[StepKind, BilinearForm]:
    """Return the first-order change of a layer's form in one step of several kinds.

    ``gradient``: a step of the form, Σ_ij β_ij x_i x_jᵀ. ``descent``: a step of the factors, by
    plain gradient descent. ``signs``: a step of the factors, by the signs of their gradients.
    ``centered``: by signs, with the ``mean`` of the layer's inputs, (D,), subtracted in the
    gradient of W_q.

    Examples
    --------
    >>> from wqk_lab.theory.gradients import example
    >>> gradient = example()
    >>> list(steps(gradient, gradient.query_input.mean(axis=(0, 1))))
    ['gradient', 'descent', 'signs', 'centered']
    """
    query, key = gradient.factor_gradients()
    centered, _ = replace(gradient, query_input=gradient.query_input - mean).factor_gradients()

    step = partial(first_order, gradient.attention)
    return {
        "gradient": gradient.by_prediction(),
        "descent": step(query, key),
        "signs": step(np.sign(query), np.sign(key)),
        "centered": step(np.sign(centered), np.sign(key)),
    }


def tails_of_steps(evidence: Evidence) -> dict[StepKind, Sample]:
    """Return the tails of every kind of step of each layer on each batch.

    The steps of all layers and batches are several times larger than the model. Therefore each step
    is measured before the next is computed.
    """
    tails_by_kind: dict[StepKind, dict[str, list[tuple[Tails, int]]]] = {}
    for label, gradients_of_layer in evidence.by_layer.items():
        means_of_batches = [g.query_input.mean(axis=(0, 1)) for g in gradients_of_layer]
        mean = np.mean(means_of_batches, axis=0)
        for gradient in gradients_of_layer:
            for kind, form in steps(gradient, mean).items():
                tails_by_layer = tails_by_kind.setdefault(kind, {})
                tails_by_layer.setdefault(label, []).append(tails_and_width(form))
    return {kind: sample_of_tails(by_layer) for kind, by_layer in tails_by_kind.items()}


@dataclass(frozen=True)
class Moment:
    """A saved step of a run: each layer's form, and a step by the signs of its gradient."""

    forms: Mapping[str, BilinearForm]
    signs: Mapping[str, BilinearForm]


def moment(evidence: Evidence) -> Moment:
    """Return the moment of a subject, which is a saved step of a run."""
    signs = {}
    for label, gradients_of_layer in evidence.by_layer.items():
        factor_gradients = [gradient.factor_gradients() for gradient in gradients_of_layer]
        query_gradients, key_gradients = zip(*factor_gradients, strict=True)
        query_signs = np.sign(np.sum(query_gradients, axis=0))
        key_signs = np.sign(np.sum(key_gradients, axis=0))
        attention = gradients_of_layer[0].attention
        signs[label] = first_order(attention, query_signs, key_signs)
    return Moment(evidence.forms, signs)


def changes(moments: Sequence[Moment]) -> dict[str, list[BilinearForm]]:
    """Return the changes of each layer's form from one saved step to the next."""
    changes_by_layer: dict[str, list[BilinearForm]] = {layer: [] for layer in moments[0].forms}
    for before, after in pairwise(moments):
        for layer, changes_of_layer in changes_by_layer.items():
            changes_of_layer.append(after.forms[layer].difference(before.forms[layer]))
    return changes_by_layer


def along_the_signs(moments: Sequence[Moment]) -> Sample:
    """Return the cosine of each change and the step by signs before it; NaN without a change."""
    measured = {}
    for layer, changes_of_layer in changes(moments).items():
        pairs = zip(changes_of_layer, moments[:-1], strict=True)
        measured[layer] = [
            {"cosine": cosine(change, before.signs[layer])} for change, before in pairs
        ]
    return sample_of(measured, "changes")


def _columns(evidence: Evidence, kind: StepKind) -> Sample:
    return evidence.once(tails_of_steps)[kind]


MEASURES: dict[str, Callable[[Any], Sample]] = {
    # Of a run, measured on its saved steps.
    "changes": lambda moments: tails_of(changes(moments), "changes"),
    "along_the_signs": along_the_signs,
    "descent": lambda evidence: _columns(evidence, "descent"),
    "signs": lambda evidence: _columns(evidence, "signs"),
    "centering": lambda evidence: lost(
        {kind: _columns(evidence, kind) for kind in ("signs", "centered")}
    ),
}
