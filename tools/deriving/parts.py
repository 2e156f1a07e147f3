"""Default values of parts of models in `transformers`, where configuration files have none.

python -m tools.deriving.parts
"""

from __future__ import annotations

import inspect
import itertools
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import wqk.families
from wqk.families import families
from wqk.families.config import kind_of_layer
from wqk.families.model_types import default_values, unread_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wqk.families import Family
    from wqk.families.rules import RotaryRule

PARTS = Path(wqk.families.__file__).parent / "parts.toml"
DEFAULTS = Path(wqk.families.__file__).parent / "defaults.toml"
UNREAD_DEFAULTS = Path(wqk.families.__file__).parent / "unread_defaults.toml"
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
    """Write the three files."""
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
    unread_values = {
        kind: unread_defaults_of(classes[kind], family)
        for kind, family in listed.items()
        if kind in classes
    }
    _write(UNREAD_DEFAULTS, {kind: table for kind, table in unread_values.items() if table})


def parts_of(config: Any) -> dict[str, str]:
    """The model types of a class's parts, by their keys."""
    return {
        key: named
        for key, part in sorted((getattr(config, "sub_configs_defaults", None) or {}).items())
        if (named := part.model_type or getattr(part.config_class, "model_type", ""))
    }


def merged(config: Any, listed: Mapping[str, Family]) -> dict[str, dict[str, Any]]:
    """Return the defaults that a composite gives its parts, unlike the classes of the parts."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    merged_values: dict[str, dict[str, Any]] = {}
    for key, kind in parts_of(config).items():
        composite = _made(config, **{key: {"model_type": kind}})
        if composite is None or kind not in listed:
            continue
        family = listed[kind]
        part_values, own_values = (
            _flat(part_config.to_dict(), family)
            for part_config in (getattr(composite, key), CONFIG_MAPPING[kind]())
        )
        keys = _named(family) | LENGTHS | {"head_dim"}
        if differing := {
            name: value
            for name, value in sorted(part_values.items())
            if name in keys and isinstance(value, int | float) and value != own_values.get(name)
        }:
            merged_values[key] = differing
    return merged_values


def defaults_of(config: Any, family: Family, is_part: bool) -> dict[str, Any]:
    """Return the defaults of a class under the keys of its family; ``is_part`` for a part."""
    # Parts of no fixed type, such as backbones, stand next to attention of the model's own.
    is_whole = any(getattr(part, "model_type", "") for part in (config.sub_configs or {}).values())
    rules = family.attention
    rotary = [rule.rotary for rule in rules if rule.rotary]
    has_kinds = any(r.window and "window" not in r.rotary_only for r in rules)
    default_values = _values(config, family, is_part or not is_whole) | (
        _kinds(config) if has_kinds else {}
    )
    default_values |= _scaling(config, rotary) if rotary else {}
    # A share that parameters of a file's own drop is no key of its own.
    scaled = _rotary(config, rope_scaling={"rope_type": "linear", "factor": 2.0})
    share = "partial_rotary_factor"
    if share in default_values.get("rope_parameters", {}) and share not in scaled:
        default_values.pop(share, None)
    # A part of no type has no values but the whole's: where it turns, too, its family says all.
    parts = parts_of(config)
    if any(rule.rotary and rule.config and rule.config not in parts for rule in rules):
        default_values = {
            key: value
            for key, value in default_values.items()
            if key not in {*LENGTHS, "rope_theta"}
        }
    return default_values


def unread_defaults_of(config: Any, family: Family) -> dict[str, Any]:
    """Return the defaults in a class's signature that its family does not read.

    A value that the class computes from other keys is no default. Empty, zero and false values
    are left out: they switch nothing on.
    """
    signature_defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(config.__init__).parameters.items()
        if isinstance(parameter.default, bool | int | float | str) and parameter.default
    }
    values = {"model_type": config.model_type} | signature_defaults
    unread = unread_settings(values, map(repr, family.attention))
    read_defaults = default_values(config.model_type)
    return {
        key: value
        for (key,), value in sorted(unread.items())
        if key != "model_type" and read_defaults.get(key) != value
    }


def _values(config: Any, family: Family, has_counts: bool) -> dict[str, Any]:
    """Return the values of an empty configuration under the keys that its family names.

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
    changed_configs = {key: _made(config, **{key: _more(table[key])}) for key in named & set(table)}
    if not changed_configs and not all(rule.sections for rule in family.attention):
        return {}
    if type(table.get("head_dim")) is int:
        changed_configs["head_dim"] = _made(config, head_dim=2 * table["head_dim"])
    moved = {
        key: _flat(changed_config.to_dict(), family)
        for key, changed_config in changed_configs.items()
        if changed_config
    }
    own_keys = {
        key: value
        for key, value in sorted(table.items())
        if all(
            changed_table.get(key) == value for name, changed_table in moved.items() if name != key
        )
    }
    values: dict[str, Any] = {}
    if has_counts:
        values = {
            key: value
            for key, value in own_keys.items()
            if key in counts and isinstance(value, int | list)
        }
    changed_configs = getattr(config, "attribute_map", {})
    names = {
        changed_table: key
        for changed_table, key in changed_configs.items()
        if key in _named(family) | counts
    }
    values |= {"names": names} if names else {}
    keys = _named(family) - counts
    lists = {
        "global_attention_blocks",
        "pos_att_type",
        *(key for rule in family.attention for key in rule.window),
    }
    if any(rule.rotary for rule in family.attention):
        keys |= LENGTHS
    # Of latent attention, each key is named.
    states_width = any(rule.layout in ("separate", "gated") for rule in family.attention)
    pattern = r"((?!linear|mamba|index)\w+_)?head_dim"
    widths = {
        key for key in own_keys if states_width and own_keys[key] and re.fullmatch(pattern, key)
    }
    values |= {
        key: value
        for key, value in own_keys.items()
        if key in keys | widths
        and isinstance(value, (int, float, list, tuple) if key in lists else (int, float))
    }
    layers = table.get("per_layer_config") or {}
    changed_table = {
        changed_config["head_dim"]
        for changed_config in layers.values()
        if "head_dim" in changed_config
    }
    return values | ({"global_head_dim": max(changed_table)} if changed_table else {})


