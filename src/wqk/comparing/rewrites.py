"""What was done to a weight: one search over rewrites of its stored rows, columns and numbers.

A weight is searched for in what it should be, the *wanted* weight in the same layout. Each cause is
a `Rewrite`, tried in order: rows find rows, columns find columns, what remains is explained by
heads, factors, blocks or rank. What they find in several weights of a block is then joined. Nothing
is claimed here: whoever prints a finding has applied it, and seen that the models are then the
same.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Part, Regrouping
from wqk.comparing import mismatches
from wqk.comparing.mismatches import Kind, listed
from wqk.comparing.permutations import (
    name_in_fused,
    name_of_side,
    name_permutation,
    reorders,
    whole_heads,
)
from wqk.comparing.units import (
    QUANTIZED_ALIKE,
    SAME,
    Adapter,
    Finding,
    Unit,
    alike,
    along,
    cosines,
    largest,
    nearest,
    permutation,
    same_numbers,
    short,
    sketch,
)  # fmt: skip

# A head is another one where this share of its rows are others.
MOST = 0.5
# Columns belong to other groups if their squares are left with this share, on half of so many rows.
REGROUPED, SAMPLED = 0.7, 256
# Blocks of columns that formats give scales of their own.
BLOCKS = (16, 32, 64, 128)
# Most directions of a difference that is an adapter's.
LARGEST_RANK = 64


# -- rows that find rows -----------------------------------------------------------------------


def _rows(unit: Unit) -> Finding | None:
    """Rows in another order, of a weight and of its bias if that moved along."""
    rows = permutation(unit.wanted, unit.stored, unit.alike)
    if rows is None:
        return None
    width, groups = unit.sizes.width, unit.heads // unit.repeated
    heads = whole_heads(rows, width) if unit.heads else None
    side = name_of_side(rows, unit.heads, unit.sizes) if unit.role in ("query", "key") else None
    tiled = np.arange(unit.heads).reshape(-1, groups or 1).T.ravel()
    if unit.repeated > 1 and heads is not None and np.array_equal(heads, tiled):
        kind = Kind.PAIRING
        words = f"{unit.role} heads are repeated as a whole (repeat), not one by one "
        words += "(repeat_interleave)"
        code = f"w = w.view(-1, {groups}, {width}, D).transpose(0, 1).reshape(-1, D)"
    elif side is not None:
        kind, words, code = side
    elif heads is not None and unit.role in ("query", "key"):
        kind, words = Kind.HEADS, f"{unit.role} heads in another order"
        code = f"w = w.view(-1, {width}, D)[{heads.tolist()}].reshape(-1, D)"
    else:
        kind, named = Kind.ROWS, name_permutation(rows, unit.sizes)
        if unit.sections:
            kind, named = Kind.FUSED, name_in_fused(rows, unit.sections, unit.sizes)
        words, code = named or ("in another order, by no known rule", "")
        words, code = f"rows of {unit.title} {words}", code.replace("%s", ", D")
    repaired = {unit.name: np.ascontiguousarray(unit.stored[rows])}
    bias = unit.bias
    if bias is not None and not bias.right and along(bias.wanted, bias.stored[rows]):
        repaired[bias.name] = bias.stored[rows]
        code += f"\n{of_vector(code, 'b')}" if code else ""
    return Finding(kind, words, code, repaired, unit, rows)


def _columns(unit: Unit) -> Finding | None:
    """Columns in another order."""
    place = permutation(unit.wanted.T, unit.stored.T, unit.alike)
    if place is None:
        return None
    words, code = name_permutation(place, unit.sizes) or ("in another order, by no known rule", "")
    if unit.grid and not code.startswith("w ="):
        words = "lie in the order of their groups: act-order was not undone"
        code = "w = w[:, (torch.nn.functional.normalize(w, dim=0).T @ original).argmax(0)]"
    elif code:
        code = f"w = w.T; {code.replace('%s', ', w.shape[1]')}; w = w.T"
    words = f"columns of {unit.title} {words}"
    return unit.finding(Kind.COLUMNS, words, code, unit.stored[:, place])


def _transposed(unit: Unit) -> Finding | None:
    """A square weight that is stored the other way."""
    if unit.stored.shape[0] != unit.stored.shape[1] or not same_numbers(unit.wanted, unit.stored.T):
        return None
    words = f"{unit.title} is stored transposed, (in, out)"
    return unit.finding(Kind.TRANSPOSED, words, "w = w.T", unit.stored.T)


def _heads(unit: Unit) -> Finding | None:
    """Whole heads that are others: copies, pruned, of another weight, or left as initialized."""
    if not unit.heads or unit.role not in ("query", "key", "value"):
        return None
    shape = (unit.heads, unit.sizes.width, -1)
    strange = cosines(unit.wanted, unit.stored) < QUANTIZED_ALIKE
    lost = np.flatnonzero(strange.reshape(shape[:2]).mean(axis=1) > MOST)
    kept = np.setdiff1d(np.arange(unit.heads), lost)
    wanted, stored = (some.reshape(shape) for some in (unit.wanted, unit.stored))
    if not len(lost) or not len(kept) or not same_numbers(wanted[kept], stored[kept]):
        return None
    place = nearest(sketch(stored[lost].reshape(-1, wanted.shape[2])), sketch(unit.wanted))
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
    code = f"w.{view} = original.{view}"
    repaired = stored.copy()
    repaired[lost] = wanted[lost]
    both = {unit.name: repaired.reshape(unit.stored.shape)}
    bias = unit.bias
    if bias is not None and not bias.right:
        both[bias.name] = np.where(
            np.isin(np.arange(unit.heads), lost).repeat(unit.sizes.width), bias.wanted, bias.stored
        )
        code += f"\n{of_vector(f'w.{view}', 'b')} = {of_vector(f'w.{view}', 'original_b')}"
    return Finding(kind, words, code, both, unit, heads=tuple(map(int, lost)))


def _among(heads: np.ndarray, other: Unit) -> bool:
    """Whether all rows of some heads are rows of another weight."""
    if other.role not in ("query", "key", "value") or other.wanted.shape[1] != heads.shape[2]:
        return False
    rows = heads.reshape(-1, heads.shape[2])
    place = nearest(sketch(rows), sketch(other.wanted))
    return bool((cosines(rows, other.wanted[place]) > QUANTIZED_ALIKE).all() and rows.any())


# -- numbers -----------------------------------------------------------------------------------


def _ratio(a: np.ndarray, b: np.ndarray, axis: int | None) -> np.ndarray:
    """The factors that bring a closest to b, along an axis."""
    squares = np.square(a).sum(axis=axis, keepdims=True)
    return np.asarray((a * b).sum(axis=axis, keepdims=True) / np.where(squares > 0, squares, 1))


def _zero(unit: Unit) -> Finding | None:
    if unit.stored.any():
        return None
    return unit.finding(Kind.ZERO, f"{unit.title}: all zero", "w = original", unit.wanted)


def _scaled(unit: Unit) -> Finding | None:
    """One factor for all; that of queries and keys is told from their scores."""
    if unit.role in ("query", "key"):
        return None
    factor = float(_ratio(unit.wanted, unit.stored, None).item())
    if not factor or abs(factor - 1) < SAME or not unit.fits(unit.stored / factor):
        return None
    words, code = f"{unit.title}: scaled by {factor:.4g}", f"w = w / {factor:.6g}"
    return unit.finding(Kind.SCALED, words, code, unit.stored / factor)


def _factors(unit: Unit) -> Finding | None:
    """Signs or factors of rows, or factors of columns, such as gains."""
    w, v = unit.wanted, unit.stored
    for axis, what in ((1, "rows"), (0, "columns")):
        factors = _ratio(w, v, axis)
        flat = factors.ravel()
        if (
            not flat.all()
            or np.isclose(flat, flat[0], rtol=SAME).all()
            or not unit.fits(v / factors)
        ):
            continue
        if axis and np.allclose(np.abs(flat), 1, atol=SAME):
            negative = np.flatnonzero(flat < 0)
            words = f"{unit.title}: other signs in {len(negative)} of {len(v)} rows"
            return _signs(unit, negative, words)
        gain = unit.gain if axis == 0 and unit.gain is not None else np.zeros(0)
        for power, times in ((1, "once too often"), (2, "twice too often"), (-1, "out")):
            if len(gain) == len(flat) and gain.all() and np.allclose(flat, gain**power, rtol=SAME):
                words = f"{unit.title}: the gain of the norm before it is folded in {times}"
                code = f"w = w / gain ** {power}"
                return unit.finding(Kind.GAIN_FOLDED, words, code, v / factors)
        kind = Kind.ROW_FACTORS if axis else Kind.COLUMN_FACTORS
        words = f"{unit.title}: each of its {what} has a factor of its own"
        code = f"w = w / (w / original).nanmedian({axis}, keepdim=True).values"
        return unit.finding(kind, words, code, v / factors)
    return None


def _signs(unit: Unit, negative: np.ndarray, words: str) -> Finding:
    """Rows of the other sign, and entries of their bias if they have it too."""
    signs = np.ones(len(unit.stored), unit.stored.dtype)
    signs[negative] = -1
    found = unit.finding(
        Kind.SIGNS, words, f"w[{negative.tolist()}] *= -1", unit.stored * signs[:, None]
    )
    bias = unit.bias
    if bias is None or bias.right or not alike(bias.wanted, bias.stored * signs):
        return found
    both = {**found.repaired, bias.name: bias.stored * signs}
    return replace(found, repaired=both, code=f"{found.code}\nb[{negative.tolist()}] *= -1")


def _in_blocks(unit: Unit) -> Finding | None:
    """Factors and offsets of blocks of columns: scales, zero points, integers without scales."""
    w, v = (np.asarray(some, np.float64) for some in (unit.wanted, unit.stored))
    for size in (unit.grid.shared,) if unit.grid else reversed(BLOCKS):
        if v.shape[1] % size or (v.shape[1] == size and not unit.grid):
            continue
        a, b = (x.reshape(len(v), -1, size) for x in (w, v))
        means = [x.mean(axis=2, keepdims=True) for x in (a, b)]
        factors = _ratio(a - means[0], b - means[1], 2)
        if not (factors > 0).all():
            continue
        scaled = (b / factors).reshape(v.shape)
        offset = ((b - means[1]) / factors + means[0]).reshape(v.shape)
        nearest = min(np.linalg.norm(scaled - w), np.linalg.norm(offset - w))
        # Factors fit the noise of rounding, too, but hardly lessen it.
        if nearest > np.linalg.norm(v - w) / 4:
            continue
        if unit.fits(scaled):
            kind = Kind.BLOCK_SCALES
            words = f"scales of other rows or blocks of {size} columns"
            if np.array_equal(v, np.rint(v)):
                kind = Kind.INTEGERS
                words = f"whole numbers without their scales, of blocks of {size} columns"
        elif unit.fits(offset):
            kind = Kind.ZERO_POINT
            words = f"an offset for each block of {size} columns: a zero point is off"
        else:
            continue
        return unit.finding(kind, f"{unit.title}: {words}", "w = original", unit.wanted)
    return None


def _adapter(unit: Unit) -> Finding | None:
    """A difference of low rank, as of an adapter that one of the two lacks, or has otherwise."""
    if unit.adapter is not None:
        return _merged(unit, unit.adapter)
    step = unit.stored - unit.wanted
    rank = _rank(step, unit.rounding * largest(unit.wanted))
    if rank is None or not step.any(axis=1).mean() > 1 - SAME * 10:  # of some heads alone
        return None
    words = (
        f"weights differ by an update of rank {rank}, as of an adapter (LoRA) that is merged in "
        "one of the two alone, or otherwise"
    )
    code = f"w = w ± scale * (B @ A)  # A and B of rank {rank}"
    return unit.finding(Kind.ADAPTER, words, code, unit.wanted, facts={"rank": rank})


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
    return unit.finding(Kind.ADAPTER, words, code, unit.wanted, facts=facts)


def _rank(step: np.ndarray, noise: float) -> int | None:
    """The rank of a matrix if it is low and plain; None otherwise."""
    most = min(LARGEST_RANK, min(step.shape) // 4)
    random = np.random.default_rng(0)
    some = step @ random.standard_normal((step.shape[1], most + 8)).astype(step.dtype)
    values = np.linalg.svd(some, compute_uv=False).astype(np.float64)
    floor = max(values[0] * 1e-4, noise * np.sqrt(step.size))
    rank = int((values > floor).sum())
    return rank if 0 < rank <= most and values[rank] < values[rank - 1] / 3 else None


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
    return unit.finding(Kind.GROUPS, f"{unit.title}: {words}", "w = original", mended)


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
    return re.sub(r"\bw\b", name, code.replace(", D)", ")"))


def _bias(unit: Unit) -> Finding | None:
    """Biases that are missing, too many, or in another order than the rows."""
    if not unit.role.startswith("bias"):
        return None
    words, code = f"other {unit.role.replace('bias', 'biases')}", "b = original"
    if not unit.stored.any():
        words = f"{unit.role.replace('bias', 'biases')} are missing"
    elif not unit.wanted.any():
        words, code = f"{unit.role.replace('bias', 'biases')} that the original lacks", "b[:] = 0"
    else:
        for step in reorders(unit.heads, unit.sizes.width, unit.sizes.turned) if unit.heads else ():
            if alike(unit.wanted, unit.stored[step.rows]):
                words = "biases were not reordered along with the weights' rows"
                code = of_vector(step.code, "b")
                break
    return unit.finding(Kind.BIASES, f"same weights, {words}", code, unit.wanted)


def _gain(unit: Unit) -> Finding | None:
    """Gains or biases of norms."""
    if not unit.role.startswith("norm"):
        return None
    wanted, has = unit.wanted, unit.stored
    words, code = "other gains", "gain = original"
    if unit.name.endswith("bias"):
        words, code = "other biases", "norm.bias = original"
    elif alike(wanted, has + 1):
        words, code = "gains are read as stored, but are differences from 1", "gain = 1 + gain"
    elif alike(wanted, has - 1):
        words, code = "gains have 1 added that were not differences from 1", "gain = gain - 1"
    elif np.ptp(has) == 0:
        words = f"gains were not converted (all are {has[0]:g})"
    elif len(has) == unit.sizes.width:
        for step in reorders(1, unit.sizes.width, unit.sizes.width):
            if alike(wanted, has[step.rows]):
                words = "gains were not reordered along with the rows"
                code = of_vector(step.code, "gain")
                break
    return unit.finding(Kind.NORM, f"{unit.role}: {words}", code, wanted)


# -- all of it ---------------------------------------------------------------------------------


class Rewrite(NamedTuple):
    """A cause: what it may be, and how it is found, undone and said."""

    kinds: tuple[Kind, ...]
    find: Callable[[Unit], Finding | None]


# Tried in this order: shortest descriptions first.
OF_WEIGHTS = (
    Rewrite((Kind.ZERO,), _zero),
    Rewrite((Kind.SCALED,), _scaled),
    Rewrite((Kind.GROUPS,), regrouped),
    Rewrite((Kind.ROTARY, Kind.HEADS, Kind.PAIRING, Kind.DIMENSIONS, Kind.ROWS, Kind.FUSED), _rows),
    Rewrite((Kind.COLUMNS,), _columns),
    Rewrite((Kind.TRANSPOSED,), _transposed),
    Rewrite((Kind.STRANGERS, Kind.COPIES), _heads),
    Rewrite((Kind.SIGNS, Kind.ROW_FACTORS, Kind.COLUMN_FACTORS, Kind.GAIN_FOLDED), _factors),
    Rewrite((Kind.BLOCK_SCALES, Kind.INTEGERS, Kind.ZERO_POINT), _in_blocks),
    Rewrite((Kind.ADAPTER,), _adapter),
)
OF_VECTORS = (Rewrite((Kind.BIASES,), _bias), Rewrite((Kind.NORM,), _gain),
              Rewrite((Kind.SCALED,), _scaled))  # fmt: skip


def search(
    units: Sequence[Unit], elsewhere: Callable[[Unit], str] = lambda unit: ""
) -> list[Finding]:
    """What was done to each of a block's weights that is not what it should be.

    ``elsewhere`` tells where else, among the first checkpoint's weights, one is.
    """
    wrong = [unit for unit in units if not unit.right]
    found = [*_exchanged(units, wrong, elsewhere)]
    done = {name for one in found for name in one.repaired}
    # Weights first, which explain the biases that moved with them.
    for unit in sorted(wrong, key=lambda unit: -unit.wanted.ndim):
        if unit.name in done:
            continue
        attempts = (one.find(unit) for one in (OF_WEIGHTS if unit.wanted.ndim > 1 else OF_VECTORS))
        first = next((one for one in attempts if one is not None), None)
        if first is not None:
            found.append(first)
            done |= set(first.repaired)
    return list(_joined(found, units))


def _exchanged(
    units: Sequence[Unit], wrong: Sequence[Unit], elsewhere: Callable[[Unit], str]
) -> Iterator[Finding]:
    """Weights that are another tensor's: queries and keys exchanged, with or without biases."""
    held: dict[str, Unit] = {}
    for unit in wrong:
        for other in units:
            same = other.name != unit.name and other.wanted.shape == unit.stored.shape
            if same and np.ptp(unit.stored) and same_numbers(other.wanted, unit.stored):
                held[unit.name] = other
                break
    by_role = {unit.role: unit for unit in units}
    query, key = by_role.get("query"), by_role.get("key")
    if query and key and held.get(query.name) is key and held.get(key.name) is query:
        biases = [one for one in (query.bias, key.bias) if one is not None]
        moved = len(biases) == 2 and all(one.name in held for one in biases)
        said = mismatches.exchanged(moved)
        changed = (query, key, *(biases if moved else ()))
        repaired = {unit.name: unit.wanted for unit in changed}
        yield Finding(said.verdict, said.reason, said.repair, repaired, query, sides=said.sides)
        held = {name: other for name, other in held.items() if name not in repaired}
    for unit in wrong:
        there = held.get(unit.name)
        where = short(there.name) if there else elsewhere(unit)
        if where and unit.wanted.ndim == 2:
            words = f"{unit.title} holds {where}"
            yield unit.finding(Kind.TENSOR, words, "w = original", unit.wanted)


