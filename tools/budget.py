"""How much there is to read: counts lines and files, and keeps them from growing.

``python -m tools.budget`` prints the counts beside their ceilings in ``tools/budget.toml``;
``--write`` makes the present counts the ceilings, rounded up. ``tests/test_architecture.py``
compares the two: a change that needs more says so by raising a ceiling, one that needs less lowers
it.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILINGS = ROOT / "tools" / "budget.toml"
SILENT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
}  # fmt: skip

# Prints the files of wqk of which a scan calls a function.
SCAN = """
import sys, threading
seen = set()
def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_flags & 1:  # of a function, not a class or a module
        seen.add(frame.f_code.co_filename)
import wqk
from wqk.cli.main import command
threading.setprofile(profile)
sys.setprofile(profile)
command(["scan", str(wqk.demo_model("encoder"))], standalone_mode=False)
sys.setprofile(None)
print(sum("/wqk/" in name for name in seen))
"""


def code_lines(source: str) -> int:
    '''Lines of code: without imports, docstrings, comments and blank lines.

    Examples
    --------
    >>> code_lines('import os\\n\\n\\ndef f():\\n    """Text."""\\n    # Why.\\n    return 1\\n')
    2
    '''
    apart: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            apart.update(range(node.lineno, (node.end_lineno or 0) + 1))
        is_documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, is_documented) and ast.get_docstring(node, clean=False) is not None:
            apart.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - apart)


def small_helpers(files: list[Path]) -> list[str]:
    """Private functions under five lines that are named once: they could stand inline."""
    trees = {file: ast.parse(file.read_text("utf-8")) for file in files}
    named: Counter[str] = Counter()
    called: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                named[_last(node)] += 1
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called.add(_last(node.func))
    return [
        f"{file.relative_to(ROOT)}: {node.name}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("_")
        and not node.name.endswith("__")
        and not node.decorator_list
        and named[node.name] == 1
        and node.name in called
        and node.body[-1].end_lineno - node.body[ast.get_docstring(node) is not None].lineno < 4
    ]


def _last(node: ast.Name | ast.Attribute) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr


def counts() -> dict[str, int]:
    """All that has a ceiling."""
    instrument, laboratory, tests = (
        sorted((ROOT / folder).rglob("*.py")) for folder in ("src/wqk", "src/wqk_lab", "tests")
    )
    lines: Counter[str] = Counter()
    for file in instrument:
        room = file.relative_to(ROOT / "src" / "wqk").parts[0].removesuffix(".py")
        lines["shared" if room.startswith("_") else room] += code_lines(file.read_text("utf-8"))
    scan = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, check=True)
    return {
        **{f"wqk.{room}": lines[room] for room in sorted(lines)},
        "wqk": sum(lines.values()),
        "wqk_lab": sum(code_lines(file.read_text("utf-8")) for file in laboratory),
        "tests": sum(code_lines(file.read_text("utf-8")) for file in tests),
        "files of wqk": len(instrument),
        "files that a scan passes through": int(scan.stdout.split()[-1]),
        "small helpers called once": len(small_helpers([*instrument, *laboratory])),
    }


def ceilings() -> dict[str, int]:
    """What is allowed at most."""
    return tomllib.loads(CEILINGS.read_text("utf-8"))


if __name__ == "__main__":
    found = counts()
    if "--helpers" in sys.argv:
        print(*small_helpers(sorted((ROOT / "src").rglob("*.py"))), sep="\n")
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
