"""Plans of all blocks of a checkpoint, from a family, names, shapes and the configuration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from wqk.checkpoints import Checkpoint
from wqk.errors import CheckpointError, UnknownFamily, did_you_mean
from wqk.families.config import LARGEST_COUNT, Config
from wqk.families.fitting import require_fitting
from wqk.families.model_types import always_present
from wqk.families.naming import weight_name, without_numbers
from wqk.families.plans import AttentionPlan, Positional
from wqk.families.rotary import Rotary, rotary_of, rotary_stretch
from wqk.families.sides import Projections, Side, projections_of, sides_of
from wqk.families.spellings import find_layers, require_whole_layers
from wqk.families.windows import window_of

if TYPE_CHECKING:
    from wqk.families.rules import AttentionRule, Family
    from wqk.families.spellings import Match

# Roles of tensors that some models of a family lack, and whether a plan has them.
OPTIONAL_ROLES: Mapping[str, Callable[[AttentionPlan], bool]] = {
    "query_norm": lambda plan: plan.query.norm is not None,
    "key_norm": lambda plan: plan.key.norm is not None,
    "sinks": lambda plan: plan.sinks is not None,
    "temperature": lambda plan: plan.query.temperature is not None,
    "softplus": lambda plan: plan.query.temperature is not None,
}

TERNARY = (
    "the model rounds its weights to three values as it runs (quant_method bitnet); the form is "
    "that of the stored weights"
)

# The rotation of dimensions of positions that do not rotate.
UNTURNED = Rotary(np.zeros(0), "half")


def plan_attention(checkpoint: Checkpoint, family: Family) -> list[AttentionPlan]:
    """Plan every attention block with a softmax that the family describes, in order.

    Raises
    ------
    UnknownFamily
        The family contains a reason why its attention has no form.
    CheckpointError
        Queries and keys are incomplete, or do not fit the configuration.
    """
    if family.refusal:
        raise UnknownFamily(f"{family.name}: {family.refusal}")
    rules = [rule for rule in family.attention if not rule.between]
    by_rule = [_plan_rule(checkpoint, family.name, rule) for rule in rules]
    if by_rule and not any(by_rule):
        raise _absence(checkpoint, family)
    require_whole_layers(checkpoint.tensors(), family.attention)
    return _with_distinct_stacks([plans for plans in by_rule if plans])


def plan_mixers(checkpoint: Checkpoint, family: Family) -> list[AttentionPlan]:
    """Plan every block that scores pairs of tokens without a softmax, in order of layers.

    Raises
    ------
    CheckpointError
        The family has no other attention, and the checkpoint has no such block; or queries and keys
        are incomplete.
    """
    rules = [rule for rule in family.attention if rule.between]
    plans: list[AttentionPlan] = []
    for rule in rules:
        plans += _plan_rule(checkpoint, family.name, rule)
    has_no_softmax = len(rules) == len(family.attention)
    if has_no_softmax and not plans:
        raise _absence(checkpoint, family)
    return sorted(plans, key=lambda plan: plan.layer)


def _with_distinct_stacks(by_rule: list[list[AttentionPlan]]) -> list[AttentionPlan]:
    """Return all plans; rules with a common stack, kind and layer get distinct stack names.

    ``by_rule`` contains the plans of each rule; no rule is without plans.
    """
    places_by_rule = [{plan.place for plan in plans} for plans in by_rule]
    distinct: list[AttentionPlan] = []
    for number, plans in enumerate(by_rule):
        places = places_by_rule[number]
        # Numbers of the rules with a common place, including this rule.
        rivals = [n for n, other_places in enumerate(places_by_rule) if other_places & places]
        if len(rivals) == 1:
            distinct += plans
            continue
        tensors = [by_rule[rival][0].query.tensor for rival in rivals]
        stack = _distinct_stack(plans[0].stack, tensors, rivals.index(number))
        for plan in plans:
            rule = structs.replace(plan.rule, stack=stack)
            distinct.append(replace(plan, rule=rule))
    return distinct


def _distinct_stack(stack: str, tensors: list[str], number: int) -> str:
    """Return a name of a stack, with the modules that distinguish its tensors' names.

    Parameters
    ----------
    stack
        Common name of several stacks.
    tensors
        Names of the first query weights of these stacks.
    number
        Index of the stack's weight among ``tensors``.

    Examples
    --------
    >>> _distinct_stack("decoder", ["a.layers.0.q.weight", "b.layers.0.q.weight"], 1)
    'decoder-b'
    """
    unnumbered_names = [without_numbers(name) for name in tensors]
    # Names that differ in nothing but numbers, as of counted modules, keep their numbers.
    differ_without_numbers = len(set(unnumbered_names)) == len(unnumbered_names)
    names = unnumbered_names if differ_without_numbers else tensors
    names_with_module: Counter[str] = Counter()
    for name in names:
        names_with_module.update(set(name.split(".")))
    parts = [] if stack == "unknown" else [stack]
    for module in names[number].split("."):
        is_shared = names_with_module[module] == len(names)
        if not is_shared and module not in ("weight", stack):
            parts.append(module)
    return "-".join(parts) or stack


def _plan_rule(checkpoint: Checkpoint, family: str, rule: AttentionRule) -> list[AttentionPlan]:
    """Plan every block that one rule of a family describes; empty if the model has none."""
    config = Config(checkpoint.config, rule.config, rule.defaults, rule.model_type)
    if not config.holds(rule.only_if):
        return []
    shared = config.get("num_kv_shared_layers")
    keyless = shared if type(shared) is int and shared > 0 else 0
    matches = find_layers(checkpoint.tensors(), rule, keyless)
    if not matches:
        return []
    if config.get("quantization_config.quant_method") == "bitnet":
        partial = f"{rule.partial}; {TERNARY}" if rule.partial else TERNARY
        rule = structs.replace(rule, partial=partial)
    layers = _complete_layers(matches, config, rule)
    if not layers:
        return []
    groups = 1 + max(match.group for _, match in layers)
    planner = _Planner(config, family, rule, groups)
    with_keys = layers[: len(layers) - keyless]
    plans = [planner.plan(layer, match) for layer, match in with_keys]
    # A layer without keys uses the keys of the last layer of its kind with keys.
    sources = {
        config.layer_type(layer): (plan, match)
        for plan, (layer, match) in zip(plans, with_keys, strict=True)
    }
    for layer, match in layers[len(with_keys) :]:
        kind = config.layer_type(layer)
        if kind not in sources:
            raise CheckpointError(
                f"config.json: num_kv_shared_layers is {keyless}, but none of the "
                f"other layers is of layer {layer}'s type, {kind}; correct layer_types"
            )
        plans.append(planner.plan_with_keys_of(layer, match, *sources[kind]))
    return plans


def _complete_layers(
    matches: list[Match], config: Config, rule: AttentionRule
) -> list[tuple[int, Match]]:
    """Return the matches of the layers with the numbers of the layers.

    Layers beyond the configured number, such as heads for multi-token prediction, are left out;
    transformers does not load them either.

    Raises
    ------
    CheckpointError
        A layer is missing.
    """
    is_single = len(matches[0].index) == 1
    without = _layers_without_key_heads(config, rule)
    layers = []
    for place, match in enumerate(matches):
        number = match.index[0] if is_single else place
        if number not in without:
            layers.append((number, match))
    depths = config.get(*rule.layers)
    if isinstance(depths, list):
        _require_stages(matches, config, rule, len(depths))
        return layers
    count = config.optional_whole(rule.layers)
    if not rule.every_layer or not is_single:
        return layers
    if count is None:
        count = len(layers)
    else:
        layers = [(number, match) for number, match in layers if number < count]
    missing = set(range(count)) - {number for number, _ in layers} - without
    if missing:
        raise CheckpointError(
            f"incomplete, the {rule.stack} has {count} layers and layer "
            f"{min(missing)} has no query weights; download the checkpoint again, or correct the "
            "number of layers"
        )
    return layers


def _layers_without_key_heads(config: Config, rule: AttentionRule) -> set[int]:
    """Return the layers without attention: their entry in a list of key heads is zero."""
    counts = config.get(*rule.key_heads) if rule.key_heads else None
    if not isinstance(counts, list):
        return set()
    return {layer for layer, heads in enumerate(counts) if heads == 0}


def _require_stages(matches: list[Match], config: Config, rule: AttentionRule, stages: int) -> None:
    """Check that no layer of any stage is missing; the configuration lists the stages' depths."""
    present = {match.index for match in matches}
    is_single = len(matches[0].index) == 1
    before = 0
    for stage in range(stages):
        count = config.whole(rule.layers, stage)
        for block in range(count):
            index = (before + block,) if is_single else (stage, block)
            if index not in present:
                raise CheckpointError(
                    f"incomplete, stage {stage} of the {rule.stack} has {count} "
                    f"layers and layer {block} has no query weights; download the checkpoint "
                    "again, or correct the depths of stages"
                )
        before += count


