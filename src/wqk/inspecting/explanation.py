"""Explanation of a scan without weights: tensors to read, and terms that forms leave out."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any

from wqk._console import Result, display_name, kind_in_words, size, spans
from wqk.attention.factors import omissions
from wqk.checkpoints import Checkpoint
from wqk.families import Aspect, AttentionPlan
from wqk.families.candidates import recurrent_layers
from wqk.families.config import Config
from wqk.families.naming import layers_beyond
from wqk.model import Model
from wqk.model import open as open_model
from wqk.tables.sheet import Sheet, SheetColumn


@dataclass(frozen=True)
class TensorUse:
    """One tensor, or the same tensor in several layers, and its role in the form.

    Attributes
    ----------
    stack, kind
        Stack and kind of the tensor's attention.
    layers
        Layer numbers, such as ``0-11``.
    role
        ``query``, ``key``, a bias, or a norm's gain.
    tensor
        Name of the tensor, with ``*`` instead of the layer's number.
    layout
        Layout of the role within the tensor: see `wqk.families.layouts`.
    heads
        Number of heads times head width.
    dtype, shape
        Stored type and shape, in one layer.
    bytes
        Total number of bytes read in all these layers.
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


# Attributes that users may expect, and the attributes to use instead.
EXPLANATION_SYNONYMS = {
    "names": "uses",
    "size": "bytes_to_read",
    "tensors": "uses",
    "total_bytes": "bytes_to_read",
}


@dataclass(frozen=True, repr=False)
class Explanation(Result, synonyms=EXPLANATION_SYNONYMS):
    """Interpretation of a checkpoint.

    Attributes
    ----------
    checkpoint, model_type, family
        Names of the checkpoint, the model type and the family.
    uses
        All tensors that a scan reads.
    notes
        Sentences on the terms that forms contain and leave out.
    bytes_to_read, bytes_stored
        Bytes that a scan reads, and bytes of all tensors.
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
            (display_name(self.checkpoint), "bold"),
            f"\nmodel type {self.model_type or 'unknown'} → family {self.family}\n",
        )
        by_attention = groupby(self.uses, key=lambda use: (use.stack, use.kind, use.layers))
        for (stack, kind, layers), uses in by_attention:
            yield Text(f"{stack} {kind_in_words(kind)}, layers {layers}")
            table = Sheet([])
            for name in ("role", "tensor", "layout", "heads", "stored", "bytes"):
                is_optional = name in ("layout", "stored")
                table.columns.append(SheetColumn(name, text=True, optional=is_optional))
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
        """The family, and the bytes that a scan reads."""
        return f"{self.checkpoint}: family {self.family}. {self._read}"

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return [vars(use) for use in self.uses]


def explain(ref: Any) -> Explanation:
    """Show which tensors are queries and keys, and the bytes a scan will read.

    Parameters
    ----------
    ref
        A `Model`, or a reference for `wqk.open`.

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
    parts = set(chain.from_iterable(plan.parts for plan in plans))
    model_type = checkpoint.config.get("model_type")
    return Explanation(
        checkpoint=checkpoint.name,
        model_type=model_type if isinstance(model_type, str) else None,
        family=plans[0].family,
        uses=tuple(_uses(checkpoint, plans)),
        notes=(
            *dict.fromkeys(chain.from_iterable(map(_notes, plans))),
            *_key_heads_by_shape(checkpoint, plans),
            *_unread_settings(checkpoint, plans),
            *_without_form(model),
            *(f"{name}: looks like further attention, and is not read." for name in model.unread),
            *(f"{note}." for note in checkpoint.notes),
        ),
        bytes_to_read=sum(part.nbytes(checkpoint.info(part.name)) for part in parts),
        bytes_stored=sum(info.nbytes for info in checkpoint.tensors().values()),
    )


def _key_heads_by_shape(checkpoint: Checkpoint, plans: Sequence[AttentionPlan]) -> Iterator[str]:
    """Yield sentences on numbers of key heads that only the shapes of tensors give."""
    sentences = []
    for plan in plans:
        rule = plan.rule
        if rule.guess or not rule.key_heads or plan.key.heads == plan.query.heads:
            continue
        config = Config(checkpoint.config, rule.config, rule.defaults, rule.model_type)
        if config.optional_whole(rule.key_heads, plan.layer) is None:
            sentences.append(
                f"{plan.stack} {plan.what}: config.json lacks {' or '.join(rule.key_heads)}; "
                f"{plan.key.heads} key heads follow from the shapes of the tensors."
            )
    yield from dict.fromkeys(sentences)


def _unread_settings(checkpoint: Checkpoint, plans: Sequence[AttentionPlan]) -> Iterator[str]:
    """Yield sentences on settings of the configuration that wqk does not read."""
    for path in dict.fromkeys(["", *(plan.rule.config for plan in plans)]):
        prefix = f"{path}." if path else ""
        config = Config(checkpoint.config, path)
        for key in config.unread:
            yield f"{prefix}{key} stands in config.json, and is not read in models of this type."
        for key in config.switched:
            yield (
                f"{prefix}{key} stands in config.json, is not read, and changes attention in "
                "models of this type."
            )


