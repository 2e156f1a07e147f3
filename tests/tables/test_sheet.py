"""One table in all forms in which it is shown."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from wqk._console import html, plain
from wqk.tables.sheet import Bar, Cell, Sheet, SheetColumn

EVIL = "<script>alert(1)</script>|*_`\\x[a](b)"


def results() -> Sheet:
    """Numbers with intervals, which are long."""
    sheet = Sheet.of("start", "seeds", "difference", "p", "speed-up", text=["start"])
    interval = "−0.0123 [−0.0456, +0.0210]"
    sheet.add("symmetric", "3", interval, "0.34", "+12% [+3%, +21%]")
    sheet.add("paired with its own transpose", "12", interval, "0.001", "–")
    return sheet


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_no_number_is_broken_and_no_line_longer_than_needed(width: int):
    text = plain(results(), width=width)
    for number in ("−0.0123 [−0.0456, +0.0210]", "+12% [+3%, +21%]", "0.001"):
        assert number in text
    assert max(map(cell_len, text.splitlines())) <= max(width, 78)


def test_many_rows_stay_rows():
    sheet = Sheet.of("a", "b", "c")
    for _ in range(60):
        sheet.add("1" * 20, "2" * 20, "3" * 20)
    lines = plain(sheet, width=40).splitlines()
    assert len(lines) == 61
    assert all("3" * 20 in line for line in lines[1:])


def test_bars_take_what_is_left_and_are_in_no_file():
    sheet = Sheet([SheetColumn("layer"), SheetColumn("symmetry"), SheetColumn("", text=True)])
    sheet.add("0", "0.900", Bar(0.9))
    assert plain(sheet, width=120).count("█") > plain(sheet, width=40).count("█") > 0
    assert "█" not in plain(sheet, width=20)
    assert sheet.markdown().splitlines()[0] == "| layer | symmetry |"
    assert r"\begin{tabular}{rr}" in sheet.latex()


def test_nothing_in_a_cell_is_markup():
    sheet = Sheet.of(EVIL, text=[EVIL])
    sheet.add(EVIL)
    sheet.add("two\nlines\x1b[2J")
    page = html(sheet)
    assert "<script" not in page
    assert "<script" not in sheet.markdown()
    assert r"\[a](b)" in sheet.markdown()
    for line in sheet.markdown().splitlines():
        assert len(re.findall(r"(?<!\\)\|", line)) == 2
    assert "\x1b" not in page + plain(sheet) + sheet.markdown() + sheet.latex()
    assert len(sheet.markdown().splitlines()) == 4


def test_a_page_announces_headings():
    page = results().html()
    assert page.count('scope="col"') == 5
    assert page.count('scope="row"') == 2
    assert page.count('data-label="seeds"') == 2


def test_marks_and_headings_across():
    sheet = Sheet.of("model", "loss", text=["model"])
    sheet.caption, sheet.notes = "Losses & such.", {"a": "Doubtful, 5 %."}
    sheet.heading("4 layers")
    sheet.add(Cell("random", marks="a"), Cell("2.5", aside="2.4 to 2.6"))
    markdown, latex, page = sheet.markdown(), sheet.latex(), sheet.html()
    assert "| **4 layers** |  |" in markdown
    assert "| random<sup>a</sup> | 2.5 (2.4 to 2.6) |" in markdown
    assert "<sup>a</sup> Doubtful, 5 %." in markdown
    assert r"\multicolumn{2}{l}{\textbf{4 layers}} \\" in latex
    assert r"random\textsuperscript{a} & 2.5 (2.4 to 2.6) \\" in latex
    assert "% Losses & such." in latex.splitlines()
    assert r"5 \%" in latex
    assert 'colspan="2"' in page
    assert "<small>2.4 to 2.6</small>" in page


def test_a_caption_is_not_printed_by_latex():
    sheet = Sheet.of("loss")
    sheet.caption = "Losses.\nOf two\rruns.\u2028See"
    sheet.add("2.5")
    above, tabular = sheet.latex().split(r"\begin{tabular}")
    assert all(line.startswith("% ") for line in re.split(r"[\r\n\u2028]", above.strip()))
    assert tabular.endswith("\\end{tabular}\n")


def test_columns_that_one_can_do_without_are_left_out_where_lines_are_too_short():
    sheet = Sheet([SheetColumn("name", text=True), *(SheetColumn(h, optional=True) for h in "ab")])
    sheet.add("weight", "1", "2")
    shown = [plain(sheet, width=width).splitlines()[0].split() for width in (20, 12, 9)]
    assert shown == [["name", "a", "b"], ["name", "a"], ["name"]]
