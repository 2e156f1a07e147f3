"""Local or remote folders: the choice of the files of a model, and the checkpoint in these files.

The choice of files follows `transformers`, for every source of bytes.

A format is a row of data: the names of weights and configuration, and the axis along which tensors
are split over files. A family contains the names of its tensors, under the format's model type.
`wqk.checkpoints.configurations` computes values from its configuration.
"""

from __future__ import annotations

import json
import os
import re
import struct
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import resources
from itertools import islice
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._console import counted
from wqk.checkpoints.checkpoint import (
    Checkpoint,
    Part,
    Regrouping,
    TensorInfo,
    by_plain_name,
    is_transformer_lens,
)
from wqk.checkpoints.configurations import COMPLETIONS, Opened, configured
from wqk.checkpoints.distributed import METADATA, BoxedFile, join_shards, open_distributed
from wqk.checkpoints.files import (
    DESCRIPTION,
    DOWNLOAD,
    JoinedFiles,
    RowFile,
    is_float8,
    is_text,
    open_safetensors,
    require_floats,
    scale_name,
)
from wqk.checkpoints.gguf import open_gguf
from wqk.checkpoints.library_formats import DISTRIBUTED, FORMATS, Format, format_of
from wqk.checkpoints.quantization import (
    Source,
    find_quantized,
    quantized_config,
    refuse_unread,
)
from wqk.errors import (
    CheckpointError,
    NoCheckpoint,
    demo_reference_advice,
    did_you_mean,
    errors_about,
    first_line,
    shown,
)
from wqk.storage.byte_source import bytes_at
from wqk.storage.local import LocalFile
from wqk.storage.references import redacted, step_in
from wqk.storage.remote_file import RemoteFile
from wqk.storage.transfers import CONNECTIONS

if TYPE_CHECKING:
    from wqk.checkpoints.files import WeightFile
    from wqk.storage.byte_source import ByteSource
    from wqk.storage.transfers import Refused, Transfers


# File of Megatron with the common content of all processes.
COMMON = "common.pt"

# Largest configuration or index; YAML, which usually takes 5 kB, is slow to parse.
LARGEST_CONFIGURATION, LARGEST_YAML = 64 * 2**20, 2**18


class Folder(NamedTuple):
    """A local or remote folder."""

    name: str  # name given by the user
    source: Callable[[str], ByteSource | None]  # the bytes of a file; None for a missing file
    names: Sequence[str] | None = None  # names of files; None if unknown
    below: Callable[[], Iterable[str]] = tuple  # paths of files in subfolders
    transfers: Transfers | None = None  # transfers of files of a remote folder
    refusals: Sequence[Refused] = ()  # answers of the server for refused files

    def object(self, file: str) -> dict[str, Any]:
        """Read the object in a file of JSON or YAML; empty without a file."""
        source = self.source(file)
        if source is None:
            return {}
        if source.size > LARGEST_CONFIGURATION:
            raise CheckpointError(
                f"{source.name}: too large for a configuration file; expected at most "
                f"{LARGEST_CONFIGURATION:,} bytes, got {source.size:,}; replace it by the model's"
            )
        content = bytes_at(source, 0, source.size)
        parse = _parse_yaml if file.endswith((".yaml", ".yml")) else _parse_json
        with errors_about(source.name):
            return parse(content)


def _parse_json(text: bytearray) -> dict[str, Any]:
    """Return the object in a text of JSON; `CheckpointError` for other texts."""
    try:
        value = json.loads(text.decode("utf-8"))
        if re.search(rb"\\u[dD][89a-fA-F]", text):  # halves of pairs cannot be stored or printed
            whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            value = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON ({error}); {DOWNLOAD}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"no configuration; expected a JSON object, got {shown(value)}")
    return value


