"""Recording the inputs and outputs of a running model's attention.

Axes: B examples, H query heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.errors import UnknownFamily
from wqk.families import AttentionPlan

if TYPE_CHECKING:
    from wqk.inspecting.verification.recomputation import Products

# How far from 1 a row of probabilities may sum, and in half precision.
ROUNDING, HALF_ROUNDING = 1e-5, 1e-2


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
) -> list[list[Application]]:
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
    in_model = {place_of(plan): plan for plan in live}
    records: list[list[Application]] = []
    for plan in plans:
        if place_of(plan) not in in_model:
            raise UnknownFamily(
                f"{type(model).__name__}, as transformers loads it, has no {plan.kind}-"
                f"attention in layer {plan.layer} of a {plan.stack}, but the checkpoint has"
            )
        records.append([])
        _attach(model, in_model[place_of(plan)], records[-1], latest, products)
    return records


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


def place_of(plan: AttentionPlan) -> tuple[str, str, int]:
    """What identifies a block both in the checkpoint and in the live model."""
    return plan.stack, plan.kind, plan.layer


def _remembering(
    method: Callable[..., Any], term: Callable[..., Any], latest: list[np.ndarray]
) -> Callable[..., Any]:
    """The same method, which also puts the term that it computes into a list."""

    def remembered(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        latest[:] = [term(result, args).numpy()]
        return result

    return remembered


class AttentionCall(NamedTuple):
    """One run of one block's attention, as the model's own tensors."""

    module: Any  # what holds both projections
    arguments: Mapping[str, Any]  # what it was called with
    inputs: Mapping[str, Any]  # of the ``query``, ``key`` and ``value`` projections, (B, N, D)
    queries: Any  # what the query's projection put out, or None
    attention: Any  # probabilities, (B, H, I, J) or (B · H, I, J); None if not reported


def attach(
    model: Any,
    plan: AttentionPlan,
    heard: Callable[[AttentionCall], None],
    products: Products | None = None,
) -> list[Any]:
    """Listen to the inputs of a block's projections, and to the outputs of their parent module.

    ``heard`` is called whenever the block's attention has been run and reported; with ``products``,
    which record what the parent computes, even if it is not reported. Returns handles, each of
    which removes a hook with ``remove()``.
    """
    given: dict[str, Any] = {}

    def keep(side: str, module: Any, args: Any) -> None:
        # Only the first input: relative positions may go through the same projection later.
        if args:
            given.setdefault(side, args[0])

    def projected(module: Any, args: Any, output: Any) -> None:
        if hasattr(output, "numpy"):
            given.setdefault("queries", output)

    def entered(module: Any, args: Any) -> None:
        if products is not None:
            products.enter()

    def attended(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        outputs = output if isinstance(output, tuple | list) else ()
        found = [value for value in outputs if _is_attention(value, plan)]
        if (found or products is not None) and "query" in given and "key" in given:
            named = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            queries = given.pop("queries", None)
            heard(AttentionCall(module, named, dict(given), queries, found[-1] if found else None))
        given.clear()
        if products is not None:
            products.leave()

    sides = {"query": plan.query, "key": plan.key} | ({"value": plan.value} if plan.value else {})
    modules = {side: model.get_submodule(module_of(part.tensor)) for side, part in sides.items()}
    parent = model.get_submodule(parent_of(plan))
    return [
        *(m.register_forward_pre_hook(partial(keep, side)) for side, m in modules.items()),
        modules["query"].register_forward_hook(projected),
        parent.register_forward_pre_hook(entered),
        parent.register_forward_hook(attended, with_kwargs=True),
    ]


def _attach(
    model: Any,
    plan: AttentionPlan,
    record: list[Application],
    latest: list[np.ndarray],
    products: Products | None,
) -> None:
    """Record every application of a block's attention, as NumPy arrays."""
    from torch.nn import MultiheadAttention

    own = isinstance(model.get_submodule(module_of(plan.query.tensor)), MultiheadAttention)

    def heard(call: AttentionCall) -> None:
        x, y = (call.inputs[side].numpy() for side in ("query", "key"))
        computed = products.within() if products else ()
        if call.attention is None:
            if not own:  # which is recorded by `heads_apart`
                record.append(Application(x, y, None, None, None, computed))
            return
        attention = call.attention.numpy()
        if attention.ndim == 3:
            attention = attention.reshape(-1, plan.query.heads, *attention.shape[-2:])
        # ProphetNet predicts several tokens at once, in streams behind the one that attends here.
        x, y = (
            side[:, :count]
            if side.ndim == 3 and len(side) == len(attention)
            else side.reshape(-1, count, side.shape[-1])
            for side, count in zip((x, y), attention.shape[-2:], strict=True)
        )
        queries = None if call.queries is None else call.queries.numpy()
        term = _term_of(call.module, plan, call.arguments, queries, latest)
        given: Any = call.arguments.get("attention_mask")
        is_mask = getattr(given, "ndim", 0) in (3, 4) and given.is_floating_point()
        mask = _expanded(given.numpy(), attention.shape) if is_mask else None
        record.append(Application(x, y, attention, term, mask, computed))

    attach(model, plan, heard, products)

    def keep(module: Any, args: Any, output: Any) -> None:
        latest[:] = [output.numpy()]

    parent = model.get_submodule(parent_of(plan))
    for name in TERM_MODULES:
        if hasattr(parent, name):
            getattr(parent, name).register_forward_hook(keep)
    # PyTorch's own attention takes the weight itself, and leaves its module aside.
    weight = model.get_parameter(plan.query.tensor)
    weight.attended = record, products


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


def module_of(tensor: str) -> str:
    """The path of the module that holds a parameter."""
    return tensor.rpartition(".")[0]


def parent_of(plan: AttentionPlan) -> str:
    """The module that runs a block's attention: the query's, if the key is another layer's."""
    query, key = (module_of(side.tensor).split(".") for side in (plan.query, plan.key))
    names = takewhile(lambda pair: pair[0] == pair[1], zip(query, key, strict=False))
    shared = [name for name, _ in names]
    apart = ("".join(name[len(shared) :][:1]) for name in (query, key))
    is_own = query == key or all(map(str.isdigit, apart))
    return ".".join(query[:-1] if is_own else shared)


def _is_attention(value: Any, plan: AttentionPlan) -> bool:
    """Whether something is a tensor of probabilities (B, H, I, J) or (B · H, I, J).

    They may lack the share of a sink, which a family may not know of.
    """
    if getattr(value, "ndim", 0) not in (3, 4) or not value.is_floating_point():
        return False
    shares = value.detach()
    total, rounding = shares.sum(-1), ROUNDING if shares.element_size() >= 4 else HALF_ROUNDING
    if plan.sinks or (shares.ndim == 4 and shares.shape[1] == plan.query.heads):
        return bool(shares.min() >= 0 and total.max() <= 1 + rounding)
    return bool(((total - 1).abs() <= rounding).all())


def _expanded(mask: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A mask with four axes, from one for all examples and heads or for a picture's windows.

    True means hidden.
    """
    if mask.dtype == bool:
        mask = np.where(mask, np.finfo(np.float64).min, 0.0)
    if mask.ndim == 4:
        return mask
    if mask.ndim == 3 and len(mask) == shape[0] * shape[1]:
        return mask.reshape(shape)
    return np.tile(mask, (shape[0] // len(mask), 1, 1))[:, None]
