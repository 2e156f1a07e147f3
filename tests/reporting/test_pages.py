"""The pages of the documentation in a browser, on a phone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PHONE = {"width": 390, "height": 844}

# The page of commands alone, with the theme and the style of the site.
CONFIGURATION = f"""
extensions = ["myst_parser", "sphinx_click"]
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_static_path = [{str(DOCS / "static")!r}]
html_css_files = ["wqk.css"]
master_doc = "commands"
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of the page of commands, and its folder."""
    pytest.importorskip("furo")
    folder = tmp_path_factory.mktemp("site")
    (folder / "conf.py").write_text(CONFIGURATION)
    shutil.copy(DOCS / "commands.md", folder)
    build = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(folder), str(folder / "html")]
    subprocess.run(build, check=True, capture_output=True)
    return folder / "html"


def test_the_table_of_commands_needs_no_sideways_scrolling(browser: Any, site: Path) -> None:
    page = browser.new_page(viewport=PHONE)
    page.goto((site / "commands.html").as_uri())
    table = page.locator(".table-wrapper").first
    assert table.evaluate("table => table.scrollWidth <= table.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    command, meaning = (table.locator("td").nth(place).bounding_box() for place in (0, 1))
    assert meaning["y"] >= command["y"] + command["height"] - 1

    page.set_viewport_size({"width": 1200, "height": 900})
    command, meaning = (table.locator("td").nth(place).bounding_box() for place in (0, 1))
    assert meaning["x"] > command["x"]
    page.close()
