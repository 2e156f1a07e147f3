"""A folder of weights, wherever it is: which files are the model, and how it is configured."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.choosing import Weights, choose_weights, no_weights, refuse_quantized
from wqk.checkpoints.configurations import Opened, configured
from wqk.checkpoints.distributed import open_distributed
from wqk.checkpoints.formats import format_of
from wqk.checkpoints.joining import join_files
from wqk.checkpoints.ranged import CONNECTIONS
from wqk.checkpoints.stored import StoredCheckpoint, weight_file
from wqk.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from wqk.checkpoints.files import ByteSource, WeightFile
    from wqk.checkpoints.ranged import Workers

# Largest configuration or index; YAML, which usually takes 5 kB, is slow to parse.
LARGEST_CONFIGURATION, LARGEST_YAML = 64 * 2**20, 2**18


class Folder(NamedTuple):
    """A folder, here or remote."""

    name: str  # what the user calls it
    source: Callable[[str], ByteSource | None]  # the bytes of a file; None if it does not exist
    names: Sequence[str] | None = None  # its files; None if they cannot be listed
    below: Callable[[], Iterable[str]] = tuple  # paths of files deeper in it
    workers: Workers | None = None  # what fetches the files of a remote folder

    def holds(self, file: str) -> bool:
        """Whether there is such a file; for folders that cannot be listed."""
        return self.source(file) is not None

    def object(self, file: str) -> dict[str, Any]:
        """The object in a file of JSON or YAML; empty if there is no file."""
        source = self.source(file)
        if source is None:
            return {}
        if source.size > LARGEST_CONFIGURATION:
            raise CheckpointError(f"{source.name}: too large for a configuration file")
        content = bytearray(source.size)
        source.read_into(0, memoryview(content))
        parse = _parse_yaml if file.endswith((".yaml", ".yml")) else _parse_json
        return parse(content, source.name)


def read_folder(folder: Folder, weights: Weights | None = None) -> StoredCheckpoint:
    """The checkpoint in a folder, or of some of its files; headers are read, weights are not.

    Raises
    ------
    CheckpointError
        Weights are missing, or cannot be scored.
    """
    chosen = weights or choose_weights(folder)
    layout = chosen.format
    paths = layout.config if layout else ("config.json",)
    config = next((found for path in paths if (found := folder.object(path))), {})
    refuse_quantized(config, folder.name)
    if not chosen.files:
        raise no_weights(folder)

    def open_file(name: str) -> WeightFile:
        source = folder.source(name)
        if source is None:
            raise CheckpointError(
                f"{folder.name}: shard {name} is missing, although {chosen.listed_in} names it; "
                "download the checkpoint again"
            )
        if PurePath(name).name == ".metadata":
            beside = PurePath(name).parent
            return open_distributed(source, lambda file: folder.source(str(beside / file)))
        return weight_file(source)

    files = (
        _side_by_side(open_file, chosen.files, folder.workers)
        if folder.workers
        else [open_file(name) for name in chosen.files]
    )
    abouts = [about for file in files if (about := getattr(file, "about", None))]
    about = abouts[0] if abouts else {}
    if layout and layout.split_axis and len(files) > 1:
        files = [join_files(files, partial(layout.split_axis, width=config.get("dim")))]
    tensors = {name: info for file in files for name, info in file.tensors.items()}
    complete = configured(folder.name, layout, Opened(config, about, tensors))
    return StoredCheckpoint(
        folder.name, files, complete, _step(about), chosen.notes, folder.workers
    )


def read_file(folder: Folder, name: str) -> StoredCheckpoint:
    """The checkpoint in one file of a folder, with the configuration beside it."""
    layout = format_of(name)
    parts = layout.files(folder.names or ()) if layout and layout.split_axis else ()
    if len(parts) > 1:
        raise CheckpointError(
            f"{folder.name}/{name}: one of {len(parts)} files that each hold some rows of every "
            "tensor; scan their folder"
        )
    return read_folder(folder, Weights((name,), format=layout))


def _side_by_side(
    open_file: Callable[[str], WeightFile], names: Sequence[str], workers: Workers
) -> list[WeightFile]:
    """Open remote files at once, in threads other than the workers, for which these wait."""
    pool = ThreadPoolExecutor(min(CONNECTIONS, len(names)))
    try:
        return list(pool.map(open_file, names))
    except BaseException:
        workers.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _parse_json(text: bytearray, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
        if re.search(rb"\\u[dD][89a-fA-F]", text):  # halves of pairs cannot be stored or printed
            whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            value = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: expected a JSON object")
    return value


def _parse_yaml(text: bytearray, name: str) -> dict[str, Any]:
    import yaml

    try:
        if len(text) > LARGEST_YAML:
            raise ValueError(f"larger than {LARGEST_YAML} bytes")
        value = yaml.safe_load(text.decode("utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"{name}: not valid YAML ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: expected keys with values")
    return {key: item for key, item in value.items() if isinstance(key, str)}


def _step(about: Mapping[str, Any]) -> int | None:
    """The training step that a file of weights records."""
    found = (about.get(key) for key in ("iteration", "iter_num", "global_step", "step"))
    return next((step for step in found if type(step) is int and step >= 0), None)
