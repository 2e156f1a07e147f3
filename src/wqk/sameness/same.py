"""Whether two checkpoints have the same attention, to check converted or rewritten models."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np

from wqk._machine import one_blas_thread
from wqk._typing import FilePath
from wqk.attention.rounding import NARROWER, grid
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError, UnknownFamily, require_list
from wqk.families import AttentionPlan, Place
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness import configured, mismatches
from wqk.sameness.answer import BlockComparison, Cause, CheckpointComparison
from wqk.sameness.blocks import Scoring, positions
from wqk.sameness.contents import compare_stored, paired_names
from wqk.sameness.diagnosis import (
    Apart,
    beside,
    comparable,
    diagnose,
    identical,
    measure,
    signature,
)
from wqk.sameness.edits import Take
from wqk.sameness.expected import Expected
from wqk.sameness.finders import find_groups
from wqk.sameness.merges import MergedShare, merge_causes, merge_sentence, merged_shares
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.orders import renumbered
from wqk.sameness.outside import (
    ATTENTION,
    absent_towers,
    layer_of,
    left_in,
    outside,
    roles,
)
from wqk.sameness.positions import GUESSED, named_settings, undecided_positions
from wqk.sameness.quantization import coded_otherwise
from wqk.sameness.repairs import Change
from wqk.sameness.reports import failure
from wqk.sameness.stream import folded, turned
from wqk.sameness.tensor_causes import with_tensor_causes
from wqk.sameness.tolerances import ALIKE_FORMS, LEAST_ALIKE, RESOLUTION, SUSPECT, TURNED
from wqk.sameness.verdicts import Verdict
from wqk.sameness.weights import CIRCUITS, SCORES, Pair, form_parts, scorings, sides_of
from wqk.storage.references import HubFolder, check_options


def same(
    ref: Any,
    other: Any,
    *,
    revisions: tuple[str | None, str | None] = (None, None),
    family: FilePath | None = None,
    other_family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    layers: Collection[int] | None = None,
    tolerance: float = 0.0,
    everything: bool = False,
    up_to: Collection[str] = (),
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
    ref, other
        Models, or what `wqk.open` takes: folders, files, hub ids, live modules.
    revisions
        Revisions of the two, if they are Hub repositories.
    family, other_family
        Family files to use instead of the model types' own.
    heads_per_layer, key_heads
        Numbers of query and key heads of whichever of the two does not tell its own. Without them
        they are taken from the other one.
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
    if unknown := sorted(set(up_to) - {"heads", "neurons", "stream"}):
        raise CheckpointError(f"up_to: expected heads, neurons or stream, got {unknown}")
    if not tolerance >= 0:
        raise CheckpointError(f"a tolerance is a number of at least 0, got {tolerance!r}")
    openings: list[dict[str, Any]] = [
        {"ref": one, "family": file, "revision": revision, **hub}
        for one, file, revision in zip((ref, other), (family, other_family), revisions, strict=True)
    ]
    models, notes = _opened(openings, heads_per_layer, key_heads)
    accepted = tolerance
    # One rotation has to turn all of the model, and neurons move with all that belongs to them.
    everything = everything or bool({"neurons", "stream"} & {*up_to})
    own = paired_names(models[0].checkpoint.tensors(), models[1].checkpoint.tensors())
    if "stream" in up_to:
        there, words = turned(models, own)
        notes.append(f"the residual stream {words}" if there else f"up to the stream: {words}")
        if there is not None:
            models[0], tolerance = there, max(tolerance, TURNED)
    if everything and layers is None:
        for view in (folded, partial(renumbered, neurons="neurons" in up_to)):
            there, said = view(models, own)
            models[0], notes = there or models[0], notes + said
    checkpoints = [model.checkpoint for model in models]
    pairs, missing, added = _paired(*(model.plans for model in models))
    anchors = pairs or _paired(*(model.mixers for model in models))[0]
    if not anchors:
        first, second = (", ".join(map(str, one[:3])) for one in (missing, added))
        raise CheckpointError(
            f"{checkpoints[0].name} and {checkpoints[1].name} have no attention block in common: "
            f"one has {first}, …; the other {second}, …"
        )
    pairs, missing, added = _chosen(pairs, missing, added, layers)
    notes += _unknown(pairs)
    for checkpoint, plan in zip(checkpoints, anchors[0], strict=True):
        if text := _grid(checkpoint, plan):
            notes.append(f"{checkpoint.name}: {text}")
    blocks: list[BlockComparison] = []
    marks, apart = _Marks(checkpoints, pairs), list[dict[str, Apart]]()
    free = _free(models, pairs) if "heads" in up_to else set()
    with one_blas_thread():  # products of single heads are too small for several threads
        for number, pair in enumerate(pairs):
            block, unequal = _compared(models, pair, tolerance, marks, number)
            if number in free and (order := _order_of_heads(block, unequal)):
                notes.append(f"{pair[0].place}: heads in the order {mismatches.listed(order)}")
                block, unequal = replace(block, unequal=(), heads=()), {}
            blocks.append(block)
            apart.append(unequal)
            if on_progress:
                on_progress(len(blocks), len(pairs))
        blocks = [
            _explained(models, pairs, blocks, marks, number, apart[number], tolerance)
            for number in range(len(pairs))
        ]
    one, two = (plan.query.tensor for plan in anchors[0])
    names = paired_names(checkpoints[0].tensors(), checkpoints[1].tensors(), (one, two))
    tensors, unsure, skipped = outside(models, pairs, blocks, names, everything, layers, tolerance)
    shares = [] if layers is not None else [*merged_shares(checkpoints, names)]
    blocks, merges = _with_merges(pairs, blocks, shares)
    blocks, tensors, tensor_causes = with_tensor_causes(
        models, pairs, blocks, tensors, names, merges
    )
    if any(plan.rule.guess for pair in pairs for plan in pair):
        unsure = (*unsure, GUESSED)
    notes += absent_towers(models)
    settings = {one.facts["name"]: one for one in configured.further_settings(models, everything)}
    left = [name for name in settings if not (everything or configured.of_attention(name, models))]
    left += configured.lost_settings(models)
    # How forms are stored with few bits in one of the two, and not in the other.
    few = [{kind for pair in pairs for kind in pair[n].quantized} for n in (0, 1)]
    told = tuple(one for name, one in settings.items() if name not in left)
    return CheckpointComparison(
        checkpoints[0].name,
        checkpoints[1].name,
        tuple(blocks),
        missing,
        added,
        tuple(notes),
        tensors,
        unsure,
        skipped,
        accepted,
        tuple(sorted(few[0] ^ few[1])),
        told,
        tuple(left),
        tensor_causes,
        merge_sentence(shares),
    )


def _with_merges(
    pairs: Sequence[Pair], blocks: Sequence[BlockComparison], shares: Sequence[MergedShare]
) -> tuple[list[BlockComparison], list[Cause]]:
    """Add wrong merges of an adapter to blocks that are the same otherwise; and those elsewhere."""
    left = {share.name: share for share in shares}
    found = []
    for pair, block in zip(pairs, blocks, strict=True):
        names = dict.fromkeys(part.name for part in form_parts(pair[0]))
        own = [left.pop(name) for name in names if name in left]
        if block.verdict is not Verdict.DIFFERENT:
            causes = [cause.mismatch for cause in merge_causes(own)]
            block = replace(block, mismatches=(*block.mismatches, *causes))
        found.append(block)
    return found, merge_causes([*left.values()])


def assert_same(ref: Any, other: Any, **options: Any) -> CheckpointComparison:
    """Require that two models are the same; of one that is not, the cause and its repair are said.

    Parameters
    ----------
    ref, other
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
    comparison = same(ref, other, **options)
    if comparison.verdict is not Verdict.SAME:
        raise AssertionError("\n".join(failure(comparison)))
    return comparison


