"""Theorems 2.3 and S1.12 and Corollary S1.13 on the updates and the weights of a model.

Lemma S1.11 and Equation S97 are what the theorem rests on; the text's order and the embeddings'
covariance are what it ascribes the effect to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.theory.finding import Finding, Verdict, not_tested
from wqk.theory.tails import exceedance, tails
from wqk.theory.variants import in_isolation, rearranged

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wqk.forms import BilinearForm
    from wqk.theory.measuring.evidence import Evidence

CAUSES = "Theorem S1.12: order of the text and anisotropic embeddings make columns dominate"

# Half a 95 % interval in standard errors, by the number of batches less 1 (Student's t).
T_QUANTILES = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36}
T_BEYOND = 2.3

# Where less than this part of an effect is left, what was changed accounts for it.
REMOVED = 0.5

# The lemma's two laws of mean 0, by value and probability: the first has the larger variance, 1.
WIDE = {-1.0: 0.5, 1.0: 0.5}
NARROW = {-5.0: 0.01, 0.0: 0.98, 5.0: 0.01}


def measure_tails(evidence: Evidence) -> list[Finding]:
    """Columns against rows, in updates and weights, and what makes them differ."""
    updates = {layer: [update.form for update in some] for layer, some in evidence.updates.items()}
    causal = evidence.subject.objective == "causal"
    return [
        _totals(updates),
        _lemma(updates),
        _in_updates(updates, causal),
        _in_weights(evidence, causal),
        _causes(evidence, updates),
    ]


def _totals(updates: dict[int, list[BilinearForm]]) -> Finding:
    """Equation S97 in total: there is nothing to win."""
    numbers = []
    for layer, forms in updates.items():
        columns, rows = (
            np.concatenate([getattr(form, side) for form in forms]).astype(np.float64)
            for side in ("column_norms", "row_norms")
        )
        numbers.append(
            {
                "layer": layer,
                "squares": float((columns**2).sum() / (rows**2).sum()),
                "means": float(columns.mean() / rows.mean()),
            }
        )
    worst = max(abs(row["squares"] - 1) for row in numbers)
    ratios = [row["means"] for row in numbers]
    return Finding(
        "Theorem S1.12, Equations S97-S101: columns grow more than rows in total",
        "none",
        "Σ‖column‖² > Σ‖row‖²",
        f"equal to {worst:.0e}, both are ‖ΔM‖²; mean norms, columns over rows: {min(ratios):.3f} "
        f"to {max(ratios):.3f}. A smaller mean goes with a larger variance, so that S101 follows "
        "from S97 and contradicts S102",
        "fails",
        tuple(numbers),
    )


def _lemma(updates: dict[int, list[BilinearForm]]) -> Finding:
    """Whether a larger variance means a longer tail: by a counterexample, and for real norms."""
    every = [tails(form) for forms in updates.values() for form in forms]
    agree = np.mean([(one.log_variance_ratio > 0) == (one.reach > 1) for one in every])
    wide, narrow = exceedance(WIDE, 2.0), exceedance(NARROW, 2.0)
    return Finding(
        "Lemma S1.11: the law with the larger variance exceeds high values more often",
        "equal means; needs laws of one shape, too",
        "Pr[X_a > z] ≥ Pr[X_b > z] beyond √(σ_a σ_b)",
        f"variances 1 and 0.5: Pr[X > 2] = {wide:g} and {narrow:g}; among these updates the side "
        f"with the larger variance holds the longest norm in {agree:.0%}",
        "fails",
        tuple({"log_variance_ratio": one.log_variance_ratio, "reach": one.reach} for one in every),
    )


def _in_updates(updates: dict[int, list[BilinearForm]], causal: bool) -> Finding:
    numbers = [{"layer": layer, **over_batches(forms)} for layer, forms in updates.items()]
    if causal:
        return Finding(
            "Theorems 2.3 and S1.12: the update's columns have the longer tail",
            "S96, S97 and Lemma S1.11, none of which holds as stated",
            "Var‖column‖ > Var‖row‖ in every layer, directionality < 0",
            _seen(numbers),
            _unanimous(numbers, "columns"),
            tuple(numbers),
        )
    return Finding(
        "Corollary S1.13: the update's columns and rows vary alike",
        "μ_c = μ_p for every token",
        "Var‖column‖ = Var‖row‖ in every layer",
        _seen(numbers),
        _unanimous(numbers, "undecided"),
        tuple(numbers),
    )


def _in_weights(evidence: Evidence, causal: bool) -> Finding:
    numbers = []
    for layer, form in evidence.forms.items():
        one = tails(form)
        # Twice the deviation of ln(Var/Var) where columns and rows are drawn from one normal law.
        by_chance = 4 / np.sqrt(form.shape[0] - 1)
        ratio = one.log_variance_ratio
        longer = _longer(ratio, by_chance)
        numbers.append(
            {"layer": layer, **one._asdict(), "log_variance_ratio": ratio, "longer": longer}
        )
    if causal:
        statement = "Theorems 2.3 and S1.12: the columns of W_qk have the longer tail"
        prediction = "Var‖column‖ > Var‖row‖ in every layer, directionality < 0"
    else:
        statement = "Corollary S1.13: the columns and rows of W_qk vary alike"
        prediction = "Var‖column‖ = Var‖row‖ in every layer"
    return Finding(
        statement,
        "the weights are the sum of such updates from an even start",
        prediction,
        _seen(numbers),
        _unanimous(numbers, "columns" if causal else "undecided"),
        tuple(numbers),
    )


def _causes(evidence: Evidence, updates: dict[int, list[BilinearForm]]) -> Finding:
    """The effect again on other text, and with other inputs or β."""
    numbers = list(_changed(evidence))
    effects = {
        change: float(np.median([row["log_variance_ratio"] for row in rows]))
        for change, rows in _grouped(numbers).items()
    }
    seen = "median ln(Var‖column‖/Var‖row‖): " + ", ".join(
        f"{change} {effect:+.2f}" for change, effect in effects.items()
    )
    whole = effects["as it is"]
    if whole <= 0 or not _count(_grouped(numbers)["as it is"], "columns"):
        finding = not_tested(CAUSES, f"no column dominance in these updates to explain; {seen}")
        return Finding(**{**vars(finding), "numbers": tuple(numbers)})
    gone = [effects[change] < REMOVED * whole for change in ("shuffled", "isotropic")]
    return Finding(
        CAUSES,
        "the same model, β and inputs, with one thing changed at a time",
        "no dominance on shuffled text, none with isotropic inputs",
        seen,
        "holds" if all(gone) else "holds in part" if any(gone) else "fails",
        tuple(numbers),
    )


def _changed(evidence: Evidence) -> Iterator[dict[str, Any]]:
    """One row for each change and layer."""
    for layer, some in evidence.updates.items():
        for change, forms in in_isolation(some, evidence.subject.seed).items():
            yield {"change": change, "layer": layer, **over_batches(forms)}
    for change, subject in rearranged(evidence.subject).items():
        if subject is not evidence.subject:
            for layer, some in evidence.on(subject).updates.items():
                forms = [update.form for update in some]
                yield {"change": change, "layer": layer, **over_batches(forms)}


def over_batches(forms: Sequence[BilinearForm]) -> dict[str, Any]:
    """Means over batches, and which side's norms vary more beyond chance."""
    every = [tails(form) for form in forms]
    names = ("log_variance_ratio", "reach", "beyond", "directionality", "directionality_excess")
    ratios = np.array([one.log_variance_ratio for one in every])
    error = np.inf
    if len(ratios) > 1:
        quantile = T_QUANTILES.get(len(ratios) - 1, T_BEYOND)
        error = quantile * ratios.std(ddof=1) / np.sqrt(len(ratios))
    return {
        **{name: float(np.mean([getattr(one, name) for one in every])) for name in names},
        "log_variance_ratio_error": float(error),
        "longer": _longer(float(ratios.mean()), float(error)),
    }


