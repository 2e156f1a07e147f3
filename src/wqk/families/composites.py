"""Families of composite models: a language model with a vision tower, an encoder with a decoder.

A part of a composite is a model. The nested configuration of the part has numbers and a model type,
and therefore a family; the tensors of the part share a prefix. The rules of the family apply
unchanged, with this prefix and configuration.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.checkpoint import Tensors
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families.family import family_of_type
from wqk.families.model_types import part_types
from wqk.families.rules import AttentionRule, Family
from wqk.families.spellings import prefixes

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
# Stacks with the name of their part.
NAMED_AS_PART = {"encoder", "unknown", *MODALITIES}
# Keys of the width of the inputs, and of the number of layers.
WIDTHS = ("hidden_size", "d_model", "n_embd", "n_state", "embed_dim", "encoder_hidden_size")
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "depth")


@dataclass(frozen=True)
class ModelComponent:
    """A part of a composite model.

    Attributes
    ----------
    path
        Path of the configuration: ``thinker_config.text_config``; empty for the keys of the whole
        model.
    config
        The configuration of the part.
    family
        The family of the part's type.
    model_type
        The model type of the part.
    """

    path: str
    config: Mapping[str, Any]
    family: Family
    model_type: str

    @property
    def words(self) -> tuple[str, ...]:
        """The stacks in the path, modalities first."""
        names = re.split(r"[._]", self.path.lower())
        return tuple(kind for kind in WORDS if _any_starts_with(names, WORDS[kind]))

    @property
    def name(self) -> str:
        """Name of the part in its configuration: ``text`` of ``thinker_config.text_config``."""
        return self.path.rpartition(".")[2].removesuffix("_config")

    @property
    def modalities(self) -> list[str]:
        """The modalities in the path."""
        return [kind for kind in MODALITIES if kind in self.words]

    def prefixes(self, tensors: Tensors) -> Iterator[str]:
        """Yield the prefixes under which the rules of the family match tensors."""
        for rule in self.family.attention:
            yield from prefixes(tensors, rule)

    def queries(self, tensors: Tensors, prefix: str) -> list[str]:
        """Return the query weights that the rules of the family match under a prefix."""
        names: list[str] = []
        for rule in self.family.attention:
            names += prefixes(tensors, rule).get(prefix, ())
        return names


def _any_starts_with(names: Sequence[str], words: tuple[str, ...]) -> bool:
    """Return whether any of the names begins with any of the words."""
    return any(name.startswith(words) for name in names)


def compose_family(checkpoint: Checkpoint, beside: Family | None = None) -> Family | None:
    """Return the family of a composite model; None if the configuration names no type of a part.

    Parameters
    ----------
    checkpoint
        The composite model.
    beside
        Attention that the model has in addition to the attention of its parts.

    Raises
    ------
    CheckpointError
        Tensors of a part occur more than once, and cannot be distinguished.
    UnknownFamily
        The attention of a part is not one form per head.
    """
    tensors = checkpoint.tensors()
    rules = list(beside.attention) if beside else []
    names = [beside.name] if beside else []
    taken: set[str] = set()
    components = list(_components(checkpoint.config, checkpoint.config.get("model_type")))
    for component in sorted(components, key=lambda component: _priority(component, tensors)):
        if component.family.refusal:
            raise UnknownFamily(f"{component.path}: {component.family.refusal}")
        for prefix in _own_prefixes(tensors, component, taken):
            taken.add(prefix)
            rules += _rules_under(prefix, component, tensors)
            names.append(component.family.name)
    if not rules:
        return None
    return Family(
        name=" + ".join(dict.fromkeys(names)),
        model_types=(),
        attention=tuple(_with_distinct_stacks(rules)),
    )


def _priority(component: ModelComponent, tensors: Tensors) -> tuple[bool, bool]:
    """Return a sort key of parts; parts that are identified by names take their tensors first."""
    is_plain = component.words[:1] in ((), ("text",), ("decoder",))
    is_named = any(
        _has_first_word(prefix, component, tensors) for prefix in component.prefixes(tensors)
    )
    return is_plain, not is_named


def _rules_under(prefix: str, component: ModelComponent, tensors: Tensors) -> list[AttentionRule]:
    """Return the rules of a part that match tensors under a prefix, as rules of the whole model."""
    matching = [rule for rule in component.family.attention if prefix in prefixes(tensors, rule)]
    stacks = {rule.stack for rule in matching}
    return [
        replace(
            rule,
            prefix=prefix,
            config=".".join(filter(None, (component.path, rule.config))),
            stack=_stack(component, rule, stacks),
            model_type=component.model_type,
        )
        for rule in matching
    ]


def _components(
    config: Mapping[str, Any], model_type: object, path: str = ""
) -> Iterator[ModelComponent]:
    """Yield the parts of known families, including parts of parts."""
    types = part_types(model_type)
    for key in dict.fromkeys([*config, *types]):
        value = config.get(key)
        place = f"{path}.{key}" if path else key
        if value is None and key in types and "text" in key:
            # Older files hold the text's keys next to the parts.
            value, place = config, path
        if not isinstance(value, dict):
            continue
        stored_type = value.get("model_type") if value is not config else None
        possible_types = [t for t in (stored_type, types.get(key)) if isinstance(t, str)]
        known_type = next(filter(family_of_type, possible_types), None)
        family = family_of_type(known_type)
        if known_type and family:
            yield ModelComponent(place, value, family, known_type)
        if value is not config and (family is None or family.with_parts):
            yield from _components(value, possible_types[0] if possible_types else None, place)


def _own_prefixes(tensors: Tensors, component: ModelComponent, taken: set[str]) -> list[str]:
    """Return the prefixes of a part's tensors.

    The result has several prefixes if several modules with the name of the part share its
    configuration.
    """
    candidates = {
        prefix
        for prefix in component.prefixes(tensors)
        if prefix not in taken and not _names_another_modality(prefix, component)
    }
    for fits in CRITERIA:
        if len(candidates) > 1:
            fitting = {prefix for prefix in candidates if fits(prefix, component, tensors)}
            candidates = fitting or candidates
    ordered = sorted(candidates)
    are_named = all(_names_configuration(prefix, component, tensors) for prefix in ordered)
    if len(ordered) > 1 and not are_named:
        raise CheckpointError(
            f"the tensors of {component.path} may be under {ordered[0]!r} or {ordered[1]!r}; "
            "expected one place; name it in a family file (family=FILE.toml)"
        )
    return ordered


def _words_of(prefix: str) -> list[str]:
    """Return the words of a prefix in lower case: the modules, and their parts."""
    return re.split(r"[._]", prefix.lower())


def _names_another_modality(prefix: str, component: ModelComponent) -> bool:
    """Return whether a prefix names another modality than the part's."""
    modalities = component.modalities
    if not modalities or _names_modality(prefix, component, {}):
        return False
    foreign: list[str] = []
    for kind in MODALITIES:
        if kind not in modalities:
            foreign += WORDS[kind]
    familiar = WORDS[modalities[0]]
    return any(
        word.startswith(tuple(foreign)) and not word.startswith(familiar)
        for word in _words_of(prefix)
    )