def _grid(checkpoint: Checkpoint, plan: AttentionPlan) -> str:
    """Whether values lie on the grid of a narrower type than they are stored in, in words."""
    part = plan.query.projection.roles[""]
    dtype = checkpoint.info(part.name).dtype
    if dtype not in NARROWER:
        return ""
    found = grid(dtype, checkpoint.read([part])[0])
    words = {
        "F8_E5M2": "float8 (e5m2)",
        "F8_E4M3": "float8 (e4m3)",
        "BF16": "bfloat16",
        "F16": "float16",
        "F32": "float32",
    }
    return f"values are rounded to {words.get(found)}, though stored as {dtype}" * (found != dtype)


class _Marks:
    """Signatures of both models' blocks: those that were compared, and others when first needed."""

    def __init__(self, checkpoints: Sequence[Checkpoint], pairs: Sequence[Pair]) -> None:
        self._checkpoints, self._pairs = checkpoints, pairs
        self._known: dict[tuple[int, str], list[np.ndarray]] = {}

    def add(self, number: int, circuit: str, both: Sequence[Scoring]) -> None:
        """Note the two of a pair of blocks."""
        self._known[number, circuit] = [signature(one).astype(np.float32) for one in both]

    def alike(self, ours: int, theirs: int, circuit: str, least: float) -> bool:
        """Whether the heads of two blocks have the same form, by their signatures."""
        found = []
        for which, number in enumerate((ours, theirs)):
            if (number, circuit) not in self._known:
                both = scorings(self._checkpoints, self._pairs[number], circuit)
                self.add(number, circuit, both or ())
            found += self._known[number, circuit][which : which + 1]
        if len(found) < 2 or found[0].shape != found[1].shape:
            return False
        return bool((np.einsum("hp,hp->h", *found) > least).all())


