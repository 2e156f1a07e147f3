"""The rule of verdicts, on numbers whose answer is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from wqk_lab.theory.verdict import (
    Estimate,
    Finding,
    Layers,
    PredictedDirection,
    Sample,
    Statement,
    adjusted_together,
    decide,
    tail,
)

VERDICTS = [
    ("above", 1.0, 0.1, "holds"),
    ("above", -1.0, 0.1, "fails"),
    ("above", 0.05, 0.01, "fails"),
    ("above", 0.1, 1.0, "undecided"),
    ("below", -1.0, 0.1, "holds"),
    ("below", 1.0, 0.1, "fails"),
    ("near", 0.05, 0.01, "holds"),
    ("near", 1.0, 0.1, "fails"),
    ("near", -1.0, 0.1, "fails"),
    ("near", 0.0, 1.0, "undecided"),
    ("identity", 0.0, 0.1, "identity"),
    ("identity", 1.0, 0.1, "fails"),
]

# The t that is exceeded with a probability of 2.5 %, from printed tables.
TABLE = {1: 12.706, 2: 4.303, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}


def statement(direction: PredictedDirection, null: float = 0.0, matters: float = 0.2) -> Statement:
    return Statement("S0", "", "", "", direction, matters, lambda _: Sample(X, "batches"), null)


X = np.zeros((2, 1))


def of(values: np.ndarray, direction: PredictedDirection = "above", **chosen: Any) -> Finding:
    """Decide on numbers (U, L), or (U,) without layers."""
    layers = tuple(map(str, range(values.shape[1]))) if values.ndim > 1 else ()
    sample = Sample(values.reshape(len(values), -1), "batches", layers, **chosen)
    return decide(statement(direction), sample)


def decided(direction: PredictedDirection, mean: float, spread: float, units: int = 8) -> Finding:
    return of(mean + spread * np.resize([1.0, -1.0], units), direction)


@pytest.mark.parametrize("degrees", TABLE)
def test_quantiles_are_those_of_the_tables(degrees: int) -> None:
    assert tail(TABLE[degrees], degrees) == pytest.approx(0.025, abs=2e-5)


@pytest.mark.parametrize(("direction", "mean", "spread", "expected"), VERDICTS)
def test_the_rule(direction: PredictedDirection, mean: float, spread: float, expected: str) -> None:
    assert decided(direction, mean, spread).verdict == expected


def test_undecided_says_how_many_would_decide() -> None:
    finding = decided("above", 0.3, 1.0)
    assert "times as many (8 batches) would decide" in finding.why
    assert decided("above", 0.3, 1.0, 8 * int(finding.why.split()[1])).verdict == "holds"
    alone = of(np.ones(1))
    assert alone.verdict == "undecided"
    assert str(alone.estimate) == "1.00"
    assert alone.why == "batch: a single number has no interval; take more"


def test_more_units_do_not_help_where_layers_differ() -> None:
    layers, units = np.array([[1.0, -1.0, 0.4]]), 0.01 * np.array([[1.0], [-1.0], [0.5], [-0.5]])
    finding = of(layers + units)
    assert finding.verdict == "undecided"
    assert "more would not decide, since the layers differ too much" in finding.why


def test_statements_about_random_matrices_are_a_family_of_their_own() -> None:
    finding = decided("above", 1.0, 0.1)
    of_random = replace(finding, statement=replace(finding.statement, needs="nothing"), p=0.04)
    doubtful = [replace(finding, p=p) for p in (0.04, 0.5, 0.6)]
    assert [f.verdict for f in adjusted_together([of_random, *doubtful])][:2] == [
        "holds",
        "undecided",
    ]
    family = [replace(of_random, p=p) for p in (0.04, 0.5, 0.6)]  # which is corrected, too
    assert adjusted_together(family)[0].verdict == "undecided"


def share_of(verdict: str, edge: float, noise: np.ndarray, direction: PredictedDirection) -> float:
    """Share of noise about the edge that has this verdict."""
    verdicts = [of(edge + 0.1 * values, direction).verdict for values in noise]
    return verdicts.count(verdict) / len(noise)


WRONG = {"above": ((0.0, "holds"), (0.2, "fails")), "near": ((0.2, "holds"), (0.2, "fails"))}


@pytest.mark.parametrize("direction", ["above", "near"])
@pytest.mark.parametrize("law", ["normal", "uniform"])
def test_at_the_edge_chance_decides_rarely(direction: PredictedDirection, law: str) -> None:
    """At the null nothing holds above it; at the margin nothing fails above it or holds near."""
    random, shape = np.random.default_rng(0), (1000, 12)
    noise = random.standard_normal(shape) if law == "normal" else random.uniform(-1, 1, shape)
    for edge, verdict in WRONG[direction]:
        assert share_of(verdict, edge, noise, direction) <= 0.04


@pytest.mark.parametrize("side", [1, -1])
def test_skewed_numbers_do_not_decide_more_often(side: int) -> None:
    """Student's interval alone errs in 9 % of the draws on the side of the shorter tail."""
    noise = side * (np.random.default_rng(0).exponential(size=(2000, 12)) - 1)
    for edge, verdict in WRONG["above"]:
        assert share_of(verdict, edge, noise, "above") <= 0.05


