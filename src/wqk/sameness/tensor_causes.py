"""Causes of wrong tensors outside attention: exchanged, reordered, copied, transposed, resized.

Whole tensors are recognized first (`wqk.sameness.origins`), then single tensors are searched for an
edit, then the rows of several tensors of one module are searched for together. Equal findings in
several layers are one cause.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np

from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.adapters import module_of
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan, Place
from wqk.families.model_types import default_values
from wqk.model import Model
from wqk.sameness.comparisons import BlockComparison, Cause
from wqk.sameness.contents import Outcome, TensorComparison, compare_stored
from wqk.sameness.edits import (
    Edit,
    FirstRows,
    Listed,
    Logarithm,
    Offset,
    Order,
    Permute,
    Scale,
    Take,
    Transpose,
)
from wqk.sameness.execution import Arrays, run
from wqk.sameness.finders import order_of_entries
from wqk.sameness.layers import alone_prefixes, moved_prefixes, with_tensors_of_layers
from wqk.sameness.matching import permutation, same_numbers
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.origins import Origin, find_origins
from wqk.sameness.permutations import Sizes, name_permutation
from wqk.sameness.quantization import BEYOND, RESCALED
from wqk.sameness.repairs import Change, Exchange, Recut, Setting, Step, merged, program
from wqk.sameness.tensor_roles import layer_of
from wqk.sameness.tolerances import ALIKE, LEAST_OFFSET, LEFT, SAME_FACTOR, TINY, WHOLE
from wqk.sameness.verdicts import Verdict
from wqk.sameness.weight_pairs import short
from wqk.sameness.weights import Pair

# Tensors with more numbers are not searched for orders of rows and columns.
LARGEST = 1 << 28
# Entries whose median difference is a constant that may have been added.
SAMPLED = 1 << 16
# Experts and layers that are listed, and tensors of a module whose rows are searched together.
LISTED, TOGETHER = 16, 4
# Numbers by which orders of rows are named: rows of feed-forward networks make no heads.
SIZES = Sizes(2, 2, 1)
# Heads over the vocabulary, which lie outside of layers.
HEAD = re.compile(r"^(?:[a-z_]+\.)*(?:lm_head|embed_out|output)\.weight$")
# Words for the two projections before the product of a gated feed-forward network.
GATES, UPS = ("gate_proj", "ffn_gate", "w1"), ("up_proj", "ffn_up", "w3")


@dataclass(frozen=True)
class _Finding:
    """One change of some tensors, by the reference's names, before equal ones are joined."""

    kind: Kind
    reason: str
    tensors: tuple[str, ...]
    steps: tuple[Step, ...] = field(default=(), hash=False)


def with_tensor_causes(
    models: Sequence[Model],
    pairs: Sequence[Pair],
    blocks: Sequence[BlockComparison],
    tensors: Sequence[TensorComparison],
    names: Mapping[str, str],
    known: Sequence[Cause] = (),
    alone: Sequence[Place] = (),
) -> tuple[list[BlockComparison], tuple[TensorComparison, ...], tuple[Cause, ...]]:
    """Find the causes of tensors outside the forms that are not as expected.

    Parameters
    ----------
    models
        The reference and the candidate.
    pairs, blocks
        Their blocks, and how these differ.
    tensors
        The tensors that were compared.
    names
        The candidate's name of each of the reference's tensors that it has.
    known
        Causes of tensors that are known already, such as an adapter that was not merged.
    alone
        The blocks that only one of the two models has.

    Returns
    -------
    blocks
        The blocks; where the gain of a norm has changed places with one outside, that is the cause.
    tensors
        The tensors; with the cause for a reason.
    causes
        The causes that concern no block.
    """
    # Tensors of quantized files are also paired by their first rows, whatever their names.
    paired = {one.name: one.other for one in tensors if one.name and one.other}
    names = {**names, **paired}
    search = _Search([model.checkpoint for model in models], names)
    tensors = [*_under_their_names(models, tensors, names)]
    explained = {name for cause in known for name in cause.tensors}
    layers = moved_prefixes(pairs, blocks)
    apart = tuple(alone_prefixes(pairs, alone))
    moved = set(search.moved_with(layers))
    explained |= moved
    wrong = [
        one.name
        for one in tensors
        if one.outcome is Outcome.DIFFERS and one.other and one.name not in explained
    ]
    norms = {
        name
        for pair, block in zip(pairs, blocks, strict=True)
        if block.verdict is Verdict.DIFFERENT
        for name in _norms(pair[0], names)
        if name not in moved
    }
    findings = [*_known_from_numbers(tensors)]
    wrong = _without(wrong, findings)
    findings += search.moved([*wrong, *filter(search.differs, sorted(norms))])
    left = _without(wrong, findings)
    findings += filter(None, map(search.edited, filter(search.has_shape, left)))
    findings += search.recut(filter(search.has_shape, _without(left, findings)))
    reshaped = [name for name in left if not search.has_shape(name)]
    findings += filter(None, map(search.resized, reshaped))
    findings += _exchanged_gates(tensors)
    findings += _untied_heads(models[1], tensors)
    if _are_of_one_type(models):
        lost = [one.name for one in tensors if one.outcome is Outcome.MISSING]
        findings += search.missing(
            name for name in _without(lost, findings) if not name.startswith(apart)
        )
    causes = [*known, *_joined([search.checked(finding) for finding in findings])]
    reasons = {name: cause.mismatch.reason for cause in causes for name in cause.tensors}
    answered = [_with_reason(one, reasons) for one in tensors]
    mended = [
        _with_norms(block, {*_norms(pair[0], names)}, causes)
        for block, pair in zip(blocks, pairs, strict=True)
    ]
    beside = tuple(cause for cause in causes if norms.isdisjoint(cause.tensors))
    if layers:
        lost = [one.name or one.other for one in tensors if not (one.name and one.other)]
        moved.update(name for name in lost if name.startswith(apart))
        mended = with_tensors_of_layers(mended, sorted(moved))
    return mended, tuple(answered), beside


