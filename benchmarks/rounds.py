"""Timing several things in turn, so that their ratios hold on a machine whose speed drifts.

Every round times each contender once; a ratio is taken within a round, and what is printed is the
median over rounds with an interval for it. Absolute seconds are medians and are only for scale.

Seconds are taken by the clock and of the processor, over all threads. On a machine that does other
work at the same time, only ratios of the latter mean something: what runs on two threads waits for
the slower one, and a process gets the smaller a share the more others there are.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONFIDENCE = 0.95

# Seconds before each contender, in which the waiting threads of the one before it go to sleep.
PAUSE = 0.05


class RatioEstimate(NamedTuple):
    """A median over rounds, between the ends of a distribution-free interval for it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def against(self, aim: float) -> str:
        """State whether an aim is met, or that the run is too noisy to decide."""
        if self.high <= aim:
            return "met"
        return "missed" if self.low > aim else "undecided: run more rounds"


class Seconds(NamedTuple):
    """One contender's seconds in every round."""

    clock: np.ndarray
    processor: np.ndarray


def alternate(
    contenders: Mapping[str, Callable[[], object]], rounds: int, warm_up: bool = True
) -> dict[str, Seconds]:
    """Seconds of each contender in every round, after a round to warm up, which is not counted.

    The order turns round from one round to the next, so that none always follows the same one.
    """
    names = list(contenders)
    seconds = {name: Seconds(np.empty(rounds), np.empty(rounds)) for name in names}
    for turn in range(-warm_up, rounds):
        for name in reversed(names) if (turn + warm_up) % 2 else names:
            time.sleep(PAUSE)
            start, busy = time.perf_counter(), time.process_time()
            contenders[name]()
            if turn >= 0:
                seconds[name].clock[turn] = time.perf_counter() - start
                seconds[name].processor[turn] = time.process_time() - busy
    return seconds


def estimate(values: np.ndarray) -> RatioEstimate:
    """Return the median of values, and the order statistics that enclose it with 95 % confidence.

    With fewer than six values no such interval exists, and the ends are the extremes.

    Examples
    --------
    >>> estimate(np.arange(9.0))
    RatioEstimate(median=4.0, low=1.0, high=7.0)
    """
    ordered, count = np.sort(values), len(values)
    tail, rank = 0.0, 0
    for below in range(count // 2):
        tail += math.comb(count, below) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank = below
    return RatioEstimate(float(np.median(ordered)), float(ordered[rank]), float(ordered[-1 - rank]))
