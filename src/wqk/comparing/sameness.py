"""Whether two checkpoints have the same attention, to check converted or rewritten models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import numpy as np

from wqk._typing import FilePath
from wqk.attention import Block
from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.quantized import is_left_plain
from wqk.checkpoints.references import HubFolder, check_options
from wqk.comparing import mistakes
from wqk.comparing.answer import BlockComparison, CheckpointComparison, Place
from wqk.comparing.blocks import Scoring, as_exact_as, distances, same_rotation
from wqk.comparing.circuits import VALUES, comparable, other_circuits
from wqk.comparing.contents import compare_stored, paired_names
from wqk.comparing.conversions import explain, explained, signature
from wqk.comparing.diagnosis import averaged, diagnose, rotary_repaired, setting_repaired, terms
from wqk.comparing.mistakes import Mismatch
from wqk.comparing.outside import absent_towers, outside
from wqk.comparing.rewrites import short
from wqk.comparing.weights import StoredBlock, grid, load_block
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import AttentionPlan
from wqk.families.config import Config
from wqk.model import Model
from wqk.model import open as open_model
from wqk.scanning.cores import one_blas_thread

# Tokens between query and key at which rotary positions are compared: none, one, many.
DISTANCES = (0, 1, 1024)

# Signatures of the same heads have at least this cosine; those of quantized ones less, by twice the
# square of what rounding explains of their distance, but never less than the second.
ALIKE, LEAST_ALIKE = 0.99, 0.8

# From this share of what quantization explains on, columns are looked for in other groups.
SUSPECT = 0.5


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
        Whether every other tensor is compared too: under its name, or found by what it holds.
    up_to
        Freedoms of the model that do not count: ``heads``, their order, where scores, values and
        outputs agree on it.
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
    if unknown := sorted(set(up_to) - {"heads"}):
        raise CheckpointError(f"up_to: expected heads, got {', '.join(unknown)}")
    openings: list[dict[str, Any]] = [
        {"ref": one, "family": file, "revision": revision, **hub}
        for one, file, revision in zip((ref, other), (family, other_family), revisions, strict=True)
    ]
    models, notes = _opened(openings, heads_per_layer, key_heads)
    checkpoints = [model.checkpoint for model in models]
    pairs, missing, added = _paired(*(model.plans for model in models))
    if not pairs:
        first, second = (", ".join(map(str, one[:3])) for one in (missing, added))
        raise CheckpointError(
            f"{checkpoints[0].name} and {checkpoints[1].name} have no attention block in common: "
            f"one has {first}, …; the other {second}, …"
        )
    pairs, missing, added = _chosen(pairs, missing, added, layers)
    notes += _unknown(pairs)
    blocks: list[BlockComparison] = []
    marks: tuple[dict[Place, Marks], dict[Place, Marks]] = ({}, {})
    rounded: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    tables = [checkpoint.tensors() for checkpoint in checkpoints]
    names = paired_names(tables[0], tables[1], (pairs[0][0].query.tensor, pairs[0][1].query.tensor))
    for pair in pairs:
        # Products of single heads are too small for several threads.
        with one_blas_thread():
            stored = _read(checkpoints, pair, rounded)
            compared = _compare(checkpoints, pair, stored, tolerance)
            for mark, block in zip(marks, stored, strict=True):
                mark[_place(pair[0])] = {SCORES: signature(block.scoring).astype(np.float32)}
            folds = [block.norms for block in stored]
            del stored, block  # before the values are read
            here = [mark[_place(pair[0])] for mark in marks]
            compared = _with_circuits(checkpoints, pair, folds, compared, here, tolerance)
            if "heads" in up_to and (order := _order_of_heads(compared)) is not None:
                notes.append(f"{_place(pair[0])}: heads in the order {mistakes.listed(order)}")
                compared = replace(compared, mismatches=(), heads=())
            blocks.append(_diagnosed(models, pair, pairs, names, compared, tolerance))
        if on_progress:
            on_progress(len(blocks), len(pairs))
    blocks = _other_layers(blocks, *marks)
    for checkpoint, grids in zip(checkpoints, rounded, strict=True):
        notes += [f"{checkpoint.name}: {text}" for text in grids]
    rest = outside(models, pairs, blocks, everything, layers, tolerance)
    notes += absent_towers(models)
    return CheckpointComparison(
        checkpoints[0].name, checkpoints[1].name, tuple(blocks), missing, added, tuple(notes),
        *rest, tolerance, _quantized(pairs),
    )  # fmt: skip


def _quantized(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """How forms are stored with few bits in one of two models, and not in the other."""
    stored = [{kind for pair in pairs for kind in pair[n].quantized} for n in (0, 1)]
    return tuple(sorted(stored[0] ^ stored[1]))


def _order_of_heads(block: BlockComparison) -> tuple[int, ...] | None:
    """The one order of heads in which scores, values and outputs are the same; None without one."""
    found = {one.facts.get("circuit", SCORES): one for one in block.mismatches}
    verdicts = {one.facts.get("verdict", one.verdict) for one in block.mismatches}
    orders = {one.heads for one in block.mismatches}
    is_whole = found.keys() == {SCORES, *block.beside} and len(found) == len(block.mismatches)
    return orders.pop() if is_whole and verdicts == {mistakes.HEADS} and len(orders) == 1 else None


def _diagnosed(
    models: Sequence[Model], pair: Pair, pairs: Sequence[Pair], names: dict[str, str],
    block: BlockComparison, tolerance: float,
) -> BlockComparison:  # fmt: skip
    """The block with what its settings and stored weights tell, where a repair makes it the same.

    Every repair is applied, and the block compared again, before it is said.
    """
    checkpoints = [model.checkpoint for model in models]

    def compare(other: Checkpoint, plan: AttentionPlan) -> tuple[Mismatch, ...]:
        both, plans = (checkpoints[0], other), (pair[0], plan)
        stored = _read(both, plans, (Counter({"": 1}), Counter({"": 1})))
        scores = _compare(both, plans, stored, tolerance)
        folds = [some.norms for some in stored]
        return _with_circuits(both, plans, folds, scores, ({}, {}), tolerance).mismatches

    if any(plan.rule.guess for plan in pair):
        return block
    repaired = (setting_repaired(models, pair, one) for one in block.mismatches)
    block = replace(block, mismatches=tuple(repaired))
    if block.same:
        # Scales of groups are alike, so that a wrong order of columns may hide behind rounding.
        suspect = max(block.distance.values()) > SUSPECT * block.tolerance
        if suspect and checkpoints[1].regrouping(Part(pair[1].query.tensor, ((0, 1),))):
            seen = diagnose(checkpoints, pair, names, (), lambda o: compare(o, pair[1])) or ()
            moved = tuple(one for one in seen if one.facts.get("cause") == "groups")
            return replace(block, mismatches=moved)
        return block
    found: tuple[Mismatch, ...] = ()
    left, plan = block.mismatches, pair[1]
    unknown = any(one.rotation_unknown for one in pair)
    exact = as_exact_as(pair[0].rotary, plan.rotary)
    differs = not (unknown or same_rotation(pair[0].rotary, exact))
    rotary = rotary_repaired(models, pair) if differs else None
    if rotary is not None:
        rest = compare(checkpoints[1], rotary[1])
        if len(rest) < len(left) or any(one.is_vague for one in left):
            found, left, plan = (rotary[0],), rest, rotary[1]
    circuits = {one.facts.get("circuit") for one in left}
    if VALUES in circuits or any(one.is_vague for one in left):
        blocks = [Block(c, p) for c, p in zip(checkpoints, pair, strict=True)]
        means = averaged(pair, *blocks)
        neighbors = [
            p for p, _ in pairs
            if p is not pair[0] and (p.layer, p.stack) == (pair[0].layer, pair[0].stack)
        ]  # fmt: skip
        causes = (
            (means,)
            if means
            else diagnose(
                checkpoints, (pair[0], plan), names, neighbors, lambda other: compare(other, plan)
            )
        )
        left = left if causes is None else causes
    return replace(block, mismatches=(*found, *left))


Pair = tuple["AttentionPlan", "AttentionPlan"]
# Signatures of a block's circuits, by their names.
Marks = dict[str, np.ndarray]
SCORES = "attention"


def _opened(
    openings: Sequence[dict[str, Any]], heads: int | None, key_heads: int | None
) -> tuple[list[Model], list[str]]:
    """Both models; one that does not tell its heads has those given, or the other's."""
    models: list[Model | None] = []
    failed: list[Exception] = []
    for opening in openings:
        try:
            models.append(open_model(**opening))
        except (CheckpointError, UnknownFamily) as error:
            models.append(None)
            failed.append(error)
    if len(failed) == 2 and heads is None:
        raise failed[0]
    notes: list[str] = []
    for number, opening in enumerate(openings):
        if models[number] is not None:
            continue
        counts, told, known = (heads, key_heads), "as given", models[1 - number]
        if heads is None and known is not None:
            plan = known.plans[0]
            counts = plan.query.heads, plan.key.heads
            told = f"as in {known.name}"
            if counts[0] == counts[1]:
                counts = counts[0], None
        try:
            model = open_model(**opening, heads_per_layer=counts[0], key_heads=counts[1])
        except (CheckpointError, UnknownFamily):
            raise failed[0] from None
        config = model.checkpoint.config
        if heads is None and "model_type" in config and _is_configured(config):
            raise failed[0]  # transformers would fill in a number, and it is the wrong one
        models[number] = model
        notes.append(
            f"{model.name} does not tell its number of heads: {counts[0]} query heads, {told}"
        )
    return [model for model in models if model is not None], notes


