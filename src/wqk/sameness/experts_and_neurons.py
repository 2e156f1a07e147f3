"""The reference with its experts and neurons in the candidate's order; no output changes.

All tensors of an expert or a neuron must move together: the rows of a router choose experts, and a
neuron is a row of one weight and a column of the next weight. The order is read from one tensor,
and applied to the whole reference.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wqk._console import counted
from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.checkpoint import View
from wqk.checkpoints.files import PLAIN
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.comparisons import Cause
from wqk.sameness.matching import permutation, same_numbers
from wqk.sameness.mismatches import Kind
from wqk.sameness.tensor_comparisons import OTHER
from wqk.sameness.tensor_roles import FEED_FORWARD, roles
from wqk.sameness.tolerances import ALIKE

# A tensor of one expert, which has a number, or of all experts, along the first axis.
EXPERTS = re.compile(r"^(?P<module>(?:.*?\.)?)(?:experts|\w+_exps)\.(?:(?P<number>\d+)\.)?")
# Tensors that choose among the experts of the same module: weights, biases of the choice.
ROUTER = re.compile(r"(?:^|\.)(?:gate|router|wg|ffn_gate_inp|exp_probs_b)(?:\.|$)")
# The setting of the number of groups that experts are chosen by, and the bias of such a choice.
EXPERT_GROUPS = re.compile(r"(?:^|[._])(?:n_groups?|num_expert_groups?|expert_group_count)$")
CORRECTED = re.compile(r"correction_bias|exp_probs_b")
# Number of compared parts after which experts are taken to lie in an order.
SAMPLED_EXPERTS = 8


class AxisOrder(NamedTuple):
    """An order of a tensor along one axis.

    Attributes
    ----------
    axis
        The axis.
    indices
        For each entry of the result, the index of its source entry.
    """

    axis: int
    indices: np.ndarray


class Renumbered(View):
    """A checkpoint with some tensors in another order along an axis, or replaced by others.

    Parameters
    ----------
    base
        The checkpoint.
    orders
        The orders of tensors, by name.
    sources
        For each replaced tensor, by name, the name of the tensor that is read instead.
    """

    def __init__(
        self,
        base: Checkpoint,
        orders: Mapping[str, AxisOrder],
        sources: Mapping[str, str],
    ) -> None:
        super().__init__(base)
        self._orders = orders
        self._sources = sources
        self.changed = {*orders, *sources}

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Read only the rows and columns that the requested parts need."""
        return [self._read_one(part) for part in parts]

    def _read_one(self, part: Part) -> np.ndarray:
        """Read one part."""
        order = self._orders.get(part.name)
        rows = part.rows
        if order is not None and order.axis == 0:
            ranges = part.row_ranges(order.indices.shape)
            indices = np.concatenate([order.indices[start:end] for start, end in ranges])
            rows = tuple((int(index), int(index) + 1) for index in indices)
        (value,) = self.inner.read([Part(self._sources.get(part.name, part.name), rows)])
        if order is not None and order.axis > 0:
            value = np.take(value, order.indices, order.axis)
        return value


