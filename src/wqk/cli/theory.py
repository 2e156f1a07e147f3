"""``wqk theory``: the paper's statements on a model and a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from wqk.cli.options import DistanceRanges, json_output, revision


class Steps(DistanceRanges):
    """Steps of a run: ``all``, or numbers and ranges.

    Examples
    --------
    >>> Steps().convert("all", None, None), Steps().convert("0,100", None, None)
    ((), (0, 100))
    """

    name = "steps"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse what was typed; ``all`` is the empty choice."""
        return () if value == "all" else super().convert(value, param, ctx)


@click.command()
@click.argument("ref")
@click.option(
    "--corpus",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="A token store, a text file, or token numbers as .npy.",
)
@click.option("--batches", type=click.IntRange(min=2), default=8, show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Blocks.")
@click.option("--block", type=click.IntRange(min=4), default=64, show_default=True, help="Tokens.")
@click.option(
    "--objective",
    type=click.Choice(["masked", "causal"]),
    help="What the model predicts.  [default: by its architecture]",
)
@click.option(
    "--mask-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.15,
    show_default=True,
    help="Share of the tokens that are masked.",
)
@click.option("--layers", type=DistanceRanges(), metavar="N,N:M", help="Only these layers.")
@click.option("--steps", type=Steps(), metavar="all|N,N", help="Saved steps of a run.")
@click.option("--seed", default=0, show_default=True, help="Of blocks, masks and fresh weights.")
@revision
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Save the findings: .json (with all numbers), .md or .csv.",
)
@click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw the updates' tails by layer: .png, .pdf or .svg.",
)
@json_output
def theory(
    ref: str,
    corpus: Path,
    batches: int,
    batch: int,
    block: int,
    objective: Literal["masked", "causal"] | None,
    mask_share: float,
    layers: tuple[int, ...] | None,
    steps: tuple[int, ...] | None,
    seed: int,
    revision: str | None,
    out: Path | None,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Test the paper's statements on a model and a text.

    REF is a checkpoint's folder or hub id, a training run's folder, or, for freshly drawn weights,
    a config.json or a model type such as bert. Needs PyTorch and transformers (pip install
    'wqk[train]'); takes minutes for a small model.

    \b
    Examples:
      wqk theory google-bert/bert-base-uncased --corpus wikitext.txt
      wqk theory ./run --corpus ./corpus --steps all --out findings.json
      wqk theory gpt2 --corpus ./corpus --layers 0,11 --figure tails.pdf
    """
    from wqk.cli import display, theory_display
    from wqk.figures import save_figure
    from wqk.figures.style import PICTURES
    from wqk.figures.theory import tails
    from wqk.theory.measuring import measure
    from wqk.theory.measuring.tails import CAUSES
    from wqk.theory.measuring.trajectory import measure_run
    from wqk.theory.opening import open_subjects
    from wqk.theory.report import WRITERS, as_objects, check_ending, report, save

    if out:
        check_ending(out, WRITERS)
    if figure:
        check_ending(figure, PICTURES)
    text, subjects = open_subjects(
        ref,
        corpus,
        steps=steps,
        batches=batches,
        batch=batch,
        block=block,
        objective=objective,
        mask_share=mask_share,
        seed=seed,
        revision=revision,
    )
    reports = []
    with theory_display.progress() as on_progress:
        for subject in subjects:
            findings = measure(subject, text, layers=layers, on_progress=on_progress)
            reports.append(report(subject, text, findings))
    reports[-1] = reports[-1].with_also(measure_run(ref, reports[-1].objective))
    if as_json:
        display.print_object(as_objects(reports))
    elif len(reports) > 1:
        theory_display.print_states(reports)
    else:
        theory_display.print_report(reports[0])
    if out:
        save(reports, out)
        display.say(f"{out}: {sum(len(one.findings) for one in reports)} findings")
    if figure:
        last = reports[-1]
        save_figure(tails(last.numbers(CAUSES), last.model), figure)
        display.say(f"picture: {figure}")
