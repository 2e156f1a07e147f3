"""The layout of one or several projections in a stored tensor, and the norms around them.

A layout assigns outputs (rows of an ``nn.Linear`` weight, columns of a Conv1D weight) to queries,
keys and values, in the order of the heads. A layout suffices to take a projection out of a tensor,
and to put the projection back. `LAYOUTS` lists all layouts.

Axes: H query heads, G key heads, R head width, D width, C latent width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wqk._console import counted
from wqk._typing import Array, Float
from wqk.checkpoints import Part
from wqk.errors import CheckpointError
from wqk.forms.arrays import array_namespace

# Outputs of a tensor with each layout.
LAYOUTS = {
    "separate": "a tensor for each role, head after head",
    "gated": "as separate, but each head's query is followed by a gate as wide",
    "sectioned": "all queries, then all keys, then all values",
    "conv1d": "as sectioned, stored (in, out): GPT-2",
    "grouped": "for each key head: its queries, its key, its value",
    "stacked": "a tensor for each role, stored (heads, in, R): TransformerLens",
    "spread": "a tensor for each role, stored (in, heads, R): XLNet",
    "convolution": "a tensor for each role, stored (out, in / groups, 1): sees one token",
    "latent": "a product of two tensors: down to a latent, and up to the heads (MLA)",
}
# Layouts of a tensor that holds several roles.
FUSED_LAYOUTS = ("sectioned", "conv1d", "grouped")

# Root mean square, or with the mean taken off first.
NORMS = ("rms", "layer")

# Number of columns to transpose at a time.
CACHED = 16

# Last part of messages about shapes.
MISFIT = "use the configuration of these weights, or another family (family=NAME)"

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Projection:
    """The weight of one role: outputs of a stored tensor, and the number of heads.

    Attributes
    ----------
    tensor
        Name of the tensor.
    outputs
        Half-open ranges of outputs, in the order of the heads; None for all.
    transposed
        Whether the tensor is stored (in, out).
    heads, head_width
        Number of heads, and outputs of a head, R.
    axes
        If heads have a separate axis: the axes of heads, R and inputs. Otherwise None.
    groups
        Number of groups of a convolution over single tokens, with outputs that depend only on the
        inputs of the same group; 0 for matrices.
    """

    tensor: str
    outputs: Ranges | None
    transposed: bool
    heads: int
    head_width: int
    axes: tuple[int, int, int] | None = None
    groups: int = 0

    @property
    def part(self) -> Part:
        """The part to read: the whole tensor if outputs are columns."""
        return Part(self.tensor, None if self.transposed else self.outputs)

    @property
    def roles(self) -> dict[str, Part]:
        """All parts to read, by their roles in the projection."""
        return {"": self.part}

    def weight(self, stored: Mapping[Part, Array]) -> Array:
        """Return the projection (heads, R, D) from all arrays that were read."""
        return self.take(stored[self.part])

    def take(self, stored: Array, *, contiguous: bool = True) -> Array:
        """Return the projection (heads, R, D) from the array that was read for `part`.

        If not ``contiguous``, a tensor that is stored (in, out) is transposed without a copy.
        """
        if self.axes is not None:
            return _contiguous(array_namespace(stored).permute_dims(stored, self.axes))
        if self.groups:
            stored = _joined_groups(stored.reshape(len(stored), -1), self.groups)
        if self.transposed:
            columns = stored if self.outputs is None else _columns(stored, self.outputs)
            stored = _contiguous(columns.T) if contiguous else columns.T
        return stored.reshape(self.heads, self.head_width, -1)

    def put(self, tensor: Array, weight: Array) -> None:
        """Write the projection (heads, R, D) into the whole stored tensor, in place.

        The inverse of `take`; outputs of other roles do not change. Both arguments are NumPy
        arrays, or both are PyTorch tensors.

        Examples
        --------
        >>> import numpy as np
        >>> stored = np.zeros((2, 6))
        >>> key = Projection("c_attn", ((2, 4),), transposed=True, heads=1, head_width=2)
        >>> key.put(stored, np.array([[[1.0, 2.0], [3.0, 4.0]]]))
        >>> stored
        array([[0., 0., 1., 3., 0., 0.],
               [0., 0., 2., 4., 0., 0.]])
        """
        if self.axes is not None:
            array_namespace(tensor).permute_dims(tensor, self.axes)[...] = weight
            return
        if self.groups:
            raise CheckpointError(
                f"{self.tensor}: is a convolution, which is not written; expected a matrix; change "
                "the module's weight itself"
            )
        outputs = weight.reshape(self.heads * self.head_width, -1)
        put_outputs(tensor.T if self.transposed else tensor, self.outputs, outputs)

    def bias_part(self, name: str) -> Part:
        """Return the part of a bias with the layout of the weight's outputs."""
        return Part(name, self.outputs)


