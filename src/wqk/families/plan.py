"""From a family and a checkpoint's tensor names to what has to be read, block by block.

Nothing is read here: names, shapes and the configuration decide.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk.checkpoints import Part
from wqk.errors import CheckpointError
from wqk.families.layouts import Projection, sectioned, separate
from wqk.families.rotary import Rotary, rotary_of
from wqk.families.values import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wqk.checkpoints import Checkpoint, TensorInfo
    from wqk.families.family import AttentionRule, Family


@dataclass(frozen=True)
class InputNorm:
    """The norm whose output is projected: its tensors and its kind, ``rms`` or ``layer``."""

    gain: Part
    bias: Part | None
    kind: str
    offset: float


@dataclass(frozen=True)
class AttentionPlan:
    """One block's attention: its place in the model, its tensors, and the rest of its score."""

    family: str
    rule: AttentionRule
    layer: int
    query: Projection
    key: Projection
    query_bias: Part | None
    key_bias: Part | None
    query_norm: Part | None
    key_norm: Part | None
    query_norm_bias: Part | None
    key_norm_bias: Part | None
    query_input: InputNorm | None
    key_input: InputNorm | None
    value: Projection | None
    value_bias: Part | None
    output: Projection | None
    norm_epsilon: float
    scale: float
    softcap: float | None
    causal: bool
    window: str | None
    applications: int
    rotary: Rotary | None

    @property
    def stack(self) -> str:
        """The stack's name; an encoder that is set to look only back is a decoder."""
        return "decoder" if self.causal and self.rule.causal_if else self.rule.stack

    @property
    def parts(self) -> dict[str, Part]:
        """What is read for the block's plain form, by role."""
        named = {
            "query": self.query.part,
            "key": self.key.part,
            "query_bias": self.query_bias,
            "key_bias": self.key_bias,
            "query_norm": self.query_norm,
            "key_norm": self.key_norm,
            "query_norm_bias": self.query_norm_bias,
            "key_norm_bias": self.key_norm_bias,
        }
        return {role: part for role, part in named.items() if part is not None}

    @property
    def status(self) -> str:
        """``partial`` where one form per head does not hold the whole score."""
        return "partial" if self.reason else "ok"

    @property
    def reason(self) -> str:
        """Why the status is ``partial``; empty where it is not."""
        if self.rule.partial:
            return self.rule.partial
        if self.query_norm or self.key_norm:
            return (
                "queries and keys are normalised token by token before they meet; "
                "the gains are folded into the form, the tokens' own scales are not"
            )
        return ""


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


@dataclass(frozen=True)
class _Found:
    """The tensors of one rule in one layer, without the ``.weight`` of their names."""

    index: tuple[int, ...]
    query: str
    key: str
    prefix: str


def _plan_rule(checkpoint: Checkpoint, family: str, rule: AttentionRule) -> list[AttentionPlan]:
    tensors = checkpoint.tensors()
    settings = Settings(checkpoint.config, rule.config, checkpoint.name, rule.defaults)
    found = _find(tensors, rule, checkpoint.name)
    if not found:
        return []
    layers = _complete(found, settings, rule)
    groups = 1 + max(names.index[0] for _, names in layers)
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
    found: _Found,
) -> AttentionPlan:
    roles = _projections(tensors, settings, rule, found)
    query, key, value = roles["q"], roles["k"], roles.get("v")
    if query.head_width != key.head_width or query.heads % key.heads:
        raise CheckpointError(
            f"{settings.name}: {query.heads} query heads of width {query.head_width} do not fit "
            f"{key.heads} key heads of width {key.head_width} in layer {layer} of the {rule.stack}"
        )
    window = settings.window(rule.window, layer)
    return AttentionPlan(
        family=family,
        rule=rule,
        layer=layer,
        query=query,
        key=key,
        query_bias=_bias(tensors, query, found, rule.query_bias),
        key_bias=None if rule.query_bias else _bias(tensors, key, found, ()),
        query_norm=_norm(tensors, rule.query_norm, found, "weight"),
        key_norm=_norm(tensors, rule.key_norm, found, "weight"),
        query_norm_bias=_norm(tensors, rule.query_norm, found, "bias"),
        key_norm_bias=_norm(tensors, rule.key_norm, found, "bias"),
        query_input=_input_norm(tensors, rule, _input_spellings(rule, found), found),
        key_input=_input_norm(
            tensors,
            rule,
            rule.key_input_norm if rule.kind == "cross" else _input_spellings(rule, found),
            found,
        ),
        value=value,
        value_bias=_bias(tensors, value, found, rule.value_bias) if value else None,
        output=_output(tensors, rule, found, query.heads),
        norm_epsilon=settings.optional_number(rule.norm_epsilon) or 0.0,
        scale=settings.product(rule.scale, {"head_width": query.head_width, "layer": layer}),
        softcap=settings.optional_number((rule.softcap,)) if rule.softcap else None,
        causal=rule.causal or bool(rule.causal_if and settings.flag(rule.causal_if)),
        window=window,
        applications=_applications(settings, rule, found.index[0], groups),
        rotary=rotary_of(rule.rotary, settings, query.head_width, layer, window is not None)
        if rule.rotary
        else None,
    )


