"""How one block's attention differs from another's: what, where, and the code that undoes it.

Each mismatch describes the second block: how it was changed, or what it lacks. Its repair is
PyTorch, in which ``w`` is the second checkpoint's weight of the side, (n, D) as in ``nn.Linear``,
``b`` its bias, ``gain`` a norm's, and ``config`` its configuration; ``original`` is the same of the
first checkpoint. Where both sides are needed, they are ``w_q`` and ``w_k``.

Conversions make and forget orders of a weight's rows, each here as indices, words and code. All are
one operation, a view of the rows with three axes of which two change places. With pairs it turns
rotary pairs that lie side by side into halves, or back; with heads it regroups them.

Axes: H heads, R head width, D model width, n = H·R rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from wqk._typing import Int

if TYPE_CHECKING:
    from wqk.families.rotary import Rotary


@dataclass(frozen=True, eq=False)
class Reorder:
    """A reordering of a side's rows, ``w[rows]``.

    Attributes
    ----------
    rows
        For each row of the result, the row that it is taken from.
    kind
        ``half`` (pairs side by side become halves), ``interleaved`` (halves become pairs) or
        ``heads``.
    heads, width
        How many heads of which width it takes the rows for.
    code
        The same in PyTorch, of a weight ``w`` with ``D`` columns.
    """

    rows: Int[np.ndarray, " rows"]
    kind: str
    heads: int
    width: int
    code: str


@cache
def reorders(heads: int, width: int, rotated: int) -> tuple[Reorder, ...]:
    """Every reordering of H·R rows, those of the actual heads first.

    ``rotated`` is how many dimensions of a head turn with positions, where fewer than all do.

    Examples
    --------
    >>> first = reorders(2, 4, 4)[0]
    >>> first.rows, first.code
    (array([0, 2, 1, 3, 4, 6, 5, 7]), 'w = w.view(-1, 2, 2, D).transpose(1, 2).reshape(-1, D)')
    """
    n = heads * width
    found: list[Reorder] = []
    if 0 < rotated < width:
        found += [_partial(kind, heads, width, rotated) for kind in ("half", "interleaved")]
    counts = sorted((h for h in range(1, n // 2 + 1) if n % h == 0), key=lambda h: h != heads)
    for count in counts:
        wide = n // count
        if wide % 2 == 0 and wide > 2:
            found.append(_swapped("half", count, wide, (count, wide // 2, 2)))
            found.append(_swapped("interleaved", count, wide, (count, 2, wide // 2)))
    for groups in (g for g in range(2, heads) if heads % g == 0):
        axes = (groups, heads // groups, width)
        rows = np.arange(n).reshape(axes).swapaxes(0, 1).ravel()
        code = f"w = w.view({groups}, -1, {width}, D).transpose(0, 1).reshape(-1, D)"
        found.append(Reorder(rows, "heads", heads, width, code))
    return tuple(found)


def _swapped(kind: str, heads: int, width: int, axes: tuple[int, int, int]) -> Reorder:
    rows = np.arange(heads * width).reshape(axes).swapaxes(1, 2).ravel()
    code = f"w = w.view(-1, {axes[1]}, {axes[2]}, D).transpose(1, 2).reshape(-1, D)"
    return Reorder(rows, kind, heads, width, code)


def _partial(kind: str, heads: int, width: int, rotated: int) -> Reorder:
    """The first dimensions of each head alone."""
    axes = (rotated // 2, 2) if kind == "half" else (2, rotated // 2)
    within = np.arange(rotated).reshape(axes).T.ravel()
    rows = np.arange(heads * width).reshape(heads, width)
    rows[:, :rotated] = rows[:, within]
    view = ", ".join(map(str, axes))
    code = (
        f"h = w.view(-1, {width}, D); h[:, :{rotated}] = h[:, :{rotated}].reshape(-1, {view}, D)"
        f".transpose(1, 2).reshape(-1, {rotated}, D)"
    )
    return Reorder(rows.ravel(), kind, heads, width, code)


def to_order(kind: str, heads: int, width: int, rotated: int) -> Reorder:
    """The conversion of a side's rows between rotary pairs side by side and in halves."""
    known = (one for one in reorders(heads, width, rotated) if one.kind == kind)
    same = Reorder(np.arange(heads * width), kind, heads, width, "")
    return next(known, same) if min(width, rotated) > 2 else same


