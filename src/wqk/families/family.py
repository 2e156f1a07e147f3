"""Family files: parsed, completed by the family in ``like``, and found by model type."""

from __future__ import annotations

import os
import re
import threading
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import replace

from wqk._files import read_text
from wqk._typing import FilePath
from wqk.errors import UnknownFamily, did_you_mean
from wqk.families.model_types import default_values
from wqk.families.rules import AttentionRule, Family, RotaryKind, RotaryRule

# Characters of a family file; the shipped ones have at most 6,000.
LARGEST_FILE = 65_536


def parse_family(text: str, source: str) -> Family:
    """Return a family from TOML; `UnknownFamily` for invalid TOML or a violation of the schema.

    Examples
    --------
    >>> family = parse_family('''
    ... name = "toy"
    ... model_types = ["toy"]
    ... [[attention]]
    ... stack = "encoder"
    ... query = "layers.{layer}.q"
    ... key = "layers.{layer}.k"
    ... ''', "toy.toml")
    >>> family.attention[0].query
    ('layers.{layer}.q',)
    """
    table = _inherited(_toml(text, source), source)
    try:
        with _CONVERTING:
            family = msgspec.convert(_listed(table, Family), Family)
    except msgspec.ValidationError as error:
        raise UnknownFamily(f"{source}: {_with_advice(str(error))}") from None
    if not (family.attention or family.mixers or family.refusal):
        raise UnknownFamily(
            f"{source}: a family needs at least one [[attention]] table; expected one with 'query' "
            "and 'key', or with 'fused', got none; add it"
        )
    for name in family.mixers:
        if name not in _mixers():
            raise UnknownFamily(
                f"{source}: no mixer {name!r}; expected one of {', '.join(_mixers())}"
                f"{did_you_mean(name, _mixers())}"
            )
    rules = (*family.attention, *(_mixers()[name] for name in family.mixers))
    # The first type with defaults; configurations of other types have the defaults of their own.
    of_type = next(filter(default_values, family.model_types), "")
    if of_type:
        rules = tuple(replace(rule, model_type=of_type) for rule in rules)
    return replace(family, attention=rules)


@cache
def _mixers() -> Mapping[str, AttentionRule]:
    """Return the rules of attention without a softmax, by name."""
    file = resources.files("wqk.families") / "mixers.toml"
    named = _toml(file.read_text(encoding="utf-8"), file.name)
    for name, table in named.items():  # a table that another is like comes first
        named[name] = named.get(table.pop("like", ""), {}) | table
    return {
        name: msgspec.convert(_listed(table, AttentionRule), AttentionRule)
        for name, table in named.items()
    }


_types = cache(get_type_hints)

# Values of TOML, by the names that msgspec has for their types.
TYPES_OF_TOML = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}

# msgspec 0.22 crashes where two threads convert to one type for the first time.
_CONVERTING = threading.Lock()


def _listed(value: Any, kind: Any) -> Any:
    """Return a value of TOML with single entries replaced by lists, if the type is a list.

    Parameters
    ----------
    value
        The value from TOML.
    kind
        The type in the schema. Parts of a tuple, a dictionary and a record are visited, too.
    """
    if get_origin(kind) is tuple:
        entries = value if isinstance(value, list) else [value]
        return [_listed(entry, get_args(kind)[0]) for entry in entries]
    if not isinstance(value, dict):
        return value
    if get_origin(kind) is dict:
        return {key: _listed(entry, get_args(kind)[1]) for key, entry in value.items()}
    alternatives = get_args(kind) or [kind]  # a record, or a record or None
    records = [option for option in alternatives if hasattr(option, "__struct_fields__")]
    if not records:
        return value
    type_by_field = _types(records[0])
    return {key: _listed(entry, type_by_field.get(key)) for key, entry in value.items()}


