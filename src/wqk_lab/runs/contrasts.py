"""Verdicts on claims, each computed from one named contrast of recorded runs.

A contrast is a weighted sum of cells, computed seed by seed: ``{published = 1, random = -1}``. A
few seeds give poor estimates of variances. Therefore the variances of one pool of contrasts
moderate each other: each variance is drawn toward the variance that the pool has in common (Smyth
2004, Linear models and empirical Bayes methods for assessing differential expression). A claim
predicts the sign of a contrast and states the size of an effect that would matter. The verdict
follows from an interval that allows for all contrasts: Benjamini and Hochberg's rule finds a
contrast at 5 % if and only if the interval of the contrast excludes zero (Benjamini & Yekutieli
2005, False discovery rate-adjusted multiple confidence intervals for selected parameters).

================  ============================================================================
reproduced        the interval lies on the predicted side of zero
too small         as reproduced, but the interval excludes every effect that would matter
reversed          the interval lies beyond zero, with effects of the opposite sign that would matter
not reproduced    the interval excludes every predicted effect that would matter; not reversed
undecided         none of these
depends           the contrast is a main effect, and an interaction may be large enough to matter
not run           fewer than two seeds have the runs
================  ============================================================================
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

import numpy as np
import polars as pl

from wqk.errors import RunError
from wqk_lab.runs.seeds import LEVEL, POWER, Paired, by_seed, paired

ContrastVerdict = Literal[
    "reproduced", "too small", "reversed", "not reproduced", "undecided", "depends", "not run"
]

# A quantity of each run, by cell and seed.
Records = Mapping[str, Mapping[str, Mapping[int, float]]]

DEFINITION = "contrasts.toml"

# Columns of records, with the measures that they have in rows of whole models.
MEASURES = {
    "held_out_loss": "loss at step {step}",
    "plateau_loss": "loss over the plateau",
    "first_below_3": "end of the plateau",
    "mean_symmetry": "symmetry",
    "mean_directionality": "directionality",
    "symmetry": "symmetry at step {step}",
    "directionality_excess": "directionality at step {step}",
    "change_symmetry": "symmetry of the change at step {step}",
    "new_symmetry": "symmetry of what is new at step {step}",
    "kept": "symmetric part kept beyond the skew at step {step}",
    "share": "share kept at step {step}",
    "curvature": "curvature at step {step}",
    "related": "rank correlation by layer at step {step}",
}

# Measures of the last recorded step of a run, for contrasts of runs of different lengths.
AT_THE_END = {"share": "share kept at the end"}


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of cells, seed by seed.

    Attributes
    ----------
    name, says
        The name that claims use, and a description of the comparison.
    measure
        The quantity of each run: a key of the records.
    cells
        Weights by cell, which add up to zero.
    pool
        Name of the group of contrasts with jointly moderated variances; by default the measure.
    pending
        True if runs may be missing: with fewer than two seeds, the contrast is left out.
    """

    name: str
    says: str
    measure: str
    cells: Mapping[str, float]
    pool: str = ""
    pending: bool = False


@dataclass(frozen=True)
class ContrastClaim:
    """A claim, as a prediction on one contrast."""

    says: str
    contrast: str
    predicts: Literal["less", "more"]
    matters: float  #: The smallest effect that would matter.
    note: str = ""
    interaction: str = ""  #: For a main effect: the contrast that must be too small to matter.


@dataclass(frozen=True)
class MeasuredContrast:
    """A contrast with its estimate, error and intervals.

    Attributes
    ----------
    value, error, degrees
        The mean over seeds, the moderated standard error, and the degrees of freedom.
    count
        Number of seeds.
    low, high
        The 95 % interval.
    p
        Two-sided p-value of the hypothesis that the mean is zero.
    allowed
        The interval that allows for all contrasts.
    alone
        The 95 % interval from the contrast's variance alone, by Student's t.
    alone_allowed
        Student's interval at the level of `allowed`; None if all differences are equal.
    """

    contrast: Contrast
    value: float
    error: float
    degrees: float
    count: int
    low: float
    high: float
    p: float
    allowed: tuple[float, float]
    alone: Paired
    alone_allowed: tuple[float, float] | None = None

    @property
    def borrows(self) -> bool:
        """True if `allowed` excludes zero, and Student's interval at that level contains zero."""
        students_low, students_high = self.alone_allowed or (0.0, 0.0)
        low, high = self.allowed
        return students_low <= 0 <= students_high and not low <= 0 <= high

    @property
    def detectable(self) -> float:
        """The smallest true effect to be found with power 80 % by this contrast alone."""
        from scipy.stats import t  # type: ignore[import-untyped]

        quantiles = t.ppf([(1 + LEVEL) / 2, POWER], self.degrees)
        return float(quantiles.sum() * self.error)


