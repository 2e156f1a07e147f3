"""Which family describes a checkpoint: a known one; of a composite model, each part's; or a guess.

Composite are a language model with a vision tower, or an encoder with its own decoder. A part is a
model. Its nested configuration gives its model type, hence its family, and its numbers; its tensors
share a prefix. The family's rules apply unchanged, with that prefix and configuration.

A model that no family knows gets one that is guessed from its tensors' names. Queries and keys are
siblings: two weights whose names differ only in ``q`` and ``k``, or one weight whose name says that
it holds both. Shapes and the configuration's counts decide the rest. The rules say how sure the
guess is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from wqk.checkpoints import Checkpoint, TensorInfo
from wqk.errors import CheckpointError, UnknownFamily, errors_about
from wqk.families.config import Config, part_types, proven_version
from wqk.families.family import (
    AttentionRule,
    Family,
    family_of_type,
)
from wqk.families.naming import Candidate, Neighbors, candidates, neighbors_of, prefixes

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
WIDTHS = ("hidden_size", "d_model", "n_embd", "n_state", "embed_dim", "encoder_hidden_size")
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


# Keys under which configurations count heads; what precedes them is a part of the model.
HEADS = re.compile(
    r"(?:(?P<part>\w+?)_)??(?:num_attention_heads|attention_heads|num_attn_heads|num_heads|n_heads?"
    r"|nheads?|heads?)"
)
NO_QUERIES = {"key", "kv", "value", "linear", "index", "mamba", "ssm", "query_group"}
KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
)
HEAD_WIDTHS = ("head_dim", "d_kv", "kv_channels", "d_head")
# Names of nested configurations that belong to the whole model.
WHOLE = {"model", "transformer", "attention", "attn", "args", "params", "model_args", "hparams"}

# Models whose fused weight has another layout than its name suggests.
LAYOUTS = {
    "chatglm": "sectioned",
    "bailing": "sectioned",
    "ling": "sectioned",
    "internlm2": "grouped",
}

CROSS = ("cross", "encoder_attn", "encdec", "enc_dec")
STACKS = {
    "encoder": ("encoder", "enc"),
    "decoder": ("decoder", "dec"),
    "vision": ("vision", "visual", "image", "img", "pixel"),
    "audio": ("audio", "speech"),
    "text": ("text", "language"),
}


@dataclass(frozen=True)
class HeadCount:
    """Where a configuration counts heads, and of which part of the model."""

    path: str  # the nested configuration; empty for the whole
    part: str  # what stands before the key: decoder of decoder_attention_heads
    key: str
    config: Mapping[str, Any]

    @property
    def words(self) -> list[str]:
        """What a tensor's name has to mention for this to be its number of heads."""
        nested = [name.removesuffix("_config") for name in self.path.split(".") if name]
        named = [name for name in nested if name not in WHOLE]
        # Whisper's own files: n_audio_head, n_text_head.
        part = {"n_audio": "encoder", "n_text": "decoder"}.get(self.part, self.part)
        return [*named, *(word for word in part.split("_") if word)]


def infer_family(checkpoint: Checkpoint, count_heads: bool = True) -> Family:
    """A family, ``inferred``, for a checkpoint of unknown type, or with tensors of other names.

    ``count_heads`` is false if the numbers of heads are known from elsewhere. Raises
    `UnknownFamily` if no two tensors look like queries and keys of softmax attention, or if the
    configuration does not count their heads.
    """
    tensors = checkpoint.tensors()
    named = candidates(tensors)
    # A single block has no number; next to numbered ones it is a pooling head.
    found = [c for c in named if "{layer}" in c.query] or named
    around = {c: neighbors_of(c, found, tensors) for c in found}
    if found and all(neighbors.recurrent for neighbors in around.values()):
        first = next(iter(around.values())).recurrent[0]
        raise UnknownFamily(
            f"tensors named like queries and keys occur next to {first!r}: they go through a "
            "recurrence or a convolution, so their score is not a form of two tokens"
        )
    softmax = [c for c in found if not around[c].recurrent]
    if not softmax:
        kind = checkpoint.config.get("model_type")
        known = f"no family knows the model type {kind!r}" if kind else "it names no model type"
        raise UnknownFamily(
            f"{known}, and none of its {len(tensors)} tensors has a query's name next to a key; "
            "describe them in a family file (family=FILE.toml)"
        )
    counts = list(_head_counts(checkpoint.config))
    offset = _gain_offset(checkpoint)
    rules = []
    for candidate in softmax:
        stack, kind = _role(candidate, softmax, checkpoint.config)
        layout, doubt = _layout(candidate, checkpoint.config)
        partial = _unexplained(candidate, around[candidate], checkpoint.config)
        numbers: dict[str, Any] = {"key_heads": KEY_HEADS}
        if count_heads:
            count = _own_count(candidate, counts, softmax, stack)
            numbers = _numbers(candidate, layout, count)
        confidence = "low" if partial else "medium" if doubt else "high"
        reason = f": {doubt}" if doubt else ""
        rules.append(
            AttentionRule(
                stack=stack,
                kind=kind,
                layout=layout,
                every_layer=False,
                norm="layer" if around[candidate].has_bias else "rms",
                norm_offset=offset if around[candidate].query_norm else 0.0,
                note=_age(checkpoint.config),
                partial=partial,
                guess=f"guessed from the tensors' names ({candidate.query}), confidence "
                f"{confidence}{reason}",
                **_names(candidate, around[candidate]),
                **numbers,
            )
        )
    return Family(name="inferred", model_types=(), attention=tuple(rules))


