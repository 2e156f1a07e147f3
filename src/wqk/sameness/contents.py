"""Search for tensors by contents if names differ: fused, split, transposed or renamed tensors.

The *key* of a row is a hash of its numbers, rounded to the coarsest type of all tensors. Equal rows
have equal keys, independent of names, types and layouts of tensors. A tensor is searched for by the
keys of its rows, then by the keys of its columns. The search needs memory for a few million numbers
and for one key for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.files import PLAIN
from wqk.sameness.stored_tensors import chunks

# Beginnings of the names of a layer's tensors: in the reference, and in the candidate.
LayerPrefixes = tuple[str, str]


class Locations(NamedTuple):
    """Locations of the tensors of each checkpoint in the other checkpoint, if found.

    Attributes
    ----------
    reference, candidate
        For tensors of this checkpoint, by name: a phrase about tensors of the other checkpoint,
        such as ``in layers.0.qkv.weight`` or ``transposed, in lm_head.weight``.
    """

    reference: dict[str, str]
    candidate: dict[str, str]


# -- keys --------------------------------------------------------------------------------------


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """Map whole numbers to pseudorandom numbers, uint64 (the finalizer of SplitMix64)."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _codes(values: np.ndarray, number_type: str) -> np.ndarray:
    """Round numbers to a type, and return a whole number for each, uint64; −0 becomes 0."""
    single = values.astype(np.float32) + np.float32(0)
    if number_type == "F16":
        with np.errstate(over="ignore"):
            single = single.astype(np.float16).astype(np.float32)
    bits = single.view(np.uint32)
    if number_type == "BF16":
        is_odd = (bits >> np.uint32(16)) & np.uint32(1)  # ties are rounded to even
        bits = (bits + np.uint32(0x7FFF) + is_odd) & np.uint32(0xFFFF0000)
    # Bits of near numbers have much in common; their products with an odd number do not.
    mixed = bits.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    return np.asarray(mixed >> np.uint64(7))


def _pieces_of_codes(checkpoint: Checkpoint, name: str, number_type: str) -> Iterator[np.ndarray]:
    """Yield the codes of a tensor in pieces, (rows, columns)."""
    info = checkpoint.info(name)
    for piece in chunks(Part(name), info):
        (values,) = checkpoint.read([piece])
        columns = info.shape[-1] if len(info.shape) > 1 else values.size
        rows = values.reshape(-1, columns)
        yield _codes(rows, number_type)


def _row_keys(checkpoint: Checkpoint, name: str, number_type: str) -> np.ndarray:
    """Return a key for each row of a tensor, (rows,), uint64.

    A key is the sum of the codes of a row, multiplied by numbers that depend on the column.
    """
    keys = []
    for codes in _pieces_of_codes(checkpoint, name, number_type):
        multipliers = _scrambled(np.arange(codes.shape[1]))
        keys.append((codes * multipliers).sum(axis=1, dtype=np.uint64))
    return np.concatenate(keys)


def _column_keys(checkpoint: Checkpoint, name: str, number_type: str) -> np.ndarray:
    """Return a key for each column, (columns,), equal to the key of a row of the same numbers."""
    keys: Any = np.uint64(0)
    start = 0
    for codes in _pieces_of_codes(checkpoint, name, number_type):
        multipliers = _scrambled(np.arange(start, start + len(codes)))
        keys = keys + (codes * multipliers[:, None]).sum(axis=0, dtype=np.uint64)
        start += len(codes)
    return np.asarray(keys)


class _Orientation(NamedTuple):
    """Rows or columns of the candidate's tensors, to search among the reference's rows.

    Attributes
    ----------
    keys_of
        Function of a checkpoint, a name and a number type that returns the keys.
    is_transposed
        Whether columns are searched; only matrices have columns.
    """

    keys_of: Callable[[Checkpoint, str, str], np.ndarray]
    is_transposed: bool

    @property
    def prefix(self) -> str:
        """Beginning of the phrase about a found tensor."""
        return "transposed, " if self.is_transposed else ""


ORIENTATIONS = (_Orientation(_row_keys, False), _Orientation(_column_keys, True))


# -- search ------------------------------------------------------------------------------------


