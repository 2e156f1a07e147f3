"""What has to be read of each block's attention, from its family and the checkpoint's names.

Nothing is read here: names, shapes and the configuration decide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import structs

from wqk._console import kind_in_words
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families.assumptions import Assumption, assumptions_of
from wqk.families.config import Config, always_present
from wqk.families.layouts import Composed
from wqk.families.naming import find_layers, weight_name, without_numbers
from wqk.families.rotary import Rotary, rotary_of, rotary_stretch
from wqk.families.sides import Side, projections_of, sides_of
from wqk.families.windows import Window, window_of

if TYPE_CHECKING:
    from wqk.families.family import AttentionRule, Family
    from wqk.families.layouts import Norm, Projection
    from wqk.families.naming import Match


def require_fitting(plan: AttentionPlan, tensors: Mapping[str, TensorInfo]) -> None:
    """Check the shapes of everything that may be read for a block.

    Of queries, keys, values and outputs, their biases, and the norms around them. Raises
    `CheckpointError`, naming the tensor, what it should be, and what it is.
    """
    sides = [plan.query, plan.key, plan.value, plan.output]
    if plan.positional is not None:
        sides += [plan.positional.query, plan.positional.key]
    inputs = [(side, _inputs(side, tensors)) for side in sides if side is not None]
    widths = {side.tensor: width for side, width in inputs if side in (plan.query, plan.key)}
    if plan.kind == "self" and not plan.rule.guess and len(set(widths.values())) > 1:
        (name, width), (other, found) = widths.items()
        raise CheckpointError(
            f"{other} takes inputs of width {found}, and {name} of width {width}; queries and "
            "keys of self-attention read the same vectors"
        )
    for side, width in inputs:
        _require_small(side, width, tensors)
    if plan.sinks is not None:
        _require_entries(plan.sinks, (plan.query.heads,), tensors, "one for each query head")
    value, output = plan.value, plan.output
    if (
        value is not None
        and output is not None
        and (value.head_width != output.head_width or output.heads % value.heads)
    ):
        raise CheckpointError(
            f"{output.tensor} takes the outputs of {output.heads} heads of width "
            f"{output.head_width}, and {value.tensor} makes values of {value.heads} heads of width "
            f"{value.head_width}"
        )


def _inputs(side: Side, tensors: Mapping[str, TensorInfo]) -> int:
    """The width of what a side projects; an error if its matrices do not fit together."""
    projection = side.projection
    if not isinstance(projection, Composed):
        return _columns(projection, tensors)
    outer, inner = _columns(projection.outer, tensors), _columns(projection.inner, tensors)
    latent = projection.inner.heads * projection.inner.head_width
    if outer != latent:
        raise CheckpointError(
            f"{projection.outer.tensor} takes a latent of width {outer}, and "
            f"{projection.inner.tensor} makes one of width {latent}"
        )
    biases = () if projection.bias is None else (projection.bias,)
    for part in (*projection.norm.gain, *projection.norm.bias, *biases):
        _require_entries(part, (latent,), tensors, "one for each entry of the latent")
    return inner


def _columns(projection: Projection, tensors: Mapping[str, TensorInfo]) -> int:
    """How many inputs a projection has, its outputs checked."""
    shape = tensors[projection.tensor].shape
    if projection.axes is not None:
        return shape[projection.axes[2]]
    if projection.groups:
        shape = (shape[0], shape[1] * projection.groups)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{projection.tensor} must be a matrix, got shape {shape}")
    inputs, outputs = shape if projection.transposed else shape[::-1]
    wanted = projection.heads * projection.head_width
    ranges = projection.outputs if projection.outputs is not None else ((0, outputs),)
    if sum(stop - start for start, stop in ranges) != wanted or ranges[-1][1] > outputs:
        raise CheckpointError(
            f"{projection.tensor}: {outputs} outputs do not hold {projection.heads} heads of width "
            f"{projection.head_width}"
        )
    return inputs


def _require_small(side: Side, width: int, tensors: Mapping[str, TensorInfo]) -> None:
    """Check a side's bias, norms and temperature."""
    heads, outputs = side.heads, side.heads * side.head_width
    if side.bias is not None:
        _require_entries(side.bias, (outputs,), tensors, "one for each output")
    if side.temperature is not None:
        of_head = side.temperature.of_head
        what = "one for each head" if of_head else "one for each dimension of a head"
        count = heads if of_head else side.head_width
        _require_entries(side.temperature.stored, (count,), tensors, what)
    if side.norm is not None:
        _require_norm(side.norm, (side.head_width, outputs), tensors, "of a head, or of all")
    if side.input_norm is not None:
        _require_norm(side.input_norm, (width,), tensors, "as wide as what is projected")


