"""Proposition 2.1 and Remark S1.5 on a model's own attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqk.theory.finding import Finding, Verdict
from wqk.theory.measuring.rows import by_layer, span
from wqk.theory.scores import check_scores

if TYPE_CHECKING:
    from wqk.theory.measuring.evidence import Evidence
    from wqk.theory.measuring.rows import Row

# What may be rounding, of numbers of size 1 in float32.
ROUNDING = 1e-4

# The plain form orders as the probabilities do where at least so many pairs of keys agree.
SAME_ORDER = 0.999


def measure_scores(evidence: Evidence) -> list[Finding]:
    """Scores as bilinear forms, their order, their mixing, and the sum over heads."""
    model = evidence.subject.model
    rows = tuple(
        {"batch": index, **vars(check)}
        for index, batch in enumerate(evidence.batches)
        for check in check_scores(model, batch, evidence.layers)
        if check.kind == "self"
    )
    return [_bilinear(rows), _order(rows), _convex(rows), _heads(rows)]


def _bilinear(rows: tuple[Row, ...]) -> Finding:
    known = [row for row in rows if row["attention"] is not None]
    errors = [row["form"] for row in rows] + [row["attention"] for row in known]
    compared = f"probabilities differ from the model's by {span(known, 'attention', '.0e')}"
    return Finding(
        "Proposition 2.1, Equation 2: scores are a bilinear form of the inputs",
        "no norms of queries and keys; biases, positions and soft caps stand beside the form",
        "x_i W_qk x_jᵀ = q_i · k_j, α = softmax of it",
        f"relative difference {span(rows, 'form', '.0e')}; "
        + (compared if known else "terms are added to the scores that are not compared here"),
        "holds" if max(errors) < ROUNDING else "fails",
        rows,
    )


def _order(rows: tuple[Row, ...]) -> Finding:
    whole, plain = by_layer(rows, "order").max(), by_layer(rows, "order_plain").min()
    verdict: Verdict = "holds" if whole < ROUNDING and plain > SAME_ORDER else "holds in part"
    return Finding(
        "Proposition 2.1, Equation S15: attention orders tokens as the bilinear form does",
        "the form is the whole score: no biases, no positions",
        "α_ij < α_ij' ⇔ x_i W_qk x_jᵀ < x_i W_qk x_j'ᵀ",
        f"against the whole score, largest disorder {span(rows, 'order', '.0e')}; the form alone "
        f"orders {span(rows, 'order_plain', '.1%')} of the pairs of keys as attention does",
        verdict,
        rows,
    )


def _convex(rows: tuple[Row, ...]) -> Finding:
    mixed = [row for row in rows if row["mixing"] is not None]
    errors = [row["convexity"] for row in rows] + [row["mixing"] for row in mixed]
    return Finding(
        "Proposition 2.1, Equation S16: attention is a convex combination",
        "no sinks; of the values x_j W_v, not of the x_j",
        "Σ_j α_ij = 1, and the heads put out Σ_j α_ij x_j W_v",
        f"|Σ_j α_ij − 1| up to {max(row['convexity'] for row in rows):.0e}"
        + (f"; output differs by {span(mixed, 'mixing', '.0e')}" if mixed else ""),
        "holds" if max(errors) < ROUNDING else "fails",
        rows,
    )


def _heads(rows: tuple[Row, ...]) -> Finding:
    same = float(np.min(by_layer(rows, "order_layer"))) > SAME_ORDER
    exact = max(row["heads"] for row in rows) < ROUNDING
    return Finding(
        "Remark S1.5, Equations S20 and S21: heads add up to one form",
        "each head has a softmax of its own, which no sum of forms has",
        "Σ_h x_i W_h x_jᵀ = x_i W_qk x_jᵀ; the layer attends by W_qk",
        f"the sum holds to {max(row['heads'] for row in rows):.0e}; W_qk orders "
        f"{span(rows, 'order_layer', '.1%')} of the pairs of keys as the heads' mean attention",
        "holds" if exact and same else "holds in part" if exact else "fails",
        rows,
    )
