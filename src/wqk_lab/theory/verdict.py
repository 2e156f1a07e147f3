"""The rule that determines the verdict on a statement from numbers.

A statement predicts that a quantity is above, below or near a null value, and defines the smallest
deviation that matters. The quantity is measured on several units (batches, chunks of a text, seeds)
and layers. The mean has a 95 % interval, on each side the wider of Student's and Hall's interval,
which allows for skewness (Hall 1992, On the removal of skewness by transformation).

============  =================================================================================
holds         the interval lies beyond the null on the predicted side (above, below), or within
              the margin around it (near)
fails         the interval excludes every effect that would matter, or lies outside the margin
undecided     neither: more units are needed
described     measured on one model, whose layers share dimensions and are no independent units
identity      true of all numbers; shown, but never counted as support
not tested    gives the reason
============  =================================================================================

An effect that is beyond chance but too small to matter fails. In a report, only statements whose
p-values pass Benjamini and Hochberg's rule remain decided. Therefore on average at most 5 % of the
decided verdicts are wrong.

Axes: U units, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from wqk_lab.theory.subject import ObjectiveName

StatementVerdict = Literal["holds", "fails", "undecided", "described", "not tested", "identity"]
VERDICTS: tuple[StatementVerdict, ...] = get_args(StatementVerdict)

# Meanings of the verdicts, for readers of a tally.
MEANINGS: Mapping[StatementVerdict, str] = {
    "holds": "the numbers are as the statement predicts",
    "fails": "this model's numbers contradict what the paper's text predicts",
    "undecided": "the numbers do not suffice; more batches, or more models, may decide",
    "described": "measured on one model, which alone decides nothing",
    "not tested": "this model or this text cannot test the statement",
    "identity": "true of all numbers, and therefore not counted as support",
}

# Verdicts with another plural.
PLURALS: Mapping[StatementVerdict, str] = {
    "holds": "hold",
    "fails": "fail",
    "identity": "identities",
}


def times(number: int, verdict: StatementVerdict) -> str:
    """Return a number of findings with a verdict as text.

    Examples
    --------
    >>> times(1, "fails"), times(12, "fails"), times(2, "identity"), times(3, "undecided")
    ('1 fails', '12 fail', '2 identities', '3 undecided')
    """
    return f"{number} {verdict if number == 1 else PLURALS.get(verdict, verdict)}"


PredictedDirection = Literal["above", "below", "near", "identity"]

# What a statement is measured on: nothing of the subject, its text, its queries and keys, a forward
# pass, a loss, or several saved steps of a run.
Needs = Literal["nothing", "text", "weights", "forward", "loss", "run"]

# One error in twenty; half of it on either side of an interval.
LEVEL = 0.05

# The largest multiple of the number of units that is suggested by number.
MANY = 1000


@dataclass(frozen=True, eq=False)
class Sample:
    """Measurements of a quantity.

    Attributes
    ----------
    values
        (U, L), or (U, 1) for a quantity without layers; NaN if undefined.
    unit, layers
        Kind of the U rows: ``batches``, ``chunks``, ``draws``, ``changes``, ``seeds``, ``models``;
        and the names of the L columns, empty without layers.
    details
        Further numbers of the same shape, by name.
    chance
        Standard deviation of a layer's value over random weights; all units share these weights.
    one_model
        Whether all numbers are from the weights of one model. Such numbers share the chance of this
        model and only describe it; an inference needs several models.
    added
        Number of units that were not measured.
    """

    values: np.ndarray
    unit: str
    layers: tuple[str, ...] = ()
    details: Mapping[str, np.ndarray] = field(default_factory=dict)
    chance: float = 0.0
    one_model: bool = False
    added: int = 0

    def rows(self) -> list[dict[str, Any]]:
        """All numbers, in one row for each unit and layer."""
        rows = []
        for (u, k), value in np.ndenumerate(self.values):
            row: dict[str, Any] = {"unit": f"{self.unit} {u}"}
            if self.layers:
                row["layer"] = self.layers[k]
            row["value"] = float(value)
            row |= {name: float(numbers[u, k]) for name, numbers in self.details.items()}
            rows.append(row)
        return rows


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95 % interval.

    Attributes
    ----------
    value, low, high
        The mean and the ends of its interval.
    error, degrees, skewness
        Standard error of the mean, infinite for a single number; the degrees of freedom; and the
        mean's third cumulant in units of the error.
    over
        Units and layers of the mean, such as ``8 batches × 4 layers``.
    of_layers
        The part of the error due to layers, which more units of the same model do not reduce.
    """

    value: float
    low: float
    high: float
    error: float
    degrees: float
    skewness: float
    over: str
    of_layers: float = 0.0

    @classmethod
    def of(cls, sample: Sample) -> Estimate:
        """Estimate the mean over units and layers, both taken as random draws.

        The squared error is Var(units)/U + Var(layers)/L, with means over the other axis: more
        batches do not reduce the error due to a few layers. Third cumulants also add up. Degrees of
        freedom follow Welch and Satterthwaite.

        Examples
        --------
        >>> Estimate.of(Sample(np.array([[1.0], [2.0], [3.0]]), "batches")).low
        -0.4841...
        """
        values = sample.values[np.isfinite(sample.values).any(axis=1)]
        values = values[:, np.isfinite(values).any(axis=0)]
        over = _over(values, sample)
        value = math.nan
        means_of_axes = []  # means of the units, and means of the layers
        if values.size:
            means_of_axes = [np.nanmean(values, axis=1), np.nanmean(values, axis=0)]
            value = float(np.mean(means_of_axes[0]))
        several = [means for means in means_of_axes if len(means) > 1]
        if not several:  # a single number has no interval
            return cls(value, -math.inf, math.inf, math.inf, 0.0, 0.0, over)
        variances, third_cumulants = zip(*map(_cumulants, several), strict=True)
        degrees_of_axes = [len(means) - 1 for means in several]
        variance = sum(variances)
        error = math.sqrt(variance)
        if not error:
            return cls(value, value, value, 0.0, min(degrees_of_axes), 0.0, over)
        degrees = variance**2 / sum(
            part**2 / axis_degrees
            for part, axis_degrees in zip(variances, degrees_of_axes, strict=True)
        )
        skewness = sum(third_cumulants) / error**3
        return cls(
            value=value,
            low=value - error * _reach(degrees, skewness),
            high=value + error * _reach(degrees, -skewness),
            error=error,
            degrees=degrees,
            skewness=skewness,
            over=over,
            of_layers=math.sqrt(variances[1]) if len(variances) > 1 else 0.0,
        )

    def __str__(self) -> str:
        if self.low == self.high and abs(self.value) < 1e-3:
            return f"{self.value:.0e}" if self.value else "0"
        digits = 4 if self.high - self.low < 0.02 else 2
        value, low, high = (f"{x:.{digits}f}" for x in (self.value, self.low, self.high))
        return value if low in (high, "-inf") else f"{value} [{low}, {high}]"