class _OrderSearch:
    """Search for the order of the reference's tensors in the candidate, where names agree.

    Attributes
    ----------
    orders, sources
        The orders and sources found so far, as for `Renumbered`.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], names: Mapping[str, str]) -> None:
        self._reference, self._candidate = checkpoints
        self._names = names
        candidate_tensors = self._candidate.tensors()
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name, info in self._reference.tensors().items():
            if name not in names or info.dtype not in PLAIN:
                continue
            if candidate_tensors[names[name]].shape == info.shape:
                self._shapes[name] = info.shape
        self.orders: dict[str, AxisOrder] = {}
        self.sources: dict[str, str] = {}

    def _order_of_rows(self, name: str) -> np.ndarray | None:
        """Return the reference's row for each row of the candidate, if the orders differ."""
        (expected,) = self._reference.read([Part(name)])
        (actual,) = self._candidate.read([Part(self._names[name])])
        return permutation(actual, expected, ALIKE)

    def experts(self) -> Iterator[str]:
        """Store the orders of experts, and yield the modules with a different order."""
        matches_by_module: dict[str, list[re.Match[str]]] = {}
        for match in filter(None, map(EXPERTS.match, self._shapes)):
            matches_by_module.setdefault(match["module"], []).append(match)
        for module, matches in matches_by_module.items():
            numbered = [match for match in matches if match["number"]]
            fused = [match.string for match in matches if not match["number"]]
            if numbered:
                count = max(int(match["number"]) for match in numbered) + 1
            else:
                count = self._shapes[fused[0]][0]
            routers = [
                name
                for name, shape in self._shapes.items()
                if name.startswith(module) and ROUTER.search(name) and shape[:1] == (count,)
            ]
            order = self._order_of_experts(routers, count)
            if order is None:
                continue
            sources = {match.string: _renumbered_name(match, order) for match in numbered}
            if any(
                self._shapes.get(source) != self._shapes[name] for name, source in sources.items()
            ):
                continue
            if self._are_in_order(sources, fused, order):
                self.orders |= dict.fromkeys((*routers, *fused), AxisOrder(0, order))
                self.sources |= sources
                yield module

    def _order_of_experts(self, routers: Sequence[str], count: int) -> np.ndarray | None:
        """Return the order of the rows of a router, if it differs and keeps groups of experts."""
        weight = next((name for name in routers if len(self._shapes[name]) == 2), None)
        order = None if weight is None else self._order_of_rows(weight)
        if order is None:
            return None
        groups = _group_count(self._reference.config)
        if groups is None:
            # Older files lack the setting where the class of the model has a fixed number.
            groups = 0 if any(CORRECTED.search(name) for name in routers) else 1
        if not groups or count % groups:
            return None
        # Groups are chosen before their experts, and therefore stay together.
        group = order.reshape(groups, -1) // (count // groups)
        return order if (group == group[:, :1]).all() else None

    def _are_in_order(
        self, sources: Mapping[str, str], fused: Sequence[str], order: np.ndarray
    ) -> bool:
        """Return whether a sample of the experts has the same order."""
        pairs = [(Part(source), Part(self._names[name])) for name, source in sources.items()]
        for name in fused[:1]:
            for number, row in enumerate(order.tolist()):
                reference_part = Part(name, ((row, row + 1),))
                candidate_part = Part(self._names[name], ((number, number + 1),))
                pairs.append((reference_part, candidate_part))
        for reference_part, candidate_part in pairs[:SAMPLED_EXPERTS]:
            (expected,) = self._reference.read([reference_part])
            (actual,) = self._candidate.read([candidate_part])
            if not same_numbers(expected, actual):
                return False
        return True

    def neurons(self, names: Collection[str]) -> Iterator[str]:
        """Store the orders of neurons, and yield the modules or layers with a different order.

        ``names`` are the tensors that may contain neurons.
        """
        names_by_module: dict[str, list[str]] = {}
        for name in self._shapes:
            module = _module_of_neurons(name)
            if name in names and module and not EXPERTS.match(name):
                names_by_module.setdefault(module, []).append(name)
        for module, names_of_module in names_by_module.items():
            moved = self._moved_neurons(names_of_module)
            if moved:
                self.orders |= moved
                yield module

    def _moved_neurons(self, names: Sequence[str]) -> dict[str, AxisOrder]:
        """Return the orders of the tensors of a module with its neurons in another order.

        Among the weights with moved rows, the weight with the fewest rows has the order of the
        neurons.
        """
        orders: dict[str, np.ndarray] = {}
        for name in names:
            order = self._order_of_rows(name) if len(self._shapes[name]) == 2 else None
            if order is not None:
                orders[name] = order
        if not orders:
            return {}
        name, order = min(orders.items(), key=lambda item: len(item[1]))
        first_half, second_half = np.array_split(order, 2)
        if len(orders) == 1 and np.array_equal(first_half + len(first_half), second_half):
            order = first_half  # gates and neurons lie in one weight
        width = self._shapes[name][1]
        if len(order) == width:
            return {}  # rows of neurons cannot be told from columns
        moved = self._moved_with_neurons(names, order, width)
        # Rows that no weight reads as columns are no neurons.
        is_read = any(axis_order.axis == 1 for axis_order in moved.values())
        return moved if is_read else {}

    def _moved_with_neurons(
        self, names: Sequence[str], order: np.ndarray, width: int
    ) -> dict[str, AxisOrder]:
        """Return the orders of all tensors of a module that contain its neurons.

        Parameters
        ----------
        names
            The tensors of the module.
        order
            The order of the neurons.
        width
            Number of inputs of the network.
        """
        count = len(order)
        both_halves = np.concatenate([order, order + count])
        moved: dict[str, AxisOrder] = {}
        for name in names:
            shape = self._shapes[name]
            weight_shape = self._shapes.get(re.sub(r"bias$", "weight", name), shape)
            is_of_neurons = weight_shape in ((count, width), (2 * count, width))
            if shape == (count,) or (is_of_neurons and shape[0] == weight_shape[0]):
                moved[name] = AxisOrder(0, both_halves[: shape[0]])
            elif len(shape) == 2 and shape[1] == count:
                moved[name] = AxisOrder(1, order)
        return moved


