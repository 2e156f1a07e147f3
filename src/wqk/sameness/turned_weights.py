"""Weights that are stored transposed, so that no plan fits them: seen as the reference has them.

A family's plan needs the shapes of queries and keys that the family has. A candidate whose
attention weights are stored the other way, as a ``Conv1D`` instead of a ``Linear``, has no plan.
Such a candidate is opened through `TurnedWeights`, and the transposed weights are a cause.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from wqk.checkpoints import Checkpoint, Part, TensorInfo, open_checkpoint
from wqk.checkpoints.checkpoint import View
from wqk.errors import CheckpointError, UnknownFamily
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.answer import Cause
from wqk.sameness.contents import paired_names
from wqk.sameness.edits import Transpose
from wqk.sameness.matching import same_numbers
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Change


class TurnedWeights(View):
    """A checkpoint some of whose matrices are seen with rows and columns exchanged."""

    def __init__(self, inner: Checkpoint, names: Collection[str]) -> None:
        super().__init__(inner)
        self.changed = self.names = frozenset(names)
        self._infos = {
            name: info._replace(shape=info.shape[::-1]) if name in self.names else info
            for name, info in inner.tensors().items()
        }

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name."""
        return self._infos

    def value(self, name: str) -> np.ndarray | None:
        """The transposed matrix."""
        if name not in self.names:
            return None
        return np.ascontiguousarray(self.inner.read([Part(name)])[0].T)


def opened_turned(reference: Model, opening: Mapping[str, Any]) -> Model | None:
    """Open a candidate whose weights are stored transposed; None if they are not.

    Parameters
    ----------
    reference
        The reference, whose weights the candidate should hold.
    opening
        The arguments of `wqk.open` for the candidate.
    """
    options = dict(opening)
    family = options.pop("family")
    try:
        checkpoint = open_checkpoint(options.pop("ref"), **options)
        names = _turned_names(reference.checkpoint, checkpoint)
        return open_model(TurnedWeights(checkpoint, names), family=family) if names else None
    except (CheckpointError, UnknownFamily):
        return None


def _turned_names(reference: Checkpoint, candidate: Checkpoint) -> dict[str, str]:
    """Return the candidate's transposed matrices, each with the reference's name of it."""
    expected, stored = reference.tensors(), candidate.tensors()
    turned = {}
    for name, other in paired_names(expected, stored).items():
        shapes = expected[name].shape, stored[other].shape
        if len(shapes[0]) == 2 and shapes[0] == shapes[1][::-1] != shapes[1]:
            (row,) = reference.read([Part(name, ((0, 1),))])
            (whole,) = candidate.read([Part(other)])
            if same_numbers(row[0], whole[:, 0]):
                turned[other] = name
    return turned


def turned_causes(models: Sequence[Model]) -> list[Cause]:
    """Return the cause of a candidate's transposed weights, if it has such weights."""
    checkpoint = models[1].checkpoint
    if not isinstance(checkpoint, TurnedWeights):
        return []
    stored = tuple(sorted(checkpoint.names))
    expected = models[0].checkpoint.tensors()
    back = {other: name for name, other in paired_names(expected, checkpoint.tensors()).items()}
    names = tuple(back[name] for name in stored)
    modules = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in names)
    reason = f"{', '.join(modules)}: {Kind.TRANSPOSED}"
    facts = {"tensors": dict.fromkeys(names, "weight")}
    steps = (Change(stored, Transpose()),)
    return [Cause(Mismatch(Kind.TRANSPOSED, reason, steps, facts=facts), (), names)]
