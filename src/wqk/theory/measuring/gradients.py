"""Proposition 2.2 on a model's own loss, and what its proof leaves out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqk.theory.finding import Finding, Verdict
from wqk.theory.measuring.rows import by_layer, rows_of, span
from wqk.theory.products import cosine
from wqk.theory.softmax import softmax_effect
from wqk.theory.updates import parameter_gradients

if TYPE_CHECKING:
    from wqk.theory.gradients import LayerGradient
    from wqk.theory.measuring.evidence import Evidence
    from wqk.theory.measuring.rows import Row

# What may be rounding, of a gradient in float32.
ROUNDING = 1e-3

# Cosines of what stands for the same, and of what at least points the same way.
SAME, ALIKE = 0.99, 0.5


def measure_gradients(evidence: Evidence) -> list[Finding]:
    """The sum of rank-1 matrices against autograd, and β against the proof's coefficients."""
    return [_sum_of_outer_products(evidence), _without_softmax(evidence)]


def _sum_of_outer_products(evidence: Evidence) -> Finding:
    rows = tuple(_against_autograd(evidence))
    errors = [max(row["query"], row["key"], row["groupings"]) for row in rows]
    return Finding(
        "Proposition 2.2: the gradient of W_qk is Σ_ij β_ij x_iᵀ x_j",
        "β is the gradient of the loss with respect to the scores, softmax included",
        "W_q and W_k have the gradients that β implies; S8 and S9 are one sum",
        f"relative difference from autograd {max(errors):.0e} at most, over "
        f"{len({row['layer'] for row in rows})} layers",
        "holds" if max(errors) < ROUNDING else "fails",
        rows,
    )


def _against_autograd(evidence: Evidence) -> list[Row]:
    """The first batch: implied gradients of the factors beside those of a backward pass."""
    model = evidence.subject.model
    model.zero_grad(set_to_none=True)
    model(**evidence.batches[0]).loss.backward()
    found = parameter_gradients(model, evidence.layers)
    model.zero_grad(set_to_none=True)
    uses: dict[tuple[str, str, int], list[LayerGradient]] = {}
    for layer in evidence.gradients[0]:
        plan = layer.attention.plan
        uses.setdefault((plan.stack, plan.kind, plan.layer), []).append(layer)
    rows = []
    for ((stack, kind, number), layers), (query, key) in zip(uses.items(), found, strict=True):
        implied = [layer.factor_gradients() for layer in layers]
        errors = [
            _difference(sum(one[side] for one in implied), own)
            for side, own in enumerate((query, key))
        ]
        two = [1 - cosine(one.by_prediction(), one.by_context()) for one in layers]
        row = {"stack": stack, "kind": kind, "layer": number}
        rows.append({**row, "query": errors[0], "key": errors[1], "groupings": max(two)})
    return rows


def _difference(found: np.ndarray | int, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def _without_softmax(evidence: Evidence) -> Finding:
    rows = rows_of(evidence.gradients, softmax_effect)
    cosines = by_layer(rows, "cosine")
    verdict: Verdict = (
        "holds" if cosines.min() > SAME else "holds in part" if cosines.min() > ALIKE else "fails"
    )
    return Finding(
        "Proof of Proposition 2.2, Equations S33-S36: scores taken for attention, no softmax",
        "leaving out the softmax changes no more than the scale of β",
        "β_ij ∝ δ_iᵀ x_j",
        f"cosine {span(rows, 'cosine')}, one sign in {span(rows, 'agreement', '.0%')} of the "
        f"pairs; of the two updates, cosine {span(rows, 'cosine_of_forms')}; rows of the exact β "
        f"sum to 0 (to {max(row['row_sums'] for row in rows):.0e})",
        verdict,
        rows,
    )
