"""A folder of weights, wherever it is: which files are the model, and how it is configured."""

from __future__ import annotations

from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.choosing import (
    Weights,
    choose_weights,
    no_weights,
    parse_object,
    refuse_quantized,
)
from wqk.checkpoints.configurations import Opened, configured
from wqk.checkpoints.distributed import DistributedFile
from wqk.checkpoints.formats import format_of
from wqk.checkpoints.joining import JoinedFile
from wqk.checkpoints.stored import weight_file
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from wqk.checkpoints.safetensors import ByteSource
    from wqk.checkpoints.stored import WeightFile

# No configuration and no index is larger than this.
LARGEST_CONFIGURATION = 64 * 2**20


class Folder(NamedTuple):
    """A folder, here or remote.

    Attributes
    ----------
    name
        What the user calls it.
    source
        The bytes of one of its files; None where there is no such file.
    names
        Its files; None where they cannot be listed.
    below
        Paths of files deeper in it.
    """

    name: str
    source: Callable[[str], ByteSource | None]
    names: Sequence[str] | None = None
    below: Callable[[], Iterable[str]] = tuple

    def weights(self) -> Weights:
        """Which of its files are the model."""
        return choose_weights(
            self.name,
            self.names,
            lambda name: read_object(self.source(name)),
            lambda name: self.source(name) is not None,
            self.below,
        )


class Contents(NamedTuple):
    """An opened folder: its files of weights, and what is known of the model."""

    files: Sequence[WeightFile]
    config: Mapping[str, Any]
    step: int | None
    notes: tuple[str, ...]


def read_folder(
    folder: Folder,
    weights: Weights | None = None,
    run: Callable[[Callable[[str], WeightFile], Sequence[str]], Iterable[WeightFile]] = map,
) -> Contents:
    """Open a folder's files; reads its configuration, its index and every header.

    Parameters
    ----------
    folder
        Which.
    weights
        The files to open, where not all of the folder's.
    run
        Calls a function for every name, as `map` does; side by side where files are remote.

    Raises
    ------
    CheckpointError
        It holds no weights, or not all of them, or such as cannot be scored.
    """
    chosen = weights or folder.weights()
    layout = chosen.format
    paths = layout.config if layout else ("config.json",)
    config = next((found for path in paths if (found := read_object(folder.source(path)))), {})
    refuse_quantized(config, folder.name)
    if not chosen.files:
        raise no_weights(folder.name, folder.names or (), folder.below())

    def open_file(name: str) -> WeightFile:
        source = folder.source(name)
        if source is None:
            raise CheckpointError(
                f"{folder.name}: shard {name} is missing, although {chosen.listed_in} names it; "
                "download the checkpoint again"
            )
        if PurePath(name).name == ".metadata":
            return DistributedFile(source, lambda file: folder.source(_beside(name, file)))
        return weight_file(source)

    files: Sequence[WeightFile] = list(run(open_file, chosen.files))
    abouts = [about for file in files if (about := getattr(file, "about", None))]
    about = abouts[0] if abouts else {}
    if layout and layout.split_axis and len(files) > 1:
        files = [JoinedFile(files, partial(layout.split_axis, width=config.get("dim")))]
    tensors = {name: info for file in files for name, info in file.tensors.items()}
    complete = configured(folder.name, layout, Opened(config, about, tensors))
    return Contents(files, complete, _step(about), chosen.notes)


def read_file(folder: Folder, name: str) -> Contents:
    """Open one file of a folder, with the configuration beside it.

    Raises
    ------
    CheckpointError
        As `read_folder`; or the file is one part of several.
    """
    layout = format_of(name)
    parts = layout.files(folder.names or ()) if layout and layout.split_axis else ()
    if len(parts) > 1:
        raise CheckpointError(
            f"{folder.name}/{name}: one of {len(parts)} files that each hold some rows of every "
            "tensor; scan their folder"
        )
    return read_folder(folder, Weights((name,), format=layout))


def read_object(source: ByteSource | None) -> dict[str, Any]:
    """The object in a file of JSON or YAML; empty if there is no file."""
    if source is None:
        return {}
    if source.size > LARGEST_CONFIGURATION:
        raise CheckpointError(f"{source.name}: too large for a configuration file")
    content = bytearray(source.size)
    source.read_into(0, memoryview(content))
    return parse_object(content, source.name)


def _beside(name: str, file: str) -> str:
    return str(PurePath(name).parent / file)


def _step(about: Mapping[str, Any]) -> int | None:
    """The training step that a file of weights records."""
    found = (about.get(key) for key in ("iteration", "iter_num", "global_step", "step"))
    return next((step for step in found if type(step) is int and step >= 0), None)
