"""The paper's empirical claims, each with the estimate that decides the claim.

A claim predicts the sign of an estimate, or that there is no effect. All p-values of the page are
adjusted together for their number (Benjamini and Hochberg). A claim *holds* if the adjusted p-value
is at most .05 and the sign is as predicted. A claim is *contradicted* if the p-value is as small
and the sign is opposite, or if the claim predicts no effect. Otherwise the claim is *open*, and the
effect that would have been found is given. A *count* of runs that were made once has no test. A
claim with *no record* rests on no number that the paper or the paper's results contain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from textwrap import fill
from typing import Any, Literal

import numpy as np
import polars as pl

from wqk._console import Result
from wqk_lab.claims.comparing import (
    ClaimEstimate,
    PairTest,
    adjusted,
    mean_difference,
    separation,
)
from wqk_lab.claims.records import (
    AUTOREGRESSIVE_VISION,
    encoder_decoders,
    language_models,
    printed_speedups,
    published_ends,
    published_pairs,
    start_contrasts,
    start_symmetries,
    trained,
    vision_models,
)
from wqk_lab.runs.seeds import by_seed

Verdict = Literal["holds", "contradicted", "open", "count", "no record"]
Predicted = Literal["more", "less", "none"]

ERROR_RATE = 0.05

# What stands before the lines below a claim.
INDENT = "   "


@dataclass(frozen=True)
class PaperClaim:
    """A claim of the paper, and the records that decide the claim.

    Attributes
    ----------
    number
        A name for references: S for symmetry, D for directionality, T for training, N for numbers
        without a record.
    text
        The claim.
    source
        Where the paper, its summary or its project page makes the claim.
    evidence
        The records, the unit of observation and the pairing.
    measure
        The estimate, in words.
    predicts
        The sign that the claim predicts, relative to no effect.
    estimate
        The estimate; None for counts and claims without a record.
    adjusted_p
        The p-value, adjusted for all tested claims of the page.
    result
        The outcome in words, if there is no estimate, or more than one number.
    """

    number: str
    text: str
    source: str
    evidence: str
    measure: str = ""
    predicts: Predicted = "more"
    estimate: ClaimEstimate | None = None
    adjusted_p: float | None = None
    result: str = ""

    @property
    def verdict(self) -> Verdict:
        """The verdict, from the adjusted p-value and the sign of the estimate."""
        if self.estimate is None:
            return "count" if self.evidence else "no record"
        assert self.adjusted_p is not None
        if self.adjusted_p > ERROR_RATE:
            return "open"
        sign = "more" if self.estimate.value > self.estimate.null else "less"
        return "holds" if sign == self.predicts else "contradicted"

    @property
    def shown_estimate(self) -> str:
        """The estimate and the interval, as text.

        Examples
        --------
        >>> estimate = ClaimEstimate(0.25, 0.2, 0.3, null=0, p=0.01, detectable=0.1)
        >>> PaperClaim("S1", "", "", "", estimate=estimate, adjusted_p=0.02).shown_estimate
        '+.25 [+.20, +.30]'
        """
        if self.estimate is None:
            return "–"
        sign = "+" if self.estimate.null == 0 else ""
        digits = 0 if abs(self.estimate.value) >= 2 else 2
        numbers = (self.estimate.value, self.estimate.low, self.estimate.high)
        value, low, high = (_number(number, f"{sign}.{digits}f") for number in numbers)
        return f"{value} [{low}, {high}]"

    @property
    def shown_p(self) -> str:
        """The adjusted p-value to one digit, as text."""
        if self.adjusted_p is None:
            return "–"
        return "<.001" if self.adjusted_p < 0.001 else _number(self.adjusted_p, ".3f")

    @property
    def shown_detectable(self) -> str:
        """The smallest effect to be found with power 80 %, as text."""
        if self.estimate is None:
            return "–"
        return _number(self.estimate.detectable, ".0f" if self.estimate.detectable > 2 else ".2f")


def _number(value: float, form: str) -> str:
    """Return a number with a true minus sign, and without a zero before the point."""
    text = format(value, form).replace("-", "−")
    return text.replace("0.", ".", 1) if abs(value) < 1 else text


def _times(number: int, verdict: Verdict) -> str:
    """Return a number and a verdict as text: ``1 holds``, ``2 hold``."""
    plural = {"holds": "hold", "count": "counts"}.get(verdict, verdict)
    return f"{number} {verdict if number == 1 else plural}"


@dataclass(frozen=True, repr=False)
class ClaimsPage(Result):
    """The paper's claims with verdicts; see `claims`.

    Attributes
    ----------
    claims
        All claims in order.
    verdicts
        Verdicts whose claims are shown and listed; by default, all.
    """

    claims: tuple[PaperClaim, ...]
    verdicts: tuple[Verdict, ...] = ()

    @property
    def chosen(self) -> list[PaperClaim]:
        """The claims with the chosen verdicts."""
        return [
            claim for claim in self.claims if not self.verdicts or claim.verdict in self.verdicts
        ]

    @property
    def counts(self) -> dict[Verdict, int]:
        """The number of all claims with each verdict, in the order of the page."""
        verdicts = [claim.verdict for claim in self.claims]
        return {verdict: verdicts.count(verdict) for verdict in dict.fromkeys(verdicts)}

    @property
    def sentence(self) -> str:
        """The number of claims with each verdict.

        Examples
        --------
        >>> record = PaperClaim("N1", "", "", "")
        >>> ClaimsPage((record, record)).sentence
        'Of 2 claims of the paper: 2 no record.'
        """
        counts = [_times(number, verdict) for verdict, number in self.counts.items()]
        return f"Of {len(self.claims)} claims of the paper: {', '.join(counts)}."

    def _rows(self) -> Iterable[Mapping[str, Any]]:
        for claim in self.chosen:
            row = asdict(claim)
            estimate = row.pop("estimate") or dict.fromkeys(ClaimEstimate.__dataclass_fields__)
            yield {**row, **estimate, "verdict": claim.verdict}

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain values, for JSON."""
        return {"claims": self.frame.to_dicts(), "counts": self.counts}

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        for claim in self.chosen:
            yield Text.assemble((f"{claim.number} {claim.verdict}", "bold"), f": {claim.text}")
            for line in self._details(claim):
                indented = fill(line, width, initial_indent=INDENT, subsequent_indent=INDENT)
                yield Text(indented, style="dim")
        yield Text(self.sentence)
        tested = sum(claim.estimate is not None for claim in self.claims)
        yield Text(
            f"adjusted p: by Benjamini and Hochberg's method over the {tested} tested claims; "
            "detectable: the smallest effect that a test of this size finds in 80 % of cases",
            style="dim",
        )

    @staticmethod
    def _details(claim: PaperClaim) -> Iterator[str]:
        """Yield the lines below a claim: the estimate, the records, and the source."""
        if claim.estimate is not None:
            yield (
                f"{claim.measure}: {claim.shown_estimate}, adjusted p {claim.shown_p}, "
                f"detectable {claim.shown_detectable}"
            )
        if claim.result:
            yield claim.result
        if claim.evidence:
            yield claim.evidence
        yield f"({claim.source})"

    def markdown(self) -> list[str]:
        """Return the claims as lines of a Markdown table."""
        lines = [
            "| | claim | verdict | estimate [95 %] | p, adjusted | detectable | records |",
            "|:--|:--|:--|:--|--:|--:|:--|",
        ]
        for claim in self.chosen:
            verdict = claim.verdict if claim.verdict != "holds" else "**holds**"
            estimate = claim.result
            if claim.estimate is not None:
                estimate = f"{claim.measure} {claim.shown_estimate}"
                if claim.result:
                    estimate += f"; {claim.result}"
            cells = (
                claim.number,
                f"{claim.text} ({claim.source})",
                verdict,
                estimate or "–",
                claim.shown_p,
                claim.shown_detectable,
                claim.evidence or "–",
            )
            lines.append(f"| {' | '.join(cells)} |")
        return lines


