"""Effect of the softmax, which the proof of Proposition 2.2 ignores.

Without the softmax (S33), the coefficient of a pair is e_ij = δ_iᵀ x_j (S31, S35, with values and
W_o in δ). The rows of the exact β (see `wqk_lab.theory.gradients`) sum to 0: a gain from one
context token is a loss from the others, and a context token with the average error of all visible
tokens does not contribute.

Axes: B batch, H query heads, N tokens (I queries, J keys).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from wqk.forms.scores import symmetry
from wqk_lab.theory.evidence import Evidence, StatementMeasure, cosine, of_layers, ratio, sample_of
from wqk_lab.theory.gradients import LayerGradient
from wqk_lab.theory.updates import parameter_gradients, queries_and_keys_alone
from wqk_lab.theory.verdict import Sample


def softmax_effect(gradient: LayerGradient) -> dict[str, float]:
    """Compare a layer's exact β with the coefficients derived without the softmax.

    Over all heads and all visible pairs: the ``cosine`` of the two sets of coefficients;
    ``agreement``, the share of pairs with equal signs; ``row_sums``, the largest sum of a row of β
    divided by the largest sum of absolute values; and the ``cosine_of_forms`` and symmetries of the
    two sums Σ β_ij K_ij and Σ e_ij K_ij.

    Examples
    --------
    >>> from wqk_lab.theory.gradients import example
    >>> effect = softmax_effect(example())
    >>> effect["row_sums"] < 1e-5, -1 <= effect["cosine"] <= 1
    (True, True)
    """
    visible = gradient.probabilities > 0
    without_softmax = replace(gradient, beta=np.where(visible, gradient.error, 0))
    beta = gradient.beta[visible].astype(np.float64)
    error = without_softmax.beta[visible].astype(np.float64)
    products = beta * error
    row_sums = np.abs(gradient.beta.sum(-1))
    absolute_row_sums = np.abs(gradient.beta).sum(-1)
    form = gradient.by_prediction()
    form_without = without_softmax.by_prediction()
    return {
        "cosine": ratio(beta @ error, np.sqrt((beta @ beta) * (error @ error))),
        "agreement": ratio((products > 0).sum(), (products != 0).sum()),
        "row_sums": ratio(row_sums.max(), absolute_row_sums.max()),
        "cosine_of_forms": cosine(form, form_without),
        "symmetry": float(symmetry(form)),
        "symmetry_without": float(symmetry(form_without)),
    }


def _against_autograd(evidence: Evidence) -> Sample:
    """Compare the factors' gradients from β with a backward pass, on one batch."""
    model = evidence.subject.model
    plans = [plan for plan in evidence.plans if plan.kind == "self"]
    batch: dict[str, Any] = evidence.batches[0]
    texts = len(batch["input_ids"])
    model.zero_grad(set_to_none=True)
    with queries_and_keys_alone(model, plans):
        for number in range(texts):
            text = {name: values[number : number + 1] for name, values in batch.items()}
            (model(**text).loss / texts).backward()
        exact = dict(
            zip(map(evidence.label, plans), parameter_gradients(model, plans), strict=True)
        )
    model.zero_grad(set_to_none=True)
    errors = {}
    for label, batches in evidence.by_layer.items():
        sides = zip(batches[0].factor_gradients(), exact[label], strict=True)
        largest = max(ratio(np.linalg.norm(a - b), np.linalg.norm(b)) for a, b in sides)
        errors[label] = [{"largest": largest}]
    return sample_of(errors)


MEASURES: dict[str, StatementMeasure] = {
    "against_autograd": _against_autograd,
    "effect": of_layers(softmax_effect),
}
