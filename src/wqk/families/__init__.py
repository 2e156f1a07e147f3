"""Which tensors are a model's queries and keys: families as data, and plans made from them."""

from wqk.families.family import AttentionRule, Family, families, find_family, load_family
from wqk.families.layouts import Projection
from wqk.families.plan import AttentionPlan, plan
from wqk.families.rotary import Rotary

__all__ = [
    "AttentionPlan",
    "AttentionRule",
    "Family",
    "Projection",
    "Rotary",
    "families",
    "find_family",
    "load_family",
    "plan",
]
