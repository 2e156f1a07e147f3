"""Tests that reach a file: first the tests of the file, then tests that name it.

A family's file is reached, next to its proofs, by the tests that name it or one of its model types.
A file of code is reached by its own examples, by the tests next to it (`tests` mirrors `src`), and
by all others that name it or something that it defines.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

TESTS = Path("tests")
FAMILIES = [
    "test_family_files",
    "test_counted_keys",
    "test_running",
    "test_plans",
    "test_older_files",
    "test_hybrids",
    "test_composites",
    "test_shapes",
]
MOST = 5  # further files of tests
MOST_NEAR = 10  # files of tests of the room


def tests_of_family(name: str) -> list[str]:
    """The files of tests, in this order, that a family has next to its proofs."""
    from tests.families.architectures import ALL, FURTHER
    from tests.families.test_every_family import ELSEWHERE, PROVEN
    from tools.mutating.proofs import of_family

    from wqk.families.family import families

    elsewhere = [str(TESTS / ELSEWHERE[name])] if name in ELSEWHERE else []
    for table, reason in PROVEN["unproven"].items():  # which may name the tests of this table
        if table.rpartition(" ")[0] == name:
            elsewhere += [str(TESTS / "families" / f) for f in re.findall(r"test_\w+\.py", reason)]
    if name.startswith("gguf"):  # whose types are named without this
        elsewhere.append("tests/families/test_gguf_families.py")
    architectures = of_family([*ALL, *FURTHER.values()]).get(name, [])
    elsewhere += (
        ["tests/families/test_verdicts.py"]
        if any(architecture.told for architecture in architectures)
        else []
    )
    elsewhere += (
        ["tests/families/test_mixers.py"]
        if any(architecture.mixers for architecture in architectures)
        else []
    )
    names = {
        name,
        *families()[name].model_types,
        *(architecture.name for architecture in architectures),
    }
    quoted = re.compile(rf"""["']({"|".join(map(re.escape, names))})["']""")
    counts = {f: len(quoted.findall(text)) for f, text in _files().items()}
    named = sorted((f for f in counts if counts[f]), key=lambda f: -counts[f])[:MOST]
    every = [*elsewhere, *map(str, named), *(f"tests/families/{file}.py" for file in FAMILIES)]
    return [*dict.fromkeys(every)]


@cache
def tests_of_code(path: Path) -> list[str]:
    """The files of tests that reach a file of code, in this order; first its own examples."""
    text = path.read_text(encoding="utf-8")
    package = path.parts[1]
    folder_of_tests = (TESTS / "lab" if package == "wqk_lab" else TESTS).joinpath(*path.parts[2:-1])
    defined = re.findall(r"^(?:def|class) ([A-Za-z]\w+)", text, re.M)
    module = ".".join(path.with_suffix("").parts[1:])
    name_pattern = re.compile(rf"\b({'|'.join([re.escape(module), *defined])})\b")
    counts = {}
    for file, content in _files().items():
        uses = len(name_pattern.findall(content))
        namesake = 100 * (file.stem == f"test_{path.stem}")
        if uses or namesake:
            counts[file] = uses + 10 * file.is_relative_to(folder_of_tests) + namesake
    named = sorted(counts, key=lambda f: -counts[f])
    near = [f for f in named if counts[f] >= 100 or f.is_relative_to(folder_of_tests)][:MOST_NEAR]
    further = [f for f in named if f not in near][:MOST]
    if len(named) < MOST:  # a file that others of its room use
        neighbors = [f for f in _files() if f.is_relative_to(folder_of_tests) and f not in named]
        further += neighbors[:MOST_NEAR]
    first = [str(path)] if ">>>" in text else []
    return [*first, *map(str, [*near, *further])]


@cache
def _files() -> dict[Path, str]:
    """The files of tests and their text, without the one that proves families of every name."""
    files = (f for f in sorted(TESTS.rglob("test_*.py")) if f.name != "test_every_family.py")
    return {file: file.read_text(encoding="utf-8") for file in files}
