"""Search for the change of wrong tensors outside attention.

First, whole tensors are recognized (`wqk.sameness.origins`). Then an edit of each remaining tensor
is searched for, then the rows of several tensors of one module together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from wqk.attention.rounding import AT_ZERO, ROUNDING
from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.adapters import module_of
from wqk.checkpoints.checkpoint import as_number
from wqk.errors import CheckpointError
from wqk.sameness.axis_orders import Listed, Order
from wqk.sameness.edits import (
    Edit,
    ExchangeLastAxes,
    FirstRows,
    Permute,
    Take,
    Transpose,
)
from wqk.sameness.execution import ProgramTensors, run
from wqk.sameness.matching import permutation, same_numbers
from wqk.sameness.mismatches import Kind
from wqk.sameness.origins import Origin, find_origins
from wqk.sameness.permutations import name_permutation
from wqk.sameness.repairs import Change, Exchange, Recut, Setting, Step, program
from wqk.sameness.stored_tensors import StoredComparison, compare_numbers, compare_stored
from wqk.sameness.tensor_comparisons import Outcome
from wqk.sameness.tensor_edits import (
    SIZES_WITHOUT_HEADS,
    TensorEdit,
    find_edit,
    find_scaled_rows,
    is_transposed,
)
from wqk.sameness.tensor_names import layer_prefix, title_in_block, title_in_layer
from wqk.sameness.tolerances import (
    ALIKE,
    INITIALIZER_RANGE,
    MAJORITY,
    MOST_CHANCE,
    TINY,
    UNEXPLAINED_BY_FACTORS,
)

# Tensors with more numbers are not searched for orders of rows and columns.
LARGEST = 1 << 28
# Experts and layers that a reason lists.
MOST_LISTED = 16
# Tensors of a module whose rows are searched together, at most.
TOGETHER = 4


@dataclass(frozen=True)
class TensorFinding:
    """A change of some tensors, and the steps that undo it.

    Attributes
    ----------
    kind, reason
        The cause.
    tensors
        The reference's names of the tensors.
    steps
        The steps that undo the change; empty if unknown.
    facts
        Numbers behind the reason, by name.
    """

    kind: Kind
    reason: str
    tensors: tuple[str, ...]
    steps: tuple[Step, ...] = field(default=(), hash=False)
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)


class TensorSearch:
    """Search for the causes of the candidate's wrong tensors.

    Tensors are identified by the reference's names.

    Parameters
    ----------
    checkpoints
        The reference and the candidate.
    names
        The candidate's names of the reference's tensors that the candidate has.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], names: Mapping[str, str]) -> None:
        self._reference, self._candidate = checkpoints
        self._names = names

    def has_shape(self, name: str) -> bool:
        """Return whether a tensor has the expected shape."""
        info = self._candidate.info(self._names[name])
        return info.shape == self._reference.info(name).shape

    def differs(self, name: str) -> bool:
        """Return whether a tensor of the expected shape differs from the expected tensor."""
        if not self.has_shape(name):
            return False
        checkpoints = self._reference, self._candidate
        return compare_stored(checkpoints, (Part(name), Part(self._names[name]))).outcome.differs

    def _both(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Read the expected and the actual numbers of a tensor."""
        (expected,) = self._reference.read([Part(name)])
        (actual,) = self._candidate.read([Part(self._names[name])])
        return expected, actual

    def checked(self, finding: TensorFinding) -> TensorFinding | None:
        """Run the printed lines of a finding, and compare the result with the expected tensors.

        Exchanges of more than `LARGEST` numbers are not run, because each tensor was already
        compared with its source entry by entry.

        Returns
        -------
        TensorFinding or None
            The finding, if the tensors are equal afterwards, up to the rounding of their number
            types. If they still differ, but by much less, the reason names the remaining
            difference and the finding has no steps. Otherwise None.
        """
        edited = {name for step in finding.steps for name in step.edited}
        stored = {
            name: stored_name
            for name, stored_name in self._names.items()
            if name in finding.tensors or stored_name in edited
        }
        is_stored = edited <= {*stored.values()} and stored.keys() >= {*finding.tensors}
        sizes = [math.prod(self._candidate.info(name).shape) for name in stored.values()]
        if not finding.steps or not is_stored or sum(sizes) > LARGEST:
            return finding
        expected = {
            stored_name: self._reference.read([Part(name)])[0]
            for name, stored_name in stored.items()
        }
        actual = {name: self._candidate.read([Part(name)])[0] for name in expected}
        mended = self._mended(finding, expected, actual)
        remaining: list[StoredComparison] = []
        for name, stored_name in stored.items():
            if self._is_undone(name, expected, mended, finding, actual):
                continue
            after = self._comparison(name, expected, mended)
            before = self._comparison(name, expected, actual)
            if not _explains_most(before, after, expected[stored_name].size):
                return None
            remaining.append(after)
        if not remaining:
            return finding
        largest = max(remaining, key=lambda comparison: comparison.distance)
        reason = f"{finding.reason}; besides, {largest.reason}"
        return replace(finding, reason=reason, steps=())

    def _comparison(
        self, name: str, expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]
    ) -> StoredComparison:
        """Compare a tensor in two mappings from the candidate's names to arrays."""
        stored = self._names[name]
        if expected[stored].shape != actual[stored].shape:
            return StoredComparison(Outcome.DIFFERS, "another shape")
        infos = self._reference.info(name), self._candidate.info(stored)
        return compare_numbers(infos, expected[stored], actual[stored])

    def _mended(
        self,
        finding: TensorFinding,
        expected: Mapping[str, np.ndarray],
        actual: Mapping[str, np.ndarray],
    ) -> dict[str, np.ndarray]:
        """Return the candidate's tensors, by the candidate's names, after the printed lines."""
        tensors = ProgramTensors(actual)
        config = copy.deepcopy(dict(self._candidate.config))
        run(program(finding.steps), tensors, ProgramTensors(expected), config)
        return dict(actual) | tensors.changed

    def _is_undone(
        self,
        name: str,
        expected: Mapping[str, np.ndarray],
        mended: Mapping[str, np.ndarray],
        finding: TensorFinding,
        actual: Mapping[str, np.ndarray],
    ) -> bool:
        """Return whether a tensor is equal after the printed lines of a finding.

        Rounding of the candidate's numbers may be larger afterwards than the rounding of the
        expected numbers: if 1 was added before the rounding, for example. Therefore the change of
        the result is allowed that a rounding of the candidate causes.
        """
        stored = self._names[name]
        if not self._comparison(name, expected, mended).outcome.differs:
            return True
        numbers, result = expected[stored], mended[stored]
        if numbers.shape != result.shape:
            return False
        number_type = self._candidate.info(stored).dtype
        # Numbers near zero are rounded to multiples of the smallest number of their type.
        rounding = 2 * ROUNDING.get(number_type, 0.0)
        rounding_at_zero = 2 * AT_ZERO.get(number_type, 0.0)
        numbers_of_candidate = actual[stored]
        change = rounding * numbers_of_candidate + np.copysign(
            rounding_at_zero, numbers_of_candidate
        )
        nudged = dict(actual)
        nudged[stored] = numbers_of_candidate + change.astype(numbers_of_candidate.dtype)
        allowed = np.abs(self._mended(finding, expected, nudged)[stored] - result)
        return bool((np.abs(result - numbers) <= allowed).all())

    # -- whole tensors ---------------------------------------------------------------------

    def moved_with(self, layers: Mapping[str, str]) -> Iterator[str]:
        """Yield tensors with the numbers of another layer's tensors, because the layer moved.

        ``layers`` contains the prefix of the names of each moved layer, and the prefix of its
        source.
        """
        checkpoints = self._reference, self._candidate
        stored = self._reference.tensors()
        for name, candidate_name in self._names.items():
            layer = layer_prefix(name)
            source = layers.get(layer, "") + name.removeprefix(layer)
            if layer not in layers or source not in stored:
                continue
            if stored[source].shape != self._candidate.info(candidate_name).shape:
                continue
            if compare_stored(checkpoints, (Part(source), Part(candidate_name))).outcome.same:
                yield name

    def moved(self, wrong: Sequence[str]) -> Iterator[TensorFinding]:
        """Find wrong tensors with the numbers of other tensors of the reference."""
        checkpoints = self._reference, self._candidate
        origins = find_origins(checkpoints, self._names, dict.fromkeys(wrong))
        by_group: dict[tuple[str, ...], list[Origin]] = {}
        for origin in origins.values():
            by_group.setdefault(origin.group, []).append(origin)
        for members in by_group.values():
            yield from self._moved_together(members)

    def _moved_together(self, origins: Sequence[Origin]) -> Iterator[TensorFinding]:
        """Find the cause of tensors that moved together, and the steps of the repair."""
        source_of = {origin.target: origin.source for origin in origins}
        sources = {*source_of.values()}
        is_permutation = sources == {*source_of} and len(sources) == len(source_of)
        stored_names = tuple(self._names[name] for name in source_of)
        step: Step = Change(stored_names, Take())
        if is_permutation:
            # The present content of a name belongs to the name of its source.
            targets = tuple(self._names[source] for source in source_of.values())
            step = Exchange(targets, stored_names)
        kind, reason = _reason_of(origins, is_permutation)
        yield TensorFinding(kind, reason, tuple(source_of), (step,))

    def missing(self, names: Iterable[str]) -> Iterator[TensorFinding]:
        """Find tensors that the candidate lacks, and the names that they should have there."""
        for name in names:
            stored = self._name_of_missing(name)
            if stored is not None and stored not in self._candidate.tensors():
                steps = (Change((stored,), Take()),)
                reason = f"{title_in_layer(name)}: {Kind.MISSING}"
                yield TensorFinding(Kind.MISSING, reason, (name,), steps)

    def _name_of_missing(self, name: str) -> str | None:
        """Return the candidate's name of a missing tensor, from tensors of the same module."""
        module = module_of(name)
        while module:
            for neighbor, stored in self._names.items():
                ending = neighbor.removeprefix(module)
                if neighbor.startswith(f"{module}.") and stored.endswith(ending):
                    return stored.removesuffix(ending) + name.removeprefix(module)
            module = module_of(module)
        return None

    # -- single tensors --------------------------------------------------------------------

    def edited(self, name: str) -> TensorFinding | None:
        """Find the edit that makes a tensor equal to the expected tensor."""
        if np.prod(self._reference.info(name).shape) > LARGEST:
            return None
        try:
            expected, actual = self._both(name)
        except CheckpointError:
            return None
        found_edit = (
            find_edit(expected, actual)
            or self._scaled_rows(name, expected, actual)
            or self._initialized(expected, actual)
        )
        if found_edit is None:
            return None
        steps = (Change((self._names[name],), found_edit.edit),)
        reason = f"{title_in_layer(name)}: {found_edit.description}"
        return TensorFinding(found_edit.kind, reason, (name,), steps, found_edit.facts)

    def _scaled_rows(
        self, name: str, expected: np.ndarray, actual: np.ndarray
    ) -> TensorEdit | None:
        """Find scaled rows or columns, if nothing else differs: not those of a changed entry."""
        found_edit = find_scaled_rows(expected, actual)
        if found_edit is None:
            return None
        infos = self._reference.info(name), self._candidate.info(self._names[name])
        remaining = compare_numbers(infos, expected, found_edit.edit.apply(actual))
        return None if remaining.outcome.differs else found_edit

    def _initialized(self, expected: np.ndarray, actual: np.ndarray) -> TensorEdit | None:
        """Find a tensor that still has the random values of an untrained model."""
        start = as_number(self._candidate.config.get("initializer_range", INITIALIZER_RANGE))
        if not (np.isfinite(expected).all() and np.isfinite(actual).all()):
            return None
        expected_deviation, actual_deviation = float(expected.std()), float(actual.std())
        # A share of the deviation that a random start exceeds once in a million times.
        chance = 5 / math.sqrt(2 * actual.size)
        if not start or chance > MOST_CHANCE or abs(actual_deviation / start - 1) > chance:
            return None
        product = float(np.vdot(expected - expected.mean(), actual))
        cosine = product / (actual.size * expected_deviation * actual_deviation or TINY)
        has_equal_deviation = abs(expected_deviation / actual_deviation - 1) < MOST_CHANCE
        is_related = abs(cosine) > 5 / math.sqrt(actual.size)
        if has_equal_deviation or is_related:
            return None
        description = (
            f"left as initialized? (standard deviation {actual_deviation:.2g}, as the "
            f"configuration starts with; the reference's is {expected_deviation:.2g})"
        )
        return TensorEdit(Kind.INITIALIZED, description, Take())

    # -- rows of several tensors -----------------------------------------------------------

    def recut(self, wrong: Iterable[str]) -> Iterator[TensorFinding]:
        """Find joined tensors of a module that were cut at wrong rows or columns."""
        modules: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name in wrong:
            shape = self._reference.info(name).shape
            if len(shape) == 2 and np.prod(shape) <= LARGEST:
                module = module_of(module_of(name))
                modules.setdefault((module, shape[1:]), []).append(name)
        for members in modules.values():
            if 1 < len(members) <= TOGETHER:
                yield from self._recut_together(members)

    def _recut_together(self, names: Sequence[str]) -> Iterator[TensorFinding]:
        """Find the order of the rows of several tensors, joined to one array."""
        arrays = [self._both(name) for name in names]
        expected = np.concatenate([reference for reference, _ in arrays])
        actual = np.concatenate([candidate for _, candidate in arrays])
        order = permutation(expected, actual, ALIKE)
        if order is None:
            return
        rows: Order = Listed(tuple(order.tolist()))
        named = name_permutation(order, SIZES_WITHOUT_HEADS)
        if named is not None and isinstance(named.edit, Permute):
            rows = named.edit.order
        stored = tuple(self._names[name] for name in names)
        lengths = tuple(len(reference) for reference, _ in arrays)
        titles = " and ".join(map(title_in_layer, names))
        pieces = 1 + int((np.diff(order) != 1).sum())
        reason = (
            f"rows of {titles} lie in another order: in {pieces} pieces, as if shards had been "
            "joined without being taken apart"
        )
        yield TensorFinding(Kind.ROWS, reason, tuple(names), (Recut(stored, lengths, rows),))

    # -- shapes ----------------------------------------------------------------------------

    def resized(self, name: str) -> TensorFinding | None:
        """Find the cause of a tensor with another shape under its name."""
        expected, actual = self._both(name)
        if is_transposed(expected, actual):
            edit: Edit = Transpose() if expected.ndim == 2 else ExchangeLastAxes()
            shapes = f"{actual.shape} instead of {expected.shape}"
            reason = f"{title_in_layer(name)}: stored transposed, {shapes}"
            steps = (Change((self._names[name],), edit),)
            return TensorFinding(Kind.TRANSPOSED, reason, (name,), steps)
        if not expected.ndim or expected.shape[1:] != actual.shape[1:]:
            return None
        count = min(len(expected), len(actual))
        if not count or not same_numbers(expected[:count], actual[:count]):
            return None
        return self._with_other_rows(name, len(expected), actual)

    def _with_other_rows(self, name: str, expected: int, actual: np.ndarray) -> TensorFinding:
        """Return the finding of a tensor with more or fewer rows than expected.

        Parameters
        ----------
        name
            The tensor.
        expected
            The expected number of rows.
        actual
            The candidate's tensor.
        """
        count = min(expected, len(actual))
        counts = f"{len(actual)} rows instead of {expected}, the first {count} equal"
        edit: Edit = Take()
        if len(actual) > count:
            counts += f", the others {_description_of_rows(actual[:count], actual[count:])}"
            edit = FirstRows(count)
        steps: tuple[Step, ...] = (Change((self._names[name],), edit),)
        vocabulary = self._reference.config.get("vocab_size")
        if expected != vocabulary:
            return TensorFinding(Kind.RESIZED, f"{title_in_layer(name)}: {counts}", (name,), steps)
        if self._candidate.config.get("vocab_size") != vocabulary:
            steps = (Setting(("vocab_size",), vocabulary), *steps)
        return TensorFinding(Kind.RESIZED, f"resized vocabulary: {counts}", (name,), steps)


def _explains_most(before: StoredComparison, after: StoredComparison, size: int) -> bool:
    """Return whether an edit removes most of a difference that it does not remove completely.

    An edit of a tensor with few differing entries must leave fewer: one large entry alone has
    nearly the norm of its row.

    Parameters
    ----------
    before, after
        The comparisons of the tensor before and after the edit.
    size
        Number of entries.
    """
    is_nearer = after.distance <= UNEXPLAINED_BY_FACTORS * before.distance
    if before.distance < math.inf and before.count_changed < MAJORITY * size:
        return is_nearer and after.count_changed <= before.count_changed / 2
    return is_nearer and after.distance < math.inf


def _reason_of(origins: Sequence[Origin], is_permutation: bool) -> tuple[Kind, str]:
    """Return the kind and the reason of tensors that moved together."""
    first = origins[0]
    if first.differing_words is not None:
        return Kind.TENSOR, _move_of(*first.differing_words, is_permutation)
    if first.of_experts:
        kind = Kind.EXPERTS if is_permutation else Kind.COPIES
        title = "experts copied from others"
        if is_permutation:
            title = f"{Kind.EXPERTS} than their router's"
        return kind, f"{title} ({_titles(origins)}): {_moves(origins, '{} holds {}')}"
    if first.of_layers:
        moves = _moves(origins, "layer {} has those of layer {}")
        return Kind.LAYER, f"{Kind.LAYER} ({_titles(origins)}): {moves}"
    target, source = title_in_block(first.target), title_in_block(first.source)
    if is_permutation:
        return Kind.TENSOR, f"{target} and {source} have changed places"
    return Kind.TENSOR, f"{target} holds {source} of the original"


def _move_of(target: str, source: str, is_permutation: bool) -> str:
    """Return the reason of moved tensors whose names differ in some words."""
    if is_permutation:
        first, last = sorted([target, source])
        return f"{first} and {last} have changed places"
    return f"{target} holds {source} of the original"


def _titles(origins: Sequence[Origin]) -> str:
    """Return the titles of moved tensors, without repetitions."""
    return ", ".join(dict.fromkeys(title_in_layer(origin.target) for origin in origins))


def _moves(origins: Sequence[Origin], phrase: str) -> str:
    """Return a phrase about the first moved experts or layers, with targets and sources."""
    numbers = [origin.differing_number for origin in origins]
    moves = sorted({(number.target, number.source) for number in numbers if number is not None})
    phrases = [phrase.format(target, source) for target, source in islice(moves, MOST_LISTED)]
    if len(moves) > MOST_LISTED:
        phrases.append("…")
    return ", ".join(phrases)


def _description_of_rows(first: np.ndarray, added: np.ndarray) -> str:
    """Describe rows that were added to a table, in a few words."""
    if not added.any():
        return "all zero (padding)"
    if np.ptp(added, axis=0).max() > 0:
        return "new"
    is_mean = same_numbers(first.mean(axis=0), added[0])
    return "the mean of the first" if is_mean else "all equal"
