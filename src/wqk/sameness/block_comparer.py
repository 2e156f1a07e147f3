"""Comparison of all pairs of blocks: first all pairs are measured, then differences are explained.

A block may contain the weights of another layer. Therefore the signatures of all pairs are computed
before any pair is explained. A pair is identified by its *number* in the alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from wqk._machine import one_blas_thread, reused_memory
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.sameness.alignment import Alignment
from wqk.sameness.circuits import CIRCUITS, SCORES, PlanPair, form_parts
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.diagnosis import diagnose
from wqk.sameness.edits import Take
from wqk.sameness.form_causes import CircuitDifference
from wqk.sameness.freedoms import any_order_of_heads, order_of_heads
from wqk.sameness.layers import with_moved_layers
from wqk.sameness.measurement import BlockMeasurement, Signatures
from wqk.sameness.mismatches import Kind, Mismatch, listed
from wqk.sameness.repairs import Change
from wqk.sameness.tolerances import ALIKE_FORMS, LEAST_ALIKE


class BlockComparer:
    """Comparison of all pairs of blocks of two models.

    Parameters
    ----------
    models, alignment
        The reference and the candidate, and the pairs of their blocks.
    tolerance
        Relative distance of heads that is accepted besides rounding.
    any_heads
        Whether the order of heads is ignored in blocks where any order gives the same output.

    Attributes
    ----------
    notes
        Orders of heads that were ignored.
    """

    def __init__(
        self, models: Sequence[Model], alignment: Alignment, tolerance: float, *, any_heads: bool
    ) -> None:
        self._models = models
        self._pairs = alignment.pairs
        self._tolerance = tolerance
        # Layers of the reference without a partner may lie in the place of others.
        lone_plans = [plan for plan in models[0].plans if plan.place in alignment.missing]
        self._sources: list[PlanPair] = [*alignment.pairs]
        self._sources += [(plan, alignment.anchor[1]) for plan in lone_plans]
        self._signatures = Signatures([model.checkpoint for model in models], self._sources)
        self._lone_places = (*alignment.missing, *alignment.added)
        self._numbers_of_any_order: set[int] = set()
        if any_heads:
            self._numbers_of_any_order = any_order_of_heads(models, alignment.pairs)
        self._blocks: list[BlockComparison] = []
        self._differences: list[dict[str, CircuitDifference]] = []
        self.notes: list[str] = []

    def compare(self, on_progress: Callable[[int, int], None] | None) -> list[BlockComparison]:
        """Return the comparisons of all pairs, with the causes of differences."""
        # Products of single heads are too small for several threads.
        with one_blas_thread(), reused_memory():
            for number in range(len(self._pairs)):
                self._measure(number)
                if on_progress:
                    on_progress(len(self._blocks), len(self._pairs))
            blocks = [self._explained(number) for number in range(len(self._pairs))]
        return with_moved_layers(blocks, self._lone_places)

    def _measure(self, number: int) -> None:
        """Measure a pair of blocks; the order of heads may be ignored."""
        pair = self._pairs[number]
        measurement = BlockMeasurement(self._models, pair, self._tolerance)
        block = measurement.measure(self._signatures, number)
        differences = measurement.differences
        if number in self._numbers_of_any_order:
            order = order_of_heads(block, differences)
            if order:
                self.notes.append(f"{pair[0].place}: heads in the order {listed(order)}")
                block, differences = _without_distances(block), {}
        self._blocks.append(block)
        self._differences.append(differences)

    # -- causes ----------------------------------------------------------------------------

    def _explained(self, number: int) -> BlockComparison:
        """Return a block with its causes: another layer's weights, or changed weights."""
        block = self._blocks[number]
        if not block.unequal:
            return block
        source = self._source_of(number)
        causes = [] if source is None else [self._cause_of_layer(number, source)]
        circuits = self._unexplained_circuits(number, source)
        differences = self._differences[number]
        if not differences.keys().isdisjoint(circuits):
            causes += diagnose(
                self._models,
                self._pairs[number],
                self._neighbors(number),
                self._tolerance,
                circuits,
                differences,
            )
        doubt = _order_of_guess(self._pairs[number], block, causes)
        if doubt:
            return replace(_without_distances(block), undecided=doubt)
        return replace(block, mismatches=(*causes, *block.mismatches))

    def _neighbors(self, number: int) -> list[AttentionPlan]:
        """Return the plans of the reference's blocks except one."""
        return [plan for place, (plan, _) in enumerate(self._sources) if place != number]

    def _unexplained_circuits(self, number: int, source: int | None) -> tuple[str, ...]:
        """Return the circuits of a block that the source layer does not explain."""
        if source is None:
            return CIRCUITS
        least = _least_alike(self._blocks[number])
        return tuple(
            circuit
            for circuit in CIRCUITS
            if not self._signatures.are_alike(source, number, circuit, least)
        )

    def _source_of(self, number: int) -> int | None:
        """Return the number of another reference block with the scores of a block.

        None if no other block has these scores.
        """
        block = self._blocks[number]
        if SCORES not in block.unequal:
            return None
        least = _least_alike(block)
        for other in self._numbers_of_stack(number):
            if self._signatures.are_alike(other, number, SCORES, least):
                return other
        return None

    def _numbers_of_stack(self, number: int) -> list[int]:
        """Return the numbers of the reference's other blocks with the same stack and kind."""
        places = [plan.place for plan, _ in self._sources]
        stack = places[number].stack, places[number].kind
        return [
            other
            for other, place in enumerate(places)
            if other != number and (place.stack, place.kind) == stack
        ]

    def _cause_of_layer(self, number: int, source: int) -> Mismatch:
        """Return the cause of a block that has the weights of another layer."""
        reference, candidate = self._pairs[number]
        source_layer = self._sources[source][0].layer
        reason = f"{Kind.LAYER}: layer {reference.layer} has those of layer {source_layer}"
        if self._is_held_by_others(source, number):
            reason += ", as another one does"
        names = tuple(dict.fromkeys(part.name for part in form_parts(candidate)))
        steps = (Change(names, Take()),)
        return Mismatch(Kind.LAYER, reason, steps, facts={"other_layer": source_layer})

    def _is_held_by_others(self, source: int, number: int) -> bool:
        """Return whether another block of the candidate also has the weights of a source."""
        is_paired = source < len(self._pairs)
        if is_paired and not self._blocks[source].unequal:
            return True
        least = _least_alike(self._blocks[number])
        further = [other for other in self._numbers_of_stack(number) if other != source]
        return any(
            self._signatures.are_alike(source, other, SCORES, least)
            for other in further
            if other < len(self._pairs)
        )


