"""Norms that are folded into projections of a layer other than queries and keys.

Smoothing (AWQ, SmoothQuant) divides the gain of a norm by a factor of each channel, and multiplies
the columns of all weights that read the norm. The forms of attention contain the gain. Gates of
queries, and projections of linear attention, are compared as they are stored. Therefore the
reference is read with the candidate's gains, and with columns rescaled for these gains.

Axes: n outputs, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wqk._console import counted, few
from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.checkpoint import View
from wqk.families.naming import without_numbers
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.circuits import CIRCUITS, form_parts, sides_of
from wqk.sameness.comparisons import Cause
from wqk.sameness.edits import Take
from wqk.sameness.matching import same_numbers
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Change
from wqk.sameness.tensor_comparisons import ATTENTION, MIXER
from wqk.sameness.tensor_names import layer_prefix, title_in_block
from wqk.sameness.tensor_roles import parts_outside_forms, roles

# Projections that write to the stream, whose inputs are not the norm's outputs.
WRITES = re.compile(r"(?:^|[._])(?:o|out|output|c|dense|wo)(?:_?proj)?\.weight$")


@dataclass(frozen=True, eq=False)
class Fold:
    """A norm with another gain in the candidate; names are the reference's.

    Attributes
    ----------
    gain
        The gain of the norm.
    factors
        Factors of the columns that read the norm, (D,).
    readers
        Weights that read the norm.
    stale
        Readers without rescaled columns in the candidate.
    """

    gain: str
    factors: np.ndarray
    readers: tuple[str, ...]
    stale: tuple[str, ...]


class FoldedMixers(View):
    """The reference with the candidate's gains, and with columns rescaled for these gains.

    Attributes
    ----------
    folds
        The norms with other gains.
    """

    def __init__(
        self,
        reference: Checkpoint,
        candidate: Checkpoint,
        names: Mapping[str, str],
        folds: Sequence[Fold],
    ) -> None:
        super().__init__(reference)
        self._candidate, self._names = candidate, names
        self.folds = folds
        self._factors: dict[str, np.ndarray] = {}
        for fold in folds:
            self._factors |= dict.fromkeys(fold.readers, fold.factors)
        self._gains = {fold.gain for fold in folds}
        self.changed = {*self._factors, *self._gains}

    def value(self, name: str) -> np.ndarray | None:
        """Return the candidate's gain, or a weight with its columns rescaled."""
        if name in self._gains:
            return self._candidate.read([Part(self._names[name])])[0]
        if name in self._factors:
            (weight,) = self.inner.read([Part(name)])
            return np.asarray(weight * self._factors[name], weight.dtype)
        return None


def with_folded_mixers(
    models: Sequence[Model], names: Mapping[str, str]
) -> tuple[Model | None, list[str]]:
    """Return the reference as `FoldedMixers`, and a note; None if no norm has another gain."""
    reference, candidate = (model.checkpoint for model in models)
    folds = [*_folds(models, names)]
    if not folds:
        return None, []
    view = FoldedMixers(reference, candidate, names, folds)
    gains = few([fold.gain for fold in folds], 1)
    note = f"{counted(len(folds), 'norm')} whose gain is folded into what reads it: {gains}"
    return open_model(view, family=models[0].family_file), [note]


def _folds(models: Sequence[Model], names: Mapping[str, str]) -> Iterator[Fold]:
    """Yield the norms before mixers with other gains in the candidate."""
    reference, candidate = (model.checkpoint for model in models)
    offsets = _offsets(models[0])
    readers_by_layer = _readers_by_layer(models[0])
    gains_by_weight = _gains_by_weight(models[0])
    for gain in reference.tensors():
        offset = offsets.get(without_numbers(gain))
        weights_of_layer = readers_by_layer.get(layer_prefix(gain), [])
        readers = [name for name in weights_of_layer if gain in gains_by_weight.get(name, {gain})]
        if offset is None or gain not in names or not readers:
            continue
        (expected,) = reference.read([Part(gain)])
        (actual,) = candidate.read([Part(names[gain])])
        if expected.shape != actual.shape or same_numbers(expected, actual):
            continue
        divisors = actual + offset
        if not divisors.all():
            continue
        factors = (expected + offset) / divisors
        fold = _fold(models, names, gain, factors, readers)
        if fold is not None:
            yield fold


