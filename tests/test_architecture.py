"""The house's rules: which part may import which, and that the core starts without PyTorch."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import wqk
from wqk._guesses import CALLS

SOURCE = Path(wqk.__file__).parent
LABORATORY = SOURCE.parent / "wqk_lab"

# Files and folders at the top of the tree.
TOP = {
    "action.yml",
    "benchmarks",
    "CHANGELOG.md",
    "CITATION.cff",
    "constraints.txt",
    "docs",
    "examples",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    "README.md",
    "src",
    "tests",
    "tools",
}
HIDDEN = {".ci", ".github", ".gitignore", ".pre-commit-config.yaml"}

# The instrument's rooms from top to bottom; each may import those below it and itself.
ROOMS = {
    "cli": "the commands: they parse, call and print, and compute nothing",
    "live": "models in memory: scored while they train, set, clipped, run and verified",
    "inspecting": "one checkpoint looked at closely: its forms, its tokens, its heads together",
    "reporting": "the HTML report, and pictures of forms and tables",
    "differences": "what training changed: forms of two checkpoints, head by head",
    "kinship": "lineage of two checkpoints, from what their weights share by more than chance",
    "sameness": "whether two checkpoints are one model, the causes of differences, their repairs",
    "scanning": "checkpoints to score tables: scan, surveys of many, watch",
    "tables": "score tables: their columns, how they are shown, and their files",
    "model": "the model in the middle: a checkpoint, its family and its blocks, opened once",
    "attention": "one block: heads as forms, other coordinates, ceilings",
    "families": "which tensors are a model's queries and keys, as data; it reads no bytes",
    "checkpoints": "files as named tensors: formats, archives, adapters, modules in memory",
    "storage": "bytes by position: files on disk, the Hub, https and buckets (S3, Google, Azure)",
    "forms": "BilinearForm, A Bᵀ kept as its factors: kernels, scores, spectra, images",
    "errors": "one tree of errors",
}
ORDER = tuple(ROOMS)
# Small private files without a room, which everything may import.
SHARED = {
    "_guesses",
    "_junit",
    "_machine",
    "_console",
    "_files",
    "_style",
    "_synonyms",
    "_typing",
    "_version",
}
# The laboratory's rooms, also in order; each may import all of the instrument.
LABORATORY_ROOMS = {
    "cli": "the laboratory's commands",
    "theory": "the paper's statements, computed on a model and a text, with verdicts",
    "figures": "the paper's figures, from tables, runs and published numbers",
    "training": "corpus, recipe, models, objectives, the loop, experiments, fine-tuning",
    "claims": "the paper's claims, beside published records and our own runs",
    "atlas": "the paper's published scores, curves and losses, and its tables",
    "runs": "runs grouped by seed, speed-up, contrasts and verdicts",
}
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
IMPORTED_LATE = {"wqk/live/callback.py", "wqk_lab/training/loop.py"}


def modules() -> list[Path]:
    return sorted([*SOURCE.rglob("*.py"), *LABORATORY.rglob("*.py")])


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE.parent).as_posix()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_late(statement: ast.AST) -> bool:
    """Return whether a statement's imports are not made when its module is imported."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return True
    return isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.unparse(statement.test)


@cache
def imported(path: Path, late: bool) -> set[str]:
    """Full names of imported modules; only those met on import unless ``late``."""
    names: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                names.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}: relative import"
                names.update(f"{child.module}.{alias.name}" for alias in child.names)
            if isinstance(child, ast.expr) or (not late and is_late(child)):
                continue
            visit(child)

    visit(parsed(path))
    return names


def room_of(path: Path) -> tuple[str, str]:
    """A file's package and room."""
    package, room, *_ = path.relative_to(SOURCE.parent).parts
    return package, room.removesuffix(".py")


def test_every_room_is_on_the_list() -> None:
    rooms: dict[str, set[str]] = {"wqk": set(), "wqk_lab": set()}
    for path in modules():
        package, room = room_of(path)
        rooms[package].add(room)
    assert rooms["wqk"] - {"__init__", "__main__"} - SHARED == set(ROOMS)
    assert rooms["wqk_lab"] - {"__init__"} == set(LABORATORY_ROOMS)


def test_nothing_strays_at_the_top_of_the_tree() -> None:
    root = SOURCE.parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("the tree is no checkout of git")
    listing = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True)
    names = {name.split("/")[0] for name in listing.stdout.splitlines()}
    assert names - HIDDEN == TOP


def test_comparisons_do_not_import_each_other() -> None:
    """Only `wqk.kin` calls another one: `wqk.same`, for a rotation of the residual stream."""
    leaves = ("differences", "kinship", "sameness")
    crossing = {
        name
        for path in modules()
        for name in imported(path, late=True)
        if room_of(path)[1] in leaves and name.split(".")[1:2] != [room_of(path)[1]]
        if name.split(".")[1:2] and name.split(".")[1] in leaves
    }
    assert crossing == {"wqk.sameness.same.same"}


