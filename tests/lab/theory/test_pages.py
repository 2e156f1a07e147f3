"""Tables of the theory's pages are those of the records next to them."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from tests.lab.theory import rates

DOCS = Path(__file__).parents[3] / "docs"
THEORY = DOCS / "theory"
GENERATOR = runpy.run_path(str(DOCS / "generate_theory.py"))
SOURCES = tomllib.loads((THEORY / "records" / "sources.toml").read_text("utf-8"))["record"]


@pytest.mark.parametrize("page", GENERATOR["TABLES"])
def test_tables_are_those_of_the_records(page: str) -> None:
    text = (THEORY / page).read_text("utf-8")
    assert GENERATOR["written"](page, text) == text
    emptied = re.sub(r"(begin -->).*?(<!-- \w+: end)", r"\1\2", text, flags=re.DOTALL)
    assert len(emptied) < len(text)
    assert GENERATOR["written"](page, emptied) == text


def test_verdicts_and_rates_are_those_of_the_records() -> None:
    verdicts = runpy.run_path(str(DOCS / "generate_assumptions.py"))
    for page, written in (
        ("assumptions.md", verdicts["written"]),
        ("false-positives.md", rates.written),
    ):
        text = (THEORY / page).read_text("utf-8")
        assert written(text) == text


def test_every_record_has_a_source_and_every_table_a_record() -> None:
    assert {source["file"] for source in SOURCES} == {
        path.name for path in (THEORY / "records").glob("*.csv")
    }
    tables = set().union(*(source["tables"] for source in SOURCES))
    generated = set()
    for page, names in GENERATOR["TABLES"].items():
        generated.update(f"{page}: {name}" for name in names)
    assert tables == generated | {"assumptions.md: verdicts", "false-positives.md: rates"}
    assert {source["state"] for source in SOURCES} <= {"repeatable", "printed"}
