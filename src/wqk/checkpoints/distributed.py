"""Folders of `torch.distributed.checkpoint`: tensors in chunks, written by any number of processes.

A pickle, ``.metadata``, contains each tensor's shape and chunks, and the place of each chunk in one
of the other files: an archive of one tensor, as `torch.save` writes it. The pickle is read as data.
From a chunk, only the archive's directory and the requested rows are read.

Megatron-core stacks the layers of a model along the first axis; here every layer is a separate
tensor, with the layer's number in its name. Shards of safetensors that PyTorch writes contain their
offsets in the header.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.checkpoints.files import (
    DOWNLOAD,
    ITEM_BITS,
    RowFile,
    check_sizes,
    is_text,
    widened,
    widened_type,
)
from wqk.checkpoints.pickles import Record, Refused, load
from wqk.checkpoints.torch_archive import TorchFile
from wqk.errors import CheckpointError, UnsafeCheckpoint, errors_about, first_line, shown
from wqk.storage.byte_source import bytes_at
from wqk.storage.remote_file import RemoteFile

if TYPE_CHECKING:
    from wqk.storage.byte_source import ByteSource

METADATA = ".metadata"

# The description of a million chunks.
LARGEST_METADATA = 2**28

# Names of what training keeps next to the weights.
STATE = re.compile(
    r"(app\.)?(chained_\d+\.)?(optim|optimizers?|lr_schedulers?|dataloader|train_state|rng_state)\."
)
# Keys under which training scripts nest a model.
WRAPPERS = ("app", "model", "module", "state_dict", "model_state_dict")
# A tensor of all layers, stacked along the first axis.
STACKED = re.compile(r"(?P<before>(?:.*\.)?(?:encoder|decoder)\.layers)\.(?P<after>(?!\d).+)")

# Bytes to read from the beginning and end of an archive, for its directory.
DIRECTORY = 2**12


class Slice:
    """A range of bytes of a source, as a source."""

    def __init__(self, source: ByteSource, offset: int, length: int, tensor: str) -> None:
        missing = offset + length - source.size
        if missing > 0:
            raise CheckpointError(
                f"{source.name}: {tensor!r} ends {missing} bytes beyond the file: truncated; "
                f"{DOWNLOAD}"
            )
        self.name, self.size = f"{source.name} ({tensor})", length
        self.source, self.offset = source, offset

    @property
    def identity(self) -> Any:
        """Identity of the present content of the files."""
        return self.source.identity, self.offset, self.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset."""
        if offset + len(buffer) > self.size:
            raise CheckpointError(
                f"{self.name}: ends early; expected {offset + len(buffer)} bytes, got {self.size}; "
                f"{DOWNLOAD}"
            )
        self.source.read_into(self.offset + offset, buffer)


