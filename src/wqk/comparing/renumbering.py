"""Experts and neurons in another order, which change nothing where all that belongs to them moves.

Experts are chosen by the rows of a router, neurons lie between rows of one weight and columns of
the next. Their order is read from one tensor, and the first model is given it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wqk.checkpoints import Checkpoint, Part
from wqk.comparing.contents import FLOATS
from wqk.comparing.scope import FEED_FORWARD, OTHER, roles
from wqk.comparing.tolerances import ALIKE
from wqk.comparing.units import permutation, same_numbers
from wqk.comparing.views import Renumbered
from wqk.model import Model
from wqk.model import open as open_model

# A tensor of experts: of one, which has a number, or of all, along its first axis.
EXPERTS = re.compile(r"^(?P<module>(?:.*?\.)?)(?:experts|\w+_exps)\.(?:(?P<number>\d+)\.)?")
# What chooses among them, below the same module: weights, biases of the choice.
ROUTER = re.compile(r"(?:^|\.)(?:gate|router|wg|ffn_gate_inp|exp_probs_b)(?:\.|$)")
# How many groups experts are chosen by, and the bias of such a choice.
GROUPS = re.compile(r"(?:^|[._])(?:n_groups?|num_expert_groups?|expert_group_count)$")
CORRECTED = re.compile(r"correction_bias|exp_probs_b")
# How many rows tell whether experts lie in an order.
SAMPLED = 8


class _Order:
    """The order of the first model's tensors in the second, as far as names agree."""

    def __init__(self, checkpoints: Sequence[Checkpoint], names: Mapping[str, str]) -> None:
        tensors, others = (checkpoint.tensors() for checkpoint in checkpoints)
        self.checkpoints, self.names = checkpoints, names
        self.shapes = {
            name: info.shape for name, info in tensors.items()
            if name in names and others[names[name]].shape == info.shape and info.dtype in FLOATS
        }  # fmt: skip
        self.orders: dict[str, tuple[int, np.ndarray]] = {}
        self.places: dict[str, str] = {}

    def both(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A tensor of either."""
        given = zip(self.checkpoints, (name, self.names[name]), strict=True)
        ours, theirs = (checkpoint.read([Part(own)])[0] for checkpoint, own in given)
        return ours, theirs

    def of_rows(self, name: str) -> np.ndarray | None:
        """The first's rows that make the second's, where they lie in another order."""
        ours, theirs = self.both(name)
        return permutation(theirs, ours, ALIKE)

    def experts(self) -> Iterator[str]:
        """Note the order of experts; modules in which it is another one."""
        modules: dict[str, list[re.Match[str]]] = {}
        for match in filter(None, map(EXPERTS.match, self.shapes)):
            modules.setdefault(match["module"], []).append(match)
        for module, own in modules.items():
            numbers = {int(match["number"]) for match in own if match["number"]}
            count = max(numbers) + 1 if numbers else self.shapes[own[0].string][0]
            routers = [name for name, shape in self.shapes.items() if name.startswith(module)
                       and ROUTER.search(name) and shape[:1] == (count,)]  # fmt: skip
            weight = next((name for name in routers if len(self.shapes[name]) == 2), None)
            order = None if weight is None else self.of_rows(weight)
            groups = _groups(self.checkpoints[0].config)
            if groups is None:  # older files leave it out where the class has a number of its own
                groups = 0 if any(CORRECTED.search(name) for name in routers) else 1
            if order is None or not groups or count % groups:
                continue
            group = order.reshape(groups, -1) // (count // groups)  # chosen before their experts
            places = {match.string: f"{match.string[: match.start('number')]}"
                      f"{order[int(match['number'])]}{match.string[match.end('number') :]}"
                      for match in own if match["number"]}  # fmt: skip
            fused = [match.string for match in own if not match["number"]]
            known = all(self.shapes.get(one) == self.shapes[name] for name, one in places.items())
            if known and (group == group[:, :1]).all() and self._fits(places, fused, order):
                self.orders |= dict.fromkeys((*routers, *fused), (0, order))
                self.places |= places
                yield module

    def _fits(self, places: Mapping[str, str], fused: Sequence[str], order: np.ndarray) -> bool:
        """Whether some experts lie in an order, too."""
        some = [(Part(self.names[name]), Part(one)) for name, one in places.items()]
        some += [
            (Part(self.names[name], ((n, n + 1),)), Part(name, ((row, row + 1),)))
            for name in fused[:1] for n, row in enumerate(order.tolist())
        ]  # fmt: skip
        first, second = self.checkpoints
        return all(
            same_numbers(first.read([ours])[0], second.read([theirs])[0])
            for theirs, ours in some[:SAMPLED]
        )

    def _is_moved(self, vector: str, order: np.ndarray) -> bool:
        """Whether a vector lies in an order, as biases of neurons do."""
        if len(self.shapes[vector]) > 1:
            return False
        ours, theirs = self.both(vector)
        return same_numbers(ours[order], theirs)

    def neurons(self, others: Collection[str]) -> Iterator[str]:
        """Note the order of neurons; modules, or layers without any, in which it is another one."""
        modules: dict[str, list[str]] = {}
        for name in self.shapes:
            module = re.sub(r"\.[^.]+(?:\.(?:weight|bias))?$", "", name)
            if not FEED_FORWARD.search(name):
                module = (re.match(r".*?\.\d+(?=\.)", name) or [""])[0]
            if name in others and module and not EXPERTS.match(name):
                modules.setdefault(module, []).append(name)
        for module, own in modules.items():
            matrices = [name for name in own if len(self.shapes[name]) == 2]
            found = {name: order for name in matrices if (order := self.of_rows(name)) is not None}
            if not found:
                continue
            name, order = min(found.items(), key=lambda one: len(one[1]))
            gates, neurons = np.array_split(order, 2)
            if len(found) == 1 and np.array_equal(gates + len(gates), neurons):
                order = gates  # and their neurons lie in one weight
            count = len(order)
            for name in own:
                shape = self.shapes[name]
                many = np.concatenate([order, order + count])[: shape[0]]
                fits = shape[0] in (count, 2 * count)
                if fits and (name in found or self._is_moved(name, many)):
                    self.orders[name] = 0, many
                elif len(shape) == 2 and shape[1] == count:
                    self.orders[name] = 1, order
            yield module


def _groups(config: Mapping[str, Any]) -> int | None:
    """How many groups of experts a configuration names, of all its parts the most."""
    found = [
        _groups(value) if isinstance(value, Mapping) else value if GROUPS.search(str(key)) else None
        for key, value in config.items()
    ]
    return max((number for number in found if isinstance(number, int)), default=None)


def renumbered(
    models: Sequence[Model], names: Mapping[str, str], neurons: bool
) -> tuple[Model | None, list[str]]:
    """The first model with the second's order of experts, and of neurons; and what it says."""
    order = _Order([model.checkpoint for model in models], names)
    others = {name for name, role in roles(models[0]).items() if role == OTHER and neurons}
    moved = {"experts": [*order.experts()], "neurons": [*order.neurons(others)]}
    if not order.orders:
        return None, []
    view = Renumbered(models[0].checkpoint, order.orders, order.places)
    notes = [f"{what} in another order in {len(some)} modules: {some[0].rstrip('.')}, …"
             for what, some in moved.items() if some]  # fmt: skip
    return open_model(view, family=models[0].family_file), notes
