"""Option types, and the options of several verbs."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk.tables.columns import MEASURES

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from wqk.model import Model


class PathType(click.Path):
    """A path; an option in its place raises an error."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the argument."""
        if isinstance(value, str) and value.startswith("-") and not re.match(r"-(\.|$)", value):
            self.fail(f"expected a path, got the option {value!r}", param, ctx)
        return super().convert(value, param, ctx)


DEMO_PREFIX = "demo:"
# Names meant for the package's own models; no repository has these names.
DEMO_NAMES = ("demo", "encoder", "decoder", "induction")


def expand_demo(value: Any) -> Any:
    """Replace ``demo:NAME`` by the folder of a small model of the package; keep other values.

    Raises
    ------
    CheckpointError
        The package has no model with this name.

    Examples
    --------
    >>> Path(expand_demo("demo:encoder")).name, expand_demo("gpt2")
    ('encoder', 'gpt2')
    """
    if not isinstance(value, str) or not value.startswith(DEMO_PREFIX):
        return value
    from wqk.reporting.demo import demo_model

    return str(demo_model(value.removeprefix(DEMO_PREFIX)))  # type: ignore[arg-type]


class SourceType(PathType):
    """A table, or a checkpoint that is a path or ``demo:NAME``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the argument."""
        return super().convert(expand_demo(value), param, ctx)


