"""Tensors of safetensors files: read, overwritten, resized and added.

If a tensor keeps its shape, its bytes are overwritten, and the rest of the file does not change. A
tensor with a new shape, or a new tensor, is kept in a separate file until the end. Then its shard
is written again: a new header, the new tensors, and the unchanged bytes of all other tensors.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wqk.checkpoints.adapters import module_of
from wqk.errors import CheckpointError
from wqk.sameness.execution import Tensor

# NumPy's types of safetensors' floats; bfloat16 is handled by its bits.
NUMPY_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Folder for tensors with changed shapes, during a repair.
PENDING = ".resized"
# A header's length is a multiple of this number of bytes.
ALIGNMENT = 8


class TensorLocation(NamedTuple):
    """The location of a tensor in a file.

    Attributes
    ----------
    path
        The file.
    dtype
        The type in the spelling of safetensors, such as ``BF16``.
    shape
        The stored shape.
    start, end
        The half-open range of the tensor's bytes in the file.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.end - self.start


def locations_in(path: Path) -> dict[str, TensorLocation]:
    """Return the locations of the tensors of a safetensors file, by name."""
    header, first = _header_of(path)
    header.pop("__metadata__", None)
    locations = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        shape = tuple(entry["shape"])
        locations[name] = TensorLocation(path, entry["dtype"], shape, first + start, first + end)
    return locations


def _header_of(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the position of the first tensor's bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def read_location(location: TensorLocation) -> np.ndarray:
    """Return the numbers of a tensor; bfloat16 as float32."""
    with location.path.open("rb") as file:
        file.seek(location.start)
        stored = np.frombuffer(file.read(location.nbytes), NUMPY_TYPES[location.dtype])
    if location.dtype == "BF16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return np.array(stored).reshape(location.shape)


def write_location(location: TensorLocation, values: np.ndarray) -> None:
    """Write the numbers of a tensor in its stored type; change nothing else."""
    with location.path.open("r+b") as file:
        file.seek(location.start)
        file.write(encoded(values, location.dtype))


def encoded(values: np.ndarray, dtype: str) -> bytes:
    """Return numbers as the bytes of a floating type, rounded to nearest.

    Examples
    --------
    >>> encoded(np.array([1.0], np.float32), "BF16").hex()
    '803f'
    """
    if dtype != "BF16":
        return np.ascontiguousarray(values, NUMPY_TYPES[dtype]).tobytes()
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper_half = bits >> np.uint32(16)
    # Ties are rounded to even: added is just below half of the last place, plus its last bit.
    is_odd = upper_half & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + is_odd) >> np.uint32(16)
    # Rounding could turn NaN into infinity; a bit of the mantissa keeps it NaN.
    quiet_nan = upper_half | np.uint32(0x40)
    return np.where(np.isnan(values), quiet_nan, rounded).astype("<u2").tobytes()


