"""Text for terminals, prompts and notebooks, from the same rich renderables.

This file prints all text, without control characters: the name of a tensor, or other text from a
checkpoint, must not move the cursor or change the terminal.

A verb returns a `Result` with a sentence, a table, plain values, and views for notebooks.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from wqk._files import check_output, write_atomically
from wqk._typing import FilePath
from wqk.errors import DEMO_MODELS, Advising, TableError, WqkError

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure
    from rich.console import Console, ConsoleOptions, RenderResult

# ASCII and Latin-1 control characters except the line feed, line separators, marks of text
# direction, and surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)

# Spreadsheets read a cell that begins with one of these as a formula.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")

# Characters in a line of preformatted text in a notebook.
PAGE_WIDTH = 100


def printable(text: str) -> str:
    r"""Escape the control characters of a text.

    Examples
    --------
    >>> printable("layer\x1b[2J.weight")
    'layer\\x1b[2J.weight'
    """
    return UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def one_line(text: str) -> str:
    """Escape line feeds as well as control characters."""
    return printable(text).replace("\n", "\\n")


def display_name(checkpoint: str) -> str:
    """Return a checkpoint's name for headings: ``demo:NAME`` for a small model of the package.

    Tables contain the path, which also works outside the command line.

    Examples
    --------
    >>> display_name(str(DEMO_MODELS / "encoder")), display_name("/models/encoder")
    ('demo:encoder', '/models/encoder')
    """
    path = Path(checkpoint)
    return f"demo:{path.name}" if path.parent == DEMO_MODELS else checkpoint


def with_display_names(message: str) -> str:
    """Replace the folders of the package's small models in a message by ``demo:NAME``.

    Examples
    --------
    >>> with_display_names(f"{DEMO_MODELS / 'encoder'}: has no values")
    'demo:encoder: has no values'
    """
    return message.replace(str(DEMO_MODELS / "_").removesuffix("_"), "demo:")


def size(count: float) -> str:
    """Format a number of bytes in decimal units.

    Examples
    --------
    >>> size(28_311_552)
    '28.3 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def number(value: float | None, digits: int = 3) -> str:
    """Format a score with three digits, without a negative zero; None becomes a dash.

    Examples
    --------
    >>> number(-0.0001), number(-0.25), number(None)
    ('0.000', '-0.250', '–')
    """
    if value is None:
        return "–"
    return "nan" if value != value else f"{round(value, digits) + 0.0:.{digits}f}"


def count(number: int | None) -> str:
    """Format a large number, such as a number of parameters, with three digits.

    Examples
    --------
    >>> count(109_482_240), count(640), count(None)
    ('109 M', '640', '–')
    """
    if number is None:
        return "–"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


def counted(number: int, noun: str) -> str:
    """Format a number with its noun.

    Examples
    --------
    >>> counted(1, "layer"), counted(12_000, "step")
    ('1 layer', '12,000 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first of many names, and the number of further names.

    Examples
    --------
    >>> few(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def spans(numbers: Collection[int]) -> str:
    """Format whole numbers as ranges.

    Examples
    --------
    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = []
    for first, last in ranges:
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ", ".join(texts)


def rounded_up(number: float, digits: int = 2) -> str:
    """Format a positive number with a few significant digits, never below the number.

    Examples
    --------
    >>> rounded_up(0.030129), rounded_up(0.03), rounded_up(2.41)
    ('0.031', '0.03', '2.5')
    """
    text = f"{number:.{digits}g}"
    if not math.isfinite(number) or float(text) >= number:
        return text
    unit = 10.0 ** (math.floor(math.log10(number)) + 1 - digits)
    return f"{float(text) + unit:.{digits}g}"


def last_part(model: str) -> str:
    """Return a Hub id without its owner, or the last folder of a path.

    Examples
    --------
    >>> last_part("openai-community/gpt2")
    'gpt2'
    """
    return model.rstrip("/").rpartition("/")[2]


# Substitutes, on terminals without Unicode, for the characters that wqk prints.
ASCII_SUBSTITUTES = str.maketrans(
    {"–": "-", "−": "-", "·": "|", "×": "x", "…": "...", "±": "+-", "→": "->"}
    | {"•": "*", "‖": "||", "σ": "s", "₁": "1", "✓": "+", "✗": "x"}
)