def _place(plan: AttentionPlan) -> Place:
    return Place(plan.stack, plan.kind, plan.layer)


def _paired(
    ours: Sequence[AttentionPlan], theirs: Sequence[AttentionPlan]
) -> tuple[list[Pair], tuple[Place, ...], tuple[Place, ...]]:
    """Blocks of the same stack, kind and layer; and those of either that have no partner.

    Stacks whose name only one side has, as a guess calls them otherwise, belong together if they
    are the only ones of their kind, depth and width that are left.
    """
    by_place = {_place(plan): plan for plan in theirs}
    renamed = _renamed(ours, theirs)
    pairs, missing = [], []
    for plan in ours:
        place = _place(plan)
        called = renamed.get((place.stack, place.kind), place.stack)
        partner = by_place.pop(place._replace(stack=called), None)
        if partner is None:
            missing.append(place)
        else:
            pairs.append((plan, partner))
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
    renamed = {}
    for key, size in left.items():
        fitting = [other for other, same in right.items() if same == size]
        if len(fitting) == 1 and list(left.values()).count(size) == 1:
            renamed[key] = fitting[0][0]
    return renamed


def _chosen(
    pairs: list[Pair],
    missing: tuple[Place, ...],
    added: tuple[Place, ...],
    layers: Collection[int] | None,
) -> tuple[list[Pair], tuple[Place, ...], tuple[Place, ...]]:
    """The blocks of these layers; negative numbers count from a stack's last one."""
    if layers is None:
        return pairs, missing, added
    last: dict[tuple[str, str], int] = {}
    for place in (*(_place(ours) for ours, _ in pairs), *missing, *added):
        key = place.stack, place.kind
        last[key] = max(last.get(key, 0), place.layer)

    def wanted(place: Place) -> bool:
        depth = last[place.stack, place.kind] + 1
        return any(place.layer == (n if n >= 0 else n + depth) for n in layers)

    chosen = [pair for pair in pairs if wanted(_place(pair[0]))]
    if not chosen:
        raise CheckpointError(
            f"no layer {', '.join(map(str, layers))}; layers are numbered from 0 to "
            f"{max(last.values())}"
        )
    return chosen, tuple(filter(wanted, missing)), tuple(filter(wanted, added))


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


