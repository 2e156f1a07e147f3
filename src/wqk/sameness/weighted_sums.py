"""A candidate that was merged from several models: the weights of the models, and their sum.

The weights w of B = Σ wᵢ Aᵢ are fitted to sampled rows of each tensor. The columns of the fit are
the first parent and the differences of the other parents from the first, which are small if all
parents were trained from one model. The weights that explain the most tensors are the weights of
the merge. If these explain less than half of all tensors, each tensor has its own weights, as in
merges with a gradient over layers. Otherwise a tensor with other weights differs from the sum, and
the weights are the cause.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from wqk._console import display_name, few, last_part
from wqk.attention.rounding import rounding_in
from wqk.checkpoints import Checkpoint, Part, TensorInfo, open_checkpoint
from wqk.checkpoints.checkpoint import View
from wqk.checkpoints.files import PLAIN
from wqk.errors import CheckpointError
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.circuits import PlanPair, form_parts
from wqk.sameness.comparisons import BlockComparison, Cause
from wqk.sameness.edits import Take
from wqk.sameness.matching import evenly_spaced
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.places_in_words import layers_in_words
from wqk.sameness.repairs import Change
from wqk.sameness.tensor_comparisons import TensorComparison
from wqk.sameness.tensor_names import numbers_of, paired_names, title_in_layer
from wqk.sameness.tolerances import DECIMALS, DEVIATIONS, LEAST_PART, SAFETY, SMALLEST
from wqk.sameness.verdicts import Verdict

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


@dataclass(frozen=True)
class OtherSum:
    """Tensors of the candidate that are another weighted sum of the parents than most tensors.

    Attributes
    ----------
    reason
        The two sums, in words.
    stored
        The candidate's names of the tensors, by the reference's names.
    """

    reason: str
    stored: Mapping[str, str]

    def mismatch(self, names: Collection[str]) -> Mismatch:
        """Return the cause of some of the tensors, with the steps that take the common sum."""
        steps = (Change(tuple(self.stored[name] for name in names), Take()),)
        facts = {"tensors": dict.fromkeys(names, "weight")}
        return Mismatch(Kind.SUM, self.reason, steps, facts=facts)


class FittedSum(NamedTuple):
    """The reference as a weighted sum of models.

    Attributes
    ----------
    model
        The sum; the first parent if no weighted sum explains the candidate.
    notes
        Notes on the weights, and on tensors that are not summed.
    other_sums
        Tensors that are other sums.
    unexplained
        The names of tensors that are no sum.
    weights
        The weight of each parent, by name; the smallest and the largest if tensors differ.
    """

    model: Model
    notes: list[str]
    other_sums: tuple[OtherSum, ...] = ()
    unexplained: frozenset[str] = frozenset()
    weights: Mapping[str, float | tuple[float, float]] = {}


def with_parents(
    reference: Model, candidate: Model, parents: Sequence[Any], **hub: Any
) -> FittedSum:
    """Return the weighted sum of the reference and further parents, fitted to the candidate.

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
        return FittedSum(
            reference, ["no weighted sum of the parents explains a tensor of the candidate"]
        )
    weights: dict[str, np.ndarray] = {}
    for name, coefficients in sums.coefficients.items():
        weights[name] = _of_parents(coefficients)
    names_in_parents = {name: stored_names[:-1] for name, stored_names in stored.items()}
    merged = WeightedSum(checkpoints, names_in_parents, weights)
    merged.name = " + ".join(checkpoint.name for checkpoint in checkpoints)
    names = _short_names(checkpoints)
    weights_of_tensors = np.stack([*weights.values()])
    notes = [*_notes(names, weights_of_tensors)]
    paired = paired_names(reference.checkpoint.tensors(), candidate.checkpoint.tensors())
    not_summed = [name for name in paired if name not in stored]
    if not_summed:
        notes.append(_not_summed(not_summed, names[0], len(paired)))
    stored_by_sum: dict[str, dict[str, str]] = {}
    for name, coefficients in sums.exceptions.items():
        text = _sum_in_words(names, _of_parents(coefficients)[None])
        stored_by_sum.setdefault(text, {})[name] = stored[name][-1]
    expected = _sum_in_words(names, weights_of_tensors)
    other_sums = [
        OtherSum(f"{text} instead of {expected}", stored_of_sum)
        for text, stored_of_sum in stored_by_sum.items()
    ]
    return FittedSum(
        model=open_model(merged, family=reference.family_file),
        notes=notes,
        other_sums=tuple(other_sums),
        unexplained=sums.unexplained,
        weights=_weights_by_parent(names, weights_of_tensors),
    )


