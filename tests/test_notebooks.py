"""The documentation's notebooks run as they stand, and are kept with what they show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


def read(path: Path) -> Any:
    return pytest.importorskip("nbformat").read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path):
    nbclient = pytest.importorskip("nbclient")
    notebook = read(path)
    for cell in notebook.cells:  # what it shows is kept from a whole run
        cell.source = cell.source.replace('"steps": 300', '"steps": 100')
    nbclient.NotebookClient(notebook, timeout=900).execute(cwd=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_small_and_with_its_output(path: Path):
    assert path.stat().st_size < 300_000
    code = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
    assert str(ROOT) not in path.read_text(encoding="utf-8")


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 4
