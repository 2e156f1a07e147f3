"""Sources of text: files, folders, Hub data sets, and the named corpora.

`datasets` reads CSV, Parquet and the Hub. Plain text and JSON Lines are read here, line by line:
the length of a line is limited, other columns than the text may change type, and a single surrogate
does not invalidate the file.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from wqk._files import COMPRESSIONS, UNREADABLE, opened, require_file
from wqk.errors import CorpusError, WqkError, all_lines, required_by

# A longer document or line of JSON is more likely a mistake than a text, and the tokenizers library
# would need 100 bytes per character of it.
LONGEST_TEXT = 10_000_000

# Seconds until the network must have responded.
SECONDS = 5


@dataclass(frozen=True)
class TextSource:
    """A text of a corpus: local files in reading order, or arguments for loading it from the Hub.

    The name appears in the header, without local folders.
    """

    name: str
    files: tuple[Path, ...] = ()
    hub: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(path.stat().st_size for path in self.files)

    def documents(self, field: str | None, document: str) -> Iterator[str]:
        """All texts in order."""
        if self.hub:
            return _from_hub(self.name, self.hub, field)
        texts = (read_documents(path, field or "text", document) for path in self.files)
        return itertools.chain.from_iterable(texts)


def find_source(text: str, subset: str | None, split: str | None) -> TextSource:
    """Return the source for a command-line argument; `CorpusError` if there is none.

    Examples
    --------
    >>> find_source("wikipedia", None, None).hub["subset"]
    '20220301.en'
    >>> find_source("roneneldan/TinyStories", None, "validation").name
    'roneneldan/TinyStories'
    """
    path = Path(text)
    try:
        if path.is_dir():
            return TextSource(path.resolve().name, tuple(_files_in(path)))
        if path.exists():
            if not is_readable(path):
                raise CorpusError(f"{path}: expected a file with the ending {_formats()}")
            require_file(path, CorpusError)
            return TextSource(path.name, (path,))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"{text}: cannot be read ({reason})") from None
    hub: dict[str, Any] = dict(_named().get(text, {}))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not is_readable(path):
        hub = {"path": text}
    if not hub:
        raise CorpusError(
            f"{text}: no such file or folder; expected one, a Hub data set as "
            f"owner/name, or one of {', '.join(_named())}"
        )
    chosen = {"subset": subset, "split": split}
    return TextSource(text, hub=hub | {name: value for name, value in chosen.items() if value})


def _files_in(folder: Path) -> list[Path]:
    """Return the text files of a folder and its nested folders, without hidden files."""
    inside = (path for path in folder.rglob("*") if is_readable(path) and path.is_file())
    hidden = re.compile(r"(^|/)\.")
    files = sorted(p for p in inside if not hidden.search(p.relative_to(folder).as_posix()))
    if not files:
        raise CorpusError(f"{folder}: has no text files; expected {_formats()}")
    return files


@cache
def _named() -> dict[str, dict[str, str]]:
    """Return the named corpora, from the table next to this file."""
    return tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))


def _formats() -> str:
    return f"*{', *'.join(FORMATS)}, perhaps with {', '.join(COMPRESSIONS)} after it"


def _from_hub(name: str, hub: Mapping[str, Any], field: str | None) -> Iterator[str]:
    """Yield the texts of a data set, streamed."""
    advice = "; " + hub.get("instead", "fetch its files elsewhere, and pass their folder")
    _require_network(name, hub, advice)
    options = {"split": hub.get("split", "train"), "name": hub.get("subset")}
    if "listing" in hub:
        lines = read_rows(name, "text", "text", advice, data_files=hub["listing"])
        options["data_files"] = [hub["files"].format(line) for line in lines]
    column = field or hub.get("field", "text")
    yield from read_rows(name, column, hub["path"], advice, **options)


def _require_network(name: str, hub: Mapping[str, Any], advice: str) -> None:
    """Raise `CorpusError` without a network; the libraries would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:  # what is in the cache can be read
        return
    address = hub.get("listing", f"{constants.ENDPOINT}/api/datasets/{hub['path']}")
    try:
        get_session().head(address, timeout=SECONDS, follow_redirects=True)
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        reason = all_lines(error, 160)
        raise CorpusError(f"{name}: no response from the network ({reason}){advice}") from None


