"""Compare two checkpoints of one model, to check converted or rewritten models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from wqk._machine import one_blas_thread
from wqk._typing import FilePath
from wqk.attention.rounding import NARROWER, grid
from wqk.checkpoints import Checkpoint
from wqk.errors import CheckpointError, require_list, shown
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.sameness import configured
from wqk.sameness.alignment import Alignment, align
from wqk.sameness.answer import CheckpointComparison
from wqk.sameness.both_models import open_both
from wqk.sameness.comparisons import BlockComparison, Cause
from wqk.sameness.contents import paired_names
from wqk.sameness.diagnosis import Apart, diagnose
from wqk.sameness.edits import Take
from wqk.sameness.folded_mixers import fold_causes
from wqk.sameness.freedoms import any_order_of_heads, in_candidates_terms, order_of_heads
from wqk.sameness.layers import with_moved_layers
from wqk.sameness.measurement import BlockMeasurement, Signatures
from wqk.sameness.merges import MergedShare, merge_causes, merge_sentence, merged_shares
from wqk.sameness.mismatches import Kind, Mismatch, listed
from wqk.sameness.missing_tensors import missing_in_both
from wqk.sameness.outside import Scope, absent_towers, compare_outside
from wqk.sameness.positions import GUESSED
from wqk.sameness.repaired_files import require_local, write_repaired
from wqk.sameness.repairs import Change
from wqk.sameness.reports import failure
from wqk.sameness.tensor_causes import with_tensor_causes
from wqk.sameness.tolerances import ALIKE_FORMS, LEAST_ALIKE
from wqk.sameness.turned_weights import with_turned_weights
from wqk.sameness.verdicts import Verdict
from wqk.sameness.weighted_sums import with_parents
from wqk.sameness.weights import CIRCUITS, SCORES, Pair, form_parts
from wqk.storage.references import HubFolder, check_options

FREEDOMS = ("heads", "neurons", "stream")


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
    """Compare two checkpoints of one model, whatever their families and layouts.

    By default the attention and every other mixer of tokens: scores, values and outputs, learned
    position terms, sinks, the tensors of linear attention and state spaces. Exact, from the
    weights: no model is run. Changes that leave attention unchanged are ignored:
    rotations within heads, factors moved between queries and keys, folded norms and scales, storage
    types. If a block differs, the mistake is searched for: each row of its queries and keys among
    the other's, which tells how rows were reordered, then biases, norms, rotary positions and
    factors. Each mismatch comes with code that undoes it.

    Parameters
    ----------
    reference, candidate
        Models, or what `wqk.open` takes: folders, files, hub ids, live modules.
    revisions
        Revisions of the two, if they are Hub repositories.
    family, other_family
        Family files to use instead of the model types' own.
    heads_per_layer, key_heads
        Numbers of query and key heads of whichever of the two does not tell its own. Without them
        they are taken from the other one.
    base
        Base model of the LoRA adapter among the two, in place of the one that the adapter names.
    layers
        Only these, by their numbers; negative ones count from the last.
    tolerance
        Relative distance of heads that is accepted although rounding does not explain it.
    everything
        Whether every other tensor is compared too: under its name, or found by what it holds;
        experts in any order that their router has as well.
    up_to
        Freedoms of the model that do not count: ``heads``, their order, where scores, values and
        outputs agree on it, and nothing else is a head's by its number (slopes of ALiBi, sinks,
        gates); ``neurons``, their order in each feed-forward network; ``stream``, the coordinates
        of the residual stream, where one orthogonal matrix turns embeddings, attention,
        feed-forward networks and outputs (QuaRot, SpinQuant). The last two imply ``everything``.
    repair
        A new folder for a repaired copy of the candidate, if the two differ: the same files, names
        and types, in which the printed repair was run. It is then compared with the reference.
    merged_with
        A list of further parents of a merged candidate: models, or what `open_checkpoint` takes.
        The weights of all parents are fitted, and the candidate is compared with their weighted
        sum.
    on_progress
        Called after every block with the number done and the number of all.
    **hub
        ``subfolder``, ``token``, ``cache_dir``, ``local_files_only``: see `open_checkpoint`.

    Raises
    ------
    CheckpointError
        The two have no block in common, or differ in their numbers of heads or dimensions.

    Examples
    --------
    >>> import wqk
    >>> model = wqk.demo_model("decoder")
    >>> wqk.same(model, model).same
    True
    """
    check_options("same", hub, HubFolder)
    require_list("up_to", up_to, ["heads"])
    if unknown := sorted(set(up_to) - {*FREEDOMS}):
        raise CheckpointError(f"up_to: expected heads, neurons or stream, got {unknown}")
    if not tolerance >= 0:
        raise CheckpointError(f"a tolerance is a number of at least 0, got {tolerance!r}")
    if not isinstance(merged_with, list | tuple):
        raise CheckpointError(
            f"merged_with: expected a list of models, such as merged_with=['other-parent']; got "
            f"{shown(merged_with)}"
        )
    openings = [
        {"ref": reference, "family": family, "revision": revisions[0], **hub},
        {"ref": candidate, "family": other_family, "revision": revisions[1], **hub},
    ]
    models, notes = open_both(openings, heads_per_layer, key_heads, base)
    if merged_with:
        options = {key: value for key, value in hub.items() if key != "subfolder"}
        models[0], texts = with_parents(models[0], models[1], merged_with, **options)
        notes += texts
    # One rotation has to turn all of the model, and neurons move with all that belongs to them.
    everything = everything or not {"neurons", "stream"}.isdisjoint(up_to)
    names = paired_names(models[0].checkpoint.tensors(), models[1].checkpoint.tensors())
    is_whole = everything and layers is None
    models, views, allowed = in_candidates_terms(models, names, up_to, is_whole, tolerance)
    alignment = align(models, layers)
    comparer = _Comparer(models, alignment, allowed, "heads" in up_to)
    blocks = comparer.blocks(on_progress)
    anchors = alignment.anchor[0].query.tensor, alignment.anchor[1].query.tensor
    stored = [model.checkpoint.tensors() for model in models]
    names = paired_names(stored[0], stored[1], anchors)
    outside = compare_outside(
        models, alignment.pairs, blocks, names, Scope(everything, layers, allowed)
    )
    tensors = outside.tensors
    shares = [] if layers is not None else [*merged_shares(comparer.checkpoints, names)]
    blocks, known = _with_merges(alignment.pairs, blocks, shares)
    known += fold_causes(models[0], names)
    blocks, tensors, tensor_causes = with_tensor_causes(
        models,
        alignment.pairs,
        blocks,
        tensors,
        names,
        known,
        alone=(*alignment.missing, *alignment.added),
    )
    blocks, tensors, turned_causes = with_turned_weights(
        models[1], alignment.pairs, blocks, tensors
    )
    is_guessed = any(plan.rule.guess for pair in alignment.pairs for plan in pair)
    settings, settings_not_compared = _settings(models, everything)
    notes += [*views, *_unknown(alignment.pairs), *_narrower(models, alignment.anchor)]
    notes += missing_in_both(models, alignment.pairs)
    comparison = CheckpointComparison(
        reference=models[0].checkpoint.name,
        candidate=models[1].checkpoint.name,
        blocks=tuple(blocks),
        missing=alignment.missing,
        added=alignment.added,
        notes=(*notes, *comparer.notes, *absent_towers(models)),
        tensors=tensors,
        unknown=(*outside.unknown, GUESSED) if is_guessed else outside.unknown,
        not_compared=outside.not_compared,
        accepted=tolerance,
        quantized=_quantized_in_one(alignment.pairs),
        settings=settings,
        settings_not_compared=settings_not_compared,
        tensor_causes=(*turned_causes, *tensor_causes),
        adapter=merge_sentence(shares),
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
    written = replace(written, verdict=result.verdict, sentence=result.sentence)
    return replace(comparison, repaired=written)


def _with_merges(
    pairs: Sequence[Pair], blocks: Sequence[BlockComparison], shares: Sequence[MergedShare]
) -> tuple[list[BlockComparison], list[Cause]]:
    """Add wrong merges of an adapter to blocks that are the same otherwise; and those elsewhere."""
    elsewhere = {share.name: share for share in shares}
    explained = []
    for pair, block in zip(pairs, blocks, strict=True):
        names = dict.fromkeys(part.name for part in form_parts(pair[0]))
        own = [elsewhere.pop(name) for name in names if name in elsewhere]
        if block.verdict is not Verdict.DIFFERENT:
            causes = [cause.mismatch for cause in merge_causes(own)]
            block = replace(block, mismatches=(*block.mismatches, *causes))
        explained.append(block)
    return explained, merge_causes([*elsewhere.values()])


def assert_same(reference: Any, candidate: Any, **options: Any) -> CheckpointComparison:
    """Require that two models are the same; of one that is not, the cause and its repair are said.

    Parameters
    ----------
    reference, candidate
        Models, or what `wqk.open` takes: folders, files, hub ids, live modules.
    **options
        Those of `wqk.same`, such as ``everything=True`` for every tensor.

    Returns
    -------
    CheckpointComparison
        As `wqk.same` returns it.

    Raises
    ------
    AssertionError
        They are not the same, or it is not decided.

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


