"""Faults that can be planted: in a family's file, and in Python code.

A mutant is a whole file with one change. Text for readers is left as it is: docstrings,
annotations, messages of errors, notes of families.
"""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Keys that name a family or speak to readers; which types it serves is another test's.
SPOKEN = {"name", "model_types", "note", "guess", "refusal"}
OTHER = {
    "half": "interleaved",
    "rms": "layer",
    "layer": "rms",
    "separate": "gated",
    "self": "cross",
    "sectioned": "grouped",
    "grouped": "sectioned",
    "encoder": "decoder",
    "decoder": "encoder",
    "vision": "text",
    "text": "vision",
    "qkv": "kqv",
    "conv1d": "sectioned",
    "cross": "self",
    "interleaved": "half",
}
# Keywords that change nothing where the rest is right, and the system writes UTF-8.
CAUTIOUS = {"strict", "encoding"}
KINDS = {"layout", "norm", "input_norm_kind", "order", "stack", "kind"}


@dataclass(frozen=True)
class Mutant:
    """A file with one change."""

    path: Path
    line: int
    what: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def data_mutants(path: Path, text: str) -> Iterator[Mutant]:
    """Keys of a TOML file left out, and their values changed."""
    lines = text.splitlines(keepends=True)
    starts = [n for n, line in enumerate(lines) if re.match(r"\w+ = ", line)]
    for start in starts:
        key = lines[start].split(" = ", 1)[0]
        if key in SPOKEN:
            continue
        end = start + 1
        while not _whole("".join(lines[start:end])):
            end += 1
        entry = "".join(lines[start:end])
        for change, replacement in [("left out", ""), *_changed(key, tomllib.loads(entry)[key])]:
            changed = "".join([*lines[:start], replacement, *lines[end:]])
            yield Mutant(path, start + 1, f"{key} {change}", changed)


def _whole(entry: str) -> bool:
    try:
        tomllib.loads(entry)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _changed(key: str, value: object) -> Iterator[tuple[str, str]]:
    """Other values of a key, in words and as its line."""
    match value:
        case bool():
            yield f"= {not value}", f"{key} = {str(not value).lower()}\n"
        case int() | float():
            number = 2 * value if value else 1.0
            yield f"= {number}", f"{key} = {number}\n"
        case str() if key in KINDS and value in OTHER:
            yield f"= {OTHER[value]!r}", f'{key} = "{OTHER[value]}"\n'
        case str() if re.fullmatch(r"not \S+", value):
            yield "turned round", f'{key} = "{value.removeprefix("not ")}"\n'
        case dict():
            for name in value if len(value) > 1 else ():
                remaining = {entry: content for entry, content in value.items() if entry != name}
                yield f"without {name!r}", f"{key} = {_toml(remaining)}\n"
        case [_, _, *_]:
            for n, item in enumerate(value):
                remaining = [*value[:n], *value[n + 1 :]]
                yield f"without {item!r}", f"{key} = {_toml(remaining)}\n"


def _toml(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case list():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case dict():
            return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return repr(value) if not isinstance(value, str) else f'"{value}"'


COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Add,
}


def code_mutants(path: Path, text: str) -> Iterator[Mutant]:
    """Comparisons, arithmetic, constants, conditions and returns of Python code, changed.

    Arguments, filters of comprehensions, and calls are left out.
    """
    lines = text.encode().splitlines(keepends=True)
    for node in _reached(ast.parse(text)):
        before = ast.unparse(node)
        for replacement in _others(node):
            first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
            head = lines[first][: node.col_offset]  # type: ignore[attr-defined]
            tail = lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
            after = ast.unparse(replacement)
            inside = after if isinstance(node, ast.stmt | ast.Constant) else f"({after})"
            changed = b"".join([*lines[:first], head, inside.encode(), tail, *lines[last + 1 :]])
            yield Mutant(path, first + 1, f"{before}  →  {after}", changed.decode())


def _reached(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that is computed, without what is only read."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.keyword) and child.arg in CAUTIOUS:
                continue
            if isinstance(child, ast.AST):
                yield child
                yield from _reached(child)


def _others(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARED:
            yield ast.Compare(left, [COMPARED[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in COMPUTED and not _says(left, right):
            yield ast.BinOp(left, COMPUTED[type(op)](), right)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1 if isinstance(value, int) else 2 * value or 1.0)
        case ast.Return(value) if value is not None and ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.Expr(ast.Call()):
            yield ast.Expr(ast.Constant(None))
        case ast.Call(function, arguments, keywords):
            for n, keyword in enumerate(keywords):
                if keyword.arg and keyword.arg not in CAUTIOUS:
                    yield ast.Call(function, arguments, keywords[:n] + keywords[n + 1 :])
            if len(arguments) > 1:
                yield ast.Call(function, arguments[:-1], keywords)
            elif arguments and not keywords and not isinstance(arguments[0], ast.Starred):
                yield arguments[0]
            elif not arguments and not keywords and isinstance(function, ast.Attribute):
                yield function.value
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            for n, loop in enumerate(node.generators):
                for k in range(len(loop.ifs)):
                    ifs = loop.ifs[:k] + loop.ifs[k + 1 :]
                    less = ast.comprehension(loop.target, loop.iter, ifs, loop.is_async)
                    parts = dict(ast.iter_fields(node))
                    every = [*node.generators[:n], less, *node.generators[n + 1 :]]
                    yield type(node)(**(parts | {"generators": every}))


def _says(*operands: ast.AST) -> bool:
    """Return whether an expression builds text."""
    return any(
        isinstance(o, ast.JoinedStr) or (isinstance(o, ast.Constant) and isinstance(o.value, str))
        for o in operands
    )