def claims() -> ClaimsPage:
    """Compare the paper's empirical claims with published records and with our own runs.

    All records come with the package. Needs SciPy.

    Returns
    -------
    ClaimsPage
        The claims in order; ``frame`` is a table, ``to_dict()`` the values for JSON.

    Raises
    ------
    MissingPackage
        SciPy is not installed.

    Examples
    --------
    >>> page = claims()
    >>> {claim.number: claim.verdict for claim in page.claims}["S4"]
    'holds'
    """
    untested = [
        *_symmetry(),
        *_directionality(),
        *_published_training(),
        *_our_training(),
        *_without_record(),
    ]
    p_values = {claim.number: claim.estimate.p for claim in untested if claim.estimate is not None}
    adjusted_p = dict(zip(p_values, adjusted(list(p_values.values())), strict=True))
    return ClaimsPage(
        tuple(replace(claim, adjusted_p=adjusted_p.get(claim.number)) for claim in untested)
    )


def _stacks(models: pl.DataFrame, score: str) -> tuple[list[float], list[float]]:
    """Return a score of encoders, and the same score of decoders."""
    encoders = models.filter(stack="encoder")[score].drop_nulls().to_list()
    decoders = models.filter(stack="decoder")[score].drop_nulls().to_list()
    return encoders, decoders