def find_by_content(
    checkpoints: Sequence[Checkpoint],
    reference_names: Sequence[str],
    candidate_names: Sequence[str],
) -> Locations:
    """Return the locations of the tensors of each checkpoint in the other checkpoint.

    A tensor is found if the other checkpoint contains all its rows, or all its columns, in the same
    order: renamed, fused with other tensors, split, or transposed.

    Parameters
    ----------
    checkpoints
        The reference and the candidate.
    reference_names, candidate_names
        The tensors to search for in the other checkpoint.
    """
    reference, candidate = checkpoints
    reference_infos = _infos_with_keys(reference, reference_names)
    candidate_infos = _infos_with_keys(candidate, candidate_names)
    locations = Locations({}, {})
    if not reference_infos or not candidate_infos:
        return locations
    types = {info.dtype for info in (*reference_infos.values(), *candidate_infos.values())}
    coarsest = next((number_type for number_type in reversed(PLAIN) if number_type in types), "F32")
    row_keys = {name: _row_keys(reference, name, coarsest) for name in reference_infos}
    for orientation in ORIENTATIONS:
        unfound_keys = {
            name: keys for name, keys in row_keys.items() if name not in locations.reference
        }
        unfound = [name for name in candidate_infos if name not in locations.candidate]
        if not unfound_keys or not unfound:
            break
        index = _RowIndex(unfound_keys)
        for name in unfound:
            if orientation.is_transposed and len(candidate_infos[name].shape) != 2:
                continue
            keys = orientation.keys_of(candidate, name, coarsest)
            _locate(name, keys, index, orientation.prefix, locations)
    _find_vectors(checkpoints, (reference_infos, candidate_infos), locations)
    return locations


def _locate(
    name: str, keys: np.ndarray, index: _RowIndex, prefix: str, locations: Locations
) -> None:
    """Add the location of a candidate's tensor, and of the reference's tensors now complete.

    Parameters
    ----------
    name, keys
        The tensor of the candidate, and the keys of its rows or columns.
    index
        The rows of the reference.
    prefix
        The beginning of the phrase.
    locations
        The locations found so far.
    """
    rows_by_source = index.origins(keys)
    if rows_by_source is None:
        return
    locations.candidate[name] = f"{prefix}in {', '.join(rows_by_source)}"
    for source in rows_by_source:
        if index.is_complete(source):
            locations.reference[source] = f"{prefix}in {name}"


def find_by_layer(
    checkpoints: Sequence[Checkpoint],
    names: Sequence[Collection[str]],
    layers: Sequence[LayerPrefixes],
) -> Locations:
    """Return locations as `find_by_content` does, but search within corresponding layers.

    A tensor of a layer is searched for in the same layer of the other checkpoint, and among the
    tensors outside of layers. Equal numbers in another layer are a mistake of the candidate, not a
    location.

    Parameters
    ----------
    names
        The names of the tensors of each checkpoint.
    layers
        Prefixes of the names of a layer's tensors, in the reference and in the candidate.
    """
    locations = Locations({}, {})
    for reference_names, candidate_names in _searches(names, layers):
        reference_unfound = [name for name in reference_names if name not in locations.reference]
        candidate_unfound = [name for name in candidate_names if name not in locations.candidate]
        if reference_unfound and candidate_unfound:
            further = find_by_content(checkpoints, reference_unfound, candidate_unfound)
            locations.reference.update(further.reference)
            locations.candidate.update(further.candidate)
    return locations


