"""Which tensors are a model's queries and keys: families as data, and plans made from them."""

from wqk.families.family import AttentionRule, Family, families, load_family
from wqk.families.finding import find_family
from wqk.families.layouts import Composed, Projection
from wqk.families.naming import InputNorm
from wqk.families.plan import AttentionPlan, plan
from wqk.families.rotary import Rotary

__all__ = [
    "AttentionPlan",
    "AttentionRule",
    "Composed",
    "Family",
    "InputNorm",
    "Projection",
    "Rotary",
    "families",
    "find_family",
    "load_family",
    "plan",
]
