"""Finders: each looks for one cause of a weight that is not as expected, and for the edit of it.

Finders are tried in order: rows find rows, columns find columns; heads, factors, blocks or a low
rank explain the rest. Findings of several weights of a block are then joined into one. A finding is
a proposal: `wqk.sameness.diagnosis` runs its edits, and prints it if the models are then the same.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from wqk._machine import side_by_side
from wqk.checkpoints.checkpoint import Part, Regrouping
from wqk.sameness import mismatches
from wqk.sameness.blocks import MANY
from wqk.sameness.decomposed_merges import wrong_merge
from wqk.sameness.edits import (
    Axes,
    Clear,
    DivideByGain,
    Edit,
    HeadOrder,
    Negate,
    Offset,
    Permute,
    Scale,
    ScaleHeads,
    Stretches,
    Take,
    Then,
    Transpose,
    Within,
)
from wqk.sameness.matching import (
    cosines,
    largest,
    nearest,
    permutation,
    same_numbers,
    sketch,
)
from wqk.sameness.mismatches import Kind, listed
from wqk.sameness.permutations import (
    NamedOrder,
    Reorder,
    name_in_fused,
    name_of_side,
    name_permutation,
    reorders,
    whole_heads,
)
from wqk.sameness.repairs import Recut
from wqk.sameness.tolerances import (
    FITS,
    HALF,
    LEFT,
    MOST,
    OF_ORDER,
    QUANTIZED_ALIKE,
    RANK,
    REGROUPED,
    SAME,
    SAME_FACTOR,
    SCREENED,
)
from wqk.sameness.weight_pairs import SCORED, AdapterEffect, Finding, Gain, WeightPair, short

# Description of an order without a name.
UNORDERED = "in another order, by no known rule"
# Rows that are enough to find the group of a column.
SAMPLED_ROWS = 256
# Blocks of columns that formats give scales of their own.
BLOCKS = (16, 32, 64, 128)
# Pairs of heads that a description lists.
LISTED_HEADS = 8

# The sides of a fused weight, in the order in which they are joined.
JOINED = ("query", "key", "value")

Find: TypeAlias = "Callable[[WeightPair], Finding | None]"


# -- rows and columns --------------------------------------------------------------------------


def find_rows(pair: WeightPair) -> Finding | None:
    """Find rows that lie in another order, of a weight and of its bias if that moved along."""
    rows = permutation(pair.expected, pair.actual, pair.alike, pair.sketches)
    if rows is None:
        return None
    repeated = _repeated_as_a_whole(pair, rows)
    if repeated is not None:
        return repeated
    side = name_of_side(rows, pair.heads, pair.sizes) if pair.is_side else None
    if side is not None:
        kind, (description, edit) = side
        return pair.finding(kind, description, edit, rows=rows)
    heads = whole_heads(rows, pair.sizes.width) if pair.heads else None
    if heads is not None:
        order = HeadOrder(tuple(heads.tolist()), pair.sizes.width)
        description = f"{pair.role} heads in another order: {listed(heads)}"
        return pair.finding(Kind.HEADS, description, Permute(0, order), rows=rows)
    kind, name = Kind.ROWS, name_permutation(rows, pair.sizes)
    if len(pair.parts) > 2:
        first = pair.parts[0].rows
        by_group = first is not None and len(first) <= first[-1]
        kind, name = Kind.FUSED, name_in_fused(rows, by_group, pair.sizes)
    if name is None and find_in_parts(pair, strangers=False) is not None:
        return None
    description, edit = name or NamedOrder(UNORDERED, Take())
    return pair.finding(kind, f"rows of {{}} {description}", edit, rows=rows)


def _repeated_as_a_whole(pair: WeightPair, rows: np.ndarray) -> Finding | None:
    """Find key heads that are repeated as a whole, not one by one."""
    width, groups = pair.sizes.width, pair.heads // pair.repeated
    if pair.repeated == 1 or not pair.heads:
        return None
    heads = whole_heads(rows, width)
    tiled = np.arange(pair.heads).reshape(-1, groups).T.ravel()
    if heads is None or not np.array_equal(heads, tiled):
        return None
    description = (
        f"{pair.role} heads are repeated as a whole (repeat), not one by one (repeat_interleave)"
    )
    edit = Permute(0, Axes((pair.repeated, groups, width), (1, 0, 2)))
    return pair.finding(Kind.PAIRING, description, edit, rows=rows)


def find_columns(pair: WeightPair) -> Finding | None:
    """Find columns that lie in another order."""
    return _of_columns(pair, _find_column_order)


def _find_column_order(turned: WeightPair) -> Finding | None:
    """Find rows of a turned weight that lie in another order."""
    rows = permutation(turned.expected, turned.actual, turned.alike, turned.sketches)
    if rows is None:
        return None
    heads = whole_heads(rows, turned.sizes.width) if turned.heads else None
    if heads is not None:
        order = HeadOrder(tuple(heads.tolist()), turned.sizes.width)
        description = f"{turned.role} heads in another order: {listed(heads)}"
        return turned.finding(Kind.HEADS, description, Permute(0, order))
    name = name_permutation(rows, turned.sizes)
    description, edit = name or NamedOrder(UNORDERED, Take())
    if turned.grid and name is None:
        description = "lie in the order of their groups: act-order was not undone"
    return turned.finding(Kind.COLUMNS, f"columns of {{}} {description}", edit)


def _of_columns(pair: WeightPair, find: Find) -> Finding | None:
    """Return a finding of columns, as of the rows of the turned weight."""
    finding = find(pair.turned)
    if finding is None:
        return None
    edits = {name: edit.turned() for name, edit in finding.edits.items()}
    return replace(finding, rows=None, edits=edits, pair=pair)


def find_transposed(pair: WeightPair) -> Finding | None:
    """Find a square weight that is stored the other way."""
    rows, columns = pair.actual.shape
    if rows != columns or not same_numbers(pair.expected, pair.actual.T):
        return None
    linear, other = "(out, in)", "(in, out)"
    if pair.layout.turned_first != pair.layout.turned_last:
        linear, other = other, linear
    description = f"{{}}: stored transposed, {other} instead of {linear}"
    return pair.finding(Kind.TRANSPOSED, description, Transpose(), with_bias=False)


# -- heads -------------------------------------------------------------------------------------


def find_heads(pair: WeightPair) -> Finding | None:
    """Find whole heads that are others: copies, pruned, of another weight, or initialized anew."""
    if not pair.heads:
        return None
    shape = pair.heads, pair.sizes.width, -1
    expected, actual = pair.expected.reshape(shape), pair.actual.reshape(shape)
    averaged = _averaged_to(expected, actual)
    if averaged is not None:
        description = f"{pair.heads} {pair.role} heads were averaged to {averaged}"
        return pair.finding(Kind.AVERAGED, f"{description}, which loses them")
    strange = pair.likeness < QUANTIZED_ALIKE
    lost = np.flatnonzero(strange.reshape(actual.shape[:2]).mean(axis=1) > MOST)
    kept = np.setdiff1d(np.arange(pair.heads), lost)
    if not len(lost) or not len(kept) or not same_numbers(expected[kept], actual[kept]):
        return None
    kind, description = _origin_of_heads(pair, expected, actual, lost, kept)
    edits: list[Edit] = []
    for stretch in np.split(lost, np.flatnonzero(np.diff(lost) != 1) + 1):
        length = len(stretch) * pair.sizes.width
        rows = Stretches(int(stretch[0]) * pair.sizes.width, length, length, 1)
        edits.append(Within(0, rows, Take()))
    edit = edits[0]
    for further in edits[1:]:
        edit = Then(edit, further)
    return pair.finding(kind, description, edit, heads=tuple(lost.tolist()))


def _averaged_to(expected: np.ndarray, actual: np.ndarray) -> int | None:
    """Number of groups of heads, each of which was replaced by its mean; None if none were."""
    heads = len(expected)
    for count in range(1, heads):
        if heads % count:
            continue
        groups, share = expected.reshape(count, -1, *expected.shape[1:]), heads // count
        means = [groups[:, :, :1].mean(axis=1).repeat(share, axis=0)]
        if not same_numbers(means[0], actual[:, :1]):  # the first row rules most out
            continue
        if same_numbers(groups.mean(axis=1).repeat(share, axis=0), actual):
            return count
    return None


def _origin_of_heads(
    pair: WeightPair, expected: np.ndarray, actual: np.ndarray, lost: np.ndarray, kept: np.ndarray
) -> tuple[Kind, str]:
    """Kind and description of heads (H, R, D) that are not the expected ones."""
    which = f"{pair.role} heads {listed(lost)}"
    spread = float(actual[lost].std())
    if not spread:
        return Kind.STRANGERS, f"{which} are zero, as pruned ones are"
    place = nearest(sketch(actual[lost].reshape(-1, expected.shape[2])), pair.sketches[0])
    origin = whole_heads(place, pair.sizes.width)
    if origin is not None and same_numbers(expected[origin], actual[lost]):
        copies = [
            f"{head} is a copy of {source}" for head, source in zip(lost, origin, strict=True)
        ]
        more = " …" if len(copies) > LISTED_HEADS else ""
        copied = ", ".join(copies[:LISTED_HEADS])
        return Kind.COPIES, f"{pair.role} heads copied: {copied}{more}"
    for source in pair.block:
        if _are_rows_of(actual[lost], source):
            return Kind.STRANGERS, f"{which} are {source.role} heads of the original"
    usual = float(actual[kept].std())
    return Kind.STRANGERS, (
        f"{which} are none of the original's; left as initialized? (standard deviation "
        f"{spread:.2g}, the others' {usual:.2g})"
    )


def _are_rows_of(heads: np.ndarray, source: WeightPair) -> bool:
    """Return whether all rows of some heads are rows of another weight."""
    is_side = source.role.part == "weight" and source.role.side in ("query", "key", "value")
    if not is_side or source.role.fused or source.expected.shape[1] != heads.shape[2]:
        return False
    rows = heads.reshape(-1, heads.shape[2])
    place = nearest(sketch(rows), source.sketches[0])
    return bool((cosines(rows, source.expected[place]) > QUANTIZED_ALIKE).all() and rows.any())


# -- numbers -----------------------------------------------------------------------------------


def find_zeros(pair: WeightPair) -> Finding | None:
    """Find a weight that is all zero."""
    return None if pair.actual.any() else pair.finding(Kind.ZERO, "{}: all zero")


class Groups(NamedTuple):
    """Numbers of a weight that share a factor, or an offset."""

    kind: Kind
    description: str
    axes: tuple[int, ...]  # of the weight as (n, blocks, size)
    size: int = 0  # columns of a block; all of them if 0


WHOLE = (Groups(Kind.SCALED, "", (0, 1, 2)),)
FINER = (
    Groups(Kind.COLUMN_FACTORS, "columns", (0,)),
    Groups(Kind.ROW_FACTORS, "rows", (1, 2)),
    *(
        Groups(Kind.BLOCK_SCALES, f"blocks of {size} columns", (2,), size)
        for size in reversed(BLOCKS)
    ),
)


def find_factor(pair: WeightPair) -> Finding | None:
    """Find one factor of all numbers."""
    return _find_shared(pair, WHOLE, offset=False)


def find_factors(pair: WeightPair) -> Finding | None:
    """Find factors, or else offsets, of rows, columns or blocks."""
    factors = _find_shared(pair, FINER, offset=False)
    return factors or _find_shared(pair, (*WHOLE, *FINER[1:]), offset=True)


def _find_shared(pair: WeightPair, groups: Sequence[Groups], offset: bool) -> Finding | None:
    """Find factors that groups of numbers share, or offsets of each group."""
    columns = pair.expected[0].size
    for group in groups:
        size = group.size or columns
        if pair.grid and group.size:
            size = pair.grid.shared
        if columns % size or (group.size and size == columns):
            continue
        finding = _shared_by(pair, group, size, offset)
        if finding is not None:
            return finding
    return None


def _shared_by(pair: WeightPair, group: Groups, size: int, offset: bool) -> Finding | None:
    """Find factors or offsets of one way of grouping numbers."""
    sample = slice(None, None, max(1, len(pair.expected) // SCREENED))
    expected, actual = pair.expected[sample], pair.actual[sample]
    residual, _ = _fitted(expected, actual, size, group.axes, offset)
    # Of unrelated weights, a fit of some rows leaves nearly everything.
    if np.linalg.norm(residual) > FITS * np.linalg.norm(actual - expected):
        return None
    blocks = (len(pair.expected), -1, size)
    expected, actual = pair.expected.reshape(blocks), pair.actual.reshape(blocks)
    residual, factors = _fitted(expected, actual, size, group.axes, offset)
    if not factors.all() or (offset and not (factors > 0).all()):
        return None
    are_integers = np.array_equal(actual, np.rint(actual))
    are_integers = are_integers and not np.array_equal(expected, np.rint(expected))
    if are_integers and pair.is_matrix and (np.abs(residual) <= HALF).all():
        of_group = f", of {group.description}" if group.description else ""
        return pair.finding(Kind.INTEGERS, f"{{}}: whole numbers without their scales{of_group}")
    residual = residual / factors
    mended = (expected + residual).reshape(pair.expected.shape)
    explains = np.linalg.norm(residual) <= LEFT * np.linalg.norm(actual - expected)
    if not explains or not pair.fits(mended):
        return None
    if offset:
        where = group.description or "all numbers"
        return pair.finding(Kind.ZERO_POINT, f"{{}}: an offset for {where}: a zero point is off")
    return _name_factors(pair, group, factors.reshape(-1))


def _fitted(
    expected: np.ndarray, actual: np.ndarray, size: int, axes: tuple[int, ...], offset: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the residual of each group's factor, and of its offset; and the factors."""
    blocks = (len(expected), -1, size)
    w = np.asarray(expected, np.float64).reshape(blocks)
    v = np.asarray(actual, np.float64).reshape(blocks)
    if offset:
        w = w - w.mean(axis=axes, keepdims=True)
        v = v - v.mean(axis=axes, keepdims=True)
    squares = np.square(w).sum(axis=axes, keepdims=True)
    factors = (w * v).sum(axis=axes, keepdims=True) / np.where(squares > 0, squares, 1)
    return v - factors * w, factors


