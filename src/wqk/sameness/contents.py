"""Tensors compared as they are stored, and found by their contents where names differ.

Equal bytes under one name are compared first, which costs no more than reading the bytes. Different
numbers are compared entry by entry, up to the rounding of the coarser of two types. If the other
checkpoint has no tensor of a name, the tensor is searched by its rows, then by its columns: each
row has a key, a hash of its numbers rounded to the coarsest type. Fused, split, transposed, renamed
and re-typed tensors have the same keys. The memory needed is that of a few million numbers and of
a key for each row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

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
from wqk.sameness.tolerances import DIFFERENT, FEW_BEYOND, MOST, SAFETY, SAME_FACTOR

# Numbers that are read at a time.
CHUNK = 1 << 22
# A mask of the entries that differ is kept for tensors of at most this many numbers.
MASKED = 1 << 26
# Bytes that are compared at a time, which stay in a cache.
CACHED = 1 << 21
# More pieces than this are shared by all cores.
MANY = 8
# Numbers of layers and experts in names.
NUMBERS = re.compile(r"\.\d+\.")
# Beginnings of the names of a layer's tensors: in the reference, and in the candidate.
LayerPrefixes = tuple[str, str]
# Prefixes that wrappers put before a name.
WRAPPERS = re.compile(r"^(?:(?:module|model|_orig_mod|base_model)\.)+")


# Roles of tensors outside the forms.
ATTENTION, MIXER, OTHER = "attention", "mixer", "other"


class Outcome(StrEnum):
    """Outcome of the comparison of two tensors."""

    EQUAL = "equal"
    ROUNDED = "equal up to rounding"
    FOUND = "equal, stored otherwise"
    DIFFERS = "differs"
    MISSING = "only in the reference"
    ADDED = "only in the candidate"
    UNKNOWN = "not compared"

    @property
    def same(self) -> bool:
        """True if the tensors were compared and are equal."""
        return self in (Outcome.EQUAL, Outcome.ROUNDED, Outcome.FOUND)

    @property
    def differs(self) -> bool:
        """True if the tensors were compared and are not equal."""
        return not self.same and self is not Outcome.UNKNOWN


@dataclass(frozen=True)
class TensorComparison:
    """A tensor of the reference next to the same tensor of the candidate.

    Attributes
    ----------
    name, other
        Name in the reference, and in the candidate; empty where the checkpoint has no such tensor.
    outcome
        Outcome of the comparison.
    reason
        The difference, or the place of the tensor, in a phrase.
    role
        ``attention``, ``mixer`` or ``other``.
    distance
        ‖a − b‖ / ‖a‖; infinite where the tensors were not compared.
    kind
        The cause, where the two tensors alone show the cause.
    """

    name: str
    other: str
    outcome: Outcome
    reason: str = ""
    role: str = "other"
    distance: float = math.inf
    kind: Kind | None = None

    @property
    def title(self) -> str:
        """The name in the reference, or else in the candidate."""
        return self.name or self.other

    def __str__(self) -> str:
        return f"{self.title}: {self.reason or self.outcome}"


def paired_names(
    reference: Mapping[str, TensorInfo],
    candidate: Mapping[str, TensorInfo],
    example: tuple[str, str] | None = None,
) -> dict[str, str]:
    """Names in the candidate of the reference's tensors, as far as the names agree.

    Prefixes of wrappers are ignored. With an ``example``, a tensor's name in each checkpoint, the
    prefix of the longer name is ignored, too.

    Examples
    --------
    >>> paired_names({"model.norm.weight": ...}, {"norm.weight": ...})
    {'model.norm.weight': 'norm.weight'}
    """
    pairs = {name: name for name in reference if name in candidate}
    shortenings: list[Callable[[str], str]] = [lambda name: WRAPPERS.sub("", name)]
    if example is not None:
        short, long = sorted(example, key=len)
        if long.endswith(short):
            prefix = long.removesuffix(short)
            shortenings.append(lambda name: name.removeprefix(prefix))
    for shorten in shortenings:
        paired = set(pairs.values())
        candidate_names: dict[str, str] = {}
        for name in candidate:
            if name not in paired:
                candidate_names.setdefault(shorten(name), name)
        for name in reference:
            shortened = shorten(name)
            if name not in pairs and shortened in candidate_names:
                pairs[name] = candidate_names[shortened]
    return pairs


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
    """Divide two parts of one shape into corresponding pieces."""
    first, second = (chunks(part, info, count) for part, info in zip(parts, infos, strict=True))
    return zip(first, second, strict=True)


def equal_parts(
    checkpoints: Sequence[Checkpoint], parts: Sequence[Part], *, reads_numbers: bool = False
) -> bool:
    """Return whether a part of each of two checkpoints has one type, one shape, and equal bytes.

    Parameters
    ----------
    checkpoints, parts
        The reference and the candidate, and the part of each.
    reads_numbers
        Whether tensors that are not stored as plain bytes (quantized, or made of other tensors) are
        read, and compared by their numbers. Otherwise they count as different.
    """
    infos = infos_of(checkpoints, parts)
    reference, candidate = infos
    if (reference.dtype, reference.shape) != (candidate.dtype, candidate.shape):
        return False
    if not reference.nbytes:
        return True
    row_count, *shape_of_row = reference.shape or (1,)
    rows_at_a_time = max(1, min(row_count, CACHED * row_count // reference.nbytes))
    bytes_at_a_time = rows_at_a_time * reference.nbytes // row_count
    pieces = list(chunk_pairs(parts, infos, rows_at_a_time * math.prod(shape_of_row)))
    is_large = len(pieces) > MANY
    cores = usable_cores()
    pieces_by_core = [pieces[core::cores] for core in range(cores)] if is_large else [pieces]
    compare = partial(_equal_pieces, checkpoints, bytes_at_a_time, reads_numbers)
    return all(side_by_side(compare, pieces_by_core, many=is_large))


def infos_of(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> list[TensorInfo]:
    """Return the metadata of the whole tensor that each part belongs to."""
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
    """Return whether pieces of at most ``nbytes`` bytes are equal, as `equal_parts` has it."""
    buffers = [bytearray(nbytes) for _ in checkpoints]  # compared by memcmp
    views = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
    for parts in pieces:
        a, b = (
            checkpoint.raw(part, view)
            for checkpoint, part, view in zip(checkpoints, parts, views, strict=True)
        )
        if reads_numbers and (a is None or b is None):
            a, b = _read_pair(checkpoints, parts)
        if a is None or b is None or len(a) != len(b):
            return False
        fills_buffers = len(a) == nbytes and all(map(np.may_share_memory, (a, b), views))
        is_equal = buffers[0] == buffers[1] if fills_buffers else np.array_equal(a, b)
        if not is_equal:
            return False
    return True


class StoredComparison(NamedTuple):
    """Result of the comparison of two stored parts.

    Attributes
    ----------
    outcome, reason
        Outcome of the comparison, and the difference in a phrase.
    distance
        ‖a − b‖ / ‖a‖.
    changed_entries
        Mask of the entries that differ, (n, D); None without differences, or for large tensors.
    kind
        The cause, where the two parts alone show the cause.
    """

    outcome: Outcome
    reason: str = ""
    distance: float = math.inf
    changed_entries: np.ndarray | None = None
    kind: Kind | None = None


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def compare_stored(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> StoredComparison:
    """Compare two parts of one shape entry by entry."""
    infos = infos_of(checkpoints, parts)
    if equal_parts(checkpoints, parts):
        return StoredComparison(Outcome.EQUAL, "", 0.0)
    comparison = _RunningComparison(infos, math.prod(parts[0].shape(infos[0].shape)))
    for pieces in chunk_pairs(parts, infos):
        try:
            x, y = _read_pair(checkpoints, pieces)
        except WqkError as error:
            return StoredComparison(Outcome.UNKNOWN, str(error))
        comparison.add(x, y)
    return comparison.result()


class _RunningComparison:
    """Comparison of two arrays, x of the reference and y of the candidate, piece by piece."""

    def __init__(self, infos: Sequence[TensorInfo], size: int) -> None:
        types = [info.dtype for info in infos]
        self._infos = infos
        self._size = size
        self._is_plain = all(number_type in PLAIN for number_type in types)
        # The last place may differ, as after sums in another order; small sums may differ by the
        # rounding of float32.
        self._unit = 2 * max(ROUNDING.get(number_type, 0.0) for number_type in types)
        self._smallest = 2 * max(AT_ZERO.get(number_type, 0.0) for number_type in types)
        # Types that one side may have been rounded to before it was stored.
        candidates = NARROWER.get(types[1], ())
        self._narrower = [kind for kind in NARROWER.get(types[0], ()) if kind in candidates]
        self._rescaled = _Rescaled(infos)
        self._products = np.zeros(4)  # sums of x², xy, y² and (x − y)²
        self._expected = 0.0  # share of the last sum that rounding to quantized types explains
        self._beyond = 0.0  # entries beyond half a step of their scale
        self._changed = 0  # entries that differ by more than rounding
        self._largest_change = 0.0  # of these entries, relative
        self._masks: list[np.ndarray] = []

    def add(self, x: np.ndarray, y: np.ndarray) -> None:
        """Compare a piece of both arrays."""
        step = np.abs(x - y)
        high = np.maximum(np.abs(x), np.abs(y))
        for position, (a, b) in enumerate(((x, x), (x, y), (y, y), (step, step))):
            self._products[position] += float(np.vdot(a, b))
        for info, values in zip(self._infos, (x, y), strict=True):
            if info.grid:
                squares = float(np.vdot(values, values))
                self._expected += info.grid.rounding(values) ** 2 * squares
        if is_coded_alone(self._infos):
            self._beyond += x.size * _share_beyond(self._infos, (x, y))
        self._rescaled.add(x, y)
        self._add_changes(x, y, step, high)
        self._narrower = [
            number_type
            for number_type in self._narrower
            if _is_rounding_to(number_type, (x, y), step, high)
        ]

    def _add_changes(
        self, x: np.ndarray, y: np.ndarray, step: np.ndarray, high: np.ndarray
    ) -> None:
        """Count the entries of a piece that differ by more than rounding."""
        highest = float(high.max(initial=0, where=np.isfinite(high)))
        smallest = max(self._smallest, 8 * ROUNDING["F32"] * highest)
        is_near = (step <= self._unit * high + smallest) & (step < np.inf)
        is_nan = np.isnan(x) & np.isnan(y)
        is_changed = ~is_near & ~is_nan & (x != y)
        if self._size <= MASKED:
            self._masks.append(np.atleast_1d(is_changed))
        if is_changed.any():
            self._changed += int(is_changed.sum())
            values = x[is_changed]
            relative = step[is_changed] / np.where(values == 0, np.inf, np.abs(values))
            self._largest_change = max(self._largest_change, float(relative.max()))

    def result(self) -> StoredComparison:
        """Return the result for all pieces."""
        xx, _, yy, squares = self._products
        distance = math.inf if yy else 0.0
        if xx:
            distance = math.sqrt(squares / xx)
        if not self._changed:
            return StoredComparison(Outcome.ROUNDED if distance else Outcome.EQUAL, "", distance)
        if self._rescaled.largest > SAME_FACTOR:
            percent = 100 * self._rescaled.largest
            reason = f"equal codes, other scales: by up to {percent:.2g} %"
            return StoredComparison(Outcome.DIFFERS, reason, distance, kind=Kind.BLOCK_SCALES)
        if not self._is_plain and distance <= SAFETY * math.sqrt(self._expected / xx):
            if self._beyond <= FEW_BEYOND * self._size:
                return StoredComparison(Outcome.ROUNDED, "", distance)
            percent = 100 * self._beyond / self._size
            share = f"{percent:.2g} % of entries lie beyond half a step of their own scale"
            reason = f"{Kind.QUANTIZED}: {share}"
            return StoredComparison(Outcome.DIFFERS, reason, distance, kind=Kind.QUANTIZED)
        if self._narrower:
            reason = f"one side is rounded to {self._narrower[0]}"
            return StoredComparison(Outcome.ROUNDED, reason, distance)
        mask = self._mask()
        return StoredComparison(Outcome.DIFFERS, self._reason(distance, mask), distance, mask)

    def _mask(self) -> np.ndarray | None:
        """Mask of the entries that differ, (n, D); None for a large tensor."""
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
        if is_multiple and abs(factor - 1) > SAME_FACTOR:
            return f"scaled by {factor:.4g}"
        if self._changed >= MOST * self._size:
            return f"relative distance {distance:.2g}"
        reason = f"{self._changed} of {self._size} entries differ"
        if mask is not None:
            reason += f", the first in row {int(mask.any(axis=1).argmax())}"
        if self._largest_change:
            reason += f", by up to {100 * self._largest_change:.2g} %"
        return reason


def _is_rounding_to(
    number_type: str, values: Sequence[np.ndarray], step: np.ndarray, high: np.ndarray
) -> bool:
    """Return whether one array has values of a type, and rounding to the type explains the steps.

    ``step`` are the distances of the entries of the two arrays, ``high`` the larger magnitudes.
    """
    # The first values alone rule most types out.
    rounded = next(
        (
            array
            for array in values
            if lies_on(array.ravel()[:FEW], number_type) and lies_on(array, number_type)
        ),
        None,
    )
    if rounded is None:
        return False
    at_zero = rounding_at_zero(number_type, rounded)
    is_close = step <= 2 * ROUNDING[number_type] * high + 2 * at_zero
    return bool((is_close & (step < np.inf)).all())


def _share_beyond(infos: Sequence[TensorInfo], values: Sequence[np.ndarray]) -> float:
    """Share of entries beyond half a step, of a quantized tensor next to an exact tensor."""
    coded, exact = (0, 1) if infos[1].grid is None else (1, 0)
    grid = infos[coded].grid
    if grid is None:
        return 0.0
    rounding = rounding_in(infos[exact], values[exact])
    return share_beyond_half_step(values[exact], values[coded], grid.shared, rounding)


class _Rescaled:
    """Change of the scales of two quantized tensors, as long as their codes are equal."""

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

    A change of coordinates, such as a rotation inside a head or a gain that was folded, changes
    whole rows or whole columns.
    """
    is_kept_row = mask.mean(axis=1) < MOST
    is_kept_column = mask.mean(axis=0) < MOST
    return int((mask & is_kept_row[:, None] & is_kept_column[None]).sum())


