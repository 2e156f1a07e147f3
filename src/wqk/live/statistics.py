"""Statistics of attention by head: of logits over visible pairs, of weights over tokens.

Axes: B sequences, H query heads, I queries, J keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._typing import Float
from wqk.live.calls import ObservedCall, Tile

if TYPE_CHECKING:
    import torch


class BlockLogits(NamedTuple):
    """Logits and attention of one block, for each query head (H,)."""

    max_logit: Float[np.ndarray, " heads"]  #: The largest logit; NaN if one of them is.
    logit_std: Float[np.ndarray, " heads"]  #: Standard deviation of the logits.
    attention_entropy: Float[np.ndarray, " heads"]  #: Mean over tokens, in nats.
    attention_top_share: Float[np.ndarray, " heads"]  #: Mean of a token's largest weight.
    extreme_logit: Float[np.ndarray, " heads"]  #: The logit of largest magnitude, with its sign.
    #: Mean weight of the first token; NaN if the keys are those around each query (Longformer).
    first_token_share: Float[np.ndarray, " heads"]

    def of_layer(self) -> dict[str, float]:
        """Values of the layer: the largest logit, the most extreme one, and means over heads."""
        means = {name: float(np.mean(getattr(self, name))) for name in self._fields}
        extreme = int(np.argmax(np.abs(self.extreme_logit)))
        return means | {
            "max_logit": float(np.max(self.max_logit)),
            "extreme_logit": float(self.extreme_logit[extreme]),
        }

    def of_head(self, head: int) -> dict[str, float]:
        """Values of one head."""
        return {name: float(values[head]) for name, values in self._asdict().items()}


class HeadStatistics:
    """Running statistics of one block's attention, for each head, in float64 on the device."""

    def __init__(self, heads: int, device: Any) -> None:
        import torch

        def zeros() -> torch.Tensor:
            return torch.zeros(heads, dtype=torch.float64, device=device)

        self._largest, self._smallest = zeros() - math.inf, zeros() + math.inf
        self._pairs, self._mean, self._squares = zeros(), zeros(), zeros()
        self._rows, self._entropy, self._top, self._first = zeros(), zeros(), zeros(), zeros()

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self._pairs)

    @property
    def largest(self) -> torch.Tensor:
        """The largest logit of each head, (H,); −∞ before any was seen."""
        return self._largest

    def add(self, call: ObservedCall, is_self: bool = True) -> None:
        """Add the attention of a call with the axes (B, H, I, J).

        Parameters
        ----------
        is_self
            Whether queries and keys belong to the same tokens: a key that no query may see is then
            padding, and the query in its place does not count.
        """
        import torch

        batch, _, queries, keys = call.shape
        shown = call.visible_keys()
        first = None if shown is None else shown.long().argmax(-1).expand(batch)
        tokens = shown if is_self and queries == keys else None
        if call.is_relative:
            tokens = None
            self._first.fill_(math.nan)
        for tile in call.tiles():
            rows = None
            if tokens is not None:
                own_tokens = tokens if len(tokens) == 1 else tokens[tile.sequences]
                rows = own_tokens[:, None, tile.rows, None]
            visible = tile.visible
            if rows is not None:
                visible = rows if visible is None else visible & rows
            start = None if first is None else first[tile.sequences]
            self._add_logits(tile.logits, visible)
            counted = torch.ones((), dtype=torch.bool, device=tile.logits.device)
            counted = counted if visible is None else visible.any(-1)
            self._add_weights(tile, counted, start)

    def _add_logits(self, logits: torch.Tensor, visible: torch.Tensor | None) -> None:
        """Add logits (B, H, I, J); hidden pairs do not count."""
        import torch

        over = (0, 2, 3)
        if visible is None:
            pairs = torch.full_like(self._pairs, logits.numel() / self.heads)
            total = logits.sum(-1).sum((0, 2), dtype=torch.float64)
        else:
            pairs = _by_head(visible, logits.shape)
            total = logits.masked_fill(~visible, 0).sum(-1).sum((0, 2), dtype=torch.float64)
        mean = total / pairs.clip(min=1)
        # Hidden pairs get the mean, which is neither below the least nor above the largest.
        centered = logits - mean.to(logits.dtype)[:, None, None]
        if visible is not None:
            centered.masked_fill_(~visible, 0)
        remainder = centered.sum(-1).sum((0, 2), dtype=torch.float64)
        squares = centered.square().sum(-1).sum((0, 2), dtype=torch.float64)
        seen = pairs > 0
        high = centered.amax(over).double() + mean.to(logits.dtype).double()
        low = centered.amin(over).double() + mean.to(logits.dtype).double()
        self._largest = torch.maximum(self._largest, high.where(seen, -math.inf))
        self._smallest = torch.minimum(self._smallest, low.where(seen, math.inf))
        mean = mean.to(logits.dtype).double() + remainder / pairs.clip(min=1)
        self._join(pairs, mean, squares - remainder.square() / pairs.clip(min=1))

    def _add_weights(self, tile: Tile, counted: torch.Tensor, first: torch.Tensor | None) -> None:
        """Add the attention of the rows that count, (B, H, I) or broadcast to it."""
        import torch

        if tile.weights is None:
            entropy, top, share = _of_scores(tile.scores, first)
        else:
            entropy, top, share = _of_weights(tile.weights, first)
        counted = counted.expand(entropy.shape)
        self._rows += counted.sum((0, 2))
        for name, values in (("_entropy", entropy), ("_top", top), ("_first", share)):
            total = values.masked_fill(~counted, 0).sum((0, 2), dtype=torch.float64)
            setattr(self, name, getattr(self, name) + total)

    def _join(self, pairs: torch.Tensor, mean: torch.Tensor, squares: torch.Tensor) -> None:
        """Join counts, means and squares around the mean with those so far (Chan et al.)."""
        every = (self._pairs + pairs).clip(min=1)
        gap = mean - self._mean
        self._mean = self._mean + gap * pairs / every
        self._squares = self._squares + squares + gap.square() * self._pairs * pairs / every
        self._pairs = self._pairs + pairs

    def merge(self, other: HeadStatistics) -> None:
        """Add the statistics of another pass."""
        import torch

        self._largest = torch.maximum(self._largest, other._largest)
        self._smallest = torch.minimum(self._smallest, other._smallest)
        self._join(other._pairs, other._mean, other._squares)
        self._rows = self._rows + other._rows
        self._entropy = self._entropy + other._entropy
        self._top = self._top + other._top
        self._first = self._first + other._first

    def result(self) -> BlockLogits:
        """Return the statistics, on the host."""
        extreme = self._largest.where(self._largest.abs() >= self._smallest.abs(), self._smallest)
        values = (
            self._largest,
            (self._squares / self._pairs).clip(min=0).sqrt(),
            self._entropy / self._rows,
            self._top / self._rows,
            extreme.where(~self._largest.isnan(), self._largest),
            self._first / self._rows,
        )
        return BlockLogits(*(value.cpu().numpy() for value in values))


