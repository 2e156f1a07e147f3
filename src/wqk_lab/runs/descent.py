"""A loss curve as a strictly falling function of the step: every loss is reached at one step.

Losses are logged at a few steps, and are noisy. The losses are smoothed by the line of best fit
around each step, made monotone by pooling rising neighbors (isotonic regression), and interpolated
by a monotone cubic. Steps are not rounded to logged steps.

Axes: K logged steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wqk._machine import cached_property
from wqk._typing import Array, Float


@dataclass(frozen=True, eq=False)
class Descent:
    """A falling curve through knots, constant beyond the last knot.

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
        """Return the step at which the curve falls to a loss, on a monotone cubic between knots.

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

        def excess(step: float) -> float:
            return float(self._cubic(step)) - loss

        return float(brentq(excess, self.steps[after - 1], self.steps[after]))

    @cached_property
    def _cubic(self) -> Any:
        from scipy.interpolate import PchipInterpolator  # type: ignore[import-untyped]

        return PchipInterpolator(self.steps, self.losses)


def descent(
    steps: Float[Array, " looks"], losses: Float[Array, " looks"], window: float = 0.0
) -> Descent:
    """Return the falling curve of logged losses.

    Parameters
    ----------
    steps, losses
        (K,), in the order of the steps.
    window
        Number of steps on either side over which losses are smoothed. A loss with fewer than three
        logged steps in the window stays as logged.

    Examples
    --------
    >>> curve = descent(np.array([1.0, 2.0, 3.0, 4.0]), np.array([4.0, 2.0, 3.0, 1.0]))
    >>> curve.steps.tolist(), curve.losses.tolist()
    ([1.0, 2.5, 4.0], [4.0, 2.5, 1.0])
    """
    pools: list[_Pool] = []
    for step, loss in zip(steps, smoothed(steps, losses, window), strict=True):
        pools.append(_Pool(1, float(step), float(loss)))
        while len(pools) > 1 and pools[-2].loss <= pools[-1].loss:
            last = pools.pop()
            pools[-1] = pools[-1].joined(last)
    return Descent(
        steps=np.array([pool.step for pool in pools]),
        losses=np.array([pool.loss for pool in pools]),
        first=float(steps[0]),
        last=float(steps[-1]),
    )


class _Pool(NamedTuple):
    """Neighboring losses, to be replaced by their mean at the mean of their steps."""

    members: int
    step: float
    loss: float

    def joined(self, after: _Pool) -> _Pool:
        """Return this pool joined with the next pool."""
        members = self.members + after.members
        step = (self.members * self.step + after.members * after.step) / members
        loss = (self.members * self.loss + after.members * after.loss) / members
        return _Pool(members, step, loss)


def smoothed(
    steps: Float[Array, " looks"], losses: Float[Array, " looks"], window: float
) -> Float[Array, " looks"]:
    """Replace each loss by the value of the line of best fit to nearby losses.

    The weight of a loss falls with the distance of its step, to zero at ``window``.

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
    center = (weights * distances).sum(1) / total
    level = weights @ losses / total
    from_center = distances - center[:, None]
    spread = (weights * from_center**2).sum(1)
    with np.errstate(invalid="ignore"):
        slope = (weights * from_center) @ losses / spread
    has_line = (weights > 0).sum(1) > 2
    return np.where(has_line, level - slope * center, losses)
