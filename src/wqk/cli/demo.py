"""``wqk demo``: the paper's contrast on two models that come with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from wqk.cli.options import FILE, json_output


@click.command()
@click.option(
    "--out", type=FILE, default=Path("wqk-demo.png"),
    help="Figure to write (.png, .pdf, .svg); needs matplotlib.",
)  # fmt: skip
@click.option(
    "--report", type=FILE, metavar="FILE.html", default=Path("wqk-demo.html"),
    help="Report to write (.html); needs plotly.",
)  # fmt: skip
@json_output
def demo(out: Path, report: Path, as_json: bool) -> None:
    """Scan an encoder and a decoder trained with the same recipe, side by side.

    Needs no network and no PyTorch.
    """
    from wqk._style import save_figure
    from wqk.cli import display
    from wqk.errors import MissingPackage
    from wqk.reporting import write_report
    from wqk.reporting.demo import demo_figure, demo_introduction, demo_table, demo_verdict
    from wqk.tables.rendering import side_by_side

    table = demo_table()
    if as_json:
        display.print_json(table)
        return
    lines = (demo_introduction(), *side_by_side(table), "", demo_verdict(table))
    display.output().print(*lines, sep="\n")
    files: dict[str, tuple[Path, Callable[[], None]]] = {
        "picture": (out, lambda: save_figure(demo_figure(table), out)),
        "report": (report, lambda: write_report(table, report)),
    }
    for what, (path, write) in files.items():
        try:
            write()
            display.say(f"{what}: {path}")
        except MissingPackage as missing:
            display.say(f"no {what}: {missing}")