def _fold(
    models: Sequence[Model],
    names: Mapping[str, str],
    gain: str,
    factors: np.ndarray,
    readers: Sequence[str],
) -> Fold | None:
    """Return the fold of one norm; None if no reader of the norm was rescaled."""
    reference, candidate = (model.checkpoint for model in models)
    compared: list[str] = []
    stale: list[str] = []
    for name in readers:
        if name not in names or reference.info(name).shape[-1:] != factors.shape:
            continue
        (weight,) = reference.read([Part(name)])
        (actual,) = candidate.read([Part(names[name])])
        if weight.shape != actual.shape:
            continue
        compared.append(name)
        if not same_numbers(weight * factors, actual):
            stale.append(name)
    if len(stale) == len(compared):
        return None
    return Fold(gain, factors, tuple(compared), tuple(stale))


def _offsets(model: Model) -> dict[str, float]:
    """Return the offsets of the gains of norms before attention, by names without numbers."""
    offsets = {}
    for plan in model.plans:
        norm = plan.query.input_norm
        if norm is not None and norm.gain and not norm.bias:
            offsets[without_numbers(norm.gain[0].name)] = norm.offset
    return offsets


def _gains_by_weight(model: Model) -> dict[str, set[str]]:
    """Return the gains of the norms that each weight of a form reads, by name.

    Weights of cross-attention read the norm of the other stack.
    """
    gains: dict[str, set[str]] = {}
    for plan in model.plans:
        for circuit in CIRCUITS:
            for side in sides_of(plan, circuit):
                norm = side.input_norm
                if norm is None or not norm.gain:
                    continue
                for part in side.projection.roles.values():
                    gains.setdefault(part.name, set()).add(norm.gain[0].name)
    return gains


def _readers_by_layer(model: Model) -> dict[str, list[str]]:
    """Return the weights that read a norm, by layer, if some weights are not part of a form."""
    tensors = model.checkpoint.tensors()
    formed: set[str] = set()
    for plan in model.plans:
        formed.update(part.name for part in form_parts(plan))
    outside = {part.name for part in parts_outside_forms(model)}
    mixing: set[str] = set()
    for name, role in roles(model).items():
        if role in (MIXER, ATTENTION) and len(tensors[name].shape) == 2:
            mixing.add(name)
    layers = {layer_prefix(name) for name in outside | mixing}
    by_layer: dict[str, list[str]] = {}
    for name in sorted(formed | mixing):
        is_reader = len(tensors[name].shape) == 2 and not WRITES.search(name)
        if is_reader and layer_prefix(name) in layers:
            by_layer.setdefault(layer_prefix(name), []).append(name)
    return by_layer


def fold_causes(model: Model, names: Mapping[str, str]) -> list[Cause]:
    """Return the causes of weights not rescaled with the norm before them."""
    checkpoint = model.checkpoint
    while isinstance(checkpoint, View) and not isinstance(checkpoint, FoldedMixers):
        checkpoint = checkpoint.inner
    if not isinstance(checkpoint, FoldedMixers):
        return []
    tensors: dict[tuple[str, str], list[str]] = {}
    for fold in checkpoint.folds:
        for name in fold.stale:
            tensors.setdefault((title_in_block(name), title_in_block(fold.gain)), []).append(name)
    causes = []
    for (title, norm), stale in tensors.items():
        reason = f"{title}: not rescaled with the norm before it ({norm}), or in some rows alone"
        facts = {"tensors": dict.fromkeys(stale, "weight")}
        steps = (Change(tuple(names[name] for name in stale), Take()),)
        mismatch = Mismatch(Kind.GAIN_FOLDED, reason, steps, facts=facts)
        causes.append(Cause(mismatch, (), tuple(stale)))
    return causes