def _parse_yaml(text: bytearray) -> dict[str, Any]:
    """Return the keys in a text of YAML; `CheckpointError` for other texts."""
    import yaml

    from wqk.checkpoints.pickles import plain

    try:
        if len(text) > LARGEST_YAML:
            raise ValueError(f"larger than {LARGEST_YAML} bytes")
        value = yaml.safe_load(text.decode("utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"not valid YAML ({first_line(error)}); {DOWNLOAD}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"no configuration; expected keys with values, got {shown(value)}")
    return dict(plain(value))


def local_folder(folder: Path, opened: list[LocalFile] | None = None) -> Folder:
    """Open a folder on disk; opened files are appended to ``opened``."""

    def source(name: str) -> LocalFile | None:
        if not os.path.lexists(folder / name):
            return None
        file = LocalFile(folder / name)
        if opened is not None:
            opened.append(file)
        return file

    def below() -> list[str]:
        return [str(path.relative_to(folder)) for path in folder.glob("*/*")]

    return Folder(str(folder), source, [path.name for path in folder.iterdir()], below)


def beside(path: Path) -> str:
    """Return the end of a message about a missing path: a folder or file with a similar name.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "original").mkdir()
    >>> beside(folder / "orignal").replace(str(folder), "…")
    "; did you mean '…/original'?"
    """
    similar: dict[str, str] = {}
    try:
        with os.scandir(path.parent) as entries:
            for entry in islice(entries, 1000):
                is_weight_file = entry.name.endswith(ENDINGS) or format_of(entry.name)
                # A broken link has the path's own name.
                if entry.name != path.name and (entry.is_dir() or is_weight_file):
                    similar[entry.name.lower()] = str(path.parent / entry.name)
    except (OSError, ValueError):
        return ""
    # Only names are compared, because all paths in one folder are similar.
    return did_you_mean(path.name.lower(), (), similar)


ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")
ENDINGS = (".safetensors", *ARCHIVES, ".gguf")

# One file before the index of several, safetensors before archives; then other libraries' names.
PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)

# Other files with the endings of weights: adapters, and the Trainer's own state.
NOT_WEIGHTS = ("adapter_", "training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state")


class WeightFiles(NamedTuple):
    """A folder's weights.

    Attributes
    ----------
    files
        Names within the folder; empty if the folder contains no weights.
    listed_in
        The index that names the files; None without an index.
    notes
        Sentences about files of the same kind that were not chosen.
    format
        Format of another library; None for the format of `transformers`.
    """

    files: tuple[str, ...]
    listed_in: str | None = None
    notes: tuple[str, ...] = ()
    format: Format | None = None


def choose_weights(folder: Folder) -> WeightFiles:
    """Choose a folder's weights: the files that `transformers` would load, or another format.

    Raises
    ------
    CheckpointError
        An index is damaged, or names files outside the folder.
    """
    names = folder.names or ()
    if folder.names is None:
        present = (name for name in PREFERRED if folder.source(name) is not None)
    else:
        present = (name for name in PREFERRED if name in names)
    first = next(present, None)
    if first is None:
        return _weights_by_name(folder, names)
    if first.endswith(".json"):
        files = shard_names(folder.object(first), f"{folder.name}/{first}")
        chosen = WeightFiles(tuple(files), first)
    else:
        chosen = WeightFiles((first,), format=format_of(first))
    return chosen._replace(notes=_passed_over(chosen, names))


def _weights_by_name(folder: Folder, names: Sequence[str]) -> WeightFiles:
    """Choose weights of other libraries, or files with the endings of weights."""
    for layout in FORMATS:
        layout_files = layout.files(names)
        if layout_files and layout.split_axis:
            return WeightFiles(layout_files, format=layout)
        if layout_files:
            return _one_model(layout_files, layout)
    candidates = sorted(name for name in names if not name.startswith(NOT_WEIGHTS))
    safetensors = tuple(name for name in candidates if name.endswith(".safetensors"))
    if safetensors:
        return WeightFiles(safetensors)
    archives = [name for name in candidates if name.endswith(ARCHIVES)]
    readable_archives = tuple(name for name in archives if unread_format(name) is None)
    if readable_archives:
        return WeightFiles(readable_archives)
    return _distributed(folder)


