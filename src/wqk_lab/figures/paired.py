"""Pairs of models: tests whether lifting the causal mask made forms more symmetric, as predicted.

The unit of every test is the pair. A pair's value is the median over layers of the difference of
its second model from its first, with the predicted sign: positive is as predicted. The predictions
are in ``docs/pairs.md``, written before any pair was read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from wqk._style import GRAY, OUTLIER, PAPER_WIDTH, TEAL, WINE, new_figure, style
from wqk.errors import RunError
from wqk.forms.scores import holm
from wqk.reporting.pictures import note
from wqk_lab.figures.by_layer import finish_row, lettered
from wqk_lab.runs.pairs import Pair, PairSurvey

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAIR_SCHEMA: dict[str, pl.DataType] = {
    **dict.fromkeys(("pair", "recipe", "relation"), pl.String()),
    **dict.fromkeys(("expected", "layer"), pl.Int64()),
    "depth": pl.Float64(),  # 0 is the first layer, 1 the last
    "head": pl.Int64(),
    **dict.fromkeys(
        (
            "symmetry_before",
            "symmetry_after",
            "symmetry",  # the difference
            "directionality_before",
            "directionality_after",
            "directionality",
            "moved",
            "update_symmetry",
            "update_symmetry_null",  # with random signs of rows
            "update_symmetry_excess",
            "symmetric_share",
            "skew_share",
            "update_directionality",
            "span",
            "span_chance",
        ),
        pl.Float64(),
    ),
}

# The tested predictions: relation of the pairs, and score. Their number is the multiplicity.
TESTED = (
    ("twins", "symmetry"),
    ("twins", "directionality"),
    ("converted", "symmetry"),
    ("converted", "directionality"),
    ("converted", "update_symmetry_excess"),
)
LEVEL, POWER = 0.05, 0.8
LABELS = {
    "symmetry": "change of symmetry",
    "directionality": "change of directionality (excess)",
    "update_symmetry_excess": "update's symmetry above chance",
    "span": "share of the update in the span",
}
COLORS = {"twins": TEAL, "converted": WINE, "contrast": GRAY, "control": OUTLIER}


@dataclass(frozen=True)
class PairTest:
    """Test of one prediction, with the pair as the unit.

    Attributes
    ----------
    relation, quantity
        Kind of the pairs, and quantity.
    pairs, recipes
        Numbers of pairs and of recipes.
    agree
        Pairs that changed in the predicted direction.
    median
        Median of the pairs' values; positive is as predicted.
    p, corrected
        p-value of Wilcoxon's signed-rank test, one-sided; and corrected for all of `TESTED` by Holm
        (1979). None without pairs.
    p_recipes
        p-value with the mean of each recipe as the unit, because pairs of one recipe are not
        independent.
    detectable
        The shift that this test detects with a power of 80 %, at the level .05 divided by the
        number of tests; None if the pairs are too few for any shift, or if their spread is unknown.
    """

    relation: str
    quantity: str
    pairs: int
    recipes: int
    agree: int
    median: float
    p: float | None
    corrected: float | None
    p_recipes: float | None
    detectable: float | None

    def __str__(self) -> str:
        subject = f"{self.relation}, {LABELS[self.quantity]}"
        if self.p is None or self.corrected is None or self.p_recipes is None:
            return f"{subject}: not measured"
        power = "too few pairs for any shift to be found after the correction"
        if self.detectable is not None:
            power = f"a shift of {self.detectable:.2g} would have been found with a power of 80 %"
        return (
            f"{subject}: {self.median:+.3g} in the median of {self.pairs} pairs, {self.agree} as "
            f"predicted, p = {self.p:.2g} ({self.corrected:.2g} corrected for {len(TESTED)} "
            f"tests); of {self.recipes} recipes, p = {self.p_recipes:.2g}; {power}"
        )


def pair_rows(survey: PairSurvey | None) -> pl.DataFrame:
    """Return differences of every layer, and of every head of pairs with corresponding heads.

    Raises
    ------
    RunError
        The survey of pairs is absent, or none of its pairs was read.
    """
    if survey is None:
        raise RunError("pairs needs the folder of a survey of pairs: wqk lab pairs --out DIR")
    frames = [_rows(pair, survey) for pair in survey.pairs if pair.title not in survey.problems]
    table = pl.concat([pl.DataFrame(schema=PAIR_SCHEMA), *frames])
    if table.is_empty():
        raise RunError(
            f"no pair was read: {next(iter(survey.problems.values()), 'the survey has none')}"
        )
    return table


def _rows(pair: Pair, survey: PairSurvey) -> pl.DataFrame:
    before = _scores(survey, pair.before, pair.before_stack)
    after = _scores(survey, pair.after, pair.after_stack)
    joined = before.join(after, on=("layer", "head"), suffix="_after", nulls_equal=True)
    if not pair.is_update:  # trained apart, whose heads do not correspond
        joined = joined.filter(pl.col("head").is_null())
    updates = survey.updates.filter(pair=pair.title).select(
        "layer",
        "head",
        "moved",
        "span",
        "span_chance",
        update_symmetry="symmetry",
        update_symmetry_null="symmetry_null",
        update_directionality="directionality_excess",
    )
    joined = joined.join(updates, on=("layer", "head"), how="left", nulls_equal=True)
    symmetry = pl.col("update_symmetry")
    return joined.with_columns(
        *(pl.col(score).alias(f"{score}_before") for score in ("symmetry", "directionality")),
        *(pl.col(f"{s}_after").alias(s) - pl.col(s) for s in ("symmetry", "directionality")),
        pair=pl.lit(pair.title),
        recipe=pl.lit(pair.recipe),
        relation=pl.lit(pair.relation),
        expected=pl.lit(pair.expected, pl.Int64()),
        depth=pl.col("layer") / pl.max_horizontal(pl.col("layer").max(), pl.lit(1)),
        update_symmetry_excess=symmetry - pl.col("update_symmetry_null"),
        symmetric_share=(1 + symmetry) / 2,
        skew_share=(1 - symmetry) / 2,
    ).select(*PAIR_SCHEMA)


def _scores(survey: PairSurvey, ref: str, stack: str) -> pl.DataFrame:
    rows = survey.scores.frame.filter(checkpoint=ref, kind="self")
    if stack:
        rows = rows.filter(stack=stack)
    if rows["stack"].n_unique() > 1:
        raise RunError(f"{ref} has several stacks, and the pair names none")
    excess = pl.col("directionality_excess").alias("directionality")
    return rows.select("layer", "head", "symmetry", excess)


def pair_values(rows: pl.DataFrame, relation: str, quantity: str) -> pl.DataFrame:
    """Return the values of a quantity by pair, with the ``recipe``; positive as predicted.

    The symmetry of the update is predicted to exceed chance if the mask was lifted.
    """
    layers = rows.filter(pl.col("head").is_null(), relation=relation)
    if quantity == "update_symmetry_excess":
        layers = layers.filter(expected=1)
    median = pl.col(quantity).median()
    predicted_sign = pl.col("expected").first()
    values_by_pair = layers.group_by("pair", maintain_order=True).agg(
        pl.col("recipe").first(), value=median * predicted_sign
    )
    return values_by_pair.drop_nulls("value").filter(pl.col("value").is_finite())


def _remark(test: PairTest) -> str:
    if test.corrected is None:
        return f"{test.relation}: not measured"
    return f"{test.relation}: {test.agree} of {test.pairs}, p {test.corrected:.2g}"


def pair_tests(rows: pl.DataFrame) -> tuple[PairTest, ...]:
    """Test all predictions of `TESTED`.

    Examples
    --------
    >>> [str(test) for test in pair_tests(pl.DataFrame(schema=PAIR_SCHEMA))][0]
    'twins, change of symmetry: not measured'
    """
    tests = [_tested(rows, *prediction) for prediction in TESTED]
    corrected = holm(np.array([test.p for test in tests], float), len(TESTED)).tolist()
    return tuple(
        replace(test, corrected=None if test.p is None else p)
        for test, p in zip(tests, corrected, strict=True)
    )


def _tested(rows: pl.DataFrame, relation: str, quantity: str) -> PairTest:
    """Test one prediction, without correction."""
    values_by_pair = pair_values(rows, relation, quantity)
    values = values_by_pair["value"].to_numpy()
    means_by_recipe = values_by_pair.group_by("recipe").agg(pl.col("value").mean())
    means = means_by_recipe["value"].to_numpy()
    return PairTest(
        relation,
        quantity,
        pairs=len(values),
        recipes=len(means),
        agree=int((values > 0).sum()),
        median=float(np.median(values)) if len(values) else math.nan,
        p=_chance(values),
        corrected=None,
        p_recipes=_chance(means),
        detectable=detectable_shift(values),
    )


def _chance(values: np.ndarray) -> float | None:
    """Return the one-sided p of Wilcoxon's signed-rank test that values are not above 0."""
    from scipy.stats import wilcoxon  # type: ignore[import-untyped]

    if not len(values):
        return None
    if not np.any(values):
        return 1.0
    return float(wilcoxon(values, alternative="greater").pvalue)


