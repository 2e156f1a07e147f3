"""Repairs as programs: steps that edit the candidate's tensors and its configuration.

A program is text for people, and also the code that is run: `wqk.sameness.execution` runs the
printed lines. The variables of a program are

- ``tensors``: the candidate's tensors by name, as they are stored;
- ``reference``: the reference's tensors under the candidate's names and in the candidate's layout;
- ``adapter``: factors A and B of an adapter of one of the models, by the candidate's names of the
  adapted weights;
- ``config``: the candidate's configuration.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeVar

from wqk.sameness.axis_orders import Order
from wqk.sameness.edits import Edit, Take

# Columns of printed code.
WIDTH = 100
NUMBER_OF_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


class Step(Protocol):
    """One step of a program."""

    @property
    def edited(self) -> tuple[str, ...]:
        """The tensors that the step edits."""

    def code(self) -> str:
        """Return the step as lines of PyTorch."""


@dataclass(frozen=True)
class Change:
    """One edit of several tensors."""

    names: tuple[str, ...]
    edit: Edit

    @property
    def edited(self) -> tuple[str, ...]:
        """The tensors that the step edits."""
        return self.names

    def code(self) -> str:
        """Return the step as lines of PyTorch.

        Examples
        --------
        >>> print(Change(("layers.0.q", "layers.1.q"), Take()).code())
        for layer in (0, 1):
            name = f"layers.{layer}.q"
            tensors[name] = reference[name]
        """
        if isinstance(self.edit, Take):
            body = "tensors[name] = reference[name]"
        elif self.edit.needs_original:
            body = f"w, original = tensors[name], reference[name]\n{self.edit.code('w')}"
            body += "\ntensors[name] = w"
        else:
            body = f"w = tensors[name]\n{self.edit.code('w')}\ntensors[name] = w"
        return for_each(self.names, body)


@dataclass(frozen=True)
class Exchange:
    """Tensors to exchange with each other."""

    targets: tuple[str, ...]
    sources: tuple[str, ...]

    @property
    def edited(self) -> tuple[str, ...]:
        """The tensors that the step edits."""
        return self.targets

    @property
    def cycles(self) -> list[Exchange]:
        """Split the exchange into independent cycles of tensors.

        If a tensor is copied instead of exchanged, the exchange is not split.

        Examples
        --------
        >>> [cycle.targets for cycle in Exchange(("a", "c", "b", "d"), ("b", "d", "a", "c")).cycles]
        [('a', 'b'), ('c', 'd')]
        """
        if set(self.targets) != set(self.sources):
            return [self]
        source_of = dict(zip(self.targets, self.sources, strict=True))
        cycles: list[Exchange] = []
        visited: set[str] = set()
        for start in self.targets:
            cycle: list[str] = []
            name = start
            while name not in visited:
                visited.add(name)
                cycle.append(name)
                name = source_of[name]
            if cycle:
                sources = tuple(source_of[name] for name in cycle)
                cycles.append(Exchange(tuple(cycle), sources))
        return cycles

    def renamed(self, rename: Callable[[str], str]) -> Exchange:
        """Return the step with new names of tensors."""
        return Exchange(tuple(map(rename, self.targets)), tuple(map(rename, self.sources)))

    def code(self) -> str:
        """Return the step as lines of PyTorch.

        Examples
        --------
        >>> print(Exchange(("q", "k"), ("k", "q")).code())
        a, b = "q", "k"
        tensors[a], tensors[b] = tensors[b], tensors[a]
        """
        if len(self.targets) == 2:
            first, second = map(quoted, self.targets)
            names = f"a, b = {first}, {second}"
            if len(names) > WIDTH - 4:
                names = f"a = {first}\nb = {second}"
            return f"{names}\ntensors[a], tensors[b] = tensors[b], tensors[a]"
        pairs = zip(self.targets, self.sources, strict=True)
        listed = "".join(f"    {quoted(name)}: {quoted(source)},\n" for name, source in pairs)
        return (
            f"sources = {{\n{listed}}}\n"
            "moved = {name: tensors[source] for name, source in sources.items()}\n"
            "tensors.update(moved)"
        )


@dataclass(frozen=True)
class Recut:
    """Tensors to join, reorder by rows, and cut again.

    Attributes
    ----------
    names, lengths
        The tensors in the order of joining, and their numbers of rows.
    order
        The new order of the joined rows, which are then cut at the same places.
    axis
        The axis of the rows.
    """

    names: tuple[str, ...]
    lengths: tuple[int, ...]
    order: Order
    axis: int = 0

    @property
    def edited(self) -> tuple[str, ...]:
        """The tensors that the step edits."""
        return self.names

    def renamed(self, rename: Callable[[str], str]) -> Recut:
        """Return the step with new names of tensors."""
        return replace(self, names=tuple(map(rename, self.names)))

    def code(self) -> str:
        """Return the step as lines of PyTorch."""
        dim = f", {self.axis}" if self.axis else ""
        listed = "".join(f"    {quoted(name)},\n" for name in self.names)
        return (
            f"names = (\n{listed})\n"
            f"w = torch.cat([tensors[name] for name in names]{dim})\n"
            f"{self.order.code('w', self.axis)}\n"
            f"for name, part in zip(names, w.split({list(self.lengths)}{dim})):\n"
            f"    tensors[name] = part"
        )


class Template(str):
    """The name of a tensor with ``{layer}`` instead of the number of its layer."""

    __slots__ = ()


@dataclass(frozen=True)
class ForLayers:
    """One step, repeated for several layers.

    Attributes
    ----------
    layers
        Numbers of the layers.
    step
        The step; its names are templates.
    """

    layers: tuple[int, ...]
    step: Exchange | Recut

    @property
    def edited(self) -> tuple[str, ...]:
        """The tensors that the step edits."""
        names: list[str] = []
        for step in self.singles:
            names += step.edited
        return tuple(names)

    @property
    def singles(self) -> list[Exchange | Recut]:
        """The step for each layer."""
        steps = []
        for layer in self.layers:
            number = str(layer)
            steps.append(self.step.renamed(partial(_of_layer, number=number)))
        return steps

    def code(self) -> str:
        """Return the step as lines of PyTorch.

        Examples
        --------
        >>> names = Template("layers.{layer}.a"), Template("layers.{layer}.b")
        >>> print(ForLayers((0, 2), Exchange(names, names[::-1])).code())
        for layer in (0, 2):
            a, b = f"layers.{layer}.a", f"layers.{layer}.b"
            tensors[a], tensors[b] = tensors[b], tensors[a]
        """
        return (
            f"for layer in {_sequence(self.layers)}:\n{textwrap.indent(self.step.code(), '    ')}"
        )


@dataclass(frozen=True)
class Renumber:
    """Layers of a stack that get new numbers, are taken from the reference, or are removed.

    Attributes
    ----------
    start
        The beginning of the names of all tensors, before the layer's number.
    endings
        The names of a layer's tensors after the number.
    moves
        The new and the old number of each layer that moves, in the order of the moves.
    taken
        Numbers of the layers that are taken from the reference.
    removed
        Numbers of the layers that are removed.
    """

    start: str
    endings: tuple[str, ...]
    moves: tuple[tuple[int, int], ...] = ()
    taken: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()

    @property
    def edited(self) -> tuple[str, ...]:
        """The tensors that the step edits."""
        targets = [target for target, _ in self.moves]
        names: list[str] = []
        for layer in (*targets, *self.taken, *self.removed):
            names += [f"{self.start}{layer}.{ending}" for ending in self.endings]
        return tuple(names)

    def code(self) -> str:
        """Return the step as lines of PyTorch.

        Examples
        --------
        >>> print(Renumber("h.", ("a", "b"), ((3, 2),), taken=(2,)).code())
        endings = (
            "a",
            "b",
        )
        for layer, source in ((3, 2),):
            for ending in endings:
                tensors[f"h.{layer}.{ending}"] = tensors[f"h.{source}.{ending}"]
        for layer in (2,):
            for ending in endings:
                name = f"h.{layer}.{ending}"
                tensors[name] = reference[name]
        """
        target = f'f"{self.start}{{layer}}.{{ending}}"'
        source = f'f"{self.start}{{source}}.{{ending}}"'
        listed = "".join(f"    {quoted(ending)},\n" for ending in self.endings)
        lines = [f"endings = (\n{listed})"]
        if self.moves:
            lines += [
                f"for layer, source in {self.moves}:",
                "    for ending in endings:",
                f"        tensors[{target}] = tensors[{source}]",
            ]
        if self.taken:
            lines += [
                f"for layer in {_sequence(self.taken)}:",
                "    for ending in endings:",
                f"        name = {target}",
                "        tensors[name] = reference[name]",
            ]
        if self.removed:
            lines += [
                f"for layer in {_sequence(self.removed)}:",
                "    for ending in endings:",
                f"        del tensors[{target}]",
            ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Setting:
    """A setting of the configuration, by its path of keys; ``removed`` to delete the key."""

    path: tuple[str, ...]
    value: Any
    removed: bool = False

    @property
    def edited(self) -> tuple[str, ...]:
        """The tensors that the step edits: none."""
        return ()

    def code(self) -> str:
        """Return the step as lines of Python.

        Examples
        --------
        >>> Setting(("text_config", "rope_theta"), 5e5).code()
        'config["text_config"]["rope_theta"] = 500000.0'
        """
        place = "config" + "".join(f"[{quoted(key)}]" for key in self.path[:-1])
        if self.removed:
            return f"{place}.pop({quoted(self.path[-1])})"
        return f"{place}[{quoted(self.path[-1])}] = {self.value!r}"


def quoted(text: str) -> str:
    """Return a string literal, in double quotes if possible."""
    if isinstance(text, Template):
        return f'f"{text}"'
    literal = repr(text)
    if '"' in text or "\\" in text or literal[0] != "'":
        return literal
    return f'"{literal[1:-1]}"'


StepType = TypeVar("StepType", bound=Step)


def merged_steps(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Merge the steps of several causes into a shorter program with the same effect.

    Repeated steps are removed. The order is: settings, new numbers of layers, tensors that move (in
    loops over layers), and for each edit one change of all tensors with this edit.
    """
    settings: list[Setting] = []
    renumberings: list[Renumber] = []
    moves: list[Exchange | Recut] = []
    changes: list[Change] = []
    for step in steps:
        if isinstance(step, Setting):
            settings.append(step)
        elif isinstance(step, Renumber):
            renumberings.append(step)
        elif isinstance(step, Change):
            changes.append(step)
        else:
            moves += _moves(step)
    return (
        *_each_once(settings),
        *_each_once(renumberings),
        *_looped(_each_once(moves)),
        *_joined_changes(changes),
    )


