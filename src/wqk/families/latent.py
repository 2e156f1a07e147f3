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
from wqk.families.norms import Norm

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wqk.checkpoints import TensorInfo
    from wqk.families.config import Config
    from wqk.families.family import AttentionRule
    from wqk.families.naming import Match


def latent(
    tensors: Mapping[str, TensorInfo],
    config: Config,
    rule: AttentionRule,
    match: Match,
    heads: int,
) -> dict[str, Projection | Composed]:
    """Where ``q``, ``k`` and ``v`` lie, and any positions' ``q_position`` and ``k_position``.

    Raises
    ------
    CheckpointError
        The widths do not fit the tensors, or a factor has a bias.
    """
    content = config.whole((rule.counts.content_width,))
    none = config.get(rule.counts.position_width) == 0
    position = 0 if none else config.whole((rule.counts.position_width,))
    epsilon = config.optional_number(rule.norm.epsilon) or 0.0
    query, key = weight_name(match.query), weight_name(match.key)
    up, width = tensors[key].shape[0] // heads, tensors[key].shape[1]
    query_down = named(tensors, rule.query.inner, match)
    key_down = named(tensors, rule.key.inner, match)
    if key_down is None:
        raise CheckpointError(
            f"{config.name}: incomplete, {key!r} is there, but what comes before it is not; "
            f"expected {rule.key.inner[0].replace('{layer}', str(match.index[0]))!r}"
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
        gain = part_of(tensors, tuple(f"{name}.weight" for name in norm), match)
        if gain is None:
            raise CheckpointError(f"{config.name}: incomplete, {down!r} has no norm after it")
        rank = tensors[outer.tensor].shape[1]
        after = Norm(rule.norm.kind, (gain,), epsilon=epsilon)
        return Composed(outer, Projection(down, ((0, rank),), False, 1, rank), after)

    def of_query(start: int, stop: int) -> Projection | Composed:
        outer = within_heads(query, tensors[query].shape, heads, start, stop)
        return composed(outer, query_down, rule.query.inner_norm)

    def of_key(start: int, stop: int) -> Projection | Composed:
        outer = within_heads(key, tensors[key].shape, heads, start, stop)
        return composed(outer, key_down, rule.key.inner_norm)

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
