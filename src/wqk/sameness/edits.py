"""Edits: changes of one stored array, which can be applied and printed as code.

An edit makes the candidate's array the reference's. `Edit.apply` computes the result with NumPy.
`Edit.code` is the same in PyTorch, as statements on a variable. `wqk.sameness.execution` runs these
statements on NumPy arrays; the tests also run them with PyTorch.

Edits of rows do not depend on the number of axes. Therefore the edit of a weight's rows is also the
edit of the bias. Axis 0 of a weight in the orientation of ``nn.Linear`` is the axis of the outputs.

Axes: n rows (outputs), D columns (inputs).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from wqk.sameness.axis_orders import Order, Stretches

# Digits with which a factor is printed, and therefore applied.
DIGITS = 9


def _printed(factor: float) -> str:
    """Round a factor to the digits that are printed."""
    return f"{factor:.{DIGITS}g}"


class Edit(Protocol):
    """A change that makes the candidate's array equal to the reference's array."""

    @property
    def needs_original(self) -> bool:
        """True if the edit needs the reference's array."""

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        """Return the edited array, of a new shape if the edit transposes or cuts.

        Parameters
        ----------
        array
            The candidate's array: a weight (n, D), or a vector (n,).
        original
            The reference's array; required if `needs_original` is true.
        """

    def code(self, name: str = "w", original: str = "original") -> str:
        """Return statements of PyTorch that edit a variable.

        Parameters
        ----------
        name
            The variable of the candidate's tensor.
        original
            The variable of the reference's tensor.
        """

    def for_transposed(self) -> Edit:
        """Return the edit of the transposed array with the same effect."""

    def on_bias(self) -> Edit | None:
        """Return the edit of the bias of the same rows; None if a bias has no such edit."""