def _compared(
    models: Sequence[Model], pair: Pair, tolerance: float, marks: _Marks, number: int
) -> tuple[BlockComparison, dict[str, Apart]]:
    """How far two blocks are apart in each circuit, and their settings; their marks are noted."""
    checkpoints = [model.checkpoint for model in models]
    found = [*configured.other_settings(models, pair), *named_settings(models, pair)]
    undecided = ""
    if pair[0].sinks is not None and pair[1].sinks is not None:
        found += _sinks(checkpoints, (pair[0].sinks, pair[1].sinks))
    apart, heads = dict[str, Apart](), np.zeros(pair[0].query.heads)
    equal = [circuit for circuit in CIRCUITS if identical(checkpoints, pair, circuit)]
    is_identical = len(equal) == len(CIRCUITS) and not any(plan.sinks for plan in pair)
    distance = dict.fromkeys(positions(*pair), 0.0) if SCORES in equal else {}
    beside_scores = {what: 0.0 for what in equal if what != SCORES and sides_of(pair[0], what)}
    head, allowed, moved = 0, RESOLUTION, list[float]()
    if SCORES in equal:
        undecided = undecided_positions(pair, None)
    for circuit in CIRCUITS:
        both = None if circuit in equal else scorings(checkpoints, pair, circuit)
        if both is None:
            continue
        a, b = both
        if circuit == SCORES:
            undecided = undecided_positions(pair, both)
            _require_sizes(pair[0], both)
            if len(a.query.weight) != len(b.query.weight):
                said = [f"{len(one.query.weight)} of width {one.width}" for one in both]
                restored = configured.form_restored(models, pair)
                steps = restored[0].steps if restored else ()
                found.insert(0, mismatches.setting("number of heads", said[0], said[1], steps))
                distance, allowed = dict.fromkeys(positions(a, b), math.nan), 0
                beside_scores = {}
                break
        elif not comparable(a, b):
            reason = " against ".join(_sizes(one) for one in both)
            found.append(beside(circuit, Mismatch(Kind.SIZES, reason)))
            beside_scores[circuit] = math.nan
            continue
        one = measure(a, b, tolerance)
        far = one.distances
        by_head, shares = far.relative.max(axis=0), far.shares.max(axis=0)
        marks.add(number, circuit, both)
        if circuit == SCORES:
            distance = dict(zip(positions(a, b), far.relative.max(axis=1).tolist(), strict=True))
            head, allowed, moved = int(shares.argmax()), far.allowed, by_head.tolist()
            if SUSPECT < shares.max() <= 1 and checkpoints[1].regrouping(
                Part(pair[1].query.tensor, ((0, 1),))
            ):
                expected = Expected(checkpoints, pair)
                columns = [find_groups(weights) for weights in expected.pairs if weights.is_matrix]
                found[:0] = [expected.mismatch(one) for one in columns if one is not None]
        else:
            beside_scores[circuit] = float(by_head.max())
        if not far.agree:
            apart[circuit] = one
            if len(heads) == len(by_head):
                heads = np.maximum(heads, np.where(shares > 1, by_head, 0.0))
    if not (found or apart or tolerance):
        found += coded_otherwise(checkpoints, pair)
    return BlockComparison(
        *pair[0].place,
        distance,
        head,
        allowed,
        tuple(found),
        tuple(heads.tolist()),
        beside_scores,
        tuple(apart),
        is_identical,
        tuple(moved),
        undecided,
    ), apart


def _require_sizes(plan: AttentionPlan, both: Sequence[Scoring]) -> None:
    """Queries and keys of two blocks must have as many rows, of the same widths."""
    shapes = [(one.query.weight.shape, one.key.weight.shape) for one in both]
    (rows, key), (others, other_key) = shapes
    if (rows[0] * rows[1], rows[2], key[2]) == (others[0] * others[1], others[2], other_key[2]):
        return
    one, other = map(_sizes, both)
    raise CheckpointError(
        f"layer {plan.layer} of the {plan.stack} has {one} in one checkpoint and {other} in the "
        "other; only equal ones can be compared"
    )


