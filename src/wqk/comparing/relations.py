"""How two models are related, as `wqk.kin` finds and shows it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
