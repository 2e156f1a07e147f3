"""A stored weight beside what it should be, and which of its rows are which.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from wqk._machine import cached_property, side_by_side
from wqk.checkpoints.checkpoint import Grid, Part, Regrouping
from wqk.sameness.blocks import MANY
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.permutations import Sizes
from wqk.sameness.tolerances import ALIKE, QUANTIZED_ALIKE, SAFETY, SAME, SCREENED, TIED

# Code that takes a weight from the first checkpoint.
ORIGINAL = "w = original"
# Rows are compared in so many random directions, some at a time to bound memory.
DIRECTIONS, SOME = 64, 512


class Gain(NamedTuple):
    """The gain of the norm before a weight, as it should be and as it is."""

    name: str
    wanted: np.ndarray
    stored: np.ndarray
    offset: float  # what is added when it is read

    @property
    def code(self) -> str:
        """What multiplies the inputs, of ``gain`` as it is stored."""
        return f"({self.offset:g} + gain)" if self.offset else "gain"


class Adapter(NamedTuple):
    """What an adapter does to a weight in one of two checkpoints."""

    start: np.ndarray  # the weight without it
    scale: float
    in_first: bool  # whether the first checkpoint has it


@dataclass(frozen=True, eq=False)
class Unit:
    """A stored weight (n, D) or vector (n,) of a block, and what it should be.

    Attributes
    ----------
    name
        What the second checkpoint calls it.
    role
        ``query``, ``key``, ``value``, ``output``, ``fused``; of vectors also ``bias of the query``
        and so on, and the norm that a gain belongs to.
    wanted, stored
        As it should be, and as it is.
    heads
        How many heads its rows make, 0 if they make none.
    sizes
        Of its block.
    rounding
        Half the distance of neighboring stored numbers, relative to them.
    bias
        The vector that lies in the order of its rows.
    gain
        Of the norm before a weight.
    flipped
        Whether it is stored the other way, (in, out).
    rows
        Of a part of a fused weight: its rows in the whole.
    parts
        Of a fused weight: those of each side, and those of none.
    grid, regrouped
        Of a quantized weight: its numbers, and what it would be with its columns in other groups.
    repeated
        How often each key head is stored.
    adapter
        What the adapter of one of the two does to it.
    sides
        Which of ``query`` and ``key`` it belongs to.
    block
        All of its block's.

    Examples
    --------
    >>> wanted = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> unit = Unit("o_proj.weight", "output", wanted, wanted[[0, 0, 2]], Sizes(2, 2, 1))
    >>> unit.likeness.tolist()  # the last is zero in both
    [1.0, 0.0, 1.0]
    >>> unit.heads, unit.turned.heads  # columns of outputs make heads
    (0, 2)
    """

    name: str
    role: str
    wanted: np.ndarray
    stored: np.ndarray
    sizes: Sizes
    heads: int = 0
    rounding: float = 0.0
    bias: Unit | None = None
    gain: Gain | None = None
    flipped: bool = False
    rows: np.ndarray | None = None
    parts: tuple[Unit, ...] = ()
    grid: Grid | None = None
    regrouped: Callable[[Part], Regrouping | None] = lambda part: None
    repeated: int = 1
    adapter: Adapter | None = None
    sides: tuple[str, ...] = ()
    block: list[Unit] = field(default_factory=list, repr=False)

    @property
    def variable(self) -> str:
        """What it is called in code."""
        start = self.role.partition(" ")[0]
        return {"bias": "b", "norm": "gain"}.get(start, "w")

    @property
    def title(self) -> str:
        """Its name, shortened."""
        return short(self.name)

    @property
    def alike(self) -> float:
        """The cosine of rows that are the same."""
        return QUANTIZED_ALIKE if self.grid else ALIKE

    @cached_property
    def turned(self) -> Unit:
        """The same with columns for rows; those of outputs make heads."""
        return replace(
            self,
            wanted=self.wanted.T,
            stored=self.stored.T,
            flipped=not self.flipped,
            heads=self.sizes.heads if self.role == "output" else 0,
            bias=None,
            gain=None,
            parts=(),
            repeated=1,
        )

    @cached_property
    def sketches(self) -> list[np.ndarray]:
        """Its rows as they should be, and as they are, each by a `sketch`."""
        return side_by_side(sketch, (self.wanted, self.stored), many=self.wanted.size > MANY)

    @cached_property
    def likeness(self) -> np.ndarray:
        """The cosine of each row with itself as it should be, nearly; 1 for two of zeros."""
        wanted, stored = self.sketches
        silent = ~(wanted.any(axis=1) | stored.any(axis=1))
        return np.where(silent, 1, np.abs((wanted * stored).sum(axis=1)))

    @cached_property
    def right(self) -> bool:
        """Whether it is what it should be, up to rounding."""
        if self.grid is not None:
            return self.fits(self.stored)
        bound = 8 * self.rounding * largest(self.wanted)
        return self.wanted is self.stored or within(self.wanted, self.stored, bound)

    def fits(self, value: np.ndarray) -> bool:
        """Whether a value is what it should be, up to the rounding of a quantized one."""
        apart = value - self.wanted
        if self.grid is None:
            return largest(apart) <= SAME * largest(self.wanted)
        size, left = (np.sqrt(np.mean(np.square(x, dtype=np.float64))) for x in (value, apart))
        return bool(left < SAFETY * self.grid.rounding(value) * size / math.sqrt(3))

    def finding(
        self,
        kind: Kind,
        words: str,
        code: str = ORIGINAL,
        repaired: Any = None,
        bias: tuple[np.ndarray, str] | None = None,
        rows: np.ndarray | None = None,
        **more: Any,
    ) -> Finding:
        """What was found of it; ``repaired`` is the weight without it, by default the original's.

        ``bias`` is its bias if that was changed along, and the code for it; the bias of a weight
        that has to be taken from the original is taken, too.
        """
        repaired = np.ascontiguousarray(self.wanted if repaired is None else repaired)
        both = {self.name: repaired.astype(self.stored.dtype, copy=False)}
        one = self.bias
        if one is not None and not one.right:
            if code == ORIGINAL:
                words, bias = f"{words}, and its bias", (one.wanted, "b = original_b")
            if bias is not None and same_numbers(one.wanted, bias[0]):
                both[one.name] = bias[0].astype(one.stored.dtype, copy=False)
                code += f"\n{bias[1]}"
        return Finding(Mismatch(kind, words, code, self.sides, **more), both, self, rows)


@dataclass(frozen=True, eq=False)
class Finding:
    """What was done to stored weights, and what undoes it.

    Attributes
    ----------
    said
        The cause, what it is in a phrase, and PyTorch that undoes it; braces stand for the weight's
        name.
    repaired
        The weights after it, by name.
    unit
        The weight in which it was found.
    rows
        The stored rows that make the weight, where they were in another order.
    """

    said: Mismatch
    repaired: Mapping[str, np.ndarray] = field(repr=False)
    unit: Unit = field(repr=False)
    rows: np.ndarray | None = field(default=None, repr=False)

    @property
    def mismatch(self) -> Mismatch:
        """What is said, of the weight by its name and as it is stored."""
        unit, said = self.unit, self.said
        roles = {one.name: one.role for one in unit.block if one.name in self.repaired}
        facts = {"tensor": unit.name, "tensors": roles, **said.facts}
        if unit.gain is not None:
            facts["gain"] = unit.gain.name
        code = across(said.repair) if unit.flipped else said.repair
        return replace(said, reason=said.reason.replace("{}", unit.title), repair=code, facts=facts)


def across(code: str) -> str:
    """The code of rows for columns, or of ``nn.Linear`` for weights that are stored (in, out)."""
    if not code or code.startswith(ORIGINAL):
        return code
    start = "w, original = w.T, original.T; D = w.shape[1]"
    return f"{start}\n{code}\nw, original = w.T, original.T; D = w.shape[1]"


def short(name: str) -> str:
    """A name without what all tensors of a block share."""
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    return ".".join(parts[-2:]) if parts[-1] in ("bias", "dense") else parts[-1]


def largest(values: np.ndarray) -> float:
    """The largest absolute value, 0 of none."""
    return float(max(values.max(initial=0.0), -values.min(initial=0.0)))


def within(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Whether no two numbers of two arrays are farther apart; most that differ do at once."""
    pieces = (slice(start, start + SOME) for start in range(0, len(a), SOME))
    return all(largest(a[piece] - b[piece]) <= bound for piece in pieces)


