"""Why a block differs: repairs of its settings and stored weights, applied, and compared again.

What the first checkpoint holds is written in the second one's layout, which is what the second
should hold: so blocks are compared in the terms of the family, and mended in those of the file.
`rewrites.search` proposes; a repair counts if the block with it is the same.

Where stored weights tell nothing, forms alone do, whatever each head's own coordinates: the heads
of one block are searched for among the other's, every query head with every key head, up to a
factor, and a match is confirmed by the exact distance. So an order of heads, a pairing, a factor or
a rotation is found even where heads were also turned.

Axes: H query heads, G key heads, R head width, P probes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from wqk._machine import side_by_side
from wqk.checkpoints import Checkpoint
from wqk.checkpoints.checkpoint import Overlay
from wqk.families import AttentionPlan, Projection
from wqk.families.rotary import Rotary
from wqk.model import Model
from wqk.sameness import mismatches
from wqk.sameness.blocks import (
    MANY,
    Distances,
    InnerProducts,
    Match,
    Scoring,
    distances,
    fitted,
    inner_products,
    same_rotation,
)
from wqk.sameness.configured import form_restored, other_rotary, rotary_repaired
from wqk.sameness.contents import equal_parts
from wqk.sameness.expected import Expected
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.rewrites import search
from wqk.sameness.tolerances import ALIKE_FORMS, SAME
from wqk.sameness.units import Finding
from wqk.sameness.weights import (
    SCORES,
    VALUES,
    Pair,
    circuit_parts,
    rotation_of,
    scorings,
    sides_of,
)

# -- heads found by their forms ----------------------------------------------------------------


class Apart(NamedTuple):
    """A circuit of two blocks that differs: how far, and how forms alone explain it."""

    distances: Distances
    # The changes after which the second is the first; None if some head is not among its.
    explained: tuple[Mismatch, ...] | None


def _explained(
    a: Scoring, b: Scoring, match: Match, products: Sequence[InnerProducts], far: Distances
) -> tuple[Mismatch, ...] | None:
    """The changes after which b is a, if its heads are these; the products are those of `match`."""
    own, across, theirs = products
    turnings = [b.turning]
    if b.turning is not None:
        other = {"half": "interleaved", "interleaved": "half"}
        turnings.append(replace(b.turning, order=other[b.turning.order]))
    for turning in turnings:
        turned = (
            own,
            across._replace(rotary=(a.turning, turning)),
            theirs._replace(rotary=(turning, turning)),
        )
        factors, left = fitted(a, b, turned)
        allowed = np.maximum(left.tolerance, far.tolerance)
        if factors.all() and (left.relative <= allowed).all():
            return tuple(_named(a, b, match, turning, factors))
    return None


def signature(scoring: Scoring) -> np.ndarray:
    """Scores of random probes by every head, (H, P²) of norm 1: a short mark of its form."""
    query, key = scoring.probes
    probed = _probed(query, key[scoring.own.key_heads])
    return probed.reshape(len(probed), -1)


def _named(
    a: Scoring, b: Scoring, match: Match, rotary: Rotary | None, factors: np.ndarray
) -> Iterator[Mismatch]:
    query_heads, key_heads = match
    if not np.array_equal(b.own.key_heads[query_heads], key_heads):
        yield mismatches.pairing(query_heads, key_heads, len(b.key.weight))
    elif not np.array_equal(query_heads, np.arange(len(query_heads))):
        yield mismatches.head_order(query_heads)
    if not same_rotation(rotary, b.turning):
        yield Mismatch(Kind.ROTARY, other_rotary(rotary, b.turning))
    if (factors != 1).any():
        yield mismatches.scaled([float(f) for f in 1 / factors], a.width)


def matched(a: Scoring, b: Scoring) -> Match | None:
    """The pair of b's heads most like each of a's heads at distance 0, by random probes."""
    heads = np.arange(len(a.query.weight))
    ours, theirs = signature(a), _probed(b.probes[0][:, None], b.probes[1][None])
    ours = ours.reshape(len(heads), *theirs.shape[2:])
    cosines = np.abs(np.einsum("hij,qkij->hqk", ours, theirs))
    # Pruned heads, whose scores are zero, are alike.
    silent, theirs_silent = ((some == 0).all(axis=(-2, -1)) for some in (ours, theirs))
    cosines[silent[:, None, None] & theirs_silent] = 1
    # Among equal heads, each is its own best match and keeps its own key.
    cosines[heads, heads] += 1e-6
    cosines[:, heads, b.own.key_heads] += 2e-6
    flat = cosines.reshape(len(heads), -1)
    if (flat.max(axis=1) <= ALIKE_FORMS).any():
        return None
    return Match(*np.divmod(flat.argmax(axis=1), len(b.key.weight)))


def _probed(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Scores of probes, (..., P, P), from projected probes (..., R, P); of norm 1 or 0."""
    scores = query.swapaxes(-1, -2).astype(np.float64) @ key
    norms = np.linalg.norm(scores, axis=(-2, -1), keepdims=True)
    return np.asarray(scores / np.where(norms > 0, norms, 1.0))


