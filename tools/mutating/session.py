"""Mutants of code in one session of pytest, which has collected all tests once.

Each mutant gets a process forked from it. There the functions that the mutant changes get their
new code, and its tests run, the cheapest first, until one fails. What runs while modules are
imported or tests are collected cannot be changed in this way: such a mutant is imported anew, in a
session that collects the files of its tests alone.
"""

from __future__ import annotations

import ast
import gc
import inspect
import math
import re
from collections import Counter, defaultdict
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from tools.mutating.processes import run_named
from tools.mutating.reach import tests_of_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pytest
    from tools.mutating.mutants import Mutant
    from tools.mutating.recording import LineRecord

# Recorded seconds of the tests that reach a mutant, of those of them that name it, and of others
# that name it, whose processes may reach it.
MOST = 12.0
FILES = 10  # of tests that a mutant meets that is imported anew
BODY = ast.FunctionDef | ast.AsyncFunctionDef
COMPOUND = (
    BODY
    | ast.ClassDef
    | ast.If
    | ast.For
    | ast.While
    | ast.With
    | ast.Try
    | ast.Match
    | ast.AsyncFor
    | ast.AsyncWith
)


class MutantPlace:
    """Place of a mutant: lines of its statement, and of the function around it."""

    def __init__(self, text: str, line: int) -> None:
        self.lines, self.function, self.name = range(line, line + 1), range(0), ""
        self._find(ast.parse(text).body, line)

    def _find(self, body: Sequence[ast.AST], line: int) -> None:
        for node in body:
            end = getattr(node, "end_lineno", None)
            if end is None:  # a case of match, whose statements have lines
                self._find(node.body, line)  # type: ignore[attr-defined]
                continue
            start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])  # type: ignore[attr-defined]
            if not start <= line <= end:
                continue
            if not isinstance(node, COMPOUND):
                self.lines = range(node.lineno, end + 1)  # type: ignore[attr-defined]
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                if not self.function and isinstance(targets[0], ast.Name):
                    self.name = targets[0].id
                return
            if isinstance(node, BODY | ast.ClassDef) and not self.function:
                self.name = node.name
            if isinstance(node, BODY) and line >= node.body[0].lineno and not self.function:
                self.function = range(node.body[0].lineno, end + 1)
            for part in ("body", "orelse", "handlers", "finalbody", "cases"):
                self._find(getattr(node, part, ()), line)


def choose(mutant: Mutant, record: LineRecord) -> tuple[list[str], bool]:
    """The tests that a mutant meets, in their order, and whether it must be imported anew."""
    text = mutant.path.read_text(encoding="utf-8")
    place = MutantPlace(text, mutant.line)
    file = mutant.path.as_posix()
    collected = record.collected.get(file, set())
    anew = not place.function or not collected.isdisjoint(place.lines)
    reaching = set()
    if place.function:
        reaching = record.reaching(file, place.lines) or record.reaching(file, place.function)
    chosen = _within(reaching, record)
    if anew:
        name_pattern = re.compile(rf"\b{re.escape(place.name)}\b") if place.name else None
        lines_with_name = [
            n
            for n, source_line in enumerate(text.split("\n"), 1)
            if name_pattern and name_pattern.search(source_line)
        ]
        all_lines = record.lines.get(file, {})
        chosen = chosen or _within(record.reaching(file, lines_with_name), record)
        chosen |= _within(record.reaching(file, all_lines) - chosen, record)
        counts = Counter(record.tests[n].partition("::")[0] for n in chosen)
        common_files = {source_line for source_line, _ in counts.most_common(FILES)}
        chosen = {n for n in chosen if record.tests[n].partition("::")[0] in common_files}
    rank_of_file = {file: n for n, file in enumerate(tests_of_code(mutant.path))}
    files = [rank_of_file.get(test.partition("::")[0]) for test in record.tests]
    named = {n for n, file in enumerate(files) if file is not None} - chosen
    nearest = _within(named & reaching, record, files)
    every = (chosen, nearest, _within(named - reaching, record))
    return [record.tests[n] for group in every for n in _ordered(group, record)], anew


