"""A family guessed from tensor names, for models that no family knows.

Queries and keys are siblings: two weights whose names differ only in ``q`` and ``k``, or one weight
whose name says that it holds both. Shapes and the configuration's counts decide the rest. The rules
say how sure the guess is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wqk.checkpoints import Checkpoint
from wqk.errors import UnknownFamily
from wqk.families.candidates import Candidate, Neighbors, candidates, neighbors_of
from wqk.families.family import AttentionRule, Family

# Keys under which configurations count heads; what precedes them is a part of the model.
HEADS = re.compile(
    r"(?:(?P<part>\w+?)_)??(?:num_attention_heads|attention_heads|num_attn_heads|num_heads|n_heads?"
    r"|nheads?|heads?)"
)
NO_QUERIES = {"key", "kv", "value", "linear", "index", "mamba", "ssm", "query_group"}
KEY_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "multi_query_group_num",
)  # fmt: skip
HEAD_WIDTHS = ("head_dim", "d_kv", "kv_channels", "d_head")
WIDTHS = ("hidden_size", "d_model", "n_embd", "n_state", "embed_dim")
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
MODALITIES = ("vision", "audio", "text")


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
                partial=partial,
                guess=f"guessed from the tensors' names ({candidate.query}), confidence "
                f"{confidence}{reason}",
                **_names(candidate, around[candidate]),
                **numbers,
            )
        )
    return Family(name="inferred", model_types=(), attention=tuple(rules))


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
            "do not determine it; give it with heads_per_layer=N"
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
