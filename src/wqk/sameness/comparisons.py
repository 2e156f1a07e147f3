"""Records of a comparison: blocks, causes and tensors, with the verdict on two models.

Records contain no sentences, except for the reasons of causes. `wqk.sameness.sentences` describes
the records in sentences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Never

from wqk._console import few
from wqk.errors import Advising
from wqk.families import Place
from wqk.sameness.circuits import SCORES
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.places_in_words import layers_in_words, places_in_words
from wqk.sameness.repairs import Step, merged_steps, program
from wqk.sameness.tensor_comparisons import ATTENTION, MIXER, OTHER, Outcome, TensorComparison
from wqk.sameness.tensor_names import numbers_of, title_in_block
from wqk.sameness.verdicts import Verdict

if TYPE_CHECKING:
    from wqk.sameness.written_repair import WrittenRepair

# Kinds of causes that lie next to the weights of a circuit, not in the weights.
NEXT_TO_WEIGHTS = (Kind.SETTING, Kind.ROTARY, Kind.SINKS, Kind.SIZES)
# Kinds with a reason that joins blocks even without a known repair.
JOINED_BY_REASON = (Kind.SETTING, Kind.ROTARY)
# Facts of a mismatch that are orders of heads.
ORDERS_OF_HEADS = ("query_heads", "key_heads", "value_heads", "output_heads")
# Names of the counts of tensors outside the forms.
TITLES_OF_ROLES = {
    ATTENTION: "attention's other tensors",
    MIXER: "other mixers",
    OTHER: "other tensors",
}


class EqualCount(NamedTuple):
    """Number of equal parts, and number of compared parts."""

    same: int
    compared: int


class LoneBlocks(NamedTuple):
    """Blocks that exist in only one model.

    Attributes
    ----------
    model
        The name of the model that has the blocks.
    places
        The blocks.
    lacking
        The name of the other model.
    """

    model: str
    places: tuple[Place, ...]
    lacking: str


@dataclass(frozen=True)
class BlockComparison:
    """A block of the candidate next to the same block of the reference.

    Attributes
    ----------
    stack, kind, layer
        Place of the block in the reference.
    distance
        By distance N between tokens, the largest ‖M_r(N) − M_c(N)‖ / ‖M_r(N)‖ of all heads.
    head
        The head with the largest distance.
    tolerance
        The distance that rounding explains for this head, or the accepted distance.
    mismatches
        Causes of the difference; empty for equal blocks.
    heads
        The largest distance of each head; 0 if rounding explains the distance.
    beside
        The largest distance by circuit, for circuits besides the scores, such as values. Circuits
        that a family does not define are left out.
    unequal
        The circuits that differ by more than is allowed.
    identical
        True if all stored bytes of the block are equal.
    moved
        The largest distance of the scores of each head, including distances that rounding explains.
    undecided
        The reason why scores cannot be compared; empty if scores were compared.
    """

    stack: str
    kind: str
    layer: int
    distance: dict[int, float]
    head: int
    tolerance: float
    mismatches: tuple[Mismatch, ...]
    heads: tuple[float, ...] = ()
    beside: dict[str, float] = field(default_factory=dict)
    unequal: tuple[str, ...] = ()
    identical: bool = False
    moved: tuple[float, ...] = ()
    undecided: str = ""

    @property
    def place(self) -> Place:
        """Place of the block in the reference."""
        return Place(self.stack, self.kind, self.layer)

    @property
    def verdict(self) -> Verdict:
        """Outcome of the comparison of the two blocks."""
        if self.mismatches or self.unequal:
            return Verdict.DIFFERENT
        return Verdict.NOT_DECIDED if self.undecided else Verdict.SAME

    @property
    def same(self) -> bool | None:
        """True if both blocks attend in the same way; None if undecided."""
        return self.verdict.same

    @property
    def farthest(self) -> float:
        """The largest distance of any head in any circuit."""
        return max((*self.distance.values(), *self.beside.values()), default=0.0)

    @property
    def wrong(self) -> set[str]:
        """The differing circuits, in weights or in other parts of the block."""
        circuits = set(self.unequal)
        for mismatch in self.mismatches:
            if mismatch.verdict in NEXT_TO_WEIGHTS or "circuit" in mismatch.facts:
                circuits.add(mismatch.facts.get("circuit", SCORES))
        return circuits

    @property
    def reason(self) -> str:
        """All causes of the difference, as text."""
        return "; ".join(map(str, self.mismatches))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The known steps that make the block equal to the reference's block."""
        return merged_steps(step for mismatch in self.mismatches for step in mismatch.steps)

    @property
    def repair(self) -> str:
        """The steps as code."""
        return program(self.steps)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, for JSON."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["mismatches"] = [mismatch.to_dict() for mismatch in self.mismatches]
        values["same"] = self.same
        return values


