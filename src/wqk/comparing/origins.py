"""Where the rows of each weight come from: reordered, exchanged, copied, transposed or split.

Every row of the second block's queries and keys is looked for among the first's queries, keys and
values, up to a factor. The rows' origins, read as a permutation, tell the mistake and the code that
undoes it.

Axes: H query heads, G key heads, R head width, D model width, n rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from wqk.attention.coordinates import with_norm
from wqk.comparing import mistakes
from wqk.comparing.mistakes import Mismatch, Reorder, steps_to, to_order, whole_heads
from wqk.comparing.weights import SIDES, Attempt, StoredBlock, Weights, alike, rotated

# Rows are compared in so many random directions, and taken for the same above this cosine.
DIRECTIONS, ALIKE = 64, 0.9
# Rows compared at a time, to bound memory.
SOME = 512
# Of so many rows of each side so few have to be found for all to be looked for. Where most are
# found, those that are not have no other norm.
FIRST, FEW, MOST = 256, 0.05, 0.5
# A row is another one if it is more similar by this much.
CLOSER = 1e-4
# Factors that differ by less than this, relative to the largest, are the same.
SAME = 2e-2


class Origins(NamedTuple):
    """Where each of n rows comes from."""

    source: np.ndarray  # 0 query, 1 key, 2 value, −1 none
    row: np.ndarray  # within the source

    def are(self, source: int) -> bool:
        """Whether all rows come from one side."""
        return bool((self.source == source).all())


def rows_repaired(a: StoredBlock, b: StoredBlock) -> Iterator[Attempt]:
    """The second block with its rows in the first one's order, as far as they are found."""
    # As stored; and with the norms before them folded in, on either side or on both.
    seen: list[tuple[Origins, Origins]] = []
    marks: dict[bool, list[np.ndarray]] = {}
    for ours, theirs in ((False, False), (True, True), (True, False), (False, True)):
        if (ours or theirs) and not _has_norms(a, b):
            continue
        if ours not in marks:
            marks[ours] = [sketch(_rows(side, ours)) for side in (a.query, a.key)]
        if _found_among(marks[ours], b, theirs) < FEW:
            continue
        sources = [_rows(a.query, ours), _rows(a.key, ours)]
        found = tuple(
            _origins(
                _rows(b.side(side), theirs),
                sources,
                marks[ours],
                number,
                a.side(side),
                b.side(side),
            )
            for number, side in enumerate(SIDES)
        )
        del sources
        if not any((one.source >= 0).any() for one in found) or any(
            all(map(_equal, found, known)) for known in seen
        ):
            continue
        origins = found[0], found[1]
        seen.append(origins)
        yield from _read(a, b, origins)
        if all(
            one.are(number) and np.array_equal(one.row, _usual(a.side(side), b.side(side)))
            for number, (one, side) in enumerate(zip(origins, SIDES, strict=True))
        ):
            return  # every row is in its place
        if min((one.source >= 0).mean() for one in origins) > MOST:
            break  # another gain would find no more


def _equal(a: Origins, b: Origins) -> bool:
    return np.array_equal(a.source, b.source) and np.array_equal(a.row, b.row)


def _has_norms(a: StoredBlock, b: StoredBlock) -> bool:
    return any(w.gain is not None for block in (a, b) for w in (block.query, block.key))


def _rows(weights: Weights, folded: bool, every: int = 1) -> np.ndarray:
    """Each, or every so many, of a side's rows; with the norm before them folded in, or not."""
    if not folded or weights.gain is None or weights.norm is None:
        return weights.rows[::every]
    rows = weights.factor.weight.reshape(-1, weights.rows.shape[1])[::every]
    return np.asarray(with_norm(rows[None], None, weights.gain, None, weights.norm.kind)[0][0])


