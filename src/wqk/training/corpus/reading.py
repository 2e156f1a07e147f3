"""Documents from files and data sets: each text in order, or a one-line error.

`datasets` reads CSV, Parquet and the Hub. Plain text and JSON Lines are read here, line by line: a
line's length is bounded, columns other than the text may change type, and a lone surrogate does
not invalidate the file.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from wqk.errors import CorpusError, WqkError, all_lines, required_by

# A longer document or line of JSON is more likely a mistake than a text, and the tokenizers library
# would need 100 bytes per character of it.
LONGEST = 10_000_000

Bytes = IO[bytes] | gzip.GzipFile

DOCUMENTS = ("file", "paragraph", "line")


def read_documents(path: Path, field: str, document: str) -> Iterator[str]:
    r"""The texts of a file, in order.

    Parameters
    ----------
    path
        A file with one of the `FORMATS` endings, perhaps followed by one of the `COMPRESSIONS`.
    field
        Field of a JSON object, or column of CSV or Parquet, with the text.
    document
        What a document is in plain text: the ``file``, a ``paragraph`` between blank lines, or a
        ``line``.

    Raises
    ------
    CorpusError
        The file cannot be read, is damaged, is not UTF-8, lacks the field, or holds a document
        of more than `LONGEST` characters.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "two.jsonl")
    ...     _ = path.write_text('{"text": "one"}\n{"text": "two"}\n')
    ...     list(read_documents(path, "text", "file"))
    ['one', 'two']
    """
    try:
        for text in FORMATS[ending(path)](path, field, document):
            if len(text) > LONGEST:
                raise _too_long(path, "document", "split it, or cut text with document=paragraph")
            # Half of a surrogate pair is not a character; UTF-8 decoders replace it, too.
            yield text if text.isascii() else _sound(text)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: expected UTF-8 text ({error.reason}); convert it") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"{path}: cannot be read completely ({reason})") from None


def read_rows(
    what: str,
    field: str,
    builder: str,
    advice: str = "",
    *,
    split: str = "train",
    as_text: bool = False,
    **options: Any,
) -> Iterator[str]:
    """A column of text from a data set, streamed by the datasets library.

    Parameters
    ----------
    what, advice
        Beginning and end of the message if it cannot be read.
    field
        The column.
    builder, split, options
        As `datasets.load_dataset` takes them.
    as_text
        Whether to read all values of the column as text.
    """
    with required_by(f"{what}:"):
        import datasets  # type: ignore[import-untyped]
    try:
        with _silent():
            if as_text:
                options["features"] = datasets.Features({field: datasets.Value("string")})
            rows = datasets.load_dataset(builder, streaming=True, split=split, **options)
            for number, row in enumerate(rows, 1):
                yield _text(row, field, f"{what}, row {number}")
    except WqkError:
        raise
    except Exception as error:  # the library raises whatever its formats and the network raise
        reason = all_lines(error, 160)
        raise CorpusError(f"{what}: cannot be read ({reason}){advice}") from None


def is_readable(path: Path) -> bool:
    """Whether a file's name has the ending of a known text format."""
    return ending(path) in FORMATS


def ending(path: Path) -> str:
    """The file name's ending for the format, without that for compression.

    Examples
    --------
    >>> from pathlib import Path
    >>> ending(Path("wiki.jsonl.xz")), ending(Path("a.txt"))
    ('.jsonl', '.txt')
    """
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def _open(path: Path) -> Bytes:
    opener = COMPRESSIONS.get(path.suffix.lower())
    return opener(path) if opener else path.open("rb")


def _open_zstandard(path: Path) -> Bytes:
    with required_by(f"{path}: .zst"):
        import pyarrow  # type: ignore[import-untyped]
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def _plain(path: Path, field: str, document: str) -> Iterator[str]:
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
        if document == "file":
            yield lines.read(LONGEST + 1)
            return
        gathered = io.StringIO()
        for line in iter(lambda: lines.readline(LONGEST + 1), ""):
            gathered.write(line)
            if document == "line" or not line.strip():
                yield gathered.getvalue().strip("\n")
                gathered = io.StringIO()
            elif gathered.tell() > LONGEST:
                raise _too_long(path, "paragraph", "cut it with document=line")
        yield gathered.getvalue().strip("\n")


def _json_lines(path: Path, field: str, document: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(4 * LONGEST + 1), b""), 1):
            where = f"{path}, line {number}"
            if len(line) > 4 * LONGEST:
                raise CorpusError(f"{where}: longer than {4 * LONGEST:,} bytes; one object a line")
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError:
                raise CorpusError(f"{where}: expected UTF-8 text; convert the file") from None
            except (ValueError, RecursionError) as error:
                if not line.strip():
                    continue
                raise CorpusError(f"{where}: expected a JSON object ({error})") from None
            if not isinstance(row, dict):
                raise CorpusError(f"{where}: expected one JSON object, got {type(row).__name__}")
            yield _text(row, field, where)


def _csv(path: Path, field: str, document: str) -> Iterator[str]:
    with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        names = next(csv.reader(lines), [])
    if field not in names:
        raise _no_field(str(path), field, names)
    # All values are text: "NA" can be a comment, and so can "12".
    options: dict[str, Any] = {"usecols": [field], "keep_default_na": False}
    yield from read_rows(str(path), field, "csv", data_files=str(path), as_text=True, **options)


def _text(row: dict[str, Any], field: str, where: str) -> str:
    if field not in row:
        raise _no_field(where, field, list(row))
    value = row[field]
    if not isinstance(value, str | None):
        raise CorpusError(f"{where}: expected text in {field!r}, got {type(value).__name__}")
    return value or ""


def _no_field(where: str, field: str, names: list[str]) -> CorpusError:
    return CorpusError(
        f"{where}: has no {field!r}; set field=NAME to one of {', '.join(names) or 'none'}"
    )


def _sound(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _too_long(path: Path, what: str, advice: str) -> CorpusError:
    return CorpusError(f"{path}: a {what} of more than {LONGEST:,} characters; {advice}")


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the library's progress bars and log lines; failures are reported by one error."""
    import logging

    import datasets

    logger = logging.getLogger("datasets")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


FORMATS: dict[str, Callable[[Path, str, str], Iterator[str]]] = {
    ".txt": _plain,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".parquet": lambda path, field, _: read_rows(str(path), field, "parquet", data_files=str(path)),
}
COMPRESSIONS: dict[str, Callable[[Path], Bytes]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _open_zstandard,
}
