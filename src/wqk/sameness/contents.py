"""Tensors compared as they are stored, and found by what they hold where names differ.

Equal bytes under one name are compared first, which costs no more than reading them. Other numbers
are compared entry by entry, up to the rounding of the coarser of two types. A tensor whose name the
other checkpoint lacks is looked for by its rows, then by its columns: each has a key, a hash of its
numbers rounded to the coarsest type, so that fused, split, transposed, renamed and re-typed tensors
find each other. Memory is that of a few million numbers and of a key for each row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from wqk._machine import side_by_side, usable_cores
from wqk.attention.rounding import (
    AT_ZERO,
    NARROWER,
    ROUNDING,
    lies_on,
    rounding_at_zero,
    rounding_in,
)
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.files import PLAIN
from wqk.errors import WqkError
from wqk.sameness.half_steps import is_coded_alone, ratio_of_scales, share_beyond_half_step
from wqk.sameness.mismatches import Kind
from wqk.sameness.tolerances import DIFFERENT, FEW_BEYOND, MOST, SAFETY, SAME_FACTOR

# Numbers that are read at a time; of so many it is kept which ones differ.
CHUNK, MASKED = 1 << 22, 1 << 26
# Bytes that are compared at a time, which stay in a cache; more pieces are shared by all cores.
CACHED, MANY = 1 << 21, 8
# Of layers and experts.
NUMBERS = re.compile(r"\.\d+\.")
# What wrappers put before a name.
WRAPPERS = re.compile(r"^(?:(?:module|model|_orig_mod|base_model)\.)+")


class Outcome(StrEnum):
    """What a comparison of two tensors found."""

    EQUAL = "equal"
    ROUNDED = "equal up to rounding"
    FOUND = "equal, stored otherwise"
    DIFFERS = "differs"
    MISSING = "only in the first"
    ADDED = "only in the second"
    UNKNOWN = "not compared"

    @property
    def same(self) -> bool:
        """Whether nothing is wrong, as far as it was compared."""
        return self in (Outcome.EQUAL, Outcome.ROUNDED, Outcome.FOUND)

    @property
    def differs(self) -> bool:
        """Whether something is wrong."""
        return not self.same and self is not Outcome.UNKNOWN


@dataclass(frozen=True)
class TensorComparison:
    """A tensor of the first checkpoint, and what it is in the second.

    Attributes
    ----------
    name, other
        Its name in either; empty where one has no such tensor.
    outcome
        What was found.
    reason
        How it differs, or where it lies, in a phrase.
    role
        ``attention``, ``mixer`` or ``other``.
    distance
        ‖a − b‖ / ‖a‖, where they were compared.
    kind
        The cause, where it is known from the two tensors alone.
    """

    name: str
    other: str
    outcome: Outcome
    reason: str = ""
    role: str = "other"
    distance: float = math.inf
    kind: Kind | None = None

    def __str__(self) -> str:
        return f"{self.name or self.other}: {self.reason or self.outcome}"


def paired_names(
    a: Mapping[str, TensorInfo], b: Mapping[str, TensorInfo], example: tuple[str, str] | None = None
) -> dict[str, str]:
    """The name in the second checkpoint of each tensor that has the same in the first.

    What wrappers put before names is left out, and what one side puts before the names of an
    ``example``, a tensor of each.

    Examples
    --------
    >>> paired_names({"model.norm.weight": ...}, {"norm.weight": ...})
    {'model.norm.weight': 'norm.weight'}
    """
    found = {name: name for name in a if name in b}
    cuts: list[Callable[[str], str]] = [lambda name: WRAPPERS.sub("", name)]
    if example is not None:
        short, long = sorted(example, key=len)
        if long.endswith(short):
            cuts.append(lambda name: name.removeprefix(long[: len(long) - len(short)]))
    for cut in cuts:
        taken = set(found.values())
        theirs = {cut(name): name for name in reversed(list(b)) if name not in taken}
        found |= {n: theirs[cut(n)] for n in a if n not in found and cut(n) in theirs}
    return found


def chunks(part: Part, info: TensorInfo, count: int = CHUNK) -> Iterator[Part]:
    """A part of a tensor in pieces of so many numbers, or single rows."""
    if not info.shape:
        yield part
        return
    step = max(1, count // max(1, math.prod(info.shape[1:])))
    for first, last in part.row_ranges(info.shape):
        for start in range(first, last, step):
            yield Part(part.name, ((start, min(start + step, last)),))


def equal_parts(
    checkpoints: Sequence[Checkpoint], parts: Sequence[Part], numbers: bool = False
) -> bool:
    """Whether two parts are of one type and shape, and stored as the same bytes.

    With ``numbers``, or as the same numbers.
    """
    infos = [c.info(part.name) for c, part in zip(checkpoints, parts, strict=True)]
    if infos[0][:2] != infos[1][:2]:
        return False
    shape, size = infos[0].shape or (1,), infos[0].nbytes
    if not size:
        return True
    step = max(1, min(shape[0], CACHED * shape[0] // size))  # rows at a time
    count, room = step * math.prod(shape[1:]), step * size // shape[0]
    pieces = list(
        zip(*(chunks(p, i, count) for p, i in zip(parts, infos, strict=True)), strict=True)
    )
    many, cores = len(pieces) > MANY, usable_cores()
    shares = [pieces[n::cores] for n in range(cores)] if many else [pieces]
    return all(side_by_side(partial(_equal_pieces, checkpoints, room, numbers), shares, many=many))


def _equal_pieces(
    checkpoints: Sequence[Checkpoint], size: int, numbers: bool, pieces: Iterable[Sequence[Part]]
) -> bool:
    """Whether parts of at most so many bytes are stored as the same ones."""
    rooms = [bytearray(size) for _ in checkpoints]  # compared by memcmp
    arrays = [np.frombuffer(room, np.uint8) for room in rooms]
    for both in pieces:
        a, b = (c.raw(part, room) for c, part, room in zip(checkpoints, both, arrays, strict=True))
        if numbers and (a is None or b is None):
            a, b = (c.read([part])[0] for c, part in zip(checkpoints, both, strict=True))
        if a is None or b is None or len(a) != len(b):
            return False
        filled = len(a) == size and all(map(np.may_share_memory, (a, b), arrays))
        if not (rooms[0] == rooms[1] if filled else np.array_equal(a, b)):
            return False
    return True


class Found(NamedTuple):
    """What a comparison of two parts found."""

    outcome: Outcome
    reason: str = ""
    distance: float = math.inf  # ‖a − b‖ / ‖a‖
    changed: np.ndarray | None = None  # which entries differ, (n, D), where they are not too many
    kind: Kind | None = None  # the cause, where it is known


@np.errstate(divide="ignore", invalid="ignore", over="ignore")
def compare_stored(checkpoints: Sequence[Checkpoint], parts: Sequence[Part]) -> Found:
    """Two parts of one shape, entry by entry."""
    first, second = infos = [c.info(p.name) for c, p in zip(checkpoints, parts, strict=True)]
    types = first.dtype, second.dtype
    if equal_parts(checkpoints, parts):
        return Found(Outcome.EQUAL, "", 0.0)
    size = math.prod(parts[0].shape(first.shape))
    masks, floats = [], all(kind in PLAIN for kind in types)
    beyond, rescaled = 0.0, _Rescaled(infos)  # of quantized tensors
    sums = np.zeros(4)  # xx, xy, yy, |x − y|²
    expected = 0.0  # what the rounding of quantized types explains of |x − y|²
    changed, largest = 0, 0.0  # entries that differ by more than rounding; by how much of them
    # Types to which one side may have been rounded before it was stored.
    narrower = [kind for kind in NARROWER.get(types[0], ()) if kind in NARROWER.get(types[1], ())]
    # The last place may differ, as after sums in another order; small sums by what float32 loses.
    unit = 2 * max(ROUNDING.get(kind, 0.0) for kind in types)
    smallest = 2 * max(AT_ZERO.get(kind, 0.0) for kind in types)
    for pieces in zip(*(chunks(p, i) for p, i in zip(parts, infos, strict=True)), strict=True):
        try:
            x, y = (c.read([p])[0] for c, p in zip(checkpoints, pieces, strict=True))
        except WqkError as error:
            return Found(Outcome.UNKNOWN, str(error))
        step, high = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
        most = float(high.max(initial=0, where=np.isfinite(high)))
        near = (step <= unit * high + max(smallest, 8 * ROUNDING["F32"] * most)) & (step < np.inf)
        wrong = ~near & ~(np.isnan(x) & np.isnan(y)) & (x != y)
        pairs = ((x, x), (x, y), (y, y), (step, step))
        sums += [float(np.vdot(*pair)) for pair in pairs]
        expected += sum(
            info.grid.rounding(v) ** 2 * float(np.vdot(v, v))
            for info, v in zip(infos, (x, y), strict=True)
            if info.grid
        )
        if is_coded_alone(infos):
            beyond += x.size * _share_beyond(infos, (x, y))
        rescaled.add(x, y)
        masks.append(np.atleast_1d(wrong))
        if wrong.any():
            changed += int(wrong.sum())
            relative = step[wrong] / np.where(x[wrong] == 0, np.inf, np.abs(x[wrong]))
            largest = max(largest, float(relative.max()))
        for kind in list(narrower):
            holder = next((values for values in (x, y) if lies_on(values, kind)), None)
            if holder is None:
                narrower.remove(kind)
                continue
            at_zero = rounding_at_zero(kind, holder)
            close = step <= 2 * ROUNDING[kind] * high + 2 * at_zero
            if not (close & (step < np.inf)).all():
                narrower.remove(kind)
    xx, xy, yy, squares = sums
    distance = math.sqrt(squares / xx) if xx else math.inf if yy else 0.0
    if not changed:
        return Found(Outcome.ROUNDED if distance else Outcome.EQUAL, "", distance)
    if rescaled.largest > SAME_FACTOR:
        reason = f"equal codes, other scales: by up to {100 * rescaled.largest:.2g} %"
        return Found(Outcome.DIFFERS, reason, distance, kind=Kind.BLOCK_SCALES)
    if not floats and distance <= SAFETY * math.sqrt(expected / xx):
        if beyond <= FEW_BEYOND * size:
            return Found(Outcome.ROUNDED, "", distance)
        share = f"{100 * beyond / size:.2g} % of entries lie beyond half a step of their own scale"
        reason = f"{Kind.QUANTIZED}: {share}"
        return Found(Outcome.DIFFERS, reason, distance, kind=Kind.QUANTIZED)
    if narrower:
        return Found(Outcome.ROUNDED, f"one side is rounded to {narrower[0]}", distance)
    columns = first.shape[-1] if len(first.shape) > 1 else 1
    mask = np.concatenate(masks).reshape(-1, columns) if size <= MASKED else None
    factor, reason = yy / xy if xy else math.nan, f"relative distance {distance:.2g}"
    if not yy:
        reason = "all zero"
    elif xx * yy - xy**2 <= (SAME_FACTOR * xy) ** 2 and abs(factor - 1) > SAME_FACTOR:
        reason = f"scaled by {factor:.4g}"
    elif changed < MOST * size:
        where = "" if mask is None else f", the first in row {int(mask.any(axis=1).argmax())}"
        reason = f"{changed} of {size} entries differ{where}"
        reason += f", by up to {100 * largest:.2g} %" if largest else ""
    return Found(Outcome.DIFFERS, reason, distance, mask)


def _share_beyond(infos: Sequence[TensorInfo], values: Sequence[np.ndarray]) -> float:
    """Share of entries beyond half a step, of a quantized tensor and an exact one."""
    is_coded = infos[1].grid is not None
    grid, exact = infos[is_coded].grid, values[not is_coded]
    if grid is None:
        return 0.0
    rounding = rounding_in(infos[not is_coded], exact)
    return share_beyond_half_step(exact, values[is_coded], grid.shared, rounding)


class _Rescaled:
    """The change of the scales of two quantized tensors, as long as their codes are equal."""

    def __init__(self, infos: Sequence[TensorInfo]) -> None:
        grids = [info.grid for info in infos]
        self._grid = grids[0] if grids[0] == grids[1] else None
        self.largest = 0.0

    def add(self, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Compare a piece of both."""
        if self._grid is None:
            return
        factors = ratio_of_scales(reference, candidate, self._grid.shared)
        if factors is None:
            self._grid, self.largest = None, 0.0
        else:
            self.largest = max(self.largest, float(np.abs(factors - 1).max()))


