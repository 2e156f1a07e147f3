"""One side of an attention: its projection, and what precedes and follows it, by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from array_api_compat import array_namespace

from wqk._typing import Array
from wqk.checkpoints import Part
from wqk.errors import CheckpointError
from wqk.families.family import EPSILON, REST
from wqk.families.layouts import (
    Composed,
    Norm,
    Projection,
    sectioned,
    separate,
    sized,
    within_heads,
)

if TYPE_CHECKING:
    from wqk.families.config import Config
    from wqk.families.family import AttentionRule
    from wqk.families.naming import Match


class Temperature(NamedTuple):
    """A learned factor of the queries.

    Of each head the exponential of its logarithm (H,), limited; or else of each dimension of a head
    the softplus of what is stored (R,).
    """

    stored: Part
    of_head: bool = True
    limit: float = 100.0

    def factors(self, stored: Array) -> Array:
        """The factors (H, 1) or (1, R)."""
        xp = array_namespace(stored)
        if self.of_head:
            return xp.exp(stored.reshape(-1, 1)).clip(max=self.limit)
        rest = xp.log(1 + xp.exp(-xp.abs(stored)))
        return (rest + stored * (stored > 0)).reshape(1, -1)


@dataclass(frozen=True)
class Side:
    """Queries, keys, values or outputs of a block, as its checkpoint stores them.

    Attributes
    ----------
    projection
        Which outputs of which tensors, for how many heads.
    bias
        Added by the projection.
    norm
        Between projection and score.
    input_norm
        The norm that feeds the projection, if one does.
    temperature
        A learned factor of each head, or of each dimension of a head.
    factor
        A factor of all that it projects.
    """

    projection: Projection | Composed
    bias: Part | None = None
    norm: Norm | None = None
    input_norm: Norm | None = None
    temperature: Temperature | None = None
    factor: float = 1.0

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.projection.heads

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.projection.head_width

    @property
    def tensor(self) -> str:
        """Name of the weight that the input meets first."""
        return self.projection.tensor

    @property
    def roles(self) -> Iterator[tuple[str, Part]]:
        """Everything that is read for it, and what it is: ``bias``; empty for the weight itself.

        The norm of the input is read only where it is folded in.
        """
        yield from self.projection.roles.items()
        if self.bias is not None:
            yield "bias", self.bias
        if self.temperature is not None:
            yield "temperature", self.temperature.stored
        if self.norm is not None:
            yield from (("norm", part) for part in self.norm.gain)
            yield from (("norm_bias", part) for part in self.norm.bias)

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything that is read for it."""
        return tuple(part for _, part in self.roles)


def _epsilon(config: Config, keys: tuple[str, ...], kind: str) -> float:
    """What a norm adds to a mean square; PyTorch's own where a layer norm's configuration has none.

    Examples
    --------
    >>> from wqk.families.config import Config
    >>> _epsilon(Config({}), ("norm_eps",), "layer"), _epsilon(Config({}), ("norm_eps",), "rms")
    (1e-05, 0.0)
    """
    number = config.optional_number(keys)
    return number if number is not None else 1e-5 if kind == "layer" else 0.0


