"""Shapes for annotations, checked at run time only if jaxtyping is loaded, as in the tests.

Importing jaxtyping takes longer than starting the command. Therefore these names are types of
jaxtyping only for type checkers, and if jaxtyping is already imported.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

Array: TypeAlias = Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    # The score of each form of a stack; of a single one, which type checkers assume, a number.
    Scores: TypeAlias = float
elif "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Int

    Scores = float | Float[Array, "*stack"]
else:
    Scores = Any

    class _AnyShape:
        """Replacement of a jaxtyping type: accepts every subscript and checks nothing."""

        def __class_getitem__(cls, _: object) -> Any:
            return Any

    Bool = Float = Int = _AnyShape

FilePath: TypeAlias = str | os.PathLike[str]

__all__ = ["Array", "Bool", "FilePath", "Float", "Int", "Scores"]
