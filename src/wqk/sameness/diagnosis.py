"""Search for the cause of a different block: repairs are run, and the block is compared again.

The reference's weights in the candidate's layout are the weights that the candidate should contain
(`wqk.sameness.block_weights`). The finders (`wqk.sameness.finders`) propose findings. An *attempt*
is a list of findings whose printed repairs are run together. If circuits still differ, their forms
(`wqk.sameness.form_causes`) or their distance explain the difference. The explanation of the block
is the best attempt.

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
    """Causes that together explain a block.

    Attributes
    ----------
    causes
        All causes, in the order of the report.
    unexplained, far
        Number of causes that are only a distance; number of these with a distance larger than after
        further training of a copy.
    without_steps
        Number of causes from forms that have no repair.
    """

    causes: tuple[Mismatch, ...]
    unexplained: int
    far: int
    without_steps: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """Numbers that rank explanations; the lowest numbers are the best.

        A cause from forms counts twice if its repair is unknown.
        """
        return self.unexplained, self.far, len(self.causes) + self.without_steps


def diagnose(
    models: Sequence[Model],
    pair: PlanPair,
    neighbors: Sequence[AttentionPlan],
    tolerance: float,
    circuits: Sequence[str],
    differences: Mapping[str, CircuitDifference],
) -> tuple[Mismatch, ...]:
    """Return the best explanation of a block that differs: the fewest sufficient causes.

    Parameters
    ----------
    models, pair
        The two models, and the plans of the block.
    neighbors
        The reference's other blocks, whose weights the candidate may contain.
    tolerance
        Relative distance that is accepted besides rounding.
    circuits
        The circuits to explain.
    differences
        The difference of each circuit that differs, by the circuit's name.
    """
    completed = completed_block(models, pair)
    if completed is not None:
        # Missing tensors are a cause that is known already: only further differences are explained.
        models, pair = (models[0], completed.model), (pair[0], completed.plan)
        checkpoints = [model.checkpoint for model in models]
        differences = compare(checkpoints, pair, tolerance, circuits)
        if not differences:
            return ()
    checkpoints = [model.checkpoint for model in models]
    means = _averaged_heads(pair, checkpoints)
    if means is not None:
        return (means,)
    explanations: list[BlockExplanation] = []
    for settings, plan in _plans_with_settings(models, pair):
        block = _DifferingBlock(
            checkpoints=checkpoints,
            pair=(pair[0], plan),
            neighbors=neighbors,
            tolerance=tolerance,
            circuits=circuits,
            differences=differences,
            settings=settings,
        )
        explanations += block.explanations()
        best = min(explanations, key=lambda explanation: explanation.rank)
        needs_settings_alone = best.rank == (0, 0, len(settings))
        if needs_settings_alone:
            break
    return best.causes


def _plans_with_settings(
    models: Sequence[Model], pair: PlanPair
) -> Iterator[tuple[list[Mismatch], AttentionPlan]]:
    """Yield causes of wrong settings, and the candidate's plan with the right settings.

    The first plan has the right settings of the form and of rotary positions. If settings of the
    form are wrong, a second plan has only the right settings of rotary positions.
    """
    form = form_restored(models, pair)
    for restored_form in (None,) if form is None else (form, None):
        settings: list[Mismatch] = []
        plan = pair[1]
        if restored_form is not None:
            cause, plan = restored_form
            settings.append(cause)
        rotary = rotary_repaired(models, (pair[0], plan))
        if rotary is not None:
            cause, rotated = rotary
            settings.append(cause)
            plan = replace(plan, rotary=rotated.rotary, axial=rotated.axial)
        yield settings, plan


class _DifferingBlock:
    """A block that still differs after wrong settings are corrected.

    Parameters
    ----------
    checkpoints, pair, neighbors, tolerance, circuits, differences
        As for `diagnose`; the candidate's plan has the corrected settings.
    settings
        The causes of the corrected settings.
    """

    def __init__(
        self,
        *,
        checkpoints: Sequence[Checkpoint],
        pair: PlanPair,
        neighbors: Sequence[AttentionPlan],
        tolerance: float,
        circuits: Sequence[str],
        differences: Mapping[str, CircuitDifference],
        settings: Sequence[Mismatch],
    ) -> None:
        self._checkpoints = checkpoints
        self._reference_plan = pair[0]
        self._neighbors = neighbors
        self._tolerance = tolerance
        self._circuits = circuits
        self._differences = differences
        self._settings = settings
        self._weights = BlockWeights(checkpoints, pair)

    def explanations(self) -> Iterator[BlockExplanation]:
        """Yield an explanation for each attempt; stop after a single cause that suffices."""
        for findings in _attempts(self._weights, self._neighbors, bool(self._settings)):
            causes = [self._weights.mismatch(finding) for finding in findings]
            differences = self._differences_after(causes)
            if len(causes) > 1:
                causes = self._needed(causes, differences)
            causes_of_forms = [
                self._with_steps_that_suffice(cause, causes)
                for cause in _causes_of_forms(differences, self._weights)
            ]
            unexplained = [cause for cause in causes_of_forms if cause.unexplained]
            explanation = BlockExplanation(
                causes=(*causes, *self._settings, *causes_of_forms),
                unexplained=len(unexplained),
                far=sum(not cause.is_close for cause in unexplained),
                without_steps=sum(not cause.steps for cause in causes_of_forms),
            )
            yield explanation
            if not differences and len(explanation.causes) == 1:
                break
        self._weights.clear()

    def _differences_after(self, causes: Sequence[Mismatch]) -> dict[str, CircuitDifference]:
        """Run the printed repairs of causes; return the remaining differences of circuits."""
        plan = self._weights.plan
        changed_arrays = {**self._weights.added, **self._repaired(causes)}
        circuits: list[str] = []
        for circuit in self._circuits:
            names = {part.name for part in circuit_parts(plan, circuit)}
            is_changed = not names.isdisjoint(changed_arrays)
            if self._settings or is_changed or circuit in self._differences:
                circuits.append(circuit)
        if not (changed_arrays or self._settings):
            return {circuit: self._differences[circuit] for circuit in circuits}
        reference, candidate = self._checkpoints
        if changed_arrays:
            candidate = Overlay(candidate, changed_arrays)
        pair = (self._reference_plan, plan)
        return compare((reference, candidate), pair, self._tolerance, circuits)

    def _repaired(self, causes: Sequence[Mismatch]) -> dict[str, np.ndarray]:
        """Run the printed repairs of causes on the block's tensors; return the changed tensors."""
        tensors = ProgramTensors(self._weights.actual_arrays())
        for cause in causes:
            reference = ProgramTensors(self._weights.expected_arrays())
            run(cause.repair, tensors, reference, adapter=self._weights.adapter())
        return tensors.changed

    def _needed(
        self, causes: Sequence[Mismatch], differences: Mapping[str, CircuitDifference]
    ) -> list[Mismatch]:
        """Return the needed causes: if a needed cause is left out, circuits differ by more.

        ``differences`` are the differences that remain after the repairs of all causes.
        """
        needed = list(causes)
        for cause in causes:
            without_cause = [member for member in needed if member is not cause]
            if not _differ_more(self._differences_after(without_cause), differences):
                needed = without_cause
        return needed

    def _with_steps_that_suffice(self, cause: Mismatch, causes: Sequence[Mismatch]) -> Mismatch:
        """Return a cause of forms, without steps if its circuit still differs after the steps.

        ``causes`` are the causes of stored weights; their steps are run first.
        """
        circuit = cause.facts.get("circuit", SCORES)
        if not cause.steps or circuit not in self._differences_after([*causes, cause]):
            return cause
        return replace(cause, steps=())


