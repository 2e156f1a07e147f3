"""Statistics of attention by head: of logits over visible pairs, and of weights over tokens.

Axes: B sequences, H query heads, I queries, J keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._typing import Float
from wqk.live.calls import ObservedCall, Tile, both_visible, of_sequences

if TYPE_CHECKING:
    import torch


# Hidden pairs are taken for logits of minus this number.
HIDDEN_AT = 1e30

# The axes of the rows of each head: sequences and queries of (B, H, I).
ALL_ROWS = (0, 2)


class BlockLogits(NamedTuple):
    """Logits and attention of one block, for each query head (H,)."""

    max_logit: Float[np.ndarray, " heads"]  #: The largest logit; NaN if any logit is NaN.
    logit_std: Float[np.ndarray, " heads"]  #: Standard deviation of the logits.
    attention_entropy: Float[np.ndarray, " heads"]  #: Mean over tokens, in nats.
    attention_top_share: Float[np.ndarray, " heads"]  #: Mean of a token's largest weight.
    extreme_logit: Float[np.ndarray, " heads"]  #: The logit of largest magnitude, with its sign.
    #: Mean weight of the first token; NaN if the keys are those around each query (Longformer).
    first_token_share: Float[np.ndarray, " heads"]

    def of_layer(self) -> dict[str, float]:
        """Return values of the layer: largest logit, most extreme logit, and means over heads."""
        means = {name: float(np.mean(getattr(self, name))) for name in self._fields}
        extreme = int(np.argmax(np.abs(self.extreme_logit)))
        return means | {
            "max_logit": float(np.max(self.max_logit)),
            "extreme_logit": float(self.extreme_logit[extreme]),
        }

    def of_head(self, head: int) -> dict[str, float]:
        """Return values of one head."""
        return {name: float(values[head]) for name, values in self._asdict().items()}


class Shares(NamedTuple):
    """Attention of each row, (B, H, I): entropy, largest weight, and weight of the first token."""

    entropy: torch.Tensor
    largest: torch.Tensor
    first: torch.Tensor


class HeadStatistics:
    """Running statistics of one block's attention, for each head, in float64 on the device."""

    def __init__(self, heads: int, device: Any) -> None:
        import torch

        def each_head(value: float) -> torch.Tensor:
            return torch.full((heads,), value, dtype=torch.float64, device=device)

        # Of the logits of visible pairs: their number, mean, and squares around the mean.
        self._largest = each_head(-math.inf)
        self._smallest = each_head(math.inf)
        self._pairs = each_head(0.0)
        self._mean = each_head(0.0)
        self._squares = each_head(0.0)
        # Of the rows with a visible pair: their number, and sums over them.
        self._rows = each_head(0.0)
        self._entropy = each_head(0.0)
        self._top = each_head(0.0)
        self._first = each_head(0.0)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self._pairs)

    @property
    def largest(self) -> torch.Tensor:
        """The largest logit of each head, (H,); −∞ without logits."""
        return self._largest

    def add(self, call: ObservedCall, is_self: bool = True) -> None:
        """Add the attention of a call with the axes (B, H, I, J).

        Parameters
        ----------
        call
            The attention.
        is_self
            Whether queries and keys belong to the same tokens. A key that is hidden from all
            queries is then padding, and the query of this token does not count.
        """
        batch, _, queries, keys = call.shape
        visible_keys = call.visible_keys()
        first_tokens = None
        if visible_keys is not None:
            first_tokens = visible_keys.long().argmax(-1).expand(batch)
        tokens = visible_keys if is_self and queries == keys else None  # without padding
        if call.is_relative:
            tokens = None
            self._first.fill_(math.nan)
        for tile in call.tiles():
            visible = tile.visible
            if tokens is not None:
                tokens_of_tile = of_sequences(tokens, tile.sequences)
                visible = both_visible(visible, tokens_of_tile[:, None, tile.rows, None])
            first = None if first_tokens is None else first_tokens[tile.sequences]
            self._add_tile(tile, visible, first)

    def _add_tile(
        self, tile: Tile, visible: torch.Tensor | None, first: torch.Tensor | None
    ) -> None:
        """Add a tile, without hidden pairs and rows without a visible pair.

        Parameters
        ----------
        tile
            Logits, and scores or weights, (B, H, I, J).
        visible
            Pairs that count, broadcast to (B, H, I, J); None for all.
        first
            The first token of each sequence, (B,); None for token 0.
        """
        import torch

        dtype = tile.logits.dtype if tile.logits.element_size() >= 4 else torch.float32
        shown = None if visible is None else visible.to(dtype)
        below, highest = _below_highest(tile.logits, shown)
        if tile.weights is not None:
            shares = _shares_of_weights(tile.weights, first)
        elif tile.scores is tile.logits:
            shares = _shares_of_scores(below, first)
        else:
            scores = tile.scores.clamp(min=-HIDDEN_AT)  # functions of FlexAttention may give −∞
            scores_below, _ = _below_highest(scores, shown)
            shares = _shares_of_scores(scores_below, first)
        pairs = _pairs_of_rows(tile.logits, shown)
        self._add_logits(below, highest, pairs, shown)
        counts = pairs > 0  # rows to count

        def total(values: torch.Tensor) -> torch.Tensor:
            """Return the sum of values (B, H, I) over the rows that count, (H,)."""
            return values.masked_fill(~counts, 0).sum(ALL_ROWS, dtype=torch.float64)

        self._rows += counts.sum(ALL_ROWS)
        self._entropy += total(shares.entropy)
        self._top += total(shares.largest)
        self._first += total(shares.first)

    def _add_logits(
        self,
        below: torch.Tensor,
        highest: torch.Tensor,
        pairs: torch.Tensor,
        shown: torch.Tensor | None,
    ) -> None:
        """Add logits as distances from the highest of their row; the array is overwritten.

        Within a row, distances are summed in the type of the logits; rows are joined in float64.

        Parameters
        ----------
        below
            Logits minus the highest logit of the row, (B, H, I, J).
        highest
            Highest logit of each row, (B, H, I).
        pairs
            Number of visible pairs of each row, (B, H, I).
        shown
            1 for visible pairs, 0 for hidden pairs; None if all pairs are visible.
        """
        import torch

        if shown is not None:
            below.mul_(shown)  # hidden pairs are at the highest, and add nothing to sums
        is_empty = pairs == 0
        highest = highest.double()
        lowest = highest + below.amin(-1).double()
        largest = highest.masked_fill(is_empty, -math.inf).amax(ALL_ROWS)
        smallest = lowest.masked_fill(is_empty, math.inf).amin(ALL_ROWS)
        self._largest = torch.maximum(self._largest, largest)
        self._smallest = torch.minimum(self._smallest, smallest)
        row_pairs = pairs.clip(min=1)
        row_sums = below.sum(-1).double()
        row_squares = torch.linalg.vector_norm(below, dim=-1).double().square()
        row_means = (highest + row_sums / row_pairs).masked_fill(is_empty, 0)
        # Squares around the mean of all rows: squares within rows plus squares between rows.
        within = (row_squares - row_sums.square() / row_pairs).masked_fill(is_empty, 0)
        total_pairs = pairs.sum(ALL_ROWS)
        mean = (pairs * row_means).sum(ALL_ROWS) / total_pairs.clip(min=1)
        between = pairs * (row_means - mean[:, None]).square()
        self._join(total_pairs, mean, (within + between).sum(ALL_ROWS))

    def _join(self, pairs: torch.Tensor, mean: torch.Tensor, squares: torch.Tensor) -> None:
        """Join counts, means and squares around the mean, (H,), with those so far (Chan et al.)."""
        total_pairs = (self._pairs + pairs).clip(min=1)
        step = mean - self._mean
        self._mean = self._mean + step * pairs / total_pairs
        squares_between = step.square() * self._pairs * pairs / total_pairs
        self._squares = self._squares + squares + squares_between
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
        extreme = extreme.where(~self._largest.isnan(), self._largest)
        deviation = (self._squares / self._pairs).clip(min=0).sqrt()

        def on_host(values: torch.Tensor) -> np.ndarray:
            return np.asarray(values.cpu().numpy())

        return BlockLogits(
            max_logit=on_host(self._largest),
            logit_std=on_host(deviation),
            attention_entropy=on_host(self._entropy / self._rows),
            attention_top_share=on_host(self._top / self._rows),
            extreme_logit=on_host(extreme),
            first_token_share=on_host(self._first / self._rows),
        )