def _gain_offset(checkpoint: Checkpoint) -> float:
    """Return 1 if the names of tensors are Gemma 2's or 3's, which store gains minus 1.

    Gemma 4 has the same names and stores the gains themselves.
    """
    model_type = str(checkpoint.config.get("model_type", "")).lower()
    has_names = any("pre_feedforward_layernorm" in name for name in checkpoint.tensors())
    return 1.0 if has_names and not model_type.startswith("gemma4") else 0.0


def _age(config: Mapping[str, Any]) -> str:
    """Return a clause on the version of transformers that the families were proven against."""
    proven = proven_version()
    written = config.get("transformers_version")
    clause = f"families were proven against transformers {proven}"
    if isinstance(written, str) and _release(written) > _release(proven):
        return f"this type is newer than the families: {written} wrote the file, and {clause}"
    return clause


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparison: (5, 23, 0) of ``5.23.0.dev0``."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _names(candidate: Candidate, around: Neighbors) -> dict[str, Any]:
    """The rule's names of tensors."""
    norms = {"query_norm": around.query_norm, "key_norm": around.key_norm}
    if candidate.query == candidate.key:
        weights = {"fused": candidate.query}
    else:
        weights = {"query": candidate.query, "key": candidate.key, "value": candidate.value}
    return {role: (name,) for role, name in (weights | norms).items() if name}


def _unexplained(candidate: Candidate, around: Neighbors, config: Mapping[str, Any]) -> str:
    """What of the score is not understood; empty if all is."""
    if around.unexplained:
        named = ", ".join(f"{candidate.path}.{name}" for name in around.unexplained[:3])
        return f"what {named} does to the score is not known"
    if not (around.query_norm or around.key_norm):
        switch = next((key for key in config if re.search("q_?k_?(layer_?)?norm", key)), None)
        if switch and config[switch]:
            return f"the configuration's {switch} asks for norms that have no tensors"
    return ""


def _layout(candidate: Candidate, config: Mapping[str, Any]) -> tuple[str, str]:
    """The layout of queries, keys and values in the weight, and what is doubtful about it."""
    if candidate.layout == "separate":
        return "separate", ""
    rows, columns = candidate.shape
    model_type = str(config.get("model_type", "")).lower()
    layout = next((v for k, v in LAYOUTS.items() if model_type.startswith(k)), candidate.layout)
    if layout == "sectioned" and columns == 3 * rows:
        return "conv1d", f"{candidate.module} is taken to be stored (in, out), all queries first"
    order = "all queries first" if layout == "sectioned" else "key heads one after the other"
    return layout, f"{candidate.module} is taken to hold {order}"