def _each_once(steps: Iterable[StepType]) -> list[StepType]:
    """Return steps without repetitions; steps with equal code are equal."""
    return list({step.code(): step for step in steps}.values())


def _moves(step: Step) -> list[Exchange | Recut]:
    """Return the exchanges and cuts of a step; an exchange is split into its cycles."""
    if isinstance(step, ForLayers):
        return step.singles
    if isinstance(step, Exchange):
        return [*step.cycles]
    if isinstance(step, Recut):
        return [step]
    return []


def _joined_changes(changes: Iterable[Change]) -> list[Change]:
    """Join changes with the same edit into one change of several tensors."""
    edits: dict[str, Edit] = {}
    names_by_code: dict[str, dict[str, None]] = {}
    for change in changes:
        code = change.edit.code()
        edits.setdefault(code, change.edit)
        names_by_code.setdefault(code, {}).update(dict.fromkeys(change.names))
    return [Change(tuple(names), edits[code]) for code, names in names_by_code.items()]


def _looped(steps: Iterable[Exchange | Recut]) -> list[Step]:
    """Join equal steps of several layers into one repeated step.

    Steps that cannot be joined come first.
    """
    layers_by_code: dict[str, list[int]] = {}
    templates: dict[str, Exchange | Recut] = {}
    alone: list[Step] = []
    for step in steps:
        layer = _only_layer(step.edited)
        if layer is None:
            alone.append(step)
            continue
        template = step.renamed(lambda name: Template(NUMBER_OF_LAYER.sub("{layer}", name)))
        code = template.code()
        templates.setdefault(code, template)
        layers_by_code.setdefault(code, []).append(layer)
    looped: list[Step] = []
    for code, layers in layers_by_code.items():
        loop = ForLayers(tuple(layers), templates[code])
        if len(layers) > 1:
            looped.append(loop)
        else:
            looped += loop.singles
    return [*alone, *looped]


