"""Omissions of a family, and faults that pass, found with a checkpoint that the family reads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

from tests.families.silence import essence, misread, norms_of, zeros
from tools.deriving.evidence import value_and_output
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.errors import WqkError
from wqk.families import AttentionPlan, Family, find_family, plan_attention

# Names of tensors distinguish their stacks.
NAMED_BY_TENSORS = {"timesformer", "videoprism-vision-model"}
# Their configurations do not say how many layers have tensors.
UNCOUNTED = {"albert", "mask2former", "mobilevit"}
# A switch of their configurations decides whether one layer or all have cross-attention.
SWITCHED = {"blt-local-decoder", "blt-local-encoder"}
# What configurations of pictures and of sounds mention.
SIGNS = {
    "vision": "image|patch|pixel|video|vision|timm",
    "audio": "audio|mel|sampl|feat|wave|codebook",
}
# Keys of other families, which a configuration may hold without meaning anything; two are too many
# where queries have one head.
STRAY = [
    {"num_key_value_heads": 1},
    {"num_key_value_heads": 2},
    {"num_hidden_layers": 1},
    {"num_attention_heads": 1},
]


def omissions(checkpoint: Checkpoint, family: Family) -> list[str]:
    """Yield omissions of a family, and faults that nothing would notice."""
    plans = plan_attention(checkpoint, family)
    return [
        *_circuit(checkpoint, plans),
        *_norms(checkpoint, plans),
        *_sinks(checkpoint, plans),
        *_stacks(plans, family),
        *_misnamed(checkpoint, plans),
        *_strays(checkpoint, family, plans),
        *_truncation(checkpoint, family, plans),
        *_whole_stacks(checkpoint, plans),
        *misread(checkpoint, family),
    ]


def under_live_names(checkpoint: Checkpoint, names: Mapping[str, str]) -> Checkpoint:
    """The shapes of a file's tensors under a running model's names; ``names`` are the file's."""
    calls = {stored: live_name for live_name, stored in names.items()}
    tensors = {calls.get(name, name): value for name, value in zeros(checkpoint).items()}
    return StateDict(tensors, checkpoint.config, "made")


def other_in_memory(checkpoint: Checkpoint, family: Family, live: Checkpoint) -> list[str]:
    """Attention of which something else is read from a running model."""
    read = plan_attention(checkpoint, family), plan_attention(live, find_family(live))
    pairs = zip_longest(*read)
    return [str(a and a.place) for a, b in pairs if not (a and b) or _said(a) != _said(b)]


def _said(plan: AttentionPlan) -> tuple[Any, ...]:
    sides = [
        side and (side.bias is None, side.temperature is None, norms_of(side))
        for side in (plan.query, plan.key, plan.value, plan.output)
    ]
    return essence(plan), sides, plan.sinks is None, len(plan.parts), plan.reason


def absent(plans: Sequence[AttentionPlan]) -> list[tuple[str, str, str]]:
    """Named tensors without a layer that has them: by stack, kind and role."""
    named, read = set(), set()
    for p in plans:
        has = {
            "value": p.value,
            "output": p.output,
            "output_norm": p.output and p.output.norm,
            "input_norm": p.query.input_norm,
            "query_bias": p.query.bias,
            "sinks": p.sinks,
            "key_input_norm": p.kind == "self" or p.key.input_norm,
        }
        has |= {} if p.layer else {"input_norm": True}  # of the layer before
        named |= {(p.stack, p.kind, role) for role in has if getattr(p.rule, role)}
        read |= {(p.stack, p.kind, role) for role, is_read in has.items() if is_read}
    return sorted(named - read)


def _circuit(checkpoint: Checkpoint, plans: list[AttentionPlan]) -> Iterator[str]:
    """Unnamed values and outputs next to the queries."""
    tensors = checkpoint.tensors()
    for plan in plans:
        name = plan.query.tensor
        width = plan.query.heads * plan.query.head_width
        neighbors = value_and_output(tensors, name, name.removesuffix(".weight"), width)
        if plan.value is None and "value" in neighbors and neighbors["value"] != plan.key.tensor:
            yield f"{neighbors['value']} is no value"
        if plan.output is None and "output" in neighbors:
            yield f"{neighbors['output']} is no output"


def _norms(checkpoint: Checkpoint, plans: list[AttentionPlan]) -> Iterator[str]:
    """Unnamed gains of norms next to the queries."""
    norms = [
        norm
        for plan in plans
        for side in filter(None, (plan.query, plan.key, plan.value, plan.output))
        for norm in filter(None, (side.norm, side.input_norm))
    ]
    for norm in norms:
        for part in norm.gain if norm.kind == "rms" else ():
            if part.name.removesuffix("weight") + "bias" in checkpoint.tensors():
                yield f"{part.name} has a bias, as no root mean square's norm has"
    named = {part.name for norm in norms for part in norm.gain}
    named |= {part.name for plan in plans for part in plan.parts}
    for module in {plan.query.tensor.removesuffix(".weight").rpartition(".")[0] for plan in plans}:
        # In a GGUF file all norms of a layer lie next to its queries.
        whose = r"attn_[qk]\w*" if module.startswith("blk.") else r"(?!layer_norm)[^.]+"
        norm_pattern = rf"{re.escape(module)}\.{whose}_(layernorm|norm|ln)\.weight"
        for name in checkpoint.tensors():
            if re.fullmatch(norm_pattern, name) and name not in named:
                yield f"{name} is no norm"


