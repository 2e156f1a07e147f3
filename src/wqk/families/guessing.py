"""Guessed families: attention of a model of unknown family, from the names of its tensors.

Queries and keys are two weights whose names differ only in ``q`` and ``k``, or one weight with the
name of a fused weight. Shapes and the configuration's numbers determine the remaining keys of a
rule. Each rule contains the confidence of the guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wqk.checkpoints import Checkpoint
from wqk.errors import UnknownFamily
from wqk.families.candidates import Candidate, Neighbors, candidates, neighbors_of
from wqk.families.composites import MODALITIES, WIDTHS
from wqk.families.model_types import hints_for_guesses, proven_version
from wqk.families.rules import HEAD_WIDTHS, AttentionRule, Family

# Keys for numbers of heads; the text before a key names a part of the model.
HEADS = re.compile(
    r"(?:(?P<part>\w+?)_)??(?:num_attention_heads|attention_heads|num_attn_heads|num_heads|n_heads?"
    r"|nheads?|heads?)"
)
# Words in keys for numbers of heads, but not of query heads.
NO_QUERIES = {"key", "kv", "value", "linear", "index", "mamba", "ssm", "query_group"}
KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
)
# Names of nested configurations that belong to the whole model.
WHOLE = {"model", "transformer", "attention", "attn", "args", "params", "model_args", "hparams"}
DEEPEST = 3  # nested configurations with numbers of heads

# Words of names by which attention is cross-attention.
CROSS = ("cross", "encoder_attn", "encdec", "enc_dec")
# The first and the second attention of a block, in diffusers and in PyTorch's own decoder.
FIRST_AND_SECOND = (("attn1", "attn2"), ("self_attn", "multihead_attn"))
STACKS = {
    "encoder": ("encoder", "enc"),
    "decoder": ("decoder", "dec"),
    "vision": ("vision", "visual", "image", "img", "pixel"),
    "audio": ("audio", "speech"),
    "text": ("text", "language"),
}


@dataclass(frozen=True)
class HeadCount:
    """A number of heads in a configuration.

    Attributes
    ----------
    path
        The nested configuration; empty for the whole configuration.
    part
        The word before the key: ``decoder`` of ``decoder_attention_heads``.
    key
        The key.
    config
        The configuration that contains the key.
    """

    path: str
    part: str
    key: str
    config: Mapping[str, Any]

    @property
    def words(self) -> list[str]:
        """Words that the name of a tensor must contain for this number of heads to apply."""
        nested = [name.removesuffix("_config") for name in self.path.split(".") if name]
        named = [name for name in nested if name not in WHOLE]
        part = hints_for_guesses()["parts"].get(self.part, self.part)
        return [*named, *filter(None, part.split("_"))]


@dataclass(frozen=True)
class FusedLayout:
    """The layout of queries, keys and values in a weight, and the doubt about the layout."""

    name: str
    doubt: str = ""


def infer_family(checkpoint: Checkpoint, count_heads: bool = True) -> Family:
    """Guess a family, ``inferred``, from the names of tensors.

    Parameters
    ----------
    checkpoint
        A checkpoint of unknown type, or with unexpected names of tensors.
    count_heads
        False if the numbers of heads are already known.

    Raises
    ------
    UnknownFamily
        No tensors have names of queries and keys of softmax attention, or the configuration lacks
        the number of heads.
    """
    tensors = checkpoint.tensors()
    all_candidates = candidates(tensors)
    # A single block has no number; next to numbered ones it is a pooling head.
    numbered = [candidate for candidate in all_candidates if "{layer}" in candidate.query]
    chosen = numbered or all_candidates
    neighbors = {candidate: neighbors_of(candidate, chosen, tensors) for candidate in chosen}
    softmax = [candidate for candidate in chosen if not neighbors[candidate].recurrent]
    if not softmax:
        raise _nothing_to_guess(checkpoint, chosen, neighbors)
    counts = list(_head_counts(checkpoint.config))
    offset = _gain_offset(checkpoint)
    rules = []
    for candidate in softmax:
        rule = _rule(candidate, neighbors[candidate], softmax, checkpoint.config, offset)
        if count_heads:
            count = _own_count(candidate, counts, softmax, rule["stack"])
            rule |= _numbers(candidate, rule["layout"], count)
        rules.append(AttentionRule(**rule))
    return Family(name="inferred", model_types=(), attention=tuple(rules))


def _nothing_to_guess(
    checkpoint: Checkpoint, chosen: list[Candidate], neighbors: Mapping[Candidate, Neighbors]
) -> UnknownFamily:
    """Return the error for a checkpoint without candidates of softmax attention."""
    if chosen:
        first = neighbors[chosen[0]].recurrent[0]
        return UnknownFamily(
            f"tensors named like queries and keys occur next to {first!r}: they go through a "
            "recurrence or a convolution, so their score is not a form of two tokens; if that is "
            "wrong, describe them in a family file (family=FILE.toml)"
        )
    model_type = checkpoint.config.get("model_type")
    problem = "it names no model type"
    if model_type:
        problem = f"no family knows the model type {model_type!r}"
    return UnknownFamily(
        f"{problem}, and none of its {len(checkpoint.tensors())} tensors has a query's name next "
        "to a key; describe them in a family file (family=FILE.toml)"
    )


def _rule(
    candidate: Candidate,
    neighbors: Neighbors,
    others: Sequence[Candidate],
    config: Mapping[str, Any],
    offset: float,
) -> dict[str, Any]:
    """Return the keys of a candidate's rule, without the numbers of heads."""
    stack, kind = _role(candidate, others, config)
    layout = _layout(candidate, config)
    partial = _unexplained(candidate, neighbors, config)
    confidence = "high"
    if partial:
        confidence = "low"
    elif layout.doubt:
        confidence = "medium"
    reason = f": {layout.doubt}" if layout.doubt else ""
    names = {
        "query_norm": neighbors.query_norm,
        "key_norm": neighbors.key_norm,
    }
    if candidate.query == candidate.key:
        names["fused"] = candidate.query
    else:
        names |= {"query": candidate.query, "key": candidate.key, "value": candidate.value}
    return {
        "stack": stack,
        "kind": kind,
        "layout": layout.name,
        "every_layer": False,
        "norm": "layer" if neighbors.has_bias else "rms",
        "norm_offset": offset if neighbors.query_norm else 0.0,
        "note": _age(config),
        "partial": partial,
        "guess": f"guessed from the tensors' names ({candidate.query}), confidence "
        f"{confidence}{reason}",
        "key_heads": KEY_HEADS,
        **{role: (name,) for role, name in names.items() if name},
    }


