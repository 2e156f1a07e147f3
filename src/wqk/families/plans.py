"""The plan of a block: all parts of tensors and settings of its attention.

A plan is made only from names, shapes and the configuration (`wqk.families.planner`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

from wqk._console import kind_in_words
from wqk.checkpoints import Part
from wqk.families.assumptions import Aspect, Assumption
from wqk.families.layouts import Composed
from wqk.families.rotary import Rotary
from wqk.families.sides import Side
from wqk.families.windows import Window

if TYPE_CHECKING:
    from wqk.families.rules import AttentionRule

# Fields that are empty in the plan of a guess because names and shapes do not determine them.
UNKNOWN_OF_GUESSES = ("scale", "causal", "window", "softcap", "rotary", "axial", "position")

NAMES_ONLY = "only names and shapes of tensors are known"
# Orders of roles in a fused weight, by layout.
FUSED_ORDERS = {
    "sectioned": "all queries, then all keys, then all values",
    "conv1d": "stored (in, out); all queries, then all keys, then all values",
    "grouped": "for each key head its queries, its key, its value",
}

NORMALIZED = "queries and keys are normalized token by token before they meet; "


class Place(NamedTuple):
    """The place of a block in its model."""

    stack: str
    kind: str
    layer: int

    def __str__(self) -> str:
        return f"{self.stack} {self.kind} {self.layer}"


@dataclass(frozen=True)
class Positional:
    """Queries and keys of separate position dimensions; their product is added to the form's."""

    query: Side
    key: Side
    rotary: Rotary


