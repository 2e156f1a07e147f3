"""Settings that change attention, drawn at random; and keys that a model's code does not read.

    python -m tools.deriving.settings

A key counts for a type only if its model computes something else with it. Where a family reads a
key that the code for a type ignores, the key is listed under that type in ``unread.toml``.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tools.deriving.configured import small_file
from tools.deriving.probing import in_a_process, record_type
from tools.deriving.records import Record, read_record
from tools.deriving.shrinking import HEADS

import wqk
import wqk.families
from wqk.families import config, families
from wqk.families.family import family_of_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.families import AttentionRule

UNREAD = Path(wqk.families.__file__).parent / "unread.toml"
HEAD = "# Written by tools/deriving/settings.py: keys that transformers does not read, by type.\n"

# Fields of a class that have to do with its attention.
ABOUT_ATTENTION = re.compile(
    r"attn|attention|qk|qkv|rope|rotary|window|cap|causal|clip|bias|multiplier|interleave|position"
    r"|is_decoder|alibi|partial|parallel|new_decoder|scale|temperature|norm_before"
)
NOT_ABOUT = re.compile(
    r"output_|mlp_|drop|type_vocab|std|_ids?$|range|layer_scale|max_position|loss|scale_fmt"
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 3.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    YARN,
    YARN | {"attention_factor": 1.3, "truncate": False},
    YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "beta_slow": 2},
)  # fmt: skip


def draws(model_type: str, number: int) -> Iterator[dict[str, Any]]:
    """Configuration files of a type, each with a few settings that are not its defaults."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = CONFIG_MAPPING[model_type]().to_dict()
    settings = [*_settings(fields)]
    for n in range(number):
        chance = random.Random(f"{model_type} {n}")
        drawn = chance.sample(settings, min(len(settings), chance.randint(1, 4)))
        table: dict[str, Any] = {"model_type": model_type}
        for key, values in drawn:
            table[key] = chance.choice(values)
        yield table


def _settings(fields: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Keys, and other values that they may take."""
    for key, value in fields.items():
        match key, value:
            case "num_key_value_heads", int():
                yield key, [1, 2, HEADS]
            case "head_dim", int() | None if "qk_rope_head_dim" not in fields:
                yield key, [16, 32]
            case "sliding_window" | "attention_chunk_size", _:
                yield key, [4, 9, 131072]
            case "layer_types", [*kinds] if {"full_attention"} < set(kinds):
                other = next(kind for kind in kinds if kind != "full_attention")
                yield key, [["full_attention", other], [other, "full_attention", other]]
            case "rope_parameters", dict() if not _is_nested(value):
                yield "rope_scaling", [*SCALINGS]
                yield "rope_theta", [50.0, 500000]
            case "rope_parameters", dict():
                yield "rope_scaling", [*SCALINGS]
            case "partial_rotary_factor" | "rotary_pct", _:
                yield key, [0.5, 1.0]
            case _, bool() if _is_about(key):
                yield key, [not value]
            case _, float() if _is_about(key) and value > 0:
                yield key, [value * 0.6]
            case "attn_logit_softcapping" | "final_logit_softcapping" | "clip_qkv", None:
                yield key, [0.8, 5.0]


def _is_nested(rope: dict[str, Any]) -> bool:
    return any(isinstance(value, dict) for value in rope.values())


def _is_about(key: str) -> bool:
    return bool(ABOUT_ATTENTION.search(key)) and not NOT_ABOUT.search(key)


def unread_keys(model_type: str) -> list[str]:
    """The keys that a family reads of a file, and the code for this type does not."""
    family = family_of_type(model_type)
    if family is None:
        return []
    wanted = dict(pair for rule in family.attention for pair in _read(rule))
    return sorted(key for key, values in wanted.items() if _is_unread(model_type, key, values))


# Settings beside which a window may count: that it is used, and layers that have one.
USED = {"use_sliding_window": True, "max_window_layers": 0}
KINDS = ["full_attention", "sliding_attention"]
BESIDE: tuple[dict[str, Any], ...] = ({}, USED, {"layer_types": KINDS} | USED)


def _is_unread(model_type: str, key: str, values: tuple[Any, Any]) -> bool:
    """Whether two values of a key are read as different attention, and computed as the same.

    What is read is read as if nothing were known to be unread.
    """
    told = False
    for beside in BESIDE:
        tables = [{"model_type": model_type, **beside, key: value} for value in values]
        (one, its), (other, theirs) = map(_record, tables)
        # Masks that are not what families say were not given, rather than not read.
        seen = one and other and all(site.causal and site.reach >= 0 for site in one.sites)
        if one and other and one.sites and seen and its != theirs:
            told = True
            if not _alike(one, other):
                return False
    return told


def _read_any(rule: AttentionRule) -> bool:
    return bool(rule.window or rule.softcap or rule.clip)


def _read(rule: AttentionRule) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Keys of a rule, and two values with which it should compute something else."""
    for key in rule.window:
        yield key, (4, 6)
        yield "use_sliding_window", (True, False)
    if rule.softcap:
        yield rule.softcap, (0.3, 3.0)
    if rule.clip and "." not in rule.clip:
        yield rule.clip, (0.1, 1.0)


def _record(table: dict[str, Any]) -> tuple[Record | None, list[Any]]:
    """What a model with these settings computes, and windows and limits that are read of it."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        try:
            file = small_file(table)
            record_type(table["model_type"], folder, file | table)
            plans = wqk.open(folder).plans
        except Exception:  # of the model's own code
            return None, []
        return read_record(folder), [(plan.window, plan.softcap, plan.clip) for plan in plans]


def _alike(one: Record, other: Record) -> bool:
    """Whether two models computed the same."""
    if len(one.sites) != len(other.sites) or other.failure:
        return False
    return all(
        (a.causal, a.reach, len(a.products)) == (b.causal, b.reach, len(b.products))
        and all(
            np.array_equal(p.queries, q.queries)
            and np.array_equal(p.keys, q.keys)
            and p.through == q.through
            for p, q in zip(a.products, b.products, strict=True)
        )
        for a, b in zip(one.sites, other.sites, strict=True)
    )


def main() -> None:
    """Find the unread keys of every type that a family lists."""
    import torch
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    UNREAD.write_text(HEAD, encoding="utf-8")
    config._tables.cache_clear()
    unread_keys("llama")  # what is loaded late is loaded once, for all processes
    found: dict[str, list[str]] = {}
    types = {
        kind
        for family in families().values()
        for kind in family.model_types
        if any(map(_read_any, family.attention))
    }
    for kind in sorted(types & set(CONFIG_MAPPING_NAMES)):
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / "keys.json"
            ended = in_a_process(
                lambda kind=kind, path=path: path.write_text(json.dumps(unread_keys(kind)))
            )
            keys = json.loads(path.read_text()) if path.exists() else []
        print(f"{kind:40} {', '.join(keys)} {ended}", flush=True)
        if keys:
            found[kind] = keys
    lines = [f"{json.dumps(kind)} = {json.dumps(keys)}\n" for kind, keys in found.items()]
    UNREAD.write_text(HEAD + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