# -- edits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Permute:
    """Entries along an axis in another order.

    Examples
    --------
    >>> from wqk.sameness.axis_orders import Rolled
    >>> edit = Permute(0, Rolled(1))
    >>> edit.apply(np.array([3, 1, 2])).tolist(), edit.for_transposed().code()
    ([1, 2, 3], 'w = w.roll(-1, 1)')
    """

    axis: int
    order: Order
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return np.take(array, self.order.indices(array.shape[self.axis]), self.axis)

    def code(self, name: str = "w", original: str = "original") -> str:
        return self.order.code(name, self.axis)

    def for_transposed(self) -> Edit:
        return replace(self, axis=1 - self.axis)

    def on_bias(self) -> Edit | None:
        return self if self.axis == 0 else None


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

    def for_transposed(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return self


@dataclass(frozen=True)
class ScaleHeads:
    """Rows or columns divided by one factor for each head.

    Attributes
    ----------
    axis
        The axis along which heads lie.
    factors
        The factor of each head.
    width
        Number of rows or columns of a head.

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
        """The factors, rounded to the printed digits."""
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

    def for_transposed(self) -> Edit:
        return replace(self, axis=1 - self.axis)

    def on_bias(self) -> Edit | None:
        return self if self.axis == 0 else None


@dataclass(frozen=True)
class Negate:
    """Entries along an axis with the other sign.

    Attributes
    ----------
    axis
        The axis.
    negative
        The indices along the axis with changed signs.

    Examples
    --------
    >>> print(Negate(1, (0, 2)).code())
    negative = [0, 2]
    w[:, negative] *= -1
    """

    axis: int
    negative: tuple[int, ...]
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        signs = np.ones(array.shape[self.axis], array.dtype)
        signs[list(self.negative)] = -1
        shape = [1] * array.ndim
        shape[self.axis] = -1
        return array * signs.reshape(shape)

    def code(self, name: str = "w", original: str = "original") -> str:
        before = ":, " * self.axis
        return f"negative = {list(self.negative)}\n{name}[{before}negative] *= -1"

    def for_transposed(self) -> Edit:
        return replace(self, axis=1 - self.axis)

    def on_bias(self) -> Edit | None:
        return self if self.axis == 0 else None


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
        The number that is added to the stored gain when the gain is read.
    power
        Number of superfluous foldings of the gain; −1 for a missing gain.
    of_reference
        Whether the gain is a tensor of the reference, not of the candidate.
    """

    axis: int
    gain: str
    values: np.ndarray
    offset: float
    power: int
    of_reference: bool = False
    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        divisors = self.values**self.power
        if self.axis == 0:
            divisors = divisors[:, None]
        return np.asarray(array / divisors)

    def code(self, name: str = "w", original: str = "original") -> str:
        mapping = "reference" if self.of_reference else "tensors"
        gain = f"{mapping}[{self.gain!r}]"
        if self.offset:
            gain = f"({self.offset:g} + {gain})"
        power = "" if self.power == 1 else f" ** {self.power}"
        column = "" if self.axis else "[:, None]"
        return f"gain = {gain}{power}\n{name} = {name} / gain{column}"

    def for_transposed(self) -> Edit:
        return replace(self, axis=1 - self.axis)

    def on_bias(self) -> Edit | None:
        return None


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
        if self.transposed:
            product = product.T
        return np.asarray(array + float(_printed(self.factor)) * product, array.dtype)

    def code(self, name: str = "w", original: str = "original") -> str:
        up = "b" if self.rows is None else f"b[{self.rows.code}]"
        product = f"({up} @ a)"
        if self.transposed:
            product += ".T"
        sign = "-" if self.factor < 0 else "+"
        times = "" if abs(self.factor) == 1 else f"{_printed(abs(self.factor))} * "
        return f"a, b = adapter[name]\n{name} = {name} {sign} {times}{product}"

    def for_transposed(self) -> Edit:
        return replace(self, transposed=not self.transposed)

    def on_bias(self) -> Edit | None:
        return None


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
        sign = "+" if self.value > 0 else "-"
        return f"{name} = {name} {sign} {abs(self.value):g}"

    def for_transposed(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return None


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
        sign = "-" if self.is_negative else ""
        return f"{name} = torch.log({sign}{name})"

    def for_transposed(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return None


@dataclass(frozen=True)
class Transpose:
    """Rows and columns exchanged."""

    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return array.T

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = {name}.T"

    def for_transposed(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return None


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

    def for_transposed(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return None


@dataclass(frozen=True)
class Take:
    """The reference's array instead of the candidate's."""

    needs_original = True

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        assert original is not None
        return original

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = {original}"

    def for_transposed(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return self


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a table that has more rows than the reference's table.

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

    def for_transposed(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return self


@dataclass(frozen=True)
class Clear:
    """Zeros, for an array that the reference lacks."""

    needs_original = False

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        return np.zeros_like(array)

    def code(self, name: str = "w", original: str = "original") -> str:
        return f"{name} = 0 * {name}"

    def for_transposed(self) -> Edit:
        return self

    def on_bias(self) -> Edit | None:
        return self


@dataclass(frozen=True)
class Within:
    """An edit of some rows, or of some columns.

    Attributes
    ----------
    axis
        0 for rows, 1 for columns.
    rows
        The rows, or columns.
    edit
        The edit of an array with only these rows.

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
        """NumPy's index of the rows or columns."""
        all_before = [slice(None)] * self.axis
        return (*all_before, self.rows.indices)

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        index = self._index
        expected = None if original is None else original[index]
        result = array.copy()
        result[index] = self.edit.apply(array[index], expected)
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

    def for_transposed(self) -> Edit:
        return replace(self, axis=1 - self.axis, edit=self.edit.for_transposed())

    def on_bias(self) -> Edit | None:
        edit = self.edit.on_bias()
        return None if edit is None or self.axis else replace(self, edit=edit)


@dataclass(frozen=True)
class Then:
    """Two edits in sequence.

    Examples
    --------
    >>> from wqk.sameness.axis_orders import Reversed
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

    def for_transposed(self) -> Edit:
        return Then(self.first.for_transposed(), self.second.for_transposed())

    def on_bias(self) -> Edit | None:
        first, second = self.first.on_bias(), self.second.on_bias()
        return None if first is None or second is None else Then(first, second)


@dataclass(frozen=True)
class Viewed:
    """An edit of an array that is stored with more axes than a matrix.

    Attributes
    ----------
    shape
        The shape of the stored array.
    exchanges_axes, transposes
        The conversion from the array to a matrix, as in `wqk.sameness.weight_pairs.Layout`.
    edit
        The edit of the matrix.
    """

    shape: tuple[int, ...]
    exchanges_axes: bool
    transposes: bool
    edit: Edit

    @property
    def needs_original(self) -> bool:
        """True if the edit needs the reference's array."""
        return self.edit.needs_original

    @property
    def _shape_of_rows(self) -> tuple[int, ...]:
        """Shape of the array after the exchange of its last two axes, if any."""
        *before, height, width = self.shape
        return (*before, width, height) if self.exchanges_axes else self.shape

    @property
    def _columns(self) -> int:
        """Number of columns of the matrix before the matrix is transposed."""
        return self._shape_of_rows[-1]

    def _matrix(self, array: np.ndarray) -> np.ndarray:
        """Return the stored array, or an array of the same shape, as the matrix to edit."""
        if self.exchanges_axes:
            array = array.swapaxes(-1, -2)
        matrix = array.reshape(-1, self._columns)
        return matrix.T if self.transposes else matrix

    def apply(self, array: np.ndarray, original: np.ndarray | None = None) -> np.ndarray:
        expected = None if original is None else self._matrix(original)
        matrix = self.edit.apply(self._matrix(array), expected)
        if self.transposes:
            matrix = matrix.T
        result = matrix.reshape(self._shape_of_rows)
        return result.swapaxes(-1, -2) if self.exchanges_axes else result

    def code(self, name: str = "w", original: str = "original") -> str:
        exchange = ".transpose(-1, -2)" if self.exchanges_axes else ""
        transpose = ".T" if self.transposes else ""
        as_matrix = f"{exchange}.reshape(-1, {self._columns}){transpose}"
        shape = ", ".join(map(str, self._shape_of_rows))
        lines = [f"{name} = {name}{as_matrix}"]
        if self.needs_original:
            lines.append(f"matrix = {original}{as_matrix}")
        lines.append(self.edit.code(name, "matrix"))
        lines.append(f"{name} = {name}{transpose}.reshape({shape}){exchange}")
        return "\n".join(lines)

    def for_transposed(self) -> Edit:
        return replace(self, transposes=not self.transposes)

    def on_bias(self) -> Edit | None:
        return self.edit.on_bias()
