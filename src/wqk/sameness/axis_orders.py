"""Orders of the entries along an axis, and stretches of rows: as numbers and as printed code.

`Order.indices` is applied to NumPy arrays; `Order.code` prints the same order as statements of
PyTorch. Both ways, entry i of the result is entry ``indices[i]`` of the array.

Axes: H query heads, G key heads, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# -- orders of an axis -------------------------------------------------------------------------


class Order(Protocol):
    """A reordering of the entries along one axis."""

    def indices(self, count: int) -> np.ndarray:
        """Return, for each entry of the result, the index of its source entry."""

    def code(self, name: str, axis: int) -> str:
        """Return statements of PyTorch that reorder the variable ``name``."""


def _listed(numbers: Iterable[int]) -> str:
    """Return numbers as printed code lists them, without brackets."""
    return ", ".join(map(str, numbers))


@dataclass(frozen=True)
class Axes:
    """An axis split into several axes, which are permuted and joined again.

    Attributes
    ----------
    shape
        Lengths of the axes.
    axes
        The order of the axes in the result, as in `numpy.transpose`.

    Examples
    --------
    >>> order = Axes((2, 2, 3), (0, 2, 1))
    >>> order.indices(12).tolist()
    [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    >>> print(order.code("w", 0))
    w = w.unflatten(0, (-1, 2, 3)).transpose(1, 2).flatten(0, 2)
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]

    def indices(self, count: int) -> np.ndarray:
        return np.arange(count).reshape(self.shape).transpose(self.axes).ravel()

    def code(self, name: str, axis: int) -> str:
        count = len(self.shape)
        moved = [place for place, source in enumerate(self.axes) if place != source]
        lengths = list(self.shape)
        if moved[0] > 0:
            lengths[0] = -1
        if len(moved) == 2:
            exchange = f"transpose({axis + moved[0]}, {axis + moved[1]})"
        elif axis == 0:
            # A weight has one axis more than the bias, but `permute` needs all axes.
            exchange = f"movedim({self.axes}, {tuple(range(count))})"
        else:
            sources = [*range(axis), *(axis + source for source in self.axes)]
            exchange = f"permute({_listed(sources)})"
        split = f"unflatten({axis}, ({_listed(lengths)}))"
        return f"{name} = {name}.{split}.{exchange}.flatten({axis}, {axis + count - 1})"


@dataclass(frozen=True)
class Rolled:
    """An axis with entries moved by a number of places.

    Examples
    --------
    >>> Rolled(1).indices(4).tolist(), Rolled(1).code("w", 0)
    ([1, 2, 3, 0], 'w = w.roll(-1, 0)')
    """

    by: int

    def indices(self, count: int) -> np.ndarray:
        return (np.arange(count) + self.by) % count

    def code(self, name: str, axis: int) -> str:
        return f"{name} = {name}.roll({-self.by}, {axis})"


@dataclass(frozen=True)
class Reversed:
    """An axis in reverse order."""

    def indices(self, count: int) -> np.ndarray:
        return np.arange(count)[::-1]

    def code(self, name: str, axis: int) -> str:
        return f"{name} = {name}.flip({axis})"


@dataclass(frozen=True)
class Listed:
    """An explicit order of all entries; if few entries moved, code lists only these entries.

    Attributes
    ----------
    order
        For each entry of the result, the index of its source entry.

    Examples
    --------
    >>> print(Listed((1, 0, 2, 3)).code("w", 0))
    targets = [0, 1]
    sources = [1, 0]
    w[targets] = w[sources]
    """

    order: tuple[int, ...]

    def indices(self, count: int) -> np.ndarray:
        return np.array(self.order)

    def code(self, name: str, axis: int) -> str:
        moved = [place for place, source in enumerate(self.order) if place != source]
        before = ":, " * axis
        if len(moved) <= len(self.order) // 2:
            sources = [self.order[place] for place in moved]
            return (
                f"targets = {moved}\n"
                f"sources = {sources}\n"
                f"{name}[{before}targets] = {name}[{before}sources]"
            )
        return f"{name} = {name}[{before}{list(self.order)}]"


