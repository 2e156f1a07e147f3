"""Recording the inputs and outputs of a running model's attention.

Axes: B examples, H query heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.errors import UnknownFamily
from wqk.families import AttentionPlan
from wqk.live.listening import AttentionCall, Listener, Place, is_pytorch_s, parent_of

if TYPE_CHECKING:
    from wqk.live.verification.recomputation import Products


class Recording(NamedTuple):
    """Records of a model's blocks, which fill while the listener is kept."""

    listener: Listener
    records: list[list[Application]]


class Application(NamedTuple):
    """One use of one block's attention; windows of a picture count as examples."""

    query_input: np.ndarray  # (B, I, D)
    key_input: np.ndarray  # (B, J, D)
    attention: np.ndarray | None  # probabilities (B, H, I, J), where they are reported
    term: np.ndarray | None  # the learned term that was computed last
    mask: np.ndarray | None = None  # what the module was passed to add, (B or 1, H or 1, I, J)
    products: tuple[np.ndarray, ...] = ()  # of batches of matrices, computed by the module


# Methods of attention modules that compute a learned term of the score besides the form, and the
# term as a function of their result and arguments. Later layers may reuse it.
LEARNED_TERMS: Mapping[str, Callable[[Any, Sequence[Any]], Any]] = {
    **dict.fromkeys(
        (
            "compute_bias", "compute_position_bias", "disentangled_att_bias",
            "disentangled_attention_bias", "get_decomposed_rel_pos",
        ),
        lambda result, args: result,
    ),
    "add_decomposed_rel_pos": lambda result, args: result - args[0],
}  # fmt: skip

# Modules within an attention module whose output is such a term.
TERM_MODULES = ("relative_position_bias",)


def _continuous_bias(module: Any) -> Any:
    """The bias that Swin v2 computes from distances, (H, I, J)."""
    table = module.continuous_position_bias_mlp(module.relative_coords_table).flatten(0, -2)
    tokens = int(module.relative_position_index.numel() ** 0.5)
    bias = table[module.relative_position_index.flatten()].view(tokens, tokens, -1)
    return 16 * bias.permute(2, 0, 1).sigmoid()


# Terms that attention modules compute in their own code, by an attribute of such modules.
COMPUTED_TERMS: Mapping[str, Callable[[Any], Any]] = {
    "continuous_position_bias_mlp": _continuous_bias,
}


def listen(
    model: Any,
    plans: Sequence[AttentionPlan],
    live: Sequence[AttentionPlan],
    products: Products | None = None,
) -> Recording:
    """Empty records of the plans' blocks, which fill when the model is run in `heads_apart`.

    With ``products``, which must then be open, blocks that report no attention are recorded too.
    Raises `UnknownFamily` if the model lacks a block that the checkpoint has.
    """
    latest: list[np.ndarray] = []
    for module in model.modules():
        for method in LEARNED_TERMS:
            if hasattr(module, method):
                term = LEARNED_TERMS[method]
                setattr(module, method, _remembering(getattr(module, method), term, latest))
    in_model = {plan.place: plan for plan in live}
    records: dict[Place, list[Application]] = {}
    for plan in plans:
        if plan.place not in in_model:
            raise UnknownFamily(
                f"{type(model).__name__}, as transformers loads it, has no {plan.kind}-"
                f"attention in layer {plan.layer} of a {plan.stack}, but the checkpoint has"
            )
        records[plan.place] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        latest[:] = [output.numpy()]

    for plan in (in_model[place] for place in records):
        parent = model.get_submodule(parent_of(plan))
        for name in TERM_MODULES:
            if hasattr(parent, name):
                getattr(parent, name).register_forward_hook(keep)
        # PyTorch's own attention takes the weight itself, and leaves its module aside.
        weight = model.get_parameter(plan.query.tensor)
        weight.attended = records[plan.place], products

    def heard(call: AttentionCall) -> None:
        if not is_pytorch_s(call.module):  # which is recorded by `heads_apart`
            records[call.plan.place] += _applications(call, latest, products)
        if products is not None:
            products.leave()

    entered = products.enter if products else lambda: None
    listener = Listener(model, [in_model[place] for place in records], heard, entered)
    return Recording(listener, list(records.values()))


def require_records(
    model: Any, plans: Sequence[AttentionPlan], records: Sequence[Sequence[Application]]
) -> None:
    """Raise `UnknownFamily` if a block's attention was not run, or not returned."""
    silent = [plan for plan, record in zip(plans, records, strict=True) if not record]
    if silent:
        raise UnknownFamily(
            f"{type(model).__name__}: the module of {silent[0].query.tensor} does not project "
            "queries and keys and return attention weights"
        )