def _gain_offset(checkpoint: Checkpoint) -> float:
    """Return 1 if gains are stored as their difference from 1, by names of tensors and by type."""
    model_type = str(checkpoint.config.get("model_type", "")).lower()
    for hint in hints_for_guesses()["gains"]:
        is_excepted = model_type.startswith(tuple(hint["except_types"]))
        if not is_excepted and any(hint["name"] in name for name in checkpoint.tensors()):
            return float(hint["offset"])
    return 0.0


def _age(config: Mapping[str, Any]) -> str:
    """Return a clause on the missing family, with versions if transformers wrote the model."""
    if "transformers_version" not in config:
        return "no family describes this type"
    proven = proven_version()
    written = config.get("transformers_version")
    clause = f"families were proven against transformers {proven}"
    if isinstance(written, str) and _release(written) > _release(proven):
        return f"this type is newer than the families: {written} wrote the file, and {clause}"
    return f"no family describes this type; {clause}"


def _release(version: str) -> tuple[int, ...]:
    """Return a version as numbers, for comparison: (5, 23, 0) for ``5.23.0.dev0``."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _unexplained(candidate: Candidate, neighbors: Neighbors, config: Mapping[str, Any]) -> str:
    """Return a clause on unexplained parts of the score; empty if all parts are explained."""
    if neighbors.unexplained:
        named = ", ".join(f"{candidate.path}.{name}" for name in neighbors.unexplained[:3])
        return f"what {named} does to the score is not known"
    if neighbors.query_norm or neighbors.key_norm:
        return ""
    switch = next((key for key in config if re.search("q_?k_?(layer_?)?norm", key)), None)
    if switch and config[switch]:
        return f"the configuration's {switch} asks for norms that have no tensors"
    return ""


def _layout(candidate: Candidate, config: Mapping[str, Any]) -> FusedLayout:
    """Return the layout of queries, keys and values in the weight of a candidate."""
    if candidate.layout == "separate":
        return FusedLayout("separate")
    rows, columns = candidate.shape
    model_type = str(config.get("model_type", "")).lower()
    layout = candidate.layout
    for start, layout_of_type in hints_for_guesses()["layouts"].items():
        if model_type.startswith(start):
            layout = layout_of_type
            break
    if layout == "sectioned" and columns == 3 * rows:
        doubt = f"{candidate.module} is taken to be stored (in, out), all queries first"
        return FusedLayout("conv1d", doubt)
    order = "key heads one after the other"
    if layout == "sectioned":
        order = "all queries first"
    return FusedLayout(layout, f"{candidate.module} is taken to hold {order}")


def _role(
    candidate: Candidate, others: Sequence[Candidate], config: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the stack and the kind of attention, from the modules in the query's name."""
    modules = candidate.query.lower().split(".")
    kind = "cross" if _is_cross(candidate, others, modules) else "self"
    for stack, stack_words in STACKS.items():
        if any(_is_or_begins_with(module, stack_words) for module in modules):
            return stack, kind
    stack = "decoder" if _is_causal_by_names(config) else "unknown"
    return stack, kind


