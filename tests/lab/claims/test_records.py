"""Every figure and every table of the results and of the theory has a record that ships."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from wqk_lab.figures import numbers, read_sources

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results"
FIGURES = tomllib.loads((RESULTS / "figures.toml").read_text(encoding="utf-8"))["figure"]
LISTED = {figure["picture"] for figure in FIGURES}
PAGES = [
    path
    for folder in (RESULTS, DOCS / "theory")
    for path in sorted(folder.glob("*.md"))
    if path.name != "all-contrasts.md"
]

# Tables between these marks are written by docs/generate_results.py and the scripts of the theory,
# from records; other tests compare each with its page.
GENERATED = re.compile(r"<!-- (.+?): begin -->.*?<!-- \1: end -->", re.DOTALL)
# A number with decimals that is not the number of a theorem.
MEASURED = re.compile(r"(?<!Proposition )(?<!Lemma )(?<!Theorem )(?<![\w.])\d*\.\d+(?!\.)")
# Numbers that set up an experiment, or define a verdict.
SETTINGS = re.compile(r"momentum \.9|rate \.3|at most \.05|AUC: \.5")


def figures_of(text: str) -> set[str]:
    """Return the names of the pictures that a page shows."""
    links = re.findall(r"!\[[^]]*\]\(([^)]+)\)|```\{(?:figure|image)\} (\S+)", text)
    return {Path(markdown or directive).name for markdown, directive in links}


def rows_without_a_record(text: str) -> list[str]:
    """Return rows of hand-written tables with a number whose contrast or function is not named."""
    rows = []
    for line in GENERATED.sub("", text).splitlines():
        by_hand = line.startswith("|") and MEASURED.search(SETTINGS.sub("", line))
        if by_hand and not re.search(r"`[a-z0-9._-]+`", line):
            rows.append(line)
    return rows


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_figures_and_tables_have_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures_of(text) <= LISTED, "list the figure, its records and command in figures.toml"
    assert not rows_without_a_record(text)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["picture"])
def test_records_of_figures_exist(figure: dict[str, str]) -> None:
    assert (DOCS / "images" / figure["picture"]).is_file()
    assert figure["command"]
    assert figure["records"]
    assert all((RESULTS / record).is_file() for record in figure["records"])


def test_every_listed_figure_is_shown() -> None:
    shown = set().union(*(figures_of(path.read_text(encoding="utf-8")) for path in PAGES))
    assert shown == LISTED


def test_a_figure_or_a_row_without_a_record_is_noticed() -> None:
    assert figures_of("![Losses](../images/new.png)") - LISTED == {"new.png"}
    assert figures_of("```{figure} ../images/other.png\n```") - LISTED == {"other.png"}
    assert not rows_without_a_record("| Theorem 2.4, Remark S1.15 | pairs |")
    assert rows_without_a_record("| a | −.14 nats |") == ["| a | −.14 nats |"]
    assert not rows_without_a_record("| a | −.14 nats (`published`) |")
    assert not rows_without_a_record("<!-- a: begin -->\n| a | .14 |\n<!-- a: end -->")


def test_the_pair_along_training_is_drawn_from_its_record() -> None:
    """By the command that figures.toml gives."""
    rows = numbers("fig3", read_sources(RESULTS / "make-train" / "training.csv"))
    assert rows["step"].max() == 1600
    ends = rows.filter(step=1600)
    assert ends.height > 0
