"""Two stored tensors, compared byte by byte, then entry by entry.

A comparison of bytes costs no more than reading them. Differing numbers are compared up to the
rounding of the coarser type. Both comparisons read the tensors in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from wqk._machine import side_by_side, usable_cores
from wqk.attention.rounding import (
    AT_ZERO,
    FEW,
    NARROWER,
    ROUNDING,
    lies_on,
    rounding_at_zero,
    rounding_in,
)
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.files import PLAIN
from wqk.errors import WqkError
from wqk.sameness.half_steps import is_coded_alone, ratio_of_scales, share_beyond_half_step
from wqk.sameness.mismatches import Kind
from wqk.sameness.tensor_comparisons import Outcome
from wqk.sameness.tolerances import FEW_BEYOND, MAJORITY, SAFETY, SAME_FACTOR

# Numbers that are read at a time.
CHUNK = 1 << 22

# A mask of the entries that differ is kept for tensors of at most this many numbers.
MASKED = 1 << 26

# Differing entries that a reason lists.
MOST_ENTRIES = 3

# Bytes to compare at a time, so that they stay in a cache.
CACHED = 1 << 21

# More pieces than this are shared by all cores.
MANY_PIECES = 8


def chunks(part: Part, info: TensorInfo, count: int = CHUNK) -> Iterator[Part]:
    """Divide a part of a tensor into pieces of at most ``count`` numbers, or into single rows."""
    if not info.shape:
        yield part
        return
    rows_at_a_time = max(1, count // max(1, math.prod(info.shape[1:])))
    for first, last in part.row_ranges(info.shape):
        for start in range(first, last, rows_at_a_time):
            yield Part(part.name, ((start, min(start + rows_at_a_time, last)),))


def chunk_pairs(
    parts: Sequence[Part], infos: Sequence[TensorInfo], count: int = CHUNK
) -> Iterator[tuple[Part, Part]]:
    """Divide two parts of tensors, of one shape, into corresponding pieces."""
    reference_part, candidate_part = parts
    reference_info, candidate_info = infos
    reference_pieces = chunks(reference_part, reference_info, count)
    candidate_pieces = chunks(candidate_part, candidate_info, count)
    return zip(reference_pieces, candidate_pieces, strict=True)


def equal_parts(
    checkpoints: Sequence[Checkpoint], parts: Sequence[Part], *, reads_numbers: bool = False
) -> bool:
    """Return whether two parts of tensors have equal types, shapes and bytes.

    Parameters
    ----------
    checkpoints, parts
        The reference and the candidate, and the part of each.
    reads_numbers
        Whether to compare the numbers of tensors that are not stored as plain bytes (quantized, or
        made of other tensors). Otherwise such tensors count as different.
    """
    infos = infos_of(checkpoints, parts)
    reference, candidate = infos
    if (reference.dtype, reference.shape) != (candidate.dtype, candidate.shape):
        return False
    if not reference.nbytes:
        return True
    row_count, *shape_of_row = reference.shape or (1,)
    rows_in_cache = CACHED * row_count // reference.nbytes
    rows_at_a_time = max(1, min(row_count, rows_in_cache))
    bytes_at_a_time = rows_at_a_time * reference.nbytes // row_count
    numbers_at_a_time = rows_at_a_time * math.prod(shape_of_row)
    pieces = list(chunk_pairs(parts, infos, numbers_at_a_time))
    is_large = len(pieces) > MANY_PIECES
    cores = usable_cores()
    pieces_by_core = [pieces[core::cores] for core in range(cores)] if is_large else [pieces]
    compare = partial(_equal_pieces, checkpoints, bytes_at_a_time, reads_numbers)
    return all(side_by_side(compare, pieces_by_core, many=is_large))


def infos_of(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> list[TensorInfo]:
    """Return the metadata of the whole tensor of each part."""
    return [checkpoint.info(part.name) for checkpoint, part in zip(checkpoints, parts, strict=True)]


def _read_pair(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> list[np.ndarray]:
    """Read a part of each checkpoint."""
    return [checkpoint.read([part])[0] for checkpoint, part in zip(checkpoints, parts, strict=True)]


def _equal_pieces(
    checkpoints: Sequence[Checkpoint],
    nbytes: int,
    reads_numbers: bool,
    pieces: Iterable[Sequence[Part]],
) -> bool:
    """Return whether pieces of at most ``nbytes`` bytes are equal.

    ``reads_numbers`` is as for `equal_parts`.
    """
    # Buffers are compared by memcmp, which is faster than NumPy.
    buffers = [bytearray(nbytes) for _ in checkpoints]
    views = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    for parts in pieces:
        expected, actual = (
            checkpoint.raw(part, view)
            for checkpoint, part, view in zip(checkpoints, parts, views, strict=True)
        )
        if reads_numbers and (expected is None or actual is None):
            expected, actual = _read_pair(checkpoints, parts)
        if expected is None or actual is None or len(expected) != len(actual):
            return False
        are_in_buffers = all(map(np.may_share_memory, (expected, actual), views))
        if are_in_buffers and len(expected) == nbytes:
            is_equal = buffers[0] == buffers[1]
        else:
            is_equal = np.array_equal(expected, actual)
        if not is_equal:
            return False
    return True


class StoredComparison(NamedTuple):
    """Result of the comparison of two stored parts.

    Attributes
    ----------
    outcome, reason
        Outcome of the comparison, and the difference as a phrase.
    distance
        ‖x − y‖ / ‖x‖, with x of the reference and y of the candidate.
    changed_entries
        Mask of the entries that differ, (n, D); None without differences, or for large tensors.
    kind
        The cause, if known from the two parts alone.
    count_changed
        Number of the entries that differ.
    """

    outcome: Outcome
    reason: str = ""
    distance: float = math.inf
    changed_entries: np.ndarray | None = None
    kind: Kind | None = None
    count_changed: int = 0


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def compare_stored(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> StoredComparison:
    """Compare two stored parts of one shape: first bytes, then entries.

    If a part cannot be read, the outcome is `Outcome.UNKNOWN`, with the error as the reason.
    """
    infos = infos_of(checkpoints, parts)
    if equal_parts(checkpoints, parts):
        return StoredComparison(Outcome.EQUAL, "", 0.0)
    comparison = _RunningComparison(infos, parts[0])
    for pieces in chunk_pairs(parts, infos):
        try:
            x, y = _read_pair(checkpoints, pieces)
        except WqkError as error:
            return StoredComparison(Outcome.UNKNOWN, str(error))
        comparison.add(x, y)
    return comparison.result()


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def compare_numbers(
    infos: Sequence[TensorInfo], expected: np.ndarray, actual: np.ndarray
) -> StoredComparison:
    """Compare two arrays of one shape entry by entry, up to the rounding of two number types.

    ``infos`` are the metadata of the reference's and of the candidate's tensor.
    """
    comparison = _RunningComparison(infos, Part("numbers"))
    if not expected.ndim:
        comparison.add(expected, actual)
        return comparison.result()
    rows_at_a_time = max(1, CHUNK // max(1, math.prod(expected.shape[1:])))
    for start in range(0, len(expected), rows_at_a_time):
        rows = slice(start, start + rows_at_a_time)
        comparison.add(expected[rows], actual[rows])
    return comparison.result()


class _RunningComparison:
    """Comparison of two arrays, x of the reference and y of the candidate, piece by piece."""

    def __init__(self, infos: Sequence[TensorInfo], reference_part: Part) -> None:
        types = [info.dtype for info in infos]
        self._infos = infos
        self._part = reference_part
        self._size = math.prod(reference_part.shape(infos[0].shape))
        self._is_plain = all(number_type in PLAIN for number_type in types)
        # The last place may differ, as after sums in another order; small sums may differ by the
        # rounding of float32.
        self._relative_rounding = 2 * max(ROUNDING.get(number_type, 0.0) for number_type in types)
        self._rounding_at_zero = 2 * max(AT_ZERO.get(number_type, 0.0) for number_type in types)
        # Types to which an array may have been rounded before it was stored.
        narrower_candidates = NARROWER.get(types[1], ())
        self._narrower_types = [
            number_type
            for number_type in NARROWER.get(types[0], ())
            if number_type in narrower_candidates
        ]
        self._rescaled = _Rescaled(infos)
        self._products = np.zeros(4)  # sums of x², xy, y² and (x − y)²
        self._rounding_square = 0.0  # part of the last sum that quantized types explain
        self._count_beyond = 0.0  # entries beyond half a step of their scale
        self._count_changed = 0  # entries that differ by more than rounding
        self._largest_change = 0.0  # of these entries, |x − y| / |x|
        self._masks: list[np.ndarray] = []  # of these entries, for each piece

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Compare a piece of both arrays."""
        step = np.abs(x - y)
        high = np.maximum(np.abs(x), np.abs(y))
        for position, (a, b) in enumerate(((x, x), (x, y), (y, y), (step, step))):
            self._products[position] += float(np.vdot(a, b))
        for info, values in zip(self._infos, (x, y), strict=True):
            if info.grid:
                squares = float(np.vdot(values, values))
                self._rounding_square += info.grid.rounding(values) ** 2 * squares
        if is_coded_alone(self._infos):
            self._count_beyond += x.size * _share_beyond(self._infos, (x, y))
        self._rescaled.add(x, y)
        self._add_changes(x, y, step, high)
        self._narrower_types = [
            number_type
            for number_type in self._narrower_types
            if _is_rounding_to(number_type, (x, y), step, high)
        ]

    def _add_changes(
        self, x: np.ndarray, y: np.ndarray, step: np.ndarray, high: np.ndarray
    ) -> None:
        """Count the entries of a piece that differ by more than rounding.

        ``step`` is |x − y|, ``high`` is max(|x|, |y|), entry by entry.
        """
        highest = float(high.max(initial=0, where=np.isfinite(high)))
        smallest = max(self._rounding_at_zero, 8 * ROUNDING["F32"] * highest)
        allowed = self._relative_rounding * high + smallest
        is_near = (step <= allowed) & (step < np.inf)
        is_nan_in_both = np.isnan(x) & np.isnan(y)
        is_changed = ~is_near & ~is_nan_in_both & (x != y)
        if self._size <= MASKED:
            self._masks.append(np.atleast_1d(is_changed))
        if is_changed.any():
            self._count_changed += int(is_changed.sum())
            values = x[is_changed]
            relative = step[is_changed] / np.where(values == 0, np.inf, np.abs(values))
            self._largest_change = max(self._largest_change, float(relative.max()))

    def result(self) -> StoredComparison:
        """Return the result for all pieces."""
        xx, _, yy, squares = self._products
        distance = math.inf if yy else 0.0
        if xx:
            distance = math.sqrt(squares / xx)
        if not self._count_changed:
            outcome = Outcome.ROUNDED if distance else Outcome.EQUAL
            return StoredComparison(outcome, "", distance)
        if self._rescaled.largest > SAME_FACTOR:
            percent = 100 * self._rescaled.largest
            reason = f"equal codes, other scales: by up to {percent:.2g} %"
            return StoredComparison(Outcome.DIFFERS, reason, distance, kind=Kind.BLOCK_SCALES)
        if not self._is_plain and distance <= SAFETY * math.sqrt(self._rounding_square / xx):
            if self._count_beyond <= FEW_BEYOND * self._size:
                return StoredComparison(Outcome.ROUNDED, "", distance)
            percent = 100 * self._count_beyond / self._size
            share = f"{percent:.2g} % of entries lie beyond half a step of their own scale"
            reason = f"{Kind.QUANTIZED}: {share}"
            return StoredComparison(Outcome.DIFFERS, reason, distance, kind=Kind.QUANTIZED)
        if self._narrower_types:
            reason = f"one side is rounded to {self._narrower_types[0]}"
            return StoredComparison(Outcome.ROUNDED, reason, distance)
        mask = self._mask()
        return StoredComparison(
            outcome=Outcome.DIFFERS,
            reason=self._reason(distance, mask),
            distance=distance,
            changed_entries=mask,
            count_changed=self._count_changed,
        )

    def _mask(self) -> np.ndarray | None:
        """Return the mask of the entries that differ, (n, D); None for a large tensor."""
        if not self._masks:
            return None
        shape = self._infos[0].shape
        columns = shape[-1] if len(shape) > 1 else 1
        return np.concatenate(self._masks).reshape(-1, columns)

    def _reason(self, distance: float, mask: np.ndarray | None) -> str:
        """Return the difference of the arrays in a phrase."""
        xx, xy, yy, _ = self._products
        if not yy:
            return "all zero"
        factor = yy / xy if xy else math.nan
        is_multiple = xx * yy - xy**2 <= (SAME_FACTOR * xy) ** 2
        are_most = self._count_changed >= MAJORITY * self._size
        # One large entry has nearly the norm of its tensor.
        if are_most and is_multiple and abs(factor - 1) > SAME_FACTOR:
            return f"scaled by {factor:.4g}"
        if are_most:
            return f"relative distance {distance:.2g}"
        verb = "differs" if self._count_changed == 1 else "differ"
        reason = f"{self._count_changed:,} of {self._size:,} entries {verb}"
        if mask is not None:
            reason += f", {self._places(mask)}"
        if self._largest_change:
            up_to = "" if self._count_changed == 1 else "up to "
            percent = 100 * self._largest_change
            digits = ".2g" if percent < 100 else ".0f"
            reason += f", by {up_to}{percent:{digits}} %"
        return reason

    def _places(self, mask: np.ndarray) -> str:
        """Return the places of a few differing entries, or of the first of many entries."""
        shape = self._part.shape(self._infos[0].shape)
        flat = np.flatnonzero(mask)[:MOST_ENTRIES]
        places = []
        for index in zip(*np.unravel_index(flat, shape or (1,)), strict=True):
            numbers = [int(number) for number in index]
            numbers[0] = self._row_of_tensor(numbers[0])
            places.append(_place_in_words(numbers))
        if self._count_changed > MOST_ENTRIES:
            return f"the first at {places[0]}"
        return " and ".join(f"at {place}" for place in places)

    def _row_of_tensor(self, row: int) -> int:
        """Return the number in the whole tensor of a row of the reference's part."""
        for start, stop in self._part.row_ranges(self._infos[0].shape):
            if row < stop - start:
                return start + row
            row -= stop - start
        return row