def _only_layer(names: Iterable[str]) -> int | None:
    """Return the layer of all tensors.

    None if the tensors are in several layers, or if a name contains more than one number, or cannot
    be a template for the names in other layers.
    """
    layers: set[int] = set()
    for name in names:
        numbers = NUMBER_OF_LAYER.findall(name)
        if len(numbers) != 1 or not _can_be_template(name):
            return None
        layers.add(int(numbers[0]))
    return layers.pop() if len(layers) == 1 else None


def program(steps: Sequence[Step]) -> str:
    """Return the lines of several steps, at most `WIDTH` columns wide."""
    lines = chain.from_iterable(step.code().splitlines() for step in steps)
    return "\n".join(map(wrapped, lines))


def wrapped(line: str) -> str:
    """Break a long line between the elements of a list."""
    if len(line) <= WIDTH or '"' in line:
        return line
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    return "\n".join(
        textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
    )


def for_each(names: Sequence[str], body: str) -> str:
    """Return lines of a loop over names with ``body``, with the variable ``name``.

    Examples
    --------
    >>> print(for_each(["a"], "tensors[name] = 2 * tensors[name]"))
    name = "a"
    tensors[name] = 2 * tensors[name]
    """
    if len(names) == 1:
        return f"name = {quoted(names[0])}\n{body}"
    repetition = _repetition(names)
    if repetition is None:
        return _for_names(names, body)
    templates, layers = repetition
    if len(layers) == 1:
        return _for_names([_of_layer(name, str(layers[0])) for name in templates], body)
    if len(templates) == 1:
        inner = f"name = {quoted(templates[0])}\n{body}"
    else:
        inner = _for_names(templates, body)
    return f"for layer in {_sequence(layers)}:\n{textwrap.indent(inner, '    ')}"


