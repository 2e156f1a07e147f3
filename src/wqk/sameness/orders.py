"""The first model with its experts and neurons in the second's order, which changes nothing.

All that belongs to them has to move along: experts are chosen by the rows of a router, neurons lie
between rows of one weight and columns of the next. Their order is read from one tensor, and the
first model is given it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.checkpoint import View
from wqk.checkpoints.files import PLAIN
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.contents import OTHER
from wqk.sameness.matching import permutation, same_numbers
from wqk.sameness.outside import FEED_FORWARD, roles
from wqk.sameness.tolerances import ALIKE

# A tensor of experts: of one, which has a number, or of all, along its first axis.
EXPERTS = re.compile(r"^(?P<module>(?:.*?\.)?)(?:experts|\w+_exps)\.(?:(?P<number>\d+)\.)?")
# What chooses among them, below the same module: weights, biases of the choice.
ROUTER = re.compile(r"(?:^|\.)(?:gate|router|wg|ffn_gate_inp|exp_probs_b)(?:\.|$)")
# How many groups experts are chosen by, and the bias of such a choice.
GROUPS = re.compile(r"(?:^|[._])(?:n_groups?|num_expert_groups?|expert_group_count)$")
CORRECTED = re.compile(r"correction_bias|exp_probs_b")
# How many rows tell whether experts lie in an order.
SAMPLED_EXPERTS = 8


class Renumbered(View):
    """A checkpoint with tensors along an axis in another order, or in the place of others.

    ``orders`` has an axis and the indices along it for some names, ``places`` the tensor that
    stands for another.
    """

    def __init__(
        self,
        base: Checkpoint,
        orders: Mapping[str, tuple[int, np.ndarray]],
        places: Mapping[str, str],
    ) -> None:
        super().__init__(base)
        self._orders, self._places = orders, places
        self.changed = {*orders, *places}

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The rows and columns that stand for those wanted, and no others."""
        found = []
        for name, rows in parts:
            axis, order = self._orders.get(name, (1, None))
            if order is not None and axis == 0:
                wanted = [order[slice(*ends)] for ends in Part(name, rows).row_ranges(order.shape)]
                rows = tuple((int(row), int(row) + 1) for row in np.concatenate(wanted))
            (value,) = self.inner.read([Part(self._places.get(name, name), rows)])
            found.append(value if order is None or axis == 0 else np.take(value, order, axis))
        return found


class _Order:
    """The order of the first model's tensors in the second, as far as names agree."""

    def __init__(self, checkpoints: Sequence[Checkpoint], names: Mapping[str, str]) -> None:
        tensors, others = (checkpoint.tensors() for checkpoint in checkpoints)
        self.checkpoints, self.names = checkpoints, names
        self.shapes = {
            name: info.shape
            for name, info in tensors.items()
            if name in names and others[names[name]].shape == info.shape and info.dtype in PLAIN
        }
        self.orders: dict[str, tuple[int, np.ndarray]] = {}
        self.places: dict[str, str] = {}

    def both(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A tensor of either."""
        first, second = self.checkpoints
        return first.read([Part(name)])[0], second.read([Part(self.names[name])])[0]

    def of_rows(self, name: str) -> np.ndarray | None:
        """The first's rows that make the second's, where they lie in another order."""
        return permutation(*self.both(name)[::-1], ALIKE)

    def experts(self) -> Iterator[str]:
        """Note the order of experts; modules in which it is another one."""
        modules: dict[str, list[re.Match[str]]] = {}
        for match in filter(None, map(EXPERTS.match, self.shapes)):
            modules.setdefault(match["module"], []).append(match)
        for module, own in modules.items():
            numbers = {int(match["number"]) for match in own if match["number"]}
            count = max(numbers) + 1 if numbers else self.shapes[own[0].string][0]
            routers = [
                name
                for name, shape in self.shapes.items()
                if name.startswith(module) and ROUTER.search(name) and shape[:1] == (count,)
            ]
            weight = next((name for name in routers if len(self.shapes[name]) == 2), None)
            order = None if weight is None else self.of_rows(weight)
            groups = _groups(self.checkpoints[0].config)
            if groups is None:  # older files leave it out where the class has a number of its own
                groups = 0 if any(CORRECTED.search(name) for name in routers) else 1
            if order is None or not groups or count % groups:
                continue
            group = order.reshape(groups, -1) // (count // groups)  # chosen before their experts
            places = {
                match.string: f"{match.string[: match.start('number')]}"
                f"{order[int(match['number'])]}{match.string[match.end('number') :]}"
                for match in own
                if match["number"]
            }
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
            for name in fused[:1]
            for n, row in enumerate(order.tolist())
        ]
        first, second = self.checkpoints
        return all(
            same_numbers(first.read([ours])[0], second.read([theirs])[0])
            for theirs, ours in some[:SAMPLED_EXPERTS]
        )

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
            count, width = len(order), self.shapes[name][1]
            if count == width:
                continue  # what are rows of neurons, and what columns, cannot be told
            moved: dict[str, tuple[int, np.ndarray]] = {}
            for name in own:  # all that a neuron has moves with it, whatever was moved there
                shape = self.shapes[name]
                of = self.shapes.get(re.sub(r"bias$", "weight", name), shape)
                makes = of in ((count, width), (2 * count, width)) and shape[0] == of[0]
                if makes or shape == (count,):
                    moved[name] = 0, np.concatenate([order, order + count])[: shape[0]]
                elif len(shape) == 2 and shape[1] == count:
                    moved[name] = 1, order
            if any(axis for axis, _ in moved.values()):  # rows that nothing reads are no neurons
                self.orders |= moved
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
    notes = [
        f"{what} in another order in {len(some)} modules: {some[0].rstrip('.')}, …"
        for what, some in moved.items()
        if some
    ]
    return open_model(view, family=models[0].family_file), notes