def test_no_arrow_points_back() -> None:
    instrument = {("wqk", name) for name in (*SHARED, *ROOMS)}
    rooms = list(LABORATORY_ROOMS)
    back: list[str] = []
    for path in modules():
        package, room = room_of(path)
        if room in {"__init__", "__main__"}:
            continue
        if package == "wqk_lab":
            allowed = instrument | {(package, name) for name in rooms[rooms.index(room) :]}
        else:
            below = set() if room in SHARED else set(ORDER[ORDER.index(room) :])
            allowed = {("wqk", name) for name in SHARED | {"errors"} | below}
        back += [
            f"{name_of(path)}: {room} must not import {name}"
            for name in imported(path, late=True)
            if name.split(".")[0] in {"wqk", "wqk_lab"}
            and (*name.split("."), "__init__")[:2] not in allowed
        ]
    assert not back


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports within functions and for types count as well."""
    paths = {
        name_of(path).removesuffix(".py").removesuffix("/__init__"): path for path in modules()
    }
    names = {path.replace("/", ".") for path in paths}
    graph: dict[str, set[str]] = {}
    for path, file in paths.items():
        module = path.replace("/", ".")
        graph[module] = set()
        for name in imported(file, late=True):
            target = name if name in names else name.rpartition(".")[0]
            if target in names and target != module:
                graph[module].add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the files


def test_heavy_libraries_are_imported_late() -> None:
    early = {name_of(path): imported(path, late=False) for path in modules()}
    heavy_by_module = {
        name: heavy
        for name, names in early.items()
        if (heavy := {imported_name.split(".")[0] for imported_name in names} & HEAVY)
    }
    assert heavy_by_module.keys() == IMPORTED_LATE


ALONE = {
    "without optional libraries": f"""
import sys
for name in {sorted(HEAVY)}: sys.modules[name] = None
import wqk
from click.testing import CliRunner
from wqk.cli.main import command
assert len(wqk.scan(wqk.demo_model('encoder'))) == 20
result = CliRunner().invoke(command, ['demo'])
assert result.exit_code == 0, result.output
assert 'encoder' in result.output and ".[report]" in result.output""",
    "a scan of a folder": """
import sys, wqk
wqk.scan(wqk.demo_model('encoder'))
assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)""",
    "the command's start": """
import sys
from wqk.cli.main import command
command(['--help'], standalone_mode=False)
assert not {'numpy', 'polars', 'rich', 'huggingface_hub'} & set(sys.modules), sys.modules""",
    "a verb of the laboratory": "import wqk_lab.cli.train",
}


@pytest.mark.parametrize("code", ALONE.values(), ids=ALONE)
def test_a_fresh_interpreter_needs_and_loads_nothing_heavy(code: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_namespace_is_the_public_list() -> None:
    public = {name for name in dir(wqk) if not name.startswith("_")} | {"__version__"}
    assert public == set(wqk.__all__)
    assert all(getattr(wqk, name) is not None for name in wqk.__all__)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("read", "wqk.open(ref), or wqk.read_table(path) for a table of scores?"),
        (
            "compare",
            "wqk.same(reference, candidate), if the two should be equal, "
            "wqk.diff(reference, candidate), for how far one moved, "
            "or wqk.scan([a, b]), for the scores of both?",
        ),
        ("track", "wqk.watch(run, out=folder), or wqk.scan(run) for the steps that are there?"),
        ("symetry", "'symmetry'?"),
        ("train", "wqk_lab.train(...)?"),
    ],
)
def test_a_name_that_is_not_public_is_told_the_one_that_is(name: str, meant: str) -> None:
    with pytest.raises(
        AttributeError, match=re.escape(f"no attribute '{name}'; did you mean {meant}")
    ):
        getattr(wqk, name)


def test_every_name_that_the_pages_document_exists() -> None:
    pages = sorted((SOURCE.parents[1] / "docs").glob("**/*.md"))
    directive = re.compile(r"^\.\. auto(?:class|function|module|data|exception):: *(\S+)", re.M)
    named = [name for page in pages for name in directive.findall(page.read_text())]
    assert len(named) > 150
    for name in named:
        pkgutil.resolve_name(name)


def test_the_reading_list_names_files() -> None:
    page = (SOURCE.parents[1] / "docs/contributing.md").read_text("utf-8")
    reading = page.partition("## Read first")[2].partition("## The map")[0]
    files = re.findall(r"`(\w+(?:/\w+)*\.py)`", reading)
    assert len(files) > 20
    assert [file for file in files if not (SOURCE / file).is_file()] == []


def test_every_guess_leads_to_a_public_name() -> None:
    import wqk_lab

    public = {*wqk.__all__, *(f"wqk_lab.{name}" for name in wqk_lab.__all__)}
    for name, call in CALLS.items():
        assert name not in wqk.__all__
        meant = re.match(r"(?:wqk\.)?((?:wqk_lab\.)?\w+)", call)
        assert meant is not None, call
        assert meant[1] in {*public, "help"}, call
    assert not hasattr(wqk, "nothing_like_it")


def test_no_file_has_the_name_of_another() -> None:
    # A verb's file in a room `cli` has the verb's name, as the file that does the work may.
    names = [p.name for p in modules() if "cli" not in p.parts and p.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_no_name_hides_a_module() -> None:
    late = {name.removesuffix(".py").replace("/", ".") for name in IMPORTED_LATE}
    code = (
        "import importlib, pkgutil, types, wqk, wqk_lab\n"
        "names = [found.name for package in (wqk, wqk_lab)\n"
        "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.')\n"
        f"    if not found.name.endswith('__main__') and found.name not in {late}]\n"
        "for name in names: importlib.import_module(name)\n"
        "for name in names:\n"
        "    parent, _, own = name.rpartition('.')\n"
        "    found = getattr(importlib.import_module(parent), own)\n"
        "    assert isinstance(found, types.ModuleType), name\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    for name in late:  # here, where PyTorch is loaded already
        parent, _, module_name = name.rpartition(".")
        assert importlib.import_module(name) is getattr(
            importlib.import_module(parent), module_name
        )
