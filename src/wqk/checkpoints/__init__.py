"""Sources of tensors: folders, files, the Hub, URLs, torch archives, live modules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any, Unpack

from wqk._files import exists
from wqk.checkpoints.adapters import CONFIG, AdaptedCheckpoint, NotAnAdapter, read_adapter
from wqk.checkpoints.bucket_folders import bucket_has_weights, open_bucket_folder
from wqk.checkpoints.checkpoint import Checkpoint, Part, TensorInfo
from wqk.checkpoints.formats import ENDINGS, has_weights, local_folder, open_local
from wqk.checkpoints.hub import hub_page, is_hub_id, open_base, open_hub
from wqk.checkpoints.modules import open_live
from wqk.checkpoints.web import open_url
from wqk.errors import CheckpointError, demo_folder, errors_about
from wqk.storage.buckets import step_names
from wqk.storage.references import is_bucket, is_url, redacted, step_in

if TYPE_CHECKING:
    from wqk.storage.references import HubAccess

# What trainers call the folder of a step: Trainer, torchtitan, DeepSpeed, Megatron-LM.
STEP_FOLDERS = ("checkpoint-*", "step[-_]*", "global_step*", "iter_*")

__all__ = [
    "Checkpoint",
    "Part",
    "TensorInfo",
    "holds_weights",
    "open_checkpoint",
    "step_folders",
    "steps_of",
]


def open_checkpoint(
    ref: Any,
    revision: str | None = None,
    *,
    subfolder: str | None = None,
    base: str | os.PathLike[str] | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Checkpoint:
    """Open a checkpoint without reading its weights.

    Parameters
    ----------
    ref
        A folder or file; the folder of a training run, for its last step; a hub id such as
        ``google-bert/bert-base-uncased``, or ``id@revision``; ``demo:encoder``, ``demo:decoder`` or
        ``demo:induction``, a small model of the package; the address of a file or a folder
        (``https://``, or in a bucket ``s3://``, ``gs://``, ``az://``); an `nn.Module`; a state dict
        of arrays; or a `Checkpoint`, which is returned unchanged. A LoRA adapter, in a folder or on
        the hub, is opened on its base model.
    revision
        Revision of a Hub repository; no other checkpoint has revisions.
    token, cache_dir, local_files_only
        Options of the Hub, with their usual meaning; not needed for a checkpoint on disk.
    subfolder
        The folder of the repository, or of ``ref``, that contains the model.
    base
        Base model of a LoRA adapter, a path or a Hub id, instead of the base that the adapter
        names.

    Raises
    ------
    CheckpointError
        The checkpoint does not exist, or its weights cannot be scored.
    HubError
        The Hub or another server does not provide the checkpoint.

    Examples
    --------
    >>> import numpy as np
    >>> checkpoint = open_checkpoint({"q_proj.weight": np.zeros((4, 4), np.float16)})
    >>> checkpoint.tensors()["q_proj.weight"]
    TensorInfo(dtype='F16', shape=(4, 4), nbytes=32, grid=None)
    """
    if isinstance(ref, Checkpoint):
        _refuse_revision(revision, ref.name)
        return ref
    if isinstance(ref, str) and not exists(Path(ref)):
        ref = demo_folder(ref) or ref
    with errors_about(_name_of(ref)):
        access: HubAccess = {
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
        }
        base_name = None if base is None else os.fspath(base)
        checkpoint = _open(ref, revision, subfolder, base_name, **access)
        if base is not None and not isinstance(checkpoint, AdaptedCheckpoint):
            raise NotAnAdapter(
                f"has no base model, because it is no LoRA adapter; expected {CONFIG} next to its "
                "weights; leave out base="
            )
    if isinstance(ref, str | os.PathLike):
        again = Path(ref).absolute() if exists(Path(ref)) else ref
        access["token"] = token if isinstance(token, bool) else None  # no pickle holds a secret
        checkpoint._reopen = partial(
            open_checkpoint, again, revision, subfolder=subfolder, base=base, **access
        )
    return checkpoint


def _open(
    ref: Any,
    revision: str | None,
    subfolder: str | None,
    base: str | None,
    **access: Unpack[HubAccess],
) -> Checkpoint:
    if hasattr(ref, "state_dict") or isinstance(ref, Mapping):
        _refuse_revision(revision, type(ref).__name__)
        return open_live(ref)
    if not isinstance(ref, str | os.PathLike) or ref == "":
        got = "an empty name" if ref == "" else type(ref).__name__
        raise CheckpointError(
            f"a checkpoint must be a path, a Hub id, an nn.Module or a state dict, got {got}; pass "
            "one of these"
        )
    path, name = Path(ref), str(ref)
    repository, at, named_revision = name.partition("@")
    if at and not (is_url(name) or exists(path)) and is_hub_id(repository):
        if revision:
            raise CheckpointError(
                f"the revision is given twice, {redacted(named_revision)!r} and {revision!r}; "
                "expected one; leave out revision="
            )
        name, path, revision = repository, Path(repository), named_revision
    if is_bucket(name):
        _refuse_revision(revision, name)
        address = name if subfolder else steps_of(name)[-1]
        return open_bucket_folder(address, subfolder=subfolder, base=base, **access)
    if is_url(name):
        page = hub_page(name)
        if page is None:
            _refuse_revision(revision, name)
            return open_url(name, subfolder=subfolder, **access)
        name = page.repository
        revision, subfolder = revision or page.revision, subfolder or page.subfolder
    elif exists(path) or not is_hub_id(name):
        _refuse_revision(revision, name)
        folder = path / subfolder if subfolder else Path(steps_of(name)[-1])
        return _open_on_disk(folder, base, access)
    return open_hub(name, revision=revision, subfolder=subfolder, base=base, **access)


def _name_of(ref: object) -> str:
    """Return the name of a reference for messages, without secrets; of an object, its type."""
    if not isinstance(ref, str | os.PathLike):
        return redacted(type(ref).__name__)
    if is_url(str(ref)):
        return redacted(str(ref))
    return redacted(str(Path(ref)))


def _open_on_disk(folder: Path, base: str | None, access: HubAccess) -> Checkpoint:
    """Open a folder or a file on disk; open an adapter in a folder on its base model."""
    adapter = read_adapter(local_folder(folder)) if exists(folder / CONFIG) else None
    if adapter is None:
        return open_local(folder)
    # The base model is not opened by `open_checkpoint`: an adapter might name itself.
    base_path = Path(base or adapter.base)
    model = open_local(base_path) if exists(base_path) else open_base(adapter, base, **access)
    return AdaptedCheckpoint(model, adapter.on_base(base))


def steps_of(ref: str) -> list[str]:
    """Return the folders of a training run that are named after steps, in order, or just ``ref``.

    A folder with weights is always a checkpoint.
    """
    can_be_listed = is_bucket(ref) or exists(Path(ref))
    is_file = PurePosixPath(ref).suffix in ENDINGS
    if not can_be_listed or is_file:
        return [ref]
    steps = step_folders(ref)
    return steps if steps and not holds_weights(ref) else [ref]


def step_folders(run: str) -> list[str]:
    """Return the folders of a local or remote run that are named after steps, in order."""
    if is_bucket(run):
        folders = step_names(run, _is_step)
    else:
        folders = [str(path) for path in Path(run).glob("*") if _is_step(path.name)]
    folder_by_step: dict[int, str] = {}  # of two folders of one step, the last by name
    for folder in sorted(folders):
        step = step_in(PurePath(folder).name)
        folder_by_step[step or 0] = folder
    return [folder_by_step[step] for step in sorted(folder_by_step)]


def _is_step(name: str) -> bool:
    """Return whether a folder is named after a step."""
    step = step_in(name)
    is_named = any(fnmatchcase(name, pattern) for pattern in STEP_FOLDERS)
    return step is not None and is_named and name.endswith(str(step))


def holds_weights(folder: str) -> bool:
    """Return whether a local or remote folder contains weights that can be opened."""
    if is_bucket(folder):
        return bucket_has_weights(folder)
    return has_weights(Path(folder))


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is a file or a folder of weights, or a Hub id instead of a path.

    Examples
    --------
    >>> is_checkpoint(Path("google-bert/bert-base-uncased")), is_checkpoint(Path("scores.csv"))
    (True, False)
    """
    if path.is_dir():
        return has_weights(path)
    is_id = not path.suffix and not path.is_absolute() and len(path.parts) <= 2
    return path.suffix in ENDINGS or (is_id and not path.exists())


def _refuse_revision(revision: str | None, name: str) -> None:
    """Raise `CheckpointError`: only repositories of the Hub have revisions."""
    if revision:
        raise CheckpointError(
            f"{redacted(name)}: only Hub repositories have revisions, got {revision!r}; "
            "leave it out"
        )
