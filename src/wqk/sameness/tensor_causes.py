"""Causes of wrong tensors outside attention: exchanged, reordered, copied, transposed, resized.

`wqk.sameness.tensor_findings` searches for the changes. Here, equal findings of several layers
become one cause, and the causes are added to the comparisons of tensors and of blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from wqk.families import AttentionPlan, Place
from wqk.families.model_types import default_values
from wqk.model import Model
from wqk.sameness.circuits import PlanPair
from wqk.sameness.comparisons import BlockComparison, Cause
from wqk.sameness.edits import Take
from wqk.sameness.layers import alone_prefixes, moved_prefixes, with_tensors_of_layers
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.outside import UNPAIRED
from wqk.sameness.quantization import BEYOND, RESCALED
from wqk.sameness.repairs import Change, Exchange, merged_steps
from wqk.sameness.tensor_comparisons import Outcome, TensorComparison
from wqk.sameness.tensor_findings import TensorFinding, TensorSearch
from wqk.sameness.verdicts import Verdict

# Heads over the vocabulary, which lie outside of layers.
OUTPUT_HEAD = re.compile(r"^(?:[a-z_]+\.)*(?:lm_head|embed_out|output)\.weight$")
# Words for the two projections before the product of a gated feed-forward network.
GATES, UPS = ("gate_proj", "ffn_gate", "w1"), ("up_proj", "ffn_up", "w3")
# Reasons of causes that the numbers of a quantized tensor show.
REASONS_OF_NUMBERS = {Kind.BLOCK_SCALES: RESCALED, Kind.QUANTIZED: BEYOND}


class Explained(NamedTuple):
    """Comparisons with the causes of tensors outside the forms.

    Attributes
    ----------
    blocks
        The blocks; if the gain of a norm was exchanged with a gain outside of blocks, this is the
        cause.
    tensors
        The tensors, with the cause as the reason.
    causes
        The causes that affect no block.
    """

    blocks: list[BlockComparison]
    tensors: tuple[TensorComparison, ...]
    causes: tuple[Cause, ...]


def with_tensor_causes(
    models: Sequence[Model],
    pairs: Sequence[PlanPair],
    blocks: Sequence[BlockComparison],
    tensors: Sequence[TensorComparison],
    names: Mapping[str, str],
    known: Sequence[Cause] = (),
    alone: Sequence[Place] = (),
) -> Explained:
    """Find the causes of wrong tensors outside the forms.

    Parameters
    ----------
    models
        The reference and the candidate.
    pairs, blocks
        The pairs of blocks, and the comparison of each pair.
    tensors
        The tensors that were compared.
    names
        The candidate's names of the reference's tensors that the candidate has.
    known
        Known causes of tensors, such as an adapter that was not merged.
    alone
        The blocks that only one of the two models has.

    Returns
    -------
    Explained
        The comparisons with causes.
    """
    # Tensors of quantized files are also paired by their first rows, whatever their names.
    paired = {tensor.name: tensor.other for tensor in tensors if tensor.name and tensor.other}
    names = {**names, **paired}
    tensors = [*_under_their_names(models, tensors, names)]
    search = TensorSearch([model.checkpoint for model in models], names)
    moved_layers = moved_prefixes(pairs, blocks)
    lone_layers = tuple(alone_prefixes(pairs, alone))
    moved = dict.fromkeys(search.moved_with(moved_layers))
    explained = {name for cause in known for name in cause.outside} | {*moved}
    norms: set[str] = set()
    for (plan, _), block in zip(pairs, blocks, strict=True):
        if block.verdict is Verdict.DIFFERENT:
            norms.update(_norms(plan, names))
    norms -= {*moved}
    findings = _findings(search, models, tensors, explained, sorted(norms), lone_layers)
    causes = [*known, *_joined(filter(None, map(search.checked, findings)))]
    reason_of = {name: cause.mismatch.reason for cause in causes for name in cause.outside}
    explained_blocks = [
        _with_norms(block, {*_norms(pair[0], names)}, causes)
        for block, pair in zip(blocks, pairs, strict=True)
    ]
    if moved_layers:
        unpaired = [tensor.title for tensor in tensors if not (tensor.name and tensor.other)]
        lone = [name for name in unpaired if name.startswith(lone_layers)]
        names_of_layers = sorted({*moved, *lone})
        explained_blocks = with_tensors_of_layers(explained_blocks, names_of_layers)
    return Explained(
        blocks=explained_blocks,
        tensors=tuple(_with_reason(tensor, reason_of) for tensor in tensors),
        causes=tuple(cause for cause in causes if norms.isdisjoint(cause.outside)),
    )


def _findings(
    search: TensorSearch,
    models: Sequence[Model],
    tensors: Sequence[TensorComparison],
    explained: set[str],
    norms: Sequence[str],
    lone_layers: tuple[str, ...],
) -> list[TensorFinding]:
    """Find the changes of tensors, the most certain changes first.

    Parameters
    ----------
    explained
        Tensors with a known cause.
    norms
        Norms of blocks that differ.
    lone_layers
        Prefixes of the names of the layers that only one of the two models has.
    """
    wrong = [
        tensor.name
        for tensor in tensors
        if tensor.outcome is Outcome.DIFFERS and tensor.other and tensor.name not in explained
    ]
    findings = [*_shown_by_numbers(tensors)]
    wrong = _unexplained(wrong, findings)
    findings += search.moved([*wrong, *filter(search.differs, norms)])
    remaining = _unexplained(wrong, findings)
    reshaped = [name for name in remaining if not search.has_shape(name)]
    of_shape = [name for name in remaining if search.has_shape(name)]
    findings += filter(None, map(search.edited, of_shape))
    findings += search.recut(_unexplained(of_shape, findings))
    findings += filter(None, map(search.resized, reshaped))
    findings += _exchanged_gates(models[1], tensors)
    findings += _heads_against_ties(models[1], tensors)
    if _are_of_one_type(models):
        missing = [tensor.name for tensor in tensors if tensor.outcome is Outcome.MISSING]
        unexplained = _unexplained(missing, findings)
        findings += search.missing(name for name in unexplained if not name.startswith(lone_layers))
    return findings


def _with_reason(tensor: TensorComparison, reason_of: Mapping[str, str]) -> TensorComparison:
    """Return the record of a tensor with its cause as the reason, if the cause is known."""
    reason = reason_of.get(tensor.title)
    if reason is None or tensor.kind is not None:
        return tensor
    outcome = tensor.outcome
    if tensor.name and outcome is Outcome.FOUND:
        outcome = Outcome.DIFFERS
    return replace(tensor, outcome=outcome, reason=reason)


def _under_their_names(
    models: Sequence[Model], tensors: Sequence[TensorComparison], names: Mapping[str, str]
) -> Iterator[TensorComparison]:
    """Join the two records of a tensor with different shapes under one name.

    A transposed tensor is found by its numbers. If both models are of one type, they read the
    tensor the same way, and the transposition is a difference.
    """
    outcomes = UNPAIRED
    if _are_of_one_type(models):
        outcomes |= {Outcome.FOUND}
    added = {tensor.other for tensor in tensors if not tensor.name and tensor.outcome in outcomes}
    joined: set[str] = set()
    for tensor in tensors:
        stored = ""
        if tensor.name and not tensor.other:
            stored = names.get(tensor.name, "")
        is_transposed = tensor.reason == f"transposed, in {stored}"
        is_in_place = tensor.outcome is not Outcome.FOUND or is_transposed
        if stored in added and tensor.outcome in outcomes and is_in_place:
            joined.add(stored)
            yield replace(tensor, other=stored, outcome=Outcome.DIFFERS, reason="another shape")
        elif tensor.name or tensor.other not in joined:
            yield tensor


def _are_of_one_type(models: Sequence[Model]) -> bool:
    """Return whether both configurations have the same model type, with the same tensors."""
    types = [model.checkpoint.config.get("model_type") for model in models]
    return types[0] is not None and types[0] == types[1]


def _norms(plan: AttentionPlan, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of gains and biases of the norms before a block's projections.

    Only names that the candidate also has, the keys of ``names``, are yielded.
    """
    for side in (plan.query, plan.key, plan.value):
        if side is None or side.input_norm is None:
            continue
        for part in (*side.input_norm.gain, *side.input_norm.bias):
            if part.name in names:
                yield part.name


