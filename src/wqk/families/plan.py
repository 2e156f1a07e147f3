"""From a family and a checkpoint's tensor names to what has to be read, block by block.

Nothing is read here: names, shapes and the configuration decide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from wqk.errors import CheckpointError
from wqk.families.candidates import without_numbers
from wqk.families.config import Config
from wqk.families.latent import latent
from wqk.families.layouts import Composed, Projection, sectioned, separate, within_heads
from wqk.families.naming import bias_of, find_layers, named, norm_of, part_of, weight_name
from wqk.families.norms import Norm
from wqk.families.rotary import Rotary, rotary_of, rotary_stretch
from wqk.families.sides import Side, Temperature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wqk.checkpoints import Checkpoint, Part, TensorInfo
    from wqk.families.family import AttentionRule, Family, SideRule
    from wqk.families.naming import Match

TOKEN_BY_TOKEN = "queries and keys are normalized token by token before they meet; "
TERNARY = (
    "the model rounds its weights to three values as it runs (quant_method bitnet), the form is of "
    "the weights as stored"
)


UNTURNED = Rotary(np.zeros(0), "half")


@dataclass(frozen=True)
class Positional:
    """Queries and keys that hold positions alone; their product is added to that of the form."""

    query: Side
    key: Side
    rotary: Rotary


@dataclass(frozen=True)
class AttentionPlan:
    """One block's attention: its place in the model, its tensors, and the rest of its score."""

    family: str
    rule: AttentionRule
    layer: int
    query: Side
    key: Side
    value: Side | None
    output: Side | None
    scale: float
    softcap: float | None
    clip: float | None
    sinks: Part | None
    causal: bool
    window: str | None
    applications: int
    position: str
    rotary: Rotary | None
    positional: Positional | None

    @property
    def stack(self) -> str:
        """The stack's name; an encoder that is set to look only back is a decoder."""
        return "decoder" if self.causal and self.rule.score.causal_if else self.rule.stack

    @property
    def kind(self) -> str:
        """``self`` or ``cross``."""
        return self.rule.kind

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is read for the block's plain form."""
        return (*self.query.parts, *self.key.parts)

    @property
    def status(self) -> str:
        """``partial`` where one form per head does not hold the whole score, or ``guessed``."""
        return "partial" if self.reason else "guessed" if self.rule.guess else "ok"

    @property
    def reason(self) -> str:
        """Why the status is ``partial``; empty where it is not."""
        reasons = [self.rule.partial] if self.rule.partial else []
        norms = [side.norm for side in (self.query, self.key) if side.norm]
        if any(norm.gain for norm in norms):
            reasons.append(
                f"{TOKEN_BY_TOKEN}the gains are folded into the form, the tokens' own scales are "
                "not"
            )
        elif norms:
            reasons.append(f"{TOKEN_BY_TOKEN}the tokens' own scales are not in the form")
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
    by_rule = [_plan_rule(checkpoint, family.name, rule) for rule in family.attention]
    if not any(by_rule):
        _explain_absence(checkpoint, family)
    return _distinct([plans for plans in by_rule if plans])


def _distinct(by_rule: list[list[AttentionPlan]]) -> list[AttentionPlan]:
    """All plans, with stacks of different names where rules meet in stack, kind and layer."""
    places = [{(p.stack, p.kind, p.layer) for p in plans} for plans in by_rule]
    distinct: list[AttentionPlan] = []
    for plans, own in zip(by_rule, places, strict=True):
        rivals = [other for other, taken in zip(by_rule, places, strict=True) if taken & own]
        if len(rivals) > 1:
            names = [without_numbers(rival[0].query.tensor).split(".") for rival in rivals]
            distinctive = [
                word
                for word in without_numbers(plans[0].query.tensor).split(".")
                if not all(word in name for name in names)
            ]
            words = [] if plans[0].stack == "unknown" else [plans[0].stack]
            stack = "-".join(
                [*words, *(w for w in distinctive if w not in ("weight", plans[0].stack))]
            )
            plans = [replace(p, rule=replace(p.rule, stack=stack or p.stack)) for p in plans]
        distinct += plans
    return distinct


def _plan_rule(checkpoint: Checkpoint, family: str, rule: AttentionRule) -> list[AttentionPlan]:
    tensors = checkpoint.tensors()
    config = Config(checkpoint.config, rule.config, checkpoint.name, rule.defaults)
    shared = config.get("num_kv_shared_layers")
    keyless = shared if type(shared) is int and shared > 0 else 0
    applies = config.holds(rule.only_if)
    found = find_layers(tensors, rule, checkpoint.name, keyless) if applies else []
    if not found:
        return []
    if config.get("quantization_config.quant_method") == "bitnet":
        rule = replace(rule, partial="; ".join(filter(None, (rule.partial, TERNARY))))
    layers = _complete(found, config, rule)
    groups = 1 + max(match.group for _, match in layers)
    plans: list[AttentionPlan] = []
    sources: dict[str | None, tuple[AttentionPlan, Match]] = {}
    for number, (layer, match) in enumerate(layers):
        kind = config.layer_type(layer)
        if number < len(layers) - keyless:
            plans.append(_plan_layer(tensors, config, family, rule, layer, groups, match))
            sources[kind] = plans[-1], match
            continue
        # Attends with the keys and values of the last layer of its type that has some (Gemma 3n).
        if kind not in sources:
            raise CheckpointError(
                f"{config.name}: config.json: num_kv_shared_layers is {keyless}, but none of the "
                f"other layers is of layer {layer}'s type, {kind}"
            )
        source, keyed = sources[kind]
        match = replace(match, key=keyed.key)
        planned = _plan_layer(tensors, config, family, rule, layer, groups, match)
        note = f"some layers attend with the keys of layer {source.layer}"
        plans.append(
            replace(
                planned, key=source.key, value=source.value, rule=replace(planned.rule, note=note)
            )
        )
    return plans


