"""Weights that a module computes from other parameters: parametrizations of PyTorch.

`torch.nn.utils.parametrizations` (spectral norm, weight norm, orthogonal matrices, custom classes)
keep the originals in a module ``parametrizations``, and compute the weight on every use. The older
`torch.nn.utils.weight_norm` and `spectral_norm` compute the weight in a hook before each pass.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

from wqk.checkpoints.checkpoint import plain_name

# Endings of the parameters and buffers from which the older functions compute a weight.
ORIGINALS = ("_g", "_v", "_u", "_orig")


@dataclass(frozen=True)
class ComputedWeight:
    """A weight of a module that is computed from other tensors.

    Attributes
    ----------
    owner
        Weak reference to the module.
    attribute
        Name of the weight in its module.
    hook
        The hook that computes the weight before each pass; None for a parametrization.
    """

    owner: ref[Any]
    attribute: str
    hook: Any = None

    @property
    def method(self) -> str:
        """Name of the class that computes the weight."""
        if self.hook is not None:
            return type(self.hook).__name__
        owner: Any = self.owner()
        return type(owner.parametrizations[self.attribute][0]).__name__.lstrip("_")

    @property
    def originals(self) -> tuple[str, ...]:
        """Paths, within the module, of the tensors or the part that determine the weight."""
        if self.hook is None:
            return (f"parametrizations.{self.attribute}",)
        return tuple(f"{self.attribute}{ending}" for ending in ORIGINALS)

    def value(self) -> Any:
        """Return the present weight, without changing the power iteration of a spectral norm."""
        owner: Any = self.owner()
        if self.hook is None:
            with _evaluated(owner.parametrizations[self.attribute]):
                return getattr(owner, self.attribute)
        if self.method == "SpectralNorm":
            return self.hook.compute_weight(owner, do_power_iteration=False)
        return self.hook.compute_weight(owner)


def computed_weights(model: Any) -> dict[str, ComputedWeight]:
    """Return the computed weights of a module and its parts, by name.

    Examples
    --------
    >>> import torch
    >>> from torch.nn.utils.parametrizations import weight_norm
    >>> list(computed_weights(torch.nn.Sequential(weight_norm(torch.nn.Linear(2, 3)))))
    ['0.weight']
    """
    computed: dict[str, ComputedWeight] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for attribute in getattr(module, "parametrizations", None) or ():
            computed[f"{prefix}{attribute}"] = ComputedWeight(ref(module), attribute)
        hooks: list[Any] = list(module._forward_pre_hooks.values())
        for hook in hooks:
            if type(hook) in _older_hooks():
                computed[f"{prefix}{hook.name}"] = ComputedWeight(ref(module), hook.name, hook)
    return computed


def with_computed(
    tensors: Mapping[str, Any], computed: Mapping[str, ComputedWeight]
) -> dict[str, Any]:
    """Return the tensors of a state dict, with computed weights instead of their originals."""
    originals: list[str] = []
    for name, weight in computed.items():
        prefix = plain_name(name).removesuffix(weight.attribute)
        originals += [f"{prefix}{original}." for original in weight.originals]
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not f"{plain_name(name)}.".startswith(tuple(originals))
    }
    return kept | {name: weight.value() for name, weight in computed.items()}


def _older_hooks() -> tuple[type, ...]:
    if "torch" not in sys.modules:
        return ()
    from torch.nn.utils.spectral_norm import SpectralNorm
    from torch.nn.utils.weight_norm import WeightNorm

    return SpectralNorm, WeightNorm


@contextmanager
def _evaluated(module: Any) -> Iterator[None]:
    """Put a module temporarily in evaluation mode, so that a spectral norm does not change."""
    modes = [(part, part.training) for part in module.modules()]
    for part, _ in modes:
        part.training = False
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
