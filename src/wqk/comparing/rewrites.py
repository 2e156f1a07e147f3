"""What was done to a weight: one search over rewrites of its stored rows, columns and numbers.

A weight is searched for in what it should be, the *wanted* weight in the same layout. Rows find
rows, columns find columns, what remains is explained by factors, blocks or rank. A permutation is
named as a view of the rows with axes in another order, which is its code, too. Nothing is claimed
here: whoever prints a finding has applied it, and seen that the models are then the same.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise, permutations, product

import numpy as np

from wqk.checkpoints.checkpoint import Grid, Part, Regrouping
from wqk.checkpoints.number_types import rounding
from wqk.comparing.origins import cosines, nearest, sketch

# Rows and columns are the same above this cosine; numbers are, up to this share of their size.
ALIKE, SAME = 0.999, 1e-2
# What a mismatch of each kind is called.
TITLES = {
    "another tensor": "another tensor's weights",
    "rows": "other order of rows",
    "columns": "other order of columns",
    "fused": "other layout of the fused weight",
    "transposed": "stored transposed",
    "scaled": "scaled",
    "gain folded": "a norm's gain, folded in as well",
    "signs": "other signs",
    "rows scaled": "other factors of rows",
    "columns scaled": "other factors of columns",
    "block scales": "scales of other blocks",
    "integers": "not dequantized",
    "zero point": "zero points off",
    "groups": "columns in other groups",
    "zero": "all zero",
}

# By how many times the expected error of rounding a quantized weight may differ.
ROUNDED = 1.5
# Orders in which the codes of a word can be taken for others: halves of a byte, AWQ's and its
# inverse, all of a word reversed, or its bytes.
WORD_ORDERS = (
    (1, 0), (0, 2, 4, 6, 1, 3, 5, 7), (0, 4, 1, 5, 2, 6, 3, 7), (7, 6, 5, 4, 3, 2, 1, 0),
    (3, 2, 1, 0), (6, 7, 4, 5, 2, 3, 0, 1),
)  # fmt: skip
# Columns belong to other groups if their squares are left with this share, on half of so many rows.
REGROUPED, SAMPLED = 0.7, 256
# Blocks of columns that formats give scales of their own.
BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class Finding:
    """What was done to one stored weight, and what undoes it.

    Attributes
    ----------
    kind
        The cause: a key of `TITLES`.
    words
        What it is, in a phrase.
    code
        PyTorch that undoes it, of the stored weight ``w`` and what it should be, ``original``.
    tensor
        The weight's name.
    repaired
        The weight after it.
    rows
        The stored rows that make it, where they were in another order.
    """

    kind: str
    words: str
    code: str
    tensor: str
    repaired: np.ndarray = field(repr=False)
    rows: np.ndarray | None = field(default=None, repr=False)  # of the stored weight, in order

    @property
    def title(self) -> str:
        """What a mismatch of this kind is called."""
        return TITLES[self.kind]


@dataclass(frozen=True)
class Sizes:
    """The numbers of a block that views of its weights are made of."""

    heads: int
    groups: int
    width: int

    @property
    def factors(self) -> tuple[tuple[int, str], ...]:
        """Lengths of axes, those with a meaning first."""
        share = self.heads // self.groups
        named = [
            (self.heads, "heads"), (self.groups, "key heads"), (self.width, "head width"),
            (share, "queries per key head"), (share + 2, "queries, key and value"),
            (self.width // 2, "rotary pairs"), (3, "q, k, v"), (2, "halves"), (4, "4"), (8, "8"),
        ]  # fmt: skip
        seen: dict[int, str] = {}
        for length, name in named:
            if length > 1:
                seen.setdefault(length, name)
        return tuple(seen.items())


@cache
def _views(count: int, sizes: Sizes) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Shapes of up to four axes with orders of them, the simplest first."""
    lengths = [length for length, _ in sizes.factors]
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    for axes in (2, 3, 4):
        for known in product(lengths, repeat=axes - 1):
            rest, left = divmod(count, math.prod(known))
            if left or rest < 2:
                continue
            for place in range(axes):
                shape = (*known[:place], rest, *known[place:])
                for order in permutations(range(axes)):
                    kept = any(b == a + 1 for a, b in pairwise(order))
                    if (not kept and order[0] != 0) or (axes < 4 and order != tuple(range(axes))):
                        found.setdefault((shape, order))
    return tuple(found)