def test_an_interval_ends_where_its_tail_is_left() -> None:
    values = np.random.default_rng(1).exponential(size=(12, 3))
    estimate = Estimate.of(Sample(values, "batches", ("0", "1", "2")))
    assert estimate.skewness > 0
    for end, side in ((estimate.low, 1), (estimate.high, -1)):
        t = abs(estimate.value - end) / estimate.error
        assert tail(t, estimate.degrees, side * estimate.skewness) == pytest.approx(0.025)


@pytest.mark.parametrize("skew", [0.0, 3e-16, 3e-15, -1e-12, 1e-7])
def test_rounding_is_no_skewness(skew: float) -> None:
    """An interval of nearly symmetric units reaches as far as an interval of symmetric units."""
    values = np.resize([1.0, -1.0, 0.0, 0.0], 8)
    symmetric = of(values).estimate
    values[0] += skew
    estimate = of(values).estimate
    assert estimate is not None
    assert symmetric is not None
    for end, expected in ((estimate.low, symmetric.low), (estimate.high, symmetric.high)):
        assert (end - estimate.value) / estimate.error == pytest.approx(
            expected / symmetric.error, rel=1e-6
        )


def test_layers_are_drawn_too() -> None:
    """Many batches do not help where layers differ by chance."""
    random = np.random.default_rng(1)
    draws = 0.01 * random.standard_normal((200, 50, 4)) + random.standard_normal((200, 1, 4))
    assert [of(values).verdict for values in draws].count("holds") <= 0.05 * 200


def test_layers_are_counted_beside_chance() -> None:
    values = np.array([[1.0, -1.0, 0.0]]) + 0.01 * np.array([[1.0], [-1.0], [0.5]])
    layers = of(values).layers
    assert (layers.holds, layers.fails, layers.count) == (1, 2, 3)
    assert layers.by_chance == pytest.approx(0.075)
    # Weights by chance explain as much; and two units that differ decide no layer.
    for doubtful in (of(values, chance=5.0), of(np.array([[0.1, 0.1], [1.9, 1.9]]))):
        assert doubtful.layers.holds == doubtful.layers.fails == 0


def test_benjamini_and_hochberg() -> None:
    p = np.random.default_rng(2).uniform(size=20) ** 3
    order = np.sort(p)
    expected = [min(1.0, min(order[k:] * 20 / np.arange(k + 1, 21))) for k in range(20)]
    finding = decided("above", 1.0, 0.1)
    settled = adjusted_together([replace(finding, p=value) for value in order])
    assert [f.verdict == "holds" for f in settled] == [value <= 0.05 for value in expected]
    assert {f.verdict for f in settled} == {"holds", "undecided"}


def test_one_of_many_statements_is_not_decided_by_chance() -> None:
    random = np.random.default_rng(3)
    decided_alone, settled = 0, 0
    for _ in range(40):
        values = random.standard_normal((20, 8, 1))
        findings = [decide(statement("above", matters=0.0), Sample(v, "batches")) for v in values]
        decided_alone += any(f.verdict != "undecided" for f in findings)
        settled += any(f.verdict != "undecided" for f in adjusted_together(findings))
    assert settled <= 4 < decided_alone
    clear = [decided("above", 1.0, 0.1), decided("above", 1.0, 0.2)]
    assert [f.verdict for f in adjusted_together(clear)] == ["holds", "holds"]


