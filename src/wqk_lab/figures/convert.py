"""Conversions of runs: scores of forms and of changes, by steps of conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._console import counted
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

# Summarized quantities with labels; the figure draws two, the numbers include all.
SHOWN = {
    "symmetry": "symmetry",
    "change_symmetry": "symmetry of the change",
    "new_symmetry": "symmetry of what is new",
    "directionality_excess": "directionality (excess)",
}
DRAWN = ("symmetry", "directionality_excess")
# Intervals of fewer seeds are too wide: they would hide everything else.
ENOUGH = 3
ATTENTION = {"encoder": "full", "decoder": "causal"}
# The color stands for the attention, the line and the marker for the loss.
ATTENTION_COLORS = {ATTENTION[mode]: color for mode, color in STACK_COLORS.items()}
LINES = {"masked": "-", "causal": "--", "masked-next": ":"}
MARKERS = {"masked": "o", "causal": "s", "masked-next": "^"}


def convert_rows(runs: Sequence[Run]) -> pl.DataFrame:
    """Return scores of continuing runs at their checkpoints, by layer, and means without layer.

    ``change_symmetry`` is the symmetry of W − W₀, with the form W₀ at step 0, and ``change_norm``
    the ratio of their norms. ``kept_symmetric`` and ``kept_skew`` are the remaining shares of the
    two parts of W₀: the factors a and b for which a S₀ + b N₀ is nearest to W. ``new_symmetry`` is
    the symmetry of the remainder. All are null at step 0. ``origin`` describes the parent. Other
    runs are left out.

    Raises
    ------
    RunError
        No run continues another run, or a continuing run has no checkpoint at step 0.
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
    """Return scores of the change of a form, and the remaining shares of the first form's parts."""
    change = after.difference(before)
    first = before.numpy()
    last = after.numpy()
    symmetric_part = (first + first.T) / 2
    skew_part = (first - first.T) / 2
    kept_symmetric = float((last * symmetric_part).sum() / (symmetric_part**2).sum())
    kept_skew = float((last * skew_part).sum() / (skew_part**2).sum())
    new = last - kept_symmetric * symmetric_part - kept_skew * skew_part
    return {
        "change_symmetry": float(change.symmetry),
        "change_norm": float(change.norm / before.norm),
        "kept_symmetric": kept_symmetric,
        "kept_skew": kept_skew,
        "new_symmetry": float((new * new.T).sum() / (new**2).sum()),
    }


def _origin(parent: Mapping[str, Any]) -> str:
    """Describe the state before a run: ``decoder``, or ``decoder, encoder`` after a conversion."""
    mode = str(parent["mode"])
    before = parent.get("parent")
    if before:
        return f"{_origin(before['recipe'])}, {mode}"
    return mode


def over_seeds(rows: pl.DataFrame, quantities: Sequence[str] = tuple(SHOWN)) -> pl.DataFrame:
    """Return means over seeds by condition, step and layer, with 95 % intervals by Student's t.

    Columns are the columns of the condition, ``quantity``, ``step``, ``layer``, ``value``, ``low``,
    ``high`` and ``seeds``; ``low`` and ``high`` are null for a single seed.
    """
    from wqk_lab.runs.seeds import paired

    keys = ["corpus", *CONDITION, "step", "layer"]
    summaries: list[dict[str, Any]] = []
    values = rows.unpivot([*quantities], index=[*keys, "seed"], variable_name="quantity")
    columns = [*keys, "quantity"]
    for place, values_of_seeds in values.drop_nulls("value").group_by(columns, maintain_order=True):
        result = paired(values_of_seeds["value"].to_list())
        summaries.append(
            {
                **dict(zip(columns, place, strict=True)),
                "value": result.mean,
                "low": result.low,
                "high": result.high,
                "seeds": result.count,
            }
        )
    return pl.DataFrame(summaries, schema_overrides={"low": pl.Float64(), "high": pl.Float64()})


@style()
def dose_curves(rows: pl.DataFrame) -> Figure:
    """Draw scores of the form against steps: a column for each parent, rows for texts and scores.

    Parameters
    ----------
    rows
        Rows as of `convert_rows`, of any number of texts, parents and seeds.
    """
    curves = over_seeds(rows.filter(pl.col("layer").is_null()), DRAWN)
    texts = rows["corpus"].unique(maintain_order=True)
    origins = sorted(rows["origin"].unique(), key=lambda origin: (origin.count(","), origin))
    panels = list(product(DRAWN, texts))
    figure = new_figure(PAPER_WIDTH, 0.8 + 1.5 * len(panels))
    axes = figure.subplots(len(panels), len(origins), sharex=True, squeeze=False)
    steps = sorted(set(rows["step"]))
    labeled_steps = {0, *steps[1::2]}
    step_labels = [str(step) if step in labeled_steps else "" for step in steps]
    for (quantity, text), row in zip(panels, axes, strict=True):
        first = axes[panels.index((quantity, texts[0])), 0]
        for axis, origin in zip(row, origins, strict=True):
            if axis is not first:
                axis.sharey(first)  # one range for all panels of a score
            axis.tick_params(labelleft=axis is row[0])
            _draw(axis, curves.filter(corpus=text, quantity=quantity, origin=origin))
            axis.set_xscale("symlog", linthresh=5, linscale=0.3)
            axis.set_xticks(steps, step_labels)
            axis.minorticks_off()
            axis.margins(x=0.02)
        finish_row(row, f"{SHOWN[quantity]}\n{text}")
    for axis, origin in zip(axes[0], origins, strict=True):
        axis.set_title(f"from: {origin.replace(', ', ' → ')}")
    for axis in axes[-1]:
        axis.set_xlabel("step after the change")
    handles: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2)
    seeds = counted(rows["seed"].n_unique(), "seed")
    note(
        figure,
        f"Means over layers and {seeds}; bands: 95 % intervals over seeds, from {ENOUGH} seeds on.",
    )
    return figure


def _draw(axis: Axes, curves: pl.DataFrame) -> None:
    """Draw a line, with its band, for each loss and attention."""
    for (loss, attention), curve in curves.sort("attention", "loss", "step").group_by(
        "loss", "attention", maintain_order=True
    ):
        color = ATTENTION_COLORS[str(attention)]
        axis.plot(
            curve["step"],
            curve["value"],
            label=f"{loss} loss, {attention} attention",
            color=color,
            linestyle=LINES[str(loss)],
            linewidth=1,
            marker=MARKERS[str(loss)],
            markersize=3,
        )
        known = curve.filter(pl.col("seeds") >= ENOUGH)
        axis.fill_between(
            known["step"], known["low"], known["high"], color=color, alpha=0.12, linewidth=0
        )
