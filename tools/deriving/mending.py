"""Rules that nearly fit a record, changed fault by fault until they are proven, or cannot be.

What is at fault says what to try: another scale, other rotary positions, the norm that was seen to
feed the projections, sinks that lie beside them.
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

    from tools.deriving.records import Record, Site

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


def strong(found: list[str]) -> list[str]:
    """Faults by which something that is said is wrong."""
    return [fault for fault in found if not fault.startswith(WEAK)]


def faults_of(record: Record, checkpoint: Checkpoint, rules: Rules) -> list[str]:
    """The strong faults of rules, one of which is that they cannot be read."""
    try:
        family = parse_family(family_text("derived", ["derived"], rules), "derived")
        return strong(faults(record, checkpoint, family))
    except WqkError as error:
        return [f"cannot be read: {error}"]


def mended(record: Record, checkpoint: Checkpoint, rules: Rules) -> tuple[Rules, list[str]]:
    """The rules with every change that left fewer faults, and the faults that are left."""
    found = faults_of(record, checkpoint, rules)
    for _ in range(3):
        before = found
        for changed in _changes(record, checkpoint, rules, found):
            told = faults_of(record, checkpoint, changed)
            if _left(told) < _left(found) and not unread(told):
                rules, found = changed, told
            if not found:
                return rules, found
        if found == before:
            break
    return rules, found


def completed(record: Record, checkpoint: Checkpoint, rules: Rules) -> Rules:
    """Proven rules with the outputs beside what they name, and the norms that feed it."""
    fuller = []
    for rule in rules:
        own = _sites_of(record, rule, rules)
        source = nearest(content_of(own[-1])[0].query_sources) if own else None
        added = {} if rule.get("input_norm") else _norm_of(own, checkpoint)
        if source and isinstance(rule.get("query"), str) and "output" not in rule:
            name = f"{source.parameter.removesuffix('.weight')}.weight"
            tensors = checkpoint.tensors()
            added |= value_and_output(tensors, name, rule["query"]) if name in tensors else {}
        fuller.append(rule | {key: value for key, value in added.items() if key not in rule})
    return rules if fuller == rules or faults_of(record, checkpoint, fuller) else fuller


def _left(found: list[str]) -> tuple[int, int]:
    """How much is at fault; positions are looked at once everything else is right."""
    return sum(not fault.startswith("positions are") for fault in found), len(found)


def unread(found: list[str]) -> bool:
    """Whether the forms themselves are wrong, which no change of their surroundings mends."""
    return any(re.search(r"\bread\b|are said", fault) for fault in found)


def _changes(
    record: Record, checkpoint: Checkpoint, rules: Rules, found: list[str]
) -> Iterator[Rules]:
    """Rules with one thing changed that may be at fault."""
    if unread(found):
        return
    said = "; ".join(found)

    def all_with(**change: Any) -> Rules:
        return [rule if rule.get("kind") == "cross" else rule | change for rule in rules]

    if "does not feed" in said:
        yield [
            {k: v for k, v in rule.items() if "input_norm" not in k}
            | _norm_of(_sites_of(record, rule, rules), checkpoint)
            for rule in rules
        ]
        yield [{k: v for k, v in rule.items() if "input_norm" not in k} for rule in rules]
    if "sinks" in said or "sink" in said:
        names = re.findall(r"[\w.]*sinks?[\w.]*", said)
        if names:
            yield all_with(sinks=numbered(names[0]))
    if "capped" in said:
        for key in CAPS:
            if key in checkpoint.config:
                yield all_with(softcap=key)
    if "causal is" in said or "no encoder" in said:
        yield [rule | _mask_of(_sites_of(record, rule, rules), rule) for rule in rules]
        yield all_with(causal_if="is_decoder")
    if spoken := re.search(r"of a part for (\w+)", said):
        yield [rule | {"stack": spoken[1]} for rule in rules]
    if "reaches" in said:
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
    if "scale is" in said:
        wanted = [float(number) for number in re.findall(r"scale is ([\d.e+-]+)", said)]
        scales = [scale for scale in SCALES if _may_be(scale, checkpoint.config, wanted)]
        yield from ([rule | {"scale": list(scale)} for rule in rules] for scale in scales)
        for number in range(len(rules)):
            for scale in scales:
                yield [
                    r | {"scale": list(scale)} if i == number else r for i, r in enumerate(rules)
                ]
    if "rotary" in said:
        for number, rotary in itertools.product(range(len(rules)), ROTARY):
            yield [r | {"rotary": rotary} if i == number else r for i, r in enumerate(rules)]
        yield all_with(position="rotary, of its own kind")
    if "another product" in said or "beside the form" in said or "nothing is added" in said:
        yield all_with(position="" if "nothing is added" in said else "relative")
        for number, rule in enumerate(rules):
            own = _sites_of(record, rule, rules)
            if own:
                yield [
                    r | terms(content_of(own[0])[0], own) if i == number else r
                    for i, r in enumerate(rules)
                ]


def _may_be(scale: tuple[str, ...], config: Mapping[str, Any], wanted: Sequence[float]) -> bool:
    """Whether a scale has a measured value, as far as the configuration alone tells."""
    value = 1.0
    for factor in scale:
        key, _, power = factor.partition(" ** ")
        number = config.get(key)
        if key in ("head_width", "rotary_stretch"):
            return True
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            return False
        value *= float(number) ** float(power or 1)
    return any(abs(value / number - 1) < SAME for number in wanted)


def _is_of(site: Site, rule: dict[str, Any]) -> bool:
    """Whether a site's queries come from the tensor that a rule names."""
    source = nearest(content_of(site)[0].query_sources)
    names = rule.get("fused") or rule.get("query") or ""
    spellings = [names] if isinstance(names, str) else names
    return source is not None and any(
        numbered(source.parameter).removesuffix(".weight").endswith(name.replace("{block}", "0"))
        for name in spellings
    )


def _sites_of(record: Record, rule: dict[str, Any], rules: Rules) -> list[Site]:
    """The sites whose queries come from the tensor that a rule names; all, where it is alone."""
    return record.sites if len(rules) == 1 else [s for s in record.sites if _is_of(s, rule)]


def _mask_of(sites: Sequence[Site], rule: dict[str, Any]) -> dict[str, Any]:
    """Whether tokens were seen to look back only, in all sites of a rule."""
    seen = [site.causal for site in sites if site.reach > 0]
    if rule.get("kind") == "cross" or not seen:
        return {}
    causal = all(seen)
    stacks = {"encoder": "decoder", "unknown": "decoder"} if causal else {"unknown": "encoder"}
    stack = str(rule["stack"])
    return {"causal": causal, "causal_if": "", "stack": stacks.get(stack, stack)}


def _norm_of(own: Sequence[Site], checkpoint: Checkpoint) -> dict[str, Any]:
    """The norm that was seen to feed a rule's queries."""
    source = nearest(content_of(own[-1])[0].query_sources) if own else None
    return input_norm(checkpoint, source) if source is not None else {}