def _with_reason(one: TensorComparison, reasons: Mapping[str, str]) -> TensorComparison:
    """Return the record of a tensor, with the cause for a reason where it is known."""
    reason = reasons.get(one.name or one.other)
    if reason is None or one.kind is not None:
        return one
    outcome = Outcome.DIFFERS if one.name and one.outcome is Outcome.FOUND else one.outcome
    return replace(one, outcome=outcome, reason=reason)


def _under_their_names(
    models: Sequence[Model], tensors: Sequence[TensorComparison], names: Mapping[str, str]
) -> Iterator[TensorComparison]:
    """Join the two records of a tensor that has another shape under its own name.

    A transposed tensor is found by its numbers. That is a difference if both models are of one
    type, and therefore read it in one way.
    """
    lost = {Outcome.MISSING, Outcome.ADDED}
    if _are_of_one_type(models):
        lost.add(Outcome.FOUND)
    added = {one.other for one in tensors if not one.name and one.outcome in lost}
    joined: set[str] = set()
    for one in tensors:
        stored = names.get(one.name, "") if one.name and not one.other else ""
        is_own_place = one.outcome is not Outcome.FOUND or one.reason == f"transposed, in {stored}"
        if stored in added and one.outcome in lost and is_own_place:
            joined.add(stored)
            yield replace(one, other=stored, outcome=Outcome.DIFFERS, reason="another shape")
        elif one.name or one.other not in joined:
            yield one


def _are_of_one_type(models: Sequence[Model]) -> bool:
    """Return whether both configurations name the same model type, whose tensors are the same."""
    types = [model.checkpoint.config.get("model_type") for model in models]
    return types[0] is not None and types[0] == types[1]


def _norms(plan: AttentionPlan, names: Mapping[str, str]) -> Iterator[str]:
    """Names of the norms before a block's projections."""
    for side in (plan.query, plan.key, plan.value):
        norm = side.input_norm if side is not None else None
        for part in (*norm.gain, *norm.bias) if norm is not None else ():
            if part.name in names:
                yield part.name


def _with_norms(
    block: BlockComparison, norms: set[str], causes: Sequence[Cause]
) -> BlockComparison:
    """Return a block whose wrong norms have the cause that was found for them."""
    found = [cause.mismatch for cause in causes if not norms.isdisjoint(cause.tensors)]
    if not found or block.verdict is not Verdict.DIFFERENT:
        return block
    kept = [one for one in block.mismatches if one.verdict is not Kind.NORM]
    return replace(block, mismatches=(*found, *kept))


def _without(names: Sequence[str], findings: Sequence[_Finding]) -> list[str]:
    """Return the names that no finding explains."""
    explained = {name for finding in findings for name in finding.tensors}
    return [name for name in names if name not in explained]


