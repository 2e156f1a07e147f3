"""A block's attention, recomputed from the weights as read and all that its family says.

It is::

    softmax(scale · (x_i A_h + a_h) R(i)ᵀ R(j) (y_j B_g + b_g)ᵀ + position, where i may see j)

with norms, clipping, softcap, sinks and a part for positions alone where the model has them.

Axes: B texts, H query heads, G key heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from wqk._typing import Array
from wqk.attention import Block
from wqk.families import AttentionPlan

if TYPE_CHECKING:
    from wqk.inspecting.verification.recording import Application

# Positions added to scores that follow from the distance, or need the term that the model computed.
FROM_DISTANCE, FROM_TERM = ("", "alibi", "scaled alibi"), ("relative", "disentangled")

# Masks add less than this to the scores of hidden keys; models use -10,000 or less.
HIDDEN = -5e3


def holds_whole_score(plan: AttentionPlan, application: Application) -> bool:
    """Whether the plan and what was recorded of an application make up its whole score.

    They do not if the plan was guessed, leaves a term out (``whole_score = false``), or only names
    its positions (``rotary, on several axes``), or if a term or mask was not recorded.
    """
    if plan.rule.guess or not plan.rule.whole_score:
        return False
    if plan.position == "mask":
        return application.mask is not None
    has_term = application.term is not None
    return plan.position in FROM_DISTANCE or (plan.position in FROM_TERM and has_term)


def recomputed(
    block: Block,
    products: np.ndarray,
    application: Application,
    seen: Mapping[int, np.ndarray],
    sinks: np.ndarray | None,
) -> np.ndarray | None:
    """The attention (B, H, I, J) of a block, from the products q·k of what went into it.

    None if what the model added to its scores does not fit the products.
    """
    plan, term, mask = block.plan, application.term, application.mask
    scores = block.scores(products)
    sizes = () if mask is None else zip(mask.shape, scores.shape, strict=True)
    if any(given not in (1, size) for given, size in sizes):
        return None
    distance = np.arange(scores.shape[-2])[:, None] - np.arange(scores.shape[-1])
    if plan.position.endswith("alibi"):
        biases = _alibi(scores.shape[1], distance)
        scores = scores + (plan.scale * biases if plan.position == "scaled alibi" else biases)
        if plan.position == "scaled alibi" and mask is not None:
            scores = scores + mask  # Falcon, when it reports its attention, adds them twice
    elif plan.position:
        if term is not None and term.size not in (scores.size, scores[0].size):
            return None
        if term is not None:
            scores = scores + term.reshape(-1, *scores.shape[1:])
        if mask is not None:
            scores = scores + mask
    shown = allowed(plan, distance)
    if scores.shape[-1] in seen:
        shown = shown & seen[scores.shape[-1]][:, None, None, :]
    elif mask is not None:  # what no query may see is padding
        shown = shown & (mask > HIDDEN).any(axis=-2, keepdims=True)
    # A finite number, as in models: a padded query may have no key in its window.
    return _softmax(np.where(shown, scores, np.finfo(np.float64).min), sinks)


def alibi_slopes(heads: int) -> np.ndarray:
    """What the score of each head (H,) loses with every token of distance (Press et al., 2022).

    Examples
    --------
    >>> alibi_slopes(2)
    array([0.0625    , 0.00390625])
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    slopes += [2 ** (-4 * (2 * n + 1) / power) for n in range(heads - power)]
    return np.asarray(slopes)


def _alibi(heads: int, distance: np.ndarray) -> np.ndarray:
    """Linear biases (H, I, J)."""
    return np.asarray(-alibi_slopes(heads)[:, None, None] * np.abs(distance))


def allowed(plan: AttentionPlan, distance: Array) -> Array:
    """Which keys a query may attend to, (I, J), of distances i − j in NumPy or PyTorch."""
    seen = distance >= 0 if plan.causal else distance == distance
    if plan.window is not None and plan.window.isdigit():
        # One-sided windows count the token itself; two-sided ones give half to either side.
        size = int(plan.window)
        seen = seen & (distance < size if plan.causal else abs(distance) <= size // 2)
    return seen


def _softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Probabilities of scores (B, H, I, J); sinks (H,) take their share and are left out."""
    if sinks is None:
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
    column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    return _softmax(np.concatenate([scores, column], axis=-1), None)[..., :-1]
