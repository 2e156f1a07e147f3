"""One block's attention: its heads as bilinear forms, and what its score holds beside them.

Axes: H query heads, G key heads, R head width, D width, N tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace

from wqk._caching import cached_property
from wqk._html import html_table
from wqk._typing import Array, Float
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, NonFiniteWeights
from wqk.families import find_family, load_family, plan
from wqk.forms import BilinearForm

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from wqk.checkpoints import Checkpoint, Part
    from wqk.families import AttentionPlan, AttentionRule, Composed, Projection


@dataclass(frozen=True, eq=False, repr=False)
class Attention:
    """The queries and keys of one block, as read from a checkpoint.

    Norms between projection and score are folded into weights and biases as far as they are linear:
    gains, and the mean that they take off. A token's own scale is not.

    Attributes
    ----------
    query_weight
        (H, R, D), as an ``nn.Linear`` stores it: q = W x.
    key_weight
        (G, R, D). Query head h meets key head h // (H/G).
    query_bias, key_bias
        (H, R) and (G, R), or None.
    query_shift, key_shift
        What a norm between projection and score adds after it, (H, R) and (G, R), or None.
    plan
        Where it came from: stack, kind, layer, scale, rotary positions, status.
    """

    plan: AttentionPlan
    query_weight: Float[Array, "heads width d_query"]
    key_weight: Float[Array, "key_heads width d_key"]
    query_bias: Float[Array, "heads width"] | None = None
    key_bias: Float[Array, "key_heads width"] | None = None
    query_shift: Float[Array, "heads width"] | None = None
    key_shift: Float[Array, "key_heads width"] | None = None

    @property
    def layer(self) -> int:
        """The layer's number within its stack, from 0."""
        return self.plan.layer

    @property
    def head_count(self) -> int:
        """Number of query heads, H."""
        return int(self.query_weight.shape[0])

    @property
    def key_head_count(self) -> int:
        """Number of key heads, G."""
        return int(self.key_weight.shape[0])

    @cached_property
    def heads(self) -> BilinearForm:
        """All heads as a stack (G, H/G): row g holds the query heads that share key head g."""
        heads, width, d_query = self.query_weight.shape
        groups = self.key_head_count
        query = self.query_weight.reshape(groups, heads // groups, width, d_query)
        return BilinearForm(query.swapaxes(-1, -2), self.key_weight[:, None].swapaxes(-1, -2))

    def head(self, index: int) -> BilinearForm:
        """One head's form, D × D of rank R.

        Raises
        ------
        IndexError
            There is no such head.
        """
        if not -self.head_count <= index < self.head_count:
            raise IndexError(f"head {index} of {self.head_count}")
        key_head = index % self.head_count // (self.head_count // self.key_head_count)
        return BilinearForm(self.query_weight[index].T, self.key_weight[key_head].T)

    @cached_property
    def form(self) -> BilinearForm:
        """The layer's form: the sum over its heads, of rank G·R (paper, S20)."""
        return self.heads.sum()

    def __repr__(self) -> str:
        heads = f"{self.head_count} heads"
        if self.key_head_count != self.head_count:
            heads += f" over {self.key_head_count} key heads"
        return (
            f"Attention({self.plan.stack} {self.plan.rule.kind}, layer {self.layer}: "
            f"{heads}, {self.form.shape[0]} × {self.form.shape[1]})"
        )

    def _repr_html_(self) -> str:
        plan = self.plan
        facts = {
            "attention": f"{plan.stack} {plan.rule.kind}, layer {self.layer}, family {plan.family}",
            "heads": f"{self.head_count} over {self.key_head_count} key heads, of width "
            f"{self.query_weight.shape[1]}",
            "form": f"{self.form.shape[0]} × {self.form.shape[1]}, rank {self.form.rank}",
            "score scale": f"{plan.scale:.4g}, not part of the form",
            "positions": "rotary" if plan.rotary else plan.position or "none in the score",
            "status": plan.reason or plan.status,
        }
        return html_table("Attention", ("", ""), facts.items())


def attention_plans(
    checkpoint: Checkpoint, family: Path | None = None, heads_per_layer: int | None = None
) -> list[AttentionPlan]:
    """Every attention block of a checkpoint, in order, before anything is read.

    Parameters
    ----------
    checkpoint
        Opened with `wqk.open_checkpoint`.
    family
        A family file to use instead of the model type's own.
    heads_per_layer
        Number of query heads of a model whose family has to be guessed from its tensors' names.

    Raises
    ------
    UnknownFamily
        No family knows the model, and none can be guessed; or the given file is not a family.
    CheckpointError
        The tensors are not all there or do not fit the configuration.
    """
    chosen = load_family(family) if family else find_family(checkpoint, heads_per_layer)
    return plan(checkpoint, chosen)


def load_attention(checkpoint: Checkpoint, plan: AttentionPlan) -> Attention:
    """Read one block's queries and keys, in one request, as arrays of the checkpoint's library.

    Raises
    ------
    NonFiniteWeights
        A weight or bias has NaN or infinite entries; says which tensor and how many.
    """
    parts = plan.parts
    wanted = list(dict.fromkeys(parts.values()))
    stored = dict(zip(wanted, checkpoint.read(wanted), strict=True))
    query = _load_side(stored, plan, "query", plan.query, checkpoint.name)
    key = _load_side(stored, plan, "key", plan.key, checkpoint.name)
    return Attention(plan, query[0], key[0], query[1], key[1], query[2], key[2])


def _load_side(
    stored: Mapping[Part, Array],
    plan: AttentionPlan,
    side: str,
    projection: Projection | Composed,
    name: str,
) -> tuple[Array, Array | None, Array | None]:
    """Weight (heads, R, D), bias (heads, R) and shift (heads, R) of the queries or the keys."""
    parts = plan.parts
    weight = projection.weight(stored)
    xp = array_namespace(weight)
    bias = stored[parts[f"{side}_bias"]] if f"{side}_bias" in parts else None
    gain, shift = (
        xp.concat([stored[part].reshape(-1) for part in norms]) if norms else None
        for norms in (getattr(plan, f"{side}_norm"), getattr(plan, f"{side}_norm_bias"))
    )
    bias = None if bias is None else bias.reshape(weight.shape[:2])
    if gain is not None:
        weight, bias = _fold_norm(weight, bias, gain + plan.rule.norm_offset, plan.rule)
    if f"{side}_temperature" in parts:
        logarithms = stored[parts[f"{side}_temperature"]].reshape(-1, 1)
        factors = xp.exp(logarithms).clip(max=plan.rule.temperature_limit)
        weight = weight * factors[..., None]
        bias = None if bias is None else bias * factors
    if shift is not None:
        shift = xp.broadcast_to(shift.reshape(-1, weight.shape[1]), weight.shape[:2])
    for role, array in ((side, weight), (f"{side}_bias", bias)):
        if array is not None:
            _require_finite(array, f"{name}: {parts[role].name}")
    return weight, bias, shift


def read_attention(
    ref: Any,
    layer: int,
    *,
    stack: str | None = None,
    kind: str = "self",
    family: Path | None = None,
    **hub: Any,
) -> Attention:
    """The attention of one layer of a checkpoint.

    Parameters
    ----------
    ref
        As for `open_checkpoint`.
    layer
        Number within its stack, from 0; negative numbers count from the end.
    stack, kind
        Which attention, where a model has several: ``encoder`` or ``decoder``, ``self`` or
        ``cross``.
    family
        A family file to use instead of the model type's own.
    **hub
        ``revision``, ``token``, ``cache_dir`` and so on, for `open_checkpoint`.

    Raises
    ------
    CheckpointError
        There is no such layer, or the stack has to be named.

    Examples
    --------
    >>> import wqk
    >>> attention = wqk.read_attention(wqk.demo_model("encoder"), layer=0)
    >>> attention.head(2)
    BilinearForm(128 × 128, rank 32)
    """
    checkpoint = open_checkpoint(ref, **hub)
    return load_attention(checkpoint, attention_plan(checkpoint, layer, stack, kind, family))


def attention_plan(
    checkpoint: Checkpoint,
    layer: int,
    stack: str | None = None,
    kind: str = "self",
    family: Path | None = None,
) -> AttentionPlan:
    """The plan of one layer; arguments and errors as for `read_attention`."""
    plans = [
        p
        for p in attention_plans(checkpoint, family)
        if p.rule.kind == kind and stack in (None, p.stack)
    ]
    stacks = list(dict.fromkeys(p.stack for p in plans))
    if len(stacks) > 1:
        raise CheckpointError(
            f"{checkpoint.name}: has several stacks, name one of them: stack={stacks[0]!r} or "
            f"{stacks[1]!r}"
        )
    by_layer = {p.layer: p for p in plans}
    wanted = layer if layer >= 0 else max(by_layer, default=-1) + 1 + layer
    if wanted not in by_layer:
        has = f" of the {stacks[0]}, which has {len(plans)}" if stacks else ""
        raise CheckpointError(f"{checkpoint.name}: no {kind}-attention in layer {layer}{has}")
    return by_layer[wanted]


def _fold_norm(
    weight: Array, bias: Array | None, gain: Array, rule: AttentionRule
) -> tuple[Array, Array | None]:
    """Fold what is linear in a norm, per head or over all of them, into what it normalizes."""
    heads, width = weight.shape[:2]
    if len(gain) not in (width, heads * width):
        raise CheckpointError(
            f"a norm of {len(gain)} gains fits neither heads of width {width} nor {heads} of them"
        )
    gains = gain.reshape(-1, width)
    if rule.norm == "layer":
        normalized = 1 if len(gain) == width or rule.norm_over == "head" else (0, 1)
        weight = weight - weight.mean(axis=normalized, keepdims=True)
        bias = None if bias is None else bias - bias.mean(axis=normalized, keepdims=True)
    return weight * gains[..., None], None if bias is None else bias * gains


def _require_finite(weight: Array, name: str) -> None:
    xp = array_namespace(weight)
    # A sum is finite only where all its summands are, and costs one pass.
    if xp.isfinite(xp.sum(weight)):
        return
    count = int(xp.sum(~xp.isfinite(weight)))
    if count:
        raise NonFiniteWeights(
            f"{name}: {count} of {math.prod(weight.shape)} weights are NaN or infinite; "
            "the checkpoint is broken"
        )