class _Cleaned:
    """A renderable without control characters and characters that the terminal cannot show."""

    def __init__(self, renderable: Any) -> None:
        self.renderable = renderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for text, style, control in console.render(self.renderable, options):
            if not control:
                text = printable(text)
            if options.ascii_only:
                text = text.translate(ASCII_SUBSTITUTES)
            yield Segment(text, style, control)


class _Cleaning:
    """Hook that cleans all text that a console prints."""

    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        return [_Cleaned(renderable) for renderable in renderables]


def cleaning(console: Console) -> Console:
    """Remove control characters from all text that a console prints later."""
    console.push_render_hook(_Cleaning())  # type: ignore[arg-type]
    return console


class Shown(ABC):
    """Base of objects that the command, a prompt and a notebook show in the same way."""

    @abstractmethod
    def _shown(self, width: int) -> Iterable[Any]:
        """Return renderables for lines of this width."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for renderable in self._shown(options.max_width):
            if isinstance(renderable, str):
                renderable = console.render_str(renderable)
            yield from console.render(renderable, options)

    def _drawn(self) -> Figure | None:
        """Draw the picture; None without a picture. `WqkError` if drawing is impossible."""
        return None

    def __repr__(self) -> str:
        return plain(self)

    def _repr_html_(self) -> str:
        from wqk._style import as_image, close

        with suppress(WqkError):
            if figure := self._drawn():
                close(figure)
                return html(self) + as_image(figure)
        return html(self)

    def _repr_png_(self) -> bytes | None:
        """Return the picture, or the text as a picture; None without matplotlib."""
        from wqk._style import as_png, close, written

        try:
            figure = self._drawn() or written(plain(self, width=PAGE_WIDTH))
            close(figure)
            return as_png(figure)
        except WqkError:
            return None


def plain(*renderables: Any, width: int | None = None) -> str:
    """Render as text without colors, by default as wide as the terminal."""
    from rich.console import Console

    target = io.StringIO()
    console = Console(
        file=target,
        width=width,
        color_system=None,
        highlight=False,
        markup=False,
        force_jupyter=False,
    )
    cleaning(console).print(*renderables, sep="\n", crop=False)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()).strip("\n")


def html(*renderables: Any) -> str:
    """Render as HTML for a notebook: tables, and paragraphs of text.

    Examples
    --------
    >>> html("a")
    '<div><span>a</span></div>'
    """
    return "".join(map(_in_html, renderables))


def _in_html(renderable: Any) -> str:
    if isinstance(renderable, Shown):
        return html(*renderable._shown(PAGE_WIDTH))
    if hasattr(renderable, "html"):
        return str(renderable.html())
    if not isinstance(renderable, str) and not hasattr(renderable, "plain"):
        return f"<pre>{escape(plain(renderable, width=PAGE_WIDTH))}</pre>"
    text = escape(printable(str(renderable)).strip("\n")).replace("\n", "<br>")
    if not text:
        return ""
    tag = "b" if "bold" in str(getattr(renderable, "style", "")) else "span"
    if text.startswith(("  ", "# ")):  # the code of a repair begins with a comment
        tag = "code"
    return f"<div><{tag}>{text}</{tag}></div>"


def kind_in_words(kind: str) -> str:
    """Name a kind of block in words.

    Examples
    --------
    >>> kind_in_words("cross"), kind_in_words("linear")
    ('cross-attention', 'linear attention')
    """
    names = {"linear": "linear attention", "state-space": "state space"}
    return names.get(kind, f"{kind}-attention")


# Attributes of data frames, and the expressions to use instead.
RESULT_SYNONYMS = {
    **dict.fromkeys(("data", "rows", "table", "to_frame"), "frame"),
    **dict.fromkeys(("message", "summary", "text"), "sentence"),
    "as_dict": "to_dict()",
    "dict": "to_dict()",
    "sort_values": "frame.sort(column, descending=True)",
    "to_parquet": 'frame.write_parquet("result.parquet")',
}


class Result(Shown, Advising, synonyms=RESULT_SYNONYMS):
    """Base of the results of verbs, which are dataclasses.

    A result defines its `sentence`, the rows of its `frame`, the lines that the command prints
    (`_shown`), and its picture (`_drawn`), if any. All other views follow from these. `print` also
    prints the lines; a log contains the `sentence`.
    """

    # Properties that `to_dict` includes besides the fields. Dataclasses in the fields may have the
    # same attribute.
    derived: ClassVar[tuple[str, ...]] = ()

    @property
    @abstractmethod
    def sentence(self) -> str:
        """Outcome of the verb, as one sentence."""

    @abstractmethod
    def _rows(self) -> Iterable[Mapping[str, Any]]:
        """Return the rows of `frame`, all with the same columns."""

    @property
    def frame(self) -> pl.DataFrame:
        """The result as a table, a polars frame."""
        import polars as pl

        return pl.DataFrame([json_value(row) for row in self._rows()], infer_schema_length=None)

    def to_dict(self) -> dict[str, Any]:
        """Return all values as plain values, for JSON."""
        return _plain_values(self)

    def _to_json(self, path: FilePath | None = None) -> str | None:
        return json_text(self.to_dict(), path)

    def _to_csv(self, path: FilePath | None = None, *, index: bool = False) -> str | None:
        if index:
            raise TableError("a result has no index; leave index= out")
        content = csv_of_frame(self.frame)
        if path is None:
            return content.decode()
        check_output(Path(path), "a table", (".csv",))
        write_atomically(Path(path), content)
        return None


def json_text(value: Any, path: FilePath | None = None) -> str | None:
    """Return a value as JSON, or write it to a ``.json`` file."""
    text = json.dumps(json_value(value), ensure_ascii=False, allow_nan=False)
    if path is None:
        return text
    check_output(Path(path), "JSON", (".json",))
    write_atomically(Path(path), text.encode())
    return None


def json_value(value: Any) -> Any:
    """Convert a value to plain JSON values; NaN and infinity become None.

    Examples
    --------
    >>> json_value({"p": np.float32("nan"), ("q", 1): (np.arange(2), {3})})
    {'p': None, 'q 1': [[0, 1], [3]]}
    """
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, np.ndarray | np.generic):
        return json_value(value.tolist())
    if dataclasses.is_dataclass(value):
        return _plain_values(value)
    if hasattr(value, "to_dicts"):  # a polars frame
        return json_value(value.to_dicts())
    if hasattr(value, "_asdict"):
        return json_value(value._asdict())
    if isinstance(value, Mapping):
        return {_json_key(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, int | str) else str(value)


def csv_of_frame(frame: pl.DataFrame) -> bytes:
    r"""Return a frame as CSV; lists and structures are written as JSON.

    Examples
    --------
    >>> import polars as pl
    >>> csv_of_frame(pl.DataFrame({"layer": [0], "heads": [[1, 2]]})).decode()
    'layer,heads\n0,"[1, 2]"\n'
    """
    import polars as pl

    json_columns = []
    for name, kind in frame.schema.items():
        if kind.is_nested():
            texts = [json.dumps(json_value(value)) for value in frame[name].to_list()]
            json_columns.append(pl.Series(name, texts))
    return without_formulas(frame.with_columns(json_columns)).write_csv().encode()


def without_formulas(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a frame for a CSV file without text that spreadsheets read as formulas.

    Examples
    --------
    >>> import polars as pl
    >>> without_formulas(pl.DataFrame({"name": ["bert", "=1+1"], "score": [-1, 1]})).rows()
    [('bert', -1), ("'=1+1", 1)]
    """
    import polars as pl

    text = pl.col(pl.String)
    is_formula = text.str.slice(0, 1).is_in(list(FORMULA))
    escaped = pl.when(is_formula).then("'" + text).otherwise(text)
    return frame.with_columns(escaped.name.keep())


def _json_key(key: Any) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)


def _plain_values(instance: Any) -> dict[str, Any]:
    """Return a dataclass's fields, and further properties from the list of the class."""
    fields = [field.name for field in dataclasses.fields(instance)]
    derived = getattr(instance, "derived", ())
    return {name: json_value(getattr(instance, name)) for name in (*fields, *derived)}


def farthest(moved: Sequence[tuple[float, str]], measure: str) -> str:
    """Describe the heads that moved most by a measure, in a sentence; empty without heads.

    Examples
    --------
    >>> farthest([(0.1, "0.0"), (0.25, "0.1")], "the distance of their forms")
    'Heads that moved most, as layer.head: 0.1 (0.25), 0.0 (0.1); by the distance of their forms.'
    """
    farthest_first = sorted(moved)[::-1]
    named = ", ".join(f"{head} ({distance:.2g})" for distance, head in farthest_first[:5])
    if not named:
        return ""
    return f"Heads that moved most, as layer.head: {named}; by {measure}."
