"""The operations of a forward pass, and the products q·k that a softmax was taken of.

Nothing is assumed about the model's code: every operation that PyTorch carries out is recorded with
its inputs. From a softmax one goes back to the product of two activations that it was taken of, and
from either factor back to the product with a parameter that it came from.

Axes: I queries, J keys, R head width, T tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tools.deriving.records import Circuit, Product, Site, VectorSource
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PRODUCTS = {"bmm", "mm", "addmm", "baddbmm", "convolution", "_convolution", "addmv", "mv"}
MOST_STEPS = 160  # on the way back from queries or keys
# Of an angle, which is taken for zero.
ANGLES = {
    "cos": torch.ones_like,
    "cos_": torch.ones_like,
    "sin": torch.zeros_like,
    "sin_": torch.zeros_like,
    "polar": lambda output: torch.polar(output.abs(), 0 * output.abs()),
}
SOFTMAX = {"_softmax", "_safe_softmax"}
# Through these one goes back from a softmax to the product that it was taken of.
SCORE_OPERATIONS = {
    "_to_copy",
    "add",
    "alias",
    "as_strided",
    "bernoulli",
    "chunk",
    "clamp",
    "clamp_max",
    "clamp_min",
    "cat",
    "clone",
    "constant_pad_nd",
    "copy",
    "detach",
    "diagonal",
    "div",
    "dropout",
    "exp",
    "expand",
    "fill",
    "flip",
    "gather",
    "im2col",
    "index",
    "index_put",
    "index_select",
    "lift_fresh",
    "log",
    "logsigmoid",
    "masked_fill",
    "masked_scatter",
    "maximum",
    "minimum",
    "mul",
    "nan_to_num",
    "native_dropout",
    "neg",
    "permute",
    "pow",
    "repeat",
    "reshape",
    "roll",
    "rsub",
    "scatter",
    "select",
    "select_scatter",
    "slice",
    "slice_scatter",
    "sort",
    "split",
    "split_with_sizes",
    "squeeze",
    "stack",
    "sub",
    "t",
    "tanh",
    "topk",
    "transpose",
    "tril",
    "triu",
    "unbind",
    "unfold",
    "unsqueeze",
    "_unsafe_view",
    "view",
    "where",
    "zero",
}
VIEWS = {
    "view",
    "_unsafe_view",
    "reshape",
    "permute",
    "transpose",
    "t",
    "expand",
    "unsqueeze",
    "squeeze",
    "slice",
    "select",
    "clone",
    "constant_pad_nd",
    "alias",
    "detach",
    "as_strided",
    "unfold",
    "flip",
    "roll",
    "repeat",
    "split",
    "split_with_sizes",
    "unbind",
    "chunk",
}

# What weights, and what they mix, go through besides.
MIXED = {"_to_copy", "native_dropout", "dropout", "mul", "cat", "masked_fill", "index", "sum"}


@dataclass(eq=False)
class Node:
    """One tensor that an operation put out."""

    operation: str
    inputs: list[Node]
    output: torch.Tensor
    arguments: tuple[Any, ...] = ()
    parameter: str = ""
    module: str = ""
    index: int = 0
    varies: bool = False  # depends on what the model was given
    function: Any = None
    rows: torch.Tensor | None = None
    alpha: float = 1.0  # factor within a product


class GraphTrace(TorchDispatchMode):
    """Records operations; on request, takes positions out of rotary models (all angles zero)."""

    def __init__(self, flat: bool = True) -> None:
        super().__init__()
        self.flat, self.flattened = flat, False
        self.nodes: list[Node] = []
        self._of: dict[int, Node] = {}
        self._writes: dict[int, list[Node]] = {}
        self.parameters: dict[int, str] = {}
        self.module = ""
        self.recording = False

    def name_parameters(self, model: torch.nn.Module) -> None:
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            self.parameters.setdefault(id(value), name)

    def given(self, *values: Any) -> None:
        """Mark tensors as what the model is given."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self._node(value).varies = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        output = func(*args, **kwargs)
        if self.flat and name in ANGLES:
            self.flattened = True
            output = ANGLES[name](output)
        if self.recording:
            self._record(func, name, args, kwargs, output)
        return output

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        inputs = [self._node(t) for t in _tensors((args, list(kwargs.values())))]
        writes = [node for t in _tensors(args) for node in self._later_writes(t)]
        in_place = name.endswith("_") and not name.endswith("__")
        for tensor in _tensors(output if isinstance(output, tuple | list) else [output]):
            node = Node(
                name.rstrip("_") if in_place else name,
                [*inputs, *writes],
                tensor,
                args,
                module=self.module,
                index=len(self.nodes),
                varies=any(n.varies for n in inputs) or any(n.varies for n in writes),
                function=func,
                alpha=float(kwargs.get("alpha", 1.0)),
            )
            self.nodes.append(node)
            self._of[id(tensor)] = node
            if in_place:
                self._writes.setdefault(_storage(tensor), []).append(node)

    def _node(self, tensor: torch.Tensor) -> Node:
        node = self._of.get(id(tensor))
        if node is None:
            node = Node("leaf", [], tensor, parameter=self.parameters.get(id(tensor), ""))
            self._of[id(tensor)] = node
        return node

    def _later_writes(self, tensor: torch.Tensor) -> list[Node]:
        since = self._of[id(tensor)].index if id(tensor) in self._of else -1
        written = self._writes.get(_storage(tensor), ())
        return [node for node in written if node.index > since]

    def sites(self) -> list[Site]:
        """Every softmax of products of activations, in the order in which they were computed.

        Those whose results nothing is made of are left out.
        """
        site_list = []
        used = {  # what is kept for a gradient is detached
            id(source)
            for node in self.nodes
            if node.operation != "detach"
            for source in node.inputs
        }
        users: dict[int, list[Node]] = {}
        for node in self.nodes:
            for source in node.inputs:
                users.setdefault(id(source), []).append(node)
        for node in self.nodes:
            if node.operation in SOFTMAX and id(node) in used:
                site = Site(node.module, list(_products(node)), *_mask(node.output))
                site.turned = not self.flat
                if site.products:
                    site.circuit = _circuit(node, users)
                    site_list.append(site)
        return site_list