def _free(models: Sequence[Model], pairs: Sequence[Pair]) -> set[int]:
    """The blocks in which all that belongs to a head is in its circuits, so that any may be first.

    Positions that are added to scores, sinks and gates are a head's by its number.
    """
    bound = set[int]()
    for which, model in enumerate(models):
        tensors, left = model.checkpoint.tensors(), {part.name for part in left_in(model)}
        beside: dict[str, list[tuple[int, ...]]] = {}
        for name, role in roles(model).items():
            if role == ATTENTION:
                beside.setdefault(layer_of(name), []).append(tensors[name].shape)
        for number, plan in enumerate(pair[which] for pair in pairs):
            layer, heads = layer_of(plan.query.tensor), plan.query.heads
            rows = heads * plan.query.head_width if layer else 0
            numbered = any(
                heads in shape or (len(shape) > 1 and rows in shape)
                for shape in beside.get(layer, [])
            )
            added = not plan.position.startswith("rotary") and plan.position not in ("", "mask")
            if numbered or added or plan.sinks or plan.query.tensor in left:
                bound.add(number)
    return {*range(len(pairs))} - bound


def _order_of_heads(block: BlockComparison, apart: Mapping[str, Apart]) -> tuple[int, ...]:
    """The one order of heads in which scores, values and outputs are the same; () without one."""
    if {*apart} != {SCORES, *block.beside}:
        return ()
    found = [circuit.explained for circuit in apart.values()]
    orders = {
        one[0].heads if one and len(one) == 1 and one[0].verdict == Kind.HEADS else ()
        for one in found
    }
    return orders.pop() if len(orders) == 1 else ()


def _explained(
    models: Sequence[Model],
    pairs: Sequence[Pair],
    blocks: Sequence[BlockComparison],
    marks: _Marks,
    number: int,
    apart: Mapping[str, Apart],
    tolerance: float,
) -> BlockComparison:
    """A block with the causes of what differs in it: another layer's weights, or changed ones."""
    block, pair = blocks[number], pairs[number]
    if not block.unequal:
        return block
    least = max(LEAST_ALIKE, min(ALIKE_FORMS, 1 - 2 * block.tolerance**2))
    places = [ours.place[:2] for ours, _ in pairs]
    others = [n for n, place in enumerate(places) if place == places[number] and n != number]
    found: list[Mismatch] = []
    left: tuple[str, ...] = CIRCUITS
    held = None
    if SCORES in block.unequal:
        held = next((n for n in others if marks.alike(n, number, SCORES, least)), None)
    if held is not None:
        layer, other = pair[0].layer, pairs[held][0].layer
        rest = (m for m in others if m != held)
        tied = not blocks[held].unequal or any(marks.alike(held, m, SCORES, least) for m in rest)
        reason = f"{Kind.LAYER}: layer {layer} has those of layer {other}"
        reason += ", as another one does" * tied
        names = tuple(dict.fromkeys(part.name for part in form_parts(pair[1])))
        steps = (Change(names, Take()),)
        found.append(Mismatch(Kind.LAYER, reason, steps, facts={"other_layer": other}))
        left = tuple(what for what in left if not marks.alike(held, number, what, least))
    if {*left} & {*apart}:
        neighbors = [plan for plan, _ in pairs if plan is not pair[0]]
        found += diagnose(models, pair, neighbors, tolerance, left, apart)
    return replace(block, mismatches=(*found, *block.mismatches))


def _opened(
    openings: Sequence[dict[str, Any]], heads: int | None, key_heads: int | None
) -> tuple[list[Model], list[str]]:
    """Both models; one that does not tell its heads has those given, or the other's."""
    failed, notes = list[Exception](), list[str]()

    def opened(opening: dict[str, Any]) -> Model | None:
        try:
            return open_model(**opening)
        except (CheckpointError, UnknownFamily) as error:
            failed.append(error)
            return None

    models = [opened(opening) for opening in openings]
    known = next(filter(None, models), None)
    if known is None and heads is None:
        raise failed[0]
    for number, opening in enumerate(openings):
        if models[number] is not None:
            continue
        counts, told = (heads, key_heads), "as given"
        if heads is None and known is not None:
            plan, told = known.plans[0], f"as in {known.name}"
            counts = plan.query.heads, plan.key.heads
            counts = counts if counts[0] != counts[1] else (counts[0], None)
        model = opened({**opening, "heads_per_layer": counts[0], "key_heads": counts[1]})
        if model is None:
            raise failed[0]
        config = model.checkpoint.config
        if heads is None and "model_type" in config and configured.is_configured(config):
            raise failed[0]  # transformers would fill in a number, and it is the wrong one
        models[number] = model
        notes.append(
            f"{model.name} does not tell its number of heads: {counts[0]} query heads, {told}"
        )
    return [model for model in models if model is not None], notes