def steps_to(
    rows: Int[np.ndarray, " rows"], heads: int, width: int, rotated: int
) -> list[tuple[Reorder, ...]]:
    """The reorderings, one or two in a row, whose result has its rows in this order.

    Several, if they are equal: in heads of width 8, a conversion done twice is one left undone.
    """
    known = reorders(heads, width, rotated)
    single: list[tuple[Reorder, ...]] = [(one,) for one in known if np.array_equal(one.rows, rows)]
    by_rows = {one.rows.tobytes(): one for one in reversed(known)}
    double: list[tuple[Reorder, ...]] = []
    for first in known:
        # w[first][second] is w[rows] where second says at which place of first each row is.
        place = np.empty_like(first.rows)
        place[first.rows] = np.arange(len(rows))
        second = by_rows.get(place[rows].tobytes())
        if second is not None:
            double.append((first, second))
    own = [pair for pair in double if all((s.heads, s.kind) == (heads, pair[0].kind) for s in pair)]
    return [*single, *own] or double[:1]


def whole_heads(rows: np.ndarray, heads: int, width: int) -> np.ndarray | None:
    """The head that each head's rows are taken from, if they are taken whole and in order."""
    table = rows.reshape(heads, width)
    first = table[:, 0]
    in_order = np.array_equal(table, first[:, None] + np.arange(width))
    return first // width if in_order and not (first % width).any() else None


def of_vector(code: str, name: str) -> str:
    """The code of a reordering for a bias or a gain, which has no columns.

    Examples
    --------
    >>> of_vector("w = w.view(-1, 2, 4, D).transpose(1, 2).reshape(-1, D)", "b")
    'b = b.view(-1, 2, 4).transpose(1, 2).reshape(-1)'
    """
    return code.replace(", D)", ")").replace("w", name).replace("vie" + name, "view")


@dataclass(frozen=True)
class Mismatch:
    """A difference between two blocks.

    Attributes
    ----------
    verdict
        Its kind, in the same words for every block.
    reason
        What it is, in one phrase.
    repair
        Code that undoes it; empty where none is known.
    sides
        The sides of the form that it concerns: ``query``, ``key``, or both.
    heads
        The heads that it concerns; empty for all.
    facts
        Numbers behind the reason, by name.
    """

    verdict: str
    reason: str
    repair: str = ""
    sides: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.reason

    @property
    def unexplained(self) -> bool:
        """Whether it says how far apart two blocks are, and not why."""
        return self.verdict in UNEXPLAINED or bool(self.facts.get("unexplained"))

    @property
    def is_vague(self) -> bool:
        """Whether the stored weights may tell more."""
        return self.unexplained or self.verdict in VAGUE

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        plain = asdict(self)
        return plain | dict(plain.pop("facts"))


# One for each head, or of heads.
Numbers: TypeAlias = "Sequence[Any] | np.ndarray"

ROTARY = "other rotary positions"
SETTING = "other setting"
NORM = "same weights, other norm"
FUSED = "other layout of the fused weight"
HEADS = "same heads in another order"
ADAPTER, STRANGERS, COPIES = "other adapter", "heads of other weights", "heads copied from others"
VAGUE = frozenset({ADAPTER, STRANGERS, COPIES, "close"})
UNEXPLAINED = frozenset({"no known mistake", "different weights", "close"})


def reordered(
    verdict: str, reason: str, repair: str, sides: Sequence[str], **facts: Any
) -> Mismatch:
    """Rows of queries or keys that lie in another order."""
    return Mismatch(verdict, reason, repair, tuple(sides), facts=facts)