def _renumbered_name(match: re.Match[str], order: np.ndarray) -> str:
    """Return the name of an expert's tensor with the number of the expert in an order."""
    before, after = match.string[: match.start("number")], match.string[match.end("number") :]
    return f"{before}{order[int(match['number'])]}{after}"


def _module_of_neurons(name: str) -> str:
    """Return the feed-forward module of a tensor, or else its layer; empty if it has neither."""
    if FEED_FORWARD.search(name):
        return re.sub(r"\.[^.]+(?:\.(?:weight|bias))?$", "", name)
    layer = re.match(r".*?\.\d+(?=\.)", name)
    return layer[0] if layer else ""


def notes_on_neurons(causes: Sequence[Cause]) -> list[str]:
    """Return a note on ``--up-to neurons``, if rows and columns of a network have other orders."""
    modules_by_kind: dict[Kind, set[str]] = {Kind.ROWS: set(), Kind.COLUMNS: set()}
    for cause in causes:
        kind = Kind(cause.verdict)
        if kind in modules_by_kind:
            names = filter(FEED_FORWARD.search, cause.outside)
            modules_by_kind[kind].update(map(_module_of_neurons, names))
    modules = modules_by_kind[Kind.ROWS] & modules_by_kind[Kind.COLUMNS]
    if not modules:
        return []
    networks = counted(len(modules), "feed-forward network")
    return [
        f"neurons in another order in {networks}: the model computes the same if all tensors of a "
        "network have one order; --up-to neurons tests it, and accepts this freedom alone"
    ]


def _group_count(config: Mapping[str, Any]) -> int | None:
    """Return the largest number of groups of experts in a configuration; None without groups."""
    counts = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            counts.append(_group_count(value))
        elif EXPERT_GROUPS.search(str(key)):
            counts.append(value)
    return max((count for count in counts if isinstance(count, int)), default=None)


def renumbered(
    models: Sequence[Model], names: Mapping[str, str], neurons: bool
) -> tuple[Model | None, list[str]]:
    """Return the reference with the candidate's order of experts and neurons, and notes.

    None if no order differs.
    """
    search = _OrderSearch([model.checkpoint for model in models], names)
    modules_by_noun = {"experts": [*search.experts()]}
    if neurons:
        unnamed = {name for name, role in roles(models[0]).items() if role == OTHER}
        modules_by_noun["neurons"] = [*search.neurons(unnamed)]
    if not search.orders:
        return None, []
    view = Renumbered(models[0].checkpoint, search.orders, search.sources)
    notes = []
    for noun, modules in modules_by_noun.items():
        if modules:
            example = modules[0].rstrip(".")
            notes.append(f"{noun} in another order in {len(modules)} modules: {example}, …")
    return open_model(view, family=models[0].family_file), notes