@dataclass(frozen=True, repr=False)
class AttentionPlan:
    """Attention of one block: place in the model, tensors, and the rest of the score.

    Attributes
    ----------
    family
        Name of the family.
    rule
        The rule of the family that describes the block.
    layer
        Number of the layer within its stack, from 0.
    query, key, value, output
        The sides of the attention; values and outputs are None if the family does not name them.
    scale
        Factor of the score; None if a guess does not establish the factor. See `score_scale`.
    softcap
        Limit of scores.
    clip
        Limit of the entries of queries and keys.
    sinks
        Scores of a virtual key, one for each head.
    causal
        Whether later tokens are masked; None if a guess does not establish the mask.
    window
        Local attention; None for full attention.
    applications
        Number of times that the weights are applied in one pass.
    position
        The term that positions add to scores, in a word: ``alibi``, ``relative``, …
    position_uses
        Sides whose vectors this term, or a convolution next to the scores, uses.
    rotary
        Rotation along one axis; forms at a distance are computed with this rotation.
    axial
        Rotation along several axes.
    positional
        Separate dimensions for positions, in latent attention.
    quantized
        Storage of queries and keys, if they are stored with few bits.
    grows_from
        Number of the first token with a query that grows with position.
    missing
        Tensors that all models of the type have, and that the file lacks.
    """

    family: str
    rule: AttentionRule
    layer: int
    query: Side
    key: Side
    value: Side | None
    output: Side | None
    scale: float | None
    softcap: float | None
    clip: float | None
    sinks: Part | None
    causal: bool | None
    window: Window | None
    applications: int
    position: str
    position_uses: tuple[str, ...]
    rotary: Rotary | None
    axial: Rotary | None
    positional: Positional | None
    quantized: tuple[str, ...] = ()
    grows_from: int | None = None
    missing: tuple[str, ...] = ()

    def __repr__(self) -> str:
        """Show all fields; fields that a guess does not establish are ``unknown``."""
        shown = []
        for field in fields(self):
            value = getattr(self, field.name)
            is_unknown = self.rule.guess and field.name in UNKNOWN_OF_GUESSES and not value
            shown.append(f"{field.name}={'unknown' if is_unknown else repr(value)}")
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def score_scale(self) -> float:
        """Factor of the score; for a guess without a factor, the usual factor is assumed."""
        return self.query.head_width**-0.5 if self.scale is None else self.scale

    @property
    def stack(self) -> str:
        """Name of the stack; a configured mask turns an encoder into a decoder, or the reverse."""
        if self.causal and (self.rule.causal_if or self.rule.causal_under):
            return "decoder"
        is_lifted = self.rule.causal and not self.causal and self.rule.stack == "decoder"
        return "encoder" if is_lifted else self.rule.stack

    @property
    def kind(self) -> str:
        """``self`` or ``cross``; without a softmax ``linear`` or ``state-space``."""
        return self.rule.kind

    @property
    def what(self) -> str:
        """The kind in words: ``self-attention``, ``linear attention``."""
        return kind_in_words(self.kind)

    @property
    def has_softmax(self) -> bool:
        """Return whether the block applies a softmax to its scores."""
        return not self.rule.between

    @property
    def where(self) -> str:
        """Name of the stack, with the kind of attention if the attention has no softmax."""
        return self.stack if self.has_softmax else f"{self.stack} {self.kind}"

    @property
    def place(self) -> Place:
        """Place of the block in the model, and of rows in a table."""
        return Place(self.stack, self.kind, self.layer)

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that are read for the plain form of the block."""
        return (*self.query.parts, *self.key.parts)

    @property
    def statuses(self) -> tuple[str, ...]:
        """``partial`` if one form per head is not the whole score, ``guessed``, ``quantized``."""
        reasons = {"partial": self.reason, "guessed": self.rule.guess, "quantized": self.quantized}
        return tuple(status for status, reason in reasons.items() if reason)

    @property
    def may_turn(self) -> bool:
        """Return whether positions may rotate queries and keys; always true for a guess."""
        return bool(self.rotary or self.rule.guess) or self.position.startswith("rotary")

    @property
    def turns_gains(self) -> bool:
        """Return whether a norm with gains, or with centering, follows the rotation by positions.

        A score then depends on both positions, and not on their distance alone.
        """
        if self.rotary is None or not self.rotary.before_norm:
            return False
        norms = [side.norm for side in (self.query, self.key) if side.norm is not None]
        return any(norm.gain or norm.kind == "layer" for norm in norms)

    @property
    def longest(self) -> int | None:
        """Number of tokens beyond which positions act differently; None if they never do."""
        if self.rotary is not None:
            return self.rotary.longest
        if self.positional is not None:
            return self.positional.rotary.longest
        # Queries that grow with position grow from this token on.
        return self.grows_from - 1 if self.grows_from else self.grows_from

    @property
    def key_bias_counts(self) -> bool:
        """Return whether a bias of keys may change attention.

        Otherwise the bias adds one number to all scores of a query, and the softmax ignores this
        number. The bias changes attention if positions rotate the keys, if a norm or a limit
        follows, or if some scores lack the bias.
        """
        key = self.key.projection
        if isinstance(key, Composed) and key.bias is not None:  # the latent's norm comes after it
            return True
        followers = (self.axial, self.key.norm, self.clip, self.softcap, self.sinks)
        has_follower = any(follower is not None for follower in followers)
        return self.may_turn or not self.has_softmax or has_follower

    @property
    def rotation_unknown(self) -> bool:
        """Return whether positions may rotate queries and keys in an unknown way.

        The family was guessed, or only names its rotary positions.
        """
        return bool(self.rule.guess) or self._rotation_is_named

    @property
    def _rotation_is_named(self) -> bool:
        """Return whether the family names rotary positions without describing them."""
        return self.position.startswith("rotary") and not (self.rotary or self.axial)

    @property
    def reason(self) -> str:
        """Reasons of the status ``partial``; empty if one form per head is the whole score."""
        return "; ".join(self._reasons())

    def _reasons(self) -> Iterator[str]:
        if self.rule.partial:
            yield self.rule.partial
        if self.missing:
            names = " and ".join(self.missing)
            verb = "are" if len(self.missing) > 1 else "is"
            yield (
                f"incomplete: {names}, which models of this type have, {verb} missing from the file"
            )
        if self.positional is not None:
            term = "rotary term" if self.positional.rotary.frequencies.any() else "term"
            yield f"the form is the content term; a {term} of further dimensions is added"
        if any(isinstance(side.projection, Composed) for side in (self.query, self.key)):
            yield (
                "what goes through the latents has the gains of their norms, but not the tokens' "
                "own scales"
            )
        if self.position and self.position_uses:
            sides = " and the ".join(self.position_uses)
            yield f"terms of the {sides} with positions are added to the form's score"
        if self.rule.between:
            yield (
                "the form is the product of the projections; between it and the outputs stand "
                + ", ".join(self.rule.between)
            )
        norms = [side.norm for side in (self.query, self.key) if side.norm]
        if any(norm.gain for norm in norms):
            yield (
                f"{NORMALIZED}the gains are folded into the form, the tokens' own scales are not"
            )
        elif norms:
            yield f"{NORMALIZED}the tokens' own scales are not in the form"
        if self.clip is not None:
            yield (
                f"queries and keys are clipped at ±{self.clip:g}; the form is the score of those "
                "below it"
            )

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Parts of the plan that the family does not establish; see `wqk.families.assumptions`."""
        return tuple(self._assumptions())

    def _assumptions(self) -> Iterator[Assumption]:
        if self.rule.guess:
            yield from self._assumptions_of_guess()
        elif self._rotation_is_named:
            reason = f"family {self.family} only names its positions: {self.position}"
            yield Assumption(Aspect.ROTATION, None, reason)
        modules = set(self.query.tensor.split("."))
        if self.rule.causal_under and not modules & self.rule.causal_under.keys():
            reason = "the class that runs decides, and no name shows it"
            yield Assumption(Aspect.MASK, "none", reason)
        for name in self.missing:
            yield Assumption(Aspect.MISSING, None, f"models of this type have {name}")

    def _assumptions_of_guess(self) -> Iterator[Assumption]:
        if self.scale is None:
            scale = f"{self.score_scale:g}"
            yield Assumption(Aspect.SCALE, scale, f"{NAMES_ONLY}; head_width ** -0.5")
        yield Assumption(Aspect.ROTATION, None, NAMES_ONLY)
        yield Assumption(Aspect.MASK, "causal" if self.causal else None, NAMES_ONLY)
        yield Assumption(Aspect.WINDOW, None, NAMES_ONLY)
        yield Assumption(Aspect.TERMS, None, NAMES_ONLY)
        yield Assumption(Aspect.CAP, None, NAMES_ONLY)
        if self.rule.layout in FUSED_ORDERS:
            module = (self.rule.fused or self.rule.query)[0]
            order = FUSED_ORDERS[self.rule.layout]
            reason = f"{module} has room for them in several orders"
            yield Assumption(Aspect.LAYOUT, order, reason)
        norms = [side.norm for side in (self.query, self.key) if side.norm is not None]
        if norms:
            offset = norms[0].offset
            gains = f"{offset:g} plus what is stored" if offset else "as stored"
            reason = "names of tensors do not show what is stored"
            yield Assumption(Aspect.GAINS, gains, reason)
        if self.query.input_norm is None:
            yield Assumption(Aspect.INPUT_NORM, None, NAMES_ONLY)