def other_rotary(wanted: Rotary | None, has: Rotary | None, width: int = 0) -> Mismatch:
    """A block that would be the same with another rotation: order, width, base or scaling."""
    same_form = "same at distance 0"
    if wanted is None or has is None:
        here, there = (r.order if r else none for r, none in ((wanted, "no"), (has, "none")))
        reason = f"{same_form}; {here} rotary positions expected, {there} found"
        return Mismatch(ROTARY, reason, facts=_rotary_facts(wanted, has))
    reasons, repairs = [], []
    if wanted.order != has.order:
        reasons.append(f"rotary order: stored {wanted.order}, read as {has.order}")
    pairs, other_pairs = len(wanted.frequencies), len(has.frequencies)
    if pairs != other_pairs:
        reasons.append(
            f"share of rotated dimensions (partial_rotary_factor): {2 * pairs} of each head's "
            f"expected, {2 * other_pairs} found"
        )
        if width:
            repairs.append(f'config["partial_rotary_factor"] = {2 * pairs / width:.6g}')
    elif not np.allclose(wanted.frequencies, has.frequencies, rtol=1e-6):
        reason, repair = _frequencies(wanted.frequencies, has.frequencies)
        reasons.append(reason)
        repairs.append(repair)
    if wanted.amplitude != has.amplitude:
        reasons.append(
            f"attention factor of rotary positions: {wanted.amplitude:.4g} expected, "
            f"{has.amplitude:.4g} found"
        )
    reason = f"{same_form}, other {'; '.join(reasons) or 'rotary positions'}"
    return Mismatch(ROTARY, reason, "; ".join(repairs), facts=_rotary_facts(wanted, has))


def _rotary_facts(wanted: Rotary | None, has: Rotary | None) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, rotary in (("", wanted), ("other_", has)):
        given = rotary is not None
        frequencies = rotary.frequencies if rotary is not None else np.zeros(0)
        facts[f"{name}order"] = rotary.order if rotary is not None else None
        slowest = float(np.abs(frequencies).min()) if given and len(frequencies) else None
        facts[f"{name}speed"] = slowest
        facts[f"{name}base"] = base_of(frequencies)
        facts[f"{name}rotated"] = 2 * len(frequencies) if given else None
    return facts


def base_of(frequencies: np.ndarray) -> float | None:
    """The base, where the frequencies are powers of one; None where they are scaled.

    Examples
    --------
    >>> round(base_of(500.0 ** -(np.arange(0, 8, 2) / 8)))
    500
    """
    pairs = len(frequencies)
    if pairs < 2 or not (frequencies > 0).all() or abs(frequencies[0] - 1) > 1e-6:
        return None
    logarithms = np.log(frequencies)
    base = math.exp(-logarithms[1] * pairs)
    fits = np.allclose(logarithms, logarithms[1] * np.arange(pairs), rtol=1e-5, atol=1e-9)
    return float(f"{base:.8g}") if fits else None


def _frequencies(wanted: np.ndarray, has: np.ndarray) -> tuple[str, str]:
    """What makes these frequencies differ, and how to set it right: three causes, told apart."""
    if np.allclose(wanted, -has, rtol=1e-6):
        return "direction of rotation: the sine has the other sign", "sin = -sin"
    base, other = base_of(wanted), base_of(has)
    if base and other:
        return (
            f"rotary base (rope_theta): {base:.8g} expected, {other:.8g} found",
            f'config["rope_theta"] = {base:.8g}',
        )
    ratio = wanted / has
    scaling = 'config["rope_scaling"] = '
    if np.ptp(ratio) < 1e-6 * abs(ratio[0]):
        factor = f"{1 / ratio[0]:.6g}" if ratio[0] < 1 else f"1/{ratio[0]:.6g}"
        code = f'{{"rope_type": "linear", "factor": {1 / ratio[0]:.6g}}}'
        if base:
            found = f"none expected, all frequencies divided by {ratio[0]:.6g} found"
            return f"rotary scaling (rope_scaling): {found}", scaling + "None"
        wanted_scale = f"all frequencies divided by {factor} expected"
        return f"rotary scaling (rope_scaling): {wanted_scale}", scaling + code
    slowest = (
        f"slowest frequency {np.abs(wanted).min():.3g} expected, {np.abs(has).min():.3g} found"
    )
    missing = "scaled" if not base and other else "not scaled" if base else "scaled otherwise"
    return (
        f"rotary scaling (rope_scaling): {missing} expected, {slowest}",
        scaling + ("None" if base else 'original["rope_scaling"]'),
    )


