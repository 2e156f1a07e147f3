"""What `transformers` takes parts of models for, and what it fills in where files are silent.

python -m tools.deriving.parts
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import wqk.families
from wqk.families import families

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wqk.families import Family

PARTS = Path(wqk.families.__file__).parent / "parts.toml"
DEFAULTS = Path(wqk.families.__file__).parent / "defaults.toml"
# Keys about windows that every family reads; see Config.window.
WINDOWS = {"use_sliding_window", "max_window_layers", "global_attn_every_n_layers"}
HEAD = "# Written by tools/deriving/parts.py from transformers' configurations.\n"


def main() -> None:
    """Write both files."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    classes = {kind: CONFIG_MAPPING[kind] for kind in CONFIG_MAPPING_NAMES}
    parts = {
        kind: {
            key: part.model_type
            for key, part in sorted((getattr(config, "sub_configs", None) or {}).items())
            if getattr(part, "model_type", "")
        }
        for kind, config in classes.items()
    }
    _write(PARTS, {kind: part for kind, part in parts.items() if part})
    used = {part for table in parts.values() for part in table.values()}
    listed = {kind: family for family in families().values() for kind in family.model_types}
    # Parts of no fixed type are of those types that are models of their own, most of all.
    values = {
        kind: _values(classes[kind], family, kind in used or not parts.get(kind))
        for kind, family in listed.items()
        if kind in classes
    }
    _write(DEFAULTS, {kind: table for kind, table in values.items() if table})


def _values(config: Any, family: Family, has_counts: bool) -> dict[str, Any]:
    """What a configuration that is made of nothing says under the keys that its family names.

    Counts of layers and heads apart. Numbers that follow the heads are no values of their own.
    """
    counts = {
        key for rule in family.attention for key in (*rule.layers, *rule.heads, *rule.key_heads)
    }
    try:
        table = _flat(config().to_dict(), family)
        heads = next(k for rule in family.attention for k in rule.heads if k in table)
        given = table[heads]
        more = [2 * n for n in given] if isinstance(given, list) else 2 * given
        other = _flat(config(**{heads: more}).to_dict(), family)
    except Exception:  # some configurations cannot be made of nothing
        return {}
    own = {
        key: value
        for key, value in sorted(table.items())
        if key == heads or other.get(key) == value
    }
    found: dict[str, Any] = {}
    if has_counts:
        found["counts"] = {
            key: value
            for key, value in own.items()
            if key in counts and isinstance(value, int | list)
        }
    keys = _named(family) - counts
    return found | {
        key: value for key, value in own.items() if key in keys and isinstance(value, int | float)
    }


def _flat(table: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The table, with rotary parameters under the keys that the family has for them."""
    found = dict(table)
    parameters = table.get("rope_parameters") or {}
    for rule in (r.rotary for r in family.attention if r.rotary):
        every = parameters.get("full_attention", parameters)
        windowed = parameters.get("sliding_attention", {})
        for keys, value in (
            (rule.base, every.get("rope_theta")),
            (rule.fraction, every.get("partial_rotary_factor")),
            (rule.local_base, windowed.get("rope_theta")),
        ):
            if keys and value is not None:
                found[keys[0]] = value
    return found


def _named(family: Family) -> set[str]:
    """Every word that may be a key of the configuration."""
    rules = msgspec.to_builtins(family.attention)
    return set(re.findall(r"[a-z][a-z0-9_]+", json.dumps(rules))) | WINDOWS


def _write(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    text = HEAD
    for kind, table in sorted(tables.items()):
        text += f"{json.dumps(kind)} = {_inline(table)}\n"
    path.write_text(text, encoding="utf-8")


def _inline(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{ " + ", ".join(f"{key} = {_inline(one)}" for key, one in value.items()) + " }"


if __name__ == "__main__":
    main()
