"""``wqk theory``: the paper's statements on a model and a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from wqk.cli.options import COUNT, FILE, PATH, REF, Number, Ranges, json_output, revision


class Steps(Ranges):
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
@click.argument("refs", metavar="REF...", nargs=-1, required=True, type=REF)
@click.option(
    "--corpus",
    required=True,
    type=PATH,
    metavar="PATH",
    help="Token store, text file, or token ids as .npy.",
)
@click.option("--batches", type=click.IntRange(min=2), default=8, help="How many batches.")
@click.option("--batch", type=COUNT, default=8, help="Blocks in a batch.")
@click.option("--block", type=click.IntRange(min=4), default=64, help="Tokens in a block.")
@click.option(
    "--objective",
    type=click.Choice(["masked", "each", "causal"]),
    help="What the model predicts: some masked tokens, each token from all others (one masked at "
    "a time), or each next token.  [default: by its architecture]",
)
@click.option(
    "--mask-share",
    type=Number(0, 1, min_open=True, max_open=True),
    default=0.15,
    help="Fraction of masked tokens.",
)
@click.option("--layers", type=Ranges(), metavar="N,N:M", help="Only these layers.")
@click.option("--steps", type=Steps(), metavar="all|N,N", help="Saved steps of a run.")
@click.option("--seed", default=0, help="Seed of blocks, masks and fresh weights.")
@revision
@click.option(
    "-v", "--verbose", is_flag=True, help="Show what each statement assumes and predicts."
)
@click.option(
    "--out",
    type=FILE,
    metavar="FILE",
    help="Save the findings: .json (with all numbers), .md or .csv.",
)
@click.option(
    "--figure",
    type=FILE,
    metavar="FILE",
    help="Draw the updates' tails by layer: .png, .pdf or .svg.",
)
@json_output
def theory(
    refs: tuple[str, ...],
    corpus: Path,
    objective: Literal["masked", "each", "causal"] | None,
    layers: tuple[int, ...] | None,
    verbose: bool,
    out: Path | None,
    figure: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Test the paper's statements on a model and a text.

    REF is a checkpoint's folder or Hub id, a training run's folder, or, for freshly drawn weights,
    a config.json or a model type such as bert. Several that differ only in their seed are also
    evaluated together. Needs PyTorch and transformers (pip install 'wqk[train]'); takes a minute
    for a small model.

    \b
    Examples:
      wqk theory google-bert/bert-base-uncased --corpus wikitext.txt
      wqk theory ./run --corpus ./corpus --steps all --out findings.json
      wqk theory ./seed-1 ./seed-2 ./seed-3 --corpus ./corpus -v
    """
    from wqk._files import check_output
    from wqk._style import PICTURES
    from wqk.cli import display, theory_display
    from wqk.figures import save_figure
    from wqk.figures.theory import tails
    from wqk.theory.causes import curves
    from wqk.theory.report import FINDINGS, WRITERS, as_objects, save
    from wqk.theory.study import study

    for path, what, endings in ((out, FINDINGS, WRITERS), (figure, "a picture", PICTURES)):
        if path:
            check_output(path, what, endings)
    with theory_display.progress() as on_progress:
        reports = study(
            refs, corpus, layers=layers, objective=objective, on_progress=on_progress, **options
        )
    if as_json:
        display.print_object(as_objects(reports))
    else:
        theory_display.print_reports(reports, verbose)
    if out:
        save(reports, out)
        display.say(f"{out}: {sum(len(one.findings) for one in reports)} findings")
    if figure:
        save_figure(tails(curves(reports[-1].findings), reports[-1].model), figure)
        display.say(f"picture: {figure}")
