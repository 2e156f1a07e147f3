"""Files of figures: fonts that publishers accept, text that can be selected and searched."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import wqk
from wqk._style import save_figure

pytest.importorskip("matplotlib")


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    """Files of one figure, by what wrote them and their ending."""
    figure = wqk.open(wqk.demo_model("decoder"))[0].form.plot()
    written: dict[str, Path] = {}
    for ending in ("pdf", "svg"):
        written[f"command {ending}"] = tmp_path / f"command.{ending}"
        save_figure(figure, written[f"command {ending}"])
        written[f"user {ending}"] = tmp_path / f"user.{ending}"
        figure.savefig(written[f"user {ending}"])
    return written


@pytest.mark.parametrize("writer", ["command", "user"])
def test_pdfs_have_no_type_3_fonts(paths: dict[str, Path], writer: str) -> None:
    path = paths[f"{writer} pdf"]
    assert b"/Type3" not in path.read_bytes()
    if shutil.which("pdffonts") is None:
        pytest.skip("needs pdffonts, of poppler-utils, to name the fonts")
    listed = subprocess.run(["pdffonts", path], capture_output=True, text=True, check=True).stdout
    fonts = listed.splitlines()[2:]
    assert fonts
    assert all("TrueType" in font for font in fonts), listed


@pytest.mark.parametrize("writer", ["command", "user"])
def test_svgs_have_their_text_as_text(paths: dict[str, Path], writer: str) -> None:
    assert "<text" in paths[f"{writer} svg"].read_text("utf-8")
