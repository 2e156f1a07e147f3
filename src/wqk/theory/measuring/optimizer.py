"""Theorem 2.3 through Remark S1.6: whether the step that is taken has the gradient's tails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.theory.finding import Finding
from wqk.theory.measuring.tails import over_batches
from wqk.theory.optimizer import steps

if TYPE_CHECKING:
    from wqk.forms import BilinearForm
    from wqk.theory.measuring.evidence import Evidence

KINDS = {
    "gradient": "gradient of W_qk",
    "descent": "gradient descent on W_q and W_k",
    "signs": "their signs, as Adam's first step",
    "centered": "signs, inputs centered",
}


def measure_optimizer(evidence: Evidence) -> list[Finding]:
    """Tails of the gradient beside those of the steps that optimizers make of it.

    Raises
    ------
    TheoryError
        A layer's score is no bilinear form.
    """
    numbers: list[dict[str, Any]] = []
    for layer, means in _means(evidence).items():
        made: dict[str, list[BilinearForm]] = {}
        for batch in evidence.gradients:
            for gradient in batch:
                plan = gradient.attention.plan
                if (plan.kind, plan.layer) == ("self", layer):
                    for kind, form in steps(gradient, means).items():
                        made.setdefault(kind, []).append(form)
        numbers += [
            {"kind": KINDS[kind], "layer": layer, **over_batches(forms)}
            for kind, forms in made.items()
        ]
    medians = {
        kind: float(np.median([r["log_variance_ratio"] for r in numbers if r["kind"] == kind]))
        for kind in KINDS.values()
    }
    by_kind = [[r["longer"] for r in numbers if r["kind"] == kind] for kind in KINDS.values()]
    alike = [one == other for one, other in zip(by_kind[0], by_kind[2], strict=True)]
    return [
        Finding(
            "Theorem 2.3 through Remark S1.6: what optimizers do to W_qk has the gradient's tails",
            "W_qk changes in proportion to Σ_ij β_ij K_ij (S40)",
            "the same side leads in the gradient and in the step",
            "median ln(Var‖column‖/Var‖row‖): "
            + ", ".join(f"{kind} {value:+.2f}" for kind, value in medians.items())
            + f"; the same side leads in gradient and signs in {sum(alike)} of {len(alike)} layers",
            "holds" if all(alike) else "holds in part" if any(alike) else "fails",
            tuple(numbers),
        )
    ]


def _means(evidence: Evidence) -> dict[int, np.ndarray]:
    """Mean input of each layer over all batches."""
    return {
        layer: np.mean([update.inputs.mean(axis=(0, 1)) for update in some], axis=0)
        for layer, some in evidence.updates.items()
    }