class _Comparer:
    """All pairs of blocks: measured one by one, then explained with what is known of all."""

    def __init__(
        self, models: Sequence[Model], alignment: Alignment, tolerance: float, any_heads: bool
    ) -> None:
        self._models, self._pairs, self._tolerance = models, alignment.pairs, tolerance
        self.checkpoints = [model.checkpoint for model in models]
        # Layers of the reference without a partner may lie in the place of others.
        alone = [plan for plan in models[0].plans if plan.place in alignment.missing]
        self._sources = [*alignment.pairs, *((plan, alignment.anchor[1]) for plan in alone)]
        self._signatures = Signatures(self.checkpoints, self._sources)
        self._blocks: list[BlockComparison] = []
        self._apart: list[dict[str, Apart]] = []
        self._free = any_order_of_heads(models, alignment.pairs) if any_heads else set()
        self._alone = (*alignment.missing, *alignment.added)
        self.notes: list[str] = []

    def blocks(self, on_progress: Callable[[int, int], None] | None) -> list[BlockComparison]:
        """Return the comparison of each pair, with the causes of differences."""
        with one_blas_thread():  # products of single heads are too small for several threads
            for number in range(len(self._pairs)):
                self._measure(number)
                if on_progress:
                    on_progress(len(self._blocks), len(self._pairs))
            blocks = [self._explained(number) for number in range(len(self._pairs))]
        return with_moved_layers(blocks, self._alone)

    def _measure(self, number: int) -> None:
        """Measure a pair of blocks; an order of heads may be free."""
        pair = self._pairs[number]
        measurement = BlockMeasurement(self._models, pair, self._tolerance)
        block = measurement.measure(self._signatures, number)
        apart = measurement.apart
        order = order_of_heads(block, apart) if number in self._free else ()
        if order:
            self.notes.append(f"{pair[0].place}: heads in the order {listed(order)}")
            block, apart = _reordered(block), {}
        self._blocks.append(block)
        self._apart.append(apart)

    def _explained(self, number: int) -> BlockComparison:
        """Return a block with its causes: another layer's weights, or changed ones."""
        block = self._blocks[number]
        if not block.unequal:
            return block
        causes: list[Mismatch] = []
        circuits: tuple[str, ...] = CIRCUITS
        held = self._layer_held(number)
        if held is not None:
            causes.append(self._of_layer(number, held))
            least = _least_alike(block)
            circuits = tuple(
                circuit
                for circuit in CIRCUITS
                if not self._signatures.alike(held, number, circuit, least)
            )
        if not set(circuits).isdisjoint(self._apart[number]):
            pair = self._pairs[number]
            neighbors = [plan for plan, _ in self._sources if plan is not pair[0]]
            apart = self._apart[number]
            causes += diagnose(self._models, pair, neighbors, self._tolerance, circuits, apart)
        doubt = _order_of_guess(self._pairs[number], block, causes)
        if doubt:
            return replace(_reordered(block), undecided=doubt)
        return replace(block, mismatches=(*causes, *block.mismatches))

    def _others(self, number: int) -> list[int]:
        """Other blocks of the reference, of the same stack and kind."""
        places = [plan.place for plan, _ in self._sources]
        own = places[number]
        return [
            other
            for other, place in enumerate(places)
            if other != number and (place.stack, place.kind) == (own.stack, own.kind)
        ]

    def _layer_held(self, number: int) -> int | None:
        """The other block of the reference whose scores the candidate's block has."""
        if SCORES not in self._blocks[number].unequal:
            return None
        least = _least_alike(self._blocks[number])
        for other in self._others(number):
            if self._signatures.alike(other, number, SCORES, least):
                return other
        return None

    def _of_layer(self, number: int, held: int) -> Mismatch:
        """The cause of a block that has the weights of another layer."""
        pair, least = self._pairs[number], _least_alike(self._blocks[number])
        layer, other = pair[0].layer, self._sources[held][0].layer
        reason = f"{Kind.LAYER}: layer {layer} has those of layer {other}"
        further = [each for each in self._others(number) if each != held]
        is_shared = held < len(self._pairs) and not self._blocks[held].unequal
        is_shared = is_shared or any(
            self._signatures.alike(held, each, SCORES, least)
            for each in further
            if each < len(self._pairs)
        )
        if is_shared:
            reason += ", as another one does"
        names = tuple(dict.fromkeys(part.name for part in form_parts(pair[1])))
        steps = (Change(names, Take()),)
        return Mismatch(Kind.LAYER, reason, steps, facts={"other_layer": other})


