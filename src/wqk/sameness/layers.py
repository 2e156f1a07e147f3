"""Dropped, repeated or inserted layers: one cause for all layers that moved.

The *source* of a layer of the candidate is the layer of the reference with the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from wqk._console import spans
from wqk.families import Place
from wqk.sameness.circuits import PlanPair
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.tensor_names import layer_prefix


class _LayerOrigin(NamedTuple):
    """A layer of the candidate and its source in the reference; None for a new layer."""

    layer: int
    source: int | None

    @property
    def is_moved(self) -> bool:
        """True if the source is another layer of the reference."""
        return self.source is not None and self.source != self.layer


def with_moved_layers(
    blocks: Sequence[BlockComparison], alone: Sequence[Place]
) -> list[BlockComparison]:
    """Return the blocks, with one cause for all moved layers of a stack.

    Parameters
    ----------
    blocks
        The comparisons of all blocks.
    alone
        The blocks that only one model has. Stacks of equal depth have no such blocks, and keep
        their causes.
    """
    causes: dict[tuple[str, str], Mismatch] = {}
    for stack, kind in {(place.stack, place.kind) for place in alone}:
        members = [block for block in blocks if (block.stack, block.kind) == (stack, kind)]
        cause = _cause_of_stack([_LayerOrigin(block.layer, source_of(block)) for block in members])
        if cause is not None:
            causes[stack, kind] = cause
    explained = []
    for block in blocks:
        cause = causes.get((block.stack, block.kind))
        if cause is not None:
            block = _with_cause_of_stack(block, cause)
        explained.append(block)
    return explained


def _with_cause_of_stack(block: BlockComparison, cause: Mismatch) -> BlockComparison:
    """Return a block with the cause of its stack, if the block is new or has moved."""
    if block.layer in cause.facts["new"]:
        return replace(block, mismatches=(cause,))
    source = source_of(block)
    if source is None or source == block.layer:
        return block
    cause = replace(cause, facts={**cause.facts, "other_layer": source})
    further = [mismatch for mismatch in block.mismatches if mismatch.verdict is not Kind.LAYER]
    return replace(block, mismatches=(cause, *further))


def moved_prefixes(pairs: Sequence[PlanPair], blocks: Sequence[BlockComparison]) -> dict[str, str]:
    """Return the layers that moved because other layers were dropped or repeated, by name.

    Parameters
    ----------
    pairs, blocks
        The pairs of blocks, and the comparisons of these pairs.

    Returns
    -------
    dict
        By prefix of the names of a layer's tensors in the reference, such as ``model.layers.3.``,
        the prefix of the names of its source.
    """
    prefixes = {}
    for (plan, _), block in zip(pairs, blocks, strict=True):
        source = source_of(block) if moved_cause(block) else None
        prefix = layer_prefix(plan.query.tensor)
        if source is not None and prefix:
            prefixes[prefix] = prefix.replace(f".{plan.layer}.", f".{source}.")
    return prefixes


def alone_prefixes(pairs: Sequence[PlanPair], alone: Sequence[Place]) -> Iterator[str]:
    """Yield the prefixes of tensor names of layers in only one model."""
    for place in alone:
        for plan, _ in pairs:
            prefix = layer_prefix(plan.query.tensor)
            if prefix and (plan.stack, plan.kind) == (place.stack, place.kind):
                yield prefix.replace(f".{plan.layer}.", f".{place.layer}.")
                break


def with_tensors_of_layers(
    blocks: Sequence[BlockComparison], names: Sequence[str]
) -> list[BlockComparison]:
    """Return the blocks; causes of moved layers get the tensors outside of forms.

    Parameters
    ----------
    blocks
        The blocks, with the causes of layers that moved.
    names
        The reference's names of the tensors that moved with a layer, or the candidate's names of
        added tensors.
    """
    tensors: Mapping[str, str] = dict.fromkeys(names, "tensor")
    explained = []
    for block in blocks:
        cause = moved_cause(block)
        if cause is not None:
            extended = replace(cause, facts={**cause.facts, "tensors": tensors})
            further = [mismatch for mismatch in block.mismatches if mismatch is not cause]
            block = replace(block, mismatches=(extended, *further))
        explained.append(block)
    return explained


def moved_cause(block: BlockComparison) -> Mismatch | None:
    """Return the cause of a layer that moved, because layers were dropped or repeated."""
    for cause in block.mismatches:
        if cause.verdict is Kind.LAYER and "missing" in cause.facts:
            return cause
    return None


def source_of(block: BlockComparison) -> int | None:
    """Return the source of a block; None if no layer of the reference has the same weights."""
    for cause in block.mismatches:
        if cause.verdict is Kind.LAYER:
            layer = cause.facts.get("other_layer")
            return None if layer is None else int(layer)
    return None if block.unequal else block.layer


def _cause_of_stack(layers: Sequence[_LayerOrigin]) -> Mismatch | None:
    """Return the cause of a stack's moved layers; None if the layers are not in order."""
    if any(layer.source is None for layer in layers):
        return _cause_of_inserted(layers)
    numbers = [layer.layer for layer in layers]
    sources = [layer.source for layer in layers if layer.source is not None]
    if sources == numbers or sources != sorted(sources):
        return None
    moved = [layer for layer in layers if layer.is_moved]
    if len(moved) < 2 and sources[-1] == numbers[-1]:
        return None
    dropped = sorted(set(range(min(numbers), max(sources) + 1)) - set(sources))
    repeated = sorted({source for source in sources if sources.count(source) > 1})
    if bool(dropped) == bool(repeated):
        return None
    change = f"{_numbered(dropped)} missing" if dropped else f"{_numbered(repeated)} repeated"
    facts = {"missing": dropped, "repeated": repeated, "new": []}
    return Mismatch(Kind.LAYER, f"{Kind.LAYER}: {change}, and {_in_words(moved)}", facts=facts)


def _cause_of_inserted(layers: Sequence[_LayerOrigin]) -> Mismatch | None:
    """Return the cause of new layers among the reference's layers; None if these are not in order.

    The first layers of the reference must all be present once.
    """
    new = [layer.layer for layer in layers if layer.source is None]
    sources = [layer.source for layer in layers if layer.source is not None]
    moved = [layer for layer in layers if layer.is_moved]
    first = layers[0].layer
    if not moved or sources != list(range(first, first + len(sources))):
        return None
    facts = {"missing": [], "repeated": [], "new": new}
    reason = f"{Kind.LAYER}: {_numbered(new)} new, and {_in_words(moved)}"
    return Mismatch(Kind.LAYER, reason, facts=facts)


def _numbered(layers: Sequence[int]) -> str:
    """Return the beginning of a sentence about some layers, with its verb.

    Examples
    --------
    >>> _numbered([3]), _numbered([3, 4])
    ('layer 3 is', 'layers 3-4 are')
    """
    if len(layers) == 1:
        return f"layer {layers[0]} is"
    return f"layers {spans(layers)} are"


def _in_words(moved: Sequence[_LayerOrigin]) -> str:
    """Return a phrase about layers with the weights of other layers."""
    layers = [layer.layer for layer in moved]
    sources = [layer.source for layer in moved if layer.source is not None]
    if len(layers) == 1:
        return f"layer {layers[0]} has those of layer {sources[0]}"
    return f"layers {spans(layers)} have those of layers {spans(sources)}"
