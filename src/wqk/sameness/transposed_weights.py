"""Weights that are stored transposed, and therefore fit no plan: read in the reference's layout.

A family's plan requires the shapes of the family's queries and keys. If a candidate stores its
attention weights transposed, as a ``Conv1D`` instead of a ``Linear``, it has no plan. Such a
candidate is opened through `TransposedWeights`, and the transposed weights are a cause.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wqk.checkpoints import Checkpoint, Part, TensorInfo, open_checkpoint
from wqk.checkpoints.checkpoint import View
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.circuits import CIRCUITS, PlanPair, circuit_parts
from wqk.sameness.comparisons import BlockComparison, Cause
from wqk.sameness.edits import Transpose
from wqk.sameness.matching import same_numbers
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Change
from wqk.sameness.tensor_comparisons import Outcome, TensorComparison
from wqk.sameness.tensor_names import paired_names, title_in_block


class TransposedWeights(View):
    """A view of a checkpoint with rows and columns of some matrices exchanged.

    Attributes
    ----------
    names
        The names of the exchanged matrices.
    """

    def __init__(self, inner: Checkpoint, names: Collection[str]) -> None:
        super().__init__(inner)
        self.changed = self.names = frozenset(names)
        self._infos = dict(inner.tensors())
        for name in self.names:
            info = self._infos[name]
            self._infos[name] = info._replace(shape=info.shape[::-1])

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and size of every tensor, by name."""
        return self._infos

    def value(self, name: str) -> np.ndarray | None:
        """Return the transposed matrix."""
        if name not in self.names:
            return None
        return np.ascontiguousarray(self.inner.read([Part(name)])[0].T)


def opened_transposed(reference: Model, opening: Mapping[str, Any]) -> Model | None:
    """Open a candidate with weights stored transposed; None for other candidates.

    Parameters
    ----------
    reference
        The reference, whose weights the candidate should contain.
    opening
        The arguments of `wqk.open` for the candidate.
    """
    options = dict(opening)
    family = options.pop("family")
    try:
        checkpoint = open_checkpoint(options.pop("ref"), **options)
        names = _transposed_names(reference.checkpoint, checkpoint)
        if not names:
            return None
        return open_model(TransposedWeights(checkpoint, names), family=family)
    except (CheckpointError, UnknownFamily):
        return None


def _transposed_names(reference: Checkpoint, candidate: Checkpoint) -> list[str]:
    """Return the names of the candidate's transposed matrices."""
    expected_infos, actual_infos = reference.tensors(), candidate.tensors()
    transposed_names = []
    for name, other in paired_names(expected_infos, actual_infos).items():
        expected_shape, actual_shape = expected_infos[name].shape, actual_infos[other].shape
        is_transposed = expected_shape == actual_shape[::-1] and expected_shape != actual_shape
        if len(expected_shape) == 2 and is_transposed:
            (first_row,) = reference.read([Part(name, ((0, 1),))])
            (actual,) = candidate.read([Part(other)])
            if same_numbers(first_row[0], actual[:, 0]):
                transposed_names.append(other)
    return transposed_names


def with_transposed_weights(
    candidate: Model,
    pairs: Sequence[PlanPair],
    blocks: Sequence[BlockComparison],
    tensors: Sequence[TensorComparison],
) -> tuple[list[BlockComparison], tuple[TensorComparison, ...], list[Cause]]:
    """Add the transposed weights of a candidate to the comparisons.

    Parameters
    ----------
    candidate
        The candidate, whose transposed weights were compared in the reference's layout.
    pairs, blocks
        The pairs of blocks, and their comparisons without the transposition.
    tensors
        The comparisons of tensors outside the forms.

    Returns
    -------
    blocks, tensors
        The same comparisons, with transposed parts marked as different.
    causes
        The cause of transposed tensors outside the forms, if any.
    """
    checkpoint = candidate.checkpoint
    if not isinstance(checkpoint, TransposedWeights):
        return [*blocks], tuple(tensors), []
    marked_blocks = [
        _with_transposed_forms(block, pair[1], checkpoint.names)
        for pair, block in zip(pairs, blocks, strict=True)
    ]
    transposed = [
        comparison
        for comparison in tensors
        if comparison.name and comparison.other in checkpoint.names
    ]
    if not transposed:
        return marked_blocks, tuple(tensors), []
    marked_tensors = []
    for comparison in tensors:
        if comparison.other in checkpoint.names and comparison.outcome.same:
            comparison = replace(comparison, outcome=Outcome.DIFFERS, reason=str(Kind.TRANSPOSED))
        marked_tensors.append(comparison)
    names = tuple(comparison.name for comparison in transposed)
    mismatch = _cause_of_transposed([comparison.other for comparison in transposed])
    mismatch = replace(mismatch, facts={"tensors": dict.fromkeys(names, "weight")})
    return marked_blocks, tuple(marked_tensors), [Cause(mismatch, (), names)]


def _with_transposed_forms(
    block: BlockComparison, plan: AttentionPlan, transposed: Container[str]
) -> BlockComparison:
    """Return a block with its transposed circuits marked as different."""
    names: dict[str, None] = {}
    circuits = dict.fromkeys(block.unequal)
    for circuit in CIRCUITS:
        for part in circuit_parts(plan, circuit):
            if part.name in transposed:
                names[part.name] = None
                circuits[circuit] = None
    if not names:
        return block
    mismatches = (_cause_of_transposed([*names]), *block.mismatches)
    return replace(block, unequal=tuple(circuits), mismatches=mismatches)


def _cause_of_transposed(names: Sequence[str]) -> Mismatch:
    """Return the cause of transposed tensors of the candidate, by name."""
    titles = dict.fromkeys(map(title_in_block, names))
    reason = f"{', '.join(titles)}: {Kind.TRANSPOSED}"
    facts = {"tensors": dict.fromkeys(names, "weight")}
    steps = (Change(tuple(names), Transpose()),)
    return Mismatch(Kind.TRANSPOSED, reason, steps, facts=facts)
