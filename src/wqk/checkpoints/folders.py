"""Checkpoints in folders, here or remote: which files are the model, and how it is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.configurations import Opened, configured
from wqk.checkpoints.distributed import open_distributed
from wqk.checkpoints.files import join_files
from wqk.checkpoints.formats import (
    ARCHIVES,
    ENDINGS,
    Weights,
    choose_weights,
    format_of,
    no_weights,
    parts_of,
    unread_format,
)
from wqk.checkpoints.listing import Folder, local_folder
from wqk.checkpoints.quantized import refuse_unread
from wqk.checkpoints.ranged import CONNECTIONS
from wqk.checkpoints.references import redacted, step_in
from wqk.checkpoints.stored import StoredCheckpoint, weight_file
from wqk.errors import CheckpointError, errors_about

if TYPE_CHECKING:
    from wqk.checkpoints.checkpoint import Checkpoint
    from wqk.checkpoints.files import WeightFile
    from wqk.checkpoints.ranged import Workers


def read_folder(folder: Folder, weights: Weights | None = None) -> StoredCheckpoint:
    """The checkpoint in a folder, or of some of its files; headers are read, weights are not.

    Raises `CheckpointError` if weights are missing, or cannot be scored.
    """
    chosen = weights or choose_weights(folder)
    layout = chosen.format
    paths = layout.config if layout else ("config.json",)
    config = next((found for path in paths if (found := folder.object(path))), {})
    refuse_unread(config)
    if not chosen.files:
        raise no_weights(folder)

    def open_file(name: str) -> WeightFile:
        source = folder.source(name)
        if source is None:
            raise CheckpointError(
                f"shard {name} is missing, although {chosen.listed_in} names it; "
                "download the checkpoint again"
            )
        if PurePath(name).name == ".metadata":
            beside = PurePath(name).parent
            with errors_about(source.name):
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
    complete = configured(layout, Opened(config, about, tensors))
    others = dict.fromkeys(key for file in files for key in getattr(file, "passed_over", ()))
    notes = (f"passed over further weights in the archive: {', '.join(others)}",) if others else ()
    return StoredCheckpoint(
        folder.name, files, complete, _step(about), (*chosen.notes, *notes), folder.workers
    )


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


def _step(about: Mapping[str, Any]) -> int | None:
    """The training step that a file of weights records."""
    found = (about.get(key) for key in ("iteration", "iter_num", "global_step", "step"))
    return next((step for step in found if type(step) is int and step >= 0), None)


def open_local(path: Path) -> Checkpoint:
    """The checkpoint in a folder or a file.

    Raises `CheckpointError` without weights, or if they are of a kind that cannot be scored.
    """
    name = redacted(str(path))
    with errors_about(name):
        try:
            folder = path if path.is_dir() else path.parent
            checkpoint = read_folder(local_folder(path)) if path.is_dir() else _open_file(path)
            step = step_in(folder.resolve().name)  # also where it is called "."
        except OSError as error:
            raise CheckpointError(f"cannot be opened ({error.strerror})") from None
        except ValueError:  # a zero byte or a lone surrogate in the name
            raise CheckpointError("no such file or folder") from None
    checkpoint.name = name
    checkpoint.step = checkpoint.step if step is None else step
    return checkpoint


def _open_file(path: Path) -> StoredCheckpoint:
    """The checkpoint in one file, with the configuration beside it."""
    if not path.exists():
        raise CheckpointError("no such file or folder")
    if what := unread_format(path.name):
        raise CheckpointError(what)
    layout = format_of(path.name)
    if path.suffix not in ENDINGS and not layout:
        raise CheckpointError(
            "not a checkpoint file; expected .safetensors, .gguf, or a torch archive "
            f"({', '.join(ARCHIVES)})"
        )
    folder = local_folder(path.parent)
    parts = layout.files(folder.names or ()) if layout and layout.split_axis else ()
    if len(parts) > 1:
        raise CheckpointError(
            f"one of {len(parts)} files that each hold some rows of every tensor; scan their folder"
        )
    return read_folder(folder, Weights(parts_of(path.name, folder.names or ()), format=layout))


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights that can be opened."""
    return folder.is_dir() and bool(choose_weights(local_folder(folder)).files)