def _separated(models: pl.DataFrame, score: str, unit: str) -> dict[str, Any]:
    """Return the separation of encoders from decoders, with both medians in words."""
    encoders, decoders = _stacks(models, score)
    of_encoders = _number(float(np.median(encoders)), ".2f")
    of_decoders = _number(float(np.median(decoders)), ".2f")
    return {
        "estimate": separation(encoders, decoders),
        "evidence": f"{len(encoders)} encoders, {len(decoders)} decoders; {unit}",
        "result": f"medians {of_encoders} and {of_decoders}",
    }


AUC = "encoder above decoder (AUC)"
NOT_AUTOREGRESSIVE = (
    "five of the eight decoders, GIT and Mask2Former, do not predict pixel after pixel; not paired"
)
IN_MODELS = "published medians over layers, one of each sound model; not paired"


def _in_recipe(recipe: str, score: str) -> tuple[dict[int, float], dict[int, float]]:
    """Return a score of the encoders and of the decoders of one recipe, by seed."""
    rows = trained().filter(recipe=recipe)
    encoders = dict(rows.filter(mode="encoder").select("seed", score).iter_rows())
    decoders = dict(rows.filter(mode="decoder").select("seed", score).iter_rows())
    return encoders, decoders


def _between_modes(recipe: str, score: str) -> dict[str, Any]:
    """Compare encoder and decoder of one recipe by seed; for directionality, decoder − encoder."""
    pairs = by_seed(*_in_recipe(recipe, score))
    predicts: Predicted = "more" if score == "symmetry" else "less"
    sign = 1 if predicts == "more" else -1
    differences = [sign * (encoder - decoder) for encoder, decoder in pairs.values()]
    return _paired(differences, "Student", predicts) | {
        "evidence": f"our runs, {recipe}: {len(pairs)} seeds, paired by seed"
    }


def _paired(differences: list[float], test: PairTest, predicts: Predicted) -> dict[str, Any]:
    """Return a mean difference, and the number of pairs with the predicted sign."""
    positive = sum(difference > 0 for difference in differences)
    count = positive if predicts == "more" else len(differences) - positive
    sign = "negative" if predicts == "none" else "as claimed"
    return {
        "estimate": mean_difference(differences, test),
        "result": f"{count} of {len(differences)} {sign}",
        "predicts": predicts,
    }


def _by_family(models: pl.DataFrame, difference: pl.Expr, holds: Callable[[float], bool]) -> str:
    """Return in words the number of families whose mean difference has a property."""
    means = models.group_by("family").agg(difference.mean().alias("difference"))["difference"]
    return f"{sum(map(holds, means))} of {len(means)} families in the mean"


TRAINED_ALIKE = {
    "pre-norm, Wikipedia": "two layers of width 64",
    "pre-norm, reviews": "two layers of width 64",
    "softmax beside linear attention": "two layers of width 128",
}
LINEAR = "linear attention"


