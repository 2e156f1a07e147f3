"""Make the pictures of the documentation: python docs/generate_images.py [PAIR] [STARTS].

PAIR is a folder with the runs ``encoder`` and ``decoder`` of examples/train_demo_pair.sh, STARTS
one with those of examples/table1-starts.toml; without them, their pictures stay as they are. The
report is photographed by Chromium, driven by playwright.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from wqk import demo_model, show, write_report
from wqk._style import save_figure
from wqk.reporting.demo import demo_figure, demo_table
from wqk_lab.figures import Sources, draw, read_sources

IMAGES = Path(__file__).parent / "images"
CHROMIUM = "/usr/bin/chromium"


STARTS = ("random", "published", "published-independent", "published-values", "symmetric")
SCALES = ("", "-norm-*", "-values-*")


def runs_of(folder: Path, *cells: str, seeds: str = "[0-9]") -> Sources:
    """The runs of some cells."""
    found = (run for cell in cells for run in sorted(folder.glob(f"{cell}-{seeds}")))
    return read_sources(*found)


def photograph(page: Path, picture: Path, width: int = 1200, height: int = 1150) -> None:
    """The top of an HTML page, as a browser shows it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": height})
        tab.goto(page.resolve().as_uri(), timeout=0)
        tab.wait_for_timeout(1000)  # charts are drawn when they come into view
        tab.screenshot(path=picture, timeout=0)
        browser.close()


def main(pair: str = "", starts: str = "") -> None:
    """Make every picture whose sources are there."""
    table = demo_table()
    save_figure(demo_figure(table), IMAGES / "demo.png")
    blocks = table.details.blocks if table.details else ()
    save_figure(draw("fig2", Sources(blocks=blocks)), IMAGES / "fig2.png")
    show(demo_model("encoder"), 0, coupling=True).save(IMAGES / "coupling.png")
    show(demo_model("decoder"), 3).save(IMAGES / "form.png")
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.html")
        write_report(table, report)
        photograph(report, IMAGES / "report.png")
    if pair:
        runs = read_sources(f"{pair}/encoder", f"{pair}/decoder")
        save_figure(draw("fig3", runs), IMAGES / "fig3.png")
        both = replace(runs, published=True)
        save_figure(draw("s3", both), IMAGES / "figs3.png")
    if starts:
        runs = runs_of(Path(starts), *STARTS)
        save_figure(draw("s5", runs), IMAGES / "figs5.png")
        save_figure(draw("losses", runs), IMAGES / "losses.png")
        scaled = [f"{start}{scale}" for start in ("random", "symmetric") for scale in SCALES]
        doses = replace(runs_of(Path(starts), *scaled, seeds="[1-3]"), level=3.0)
        save_figure(draw("dose", doses), IMAGES / "dose.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
