"""Compare two checkpoints of one model, to check converted or rewritten models.

`same` opens both models, pairs their blocks, compares, explains, reports, and repairs. Each step
has a separate file; `same` calls the steps in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from wqk._typing import FilePath
from wqk.errors import CheckpointError, called_as, require_list, shown
from wqk.model import Model
from wqk.sameness.alignment import Alignment, align
from wqk.sameness.answer import CheckpointComparison
from wqk.sameness.block_comparer import BlockComparer
from wqk.sameness.both_models import open_both
from wqk.sameness.circuits import PlanPair, form_parts
from wqk.sameness.comparison_notes import formats_of_one_model, notes_on, settings_that_differ
from wqk.sameness.comparisons import BlockComparison, Cause
from wqk.sameness.experts_and_neurons import notes_on_neurons
from wqk.sameness.folded_mixers import fold_causes
from wqk.sameness.freedoms import in_candidates_terms
from wqk.sameness.layer_repairs import with_layer_repairs
from wqk.sameness.merges import MergedShare, merge_causes, merge_sentence, merged_shares
from wqk.sameness.outside import Scope, compare_outside
from wqk.sameness.positions import GUESSED, is_guessed
from wqk.sameness.repaired_files import require_local, require_nearer, write_repaired
from wqk.sameness.reports import failure
from wqk.sameness.tensor_causes import Explained, with_tensor_causes
from wqk.sameness.tensor_comparisons import TensorComparison
from wqk.sameness.tensor_names import paired_names
from wqk.sameness.transposed_weights import with_transposed_weights
from wqk.sameness.verdicts import Verdict
from wqk.sameness.weighted_sums import FittedSum, with_other_sums, with_parents
from wqk.storage.references import HubFolder, check_options

FREEDOMS = ("heads", "neurons", "stream")
# Freedoms that concern tensors outside of attention: one rotation turns all of the model, and
# neurons move with all tensors of their network.
FREEDOMS_OF_EVERYTHING = {"neurons", "stream"}


@called_as("wqk.same(reference, candidate)")
def same(
    reference: Any,
    candidate: Any,
    *,
    revisions: tuple[str | None, str | None] = (None, None),
    family: FilePath | None = None,
    other_family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    base: Any | None = None,
    layers: Collection[int] | None = None,
    tolerance: float = 0.0,
    everything: bool = False,
    up_to: Collection[str] = (),
    repair: FilePath | None = None,
    merged_with: Sequence[Any] = (),
    on_progress: Callable[[int, int], None] | None = None,
    **hub: Unpack[HubFolder],
) -> CheckpointComparison:
    """Compare two checkpoints of one model, also across families and layouts.

    By default, attention and every other mixer of tokens are compared: scores, values and outputs,
    learned position terms, sinks, the tensors of linear attention and state spaces. The comparison
    is exact, from the weights: no model is run. Changes that leave attention unchanged are ignored:
    rotations within heads, factors moved between queries and keys, folded norms and scales, storage
    types. If a block differs, the mistake is searched for: each row of the reference's queries and
    keys among the candidate's rows, then biases, norms, rotary positions and factors. Each mismatch
    comes with code that undoes the change.

    Parameters
    ----------
    reference, candidate
        Models, or references for `wqk.open`: folders, files, hub ids, live modules.
    revisions
        Revisions of the reference and of the candidate, if they are Hub repositories.
    family, other_family
        Family files to use instead of the families of the model types.
    heads_per_layer, key_heads
        Numbers of query and key heads, for a model without these numbers in its files; by default,
        the numbers of the other model.
    base
        Base model of the model that is a LoRA adapter, instead of the base that the adapter names.
    layers
        Numbers of the layers to compare; negative numbers count from the last layer.
    tolerance
        Relative distance of heads that is accepted besides rounding.
    everything
        Whether every other tensor is compared, too: by name, or else by content. Experts may be in
        any order that their router also has.
    up_to
        Freedoms of the model to ignore. ``heads``: the order of heads, if scores, values and
        outputs have one order, and no other part belongs to the number of a head (slopes of ALiBi,
        sinks, gates). ``neurons``: the order of neurons in each feed-forward network. ``stream``:
        the coordinates of the residual stream, if one orthogonal matrix rotates embeddings,
        attention, feed-forward networks and outputs (QuaRot, SpinQuant). ``neurons`` and ``stream``
        imply ``everything``.
    repair
        A new folder for a repaired copy of the candidate, if the models differ. The copy has the
        same files, names and types, with the printed repair applied. The copy is then compared with
        the reference.
    merged_with
        A list of further parents of a merged candidate: models, or references for
        `open_checkpoint`. The weights of all parents are fitted, and the candidate is compared with
        the weighted sum of the parents.
    on_progress
        Called after every block with the number of compared blocks and the number of all blocks.
    **hub
        ``subfolder``, ``token``, ``cache_dir``, ``local_files_only``: see `open_checkpoint`.

    Raises
    ------
    CheckpointError
        The models have no block in common, or differ in their numbers of heads or dimensions.

    Examples
    --------
    >>> import wqk
    >>> model = wqk.demo_model("decoder")
    >>> wqk.same(model, model).same
    True
    """
    check_options("same", hub, HubFolder, known=("everything", "layers", "repair", "tolerance"))
    _check_arguments(up_to, tolerance, merged_with)
    everything = everything or not FREEDOMS_OF_EVERYTHING.isdisjoint(up_to)
    openings = [
        {"ref": reference, "family": family, "revision": revisions[0], **hub},
        {"ref": candidate, "family": other_family, "revision": revisions[1], **hub},
    ]
    models, notes = open_both(openings, heads_per_layer, key_heads, base)
    fitted_sum: FittedSum | None = None
    if merged_with:
        options = {key: value for key, value in hub.items() if key != "subfolder"}
        fitted_sum = with_parents(models[0], models[1], merged_with, **options)
        models[0] = fitted_sum.model
        notes += fitted_sum.notes
    stored_names = paired_names(models[0].checkpoint.tensors(), models[1].checkpoint.tensors())
    is_whole = everything and layers is None
    models, notes_on_views, allowed = in_candidates_terms(
        models, stored_names, up_to, is_whole, tolerance
    )
    alignment = align(models, layers)
    comparer = BlockComparer(models, alignment, allowed, any_heads="heads" in up_to)
    blocks = comparer.compare(on_progress)
    names = _paired_names(models, alignment)
    scope = Scope(everything, layers, allowed)
    outside = compare_outside(models, alignment.pairs, blocks, names, scope)
    shares: list[MergedShare] = []
    if layers is None:
        shares += merged_shares([model.checkpoint for model in models], names)
    causes_of_sums: list[Cause] = []
    if fitted_sum is not None and layers is None:
        blocks, causes_of_sums = with_other_sums(
            fitted_sum, alignment.pairs, blocks, outside.tensors
        )
    explained = _explained(
        models, alignment, names, blocks, outside.tensors, shares, causes_of_sums
    )
    if layers is None:
        explained = _with_layer_repairs(models, alignment, explained)
    if everything and FREEDOMS_OF_EVERYTHING.isdisjoint(up_to):
        notes += notes_on_neurons(explained.causes)
    settings = settings_that_differ(models, everything)
    is_guess = is_guessed(alignment.pairs)
    notes += [*notes_on_views, *notes_on(models, alignment, comparer.notes)]
    comparison = CheckpointComparison(
        reference=models[0].checkpoint.name,
        candidate=models[1].checkpoint.name,
        blocks=tuple(explained.blocks),
        missing=alignment.missing,
        added=alignment.added,
        notes=tuple(notes),
        tensors=explained.tensors,
        unknown=(*outside.unknown, GUESSED) if is_guess else outside.unknown,
        not_compared=outside.not_compared,
        accepted=tolerance,
        quantized=formats_of_one_model(alignment.pairs),
        settings=settings.compared,
        settings_not_compared=settings.not_compared,
        tensor_causes=explained.causes,
        adapter=merge_sentence(shares),
        attention_alone=not everything and layers is None,
        weights=fitted_sum.weights if fitted_sum is not None else {},
    )
    if repair is None or comparison.verdict is Verdict.SAME:
        return comparison
    source = require_local(candidate, revisions[1])
    written = write_repaired(comparison, models, alignment.pairs, names, source, Path(repair))
    result = same(
        reference,
        written.folder,
        revisions=(revisions[0], None),
        family=family,
        other_family=other_family,
        heads_per_layer=heads_per_layer,
        key_heads=key_heads,
        base=base,
        layers=layers,
        tolerance=tolerance,
        everything=everything,
        up_to=up_to,
        merged_with=merged_with,
        **hub,
    )
    require_nearer(comparison, result, Path(written.folder))
    written = replace(written, verdict=result.verdict, sentence=result.sentence)
    return replace(comparison, repaired=written)


def assert_same(reference: Any, candidate: Any, **options: Any) -> CheckpointComparison:
    """Raise `AssertionError` if two models differ; the message names the cause and a repair.

    Parameters
    ----------
    reference, candidate
        Models, or references for `wqk.open`: folders, files, hub ids, live modules.
    **options
        Options of `wqk.same`, such as ``everything=True`` for every tensor.

    Returns
    -------
    CheckpointComparison
        The result of `wqk.same`.

    Raises
    ------
    AssertionError
        The models differ, or the comparison is undecided. The message contains the cause and a
        repair.

    Examples
    --------
    >>> import wqk
    >>> model = wqk.demo_model("decoder")
    >>> wqk.assert_same(model, model).same
    True
    """
    __tracebackhide__ = True
    comparison = same(reference, candidate, **options)
    if comparison.verdict is not Verdict.SAME:
        raise AssertionError("\n".join(failure(comparison)))
    return comparison


def _check_arguments(up_to: Collection[str], tolerance: float, merged_with: Sequence[Any]) -> None:
    """Raise an error for invalid arguments of `same`."""
    require_list("up_to", up_to, ["heads"])
    unknown = sorted(set(up_to) - {*FREEDOMS})
    if unknown:
        raise CheckpointError(f"up_to: expected heads, neurons or stream, got {unknown}")
    if not tolerance >= 0:
        raise CheckpointError(f"a tolerance is a number of at least 0, got {tolerance!r}")
    if not isinstance(merged_with, list | tuple):
        raise CheckpointError(
            f"merged_with: expected a list of models, such as merged_with=['other-parent']; got "
            f"{shown(merged_with)}"
        )


def _paired_names(models: Sequence[Model], alignment: Alignment) -> dict[str, str]:
    """Return the candidate's names of the reference's tensors, where names agree."""
    reference, candidate = (model.checkpoint.tensors() for model in models)
    reference_plan, candidate_plan = alignment.anchor
    example = reference_plan.query.tensor, candidate_plan.query.tensor
    return paired_names(reference, candidate, example)


def _explained(
    models: Sequence[Model],
    alignment: Alignment,
    names: dict[str, str],
    blocks: Sequence[BlockComparison],
    tensors: Sequence[TensorComparison],
    shares: Sequence[MergedShare],
    causes_of_sums: Sequence[Cause],
) -> Explained:
    """Add the causes of tensors outside the forms: merges, folds, moved and transposed tensors."""
    blocks, causes_of_merges = _with_merges(alignment.pairs, blocks, shares)
    explained = with_tensor_causes(
        models,
        alignment.pairs,
        blocks,
        tensors,
        names,
        known=[*causes_of_sums, *causes_of_merges, *fold_causes(models[0], names)],
        alone=(*alignment.missing, *alignment.added),
    )
    blocks, tensors, causes_of_transposed = with_transposed_weights(
        models[1], alignment.pairs, explained.blocks, explained.tensors
    )
    return Explained(blocks, tensors, (*causes_of_transposed, *explained.causes))


def _with_layer_repairs(
    models: Sequence[Model], alignment: Alignment, explained: Explained
) -> Explained:
    """Add the repairs of stacks with missing or added layers."""
    blocks, causes = with_layer_repairs(
        models, alignment.pairs, explained.blocks, alignment.missing, alignment.added
    )
    return Explained(blocks, explained.tensors, (*explained.causes, *causes))


def _with_merges(
    pairs: Sequence[PlanPair], blocks: Sequence[BlockComparison], shares: Sequence[MergedShare]
) -> tuple[list[BlockComparison], list[Cause]]:
    """Add the causes of wrong merges of an adapter.

    The result contains the blocks, with causes for blocks that do not differ otherwise, and the
    causes of tensors outside the forms.
    """
    share_of = {share.name: share for share in shares}
    explained = []
    for pair, block in zip(pairs, blocks, strict=True):
        names = dict.fromkeys(part.name for part in form_parts(pair[0]))
        shares_of_block = [share_of.pop(name) for name in names if name in share_of]
        if block.verdict is not Verdict.DIFFERENT:
            causes = [cause.mismatch for cause in merge_causes(shares_of_block)]
            block = replace(block, mismatches=(*block.mismatches, *causes))
        explained.append(block)
    return explained, merge_causes([*share_of.values()])