def _joined(findings: Sequence[_Finding]) -> list[Cause]:
    """Join findings of one kind and reason."""
    groups: dict[tuple[Kind, str], list[_Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.reason), []).append(finding)
    causes = []
    for (kind, reason), members in groups.items():
        steps = merged(step for finding in members for step in finding.steps)
        tensors = tuple(name for finding in members for name in finding.tensors)
        facts = {"tensors": dict.fromkeys(tensors, "tensor")}
        causes.append(Cause(Mismatch(kind, reason, steps, facts=facts), (), tensors))
    return causes


def _known_from_numbers(tensors: Sequence[TensorComparison]) -> Iterator[_Finding]:
    """Yield the causes that the numbers of a quantized tensor show."""
    for one in tensors:
        if one.kind is Kind.BLOCK_SCALES:
            yield _Finding(one.kind, RESCALED, (one.name,))
        elif one.kind is Kind.QUANTIZED:
            yield _Finding(one.kind, BEYOND, (one.name,))


def _exchanged_gates(tensors: Sequence[TensorComparison]) -> Iterator[_Finding]:
    """Find gates that lie under the other format's name for up projections, and the reverse."""
    for one in tensors:
        stored = one.reason.removeprefix("in ")
        if one.outcome is not Outcome.FOUND or not one.name:
            continue
        if _has_word(one.name, GATES) and _has_word(stored, UPS):
            places = [stored, stored]
            for up, gate in zip(UPS, GATES, strict=True):
                places[1] = places[1].replace(up, gate)
            step = Exchange((places[0], places[1]), (places[1], places[0]))
            reason = "gate and up projections have changed places"
            yield _Finding(Kind.TENSOR, reason, (one.name,), (step,))
        elif _has_word(one.name, UPS) and _has_word(stored, GATES):
            reason = "gate and up projections have changed places"
            yield _Finding(Kind.TENSOR, reason, (one.name,))


def _untied_heads(model: Model, tensors: Sequence[TensorComparison]) -> Iterator[_Finding]:
    """Find heads that contradict what a configuration sets on tied embeddings."""
    config = model.checkpoint.config
    default = default_values(config.get("model_type")).get("tie_word_embeddings")
    is_tied = config.get("tie_word_embeddings", default)
    for one in tensors:
        name = one.name or one.other
        if not HEAD.search(name):
            continue
        if one.outcome is Outcome.ADDED and is_tied is True:
            reason = f"{name} differs from the embeddings, but tie_word_embeddings is true"
            yield _Finding(Kind.SETTING, reason, (name,))
        elif one.outcome is Outcome.MISSING and is_tied is False:
            reason = f"{name} is missing, but tie_word_embeddings is false: the head stays random"
            yield _Finding(Kind.SETTING, reason, (name,), (Change((name,), Take()),))


def _has_word(name: str, words: Sequence[str]) -> bool:
    """Return whether a part of a tensor's name is one of some words."""
    return not {*name.split(".")}.isdisjoint(words)


def title_of(name: str) -> str:
    """Return the part of a tensor's name that layers have in common, shortened.

    Examples
    --------
    >>> title_of("model.layers.3.mlp.gate_proj.weight"), title_of("lm_head.weight")
    ('gate_proj', 'lm_head')
    """
    words = [word for word in name.split(".") if not word.isdigit()]
    if words[-1] == "weight" and len(words) > 1:
        return words[-2]
    return ".".join(words[-2:])