@dataclass(frozen=True)
class Periodic:
    """One order, repeated in every stretch of entries.

    Attributes
    ----------
    order
        The order within a stretch.
    size
        Number of neighboring entries that move together.

    Examples
    --------
    >>> Periodic((1, 0), 2).indices(8).tolist()
    [2, 3, 0, 1, 6, 7, 4, 5]
    >>> print(Periodic((1, 0), 2).code("w", 0))
    w = w.unflatten(0, (-1, 2, 2))[:, [1, 0]].flatten(0, 2)
    """

    order: tuple[int, ...]
    size: int = 1

    def indices(self, count: int) -> np.ndarray:
        table = np.arange(count).reshape(-1, len(self.order), self.size)
        return table[:, list(self.order)].ravel()

    def code(self, name: str, axis: int) -> str:
        lengths = [-1, len(self.order)]
        if self.size > 1:
            lengths.append(self.size)
        split = f"unflatten({axis}, ({_listed(lengths)}))"
        index = ":, " * (axis + 1) + str(list(self.order))
        return f"{name} = {name}.{split}[{index}].flatten({axis}, {axis + len(lengths) - 1})"


@dataclass(frozen=True)
class HeadOrder:
    """Whole heads of one width in another order.

    Attributes
    ----------
    order
        For each head of the result, its source head.
    width
        Number of entries of a head.

    Examples
    --------
    >>> HeadOrder((1, 0), 2).code("w", 0)
    'w = w.unflatten(0, (-1, 2))[[1, 0]].flatten(0, 1)'
    """

    order: tuple[int, ...]
    width: int

    def indices(self, count: int) -> np.ndarray:
        return np.arange(count).reshape(-1, self.width)[list(self.order)].ravel()

    def code(self, name: str, axis: int) -> str:
        index = ":, " * axis + str(list(self.order))
        split = f"unflatten({axis}, (-1, {self.width}))"
        return f"{name} = {name}.{split}[{index}].flatten({axis}, {axis + 1})"


@dataclass(frozen=True)
class RotatedPart:
    """The first dimensions of each head, split into two axes that are exchanged.

    Attributes
    ----------
    width
        Number of entries of a head.
    shape
        Lengths of the two axes; their product is the number of rotated dimensions.

    Examples
    --------
    >>> RotatedPart(6, (2, 2)).indices(6).tolist()
    [0, 2, 1, 3, 4, 5]
    """

    width: int
    shape: tuple[int, int]

    def indices(self, count: int) -> np.ndarray:
        table = np.arange(count).reshape(-1, self.width)
        rotated = math.prod(self.shape)
        order = np.arange(rotated).reshape(self.shape).T.ravel()
        table[:, :rotated] = table[:, order]
        return table.ravel()

    def code(self, name: str, axis: int) -> str:
        inner, last = axis + 1, axis + 2  # the axis within a head, and the axis that its split adds
        before = ":, " * inner
        part = f"heads[{before}:{math.prod(self.shape)}]"
        exchange = f"unflatten({inner}, {self.shape}).transpose({inner}, {last})"
        return (
            f"heads = {name}.unflatten({axis}, (-1, {self.width}))\n"
            f"{part} = {part}.{exchange}.flatten({inner}, {last})\n"
            f"{name} = heads.flatten({axis}, {inner})"
        )