def read_records(folder: Path) -> Records:
    """Read the records of a folder: a quantity of each run, by measure, cell and seed.

    Raises
    ------
    RunError
        Two records have different values of one run.
    """
    records: dict[str, dict[str, dict[int, float]]] = {}
    for path in sorted(folder.rglob("*.csv")):
        rows = pl.read_csv(path, infer_schema=False)
        if not {"seed", "step"} <= {*rows.columns}:
            continue  # not a quantity of each run
        for measure, cell, seed, value in _quantities(rows).iter_rows():
            values_by_seed = records.setdefault(measure, {}).setdefault(cell, {})
            if values_by_seed.setdefault(seed, value) != value:
                raise RunError(
                    f"{path}: {cell}, seed {seed}, has {measure} {value}; another record says "
                    f"{values_by_seed[seed]}: runs that differ need names that differ"
                )
    return records


def _quantities(rows: pl.DataFrame) -> pl.DataFrame:
    """Return quantities of a record's runs: ``measure``, ``start``, ``seed`` and ``value``."""
    if "part" in rows.columns:
        rows = pl.concat([rows, _related(rows)], how="diagonal")
        rows = rows.with_columns(start=pl.concat_str("model", pl.lit(" "), "part"))
    elif "run" in rows.columns:
        rows = rows.with_columns(start=pl.col("run").str.replace("-[^-]*$", ""))
    if "kept_skew" in rows.columns:
        kept_symmetric = pl.col("kept_symmetric").cast(float)
        kept_skew = pl.col("kept_skew").cast(float)
        rows = rows.with_columns(kept=kept_symmetric - kept_skew)
    if "layer" in rows.columns:
        rows = rows.filter(pl.col("layer").is_null())
    step = pl.col("step").cast(int)
    is_last = step == step.max().over("start", "seed")
    measures = dict(MEASURES)
    for column, measure in AT_THE_END.items():
        if column in rows.columns:
            rows = rows.with_columns(pl.when(is_last).then(column).alias(measure))
            measures[measure] = measure
    columns = [column for column in measures if column in rows.columns]
    run = ["start", "seed", "step"]
    values = rows.select(*run, pl.col(columns).cast(float)).unpivot(columns, index=run)
    measure_of_column = pl.col("variable").replace_strict(measures)
    with_step = measure_of_column.str.replace("{step}", pl.col("step"), literal=True)
    return values.drop_nulls(["seed", "value"]).select(
        with_step.alias("measure"), "start", pl.col("seed").cast(int), "value"
    )


def _related(rows: pl.DataFrame) -> pl.DataFrame:
    """Correlate symmetry of the form and lead of the symmetric part over the layers of each run.

    The lead is the share that the symmetric part keeps, less the share that the skew part keeps.
    The correlation is a rank correlation; runs of two layers have none. If the scores of a layer
    explain nothing, the layer has no share, and the run has no correlation. A second cell, ``no
    relation``, has zeros for the comparison.
    """
    run = ("model", "seed", "step")
    share, part = pl.col("share").cast(float), pl.col("part")

    def share_of(name: str) -> pl.Expr:
        return share.filter(part == name).first()

    by_layer = (
        rows.drop_nulls("layer")
        .group_by(*run, "layer")
        .agg(
            carried=share_of("symmetric") - share_of("skew"),
            symmetry=pl.col("symmetry").cast(float).filter(part == "whole").first(),
        )
    )
    enough = by_layer.filter(pl.len().over(run) > 2, pl.all().is_not_null().all().over(run))
    related = enough.group_by(run).agg(
        related=pl.corr("symmetry", "carried", method="spearman").cast(str),
    )
    cells = {"layers": pl.col("related"), "no relation": pl.lit("0")}
    return pl.concat(
        related.with_columns(related=value, part=pl.lit(name)) for name, value in cells.items()
    )


