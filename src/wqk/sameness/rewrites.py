"""What was done to a weight: one search over rewrites of its stored rows, columns and numbers.

A weight is searched for in what it should be, the *wanted* weight in the same layout. Each cause is
a function that finds it, tried in order: rows find rows, columns find columns, what remains is
explained by heads, factors, blocks or rank. What they find in several weights of a block is then
joined. Nothing is claimed here: whoever prints a finding has applied it, and seen that the models
are then the same.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np

from wqk._machine import side_by_side
from wqk.checkpoints.checkpoint import Part, Regrouping
from wqk.sameness import mismatches
from wqk.sameness.blocks import MANY
from wqk.sameness.mismatches import Kind, Mismatch, listed
from wqk.sameness.permutations import (
    name_in_fused,
    name_of_side,
    name_permutation,
    reorders,
    whole_heads,
)
from wqk.sameness.tolerances import (
    FITS,
    HALF,
    LEFT,
    MOST,
    QUANTIZED_ALIKE,
    RANK,
    REGROUPED,
    SAME,
    SCREENED,
)
from wqk.sameness.units import (
    Adapter,
    Finding,
    Unit,
    across,
    cosines,
    largest,
    nearest,
    permutation,
    same_numbers,
    short,
    sketch,
)

# Of an order without a name: said, and found again by content.
UNORDERED = "in another order, by no known rule"
MATCHED = (
    "normed = torch.nn.functional.normalize\n"
    "order = (normed(original) @ normed(w).T).abs().argmax(1)\nw = w[order]"
)
# So many rows tell to which group a column belongs.
SAMPLED = 256
# Blocks of columns that formats give scales of their own.
BLOCKS = (16, 32, 64, 128)
# Most directions of a difference that is an adapter's.
LARGEST_RANK = 64


# -- rows that find rows -----------------------------------------------------------------------


def _rows(unit: Unit, columns: bool = False) -> Finding | None:
    """Rows in another order, of a weight and of its bias if that moved along; or columns."""
    rows = permutation(unit.wanted, unit.stored, unit.alike, unit.sketches)
    if rows is None:
        return None
    width, groups = unit.sizes.width, unit.heads // unit.repeated
    heads = whole_heads(rows, width) if unit.heads else None
    is_side = unit.role in ("query", "key") and not columns
    side = name_of_side(rows, unit.heads, unit.sizes) if is_side else None
    tiled = np.arange(unit.heads).reshape(-1, groups or 1).T.ravel()
    if unit.repeated > 1 and heads is not None and np.array_equal(heads, tiled):
        kind = Kind.PAIRING
        words = f"{unit.role} heads are repeated as a whole (repeat), not one by one "
        words += "(repeat_interleave)"
        code = f"w = w.view(-1, {groups}, {width}, D).transpose(0, 1).reshape(-1, D)"
    elif side is not None:
        kind, words, code = side
    elif heads is not None:
        kind, words = Kind.HEADS, f"{unit.role} heads in another order: {listed(heads)}"
        code = f"w = w.view(-1, {width}, D)[{heads.tolist()}].reshape(-1, D)"
    else:
        kind, named = Kind.COLUMNS if columns else Kind.ROWS, name_permutation(rows, unit.sizes)
        if len(unit.parts) > 2:
            first = unit.parts[0].rows
            by_group = first is not None and len(first) <= first[-1]
            kind, named = Kind.FUSED, name_in_fused(rows, by_group, unit.sizes)
        if named is None and _sections(unit, strangers=False) is not None:
            return None
        words, code = named or (UNORDERED, MATCHED)
        if columns and unit.grid and not code.startswith("w ="):
            words = "lie in the order of their groups: act-order was not undone"
        words = f"{'columns' if columns else 'rows'} of {{}} {words}"
        code = code.replace("%s", ", D")
    moved = unit.bias.stored[rows] if unit.bias is not None else rows
    return unit.finding(
        kind, words, code, unit.stored[rows], (moved, of_vector(code, "b")), rows=rows
    )


def _across(unit: Unit, find: Find) -> Finding | None:
    """What is found of columns, as of rows."""
    found = find(unit.turned)
    return found and replace(found, rows=None, repaired={n: v.T for n, v in found.repaired.items()})


def _transposed(unit: Unit) -> Finding | None:
    """A square weight that is stored the other way."""
    if unit.stored.shape[0] != unit.stored.shape[1] or not same_numbers(unit.wanted, unit.stored.T):
        return None
    words = "{} is stored transposed, (in, out)"
    return unit.finding(Kind.TRANSPOSED, words, "w = w.T", unit.stored.T)


def _heads(unit: Unit) -> Finding | None:
    """Whole heads that are others: copies, pruned, of another weight, or left as initialized."""
    if not unit.heads:
        return None
    wanted, stored = (
        some.reshape(unit.heads, unit.sizes.width, -1) for some in (unit.wanted, unit.stored)
    )
    for count in (n for n in range(1, unit.heads) if unit.heads % n == 0):
        groups, share = wanted.reshape(count, -1, *wanted.shape[1:]), unit.heads // count
        if all(
            same_numbers(groups[:, :, some].mean(axis=1).repeat(share, axis=0), stored[:, some])
            for some in (slice(1), slice(None))
        ):
            words = f"{unit.heads} {unit.role} heads were averaged to {count}, which loses them"
            return unit.finding(Kind.AVERAGED, words)
    strange = unit.likeness < QUANTIZED_ALIKE
    lost = np.flatnonzero(strange.reshape(stored.shape[:2]).mean(axis=1) > MOST)
    kept = np.setdiff1d(np.arange(unit.heads), lost)
    if not len(lost) or not len(kept) or not same_numbers(wanted[kept], stored[kept]):
        return None
    place = nearest(sketch(stored[lost].reshape(-1, wanted.shape[2])), unit.sketches[0])
    origin = whole_heads(place, unit.sizes.width)
    source = next((other.role for other in unit.block if _among(stored[lost], other)), "")
    kind, which = Kind.STRANGERS, f"{unit.role} heads {listed(lost)}"
    spread = float(stored[lost].std())
    if not spread:
        words = f"{which} are zero, as pruned ones are"
    elif origin is not None and same_numbers(wanted[origin], stored[lost]):
        kind = Kind.COPIES
        pairs = [f"{head} is a copy of {other}" for head, other in zip(lost, origin, strict=True)]
        words = f"{unit.role} heads copied: {', '.join(pairs[:8])}{' …' * (len(pairs) > 8)}"
    elif source:
        words = f"{which} are {source} heads of the original"
    else:
        words = (
            f"{which} are none of the original's; left as initialized? (standard deviation "
            f"{spread:.2g}, the others' {float(stored[kept].std()):.2g})"
        )
    view = f"view(-1, {unit.sizes.width}, D)[{lost.tolist()}]"
    repaired, bias = stored.copy(), None
    repaired[lost] = wanted[lost]
    if unit.bias is not None:
        rows = np.isin(np.arange(unit.heads), lost).repeat(unit.sizes.width)
        code = f"{of_vector(f'w.{view}', 'b')} = {of_vector(f'w.{view}', 'original_b')}"
        bias = np.where(rows, unit.bias.wanted, unit.bias.stored), code
    return unit.finding(
        kind,
        words,
        f"w.{view} = original.{view}",
        repaired.reshape(unit.stored.shape),
        bias,
        heads=tuple(map(int, lost)),
    )


def _among(heads: np.ndarray, other: Unit) -> bool:
    """Whether all rows of some heads are rows of another weight."""
    if other.role not in ("query", "key", "value") or other.wanted.shape[1] != heads.shape[2]:
        return False
    rows = heads.reshape(-1, heads.shape[2])
    place = nearest(sketch(rows), other.sketches[0])
    return bool((cosines(rows, other.wanted[place]) > QUANTIZED_ALIKE).all() and rows.any())


# -- numbers -----------------------------------------------------------------------------------


def _zero(unit: Unit) -> Finding | None:
    if unit.stored.any():
        return None
    return unit.finding(Kind.ZERO, "{}: all zero")


class Groups(NamedTuple):
    """Numbers of a weight that share a factor, or an offset."""

    kind: Kind
    words: str
    axes: tuple[int, ...]  # of the weight as (n, blocks, size)
    size: int = 0  # columns of a block; all of them if 0

    @property
    def code(self) -> str:
        """What divides by each group's factor."""
        dims = {(1, 2): 1, (0,): 0}.get(self.axes)
        return f"w = w / (w / original).nanmedian({dims}, keepdim=True).values"


