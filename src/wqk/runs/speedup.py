"""How much sooner one initialization reaches another's final loss: the speed-up of Table 1.

By the table's caption, it is the share of the steps that remain when the candidate first reaches
the baseline's final loss. If the baseline's final loss is lower, the roles are swapped and the
speed-up is negative. So it is always defined: the run that ends lower reaches the other's loss.

A noisy loss falls below a level before it stays there. It is therefore smoothed, and the step at
which it first falls below is reported together with the step from which it stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from wqk.errors import RunError
from wqk.runs.groups import starts
from wqk.runs.paired import Paired, paired

if TYPE_CHECKING:
    from wqk._typing import Array, Float
    from wqk.runs.groups import Cell
    from wqk.runs.run import Run

Loss = Literal["held-out", "training"]
Field = Literal["first", "lasting", "difference"]

# Window of the trailing mean of a loss, as a fraction of all steps, by default.
SMOOTHING = 0.05

COLUMNS: dict[Loss, str] = {"held-out": "held_out_loss", "training": "loss"}


@dataclass(frozen=True)
class SpeedUp:
    """One candidate's run against the baseline's run of the same seed.

    Attributes
    ----------
    seed
        Of both runs.
    baseline_loss, loss
        Final losses in nats per predicted token, smoothed.
    first
        Share of the steps saved when the loss first reaches the baseline's final loss, from −1 to
        1; negative if the baseline ends lower.
    lasting
        The same for the step from which it stays there.
    baseline_below, below
        The step at which the run's training loss falls below the given level; None if it does not,
        or without a level.
    """

    seed: int
    baseline_loss: float
    loss: float
    first: float
    lasting: float
    baseline_below: int | None = None
    below: int | None = None

    @property
    def difference(self) -> float:
        """The candidate's final loss minus the baseline's, in nats."""
        return self.loss - self.baseline_loss


@dataclass(frozen=True)
class StartSpeedUp:
    """An initialization against the baseline, over their common seeds.

    Attributes
    ----------
    start
        That of the candidate's runs, such as ``symmetric``.
    baseline
        That of the runs they are compared with.
    step, steps
        The step at which runs are compared, and the number of steps of the schedule.
    runs
        One for each seed.
    """

    start: str
    baseline: str
    step: int
    steps: int
    runs: tuple[SpeedUp, ...]

    def over_seeds(self, name: Field) -> Paired:
        """Mean, interval, p and smallest detectable effect of a field."""
        return paired([float(getattr(run, name)) for run in self.runs])

    @property
    def steps_later(self) -> Paired | None:
        """How many steps later than the baseline the candidate falls below the level.

        None if some run never does, since a mean would leave out the slowest.
        """
        steps = [(run.below, run.baseline_below) for run in self.runs]
        both = [own - other for own, other in steps if own is not None and other is not None]
        return paired(both) if len(both) == len(steps) else None


def speedups(
    runs: Sequence[Run],
    *,
    loss: Loss = "held-out",
    smoothing: float = SMOOTHING,
    level: float | None = None,
) -> list[StartSpeedUp]:
    """Every initialization among the runs against the first run's.

    Parameters
    ----------
    runs
        Runs that differ only in initialization, penalty and seed, all trained to the same
        step.
    loss
        Of held-out text, or of training.
    smoothing
        Window of the trailing mean, as a fraction of all steps.
    level
        Training loss in nats for `SpeedUp.below`, by `first_below`.

    Raises
    ------
    RunError
        Runs differ in more, end at different steps, or share no seed.
    """
    by_start = starts(runs, "speedup", penalties=True)
    baseline = next(cell for cell in by_start.values() if runs[0] in cell.runs)
    return [
        compare(baseline, cell, loss, smoothing, level)
        for cell in by_start.values()
        if cell is not baseline
    ]


def saved_share(
    steps: Float[Array, " looks"], losses: Float[Array, " looks"], target: float
) -> tuple[float, float]:
    """Share of the steps saved when a loss first reaches a target, and when it stays there.

    The last loss, at the last step of training, must not exceed the target.

    Examples
    --------
    >>> steps, losses = np.array([1.0, 2, 3, 4]), np.array([3.0, 1.9, 2.1, 1.8])
    >>> saved_share(steps, losses, target=2.0)
    (0.5, 0.0)
    """
    above = np.flatnonzero(losses > target)
    lasting = above[-1] + 1 if len(above) else 0
    total = steps[-1]
    first, stays = steps[(losses <= target).argmax()], steps[lasting]
    return float((total - first) / total), float((total - stays) / total)


def compare(
    baseline: Cell,
    candidate: Cell,
    loss: Loss = "held-out",
    smoothing: float = SMOOTHING,
    level: float | None = None,
) -> StartSpeedUp:
    """One cell against another, over their common seeds; errors as for `speedups`."""
    others = {run.recipe.get("seed"): run for run in baseline.runs}
    both = [
        (others[seed], run) for run in candidate.runs if (seed := run.recipe.get("seed")) in others
    ]
    if not both:
        raise RunError(
            f"speedup compares runs of one seed; {baseline.start} and {candidate.start} share none"
        )
    ends = {int(_smoothed(run, loss, smoothing)[0][-1]) for pair in both for run in pair}
    if len(ends) > 1:
        raise RunError(
            f"speedup compares runs at one step; {baseline.start} and {candidate.start} have their "
            f"last {loss} loss at the steps {', '.join(map(str, sorted(ends)))}: resume the "
            "shorter ones with wqk train --resume"
        )
    return StartSpeedUp(
        candidate.start,
        baseline.start,
        ends.pop(),
        int(candidate.shared.get("steps", 0)),
        tuple(_speed_up(*pair, loss, smoothing, level) for pair in both),
    )


def first_below(run: Run, level: float, steps: int = 100) -> int | None:
    """The step at which the trailing mean of the training loss is first below a level, if ever.

    Raises
    ------
    RunError
        The loss was not logged.
    """
    curve = run.metrics.select("step", "loss").drop_nulls()
    if curve.is_empty():
        raise RunError(f"{run.folder}: has no training loss yet")
    at, means = _trailing(curve, "loss", steps)
    below = np.flatnonzero((means < level) & (at >= steps))
    return int(at[below[0]]) if len(below) else None


def _speed_up(
    baseline: Run, candidate: Run, loss: Loss, smoothing: float, level: float | None
) -> SpeedUp:
    curves = [_smoothed(run, loss, smoothing) for run in (baseline, candidate)]
    reference, own = (float(losses[-1]) for _, losses in curves)
    sign, faster, slower_end = (1, 1, reference) if own <= reference else (-1, 0, own)
    first, lasting = (sign * share for share in saved_share(*curves[faster], slower_end))
    below = (None if level is None else first_below(run, level) for run in (baseline, candidate))
    return SpeedUp(int(candidate.recipe.get("seed", 0)), reference, own, first, lasting, *below)


def _smoothed(run: Run, loss: Loss, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Steps after the start, and means of the loss over the window that ends at each."""
    column = COLUMNS[loss]
    curve = run.metrics.select("step", column).drop_nulls().filter(pl.col("step") > 0)
    if curve.is_empty():
        raise RunError(f"{run.folder}: has no {loss} loss after the start; resume the run")
    return _trailing(curve, column, smoothing * run.recipe.get("steps", 0))


def _trailing(curve: pl.DataFrame, column: str, window: float) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and means over the steps of a window that ends at each."""
    steps, losses = curve["step"].to_numpy().astype(float), curve[column].to_numpy()
    begins = np.searchsorted(steps, steps - window, side="right")
    windows = (losses[min(begin, end) : end + 1] for end, begin in enumerate(begins))
    return steps, np.array([window.mean() for window in windows])