def _searches(
    names: Sequence[Collection[str]], layers: Sequence[LayerPrefixes]
) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the names of tensors to search together: layer by layer, then outside of layers.

    Without layers, all names form one search.
    """
    reference_outside, candidate_outside = map(list, names)
    for reference_prefix, candidate_prefix in layers:
        reference_layer, reference_outside = _split_by_prefix(reference_outside, reference_prefix)
        candidate_layer, candidate_outside = _split_by_prefix(candidate_outside, candidate_prefix)
        yield reference_layer, candidate_layer
    reference_names, candidate_names = map(list, names)
    yield reference_outside, candidate_names
    if layers:
        yield reference_names, candidate_outside


def _split_by_prefix(names: Sequence[str], prefix: str) -> tuple[list[str], list[str]]:
    """Return the names that begin with a prefix, and the names that do not."""
    with_prefix = [name for name in names if name.startswith(prefix)]
    without_prefix = [name for name in names if not name.startswith(prefix)]
    return with_prefix, without_prefix


def _infos_with_keys(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, TensorInfo]:
    """Return the metadata of the tensors of plain number types; only their rows have keys."""
    infos = {name: checkpoint.info(name) for name in names}
    return {name: info for name, info in infos.items() if info.dtype in (*PLAIN, "F8_E4M3")}


class _RowIndex:
    """Index of the rows of many tensors by their keys.

    An *entry* is a place in the sorted list of all keys.
    """

    def __init__(self, keys_by_name: Mapping[str, np.ndarray]) -> None:
        self._names = list(keys_by_name)
        self._is_covered = {name: np.zeros(len(keys), bool) for name, keys in keys_by_name.items()}
        counts = [len(keys) for keys in keys_by_name.values()]
        keys = np.concatenate(list(keys_by_name.values()))
        tensor_numbers = np.repeat(np.arange(len(counts)), counts)
        rows = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._tensor_numbers = tensor_numbers[order]
        self._rows = rows[order]
        self._is_taken = np.zeros(len(keys), bool)

    def origins(self, keys: np.ndarray) -> dict[str, np.ndarray] | None:
        """Return the rows with these keys, by tensor, and mark the rows as covered.

        None if a key is unknown, or if rows of a tensor are out of order.
        """
        first = np.searchsorted(self._keys, keys, "left")
        end = np.searchsorted(self._keys, keys, "right")
        if (first == end).any():
            return None
        entries = first.copy()
        for position in np.flatnonzero(end - first > 1):
            previous = entries[position - 1] if position else None
            entries[position] = self._choose(np.arange(first[position], end[position]), previous)
        tensor_numbers = self._tensor_numbers[entries]
        all_rows = self._rows[entries]
        rows_by_name = {}
        for number in np.unique(tensor_numbers):
            rows = all_rows[tensor_numbers == number]
            if (np.diff(rows) <= 0).any():
                return None
            rows_by_name[self._names[number]] = rows
        self._is_taken[entries] = True
        for name, rows in rows_by_name.items():
            self._is_covered[name][rows] = True
        return rows_by_name

    def is_complete(self, name: str) -> bool:
        """Return whether all rows of a tensor are covered."""
        return bool(self._is_covered[name].all())

    def _choose(self, entries: np.ndarray, previous: int | None) -> int:
        """Choose one of several entries with equal rows.

        The row after the row of ``previous`` is preferred, then a row that is not yet taken.
        """
        preference = (~self._is_taken[entries]).astype(int)
        if previous is not None:
            is_same_tensor = self._tensor_numbers[entries] == self._tensor_numbers[previous]
            is_next_row = self._rows[entries] == self._rows[previous] + 1
            preference += 2 * (is_same_tensor & is_next_row)
        return int(entries[np.argmax(preference)])


def _find_vectors(
    checkpoints: Sequence[Checkpoint],
    infos: Sequence[Mapping[str, TensorInfo]],
    locations: Locations,
) -> None:
    """Find vectors that are parts of longer vectors, for example biases of fused weights."""
    reference, candidate = (
        _unfound_vectors(checkpoint, infos_by_name, location_by_name)
        for checkpoint, infos_by_name, location_by_name in zip(
            checkpoints, infos, locations, strict=True
        )
    )
    _add_parts_of_vectors(candidate, reference, locations.candidate, locations.reference)
    _add_parts_of_vectors(reference, candidate, locations.reference, locations.candidate)


def _unfound_vectors(
    checkpoint: Checkpoint, infos: Mapping[str, TensorInfo], location_by_name: Mapping[str, str]
) -> dict[str, np.ndarray]:
    """Read the vectors of a checkpoint that are not found yet, by name."""
    vectors = {}
    for name, info in infos.items():
        if name not in location_by_name and len(info.shape) == 1:
            vectors[name] = checkpoint.read([Part(name)])[0].reshape(-1)
    return vectors


def _add_parts_of_vectors(
    whole: Mapping[str, np.ndarray],
    parts: Mapping[str, np.ndarray],
    locations_of_whole: dict[str, str],
    locations_of_parts: dict[str, str],
) -> None:
    """Add locations of vectors that consist of vectors in the other checkpoint."""
    for name, vector in whole.items():
        names = [part_name for part_name, part in parts.items() if _contains(vector, part)]
        length = sum(len(parts[part_name]) for part_name in names)
        if names and length == len(vector):
            locations_of_whole[name] = f"in {', '.join(names)}"
            locations_of_parts.update(dict.fromkeys(names, f"in {name}"))


def _contains(vector: np.ndarray, part: np.ndarray) -> bool:
    """Return whether a vector contains a shorter vector that is not constant."""
    if not 0 < len(part) < len(vector) or not np.ptp(part):
        return False
    possible_starts = vector[: len(vector) - len(part) + 1]
    for start in np.flatnonzero(possible_starts == part[0]):
        if np.array_equal(vector[start : start + len(part)], part):
            return True
    return False
