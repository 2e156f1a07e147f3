"""Files of figures: fonts that publishers accept, text that can be selected and searched."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import wqk
from wqk._style import save_figure
from wqk.reporting.demo import demo_figure, demo_table
from wqk_lab.figures import Sources, draw

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


def fonts_of(path: Path) -> list[str]:
    """Lines of pdffonts, one for each font."""
    listed = subprocess.run(["pdffonts", path], capture_output=True, text=True, check=True).stdout
    fonts = listed.splitlines()[2:]
    assert fonts
    return fonts


@pytest.mark.parametrize("writer", ["command", "user"])
def test_pdfs_have_no_type_3_fonts(paths: dict[str, Path], writer: str) -> None:
    path = paths[f"{writer} pdf"]
    assert b"/Type3" not in path.read_bytes()
    if shutil.which("pdffonts") is None:
        pytest.skip("needs pdffonts, of poppler-utils, to name the fonts")
    assert all("TrueType" in font for font in fonts_of(path))


@pytest.mark.parametrize("writer", ["command", "user"])
def test_svgs_have_their_text_as_text(paths: dict[str, Path], writer: str) -> None:
    assert "<text" in paths[f"{writer} svg"].read_text("utf-8")


KINDS = ("layers", "heads", "models", "one score", "form", "coupling", "same", "diff")
KINDS += ("composition", "matrix", "demo", "fig2", "s2")


@cache
def figures_of_every_kind() -> dict[str, Callable[[], Any]]:
    """Pictures that the command and Python write, by name."""
    encoder, decoder, pair = map(wqk.demo_model, ("encoder", "decoder", "induction"))
    table = wqk.scan(encoder)
    composition = wqk.compose(pair)
    return {
        "layers": lambda: table.plot("layers"),
        "heads": lambda: table.plot("heads"),
        "models": lambda: table.plot("models"),
        "one score": lambda: table.plot(y="symmetry"),
        "form": lambda: wqk.show(encoder, 0, 1).figure(),
        "coupling": lambda: wqk.show(encoder, 0, coupling=True).figure(),
        "same": lambda: wqk.same(encoder, decoder).plot(),
        "diff": lambda: wqk.diff(encoder, decoder).plot(),
        "composition": lambda: composition.plot(),
        "matrix": lambda: composition.matrix("k").plot(),
        "demo": lambda: demo_figure(demo_table()),
        "fig2": lambda: draw("fig2", Sources()),
        "s2": lambda: draw("s2", Sources()),
    }


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_figure_has_text_that_publishers_accept(name: str, tmp_path: Path) -> None:
    figure = figures_of_every_kind()[name]()
    save_figure(figure, tmp_path / "figure.pdf")
    save_figure(figure, tmp_path / "figure.svg")
    assert b"/Type3" not in (tmp_path / "figure.pdf").read_bytes()
    assert "<text" in (tmp_path / "figure.svg").read_text("utf-8")
    if shutil.which("pdffonts"):
        assert all("TrueType" in font for font in fonts_of(tmp_path / "figure.pdf"))