def _read(
    checkpoints: Sequence[Checkpoint], pair: Pair, rounded: tuple[Counter[str], Counter[str]]
) -> tuple[StoredBlock, StoredBlock]:
    """Both blocks, in the same terms: what one of them does not know is the other's."""
    guessed = [bool(plan.rule.guess) for plan in pair]
    fed = [any(side.input_norm for side in (plan.query, plan.key)) for plan in pair]
    # A guess may miss a norm; where names are known, one that is not there is folded in.
    guesses = any(plan.rule.guess and not plan.rule.input_norm for plan in pair)
    norms = [all(fed)] * 2 if guesses else fed
    known: list[dict[str, Any]] = [{}, {}]
    if any(plan.rotation_unknown for plan in pair):
        # Rows may lie in any order of rotary pairs: they are compared at distance 0 alone.
        known = [{"rotary": None, "key_bias": any(plan.rotary for plan in pair)} for _ in pair]
    elif pair[1].rotary is not None:
        known[1] = {"rotary": as_exact_as(pair[0].rotary, pair[1].rotary)}
    for number, other in enumerate(reversed(pair)):
        if guessed[number]:
            known[number] |= {"scale": other.scale}
    blocks = [Block(c, plan) for c, plan in zip(checkpoints, pair, strict=True)]
    for block, notes in zip(blocks, rounded, strict=True):
        _note_grid(block, notes)
    first, second = (
        load_block(block, norms=fold, **given)
        for block, fold, given in zip(blocks, norms, known, strict=True)
    )
    return first, second


