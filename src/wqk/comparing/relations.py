"""How two models are related, as `wqk.kin` shows it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wqk._console import counted, number
from wqk._results import Result
from wqk.comparing.fingerprints import SAMPLED
from wqk.comparing.randomization import Outcome
from wqk.tables.sheet import Cell, Sheet

# Singular values this much closer than usual are pointed out.
CLOSE = 0.2

# Models are called related up to this p.
RELATED = 0.001

# Forms that have changed by more than their own size may share no more than their start.
START = 1.0

# Embeddings or gains that correlate so far are alike; those of unrelated models do by .02.
ALIKE = 0.2

KINDS = {
    "copy": "their forms are equal",
    "rotated copy": "their forms are equal but for a rotation",
    "changed": "their forms are in place and changed by less than their own size",
    "rearranged": "layers or heads are in another order",
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

    told: ClassVar[tuple[str, ...]] = ("change",)

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


@dataclass(frozen=True)
class Likeness:
    """How far something else than queries and keys is the same in both models."""

    what: str  # token embeddings, gains of norms
    equal: float  # share of values that are equal but for rounding to 16 bits
    correlation: float | None  # of their values; None if they are all the same

    @property
    def alike(self) -> bool:
        """Whether they agree by more than chance."""
        return self.equal > 0.5 or (self.correlation or 0.0) > ALIKE

    def __str__(self) -> str:
        if self.equal > 0.5:
            return f"{self.what} are equal ({self.equal:.0%} of the values compared)"
        what = "are nearly equal" if (self.correlation or 0) > 0.9 else "correlate"
        what = what if self.alike else "are not alike"
        return f"{self.what} {what} (correlation {number(self.correlation, 2)})"


@dataclass(frozen=True, repr=False)
class Kinship(Result):
    """What is known of two models' relation, from their queries and keys."""

    told: ClassVar[tuple[str, ...]] = ("conclusion", "related", "change", "reading")

    checkpoint: str
    other: str
    # The chance of such an agreement between models that share nothing: of heads, dimensions and
    # weights; and of the coordinates of the residual stream. None if no test applies.
    p: float | None
    coordinates_p: float | None
    floor: float  # the smallest p that the number of renumberings allows
    tests: tuple[Outcome, ...]
    likenesses: tuple[Likeness, ...]  # looked at where coordinates agree
    matches: tuple[LayerMatch, ...]  # empty unless related
    kind: str | None  # copy, rotated copy, changed, rearranged; None where it would be a guess
    # Whether changes are smallest possible ones, from singular values, as coordinates differ.
    bounds: bool
    # Distance of heads' singular values to the nearest of the other model, over that to the
    # nearest in their own. It has no p.
    closeness: float | None

    @property
    def related(self) -> bool:
        """Whether p, of the weights, is at most .001."""
        return self.p is not None and self.p <= RELATED

    @property
    def conclusion(self) -> str:
        """``related``, ``shared coordinates`` where these alone agree, or ``no sign``."""
        if self.related:
            return "related"
        shared = self.coordinates_p is not None and self.coordinates_p <= RELATED
        return "shared coordinates" if shared else "no sign"

    @property
    def change(self) -> float | None:
        """The median relative change over matched layers; None if the models are unrelated."""
        known = [m.change for m in self.matches if m.change is not None]
        return float(np.median(known)) if known else None

    @property
    def sentence(self) -> str:
        """Whether they are related, and how."""
        return f"{self.checkpoint} and {self.other}: {_verdict(self)}"

    def _rows(self) -> Iterable[Mapping[str, Any]]:
        """One for each block of the second model."""
        return [vars(match) | {"change": match.change} for match in self.matches]

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
    near = ""
    if kinship.closeness is not None and kinship.closeness < CLOSE:
        near = (
            f"But singular values of heads lie {1 / max(kinship.closeness, 1e-6):,.0f} times "
            "closer to the other model's than to each other"
        )
    if kinship.conclusion == "shared coordinates":
        yield (
            "The coordinates of the residual stream mean the same in both, and nothing else says "
            "that their weights have anything in common."
        )
        causes = [str(one) for one in kinship.likenesses if one.alike]
        if causes:
            text = "; ".join(causes)
            yield (
                f"{text[0].upper()}{text[1:]}: attention that was trained from scratch on them "
                "agrees like this."
            )
        else:
            seen = "; ".join(map(str, kinship.likenesses)) or "neither was found"
            yield f"Embeddings and norms do not explain it: {seen}."
        if near:
            yield f"{near}, as if heads were renumbered and dimensions turned. This has no p."
        else:
            yield (
                "A relation is not excluded: renumbered heads and turned dimensions together leave "
                "nothing but coordinates to see."
            )
        return
    if not kinship.related:
        applied = [test for test in kinship.tests if test.visible is not None]
        visible = ", ".join(
            f"{test.visible:.0%} by {test.name}" for test in applied if test.visible is not None
        )
        yield f"Agreement that would have been seen, as a share of a copy's: {visible}."
        if near:
            yield (
                f"{near}, as if heads were renumbered, the stream rotated and dimensions turned, "
                "all three. No renumbering can say what chance allows then, so this has no p."
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
    for one in kinship.likenesses:
        yield f"The {one}."


def _verdict(kinship: Kinship) -> str:
    parts = {"weights": kinship.p, "coordinates": kinship.coordinates_p}
    told = ", ".join(
        f"{name}: {'no test applies' if p is None else f'p = {probability(p)}'}"
        for name, p in parts.items()
    )
    least = ""
    if min((p for p in parts.values() if p is not None), default=1.0) <= kinship.floor:
        least = f"; {probability(kinship.floor)} is the least that can be found"
    said = {
        "related": f"Related{': ' * bool(kinship.kind)}{KINDS.get(str(kinship.kind), '')}",
        "shared coordinates": "Shared coordinates, and no sign that the weights are related",
        "no sign": "No sign that they are related",
    }
    return f"{said[kinship.conclusion]} ({told}{least})."


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