def test_what_is_not_defined_is_left_out() -> None:
    finding = of(np.array([[1.0, np.nan], [1.1, np.nan], [np.nan, np.nan]]))
    assert finding.estimate.value == pytest.approx(1.05)
    assert finding.estimate.over == "2 batches × layer 0"
    assert of(np.full((2, 2), np.nan)).verdict == "not tested"


SKEWED = np.array([0.1, 0.12, 0.15, 0.2, 0.22, 0.3, 0.9])  # a long tail above


@pytest.mark.parametrize(
    ("direction", "mirrored_direction"), [("above", "below"), ("below", "above"), ("near", "near")]
)
@pytest.mark.parametrize("shift", [-0.6, -0.3, -0.1, 0.0, 0.3])
def test_what_is_skewed_down_is_decided_as_its_mirror_image(direction, mirrored_direction, shift):
    finding, mirrored = of(SKEWED + shift, direction), of(-SKEWED - shift, mirrored_direction)
    assert (mirrored.verdict, mirrored.p) == (finding.verdict, pytest.approx(finding.p))
    assert mirrored.estimate.low == pytest.approx(-finding.estimate.high)
    assert mirrored.estimate.skewness == pytest.approx(-finding.estimate.skewness)


def test_verdicts_and_intervals_agree_where_a_mean_is_skewed() -> None:
    """A statement holds exactly where its interval lies beyond the null, on either side."""
    for sign, direction in ((1, "above"), (-1, "below")):
        for null in np.linspace(-0.2, 0.6, 41):
            sample = Sample(sign * SKEWED[:, None], "batches")
            finding = decide(statement(direction, sign * null, 0.0), sample)  # type: ignore[arg-type]
            near, far = sorted(
                sign * bound for bound in (finding.estimate.low, finding.estimate.high)
            )
            assert (finding.verdict == "holds") == (near >= null)
            assert (finding.verdict == "fails") == (far <= null)


@pytest.mark.parametrize(
    ("low", "value", "high", "text"),
    [
        (0.0, 0.0, 0.0, "0"),
        (2.2e-16, 2.2e-16, 2.2e-16, "2e-16"),
        (-4e-9, -4e-9, -4e-9, "-4e-09"),
        (0.25, 0.25, 0.25, "0.2500"),
        (-np.inf, 1.0, np.inf, "1.00"),
        (0.118, 0.1234, 0.129, "0.1234 [0.1180, 0.1290]"),
        (-0.5, 0.125, 0.75, "0.12 [-0.50, 0.75]"),
    ],
)
def test_an_estimate_prints_as_many_digits_as_its_interval_has(
    low: float, value: float, high: float, text: str
) -> None:
    """An identity that holds up to rounding is a power of ten, not zero."""
    assert str(Estimate(value, low, high, 0.1, 3.0, 0.0, "batches")) == text


def described(values: np.ndarray, direction: PredictedDirection, null: float = 0.0) -> Finding:
    layers = tuple(map(str, range(values.shape[1])))
    sample = Sample(values, "models", layers, one_model=True)
    return decide(statement(direction, null), sample)


@pytest.mark.parametrize(
    ("direction", "null", "as_predicted"),
    [("above", 0.0, 2), ("below", 0.0, 1), ("above", 0.25, 1), ("near", 0.4, 2), ("near", 0.0, 1)],
)
def test_one_model_is_described_by_its_layers(
    direction: PredictedDirection, null: float, as_predicted: int
) -> None:
    """Layers count on the predicted side of the null, or within .2 of it."""
    values = np.array([[0.2, 0.5, -0.3, np.nan]])
    finding = described(values, direction, null)
    assert finding.verdict == "described"
    spread = np.std([0.2, 0.5, -0.3], ddof=1)
    counted = f"{as_predicted} of 3 layers as predicted; SD over layers {spread:.2f}; layers of"
    assert finding.why.startswith(counted)
    estimate = finding.estimate
    assert estimate.value == pytest.approx(0.4 / 3)
    ends = (estimate.low, estimate.high, estimate.error, estimate.degrees)
    assert ends == (-np.inf, np.inf, np.inf, 0)
    assert "SD" not in described(np.array([[0.2]]), direction, null).why


