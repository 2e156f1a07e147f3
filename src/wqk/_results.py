"""What every result of a verb has: a sentence, a table, plain values, and views in a notebook."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from wqk._console import Shown, printable

if TYPE_CHECKING:
    import polars as pl


class Result(Shown):
    """Base of what verbs return, which are dataclasses.

    Each says its `sentence`, the rows of its `frame`, the lines that the command prints (`_shown`),
    and, if there is one, its picture (`_drawn`). The rest follows.
    """

    # Properties that `to_dict` has besides the fields; dataclasses in these fields may say theirs.
    told: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def sentence(self) -> str:
        """The outcome."""

    @abstractmethod
    def _rows(self) -> Iterable[Mapping[str, Any]]:
        """The rows of `frame`, which share their columns."""

    @property
    def frame(self) -> pl.DataFrame:
        """The result as a table, a polars frame."""
        import polars as pl

        return pl.DataFrame([json_value(row) for row in self._rows()], infer_schema_length=None)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return _told(self)

    def __str__(self) -> str:
        return printable(self.sentence)


def json_value(value: Any) -> Any:
    """A value as JSON can hold it, with None in place of NaN and infinity.

    Examples
    --------
    >>> json_value({"p": np.float32("nan"), ("q", 1): (np.arange(2), {3})})
    {'p': None, 'q 1': [[0, 1], [3]]}
    """
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, np.ndarray | np.generic):
        return json_value(value.tolist())
    if dataclasses.is_dataclass(value):
        return _told(value)
    if hasattr(value, "to_dicts"):  # a polars frame
        return json_value(value.to_dicts())
    if hasattr(value, "_asdict"):
        return json_value(value._asdict())
    if isinstance(value, Mapping):
        return {
            " ".join(map(str, key)) if isinstance(key, tuple) else str(key): json_value(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, int | str) else str(value)


def _told(value: Any) -> dict[str, Any]:
    """A dataclass's fields, and the properties that it tells."""
    names = [field.name for field in dataclasses.fields(value)]
    return {
        name: json_value(getattr(value, name)) for name in (*names, *getattr(value, "told", ()))
    }