def part_names(plans: Iterable[AttentionPlan]) -> set[str]:
    """Return the names of the tensors that contain the queries and keys of blocks.

    Examples
    --------
    >>> import wqk
    >>> min(part_names(wqk.open(wqk.demo_model("encoder")).plans))
    'roberta_prelayernorm.encoder.layer.0.attention.self.key.bias'
    """
    names: set[str] = set()
    for plan in plans:
        names.update(part.name for part in plan.parts)
    return names


def contents_of_attention(plans: Sequence[AttentionPlan], tensors: Iterable[str]) -> str:
    """Return the roles of a checkpoint's tensors in words; empty if some are not attention's.

    Examples
    --------
    >>> import wqk
    >>> for name in ("encoder", "induction"):
    ...     model = wqk.open(wqk.demo_model(name))
    ...     contents_of_attention(model.plans, model.checkpoint.tensors())
    'queries and keys'
    ''
    """
    roles = {"query": "queries", "key": "keys", "value": "values", "output": "outputs"}
    unread = set(tensors)
    contents = []
    for role, plural in roles.items():
        names: set[str] = set()
        for plan in plans:
            side = getattr(plan, role)
            if side is not None:
                names.update(part.name for part in side.parts)
        if names:
            contents.append(plural)
        unread -= names
    if unread or not contents:
        return ""
    return f"{', '.join(contents[:-1])} and {contents[-1]}"