@dataclass(frozen=True)
class Norm:
    """A norm of residual vectors, of a latent, or of queries or keys.

    Attributes
    ----------
    kind
        ``rms`` or ``layer``.
    gain, bias
        One tensor for all heads, or one tensor for each head; empty if absent.
    offset
        1 if the gain is stored as its difference from 1.
    epsilon
        Number that is added to the mean square.
    alone
        Whether heads are normalized separately although the gains cover all heads.
    feeds
        Whether the norm comes before the weight, instead of after the weight.
    factor
        Factor of the norm's output.
    """

    kind: str
    gain: tuple[Part, ...] = ()
    bias: tuple[Part, ...] = ()
    offset: float = 0.0
    epsilon: float = 0.0
    alone: bool = False
    feeds: bool = False
    factor: float = 1.0

    def axes(self, gains: int, width: int) -> tuple[int, ...]:
        """Return the axes of (heads, R) that are normalized together: one head, or all heads."""
        return (1,) if self.alone or gains in (0, width) else (0, 1)

    def fold(
        self,
        weight: Float[Array, "heads width d"],
        bias: Float[Array, "heads width"] | None,
        gain: Float[Array, " gains"],
    ) -> tuple[Float[Array, "heads width d"], Float[Array, "heads width"] | None]:
        """Return weight and bias with the linear parts of the norm: gain, and centering.

        A norm before the weight has an entry for each input of the weight, here (heads, R).

        Raises
        ------
        CheckpointError
            The number of gains fits neither one head nor all heads.
        """
        heads, width = weight.shape[:2]
        if len(gain) not in (width, heads * width):
            raise CheckpointError(
                f"a norm of {len(gain)} gains matches neither heads of width {width} nor {heads} "
                f"of them; expected {width} or {heads * width} gains; {MISFIT}"
            )
        gains = (gain + self.offset).reshape(-1, width)
        if self.feeds:
            weight = weight * gains[..., None]
            if self.kind == "layer":
                weight = weight - weight.mean(axis=(0, 1))
            return weight, bias
        if self.kind == "layer":
            axes = self.axes(len(gain), width)
            weight = weight - weight.mean(axis=axes, keepdims=True)
            bias = None if bias is None else bias - bias.mean(axis=axes, keepdims=True)
        folded_bias = None if bias is None else bias * gains
        return weight * gains[..., None], folded_bias


@dataclass(frozen=True)
class Composed:
    """A projection through a latent: x ↦ outer · diag(gain) · (inner · x + bias).

    The latent is normalized between the two weights. The gain of the norm is part of the product;
    the scale of a token is not.
    """

    outer: Projection  # from the latent to the heads, (heads, R, C)
    inner: Projection  # from the input to the latent, (1, C, D)
    norm: Norm  # the latent's; its gain is (C,)
    bias: Part | None = None  # of the inner projection, (C,)

    @property
    def tensor(self) -> str:
        """Name of the first weight that the input is multiplied by."""
        return self.inner.tensor

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.outer.heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.outer.head_width

    @property
    def roles(self) -> dict[str, Part]:
        """All parts to read, by their roles in the projection."""
        roles = {"": self.outer.part, "inner": self.inner.part, "inner_norm": self.norm.gain[0]}
        return roles if self.bias is None else roles | {"inner_bias": self.bias}

    def constant(self, stored: Mapping[Part, Array]) -> Array | None:
        """Return the vector (heads, R) that the inner bias adds; None without a bias."""
        if self.bias is None:
            return None
        return self.outer.weight(stored) @ (stored[self.norm.gain[0]] * stored[self.bias])

    def weight(self, stored: Mapping[Part, Array]) -> Array:
        """Return the projection (heads, R, D) from all arrays that were read."""
        inner = stored[self.norm.gain[0]][:, None] * self.inner.weight(stored)[0]
        return self.outer.weight(stored) @ inner


