"""``wqk demo``: the paper's contrast on two models that come with the package."""

from __future__ import annotations

from pathlib import Path

import click

from wqk.cli.options import FILE, json_output


@click.command()
@click.option(
    "--out",
    type=FILE,
    default=Path("wqk-demo.png"),
    metavar="FILE",
    help="Figure to write (.png, .pdf, .svg); needs matplotlib.",
)
@click.option(
    "--report",
    type=FILE,
    default=Path("wqk-demo.html"),
    metavar="FILE",
    help="Report to write (.html); needs plotly.",
)
@json_output
def demo(out: Path, report: Path, as_json: bool) -> None:
    """Scan an encoder and a decoder trained with the same recipe, side by side.

    Needs no network and no PyTorch.
    """
    from wqk.cli import display
    from wqk.demo.demo import demo_figure, demo_introduction, demo_table, demo_verdict
    from wqk.errors import MissingPackage
    from wqk.figures import save_figure
    from wqk.reporting import check_report, write_report

    table = demo_table()
    if as_json:
        display.print_json(table)
        return
    display.print_side_by_side(table, demo_introduction(), demo_verdict(table))
    try:
        figure = demo_figure(table)
    except MissingPackage as missing:
        display.say(f"no picture: {missing}")
    else:
        save_figure(figure, out)
        display.say(f"picture: {out}")
    try:
        check_report(report)
    except MissingPackage as missing:
        display.say(f"no report: {missing}")
    else:
        write_report(table, report)
        display.say(f"report: {report}")