def name_permutation(rows: np.ndarray, sizes: Sizes) -> tuple[str, str, str] | None:
    """Kind, words and code of the permutation ``w[rows]``; None if it has no short name.

    The code ends in ``%s`` where further axes stand.

    Examples
    --------
    >>> rows = np.arange(24).reshape(2, 4, 3).transpose(0, 2, 1).ravel()
    >>> name_permutation(rows, Sizes(2, 2, 12))[2]
    'w.view(2, 4, 3%s).transpose(1, 2).reshape(24%s)'
    """
    count = len(rows)
    steps = np.diff(rows) % count
    if (steps == 1).all():
        by = int(rows[0]) if 2 * rows[0] <= count else int(rows[0]) - count
        return "rolled", f"rolled by {by}", f"w.roll({-by}, 0)"
    if (np.diff(rows) == -1).all():
        return "flipped", "in reverse order", "w.flip(0)"
    start = np.arange(count)
    some = np.unique(np.linspace(0, count - 1, 17).astype(int))
    for shape, order in _views(count, sizes):
        moved = start.reshape(shape).transpose(order).ravel()
        if np.array_equal(moved[some], rows[some]) and np.array_equal(moved, rows):
            axes = ", ".join(map(str, shape))
            changed = [at for at, axis in enumerate(order) if at != axis]
            if len(changed) == 2:
                turn = f"transpose({changed[0]}, {changed[1]})"
            else:
                turn = f"permute({', '.join(map(str, order))}%s)"
            return (
                "view",
                _view_words(shape, order, sizes),
                (f"w.view({axes}%s).{turn}.reshape({count}%s)"),
            )
    share = sizes.heads // sizes.groups
    periods = (sizes.width, 3 * sizes.width, (share + 2) * sizes.width, 2, 32, 64, 16, 128)
    for length in dict.fromkeys(periods):
        if length < count and count % length == 0:
            table = rows.reshape(-1, length) - length * np.arange(count // length)[:, None]
            if (table == table[0]).all() and table[0].min() >= 0 and table[0].max() < length:
                return _within(table[0], count, sizes)
    if count <= 64 or len(moved := np.flatnonzero(rows != start)) <= 16:
        moved = np.flatnonzero(rows != start)
        listed = " ".join(map(str, moved[:16]))
        taken = rows[moved].tolist()
        return (
            "listed",
            f"rows {listed} in each other's places",
            (f"w[{moved.tolist()}] = w[{taken}]"),
        )
    return None


def _within(inner: np.ndarray, count: int, sizes: Sizes) -> tuple[str, str, str]:
    """A permutation that is the same in every stretch of so many rows."""
    length, width = len(inner), sizes.width
    whole = length > width and length % width == 0
    blocks = inner.reshape(-1, width) - np.arange(width) if whole else inner[:0, None]
    if whole and (np.ptp(blocks, axis=1) == 0).all() and not (blocks[:, 0] % width).any():
        order = (blocks[:, 0] // width).tolist()
        words = f"lie in another order within each {len(order)} heads"
        return (
            "within",
            words,
            f"w.view(-1, {len(order)}, {width}%s)[:, {order}].reshape({count}%s)",
        )
    if np.array_equal(np.roll(np.arange(length), length // 2), inner):
        words = f"have halves of each {length} exchanged, as nibbles read in the other order"
    else:
        where = "of each head" if length == width else f"in each {length}"
        words = f"{where} lie in another order"
    return "within", words, f"w.view(-1, {length}%s)[:, {inner.tolist()}].reshape({count}%s)"


def _in_fused(
    rows: np.ndarray, sections: Sequence[int], sizes: Sizes
) -> tuple[str, str, str] | None:
    """Queries, keys and values joined in another way than they should be."""
    heads, groups, width = sizes.heads, sizes.groups, sizes.width
    lengths = [heads * width, groups * width, groups * width]
    if sum(lengths) != len(rows):
        return None
    parts = np.split(np.arange(len(rows)), np.cumsum(lengths)[:-1])
    if len(sections) > 3:
        each = [
            piece
            for some in zip(*(np.split(p, groups) for p in parts), strict=True)
            for piece in some
        ]
        if np.array_equal(rows, np.concatenate(each)):
            words = "lie in sections (all queries, all keys, all values), should per key head"
            code = (
                f"torch.cat([part.chunk({groups})[group] for group in range({groups}) "
                f"for part in w.split({lengths})])"
            )
            return "fused", words, code
        return None
    for shards in dict.fromkeys((groups, 2, 4, 8, 16)):
        if any(length % shards for length in lengths):
            continue
        each = [length // shards for length in lengths]
        pieces = [np.split(np.arange(sum(each)), np.cumsum(each)[:-1])[part] for part in range(3)]
        step = sum(each) * np.arange(shards)[:, None]
        if np.array_equal(rows, np.concatenate([(piece + step).ravel() for piece in pieces])):
            words = f"lie in {shards} shards, joined without being taken apart"
            if shards == groups:
                words = "lie per key head (its queries, its key, its value), should in sections"
            code = (
                f"torch.cat([torch.cat([shard.split({each})[part] for shard in w.chunk({shards})]) "
                "for part in range(3)])"
            )
            return "fused", words, code
    for order in permutations(range(3)):
        there = [lengths[part] for part in order]
        starts = dict(zip(order, np.cumsum([0, *there]), strict=False))
        if np.array_equal(
            rows, np.concatenate([starts[n] + np.arange(lengths[n]) for n in range(3)])
        ):
            words = f"lie in the order {' '.join('qkv'[part] for part in order)}, should as q k v"
            back = [order.index(part) for part in range(3)]
            return "fused", words, f"torch.cat([w.split({there})[part] for part in {back}])"
    return None


def _view_words(shape: tuple[int, ...], order: tuple[int, ...], sizes: Sizes) -> str:
    names = dict(sizes.factors)
    lies = " × ".join(names.get(n, str(n)) if n > 2 else str(n) for n in shape)
    should = " × ".join(
        names.get(shape[axis], str(shape[axis])) if shape[axis] > 2 else str(shape[axis])
        for axis in order
    )
    return f"lie as {lies}, should as {should}"


def search(
    wanted: Mapping[str, np.ndarray], stored: Mapping[str, np.ndarray], sizes: Sizes,
    sections: Mapping[str, Sequence[int]] | None = None,
    gains: Mapping[str, np.ndarray] | None = None, grids: Mapping[str, Grid] | None = None,
    regroupings: Callable[[Part], Regrouping | None] = lambda part: None,
) -> list[Finding]:  # fmt: skip
    """What was done to each of a block's weights that is not what it should be.

    Parameters
    ----------
    wanted, stored
        The block's weights (n, D) and vectors (n,) by name, as they should be and as they are.
    sections
        Where a fused weight's rows begin another part.
    gains
        Of the norm before a weight.
    grids
        Of stored weights that are quantized: what rounding to them explains is no mistake.
    regroupings
        What such a weight would be with its columns in other groups.
    """
    found: list[Finding] = []
    rounded = {
        name: misquantized(name, wanted[name], value, grids[name], regroupings)
        for name, value in stored.items()
        if grids and name in grids and name in wanted and wanted[name].shape == value.shape
    }
    found += filter(None, rounded.values())
    wrong = {
        name: value
        for name, value in stored.items()
        if name in wanted
        and name not in rounded
        and wanted[name].shape == value.shape
        and not _near(wanted[name], value)
    }
    exchanged = _exchanged(wanted, wrong)
    found += exchanged
    for name, value in wrong.items():
        if any(one.tensor == name for one in exchanged):
            continue
        parts, gain = (sections or {}).get(name, ()), (gains or {}).get(name)
        with np.errstate(divide="ignore", invalid="ignore"):
            one = _explained(name, wanted[name], value, sizes, parts, gain)
        if one is None:
            continue
        found.append(one)
        if one.rows is None:
            continue
        for bias in wrong:  # that lies in the order of its rows
            moved = stored[bias]
            if moved.shape == one.rows.shape and _near(wanted[bias], moved[one.rows]):
                code = re.sub(r", \d+\)", ")", one.code)
                words = f"rows of {short(bias)}, as those of its weight"
                found.append(Finding(one.kind, words, code, bias, moved[one.rows]))
    return found


def misquantized(
    name: str, wanted: np.ndarray, value: np.ndarray, grid: Grid,
    regroupings: Callable[[Part], Regrouping | None] = lambda part: None,
) -> Finding | None:  # fmt: skip
    """What a quantized weight (n, D) was read or written with, if rounding does not explain it.

    Codes in another order within their words, scales of other rows or blocks, zero points that are
    off, or an order of columns that was forgotten (GPTQ's act-order): whichever leaves no more than
    rounding to the grid.

    Examples
    --------
    >>> from wqk.checkpoints.checkpoint import Grid, Part, Regrouping
    >>> w = np.random.default_rng(0).standard_normal((8, 64))
    >>> step = np.abs(w).max() / 7.5
    >>> stored = np.rint(w / step) * step
    >>> swapped = stored.reshape(8, 32, 2)[..., ::-1].reshape(8, 64)
    >>> grid = Grid(64, 1 / 7.5)
    >>> misquantized("q_proj", w, stored, grid), misquantized("q_proj", w, swapped, grid).kind
    (None, 'columns')
    """
    v, w = np.asarray(value, np.float64), np.asarray(wanted, np.float64)
    if v.ndim != 2 or not v.any():
        return None

    def left(x: np.ndarray) -> float:
        """The root mean square of what differs, in units of that of rounding."""
        size = np.sqrt(np.mean(np.square(x)))
        expected = rounding(grid, x) * size / math.sqrt(3)
        return float(np.sqrt(np.mean(np.square(x - w))) / expected) if expected else math.inf

    title = short(name)
    rows = np.unique(np.linspace(0, len(v) - 1, SAMPLED).astype(int)).tolist()
    some, every = (
        regroupings(p) for p in (Part(name, tuple((n, n + 1) for n in rows)), Part(name))
    )
    if some and every:
        best, words = _regrouped(w[rows], some)
        if words and left(mended := every.values(best)) < ROUNDED:
            words = f"{title}: {words}"
            return Finding("groups", words, "w = original", name, _like(mended, value))
    if left(v) < ROUNDED:
        return None
    for axis, order in product((1, 0), WORD_ORDERS):
        length = len(order)
        if v.shape[axis] % length:
            continue
        there = np.arange(v.shape[axis]).reshape(-1, length)[:, order].ravel()
        mended = np.take(v, there, axis)
        if left(mended) < ROUNDED:
            what = ("rows", "columns")[axis]
            view = (f"w.view(-1, {length}, w.shape[1])[:, {list(order)}]" if axis == 0
                    else f"w.view(len(w), -1, {length})[:, :, {list(order)}]")  # fmt: skip
            words = f"{what} of {title} lie in another order within each {length}, as the codes of "
            words += "one word read in another order"
            return Finding(what, words, f"w = {view}.reshape(w.shape)", name, _like(mended, value))
    size = grid.shared if v.shape[1] % grid.shared == 0 else v.shape[1]
    a, b = (x.reshape(len(v), -1, size) for x in (w, v))
    scale = np.square(a).sum(axis=2, keepdims=True)
    factors = (a * b).sum(axis=2, keepdims=True) / np.where(scale > 0, scale, 1)
    if (factors > 0).all() and left((b / factors).reshape(v.shape)) < ROUNDED:
        words = f"{title}: scales of other rows or blocks of {size} columns"
        return Finding("block scales", words, "w = original", name, _like(w, value))
    offsets = (b - a).mean(axis=2, keepdims=True)
    if left((b - offsets).reshape(v.shape)) < ROUNDED:
        words = f"{title}: an offset for each block of {size} columns: a zero point is off"
        return Finding("zero point", words, "w = original", name, _like(w, value))
    silent = np.asarray(~w.any(axis=0)), np.asarray(~v.any(axis=0))
    place = nearest(sketch(w.T), sketch(v.T), *silent)
    if np.array_equal(np.sort(place), np.arange(len(place))) and left(v[:, place]) < ROUNDED:
        words = f"columns of {title} lie in the order of their groups: act-order was not undone"
        code = "w = w[:, (torch.nn.functional.normalize(w, dim=0).T @ original).argmax(0)]"
        return Finding("columns", words, code, name, _like(v[:, place], value))
    return None


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


def _like(repaired: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(repaired).astype(value.dtype)


def _near(a: np.ndarray, b: np.ndarray, share: float = SAME) -> bool:
    """Whether two arrays are the same, up to a share of their size, here and everywhere."""
    size = np.sqrt(np.mean(np.square(a, dtype=np.float64)))
    return bool(np.abs(a - b).max(initial=0.0) <= 2 * share * (size + np.abs(a).max(initial=0.0)))


def _exchanged(
    wanted: Mapping[str, np.ndarray], wrong: Mapping[str, np.ndarray]
) -> Iterator[Finding]:
    """Weights that are another tensor's."""
    for name, value in wrong.items():
        for other, right in wanted.items():
            if other != name and right.shape == value.shape and _near(right, value):
                back = np.array(wanted[name])
                words = f"{short(name)} holds {short(other)}"
                yield Finding("another tensor", words, "w = original", name, back)
                break


def short(name: str) -> str:
    """A name without what all tensors of a block share."""
    parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
    return ".".join(parts[-2:]) if parts[-1] in ("bias", "dense") else parts[-1]


def _explained(
    name: str,
    wanted: np.ndarray,
    value: np.ndarray,
    sizes: Sizes,
    sections: Sequence[int],
    gain: np.ndarray | None,
) -> Finding | None:
    """One weight: its rows, its columns, both exchanged, or its numbers."""
    if value.ndim == 1:
        return _numbers(name, wanted[:, None], value[:, None])
    for axis, title in ((0, "rows"), (1, "columns")):
        ours, theirs = (wanted, value) if axis == 0 else (wanted.T, value.T)
        rows = _permutation(ours, theirs)
        if rows is not None:
            named = _in_fused(rows, sections, sizes) if axis == 0 and sections else None
            named = named or name_permutation(rows, sizes) or _by_section(rows, sizes, sections)
            kind, words, code = named or ("listed", "in another order, by no known rule", "")
            more = ", D" if axis == 0 else ""
            if axis == 1:
                code = f"w = ({_filled(code, ', n').replace('w', 'w.T', 1)}).T" if code else ""
            elif "=" not in code:
                code = f"w = {_filled(code, more)}" if code else ""
            repaired = np.ascontiguousarray(theirs[rows] if axis == 0 else theirs[rows].T)
            code = code.replace(", n)", f", {len(value)})").replace(", D)", f", {value.shape[1]})")
            kind = "fused" if sections and axis == 0 else title
            words = f"{title} of {short(name)} {words}"
            return Finding(kind, words, code, name, repaired, rows if axis == 0 else None)
    if value.shape[0] == value.shape[1] and _near(wanted, value.T):
        words = f"{short(name)} is stored transposed, (in, out)"
        return Finding("transposed", words, "w = w.T", name, np.ascontiguousarray(value.T))
    return _numbers(name, wanted, value, gain)


def _filled(code: str, more: str) -> str:
    return code.replace("%s", more)


def _permutation(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray | None:
    """The rows of theirs that make ours; None unless each is found once, or all are in place."""
    marks, others = sketch(theirs), sketch(ours)
    silent = np.asarray(~theirs.any(axis=1)), np.asarray(~ours.any(axis=1))
    if (np.abs((marks * others).sum(axis=1)) > ALIKE).all():
        return None
    place = nearest(others, marks, silent[1], silent[0])
    if not np.array_equal(np.sort(place), np.arange(len(place))):
        return None
    return place if (cosines(ours, theirs, place) > ALIKE).all() else None


def _by_section(
    rows: np.ndarray, sizes: Sizes, sections: Sequence[int]
) -> tuple[str, str, str] | None:
    """Permutations inside each section of a fused weight."""
    ends = [*sections, len(rows)]
    words, code = [], []
    for start, stop in zip(sections, ends[1:], strict=True):
        inside = rows[start:stop] - start
        if np.array_equal(inside, np.arange(stop - start)):
            continue
        if inside.min() < 0 or inside.max() >= stop - start:
            return None
        named = name_permutation(inside, sizes)
        if named is None or "=" in named[2]:
            return None
        words.append(f"{start} to {stop} {named[1]}")
        code.append(f"w[{start}:{stop}] = {named[2].replace('w', f'w[{start}:{stop}]', 1)}")
    return ("sections", "; ".join(words), "; ".join(code)) if words else None


def _numbers(
    name: str, wanted: np.ndarray, value: np.ndarray, gain: np.ndarray | None = None
) -> Finding | None:
    """Factors, signs, offsets and rank of what lies in its place."""
    title, is_vector = short(name), value.shape[1] == 1
    flat = np.asarray(value, np.float64), np.asarray(wanted, np.float64)

    def finding(kind: str, words: str, code: str, repaired: np.ndarray) -> Finding:
        shaped = repaired[:, 0] if is_vector else repaired
        return Finding(kind, f"{title}: {words}", code, name, shaped.astype(value.dtype))

    v, w = flat
    if not v.any():
        return finding("zero", "all zero", "w = original", w)
    large = np.abs(w) > 1e-3 * np.abs(w).max()
    ratio = np.where(large, v / w, np.nan)
    whole = float(np.vdot(w, v) / np.vdot(w, w))
    if np.abs(v - whole * w).max() <= SAME * np.abs(v).max():
        return finding("scaled", f"scaled by {whole:.4g}", f"w = w / {whole:.6g}", v / whole)
    if is_vector:
        return None
    signs = np.sign(np.nansum(ratio, axis=1))
    if np.allclose(v * signs[:, None], w, atol=SAME * np.abs(w).max()):
        negative = np.flatnonzero(signs < 0).tolist()
        words = f"other signs in {len(negative)} of {len(v)} rows"
        return finding("signs", words, f"w[{negative}] *= -1", w)
    for axis, what in ((1, "rows"), (0, "columns")):
        factors = (v * w).sum(axis=axis, keepdims=True) / np.square(w).sum(axis=axis, keepdims=True)
        if np.abs(v - factors * w).max() <= SAME * np.abs(v).max() and factors.all():
            if axis == 0 and gain is not None and len(gain) == factors.size:
                for power, times in ((1, "once too often"), (2, "twice too often"), (-1, "out")):
                    if np.allclose(factors[0], gain.astype(np.float64) ** power, rtol=SAME):
                        words = f"the gain of the norm before it is folded in {times}"
                        code = f"w = w / gain ** {power}"
                        return finding("gain folded", words, code, v / factors)
            words = f"each of its {what} has a factor of its own"
            return finding(
                f"{what} scaled",
                words,
                f"w = w / (w / original).nanmedian({axis}, keepdim=True).values",
                v / factors,
            )
    for size in reversed(BLOCKS):
        if value.shape[1] % size or value.shape[1] == size:
            continue
        a, b = (x.reshape(len(v), -1, size) for x in (w, v))
        centred = [x - x.mean(axis=2, keepdims=True) for x in (a, b)]
        sums = (centred[0] * centred[1]).sum(axis=2, keepdims=True)
        factors = sums / np.square(centred[0]).sum(axis=2, keepdims=True)
        offsets = b.mean(axis=2, keepdims=True) - factors * a.mean(axis=2, keepdims=True)
        if np.abs(b - factors * a).max() <= 0.03 * np.abs(b).max():
            integers = np.array_equal(v, np.rint(v))
            words = f"scales of other blocks of {size} columns"
            if integers:
                words = f"whole numbers without their scales, of blocks of {size} columns"
            return finding("integers" if integers else "block scales", words, "w = original", w)
        if np.abs(b - factors * a - offsets).max() <= 0.03 * np.abs(b).max():
            words = f"an offset for each block of {size} columns: a zero point is off"
            return finding("zero point", words, "w = original", w)
    return None
