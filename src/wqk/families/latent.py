"""Latent attention (DeepSeek-V2): queries and keys that go through a narrow latent.

Of every head, some dimensions are content, projected from the latent, and some hold the position,
the key's straight from the input and the same for all heads. The content is the form; positions
are apart, because no single distance is theirs.

Axes: H heads, C latent width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.errors import CheckpointError
from wqk.families.layouts import Composed, Projection, within_heads
from wqk.families.naming import named, part_of, weight_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wqk.checkpoints import TensorInfo
    from wqk.families.family import AttentionRule
    from wqk.families.naming import Found
    from wqk.families.values import Settings


def latent(
    tensors: Mapping[str, TensorInfo],
    settings: Settings,
    rule: AttentionRule,
    found: Found,
    heads: int,
) -> dict[str, Projection | Composed]:
    """Where ``q``, ``k`` and ``v`` lie, and the positions' ``q_position`` and ``k_position``.

    Raises
    ------
    CheckpointError
        The widths do not fit the tensors, or a factor has a bias.
    """
    content = settings.whole((rule.content_width,))
    position = settings.whole((rule.position_width,))
    query, key = weight_name(found.query), weight_name(found.key)
    up, width = tensors[key].shape[0] // heads, tensors[key].shape[1]
    query_down = named(tensors, rule.query_inner, found)
    key_down = named(tensors, rule.key_inner, found)
    if key_down is None:
        raise CheckpointError(
            f"{settings.name}: incomplete, {key!r} is there, but what comes before it is not; "
            f"expected {rule.key_inner[0].replace('{layer}', str(found.index[0]))!r}"
        )
    for tensor in (query, key, query_down, key_down):
        bias = f"{(tensor or '').removesuffix('weight')}bias"
        if bias in tensors:
            raise CheckpointError(
                f"{settings.name}: latent attention is read without biases, got {bias!r}"
            )

    def composed(
        outer: Projection, down: str | None, norm: tuple[str, ...]
    ) -> Projection | Composed:
        if down is None:
            return outer
        gain = part_of(tensors, tuple(f"{name}.weight" for name in norm), found)
        if gain is None:
            raise CheckpointError(f"{settings.name}: incomplete, {down!r} has no norm after it")
        rank = tensors[outer.tensor].shape[1]
        return Composed(outer, Projection(down, ((0, rank),), False, 1, rank), gain)

    def of_query(start: int, stop: int) -> Projection | Composed:
        outer = within_heads(query, tensors[query].shape, heads, start, stop)
        return composed(outer, query_down, rule.query_inner_norm)

    def of_key(start: int, stop: int) -> Projection | Composed:
        outer = within_heads(key, tensors[key].shape, heads, start, stop)
        return composed(outer, key_down, rule.key_inner_norm)

    if tensors[key_down].shape[0] != width + position:
        raise CheckpointError(
            f"{settings.name}: {key_down} must have {width} outputs for the latent and {position} "
            f"for positions, got {tensors[key_down].shape[0]}"
        )
    return {
        "q": of_query(0, content),
        "k": of_key(0, content),
        "v": of_key(content, up),
        "q_position": of_query(content, content + position),
        "k_position": Projection(
            key_down, ((width, width + position),), False, heads=1, head_width=position
        ),
    }
