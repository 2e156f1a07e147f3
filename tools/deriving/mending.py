"""Rules that nearly fit a record, changed fault by fault until they are proven, or cannot be.

What is at fault says what to try: another scale, other rotary positions, the norm that was seen to
feed the projections, sinks that lie next to them.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any

from tools.deriving.evidence import (
    input_norm,
    nearest,
    numbered,
    terms,
    value_and_output,
)
from tools.deriving.judging import content_of
from tools.deriving.proof import SAME, WEAK, faults
from tools.deriving.writing import family_text

from wqk.errors import WqkError
from wqk.families.family import parse_family

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tools.deriving.records import RunRecord, Site

    from wqk.checkpoints import Checkpoint

Rules = list[dict[str, Any]]

SCALES: tuple[tuple[str, ...], ...] = (
    (),
    ("head_width ** -0.5",),
    ("scaling",),
    ("attention_multiplier",),
    ("query_pre_attn_scalar ** -0.5",),
    ("scale",),
    ("hidden_size ** -0.5",),
    ("head_dim ** -0.5",),
    ("d_model ** -0.5",),
    ("embed_dim ** -0.5",),
    ("head_width ** -0.5", "rotary_stretch ** 2"),
    ("attention_head_size ** -0.5",),
    ("head_width ** -0.5", "2 ** 0.5"),
    ("attention_scale",),
    ("softmax_scale",),
    ("logit_scale",),
    ("dim_head ** -0.5",),
)
ROTARY: tuple[dict[str, Any] | None, ...] = (
    {"order": "half"},
    {"order": "interleaved"},
    None,
    {"order": "half", "windowed_only": True},
    {"order": "half", "layers": "no_rope_layers"},
    {"order": "interleaved", "layers": "no_rope_layers"},
    {"order": "interleaved", "windowed_only": True},
    {"order": "half", "fraction": "rotary_pct"},
    {"order": "half", "width": "qk_rope_head_dim"},
)
CAPS = (
    "attn_logit_softcapping",
    "attn_logit_softcap",
    "attention_logit_cap",
    "attn_logit_cap",
    "attention_logit_softcapping",
    "attn_softcap",
)
WINDOWS = (
    "sliding_window",
    "attention_window",
    "window_size",
    "local_attention",
    "sliding_window_size",
    "attention_chunk_size",
)


def strong(fault_list: list[str]) -> list[str]:
    """Select the faults of statements that are wrong."""
    return [fault for fault in fault_list if not fault.startswith(WEAK)]


def faults_of(record: RunRecord, checkpoint: Checkpoint, rules: Rules) -> list[str]:
    """The strong faults of rules, one of which is that they cannot be read."""
    try:
        family = parse_family(family_text("derived", ["derived"], rules), "derived")
        return strong(faults(record, checkpoint, family))
    except WqkError as error:
        return [f"cannot be read: {error}"]


def mended(record: RunRecord, checkpoint: Checkpoint, rules: Rules) -> tuple[Rules, list[str]]:
    """The rules with every change that left fewer faults, and the faults that are left."""
    fault_list = faults_of(record, checkpoint, rules)
    for _ in range(3):
        before = fault_list
        for changed in _changes(record, checkpoint, rules, fault_list):
            changed_faults = faults_of(record, checkpoint, changed)
            if _left(changed_faults) < _left(fault_list) and not unread(changed_faults):
                rules, fault_list = changed, changed_faults
            if not fault_list:
                return rules, fault_list
        if fault_list == before:
            break
    return rules, fault_list


def completed(record: RunRecord, checkpoint: Checkpoint, rules: Rules) -> Rules:
    """Proven rules with the outputs next to what they name, and the norms that feed it."""
    fuller = []
    for rule in rules:
        sites = _sites_of(record, rule, rules)
        source = nearest(content_of(sites[-1])[0].query_sources) if sites else None
        added = {} if rule.get("input_norm") else _norm_of(sites, checkpoint)
        if source and isinstance(rule.get("query"), str) and "output" not in rule:
            name = f"{source.parameter.removesuffix('.weight')}.weight"
            tensors = checkpoint.tensors()
            added |= value_and_output(tensors, name, rule["query"]) if name in tensors else {}
        fuller.append(rule | {key: value for key, value in added.items() if key not in rule})
    return rules if fuller == rules or faults_of(record, checkpoint, fuller) else fuller


def _left(fault_list: list[str]) -> tuple[int, int]:
    """Count the faults; positions count only if everything else is right."""
    return sum(not fault.startswith("positions are") for fault in fault_list), len(fault_list)


def unread(fault_list: list[str]) -> bool:
    """Return whether the forms are wrong, which no change of other settings can mend."""
    return any(re.search(r"\bread\b|are said", fault) for fault in fault_list)


def _changes(
    record: RunRecord, checkpoint: Checkpoint, rules: Rules, fault_list: list[str]
) -> Iterator[Rules]:
    """Rules with one thing changed that may be at fault."""
    if unread(fault_list):
        return
    text = "; ".join(fault_list)

    def all_with(**change: Any) -> Rules:
        return [rule if rule.get("kind") == "cross" else rule | change for rule in rules]

    if "does not feed" in text:
        yield [
            {k: v for k, v in rule.items() if "input_norm" not in k}
            | _norm_of(_sites_of(record, rule, rules), checkpoint)
            for rule in rules
        ]
        yield [{k: v for k, v in rule.items() if "input_norm" not in k} for rule in rules]
    if "sinks" in text or "sink" in text:
        names = re.findall(r"[\w.]*sinks?[\w.]*", text)
        if names:
            yield all_with(sinks=numbered(names[0]))
    if "capped" in text:
        for key in CAPS:
            if key in checkpoint.config:
                yield all_with(softcap=key)
    if "causal is" in text or "no encoder" in text:
        yield [rule | _mask_of(_sites_of(record, rule, rules), rule) for rule in rules]
        yield all_with(causal_if="is_decoder")
    if spoken := re.search(r"of a part for (\w+)", text):
        yield [rule | {"stack": spoken[1]} for rule in rules]
    if "reaches" in text:
        for key in WINDOWS:
            if key in checkpoint.config:
                yield all_with(window=key)
                yield [
                    rule
                    if rule.get("kind") == "cross" or rule.get("causal")
                    else rule | {"window": key, "window_counts": "each side"}
                    for rule in rules
                ]
        yield all_with(window=[])
    if "scale is" in text:
        measured_scales = [float(number) for number in re.findall(r"scale is ([\d.e+-]+)", text)]
        scales = [scale for scale in SCALES if _may_be(scale, checkpoint.config, measured_scales)]
        yield from ([rule | {"scale": list(scale)} for rule in rules] for scale in scales)
        for number in range(len(rules)):
            for scale in scales:
                yield [
                    r | {"scale": list(scale)} if i == number else r for i, r in enumerate(rules)
                ]
    if "rotary" in text:
        for number, rotary in itertools.product(range(len(rules)), ROTARY):
            yield [r | {"rotary": rotary} if i == number else r for i, r in enumerate(rules)]
        yield all_with(position="rotary, of its own kind")
    if "another product" in text or "beside the form" in text or "nothing is added" in text:
        yield all_with(position="" if "nothing is added" in text else "relative")
        for number, rule in enumerate(rules):
            sites = _sites_of(record, rule, rules)
            if sites:
                yield [
                    r | terms(content_of(sites[0])[0], sites) if i == number else r
                    for i, r in enumerate(rules)
                ]


def _may_be(
    scale: tuple[str, ...], config: Mapping[str, Any], measured_scales: Sequence[float]
) -> bool:
    """Return whether a scale has a measured value, according to the configuration."""
    value = 1.0
    for factor in scale:
        key, _, power = factor.partition(" ** ")
        number = config.get(key)
        if key in ("head_width", "rotary_stretch"):
            return True
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            return False
        value *= float(number) ** float(power or 1)
    return any(abs(value / number - 1) < SAME for number in measured_scales)


def _is_of(site: Site, rule: dict[str, Any]) -> bool:
    """Return whether a site's queries come from the tensor that a rule names."""
    source = nearest(content_of(site)[0].query_sources)
    names = rule.get("fused") or rule.get("query") or ""
    spellings = [names] if isinstance(names, str) else names
    return source is not None and any(
        numbered(source.parameter).removesuffix(".weight").endswith(name.replace("{block}", "0"))
        for name in spellings
    )


def _sites_of(record: RunRecord, rule: dict[str, Any], rules: Rules) -> list[Site]:
    """The sites whose queries come from the tensor that a rule names; all, where it is alone."""
    return record.sites if len(rules) == 1 else [s for s in record.sites if _is_of(s, rule)]


def _mask_of(sites: Sequence[Site], rule: dict[str, Any]) -> dict[str, Any]:
    """Return whether tokens only attended to earlier tokens, in all sites of a rule."""
    seen = [site.causal for site in sites if site.reach > 0]
    if rule.get("kind") == "cross" or not seen:
        return {}
    causal = all(seen)
    stacks = {"encoder": "decoder", "unknown": "decoder"} if causal else {"unknown": "encoder"}
    stack = str(rule["stack"])
    return {"causal": causal, "causal_if": "", "stack": stacks.get(stack, stack)}


def _norm_of(sites: Sequence[Site], checkpoint: Checkpoint) -> dict[str, Any]:
    """The norm that was seen to feed a rule's queries."""
    source = nearest(content_of(sites[-1])[0].query_sources) if sites else None
    return input_norm(checkpoint, source) if source is not None else {}
