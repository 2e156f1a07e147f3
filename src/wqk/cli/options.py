"""Option types, and options that several verbs take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk._options import TYPES, kind_of
from wqk.errors import required_by

if TYPE_CHECKING:
    from wqk.model import Model


class PathArgument(click.Path):
    """A path; click's own type fails in its own way where one holds a null byte."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse what was typed."""
        if "\0" in str(value):
            self.fail(f"expected a path, got {value!r}", param, ctx)
        return super().convert(value, param, ctx)


# A checkpoint: a path, which a shell completes, or the name of something else.
REF = PathArgument(readable=False)
PATH = PathArgument(path_type=Path)
FILE = PathArgument(path_type=Path, dir_okay=False)
FOLDER = PathArgument(path_type=Path, file_okay=False)
COUNT = click.IntRange(min=1)


class Number(click.FloatRange):
    """A finite number within bounds; click's own type accepts NaN and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse what was typed."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value!r}", param, ctx)
        return number


# More layers or distances than this are a slip of the keyboard.
MOST_NUMBERS = 100_000

POSITIVE = Number(min=0, min_open=True)


def ranges(text: str) -> tuple[int, ...]:
    """Whole numbers and ranges, both ends included: ``0,1,8:64``.

    Examples
    --------
    >>> ranges("0,2:4")
    (0, 2, 3, 4)
    """
    numbers: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d+)(?::(\d+))?", piece)
        first, last = (int(n) for n in (match[1], match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise click.BadParameter(
                f"expected whole numbers and ranges such as 0,1,8:64, got {piece!r}"
            )
        if len(numbers) + last - first >= MOST_NUMBERS:
            raise click.BadParameter(f"expected at most {MOST_NUMBERS:,} numbers, got {piece!r}")
        numbers += range(first, last + 1)
    return tuple(dict.fromkeys(numbers))


json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")

every_head = click.option("--heads", is_flag=True, help="Also score every head.")

revision = click.option("--revision", metavar="R", help="Revision of a Hub repository.")

revision_of_each = click.option(
    "--revision", "revisions", multiple=True, metavar="R", callback=lambda context, option,
    values: _one_for_each(values),
    help="Hub revision; give it twice, for the first and for the second REF.",
)  # fmt: skip

stack = click.option("--stack", metavar="NAME", help="encoder or decoder, if the model has both.")

table_file = click.option(
    "--out", type=FILE, help="Write the table: .parquet, .csv, .jsonl, .tex or .md."
)

gamma = click.option(
    "--gamma", type=Number(min=0), default=2.0,
    help="Outliers exceed the mean norm by this many standard deviations.",
)  # fmt: skip

threads = click.option(
    "--threads", type=COUNT, metavar="N", expose_value=False, callback=lambda context, option,
    number: _use_threads(number), help="Number of CPU threads.",
)  # fmt: skip

below = click.option(
    "--below", type=Number(min=0), metavar="LOSS",
    help="Also compare when the training loss (mean of 100 steps) first falls below LOSS.",
)  # fmt: skip

family_file = click.option(
    "--family", type=FILE, metavar="FILE.toml",
    help="Family file that describes which tensors are queries and keys.",
)  # fmt: skip


def options_of(
    owner: type,
    *,
    omit: Collection[str] = (),
    types: Mapping[str, Any] | None = None,
    defaults: Callable[[str], str] | None = None,
) -> Callable[..., Any]:
    """An option for each field of a class that is made of `wqk._options.option`.

    ``types`` parse fields that are not plain text or numbers; with ``defaults``, which tells a
    field's default for the help, options have none themselves.
    """

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
                help=about["help"] + (defaults(name) if defaults else ""),
            )(function)
        return function

    return decorate


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """How a checkpoint is to be read: ``--family``, ``--heads-per-layer``, ``--key-heads``."""
    for name, kind in (("--key-heads", "Key"), ("--heads-per-layer", "Query")):
        help = f"{kind} heads, if the config does not give their number."
        function = click.option(name, type=COUNT, metavar="N", help=help)(function)
    return family_file(function)


def _use_threads(number: int | None) -> None:
    if number:
        with required_by("--threads"):
            import torch
        torch.set_num_threads(number)


def _one_for_each(values: tuple[str, ...]) -> tuple[str | None, str | None]:
    if len(values) not in (0, 2):
        raise click.UsageError("expected --revision twice: for the first and for the second REF")
    return (values[0], values[1]) if values else (None, None)


# What `wqk.open` is told.
OPENING = ("revision", "family", "heads_per_layer", "key_heads")


def opened(ref: str, options: dict[str, Any]) -> Model:
    """The model that REF names, opened as the options say; takes those out of the others."""
    from wqk.model import open as open_model

    return open_model(ref, **{name: options.pop(name) for name in OPENING if name in options})


def both_opened(first: str, second: str, options: dict[str, Any]) -> tuple[Model, Model]:
    """Two models: a revision for each, and family files for each if they may differ."""
    revisions = options.pop("revisions")
    shared = {name: options.pop(name) for name in OPENING if name in options}
    other = shared | ({"family": options.pop("other_family")} if "other_family" in options else {})
    return (
        opened(first, {**shared, "revision": revisions[0]}),
        opened(second, {**other, "revision": revisions[1]}),
    )