def _with_norms(
    block: BlockComparison, norms: set[str], causes: Sequence[Cause]
) -> BlockComparison:
    """Return a block, with the cause of its wrong norms, if any."""
    of_norms = [cause.mismatch for cause in causes if not norms.isdisjoint(cause.outside)]
    if not of_norms or block.verdict is not Verdict.DIFFERENT:
        return block
    further = [mismatch for mismatch in block.mismatches if mismatch.verdict is not Kind.NORM]
    return replace(block, mismatches=(*of_norms, *further))


def _unexplained(names: Sequence[str], findings: Sequence[TensorFinding]) -> list[str]:
    """Return the names that no finding explains."""
    explained = {name for finding in findings for name in finding.tensors}
    return [name for name in names if name not in explained]


def _joined(findings: Iterable[TensorFinding]) -> list[Cause]:
    """Join findings of one kind and reason to causes, with the facts of the first finding."""
    groups: dict[tuple[Kind, str], list[TensorFinding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.reason), []).append(finding)
    causes = []
    for (kind, reason), members in groups.items():
        steps = merged_steps(step for finding in members for step in finding.steps)
        tensors = tuple(name for finding in members for name in finding.tensors)
        facts = {"tensors": dict.fromkeys(tensors, "tensor"), **members[0].facts}
        causes.append(Cause(Mismatch(kind, reason, steps, facts=facts), (), tensors))
    return causes


