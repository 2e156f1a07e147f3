"""How models are related, as `wqk.kin` shows it: two by two, as mixtures, and as a tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from wqk._console import Shown, counted, number
from wqk.comparing.fingerprints import SAMPLED
from wqk.comparing.randomization import Outcome
from wqk.tables.sheet import Cell, Sheet

# An extrapolated p is not told any further, as a base-10 logarithm.
LEAST = -20

# Singular values this much closer than usual are pointed out.
CLOSE = 0.2

# Models are called related up to this p.
RELATED = 0.001

# Forms that have changed by more than their own size may share no more than their start.
START = 1.0

KINDS = {
    "copy": "their forms are equal",
    "rotated copy": "their forms are equal but for a rotation",
    "shared start": "they share at least their start",
}

NUMBERINGS = {
    "heads": "heads of each layer",
    "coordinates": "coordinates of the residual stream",
    "dimensions": "signs of each head's dimensions",
    "weights": "the same, weights as they stand",
}


DIRECTION = (
    "Related means that one comes from the other, or both come from a third model or from one "
    "initialization. The forms do not tell which, nor which was first."
)


@dataclass(frozen=True)
class LayerMatch:
    """One block of the second model, and the one of the first that it agrees with."""

    stack: str
    layer: int
    of_stack: str | None  # in the first model; None if no block agrees more than chance allows
    of_layer: int | None
    p: float  # share of renumberings in which any layer agrees as well
    heads: tuple[int | None, ...]  # for each head, the first model's that it is closest to
    changes: tuple[float | None, ...]  # of each head: ‖M_b − M_a‖ / ‖M_a‖

    @property
    def change(self) -> float | None:
        """The median over heads."""
        known = [change for change in self.changes if change is not None]
        return float(np.median(known)) if known else None


@dataclass(frozen=True, repr=False)
class Kinship(Shown):
    """What two models' forms say about their relation."""

    checkpoint: str
    other: str
    p: float  # the chance of such an agreement between models that share nothing
    floor: float  # the smallest p that the number of renumberings allows
    extrapolated: float  # log10 of the p that an exponential tail through them suggests
    tests: tuple[Outcome, ...]
    matches: tuple[LayerMatch, ...]
    # copy, rotated copy, changed, shared start, grown, pruned or rearranged; None if unrelated
    kind: str | None
    # Whether changes are smallest possible ones, from singular values, as coordinates differ.
    bounds: bool
    # Distance of heads' singular values to the nearest of the other model, over that to the
    # nearest in their own. It has no p.
    closeness: float | None

    @property
    def related(self) -> bool:
        """Whether p is at most .001."""
        return self.p <= RELATED

    @property
    def change(self) -> float | None:
        """The median relative change over matched layers; None if the models are unrelated."""
        known = [m.change for m in self.matches if m.change is not None]
        return float(np.median(known)) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return asdict(self) | {
            "related": self.related,
            "change": self.change,
            "matches": [asdict(match) | {"change": match.change} for match in self.matches],
            "reading": list(self.reading),
        }

    @property
    def reading(self) -> tuple[str, ...]:
        """What the result means, in sentences."""
        return tuple(_reading(self))

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        yield Text.assemble((self.checkpoint, "bold"), "  and  ", (self.other, "bold"))
        yield _verdict(self)
        table = Sheet.of("renumbered", "p", "deviations", "", text=["renumbered", ""])
        for test in self.tests:
            numbers = ("–", "–") if test.p is None else (probability(test.p), f"{test.z:.1f}")
            table.add(NUMBERINGS[test.name], *numbers, Cell(test.left_out, style="dim"))
        yield table
        if self.related:
            yield _summary(self)
        for sentence in self.reading:
            yield Text(sentence, style="dim")


def _reading(kinship: Kinship) -> Iterator[str]:
    if not kinship.related:
        applied = [test for test in kinship.tests if test.visible is not None]
        visible = ", ".join(
            f"{test.visible:.0%} by {test.name}" for test in applied if test.visible is not None
        )
        yield f"Agreement that would have been seen, as a share of a copy's: {visible}."
        if kinship.closeness is not None and kinship.closeness < CLOSE:
            yield (
                f"But singular values of heads lie {1 / max(kinship.closeness, 1e-6):,.0f} times "
                "closer to the other model's than to each other, as if heads were renumbered, the "
                "stream rotated and dimensions turned, all three. No renumbering can say what "
                "chance allows then, so this has no p."
            )
            return
        yield (
            "A relation is not excluded: renumbered heads, a rotated stream and turned dimensions "
            "hide one from the tests if all three are done."
        )
        return
    yield DIRECTION
    if kinship.bounds:
        yield (
            "The coordinates of the residual stream do not agree; a change is the smallest that "
            "singular values allow."
        )
    elif kinship.matches and kinship.change is not None:
        yield f"Changes are measured on {SAMPLED} coordinates of the residual stream at most."
    if kinship.change is not None and kinship.change > START and not kinship.bounds:
        yield (
            "The forms have changed by more than their own size: the two may share no more than "
            "an initialization. Whether they share some of their training as well cannot be told."
        )