def read_definition(folder: Path) -> tuple[list[Contrast], list[ContrastClaim]]:
    """Read the contrasts and claims of a folder's ``contrasts.toml``."""
    content = tomllib.loads((folder / DEFINITION).read_text(encoding="utf-8"))
    contrasts = [Contrast(**entry) for entry in content["contrast"]]
    names = [contrast.name for contrast in contrasts]
    claims = [ContrastClaim(**entry) for entry in content["claim"]]
    if len(set(names)) < len(names):
        raise RunError(f"{folder / DEFINITION}: names of contrasts must be unique")
    for claim in claims:
        for name in filter(None, (claim.contrast, claim.interaction)):
            if name not in names:
                raise RunError(f"{folder / DEFINITION}: no contrast is called {name!r}")
    return contrasts, claims


def differences(contrast: Contrast, records: Records) -> list[float]:
    """Return a contrast for each seed with runs in all cells.

    Examples
    --------
    >>> contrast = Contrast("c", "", "loss", {"a": 1, "b": -1})
    >>> differences(contrast, {"loss": {"a": {1: 2.0, 2: 3.0}, "b": {1: 1.5}}})
    [0.5]
    """
    if abs(sum(contrast.cells.values())) > 1e-9:
        raise RunError(f"contrast {contrast.name}: weights must add up to zero")
    recorded = records.get(contrast.measure, {})
    if missing := [cell for cell in contrast.cells if cell not in recorded]:
        raise RunError(f"contrast {contrast.name}: no records of {', '.join(missing)}")
    values_by_seed = by_seed(*(recorded[cell] for cell in contrast.cells))
    weights = contrast.cells.values()
    sums = []
    for _, values in sorted(values_by_seed.items()):
        weighted = [weight * value for weight, value in zip(weights, values, strict=True)]
        sums.append(sum(weighted))
    return sums


def moderate(variances: Sequence[float], degrees: Sequence[float]) -> tuple[float, float]:
    """Return the common variance of several estimates, and its degrees of freedom.

    Both follow from mean and variance of log s², whose law for a given variance is known (Smyth
    2004). The degrees of freedom are at most the number of variances: contrasts share runs, so
    their variances are no independent estimates.

    Parameters
    ----------
    variances, degrees
        Estimated variances s², and the degrees of freedom of each.

    Examples
    --------
    >>> random = np.random.default_rng(0)
    >>> common, worth = moderate(list(4 * random.chisquare(4, 500) / 4), [4] * 500)
    >>> round(common, 1), worth > 50
    (3.9, True)
    """
    from scipy.special import digamma, polygamma  # type: ignore[import-untyped]

    half_degrees = np.asarray(degrees, float) / 2
    squares = np.asarray(variances, float)
    # Rounded differences may be equal, and have the variance 0.
    squares = np.maximum(squares, 0.01 * np.median(squares))
    # The logarithm of a variance without the bias of its estimate.
    logs = np.log(squares) - digamma(half_degrees) + np.log(half_degrees)
    count = len(squares)
    # Spread of the logarithms, minus the spread of estimates of one variance.
    excess = 0.0
    if count > 1:
        excess = logs.var(ddof=1) - polygamma(1, half_degrees).mean()
    if excess <= 0:
        return float(np.exp(logs.mean())), float(count)
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    half_prior = brentq(lambda x: float(polygamma(1, x)) - excess, 1e-3, 1e6)
    common = np.exp(logs.mean() + digamma(half_prior) - np.log(half_prior))
    return float(common), float(min(2 * half_prior, count))


def evaluate(contrasts: Sequence[Contrast], records: Records) -> list[MeasuredContrast]:
    """Evaluate contrasts: variances moderated within pools, and intervals that allow for all.

    Raises
    ------
    RunError
        A contrast has records of fewer than two seeds.
    """
    values_by_name = {contrast.name: differences(contrast, records) for contrast in contrasts}
    if single := [name for name, values in values_by_name.items() if len(values) < 2]:
        raise RunError(f"contrasts of a single seed have no interval: {', '.join(single)}")
    means = _moderated_means(contrasts, values_by_name)
    level = 1 - found_at([mean.p for mean in means], 1 - LEVEL)
    results = []
    for mean in means:
        values = values_by_name[mean.contrast.name]
        low, high = mean.interval(LEVEL)
        result = MeasuredContrast(
            contrast=mean.contrast,
            value=mean.value,
            error=mean.error,
            degrees=mean.degrees,
            count=mean.count,
            low=low,
            high=high,
            p=mean.p,
            allowed=mean.interval(level),
            alone=paired(values),
            alone_allowed=students_interval(values, level),
        )
        results.append(result)
    return results