class Chunk:
    """A box of a tensor, stored as a separate archive.

    Parameters
    ----------
    begin, shape
        Offsets of the box in the tensor, and its sizes.
    dtype
        Type of the values, in the spelling of safetensors.
    stored
        The archive.
    tensor
        The tensor's name, for errors.
    """

    def __init__(
        self,
        begin: tuple[int, ...],
        shape: tuple[int, ...],
        dtype: str,
        stored: Slice,
        tensor: str,
    ) -> None:
        self.begin, self.shape, self.dtype = begin, shape, dtype
        self.stored, self.tensor = stored, tensor

    @property
    def directory(self) -> list[tuple[int, int]]:
        """Ranges of the file that contain the archive's directory."""
        first, size = self.stored.offset, self.stored.size
        last = first + size
        return [(first, min(first + DIRECTORY, last)), (max(first, last - DIRECTORY), last)]

    @cached_property
    def start(self) -> int:
        """Position of the first value in the archive.

        Raises
        ------
        CheckpointError
            The archive does not contain the described values.
        """
        with errors_about(self.stored.name):
            archive = TorchFile(self.stored, bare=True)
            info = archive.tensors.get("")
            if info is None or not self._fits(info):
                actual = "none" if info is None else f"{info.dtype} of shape {info.shape}"
                raise CheckpointError(
                    f"holds another tensor than is described; expected {self.dtype} of shape "
                    f"{self.shape}, got {actual}; {DOWNLOAD}"
                )
            return archive.first_value("")

    def _fits(self, info: TensorInfo) -> bool:
        """Return whether a stored tensor is the box, up to leading axes of length 1."""
        shape = self.shape
        while len(shape) > len(info.shape) and shape[0] == 1:
            shape = shape[1:]
        return (info.shape, info.dtype) == (shape, self.dtype)

    def byte_ranges(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranges of bytes of rows of the box in the file."""
        row_bytes = math.prod(self.shape[1:]) * ITEM_BITS[self.dtype] // 8
        start = self.stored.offset + self.start
        return [(start + first * row_bytes, start + last * row_bytes) for first, last in rows]

    def read(self, rows: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the values of rows of the box."""
        ranges = self.byte_ranges(rows)
        values = widened(self.dtype, ranges, self.stored.source.read_into, self.tensor)
        count = sum(last - first for first, last in rows)
        return values.reshape((count, *self.shape[1:]))


class LayerOfChunk(NamedTuple):
    """A box of one layer, in a chunk of stacked layers."""

    chunk: Chunk
    layer: int  # counted from the chunk's first

    @property
    def begin(self) -> tuple[int, ...]:
        """Offsets of the box in the layer's tensor."""
        return self.chunk.begin[1:]

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the box."""
        return self.chunk.shape[1:]

    def _all_rows(self) -> Chunk:
        """Return the chunk as a box of the rows of all layers, layer after layer."""
        count = self.chunk.shape[0] * self.chunk.shape[1]
        flat = Chunk((0,), (count, *self.chunk.shape[2:]), self.chunk.dtype, self.chunk.stored, "")
        flat.__dict__["start"] = self.chunk.start
        return flat

    def byte_ranges(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranges of bytes of rows of the box in the file."""
        return self._all_rows().byte_ranges(self._shifted(rows))

    def read(self, rows: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the values of rows of the box."""
        return self._all_rows().read(self._shifted(rows))

    def _shifted(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return ranges of the layer's rows as ranges of the rows of all layers."""
        shift = self.layer * self.chunk.shape[1]
        return [(first + shift, last + shift) for first, last in rows]


class StoredBox(NamedTuple):
    """A box of a tensor in a safetensors file, under the tensor's name."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    file: RowFile
    tensor: str

    def byte_ranges(self, rows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the ranges of bytes of rows of the box in the file."""
        return self.file.byte_ranges(Part(self.tensor, tuple(rows)))

    def read(self, rows: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return the values of rows of the box."""
        return self.file.read(Part(self.tensor, tuple(rows)))


Box = Chunk | LayerOfChunk | StoredBox


def source_of(box: Box) -> ByteSource:
    """Return the file that contains a box."""
    if isinstance(box, StoredBox):
        return box.file.source
    chunk = box.chunk if isinstance(box, LayerOfChunk) else box
    return chunk.stored.source


class Overlap(NamedTuple):
    """The rows of a box that a part needs.

    Attributes
    ----------
    box
        The box.
    rows
        Half-open range of rows of the box.
    place
        Slices of the part's array, one for each axis, to write the rows to.
    """

    box: Box
    rows: tuple[int, int]
    place: tuple[slice, ...]


class BoxedFile:
    """Tensors that consist of boxes in several files, as one file of weights."""

    def __init__(
        self,
        source: ByteSource,
        tensors: Mapping[str, TensorInfo],
        boxes: Mapping[str, Sequence[Box]],
    ) -> None:
        self.source, self.tensors, self._boxes = source, tensors, boxes

    @property
    def sources(self) -> list[ByteSource]:
        """The files that contain the boxes."""
        sources = map(source_of, chain.from_iterable(self._boxes.values()))
        return list({id(source): source for source in sources}.values())

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Return no ranges: the rows are in other files, see `places`."""
        return []

    def places(self, parts: Sequence[Part]) -> list[tuple[ByteSource, list[tuple[int, int]]]]:
        """Return the files of parts, and the ranges of their rows in each file.

        The directories of all archives are requested in parallel.
        """
        overlaps: list[Overlap] = []
        for part in parts:
            overlaps += self._overlaps(part, self.tensors[part.name].shape)
        chunks: dict[int, Chunk] = {}
        for overlap in overlaps:
            chunk = chunk_of(overlap.box)
            if chunk is not None:
                chunks[id(chunk)] = chunk
        for chunk in chunks.values():
            is_located = "start" in chunk.__dict__  # computed once, from the directory
            if not is_located and isinstance(chunk.stored.source, RemoteFile):
                chunk.stored.source.want(chunk.directory)
        return [(source_of(box), box.byte_ranges([rows])) for box, rows, _ in overlaps]

    def read(self, part: Part) -> np.ndarray:
        """Read the part's rows, joined, widened to float32 (float64 stays)."""
        info = self.tensors[part.name]
        if not info.shape:
            (box,) = self._boxes[part.name]
            return box.read([(0, 1)]).reshape(())
        out: np.ndarray = np.empty(part.shape(info.shape), widened_type(info.dtype, part.name))
        for box, rows, place in self._overlaps(part, info.shape):
            out[place] = box.read([rows]).reshape(out[place].shape)
        return out

    def _overlaps(self, part: Part, shape: tuple[int, ...]) -> list[Overlap]:
        """Return the rows of all boxes that a part of a tensor of this shape needs."""
        overlaps: list[Overlap] = []
        filled = 0  # rows of the part's array that earlier ranges fill
        for first, last in part.row_ranges(shape):
            for box in self._boxes[part.name]:
                top = box.begin[0] if box.begin else 0
                height = box.shape[0] if box.shape else 1
                low, high = max(first, top), min(last, top + height)
                if low >= high:
                    continue
                start = filled + low - first
                place = [slice(start, start + high - low)]
                for begin, size in zip(box.begin[1:], box.shape[1:], strict=True):
                    place.append(slice(begin, begin + size))
                overlaps.append(Overlap(box, (low - top, high - top), tuple(place)))
            filled += last - first
        return overlaps


def chunk_of(box: Box) -> Chunk | None:
    """Return the archive that contains a box; None for safetensors."""
    if isinstance(box, LayerOfChunk):
        return box.chunk
    return box if isinstance(box, Chunk) else None


def open_distributed(
    source: ByteSource, open_file: Callable[[str], ByteSource | None]
) -> BoxedFile:
    """Open a folder of `torch.distributed.checkpoint` by its ``.metadata``.

    Parameters
    ----------
    source
        The bytes of ``.metadata``.
    open_file
        Function that opens a file next to ``.metadata``; it returns None for an absent file.

    Raises
    ------
    CheckpointError
        The description is damaged, contains other objects than records of the format, or has chunks
        that do not cover the tensors.
    """
    described = read_metadata(source)
    opened = opened_files(source, described, open_file)
    tensors: dict[str, TensorInfo] = {}
    boxes: dict[str, list[Box]] = {}
    with describing():
        for stored, record in described.tensors.items():
            shape, dtype = sizes_of(stored, record["size"]), dtype_of(record["properties"])
            if dtype not in ITEM_BITS:
                raise ValueError(f"{stored!r} has the unknown type {shown(dtype)}")
            chunks = [
                chunk_in(stored, dtype, chunk.state, described, opened)
                for chunk in record["chunks"]
            ]
            check_cover(stored, shape, chunks)
            for name, info, layer_boxes in layers_of(described.names[stored], shape, dtype, chunks):
                if name in tensors:
                    raise ValueError(f"two tensors are called {name!r}")
                tensors[name], boxes[name] = info, layer_boxes
    return BoxedFile(source, tensors, boxes)


class Description(NamedTuple):
    """Contents of ``.metadata`` about a model's weights.

    Attributes
    ----------
    tensors
        Records of the tensors by key: properties, size and chunks.
    names
        Names of the tensors by key, without the keys that the model is nested under.
    places
        Records of the places of chunks, by key and offset in the tensor.
    """

    tensors: dict[str, dict[str, Any]]
    names: dict[str, str]
    places: dict[tuple[str, tuple[int, ...]], dict[str, Any]]


def read_metadata(source: ByteSource) -> Description:
    """Read the pickle ``.metadata`` as data."""
    if source.size > LARGEST_METADATA:
        raise CheckpointError(
            f"too large for a description of tensors; expected at most {LARGEST_METADATA:,} bytes, "
            f"got {source.size:,}; save the weights without the optimizer's state"
        )
    content = bytes_at(source, 0, source.size)
    try:
        metadata = load(io.BytesIO(content)).state
        paths = metadata.get("planner_data") or {}
        tensors, names, places = {}, {}, {}
        for key, record in metadata["state_dict_metadata"].items():
            if not isinstance(key, str) or STATE.match(key) or not is_text(key):
                continue
            state = record.state if isinstance(record, Record) else None
            if isinstance(state, dict) and state.keys() >= {"properties", "size", "chunks"}:
                tensors[key], names[key] = state, name_of(key, paths.get(key))
        for index, place in metadata["storage_data"].items():
            offset = index.state.get("offset")
            places[index.state["fqn"], tuple(offset or ())] = place.state
    except Refused as error:
        raise UnsafeCheckpoint(
            f"contains more than the description of tensors ({first_line(error)}); loading it "
            "could execute code, so it was not loaded; if you trust it, convert it to safetensors"
        ) from None
    except Exception as error:  # a damaged pickle fails wherever its parser stumbles
        raise CheckpointError(
            f"not a readable description of tensors ({first_line(error)}); {DOWNLOAD}"
        ) from None
    return Description(tensors, names, places)


def name_of(key: str, path: Any) -> str:
    """Return a tensor's name in its model.

    Examples
    --------
    >>> name_of("app.model.layers.0.wq", ("app", "model", "layers.0.wq"))
    'layers.0.wq'
    """
    path_words = [str(word) for word in path] if isinstance(path, tuple) and path else [key]
    while len(path_words) > 1 and path_words[0] in WRAPPERS:
        path_words.pop(0)
    # Transformer Engine's norm is part of the projection's module, and has no module of its own.
    return ".".join(path_words).replace(".layer_norm_", ".layer_norm.")


@contextmanager
def describing() -> Iterator[None]:
    """Turn errors from unknown descriptions into `CheckpointError`."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"describes a tensor in an unknown way ({first_line(error)}); {DOWNLOAD}"
        ) from None


def opened_files(
    source: ByteSource, described: Description, open_file: Callable[[str], ByteSource | None]
) -> dict[str, ByteSource]:
    """Open all files with chunks of the tensors, in parallel."""
    keys = described.tensors.keys()
    names: set[Any] = {
        place.get("relative_path") for (key, _), place in described.places.items() if key in keys
    }
    for name in names:
        if not isinstance(name, str) or PurePosixPath(name).name != name or "\0" in name:
            raise CheckpointError(
                f"{source.name}: names {shown(name)}, outside of the folder; expected files next "
                f"to it; {DOWNLOAD}"
            )
    ordered = sorted(names)
    if not ordered:
        return {}
    with ThreadPoolExecutor(min(8, len(ordered))) as pool:
        sources = list(pool.map(open_file, ordered))
    for name, file_source in zip(ordered, sources, strict=True):
        if file_source is None:
            raise CheckpointError(
                f"{source.name}: names {name}, which is missing; download the checkpoint again"
            )
    return dict(zip(ordered, sources, strict=True))


def chunk_in(
    key: str,
    dtype: str,
    state: Mapping[str, Any],
    described: Description,
    opened: Mapping[str, ByteSource],
) -> Chunk:
    """Return a chunk after a check of its description."""
    begin, shape = sizes_of(key, state["offsets"]), sizes_of(key, state["sizes"])
    place = described.places.get((key, begin)) or described.places[key, ()]
    if place.get("transform_descriptors"):
        raise ValueError(f"{key!r} is compressed")
    offset, length = place["offset"], place["length"]
    check_sizes(repr(key), (), (offset, length))
    stored = Slice(opened[place["relative_path"]], offset, length, key)
    return Chunk(begin, shape, dtype, stored, key)


def dtype_of(properties: Any) -> Any:
    """Return the type of a tensor's values, from its properties."""
    state = properties.state
    return state[0] if isinstance(state, tuple) else state["dtype"]


def sizes_of(key: str, value: Any) -> tuple[int, ...]:
    """Return sizes or offsets after a check that they are whole numbers."""
    sizes = tuple(value)
    check_sizes(repr(key), sizes)
    return sizes


def check_cover(key: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise `ValueError` for boxes that lie outside a tensor, or do not cover the tensor.

    The check compares numbers of values, and offsets of boxes: two boxes with one offset overlap.
    """
    for box in boxes:
        if len(box.shape) != len(shape) or len(box.begin) != len(shape):
            raise ValueError(f"a chunk of {key!r} is outside of it: it has other axes")
        for begin, size, length in zip(box.begin, box.shape, shape, strict=True):
            if begin + size > length:
                raise ValueError(f"a chunk of {key!r} is outside of it")
    begins = {box.begin for box in boxes}
    values_in_boxes = sum(math.prod(box.shape) for box in boxes)
    if values_in_boxes != math.prod(shape) or len(begins) != len(boxes):
        raise ValueError(f"the chunks of {key!r} do not make it up")


class BoxedTensor(NamedTuple):
    """A tensor with the boxes that cover it."""

    name: str
    info: TensorInfo
    boxes: list[Box]


def layers_of(
    name: str, shape: tuple[int, ...], dtype: str, chunks: Sequence[Chunk]
) -> list[BoxedTensor]:
    """Return a tensor, or the layers' tensors if the tensor is a stack of layers."""
    match = STACKED.fullmatch(name)
    if match is None or len(shape) < 2:
        return [BoxedTensor(name, _info(dtype, shape), list(chunks))]
    info = _info(dtype, shape[1:])
    layers = []
    for layer in range(shape[0]):
        layer_boxes: list[Box] = []
        for chunk in chunks:
            layer_of_chunk = layer - chunk.begin[0]
            if 0 <= layer_of_chunk < chunk.shape[0]:
                layer_boxes.append(LayerOfChunk(chunk, layer_of_chunk))
        layer_name = f"{match['before']}.{layer}.{match['after']}"
        layers.append(BoxedTensor(layer_name, info, layer_boxes))
    return layers


def _info(dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """Return the metadata of a tensor of this type and shape."""
    return TensorInfo(dtype, shape, math.prod(shape) * ITEM_BITS[dtype] // 8)


# The key of a header under which PyTorch's writer of safetensors keeps offsets.
OFFSETS = "DCP_SHARDING_INFO"


def join_shards(files: Sequence[RowFile]) -> BoxedFile | None:
    """Join shards of safetensors that contain boxes of the tensors; None for other files."""
    texts = [file.metadata.get(OFFSETS) for file in files]
    if not any(texts):
        return None
    boxes: dict[str, list[StoredBox]] = {}
    tensors: dict[str, TensorInfo] = {}
    with describing():
        for file, text in zip(files, texts, strict=True):
            offsets = json.loads(text) if text else {}
            for name, info in file.tensors.items():
                begin = sizes_of(name, offsets[name]["saved_offsets"])
                boxes.setdefault(name, []).append(StoredBox(begin, info.shape, file, name))
        for name, tensor_boxes in boxes.items():
            dtypes = {box.file.tensors[name].dtype for box in tensor_boxes}
            if len(dtypes) > 1:
                raise ValueError(f"the chunks of {name!r} differ in type")
            ends = [np.add(box.begin, box.shape) for box in tensor_boxes]
            shape = tuple(int(end) for end in np.max(ends, axis=0))
            check_cover(name, shape, tensor_boxes)
            tensors[name] = _info(dtypes.pop(), shape)
    return BoxedFile(files[0].source, tensors, boxes)