class _Search:
    """A search for the causes of the candidate's wrong tensors, by the reference's names."""

    def __init__(self, checkpoints: Sequence[Checkpoint], names: Mapping[str, str]) -> None:
        self._reference, self._candidate = checkpoints
        self._names = names

    def has_shape(self, name: str) -> bool:
        """Return whether a tensor has the expected shape."""
        info = self._candidate.info(self._names[name])
        return info.shape == self._reference.info(name).shape

    def differs(self, name: str) -> bool:
        """Return whether a tensor of the expected shape is not the expected one."""
        if not self.has_shape(name):
            return False
        checkpoints = self._reference, self._candidate
        return compare_stored(checkpoints, (Part(name), Part(self._names[name]))).outcome.differs

    def _both(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The expected and the actual numbers of a tensor."""
        (expected,) = self._reference.read([Part(name)])
        (actual,) = self._candidate.read([Part(self._names[name])])
        return expected, actual

    def checked(self, finding: _Finding) -> _Finding:
        """Run the printed lines of a finding; without its steps if they do not undo it.

        Exchanges of more than `LARGEST` numbers are not run: each tensor was compared with its
        source entry by entry.
        """
        stored = {name: self._names[name] for name in finding.tensors if name in self._names}
        numbers = sum(math.prod(self._candidate.info(name).shape) for name in stored.values())
        if not finding.steps or len(stored) < len(finding.tensors) or numbers > LARGEST:
            return finding
        expected = {other: self._reference.read([Part(name)])[0] for name, other in stored.items()}
        actual = {name: self._candidate.read([Part(name)])[0] for name in expected}
        tensors = Arrays(actual)
        config = copy.deepcopy(dict(self._candidate.config))
        run(program(finding.steps), tensors, Arrays(expected), config)
        mended = actual | tensors.changed
        is_undone = all(same_numbers(expected[name], mended[name]) for name in expected)
        return finding if is_undone else replace(finding, steps=())

    # -- whole tensors ---------------------------------------------------------------------

    def moved_with(self, layers: Mapping[str, str]) -> Iterator[str]:
        """Yield tensors that hold those of another layer, because the whole layer moved.

        ``layers`` are the beginnings of names of each layer and of the one that it holds.
        """
        checkpoints = self._reference, self._candidate
        stored = self._reference.tensors()
        for name, other in self._names.items():
            layer = layer_of(name)
            source = layers.get(layer, layer) + name.removeprefix(layer)
            if layer in layers and source in stored:
                parts = Part(source), Part(other)
                shapes = {stored[source].shape, self._candidate.info(other).shape}
                if len(shapes) == 1 and compare_stored(checkpoints, parts).outcome.same:
                    yield name

    def moved(self, wrong: Sequence[str]) -> Iterator[_Finding]:
        """Find tensors that hold the numbers of others."""
        checkpoints = self._reference, self._candidate
        origins = find_origins(checkpoints, self._names, dict.fromkeys(wrong))
        by_group: dict[tuple[str, ...], list[Origin]] = {}
        for origin in origins.values():
            by_group.setdefault(origin.group, []).append(origin)
        for members in by_group.values():
            yield from self._moved_together(members)

    def _moved_together(self, origins: Sequence[Origin]) -> Iterator[_Finding]:
        """Find the cause of tensors that moved in one way, and the steps that undo it."""
        sources = {origin.target: origin.source for origin in origins}
        is_permutation = {*sources.values()} == {*sources} and len({*sources.values()}) == len(
            sources
        )
        if is_permutation:
            targets = [self._names[name] for name in sources.values()]
            holders = [self._names[name] for name in sources]
            steps: tuple[Step, ...] = (Exchange(tuple(targets), tuple(holders)),)
        else:
            steps = (Change(tuple(self._names[name] for name in sources), Take()),)
        kind, reason = _reason_of(origins, is_permutation)
        yield _Finding(kind, reason, tuple(sources), steps)

    def missing(self, names: Iterable[str]) -> Iterator[_Finding]:
        """Find the name that the candidate would have for each tensor that it lacks."""
        for name in names:
            stored = self._name_of_missing(name)
            if stored is not None and stored not in self._candidate.tensors():
                steps = (Change((stored,), Take()),)
                reason = f"{title_of(name)}: {Kind.MISSING}"
                yield _Finding(Kind.MISSING, reason, (name,), steps)

    def _name_of_missing(self, name: str) -> str | None:
        """Return the candidate's name for a tensor, by its tensors of the same module."""
        module = module_of(name)
        while module:
            for neighbor, stored in self._names.items():
                rest = neighbor.removeprefix(module)
                if neighbor.startswith(f"{module}.") and stored.endswith(rest):
                    return stored.removesuffix(rest) + name.removeprefix(module)
            module = module_of(module)
        return None

    # -- single tensors --------------------------------------------------------------------

    def edited(self, name: str) -> _Finding | None:
        """Find the edit that makes a tensor the expected one."""
        if np.prod(self._reference.info(name).shape) > LARGEST:
            return None
        try:
            expected, actual = self._both(name)
        except CheckpointError:
            return None
        found = _edit_of(expected, actual)
        if found is None:
            return None
        kind, description, edit = found
        steps = (Change((self._names[name],), edit),)
        return _Finding(kind, f"{title_of(name)}: {description}", (name,), steps)

    # -- rows of several tensors -----------------------------------------------------------

    def recut(self, wrong: Iterable[str]) -> Iterator[_Finding]:
        """Find tensors of one module that were joined and cut at other rows or columns."""
        modules: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name in wrong:
            shape = self._reference.info(name).shape
            if len(shape) == 2 and np.prod(shape) <= LARGEST:
                module = module_of(module_of(name))
                modules.setdefault((module, shape[1:]), []).append(name)
        for members in modules.values():
            if 1 < len(members) <= TOGETHER:
                yield from self._recut_together(members)

    def _recut_together(self, names: Sequence[str]) -> Iterator[_Finding]:
        arrays = [self._both(name) for name in names]
        expected, actual = (np.concatenate(side) for side in zip(*arrays, strict=True))
        order = permutation(expected, actual, ALIKE)
        if order is None:
            return
        lengths = tuple(len(array) for array, _ in arrays)
        titles = [title_of(name) for name in names]
        stored = tuple(self._names[name] for name in names)
        named = name_permutation(order, SIZES)
        pieces = 1 + int((np.diff(order) != 1).sum())
        rows: Order = Listed(tuple(order.tolist()))
        if named is not None and isinstance(named.edit, Permute):
            rows = named.edit.order
        reason = (
            f"rows of {' and '.join(titles)} lie in another order: in {pieces} pieces, as if "
            "shards had been joined without being taken apart"
        )
        yield _Finding(Kind.ROWS, reason, tuple(names), (Recut(stored, lengths, rows),))

    # -- shapes ----------------------------------------------------------------------------

    def resized(self, name: str) -> _Finding | None:
        """Find the cause of a tensor that has another shape under its own name."""
        expected, actual = self._both(name)
        stored = self._names[name]
        transposed = _transposed(expected, actual)
        title = title_of(name)
        if transposed is not None:
            turn: Edit = Transpose() if transposed.ndim == 2 else Take()
            shapes = f"{actual.shape} instead of {expected.shape}"
            reason = f"{title}: stored transposed, {shapes}"
            return _Finding(Kind.TRANSPOSED, reason, (name,), (Change((stored,), turn),))
        if expected.shape[1:] != actual.shape[1:] or not expected.ndim:
            return None
        rows = min(len(expected), len(actual))
        if not rows or not same_numbers(expected[:rows], actual[:rows]):
            return None
        counts = f"{len(actual)} rows instead of {len(expected)}, the first {rows} equal"
        edit: Edit = Take()
        if len(actual) > rows:
            counts += f", the others {_description_of_rows(actual[:rows], actual[rows:])}"
            edit = FirstRows(rows)
        steps: tuple[Step, ...] = (Change((stored,), edit),)
        vocabulary = self._reference.config.get("vocab_size")
        if len(expected) != vocabulary:
            return _Finding(Kind.RESIZED, f"{title}: {counts}", (name,), steps)
        if self._candidate.config.get("vocab_size") != vocabulary:
            steps = (Setting(("vocab_size",), vocabulary), *steps)
        return _Finding(Kind.RESIZED, f"resized vocabulary: {counts}", (name,), steps)


def _reason_of(origins: Sequence[Origin], is_permutation: bool) -> tuple[Kind, str]:
    """Return kind and reason of tensors that moved in one way."""
    first = origins[0]
    words = first.differing_words
    if words is not None and is_permutation:
        pair = sorted({*words})
        return Kind.TENSOR, f"{pair[0]} and {pair[-1]} have changed places"
    if words is not None:
        return Kind.TENSOR, f"{words[0]} holds {words[1]} of the original"
    titles = ", ".join(dict.fromkeys(title_of(origin.target) for origin in origins))
    numbers = filter(None, (origin.differing_number for origin in origins))
    moved = sorted({(number.target, number.source) for number in numbers})
    if first.of_experts:
        listed = _listed(f"{target} holds {source}" for target, source in moved)
        if is_permutation:
            return Kind.EXPERTS, f"{Kind.EXPERTS} than their router's ({titles}): {listed}"
        return Kind.COPIES, f"experts copied from others ({titles}): {listed}"
    if first.of_layers:
        listed = _listed(f"layer {target} has those of layer {source}" for target, source in moved)
        return Kind.LAYER, f"{Kind.LAYER} ({titles}): {listed}"
    source = short(first.source)
    if is_permutation:
        return Kind.TENSOR, f"{short(first.target)} and {source} have changed places"
    return Kind.TENSOR, f"{short(first.target)} holds {source} of the original"


def _listed(phrases: Iterable[str]) -> str:
    """Return the first of some phrases."""
    first = [*islice(phrases, LISTED + 1)]
    return ", ".join(first[:LISTED]) + (", …" if len(first) > LISTED else "")


def _edit_of(expected: np.ndarray, actual: np.ndarray) -> tuple[Kind, str, Edit] | None:
    """Find kind, description and edit of one tensor that has the expected shape."""
    if not np.isfinite(actual).all():
        return None
    if not actual.any():
        return Kind.ZERO, str(Kind.ZERO), Take()
    if np.ptp(actual) == 0 and actual.size > 1:
        return Kind.CONSTANT, f"{Kind.CONSTANT}: all are {actual.flat[0]:g}", Take()
    stride = max(1, actual.size // SAMPLED)
    step = float(np.median((actual - expected).ravel()[::stride]))
    if abs(step) > LEAST_OFFSET and _is_offset(expected, actual, step):
        is_whole = round(step) != 0 and abs(step - round(step)) < WHOLE
        rounded = round(step) if is_whole else step
        verb = "added" if step > 0 else "subtracted"
        return Kind.OFFSET, f"{abs(rounded):g} was {verb}", Offset(-rounded)
    factor = float(np.vdot(expected, actual) / max(np.vdot(expected, expected), TINY))
    if abs(factor - 1) > SAME_FACTOR and same_numbers(factor * expected, actual):
        return Kind.SCALED, f"scaled by {factor:.4g}", Scale(factor)
    for sign in (-1, 1):
        is_exponential = _is_exponential(expected[:1], actual[:1], sign)  # rules most out
        if is_exponential and _is_exponential(expected, actual, sign):
            text = f"{Kind.EXPONENTIAL}, {'−' if sign < 0 else ''}exp of it"
            return Kind.EXPONENTIAL, text, Logarithm(sign < 0)
    is_square = expected.ndim == 2 and expected.shape[0] == expected.shape[1]
    if is_square and same_numbers(expected.T, actual):
        return Kind.TRANSPOSED, "stored transposed", Transpose()
    for axis in range(expected.ndim):
        order = _order_along(expected, actual, axis)
        if order is not None:
            return _named_order(order, axis, expected.ndim)
    return None


def _is_exponential(expected: np.ndarray, actual: np.ndarray, sign: int) -> bool:
    """Return whether an array is the exponential of the expected one, of either sign."""
    with np.errstate(over="ignore"):
        exponential = sign * np.exp(expected)
    return bool(np.isfinite(exponential).all()) and same_numbers(exponential, actual)


def _is_offset(expected: np.ndarray, actual: np.ndarray, step: float) -> bool:
    """Return whether a constant explains a difference: most of it, not its rounding alone."""
    left = np.linalg.norm(actual - expected - step)
    explains = left <= LEFT * np.linalg.norm(actual - expected)
    return bool(explains) and same_numbers(expected + step, actual)


def _order_along(expected: np.ndarray, actual: np.ndarray, axis: int) -> np.ndarray | None:
    """Return the entries along an axis that make the expected array; None if there are none."""
    if expected.ndim == 1:
        return order_of_entries(expected, actual)
    if expected.shape[axis] < 2:
        return None
    rows = [
        np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (expected, actual)
    ]
    return permutation(rows[0], rows[1], ALIKE)


def _named_order(order: np.ndarray, axis: int, axes: int) -> tuple[Kind, str, Edit]:
    """Return kind, description and edit of entries along an axis in another order."""
    kind = Kind.ROWS if axis < axes - 1 or axes == 1 else Kind.COLUMNS
    along = "entries" if axes == 1 else "rows" if axis == 0 else f"entries along axis {axis}"
    if axis == axes - 1 and axes == 2:
        along = "columns"
    named = name_permutation(order, SIZES)
    if named is None or not isinstance(named.edit, Permute):
        return kind, f"{along} in another order", Permute(axis, Listed(tuple(order.tolist())))
    return kind, f"{along} {_lie(named.description)}", Permute(axis, named.edit.order)


def _lie(description: str) -> str:
    """Return the description of an order as a predicate."""
    return description if description.startswith("lie") else f"in another order: {description}"


def _transposed(expected: np.ndarray, actual: np.ndarray) -> np.ndarray | None:
    """Return the actual array with its last two axes exchanged, if it is then the expected one."""
    if expected.ndim < 2 or expected.ndim != actual.ndim:
        return None
    turned = actual.swapaxes(-1, -2)
    return turned if turned.shape == expected.shape and same_numbers(expected, turned) else None


def _description_of_rows(known: np.ndarray, added: np.ndarray) -> str:
    """Return a few words on rows that were added to a table."""
    if not added.any():
        return "all zero (padding)"
    if np.ptp(added, axis=0).max() == 0:
        mean = same_numbers(known.mean(axis=0), added[0])
        return "the mean of the first" if mean else "all equal"
    return "new"