def _mask(weights: torch.Tensor) -> tuple[bool, int]:
    """Return whether no later key has weight, and the largest distance of a key with weight.

    A sink's weights come last.
    """
    if weights.ndim >= 2 and weights.shape[-1] == weights.shape[-2] + 1:
        weights = weights[..., :-1]
    if weights.ndim < 2 or weights.shape[-2] != weights.shape[-1] or weights.shape[-1] > 512:
        return False, -1
    size = weights.shape[-1]
    has_weight = (weights.reshape(-1, size, size) > 0).any(dim=0)
    rows, columns = has_weight.nonzero(as_tuple=True)
    if size < 2 or not len(rows):
        return False, -1
    return bool((rows >= columns).all()), int((rows - columns).abs().max())


def _factor(path: tuple[Node, ...]) -> float:
    """The number that a product is multiplied with on its way to the softmax."""
    factor = 1.0
    for node in path:
        if node.operation not in ("mul", "div") or len(node.arguments) < 2:
            continue
        for operand in node.arguments[:2]:
            if isinstance(operand, torch.Tensor):
                if operand.numel() != 1 or node.output.numel() == 1:
                    continue
                operand = float(operand)
            factor = factor * operand if node.operation == "mul" else factor / operand
    return float(factor)


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _parameter(node: Node) -> str:
    """The parameter that a tensor is a view of, or does not depend on the input without one."""
    while node.operation in VIEWS | {"_to_copy"} and node.inputs:
        node = node.inputs[0]
    return node.parameter if node.operation == "leaf" else ""


def _products(softmax: Node) -> Iterator[Product]:
    """The products of two activations that a softmax was taken of."""
    todo, seen = [(softmax.inputs[0], (softmax,))], set()
    terms = _terms(softmax.inputs[0])
    while todo:
        node, path = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.operation in PRODUCTS:
            product = _product(node, path)
            if product is not None:
                product.factor = _factor(path) * node.alpha
                product.terms = terms
                product.through = tuple(step.operation for step in path)
                yield product
            if node.operation == "baddbmm":
                todo.append((node.inputs[0], (node, *path)))
        elif node.operation == "sum" and node.inputs and node.inputs[0].operation == "mul":
            product = _summed(node)
            if product is not None:
                yield product
        elif node.operation in SCORE_OPERATIONS:
            todo += [(source, (node, *path)) for source in node.inputs]


