"""The table of a family file's keys in docs/contributing.md is that of the schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import fields

from wqk.families import AttentionRule
from wqk.families.rules import RotaryRule

PAGE = Path(__file__).parents[2] / "docs" / "contributing.md"


@pytest.mark.parametrize(
    ("heading", "kind"), [("| key | meaning |", AttentionRule), ("| key of `rotary` |", RotaryRule)]
)
def test_every_key_is_documented_and_every_documented_key_exists(heading, kind):
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index(heading) :].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    documented = [key for cell in cells for key in re.findall("`([^`]+)`", cell)]
    assert sorted(documented) == sorted(field.name for field in fields(kind))