def _is_causal_by_names(config: Mapping[str, Any]) -> bool:
    """Return whether a model's classes or type have the names of a decoder."""
    architectures = config.get("architectures")
    classes = ""
    if isinstance(architectures, list):
        classes = " ".join(map(str, architectures))
    return "CausalLM" in classes or "gpt" in str(config.get("model_type", "")).lower()


def _is_cross(candidate: Candidate, others: Sequence[Candidate], modules: list[str]) -> bool:
    """Return whether the keys of a candidate read other vectors than the queries.

    ``modules`` are the modules in the query's name, in lower case.
    """
    if any(module.startswith(CROSS) for module in modules):
        return True
    if candidate.shape[1] != candidate.key_shape[1]:
        return True
    for first, second in FIRST_AND_SECOND:
        has_first = any(f".{first}." in other.query for other in others)
        if second in modules and has_first:
            return True
    return False


def _is_or_begins_with(word: str, names: Sequence[str]) -> bool:
    """Return whether a word is one of the names, or begins with a name and an underscore."""
    return any(word == name or word.startswith(f"{name}_") for name in names)


def _head_counts(config: Mapping[str, Any], path: str = "") -> Iterator[HeadCount]:
    """Yield all numbers of heads in a configuration and its nested configurations."""
    for key, value in config.items():
        if isinstance(value, dict):
            if path.count(".") < DEEPEST:
                yield from _head_counts(value, f"{path}.{key}" if path else key)
            continue
        is_name = isinstance(key, str) and key not in HEAD_WIDTHS
        match = HEADS.fullmatch(key) if is_name else None
        if match is None or value is None or isinstance(value, str | bool):
            continue
        part = match["part"] or ""
        if not any(f"_{word}_" in f"_{part}_" for word in NO_QUERIES):
            yield HeadCount(path, part, key, config)


