"""How much there is to read: counts lines and files, and keeps them from growing.

``python -m tools.budget`` prints the counts beside their ceilings in ``tools/budget.toml``;
``--write`` makes the present counts the ceilings, rounded up, ``--scan`` and ``--helpers`` name
the files that a scan passes through, and the small helpers called once.
``tests/test_architecture.py`` compares the two: a change that needs more says so by raising a
ceiling, one that needs less lowers it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = ROOT / "tools" / "budget.toml"

# Prints the files of wqk of which a scan calls a function.
SCAN = """
import sys, threading
seen = set()
def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1:  # of a function, not a class or a module
        seen.add(frame.f_code.co_filename)
import wqk
from wqk.cli.main import command
ref = str(wqk.demo_model("encoder"))
threading.setprofile(profile)
sys.setprofile(profile)
command(["scan", ref], standalone_mode=False)
sys.setprofile(None)
print(*sorted(name.split("/wqk/")[1] for name in seen if "/wqk/" in name))
"""


def code_lines(source: str) -> int:
    '''Lines of code: without imports, docstrings, comments and blank lines.

    Examples
    --------
    >>> code_lines('import os\\n\\n\\ndef f():\\n    """Text."""\\n    # Why.\\n    return 1\\n')
    2
    '''
    apart: set[int] = set()
    text: set[int] = set()  # of more than one line, in which blank ones and signs count
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            apart.update(_span(node))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            text.update(_span(node))
        is_documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, is_documented) and ast.get_docstring(node, clean=False) is not None:
            apart.update(_span(node.body[0]))
    lines = enumerate(map(str.strip, source.split("\n")), start=1)
    return len(({n for n, line in lines if line and line[0] != "#"} | text) - apart)


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _span(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or 0) + 1)


def small_helpers(files: list[Path]) -> list[str]:
    """Private functions under five lines that are named once: they could stand inline."""
    short: list[tuple[Path, str]] = []
    named: Counter[str] = Counter()
    called: set[str] = set()
    for file in files:
        for node in ast.walk(_parsed(file.read_text("utf-8"))):
            if isinstance(node, ast.Name | ast.Attribute):
                named[_last(node)] += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called.add(_last(node.func))
            elif isinstance(node, ast.FunctionDef) and _is_small(node):
                short.append((file, node.name))
    return [
        f"{file.relative_to(ROOT)}: {name}"
        for file, name in short
        if named[name] == 1 and name in called
    ]


def _is_small(node: ast.FunctionDef) -> bool:
    """Whether a function is private, without decorators, and of fewer than five lines."""
    first = node.body[ast.get_docstring(node) is not None :][:1]
    return (
        node.name.startswith("_")
        and not node.name.endswith("__")
        and not node.decorator_list
        and bool(first)
        and (node.body[-1].end_lineno or 0) - first[0].lineno < 4
    )


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def scanned() -> list[str]:
    """The files of wqk of which a scan calls a function."""
    done = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


def counts() -> dict[str, int]:
    """All that has a ceiling."""
    instrument, laboratory, tests = (
        sorted((ROOT / folder).rglob("*.py")) for folder in ("src/wqk", "src/wqk_lab", "tests")
    )
    lines: Counter[str] = Counter()
    for file in instrument:
        room = file.relative_to(ROOT / "src" / "wqk").parts[0].removesuffix(".py")
        lines["shared" if room.startswith("_") else room] += code_lines(file.read_text("utf-8"))
    return {
        **{f"wqk.{room}": lines[room] for room in sorted(lines)},
        "wqk": sum(lines.values()),
        "wqk_lab": sum(code_lines(file.read_text("utf-8")) for file in laboratory),
        "tests": sum(code_lines(file.read_text("utf-8")) for file in tests),
        "files of wqk": len(instrument),
        "files that a scan passes through": len(scanned()),
        "small helpers called once": len(small_helpers([*instrument, *laboratory])),
    }


def ceilings() -> dict[str, int]:
    """What is allowed at most."""
    return tomllib.loads(CEILINGS.read_text("utf-8"))


if __name__ == "__main__":
    found = counts()
    if "--helpers" in sys.argv:
        print(*small_helpers(sorted((ROOT / "src").rglob("*.py"))), sep="\n")
    if "--scan" in sys.argv:
        print(*scanned(), sep="\n")
    if "--write" in sys.argv:
        # Rounded up, so that not every change moves a ceiling.
        steps = {
            name: 1000 if n >= 10_000 else 100 if n >= 200 else 10 for name, n in found.items()
        }
        rounded = {name: -(-n // steps[name]) * steps[name] for name, n in found.items()}
        lines = "".join(f'"{name}" = {count}\n' for name, count in rounded.items())
        CEILINGS.write_text(f"# Written by python -m tools.budget --write.\n{lines}", "utf-8")
    most = ceilings()
    for name, count in found.items():
        print(f"{name:34}{count:>8,}  of {most.get(name, 0):,}")
