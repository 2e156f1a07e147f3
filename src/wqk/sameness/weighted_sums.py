"""A candidate that was merged from several models: the weights of the models, and their sum.

The weights w of B = Σ wᵢ Aᵢ are fitted to sampled rows of each tensor. The columns of the fit are
the first parent and the differences of the other parents from the first, which are small if all
parents were trained from one model. The weights that explain the most tensors are the weights of
the merge. If these explain less than half of all tensors, each tensor has its own weights, as in
merges with a gradient over layers. Otherwise a tensor with other weights differs from the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wqk.attention.rounding import rounding_in
from wqk.checkpoints import Checkpoint, Part, TensorInfo, open_checkpoint
from wqk.checkpoints.checkpoint import View
from wqk.checkpoints.files import PLAIN
from wqk.errors import CheckpointError
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.matching import evenly_spaced
from wqk.sameness.tensor_names import paired_names
from wqk.sameness.tolerances import DECIMALS, DEVIATIONS, LEAST_PART, SAFETY, SMALLEST

# Rows of a tensor to which weights are fitted.
SAMPLED_ROWS = 64


@dataclass(frozen=True, eq=False)
class NormalEquations:
    """Sums of products of one tensor's entries, which determine the weights of the fit.

    Attributes
    ----------
    gram
        Products of the columns with each other, (K, K).
    products
        Products of the columns with the candidate, (K,).
    square
        Square of the candidate's norm.
    rounding
        Square of the norm that rounding explains.
    count
        Number of entries.
    """

    gram: np.ndarray
    products: np.ndarray
    square: float
    rounding: float
    count: int

    def __add__(self, other: NormalEquations) -> NormalEquations:
        return NormalEquations(
            self.gram + other.gram,
            self.products + other.products,
            self.square + other.square,
            self.rounding + other.rounding,
            self.count + other.count,
        )

    @property
    def coefficients(self) -> np.ndarray | None:
        """Coefficients of the columns, (K,); None if columns are dependent or contain NaN.

        A coefficient is rounded to few decimals if chance explains the difference.
        """
        sizes = np.sqrt(np.diag(self.gram))
        if not (sizes.all() and np.isfinite(sizes).all()):
            return None
        scaled = self.gram / np.outer(sizes, sizes)
        if np.linalg.cond(scaled) > 1 / np.finfo(np.float32).eps:
            return None
        inverse = np.linalg.inv(scaled) / np.outer(sizes, sizes)
        fitted = inverse @ self.products
        noise = self.residual(fitted) / max(1, self.count - len(fitted))
        deviations = np.sqrt(noise * np.diag(inverse))
        rounded = fitted.round(DECIMALS)
        is_near = np.abs(rounded - fitted) <= np.maximum(DEVIATIONS * deviations, SMALLEST)
        return np.asarray(np.where(is_near, rounded, fitted) + 0.0)  # no negative zeros

    def residual(self, coefficients: np.ndarray) -> float:
        """Return the square of the norm of the residual of coefficients."""
        explained = 2 * coefficients @ self.products - coefficients @ self.gram @ coefficients
        return max(0.0, self.square - float(explained))

    def is_explained_by(self, coefficients: np.ndarray) -> bool:
        """Return whether rounding explains the residual of coefficients."""
        return self.residual(coefficients) <= SAFETY**2 * self.rounding


class WeightedSum(View):
    """A checkpoint of tensors that are weighted sums of tensors of several models.

    Parameters
    ----------
    parents
        The models; the first model supplies everything except tensors.
    stored
        Names of each tensor in all parents, by the name in the first parent.
    weights
        Weights of the parents for each tensor, (parents,).
    """

    def __init__(
        self,
        parents: Sequence[Checkpoint],
        stored: Mapping[str, Sequence[str]],
        weights: Mapping[str, np.ndarray],
    ) -> None:
        super().__init__(parents[0])
        self._parents, self._stored, self._weights = parents, stored, weights
        self.changed = frozenset(weights)

    def value(self, name: str) -> np.ndarray | None:
        """Return the weighted sum of a tensor."""
        if name not in self._weights:
            return None
        total: Any = 0.0
        rows = zip(self._parents, self._stored[name], self._weights[name], strict=True)
        for parent, stored, weight in rows:
            total = total + weight * parent.read([Part(stored)])[0].astype(np.float64)
        return np.asarray(total, np.float32)


def with_parents(
    reference: Model, candidate: Model, parents: Sequence[Any], **hub: Any
) -> tuple[Model, list[str]]:
    """Return the weighted sum of the reference and further parents, and notes on the weights.

    Parameters
    ----------
    reference, candidate
        The first parent, and the merged model.
    parents
        The other parents: models, or references for `wqk.open_checkpoint`.

    Raises
    ------
    CheckpointError
        No tensor is in all models, or the parents are linearly dependent.
    """
    checkpoints = [reference.checkpoint]
    for parent in parents:
        if isinstance(parent, Model):
            parent = parent.checkpoint
        if not isinstance(parent, Checkpoint):
            parent = open_checkpoint(parent, **hub)
        checkpoints.append(parent)
    stored = _stored_names(checkpoints, candidate.checkpoint)
    fits: dict[str, NormalEquations] = {}
    for name, stored_names in stored.items():
        fits[name] = _fit(checkpoints, candidate.checkpoint, stored_names)
    if not fits:
        raise CheckpointError("merged_with: no tensor has one name and one shape in all models")
    sums = _sums(fits)
    if sums is None:
        return reference, ["no weighted sum of the parents explains a tensor of the candidate"]
    names = [checkpoint.name for checkpoint in checkpoints]
    weights: dict[str, np.ndarray] = {}
    for name, coefficients in sums.coefficients.items():
        weights[name] = _of_parents(coefficients)
    names_in_parents = {name: stored_names[:-1] for name, stored_names in stored.items()}
    merged = WeightedSum(checkpoints, names_in_parents, weights)
    merged.name = " + ".join(names)
    weights_of_tensors = np.stack([*weights.values()])
    notes = [*_notes(names, weights_of_tensors)]
    for tensor, coefficients in sums.exceptions.items():
        text = _sum_in_words(names, _of_parents(coefficients)[None])
        notes.append(f"{tensor} is {text} instead")
    return open_model(merged, family=reference.family_file), notes


class _Sums(NamedTuple):
    """Coefficients of all tensors, and coefficients of tensors that differ from the common sum."""

    coefficients: dict[str, np.ndarray]
    exceptions: dict[str, np.ndarray]


def _sums(fits: Mapping[str, NormalEquations]) -> _Sums | None:
    """Return the coefficients of each tensor; None if no tensor is a weighted sum.

    Raises
    ------
    CheckpointError
        The parents are linearly dependent.
    """
    determined: dict[str, np.ndarray] = {}
    for name, fit in fits.items():
        coefficients = fit.coefficients
        if coefficients is not None:
            determined[name] = coefficients
    if not determined:
        raise CheckpointError(
            "merged_with: the parents are equal, or sums of each other, so that weights are not "
            "determined; expected models that differ"
        )
    explaining: dict[str, np.ndarray] = {}
    for name, coefficients in determined.items():
        if fits[name].is_explained_by(coefficients):
            explaining[name] = coefficients
    if not explaining:
        return None
    common = _common_coefficients([fits[name] for name in explaining], [*explaining.values()])
    exceptions: dict[str, np.ndarray] = {}
    for name, coefficients in explaining.items():
        if not fits[name].is_explained_by(common):
            exceptions[name] = coefficients
    shared = dict.fromkeys(fits, common)
    if len(exceptions) > len(explaining) / 2:
        return _Sums(shared | exceptions, {})
    return _Sums(shared, exceptions)


def _common_coefficients(
    fits: Sequence[NormalEquations], candidates: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the coefficients that explain the most tensors, from a fit to all of these."""

    def count_of_explained(coefficients: np.ndarray) -> int:
        return sum(fit.is_explained_by(coefficients) for fit in fits)

    best = max(candidates, key=count_of_explained)
    total: NormalEquations | None = None
    for fit in fits:
        if fit.is_explained_by(best):
            total = fit if total is None else total + fit
    refined = None if total is None else total.coefficients
    return best if refined is None else refined