def _circuit(softmax: Node, users: dict[int, list[Node]]) -> Circuit | None:
    """Return the factor that the weights are multiplied with, and the projection that follows."""
    mixing, weights = _following(softmax, users, lambda n: n.operation in ("bmm", "mm"))
    if mixing is None or len(mixing.inputs) != 2 or any(map(_parameter, mixing.inputs)):
        return None
    side = int(mixing.inputs[0] is weights)
    values = mixing.inputs[side]
    rows = values.output.detach() if side else values.output.detach().transpose(-1, -2)
    rows = (rows if rows.ndim == 3 else rows[None]).clone()
    circuit = Circuit(rows, list(_sources(values)))  # type: ignore[arg-type]
    product, last = _following(mixing, users, lambda n: n.operation in PRODUCTS)
    if product is None or product.operation not in ("mm", "addmm"):
        return circuit
    names = [_parameter(n) for n in product.inputs[-2:]]
    if bool(names[0]) == bool(names[1]):
        return circuit
    return Circuit(
        circuit.values,
        circuit.sources,
        names[0] or names[1],
        _rows(last),
        _rows(product),  # type: ignore[arg-type]
    )


def _following(
    node: Node, users: dict[int, list[Node]], is_wanted: Callable[[Node], bool]
) -> tuple[Node | None, Node]:
    """The nearest node after this one that is wanted, and which of its inputs led there.

    Nothing is added on the way, and no norm is passed.
    """
    todo, seen = [node], {id(node)}
    for current in todo:  # grows while it is gone through
        for user in users.get(id(current), ()):
            if is_wanted(user):
                return user, current
            through = user.operation in VIEWS | MIXED
            if through and id(user) not in seen and len(seen) < MOST_STEPS:
                seen.add(id(user))
                todo.append(user)
    return None, node


def _product(node: Node, path: tuple[Node, ...]) -> Product | None:
    if node.operation not in ("bmm", "mm", "baddbmm"):
        return None
    query_node, key_node = node.inputs[-2:] if len(node.inputs) < 4 else node.inputs[1:3]
    if node.operation == "baddbmm":
        query_node, key_node = node.inputs[1:3]
    else:
        query_node, key_node = node.inputs[:2]
    if _parameter(query_node) or _parameter(key_node):
        return None
    queries, keys = query_node.output, key_node.output.transpose(-1, -2)
    if queries.ndim == 2:
        queries, keys = queries[None], keys[None]
    if not _runs_over_keys(node, path):
        query_node, key_node, queries, keys = key_node, query_node, keys, queries
    return Product(
        queries.detach().clone(),
        keys.detach().clone(),
        list(_sources(query_node)),
        list(_sources(key_node)),
        int(query_node.varies) + int(key_node.varies),
    )


def _summed(node: Node) -> Product | None:
    """A product that is written as a sum over the last axis of what is multiplied."""
    first, second = node.inputs[0].inputs[:2] if len(node.inputs[0].inputs) > 1 else (None, None)
    if first is None or second is None or _parameter(first) or _parameter(second):
        return None
    if first.output.ndim != second.output.ndim or not first.output.ndim:
        return None
    width = first.output.shape[-1]
    if second.output.shape[-1] != width:
        return None
    return Product(
        first.output.detach().reshape(1, -1, width).clone(),
        second.output.detach().reshape(1, -1, width).clone(),
        list(_sources(first)),
        list(_sources(second)),
        int(first.varies) + int(second.varies),
    )


def _runs_over_keys(node: Node, path: tuple[Node, ...]) -> bool:
    """Return whether the softmax runs along the product's last axis, through all views."""
    shape = node.output.shape
    index = torch.arange(shape[-1]).expand(shape)
    current = node
    for step in path:
        if step.operation in SOFTMAX:
            axis = step.arguments[1]
            if index.shape != step.inputs[0].output.shape:
                return True
            return index.shape[axis] < 2 or bool((index.diff(dim=axis) != 0).any())
        if step.operation in VIEWS and step.inputs and step.inputs[0] is current:
            try:
                index = step.function(index, *step.arguments[1:])
            except (RuntimeError, TypeError):
                return True
        elif index.shape != step.output.shape:
            try:
                index = index.expand(step.output.shape)
            except RuntimeError:
                return True
        current = step
    return True


