"""Whether two checkpoints have the same attention, to check converted or rewritten models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Unpack

import numpy as np

from wqk._console import counted
from wqk._typing import FilePath
from wqk.attention import Block
from wqk.checkpoints import Checkpoint
from wqk.checkpoints.references import HubFolder, check_options
from wqk.comparing import mistakes
from wqk.comparing.blocks import distances
from wqk.comparing.conversions import explain, signature
from wqk.comparing.mistakes import Mismatch
from wqk.comparing.weights import StoredBlock, grid, load_block
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import AttentionPlan
from wqk.families.config import Config
from wqk.model import Model
from wqk.model import open as open_model
from wqk.scanning.cores import one_blas_thread

# Tokens between query and key at which rotary positions are compared: none, one, many.
DISTANCES = (0, 1, 1024)

# Signatures of the same heads have at least this cosine.
ALIKE = 0.99


class Place(NamedTuple):
    """Where a block is."""

    stack: str
    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.stack} {self.kind} {self.layer}"


@dataclass(frozen=True)
class BlockComparison:
    """One block of two checkpoints, under its name in the first."""

    stack: str
    kind: str
    layer: int
    distance: dict[int, float]  # largest ‖M_a(N) − M_b(N)‖ / ‖M_a(N)‖ over heads, by position N
    head: int  # the head in which it is largest
    tolerance: float  # what rounding explains of that head's distance, or what was accepted
    mismatches: tuple[Mismatch, ...]  # how the second block differs; none if they are equal
    heads: tuple[float, ...] = ()  # each head's largest distance; 0 where rounding explains it

    @property
    def same(self) -> bool:
        """Whether the blocks attend the same way."""
        return not self.mismatches

    @property
    def reason(self) -> str:
        """How the blocks differ, as text."""
        return "; ".join(map(str, self.mismatches))

    @property
    def repair(self) -> str:
        """Code that makes the second block like the first, as far as it is known."""
        return "; ".join(one.repair for one in self.mismatches if one.repair)


@dataclass(frozen=True)
class Cause:
    """A mismatch, and the blocks that have it."""

    mismatch: Mismatch
    places: tuple[Place, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return self.mismatch.to_dict() | {"blocks": [place._asdict() for place in self.places]}


@dataclass(frozen=True)
class CheckpointComparison:
    """Two checkpoints, block by block.

    Attributes
    ----------
    checkpoint, other
        Their names.
    blocks
        Those that both have, in the first checkpoint's order.
    missing, added
        Blocks that only the first one has, and only the second.
    notes
        What was not compared, or is known of the numbers: rounded values in a wider type, guesses.
    """

    checkpoint: str
    other: str
    blocks: tuple[BlockComparison, ...]
    missing: tuple[Place, ...] = ()
    added: tuple[Place, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether both have the same blocks, and every block attends the same way."""
        return not (self.missing or self.added) and all(block.same for block in self.blocks)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What is wrong, each once with the blocks that have it; the most frequent first."""
        found: dict[tuple[str, str, str], list[tuple[Mismatch, Place]]] = {}
        for block in self.blocks:
            for one in block.mismatches:
                place = Place(block.stack, block.kind, block.layer)
                # Distances and factors differ from layer to layer.
                reason = one.reason if one.repair else one.verdict
                found.setdefault((one.verdict, reason, one.repair), []).append((one, place))
        causes = [Cause(some[0][0], tuple(place for _, place in some)) for some in found.values()]
        return tuple(sorted(causes, key=lambda cause: -len(cause.places)))

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        count = len(self.blocks)
        differing = [block for block in self.blocks if not block.same]
        parts = [
            f"{counted(len(places), 'block')} only in {name}"
            for places, name in ((self.missing, self.checkpoint), (self.added, self.other))
            if places
        ]
        if differing:
            first = self.causes[0].mismatch
            known = first.reason if first.repair else first.verdict
            sizes = [max(block.distance.values()) for block in differing]
            spread = f"{min(sizes):.2g} to {max(sizes):.2g}"
            if max(sizes) <= 2 * min(sizes):
                spread = f"up to {max(sizes):.2g}"
            verdict = (
                f"{len(differing)} of {count} blocks differ: {known} (relative distance {spread})"
            )
            return "; ".join([f"Not the same: {verdict}", *parts]) + "."
        if parts:
            equal = f"{counted(count, 'common block')} {'is' if count == 1 else 'are'} equal"
            return "; ".join([f"Not the same: {equal}", *parts]) + "."
        largest = max((max(b.distance.values()) for b in self.blocks), default=0.0)
        allowed = max((b.tolerance for b in self.blocks), default=0.0)
        return (
            f"The same attention in all {count} blocks: heads lie at most {largest:.1e} apart, "
            f"relative to their norm; the rounding of stored numbers explains {allowed:.1e}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        blocks = [
            asdict(block)
            | {"same": block.same, "mismatches": [m.to_dict() for m in block.mismatches]}
            for block in self.blocks
        ]
        return {
            "checkpoint": self.checkpoint,
            "other": self.other,
            "same": self.same,
            "sentence": self.sentence,
            "causes": [cause.to_dict() for cause in self.causes],
            "missing": [place._asdict() for place in self.missing],
            "added": [place._asdict() for place in self.added],
            "notes": list(self.notes),
            "blocks": blocks,
        }


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
    on_progress: Callable[[int, int], None] | None = None,
    **hub: Unpack[HubFolder],
) -> CheckpointComparison:
    """Compare the attention of two checkpoints of one model, whatever their families and layouts.

    Exact, from the weights: no model is run. Changes that leave attention unchanged are ignored:
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
    marks: tuple[dict[Place, np.ndarray], dict[Place, np.ndarray]] = ({}, {})
    rounded: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for pair in pairs:
        # Products of single heads are too small for several threads.
        with one_blas_thread():
            stored = _read(checkpoints, pair, rounded)
            blocks.append(_compare(checkpoints, pair, stored, tolerance))
            for mark, block in zip(marks, stored, strict=True):
                mark[_place(pair[0])] = signature(block.scoring).astype(np.float32)
            del stored, block  # before the next pair is read
        if on_progress:
            on_progress(len(blocks), len(pairs))
    blocks = _other_layers(blocks, *marks)
    for checkpoint, grids in zip(checkpoints, rounded, strict=True):
        notes += [f"{checkpoint.name}: {text}" for text in grids]
    return CheckpointComparison(
        checkpoints[0].name, checkpoints[1].name, tuple(blocks), missing, added, tuple(notes)
    )