def _note_grid(block: Block, notes: Counter[str]) -> None:
    """Count weights whose values lie on the grid of a narrower type than they are stored in."""
    if notes:  # one block tells
        return
    plan = block.plan
    dtype = block.checkpoint.info(plan.query.tensor).dtype
    if dtype not in ("F64", "F32", "F16"):
        return
    part = plan.query.projection.roles[""]
    found = grid(dtype, block.read([part])[0])
    if found != dtype:
        words = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
        notes[f"values are rounded to {words[found]}, though stored as {dtype}"] += 1


def _compare(
    checkpoints: Sequence[Checkpoint],
    pair: Pair,
    stored: tuple[StoredBlock, StoredBlock],
    tolerance: float,
) -> BlockComparison:
    a, b = stored
    if a.query.rows.shape != b.query.rows.shape or a.key.rows.shape[1] != b.key.rows.shape[1]:
        sizes = [
            f"{s.query.heads} heads of width {s.query.width} on {s.query.rows.shape[1]} dimensions"
            for s in stored
        ]
        raise CheckpointError(
            f"layer {pair[0].layer} of the {pair[0].stack} has {sizes[0]} in one checkpoint and "
            f"{sizes[1]} in the other; only equal ones can be compared"
        )
    settings = (
        *_settings(*pair),
        *_untold(checkpoints, pair),
        *_misplaced(checkpoints[1], pair[1]),
    )
    at = DISTANCES if a.rotary or b.rotary else DISTANCES[:1]
    place = _place(pair[0])
    if a.query.heads != b.query.heads:
        counts = mistakes.setting(
            "number of heads", f"{a.query.heads} of width {a.query.width}",
            f"{b.query.heads} of width {b.query.width}",
            f'config["num_attention_heads"] = {a.query.heads}',
        )  # fmt: skip
        return BlockComparison(*place, dict.fromkeys(at, float("nan")), 0, 0.0, (counts, *settings))
    measured = distances(a.scoring, b.scoring, at, tolerance)
    worst = measured.worst
    by_head = measured.relative.max(axis=0)
    return BlockComparison(
        *place,
        dict(zip(at, map(float, measured.relative.max(axis=1)), strict=True)),
        worst,
        float(measured.tolerance[worst]),
        (*(() if measured.agree else explain(a, b, at, measured)), *settings),
        tuple(map(float, np.where(by_head > measured.tolerance, by_head, 0.0))),
    )


def _with_circuits(
    checkpoints: Sequence[Checkpoint], pair: Pair, folds: Sequence[bool],
    compared: BlockComparison, marks: Sequence[Marks], tolerance: float,
) -> BlockComparison:  # fmt: skip
    """The comparison with that of values and outputs, scores of positions, and sinks.

    Their signatures are added to the block's ``marks``. What a cause that the scores have shown
    explains, too, is not said again.
    """
    blocks = [Block(c, plan) for c, plan in zip(checkpoints, pair, strict=True)]
    circuits = [other_circuits(b, fold) for b, fold in zip(blocks, folds, strict=True)]
    found, beside = list(compared.mismatches), {}
    heads = np.array(compared.heads or np.zeros(pair[0].query.heads))
    for what in circuits[0].keys() & circuits[1].keys():
        a, b = (some[what] for some in circuits)
        if not comparable(a, b):
            found.append(mistakes.beside(what, mistakes.unlike(_sizes(a), _sizes(b))))
            beside[what] = float("nan")
            continue
        at = DISTANCES if a.rotary or b.rotary else DISTANCES[:1]
        measured = distances(a, b, at, tolerance)
        by_head = measured.relative.max(axis=0)
        beside[what] = float(by_head.max())
        for mark, scoring in zip(marks, (a, b), strict=True):
            mark[what] = signature(scoring).astype(np.float32)
        known = {one.verdict for one in compared.mismatches}
        if mistakes.NORM in known and a.key.norm and b.key.norm:
            with_norm = replace(b, key=replace(b.key, norm=a.key.norm))
            known |= {mistakes.FUSED} if distances(a, with_norm, at, tolerance).agree else set()
        if not measured.agree and mistakes.FUSED not in known:
            causes = explained(a, b, at, measured) or (
                mistakes.unexplained(by_head, measured.tolerance),
            )
            found += [mistakes.beside(what, cause) for cause in causes]
            if len(heads) == len(by_head):
                wrong = np.where(by_head > measured.tolerance, by_head, 0.0)
                heads = np.maximum(heads, wrong)
    parts = pair[0].sinks, pair[1].sinks
    if parts[0] is not None and parts[1] is not None:
        found += _sinks(checkpoints, (parts[0], parts[1]))
    return replace(compared, mismatches=tuple(found), beside=beside, heads=tuple(map(float, heads)))


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
    yield mistakes.other_sinks(reason)


