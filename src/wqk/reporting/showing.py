"""One form, the coupling of a layer's heads, or scores over distances, of any checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk._typing import FilePath
from wqk.attention import attention_plan, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.options import check_options
from wqk.errors import FormError
from wqk.reporting.views import View, coupling_view, distance_view, form_view

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from wqk.checkpoints.options import HubOptions


def show(
    ref: Any,
    layer: int,
    *,
    head: int | None = None,
    coupling: bool = False,
    distances: Sequence[int] | None = None,
    stack: str | None = None,
    kind: str = "self",
    gamma: float = 2.0,
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    **hub: Unpack[HubOptions],
) -> View:
    """Show one layer's form, one head's, the coupling of its heads, or scores over distances.

    Parameters
    ----------
    ref, layer, stack, kind, family, heads_per_layer, key_heads, **hub
        As for `wqk.read_attention`.
    head
        One head instead of the layer.
    coupling
        How far each pair of heads are each other's transposes, instead of a form.
    distances
        Scores at these relative distances, instead of a form (rotary models).
    gamma
        Outliers exceed the mean norm by this many standard deviations.

    Returns
    -------
    View
        ``values`` holds the numbers; ``figure()`` draws, ``save(path)`` writes the picture.

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
    if sum((coupling, head is not None, distances is not None)) > 1:
        raise FormError("head, coupling and distances are mutually exclusive; give one of them")
    checkpoint = open_checkpoint(ref, **hub)
    plan = attention_plan(checkpoint, layer, stack, kind, family, heads_per_layer, key_heads)
    name = f"{Path(checkpoint.name).name}, layer {plan.layer}"
    if distances is not None:
        return distance_view(checkpoint, plan, name, distances, gamma)
    attention = load_attention(checkpoint, plan)
    return coupling_view(attention, name) if coupling else form_view(attention, name, head, gamma)