# -- by content --------------------------------------------------------------------------------


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """Map whole numbers to pseudorandom ones, uint64 (the finalizer of SplitMix64)."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _codes(values: np.ndarray, number_type: str) -> np.ndarray:
    """Round numbers to a type, and return them as whole numbers; −0 becomes 0."""
    single = values.astype(np.float32) + np.float32(0)
    if number_type == "F16":
        with np.errstate(over="ignore"):
            single = single.astype(np.float16).astype(np.float32)
    bits = single.view(np.uint32)
    if number_type == "BF16":
        even = (bits >> np.uint32(16)) & np.uint32(1)
        bits = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    return bits.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(7)


def _pieces_of_codes(checkpoint: Checkpoint, name: str, number_type: str) -> Iterator[np.ndarray]:
    """Yield the codes of a tensor in pieces, (rows, columns)."""
    info = checkpoint.info(name)
    for piece in chunks(Part(name), info):
        (values,) = checkpoint.read([piece])
        columns = info.shape[-1] if len(info.shape) > 1 else values.size
        yield _codes(values.reshape(-1, columns), number_type)


def _row_keys(checkpoint: Checkpoint, name: str, number_type: str) -> np.ndarray:
    """Return a key for each row of a tensor."""
    keys = []
    for codes in _pieces_of_codes(checkpoint, name, number_type):
        multipliers = _scrambled(np.arange(codes.shape[1]))
        keys.append((codes * multipliers).sum(axis=1, dtype=np.uint64))
    return np.concatenate(keys)


def _column_keys(checkpoint: Checkpoint, name: str, number_type: str) -> np.ndarray:
    """Return a key for each column of a tensor, equal to the key of a row of the same numbers."""
    sums: Any = np.uint64(0)
    start = 0
    for codes in _pieces_of_codes(checkpoint, name, number_type):
        multipliers = _scrambled(np.arange(start, start + len(codes)))
        sums = sums + (codes * multipliers[:, None]).sum(axis=0, dtype=np.uint64)
        start += len(codes)
    return np.asarray(sums)


def find_by_content(
    checkpoints: Sequence[Checkpoint],
    reference_names: Sequence[str],
    candidate_names: Sequence[str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Places of the tensors of either checkpoint in the other, by name, as far as found.

    A tensor is found if the other checkpoint contains all of its rows, or all of its columns, in
    their order: alone under another name, fused with others, split, or transposed.
    """
    infos = [
        _infos_with_keys(checkpoint, names)
        for checkpoint, names in zip(checkpoints, (reference_names, candidate_names), strict=True)
    ]
    places: tuple[dict[str, str], dict[str, str]] = ({}, {})
    reference_infos, candidate_infos = infos
    if not reference_infos or not candidate_infos:
        return places
    types = {info.dtype for info in (*reference_infos.values(), *candidate_infos.values())}
    coarsest = next((number_type for number_type in reversed(PLAIN) if number_type in types), "F32")
    row_keys = {name: _row_keys(checkpoints[0], name, coarsest) for name in reference_infos}
    for keys_of, prefix in ((_row_keys, ""), (_column_keys, "transposed, ")):
        reference_left = [name for name in reference_infos if name not in places[0]]
        candidate_left = [name for name in candidate_infos if name not in places[1]]
        if not reference_left or not candidate_left:
            break
        index = _RowIndex({name: row_keys[name] for name in reference_left})
        covered = {name: np.zeros(len(row_keys[name]), bool) for name in reference_left}
        for name in candidate_left:
            if keys_of is _column_keys and len(candidate_infos[name].shape) != 2:
                continue
            rows_by_source = index.origins(keys_of(checkpoints[1], name, coarsest))
            if rows_by_source is None:
                continue
            places[1][name] = f"{prefix}in {', '.join(rows_by_source)}"
            for source, rows in rows_by_source.items():
                covered[source][rows] = True
                if covered[source].all():
                    places[0][source] = f"{prefix}in {name}"
    _find_vectors(checkpoints, infos, places)
    return places


