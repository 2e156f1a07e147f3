"""Tolerances are declared in one file, each with what it means."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wqk.kinship.thresholds as thresholds
import wqk.sameness.tolerances as tolerances
from wqk.families.rotary import Rotary
from wqk.sameness.blocks import as_exact_as, same_rotation
from wqk.sameness.lora_merges import FittedMerge

FREQUENCIES = Rotary(np.geomspace(1, 1e-4, 8), "half", amplitude=1.2)


@pytest.mark.parametrize(("factor", "near"), [(1 + 1e-8, True), (1 - 1e-8, True), (1.001, False)])
def test_rounding_of_single_precision_is_no_other_rotation(factor: float, near: bool) -> None:
    scaled = replace(FREQUENCIES, frequencies=factor * FREQUENCIES.frequencies)
    assert same_rotation(FREQUENCIES, as_exact_as(FREQUENCIES, scaled)) == near


@pytest.mark.parametrize("product", [0.0, 1e-4, 3.0])
@pytest.mark.parametrize("rounding", [0.0, 5e-6, 0.2])
def test_a_merge_explains_a_share_of_its_product_and_all_rounding(
    product: float, rounding: float
) -> None:
    most = 2 * tolerances.SAME_SHARE * product + rounding
    for residual in (0.99 * most, 1.01 * most + 1e-12):
        merge = FittedMerge(1.0, False, residual, product)
        assert merge.explains(rounding) == (residual <= most)


FILES = [Path(tolerances.__file__), Path(thresholds.__file__)]


@pytest.mark.parametrize("declaring", FILES, ids=lambda file: file.stem)
def test_every_tolerance_of_the_room_is_declared_once(declaring: Path) -> None:
    declared = re.compile(r"^[A-Z][A-Z_, ]* = [^\"\n]*(?:\d\.\d|\de-\d)", re.MULTILINE)
    for file in declaring.parent.rglob("*.py"):
        if file.name == "drawing.py":
            continue  # lengths and colors of a picture
        names = declared.findall(file.read_text(encoding="utf-8"))
        assert bool(names) == (file == declaring), (file, names)


@pytest.mark.parametrize("declaring", FILES, ids=lambda file: file.stem)
def test_every_tolerance_has_a_meaning_and_a_use(declaring: Path) -> None:
    text = declaring.read_text(encoding="utf-8")
    text_of_room = "".join(
        f.read_text(encoding="utf-8") for f in declaring.parent.rglob("*.py") if f != declaring
    )
    for names in re.findall(r"^([A-Z][A-Z_, ]*) = ", text, re.MULTILINE):
        before = text[: text.index(f"\n{names} = ")].splitlines()[-1]
        assert before.startswith("#"), names
        assert all(re.search(rf"\b{name}\b", text_of_room) for name in names.split(", ")), names
