"""Measurement of two blocks: the distance in each circuit, and differing settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.sameness import block_settings, mismatches
from wqk.sameness.block_weights import BlockWeights
from wqk.sameness.blocks import Scoring, positions
from wqk.sameness.circuits import CIRCUITS, SCORES, PlanPair, scorings, sides_of
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.diagnosis import cause_of_circuit
from wqk.sameness.edits import Take
from wqk.sameness.finders.quantized import find_groups
from wqk.sameness.form_causes import CircuitDifference, comparable, identical, measure, signature
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.missing_tensors import cause_of_missing
from wqk.sameness.positions import named_settings, undecided_positions
from wqk.sameness.quantization import coded_otherwise
from wqk.sameness.repairs import Change
from wqk.sameness.stored_tensors import compare_stored
from wqk.sameness.tolerances import RESOLUTION, SUSPECT


class Signatures:
    """Signatures of the blocks of both models, (H, P²) each, computed when needed.

    A signature summarizes a circuit, see `wqk.sameness.form_causes.signature`.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], pairs: Sequence[PlanPair]) -> None:
        self._checkpoints, self._pairs = checkpoints, pairs
        # By number of the pair and circuit: of the reference's block, and of the candidate's.
        self._computed: dict[tuple[int, str], list[np.ndarray]] = {}

    def add(self, number: int, circuit: str, forms: Sequence[Scoring]) -> None:
        """Add the signatures of a pair of blocks; no ``forms`` if a block lacks the circuit."""
        signatures = [signature(form).astype(np.float32) for form in forms]
        self._computed[number, circuit] = signatures

    def are_alike(self, reference: int, candidate: int, circuit: str, least_cosine: float) -> bool:
        """Return whether the heads of two blocks have equal forms, by their signatures.

        Parameters
        ----------
        reference, candidate
            Number of the pair with the reference's block, and number of the pair with the
            candidate's block.
        circuit
            The circuit to compare.
        least_cosine
            The least cosine of signatures of equal heads.
        """
        signatures_of_reference = self._of_pair(reference, circuit)
        signatures_of_candidate = self._of_pair(candidate, circuit)
        if not signatures_of_reference or not signatures_of_candidate:
            return False
        expected, actual = signatures_of_reference[0], signatures_of_candidate[1]
        if expected.shape != actual.shape:
            return False
        cosines = np.einsum("hp,hp->h", expected, actual)
        return bool((cosines > least_cosine).all())

    def _of_pair(self, number: int, circuit: str) -> list[np.ndarray]:
        """Return the signatures of a pair of blocks; none if a block lacks the circuit."""
        if (number, circuit) not in self._computed:
            forms = scorings(self._checkpoints, self._pairs[number], circuit)
            self.add(number, circuit, forms or ())
        return self._computed[number, circuit]