def read_documents(path: Path, field: str, document: str) -> Iterator[str]:
    r"""Yield the texts of a file in order; `CorpusError` for an unreadable or too long text.

    ``field`` is the name of the text in JSON, CSV and Parquet; ``document`` is the unit of
    documents in plain text: the ``file``, a ``paragraph`` between blank lines, or a ``line``.

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
            if len(text) > LONGEST_TEXT:
                raise _too_long(path, "document", "split it, or cut text with document=paragraph")
            # Half of a surrogate pair is not a character; UTF-8 decoders replace it, too.
            yield text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{path}: expected UTF-8 text ({error.reason}); convert it") from None
    except (*UNREADABLE, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"{path}: cannot be read completely ({reason})") from None


def read_rows(
    kind: str,
    field: str,
    builder: str,
    advice: str = "",
    *,
    split: str = "train",
    **options: Any,
) -> Iterator[str]:
    """Yield a column of text from a data set, streamed by the datasets library.

    ``what`` and ``advice`` are the beginning and the end of the error message; ``builder``,
    ``split`` and ``options`` are arguments of `datasets.load_dataset`.
    """
    with required_by(f"{kind}:"):
        import datasets  # type: ignore[import-untyped]
    try:
        with _silent():
            rows = datasets.load_dataset(builder, streaming=True, split=split, **options)
            for number, row in enumerate(rows, 1):
                yield _text(row, field, f"{kind}, row {number}")
    except WqkError:
        raise
    except Exception as error:  # the library raises whatever its formats and the network raise
        reason = all_lines(error, 160)
        raise CorpusError(f"{kind}: cannot be read ({reason}){advice}") from None


def is_readable(path: Path) -> bool:
    """Return whether a file's name has the ending of a known text format."""
    return ending(path) in FORMATS


def ending(path: Path) -> str:
    """Return the file name's ending for the format, without the ending for compression.

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


def _plain(path: Path, field: str, document: str) -> Iterator[str]:
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
        if document == "file":
            yield lines.read(LONGEST_TEXT + 1)
            return
        gathered = io.StringIO()
        for line in iter(lambda: lines.readline(LONGEST_TEXT + 1), ""):
            gathered.write(line)
            if document == "line" or not line.strip():
                yield gathered.getvalue().strip("\n")
                gathered = io.StringIO()
            elif gathered.tell() > LONGEST_TEXT:
                raise _too_long(path, "paragraph", "cut it with document=line")
        yield gathered.getvalue().strip("\n")


def _json_lines(path: Path, field: str, document: str) -> Iterator[str]:
    with opened(path) as file:
        for number, line in enumerate(iter(lambda: file.readline(4 * LONGEST_TEXT + 1), b""), 1):
            where = f"{path}, line {number}"
            if len(line) > 4 * LONGEST_TEXT:
                raise CorpusError(
                    f"{where}: longer than {4 * LONGEST_TEXT:,} bytes; expected one object"
                )
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
    """Yield the values of a column of a CSV file."""
    with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as lines:
        names = next(csv.reader(lines), [])
    if field not in names:
        raise _no_field(str(path), field, names)
    with required_by(f"{path}:"):
        import datasets
    yield from read_rows(
        str(path),
        field,
        "csv",
        data_files=str(path),
        usecols=[field],
        # All values are text: "NA" can be a comment, and so can "12".
        keep_default_na=False,
        features=datasets.Features({field: datasets.Value("string")}),
    )


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


def _too_long(path: Path, kind: str, advice: str) -> CorpusError:
    return CorpusError(f"{path}: a {kind} of more than {LONGEST_TEXT:,} characters; {advice}")


@contextmanager
def _silent() -> Iterator[None]:
    """Hide the library's progress bars and log lines; failures are reported as one error."""
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
