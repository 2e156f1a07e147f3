"""The page of covered models has every family and the proof of every model type."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wqk.families import families


@pytest.fixture(scope="module")
def page() -> Any:
    path = Path(__file__).parents[2] / "docs" / "generate_coverage.py"
    return SimpleNamespace(**runpy.run_path(str(path)))


def test_every_type_of_a_family_is_right_where_it_was_run(page: Any) -> None:
    _, rows = page.outcomes()
    outcome_by_type = {row["type"]: row["outcome"] for row in rows}
    described = [family for family in families().values() if family.attention]
    types = [kind for family in described for kind in family.model_types]
    unproven = [
        t
        for t in types
        if outcome_by_type.get(t, "proven").startswith(("refused", "guessed", "silent"))
    ]
    assert unproven == []


def test_the_page_counts_every_model_type(page: Any) -> None:
    _, rows = page.outcomes()
    assert {row["outcome"] for row in rows} <= page.MEANINGS.keys()
    assert len({row["type"] for row in rows}) == len(rows)
    assert sum(row["outcome"] in ("proven", "partial") for row in rows) > 450


def test_reasons_and_families_are_on_the_page(page: Any) -> None:
    text = page.coverage()
    for family in families().values():
        assert f"`{family.name}`" in text
    assert "gated by the query's token" in text
    assert "| `swin` | encoder self | separate | relative | square | ok |" in text


def test_an_unchanged_page_is_left_alone(page: Any, tmp_path: Path) -> None:
    path = tmp_path / "coverage.md"
    page.write(path)
    before = path.stat().st_mtime_ns
    page.write(path)
    assert path.stat().st_mtime_ns == before