def _require_norm(
    norm: Norm, widths: tuple[int, ...], tensors: Mapping[str, TensorInfo], what: str
) -> None:
    for parts in (norm.gain, norm.bias):
        if len(parts) == 1:
            _require_entries(parts[0], widths, tensors, what)
        for part in parts[1:] and parts:  # each head has its own
            _require_entries(part, widths[:1], tensors, what)


def _require_entries(
    part: Part, counts: tuple[int, ...], tensors: Mapping[str, TensorInfo], what: str
) -> None:
    shape = tensors[part.name].shape
    if math.prod(part.shape(shape)) not in counts:
        wanted = " or ".join(map(str, dict.fromkeys(counts)))
        raise CheckpointError(f"{part.name} must have {wanted} entries, {what}, got shape {shape}")


# Roles of tensors that some models of a family lack, and whether a plan has them.
OPTIONAL_ROLES: Mapping[str, Callable[[AttentionPlan], bool]] = {
    "query_norm": lambda plan: plan.query.norm is not None,
    "key_norm": lambda plan: plan.key.norm is not None,
    "sinks": lambda plan: plan.sinks is not None,
    "temperature": lambda plan: plan.query.temperature is not None,
    "softplus": lambda plan: plan.query.temperature is not None,
}

TOKEN_BY_TOKEN = "queries and keys are normalized token by token before they meet; "

TERNARY = (
    "the model rounds its weights to three values as it runs (quant_method bitnet); the form is "
    "that of the stored weights"
)

UNTURNED = Rotary(np.zeros(0), "half")


# Fields that are empty in the plan of a guess because names and shapes do not determine them.
UNKNOWN_OF_GUESSES = ("scale", "causal", "window", "softcap", "rotary", "axial", "position")


class Place(NamedTuple):
    """Where a block is in its model."""

    stack: str
    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.stack} {self.kind} {self.layer}"


@dataclass(frozen=True)
class Positional:
    """Queries and keys of positions alone; their product is added to the form's."""

    query: Side
    key: Side
    rotary: Rotary


