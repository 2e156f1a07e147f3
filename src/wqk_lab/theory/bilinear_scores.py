"""Proposition 2.1: scores are a bilinear form; the softmax keeps their order and mixes convexly.

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
    """Return x_i W_h x_jᵀ of every head, (B, H, I, J), without biases, positions and scale."""
    x, y = use.query_input[:, None, None], use.key_input[:, None, None]
    return np.asarray(use.attention.groups(x, y).reshape(use.probabilities.shape))


def form_error(use: LayerGradient) -> float:
    """Return the largest difference of x_i W_h x_jᵀ from q_i · k_j, relative to the largest."""
    plain, heads = plain_scores(use), use.attention.groups
    dense = heads.dense().reshape(-1, *heads.widths)
    from_dense = use.query_input[:, None] @ dense @ use.key_input[:, None].swapaxes(-1, -2)
    return ratio(np.abs(from_dense - plain).max(), np.abs(plain).max())


def attention_error(use: LayerGradient) -> float:
    """Return the largest difference of the model's α from the softmax of scores from weights (S12).

    NaN if the family adds further terms to the scores.
    """
    plan = use.attention.plan
    if plan.position or plan.sinks:
        return float("nan")
    logits = use.attention.logits(use.query_input, use.key_input)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    is_visible = use.probabilities > 0
    visible_exponentials = np.where(is_visible, exponentials, 0)
    softmax = visible_exponentials / visible_exponentials.sum(axis=-1, keepdims=True)
    return float(np.abs(softmax - use.probabilities).max())


def heads_error(use: LayerGradient) -> float:
    """Return the largest relative difference of a layer's scores from the sum over heads (S20)."""
    scores_of_layer = use.attention.form(use.query_input, use.key_input)
    sum_of_heads = plain_scores(use).sum(axis=1)
    difference = np.abs(sum_of_heads - scores_of_layer).max()
    return ratio(difference, np.abs(scores_of_layer).max())


def convexity_error(use: LayerGradient) -> float:
    """Return the largest difference of Σ_j α_ij from 1; a sink takes a share of the sum."""
    return float(np.abs(use.probabilities.sum(axis=-1) - 1).max())


def same_order(use: LayerGradient, *, layer: bool = False) -> float:
    """Return the share of pairs of keys whose order is equal in a form and in attention (S15).

    Each head's form is compared with the attention of the head; with ``layer``, the layer's form,
    Σ_h W_h, is compared with the heads' mean attention.
    """
    scores = plain_scores(use)
    attention = use.probabilities
    if layer:
        scores = scores.mean(axis=1, keepdims=True)
        attention = attention.mean(axis=1, keepdims=True)
    random = np.random.default_rng(0)
    first_key, second_key = random.integers(0, scores.shape[-1], (2, PAIRS))
    score_differences = scores[..., first_key] - scores[..., second_key]
    attention_differences = attention[..., first_key] - attention[..., second_key]
    products = attention_differences * score_differences  # positive if the orders agree
    is_visible = use.probabilities[:, : attention.shape[1]] > 0
    is_counted = is_visible[..., first_key] & is_visible[..., second_key] & (products != 0)
    agreeing = (products > 0).sum(where=is_counted)
    return float(agreeing / max(is_counted.sum(), 1))


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
