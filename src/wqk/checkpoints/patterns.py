r"""PEFT's patterns of module names, matched in linear time.

PEFT takes any regular expression, and a hostile one would keep Python's matcher busy for years.
What configurations hold are names, and simple expressions: single characters (``\d``, ``[qk]``,
``.``), groups with alternatives, and repetitions of these that are not nested. Here all places that
a pattern may have reached in a name advance together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from functools import cache
from typing import NamedTuple

from wqk.errors import CheckpointError, shortened

# What is longer than this is no adapter's.
LONGEST_PATTERN, LONGEST_NAME, MOST_WORK = 500, 500, 5_000_000

LITERAL = re.compile(r"[\w.-]+")
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|[()|*+?]|[^()|*+?{}\[\]\\^$]", re.DOTALL)


class Repeated(NamedTuple):
    """One character of a class, or one of several sequences, a number of times."""

    once: Callable[[str], bool] | tuple[tuple[Repeated, ...], ...]
    optional: bool
    many: bool


Sequences = tuple[tuple[Repeated, ...], ...]


class Unreadable(ValueError):
    """A pattern that is not one of the simple ones."""


def first_matching(patterns: Collection[str], modules: Collection[str]) -> dict[str, str]:
    r"""For each module's name the first pattern that matches it, or what follows one of its dots.

    Raises `CheckpointError` for a pattern that is not a simple one, or if there are too many.

    Examples
    --------
    >>> first_matching(["proj", "q_proj", "layers.*"], ["layers.0.q_proj", "layers.0.k_proj"])
    {'layers.0.q_proj': 'q_proj', 'layers.0.k_proj': 'layers.*'}
    >>> first_matching([r"layers\.\d+\.[qk]_proj"], ["model.layers.12.k_proj"])
    {'model.layers.12.k_proj': 'layers\\.\\d+\\.[qk]_proj'}
    >>> first_matching(["^layers.0.(q|k)_proj"], ["model.layers.0.q_proj"])
    {}
    """
    work = sum(1 if LITERAL.fullmatch(pattern) else 10 + len(pattern) for pattern in patterns)
    if work * len(modules) > MOST_WORK:
        raise CheckpointError(
            f"{len(patterns)} patterns for {len(modules)} modules are too many to be compared"
        )
    matchers = {pattern: _matcher(pattern) for pattern in patterns}
    found = (
        (module, next((p for p, matches in matchers.items() if matches(module)), None))
        for module in modules
    )
    return {module: pattern for module, pattern in found if pattern is not None}


def _matcher(pattern: str) -> Callable[[str], bool]:
    if LITERAL.fullmatch(pattern):
        literal = re.compile(rf"(?:.*\.)?{pattern}", re.DOTALL)
        return lambda module: literal.fullmatch(module) is not None
    try:
        from_start, sequences = _parsed(pattern)
    except Unreadable:
        raise CheckpointError(
            f"the pattern {shortened(pattern, 80)!r} is not one that is read: a name, or "
            "characters, classes, and groups of alternatives, each perhaps with *, + or ?, without "
            "nesting"
        ) from None

    def matches(module: str) -> bool:
        if len(module) > LONGEST_NAME:
            raise CheckpointError(f"{shortened(module, 80)}: too long a name to be matched")
        dots = () if from_start else (at + 1 for at, c in enumerate(module) if c == ".")
        return len(module) in _after_any(sequences, module, frozenset((0, *dots)))

    return matches


def _parsed(pattern: str) -> tuple[bool, Sequences]:
    """Whether a pattern is bound to the start of a name, and its alternatives."""
    if len(pattern) > LONGEST_PATTERN:
        raise Unreadable
    body, at = pattern.removeprefix("^"), 0
    body = body[:-1] if body.endswith("$") and not body.endswith(r"\$") else body
    pieces = []
    while at < len(body):
        match = PIECE.match(body, at)
        if match is None:
            raise Unreadable
        pieces.append(match[0])
        at = match.end()
    pieces.reverse()
    sequences = _alternatives(pieces, depth=0)
    if pieces or (len(sequences) > 1 and body != pattern):  # an anchor of one alternative alone
        raise Unreadable
    return pattern.startswith("^"), sequences


def _alternatives(pieces: list[str], depth: int) -> Sequences:
    """The alternatives up to a closing parenthesis or the end; takes their pieces off the list."""
    if depth > 20:
        raise Unreadable
    found: list[tuple[Repeated, ...]] = []
    sequence: list[Repeated] = []
    while pieces and pieces[-1] != ")":
        piece = pieces.pop()
        if piece == "|":
            found.append(tuple(sequence))
            sequence = []
            continue
        once: Callable[[str], bool] | Sequences
        if piece in ("(", "(?:"):
            once = _alternatives(pieces, depth + 1)
            if not pieces:
                raise Unreadable
            pieces.pop()
        elif piece in ("*", "+", "?"):
            raise Unreadable
        else:
            once = _character(piece)
        times = pieces.pop() if pieces and pieces[-1] in ("*", "+", "?") else ""
        if times in ("*", "+") and isinstance(once, tuple) and _repeats(once):
            raise Unreadable
        sequence.append(Repeated(once, times in ("*", "?"), times in ("*", "+")))
    return (*found, tuple(sequence))


def _repeats(sequences: Sequences) -> bool:
    """Whether something in these may occur any number of times."""
    return any(
        part.many or (isinstance(part.once, tuple) and _repeats(part.once))
        for sequence in sequences
        for part in sequence
    )


def _character(piece: str) -> Callable[[str], bool]:
    if piece[0] == "\\" and piece[1].isalnum() and piece[1] not in "dwsDWS":
        raise Unreadable  # a place rather than a character, or a reference back
    if len(piece) == 1 and piece != ".":
        return piece.__eq__
    try:
        matcher = re.compile(piece)
    except re.error:
        raise Unreadable from None
    return cache(lambda character: matcher.fullmatch(character) is not None)


def _after_any(sequences: Sequences, text: str, places: frozenset[int]) -> frozenset[int]:
    """Where a match of one of the sequences may end that begins at one of these places."""
    ends: set[int] = set()
    for sequence in sequences:
        reached = places
        for part in sequence:
            reached = _after(part, text, reached)
        ends |= reached
    return frozenset(ends)


def _after(part: Repeated, text: str, places: frozenset[int]) -> frozenset[int]:
    ends: set[int] = set(places) if part.optional else set()
    new = places
    while new:
        if isinstance(part.once, tuple):
            reached = _after_any(part.once, text, new)
        else:
            reached = frozenset(at + 1 for at in new if at < len(text) and part.once(text[at]))
        new = reached - ends
        ends |= reached
        if not part.many:
            break
    return frozenset(ends)
