"""Option types, and options that several verbs take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem


class Reference(click.ParamType):  # type: ignore[type-arg]
    """A checkpoint: a path, for which a shell completes files and folders, or a name on the Hub."""

    name = "ref"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave it to the shell, which knows the file system."""
        return [CompletionItem(incomplete, type="file")]


REF = Reference()
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
COUNT = click.IntRange(min=1)


class Number(click.FloatRange):
    """A finite number within bounds, which NaN is by click's own check."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse what was typed."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value!r}", param, ctx)
        return number


POSITIVE = Number(min=0, min_open=True)


class Ranges(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers and ranges, both ends included: ``0,1,8:64``.

    Examples
    --------
    >>> Ranges().convert("0,2:4", None, None)
    (0, 2, 3, 4)
    """

    name = "ranges"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse what was typed."""
        if isinstance(value, tuple):
            return value
        numbers: list[int] = []
        for piece in str(value).split(","):
            match = re.fullmatch(r"(\d+)(?::(\d+))?", piece)
            first, last = (int(n) for n in (match[1], match[2] or match[1])) if match else (1, 0)
            if last < first:
                self.fail(
                    f"expected whole numbers and ranges such as 0,1,8:64, got {piece!r}", param
                )
            numbers += range(first, last + 1)
        return tuple(dict.fromkeys(numbers))


json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")

every_head = click.option("--heads", is_flag=True, help="Also score every head.")

revision = click.option("--revision", metavar="R", help="Revision of a Hub repository.")

revision_of_each = click.option(
    "--revision",
    "revisions",
    multiple=True,
    metavar="R",
    callback=lambda context, option, values: _one_for_each(values),
    help="Hub revision; give it twice, for the first and for the second REF.",
)

stack = click.option("--stack", metavar="NAME", help="encoder or decoder, if the model has both.")

table_file = click.option(
    "--out", type=FILE, metavar="FILE", help="Write the table: .parquet, .csv, .jsonl, .tex or .md."
)

gamma = click.option(
    "--gamma",
    type=Number(min=0),
    default=2.0,
    help="Outliers exceed the mean norm by this many standard deviations.",
)

family_file = click.option(
    "--family",
    type=FILE,
    metavar="FILE.toml",
    help="Family file that describes which tensors are queries and keys.",
)


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """How a checkpoint is to be read: ``--family``, ``--heads-per-layer``, ``--key-heads``."""
    for name, kind in (("--key-heads", "Key"), ("--heads-per-layer", "Query")):
        help = f"{kind} heads, if the config does not give their number."
        function = click.option(name, type=COUNT, metavar="N", help=help)(function)
    return family_file(function)


def use_threads(count: int | None) -> None:
    """Let PyTorch compute with this many threads, where a number is given."""
    from wqk.errors import required_by

    if count:
        with required_by("--threads"):
            import torch
        torch.set_num_threads(count)


def _one_for_each(values: tuple[str, ...]) -> tuple[str | None, str | None]:
    if len(values) not in (0, 2):
        raise click.UsageError("expected --revision twice: for the first and for the second REF")
    return (values[0], values[1]) if values else (None, None)
