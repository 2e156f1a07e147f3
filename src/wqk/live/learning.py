"""A family file for a guessed family, with the observed facts of verified blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from wqk.families import AttentionPlan, Place
from wqk.families.proofs import Learned
from wqk.families.rules import AttentionRule
from wqk.model import Model


def family_file(model: Model, learned: Mapping[Place, Learned]) -> str:
    """Return a guess as a family file, with the observed scale, mask and window.

    Returns
    -------
    str
        TOML for the argument ``family`` of `wqk.open`; empty without a guess, or if a block of the
        guess was not confirmed.
    """
    guessed = [plan for plan in model.plans if plan.rule.guess]
    if not guessed or any(plan.place not in learned for plan in guessed):
        return ""
    plans_by_role: dict[tuple[str, str], list[AttentionPlan]] = {}
    for plan in guessed:
        plans_by_role.setdefault((plan.stack, plan.kind), []).append(plan)
    rules = []
    for plans in plans_by_role.values():
        facts = {learned[plan.place] for plan in plans}
        if len(facts) != 1:
            continue  # one rule cannot describe layers with different masks
        rules.append(_filled_in(plans[0], facts.pop()))
    if not rules:
        return ""
    name = "".join(c if c.isalnum() else "-" for c in model.name.lower())
    lines = [f'name = "{name}"', f'model_types = ["{name}"]']
    for entries in rules:
        lines += ["", "[[attention]]"]
        lines += [f"{key} = {_toml(value)}" for key, value in entries.items()]
    return "\n".join(lines) + "\n"


def _filled_in(plan: AttentionPlan, facts: Learned) -> dict[str, Any]:
    """Return the entries of a plan's rule that differ from the defaults, with observed facts."""
    heads, key_heads = plan.query.heads, plan.key.heads
    defaults = {field.name: field.default for field in msgspec.structs.fields(AttentionRule)}
    entries = {
        name: _plain(value)
        for name, value in msgspec.structs.asdict(plan.rule).items()
        if name not in ("guess", "heads", "key_heads", "defaults", "every_layer")
        and value != defaults[name]
        and value not in ((), {}, None)
    }
    entries |= {"heads": "wqk_heads", "key_heads": "wqk_key_heads"}
    numbers: dict[str, Any] = {"wqk_heads": heads, "wqk_key_heads": key_heads}
    if facts.causal:
        entries["causal"] = True
    if facts.window is not None:
        entries["window"] = "wqk_window"
        numbers["wqk_window"] = facts.window
    if facts.scale is not None:
        entries["scale"] = facts.scale
    entries["defaults"] = numbers
    return entries


def _toml(value: Any) -> str:
    """Return a value in TOML: numbers, texts and lists are as in JSON."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return msgspec.json.encode(value).decode()


def _plain(value: Any) -> Any:
    """Return a value in the format of a family file: a list of one entry becomes the entry."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value