def head_order(heads: Numbers) -> Mismatch:
    """The same heads in another order; for each head of the first block, the second's."""
    order = tuple(map(int, heads))
    verdict = HEADS
    repair = f"w = w.view({len(order)}, -1, D)[{list(order)}].reshape(-1, D)"
    return Mismatch(verdict, f"{verdict}: {listed(order)}", repair, ("query", "key"), order)


def pairing(query_heads: Numbers, key_heads: Numbers, groups: int) -> Mismatch:
    """The same query and key heads, paired differently: which, for each head of the first block."""
    pairs = dict(zip(map(int, query_heads), map(int, key_heads), strict=True))
    verdict, repair, share = "other pairing of query and key heads", "", len(pairs) // groups
    if all(key == head % groups for head, key in pairs.items()):
        rule = f"query head h belongs to key head h mod {groups}"
        repair = f"w_q = w_q.view({share}, {groups}, -1, D).transpose(0, 1).reshape(-1, D)"
    else:
        heads = sorted(pairs)
        rule = f"query heads {listed(heads)} belong to key heads " + listed(
            [pairs[head] for head in heads]
        )
    facts = {"query_heads": tuple(pairs), "key_heads": tuple(pairs.values()), "groups": groups}
    return Mismatch(
        verdict, f"{verdict}: {rule}, is read with h // {share}", repair, ("query",), facts=facts
    )


def exchanged(biases: bool = False) -> Mismatch:
    """Queries and keys in each other's place."""
    reason = "transposed: queries and keys have changed places" + (", biases too" * biases)
    repair = "w_q, w_k = w_k, w_q" + ("; b_q, b_k = b_k, b_q" if biases else "")
    return Mismatch("transposed", reason, repair, ("query", "key"))


def scaled(factors: Sequence[float], width: int, sides: Sequence[str] = ()) -> Mismatch:
    """Each head's scores times a factor; the root of the width is forgotten most often."""
    low, high = min(factors), max(factors)
    facts = {"factors": tuple(map(float, factors)), "width": width}
    if high - low > 1e-2 * abs(high):
        reason = f"scaled, each head otherwise, by {low:.4g} to {high:.4g}"
        return Mismatch("scaled", reason, "", tuple(sides), facts=facts)
    known = {1 / math.sqrt(width): "1/√", math.sqrt(width): "√"}
    near = [text for value, text in known.items() if math.isclose(high, value, rel_tol=1e-2)]
    named = f" = {near[0]}{width}, of the score's scale" if near else ""
    repair = "w_q = -w_q" if math.isclose(high, -1, rel_tol=1e-3) else f"w_q = w_q / {high:.6g}"
    return Mismatch("scaled", f"scaled by {high:.4g}{named}", repair, tuple(sides), facts=facts)


def other_bias(reason: str, repair: str = "", sides: Sequence[str] = ()) -> Mismatch:
    """The same weights with other biases, or other biases of the norms before them."""
    return Mismatch("same weights, other biases", reason, repair, tuple(sides))


def other_norm(reason: str, repair: str = "", sides: Sequence[str] = ()) -> Mismatch:
    """The same weights with other gains of a norm."""
    return Mismatch(NORM, reason, repair, tuple(sides))


def setting(name: str, value: Any, other: Any, repair: str = "") -> Mismatch:
    """A setting outside the form that differs."""
    texts = str(value or "none"), str(other or "none")
    facts = {"name": name, "value": texts[0], "other_value": texts[1]}
    return Mismatch(SETTING, f"{name}: {texts[0]} against {texts[1]}", repair, facts=facts)


def wrongly_quantized(names: Sequence[str], kind: str) -> Mismatch:
    """Weights that a configuration says to be plain and that are not, or the reverse."""
    which = ", ".join(names)
    reason = f"{which}: plain by the configuration, stored as {kind}"
    if not kind:
        reason = f"{which}: quantized by the configuration, stored plain"
    name = "the wrong layers are quantized"
    facts = {"name": name, "tensors": list(names), "other_value": kind or "none"}
    repair = "quantization_config: list what is stored plain, and nothing else"
    return Mismatch(SETTING, f"{name}: {reason}", repair, facts=facts)


