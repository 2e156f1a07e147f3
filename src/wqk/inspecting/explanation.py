"""What a scan of a checkpoint would read and leave out, found without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from wqk._console import Shown, size, spans
from wqk._typing import FilePath
from wqk.attention import attention_plans, unread_attention
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.options import check_options
from wqk.families.candidates import recurrent_layers
from wqk.tables.sheet import Column, Sheet

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Unpack

    from wqk.checkpoints import Checkpoint
    from wqk.checkpoints.options import HubOptions
    from wqk.families import AttentionPlan


@dataclass(frozen=True)
class TensorUse:
    """One tensor, or the same one in several layers, and its role in the form.

    Attributes
    ----------
    stack, kind
        The attention it belongs to.
    layers
        Layer numbers, such as ``0-11``.
    role
        ``query``, ``key``, a bias, or a norm's gain.
    tensor
        Its name; ``*`` stands for the layer's number.
    layout
        How the role lies in it: see `wqk.families.layouts`.
    heads
        Number of heads times their width.
    dtype, shape
        As stored, in one layer.
    bytes
        Read in all these layers together.
    """

    stack: str
    kind: str
    layers: str
    role: str
    tensor: str
    layout: str
    heads: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """How a checkpoint is interpreted.

    Attributes
    ----------
    checkpoint, model_type, family
        Names.
    uses
        Every tensor that a scan reads.
    notes
        What the forms contain and leave out, in sentences.
    bytes_to_read, bytes_stored
        Of the scan, and of all tensors.
    """

    checkpoint: str
    model_type: str | None
    family: str
    uses: tuple[TensorUse, ...]
    notes: tuple[str, ...]
    bytes_to_read: int
    bytes_stored: int

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        yield Text.assemble(
            (self.checkpoint, "bold"),
            f"\nmodel type {self.model_type or 'unknown'} → family {self.family}\n",
        )
        for (stack, kind, layers), uses in groupby(
            self.uses, key=lambda use: (use.stack, use.kind, use.layers)
        ):
            yield Text(f"{stack} {kind}-attention, layers {layers}")
            headings = {"role": 0, "tensor": 0, "layout": 1, "heads": 0, "stored": 2, "bytes": 0}
            table = Sheet([Column(name, True, spare=spare) for name, spare in headings.items()])
            for use in uses:
                stored = f"{use.dtype} {'×'.join(map(str, use.shape))}"
                table.add(use.role, use.tensor, use.layout, use.heads, stored, size(use.bytes))
            yield table
            yield ""
        for note in self.notes:
            yield Text(f"• {note}")
        share = self.bytes_to_read / max(1, self.bytes_stored)
        yield Text(
            f"\nA scan reads {size(self.bytes_to_read)} of {size(self.bytes_stored)} ({share:.1%})."
        )


def explain(
    ref: Any,
    *,
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    **hub: Unpack[HubOptions],
) -> Explanation:
    """Show which tensors of a checkpoint are queries and keys, without reading them.

    Parameters
    ----------
    ref, family, heads_per_layer, key_heads, **hub
        As for `wqk.scan`.

    Raises
    ------
    WqkError
        The checkpoint cannot be opened, or belongs to no known family.

    Examples
    --------
    >>> import wqk
    >>> explanation = wqk.explain(wqk.demo_model("encoder"))
    >>> [(use.role, use.layers, use.heads) for use in explanation.uses][:2]
    [('query', '0-3', '4×32'), ('key', '0-3', '4×32')]
    """
    check_options("explain", hub)
    checkpoint = open_checkpoint(ref, **hub)
    plans = attention_plans(checkpoint, family, heads_per_layer, key_heads)
    parts = {part for plan in plans for part in plan.parts}
    unread = unread_attention(checkpoint, plans)
    model_type = checkpoint.config.get("model_type")
    return Explanation(
        checkpoint=checkpoint.name,
        model_type=model_type if isinstance(model_type, str) else None,
        family=plans[0].family,
        uses=tuple(_uses(checkpoint, plans)),
        notes=(
            *dict.fromkeys(note for plan in plans for note in _notes(plan)),
            *(
                f"layers {spans(layers)}: {kind}, which has no form."
                for kind, layers in recurrent_layers(checkpoint.tensors()).items()
            ),
            *(f"{name}: looks like further attention, and is not read." for name in unread),
        ),
        bytes_to_read=sum(part.nbytes(checkpoint.info(part.name)) for part in parts),
        bytes_stored=sum(info.nbytes for info in checkpoint.tensors().values()),
    )


def _uses(checkpoint: Checkpoint, plans: Sequence[AttentionPlan]) -> Iterator[TensorUse]:
    """The tensors' uses, merged if they differ only in the layer."""
    gathered: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
    for plan in plans:
        roles = [("query", plan.query, *role) for role in plan.query.roles]
        roles += [("key", plan.key, *role) for role in plan.key.roles]
        for name, side, role, part in sorted(roles, key=lambda one: one[2] != ""):  # weights first
            info = checkpoint.info(part.name)
            alike = (
                plan.stack,
                plan.kind,
                f"{name}_{role}" if role else name,
                ".".join("*" if word.isdigit() else word for word in part.name.split(".")),
                "" if role else plan.rule.layout,
                f"{side.heads}×{side.head_width}",
                info.dtype,
                info.shape,
            )
            gathered.setdefault(alike, []).append((plan.layer, part.nbytes(info)))
    for (stack, kind, role, tensor, layout, heads, dtype, shape), places in gathered.items():
        layers = spans(sorted({layer for layer, _ in places}))
        size = sum(nbytes for _, nbytes in places)
        yield TensorUse(stack, kind, layers, role, tensor, layout, heads, dtype, shape, size)


