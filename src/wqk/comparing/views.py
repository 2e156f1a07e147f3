"""A checkpoint with some tensors as they would be: with other values, or in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wqk.checkpoints import Checkpoint, Part, TensorInfo


class View(Checkpoint):
    """A checkpoint of which some tensors are computed; the last of them is kept."""

    def __init__(self, base: Checkpoint, config: Mapping[str, Any] | None = None) -> None:
        self.name, self.base = base.name, base
        self.config = base.config if config is None else config
        self._last: tuple[str, np.ndarray | None] = ("", None)

    def value(self, name: str) -> np.ndarray | None:
        """A tensor's values; None where they are the base's."""
        return None

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The base's."""
        return self.base.tensors()

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The computed values where there are some."""
        found = []
        for part in parts:
            last = self._last  # which another thread may change
            if last[0] != part.name:
                last = self._last = part.name, self.value(part.name)
            value = last[1]
            if value is None:
                found += self.base.read([part])
            elif part.rows is None:
                found.append(value)
            else:
                ends = part.row_ranges(value.shape)
                found.append(np.concatenate([value[start:stop] for start, stop in ends]))
        return found


class Overlay(View):
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
        known = self.base.tensors()
        return {
            name: TensorInfo("F32", value.shape, 4 * value.size)
            for name, value in self._values.items()
            if name not in known
        } | dict(known)


class Renumbered(View):
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

    def value(self, name: str) -> np.ndarray | None:
        """The values in their new order."""
        if name not in self._orders and name not in self._places:
            return None
        found = self.base.read([Part(self._places.get(name, name))])[0]
        axis, order = self._orders.get(name, (0, None))
        return found if order is None else np.take(found, order, axis)

    def raw(self, part: Part, room: np.ndarray | None = None) -> np.ndarray | None:
        """The base's bytes of what is as it was."""
        moved = part.name in self._orders or part.name in self._places
        return None if moved else self.base.raw(part, room)