def _verdict(kinship: Kinship) -> str:
    p = f"p = {probability(kinship.p)}"
    if not kinship.related:
        return f"No sign that they are related ({p})."
    count = round(1 / kinship.floor) - 1
    least = ""
    if kinship.p <= 3 * kinship.floor:
        power = (
            f"10^{kinship.extrapolated:.0f}" if kinship.extrapolated > LEAST else "less than 10^-20"
        )
        least = (
            f", the least that {count:,} renumberings give; an exponential tail through the "
            f"largest of them suggests {power}"
        )
    kind = KINDS.get(str(kinship.kind), str(kinship.kind))
    return f"Related: {kind} ({p}{least})."


def _summary(kinship: Kinship) -> str:
    """How many layers are matched, how, and how far they have changed."""
    matched = [match for match in kinship.matches if match.of_layer is not None]
    where = "in place" if in_place(kinship.matches) else "in other places"
    alike = all(match.heads == tuple(range(len(match.heads))) for match in matched)
    heads = "heads in order" if alike else "heads in another order"
    text = (
        f"{len(matched)} of the second model's {counted(len(kinship.matches), 'layer')} match, "
        f"{where}, {heads}"
    )
    if kinship.change is None:
        return f"{text}."
    change = shown_change(kinship.change, kinship.bounds)
    return f"{text}; the median relative change of a form is {change}."


def in_place(matches: Sequence[LayerMatch]) -> bool:
    """Whether each matched layer has its match's number, in the stack that stands for that one's.

    Stacks are called by what they are: an encoder's may stand for a decoder's.
    """
    matched = [match for match in matches if match.of_layer is not None]
    stacks = {(match.of_stack, match.stack) for match in matched}
    first, second = (set(names) for names in zip(*stacks, strict=True)) if stacks else ((), ())
    return (
        len(stacks) == len(first) == len(second)
        and all(one == other or one not in second for one, other in stacks)
        and all(match.layer == match.of_layer for match in matched)
    )


def moved_heads(matches: Sequence[LayerMatch]) -> list[float]:
    """The change of each head that has another's number, in layers matched head by head."""
    return [
        math.inf if change is None else change
        for match in matches
        if match.of_layer is not None and set(match.heads) == set(range(len(match.heads)))
        for place, (head, change) in enumerate(zip(match.heads, match.changes, strict=True))
        if head != place
    ]


def layer_table(kinship: Kinship) -> Sheet:
    """A line for each layer of the second model: its match, that of its heads, and the change."""
    table = Sheet.of("layer", "of", "heads", "change", text=["of", "heads"])
    stacks = {match.stack for match in kinship.matches} | {
        match.of_stack for match in kinship.matches
    }
    several = len(stacks - {None}) > 1
    for match in kinship.matches:
        own = f"{match.stack} {match.layer}" if several else str(match.layer)
        if match.of_layer is None:
            table.add(own, "–", "–", "–")
            continue
        of = f"{match.of_stack} {match.of_layer}" if several else str(match.of_layer)
        in_order = list(match.heads) == list(range(len(match.heads)))
        heads = (
            "in order" if in_order else " ".join("–" if h is None else str(h) for h in match.heads)
        )
        table.add(own, of, heads, shown_change(match.change, kinship.bounds))
    return table


def shown_change(change: float | None, bound: bool) -> str:
    """A relative change, marked if it is the smallest possible one."""
    return "–" if change is None else f"{'≥ ' if bound else ''}{number(change)}"


def probability(p: float) -> str:
    """A p-value to two digits.

    Examples
    --------
    >>> probability(0.3421), probability(0.0002)
    ('.34', '.0002')
    """
    if p >= 0.995:
        return "1"
    digits = max(2, 1 - math.floor(math.log10(p)) if p >= 0.01 else -math.floor(math.log10(p)))
    return f"{p:.{digits}f}".removeprefix("0")


# The relative change of a form between models that have nothing in common.
UNRELATED = math.sqrt(2)