def _place_in_words(index: Sequence[int]) -> str:
    """Return the place of an entry in a vector, a matrix, or an array with more axes.

    Examples
    --------
    >>> _place_in_words((5, 33)), _place_in_words((7,)), _place_in_words((0, 1, 2))
    ('row 5, column 33', 'index 7', 'index [0, 1, 2]')
    """
    if len(index) == 2:
        return f"row {index[0]}, column {index[1]}"
    return f"index {index[0] if len(index) == 1 else [*index]}"


def _is_rounding_to(
    number_type: str, values: Sequence[np.ndarray], step: np.ndarray, high: np.ndarray
) -> bool:
    """Return whether one array has values of a type, and rounding to this type explains the steps.

    ``step`` is |x − y|, ``high`` is max(|x|, |y|), entry by entry of the arrays ``values``.
    """
    rounded = next(filter(partial(_has_values_of, number_type), values), None)
    if rounded is None:
        return False
    at_zero = rounding_at_zero(number_type, rounded)
    is_close = step <= 2 * ROUNDING[number_type] * high + 2 * at_zero
    return bool((is_close & (step < np.inf)).all())


def _has_values_of(number_type: str, array: np.ndarray) -> bool:
    """Return whether a type can represent all numbers of an array."""
    # The first values alone rule most types out.
    return lies_on(array.ravel()[:FEW], number_type) and lies_on(array, number_type)


