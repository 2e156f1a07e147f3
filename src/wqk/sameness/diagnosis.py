"""Why a block differs: repairs of settings and stored weights, run, and the block compared again.

The reference's weights are written in the candidate's layout: the weights that the candidate should
contain. Blocks are compared in the terms of the family, and repaired in those of the file. The
finders (`wqk.sameness.finders`) propose findings. The printed code of a repair is run, and counts
if the block is then the same. What remains is explained by forms (`wqk.sameness.form_causes`).

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.checkpoint import Overlay
from wqk.families import AttentionPlan, Projection
from wqk.model import Model
from wqk.sameness import mismatches
from wqk.sameness.axis_orders import Axes, HeadOrder
from wqk.sameness.block_settings import form_restored
from wqk.sameness.block_weights import BlockWeights
from wqk.sameness.circuits import SCORES, VALUES, PlanPair, circuit_parts
from wqk.sameness.edits import Permute, Scale, ScaleHeads, Take
from wqk.sameness.execution import ProgramTensors, run
from wqk.sameness.finders.all_finders import search
from wqk.sameness.form_causes import CircuitDifference, compare
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.missing_tensors import completed_block
from wqk.sameness.repairs import Change, Setting, Step
from wqk.sameness.rotary_settings import rotary_repaired
from wqk.sameness.tolerances import FARTHER, SAME_FACTOR, SAME_SHARE
from wqk.sameness.weight_pairs import SCORED, WeightFinding


@dataclass(frozen=True)
class BlockExplanation:
    """Causes that may together explain a block.

    Attributes
    ----------
    causes
        All causes, in the order in which they are reported.
    unexplained, far
        Number of causes that are a distance alone, and of those whose distance is not that of a
        copy that was trained on.
    without_steps
        Number of causes that forms show, and that have no repair.
    """

    causes: tuple[Mismatch, ...]
    unexplained: int
    far: int
    without_steps: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """The numbers by which explanations are compared; the lowest are the best.

        A cause that forms show counts twice if it has no repair.
        """
        return self.unexplained, self.far, len(self.causes) + self.without_steps


def diagnose(
    models: Sequence[Model],
    pair: PlanPair,
    neighbors: Sequence[AttentionPlan],
    tolerance: float,
    circuits: Sequence[str],
    measured: Mapping[str, CircuitDifference],
) -> tuple[Mismatch, ...]:
    """Return the best explanation of a block that differs: the fewest causes that suffice.

    Parameters
    ----------
    models, pair
        The two models, and the plans of the block.
    neighbors
        The reference's other blocks, whose weights the candidate may contain.
    tolerance
        The relative distance that is allowed besides rounding.
    circuits, measured
        The circuits to explain, and those of them that differ.
    """
    completed = completed_block(models, pair)
    if completed is not None:  # tensors that the file lacks are known; the remaining is explained
        models, pair = (models[0], completed.model), (pair[0], completed.plan)
        checkpoints = [model.checkpoint for model in models]
        measured = compare(checkpoints, pair, tolerance, circuits)
        if not measured:
            return ()
    checkpoints = [model.checkpoint for model in models]
    means = _averaged_heads(pair, checkpoints)
    if means is not None:
        return (means,)
    form = form_restored(models, pair)
    explanations: list[BlockExplanation] = []
    for setting_of_form in (None,) if form is None else (form, None):
        settings: list[Mismatch] = []
        plan = pair[1]
        if setting_of_form is not None:
            cause, plan = setting_of_form
            settings.append(cause)
        rotary = rotary_repaired(models, (pair[0], plan))
        if rotary is not None:
            cause, rotated = rotary
            settings.append(cause)
            plan = replace(plan, rotary=rotated.rotary, axial=rotated.axial)
        block = _DifferingBlock(
            checkpoints=checkpoints,
            pair=(pair[0], plan),
            neighbors=neighbors,
            tolerance=tolerance,
            circuits=circuits,
            measured=measured,
            settings=settings,
        )
        explanations += block.explanations()
        best = min(explanations, key=lambda explanation: explanation.rank)
        if best.rank == (0, 0, len(settings)):
            break
    return best.causes


class _DifferingBlock:
    """A block that differs, once some settings are right.

    Parameters
    ----------
    checkpoints, pair, neighbors, tolerance, circuits, measured
        As for `diagnose`; the candidate's plan follows from the right settings.
    settings
        The causes of the settings that were set right.
    """

    def __init__(
        self,
        *,
        checkpoints: Sequence[Checkpoint],
        pair: PlanPair,
        neighbors: Sequence[AttentionPlan],
        tolerance: float,
        circuits: Sequence[str],
        measured: Mapping[str, CircuitDifference],
        settings: Sequence[Mismatch],
    ) -> None:
        self._checkpoints = checkpoints
        self._reference_plan = pair[0]
        self._neighbors = neighbors
        self._tolerance = tolerance
        self._circuits = circuits
        self._measured = measured
        self._settings = settings
        self._expected = BlockWeights(checkpoints, pair)

    def explanations(self) -> Iterator[BlockExplanation]:
        """Yield explanations, and end after one that is a single cause and suffices."""
        for findings in _attempts(self._expected, self._neighbors, bool(self._settings)):
            causes = [self._expected.mismatch(finding) for finding in findings]
            differences = self._differences_after(causes)
            if len(causes) > 1:
                causes = self._needed(causes, differences)
            remaining = [
                self._with_steps_that_suffice(cause, causes)
                for cause in _causes_of_forms(differences, self._expected)
            ]
            explanation = BlockExplanation(
                causes=(*causes, *self._settings, *remaining),
                unexplained=sum(cause.unexplained for cause in remaining),
                far=sum(cause.unexplained and not cause.is_close for cause in remaining),
                without_steps=sum(not cause.steps for cause in remaining),
            )
            yield explanation
            if not differences and len(explanation.causes) == 1:
                break
        self._expected.clear()

    def _differences_after(self, causes: Sequence[Mismatch]) -> dict[str, CircuitDifference]:
        """Run the printed repairs of causes; return the circuits that still differ."""
        plan = self._expected.plan
        arrays = {**self._expected.added, **self._repaired(causes)}
        concerned: list[str] = []
        for circuit in self._circuits:
            names = {part.name for part in circuit_parts(plan, circuit)}
            is_changed = not names.isdisjoint(arrays)
            if self._settings or is_changed or circuit in self._measured:
                concerned.append(circuit)
        if not (arrays or self._settings):
            return {circuit: self._measured[circuit] for circuit in concerned}
        reference, candidate = self._checkpoints
        if arrays:
            candidate = Overlay(candidate, arrays)
        pair = (self._reference_plan, plan)
        return compare((reference, candidate), pair, self._tolerance, concerned)

    def _repaired(self, causes: Sequence[Mismatch]) -> dict[str, np.ndarray]:
        """Run the printed repairs of causes on the block's tensors; return those that changed."""
        tensors = ProgramTensors(self._expected.actual_arrays())
        for cause in causes:
            reference = ProgramTensors(self._expected.expected_arrays())
            run(cause.repair, tensors, reference, adapter=self._expected.adapter())
        return tensors.changed

    def _needed(
        self, causes: Sequence[Mismatch], differences: Mapping[str, CircuitDifference]
    ) -> list[Mismatch]:
        """Return the causes without which more circuits differ, or one differs by more."""
        needed = list(causes)
        for cause in causes:
            fewer = [needed_cause for needed_cause in needed if needed_cause is not cause]
            if not _differ_more(self._differences_after(fewer), differences):
                needed = fewer
        return needed

    def _with_steps_that_suffice(self, cause: Mismatch, causes: Sequence[Mismatch]) -> Mismatch:
        """Return a cause of forms; without its steps if its circuit differs after them."""
        circuit = cause.facts.get("circuit", SCORES)
        if not cause.steps or circuit not in self._differences_after([*causes, cause]):
            return cause
        return replace(cause, steps=())