def _find(tensors: Mapping[str, TensorInfo], rule: AttentionRule, name: str) -> list[_Found]:
    """The layers whose tensors match the rule's first spelling that matches at all."""
    spellings = rule.fused or rule.query
    keys = rule.fused or rule.key
    for query, key in zip(spellings, keys, strict=True):
        pattern = _pattern(query)
        matches = [match for match in map(pattern.fullmatch, tensors) if match]
        if not matches:
            continue
        prefixes = sorted({match["prefix"] for match in matches})
        if len(prefixes) > 1:
            raise CheckpointError(
                f"{name}: two sets of tensors match {query!r}, under "
                f"{prefixes[0]!r} and {prefixes[1]!r}; name one with a family file"
            )
        prefix = prefixes[0]
        found = []
        for index in sorted(tuple(int(n) for n in match.groups()[1:]) for match in matches):
            names = [prefix + _fill(spelling, index) for spelling in (query, key)]
            for tensor in map(_weight, names):
                if tensor not in tensors:
                    raise CheckpointError(f"{name}: incomplete, tensor {tensor!r} is missing")
            found.append(_Found(index, names[0], names[1], prefix))
        return found
    return []


def _pattern(spelling: str) -> re.Pattern[str]:
    """Matches the full names of weights of this spelling, under any prefix."""
    body = re.sub(r"\\\{\w+\\\}", r"(\\d+)", re.escape(_weight(spelling)))
    return re.compile(rf"(?P<prefix>(?:.+\.)?){body}")


def _fill(spelling: str, index: tuple[int, ...]) -> str:
    """The spelling with its ``{layer}`` and further indices filled in, in their order."""
    spelling = spelling.replace("{previous}", str(index[0] - 1))
    numbers = iter(index)
    return re.sub(r"\{\w+\}", lambda _: str(next(numbers)), spelling)


def _weight(stem: str) -> str:
    """Full name of the weight; parameters that are no module's own end in ``weight`` already."""
    return stem if stem.endswith("weight") else f"{stem}.weight"


def _complete(
    found: list[_Found], settings: Settings, rule: AttentionRule
) -> list[tuple[int, _Found]]:
    """The layers with their numbers, after a look that none is missing.

    Layers beyond the configured number, such as heads for multi-token prediction, are not the
    model's and are left out, as loading the model leaves them out.
    """
    single = len(found[0].index) == 1
    numbered = [(f.index[0] if single else i, f) for i, f in enumerate(found)]
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


def _projections(
    tensors: Mapping[str, TensorInfo], settings: Settings, rule: AttentionRule, found: _Found
) -> dict[str, Projection]:
    """Where the weights of ``q`` and ``k`` lie, and of ``v`` where they are named."""
    layer = found.index[0]
    heads = settings.whole(rule.heads, layer)
    key_heads = settings.optional_whole(rule.key_heads, layer) or heads
    if rule.single_key_head_if and settings.flag(rule.single_key_head_if):
        key_heads = 1
    query, key = _weight(found.query), _weight(found.key)
    for tensor in (query, key):
        if len(tensors[tensor].shape) != 2:
            raise CheckpointError(
                f"{settings.name}: {tensor} must be a matrix, got shape {tensors[tensor].shape}"
            )
    if rule.layout == "separate":
        value = _named(tensors, rule.value, found)
        return {
            "q": separate(query, tensors[query].shape, heads),
            "k": separate(key, tensors[key].shape, key_heads),
            **({"v": separate(value, tensors[value].shape, key_heads)} if value else {}),
        }
    return sectioned(
        query,
        tensors[query].shape,
        {"q": heads, "k": key_heads, "v": key_heads},
        rule.order,
        blocks=key_heads if rule.layout == "grouped" else rule.blocks,
        transposed=rule.layout == "conv1d",
    )


