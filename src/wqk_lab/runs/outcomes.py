"""Sentences on speed-ups, for the end of `wqk lab speedup` and the beginning of reports of runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from wqk.errors import MissingPackage, RunError
from wqk_lab.runs.groups import comparable
from wqk_lab.runs.seeds import LEVEL, Paired, decimals, interval
from wqk_lab.runs.speedup import StartSpeedUp, speedups

if TYPE_CHECKING:
    from wqk.tables.run import Run


# Equal differences of fewer nats are rounding of losses.
SAME_LOSS = 1e-6


def verdict(comparison: StartSpeedUp) -> str:
    """Describe the final loss of one initialization compared with another, in one sentence.

    Examples
    --------
    >>> from wqk_lab.runs.speedup import SpeedUp, StartSpeedUp
    >>> losses = [(2.0, 1.5), (2.1, 1.61), (1.9, 1.39)]
    >>> runs = tuple(SpeedUp(n, a, b, 0.2, 0.2) for n, (a, b) in enumerate(losses))
    >>> verdict(StartSpeedUp("paired", "random", 500, 500, runs))
    'paired ends 0.500 nats [0.475, 0.525] below random.'
    >>> runs = tuple(SpeedUp(n, 2.0, 2.0 + d, 0, 0) for n, d in enumerate((-0.01, 0.01, 0.005)))
    >>> verdict(StartSpeedUp("paired", "random", 500, 500, runs))
    'No difference found between paired and random; 0.032 nats would have been.'
    >>> runs = tuple(SpeedUp(n, 2.0, 2.0 + d, 0, 0) for n, d in enumerate((-2e-4, 1e-4, 0.0)))
    >>> verdict(StartSpeedUp("paired", "random", 500, 500, runs))
    'No difference found between paired and random; 0.00047 nats would have been.'
    >>> verdict(StartSpeedUp("paired", "random", 500, 500, runs[:1]))
    'paired and random have one common seed: too few to tell more than chance.'
    >>> runs = tuple(SpeedUp(n, 2.0, 1.5, 0.2, 0.2) for n in (1, 2))
    >>> verdict(StartSpeedUp("paired", "random", 500, 500, runs))
    'paired ends 0.500 nats below random in each of 2 seeds: equal differences give no interval.'
    """
    difference = comparison.over_seeds("difference")
    start, baseline = comparison.start, comparison.baseline
    side = "below" if difference.mean < 0 else "above"
    if difference.count == 1:
        return f"{start} and {baseline} have one common seed: too few to tell more than chance."
    if difference.low is None or difference.high is None:
        mean = abs(difference.mean)
        place = f"{mean:.{decimals([mean])}f} nats {side} {baseline}"
        if mean < SAME_LOSS:
            place = f"at the loss of {baseline}"
        return (
            f"{start} ends {place} in each of {difference.count} seeds: equal differences give no "
            "interval."
        )
    if difference.low <= 0 <= difference.high:
        detectable = ""
        if difference.detectable:
            digits = decimals([difference.detectable])
            detectable = f"; {difference.detectable:.{digits}f} nats would have been"
        return f"No difference found between {start} and {baseline}{detectable}."
    low, high = sorted((abs(difference.low), abs(difference.high)))
    digits = decimals([low, high])
    return (
        f"{start} ends {abs(difference.mean):.{digits}f} nats "
        f"[{low:.{digits}f}, {high:.{digits}f}] {side} {baseline}."
    )


def saving(comparison: StartSpeedUp) -> str:
    """Describe the speed-up of one initialization, with an interval over seeds, in one sentence.

    Examples
    --------
    >>> from wqk_lab.runs.speedup import SpeedUp, StartSpeedUp
    >>> runs = tuple(SpeedUp(n, 2.0, 1.9, saved) for n, saved in enumerate((0.2, 0.3, 0.25)))
    >>> saving(StartSpeedUp("symmetric", "random", 500, 500, runs))
    'Speed-up of symmetric over random: +25% [+13%, +37%] of the steps (95 % interval, 3 seeds).'
    >>> saving(StartSpeedUp("symmetric", "random", 500, 500, runs[:1]))
    'Speed-up of symmetric over random: +20% of the steps (a single seed, no interval).'
    >>> runs = tuple(SpeedUp(n, 2.0, 1.9, saved) for n, saved in enumerate((0.7, -0.9, -0.5)))
    >>> saving(StartSpeedUp("symmetric", "random", 500, 500, runs))
    'Speed-up of symmetric over random: nothing can be told, in either direction (3 seeds).'
    """
    saved = comparison.over_seeds("saved")
    names = f"{comparison.start} over {comparison.baseline}"
    if is_uninformative(saved):
        return (
            f"Speed-up of {names}: nothing can be told, in either direction ({saved.count} seeds)."
        )
    if saved.low is not None:
        source = f"{100 * LEVEL:.0f} % interval, {saved.count} seeds"
    elif saved.count == 1:
        source = "a single seed, no interval"
    else:
        source = f"{saved.count} equal seeds"
    return f"Speed-up of {names}: {interval(saved, '+.0%')} of the steps ({source})."


def is_uninformative(saved: Paired) -> bool:
    """Return whether an interval of speed-ups contains 0 and has an end beyond −1 or 1.

    Speed-ups lie from −1 to 1.

    Examples
    --------
    >>> is_uninformative(Paired(3, -0.24, -2.41, 1.92)), is_uninformative(Paired(3, 0.1, -0.2, 0.4))
    (True, False)
    """
    if saved.low is None or saved.high is None:
        return False
    return saved.low <= 0 <= saved.high and not (saved.low >= -1 and saved.high <= 1)


def results(runs: Sequence[Run]) -> list[str]:
    """Describe each initialization among runs, compared with the baseline of the same recipe.

    The baseline is the random start if there is one. Runs that cannot be compared are left out:
    runs that end at different steps, share no seed, or have no held-out loss. Without SciPy the
    list is empty.
    """
    sentences = []
    for group in comparable(runs):
        with suppress(RunError, MissingPackage):
            for comparison in speedups(group, on_skipped=lambda _: None):
                sentences += [verdict(comparison), saving(comparison)]
    return sentences