@dataclass
class BlockMeasurement:
    """The comparison of two blocks while their circuits are measured one by one.

    Attributes
    ----------
    models, pair
        The two models, and the plans of the two blocks.
    tolerance
        Relative distance that is accepted besides rounding.
    differences
        The difference of each circuit that differs, by the circuit's name.
    mismatches, distance, beside, heads, moved, head, allowed, undecided
        As in a `BlockComparison`, with ``allowed`` for the tolerance.
    """

    models: Sequence[Model]
    pair: PlanPair
    tolerance: float
    differences: dict[str, CircuitDifference] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
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
        """Measure all circuits, and add the signatures of the pair's blocks.

        ``number`` is the number of the pair in ``signatures``.
        """
        checkpoints, pair = self.checkpoints, self.pair
        self.heads = np.zeros(pair[0].query.heads)
        self.mismatches += self._differences_next_to_weights()
        equal = [circuit for circuit in CIRCUITS if identical(checkpoints, pair, circuit)]
        for circuit in equal:
            self._add_equal(circuit)
        for circuit in CIRCUITS:
            if circuit in equal:
                continue
            forms = scorings(checkpoints, pair, circuit)
            if forms is None:
                continue
            if circuit == SCORES and not self._have_equal_heads(*forms):
                break
            if circuit != SCORES and not comparable(*forms):
                self._add_sizes(circuit, *forms)
                continue
            signatures.add(number, circuit, forms)
            self._add_measured(circuit, *forms)
        if not (self.mismatches or self.differences or self.tolerance):
            self.mismatches += coded_otherwise(checkpoints, pair)
        has_sinks = any(plan.sinks is not None for plan in pair)
        return self._result(is_identical=len(equal) == len(CIRCUITS) and not has_sinks)

    def _differences_next_to_weights(self) -> Iterator[Mismatch]:
        """Yield differing settings and sinks, and missing tensors of the candidate."""
        yield from block_settings.other_settings(self.models, self.pair)
        yield from named_settings(self.models, self.pair)
        missing = cause_of_missing(self.pair, self.models)
        if missing is not None:
            yield missing
        reference, candidate = self.pair
        if reference.sinks is not None and candidate.sinks is not None:
            yield from _sinks(self.checkpoints, (reference.sinks, candidate.sinks))

    def _add_equal(self, circuit: str) -> None:
        """Add a circuit with equal stored bytes in both blocks."""
        if circuit == SCORES:
            self.distance = dict.fromkeys(positions(*self.pair), 0.0)
            self.undecided = undecided_positions(self.pair, None)
        elif sides_of(self.pair[0], circuit):
            self.beside[circuit] = 0.0

    def _have_equal_heads(self, reference: Scoring, candidate: Scoring) -> bool:
        """Return whether two blocks have equal numbers of heads; if not, add a mismatch."""
        self.undecided = undecided_positions(self.pair, (reference, candidate))
        _require_sizes(self.pair[0], reference, candidate)
        expected_count, actual_count = len(reference.query.weight), len(candidate.query.weight)
        if expected_count == actual_count:
            return True
        restored = block_settings.form_restored(self.models, self.pair)
        cause = mismatches.setting(
            "number of heads",
            f"{expected_count} of width {reference.width}",
            f"{actual_count} of width {candidate.width}",
            () if restored is None else restored[0].steps,
        )
        self.mismatches.insert(0, cause)
        self.distance = dict.fromkeys(positions(reference, candidate), math.nan)
        self.allowed = 0
        self.beside = {}
        return False

    def _add_sizes(self, circuit: str, reference: Scoring, candidate: Scoring) -> None:
        """Add a circuit with different sizes in the two blocks."""
        reason = f"{_sizes(reference)} against {_sizes(candidate)}"
        self.mismatches.append(cause_of_circuit(circuit, Mismatch(Kind.SIZES, reason)))
        self.beside[circuit] = math.nan

    def _add_measured(self, circuit: str, reference: Scoring, candidate: Scoring) -> None:
        """Add the distance of a circuit."""
        measured = measure(reference, candidate, self.tolerance)
        distances = measured.distances
        by_head = distances.relative.max(axis=0)
        shares = distances.shares.max(axis=0)
        if circuit == SCORES:
            farthest = distances.relative.max(axis=1).tolist()
            self.distance = dict(zip(positions(reference, candidate), farthest, strict=True))
            self.head = int(shares.argmax())
            self.allowed = distances.allowed
            self.moved = by_head.tolist()
            if SUSPECT < shares.max() <= 1:
                self.mismatches[:0] = self._wrong_groups()
        else:
            self.beside[circuit] = float(by_head.max())
        if not distances.agree:
            self.differences[circuit] = measured
            if len(self.heads) == len(by_head):
                self.heads = np.maximum(self.heads, np.where(shares > 1, by_head, 0.0))

    def _wrong_groups(self) -> list[Mismatch]:
        """Find columns with the scales of other groups, even within the format's tolerance."""
        query = Part(self.pair[1].query.tensor, ((0, 1),))
        if not self.checkpoints[1].regrouping(query):
            return []
        weights = BlockWeights(self.checkpoints, self.pair)
        findings = [find_groups(pair) for pair in weights.pairs if pair.is_matrix]
        return [weights.mismatch(finding) for finding in findings if finding is not None]

    def _result(self, *, is_identical: bool) -> BlockComparison:
        """Return the comparison of the two blocks."""
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
            unequal=tuple(self.differences),
            identical=is_identical,
            moved=tuple(self.moved),
            undecided=self.undecided,
        )


def _require_sizes(plan: AttentionPlan, reference: Scoring, candidate: Scoring) -> None:
    """Raise an error if two blocks differ in numbers of query rows or in widths of inputs."""
    if _rows_and_widths(reference) == _rows_and_widths(candidate):
        return
    raise CheckpointError(
        f"layer {plan.layer} of the {plan.stack} has {_sizes(reference)} in one checkpoint and "
        f"{_sizes(candidate)} in the other; only equal ones can be compared"
    )


def _rows_and_widths(scoring: Scoring) -> tuple[int, int, int]:
    """Return the number of query rows, and the widths of the inputs of queries and of keys."""
    heads, width, dimensions = scoring.query.weight.shape
    return heads * width, dimensions, scoring.key.weight.shape[2]


def _sizes(scoring: Scoring) -> str:
    """Return the sizes of a circuit in words."""
    heads, width, dimensions = scoring.query.weight.shape
    groups = len(scoring.key.weight)
    return f"{heads} heads over {groups}, of width {width}, on {dimensions} dimensions"


def _sinks(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> Iterator[Mismatch]:
    """Yield the difference of the scores of virtual keys, (H,) in each model."""
    stored = compare_stored(checkpoints, parts)
    if stored.outcome.same:
        return
    expected, actual = (
        checkpoint.read([part])[0].ravel()
        for checkpoint, part in zip(checkpoints, parts, strict=True)
    )
    reason = f"other sinks: {stored.reason}"
    if not actual.any():
        reason = "sinks are all zero"
    elif np.array_equal(np.sort(expected), np.sort(actual)):
        reason = "sinks lie in the order of other heads"
    name = parts[1].name
    facts = {"circuit": "sinks", "tensors": {name: "sinks"}}
    yield Mismatch(Kind.SINKS, reason, (Change((name,), Take()),), facts=facts)