def _own_count(
    candidate: Candidate,
    counts: Sequence[HeadCount],
    others: Sequence[Candidate],
    stack: str,
) -> HeadCount:
    """Return the number of heads of a candidate.

    If the path of a number contains words, the number belongs to a part of the model, and the
    candidate's name must contain these words. Among several numbers, the number with most words is
    chosen.

    Parameters
    ----------
    candidate, others
        The candidate, and all candidates.
    counts
        All numbers of heads in the configuration.
    stack
        The candidate's stack.

    Raises
    ------
    UnknownFamily
        Only other parts of the model have a number of heads.
    """
    names: list[str] = []
    for module in candidate.query.lower().split("."):
        names += [module, *module.split("_")]

    def is_named(word: str) -> bool:
        synonyms = STACKS.get(word, (word,))
        return any(name.startswith(synonyms) for name in names)

    is_tower = stack in MODALITIES and not _all_have_a_word(others, STACKS[stack])
    suitable = []
    for count in counts:
        if count.words:
            is_suitable = all(map(is_named, count.words))
        else:
            is_suitable = not is_tower and not _has_other_width(candidate, count)
        if is_suitable:
            suitable.append(count)
    if not suitable:
        place = f" of {candidate.path}" if counts else ""
        raise UnknownFamily(
            f"the configuration does not give the number of heads{place}, and shapes alone "
            "do not determine it; give it with wqk.open(ref, heads_per_layer=N), or with "
            "--heads-per-layer N"
        )
    return max(suitable, key=lambda count: len(count.words))


def _all_have_a_word(others: Sequence[Candidate], words: Sequence[str]) -> bool:
    """Return whether the names of all candidates have one of these words."""
    for candidate in others:
        name = candidate.query.lower()
        if not any(word in name for word in words):
            return False
    return True


def _has_other_width(candidate: Candidate, count: HeadCount) -> bool:
    """Return whether a configuration's width differs from the width of the candidate's inputs."""
    width = next((count.config[key] for key in WIDTHS if key in count.config), None)
    heads = count.config[count.key]
    return isinstance(width, int) and isinstance(heads, int) and width not in candidate.shape


def _numbers(candidate: Candidate, layout: str, count: HeadCount) -> dict[str, Any]:
    """Return the rule's keys for the numbers of heads, and the configuration with these numbers."""
    prefix = f"{count.part}_" if count.part else ""
    key_names = [f"{prefix}{key}" for key in KEY_HEADS]
    defaults: dict[str, Any] = {}
    heads = count.config[count.key]
    if isinstance(heads, int) and heads > 0:
        width = _head_width(candidate, layout, heads, count)
        counts_key_heads = any(count.config.get(key) for key in key_names)
        if layout == "sectioned" and width and not counts_key_heads:
            key_heads = _key_heads_of_rows(candidate.shape[0], heads, width)
            if key_heads is not None:
                defaults = {"key_heads": key_heads}
    return {
        "heads": (count.key,),
        "key_heads": (*key_names, "key_heads"),
        "config": count.path,
        "defaults": defaults,
    }


def _key_heads_of_rows(rows: int, heads: int, width: int) -> int | None:
    """Return the number of key heads in a sectioned weight; None if the rows do not fit.

    Examples
    --------
    >>> _key_heads_of_rows(rows=64 + 2 * 16, heads=8, width=8)
    2
    """
    key_and_value_rows = rows - heads * width
    key_heads, remainder = divmod(key_and_value_rows, 2 * width)
    if key_and_value_rows <= 0 or remainder or heads % key_heads:
        return None
    return key_heads


def _head_width(candidate: Candidate, layout: str, heads: int, count: HeadCount) -> int | None:
    """Return the configured width of a head, or else the rows divided by the number of heads.

    Raises
    ------
    UnknownFamily
        The queries contain more rows than heads of the configured width, such as a gate.
    """
    key = next((k for k in HEAD_WIDTHS if isinstance(count.config.get(k), int)), None)
    outputs, inputs = candidate.shape
    if key is None or count.part:
        return inputs // heads if inputs % heads == 0 else None
    width: int = count.config[key]
    if layout == "separate" and outputs != heads * width:
        raise UnknownFamily(
            f"{candidate.query} has {outputs} outputs, which is not {heads} "
            f"heads of the configured width {width} ({key}): it contains more than queries; "
            "describe it in a family file (family=FILE.toml)"
        )
    return width