def _remembering(
    method: Callable[..., Any], term: Callable[..., Any], latest: list[np.ndarray]
) -> Callable[..., Any]:
    """The same method, which also puts the term that it computes into a list."""

    def remembered(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        latest[:] = [term(result, args).numpy()]
        return result

    return remembered


def _applications(
    call: AttentionCall, latest: list[np.ndarray], products: Products | None
) -> Iterator[Application]:
    """What was recorded of one run of a block's attention; nothing if it told nothing."""
    reported = call.attention
    if reported is None and products is not None and "query" in call.inputs:
        x, y = call.inputs["query"], call.inputs.get("key", call.inputs["query"])
        reported = products.shares((len(x), call.plan.query.heads, x.shape[1], y.shape[1]))
    if not {"query", "key"} <= call.inputs.keys() or (reported is None and products is None):
        return
    x, y = (call.inputs[side].numpy() for side in ("query", "key"))
    computed = products.within() if products else ()
    if reported is None:
        yield Application(x, y, None, None, None, computed)
        return
    attention, heads = reported.numpy(), call.plan.query.heads
    if attention.ndim == 3:
        attention = attention.reshape(-1, heads, *attention.shape[-2:])
    # ProphetNet predicts several tokens at once, in streams behind the one that attends here.
    x, y = (
        side[:, :count]
        if side.ndim == 3 and len(side) == len(attention)
        else side.reshape(-1, count, side.shape[-1])
        for side, count in zip((x, y), attention.shape[-2:], strict=True)
    )
    queries = None if call.queries is None else call.queries.numpy()
    term = _term_of(call.module, call.plan, call.arguments, queries, latest)
    given: Any = call.arguments.get("attention_mask")
    is_mask = getattr(given, "ndim", 0) in (3, 4) and given.is_floating_point()
    mask = _expanded(given.numpy(), attention.shape) if is_mask else None
    yield Application(x, y, attention, term, mask, computed)


@contextmanager
def heads_apart() -> Iterator[None]:
    """Record PyTorch's own attention, which returns the mean over heads, head by head."""
    from torch.nn import functional

    whole = functional.multi_head_attention_forward
    running: list[bool] = []

    def recorded(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        if running:  # the function passes itself to whatever overrides PyTorch's functions
            return whole(query, key, *args, **kwargs)
        asked = {**kwargs, "need_weights": True, "average_attn_weights": False}
        output: Any
        attention: Any
        running.append(True)
        try:
            output, attention = whole(query, key, *args, **asked)
        finally:
            running.clear()
        weight = kwargs["q_proj_weight"] if kwargs.get("use_separate_proj_weight") else args[3]
        record, products = getattr(weight, "attended", (None, None))
        if record is not None:
            x, y = (side.transpose(0, 1).numpy() for side in (query, key))
            mask = kwargs.get("attn_mask")
            expanded = None if mask is None else _expanded(mask.numpy(), attention.shape)
            computed = products.within() if products else ()
            record.append(Application(x, y, attention.numpy(), None, expanded, computed))
        return output, attention.mean(dim=1) if kwargs.get("need_weights", True) else None

    functional.multi_head_attention_forward = recorded
    try:
        yield
    finally:
        functional.multi_head_attention_forward = whole


def _term_of(
    module: Any,
    plan: AttentionPlan,
    given: Mapping[str, Any],
    queries: np.ndarray | None,
    latest: Sequence[np.ndarray],
) -> np.ndarray | None:
    """The learned term of the latest application."""
    for name, compute in COMPUTED_TERMS.items():
        if hasattr(module, name):
            return np.asarray(compute(module).numpy())
    vectors: Any = given.get("position_bias")
    is_relative = not plan.position.endswith("alibi") and getattr(vectors, "ndim", 0) == 3
    if queries is not None and is_relative:
        # Vectors (I, J, R) of relative positions, each of which meets the query (Shaw et al.).
        heads = plan.scale * queries.reshape(*queries.shape[:2], plan.query.heads, -1)
        known: np.ndarray = vectors.numpy()
        return np.asarray(heads.swapaxes(1, 2)[..., None, :] @ known.swapaxes(-1, -2))[..., 0, :]
    return latest[0] if latest else None


def _expanded(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A mask with four axes, from one for all examples and heads or for a picture's windows.

    True means hidden.
    """
    if mask.dtype == bool:
        mask = np.where(mask, np.finfo(np.float64).min, 0.0)
    if mask.ndim in (2, 4):  # one for all, as (I, J), or whole
        return mask if mask.ndim == 4 else mask[None, None]
    if mask.ndim == 3 and len(mask) == shape[0] * shape[1]:
        return mask.reshape(shape)
    return np.tile(mask, (shape[0] // len(mask), 1, 1))[:, None]
