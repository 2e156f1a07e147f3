"""Remark S1.6: the update that W_qk gets through W_q and W_k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.theory.finding import Finding
from wqk.theory.measuring.rows import by_layer, rows_of, span
from wqk.theory.updates import update_symmetry

if TYPE_CHECKING:
    from wqk.theory.measuring.evidence import Evidence

# Cosines of what is proportional, and of what at least points the same way.
PROPORTIONAL, ALIKE = 0.99, 0.5

# A symmetry that is as good as 1.
SYMMETRIC = 0.99


def measure_updates(evidence: Evidence) -> list[Finding]:
    """Whether the update is proportional to Σ β K, and as symmetric."""
    rows = rows_of(evidence.gradients, update_symmetry)
    alignment, passed = by_layer(rows, "alignment"), by_layer(rows, "update_of_symmetric_part")
    return [
        Finding(
            "Remark S1.6, Equation S40: W_qk is updated in proportion to Σ_ij β_ij K_ij",
            "gradient descent on W_q and W_k, to first order in its rate",
            "cosine 1 of the update and the negative gradient",
            f"cosine {span(rows, 'alignment')}",
            "holds"
            if alignment.min() > PROPORTIONAL
            else "holds in part"
            if alignment.min() > ALIKE
            else "fails",
            rows,
        ),
        Finding(
            "Remark S1.6 with Theorem S1.14: a symmetric Σ β K makes a symmetric update",
            "W_q W_qᵀ = W_k W_kᵀ for every head; not asked for in the paper",
            "symmetry 1 of the update of symmetric β",
            f"{span(rows, 'update_of_symmetric_part')}, for random factors of this size "
            f"{span(rows, 'expected')}. As it is: Σ β K {span(rows, 'gradient')}, update "
            f"{span(rows, 'update')}, with W_k = W_q {span(rows, 'update_if_tied')}",
            "holds" if passed.min() > SYMMETRIC else "fails",
            rows,
        ),
    ]