@dataclass(frozen=True)
class Merge:
    """A model whose forms are close to a mixture of two others'."""

    child: str
    parents: tuple[str, str]
    shares: tuple[float, float]  # of each parent's forms, adding up to 1
    left: float  # ‖M − mixture‖ / ‖M‖


@dataclass(frozen=True, repr=False)
class Kinships(Shown):
    """Several models, two by two."""

    names: tuple[str, ...]
    pairs: tuple[Kinship, ...]  # (0, 1), (0, 2), …, (1, 2), …
    merges: tuple[Merge, ...]

    def __getitem__(self, index: tuple[int, int]) -> Kinship:
        """Two of the models by their places."""
        low, high = sorted(index)
        if low == high or low < 0 or high >= len(self.names):
            raise IndexError(f"expected two different places below {len(self.names)}, got {index}")
        return self.pairs[low * len(self.names) - low * (low + 1) // 2 + high - low - 1]

    @property
    def distances(self) -> np.ndarray:
        """Median relative changes of forms, (models, models); √2 of unrelated ones."""
        distances = np.zeros((len(self.names),) * 2)
        for i, j in combinations(range(len(self.names)), 2):
            pair = self[i, j]
            far = UNRELATED if not pair.related or pair.change is None else pair.change
            distances[i, j] = distances[j, i] = min(far, UNRELATED)
        return distances

    @property
    def tree(self) -> str:
        """The models by distance, in Newick's notation: mean distances join the nearest groups.

        It says who is close to whom, not who came first.
        """
        return _newick(_tree(self.distances), self.names) + ";"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "names": list(self.names),
            "pairs": [pair.to_dict() for pair in self.pairs],
            "merges": [asdict(merge) for merge in self.merges],
            "distances": self.distances.tolist(),
            "tree": self.tree,
        }

    def _shown(self, width: int) -> Iterator[Any]:
        from rich.text import Text

        letters = [_letter(place) for place in range(len(self.names))]
        table = Sheet.of("", "", *letters, text=["", ""])
        for i, name in enumerate(self.names):
            cells = [
                "·" if i == j else probability(self[i, j].p) if j > i else self._change(i, j)
                for j in range(len(self.names))
            ]
            table.add(letters[i], name, *cells)
        yield table
        yield Text("above the diagonal p, below it the relative change if related", style="dim")
        yield _rich_tree(
            _tree(self.distances), [*map(" ".join, zip(letters, self.names, strict=True))]
        )
        for merge in self.merges:
            shares = " and ".join(
                f"{share:.0%} {parent}"
                for share, parent in zip(merge.shares, merge.parents, strict=True)
            )
            yield f"{merge.child} is close to a mixture: {shares}; {merge.left:.1%} is left over."
        if any(pair.related for pair in self.pairs):
            yield Text(DIRECTION, style="dim")

    def _change(self, i: int, j: int) -> str:
        pair = self[i, j]
        return shown_change(pair.change, pair.bounds) if pair.related else "–"


def _letter(place: int) -> str:
    """A to Z, then A1 to Z1, and so on."""
    return chr(ord("A") + place % 26) + (str(place // 26) if place >= 26 else "")


class _Join(NamedTuple):
    """Two groups of models, or single ones by their places, at a mean distance."""

    one: int | _Join
    two: int | _Join
    distance: float


def _tree(distances: np.ndarray) -> int | _Join:
    """Join the two nearest groups by mean distance until one is left."""
    groups: list[tuple[int | _Join, list[int]]] = [(k, [k]) for k in range(len(distances))]
    while len(groups) > 1:
        far, x, y = min(
            (float(distances[np.ix_(groups[x][1], groups[y][1])].mean()), x, y)
            for x in range(len(groups))
            for y in range(x + 1, len(groups))
        )
        second, first = groups.pop(y), groups.pop(x)
        groups.append((_Join(first[0], second[0], far), first[1] + second[1]))
    return groups[0][0]


def _newick(node: int | _Join, names: Sequence[str]) -> str:
    if isinstance(node, int):
        return "'" + names[node].replace("'", "''") + "'"
    return f"({_newick(node.one, names)},{_newick(node.two, names)}):{node.distance:.4g}"


def _rich_tree(node: int | _Join, names: Sequence[str]) -> Any:
    from rich.text import Text
    from rich.tree import Tree

    def add(to: Tree, node: int | _Join) -> None:
        if isinstance(node, int):
            to.add(Text(names[node]))
            return
        label = "unrelated" if node.distance >= UNRELATED * 0.999 else f"{node.distance:.3f}"
        branch = to.add(Text(label, style="dim"))
        add(branch, node.one)
        add(branch, node.two)

    root = Tree("", hide_root=True)
    add(root, node)
    return root