def _distributed(folder: Folder) -> WeightFiles:
    """Find a distributed checkpoint in a nested folder, or in a folder that cannot be listed."""
    if folder.names is None:
        descriptions = [METADATA] if folder.source(METADATA) is not None else []
    else:
        paths = (path.replace("\\", "/") for path in folder.below())
        descriptions = [path for path in paths if _describes_model(path)]
    if len(descriptions) != 1:
        return WeightFiles(())
    return WeightFiles((descriptions[0],), format=DISTRIBUTED)


def _describes_model(path: str) -> bool:
    """Return whether a path describes a model's weights, and not an optimizer or a step."""
    if PurePath(path).name != METADATA or path.startswith("optim"):
        return False
    return step_in(PurePosixPath(path).parts[0]) is None


def parts_of(name: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return a file, and its other parts if the name is ``…-00001-of-00003…``.

    Examples
    --------
    >>> parts_of("a-00001-of-00002.gguf", ["a-00002-of-00002.gguf", "b.gguf"])
    ('a-00001-of-00002.gguf', 'a-00002-of-00002.gguf')
    """
    match = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\.gguf)", name)
    if match is None:
        return (name,)
    pattern = re.compile(rf"{re.escape(match[1])}\d{{5}}{re.escape(match[2])}")
    return tuple(sorted({name, *filter(pattern.fullmatch, names)}))


def _one_model(names: tuple[str, ...], layout: Format) -> WeightFiles:
    """Return the only model among files, or the last model of a run; else `CheckpointError`."""
    are_steps = any("{}" in path for path in layout.config)  # each with its own configuration
    if are_steps and len(names) > 1:
        note = f"read {names[-1]}, the last of {len(names)} steps; name another by its path"
        return WeightFiles(names[-1:], notes=(note,), format=layout)
    model_files = parts_of(names[0], names)
    other_models = [name for name in names if name not in model_files and name.endswith(".gguf")]
    if other_models:
        listed = _shortened_list((names[0], *other_models), most=4)
        raise CheckpointError(f"several models here: {listed}; choose one by its path or address")
    return WeightFiles(model_files, format=layout)


def _shortened_list(names: Sequence[str], most: int) -> str:
    """Return the first names with commas between them; an ellipsis replaces further names."""
    listed = ", ".join(names[:most])
    return f"{listed}, …" if len(names) > most else listed


def _passed_over(chosen: WeightFiles, names: Iterable[str]) -> tuple[str, ...]:
    """Return the note on files of the same format that were skipped."""
    ending = PurePath(chosen.files[0]).suffix
    endings = (ending, f"{ending}.index.json")
    skipped_files = []
    for name in sorted(set(names) - {*chosen.files, chosen.listed_in}):
        is_like_chosen = name.endswith(endings) or format_of(name) is not None
        if is_like_chosen and not name.startswith(NOT_WEIGHTS):
            skipped_files.append(name)
    if not skipped_files:
        return ()
    listed = ", ".join(skipped_files[:3])
    if len(skipped_files) > 3:
        listed += f" and {len(skipped_files) - 3} more"
    return (
        f"read {chosen.listed_in or chosen.files[0]}, as transformers does; passed over {listed}",
    )


def shard_names(index: Mapping[str, Any], name: str) -> list[str]:
    """Return the files in the index of a sharded model; all are in the folder of the index."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{name}: lacks the 'weight_map' of a sharded model; expected files by tensor, got "
            f"{shown(weight_map)}; {DOWNLOAD}"
        )
    shards = sorted({str(value) for value in weight_map.values()})
    for shard in shards:
        is_name = PurePath(shard).name == shard and shard not in ("", ".", "..")
        if not is_name or not is_text(shard) or "\0" in shard:
            raise CheckpointError(
                f"{name}: names {shard!r}, outside its own folder; expected names of files next to "
                f"it; {DOWNLOAD}"
            )
    return shards


