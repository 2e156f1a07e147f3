"""What a report says of training runs, so that it can be read alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import entry_points
from typing import Any

import polars as pl

from wqk._console import counted, number
from wqk.reporting.payload import digits, training_result
from wqk.tables.rendering import label
from wqk.tables.run import Run
from wqk.tables.sheet import Column, Sheet

# What differs between runs of one recipe.
SEED = "seed"

# Packages tell what they find in runs with an entry point of this group: a function of the runs
# that returns sentences.
RESULTS = "wqk.results"


def by_recipe(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs that differ only in their seed, by a name that says what else differs."""
    cells: defaultdict[tuple[tuple[str, str], ...], list[Run]] = defaultdict(list)
    for run in runs:
        cells[tuple((k, str(v)) for k, v in run.recipe.items() if k != SEED)].append(run)
    varied = _varied([group[0].recipe for group in cells.values()])
    named = {}
    for group in cells.values():
        words = [f"{name.replace('_', ' ')} {group[0].recipe.get(name)}" for name in varied]
        named[", ".join(words) or str(group[0].recipe.get("mode") or group[0].name)] = group
    return named


def _varied(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The entries in which recipes differ, besides the seed."""
    names = dict.fromkeys(name for recipe in recipes for name in recipe if name != SEED)
    return [name for name in names if len({str(recipe.get(name)) for recipe in recipes}) > 1]


def runs_section(runs: Sequence[Run]) -> str:
    """Results in words, a table of the runs, the recipe and the environment, as HTML."""
    if not runs:
        return ""
    results = [_result(name, group) for name, group in by_recipe(runs).items()]
    results += [said for found in entry_points(group=RESULTS) for said in found.load()(runs)]
    told = "".join(f"<li>{escape(said)}</li>" for said in results)
    return (
        '<section id="runs"><h2>Results</h2>'
        f"<ul>{told}</ul>"
        '<div class="panels" id="losses"></div>'
        '<p class="caption">Losses in nats per token, and the median symmetry over layers: '
        "the mean over seeds, and a band from the lowest to the highest, where all seeds have one."
        '</p><div class="wide" tabindex="0" role="region" aria-label="Runs">'
        f"{_table(runs).html()}</div>"
        f"<details><summary>Recipe and environment</summary>{_recipe(runs)}</details></section>"
    )


def _result(name: str, runs: Sequence[Run]) -> str:
    """The outcome of runs with one recipe, at the last step that all of them reached."""
    losses = _common(runs, "held_out_loss")
    losses = losses if losses.height else _common(runs, "loss")
    symmetries = _common(runs, "symmetry")
    return training_result(
        name,
        int(losses["step"][-1]) if losses.height else 0,
        *([list(losses["values"][place]) for place in (0, -1)] if losses.height else ([], [])),
        *([list(symmetries["values"][i]) for i in (0, -1)] if symmetries.height > 1 else ([], [])),
    )


def _common(runs: Sequence[Run], column: str) -> pl.DataFrame:
    """The steps at which all runs have a value, and the ``values``, one for each run."""
    rows = pl.concat([_curve(run, column) for run in runs])
    together = rows.group_by("step").agg(pl.col("value").alias("values"))
    return together.filter(pl.col("values").list.len() == len(runs)).sort("step")


def _curve(run: Run, column: str) -> pl.DataFrame:
    """A column of the metrics, or the median ``symmetry`` over layers, by step."""
    if column == "symmetry":
        layers = run.scores.layers.frame.group_by("step").agg(pl.median("symmetry").alias("value"))
        return layers.drop_nulls().sort("step")
    return run.metrics.select("step", pl.col(column).alias("value")).drop_nulls()


def _table(runs: Sequence[Run]) -> Sheet:
    """A row for each run."""
    names = ("step", "tokens", "loss", "held-out loss", "median symmetry", "minutes")
    sheet = Sheet([Column("run", text=True), *map(Column, names)])
    for run in runs:
        last = {
            name: values[-1] if len(values := run.metrics[name].drop_nulls()) else None
            for name in ("step", "tokens", "loss", "held_out_loss", "seconds")
        }
        symmetry = _curve(run, "symmetry")["value"]
        sheet.add(
            run.name,
            *("–" if last[name] is None else f"{last[name]:,}" for name in ("step", "tokens")),
            *(number(last[name]) for name in ("loss", "held_out_loss")),
            number(symmetry[-1] if len(symmetry) else None, 2),
            "–" if last["seconds"] is None else f"{last['seconds'] / 60:.1f}",
        )
    return sheet


def _recipe(runs: Sequence[Run]) -> str:
    """What all runs share, and what they were made with."""
    recipes = [run.recipe for run in runs]
    varied = {*_varied(recipes), SEED}
    shared = {n: v for n, v in recipes[0].items() if n not in varied and v is not None}
    environment = runs[0].settings.get("environment") or {}
    shared |= {str(n): v for n, v in environment.items() if isinstance(v, str | int | float)}
    seeds = sorted({str(recipe.get(SEED)) for recipe in recipes})
    shared |= {"corpus": str(runs[0].corpus.get("folder", "–")), "seeds": ", ".join(seeds)}
    told = "".join(
        f"<dt>{escape(label(str(name)).replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for name, value in shared.items()
    )
    return f"<p>Shared by {counted(len(runs), 'run')}:</p><dl>{told}</dl>"


def loss_curves(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Losses and symmetry over the steps that all seeds of a recipe have: mean and range."""
    curves = []
    kinds = {"training loss": "loss", "held-out loss": "held_out_loss", "symmetry": "symmetry"}
    for name, group in by_recipe(runs).items():
        for kind, column in kinds.items():
            found = _common(group, column)
            if found.height:
                values = pl.col("values").list
                spread = {"mean": values.mean(), "low": values.min(), "high": values.max()}
                drawn = found.select("step", **spread)
                curves.append(
                    {"name": name, "kind": kind, "mode": str(group[0].recipe.get("mode"))}
                    | {"step": drawn["step"].to_list()}
                    | {n: [digits(v) for v in drawn[n]] for n in spread}
                )
    return curves