def _moderated_means(
    contrasts: Sequence[Contrast], values_by_name: Mapping[str, Sequence[float]]
) -> list[ContrastEstimate]:
    """Return the mean of each contrast, with a variance moderated within the pool."""
    # Variances are compared per unit of weight: sums of many cells vary more than sums of two.
    scales, variances = {}, {}
    pools: dict[str, list[str]] = {}
    for contrast in contrasts:
        name = contrast.name
        scales[name] = sum(weight**2 for weight in contrast.cells.values()) / 2
        variances[name] = stdev(values_by_name[name]) ** 2 / scales[name]
        pools.setdefault(contrast.pool or contrast.measure, []).append(name)
    priors = {}
    for pool, names in pools.items():
        degrees = [len(values_by_name[name]) - 1 for name in names]
        priors[pool] = moderate([variances[name] for name in names], degrees)
    means = []
    for contrast in contrasts:
        values = values_by_name[contrast.name]
        prior_variance, prior_degrees = priors[contrast.pool or contrast.measure]
        degrees_alone = len(values) - 1
        total_degrees = prior_degrees + degrees_alone
        prior_part = prior_degrees * prior_variance
        variance = (prior_part + degrees_alone * variances[contrast.name]) / total_degrees
        mean = ContrastEstimate(
            contrast=contrast,
            value=fmean(values),
            error=math.sqrt(variance * scales[contrast.name] / len(values)),
            degrees=total_degrees,
            count=len(values),
        )
        means.append(mean)
    return means


@dataclass(frozen=True)
class ContrastEstimate:
    """A contrast's mean over seeds with a moderated error and degrees of freedom."""

    contrast: Contrast
    value: float
    error: float
    degrees: float
    count: int

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis that the mean is zero."""
        from scipy.stats import t

        return float(2 * t.sf(abs(self.value) / self.error, self.degrees))

    def interval(self, level: float) -> tuple[float, float]:
        """Return the interval of a level, between 0 and 1."""
        from scipy.stats import t

        reach = float(t.ppf((1 + level) / 2, self.degrees)) * self.error
        return self.value - reach, self.value + reach


def students_interval(values: Sequence[float], level: float) -> tuple[float, float] | None:
    """Return Student's interval of a mean at a level; None if all values are equal.

    Examples
    --------
    >>> [round(end, 3) for end in students_interval([0.1, 0.3, 0.2], 0.95)]
    [-0.048, 0.448]
    """
    from scipy.stats import t

    error = stdev(values) / math.sqrt(len(values))
    if not error:
        return None
    reach = float(t.ppf((1 + level) / 2, len(values) - 1)) * error
    return fmean(values) - reach, fmean(values) + reach


def found_at(p: Sequence[float], rate: float) -> float:
    """Return the limit of p-values to be found by Benjamini and Hochberg's rule at a rate.

    The limit is never below rate/n, n being the number of p-values.

    Examples
    --------
    >>> found_at([0.001, 0.02, 0.03, 0.9], 0.08)  # three are found
    0.06
    """
    limit = rate / len(p)
    for rank, value in enumerate(sorted(p), start=1):
        if value <= rate * rank / len(p):
            limit = rate * rank / len(p)
    return limit


def decide(
    claim: ContrastClaim, result: MeasuredContrast, interaction: MeasuredContrast | None = None
) -> ContrastVerdict:
    """Return the verdict on a claim, from the interval that allows for all contrasts.

    The verdict on a main effect is ``depends`` unless the 95 % interval of the interaction excludes
    every effect that would matter.

    Examples
    --------
    >>> contrast = Contrast("c", "", "loss", {"a": 1, "b": -1})
    >>> def at(low, high):
    ...     interval, paired = (low, high), Paired(5, 0)
    ...     return MeasuredContrast(contrast, 0, 0.1, 4, 5, low, high, 0.5, interval, paired)
    >>> claim = ContrastClaim("a is lower", "c", "less", 0.02)
    >>> [decide(claim, at(*ends)) for ends in ((-2, -1), (-0.015, -0.01), (-0.01, 1), (-1, 1))]
    ['reproduced', 'too small', 'not reproduced', 'undecided']
    >>> decide(claim, at(0.01, 0.5))
    'reversed'
    """
    if interaction is not None and max(-interaction.low, interaction.high) >= claim.matters:
        return "depends"
    low, high = result.allowed
    if claim.predicts == "less":
        low, high = -high, -low
    matters = high >= claim.matters
    if low > 0:
        return "reproduced" if matters else "too small"
    if high < 0 and -low >= claim.matters:
        return "reversed"
    return "undecided" if matters else "not reproduced"


def results(folder: Path) -> dict[str, MeasuredContrast]:
    """Evaluate the contrasts of a folder from the folder's records; return them by name."""
    contrasts, records = read_definition(folder)[0], read_records(folder)
    with_runs = []
    for contrast in contrasts:
        cells = records.get(contrast.measure, {})
        seeds = set.intersection(*(set(cells.get(cell, ())) for cell in contrast.cells))
        if len(seeds) > 1 or not contrast.pending:
            with_runs.append(contrast)
    if not with_runs:
        return {}
    return {result.contrast.name: result for result in evaluate(with_runs, records)}


