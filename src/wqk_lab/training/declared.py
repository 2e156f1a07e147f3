"""Options as fields of a dataclass: one declaration for the checks and for the command."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, field, fields
from inspect import cleandoc
from typing import Any

import click

from wqk.cli.options import COUNT, Number
from wqk.errors import required_by

# Types of fields, by name.
TYPES = {"str": str, "int": int, "float": float}

_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "choices": ("one of", lambda value, choices: value in choices),
    "least": ("at least", lambda value, least: bool(value >= least)),
    "above": ("greater than", lambda value, above: bool(value > above)),
    "below": ("less than", lambda value, below: bool(value < below)),
}


def option(*, default: Any = MISSING, **about: Any) -> Any:
    """Return a field with metadata, such as ``choices``, bounds or ``metavar``."""
    return field(default=default, metadata=about)


def described(owner: Any, section: str) -> tuple[str, dict[str, str]]:
    """Return a docstring up to a section, and the section's description of each parameter."""
    text, _, section_text = cleandoc(owner.__doc__ or "").partition(f"{section}\n----------\n")
    entries = re.findall(r"^(\w+)\n((?:    .*\n?)+)", section_text, re.MULTILINE)
    return text, {name: " ".join(map(str.strip, lines.splitlines())) for name, lines in entries}


def documented(command: click.Command) -> click.Command:
    """Add the help of options from the docstring of a command to the command."""
    command.help, descriptions = described(command.callback, "Parameters")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            parameter.help = parameter.help or descriptions.get(str(parameter.name))
    return command


def kind_of(entry: Field[Any]) -> str:
    """Return the name of a field's type without None."""
    return str(entry.type).removesuffix(" | None")


def checked(entry: Field[Any], value: Any, error: Callable[[str], Exception]) -> Any:
    """Return a field's value, as a float for a float field; ``error`` for an invalid value."""
    name, expected_type = entry.name, kind_of(entry)
    if value is None and expected_type != entry.type:
        return None
    if expected_type == "float" and type(value) is int:
        value = float(value)
    if type(value) is not TYPES.get(expected_type, type(value)) or (
        expected_type.startswith("Mapping") and not isinstance(value, Mapping)
    ):
        raise error(f"{name}={value!r} must be of type {expected_type}")
    for bound, (phrase, holds) in _BOUNDS.items():
        if bound in entry.metadata and not holds(value, entry.metadata[bound]):
            shown = entry.metadata[bound]
            listed = ", ".join(shown) if isinstance(shown, tuple) else shown
            raise error(f"{name}={value!r} must be {phrase} {listed}")
    if isinstance(value, float) and not math.isfinite(value):
        raise error(f"{name}={value!r} must be a finite number")
    return value


def options_of(
    owner: type,
    *,
    omit: Collection[str] = (),
    types: Mapping[str, Any] | None = None,
    defaults: Callable[[str], str] | None = None,
) -> Callable[..., Any]:
    """Return an option for each field of a class with fields made by `option`.

    ``types`` parse fields that are neither text nor numbers. With ``defaults``, the help shows the
    defaults of fields, but the options have no defaults.
    """
    descriptions = described(owner, "Attributes")[1]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for entry in reversed(fields(owner)):
            name, about = entry.name, entry.metadata
            if name in omit:
                continue
            choices = about.get("choices")
            kind = click.Choice(choices) if choices else TYPES.get(kind_of(entry))
            function = click.option(
                about.get("flags", f"--{name.replace('_', '-')}"),
                type=(types or {}).get(name, kind),
                metavar=about.get("metavar"),
                default=None if defaults else entry.default,
                help=descriptions[name] + (defaults(name) if defaults else ""),
            )(function)
        return function

    return decorate


def use_threads(number: int, source: str = "--threads") -> None:
    """Set the number of threads of PyTorch; ``source`` is named if PyTorch is not installed."""
    with required_by(source):
        import torch
    torch.set_num_threads(number)


def _use_chosen_threads(
    context: click.Context, option: click.Parameter, number: int | None
) -> None:
    if number:
        use_threads(number)


threads = click.option(
    "--threads",
    type=COUNT,
    metavar="N",
    expose_value=False,
    callback=_use_chosen_threads,
    help="Number of CPU threads.  [default: all cores; lab train: one up to width 64]",
)


below = click.option(
    "--below",
    type=Number(min=0),
    metavar="LOSS",
    help="Also compare when the training loss (mean of 100 steps) first falls below LOSS.",
)
