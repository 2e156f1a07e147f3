"""Dataclasses from TOML tables; a key that is unknown, or of another type, is an error."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from wqk.errors import UnknownFamily

Table = TypeVar("Table")

# What a value of each type is called, and what TOML may give for it.
SCALARS: dict[Any, tuple[str, tuple[type, ...]]] = {
    str: ("a string", (str,)),
    str | None: ("a string", (str,)),
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
    str | float: ("a string or a number", (str, int, float)),
    dict[str, Any]: ("a table", (dict,)),
}


def parse(kind: type[Table], table: dict[str, Any], source: str) -> Table:
    """A dataclass from a table.

    Raises
    ------
    UnknownFamily
        A key is unknown or missing, or a value is of another type.

    Examples
    --------
    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Rule:
    ...     layers: int
    ...     query: tuple[str, ...] = ()
    >>> parse(Rule, {"layers": 2, "query": "q"}, "toy.toml")
    Rule(layers=2, query=('q',))
    >>> parse(Rule, {"layers": 2, "qeury": "q"}, "toy.toml")
    Traceback (most recent call last):
        ...
    wqk.errors.UnknownFamily: toy.toml: unknown key 'qeury'; did you mean 'query'?
    """
    known: dict[str, Any] = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            close = get_close_matches(key, known, 1)
            advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise UnknownFamily(f"{source}: unknown key {key!r}; {advice}")
    for key, f in known.items():
        if key not in table and f.default is MISSING and f.default_factory is MISSING:
            raise UnknownFamily(f"{source}: the key {key!r} is missing")
    hints = get_type_hints(kind)
    return kind(**{key: _value(hints[key], value, key, source) for key, value in table.items()})


def _value(hint: Any, value: Any, key: str, source: str) -> Any:
    """A value of the hinted type; a single one stands for a list of one."""
    if hint in SCALARS:
        name, types = SCALARS[hint]
        if not isinstance(value, types) or (isinstance(value, bool) and hint is not bool):
            raise UnknownFamily(f"{source}: {key!r} must be {name}, got {value!r:.60}")
        return float(value) if hint is float else value  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        many = value if isinstance(value, list) else [value]
        return tuple(_value(get_args(hint)[0], one, key, source) for one in many)
    table: Any = next((kind for kind in get_args(hint) if is_dataclass(kind)), hint)
    if not isinstance(value, dict):
        raise UnknownFamily(f"{source}: {key!r} must be a table, got {value!r:.60}")
    return parse(table, value, source)