def _cumulants(means: np.ndarray) -> tuple[float, float]:
    """Return the second and third cumulant of a mean; rounding of equal numbers is no spread."""
    count = len(means)
    deviations = means - means.mean()
    if np.std(means, ddof=1) < 1e-9 * np.abs(means).max():
        return 0.0, 0.0
    variance = float((deviations**2).sum()) / (count - 1)
    degrees = (count - 1) * max(count - 2, 1)
    third_moment = count * float((deviations**3).sum()) / degrees
    # The cumulants of the mean of n values are theirs over n and over n².
    return variance / count, third_moment / count**2


def tail(t: float, degrees: float, skewness: float = 0.0) -> float:
    """Return Pr[T > t] for Student's T, or for Hall's transform of t if larger.

    Examples
    --------
    >>> round(tail(12.706, 1), 4), round(tail(3, 7, 0.5), 4), round(tail(3, 7, -0.5), 4)
    (0.025, 0.01, 0.0698)
    """
    from scipy.special import stdtr  # type: ignore[import-untyped]

    hall = t + skewness * t**2 / 3 + skewness**2 * t**3 / 27 + skewness / 6
    return float(stdtr(degrees, -min(t, hall)))


def _reach(degrees: float, skewness: float) -> float:
    """Return the t where `tail` is 2.5 %: the lower half of an interval in standard errors."""
    from scipy.special import stdtrit

    t = float(stdtrit(degrees, 1 - LEVEL / 2))
    if abs(skewness) < 1e-6:  # the cube root would lose digits
        return t
    return max(t, 3 / skewness * (math.cbrt(1 + skewness * (t - skewness / 6)) - 1))


def _over(values: np.ndarray, sample: Sample) -> str:
    units, layers = len(values) - sample.added, values.shape[1]
    unit = "batch" if sample.unit == "batches" else sample.unit.removesuffix("s")
    names = [f"{units} {sample.unit}" if units > 1 else unit]
    if units == 1 and sample.layers:
        names = []
    if sample.layers:
        names.append(f"{layers} layers" if layers > 1 else f"layer {sample.layers[0]}")
    return " × ".join(names)


