"""What `wqk.same` found: blocks, causes, tensors, counts, and how it is said everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from rich.text import Text

from wqk._console import Result, counted, farthest, few, json_value, last_part, spans
from wqk._style import CATEGORIES, style
from wqk.errors import TableError
from wqk.families import Place
from wqk.sameness.contents import ATTENTION, MIXER, OTHER, Outcome, TensorComparison
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.origins import numbers_of
from wqk.sameness.repairs import Step, merged, program
from wqk.sameness.verdicts import Verdict
from wqk.sameness.weights import SCORES
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from wqk.sameness.written_repair import WrittenRepair

# Tensors that differ are printed up to so many.
LISTED = 8
# The color of heads that are the same.
SAME_COLOR = "#f3f3f1"


# The footnote of the table of distances.
DISTANCE = (
    "‖M_A(N) − M_B(N)‖ / ‖M_A(N)‖ of the head farthest off, and the farthest layer; "
    "N tokens from query to key"
)
# Where what a GGUF file lacks may be.
MMPROJ = " (llama.cpp keeps towers in a file of their own, mmproj)"


@dataclass(frozen=True)
class BlockComparison:
    """One block of two checkpoints, under its name in the first."""

    stack: str
    kind: str
    layer: int
    distance: dict[int, float]  # largest ‖M_a(N) − M_b(N)‖ / ‖M_a(N)‖ over heads, by position N
    head: int  # the head in which it is largest
    tolerance: float  # what rounding explains of that head's distance, or what was accepted
    mismatches: tuple[Mismatch, ...]  # how the second block differs; none if they are equal
    heads: tuple[float, ...] = ()  # each head's largest distance; 0 where rounding explains it
    # The same of what it does besides its scores, such as its values; without what is not known.
    beside: dict[str, float] = field(default_factory=dict)
    unequal: tuple[str, ...] = ()  # the circuits that differ by more than is allowed
    identical: bool = False  # whether all that they store is the same, byte by byte
    moved: tuple[float, ...] = ()  # each head's largest distance of scores, explained or not
    undecided: str = ""  # why its scores cannot be compared; empty if they can

    @property
    def place(self) -> Place:
        """Where it is in the first checkpoint."""
        return Place(self.stack, self.kind, self.layer)

    @property
    def verdict(self) -> Verdict:
        """Whether the blocks attend the same way."""
        if self.mismatches or self.unequal:
            return Verdict.DIFFERENT
        return Verdict.NOT_DECIDED if self.undecided else Verdict.SAME

    @property
    def same(self) -> bool | None:
        """Whether the blocks attend the same way; None where it is not decided."""
        return self.verdict.same

    @property
    def farthest(self) -> float:
        """The largest distance of any head in any circuit."""
        return max((*self.distance.values(), *self.beside.values()), default=0.0)

    @property
    def wrong(self) -> set[str]:
        """The circuits that differ, in their weights or in what is beside these."""
        beside = (Kind.SETTING, Kind.ROTARY, Kind.SINKS, Kind.SIZES)
        found = {
            one.facts.get("circuit", SCORES)
            for one in self.mismatches
            if one.verdict in beside or "circuit" in one.facts
        }
        return found.union(self.unequal)

    @property
    def reason(self) -> str:
        """How the blocks differ, as text."""
        return "; ".join(map(str, self.mismatches))

    @property
    def repair(self) -> str:
        """Code that makes the second block like the first, as far as it is known."""
        return program(merged(step for one in self.mismatches for step in one.steps))


@dataclass(frozen=True)
class Cause:
    """A mismatch, and the blocks or the tensors outside of forms that have it.

    Attributes
    ----------
    mismatch
        Kind, reason and repair.
    places
        The blocks.
    tensors
        The reference's names of the tensors, where no block has the mismatch.
    """

    mismatch: Mismatch
    places: tuple[Place, ...]
    tensors: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The blocks, or the layers of the tensors, in few words."""
        if self.tensors:
            layers = sorted({numbers_of(name)[0] for name in self.tensors if numbers_of(name)})
            if layers:
                return f"layer{'s' if len(layers) > 1 else ''} {spans(layers)}"
            return few(self.tensors)
        return _places(self.places) or "in the configuration"

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        blocks = [place._asdict() for place in self.places]
        return self.mismatch.to_dict() | {"blocks": blocks, "outside": self.tensors}


