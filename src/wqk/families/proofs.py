"""Guesses about modules in memory that the module's own forward pass has proven."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from wqk.families.plans import AttentionPlan, Place


@dataclass(frozen=True)
class Learned:
    """Facts that an observed attention shows about a guessed block.

    Attributes
    ----------
    heads, key_heads
        Numbers of query and key heads of the guess that was right.
    scale
        Factor of the products of queries and keys.
    causal
        Whether no query sees a later key.
    window
        Number of keys that a query of a causal block sees, including its own; None if it sees all
        earlier keys.
    has_own_mask
        Whether pairs are hidden that neither causality, nor the window, nor padding hides.
    has_bias
        Whether something is added to the scores.
    """

    heads: int
    key_heads: int
    scale: float
    causal: bool
    window: int | None = None
    has_own_mask: bool = False
    has_bias: bool = False


# Networks with a guess that `wqk.verify` has confirmed, and the observed facts by block.
PROVEN: WeakKeyDictionary[Any, Mapping[Place, Learned]] = WeakKeyDictionary()


def proof_of(plan: AttentionPlan, network: Any) -> Learned | None:
    """Return the proof of a plan's guess; None without a proof for its numbers of heads."""
    facts = PROVEN.get(network, {}).get(plan.place)
    if facts is None or (facts.heads, facts.key_heads) != (plan.query.heads, plan.key.heads):
        return None
    return facts


def proven(plan: AttentionPlan, facts: Learned) -> AttentionPlan:
    """Return a guessed plan as known, with the scale and the mask of its proof."""
    rule = msgspec.structs.replace(plan.rule, guess="")
    return replace(plan, rule=rule, scale=facts.scale, causal=facts.causal)
