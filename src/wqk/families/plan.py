"""From a family and a checkpoint's tensor names to what has to be read, block by block.

Nothing is read here: names, shapes and the configuration decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk.errors import CheckpointError
from wqk.families.latent import latent
from wqk.families.layouts import Composed, Projection, sectioned, separate
from wqk.families.naming import (
    bias_of,
    find,
    input_norm_of,
    input_spellings,
    named,
    norm_of,
    part_of,
    weight_name,
)
from wqk.families.rotary import Rotary, rotary_of, rotary_stretch
from wqk.families.values import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wqk.checkpoints import Checkpoint, Part, TensorInfo
    from wqk.families.family import AttentionRule, Family
    from wqk.families.naming import Found, InputNorm


@dataclass(frozen=True)
class Positional:
    """Queries and keys that hold positions alone; their product is added to that of the form."""

    query: Projection | Composed
    key: Projection | Composed
    rotary: Rotary


@dataclass(frozen=True)
class AttentionPlan:
    """One block's attention: its place in the model, its tensors, and the rest of its score."""

    family: str
    rule: AttentionRule
    layer: int
    query: Projection | Composed
    key: Projection | Composed
    query_bias: Part | None
    key_bias: Part | None
    query_norm: tuple[Part, ...]  # one for all heads, or one for each
    key_norm: tuple[Part, ...]
    query_norm_bias: tuple[Part, ...]
    key_norm_bias: tuple[Part, ...]
    query_input: InputNorm | None
    key_input: InputNorm | None
    value: Projection | Composed | None
    value_bias: Part | None
    output: Projection | None
    norm_epsilon: float
    scale: float
    softcap: float | None
    clip: float | None
    sinks: Part | None
    temperature: Part | None
    causal: bool
    window: str | None
    applications: int
    position: str
    rotary: Rotary | None
    positional: Positional | None

    @property
    def stack(self) -> str:
        """The stack's name; an encoder that is set to look only back is a decoder."""
        return "decoder" if self.causal and self.rule.causal_if else self.rule.stack

    @property
    def parts(self) -> dict[str, Part]:
        """What is read for the block's plain form, by role."""
        roles = {
            f"{side}{suffix}": part
            for side, projection in (("query", self.query), ("key", self.key))
            for suffix, part in projection.parts.items()
        }
        roles |= {
            role: bias
            for role, bias in (
                ("query_bias", self.query_bias),
                ("key_bias", self.key_bias),
                ("query_temperature", self.temperature),
            )
            if bias is not None
        }
        for role in ("query_norm", "key_norm", "query_norm_bias", "key_norm_bias"):
            norms: tuple[Part, ...] = getattr(self, role)
            roles |= {
                role if len(norms) == 1 else f"{role} {head}": part
                for head, part in enumerate(norms)
            }
        return roles

    @property
    def status(self) -> str:
        """``partial`` where one form per head does not hold the whole score."""
        return "partial" if self.reason else "ok"

    @property
    def reason(self) -> str:
        """Why the status is ``partial``; empty where it is not."""
        reasons = [self.rule.partial] if self.rule.partial else []
        if self.query_norm or self.key_norm:
            reasons.append(
                "queries and keys are normalized token by token before they meet; "
                "the gains are folded into the form, the tokens' own scales are not"
            )
        elif not self.rule.norm_gain:
            reasons.append(
                "queries and keys are normalized token by token before they meet; "
                "the tokens' own scales are not in the form"
            )
        if self.clip is not None:
            reasons.append(
                f"queries and keys are cut off at ±{self.clip:g}; the form is the score of those "
                "that are smaller"
            )
        return "; ".join(reasons)


def plan(checkpoint: Checkpoint, family: Family) -> list[AttentionPlan]:
    """Every attention block of the checkpoint that the family describes, in order.

    Raises
    ------
    CheckpointError
        Queries and keys are not all there, or do not fit the configuration.
    """
    plans = [p for rule in family.attention for p in _plan_rule(checkpoint, family.name, rule)]
    if not plans:
        _explain_absence(checkpoint, family)
    return plans