def _found_among(marks: list[np.ndarray], b: StoredBlock, folded: bool) -> float:
    """The share of b's rows, of a sample, that are among rows of which these are the sketches."""
    sizes = [len(side.rows) for side in (b.query, b.key)]
    if min(sizes) < FIRST or marks[0].shape[1] != DIRECTIONS:
        return 1.0
    every = [max(1, size // FIRST) for size in sizes]
    sides = zip((b.query, b.key), every, strict=True)
    some = np.concatenate([sketch(_rows(side, folded, step)) for side, step in sides])
    return float((np.abs(some @ np.concatenate(marks).T).max(axis=1) > ALIKE).mean())


def _origins(
    rows: np.ndarray,
    sources: Sequence[np.ndarray],
    marks: Sequence[np.ndarray],
    own: int,
    ours: Weights,
    theirs: Weights,
) -> Origins:
    """Where rows come from: of equal ones, from their own side and place."""
    usual = _usual(ours, theirs)
    cosine = cosines(rows, sources[own], usual)
    source, row = np.full(len(rows), own), usual.copy()
    # The two sides of cross-attention may differ in width; rows then come from their own alone.
    fitting = [number for number, one in enumerate(sources) if one.shape[1] == rows.shape[1]]
    lost = np.flatnonzero(cosine < 1 - CLOSER)
    if len(lost) and fitting:
        some = rows[lost]
        silent = [_silent(one) for one in (some, *(sources[number] for number in fitting))]
        if own in fitting:  # rows that are in their places are taken
            silent[1 + fitting.index(own)][usual[cosine >= 1 - CLOSER]] = False
        place = nearest(
            sketch(some), np.concatenate([marks[number] for number in fitting]),
            silent[0], np.concatenate(silent[1:]),
        )  # fmt: skip
        start = 0
        for number in fitting:
            count = len(sources[number])
            here = np.flatnonzero((place >= start) & (place < start + count))
            found = cosines(some[here], sources[number], place[here] - start)
            nearer = found > cosine[lost[here]] + CLOSER
            source[lost[here[nearer]]] = number
            row[lost[here[nearer]]] = (place[here] - start)[nearer]
            cosine[lost[here]] = np.maximum(found, cosine[lost[here]])
            start += count
    known = cosine > ALIKE
    return Origins(np.where(known, source, -1), np.where(known, row, -1))


def _usual(ours: Weights, theirs: Weights) -> np.ndarray:
    """The row of a side that each row of the other block is, if it is in its place.

    Key heads that are stored repeatedly, or only once, belong to the same one.
    """
    heads = np.arange(theirs.heads) * ours.heads // theirs.heads
    return np.asarray((heads[:, None] * ours.width + np.arange(theirs.width) % ours.width).ravel())


def sketch(rows: np.ndarray) -> np.ndarray:
    """Rows in a few random directions, of norm 1; all of narrow ones."""
    if rows.shape[1] > DIRECTIONS:
        random = np.random.default_rng(0)
        directions = random.standard_normal((rows.shape[1], DIRECTIONS)).astype(np.float32)
        rows = rows.astype(np.float32, copy=False) @ directions
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), np.float32)


def _silent(rows: np.ndarray) -> np.ndarray:
    """Which rows are zero."""
    return np.asarray(~rows.any(axis=1))


def nearest(
    ours: np.ndarray, others: np.ndarray, silent: np.ndarray, others_silent: np.ndarray
) -> np.ndarray:
    """For each row the most similar other one, whatever the sign, by their sketches.

    Rows of zeros, of pruned heads, are each other's in their order.
    """
    place = np.empty(len(ours), int)
    for start in range(0, len(ours), SOME):
        place[start : start + SOME] = np.abs(ours[start : start + SOME] @ others.T).argmax(axis=1)
    pairs = list(zip(np.flatnonzero(silent), np.flatnonzero(others_silent), strict=False))
    for row, other in pairs:
        place[row] = other
    return place


def cosines(rows: np.ndarray, others: np.ndarray, place: np.ndarray | None = None) -> np.ndarray:
    """Of each row and the one of the others in its place, whatever the sign; 1 for two of zeros."""
    place = np.arange(len(others)) if place is None else place
    if len(rows) != len(place) or rows.shape[1] != others.shape[1]:
        return np.zeros(len(rows))
    found = np.empty(len(rows))
    for start in range(0, len(rows), SOME):
        some = slice(start, start + SOME)
        pair = rows[some], others[place[some]]
        norms = np.linalg.norm(pair[0], axis=1) * np.linalg.norm(pair[1], axis=1)
        silent = _silent(pair[0]) & _silent(pair[1])
        products = np.abs(np.einsum("nd,nd->n", *pair))
        found[some] = np.where(silent, 1.0, products / np.where(norms > 0, norms, 1.0))
    return found


