"""Test of kinship by descent or initialization, from the queries and keys of two models.

Tests of the weights decide. Coordinates of the residual stream may agree for another reason, such
as training on the same embeddings. Therefore, if coordinates agree, embeddings are also compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from wqk._console import Result, counted, display_name, kind_in_words, number
from wqk._machine import one_blas_thread, usable_cores
from wqk.attention import Block
from wqk.attention.factors import FOLDED, lacks_norm
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import Advising, CheckpointError, called_as
from wqk.families import AttentionPlan
from wqk.families.naming import embedding_table
from wqk.kinship.fingerprints import (
    SAMPLED,
    Fingerprint,
    fingerprint,
    spectral_closeness,
)
from wqk.kinship.randomization import (
    OF_WEIGHTS,
    Agreement,
    KinshipEvidence,
    RandomizationResult,
    gather,
    layer_shares,
)
from wqk.kinship.thresholds import (
    CLOSE_SPECTRA,
    CORRELATED,
    MATCHED,
    RELATED,
    SIXTEEN_BITS,
    START,
)
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.same import same
from wqk.tables.sheet import Cell, Sheet

# Sentences for the kinds of relation.
RELATIONS = {
    "copy": "their forms are equal",
    "rotated copy": "their forms are equal but for a rotation",
    "changed": "their forms are in place and changed by less than their own size",
    "rearranged": "layers or heads are in another order",
}

# Descriptions of the renumberings of each test.
NUMBERINGS = {
    "heads": "heads of each layer",
    "coordinates": "coordinates of the residual stream",
    "dimensions": "signs of each head's dimensions",
    "weights": "the same, weights as they stand",
}

# Footnote of the table of tests.
DEVIATIONS = (
    "deviations: distance of the agreement as it stands from the mean over renumberings, in "
    "standard deviations"
)
DIRECTION = (
    "Related means that one comes from the other, or both come from a third model or from one "
    "initialization. The forms do not tell which, nor which was first."
)


@dataclass(frozen=True)
class LayerMatch(Advising, synonyms={"of_stack": "reference_stack", "of_layer": "reference_layer"}):
    """One block of the candidate, and the matching block of the reference.

    Attributes
    ----------
    stack, layer
        Place of the candidate's block.
    reference_stack, reference_layer
        Place of the reference's block; None if no block agrees more than chance allows.
    p
        Share of renumberings in which any layer has at least this agreement.
    heads
        For each head, the closest head of the reference.
    changes
        ‖M_candidate − M_reference‖ / ‖M_reference‖ of each head.
    change
        The median over heads.
    """

    derived: ClassVar[tuple[str, ...]] = ("change",)

    stack: str
    layer: int
    reference_stack: str | None
    reference_layer: int | None
    p: float
    heads: tuple[int | None, ...]
    changes: tuple[float | None, ...]

    @property
    def change(self) -> float | None:
        """The median over heads."""
        return _median(self.changes)


@dataclass(frozen=True)
class Likeness:
    """Similarity of the embeddings, or of the gains, of two models.

    Attributes
    ----------
    what
        The compared tensors: token embeddings, or gains of norms.
    equal
        Share of values that are equal up to rounding to 16 bits.
    correlation
        Correlation of the values, after subtracting the mean row of embeddings, or the mean of each
        norm's gains; None if all values of a model are equal.
    rows
        The compared rows of embeddings, in words; empty if all tensors were compared.
    """

    what: str
    equal: float
    correlation: float | None
    rows: str = ""

    @property
    def alike(self) -> bool:
        """True if the tensors agree by more than chance."""
        return self.equal > 0.5 or (self.correlation or 0.0) > CORRELATED

    def __str__(self) -> str:
        if self.equal > 0.5:
            of_rows = f", {self.rows}" if self.rows else ""
            return f"{self.what} are equal ({self.equal:.0%} of the values compared{of_rows})"
        if not self.alike:
            relation = "are not alike"
        elif (self.correlation or 0.0) > 0.9:
            relation = "are nearly equal"
        else:
            relation = "correlate"
        of_rows = f" over {self.rows}" if self.rows else ""
        return f"{self.what} {relation} (correlation {number(self.correlation, 2)}{of_rows})"


@dataclass(frozen=True, repr=False)
class Kinship(
    Result,
    synonyms={
        "checkpoint": "reference",
        "other": "candidate",
        **dict.fromkeys(("distance", "score", "similarity"), "p, or closeness"),
    },
):
    """Evidence of the relation of two models, from their queries and keys.

    Attributes
    ----------
    reference, candidate
        Names of the two models.
    p
        Probability of this agreement of heads, dimensions and weights between unrelated models;
        None if no test applies.
    coordinates_p
        Probability of the agreement of coordinates of the residual stream.
    floor
        The smallest p that the number of renumberings allows.
    tests
        The result of each test.
    likenesses
        Similarity of embeddings and gains, if coordinates agree.
    matches
        The matching layers; empty unless the models are related.
    kind
        ``copy``, ``rotated copy``, ``changed``, ``rearranged``; None if uncertain.
    bounds
        Whether changes are lower bounds from singular values, because coordinates differ.
    closeness
        Distance of the candidate's heads to the reference's heads, by singular values, divided by
        the distance between the candidate's heads; without a p.
    folded_norms
        Whether the gains of norms are folded into the forms.
    """

    derived: ClassVar[tuple[str, ...]] = ("conclusion", "related", "change", "reading")

    reference: str
    candidate: str
    p: float | None
    coordinates_p: float | None
    floor: float
    tests: tuple[RandomizationResult, ...]
    likenesses: tuple[Likeness, ...]
    matches: tuple[LayerMatch, ...]
    kind: str | None
    bounds: bool
    closeness: float | None
    folded_norms: bool = False

    @property
    def related(self) -> bool:
        """True if p, of the weights, is at most .001."""
        return self.p is not None and self.p <= RELATED

    def __bool__(self) -> bool:
        return self.related

    @property
    def conclusion(self) -> str:
        """``related``; ``shared coordinates`` if only coordinates agree; or ``no sign``."""
        if self.related:
            return "related"
        if self.coordinates_p is not None and self.coordinates_p <= RELATED:
            return "shared coordinates"
        return "no sign"

    @property
    def change(self) -> float | None:
        """The median relative change over matched layers; None if the models are unrelated."""
        return _median([match.change for match in self.matches])

    @property
    def sentence(self) -> str:
        """The conclusion for the two models, as one sentence."""
        return f"{self.reference} and {self.candidate}: {_verdict(self)}"

    def _rows(self) -> Iterable[Mapping[str, Any]]:
        """Return one row for each block of the candidate."""
        return [vars(match) | {"change": match.change} for match in self.matches]

    @property
    def reading(self) -> tuple[str, ...]:
        """The meaning of the result, in sentences."""
        return tuple(_reading(self))

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        reference, candidate = display_name(self.reference), display_name(self.candidate)
        yield Text.assemble((reference, "bold"), "  and  ", (candidate, "bold"))
        yield _verdict(self)
        table = Sheet.of("renumbered", "p", "deviations", "", text=["renumbered", ""])
        for test in self.tests:
            numbers = ("–", "–") if test.p is None else (probability(test.p), f"{test.z:.1f}")
            table.add(NUMBERINGS[test.name], *numbers, Cell(test.left_out, style="dim"))
        yield table
        yield Text(DEVIATIONS, style="dim")
        yield _deciding(self)
        if self.related:
            yield _summary(self)
        for sentence in self.reading:
            yield Text(sentence, style="dim")


def _median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None without such values."""
    numbers = [value for value in values if value is not None]
    return float(np.median(numbers)) if numbers else None