# Kinds whose reason is printed also where no repair is known.
NAMED_ALONE = (Kind.SETTING, Kind.ROTARY, Kind.LAYER, Kind.QUANTIZED, Kind.BLOCK_SCALES)
# What one may try on a comparison, and what has it.
SYNONYMS = {
    **dict.fromkeys(("reasons", "why", "mismatches"), "causes"),
    **dict.fromkeys(("code", "fix", "fixes", "repairs"), "repair"),
}


@dataclass(frozen=True, repr=False)
class CheckpointComparison(Result, synonyms=SYNONYMS):
    """Two checkpoints, block by block.

    Attributes
    ----------
    reference, candidate
        Their names.
    blocks
        Those that both have, in the first checkpoint's order.
    missing, added
        Blocks that only the first one has, and only the second.
    notes
        What was not compared, or is known of the numbers: rounded values in a wider type, guesses.
    tensors
        Those outside the forms: of attention and other mixers, and with ``everything`` all others.
    unknown
        What of attention could not be compared: values that a family does not name, tensors that
        the other lacks or stores in another layout.
    not_compared
        Names of the other tensors that were not compared.
    accepted
        The tolerance that was given.
    quantized
        How the weights of the forms are stored in either, where it is with few bits.
    settings
        Settings of the configurations that differ, beside those of blocks; with ``everything`` all.
    settings_not_compared
        Keys of the other settings that differ, with dots for nested parts.
    tensor_causes
        Causes of tensors outside the forms that differ.
    adapter
        One sentence on the shares of the reference's adapter that the candidate contains.
    repaired
        The repaired copy of the candidate, if one was written.
    """

    reference: str
    candidate: str
    blocks: tuple[BlockComparison, ...]
    missing: tuple[Place, ...] = ()
    added: tuple[Place, ...] = ()
    notes: tuple[str, ...] = ()
    tensors: tuple[TensorComparison, ...] = ()
    unknown: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    accepted: float = 0.0
    quantized: tuple[str, ...] = ()
    settings: tuple[Mismatch, ...] = ()
    settings_not_compared: tuple[str, ...] = ()
    tensor_causes: tuple[Cause, ...] = ()
    adapter: str = ""
    repaired: WrittenRepair | None = None

    @cached_property
    def verdict(self) -> Verdict:
        """Whether both have the same blocks, and nothing that was compared differs.

        It is not decided where nothing differs, and some block's scores could not be compared.
        """
        verdicts = {block.verdict for block in self.blocks}
        beside = self.missing or self.added or self.differing or self.settings or self.tensor_causes
        if beside or Verdict.DIFFERENT in verdicts:
            return Verdict.DIFFERENT
        return Verdict.NOT_DECIDED if Verdict.NOT_DECIDED in verdicts else Verdict.SAME

    @property
    def same(self) -> bool | None:
        """Whether the two are the same; None where it is not decided."""
        return self.verdict.same

    def __bool__(self) -> bool:
        return self.verdict is Verdict.SAME

    @property
    def undecided(self) -> dict[str, tuple[Place, ...]]:
        """Why scores of blocks could not be compared, each reason once with its blocks."""
        found: dict[str, list[Place]] = {}
        for block in self.blocks:
            if block.undecided:
                found.setdefault(block.undecided, []).append(block.place)
        return {reason: tuple(places) for reason, places in found.items()}

    @property
    def differing(self) -> tuple[TensorComparison, ...]:
        """The tensors outside the forms that differ."""
        return tuple(one for one in self.tensors if one.outcome.differs)

    @property
    def unexplained(self) -> tuple[TensorComparison, ...]:
        """The tensors outside the forms that differ without a known cause."""
        explained = {
            name for cause in self.causes for name in cause.mismatch.facts.get("tensors", ())
        }
        return tuple(one for one in self.differing if (one.name or one.other) not in explained)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that make the candidate like the reference, as far as they are known."""
        # What is stored transposed was compared as it should be, and is turned first.
        causes = sorted(
            self.causes, key=lambda cause: cause.mismatch.verdict is not Kind.TRANSPOSED
        )
        return merged(step for cause in causes for step in cause.mismatch.steps)

    @property
    def unrepaired(self) -> tuple[TensorComparison, ...]:
        """The tensors outside the forms that differ, and that no step edits."""
        edited = {name for step in self.steps for name in step.edited}
        for cause in self.causes:
            if cause.mismatch.steps:
                edited.update(cause.tensors)
        return tuple(
            tensor
            for tensor in self.differing
            if tensor.other not in edited and tensor.name not in edited
        )

    @property
    def alone(self) -> list[tuple[str, tuple[Place, ...], str]]:
        """Which checkpoint has blocks that the other lacks: its name, these, the other's name."""
        names = (self.reference, self.candidate), (self.candidate, self.reference)
        both = zip(names, (self.missing, self.added), strict=True)
        return [(name, places, to) for (name, to), places in both if places]

    @property
    def counts(self) -> dict[str, tuple[int, int]]:
        """How many are equal of those compared: blocks, circuits in them, tensors, by name."""
        found: dict[str, list[bool]] = {SCORES: []}
        for block in self.blocks:
            for what in (SCORES, *block.beside):
                if what == SCORES and block.verdict is Verdict.NOT_DECIDED:
                    continue
                found.setdefault(what, []).append(what not in block.wrong)
        titles = {
            ATTENTION: "attention's other tensors",
            MIXER: "other mixers",
            OTHER: "other tensors",
        }
        for one in self.tensors:
            if one.outcome is not Outcome.UNKNOWN:
                found.setdefault(titles[one.role], []).append(one.outcome.same)
        return {name: (sum(some), len(some)) for name, some in found.items()}

    @property
    def causes(self) -> tuple[Cause, ...]:
        """What is wrong, each once with the blocks that have it; the most frequent first."""
        found: dict[tuple[str, str], list[tuple[Mismatch, Place]]] = {}
        for block in self.blocks:
            for one in block.mismatches:
                # Distances and factors differ from layer to layer.
                is_named = one.steps or one.verdict in (Kind.SETTING, Kind.ROTARY)
                reason = one.reason if is_named else one.verdict
                found.setdefault((one.verdict, reason), []).append((one, block.place))
        causes = []
        for some in found.values():
            first = some[0][0]
            if any(one.reason != first.reason for one, _ in some):
                first = replace(first, reason=str(first.verdict))
            steps = merged(step for one, _ in some for step in one.steps)
            joined = replace(first, steps=steps)
            causes.append(Cause(joined, tuple(place for _, place in some)))
        causes += [*self.tensor_causes, *(Cause(one, ()) for one in self.settings)]
        return tuple(sorted(causes, key=lambda cause: -len(cause.places)))

    @property
    def reason(self) -> str:
        """How the blocks differ, each cause once."""
        return "; ".join(dict.fromkeys(str(cause.mismatch) for cause in self.causes))

    @property
    def repair(self) -> str:
        """Code that makes the candidate like the reference, as far as it is known."""
        return program(self.steps)

    @property
    def sentence(self) -> str:
        """The outcome in one sentence: equal and different parts, and parts not compared."""
        if self.verdict is Verdict.DIFFERENT:
            return self._sentence_of_differences
        if self.verdict is Verdict.NOT_DECIDED:
            return self._sentence_of_doubts
        return self._sentence_of_sameness

    @property
    def _sentence_of_differences(self) -> str:
        parts = [self._blocks_that_differ, *self._blocks_alone]
        parts += [self._tensors_that_differ, self._settings_that_differ]
        differences = "; ".join(part for part in parts if part)
        beyond = ", beyond what quantization explains" if self.quantized else ""
        return f"Not the same{beyond}: {differences}. Equal: {self._compared}.{self._farthest}"

    @property
    def _sentence_of_doubts(self) -> str:
        reasons = [f"{reason} ({_places(where)})" for reason, where in self.undecided.items()]
        compared = self._compared.removeprefix(" · ")  # no count comes first
        equal = f" Equal as far as compared: {compared}." if compared else ""
        return f"Not decided: {'; '.join(reasons)}.{equal}"

    @property
    def _sentence_of_sameness(self) -> str:
        subject = "The same attention"
        if self.unknown:
            subject += ", as far as it was compared"
        if not (self.unknown or self.not_compared or self.settings_not_compared):
            subject = "The same model"
        if self.quantized:
            subject += f" but for quantization ({', '.join(self.quantized)})"
        if not self.blocks:  # no attention with a softmax, and so no heads
            return f"{subject.replace('attention', 'mixers of tokens')}: {self._compared}."
        farthest_head = max(block.farthest for block in self.blocks)
        allowed = max(block.tolerance for block in self.blocks)
        explanation = "the rounding of stored numbers explains"
        if self.accepted:
            explanation = "the tolerance that was given accepts"
            allowed = max(allowed, self.accepted)
        return (
            f"{subject}: {self._compared}. Heads lie at most {farthest_head:.1e} apart, relative "
            f"to their norm; {explanation} {allowed:.1e}.{self._farthest}"
        )

    @property
    def _blocks_that_differ(self) -> str:
        """The number of blocks that differ, their causes and distances; or nothing."""
        differing = [block for block in self.blocks if block.verdict is Verdict.DIFFERENT]
        if not differing:
            return ""
        names: dict[str, None] = {}
        for cause in self.causes:
            mismatch = cause.mismatch
            if cause.places:
                is_named = mismatch.repair or mismatch.verdict in NAMED_ALONE
                names[mismatch.reason if is_named else mismatch.verdict] = None
        distances = [block.farthest for block in differing]
        low, high = min(distances), max(distances)
        spread = f"up to {high:.2g}" if high <= 2 * low else f"{low:.2g} to {high:.2g}"
        far = f" (relative distance {spread})" if high > 0 else ""
        return f"{len(differing)} of {len(self.blocks)} blocks differ: {'; '.join(names)}{far}"

    @property
    def _blocks_alone(self) -> Iterator[str]:
        """The numbers of blocks that one of the two lacks."""
        for name, places, lacking in self.alone:
            text = f"{counted(len(places), 'block')} only in {name}"
            is_tower = places[0].stack.startswith(("vision", "audio"))
            yield f"{text}{MMPROJ}" if is_tower and lacking.endswith(".gguf") else text

    @property
    def _tensors_that_differ(self) -> str:
        """The number of tensors outside the forms that differ, and their causes; or nothing."""
        if not (self.differing or self.tensor_causes):
            return ""
        texts = [f"{cause.mismatch.reason}, {cause.where}" for cause in self.tensor_causes]
        if self.unexplained:
            texts.append(few([*map(str, self.unexplained)], 1))
        if not self.differing:
            return "; ".join(texts)
        causes = f" ({'; '.join(texts)})" if texts else ""
        return f"{_differ(self.differing, 'tensor')}{causes}"

    @property
    def _settings_that_differ(self) -> str:
        """The number of settings that differ, and the first three; or nothing."""
        if not self.settings:
            return ""
        listed = "; ".join(map(str, self.settings[:3]))
        more = " …" if len(self.settings) > 3 else ""
        return f"{_differ(self.settings, 'setting')} ({listed}{more})"

    @property
    def _compared(self) -> str:
        """The counts of equal parts, and the parts that were not compared."""
        text = " · ".join(
            f"{name} {same}/{count}" for name, (same, count) in self.counts.items() if count
        )
        if self.unknown:
            text += f" · not compared: {few(self.unknown)}"
        if self.not_compared:
            text += f" · {counted(len(self.not_compared), 'other tensor')} not compared"
        if self.settings_not_compared:
            text += f" · other settings, not compared: {few(self.settings_not_compared)}"
        return text

    @property
    def _farthest(self) -> str:
        """The heads of quantized weights that moved most; or nothing."""
        if not self.quantized:
            return ""
        is_one_stack = len({(block.stack, block.kind) for block in self.blocks}) == 1
        moves: list[tuple[float, str]] = []
        for block in self.blocks:
            prefix = "" if is_one_stack else f"{block.stack} {block.kind} "
            for head, distance in enumerate(block.moved):
                if math.isfinite(distance):
                    moves.append((distance, f"{prefix}{block.layer}.{head}"))
        return f" {farthest(moves)}" if moves else ""

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        """One for each block."""
        for one in self.blocks:
            names = ("stack", "kind", "layer", "same", "distance", "tolerance", "reason", "repair")
            row = {name: getattr(one, name) for name in names}
            row["distance"] = one.farthest
            yield row | {name: row[name] or None for name in names[-2:]}

    @style()
    def plot(self) -> Figure:
        """Draw every head's distance from the same head of the other, for each attention.

        Heads that are the same, up to rounding, are pale. A bar beside each layer has the color of
        its cause, the most frequent ones with their names below.

        Raises
        ------
        TableError
            No block was compared.
        MissingPackage
            Matplotlib is not installed.
        """
        import polars as pl
        from matplotlib.colors import LogNorm
        from matplotlib.patches import Patch

        from wqk.tables.rendering import head_maps

        attentions: dict[str, list[BlockComparison]] = {}
        for block in self.blocks:
            attentions.setdefault(f"{block.stack} {block.kind}-attention", []).append(block)
        if not attentions:
            raise TableError("no attention block was compared, so there is nothing to draw")
        verdicts = list(dict.fromkeys(cause.mismatch.verdict for cause in self.causes))
        color_of = {
            name: CATEGORIES[min(n, len(CATEGORIES) - 1)] for n, name in enumerate(verdicts)
        }
        schema = {"layer": pl.Int64, "head": pl.Int64, "distance": pl.Float64}
        kinds = []
        for name, blocks in attentions.items():
            cells = [
                (b.layer, n, far if far > 0 else None)
                for b in blocks
                for n, far in enumerate(b.heads)
            ]
            kinds.append((name, pl.DataFrame(cells, schema, orient="row")))
        scale = LogNorm(1e-4, 2, clip=True)  # what lies beyond has the nearer end's color
        figure = head_maps(kinds, {"distance": ""}, "relative distance of a head", norm=scale)
        for axis, blocks in zip(figure.axes, attentions.values(), strict=False):
            axis.set_facecolor(SAME_COLOR)
            left, right = axis.get_xlim()
            for block in blocks:
                for mismatch in block.mismatches[:1]:
                    axis.barh(
                        block.layer,
                        0.025 * (right - left),
                        left=left - 0.035 * (right - left),
                        height=1.0,
                        linewidth=0,
                        color=color_of[mismatch.verdict],
                        clip_on=False,
                    )
            axis.set_xlim(left, right)
            axis.tick_params(axis="y", length=0, pad=12)
            axis.spines[:].set_visible(False)
        names = [self.reference, self.candidate]
        last = [last_part(name) for name in names]
        names = [shorten(name, 40) for name in (names if last[0] == last[1] else last)]
        figure.suptitle(f"{names[1]} against {names[0]}", fontsize=8)
        same = [Patch(color=SAME_COLOR, label="the same, up to rounding")]
        causes = [Patch(color=color_of[name], label=name) for name in verdicts]
        figure.legend(handles=[*causes, *same], loc="outside lower left", ncols=2)
        return figure

    def _drawn(self) -> Figure | None:
        is_different = any(block.verdict is Verdict.DIFFERENT for block in self.blocks)
        return self.plot() if is_different else None

    def _shown(self, width: int) -> Iterator[Any]:
        """Yield the verdict, then the distances, each cause with its layers, and the repair."""
        yield Text.assemble((self.reference, "bold"), "  and  ", (self.candidate, "bold"))
        yield self.sentence
        for note in self.notes:
            yield Text(note, style="dim")
        for name, places, _ in self.alone:
            yield f"only in {name}: {_places(places)}"
        if any(block.verdict is Verdict.DIFFERENT for block in self.blocks):
            yield self._distances()
            yield Text(DISTANCE, style="dim")
        if self.adapter:
            yield self.adapter
        for cause in self.causes:
            sides = " and ".join(cause.mismatch.sides)
            where = f" ({sides}), {cause.where}" if sides else f", {cause.where}"
            yield Text.assemble((cause.mismatch.reason, "bold"), where)
        for tensor in self.unexplained[:LISTED]:
            title = tensor.name or tensor.other
            yield Text.assemble((title, "bold"), f"  {tensor.reason or tensor.outcome}")
        more = len(self.unexplained) - LISTED
        if more > 0:
            yield f"and {more} more tensors that differ (--json lists them)"
        if self.repair:
            yield ""
            yield _code(self.commented_repair)
        if self.repaired is not None:
            yield ""
            yield self.repaired.summary

    def _distances(self) -> Sheet:
        """A table of the distances of blocks that differ; blocks of equal causes are a row."""
        groups: dict[tuple[str, ...], list[BlockComparison]] = {}
        for block in self.blocks:
            if block.verdict is Verdict.DIFFERENT:
                verdicts = [str(cause.verdict) for cause in block.mismatches]
                key = (block.stack, block.kind, *verdicts, *block.unequal)
                groups.setdefault(key, []).append(block)
        positions = list(dict.fromkeys(n for block in self.blocks for n in block.distance))
        circuits = list(dict.fromkeys(name for block in self.blocks for name in block.beside))
        scores = [f"scores, N={position}" for position in positions]
        sheet = Sheet.of("attention", "layers", *scores, *circuits, text=["attention", "layers"])
        for blocks in groups.values():
            cells = [_farthest_of(block.distance.get(n) for block in blocks) for n in positions]
            cells += [_farthest_of(block.beside.get(name) for block in blocks) for name in circuits]
            layers = spans([block.layer for block in blocks])
            sheet.add(f"{blocks[0].stack} {blocks[0].kind}", layers, *cells)
        return sheet

    @property
    def commented_repair(self) -> str:
        """The repair after comments that explain its variables."""
        comments = []
        if "tensors[" in self.repair:
            comments.append("# tensors: the candidate's, by name")
        if "reference[" in self.repair:
            comments.append(
                "# reference: the reference's, under the candidate's names and in its layout"
            )
        if "config[" in self.repair or "config.pop" in self.repair:
            comments.append("# config: the candidate's config.json")
        return "\n".join([*comments, self.repair])

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        blocks = [
            asdict(block)
            | {"same": block.same, "mismatches": [m.to_dict() for m in block.mismatches]}
            for block in self.blocks
        ]
        said = {
            "reference": self.reference,
            "candidate": self.candidate,
            "same": self.same,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "causes": [cause.to_dict() for cause in self.causes],
            "missing": [place._asdict() for place in self.missing],
            "added": [place._asdict() for place in self.added],
            "notes": list(self.notes),
            "counts": {name: {"same": n, "compared": of} for name, (n, of) in self.counts.items()},
            "tensors": [asdict(one) for one in self.tensors if one.outcome is not Outcome.EQUAL],
            "unknown": list(self.unknown),
            "not_compared": list(self.not_compared),
            "adapter": self.adapter or None,
            "settings_not_compared": list(self.settings_not_compared),
            "blocks": blocks,
            "repaired": None if self.repaired is None else asdict(self.repaired),
        }
        return {name: json_value(value) for name, value in said.items()}


def _farthest_of(distances: Iterable[float | None]) -> str:
    """The largest of some distances as text; a dash where none is known."""
    known = [distance for distance in distances if distance is not None]
    return f"{max(known):.1e}" if known else "–"


def _code(text: str) -> Text:
    """Code that is neither wrapped nor indented, so that it can be copied as it is."""
    return Text(text, no_wrap=True, overflow="ignore")


def _differ(some: Sequence[object], what: str) -> str:
    return f"{counted(len(some), what)} differ{'s' * (len(some) == 1)}"


def _places(places: Sequence[Place]) -> str:
    """Blocks in few words, each once.

    Examples
    --------
    >>> _places([Place("decoder", "self", layer) for layer in (0, 0, 1, 1, 2, 5)])
    'decoder self, layers 0-2, 5'
    """
    layers: dict[str, set[int]] = {}
    for place in places:
        layers.setdefault(f"{place.stack} {place.kind}", set()).add(place.layer)
    return "; ".join(
        f"{name}, layer{'s' * (len(numbers) > 1)} {spans([*numbers])}"
        for name, numbers in layers.items()
    )
