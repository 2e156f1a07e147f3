"""Inputs and outputs of a running model's attention, in a pass with gradients.

Attention runs as plain matrix products (``eager``) and returns its probabilities. This tensor is
multiplied with the values, so that ∂loss/∂α can be computed.

Axes: B examples, H query heads, N tokens (I queries), R head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple

from wqk.checkpoints.adapters import module_of
from wqk.errors import TheoryError
from wqk.families import AttentionPlan
from wqk.live.listening import AttentionCall, Listener


class BlockUses(NamedTuple):
    """All uses of one block in a pass; several if layers share weights."""

    uses: list[AttentionCall]
    mixed: list[Any]  # what W_o is given: the heads' Σ_j α_ij v_j side by side, (B, I, H · R)


@contextmanager
def attention_recorded(model: Any, plans: Sequence[AttentionPlan]) -> Iterator[list[BlockUses]]:
    """Record the blocks of these plans in every pass of a `transformers` model.

    Within the context the model is in evaluation mode with gradients; afterwards the mode is
    restored.
    """
    import torch

    records = [BlockUses([], []) for _ in plans]
    uses = {plan.place: record.uses for plan, record in zip(plans, records, strict=True)}

    def heard(call: AttentionCall) -> None:
        if {"query", "key"} <= call.inputs.keys() and call.attention is not None:
            uses[call.plan.place].append(call)

    listener = Listener(model, plans, heard)
    asking = {"output_attentions": True}
    handles = [
        model.register_forward_pre_hook(
            lambda module, args, kwargs: (args, kwargs | asking), with_kwargs=True
        )
    ]
    for plan, record in zip(plans, records, strict=True):
        if plan.output:
            output = model.get_submodule(module_of(plan.output.tensor))
            handles.append(
                output.register_forward_pre_hook(
                    lambda module, args, record=record: record.mixed.append(args[0])
                )
            )
    training = model.training
    model.eval()
    try:
        with torch.enable_grad(), _plain_implementations(model):
            yield records
    finally:
        listener.stop()
        for handle in handles:
            handle.remove()
        model.train(training)


def require_records(
    model: Any, plans: Sequence[AttentionPlan], records: Sequence[BlockUses]
) -> None:
    """Check that every block has reported the attention that multiplies the values.

    Raises `TheoryError` with the first layer that did not run, or did not report its attention.
    """
    for plan, record in zip(plans, records, strict=True):
        if not record.uses or not all(use.attention.requires_grad for use in record.uses):
            raise TheoryError(
                f"{type(model).__name__}: layer {plan.layer} of the {plan.stack} "
                f"({plan.kind}-attention) reports no attention that gradients flow through; "
                "leave its layer out"
            )


@contextmanager
def _plain_implementations(model: Any) -> Iterator[None]:
    """Run attention that reports its probabilities, and experts of any precision, in all parts."""
    names = ("_attn_implementation", "_experts_implementation")
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = []
    for config, name in product(configs.values(), names):
        before.append((config, name, getattr(config, name, None)))
        setattr(config, name, "eager")
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)