def _read(a: StoredBlock, b: StoredBlock, origins: tuple[Origins, Origins]) -> Iterator[Attempt]:
    """What the origins of all rows say."""
    attempt = Attempt(b)
    if origins[0].are(1) and origins[1].are(0) and a.query.heads == a.key.heads:
        attempt, origins = _exchanged(a, b), origins[::-1]
    moved: dict[str, np.ndarray] = {}  # heads that lie in another order, by side
    for number, side in enumerate(SIDES):
        ours, theirs = a.side(side), attempt.block.side(side)
        rows = origins[number].row
        if ours.heads != theirs.heads:
            attempt = _tiled(attempt, side, ours.heads, rows)
            continue
        if (origins[number].source != number).any():
            attempt = _strangers(attempt, side, ours, origins[number], number, a.values())
            continue
        if not np.array_equal(np.sort(rows), np.arange(len(rows))):
            attempt = _copies(attempt, side, ours, rows)
            continue
        order = np.argsort(rows)
        if np.array_equal(order, np.arange(len(order))):
            continue
        heads = whole_heads(order, ours.heads, ours.width)
        if heads is not None:
            moved[side] = heads
        found = () if heads is not None else (_order(side, order, a, attempt.block),)
        weights = theirs.changed(weight=theirs.rows[order])
        attempt = attempt.with_side(side, weights, *found)
        attempt = _bias_moved(attempt, side, ours, theirs, order)
    if moved:
        attempt = replace(attempt, found=(*attempt.found, _heads_moved(a, moved)))
    for side in SIDES:
        ours, theirs = a.side(side), attempt.block.side(side)
        if ours.heads == theirs.heads:
            weights, named = _by_row(side, ours, theirs)
            attempt = attempt.with_side(side, weights, named) if named else attempt
    if attempt.found or attempt.beyond:
        yield attempt


def _tiled(attempt: Attempt, side: str, groups: int, rows: np.ndarray) -> Attempt:
    """Key heads that are stored repeatedly, but as a whole, where each is repeated by itself."""
    theirs = attempt.block.side(side)
    origin = rows.reshape(theirs.heads, theirs.width) // theirs.width
    tiled = np.arange(theirs.heads) % groups
    if theirs.heads % groups or not (origin == tiled[:, None]).all():
        return attempt
    order = np.arange(theirs.heads).reshape(-1, groups).T.ravel()
    weight = theirs.factor.stored_weight[order]
    bias = theirs.factor.stored_bias
    weights = theirs.changed(weight=weight, bias=None if bias is None else bias[order])
    reason = f"{side} heads are repeated as a whole (repeat), not one by one (repeat_interleave)"
    repair = f"w = w.view(-1, {groups}, {theirs.width}, D).transpose(0, 1).reshape(-1, D)"
    verdict = "other pairing of query and key heads"
    return attempt.with_side(
        side, weights, mistakes.reordered(verdict, reason, repair, (side,), groups=groups)
    )


