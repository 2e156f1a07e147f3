"""Keys that a model's code does not read.

    python -m tools.deriving.settings

A key counts for a type only if its model computes something else with it. Where a family reads a
key that the code for a type ignores, the key is listed under that type in ``unread.toml``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tools.deriving.configured import small_file
from tools.deriving.probing import in_a_process, record_type
from tools.deriving.records import Record, read_record

import wqk
import wqk.families
from wqk.families import config, families
from wqk.families.family import family_of_type

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.families import AttentionRule

UNREAD = Path(wqk.families.__file__).parent / "unread.toml"
HEAD = "# Written by tools/deriving/settings.py: keys that transformers does not read, by type.\n"


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
