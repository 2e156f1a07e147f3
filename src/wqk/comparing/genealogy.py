"""How several models are related: two by two, as mixtures, and as a tree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from wqk._console import Shown
from wqk.comparing.relations import DIRECTION, Kinship, probability, shown_change
from wqk.tables.sheet import Sheet

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