def _plan_rule(checkpoint: Checkpoint, family: str, rule: AttentionRule) -> list[AttentionPlan]:
    tensors = checkpoint.tensors()
    settings = Settings(checkpoint.config, rule.config, checkpoint.name, rule.defaults)
    found = find(tensors, rule, checkpoint.name) if settings.holds(rule.only_if) else []
    if not found:
        return []
    layers = _complete(found, settings, rule)
    groups = 1 + max(names.group for _, names in layers)
    return [
        _plan_layer(tensors, settings, family, rule, layer, groups, names)
        for layer, names in layers
    ]


def _plan_layer(
    tensors: Mapping[str, TensorInfo],
    settings: Settings,
    family: str,
    rule: AttentionRule,
    layer: int,
    groups: int,
    found: Found,
) -> AttentionPlan:
    roles = _projections(tensors, settings, rule, found)
    query, key, value = roles["q"], roles["k"], roles.get("v")
    window = settings.window(rule.window, layer, rule.window_axes)
    rotary = (
        rotary_of(
            rule.rotary,
            settings,
            roles.get("q_position", query).head_width,
            layer,
            window is not None,
        )
        if rule.rotary
        else None
    )
    positional = None
    if rotary and "q_position" in roles:
        positional = Positional(roles["q_position"], roles["k_position"], rotary)
    if query.head_width != key.head_width or query.heads % key.heads:
        raise CheckpointError(
            f"{settings.name}: {query.heads} query heads of width {query.head_width} do not fit "
            f"{key.heads} key heads of width {key.head_width} in layer {layer} of the {rule.stack}"
        )
    return AttentionPlan(
        family=family,
        rule=rule,
        layer=layer,
        query=query,
        key=key,
        query_bias=bias_of(tensors, query, found, rule.query_bias),
        key_bias=None if rule.query_bias else bias_of(tensors, key, found, ()),
        query_norm=norm_of(tensors, rule.query_norm, found, "weight", query.heads),
        key_norm=norm_of(tensors, rule.key_norm, found, "weight", key.heads),
        query_norm_bias=norm_of(tensors, rule.query_norm, found, "bias", query.heads),
        key_norm_bias=norm_of(tensors, rule.key_norm, found, "bias", key.heads),
        query_input=input_norm_of(tensors, rule, input_spellings(rule, found), found),
        key_input=input_norm_of(
            tensors,
            rule,
            rule.key_input_norm if rule.kind == "cross" else input_spellings(rule, found),
            found,
        ),
        value=value,
        value_bias=bias_of(tensors, value, found, rule.value_bias) if value else None,
        output=_output(tensors, rule, found, query.heads),
        norm_epsilon=settings.optional_number(rule.norm_epsilon) or 0.0,
        scale=settings.product(
            rule.scale,
            {
                "head_width": query.head_width + (positional.query.head_width if positional else 0),
                "layer": layer,
                "rotary_stretch": rotary_stretch(settings),
            },
        ),
        softcap=settings.optional_number((rule.softcap,)) if rule.softcap else None,
        clip=settings.optional_number((rule.clip,)) if rule.clip else None,
        sinks=part_of(tensors, rule.sinks, found),
        temperature=part_of(tensors, rule.temperature, found),
        causal=rule.causal or bool(rule.causal_if and settings.holds(rule.causal_if)),
        window=window,
        applications=_applications(settings, rule, found.group, groups),
        position=rule.position if settings.holds(rule.position_if) else "",
        rotary=None if positional else rotary,
        positional=positional,
    )


def _complete(
    found: list[Found], settings: Settings, rule: AttentionRule
) -> list[tuple[int, Found]]:
    """The layers with their numbers, after a look that none is missing.

    Layers beyond the configured number, such as heads for multi-token prediction, are not the
    model's and are left out, as loading the model leaves them out.
    """
    single = len(found[0].index) == 1
    numbered = [(f.index[0] if single else i, f) for i, f in enumerate(found)]
    depths = settings.get(*rule.layers)
    if isinstance(depths, list):
        _require_stages(found, settings, rule, len(depths))
        return numbered
    count = settings.optional_whole(rule.layers)
    if not rule.every_layer or not single:
        return numbered
    numbered = numbered if count is None else [pair for pair in numbered if pair[0] < count]
    count = count or len(numbered)
    missing = sorted(set(range(count)) - {number for number, _ in numbered})
    if missing:
        raise CheckpointError(
            f"{settings.name}: incomplete, the {rule.stack} has {count} layers and layer "
            f"{missing[0]} has no query weights"
        )
    return numbered