def _role(
    candidate: Candidate, others: Sequence[Candidate], config: Mapping[str, Any]
) -> tuple[str, str]:
    """Stack and kind of attention, from the words of a name."""
    words = candidate.query.lower().split(".")
    # The second attention of a block, in diffusers and in PyTorch's own decoder.
    second = any(
        name in words and any(f".{first}." in other.query for other in others)
        for first, name in (("attn1", "attn2"), ("self_attn", "multihead_attn"))
    )
    crosses = second or any(word.startswith(CROSS) for word in words)
    kind = "cross" if crosses or candidate.shape[1] != candidate.key_shape[1] else "self"
    for stack, names in STACKS.items():
        if any(word == name or word.startswith(f"{name}_") for word in words for name in names):
            return stack, kind
    architectures = config.get("architectures")
    named = " ".join(map(str, architectures)) if isinstance(architectures, list) else ""
    causal = "CausalLM" in named or "gpt" in str(config.get("model_type", "")).lower()
    return ("decoder" if causal else "unknown"), kind


def _head_counts(config: Mapping[str, Any], path: str = "") -> Iterator[HeadCount]:
    """Every number of heads in a configuration and in the configurations within."""
    for key, value in config.items():
        is_count = isinstance(key, str) and key not in HEAD_WIDTHS
        match = HEADS.fullmatch(key) if is_count else None
        if isinstance(value, dict) and path.count(".") < 3:
            yield from _head_counts(value, f"{path}.{key}" if path else key)
        elif match and value is not None and not isinstance(value, str | bool | dict):
            part = match["part"] or ""
            if not any(word in f"_{part}_" for word in (f"_{no}_" for no in NO_QUERIES)):
                yield HeadCount(path, part, key, config)


def _own_count(
    candidate: Candidate,
    counts: Sequence[HeadCount],
    others: Sequence[Candidate],
    stack: str,
) -> HeadCount:
    """The candidate's number of heads; an error if only other parts of the model have one."""
    named = [
        word for part in candidate.query.lower().split(".") for word in (part, *part.split("_"))
    ]

    def is_named(word: str) -> bool:
        synonyms = STACKS.get(word, (word,))
        return any(name.startswith(synonyms) for name in named)

    fitting = [count for count in counts if all(map(is_named, count.words))]
    modality = stack if stack in MODALITIES else ""
    is_one_of_many = (
        any(not any(name in other.query.lower() for name in STACKS[modality]) for other in others)
        if modality
        else False
    )
    suitable = [
        count
        for count in fitting
        if count.words or not (is_one_of_many or _is_other(candidate, count))
    ]
    if not suitable:
        of = f" of {candidate.path}" if counts else ""
        raise UnknownFamily(
            f"the configuration does not give the number of heads{of}, and shapes alone "
            "do not determine it; give it with wqk.open(ref, heads_per_layer=N), or with "
            "--heads-per-layer N"
        )
    return max(suitable, key=lambda count: len(count.words))


def _is_other(candidate: Candidate, count: HeadCount) -> bool:
    """Whether a configuration's width is not that of the candidate's inputs."""
    width = next((count.config[key] for key in WIDTHS if key in count.config), None)
    counted = count.config[count.key]
    return isinstance(width, int) and isinstance(counted, int) and width not in candidate.shape


def _numbers(candidate: Candidate, layout: str, count: HeadCount) -> dict[str, Any]:
    """The rule's keys for the numbers of heads, and the part of the model that counts them."""
    names = [f"{count.part}_{key}" for key in KEY_HEADS] if count.part else list(KEY_HEADS)
    defaults: dict[str, Any] = {}
    heads = count.config[count.key]
    if isinstance(heads, int) and heads > 0:
        width = _head_width(candidate, layout, heads, count)
        if layout == "sectioned" and width and not any(count.config.get(key) for key in names):
            rest = candidate.shape[0] - heads * width
            if rest > 0 and rest % (2 * width) == 0 and heads % (rest // (2 * width)) == 0:
                defaults = {"key_heads": rest // (2 * width)}
    keys = {"heads": (count.key,), "key_heads": (*names, "key_heads")}
    return {**keys, "config": count.path, "defaults": defaults}


def _head_width(candidate: Candidate, layout: str, heads: int, count: HeadCount) -> int | None:
    """The configured width of a head; an error if the queries hold more, such as a gate."""
    key = next((k for k in HEAD_WIDTHS if isinstance(count.config.get(k), int)), None)
    if key is None or count.part:
        return candidate.shape[1] // heads if candidate.shape[1] % heads == 0 else None
    width: int = count.config[key]
    if layout == "separate" and candidate.shape[0] != heads * width:
        raise UnknownFamily(
            f"{candidate.query} has {candidate.shape[0]} outputs, which is not {heads} "
            f"heads of the configured width {width} ({key}): it contains more than queries"
        )
    return width
