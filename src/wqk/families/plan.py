"""What has to be read of one block's attention, and what else its score holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wqk.checkpoints import Part
    from wqk.families.family import AttentionRule
    from wqk.families.rotary import Rotary
    from wqk.families.sides import Side

TOKEN_BY_TOKEN = "queries and keys are normalized token by token before they meet; "


@dataclass(frozen=True)
class Positional:
    """Queries and keys that hold only positions; their product is added to that of the form."""

    query: Side
    key: Side
    rotary: Rotary


@dataclass(frozen=True)
class AttentionPlan:
    """One block's attention: its place in the model, its tensors, and the rest of its score."""

    family: str
    rule: AttentionRule
    layer: int
    query: Side
    key: Side
    value: Side | None
    output: Side | None
    scale: float
    softcap: float | None
    clip: float | None
    sinks: Part | None
    causal: bool
    window: str | None
    applications: int
    position: str
    rotary: Rotary | None  # along one axis, with which forms at a distance are computed
    axial: Rotary | None  # along two
    positional: Positional | None

    @property
    def stack(self) -> str:
        """The stack's name; an encoder that is configured as causal is a decoder."""
        return "decoder" if self.causal and self.rule.causal_if else self.rule.stack

    @property
    def kind(self) -> str:
        """``self`` or ``cross``."""
        return self.rule.kind

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is read for the block's plain form."""
        return (*self.query.parts, *self.key.parts)

    @property
    def statuses(self) -> tuple[str, ...]:
        """``partial`` if one form per head is not the whole score, ``guessed``, both or neither."""
        return ("partial",) * bool(self.reason) + ("guessed",) * bool(self.rule.guess)

    @property
    def may_turn(self) -> bool:
        """Whether positions turn queries and keys, or might, as those of a guess are unknown."""
        return bool(self.rotary or self.rule.guess) or self.position.startswith("rotary")

    @property
    def reason(self) -> str:
        """Why the status is ``partial``; empty if it is not."""
        reasons = [self.rule.partial] if self.rule.partial else []
        norms = [side.norm for side in (self.query, self.key) if side.norm]
        if any(norm.gain for norm in norms):
            reasons.append(
                f"{TOKEN_BY_TOKEN}the gains are folded into the form, the tokens' own scales are "
                "not"
            )
        elif norms:
            reasons.append(f"{TOKEN_BY_TOKEN}the tokens' own scales are not in the form")
        if self.clip is not None:
            reasons.append(
                f"queries and keys are cut off at ±{self.clip:g}; the form is the score of those "
                "that are smaller"
            )
        return "; ".join(reasons)
