"""An algebra of edits: changes of one stored array, which can be applied and can print themselves.

An edit turns the candidate's array into the reference's. `Edit.apply` computes the result with
NumPy. `Edit.code` is the same in PyTorch, as statements on a variable. `wqk.sameness.execution`
runs these statements on NumPy arrays; the tests also run them with PyTorch.

Edits of rows do not depend on the number of axes, therefore the edit of a weight's rows is also the
edit of its bias. Axis 0 of a weight in the orientation of ``nn.Linear`` is the axis of its outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

# Digits with which a factor is printed, and therefore applied.
DIGITS = 9


def _printed(factor: float) -> str:
    """Return a factor with as many digits as are printed."""
    return f"{factor:.{DIGITS}g}"


class Edit(Protocol):
    """A change of one array."""

    @property
    def needs_original(self) -> bool:
        """True if the edit needs the reference's array."""

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        """Return the edited array; ``original`` is the reference's array."""

    def code(self, name: str = "w", original: str = "original") -> str:
        """Return statements of PyTorch that edit the variable ``name``."""

    def turned(self) -> Edit:
        """Return the same edit for the transposed array."""

    def on_bias(self) -> Edit | None:
        """Return the edit of the bias of the same rows; None if a bias has no such edit."""

    def describe(self) -> str:
        """Return the edit in a few words."""


# -- orders of an axis -------------------------------------------------------------------------


class Order(Protocol):
    """A reordering of the entries along one axis."""

    def indices(self, count: int) -> np.ndarray:
        """Return, for each entry of the result, the entry that it is taken from."""

    def code(self, name: str, axis: int) -> str:
        """Return statements of PyTorch that reorder the variable ``name``."""


@dataclass(frozen=True)
class Axes:
    """An axis seen as several axes, which are then exchanged.

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
        shape = [-1, *self.shape[1:]] if moved[0] > 0 else list(self.shape)
        if len(moved) == 2:
            turn = f"transpose({axis + moved[0]}, {axis + moved[1]})"
        else:
            turned = [*range(axis), *(axis + source for source in self.axes)]
            turn = f"permute({', '.join(map(str, turned))})"
        if axis == 0 and len(moved) > 2:
            # A weight has one more axis than its bias, which `permute` has to name.
            turn = f"movedim({tuple(self.axes)}, {tuple(range(count))})"
        split = f"unflatten({axis}, ({', '.join(map(str, shape))}))"
        return f"{name} = {name}.{split}.{turn}.flatten({axis}, {axis + count - 1})"


@dataclass(frozen=True)
class Rolled:
    """An axis whose entries moved by a number of places.

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
    """An explicit order of all entries."""

    order: tuple[int, ...]

    def indices(self, count: int) -> np.ndarray:
        return np.array(self.order)

    def code(self, name: str, axis: int) -> str:
        moved = [place for place, source in enumerate(self.order) if place != source]
        before = ":, " * axis
        if len(moved) <= len(self.order) // 2:
            sources = [self.order[place] for place in moved]
            lines = (
                f"targets = {moved}",
                f"sources = {sources}",
                f"{name}[{before}targets] = {name}[{before}sources]",
            )
            return "\n".join(lines)
        return f"{name} = {name}[{before}{list(self.order)}]"


@dataclass(frozen=True)
class Periodic:
    """One order, repeated in every stretch of entries; ``size`` entries move together.

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
        sizes = (len(self.order), self.size) if self.size > 1 else (len(self.order),)
        split = f"unflatten({axis}, (-1, {', '.join(map(str, sizes))}))"
        index = ":, " * (axis + 1) + str(list(self.order))
        return f"{name} = {name}.{split}[{index}].flatten({axis}, {axis + len(sizes)})"


@dataclass(frozen=True)
class HeadOrder:
    """Whole heads of one width in another order.

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
    """The first dimensions of each head, seen as two axes that are exchanged.

    Examples
    --------
    >>> RotatedPart(6, (2, 2)).indices(6).tolist()
    [0, 2, 1, 3, 4, 5]
    """

    width: int
    shape: tuple[int, int]

    def indices(self, count: int) -> np.ndarray:
        table = np.arange(count).reshape(-1, self.width)
        turned = math.prod(self.shape)
        order = np.arange(turned).reshape(self.shape).T.ravel()
        table[:, :turned] = table[:, order]
        return table.ravel()

    def code(self, name: str, axis: int) -> str:
        part = f"heads[{':, ' * (axis + 1)}:{math.prod(self.shape)}]"
        inner = f"unflatten({axis + 1}, {self.shape}).transpose({axis + 1}, {axis + 2})"
        return (
            f"heads = {name}.unflatten({axis}, (-1, {self.width}))\n"
            f"{part} = {part}.{inner}.flatten({axis + 1}, {axis + 2})\n"
            f"{name} = heads.flatten({axis}, {axis + 1})"
        )


