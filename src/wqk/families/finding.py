"""Which family describes a checkpoint; of a composite model, each part's.

Composite are a language model with a vision tower, or an encoder with its own decoder. A part is a
model. Its nested configuration gives its model type, hence its family, and its numbers; its tensors
share a prefix. The family's rules apply unchanged, with that prefix and configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from wqk.checkpoints import Checkpoint, TensorInfo
from wqk.errors import CheckpointError, UnknownFamily, errors_about
from wqk.families.config import Config, part_types
from wqk.families.family import (
    AttentionRule,
    Family,
    family_of_type,
)
from wqk.families.inference import infer_family
from wqk.families.naming import prefixes

# Words for parts in configurations and names of tensors, by the name of their stack.
WORDS = {
    "vision": ("vision", "visual", "image", "vit", "vpm", "img", "pixel"),
    "audio": ("audio", "speech", "sound", "acoustic", "apm"),
    "text": ("text", "language", "llm", "lm"),
    "encoder": ("encoder",),
    "decoder": ("decoder",),
    "qformer": ("qformer",),
    "perceiver": ("perceiver", "resampler", "connector"),
    "talker": ("talker",),
    "thinker": ("thinker",),
    "depth": ("depth",),
}
MODALITIES = ("vision", "audio", "text")
# Stacks that are named like their part.
PLAIN = {"encoder", "unknown", *MODALITIES}
WIDTHS = ("hidden_size", "d_model", "n_embd", "embed_dim", "encoder_hidden_size")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "depth")


@dataclass(frozen=True)
class Part:
    """A part of a model: where its configuration is, and the family of its type."""

    path: str  # text_config; thinker_config.text_config; empty for the model's own keys
    config: Mapping[str, Any]
    family: Family
    model_type: str

    @property
    def words(self) -> tuple[str, ...]:
        """The modalities that its path names."""
        named = re.split(r"[._]", self.path.lower())
        return tuple(
            kind for kind, names in WORDS.items() if any(word.startswith(names) for word in named)
        )


def compose_family(checkpoint: Checkpoint, beside: Family | None = None) -> Family | None:
    """The family of a composite model; None if its configuration names no part's type.

    ``beside`` is attention that the model has in addition to that of its parts. Raises
    `CheckpointError` if a part's tensors occur more than once, with nothing to distinguish them,
    and `UnknownFamily` if the attention of a part is not one form per head.
    """
    tensors = checkpoint.tensors()
    rules = list(beside.attention) if beside else []
    names = [beside.name] if beside else []
    taken: set[str] = set()
    parts = list(_parts(checkpoint.config, checkpoint.config.get("model_type")))

    # Parts that names identify come first, so that no other part takes their tensors.
    def order(part: Part) -> tuple[bool, bool]:
        found = (prefix for rule in part.family.attention for prefix in prefixes(tensors, rule))
        return part.words[:1] in ((), ("text",), ("decoder",)), not any(
            _has_its_first_word(prefix, part, tensors) for prefix in found
        )

    for part in sorted(parts, key=order):
        if part.family.refusal:
            raise UnknownFamily(f"{part.path}: {part.family.refusal}")
        for prefix in _prefixes(tensors, part, taken):
            taken.add(prefix)
            found = [rule for rule in part.family.attention if prefix in prefixes(tensors, rule)]
            stacks = {rule.stack for rule in found}
            rules += [
                replace(
                    rule,
                    prefix=prefix,
                    config=".".join(filter(None, (part.path, rule.config))),
                    stack=_stack(part, rule, stacks),
                    model_type=part.model_type,
                )
                for rule in found
            ]
            names.append(part.family.name)
    if not rules:
        return None
    return Family(
        name=" + ".join(dict.fromkeys(names)),
        model_types=(),
        attention=tuple(_with_distinct_stacks(rules)),
    )


def _parts(config: Mapping[str, Any], model_type: object, path: str = "") -> Iterator[Part]:
    """The parts of known families, including parts of parts."""
    types = part_types(model_type)
    # Older files hold the text's keys next to the parts.
    for key in dict.fromkeys([*config, *types]):
        value = config.get(key)
        where = f"{path}.{key}" if path else key
        if value is None and key in types and "text" in key:
            value, where = config, path
        if not isinstance(value, dict):
            continue
        named = value.get("model_type") if value is not config else None
        kinds = [kind for kind in (named, types.get(key)) if isinstance(kind, str)]
        known = next((kind for kind in kinds if family_of_type(kind)), None)
        family = family_of_type(known)
        if known and family:
            yield Part(where, value, family, known)
        if value is not config and (family is None or family.with_parts):
            yield from _parts(value, kinds[0] if kinds else None, where)


def _prefixes(tensors: Mapping[str, TensorInfo], part: Part, taken: set[str]) -> list[str]:
    """The prefix of the part's tensors; several where modules called like it share its numbers."""
    found = {
        prefix
        for rule in part.family.attention
        for prefix in prefixes(tensors, rule)
        if prefix not in taken
    }
    found = {prefix for prefix in found if not _names_another_modality(prefix, part)}
    for fits in (
        _names_its_configuration,
        _has_its_first_word,
        _names_its_modality,
        _has_width,
        _has_depth,
    ):
        if len(found) > 1:
            fitting = {prefix for prefix in found if fits(prefix, part, tensors)}
            found = fitting or found
    shown = sorted(found)
    if len(found) > 1 and not all(_names_its_configuration(p, part, tensors) for p in found):
        raise CheckpointError(
            f"the tensors of {part.path} may be under {shown[0]!r} or {shown[1]!r}; "
            "name one with a family file"
        )
    return shown


