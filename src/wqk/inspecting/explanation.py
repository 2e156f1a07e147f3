"""What a scan of a checkpoint would read and leave out, found without reading weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from wqk._console import Result, kind_in_words, size, spans
from wqk.attention.factors import omissions
from wqk.checkpoints import Checkpoint
from wqk.families import AttentionPlan
from wqk.families.config import Config
from wqk.families.naming import layers_beyond, recurrent_layers
from wqk.model import Model
from wqk.model import open as open_model
from wqk.tables.sheet import Sheet, SheetColumn


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


# What one may try on an explanation, and what has it.
EXPLANATION_SYNONYMS = dict.fromkeys(
    ["bytes", "nbytes", "total_bytes", "size"], "bytes_to_read"
) | dict.fromkeys(["tensors", "names"], "uses")


@dataclass(frozen=True, repr=False)
class Explanation(Result, synonyms=EXPLANATION_SYNONYMS):
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
            yield Text(f"{stack} {kind_in_words(kind)}, layers {layers}")
            headings = ("role", "tensor", "layout", "heads", "stored", "bytes")
            table = Sheet(
                [
                    SheetColumn(name, text=True, optional=name in ("layout", "stored"))
                    for name in headings
                ]
            )
            for use in uses:
                stored = f"{use.dtype} {'×'.join(map(str, use.shape))}"
                table.add(use.role, use.tensor, use.layout, use.heads, stored, size(use.bytes))
            yield table
            yield ""
        for note in self.notes:
            yield Text(f"• {note}")
        yield Text(f"\n{self._read}")

    @property
    def _read(self) -> str:
        share = self.bytes_to_read / max(1, self.bytes_stored)
        return (
            f"A scan reads {size(self.bytes_to_read)} of {size(self.bytes_stored)} ({share:.1%})."
        )

    @property
    def sentence(self) -> str:
        """Its family, and how much a scan reads."""
        return f"{self.checkpoint}: family {self.family}. {self._read}"

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return [vars(use) for use in self.uses]


def explain(ref: Any) -> Explanation:
    """Show which tensors are queries and keys, and the bytes a scan will read.

    Parameters
    ----------
    ref
        A `Model`, or what `wqk.open` takes.

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
    model = open_model(ref)
    checkpoint, plans = model.checkpoint, model.scored
    parts = {part for plan in plans for part in plan.parts}
    model_type = checkpoint.config.get("model_type")
    return Explanation(
        checkpoint=checkpoint.name,
        model_type=model_type if isinstance(model_type, str) else None,
        family=plans[0].family,
        uses=tuple(_uses(checkpoint, plans)),
        notes=(
            *dict.fromkeys(note for plan in plans for note in _notes(plan)),
            *(
                f"{path}{'.' * bool(path)}{key} stands in config.json, {told} of this type."
                for path in dict.fromkeys(["", *(plan.rule.config for plan in plans)])
                for part in [Config(checkpoint.config, path)]
                for keys, told in (
                    (part.unread, "and is not read in models"),
                    (part.switched, "is not read, and changes attention in models"),
                )
                for key in keys
            ),
            *_without_form(model),
            *(f"{name}: looks like further attention, and is not read." for name in model.unread),
            *(f"{note}." for note in checkpoint.notes),
        ),
        bytes_to_read=sum(part.nbytes(checkpoint.info(part.name)) for part in parts),
        bytes_stored=sum(info.nbytes for info in checkpoint.tensors().values()),
    )


def _without_form(model: Model) -> Iterator[str]:
    """Yield the layers of which no block has a form, and why, in sentences."""
    tensors = model.checkpoint.tensors()
    known = {plan.layer for plan in model.scored}
    for kind, found in recurrent_layers(tensors).items():
        known.update(found)
        if layers := set(found) - {plan.layer for plan in model.mixers}:
            yield f"layers {spans(layers)}: {kind}; it has no form."
    queries = [plan.query.tensor for plan in model.scored if not plan.rule.every_layer]
    beside = "|".join({re.escape(re.split(r"(?<=\.)\d", name)[0]) for name in queries})
    numbered = (re.match(rf"(?:{beside})(\d{{1,9}})\.", name) for name in tensors if queries)
    stored = {int(match[1]) for match in numbered if match}
    if layers := stored - known - {*layers_beyond(queries, tensors)}:
        yield f"layers {spans(layers)}: no attention there, and no recurrence."


def _uses(checkpoint: Checkpoint, plans: Sequence[AttentionPlan]) -> Iterator[TensorUse]:
    """Yield the tensors' uses, merged if they differ only in the layer."""
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
        layers = spans({layer for layer, _ in places})
        size = sum(nbytes for _, nbytes in places)
        yield TensorUse(stack, kind, layers, role, tensor, layout, heads, dtype, shape, size)


def _notes(plan: AttentionPlan) -> Iterator[str]:
    """How a block was found, and what its score holds besides the form, in sentences."""
    where = f"{plan.stack} {plan.what}"
    if plan.rule.guess:
        yield f"{where}: {plan.rule.guess}."
    if plan.rule.note:
        yield f"{where}: {plan.rule.note}."
    if plan.reason:
        yield f"{where}: partial: {plan.reason}."
    for omission in omissions(plan):
        if omission.kind == "mixing":
            continue  # the reason lists them
        yield f"{where}: {omission.explanation}."
    if plan.applications > 1:
        yield f"{where}: each layer's weights are applied {plan.applications} times."