def _for_names(names: Sequence[str], body: str) -> str:
    """Return a loop over names, one name a line."""
    listed = "".join(f"    {quoted(name)},\n" for name in names)
    return f"for name in (\n{listed}):\n{textwrap.indent(body, '    ')}"


def _repetition(names: Sequence[str]) -> tuple[list[Template], list[int]] | None:
    """Return templates and layers that generate the names; None for other names."""
    if not all(map(_can_be_template, names)):
        return None
    layers_by_template: dict[Template, list[int]] = {}
    for name in names:
        match = NUMBER_OF_LAYER.search(name)
        if match is None:
            return None
        template = Template(f"{name[: match.start()]}{{layer}}{name[match.end() :]}")
        layers_by_template.setdefault(template, []).append(int(match[0]))
    layers = {tuple(numbers) for numbers in layers_by_template.values()}
    if len(layers) != 1:
        return None
    return [*layers_by_template], [*layers.pop()]


def _can_be_template(name: str) -> bool:
    """Return whether a name can be written in an f-string without escapes."""
    return not any(character in name for character in "{}\\\"'")


def _of_layer(template: str, number: str) -> str:
    """Return the name of a tensor in one layer."""
    return template.replace("{layer}", number)


def _sequence(layers: Sequence[int]) -> str:
    """Return numbers of layers as code: a range if possible, else a tuple.

    Examples
    --------
    >>> _sequence((0, 1, 2)), _sequence((1, 4))
    ('range(3)', '(1, 4)')
    """
    if len(layers) > 2 and list(layers) == list(range(layers[0], layers[-1] + 1)):
        start = f"{layers[0]}, " if layers[0] else ""
        return f"range({start}{layers[-1] + 1})"
    listed = ", ".join(map(str, layers))
    return f"({listed},)" if len(layers) == 1 else f"({listed})"