def detectable_shift(values: np.ndarray, level: float = LEVEL / len(TESTED)) -> float | None:
    """Return the shift that a signed-rank test of these values finds with a power of 80 %.

    The computation assumes normal values with this spread, and uses Student's t with the test's
    efficiency of 3/π. None if even the largest shift cannot reach the level, because the smallest p
    of n values is 2⁻ⁿ.

    Examples
    --------
    >>> detectable_shift(np.array([0.1, 0.2, 0.3])) is None
    True
    """
    from scipy.stats import t as student

    n = len(values)
    smallest_p = 2.0**-n
    if n < 2 or smallest_p > level:
        return None
    errors = student.ppf(1 - level, n - 1) + student.ppf(POWER, n - 1)
    deviation = values.std(ddof=1)
    return float(errors * deviation * math.sqrt(math.pi / 3 / n))


def sentences(survey: PairSurvey, rows: pl.DataFrame) -> Iterator[str]:
    """Yield sentences on the tests, on the controls, and on pairs that could not be read."""
    yield from map(str, pair_tests(rows))
    for relation, prediction in (
        ("contrast", "nothing predicted"),
        ("control", "must be exactly 0"),
    ):
        layers = rows.filter(pl.col("head").is_null(), relation=relation)
        for (pair,), layers_of_pair in layers.group_by("pair", maintain_order=True):
            changes = layers_of_pair["symmetry"].to_numpy()
            largest_change = abs(changes).max()
            largest_step = layers_of_pair["moved"].to_numpy().max()
            sentence = (
                f"{relation} ({prediction}): {pair}: symmetry changed by {np.median(changes):+.2g} "
                f"in the median layer, by {largest_change:.2g} at most; the forms moved by "
                f"{largest_step:.2g} of their norm at most"
            )
            if relation == "control" and (largest_change, largest_step) != (0.0, 0.0):
                sentence += "; IT MOVED"
            yield sentence
    yield from (f"skipped: {title}: {reason}" for title, reason in survey.problems.items())


