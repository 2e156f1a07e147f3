"""Documents out of files: plain text, JSON Lines, CSV and Parquet, compressed or not."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO

from wqk.errors import CorpusError, MissingPackage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# A longer document, or line of a file, is a mistake more often than a text, and takes memory.
LONGEST = 50_000_000

# Rows of a Parquet file that are read at a time.
ROWS = 1024

DOCUMENTS = ("file", "paragraph", "line")


def read_documents(path: Path, field: str, document: str) -> Iterator[str]:
    r"""The texts of a file, one after the other.

    Parameters
    ----------
    path
        A file with one of the `FORMATS` endings, perhaps followed by one of the `COMPRESSIONS`.
    field
        Which field of a JSON object, column of CSV or Parquet holds the text.
    document
        What a document is in plain text: the ``file``, a ``paragraph`` between blank lines, or a
        ``line``.

    Raises
    ------
    CorpusError
        The file cannot be read, is damaged, is not UTF-8, or lacks the field.

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
    read = FORMATS[ending(path)]
    try:
        with _open(path) as file:
            for text in read(file, path, field, document):
                if len(text) > LONGEST:
                    raise CorpusError(
                        f"{path}: a document of {len(text):,} characters, expected at most "
                        f"{LONGEST:,}; split it, or cut plain text with --document paragraph"
                    )
                # Half of a surrogate pair is no character; UTF-8 decoders replace it, too.
                yield text if text.isascii() else _sound(text)
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: expected UTF-8 text ({error.reason}); convert it") from None
    except (OSError, EOFError, lzma.LZMAError, zlib.error, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"{path}: cannot be read to its end ({reason})") from None


def is_readable(path: Path) -> bool:
    """Whether a file's name tells that it is text of a known format."""
    return ending(path) in FORMATS


def ending(path: Path) -> str:
    """The part of a name that tells the format, without that of a compression.

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


def _open(path: Path) -> BinaryIO:
    opener: Any = COMPRESSIONS.get(path.suffix.lower(), lambda path: path.open("rb"))
    file: BinaryIO = opener(path)
    return file


def _open_zstandard(path: Path) -> BinaryIO:
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        raise MissingPackage(f"{path}: .zst needs pyarrow: pip install 'wqk[train]'") from None
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def _sound(text: str) -> str:
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _plain(file: BinaryIO, path: Path, field: str, document: str) -> Iterator[str]:
    with io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
        if document == "file":
            yield lines.read(LONGEST + 1)
            return
        gathered: list[str] = []
        for line in iter(lambda: lines.readline(LONGEST + 1), ""):
            if document == "line" or not line.strip():
                yield "".join([*gathered, line]).strip("\n")
                gathered = []
            else:
                gathered.append(line)
        yield "".join(gathered).strip("\n")


def _json_lines(file: BinaryIO, path: Path, field: str, document: str) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        where = f"{path}, line {number}"
        if len(line) > LONGEST:
            raise CorpusError(f"{where}: longer than {LONGEST:,} bytes; one object a line")
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
        if field not in row:
            raise CorpusError(_no_field(where, field, row))
        yield _text(row[field], where, field)


def _csv(file: BinaryIO, path: Path, field: str, document: str) -> Iterator[str]:
    with io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines)
        if field not in (rows.fieldnames or ()):
            raise CorpusError(_no_field(path, field, rows.fieldnames or ()))
        for row in rows:
            yield row[field] or ""


def _parquet(file: BinaryIO, path: Path, field: str, document: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingPackage(f"{path}: Parquet needs pyarrow: pip install 'wqk[train]'") from None
    try:
        table = parquet.ParquetFile(file)
        if field not in table.schema_arrow.names:
            raise CorpusError(_no_field(path, field, table.schema_arrow.names))
        number = 0
        for batch in table.iter_batches(ROWS, columns=[field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield _text(value, f"{path}, row {number}", field)
    except pyarrow.ArrowException as error:
        raise CorpusError(f"{path}: cannot be read as Parquet ({error})") from None


def _text(value: object, where: str, field: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CorpusError(f"{where}: expected text in {field!r}, got {type(value).__name__}")
    return value


def _no_field(where: object, field: str, names: Any) -> str:
    return f"{where}: has no {field!r}; give one of {', '.join(names) or 'none'} with --field"


FORMATS: dict[str, Callable[[BinaryIO, Path, str, str], Iterator[str]]] = {
    ".txt": _plain,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}
COMPRESSIONS: dict[str, Callable[[Path], Any]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _open_zstandard,
}
