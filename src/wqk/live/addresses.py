"""Blocks of a running model: the modules that run the attention of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from wqk._typing import FilePath
from wqk.checkpoints.adapters import module_of
from wqk.checkpoints.checkpoint import plain_name
from wqk.checkpoints.modules import ADAPTED, unwrapped
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import AttentionPlan, Place
from wqk.families.proofs import proof_of, proven
from wqk.live.calls import ObservedCall
from wqk.model import Model
from wqk.model import open as open_model


def network_of(model: Any, what: str) -> Any:
    """Return the `nn.Module` of a module or a `Model`.

    Parameters
    ----------
    model
        The module, or a `Model` opened from one.
    what
        Participle for the error: the action of the caller on the model, such as ``run``.

    Raises
    ------
    CheckpointError
        The model is not a module, but a reference to a checkpoint.
    """
    network = model.ref if isinstance(model, Model) else model
    if not hasattr(network, "named_modules"):
        raise CheckpointError(
            f"a model in memory is {what}: expected an nn.Module, or a Model opened from one, got "
            f"{type(network).__name__}; load the checkpoint first, with the class of the "
            "model: transformers.AutoModelForCausalLM.from_pretrained(folder)"
        )
    return network


def opened_live(
    model: Any, family: FilePath | None = None, heads_per_layer: int | None = None
) -> Model:
    """Return a module, or a `Model` opened from one, as a `Model`; options as for `wqk.open`."""
    if family is None and heads_per_layer is None:
        return open_model(model)
    return open_model(network_of(model, "read"), family=family, heads_per_layer=heads_per_layer)


def known_plans(model: Model, what: str) -> tuple[AttentionPlan, ...]:
    """Return a live model's plans; raise `UnknownFamily` if one is an unproven guess.

    `wqk.verify` proves a guess. PyTorch's attention is identified by its class.

    Raises
    ------
    UnknownFamily
        A plan is an unproven guess. The message contains ``what``, the caller's requirement.
    """
    network = unwrapped(model.ref)
    modules = plain_modules(network)
    plans = []
    for plan in model.plans:
        facts = proof_of(plan, network)
        if plan.rule.guess and facts is None and not _is_pytorchs(plan, modules):
            raise UnknownFamily(
                f"{model.name}: {what}, and its family is unknown ({plan.rule.guess}); check the "
                "guess by the model's own forward pass, wqk.verify(model, batch): where that is "
                "right, the guess is taken from then on; or name the family, as in wqk.open(model, "
                'family="nanogpt"), or describe it in a family file, wqk.open(model, family=FILE)'
            )
        if plan.rule.guess and facts is not None:
            plan = proven(plan, facts)
        elif plan.rule.guess:
            rule = msgspec.structs.replace(plan.rule, guess="")
            plan = replace(plan, rule=rule, scale=plan.score_scale)
        plans.append(plan)
    return tuple(plans)


def _is_pytorchs(plan: AttentionPlan, modules: dict[str, Any]) -> bool:
    """Return whether only PyTorch's `nn.MultiheadAttention` computes a plan's scores."""
    module: Any = modules.get(module_of(plan.query.tensor))
    return is_pytorch_attention(module) and module.bias_k is None and not module.add_zero_attn


def plain_modules(network: Any) -> dict[str, Any]:
    """Return modules by their names, without the names of wrappers and adapters."""
    return {
        _plain_module(name): module
        for name, module in network.named_modules(remove_duplicate=False)
    }


def is_pytorch_attention(module: Any) -> bool:
    """Return whether a module is PyTorch's `nn.MultiheadAttention`."""
    from torch.nn import MultiheadAttention

    return isinstance(module, MultiheadAttention)


def parent_of(plan: AttentionPlan) -> str:
    """Return the module that runs a block's attention; if layers share keys, the query's module."""
    query = module_of(plan.query.tensor).split(".")
    key = module_of(plan.key.tensor).split(".")
    parent = query[:-1] if query == key else _parent_of_both(query, key)
    if parent and "qkv" in parent[-1] and "att" not in parent[-1]:
        parent = parent[:-1]  # this module only projects
    return ".".join(parent)