@dataclass(frozen=True, repr=False)
class AttentionPlan:
    """One block's attention: its place in the model, its tensors, and the rest of its score."""

    family: str
    rule: AttentionRule
    layer: int
    query: Side
    key: Side
    value: Side | None
    output: Side | None
    scale: float | None  # None if a guess does not establish it; `score_scale` is what is used
    softcap: float | None
    clip: float | None
    sinks: Part | None
    causal: bool | None  # None if a guess does not assume a causal mask, and knows none
    window: Window | None
    applications: int
    position: str
    position_uses: tuple[str, ...]  # sides that this, or a convolution, is made with
    rotary: Rotary | None  # along one axis, with which forms at a distance are computed
    axial: Rotary | None  # along two
    positional: Positional | None
    quantized: tuple[str, ...] = ()  # how queries and keys are stored, if with few bits
    grows_from: int | None = None  # the number of the token from which on queries grow
    missing: tuple[str, ...] = ()  # tensors that models of the type have, and the file lacks

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Parts of the plan that its family does not establish; see `wqk.families.assumptions`."""
        return tuple(assumptions_of(self))

    def __repr__(self) -> str:
        """Show all fields; those that a guess does not establish are ``unknown``."""
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            is_unknown = self.rule.guess and field.name in UNKNOWN_OF_GUESSES and not value
            shown.append(f"{field.name}={'unknown' if is_unknown else repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def score_scale(self) -> float:
        """The factor of the score; of a guess that has none, the usual one, which is assumed."""
        return self.query.head_width**-0.5 if self.scale is None else self.scale

    @property
    def stack(self) -> str:
        """The stack's name; configured otherwise, an encoder is a decoder, and a decoder one."""
        if self.causal and (self.rule.causal_if or self.rule.causal_under):
            return "decoder"
        is_lifted = self.rule.causal and not self.causal and self.rule.stack == "decoder"
        return "encoder" if is_lifted else self.rule.stack

    @property
    def kind(self) -> str:
        """``self`` or ``cross``; without a softmax ``linear`` or ``state-space``."""
        return self.rule.kind

    @property
    def what(self) -> str:
        """The kind in words: ``self-attention``, ``linear attention``."""
        return kind_in_words(self.kind)

    @property
    def has_softmax(self) -> bool:
        """Whether a softmax makes attention of the scores."""
        return not self.rule.between

    @property
    def where(self) -> str:
        """The stack, and the kind of what has no softmax: what reasons are told of."""
        return self.stack if self.has_softmax else f"{self.stack} {self.kind}"

    @property
    def place(self) -> Place:
        """What identifies the block in its model, and its rows in a table."""
        return Place(self.stack, self.kind, self.layer)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is read for the block's plain form."""
        return (*self.query.parts, *self.key.parts)

    @property
    def statuses(self) -> tuple[str, ...]:
        """``partial`` if one form per head is not the whole score, ``guessed``, ``quantized``."""
        holds = {"partial": self.reason, "guessed": self.rule.guess, "quantized": self.quantized}
        return tuple(status for status, why in holds.items() if why)

    @property
    def may_turn(self) -> bool:
        """Whether positions rotate queries and keys; a guess, whose positions are unknown, may."""
        return bool(self.rotary or self.rule.guess) or self.position.startswith("rotary")

    @property
    def turns_gains(self) -> bool:
        """Whether a norm with gains, or with centering, follows the rotation by positions.

        A score then depends on both positions, and not on their distance alone.
        """
        if self.rotary is None or not self.rotary.before_norm:
            return False
        norms = [side.norm for side in (self.query, self.key) if side.norm is not None]
        return any(norm.gain or norm.kind == "layer" for norm in norms)

    @property
    def longest(self) -> int | None:
        """Tokens of a text beyond which positions act otherwise; None where they never do."""
        turned = self.rotary or (self.positional and self.positional.rotary)
        unchanged = self.grows_from and self.grows_from - 1
        return turned.longest if turned else unchanged

    @property
    def key_bias_counts(self) -> bool:
        """Whether a key's bias may change attention, not add the same to all scores of a query.

        It may where positions turn it, a norm or a limit comes after it, or other scores are
        without it.
        """
        key = self.key.projection
        if isinstance(key, Composed) and key.bias is not None:  # the latent's norm comes after it
            return True
        followers = (self.axial, self.key.norm, self.clip, self.softcap, self.sinks)
        has_follower = any(follower is not None for follower in followers)
        return self.may_turn or not self.has_softmax or has_follower

    @property
    def rotation_unknown(self) -> bool:
        """Whether positions may rotate queries and keys in a way, and an order, that is not known.

        The family was guessed, or only names its rotary positions.
        """
        named = self.position.startswith("rotary") and not (self.rotary or self.axial)
        return bool(self.rule.guess) or named

    @property
    def reason(self) -> str:
        """Why the status is ``partial``; empty if it is not."""
        reasons = [self.rule.partial] if self.rule.partial else []
        if self.missing:
            reasons.append(
                f"incomplete: {' and '.join(self.missing)}, which models of this type have, "
                f"{'are' if len(self.missing) > 1 else 'is'} missing from the file"
            )
        if self.positional is not None:
            term = "rotary term" if self.positional.rotary.frequencies.any() else "term"
            reasons.append(f"the form is the content term; a {term} of further dimensions is added")
        if any(isinstance(side.projection, Composed) for side in (self.query, self.key)):
            reasons.append(
                "what goes through the latents has the gains of their norms, but not the tokens' "
                "own scales"
            )
        if self.position and self.position_uses:
            sides = " and the ".join(self.position_uses)
            reasons.append(f"terms of the {sides} with positions are added to the form's score")
        if self.rule.between:
            reasons.append(
                "the form is the product of the projections; between it and the outputs stand "
                + ", ".join(self.rule.between)
            )
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
                f"queries and keys are clipped at ±{self.clip:g}; the form is the score of those "
                "below it"
            )
        return "; ".join(reasons)