@dataclass(frozen=True)
class Sections:
    """A fused weight of queries, keys and values that are joined in another way.

    Attributes
    ----------
    lengths
        Rows of the queries, of the keys and of the values.
    shards, order
        Number of shards in the candidate's fused weight, and the order of queries, keys and values
        in a shard.
    expected_shards
        Number of shards in the reference's fused weight, each in the order q, k, v.

    Examples
    --------
    >>> Sections((2, 1, 1), 1, (1, 0, 2), 1).indices(4).tolist()  # from k q v to q k v
    [1, 2, 0, 3]
    """

    lengths: tuple[int, int, int]
    shards: int
    order: tuple[int, ...]
    expected_shards: int

    def indices(self, count: int) -> np.ndarray:
        actual = joined_rows(self.lengths, self.shards, self.order)
        expected = joined_rows(self.lengths, self.expected_shards, (0, 1, 2))
        return np.asarray(np.argsort(actual)[expected])

    def code(self, name: str, axis: int) -> str:
        dim = f", {axis}" if axis else ""
        letters = ", ".join("qkv"[part] for part in self.order)
        lengths = [self.lengths[part] // self.shards for part in self.order]
        if self.shards == 1:
            lines = [f"{letters} = {name}.split({lengths}{dim})"]
        else:
            pieces = f"{name}.chunk({self.shards}{dim})"
            lines = [
                f"shards = [shard.split({lengths}{dim}) for shard in {pieces}]",
                f"{letters} = (torch.cat(pieces{dim}) for pieces in zip(*shards))",
            ]
        if self.expected_shards == 1:
            lines.append(f"{name} = torch.cat([q, k, v]{dim})")
        else:
            count = self.expected_shards
            chunks = ", ".join(f"{side}.chunk({count}{dim})" for side in "qkv")
            lines += [
                f"pieces = [piece for shard in zip({chunks}) for piece in shard]",
                f"{name} = torch.cat(pieces{dim})",
            ]
        return "\n".join(lines)


def joined_rows(lengths: Sequence[int], shards: int, order: Sequence[int]) -> np.ndarray:
    """Return rows of queries, keys and values in their order in a fused weight of shards.

    The rows are numbered in the order: all queries, all keys, all values.

    Parameters
    ----------
    lengths
        Rows of the queries, of the keys and of the values.
    shards
        Number of shards.
    order
        The order within a shard: 0 queries, 1 keys, 2 values.

    Examples
    --------
    >>> joined_rows((2, 2, 2), 2, (0, 1, 2)).tolist()
    [0, 2, 4, 1, 3, 5]
    """
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    pieces_by_part = [np.split(parts[part], shards) for part in order]
    pieces: list[np.ndarray] = []
    for pieces_of_shard in zip(*pieces_by_part, strict=True):
        pieces += pieces_of_shard
    return np.concatenate(pieces)


@dataclass(frozen=True)
class Stretches:
    """Rows of an array in stretches of equal length, at equal distances.

    Attributes
    ----------
    start
        The first row.
    length
        Number of rows of a stretch.
    period
        Distance between the first rows of two neighboring stretches.
    count
        Number of stretches.

    Examples
    --------
    >>> Stretches.of(np.array([2, 3, 8, 9]))
    Stretches(start=2, length=2, period=6, count=2)
    >>> Stretches.of(np.array([2, 3, 8, 9])).code
    'torch.arange(2, 14).view(2, 6)[:, :2].flatten()'
    """

    start: int
    length: int
    period: int
    count: int

    @classmethod
    def of(cls, rows: np.ndarray) -> Stretches:
        """Describe increasing row numbers.

        If the rows do not lie at equal distances, `indices` differs from the rows.
        """
        ends = np.flatnonzero(np.diff(rows) != 1)
        starts = rows[[0, *ends + 1]]
        count = len(starts)
        length = len(rows) // count
        period = length
        if count > 1:
            period = int(starts[1] - starts[0])
        return cls(int(starts[0]), length, period, count)

    @property
    def indices(self) -> np.ndarray:
        """Numbers of the rows."""
        first = self.start + self.period * np.arange(self.count)
        return (first[:, None] + np.arange(self.length)).ravel()

    @property
    def code(self) -> str:
        """Index of the rows, as printed code."""
        if self.count == 1:
            return f"slice({self.start}, {self.start + self.length})"
        end = self.start + self.count * self.period
        table = f"torch.arange({self.start}, {end}).view({self.count}, {self.period})"
        return f"{table}[:, :{self.length}].flatten()"