def test_the_number_of_units_that_would_decide_follows_from_the_room() -> None:
    """The interval has to shrink to the room that the estimate leaves on its side."""
    for direction, mean in (("above", 0.3), ("below", -0.3), ("near", 0.15), ("near", -0.12)):
        finding = decided(direction, mean, 0.5, 6)
        assert finding.verdict == "undecided"
        estimate = finding.estimate
        room = 0.2 - abs(mean) if direction == "near" else 0.3
        half = (estimate.high - estimate.low) / 2
        times = max(2, int(np.ceil((half / room) ** 2)))
        assert finding.why == f"about {times} times as many (6 batches) would decide"
    hopeless = decided("near", 0.2 + 1e-9, 0.5, 6)
    assert hopeless.why == "more than 1000 times as many (6 batches) would be needed"


def test_numbers_of_a_sample_are_rows_with_their_unit_and_layer() -> None:
    values, details = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0], [7.0, 8.0]])
    rows = Sample(values, "seeds", ("3", "7"), {"reach": details}).rows()
    assert rows == [
        {"unit": "seeds 0", "layer": "3", "value": 1.0, "reach": 5.0},
        {"unit": "seeds 0", "layer": "7", "value": 2.0, "reach": 6.0},
        {"unit": "seeds 1", "layer": "3", "value": 3.0, "reach": 7.0},
        {"unit": "seeds 1", "layer": "7", "value": 4.0, "reach": 8.0},
    ]
    assert Sample(values[:, :1], "draws").rows() == [
        {"unit": "draws 0", "value": 1.0},
        {"unit": "draws 1", "value": 3.0},
    ]


def test_counts_of_layers_and_predictions_in_words() -> None:
    chance = " (by chance alone, 0.1 would hold on average)"
    assert str(Layers(2, 0, 4, 0.1)) == f"2 of 4 layers hold{chance}"
    assert str(Layers(2, 1, 4, 0.1)) == f"2 of 4 layers hold, 1 fails{chance}"
    shown = [
        statement(direction, null).prediction
        for direction, null in (("above", 0), ("below", 1.5), ("near", 1), ("identity", 0))
    ]
    assert shown == ["> 0", "< 1.5", "≈ 1", "equal to 0"]


def test_an_identity_shows_its_worst_number() -> None:
    finding = decide(statement("identity", 1.0, 0.3), Sample(np.array([[1.2], [0.9]]), "batches"))
    assert finding.verdict == "identity"
    assert finding.estimate.value == finding.estimate.low == finding.estimate.high
    assert finding.estimate.value == pytest.approx(0.2)
    assert np.isnan(finding.p)


def test_more_units_narrow_their_own_part_of_the_error_alone() -> None:
    """The part that is due to layers stays, however many units there are."""
    units, layers = np.array([[1.0], [-1.0], [0.8], [-0.8]]), np.array([[0.05, -0.03, -0.02]])
    finding = of(0.3 + units + layers)
    estimate = finding.estimate
    of_layers = np.std(layers, ddof=1) / np.sqrt(3)
    assert estimate.of_layers == pytest.approx(of_layers)
    assert estimate.error**2 == pytest.approx(of_layers**2 + np.var(units, ddof=1) / 4)
    reach = (estimate.high - estimate.low) / 2 / estimate.error
    times = (estimate.error**2 - of_layers**2) / ((0.3 / reach) ** 2 - of_layers**2)
    assert finding.why.startswith(f"about {int(np.ceil(times))} times as many (4 batches × 3")


@pytest.mark.parametrize("mean", [0.9, 0.25])
def test_p_is_that_of_a_two_sided_test(mean: float) -> None:
    from scipy.stats import ttest_1samp

    values = mean + 0.6 * np.resize([1.0, -1.0], 8)
    finding = of(values)
    assert finding.verdict == ("holds" if mean == 0.9 else "undecided")
    assert finding.p == pytest.approx(ttest_1samp(values, 0).pvalue)
    against = of(-values)  # which excludes that .2 is reached
    assert against.p == pytest.approx(ttest_1samp(-values, 0.2).pvalue)