def plan_attention(checkpoint: Checkpoint, family: Family) -> list[AttentionPlan]:
    """Every attention block, with a softmax, that the family describes, in order.

    Raises
    ------
    UnknownFamily
        The family says why its attention has no such form.
    CheckpointError
        Queries and keys are incomplete, or do not fit the configuration.
    """
    if family.refusal:
        raise UnknownFamily(f"{family.name}: {family.refusal}")
    rules = (rule for rule in family.attention if not rule.between)
    by_rule = [_plan_rule(checkpoint, family.name, rule) for rule in rules]
    if by_rule and not any(by_rule):
        _explain_absence(checkpoint, family)
    return _distinct([plans for plans in by_rule if plans])


def plan_mixers(checkpoint: Checkpoint, family: Family) -> list[AttentionPlan]:
    """Every block that scores pairs of tokens without a softmax, likewise."""
    mixers = (rule for rule in family.attention if rule.between)
    by_rule = [_plan_rule(checkpoint, family.name, rule) for rule in mixers]
    if len(by_rule) == len(family.attention) and not any(by_rule):
        _explain_absence(checkpoint, family)
    return sorted((plan for plans in by_rule for plan in plans), key=lambda plan: plan.layer)


def _distinct(by_rule: list[list[AttentionPlan]]) -> list[AttentionPlan]:
    """All plans, with distinct names for stacks of rules that share stack, kind and layer."""
    places = [{plan.place for plan in plans} for plans in by_rule]
    distinct: list[AttentionPlan] = []
    for plans, taken in zip(by_rule, places, strict=True):
        rivals = [other for other, theirs in zip(by_rule, places, strict=True) if theirs & taken]
        if len(rivals) > 1:
            names = [rival[0].query.tensor.split(".") for rival in rivals]
            plain = [without_numbers(".".join(name)).split(".") for name in names]
            # Modules that are counted have nothing but their numbers to tell them apart.
            names = plain if len(set(map(tuple, plain))) == len(plain) else names
            own = names[[rival is plans for rival in rivals].index(True)]
            distinctive = [word for word in own if not all(word in name for name in names)]
            words = [] if plans[0].stack == "unknown" else [plans[0].stack]
            stack = "-".join(
                [*words, *(w for w in distinctive if w not in ("weight", plans[0].stack))]
            )
            plans = [
                replace(p, rule=structs.replace(p.rule, stack=stack or p.stack)) for p in plans
            ]
        distinct += plans
    return distinct


def _plan_rule(checkpoint: Checkpoint, family: str, rule: AttentionRule) -> list[AttentionPlan]:
    tensors = checkpoint.tensors()
    config = Config(checkpoint.config, rule.config, rule.defaults, rule.model_type)
    shared = config.get("num_kv_shared_layers")
    keyless = shared if type(shared) is int and shared > 0 else 0
    applies = config.holds(rule.only_if)
    found = find_layers(tensors, rule, keyless) if applies else []
    if not found:
        return []
    if config.get("quantization_config.quant_method") == "bitnet":
        rule = structs.replace(rule, partial="; ".join(filter(None, (rule.partial, TERNARY))))
    layers = _complete_layers(found, config, rule)
    if not layers:
        return []
    groups = 1 + max(match.group for _, match in layers)
    plans: list[AttentionPlan] = []
    sources: dict[str | None, tuple[AttentionPlan, Match]] = {}
    for number, (layer, match) in enumerate(layers):
        kind = config.layer_type(layer)
        if number < len(layers) - keyless:
            plans.append(_plan_layer(config, family, rule, layer, groups, match))
            sources[kind] = plans[-1], match
            continue
        # Attends with the keys and values of the last layer of its type that has some (Gemma 3n).
        if kind not in sources:
            raise CheckpointError(
                f"config.json: num_kv_shared_layers is {keyless}, but none of the "
                f"other layers is of layer {layer}'s type, {kind}"
            )
        source, keyed = sources[kind]
        match = replace(match, key=keyed.key)
        planned = _plan_layer(config, family, rule, layer, groups, match)
        note = f"some layers attend with the keys of layer {source.layer}"
        shared_keys = replace(
            planned,
            key=source.key,
            value=source.value,
            rule=structs.replace(planned.rule, note=note),
        )
        plans.append(replace(shared_keys, missing=_missing(shared_keys, config, match)))
    return plans