def _reading(kinship: Kinship) -> Iterator[str]:
    """Return sentences about the meaning of a result."""
    if kinship.conclusion == "shared coordinates":
        yield from _reading_of_shared_coordinates(kinship)
    elif kinship.related:
        yield from _reading_of_related(kinship)
    else:
        yield from _reading_of_unrelated(kinship)


def _close_spectra(kinship: Kinship) -> str:
    """Return a clause about singular values that are closer than usual; else empty."""
    if kinship.closeness is None or kinship.closeness >= CLOSE_SPECTRA:
        return ""
    return (
        f"But singular values of heads lie {1 / max(kinship.closeness, 1e-6):,.0f} times "
        "closer to the other model's than to each other"
    )


def _reading_of_shared_coordinates(kinship: Kinship) -> Iterator[str]:
    yield (
        "The coordinates of the residual stream mean the same in both, and nothing else says "
        "that their weights have anything in common."
    )
    reasons = [str(likeness) for likeness in kinship.likenesses if likeness.alike]
    if reasons:
        text = "; ".join(reasons)
        yield (
            f"{text[0].upper()}{text[1:]}: attention that was trained from scratch on them "
            "agrees like this."
        )
    else:
        compared = "; ".join(map(str, kinship.likenesses)) or "neither was found"
        yield f"Embeddings and norms do not explain it: {compared}."
    close = _close_spectra(kinship)
    if close:
        yield f"{close}, as if heads were renumbered and dimensions turned. This has no p."
    else:
        yield (
            "A relation is not excluded: renumbered heads and turned dimensions together leave "
            "nothing but coordinates to see."
        )


