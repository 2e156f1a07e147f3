"""Derived families as data: a file for each new one, and types added to those that are there."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

import wqk.families
from wqk.families.family import family_of_type

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tools.deriving.deriving import TypeOutcome

PAGE = Path(__file__).parents[2] / "docs" / "model-types.jsonl"
BY_TABLE = "proven by a table of tests/families/architectures"
FAMILIES_FOLDER = Path(wqk.families.__file__).parent / "data"


def family_text(
    name: str, types: Sequence[str], rules: Sequence[Mapping[str, Any]], with_parts: bool = False
) -> str:
    """A family file."""
    lines = [f"name = {json.dumps(name)}", *_types(types)]
    lines += ["with_parts = true"] if with_parts else []
    for rule in rules:
        lines += ["", "[[attention]]"]
        rotary = rule.get("rotary")
        for key, value in rule.items():
            if key == "rotary" or (key == "layout" and value == "separate"):
                continue
            lines.append(f"{key} = {_toml(value)}")
        if rotary:
            lines += ["", "[attention.rotary]"]
            lines += [f"{key} = {_toml(value)}" for key, value in rotary.items()]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        inner = ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{ {inner} }}"
    return json.dumps(value, ensure_ascii=False)


def rule_table(rule: Any) -> dict[str, Any]:
    """The table of a family file that a rule is made of; guesses become claims."""
    table: dict[str, Any] = {}
    for f in fields(rule):
        value, key = getattr(rule, f.name), f.name
        default = f.default_factory() if f.default_factory is not NODEFAULT else f.default
        if isinstance(value, Struct):
            table[key] = rule_table(value)
        elif value != default and key != "guess":
            alone = isinstance(value, tuple) and len(value) == 1 and key != "scale"
            table[key] = value[0] if alone else list(value) if isinstance(value, tuple) else value
        if isinstance(value, dict):
            structures = {n: rule_table(v) for n, v in value.items() if isinstance(v, Struct)}
            table |= {key: structures} if structures else {}
    return table


def _types(types: Sequence[str]) -> list[str]:
    line = f"model_types = [{', '.join(map(json.dumps, types))}]"
    if len(line) <= 100:
        return [line]
    return ["model_types = [", *(f"  {json.dumps(kind)}," for kind in types), "]"]


def write_outcomes(rows: Sequence[TypeOutcome], path: Path) -> None:
    """A line for each model type, for the page of covered models."""
    import transformers
    from tools.deriving.deriving import TypeOutcome
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    seen = {row.type for row in rows}
    # What no one has run yet; types of families that were there before are proven by tests.
    rows = [*rows, *(TypeOutcome(t, "pending") for t in CONFIG_MAPPING_NAMES if t not in seen)]
    lines: list[dict[str, str]] = [{"transformers": transformers.__version__}]
    for row in sorted(rows, key=lambda row: row.type.lower()):
        family = family_of_type(row.type)
        by_table = row.outcome in ("pending", "not built", "not run") and family is not None
        if by_table and family is not None and not family.refusal:
            row = replace(row, outcome="listed", family=family.name, read=BY_TABLE)
        lines.append({"type": row.type} | _line(row))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _line(row: TypeOutcome) -> dict[str, str]:
    """The outcome in a word, the family, and why it is not simply proven."""
    if row.proven:
        outcome, why = "partial" if row.partial else "proven", row.partial or row.read
    elif row.outcome == "left":
        # "refused: why", "guessed, wrong", "read, right"
        outcome, _, why = row.read.partition(": ")
        outcome = outcome or "not run"
        if outcome.startswith("read"):
            why = "; ".join(row.faults[:2])
    else:
        outcome, why = row.outcome, "; ".join(row.faults[:1])
        packages = dict.fromkeys(re.findall(r"requires the (\w+) library", why))
        why = f"needs the package {', '.join(packages)}" if packages else why
    type_family = family_of_type(row.type)
    family = type_family.name if type_family else row.family
    return {"outcome": outcome, "family": family if row.proven else "", "why": why[:240]}


def write_families(rows: Sequence[TypeOutcome]) -> None:
    """Write what was derived into the families' data."""
    types: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        # A type stays in the family that lists it until someone takes it from there.
        if row.outcome in ("known", "new") and family_of_type(row.type) is None:
            types[row.family].append(row.type)
    for row in rows:
        path = FAMILIES_FOLDER / f"{row.family}.toml"
        if row.outcome == "new" and types[row.family] and not path.exists():
            text = family_text(row.family, sorted(types[row.family]), row.rules, row.with_parts)
            path.write_text(text, encoding="utf-8")
    for path in FAMILIES_FOLDER.glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        match = re.search(r"^model_types = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
        if match is None:
            continue
        listed = re.findall(r'"([^"]+)"', match[1])
        model_types = sorted({*listed, *types[path.stem]})
        if model_types != sorted(listed):
            path.write_text(
                text[: match.start()] + "\n".join(_types(model_types)) + text[match.end() :],
                encoding="utf-8",
            )
