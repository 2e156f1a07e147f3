"""The namespace of arrays: NumPy's own, or through array-api-compat PyTorch's and others'."""

from __future__ import annotations

from typing import Any

import array_api_compat
import numpy as np


def array_namespace(*arrays: Any) -> Any:
    """The module that computes with these arrays.

    Of NumPy's arrays NumPy itself, which follows the array API since version 2.1: importing the
    copy of it that array-api-compat makes takes .09 s, a sixth of a small scan.

    Examples
    --------
    >>> array_namespace(np.eye(2), 1.0).__name__
    'numpy'
    """
    if all(isinstance(one, np.ndarray | np.generic | float | int | None) for one in arrays):
        return np
    return array_api_compat.array_namespace(*arrays)
