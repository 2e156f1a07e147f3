"""Fused kernels of attention, read by the names of their arguments.

PyTorch's own kernels, those of flash attention under whatever package registers them, and
FlexAttention do not return scores. Their queries, keys, mask and scale are arguments, whose names
the operation's schema contains.

Axes: B sequences, H query heads, G key heads, N tokens (I queries, J keys), T tokens of all
sequences in one row, R head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
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
# Arguments of kernels of a backward pass, and of those whose keys lie in pages.
OF_BACKWARD, OF_PAGES = ("grad_out", "dout", "grad_output"), ("block_table", "page_table")
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
    is_named = "attention" in schema.name or not schema.name.startswith("aten::")
    return (
        has_sides and is_named and names.isdisjoint(OF_BACKWARD) and bool(names.intersection(SCALE))
    )


def kernel_calls(
    operation: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    modules: tuple[RunningModule, ...],
) -> Iterator[ObservedCall]:
    """Return the attention of a fused kernel; one call for each text of a packed row."""
    schema = operation._schema
    arguments = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    arguments |= kwargs
    query, key = _first(arguments, QUERY), _first(arguments, KEY)
    if _first(arguments, OF_PAGES) is not None:
        return
    scale = _first(arguments, SCALE)
    name, causal = schema.name, bool(_first(arguments, CAUSAL))
    if schema.name == "aten::_efficient_attention_forward":
        causal = bool(arguments["custom_mask_type"])
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    if name.startswith(HEADS_FIRST):
        band = Band(None, 0) if causal else None  # the first query sees the first key
        mask = _four_axes(_first(arguments, MASK))
        yield ObservedCall(
            operation=name,
            modules=modules,
            queries=query.detach(),
            keys=key.detach(),
            scale=scale,
            mask=mask,
            band=band,
        )
        return
    window = _window(arguments, causal)
    softcap = arguments.get("softcap") or arguments.get("logits_soft_cap") or None
    for queries, keys in _texts(arguments, query.detach(), key.detach()):
        offset = keys.shape[-2] - queries.shape[-2]
        yield ObservedCall(
            operation=name,
            modules=modules,
            queries=queries,
            keys=keys,
            scale=scale,
            softcap=softcap,
            mask=_four_axes(_first(arguments, MASK)),
            band=None if window is None else Band(*window, offset),
            slopes=_slopes(arguments.get("alibi_slopes")),
        )


def flex_call(args: Sequence[Any], modules: tuple[RunningModule, ...]) -> ObservedCall:
    """Return the attention of FlexAttention's higher-order operation."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    query, key, _, score_mod, block_mask, scale, _, *buffers = args
    of_score, of_mask = (*buffers, (), ())[:2]
    change = _vmap_for_bhqkv(score_mod, prefix=(0,), suffix=(None,) * len(of_score))
    show = _vmap_for_bhqkv(block_mask[-1], prefix=(), suffix=(None,) * len(of_mask))

    def change_score(scores: torch.Tensor, *indices: torch.Tensor) -> torch.Tensor:
        with TransformGetItemToIndex():
            changed: torch.Tensor = change(scores, *indices, *of_score)
        return changed

    def show_pair(*indices: torch.Tensor) -> torch.Tensor:
        with TransformGetItemToIndex():
            shown: torch.Tensor = show(*indices, *of_mask)
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


def _first(given: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Return the argument of one of some names; None without one."""
    return next((given[name] for name in names if given.get(name) is not None), None)


def _four_axes(mask: Any) -> Any:
    """Return a mask with the axes (B, H, I, J), each of which may be 1."""
    if mask is None:
        return None
    mask = mask.detach()
    return mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))


def _slopes(slopes: Any) -> Any:
    """Slopes of linear biases, (1 or B, H)."""
    if slopes is None:
        return None
    return slopes.detach()[None] if slopes.ndim == 1 else slopes.detach()


def _window(given: Mapping[str, Any], causal: bool) -> tuple[int | None, int | None] | None:
    """Tokens that a query sees behind and ahead of it; None if all."""
    pair = given.get("window_size")
    if isinstance(pair, list | tuple):
        back, ahead = pair
    else:
        back, ahead = given.get("window_size_left", -1), given.get("window_size_right", -1)
    back = None if back is None or back < 0 else int(back)
    ahead = None if ahead is None or ahead < 0 else int(ahead)
    if causal:
        ahead = 0
    return None if back is None and ahead is None else (back, ahead)


def _texts(
    given: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield queries and keys (B, H, N, R) of (B, N, H, R), or of (T, H, R) and ends of texts."""
    ends = _first(given, LENGTHS_OF_QUERIES), _first(given, LENGTHS_OF_KEYS)
    if ends[0] is None:
        yield query.transpose(1, 2), key.transpose(1, 2)
        return
    if query.ndim == 4:
        query, key = query.flatten(0, 1), key.flatten(0, 1)
    of_queries, of_keys = (end.tolist() for end in ends)
    for start, stop, first, last in zip(
        of_queries[:-1], of_queries[1:], of_keys[:-1], of_keys[1:], strict=True
    ):
        if stop > start and last > first:
            yield (
                query[start:stop].transpose(0, 1)[None],
                key[first:last].transpose(0, 1)[None],
            )
