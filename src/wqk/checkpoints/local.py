"""Checkpoints on disk: a folder as `save_pretrained` writes it, or a single safetensors file."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.checkpoint import Checkpoint, Part, TensorInfo
from wqk.checkpoints.float8 import apply_scales, scale_name
from wqk.checkpoints.number_types import is_float8
from wqk.checkpoints.safetensors import SafetensorsFile
from wqk.checkpoints.steps import step_in
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

INDEX = "model.safetensors.index.json"

# A configuration or an index larger than this is none.
LARGEST_JSON = 64 * 2**20


class LocalFile:
    """A file's bytes by position.

    Positional reads rather than a memory map: a file that shrinks while it is read ends in an
    error, not in a signal that kills the process. One that is written to ends in an error, too; one
    that is replaced by another stays what it was, here.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        require_regular(path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None
        status = os.fstat(self._descriptor)
        self.size, self._modified = status.st_size, status.st_mtime_ns

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset."""
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise CheckpointError(f"{self.name}: cannot be read ({error.strerror})") from None
            if count == 0:
                raise CheckpointError(f"{self.name}: ended at byte {offset}, while it was read")
            buffer, offset = buffer[count:], offset + count
        if os.fstat(self._descriptor).st_mtime_ns != self._modified:
            raise CheckpointError(
                f"{self.name}: was written to while it was read; scan it again when it is at rest"
            )

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class SafetensorsCheckpoint(Checkpoint):
    """One or more safetensors files and a configuration."""

    def __init__(
        self,
        name: str,
        files: Sequence[SafetensorsFile],
        config: Mapping[str, Any],
        revision: str | None = None,
        step: int | None = None,
    ) -> None:
        self.name, self.config, self.revision, self.step = name, config, revision, step
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in files:
            for tensor in file.tensors:
                if tensor in self._file_of:
                    raise CheckpointError(f"{name}: tensor {tensor!r} occurs in two files")
                self._file_of[tensor] = file
        self._tensors = {tensor: file.tensors[tensor] for tensor, file in self._file_of.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name."""
        return self._tensors

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part, read in the order in which they lie in the files."""
        for part in parts:
            self.info(part.name)
        order = sorted(
            range(len(parts)),
            key=lambda i: (
                id(self._file_of[parts[i].name]),
                self._file_of[parts[i].name].position(parts[i].name),
            ),
        )
        arrays = {i: self._read(parts[i]) for i in order}
        return [arrays[i] for i in range(len(parts))]

    def _read(self, part: Part) -> np.ndarray:
        array = self._file_of[part.name].read(part)
        info = self._tensors[part.name]
        if is_float8(info.dtype):
            scale = scale_name(part.name, self._tensors)
            scales = self._file_of[scale].read(Part(scale))
            apply_scales(array, scales, info.shape, part.row_ranges(info.shape), scale)
        return array


def open_local(path: Path) -> Checkpoint:
    """The checkpoint in a folder or a file.

    Raises
    ------
    CheckpointError
        There are no weights, or they are of a kind that cannot be scored; the message says which.
    """
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    refuse_file(path)
    config = read_config(path.parent)
    refuse_quantized(config, str(path))
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint(
            str(path),
            [SafetensorsFile(LocalFile(path))],
            config,
            step=_step_of(path.parent),
        )
    if path.suffix in ARCHIVES:
        from wqk.checkpoints.torch_archive import TorchArchive

        return TorchArchive(str(path), [path], config, step=_step_of(path.parent))
    raise CheckpointError(
        f"{path}: not a checkpoint file; expected .safetensors, or a torch archive "
        f"({', '.join(ARCHIVES)})"
    )


ARCHIVES = (".bin", ".pt", ".pth", ".ckpt")

# What lies beside weights under the same endings: adapters, and the Trainer's own state.
NOT_WEIGHTS = ("adapter_", "training_args.", "optimizer.", "scheduler.", "scaler.", "rng_state")


def _open_folder(folder: Path) -> Checkpoint:
    config = read_config(folder)
    refuse_quantized(config, str(folder))
    name, step = str(folder), _step_of(folder)
    paths = _safetensors_paths(folder)
    if paths:
        files = [SafetensorsFile(LocalFile(path)) for path in paths]
        return SafetensorsCheckpoint(name, files, config, step=step)
    archives = _archive_paths(folder)
    if archives:
        from wqk.checkpoints.torch_archive import TorchArchive

        return TorchArchive(name, archives, config, step=step)
    _explain_absence(folder)
    raise CheckpointError(
        f"{folder}: no weights here; expected model.safetensors, {INDEX} or pytorch_model.bin"
    )


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights of its own, of a kind that can be opened."""
    return folder.is_dir() and bool(_safetensors_paths(folder) or _archive_paths(folder))


def _safetensors_paths(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        return _sharded(folder, INDEX)
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    return sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith(NOT_WEIGHTS))


def _archive_paths(folder: Path) -> list[Path]:
    if (folder / "pytorch_model.bin.index.json").exists():
        return _sharded(folder, "pytorch_model.bin.index.json")
    if (folder / "pytorch_model.bin").exists():
        return [folder / "pytorch_model.bin"]
    found = sorted(p for p in folder.iterdir() if p.suffix in ARCHIVES)
    return [p for p in found if not p.name.startswith(NOT_WEIGHTS)]


def _sharded(folder: Path, index_name: str) -> list[Path]:
    """The shard files that an index names, all of them in this folder and present."""
    paths = []
    for shard in shard_names(read_json(folder / index_name), str(folder / index_name)):
        path = folder / shard
        if not path.exists():
            raise CheckpointError(
                f"{folder}: shard {shard} is missing, though {index_name} names it; "
                "download the checkpoint again"
            )
        paths.append(path)
    return paths


def shard_names(index: Mapping[str, Any], name: str) -> list[str]:
    """The files that a sharded model's index names, all of them in its own folder."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{name}: lacks the 'weight_map' of a sharded model")
    shards = sorted({str(value) for value in weight_map.values()})
    for shard in shards:
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{name}: names {shard!r}, outside its own folder")
    return shards


def _explain_absence(folder: Path) -> None:
    """Name what lies in a folder without weights, where it is something known."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{folder}: holds only an adapter; merge it into its base model first "
            "(peft: model.merge_and_unload().save_pretrained(...))"
        )
    for path in sorted(folder.iterdir()):
        refuse_file(path)


