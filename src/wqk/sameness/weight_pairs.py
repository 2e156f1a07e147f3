"""Pairs of weights: a stored weight of the candidate, and the expected weight from the reference.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from wqk._machine import cached_property, side_by_side
from wqk.checkpoints.adapters import DoraUpdate, LoraFactors
from wqk.checkpoints.checkpoint import Grid, Part, Regrouping
from wqk.sameness.blocks import MANY
from wqk.sameness.edits import Edit, Take, Viewed
from wqk.sameness.lora_merges import MergeScale
from wqk.sameness.matching import (
    are_in_place,
    lacks_rows,
    largest,
    permutation,
    root_mean_square,
    same_numbers,
    screening_sample,
    sketch,
    sketch_cosines,
    within,
)
from wqk.sameness.mismatches import Kind
from wqk.sameness.permutations import Sizes
from wqk.sameness.repairs import Recut
from wqk.sameness.tensor_names import title_in_block
from wqk.sameness.tolerances import ALIKE, QUANTIZED_ALIKE, SAFETY, SAME_SHARE


class TensorUse(StrEnum):
    """Use of a stored tensor for one side of a block."""

    WEIGHT = "weight"
    BIAS = "bias"
    INPUT_NORM = "norm before the projection"
    SCORE_NORM = "norm before the score"
    LATENT_NORM = "norm of the latent"
    LATENT_BIAS = "bias of the latent"


# Gains and biases of norms.
NORMS = frozenset({TensorUse.INPUT_NORM, TensorUse.SCORE_NORM, TensorUse.LATENT_NORM})


@dataclass(frozen=True)
class Role:
    """Role of a stored tensor in its block: the side of the tensor, and its use in the side.

    Attributes
    ----------
    side
        ``query``, ``key``, ``value``, ``output``, or ``positions of queries`` and ``… of keys``.
    use
        The use of the tensor.
    fused
        Whether the tensor holds several sides.

    Examples
    --------
    >>> str(Role("query")), str(Role("query", TensorUse.BIAS)), str(Role("query", fused=True))
    ('query', 'bias of the query', 'fused')
    """

    side: str
    use: TensorUse = TensorUse.WEIGHT
    fused: bool = False

    def __str__(self) -> str:
        if self.is_norm:
            return str(self.use)
        side = "fused" if self.fused else self.side
        if self.use is TensorUse.WEIGHT:
            return side
        owner = f"{side} weight" if self.fused else side
        return f"{self.use} of the {owner}"

    @property
    def is_norm(self) -> bool:
        """True for the gain or the bias of a norm."""
        return self.use in NORMS

    @property
    def is_bias(self) -> bool:
        """True for the bias of a projection."""
        return self.use is TensorUse.BIAS


class Gain(NamedTuple):
    """The gain of the norm before a weight, as it multiplies the inputs of either model."""

    name: str
    expected: np.ndarray
    actual: np.ndarray
    offset: float  # what is added when the stored gain is read


class AdapterEffect(NamedTuple):
    """An adapter's effect on a weight in one of the two checkpoints.

    Attributes
    ----------
    start
        The weight without the adapter.
    scale
        The numbers of the scale of the adapter's product.
    in_reference
        Whether the reference has the adapter.
    factors
        The factors of an update of LoRA.
    is_transposed
        Whether the weight is the transposed stored tensor.
    update
        The update of an adapter of DoRA.
    """

    start: np.ndarray
    scale: MergeScale
    in_reference: bool
    factors: LoraFactors | None = None
    is_transposed: bool = False
    update: DoraUpdate | None = None

    def of_rows(self, rows: np.ndarray) -> AdapterEffect:
        """Return the effect on some rows of the weight."""
        update = self.update
        if update is not None:
            update = update._replace(
                product=update.product[rows], magnitudes=update.magnitudes[rows]
            )
        return self._replace(start=self.start[rows], update=update)


class Layout(NamedTuple):
    """Shape of a stored tensor, and its conversion to a matrix (outputs, inputs) of ``nn.Linear``.

    Attributes
    ----------
    shape
        The stored shape; more than two axes if heads have an axis of their own.
    exchanges_axes
        Whether the last two axes are exchanged first. All axes except the last then become rows.
    transposes
        Whether the matrix is transposed at the end, as for outputs.
    """

    shape: tuple[int, ...]
    exchanges_axes: bool = False
    transposes: bool = False

    @property
    def is_transposed(self) -> bool:
        """True if the rows of the matrix are columns of the stored tensor."""
        return self.exchanges_axes != self.transposes

    def as_matrix(self, stored: np.ndarray) -> np.ndarray:
        """Return a stored tensor as a matrix; vectors are unchanged."""
        if self.exchanges_axes:
            stored = stored.swapaxes(-1, -2)
        if stored.ndim > 2:
            stored = stored.reshape(-1, stored.shape[-1])
        return stored.T if self.transposes else stored

    def as_stored(self, edit: Edit) -> Edit:
        """Return the edit of the stored tensor for an edit of the matrix or vector."""
        if isinstance(edit, Take) or len(self.shape) < 2:
            return edit
        if len(self.shape) == 2:
            return edit.for_transposed() if self.is_transposed else edit
        return Viewed(self.shape, self.exchanges_axes, self.transposes, edit)


MATRIX = Layout(())


@dataclass(frozen=True, eq=False)
class WeightPair:
    """A stored weight (n, D) or vector (n,) of a block, expected and actual.

    Attributes
    ----------
    name
        Name in the candidate.
    role
        Use in the block.
    expected, actual
        The numbers that follow from the reference, and the candidate's numbers.
    heads
        Number of heads in the rows; 0 if the rows are not heads.
    sizes
        The numbers of the block.
    rounding
        Half the distance of neighboring stored numbers, relative to the numbers.
    bias
        The vector in the order of the rows.
    gain
        The gain of the norm before a weight.
    layout
        Layout of the stored tensor.
    rows
        For a part of a fused weight, the rows of the part in the whole weight.
    parts
        For a fused weight, the pairs of its sides and of rows outside of sides.
    grid, regrouped
        For a quantized weight, its grid of numbers, and a function that regroups its columns.
    repeated
        Number of stored copies of each key head.
    adapter
        The effect of an adapter on the weight, if one of the models has an adapter.
    sides
        The sides among ``query`` and ``key`` that the weight belongs to.
    block
        All pairs of the block.

    Examples
    --------
    >>> expected = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> pair = WeightPair(
    ...     "o_proj.weight", Role("output"), expected, expected[[0, 0, 2]], Sizes(2, 2, 1)
    ... )
    >>> pair.likeness.tolist()  # the last is zero in both
    [1.0, 0.0, 1.0]
    >>> pair.heads, pair.transposed.heads  # columns of outputs make heads
    (0, 2)
    """

    name: str
    role: Role
    expected: np.ndarray
    actual: np.ndarray
    sizes: Sizes
    heads: int = 0
    rounding: float = 0.0
    bias: WeightPair | None = None
    gain: Gain | None = None
    layout: Layout = MATRIX
    rows: np.ndarray | None = None
    parts: tuple[WeightPair, ...] = ()
    grid: Grid | None = None
    regrouped: Callable[[Part], Regrouping | None] = lambda part: None
    repeated: int = 1
    adapter: AdapterEffect | None = None
    sides: tuple[str, ...] = ()
    block: list[WeightPair] = field(default_factory=list, repr=False)

    @property
    def title(self) -> str:
        """The shortened name."""
        return title_in_block(self.name)

    @property
    def is_matrix(self) -> bool:
        """True for a weight, False for a vector."""
        return self.expected.ndim > 1

    @property
    def is_side(self) -> bool:
        """True if the weight contains only queries or only keys."""
        return (
            not self.role.fused and self.role.use is TensorUse.WEIGHT and self.role.side in SCORED
        )

    @property
    def least_cosine(self) -> float:
        """The least cosine of equal rows."""
        return QUANTIZED_ALIKE if self.grid else ALIKE

    @cached_property
    def transposed(self) -> WeightPair:
        """The transposed pair; heads are columns of the output weight."""
        return replace(
            self,
            expected=self.expected.T,
            actual=self.actual.T,
            heads=self.sizes.heads if self.role.side == "output" else 0,
            bias=None,
            gain=None,
            parts=(),
            repeated=1,
        )

    @cached_property
    def sketch_of_expected(self) -> np.ndarray:
        """A `sketch` of the expected rows."""
        return sketch(self.expected)

    @cached_property
    def sketch_of_actual(self) -> np.ndarray:
        """A `sketch` of the actual rows."""
        return sketch(self.actual)

    @property
    def sketches(self) -> list[np.ndarray]:
        """A `sketch` of the expected rows, and of the actual rows."""
        names = "sketch_of_expected", "sketch_of_actual"
        if set(names) <= vars(self).keys():
            return [self.sketch_of_expected, self.sketch_of_actual]
        return side_by_side(getattr, (self, self), names, many=self.expected.size > MANY)

    @cached_property
    def rows_in_place(self) -> bool:
        """True if each actual row has the direction of the expected row."""
        return are_in_place(self.expected, self.actual, self.least_cosine)

    @cached_property
    def row_order(self) -> np.ndarray | None:
        """Order of the actual rows that makes the expected rows; None if absent or all in place."""
        if self.rows_in_place:
            return None
        sample = sketch(self.expected[screening_sample(self.expected)])
        if lacks_rows(sample, self.sketch_of_actual, self.least_cosine):
            return None
        return permutation(self.expected, self.actual, self.least_cosine, self.sketches)

    @cached_property
    def likeness(self) -> np.ndarray:
        """Approximate cosine of each actual row with the expected row; 1 if both are zero."""
        expected, actual = self.sketches
        are_zero = ~(expected.any(axis=1) | actual.any(axis=1))
        return np.where(are_zero, 1, sketch_cosines(expected, actual))

    @cached_property
    def largest_expected(self) -> float:
        """The largest absolute value of the expected numbers."""
        return largest(self.expected)

    @cached_property
    def right(self) -> bool:
        """True if the actual numbers equal the expected numbers, up to rounding."""
        if self.grid is not None:
            return self.fits(self.actual)
        bound = 8 * self.rounding * self.largest_expected
        return self.expected is self.actual or within(self.expected, self.actual, bound)

    def fits(self, value: np.ndarray) -> bool:
        """Return whether an array is as expected, up to the rounding of a quantized weight."""
        distance = value - self.expected
        if self.grid is None:
            return largest(distance) <= SAME_SHARE * self.largest_expected
        half_step = SAFETY * self.grid.rounding(value) * root_mean_square(value)
        # Errors of rounding are spread evenly up to half a step.
        return bool(root_mean_square(distance) < half_step / math.sqrt(3))

    def facts_of_heads(self, heads: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the heads of this weight, and the query heads of each, by name.

        Terms of positions have no names of their own for heads.
        """
        if self.role.side not in SIDES_WITH_HEADS:
            return {}
        share = max(1, self.sizes.heads // self.heads)  # query heads of each head
        query_heads: list[int] = []
        for head in heads:
            query_heads += range(share * head, share * (head + 1))
        return {f"{self.role.side}_heads": tuple(heads), "query_heads": tuple(query_heads)}

    def finding(
        self,
        kind: Kind,
        description: str,
        edit: Edit | None = None,
        *,
        with_bias: bool = True,
        rows: np.ndarray | None = None,
        heads: tuple[int, ...] = (),
        facts: Mapping[str, Any] | None = None,
    ) -> WeightFinding:
        """Return a finding of this weight; by default, its edit takes the reference's weight.

        In the description, ``{}`` stands for the title of the weight (see `WeightPhrase`). The bias
        of the same rows is also edited, if the edit makes the bias equal to the expected bias.
        """
        edit = Take() if edit is None else edit
        edits = {self.name: edit}
        bias = self.bias
        if with_bias and bias is not None and not bias.right:
            if isinstance(edit, Take):
                description = f"{description}, and {{its bias}}"
            edit_of_bias = edit.on_bias()
            if edit_of_bias is not None:
                mended = edit_of_bias.apply(bias.actual, bias.expected)
                if same_numbers(bias.expected, mended):
                    edits[bias.name] = edit_of_bias
        return WeightFinding(
            kind,
            WeightPhrase(description),
            edits,
            self,
            rows,
            self.sides,
            heads,
            dict(facts or {}),
        )


@dataclass(frozen=True)
class WeightPhrase:
    """A phrase about a weight with a placeholder for the weight's title.

    Weights with one phrase and one edit have one cause; its sentence lists the titles of all these
    weights.

    Attributes
    ----------
    template
        The phrase. The placeholder ``{}`` stands for the titles; ``{holds}`` and ``{its bias}``
        become singular or plural. A phrase that is not about a weight has no placeholder.

    Examples
    --------
    >>> phrase = WeightPhrase("rows of {} are reversed")
    >>> phrase.about("q_proj", "k_proj")
    'rows of q_proj, k_proj are reversed'
    >>> phrase.about_part("query")
    WeightPhrase(template='rows of the query part of {} are reversed')
    >>> phrase = WeightPhrase("{} {holds} weights of layer 1")
    >>> phrase.about("q_proj"), phrase.about("q_proj", "k_proj")
    ('q_proj holds weights of layer 1', 'q_proj, k_proj hold weights of layer 1')
    """

    template: str

    def about(self, *titles: str) -> str:
        """Return the phrase about weights with these titles."""
        holds, its_bias = "holds", "its bias"
        if len(titles) > 1:
            holds, its_bias = "hold", "their biases"
        phrase = self.template.replace("{holds}", holds).replace("{its bias}", its_bias)
        return phrase.replace("{}", ", ".join(titles))

    def about_part(self, role: object) -> WeightPhrase:
        """Return the phrase about one part of a fused weight, still with a placeholder."""
        return WeightPhrase(self.about(f"the {role} part of {{}}"))


@dataclass(frozen=True, eq=False)
class WeightFinding:
    """A change of stored weights, and the edits that undo it.

    Attributes
    ----------
    kind
        The cause.
    phrase
        The change, as a phrase.
    edits
        Edits of matrices and vectors in the orientation of ``nn.Linear``, by the name of the
        tensor.
    pair
        The weight with the change.
    rows
        The order of the actual rows that makes the expected rows, if the order was wrong.
    sides, heads
        The affected sides and heads.
    facts
        Numbers behind the phrase, by name.
    swapped
        Exchanged tensors: the source of each target.
    recuts
        Tensors with rows that were joined and cut at other places.
    """

    kind: Kind
    phrase: WeightPhrase
    edits: Mapping[str, Edit] = field(repr=False)
    pair: WeightPair = field(repr=False)
    rows: np.ndarray | None = field(default=None, repr=False)
    sides: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    swapped: Mapping[str, str] = field(default_factory=dict)
    recuts: tuple[Recut, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that are edited."""
        cut = [name for recut in self.recuts for name in recut.names]
        return (*self.edits, *self.swapped, *cut)


def names_explained_by(findings: Iterable[WeightFinding]) -> set[str]:
    """Return the names of all tensors that findings edit."""
    names: set[str] = set()
    for finding in findings:
        names.update(finding.tensors)
    return names


# Sides with lists of heads in causes.
SIDES_WITH_HEADS = ("query", "key", "value", "output")
# The sides of scores.
SCORED = ("query", "key")
