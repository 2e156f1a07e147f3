"""Run the printed code of a repair on NumPy arrays.

The code is written for PyTorch. A comparison does not need PyTorch: ``torch`` in the code is a
small stand-in here, arrays with the methods and functions that printed code uses. The tests run the
same code with PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from wqk.checkpoints.adapters import LoraFactors

# Functions of Python that printed code uses.
FUNCTIONS = {"range": range, "slice": slice, "zip": zip}


class Tensor:
    """An array with the methods of PyTorch's tensors that printed code uses."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def clone(self) -> Tensor:
        """Return a copy."""
        return Tensor(self.array.copy())

    def unflatten(self, axis: int, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor with one axis split into several."""
        before, after = self.array.shape[:axis], self.array.shape[axis + 1 :]
        return Tensor(self.array.reshape(*before, *shape, *after))

    def flatten(self, first: int = 0, last: int = -1) -> Tensor:
        """Return the tensor with several axes joined."""
        after = last % self.array.ndim + 1
        return Tensor(self.array.reshape(*self.array.shape[:first], -1, *self.array.shape[after:]))

    def reshape(self, *shape: int) -> Tensor:
        """Return the same numbers in another shape."""
        return Tensor(self.array.reshape(shape))

    view = reshape

    def transpose(self, first: int, second: int) -> Tensor:
        """Return the tensor with two axes exchanged."""
        return Tensor(self.array.swapaxes(first, second))

    def permute(self, *axes: int) -> Tensor:
        """Return the tensor with its axes in another order."""
        return Tensor(self.array.transpose(axes))

    def movedim(self, sources: tuple[int, ...], targets: tuple[int, ...]) -> Tensor:
        """Return the tensor with axes moved to other places."""
        return Tensor(np.moveaxis(self.array, sources, targets))

    def roll(self, by: int, axis: int) -> Tensor:
        """Return the tensor with its entries moved along an axis."""
        return Tensor(np.roll(self.array, by, axis))

    def flip(self, axis: int) -> Tensor:
        """Return the tensor with an axis in reverse order."""
        return Tensor(np.flip(self.array, axis))

    def repeat_interleave(self, count: int) -> Tensor:
        """Return each entry of a vector ``count`` times."""
        return Tensor(np.repeat(self.array, count))

    def split(self, lengths: Sequence[int], axis: int = 0) -> list[Tensor]:
        """Return pieces of these lengths."""
        return [Tensor(piece) for piece in np.split(self.array, np.cumsum(lengths)[:-1], axis)]

    def chunk(self, count: int, axis: int = 0) -> list[Tensor]:
        """Return ``count`` equal pieces."""
        return [Tensor(piece) for piece in np.split(self.array, count, axis)]

    @property
    def T(self) -> Tensor:
        """The transposed matrix."""
        return Tensor(self.array.T)

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.array[_plain(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.array[_plain(index)] = _plain(value)

    def __neg__(self) -> Tensor:
        return Tensor(-self.array)

    def __add__(self, other: Any) -> Tensor:
        return Tensor(self.array + _plain(other))

    def __sub__(self, other: Any) -> Tensor:
        return Tensor(self.array - _plain(other))

    def __mul__(self, other: Any) -> Tensor:
        return Tensor(self.array * _plain(other))

    def __truediv__(self, other: Any) -> Tensor:
        return Tensor(self.array / _plain(other))

    def __matmul__(self, other: Tensor) -> Tensor:
        return Tensor(self.array @ other.array)

    def __pow__(self, power: int) -> Tensor:
        return Tensor(self.array ** float(power))

    __radd__, __rmul__ = __add__, __mul__


def _plain(value: Any) -> Any:
    """Return the array of a tensor, or an index with arrays instead of tensors."""
    if isinstance(value, Tensor):
        return value.array
    if isinstance(value, tuple):
        return tuple(_plain(part) for part in value)
    return value


def _arange(*ends: int) -> Tensor:
    return Tensor(np.arange(*ends))


def _cat(tensors: Iterable[Tensor], axis: int = 0) -> Tensor:
    return Tensor(np.concatenate([tensor.array for tensor in tensors], axis))


def _tensor(numbers: Sequence[float]) -> Tensor:
    return Tensor(np.array(numbers, np.float32))


def _log(tensor: Tensor) -> Tensor:
    return Tensor(np.log(tensor.array))


def as_tensors(factors: LoraFactors) -> tuple[Tensor, Tensor]:
    """Return the factors A and B of an adapter's update, as tensors for printed code."""
    return Tensor(factors.down), Tensor(factors.up)


TORCH = SimpleNamespace(arange=_arange, cat=_cat, log=_log, tensor=_tensor)


class ProgramTensors(MutableMapping[str, Any]):
    """Arrays by name, as tensors for printed code; assigned arrays are kept separately.

    Attributes
    ----------
    changed
        The assigned arrays.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self._arrays = arrays
        self.changed: dict[str, np.ndarray] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name in self.changed:
            return Tensor(self.changed[name])
        return Tensor(self._arrays[name].copy())

    def __setitem__(self, name: str, value: Any) -> None:
        array = _plain(value)
        original = self._arrays.get(name)
        dtype = array.dtype if original is None else original.dtype
        self.changed[name] = np.ascontiguousarray(array, dtype)

    def __delitem__(self, name: str) -> None:
        raise TypeError("only layers of files are removed, not arrays")

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def run(
    code: str,
    tensors: MutableMapping[str, Any],
    reference: Mapping[str, Any],
    config: dict[str, Any] | None = None,
    adapter: Mapping[str, tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Run the code of a repair; it changes the tensors and the configuration in place.

    Parameters
    ----------
    code
        The printed lines.
    tensors, reference
        The candidate's tensors, and the reference's tensors under the candidate's names.
    config
        The candidate's configuration.
    adapter
        The factors A and B of the adapter's weights, by the candidate's names.

    Examples
    --------
    >>> tensors = ProgramTensors({"w": np.array([[1.0, 2.0], [3.0, 4.0]])})
    >>> run('tensors["w"] = tensors["w"].flip(0)', tensors, {})
    >>> tensors.changed["w"].tolist()
    [[3.0, 4.0], [1.0, 2.0]]
    """
    scope = {
        "__builtins__": FUNCTIONS,
        "torch": TORCH,
        "tensors": tensors,
        "reference": reference,
        "config": {} if config is None else config,
        "adapter": {} if adapter is None else adapter,
    }
    exec(compile(code, "<repair>", "exec"), scope)
