"""Sides of an attention: a projection with its bias, norms and factors.

`projections_of` finds the rows of queries, keys and values in stored tensors. `sides_of` adds
biases, norms and factors.

Axes: H query heads, R head width, D width of the inputs, C latent width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from array_api_compat import array_namespace

from wqk._typing import Array
from wqk.checkpoints import Part
from wqk.errors import CheckpointError
from wqk.families.expressions import PLAIN_KEY
from wqk.families.layouts import (
    MISFIT,
    Composed,
    Norm,
    Projection,
    sectioned,
    separate,
    sized,
    within_heads,
)
from wqk.families.rules import EPSILON, HEAD_WIDTHS, REST

if TYPE_CHECKING:
    from wqk.families.config import Config
    from wqk.families.rules import AttentionRule
    from wqk.families.spellings import Match

# By role: q, k, v; in latent attention also q_position and k_position.
Projections = dict[str, Projection | Composed]


class Temperature(NamedTuple):
    """A learned factor of the queries.

    Each head has a factor, the exponential of the stored logarithm (H,), at most ``limit``; or each
    dimension of a head has a factor, the softplus of the stored number (R,).

    Attributes
    ----------
    stored
        The stored numbers.
    of_head
        Whether heads have factors, instead of dimensions.
    limit
        Largest factor of a head.
    """

    stored: Part
    of_head: bool = True
    limit: float = 100.0

    def factors(self, stored: Array) -> Array:
        """Return the factors, (H, 1) or (1, R)."""
        xp = array_namespace(stored)
        if self.of_head:
            return xp.exp(stored.reshape(-1, 1)).clip(max=self.limit)
        # The softplus log(1 + exp(x)) is max(x, 0) + log(1 + exp(−|x|)), which does not overflow.
        positive_part = stored * (stored > 0)
        softplus = xp.log(1 + xp.exp(-xp.abs(stored))) + positive_part
        return softplus.reshape(1, -1)


@dataclass(frozen=True)
class Side:
    """Queries, keys, values or outputs of a block, as stored in the checkpoint.

    Attributes
    ----------
    projection
        The outputs of the stored tensors that belong to the side, and their heads.
    bias
        Bias of the projection.
    norm
        Norm between projection and score.
    input_norm
        Norm before the projection, if any.
    temperature
        A learned factor of each head, or of each dimension of a head.
    factor
        Factor of all outputs of the side.
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
        """Name of the first weight that the input is multiplied by."""
        return self.projection.tensor

    @property
    def roles(self) -> Iterator[tuple[str, Part]]:
        """All parts that are read, with their roles: ``bias``, …; empty for the weight.

        The norm of the input is read only if it is folded in.
        """
        yield from self.projection.roles.items()
        if self.bias is not None:
            yield "bias", self.bias
        if self.temperature is not None:
            yield "temperature", self.temperature.stored
        if self.norm is not None:
            for part in self.norm.gain:
                yield "norm", part
            for part in self.norm.bias:
                yield "norm_bias", part

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts that are read."""
        return tuple(part for _, part in self.roles)


class Sides(NamedTuple):
    """The sides of a block; values and outputs are None if the family does not name them."""

    query: Side
    key: Side
    value: Side | None
    output: Side | None


@dataclass(frozen=True)
class _NormFinder:
    """Finds the norms of one layer by the names in a rule."""

    config: Config
    rule: AttentionRule
    match: Match

    @property
    def _is_first_layer(self) -> bool:
        """Return whether the layer is layer 0 of a model with a separate input norm in layer 0."""
        return self.match.group == 0 and bool(self.rule.first_input_norm)

    def before_score(self, names: tuple[str, ...], heads: int) -> Norm | None:
        """Return the norm of queries, keys or outputs with these names; None if absent."""
        rule = self.rule
        gain = self.match.norm(names, "weight", heads)
        bias = self.match.norm(names, "bias", heads)
        if rule.norm_gain and not gain:
            return None
        # Gains of each head, under names of their own or on an axis of their own, belong to heads
        # that are normalized one by one.
        tensors = self.match.tensors
        has_axis = any(len(tensors[part.name].shape) > 1 for part in gain)
        return Norm(
            rule.norm,
            gain,
            bias,
            rule.norm_offset,
            _epsilon(self.config, rule.norm_epsilon, rule.norm),
            alone=len(gain) > 1 or has_axis,
        )

    def of_query_input(self) -> Norm | None:
        """Return the norm before the queries."""
        rule = self.rule
        return self._of_input(rule.first_input_norm if self._is_first_layer else rule.input_norm)

    def of_key_input(self) -> Norm | None:
        """Return the norm before the keys and the values."""
        if self.rule.kind == "cross":
            return self._of_input(self.rule.key_input_norm)
        return self.of_query_input()

    def _of_input(self, names: tuple[str, ...]) -> Norm | None:
        rule = self.rule
        gain, bias = self.match.norm(names, "weight"), self.match.norm(names, "bias")
        if not gain:
            return None
        epsilon_keys = rule.input_norm_epsilon
        if self._is_first_layer:
            epsilon_keys = (*EPSILON, *epsilon_keys)
        return Norm(
            rule.input_norm_kind,
            gain,
            bias,
            rule.input_norm_offset,
            _epsilon(self.config, epsilon_keys, rule.input_norm_kind),
            factor=self.config.product(rule.input_scale, {}),
        )


def _epsilon(config: Config, keys: tuple[str, ...], kind: str) -> float:
    """Return the number that a norm adds to a mean square.

    Layer norms without a configured number have PyTorch's default.

    Examples
    --------
    >>> from wqk.families.config import Config
    >>> _epsilon(Config({}), ("norm_eps",), "layer"), _epsilon(Config({}), ("norm_eps",), "rms")
    (1e-05, 0.0)
    """
    number = config.optional_number(keys)
    if number is not None:
        return number
    return 1e-5 if kind == "layer" else 0.0


def sides_of(config: Config, rule: AttentionRule, match: Match, projections: Projections) -> Sides:
    """Return queries and keys of a layer, and values and outputs if the family names them."""
    norms = _NormFinder(config, rule, match)
    query_projection, key_projection = projections["q"], projections["k"]
    value_projection = projections.get("v")
    query = Side(
        query_projection,
        match.bias(query_projection, rule.query_bias),
        norms.before_score(rule.query_norm, query_projection.heads),
        norms.of_query_input(),
        _temperature(rule, match),
    )
    key = Side(
        key_projection,
        match.bias(key_projection, ()),
        norms.before_score(rule.key_norm, key_projection.heads),
        norms.of_key_input(),
        factor=config.product(rule.key_scale, {}),
    )
    value = None
    if value_projection:
        value = Side(
            value_projection,
            match.bias(value_projection, rule.value_bias),
            input_norm=norms.of_key_input(),
            factor=config.product(rule.value_scale, {}),
        )
    heads = value.heads if value and rule.between else query.heads
    output = _output(rule, match, heads, value_projection)
    if output is not None:
        norm = norms.before_score(rule.output_norm, query.heads)
        if norm is not None and norm.gain:
            output = replace(output, norm=replace(norm, feeds=True, alone=False))
    return Sides(query, key, value, output)


def _temperature(rule: AttentionRule, match: Match) -> Temperature | None:
    """Return the learned factor of the queries; None if the layer has none."""
    softplus = match.part(rule.softplus)
    if softplus is not None:
        return Temperature(softplus, of_head=False)
    logarithm = match.part(rule.temperature)
    return None if logarithm is None else Temperature(logarithm)


class _HeadCounts(NamedTuple):
    """Numbers of heads of a layer in the configuration; None if determined by shapes."""

    query: int
    key: int | None


def projections_of(config: Config, rule: AttentionRule, match: Match) -> Projections:
    """Return the projections of ``q`` and ``k`` and, if they are named, of ``v``.

    Raises
    ------
    CheckpointError
        The configuration does not fit the shapes of the tensors.
    """
    if rule.layout in HEAD_AXES:
        return _with_head_axes(rule, match)
    if rule.sections:
        return _in_sections(config, rule, match)
    layer, _ = config.stage(rule.layers, match.index)
    heads = _head_counts(config, rule, layer)
    _require_matrices(rule, match)
    if rule.layout == "latent":
        return _latent(config, rule, match, heads.query)
    if rule.layout in ("separate", "gated", "convolution"):
        return _separate(config, rule, match, heads, layer)
    return _fused(rule, match, heads)


def _head_counts(config: Config, rule: AttentionRule, layer: int) -> _HeadCounts:
    """Return the numbers of heads of a layer, without pruned heads."""
    heads = config.optional_whole(rule.heads, layer)
    if heads is None and not rule.heads:
        raise CheckpointError(
            "the family file names no key for 'heads', the number of query heads; name a key of "
            "the configuration, or give the number with heads_per_layer=N"
        )
    if heads is None:
        raise CheckpointError(
            f"config.json lacks {' or '.join(rule.heads)}, which the family file names as 'heads'; "
            "correct the key, or give the number of query heads with heads_per_layer=N"
            f"{config.near_whole_numbers(rule.heads[0])}"
        )
    key_heads = config.optional_whole(rule.key_heads, layer)
    pruned = config.pruned_heads(layer) if rule.kind == "self" else 0
    if not pruned:
        return _HeadCounts(heads, key_heads)
    if pruned >= heads or key_heads not in (None, heads):
        raise CheckpointError(
            f"config.json: pruned_heads has {pruned} heads of layer {layer}, "
            f"which has {heads} query heads and {key_heads or heads} key heads; expected fewer, of "
            "layers with as many key heads; correct it"
        )
    return _HeadCounts(heads - pruned, None)


def _require_matrices(rule: AttentionRule, match: Match) -> None:
    """Check that queries, keys, values and outputs have the number of axes of the layout."""
    named = (match.query, match.key, match.weight(rule.value), match.weight(rule.output))
    for tensor in filter(None, named):
        shape = match.tensors[tensor].shape
        dimensions: tuple[int, ...] = (2,)
        if rule.layout == "latent" and tensor != match.query:
            dimensions = (2, 3)  # keys and values may have an axis for the heads
        elif rule.layout == "convolution" and set(shape[2:]) == {1}:
            dimensions = (3, 4)
        if len(shape) not in dimensions or 0 in shape:
            raise CheckpointError(f"{tensor}: must be a matrix, got shape {shape}; {MISFIT}")


def _separate(
    config: Config, rule: AttentionRule, match: Match, heads: _HeadCounts, layer: int
) -> Projections:
    """Return the projections of queries, keys and values with separate tensors.

    One tensor may contain the keys, followed by the values.
    """
    query, key, tensors = match.query, match.key, match.tensors
    value = match.weight(rule.value)
    is_shared = value == key
    rows = tensors[query].shape[0] // (2 if rule.layout == "gated" else 1)
    key_rows = tensors[key].shape[0] // (2 if is_shared else 1)
    if not rule.between:
        _require_head_width(config, match, rows, heads.query)
        if rule.kind == "self" and not config.head_widths:
            _require_all_heads(config, rule, match, rows, heads.query, layer)
    key_heads = heads.key
    if key_heads is None:  # a key head is as wide as a query head
        key_heads = max(1, key_rows * heads.query // rows) if rows else heads.query
    inputs = None
    if rule.layout == "convolution":
        inputs = _inputs_of_convolution(config, match)
    queries = separate(query, tensors[query].shape, heads.query, inputs)
    if rule.layout == "gated":
        half = queries.head_width // 2
        queries = within_heads(query, tensors[query].shape, heads.query, 0, half)
    down = match.weight(rule.query_inner)
    projections: Projections = {
        "q": _composed(config, rule, match, queries, down, rule.query_inner_norm)
    }
    if is_shared:
        head_counts = {"k": key_heads, "v": key_heads}
        keys_and_values = sectioned(key, tensors[key].shape, head_counts, "kv")
        return {**projections, **keys_and_values}
    projections["k"] = separate(key, tensors[key].shape, key_heads, inputs)
    if value:
        value_heads = config.optional_whole(rule.value_heads, layer) or key_heads
        projections["v"] = separate(value, tensors[value].shape, value_heads, inputs)
    return projections


def _require_head_width(config: Config, match: Match, rows: int, heads: int) -> None:
    """Check that the rows of the queries divide into heads of a configured width."""
    widths = config.head_widths
    if widths and rows % heads == 0 and rows // heads not in widths:
        raise CheckpointError(
            f"{match.query}: {rows} rows do not fit {heads} query heads of width "
            f"{' or '.join(map(str, sorted(widths)))} (config.json); is the file one of "
            "several parts, or is the family that of another model?"
        )


def _require_all_heads(
    config: Config, rule: AttentionRule, match: Match, rows: int, heads: int, layer: int
) -> None:
    """Check that no layer lacks heads that the configuration counts.

    Without a configured width, the width of a head is the model's width divided by the number of
    heads. Fewer rows may mean that heads are missing; the rows would then be read as all heads with
    a smaller width.
    """
    hidden = config.optional_whole(("hidden_size",), layer)
    inputs = match.tensors[match.query].shape[-1]
    all_heads = heads + config.pruned_heads(layer)
    has_share = not all(map(PLAIN_KEY.fullmatch, rule.heads))  # other heads are convolutions
    if hidden is None or hidden != inputs or hidden % all_heads or has_share:
        return
    width = hidden // all_heads
    possible_widths = {width, config.optional_whole(HEAD_WIDTHS)}
    if rows >= hidden or rows % heads or rows % width or rows // heads in possible_widths:
        return
    raise CheckpointError(
        f"{match.query}: {rows} rows are {rows // width} heads of width {width}, but config.json "
        f"has {heads} heads; if heads were pruned, list them by layer in its pruned_heads; if "
        "they are narrower, set its head_dim"
    )


def _inputs_of_convolution(config: Config, match: Match) -> int:
    """Return the number of inputs of a convolution; convolutions of images have no groups."""
    shape = match.tensors[match.query].shape
    return config.whole(("hidden_size",)) if len(shape) == 3 else shape[1]


def _fused(rule: AttentionRule, match: Match, heads: _HeadCounts) -> Projections:
    """Return the projections in a fused tensor, or in the keys and values next to the queries."""
    key_heads = heads.key or heads.query
    head_counts = {"q": heads.query, "k": key_heads, "v": key_heads}
    tensors_with_roles = [(match.query, "q"), (match.key, "kv")]
    if rule.fused:
        tensors_with_roles = [(match.query, "qkv")]
    projections: Projections = {}
    for tensor, roles in tensors_with_roles:
        projections |= sectioned(
            tensor,
            match.tensors[tensor].shape,
            head_counts,
            roles,
            blocks=key_heads if rule.layout == "grouped" else 1,
            transposed=rule.layout == "conv1d",
        )
    return projections


# Layouts in which heads have an axis of their own: the axes of heads, R and the model's width, in
# queries, keys and values, and in outputs.
HEAD_AXES = {"stacked": ((0, 2, 1), (0, 1, 2)), "spread": ((1, 2, 0), (1, 2, 0))}


def _with_head_axes(rule: AttentionRule, match: Match) -> Projections:
    """Return the projections of weights with a separate axis for heads."""
    named = {"q": match.query, "k": match.key, "v": match.weight(rule.value)}
    axes = HEAD_AXES[rule.layout][0]
    return {
        role: _with_axes(match, tensor, axes)
        for role, tensor in named.items()
        if tensor is not None
    }


def _with_axes(match: Match, tensor: str, axes: tuple[int, int, int]) -> Projection:
    """Return a projection with ``axes`` of a tensor as the axes of heads, R and inputs.

    Raises
    ------
    CheckpointError
        The tensor does not have three axes.
    """
    shape = match.tensors[tensor].shape
    heads_axis, width_axis, inputs_axis = axes
    if len(shape) != 3 or 0 in shape:
        name_by_axis = {heads_axis: "heads", width_axis: "R", inputs_axis: "D"}
        names = ", ".join(name_by_axis[axis] for axis in range(3))
        raise CheckpointError(f"{tensor}: must be ({names}), got shape {shape}; {MISFIT}")
    return Projection(
        tensor,
        None,
        transposed=False,
        heads=shape[heads_axis],
        head_width=shape[width_axis],
        axes=axes,
    )


def _in_sections(config: Config, rule: AttentionRule, match: Match) -> Projections:
    """Return the projections in a fused tensor whose sections have configured widths."""

    def number(key: str) -> int:
        return 0 if key == REST else config.whole((key,))

    shape = match.tensors[match.query].shape
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{match.query}: must be a matrix, got shape {shape}; {MISFIT}")
    sections = []
    for role, *factors in rule.sections:
        heads = number(factors[0]) or 1
        sections.append((role, heads, math.prod(map(number, factors))))
    blocks = number(rule.section_blocks or "1")
    by_role = sized(match.query, shape[0], sections, blocks)
    return {role: by_role[role] for role in "qkv" if role in by_role}


def _output(
    rule: AttentionRule, match: Match, heads: int, values: Projection | Composed | None
) -> Side | None:
    """Return W_o; its columns are the outputs of the heads, one head after the other."""
    name = match.weight(rule.output)
    if not name:
        return None
    if rule.layout in HEAD_AXES:
        return Side(_with_axes(match, name, HEAD_AXES[rule.layout][1]))
    # Of W_o, the columns belong to heads: stored (in, out), they are rows, and nothing is turned.
    is_stored_in_out = rule.layout == "conv1d"
    shape = match.tensors[name].shape
    if len(shape) < 2 or 0 in shape:
        raise CheckpointError(f"{name}: expected a matrix, got shape {shape}; {MISFIT}")
    inputs = shape[0] if is_stored_in_out else shape[1]
    groups = 0
    if rule.layout == "convolution" and values is not None:
        groups = max(1, values.heads * values.head_width // inputs)
        inputs *= groups
    if inputs % heads:
        raise CheckpointError(f"{name}: {inputs} inputs do not divide into {heads} heads; {MISFIT}")
    projection = Projection(
        name,
        None,
        transposed=not is_stored_in_out,
        heads=heads,
        head_width=inputs // heads,
        groups=groups,
    )
    return Side(projection)


def _composed(
    config: Config,
    rule: AttentionRule,
    match: Match,
    outer: Projection,
    down: str | None,
    norm: tuple[str, ...],
) -> Projection | Composed:
    """Return a projection through the latent of ``down``; without ``down``, of the input.

    Parameters
    ----------
    config, rule, match
        The configuration, the rule, and the layer's tensors.
    outer
        The projection from the latent to the heads.
    down
        Name of the weight that projects the input to the latent; None without a latent.
    norm
        Spellings of the norm of the latent.

    Raises
    ------
    CheckpointError
        The latent has no norm.
    """
    if down is None:
        return outer
    gain = match.part(tuple(f"{name}.weight" for name in norm))
    if gain is None:
        expected = " or ".join(f"{name}.weight" for name in norm)
        raise CheckpointError(
            f"incomplete, {down!r} has no norm after it; expected {expected}; download the "
            "checkpoint again"
        )
    shape = match.tensors[outer.tensor].shape
    rank = shape[1] if outer.axes is None else shape[outer.axes[2]]
    latent_norm = Norm(rule.norm, (gain,), epsilon=_epsilon(config, rule.norm_epsilon, rule.norm))
    inner = Projection(down, ((0, rank),), False, 1, rank)
    bias = _bias_of(down)
    inner_bias = Part(bias, ((0, rank),)) if bias in match.tensors else None
    return Composed(outer, inner, latent_norm, inner_bias)


def _bias_of(weight: str) -> str:
    """Return the name of the bias of a weight."""
    return f"{weight.removesuffix('weight')}bias"


def _latent(config: Config, rule: AttentionRule, match: Match, heads: int) -> Projections:
    """Return the projections of latent attention (DeepSeek-V2).

    Some dimensions of each head are content, projected from the latent. The remaining dimensions
    are for positions; for keys, they are projected from the input and shared by all heads. The
    content is the form; positions are separate, as ``q_position`` and ``k_position``, because they
    have no single distance.

    Raises
    ------
    CheckpointError
        The widths do not fit the tensors, or a projection from the latent has a bias.
    """
    query, key, tensors = match.query, match.key, match.tensors
    key_down = match.weight(rule.key_inner)
    if key_down is None:
        raise CheckpointError(
            f"incomplete, {key!r} is there, but what comes before it is not; "
            f"expected {rule.key_inner[0].replace('{layer}', str(match.index[0]))!r}; download the "
            "checkpoint again"
        )
    for tensor in (query, key):
        if _bias_of(tensor) in tensors:
            raise CheckpointError(
                f"{_bias_of(tensor)}: a bias after the latent is not read; expected none, or "
                "biases of the projections to the latents; use another family (family=NAME)"
            )
    rank = tensors[key].shape[1]
    content, position = _latent_widths(config, rule, tensors[key_down].shape[0], rank, key_down)
    query_down = match.weight(rule.query_inner)

    def of_query(start: int, stop: int) -> Projection | Composed:
        outer = within_heads(query, tensors[query].shape, heads, start, stop)
        return _composed(config, rule, match, outer, query_down, rule.query_inner_norm)

    def of_key(outer: Projection) -> Projection | Composed:
        return _composed(config, rule, match, outer, key_down, rule.key_inner_norm)

    projections: Projections = {"q": of_query(0, content)}
    if len(tensors[key].shape) == 3:  # (heads, C, R), without values
        projections["k"] = of_key(_with_axes(match, key, (0, 2, 1)))
        value = match.weight(rule.value)
        if value:
            projections["v"] = of_key(_with_axes(match, value, (0, 1, 2)))
    else:
        head_rows = tensors[key].shape[0] // heads
        for role, start, stop in (("k", 0, content), ("v", content, head_rows)):
            outer = within_heads(key, tensors[key].shape, heads, start, stop)
            projections[role] = of_key(outer)
    if position:
        projections["q_position"] = of_query(content, content + position)
        rows = ((rank, rank + position),)
        projections["k_position"] = Projection(key_down, rows, False, heads=1, head_width=position)
    return projections


def _latent_widths(
    config: Config, rule: AttentionRule, outputs: int, rank: int, key_down: str
) -> tuple[int, int]:
    """Return the widths of a head's content and position.

    ``outputs`` is the number of outputs of the projection to the latent of width ``rank``.
    """
    content = config.whole((rule.content_width,))
    has_none = config.get(rule.position_width) == 0
    position = 0 if has_none else config.whole((rule.position_width,))
    if position and outputs == rank:  # a layer without positions
        content, position = content + position, 0
    if outputs != rank + position:
        raise CheckpointError(
            f"{key_down}: must have {rank} outputs for the latent and {position} "
            f"for positions, got {outputs}; {MISFIT}"
        )
    return content, position