@dataclass(frozen=True, eq=False)
class Statement:
    """A statement of the paper, as a prediction of one quantity.

    Attributes
    ----------
    number
        Number of the statement in the paper.
    says, assumes
        The statement, and its assumption.
    quantity, measure
        The measured quantity, and the function that measures it in `Evidence` or, for a statement
        about a run, in the run's saved steps.
    direction, null
        The prediction: ``above``, ``below`` or ``near`` the null value; or ``identity``, which
        holds for all numbers up to rounding.
    matters
        The smallest distance from the null that matters; for an identity, the largest rounding.
    needs, objectives
        The data that the measure needs, and the objectives of the models that the statement is
        about.
    """

    number: str
    says: str
    assumes: str
    quantity: str
    direction: PredictedDirection
    matters: float
    measure: Callable[[Any], Sample]
    null: float = 0.0
    needs: Needs = "loss"
    objectives: Sequence[ObjectiveName] = ("masked", "each", "causal")

    @property
    def about_model(self) -> bool:
        """True if the statement is about the model or its text, not about random matrices."""
        return self.needs != "nothing"

    @property
    def prediction(self) -> str:
        """Predicted range of the quantity, such as ``> 0``.

        The text never begins with an equals sign, which spreadsheets take for a formula.
        """
        signs = {"above": ">", "below": "<", "near": "≈", "identity": "equal to"}
        return f"{signs[self.direction]} {self.null:g}"


@dataclass(frozen=True)
class Layers:
    """Numbers of layers in which a statement holds, fails, and would hold by chance."""

    holds: int
    fails: int
    count: int
    by_chance: float

    def __str__(self) -> str:
        text = f"{self.holds} of {self.count} layers hold"
        if self.fails:
            text += f", {self.fails} fail{'s' if self.fails == 1 else ''}"
        return f"{text} (by chance alone, {self.by_chance:.1g} would hold on average)"


@dataclass(frozen=True, eq=False)
class Finding:
    """A verdict on a statement, and the measurements behind it.

    Attributes
    ----------
    statement, verdict
        The statement, and the verdict on it.
    estimate, sample
        The estimate of the quantity, and all measurements; None if not measured.
    layers
        The verdicts of single layers; None without layers, or with only one unit.
    p
        The probability of this verdict by chance, or of the nearer verdict if undecided; NaN for an
        identity or without a test.
    why
        The reason why the statement was not tested, or the number of further units that would
        decide.
    """

    statement: Statement
    verdict: StatementVerdict
    estimate: Estimate | None = None
    layers: Layers | None = None
    p: float = math.nan
    why: str = ""
    sample: Sample | None = None


def not_tested(statement: Statement, why: str) -> Finding:
    """Return the finding on a statement that cannot be tested with the data."""
    return Finding(statement, "not tested", why=why)


def decide(statement: Statement, sample: Sample) -> Finding:
    """Return the verdict on one statement, without correction for other statements.

    Examples
    --------
    >>> statement = Statement("S0", "x grows", "", "x", "above", 0.1, lambda evidence: sample)
    >>> sample = Sample(np.array([[1.0], [1.2], [0.9]]), "batches")
    >>> finding = decide(statement, sample)
    >>> finding.verdict, str(finding.estimate)
    ('holds', '1.03 [0.65, 2.07]')
    >>> decide(statement, Sample(-sample.values, "batches")).verdict
    'fails'
    """
    estimate = Estimate.of(sample)
    if math.isnan(estimate.value):
        return not_tested(statement, f"the quantity is not defined on any of the {sample.unit}")
    if statement.direction == "identity":
        worst = float(np.nanmax(np.abs(sample.values - statement.null)))
        verdict: StatementVerdict = "identity" if worst < statement.matters else "fails"
        seen = Estimate(worst, worst, worst, 0.0, 0.0, 0.0, estimate.over)
        return Finding(statement, verdict, seen, sample=sample)
    if sample.one_model:
        return _described(statement, sample, estimate)
    verdict, p = _verdict(statement, estimate)
    why = _more(statement, estimate) if verdict == "undecided" else ""
    return Finding(statement, verdict, estimate, _by_layer(statement, sample), p, why, sample)


def _described(statement: Statement, sample: Sample, estimate: Estimate) -> Finding:
    """Return the finding about one model: the mean and the spread over layers."""
    measured = np.isfinite(sample.values).any(axis=0)
    layers = np.nanmean(sample.values[:, measured], axis=0)
    effects = (layers - statement.null) * (-1 if statement.direction == "below" else 1)
    near = statement.direction == "near"
    as_predicted = np.abs(effects) <= statement.matters if near else effects > 0
    spread = f"; SD over layers {layers.std(ddof=1):.2f}" if len(layers) > 1 else ""
    why = (
        f"{as_predicted.sum()} of {len(layers)} layers as predicted{spread}; layers of one model "
        "share dimensions, so that only models of several seeds would decide"
    )
    value = replace(estimate, low=-math.inf, high=math.inf, error=math.inf, degrees=0.0)
    return Finding(statement, "described", value, why=why, sample=sample)


