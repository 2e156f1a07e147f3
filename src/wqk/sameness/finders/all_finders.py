"""All finders in the order of their use, and the search for the changes of a block.

A finder takes a `WeightPair` and returns a `WeightFinding`, or None. A finding is a proposal:
`wqk.sameness.diagnosis` runs the edits, and prints them if the models are then equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wqk._machine import side_by_side
from wqk.sameness.axis_orders import Stretches
from wqk.sameness.blocks import MANY
from wqk.sameness.edits import Edit, Then, Within
from wqk.sameness.finders.heads import find_columns_of_heads, find_heads
from wqk.sameness.finders.joining import joined
from wqk.sameness.finders.low_rank import find_adapter, find_decomposed, find_wrong_merge
from wqk.sameness.finders.quantized import find_groups
from wqk.sameness.finders.rows import (
    Find,
    find_columns,
    find_rows,
    find_transposed,
    find_unnamed_rows,
)
from wqk.sameness.finders.scales import find_factor, find_factors, find_zeros
from wqk.sameness.finders.tensors import (
    FindOtherPlace,
    find_moved_tensors,
    find_recut,
    no_other_place,
)
from wqk.sameness.finders.vectors import find_vector
from wqk.sameness.matching import same_numbers
from wqk.sameness.mismatches import Kind
from wqk.sameness.weight_pairs import WeightFinding, WeightPair, WeightPhrase, names_explained_by


def find_in_parts(pair: WeightPair) -> WeightFinding | None:
    """Find the changes of the parts of a fused weight, part by part.

    None if a change of the whole weight explains all parts.
    """
    findings = _findings_of_parts(pair)
    if not findings or _are_of_the_whole(pair, findings):
        return None
    return _joined_parts(pair, findings)


def find_rows_of_parts(pair: WeightPair) -> WeightFinding | None:
    """Find parts of a fused weight with rows in another order, part by part.

    All rows of the weight are rows of the original; therefore no part has heads of other weights.
    """
    if pair.row_order is None:
        return None
    findings = _findings_of_parts(pair)
    has_strangers = any(finding.kind is Kind.STRANGERS for finding in findings)
    if not findings or has_strangers or _are_of_the_whole(pair, findings):
        return None
    return _joined_parts(pair, findings)


def _findings_of_parts(pair: WeightPair) -> list[WeightFinding]:
    """Return a finding for each wrong part; none if any wrong part has no finding."""
    findings: list[WeightFinding] = []
    for part in pair.parts:
        if not part.right:
            finding = _find_in_part(pair, part)
            if finding is None:
                return []
            findings.append(finding)
    return findings


def _joined_parts(pair: WeightPair, findings: Sequence[WeightFinding]) -> WeightFinding | None:
    """Join the findings of parts; None if the rows of a part do not lie at equal distances."""
    templates: list[str] = []
    edits: dict[str, Edit] = {}
    for finding in findings:
        part = finding.pair
        if part.rows is None:
            return None
        rows = Stretches.of(part.rows)
        if not np.array_equal(rows.indices, part.rows):
            return None
        templates.append(finding.phrase.about_part(part.role).template)
        for name, edit in finding.edits.items():
            within = Within(0, rows, edit)
            edits[name] = Then(edits[name], within) if name in edits else within
    kinds = {finding.kind for finding in findings}
    kind = kinds.pop() if len(kinds) == 1 else Kind.FUSED
    phrase = WeightPhrase("; ".join(templates))
    joined_finding = WeightFinding(kind, phrase, edits, pair, None, pair.sides)
    if len(findings) > 1:
        return joined_finding
    return replace(joined_finding, heads=findings[0].heads, facts=findings[0].facts)


def _are_of_the_whole(pair: WeightPair, findings: Sequence[WeightFinding]) -> bool:
    """Return whether all parts of a fused weight have one change, as a change of the whole weight.

    If every part is stored transposed, the whole has another shape; that is no change of the whole.
    """
    changes: set[tuple[Kind, WeightPhrase, str]] = set()
    for finding in findings:
        if finding.kind is not Kind.TRANSPOSED:
            code = finding.edits[pair.name].code()
            changes.add((finding.kind, finding.phrase, code))
    return len(changes) == 1 and len(pair.parts) == len(findings) > 1


def _find_in_part(pair: WeightPair, part: WeightPair) -> WeightFinding | None:
    """Find the change of one part of a fused weight."""
    for source in pair.parts:
        could_be = source.role != part.role and source.expected.shape == part.actual.shape
        if could_be and part.actual.any() and same_numbers(source.expected, part.actual):
            return part.finding(Kind.TENSOR, f"{{}} {{holds}} the {source.role} part")
    return find_first(part)


# In the order in which they are tried: the plainest descriptions first. Rows come early, because
# they take the least time.
OF_WEIGHTS: tuple[Find, ...] = (
    find_zeros,
    find_decomposed,
    find_wrong_merge,
    find_rows,
    find_rows_of_parts,
    find_unnamed_rows,
    find_factor,
    find_groups,
    find_columns,
    find_transposed,
    find_in_parts,
    find_heads,
    find_columns_of_heads,
    find_factors,
    find_adapter,
)
OF_VECTORS: tuple[Find, ...] = (find_factor, find_vector)


def find_first(pair: WeightPair) -> WeightFinding | None:
    """Return the first finding of a weight or a vector."""
    finders = OF_WEIGHTS if pair.is_matrix else OF_VECTORS
    for find in finders:
        finding = find(pair)
        if finding is not None:
            return finding
    return None


def search(
    pairs: Sequence[WeightPair], find_other_place: FindOtherPlace = no_other_place
) -> list[WeightFinding]:
    """Find the changes of all wrong weights of a block.

    Parameters
    ----------
    pairs
        All weights of the block.
    find_other_place
        Function that returns the other place in the reference that a weight comes from.
    """
    wrong = [pair for pair in pairs if not pair.right]
    findings = find_moved_tensors(pairs, wrong, find_other_place)
    if not findings:
        recut = find_recut(pairs)
        if recut is not None:
            findings.append(recut)
    # Weights first, because biases moved together with weights.
    weights = [pair for pair in wrong if pair.is_matrix]
    vectors = [pair for pair in wrong if not pair.is_matrix]
    for members in (weights, vectors):
        explained = names_explained_by(findings)
        unexplained = [pair for pair in members if pair.name not in explained]
        has_large_ones = any(pair.expected.size > MANY for pair in unexplained)
        results = side_by_side(find_first, unexplained, many=has_large_ones)
        findings += [finding for finding in results if finding is not None]
    return joined(findings, pairs)