def _require_stages(
    found: list[Found], settings: Settings, rule: AttentionRule, stages: int
) -> None:
    """See that no layer of any stage is missing; the configuration lists the stages' depths."""
    there = {names.index for names in found}
    for stage in range(stages):
        for block in range(settings.whole(rule.layers, stage)):
            if (stage, block) not in there:
                raise CheckpointError(
                    f"{settings.name}: incomplete, stage {stage} of the {rule.stack} has "
                    f"{settings.whole(rule.layers, stage)} layers and layer {block} has no query "
                    "weights"
                )


def _projections(
    tensors: Mapping[str, TensorInfo], settings: Settings, rule: AttentionRule, found: Found
) -> dict[str, Projection | Composed]:
    """Where the weights of ``q`` and ``k`` lie, and of ``v`` where they are named."""
    layer = found.group
    heads = settings.whole(rule.heads, layer)
    key_heads = settings.optional_whole(rule.key_heads, layer) or heads
    if rule.single_key_head_if and settings.holds(rule.single_key_head_if):
        key_heads = 1
    query, key = weight_name(found.query), weight_name(found.key)
    for tensor in (query, key):
        if len(tensors[tensor].shape) != 2:
            raise CheckpointError(
                f"{settings.name}: {tensor} must be a matrix, got shape {tensors[tensor].shape}"
            )
    if rule.layout == "latent":
        return latent(tensors, settings, rule, found, heads)
    if rule.layout == "separate":
        value = named(tensors, rule.value, found)
        return {
            "q": separate(query, tensors[query].shape, heads),
            "k": separate(key, tensors[key].shape, key_heads),
            **({"v": separate(value, tensors[value].shape, key_heads)} if value else {}),
        }
    fused: dict[str, Projection | Composed] = {}
    return fused | sectioned(
        query,
        tensors[query].shape,
        {"q": heads, "k": key_heads, "v": key_heads},
        rule.order,
        blocks=key_heads if rule.layout == "grouped" else rule.blocks,
        transposed=rule.layout == "conv1d",
    )


def _output(
    tensors: Mapping[str, TensorInfo], rule: AttentionRule, found: Found, heads: int
) -> Projection | None:
    """Where W_o lies; its inputs are the heads' outputs side by side, so its columns are theirs."""
    name = named(tensors, rule.output, found)
    if not name:
        return None
    stored_in_out = rule.layout == "conv1d"
    inputs = tensors[name].shape[0 if stored_in_out else 1]
    if inputs % heads:
        raise CheckpointError(f"{name}: {inputs} inputs do not divide into {heads} heads")
    return Projection(name, None, not stored_in_out, heads, inputs // heads)


def _applications(settings: Settings, rule: AttentionRule, group: int, groups: int) -> int:
    """How often a layer's weights are applied in one pass.

    Shared layers come in groups (the first index), and the passes are dealt to these in order.
    """
    if rule.applied_in_total:
        total = settings.whole((rule.applied_in_total,))
        return [number * groups // total for number in range(total)].count(group)
    return 2 if rule.applied_twice_if and settings.holds(rule.applied_twice_if) else 1


def _explain_absence(checkpoint: Checkpoint, family: Family) -> None:
    names = checkpoint.tensors()
    packed = next((n for n in names if n.endswith((".qweight", ".weight_packed"))), None)
    if packed:
        raise CheckpointError(
            f"{checkpoint.name}: quantized ({packed}); its weights are codes, not numbers to "
            "score; use the original checkpoint, or dequantize it first"
        )
    rule = family.attention[0]
    expected = (rule.fused or rule.query)[0].replace("{layer}", "0")
    raise CheckpointError(
        f"{checkpoint.name}: none of its {len(names)} tensors are the queries and keys of family "
        f"{family.name}; expected names such as {weight_name(expected)!r}"
    )