def _complete_layers(
    found: list[Match], config: Config, rule: AttentionRule
) -> list[tuple[int, Match]]:
    """The layers with their numbers; an error if one is missing.

    Layers beyond the configured number, such as heads for multi-token prediction, are left out, as
    loading the model leaves them out.
    """
    single = len(found[0].index) == 1
    numbered = [(f.index[0] if single else i, f) for i, f in enumerate(found)]
    counts = config.get(*rule.key_heads) if rule.key_heads else None
    # No key heads: no attention there.
    without = (
        {n for n, heads in enumerate(counts) if heads == 0} if isinstance(counts, list) else ()
    )
    numbered = [pair for pair in numbered if pair[0] not in without]
    depths = config.get(*rule.layers)
    if isinstance(depths, list):
        _require_stages(found, config, rule, len(depths))
        return numbered
    count = config.optional_whole(rule.layers)
    if not rule.every_layer or not single:
        return numbered
    numbered = numbered if count is None else [pair for pair in numbered if pair[0] < count]
    count = count or len(numbered)
    missing = sorted(set(range(count)) - {number for number, _ in numbered} - set(without))
    if missing:
        raise CheckpointError(
            f"incomplete, the {rule.stack} has {count} layers and layer "
            f"{missing[0]} has no query weights"
        )
    return numbered


def _require_stages(found: list[Match], config: Config, rule: AttentionRule, stages: int) -> None:
    """Check that no layer of any stage is missing; the configuration lists the stages' depths."""
    there = {match.index for match in found}
    single = len(found[0].index) == 1
    before = 0
    for stage in range(stages):
        count = config.whole(rule.layers, stage)
        for block in range(count):
            if ((before + block,) if single else (stage, block)) not in there:
                raise CheckpointError(
                    f"incomplete, stage {stage} of the {rule.stack} has {count} "
                    f"layers and layer {block} has no query weights"
                )
        before += count