def _notes(plan: AttentionPlan) -> Iterator[str]:
    """Terms of the model's score besides the form, in the order of application."""
    where = f"{plan.stack} {plan.kind}-attention"
    if plan.rule.guess:
        yield f"{where}: {plan.rule.guess}."
    if plan.rule.note:
        yield f"{where}: {plan.rule.note}."
    if plan.reason:
        yield f"{where}: partial: {plan.reason}."
    if plan.rotary is not None:
        yield (
            f"{where}: rotary positions; the form is the score at distance 0 "
            f"({plan.rotary.order} order, {2 * len(plan.rotary.frequencies)} of "
            f"{plan.query.head_width} dimensions turn)."
        )
    if (plan.query.bias or plan.key.bias) and plan.rule.guess:
        yield f"{where}: biases are not part of the form."
    elif plan.query.bias or plan.key.bias:
        key_bias = (
            "the key's, turned by the positions, one in the query"
            if plan.rotary
            else "the key's is the same for all keys and cancels in the softmax"
        )
        yield (
            f"{where}: biases are not part of the form; the query's adds a term in the key alone, "
            f"{key_bias}."
        )
    if plan.position.startswith("rotary"):
        yield f"{where}: positions are {plan.position}; the form is the score of equal positions."
    elif plan.position:
        yield f"{where}: {plan.position} positions are added to scores and not part of the form."
    if plan.query.input_norm or plan.key.input_norm:
        yield f"{where}: the gains of the norms that feed it are not part of the form."
    if plan.softcap:
        yield f"{where}: scores are softly capped at ±{plan.softcap:g}; the form is before that."
    if plan.sinks:
        yield f"{where}: a sink, a score of its own in every head, takes part of the attention."
    if plan.window is not None:
        yield f"{where}: some layers attend within a window of {plan.window} tokens."
    if plan.applications > 1:
        yield f"{where}: each layer's weights are applied {plan.applications} times."
    if plan.rule.guess:
        yield f"{where}: scale, positions and masks are unknown."
    else:
        yield f"{where}: the model multiplies scores by {plan.scale:.4g}; the form is without it."
