"""Proposition S1.10 on the whole text, and what Theorem S1.12 assumes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from wqk.errors import CorpusError
from wqk.theory.counts import Cut, count_pairs, cut, position_information, shares_above_one
from wqk.theory.finding import Finding, Verdict

if TYPE_CHECKING:
    from wqk.theory.measuring.evidence import Evidence

# With intervals of two standard errors so many entries differ from 1 by chance alone.
BY_CHANCE = 0.05


def measure_counts(evidence: Evidence) -> list[Finding]:
    """Context and prediction counts under every way to cut the text, from left to right or masked.

    Raises
    ------
    CorpusError
        The text is too short to count.
    """
    causal = evidence.subject.objective == "causal"
    return [_ratio_from_left_to_right(evidence)] if causal else [_ratio_where_masked(evidence)]


def _ratio_from_left_to_right(evidence: Evidence) -> Finding:
    text, block = evidence.text, evidence.subject.blocks.shape[-1]
    numbers: list[dict[str, Any]] = []
    for how in get_args(Cut):
        pieces = cut(text.documents, how, block)
        try:
            shares = shares_above_one(count_pairs(text.tokens, pieces, text.vocabulary_size))
        except CorpusError:
            continue  # cut so, it is too little
        bits = position_information(text.tokens, pieces, text.vocabulary_size)
        numbers.append({"cut": how, **shares._asdict(), "position_bits": bits})
    if not numbers:
        raise CorpusError(f"{text.name}: too little text to count, however it is cut")
    shown = "; ".join(
        f"{row['cut']} {row['types']:.0%} ± {100 * row['types_error']:.0f} of the entries, "
        f"{row['mass']:.0%} ± {100 * row['mass_error']:.0f} of the text "
        f"(90 % of it in {row['low']:.3f}-{row['high']:.3f})"
        for row in numbers
    )
    most = [
        min(row["types"] - row["types_error"], row["mass"] - row["mass_error"]) > 0.5
        for row in numbers
    ]
    places = ", ".join(f"{row['cut']} {1000 * row['position_bits']:.1f}" for row in numbers)
    return Finding(
        "Theorem S1.12, Equation S96: most tokens are context more often than prediction",
        f"a token's place in its piece tells which token it is; millibits: {places}",
        "μ_c/μ_p > 1 for most tokens (Proposition S1.10)",
        f"above 1: {shown}",
        "holds" if all(most) else "holds in part" if any(most) else "fails",
        tuple(numbers),
    )


def _ratio_where_masked(evidence: Evidence) -> Finding:
    text, subject = evidence.text, evidence.subject
    pieces = cut(text.documents, "stream", subject.blocks.shape[-1])
    counts = count_pairs(
        text.tokens,
        pieces,
        text.vocabulary_size,
        mask_share=subject.mask_share,
        seed=subject.seed,
    )
    shares = shares_above_one(counts)
    unequal = shares.clearly_above + shares.clearly_below
    verdict: Verdict = "holds" if unequal < 2 * BY_CHANCE else "fails"
    return Finding(
        "Proposition S1.10: masked tokens are context as often as prediction",
        f"masks do not depend on the token; {subject.mask_share:.0%} are masked",
        f"μ_c/μ_p = 1 for every token; {BY_CHANCE:.0%} differ clearly by chance",
        f"{unequal:.1%} of {shares.entries} entries differ clearly; 90 % of the text has a ratio "
        f"in {shares.low:.3f}-{shares.high:.3f}",
        verdict,
        ({"cut": "stream", **shares._asdict()},),
    )