def _with_advice(message: str) -> str:
    """Return a message of msgspec in words of family files; for an unknown key, with advice.

    Examples
    --------
    >>> _with_advice("Object contains unknown field `qeury` - at `$.attention[0]`")
    "unknown key 'qeury' in the first [[attention]]; did you mean 'query'?"
    >>> _with_advice("Expected `str`, got `int` - at `$.attention[1].window[1]`")
    "'window[1]' of [[attention]] 2: expected text, got a whole number"
    >>> _with_advice("Object missing required field `order` - at `$.attention[0].rotary`")
    "missing key 'order' in 'rotary' of the first [[attention]]"
    """
    problem, _, path = message.partition(" - at `$.")
    path = path.removesuffix("`")
    match = re.fullmatch(r"Object (contains unknown|missing required) field `(.*?)`", problem)
    if match is None:
        subject = f"{_place(path)}: " if path else ""
        return subject + _in_types_of_toml(problem[0].lower() + problem[1:])
    key = match[2]
    place = f" in {_place(path)}" if path else ""
    if match[1] == "missing required":
        return f"missing key {key!r}{place}"
    known_keys = _table_at(path).__struct_fields__
    advice = did_you_mean(key, known_keys) or f"; known are {', '.join(known_keys)}"
    return f"unknown key {key!r}{place}{advice}"


def _table_at(path: str) -> type[msgspec.Struct]:
    """Return the schema of the table at a path of msgspec."""
    if ".rotary.kinds[" in path:
        return RotaryKind
    if ".rotary" in path:
        return RotaryRule
    return AttentionRule if path else Family


def _place(path: str) -> str:
    """Describe the place at a path of msgspec.

    Examples
    --------
    >>> _place("attention[0].rotary"), _place("attention[2]"), _place("model_types[0]")
    ("'rotary' of the first [[attention]]", '[[attention]] 3', "'model_types[0]'")
    """
    match = re.fullmatch(r"attention\[(\d+)\](?:\.(.*))?", path)
    if match is None:
        return repr(path)
    number = int(match[1]) + 1
    table = "the first [[attention]]" if number == 1 else f"[[attention]] {number}"
    return f"{match[2]!r} of {table}" if match[2] else table


def _in_types_of_toml(problem: str) -> str:
    """Return a message with types of Python replaced by words for values of TOML.

    Examples
    --------
    >>> _in_types_of_toml("expected `str`, got `int`")
    'expected text, got a whole number'
    >>> _in_types_of_toml("expected `object | null`, got `bool`")
    'expected a table, got true or false'
    """
    return re.sub(r"`([a-z |]+)`", lambda match: _in_words(match[1]), problem)


def _in_words(types: str) -> str:
    """Return names of types in words; TOML has no null."""
    names = [name for name in types.split(" | ") if name != "null"]
    return " or ".join(TYPES_OF_TOML.get(name, name) for name in names)


