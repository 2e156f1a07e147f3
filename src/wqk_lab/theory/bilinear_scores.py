"""Proposition 2.1: scores are a bilinear form, whose order the softmax keeps, and mix convexly.

Axes: B batch, H query heads, G key heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

import numpy as np

from wqk_lab.theory.evidence import Evidence, StatementMeasure, of_layers, ratio
from wqk_lab.theory.gradients import LayerGradient
from wqk_lab.theory.verdict import Sample

# How many pairs of keys estimate the share that is ordered alike, for each query.
PAIRS = 256


def plain_scores(use: LayerGradient) -> np.ndarray:
    """x_i W_h x_jᵀ of every head, (B, H, I, J), without biases, positions and scale."""
    x, y = use.query_input[:, None, None], use.key_input[:, None, None]
    return np.asarray(use.attention.groups(x, y).reshape(use.probabilities.shape))


def form_error(use: LayerGradient) -> float:
    """Largest difference of x_i W_h x_jᵀ, with W_h built, from q_i · k_j, over the largest."""
    plain, heads = plain_scores(use), use.attention.groups
    dense = heads.dense().reshape(-1, *heads.widths)
    from_dense = use.query_input[:, None] @ dense @ use.key_input[:, None].swapaxes(-1, -2)
    return ratio(np.abs(from_dense - plain).max(), np.abs(plain).max())


def attention_error(use: LayerGradient) -> float:
    """Largest difference of the model's α from the softmax of the scores from its weights (S12).

    NaN where the family adds terms of its own to the scores.
    """
    plan, shares = use.attention.plan, use.probabilities
    if plan.position or plan.sinks:
        return float("nan")
    logits = use.attention.logits(use.query_input, use.key_input)
    weights = np.where(shares > 0, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
    return float(np.abs(weights / weights.sum(axis=-1, keepdims=True) - shares).max())


def heads_error(use: LayerGradient) -> float:
    """Largest relative difference of the layer's scores from the sum of its heads' (S20)."""
    layer = use.attention.form(use.query_input, use.key_input)
    return ratio(np.abs(plain_scores(use).sum(axis=1) - layer).max(), np.abs(layer).max())


def convexity_error(use: LayerGradient) -> float:
    """Largest difference of Σ_j α_ij from 1, which a sink takes a share of."""
    return float(np.abs(use.probabilities.sum(axis=-1) - 1).max())


def same_order(use: LayerGradient, *, layer: bool = False) -> float:
    """Return the share of the pairs of keys that a form orders as attention does (S15).

    Each head's form is compared with its own attention; with ``layer``, the layer's form, Σ_h W_h,
    with the heads' mean attention.
    """
    scores, shares = plain_scores(use), use.probabilities
    if layer:
        scores, shares = (a.mean(axis=1, keepdims=True) for a in (scores, shares))
    random = np.random.default_rng(0)
    first_key, second_key = random.integers(0, scores.shape[-1], (2, PAIRS))
    products = (shares[..., first_key] - shares[..., second_key]) * (
        scores[..., first_key] - scores[..., second_key]
    )
    visible = use.probabilities[:, : shares.shape[1]] > 0
    counted = visible[..., first_key] & visible[..., second_key] & (products != 0)
    return float((products > 0).sum(where=counted) / max(counted.sum(), 1))


def _convex(evidence: Evidence) -> Sample:
    def measure(use: LayerGradient, index: int) -> dict[str, float]:
        mixing = evidence.mixing_errors[evidence.label(use.attention.plan)][index]
        return _with_largest(convexity=convexity_error(use), mixing=mixing)

    return evidence.sample(measure)


def _with_largest(**errors: float) -> dict[str, float]:
    return {"largest": float(np.nanmax([*errors.values()])), **errors}


MEASURES: dict[str, StatementMeasure] = {
    "bilinear": of_layers(
        lambda use: _with_largest(form=form_error(use), attention=attention_error(use))
    ),
    "order": of_layers(lambda use: {"alike": same_order(use)}),
    "convex": _convex,
    "heads": of_layers(lambda use: {"largest": heads_error(use)}),
    "order_of_layer": of_layers(lambda use: {"alike": same_order(use, layer=True)}),
}
