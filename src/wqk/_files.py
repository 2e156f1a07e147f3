"""Crash-safe files: replaced atomically, appended to line by line, locked."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import os
import secrets
import socket
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import IO, Any

from wqk.errors import OutputError, RunError, WqkError, required_by

Bytes = IO[bytes] | gzip.GzipFile


def write_atomically(path: Path, *contents: bytes | bytearray, sync: bool = True) -> None:
    """Replace a file atomically: readers see the old file or the complete new file.

    The contents are written in pieces; with ``sync``, the function waits until the contents are on
    the disk. Raises `OutputError` if the folder is missing, read-only or full.

    Examples
    --------
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "a.txt"), b"one ", b"two")
    ...     Path(folder, "a.txt").read_bytes()
    b'one two'
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            for content in contents:
                file.write(content)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of files, is on the disk."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot wait for folders
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(path: Path, what: str, endings: Iterable[str]) -> None:
    """Check that a file can be written before any work is done.

    Raises `OutputError` if the ending is not supported, the path is a folder, or its folder is
    missing or read-only.
    """
    endings = list(endings)
    if path.suffix not in endings:
        reason = f"{what} is written as {', '.join(endings)}"
        raise OutputError(
            f"{path}: {reason}; got the ending {path.suffix!r}", path=path, reason=reason
        )
    check_writable(path)


def check_writable(path: Path) -> None:
    """Raise `OutputError` if no file with this name can be written, independent of its ending."""
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; expected a file", path=path, reason="is a folder")
    if "\0" in path.name:
        raise OutputError(f"{str(path)!r}: no file's name can contain a null character", path=path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch(exist_ok=False)
        temporary.unlink()
    except OSError as error:
        raise unwritable(path, error) from None


def json_line(record: Mapping[str, Any]) -> bytes:
    """Encode one JSON object as a line."""
    try:
        return json.dumps(dict(record), ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which has no UTF-8 and is escaped
        return json.dumps(dict(record)).encode() + b"\n"


def exists(path: Path) -> bool:
    """Return whether a path exists; False for a path that the system rejects."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def require_file(path: Path, error: type[WqkError]) -> None:
    """Raise the given error for a pipe or a device, which may never end."""
    with contextlib.suppress(OSError, ValueError):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise error(f"{path}: not a regular file")


def read_text(path: Path, error: type[WqkError], expected: str = "") -> str:
    """Return the text of a file, or raise the given error."""
    require_file(path, error)
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not UTF-8 text"
        raise error(f"{path}: cannot be read ({reason}){expected}") from None


def opened(path: Path) -> Bytes:
    """Open a file for reading bytes; files with an ending in `COMPRESSIONS` are decompressed.

    If the content does not have the compression of its ending, reading raises one of `UNREADABLE`.
    """
    opener = COMPRESSIONS.get(path.suffix.lower())
    return opener(path) if opener else path.open("rb")


def _open_zstandard(path: Path) -> Bytes:
    with required_by(f"{path}: .zst"):
        import pyarrow  # type: ignore[import-untyped]
    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


COMPRESSIONS: dict[str, Callable[[Path], Bytes]] = {
    ".xz": lzma.open,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".zst": _open_zstandard,
}
UNREADABLE = (OSError, EOFError, lzma.LZMAError, zlib.error)


def append_lines(path: Path, *records: Mapping[str, Any]) -> int:
    """Append JSON objects to a file, one per line, and wait until the lines are on the disk.

    An incomplete last line of a killed process is removed first. Returns the position of the first
    new line. Raises `OutputError` if the file cannot be written; the file then keeps its lines.
    """
    content = b"".join(map(json_line, records))
    try:
        with path.open("a+b", buffering=0) as file:
            end = _end_of_lines(file)
            file.truncate(end)
            try:
                while content:
                    content = content[file.write(content) :]
                os.fsync(file.fileno())
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(end)
                raise
            return end
    except OSError as error:
        raise unwritable(path, error) from None


def replace_last_lines(path: Path, begin: int, *records: Mapping[str, Any]) -> None:
    """Replace all lines from a position on, in one write, and wait for the disk."""
    content = b"".join(map(json_line, records))
    try:
        with path.open("r+b", buffering=0) as file:
            file.seek(begin)
            file.write(content)
            file.truncate(begin + len(content))
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(path, error) from None


def _end_of_lines(file: FileIO) -> int:
    """Return the position after the last complete line of a file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, one per line, without an incomplete last line.

    The result is empty for an absent file. Raises `RunError` if a line is not a JSON object, or the
    file cannot be read.
    """
    require_file(path, RunError)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    records = []
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise RunError(f"{path}: line {number} is not a JSON object")
        records.append(record)
    return records


@contextmanager
def locked(path: Path, holder: str) -> Iterator[None]:
    """Hold a lock file; the system releases it when the process ends, for any reason.

    The file is created with its folder if missing, and contains the last process that held the
    lock. ``holder`` is the kind of work that needs the lock, such as ``"survey"``, for messages.
    Raises `RunError` if this process or another holds the lock, and `OutputError` if the file
    cannot be created.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, timeout=0, thread_local=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout:
        holding = ""
        with contextlib.suppress(OSError):
            holding = path.read_bytes()[:200].decode(errors="replace")
        raise RunError(
            f"{path.parent}: another {holder} is running here ({holding or 'unknown'}); "
            "wait until it ends, or choose another folder"
        ) from None
    except OSError as error:
        lock.release()
        raise unwritable(path.parent, error) from None
    try:
        yield
    finally:
        lock.release()


def unwritable(path: Path, error: OSError) -> OutputError:
    """Return the error for a file or folder that cannot be written."""
    reason = error.strerror or type(error).__name__
    message = f"{path}: cannot be written ({reason})"
    if isinstance(error, FileNotFoundError) and not exists(path.parent):
        message += f"; there is no folder {path.parent}"
    return OutputError(message, path=path, reason=reason)
