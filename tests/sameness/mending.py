"""The printed code of a repair, run with PyTorch on the tensors of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def mend(
    repair: str,
    tensors: Tensors,
    original: Mapping[str, np.ndarray],
    config: dict[str, Any] | None = None,
) -> None:
    """Run a repair as it stands; the tensors and the configuration change in place."""
    import torch

    edited = {name: torch.tensor(value) for name, value in tensors.items()}
    reference = {name: torch.tensor(value) for name, value in original.items()}
    scope = {"torch": torch, "tensors": edited, "reference": reference, "config": config}
    exec(repair, scope)
    tensors.update({name: np.ascontiguousarray(value.numpy()) for name, value in edited.items()})