def _parent_of_both(query: list[str], key: list[str]) -> list[str]:
    """Return the path of the module around two modules; if layers share keys, the query's."""
    depth = 0  # number of equal names at the beginning of both paths
    for query_name, key_name in zip(query, key, strict=False):
        if query_name != key_name:
            has_key_of_other_layer = query_name.isdigit() and key_name.isdigit()
            return query[:-1] if has_key_of_other_layer else query[:depth]
        depth += 1
    return query[:depth]


def title_of(name: Place | str) -> str:
    """Return the name of a block in sentences: ``decoder self, layer 2``, or the module's path."""
    if isinstance(name, str):
        return name
    stack, kind, layer = name
    return f"{stack} {kind}, layer {layer}"


def subject_of(plan: AttentionPlan) -> str:
    """Return the subject of a note on a plan's block: ``decoder self layer 2``."""
    return f"{plan.stack} {plan.kind} layer {plan.layer}"


@dataclass(frozen=True)
class Address:
    """Name of an observed attention in results.

    Attributes
    ----------
    name
        Stack, kind and layer of a block of a known family; else the path of the module.
    heads
        Number of query heads; None without a family.
    is_self
        Whether queries and keys belong to the same tokens.
    """

    name: Place | str
    heads: int | None = None
    is_self: bool = True


class BlockIndex:
    """Blocks by the modules that run the attention.

    Parameters
    ----------
    network
        The `nn.Module` that runs.
    plans
        Plans of its blocks; empty if no family describes the module.
    """

    def __init__(self, network: Any, plans: Sequence[AttentionPlan]) -> None:
        self._plans: WeakKeyDictionary[Any, list[AttentionPlan]] = WeakKeyDictionary()
        modules = plain_modules(unwrapped(network))
        for plan in plans:
            module = modules.get(module_of(plan.query.tensor))
            if not is_pytorch_attention(module):
                module = modules.get(parent_of(plan))
            if module is None:
                raise UnknownFamily(
                    f"no module is called {parent_of(plan)!r} while the model runs, where "
                    f"{plan.query.tensor} is made of other weights when it is saved; its attention "
                    "cannot be followed"
                )
            self._plans.setdefault(module, []).append(plan)

    def plans_of(self, call: ObservedCall) -> list[AttentionPlan]:
        """Plans of the block of a call; several plans if layers share their module."""
        for running in reversed(call.modules):
            plans = self._plans.get(running.module)
            if plans:
                return plans if _is_joint(plans) else _of_kind(plans, call)
        return []

    def addresses(self, call: ObservedCall) -> list[Address]:
        """Return the names of a call's blocks in results."""
        plans = self.plans_of(call)
        reads_another = any(running.reads_another for running in call.modules)
        if not plans:
            return [Address(call.path, is_self=not reads_another)]
        return [
            Address(
                plan.place,
                heads=None if plan.rule.guess else plan.query.heads,
                is_self=(plan.kind != "cross" or _is_joint(plans)) and not reads_another,
            )
            for plan in plans
        ]


def _is_joint(plans: Sequence[AttentionPlan]) -> bool:
    """Return whether one softmax computes all plans of a module: joint attention of streams.

    In diffusion transformers, a text and a picture attend to each other and to themselves.
    Observations of the joint attention are reported for each of its forms.
    """
    queries = {plan.query.tensor for plan in plans}
    keys = {plan.key.tensor for plan in plans}
    pairs = {(plan.query.tensor, plan.key.tensor) for plan in plans}
    return len(queries) > 1 and len(pairs) == len(queries) * len(keys)


def _of_kind(plans: list[AttentionPlan], call: ObservedCall) -> list[AttentionPlan]:
    """Return the plans of one module that fit a call by width and kind."""
    if call.queries is not None:
        width = call.queries.shape[-1]
        plans = [plan for plan in plans if plan.query.head_width == width] or plans
    if len({plan.kind for plan in plans}) == 1:
        return plans
    *_, queries, keys = call.shape
    kind = "self" if queries == keys else "cross"
    return [plan for plan in plans if plan.kind == kind] or plans


def _plain_module(name: str) -> str:
    """Return the plain name of a module, without wrappers."""
    return plain_name(f"{name}.").rstrip(".").removesuffix(f".{ADAPTED}")
