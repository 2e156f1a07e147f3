"""Output of the verbs: tables on standard output, all other text on standard error."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import polars  # noqa: F401 - before its handler is changed
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from wqk._console import (
    UNPRINTABLE,
    cleaning,
    json_value,
    printable,
    size,
    with_display_names,
)
from wqk._files import check_output
from wqk.cli.streams import discard
from wqk.storage.references import without_secrets

if TYPE_CHECKING:
    import polars as pl

    from wqk._console import Result
    from wqk.checkpoints import Checkpoint
    from wqk.scanning.scan import Progress as ScanProgress
    from wqk.tables.score_table import ScoreTable, Table

# polars sets a handler on import. With it, Ctrl-C would not wake a main thread that waits for
# other threads.
if hasattr(signal, "siginterrupt"):
    signal.siginterrupt(signal.SIGINT, True)


# Options with a result besides the printed output: a file, or an exit status.
FURTHER_RESULTS = ("out", "picture", "report", "details", "junit", "figure", "fail_if")


def _stop_printing() -> None:
    """Discard further output of a broken pipe, if the command has a further result.

    Raises
    ------
    BrokenPipeError
        The command has only its output, so it ends.
    """
    context = click.get_current_context(silent=True)
    options = {} if context is None else context.params
    if not any(options.get(name) for name in FURTHER_RESULTS):
        raise BrokenPipeError
    discard(sys.stdout)


def _write(text: str) -> None:
    """Write text to the standard output."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        _stop_printing()


class _Output(Console):
    """A console that handles broken pipes, and does not crop wide tables."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})

    def on_broken_pipe(self) -> None:
        _stop_printing()


def output() -> Console:
    """Return the current standard output, without automatic highlighting of numbers.

    Examples
    --------
    >>> output().print("[b] is no markup")
    [b] is no markup
    >>> output().render_str("numbers such as 1 are not colored").spans
    []
    """
    return cleaning(_Output(highlight=False, markup=False))


def say(message: str) -> None:
    """Print lines on standard error, above a progress bar, if any."""
    # The bar replaces standard error by another stream; click.echo would bypass this stream.
    text = printable(with_display_names(without_secrets(message)))
    print(text, file=sys.stderr, flush=True)


def say_traffic(checkpoint: Checkpoint) -> None:
    """Report the part of a remote checkpoint that was fetched; print nothing for local files."""
    fetched = checkpoint.bytes_fetched
    if fetched is not None:
        stored = sum(info.nbytes for info in checkpoint.tensors().values())
        remark = "" if fetched else "; all that was read was in the cache"
        say(f"{checkpoint.name}: fetched {size(fetched)} of {size(stored)}{remark}")


def say_picture(picture: Path, table: ScoreTable, files: Sequence[Path] = ()) -> None:
    """Report the file of a table's picture; with several distances, also the distance.

    ``files`` are the files of the table, if it was read or written.
    """
    distances = sorted(table.frame["distance"].drop_nulls().unique())
    if len(distances) < 2:
        say(f"picture: {picture}")
        return
    sources = shlex.join(map(str, files)) or "FILE, the file of --out"
    say(
        f"picture: {picture}, at distance {distances[0]}; over all distances: "
        f"wqk lab figure distances {sources}"
    )


@contextmanager
def bar(
    title: str, changes: Callable[..., dict[str, Any]], seconds: float | None = None
) -> Iterator[Callable[..., None] | None]:
    """Show a progress bar on a terminal, and yield its reporting function; None in a pipe.

    ``changes`` is a function of the reported values that returns fields of the bar:
    ``description``, the text before the bar, ``completed``, ``total``, and ``text``, the text after
    the bar. With ``seconds``, for work of many minutes, a pipe gets lines instead, at least
    ``seconds`` apart.
    """
    if not sys.stderr.isatty():
        yield None if seconds is None else _lines(title, changes, seconds)
        return
    # On short lines the text is cut, not the bar or the remaining time.
    text_column = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[text]}", table_column=text_column),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, expand=True) as progress:
        task = progress.add_task(printable(title), total=None, text="")
        started = False

        def report(*done: Any) -> None:
            nonlocal started
            fields = changes(*done)
            if not started:  # an earlier run's work must not count for the remaining time
                progress.reset(task, completed=fields.get("completed", 0))
                started = True
            progress.update(task, **fields)

        yield report


def _lines(
    title: str, changes: Callable[..., dict[str, Any]], seconds: float
) -> Callable[..., None]:
    """Return a function that reports progress as lines on standard error."""
    started = last = time.monotonic()

    def report(*done: Any) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= seconds:
            last = now
            fields = changes(*done)
            description, text = fields.get("description", title), fields.get("text", "")
            say(f"{description} {text}, {now - started:.0f} seconds so far")

    return report


def scan_progress(done: ScanProgress) -> dict[str, Any]:
    """Return the fields of a scan's bar: blocks, and bytes per second."""
    rate = f"{size(done.bytes_read / max(done.seconds, 1e-9))}/s"
    text = f"{done.blocks_done}/{done.blocks} blocks, {rate}"
    return {"total": done.blocks, "completed": done.blocks_done, "text": text}


