"""A live module for tests that need none: a state dict and a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Module:
    """Parts of an `nn.Module` of `transformers` that `wqk.open_checkpoint` reads."""

    def __init__(self, tensors: Mapping[str, np.ndarray], config: Mapping[str, Any]) -> None:
        self._tensors, self._config = tensors, config

    def state_dict(self) -> Mapping[str, np.ndarray]:
        return self._tensors

    @property
    def config(self) -> Module:
        return self

    def to_dict(self) -> Mapping[str, Any]:
        return self._config