def _order_of_guess(pair: Pair, block: BlockComparison, causes: Sequence[Mismatch]) -> str:
    """Return why two blocks are not decided, if only a guessed order within a fused weight differs.

    A guess assumes that a fused weight holds queries, keys and values in this order. If another
    order makes the blocks the same, that is no mistake.
    """
    is_guess = any(plan.rule.guess for plan in pair)
    are_orders = all(cause.verdict is Kind.FUSED and cause.steps for cause in causes)
    if not (is_guess and causes and are_orders) or block.mismatches:
        return ""
    reasons = "; ".join(dict.fromkeys(cause.reason for cause in causes))
    return (
        "the order within a fused weight is not known of a guessed family; the two are equal if "
        f"{reasons.partition(', should')[0]}"
    )


def _reordered(block: BlockComparison) -> BlockComparison:
    """Return a block whose heads are the same in another order, which is a freedom."""
    return replace(
        block,
        unequal=(),
        heads=(),
        moved=(),
        distance=dict.fromkeys(block.distance, 0.0),
        beside=dict.fromkeys(block.beside, 0.0),
    )


def _least_alike(block: BlockComparison) -> float:
    """The least cosine of the signatures of the same heads, given their rounding."""
    return max(LEAST_ALIKE, min(ALIKE_FORMS, 1 - 2 * block.tolerance**2))