def passes_progress(done: int, count: int) -> dict[str, Any]:
    """Return the fields of the bar for passes over a text."""
    return {"total": count, "completed": done, "text": f"{done}/{count} passes over the text"}


def blocks_progress(done: int, count: int) -> dict[str, Any]:
    """Return the fields of the bar for work block by block."""
    return {"total": count, "completed": done, "text": f"{done}/{count} blocks"}


def print_json(table: ScoreTable) -> None:
    """Print metadata, summary and rows as one JSON object."""
    print_object(table.to_dict())


def show(
    value: Mapping[str, Any], *lines: Any, as_json: bool, ending: str = "", rows: Any = None
) -> None:
    """Print a result: as a JSON object, its rows as a file with an ending, or lines for people."""
    if as_json:
        print_object(value)
    elif ending:
        print_table(rows, ending)
    else:
        output().print(*lines, sep="\n")


def live_tables(tables: Iterable[ScoreTable]) -> None:
    """Show the medians of the last steps of a growing table, in place on a terminal.

    In a pipe, each table is printed below the previous table.
    """
    from wqk.tables.growing import growing_table

    with growing_table(output()) as show_table:
        for table in tables:
            show_table(table)


def folder_and_file(out: Path) -> tuple[Path, Path | None]:
    """Return the folder of a survey, and the file of its table if ``--out`` names one.

    The folder of a table ``FILE.csv`` is ``FILE``. If ``FILE`` is a folder of something else, such
    as the training run whose scores are written, the survey's folder is ``FILE.csv.survey``.

    Examples
    --------
    >>> folder_and_file(Path("survey")), folder_and_file(Path("survey.csv"))
    ((PosixPath('survey'), None), (PosixPath('survey'), PosixPath('survey.csv')))
    """
    from wqk.scanning.surveys.surveying import is_survey_folder
    from wqk.tables.score_table import check_table_output
    from wqk.tables.writers import WRITERS

    if out.suffix not in WRITERS or out.is_dir():
        return out, None
    check_table_output(out)
    folder = out.with_suffix("")
    is_free = not folder.is_dir() or not any(folder.iterdir()) or is_survey_folder(folder)
    return (folder if is_free else out.with_name(f"{out.name}.survey")), out


# The value of ``--out`` that stands for standard output.
STANDARD_OUTPUT = Path("-")


def is_standard_output(out: Path | None) -> bool:
    """Return whether ``--out`` is standard output: ``-``, or ``-.tex`` for a format."""
    return out is not None and out.parent == Path() and out.stem == STANDARD_OUTPUT.name