def _name_factors(pair: WeightPair, group: Groups, factors: np.ndarray) -> Finding:
    """Name factors: one of all, signs, a norm's gain, or some of each row, column or block."""
    if group.kind is Kind.BLOCK_SCALES:
        return pair.finding(group.kind, f"{{}}: scales of other rows or {group.description}")
    if group.kind is Kind.SCALED:
        factor = float(factors[0])
        description = f"{{}}: scaled by {factor:.4g}"
        return pair.finding(group.kind, description, Scale(factor))
    is_rows = group.kind is Kind.ROW_FACTORS
    if np.allclose(np.abs(factors), 1, atol=SAME):
        negative = np.flatnonzero(factors < 0)
        description = f"{{}}: other signs in {len(negative)} of {len(factors)} {group.description}"
        edit = Negate(0 if is_rows else 1, tuple(negative.tolist()))
        return pair.finding(Kind.SIGNS, description, edit)
    gain = pair.gain
    if gain is not None and not is_rows and len(gain.actual) == len(factors):
        folded = _find_folded_gain(pair, gain, factors)
        if folded is not None:
            return folded
    of_heads = _find_factors_of_heads(pair, is_rows, factors)
    if of_heads is not None:
        return of_heads
    description = f"{{}}: each of its {group.description} has a factor of its own"
    return pair.finding(group.kind, description)