def _below_highest(
    values: torch.Tensor, shown: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (B, H, I, J) minus the highest visible value of their row, and the highest.

    Hidden pairs are about 10³⁰ below the highest value. Arithmetic is used instead of a mask,
    because PyTorch's ``masked_fill`` takes longer than all other steps together.
    """
    import torch

    if values.element_size() < 4:
        values = values.float()
    if shown is None:
        highest = values.amax(-1)
        return values - highest[..., None], highest
    limit = HIDDEN_AT / (shown - 1)  # infinite for visible pairs
    limited = torch.minimum(values, limit)
    highest = limited.amax(-1)
    return limited.sub_(highest[..., None]), highest


def _pairs_of_rows(logits: torch.Tensor, shown: torch.Tensor | None) -> torch.Tensor:
    """Return the number of visible pairs of each row, (B, H, I)."""
    import torch

    if shown is None:
        return logits.new_full(logits.shape[:-1], logits.shape[-1], dtype=torch.float64)
    count = shown.double().sum(-1)
    if shown.shape[-1] == 1:
        count = count * logits.shape[-1]
    return count.expand(logits.shape[:-1])


def _shares_of_weights(weights: torch.Tensor, first: torch.Tensor | None) -> Shares:
    """Return the shares of rows of weights, (B, H, I, J)."""
    import torch

    logarithms = weights.clamp(min=torch.finfo(weights.dtype).tiny).log_()
    entropy = -logarithms.mul_(weights).sum(-1)
    return Shares(entropy=entropy, largest=weights.amax(-1), first=_weight_of_first(weights, first))


def _shares_of_scores(below: torch.Tensor, first: torch.Tensor | None) -> Shares:
    """Return the shares of rows of scores, from distances to the highest score."""
    exponentials = below.exp()
    total = exponentials.sum(-1)
    first_share = _weight_of_first(exponentials, first) / total
    # −Σ p log p = log Σ e − Σ e · below / Σ e; the distance of hidden pairs is large, but finite.
    entropy = total.log() - exponentials.mul_(below).sum(-1) / total
    return Shares(entropy=entropy, largest=1 / total, first=first_share)


def _weight_of_first(weights: torch.Tensor, first: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of the first token (B, H, I); its place may differ between sequences."""
    if first is None:
        return weights[..., 0]
    place = first[:, None, None, None].expand(*weights.shape[:-1], 1)
    return weights.gather(-1, place)[..., 0]
