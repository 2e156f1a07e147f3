"""Verdicts on claims, each computed from one named contrast of recorded runs.

A contrast is a weighted sum of cells, taken seed by seed: ``{published = 1, random = -1}``. Few
seeds give poor variances. Therefore the variances of one pool of contrasts moderate each other:
each is drawn toward what the others have in common (Smyth 2004, Linear models and empirical Bayes
methods for assessing differential expression). A claim predicts the sign of its contrast and states
how large an effect would matter. Its verdict follows from an interval that allows for all
contrasts: those that Benjamini and Hochberg's rule finds at 5 % are the ones whose interval
excludes zero (Benjamini & Yekutieli 2005, False discovery rate-adjusted multiple confidence
intervals for selected parameters).

================  ============================================================================
reproduced        the interval lies on the predicted side of zero
too small         the same, but it excludes every effect that would matter
reversed          it lies beyond zero, and contains effects of the opposite sign that would matter
not reproduced    it excludes every effect that would matter as predicted, and is not reversed
undecided         none of these
depends           it is a main effect, and its interaction may be large enough to matter
not run           fewer than two seeds have its runs
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

Verdict = Literal[
    "reproduced", "too small", "reversed", "not reproduced", "undecided", "depends", "not run"
]

# A quantity of each run, by cell and seed.
Records = Mapping[str, Mapping[str, Mapping[int, float]]]

DEFINITION = "contrasts.toml"

# Columns of records, and what they measure in the rows that stand for a whole model.
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

# Measures of the last step that the records have of a run, for contrasts of runs of other lengths.
AT_THE_END = {"share": "share kept at the end"}


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of cells, seed by seed.

    Attributes
    ----------
    name, says
        How claims name it, and what it compares.
    measure
        The quantity of its runs: a key of the records.
    cells
        Weights by cell, which add up to zero.
    pool
        Contrasts whose variances moderate each other; by default those of one measure.
    pending
        Whether its runs are still to be made: of fewer than two seeds it is left out.
    """

    name: str
    says: str
    measure: str
    cells: Mapping[str, float]
    pool: str = ""
    pending: bool = False


@dataclass(frozen=True)
class Claim:
    """A claim, as a prediction on one contrast."""

    says: str
    contrast: str
    predicts: Literal["less", "more"]
    matters: float  #: The smallest effect that would matter.
    note: str = ""
    interaction: str = ""  #: Of a main effect: the contrast that must be too small to matter.


@dataclass(frozen=True)
class Result:
    """A contrast, measured.

    Attributes
    ----------
    value, error, degrees
        The mean over seeds, its moderated standard error, and its degrees of freedom.
    count
        Number of seeds.
    low, high
        The 95 % interval.
    p
        Two-sided, of the hypothesis that the mean is zero.
    allowed
        The interval that allows for all contrasts.
    alone
        The 95 % interval from this contrast's own variance, by Student's t.
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
        """Return whether `allowed` excludes zero, and Student's interval at its level does not."""
        low, high = self.alone_allowed or (0.0, 0.0)
        return low <= 0 <= high and not self.allowed[0] <= 0 <= self.allowed[1]

    @property
    def detectable(self) -> float:
        """The smallest true effect that is found with power 80 %, by itself."""
        from scipy.stats import t  # type: ignore[import-untyped]

        quantiles = t.ppf([(1 + LEVEL) / 2, POWER], self.degrees)
        return float(quantiles.sum() * self.error)


