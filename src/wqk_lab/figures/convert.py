"""Runs that continue another: scores, and those of the change, against steps of conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._style import PAPER_WIDTH, STACK_COLORS, new_figure, style
from wqk.errors import RunError
from wqk.forms import BilinearForm
from wqk.model import Model
from wqk.reporting.pictures import note
from wqk.tables.run import Run
from wqk_lab.figures.by_layer import finish_row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CONDITION = ("origin", "loss", "attention")
SCORES = (
    "symmetry",
    "directionality_excess",
    "change_symmetry",
    "change_norm",
    "kept_symmetric",
    "kept_skew",
    "new_symmetry",
)
CONVERT_SCHEMA = {
    "run": pl.String(),
    "seed": pl.Int64(),
    **dict.fromkeys(("corpus", *CONDITION), pl.String()),
    "step": pl.Int64(),
    "layer": pl.Int64(),
    **dict.fromkeys((*SCORES, "held_out_loss"), pl.Float64()),
}

# What is drawn, and its label.
SHOWN = {
    "symmetry": "symmetry",
    "change_symmetry": "symmetry of the change",
    "new_symmetry": "symmetry of what is new",
    "directionality_excess": "directionality (excess)",
}
# Intervals of fewer seeds are too wide: they would hide everything else.
ENOUGH = 3
ATTENTION = {"encoder": "full", "decoder": "causal"}
# Color says how tokens attend, the line what loss is trained on, the marker what the parent was.
ATTENTION_COLORS = {ATTENTION[mode]: color for mode, color in STACK_COLORS.items()}
LINES = {"masked": "-", "causal": "--", "masked-next": ":"}
MARKERS = {"decoder": "o", "encoder": "s"}
OTHER_ORIGIN = "^"


def convert_rows(runs: Sequence[Run]) -> pl.DataFrame:
    """Each run that continues another, at its checkpoints: by layer, and, with no layer, the mean.

    ``change_symmetry`` is that of W − W₀, W₀ being the form at step 0, and ``change_norm`` the
    ratio of their norms. ``kept_symmetric`` and ``kept_skew`` say how much of the two parts of W₀
    is left: the factors a and b for which a S₀ + b N₀ is nearest to W; ``new_symmetry`` is that of
    the rest. All are null at step 0. ``origin`` says what the parent was. Other runs are left out.

    Raises
    ------
    RunError
        No run continues another, or one has no checkpoint at step 0.
    """
    children = [run for run in runs if run.recipe.get("parent")]
    if not children:
        raise RunError(
            "convert needs runs that continue others: wqk lab train --from RUN --objective masked "
            "--keep-checkpoints 0,10,100 -o CHILD"
        )
    frames = [_rows_of(run) for run in children]
    return pl.concat(frames).sort("corpus", *CONDITION, "seed", "step", "layer", nulls_last=True)


def _rows_of(run: Run) -> pl.DataFrame:
    """Return the scores of one run's checkpoints."""
    from wqk.model import open as open_model

    if not run.checkpoints or run.checkpoints[0][0] != 0:
        raise RunError(
            f"{run.folder}: a change needs the checkpoint at step 0, where the conversion begins; "
            "train with --keep-checkpoints 0,… or spaced"
        )
    held_out = dict(run.metrics.select("step", "held_out_loss").drop_nulls().rows())
    first: Model | None = None
    rows: list[dict[str, Any]] = []
    for step, path in run.checkpoints:
        model = open_model(path)
        first = first or model
        for block, start in zip(model, first, strict=True):
            form = block.form
            scores = {
                "symmetry": float(form.symmetry),
                "directionality_excess": float(form.directionality_excess),
            }
            scores |= _change(start.form, form) if step else {}
            rows.append({"step": step, "layer": block.layer, **scores})
    layers = pl.DataFrame(
        rows, schema={name: CONVERT_SCHEMA[name] for name in ("step", "layer", *SCORES)}
    )
    means = layers.group_by("step").agg(pl.col(SCORES).mean())
    recipe = run.recipe
    rows_and_means = pl.concat([layers, means], how="diagonal").with_columns(
        run=pl.lit(run.name),
        seed=pl.lit(recipe["seed"]),
        corpus=pl.lit(run.corpus["folder"].rstrip("/").rpartition("/")[2]),
        origin=pl.lit(_origin(recipe["parent"]["recipe"])),
        loss=pl.lit(recipe["objective"]),
        attention=pl.lit(ATTENTION[recipe["mode"]]),
        held_out_loss=pl.col("step").replace_strict(held_out, default=None),
    )
    return rows_and_means.select(pl.col(name).cast(kind) for name, kind in CONVERT_SCHEMA.items())