def find_by_layer(
    checkpoints: Sequence[Checkpoint],
    names: Sequence[Collection[str]],
    layers: Sequence[LayerPrefixes],
) -> tuple[dict[str, str], dict[str, str]]:
    """Places of the tensors of either checkpoint in the other, as of `find_by_content`.

    A tensor of a layer is searched for in the same layer of the other checkpoint, and among the
    tensors of no layer: in another layer, equal numbers are a mistake.

    Parameters
    ----------
    names
        The names of the tensors of each checkpoint.
    layers
        Beginnings of the names of a layer's tensors, in the reference and in the candidate.
    """
    places: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for names_to_find in _searches(names, layers):
        names_left = [
            [name for name in names_of_side if name not in place_by_name]
            for names_of_side, place_by_name in zip(names_to_find, places, strict=True)
        ]
        if all(names_left):
            further_places = find_by_content(checkpoints, *names_left)
            for place_by_name, further in zip(places, further_places, strict=True):
                place_by_name.update(further)
    return places


def _searches(
    names: Sequence[Collection[str]], layers: Sequence[LayerPrefixes]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names that are searched for in each other: layer by layer, then those of no layer.

    Without layers, all names are searched for at once.
    """
    reference_outside, candidate_outside = map(list, names)
    for reference_prefix, candidate_prefix in layers:
        reference_layer, reference_outside = _parted(reference_outside, reference_prefix)
        candidate_layer, candidate_outside = _parted(candidate_outside, candidate_prefix)
        yield reference_layer, candidate_layer
    reference_names, candidate_names = map(list, names)
    yield reference_outside, candidate_names
    if layers:
        yield reference_names, candidate_outside


def _parted(names: Iterable[str], prefix: str) -> tuple[list[str], list[str]]:
    """Return the names that begin with a prefix, and the names that do not."""
    all_names = list(names)
    with_prefix = [name for name in all_names if name.startswith(prefix)]
    without_prefix = [name for name in all_names if not name.startswith(prefix)]
    return with_prefix, without_prefix


def _infos_with_keys(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, TensorInfo]:
    """Return the metadata of the tensors whose rows have keys: those of plain number types."""
    infos = {name: checkpoint.info(name) for name in names}
    return {name: info for name, info in infos.items() if info.dtype in (*PLAIN, "F8_E4M3")}


class _RowIndex:
    """Index of the rows of many tensors by their keys."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._names = list(tensors)
        counts = [len(keys) for keys in tensors.values()]
        keys = np.concatenate(list(tensors.values()))
        tensor = np.repeat(np.arange(len(tensors)), counts)
        row = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._tensor = tensor[order]
        self._row = row[order]
        self._is_taken = np.zeros(len(keys), bool)

    def origins(self, keys: np.ndarray) -> dict[str, np.ndarray] | None:
        """Rows with these keys, by tensor; None if a key is unknown, or rows are out of order."""
        low = np.searchsorted(self._keys, keys, "left")
        high = np.searchsorted(self._keys, keys, "right")
        if (low == high).any():
            return None
        entries = low.copy()
        for position in np.flatnonzero(high - low > 1):
            previous = entries[position - 1] if position else None
            entries[position] = self._choose(np.arange(low[position], high[position]), previous)
        tensor = self._tensor[entries]
        row = self._row[entries]
        rows_by_name = {}
        for number in np.unique(tensor):
            rows = row[tensor == number]
            if (np.diff(rows) <= 0).any():
                return None
            rows_by_name[self._names[number]] = rows
        self._is_taken[entries] = True
        return rows_by_name

    def _choose(self, options: np.ndarray, previous: int | None) -> int:
        """Choose among equal rows: the row after the previous one, or a row not yet taken."""
        preference = (~self._is_taken[options]).astype(int)
        if previous is not None:
            is_same_tensor = self._tensor[options] == self._tensor[previous]
            is_next_row = self._row[options] == self._row[previous] + 1
            preference += 2 * (is_same_tensor & is_next_row)
        return int(options[np.argmax(preference)])


def _find_vectors(
    checkpoints: Sequence[Checkpoint],
    infos: Sequence[dict[str, TensorInfo]],
    places: tuple[dict[str, str], dict[str, str]],
) -> None:
    """Find vectors that are parts of longer vectors, such as the biases of fused weights."""
    vectors: list[dict[str, np.ndarray]] = []
    for checkpoint, infos_by_name, place_by_name in zip(checkpoints, infos, places, strict=True):
        names = [
            name
            for name, info in infos_by_name.items()
            if name not in place_by_name and len(info.shape) == 1
        ]
        vectors.append({name: checkpoint.read([Part(name)])[0].reshape(-1) for name in names})
    for long, short in ((1, 0), (0, 1)):
        for name, vector in vectors[long].items():
            lengths = {
                part_name: len(part)
                for part_name, part in vectors[short].items()
                if _contains(vector, part)
            }
            if lengths and sum(lengths.values()) == len(vector):
                places[long][name] = f"in {', '.join(lengths)}"
                places[short].update(dict.fromkeys(lengths, f"in {name}"))


def _contains(vector: np.ndarray, part: np.ndarray) -> bool:
    """Return whether a vector contains a shorter vector that is not constant."""
    if not 0 < len(part) < len(vector) or not np.ptp(part):
        return False
    starts = np.flatnonzero(vector[: len(vector) - len(part) + 1] == part[0])
    return any(np.array_equal(vector[start : start + len(part)], part) for start in starts)


# -- all tensors -------------------------------------------------------------------------------


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
    roles
        For each checkpoint, the role of each tensor that is compared.
    names
        Names in the candidate of the reference's tensors, as far as names agree.
    strict
        Whether a tensor that is not found is a difference; otherwise the tensor is not compared.
    layers
        Beginnings of the names of a layer's tensors, in the reference and in the candidate.
    """
    reference, candidate = checkpoints
    names = dict(names) | _names_by_first_rows(checkpoints, roles, names)
    comparisons: list[TensorComparison] = []
    reference_left: list[str] = []
    for name, role in roles[0].items():
        other = names.get(name)
        if other is None or reference.info(name).shape != candidate.info(other).shape:
            reference_left.append(name)
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
    matched = {comparison.other for comparison in comparisons}
    candidate_left = [name for name in roles[1] if name not in matched]
    equal = [comparison for comparison in comparisons if comparison.outcome.same]
    places: tuple[dict[str, str], dict[str, str]] = ({}, {})
    if reference_left and candidate_left:
        places = find_by_layer(checkpoints, (reference_left, candidate_left), layers)

    unmatched = _Unmatched(reference, places[0], [pair.name for pair in equal], strict)
    for name in reference_left:
        outcome, reason = unmatched.outcome(name, Outcome.MISSING)
        comparisons.append(TensorComparison(name, "", outcome, reason, roles[0][name]))
    unmatched = _Unmatched(candidate, places[1], [pair.other for pair in equal], strict)
    for name in candidate_left:
        outcome, reason = unmatched.outcome(name, Outcome.ADDED)
        comparisons.append(TensorComparison("", name, outcome, reason, roles[1][name]))
    return comparisons


class _Unmatched(NamedTuple):
    """Tensors of one checkpoint that no tensor of the other checkpoint matches by name.

    Attributes
    ----------
    checkpoint
        The checkpoint.
    places
        Places in the other checkpoint, by name, of the tensors that were found by contents.
    equal
        Tensors of the checkpoint that are equal to tensors of the other checkpoint.
    strict
        Whether a tensor that is not found is a difference.
    """

    checkpoint: Checkpoint
    places: Mapping[str, str]
    equal: Sequence[str]
    strict: bool

    def outcome(self, name: str, lost: Outcome) -> tuple[Outcome, str]:
        """Return the outcome for a tensor, and the reason; ``lost`` if it is nowhere."""
        if name in self.places:
            return Outcome.FOUND, self.places[name]
        copied = copy_of(self.checkpoint, name, self.equal)
        if copied is None:
            if self.strict:
                return lost, ""
            return Outcome.UNKNOWN, "not found in the other under any name"
        # Layers may share weights, or may be copies at the start of training.
        is_of_one_layer = NUMBERS.findall(name) == NUMBERS.findall(copied)
        return (Outcome.FOUND if is_of_one_layer else Outcome.UNKNOWN), f"a copy of {copied}"


def _names_by_first_rows(
    checkpoints: Sequence[Checkpoint], roles: Sequence[Iterable[str]], names: Mapping[str, str]
) -> dict[str, str]:
    """Pair tensors of different names by their first rows, up to the error of quantization."""
    unnamed = (
        [name for name in roles[0] if name not in names],
        [name for name in roles[1] if name not in {*names.values()}],
    )
    infos = [
        {name: checkpoint.info(name) for name in names_left}
        for checkpoint, names_left in zip(checkpoints, unnamed, strict=True)
    ]
    quantized_shapes = set()
    for infos_by_name in infos:
        quantized_shapes |= {info.shape for info in infos_by_name.values() if info.grid}
    rows: list[dict[str, np.ndarray]] = []
    for checkpoint, infos_by_name in zip(checkpoints, infos, strict=True):
        compared = [name for name, info in infos_by_name.items() if info.shape in quantized_shapes]
        rows.append(
            {name: checkpoint.read([Part(name, ((0, 1),))])[0].ravel() for name in compared}
        )
    reference_rows, candidate_rows = rows
    pairs: dict[str, str] = {}
    for name, row in reference_rows.items():
        shape = infos[0][name].shape
        distances = {
            other: np.linalg.norm(row - candidate_row)
            for other, candidate_row in candidate_rows.items()
            if infos[1][other].shape == shape
        }
        nearest = min(distances, key=distances.__getitem__, default="")
        if nearest and distances[nearest] <= DIFFERENT * np.linalg.norm(row):
            pairs[name] = nearest
            del candidate_rows[nearest]
    return pairs


def copy_of(checkpoint: Checkpoint, name: str, others: Iterable[str]) -> str | None:
    """Find a tensor of the same checkpoint with the same contents, such as a tied weight."""
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
        # Parts without bytes of their own are compared by their values.
        if not has_bytes and compare_stored(pair, parts).outcome is Outcome.EQUAL:
            return other
    return None
