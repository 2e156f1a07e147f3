"""Attention matrices of a running model, head by head, for any kernel.

Fused kernels do not return their weights. The weights are computed again, tile by tile, from the
queries, keys, scale and mask of the call.

Axes: B sequences, H query heads, I queries, J keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._console import Result, counted
from wqk._style import current
from wqk._typing import FilePath, Float
from wqk.errors import CheckpointError, required_by
from wqk.families import Place
from wqk.live.addresses import BlockIndex, network_of, title_of
from wqk.live.calls import ObservedCall
from wqk.live.logits import no_attention, opened_or_module, require_batch, require_sequences
from wqk.live.observing import Observer
from wqk.live.running import run_batch
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Largest size of kept matrices in bytes.
LARGEST = 2**30


@dataclass(frozen=True, repr=False)
class AttentionMatrices(Result):
    """Attention weights of the blocks of one pass; a row sums to 1 minus the share of sinks."""

    #: By stack, kind and layer, or by the path of the module: one matrix (B, H, I, J) for each run.
    blocks: Mapping[Place | str, Sequence[Float[np.ndarray, "batch heads queries keys"]]]
    #: Blocks without a matrix, and the reason.
    missing: Mapping[Place | str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, block: Any) -> Float[np.ndarray, "batch heads queries keys"]:
        """Return the weights of a block, by name; or by layer, if only one block has the layer."""
        if isinstance(block, str | tuple):
            names = [name for name in self.blocks if name == block]
        else:
            names = [name for name in self.blocks if not isinstance(name, str) and name[2] == block]
        if len(names) != 1:
            listed = ", ".join(map(repr, self.blocks))
            advice = ""
            if isinstance(block, tuple) and len(block) == 2:
                advice = "; the weights of a head are matrices[layer][:, head]"
            raise CheckpointError(
                f"attention of {block!r}: {counted(len(names), 'block')} of this name; expected "
                f"one of {listed}{advice}"
            )
        (*earlier, last) = self.blocks[names[0]]
        if earlier:
            raise CheckpointError(
                f"attention of {block!r}: the block ran {len(earlier) + 1} times; expected one "
                f"run; take one of .blocks[{names[0]!r}]"
            )
        return last

    @property
    def sentence(self) -> str:
        """Number of blocks and heads."""
        heads = sum(runs[0].shape[1] for runs in self.blocks.values())
        return f"attention of {counted(heads, 'head')} in {counted(len(self.blocks), 'block')}"

    def _rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row with the shape of each matrix."""
        axes = ("sequences", "heads", "queries", "keys")
        for name, runs in self.blocks.items():
            for run, matrix in enumerate(runs):
                sizes = dict(zip(axes, matrix.shape, strict=True))
                yield {"block": title_of(name), "run": run, **sizes}

    def to_dict(self) -> dict[str, Any]:
        """Return the shapes as plain values; weights are in `blocks`."""
        missing = {str(name): reason for name, reason in self.missing.items()}
        return {"sentence": self.sentence, "rows": list(self._rows()), "missing": missing}

    def _shown(self, width: int) -> Iterator[Any]:
        yield self.sentence
        sheet = Sheet.of("block", "run", "sequences", "heads", "queries", "keys", text=["block"])
        for row in self._rows():
            sheet.add(*map(str, row.values()))
        if self.blocks:
            yield sheet
        yield from (f"{name}: {reason}" for name, reason in self.missing.items())

    @current
    def plot(self, block: Any, sequence: int = 0) -> Figure:
        """Draw the matrices of a block's heads, for one sequence of the batch.

        Examples
        --------
        >>> import torch, transformers, wqk
        >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
        >>> model = transformers.GPT2Model(config).eval()
        >>> figure = wqk.attention_matrices(model, torch.arange(12)[None]).plot(1)
        >>> [axis.get_title() for axis in figure.axes]
        ['head 0', 'head 1', 'head 2', 'head 3']
        """
        from wqk.reporting.pictures import attention_figure

        return attention_figure(self[block][sequence])


