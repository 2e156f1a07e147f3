"""Options that several verbs take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")

family_file = click.option(
    "--family",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.toml",
    help="Family file that describes which tensors are queries and keys.",
)

heads_per_layer = click.option(
    "--heads-per-layer",
    type=click.IntRange(min=1),
    metavar="N",
    help="Query heads, if the config does not give their number.",
)

key_heads = click.option(
    "--key-heads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Key heads, if the config does not give their number.",
)

revision = click.option("--revision", metavar="R", help="Revision of a Hub repository.")

table_file = click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the table: .parquet, .csv, .jsonl, .tex or .md.",
)

gamma = click.option(
    "--gamma",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    help="Outliers exceed the mean norm by this many standard deviations.",
)


class Reference(click.ParamType):  # type: ignore[type-arg]
    """A checkpoint: a path, for which a shell completes files and folders, or a name on the Hub."""

    name = "ref"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Leave it to the shell, which knows the file system."""
        return [CompletionItem(incomplete, type="file")]


class DistanceRanges(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers and ranges, both ends included: ``0,1,8:64``.

    Examples
    --------
    >>> DistanceRanges().convert("0,2:4", None, None)
    (0, 2, 3, 4)
    """

    name = "distances"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Parse what was typed."""
        if isinstance(value, tuple):
            return value
        distances: list[int] = []
        for piece in str(value).split(","):
            match = re.fullmatch(r"(\d+)(?::(\d+))?", piece)
            first, last = (int(n) for n in (match[1], match[2] or match[1])) if match else (1, 0)
            if last < first:
                self.fail(
                    f"expected whole numbers and ranges such as 0,1,8:64, got {piece!r}", param
                )
            distances += range(first, last + 1)
        return tuple(dict.fromkeys(distances))