def beside(what: str, one: Mismatch) -> Mismatch:
    """A mismatch of another circuit than the scores, such as values and outputs."""
    facts = {"circuit": what, "unexplained": one.verdict in UNEXPLAINED, "verdict": one.verdict}
    facts |= one.facts
    return Mismatch(f"other {what}", f"{what}: {one.reason}", "", (), one.heads, facts)


def unlike(value: str, other: str) -> Mismatch:
    """Circuits of other numbers of heads, or other widths."""
    return Mismatch("other sizes", f"{value} against {other}")


def other_sinks(reason: str) -> Mismatch:
    """Other scores of the virtual keys."""
    return Mismatch("other sinks", reason, "sinks = original", facts={"circuit": "sinks"})


def another_layer(layer: int, other: int, tied: bool) -> Mismatch:
    """The weights of another layer of the first checkpoint."""
    more = ", as another one does" if tied else ""
    reason = f"another layer's weights: layer {layer} has those of layer {other}{more}"
    repair = f"layers[{layer}] = original[{layer}]  # not [{other}]"
    return Mismatch("another layer's weights", reason, repair, facts={"other_layer": other})


def some_heads(
    verdict: str, reason: str, sides: Sequence[str], heads: Numbers, repair: str = ""
) -> Mismatch:
    """Heads that are not the first block's own, while all others are."""
    return Mismatch(verdict, reason, repair, tuple(sides), tuple(map(int, heads)))


def adapter(reason: str, repair: str, sides: Sequence[str], **facts: Any) -> Mismatch:
    """A difference of low rank: an adapter that was merged otherwise, or not at all."""
    return Mismatch(ADAPTER, reason, repair, tuple(sides), facts=facts)


# Distances of two heads, relative to the first: of a copy that was trained on, and of heads that
# share next to nothing.
CLOSE, DIFFERENT = 0.3, 0.9
# The share of the tolerance beyond which a head is not said to be equal beside heads that differ.
NEARLY = 0.5


def unexplained(distances: Numbers, tolerances: Numbers) -> Mismatch:
    """No known change makes the blocks equal: how far apart they are, and in which heads."""
    far = [head for head, pair in enumerate(zip(distances, tolerances, strict=True)) if
           pair[0] > pair[1]]  # fmt: skip
    low, high = (pick(distances[head] for head in far) for pick in (min, max))
    size = f"{high:.2g}" if low > high / 2 else f"{low:.2g} to {high:.2g}"
    if len(far) < len(distances):
        rest = [h for h in range(len(distances)) if h not in far]
        near = [h for h in rest if distances[h] > NEARLY * tolerances[h]]
        most = max((distances[h] for h in near), default=0.0)
        beside = (
            f"; just within the tolerance in {_counted(near)} ({most:.2g})" if near else " alone"
        )
        reason = f"no known mistake: relative distance {size} in {_counted(far)}{beside}"
        return Mismatch("no known mistake", reason, heads=tuple(far), facts={"size": high})
    if high < CLOSE:
        reason = f"close, but no known mistake: relative distance {size} in all heads"
        return Mismatch("close", reason, facts={"size": high})
    verdict = "different weights" if low > DIFFERENT else "no known mistake"
    reason = f"{verdict}: relative distance {size} in all heads"
    return Mismatch(verdict, reason, facts={"size": high})


def _counted(heads: Numbers) -> str:
    return f"head {heads[0]}" if len(heads) == 1 else f"heads {listed(heads)}"


def listed(numbers: Numbers) -> str:
    """A readable list of numbers that fits a line."""
    shown = " ".join(map(str, numbers[:16]))
    return shown + (" …" if len(numbers) > 16 else "")


def distinct(mismatches: Sequence[Mismatch]) -> Iterator[Mismatch]:
    """Each mismatch once; those of queries and keys that are otherwise equal are joined."""
    seen: dict[tuple[str, str, str], list[Mismatch]] = {}
    for one in mismatches:
        seen.setdefault((one.verdict, one.reason, one.repair), []).append(one)
    for same in seen.values():
        first = same[0]
        sides = tuple(dict.fromkeys(side for one in same for side in one.sides))
        alone = f", in the {sides[0]} weights alone" if len(sides) == 1 else ""
        reason = first.reason + alone * ("order" in first.facts and bool(first.repair))
        yield replace(first, reason=reason, sides=sides)
