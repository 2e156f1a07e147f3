"""Expressions of family files: keys of a configuration, and numbers and conditions made of keys.

The grammar is a small part of Python's, read by `ast.parse`. An expression of numbers is evaluated
by `evaluate`, a condition by `holds`.

=================================  ================================================================
``num_attention_heads``            the value of a key; a dot leads into a nested part
``hidden_size // 64``              ``+``, ``-``, ``*``, ``//`` and ``**``; null if an operand is
``mamba_d_state | state_size``     the first operand that is not null
``1 if multi_query else None``     a choice by a condition
``rope and not alibi``             ``and``, ``or`` and ``not``; a key is true as in Python
``attn_type == 'uni'``             equal, whatever the case of letters; also ``!=``
``'c2p' in pos_att_type``          an entry of a list, or of a text such as ``c2p|p2c``
=================================  ================================================================
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

# Returns the value of a key; None if the configuration does not set the key.
Lookup = Callable[[str], Any]

PLAIN_KEY = re.compile(r"[^\W\d]\w*(\.\w+)*")
LONGEST = 200  # characters
GRAMMAR = "keys and numbers with + - * // ** |, and conditions with if else and or not == != in"

OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
COMPARISONS = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
TRUTH_VALUES = re.compile("true|false|yes|no|on|off|0|1|none|null", re.IGNORECASE)


class NotANumber(ValueError):
    """A key has a value that arithmetic does not accept.

    Attributes
    ----------
    key
        The key.
    expected
        A description of the values that the key may have.
    value
        The key's value.
    """

    def __init__(self, key: str, expected: str, value: Any) -> None:
        super().__init__(key)
        self.key, self.expected, self.value = key, expected, value


@cache
def parse(text: str) -> ast.expr:
    """Return the syntax tree of an expression.

    Raises
    ------
    ValueError
        The text is not an expression of this grammar. The message names the wrong part.

    Examples
    --------
    >>> parse("hidden_size // (2")
    Traceback (most recent call last):
    ValueError: 'hidden_size // (2' is not an expression: '(' was never closed
    >>> parse("max(a, b)")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: 'max(a, b)': 'max(a, b)' is not part of the grammar of family files; expected ...
    """
    if PLAIN_KEY.fullmatch(text):  # also keys equal to Python's keywords, such as `lambda`
        return ast.Name(text)
    if len(text) > LONGEST:
        raise ValueError(
            f"{text[:40]!r}… is longer than {LONGEST} characters; got {len(text)}; shorten it"
        )
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise ValueError(f"{text!r} is not an expression: {reason}") from None
    for node in _nodes(tree):
        if not _is_allowed(node):
            part = ast.unparse(node)
            advice = ""
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
                quotient = ast.unparse(ast.BinOp(node.left, ast.FloorDiv(), node.right))
                advice = f"; write {quotient!r}"
            raise ValueError(
                f"{text!r}: {part!r} is not part of the grammar of family files; expected {GRAMMAR}"
                f"{advice}"
            )
    return tree


def _nodes(tree: ast.expr) -> Iterator[ast.expr]:
    """Yield all expressions in a tree, and the tree; a dotted key counts once."""
    yield tree
    if not isinstance(tree, ast.Attribute):
        for child in ast.iter_child_nodes(tree):
            if isinstance(child, ast.expr):
                yield from _nodes(child)


def _is_allowed(node: ast.expr) -> bool:
    """Return whether a node, without its children, belongs to the grammar."""
    match node:
        case ast.Name() | ast.IfExp() | ast.BoolOp():
            return True
        case ast.Attribute():
            return PLAIN_KEY.fullmatch(ast.unparse(node)) is not None
        case ast.Constant(value=value):
            return value is None or isinstance(value, int | float | str)
        case ast.UnaryOp(op=op):
            return isinstance(op, ast.Not | ast.USub)
        case ast.BinOp(op=ast.Pow(), right=power):
            return isinstance(number_of(power), int | float)
        case ast.BinOp(op=op):
            return type(op) in OPERATIONS or isinstance(op, ast.BitOr)
        case ast.Compare(ops=[op]):
            return isinstance(op, COMPARISONS)
    return False


def number_of(node: ast.expr) -> int | float | None:
    """Return the value of a node that is a literal number; None for other nodes."""
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = number_of(operand)
            return None if number is None else -number
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int() | float() as value):
            return value
    return None


def keys_in(text: str) -> set[str]:
    """Return the keys that an expression reads, including keys of conditions.

    Examples
    --------
    >>> sorted(keys_in("window // 2 + 1 if is_encoder and rope.kind == 'x' else None"))
    ['is_encoder', 'rope.kind', 'window']
    """
    nodes = (node for node in _nodes(parse(text)) if isinstance(node, ast.Name | ast.Attribute))
    return {_key(node) for node in nodes}


def _key(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else ast.unparse(node)


def evaluate(text: str, values: Lookup, switches: Lookup) -> Any:
    """Return the value of an expression; None if a required key is not set.

    Parameters
    ----------
    text
        The expression.
    values
        Function that returns the values of keys in arithmetic.
    switches
        Function that returns the values of keys in conditions.

    Raises
    ------
    NotANumber
        A key of a sum, a product, a quotient or a power is not a number, or a divisor is not
        positive.

    Examples
    --------
    >>> config = {"hidden_size": 512, "heads": None, "wide": True}
    >>> evaluate("heads | hidden_size // 64", config.get, config.get)
    8
    >>> evaluate("1 if not wide else hidden_size ** -0.5", config.get, config.get)
    0.04419417382415922
    """
    return _value(parse(text), values, switches)


def _value(node: ast.expr, values: Lookup, switches: Lookup) -> Any:
    """Return the value of a node of arithmetic; see `evaluate`."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            return values(_key(node))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _value(body if _holds(test, switches) else orelse, values, switches)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            number = _operand(operand, values, switches)
            return None if number is None else -number
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            value = _value(left, values, switches)
            return _value(right, values, switches) if value is None else value
        case ast.BinOp(op=op, left=left, right=right):
            return _computed(node, op, left, right, values, switches)
    return _holds(node, switches)