def read_records(folder: Path) -> Records:
    """Return the records of a folder: a quantity of each run in a line, by measure, cell and seed.

    Raises
    ------
    RunError
        Two records say different things of one run.
    """
    records: dict[str, dict[str, dict[int, float]]] = {}
    for path in sorted(folder.rglob("*.csv")):
        rows = pl.read_csv(path, infer_schema=False)
        if not {"seed", "step"} <= {*rows.columns}:
            continue  # what was printed of runs, or other records than a quantity of each run
        if "part" in rows.columns:
            rows = pl.concat([rows, _related(rows)], how="diagonal")
            rows = rows.with_columns(start=pl.concat_str("model", pl.lit(" "), "part"))
        elif "run" in rows.columns:
            rows = rows.with_columns(start=pl.col("run").str.replace("-[^-]*$", ""))
        if "kept_skew" in rows.columns:
            kept = (pl.col(f"kept_{part}").cast(float) for part in ("symmetric", "skew"))
            rows = rows.with_columns(kept=next(kept) - next(kept))
        if "layer" in rows.columns:
            rows = rows.filter(pl.col("layer").is_null())
        last = pl.col("step").cast(int) == pl.col("step").cast(int).max().over("start", "seed")
        rows = rows.with_columns(
            pl.when(last).then(column).alias(measure)
            for column, measure in AT_THE_END.items()
            if column in rows.columns
        )
        measures = {**MEASURES, **{measure: measure for measure in AT_THE_END.values()}}
        named = [name for name in measures if name in rows.columns]
        long = rows.select("start", "seed", "step", pl.col(named).cast(float))
        for column, cell, seed, step, value in (
            long.unpivot(named, index=["start", "seed", "step"])
            .drop_nulls(["seed", "value"])
            .select("variable", "start", pl.col("seed").cast(int), "step", "value")
            .iter_rows()
        ):
            measure = measures[column].format(step=step)
            known = records.setdefault(measure, {}).setdefault(cell, {})
            if known.setdefault(seed, value) != value:
                raise RunError(
                    f"{path}: {cell}, seed {seed}, has {measure} {value}; another record says "
                    f"{known[seed]}: runs that differ need names that differ"
                )
    return records


def _related(rows: pl.DataFrame) -> pl.DataFrame:
    """Over the layers of each run: the rank correlation of symmetry with what its part carries.

    The latter is the share that the symmetric part keeps, less the share that the skew part keeps.
    Two layers have a sign and no rank. A run with a layer whose scores explain nothing has no share
    there, and no correlation. The cell next to it, without any relation, has zeros.
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


def read_definition(folder: Path) -> tuple[list[Contrast], list[Claim]]:
    """Return the contrasts and claims of a folder's ``contrasts.toml``."""
    content = tomllib.loads((folder / DEFINITION).read_text(encoding="utf-8"))
    contrasts = [Contrast(**entry) for entry in content["contrast"]]
    names = [contrast.name for contrast in contrasts]
    claims = [Claim(**entry) for entry in content["claim"]]
    if len(set(names)) < len(names):
        raise RunError(f"{folder / DEFINITION}: names of contrasts must be unique")
    for claim in claims:
        for name in filter(None, (claim.contrast, claim.interaction)):
            if name not in names:
                raise RunError(f"{folder / DEFINITION}: no contrast is called {name!r}")
    return contrasts, claims


def differences(contrast: Contrast, records: Records) -> list[float]:
    """Return the contrast of each seed that all its cells have.

    Examples
    --------
    >>> contrast = Contrast("c", "", "loss", {"a": 1, "b": -1})
    >>> differences(contrast, {"loss": {"a": {1: 2.0, 2: 3.0}, "b": {1: 1.5}}})
    [0.5]
    """
    if abs(sum(contrast.cells.values())) > 1e-9:
        raise RunError(f"contrast {contrast.name}: weights must add up to zero")
    known = records.get(contrast.measure, {})
    if missing := [cell for cell in contrast.cells if cell not in known]:
        raise RunError(f"contrast {contrast.name}: no records of {', '.join(missing)}")
    values = by_seed(*(known[cell] for cell in contrast.cells))
    weights = contrast.cells.values()
    return [
        sum(w * v for w, v in zip(weights, of, strict=True)) for _, of in sorted(values.items())
    ]


