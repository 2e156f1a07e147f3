"""Theorem 2.3 and Corollary S1.13 along a training run: what the optimizer's steps added up to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from wqk.runs.run import SETTINGS, open_run
from wqk.theory.finding import Finding, Verdict, not_tested
from wqk.theory.trajectory import follow


def measure_run(ref: str, objective: str) -> list[Finding]:
    """How often columns led in what changed between the saves of a run; nothing if it is none.

    Raises
    ------
    CheckpointError
        A checkpoint cannot be read.
    """
    if not (Path(ref) / SETTINGS).is_file():
        return []
    statement = "Theorem 2.3, along training: columns lead in what changes from save to save"
    numbers: list[dict[str, Any]] = [
        {
            "step": moment.step,
            "layer": moment.layer,
            "log_variance_ratio": moment.change.log_variance_ratio,
            "reach": moment.change.reach,
            "directionality_excess": moment.change.directionality_excess,
            "weights_directionality_excess": moment.weights.directionality_excess,
        }
        for moment in follow(open_run(ref))
        if moment.change is not None and moment.change.reach > 0  # not where nothing has changed
    ]
    if not numbers:
        return [not_tested(statement, "nothing has changed between two saved checkpoints")]
    lead = np.array([row["log_variance_ratio"] > 0 for row in numbers])
    excess = [row["directionality_excess"] for row in numbers]
    expected = 1.0 if objective == "causal" else 0.5
    share = float(lead.mean())
    verdict: Verdict = (
        "holds" if abs(share - expected) < 0.1 else "fails" if share < 0.5 else "holds in part"
    )
    return [
        Finding(
            statement,
            f"{len({row['step'] for row in numbers})} changes between saves, with the optimizer's "
            "own scaling of the gradients",
            f"Var‖column‖ > Var‖row‖ in {'all' if expected == 1 else 'half'} of the changes",
            f"in {share:.0%} of them (by layer); directionality (excess) of the changes: median "
            f"{np.median(excess):+.2f}",
            verdict,
            tuple(numbers),
        )
    ]
