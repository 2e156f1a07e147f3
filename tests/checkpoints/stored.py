"""Small tensors to be stored, and whether a checkpoint holds them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wqk.checkpoints import Part, open_checkpoint


def weights(seed: int, *names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 4, generator=generator) for name in names}


def write_pickle(path: Path, pickled: bytes, **more: bytes) -> Path:
    """An archive of PyTorch whose description is these bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        for name, content in more.items():
            archive.writestr(f"archive/{name}.pkl", content)
    return path


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    checkpoint.read([Part(name) for name in checkpoint.tensors()])


def assert_holds(checkpoint: Any, tensors: Mapping[str, Any]) -> None:
    """These tensors and no others, read in another order than they lie in the files."""
    assert checkpoint.tensors().keys() == tensors.keys()
    names = [*sorted(tensors, reverse=True), min(tensors)]  # and one of them twice
    for name, array in zip(names, checkpoint.read([Part(name) for name in names]), strict=True):
        np.testing.assert_array_equal(array, torch.as_tensor(tensors[name]).float().numpy())