@dataclass(frozen=True)
class _Planner:
    """Makes the plans of the layers of one rule.

    Attributes
    ----------
    config
        The configuration of the rule's part of the model.
    family
        Name of the family.
    rule
        The rule.
    groups
        Number of groups of layers; applications of shared layers are divided among the groups.
    """

    config: Config
    family: str
    rule: AttentionRule
    groups: int

    def plan(self, layer: int, match: Match) -> AttentionPlan:
        """Return the plan of a layer.

        Raises
        ------
        CheckpointError
            The tensors of the layer do not fit together, or do not fit the configuration.
        """
        config, rule = self.config, self.rule
        projections = projections_of(config, rule, match)
        query, key, value, output = sides_of(config, rule, match, projections)
        _, stage = config.stage(rule.layers, match.index)
        entry = stage if isinstance(config.get(*rule.layers), list) else layer
        is_lifted = rule.kind == "self" and rule.causal and config.lifts_mask
        is_causal = self._is_causal(match, is_lifted)
        window = window_of(rule, config, layer, entry, is_causal, is_lifted)
        rotary = None
        if rule.rotary is not None:
            turned_width = projections.get("q_position", query.projection).head_width
            rotary = rotary_of(rule.rotary, config, turned_width, layer, window is not None)
        if rotary is not None and rotary.before_norm:
            query, key = _without_stretch(query, rotary), _without_stretch(key, rotary)
            rotary = rotary.turning
        if rotary is None and "norm" in rule.rotary_only:
            query, key = replace(query, norm=None), replace(key, norm=None)
        if rotary is None and "window" in rule.rotary_only:
            window = None
        is_axial = rotary is not None and rotary.axes > 1
        is_rotary = rotary is not None and rotary.axes == 1 and rule.layout != "latent"
        positional = _positional(projections, match, rotary)
        grows = rotary is None and config.holds(rule.grows_if)
        plan = AttentionPlan(
            family=self.family,
            rule=rule,
            layer=layer,
            query=query,
            key=key,
            value=value,
            output=output,
            scale=None if rule.guess else self._scale(layer, query, positional),
            softcap=config.optional_number((rule.softcap,)) if rule.softcap else None,
            clip=config.optional_number((rule.clip,)) if rule.clip else None,
            sinks=match.part(rule.sinks),
            causal=None if rule.guess and not is_causal else is_causal,
            window=window,
            applications=self._applications(match.group),
            position=rule.position if config.holds(rule.position_if) else "",
            position_uses=self._position_uses(),
            rotary=rotary if is_rotary else None,
            axial=rotary if is_axial else None,
            positional=positional,
            grows_from=config.optional_length(rule.grows_from) if grows else None,
        )
        plan = replace(plan, missing=self.missing(plan, match))
        require_fitting(plan, match.tensors)
        stored = [match.tensors[part.name].quantized for part in plan.parts]
        return replace(plan, quantized=tuple(dict.fromkeys(filter(None, stored))))

    def plan_with_keys_of(
        self, layer: int, match: Match, source: AttentionPlan, source_match: Match
    ) -> AttentionPlan:
        """Return the plan of a layer that uses the keys and values of another layer."""
        match = replace(match, key=source_match.key)
        plan = self.plan(layer, match)
        note = f"some layers attend with the keys of layer {source.layer}"
        rule = structs.replace(plan.rule, note=note)
        plan = replace(plan, key=source.key, value=source.value, rule=rule)
        return replace(plan, missing=self.missing(plan, match))

    def missing(self, plan: AttentionPlan, match: Match) -> tuple[str, ...]:
        """Return the names of tensors of the model type that this layer lacks."""
        has_no_norm = "norm" in plan.rule.rotary_only and plan.rotary is None
        names = []
        for role in always_present(self.config.own_type):
            spellings = getattr(plan.rule, role)
            is_excused = has_no_norm and role.endswith("norm")
            if spellings and not is_excused and not OPTIONAL_ROLES[role](plan):
                names.append(match.named(spellings[0]))
        return tuple(names)

    def _is_causal(self, match: Match, is_lifted: bool) -> bool:
        """Return whether later tokens are masked in a layer."""
        rule = self.rule
        if rule.causal and not is_lifted:
            return True
        if rule.causal_if and self.config.holds(rule.causal_if):
            return True
        modules = match.query.split(".")
        return any(rule.causal_under.get(module) for module in modules)

    def _scale(self, layer: int, query: Side, positional: Positional | None) -> float:
        """Return the factor of the scores of a layer."""
        head_width = query.head_width
        if positional is not None:
            head_width += positional.query.head_width
        stretch = rotary_stretch(self.config) if self.rule.rotary else 1.0
        names = {"head_width": head_width, "layer": layer, "rotary_stretch": stretch}
        return self.config.product(self.rule.scale, names)

    def _position_uses(self) -> tuple[str, ...]:
        """Return the sides whose vectors the term of positions uses."""
        conditions = self.rule.position_uses_if
        return tuple(
            side for side in self.rule.position_uses if self.config.holds(conditions.get(side, ""))
        )

    def _applications(self, group: int) -> int:
        """Return the number of applications of a layer's weights in one pass.

        Shared layers form groups, and the passes are divided among the groups in order.
        """
        if not self.rule.applied_in_total:
            return 1
        passes = round(self.config.product(self.rule.applied_in_total, {}))
        if not 0 < passes <= LARGEST_COUNT:
            factors = " * ".join(map(str, self.rule.applied_in_total))
            raise CheckpointError(
                f"config.json: {factors}, which counts the applications of shared layers, must be "
                f"from 1 to {LARGEST_COUNT:,}, got {passes:.6g}; correct it, or the family's "
                "applied_in_total"
            )
        # Passes of a group: from group · passes / groups on, rounded up, to that of the next group.
        first_pass = -(-group * passes // self.groups)
        first_pass_of_next = -(-(group + 1) * passes // self.groups)
        return first_pass_of_next - first_pass


def _positional(projections: Projections, match: Match, rotary: Rotary | None) -> Positional | None:
    """Return the separate dimensions of positions; None if the layer has none."""
    if "q_position" not in projections:
        return None
    query, key = projections["q_position"], projections["k_position"]
    return Positional(Side(query), Side(key, match.bias(key, ())), rotary or UNTURNED)


def _without_stretch(side: Side, rotary: Rotary) -> Side:
    """Return a side with a norm that removes the factor of the rotation before the norm.

    The factor divides the norm's epsilon instead.
    """
    if side.norm is None:
        return side
    epsilon = side.norm.epsilon / rotary.amplitude**2
    return replace(side, norm=replace(side.norm, epsilon=epsilon))


def _absence(checkpoint: Checkpoint, family: Family) -> CheckpointError:
    """Return the error for a checkpoint without queries and keys of its family."""
    names, rule = checkpoint.tensors(), family.attention[0]
    spelling = (rule.fused or rule.query)[0]
    numbered = re.escape(spelling).replace(r"\{layer\}", r"\d+")
    query = re.compile(rf"(\D+\.)?{numbered}\.weight")
    present = next(filter(query.fullmatch, names), None)
    if present:
        return CheckpointError(
            f"{present!r} is there, but the configuration says that no layer has such attention "
            "(numbers of layers, their kinds, zeros among numbers of heads); use the configuration "
            "of these weights"
        )
    expected = spelling.replace("{layer}", "0")
    module = f".{expected.rpartition('.')[2]}."
    similar = next((name for name in names if module in name), None)
    actual = f", got {similar!r}" if similar else did_you_mean(expected, names)
    return CheckpointError(
        f"none of its {len(names)} tensors are the queries and keys of family "
        f"{family.name}; expected names such as {weight_name(expected)!r}{actual}; or choose "
        "another family with family=NAME"
    )