def _plan_layer(
    tensors: Mapping[str, TensorInfo],
    config: Config,
    family: str,
    rule: AttentionRule,
    layer: int,
    groups: int,
    match: Match,
) -> AttentionPlan:
    projections = _projections(tensors, config, rule, match)
    query, key, value, output = _sides(tensors, config, rule, match, projections)
    score = rule.score
    window = config.window(score.window, layer, score.window_axes)
    turned = projections.get("q_position", query.projection).head_width
    rotary = (
        rotary_of(rule.rotary, config, turned, layer, window is not None) if rule.rotary else None
    )
    positional = None
    if "q_position" in projections:
        positional = Positional(
            Side(projections["q_position"]), Side(projections["k_position"]), rotary or UNTURNED
        )
    if query.head_width != key.head_width or query.heads % key.heads:
        raise CheckpointError(
            f"{config.name}: {query.heads} query heads of width {query.head_width} do not fit "
            f"{key.heads} key heads of width {key.head_width} in layer {layer} of the {rule.stack}"
        )
    return AttentionPlan(
        family=family,
        rule=rule,
        layer=layer,
        query=query,
        key=key,
        value=value,
        output=output,
        scale=config.product(
            score.scale,
            {
                "head_width": query.head_width + (positional.query.head_width if positional else 0),
                "layer": layer,
                "rotary_stretch": rotary_stretch(config),
            },
        ),
        softcap=config.optional_number((score.softcap,)) if score.softcap else None,
        clip=config.optional_number((score.clip,)) if score.clip else None,
        sinks=part_of(tensors, score.sinks, match),
        causal=score.causal or bool(score.causal_if and config.holds(score.causal_if)),
        window=window,
        applications=_applications(config, rule, match.group, groups),
        position=score.position if config.holds(score.position_if) else "",
        rotary=None if positional else rotary,
        positional=positional,
    )


def _sides(
    tensors: Mapping[str, TensorInfo],
    config: Config,
    rule: AttentionRule,
    match: Match,
    projections: Mapping[str, Projection | Composed],
) -> tuple[Side, Side, Side | None, Side | None]:
    """Queries, keys, and values and outputs where they are named."""
    epsilon = config.optional_number(rule.norm.epsilon) or 0.0
    is_first = match.group == 0 and rule.input_norm.first
    feeds_query = rule.input_norm.first if is_first else rule.input_norm.names
    feeds_key = rule.key.input_norm if rule.kind == "cross" else feeds_query

    def norm(names: tuple[str, ...], heads: int) -> Norm | None:
        gain, bias = (norm_of(tensors, names, match, what, heads) for what in ("weight", "bias"))
        if rule.norm.gain and not gain:
            return None
        own = rule.norm
        return Norm(own.kind, gain, bias, own.offset, epsilon, own.over == "head")

    def input_norm(names: tuple[str, ...]) -> Norm | None:
        gain, bias = (norm_of(tensors, names, match, what, 1) for what in ("weight", "bias"))
        own = rule.input_norm
        small = config.optional_number(own.epsilon) or 0.0
        return Norm(own.kind, gain, bias, own.offset, small) if gain else None

    def side(
        role: str, names: SideRule, fed_by: tuple[str, ...], bias: Part | None, normed: bool
    ) -> Side:
        projection = projections[role]
        return Side(
            projection,
            bias,
            norm(names.norm, projection.heads) if normed else None,
            input_norm(fed_by),
        )

    def bias(role: str, names: tuple[str, ...]) -> Part | None:
        return bias_of(tensors, projections[role], match, names)

    query = side("q", rule.query, feeds_query, bias("q", rule.query.bias), True)
    logarithm = part_of(tensors, rule.score.temperature, match)
    if logarithm is not None:
        query = replace(query, temperature=Temperature(logarithm, rule.score.temperature_limit))
    # Where the query's bias has a name of its own, keys have none.
    key = side("k", rule.key, feeds_key, None if rule.query.bias else bias("k", ()), True)
    value = None
    if "v" in projections:
        value = side("v", rule.value, feeds_key, bias("v", rule.value.bias), False)
    return query, key, value, _output(tensors, rule, match, query.heads)