def _find_factors_of_heads(pair: WeightPair, is_rows: bool, factors: np.ndarray) -> Finding | None:
    """Find factors of rows or columns that are one number for each head."""
    heads = (pair if is_rows else pair.turned).heads
    if heads < 2 or len(factors) % heads or len(factors) == heads:
        return None
    by_head = factors.reshape(heads, -1)
    means = by_head.mean(axis=1)
    if not np.allclose(by_head, means[:, None], rtol=SAME_FACTOR):
        return None
    edit = ScaleHeads(0 if is_rows else 1, tuple(means.tolist()), by_head.shape[1])
    kind = Kind.ROW_FACTORS if is_rows else Kind.COLUMN_FACTORS
    description = "{}: each head has a factor of its own"
    return pair.finding(kind, description, edit, facts={"factors": edit.factors})


def _find_folded_gain(pair: WeightPair, gain: Gain, factors: np.ndarray) -> Finding | None:
    """Find a norm's gain in the factors of columns."""
    powers = {1: "once too often", 2: "twice too often", -1: "not at all"}
    for values, of_reference in ((gain.actual, False), (gain.expected, True)):
        for power, times in powers.items():
            if not values.all() or not np.allclose(factors, values**power, rtol=SAME):
                continue
            description = f"{{}}: the gain of the norm before it is folded in {times}"
            if of_reference:
                description = "{}: the original's gain of the norm before it is folded in"
            edit = DivideByGain(1, gain.name, values, gain.offset, power, of_reference)
            return pair.finding(Kind.GAIN_FOLDED, description, edit)
    return None


