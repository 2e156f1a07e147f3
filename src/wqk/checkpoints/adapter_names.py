"""What the tensors of an adapter's file are, and which of the base model's they belong to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from wqk._caching import cached_property
from wqk.checkpoints.wrapping import without_adapter

PREFIX = "base_model.model."
FACTOR = re.compile(
    r"(?P<module>.+?)\.lora_(?P<role>(?:embedding_)?[AB])(?:\.(?!weight$)(?P<adapter>\w+))?"
    r"(?:\.weight)?"
)
ROWS = re.compile(r"(?P<module>.+?)\.token_adapter\.trainable_tokens_\w+(?:\.(?P<adapter>\w+))?")
UNUSED = re.compile(r"\.(?:original_module|token_adapter\.base_layer)\.")
MARK = ".modules_to_save."
SAVED = re.compile(r"\.modules_to_save\.(?P<adapter>\w+)\.")

# A module inside a numbered layer.
NUMBERED = re.compile(r"(?:^|\.)\d+(?:\.|$)")
# By how many words the names of a base model and of an adapter's tensors may begin differently.
PREFIX_WORDS = 4


class Named(NamedTuple):
    """What a tensor of an adapter is."""

    # "A" or "B", a factor; "embedding_A" or "embedding_B", of a table; "whole" or "saved", what
    # replaces a tensor; "rows", some rows of a table; "unused"
    role: str
    tensor: str  # the base model's, as the adapter calls it
    adapter: str = ""  # the adapter's own name, where the file has one


def adapter_name(stored: str, base: BaseNames) -> Named:
    """What a tensor is, by its name.

    Examples
    --------
    >>> base = BaseNames({"layers.0.q_proj.weight": None})
    >>> adapter_name("base_model.model.layers.0.q_proj.lora_A.default.weight", base)
    Named(role='A', tensor='layers.0.q_proj.weight', adapter='default')
    >>> adapter_name("layers.0.modules_to_save.default.q_proj.weight", base)
    Named(role='saved', tensor='layers.0.q_proj.weight', adapter='default')
    """
    name = stored.removeprefix(PREFIX)
    for pattern, role in ((ROWS, "rows"), (FACTOR, "")):
        if match := pattern.fullmatch(name):
            tensor = without_adapter(f"{match['module']}.weight")
            return Named(role or match["role"], tensor, match["adapter"] or "")
    if UNUSED.search(name):
        return Named("unused", name)
    if MARK not in name:
        return Named("whole", without_adapter(name))
    tensor = without_adapter(name.replace(MARK, "."))
    match = SAVED.search(name)
    if match is None or base.own(tensor) is not None:
        return Named("saved", tensor)
    return Named("saved", without_adapter(SAVED.sub(".", name)), match["adapter"])


def module_of(tensor: str) -> str:
    """The name of a tensor's module."""
    return tensor.rpartition(".")[0]


class BaseNames:
    """The base model's names, found under a prefix more or fewer."""

    def __init__(self, tensors: Collection[str]) -> None:
        self.tensors = tensors

    @cached_property
    def _by_end(self) -> Mapping[str, list[str]]:
        """The names by what is left of them without their first words."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in self.tensors:
            for end in _ends(name):
                found[end].append(name)
        return found

    @cached_property
    def _inside(self) -> set[str]:
        """Modules with weights of their own, and all in a numbered layer."""
        inside = {name.rpartition(".")[0] for name in self.tensors}
        for module in tuple(inside):
            while (module := module.rpartition(".")[0]) and NUMBERED.search(module):
                if module in inside:
                    break
                inside.add(module)
        return {*inside, *(end for module in inside for end in _ends(module))} - {""}

    def own(self, name: str) -> str | None:
        """The base model's name for a tensor; None if there is none, or several might be meant."""
        if name in self.tensors:
            return name
        shorter = (end for end in _ends(name) if end in self.tensors)
        found = {*self._by_end.get(name, ()), *shorter}
        return found.pop() if len(found) == 1 else None

    def touches(self, name: str) -> bool:
        """Whether a tensor would lie in a module or in a layer of the base model."""
        while name := name.rpartition(".")[0]:
            if not self._inside.isdisjoint((name, *_ends(name))):
                return True
        return False


def _ends(name: str) -> Iterator[str]:
    """What is left of a name without its first words."""
    for _ in range(PREFIX_WORDS):
        _, dot, name = name.partition(".")
        if not dot:
            return
        yield name
