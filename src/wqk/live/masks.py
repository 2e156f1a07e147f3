"""Which pairs of tokens the mask hides that an attention was called with: conventions as a table.

What a mask means depends on who wrote the attention: `transformers` says by the name of its
implementation, PyTorch's own attention by the argument. A mask of no known convention is not
guessed at.

Axes: B sequences, H query heads, N tokens (I queries, J keys), W windows of a picture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from wqk.errors import CheckpointError
from wqk.live.listening import AttentionCall, is_pytorch_s

# Masks add less than this to the scores of hidden keys; models use -10,000 or less.
HIDDEN = -5e3

# Names under which models pass masks to their attention.
ARGUMENTS = ("attention_mask", "mask", "attn_mask", "encoder_attention_mask")


class Convention(NamedTuple):
    """What a mask of some axes and type means."""

    whose: tuple[str, ...]  # implementations of transformers, or families; none for all
    axes: int
    boolean: bool | None  # or numbers; None for either
    read: Callable[[Any, int], Any]  # from the mask and B to four axes: True visible, or added


def _windows(mask: Any, batch: int) -> Any:
    """(W, I, J) for each of B/W pictures, or (B · H, I, J), with four axes."""
    if batch % len(mask) == 0:
        return mask.repeat(batch // len(mask), 1, 1)[:, None]
    return mask.unflatten(0, (batch, -1))


CONVENTIONS = (
    Convention(("deberta", "deberta-v2"), 4, False, lambda mask, batch: mask.bool()),  # 1: visible
    Convention(("mpt",), 4, True, lambda mask, batch: ~mask),  # True: hidden
    Convention(("sdpa",), 4, True, lambda mask, batch: mask),  # True: visible
    Convention((), 4, False, lambda mask, batch: mask),  # added to the scores
    Convention((), 3, False, _windows),  # added
    Convention(
        (), 2, None, lambda mask, batch: mask.bool()[:, None, None]
    ),  # (B, J): 1 for a token
)


def mask_of(call: AttentionCall, x: Any, y: Any) -> Any:
    """The mask that a block was called with, with the axes (B, H, I, J), of which each may be 1.

    True where a key is visible, or what is added to the scores; None if it got none. ``x`` and
    ``y`` are the inputs of queries and keys, (B, N, D). `CheckpointError` if it is of no known
    convention.
    """
    import torch

    (batch, queries, _), keys = x.shape, y.shape[1]
    if is_pytorch_s(call.module):
        return _of_pytorch(call, batch)
    mask: Any = next((m for n in ARGUMENTS if (m := call.arguments.get(n)) is not None), None)
    if mask is None:
        return _packed(call, queries, keys)
    if hasattr(mask, "mask_mod"):  # of FlexAttention
        at, to = (torch.arange(n, device=x.device) for n in (queries, keys))
        numbers = torch.arange(batch, device=x.device)
        rows = [mask.mask_mod(number, 0, at[:, None], to) for number in numbers]
        return torch.stack(rows)[:, None]
    implementation = getattr(getattr(call.module, "config", None), "_attn_implementation", "")
    whose, is_boolean = {implementation, call.plan.family}, mask.dtype == torch.bool
    for convention in CONVENTIONS if mask.shape[-1] == keys else ():
        known = not convention.whose or not whose.isdisjoint(convention.whose)
        if known and mask.ndim == convention.axes and convention.boolean in (None, is_boolean):
            return convention.read(mask, batch)
    kind = f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
    raise CheckpointError(f"mask unknown: {kind} for {implementation or 'its own'} attention")


def shown(mask: Any) -> Any:
    """Where a mask lets pairs through."""
    return mask if str(mask.dtype) == "torch.bool" else mask > HIDDEN


def _of_pytorch(call: AttentionCall, batch: int) -> Any:
    """Of `nn.MultiheadAttention`, to which True is hidden: (B, J); (I, J) or (B · H, I, J)."""
    padding, mask = call.arguments.get("key_padding_mask"), call.arguments.get("attn_mask")
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (batch, -1))
        mask = mask if mask.is_floating_point() else ~mask
    if padding is None:
        return mask
    padding = (padding if padding.is_floating_point() else ~padding)[:, None, None]
    return padding if mask is None else shown(mask) & shown(padding)


def _packed(call: AttentionCall, queries: int, keys: int) -> Any:
    """Of texts in one row, each numbered from 0; None if there are none."""
    import torch

    packed: Any = call.arguments.get("position_ids")
    is_packed = isinstance(packed, torch.Tensor) and packed.shape[1:] == (queries,)
    if not is_packed or call.arguments.get("past_key_values") is not None or queries != keys:
        return None
    text = (packed.diff(dim=1, prepend=packed[:, :1] - 1) != 1).cumsum(1)
    return text[:, None, :, None] == text[:, None, None, :]
