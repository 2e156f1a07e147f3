"""The pages of the documentation in a browser, on a phone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PHONE = {"width": 390, "height": 844}

# The theme's column scrolls in place of the page.
WIDTH = """Math.max(...[...document.querySelectorAll("html, .content")].map(e => e.scrollWidth))"""

# Words of code whose parenthesis, comma or full stop is on another line.
PARTED = """() => {
  const parted = [];
  const lines = (node, start, end) => {
    const range = document.createRange();
    range.setStart(node, start);
    range.setEnd(node, end);
    return [...range.getClientRects()];
  };
  for (const block of document.querySelectorAll("article :is(p, li, td)")) {
    const walker = document.createTreeWalker(block, NodeFilter.SHOW_TEXT);
    let before = null;
    for (let text; (text = walker.nextNode()); before = text) {
      if (!before?.data.length || !text.data.length) continue;
      const last = lines(before, before.data.length - 1, before.data.length)[0];
      const first = lines(text, 0, 1)[0];
      const isCode = (node) => node.parentElement.closest("code") !== null;
      const closes = isCode(before) && !isCode(text) && /^[.,;:)\\]]/.test(text.data);
      const opens = !isCode(before) && isCode(text) && /[([]$/.test(before.data);
      if ((closes || opens) && last && first && first.top > last.bottom) {
        parted.push(before.data.slice(-20) + " | " + text.data.slice(0, 20));
      }
    }
  }
  return parted;
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documentation, built."""
    pytest.importorskip("sphinx")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "-b", "html", str(DOCS), str(folder)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture(scope="module")
def phone(browser: Any) -> Any:
    """A tab of the size of a phone."""
    page = browser.new_page(viewport=PHONE)
    yield page
    page.close()


def test_no_page_scrolls_sideways_on_a_phone(site, phone):
    too_wide = {}
    for page in sorted(site.rglob("*.html")):
        phone.goto(page.as_uri())
        width = phone.evaluate(WIDTH)
        if width > PHONE["width"]:
            too_wide[page.relative_to(site).as_posix()] = width
    assert not too_wide


def test_code_keeps_its_parentheses_and_commas_on_its_line(site, phone):
    parted = {}
    for page in sorted(site.rglob("*.html")):
        phone.goto(page.as_uri())
        if texts := phone.evaluate(PARTED):
            parted[page.relative_to(site).as_posix()] = texts
    assert not parted


def test_a_property_s_first_sentence_is_no_type(site):
    page = (site / "api" / "attention.html").read_text(encoding="utf-8")
    assert "Forms of the heads as a stack (G, H/G):" in page


def test_the_table_of_commands_needs_no_sideways_scrolling(browser: Any, site: Path) -> None:
    page = browser.new_page(viewport=PHONE)
    page.goto((site / "commands.html").as_uri())
    table = page.locator(".table-wrapper").first
    assert table.evaluate("table => table.scrollWidth <= table.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    command, meaning = (table.locator("tbody td").nth(place).bounding_box() for place in (0, 1))
    assert meaning["y"] >= command["y"] + command["height"] - 1

    page.set_viewport_size({"width": 1200, "height": 900})
    command, meaning = (table.locator("tbody td").nth(place).bounding_box() for place in (0, 1))
    assert meaning["x"] > command["x"]
    page.close()
