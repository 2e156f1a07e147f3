"""A table in a notebook's kernel: shown once, and as text when text is asked for."""

from __future__ import annotations

from typing import Any

import pytest

CELLS = {
    "table": "import wqk\ntable = wqk.scan(wqk.demo_model('encoder'), heads=False)\ntable",
    "several statements": "table; table",
    "text": "print(str(table))",
    "empty": "assert str(table).strip() and repr(table) == str(table)",
    "explained": "wqk.explain(wqk.demo_model('encoder'))",
}


@pytest.fixture(scope="module")
def outputs() -> dict[str, list[Any]]:
    """The outputs of every cell of a notebook, run by a kernel."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    return dict(zip(CELLS, (cell.outputs for cell in notebook.cells), strict=True))


@pytest.mark.parametrize("cell", ["table", "several statements", "explained"])
def test_a_cell_shows_its_value_once(outputs: dict[str, list[Any]], cell: str):
    (shown,) = outputs[cell]
    assert shown["output_type"] == "execute_result"


def test_a_table_is_one_table(outputs: dict[str, list[Any]]):
    (shown,) = outputs["table"]
    assert shown["data"]["text/html"].count("0.909") == 1
    assert "symmetry" in shown["data"]["text/plain"]


def test_a_table_prints_as_text_and_nothing_else(outputs: dict[str, list[Any]]):
    (printed,) = outputs["text"]
    assert printed["output_type"] == "stream"
    assert "0.909" in printed["text"]
    assert outputs["empty"] == []