def _other_layers(
    blocks: Sequence[BlockComparison],
    ours: dict[Place, Marks],
    theirs: dict[Place, Marks],
) -> list[BlockComparison]:
    """The blocks, with those that are not explained looked for among the other layers."""
    found: dict[int, Place] = {}
    least: dict[int, float] = {}
    for number, block in enumerate(blocks):
        if any(one.unexplained for one in block.mismatches):
            here = theirs[Place(block.stack, block.kind, block.layer)]
            least[number] = max(LEAST_ALIKE, min(ALIKE, 1 - 2 * block.tolerance**2))
            for place, mark in ours.items():
                is_own = place.layer == block.layer or place[:2] != (block.stack, block.kind)
                if not is_own and _alike(mark, here, SCORES, least[number]):
                    found[number] = place
                    break
    taken = Counter(found.values())
    equal = {Place(b.stack, b.kind, b.layer) for b in blocks if b.same}
    result = list(blocks)
    for number, place in found.items():
        tied, block = taken[place] > 1 or place in equal, blocks[number]
        here = theirs[Place(block.stack, block.kind, block.layer)]
        named = mistakes.another_layer(block.layer, place.layer, tied)
        rest = [
            one
            for one in block.mismatches
            if one.verdict not in mistakes.UNEXPLAINED
            and not _alike(ours[place], here, str(one.facts.get("circuit")), least[number])
        ]
        result[number] = replace(block, mismatches=(named, *rest))
    return result


def _alike(ours: Marks, theirs: Marks, what: str, least: float) -> bool:
    """Whether the heads of two blocks have the same form, by their signatures."""
    first, second = ours.get(what), theirs.get(what)
    if first is None or second is None or first.shape != second.shape:
        return False
    return bool((np.einsum("hp,hp->h", first, second) > least).all())


def _settings(a: AttentionPlan, b: AttentionPlan) -> Iterator[Mismatch]:
    """The terms of the score besides the form that differ, as far as both are known."""
    if not (a.rule.guess or b.rule.guess):
        theirs = terms(b)
        for name, value in terms(a).items():
            if value != theirs[name]:
                yield mistakes.setting(name, value, theirs[name])


def _misplaced(checkpoint: Checkpoint, plan: AttentionPlan) -> Iterator[Mismatch]:
    """Weights that are quantized where the configuration leaves them plain, or the reverse."""
    found: dict[str, list[str]] = {}
    for side in (plan.query, plan.key, plan.value, plan.output):
        for part in side.projection.roles.values() if side is not None else ():
            kind = checkpoint.info(part.name).quantized
            if is_left_plain(checkpoint.config, part.name.removesuffix(".weight")) is bool(kind):
                found.setdefault(kind, []).append(short(part.name))
    for kind, names in found.items():
        yield mistakes.wrongly_quantized(sorted(set(names)), kind)


def _is_configured(config: Mapping[str, Any]) -> bool:
    """Whether a configuration says more than a model's type, which may be known by its tensors."""
    return any(value is not None for key, value in config.items() if key != "model_type")


def _untold(checkpoints: Sequence[Checkpoint], pair: Pair) -> Iterator[Mismatch]:
    """Numbers of heads, and their width, that one configuration of two alike does not have.

    The shapes of the weights still tell them here; other programs may take a default. A file
    without any configuration lacks nothing of one.
    """
    if not all(_is_configured(checkpoint.config) for checkpoint in checkpoints):
        return
    if pair[0].family != pair[1].family or any(plan.rule.guess for plan in pair):
        return
    first, second = (
        Config(checkpoint.config, plan.rule.config)
        for checkpoint, plan in zip(checkpoints, pair, strict=True)
    )
    keys = pair[0].rule.heads, pair[0].rule.key_heads, ("head_dim",)
    for names in keys:
        told = [next((n for n in names if config.get(n) is not None), None) for config in
                (first, second)]  # fmt: skip
        if (told[0] is None) == (told[1] is None):
            continue
        name = told[0] or told[1] or ""
        values = [config.get(name) for config in (first, second)]
        shown = ["not in the configuration" if value is None else value for value in values]
        repair = f'config["{name}"] = {values[0]}' if values[0] is not None else ""
        yield mistakes.setting(name, shown[0], shown[1], repair)