# -- repairs -----------------------------------------------------------------------------------


def compare(
    checkpoints: Sequence[Checkpoint], pair: Pair, tolerance: float, circuits: Sequence[str]
) -> dict[str, Apart]:
    """The circuits of two blocks that differ, by name."""
    found: dict[str, Apart] = {}
    for circuit in circuits:
        is_local = checkpoints[0].bytes_fetched is None  # others fetch whole weights at once
        same = is_local and identical(checkpoints, pair, circuit, numbers=True)
        both = None if same else scorings(checkpoints, pair, circuit)
        if both is not None and comparable(*both):
            one = measure(*both, tolerance)
            found |= {} if one.distances.agree else {circuit: one}
    return found


def measure(a: Scoring, b: Scoring, tolerance: float) -> Apart:
    """How far two circuits are apart, and where they differ what in their forms may explain it."""
    products = inner_products(a, b, b.own)
    side_by_side(attrgetter("probes"), (a, b), many=a.query.weight.size > MANY)  # which are kept
    far = distances(a, b, products, tolerance)
    match = None if far.agree else matched(a, b)
    if match is None:
        return Apart(far, None)
    if not all(map(np.array_equal, match, b.own)):
        products = inner_products(a, b, match)
    return Apart(far, _explained(a, b, match, products, far))


def identical(
    checkpoints: Sequence[Checkpoint], pair: Pair, circuit: str, *, numbers: bool = False
) -> bool:
    """Whether a circuit is planned alike and stored as the same bytes, which costs only reading.

    With ``numbers``, or as the same numbers.
    """
    parts = [list(dict.fromkeys(circuit_parts(plan, circuit))) for plan in pair]
    texts = [repr((sides_of(p, circuit), p.scale if circuit != VALUES else 1.0)) for p in pair]
    for number, both in enumerate(zip(*parts, strict=False)):
        texts = [
            text.replace(repr(part.name), f"#{number}")
            for text, part in zip(texts, both, strict=True)
        ]
    return (
        texts[0] == texts[1]
        and same_rotation(*(rotation_of(plan, circuit) for plan in pair))
        and all(equal_parts(checkpoints, both, numbers) for both in zip(*parts, strict=True))
    )


def comparable(a: Scoring, b: Scoring) -> bool:
    """Whether two blocks' forms have the same number of heads, and act on the same spaces."""
    return a.query.weight.shape == b.query.weight.shape and (
        a.key.weight.shape[1:] == b.key.weight.shape[1:]
    )


def diagnose(
    models: Sequence[Model],
    pair: Pair,
    neighbors: Sequence[AttentionPlan],
    tolerance: float,
    circuits: Sequence[str],
    measured: Mapping[str, Apart],
) -> tuple[Mismatch, ...]:
    """How the second of two blocks that differ was changed, in as few words as possible.

    ``neighbors`` are the first model's other blocks whose weights the second may hold, ``circuits``
    those to explain, of which the others than those ``measured`` are the same.
    """
    checkpoints = [model.checkpoint for model in models]
    means = _averaged(pair, checkpoints)
    if means is not None:
        return (means,)
    found: list[tuple[tuple[int, int], tuple[Mismatch, ...]]] = []
    for form in [*filter(None, [form_restored(models, pair)]), None]:
        plan = form[1] if form else pair[1]
        turned = rotary_repaired(models, (pair[0], plan))
        plan = replace(plan, rotary=turned[1].rotary, axial=turned[1].axial) if turned else plan
        settings = [one[0] for one in (form, turned) if one]
        found += _explanations(
            checkpoints, (pair[0], plan), neighbors, tolerance, circuits, measured, settings
        )
        best = min(found, key=lambda one: one[0])
        if best[0] == (0, len(settings)):
            break
    return best[1]