def unread_format(name: str) -> str | None:
    """Return a description and advice for a file of an unsupported format; None for others.

    Examples
    --------
    >>> unread_format("model.onnx")
    'ONNX; a graph whose weights may be folded and renamed; use the checkpoint it was exported from'
    """
    matching = (record for record in _unread_formats() if re.fullmatch(record["name"], name))
    return next((f"{record['is']}; {record['remedy']}" for record in matching), None)


# Tables in the folders of surveys, watches and callbacks.
TABLES_OF_FOLDERS = {"scores.parquet", "scores.jsonl"}


@cache
def _unread_formats() -> list[dict[str, str]]:
    text = resources.files("wqk.checkpoints").joinpath("formats.toml").read_text("utf-8")
    formats: list[dict[str, str]] = tomllib.loads(text)["format"]
    return formats


def no_weights(folder: Folder) -> CheckpointError:
    """Return the error for a folder without weights, with a list of the folder's contents."""
    if folder.refusals:
        return CheckpointError(
            f"the server refuses the weights (it answers {folder.refusals[0].status} to "
            f"{counted(len(folder.refusals), 'request')}); use an address that needs no login or "
            "contains its key, or download the checkpoint"
        )
    names = sorted(folder.names or ())
    for name in (*names, *sorted(folder.below())):
        if reason := unread_format(PurePath(name).name):
            return CheckpointError(f"no weights that wqk reads; {name} is {reason}")
    weights = (PurePath(path) for path in folder.below() if path.endswith(ENDINGS))
    deeper = sorted({str(path.parent) for path in weights} - {"."})
    if deeper:
        return NoCheckpoint(
            f"no weights here, but in its folders {', '.join(deeper[:5])}; choose one by its path, "
            "or in Python with subfolder="
        )
    listed = _shortened_list(names, most=5) or "no files"
    advice = "choose another folder"
    if not TABLES_OF_FOLDERS.isdisjoint(names):
        advice = "the folder contains scores, which wqk report shows"
    return NoCheckpoint(
        "no weights here; expected model.safetensors, model.safetensors.index.json or "
        f"pytorch_model.bin, got {listed}; {advice}"
    )


def weight_file(source: ByteSource) -> WeightFile:
    """Open a file of weights by its ending."""
    ending = PurePath(source.name).suffix
    with errors_about(source.name):
        if ending == ".bin":
            _refuse_others(source)
        if ending == ".gguf":
            return open_gguf(source)
        if ending in ARCHIVES:
            from wqk.checkpoints.torch_archive import TorchFile

            return TorchFile(source)
        return open_safetensors(source)


def _refuse_others(source: ByteSource) -> None:
    """Raise `CheckpointError` for a file of another program with the ending ``.bin``.

    A file of llama2.c begins with seven sizes of a model, or with magic bytes. A model of
    CTranslate2 begins with a version (4 bytes), the length of a name (2 bytes) and the name, which
    ends with a zero byte.
    """
    start = bytes_at(source, 0, min(64, source.size))
    has_sizes = False
    if len(start) == 64:
        sizes = struct.unpack("<7i", start[:28])
        has_sizes = all(0 < abs(size) < 2**20 for size in sizes)
    if has_sizes or start[:4] == b"24ka":
        raise CheckpointError(
            "a file of llama2.c, which is not read; use the .pt file that it was exported from"
        )
    header = re.match(rb"[\x01-\x20]\0\0\0(?P<length>.)\0(?P<name>\w+Spec)\0", start, re.DOTALL)
    if header and header["length"][0] == len(header["name"]) + 1:
        raise CheckpointError(
            f"a CTranslate2 model ({header['name'].decode()}), whose weights are joined, reordered "
            "and often quantized; use the checkpoint that it was converted from"
        )