# -- fused weights -----------------------------------------------------------------------------


def find_in_parts(pair: WeightPair, strangers: bool = True) -> Finding | None:
    """Find changes of the parts of a fused weight, each for itself.

    Without ``strangers`` all of their rows are known to be the original's.
    """
    wrong = [part for part in pair.parts if not part.right]
    findings = [finding for part in wrong if (finding := _find_in_part(pair, part)) is not None]
    if not findings or len(findings) < len(wrong):
        return None
    distinct = {
        (finding.kind, finding.description, finding.edits[pair.name].code())
        for finding in findings
        if finding.kind is not Kind.TRANSPOSED
    }
    if len(distinct) == 1 and len(pair.parts) == len(findings) > 1:
        return None  # the same change of each part is a change of the whole
    if not strangers and any(finding.kind is Kind.STRANGERS for finding in findings):
        return None
    descriptions: list[str] = []
    edits: dict[str, Edit] = {}
    for finding in findings:
        part = finding.pair
        if part.rows is None:
            return None
        rows = Stretches.of(part.rows)
        if not np.array_equal(rows.indices, part.rows):
            return None
        title = f"the {part.role} part of {{}}"
        descriptions.append(finding.description.replace("{}", title))
        for name, edit in finding.edits.items():
            within = Within(0, rows, edit)
            edits[name] = Then(edits[name], within) if name in edits else within
    kinds = {finding.kind for finding in findings}
    kind = kinds.pop() if len(kinds) == 1 else Kind.FUSED
    heads = findings[0].heads if len(findings) == 1 else ()
    return Finding(kind, "; ".join(descriptions), edits, pair, None, pair.sides, heads)


def _find_in_part(pair: WeightPair, part: WeightPair) -> Finding | None:
    """Find the change of one part of a fused weight."""
    for source in pair.parts:
        fits = source.role != part.role and source.expected.shape == part.actual.shape
        if fits and part.actual.any() and same_numbers(source.expected, part.actual):
            return part.finding(Kind.TENSOR, f"{{}} holds the {source.role} part")
    return find_first(part)


# -- adapters ----------------------------------------------------------------------------------


def find_decomposed(pair: WeightPair) -> Finding | None:
    """Find a wrong merge of an adapter of DoRA, before its factors of rows are taken for others."""
    adapter = pair.adapter
    if adapter is None or adapter.update is None:
        return None
    merged = pair.actual if adapter.in_reference else pair.expected
    mistake = wrong_merge(adapter.start, adapter.update, merged)
    if not mistake:
        return None
    facts = {"rank": adapter.rank}
    return pair.finding(Kind.ADAPTER, f"the adapter (DoRA) is {mistake}", facts=facts)


def find_adapter(pair: WeightPair) -> Finding | None:
    """Find a difference of low rank, as of an adapter that was merged otherwise in one of two."""
    if pair.adapter is not None:
        return _find_wrong_merge(pair, pair.adapter)
    step = pair.actual - pair.expected
    rank = low_rank(step, pair.rounding * largest(pair.expected))
    if rank is None or not step.any(axis=1).mean() > 1 - SAME * 10:  # of some heads alone
        return None
    steps = (np.abs(np.diff(step, axis=1)) > SAME * largest(step)).any(axis=0)
    if steps.sum() < step.shape[1] // 8:  # alike in blocks of columns, whatever their size
        description = "{}: an offset for blocks of columns: a zero point is off"
        return pair.finding(Kind.ZERO_POINT, description)
    description = (
        f"weights differ by an update of rank {rank}, as of an adapter (LoRA) that is merged in "
        "one of the two alone, or otherwise"
    )
    return pair.finding(Kind.ADAPTER, description, facts={"rank": rank})


