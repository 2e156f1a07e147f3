"""A checkpoint with some tensors as they would be: with other values, or in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.checkpoint import Around


class Overlay(Around):
    """A checkpoint in which some tensors have other values, or with another configuration."""

    def __init__(
        self,
        base: Checkpoint,
        values: Mapping[str, np.ndarray],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(base, config)
        self._values = values

    def value(self, name: str) -> np.ndarray | None:
        """The other values."""
        return self._values.get(name)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The base's, and those that it lacks."""
        known = self.inner.tensors()
        return {
            name: TensorInfo("F32", value.shape, 4 * value.size)
            for name, value in self._values.items()
            if name not in known
        } | dict(known)


class Renumbered(Around):
    """A checkpoint with tensors along an axis in another order, or in the place of others.

    ``orders`` has an axis and the indices along it for some names, ``places`` the tensor that
    stands for another.
    """

    def __init__(
        self, base: Checkpoint, orders: Mapping[str, tuple[int, np.ndarray]],
        places: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(base)
        self._orders, self._places = orders, places

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The rows and columns that stand for those wanted, and no others."""
        found = []
        for name, rows in parts:
            axis, order = self._orders.get(name, (1, None))
            if order is not None and axis == 0:
                wanted = [order[slice(*ends)] for ends in Part(name, rows).row_ranges(order.shape)]
                rows = tuple((int(row), int(row) + 1) for row in np.concatenate(wanted))
            (value,) = self.inner.read([Part(self._places.get(name, name), rows)])
            found.append(value if order is None or axis == 0 else np.take(value, order, axis))
        return found

    def raw(self, part: Part, room: np.ndarray | None = None) -> np.ndarray | None:
        """The base's bytes of what is as it was."""
        moved = part.name in self._orders or part.name in self._places
        return None if moved else self.inner.raw(part, room)
