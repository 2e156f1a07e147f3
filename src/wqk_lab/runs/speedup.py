"""The speed-up of Table 1: the share of steps that one initialization saves against another.

By the caption of Table 1, the speed-up is the share of steps left when the candidate reaches the
baseline's final loss. If the baseline's final loss is lower, the roles are swapped and the speed-up
is negative. A speed-up is always defined: the run with the lower final loss reaches the final loss
of the other run.

Losses are logged at a few steps and are noisy. The step for a loss is read from a smooth falling
curve through the losses (`wqk_lab.runs.descent`). A run compared with itself saves nothing, and
exchanging two runs changes the sign.

Runs are compared seed by seed: mean difference, interval, p, smallest detectable difference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

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
    """The comparison of one candidate's run with the baseline's run of the same seed.

    Losses are final losses, smoothed, in nats per predicted token. ``below`` is the step at which
    the training loss falls below a level; None if the loss stays above, or without a level.
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
    """The speed-ups of an initialization over the baseline, for their common seeds."""

    start: str  #: Initialization of the candidate's runs, such as ``symmetric``.
    baseline: str  #: Initialization of the baseline's runs.
    step: int  #: Step at which the runs are compared.
    steps: int  #: Number of steps of the schedule.
    runs: tuple[SpeedUp, ...]  #: One comparison for each seed.

    def over_seeds(self, name: Field) -> Paired:
        """Return mean, interval, p and smallest detectable effect of a field."""
        return paired([float(getattr(run, name)) for run in self.runs])

    @property
    def steps_later(self) -> Paired | None:
        """The number of steps by which the candidate falls below the level later than the baseline.

        None if a run stays above the level, since a mean would leave out the slowest run.
        """
        differences = []
        for run in self.runs:
            if run.below is None or run.baseline_below is None:
                return None
            differences.append(run.below - run.baseline_below)
        return paired(differences)


def speedups(
    runs: Sequence[Run],
    *,
    loss: Loss = "held-out",
    smoothing: float = SMOOTHING,
    level: float | None = None,
    on_skipped: Callable[[RunError], None] | None = None,
) -> list[StartSpeedUp]:
    """Compare every initialization among the runs with the first run's initialization.

    Parameters
    ----------
    runs
        Runs that differ only in initialization, penalty and seed, all trained to the same
        step.
    loss
        The loss of held-out text, or the training loss.
    smoothing
        Steps on either side over which a loss is smoothed, as a fraction of all steps.
    level
        Training loss in nats for `SpeedUp.below`, by `first_below`.
    on_skipped
        Called with the reason if an initialization cannot be compared; the initialization is left
        out. By default, an error is raised.

    Raises
    ------
    RunError
        Runs differ in further settings, end at different steps, or share no seed.
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
    """Return the share of the steps saved when the candidate reaches the baseline's final loss.

    The share lies from −1 to 1, and is negative if the candidate ends higher.

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
    """Compare one cell with another, over their common seeds; errors as for `speedups`."""
    baseline_runs = {run.recipe.get("seed"): run for run in baseline.runs}
    run_pairs = []
    for run in candidate.runs:
        if run.recipe.get("seed") in baseline_runs:
            run_pairs.append((baseline_runs[run.recipe.get("seed")], run))
    if not run_pairs:
        raise RunError(
            f"{candidate.start} and {baseline.start} are compared seed by seed, and have none in "
            "common"
        )
    curve_pairs = [(_logged(first, loss), _logged(second, loss)) for first, second in run_pairs]
    ends = set()
    for curve_pair in curve_pairs:
        ends |= {int(curve.steps[-1]) for curve in curve_pair}
    if len(ends) > 1:
        raise RunError(
            f"{candidate.start} and {baseline.start} are compared at the same step, and have their "
            f"last {loss} loss at the steps {', '.join(map(str, sorted(ends)))}: resume the "
            "shorter runs with wqk lab train --resume"
        )
    compared = []
    for (baseline_run, run), (baseline_curve, curve) in zip(run_pairs, curve_pairs, strict=True):
        window = smoothing * int(run.recipe.get("steps", 0))
        speedup = SpeedUp(
            seed=int(run.recipe.get("seed", 0)),
            baseline_loss=float(smoothed(*baseline_curve, window)[-1]),
            loss=float(smoothed(*curve, window)[-1]),
            saved=saved_share(descent(*baseline_curve, window), descent(*curve, window)),
            baseline_below=None if level is None else first_below(baseline_run, level),
            below=None if level is None else first_below(run, level),
        )
        compared.append(speedup)
    return StartSpeedUp(
        start=candidate.start,
        baseline=baseline.start,
        step=ends.pop(),
        steps=int(candidate.shared.get("steps", 0)),
        runs=tuple(compared),
    )


def first_below(run: Run, level: float, steps: int = 100) -> float | None:
    """Return the step at which the trailing mean of the training loss first falls to a level.

    The trailing mean is the mean of the last ``steps`` steps. Between two logged steps, the mean is
    interpolated by a straight line. None if the mean stays above the level.

    Raises
    ------
    RunError
        The loss was not logged.
    """
    logged_steps, losses = _logged(run, "training")
    begins = np.searchsorted(logged_steps, logged_steps - steps, side="right")
    means = np.empty(len(losses))
    for end, begin in enumerate(begins):
        means[end] = losses[min(begin, end) : end + 1].mean()
    is_full = logged_steps >= steps
    logged_steps, means = logged_steps[is_full], means[is_full]
    below = np.flatnonzero(means < level)
    if not len(below):
        return None
    first = int(below[0])
    if not first:
        return float(logged_steps[0])
    crossing = slice(first - 1, first + 1)
    return float(np.interp(-level, -means[crossing], logged_steps[crossing]))


class LossCurve(NamedTuple):
    """The logged steps after the start, and the losses at these steps, (K,) each."""

    steps: np.ndarray
    losses: np.ndarray


def _logged(run: Run, loss: Loss) -> LossCurve:
    """Return the logged losses of a run."""
    column = COLUMNS[loss]
    curve = run.metrics.select("step", column).drop_nulls().filter(pl.col("step") > 0)
    if curve.is_empty():
        raise RunError(f"{run.folder}: has no {loss} loss after the start; resume the run")
    return LossCurve(curve["step"].to_numpy().astype(float), curve[column].to_numpy())
