"""Theorems 2.4 and S1.14 and Remark S1.15 on the gradients of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqk.theory.finding import Finding, Verdict, not_tested
from wqk.theory.measuring.rows import by_layer, rows_of, span
from wqk.theory.pairing import common_update, masking_sweep, pairing

if TYPE_CHECKING:
    from wqk.theory.measuring.evidence import Evidence
    from wqk.theory.measuring.rows import Row

# A correlation that deserves the word, and one that is none.
STRONG, NONE = 0.5, 0.1

# A symmetry that no likeness of tokens brings about by chance.
SYMMETRIC = 0.1

# Pairs are of one size where the ratio of sizes is that of counts, within this factor.
OF_ONE_SIZE = 1.25

# Shares of masked tokens that are compared; 0.2 is where p/(1−p) is the remark's 25 %.
SHARES = (0.05, 0.15, 0.2, 0.3, 0.5)


def measure_pairing(evidence: Evidence) -> list[Finding]:
    """β_ij beside β_ji, the symmetry of the update and where it is from, and the share of pairs."""
    rows = rows_of(evidence.gradients, pairing)
    causal = evidence.subject.objective == "causal"
    return [
        _coefficients(rows, causal),
        _symmetry(rows, causal),
        _in_common(evidence, causal),
        _shares(evidence),
    ]


def _coefficients(rows: tuple[Row, ...], causal: bool) -> Finding:
    statement = "Theorem S1.14, assumption: β_ij and β_ji have one sign and about one size"
    if causal:
        return Finding(
            statement,
            "no causal mask; here is one, as a control",
            "β_ij β_ji = 0 for every pair",
            f"2 Σ β_ij β_ji / Σ (β_ij² + β_ji²) {span(rows, 'pair_symmetry', '.2g')}",
            "holds" if not by_layer(rows, "pair_symmetry").any() else "fails",
            rows,
        )
    correlation = np.abs(by_layer(rows, "correlation"))
    verdict: Verdict = (
        "holds"
        if correlation.min() > STRONG
        else "fails"
        if correlation.max() < NONE
        else "holds in part"
    )
    return Finding(
        statement,
        "predicting i from j is like predicting j from i",
        "correlation near 1, one sign in nearly all pairs",
        f"correlation {span(rows, 'correlation')}; one sign in "
        f"{span(rows, 'agreement', '.1%')} of the pairs, where chance gives 50 %",
        verdict,
        rows,
    )


def _symmetry(rows: tuple[Row, ...], causal: bool) -> Finding:
    symmetry, pairs, likeness = (
        by_layer(rows, name) for name in ("symmetry", "from_pairs", "from_likeness")
    )
    symmetric = symmetry.min() > SYMMETRIC
    verdict: Verdict = (
        "holds"
        if symmetric and (pairs > np.abs(likeness)).all()
        else "holds in part"
        if symmetry.max() > SYMMETRIC
        else "fails"
    )
    return Finding(
        "Theorem 2.4: the update is symmetric, made so by its pairs",
        "a causal mask, as a control" if causal else "β_ij ≈ β_ji",
        "no prediction" if causal else "symmetry well above 0, from pairs",
        f"symmetry of Σ β K {span(rows, 'symmetry')}: from pairs {span(rows, 'from_pairs')}, from "
        f"tokens with themselves {span(rows, 'from_diagonal')}, from tokens that are alike "
        f"{span(rows, 'from_likeness')}",
        "not tested" if causal else verdict,
        rows,
    )


def _in_common(evidence: Evidence, causal: bool) -> Finding:
    """The same of what adds up over batches."""
    statement = "Theorem 2.4 on average: what the updates have in common is symmetric"
    updates = {layer: [u.form for u in some] for layer, some in evidence.updates.items()}
    if min(len(forms) for forms in updates.values()) < 3:
        return not_tested(statement, "less than three batches")
    rows = tuple({"layer": layer, **vars(common_update(u))} for layer, u in updates.items())
    shares = f"{span(rows, 'share', '.0%')} of a batch's update is common to all"
    if not any(np.isfinite(row["common"]) for row in rows):
        return not_tested(statement, f"{shares}, no more than by chance; take more batches")
    common = by_layer(rows, "common")
    known = np.isfinite(common).sum()
    verdict: Verdict = (
        "holds"
        if (common > SYMMETRIC).all()
        else "holds in part"
        if np.nanmax(common) > SYMMETRIC
        else "fails"
    )
    return Finding(
        statement,
        f"{shares}; beyond chance in {known} of {len(common)} layers",
        "no prediction" if causal else "symmetry well above 0",
        f"symmetry {span(rows, 'common')} of what batches have in common, {span(rows, 'together')} "
        f"of their sum, {span(rows, 'single')} of one",
        "not tested" if causal else verdict,
        rows,
    )


def _shares(evidence: Evidence) -> Finding:
    statement = "Remark S1.15: p/(1−p) of the updates are symmetric, about 25 %"
    if evidence.subject.objective == "causal":
        return not_tested(statement, "a causal model: no tokens are masked")
    rows = tuple(masking_sweep(evidence.subject, SHARES, evidence.layers))
    parts, factors = [], []
    for share in SHARES:
        some = [row for row in rows if row["mask_share"] == share]
        count, size = (
            np.median([row[name] for row in some]) for name in ("count_ratio", "size_ratio")
        )
        parts.append(f"p = {share:.0%}: {count:.0%} of count, {size:.0%} of size")
        factors.append(max(size / count, count / size))
    return Finding(
        statement,
        "a pair of predicted tokens is symmetric, any other is not; all are of one size",
        "pairs of which both are predicted, over those of which one is: 25 % at p = 20 %",
        f"{'; '.join(parts)}. Symmetry of such pairs alone {span(rows, 'symmetry_of_both')}, their "
        f"inputs' cosine {span(rows, 'likeness_of_both')}; without them the update has "
        f"{span(rows, 'symmetry_without_both')}",
        "holds" if max(factors) < OF_ONE_SIZE else "holds in part",
        rows,
    )