def _of_parents(weights: np.ndarray) -> np.ndarray:
    """Return the weights of parents from the coefficients of the fit."""
    return np.array([weights[0] - weights[1:].sum(), *weights[1:]])


def _stored_names(
    checkpoints: Sequence[Checkpoint], candidate: Checkpoint
) -> dict[str, tuple[str, ...]]:
    """Return the names of each tensor in all parents and the candidate, if all have one shape."""
    models = [*checkpoints, candidate]
    tensors = [checkpoint.tensors() for checkpoint in models]
    pairings = [paired_names(tensors[0], tensors_of_model) for tensors_of_model in tensors]
    stored = {}
    for name in tensors[0]:
        if any(name not in pairing for pairing in pairings):
            continue
        names = tuple(pairing[name] for pairing in pairings)
        infos: list[TensorInfo] = []
        for infos_of_model, stored_name in zip(tensors, names, strict=True):
            infos.append(infos_of_model[stored_name])
        is_plain = all(info.dtype in PLAIN for info in infos)
        has_one_shape = len({info.shape for info in infos}) == 1
        if is_plain and has_one_shape and np.prod(infos[0].shape):
            stored[name] = names
    return stored


def _fit(
    parents: Sequence[Checkpoint], candidate: Checkpoint, names: Sequence[str]
) -> NormalEquations:
    """Return the sums of products of some rows of one tensor."""
    rows = _sampled_rows(candidate.info(names[-1]).shape)
    models = [*parents, candidate]
    arrays = [
        checkpoint.read([Part(name, rows)])[0].astype(np.float64).ravel()
        for checkpoint, name in zip(models, names, strict=True)
    ]
    first, actual = arrays[0], arrays[-1]
    columns = np.stack([first, *(array - first for array in arrays[1:-1])])
    infos = [checkpoint.info(name) for checkpoint, name in zip(models, names, strict=True)]
    rounding = max(rounding_in(info, actual) for info in infos)
    square = float(actual @ actual)
    gram, products = columns @ columns.T, columns @ actual
    return NormalEquations(gram, products, square, rounding**2 * square, actual.size)