def _differ_more(
    differences: Mapping[str, CircuitDifference], allowed: Mapping[str, CircuitDifference]
) -> bool:
    """Return whether further circuits differ, or a circuit differs by more than twice as much."""
    for circuit, difference in differences.items():
        if circuit not in allowed:
            return True
        distance = difference.distances.relative.max()
        if distance > FARTHER * allowed[circuit].distances.relative.max():
            return True
    return False


def _attempts(
    block: BlockWeights, neighbors: Sequence[AttentionPlan], has_settings: bool
) -> Iterator[list[WeightFinding]]:
    """Yield lists of findings that may together make the blocks equal.

    An attempt consists of all findings, of the findings of weights only, of findings with folded
    norms, or of no finding.

    Parameters
    ----------
    block
        The weights of the block.
    neighbors
        The reference's other blocks, whose weights the block may contain.
    has_settings
        Whether settings were corrected; the settings may be the only difference.
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
    findings_of_weights = [
        finding for finding in findings if finding.kind not in (Kind.BIASES, Kind.NORM)
    ]
    if len(findings_of_weights) < len(findings):
        yield findings_of_weights
    if len(findings) > 1 and Kind.NORM in kinds:
        yield block.find_folded_orders()
    if findings and not has_settings:
        yield []


# -- causes that forms show --------------------------------------------------------------------


def _causes_of_forms(
    differences: Mapping[str, CircuitDifference], block: BlockWeights
) -> Iterator[Mismatch]:
    """Yield the causes of differing circuits from their forms, or else the distance."""
    for circuit, difference in differences.items():
        for cause in difference.causes or (_distance_alone(difference),):
            if circuit == SCORES:
                steps = cause.steps or _steps_of_form(cause, block)
                facts = {"tensors": _tensors_of_scores(cause, block.plan), **cause.facts}
                yield replace(cause, steps=steps, facts=facts)
            else:
                steps = _steps_of_form(cause, block, circuit)
                yield replace(cause_of_circuit(circuit, cause), steps=steps)


def _distance_alone(difference: CircuitDifference) -> Mismatch:
    """Return the cause of a circuit without known cause: the distance."""
    distances = difference.distances
    return mismatches.unexplained(distances.relative.max(axis=0), distances.shares.max(axis=0))


def _tensors_of_scores(cause: Mismatch, plan: AttentionPlan) -> dict[str, str]:
    """Return the roles of the tensors that a cause of scores is about, by name."""
    tensors = {plan.query.tensor: "query", plan.key.tensor: "key"}
    if plan.query.bias is not None and cause.verdict is Kind.SCALED:
        tensors[plan.query.bias.name] = "bias of the query"
    return tensors


def cause_of_circuit(circuit: str, cause: Mismatch) -> Mismatch:
    """Return a cause as the cause of another circuit than the scores, such as values."""
    reason = f"{circuit}: {cause.reason}"
    facts = {"circuit": circuit, **cause.facts}
    return replace(cause, reason=reason, steps=(), sides=(), facts=facts)


def _steps_of_form(cause: Mismatch, block: BlockWeights, circuit: str = SCORES) -> tuple[Step, ...]:
    """Return the steps that undo a change found in the forms."""
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
    """Return the steps that undo an order of heads; none if a key head is used more than once."""
    query, key = block.plan.query, block.plan.key
    share = query.heads // key.heads
    key_heads = tuple(head // share for head in heads[::share])
    if len(set(key_heads)) != len(key_heads):
        return ()
    of_queries = block.side_steps("query", Permute(0, HeadOrder(heads, query.head_width)))
    of_keys = block.side_steps("key", Permute(0, HeadOrder(key_heads, key.head_width)))
    return (*of_queries, *of_keys)


def _steps_of_pairing(cause: Mismatch, block: BlockWeights) -> tuple[Step, ...]:
    """Return the steps that undo the pairing of query head h with key head h mod G; else none."""
    query = block.plan.query
    groups: int = cause.facts["groups"]
    query_heads, key_heads = cause.facts["query_heads"], cause.facts["key_heads"]
    if any(key != head % groups for head, key in zip(query_heads, key_heads, strict=True)):
        return ()
    shape = (query.heads // groups, groups, query.head_width)
    return block.side_steps("query", Permute(0, Axes(shape, (1, 0, 2))))


# -- averaged heads ----------------------------------------------------------------------------


def _averaged_heads(pair: PlanPair, checkpoints: Sequence[Checkpoint]) -> Mismatch | None:
    """Return the cause of key and value heads that are means of several heads of the reference."""
    for side in ("key", "value"):
        source, target = (_projection_of(plan, side) for plan in pair)
        if source is None or target is None:
            return None
        if source.heads % target.heads or source.heads == target.heads:
            return None
        expected = source.take(checkpoints[0].read([source.part])[0])
        actual = target.take(checkpoints[1].read([target.part])[0])
        means = expected.reshape(len(actual), -1, *expected.shape[1:]).mean(axis=1)
        tolerance = SAME_SHARE * means.std()
        if means.shape != actual.shape or not np.allclose(means, actual, atol=tolerance):
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
    """Return the projection of a side; None if the side has none or two."""
    side = getattr(plan, name)
    projection = None if side is None else side.projection
    return projection if isinstance(projection, Projection) else None