def _more(number: Any) -> Any:
    return [2 * n for n in number] if isinstance(number, list) else 2 * number


def _flat(table: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The table, with rotary parameters under the keys that the family has for them."""
    flat = dict(table)
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
                flat[keys[0]] = value
    return flat


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
    the last layer (``forced``: for any setting), ``every`` the key that sets the length of the
    repetition, and ``after`` that of the first layer of the kind ``then``. Some count ``backward``.
    """

    def lists(**keys: Any) -> dict[int, list[str]]:
        made = {n: _made(config, num_hidden_layers=n, **keys) for n in range(1, DEEPEST)}
        layer_kinds = {n: getattr(built, "layer_types", None) for n, built in made.items()}
        return {n: kinds for n, kinds in layer_kinds.items() if kinds and len(kinds) == n}

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
        repeated = _repeated(lists(**{key: period + 1}))
        if repeated and len(repeated["repeat"]) == period + 1:
            rule["every"] = key
    kind_list = [rule["last"], *{*rule["repeat"]} - {rule["last"]}] if "last" in rule else []
    made = (
        _made(config, num_hidden_layers=len(kind_list), layer_types=[*kind_list])
        if kind_list
        else None
    )
    rule |= (
        {"forced": True} if getattr(made, "layer_types", kind_list)[-1:] != kind_list[-1:] else {}
    )
    return {"kinds": rule}


def _repeated(lists: Mapping[int, list[str]]) -> dict[str, Any] | None:
    """The shortest rule that gives these lists of that many kinds of layers."""
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
    nested = {
        kind: parameters for kind, parameters in plain.items() if isinstance(parameters, dict)
    }
    scaling: dict[str, Any] = {}
    own_by_kind = {
        kind: _own(parameters, [m[kind] for m in moved if m.get(kind)])
        for kind, parameters in nested.items()
    }
    if any(own_by_kind.values()):
        scaling["rope_parameters"] = {
            kind: parameters for kind, parameters in own_by_kind.items() if parameters
        }
    elif not nested and (flat := _own(plain, moved)):
        scaling["rope_parameters"] = flat
        if "rope_theta" in flat and isinstance(config.default_theta, int | float):
            scaling["rope_theta"] = config.default_theta
    if nested:
        scaled_parameters = _rotary(config, rope_scaling={"rope_type": "linear", "factor": 2.0})
        scaled = [
            kind for kind in nested if (scaled_parameters.get(kind) or {}).get("factor") == 2.0
        ]
        scaling["scaled"] = scaled
    return scaling


def _rotary(config: Any, **keys: Any) -> dict[str, Any]:
    parameters = getattr(_made(config, **keys), "rope_parameters", None)
    return parameters if isinstance(parameters, dict) else {}


def _own(table: Mapping[str, Any], moved: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rotary parameters of a kind of layers that are not plain or set elsewhere."""
    plain = {"rope_type": ("default", "axial"), "max_position_embeddings": table.values()}
    return {
        key: value
        for key, value in table.items()
        if isinstance(value, int | float | str)
        and key != "type"
        and value not in plain.get(key, ())
        and not any(
            key in moved_parameters and moved_parameters[key] != value for moved_parameters in moved
        )
    }


def _write(path: Path, tables: Mapping[str, Mapping[str, Any]]) -> None:
    lines = (line(kind, table) for kind, table in sorted(tables.items()))
    path.write_text(HEAD + "".join(lines), encoding="utf-8")


def line(kind: str, table: Mapping[str, Any]) -> str:
    """A line of one of the files."""
    return f"{json.dumps(kind)} = {_inline(table)}\n"


def _inline(value: Any) -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{ " + ", ".join(f"{key} = {_inline(entry)}" for key, entry in value.items()) + " }"


if __name__ == "__main__":
    main()