def adjusted_together(findings: Sequence[Finding]) -> list[Finding]:
    """Adjust the findings of one report by Benjamini and Hochberg's rule.

    Statements about random matrices are adjusted separately, because they are not about the model.
    """
    from scipy.stats import false_discovery_control  # type: ignore[import-untyped]

    settled = list(findings)
    for about_model in (True, False):
        tested = [
            k
            for k, finding in enumerate(findings)
            if finding.statement.about_model == about_model and not math.isnan(finding.p)
        ]
        if not tested:
            continue
        adjusted = false_discovery_control([findings[k].p for k in tested])
        for k, p in zip(tested, adjusted, strict=True):
            if p > LEVEL and findings[k].verdict in ("holds", "fails"):
                why = f"decided by itself, but not as one of {len(tested)} statements"
                settled[k] = replace(findings[k], verdict="undecided", why=why)
    return settled


def _verdict(statement: Statement, estimate: Estimate) -> tuple[StatementVerdict, float]:
    """Return the verdict on an estimate, and its two-sided p-value."""
    if math.isinf(estimate.error):
        return "undecided", 1.0
    holds, fails = _chances(statement, estimate)
    if fails <= LEVEL / 2:
        return "fails", 2 * fails
    if holds <= LEVEL / 2:
        return "holds", 2 * holds
    return "undecided", 2 * min(holds, fails, 0.5)


def _chances(statement: Statement, estimate: Estimate) -> tuple[float, float]:
    """Return the probabilities of equally strong evidence if "holds" and if "fails" were wrong."""
    effect = _effect(statement, estimate)
    margin = statement.matters

    def chance(distance: float, side: int) -> float:
        """Return the probability of a mean so far away, on the predicted side (1) or not (-1)."""
        if not estimate.error:
            return 0.0 if distance > 0 else 1.0
        if statement.direction == "below":
            side = -side
        return tail(distance / estimate.error, estimate.degrees, side * estimate.skewness)

    if statement.direction == "near":
        inside = max(chance(margin + effect, 1), chance(margin - effect, -1))
        outside = min(chance(effect - margin, 1), chance(-effect - margin, -1))
        return inside, outside
    return chance(effect, 1), chance(margin - effect, -1)


def _effect(statement: Statement, estimate: Estimate) -> float:
    """Return the distance of the estimate from the null, positive on the predicted side."""
    return (estimate.value - statement.null) * (-1 if statement.direction == "below" else 1)


def _by_layer(statement: Statement, sample: Sample) -> Layers | None:
    """Return verdicts on single layers; a layer's error includes the chance of its weights."""
    if len(sample.layers) < 2 or (len(sample.values) < 2 and not sample.chance):
        return None
    verdicts = []
    for values_of_layer in sample.values.T:
        estimate = Estimate.of(Sample(values_of_layer[:, None], sample.unit))
        if len(values_of_layer) > 1:
            error = math.hypot(estimate.error, sample.chance)
            estimate = replace(estimate, error=error)
        else:
            estimate = replace(estimate, error=sample.chance, degrees=math.inf)
        verdict, _ = _verdict(statement, estimate)
        verdicts.append(verdict)
    return Layers(
        holds=verdicts.count("holds"),
        fails=verdicts.count("fails"),
        count=len(verdicts),
        by_chance=LEVEL / 2 * len(verdicts),
    )


def _more(statement: Statement, estimate: Estimate) -> str:
    """Estimate the factor by which more units of the same kind would decide."""
    if math.isinf(estimate.error):
        return f"{estimate.over}: a single number has no interval; take more"
    effect, margin = _effect(statement, estimate), statement.matters
    near = statement.direction == "near"
    room = abs(margin - abs(effect)) if near else max(effect, margin - effect)
    # An interval narrows a little faster than with the root of the number of units, and never
    # below what the layers leave.
    reach = (estimate.high - estimate.low) / 2 / estimate.error
    error_of_units = estimate.error**2 - estimate.of_layers**2
    room_for_units = (max(room, 0.0) / reach) ** 2 - estimate.of_layers**2
    if room_for_units <= 0 and estimate.of_layers:
        return f"{estimate.over}: more would not decide, since the layers differ too much"
    times = error_of_units / room_for_units if room_for_units > 0 else math.inf
    if times > MANY:
        return f"more than {MANY} times as many ({estimate.over}) would be needed"
    return f"about {max(2, math.ceil(times))} times as many ({estimate.over}) would decide"
