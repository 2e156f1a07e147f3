"""Shapes for annotations: checked where jaxtyping is loaded (the tests), free elsewhere.

Importing jaxtyping costs more than starting the whole command, so these names are real types only
for type checkers and once somebody else has imported it.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int

    Array: TypeAlias = Any
else:

    class _AnyShape:
        """Stands for a jaxtyping type: accepts every subscript and checks nothing."""

        def __class_getitem__(cls, _: object) -> Any:
            return Any

    Array = Any
    Bool = Float = Int = _AnyShape

FilePath: TypeAlias = str | os.PathLike[str]

__all__ = ["Array", "Bool", "FilePath", "Float", "Int"]