def _symmetry() -> Iterator[PaperClaim]:
    """Yield claims about the symmetry of encoders and decoders."""
    text = "Encoders have a higher degree of symmetry than decoders"
    yield PaperClaim(
        "S1",
        f"{text}: language models",
        "Figure 2a",
        measure=AUC,
        **_separated(language_models(), "symmetry", IN_MODELS),
    )
    vision = vision_models()
    yield PaperClaim(
        "S2",
        f"{text}: vision models",
        "Figure S1a",
        measure=AUC,
        **_separated(vision, "symmetry", NOT_AUTOREGRESSIVE),
    )
    is_autoregressive = pl.col("name").str.starts_with(AUTOREGRESSIVE_VISION)
    pixels = vision.filter((pl.col("stack") == "encoder") | is_autoregressive)
    yield PaperClaim(
        "S3",
        f"{text}: vision models that predict pixel after pixel",
        "Figure S1a",
        measure=AUC,
        **_separated(pixels, "symmetry", "the three decoders are the ImageGPTs"),
    )
    models = encoder_decoders()
    difference = pl.col("symmetry_encoder") - pl.col("symmetry_decoder")
    outcome = _paired(models.select(difference).to_series().to_list(), "Wilcoxon", "more")
    outcome["result"] += "; " + _by_family(models, difference, lambda mean: mean > 0)
    yield PaperClaim(
        "S4",
        "The encoder of an encoder-decoder has a higher degree of symmetry than its decoder",
        "Figure S2a",
        f"{models.height} published encoder-decoders, paired by model",
        "encoder − decoder",
        **outcome,
    )
    pairs = published_pairs()
    difference = pl.col("symmetry_encoder") - pl.col("symmetry_decoder")
    yield PaperClaim(
        "S5",
        "Symmetric structures emerge during the training of encoders, not of decoders",
        "Figures 3a, S3, S4",
        "the paper's own runs at step 200,000, one of each: 2 sizes × 3 data sets, paired",
        "encoder − decoder",
        **_paired(pairs.select(difference).to_series().to_list(), "Wilcoxon", "more"),
    )
    for index, recipe in enumerate((*TRAINED_ALIKE, LINEAR)):
        yield PaperClaim(
            f"S{6 + index}",
            "Trained alike, encoders become more symmetric than decoders",
            "Theorem 2.4, Section 4.1",
            measure="encoder − decoder",
            **_between_modes(recipe, "symmetry"),
        )


def _directionality() -> Iterator[PaperClaim]:
    """Yield claims about the directionality of encoders and decoders; below 0, columns dominate."""
    text = "Decoders have a higher degree of directionality (columns) than encoders"
    yield PaperClaim(
        "D1",
        f"{text}: language models",
        "Figure 2b",
        measure=AUC,
        **_separated(language_models(), "directionality", IN_MODELS),
    )
    vision = vision_models()
    yield PaperClaim(
        "D2",
        f"{text}: vision models",
        "Figure S1b",
        measure=AUC,
        **_separated(vision, "directionality", "as S2"),
    )
    models = encoder_decoders()
    difference = pl.col("directionality_decoder") - pl.col("directionality_encoder")
    outcome = _paired(models.select(difference).to_series().to_list(), "Wilcoxon", "none")
    outcome["result"] += "; " + _by_family(models, difference, lambda mean: mean < 0)
    yield PaperClaim(
        "D3",
        "Encoder and decoder of an encoder-decoder do not differ in directionality",
        "Figure S2b",
        f"{models.height} published encoder-decoders, paired by model",
        "decoder − encoder",
        **outcome,
    )
    pairs = published_pairs()
    yield PaperClaim(
        "D4",
        "Decoders develop high-norm columns during training, encoders do not",
        "Theorem 2.3, Figures 3b, S3, S4",
        "the paper's own runs at step 200,000, as S5",
        "decoder − encoder",
        **_paired(pairs.select(difference).to_series().to_list(), "Wilcoxon", "less"),
    )
    for index, recipe in enumerate((*TRAINED_ALIKE, LINEAR)):
        yield PaperClaim(
            f"D{5 + index}",
            "Trained alike, columns dominate more in decoders than in encoders",
            "Theorem 2.3, Section 4.1",
            measure="decoder − encoder",
            **_between_modes(recipe, "directionality"),
        )
    for index, recipe in enumerate((*TRAINED_ALIKE, LINEAR)):
        decoders = list(_in_recipe(recipe, "directionality")[1].values())
        yield PaperClaim(
            f"D{9 + index}",
            "Columns dominate in decoders",
            "Theorem 2.3",
            f"our runs, {recipe}: {len(decoders)} decoders against zero",
            "directionality",
            **_paired(decoders, "Student", "less"),
        )


def _published_training() -> Iterator[PaperClaim]:
    """Yield claims about the published training runs from both starts."""
    encoders, decoders = (published_ends(mode) for mode in ("encoder", "decoder"))
    lower = (encoders["symmetric"] < encoders["random"]).sum()
    yield PaperClaim(
        "T1",
        "Symmetric initialization lowers the final loss of encoders for most models",
        "Table 1",
        "the paper's own runs, one of each; the start also changed the scale of W_q, W_k and W_v",
        result=f"{lower} of {encoders.height} lower",
    )
    lower = (decoders["symmetric"] < decoders["random"]).sum()
    largest = decoders.sort(pl.col("random") - pl.col("symmetric")).row(-1, named=True)
    yield PaperClaim(
        "T2",
        "Symmetric initialization improves encoder-only models (decoders are not shown)",
        "abstract, Section 4.2",
        "the paper's own decoders, started like the encoders: in its results, not in its text",
        result=(
            f"{lower} of {decoders.height} decoders end lower as well; most, {largest['size']} on "
            f"{largest['dataset']}: {largest['random']:.4f} to {largest['symmetric']:.4f} nats"
        ),
    )