def attention_matrices(
    model: Any,
    batch: Any = None,
    *,
    layers: Sequence[int] | None = None,
    sequences: int | None = 1,
    largest: int = LARGEST,
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
) -> AttentionMatrices:
    """Return the attention matrices of one pass, for any kernel.

    Parameters
    ----------
    model
        Any `nn.Module`, in its present mode (training or evaluation); or a `Model` opened from a
        module.
    batch
        Arguments of the model: by name, in order, or a single argument.
    layers
        Layers of the matrices to keep; None for all blocks.
    sequences
        Number of sequences to keep at the beginning of the batch; None for all.
    largest
        Limit of the bytes of all matrices; a larger request raises an error before the computation.
    family, heads_per_layer
        Options of opening the model, as for `wqk.open`.

    Returns
    -------
    AttentionMatrices
        Weights (B, H, I, J) of each block, in the type of the model's scores, at least float32.

    Raises
    ------
    CheckpointError
        The model cannot be run on this batch, computes no attention, or the matrices exceed
        ``largest``.

    Examples
    --------
    >>> import torch, transformers, wqk
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> model = transformers.GPT2Model(config).eval()
    >>> attention = wqk.attention_matrices(model, torch.arange(12)[None])
    >>> attention[1].shape
    (1, 4, 12, 12)
    """
    require_batch(batch, "attention_matrices")
    require_sequences(sequences)
    with required_by("attention matrices"):
        import torch
    network = network_of(model, "run")
    opened = opened_or_module(model, family, heads_per_layer)
    plans = []
    if opened is not network:
        plans = [plan for plan in opened.plans if plan.has_softmax]
    if layers is not None:
        present = {plan.layer for plan in plans}
        if missing_layers := set(layers) - present:
            raise CheckpointError(
                f"layers: {sorted(missing_layers)} are missing; expected some of {sorted(present)}"
            )
    matrices = _Matrices(BlockIndex(network, plans), layers, sequences, largest)
    with torch.no_grad(), Observer(network, matrices.add):
        run_batch(network, batch)
    blocks, missing = matrices.blocks, matrices.missing
    if not blocks and not missing:
        raise no_attention(network)
    for plan in plans:
        if layers is None or plan.layer in layers:
            missing.setdefault(plan.place, "no attention of its heads was observed")
    missing = {name: reason for name, reason in missing.items() if name not in blocks}
    return AttentionMatrices(blocks, missing)


class _Matrices:
    """The matrices of observed calls, by block; options as for `attention_matrices`."""

    def __init__(
        self,
        index: BlockIndex,
        layers: Sequence[int] | None,
        sequences: int | None,
        largest: int,
    ) -> None:
        self._index, self._layers = index, layers
        self._sequences, self._largest = sequences, largest
        self._bytes = 0
        self.blocks: dict[Place | str, list[np.ndarray]] = {}
        self.missing: dict[Place | str, str] = {}

    def add(self, call: ObservedCall) -> None:
        """Add the matrix of a call under each name of its block."""
        for address in self._index.addresses(call):
            if not self._is_kept(address.name):
                continue
            arranged = call.by_head(address.heads)
            if arranged is None:
                continue
            if arranged.is_relative:
                reason = "its keys are those around each query, so it has no matrix"
                self.missing[address.name] = reason
                continue
            if self._sequences is not None:
                arranged = arranged.first(self._sequences)
            self._require_room(arranged)
            self.blocks.setdefault(address.name, []).append(matrix_of(arranged))

    def _is_kept(self, name: Place | str) -> bool:
        """Return whether the matrices of a block are requested."""
        if self._layers is None:
            return True
        return not isinstance(name, str) and name.layer in self._layers

    def _require_room(self, call: ObservedCall) -> None:
        """Raise `CheckpointError` if another matrix exceeds the limit of bytes."""
        self._bytes += _bytes_of(call)
        if self._bytes > self._largest:
            raise CheckpointError(
                f"attention matrices take over {self._largest:,} bytes; expected fewer layers, "
                "sequences or tokens; pass layers=, sequences= or a higher largest="
            )


def matrix_of(call: ObservedCall) -> Float[np.ndarray, "batch heads queries keys"]:
    """Return the attention weights of a call with the axes (B, H, I, J), on the host."""
    batch, heads, queries, keys = call.shape
    matrix: np.ndarray | None = None
    for tile in call.tiles():
        weights = tile.attention().cpu()
        weights = weights if weights.element_size() >= 4 else weights.float()
        if matrix is None:
            matrix = np.zeros((batch, heads, queries, keys), weights.numpy().dtype)
        # Keys behind the reach of a tile's last row are hidden, and are not in the tile.
        matrix[tile.sequences, :, tile.rows, : weights.shape[-1]] = weights.numpy()
    assert matrix is not None
    return matrix


def _bytes_of(call: ObservedCall) -> int:
    """Return the number of bytes of a call's matrix on the host."""
    batch, heads, queries, keys = call.shape
    tensor = call.queries if call.scores is None else call.scores
    assert tensor is not None
    return int(batch * heads * queries * keys * max(4, tensor.element_size()))