def _order_of_guess(pair: PlanPair, block: BlockComparison, causes: Sequence[Mismatch]) -> str:
    """Return the reason why two blocks are undecided if a guessed order in a fused weight differs.

    A guessed family assumes that a fused weight contains queries, keys and values in this order. If
    another order makes the blocks equal, the guess may be wrong, and the candidate right.
    """
    is_guess = any(plan.rule.guess for plan in pair)
    are_orders = all(cause.verdict is Kind.FUSED and cause.steps for cause in causes)
    if not (is_guess and causes and are_orders) or block.mismatches:
        return ""
    reasons = "; ".join(dict.fromkeys(cause.reason for cause in causes))
    return (
        "the order within a fused weight is not known of a guessed family; the two are equal up "
        f"to this order: {reasons}"
    )


def _without_distances(block: BlockComparison) -> BlockComparison:
    """Return a block as equal, because a different order of heads is ignored."""
    return replace(
        block,
        unequal=(),
        heads=(),
        moved=(),
        distance=dict.fromkeys(block.distance, 0.0),
        beside=dict.fromkeys(block.beside, 0.0),
    )


def _least_alike(block: BlockComparison) -> float:
    """Return the least cosine of the signatures of equal heads, given their rounding."""
    return max(LEAST_ALIKE, min(ALIKE_FORMS, 1 - 2 * block.tolerance**2))
