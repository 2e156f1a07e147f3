"""Roles of tensors outside the forms: part of attention, of another mixer of tokens, or neither.

The role follows from the name, and from the names of the tensors that blocks read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from wqk.checkpoints import Part, TensorInfo
from wqk.families import AttentionPlan, Composed, Projection
from wqk.families.naming import without_numbers
from wqk.model import Model
from wqk.sameness.circuits import form_parts
from wqk.sameness.tensor_comparisons import ATTENTION, MIXER, OTHER
from wqk.sameness.tensor_names import layer_prefix

# Modules that mix tokens without a softmax.
MIXERS = re.compile(
    r"mamba|ssm|linear_?att|conv|mixer|rg_?lru|recurrent|temporal_block|time_?mix|delta_?net|"
    r"retention|lightning|rwkv|hyena|fourier|hgrn|xlstm|mlstm|slstm"
)
# Names of tensors of attention: of its modules, of positions in its scores, of virtual keys.
ATTENDING = re.compile(
    r"(?<!post_)att(?:n|ention)(?!_?pool)|(?:^|[._])(?:sinks?|temperature|logit_scale|rel|relative|rpe|pos|"
    r"position|positions|alibi|slopes?|positional)(?:[._]|$)"
)
# Tables and counters that a library stores with the weights, and computes when a model is loaded.
BUFFERS = re.compile(
    r"(?:^|\.)(?:inv_freq|original_inv_freq|rope_freqs(?:\.weight)?|position_ids|masked_bias|"
    r"num_batches_tracked|n_averaged|token_type_ids|relative_position_index|_extra_state)$"
)
# Masks, which are computed too; biases of the same name have fewer axes.
MASKS = re.compile(r"(?:^|\.)attn\.bias$")
MASK_AXES = 4
# Scales of quantized weights, after the weight's name.
SCALE_OF_WEIGHT = re.compile(r"_scale(?:_inv)?$")
FEED_FORWARD = re.compile(r"(?:^|[._])(?:mlp|ffn|ff|feed_forward|experts?|moe)(?:[._]|$)")

RowRange = tuple[int, int]


def _child(name: str) -> str:
    """Return the first word of a name below its layer."""
    return name.removeprefix(layer_prefix(name)).partition(".")[0]


def _module(plan: AttentionPlan) -> str:
    """Return the common prefix of the names of a block's tensors; empty if it ends in the layer."""
    sides = [side for side in (plan.query, plan.key, plan.value, plan.output) if side is not None]
    paths = [side.tensor.split(".")[:-2] for side in sides]
    shared: list[str] = []
    for level in zip(*paths, strict=False):
        if len(set(level)) > 1:
            break
        shared.append(level[0])
    if not shared or shared[-1].isdigit() or shared[-1] == "model":
        return ""
    return f"{'.'.join(shared)}."


# -- roles -------------------------------------------------------------------------------------


class _Names(NamedTuple):
    """Names that identify tensors of attention.

    Attributes
    ----------
    formed, mixing
        Tensors of forms, and tensors that other mixers of tokens read.
    modules
        Prefixes of the names of all modules of attention.
    layers
        Prefixes of the names of all layers with attention.
    layer_kinds
        Prefixes of the layers, without their numbers.
    children
        First words below the layer, of all tensors of these layers.
    formed_children
        First words below the layer, of tensors of forms.
    """

    formed: frozenset[str]
    mixing: frozenset[str]
    modules: tuple[str, ...]
    layers: frozenset[str]
    layer_kinds: frozenset[str]
    children: frozenset[str]
    formed_children: frozenset[str]


def roles(model: Model) -> dict[str, str]:
    """Return the role of every tensor outside the forms: ``attention``, ``mixer`` or ``other``.

    Tensors of forms, buffers, and scales of quantized weights have no role.
    """
    tensors = model.checkpoint.tensors()
    names = _names(model)
    return {
        name: _role(name, names)
        for name in tensors
        if name not in names.formed and not _is_derived(name, tensors)
    }