def _joined(found: Sequence[Finding], units: Sequence[Unit]) -> Iterator[Finding]:
    """Findings of several weights that are one cause: heads that moved, equal words and code."""
    heads = {
        one.unit.role: one for one in found
        if one.rows is not None and whole_heads(one.rows, one.unit.sizes.width) is not None
        and one.unit.repeated == 1 and one.unit.role in ("query", "key")
    }  # fmt: skip
    if heads:
        yield _moved_heads(heads)
    same: dict[tuple[str, str, str], list[Finding]] = {}
    for one in found:
        if not any(one is other for other in heads.values()):
            same.setdefault((one.kind, one.words, one.code), []).append(one)
    for some in same.values():
        first = some[0]
        sides = tuple(dict.fromkeys(side for one in some for side in one.mismatch.sides))
        words = first.words
        alone = len(sides) == 1 and len({u.name for u in units if u.role in ("query", "key")}) > 1
        if alone and first.rows is not None and first.kind in (Kind.ROTARY, Kind.HEADS):
            words += f", in the {sides[0]} weights alone"
        repaired = {name: value for one in some for name, value in one.repaired.items()}
        yield replace(first, words=words, repaired=repaired, sides=sides)


def _moved_heads(moved: Mapping[str, Finding]) -> Finding:
    """Whole heads in another order: on both sides alike, or so that other heads meet."""
    first = next(iter(moved.values()))
    sizes, repaired = first.unit.sizes, dict[str, np.ndarray]()
    share, orders, code = sizes.heads // sizes.groups, dict[str, np.ndarray](), []
    for side, one in moved.items():
        rows = np.asarray(one.rows)
        orders[side] = rows[:: sizes.width] // sizes.width
        repaired |= one.repaired
        code.append(f"{one.code}  # {side}")
    queries = orders.get("query", np.arange(sizes.heads))
    keys = orders.get("key", np.arange(sizes.groups)).repeat(share)
    if np.array_equal(queries // share, keys):
        said = mismatches.head_order(queries)
    else:
        said = replace(
            mismatches.pairing(queries, keys, sizes.groups),
            repair="\n".join(code),
            sides=tuple(moved),
        )
    return replace(
        first, kind=said.verdict, words=said.reason, code=said.repair, repaired=repaired,
        sides=said.sides, heads=said.heads, facts=said.facts,
    )  # fmt: skip