def moderate(variances: Sequence[float], degrees: Sequence[float]) -> tuple[float, float]:
    """Return the variance that several have in common, and the degrees of freedom that it is worth.

    By the moments of log s², whose law for a given variance is known. The degrees are at most the
    number of variances: these share runs, so that they are no independent estimates.

    Examples
    --------
    >>> random = np.random.default_rng(0)
    >>> common, worth = moderate(list(4 * random.chisquare(4, 500) / 4), [4] * 500)
    >>> round(common, 1), worth > 50
    (3.9, True)
    """
    from scipy.special import digamma, polygamma  # type: ignore[import-untyped]

    s, half = np.asarray(variances, float), np.asarray(degrees, float) / 2
    s = np.maximum(s, 0.01 * np.median(s))  # equal, because rounded, numbers still vary
    logs = np.log(s) - digamma(half) + np.log(half)
    excess = logs.var(ddof=1) - polygamma(1, half).mean() if len(s) > 1 else 0.0
    if excess <= 0:
        return float(np.exp(logs.mean())), float(len(s))
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    prior = brentq(lambda x: float(polygamma(1, x)) - excess, 1e-3, 1e6)
    common = np.exp(logs.mean() + digamma(prior) - np.log(prior))
    return float(common), float(min(2 * prior, len(s)))


def evaluate(contrasts: Sequence[Contrast], records: Records) -> list[Result]:
    """All contrasts, moderated within their pools, with intervals for their number."""
    each = {c.name: differences(c, records) for c in contrasts}
    single = [name for name, values in each.items() if len(values) < 2]
    if single:
        raise RunError(f"contrasts of a single seed have no interval: {', '.join(single)}")
    # Variances of one unit of weight, so that sums of more cells compare with differences of two.
    scale = {c.name: sum(w**2 for w in c.cells.values()) / 2 for c in contrasts}
    variances = {name: stdev(values) ** 2 / scale[name] for name, values in each.items()}
    pools: dict[str, list[str]] = {}
    for contrast in contrasts:
        pools.setdefault(contrast.pool or contrast.measure, []).append(contrast.name)
    common = {
        pool: moderate([variances[n] for n in names], [len(each[n]) - 1 for n in names])
        for pool, names in pools.items()
    }
    estimates = []
    for contrast in contrasts:
        values = each[contrast.name]
        count, own_degrees = len(values), len(values) - 1
        shared, worth = common[contrast.pool or contrast.measure]
        degrees = worth + own_degrees
        variance = (worth * shared + own_degrees * variances[contrast.name]) / degrees
        error = math.sqrt(variance * scale[contrast.name] / count)
        estimates.append(
            ContrastEstimate(
                contrast, value=fmean(values), error=error, degrees=degrees, count=count
            )
        )
    level = 1 - found_at([estimate.p for estimate in estimates], 1 - LEVEL)
    results = []
    for estimate in estimates:
        values = each[estimate.contrast.name]
        low, high = estimate.interval(LEVEL)
        results.append(
            Result(
                contrast=estimate.contrast,
                value=estimate.value,
                error=estimate.error,
                degrees=estimate.degrees,
                count=estimate.count,
                low=low,
                high=high,
                p=estimate.p,
                allowed=estimate.interval(level),
                alone=paired(values),
                alone_allowed=students_interval(values, level),
            )
        )
    return results


@dataclass(frozen=True)
class ContrastEstimate:
    """A contrast's mean over seeds with its moderated error and degrees of freedom."""

    contrast: Contrast
    value: float
    error: float
    degrees: float
    count: int

    @property
    def p(self) -> float:
        """Two-sided, of the hypothesis that the mean is zero."""
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
    """Return the largest p-value that Benjamini and Hochberg's rule accepts; at least rate/n.

    Examples
    --------
    >>> found_at([0.001, 0.02, 0.03, 0.9], 0.08)  # three are found
    0.06
    """
    limits = [rate * k / len(p) for k in range(1, len(p) + 1)]
    reached = [limit for limit, value in zip(limits, sorted(p), strict=True) if value <= limit]
    return max(reached, default=limits[0])


