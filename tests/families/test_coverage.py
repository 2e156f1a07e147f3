"""The page of covered models tells of every family, and that every model type is proven."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from wqk.families import families


@pytest.fixture(scope="module")
def page() -> Any:
    path = Path(__file__).parents[2] / "docs" / "generate_coverage.py"
    spec = importlib.util.spec_from_file_location("generate_coverage", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_model_type_is_proven(page: Any) -> None:
    rows = [line for line in page.coverage().splitlines() if line.endswith("| not proven |")]
    assert rows == []


def test_tests_are_told_by_the_model_that_they_build(page: Any) -> None:
    proofs = page.proofs_by_type(families(), page.TESTS)
    assert "dit" in proofs["beit"]
    assert "mms" in proofs["wav2vec2"]
    assert "clip-text-hub" in proofs["clip_text_model"]
    assert "clip" in proofs["clip"]
    assert "clip-vision" not in proofs["clip"]
    assert proofs["musicgen_decoder"] == ["musicgen-decoder"]


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
