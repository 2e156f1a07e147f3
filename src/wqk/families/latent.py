"""Latent attention (DeepSeek-V2): queries and keys that go through a narrow latent.

Some dimensions of each head are content, projected from the latent; others hold the position, the
key's projected from the input and shared by all heads. The content is the form; positions are kept
apart, because they have no single distance.

Axes: H heads, C latent width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.errors import CheckpointError
from wqk.families.layouts import Composed, Projection, within_heads
from wqk.families.norms import Norm

if TYPE_CHECKING:
    from wqk.families.config import Config
    from wqk.families.family import AttentionRule
    from wqk.families.naming import Match


def latent(
    config: Config,
    rule: AttentionRule,
    match: Match,
    heads: int,
) -> dict[str, Projection | Composed]:
    """Where ``q``, ``k`` and ``v`` lie, and the positions' ``q_position`` and ``k_position``.

    Raises `CheckpointError` if the widths do not fit the tensors, or a factor has a bias.
    """
    content = config.whole((rule.content_width,))
    none = config.get(rule.position_width) == 0
    position = 0 if none else config.whole((rule.position_width,))
    epsilon = config.optional_number(rule.norm_epsilon) or 0.0
    query, key, tensors = match.query, match.key, match.tensors
    up, width = tensors[key].shape[0] // heads, tensors[key].shape[1]
    query_down = match.weight(rule.query_inner)
    key_down = match.weight(rule.key_inner)
    if key_down is None:
        raise CheckpointError(
            f"{config.name}: incomplete, {key!r} is there, but what comes before it is not; "
            f"expected {rule.key_inner[0].replace('{layer}', str(match.index[0]))!r}"
        )
    for tensor in (query, key, query_down, key_down):
        bias = f"{(tensor or '').removesuffix('weight')}bias"
        if bias in tensors:
            raise CheckpointError(
                f"{config.name}: latent attention is read without biases, got {bias!r}"
            )

    def composed(
        outer: Projection, down: str | None, norm: tuple[str, ...]
    ) -> Projection | Composed:
        if down is None:
            return outer
        gain = match.part(tuple(f"{name}.weight" for name in norm))
        if gain is None:
            raise CheckpointError(f"{config.name}: incomplete, {down!r} has no norm after it")
        rank = tensors[outer.tensor].shape[1]
        after = Norm(rule.norm, (gain,), epsilon=epsilon)
        return Composed(outer, Projection(down, ((0, rank),), False, 1, rank), after)

    def of_query(start: int, stop: int) -> Projection | Composed:
        outer = within_heads(query, tensors[query].shape, heads, start, stop)
        return composed(outer, query_down, rule.query_inner_norm)

    def of_key(start: int, stop: int) -> Projection | Composed:
        outer = within_heads(key, tensors[key].shape, heads, start, stop)
        return composed(outer, key_down, rule.key_inner_norm)

    if tensors[key_down].shape[0] != width + position:
        raise CheckpointError(
            f"{config.name}: {key_down} must have {width} outputs for the latent and {position} "
            f"for positions, got {tensors[key_down].shape[0]}"
        )
    roles: dict[str, Projection | Composed] = {
        "q": of_query(0, content),
        "k": of_key(0, content),
        "v": of_key(content, up),
    }
    if not position:
        return roles
    return roles | {
        "q_position": of_query(content, content + position),
        "k_position": Projection(
            key_down, ((width, width + position),), False, heads=1, head_width=position
        ),
    }
