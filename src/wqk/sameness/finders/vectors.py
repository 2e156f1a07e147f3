"""Biases and gains that are missing, in another order, or different."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wqk.sameness.edits import Clear, Edit, Offset, Permute
from wqk.sameness.matching import same_numbers
from wqk.sameness.mismatches import Kind
from wqk.sameness.permutations import Reorder, name_permutation, reorders
from wqk.sameness.tolerances import UNEXPLAINED_BY_ORDER
from wqk.sameness.weight_pairs import WeightFinding, WeightPair


@dataclass(frozen=True)
class _Titles:
    """Words for a vector in descriptions.

    Attributes
    ----------
    prefix
        The beginning of each description.
    noun
        ``biases`` or ``gains``.
    vector
        The vector with its side, such as ``biases of the query``.
    rows
        The rows that move with the vector.
    missing
        The description of zeros.
    """

    prefix: str
    noun: str
    vector: str
    rows: str
    missing: str

    @classmethod
    def of(cls, pair: WeightPair) -> _Titles:
        """Return the words for a bias, or for the gain or bias of a norm."""
        if pair.role.is_norm:
            noun = "biases" if pair.name.endswith("bias") else "gains"
            return cls(f"{pair.role}: ", noun, noun, "the rows", "all zero")
        vector = str(pair.role).replace("bias", "biases")
        return cls("same weights, ", "biases", vector, "the weights' rows", "missing")


def find_vector(pair: WeightPair) -> WeightFinding | None:
    """Find biases and gains that are missing, in another order, or different."""
    if not (pair.role.is_bias or pair.role.is_norm):
        return None
    kind = Kind.NORM if pair.role.is_norm else Kind.BIASES
    titles = _Titles.of(pair)
    expected, actual = pair.expected, pair.actual

    def finding(description: str, edit: Edit | None = None) -> WeightFinding:
        return pair.finding(kind, f"{titles.prefix}{description}", edit)

    if not actual.any():
        return finding(f"{titles.vector} are {titles.missing}")
    if not expected.any():
        return finding(f"{titles.vector} that the original lacks", Clear())
    if titles.noun == "gains":
        if same_numbers(expected, actual + 1):
            return finding("gains are read as stored, but are differences from 1", Offset(1.0))
        if same_numbers(expected, actual - 1):
            return finding(
                "1 was added to gains that are not stored as differences from 1", Offset(-1.0)
            )
        if np.ptp(actual) == 0:
            return finding(f"gains were not converted (all are {actual[0]:g})")
    order = order_of_entries(expected, actual)
    if order is None:
        return finding(f"other {titles.vector}")
    for step in _reorders_of(pair):
        if np.array_equal(step.rows, order):
            description = f"{titles.noun} were not reordered along with {titles.rows}"
            return finding(description, Permute(0, step.order))
    name = name_permutation(order, pair.sizes)
    if name is None:
        return finding(f"other {titles.vector}")
    return finding(f"{titles.vector}: {name.description}", name.edit)


def _reorders_of(pair: WeightPair) -> tuple[Reorder, ...]:
    """Return the reorderings of rows that apply to a vector of all heads, or of one head."""
    width = pair.sizes.width
    if pair.heads:
        return reorders(pair.heads, width, pair.sizes.rotated)
    return reorders(1, width, width) if len(pair.actual) == width else ()


def order_of_entries(expected: np.ndarray, actual: np.ndarray) -> np.ndarray | None:
    """Return the only order of a vector's entries that makes the expected vector; else None.

    Examples
    --------
    >>> order_of_entries(np.array([1.0, 2.0, 3.0]), np.array([3.0, 1.0, 2.0]))
    array([1, 2, 0])
    """
    of_expected, of_actual = np.argsort(expected), np.argsort(actual)
    are_distinct = len(np.unique(expected)) == len(expected)
    if not are_distinct or not same_numbers(expected[of_expected], actual[of_actual]):
        return None
    order = np.empty_like(of_expected)
    order[of_expected] = of_actual
    # Near entries exchange their ranks by noise alone, which an order does not explain.
    noise = np.linalg.norm(actual[order] - expected)
    is_moved = noise <= UNEXPLAINED_BY_ORDER * np.linalg.norm(actual - expected)
    return order if is_moved and same_numbers(expected, actual[order]) else None