def stray_entries(mask: np.ndarray) -> int:
    """How many changed entries lie in a row and a column that are mostly unchanged.

    A change of coordinates, such as a rotation inside a head or a gain that was folded, changes
    whole rows or whole columns.
    """
    rows, columns = mask.mean(axis=1), mask.mean(axis=0)
    return int((mask & (rows < MOST)[:, None] & (columns < MOST)[None]).sum())


# -- by content --------------------------------------------------------------------------------


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers as pseudorandom ones, uint64 (the finalizer of SplitMix64)."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _codes(values: np.ndarray, kind: str) -> np.ndarray:
    """Numbers rounded to a type, as whole numbers; −0 is 0."""
    single = values.astype(np.float32) + np.float32(0)
    if kind == "F16":
        with np.errstate(over="ignore"):
            single = single.astype(np.float16).astype(np.float32)
    bits = single.view(np.uint32)
    if kind == "BF16":
        even = (bits >> np.uint32(16)) & np.uint32(1)
        bits = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
    return bits.astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93) >> np.uint64(7)


def _keys(checkpoint: Checkpoint, name: str, kind: str, columns: bool = False) -> np.ndarray:
    """A key for each row (or column) of a tensor, whose last axis are its columns."""
    info, keys, start = checkpoint.info(name), [], 0
    sums: Any = np.uint64(0)
    for piece in chunks(Part(name), info):
        values = checkpoint.read([piece])[0]
        flat = values.reshape(-1, info.shape[-1] if len(info.shape) > 1 else values.size)
        codes = _codes(flat, kind)
        if columns:
            place = _scrambled(np.arange(start, start + len(codes)))
            sums = sums + (codes * place[:, None]).sum(axis=0, dtype=np.uint64)
        else:
            place = _scrambled(np.arange(codes.shape[1]))
            keys.append((codes * place).sum(axis=1, dtype=np.uint64))
        start += len(codes)
    return np.asarray(sums) if columns else np.concatenate(keys)


