"""Write the docstrings of Python's standard library as JSON Lines: a text that is always at hand.

::

    python examples/write_docstrings.py docstrings.jsonl

A document is a module.
"""

import argparse
import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from wqk._files import write_atomically

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib"}


def modules(library: Path) -> Iterator[Path]:
    """The library's files, in order, without tests and without what was installed."""
    for path in sorted(library.rglob("*.py")):
        if LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            yield path


def docstrings(module: Path) -> str:
    """All docstrings of a module, a blank line between any two."""
    nodes = ast.walk(ast.parse(module.read_bytes()))
    texts = (ast.get_docstring(node) for node in nodes if isinstance(node, DOCUMENTED))
    return "\n\n".join(text for text in texts if text)


def main() -> None:
    """Write one line for every module that has any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, metavar="FILE.jsonl")
    out = parser.parse_args().out
    texts = map(docstrings, modules(Path(sysconfig.get_path("stdlib"))))
    lines = [json.dumps({"text": text}) + "\n" for text in texts if text]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, "".join(lines).encode())


if __name__ == "__main__":
    main()
