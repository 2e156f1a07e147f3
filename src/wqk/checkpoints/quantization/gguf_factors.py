"""GGUF: one factor of a whole weight, next to it.

llama.cpp multiplies what a weight gives by ``X.scale``, if the file has it: files of NVFP4 keep
their global scale there, and BitNet its own. The weight itself is of any type of GGUF.
"""

from __future__ import annotations

import numpy as np

from wqk.checkpoints.quantization.matrix import Arrays, Component, QuantizedMatrix
from wqk.checkpoints.quantization.module import FLOATS, Module, size
from wqk.errors import CheckpointError


def with_factor(module: Module) -> QuantizedMatrix:
    """Return a weight multiplied by its factor: one number, or one for each expert."""
    info = module.info(".weight")
    factors = module.shape(".scale", FLOATS, axes=None)
    is_by_expert = len(info.shape) == 3 and factors == info.shape[:1]
    if size(factors) != 1 and not is_by_expert:
        raise CheckpointError(
            f"{module.name('.scale')} of shape {factors} is not one factor of "
            f"{module.name('.weight')}, of shape {info.shape}"
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        factor = stored["factor"].reshape(-1)
        if is_by_expert:
            factor = factor[rows].reshape(-1, 1, 1)
        return np.asarray(stored["weight"] * factor)

    nbytes = info.nbytes + module.info(".scale").nbytes
    components = {
        "weight": Component(module.name(".weight"), 1),
        "factor": Component(module.name(".scale")),
    }
    return QuantizedMatrix(info._replace(nbytes=nbytes), components, values)