def with_other_sums(
    fitted: FittedSum,
    pairs: Sequence[PlanPair],
    blocks: Sequence[BlockComparison],
    tensors: Sequence[TensorComparison],
) -> tuple[list[BlockComparison], list[Cause]]:
    """Add the causes of differing blocks and tensors that are other sums of the parents.

    The result contains the blocks with causes, and the causes of tensors outside the forms. The
    other sum is the only cause of a block without unexplained tensors.
    """
    explained = []
    for (plan, _), block in zip(pairs, blocks, strict=True):
        if block.verdict is not Verdict.DIFFERENT:
            explained.append(block)
            continue
        names = dict.fromkeys(part.name for part in form_parts(plan))
        mismatches: list[Mismatch] = []
        for other in fitted.other_sums:
            names_of_sum = [name for name in names if name in other.stored]
            if names_of_sum:
                mismatches.append(other.mismatch(names_of_sum))
        if mismatches and not fitted.unexplained.isdisjoint(names):
            mismatches += block.mismatches
        explained.append(replace(block, mismatches=tuple(mismatches) or block.mismatches))
    causes = []
    differing = {tensor.name for tensor in tensors if tensor.outcome.differs}
    for other in fitted.other_sums:
        names_outside = tuple(name for name in other.stored if name in differing)
        if names_outside:
            causes.append(Cause(other.mismatch(names_outside), (), names_outside))
    return explained, causes


def _short_names(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Return the last parts of the names of models; whole names if last parts are equal."""
    names = [display_name(checkpoint.name) for checkpoint in checkpoints]
    short = [last_part(name) for name in names]
    return short if len({*short}) == len(short) else names


def _not_summed(names: Sequence[str], first_parent: str, count: int) -> str:
    """Return a note on tensors that only the first parent supplies.

    Examples
    --------
    >>> note = _not_summed(["layers.0.mlp.up.weight", "layers.1.mlp.up.weight"], "a", 30)
    >>> print(note.partition(",")[0], "…", note.partition(";")[2])
    not summed: 2 of 30 tensors (up …  compared with a alone
    """
    titles = few([*dict.fromkeys(map(title_in_layer, names))], 6)
    layers = {numbers[0] for numbers in map(numbers_of, names) if numbers}
    where = f", {layers_in_words(layers)}" if layers else ""
    return (
        f"not summed: {len(names)} of {count} tensors ({titles}{where}), which not all models have "
        f"in one shape as plain numbers; compared with {first_parent} alone"
    )


class _Sums(NamedTuple):
    """Coefficients of all tensors, and coefficients of tensors that differ from the common sum.

    ``unexplained`` contains the names of the tensors that are no sum.
    """

    coefficients: dict[str, np.ndarray]
    exceptions: dict[str, np.ndarray]
    unexplained: frozenset[str] = frozenset()


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
    unexplained: set[str] = set()
    for name, fit in fits.items():
        if name in exceptions or fit.is_explained_by(common):
            continue
        # The parents' gains are often multiples of each other, so that their weights are not
        # determined; the weights of other tensors may explain them.
        fitting = [weights for weights in exceptions.values() if fit.is_explained_by(weights)]
        if fitting:
            exceptions[name] = fitting[0]
        else:
            unexplained.add(name)
    return _Sums(shared, exceptions, frozenset(unexplained))


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
    '0.600 · a + (0.200 to 0.400) · b'
    >>> _sum_in_words(["a", "b"], np.array([[0.0, 1.0]]))
    'b alone'
    """
    parts = np.flatnonzero(np.abs(weights).max(axis=0) >= LEAST_PART)
    if len(parts) == 1 and np.abs(weights[:, parts] - 1).max() < LEAST_PART:
        return f"{names[parts[0]]} alone"
    texts = []
    for name, values in zip(names, weights.T, strict=True):
        low, high = float(values.min()), float(values.max())
        text = _weight_in_words(low)
        if high - low >= LEAST_PART:
            text = f"({text} to {_weight_in_words(high)})"
        texts.append(f"{text} · {name}")
    return " + ".join(texts)


def _weight_in_words(weight: float) -> str:
    """Return a weight with three significant digits; 0 for a parent without a part."""
    return f"{weight:#.3g}" if abs(weight) >= LEAST_PART else "0"


def _weights_by_parent(
    names: Sequence[str], weights: np.ndarray
) -> dict[str, float | tuple[float, float]]:
    """Return the weight of each parent; the smallest and the largest if tensors differ."""
    by_parent: dict[str, float | tuple[float, float]] = {}
    for name, values in zip(names, weights.T, strict=True):
        low, high = float(values.min()), float(values.max())
        by_parent[name] = low if low == high else (low, high)
    return by_parent
