"""The interface of all sources of tensors: names, shapes, and rows on request.

Tensors have their names in the model, without wrappers. TransformerLens stores weights with an axis
for the heads: queries, keys and values (heads, D, R), outputs (heads, R, D). Its names have no
``.weight``; here the tensors have the names of an ``nn.Linear``: ``blocks.0.attn.W_Q`` is
``blocks.0.attn.q.weight``. If keys and values have fewer heads than queries, they are stored once,
as ``_W_K`` and ``_W_V``.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from wqk.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np


class Grid(NamedTuple):
    """The grid of a quantized tensor's values.

    Attributes
    ----------
    shared
        Number of neighboring values that share a scale.
    steps
        Distance of neighboring values, relative to the largest value with this scale.
    """

    shared: int
    steps: float

    def rounding(self, values: np.ndarray) -> float:
        """Return half the distance of neighboring values, relative to the values.

        The number is a root mean square over all scales, and 0 for a tensor of zeros. If the values
        do not divide into groups that share a scale, all values count as one group.

        Examples
        --------
        >>> import numpy as np
        >>> round(Grid(32, 1 / 127).rounding(np.ones(32)), 4)
        0.0039
        """
        import numpy as np

        if not values.size:
            return 0.0
        mean_square = np.mean(np.square(values, dtype=np.float64))
        if mean_square == 0:
            return 0.0
        divides = values.size % self.shared == 0
        groups = values.reshape(-1, self.shared if divides else values.size)
        largest = np.abs(groups).max(axis=1).astype(np.float64)
        half_step = self.steps / 2
        return half_step * float(np.sqrt(np.mean(largest**2) / mean_square))


class TensorInfo(NamedTuple):
    """Metadata of a tensor."""

    dtype: str  # in the words of safetensors: F32, BF16, F8_E4M3, ...; or a quantized format's
    shape: tuple[int, ...]
    nbytes: int
    grid: Grid | None = None  # of a quantized tensor

    @property
    def quantized(self) -> str:
        """Description of the grid of a quantized tensor; empty for plain numbers.

        Examples
        --------
        >>> TensorInfo("GPTQ 4-bit", (8, 128), 640, Grid(128, 2 / 15)).quantized
        'GPTQ 4-bit, groups of 128'
        """
        return f"{self.dtype}, groups of {self.grid.shared}" if self.grid else ""


# The tensors of a checkpoint, by name.
Tensors = Mapping[str, TensorInfo]


class Part(NamedTuple):
    """A tensor, or some of its rows: half-open ranges of its first axis."""

    name: str
    rows: tuple[tuple[int, int], ...] | None = None

    def row_ranges(self, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the part, checked against the tensor's shape."""
        if self.rows is None:
            return ((0, shape[0]),) if shape else ((0, 1),)
        for start, stop in self.rows:
            if not (shape and 0 <= start < stop <= shape[0]):
                raise CheckpointError(
                    f"{self.name}: rows {start}:{stop} requested from a tensor of shape {shape}; "
                    "expected a range of its rows that is not empty"
                )
        return self.rows

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the joined rows of the part, for a tensor of this shape."""
        if self.rows is None:
            return shape
        return (sum(stop - start for start, stop in self.row_ranges(shape)), *shape[1:])

    def nbytes(self, info: TensorInfo) -> int:
        """Return the number of stored bytes of the part."""
        entries_of_tensor = math.prod(info.shape)
        if not entries_of_tensor:
            return 0
        entries = math.prod(self.shape(info.shape))
        return info.nbytes * entries // entries_of_tensor


class Regrouping(NamedTuple):
    """Rows of a quantized matrix (n, D) that can be computed with columns in other groups.

    Attributes
    ----------
    groups
        Number of groups.
    group_of
        The stored group of each column, (D,).
    values
        Function of the group of each column, (D,), that returns the rows (n, D).
    """

    groups: int
    group_of: np.ndarray
    values: Callable[[np.ndarray], np.ndarray]


QUERY = re.compile(r"(.*\.)?blocks\.\d+\.attn\.W_Q")
NAMES = re.compile(r"((?:.*\.)?blocks\.\d+\.)(?:attn\._?([Wb])_([QKVO])|(ln1)\.([wb]))")
ENDINGS = {"W": "weight", "w": "weight", "b": "bias"}


def is_transformer_lens(names: Iterable[str]) -> bool:
    """Return whether tensors have the names of TransformerLens."""
    return any(QUERY.fullmatch(name) for name in names)


def linear_name(name: str) -> str:
    """Return the name that the tensor would have in an `nn.Linear` or a norm.

    Examples
    --------
    >>> linear_name("blocks.3.attn._W_K"), linear_name("blocks.3.ln1.b"), linear_name("embed.W_E")
    ('blocks.3.attn.k.weight', 'blocks.3.ln1.bias', 'embed.W_E')
    """
    match = NAMES.fullmatch(name)
    if match is None:
        return name
    start, kind, side, norm, part = match.groups()
    if norm:
        return f"{start}{norm}.{ENDINGS[part]}"
    return f"{start}attn.{side.lower()}.{ENDINGS[kind]}"


# Names that wrappers give to the module within: parallel ones, compilation, FSDP 1, activation
# checkpointing.
WRAPPED = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def plain_name(name: str) -> str:
    """Return a tensor's name in the model, without wrappers.

    Examples
    --------
    >>> plain_name("module.layer.0._orig_mod.query.weight")
    'layer.0.query.weight'
    """
    name_words = name.split(".")
    if WRAPPED.isdisjoint(name_words):  # as of most of the many tensors of a mixture of experts
        return name
    return ".".join(word for word in name_words if word not in WRAPPED)


def by_plain_name(names: Iterable[str]) -> Mapping[str, str]:
    """Return the names by plain name; if two plain names are equal, by the names themselves.

    Examples
    --------
    >>> by_plain_name(["module.q.weight"]), by_plain_name(["module.q", "q"])
    ({'q.weight': 'module.q.weight'}, {'module.q': 'module.q', 'q': 'q'})
    """
    names = list(names)
    plain = {plain_name(name): name for name in names}
    if is_transformer_lens(plain):
        plain = {linear_name(name): stored for name, stored in plain.items()}
    return plain if len(plain) == len(names) else {name: name for name in names}


def as_number(value: Any) -> float | None:
    """Return a value as a finite number; None for other values.

    Examples
    --------
    >>> as_number(3), as_number("3"), as_number(10**400), as_number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class Checkpoint(ABC):
    """A transformer's weights from any source; made by `open_checkpoint`.

    Attributes
    ----------
    name
        The user's name for the checkpoint: a path, a Hub id, a class name.
    revision, step
        The Hub revision and the training step, if known.
    config
        The model's configuration in the format of `transformers`; empty without a configuration.
    notes
        Notes for users of the scores, such as skipped files.
    """

    name: str
    revision: str | None = None
    step: int | None = None
    config: Mapping[str, Any]
    notes: Sequence[str] = ()

    # How a copy in another process is opened; None for weights in memory, which are pickled.
    _reopen: Callable[[], Checkpoint] | None = None

    def __copy__(self) -> Self:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:
        """Return another checkpoint over the same weights, which are read-only."""
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        if self._reopen is None:
            return object.__new__, (type(self),), self.__dict__
        about = {"name": self.name, "step": self.step, "notes": self.notes}
        return _reopened, (self._reopen, self.identity, about)

    @property
    def identity(self) -> tuple[Any, ...]:
        """Identity of the present content of the weight files; empty without files."""
        return ()

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes fetched over the network so far; None for a local checkpoint."""
        return None

    @abstractmethod
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return type, shape and size of every tensor by name, without reading data."""

    @abstractmethod
    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Read the rows of each part, joined: float32, or float64 if stored as float64.

        Raises
        ------
        CheckpointError
            A tensor or its data is missing, or its type is unsupported.
        """

    def raw(self, part: Part, room: np.ndarray | None = None) -> np.ndarray | None:
        """Return the stored bytes of a part; None if the values depend on more than these bytes.

        The bytes may be written to ``room``, which is faster than new memory.
        """
        return None

    def regrouping(self, part: Part) -> Regrouping | None:
        """Return rows for columns in other groups; None if groups are neighboring columns."""
        return None

    def prefetch(self, parts: Sequence[Part]) -> None:  # noqa: B027 - most sources have no delay
        """Announce that parts will be read soon; a remote checkpoint starts to fetch."""

    def abandon(self) -> None:  # noqa: B027
        """Cancel announced reads; a remote checkpoint stops fetching."""

    @property
    def parameters(self) -> int:
        """Number of stored values."""
        return sum(math.prod(info.shape) for info in self.tensors().values())

    def info(self, name: str) -> TensorInfo:
        """Return type, shape and size of one tensor; `CheckpointError` for an unknown name."""
        try:
            return self.tensors()[name]
        except KeyError:
            raise CheckpointError(
                f"{self.name}: no tensor named {name!r}; expected one of the "
                f"{len(self.tensors()):,} names in its tensors()"
            ) from None

    def __repr__(self) -> str:
        revision = f", revision {self.revision}" if self.revision else ""
        return f"{type(self).__name__}({self.name!r}{revision}: {len(self.tensors())} tensors)"


class Around(Checkpoint):
    """A checkpoint around another checkpoint; a subclass computes some tensors in `value`.

    The values of the last computed tensor are kept, because its rows are usually read in several
    parts.
    """

    def __init__(self, inner: Checkpoint, config: Mapping[str, Any] | None = None) -> None:
        self.name, self.revision, self.step = inner.name, inner.revision, inner.step
        self.config = inner.config if config is None else config
        self.notes, self.inner = inner.notes, inner
        self._last: tuple[str, np.ndarray | None] = ("", None)

    def value(self, name: str) -> np.ndarray | None:
        """Return a tensor's computed values; None to read the inner checkpoint."""
        return None

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return type, shape and size of every tensor by name."""
        return self.inner.tensors()

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Read computed values, and other values from the inner checkpoint."""
        import numpy as np

        arrays = []
        for part in parts:
            # Another thread may replace the kept pair meanwhile: name and value are read together.
            kept_name, value = self._last
            if kept_name != part.name:
                value = self.value(part.name)
                self._last = part.name, value
            if value is None:
                arrays += self.inner.read([part])
            elif part.rows is None:
                arrays.append(value)
            else:
                ends = part.row_ranges(value.shape)
                arrays.append(np.concatenate([value[start:stop] for start, stop in ends]))
        return arrays

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Announce a later read."""
        self.inner.prefetch(parts)

    def abandon(self) -> None:
        """Cancel announced reads."""
        self.inner.abandon()


class View(Around):
    """A checkpoint with some changed tensors; all other tensors have the stored bytes."""

    changed: Container[str] = ()

    def raw(self, part: Part, room: np.ndarray | None = None) -> np.ndarray | None:
        """Return the stored bytes of an unchanged tensor; None for a changed tensor."""
        return None if part.name in self.changed else self.inner.raw(part, room)


class Overlay(View):
    """A checkpoint with new values of some tensors, or with another configuration."""

    def __init__(
        self,
        base: Checkpoint,
        values: Mapping[str, np.ndarray],
        config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(base, config)
        self._values = self.changed = values

    def value(self, name: str) -> np.ndarray | None:
        """Return the new values of a tensor; None for an unchanged tensor."""
        return self._values.get(name)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the base's tensors, and added tensors."""
        changed = {n: TensorInfo("F32", v.shape, 4 * v.size) for n, v in self._values.items()}
        return changed | dict(self.inner.tensors())


def _reopened(
    reopen: Callable[[], Checkpoint], identity: tuple[Any, ...], about: Mapping[str, Any]
) -> Checkpoint:
    """Open a pickled checkpoint again, by its reference."""
    checkpoint = reopen()
    if checkpoint.identity != identity:
        raise CheckpointError(
            f"{about['name']}: is no longer what it was when it was pickled; open it again"
        )
    checkpoint.__dict__.update(about)
    return checkpoint