@dataclass(frozen=True)
class Sections:
    """Queries, keys and values joined in another way.

    Attributes
    ----------
    lengths
        Rows of the queries, of the keys and of the values.
    shards, order
        Number of shards that the candidate is joined of, and the order of the three in a shard.
    joined
        Number of shards, in the order q, k, v, that it should be joined of.
    """

    lengths: tuple[int, int, int]
    shards: int
    order: tuple[int, ...]
    joined: int

    def indices(self, count: int) -> np.ndarray:
        actual = joined_rows(self.lengths, self.shards, self.order)
        expected = joined_rows(self.lengths, self.joined, (0, 1, 2))
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
        if self.joined == 1:
            lines.append(f"{name} = torch.cat([q, k, v]{dim})")
        else:
            count = self.joined
            chunks = ", ".join(f"{side}.chunk({count}{dim})" for side in "qkv")
            lines += [
                f"pieces = [piece for shard in zip({chunks}) for piece in shard]",
                f"{name} = torch.cat(pieces{dim})",
            ]
        return "\n".join(lines)


def joined_rows(lengths: Sequence[int], shards: int, order: Sequence[int]) -> np.ndarray:
    """Rows of queries, keys and values, numbered one after the other, as shards join them."""
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    pieces_of_part = [np.split(parts[part], shards) for part in order]
    shard_pieces = zip(*pieces_of_part, strict=True)
    return np.concatenate([np.concatenate(pieces) for pieces in shard_pieces])


# -- edits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Permute:
    """Entries along an axis in another order.

    Examples
    --------
    >>> edit = Permute(0, Rolled(1))
    >>> edit.apply(np.array([3, 1, 2])).tolist(), edit.turned().code()
    ([1, 2, 3], 'w = w.roll(-1, 1)')
    """

    axis: int
    order: Order
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return np.take(array, self.order.indices(array.shape[self.axis]), self.axis)

    def code(self, name: str = "w", original: str = "original") -> str:
        return self.order.code(name, self.axis)

    def turned(self) -> Edit:
        return replace(self, axis=1 - self.axis)

    def on_bias(self) -> Edit | None:
        return self if self.axis == 0 else None

    def describe(self) -> str:
        return f"another order of {'rows' if self.axis == 0 else 'columns'}"