def sides_of(
    config: Config,
    rule: AttentionRule,
    match: Match,
    projections: Mapping[str, Projection | Composed],
) -> tuple[Side, Side, Side | None, Side | None]:
    """Queries, keys, and values and outputs where they are named."""
    is_first = match.group == 0 and rule.first_input_norm
    feeds_query = rule.first_input_norm if is_first else rule.input_norm
    feeds_key = rule.key_input_norm if rule.kind == "cross" else feeds_query
    epsilon = _epsilon(config, rule.norm_epsilon, rule.norm)

    def norm(names: tuple[str, ...], heads: int) -> Norm | None:
        gain, bias = (match.norm(names, what, heads) for what in ("weight", "bias"))
        if rule.norm_gain and not gain:
            return None
        # Gains of each head, apart or with an axis for the heads, are of heads normalized alone.
        alone = len(gain) > 1 or any(len(match.tensors[part.name].shape) > 1 for part in gain)
        return Norm(rule.norm, gain, bias, rule.norm_offset, epsilon, alone)

    def input_norm(names: tuple[str, ...]) -> Norm | None:
        gain, bias = (match.norm(names, what) for what in ("weight", "bias"))
        kind, offset = rule.input_norm_kind, rule.input_norm_offset
        first = EPSILON if is_first else ()
        small = _epsilon(config, (*first, *rule.input_norm_epsilon), kind)
        factor = config.product(rule.input_scale, {})
        return Norm(kind, gain, bias, offset, small, factor=factor) if gain else None

    def bias(role: str, names: tuple[str, ...]) -> Part | None:
        return match.bias(projections[role], names)

    q, k, v = projections["q"], projections["k"], projections.get("v")
    logarithm, softplus = match.part(rule.temperature), match.part(rule.softplus)
    temperature = Temperature(logarithm) if logarithm is not None else None
    if softplus is not None:
        temperature = Temperature(softplus, of_head=False)
    query = Side(
        q,
        bias("q", rule.query_bias),
        norm(rule.query_norm, q.heads),
        input_norm(feeds_query),
        temperature,
    )
    key = Side(
        k,
        bias("k", ()),
        norm(rule.key_norm, k.heads),
        input_norm(feeds_key),
        factor=config.product(rule.key_scale, {}),
    )
    factor = config.product(rule.value_scale, {})
    fed = input_norm(feeds_key)
    value = Side(v, bias("v", rule.value_bias), None, fed, None, factor) if v else None
    output = _output(rule, match, value.heads if value and rule.between else query.heads, v)
    if output is not None and (after := norm(rule.output_norm, query.heads)) and after.gain:
        output = replace(output, norm=replace(after, feeds=True, alone=False))
    return query, key, value, output