WHOLE = (Groups(Kind.SCALED, "", (0, 1, 2)),)
FINER = (
    Groups(Kind.COLUMN_FACTORS, "columns", (0,)),
    Groups(Kind.ROW_FACTORS, "rows", (1, 2)),
    *(
        Groups(Kind.BLOCK_SCALES, f"blocks of {size} columns", (2,), size)
        for size in reversed(BLOCKS)
    ),
)


def _shared(unit: Unit, groups: Sequence[Groups], offset: bool = False) -> Finding | None:
    """Factors that are shared by groups of numbers, and offsets of each group."""
    for one in groups:
        size = unit.grid.shared if unit.grid and one.size else one.size or unit.wanted[0].size
        if unit.wanted[0].size % size or (one.size and size == unit.wanted[0].size):
            continue
        some = slice(None, None, max(1, len(unit.wanted) // SCREENED))
        w, v = unit.wanted[some], unit.stored[some]
        left, _ = _fitted(w, v, size, one.axes, offset)
        if np.linalg.norm(left) > FITS * np.linalg.norm(v - w):  # as of unrelated weights
            continue
        w, v = (x.reshape(len(x), -1, size) for x in (unit.wanted, unit.stored))
        left, factors = _fitted(w, v, size, one.axes, offset)
        if not factors.all() or (offset and not (factors > 0).all()):
            continue
        left = left / factors
        mended = w + left
        whole = np.array_equal(v, np.rint(v)) and not np.array_equal(w, np.rint(w))
        if whole and unit.wanted.ndim > 1 and (np.abs(left * factors) <= HALF).all():
            words = f"whole numbers without their scales{one.words and f', of {one.words}'}"
            return unit.finding(Kind.INTEGERS, f"{{}}: {words}")
        explains = np.linalg.norm(left) <= LEFT * np.linalg.norm(v - w)
        if not explains or not unit.fits(mended.reshape(unit.wanted.shape)):
            continue
        if offset:
            words = f"an offset for {one.words or 'all numbers'}: a zero point is off"
            return unit.finding(Kind.ZERO_POINT, f"{{}}: {words}")
        return _factors(unit, one, factors.reshape(-1), mended.reshape(unit.wanted.shape))
    return None if offset or groups is WHOLE else _shared(unit, (*WHOLE, *FINER[1:]), offset=True)


def _fitted(
    wanted: np.ndarray, stored: np.ndarray, size: int, axes: tuple[int, ...], offset: bool
) -> tuple[np.ndarray, np.ndarray]:
    """What is left of stored numbers without each group's factor, and offset; and the factors."""
    w, v = (np.asarray(some, np.float64).reshape(len(some), -1, size) for some in (wanted, stored))
    if offset:
        w, v = (x - x.mean(axis=axes, keepdims=True) for x in (w, v))
    squares = np.square(w).sum(axis=axes, keepdims=True)
    factors = (w * v).sum(axis=axes, keepdims=True) / np.where(squares > 0, squares, 1)
    return v - factors * w, factors


def _factors(unit: Unit, groups: Groups, factors: np.ndarray, mended: np.ndarray) -> Finding:
    """What factors are: one, signs, a norm's gain, or some for each row, column or block."""
    kind, bias = groups.kind, unit.bias
    if kind is Kind.BLOCK_SCALES:
        return unit.finding(kind, f"{{}}: scales of other rows or {groups.words}")
    if kind is Kind.SCALED:
        value = (bias.stored / factors[0], f"b = b / {factors[0]:.6g}") if bias else None
        code = f"{unit.variable} = {unit.variable} / {factors[0]:.6g}"
        return unit.finding(kind, f"{{}}: scaled by {factors[0]:.4g}", code, mended, value)
    is_rows = kind is Kind.ROW_FACTORS
    if np.allclose(np.abs(factors), 1, atol=SAME):
        negative = np.flatnonzero(factors < 0)
        signs = np.where(factors < 0, -1, 1)
        words = f"{{}}: other signs in {len(negative)} of {len(factors)} {groups.words}"
        place = f"{negative.tolist()}" if is_rows else f":, {negative.tolist()}"
        value = (bias.stored * signs, f"b[{place}] *= -1") if bias and is_rows else None
        signs = signs[:, None] if is_rows else signs
        return unit.finding(Kind.SIGNS, words, f"w[{place}] *= -1", unit.stored * signs, value)
    if unit.gain is not None and not is_rows and len(unit.gain.stored) == len(factors):
        for own, name in ((unit.gain.stored, unit.gain.code), (unit.gain.wanted, "")):
            for power, times in ((1, "once too often"), (2, "twice too often"), (-1, "not at all")):
                if own.all() and np.allclose(factors, own**power, rtol=SAME):
                    words = f"{{}}: the gain of the norm before it is folded in {times}"
                    if not name:
                        words = "{}: the original's gain of the norm before it is folded in"
                    code = f"w = w / {name} ** {power}" if name else groups.code
                    return unit.finding(Kind.GAIN_FOLDED, words, code, unit.stored / own**power)
    words = f"{{}}: each of its {groups.words} has a factor of its own"
    value = (bias.stored / factors, "b = original_b") if bias and is_rows else None
    return unit.finding(kind, words, groups.code, mended, value)


def _sections(unit: Unit, strangers: bool = True) -> Finding | None:
    """What was done to the parts of a fused weight, each for itself.

    Without ``strangers`` all of their rows are known to be the original's.
    """
    wrong = [part for part in unit.parts if not part.right]
    found = [one for part in wrong if (one := _of_part(unit, part)) is not None]
    told = {
        (one.verdict, one.reason, one.repair)
        for one in (each.said for each in found)
        if one.verdict is not Kind.TRANSPOSED
    }
    alike = len(told) == 1 and len(unit.parts) == len(found) > 1  # said of the whole
    if not found or len(found) < len(wrong) or alike:
        return None
    if not strangers and any(one.said.verdict is Kind.STRANGERS for one in found):
        return None
    both: dict[str, np.ndarray] = {}
    words, code = [], []
    for one in found:
        part, inner = one.unit, one.said.repair
        inner = inner if part.flipped == unit.flipped else across(inner)
        inner = re.sub(r"\b(w|b|original|original_b)\b", r"part_\1", inner)
        variables = ("w", "b", "original", "original_b")
        names = [name for name in variables if re.search(rf"part_{name}\b", inner)]
        code += [
            f"rows = {_place(np.asarray(part.rows))}",
            *(f"part_{name} = {name}[rows].clone()" for name in names),
            inner,
            *(f"{name}[rows] = part_{name}" for name in names if len(name) == 1),
        ]
        words.append(one.said.reason.replace("{}", f"the {part.role} part of {{}}"))
        for name, value in one.repaired.items():
            both.setdefault(name, (unit.stored if name == unit.name else unit.bias.stored).copy())  # type: ignore[union-attr]
            both[name][part.rows] = value
    kinds = {one.said.verdict for one in found}
    kind = kinds.pop() if len(kinds) == 1 else Kind.FUSED
    heads = found[0].said.heads if len(found) == 1 else ()
    said = Mismatch(kind, "; ".join(words), "\n".join(code), unit.sides, heads)
    return Finding(said, both, unit)


def _of_part(unit: Unit, part: Unit) -> Finding | None:
    for other in unit.parts:
        fits = other.role != part.role and other.wanted.shape == part.stored.shape
        if fits and part.stored.any() and same_numbers(other.wanted, part.stored):
            return part.finding(Kind.TENSOR, f"{{}} holds the {other.role} part")
    return _first(part)


def _place(rows: np.ndarray) -> str:
    """Some rows, in code."""
    starts = rows[[0, *np.flatnonzero(np.diff(rows) != 1) + 1]]
    length, period = len(rows) // len(starts), int(np.diff(starts)[0]) if len(starts) > 1 else 0
    first, last = int(starts[0]), int(starts[0]) + length
    if not period:
        return f"slice({first}, {last})"
    whole = f"torch.arange({len(starts) * period}).view(-1, {period})"
    return f"{whole}[:, {first}:{last}].reshape(-1)"


def _adapter(unit: Unit) -> Finding | None:
    """A difference of low rank, as of an adapter that one of the two lacks, or has otherwise."""
    if unit.adapter is not None:
        return _merged(unit, unit.adapter)
    step = unit.stored - unit.wanted
    rank = _rank(step, unit.rounding * largest(unit.wanted))
    if rank is None or not step.any(axis=1).mean() > 1 - SAME * 10:  # of some heads alone
        return None
    steps = (np.abs(np.diff(step, axis=1)) > SAME * largest(step)).any(axis=0)
    if steps.sum() < step.shape[1] // 8:  # alike in blocks of columns, whatever their size
        words = "{}: an offset for blocks of columns: a zero point is off"
        return unit.finding(Kind.ZERO_POINT, words)
    words = (
        f"weights differ by an update of rank {rank}, as of an adapter (LoRA) that is merged in "
        "one of the two alone, or otherwise"
    )
    code = f"w = original  # or merge B @ A of rank {rank}"
    return unit.finding(Kind.ADAPTER, words, code, facts={"rank": rank})


def _merged(unit: Unit, adapter: Adapter) -> Finding | None:
    """How often one checkpoint has the update that the other one's adapter is."""
    pair = (unit.wanted, unit.stored) if adapter.in_first else (unit.stored, unit.wanted)
    start, scale = adapter.start.astype(np.float64), adapter.scale
    step, moved = pair[0] - start, pair[1] - start
    size = float(np.vdot(step, step))
    found = float(np.vdot(moved, step)) / size if size else 0.0
    left = float(np.linalg.norm(moved - found * step))
    if left > 2 * SAME * np.sqrt(size) + 2 * unit.rounding * float(np.linalg.norm(start)):
        return None
    rank = _rank(step, 0.0) or 0
    known = [
        (0.0, "not merged"),
        (2.0, "merged twice"),
        (1 / scale, f"merged without its scale ({scale:.4g})"),
        (rank**0.5, "merged with alpha / √rank (rank-stabilized) instead of alpha / rank"),
        (rank**-0.5, "merged with alpha / rank instead of alpha / √rank (rank-stabilized)"),
    ]
    fitting = [text for value, text in known if abs(value - found) < 2 * SAME]
    text = " or ".join(fitting) or f"merged with {found:.4g} times its scale"
    code = f"w = w {'+' if found < 1 else '-'} {abs(1 - found):.4g} * scale * (B @ A)"
    words, facts = f"the adapter (LoRA) is {text}", {"times": found, "rank": rank}
    return unit.finding(Kind.ADAPTER, words, code, facts=facts)


def _rank(step: np.ndarray, noise: float) -> int | None:
    """The rank of a matrix if it is low and plain; None otherwise.

    Examples
    --------
    >>> random = np.random.default_rng(0)
    >>> factors = random.standard_normal((2, 600, 60))
    >>> _rank(factors[0] @ factors[1].T, 0.0), _rank(random.standard_normal((600, 600)), 0.0)
    (60, None)
    """
    most = min(LARGEST_RANK, min(step.shape) // 4)
    random = np.random.default_rng(0).standard_normal((step.shape[1], most + 8)).astype(step.dtype)
    for some in (step[:: max(1, len(step) // SAMPLED)], step):  # few rows tell a high rank
        values = np.linalg.svd(some @ random, compute_uv=False).astype(np.float64)
        floor = max(values[0] * RANK, noise * np.sqrt(some.size))
        rank = int((values > floor).sum())
        if rank > most:
            return None
    return rank if rank and values[rank] < values[rank - 1] / 3 else None


def regrouped(unit: Unit) -> Finding | None:
    """Columns of a quantized weight that have the scales of other groups (GPTQ's act-order)."""
    rows = np.unique(np.linspace(0, len(unit.stored) - 1, SAMPLED).astype(int)).tolist()
    parts = Part(unit.name, tuple((n, n + 1) for n in rows)), Part(unit.name)
    some, every = map(unit.regrouped, parts) if unit.grid else (None, None)
    if not some or not every:
        return None
    best, words = _regrouped(unit.wanted[rows], some)
    mended = every.values(best) if words else unit.stored
    if not words or not unit.fits(mended):
        return None
    return unit.finding(Kind.GROUPS, f"{{}}: {words}", repaired=mended)


def _regrouped(w: np.ndarray, again: Regrouping) -> tuple[np.ndarray, str]:
    """The groups whose scales fit the columns of a weight best, and words if others have them.

    Chosen on some rows, and told from chance on others.
    """
    count = w.shape[1]
    has, neighbors = again.has, np.arange(count) * again.groups // count

    def far(groups: np.ndarray) -> np.ndarray:
        """Squares that are left in the rows that choose, and in the others: (2, D)."""
        squares = np.square(again.values(groups) - w)
        return np.stack([squares[::2].sum(axis=0), squares[1::2].sum(axis=0)])

    best = np.argmin([far(np.full(count, n))[0] for n in range(again.groups)], axis=0)
    if len(w) < 2 or far(best)[1].sum() > REGROUPED * far(has)[1].sum():
        return has, ""
    if all(len(set(best[neighbors == n])) == 1 for n in range(again.groups)):
        return best, f"scales of other rows or blocks of {count // again.groups} columns"
    words = f"{(best != has).sum()} of {count} columns have the scales of another group"
    return best, words + ": act-order (g_idx) is ignored" * np.array_equal(has, neighbors)


# -- vectors -----------------------------------------------------------------------------------


def of_vector(code: str, name: str) -> str:
    """The code of a reordering for a bias or a gain, which has no columns.

    Examples
    --------
    >>> of_vector("w = w.view(-1, 2, 4, D).transpose(1, 2).reshape(-1, D)", "b")
    'b = b.view(-1, 2, 4).transpose(1, 2).reshape(-1)'
    """
    if code == MATCHED:
        return f"{name} = {name}[order]"
    return re.sub(r"\bw\b", name, code.replace(", D)", ")"))


# What vectors are, by their name in code.
VECTORS = {"b": (Kind.BIASES, "biases"), "gain": (Kind.NORM, "gains")}


def _vector(unit: Unit) -> Finding | None:
    """Biases and gains that are missing, in another order, or others."""
    name = unit.variable
    if name not in VECTORS:
        return None
    (kind, plural), wanted, has, width = VECTORS[name], unit.wanted, unit.stored, unit.sizes.width
    prefix = f"{unit.role}: " if kind is Kind.NORM else ""
    if kind is Kind.NORM and unit.name.endswith("bias"):
        name, plural = "b", "biases"
    elif kind is Kind.BIASES:
        prefix, plural = "same weights, ", unit.role.replace("bias", "biases")
    words, code, heads = f"other {plural}", f"{name} = original", unit.heads
    order = _order_of(wanted, has)
    if not has.any():
        words = f"{plural} are {'missing' if kind is Kind.BIASES else 'all zero'}"
    elif not wanted.any():
        words, code = f"{plural} that the original lacks", f"{name}[:] = 0"
    elif plural == "gains" and same_numbers(wanted, has + 1):
        words, code = "gains are read as stored, but are differences from 1", "gain = 1 + gain"
    elif plural == "gains" and same_numbers(wanted, has - 1):
        words, code = "gains have 1 added that were not differences from 1", "gain = gain - 1"
    elif plural == "gains" and np.ptp(has) == 0:
        words = f"gains were not converted (all are {has[0]:g})"
    elif order is not None:
        turned = unit.sizes.turned if heads else width
        steps = reorders(heads or 1, width, turned) if heads or len(has) == width else ()
        step = next((one for one in steps if np.array_equal(one.rows, order)), None)
        named = name_permutation(order, unit.sizes)
        where = " weights'" if kind is Kind.BIASES else ""
        if step is not None:
            words = f"{plural.split()[0]} were not reordered along with the{where} rows"
            code = of_vector(step.code, name)
        elif named is not None:
            words, code = f"{plural}: {named[0]}", of_vector(named[1].replace("%s", ""), name)
    return unit.finding(kind, prefix + words, code)


def _order_of(wanted: np.ndarray, stored: np.ndarray) -> np.ndarray | None:
    """The entries of one vector that make another, where all are different."""
    ours, theirs = np.argsort(wanted), np.argsort(stored)
    if len(np.unique(wanted)) < len(wanted) or not same_numbers(wanted[ours], stored[theirs]):
        return None
    rows = np.empty_like(ours)
    rows[ours] = theirs
    moved = bool((rows != np.arange(len(rows))).any())
    return rows if moved and same_numbers(wanted, stored[rows]) else None


# -- all of it ---------------------------------------------------------------------------------


Find: TypeAlias = "Callable[[Unit], Finding | None]"

# Causes, each by what finds it: tried in this order, which has the shortest descriptions first, but
# for rows, which are told in the least time.
OF_WEIGHTS: tuple[Find, ...] = (
    _zero,
    _rows,
    partial(_shared, groups=WHOLE),
    regrouped,
    partial(_across, find=partial(_rows, columns=True)),
    _transposed,
    _sections,
    _heads,
    partial(_across, find=_heads),
    partial(_shared, groups=FINER),
    _adapter,
)
OF_VECTORS: tuple[Find, ...] = (partial(_shared, groups=WHOLE), _vector)


def _first(unit: Unit) -> Finding | None:
    """The first cause that is found."""
    causes = OF_WEIGHTS if unit.wanted.ndim > 1 else OF_VECTORS
    return next((one for find in causes if (one := find(unit)) is not None), None)


def search(
    units: Sequence[Unit],
    elsewhere: Callable[[Unit], tuple[Kind, str] | None] = lambda unit: None,
) -> list[Finding]:
    """What was done to each of a block's weights that is not what it should be.

    ``elsewhere`` tells where else, among the first checkpoint's weights, one is.
    """
    wrong = [unit for unit in units if not unit.right]
    found = [*_exchanged(units, wrong, elsewhere)]
    # Weights first, which explain the biases that moved with them.
    for is_weight in (True, False):
        told = {name for one in found for name in one.repaired}
        left = [u for u in wrong if (u.wanted.ndim > 1) == is_weight and u.name not in told]
        many = any(unit.wanted.size > MANY for unit in left)
        found += filter(None, side_by_side(_first, left, many=many))
    return list(_joined(found, units))


def _exchanged(
    units: Sequence[Unit],
    wrong: Sequence[Unit],
    elsewhere: Callable[[Unit], tuple[Kind, str] | None],
) -> Iterator[Finding]:
    """Weights that are another tensor's: queries and keys exchanged, with or without biases."""
    held: dict[str, Unit] = {}
    for unit, other in product(wrong, units):
        same = other.name != unit.name and other.wanted.shape == unit.stored.shape
        if same and unit.name not in held and np.ptp(unit.stored):
            held |= {unit.name: other} if same_numbers(other.wanted, unit.stored) else {}
    by_role = {unit.role: unit for unit in units}
    query, key = by_role.get("query"), by_role.get("key")
    if query and key and held.get(query.name) is key and held.get(key.name) is query:
        biases = [one for one in (query.bias, key.bias) if one is not None]
        moved = len(biases) == 2 and all(one.name in held for one in biases)
        repaired = {unit.name: unit.wanted for unit in (query, key, *biases * moved)}
        words = "transposed: queries and keys have changed places" + ", biases too" * moved
        code = "w_q, w_k = w_k, w_q" + "; b_q, b_k = b_k, b_q" * moved
        said = Mismatch(Kind.EXCHANGED, words, code, ("query", "key"))
        yield Finding(said, repaired, query)
        held = {name: other for name, other in held.items() if name not in repaired}
    for unit in wrong:
        there = held.get(unit.name)
        where = (Kind.TENSOR, f"{short(there.name)} of the original") if there else elsewhere(unit)
        if where is not None and unit.variable in ("w", "b"):
            yield unit.finding(where[0], f"{{}} holds {where[1]}")


def _joined(found: Sequence[Finding], units: Sequence[Unit]) -> Iterator[Finding]:
    """Findings of several weights that are one cause: heads that moved, equal words and code."""
    heads: dict[str, Finding] = {}
    for one in found:
        unit, is_side = one.unit, one.unit.role in ("query", "key") and one.unit.repeated == 1
        if is_side and one.rows is not None and whole_heads(one.rows, unit.sizes.width) is not None:
            heads[unit.role] = one
    if heads:
        yield _moved_heads(heads)
    same: dict[tuple[str, str, str], list[Finding]] = {}
    for one in found:
        if not any(one is other for other in heads.values()):
            same.setdefault((one.said.verdict, one.said.reason, one.said.repair), []).append(one)
    for some in same.values():
        first, said = some[0], some[0].said
        sides = tuple(dict.fromkeys(side for one in some for side in one.said.sides))
        words = said.reason
        alone = len(sides) == 1 and len({u.name for u in units if u.role in ("query", "key")}) > 1
        if alone and first.rows is not None and said.verdict in (Kind.ROTARY, Kind.HEADS):
            words += f", in the {sides[0]} weights alone"
        repaired = {name: value for one in some for name, value in one.repaired.items()}
        titles = tuple(dict.fromkeys(one.unit.title for one in some))
        words = words.replace("{}", ", ".join(titles))
        yield replace(first, said=replace(said, reason=words, sides=sides), repaired=repaired)


def _moved_heads(moved: Mapping[str, Finding]) -> Finding:
    """Whole heads in another order: on both sides alike, or so that other heads meet."""
    first = next(iter(moved.values()))
    sizes, repaired = first.unit.sizes, dict[str, np.ndarray]()
    share, orders, code = sizes.heads // sizes.groups, dict[str, np.ndarray](), []
    for side, one in moved.items():
        rows = np.asarray(one.rows)
        orders[side] = rows[:: sizes.width] // sizes.width
        repaired |= one.repaired
        code += [f"{line}  # {side}" for line in one.said.repair.split("\n")]
    queries = orders.get("query", np.arange(sizes.heads))
    keys = orders.get("key", np.arange(sizes.groups)).repeat(share)
    said = mismatches.pairing(queries, keys, sizes.groups)
    if np.array_equal(queries // share, keys):
        said = mismatches.head_order(queries)
    said = replace(said, repair="\n".join(code), sides=tuple(moved))
    return replace(first, said=said, repaired=repaired)