def _names_configuration(prefix: str, component: ModelComponent, tensors: Tensors) -> bool:
    """Return whether a prefix has the name of the configuration, as in ``geometry_encoder``."""
    name = component.name
    return any(word == name or word.startswith(f"{name}_") for word in prefix.split("."))


def _has_first_word(prefix: str, component: ModelComponent, tensors: Tensors) -> bool:
    """Return whether a word begins as the part's name: ``patch_encoder`` for ``patch_config``."""
    first = component.path.rpartition(".")[2].split("_")[0]
    return any(word.split("_")[0] == first for word in prefix.split("."))


def _names_modality(prefix: str, component: ModelComponent, tensors: Tensors) -> bool:
    """Return whether a prefix has a word for one of the part's stacks."""
    stack_words: list[str] = []
    for kind in component.words:
        stack_words += WORDS[kind]
    return bool(stack_words) and _any_starts_with(_words_of(prefix), tuple(stack_words))


def _has_width(prefix: str, component: ModelComponent, tensors: Tensors) -> bool:
    """Return whether a query weight under the prefix has the configured width."""
    width = _first_value(component.config, WIDTHS)
    return any(width in tensors[name].shape for name in component.queries(tensors, prefix))


def _has_depth(prefix: str, component: ModelComponent, tensors: Tensors) -> bool:
    """Return whether the query weights under the prefix are as many as the configured layers."""
    depth = _first_value(component.config, DEPTHS)
    return bool(len(component.queries(tensors, prefix)) == depth)


def _first_value(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """Return the value of the first of these keys that a configuration has; else None."""
    return next((config[key] for key in keys if key in config), None)


# Properties that distinguish prefixes, tried in this order while there are several.
CRITERIA: tuple[Callable[[str, ModelComponent, Tensors], bool], ...] = (
    _names_configuration,
    _has_first_word,
    _names_modality,
    _has_width,
    _has_depth,
)


def _stack(component: ModelComponent, rule: AttentionRule, stacks: set[str]) -> str:
    """Return the name of a part's stack in the whole model; ``stacks`` are the part's stacks."""
    kind = component.words[0] if component.words else component.name
    if not kind or (kind == "text" and rule.stack == "decoder"):
        return rule.stack
    if rule.stack in NAMED_AS_PART or rule.stack == kind or stacks == {"decoder"}:
        return kind
    if rule.stack.startswith(f"{kind}-"):
        return rule.stack
    return f"{kind}-{rule.stack}"


def _with_distinct_stacks(rules: Sequence[AttentionRule]) -> Iterator[AttentionRule]:
    """Yield the rules; stacks with equal names get distinct names."""
    places = [(rule.stack, rule.kind) for rule in rules]
    for rule, place in zip(rules, places, strict=True):
        if places.count(place) == 1 or not rule.config:
            yield rule
            continue
        part = rule.config.split(".")[0].removesuffix("_config")
        yield replace(rule, stack=part if part == rule.stack else f"{part}-{rule.stack}")
