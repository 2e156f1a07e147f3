"""One call of an attention operation, with its logits, scores and weights in tiles.

A tile contains a few rows of the attention of some sequences. Therefore memory does not grow with
the square of the number of tokens.

Axes: B sequences, H query heads, G key heads, I queries, J keys, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# Entries of a tile: on a processor, where tiles stay in the cache, and on an accelerator.
CACHED_TILE, DEVICE_TILE = 2**19, 2**25

# A pair is hidden if its score is this far below the logit: masks add −10,000 or less.
HIDDEN = -5e3
# In half precision, rounding may lower a score further, by this share of the logit.
ROUNDED = 0.02

# Names of the number of heads in modules.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


class Band(NamedTuple):
    """Keys that a query may see, by distance: from ``i - back`` to ``i + ahead``.

    ``offset`` is added to the numbers of the queries: kernels of flash attention align the last
    query with the last key.
    """

    back: int | None
    ahead: int | None
    offset: int = 0

    def shows(self, distance: torch.Tensor) -> torch.Tensor:
        """Return a mask of the visible distances (I, J) of queries from keys, i + offset − j."""
        import torch

        shown = torch.ones_like(distance, dtype=torch.bool)
        if self.ahead is not None:
            shown &= distance >= -self.ahead
        if self.back is not None:
            shown &= distance <= self.back
        return shown


class RunningModule(NamedTuple):
    """A module during its forward pass."""

    path: str
    module: Any
    reads_another: bool = False  # keys of another sequence than the queries, if known


class Tile(NamedTuple):
    """A part of one attention: some sequences, all heads, some rows, and the visible keys."""

    sequences: slice
    rows: slice
    logits: torch.Tensor  # (B, H, I, J): scaled products; or scores, if no products were seen
    scores: torch.Tensor  # (B, H, I, J): what the softmax takes, of visible pairs
    weights: torch.Tensor | None  # (B, H, I, J): result of the softmax, if observed
    visible: torch.Tensor | None  # (1 or B, 1 or H, 1 or I, J); None if all pairs are visible

    def attention(self) -> torch.Tensor:
        """Return the weights (B, H, I, J), observed or computed; 0 in rows without a key."""
        if self.weights is not None:
            return self.weights
        scores = self.scores
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible, -math.inf)
        sees_no_key = (scores == -math.inf).all(-1, keepdim=True)
        return scores.softmax(-1).masked_fill(sees_no_key, 0)


@dataclass(frozen=True, kw_only=True)
class ObservedCall:
    """One attention: an observed call of the operation that computes it.

    Attributes
    ----------
    operation
        Name of the operation, such as ``aten::_softmax``.
    modules
        Running modules, the outermost first.
    queries, keys
        (B, H, I, R) and (B, G, J, R), after norms and positions; None if only the softmax was
        observed.
    scale
        Factor of their products: a float, or a tensor of one entry.
    factors
        Further factors of the products, which broadcast to (B, H, I, J).
    softcap
        Limit c of a soft cap c · tanh(logit / c).
    mask
        (1 or B, 1 or H, 1 or I, J): True for a visible pair, or numbers to add.
    band
        Keys that are visible at their distance.
    slopes
        (1 or B, H): the decrease of a score for each token of distance (ALiBi).
    change_score, show_pair
        Functions of FlexAttention: of a score and indices, and of indices.
    scores, weights
        (B, H, I, J'): input and output of a softmax, if it was observed.
    columns
        Columns of the scores that belong to keys; the remaining columns belong to sinks.
    is_relative
        Whether columns are distances from the query instead of tokens (Longformer).
    """

    operation: str
    modules: tuple[RunningModule, ...] = ()
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    scale: float | torch.Tensor = 1.0
    factors: tuple[torch.Tensor, ...] = ()
    softcap: float | torch.Tensor | None = None
    mask: torch.Tensor | None = None
    band: Band | None = None
    slopes: torch.Tensor | None = None
    change_score: Callable[..., torch.Tensor] | None = field(default=None, repr=False)
    show_pair: Callable[..., torch.Tensor] | None = field(default=None, repr=False)
    scores: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    columns: slice = field(default_factory=lambda: slice(None))
    is_relative: bool = False

    @property
    def path(self) -> str:
        """Path of the innermost running module; empty for the model."""
        return self.modules[-1].path if self.modules else ""

    @property
    def module(self) -> Any:
        """The innermost running module."""
        return self.modules[-1].module if self.modules else None

    @property
    def has_logits(self) -> bool:
        """Return whether queries and keys were observed, not only the input of the softmax."""
        return self.queries is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of sequences, query heads, queries and keys in the operation's tensors."""
        if self.scores is not None:
            keys = len(range(*self.columns.indices(self.scores.shape[-1])))
            return (*self.scores.shape[:-1], keys)
        assert self.queries is not None
        assert self.keys is not None
        return (*self.queries.shape[:-1], self.keys.shape[-2])

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        tensor = self.queries if self.scores is None else self.scores
        assert tensor is not None
        return tensor.device

    def first(self, sequences: int) -> ObservedCall:
        """Return the call with only the first sequences."""
        if sequences >= self.shape[0]:
            return self

        def first_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else of_sequences(tensor, slice(0, sequences))

        return replace(
            self,
            queries=first_of(self.queries),
            keys=first_of(self.keys),
            factors=tuple(of_sequences(factor, slice(0, sequences)) for factor in self.factors),
            mask=first_of(self.mask),
            slopes=first_of(self.slopes),
            scores=first_of(self.scores),
            weights=first_of(self.weights),
        )

    def by_head(self, heads: int | None = None) -> ObservedCall | None:
        """Return the call with axes (B, H, I, J), for any axes of the observed softmax.

        Parameters
        ----------
        heads
            Number of query heads, if a family describes the block. Otherwise the axis before the
            queries is the axis of heads, or the module's number of heads divides the first axis.

        Returns
        -------
        ObservedCall or None
            None if no axis has this number of heads.
        """
        leading = self._leading
        if heads is None and len(leading) == 1:
            heads = _head_count(self.modules, leading[0])
        order = _heads_last(leading, heads)
        if order is None:
            return self._of_sliding_windows(heads)
        if order == (0, 1) and len(leading) == 2:
            return self
        head_count = heads or 1
        if len(leading) > 1:
            head_count = leading[order[-1]]
        return self._arranged(order, (-1, head_count))

    def _of_sliding_windows(self, heads: int | None) -> ObservedCall | None:
        """Return the call of a softmax over (B, I, H, W), with W keys around a query, or None."""
        if self.has_logits or self.scores is None or self.weights is None:
            return None
        if self.scores.ndim != 4 or self.scores.shape[-2] != heads:
            return None
        return replace(
            self,
            scores=self.scores.transpose(1, 2),
            weights=self.weights.transpose(1, 2),
            is_relative=True,
        )

    def in_one(self) -> ObservedCall:
        """Return the call as one sequence; its heads are all leading axes in order."""
        return self._arranged(tuple(range(len(self._leading))), (1, -1))

    def _arranged(self, order: tuple[int, ...], split: tuple[int, int]) -> ObservedCall:
        """Return the call with its leading axes reordered and split into sequences and heads.

        Parameters
        ----------
        order
            The leading axes in their new order.
        split
            Numbers of sequences and heads; one of the numbers may be −1.
        """

        def arranged(tensor: torch.Tensor) -> torch.Tensor:
            last_axes = (tensor.ndim - 2, tensor.ndim - 1)
            return tensor.permute(*order, *last_axes).reshape(*split, *tensor.shape[-2:])

        def arranged_factor(factor: torch.Tensor) -> torch.Tensor:
            if factor.numel() == 1:
                return factor
            return arranged(factor.expand(*self._leading, *factor.shape[-2:]))

        return replace(
            self,
            queries=None if self.queries is None else arranged(self.queries),
            keys=None if self.keys is None else arranged(self.keys),
            scores=None if self.scores is None else arranged(self.scores),
            weights=None if self.weights is None else arranged(self.weights),
            factors=tuple(arranged_factor(factor) for factor in self.factors),
        )

    @property
    def _leading(self) -> tuple[int, ...]:
        """Sizes of the axes before queries and keys: sequences and heads."""
        tensor = self.queries if self.scores is None else self.scores
        assert tensor is not None
        return tuple(tensor.shape[:-2])

    def visible_keys(self) -> torch.Tensor | None:
        """Return a mask of the keys that any query may see, (1 or B, J); None without a mask.

        Hidden keys are padding. A band is ignored, because keys outside the band are not padding.
        """
        if self.scores is not None:
            scores = self.scores[..., self.columns]
            return scores.amax((1, 2)) > HIDDEN
        if self.show_pair is not None:
            return self._keys_shown(self.show_pair)
        if self.mask is None:
            return None
        return is_visible(self.mask).any(-2).any(1)

    def _keys_shown(self, show_pair: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return a mask of the keys (B, J) that FlexAttention's mask shows to any query."""
        import torch

        assert self.queries is not None
        device = self.queries.device
        batch, head_count, query_count, key_count = self.shape
        sequences = torch.arange(batch, device=device)
        heads = torch.arange(head_count, device=device)
        queries = torch.arange(query_count, device=device)
        keys = torch.arange(key_count, device=device)
        rows_at_once = max(1, DEVICE_TILE // (batch * head_count * key_count))
        shown = torch.zeros(batch, key_count, dtype=torch.bool, device=device)
        for rows in queries.split(rows_at_once):
            visible = show_pair(sequences, heads, rows, keys)
            shown |= visible.any(-2).any(1)
        return shown

    def tiles(self, size: int | None = None) -> Iterator[Tile]:
        """Yield the attention tile by tile: several whole sequences, or some rows of one sequence.

        A tile has all heads and keys, and at most ``size`` entries, unless a single row has more.
        By default, a tile fits into the cache of a processor, or fills a GPU.
        """
        batch, heads, queries, keys = self.shape
        size = size or (CACHED_TILE if self.device.type == "cpu" else DEVICE_TILE)
        rows_at_a_time = max(1, min(queries, size // (heads * keys)))
        sequences_at_a_time = 1
        if rows_at_a_time == queries:
            sequences_at_a_time = max(1, size // (heads * keys * queries))
        for first in range(0, batch, sequences_at_a_time):
            sequences = slice(first, min(batch, first + sequences_at_a_time))
            for start in range(0, queries, rows_at_a_time):
                rows = slice(start, min(queries, start + rows_at_a_time))
                yield self._tile(sequences, rows)

    def _tile(self, sequences: slice, rows: slice) -> Tile:
        """Return the tile of some sequences and rows, with the keys that the last row may see."""
        key_count = self.shape[-1]
        if self.band is not None and self.band.ahead is not None and self.scores is None:
            # Keys behind the last row's reach are hidden from all rows.
            key_count = min(key_count, max(1, rows.stop + self.band.offset + self.band.ahead))
        logits = self._logits(sequences, rows, key_count)
        if self.scores is not None:
            return self._softmax_tile(sequences, rows, logits)
        assert logits is not None
        return self._kernel_tile(sequences, rows, logits)

    def _softmax_tile(self, sequences: slice, rows: slice, logits: torch.Tensor | None) -> Tile:
        """Return a tile of a softmax; a pair is hidden if its score is far below its logit."""
        assert self.scores is not None
        scores = self.scores[sequences, :, rows, self.columns]
        weights = None
        if self.weights is not None:
            weights = self.weights[sequences, :, rows, self.columns]
        if logits is None:
            visible = scores > HIDDEN
            return Tile(sequences, rows, scores, scores, weights, visible)
        added = scores - self.capped(logits)
        # If both overflow, the difference is not a number, and the pair is visible.
        hidden = added < HIDDEN - ROUNDED * logits.abs()
        return Tile(sequences, rows, logits, scores, weights, ~hidden)

    def _kernel_tile(self, sequences: slice, rows: slice, logits: torch.Tensor) -> Tile:
        """Return a tile of a fused kernel, from its arguments: band, slopes, mask and functions."""
        import torch

        key_count, device = logits.shape[-1], logits.device
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(key_count, device=device)
        scores = self.capped(logits)
        visible = None
        if self.band is not None:
            visible = self.band.shows(query + self.band.offset - key)[None, None]
        if self.slopes is not None:
            offset = key_count - self.shape[2] if self.band is None else self.band.offset
            slopes = of_sequences(self.slopes, sequences)[..., None, None].to(scores)
            scores = scores - slopes * (query + offset - key).abs()
        if self.mask is not None:
            mask = _tile_of(self.mask, sequences, rows, key_count)
            visible = both_visible(visible, is_visible(mask))
            if mask.dtype != torch.bool:
                scores = scores + mask
        if self.show_pair is not None or self.change_score is not None:
            scores, visible = self._flexible(sequences, rows, scores, visible)
        return Tile(sequences, rows, logits, scores, None, visible)

    def _flexible(
        self, sequences: slice, rows: slice, scores: torch.Tensor, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scores and the visible pairs from the functions of FlexAttention."""
        import torch

        batch, queries = sequences.stop - sequences.start, rows.stop - rows.start
        starts = (sequences.start, 0, rows.start, 0)
        sizes = (batch, scores.shape[1], queries, scores.shape[-1])
        ranges = [
            torch.arange(start, start + size, device=scores.device)
            for start, size in zip(starts, sizes, strict=True)
        ]
        if self.show_pair is not None:
            visible = both_visible(visible, self.show_pair(*ranges))
        if self.change_score is not None:
            scores = self.change_score(scores, *ranges)
        return scores, visible

    def _logits(self, sequences: slice, rows: slice, key_count: int) -> torch.Tensor | None:
        """Return scaled products (B, H, I, J) of queries and the first keys, at least in float32.

        None if queries and keys were not observed.
        """
        if self.queries is None or self.keys is None:
            return None
        queries = _wide(self.queries[sequences, :, rows]) * self.scale
        keys = _wide(of_sequences(self.keys, sequences)[:, :, :key_count])
        if keys.dtype != queries.dtype:
            keys = keys.to(queries.dtype)
        key_heads, heads = keys.shape[1], queries.shape[1]
        if key_heads == heads:
            logits = queries @ keys.mT
        else:
            grouped = queries.unflatten(1, (key_heads, heads // key_heads))
            logits = (grouped @ keys[:, :, None].mT).flatten(1, 2)
        for factor in self.factors:
            logits = logits * _tile_of(factor, sequences, rows, key_count)
        return logits

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits after the soft cap, if any."""
        if self.softcap is None:
            return logits
        return self.softcap * (logits / self.softcap).tanh()


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Return the visible pairs of a mask, which is Boolean or contains numbers to add."""
    import torch

    return mask if mask.dtype == torch.bool else mask > HIDDEN


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in at least float32."""
    return tensor if tensor.element_size() >= 4 else tensor.float()


def both_visible(visible: torch.Tensor | None, shown: torch.Tensor) -> torch.Tensor:
    """Return the pairs that two masks show; the first mask may be None and show all pairs."""
    return shown if visible is None else visible & shown


def of_sequences(tensor: torch.Tensor, sequences: slice) -> torch.Tensor:
    """Return some sequences of a tensor (1 or B, ...); a single entry is for all sequences."""
    return tensor if len(tensor) == 1 else tensor[sequences]


def _tile_of(tensor: torch.Tensor, sequences: slice, rows: slice, key_count: int) -> torch.Tensor:
    """Return the part of a tensor (1 or B, 1 or H, 1 or I, 1 or J) that belongs to a tile."""
    if tensor.numel() == 1:
        return tensor
    part = of_sequences(tensor, sequences)
    if part.shape[-2] > 1:
        part = part[:, :, rows]
    if part.shape[-1] > 1:
        part = part[..., :key_count]
    return part


def _head_count(modules: Sequence[RunningModule], size: int) -> int | None:
    """Return the number of heads of the innermost module whose number divides an axis, or None.

    ``size`` is the size of the axis.
    """
    for running in reversed(modules):
        for name in HEAD_COUNTS:
            count = getattr(running.module, name, None)
            if type(count) is int and count > 0 and size % count == 0:
                return count
    return None


def _heads_last(leading: tuple[int, ...], heads: int | None) -> tuple[int, ...] | None:
    """Return the order of the leading axes that puts heads last; None without heads.

    Examples
    --------
    >>> _heads_last((2, 4), 4), _heads_last((4, 2), 4), _heads_last((8,), 4), _heads_last((6,), 4)
    ((0, 1), (1, 0), (0,), None)
    """
    axes = tuple(range(len(leading)))
    if len(leading) == 1:
        return axes if heads is None or leading[0] % heads == 0 else None
    if heads is None or leading[-1] == heads:
        return axes
    axes_of_heads = [axis for axis in axes if leading[axis] == heads]
    if not axes_of_heads:
        return None
    last = axes_of_heads[-1]
    return (*(axis for axis in axes if axis != last), last)