def find_by_content(
    checkpoints: Sequence[Checkpoint], ours: Sequence[str], theirs: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Where tensors of either checkpoint lie in the other, by name; those that are found.

    A tensor is found if all of its rows, or all of its columns, are, in their order: alone under
    another name, fused with others, split, or transposed.
    """
    infos = [
        {name: c.info(name) for name in names if c.info(name).dtype in (*PLAIN, "F8_E4M3")}
        for c, names in zip(checkpoints, (ours, theirs), strict=True)
    ]
    places: tuple[dict[str, str], dict[str, str]] = ({}, {})
    if not all(infos):
        return places
    types = {info.dtype for some in infos for info in some.values()}
    kind = next((k for k in reversed(PLAIN) if k in types), "F32")
    rows = {name: _keys(checkpoints[0], name, kind) for name in infos[0]}
    for turned in (False, True):
        left = [[n for n in some if n not in p] for some, p in zip(infos, places, strict=True)]
        if not all(left):
            break
        index = _Index({name: rows[name] for name in left[0]})
        covered = {name: np.zeros(len(rows[name]), bool) for name in left[0]}
        for name in left[1]:
            if turned and len(infos[1][name].shape) != 2:
                continue
            origin = index.origins(_keys(checkpoints[1], name, kind, turned))
            if origin is None:
                continue
            sources = ", ".join(origin)
            places[1][name] = f"{'transposed, ' * turned}in {sources}"
            for source, found in origin.items():
                covered[source][found] = True
                if covered[source].all():
                    places[0][source] = f"{'transposed, ' * turned}in {name}"
    _find_vectors(checkpoints, infos, places)
    return places


class _Index:
    """Rows of many tensors by their keys."""

    def __init__(self, tensors: Mapping[str, np.ndarray]) -> None:
        self._names = list(tensors)
        counts = [len(keys) for keys in tensors.values()]
        keys = np.concatenate(list(tensors.values()))
        tensor = np.repeat(np.arange(len(tensors)), counts)
        row = np.concatenate([np.arange(count) for count in counts])
        order = np.argsort(keys, kind="stable")
        self._keys, self._tensor, self._row = keys[order], tensor[order], row[order]
        self._taken = np.zeros(len(keys), bool)

    def origins(self, keys: np.ndarray) -> dict[str, np.ndarray] | None:
        """Which rows of which tensors these are; None if some are none, or are out of order."""
        low, high = (np.searchsorted(self._keys, keys, side) for side in ("left", "right"))
        if (low == high).any():
            return None
        place = low.copy()
        for at in np.flatnonzero(high - low > 1):
            # Of equal rows the next one, or one that is nothing else yet.
            options = np.arange(low[at], high[at])
            after = place[at - 1] if at else -1
            follows = (self._tensor[options] == self._tensor[after]) & (at > 0)
            follows &= self._row[options] == self._row[after] + 1
            place[at] = options[np.argmax(2 * follows + ~self._taken[options])]
        tensor, row, found = self._tensor[place], self._row[place], {}
        for number in np.unique(tensor):
            rows = row[tensor == number]
            if (np.diff(rows) <= 0).any():
                return None
            found[self._names[number]] = rows
        self._taken[place] = True
        return found


def _find_vectors(
    checkpoints: Sequence[Checkpoint],
    infos: Sequence[dict[str, TensorInfo]],
    places: tuple[dict[str, str], dict[str, str]],
) -> None:
    """Vectors that are parts of longer ones, such as the biases of fused weights."""
    left = [
        {
            name: c.read([Part(name)])[0].reshape(-1)
            for name, info in some.items()
            if name not in place and len(info.shape) == 1
        }
        for c, some, place in zip(checkpoints, infos, places, strict=True)
    ]
    for whole in (1, 0):
        for name, vector in left[whole].items():
            inside: dict[str, int] = {}
            for other, part in left[1 - whole].items():
                if 0 < len(part) < len(vector) and np.ptp(part):
                    starts = np.flatnonzero(vector[: len(vector) - len(part) + 1] == part[0])
                    if any(np.array_equal(vector[s : s + len(part)], part) for s in starts):
                        inside[other] = len(part)
            if inside and sum(inside.values()) == len(vector):
                places[whole][name] = f"in {', '.join(inside)}"
                places[1 - whole].update(dict.fromkeys(inside, f"in {name}"))


# -- all of it ---------------------------------------------------------------------------------


def compare_tensors(
    checkpoints: Sequence[Checkpoint],
    roles: Sequence[Mapping[str, str]],
    names: Mapping[str, str],
    *,
    strict: bool,
) -> list[TensorComparison]:
    """Every tensor that has a role in either checkpoint, by its name, then by what it holds.

    Parameters
    ----------
    roles
        Of each checkpoint: the tensors to compare, and what they are.
    names
        What the second checkpoint calls the first one's tensors, as far as names agree.
    strict
        Whether a tensor that is not found is a difference; otherwise it is not compared.
    """
    first, second = checkpoints
    names = dict(names) | _alike(checkpoints, roles, names)
    done: list[TensorComparison] = []
    left: tuple[list[str], list[str]] = ([], [])
    for name, role in roles[0].items():
        other = names.get(name)
        if other is None or (first.info(name).shape != second.info(other).shape):
            left[0].append(name)
        else:
            one = compare_stored(checkpoints, (Part(name), Part(other)))
            done.append(TensorComparison(name, other, *one[:2], role, one.distance, one.kind))
    matched = {one.other for one in done}
    left[1].extend(name for name in roles[1] if name not in matched)
    places = find_by_content(checkpoints, *left) if all(left) else ({}, {})
    equal = [one for one in done if one.outcome.same]
    known = [one.name for one in equal], [one.other for one in equal]
    for number, lost in enumerate((Outcome.MISSING, Outcome.ADDED)):
        for name in left[number]:
            place = places[number].get(name)
            copy = copy_of(checkpoints[number], name, known[number]) if place is None else None
            place = f"a copy of {copy}" if copy else place
            outcome = Outcome.FOUND if place else lost if strict else Outcome.UNKNOWN
            if copy and NUMBERS.findall(name) != NUMBERS.findall(copy):
                outcome = Outcome.UNKNOWN  # layers may share weights, or be copies at first
            reason = place or ("" if strict else "not found in the other under any name")
            pair = ("", name) if number else (name, "")
            done.append(TensorComparison(*pair, outcome, reason, roles[number][name]))
    return done


def _alike(
    checkpoints: Sequence[Checkpoint], roles: Sequence[Iterable[str]], names: Mapping[str, str]
) -> dict[str, str]:
    """Tensors under other names whose first rows agree, up to what quantization leaves."""
    named = names.keys(), {*names.values()}
    infos = [
        [(name, c.info(name)) for name in some if name not in known]
        for c, some, known in zip(checkpoints, roles, named, strict=True)
    ]
    shapes = {info.shape for some in infos for _, info in some if info.grid}
    ours, theirs = (
        {n: (i.shape, c.read([Part(n, ((0, 1),))])[0].ravel()) for n, i in own if i.shape in shapes}
        for c, own in zip(checkpoints, infos, strict=True)
    )
    found: dict[str, str] = {}
    for name, (shape, row) in ours.items():
        apart = {o: np.linalg.norm(row - there) for o, (s, there) in theirs.items() if s == shape}
        nearest = min(apart, key=apart.__getitem__, default="")
        if nearest and apart[nearest] <= DIFFERENT * np.linalg.norm(row):
            found[name] = nearest
            del theirs[nearest]
    return found


def copy_of(checkpoint: Checkpoint, name: str, others: Iterable[str]) -> str | None:
    """A tensor of the same checkpoint that holds the same, as tied weights do."""
    shape, twice = checkpoint.info(name).shape, (checkpoint, checkpoint)
    told = len(shape) > 1 and checkpoint.raw(Part(name, ((0, 1),))) is not None
    for other in others if len(shape) > 1 else ():
        parts = Part(name), Part(other)
        if checkpoint.info(other).shape == shape and (
            equal_parts(twice, parts)
            or (not told and compare_stored(twice, parts).outcome is Outcome.EQUAL)
        ):
            return other
    return None
