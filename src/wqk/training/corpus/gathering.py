"""The first stage of a build: documents are copied, in order, into shards of about equal size."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import polars as pl

from wqk.errors import CorpusError
from wqk.training.corpus.progress import CorpusProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from wqk.training.corpus.options import CorpusOptions
    from wqk.training.corpus.sources import Source
    from wqk.training.corpus.work import Work

# Characters of a shard: what a thread takes at a time, and what an interruption may cost.
SHARD = 4_000_000


class Document(NamedTuple):
    """A row of a shard.

    Attributes
    ----------
    source, row
        Which source it is of, and its place there; empty documents keep theirs and are left out.
    hash
        64 bits of the text's BLAKE2: decides whether it is held out.
    length
        In characters.
    text
        The document.
    """

    source: int
    row: int
    hash: int
    length: int
    text: str


SCHEMA = {
    "source": pl.UInt32(),
    "row": pl.UInt64(),
    "hash": pl.UInt64(),
    "length": pl.UInt64(),
    "text": pl.String(),
}


def gather(
    work: Work,
    sources: Sequence[Source],
    options: CorpusOptions,
    tell: Callable[[CorpusProgress], None],
) -> list[dict[str, Any]]:
    """Read what has not been read yet.

    Returns
    -------
    list
        For each source, its ``name``, its ``bytes``, and the ``documents`` and ``characters`` that
        were taken from it.

    Raises
    ------
    CorpusError
        A source cannot be read, or there is no text in any.
    """
    progress = CorpusProgress("reading")
    tell(progress)
    done = [work.load_texts(shard, *list(SCHEMA)[:4]) for shard in work.texts()]
    for documents in _shards(_unread(sources, options, done)):
        frame = pl.DataFrame(documents, schema=SCHEMA, orient="row")
        work.save_texts(frame)
        done.append(frame.drop("text"))
        progress = progress.plus(frame.height, _characters(frame))
        tell(progress)
    if not done:
        raise CorpusError("no text: every document is empty")
    read = pl.concat(done)
    counts = {
        number: (frame.height, _characters(frame))
        for (number,), frame in read.partition_by("source", as_dict=True).items()
    }
    described = []
    for number, source in enumerate(sources):
        count, characters = counts.get(number, (0, 0))
        size = {"bytes": source.bytes} if source.files else {}
        described.append(
            {"name": source.name, **size, "documents": count, "characters": characters}
        )
    return described


def _unread(
    sources: Sequence[Source], options: CorpusOptions, done: Sequence[pl.DataFrame]
) -> Iterator[Document]:
    """Documents after the last one that lies in a shard, up to the limits."""
    documents = sum(frame.height for frame in done)
    characters = sum(map(_characters, done))
    first, after = (done[-1]["source"][-1], done[-1]["row"][-1] + 1) if done else (0, 0)
    for number, source in enumerate(sources[first:], first):
        skip = after if number == first else 0
        for row, text in enumerate(source.documents(options.field, options.document, skip), skip):
            if _reached(documents, options.max_documents) or _reached(
                characters, options.max_characters
            ):
                return
            if text.strip():
                digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
                yield Document(number, row, int.from_bytes(digest, "little"), len(text), text)
                documents += 1
                characters += len(text)


def _characters(frame: pl.DataFrame) -> int:
    return int(frame["length"].sum())


def _reached(count: int, limit: int | None) -> bool:
    return limit is not None and count >= limit


def _shards(documents: Iterable[Document]) -> Iterator[list[Document]]:
    shard: list[Document] = []
    room = SHARD
    for document in documents:
        shard.append(document)
        room -= document.length
        if room <= 0:
            yield shard
            shard, room = [], SHARD
    if shard:
        yield shard