Pair = tuple["AttentionPlan", "AttentionPlan"]


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
    guessed = sorted({plan.family for pair in pairs for plan in pair if plan.rule.guess})
    if not guessed:
        return []
    return [
        "not compared, because a family was guessed from tensor names and does not know them: "
        "mask, window, rotary positions, the score's scale, and norms that one side leaves open"
    ]


def _read(
    checkpoints: Sequence[Checkpoint], pair: Pair, rounded: tuple[Counter[str], Counter[str]]
) -> tuple[StoredBlock, StoredBlock]:
    """Both blocks, in the same terms: what one of them does not know is the other's."""
    guessed = [bool(plan.rule.guess) for plan in pair]
    fed = [any(side.input_norm for side in (plan.query, plan.key)) for plan in pair]
    # A guess may miss a norm; where names are known, one that is not there is folded in.
    guesses = any(plan.rule.guess and plan.family == "inferred" for plan in pair)
    norms = [all(fed)] * 2 if guesses else fed
    known: list[dict[str, Any]] = [{}, {}]
    for number, other in enumerate(reversed(pair)):
        if guessed[number]:
            known[number] = {
                "scale": other.scale,
                "rotary": other.rotary or other.axial,
                "key_bias": other.rotary is not None,
            }
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
    settings = (*_settings(*pair), *_untold(checkpoints, pair))
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


def _other_layers(
    blocks: Sequence[BlockComparison],
    ours: dict[Place, np.ndarray],
    theirs: dict[Place, np.ndarray],
) -> list[BlockComparison]:
    """The blocks, with those that are not explained looked for among the other layers."""
    unexplained = {"no known mistake", "different weights", "close"}
    found: dict[int, Place] = {}
    for number, block in enumerate(blocks):
        if not any(one.verdict in unexplained for one in block.mismatches):
            continue
        here = theirs[Place(block.stack, block.kind, block.layer)]
        for place, mark in ours.items():
            is_own = place.layer == block.layer or place[:2] != (block.stack, block.kind)
            if not is_own and mark.shape == here.shape:
                cosines = np.einsum("hp,hp->h", mark, here)
                if (cosines > ALIKE).all():
                    found[number] = place
                    break
    taken = Counter(found.values())
    equal = {Place(b.stack, b.kind, b.layer) for b in blocks if b.same}
    result = list(blocks)
    for number, place in found.items():
        tied = taken[place] > 1 or place in equal
        named = mistakes.another_layer(blocks[number].layer, place.layer, tied)
        rest = [m for m in blocks[number].mismatches if m.verdict not in unexplained]
        result[number] = replace(blocks[number], mismatches=(named, *rest))
    return result


def _settings(a: AttentionPlan, b: AttentionPlan) -> Iterator[Mismatch]:
    """The terms of the score besides the form that differ, as far as both are known."""

    def of(plan: AttentionPlan) -> dict[str, Any]:
        return {
            "mask": "causal" if plan.causal else "none",
            "window": plan.window,
            "softcap": plan.softcap,
            "limit of queries and keys": plan.clip,
            "positions added to the score": plan.position or None,
            "norm of queries": plan.query.norm.kind if plan.query.norm else None,
            "norm of keys": plan.key.norm.kind if plan.key.norm else None,
            "sinks": "learned" if plan.sinks else None,
        }

    if not (a.rule.guess or b.rule.guess):
        theirs = of(b)
        keys = {
            "window": (*a.rule.window, "layer_types"),
            "softcap": (a.rule.softcap,),
            "limit of queries and keys": (a.rule.clip,),
        }
        for name, value in of(a).items():
            if value != theirs[name]:
                own = filter(None, keys.get(name, ()) if a.family == b.family else ())
                repair = "; ".join(f'config["{key}"] = original["{key}"]' for key in own)
                yield mistakes.setting(name, value, theirs[name], repair)


def _untold(checkpoints: Sequence[Checkpoint], pair: Pair) -> Iterator[Mismatch]:
    """Numbers of heads, and their width, that one configuration of two alike does not have.

    The shapes of the weights still tell them here; other programs may take a default. A file
    without any configuration lacks nothing of one.
    """
    if any(not set(checkpoint.config) - {"model_type"} for checkpoint in checkpoints):
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