class ReferenceType(click.Path):
    """A checkpoint: a path with completion by the shell, ``demo:NAME``, or any reference."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Check the argument; a number may be meant for a switch before it, which takes none."""
        value = expand_demo(value)
        if value == "-":
            self.fail(
                "- is no checkpoint; names on standard input become arguments by xargs: "
                "cat LIST | xargs wqk scan",
                param,
                ctx,
            )
        if value in DEMO_NAMES and not Path(value).exists():
            self.fail(
                f"{value}: there is no such file or folder; the package's own models are "
                "demo:encoder, demo:decoder and demo:induction",
                param,
                ctx,
            )
        if isinstance(value, str) and value.isdecimal() and not Path(value).exists():
            self.fail(
                f"{value} is a number; expected a folder, a file or a Hub id. "
                "An option that is a switch, such as --heads, takes no value",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


REF = ReferenceType(readable=False)
PATH = PathType(path_type=Path)
SOURCE = SourceType(path_type=Path)
FILE = PathType(path_type=Path, dir_okay=False)
FOLDER_PATH = PathType(path_type=Path, file_okay=False)


class CountType(click.IntRange):
    """A whole number of at least 1. The upper limit, above any count, is not in the help."""

    def __init__(self) -> None:
        super().__init__(1, 2**40)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse the argument."""
        if isinstance(value, str) and not re.fullmatch(r"[+-]?\d+", value.strip()):
            self.fail(f"expected a whole number, such as 10, got {value!r}", param, ctx)
        number: int = super().convert(value, param, ctx)
        return number

    def _describe_range(self) -> str:
        return "x>=1"


COUNT = CountType()


class Number(click.FloatRange):
    """A finite number within bounds; click's own type also accepts NaN and infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse the argument."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, got {value!r}", param, ctx)
        return number


# More layers or distances than this are a typing error.
MOST_NUMBERS = 100_000

POSITIVE = Number(min=0, min_open=True)


class NumbersType(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers and ranges with both ends, ``0,1,8:64``; negative numbers if ``from_end``.

    Examples
    --------
    >>> NumbersType()("0-2,8")
    (0, 1, 2, 8)
    >>> NumbersType()("0,2:4"), NumbersType(from_end=True)("0,-2:-1")
    ((0, 2, 3, 4), (0, -2, -1))
    """

    name = "numbers"

    def __init__(self, from_end: bool = False) -> None:
        self.number = r"(-?\d+)" if from_end else r"(\d+)"
        self.example = "0,8:64 or -1" if from_end else "0,1,8:64"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the argument."""
        if not isinstance(value, str):
            return value
        numbers: list[int] = []
        for piece in value.split(","):
            # A range from 0 on may also be written with a dash.
            piece = re.sub(r"(?<=\d)-(?=\d)", ":", piece)
            match = re.fullmatch(rf"{self.number}(?::{self.number})?", piece)
            first, last = 1, 0  # an invalid range
            if match:
                first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                expected = f"expected whole numbers and ranges such as {self.example}"
                self.fail(f"{expected}, got {piece!r}", param, ctx)
            if len(numbers) + last - first >= MOST_NUMBERS:
                self.fail(f"expected at most {MOST_NUMBERS:,} numbers, got {piece!r}", param, ctx)
            numbers += range(first, last + 1)
        return tuple(dict.fromkeys(numbers))


class Several(click.ParamType):  # type: ignore[type-arg]
    """Several of a set of names, separated by commas.

    Examples
    --------
    >>> Several("stream", "heads")("heads,stream")
    ('heads', 'stream')
    """

    def __init__(self, *names: str) -> None:
        self.choice, self.name = click.Choice(names), ",".join(names)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the argument."""
        return tuple(self.choice.convert(name, param, ctx) for name in value.split(","))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with the incomplete text."""
        return self.choice.shell_complete(ctx, param, incomplete)


class LayerAndHead(click.ParamType):  # type: ignore[type-arg]
    """A layer and a head, such as 0.2."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the argument."""
        layer, dot, head = value.partition(".")
        if not (dot and layer.isdigit() and head.isdigit()):
            self.fail(f"expected a layer and a head, such as 0.2, got {value!r}", param, ctx)
        return int(layer), int(head)


RANGES = NumbersType()

# Options of arguments with one meaning in all verbs, by the name of the argument. Arguments that
# are not in this table are options of a single verb, and its function describes them.
OPTIONS: dict[str, dict[str, Any]] = {
    "layer": {"type": int, "metavar": "L", "help": "Which layer; negative: from the end."},
    "layers": {
        "type": NumbersType(from_end=True),
        "metavar": "L,L:M",
        "help": "Only these layers, such as 3,10:20 (10 to 20); negative ones count from each "
        "stack's end.",
    },
    "head": {"type": click.IntRange(min=0), "metavar": "H"},
    "heads": {"is_flag": True, "help": "Also score every head."},
    "stack": {"metavar": "NAME", "help": "encoder or decoder, if the model has both."},
    "distance": {
        "type": click.IntRange(min=0),
        "metavar": "N",
        "default": 0,
        "help": "Distance from key to query in tokens (rotary models).",
    },
    "distances": {
        "flag": "--distance",
        "type": RANGES,
        "metavar": "N,N:M",
        "default": "0",
        "help": "Relative distances, such as 0,1,8:64 (8 to 64; rotary models); "
        "wqk lab figure distances FILE draws the scores of --out FILE over them.",
    },
    "gamma": {
        "type": Number(min=0),
        "default": 2.0,
        "help": "Outliers exceed the mean norm by this many standard deviations.",
    },
    "beside": {"type": REF, "metavar": "REF"},
    "fold_norm": {"is_flag": True, "help": "Fold in the norms in front of attention."},
    "through": {"type": LayerAndHead(), "metavar": "L.H"},
    "directions": {
        "type": COUNT,
        "metavar": "[N]",
        "is_flag": False,
        "flag_value": 5,
        "help": "Singular directions of the form instead of pairs, the 5 or N largest, with the "
        "tokens at their two ends.",
    },
    "top": {"type": COUNT, "metavar": "N"},
    "seed": {"type": click.IntRange(min=0), "metavar": "N", "default": 0},
    "mask_share": {
        "type": Number(0, 1, min_open=True, max_open=True),
        "metavar": "X",
        "help": "Fraction of tokens that encoders predict.",
    },
    "revision": {"metavar": "R", "help": "Revision of a Hub repository."},
    "base": {
        "type": REF,
        "metavar": "REF",
        "help": "Base model of a LoRA adapter, in place of the one that the adapter names.",
    },
    "family": {
        "type": click.Path(dir_okay=False),
        "metavar": "NAME|FILE.toml",
        "help": "A known family, or a file that describes which tensors are queries and keys.",
    },
    "heads_per_layer": {
        "type": COUNT,
        "metavar": "N",
        "help": "Query heads, if the config lacks their number.",
    },
    "key_heads": {
        "type": COUNT,
        "metavar": "N",
        "help": "Key heads, if the config lacks their number, such as num_key_value_heads.",
    },
    "out": {
        "type": FILE,
        "help": "Write the table: .parquet, .csv, .jsonl, .json, .tex or .md; - prints CSV, -.tex "
        "LaTeX.",
    },
}

# Settings of all other options, by the annotation in the function's signature.
ANNOTATED: dict[str, dict[str, Any]] = {
    "bool": {"is_flag": True},
    "int": {"type": int, "metavar": "N"},
    "int | None": {"type": COUNT, "metavar": "N"},
    "int | str | None": {"metavar": "TOKEN"},
    "float": {"type": Number(), "metavar": "X"},
    "FilePath | None": {"type": FILE},
    "Collection[int] | None": {"type": RANGES, "metavar": "N,N:M"},
}


def option(name: str, annotated: str = "", **defaults_of_argument: Any) -> Callable[..., Any]:
    """Return the option of an argument: a shared option by name, or an option by type."""
    settings = defaults_of_argument | (OPTIONS.get(name) or ANNOTATED.get(annotated, {}))
    if settings.get("is_flag"):
        settings["default"] = False  # also if the function's default is True
    elif "default" in defaults_of_argument:
        settings["default"] = defaults_of_argument["default"]
    if annotated.startswith("Literal["):
        settings["type"] = click.Choice(ast.literal_eval(annotated.removeprefix("Literal")))
    flag = settings.pop("flag", f"--{name.replace('_', '-')}")
    flags = ("-o", flag) if flag == "--out" else (flag,)
    return click.option(*flags, name, **settings)


json_output = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
csv_output = click.option("--csv", "as_csv", is_flag=True, help="Print CSV instead of a table.")


result_file = click.option(
    "-o",
    "--out",
    type=FILE,
    help="Write the result: rows as .csv, all values as .json; - prints CSV.",
)


junit_file = click.option(
    "--junit", type=FILE, metavar="FILE.xml", help="Write a report as JUnit's XML."
)


def picture_file(help_text: str) -> Callable[..., Any]:
    """Return the option ``--picture``, with a given first sentence of its help."""
    return click.option("--picture", type=FILE, help=f"{help_text}: .png, .pdf or .svg.")


every_head, gamma, stack, revision = map(option, ("heads", "gamma", "stack", "revision"))
table_file, layers = map(option, ("out", "layers"))
table_files = click.option(
    "-o",
    "--out",
    **OPTIONS["out"] | {"multiple": True, "help": f"{OPTIONS['out']['help']} Repeatable."},
)


def _one_for_each(
    context: click.Context, option: click.Parameter, values: tuple[str, ...]
) -> tuple[str | None, str | None]:
    if len(values) not in (0, 2):
        raise click.UsageError("expected --revision twice: for the reference and for the candidate")
    return (values[0], values[1]) if values else (None, None)


revision_of_each = click.option(
    "--revision",
    "revisions",
    multiple=True,
    metavar="R",
    callback=_one_for_each,
    help="Hub revision; give it twice, for the reference and for the candidate.",
)


def measure_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a flag for each measure that a scan adds on request."""
    for measure in reversed(MEASURES):
        if measure.help:
            function = click.option(f"--{measure.name}", is_flag=True, help=measure.help)(function)
    return function


def reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for reading: ``--family``, ``--heads-per-layer``, ``--key-heads``."""
    for name in reversed(OF_EACH):
        function = option(name)(function)
    return function


# Arguments of `wqk.open` that are options.
OF_EACH = ("family", "heads_per_layer", "key_heads")  # one value for all models of a verb
OPENING = ("revision", "base", *OF_EACH)


def opened(ref: str, options: dict[str, Any]) -> Model:
    """Open the model of a REF; removes the arguments of `wqk.open` from the options."""
    from wqk.model import open as open_model

    return open_model(ref, **{name: options.pop(name) for name in OPENING if name in options})


def both_opened(first: str, second: str, options: dict[str, Any]) -> tuple[Model, Model]:
    """Open two models, each with its revision."""
    revisions = options.pop("revisions")
    shared = {name: options.pop(name) for name in OPENING if name in options}
    return (
        opened(first, {**shared, "revision": revisions[0]}),
        opened(second, {**shared, "revision": revisions[1]}),
    )