# -- rows that find rows -----------------------------------------------------------------------


def sketch(rows: np.ndarray) -> np.ndarray:
    """Rows in a few random directions, of norm 1; all of narrow ones."""
    if rows.shape[1] > DIRECTIONS:
        random, shape = np.random.default_rng(0), (rows.shape[1], DIRECTIONS)
        rows = rows.astype(np.float32, copy=False) @ random.standard_normal(shape, np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), np.float32)


def nearest(ours: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each row the first of the most similar other ones, whatever the sign, by sketches."""

    def of(some: slice) -> np.ndarray:
        products = np.abs(ours[some] @ others.T)
        return np.asarray((products >= products.max(axis=1, keepdims=True) - TIED).argmax(axis=1))

    return _by_rows(of, ours, len(ours) * len(others), int)


def cosines(
    rows: np.ndarray, others: np.ndarray, place: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """Of each row and the other in its place, whatever the sign; 1 for two of zeros.

    ``place`` are the others' rows, where these are not all in order.
    """
    at = np.arange(len(others))[place]

    def of(some: slice) -> np.ndarray:
        a, b = rows[some], others[at[some]]
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        silent = ~(a.any(axis=1) | b.any(axis=1))
        products = np.abs(np.einsum("nd,nd->n", a, b))
        return np.where(silent, 1, products / np.where(norms > 0, norms, 1))

    return _by_rows(of, rows, rows.size, float)


def _by_rows(
    of: Callable[[slice], np.ndarray], rows: np.ndarray, numbers: int, dtype: type
) -> np.ndarray:
    """What a function gives for some rows at a time, joined."""
    pieces = [slice(start, start + SOME) for start in range(0, len(rows), SOME)]
    found = side_by_side(of, pieces, many=numbers > MANY)
    return np.concatenate([np.zeros(0, dtype), *found])


def matched(wanted: np.ndarray, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each wanted row the stored one that is it, and whether there are as many of it.

    Rows are given as sketches. Equal ones, such as those of repeated key heads or of pruned ones,
    are each other's in order.
    """
    labels = [nearest(stored, stored), nearest(wanted, stored)]
    for label, rows in zip(labels, (stored, wanted), strict=True):
        label[~rows.any(axis=1)] = -1
    order = [np.argsort(label, kind="stable") for label in labels]
    ranked = [label[some] for label, some in zip(labels, order, strict=True)]
    place = np.empty(len(wanted), int)
    place[order[1]] = order[0]
    return place, np.equal(*ranked)


def permutation(
    wanted: np.ndarray, stored: np.ndarray, alike: float, sketches: Sequence[np.ndarray] = ()
) -> np.ndarray | None:
    """The stored rows that make the wanted ones; None unless each is there, or all are in place."""
    marks, others = sketches or side_by_side(sketch, (wanted, stored), many=wanted.size > MANY)
    if (np.abs((marks * others).sum(axis=1)) > alike).all():
        return None
    # Of unrelated rows, some tell it for all.
    some = marks[:: max(1, len(marks) // SCREENED)]
    near = np.abs((some * others[nearest(some, others)]).sum(axis=1))
    if (near[some.any(axis=1)] < 2 * alike - 1).any():
        return None
    place, found = matched(marks, others)
    is_found = found.all() and (cosines(wanted, stored, place) > alike).all()
    return place if is_found and not np.array_equal(place, np.arange(len(place))) else None


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same, up to a share of their size."""
    size = float(np.linalg.norm(a)) / max(1, a.size) ** 0.5
    return a.shape == b.shape and within(a, b, 2 * SAME * (size + largest(a)))