def projections_of(
    config: Config, rule: AttentionRule, match: Match
) -> dict[str, Projection | Composed]:
    """Where the weights of ``q``, ``k`` and, if they are named, ``v`` are stored."""
    if rule.layout in APART:
        return _apart(rule, match)
    if rule.sections:
        return _sized(config, rule, match)
    layer, _ = config.stage(rule.layers, match.index)
    heads = config.optional_whole(rule.heads, layer)
    if heads is None:
        raise CheckpointError(
            f"config.json lacks {' or '.join(rule.heads)}; give the number of query "
            "heads with heads_per_layer=N"
        )
    key_heads = config.optional_whole(rule.key_heads, layer)
    if rule.kind == "self" and (pruned := config.pruned_heads(layer)):
        if pruned >= heads or key_heads not in (None, heads):
            raise CheckpointError(
                f"config.json: pruned_heads has {pruned} heads of layer {layer}, "
                f"which has {heads} query heads and {key_heads or heads} key heads"
            )
        heads, key_heads = heads - pruned, None
    query, key, tensors = match.query, match.key, match.tensors
    named = [query, key, *(match.weight(names) for names in (rule.value, rule.output))]
    for tensor in filter(None, named):
        shape = tensors[tensor].shape
        # Keys and values of latent attention may have an axis for the heads.
        axes = (2, 3) if rule.layout == "latent" and tensor != query else (2,)
        axes = (3, 4) if rule.layout == "convolution" and set(shape[2:]) == {1} else axes
        if len(shape) not in axes or 0 in shape:
            raise CheckpointError(f"{tensor} must be a matrix, got shape {shape}")
    if rule.layout == "latent":
        return _latent(config, rule, match, heads)
    if rule.layout in ("separate", "gated", "convolution"):
        value = match.weight(rule.value)
        together = value == key  # one tensor holds the keys, then the values
        rows, key_rows = tensors[query].shape[0], tensors[key].shape[0] // (2 if together else 1)
        if rule.layout == "gated":
            rows //= 2
        widths = set() if rule.between else config.head_widths
        if widths and rows % heads == 0 and rows // heads not in widths:
            raise CheckpointError(
                f"{query}: {rows} rows do not fit {heads} query heads of width "
                f"{' or '.join(map(str, sorted(widths)))} (config.json); is the file one of "
                "several parts, or is the family that of another model?"
            )
        if key_heads is None:  # a key head is as wide as a query head
            key_heads = max(1, key_rows * heads // rows) if rows else heads
        value_heads = config.optional_whole(rule.value_heads, layer) or key_heads
        inputs = None
        if rule.layout == "convolution":  # those of pictures have no groups
            narrow = len(tensors[query].shape) == 3
            inputs = config.whole(("hidden_size",)) if narrow else tensors[query].shape[1]
        queries = separate(query, tensors[query].shape, heads, inputs)
        if rule.layout == "gated":
            queries = within_heads(query, tensors[query].shape, heads, 0, queries.head_width // 2)
        down = match.weight(rule.query_inner)
        queried = _composed(config, rule, match, queries, down, rule.query_inner_norm)
        if together:
            both = {"k": key_heads, "v": key_heads}
            return {"q": queried, **sectioned(key, tensors[key].shape, both, "kv")}
        return {
            "q": queried,
            "k": separate(key, tensors[key].shape, key_heads, inputs),
            **({"v": separate(value, tensors[value].shape, value_heads, inputs)} if value else {}),
        }
    key_heads = key_heads or heads
    fused: dict[str, Projection | Composed] = {}
    for tensor, order in [(query, "qkv")] if rule.fused else [(query, "q"), (key, "kv")]:
        fused |= sectioned(
            tensor,
            tensors[tensor].shape,
            {"q": heads, "k": key_heads, "v": key_heads},
            order,
            blocks=key_heads if rule.layout == "grouped" else 1,
            transposed=rule.layout == "conv1d",
        )
    return fused


# Layouts in which heads have an axis of their own: which axes are heads, R and the model's width,
# in queries, keys and values, and in outputs.
APART = {"stacked": ((0, 2, 1), (0, 1, 2)), "spread": ((1, 2, 0), (1, 2, 0))}


def _apart(rule: AttentionRule, match: Match) -> dict[str, Projection | Composed]:
    """Weights in which heads have an axis of their own, whose length tells their number."""
    named = {"q": match.query, "k": match.key, "v": match.weight(rule.value)}
    axes = APART[rule.layout][0]
    return {
        role: _with_axes(match, tensor, axes)
        for role, tensor in named.items()
        if tensor is not None
    }


def _with_axes(match: Match, tensor: str, axes: tuple[int, int, int]) -> Projection:
    shape = match.tensors[tensor].shape
    if len(shape) != 3 or 0 in shape:
        names = [name for _, name in sorted(zip(axes, ("heads", "R", "D"), strict=True))]
        raise CheckpointError(f"{tensor} must be ({', '.join(names)}), got shape {shape}")
    return Projection(tensor, None, False, shape[axes[0]], shape[axes[1]], axes)


def _sized(config: Config, rule: AttentionRule, match: Match) -> dict[str, Projection | Composed]:
    """The roles of a fused tensor by the numbers of the configuration."""

    def number(keys: str) -> int:
        return 0 if keys == REST else config.whole((keys,))

    shape = match.tensors[match.query].shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{match.query} must be a matrix, got shape {shape}")
    sections = [
        (role, number(factors[0]) or 1, math.prod(map(number, factors)))
        for role, *factors in rule.sections
    ]
    blocks = number(rule.section_blocks or "1")
    found = sized(match.query, shape[0], sections, blocks)
    return {role: found[role] for role in "qkv" if role in found}


def _output(
    rule: AttentionRule, match: Match, heads: int, values: Projection | Composed | None
) -> Side | None:
    """Where W_o is stored; its columns are the outputs of the heads, one after the other."""
    name = match.weight(rule.output)
    if not name:
        return None
    if rule.layout in APART:
        return Side(_with_axes(match, name, APART[rule.layout][1]))
    stored_in_out = rule.layout == "conv1d"
    shape = match.tensors[name].shape
    inputs = shape[0 if stored_in_out else 1]
    groups = 0
    if rule.layout == "convolution" and values is not None:
        groups = max(1, values.heads * values.head_width // inputs)
        inputs *= groups
    if inputs % heads:
        raise CheckpointError(f"{inputs} inputs do not divide into {heads} heads")
    return Side(Projection(name, None, not stored_in_out, heads, inputs // heads, groups=groups))


def _composed(
    config: Config,
    rule: AttentionRule,
    match: Match,
    outer: Projection,
    down: str | None,
    norm: tuple[str, ...],
) -> Projection | Composed:
    """A projection of the latent that ``down`` makes; of the input itself where there is none."""
    if down is None:
        return outer
    gain = match.part(tuple(f"{name}.weight" for name in norm))
    if gain is None:
        raise CheckpointError(f"incomplete, {down!r} has no norm after it")
    shape = match.tensors[outer.tensor].shape
    rank = shape[1] if outer.axes is None else shape[outer.axes[2]]
    after = Norm(rule.norm, (gain,), epsilon=_epsilon(config, rule.norm_epsilon, rule.norm))
    bias = f"{down.removesuffix('weight')}bias"
    added = Part(bias, ((0, rank),)) if bias in match.tensors else None
    return Composed(outer, Projection(down, ((0, rank),), False, 1, rank), after, added)


def _latent(
    config: Config, rule: AttentionRule, match: Match, heads: int
) -> dict[str, Projection | Composed]:
    """Latent attention (DeepSeek-V2), whose queries and keys go through a narrow latent.

    Some dimensions of each head are content, projected from the latent; others hold the position,
    the key's projected from the input and shared by all heads. The content is the form; positions
    are apart, as ``q_position`` and ``k_position``, because they have no single distance.

    Raises `CheckpointError` if the widths do not fit the tensors, or a factor has a bias.
    """
    content = config.whole((rule.content_width,))
    none = config.get(rule.position_width) == 0
    position = 0 if none else config.whole((rule.position_width,))
    query, key, tensors = match.query, match.key, match.tensors
    stacked = len(tensors[key].shape) == 3  # (heads, C, R), without values
    up, width = tensors[key].shape[0] // heads, tensors[key].shape[1]
    query_down = match.weight(rule.query_inner)
    key_down = match.weight(rule.key_inner)
    if key_down is None:
        raise CheckpointError(
            f"incomplete, {key!r} is there, but what comes before it is not; "
            f"expected {rule.key_inner[0].replace('{layer}', str(match.index[0]))!r}"
        )
    for tensor in (query, key):
        bias = f"{tensor.removesuffix('weight')}bias"
        if bias in tensors:
            raise CheckpointError(
                f"{bias}: a bias after the latent is not read; expected none, or biases of the "
                "projections to the latents"
            )

    def of_query(start: int, stop: int) -> Projection | Composed:
        outer = within_heads(query, tensors[query].shape, heads, start, stop)
        return _composed(config, rule, match, outer, query_down, rule.query_inner_norm)

    def of_key(outer: Projection) -> Projection | Composed:
        return _composed(config, rule, match, outer, key_down, rule.key_inner_norm)

    if position and tensors[key_down].shape[0] == width:  # a layer without positions
        content, position = content + position, 0
    if tensors[key_down].shape[0] != width + position:
        raise CheckpointError(
            f"{key_down} must have {width} outputs for the latent and {position} "
            f"for positions, got {tensors[key_down].shape[0]}"
        )
    roles: dict[str, Projection | Composed] = {"q": of_query(0, content)}
    if stacked:
        roles["k"] = of_key(_with_axes(match, key, (0, 2, 1)))
        value = match.weight(rule.value)
        roles |= {"v": of_key(_with_axes(match, value, (0, 1, 2)))} if value else {}
    else:
        for role, start, stop in (("k", 0, content), ("v", content, up)):
            roles[role] = of_key(within_heads(key, tensors[key].shape, heads, start, stop))
    if not position:
        return roles
    return roles | {
        "q_position": of_query(content, content + position),
        "k_position": Projection(
            key_down, ((width, width + position),), False, heads=1, head_width=position
        ),
    }
