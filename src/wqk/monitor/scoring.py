"""The scores of one step, and of the change since the previously scored step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from wqk.attention import load_attention
from wqk.attention.coordinates import Block
from wqk.forms import BilinearForm
from wqk.scanning.scan import scan_plans
from wqk.scanning.schema import SUMMARIZED
from wqk.scanning.tables import ScoreTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk.families import AttentionPlan
    from wqk.monitor.tracking import Snapshot

# What is not known of weights that are not finite.
SCORES = (
    "norm",
    "symmetry",
    "symmetry_null",
    "symmetry_within_heads",
    "symmetry_between_heads",
    "symmetry_within_random",
    "directionality",
    "directionality_excess",
)


def score_look(
    snapshot: Snapshot, plans: Sequence[AttentionPlan], gamma: float, heads: bool
) -> ScoreTable:
    """The table that `wqk.scan` gives for the model; non-finite blocks are marked."""
    table = scan_plans(snapshot, plans, gamma=gamma, heads=heads)
    return _blanked(table, [plan for plan in plans if not snapshot.is_finite(plan)])


def score_update(
    before: Snapshot,
    after: Snapshot,
    plans: Sequence[AttentionPlan],
    gamma: float,
    heads: bool,
) -> ScoreTable:
    """Scores of the forms after minus the forms before, ΔW_qk (paper, Remark S1.6), of rank 2r.

    ``symmetry_within_random`` is null: it assigns dimensions to heads at random, and those of a
    difference are not the model's.
    """

    def read(plan: AttentionPlan) -> Block:
        old, new = load_attention(before, plan), load_attention(after, plan)
        return Block((), iter([(0, _change(new.heads, old.heads))]))

    table = scan_plans(after, plans, gamma=gamma, heads=heads, read=read)
    unknown = pl.lit(None, pl.Float64).alias("symmetry_within_random")
    broken = [plan for plan in plans if not (before.is_finite(plan) and after.is_finite(plan))]
    frame = _blanked(table, broken).frame.with_columns(unknown)
    return ScoreTable(frame, {**table.metadata, "form": "update"})


def _change(new: BilinearForm, old: BilinearForm) -> BilinearForm:
    """The difference of two forms, with its small and large factors rescaled to one size.

    It is (A − A₀)Bᵀ + A₀(B − B₀)ᵀ, and a small step next to large weights looks like cancellation,
    for which the kernels take twice the digits and several times the time. Powers of two move from
    one side to the other without rounding.
    """
    change = new.difference(old)
    rank = new.rank
    sizes = [
        float(np.abs(factor).max())
        for factor in (
            change.query[..., :rank],
            change.query[..., rank:],
            change.key[..., rank:],
            change.key[..., :rank],
        )
    ]
    if min(sizes) == 0:
        return change
    step_query, query, step_key, key = map(math.log2, sizes)
    power = 2.0 ** round((query + key - step_query - step_key) / 4)
    scale = np.repeat(np.asarray([power, 1 / power], change.query.dtype), rank)
    return BilinearForm(change.query * scale, change.key / scale)


def medians(table: ScoreTable, prefix: str = "") -> dict[str, float]:
    """Medians over layers by name, such as ``symmetry_median``.

    With several stacks or kinds of attention, names begin with these:
    ``decoder/cross/symmetry_median``.
    """
    summary = table.layers.summary()
    leading = [name for name in ("stack", "kind") if summary[name].n_unique() > 1]
    return {
        "/".join([*(row[name] for name in leading), f"{prefix}{score}_median"]): median
        for row in summary.iter_rows(named=True)
        for score in SUMMARIZED
        if (median := row[f"{score}_median"]) is not None
    }


def _blanked(table: ScoreTable, broken: Sequence[AttentionPlan]) -> ScoreTable:
    """The table with no scores for these blocks, and the status ``non-finite``."""
    if not broken:
        return table
    places = pl.DataFrame(
        [(p.stack, p.kind, p.layer) for p in broken],
        schema=["stack", "kind", "layer"],
        orient="row",
    ).with_columns(is_broken=True)
    is_broken = pl.col("is_broken").fill_null(False)
    frame = table.frame.join(places, on=["stack", "kind", "layer"], how="left").with_columns(
        *(pl.when(~is_broken).then(score).alias(score) for score in SCORES),
        status=pl.when(is_broken).then(pl.lit("non-finite")).otherwise("status"),
    )
    return ScoreTable(frame, table.metadata)