def _differ_more(
    differences: Mapping[str, CircuitDifference], others: Mapping[str, CircuitDifference]
) -> bool:
    """Return whether circuits differ that others do not, or by more than twice as much."""
    for circuit, difference in differences.items():
        if circuit not in others:
            return True
        distance = difference.distances.relative.max()
        if distance > FARTHER * others[circuit].distances.relative.max():
            return True
    return False


def _attempts(
    block: BlockWeights, neighbors: Sequence[AttentionPlan], has_settings: bool
) -> Iterator[list[WeightFinding]]:
    """Yield findings that may together make the blocks the same.

    These are all findings, those of weights alone, those with the norms folded in, or none.
    """
    if has_settings:
        yield []
    findings = search(block.pairs, lambda pair: block.other_place(pair, neighbors))
    kinds = {finding.kind for finding in findings}
    are_of_scores = all(finding.pair.role.side in SCORED for finding in findings)
    has_own_queries = any(pair.is_side and pair.role.side == "query" for pair in block.pairs)
    are_factors = kinds == {Kind.SCALED} and are_of_scores
    if not has_settings and are_factors and has_own_queries:
        yield []  # scores contain the factors of queries and keys together
    yield findings
    of_weights = [finding for finding in findings if finding.kind not in (Kind.BIASES, Kind.NORM)]
    if len(of_weights) < len(findings):
        yield of_weights
    if len(findings) > 1 and Kind.NORM in kinds:
        yield block.folded()
    if findings and not has_settings:
        yield []