def _find_wrong_merge(pair: WeightPair, adapter: AdapterEffect) -> Finding | None:
    """Find the share of an adapter's update that the model without the adapter file contains."""
    adapted, merged = pair.expected, pair.actual
    if not adapter.in_reference:
        adapted, merged = merged, adapted
    start = adapter.start.astype(np.float64)
    update, change = adapted - start, merged - start
    size = float(np.vdot(update, update))
    share = float(np.vdot(change, update)) / size if size else 0.0
    residual = float(np.linalg.norm(change - share * update))
    allowed = 2 * SAME * np.sqrt(size) + 2 * pair.rounding * float(np.linalg.norm(start))
    if residual > allowed:
        return None
    known = [
        (0.0, "not merged"),
        (2.0, "merged twice"),
        (1 / adapter.scale, f"merged without its scale ({adapter.scale:.4g})"),
    ]
    if adapter.stabilized:
        text = "merged with alpha / rank instead of alpha / √rank (rank-stabilized)"
        known.append((adapter.rank**-0.5, text))
    else:
        text = "merged with alpha / √rank (rank-stabilized) instead of alpha / rank"
        known.append((adapter.rank**0.5, text))
    fitting = [text for value, text in known if abs(value - share) < 2 * SAME]
    description = " or ".join(fitting) or f"merged with {share:.4g} times its scale"
    facts = {"times": share, "rank": adapter.rank}
    return pair.finding(Kind.ADAPTER, f"the adapter (LoRA) is {description}", facts=facts)