def _by_head(visible: torch.Tensor, shape: Any) -> torch.Tensor:
    """Return number of visible pairs of each head (H,)."""
    import torch

    count = visible.sum((0, 2, 3), dtype=torch.float64)
    repeats = 1
    for axis in (0, 2, 3):
        if visible.shape[axis] == 1:
            repeats *= shape[axis]
    return (count * repeats).expand(shape[1])


def _of_weights(
    weights: torch.Tensor, first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entropy, largest weight and the first token's weight of each row, (B, H, I)."""
    import torch

    return torch.special.entr(weights).sum(-1), weights.amax(-1), _at(weights, first)


def _of_scores(
    scores: torch.Tensor, first: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the same from scores, of which hidden ones are −∞."""
    highest = scores.amax(-1, keepdim=True).clamp(min=-1e300 if scores.itemsize > 4 else -1e38)
    below = (scores - highest).clamp_(min=-1e4)
    parts = below.exp()
    total = parts.sum(-1)
    entropy = total.log() - below.mul_(parts).sum(-1) / total
    return entropy, 1 / total, _at(parts, first) / total


def _at(weights: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """Weights of the first token (B, H, I), whose place may differ between sequences."""
    if first is None:
        return weights[..., 0]
    place = first[:, None, None, None].expand(*weights.shape[:-1], 1)
    return weights.gather(-1, place)[..., 0]
