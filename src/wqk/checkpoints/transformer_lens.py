"""State dicts of TransformerLens: weights with an axis for the heads, and its own configuration.

Queries, keys and values are (heads, D, R), outputs (heads, R, D). Its names have no ``.weight``;
here they are called as an ``nn.Linear``'s are: ``blocks.0.attn.W_Q`` is ``blocks.0.attn.q.weight``.
Keys and values of fewer heads than queries are stored once, as ``_W_K`` and ``_W_V``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wqk.checkpoints.checkpoint import TensorInfo

QUERY = re.compile(r"(.*\.)?blocks\.\d+\.attn\.W_Q")
NAMES = re.compile(r"((?:.*\.)?blocks\.\d+\.)(?:attn\._?([Wb])_([QKVO])|(ln1)\.([wb]))")
ENDINGS = {"W": "weight", "w": "weight", "b": "bias"}


def is_transformer_lens(names: Iterable[str]) -> bool:
    """Whether tensors have the names of TransformerLens."""
    return any(QUERY.fullmatch(name) for name in names)


def linear_name(name: str) -> str:
    """What an `nn.Linear` or a norm in this place would call its tensor.

    Examples
    --------
    >>> linear_name("blocks.3.attn._W_K"), linear_name("blocks.3.ln1.b"), linear_name("embed.W_E")
    ('blocks.3.attn.k.weight', 'blocks.3.ln1.bias', 'embed.W_E')
    """
    found = NAMES.fullmatch(name)
    if found is None:
        return name
    start, kind, side, norm, part = found.groups()
    return (
        f"{start}{norm}.{ENDINGS[part]}" if norm else f"{start}attn.{side.lower()}.{ENDINGS[kind]}"
    )


def configuration(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> Mapping[str, Any]:
    """A `HookedTransformerConfig` with the keys that families need; without one, what tensors tell.

    Only its presence tells the score's scale, mask and positions.
    """
    if "d_head" not in config:
        has_bias = any(name.endswith("ln1.bias") for name in tensors)
        kind = "LN" if has_bias else "RMS"
        return {"model_type": "transformer-lens", "normalization_type": kind}
    scale = config.get("attn_scale")
    width = config["d_head"]
    if not isinstance(scale, int | float) or scale <= 0:
        scale = width**0.5 if isinstance(width, int) and width > 0 else 1.0
    added: dict[str, Any] = {
        "model_type": "transformer-lens",
        "attn_factor": 1.0 if config.get("use_attn_scale") is False else 1 / scale,
        "normalization_type": str(config.get("normalization_type") or "").removesuffix("Pre"),
    }
    cap = config.get("attn_scores_soft_cap")
    if not isinstance(cap, int | float) or cap <= 0:
        added["attn_scores_soft_cap"] = None
    if config.get("use_local_attn") and isinstance(config.get("attn_types"), list):
        added["layer_types"] = config["attn_types"]
    elif not config.get("use_local_attn"):
        added["window_size"] = None
    if config.get("use_NTK_by_parts_rope"):
        added["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.get("NTK_by_parts_factor", 8.0),
            "low_freq_factor": config.get("NTK_by_parts_low_freq_factor", 1.0),
            "high_freq_factor": config.get("NTK_by_parts_high_freq_factor", 4.0),
            "original_max_position_embeddings": config.get("NTK_original_ctx_len", 8192),
        }
    return {**config, **added}
