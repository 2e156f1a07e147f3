"""What `transformers` takes parts of models for, and what it fills in where files are silent.

python -m tools.deriving.parts
"""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import wqk.families
from wqk.families import families
from wqk.families.config import kind_of_layer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wqk.families import Family
    from wqk.families.family import RotaryRule

PARTS = Path(wqk.families.__file__).parent / "parts.toml"
DEFAULTS = Path(wqk.families.__file__).parent / "defaults.toml"
# Keys that are read for every family; see families/windows.py and families/rotary.py.
SWITCHES = {
    "use_sliding_window",
    "max_window_layers",
    "global_attention_blocks",
    "pos_att_type",
}
LENGTHS = {"max_position_embeddings", "original_max_position_embeddings"}
# Configuration keys of how many layers it takes until one is of another kind.
PERIODS = ("sliding_window_pattern", "global_attn_every_n_layers", "full_attention_interval")
DEEPEST = 26
HEAD = "# Written by tools/deriving/parts.py from transformers' configurations.\n"


def main() -> None:
    """Write both files."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    classes = {kind: CONFIG_MAPPING[kind] for kind in CONFIG_MAPPING_NAMES}
    parts = {kind: part for kind, config in classes.items() if (part := parts_of(config))}
    _write(PARTS, parts)
    used = {part for table in parts.values() for part in table.values()}
    listed = {kind: family for family in families().values() for kind in family.model_types}
    values = {
        kind: defaults_of(classes[kind], family, kind in used)
        for kind, family in listed.items()
        if kind in classes
    }
    for kind, config in classes.items():
        values |= {f"{kind}.{key}": table for key, table in merged(config, listed).items()}
    _write(DEFAULTS, {kind: table for kind, table in values.items() if table})


def parts_of(config: Any) -> dict[str, str]:
    """The model types of a class's parts, by their keys."""
    return {
        key: named
        for key, part in sorted((getattr(config, "sub_configs_defaults", None) or {}).items())
        if (named := part.model_type or getattr(part.config_class, "model_type", ""))
    }