def refuse_file(path: Path) -> None:
    """Refuse by name the kinds of file that hold weights wqk cannot score."""
    kinds = {
        ".gguf": "GGUF, a quantized format; use the original safetensors checkpoint",
        ".onnx": "ONNX; use the original safetensors checkpoint",
        ".h5": "a TensorFlow file; use the safetensors checkpoint",
        ".msgpack": "a Flax file; use the safetensors checkpoint",
        ".pkl": "a bare pickle, which could run code when read; wqk never reads one",
        ".pickle": "a bare pickle, which could run code when read; wqk never reads one",
    }
    if path.suffix in kinds:
        raise CheckpointError(f"{path}: {kinds[path.suffix]}")


def refuse_quantized(config: Mapping[str, Any], name: str) -> None:
    """Refuse integer-quantized models by their method's name; float8 is decided by tensor."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict):
        return
    method = str(quantization.get("quant_method", "")).lower()
    if method in ("gptq", "awq", "bitsandbytes", "aqlm", "hqq", "quanto", "eetq", "higgs", "vptq"):
        raise CheckpointError(
            f"{name}: quantized with {method}; its weights are codes, not numbers to score; "
            "use the original checkpoint, or dequantize it first"
        )


def read_config(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json; empty where there is none."""
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    require_regular(path)
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(f"{path}: too large for a configuration")
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def parse_object(text: bytes | bytearray, name: str) -> dict[str, Any]:
    """A JSON object from a file's bytes."""
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: expected a JSON object")
    return value


def require_regular(path: Path) -> None:
    """Refuse a pipe or a device, which may never end, and a folder where a file should be."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")


def _step_of(folder: Path) -> int | None:
    """The step in a folder's own name, also where it is called ``.``."""
    return step_in(folder.resolve().name)