def _share_beyond(infos: Sequence[TensorInfo], values: Sequence[np.ndarray]) -> float:
    """Return the share of entries beyond half a step, for a quantized and an exact tensor."""
    coded, exact = (0, 1) if infos[1].grid is None else (1, 0)
    grid = infos[coded].grid
    if grid is None:
        return 0.0
    rounding = rounding_in(infos[exact], values[exact])
    return share_beyond_half_step(values[exact], values[coded], grid.shared, rounding)


class _Rescaled:
    """Change of the scales of two quantized tensors with equal codes, piece by piece.

    Attributes
    ----------
    largest
        The largest relative change of a scale; 0 if codes differ.
    """

    def __init__(self, infos: Sequence[TensorInfo]) -> None:
        reference, candidate = infos
        self._grid = reference.grid if reference.grid == candidate.grid else None
        self.largest = 0.0

    def add(self, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Compare a piece of both tensors."""
        if self._grid is None:
            return
        factors = ratio_of_scales(reference, candidate, self._grid.shared)
        if factors is None:
            self._grid = None
            self.largest = 0.0
        else:
            self.largest = max(self.largest, float(np.abs(factors - 1).max()))


def stray_entries(mask: np.ndarray) -> int:
    """Count the changed entries in rows and columns that are mostly unchanged.

    Such entries do not come from a change of coordinates: a rotation inside a head, or a folded
    gain, changes whole rows or columns.
    """
    is_kept_row = mask.mean(axis=1) < MAJORITY
    is_kept_column = mask.mean(axis=0) < MAJORITY
    return int((mask & is_kept_row[:, None] & is_kept_column[None]).sum())