def _explanations(
    checkpoints: Sequence[Checkpoint],
    pair: Pair,
    neighbors: Sequence[AttentionPlan],
    tolerance: float,
    circuits: Sequence[str],
    measured: Mapping[str, Apart],
    settings: Sequence[Mismatch],
) -> Iterator[tuple[tuple[int, int], tuple[Mismatch, ...]]]:
    """What may be said once these settings are right: what of it explains nothing, and how much."""
    layout = Expected(checkpoints, pair)

    def left_after(some: Sequence[Finding]) -> dict[str, Apart]:
        values = layout.added | {
            name: layout.stored(name, value) for one in some for name, value in one.repaired.items()
        }
        second = Overlay(checkpoints[1], values) if values else checkpoints[1]
        changed = [
            what
            for what in circuits
            if settings
            or what in measured
            or any(part.name in values for part in circuit_parts(layout.plan, what))
        ]
        if not (values or settings):
            return {what: measured[what] for what in changed}
        return compare((checkpoints[0], second), (pair[0], layout.plan), tolerance, changed)

    for some in _attempts(layout, neighbors, bool(settings)):
        left = left_after(some)
        for one in some if len(some) > 1 else ():
            fewer = [each for each in some if each is not one]
            some = fewer if left_after(fewer).keys() <= left.keys() else some
        rest = tuple(_rest(left, layout.plan))
        found = (*(one.mismatch for one in some), *settings, *rest)
        yield (sum(one.unexplained for one in rest), len(found)), found
        if not left and len(found) == 1:
            break
    layout.units.clear()  # each holds this list, and so their weights


def _rest(left: Mapping[str, Apart], plan: AttentionPlan) -> Iterator[Mismatch]:
    """What the forms alone tell of circuits that differ, or how far apart they are."""
    for circuit, apart in left.items():
        far = [some.max(axis=0) for some in (apart.distances.relative, apart.distances.shares)]
        for one in apart.explained or (mismatches.unexplained(*far),):
            tensors = {plan.query.tensor: "query", plan.key.tensor: "key"}
            if plan.query.bias is not None and one.verdict is Kind.SCALED and one.repair:
                tensors[plan.query.bias.name] = "bias of the query"
                one = replace(one, repair=f"{one.repair}; {one.repair.replace('w_q', 'b_q')}")
            facts = {"tensors": tensors, **one.facts}
            yield replace(one, facts=facts) if circuit == SCORES else beside(circuit, one)


def beside(circuit: str, one: Mismatch) -> Mismatch:
    """A mismatch of another circuit than the scores, such as values and outputs."""
    facts = {"circuit": circuit, **one.facts}
    return replace(one, reason=f"{circuit}: {one.reason}", repair="", sides=(), facts=facts)


def _attempts(
    layout: Expected, neighbors: Sequence[AttentionPlan], settings: bool
) -> Iterator[list[Finding]]:
    """Findings that may together make the blocks the same: all, those of weights alone, or none."""
    if settings:
        yield []
    found = search(layout.units, lambda unit: layout.elsewhere(unit, neighbors))
    kinds = {one.said.verdict for one in found}
    if (
        not settings
        and kinds == {Kind.SCALED}
        and {one.unit.role for one in found} <= {"query", "key"}
        and any(unit.role == "query" for unit in layout.units)  # in a tensor of their own
    ):
        yield []  # scores tell a factor of queries and keys together
    yield found
    weights = [one for one in found if one.said.verdict not in (Kind.BIASES, Kind.NORM)]
    if len(weights) < len(found):
        yield weights
    if len(found) > 1 and Kind.NORM in kinds:
        yield layout.folded()
    if found and not settings:
        yield []


def _averaged(pair: Pair, checkpoints: Sequence[Checkpoint]) -> Mismatch | None:
    """Key and value heads that are means of several of the first block's."""
    for name in ("key", "value"):
        sides = [getattr(plan, name) for plan in pair]
        if None in sides or any(not isinstance(s.projection, Projection) for s in sides):
            return None
        if sides[0].heads % sides[1].heads or sides[0].heads == sides[1].heads:
            return None
        first, second = (
            side.projection.take(checkpoint.read([side.projection.part])[0])
            for side, checkpoint in zip(sides, checkpoints, strict=True)
        )
        means = first.reshape(len(second), -1, *first.shape[1:]).mean(axis=1)
        if means.shape != second.shape or not np.allclose(means, second, atol=SAME * means.std()):
            return None
    counts = pair[0].key.heads, pair[1].key.heads
    reason = f"{counts[0]} key and value heads were averaged to {counts[1]}, which loses them"
    keys = pair[1].rule.key_heads
    repair = f'w = original; config["{keys[0]}"] = {counts[0]}' if keys else "w = original"
    return Mismatch(Kind.AVERAGED, reason, repair, ("key",))
