"""Layers that were dropped or repeated: one cause for all layers that moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from wqk._console import spans
from wqk.families import Place
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.outside import layer_of
from wqk.sameness.weights import Pair


def with_moved_layers(
    blocks: Sequence[BlockComparison], alone: Sequence[Place]
) -> list[BlockComparison]:
    """Return the blocks, with one cause where a stack lost or repeats layers of the reference.

    ``alone`` are the blocks that only one of the two has: stacks of equal depth keep their causes.
    """
    causes: dict[tuple[str, str], Mismatch] = {}
    for stack in {(place.stack, place.kind) for place in alone}:
        cause = _moved([block for block in blocks if (block.stack, block.kind) == stack])
        if cause is not None:
            causes[stack] = cause
    explained = []
    for block in blocks:
        cause = causes.get((block.stack, block.kind))
        held = _held(block)
        if cause is not None and block.layer in cause.facts["new"]:
            block = replace(block, mismatches=(cause,))
        elif cause is not None and held is not None and held != block.layer:
            others = tuple(each for each in block.mismatches if each.verdict is not Kind.LAYER)
            facts = {**cause.facts, "other_layer": held}
            block = replace(block, mismatches=(replace(cause, facts=facts), *others))
        explained.append(block)
    return explained


def moved_prefixes(pairs: Sequence[Pair], blocks: Sequence[BlockComparison]) -> dict[str, str]:
    """Return the layers that moved because others were dropped or repeated, by their names.

    Parameters
    ----------
    pairs, blocks
        The pairs of blocks, and how these differ.

    Returns
    -------
    dict
        What the names of a layer's tensors begin with in the reference, such as
        ``model.layers.3.``, and the same of the reference's layer that the candidate has there.
    """
    prefixes = {}
    for (plan, _), block in zip(pairs, blocks, strict=True):
        source = _held(block) if _moved_cause(block) else None
        prefix = layer_of(plan.query.tensor)
        if source is not None and prefix:
            prefixes[prefix] = prefix.replace(f".{plan.layer}.", f".{source}.")
    return prefixes


def alone_prefixes(pairs: Sequence[Pair], alone: Sequence[Place]) -> Iterator[str]:
    """Yield what the names of the tensors of layers begin with that only one model has."""
    for place in alone:
        for plan, _ in pairs:
            prefix = layer_of(plan.query.tensor)
            if prefix and (plan.stack, plan.kind) == (place.stack, place.kind):
                yield prefix.replace(f".{plan.layer}.", f".{place.layer}.")
                break


def with_tensors_of_layers(
    blocks: Sequence[BlockComparison], names: Sequence[str]
) -> list[BlockComparison]:
    """Return the blocks; the causes of layers that moved also contain tensors outside of forms.

    Parameters
    ----------
    blocks
        The blocks, with the causes of layers that moved.
    names
        The reference's names of the tensors that moved along, or the candidate's of added ones.
    """
    tensors: Mapping[str, str] = dict.fromkeys(names, "tensor")
    explained = []
    for block in blocks:
        cause = _moved_cause(block)
        if cause is not None:
            facts = {**cause.facts, "tensors": tensors}
            others = (one for one in block.mismatches if one is not cause)
            block = replace(block, mismatches=(replace(cause, facts=facts), *others))
        explained.append(block)
    return explained


def _moved_cause(block: BlockComparison) -> Mismatch | None:
    """The cause of a layer that moved because others were dropped or repeated."""
    for cause in block.mismatches:
        if cause.verdict is Kind.LAYER and "missing" in cause.facts:
            return cause
    return None


def _held(block: BlockComparison) -> int | None:
    """The layer of the reference that a block has; None if it has none as a whole."""
    for cause in block.mismatches:
        if cause.verdict is Kind.LAYER:
            layer = cause.facts.get("other_layer")
            return None if layer is None else int(layer)
    return None if block.unequal else block.layer


def _moved(blocks: Sequence[BlockComparison]) -> Mismatch | None:
    """The cause of the layers of a stack that moved; None if they do not follow each other."""
    held = [_held(block) for block in blocks]
    layers = [layer for layer in held if layer is not None]
    own = [block.layer for block in blocks]
    new = [layer for layer, source in zip(own, held, strict=True) if source is None]
    if new:
        return _inserted(own, held, new)
    if layers == own or layers != sorted(layers):
        return None
    moved = [layer for layer, source in zip(own, layers, strict=True) if layer != source]
    sources = [source for layer, source in zip(own, layers, strict=True) if layer != source]
    if len(moved) < 2 and layers[-1] == own[-1]:
        return None
    dropped = sorted(set(range(min(own), max(layers) + 1)) - set(layers))
    repeated = sorted({layer for layer in layers if layers.count(layer) > 1})
    if dropped and not repeated:
        which = f"layers {spans(dropped)} are" if len(dropped) > 1 else f"layer {dropped[0]} is"
        text = f"{which} missing"
    elif repeated and not dropped:
        which = f"layers {spans(repeated)} are" if len(repeated) > 1 else f"layer {repeated[0]} is"
        text = f"{which} repeated"
    else:
        return None
    reason = f"{Kind.LAYER}: {text}, and {_place(moved, sources)}"
    facts = {"missing": dropped, "repeated": repeated, "new": []}
    return Mismatch(Kind.LAYER, reason, facts=facts)


def _place(moved: Sequence[int], sources: Sequence[int]) -> str:
    """Return a phrase on layers that have those of others."""
    if len(moved) == 1:
        return f"layer {moved[0]} has those of layer {sources[0]}"
    return f"layers {spans(moved)} have those of layers {spans(sources)}"


def _inserted(
    own: Sequence[int], held: Sequence[int | None], new: Sequence[int]
) -> Mismatch | None:
    """The cause of layers that lie among those of the reference; None if others are not in order.

    ``held`` are the reference's layers that the layers ``own`` have; ``new`` have none.
    """
    known = [(layer, source) for layer, source in zip(own, held, strict=True) if source is not None]
    sources = [source for _, source in known]
    moved = [layer for layer, source in known if layer != source]
    if not moved or sources != list(range(own[0], own[0] + len(sources))):
        return None
    moved_sources = [source for layer, source in known if layer != source]
    which = f"layers {spans(new)} are" if len(new) > 1 else f"layer {new[0]} is"
    reason = f"{Kind.LAYER}: {which} new, and {_place(moved, moved_sources)}"
    facts = {"missing": [], "repeated": [], "new": [*new]}
    return Mismatch(Kind.LAYER, reason, facts=facts)