def nearest_tests(items: Sequence[pytest.Item], mutant: Mutant, files: Sequence[str]) -> list[str]:
    """Tests of the files, in order of the files: first tests that name the mutated function."""
    name = MutantPlace(mutant.path.read_text(encoding="utf-8"), mutant.line).name
    rank_of_file = {file: rank for rank, file in enumerate(files)}

    def rank(item: pytest.Item) -> tuple[bool, int]:
        function = getattr(item, "function", None)
        source = inspect.getsource(function) if function else item.name
        return name not in source, rank_of_file[item.nodeid.partition("::")[0]]

    chosen = [item for item in items if item.nodeid.partition("::")[0] in rank_of_file]
    return [item.nodeid for item in sorted(chosen, key=rank)]


def _within(candidates: set[int], record: LineRecord, rank: Sequence[int | None] = ()) -> set[int]:
    """As many of these tests as may be run: of the least rank, then the cheapest."""
    total, within = 0.0, set()
    for n in sorted(candidates, key=lambda n: (rank[n] if rank else 0, record.seconds[n])):
        total += record.seconds[n]
        if total > MOST:
            break
        within.add(n)
    return within


def _ordered(numbers: set[int], record: LineRecord) -> list[int]:
    """The cheapest first; those that cost about the same by file, for the fixtures they share."""
    return sorted(numbers, key=lambda n: (math.ceil(math.log2(record.seconds[n] + 0.01)), n))


def exchanged(
    session: pytest.Session,
    mutants: Sequence[Mutant],
    meets: Callable[[Mutant, Callable[[Sequence[str], bool], int]], None],
) -> int:
    """Let mutants meet their tests, but for those that cannot be planted in memory."""
    gc.unfreeze()
    live = defaultdict(list)
    for referrer in gc.get_objects():
        if type(referrer) is FunctionType:  # not of proxies, which answer for others
            live[referrer.__code__.co_filename].append(referrer)
    gc.freeze()
    for mutant in mutants:
        changes = changed_code(mutant, live[str(session.config.rootpath / mutant.path)])
        if changes is None:
            continue

        def run(tests: Sequence[str], planted: bool, changes: Any = changes) -> int:
            for function, code in changes if planted else ():
                function.__code__ = code
            return run_named(session, tests)

        meets(mutant, run)
    return 0


def changed_code(
    mutant: Mutant, functions: Sequence[FunctionType]
) -> list[tuple[FunctionType, CodeType]] | None:
    """The functions in memory that a mutant changes, with their new code; None if that is not all.

    A file that no module is imported from has none: it is read when it is.
    """
    if not functions:
        return []
    name = functions[0].__code__.co_filename
    before = compile(mutant.path.read_text(encoding="utf-8"), name, "exec", dont_inherit=True)
    after = compile(mutant.text, name, "exec", dont_inherit=True)
    pairs = [*_paired(before, after)]
    outermost = [(old, new) for old, new, inner in pairs if not inner and not _same(old, new)]
    if not outermost or any(not old.co_flags & 1 for old, _ in outermost):
        return None  # of a class or a module
    by_code = defaultdict(list)
    for function in functions:
        by_code[_key(function.__code__)].append(function)
    changes = []
    for old, new, inner in pairs:
        if _same(old, new):
            continue
        functions = by_code[_key(old)]
        if (not functions and not inner) or any(
            f.__code__.co_freevars != new.co_freevars for f in functions
        ):
            return None
        changes += [(function, new) for function in functions]
    return changes


def _key(code: CodeType) -> tuple[str, bytes, int]:
    return code.co_qualname, code.co_code, max(n for _, _, n in code.co_lines() if n)


def _paired(
    old: CodeType, new: CodeType, inner: bool = False
) -> Iterator[tuple[CodeType, CodeType, bool]]:
    """Functions before and after, and whether they are within another; the module and classes."""
    pairs = [[c for c in code.co_consts if isinstance(c, CodeType)] for code in (old, new)]
    yield old, new, inner
    if len(pairs[0]) == len(pairs[1]):
        for code, counterpart in zip(*pairs, strict=True):
            yield from _paired(code, counterpart, inner or bool(old.co_flags & 1))


def _same(old: CodeType, new: CodeType) -> bool:
    """Return whether two codes do the same, apart from the content of classes and modules."""

    def said(code: CodeType) -> tuple[Any, ...]:
        inside = [c for c in code.co_consts if isinstance(c, CodeType)]
        constants = [(type(c), repr(c)) for c in code.co_consts if not isinstance(c, CodeType)]
        nested = [said(c) for c in inside] if code.co_flags & 1 else len(inside)
        return code.co_code, constants, nested, code.co_names, code.co_varnames, code.co_freevars

    return said(old) == said(new)
