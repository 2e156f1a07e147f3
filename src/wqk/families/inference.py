"""A family made up from tensor names, for models that no family knows.

Queries and keys are siblings: two weights whose names differ only in ``q`` and ``k``, or one weight
whose name says that it holds both. The shapes and whatever counts the configuration gives decide
the rest. All of it is a guess, and the rules say how good a one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from wqk.errors import UnknownFamily
from wqk.families.config import Config
from wqk.families.family import AttentionRule, CountsRule, Family, SideRule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wqk.checkpoints import Checkpoint, TensorInfo

# A module's own name, where it holds queries: q_proj, query, Wq, to_q, q_lin, attn_q, ...
QUERY = re.compile(r"(?P<before>|.*_|[wW])(?P<role>queries|query|q|Q)(?P<after>|_.*)")
KEY_OF = {"queries": "keys", "query": "key", "q": "k", "Q": "K"}
VALUE_OF = {"queries": "values", "query": "value", "q": "v", "Q": "V"}

# Modules that hold queries, keys and values together, and how these usually lie.
FUSED = {
    r"(?:[wW]_?|to_|attn_|in_)?qkv(?:_.*)?": "sectioned",
    r"c_attn|in_proj(?:_weight)?|W_pack": "sectioned",
    r"query_key_value": "grouped",
}

# Keys under which configurations count heads.
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "heads", "nhead",
    "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
STACK_HEADS = {"encoder": ("n_audio_head",), "decoder": ("n_text_head",)}
KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
)

CROSS = ("cross", "encoder_attn", "encdec", "enc_dec")
STACKS = {
    "encoder": ("encoder", "enc"),
    "decoder": ("decoder", "dec"),
    "vision": ("vision", "visual", "image"),
    "audio": ("audio", "speech"),
    "text": ("text", "language"),
}


def infer_family(checkpoint: Checkpoint, heads_per_layer: int | None = None) -> Family:
    """A family for a checkpoint of unknown type or with foreign names.

    Parameters
    ----------
    checkpoint
        Only names, shapes and the configuration are looked at.
    heads_per_layer
        Number of query heads, where the configuration does not tell.

    Returns
    -------
    Family
        Named ``inferred``; its rules say how they came about and how sure they are.

    Raises
    ------
    UnknownFamily
        No two tensors look like queries and keys, or the number of heads is nowhere told.
    """
    rules = tuple(_rules(checkpoint, heads_per_layer))
    if not rules:
        told = checkpoint.config.get("model_type")
        raise UnknownFamily(
            f"{checkpoint.name}: no family knows the model type {told!r}, and none of its "
            f"{len(checkpoint.tensors())} tensors is named like a query beside a key; name them "
            "with a family file (--family FILE.toml)"
        )
    return Family(name="inferred", model_types=(), attention=rules)


def _rules(checkpoint: Checkpoint, heads: int | None) -> Iterator[AttentionRule]:
    """One for each spelling, layers' numbers taken out."""
    spellings: dict[str, TensorInfo] = {}
    for name, info in checkpoint.tensors().items():
        stem = name.removesuffix(".weight")
        if len(info.shape) == 2 and (stem != name or name.endswith("_weight")):
            spellings.setdefault(_without_numbers(stem), info)
    for spelling, info in spellings.items():
        path, _, module = spelling.rpartition(".")
        layout = next((kind for name, kind in FUSED.items() if re.fullmatch(name, module)), None)
        match = QUERY.fullmatch(module)
        roles: dict[str, Any]
        if "{layer}" not in spelling:
            continue
        if layout:
            layout, doubt = _fused_layout(layout, info.shape, module)
            roles = {"fused": (spelling,)}
        elif match and (key := _sibling(path, match, KEY_OF)) in spellings:
            layout, doubt = "separate", ""
            roles = {
                "query": SideRule((spelling,)),
                "key": SideRule((key,)),
                "value": SideRule((_sibling(path, match, VALUE_OF),)),
            }
        else:
            continue
        stack, kind = _place(spelling, checkpoint.config)
        confidence = f"confidence medium: {doubt}" if doubt else "confidence high"
        yield AttentionRule(
            stack=stack,
            kind=kind,
            layout=layout,
            guess=f"guessed from the tensors' names ({spelling}), {confidence}",
            **roles,
            **_counts(checkpoint, stack, heads),
        )


def _without_numbers(stem: str) -> str:
    """The first number in a name is the layer's; further ones are told apart, too."""
    parts, count = [], 0
    for part in stem.split("."):
        if part.isdigit():
            parts.append("{layer}" if count == 0 else f"{{index{count}}}")
            count += 1
        else:
            parts.append(part)
    return ".".join(parts)


def _sibling(path: str, match: re.Match[str], roles: Mapping[str, str]) -> str:
    module = match["before"] + roles[match["role"]] + match["after"]
    return f"{path}.{module}" if path else module


def _fused_layout(layout: str, shape: tuple[int, ...], module: str) -> tuple[str, str]:
    """How the roles lie in a fused weight, and what is doubtful about it."""
    rows, columns = shape
    if layout == "sectioned" and columns == 3 * rows:
        return "conv1d", f"{module} is taken to be stored (in, out), all queries first"
    order = "all queries first" if layout == "sectioned" else "key heads one after the other"
    return layout, f"{module} is taken to hold {order}"


def _place(spelling: str, config: Mapping[str, Any]) -> tuple[str, str]:
    """Stack and kind of attention, from the words of a name."""
    words = spelling.lower().split(".")
    kind = "cross" if any(word.startswith(CROSS) for word in words) else "self"
    for stack, names in STACKS.items():
        if any(word == name or word.startswith(f"{name}_") for word in words for name in names):
            return stack, kind
    architectures = " ".join(map(str, config.get("architectures") or ()))
    causal = "CausalLM" in architectures or "gpt" in str(config.get("model_type", "")).lower()
    return ("decoder" if causal else "unknown"), kind


def _counts(checkpoint: Checkpoint, stack: str, heads: int | None) -> dict[str, Any]:
    """The rule's keys for the numbers of heads."""
    if heads is not None:
        counts = CountsRule(every_layer=False, heads=("heads_per_layer",), key_heads=KEY_HEADS)
        return {"counts": counts, "defaults": {"heads_per_layer": heads}}
    keys = (*STACK_HEADS.get(stack, ()), *HEADS)
    if Config(checkpoint.config, "", checkpoint.name).get(*keys) is None:
        raise UnknownFamily(
            f"{checkpoint.name}: the number of heads is nowhere told, and shapes cannot tell it; "
            "give it with --heads-per-layer N"
        )
    return {"counts": CountsRule(every_layer=False, heads=keys, key_heads=KEY_HEADS)}