def _sinks(checkpoint: Checkpoint, plans: list[AttentionPlan]) -> Iterator[str]:
    """Unnamed scores of a virtual key, next to the queries."""
    named = {plan.sinks.name for plan in plans if plan.sinks}
    modules = {plan.query.tensor.removesuffix(".weight").rpartition(".")[0] for plan in plans}
    for name in checkpoint.tensors():
        module, _, last = name.rpartition(".")
        if module in modules and "sink" in last and name not in named:
            yield f"{name} is no sink"


def _stacks(plans: list[AttentionPlan], family: Family) -> Iterator[str]:
    """Stacks that share a name, and decoders that see what comes."""
    for plan in plans:
        made_up = "-" in plan.stack and plan.stack not in {r.stack for r in family.attention}
        if made_up and NAMED_BY_TENSORS.isdisjoint(family.name.split(" + ")):
            yield f"{plan.stack} has its name from its tensors: another attention has its place"
        crossing = plan.kind == "cross" and plan.stack == "encoder"
        if crossing and any(plan_of_decoder.stack == "decoder" for plan_of_decoder in plans):
            yield "an encoder attends to a decoder"
    alone = {(plan.stack, plan.kind) for plan in plans} == {("decoder", "self")}
    named = any("decoder" in plan.query.tensor for plan in plans)
    if alone and not named and not any(plan.causal for plan in plans):
        yield "a decoder alone sees what comes"


def _misnamed(checkpoint: Checkpoint, plans: list[AttentionPlan]) -> Iterator[str]:
    """Stacks with a name at odds with the configuration."""
    settings, kind = str(checkpoint.config), checkpoint.config.get("model_type")
    for stack in {plan.stack for plan in plans}:
        if stack in SIGNS and not re.search(SIGNS[stack], settings):
            yield f"the stack is called {stack}, but the configuration has nothing of it"
    writes = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if writes and any(plan.causal and plan.stack == "encoder" for plan in plans):
        yield "a language model that sees the past alone is called an encoder"


def _strays(checkpoint: Checkpoint, family: Family, plans: list[AttentionPlan]) -> Iterator[str]:
    """Keys that a configuration, or a part of it, does not have, but that are read."""
    for stray in STRAY:
        config = {
            name: stray | part if isinstance(part, dict) else part
            for name, part in checkpoint.config.items()
        }
        try:
            is_equal = _shapes(_planned(checkpoint, family, stray | config)) == _shapes(plans)
        except WqkError:
            is_equal = False
        if not is_equal:
            yield f"a stray key is read: {stray}"


def _truncation(
    checkpoint: Checkpoint, family: Family, plans: list[AttentionPlan]
) -> Iterator[str]:
    """Stacks whose last layer may be missing without anyone noticing."""
    for rule, group in groupby(plans, key=lambda plan: (plan.rule, plan.stack)):
        counted = list(group)
        if len(counted) < 2 or not rule[0].every_layer or family.name in UNCOUNTED:
            continue
        gone = counted[-1].query.tensor
        try:
            _planned(checkpoint, family, checkpoint.config, gone)
        except WqkError:
            continue
        yield f"{gone} may be missing"


def _whole_stacks(checkpoint: Checkpoint, plans: list[AttentionPlan]) -> Iterator[str]:
    """Attention that every layer has, though the family leaves room for layers without it."""
    for (rule, stack), group in groupby(plans, key=lambda plan: (plan.rule, plan.stack)):
        counted = list(group)
        has_one_number = all(name.count("{") == 1 for name in (*rule.query, *rule.fused))
        is_switched = not SWITCHED.isdisjoint(counted[0].family.split(" + "))
        if rule.every_layer or not has_one_number or is_switched:
            continue
        layers = {plan.layer for plan in counted}
        config = checkpoint.config.get(rule.config, checkpoint.config)
        count = next((config[key] for key in rule.layers if key in config), None)
        if len(layers) > 1 and layers == {*range(count or 0)}:
            yield f"the {stack} has attention in each of its layers: every_layer is true"


def _planned(
    checkpoint: Checkpoint, family: Family, config: dict[str, Any], without: str = ""
) -> list[AttentionPlan]:
    tensors = {name: value for name, value in zeros(checkpoint).items() if name != without}
    return plan_attention(StateDict(tensors, config, "made"), family)


def _shapes(plans: list[AttentionPlan]) -> list[tuple[Any, ...]]:
    return [(p.query.heads, p.key.heads, p.query.head_width, p.key.head_width) for p in plans]
