"""Sources of text: files, folders, Hub data sets, and the named corpora."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from wqk.errors import CorpusError, all_lines
from wqk.training.corpus.reading import (
    COMPRESSIONS,
    FORMATS,
    is_readable,
    read_documents,
    read_rows,
)

# Seconds until the network must have responded.
SECONDS = 5


@dataclass(frozen=True)
class Source:
    """One of the texts of a corpus: local files in reading order, or how to load it from the Hub.

    The name is that of the header, without local folders.
    """

    name: str
    files: tuple[Path, ...] = ()
    hub: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of the files."""
        return sum(path.stat().st_size for path in self.files)

    def state(self) -> dict[str, Any]:
        """What identifies the text without reading it: names, sizes and times of files."""
        stats = [(str(path.resolve()), path.stat()) for path in self.files]
        files = [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
        return {"name": self.name, "files": files, "hub": dict(self.hub)}

    def documents(self, field: str | None, document: str, skip: int) -> Iterator[str]:
        """All texts in order, without the first ``skip``."""
        texts = (read_documents(path, field or "text", document) for path in self.files)
        texts_of_files = itertools.chain.from_iterable(texts)
        return itertools.islice(
            _from_hub(self.name, self.hub, field) if self.hub else texts_of_files, skip, None
        )


def find_source(text: str, subset: str | None, split: str | None) -> Source:
    """The source that a command-line argument names.

    Raises
    ------
    CorpusError
        It names no file, corpus or data set.

    Examples
    --------
    >>> find_source("wikipedia", None, None).hub["subset"]
    '20220301.en'
    >>> find_source("roneneldan/TinyStories", None, "validation").name
    'roneneldan/TinyStories'
    """
    path = Path(text)
    try:
        source = _find_files(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"{text}: cannot be read ({reason})") from None
    return source or _find_data_set(text, subset, split)


def _find_files(path: Path) -> Source | None:
    if path.is_dir():
        inside = (file for file in path.rglob("*") if is_readable(file) and file.is_file())
        files = sorted(
            file
            for file in inside
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
        if not files:
            raise CorpusError(f"{path}: has no text files; expected {_formats()}")
        return Source(path.resolve().name, tuple(files))
    if path.exists():
        if not is_readable(path):
            raise CorpusError(f"{path}: expected a file with the ending {_formats()}")
        return Source(path.name, (path,))
    return None


def _find_data_set(text: str, subset: str | None, split: str | None) -> Source:
    hub: dict[str, Any] = dict(_named().get(text, {}))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not is_readable(Path(text)):
        hub = {"path": text}
    if not hub:
        raise CorpusError(
            f"{text}: no such file or folder; expected one, a Hub data set as "
            f"owner/name, or one of {', '.join(_named())}"
        )
    chosen = {"subset": subset, "split": split}
    return Source(text, hub=hub | {name: value for name, value in chosen.items() if value})


@cache
def _named() -> dict[str, dict[str, str]]:
    """The named corpora, from the table next to this file."""
    return tomllib.loads(Path(__file__).with_name("sources.toml").read_text(encoding="utf-8"))


def _formats() -> str:
    return f"*{', *'.join(FORMATS)}, perhaps with {', '.join(COMPRESSIONS)} after it"


def _from_hub(name: str, hub: Mapping[str, Any], field: str | None) -> Iterator[str]:
    """The texts of a data set, streamed."""
    advice = "; " + hub.get("instead", "fetch its files elsewhere, and pass their folder")
    files: dict[str, Any] = {}
    _require_network(name, hub, advice)
    if "listing" in hub:
        lines = read_rows(name, "text", "text", advice, data_files=hub["listing"])
        files["data_files"] = [hub["files"].format(line) for line in lines]
    column, split = field or hub.get("field", "text"), hub.get("split", "train")
    subset = hub.get("subset")
    yield from read_rows(name, column, hub["path"], advice, split=split, name=subset, **files)


def _require_network(name: str, hub: Mapping[str, Any], advice: str) -> None:
    """Raise CorpusError if there is no response; the libraries would retry for half a minute."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:  # what is in the cache can be read
        return
    address = hub.get("listing", f"{constants.ENDPOINT}/api/datasets/{hub['path']}")
    try:
        get_session().head(address, timeout=SECONDS, follow_redirects=True)
    except Exception as error:  # of whichever HTTP library huggingface_hub uses
        reason = all_lines(error, 160)
        raise CorpusError(f"{name}: no response from the network ({reason}){advice}") from None
