"""Views of a checkpoint: one form, the coupling of heads, scores by distance, or rotary planes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wqk.errors import CheckpointError, FormError
from wqk.inspecting.views import View, bands_view, coupling_view, distance_view, form_view
from wqk.model import open as open_model


def show(
    ref: Any,
    layer: int | None = None,
    *,
    head: int | None = None,
    coupling: bool = False,
    distances: Sequence[int] | None = None,
    bands: bool = False,
    stack: str | None = None,
    kind: str = "self",
    gamma: float = 2.0,
) -> View:
    """Show a layer's or a head's form, the coupling of heads, or the effect of positions.

    Parameters
    ----------
    ref
        A `Model`, or what `wqk.open` takes.
    layer, stack, kind
        As for `Model.block`.
    head
        One head instead of the layer.
    coupling
        How far each pair of heads are each other's transposes.
    distances
        Scores at these relative distances (rotary models).
    bands
        How weight is distributed over rotary planes, and how forms change with the distance: of one
        layer's heads, or without ``layer`` of all layers.
    gamma
        Threshold of outlying norms, in standard deviations above the mean.

    Returns
    -------
    View
        ``values`` holds the numbers, ``figure()`` draws them, ``save(path)`` writes the figure.

    Raises
    ------
    WqkError
        There is no such checkpoint, layer or head.

    Examples
    --------
    >>> import wqk
    >>> view = wqk.show(wqk.demo_model("encoder"), layer=2, head=1)
    >>> view.title
    'encoder, layer 2, head 1'
    """
    if sum((coupling, head is not None, distances is not None, bands)) > 1:
        raise FormError(
            "head, coupling, distances and bands are mutually exclusive; give one of them"
        )
    model = open_model(ref)
    file = Path(model.name).name
    if layer is None:
        if not bands:
            raise FormError("a view shows one layer; give its number (only bands show all layers)")
        asked = [b for b in model if b.kind == kind and stack in (None, b.stack)]
        chosen = [b for b in asked if b.plan.rotary or b.plan.axial] or asked
        if len({b.stack for b in chosen}) != 1:
            stacks = " or ".join(sorted({b.stack for b in chosen or model}))
            raise CheckpointError(f"{model.name}: bands are of one stack; choose from {stacks}")
        return bands_view(chosen, file, by_head=False)
    block = model.block(layer, stack=stack, kind=kind)
    several = len({(p.stack, p.kind) for p in model.plans}) > 1
    which = f"{block.stack} {block.kind}, " if several else ""
    name = f"{file}, {which}layer {block.layer}"
    if distances is not None:
        return distance_view(block, name, distances, gamma)
    if bands:
        return bands_view([block], name, by_head=True)
    return coupling_view(block, name) if coupling else form_view(block, name, head, gamma)
