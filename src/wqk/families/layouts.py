"""How one or several projections lie in a stored tensor.

Every layout says the same thing: which outputs (rows of an ``nn.Linear`` weight, columns of a
Conv1D one) belong to the queries, to the keys and to the values, in the order of the heads. That is
enough to take a projection out of a tensor and to put it back.

==============  =====================================================================
layout          the tensor's outputs
==============  =====================================================================
``separate``    one role, head after head
``sectioned``   all of one role, then all of the next; several such blocks in a row
``conv1d``      as ``sectioned``, stored (in, out): GPT-2
``grouped``     for each key head: its queries, its key, its value
==============  =====================================================================

Axes: H query heads, G key heads, R head width, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk.checkpoints import Part
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

LAYOUTS = ("separate", "sectioned", "conv1d", "grouped")

# Norms between projection and score: root mean square, or with the mean taken off first.
NORMS = ("rms", "layer")

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Projection:
    """The weight of one role: which outputs of which tensor, for how many heads.

    Attributes
    ----------
    tensor
        Name of the stored weight.
    outputs
        Half-open ranges of its outputs, in the order of the heads; None for all of them.
    transposed
        Whether the tensor is stored (in, out).
    heads, head_width
        How the outputs divide.
    """

    tensor: str
    outputs: Ranges | None
    transposed: bool
    heads: int
    head_width: int

    @property
    def part(self) -> Part:
        """What has to be read for it: whole tensors where outputs are columns."""
        return Part(self.tensor, None if self.transposed else self.outputs)

    def take(self, stored: np.ndarray) -> np.ndarray:
        """The projection (heads, R, D), from what was read for `part`."""
        if self.transposed:
            import numpy as np

            columns = stored if self.outputs is None else _columns(stored, self.outputs)
            stored = np.ascontiguousarray(columns.T)
        return stored.reshape(self.heads, self.head_width, -1)

    def bias_part(self, name: str) -> Part:
        """What has to be read of a bias tensor that lies as the weight's outputs do."""
        return Part(name, self.outputs)


def _columns(stored: np.ndarray, outputs: Ranges) -> np.ndarray:
    import numpy as np

    return np.concatenate([stored[:, start:stop] for start, stop in outputs], axis=1)


def separate(tensor: str, shape: tuple[int, ...], heads: int) -> Projection:
    """A tensor (H·R, D) of one role."""
    return Projection(tensor, None, False, heads, _divide(shape[0], heads, tensor, "heads"))


def sectioned(
    tensor: str,
    shape: tuple[int, ...],
    heads: dict[str, int],
    order: str,
    blocks: int = 1,
    transposed: bool = False,
) -> dict[str, Projection]:
    """The roles of a fused tensor, each block of which holds them one after the other.

    Parameters
    ----------
    tensor, shape
        The stored tensor.
    heads
        Number of heads of each role in ``order``: H for ``q``, G for ``k`` and ``v``.
    order
        The roles in the order in which they lie, such as ``"qkv"``.
    blocks
        How often the order repeats. With G blocks, each holds one key head with its queries.
    transposed
        Whether the tensor is (in, out).

    Examples
    --------
    >>> roles = sectioned("qkv", (8, 4), {"q": 4, "k": 2, "v": 2}, "qkv", blocks=2)
    >>> roles["q"].outputs, roles["k"].outputs
    (((0, 2), (4, 6)), ((2, 3), (6, 7)))
    """
    length = shape[-1] if transposed else shape[0]
    head_width = _divide(length, sum(heads[role] for role in order), tensor, "heads in all roles")
    spans = {role: _divide(heads[role], blocks, tensor, "blocks") * head_width for role in order}
    outputs: dict[str, list[tuple[int, int]]] = {role: [] for role in order}
    start = 0
    for _ in range(blocks):
        for role in order:
            outputs[role].append((start, start + spans[role]))
            start += spans[role]
    return {
        role: Projection(tensor, tuple(outputs[role]), transposed, heads[role], head_width)
        for role in order
    }


def _divide(length: int, parts: int, tensor: str, what: str) -> int:
    if parts < 1 or length % parts:
        raise CheckpointError(
            f"{tensor}: {length} outputs do not divide into {parts} {what}; "
            "the configuration does not fit the weights"
        )
    return length // parts
