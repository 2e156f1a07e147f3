"""Lemma S1.16 and Propositions S1.17 and S1.18 on a model's own forms and on random ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.forms.scores import directionality, symmetry
from wqk.theory.bounds import shares_of_parts, simulate_scores
from wqk.theory.finding import Finding, Verdict

if TYPE_CHECKING:
    from wqk.theory.measuring.evidence import Evidence

# Standard errors by which a mean of simulations may miss what it should be.
STANDARD_ERRORS = 3.0

# Random matrices that are scored.
TRIALS = 200


def measure_bounds(evidence: Evidence) -> list[Finding]:
    """The scores' bounds on the model's forms; their random-matrix limits at its width and rank."""
    return [_parts(evidence), *_random(evidence)]


def _parts(evidence: Evidence) -> Finding:
    numbers = []
    for layer, form in evidence.forms.items():
        symmetric, skew = shares_of_parts(form)
        numbers.append(
            {
                "layer": layer,
                "parts": symmetric + skew,
                "symmetry": float(symmetry(form)),
                "directionality": float(directionality(form)),
            }
        )
    worst = max(abs(row["parts"] - 1) for row in numbers)
    highest = max(row["symmetry"] for row in numbers)
    bounded = all(-1 <= row[name] <= 1 for row in numbers for name in row if "ity" in name)
    return Finding(
        "Lemma S1.16, Proposition S1.17: parts are orthogonal, scores lie in [−1, 1]",
        "none; Equation S127 would keep s below 0.5",
        "‖M_s‖² + ‖M_n‖² = ‖M‖²",
        f"to {worst:.0e} in every layer; largest s {highest:.2f}"
        + (", beyond S127" if highest > 0.5 else ""),
        "holds" if bounded and worst < 1e-4 else "fails",
        tuple(numbers),
    )


def _random(evidence: Evidence) -> list[Finding]:
    form = next(iter(evidence.forms.values()))
    width, rank = form.shape[0], min(form.rank, form.shape[0])
    limits = simulate_scores(width, rank, trials=TRIALS, seed=evidence.subject.seed)
    numbers = ({"width": width, "rank": rank, **limits._asdict()},)

    def near(value: float, expected: float, error: float) -> bool:
        return abs(value - expected) < STANDARD_ERRORS * error

    as_printed = near(limits.symmetry, 8 / width, limits.symmetry_error)
    as_derived = near(limits.symmetry, 1 / width, limits.symmetry_error)
    verdict: Verdict = "holds" if as_printed else "holds in part" if as_derived else "fails"
    drawn = f"{TRIALS} products of normal factors, d = {width}, rank {rank}"
    return [
        Finding(
            "Proposition S1.17(3): the symmetry of a random matrix",
            drawn,
            f"tends to 0, as 8/n = {8 / width:.4f}",
            f"{limits.symmetry:.4f} ± {limits.symmetry_error:.4f}: 1/n = {1 / width:.4f}; "
            f"deviation {limits.symmetry_deviation:.4f}, √2/n = {2**0.5 / width:.4f}",
            verdict,
            numbers,
        ),
        Finding(
            "Proposition S1.18(3): the directionality of a random matrix",
            drawn,
            "0 on average",
            f"{limits.directionality:+.3f} ± {limits.directionality_error:.3f}; deviation "
            f"{limits.directionality_deviation:.2f}, by excess {limits.excess_deviation:.2f}",
            "holds" if near(limits.directionality, 0, limits.directionality_error) else "fails",
            numbers,
        ),
    ]
