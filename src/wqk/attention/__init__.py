"""One block: its heads as forms, other coordinates of it, what it reads, and its verification."""

from wqk.attention.block import (
    Attention,
    attention_plan,
    attention_plans,
    load_attention,
    read_attention,
    unread_attention,
)

__all__ = [
    "Attention",
    "attention_plan",
    "attention_plans",
    "load_attention",
    "read_attention",
    "unread_attention",
]
