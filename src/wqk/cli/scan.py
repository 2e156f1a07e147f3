"""``wqk scan``: the scores of one or several checkpoints."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Literal

import click

from wqk.cli.options import DistanceRanges, family_file, gamma, heads_per_layer, json_output


@click.command()
@click.argument("refs", nargs=-1, required=True, metavar="REF...")
@click.option("--heads", is_flag=True, help="Score every single head, too.")
@gamma
@click.option(
    "--circuit",
    type=click.Choice(["qk", "ov"]),
    default="qk",
    show_default=True,
    help="Queries with keys, or values with outputs.",
)
@click.option("--fold-norm", is_flag=True, help="Fold in the norms that feed both sides.")
@click.option("--bias", is_flag=True, help="Score the form augmented by the biases.")
@click.option(
    "--distance",
    "distances",
    type=DistanceRanges(),
    default="0",
    metavar="N,N:M",
    help="Relative distances, such as 0,1,8:64 (rotary models).",
)
@click.option(
    "--revision", "revisions", multiple=True, metavar="R", help="Hub revision; repeatable."
)
@family_file
@heads_per_layer
@click.option(
    "--device", metavar="D", help="Let PyTorch multiply there, such as on cuda, instead of NumPy."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Save the table: .parquet, .csv, .jsonl, .tex or .md.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.html",
    help="Write a report that a browser opens, with every head.",
)
@click.option(
    "--details",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.npz",
    help="Save matrices as images, norms and the coupling of heads, and show them in the report.",
)
@json_output
def scan(
    refs: tuple[str, ...],
    heads: bool,
    gamma: float,
    circuit: Literal["qk", "ov"],
    fold_norm: bool,
    bias: bool,
    distances: tuple[int, ...],
    revisions: tuple[str, ...],
    family: Path | None,
    heads_per_layer: int | None,
    device: str | None,
    out: Path | None,
    report: Path | None,
    details: Path | None,
    as_json: bool,
) -> None:
    """Score the query-key form of every layer.

    REF is a folder, a file, an https:// address, or a hub id such as
    google-bert/bert-base-uncased. A training run's folder is read as its checkpoint-* steps.

    \b
    Examples:
      wqk scan google-bert/bert-base-uncased
      wqk scan ./my-model --heads --out scores.parquet
      wqk scan ./my-model --details forms.npz --report report.html
      wqk scan ./run --json | jq '.summary[].symmetry_median'
    """
    from wqk.checkpoints import open_checkpoint, steps_of
    from wqk.cli import display
    from wqk.reporting import check_report, write_report
    from wqk.scanning.details import check_details_ending, join_details, read_details
    from wqk.scanning.scan import scan as scan_checkpoint
    from wqk.scanning.tables import check_ending, join

    for path, check in (
        (out, check_ending),
        (details, check_details_ending),
        (report, check_report),
    ):
        if path:
            check(path)
    options: dict[str, Any] = {
        "gamma": gamma,
        "circuit": circuit,
        "fold_norm": fold_norm,
        "bias": bias,
        "family": family,
        "heads_per_layer": heads_per_layer,
    }
    tables, looks = [], []
    for place, revision in product((p for ref in refs for p in steps_of(ref)), revisions or [None]):
        with display.progress(place) as on_progress:
            checkpoint = open_checkpoint(place, revision=revision)
            table = scan_checkpoint(
                checkpoint,
                heads=heads or report is not None,
                distances=distances,
                device=device,
                on_progress=on_progress,
                **options,
            )
        tables.append(table)
        if not as_json:
            display.print_table(table if heads else table.layers)
        if details:
            with display.progress(f"{place}, details") as on_progress:
                looks.append(
                    read_details(
                        checkpoint, distance=distances[0], on_progress=on_progress, **options
                    )
                )
        display.say_traffic(checkpoint)
    whole = join([table if heads else table.layers for table in tables])
    if as_json:
        display.print_json(whole)
    elif len(tables) > 1:
        display.print_overview(whole)
    if out:
        whole.save(out)
        display.say(f"{out}: {len(whole)} rows")
    if details:
        join_details(looks).save(details)
        display.say(f"{details}: {sum(len(look.blocks) for look in looks)} layers")
    if report:
        write_report(tables, report, details=looks)
        display.say(f"report: {report}")