class StoredCheckpoint(Checkpoint):
    """A checkpoint in one or more files of weights, with a configuration.

    A tensor has up to three kinds of names: its plain name without wrappers, for users; the stored
    name in a file; and, if quantized, the names of its components, which are not listed.

    Parameters
    ----------
    name, config, step, notes
        As the attributes of `Checkpoint`.
    files
        Files of different tensors.
    transfers
        The transfers of remote files; None if all files are local.

    Raises
    ------
    CheckpointError
        Two files contain a tensor with the same name, or quantized tensors are not supported.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[WeightFile],
        config: Mapping[str, Any],
        step: int | None = None,
        notes: Sequence[str] = (),
        transfers: Transfers | None = None,
    ) -> None:
        self.name, self.config, self.step, self.notes = name, config, step, tuple(notes)
        self._transfers = transfers
        self._file_of: dict[str, WeightFile] = {}
        for file in files:
            for tensor in file.tensors:
                if tensor in self._file_of:
                    raise CheckpointError(
                        f"{name}: tensor {tensor!r} occurs in two files; expected it in one; "
                        f"{DOWNLOAD}"
                    )
                self._file_of[tensor] = file
        self._stored = by_plain_name(self._file_of)
        stored_tensors = {
            name: self._file_of[stored].tensors[stored] for name, stored in self._stored.items()
        }
        abouts = [getattr(file, "about", {}) for file in files]
        with errors_about(name):
            quantized = find_quantized(
                Source(
                    tensors=stored_tensors,
                    config=config,
                    read=self._read_stored,
                    descriptions=[a[DESCRIPTION] for a in abouts if a.get(DESCRIPTION) is not None],
                    has_factors=any("gguf" in about for about in abouts),
                )
            )
        self._quantized = quantized.matrices
        self.notes = (*self.notes, *quantized.notes)
        component_names: set[str] = set()
        for matrix in self._quantized.values():
            component_names.update(component.name for component in matrix.components.values())
        self._tensors = {
            **{n: info for n, info in stored_tensors.items() if n not in component_names},
            **{n: matrix.info for n, matrix in self._quantized.items()},
        }

    @property
    def identity(self) -> tuple[Any, ...]:
        """Identity of the present content of the files."""
        return tuple(file.source.identity for file in dict.fromkeys(self._file_of.values()))

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes fetched since the checkpoint was opened, with headers and configuration."""
        return None if self._transfers is None else self._transfers.bytes

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and size of every tensor, by name."""
        return self._tensors

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Start to fetch the bytes that `read` will need."""
        for source, ranges in self._ranges(parts):
            source.want(ranges)

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Read the rows of each part; see `Checkpoint.read`.

        Parts are read in the order of their rows in the files. All remote ranges are requested in
        parallel.
        """
        for part in parts:
            self.info(part.name)
        self.prefetch(parts)
        with errors_about(self.name):
            order = sorted(range(len(parts)), key=lambda index: self._place(parts[index]))
            array_by_index = {index: self._read(parts[index]) for index in order}
        for source, ranges in self._ranges(parts):
            source.forget(ranges)
        return [array_by_index[index] for index in range(len(parts))]

    def raw(self, part: Part, room: np.ndarray | None = None) -> np.ndarray | None:
        """Return the stored bytes of a part, (bytes,).

        None for remote parts, for quantized parts, and for files without rows, such as archives,
        whose bytes depend on strides.
        """
        dtype, is_quantized = self.info(part.name).dtype, part.name in self._quantized
        if self._transfers is not None or is_quantized or is_float8(dtype):
            return None
        file, stored_part = self._stored_place(part)
        if not isinstance(file, RowFile):
            return None
        ranges = file.byte_ranges(stored_part)
        size = sum(stop - start for start, stop in ranges)
        has_room = room is not None and len(room) >= size
        content = room[:size] if room is not None and has_room else np.empty(size, np.uint8)
        filled = 0
        for start, stop in ranges:
            length = stop - start
            file.source.read_into(start, content[filled : filled + length].data)
            filled += length
        return content

    def regrouping(self, part: Part) -> Regrouping | None:
        """Return rows for columns in other groups; None if groups are neighboring columns."""
        matrix = self._quantized.get(part.name)
        if matrix is None or not matrix.groups:
            return None
        pieces = matrix.parts(part)
        stored = dict(zip(pieces, self._read_stored([*pieces.values()]), strict=True))
        columns = matrix.info.shape[1]
        group_of = stored.get("group_of", np.arange(columns) * matrix.groups // columns)

        def values(group_of: np.ndarray) -> np.ndarray:
            return matrix.read(part, {**stored, "group_of": group_of})

        return Regrouping(matrix.groups, group_of, values)

    def _stored_place(self, part: Part) -> tuple[WeightFile, Part]:
        """Return the file of a part, and the part under its stored name."""
        stored = self._stored[part.name]
        return self._file_of[stored], part._replace(name=stored)

    def abandon(self) -> None:
        """Cancel all transfers: reads in other threads end with an error."""
        if self._transfers is not None:
            self._transfers.abandon()
        for file in dict.fromkeys(self._file_of.values()):
            sources = file.sources if isinstance(file, BoxedFile) else [file.source]
            for source in sources:
                if isinstance(source, RemoteFile):
                    source.clean()

    def _pieces(self, part: Part) -> dict[str, Part]:
        """Return the stored parts of a part: the part, or the tensors of its codes and scales."""
        matrix = self._quantized.get(part.name)
        return {"": part} if matrix is None else matrix.parts(part)

    def _place(self, part: Part) -> tuple[int, list[tuple[int, int]]]:
        """Return a sort key of parts: the file, and the position of the first piece in it."""
        first_piece = next(iter(self._pieces(part).values()))
        file, stored_part = self._stored_place(first_piece)
        return id(file), file.byte_ranges(stored_part)

    def _read(self, part: Part) -> np.ndarray:
        """Return the values of a part; see `read`."""
        info, matrix = self._tensors[part.name], self._quantized.get(part.name)
        pieces = self._pieces(part)
        try:
            arrays = self._read_stored([*pieces.values()])
            if matrix is not None:
                return matrix.read(part, dict(zip(pieces, arrays, strict=True)))
        except MemoryError:
            raise CheckpointError(
                f"{self.name}: tensor {part.name!r}, of shape {info.shape}, does not fit in "
                "memory; read fewer of its rows, or use a machine with more memory"
            ) from None
        if is_float8(info.dtype):
            scale_name(part.name, self._tensors)  # raises: with scales, it would be a matrix
        if info.grid is None:
            require_floats(info.dtype, part.name)
        return arrays[0]

    def _read_stored(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Return rows of tensors in their stored types, including whole numbers."""
        places = [self._stored_place(part) for part in parts]
        return [file.read(stored_part) for file, stored_part in places]

    def _ranges(self, parts: Sequence[Part]) -> list[tuple[RemoteFile, list[tuple[int, int]]]]:
        """Return the ranges of parts, with all tensors of quantized parts, in the remote files."""
        if self._transfers is None:
            return []
        ranges_by_source: dict[RemoteFile, list[tuple[int, int]]] = {}
        parts_by_boxes: dict[BoxedFile, list[Part]] = {}
        for part in parts:
            for piece in self._pieces(part).values():
                file, stored_part = self._stored_place(piece)
                if isinstance(file, BoxedFile):
                    parts_by_boxes.setdefault(file, []).append(stored_part)
                elif isinstance(file.source, RemoteFile):
                    ranges = ranges_by_source.setdefault(file.source, [])
                    ranges += file.byte_ranges(stored_part)
        for boxes, boxed_parts in parts_by_boxes.items():
            for source, ranges in boxes.places(boxed_parts):
                if isinstance(source, RemoteFile):
                    ranges_by_source.setdefault(source, []).extend(ranges)
        return list(ranges_by_source.items())


