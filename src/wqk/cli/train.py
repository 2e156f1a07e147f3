"""``wqk train``: an encoder or a decoder, from a token store to a run's directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from wqk.cli.options import COUNT, FOLDER, use_threads
from wqk.training.recipe import PRESETS, SIZES, Recipe, make_recipe

# Fields of the recipe that have options of another form than `--name VALUE`.
SPECIAL = ("preset", "config", "penalty", "penalty_weight")

TYPES = {"int": int, "float": float, "str": str, "bool": bool}


def recipe_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """An option for every field of the recipe."""
    for entry in reversed(fields(Recipe)):
        if entry.name in SPECIAL:
            continue
        kind = str(entry.type).removesuffix(" | None")
        choices = entry.metadata.get("choices")
        function = click.option(
            f"--{entry.name.replace('_', '-')}",
            type=click.Choice(choices) if choices else TYPES[kind],
            is_flag=kind == "bool",
            default=None,
            help=entry.metadata["help"] + _defaults(entry.name),
        )(function)
    return function


def _defaults(name: str) -> str:
    """The presets' values of a field, at their own sizes."""
    fast, paper = (getattr(make_recipe(preset), name) for preset in ("fast", "paper"))
    if fast is None:
        return ""
    return f"  [default: {fast}]" if fast == paper else f"  [default: {fast}; paper: {paper}]"


@click.command()
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    help="Source of all other defaults: fast (default), or paper.",
)
@click.option("--size", type=click.Choice(list(SIZES)), help="Layers, width and heads.")
@click.option(
    "--corpus", type=FOLDER, metavar="DIR", help="Token store to train on, written by wqk corpus."
)
@click.option("-o", "--out", type=FOLDER, required=True, metavar="RUN", help="Folder of the run.")
@click.option("--resume", is_flag=True, help="Resume from the run's last checkpoint.")
@click.option(
    "--stop",
    type=COUNT,
    metavar="STEP",
    help="Stop after this step; --resume continues. The schedule remains that of all steps.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="FILE.json",
    help="A transformers configuration instead of size and norm.",
)
@click.option(
    "--penalty",
    "penalty",
    metavar="KIND=WEIGHT",
    help="Add a penalty to the loss: symmetric=0.1 or skew=0.1.",
)
@recipe_options
@click.option("--threads", type=COUNT, metavar="N", help="Number of CPU threads.")
@click.option(
    "--report-to",
    multiple=True,
    metavar="LOGGER",
    help="An accelerate tracker, such as tensorboard; repeatable.",
)
def train(
    preset: str | None,
    size: str | None,
    corpus: Path | None,
    out: Path,
    resume: bool,
    stop: int | None,
    config: Path | None,
    penalty: str | None,
    threads: int | None,
    report_to: tuple[str, ...],
    **chosen: Any,
) -> None:
    """Train a small encoder or decoder and record losses, scores and checkpoints in RUN.

    Unset options come from the preset. Defaults are shown for each preset's own size; in fast, the
    learning rate and the initial weights depend on the width, intervals and warmup on the
    steps. --resume continues an interrupted run; any options must equal its original ones. For
    several GPUs or processes: torchrun --nproc-per-node N -m wqk train.

    \b
    Examples:
      wqk train --corpus wikipedia -o runs/encoder
      wqk train --mode decoder --steps 4000 --corpus wikipedia -o runs/decoder
      wqk train --preset paper --size mini --init symmetric --corpus wikipedia -o runs/symmetric
      wqk train --resume -o runs/encoder
    """
    from wqk.cli import train_display
    from wqk.runs.run import SETTINGS, open_run
    from wqk.training.models import read_configuration
    from wqk.training.training import train as train_model

    if corpus is None and not resume:
        raise click.UsageError("Missing option '--corpus': a token store made by wqk corpus.")
    overrides = {name: value for name, value in chosen.items() if value is not None}
    if penalty:
        overrides |= _penalty(penalty)
    if config:
        overrides["config"] = read_configuration(config)
    if resume:
        before = Recipe.from_json(open_run(out).recipe)
        named: dict[str, Any] = {"preset": preset} if preset else {}
        recipe = replace(before, **(named | SIZES.get(size or "", {}) | overrides))
    else:
        recipe = make_recipe(preset or "fast", size=size, **overrides)
    with train_display.progress(recipe) as on_progress:
        try:
            use_threads(threads)
            run = train_model(
                recipe,
                corpus,
                out,
                resume=resume,
                stop=stop,
                report_to=report_to,
                on_progress=on_progress,
            )
        except KeyboardInterrupt:
            begun = (out / SETTINGS).exists()
            next_step = f"wqk train --resume -o {out} resumes it" if begun else "no run was begun"
            raise KeyboardInterrupt(next_step) from None
    train_display.print_outcome(run)


def _penalty(text: str) -> dict[str, Any]:
    kind, _, weight = text.partition("=")
    try:
        return {"penalty": kind, "penalty_weight": float(weight)}
    except ValueError:
        raise click.BadParameter(
            f"expected a kind and a weight such as symmetric=0.1, got {text!r}",
            param_hint="--penalty",
        ) from None
