"""Dataclasses from TOML tables; a key that is unknown, or of another type, is an error."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from wqk.errors import UnknownFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def prefixed(prefix: str, *only: str) -> dict[str, Any]:
    """Metadata of a field that is a dataclass of its own, whose keys stand in the same table.

    Parameters
    ----------
    prefix
        What its keys begin with. The field ``names`` has the bare prefix as its key, and a field
        with ``key`` in its metadata that one.
    *only
        The fields that the table may set; all of them where none is named.
    """
    return {"prefix": prefix, "only": only}


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
    known = keys_of(kind)
    for key in table:
        if key not in known:
            close = get_close_matches(key, known, 1)
            advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise UnknownFamily(f"{source}: unknown key {key!r}; {advice}")
    built: Table = _build(kind, table, "", source)
    return built


def keys_of(kind: type) -> list[str]:
    """Every key that a table of this kind may have."""
    return list(_keys(kind, "", ()))


def _keys(kind: Any, prefix: str, only: tuple[str, ...]) -> Iterator[str]:
    for f in fields(kind):
        if "prefix" in f.metadata:
            yield from _keys(f.default_factory, f.metadata["prefix"], f.metadata["only"])
        elif not only or f.name in only:
            yield key_of(f, prefix)


def key_of(f: Field[Any], prefix: str) -> str:
    """The key of a field in its table."""
    joined = prefix if f.name == "names" else f"{prefix}_{f.name}".lstrip("_")
    return str(f.metadata.get("key", joined))


def _build(kind: Any, table: dict[str, Any], prefix: str, source: str) -> Any:
    hints, values = get_type_hints(kind), {}
    for f in fields(kind):
        key = key_of(f, prefix)
        if "prefix" in f.metadata:
            values[f.name] = _build(f.default_factory, table, f.metadata["prefix"], source)
        elif key in table:
            values[f.name] = _value(hints[f.name], table[key], key, source)
        elif f.default is MISSING and f.default_factory is MISSING:
            raise UnknownFamily(f"{source}: the key {key!r} is missing")
    return kind(**values)


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