def merged(config: Any, listed: Mapping[str, Family]) -> dict[str, dict[str, Any]]:
    """What a class fills into the gaps of its parts, unlike the classes of these."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, dict[str, Any]] = {}
    for key, kind in parts_of(config).items():
        whole = _made(config, **{key: {"model_type": kind}})
        if whole is None or kind not in listed:
            continue
        family = listed[kind]
        said, own = (
            _flat(one.to_dict(), family) for one in (getattr(whole, key), CONFIG_MAPPING[kind]())
        )
        keys = _named(family) | LENGTHS | {"head_dim"}
        if other := {
            name: value
            for name, value in sorted(said.items())
            if name in keys and isinstance(value, int | float) and value != own.get(name)
        }:
            found[key] = other
    return found


def defaults_of(config: Any, family: Family, is_part: bool) -> dict[str, Any]:
    """What a class fills in under the keys of its family; ``is_part`` if it is one of others."""
    # Parts of no fixed type, such as backbones, stand beside attention of the model's own.
    whole = any(getattr(part, "model_type", "") for part in (config.sub_configs or {}).values())
    rules = family.attention
    rotary = [rule.rotary for rule in rules if rule.rotary]
    has_kinds = any(r.window and "window" not in r.rotary_only for r in rules)
    found = _values(config, family, is_part or not whole) | (_kinds(config) if has_kinds else {})
    found |= _scaling(config, rotary) if rotary else {}
    # A share that parameters of a file's own drop is no key of its own.
    scaled = _rotary(config, rope_scaling={"rope_type": "linear", "factor": 2.0})
    share = "partial_rotary_factor"
    if share in found.get("rope_parameters", {}) and share not in scaled:
        found.pop(share, None)
    # A part of no type has no values but the whole's: where it turns, too, its family says all.
    parts = parts_of(config)
    if any(rule.rotary and rule.config and rule.config not in parts for rule in rules):
        found = {key: one for key, one in found.items() if key not in {*LENGTHS, "rope_theta"}}
    return found


def _values(config: Any, family: Family, has_counts: bool) -> dict[str, Any]:
    """What a configuration that is made of nothing says under the keys that its family names.

    Counts of layers and heads apart. Numbers that follow the heads are no values of their own.
    """
    counts = {
        key.partition(" ")[0]
        for rule in family.attention
        for key in (*rule.layers, *rule.heads, *rule.key_heads)
    }
    spelled = getattr(config, "attribute_map", {})
    named = {key.partition(" ")[0] for rule in family.attention for key in rule.heads}
    named |= {spelled[key] for key in named if key in spelled}
    if not (made := _made(config)):  # some configurations cannot be made of nothing
        return {}
    table = _flat(made.to_dict(), family)
    others = {key: _made(config, **{key: _more(table[key])}) for key in named & set(table)}
    if not others and not all(rule.sections for rule in family.attention):
        return {}
    if type(table.get("head_dim")) is int:
        others["head_dim"] = _made(config, head_dim=2 * table["head_dim"])
    moved = {key: _flat(one.to_dict(), family) for key, one in others.items() if one}
    own = {
        key: value
        for key, value in sorted(table.items())
        if all(other.get(key) == value for name, other in moved.items() if name != key)
    }
    found: dict[str, Any] = {}
    if has_counts:
        found = {
            key: value
            for key, value in own.items()
            if key in counts and isinstance(value, int | list)
        }
    others = getattr(config, "attribute_map", {})
    names = {other: key for other, key in others.items() if key in _named(family) | counts}
    found |= {"names": names} if names else {}
    keys = _named(family) - counts
    lists = {
        "global_attention_blocks",
        "pos_att_type",
        *(key for rule in family.attention for key in rule.window),
    }
    if any(rule.rotary for rule in family.attention):
        keys |= LENGTHS
    # Of latent attention, each key is named.
    told = any(rule.layout in ("separate", "gated") for rule in family.attention)
    pattern = r"((?!linear|mamba|index)\w+_)?head_dim"
    widths = {key for key in own if told and own[key] and re.fullmatch(pattern, key)}
    found |= {
        key: value
        for key, value in own.items()
        if key in keys | widths
        and isinstance(value, (int, float, list, tuple) if key in lists else (int, float))
    }
    layers = table.get("per_layer_config") or {}
    other = {one["head_dim"] for one in layers.values() if "head_dim" in one}
    return found | ({"global_head_dim": max(other)} if other else {})


def _more(given: Any) -> Any:
    return [2 * n for n in given] if isinstance(given, list) else 2 * given


def _flat(table: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The table, with rotary parameters under the keys that the family has for them."""
    found = dict(table)
    parameters = table.get("rope_parameters") or {}
    for rule in (r.rotary for r in family.attention if r.rotary):
        every = parameters.get("full_attention", parameters) or {}
        windowed = parameters.get("sliding_attention") or {}
        for keys, value in (
            (rule.base, every.get("rope_theta")),
            # Kinds of layers that have parameters of their own have shares of their own.
            (rule.fraction, None if windowed else every.get("partial_rotary_factor")),
            (rule.local_base, windowed.get("rope_theta")),
        ):
            if keys and value is not None:
                found[keys[0]] = value
    return found


def _named(family: Family) -> set[str]:
    """Every word that may be a key of the configuration."""
    rules = msgspec.to_builtins(family.attention)
    return set(re.findall(r"[a-z][a-z0-9_]+", json.dumps(rules))) | SWITCHES


def _made(config: Any, **keys: Any) -> Any:
    """A configuration, or None where its class refuses these keys."""
    try:
        return config(**keys)
    except Exception:  # each class has checks of its own
        return None