def _complete(found: list[Match], config: Config, rule: AttentionRule) -> list[tuple[int, Match]]:
    """The layers with their numbers, after a look that none is missing.

    Layers beyond the configured number, such as heads for multi-token prediction, are not the
    model's and are left out, as loading the model leaves them out.
    """
    single = len(found[0].index) == 1
    numbered = [(f.index[0] if single else i, f) for i, f in enumerate(found)]
    depths = config.get(*rule.counts.layers)
    if isinstance(depths, list):
        _require_stages(found, config, rule, len(depths))
        return numbered
    count = config.optional_whole(rule.counts.layers)
    if not rule.counts.every_layer or not single:
        return numbered
    numbered = numbered if count is None else [pair for pair in numbered if pair[0] < count]
    count = count or len(numbered)
    missing = sorted(set(range(count)) - {number for number, _ in numbered})
    if missing:
        raise CheckpointError(
            f"{config.name}: incomplete, the {rule.stack} has {count} layers and layer "
            f"{missing[0]} has no query weights"
        )
    return numbered


def _require_stages(found: list[Match], config: Config, rule: AttentionRule, stages: int) -> None:
    """See that no layer of any stage is missing; the configuration lists the stages' depths."""
    there = {match.index for match in found}
    for stage in range(stages):
        for block in range(config.whole(rule.counts.layers, stage)):
            if (stage, block) not in there:
                count = config.whole(rule.counts.layers, stage)
                raise CheckpointError(
                    f"{config.name}: incomplete, stage {stage} of the {rule.stack} has {count} "
                    f"layers and layer {block} has no query weights"
                )


def _projections(
    tensors: Mapping[str, TensorInfo], config: Config, rule: AttentionRule, match: Match
) -> dict[str, Projection | Composed]:
    """Where the weights of ``q`` and ``k`` lie, and of ``v`` where they are named."""
    layer = match.group
    heads = config.whole(rule.counts.heads, layer)
    key_heads = config.optional_whole(rule.counts.key_heads, layer)
    if rule.counts.single_key_head_if and config.holds(rule.counts.single_key_head_if):
        key_heads = 1
    query, key = weight_name(match.query), weight_name(match.key)
    for tensor in (query, key):
        shape = tensors[tensor].shape
        if len(shape) != 2 or 0 in shape:
            raise CheckpointError(f"{config.name}: {tensor} must be a matrix, got shape {shape}")
    if rule.layout == "latent":
        return latent(tensors, config, rule, match, heads)
    if rule.layout in ("separate", "gated"):
        rows, key_rows = tensors[query].shape[0], tensors[key].shape[0]
        if rule.layout == "gated":
            rows //= 2
        if key_heads is None:  # a key head is as wide as a query head
            key_heads = max(1, key_rows * heads // rows) if rows else heads
        value = named(tensors, rule.value.names, match)
        own = separate(query, tensors[query].shape, heads)
        if rule.layout == "gated":
            own = within_heads(query, tensors[query].shape, heads, 0, own.head_width // 2)
        return {
            "q": own,
            "k": separate(key, tensors[key].shape, key_heads),
            **({"v": separate(value, tensors[value].shape, key_heads)} if value else {}),
        }
    key_heads = key_heads or heads
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
    tensors: Mapping[str, TensorInfo], rule: AttentionRule, match: Match, heads: int
) -> Side | None:
    """Where W_o lies; its inputs are the heads' outputs side by side, so its columns are theirs."""
    name = named(tensors, rule.output.names, match)
    if not name:
        return None
    stored_in_out = rule.layout == "conv1d"
    inputs = tensors[name].shape[0 if stored_in_out else 1]
    if inputs % heads:
        raise CheckpointError(f"{name}: {inputs} inputs do not divide into {heads} heads")
    return Side(Projection(name, None, not stored_in_out, heads, inputs // heads))


def _applications(config: Config, rule: AttentionRule, group: int, groups: int) -> int:
    """How often a layer's weights are applied in one pass.

    Shared layers come in groups (the first index), and the passes are dealt to these in order.
    """
    if rule.counts.applied_in_total:
        total = config.whole((rule.counts.applied_in_total,))
        return [number * groups // total for number in range(total)].count(group)
    return 2 if rule.counts.applied_twice_if and config.holds(rule.counts.applied_twice_if) else 1


def _explain_absence(checkpoint: Checkpoint, family: Family) -> None:
    names = checkpoint.tensors()
    packed = next((n for n in names if n.endswith((".qweight", ".weight_packed"))), None)
    if packed:
        raise CheckpointError(
            f"{checkpoint.name}: quantized ({packed}); quantized weights cannot be scored; "
            "use the original checkpoint, or dequantize it first"
        )
    rule = family.attention[0]
    expected = (rule.fused or rule.query.names)[0].replace("{layer}", "0")
    raise CheckpointError(
        f"{checkpoint.name}: none of its {len(names)} tensors are the queries and keys of family "
        f"{family.name}; expected names such as {weight_name(expected)!r}"
    )
