"""Measure two blocks: their distance in each circuit, and the settings in which they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.sameness import configured, mismatches
from wqk.sameness.blocks import Scoring, positions
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.contents import compare_stored
from wqk.sameness.diagnosis import Apart, beside, comparable, identical, measure, signature
from wqk.sameness.edits import Take
from wqk.sameness.expected import Expected
from wqk.sameness.finders.quantized import find_groups
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.missing_tensors import cause_of_missing
from wqk.sameness.positions import named_settings, undecided_positions
from wqk.sameness.quantization import coded_otherwise
from wqk.sameness.repairs import Change
from wqk.sameness.tolerances import RESOLUTION, SUSPECT
from wqk.sameness.weights import CIRCUITS, SCORES, Pair, scorings, sides_of


class Signatures:
    """Signatures of the blocks of both models, computed when needed."""

    def __init__(self, checkpoints: Sequence[Checkpoint], pairs: Sequence[Pair]) -> None:
        self._checkpoints, self._pairs = checkpoints, pairs
        self._known: dict[tuple[int, str], list[np.ndarray]] = {}

    def add(self, number: int, circuit: str, scorings: Sequence[Scoring]) -> None:
        """Add the signatures of a pair of blocks."""
        self._known[number, circuit] = [signature(each).astype(np.float32) for each in scorings]

    def alike(self, reference: int, candidate: int, circuit: str, least: float) -> bool:
        """Return whether the heads of two blocks have the same form, by their signatures."""
        of_reference = self._of_pair(reference, circuit)
        of_candidate = self._of_pair(candidate, circuit)
        if not of_reference or not of_candidate:
            return False
        expected, actual = of_reference[0], of_candidate[1]
        if expected.shape != actual.shape:
            return False
        return bool((np.einsum("hp,hp->h", expected, actual) > least).all())

    def _of_pair(self, number: int, circuit: str) -> list[np.ndarray]:
        """Return the signatures of a pair of blocks; none if one of them lacks the circuit."""
        if (number, circuit) not in self._known:
            pair = scorings(self._checkpoints, self._pairs[number], circuit)
            self.add(number, circuit, pair or ())
        return self._known[number, circuit]


@dataclass
class BlockMeasurement:
    """The distances of two blocks while their circuits are measured, one after the other."""

    models: Sequence[Model]
    pair: Pair
    tolerance: float
    mismatches: list[Mismatch] = field(default_factory=list)
    apart: dict[str, Apart] = field(default_factory=dict)
    distance: dict[int, float] = field(default_factory=dict)
    beside: dict[str, float] = field(default_factory=dict)
    heads: np.ndarray = field(default_factory=lambda: np.zeros(0))
    moved: list[float] = field(default_factory=list)
    head: int = 0
    allowed: float = RESOLUTION
    undecided: str = ""

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints of the two models."""
        return [model.checkpoint for model in self.models]

    def measure(self, signatures: Signatures, number: int) -> BlockComparison:
        """Measure all circuits; the signatures of this pair's blocks are added."""
        checkpoints, pair = self.checkpoints, self.pair
        self.heads = np.zeros(pair[0].query.heads)
        self.mismatches += configured.other_settings(self.models, pair)
        self.mismatches += named_settings(self.models, pair)
        missing = cause_of_missing(pair, self.models[0])
        if missing is not None:
            self.mismatches.append(missing)
        if pair[0].sinks is not None and pair[1].sinks is not None:
            self.mismatches += _sinks(checkpoints, (pair[0].sinks, pair[1].sinks))
        equal = [circuit for circuit in CIRCUITS if identical(checkpoints, pair, circuit)]
        for circuit in equal:
            self._add_equal(circuit)
        for circuit in CIRCUITS:
            both = None if circuit in equal else scorings(checkpoints, pair, circuit)
            if both is None:
                continue
            if circuit == SCORES and not self._have_equal_heads(both):
                break
            if circuit != SCORES and not comparable(*both):
                self._add_sizes(circuit, both)
                continue
            signatures.add(number, circuit, both)
            self._add_measured(circuit, both)
        if not (self.mismatches or self.apart or self.tolerance):
            self.mismatches += coded_otherwise(checkpoints, pair)
        is_identical = len(equal) == len(CIRCUITS) and not any(plan.sinks for plan in pair)
        return self._result(is_identical)

    def _add_equal(self, circuit: str) -> None:
        """Add a circuit that is stored as the same bytes."""
        if circuit == SCORES:
            self.distance = dict.fromkeys(positions(*self.pair), 0.0)
            self.undecided = undecided_positions(self.pair, None)
        elif sides_of(self.pair[0], circuit):
            self.beside[circuit] = 0.0

    def _have_equal_heads(self, both: tuple[Scoring, Scoring]) -> bool:
        """Return whether both have equal numbers of heads; if not, add the difference."""
        self.undecided = undecided_positions(self.pair, both)
        _require_sizes(self.pair[0], both)
        counts = [len(scoring.query.weight) for scoring in both]
        if counts[0] == counts[1]:
            return True
        texts = [
            f"{count} of width {scoring.width}" for count, scoring in zip(counts, both, strict=True)
        ]
        restored = configured.form_restored(self.models, self.pair)
        steps = restored[0].steps if restored else ()
        cause = mismatches.setting("number of heads", texts[0], texts[1], steps)
        self.mismatches.insert(0, cause)
        self.distance = dict.fromkeys(positions(*both), math.nan)
        self.allowed = 0
        self.beside = {}
        return False

    def _add_sizes(self, circuit: str, both: tuple[Scoring, Scoring]) -> None:
        """Add a circuit whose sizes differ."""
        reason = " against ".join(_sizes(scoring) for scoring in both)
        self.mismatches.append(beside(circuit, Mismatch(Kind.SIZES, reason)))
        self.beside[circuit] = math.nan

    def _add_measured(self, circuit: str, both: tuple[Scoring, Scoring]) -> None:
        """Add the distance of a circuit."""
        measured = measure(*both, self.tolerance)
        distances = measured.distances
        by_head, shares = distances.relative.max(axis=0), distances.shares.max(axis=0)
        if circuit == SCORES:
            farthest = distances.relative.max(axis=1).tolist()
            self.distance = dict(zip(positions(*both), farthest, strict=True))
            self.head, self.allowed = int(shares.argmax()), distances.allowed
            self.moved = by_head.tolist()
            if SUSPECT < shares.max() <= 1:
                self.mismatches[:0] = self._wrong_groups()
        else:
            self.beside[circuit] = float(by_head.max())
        if not distances.agree:
            self.apart[circuit] = measured
            if len(self.heads) == len(by_head):
                self.heads = np.maximum(self.heads, np.where(shares > 1, by_head, 0.0))

    def _wrong_groups(self) -> list[Mismatch]:
        """Columns with the scales of other groups, which the tolerance of a format may hide."""
        query = Part(self.pair[1].query.tensor, ((0, 1),))
        if not self.checkpoints[1].regrouping(query):
            return []
        expected = Expected(self.checkpoints, self.pair)
        findings = [find_groups(weights) for weights in expected.pairs if weights.is_matrix]
        return [expected.mismatch(finding) for finding in findings if finding is not None]

    def _result(self, is_identical: bool) -> BlockComparison:
        stack, kind, layer = self.pair[0].place
        return BlockComparison(
            stack=stack,
            kind=kind,
            layer=layer,
            distance=self.distance,
            head=self.head,
            tolerance=self.allowed,
            mismatches=tuple(self.mismatches),
            heads=tuple(self.heads.tolist()),
            beside=self.beside,
            unequal=tuple(self.apart),
            identical=is_identical,
            moved=tuple(self.moved),
            undecided=self.undecided,
        )