@style()
def paired_panels(rows: pl.DataFrame) -> Figure:
    """Draw each pair's value; differences and updates over the layers; updates in the span."""
    layers = rows.filter(pl.col("head").is_null())
    figure = new_figure(PAPER_WIDTH, 5.6)
    grid = figure.subplots(2, 2)
    lettered(grid.flat, "abcd")
    for axis, quantity in zip(grid.flat, LABELS, strict=True):
        finish_row([axis], LABELS[quantity])
        for (pair,), layers_of_pair in layers.group_by("pair", maintain_order=True):
            del pair
            relation = layers_of_pair["relation"][0]
            measured = layers_of_pair.drop_nulls(quantity)
            axis.plot(
                measured["depth"],
                measured[quantity],
                color=COLORS[relation],
                linewidth=0.8,
                alpha=0.7,
                linestyle="--" if layers_of_pair["expected"][0] == -1 else "-",
                marker="." if measured.height == 1 else "",
            )
        axis.set_xlabel("depth (0: first layer, 1: last)")
        axis.set_xlim(-0.02, 1.02)
    heads = rows.filter(pl.col("head").is_not_null()).drop_nulls("update_symmetry_excess")
    grid[1, 0].scatter(heads["depth"], heads["update_symmetry_excess"], s=1, color=GRAY, zorder=0)
    for relation in dict.fromkeys(layers["relation"]):
        grid[1, 1].plot([], [], color=COLORS[relation], label=relation)
    grid[1, 1].legend(loc="lower right")
    tests = pair_tests(rows)
    for axis, quantity in zip(grid.flat, LABELS, strict=True):
        remarks = [_remark(test) for test in tests if test.quantity == quantity]
        axis.set_title("; ".join(remarks), fontsize=6.5, fontweight="normal", loc="left")
    note(
        figure,
        "One line for each pair; dashed: made causal, with the opposite prediction. Dots: heads. "
        "p: corrected.",
    )
    return figure
