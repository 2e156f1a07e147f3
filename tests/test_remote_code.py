"""No code of a repository is ever run, and no question whether it should be is ever asked."""

from __future__ import annotations

import ast
from pathlib import Path

import wqk

PACKAGES = Path(wqk.__file__).parents[1]
SOURCES = sorted(p for name in ("wqk", "wqk_lab") for p in (PACKAGES / name).rglob("*.py"))

# Functions that load from a repository, and can run the code that lies there.
LOADERS = {"from_pretrained", "from_config"}

# The tokenizers library reads JSON and knows no code; an adapter is weights and JSON.
HARMLESS = {"library.from_pretrained", "peft.PeftModel.from_pretrained"}


def loading_calls(path: Path) -> list[tuple[str, ast.Call]]:
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in LOADERS):
        return []
    return [
        (ast.unparse(node.func), node)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LOADERS
    ]


def test_every_call_that_loads_refuses_remote_code() -> None:
    calls = [(path, name, call) for path in SOURCES for name, call in loading_calls(path)]
    assert len(calls) > 5
    for path, name, call in calls:
        value_by_keyword = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name not in HARMLESS:
            assert value_by_keyword.get("trust_remote_code") == "False", (
                f"{path}:{call.lineno}: {name}"
            )