def _terms(scores: Node) -> tuple[str, ...]:
    """Parameters that scores hold next to products: tables of biases, say."""
    todo, seen, parameters = [scores], set(), []
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if node.parameter:
            parameters.append(node.parameter)
        elif node.operation in PRODUCTS and any(map(_parameter, node.inputs)):
            parameters += [name for name in map(_parameter, node.inputs) if name]
        elif node.operation in SCORE_OPERATIONS | {"embedding", "sigmoid", "relu"}:
            todo += node.inputs
    return tuple(parameters)


def _norm(node: Node) -> tuple[str, ...]:
    """Kind, gain, bias and offset of the norm whose output this is; empty where it is none."""
    while node.operation in VIEWS | {"_to_copy"} and node.inputs:
        node = node.inputs[0]
    names = [_parameter(n) for n in node.inputs]
    if node.operation in ("native_layer_norm", "_fused_rms_norm", "rms_norm"):
        kind = "layer" if node.operation == "native_layer_norm" else "rms"
        parameters = [name for name in names if name]
        return (
            kind,
            parameters[0] if parameters else "",
            parameters[1] if len(parameters) > 1 else "",
            "0",
        )
    if node.operation != "mul" or len(node.inputs) < 2:
        return ()
    for gain in node.inputs:
        if _parameter(gain):
            return ("rms", _parameter(gain), "", "0")
        if gain.operation == "add" and any(map(_parameter, gain.inputs)):
            return ("rms", next(filter(None, map(_parameter, gain.inputs))), "", "1")
    return ()


def _rows(node: Node) -> torch.Tensor:
    """The tokens (T, D) of a tensor; the same object each time."""
    if node.rows is None:
        node.rows = node.output.detach().reshape(-1, node.output.shape[-1])
    return node.rows


def _sources(factor: Node) -> Iterator[VectorSource]:
    """The products with parameters that queries or keys come from, nearest first."""
    todo: list[tuple[Node, int, tuple[str, ...]]] = [(factor, 0, ())]
    seen: set[int] = set()
    for node, depth, operations in todo:  # grows while it is gone through
        if len(seen) > MOST_STEPS:
            return
        if id(node) in seen or depth > 2:
            continue
        seen.add(id(node))
        if node.operation in PRODUCTS:
            activations = [n for n in node.inputs if not _parameter(n)]
            names = [_parameter(n) for n in node.inputs if _parameter(n)]
            weights = [n for n in names if not n.endswith("bias")]
            if weights and node.operation not in ("convolution", "_convolution"):
                source_node = activations[0] if activations else node.inputs[0]
                if source_node.output.ndim >= 2:
                    rows = _rows(source_node)
                    yield VectorSource(rows, weights[0], depth, operations, _norm(source_node))
            elif weights:
                source_node = node.inputs[0].output.detach()
                kernel = next(n for n in node.inputs if _parameter(n) == weights[0]).output.shape
                if all(width == 1 for width in kernel[2:]):  # one token at a time
                    rows = source_node.movedim(1, -1).reshape(-1, source_node.shape[1])
                    yield VectorSource(rows, weights[0], depth, operations)
                else:
                    yield VectorSource(source_node, weights[0], depth, ("convolution",))
            todo += [(n, depth + 1, ()) for n in activations]
            # A learned query is a parameter that meets another.
            if not activations:
                for n in node.inputs:
                    if n.output.ndim >= 2:
                        rows = _rows(n)
                        yield VectorSource(rows, weights[-1] if weights else "", depth, operations)
        else:
            passed = node.operation in VIEWS or node.operation in operations
            path_operations = operations if passed else (*operations, node.operation)
            if (
                node.operation == "leaf"
                and node.output.ndim >= 2
                and node.output.is_floating_point()
            ):
                rows = _rows(node)
                yield VectorSource(rows, node.parameter, depth, path_operations)
            todo += [(n, depth, path_operations) for n in node.inputs]