def _computed(
    node: ast.expr,
    op: ast.operator,
    left: ast.expr,
    right: ast.expr,
    values: Lookup,
    switches: Lookup,
) -> Any:
    """Return the result of an operation of arithmetic; None if an operand is not set."""
    left_value = _operand(left, values, switches)
    right_value = _operand(right, values, switches)
    if left_value is None or right_value is None:
        return None
    if isinstance(op, ast.FloorDiv) and right_value <= 0:
        raise NotANumber(ast.unparse(right), "a positive whole number", right_value)
    try:
        return OPERATIONS[type(op)](left_value, right_value)
    except (ArithmeticError, ValueError):
        raise NotANumber(ast.unparse(node), "a finite number", left_value) from None


def _operand(node: ast.expr, values: Lookup, switches: Lookup) -> Any:
    """Return the value of an operand as a number; None if the value is not set."""
    value = _value(node, values, switches)
    if value is not None and type(value) not in (int, float):
        raise NotANumber(ast.unparse(node), "a number", value)
    return value


def holds(condition: str, switches: Lookup) -> bool:
    """Return whether a condition holds; an empty condition is true.

    Raises
    ------
    NotANumber
        A switch is a text such as ``"false"``, which is true in Python.

    Examples
    --------
    >>> config = {"clip": 8.0, "alibi": False, "pos_att_type": "p2c|c2p", "attn_type": "Uni"}
    >>> holds("clip and not alibi", config.get), holds("alibi or gone", config.get)
    (True, False)
    >>> holds("'c2p' in pos_att_type", config.get), holds("attn_type == 'uni'", config.get)
    (True, True)
    """
    return not condition or _holds(parse(condition), switches)


def _holds(node: ast.expr, switches: Lookup) -> bool:
    """Return whether the condition of a node holds; see `holds`."""
    match node:
        case ast.BoolOp(op=ast.And(), values=terms):
            return all(_holds(term, switches) for term in terms)
        case ast.BoolOp(values=terms):
            return any(_holds(term, switches) for term in terms)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _holds(operand, switches)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            left_value = _value(left, switches, switches)
            right_value = _value(right, switches, switches)
            return _compared(op, left_value, right_value)
    value = _value(node, switches, switches)
    if isinstance(value, str) and TRUTH_VALUES.fullmatch(value):
        raise NotANumber(ast.unparse(node), "true or false", value)
    return bool(value)


def _compared(op: ast.cmpop, left: Any, right: Any) -> bool:
    """Return the result of one of `COMPARISONS`; comparisons of texts ignore case."""
    if isinstance(op, ast.In):
        return _contains(right, left)
    if isinstance(op, ast.NotIn):
        return not _contains(right, left)
    is_equal = bool(_folded(left) == _folded(right))
    return is_equal if isinstance(op, ast.Eq) else not is_equal


def _contains(entries: Any, entry: Any) -> bool:
    """Return whether a list has an entry; texts such as ``c2p|p2c`` are lists."""
    if isinstance(entries, str):
        entries = re.split(r" *\| *", entries)
    return isinstance(entries, list) and _folded(entry) in map(_folded, entries)


def _folded(value: Any) -> Any:
    """Return a text in lower case; other values unchanged."""
    return value.lower() if isinstance(value, str) else value
