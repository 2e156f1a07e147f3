"""Origins of whole tensors: the tensor of the reference with the numbers of a wrong tensor.

A sketch, a few random projections of the first row, identifies a tensor; a comparison of all
entries confirms the match. Two names of one *pattern* differ only in the numbers of layers and of
experts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wqk.checkpoints import Checkpoint, Part
from wqk.sameness.stored_tensors import compare_stored
from wqk.sameness.tensor_names import numbers_of, pattern_of
from wqk.sameness.tolerances import NEAR_SKETCH

# Numbers of the first row that a sketch is made of.
SKETCHED = 4096
# Number of random projections, which is the length of a sketch.
PROJECTIONS = 8


@dataclass(frozen=True)
class Origin:
    """A tensor of the candidate that contains another tensor of the reference.

    Attributes
    ----------
    target
        The reference's name of the tensor that the candidate should hold.
    source
        The reference's name of the tensor that the candidate contains instead.
    """

    target: str
    source: str

    @property
    def differing_words(self) -> tuple[str, str] | None:
        """The words that differ between two names of one layer and expert; else None.

        Examples
        --------
        >>> Origin("layers.1.mlp.gate_proj.weight", "layers.1.mlp.up_proj.weight").differing_words
        ('gate_proj', 'up_proj')
        """
        target_words, source_words = self.target.split("."), self.source.split(".")
        have_equal_numbers = numbers_of(self.target) == numbers_of(self.source)
        if len(target_words) != len(source_words) or not have_equal_numbers:
            return None
        differing_targets: list[str] = []
        differing_sources: list[str] = []
        for target_word, source_word in zip(target_words, source_words, strict=True):
            if target_word != source_word:
                differing_targets.append(target_word)
                differing_sources.append(source_word)
        return ".".join(differing_targets), ".".join(differing_sources)

    @property
    def differing_number(self) -> NumberPair | None:
        """The only number that differs between two names of one pattern; else None.

        Examples
        --------
        >>> Origin("layers.1.experts.0.w2", "layers.1.experts.3.w2").differing_number
        NumberPair(place=1, target=0, source=3)
        """
        if pattern_of(self.target) != pattern_of(self.source):
            return None
        target, source = numbers_of(self.target), numbers_of(self.source)
        places = [place for place, number in enumerate(target) if number != source[place]]
        if len(places) != 1:
            return None
        return NumberPair(places[0], target[places[0]], source[places[0]])

    @property
    def of_experts(self) -> bool:
        """True if an expert contains the tensor of another expert of its layer."""
        number = self.differing_number
        return number is not None and number.place > 0 and "experts." in self.target

    @property
    def of_layers(self) -> bool:
        """True if a layer contains the tensor of another layer."""
        number = self.differing_number
        return number is not None and number.place == 0

    @property
    def group(self) -> tuple[str, ...]:
        """A key, equal for all origins with the same cause.

        Exchanged tensors of a layer are one cause for each pair of words, exchanged experts one
        cause for each layer, and exchanged layers one cause.
        """
        differing_words = self.differing_words
        if differing_words is not None:
            return ("words", *sorted(differing_words))
        if self.of_layers:
            return ("layers",)
        if self.of_experts:
            return ("experts", str(numbers_of(self.target)[0]))
        return ("names", *sorted((self.target, self.source)))


class NumberPair(NamedTuple):
    """A number that differs in the names of two tensors.

    Attributes
    ----------
    place
        The index among all numbers of a name: 0 for the layer.
    target, source
        The number in both names.
    """

    place: int
    target: int
    source: int


def find_origins(
    checkpoints: Sequence[Checkpoint], names: Mapping[str, str], wrong: Collection[str]
) -> dict[str, Origin]:
    """Find the origins of wrong tensors among all tensors of the reference.

    Parameters
    ----------
    checkpoints
        The reference and the candidate.
    names
        The candidate's names of the reference's tensors that the candidate has.
    wrong
        The reference's names of the wrong tensors of the candidate.

    Returns
    -------
    dict
        The origins that were found, by the reference's name of the wrong tensor.
    """
    reference, candidate = checkpoints
    targets = [name for name in wrong if name in names]
    shapes = {candidate.info(names[name]).shape for name in targets}
    # Wrong tensors come first: of several equal tensors, an exchanged one is more likely.
    ordered = [*targets, *(name for name in reference.tensors() if name not in wrong)]
    sources = [name for name in ordered if reference.info(name).shape in shapes]
    if not (targets and sources):
        return {}
    sketches_of_sources = np.stack([_sketch(reference, name) for name in sources])
    origins: dict[str, Origin] = {}
    for name in targets:
        sketch = _sketch(candidate, names[name])
        for number in _nearest_first(sketch, sketches_of_sources):
            source = sources[number]
            if source != name and _holds(checkpoints, source, names[name]):
                origins[name] = Origin(name, source)
                break
    return origins


def _nearest_first(sketch: np.ndarray, others: np.ndarray) -> list[int]:
    """Return the numbers of the sketches (m, S) that are near a sketch (S,), nearest first.

    The result is empty for a sketch of zeros, the sketch of a constant tensor.
    """
    if not sketch.any():
        return []
    distances = np.abs(others - sketch).max(axis=1)
    near = np.flatnonzero(distances < NEAR_SKETCH * np.abs(sketch).max())
    by_distance = near[np.argsort(distances[near], kind="stable")]
    return list(by_distance.tolist())


def _sketch(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """Return random projections of a tensor's first row, (S,); zeros if the row is constant."""
    has_rows = len(checkpoint.info(name).shape) > 1
    part = Part(name, ((0, 1),)) if has_rows else Part(name)
    (first_row,) = checkpoint.read([part])
    values = first_row.ravel()[:SKETCHED].astype(np.float64)
    if values.size < 2 or not np.ptp(values):
        return np.zeros(PROJECTIONS)
    # Rows of one length have the same directions.
    random = np.random.default_rng(values.size)
    directions = random.standard_normal((PROJECTIONS, values.size))
    return np.asarray(directions @ values / np.sqrt(values.size))


def _holds(checkpoints: Sequence[Checkpoint], source: str, stored: str) -> bool:
    """Return whether a tensor of the candidate contains the numbers of a reference's tensor."""
    infos = checkpoints[0].info(source), checkpoints[1].info(stored)
    if infos[0].shape != infos[1].shape:
        return False
    return compare_stored(checkpoints, (Part(source), Part(stored))).outcome.same