# -- causes that forms show --------------------------------------------------------------------


def _causes_of_forms(
    differences: Mapping[str, CircuitDifference], block: BlockWeights
) -> Iterator[Mismatch]:
    """Yield the causes that forms show of circuits that differ, or else the distance."""
    plan = block.plan
    for circuit, difference in differences.items():
        distances = difference.distances
        causes = difference.explained
        if not causes:
            relative, shares = distances.relative.max(axis=0), distances.shares.max(axis=0)
            causes = (mismatches.unexplained(relative, shares),)
        for cause in causes:
            if circuit != SCORES:
                steps = _steps_of_form(cause, block, circuit)
                yield replace(cause_of_circuit(circuit, cause), steps=steps)
                continue
            tensors = {plan.query.tensor: "query", plan.key.tensor: "key"}
            if plan.query.bias is not None and cause.verdict is Kind.SCALED:
                tensors[plan.query.bias.name] = "bias of the query"
            steps = cause.steps or _steps_of_form(cause, block)
            yield replace(cause, steps=steps, facts={"tensors": tensors, **cause.facts})


def cause_of_circuit(circuit: str, cause: Mismatch) -> Mismatch:
    """Return a cause of another circuit than the scores, such as values and outputs."""
    reason = f"{circuit}: {cause.reason}"
    facts = {"circuit": circuit, **cause.facts}
    return replace(cause, reason=reason, steps=(), sides=(), facts=facts)


def _steps_of_form(cause: Mismatch, block: BlockWeights, circuit: str = SCORES) -> tuple[Step, ...]:
    """Return the steps that undo a change that was found in the forms."""
    query = block.plan.query
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
        return _steps_of_heads(cause.heads, block)
    if cause.verdict is Kind.PAIRING:
        return _steps_of_pairing(cause, block)
    return ()


def _steps_of_heads(heads: tuple[int, ...], block: BlockWeights) -> tuple[Step, ...]:
    """Return the steps that undo an order of heads; none if key heads are used more than once."""
    query, key = block.plan.query, block.plan.key
    share = query.heads // key.heads
    key_heads = tuple(head // share for head in heads[::share])
    if len(set(key_heads)) != len(key_heads):
        return ()
    of_queries = block.side_steps("query", Permute(0, HeadOrder(heads, query.head_width)))
    of_keys = block.side_steps("key", Permute(0, HeadOrder(key_heads, key.head_width)))
    return (*of_queries, *of_keys)


def _steps_of_pairing(cause: Mismatch, block: BlockWeights) -> tuple[Step, ...]:
    """Return the steps that undo a pairing of query head h with key head h mod G; else none."""
    query, groups = block.plan.query, cause.facts["groups"]
    for head, key_head in zip(cause.facts["query_heads"], cause.facts["key_heads"], strict=True):
        if key_head != head % groups:
            return ()
    shape = (query.heads // groups, groups, query.head_width)
    return block.side_steps("query", Permute(0, Axes(shape, (1, 0, 2))))


# -- averaged heads ----------------------------------------------------------------------------


def _averaged_heads(pair: PlanPair, checkpoints: Sequence[Checkpoint]) -> Mismatch | None:
    """Return the cause of key and value heads that are means of several of the reference's."""
    for name in ("key", "value"):
        projections = [_projection_of(plan, name) for plan in pair]
        if None in projections:
            return None
        first, second = (projection for projection in projections if projection is not None)
        if first.heads % second.heads or first.heads == second.heads:
            return None
        reference = first.take(checkpoints[0].read([first.part])[0])
        candidate = second.take(checkpoints[1].read([second.part])[0])
        means = reference.reshape(len(candidate), -1, *reference.shape[1:]).mean(axis=1)
        tolerance = SAME_SHARE * means.std()
        if means.shape != candidate.shape or not np.allclose(means, candidate, atol=tolerance):
            return None
    plan = pair[1]
    counts = pair[0].key.heads, plan.key.heads
    names = tuple(getattr(plan, side).tensor for side in ("key", "value"))
    steps: list[Step] = [Change(names, Take())]
    if plan.rule.key_heads:
        key = plan.rule.key_heads[0]
        path = (plan.rule.config, key) if plan.rule.config else (key,)
        steps.append(Setting(path, counts[0]))
    reason = f"{counts[0]} key and value heads were averaged to {counts[1]}, which loses them"
    return Mismatch(Kind.AVERAGED, reason, tuple(steps), ("key",))


def _projection_of(plan: AttentionPlan, name: str) -> Projection | None:
    """Return the projection of a side; None without one, or if the side has two."""
    side = getattr(plan, name)
    projection = None if side is None else side.projection
    return projection if isinstance(projection, Projection) else None
