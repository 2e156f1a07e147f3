"""All tensors of two checkpoints, compared by name, then by contents.

If both checkpoints have a tensor of one name and shape, the stored tensors are compared. Other
tensors are searched for by their numbers, first in the other checkpoint, then in the same
checkpoint. A second copy of an equal tensor, such as a tied output head, is no difference.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from wqk.checkpoints import Checkpoint, Part
from wqk.sameness.contents import LayerPrefixes, Locations, find_by_layer
from wqk.sameness.stored_tensors import compare_stored, equal_parts
from wqk.sameness.tensor_comparisons import Outcome, TensorComparison
from wqk.sameness.tensor_names import NUMBERS
from wqk.sameness.tolerances import DIFFERENT_ABOVE


def compare_tensors(
    checkpoints: Sequence[Checkpoint],
    roles: Sequence[Mapping[str, str]],
    names: Mapping[str, str],
    *,
    strict: bool,
    layers: Sequence[LayerPrefixes] = (),
) -> list[TensorComparison]:
    """Compare every tensor that has a role in either checkpoint, by name, then by contents.

    Parameters
    ----------
    checkpoints
        The reference and the candidate.
    roles
        For each checkpoint, the role of each tensor to compare.
    names
        The candidate's names of the reference's tensors, where names agree.
    strict
        Whether a tensor that is not found is a difference; otherwise the tensor is not compared.
    layers
        Beginnings of the names of a layer's tensors, in the reference and in the candidate.

    Returns
    -------
    list of TensorComparison
        First the tensors with names in both checkpoints, then tensors of the reference only, then
        tensors of the candidate only.
    """
    reference, candidate = checkpoints
    reference_roles, candidate_roles = roles
    names = dict(names) | _names_by_first_rows(checkpoints, roles, names)
    comparisons = _compared_by_name(checkpoints, reference_roles, names)
    compared_names = {comparison.name for comparison in comparisons}
    compared_others = {comparison.other for comparison in comparisons}
    reference_unmatched = [name for name in reference_roles if name not in compared_names]
    candidate_unmatched = [name for name in candidate_roles if name not in compared_others]
    equal = [comparison for comparison in comparisons if comparison.outcome.same]
    locations = Locations({}, {})
    if reference_unmatched and candidate_unmatched:
        unmatched_names = reference_unmatched, candidate_unmatched
        locations = find_by_layer(checkpoints, unmatched_names, layers)
    equal_names = [comparison.name for comparison in equal]
    unmatched = _Unmatched(reference, locations.reference, equal_names, strict)
    for name in reference_unmatched:
        outcome, reason = unmatched.outcome(name, Outcome.MISSING)
        comparisons.append(TensorComparison(name, "", outcome, reason, reference_roles[name]))
    equal_names = [comparison.other for comparison in equal]
    unmatched = _Unmatched(candidate, locations.candidate, equal_names, strict)
    for name in candidate_unmatched:
        outcome, reason = unmatched.outcome(name, Outcome.ADDED)
        comparisons.append(TensorComparison("", name, outcome, reason, candidate_roles[name]))
    return comparisons


def _compared_by_name(
    checkpoints: Sequence[Checkpoint], roles: Mapping[str, str], names: Mapping[str, str]
) -> list[TensorComparison]:
    """Compare the tensors that have one shape and corresponding names in both checkpoints.

    ``roles`` are the roles of the reference's tensors; ``names`` are the candidate's names of these
    tensors.
    """
    reference, candidate = checkpoints
    comparisons = []
    for name, role in roles.items():
        other = names.get(name)
        if other is None or reference.info(name).shape != candidate.info(other).shape:
            continue
        stored = compare_stored(checkpoints, (Part(name), Part(other)))
        comparisons.append(
            TensorComparison(
                name=name,
                other=other,
                outcome=stored.outcome,
                reason=stored.reason,
                role=role,
                distance=stored.distance,
                kind=stored.kind,
            )
        )
    return comparisons


class _Unmatched(NamedTuple):
    """Tensors of one checkpoint without a counterpart by name in the other checkpoint.

    Attributes
    ----------
    checkpoint
        The checkpoint.
    locations
        Locations in the other checkpoint of the tensors that were found by contents, by name.
    equal_names
        Tensors of the checkpoint that are equal to tensors of the other checkpoint.
    strict
        Whether a tensor that is not found is a difference.
    """

    checkpoint: Checkpoint
    locations: Mapping[str, str]
    equal_names: Sequence[str]
    strict: bool

    def outcome(self, name: str, absent: Outcome) -> tuple[Outcome, str]:
        """Return the outcome and the reason for a tensor; ``absent`` if the tensor is not found."""
        if name in self.locations:
            return Outcome.FOUND, self.locations[name]
        original = copy_of(self.checkpoint, name, self.equal_names)
        if original is None:
            if self.strict:
                return absent, ""
            return Outcome.UNKNOWN, "not found in the other under any name"
        # Layers may share weights, or may be copies at the start of training.
        is_of_one_layer = NUMBERS.findall(name) == NUMBERS.findall(original)
        outcome = Outcome.FOUND if is_of_one_layer else Outcome.UNKNOWN
        return outcome, f"a copy of {original}"


def _names_by_first_rows(
    checkpoints: Sequence[Checkpoint], roles: Sequence[Iterable[str]], names: Mapping[str, str]
) -> dict[str, str]:
    """Pair tensors of different names by their first rows, up to the error of quantization.

    Only tensors with the shape of a quantized tensor of either checkpoint are paired.

    Returns
    -------
    dict
        The candidate's names of the paired tensors, by the reference's names.
    """
    paired = {*names.values()}
    unnamed = (
        [name for name in roles[0] if name not in names],
        [name for name in roles[1] if name not in paired],
    )
    quantized_shapes: set[tuple[int, ...]] = set()
    for checkpoint, names_of_model in zip(checkpoints, unnamed, strict=True):
        infos = [checkpoint.info(name) for name in names_of_model]
        quantized_shapes |= {info.shape for info in infos if info.grid}
    reference_rows, candidate_rows = (
        _first_rows(checkpoint, names_of_model, quantized_shapes)
        for checkpoint, names_of_model in zip(checkpoints, unnamed, strict=True)
    )
    reference, candidate = checkpoints
    pairs: dict[str, str] = {}
    for name, row in reference_rows.items():
        shape = reference.info(name).shape
        distances = {
            other: np.linalg.norm(row - candidate_row)
            for other, candidate_row in candidate_rows.items()
            if candidate.info(other).shape == shape
        }
        nearest = min(distances, key=distances.__getitem__, default="")
        if nearest and distances[nearest] <= DIFFERENT_ABOVE * np.linalg.norm(row):
            pairs[name] = nearest
            del candidate_rows[nearest]
    return pairs


def _first_rows(
    checkpoint: Checkpoint, names: Iterable[str], shapes: Collection[tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Read the first rows (D,) of the tensors with certain shapes."""
    rows = {}
    for name in names:
        if checkpoint.info(name).shape in shapes:
            (row,) = checkpoint.read([Part(name, ((0, 1),))])
            rows[name] = row.ravel()
    return rows


def copy_of(checkpoint: Checkpoint, name: str, others: Iterable[str]) -> str | None:
    """Return a tensor of the same checkpoint with the same contents, such as a tied weight.

    Parameters
    ----------
    checkpoint, name
        The tensor. Vectors are never copies, because many vectors are constant.
    others
        The tensors that may be copies.

    Returns
    -------
    str or None
        The name of the first equal tensor; None if no tensor is equal.
    """
    shape = checkpoint.info(name).shape
    if len(shape) < 2:
        return None
    has_bytes = checkpoint.raw(Part(name, ((0, 1),))) is not None
    pair = (checkpoint, checkpoint)
    for other in others:
        if checkpoint.info(other).shape != shape:
            continue
        parts = Part(name), Part(other)
        if equal_parts(pair, parts):
            return other
        # Parts without separate bytes are compared by values.
        if not has_bytes and compare_stored(pair, parts).outcome is Outcome.EQUAL:
            return other
    return None
