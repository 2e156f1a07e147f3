"""Why a block differs: repairs of its settings and stored weights, applied, and compared again.

What the first checkpoint holds is written in the second one's layout, which is what the second
should hold: so blocks are compared in the terms of the family, and mended in those of the file.
`wqk.sameness.finders` proposes; the printed code of a repair is run, and counts if the block with
it is the same.

Where stored weights tell nothing, forms alone do, whatever each head's own coordinates: the heads
of one block are searched for among the other's, every query head with every key head, up to a
factor, and a match is confirmed by the exact distance. So an order of heads, a pairing, a factor or
a rotation is found even where heads were also turned.

Axes: H query heads, G key heads, R head width, P probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    HeadMatch,
    ProductsOfPair,
    Scoring,
    distances,
    fitted,
    inner_products,
    same_rotation,
)
from wqk.sameness.configured import form_restored, other_rotary, rotary_repaired
from wqk.sameness.contents import equal_parts
from wqk.sameness.edits import Axes, HeadOrder, Permute, Scale, ScaleHeads, Take
from wqk.sameness.execution import Arrays, run
from wqk.sameness.expected import Expected
from wqk.sameness.finders.all_finders import search
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.missing_tensors import restored
from wqk.sameness.repairs import Change, Setting, Step
from wqk.sameness.tolerances import ALIKE_FORMS, SAME, SAME_FACTOR
from wqk.sameness.weight_pairs import SCORED, Finding
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
    a: Scoring, b: Scoring, match: HeadMatch, products: ProductsOfPair, far: Distances
) -> tuple[Mismatch, ...] | None:
    """The changes after which b is a, if its heads are these; the products are those of `match`."""
    turnings = [b.turning]
    if b.turning is not None:
        other = {"half": "interleaved", "interleaved": "half"}
        turnings.append(replace(b.turning, order=other[b.turning.order]))
    for turning in turnings:
        turned = products._replace(
            across=products.across._replace(rotations=(a.turning, turning)),
            candidate=products.candidate._replace(rotations=(turning, turning)),
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
    a: Scoring, b: Scoring, match: HeadMatch, rotary: Rotary | None, factors: np.ndarray
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


def matched(a: Scoring, b: Scoring) -> HeadMatch | None:
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
    return HeadMatch(*np.divmod(flat.argmax(axis=1), len(b.key.weight)))


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
    texts = [
        repr((sides_of(p, circuit), p.score_scale if circuit != VALUES else 1.0)) for p in pair
    ]
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
    lacking = restored(models, pair)
    if lacking is not None:  # a cause that is known: the rest is what it leaves
        models, pair = (models[0], lacking.model), (pair[0], lacking.plan)
        rest = [model.checkpoint for model in models]
        measured = compare(rest, pair, tolerance, circuits)
        if not measured:
            return ()
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
    plans: Pair,
    neighbors: Sequence[AttentionPlan],
    tolerance: float,
    circuits: Sequence[str],
    measured: Mapping[str, Apart],
    settings: Sequence[Mismatch],
) -> Iterator[tuple[tuple[int, int], tuple[Mismatch, ...]]]:
    """Explanations once these settings are right: each with its rank, and its causes.

    The rank counts the causes that explain nothing, and all causes; the lowest is the best. A cause
    that forms alone explain counts twice if it has no repair.
    """
    block = Expected(checkpoints, plans)

    def left_after(causes: Sequence[Mismatch]) -> dict[str, Apart]:
        """Run the printed repairs of causes; return the circuits that still differ."""
        arrays = {**block.added, **_repaired(block, causes)}
        candidate = Overlay(checkpoints[1], arrays) if arrays else checkpoints[1]
        touched = []
        for circuit in circuits:
            names = {part.name for part in circuit_parts(block.plan, circuit)}
            if settings or circuit in measured or not names.isdisjoint(arrays):
                touched.append(circuit)
        if not (arrays or settings):
            return {circuit: measured[circuit] for circuit in touched}
        pair = (plans[0], block.plan)
        return compare((checkpoints[0], candidate), pair, tolerance, touched)

    for findings in _attempts(block, neighbors, bool(settings)):
        causes = [block.mismatch(finding) for finding in findings]
        left = left_after(causes)
        if len(causes) > 1:
            causes = _needed(causes, left, left_after)
        rest = [_checked(cause, causes, left_after) for cause in _rest(left, block)]
        explanation = (*causes, *settings, *rest)
        unexplained = sum(cause.unexplained for cause in rest)
        without_steps = sum(not cause.steps for cause in rest)
        yield (unexplained, len(explanation) + without_steps), explanation
        if not left and len(explanation) == 1:
            break
    block.clear()


def _repaired(block: Expected, causes: Sequence[Mismatch]) -> dict[str, np.ndarray]:
    """Run the printed repairs of causes on a block's tensors; return those that changed."""
    tensors = Arrays(block.actual_arrays())
    for cause in causes:
        run(cause.repair, tensors, Arrays(block.expected_arrays()))
    return tensors.changed