def _reading_of_unrelated(kinship: Kinship) -> Iterator[str]:
    shares = [
        f"{test.visible:.0%} by {test.name}" for test in kinship.tests if test.visible is not None
    ]
    yield f"Agreement that would have been seen, as a share of a copy's: {', '.join(shares)}."
    close = _close_spectra(kinship)
    if close:
        yield (
            f"{close}, as if heads were renumbered, the stream rotated and dimensions turned, "
            "all three. No renumbering can say what chance allows then, so this has no p."
        )
    else:
        yield (
            "A relation is not excluded: renumbered heads, a rotated stream and turned dimensions "
            "hide one from the tests if all three are done."
        )


def _reading_of_related(kinship: Kinship) -> Iterator[str]:
    yield DIRECTION
    if kinship.bounds:
        yield (
            "The coordinates of the residual stream do not agree; a change is the smallest that "
            "singular values allow."
        )
    elif kinship.matches and kinship.change is not None:
        yield f"Changes are measured on {SAMPLED} coordinates of the residual stream at most."
    if kinship.change is not None and kinship.folded_norms:
        yield (
            "Changes are those of forms with the gains of norms folded in. wqk diff leaves norms "
            "out, unless a model is quantized, and its numbers differ therefore."
        )
    if kinship.change is not None and kinship.change > START and not kinship.bounds:
        yield (
            "The forms have changed by more than their own size: the two may share no more than "
            "an initialization. Whether they share some of their training as well cannot be told."
        )
    for likeness in kinship.likenesses:
        yield f"The {likeness}."


def _verdict(kinship: Kinship) -> str:
    """Return the conclusion with its p-values, as one sentence."""
    p_by_name = {"weights": kinship.p, "coordinates": kinship.coordinates_p}
    texts = []
    for name, p in p_by_name.items():
        texts.append(f"{name}: {'no test applies' if p is None else f'p = {probability(p)}'}")
    least = ""
    if min((p for p in p_by_name.values() if p is not None), default=1.0) <= kinship.floor:
        least = f"; {probability(kinship.floor)} is the least that can be found"
    if kinship.related:
        conclusion = f"Related: {RELATIONS[kinship.kind]}" if kinship.kind else "Related"
    elif kinship.conclusion == "shared coordinates":
        conclusion = "Shared coordinates, and no sign that the weights are related"
    else:
        conclusion = "No sign that they are related"
    return f"{conclusion} ({', '.join(texts)}{least})."


def _deciding(kinship: Kinship) -> str:
    """Return a sentence that names the p of the conclusion."""
    if kinship.p is None:
        sentence = "No p decides, because no test of the weights applies"
    else:
        sentence = (
            f"The p of the weights decides, {probability(kinship.p)}: the joint p of heads, signs "
            f"and weights as they stand. Models count as related if p ≤ {probability(RELATED)}"
        )
    if kinship.coordinates_p is not None and kinship.coordinates_p <= RELATED:
        sentence += "; coordinates can agree although the weights are not related"
    return f"{sentence}."


def _summary(kinship: Kinship) -> str:
    """Return a sentence about the matched layers: number, places and change."""
    matched = [match for match in kinship.matches if match.reference_layer is not None]
    places = "in place" if in_place(kinship.matches) else "in other places"
    order = "order" if all(map(_in_order, matched)) else "another order"
    text = (
        f"{len(matched)} of the candidate's {counted(len(kinship.matches), 'layer')} match, "
        f"{places}, heads in {order}"
    )
    if kinship.change is not None:
        change = shown_change(kinship.change, kinship.bounds)
        text += f"; the median relative change of a form is {change}"
    return f"{text}.{_dropped_and_doubled(matched)}"


