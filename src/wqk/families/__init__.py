"""Queries and keys of a model: families as data, and plans made from families."""

from wqk.families.assumptions import Aspect, Assumption
from wqk.families.family import families, load_family
from wqk.families.finding import KnownHeadCounts, find_family, with_head_counts
from wqk.families.layouts import Composed, Norm, Projection
from wqk.families.planner import plan_attention, plan_mixers
from wqk.families.plans import AttentionPlan, Place
from wqk.families.rotary import Rotary
from wqk.families.rules import AttentionRule, Family
from wqk.families.sides import Side
from wqk.families.windows import Window

__all__ = [
    "Aspect",
    "Assumption",
    "AttentionPlan",
    "AttentionRule",
    "Composed",
    "Family",
    "KnownHeadCounts",
    "Norm",
    "Place",
    "Projection",
    "Rotary",
    "Side",
    "Window",
    "families",
    "find_family",
    "load_family",
    "plan_attention",
    "plan_mixers",
    "with_head_counts",
]