def _needed(
    causes: Sequence[Mismatch],
    left: Mapping[str, Apart],
    left_after: Callable[[Sequence[Mismatch]], Mapping[str, Apart]],
) -> list[Mismatch]:
    """Return the causes without which more circuits differ."""
    needed = list(causes)
    for cause in causes:
        fewer = [each for each in needed if each is not cause]
        if left_after(fewer).keys() <= left.keys():
            needed = fewer
    return needed


def _checked(
    cause: Mismatch,
    others: Sequence[Mismatch],
    left_after: Callable[[Sequence[Mismatch]], Mapping[str, Apart]],
) -> Mismatch:
    """Return a cause that forms explain; without its repair if its circuit differs after it."""
    circuit = cause.facts.get("circuit", SCORES)
    if not cause.steps or circuit not in left_after([*others, cause]):
        return cause
    return replace(cause, steps=())


def _rest(left: Mapping[str, Apart], block: Expected) -> Iterator[Mismatch]:
    """The causes that forms alone explain of circuits that differ, or their distance."""
    for circuit, apart in left.items():
        relative, shares = apart.distances.relative, apart.distances.shares
        unexplained = mismatches.unexplained(relative.max(axis=0), shares.max(axis=0))
        for cause in apart.explained or (unexplained,):
            if circuit != SCORES:
                steps = _steps_of_form(cause, block, circuit)
                yield replace(beside(circuit, cause), steps=steps)
                continue
            plan = block.plan
            tensors = {plan.query.tensor: "query", plan.key.tensor: "key"}
            if plan.query.bias is not None and cause.verdict is Kind.SCALED:
                tensors[plan.query.bias.name] = "bias of the query"
            facts = {"tensors": tensors, **cause.facts}
            steps = cause.steps or _steps_of_form(cause, block)
            yield replace(cause, steps=steps, facts=facts)


def _steps_of_form(cause: Mismatch, block: Expected, circuit: str = SCORES) -> tuple[Step, ...]:
    """Return the steps that undo a change that was found in the forms."""
    query, key = block.plan.query, block.plan.key
    if cause.verdict is Kind.SCALED and "factor" in cause.facts:
        factor = float(cause.facts["factor"])
        is_sign = math.isclose(factor, -1, rel_tol=SAME_FACTOR)
        side = "value" if circuit == VALUES else "query"
        return block.side_steps(side, Scale(-1.0 if is_sign else factor))
    if circuit != SCORES:
        return ()
    if cause.verdict is Kind.SCALED and len(cause.facts["factors"]) == query.heads:
        factors = tuple(cause.facts["factors"])
        return block.side_steps("query", ScaleHeads(0, factors, query.head_width))
    if cause.verdict is Kind.HEADS and cause.heads:
        share = query.heads // key.heads
        keys = tuple(head // share for head in cause.heads[::share])
        queries = block.side_steps("query", Permute(0, HeadOrder(cause.heads, query.head_width)))
        if len(set(keys)) != len(keys):
            return ()
        return (*queries, *block.side_steps("key", Permute(0, HeadOrder(keys, key.head_width))))
    if cause.verdict is Kind.PAIRING:
        pairs = zip(cause.facts["query_heads"], cause.facts["key_heads"], strict=True)
        groups = cause.facts["groups"]
        if all(key_head == head % groups for head, key_head in pairs):
            shape = (query.heads // groups, groups, query.head_width)
            return block.side_steps("query", Permute(0, Axes(shape, (1, 0, 2))))
    return ()


def beside(circuit: str, cause: Mismatch) -> Mismatch:
    """Return a cause of another circuit than the scores, such as values and outputs."""
    reason = f"{circuit}: {cause.reason}"
    return replace(
        cause, reason=reason, steps=(), sides=(), facts={"circuit": circuit, **cause.facts}
    )


def _attempts(
    block: Expected, neighbors: Sequence[AttentionPlan], has_settings: bool
) -> Iterator[list[Finding]]:
    """Findings that may together make the blocks the same: all, those of weights alone, or none."""
    if has_settings:
        yield []
    findings = search(block.pairs, lambda pair: block.other_place(pair, neighbors))
    kinds = {finding.kind for finding in findings}
    in_scores = all(finding.pair.role.side in SCORED for finding in findings)
    apart = any(pair.is_side and pair.role.side == "query" for pair in block.pairs)
    if not has_settings and kinds == {Kind.SCALED} and in_scores and apart:
        yield []  # scores contain the factors of queries and keys together
    yield findings
    weights = [finding for finding in findings if finding.kind not in (Kind.BIASES, Kind.NORM)]
    if len(weights) < len(findings):
        yield weights
    if len(findings) > 1 and Kind.NORM in kinds:
        yield block.folded()
    if findings and not has_settings:
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
    names = tuple(getattr(pair[1], side).tensor for side in ("key", "value"))
    steps: list[Step] = [Change(names, Take())]
    if keys:
        path = (pair[1].rule.config, keys[0]) if pair[1].rule.config else (keys[0],)
        steps.append(Setting(path, counts[0]))
    return Mismatch(Kind.AVERAGED, reason, tuple(steps), ("key",))