def _kinds(config: Any) -> dict[str, Any]:
    """The rule by which a class says the kinds of layers where the file does not.

    Layer n is of the kind ``first[n]``, or else ``repeat[n % len(repeat)]``; ``last`` is that of
    the last layer (``forced``: whatever is said), ``every`` the key that sets the length of the
    repetition, and ``after`` that of the first layer of the kind ``then``. Some count ``backward``.
    """

    def lists(**keys: Any) -> dict[int, list[str]]:
        made = {n: _made(config, num_hidden_layers=n, **keys) for n in range(1, DEEPEST)}
        found = {n: getattr(one, "layer_types", None) for n, one in made.items()}
        return {n: kinds for n, kinds in found.items() if kinds and len(kinds) == n}

    # Where windows are off, no kind of layer has one.
    rule = _repeated(lists(sliding_window=8, use_sliding_window=True)) or _repeated(lists())
    if rule is None:
        return {}
    if set(rule["repeat"]) >= {"full_attention", "linear_attention"}:  # windows are another matter
        return {}
    windowed = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3}
    later = lists(**windowed).get(DEEPEST - 1, [])
    expected = [kind_of_layer(rule, layer, len(later)) for layer in range(len(later))]
    if later != expected and later[:3] == expected[:3] and len(set(later[3:])) == 1:
        return {"kinds": rule | {"after": "max_window_layers", "then": later[3]}}
    period = len(rule["repeat"])
    for key in PERIODS:
        other = _repeated(lists(**{key: period + 1}))
        if other and len(other["repeat"]) == period + 1:
            rule["every"] = key
    said = [rule["last"], *{*rule["repeat"]} - {rule["last"]}] if "last" in rule else []
    made = _made(config, num_hidden_layers=len(said), layer_types=[*said]) if said else None
    rule |= {"forced": True} if getattr(made, "layer_types", said)[-1:] != said[-1:] else {}
    return {"kinds": rule}


def _repeated(lists: Mapping[int, list[str]]) -> dict[str, Any] | None:
    """The shortest rule that gives these lists of so many kinds of layers."""
    if not lists:
        return None
    options = itertools.product((False, True), range(1, 9), range(4), (False, True))
    for backward, period, first, is_last in options:
        deepest = lists[max(lists)][:: -1 if backward else 1]
        # The repetition begins with layer 0; what comes first is an exception to it.
        repeat = [deepest[first + (n - first) % period] for n in range(period)]
        rule: dict[str, Any] = {"repeat": repeat}
        rule |= {"first": deepest[:first]} if first else {}
        rule |= {"last": deepest[-1]} if is_last else {}
        rule |= {"backward": True} if backward else {}
        if all(
            kinds == [kind_of_layer(rule, layer, n) for layer in range(n)]
            for n, kinds in lists.items()
        ):
            return rule
    return None


def _scaling(config: Any, rotary: Sequence[RotaryRule]) -> dict[str, Any]:
    """The rotary parameters of a silent file, and which kinds of layers one scaling is for."""
    plain = _rotary(config)
    if not plain:
        return {}
    # What a key outside sets is none of them.
    keys = {key: 123.0 for rule in rotary for key in (*rule.base, *rule.local_base)}
    keys |= dict.fromkeys((key for rule in rotary for key in rule.fraction), 0.75)
    moved = [_rotary(config, **{key: value}) for key, value in keys.items()]
    nested = {kind: one for kind, one in plain.items() if isinstance(one, dict)}
    found: dict[str, Any] = {}
    own = {kind: _own(one, [m[kind] for m in moved if m.get(kind)]) for kind, one in nested.items()}
    if any(own.values()):
        found["rope_parameters"] = {kind: one for kind, one in own.items() if one}
    elif not nested and (flat := _own(plain, moved)):
        found["rope_parameters"] = flat
        if "rope_theta" in flat and isinstance(config.default_theta, int | float):
            found["rope_theta"] = config.default_theta
    if nested:
        given = _rotary(config, rope_scaling={"rope_type": "linear", "factor": 2.0})
        scaled = [kind for kind in nested if (given.get(kind) or {}).get("factor") == 2.0]
        found["scaled"] = scaled
    return found


def _rotary(config: Any, **keys: Any) -> dict[str, Any]:
    found = getattr(_made(config, **keys), "rope_parameters", None)
    return found if isinstance(found, dict) else {}


def _own(table: Mapping[str, Any], moved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a kind of layers has of rotary parameters, unless they are plain or set elsewhere."""
    plain = {"rope_type": ("default", "axial"), "max_position_embeddings": table.values()}
    return {
        key: value
        for key, value in table.items()
        if isinstance(value, int | float | str)
        and key != "type"
        and value not in plain.get(key, ())
        and not any(key in other and other[key] != value for other in moved)
    }


def _write(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    lines = (line(kind, table) for kind, table in sorted(tables.items()))
    path.write_text(HEAD + "".join(lines), encoding="utf-8")


def line(kind: str, table: Mapping[str, Any]) -> str:
    """A line of either file."""
    return f"{json.dumps(kind)} = {_inline(table)}\n"


def _inline(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{ " + ", ".join(f"{key} = {_inline(one)}" for key, one in value.items()) + " }"


if __name__ == "__main__":
    main()
