"""A block's attention, recomputed from the weights as read and all that its family says.

It is::

    softmax(scale · (x_i A_h + a_h) R(i)ᵀ R(j) (y_j B_g + b_g)ᵀ + position, where i may see j)

with norms, clipping, softcap, sinks and a part for positions alone where the model has them.

Axes: B texts, H query heads, G key heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from wqk.attention import load_attention
from wqk.families import Composed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wqk.attention.factor import Factor
    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan, Norm, Projection, Rotary, Side


# The positions that are added to scores, if any, that need nothing but the distance, and those that
# need the term which the model has computed.
FROM_DISTANCE, FROM_TERM = ("", "alibi", "scaled alibi"), ("relative", "disentangled")

# What is added to the scores of hidden keys is below this; the least that models take is -10,000.
HIDDEN = -5e3


def holds_whole_score(
    plan: AttentionPlan, term: np.ndarray | None, mask: np.ndarray | None
) -> bool:
    """Whether the plan and what was recorded of an application make up its whole score.

    They do not where the plan was guessed, or leaves a term out (``whole_score = false``), or has
    positions that it only names (``rotary, on several axes``), or a term or mask that the model was
    not heard to compute.
    """
    if plan.rule.guess or not plan.rule.score.whole_score:
        return False
    if plan.position == "mask":
        return mask is not None
    return plan.position in FROM_DISTANCE or (plan.position in FROM_TERM and term is not None)


def recomputation(
    checkpoint: Checkpoint, plan: AttentionPlan, seen: Mapping[int, np.ndarray]
) -> Callable[..., np.ndarray | None]:
    """The attention (B, H, I, J) of a block as a function of what went into it."""
    attention = load_attention(checkpoint, plan)
    sinks = checkpoint.read([plan.sinks])[0] if plan.sinks else None

    def vectors(factor: Factor, stack: np.ndarray, apart: Side | None, x: np.ndarray) -> np.ndarray:
        side = factor.side
        result = _add(x[:, None, None] @ stack, factor.bias)
        if side.norm:
            unnormalized = factor.stored_weight.swapaxes(-1, -2).reshape(stack.shape)
            plain = _add(x[:, None, None] @ unnormalized, factor.stored_bias)
            gains = 0 if factor.gain is None else len(factor.gain)
            result = result * _token_scales(plain, gains, side.norm)
        result = _add(result, factor.shift)
        result = result * _latent_scales(checkpoint, side.projection, x)
        if plan.clip is not None:
            result = result.clip(-plan.clip, plan.clip)
        if plan.positional and apart:
            added = _positional(checkpoint, apart.projection, plan.positional.rotary, x)
            added = np.broadcast_to(added, (*result.shape[:-1], added.shape[-1]))
            result = np.concatenate([result, added], axis=-1)
        return plan.rotary.rotate(result, np.arange(x.shape[1])) if plan.rotary else result

    def attention_of(
        x: np.ndarray, y: np.ndarray, term: np.ndarray | None, mask: np.ndarray | None
    ) -> np.ndarray | None:
        heads, apart = attention.heads, plan.positional
        if (x.shape[-1], y.shape[-1]) != heads.shape:
            return None
        queries = vectors(attention.query, heads.query, apart.query if apart else None, x)
        keys = vectors(attention.key, heads.key, apart.key if apart else None, y)
        scores = plan.scale * queries @ keys.swapaxes(-1, -2)
        scores = scores.reshape(len(x), -1, x.shape[1], y.shape[1])
        if mask is not None and not _broadcasts(mask, scores):
            return None
        if plan.softcap:
            scores = plan.softcap * np.tanh(scores / plan.softcap)
        distance = np.arange(x.shape[1])[:, None] - np.arange(y.shape[1])
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
        allowed = _allowed(plan, distance)
        if y.shape[1] in seen:
            allowed = allowed & seen[y.shape[1]][:, None, None, :]
        elif mask is not None:  # what no query may see is padding
            allowed = allowed & (mask > HIDDEN).any(axis=-2, keepdims=True)
        # A finite number, as in the models: a padded query may have no key in its window.
        return _softmax(np.where(allowed, scores, np.finfo(np.float64).min), sinks)

    return attention_of


def _broadcasts(mask: np.ndarray, scores: np.ndarray) -> bool:
    """Whether a mask (B or 1, H or 1, I or 1, J or 1) can be added to scores (B, H, I, J)."""
    return all(m in (1, n) for m, n in zip(mask.shape, scores.shape, strict=True))


def _latent_scales(
    checkpoint: Checkpoint, projection: Projection | Composed, x: np.ndarray
) -> np.ndarray:
    """The factor by which a latent's norm scales each token of x (B, N, D); 1 without one."""
    if not isinstance(projection, Composed):
        return np.ones(())
    inner = projection.inner
    latent = x @ inner.take(*checkpoint.read([inner.part]))[0].T
    return _token_scales(latent[:, None, None], latent.shape[-1], projection.norm)


def _positional(
    checkpoint: Checkpoint, projection: Projection | Composed, rotary: Rotary, x: np.ndarray
) -> np.ndarray:
    """The dimensions of queries or keys that hold positions alone, (B, heads, 1, N, P), turned."""
    parts = list(projection.roles.values())
    weight = projection.weight(dict(zip(parts, checkpoint.read(parts), strict=True)))
    vectors = x[:, None, None] @ weight[:, None].swapaxes(-1, -2)
    vectors = vectors * _latent_scales(checkpoint, projection, x)
    return rotary.rotate(vectors, np.arange(x.shape[1]))


def _add(vectors: np.ndarray, addend: np.ndarray | None) -> np.ndarray:
    """Add (heads, R) to (B, G, heads/G, N, R)."""
    if addend is None:
        return vectors
    _, groups, _, _, width = vectors.shape
    return np.asarray(vectors + addend.reshape(groups, -1, 1, width))


def _token_scales(vectors: np.ndarray, gains: int, norm: Norm) -> np.ndarray:
    """What a norm multiplies each token by, of vectors (B, G, heads/G, N, R) not yet normalized.

    It goes over one head's width, or over all heads where it has as many gains.
    """
    alone = gains in (0, vectors.shape[-1]) or norm.alone
    axes = (-1,) if alone else (1, 2, -1)
    if norm.kind == "layer":
        vectors = vectors - vectors.mean(axis=axes, keepdims=True)
    squares = (vectors**2).mean(axis=axes, keepdims=True)
    return np.asarray((squares + norm.epsilon) ** -0.5)


def _alibi(heads: int, distance: np.ndarray) -> np.ndarray:
    """Linear biases (H, I, J): the distance times a slope for each head (Press et al., 2022)."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    slopes += [2 ** (-4 * (2 * n + 1) / power) for n in range(heads - power)]
    return np.asarray(-np.asarray(slopes)[:, None, None] * np.abs(distance))


def _allowed(plan: AttentionPlan, distance: np.ndarray) -> np.ndarray:
    """Which keys a query may attend to, (I, J), of distances i − j."""
    allowed = distance >= 0 if plan.causal else np.full(distance.shape, True)
    if plan.window is not None and plan.window.isdigit():
        # One-sided windows count the token itself; two-sided ones give half to either side.
        size = int(plan.window)
        allowed &= distance < size if plan.causal else np.abs(distance) <= size // 2
    return allowed


def _softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Probabilities of scores (B, H, I, J); sinks (H,) take their share and are left out."""
    if sinks is None:
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
    column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    return _softmax(np.concatenate([scores, column], axis=-1), None)[..., :-1]
