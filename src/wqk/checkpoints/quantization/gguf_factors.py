"""GGUF: one factor of a whole weight, in a separate tensor.

llama.cpp multiplies the outputs of a weight ``X.weight`` by ``X.scale``, if the file has this
tensor. It contains the global scale in files of NVFP4, and the scale of BitNet. The weight has any
type of GGUF.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.checkpoints.quantization.matrix import Arrays, Component, QuantizedMatrix
from wqk.checkpoints.quantization.module import FLOATS, Module, size

if TYPE_CHECKING:
    import numpy as np


def with_factor(module: Module) -> QuantizedMatrix:
    """Return a weight multiplied by one factor, or by a factor for each expert."""
    info = module.info(".weight")
    factors = module.shape(".scale", FLOATS, axes=None)
    is_by_expert = len(info.shape) == 3 and factors == info.shape[:1]
    if size(factors) != 1 and not is_by_expert:
        raise module.error(
            ".scale",
            f"is not one factor of {module.name('.weight')}, of shape {info.shape}",
            expected="one number, or one for each expert",
            actual=f"the shape {factors}",
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        factor = stored["factor"].reshape(-1)
        if is_by_expert:
            factor = factor[rows].reshape(-1, 1, 1)
        result: np.ndarray = stored["weight"] * factor
        return result

    nbytes = info.nbytes + module.info(".scale").nbytes
    components = {
        "weight": Component(module.name(".weight"), 1),
        "factor": Component(module.name(".scale")),
    }
    return QuantizedMatrix(info._replace(nbytes=nbytes), components, values)
