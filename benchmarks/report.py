"""Size of reports, and the cost of opening one: ``python -m benchmarks.report [REF...]``.

A headless chromium opens each file a few times. The time is the processor's, of the page's own
thread, from an empty page until the first figures are drawn, so that other work on the machine
does not count; it is a median, and spread is (max − min) / median. The demo's two models come
first, then what REF names, with details, and 126 and 776 layers of 128 heads made up without any.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from playwright.sync_api import sync_playwright

import wqk
from wqk.reporting.demo import demo_table
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from collections.abc import Iterator

LAYERS, HEADS = 126, 128
MANY = 776  # layers, for 100,000 rows
WAIT = 600_000  # milliseconds


def made_up(layers: int = LAYERS) -> ScoreTable:
    """As many rows as the largest models have, or more, with scores by chance."""
    dice = np.random.default_rng(0)
    places = [(layer, head) for layer in range(layers) for head in (None, *range(HEADS))]
    scores = dice.uniform(-1, 1, (len(places), 3))
    names = ("symmetry", "directionality", "directionality_excess")
    common = {"checkpoint": "made up", "stack": "decoder", "kind": "self", "circuit": "qk"}
    common |= {"distance": 0, "heads": HEADS, "key_heads": 8, "status": "ok", "norm": 1.0}
    return ScoreTable.from_rows(
        {**common, "layer": layer, "head": head, **dict(zip(names, values, strict=True))}
        for (layer, head), values in zip(places, scores, strict=True)
    )


def reports(refs: list[str], folder: Path) -> Iterator[tuple[str, int, str, Path]]:
    """Name, rows, size of the details, and file of each report."""
    tables: list[tuple[str, ScoreTable]] = [("the demo", demo_table())]
    tables += [(Path(ref).name, wqk.scan(ref, details=True)) for ref in refs]
    tables += [(f"{count} layers of {HEADS} heads", made_up(count)) for count in (LAYERS, MANY)]
    for number, (name, table) in enumerate(tables):
        path, side = folder / f"{number}.html", folder / f"{number}.npz"
        if table.details:
            table.details.write(side)
        wqk.write_report(table, path)
        yield name, len(table), megabytes(side) if table.details else "–", path


def megabytes(path: Path) -> str:
    """Return a file's size for people."""
    return f"{path.stat().st_size / 1e6:.1f} MB"


def seconds_to_open(browser: Any, path: Path) -> float:
    """Processor time of the page's thread until the first curves are drawn."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    clock = context.new_cdp_session(page)
    clock.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(path.as_uri())
    page.wait_for_selector("#layers .plot .main-svg", state="attached")
    metrics = clock.send("Performance.getMetrics")["metrics"]
    context.close()
    return float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("refs", nargs="*", metavar="REF")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print("| | rows | details | report | opening | spread |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu"]
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=arguments)
        for name, rows, details, path in reports(options.refs, Path(folder)):
            times = [seconds_to_open(browser, path) for _ in range(options.rounds)]
            middle = statistics.median(times)
            spread = (max(times) - min(times)) / middle
            print(
                f"| {name} | {rows:,} | {details} | {megabytes(path)} | {middle:.1f} s "
                f"| {spread:.0%} |",
                flush=True,
            )
        browser.close()


if __name__ == "__main__":
    main()