def require_one_output(as_csv: bool, out: Path | None, as_json: bool) -> str:
    """Require one format on standard output; return the ending of the format, or "".

    ``--csv`` and ``--out -`` print CSV, and ``--out -.tex`` prints LaTeX. The ending of JSON and of
    lines for people is empty.

    Raises
    ------
    UsageError
        Two formats were requested, or the ending belongs to no text format.
    """
    from wqk.tables.writers import WRITERS

    ending = ".csv" if as_csv else ""
    if out is not None and is_standard_output(out):
        if as_csv and out.suffix not in ("", ".csv"):
            raise click.UsageError(f"CSV and --out {out} both go to standard output; choose one")
        ending = out.suffix or ".csv"
        if ending not in WRITERS or ending == ".parquet":
            endings = ", ".join(f"-{name}" for name in WRITERS if name != ".parquet")
            raise click.UsageError(f"--out {out}: expected one of {endings} for standard output")
    if ending and as_json:
        name = "CSV" if ending == ".csv" else f"--out {out}"
        raise click.UsageError(
            f"--json and {name} both go to standard output; choose one of the two"
        )
    return ending


def separated_outputs(
    as_csv: bool, outs: Sequence[Path], as_json: bool
) -> tuple[str, tuple[Path, ...]]:
    """Return the ending of the format on standard output, or "", and the files of ``--out``.

    Raises
    ------
    UsageError
        Several formats were requested on standard output, or a format that is no text.

    Examples
    --------
    >>> separated_outputs(False, [Path("-.tex"), Path("a.csv"), Path("a.md")], False)
    ('.tex', (PosixPath('a.csv'), PosixPath('a.md')))
    """
    distinct = [*dict.fromkeys(outs)]
    printed = [out for out in distinct if is_standard_output(out)]
    if len(printed) > 1:
        names = " and ".join(f"--out {out}" for out in printed)
        raise click.UsageError(f"{names} both go to standard output; choose one")
    ending = require_one_output(as_csv, printed[0] if printed else None, as_json)
    return ending, tuple(out for out in distinct if out not in printed)


def print_table(result: Result | Table | pl.DataFrame, ending: str) -> None:
    """Print all rows of a result, as in a file with this ending."""
    from wqk._console import Result, csv_of_frame
    from wqk.tables.score_table import Table
    from wqk.tables.writers import WRITERS

    if isinstance(result, Table):
        content = WRITERS[ending](result)
    elif ending == ".csv":
        content = csv_of_frame(result.frame if isinstance(result, Result) else result)
    else:
        raise click.UsageError(f"the result is printed as CSV or JSON, and not as {ending}")
    print_content(content)


def print_content(content: bytes) -> None:
    """Print the content of a text file."""
    _write(printable(content.decode()))


def from_top(lines: Iterable[Any]) -> Iterator[Any]:
    """Yield lines without the empty line before the first.

    Examples
    --------
    >>> [str(line) for line in from_top(["\\nbert", "\\ngpt2"])]
    ['bert', '\\ngpt2']
    """
    remaining = iter(lines)
    for line in remaining:
        has_empty_line = str(line).startswith("\n")
        yield line[1:] if has_empty_line else line
        break
    yield from remaining


# Endings of files for the results of verbs that are no tables of scores.
RESULT_ENDINGS = (".csv", ".json")


def result_output(as_csv: bool, out: Path | None, as_json: bool) -> tuple[str, Path | None]:
    """Check the outputs of a result; return the ending on standard output, and the file.

    Raises
    ------
    UsageError
        Two formats were requested on standard output, or LaTeX or Markdown.
    OutputError
        The file cannot be written.
    """
    ending = require_one_output(as_csv, out, as_json)
    if ending not in ("", ".csv"):
        raise click.UsageError(f"the result is printed as CSV or JSON, and not as {ending}")
    if out is None or is_standard_output(out):
        return ending, None
    check_output(out, "a result", RESULT_ENDINGS)
    return ending, out


def write_result(result: Result, out: Path) -> None:
    """Write the rows of a result as ``.csv``, or all values as ``.json``."""
    if out.suffix == ".json":
        result._to_json(out)
    else:
        result._to_csv(out)
    say(f"result: {out}")


def print_object(value: Mapping[str, Any]) -> None:
    """Print one JSON object; NaN and infinity become null, because JSON lacks both."""
    text = json.dumps(json_value(value), ensure_ascii=False, indent=2, allow_nan=False)
    _write(UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
