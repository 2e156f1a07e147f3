"""Trace a softmax's input back to the product of queries and keys.

Attention that runs as plain operations is a batched product, some multiplications, additions and
masks, and a softmax. A trace belongs to the storage of a result: views share the storage, so that
transposing and splitting need no rules. A trace contains the two factors of the product, its
multipliers, and its location in the storage. Additions and masks keep the trace; their effect is
the difference between the softmax's input and the product.

A storage contains row r of the product, of N matrices of M rows each, at ``offset + r · stride``.

Axes: N matrices, M rows, J columns, R inner width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from wqk.live.calls import ObservedCall

# Traces that are kept; between a product and its softmax lie few others.
KEPT = 16


@dataclass(frozen=True)
class Trace:
    """Trace of a storage with a product of queries and keys, or with weights of a softmax.

    Attributes
    ----------
    left, right
        Factors of the product, (N, M, R) and (N, R, J); None for weights.
    scale
        Factor of the product: a float, or a tensor of one entry.
    factors
        Further factors of the product, tensors with the shapes of the scores that they multiplied.
    scale_at_cap
        The scale before a hyperbolic tangent; None without a hyperbolic tangent.
    offset, stride
        Offset of the first row in the storage, and distance of rows.
    undecided
        For weights: the call of a softmax whose input was not a product. The softmax is attention
        if the weights multiply a tensor.
    place
        Path of the running module at the beginning of the trace.
    """

    left: torch.Tensor | None = None
    right: torch.Tensor | None = None
    scale: float | torch.Tensor = 1.0
    factors: tuple[tuple[torch.Tensor, tuple[int, ...]], ...] = ()
    scale_at_cap: float | torch.Tensor | None = None
    offset: int = 0
    stride: int = 0
    undecided: ObservedCall | None = None
    place: str = ""

    @property
    def is_product(self) -> bool:
        """Return whether the storage contains a product instead of weights of a softmax."""
        return self.left is not None


class TracedScores(NamedTuple):
    """Queries and keys of the input of a softmax, with its leading axes."""

    queries: torch.Tensor  # (..., I, R)
    keys: torch.Tensor  # (..., J, R)
    scale: float | torch.Tensor
    factors: tuple[torch.Tensor, ...]
    softcap: float | torch.Tensor | None
    columns: slice  # of the softmax's input that the product fills


class Tracer:
    """Traces of all storages with products or weights.

    Attributes
    ----------
    place
        Path of the innermost running module.
    """

    def __init__(self) -> None:
        self.place = ""
        self._traces: OrderedDict[int, tuple[Any, Trace]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._traces)

    def clear(self) -> None:
        """Delete all traces, with their queries and keys."""
        self._traces.clear()

    def forget_within(self, path: str) -> None:
        """Delete the traces that began in a module or its parts, when the module ends."""
        for address, (_, trace) in list(self._traces.items()):
            if not path or f"{trace.place}.".startswith(f"{path}."):
                del self._traces[address]

    def get(self, tensor: Any) -> Trace | None:
        """Return the trace of a tensor's storage; None without a trace."""
        if not self._traces or not _is_plain(tensor):
            return None
        entry = self._traces.get(tensor.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def put(self, tensor: torch.Tensor, trace: Trace) -> None:
        """Attach a trace to a tensor's storage."""
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = tensor.untyped_storage()
        # The weak reference keeps the address from being used for another storage.
        self._traces[storage._cdata] = StorageWeakRef(storage), trace
        self._traces.move_to_end(storage._cdata)
        while len(self._traces) > KEPT:
            self._traces.popitem(last=False)

    def take_undecided(self, trace: Trace) -> ObservedCall | None:
        """Return the undecided call of a trace, and mark it as decided in all its traces."""
        call = trace.undecided
        if call is None:
            return None
        for address, (storage, trace_of_storage) in list(self._traces.items()):
            if trace_of_storage.undecided is call:
                self._traces[address] = storage, replace(trace_of_storage, undecided=None)
        return call

    def multiplied(self, left: Any, right: Any, product: torch.Tensor, scale: float) -> None:
        """Begin a trace at a batched product, (N, M, R) times (N, R, J)."""
        is_whole = product.is_contiguous() and product.storage_offset() == 0
        if _is_plain(product) and product.numel() and is_whole:
            stride = product.shape[-1]
            trace = Trace(left.detach(), right.detach(), scale, stride=stride, place=self.place)
            self.put(product, trace)

    def follow(self, name: str, args: Any, output: Any, kwargs: Mapping[str, Any]) -> None:
        """Pass the trace of an input of an operation on to the output."""
        rule = RULES.get(name)
        if rule is None or not _is_plain(output):
            return
        inputs = args[0][:1] if name == "aten::cat" else args
        for index, source in enumerate(inputs):
            trace = self.get(source)
            if trace is not None:
                followed = rule(trace, args, kwargs, index)
                moved = None if followed is None else _moved(followed, source, output)
                if moved is not None:
                    self.put(output, moved)
                return

    def scores_of(self, scores: torch.Tensor) -> TracedScores | None:
        """Return queries and keys of the input of a softmax over its last axis."""
        trace = self.get(scores)
        if trace is None or trace.left is None or trace.right is None:
            return None
        return _traced(trace, trace.left, trace.right, scores)


def _is_plain(tensor: Any) -> bool:
    """Return whether a value is a tensor with a storage, and not of a subclass."""
    import torch

    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def _same(trace: Trace, args: Any, kwargs: Mapping[str, Any], index: int) -> Trace:
    """Return the same trace: for operations that add to the product, hide pairs, or copy."""
    return trace


def _multiplied(trace: Trace, args: Any, kwargs: Mapping[str, Any], index: int) -> Trace:
    return _scaled(trace, args[index].shape, args[1 - index], 1)


def _divided(trace: Trace, args: Any, kwargs: Mapping[str, Any], index: int) -> Trace | None:
    if index or kwargs.get("rounding_mode"):
        return None
    return _scaled(trace, args[0].shape, args[1], -1)


def _scaled(trace: Trace, shape: Any, factor: Any, power: int) -> Trace:
    """Return a trace multiplied by a number or a tensor, to the power of 1 or −1.

    ``shape`` is the shape of the multiplied scores.
    """
    import torch

    if not isinstance(factor, torch.Tensor):
        return replace(trace, scale=trace.scale * float(factor) ** power)
    factor = factor.detach()
    if power == -1:
        factor = 1 / factor
    if factor.numel() == 1:
        return replace(trace, scale=trace.scale * factor.reshape(()))
    return replace(trace, factors=(*trace.factors, (factor, tuple(shape))))


def _capped(trace: Trace, args: Any, kwargs: Mapping[str, Any], index: int) -> Trace | None:
    return None if trace.factors else replace(trace, scale_at_cap=trace.scale)


def _joined(trace: Trace, args: Any, kwargs: Mapping[str, Any], index: int) -> Trace | None:
    """Return the trace after ``cat``, which appends columns of sinks to the product."""
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    return trace if axis in (-1, args[0][0].ndim - 1) else None


Rule = Callable[[Trace, Any, Mapping[str, Any], int], Trace | None]

_PASSED = (
    *("add", "add_", "sub", "sub_", "rsub", "where", "masked_fill", "masked_fill_", "clone"),
    *("_to_copy", "copy_", "clamp", "clamp_", "clamp_min", "clamp_max", "maximum", "minimum"),
    *("nan_to_num", "tril", "triu", "index_put_", "index_fill_", "fill_", "scatter_", "dropout"),
    *("native_dropout", "detach", "lift_fresh", "_unsafe_view", "_reshape_copy", "addcmul"),
    *("constant_pad_nd", "slice_scatter", "select_scatter", "bernoulli_", "zero_"),
)

# How operations pass on the trace of an input.
RULES: Mapping[str, Rule] = {
    **{f"aten::{name}": _same for name in _PASSED},
    **dict.fromkeys(("aten::mul", "aten::mul_"), _multiplied),
    **dict.fromkeys(("aten::div", "aten::div_"), _divided),
    **dict.fromkeys(("aten::tanh", "aten::tanh_"), _capped),
    "aten::cat": _joined,
}


def _moved(trace: Trace, source: Any, output: torch.Tensor) -> Trace | None:
    """Return the trace of a new output, with the location of the rows in its storage.

    None if the rows of the output are not at equal distances.
    """
    if not trace.is_product:
        return trace
    if source.untyped_storage()._cdata == output.untyped_storage()._cdata:
        return trace
    if source.ndim != output.ndim or source.ndim < 2 or source.stride(-1) != output.stride(-1):
        return None
    stride = None
    for axis in range(source.ndim - 1):
        before, after, size = source.stride(axis), output.stride(axis), source.shape[axis]
        if size <= 1:
            continue
        if size != output.shape[axis]:
            return None
        if before < trace.stride:  # an axis within rows, of a picture's rows and columns
            if before != after:
                return None
            continue
        if before % trace.stride or after * trace.stride % before:
            return None
        if stride not in (None, after * trace.stride // before):
            return None
        stride = after * trace.stride // before
    stride = stride or output.shape[-1]
    first, column = divmod(source.storage_offset() - trace.offset, trace.stride)
    offset = output.storage_offset() - first * stride - column
    return replace(trace, offset=offset, stride=stride)


def _traced(
    trace: Trace, left: torch.Tensor, right: torch.Tensor, scores: torch.Tensor
) -> TracedScores | None:
    """Return queries and keys of a softmax's input, a view of the storage of a product.

    None unless each row of the view is a row of the product, or the beginning or end of a row.

    Parameters
    ----------
    trace
        The trace of the storage.
    left, right
        Factors of the product, (N, M, R) and (N, R, J).
    scores
        The input of the softmax, (..., I, columns). Columns beyond the columns of the product are
        sinks.
    """
    count, rows_per_matrix, _ = left.shape
    *leading, query_count, columns = scores.shape
    if scores.stride(-1) != 1 and columns > 1:
        return None
    if query_count > 1 and rows_per_matrix % query_count:
        return None  # rows of one head would lie in several matrices
    first_row, first_column = divmod(scores.storage_offset() - trace.offset, trace.stride)
    key_count = min(columns, right.shape[-1] - first_column)
    rows = _rows_of_product(trace, scores, first_row, count * rows_per_matrix)
    if rows is None or key_count < 1:
        return None
    factors = []
    for factor, shape in trace.factors:
        broad = _broad(factor, shape, tuple(scores.shape), key_count)
        if broad is None:
            return None
        factors.append(broad)
    keys = right.mT[:, first_column : first_column + key_count]
    has_all_rows = rows.numel() == count * rows_per_matrix and rows_per_matrix == query_count
    is_dense = query_count == 1 or scores.stride(-2) == trace.stride
    if first_row == 0 and has_all_rows and is_dense and scores.is_contiguous():
        queries = left.reshape(*leading, query_count, -1)
        keys = keys.reshape(*leading, key_count, -1)
    else:
        matrices = (rows[..., 0] // rows_per_matrix).reshape(-1)
        all_queries = left.reshape(count * rows_per_matrix, -1)
        queries = all_queries[rows.reshape(-1)].reshape(*leading, query_count, -1)
        keys = keys[matrices].reshape(*leading, key_count, -1)
    softcap = None if trace.scale_at_cap is None else trace.scale / trace.scale_at_cap
    return TracedScores(
        queries=queries,
        keys=keys,
        scale=trace.scale,
        factors=tuple(factors),
        softcap=softcap,
        columns=slice(0, key_count),
    )


def _rows_of_product(
    trace: Trace, scores: torch.Tensor, first_row: int, row_count: int
) -> torch.Tensor | None:
    """Return the number of the product's row for each row of a view, (..., I).

    Rows of all matrices are numbered consecutively, from 0 to ``row_count`` − 1; the view begins in
    ``first_row``. None if rows of the view begin at different columns, or lie outside the product.
    """
    import torch

    rows = torch.full((), first_row, device=scores.device)
    last_row = first_row
    for size, stride in zip(scores.shape[:-1], scores.stride()[:-1], strict=True):
        if size <= 1:
            step = 0
        elif stride % trace.stride:
            return None
        else:
            step = stride // trace.stride
        rows = rows[..., None] + torch.arange(size, device=scores.device) * step
        last_row += (size - 1) * step
    return rows if first_row >= 0 and last_row < row_count else None


def _broad(
    factor: torch.Tensor, met: tuple[int, ...], shape: tuple[int, ...], columns: int
) -> torch.Tensor | None:
    """Return a factor with the axes of the softmax's input; None if they do not fit.

    Parameters
    ----------
    factor
        The factor.
    met
        Shape of the scores that the factor multiplied, before the scores were split or joined.
    shape
        Shape of the softmax's input.
    columns
        Number of columns of the input that the product fills.
    """
    if len(met) == len(shape):
        factor = factor.reshape((1,) * (len(shape) - factor.ndim) + tuple(factor.shape))
    elif met[-1] == shape[-1]:
        factor = factor.expand(met).reshape(shape)
    else:
        return None
    return factor if factor.shape[-1] == 1 else factor[..., :columns]