@dataclass(frozen=True)
class Scale:
    """All numbers divided by one factor.

    Examples
    --------
    >>> Scale(1.7).code("b")
    'b = b / 1.7'
    """

    factor: float
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return array / float(_printed(self.factor))

    def code(self, name: str = "w", original: str = "original") -> str:
        if self.factor == -1:
            return f"{name} = -{name}"
        return f"{name} = {name} / {_printed(self.factor)}"

    def turned(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return self

    def describe(self) -> str:
        return f"divided by {self.factor:.4g}"


@dataclass(frozen=True)
class ScaleHeads:
    """Rows or columns divided by one factor for each head.

    Examples
    --------
    >>> print(ScaleHeads(0, (2.0, 0.5), 1).code())
    factors = torch.tensor([2.0, 0.5])
    w = (w.transpose(0, -1) / factors).transpose(0, -1)
    """

    axis: int
    factors: tuple[float, ...]
    width: int
    needs_original = False

    @property
    def _divisors(self) -> list[float]:
        """The factors with as many digits as are printed."""
        return [float(_printed(factor)) for factor in self.factors]

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        divisors = np.repeat(np.array(self._divisors, np.float32), self.width)
        if self.axis:
            return np.asarray(array / divisors)
        return np.asarray((array.swapaxes(0, -1) / divisors).swapaxes(0, -1))

    def code(self, name: str = "w", original: str = "original") -> str:
        repeated = f".repeat_interleave({self.width})" if self.width > 1 else ""
        lines = [f"factors = torch.tensor({self._divisors}){repeated}"]
        if self.axis:
            lines.append(f"{name} = {name} / factors")
        else:
            turn = "transpose(0, -1)"
            lines.append(f"{name} = ({name}.{turn} / factors).{turn}")
        return "\n".join(lines)

    def turned(self) -> Edit:
        return replace(self, axis=1 - self.axis)

    def on_bias(self) -> Edit | None:
        return self if self.axis == 0 else None

    def describe(self) -> str:
        return f"each of {len(self.factors)} heads divided by a factor of its own"


@dataclass(frozen=True)
class Negate:
    """Entries along an axis with the other sign.

    Examples
    --------
    >>> print(Negate(1, (0, 2)).code())
    negative = [0, 2]
    w[:, negative] *= -1
    """

    axis: int
    places: tuple[int, ...]
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        signs = np.ones(array.shape[self.axis], array.dtype)
        signs[list(self.places)] = -1
        shape = [1] * array.ndim
        shape[self.axis] = -1
        return array * signs.reshape(shape)

    def code(self, name: str = "w", original: str = "original") -> str:
        places = f"negative = {list(self.places)}"
        return f"{places}\n{name}[{':, ' * self.axis}negative] *= -1"

    def turned(self) -> Edit:
        return replace(self, axis=1 - self.axis)

    def on_bias(self) -> Edit | None:
        return self if self.axis == 0 else None

    def describe(self) -> str:
        return f"other signs of {len(self.places)} entries along axis {self.axis}"


@dataclass(frozen=True, eq=False)
class DivideByGain:
    """Columns divided by a power of a norm's gain.

    Attributes
    ----------
    axis
        The axis of the inputs.
    gain
        Name of the gain's tensor.
    values
        The gain as it multiplies the inputs, (D,).
    offset
        What is added to the stored gain when it is read.
    power
        How often the gain was folded in.
    of_reference
        Whether it is the reference's gain, not the candidate's.
    """

    axis: int
    gain: str
    values: np.ndarray
    offset: float
    power: int
    of_reference: bool = False
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        divisor = self.values**self.power
        return np.asarray(array / (divisor if self.axis else divisor[:, None]))

    def code(self, name: str = "w", original: str = "original") -> str:
        models = "reference" if self.of_reference else "tensors"
        gain = f"{models}[{self.gain!r}]"
        if self.offset:
            gain = f"({self.offset:g} + {gain})"
        power = "" if self.power == 1 else f" ** {self.power}"
        column = "" if self.axis else "[:, None]"
        return f"gain = {gain}{power}\n{name} = {name} / gain{column}"

    def turned(self) -> Edit:
        return replace(self, axis=1 - self.axis)

    def on_bias(self) -> Edit | None:
        return None

    def describe(self) -> str:
        return f"divided by the gain {self.gain}"


@dataclass(frozen=True, eq=False)
class LowRank:
    """A multiple of an adapter's product B A added.

    The printed code takes both factors from ``adapter``, by the name of the weight.

    Attributes
    ----------
    a, b
        The factors A (r, in) and B (out, r).
    factor
        The multiple.
    transposed
        Whether the transposed product is added.
    rows
        The rows of B that belong to the array, if the array is a part of a fused weight.

    Examples
    --------
    >>> edit = LowRank(np.array([[1.0, 0.0]]), np.array([[0.0], [1.0]]), 2.0)
    >>> edit.apply(np.zeros((2, 2))).tolist()
    [[0.0, 0.0], [2.0, 0.0]]
    >>> print(edit.code())
    a, b = adapter[name]
    w = w + 2 * (b @ a)
    """

    a: np.ndarray
    b: np.ndarray
    factor: float
    transposed: bool = False
    rows: Stretches | None = None
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        up = self.b if self.rows is None else self.b[self.rows.indices]
        product = up @ self.a
        multiple = float(_printed(self.factor)) * (product.T if self.transposed else product)
        return np.asarray(array + multiple, array.dtype)

    def code(self, name: str = "w", original: str = "original") -> str:
        up = "b" if self.rows is None else f"b[{self.rows.code}]"
        product = f"({up} @ a){'.T' if self.transposed else ''}"
        sign = "-" if self.factor < 0 else "+"
        times = "" if abs(self.factor) == 1 else f"{_printed(abs(self.factor))} * "
        return f"a, b = adapter[name]\n{name} = {name} {sign} {times}{product}"

    def turned(self) -> Edit:
        return replace(self, transposed=not self.transposed)

    def on_bias(self) -> Edit | None:
        return None

    def describe(self) -> str:
        turned = "transposed " if self.transposed else ""
        return f"{_printed(self.factor)} times the adapter's {turned}product added"


@dataclass(frozen=True)
class Offset:
    """A constant added to all numbers.

    Examples
    --------
    >>> Offset(-1.0).code("gain")
    'gain = gain - 1'
    """

    value: float
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return np.asarray(array + array.dtype.type(self.value))

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = {name} {'+' if self.value > 0 else '-'} {abs(self.value):g}"

    def turned(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return None

    def describe(self) -> str:
        return f"{self.value:+g}"


@dataclass(frozen=True)
class Logarithm:
    """The logarithm of numbers that were stored as an exponential, of either sign.

    Examples
    --------
    >>> edit = Logarithm(is_negative=True)
    >>> edit.apply(np.array([-1.0])).tolist(), edit.code()
    ([0.0], 'w = torch.log(-w)')
    """

    is_negative: bool
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return np.asarray(np.log(-array if self.is_negative else array))

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = torch.log({'-' if self.is_negative else ''}{name})"

    def turned(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return None

    def describe(self) -> str:
        return "its logarithm"


@dataclass(frozen=True)
class Transpose:
    """Rows and columns exchanged."""

    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return array.T

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = {name}.T"

    def turned(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return None

    def describe(self) -> str:
        return "transposed"


@dataclass(frozen=True)
class ExchangeLastAxes:
    """The last two axes exchanged, such as height and width of patches.

    Examples
    --------
    >>> edit = ExchangeLastAxes()
    >>> edit.apply(np.array([[[1, 2], [3, 4]]])).tolist(), edit.code()
    ([[[1, 3], [2, 4]]], 'w = w.transpose(-1, -2)')
    """

    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return array.swapaxes(-1, -2)

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = {name}.transpose(-1, -2)"

    def turned(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return None

    def describe(self) -> str:
        return "its last two axes exchanged"


@dataclass(frozen=True)
class Take:
    """The reference's array instead of the candidate's."""

    needs_original = True

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        assert original is not None
        return original

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = {original}"

    def turned(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return self

    def describe(self) -> str:
        return "taken from the reference"


@dataclass(frozen=True)
class FirstRows:
    """The first rows alone, of a table that has more than the reference's.

    Examples
    --------
    >>> FirstRows(2).code()
    'w = w[:2]'
    """

    count: int
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return array[: self.count]

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = {name}[:{self.count}]"

    def turned(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return self

    def describe(self) -> str:
        return f"the first {self.count} rows"


@dataclass(frozen=True)
class Clear:
    """Zeros, where the reference has none at all."""

    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return np.zeros_like(array)

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = 0 * {name}"

    def turned(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return self

    def describe(self) -> str:
        return "set to zero"


@dataclass(frozen=True)
class Stretches:
    """Rows of an array: stretches of one length at one distance.

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
        """Describe increasing row numbers."""
        starts = rows[[0, *np.flatnonzero(np.diff(rows) != 1) + 1]]
        length = len(rows) // len(starts)
        period = int(np.diff(starts)[0]) if len(starts) > 1 else length
        return cls(int(starts[0]), length, period, len(starts))

    @property
    def indices(self) -> np.ndarray:
        """Their numbers."""
        first = self.start + self.period * np.arange(self.count)
        return (first[:, None] + np.arange(self.length)).ravel()

    @property
    def code(self) -> str:
        """Their numbers in PyTorch."""
        if self.count == 1:
            return f"slice({self.start}, {self.start + self.length})"
        end = self.start + self.count * self.period
        table = f"torch.arange({self.start}, {end}).view({self.count}, {self.period})"
        return f"{table}[:, :{self.length}].flatten()"


@dataclass(frozen=True)
class Within:
    """An edit of some rows, or of some columns.

    Examples
    --------
    >>> print(Within(0, Stretches(0, 2, 2, 1), Scale(2.0)).code())
    rows = slice(0, 2)
    part = w[rows].clone()
    part = part / 2
    w[rows] = part
    """

    axis: int
    rows: Stretches
    edit: Edit

    @property
    def needs_original(self) -> bool:
        """True if the edit needs the reference's array."""
        return self.edit.needs_original

    @property
    def _index(self) -> tuple[Any, ...]:
        return (*[slice(None)] * self.axis, self.rows.indices)

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        index = self._index
        result = array.copy()
        result[index] = self.edit.apply(array[index], None if original is None else original[index])
        return result

    def code(self, name: str = "w", original: str = "original") -> str:
        # Edits within edits have variables of their own.
        rows, part = f"rows_of_{name}", f"part_of_{name}"
        if name == "w":
            rows, part = "rows", "part"
        index = f"[{':, ' * self.axis}{rows}]"
        lines = [f"{rows} = {self.rows.code}"]
        if isinstance(self.edit, Take):
            return "\n".join([*lines, f"{name}{index} = {original}{index}"])
        lines.append(f"{part} = {name}{index}.clone()")
        if self.needs_original:
            lines.append(f"{part}_expected = {original}{index}")
        lines += [self.edit.code(part, f"{part}_expected"), f"{name}{index} = {part}"]
        return "\n".join(lines)

    def turned(self) -> Edit:
        return replace(self, axis=1 - self.axis, edit=self.edit.turned())

    def on_bias(self) -> Edit | None:
        edit = self.edit.on_bias()
        return None if edit is None or self.axis else replace(self, edit=edit)

    def describe(self) -> str:
        return f"{self.edit.describe()}, in rows {self.rows.start} …"


@dataclass(frozen=True)
class Then:
    """Two edits, one after the other.

    Examples
    --------
    >>> Then(Permute(0, Reversed()), Scale(-1)).apply(np.array([1, 2])).tolist()
    [-2.0, -1.0]
    """

    first: Edit
    second: Edit

    @property
    def needs_original(self) -> bool:
        """True if the edit needs the reference's array."""
        return self.first.needs_original or self.second.needs_original

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return self.second.apply(self.first.apply(array, original), original)

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{self.first.code(name, original)}\n{self.second.code(name, original)}"

    def turned(self) -> Edit:
        return Then(self.first.turned(), self.second.turned())

    def on_bias(self) -> Edit | None:
        first, second = self.first.on_bias(), self.second.on_bias()
        return None if first is None or second is None else Then(first, second)

    def describe(self) -> str:
        return f"{self.first.describe()}, then {self.second.describe()}"


@dataclass(frozen=True)
class Viewed:
    """An edit of an array that is stored with more axes than a matrix has.

    Attributes
    ----------
    shape
        The array's own shape.
    turned_first
        Whether its last two axes are exchanged before it is seen as a matrix.
    turned_last
        Whether the matrix is transposed.
    edit
        The edit of the matrix.
    """

    shape: tuple[int, ...]
    turned_first: bool
    turned_last: bool
    edit: Edit

    @property
    def needs_original(self) -> bool:
        """True if the edit needs the reference's array."""
        return self.edit.needs_original

    @property
    def _columns(self) -> int:
        return self.shape[-2 if self.turned_first else -1]

    def _matrix(self, array: np.ndarray) -> np.ndarray:
        array = array.swapaxes(-1, -2) if self.turned_first else array
        array = array.reshape(-1, self._columns)
        return array.T if self.turned_last else array

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        matrix = None if original is None else self._matrix(original)
        result = self.edit.apply(self._matrix(array), matrix)
        result = result.T if self.turned_last else result
        if self.turned_first:
            shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
            return result.reshape(shape).swapaxes(-1, -2)
        return result.reshape(self.shape)

    def code(self, name: str = "w", original: str = "original") -> str:
        first = ".transpose(-1, -2)" if self.turned_first else ""
        last = ".T" if self.turned_last else ""
        seen = f"{first}.reshape(-1, {self._columns}){last}"
        shape = list(self.shape)
        if self.turned_first:
            shape[-2:] = shape[-1], shape[-2]
        lines = [f"{name} = {name}{seen}"]
        if self.needs_original:
            lines.append(f"matrix = {original}{seen}")
        lines.append(self.edit.code(name, "matrix"))
        lines.append(f"{name} = {name}{last}.reshape({', '.join(map(str, shape))}){first}")
        return "\n".join(lines)

    def turned(self) -> Edit:
        return replace(self, turned_last=not self.turned_last)

    def on_bias(self) -> Edit | None:
        return self.edit.on_bias()

    def describe(self) -> str:
        return self.edit.describe()
