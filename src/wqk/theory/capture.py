"""What a running model's attention is given and gives, in a pass that gradients flow through.

Attention is run as plain matrix products (``eager``) and hands out its probabilities. What it hands
out is the tensor that meets the values, so that ∂loss/∂α can be asked of it.

Axes: B examples, H query heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.attention import attention_plans
from wqk.attention.verification.recording import shared_path
from wqk.errors import TheoryError
from wqk.families import Composed

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan

# How far beyond 1 a row of probabilities may sum, in half precision.
ROUNDING = 1e-2


class Attended(NamedTuple):
    """One use of one block's attention, as PyTorch tensors in the graph of the pass."""

    query_input: Any  # (B, I, D), what is projected to queries
    key_input: Any  # (B, J, D)
    value_input: Any  # (B, J, D), another than the key's where positions are added to that
    attention: Any  # α, (B, H, I, J) or (B · H, I, J), as the model has it


class Record(NamedTuple):
    """All uses of one block in a pass: one, unless layers share their weights."""

    uses: list[Attended]
    mixed: list[Any]  # what W_o is given: the heads' Σ_j α_ij v_j side by side, (B, I, H · R)


@contextmanager
def attention_recorded(model: Any, plans: Sequence[AttentionPlan]) -> Iterator[list[Record]]:
    """A model whose passes leave a record of each of the plans' blocks.

    Within the context the model is in evaluation mode and gradients are on; afterwards it is as it
    was before.

    Parameters
    ----------
    model
        A `transformers` model.
    plans
        Blocks of it, as ``attention_plans(open_checkpoint(model))`` gives them.
    """
    import torch

    records = [Record([], []) for _ in plans]
    handles = [model.register_forward_pre_hook(_asking_for_attention, with_kwargs=True)]
    for plan, record in zip(plans, records, strict=True):
        handles += _listen(model, plan, record)
    training = model.training
    model.eval()
    try:
        with torch.enable_grad(), _plain_implementations(model):
            yield records
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)


def bilinear_plans(
    checkpoint: Checkpoint, layers: Collection[int] | None = None
) -> list[AttentionPlan]:
    """The attention blocks of a model, or those of some layers, whose scores are bilinear forms.

    What is added to a form's score, such as a bias of positions, does no harm.

    Raises
    ------
    TheoryError
        A block's score is no bilinear form of its inputs; says why.
    UnknownFamily
        No family knows the model.
    """
    plans = [p for p in attention_plans(checkpoint) if layers is None or p.layer in layers]
    for plan in plans:
        reason = _refusal(plan)
        if reason:
            raise TheoryError(
                f"{checkpoint.name}: the scores of layer {plan.layer} of the {plan.stack} cannot "
                f"be taken as a bilinear form: {reason}"
            )
    if not plans:
        raise TheoryError(f"{checkpoint.name}: has none of the layers {sorted(layers or ())}")
    return plans


def _refusal(plan: AttentionPlan) -> str:
    """Why a block's scores, as it hands them out, are no bilinear form; empty where they are."""
    if plan.query.norm or plan.key.norm:
        return "queries and keys are normalized token by token before they meet"
    if any(isinstance(side.projection, Composed) for side in (plan.query, plan.key)):
        return "queries or keys go through a latent that is normalized token by token"
    if plan.clip is not None:
        return f"queries and keys are cut off at ±{plan.clip:g}"
    if plan.position == "scaled alibi":
        return "it adds its linear biases twice when it hands out its attention"
    return ""


def require_records(model: Any, plans: Sequence[AttentionPlan], records: Sequence[Record]) -> None:
    """See that every block was heard.

    Raises
    ------
    TheoryError
        A block was not run, or does not hand out the attention that meets its values.
    """
    for plan, record in zip(plans, records, strict=True):
        if not record.uses:
            raise TheoryError(
                f"{type(model).__name__}: layer {plan.layer} of the {plan.stack} "
                f"({plan.kind}-attention) hands out no attention that gradients flow through; "
                "leave its layer out"
            )


@contextmanager
def _plain_implementations(model: Any) -> Iterator[None]:
    """Attention that hands out its probabilities, and experts that know every number type.

    Said in every configuration that some part of the model holds, those of its parts after its own.
    """
    names = ("_attn_implementation", "_experts_implementation")
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(c, name, getattr(c, name, None)) for c in configs.values() for name in names]
    for config, name, _ in before:
        setattr(config, name, "eager")
    try:
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)


def _asking_for_attention(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs | {"output_attentions": True}


def _listen(model: Any, plan: AttentionPlan, record: Record) -> list[Any]:
    """Hooks that add to a record whenever the block's attention is run."""
    query, key = (_module(side.tensor) for side in (plan.query, plan.key))
    given: dict[str, Any] = {}

    def keeping(side: str) -> Callable[[Any, Any], None]:
        def keep(module: Any, args: Any) -> None:
            # The first input of a pass: relative positions may go through the same projection.
            if args:
                given.setdefault(side, args[0])

        return keep

    def attended(module: Any, args: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else ()
        if {"query", "key"} <= given.keys():
            found = [value for value in outputs if _is_attention(value, given["key"].shape[-2])]
            sides = given["query"], given["key"], given.get("value", given["key"])
            record.uses.extend(Attended(*sides, attention) for attention in found[-1:])
        given.clear()

    def mixed(module: Any, args: Any) -> None:
        record.mixed.append(args[0])

    sides = {"query": plan.query, "key": plan.key} | ({"value": plan.value} if plan.value else {})
    hooks = [model.get_submodule(shared_path(query, key)).register_forward_hook(attended)]
    for name, side in sides.items():
        module = model.get_submodule(_module(side.tensor))
        hooks.append(module.register_forward_pre_hook(keeping(name)))
    if plan.output:
        output = model.get_submodule(_module(plan.output.tensor))
        hooks.append(output.register_forward_pre_hook(mixed))
    return hooks


def _module(tensor: str) -> str:
    """The module that holds a parameter."""
    return tensor.rpartition(".")[0]


def _is_attention(value: Any, keys: int) -> bool:
    """Whether something is a tensor of probabilities (…, I, J) in the graph of the pass.

    With sinks, its rows sum to less than 1.
    """
    if getattr(value, "ndim", 0) not in (3, 4) or value.shape[-1] != keys:
        return False
    shares = value.detach()
    whole = shares.min() >= 0 and shares.sum(-1).max() <= 1 + ROUNDING
    return bool(value.requires_grad and whole)