def _shown_by_numbers(tensors: Sequence[TensorComparison]) -> Iterator[TensorFinding]:
    """Yield the causes that the numbers of a quantized tensor show."""
    for tensor in tensors:
        if tensor.kind in REASONS_OF_NUMBERS:
            reason = REASONS_OF_NUMBERS[tensor.kind]
            yield TensorFinding(tensor.kind, reason, (tensor.name,))


def _exchanged_gates(model: Model, tensors: Sequence[TensorComparison]) -> Iterator[TensorFinding]:
    """Find gates stored under another format's name for up projections, and the reverse."""
    reason = "gate and up projections have changed places"
    for tensor in tensors:
        if tensor.outcome is not Outcome.FOUND or not tensor.name:
            continue
        stored = tensor.reason.removeprefix("in ")
        if stored not in model.checkpoint.tensors():
            continue  # parts of several tensors
        if _has_word(tensor.name, GATES) and _has_word(stored, UPS):
            partner = _gate_of(stored)
            step = Exchange((stored, partner), (partner, stored))
            yield TensorFinding(Kind.TENSOR, reason, (tensor.name,), (step,))
        elif _has_word(tensor.name, UPS) and _has_word(stored, GATES):
            yield TensorFinding(Kind.TENSOR, reason, (tensor.name,))


def _gate_of(up_projection: str) -> str:
    """Return the name of the gate of the same network as an up projection.

    Examples
    --------
    >>> _gate_of("blk.0.ffn_up.weight")
    'blk.0.ffn_gate.weight'
    """
    gate_of = dict(zip(UPS, GATES, strict=True))
    return ".".join(gate_of.get(word, word) for word in up_projection.split("."))


def _heads_against_ties(
    model: Model, tensors: Sequence[TensorComparison]
) -> Iterator[TensorFinding]:
    """Find output heads that contradict the configuration's setting of tied embeddings."""
    config = model.checkpoint.config
    default = default_values(config.get("model_type")).get("tie_word_embeddings")
    is_tied = config.get("tie_word_embeddings", default)
    for tensor in tensors:
        name = tensor.title
        if not OUTPUT_HEAD.search(name):
            continue
        if tensor.outcome is Outcome.ADDED and is_tied is True:
            reason = f"{name} differs from the embeddings, but tie_word_embeddings is true"
            yield TensorFinding(Kind.SETTING, reason, (name,))
        elif tensor.outcome is Outcome.MISSING and is_tied is False:
            reason = f"{name} is missing, but tie_word_embeddings is false: the head stays random"
            yield TensorFinding(Kind.SETTING, reason, (name,), (Change((name,), Take()),))


def _has_word(name: str, words: Sequence[str]) -> bool:
    """Return whether one of some words is a part of a tensor's name."""
    return not set(name.split(".")).isdisjoint(words)
