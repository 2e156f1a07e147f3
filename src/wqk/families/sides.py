"""One side of an attention: its projection, and what precedes and follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.checkpoints import Part
    from wqk.families.layouts import Composed, Projection
    from wqk.families.norms import Norm


class Temperature(NamedTuple):
    """A learned factor of each head's score: the exponential of ``logarithm`` (H,), limited."""

    logarithm: Part
    limit: float


@dataclass(frozen=True)
class Side:
    """Queries, keys, values or outputs of a block, as its checkpoint stores them.

    Attributes
    ----------
    projection
        Which outputs of which tensors, for how many heads.
    bias
        Added by the projection.
    norm
        Between projection and score.
    input_norm
        What the projection is fed by, where that is a norm.
    temperature
        A factor of each head.
    """

    projection: Projection | Composed
    bias: Part | None = None
    norm: Norm | None = None
    input_norm: Norm | None = None
    temperature: Temperature | None = None

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.projection.heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.projection.head_width

    @property
    def tensor(self) -> str:
        """Name of the weight that the input meets first."""
        return self.projection.tensor

    @property
    def roles(self) -> Iterator[tuple[str, Part]]:
        """Everything that is read for it, and what it is: ``bias``; empty for the weight itself.

        The norm of the input is read only where it is folded in.
        """
        yield from self.projection.roles.items()
        if self.bias is not None:
            yield "bias", self.bias
        if self.temperature is not None:
            yield "temperature", self.temperature.logarithm
        if self.norm is not None:
            yield from (("norm", part) for part in self.norm.gain)
            yield from (("norm_bias", part) for part in self.norm.bias)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything that is read for it."""
        return tuple(part for _, part in self.roles)
