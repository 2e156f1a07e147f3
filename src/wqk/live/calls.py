"""One call of an attention operation, and its logits, scores and weights in tiles.

A tile holds a few rows of the attention of some sequences, so that memory does not grow with the
square of the number of tokens.

Axes: B sequences, H query heads, G key heads, I queries, J keys, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

# Entries of a tile on the processor, where tiles stay in the cache, and on an accelerator.
CACHED_TILE, DEVICE_TILE = 2**19, 2**25

# A pair whose score lies this far below its logit is hidden. Masks add -10,000 or less; a part of
# the logit is allowed for besides, as scores in half precision are rounded.
HIDDEN, ROUNDED = -5e3, 0.02

# Names under which modules keep the number of their heads.
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


class Band(NamedTuple):
    """Keys that a query may see by their distance: from ``i - back`` to ``i + ahead``.

    ``offset`` is added to the numbers of the queries: kernels of flash attention align the last
    query with the last key.
    """

    back: int | None
    ahead: int | None
    offset: int = 0


class RunningModule(NamedTuple):
    """A module whose forward pass has begun."""

    path: str
    module: Any
    reads_another: bool = False  # keys of another sequence than the queries, where that shows


class Tile(NamedTuple):
    """A part of one attention: some sequences, all heads, some rows, all keys that they may see."""

    sequences: slice
    rows: slice
    logits: torch.Tensor  # (B, H, I, J): scaled products; or scores, if no products were seen
    scores: torch.Tensor  # (B, H, I, J): what the softmax takes, of visible pairs
    weights: torch.Tensor | None  # (B, H, I, J): what the softmax returned, if it was observed
    visible: torch.Tensor | None  # (1 or B, 1 or H, 1 or I, J); None if all pairs are visible

    def attention(self) -> torch.Tensor:
        """Return the weights (B, H, I, J), as observed or computed; 0 in rows without a key."""
        if self.weights is not None:
            return self.weights
        scores = self.scores
        if self.visible is not None:
            scores = scores.masked_fill(~self.visible, -math.inf)
        sees_no_key = (scores == -math.inf).all(-1, keepdim=True)
        return scores.softmax(-1).masked_fill(sees_no_key, 0)


@dataclass(frozen=True, kw_only=True)
class ObservedCall:
    """One attention, as the operation that computes it was called.

    Attributes
    ----------
    operation
        Name of the operation, such as ``aten::_softmax``.
    modules
        Modules that run, the outermost first.
    queries, keys
        (B, H, I, R) and (B, G, J, R), after norms and positions; None if only the softmax was seen.
    scale
        Number that multiplies their products: a float, or a tensor of one entry.
    factors
        Tensors that multiply the products besides, as broad as (B, H, I, J).
    softcap
        Limit c of a soft cap c · tanh(logit / c).
    mask
        (1 or B, 1 or H, 1 or I, J): True if a pair is visible, or numbers that are added.
    band
        Keys that are visible by their distance.
    slopes
        (1 or B, H): what a score loses for each token of distance (ALiBi).
    change_score, show_pair
        Functions of FlexAttention: of score and indices, of indices.
    scores, weights
        (B, H, I, J'): input and output of a softmax, if it was observed.
    columns
        Columns of the scores that belong to keys; others belong to sinks.
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
        """Path of the innermost module that runs; empty for the model itself."""
        return self.modules[-1].path if self.modules else ""

    @property
    def module(self) -> Any:
        """The innermost module that runs."""
        return self.modules[-1].module if self.modules else None

    @property
    def has_logits(self) -> bool:
        """Return whether queries and keys were observed, and not the input of the softmax alone."""
        return self.queries is not None

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of sequences, query heads, queries and keys, as in the operation's tensors."""
        if self.scores is not None:
            keys = len(range(*self.columns.indices(self.scores.shape[-1])))
            return (*self.scores.shape[:-1], keys)
        assert self.queries is not None
        assert self.keys is not None
        return (*self.queries.shape[:-1], self.keys.shape[-2])

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        tensor = self.queries if self.scores is None else self.scores
        assert tensor is not None
        return tensor.device

    def first(self, sequences: int) -> ObservedCall:
        """Return the call of its first sequences alone."""
        if sequences >= self.shape[0]:
            return self

        def kept(tensor: torch.Tensor | None) -> torch.Tensor | None:
            if tensor is None or len(tensor) == 1:
                return tensor
            return tensor[:sequences]

        return replace(
            self,
            queries=kept(self.queries),
            keys=kept(self.keys),
            factors=tuple(part[:sequences] if len(part) > 1 else part for part in self.factors),
            mask=kept(self.mask),
            slopes=kept(self.slopes),
            scores=kept(self.scores),
            weights=kept(self.weights),
        )

    def by_head(self, heads: int | None = None) -> ObservedCall | None:
        """Return the call with the axes (B, H, I, J), whatever the axes of the observed softmax.

        Parameters
        ----------
        heads
            Number of query heads, if a family describes the block. Else the axis before the
            queries holds heads, or the module's own number of heads divides the first axis.

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
        count = leading[order[-1]] if len(leading) > 1 else heads or 1
        return self._arranged(order, (-1, count))

    def _of_sliding_windows(self, heads: int | None) -> ObservedCall | None:
        """Return the call of a softmax over (B, I, H, W), W the keys around a query, or None."""
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
        """Return the call as one sequence, whose heads are all leading axes in their order."""
        return self._arranged(tuple(range(len(self._leading))), (1, -1))

    def _arranged(self, order: tuple[int, ...], split: tuple[int, int]) -> ObservedCall:
        """Return the call with its leading axes in an order, and split into sequences and heads."""

        def arranged(tensor: torch.Tensor) -> torch.Tensor:
            last = (tensor.ndim - 2, tensor.ndim - 1)
            return tensor.permute(*order, *last).reshape(*split, *tensor.shape[-2:])

        broad = (
            factor if factor.numel() == 1 else factor.expand(*self._leading, *factor.shape[-2:])
            for factor in self.factors
        )
        return replace(
            self,
            queries=None if self.queries is None else arranged(self.queries),
            keys=None if self.keys is None else arranged(self.keys),
            scores=None if self.scores is None else arranged(self.scores),
            weights=None if self.weights is None else arranged(self.weights),
            factors=tuple(part if part.numel() == 1 else arranged(part) for part in broad),
        )

    @property
    def _leading(self) -> tuple[int, ...]:
        tensor = self.queries if self.scores is None else self.scores
        assert tensor is not None
        return tuple(tensor.shape[:-2])

    def visible_keys(self) -> torch.Tensor | None:
        """Keys that some query may see, (1 or B, J); None if all are. The others are padding."""
        if self.scores is not None:
            scores = self.scores[..., self.columns]
            return scores.amax((1, 2)) > HIDDEN
        if self.show_pair is not None:
            return self._keys_shown(self.show_pair)
        if self.mask is None:
            return None
        return is_visible(self.mask).any(-2).any(1)

    def _keys_shown(self, show_pair: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Keys (B, J) that FlexAttention's mask shows to some query."""
        import torch

        assert self.queries is not None
        device = self.queries.device
        batch, heads, queries, keys = (torch.arange(n, device=device) for n in self.shape)
        rows_at_once = max(1, DEVICE_TILE // (len(batch) * len(heads) * len(keys)))
        shown = torch.zeros(len(batch), len(keys), dtype=torch.bool, device=device)
        for rows in queries.split(rows_at_once):
            visible = show_pair(batch, heads, rows, keys)
            shown |= visible.any(-2).any(1)
        return shown

    def tiles(self, size: int | None = None) -> Iterator[Tile]:
        """Go through the attention tile by tile: several whole sequences, or some rows of one.

        A tile has all heads and keys, and at most ``size`` entries, unless one row has more. By
        default, a tile stays in the cache of a processor, or fills a GPU.
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
        keys = self.shape[-1]
        if self.band is not None and self.band.ahead is not None and self.scores is None:
            # Keys behind the last row's reach are hidden from all rows.
            keys = min(keys, max(1, rows.stop + self.band.offset + self.band.ahead))
        logits = self._logits(sequences, rows, keys)
        if self.scores is not None:
            return self._softmax_tile(sequences, rows, logits)
        assert logits is not None
        return self._kernel_tile(sequences, rows, logits)

    def _softmax_tile(self, sequences: slice, rows: slice, logits: torch.Tensor | None) -> Tile:
        """Return a tile of a softmax; a score far below its logit was hidden by a mask."""
        assert self.scores is not None
        scores = self.scores[sequences, :, rows, self.columns]
        weights = None if self.weights is None else self.weights[sequences, :, rows, self.columns]
        if logits is None:
            visible = scores > HIDDEN
            return Tile(sequences, rows, scores, scores, weights, visible)
        added = scores - self.capped(logits)
        # Where both overflow, their difference is not a number, and the pair is visible.
        hidden = added < HIDDEN - ROUNDED * logits.abs()
        return Tile(sequences, rows, logits, scores, weights, ~hidden)

    def _kernel_tile(self, sequences: slice, rows: slice, logits: torch.Tensor) -> Tile:
        import torch

        keys, device = logits.shape[-1], logits.device
        scores, visible = self.capped(logits), None
        query = torch.arange(rows.start, rows.stop, device=device)[:, None]
        key = torch.arange(keys, device=device)
        if self.band is not None:
            distance = query + self.band.offset - key
            shown = torch.ones_like(distance, dtype=torch.bool)
            if self.band.ahead is not None:
                shown &= distance >= -self.band.ahead
            if self.band.back is not None:
                shown &= distance <= self.band.back
            visible = shown[None, None]
        if self.slopes is not None:
            offset = self.band.offset if self.band else keys - self.shape[2]
            slopes = _of(self.slopes, sequences)[..., None, None].to(scores)
            scores = scores - slopes * (query + offset - key).abs()
        if self.mask is not None:
            mask = _of(self.mask, sequences)
            mask = (mask if mask.shape[-2] == 1 else mask[:, :, rows])[..., :keys]
            shown = is_visible(mask)
            visible = shown if visible is None else visible & shown
            if mask.dtype != torch.bool:
                scores = scores + mask
        if self.show_pair is not None or self.change_score is not None:
            scores, visible = self._flexible(sequences, rows, scores, visible)
        return Tile(sequences, rows, logits, scores, None, visible)

    def _flexible(
        self, sequences: slice, rows: slice, scores: torch.Tensor, visible: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Apply the functions that FlexAttention was called with."""
        import torch

        batch, queries = sequences.stop - sequences.start, rows.stop - rows.start
        starts = (sequences.start, 0, rows.start, 0)
        sizes = (batch, scores.shape[1], queries, scores.shape[-1])
        ranges = [
            torch.arange(start, start + size, device=scores.device)
            for start, size in zip(starts, sizes, strict=True)
        ]
        if self.show_pair is not None:
            shown = self.show_pair(*ranges)
            visible = shown if visible is None else visible & shown
        if self.change_score is not None:
            scores = self.change_score(scores, *ranges)
        return scores, visible

    def _logits(self, sequences: slice, rows: slice, keys: int) -> torch.Tensor | None:
        """Scaled products of queries and keys, in at least float32."""
        if self.queries is None or self.keys is None:
            return None
        queries = _wide(self.queries[sequences, :, rows]) * self.scale
        keys_ = _wide(_of(self.keys, sequences)[:, :, :keys])
        if keys_.dtype != queries.dtype:
            keys_ = keys_.to(queries.dtype)
        groups, heads = keys_.shape[1], queries.shape[1]
        if groups == heads:
            logits = queries @ keys_.mT
        else:
            grouped = queries.unflatten(1, (groups, heads // groups))
            logits = (grouped @ keys_[:, :, None].mT).flatten(1, 2)
        for factor in self.factors:
            logits = logits * _tile_of(factor, sequences, rows, keys)
        return logits

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the soft cap, if there is one."""
        if self.softcap is None:
            return logits
        return self.softcap * (logits / self.softcap).tanh()


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Pairs that a mask shows: itself, or numbers that hide none."""
    import torch

    return mask if mask.dtype == torch.bool else mask > HIDDEN


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in at least float32."""
    return tensor if tensor.element_size() >= 4 else tensor.float()


def _of(tensor: torch.Tensor, sequences: slice) -> torch.Tensor:
    """Return the part of some sequences; one for all is the part of each."""
    return tensor if len(tensor) == 1 else tensor[sequences]


def _tile_of(factor: torch.Tensor, sequences: slice, rows: slice, keys: int) -> torch.Tensor:
    """Return the part of a tensor (1 or B, 1 or H, 1 or I, 1 or J) that meets a tile."""
    if factor.numel() == 1:
        return factor
    part = _of(factor, sequences)
    part = part if part.shape[-2] == 1 else part[:, :, rows]
    return part if part.shape[-1] == 1 else part[..., :keys]


def _head_count(modules: Sequence[RunningModule], size: int) -> int | None:
    """Return number of heads of the innermost module that counts them, if it divides an axis."""
    for running in reversed(modules):
        for name in HEAD_COUNTS:
            count = getattr(running.module, name, None)
            if type(count) is int and count > 0 and size % count == 0:
                return count
    return None


def _heads_last(leading: tuple[int, ...], heads: int | None) -> tuple[int, ...] | None:
    """Order of the leading axes in which heads are the last; None if none are.

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
    fitting = [axis for axis in axes if leading[axis] == heads]
    if not fitting:
        return None
    return (*(axis for axis in axes if axis != fitting[-1]), fitting[-1])