def read_folder(folder: Folder, weights: WeightFiles | None = None) -> StoredCheckpoint:
    """Open the checkpoint in a folder, or in some of its files; only headers are read.

    Raises
    ------
    CheckpointError
        Weights are missing, or cannot be scored.
    """
    chosen = weights or choose_weights(folder)
    layout = chosen.format
    config = _stored_configuration(folder, chosen)
    if "quantization_config" in config:
        refuse_unread(config)
    if not chosen.files:
        raise no_weights(folder)
    files = _open_files(folder, chosen)
    about = _description(folder, chosen, files)
    if layout and layout.split_axis and len(files) > 1:
        files = [JoinedFiles(files, partial(layout.split_axis, width=config.get("dim")))]
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= file.tensors
    if layout is None:
        with errors_about(folder.name):
            config = quantized_config(config, tensors.values(), folder.object)
    return StoredCheckpoint(
        folder.name,
        files,
        config=_completed(config, layout, about, tensors),
        step=_step({**config, **about} if layout else about),
        notes=(*chosen.notes, *_notes_on_skipped(files)),
        transfers=folder.transfers,
    )


def _stored_configuration(folder: Folder, chosen: WeightFiles) -> Mapping[str, Any]:
    """Return the first configuration of the format in the folder; empty without one."""
    paths: Iterable[str] = ("config.json",)
    if chosen.format:
        paths = chosen.format.configurations(chosen.files[0])
    for path in paths:
        config = folder.object(path)
        if config:
            return config
    return {}