def _without_form(model: Model) -> Iterator[str]:
    """Yield sentences on layers in which no block has a form, with the reason."""
    tensors = model.checkpoint.tensors()
    explained = {plan.layer for plan in model.scored}
    for kind, recurrent in recurrent_layers(tensors).items():
        explained.update(recurrent)
        if layers := set(recurrent) - {plan.layer for plan in model.mixers}:
            yield f"layers {spans(layers)}: {kind}; it has no form."
    queries = [plan.query.tensor for plan in model.scored if not plan.rule.every_layer]
    if not queries:
        return
    # Numbers of all layers that the file stores, under the prefixes of the queries' names.
    prefixes = "|".join({re.escape(re.split(r"(?<=\.)\d", name)[0]) for name in queries})
    stored = set()
    for name in tensors:
        if match := re.match(rf"(?:{prefixes})(\d{{1,9}})\.", name):
            stored.add(int(match[1]))
    if layers := stored - explained - {*layers_beyond(queries, tensors)}:
        yield f"layers {spans(layers)}: no attention there, and no recurrence."


def _uses(checkpoint: Checkpoint, plans: Sequence[AttentionPlan]) -> Iterator[TensorUse]:
    """Yield the tensors' uses, merged if they differ only in the layer."""
    layers_by_use: dict[TensorUse, list[tuple[int, int]]] = {}  # layer and bytes
    for plan in plans:
        roles = [("query", plan.query, *role) for role in plan.query.roles]
        roles += [("key", plan.key, *role) for role in plan.key.roles]
        roles.sort(key=lambda role: role[2] != "")  # weights first; "" is their role
        for name, side, role, part in roles:
            info = checkpoint.info(part.name)
            pieces = part.name.split(".")
            use = TensorUse(
                stack=plan.stack,
                kind=plan.kind,
                layers="",
                role=f"{name}_{role}" if role else name,
                tensor=".".join("*" if piece.isdigit() else piece for piece in pieces),
                layout="" if role else plan.rule.layout,
                heads=f"{side.heads}×{side.head_width}",
                dtype=info.dtype,
                shape=info.shape,
                bytes=0,
            )
            layers_by_use.setdefault(use, []).append((plan.layer, part.nbytes(info)))
    for use, layers in layers_by_use.items():
        yield replace(
            use,
            layers=spans({layer for layer, _ in layers}),
            bytes=sum(nbytes for _, nbytes in layers),
        )


def _notes(plan: AttentionPlan) -> Iterator[str]:
    """Yield sentences on the discovery of a block, and on the terms that its form leaves out."""
    block = f"{plan.stack} {plan.what}"
    if plan.rule.guess:
        yield f"{block}: {plan.rule.guess}."
    yield from (f"{block}: {sentence}." for sentence in _assumptions(plan))
    if plan.rule.note:
        yield f"{block}: {plan.rule.note}."
    if plan.rule.exact and (unstated := _unstated(plan)):
        yield (
            f"{block}: the family file states {', '.join(unstated)}; wqk computes "
            "without. If the model has them, add them to the file."
        )
    if plan.reason:
        yield f"{block}: partial: {plan.reason}."
    for omission in omissions(plan):
        if omission.kind == "mixing":
            continue  # the reason lists these layers
        if omission.kind == "unknown" and plan.assumptions:
            continue  # the assumptions list the unknown parts
        yield f"{block}: {omission.explanation}."
    if plan.applications > 1:
        yield f"{block}: each layer's weights are applied {plan.applications} times."


def _unstated(plan: AttentionPlan) -> list[str]:
    """Return the parts of a block that a user's family file leaves out, such as "no mask"."""
    rule = plan.rule
    unstated = []
    if not (rule.rotary or rule.position or plan.positional):
        unstated.append("no positions (rotary, position)")
    if not rule.input_norm:
        unstated.append("no norm before the projections (input_norm)")
    if not (rule.causal or rule.causal_if or rule.causal_under or rule.window):
        unstated.append("no mask (causal, window)")
    return unstated


def _assumptions(plan: AttentionPlan) -> Iterator[str]:
    """Yield clauses on assumed parts of a plan, and on unknown parts that have one reason."""
    aspects_by_reason: dict[str, list[str]] = {}
    for assumption in plan.assumptions:
        if assumption.aspect is Aspect.MISSING:
            continue  # the reason of a partial plan lists missing tensors
        if assumption.is_unknown:
            aspects_by_reason.setdefault(assumption.reason, []).append(assumption.aspect.value)
        else:
            yield str(assumption)
    for reason, aspects in aspects_by_reason.items():
        yield f"unknown: {', '.join(aspects)} ({reason})"