def _name_words(prefix: str) -> list[str]:
    return re.split(r"[._]", prefix.lower())


def _names_another_modality(prefix: str, part: Part) -> bool:
    """Whether a prefix names another modality than the part's."""
    its = [kind for kind in MODALITIES if kind in part.words]
    others = [n for kind in MODALITIES if kind not in its for n in WORDS[kind]]
    return (
        bool(its)
        and any(
            word.startswith(tuple(others)) and not word.startswith(WORDS[its[0]])
            for word in _name_words(prefix)
        )
        and not _names_its_modality(prefix, part, {})
    )


def _names_its_configuration(prefix: str, part: Part, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether the prefix has the name of the part's configuration, as in ``geometry_encoder``."""
    name = part.path.rpartition(".")[2].removesuffix("_config")
    return any(word == name or word.startswith(f"{name}_") for word in prefix.split("."))


def _has_its_first_word(prefix: str, part: Part, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether one of its words starts as that name: ``patch_encoder``, ``patch_model_config``."""
    name = part.path.rpartition(".")[2].split("_")[0]
    return any(word.split("_")[0] == name for word in prefix.split("."))


def _names_its_modality(prefix: str, part: Part, tensors: Mapping[str, TensorInfo]) -> bool:
    words = tuple(name for kind in part.words for name in WORDS[kind])
    return bool(words) and any(word.startswith(words) for word in _name_words(prefix))


def _queries(prefix: str, part: Part, tensors: Mapping[str, TensorInfo]) -> Sequence[str]:
    return [
        name for rule in part.family.attention for name in prefixes(tensors, rule).get(prefix, ())
    ]


def _has_width(prefix: str, part: Part, tensors: Mapping[str, TensorInfo]) -> bool:
    width = next((part.config[key] for key in WIDTHS if key in part.config), None)
    queries = _queries(prefix, part, tensors)
    return any(width in tensors[name].shape for name in queries)


def _has_depth(prefix: str, part: Part, tensors: Mapping[str, TensorInfo]) -> bool:
    depth = next((part.config[key] for key in DEPTHS if key in part.config), None)
    return len(_queries(prefix, part, tensors)) == depth


def _stack(part: Part, rule: AttentionRule, stacks: set[str]) -> str:
    """The name of the part's stack in the whole model."""
    kind = part.words[0] if part.words else part.path.rpartition(".")[2].removesuffix("_config")
    if not kind or (kind == "text" and rule.stack == "decoder"):
        return rule.stack
    if rule.stack in PLAIN or rule.stack == kind or stacks == {"decoder"}:
        return kind
    if rule.stack.startswith(f"{kind}-"):
        return rule.stack
    return f"{kind}-{rule.stack}"


def _with_distinct_stacks(rules: Sequence[AttentionRule]) -> Iterator[AttentionRule]:
    """The rules, with distinct names for stacks that would share a name."""
    places = [(rule.stack, rule.kind) for rule in rules]
    for rule, place in zip(rules, places, strict=True):
        if places.count(place) > 1 and rule.config:
            part = rule.config.split(".")[0].removesuffix("_config")
            yield replace(rule, stack=f"{part}-{rule.stack}" if part != rule.stack else part)
        else:
            yield rule


def find_family(checkpoint: Checkpoint, count_heads: bool = True) -> Family:
    """The family that knows the model type and its tensors' names, or a guessed one.

    Parameters
    ----------
    checkpoint
        Only its configuration and the names and shapes of its tensors are used.
    count_heads
        Whether the configuration has to tell a guess its numbers of heads.

    Raises
    ------
    UnknownFamily
        No family fits and none can be guessed, or the model's attention has no such form.
    """
    with errors_about(checkpoint.name):
        family = family_of_type(checkpoint.config.get("model_type"))
        if family and family.refusal:
            raise UnknownFamily(f"{family.name}: {family.refusal}")
        tensors = checkpoint.tensors()
        if family and any(prefixes(tensors, rule) for rule in family.attention):
            return (compose_family(checkpoint, family) or family) if family.with_parts else family
        composite = None if family else compose_family(checkpoint)
        if composite:
            return composite
        try:
            return infer_family(checkpoint, count_heads)
        except UnknownFamily:
            # The known family says best what its tensors should have been called.
            if family:
                return family
            raise


def with_head_counts(
    family: Family, checkpoint: Checkpoint, heads_per_layer: int | None, key_heads: int | None
) -> Family:
    """The family with these numbers of query and key heads where it does not know its own.

    A guess does not, nor does a family whose configuration leaves them out. Raises
    `CheckpointError` if a number is not needed.
    """
    given = {"heads_per_layer": heads_per_layer, "key_heads": key_heads}
    given = {key: number for key, number in given.items() if number is not None}
    rules = []
    for rule in family.attention if given else ():
        config = Config(checkpoint.config, rule.config, rule.defaults, rule.model_type)
        if rule.guess or config.told(*rule.heads) is None:
            rule = replace(
                rule,
                heads=("heads_per_layer", *rule.heads),
                key_heads=("key_heads", *rule.key_heads),
                defaults=rule.defaults | given,
            )
        rules.append(rule)
    if given and rules == list(family.attention):
        key, number = next(iter(given.items()))
        raise CheckpointError(
            f"family {family.name} knows the number of heads; "
            f"{key.replace('_', ' ')} are only for one that does not, got {number}; leave it out"
        )
    return replace(family, attention=tuple(rules)) if given else family