def unnamed(text: str, names: Iterable[str]) -> list[str]:
    r"""Return bold phrases of a page in paragraphs that do not name a contrast.

    Tables and headings are not checked.

    Examples
    --------
    >>> unnamed("- **It helps** (`a`).\n- **It is\n  symmetry.** Always.", ["a"])
    ['It is symmetry.']
    """
    known_names = set(names)
    phrases = []
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
        is_table = paragraph.lstrip().startswith("|")
        code = re.findall(r"`([^`]+)`", paragraph)
        if not is_table and known_names.isdisjoint(code):
            bold = re.findall(r"\*\*(.+?)\*\*", paragraph, flags=re.DOTALL)
            phrases += [" ".join(phrase.split()) for phrase in bold]
    return phrases


def verdicts(
    folder: Path,
) -> Iterator[tuple[ContrastClaim, ContrastVerdict, MeasuredContrast | None]]:
    """Yield each claim of a folder with its verdict and, if measured, its contrast."""
    measured = results(folder)
    for claim in read_definition(folder)[1]:
        result = measured.get(claim.contrast)
        verdict: ContrastVerdict = "not run"
        if result is not None:
            verdict = decide(claim, result, measured.get(claim.interaction))
        yield claim, verdict, result


def claims_table(folder: Path) -> list[str]:
    """Return the verdicts on a folder's claims, as lines of Markdown."""
    lines = [
        "| claim | verdict | contrast | effect [interval for all contrasts] | would matter |",
        "|:--|:--|:--|--:|--:|",
    ]
    for claim, verdict, result in verdicts(folder):
        says = f"{claim.says} ({claim.note})" if claim.note else claim.says
        shown = f"**{verdict}**" if verdict == "reproduced" else verdict
        effect = limit = "–"
        if result is not None:
            if verdict == "depends":
                shown += f" on `{claim.interaction}`"
            elif result.borrows:
                shown += " (by borrowed variance)"
            effect = interval_of(result, *result.allowed)
            limit = _number(result, -claim.matters if claim.predicts == "less" else claim.matters)
        lines.append(f"| {says} | {shown} | `{claim.contrast}` | {effect} | {limit} |")
    return lines


def contrasts_table(folder: Path) -> list[str]:
    """Return all contrasts of a folder, each by itself, as lines of Markdown."""
    lines = [
        "| contrast | what | measure | seeds | difference [95 %] | [Student's] | p | detectable |",
        "|:--|:--|:--|--:|--:|--:|--:|--:|",
    ]
    for name, result in results(folder).items():
        contrast, p, alone = result.contrast, result.p, result.alone
        students = "–"
        if alone.low is not None and alone.high is not None:
            students = f"[{_number(result, alone.low)}, {_number(result, alone.high)}]"
        cells = (
            f"`{name}`",
            contrast.says,
            contrast.measure,
            str(result.count),
            interval_of(result, result.low, result.high),
            students,
            f"{p:.3f}" if p >= 0.001 else "<.001",
            _number(result, result.detectable).lstrip("+"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def interval_of(result: MeasuredContrast, low: float, high: float) -> str:
    """Return a contrast's mean with the ends of an interval, in the digits of the measure."""
    numbers = [_number(result, number) for number in (result.value, low, high)]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def _number(result: MeasuredContrast, number: float) -> str:
    """Return a number in whole steps, or with three digits."""
    digits = 0 if result.contrast.measure == "end of the plateau" else 3
    return f"{number:+.{digits}f}".replace("-", "−")