def _paired(
    ours: Sequence[AttentionPlan], theirs: Sequence[AttentionPlan]
) -> tuple[list[Pair], tuple[Place, ...], tuple[Place, ...]]:
    """Blocks of the same stack, kind and layer; and those of either that have no partner.

    Stacks whose name only one side has, as a guess calls them otherwise, belong together if they
    are the only ones of their kind, depth and width that are left.
    """
    by_place = {plan.place: plan for plan in theirs}
    renamed = _renamed(ours, theirs)
    pairs, missing = [], []
    for plan in ours:
        place = plan.place
        called = place._replace(stack=renamed.get(place[:2], place.stack))
        if called in by_place:
            pairs.append((plan, by_place.pop(called)))
        else:
            missing.append(place)
    return pairs, tuple(missing), tuple(by_place)


def _renamed(
    ours: Sequence[AttentionPlan], theirs: Sequence[AttentionPlan]
) -> dict[tuple[str, str], str]:
    """What a stack and kind of the first side is called by the second, where names differ."""

    def groups(plans: Sequence[AttentionPlan]) -> dict[tuple[str, str], tuple[Any, ...]]:
        found: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for plan in plans:
            size = plan.layer, plan.query.heads * plan.query.head_width
            found.setdefault((plan.stack, plan.kind), []).append(size)
        return {key: (key[1], *sorted(sizes)) for key, sizes in found.items()}

    first, second = groups(ours), groups(theirs)
    left = {key: size for key, size in first.items() if key not in second}
    right = {key: size for key, size in second.items() if key not in first}
    fitting = {key: [o for o, same in right.items() if same == size] for key, size in left.items()}
    alone = [key for key, size in left.items() if list(left.values()).count(size) == 1]
    return {key: fitting[key][0][0] for key in alone if len(fitting[key]) == 1}


def _chosen(
    pairs: list[Pair],
    missing: tuple[Place, ...],
    added: tuple[Place, ...],
    layers: Collection[int] | None,
) -> tuple[list[Pair], tuple[Place, ...], tuple[Place, ...]]:
    """The blocks of these layers; negative numbers count from a stack's last one."""
    if layers is None:
        return pairs, missing, added
    require_list("layers", layers, [0, -1])
    places = [*(ours.place for ours, _ in pairs), *missing, *added]
    last = {one[:2]: one.layer for one in sorted(places, key=lambda one: one.layer)}
    numbers = {one: {one.layer, one.layer - last[one[:2]] - 1} for one in places}
    wanted = {one for one in places if not numbers[one].isdisjoint(layers)}
    chosen = [pair for pair in pairs if pair[0].place in wanted]
    absent = set(layers).difference(*numbers.values())
    if absent or not chosen:
        what = f"no layer {min(absent)}" if absent else "no layer was chosen"
        raise CheckpointError(f"{what}; layers are numbered from 0 to {max(last.values())}")
    missing, added = (tuple(one for one in some if one in wanted) for some in (missing, added))
    return chosen, missing, added


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


def _sizes(scoring: Scoring) -> str:
    heads, width, dimensions = scoring.query.weight.shape
    groups = len(scoring.key.weight)
    return f"{heads} heads over {groups}, of width {width}, on {dimensions} dimensions"


def _sinks(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> Iterator[Mismatch]:
    """How the scores of virtual keys differ."""
    compared = compare_stored(checkpoints, parts)
    if compared.outcome.same:
        return
    ours, theirs = (c.read([part])[0].ravel() for c, part in zip(checkpoints, parts, strict=True))
    reason = f"other sinks: {compared.reason}"
    if not theirs.any():
        reason = "sinks are all zero"
    elif np.array_equal(np.sort(ours), np.sort(theirs)):
        reason = "sinks lie in the order of other heads"
    facts = {"circuit": "sinks", "tensors": {parts[1].name: "sinks"}}
    yield Mismatch(Kind.SINKS, reason, (Change((parts[1].name,), Take()),), facts=facts)