def _heads_moved(a: StoredBlock, moved: dict[str, np.ndarray]) -> Mismatch:
    """Whole heads in another order: on both sides alike, or so that other heads meet."""
    heads, groups = a.query.heads, a.key.heads
    share = heads // groups
    queries = moved.get("query", np.arange(heads))
    keys = moved.get("key", np.arange(groups)).repeat(share)
    if np.array_equal(queries // share, keys):
        return mistakes.head_order(queries)
    named = mistakes.pairing(queries, keys, groups)
    code = []
    for side, order in moved.items():
        weights = a.side(side)
        rows = (order[:, None] * weights.width + np.arange(weights.width)).ravel()
        steps = [each for each in steps_to(rows, weights.heads, weights.width, 0) if len(each) == 1]
        listed = f"w = w.view(-1, {weights.width}, D)[{order.tolist()}].reshape(-1, D)"
        known = steps[0][0].code if steps else listed
        code.append(f"{known}  # {side}")
    return replace(named, repair="\n".join(code), sides=tuple(moved))


def _exchanged(a: StoredBlock, b: StoredBlock) -> Attempt:
    """Queries and keys in each other's place, with their biases if these were exchanged too."""
    query, key = b.key.factor.stored_weight, b.query.factor.stored_weight
    biases = b.query.bias, b.key.bias
    with_biases = any(bias is not None for bias in biases) and not all(
        alike(ours.bias, bias) for ours, bias in zip((a.query, a.key), biases, strict=True)
    )
    if with_biases:
        biases = biases[::-1]
    block = replace(
        b,
        query=b.query.changed(weight=query, bias=biases[0]),
        key=b.key.changed(weight=key, bias=biases[1]),
    )
    return Attempt(block, (mistakes.exchanged(with_biases),))


def _order(side: str, order: np.ndarray, a: StoredBlock, b: StoredBlock) -> Mismatch:
    """The mistake behind rows in another order; ``order`` brings them back."""
    ours = a.side(side)
    heads, width, turned = ours.heads, ours.width, rotated(a, ours)
    steps = steps_to(order, heads, width, turned)
    read = b.stored_order or (a.rotary.order if a.rotary is not None else "")
    if steps:
        words, *others = dict.fromkeys(_in_words(each, heads, width, read) for each in steps)
        if others:
            words += f" (or {others[0].removeprefix('rotary order: ')}, which is the same here)"
        code = "; ".join(step.code for step in steps[0])
        if b.stored_order and a.rotary is not None:  # the code is for rows as they are stored
            there, back = (
                to_order(kind, heads, width, turned) for kind in (a.rotary.order, b.stored_order)
            )
            chain = there.rows[order][back.rows]
            fewer = steps_to(chain, heads, width, turned) or [(there, *steps[0], back)]
            code = "; ".join(step.code for step in fewer[0])
        rotary = all(step.kind != "heads" for step in steps[0])
        verdict = mistakes.ROTARY if rotary else "same heads in another order"
        return mistakes.reordered(
            verdict, words, code, (side,), order=steps[0][-1].kind, heads_taken=steps[0][0].heads
        )
    table = order.reshape(heads, width) - width * np.arange(heads)[:, None]
    if (table == table[0]).all():
        listed = ", ".join(map(str, table[0]))
        return mistakes.reordered(
            "other order of dimensions", "dimensions of each head in another order",
            f"w = w.view(-1, {width}, D)[:, [{listed}]].reshape(-1, D)", (side,),
        )  # fmt: skip
    return mistakes.reordered(
        "other order of rows", "the same rows in another order, by no known rule", "", (side,)
    )


def _in_words(steps: tuple[Reorder, ...], heads: int, width: int, read: str) -> str:
    """What was done to rows that these steps bring back.

    ``read`` is the order in which the second block's rotary pairs are read; empty without them.
    """
    first, last = steps[0], steps[-1]
    actual = (heads, width)
    if first.kind == "heads":
        return f"heads regrouped: {first.heads} heads in the order of another grouping"
    if len(steps) == 1 and (first.heads, first.width) != actual:
        return (
            f"rotary order: rows lie as if there were {first.heads} heads of width "
            f"{first.width}, not {heads} of {width}"
        )
    if len(steps) == 1:
        # Undone are a conversion that is missing, or one too many.
        forgotten = first.kind == read
        other = {"half": "interleaved", "interleaved": "half"}[first.kind]
        if forgotten or not read:
            return f"rotary order: stored {other}, read as {first.kind}"
        return f"rotary order: converted to {read} once too often"
    if first.kind == last.kind and first.heads == last.heads == heads:
        return f"rotary order: converted twice to {'half' if first.kind != 'half' else 'pairs'}"
    wrong = first if (first.heads, first.width) != actual else last
    if wrong.kind == "heads":
        return "rotary order and grouping of heads"
    return (
        f"rotary order: converted with {wrong.heads} head{'s' * (wrong.heads > 1)} of width "
        f"{wrong.width} instead of {heads} of {width}"
    )


def _by_row(side: str, ours: Weights, weights: Weights) -> tuple[Weights, Mismatch | None]:
    """A factor or a sign that depends on the dimension within a head alone."""
    theirs = weights.rows
    if ours.rows.shape != theirs.shape:
        return weights, None
    sizes, products = (np.einsum("nd,nd->n", some, theirs) for some in (theirs, ours.rows))
    if not sizes.all():
        return weights, None
    factors = (products / sizes).reshape(weights.heads, weights.width)
    first = [some[: weights.width].astype(np.float64) for some in (ours.rows, theirs)]
    usual = np.einsum("nd,nd->n", *first) / np.square(first[1]).sum(axis=1)
    if np.abs(factors - usual).max() > SAME * np.abs(usual).max() or np.ptp(usual) < SAME:
        return weights, None
    repaired = weights.changed(
        weight=theirs * np.tile(usual, weights.heads)[:, None].astype(theirs.dtype)
    )
    if np.allclose(np.abs(usual), np.abs(usual[0]), rtol=SAME):
        negative = np.flatnonzero(usual < 0)
        if weights.bias is not None:
            signs = np.sign(np.tile(usual, weights.heads)).astype(weights.bias.dtype)
            repaired = repaired.changed(bias=weights.bias * signs)
        reason = f"signs of {len(negative)} of the {len(usual)} dimensions of each head"
        repair = f"w.view(-1, {weights.width}, D)[:, {_as_slice(negative)}] *= -1"
        return repaired, mistakes.Mismatch("other signs", reason, repair, (side,))
    reason = (
        "each dimension of a head has a factor of its own, as gains of a norm that were folded in, "
        "or left out"
    )
    repair = f"w = (w.view(-1, {weights.width}, D) * gain[:, None]).reshape(-1, D)"
    return repaired, mistakes.Mismatch("other factors of dimensions", reason, repair, (side,))


def _as_slice(numbers: np.ndarray) -> str:
    if len(numbers) and np.array_equal(numbers, np.arange(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}:{numbers[-1] + 1}"
    return str(numbers.tolist())


def _bias_moved(
    attempt: Attempt, side: str, ours: Weights, theirs: Weights, order: np.ndarray
) -> Attempt:
    """The bias along with its rows, unless it is right where it is: then that is a mistake too."""
    bias = theirs.bias
    if bias is None or ours.bias is None:
        return attempt
    moved = bias[order]
    if alike(ours.bias, moved) or not alike(ours.bias, bias):
        weights = attempt.block.side(side)
        return attempt.with_side(side, weights.changed(bias=moved))
    note = mistakes.other_bias("biases are in place, the weights' rows are not", "", (side,))
    return attempt.with_side(side, attempt.block.side(side), note)


def _strangers(
    attempt: Attempt,
    side: str,
    ours: Weights,
    origins: Origins,
    number: int,
    values: np.ndarray | None,
) -> Attempt:
    """Heads whose rows are not among the first block's."""
    by_head = origins.source.reshape(ours.heads, ours.width)
    lost = np.flatnonzero((by_head != number).mean(axis=1) > 0.5)
    if not len(lost) or len(lost) == ours.heads:
        return attempt
    weights = attempt.block.side(side)
    spread = float(weights.factor.stored_weight[lost].std())
    others = origins.source.reshape(ours.heads, ours.width)[lost]
    where = "none of the original's"
    if (others == 1 - number).all():
        where = f"{SIDES[1 - number]} heads of the original"
    elif values is not None and values.shape[1] == weights.rows.shape[1] and spread:
        some = weights.factor.stored_weight[lost].reshape(-1, values.shape[1])
        place = nearest(sketch(some), sketch(values), _silent(some), _silent(values))
        if (cosines(some, values, place) > ALIKE).all():
            where = "value heads of the original"
    reason = (
        f"{side} heads {mistakes.listed(lost)} are zero, as pruned ones are"
        if not spread
        else f"{side} heads {mistakes.listed(lost)} are {where}"
        if "value" in where
        else f"{side} heads {mistakes.listed(lost)} are {where}; left as initialized? "
        f"(standard deviation {spread:.2g}, the others' "
        f"{float(np.delete(weights.factor.stored_weight, lost, axis=0).std()):.2g})"
    )
    repair = _from_original(ours.width, lost)
    named = mistakes.some_heads(mistakes.STRANGERS, reason, (side,), lost, repair)
    return _beyond(attempt, side, lost, named)


def _copies(attempt: Attempt, side: str, ours: Weights, rows: np.ndarray) -> Attempt:
    """Heads that are copies of others."""
    origin = whole_heads(rows, ours.heads, ours.width)
    if origin is None:
        return attempt
    copied = np.flatnonzero(origin != np.arange(ours.heads))
    pairs = ", ".join(f"{head} is a copy of {origin[head]}" for head in copied[:8])
    repair = _from_original(ours.width, copied)
    reason = f"{side} heads copied: {pairs}{' …' if len(copied) > 8 else ''}"
    named = mistakes.some_heads(mistakes.COPIES, reason, (side,), copied, repair)
    return _beyond(attempt, side, copied, named)


def _from_original(width: int, heads: np.ndarray) -> str:
    """Code that takes whole heads from the original's weight."""
    which = heads.tolist()
    return f"w.view(-1, {width}, D)[{which}] = original.view(-1, {width}, D)[{which}]"


def _beyond(attempt: Attempt, side: str, heads: np.ndarray, named: Mismatch) -> Attempt:
    """With heads that are lost; query heads that meet lost keys are lost as well."""
    block = attempt.block
    share = block.query.heads // block.key.heads
    lost = (
        set(heads.tolist())
        if side == "query"
        else {int(h) * share + n for h in heads for n in range(share)}
    )
    return replace(attempt, found=(*attempt.found, named), beyond=attempt.beyond | lost)
