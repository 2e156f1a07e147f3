"""Speed-up of Table 1: one initialization reaches another's final loss sooner.

By the table's caption, it is the share of the steps that remain when the candidate reaches the
baseline's final loss. If the baseline's final loss is lower, the roles are swapped and the speed-up
is negative. So it is always defined: the run that ends lower reaches the other's loss.

Losses are known at a few steps and are noisy. The step at which a loss is reached is that of a
smooth falling curve through them (`wqk_lab.runs.descent`), so that a run against itself saves
nothing, and exchanging two runs changes the sign.

Runs are compared seed by seed: mean difference, interval, p, smallest detectable difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from wqk.errors import RunError
from wqk_lab.runs.descent import Descent, descent, smoothed
from wqk_lab.runs.groups import RunCell, starts
from wqk_lab.runs.seeds import Paired, paired

if TYPE_CHECKING:
    from wqk.tables.run import Run

Loss = Literal["held-out", "training"]
Field = Literal["saved", "difference"]

# Steps on either side over which a loss is smoothed, as a fraction of all steps, by default.
SMOOTHING = 0.05

COLUMNS: dict[Loss, str] = {"held-out": "held_out_loss", "training": "loss"}


@dataclass(frozen=True)
class SpeedUp:
    """One candidate's run against the baseline's run of the same seed.

    Losses are the final ones, smoothed, in nats per predicted token; ``below`` is the step at which
    the training loss falls below the given level, None if it does not, or without a level.
    """

    seed: int
    baseline_loss: float
    loss: float
    #: Share of the steps saved when the loss reaches the baseline's final loss, from −1 to 1;
    #: negative if the baseline ends lower.
    saved: float
    baseline_below: float | None = None
    below: float | None = None

    @property
    def difference(self) -> float:
        """The candidate's final loss minus the baseline's, in nats."""
        return self.loss - self.baseline_loss


@dataclass(frozen=True)
class StartSpeedUp:
    """An initialization against the baseline, over their common seeds."""

    start: str  #: That of the candidate's runs, such as ``symmetric``.
    baseline: str  #: That of the runs they are compared with.
    step: int  #: At which the runs are compared.
    steps: int  #: Of the schedule.
    runs: tuple[SpeedUp, ...]  #: One for each seed.

    def over_seeds(self, name: Field) -> Paired:
        """Mean, interval, p and smallest detectable effect of a field."""
        return paired([float(getattr(run, name)) for run in self.runs])

    @property
    def steps_later(self) -> Paired | None:
        """Number of steps by which the candidate falls below the level later than the baseline.

        None if some run never does, since a mean would leave out the slowest.
        """
        steps = [(run.below, run.baseline_below) for run in self.runs]
        later = [
            candidate - baseline
            for candidate, baseline in steps
            if candidate is not None and baseline is not None
        ]
        return paired(later) if len(later) == len(steps) else None


def speedups(
    runs: Sequence[Run],
    *,
    loss: Loss = "held-out",
    smoothing: float = SMOOTHING,
    level: float | None = None,
    on_skipped: Callable[[RunError], None] | None = None,
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
        Steps on either side over which a loss is smoothed, as a fraction of all steps.
    level
        Training loss in nats for `SpeedUp.below`, by `first_below`.
    on_skipped
        Called with the reason why an initialization cannot be compared, which is then left out;
        by default that is an error.

    Raises
    ------
    RunError
        Runs differ in more, end at different steps, or share no seed.
    """
    by_start = starts(runs, "speedup", penalties=True)
    baseline = next(cell for cell in by_start.values() if runs[0] in cell.runs)
    compared = []
    for cell in by_start.values():
        if cell is baseline:
            continue
        try:
            compared.append(compare(baseline, cell, loss, smoothing, level))
        except RunError as error:
            if on_skipped is None:
                raise
            on_skipped(error)
    return compared


def saved_share(baseline: Descent, candidate: Descent) -> float:
    """Share of the steps saved when the candidate reaches the baseline's end, from −1 to 1.

    Examples
    --------
    >>> steps = np.array([1.0, 2, 3, 4])
    >>> slow = descent(steps, np.array([5.0, 4, 3, 2]))
    >>> fast = descent(steps, np.array([4.0, 2, 1, 0]))
    >>> saved_share(slow, fast), saved_share(fast, slow), saved_share(slow, slow)
    (0.5, -0.5, 0.0)
    """
    if candidate.end > baseline.end:
        return -saved_share(candidate, baseline)
    return (candidate.last - candidate.step_at(baseline.end)) / candidate.last


def compare(
    baseline: RunCell,
    candidate: RunCell,
    loss: Loss = "held-out",
    smoothing: float = SMOOTHING,
    level: float | None = None,
) -> StartSpeedUp:
    """One cell against another, over their common seeds; errors as for `speedups`."""
    baseline_runs = {run.recipe.get("seed"): run for run in baseline.runs}
    run_pairs = []
    for run in candidate.runs:
        seed = run.recipe.get("seed")
        if seed in baseline_runs:
            run_pairs.append((baseline_runs[seed], run))
    if not run_pairs:
        raise RunError(
            f"{candidate.start} and {baseline.start} are compared seed by seed, and have none in "
            "common"
        )
    curves = [[_logged(run, loss) for run in pair] for pair in run_pairs]
    ends = {int(steps[-1]) for pair in curves for steps, _ in pair}
    if len(ends) > 1:
        raise RunError(
            f"{candidate.start} and {baseline.start} are compared at the same step, and have their "
            f"last {loss} loss at the steps {', '.join(map(str, sorted(ends)))}: resume the "
            "shorter runs with wqk lab train --resume"
        )
    compared = []
    for pair, (baseline_curve, curve) in zip(run_pairs, curves, strict=True):
        window = smoothing * int(pair[1].recipe.get("steps", 0))
        before, after = (float(smoothed(*losses, window)[-1]) for losses in (baseline_curve, curve))
        saved = saved_share(*(descent(*losses, window) for losses in (baseline_curve, curve)))
        below = (None if level is None else first_below(run, level) for run in pair)
        seed = int(pair[1].recipe.get("seed", 0))
        compared.append(SpeedUp(seed, before, after, saved, *below))
    steps = int(candidate.shared.get("steps", 0))
    return StartSpeedUp(candidate.start, baseline.start, ends.pop(), steps, tuple(compared))


def first_below(run: Run, level: float, steps: int = 100) -> float | None:
    """Return the first step at which the trailing mean of the training loss is at most a level.

    Between two logged steps, the mean is taken to fall in a straight line.

    Raises
    ------
    RunError
        The loss was not logged.
    """
    at, losses = _logged(run, "training")
    begins = np.searchsorted(at, at - steps, side="right")
    windows = (losses[min(begin, end) : end + 1] for end, begin in enumerate(begins))
    means = np.array([window.mean() for window in windows])
    at, means = at[at >= steps], means[at >= steps]
    below = np.flatnonzero(means < level)
    if not len(below):
        return None
    first = int(below[0])
    if not first:
        return float(at[0])
    above = slice(first - 1, first + 1)
    return float(np.interp(-level, -means[above], at[above]))


def _logged(run: Run, loss: Loss) -> tuple[np.ndarray, np.ndarray]:
    """Return steps after the start, and their losses."""
    column = COLUMNS[loss]
    curve = run.metrics.select("step", column).drop_nulls().filter(pl.col("step") > 0)
    if curve.is_empty():
        raise RunError(f"{run.folder}: has no {loss} loss after the start; resume the run")
    return curve["step"].to_numpy().astype(float), curve[column].to_numpy()
