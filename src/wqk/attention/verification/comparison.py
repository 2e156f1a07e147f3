"""A model's own attention compared with attention recomputed from the weights as read.

The inputs of a block's query and key projections are recorded while the model runs. From these,
and from weights read from the checkpoint by a family's rules, attention is recomputed::

    softmax(scale · (x_i A_h + a_h) R(i)ᵀ R(j) (y_j B_g + b_g)ᵀ + position, where i may see j)

with norms, clipping, softcap, sinks and a part for positions alone where the model has them.

A wrong tensor, head width, grouping, rotary order or scale gives other numbers than the model's.

Axes: B texts, H query heads, G key heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._console import Shown
from wqk._typing import FilePath
from wqk.attention import attention_plans, load_attention
from wqk.attention.ceilings import ceilings
from wqk.attention.verification.running import run
from wqk.checkpoints import Checkpoint, open_checkpoint, steps_of
from wqk.checkpoints.options import check_options
from wqk.families import Composed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Unpack

    from wqk.attention.factor import Factor
    from wqk.checkpoints import Part, TensorInfo
    from wqk.checkpoints.options import HubOptions
    from wqk.families import AttentionPlan, Norm, Projection, Rotary, Side

# An attention this much farther from uniform than the tolerance tells right weights from wrong.
TELLING = 1e3


@dataclass(frozen=True)
class VerifiedBlock:
    """One application of one block's attention, compared.

    Attributes
    ----------
    stack, kind, layer, application
        Which; ``application`` counts the uses of shared weights from 0.
    difference
        Largest absolute difference of an attention probability; infinite where the weights as read
        do not even fit what the model computes.
    contrast
        Largest distance of the model's own attention from uniform.
    tolerance
        Largest difference that passes.
    largest_score, ceiling
        Largest absolute score of this input, before a cap and what is added for positions, and the
        largest that any input can produce; None where nothing bounds it.
    """

    stack: str
    kind: str
    layer: int
    application: int
    difference: float
    contrast: float
    tolerance: float
    largest_score: float
    ceiling: float | None

    @property
    def ok(self) -> bool:
        """Whether the attention agrees, and is not so uniform that any weights would."""
        return self.difference <= self.tolerance < self.contrast / TELLING


@dataclass(frozen=True, repr=False)
class Verification(Shown):
    """A checkpoint's blocks, compared with the running model.

    Attributes
    ----------
    checkpoint, family
        Names.
    blocks
        One for each application of each block.
    """

    checkpoint: str
    family: str
    blocks: tuple[VerifiedBlock, ...]

    @property
    def ok(self) -> bool:
        """Whether every block agrees."""
        return all(block.ok for block in self.blocks)

    @property
    def difference(self) -> float:
        """Largest difference of all blocks."""
        return max(block.difference for block in self.blocks)

    def _shown(self, width: int) -> Iterator[Any]:
        from wqk.attention.rendering import verification_lines

        return verification_lines(self)


def verify(
    ref: Any,
    *,
    family: FilePath | None = None,
    text: str | None = None,
    tokens: Sequence[int] | None = None,
    length: int = 24,
    seed: int = 0,
    tolerance: float = 1e-9,
    **hub: Unpack[HubOptions],
) -> Verification:
    """Run a model and compare its attention with the one computed from the weights as read.

    Parameters
    ----------
    ref
        A folder as ``save_pretrained`` writes it, or a hub id.
    family
        A family file to use instead of the model type's own.
    text, tokens
        What the model reads: a text for its tokenizer, or token numbers; random tokens otherwise.
    length, seed
        Number of random tokens, and their seed.
    tolerance
        Largest difference of a probability that passes; everything is computed in float64.
    **hub
        ``revision``, ``subfolder``, ``token``, ``cache_dir``, ``local_files_only``.

    Raises
    ------
    UnknownFamily
        No family knows the model, or `transformers` has no code for it.
    CheckpointError
        The checkpoint cannot be read or run, or PyTorch or `transformers` is not installed.

    Examples
    --------
    >>> import wqk
    >>> verify(wqk.demo_model("encoder")).ok
    True
    """
    check_options("verify", hub)
    if isinstance(ref, str | os.PathLike):
        ref = steps_of(os.fspath(ref))[-1]
    checkpoint = _InDoublePrecision(open_checkpoint(ref, **hub))
    plans = attention_plans(checkpoint, family)
    records, seen = run(
        ref, checkpoint, plans, family, text=text, tokens=tokens, length=length, seed=seed, **hub
    )
    blocks = []
    for plan, record in zip(plans, records, strict=True):
        attention_of = _recomputation(checkpoint, plan, seen)
        attention = load_attention(checkpoint, plan, positions=True)
        bounds = ceilings(checkpoint, plan)
        ceiling = None if bounds is None else float(bounds.any_distance.max())
        for application, (x, y, reported, term, mask) in enumerate(record):
            difference, contrast = _compare(attention_of(x, y, term, mask), reported, seen)
            place = (plan.stack, plan.kind, plan.layer, application)
            largest = math.inf
            if math.isfinite(difference):
                products = attention.queries(x) @ attention.keys(y).swapaxes(-1, -2)
                largest = plan.scale * float(np.abs(products).max())
            blocks.append(VerifiedBlock(*place, difference, contrast, tolerance, largest, ceiling))
    return Verification(checkpoint.name, plans[0].family, tuple(blocks))


class _InDoublePrecision(Checkpoint):
    """A checkpoint whose values come as float64, so that folding a norm rounds nothing off."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self.name, self.config = stored.name, stored.config

    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._stored.tensors()

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        return [array.astype(np.float64) for array in self._stored.read(parts)]


def _recomputation(
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
        # A finite number, as in the models: a padded query may have no key in its window.
        return _softmax(np.where(allowed, scores, np.finfo(np.float64).min), sinks)

    return attention_of


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


def _compare(
    expected: np.ndarray | None, reported: np.ndarray, seen: Mapping[int, np.ndarray]
) -> tuple[float, float]:
    """Largest difference of two attentions (B, H, I, J), and the second's from uniform."""
    batch, heads, queries, _ = reported.shape
    rows = seen.get(queries, np.full((batch, queries), True))
    model = reported.swapaxes(1, 2)[rows]
    # Of what is given to the keys: a sink takes a share of its own.
    uniform = model.sum(axis=-1, keepdims=True) / (model > 0).sum(axis=-1, keepdims=True)
    contrast = float(np.where(model > 0, np.abs(model - uniform), 0).max())
    if expected is None or expected.shape[1] != heads:
        return math.inf, contrast
    return float(np.abs(expected.swapaxes(1, 2)[rows] - model).max()), contrast
