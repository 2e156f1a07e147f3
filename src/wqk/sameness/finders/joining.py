"""Findings of several weights with one cause: moved heads, exchanged scales, one phrase.

Axes: H query heads, G key heads.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from wqk.sameness import mismatches
from wqk.sameness.edits import Edit, Scale, Take
from wqk.sameness.finders.tensors import JOINED
from wqk.sameness.mismatches import Kind
from wqk.sameness.permutations import whole_heads
from wqk.sameness.tolerances import SAME_FACTOR
from wqk.sameness.weight_pairs import SCORED, TensorUse, WeightFinding, WeightPair, WeightPhrase


def joined(findings: Sequence[WeightFinding], pairs: Sequence[WeightPair]) -> list[WeightFinding]:
    """Join findings of several weights of a block that have one cause.

    The following findings are joined: factors of queries, keys and values with product 1; gains
    that moved with the rows of their side; whole heads of queries and keys in another order; and
    findings of one kind, phrase and edit.

    Parameters
    ----------
    findings
        The findings, each of one weight.
    pairs
        All weights of the block.

    Returns
    -------
    list of WeightFinding
        A finding for each cause: first the order of heads, then all remaining causes in the order
        of ``findings``.
    """
    scales = _exchanged_scales(findings)
    if scales is not None:
        names = set(scales.tensors)
        further = [finding for finding in findings if names.isdisjoint(finding.tensors)]
        findings = [scales, *further]
    findings = _with_moved_gains(findings)
    moved_heads = _findings_of_moved_heads(findings)
    joined_findings = [_moved_heads(moved_heads)] if moved_heads else []
    by_cause: dict[tuple[Hashable, ...], list[WeightFinding]] = {}
    for finding in findings:
        if not any(finding is moved for moved in moved_heads.values()):
            by_cause.setdefault(_key_of_cause(finding), []).append(finding)
    names_of_sides = {pair.name for pair in pairs if pair.is_side}
    for members in by_cause.values():
        joined_findings.append(_one_finding(members, has_two_sides=len(names_of_sides) > 1))
    return joined_findings


def _key_of_cause(finding: WeightFinding) -> tuple[Hashable, ...]:
    """Return a key of kind, phrase and edits, equal for all findings of one cause."""
    codes = dict.fromkeys(edit.code() for edit in finding.edits.values())
    if finding.kind is Kind.ADAPTER:
        # One merge has an edit of each shape: outputs are edited by the transposed product.
        codes.clear()
    return (finding.kind, finding.phrase, *codes, *finding.swapped)


def _with_moved_gains(findings: Sequence[WeightFinding]) -> list[WeightFinding]:
    """Add gains that moved together with rows to the finding of these rows."""
    gains: list[WeightFinding] = []
    remaining: list[WeightFinding] = []
    for finding in findings:
        is_norm = finding.kind is Kind.NORM
        if is_norm and finding.pair.role.use is TensorUse.SCORE_NORM:
            gains.append(finding)
        else:
            remaining.append(finding)
    for gain in gains:
        code = gain.edits[gain.pair.name].code()
        for number, finding in enumerate(remaining):
            if _moves_rows_by(finding, code):
                remaining[number] = replace(finding, edits={**finding.edits, **gain.edits})
                break
        else:
            remaining.append(gain)
    return remaining


def _moves_rows_by(finding: WeightFinding, code: str) -> bool:
    """Return whether a finding is an order of rows with this printed code."""
    edit = finding.edits.get(finding.pair.name)
    if finding.rows is None or edit is None or isinstance(edit, Take):
        return False
    return edit.code() == code


def _exchanged_scales(findings: Sequence[WeightFinding]) -> WeightFinding | None:
    """Join the factors of queries, keys and values if their product is 1."""
    scaled: dict[str, WeightFinding] = {}
    for finding in findings:
        role = finding.pair.role
        if finding.kind is Kind.SCALED and role.use is TensorUse.WEIGHT and role.side in JOINED:
            scaled[role.side] = finding
    if len(scaled) < 2 or len(findings) > len(scaled):
        return None
    factors: list[float] = []
    for finding in scaled.values():
        edit = finding.edits[finding.pair.name]
        if not isinstance(edit, Scale):
            return None
        factors.append(edit.factor)
    if abs(np.prod(factors) - 1) > len(factors) * SAME_FACTOR:
        return None
    titles = ", ".join(finding.pair.title for finding in scaled.values())
    factors_in_words = ", ".join(f"{factor:.4g}" for factor in factors)
    description = f"{titles}: scaled by {factors_in_words}, whose product is 1"
    biases = [finding.pair.bias for finding in scaled.values()]
    unscaled = [bias.title for bias in biases if bias is not None and bias.right]
    if unscaled:
        description += f", but not their biases ({', '.join(unscaled)})"
    else:
        description += ": scales have changed places"
    first = next(iter(scaled.values()))
    return replace(
        first,
        phrase=WeightPhrase(description),
        edits=_all_edits([*scaled.values()]),
        sides=tuple(side for side in SCORED if side in scaled),
        facts={"factors": factors},
    )


def _all_edits(findings: Sequence[WeightFinding]) -> dict[str, Edit]:
    """Return the edits of several findings."""
    edits: dict[str, Edit] = {}
    for finding in findings:
        edits |= finding.edits
    return edits


def _one_finding(findings: Sequence[WeightFinding], has_two_sides: bool) -> WeightFinding:
    """Join findings of one phrase; the joined sentence lists the titles of all weights.

    ``has_two_sides`` is true if queries and keys are stored in two tensors. The description then
    states if the rows of only one of the tensors moved.
    """
    first = findings[0]
    sides: dict[str, None] = {}
    titles: dict[str, None] = {}
    swapped: dict[str, str] = {}
    for finding in findings:
        sides |= dict.fromkeys(finding.sides)
        titles[finding.pair.title] = None
        swapped |= finding.swapped
    description = first.phrase.about(*titles)
    is_order = first.rows is not None and first.kind in (Kind.ROTARY, Kind.HEADS)
    if has_two_sides and len(sides) == 1 and is_order:
        (side,) = sides
        description += f", in the {side} weights alone"
    return replace(
        first,
        phrase=WeightPhrase(description),
        sides=tuple(sides),
        edits=_all_edits(findings),
        swapped=swapped,
    )


def _findings_of_moved_heads(findings: Sequence[WeightFinding]) -> dict[str, WeightFinding]:
    """Return the findings of whole heads in another order, by side."""
    by_side: dict[str, WeightFinding] = {}
    for finding in findings:
        pair, rows = finding.pair, finding.rows
        if not pair.is_side or pair.repeated > 1 or rows is None:
            continue
        if whole_heads(rows, pair.sizes.width) is not None:
            by_side[pair.role.side] = finding
    return by_side


def _moved_heads(findings: Mapping[str, WeightFinding]) -> WeightFinding:
    """Join whole heads in another order: an order of heads, or another pairing of heads.

    Parameters
    ----------
    findings
        The findings of queries, of keys, or of both, by side.
    """
    first = next(iter(findings.values()))
    sizes = first.pair.sizes
    share = sizes.heads // sizes.groups
    heads_by_side: dict[str, np.ndarray] = {}
    for side, finding in findings.items():
        rows = np.asarray(finding.rows)
        heads_by_side[side] = rows[:: sizes.width] // sizes.width
    query_heads = heads_by_side.get("query", np.arange(sizes.heads))
    key_heads = heads_by_side.get("key", np.arange(sizes.groups)).repeat(share)
    if np.array_equal(query_heads // share, key_heads):
        cause = mismatches.head_order(query_heads, sizes.groups)
    else:
        cause = mismatches.pairing(query_heads, key_heads, sizes.groups)
    return replace(
        first,
        kind=cause.verdict,
        phrase=WeightPhrase(cause.reason),
        edits=_all_edits([*findings.values()]),
        sides=tuple(findings),
        heads=cause.heads,
        facts=cause.facts,
    )