def _toml(text: str, source: str) -> dict[str, Any]:
    """Return the tables of a text of TOML; `UnknownFamily` for an invalid or dangerous text."""
    nested = re.search(r"(\.\s*[\w\"'-]+\s*){50}", text)
    if len(text) > LARGEST_FILE or nested or re.search(r"\S{1000}", text):
        raise UnknownFamily(
            f"{source}: too long or too deeply nested for a family file; expected at most "
            f"{LARGEST_FILE:,} characters, got {len(text):,}; split it"
        )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UnknownFamily(
            f"{source}: too deeply nested for a family file; write its tables side by side"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UnknownFamily(f"{source}: not valid TOML ({error}); correct it") from None


def _inherited(table: dict[str, Any], source: str) -> dict[str, Any]:
    """Return a table with all inherited keys of the shipped family in ``like``.

    ``[change]`` replaces keys of every attention of the inherited family; ``[change.self]`` and
    ``[change.cross]`` replace keys of the attention of one kind. Other keys of the table replace
    keys of the family: ``model_types``, or ``[[attention]]`` tables for all attention.

    Examples
    --------
    >>> gemma = {"like": "gemma3-text", "change": {"rotary": {"order": "interleaved"}}}
    >>> _inherited(gemma, "toy.toml")["attention"][0]["rotary"]["order"]
    'interleaved'
    """
    if isinstance(table.get("attention"), list):
        table["attention"] = _with_earlier_tables(table["attention"], source)
    like, changes = table.pop("like", None), table.pop("change", {})
    if like is None and not changes:
        return table
    if not isinstance(like, str) or like not in _shipped():
        advice = did_you_mean(like, _shipped()) if isinstance(like, str) else ""
        raise UnknownFamily(
            f"{source}: 'like' must name a shipped family, got {like!r:.60}"
            f"{advice or '; see wqk.families.families()'}"
        )
    if not isinstance(changes, dict):
        raise UnknownFamily(
            f"{source}: 'change' must be a table, got {changes!r:.60}; write [change]"
        )
    base = _inherited(_toml(_shipped()[like], f"{like}.toml"), f"{like}.toml")
    model_type = next(iter(base.get("model_types", ())), "")
    by_kind = {kind: changes.pop(kind, {}) for kind in ("self", "cross")}
    for kind, table_of_kind in by_kind.items():
        if not isinstance(table_of_kind, dict):
            raise UnknownFamily(
                f"{source}: 'change.{kind}' must be a table, got {table_of_kind!r:.60}; write "
                f"[change.{kind}]"
            )
    rules = []
    for rule in base.get("attention", ()):
        further = by_kind.get(rule.get("kind", "self"), {})
        rules.append({"model_type": model_type} | _merged(rule, changes | further))
    return {**base, "attention": rules, **table}


def _with_earlier_tables(rules: list[Any], source: str) -> list[Any]:
    """Return the tables of attention, each with the keys of the earlier table in ``like``.

    Examples
    --------
    >>> _with_earlier_tables([{"query": "q", "key": "k"}, {"like": 0, "key": "c"}], "toy.toml")[1]
    {'query': 'q', 'key': 'c'}
    """
    whole: list[Any] = []
    for rule in rules:
        like = rule.pop("like", None) if isinstance(rule, dict) else None
        if like is not None and (type(like) is not int or like not in range(len(whole))):
            raise UnknownFamily(
                f"{source}: 'like' of a table must be the number of one before it; expected a "
                f"number below {len(whole)}, got {like!r:.60}; the first table has the number 0"
            )
        whole.append(rule if like is None else _merged(whole[like], rule))
    return whole


def _merged(rule: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a rule with changes; nested tables are merged key by key."""
    merged = rule | changes
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(rule.get(key), dict):
            merged[key] = rule[key] | value
    return merged


@cache
def _shipped() -> Mapping[str, str]:
    """Return the texts of all family files of the package, by name."""
    folder: Traversable = resources.files("wqk.families") / "data"
    texts = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            texts[file.name.removesuffix(".toml")] = file.read_text(encoding="utf-8")
    return texts


@cache
def shipped_family(name: str) -> Family:
    """Return the family of the package with a name; `KeyError` for an unknown name.

    Examples
    --------
    >>> shipped_family("gpt2").attention[0].layout
    'conv1d'
    """
    return parse_family(_shipped()[name], f"{name}.toml")


@cache
def families() -> Mapping[str, Family]:
    """Return all families of the package, by name."""
    return {name: shipped_family(name) for name in _shipped()}


def load_family(path: FilePath) -> Family:
    """Return a family of the package by name, or a family from a file."""
    if isinstance(path, str) and path in _shipped():
        return shipped_family(path)
    name = os.fspath(path)
    if name == Path(path).stem and not Path(path).exists():
        raise UnknownFamily(
            f"{name}: no known family, no file"
            f"{did_you_mean(name, _shipped()) or '; see wqk.families.families(), or write a file'}"
        )
    family = parse_family(read_text(Path(path), UnknownFamily), name)
    exact_rules = [replace(rule, exact=True) for rule in family.attention]
    return replace(family, attention=tuple(exact_rules))


def family_of_type(model_type: object) -> Family | None:
    """Return the family that lists a model type; None without such a family."""
    if not isinstance(model_type, str):
        return None
    for name, text in _shipped().items():
        if f'"{model_type}"' not in text:
            continue
        family = shipped_family(name)
        if model_type in family.model_types:
            return family
    return None
