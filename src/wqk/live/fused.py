"""Fused kernels of attention; arguments are recognized by name.

Kernels of PyTorch, kernels of flash attention from any package, and FlexAttention do not return
scores. Their queries, keys, mask and scale are arguments, and the operation's schema contains the
names of arguments.

Axes: B sequences, H query heads, G key heads, N tokens (I queries, J keys), T tokens of all
sequences in one row, R head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from wqk.live.calls import Band, ObservedCall, RunningModule

if TYPE_CHECKING:
    import torch

QUERY, KEY, VALUE = ("query", "q"), ("key", "k"), ("value", "v")
MASK = ("attn_mask", "attn_bias", "bias", "mask")
CAUSAL = ("is_causal", "causal")
SCALE = ("scale", "softmax_scale", "sm_scale", "scaling")
LENGTHS_OF_QUERIES = ("cu_seqlens_q", "cum_seq_q", "cu_seq_lens_q")
LENGTHS_OF_KEYS = ("cu_seqlens_k", "cum_seq_k", "cu_seq_lens_k")
# Arguments that only kernels of a backward pass have.
OF_BACKWARD = ("grad_out", "dout", "grad_output")
# Arguments of kernels whose keys lie in pages.
OF_PAGES = ("block_table", "page_table")
# Kernels of PyTorch whose heads come before tokens.
HEADS_FIRST = "aten::_scaled_dot_product"

FLEX = "flex_attention"


@cache
def is_kernel(operation: Any) -> bool:
    """Return whether an operation is a fused attention, by its schema.

    Examples
    --------
    >>> import torch
    >>> is_kernel(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default)
    True
    >>> is_kernel(torch.ops.aten.bmm.default)
    False
    """
    schema = getattr(operation, "_schema", None)
    if schema is None:
        return False
    names = {argument.name for argument in schema.arguments}
    has_sides = all(names.intersection(side) for side in (QUERY, KEY, VALUE))
    has_scale = not names.isdisjoint(SCALE)
    is_backward = not names.isdisjoint(OF_BACKWARD)
    is_named = "attention" in schema.name or not schema.name.startswith("aten::")
    return has_sides and has_scale and is_named and not is_backward


def kernel_calls(
    operation: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: tuple[RunningModule, ...],
) -> Iterator[ObservedCall]:
    """Yield the attention of a fused kernel, a call for each text of a packed row."""
    schema = operation._schema
    names = [argument.name for argument in schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if _first(arguments, OF_PAGES) is not None:
        return
    query, key = _first(arguments, QUERY).detach(), _first(arguments, KEY).detach()
    mask = _four_axes(_first(arguments, MASK))
    scale = _first(arguments, SCALE)
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    is_causal = bool(_first(arguments, CAUSAL))
    if schema.name == "aten::_efficient_attention_forward":
        is_causal = bool(arguments["custom_mask_type"])
    if schema.name.startswith(HEADS_FIRST):
        yield ObservedCall(
            operation=schema.name,
            modules=modules,
            queries=query,
            keys=key,
            scale=scale,
            mask=mask,
            band=Band(None, 0) if is_causal else None,  # the first query sees the first key
        )
        return
    softcap = arguments.get("softcap") or arguments.get("logits_soft_cap") or None
    for queries, keys in _texts(arguments, query, key):
        offset = keys.shape[-2] - queries.shape[-2]
        yield ObservedCall(
            operation=schema.name,
            modules=modules,
            queries=queries,
            keys=keys,
            scale=scale,
            softcap=softcap,
            mask=mask,
            band=_band(arguments, is_causal, offset),
            slopes=_slopes(arguments.get("alibi_slopes")),
        )


def flex_call(args: Sequence[Any], modules: tuple[RunningModule, ...]) -> ObservedCall:
    """Return the attention of FlexAttention's higher-order operation."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    query, key, _, score_mod, block_mask, scale, _, *buffers = args
    mask_mod = block_mask[-1]
    # Tensors that the two functions have captured are passed to them after the indices.
    score_buffers = buffers[0] if len(buffers) > 0 else ()
    mask_buffers = buffers[1] if len(buffers) > 1 else ()
    change = _vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(score_buffers))
    show = _vmap_for_bhqkv(mask_mod, prefix=(), suffix=(None,) * len(mask_buffers))

    def change_score(scores: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        with TransformGetItemToIndex():
            changed: torch.Tensor = change(scores, *indices, *score_buffers)
        return changed

    def show_pair(*indices: torch.Tensor) -> torch.Tensor:
        with TransformGetItemToIndex():
            shown: torch.Tensor = show(*indices, *mask_buffers)
        return shown

    return ObservedCall(
        operation=FLEX,
        modules=modules,
        queries=query.detach(),
        keys=key.detach(),
        scale=float(scale),
        change_score=change_score,
        show_pair=show_pair,
    )


def _first(arguments: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the first argument with one of these names; None if all are missing or None."""
    for name in names:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def _four_axes(mask: Any) -> Any:
    """Return a mask with the axes (B, H, I, J); each axis may have length 1."""
    if mask is None:
        return None
    mask = mask.detach()
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _slopes(slopes: Any) -> Any:
    """Slopes of linear biases, (1 or B, H)."""
    if slopes is None:
        return None
    return slopes.detach()[None] if slopes.ndim == 1 else slopes.detach()


def _band(arguments: Mapping[str, Any], is_causal: bool, offset: int) -> Band | None:
    """Return the keys that a query sees by a window and causality; None if it sees all keys."""
    window = arguments.get("window_size")
    if isinstance(window, list | tuple):
        back, ahead = window
    else:
        back = arguments.get("window_size_left", -1)
        ahead = arguments.get("window_size_right", -1)
    # A negative number stands for no limit.
    back = None if back is None or back < 0 else int(back)
    ahead = None if ahead is None or ahead < 0 else int(ahead)
    if is_causal:
        ahead = 0
    return None if back is None and ahead is None else Band(back, ahead, offset)


def _texts(
    arguments: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield queries and keys (B, H, N, R) of each text.

    Parameters
    ----------
    arguments
        Arguments of the kernel. Cumulative lengths, from 0 to T, are the bounds of packed texts.
    query, key
        (B, N, H, R); or (T, H, R) if texts are packed.
    """
    query_lengths = _first(arguments, LENGTHS_OF_QUERIES)
    key_lengths = _first(arguments, LENGTHS_OF_KEYS)
    if query_lengths is None:
        yield query.transpose(1, 2), key.transpose(1, 2)
        return
    if query.ndim == 4:
        query, key = query.flatten(0, 1), key.flatten(0, 1)
    query_bounds = pairwise(query_lengths.tolist())
    key_bounds = pairwise(key_lengths.tolist())
    for (query_start, query_stop), (key_start, key_stop) in zip(
        query_bounds, key_bounds, strict=True
    ):
        if query_stop > query_start and key_stop > key_start:
            queries = query[query_start:query_stop].transpose(0, 1)[None]
            keys = key[key_start:key_stop].transpose(0, 1)[None]
            yield queries, keys