def _sampled_rows(shape: tuple[int, ...]) -> tuple[tuple[int, int], ...] | None:
    """Return rows at equal distances, as half-open ranges; None for all rows."""
    if len(shape) < 2 or shape[0] <= SAMPLED_ROWS:
        return None
    rows = evenly_spaced(shape[0], SAMPLED_ROWS)
    return tuple((row, row + 1) for row in rows.tolist())


def _notes(names: Sequence[str], weights: np.ndarray) -> Iterator[str]:
    """Yield the weights (tensors, parents) of each parent, and the parents with zero weight."""
    for name, values in zip(names, weights.T, strict=True):
        if np.abs(values).max() < LEAST_PART:
            yield f"{name} has no part in the candidate"
    yield f"compared with the weighted sum {_sum_in_words(names, weights)}"


def _sum_in_words(names: Sequence[str], weights: np.ndarray) -> str:
    """Describe the weights (tensors, parents) of several parents as a sum.

    Examples
    --------
    >>> _sum_in_words(["a", "b"], np.array([[0.6, 0.2], [0.6, 0.4]]))
    '0.6 · a + (0.2 to 0.4) · b'
    """
    texts = []
    for name, values in zip(names, weights.T, strict=True):
        low, high = float(values.min()), float(values.max())
        text = f"{low:.4g}" if high - low < LEAST_PART else f"({low:.4g} to {high:.4g})"
        texts.append(f"{text} · {name}")
    return " + ".join(texts)
