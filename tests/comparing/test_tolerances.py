"""Tolerances are declared in one file, each with what it means."""

from __future__ import annotations

import re
from pathlib import Path

import wqk.comparing.tolerances as tolerances

FOLDER = Path(tolerances.__file__).parent


def test_every_tolerance_of_the_room_is_declared_once() -> None:
    declared = re.compile(r"^[A-Z][A-Z_, ]* = [^\"\n]*(?:\d\.\d|\de-\d)", re.MULTILINE)
    for file in FOLDER.glob("*.py"):
        found = declared.findall(file.read_text(encoding="utf-8"))
        assert bool(found) == (file.name == "tolerances.py"), (file, found)


def test_every_tolerance_has_a_meaning_and_a_use() -> None:
    text = (FOLDER / "tolerances.py").read_text(encoding="utf-8")
    others = "".join(
        f.read_text(encoding="utf-8") for f in FOLDER.glob("*.py") if f.stem != "tolerances"
    )
    for names in re.findall(r"^([A-Z][A-Z_, ]*) = ", text, re.MULTILINE):
        before = text[: text.index(f"\n{names} = ")].splitlines()[-1]
        assert before.startswith("#"), names
        assert all(re.search(rf"\b{name}\b", others) for name in names.split(", ")), names