def low_rank(step: np.ndarray, noise: float) -> int | None:
    """Return the rank of a matrix if it is low and plain; None otherwise.

    Examples
    --------
    >>> random = np.random.default_rng(0)
    >>> factors = random.standard_normal((2, 600, 60))
    >>> low_rank(factors[0] @ factors[1].T, 0.0), low_rank(random.standard_normal((600, 600)), 0.0)
    (60, None)
    """
    most = min(LARGEST_RANK, min(step.shape) // 4)
    shape = (step.shape[1], most + 8)
    random = np.random.default_rng(0).standard_normal(shape).astype(step.dtype)
    sample = step[:: max(1, len(step) // SAMPLED_ROWS)]
    for rows in (sample, step):  # few rows rule a high rank out
        values = np.linalg.svd(rows @ random, compute_uv=False).astype(np.float64)
        floor = max(values[0] * RANK, noise * np.sqrt(rows.size))
        rank = int((values > floor).sum())
        if rank > most:
            return None
    return rank if rank and values[rank] < values[rank - 1] / 3 else None


# Most directions of a difference that is an adapter's, where no adapter is known.
LARGEST_RANK = 64


# -- quantized weights -------------------------------------------------------------------------


def find_groups(pair: WeightPair) -> Finding | None:
    """Find columns of a quantized weight that have the scales of other groups (act-order)."""
    if not pair.grid:
        return None
    rows = np.unique(np.linspace(0, len(pair.actual) - 1, SAMPLED_ROWS).astype(int)).tolist()
    sampled = pair.regrouped(Part(pair.name, tuple((row, row + 1) for row in rows)))
    regrouping = pair.regrouped(Part(pair.name))
    if not sampled or not regrouping:
        return None
    groups, description = _find_column_groups(pair.expected[rows], sampled)
    if not description or not pair.fits(regrouping.values(groups)):
        return None
    return pair.finding(Kind.GROUPS, f"{{}}: {description}")


def _find_column_groups(expected: np.ndarray, regrouping: Regrouping) -> tuple[np.ndarray, str]:
    """Return the groups whose scales fit the columns best, and a description if they are others.

    The groups are chosen on half of the rows, and compared with chance on the other half.
    """
    count = expected.shape[1]
    actual, neighbors = regrouping.has, np.arange(count) * regrouping.groups // count

    def squares(groups: np.ndarray) -> np.ndarray:
        """Residual squares of either half of the rows, (2, D)."""
        residual = np.square(regrouping.values(groups) - expected)
        return np.stack([residual[::2].sum(axis=0), residual[1::2].sum(axis=0)])

    by_group = [squares(np.full(count, group))[0] for group in range(regrouping.groups)]
    best = np.argmin(by_group, axis=0)
    if len(expected) < 2 or squares(best)[1].sum() > REGROUPED * squares(actual)[1].sum():
        return actual, ""
    sets = [set(best[neighbors == group]) for group in range(regrouping.groups)]
    if all(len(members) == 1 for members in sets):
        return best, f"scales of other rows or blocks of {count // regrouping.groups} columns"
    description = f"{(best != actual).sum()} of {count} columns have the scales of another group"
    if np.array_equal(actual, neighbors):
        description += ": act-order (g_idx) is ignored"
    return best, description


# -- vectors -----------------------------------------------------------------------------------


def find_vector(pair: WeightPair) -> Finding | None:
    """Find biases and gains that are missing, in another order, or others."""
    if not (pair.role.is_bias or pair.role.is_norm):
        return None
    expected, actual = pair.expected, pair.actual
    kind = Kind.NORM if pair.role.is_norm else Kind.BIASES
    plural = "biases" if pair.name.endswith("bias") or kind is Kind.BIASES else "gains"
    of_side = plural
    prefix = f"{pair.role}: "
    if kind is Kind.BIASES:
        prefix = "same weights, "
        of_side = str(pair.role).replace("bias", "biases")
    if not actual.any():
        missing = "missing" if kind is Kind.BIASES else "all zero"
        return pair.finding(kind, f"{prefix}{of_side} are {missing}")
    if not expected.any():
        return pair.finding(kind, f"{prefix}{of_side} that the original lacks", Clear())
    if plural == "gains" and same_numbers(expected, actual + 1):
        description = f"{prefix}gains are read as stored, but are differences from 1"
        return pair.finding(kind, description, Offset(1.0))
    if plural == "gains" and same_numbers(expected, actual - 1):
        description = f"{prefix}1 was added to gains that are not stored as differences from 1"
        return pair.finding(kind, description, Offset(-1.0))
    if plural == "gains" and np.ptp(actual) == 0:
        return pair.finding(kind, f"{prefix}gains were not converted (all are {actual[0]:g})")
    order = order_of_entries(expected, actual)
    if order is None:
        return pair.finding(kind, f"{prefix}other {of_side}")
    heads, width = pair.heads, pair.sizes.width
    steps: tuple[Reorder, ...] = ()
    if heads:
        steps = reorders(heads, width, pair.sizes.turned)
    elif len(actual) == width:
        steps = reorders(1, width, width)
    step = next((step for step in steps if np.array_equal(step.rows, order)), None)
    if step is not None:
        where = "the weights' rows" if kind is Kind.BIASES else "the rows"
        first = plural if kind is Kind.BIASES else of_side
        description = f"{prefix}{first} were not reordered along with {where}"
        return pair.finding(kind, description, Permute(0, step.order))
    name = name_permutation(order, pair.sizes)
    if name is None:
        return pair.finding(kind, f"{prefix}other {of_side}")
    return pair.finding(kind, f"{prefix}{of_side}: {name.description}", name.edit)


def order_of_entries(expected: np.ndarray, actual: np.ndarray) -> np.ndarray | None:
    """Return the entries of one vector that make another, where all are different."""
    of_expected, of_actual = np.argsort(expected), np.argsort(actual)
    are_distinct = len(np.unique(expected)) == len(expected)
    if not are_distinct or not same_numbers(expected[of_expected], actual[of_actual]):
        return None
    rows = np.empty_like(of_expected)
    rows[of_expected] = of_actual
    # Near entries exchange their ranks by noise alone, which an order does not explain.
    noise = np.linalg.norm(actual[rows] - expected)
    is_moved = noise <= OF_ORDER * np.linalg.norm(actual - expected)
    return rows if is_moved and same_numbers(expected, actual[rows]) else None


# -- all finders -------------------------------------------------------------------------------


def _find_columns_of_heads(pair: WeightPair) -> Finding | None:
    """Find heads among the columns of an output."""
    return _of_columns(pair, find_heads)


# Tried in this order: the shortest descriptions first, but for rows, which take the least time.
OF_WEIGHTS: tuple[Find, ...] = (
    find_zeros,
    find_decomposed,
    find_rows,
    find_factor,
    find_groups,
    find_columns,
    find_transposed,
    find_in_parts,
    find_heads,
    _find_columns_of_heads,
    find_factors,
    find_adapter,
)
OF_VECTORS: tuple[Find, ...] = (find_factor, find_vector)


def find_first(pair: WeightPair) -> Finding | None:
    """Return the first finding of a weight or a vector."""
    for find in OF_WEIGHTS if pair.is_matrix else OF_VECTORS:
        finding = find(pair)
        if finding is not None:
            return finding
    return None


Elsewhere: TypeAlias = "Callable[[WeightPair], tuple[Kind, str] | None]"


def search(pairs: Sequence[WeightPair], elsewhere: Elsewhere = lambda pair: None) -> list[Finding]:
    """Find the changes of each of a block's weights that is not as expected.

    ``elsewhere`` returns the other place among the reference's weights that a weight is from.
    """
    wrong = [pair for pair in pairs if not pair.right]
    findings = _find_moved_tensors(pairs, wrong, elsewhere)
    if not findings and (recut := find_recut(pairs)) is not None:
        findings = [recut]
    # Weights first, which explain the biases that moved with them.
    for is_matrix in (True, False):
        explained = {name for finding in findings for name in finding.tensors}
        unexplained = [
            pair for pair in wrong if pair.is_matrix == is_matrix and pair.name not in explained
        ]
        many = any(pair.expected.size > MANY for pair in unexplained)
        found = side_by_side(find_first, unexplained, many=many)
        findings += [finding for finding in found if finding is not None]
    return _joined(findings, pairs)


def _find_moved_tensors(
    pairs: Sequence[WeightPair], wrong: Sequence[WeightPair], elsewhere: Elsewhere
) -> list[Finding]:
    """Find weights that are another tensor's, or exchanged with it."""
    sources: dict[str, WeightPair] = {}
    for pair in wrong:
        source = _source_of(pair, pairs)
        if source is not None:
            sources[pair.name] = source
    findings = _exchanged(wrong, sources)
    explained = {name for finding in findings for name in finding.tensors}
    for pair in wrong:
        if pair.name in explained or pair.role.is_norm:
            continue
        source = sources.get(pair.name)
        if source is not None:
            description = f"{{}} holds {short(source.name)} of the original"
            findings.append(pair.finding(Kind.TENSOR, description))
        elif (place := elsewhere(pair)) is not None:
            findings.append(pair.finding(place[0], f"{{}} holds {place[1]}"))
    return findings


def _source_of(pair: WeightPair, pairs: Sequence[WeightPair]) -> WeightPair | None:
    """Return the pair whose expected numbers a tensor holds."""
    if not np.ptp(pair.actual):
        return None
    for source in pairs:
        fits = source.name != pair.name and source.expected.shape == pair.actual.shape
        if fits and same_numbers(source.expected, pair.actual):
            return source
    return None


def _exchanged(wrong: Sequence[WeightPair], sources: Mapping[str, WeightPair]) -> list[Finding]:
    """Find tensors that have changed places: queries and keys with or without their biases."""
    by_name = {pair.name: pair for pair in wrong}
    swapped: dict[str, str] = {}
    for name, source in sources.items():
        back = sources.get(source.name)
        if back is not None and back.name == name and source.name in by_name:
            swapped[name] = source.name
    # Weights first, whose biases may have moved along.
    names = sorted(swapped, key=lambda name: by_name[name].role.part != "weight")
    findings: list[Finding] = []
    explained: set[str] = set()
    for name in names:
        if name in explained:
            continue
        finding = _exchange(by_name[name], by_name[swapped[name]], swapped)
        findings.append(finding)
        explained.update(finding.swapped)
    return findings


def _exchange(pair: WeightPair, other: WeightPair, swapped: Mapping[str, str]) -> Finding:
    """Return the finding of two tensors that have changed places."""
    places = {pair.name: other.name, other.name: pair.name}
    biases = [pair.bias, other.bias]
    moved = all(bias is not None and bias.name in swapped for bias in biases)
    if moved:
        names = [bias.name for bias in biases if bias is not None]
        places |= {names[0]: names[1], names[1]: names[0]}
    sides = {pair.role.side, other.role.side}
    kind = Kind.TENSOR
    description = f"{short(pair.name)} and {short(other.name)} have changed places"
    if sides == {"query", "key"} and pair.role.part == "weight":
        kind = Kind.EXCHANGED
        description = "queries and keys have changed places"
    if moved:
        description += " with their biases"
    scored = tuple(side for side in ("query", "key") if side in sides)
    return Finding(kind, description, {}, pair, sides=scored, swapped=places)


def find_recut(pairs: Sequence[WeightPair]) -> Finding | None:
    """Find queries, keys and values whose rows lie in each other: a fused weight that was cut.

    The rows of all three are joined, and searched for among the expected rows of all three.
    """
    sides = {pair.role.side: pair for pair in pairs if pair.heads and pair.role.part == "weight"}
    if any(side not in sides for side in JOINED):
        return None
    weights = [sides[side] for side in JOINED]
    columns = {pair.expected.shape[1] for pair in weights}
    turned = {pair.layout.turned_first != pair.layout.turned_last for pair in weights}
    is_plain = all(len(pair.layout.shape) == 2 and pair.repeated == 1 for pair in weights)
    if len(columns) > 1 or len(turned) > 1 or not is_plain or any(p.role.fused for p in weights):
        return None
    if sum(not pair.right for pair in weights) < 2:
        return None
    if all(_has_own_rows(pair) for pair in weights):
        return None
    rows = _rows_of_all(weights)
    lengths = [len(pair.actual) for pair in weights]
    owner = np.arange(3).repeat(lengths)
    if rows is None or np.array_equal(owner[rows], owner):
        return None
    first = weights[0]
    name = name_in_fused(rows, by_group=False, sizes=first.sizes)
    if name is None:
        edits: dict[str, Edit] = {pair.name: Take() for pair in weights}
        description = f"rows of queries, keys and values lie among each other {UNORDERED}"
        return Finding(Kind.FUSED, description, edits, first, sides=SCORED)
    assert isinstance(name.edit, Permute)
    axis = 1 if turned.pop() else 0
    recuts = [Recut(tuple(p.name for p in weights), tuple(lengths), name.edit.order, axis)]
    biases = [pair.bias for pair in weights]
    if all(bias is not None and not bias.right for bias in biases):
        names = tuple(bias.name for bias in biases if bias is not None)
        recuts.append(Recut(names, tuple(lengths), name.edit.order))
    description = f"queries, keys and values are cut from one weight whose rows {name.description}"
    return Finding(Kind.FUSED, description, {}, first, sides=SCORED, recuts=tuple(recuts))


def _has_own_rows(pair: WeightPair) -> bool:
    """Return whether rows at equal distances are all among the expected rows of the same weight."""
    if pair.right:
        return True
    expected, actual = pair.sketches
    rows = np.unique(np.linspace(0, len(actual) - 1, SCREENED).astype(int))
    likeness = np.abs(actual[rows] @ expected.T).max(axis=1)
    return bool((likeness > pair.alike).all())


def _rows_of_all(weights: Sequence[WeightPair]) -> np.ndarray | None:
    """Return the actual rows of several weights that make the expected rows of all of them."""
    expected = np.concatenate([pair.expected for pair in weights])
    actual = np.concatenate([pair.actual for pair in weights])
    sketches = [np.concatenate([pair.sketches[which] for pair in weights]) for which in (0, 1)]
    alike = min(pair.alike for pair in weights)
    return permutation(expected, actual, alike, sketches)


def _joined(findings: Sequence[Finding], pairs: Sequence[WeightPair]) -> list[Finding]:
    """Join findings of several weights that are one cause: moved heads, equal descriptions."""
    scales = _exchanged_scales(findings)
    if scales is not None:
        names = set(scales.tensors)
        findings = [scales, *(one for one in findings if names.isdisjoint(one.tensors))]
    findings = _with_moved_gains(findings)
    heads: dict[str, Finding] = {}
    for finding in findings:
        pair, rows = finding.pair, finding.rows
        if not pair.is_side or pair.repeated > 1 or rows is None:
            continue
        if whole_heads(rows, pair.sizes.width) is not None:
            heads[pair.role.side] = finding
    joined = [_moved_heads(heads)] if heads else []
    alike: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        if any(finding is moved for moved in heads.values()):
            continue
        codes = dict.fromkeys(edit.code() for edit in finding.edits.values())
        key = (finding.kind, finding.description, *codes, *finding.swapped)
        alike.setdefault(key, []).append(finding)
    scored = {pair.name for pair in pairs if pair.is_side}
    for members in alike.values():
        joined.append(_merged(members, is_scored_apart=len(scored) > 1))
    return joined


def _with_moved_gains(findings: Sequence[Finding]) -> list[Finding]:
    """Add gains that moved with the rows of their side to the finding of these rows."""
    moved: list[Finding] = []
    for finding in findings:
        if finding.kind is Kind.NORM and finding.pair.role.part == "norm before the score":
            moved.append(finding)
    joined = [finding for finding in findings if not any(finding is gain for gain in moved)]
    for gain in moved:
        code = gain.edits[gain.pair.name].code()
        for number, rows in enumerate(joined):
            edit = rows.edits.get(rows.pair.name)
            is_moved = rows.rows is not None and edit is not None and edit.code() == code
            if is_moved and not isinstance(edit, Take):
                joined[number] = replace(rows, edits={**rows.edits, **gain.edits})
                break
        else:
            joined.append(gain)
    return joined


def _exchanged_scales(findings: Sequence[Finding]) -> Finding | None:
    """Join the factors of queries, keys and values whose product is 1, as exchanged scales have."""
    scaled: dict[str, Finding] = {}
    for finding in findings:
        pair = finding.pair
        if finding.kind is Kind.SCALED and pair.role.part == "weight" and pair.role.side in JOINED:
            scaled[pair.role.side] = finding
    if len(scaled) < 2 or len(findings) > len(scaled):
        return None
    edits = [finding.edits[finding.pair.name] for finding in scaled.values()]
    factors = [edit.factor for edit in edits if isinstance(edit, Scale)]
    if len(factors) < len(edits) or abs(np.prod(factors) - 1) > len(factors) * SAME_FACTOR:
        return None
    first = next(iter(scaled.values()))
    titles = ", ".join(finding.pair.title for finding in scaled.values())
    listed_factors = ", ".join(f"{factor:.4g}" for factor in factors)
    description = (
        f"{titles}: scaled by {listed_factors}, whose product is 1: scales have changed places"
    )
    return replace(
        first,
        description=description,
        edits={name: edit for one in scaled.values() for name, edit in one.edits.items()},
        sides=tuple(side for side in SCORED if side in scaled),
        facts={"factors": factors},
    )


def _merged(findings: Sequence[Finding], is_scored_apart: bool) -> Finding:
    """Merge findings of one description."""
    first = findings[0]
    sides = tuple(dict.fromkeys(side for finding in findings for side in finding.sides))
    titles = dict.fromkeys(finding.pair.title for finding in findings)
    description = first.description.replace("{}", ", ".join(titles))
    is_order = first.rows is not None and first.kind in (Kind.ROTARY, Kind.HEADS)
    if is_scored_apart and len(sides) == 1 and is_order:
        description += f", in the {sides[0]} weights alone"
    edits = {name: edit for finding in findings for name, edit in finding.edits.items()}
    swapped = {name: source for finding in findings for name, source in finding.swapped.items()}
    return replace(first, description=description, sides=sides, edits=edits, swapped=swapped)


def _moved_heads(moved: Mapping[str, Finding]) -> Finding:
    """Join whole heads in another order: on both sides alike, or so that other heads meet."""
    first = next(iter(moved.values()))
    sizes = first.pair.sizes
    share = sizes.heads // sizes.groups
    orders: dict[str, np.ndarray] = {}
    edits: dict[str, Edit] = {}
    for side, finding in moved.items():
        rows = np.asarray(finding.rows)
        orders[side] = rows[:: sizes.width] // sizes.width
        edits |= finding.edits
    queries = orders.get("query", np.arange(sizes.heads))
    keys = orders.get("key", np.arange(sizes.groups)).repeat(share)
    cause = mismatches.pairing(queries, keys, sizes.groups)
    if np.array_equal(queries // share, keys):
        cause = mismatches.head_order(queries)
    return replace(
        first,
        kind=cause.verdict,
        description=cause.reason,
        edits=edits,
        sides=tuple(moved),
        heads=cause.heads,
        facts=cause.facts,
    )
