"""The house's rules: which part may import which, and that the core starts without PyTorch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import wqk

SOURCE = Path(wqk.__file__).parent

# The rooms from top to bottom; each may import those below it and itself.
ROOMS = {
    "cli": "the commands, one file each: they parse, call and print, and compute nothing",
    "demo": "the two models that come with the package, side by side",
    "theory": "the paper's statements, computed on a model and a text, with verdicts",
    "training": "corpus, recipe, models, objectives, starts, penalties, the loop, experiments",
    "monitor": "scores while a model trains, in any loop or a Trainer",
    "reporting": "the HTML report, and one form looked at closely",
    "figures": "pictures of tables, runs and published numbers; they open no checkpoint",
    "atlas": "the paper's published scores, curves and losses; where a scan stands among them",
    "runs": "a training run's folder, runs grouped by seed, speed-up",
    "scanning": "checkpoints to score tables: scan, diff, same, details; surveys of many",
    "attention": "one block: heads as forms, other coordinates, explanation, verification",
    "families": "which tensors are a model's queries and keys, as data; it reads no bytes",
    "checkpoints": "where tensors come from: folders, the hub, archives, live modules",
    "forms": "BilinearForm, A Bᵀ kept as its factors: kernels, scores, spectra, images",
    "errors": "one tree of errors",
}
ORDER = tuple(ROOMS)
# Small private files without a room, which everything may import.
SHARED = {"_caching", "_console", "_files", "_style", "_typing", "_version"}
HEAVY = {
    "accelerate",
    "datasets",
    "matplotlib",
    "pandas",
    "plotly",
    "safetensors",
    "scipy",
    "sklearn",
    "tokenizers",
    "torch",
    "transformers",
}
# Modules that subclass what a heavy library offers; nothing imports them before they are asked for.
IMPORTED_LATE = {"monitor/callback.py", "training/loop.py"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported(path: Path, late: bool) -> set[str]:
    """Full names of imported modules; only those met on import unless ``late``."""
    names = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                names.update(f"{child.module}.{alias.name}" for alias in child.names)
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if late or not (is_function or is_typing):
                visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return names


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_every_room_is_on_the_list() -> None:
    rooms = {room_of(path) for path in modules()} - {"__init__", "__main__"} - SHARED
    assert rooms == set(ROOMS)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_arrow_points_back(path: Path) -> None:
    room = room_of(path)
    if room in {"__init__", "__main__"}:
        return
    allowed = SHARED | {"errors"} | (set() if room in SHARED else set(ORDER[ORDER.index(room) :]))
    for name in imported(path, late=True):
        if name.startswith("wqk."):
            target = name.split(".")[1]
            assert target in allowed, f"{path.name}: {room} must not import {target}"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_heavy_libraries_are_imported_late(path: Path) -> None:
    if str(path.relative_to(SOURCE)) not in IMPORTED_LATE:
        assert not {name.split(".")[0] for name in imported(path, late=False)} & HEAVY


def test_the_core_runs_without_optional_libraries() -> None:
    # A fresh interpreter in which every optional import fails.
    blocked = sorted(HEAVY)
    code = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "import wqk\nfrom click.testing import CliRunner\nfrom wqk.cli.main import command\n"
        "assert len(wqk.scan(wqk.demo_model('encoder'))) == 20\n"
        "result = CliRunner().invoke(command, ['demo'])\n"
        "assert result.exit_code == 0, result.output\n"
        "assert 'encoder' in result.output and 'wqk[report]' in result.output\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_a_scan_of_a_folder_does_not_load_torch() -> None:
    code = (
        "import sys, wqk\nwqk.scan(wqk.demo_model('encoder'))\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_namespace_is_the_public_list() -> None:
    public = {name for name in dir(wqk) if not name.startswith("_")} | {"__version__"}
    assert public == set(wqk.__all__)
    assert all(getattr(wqk, name) is not None for name in wqk.__all__)


def test_the_command_starts_with_nothing_heavy() -> None:
    code = (
        "import sys\nfrom wqk.cli.main import command\n"
        "assert not {'numpy', 'polars', 'rich', 'huggingface_hub'} & set(sys.modules), sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_stay_small_enough_to_hold_in_the_head() -> None:
    long = {
        str(path.relative_to(SOURCE)): lines
        for path in modules()
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long
