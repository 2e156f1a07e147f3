"""Views of a checkpoint: one form, the coupling of heads, scores by distance, or rotary planes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk._typing import FilePath
from wqk.attention import attention_plan, attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.options import check_options
from wqk.errors import CheckpointError, FormError
from wqk.inspecting.views import View, bands_view, coupling_view, distance_view, form_view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from wqk.checkpoints.options import HubOptions


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
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    **hub: Unpack[HubOptions],
) -> View:
    """Show a layer's or a head's form, the coupling of heads, or the effect of positions.

    Parameters
    ----------
    ref, layer, stack, kind, family, heads_per_layer, key_heads, **hub
        As for `wqk.read_attention`.
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
    check_options("show", hub)
    if sum((coupling, head is not None, distances is not None, bands)) > 1:
        raise FormError(
            "head, coupling, distances and bands are mutually exclusive; give one of them"
        )
    checkpoint = open_checkpoint(ref, **hub)
    plans = attention_plans(checkpoint, family, heads_per_layer, key_heads)
    if layer is None:
        if not bands:
            raise FormError("a view shows one layer; give its number (only bands show all layers)")
        asked = [p for p in plans if p.kind == kind and stack in (None, p.stack)]
        chosen = [p for p in asked if p.rotary or p.axial] or asked
        if len({p.stack for p in chosen}) != 1:
            stacks = " or ".join(sorted({p.stack for p in chosen or plans}))
            raise CheckpointError(
                f"{checkpoint.name}: bands are of one stack; choose from {stacks}"
            )
        attentions = (load_attention(checkpoint, p) for p in chosen)
        return bands_view(attentions, Path(checkpoint.name).name, by_head=False)
    plan = attention_plan(checkpoint, plans, layer, stack, kind)
    several = len({(p.stack, p.kind) for p in plans}) > 1
    which = f"{plan.stack} {plan.kind}, " if several else ""
    name = f"{Path(checkpoint.name).name}, {which}layer {plan.layer}"
    if distances is not None:
        return distance_view(checkpoint, plan, name, distances, gamma)
    attention = load_attention(checkpoint, plan)
    if bands:
        return bands_view([attention], name, by_head=True)
    return coupling_view(attention, name) if coupling else form_view(attention, name, head, gamma)