def _names(model: Model) -> _Names:
    """Collect the names that identify a model's tensors of attention."""
    tensors = model.checkpoint.tensors()
    formed = frozenset(names_in_forms(model.plans))
    modules = {_module(plan) for plan in model.plans}
    modules |= {f"{name.rpartition('.')[0]}." for name in _unread(model)}
    modules -= {""}
    layers = frozenset(layer_prefix(name) for name in modules) - {""}
    return _Names(
        formed=formed,
        mixing=frozenset(names_in_forms(model.mixers)),
        modules=tuple(sorted(modules)),
        layers=layers,
        layer_kinds=frozenset(map(without_numbers, layers)),
        children=frozenset(_child(name) for name in tensors if layer_prefix(name) in layers),
        formed_children=frozenset(map(_child, formed)),
    )


def _unread(model: Model) -> list[str]:
    """Return tensors with names of queries that no block reads."""
    spellings = set(model.unread)
    return [
        name
        for name in model.checkpoint.tensors()
        if without_numbers(name.removesuffix(".weight")) in spellings
    ]


def _is_derived(name: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether a tensor is a buffer, a mask, or a scale of a quantized weight."""
    if BUFFERS.search(name):
        return True
    if MASKS.search(name) and len(tensors[name].shape) == MASK_AXES:
        return True
    weight = SCALE_OF_WEIGHT.sub("", name)
    return weight != name and weight in tensors


def _role(name: str, names: _Names) -> str:
    """Return the role of a tensor outside the forms."""
    layer = layer_prefix(name)
    child = _child(name)
    lies_in_attention = name.startswith(names.modules)
    feeds_forward = FEED_FORWARD.search(name) is not None
    is_named_mixer = MIXERS.search(name.lower()) is not None
    # Layers of the same stack, in which no block of attention was found.
    lacks_attention = layer not in names.layers and without_numbers(layer) in names.layer_kinds
    # Modules that layers with attention do not have, or have for attention.
    replaces_attention = child not in names.children or child in names.formed_children
    if name in names.mixing or (lacks_attention and replaces_attention):
        return MIXER
    if is_named_mixer and not (lies_in_attention or feeds_forward):
        return MIXER
    is_named_attention = ATTENDING.search(name.lower()) is not None and not feeds_forward
    if lies_in_attention or is_named_attention:
        return MIXER if lacks_attention else ATTENTION
    return OTHER


def names_in_forms(plans: Iterable[AttentionPlan]) -> list[str]:
    """Return the distinct names of the tensors in the forms of some blocks."""
    names: dict[str, None] = {}
    for plan in plans:
        names |= dict.fromkeys(part.name for part in form_parts(plan))
    return [*names]


# -- rows of tensors of forms ------------------------------------------------------------------


def parts_outside_forms(model: Model) -> Iterator[Part]:
    """Yield the rows of tensors of forms that are in no form, such as gates next to queries."""
    tensors = model.checkpoint.tensors()
    rows: dict[str, list[RowRange]] = {}
    columns: dict[str, list[RowRange]] = {}
    for plan in model.plans:
        for part in form_parts(plan):
            rows.setdefault(part.name, []).extend(part.row_ranges(tensors[part.name].shape))
        for projection in _transposed_projections(plan):
            columns.setdefault(projection.tensor, []).extend(projection.outputs or ())
    for name, ranges in rows.items():
        shape = tensors[name].shape
        if not shape:
            continue
        if name in columns:  # the tensor is read whole, and used by columns
            if _gaps(columns[name], shape[-1]):
                yield Part(name)
            continue
        gaps = _gaps(ranges, shape[0])
        if gaps:
            yield Part(name, gaps)


def _transposed_projections(plan: AttentionPlan) -> Iterator[Projection]:
    """Yield the projections of a block whose outputs are some columns of a stored tensor."""
    for side in (plan.query, plan.key, plan.value if plan.output else None):
        if side is None:
            continue
        projection = side.projection
        factors = [projection]
        if isinstance(projection, Composed):
            factors = [projection.outer, projection.inner]
        for factor in factors:
            if isinstance(factor, Projection) and factor.transposed and factor.outputs:
                yield factor


def _gaps(ranges: Sequence[RowRange], length: int) -> tuple[RowRange, ...]:
    """Return the half-open ranges of a length that some ranges leave out.

    Examples
    --------
    >>> _gaps([(0, 2), (4, 6)], 8)
    ((2, 4), (6, 8))
    """
    gaps: list[RowRange] = []
    end = 0
    for start, stop in sorted(ranges):
        if start > end:
            gaps.append((end, start))
        end = max(end, stop)
    if end < length:
        gaps.append((end, length))
    return tuple(gaps)
