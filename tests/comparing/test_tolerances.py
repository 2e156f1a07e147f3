"""Tolerances are declared in one file, each with what it means."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wqk.comparing.tolerances as tolerances
from wqk.comparing.blocks import as_exact_as, same_rotation
from wqk.families.rotary import Rotary

FREQUENCIES = Rotary(np.geomspace(1, 1e-4, 8), "half", amplitude=1.2)


@pytest.mark.parametrize(("factor", "near"), [(1 + 1e-8, True), (1 - 1e-8, True), (1.001, False)])
def test_rounding_of_single_precision_is_no_other_rotation(factor: float, near: bool) -> None:
    other = replace(FREQUENCIES, frequencies=factor * FREQUENCIES.frequencies)
    assert same_rotation(FREQUENCIES, as_exact_as(FREQUENCIES, other)) == near


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