class RepairCode(str):
    """Code of a repair, a string; calling it raises an error that names the argument of `same`."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **options: Any) -> Never:
        """Raise `TypeError`: a string is not a function."""
        raise TypeError(
            "repair is the code of the repair, a string; wqk.same(reference, candidate, "
            "repair=folder) writes a repaired copy"
        )


@dataclass(frozen=True)
class Cause(Advising):
    """A mismatch, with the blocks and the tensors outside of forms that have the mismatch.

    All names of `to_dict` are attributes, including the names of the mismatch and of its facts.

    Attributes
    ----------
    mismatch
        Kind, reason and repair.
    places
        The blocks.
    outside
        The reference's names of the tensors. Only a wrong merge of an adapter has both blocks and
        tensors.
    """

    mismatch: Mismatch
    places: tuple[Place, ...]
    outside: tuple[str, ...] = ()

    @property
    def verdict(self) -> Kind:
        """The kind of the cause."""
        return self.mismatch.verdict

    @property
    def reason(self) -> str:
        """The cause in one phrase."""
        return self.mismatch.reason

    @property
    def repair(self) -> str:
        """Code that undoes the change; empty if unknown."""
        return RepairCode(self.mismatch.repair)

    @property
    def sides(self) -> tuple[str, ...]:
        """The affected sides of the form: ``query``, ``key``, or both."""
        return self.mismatch.sides

    @property
    def heads(self) -> tuple[int, ...]:
        """The affected heads; empty for all."""
        return self.mismatch.heads

    @property
    def blocks(self) -> tuple[Place, ...]:
        """The blocks that have the mismatch."""
        return self.places

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Facts of the mismatch lie on the same level in `to_dict`. An object that is being
            # unpickled has no mismatch yet.
            mismatch = vars(self).get("mismatch")
            if mismatch is not None and name in mismatch.facts:
                return mismatch.facts[name]
            return super().__getattr__(name)

    @property
    def where(self) -> str:
        """The blocks, or the layers of the tensors, in few words."""
        if not self.outside:
            return places_in_words(self.places) or "in the configuration"
        layers = {numbers_of(name)[0] for name in self.outside if numbers_of(name)}
        where = layers_in_words(layers) if layers else few(self.outside)
        if not self.places:
            return where
        titles = few([*dict.fromkeys(map(title_in_block, self.outside))])
        return f"{places_in_words(self.places)}; {titles}, {where}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain values, for JSON."""
        blocks = [place._asdict() for place in self.places]
        return self.mismatch.to_dict() | {"blocks": blocks, "outside": self.outside}