def _open_files(folder: Folder, chosen: WeightFiles) -> list[WeightFile]:
    """Open the chosen files; files of a sharded model become one."""

    def open_file(name: str) -> WeightFile:
        source = folder.source(name)
        if source is None:
            raise CheckpointError(
                f"shard {name} is missing, although {chosen.listed_in} names it; "
                "download the checkpoint again"
            )
        if chosen.format is DISTRIBUTED:
            inside = PurePosixPath(name).parent
            with errors_about(source.name):
                return open_distributed(source, lambda file: folder.source(str(inside / file)))
        return weight_file(source)

    if folder.transfers:
        files = _side_by_side(open_file, chosen.files, folder.transfers)
    else:
        files = [open_file(name) for name in chosen.files]
    shards = [file for file in files if isinstance(file, RowFile)]
    joined = join_shards(shards) if len(shards) == len(files) else None
    return files if joined is None else [joined]


def _description(
    folder: Folder, chosen: WeightFiles, files: Sequence[WeightFile]
) -> Mapping[str, Any]:
    """Return the first description in the files besides tensors; empty without one."""
    for file in files:
        about: Mapping[str, Any] | None = getattr(file, "about", None)
        if about:
            return about
    if chosen.format is DISTRIBUTED:
        return megatron_arguments(folder, PurePosixPath(chosen.files[0]).parent)
    return {}


