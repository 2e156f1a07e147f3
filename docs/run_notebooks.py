"""Run the notebooks and keep what they show: python docs/run_notebooks.py [NAME]."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

import wqk

PACKAGE = str(Path(wqk.__file__).parent)


def keep_picture_once(data: dict[str, str]) -> None:
    """Keep a picture as PNG alone, and a table, whose HTML contains a picture, as HTML."""
    if "image/png" in data and "text/html" in data:
        is_picture = data["text/html"].startswith("<img")
        del data["text/html" if is_picture else "image/png"]


def main(only: str = "") -> None:
    """Run each from its first cell; warnings and this machine's paths are not kept."""
    for path in sorted((Path(__file__).parent / "notebooks").glob(f"{only}*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        metadata = notebook.metadata.copy()
        with TemporaryDirectory() as folder:
            client = NotebookClient(
                notebook, timeout=900, kernel_name="python3", coalesce_streams=True
            )
            client.execute(cwd=folder)
        notebook.metadata = metadata
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)
            if cell.cell_type == "code":
                cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
                for output in cell.outputs:
                    keep_picture_once(output.get("data", {}))
        path.write_text(nbformat.writes(notebook).replace(PACKAGE, "…/wqk") + "\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