def _dropped_and_doubled(matched: Sequence[LayerMatch]) -> str:
    """Name layers of the reference that match no layer, or several layers, of the candidate.

    Only layers between matched layers are known to be dropped, because the matches do not contain
    the reference's depth.
    """
    sentences = []
    for stack in dict.fromkeys(match.reference_stack for match in matched):
        numbers = [match.reference_layer for match in matched if match.reference_stack == stack]
        count_by_layer = Counter(number for number in numbers if number is not None)
        between = range(min(count_by_layer), max(count_by_layer) + 1)
        dropped = [layer for layer in between if layer not in count_by_layer]
        doubled = [layer for layer in sorted(count_by_layer) if count_by_layer[layer] > 1]
        for layers, verb in ((dropped, "matches none"), (doubled, "matches several")):
            if 0 < len(layers) < len(count_by_layer):
                subject = "layer" if len(layers) == 1 else "each of the layers"
                listed = ", ".join(map(str, layers))
                sentences.append(f" Of the reference, {subject} {listed} {verb}.")
    return "".join(sentences)


def in_place(matches: Sequence[LayerMatch]) -> bool:
    """Return whether each matched layer has the number of its match, in the corresponding stack.

    Corresponding stacks may have different names, such as encoder and decoder.
    """
    matched = [match for match in matches if match.reference_layer is not None]
    if any(match.layer != match.reference_layer for match in matched):
        return False
    pairs = {(match.reference_stack, match.stack) for match in matched}
    reference_stacks = {reference for reference, _ in pairs}
    candidate_stacks = {candidate for _, candidate in pairs}
    if not len(pairs) == len(reference_stacks) == len(candidate_stacks):
        return False
    return all(
        reference == candidate or reference not in candidate_stacks
        for reference, candidate in pairs
    )


def _in_order(match: LayerMatch) -> bool:
    """Return whether each head matches the head with its number."""
    return match.heads == tuple(range(len(match.heads)))


def layer_table(kinship: Kinship) -> Sheet:
    """Return a table with a line for each layer of the candidate: match, heads and change.

    The heads are heads of the reference, in the order of the candidate's heads.
    """
    names = ("candidate's layer", "reference's layer", "reference's heads", "change")
    table = Sheet.of(*names, text=names[1:3])
    stacks = {match.stack for match in kinship.matches}
    stacks |= {match.reference_stack for match in kinship.matches if match.reference_stack}
    for match in kinship.matches:
        layer, reference_layer = str(match.layer), str(match.reference_layer)
        if len(stacks) > 1:
            layer = f"{match.stack} {layer}"
            reference_layer = f"{match.reference_stack} {reference_layer}"
        if match.reference_layer is None:
            table.add(layer, "–", "–", "–")
            continue
        heads = "in order" if _in_order(match) else " ".join(map(str, match.heads))
        table.add(layer, reference_layer, heads, shown_change(match.change, kinship.bounds))
    return table


def shown_change(change: float | None, bound: bool) -> str:
    """Return a relative change as text, marked if it is a lower bound."""
    if change is None:
        return "–"
    return f"≥ {number(change)}" if bound else number(change)


def probability(p: float) -> str:
    """Format a p-value to two digits.

    Examples
    --------
    >>> probability(0.3421), probability(0.0002)
    ('.34', '.0002')
    """
    if p >= 0.995:
        return "1"
    leading_zeros = -math.floor(math.log10(p))
    digits = max(2, 1 + leading_zeros if p >= 0.01 else leading_zeros)
    return f"{p:.{digits}f}".removeprefix("0")


# Number of renumberings of the candidate; p cannot be smaller than 1 / (RENUMBERINGS + 1).
RENUMBERINGS = 4999

# Tests that only agree if the coordinates of the residual stream agree.
SAME_STREAM = ("coordinates", "weights")

# Blocks that are read at a time: their weights take most of the memory.
READ_AT_ONCE = 2

# Rows of the tables of embeddings that are compared.
ROWS = 256
# Numbers of embeddings that are compared at most; of wide models, the rows above.
NUMBERS = 1 << 20


