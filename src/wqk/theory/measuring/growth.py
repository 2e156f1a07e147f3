"""Propositions S1.7 and S1.8 and Corollary S1.9 on the embeddings and gradients of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.theory.finding import Finding, Verdict
from wqk.theory.growth import contributions, share_above, simulate_growth, spread_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk.theory.measuring.evidence import Evidence
    from wqk.theory.variants import Update

# A mean with less than this part of the mean square counts as none.
CENTERED = 0.05

# An isotropic covariance, estimated, spreads over more than this part of the dimensions.
ISOTROPIC = 0.8

# Columns and rows are on a par where one is the larger in so many of all pairs, give or take.
PAR = 0.02


def measure_growth(evidence: Evidence) -> list[Finding]:
    """What tokens add to rows and columns; whether embeddings are as the propositions assume."""
    updates = evidence.updates
    return [
        _two_groupings(updates),
        _simulated(evidence),
        _embeddings(evidence),
        _as_context_and_prediction(updates),
    ]


def _two_groupings(updates: dict[int, list[Update]]) -> Finding:
    """That the update is the sum over context tokens and the sum over predicted ones."""
    numbers = []
    for layer, some in updates.items():
        update = some[0]
        inputs = update.inputs.astype(np.float64)
        beta = update.beta.astype(np.float64)
        by_context = np.einsum("bij,bim,bjk->mk", beta, inputs, inputs, optimize=True)
        columns = contributions(inputs, beta).context_columns.sum()
        rows = contributions(inputs, beta).context_rows.sum()
        form = update.form.dense()
        size = np.abs(by_context).max()
        numbers.append(
            {
                "layer": layer,
                "difference": float(np.abs(form - by_context).max() / size),
                "columns_over_rows": float(columns / rows),
            }
        )
    worst = max(row["difference"] for row in numbers)
    return Finding(
        "Proposition S1.7: an update is a sum over context tokens, and one over predicted tokens",
        "none",
        "both sums are the update; each term adds as much to columns as to rows in total",
        f"largest relative difference {worst:.0e}; columns over rows in total "
        f"{np.mean([row['columns_over_rows'] for row in numbers]):.6f}",
        "holds" if worst < 1e-4 else "fails",
        tuple(numbers),
    )


def _simulated(evidence: Evidence) -> Finding:
    """Equation S62 with the variances of the model's own embeddings."""
    table = _embedding_table(evidence)
    covariance = np.cov(table, rowvar=False)
    covariance += 1e-9 * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    growth = simulate_growth(covariance, trials=2000, seed=evidence.subject.seed)
    inside = float(((growth.low <= growth.expected) & (growth.expected <= growth.high)).mean())
    verdict: Verdict = "holds" if growth.agrees else "fails"
    return Finding(
        "Proposition S1.8: a context token makes columns grow by Tr(Σ)/(d Σ_mm) more than row m",
        "centered, independent, isotropic context tokens: drawn so, Σ from the embeddings",
        "E‖column‖² / E‖row m‖² is that",
        f"expected {growth.expected.min():.2f} to {growth.expected.max():.2f}; in the 95 % "
        f"interval for {inside:.0%} of the rows",
        verdict,
        tuple(
            {"row": m, **dict(zip(growth._fields, map(float, values), strict=True))}
            for m, values in enumerate(zip(*growth, strict=True))
        ),
    )


def _embeddings(evidence: Evidence) -> Finding:
    """Whether embeddings and layers' inputs are centered and anisotropic, on either side."""
    table = _embedding_table(evidence)
    ids = np.asarray(evidence.subject.blocks).ravel()
    used = np.bincount(ids, minlength=len(table)).astype(float)
    numbers = [
        {"vectors": "embeddings, each once", **spread_of(table)._asdict()},
        {"vectors": "embeddings, as in the text", **spread_of(table, used)._asdict()},
    ]
    for layer, some in evidence.updates.items():
        inputs = np.concatenate([u.inputs.reshape(-1, u.inputs.shape[-1]) for u in some])
        numbers.append({"vectors": f"inputs of layer {layer}", **spread_of(inputs)._asdict()})
    centered = [row["mean_share"] < CENTERED for row in numbers]
    anisotropic = [row["dimensions"] < ISOTROPIC for row in numbers]
    return Finding(
        "Proposition S1.8: embeddings are centered, predicted ones anisotropic, context ones not",
        "tokens on both sides have the same embeddings, so Σ = Γ but for how often they are used",
        "mean 0; Σ ≠ σ²I and Γ = σ²I",
        f"the mean's share of the mean square: {_range(numbers, 'mean_share')}; dimensions in use: "
        f"{_range(numbers, 'dimensions')} of d, on either side; "
        f"{_range(numbers, 'below')} of the coordinates vary less than average",
        # The two covariances cannot be unlike where both sides are the same tokens.
        "holds in part" if all(centered) or all(anisotropic) else "fails",
        tuple(numbers),
    )


def _as_context_and_prediction(updates: dict[int, list[Update]]) -> Finding:
    """Whether columns beat rows as context, and rows beat columns as prediction."""
    numbers: list[dict[str, Any]] = []
    for layer, some in updates.items():
        means = _mean_contributions(some)
        numbers.append(
            {
                "layer": layer,
                "as_context": share_above(means[0], means[1]),
                "as_prediction": share_above(means[2], means[3]),
            }
        )
    right = [
        (row["as_context"] > 0.5 + PAR) + (row["as_prediction"] < 0.5 - PAR) for row in numbers
    ]
    verdict: Verdict = (
        "holds" if min(right) == 2 else "fails" if max(right) == 0 else "holds in part"
    )
    return Finding(
        "Proposition S1.8, Corollary S1.9: columns grow more as context, rows as prediction",
        "as above; here the model's own inputs and exact β",
        "a column grows more than a row in most pairs as context, in few as prediction",
        f"in {_range(numbers, 'as_context')} of the pairs as context, "
        f"{_range(numbers, 'as_prediction')} as prediction",
        verdict,
        tuple(numbers),
    )


def _mean_contributions(updates: Sequence[Update]) -> list[np.ndarray]:
    """Squared norms that a token adds on average, (D,) each, in the order of `Contributions`."""
    added = [contributions(update.inputs, update.beta) for update in updates]
    width = updates[0].inputs.shape[-1]
    return [
        np.mean([one[field].reshape(-1, width).mean(axis=0) for one in added], axis=0)
        for field in range(4)
    ]


def _embedding_table(evidence: Evidence) -> np.ndarray:
    weight = evidence.subject.model.get_input_embeddings().weight
    return np.asarray(weight.detach().cpu().double().numpy())


def _range(numbers: Sequence[dict[str, Any]], name: str) -> str:
    """The smallest and the largest of a number, as shares."""
    values = [row[name] for row in numbers]
    return f"{min(values):.0%} to {max(values):.0%}"
