"""Comparison of all stored tensors outside the forms of attention.

Tensors of forms are compared as forms. The remaining tensors of attention modules (learned position
terms, temperatures, gates) and the mixers of layers without attention (linear attention,
convolutions, state spaces) are compared as they are stored. With ``everything``, all other tensors
are compared, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from wqk.checkpoints import Part
from wqk.checkpoints.files import PLAIN
from wqk.model import Model
from wqk.sameness.all_tensors import compare_tensors
from wqk.sameness.circuits import VALUES, PlanPair, form_parts
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.contents import LayerPrefixes, find_by_layer
from wqk.sameness.positions import is_guessed
from wqk.sameness.stored_tensors import StoredComparison, compare_stored, stray_entries
from wqk.sameness.tensor_comparisons import ATTENTION, MIXER, OTHER, Outcome, TensorComparison
from wqk.sameness.tensor_edits import ranges_in_words
from wqk.sameness.tensor_names import layer_prefix
from wqk.sameness.tensor_roles import names_in_forms, parts_outside_forms, roles
from wqk.sameness.tolerances import MAJORITY

# Outcomes for tensors that exist in only one model.
UNPAIRED = frozenset({Outcome.MISSING, Outcome.ADDED})
# Parts of composite models with separate configurations.
TOWERS = ("vision", "audio", "text")


class Scope(NamedTuple):
    """The tensors to compare.

    Attributes
    ----------
    everything
        True if all tensors are compared, not only tensors of attention and of other mixers.
    layers
        The layers to compare; None for all. If layers are selected, only forms are compared.
    tolerance
        Relative distance of a tensor that is accepted.
    """

    everything: bool
    layers: Collection[int] | None
    tolerance: float


class OutsideComparison(NamedTuple):
    """Result of the comparison of tensors outside the forms.

    Attributes
    ----------
    tensors
        The tensors that were compared, and tensors of forms with single entries that differ.
    unknown
        Parts of attention that could not be compared.
    not_compared
        The names of tensors outside the scope.
    """

    tensors: tuple[TensorComparison, ...]
    unknown: tuple[str, ...]
    not_compared: tuple[str, ...]


def compare_outside(
    models: Sequence[Model],
    pairs: Sequence[PlanPair],
    blocks: Sequence[BlockComparison],
    names: Mapping[str, str],
    scope: Scope,
) -> OutsideComparison:
    """Compare the tensors outside the forms of two models.

    Parameters
    ----------
    models
        The reference and the candidate.
    pairs, blocks
        The pairs of blocks, and the comparison of each pair.
    names
        The candidate's names of the reference's tensors, where names agree.
    scope
        The tensors to compare.
    """
    comparison = _OutsideComparison(models, pairs, blocks, names)
    roles_of_models = [roles(model) for model in models]
    chosen = comparison.choose(roles_of_models, scope)
    tensors = comparison.compare(chosen, scope)
    unknown: list[str] = []
    if any(VALUES not in block.beside for block in blocks):
        unknown.append(VALUES)
    unknown += [tensor.title for tensor in tensors if tensor.outcome is Outcome.UNKNOWN]
    if not scope.tolerance:
        tensors += comparison.tensors_with_stray_entries()
    rows, unknown_rows = comparison.compare_rows_outside_forms()
    not_compared: dict[str, None] = {}
    for chosen_names, all_names in zip(chosen, roles_of_models, strict=True):
        for name in all_names:
            if name not in chosen_names:
                not_compared[names.get(name, name)] = None
    return OutsideComparison(
        tensors=(*tensors, *rows),
        unknown=(*unknown, *unknown_rows),
        not_compared=tuple(not_compared),
    )


@dataclass
class _OutsideComparison:
    """Two models with their blocks, for comparisons of the tensors outside the forms."""

    models: Sequence[Model]
    pairs: Sequence[PlanPair]
    blocks: Sequence[BlockComparison]
    names: Mapping[str, str]

    def __post_init__(self) -> None:
        self.checkpoints = [model.checkpoint for model in self.models]
        self.is_guess = is_guessed(self.pairs)

    def choose(
        self, roles_of_models: Sequence[Mapping[str, str]], scope: Scope
    ) -> list[dict[str, str]]:
        """Return the tensors of each model to compare, with their roles."""
        if scope.layers is not None:
            return [{}, {}]
        chosen_roles = {ATTENTION, MIXER}
        if scope.everything:
            chosen_roles.add(OTHER)
        chosen = []
        for role_of in roles_of_models:
            chosen.append({name: role for name, role in role_of.items() if role in chosen_roles})
        if scope.everything and self.is_guess:
            for role_of, model in zip(chosen, self.models, strict=True):
                role_of.update(dict.fromkeys(_formed_besides_scores(model), ATTENTION))
        self._add_partners(chosen)
        return chosen

    def _add_partners(self, chosen: Sequence[dict[str, str]]) -> None:
        """Add the tensors of each model whose counterparts in the other model are compared.

        With a guessed family, a tensor of a form may be unknown in one model. The stored tensors
        are then compared, and the tensor is not reported as missing.
        """
        reference_roles, candidate_roles = chosen
        reference, candidate = (checkpoint.tensors() for checkpoint in self.checkpoints)
        reference_names = {other: name for name, other in self.names.items()}
        for name, role in [*reference_roles.items()]:
            partner = self.names.get(name, "")
            if partner in candidate:
                candidate_roles.setdefault(partner, role)
        for name, role in [*candidate_roles.items()]:
            partner = reference_names.get(name, "")
            if partner in reference:
                reference_roles.setdefault(partner, role)

    def compare(self, chosen: Sequence[Mapping[str, str]], scope: Scope) -> list[TensorComparison]:
        """Compare chosen tensors; accepted distances count as rounding."""
        is_strict = scope.everything or self._have_one_layout
        layers = _layer_prefixes(self.pairs)
        tensors = compare_tensors(
            self.checkpoints, chosen, self.names, strict=is_strict, layers=layers
        )
        if self.is_guess:
            tensors = _found_in_fused(self.models, tensors, layers)
        return [_accepted(tensor, scope.tolerance) for tensor in tensors]

    @property
    def _have_one_layout(self) -> bool:
        """Return whether the queries of each block have corresponding names in both models."""
        pairs = self.pairs or [*zip(self.models[0].mixers, self.models[1].mixers, strict=False)]
        return all(
            self.names.get(reference.query.tensor) == candidate.query.tensor
            for reference, candidate in pairs
        )

    def compare_rows_outside_forms(self) -> tuple[list[TensorComparison], list[str]]:
        """Compare rows of tensors of forms that are in no form, such as gates next to queries.

        The result contains the comparisons, and descriptions of rows that cannot be compared.
        """
        reference_model, candidate_model = self.models
        reference_parts = {part.name: part for part in parts_outside_forms(reference_model)}
        candidate_parts = {part.name: part for part in parts_outside_forms(candidate_model)}
        reference, candidate = self.checkpoints
        tensors: list[TensorComparison] = []
        unknown: list[str] = []
        for name, part in reference_parts.items():
            partner = candidate_parts.get(self.names.get(name, ""))
            if (
                partner is None
                or partner.rows != part.rows
                or candidate.info(partner.name).shape != reference.info(name).shape
            ):
                unknown.append(f"rows of {name} outside the forms")
                continue
            stored = compare_stored(self.checkpoints, (part, partner))
            if stored.outcome is Outcome.DIFFERS and part.rows is not None:
                numbers = [*chain.from_iterable(range(*rows) for rows in part.rows)]
                rows = ranges_in_words(numbers)
                reason = f"rows {rows} (neither queries nor keys): {stored.reason}"
                stored = stored._replace(reason=reason)
            tensors.append(_of_attention(name, partner.name, stored))
        return tensors, unknown

    def tensors_with_stray_entries(self) -> Iterator[TensorComparison]:
        """Yield tensors with single differing entries, too few to change the forms.

        Only blocks that are equal within their tolerance, but not bit by bit, can have such
        tensors.
        """
        compared: set[str] = set()
        for (plan, _), block in zip(self.pairs, self.blocks, strict=True):
            if block.identical or not block.same:
                continue
            differing: dict[str, StoredComparison] = {}
            for name in dict.fromkeys(part.name for part in form_parts(plan)):
                if name in compared or not self._is_stored_alike(name):
                    continue
                compared.add(name)
                stored = compare_stored(self.checkpoints, (Part(name), Part(self.names[name])))
                if stored.outcome is Outcome.DIFFERS:
                    differing[name] = stored
            for name in _with_stray_entries(differing):
                yield _of_attention(name, self.names[name], differing[name])

    def _is_stored_alike(self, name: str) -> bool:
        """Return whether both models store plain numbers of one shape under corresponding names."""
        infos = [
            self.checkpoints[0].info(name),
            self.checkpoints[1].tensors().get(self.names.get(name, "")),
        ]
        shapes = {info.shape for info in infos if info is not None}
        types = {info.dtype for info in infos if info is not None}
        return None not in infos and len(shapes) == 1 and types <= {*PLAIN}


def _formed_besides_scores(model: Model) -> list[str]:
    """Return tensors of forms that a guess does not name: values, outputs, norms."""
    scored = {side.tensor for plan in model.plans for side in (plan.query, plan.key)}
    return [name for name in names_in_forms(model.plans) if name not in scored]


def _accepted(tensor: TensorComparison, tolerance: float) -> TensorComparison:
    """Return the comparison of a tensor; a distance within the accepted tolerance is rounding."""
    is_accepted = tolerance > 0 and tensor.distance <= tolerance
    if tensor.outcome is Outcome.DIFFERS and is_accepted:
        return replace(tensor, outcome=Outcome.ROUNDED)
    return tensor


def _of_attention(name: str, other: str, stored: StoredComparison) -> TensorComparison:
    """Return the comparison of a tensor, with the role of a tensor of attention."""
    return TensorComparison(
        name=name,
        other=other,
        outcome=stored.outcome,
        reason=stored.reason,
        role=ATTENTION,
        distance=stored.distance,
    )


def _with_stray_entries(differing: Mapping[str, StoredComparison]) -> Iterator[str]:
    """Yield the tensors of a block in which only single entries changed.

    Tensors too large for a mask of the changed entries are left out.

    Most entries of a vector may have changed if a weight of the block changed as well: a rotation
    within heads changes both.
    """
    masks = {
        name: stored.changed_entries
        for name, stored in differing.items()
        if stored.changed_entries is not None
    }
    has_changed_weights = any(mask.shape[1] > 1 for mask in masks.values())
    for name, mask in masks.items():
        is_vector = mask.shape[1] == 1
        if is_vector:
            is_stray = mask.mean() < MAJORITY and not has_changed_weights
        else:
            is_stray = stray_entries(mask) > 0
        if is_stray:
            yield name


def _layer_prefixes(pairs: Sequence[PlanPair]) -> list[LayerPrefixes]:
    """Return the pairs of prefixes of the names of two layers that are compared."""
    pairs_of_prefixes: dict[LayerPrefixes, None] = {}
    for reference, candidate in pairs:
        prefixes = layer_prefix(reference.query.tensor), layer_prefix(candidate.query.tensor)
        if all(prefixes):
            pairs_of_prefixes[prefixes] = None
    reference_counts = Counter(reference for reference, _ in pairs_of_prefixes)
    candidate_counts = Counter(candidate for _, candidate in pairs_of_prefixes)
    # A layer that is paired with several layers has no partner.
    return [
        (reference, candidate)
        for reference, candidate in pairs_of_prefixes
        if reference_counts[reference] == 1 and candidate_counts[candidate] == 1
    ]


def _found_in_fused(
    models: Sequence[Model],
    tensors: Sequence[TensorComparison],
    layers: Sequence[LayerPrefixes],
) -> list[TensorComparison]:
    """Return the comparisons, with tensors found if they are part of a fused weight.

    A guessed family names the queries and keys of a fused weight, and not its values. Its separate
    values may be part of a fused weight of the other model.
    """
    plans = [plan for model in models for plan in model.plans]
    is_fused = any(plan.query.tensor == plan.key.tensor for plan in plans)
    unpaired = [tensor for tensor in tensors if tensor.outcome in UNPAIRED]
    if not is_fused or not unpaired:
        return [*tensors]
    names = [dict.fromkeys(names_in_forms(model.plans)) for model in models]
    names[0] |= dict.fromkeys(tensor.name for tensor in unpaired if tensor.name)
    names[1] |= dict.fromkeys(tensor.other for tensor in unpaired if tensor.other)
    checkpoints = [model.checkpoint for model in models]
    locations = find_by_layer(checkpoints, names, layers)
    # The first search takes whole rows of the reference, this search parts of rows.
    exchanged_layers = [(candidate, reference) for reference, candidate in layers]
    exchanged = find_by_layer(checkpoints[::-1], names[::-1], exchanged_layers)
    reference_locations = exchanged.candidate | locations.reference
    candidate_locations = exchanged.reference | locations.candidate
    results: list[TensorComparison] = []
    for tensor in tensors:
        if tensor.name:
            location = reference_locations.get(tensor.name)
        else:
            location = candidate_locations.get(tensor.other)
        if tensor.outcome in UNPAIRED and location:
            tensor = replace(tensor, outcome=Outcome.FOUND, reason=location)
        results.append(tensor)
    return results


def absent_towers(models: Sequence[Model]) -> list[str]:
    """Return a note on each tower that a configuration describes and no file contains.

    Vision, audio and text models of a composite model are towers.
    """
    return [
        f"not compared: the {tower} tower that the configuration describes ({tower}_config), of "
        "which neither has attention here"
        for tower in TOWERS
        if _is_described(tower, models) and not _has_blocks(tower, models)
    ]


def _is_described(tower: str, models: Sequence[Model]) -> bool:
    """Return whether the configuration of a model describes a tower."""
    configs = [model.checkpoint.config for model in models]
    return any(isinstance(config.get(f"{tower}_config"), dict) for config in configs)


def _has_blocks(tower: str, models: Sequence[Model]) -> bool:
    """Return whether a model has blocks of a tower."""
    titles: set[str] = set()
    for model in models:
        for plan in model.plans:
            titles |= {str(plan.stack), str(plan.rule.config), str(plan.family)}
    if tower == "text" and titles & {"decoder", "encoder"}:
        return True
    return any(tower in title for title in titles)