def _change(before: BilinearForm, after: BilinearForm) -> dict[str, float]:
    """Scores of the change from one form to another, and what is left of the first one's parts."""
    change = after.difference(before)
    first, last = before.numpy(), after.numpy()
    parts = [(first + first.T) / 2, (first - first.T) / 2]
    symmetric, skew = (float((last * part).sum() / (part**2).sum()) for part in parts)
    new = last - symmetric * parts[0] - skew * parts[1]
    return {
        "change_symmetry": float(change.symmetry),
        "change_norm": float(change.norm / before.norm),
        "kept_symmetric": symmetric,
        "kept_skew": skew,
        "new_symmetry": float((new * new.T).sum() / (new**2).sum()),
    }


def _origin(parent: Mapping[str, Any]) -> str:
    """Name the state before a run: ``decoder``, or ``decoder, encoder`` after a conversion."""
    before = parent.get("parent")
    return f"{_origin(before['recipe'])}, {parent['mode']}" if before else str(parent["mode"])


def over_seeds(rows: pl.DataFrame, quantities: Sequence[str] = tuple(SHOWN)) -> pl.DataFrame:
    """Means over seeds of each condition, step and layer, with 95 % intervals by Student's t.

    Columns are those of the condition, ``quantity``, ``step``, ``layer``, ``value``, ``low``,
    ``high`` and ``seeds``; the ends are null for a single seed.
    """
    from wqk_lab.runs.seeds import paired

    keys = ["corpus", *CONDITION, "step", "layer"]
    summaries: list[dict[str, Any]] = []
    long = rows.unpivot([*quantities], index=[*keys, "seed"], variable_name="quantity").drop_nulls(
        "value"
    )
    for key, group in long.group_by([*keys, "quantity"], maintain_order=True):
        result = paired(group["value"].to_list())
        summaries.append(
            dict(zip([*keys, "quantity"], key, strict=True))
            | {"value": result.mean, "low": result.low, "high": result.high, "seeds": result.count}
        )
    return pl.DataFrame(summaries, schema_overrides={"low": pl.Float64(), "high": pl.Float64()})


@style()
def dose_curves(rows: pl.DataFrame) -> Figure:
    """Draw scores of the form, and of its change, against steps, by condition."""
    curves = over_seeds(rows.filter(pl.col("layer").is_null()))
    texts = rows["corpus"].unique(maintain_order=True)
    conditions = rows.select(CONDITION).unique(maintain_order=True).rows()
    figure = new_figure(PAPER_WIDTH, 0.9 + 1.9 * len(SHOWN))
    axes = figure.subplots(len(SHOWN), len(texts), sharex=True, sharey="row", squeeze=False)
    for row, (quantity, label) in zip(axes, SHOWN.items(), strict=True):
        for axis, text in zip(row, texts, strict=True):
            shown = curves.filter(corpus=text, quantity=quantity)
            for condition in conditions:
                _draw(axis, shown, condition)
            axis.set_xscale("symlog", linthresh=5, linscale=0.3)
            steps = sorted(set(rows["step"]))
            axis.set_xticks(steps, [f"{n}" if n in (0, *steps[1::2]) else "" for n in steps])
            axis.minorticks_off()
            axis.margins(x=0)
        finish_row(row, label)
    for axis, text in zip(axes[0], texts, strict=True):
        seeds = rows.filter(corpus=text)["seed"].n_unique()
        axis.set_title(f"{text} ({seeds} seeds)")
    for axis in axes[-1]:
        axis.set_xlabel("step of conversion")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    note(
        figure,
        "Means over layers and seeds; bands: 95 % intervals over seeds, from three seeds on.",
    )
    return figure


def _draw(axis: Axes, curves: pl.DataFrame, condition: tuple[str, ...]) -> None:
    curve = curves.filter(**dict(zip(CONDITION, condition, strict=True))).sort("step")
    origin, loss, attention = condition
    color = ATTENTION_COLORS[attention]
    look: dict[str, Any] = {
        "color": color,
        "linestyle": LINES[loss],
        "linewidth": 1,
        "marker": MARKERS.get(origin, OTHER_ORIGIN),
        "markersize": 3.5,
    }
    label = f"{origin.replace(', ', ' → ')}: {loss} loss, {attention} attention"
    axis.plot(curve["step"], curve["value"], label=label, **look)
    well_known = curve.filter(pl.col("seeds") >= ENOUGH)
    axis.fill_between(
        well_known["step"],
        well_known["low"],
        well_known["high"],
        color=color,
        alpha=0.1,
        linewidth=0,
    )