def put_outputs(tensor: Array, outputs: Ranges | None, values: Array) -> None:
    """Write rows into consecutive ranges of a stored tensor; into all rows for None."""
    start = 0
    for first, last in outputs or ((0, len(values)),):
        stop = start + last - first
        tensor[first:last] = values[start:stop]
        start = stop


def _joined_groups(stored: Array, groups: int) -> Array:
    """Return the matrix (out, in) of a grouped convolution, with zeros between groups."""
    if groups == 1:
        return stored
    xp = array_namespace(stored)
    blocks = stored.reshape(groups, -1, stored.shape[1])
    rows = []
    for group, block in enumerate(blocks):
        row_of_blocks = [xp.zeros_like(block) for _ in range(groups)]
        row_of_blocks[group] = block
        rows.append(xp.concat(row_of_blocks, axis=1))
    return xp.concat(rows, axis=0)


def _columns(stored: Array, outputs: Ranges) -> Array:
    """Return columns of a tensor (in, out), joined."""
    xp = array_namespace(stored)
    ranges = [stored[:, start:stop] for start, stop in outputs]
    return xp.concat(ranges, axis=1)


def _contiguous(array: Array) -> Array:
    """Return the array with contiguous rows, which is fastest for the kernels."""
    if hasattr(array, "contiguous"):  # PyTorch
        return array.contiguous()
    import numpy as np

    if array.ndim != 2 or array.flags.c_contiguous:
        return np.ascontiguousarray(array)
    out = np.empty(array.shape, array.dtype)
    for start in range(0, array.shape[1], CACHED):  # several times as fast as all at once
        columns = slice(start, start + CACHED)
        out[:, columns] = array[:, columns]
    return out