class FileTensors(MutableMapping[str, Any]):
    """Tensors of files, for printed code: read on use, and written at once.

    Parameters
    ----------
    folder
        The folder of the files.
    locations
        Locations of the tensors with a plain floating type, by the candidate's names.
    stored_names
        Names in the files of all tensors of the candidate, including tensors of other types.

    Attributes
    ----------
    changed
        Names of the tensors that were written.
    added
        Names of the tensors that the files lacked.
    removed
        Names of the tensors that were removed.
    """

    def __init__(
        self, folder: Path, locations: Mapping[str, TensorLocation], stored_names: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._locations = dict(locations)
        self._stored_names = dict(stored_names)
        # The shard of each tensor that is kept in a file of its own.
        self._shards: dict[str, Path] = {}
        # The shard of each tensor to remove.
        self._removed_from: dict[str, Path] = {}
        self.changed: list[str] = []
        self.added: list[str] = []
        self.removed: list[str] = []

    def __getitem__(self, name: str) -> Tensor:
        return Tensor(read_location(self._locations[name]))

    def __setitem__(self, name: str, value: Any) -> None:
        values = value.array if isinstance(value, Tensor) else np.asarray(value)
        location = self._locations.get(name)
        if location is not None and location.shape == values.shape:
            write_location(location, values)
        else:
            self._set_aside(name, values)
        self.changed.append(name)

    def _set_aside(self, name: str, values: np.ndarray) -> None:
        """Write an added tensor, or a tensor with a new shape, to a separate file."""
        location = self._locations.get(name)
        if location is None:
            location = self._location_of_added(name)
            self.added.append(name)
        self._shards.setdefault(name, location.path)
        folder = self._folder / PENDING
        folder.mkdir(exist_ok=True)
        path = folder / str(len(list(folder.iterdir())))
        data = encoded(values, location.dtype)
        path.write_bytes(data)
        self._locations[name] = TensorLocation(path, location.dtype, values.shape, 0, len(data))

    def _location_of_added(self, name: str) -> TensorLocation:
        """Return the location of a neighbor; the added tensor gets its shard and type.

        The name of the added tensor in the file is stored.
        """
        if name in self._stored_names:
            raise CheckpointError(
                f"--repair: the candidate stores {name} without plain floating-point numbers; "
                "only tensors of plain types can be written"
            )
        neighbor = self._neighbor_of(name)
        stored = self._stored_names[neighbor]
        prefix = stored.removesuffix(neighbor) if stored.endswith(neighbor) else ""
        self._stored_names[name] = prefix + name
        shard = self._shards.get(neighbor, self._locations[neighbor].path)
        return self._locations[neighbor]._replace(path=shard)

    def _neighbor_of(self, name: str) -> str:
        """Return a stored tensor of the nearest module around a name; else the last tensor."""
        module = module_of(name)
        while module:
            for neighbor in self._locations:
                if neighbor.startswith(f"{module}."):
                    return neighbor
            module = module_of(module)
        return [*self._locations][-1]

    def finish(self) -> None:
        """Write the shards with resized, added or removed tensors again."""
        by_shard: dict[Path, dict[str, TensorLocation]] = {}
        for name, shard in self._shards.items():
            by_shard.setdefault(shard, {})[self._stored_names[name]] = self._locations[name]
        removed_by_shard: dict[Path, list[str]] = {}
        for name, shard in self._removed_from.items():
            removed_by_shard.setdefault(shard, []).append(self._stored_names[name])
        shards = dict.fromkeys([*by_shard, *removed_by_shard])
        for shard in shards:
            _rewrite(shard, by_shard.get(shard, {}), removed_by_shard.get(shard, ()))
        shutil.rmtree(self._folder / PENDING, ignore_errors=True)
        if shards:
            _update_index(self._folder)

    def __delitem__(self, name: str) -> None:
        location = self._locations.pop(name)
        self._removed_from[name] = self._shards.pop(name, location.path)
        self.removed.append(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._locations)

    def __len__(self) -> int:
        return len(self._locations)


def _rewrite(shard: Path, replaced: Mapping[str, TensorLocation], removed: Collection[str]) -> None:
    """Write a shard again, with some tensors replaced and further tensors added.

    ``removed`` are the tensors to leave out.
    """
    header, _ = _header_of(shard)
    metadata = header.pop("__metadata__", None)
    stored = locations_in(shard)
    # Tensors keep the order of their bytes; added tensors are last.
    names = sorted(stored.keys() - removed, key=lambda name: stored[name].start)
    locations = {name: replaced.get(name, stored[name]) for name in names} | dict(replaced)
    entries: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, location in locations.items():
        start, end = end, end + location.nbytes
        entries[name] = {
            "dtype": location.dtype,
            "shape": list(location.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    written = shard.with_name(f".{shard.name}.new")
    with written.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        for location in locations.values():
            _copy(location, target)
    written.replace(shard)


def _copy(location: TensorLocation, target: Any) -> None:
    """Append the bytes of a tensor to an open file, in pieces."""
    left = location.nbytes
    with location.path.open("rb") as source:
        source.seek(location.start)
        while left:
            piece = source.read(min(left, 1 << 24))
            target.write(piece)
            left -= len(piece)


def _update_index(folder: Path) -> None:
    """Write the names, the shards and the total size of all tensors into the index of shards."""
    for index in folder.rglob("*.safetensors.index.json"):
        content = json.loads(index.read_text(encoding="utf-8"))
        sizes = 0
        stored: set[str] = set()
        for shard in sorted(set(content["weight_map"].values())):
            locations = locations_in(index.parent / shard)
            sizes += sum(location.nbytes for location in locations.values())
            stored.update(locations)
            for name in locations:
                content["weight_map"].setdefault(name, shard)
        for name in content["weight_map"].keys() - stored:
            del content["weight_map"][name]
        metadata = content.get("metadata")
        if isinstance(metadata, dict) and "total_size" in metadata:
            metadata["total_size"] = sizes
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
