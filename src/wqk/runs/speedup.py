"""How much sooner one start reaches what another ends at: Table 1's speed-up, with its spread.

The caption's definition: the step at which the candidate first reaches the baseline's final loss,
subtracted from all steps and divided by them; 0 where it never does. A single training loss is
noisy, and a noisy curve touches a level before it stays below. So the loss is smoothed, and beside
the first step below stands the one from which on the loss stays there.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from wqk.errors import RunError
from wqk.runs.groups import starts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk._typing import Array, Float
    from wqk.runs.groups import Cell
    from wqk.runs.run import Run

Loss = Literal["held-out", "training"]
COLUMNS: dict[Loss, str] = {"held-out": "held_out_loss", "training": "loss"}


@dataclass(frozen=True)
class SpeedUp:
    """One candidate's run against the baseline's run of the same seed.

    Attributes
    ----------
    seed
        Of both runs.
    baseline_loss, loss
        Where the two end, in nats for each predicted token, smoothed.
    first
        Share of the steps saved until the loss first reaches the baseline's end, from 0 to 1.
    lasting
        The same until it stays there.
    """

    seed: int
    baseline_loss: float
    loss: float
    first: float
    lasting: float


@dataclass(frozen=True)
class StartSpeedUp:
    """A start against the baseline, over the seeds that both have.

    Attributes
    ----------
    start
        What the candidate's runs have in common, such as ``symmetric``.
    baseline
        The same of the runs it is compared with.
    runs
        One for each seed.
    """

    start: str
    baseline: str
    runs: tuple[SpeedUp, ...]

    def spread(self, name: str) -> tuple[float, float | None]:
        """Mean and standard deviation over seeds of a field; no deviation of a single seed."""
        values = [float(getattr(run, name)) for run in self.runs]
        return fmean(values), stdev(values) if len(values) > 1 else None


def speedups(
    runs: Sequence[Run], *, loss: Loss = "held-out", smoothing: float = 0.05
) -> list[StartSpeedUp]:
    """Every start among the runs against the start of the first of them.

    Parameters
    ----------
    runs
        Finished runs that differ in their start, their penalty and their seed alone.
    loss
        Of held-out text, or of training.
    smoothing
        Width of the trailing mean, as a share of all steps.

    Raises
    ------
    RunError
        Runs differ in more, are not finished, or no seed is on both sides.
    """
    by_start = starts(runs, "speedup", penalties=True)
    baseline = next(cell for cell in by_start.values() if runs[0] in cell.runs)
    return [
        compare(baseline, cell, loss, smoothing)
        for cell in by_start.values()
        if cell is not baseline
    ]


def saved_share(
    steps: Float[Array, " looks"], losses: Float[Array, " looks"], target: float
) -> tuple[float, float]:
    """Share of the steps saved until a loss first reaches a target, and until it stays there.

    Both are 0 where it never does. The steps end with the last one of training.

    Examples
    --------
    >>> steps, losses = np.array([1.0, 2, 3, 4]), np.array([3.0, 1.9, 2.1, 1.8])
    >>> saved_share(steps, losses, target=2.0)
    (0.5, 0.0)
    """
    reached = losses <= target
    if not reached.any():
        return 0.0, 0.0
    above = np.flatnonzero(~reached)
    lasting = above[-1] + 1 if len(above) else 0
    total = steps[-1]
    stays = steps[lasting] if lasting < len(steps) else total
    return float((total - steps[reached.argmax()]) / total), float((total - stays) / total)


def compare(
    baseline: Cell, candidate: Cell, loss: Loss = "held-out", smoothing: float = 0.05
) -> StartSpeedUp:
    """One cell against another, over the seeds that both have; errors as for `speedups`."""
    others = {run.recipe.get("seed"): run for run in baseline.runs}
    both = [run for run in candidate.runs if run.recipe.get("seed") in others]
    if not both:
        raise RunError(
            f"speedup compares runs of one seed; {baseline.start} and {candidate.start} share none"
        )
    pairs = tuple(_speed_up(others[run.recipe.get("seed")], run, loss, smoothing) for run in both)
    return StartSpeedUp(candidate.start, baseline.start, pairs)


def _speed_up(baseline: Run, candidate: Run, loss: Loss, smoothing: float) -> SpeedUp:
    _, reference = _smoothed(baseline, loss, smoothing)
    steps, losses = _smoothed(candidate, loss, smoothing)
    first, lasting = saved_share(steps, losses, float(reference[-1]))
    seed = int(candidate.recipe.get("seed", 0))
    return SpeedUp(seed, float(reference[-1]), float(losses[-1]), first, lasting)


def _smoothed(run: Run, loss: Loss, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """Steps after the start, and means of the loss over the window that ends at each."""
    column, total = COLUMNS[loss], run.recipe.get("steps")
    curve = run.metrics.select("step", column).drop_nulls().filter(pl.col("step") > 0)
    if curve.is_empty() or curve["step"][-1] != total:
        raise RunError(
            f"{run.folder}: a speed-up needs the {loss} loss up to the last step ({total}); "
            "resume the run with wqk train --resume"
        )
    steps, losses = curve["step"].to_numpy().astype(float), curve[column].to_numpy()
    begins = np.searchsorted(steps, steps - smoothing * total, side="right")
    windows = (losses[min(begin, end) : end + 1] for end, begin in enumerate(begins))
    return steps, np.array([window.mean() for window in windows])
