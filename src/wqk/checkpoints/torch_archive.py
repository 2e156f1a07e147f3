"""Torch archives (``pytorch_model.bin`` and its kin): loaded as weights only, or not at all."""

from __future__ import annotations

import pickle
import warnings
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.live import StateDict
from wqk.checkpoints.local import require_regular
from wqk.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Where training scripts keep the weights inside a larger dictionary.
NESTED_UNDER = ("state_dict", "model_state_dict", "model", "module")


class TorchArchive(StateDict):
    """The tensors of one or more archives, memory-mapped where the format allows.

    Raises
    ------
    CheckpointError
        PyTorch is not installed, the file is not an archive, or it holds anything but weights: a
        pickle's code is never run.
    """

    def __init__(
        self, name: str, paths: Sequence[Path], config: Mapping[str, Any], step: int | None = None
    ) -> None:
        tensors: dict[str, Any] = {}
        for path in paths:
            shard = _load(path)
            if twice := tensors.keys() & shard.keys():
                raise CheckpointError(f"{name}: tensor {min(twice)!r} occurs in two files")
            tensors |= shard
        super().__init__(tensors, config, name)
        self.step = step


def _load(path: Path) -> dict[str, Any]:
    require_regular(path)
    try:
        import torch
    except ImportError:
        raise CheckpointError(
            f"{path}: a torch archive is read through PyTorch, which is not installed; "
            "pip install 'wqk[train]', or use the model's safetensors version"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # archives from before PyTorch 1.6 cannot be mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: holds more than weights, or is no torch archive; loading it could run code, "
            "so it was not loaded; convert it to safetensors where you trust it"
        ) from None
    except Exception as error:  # a damaged archive ends in whatever its parser stumbles over
        reason = first_line(error)
        raise CheckpointError(f"{path}: not a readable torch archive ({reason})") from None
    return _weights(content, path)


def _weights(content: Any, path: Path) -> dict[str, Any]:
    """The state dict itself, or the one nested in a training script's dictionary."""
    for _ in range(3):
        if not isinstance(content, dict):
            break
        tensors = {k: v for k, v in content.items() if isinstance(k, str) and hasattr(v, "dtype")}
        if tensors:
            return tensors
        content = next((content[key] for key in NESTED_UNDER if key in content), None)
    raise CheckpointError(f"{path}: holds no state dict of named tensors")