def _plan_layer(
    config: Config,
    family: str,
    rule: AttentionRule,
    layer: int,
    groups: int,
    match: Match,
) -> AttentionPlan:
    projections = projections_of(config, rule, match)
    query, key, value, output = sides_of(config, rule, match, projections)
    _, place = config.stage(rule.layers, match.index)
    staged = isinstance(config.get(*rule.layers), list)
    is_lifted = rule.kind == "self" and rule.causal and config.lifts_mask
    is_causal = rule.causal and not is_lifted
    if rule.causal_if:
        is_causal = is_causal or config.holds(rule.causal_if)
    modules = match.query.split(".")
    is_causal = is_causal or any(rule.causal_under.get(module) for module in modules)
    window = window_of(rule, config, layer, place if staged else layer, is_causal, is_lifted)
    turned = projections.get("q_position", query.projection).head_width
    rotary = (
        rotary_of(rule.rotary, config, turned, layer, window is not None) if rule.rotary else None
    )
    if rotary is not None and rotary.before_norm:
        query = _without_stretch(query, rotary)
        key = _without_stretch(key, rotary)
        rotary = rotary.turning
    if "norm" in rule.rotary_only and rotary is None:
        query, key = replace(query, norm=None), replace(key, norm=None)
    if "window" in rule.rotary_only and rotary is None:
        window = None
    positional = None
    if "q_position" in projections:
        turned_query, turned_key = projections["q_position"], projections["k_position"]
        positional = Positional(
            Side(turned_query),
            Side(turned_key, match.bias(turned_key, ())),
            rotary or UNTURNED,
        )
    grows = rotary is None and config.holds(rule.grows_if)
    if query.head_width != key.head_width or query.heads % key.heads:
        raise CheckpointError(
            f"{query.heads} query heads of width {query.head_width} do not fit "
            f"{key.heads} key heads of width {key.head_width} in layer {layer} of the {rule.stack}"
        )
    scale = config.product(
        rule.scale,
        {
            "head_width": query.head_width + (positional.query.head_width if positional else 0),
            "layer": layer,
            "rotary_stretch": rotary_stretch(config) if rule.rotary else 1.0,
        },
    )
    planned = AttentionPlan(
        family=family,
        rule=rule,
        layer=layer,
        query=query,
        key=key,
        value=value,
        output=output,
        scale=None if rule.guess else scale,
        softcap=config.optional_number((rule.softcap,)) if rule.softcap else None,
        clip=config.optional_number((rule.clip,)) if rule.clip else None,
        sinks=match.part(rule.sinks),
        causal=None if rule.guess and not is_causal else is_causal,
        window=window,
        applications=_applications(config, rule, match.group, groups),
        position=rule.position if config.holds(rule.position_if) else "",
        position_uses=tuple(
            side for side in rule.position_uses if config.holds(rule.position_uses_if.get(side, ""))
        ),
        rotary=rotary if rotary and rotary.axes == 1 and rule.layout != "latent" else None,
        axial=rotary if rotary and rotary.axes > 1 else None,
        positional=positional,
        grows_from=config.optional_length(rule.grows_from) if grows else None,
    )
    planned = replace(planned, missing=_missing(planned, config, match))
    require_fitting(planned, match.tensors)
    stored = {match.tensors[part.name].quantized: None for part in planned.parts}
    return replace(planned, quantized=tuple(filter(None, stored)))


def _missing(plan: AttentionPlan, config: Config, match: Match) -> tuple[str, ...]:
    """Return the names of tensors that models of the type have, and this layer lacks."""
    has_no_norm = "norm" in plan.rule.rotary_only and plan.rotary is None
    return tuple(
        match.named(getattr(plan.rule, role)[0])
        for role in always_present(config.own_type)
        if getattr(plan.rule, role)
        and not OPTIONAL_ROLES[role](plan)
        and not (has_no_norm and role.endswith("norm"))
    )


def _without_stretch(side: Side, rotary: Rotary) -> Side:
    """Return a side whose norm takes away the factor of the rotation before it.

    The factor divides the norm's epsilon instead.
    """
    if side.norm is None:
        return side
    epsilon = side.norm.epsilon / rotary.amplitude**2
    return replace(side, norm=replace(side.norm, epsilon=epsilon))


def _applications(config: Config, rule: AttentionRule, group: int, groups: int) -> int:
    """How often a layer's weights are applied in one pass.

    Shared layers come in groups (the first index), among which the passes are divided in order.
    """
    if not rule.applied_in_total:
        return 1
    total = round(config.product(rule.applied_in_total, {}))
    first, last = (-(-place * total // groups) for place in (group, group + 1))
    return last - first


def _explain_absence(checkpoint: Checkpoint, family: Family) -> None:
    names, rule = checkpoint.tensors(), family.attention[0]
    expected = (rule.fused or rule.query)[0].replace("{layer}", "0")
    shape = re.escape((rule.fused or rule.query)[0]).replace(r"\{layer\}", r"\d+")
    bare = next((n for n in names if re.search(rf"^(\D+\.)?{shape}\.weight$", n)), None)
    if bare:
        raise CheckpointError(
            f"{bare!r} is there, but the configuration says that no layer has such attention "
            "(numbers of layers, their kinds, zeros among numbers of heads)"
        )
    module = f".{expected.rpartition('.')[2]}."
    like = next((f", got {name!r}" for name in names if module in name), "")
    raise CheckpointError(
        f"none of its {len(names)} tensors are the queries and keys of family "
        f"{family.name}; expected names such as {weight_name(expected)!r}{like}"
    )