def separate(
    tensor: str, shape: tuple[int, ...], heads: int, inputs: int | None = None
) -> Projection:
    """Return the layout of a tensor of one role.

    Parameters
    ----------
    tensor, shape
        Name and shape, (H·R, D) or (H·R, D / groups, …).
    heads
        Number of heads, H.
    inputs
        Number D of inputs of a convolution, divided among its groups; None for a matrix.

    Raises
    ------
    CheckpointError
        The heads do not divide the outputs.
    """
    width = _divide(shape[0], heads, tensor, "heads")
    groups = 0
    if inputs:
        groups = max(1, inputs // shape[1])
    return Projection(tensor, None, transposed=False, heads=heads, head_width=width, groups=groups)


def within_heads(
    tensor: str, shape: tuple[int, ...], heads: int, start: int, stop: int
) -> Projection:
    """Return the layout of a tensor (H·R, D) in which each head has outputs of several roles.

    Examples
    --------
    >>> within_heads("kv_b_proj", (10, 4), heads=2, start=0, stop=3).outputs
    ((0, 3), (5, 8))
    """
    width = _divide(shape[0], heads, tensor, "heads")
    if not 0 <= start < stop <= width:
        raise CheckpointError(
            f"{tensor}: heads of width {width} have no outputs {start} to {stop}; {MISFIT}"
        )
    outputs = tuple((head * width + start, head * width + stop) for head in range(heads))
    return Projection(tensor, outputs, transposed=False, heads=heads, head_width=stop - start)


def sectioned(
    tensor: str,
    shape: tuple[int, ...],
    heads: dict[str, int],
    order: str,
    blocks: int = 1,
    transposed: bool = False,
) -> dict[str, Projection]:
    """Return the layouts of roles that follow each other in the blocks of a fused tensor.

    ``order`` is the order of the roles, such as ``"qkv"``, and ``heads`` contains the numbers of
    heads: H for ``q``, G for ``k`` and ``v``. The order repeats in each of the ``blocks``; with
    G blocks, each block contains one key head with its queries. A ``transposed`` tensor is
    (in, out).

    Examples
    --------
    >>> roles = sectioned("qkv", (8, 4), {"q": 4, "k": 2, "v": 2}, "qkv", blocks=2)
    >>> roles["q"].outputs, roles["k"].outputs
    (((0, 2), (4, 6)), ((2, 3), (6, 7)))
    """
    length = shape[-1] if transposed else shape[0]
    width = _divide(length, sum(heads[role] for role in order), tensor, "heads in all roles")
    sections = [(role, heads[role], heads[role] * width) for role in order]
    return sized(tensor, length, sections, blocks, transposed)


def sized(
    tensor: str,
    length: int,
    sections: Sequence[tuple[str, int, int]],
    blocks: int,
    transposed: bool = False,
) -> dict[str, Projection]:
    """Return the layouts of roles of different widths in a fused tensor; see `sectioned`.

    Parameters
    ----------
    tensor, length
        Name of the tensor, and number of its outputs.
    sections
        In order: a role, the number of heads, and the number of outputs. Sections without a number
        share the remaining outputs equally.
    blocks
        Number of times that the order repeats.
    transposed
        Whether the tensor is stored (in, out).

    Raises
    ------
    CheckpointError
        The sections do not divide the outputs, or an equal share gives queries and keys different
        head widths.

    Examples
    --------
    >>> roles = sized("in_proj", 12, [("z", 1, 0), ("v", 2, 0), ("k", 1, 2), ("q", 1, 2)], 1)
    >>> roles["v"].outputs, roles["k"].outputs, roles["v"].head_width
    (((4, 8),), ((8, 10),), 2)
    """
    fixed = sum(size for _, _, size in sections)
    heads_of_open = [(role, heads) for role, heads, size in sections if size == 0]
    open_sections = len(heads_of_open)
    remaining = length - fixed
    fits = remaining >= open_sections if open_sections else remaining == 0
    if not fits:
        raise CheckpointError(
            f"{tensor}: {length} outputs do not hold {fixed} for "
            f"{', '.join(role for role, _, _ in sections)}; {MISFIT}"
        )
    share = 0
    if open_sections:
        _require_equal_shares(tensor, remaining, heads_of_open)
        share = remaining // open_sections
    # Outputs of each role in one block, and the first of them.
    span_by_role: dict[str, int] = {}
    start_by_role: dict[str, int] = {}
    block_length = 0
    for role, _, size in sections:
        span_by_role[role] = _divide(size or share, blocks, tensor, "blocks")
        start_by_role[role] = block_length
        block_length += span_by_role[role]
    projections = {}
    for role, heads, _ in sections:
        span = span_by_role[role]
        starts = [block * block_length + start_by_role[role] for block in range(blocks)]
        outputs = tuple((start, start + span) for start in starts)
        head_width = _divide(blocks * span, heads, tensor, f"heads of {role}")
        projections[role] = Projection(tensor, outputs, transposed, heads, head_width)
    return projections


def _require_equal_shares(tensor: str, length: int, parts: Sequence[tuple[str, int]]) -> None:
    """Raise `CheckpointError` if equal shares of the outputs do not fit the heads of the parts.

    The parts are those with ``*`` in a family file: a role, and a number of heads. Heads of queries
    and keys have one width.
    """
    share, excess = divmod(length, len(parts))
    divides = not excess and all(share % heads == 0 for _, heads in parts)
    numbers_of_heads = {heads for role, heads in parts if role in ("q", "k")}
    if divides and len(numbers_of_heads) < 2:
        return
    names = ", ".join(f"{role} ({counted(heads, 'head')})" for role, heads in parts)
    width, remainder = divmod(length, sum(heads for _, heads in parts))
    suggestion = "" if remainder else f": {width}, if all parts have the same"
    raise CheckpointError(
        f"{tensor}: equal shares ('*') of {length} outputs for {names} do not give heads of one "
        f"width; in place of each '*', write the head width as a factor{suggestion}"
    )


def _divide(length: int, parts: int, tensor: str, what: str) -> int:
    """Return the outputs of one of several equal parts; messages name the parts ``what``."""
    if parts < 1 or length % parts:
        raise CheckpointError(
            f"{tensor}: {length} outputs do not divide into {parts} {what}; {MISFIT}"
        )
    return length // parts