def _contrast(name: str) -> dict[str, Any]:
    """Return a contrast of starts as an estimate, with a moderated variance."""
    result = start_contrasts()[name]
    estimate = ClaimEstimate(
        value=result.value,
        low=result.low,
        high=result.high,
        null=0.0,
        p=result.p,
        detectable=result.detectable,
    )
    evidence = (
        f"our runs, Wikipedia: {result.contrast.says}, {result.contrast.measure}; "
        f"{result.count} seeds, paired, moderated variance (`{name}`)"
    )
    return {"estimate": estimate, "evidence": evidence}


def _published_against_random(quantity: Literal["median", "range"]) -> dict[str, Any]:
    """Compare symmetry after the published and after a random start, at step 1,000, by seed."""
    pairs = by_seed(start_symmetries("published", quantity), start_symmetries("random", quantity))
    predicts: Predicted = "more" if quantity == "median" else "less"
    differences = [published - random for published, random in pairs.values()]
    evidence = (
        f"our runs, Wikipedia: `published` against random at step 1,000; {len(pairs)} seeds, paired"
    )
    return _paired(differences, "Student", predicts) | {"evidence": evidence}


def _our_training() -> Iterator[PaperClaim]:
    """Yield claims about the start, on runs of this project."""
    yield PaperClaim(
        "T3",
        "A symmetric start as the paper's code made it lowers the loss",
        "Table 1",
        measure="nats",
        predicts="less",
        **_contrast("published"),
    )
    yield PaperClaim(
        "T4",
        "The same at the end of the schedule",
        "Table 1",
        measure="nats",
        predicts="less",
        **_contrast("published-3000"),
    )
    yield PaperClaim(
        "T5",
        "Its symmetry does so, beyond its scale",
        "Section 4.2",
        measure="nats",
        predicts="less",
        **_contrast("symmetry-at-scale"),
    )
    yield PaperClaim(
        "T6",
        "At equal norm of the heads, W_k = W_q leaves the plateau sooner",
        "Section 4.2",
        measure="steps",
        predicts="less",
        **_contrast("symmetric-heads-plateau"),
    )
    yield PaperClaim(
        "T7",
        "At equal norm of the heads, W_k = W_q lowers the loss at the end of the schedule",
        "Section 4.2",
        measure="nats",
        predicts="less",
        **_contrast("symmetric-heads-3000"),
    )
    yield PaperClaim(
        "T8",
        "Symmetric starts end more symmetric than random ones",
        "Figure S5b",
        measure="median over layers",
        **_published_against_random("median"),
    )
    yield PaperClaim(
        "T9",
        "They decrease the gap in symmetry between layers",
        "Figure S5c",
        measure="largest − smallest layer",
        **_published_against_random("range"),
    )


def _without_record() -> Iterator[PaperClaim]:
    """Yield claims of the summary and of the project page that have no record."""
    yield PaperClaim(
        "N1",
        "Symmetric initialization raises the GLUE score by 1.8 % on average",
        "machine-written summary",
        "",
        result="neither the paper nor its results contain a GLUE score",
    )
    yield PaperClaim(
        "N2",
        "It enhances the interpretability of attention patterns",
        "machine-written summary",
        "",
        result="nothing that could be called interpretability is measured",
    )
    yield PaperClaim(
        "N3",
        "It reduces training time by up to 70 or 75 % (4 layers), 35 % (12), 44 % (24)",
        "project page, Section 4.2",
        "Table 1 and the table of the project page",
        result=_speedups(),
    )


def _speedups() -> str:
    """Return the largest speed-ups in the paper's tables and in the paper's text."""
    printed = ", ".join(f"{share:.0%} ({size})" for size, share in printed_speedups().items())
    return (
        f"Table 1 has at most {printed}; the project page's own table has 69, 35 and "
        "34 %; the only 24-layer number is that 34 %"
    )
