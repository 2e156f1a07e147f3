"""What every tensor of a model is to its attention: part of a form, beside one, or neither.

Tensors of forms are compared as forms. The rest of an attention module (learned position terms,
temperatures, gates), and the mixers of layers without attention (linear attention, convolutions,
state spaces), are compared as they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import takewhile

from wqk.checkpoints import Part, TensorInfo
from wqk.comparing.weights import CIRCUITS, sides_of
from wqk.families import AttentionPlan, Composed, Projection
from wqk.families.inference import without_numbers
from wqk.model import Model

ATTENTION, MIXER, OTHER = "attention", "mixer", "other"

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
# What a library keeps beside weights, and makes anew: tables, counters; and masks of four axes.
BUFFERS = re.compile(
    r"(?:^|\.)(?:inv_freq|original_inv_freq|rope_freqs(?:\.weight)?|position_ids|masked_bias|"
    r"num_batches_tracked|token_type_ids|relative_position_index|_extra_state)$"
)
MASKS = re.compile(r"(?:^|\.)attn\.bias$")
# Scales of quantized weights, after the weight's name.
QUANTIZED = re.compile(r"_scale(?:_inv)?$")
FEED_FORWARD = re.compile(r"(?:^|[._])(?:mlp|ffn|ff|feed_forward|experts?|moe)(?:[._]|$)")


def form_parts(plan: AttentionPlan) -> Iterator[Part]:
    """Everything that the forms of a block hold: its scores', its values', and norms before."""
    for circuit in CIRCUITS:
        yield from circuit_parts(plan, circuit)
    if plan.sinks is not None:
        yield plan.sinks


def circuit_parts(plan: AttentionPlan, circuit: str) -> Iterator[Part]:
    """What the forms of one circuit hold, and norms before."""
    for side in sides_of(plan, circuit):
        is_output = side is plan.output
        yield from side.projection.roles.values() if is_output else side.parts
        if side.input_norm is not None and not is_output:
            yield from (*side.input_norm.gain, *side.input_norm.bias)


def left_in(model: Model) -> Iterator[Part]:
    """The rows of tensors of forms that no form holds, such as gates beside queries."""
    tensors, rows = model.checkpoint.tensors(), dict[str, list[tuple[int, int]]]()
    columns: dict[str, list[tuple[int, int]]] = {}
    for plan in model.plans:
        for part in form_parts(plan):
            rows.setdefault(part.name, []).extend(part.row_ranges(tensors[part.name].shape))
        for side in (plan.query, plan.key, plan.value if plan.output else None):
            projections = [] if side is None else [side.projection]
            for one in projections:
                for half in (one.outer, one.inner) if isinstance(one, Composed) else (one,):
                    if isinstance(half, Projection) and half.transposed and half.outputs:
                        columns.setdefault(half.tensor, []).extend(half.outputs)
    for name, ranges in rows.items():
        shape = tensors[name].shape
        if name in columns and shape:  # read whole, used by columns
            if _gaps(columns[name], shape[-1]):
                yield Part(name)
        elif shape and (gaps := _gaps(ranges, shape[0])):
            yield Part(name, gaps)


def _gaps(ranges: list[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """What half-open ranges leave of a length.

    Examples
    --------
    >>> _gaps([(0, 2), (4, 6)], 8)
    ((2, 4), (6, 8))
    """
    found, end = [], 0
    for start, stop in sorted(ranges):
        if start > end:
            found.append((end, start))
        end = max(end, stop)
    return (*found, *(((end, length),) if end < length else ()))


def roles(model: Model) -> dict[str, str]:
    """Of every tensor outside the forms: ``attention``, ``mixer`` or ``other``."""
    tensors = model.checkpoint.tensors()
    formed = {part.name for plan in model.plans for part in form_parts(plan)}
    mixing = {part.name for plan in model.mixers for part in form_parts(plan)}
    modules = {_module(plan) for plan in model.plans} - {""}
    modules |= {name.rpartition(".")[0] + "." for name in _unread(model, tensors)}
    layers = {match[0] for name in modules if (match := re.match(r".*?\.\d+\.", name))}
    kinds = {without_numbers(layer) for layer in layers}
    fed = {_child(name, _layer(name)) for name in formed}
    usual = {_child(name, layer) for name in tensors for layer in [_layer(name)] if layer in layers}
    found = {}
    for name in tensors:
        scaled = QUANTIZED.sub("", name)
        is_mask = MASKS.search(name) and len(tensors[name].shape) == 4
        made = BUFFERS.search(name) or is_mask
        if name in formed or made or (scaled != name and scaled in tensors):
            continue  # part of a form, made anew, or a scale that reading applies
        layer = _layer(name)
        own = name.startswith(tuple(modules)) if modules else False
        apart = layer not in layers and without_numbers(layer) in kinds
        feeds = FEED_FORWARD.search(name) is not None
        mixes = MIXERS.search(name.lower()) and not own and not feeds
        strange = _child(name, layer) not in usual or _child(name, layer) in fed
        if mixes or name in mixing or (apart and strange):
            found[name] = MIXER
        elif own or (ATTENDING.search(name.lower()) and not feeds):
            found[name] = MIXER if apart else ATTENTION
        else:
            found[name] = OTHER
    return found


def _unread(model: Model, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Tensors that look like queries, but that no block reads."""
    spellings = set(model.unread)
    return [n for n in tensors if without_numbers(n.removesuffix(".weight")) in spellings]


def _layer(name: str) -> str:
    """A name up to its first number."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""


def _child(name: str, layer: str) -> str:
    return name.removeprefix(layer).partition(".")[0]


def _module(plan: AttentionPlan) -> str:
    """What the names of a block's tensors have in common below their layer; or nothing."""
    sides = [side for side in (plan.query, plan.key, plan.value, plan.output) if side is not None]
    paths = [side.tensor.split(".")[:-2] for side in sides]
    together = takewhile(lambda some: len(set(some)) == 1, zip(*paths, strict=False))
    path = ".".join(some[0] for some in together)
    last = path.rpartition(".")[2]
    return "" if not path or last.isdigit() or last in ("", "model") else f"{path}."