def _output(
    tensors: Mapping[str, TensorInfo], rule: AttentionRule, found: _Found, heads: int
) -> Projection | None:
    """Where W_o lies; its inputs are the heads' outputs side by side, so its columns are theirs."""
    name = _named(tensors, rule.output, found)
    if not name:
        return None
    stored_in_out = rule.layout == "conv1d"
    inputs = tensors[name].shape[0 if stored_in_out else 1]
    if inputs % heads:
        raise CheckpointError(f"{name}: {inputs} inputs do not divide into {heads} heads")
    return Projection(name, None, not stored_in_out, heads, inputs // heads)


def _named(
    tensors: Mapping[str, TensorInfo], spellings: tuple[str, ...], found: _Found
) -> str | None:
    """Full name of the first weight of these spellings that is there."""
    names = (_weight(found.prefix + _fill(spelling, found.index)) for spelling in spellings)
    return next((name for name in names if name in tensors), None)


def _bias(
    tensors: Mapping[str, TensorInfo], projection: Projection, found: _Found, names: tuple[str, ...]
) -> Part | None:
    """The bias that lies as the projection's outputs do, or under a name of its own."""
    for spelling in names:
        name = found.prefix + _fill(spelling, found.index)
        if name in tensors:
            return Part(name)
    name = projection.tensor.removesuffix("weight") + "bias"
    return projection.bias_part(name) if not names and name in tensors else None


def _norm(
    tensors: Mapping[str, TensorInfo], spellings: tuple[str, ...], found: _Found, what: str
) -> Part | None:
    """The gain (``weight``) or bias of a norm between projection and score."""
    stems = (found.prefix + _fill(spelling, found.index) for spelling in spellings)
    # Files from the first years call a norm's gain and bias gamma and beta.
    endings = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}[what]
    names = (f"{stem.removesuffix('.weight')}.{ending}" for stem in stems for ending in endings)
    return next((Part(name) for name in names if name in tensors), None)


def _input_spellings(rule: AttentionRule, found: _Found) -> tuple[str, ...]:
    """Spellings of the norm that feeds this layer's queries."""
    is_first = found.index[0] == 0 and rule.first_input_norm
    return rule.first_input_norm if is_first else rule.input_norm


def _input_norm(
    tensors: Mapping[str, TensorInfo],
    rule: AttentionRule,
    spellings: tuple[str, ...],
    found: _Found,
) -> InputNorm | None:
    gain = _norm(tensors, spellings, found, "weight")
    if gain is None:
        return None
    bias = _norm(tensors, spellings, found, "bias")
    return InputNorm(gain, bias, rule.input_norm_kind, rule.input_norm_offset)


def _applications(settings: Settings, rule: AttentionRule, group: int, groups: int) -> int:
    """How often a layer's weights are applied in one pass.

    Shared layers come in groups (the first index), and the passes are dealt to these in order.
    """
    if rule.applied_in_total:
        total = settings.whole((rule.applied_in_total,))
        return [number * groups // total for number in range(total)].count(group)
    return 2 if rule.applied_twice_if and settings.flag(rule.applied_twice_if) else 1


def _explain_absence(checkpoint: Checkpoint, family: Family) -> None:
    names = checkpoint.tensors()
    packed = next((n for n in names if n.endswith((".qweight", ".weight_packed"))), None)
    if packed:
        raise CheckpointError(
            f"{checkpoint.name}: quantised ({packed}); its weights are codes, not numbers to "
            "score; use the original checkpoint, or dequantise it first"
        )
    rule = family.attention[0]
    expected = (rule.fused or rule.query)[0].replace("{layer}", "0")
    raise CheckpointError(
        f"{checkpoint.name}: none of its {len(names)} tensors are the queries and keys of family "
        f"{family.name}; expected names such as {_weight(expected)!r}"
    )
