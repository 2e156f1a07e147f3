"""What `transformers` takes parts of models for, and their numbers, where files leave them out.

python -m tools.deriving.parts
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wqk.families
from wqk.families import families

if TYPE_CHECKING:
    from collections.abc import Mapping

PARTS = Path(wqk.families.__file__).parent / "parts.toml"
DEFAULTS = Path(wqk.families.__file__).parent / "defaults.toml"
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
    numbers = {
        kind: _numbers(classes[kind], family)
        for kind, family in listed.items()
        if kind in classes and (kind in used or not parts.get(kind))
    }
    _write(DEFAULTS, {kind: table for kind, table in numbers.items() if table})


def _numbers(config: Any, family: Any) -> dict[str, Any]:
    """Counts of layers and heads that a configuration has by itself.

    Key heads that follow the heads are no number of their own.
    """
    keys = {
        key for rule in family.attention for key in (*rule.layers, *rule.heads, *rule.key_heads)
    }
    try:
        table = config().to_dict()
        heads = next(k for rule in family.attention for k in rule.heads if k in table)
        other = config(**{heads: 2 * table[heads]}).to_dict()
    except Exception:  # some configurations cannot be made of nothing
        return {}
    return {
        key: table[key]
        for key in sorted(keys)
        if isinstance(table.get(key), int | list) and (key == heads or other.get(key) == table[key])
    }


def _write(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    text = HEAD
    for kind, table in sorted(tables.items()):
        told = ", ".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
        text += f"{json.dumps(kind)} = {{ {told} }}\n"
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