class FingerprintedModel(NamedTuple):
    """A model, read once, and the fingerprints of its attention."""

    name: str
    checkpoint: Checkpoint
    plans: tuple[AttentionPlan, ...]
    fingerprints: tuple[Fingerprint, ...]
    folded_norms: bool


@called_as("wqk.kin(reference, candidate)")
def kin(
    reference: Any,
    candidate: Any,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Kinship:
    """Test whether two models are related: by descent, or by a shared initialization.

    The agreement of two models' forms is compared with the agreement after renumbering the
    candidate's heads, coordinates or dimensions. A renumbering does not change similarities due to
    architecture, recipe or text. Only queries and keys are read, block by block; if the coordinates
    of the residual stream agree, also some rows of the embeddings and the gains of norms.

    Parameters
    ----------
    reference, candidate
        Two models, or references for `wqk.open`: folders, files, hub ids, live modules.
    on_progress
        Called after every block with the number of finished blocks and the number of all blocks.

    Returns
    -------
    Kinship
        ``conclusion``, ``p`` of the weights, ``coordinates_p``, ``matches`` and ``kind``.

    Raises
    ------
    CheckpointError
        A model has no comparable self-attention, or the models have no numbering in common.

    Examples
    --------
    >>> import wqk
    >>> encoder, decoder = wqk.demo_model("encoder"), wqk.demo_model("decoder")
    >>> kinship = wqk.kin(encoder, encoder)
    >>> kinship.conclusion, kinship.p, kinship.kind
    ('related', 0.0002, 'copy')
    """
    models = _read((reference, candidate), on_progress)
    first, second = models
    evidence = gather(first.fingerprints, second.fingerprints, RENUMBERINGS)
    if not evidence.agreements:
        raise CheckpointError(
            f"{first.name} and {second.name} have no numbering in common that a test could "
            f"renumber: layers have {_shape(first)}, and {_shape(second)}; compare models that "
            "share the number of heads, their width, or the width of the model"
        )
    matches: tuple[LayerMatch, ...] = ()
    kind = None
    bounds = False
    if evidence.p is not None and evidence.p <= RELATED:
        test_name = _matching_test(evidence)
        bounds = test_name not in SAME_STREAM
        agreement = evidence.agreements[test_name]
        matches = tuple(_matches(first, second, agreement, bounds))
        kind = _kind(first, second, matches, bounds)
        if bounds and in_place(matches) and _is_rotated_copy(reference, candidate):
            kind = "rotated copy"
            matches = tuple(replace(match, changes=(0.0,) * len(match.heads)) for match in matches)
    likenesses: tuple[Likeness, ...] = ()
    if evidence.coordinates_p is not None and evidence.coordinates_p <= RELATED:
        likenesses = tuple(_likenesses(first, second))
    return Kinship(
        reference=first.name,
        candidate=second.name,
        p=evidence.p,
        coordinates_p=evidence.coordinates_p,
        floor=evidence.floor,
        tests=evidence.results,
        likenesses=likenesses,
        matches=matches,
        kind=kind,
        bounds=bounds,
        closeness=spectral_closeness(first.fingerprints, second.fingerprints),
        folded_norms=first.folded_norms,
    )


def _is_rotated_copy(reference: Any, candidate: Any) -> bool:
    """Return whether one rotation of the residual stream maps one model to the other."""
    with suppress(CheckpointError):
        return same(reference, candidate, up_to=("stream",)).same is True
    return False


def _shape(model: FingerprintedModel) -> str:
    """Return the shape of a model's heads, in words."""
    block = model.fingerprints[0]
    heads = counted(block.head_count, "head")
    return f"{heads} of width {block.head_width} on {block.width} dimensions"


def _shared_kind(models: Sequence[Model]) -> str:
    """Return the kind of attention to compare, which all models have.

    Attention with a softmax if all models have some; otherwise another kind that all have.
    """
    kinds_by_model = []
    for model in models:
        kinds_by_model.append([plan.kind for plan in model.scored if plan.kind != "cross"])
    shared_kinds = set.intersection(*map(set, kinds_by_model))
    return min(shared_kinds, key=kinds_by_model[0].index, default="self")


def _read(
    refs: Sequence[Any], on_progress: Callable[[int, int], None] | None
) -> list[FingerprintedModel]:
    """Read models in the same coordinates: norms are folded in if all models have known norms."""
    models = [open_model(ref) for ref in refs]
    kind = _shared_kind(models)
    plans_by_model = []
    for model in models:
        plans_by_model.append([plan for plan in model.scored if plan.kind == kind])
    plans = [*chain.from_iterable(plans_by_model)]
    folds = not any(lacks_norm(plan, FOLDED) for plan in plans)
    done = 0
    fingerprinted = []
    for model, plans_of_model in zip(models, plans_by_model, strict=True):
        kept_plans: list[AttentionPlan] = []
        kept_fingerprints: list[Fingerprint] = []
        # Blocks read their weights when needed, and are not kept: the weights of all blocks
        # together would not fit into memory.
        with one_blas_thread(), ThreadPoolExecutor(min(usable_cores(), READ_AT_ONCE)) as pool:
            blocks = map(partial(Block, model.checkpoint), plans_of_model)
            read = pool.map(partial(fingerprint, folds=folds), blocks)
            for plan, block_fingerprint in zip(plans_of_model, read, strict=True):
                if block_fingerprint is not None:
                    kept_plans.append(plan)
                    kept_fingerprints.append(block_fingerprint)
                done += 1
                if on_progress:
                    on_progress(done, len(plans))
        if not kept_plans:
            raise CheckpointError(
                f"{model.name}: has no {kind_in_words(kind)} on one residual stream to compare",
                checkpoint=model.name,
            )
        fingerprinted.append(
            FingerprintedModel(
                name=model.name,
                checkpoint=model.checkpoint,
                plans=tuple(kept_plans),
                fingerprints=tuple(kept_fingerprints),
                folded_norms=folds,
            )
        )
    return fingerprinted


def _matching_test(evidence: KinshipEvidence) -> str:
    """Return the name of the test that matches layers and heads: the first that shows the relation.

    If the coordinates agree, forms can be compared entry by entry. If no single test shows the
    relation, the test with the largest deviation is chosen.
    """
    results = {result.name: result for result in evidence.results if result.p is not None}
    for name in (*SAME_STREAM, "dimensions", "heads"):
        if name in results and (results[name].p or 0.0) <= RELATED:
            return name
    names = [name for name in OF_WEIGHTS if name in results]
    return max(names, key=lambda name: results[name].z or 0.0)


def _matches(
    reference: FingerprintedModel,
    candidate: FingerprintedModel,
    agreement: Agreement,
    bounds: bool,
) -> Iterator[LayerMatch]:
    """Yield the match of each block of the candidate."""
    shares = layer_shares(agreement)
    for layer, block in enumerate(candidate.fingerprints):
        share = float(shares[layer])
        position = int(agreement.match[layer])
        if position < 0 or share > MATCHED:
            nothing = (None,) * block.head_count
            yield LayerMatch(block.stack, block.layer, None, None, share, nothing, nothing)
            continue
        reference_block = reference.fingerprints[position]
        heads = agreement.heads[layer].tolist()
        yield LayerMatch(
            stack=block.stack,
            layer=block.layer,
            reference_stack=reference_block.stack,
            reference_layer=reference_block.layer,
            p=share,
            heads=tuple(heads),
            changes=_changes(reference_block, block, heads, bounds),
        )


def _changes(
    reference: Fingerprint, candidate: Fingerprint, heads: Sequence[int], bounds: bool
) -> tuple[float | None, ...]:
    """Return ‖M_candidate − M_reference‖ / ‖M_reference‖ of each head, on the sampled coordinates.

    With ``bounds``, the result is the smallest change for any rotations R and S of the reference,
    ‖M_candidate − R M_reference S‖, which is the distance of the singular values (Mirsky).
    """
    if bounds:
        reference_forms = reference.spectra * reference.norms[:, None]
        candidate_forms = candidate.spectra * candidate.norms[:, None]
    else:
        reference_forms, candidate_forms = reference.forms, candidate.forms
    if reference_forms.shape[-1] != candidate_forms.shape[-1]:
        return (None,) * len(heads)
    changes: list[float | None] = []
    for head, reference_head in enumerate(heads):
        norm = float(np.linalg.norm(reference_forms[reference_head]))
        difference = candidate_forms[head] - reference_forms[reference_head]
        changes.append(float(np.linalg.norm(difference)) / norm if norm else None)
    return tuple(changes)


def _kind(
    reference: FingerprintedModel,
    candidate: FingerprintedModel,
    matches: Sequence[LayerMatch],
    bounds: bool,
) -> str | None:
    """Return the kind of relation, from the changes of the forms; None if uncertain.

    The forms are equal up to the rounding of stored weights; or all forms are in place, or in other
    places, and have changed by less than their size. Matches with larger changes may be chance.
    """
    changes = [match.change for match in matches if match.change is not None]
    if len(reference.fingerprints) != len(candidate.fingerprints) or len(changes) != len(matches):
        return None
    is_moved = not in_place(matches) or not all(map(_in_order, matches))
    blocks = (*reference.fingerprints, *candidate.fingerprints)
    rounding = 2 * max(block.rounding for block in blocks)
    if not is_moved and max(changes) <= rounding:
        return "rotated copy" if bounds else "copy"
    if bounds or max(changes) > START:
        return None
    return "rearranged" if is_moved else "changed"


def _likenesses(reference: FingerprintedModel, candidate: FingerprintedModel) -> Iterator[Likeness]:
    """Yield similarities of tensors that may explain shared coordinates."""
    # Means are subtracted: all rows of embeddings have outlying coordinates in common, and the mean
    # of gains is near 1.
    for name, read, axis in (("token embeddings", _embeddings, 0), ("gains of norms", _gains, 1)):
        reference_values, candidate_values = read(reference), read(candidate)
        if reference_values is None or candidate_values is None:
            continue
        if reference_values.shape[1] != candidate_values.shape[1]:
            continue
        rows = min(len(reference_values), len(candidate_values))
        likeness = _likeness(name, reference_values[:rows], candidate_values[:rows], axis)
        if likeness is not None:
            compared = ""
            if read is _embeddings:
                compared = f"the first {rows:,} rows"
                if rows == min(map(_vocabulary, (reference, candidate))):
                    compared = f"all {rows:,} rows"
            yield replace(likeness, rows=compared)


def _likeness(
    name: str, reference_values: np.ndarray, candidate_values: np.ndarray, axis: int
) -> Likeness | None:
    """Return the similarity of two arrays, correlated without their means along ``axis``.

    None if the arrays differ, but the correlation is undefined because all values of an array are
    equal.
    """
    x = reference_values.astype(np.float64)
    y = candidate_values.astype(np.float64)
    is_near = np.abs(x - y) <= SIXTEEN_BITS * np.maximum(np.abs(x), np.abs(y))
    x = x - x.mean(axis=axis, keepdims=True)
    y = y - y.mean(axis=axis, keepdims=True)
    norms = float(np.linalg.norm(x) * np.linalg.norm(y))
    correlation = float((x * y).sum()) / norms if norms else None
    if correlation is None and not is_near.all():
        return None
    return Likeness(name, float(is_near.mean()), correlation)


def _embeddings(model: FingerprintedModel) -> np.ndarray | None:
    """Return some rows of the table of token embeddings; None if the table is unknown."""
    try:
        table = embedding_table(model.checkpoint, model.fingerprints[0].width)
    except CheckpointError:
        return None
    most = max(ROWS, NUMBERS // model.fingerprints[0].width)
    count = min(most, model.checkpoint.info(table).shape[0])
    if not count:
        return None
    (rows,) = model.checkpoint.read([Part(table, ((0, count),))])
    return rows


def _vocabulary(model: FingerprintedModel) -> int:
    """Return the number of rows of the table of token embeddings."""
    table = embedding_table(model.checkpoint, model.fingerprints[0].width)
    return model.checkpoint.info(table).shape[0]


def _gains(model: FingerprintedModel) -> np.ndarray | None:
    """Return the gains of the norms before the blocks (L, D), as stored; None if unknown."""
    norms = [plan.query.input_norm for plan in model.plans]
    parts = [norm.gain[0] for norm in norms if norm is not None and len(norm.gain) == 1]
    if not parts:
        return None
    gains = model.checkpoint.read(parts)
    width = model.fingerprints[0].width
    if any(gain.shape != (width,) for gain in gains):
        return None
    return np.stack(gains)
