"""Which tests reach a file: first those that are about it, then those that name it.

A family's file is reached by the proofs of its model types. A file of code is reached by its own
examples, by the tests beside it (`tests` mirrors `src`), and by all others that name it or
something that it defines.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path

TESTS = Path("tests")
PROOFS = ["tests/families/test_proofs.py", "tests/families/test_wrong_families.py"]
FAMILIES = ["test_plans", "test_older_files", "test_hybrids", "test_composites", "test_shapes"]
MOST = 5  # further files of tests


def tests_of(path: Path) -> list[list[str]]:
    """Arguments of pytest, call by call, until one fails."""
    return _of_family(path.stem) if path.suffix == ".toml" else _of_code(path)


def _of_family(name: str) -> list[list[str]]:
    sys.path.insert(0, "")
    from tests.families.test_every_family import ELSEWHERE, quickest

    known = {"open-clip": "open_clip"}.get(name, name)
    calls = []
    if known in quickest():
        calls.append(["tests/families/test_every_family.py", "-k", f"[{known}]"])
    if known in ELSEWHERE:
        calls.append([str(TESTS / ELSEWHERE[known])])
    if architectures := _architectures().get(known):
        calls.append([*PROOFS, "-k", " or ".join(f"[{a}] or [{a}:" for a in architectures)])
    from wqk.families.family import families

    words = {known, *families()[known].model_types}
    quoted = re.compile(rf"""["']({"|".join(map(re.escape, words))})["']""")
    counts = {f: len(quoted.findall(f.read_text(encoding="utf-8"))) for f in _files()}
    named = sorted((f for f in counts if counts[f]), key=lambda f: -counts[f])[:MOST]
    return [*calls, [*map(str, named), *(f"tests/families/{file}.py" for file in FAMILIES)]]


def _files() -> list[Path]:
    return sorted(f for f in TESTS.rglob("test_*.py") if f.name != "test_every_family.py")


@cache
def _architectures() -> dict[str, list[str]]:
    """The names of the models in the tables of architectures by the families that read them."""
    from tests.families.architectures import ALL
    from tests.families.test_every_family import model_types

    from wqk.families.family import families, part_types

    by_type = {kind: f.name for f in families().values() for kind in f.model_types}
    found: dict[str, list[str]] = {}
    for architecture in ALL:
        kind = architecture.hub.get("model_type") or model_types().get(architecture.model, "")
        for one in {kind, *part_types(kind).values()} & by_type.keys():
            found.setdefault(by_type[one], []).append(architecture.name)
    return found


def _of_code(path: Path) -> list[list[str]]:
    text = path.read_text(encoding="utf-8")
    package = path.parts[1]
    beside = (TESTS / "lab" if package == "wqk_lab" else TESTS).joinpath(*path.parts[2:-1])
    defined = re.findall(r"^(?:def|class) ([A-Za-z]\w+)", text, re.M)
    module = ".".join(path.with_suffix("").parts[1:])
    words = re.compile(rf"\b({'|'.join([re.escape(module), *defined])})\b")
    counts = {
        file: len(words.findall(file.read_text(encoding="utf-8")))
        + 10 * file.is_relative_to(beside)
        + 100 * (file.stem == f"test_{path.stem}")
        for file in _files()
    }
    named = sorted((f for f, n in counts.items() if n), key=lambda f: -counts[f])
    near = [f for f in named if counts[f] >= 100 or (counts[f] > 10 and f.is_relative_to(beside))]
    rest = [f for f in named if f not in near][:MOST]
    first = [str(path)] if ">>>" in text else []
    return [call for call in ([*first, *map(str, near)], [*map(str, rest)]) if call]