def decide(claim: Claim, result: Result, interaction: Result | None = None) -> Verdict:
    """Return the verdict on a claim, from the interval that allows for all contrasts.

    A main effect has one only if its interaction's 95 % interval excludes all that would matter.

    Examples
    --------
    >>> contrast = Contrast("c", "", "loss", {"a": 1, "b": -1})
    >>> def at(low, high):
    ...     return Result(contrast, 0, 0.1, 4, 5, low, high, 0.5, (low, high), Paired(5, 0))
    >>> claim = Claim("a is lower", "c", "less", 0.02)
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


def results(folder: Path) -> dict[str, Result]:
    """Return the contrasts of a folder by their names, from its records."""
    contrasts, records = read_definition(folder)[0], read_records(folder)

    def seeds(contrast: Contrast) -> int:
        known = records.get(contrast.measure, {})
        return len(set.intersection(*(set(known.get(cell, ())) for cell in contrast.cells)))

    made = [contrast for contrast in contrasts if not contrast.pending or seeds(contrast) > 1]
    return {r.contrast.name: r for r in evaluate(made, records)} if made else {}


def unnamed(text: str, names: Iterable[str]) -> list[str]:
    r"""Bold phrases of a page whose paragraph names no contrast that could refute them.

    Tables and headings have none. Statements that concern no run are not bold.

    Examples
    --------
    >>> unnamed("- **It helps** (`a`).\n- **It is\n  symmetry.** Always.", ["a"])
    ['It is symmetry.']
    """
    known = set(names)
    phrases: list[str] = []
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d+\. )", text):
        if not paragraph.lstrip().startswith("|") and known.isdisjoint(
            re.findall(r"`([^`]+)`", paragraph)
        ):
            bold = re.findall(r"\*\*(.+?)\*\*", paragraph, flags=re.DOTALL)
            phrases += [" ".join(phrase.split()) for phrase in bold]
    return phrases


def verdicts(folder: Path) -> Iterator[tuple[Claim, Verdict, Result | None]]:
    """Each claim of a folder with its verdict and its contrast, if that was measured."""
    result_by_name = results(folder)
    for claim in read_definition(folder)[1]:
        result = result_by_name.get(claim.contrast)
        decided = (
            decide(claim, result, result_by_name.get(claim.interaction)) if result else "not run"
        )
        yield claim, decided, result


def claims_table(folder: Path) -> list[str]:
    """Return the verdicts on a folder's claims, as lines of Markdown."""
    lines = [
        "| claim | verdict | contrast | effect [interval for all contrasts] | would matter |",
        "|:--|:--|:--|--:|--:|",
    ]
    for claim, verdict, result in verdicts(folder):
        says = f"{claim.says} ({claim.note})" if claim.note else claim.says
        shown, effect, limit = f"**{verdict}**" if verdict == "reproduced" else verdict, "–", "–"
        if result is not None:
            shown += f" on `{claim.interaction}`" if verdict == "depends" else ""
            shown += " (by borrowed variance)" if result.borrows and verdict != "depends" else ""
            effect = interval_of(result, *result.allowed)
            limit = _number(result, claim.matters * (-1 if claim.predicts == "less" else 1))
        lines.append(f"| {says} | {shown} | `{claim.contrast}` | {effect} | {limit} |")
    return lines


def contrasts_table(folder: Path) -> list[str]:
    """All contrasts of a folder, each by itself, as lines of Markdown."""
    lines = [
        "| contrast | what | measure | seeds | difference [95 %] | [Student's] | p | detectable |",
        "|:--|:--|:--|--:|--:|--:|--:|--:|",
    ]
    for name, result in results(folder).items():
        contrast, p, alone = result.contrast, result.p, result.alone
        cells = (
            f"`{name}`",
            contrast.says,
            contrast.measure,
            str(result.count),
            interval_of(result, result.low, result.high),
            "–"
            if alone.low is None or alone.high is None
            else f"[{_number(result, alone.low)}, {_number(result, alone.high)}]",
            f"{p:.3f}" if p >= 0.001 else "<.001",
            _number(result, result.detectable).lstrip("+"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def interval_of(result: Result, low: float, high: float) -> str:
    """Return a contrast's mean with the ends of an interval, in its own digits."""
    numbers = [_number(result, number) for number in (result.value, low, high)]
    return f"{numbers[0]} [{numbers[1]}, {numbers[2]}]"


def _number(result: Result, number: float) -> str:
    """In whole steps, or with three digits."""
    digits = 0 if result.contrast.measure == "end of the plateau" else 3
    return f"{number:+.{digits}f}".replace("-", "−")