def _settings(
    models: Sequence[Model], everything: bool
) -> tuple[tuple[Mismatch, ...], tuple[str, ...]]:
    """Settings beside those of blocks that differ, and the names of those not compared."""
    found = {
        mismatch.facts["name"]: mismatch
        for mismatch in configured.further_settings(models, everything)
    }
    skipped = [name for name in found if not (everything or configured.of_attention(name, models))]
    compared = tuple(mismatch for name, mismatch in found.items() if name not in skipped)
    return compared, (*skipped, *configured.lost_settings(models))


def _quantized_in_one(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Formats with few bits in which one of the two stores forms, and the other does not."""
    formats = [{kind for pair in pairs for kind in pair[which].quantized} for which in (0, 1)]
    return tuple(sorted(formats[0] ^ formats[1]))


def _narrower(models: Sequence[Model], anchor: Pair) -> list[str]:
    """Notes on models whose values were rounded to a narrower type than they are stored in."""
    notes = []
    for model, plan in zip(models, anchor, strict=True):
        narrower = _narrower_type(model.checkpoint, plan)
        if narrower is not None:
            notes.append(f"{model.checkpoint.name}: {narrower}")
    return notes


def _narrower_type(checkpoint: Checkpoint, plan: AttentionPlan) -> str | None:
    """The narrower type that the query weight was rounded to, in a note; None if it was not."""
    part = plan.query.projection.roles[""]
    stored = checkpoint.info(part.name).dtype
    if stored not in NARROWER:
        return None
    rounded = grid(stored, checkpoint.read([part])[0])
    names = {
        "F8_E5M2": "float8 (e5m2)",
        "F8_E4M3": "float8 (e4m3)",
        "BF16": "bfloat16",
        "F16": "float16",
        "F32": "float32",
    }
    if rounded == stored:
        return None
    return f"values are rounded to {names[rounded]}, though stored as {stored}"


def _unknown(pairs: Sequence[Pair]) -> list[str]:
    """What is not compared, because a guess does not know it."""
    plans = [plan for pair in pairs for plan in pair]
    if any(plan.rule.guess for plan in plans):
        return [
            "not compared, because a family was guessed from tensor names and does not know them: "
            "mask, window, rotary positions and the order of their pairs, the score's scale, and "
            "norms that one side leaves open"
        ]
    if any(plan.rotation_unknown for plan in plans):
        return ["not compared, because a family only names them: rotary positions"]
    return []