def _require_sizes(plan: AttentionPlan, both: Sequence[Scoring]) -> None:
    """Require that two blocks have equal numbers of query rows, and equal widths."""
    sizes = []
    for scoring in both:
        heads, width, dimensions = scoring.query.weight.shape
        sizes.append((heads * width, dimensions, scoring.key.weight.shape[2]))
    if sizes[0] == sizes[1]:
        return
    expected, actual = map(_sizes, both)
    raise CheckpointError(
        f"layer {plan.layer} of the {plan.stack} has {expected} in one checkpoint and {actual} in "
        "the other; only equal ones can be compared"
    )


def _sizes(scoring: Scoring) -> str:
    """Return the sizes of a circuit in words."""
    heads, width, dimensions = scoring.query.weight.shape
    groups = len(scoring.key.weight)
    return f"{heads} heads over {groups}, of width {width}, on {dimensions} dimensions"


def _sinks(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> Iterator[Mismatch]:
    """Yield the difference of the scores of virtual keys."""
    compared = compare_stored(checkpoints, parts)
    if compared.outcome.same:
        return
    expected, actual = (
        checkpoint.read([part])[0].ravel()
        for checkpoint, part in zip(checkpoints, parts, strict=True)
    )
    reason = f"other sinks: {compared.reason}"
    if not actual.any():
        reason = "sinks are all zero"
    elif np.array_equal(np.sort(expected), np.sort(actual)):
        reason = "sinks lie in the order of other heads"
    facts = {"circuit": "sinks", "tensors": {parts[1].name: "sinks"}}
    yield Mismatch(Kind.SINKS, reason, (Change((parts[1].name,), Take()),), facts=facts)