def _longer(ratio: float, error: float) -> str:
    """Which side's norms vary more, beyond an error of ln(Var‖column‖/Var‖row‖)."""
    return "undecided" if abs(ratio) <= error else "columns" if ratio > 0 else "rows"


def _seen(numbers: Sequence[dict[str, Any]]) -> str:
    return (
        f"ln(Var‖column‖/Var‖row‖) {_span(numbers, 'log_variance_ratio')} over layers, beyond "
        f"chance for columns in {_count(numbers, 'columns')}, for rows in "
        f"{_count(numbers, 'rows')}, undecided in {_count(numbers, 'undecided')}; directionality "
        f"(excess) {_span(numbers, 'directionality_excess')}"
    )


def _grouped(numbers: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in numbers:
        groups.setdefault(row["change"], []).append(row)
    return groups


def _unanimous(numbers: Sequence[dict[str, Any]], wanted: str) -> Verdict:
    count = _count(numbers, wanted)
    return "holds" if count == len(numbers) else "holds in part" if count else "fails"


def _count(numbers: Sequence[dict[str, Any]], longer: str) -> int:
    return sum(row["longer"] == longer for row in numbers)


def _span(numbers: Sequence[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in numbers]
    return f"{min(values):+.2f} to {max(values):+.2f}"