@dataclass(frozen=True, repr=False)
class Comparison:
    """All findings of a comparison, and the verdict that follows.

    `wqk.sameness.answer.CheckpointComparison` documents the fields and adds the output.
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
    attention_alone: bool = False
    weights: Mapping[str, float | tuple[float, float]] = field(default_factory=dict)
    repaired: WrittenRepair | None = None

    # -- verdict ---------------------------------------------------------------------------

    @cached_property
    def verdict(self) -> Verdict:
        """Outcome of the comparison of both models.

        The models differ if a block is missing from one model, or if any compared part differs. If
        no part differs, but the scores of a block cannot be compared, the outcome is undecided.
        """
        verdicts = {block.verdict for block in self.blocks}
        has_lone_blocks = bool(self.missing or self.added)
        differs_elsewhere = bool(self.differing or self.settings or self.tensor_causes)
        if has_lone_blocks or differs_elsewhere or Verdict.DIFFERENT in verdicts:
            return Verdict.DIFFERENT
        return Verdict.NOT_DECIDED if Verdict.NOT_DECIDED in verdicts else Verdict.SAME

    @property
    def same(self) -> bool | None:
        """True if the two models are the same; None if undecided."""
        return self.verdict.same

    def __bool__(self) -> bool:
        return self.verdict is Verdict.SAME

    # -- parts that differ -----------------------------------------------------------------

    @property
    def different_blocks(self) -> tuple[BlockComparison, ...]:
        """The differing blocks."""
        return tuple(block for block in self.blocks if block.verdict is Verdict.DIFFERENT)

    @property
    def undecided(self) -> dict[str, tuple[Place, ...]]:
        """The blocks without comparable scores, by reason."""
        places_by_reason: dict[str, list[Place]] = {}
        for block in self.blocks:
            if block.undecided:
                places_by_reason.setdefault(block.undecided, []).append(block.place)
        return {reason: tuple(places) for reason, places in places_by_reason.items()}

    @property
    def differing(self) -> tuple[TensorComparison, ...]:
        """The differing tensors outside the forms."""
        return tuple(tensor for tensor in self.tensors if tensor.outcome.differs)

    @property
    def unexplained(self) -> tuple[TensorComparison, ...]:
        """The tensors outside the forms that differ without a known cause."""
        explained = {
            name for cause in self.causes for name in cause.mismatch.facts.get("tensors", ())
        }
        return tuple(tensor for tensor in self.differing if tensor.title not in explained)

    @property
    def unrepaired(self) -> tuple[TensorComparison, ...]:
        """The differing tensors outside the forms that no step edits."""
        edited = {name for step in self.steps for name in step.edited}
        for cause in self.causes:
            if cause.mismatch.steps:
                edited.update(cause.outside)
        return tuple(
            tensor
            for tensor in self.differing
            if tensor.other not in edited and tensor.name not in edited
        )

    @property
    def alone(self) -> list[LoneBlocks]:
        """The blocks that exist in only one of the models."""
        lone = [
            LoneBlocks(self.reference, self.missing, self.candidate),
            LoneBlocks(self.candidate, self.added, self.reference),
        ]
        return [blocks for blocks in lone if blocks.places]

    @property
    def counts(self) -> dict[str, EqualCount]:
        """Numbers of equal and of compared parts: circuits of blocks and kinds of tensors."""
        outcomes: dict[str, list[bool]] = {SCORES: []}
        for block in self.blocks:
            wrong = block.wrong
            if block.verdict is not Verdict.NOT_DECIDED:
                outcomes[SCORES].append(SCORES not in wrong)
            for circuit in block.beside:
                outcomes.setdefault(circuit, []).append(circuit not in wrong)
        for tensor in self.tensors:
            if tensor.outcome is not Outcome.UNKNOWN:
                outcomes.setdefault(TITLES_OF_ROLES[tensor.role], []).append(tensor.outcome.same)
        return {title: EqualCount(sum(equal), len(equal)) for title, equal in outcomes.items()}

    # -- causes and their repair -----------------------------------------------------------

    @property
    def causes(self) -> tuple[Cause, ...]:
        """All distinct causes with their blocks; the most frequent cause first."""
        causes = _with_merges_joined(_causes_of_blocks(self.blocks), self.tensor_causes)
        causes += [Cause(setting, ()) for setting in self.settings]
        return tuple(sorted(causes, key=lambda cause: -len(cause.places)))

    @property
    def reason(self) -> str:
        """All distinct causes, as text."""
        return "; ".join(dict.fromkeys(str(cause.mismatch) for cause in self.causes))

    @property
    def steps(self) -> tuple[Step, ...]:
        """The known steps that make the candidate equal to the reference."""
        # Weights that are stored transposed were compared after they had been transposed. Their
        # step comes first, therefore.
        causes = sorted(
            self.causes, key=lambda cause: cause.mismatch.verdict is not Kind.TRANSPOSED
        )
        return merged_steps(step for cause in causes for step in cause.mismatch.steps)

    @property
    def repair(self) -> str:
        """The steps as code."""
        return RepairCode(program(self.steps))


def _causes_of_blocks(blocks: Sequence[BlockComparison]) -> list[Cause]:
    """Join the mismatches of blocks with the same cause.

    Mismatches with steps are one cause if their reasons and their heads are equal; a reason lists
    the first heads alone. Other mismatches are one cause if their kinds are equal, because
    distances and factors differ from layer to layer.
    """
    groups: dict[tuple[Any, ...], list[tuple[Mismatch, Place]]] = {}
    for block in blocks:
        for mismatch in block.mismatches:
            is_joined_by_reason = mismatch.steps or mismatch.verdict in JOINED_BY_REASON
            if is_joined_by_reason:
                key = (mismatch.verdict, mismatch.reason, *_heads_of(mismatch))
            else:
                key = (mismatch.verdict,)
            groups.setdefault(key, []).append((mismatch, block.place))
    return [_joined_cause(members) for members in groups.values()]


def _heads_of(mismatch: Mismatch) -> Iterator[tuple[Any, ...]]:
    """Yield the heads of a mismatch, then the orders of heads among its facts."""
    yield tuple(mismatch.heads)
    for name in ORDERS_OF_HEADS:
        yield tuple(mismatch.facts.get(name, ()))


def _with_merges_joined(
    causes_of_blocks: Sequence[Cause], causes_of_tensors: Sequence[Cause]
) -> list[Cause]:
    """Return all causes, with the causes of one wrong adapter merge joined.

    A mistake in attention and in other weights is one mistake with one repair.
    """
    causes = [*causes_of_blocks]
    remaining: list[Cause] = []
    for cause_of_tensors in causes_of_tensors:
        for number, cause in enumerate(causes):
            if _are_one_merge(cause.mismatch, cause_of_tensors.mismatch):
                causes[number] = _joined_merge(cause, cause_of_tensors)
                break
        else:
            remaining.append(cause_of_tensors)
    return [*causes, *remaining]


def _are_one_merge(mismatch: Mismatch, other: Mismatch) -> bool:
    """Return whether two causes are one mistake of merging; both or neither have a repair."""
    if mismatch.verdict is Kind.SUM:
        return mismatch.reason == other.reason
    if mismatch.verdict is not Kind.ADAPTER or other.verdict is not Kind.ADAPTER:
        return False
    if "mistake" not in mismatch.facts:  # no model is an adapter: a change of low rank
        return False
    for key in ("method", "mistake"):
        if mismatch.facts[key] != other.facts.get(key):
            return False
    return bool(mismatch.steps) == bool(other.steps)


def _joined_merge(cause_of_blocks: Cause, cause_of_tensors: Cause) -> Cause:
    """Join two causes of one wrong merge, of blocks and of tensors outside of forms."""
    mismatch, further = cause_of_blocks.mismatch, cause_of_tensors.mismatch
    tensors = {**mismatch.facts["tensors"], **further.facts["tensors"]}
    facts = {**mismatch.facts, **further.facts, "tensors": tensors}
    steps = merged_steps((*mismatch.steps, *further.steps))
    mismatch = replace(mismatch, steps=steps, facts=facts)
    return Cause(mismatch, cause_of_blocks.places, cause_of_tensors.outside)


def _joined_cause(members: Sequence[tuple[Mismatch, Place]]) -> Cause:
    """Join the mismatches of several blocks to one cause; a block is listed once."""
    first, _ = members[0]
    reason = first.reason
    if any(mismatch.reason != reason for mismatch, _ in members):
        reason = str(first.verdict)
    steps = merged_steps(step for mismatch, _ in members for step in mismatch.steps)
    # Scores and values of one block may have the same cause.
    places = tuple(dict.fromkeys(place for _, place in members))
    return Cause(replace(first, reason=reason, steps=steps), places)
