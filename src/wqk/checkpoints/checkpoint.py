"""The interface of all sources of tensors: names, shapes, and rows on request."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np


class TensorInfo(NamedTuple):
    """Metadata of a tensor."""

    dtype: str  # in the words of safetensors: F32, BF16, F8_E4M3, ...
    shape: tuple[int, ...]
    nbytes: int


class Part(NamedTuple):
    """A tensor, or some of its rows: half-open ranges of its first axis."""

    name: str
    rows: tuple[tuple[int, int], ...] | None = None

    def row_ranges(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """The wanted ranges, checked against the tensor's shape."""
        if self.rows is None:
            return ((0, shape[0]),) if shape else ((0, 1),)
        for start, stop in self.rows:
            if not (shape and 0 <= start < stop <= shape[0]):
                raise CheckpointError(
                    f"{self.name}: rows {start}:{stop} requested from a tensor of shape {shape}"
                )
        return self.rows

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the wanted rows, joined, of a tensor of this shape."""
        if self.rows is None:
            return shape
        return (sum(stop - start for start, stop in self.row_ranges(shape)), *shape[1:])

    def nbytes(self, info: TensorInfo) -> int:
        """Bytes that the wanted rows take in the checkpoint."""
        whole = math.prod(info.shape)
        return info.nbytes * math.prod(self.shape(info.shape)) // whole if whole else 0


class Checkpoint(ABC):
    """A transformer's weights from any source; made by `open_checkpoint`.

    Attributes
    ----------
    name
        The user's name for it: a path, a Hub id, a class name.
    revision, step
        The hub revision and the training step, where known.
    config
        The model's configuration as `transformers` writes it; empty without one.
    notes
        What users of its scores should know, such as skipped files.
    """

    name: str
    revision: str | None = None
    step: int | None = None
    config: Mapping[str, Any]
    notes: Sequence[str] = ()

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes fetched over the network so far; None for a local checkpoint."""
        return None

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name; reads no tensor data."""

    @abstractmethod
    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part, joined: float32, or float64 where stored so.

        Raises
        ------
        CheckpointError
            A tensor or its data is missing, or its type is unsupported.
        """

    def prefetch(self, parts: Sequence[Part]) -> None:  # noqa: B027 - most sources have no delay
        """Announce that these parts will be read soon; a remote checkpoint starts fetching them."""

    def abandon(self) -> None:  # noqa: B027
        """Cancel what was announced; a remote checkpoint stops fetching."""

    @property
    def parameters(self) -> int:
        """Number of values stored."""
        return sum(math.prod(info.shape) for info in self.tensors().values())

    def info(self, name: str) -> TensorInfo:
        """One tensor's type, shape and size."""
        try:
            return self.tensors()[name]
        except KeyError:
            raise CheckpointError(f"{self.name}: no tensor named {name!r}") from None

    def __repr__(self) -> str:
        revision = f", revision {self.revision}" if self.revision else ""
        return f"{type(self).__name__}({self.name!r}{revision}: {len(self.tensors())} tensors)"