def _completed(
    config: Mapping[str, Any],
    layout: Format | None,
    about: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> Mapping[str, Any]:
    """Return a configuration with all keys that families need."""
    model_type = config.get("model_type")
    if layout or model_type in (None, *COMPLETIONS) or is_transformer_lens(tensors):
        return configured(layout, Opened(config, about, tensors))
    return config  # transformers writes every key


def _notes_on_skipped(files: Sequence[WeightFile]) -> tuple[str, ...]:
    """Return a note on weights of an archive that are not read."""
    skipped_keys: dict[str, None] = {}
    for file in files:
        skipped_keys |= dict.fromkeys(getattr(file, "passed_over", ()))
    if not skipped_keys:
        return ()
    return (f"passed over further weights in the archive: {', '.join(skipped_keys)}",)


def _side_by_side(
    open_file: Callable[[str], WeightFile], names: Sequence[str], transfers: Transfers
) -> list[WeightFile]:
    """Open remote files in parallel, in separate threads that wait for the transfers."""
    pool = ThreadPoolExecutor(min(CONNECTIONS, len(names)))
    try:
        return list(pool.map(open_file, names))
    except BaseException:
        transfers.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def megatron_arguments(folder: Folder, inside: PurePosixPath) -> Mapping[str, Any]:
    """Return the arguments that Megatron stores with distributed checkpoints; else empty."""
    from wqk.checkpoints.torch_archive import TorchFile

    name = str(inside / COMMON)
    is_there = folder.names is None or name in {*folder.names, *folder.below()}
    source = folder.source(name) if is_there else None
    if source is None:
        return {}
    with errors_about(source.name):
        about = TorchFile(source, bare=True).about
    arguments = about.get("args")
    return {**about, "config": arguments} if isinstance(arguments, dict) else about


def _step(about: Mapping[str, Any]) -> int | None:
    """Return the training step that is stored in a file of weights."""
    recorded = (about.get(key) for key in ("iteration", "iter_num", "global_step", "step"))
    return next((step for step in recorded if type(step) is int and step >= 0), None)


def open_local(path: Path) -> Checkpoint:
    """Open the checkpoint in a folder or a file.

    Raises
    ------
    CheckpointError
        The folder has no weights, or weights that cannot be scored; or a file was replaced while
        other files were opened, for example by a trainer that saves its next step. Headers of two
        steps would be mixed.
    """
    name, opened = redacted(str(path)), list[LocalFile]()
    with errors_about(name):
        try:
            folder = path if path.is_dir() else path.parent
            if path.is_dir():
                checkpoint = read_folder(local_folder(path, opened))
            else:
                checkpoint = _open_file(path, opened)
            for file in opened:
                file.require_in_place()
            step = step_in(folder.resolve().name)  # also for "."
        except OSError as error:
            raise CheckpointError(
                f"cannot be opened ({error.strerror}); check the path and its permissions"
            ) from None
        except ValueError:  # a zero byte or a lone surrogate in the name
            raise NoCheckpoint("no such file or folder; check the path") from None
    checkpoint.name = name
    checkpoint.step = checkpoint.step if step is None else step
    return checkpoint


def table_advice(path: Path) -> str:
    """Return the end of a message about a file that may be a table: calls that read tables."""
    is_table = path.suffix in (".csv", ".json", ".jsonl", ".parquet")
    if not is_table:
        return ""
    return f"; wqk.read_table({str(path)!r}) reads a table of scores, and wqk report shows it"


def _open_file(path: Path, opened: list[LocalFile]) -> StoredCheckpoint:
    """Open the checkpoint in one file, with the configuration next to it; see `local_folder`."""
    if not path.exists():
        advice = beside(path) or demo_reference_advice(str(path)) or "; check the path"
        raise NoCheckpoint(f"no such file or folder{advice}")
    if reason := unread_format(path.name):
        raise CheckpointError(reason)
    layout = format_of(path.name)
    if path.suffix not in ENDINGS and not layout:
        raise CheckpointError(
            "not a checkpoint file; expected .safetensors, .gguf, or a torch archive "
            f"({', '.join(ARCHIVES)}){table_advice(path)}"
        )
    folder = local_folder(path.parent, opened)
    parts = layout.files(folder.names or ()) if layout and layout.split_axis else ()
    if len(parts) > 1:
        raise CheckpointError(
            f"one of {len(parts)} files that each hold some rows of every tensor; expected all of "
            "them; scan their folder"
        )
    return read_folder(folder, WeightFiles(parts_of(path.name, folder.names or ()), format=layout))


def has_weights(folder: Path) -> bool:
    """Return whether a folder contains weights that can be opened."""
    return folder.is_dir() and bool(choose_weights(local_folder(folder)).files)
