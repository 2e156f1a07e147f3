"""A loss curve as a strictly falling function of the step, so that every loss has one step.

Losses are logged at a few steps, and are noisy. They are smoothed by the line that fits best around
each step, made monotone by pooling neighbors that rise (isotonic regression), and interpolated by a
monotone cubic: nothing is rounded to the logged steps.

Axes: K logged steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wqk._machine import cached_property
from wqk._typing import Array, Float


@dataclass(frozen=True, eq=False)
class Descent:
    """A falling curve through knots, and level beyond the last one.

    Attributes
    ----------
    steps, losses
        The knots: steps rise, losses fall.
    first, last
        The first and the last logged step.
    """

    steps: np.ndarray
    losses: np.ndarray
    first: float
    last: float

    @property
    def end(self) -> float:
        """The loss at the last step."""
        return float(self.losses[-1])

    def step_at(self, loss: float) -> float:
        """Step at which the curve falls to a loss, on straight lines between the logged steps.

        Examples
        --------
        >>> curve = descent(np.array([100.0, 200.0, 300.0]), np.array([3.0, 2.0, 1.0]))
        >>> [round(curve.step_at(loss)) for loss in (5.0, 2.5, 1.0, 0.5)]
        [100, 150, 300, 300]
        """
        if loss <= self.end:
            return self.last
        if loss > self.losses[0]:
            return self.first
        from scipy.optimize import brentq  # type: ignore[import-untyped]

        after = int(np.flatnonzero(self.losses < loss)[0])
        ends = self.steps[after - 1], self.steps[after]
        return float(brentq(lambda step: float(self._cubic(step)) - loss, *ends))

    @cached_property
    def _cubic(self) -> Any:
        from scipy.interpolate import PchipInterpolator  # type: ignore[import-untyped]

        return PchipInterpolator(self.steps, self.losses)


def descent(
    steps: Float[Array, " looks"], losses: Float[Array, " looks"], window: float = 0.0
) -> Descent:
    """Return the falling curve of some logged losses.

    Parameters
    ----------
    steps, losses
        (K,), in the order of the steps.
    window
        Number of steps on either side to smooth over; losses with fewer than three logged steps
        there are taken as they are.

    Examples
    --------
    >>> curve = descent(np.array([1.0, 2.0, 3.0, 4.0]), np.array([4.0, 2.0, 3.0, 1.0]))
    >>> curve.steps.tolist(), curve.losses.tolist()
    ([1.0, 2.5, 4.0], [4.0, 2.5, 1.0])
    """
    pools: list[tuple[int, float, float]] = []
    for step, loss in zip(steps, smoothed(steps, losses, window), strict=True):
        pools.append((1, float(step), float(loss)))
        while len(pools) > 1 and pools[-2][2] <= pools[-1][2]:
            (m, s, a), (n, t, b) = pools[-2:]
            pools[-2:] = [(m + n, (m * s + n * t) / (m + n), (m * a + n * b) / (m + n))]
    _, at, means = zip(*pools, strict=True)
    return Descent(np.array(at), np.array(means), float(steps[0]), float(steps[-1]))


def smoothed(
    steps: Float[Array, " looks"], losses: Float[Array, " looks"], window: float
) -> Float[Array, " looks"]:
    """Each loss, on the line that fits best to those nearby; near steps weigh more.

    Examples
    --------
    >>> steps = np.arange(6.0)
    >>> smoothed(steps, 5 - steps, window=3).round(12).tolist()  # a line stays as it is
    [5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    """
    losses = np.asarray(losses, float)
    if not window:
        return losses
    distances = steps - steps[:, None]
    weights = np.clip(1 - (distances / window) ** 2, 0, None)
    total = weights.sum(1)
    center, level = (weights * distances).sum(1) / total, weights @ losses / total
    from_center = distances - center[:, None]
    spread = (weights * from_center**2).sum(1)
    with np.errstate(invalid="ignore"):
        slope = (weights * from_center) @ losses / spread
    return np.where((weights > 0).sum(1) > 2, level - slope * center, losses)
