"""Build a token store from text: read, hold out, learn, tokenize, write.

Documents are copied into shards of about equal size, in a temporary folder next to the store.
Shards are tokenized separately, so that a build uses all cores.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._console import counted
from wqk._files import unwritable, write_atomically
from wqk._machine import usable_cores
from wqk._version import __version__
from wqk.errors import CorpusError
from wqk_lab.training.corpus.reading import TextSource, ending, find_source
from wqk_lab.training.corpus.settings import ALPHABET, VOCABULARY_SIZE, CorpusOptions
from wqk_lab.training.corpus.store import SPLITS, TokenStore
from wqk_lab.training.corpus.tokenizing import (
    Encoder,
    learn_characters,
    learn_words,
    library_threads,
    read_tokenizer,
    read_words,
)
from wqk_lab.training.corpus.writing import TokenChunk, write_store

if TYPE_CHECKING:
    Tell = Callable[["CorpusProgress"], None]

# Characters of a shard: what a thread takes at a time.
SHARD = 4_000_000

# A shard's columns: the source, 64 bits of the text's BLAKE2, which decide whether it is held out,
# and its length.
SHARD_SCHEMA = {
    "source": pl.UInt32(),
    "hash": pl.UInt64(),
    "length": pl.UInt64(),
    "text": pl.String(),
}


@dataclass(frozen=True)
class CorpusProgress:
    """Progress of a build, and of the present stage."""

    stage: str  #: ``reading``, ``learning``, ``tokenizing`` or ``writing``.
    documents: int = 0
    characters: int = 0
    tokens: int = 0
    #: Completed share of the stage, from 0 to 1; None if unknown.
    share: float | None = None

    def plus(self, documents: int, characters: int, tokens: int = 0) -> CorpusProgress:
        """Return the progress after further work."""
        return replace(
            self,
            documents=self.documents + documents,
            characters=self.characters + characters,
            tokens=self.tokens + tokens,
        )


def build_corpus(
    texts: Sequence[str | PathLike[str]],
    folder: str | PathLike[str],
    options: CorpusOptions | None = None,
    *,
    jobs: int | None = None,
    on_progress: Callable[[CorpusProgress], None] | None = None,
) -> TokenStore:
    r"""Make a token store from text.

    Parameters
    ----------
    texts
        Files (.txt, .jsonl, .csv, .parquet, also compressed), folders of them, Hub data sets
        (``owner/name``), or ``wikipedia``, ``jigsaw``, ``redpajama``.
    folder
        Folder of the store; it appears once complete.
    options
        Options for tokens; by default, words of a learned vocabulary.
    jobs
        Number of threads, by default the number of cores; the store does not depend on this number.
    on_progress
        Called with the progress repeatedly.

    Raises
    ------
    CorpusError
        The text cannot be read, there are too few documents to hold some out, or the folder exists
        already or cannot be written.
    MissingPackage
        The tokenizers library, or a library for a format, is not installed.
    OutputError
        The disk is full.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     path = Path(place, "fish.txt")
    ...     _ = path.write_text("one fish\ntwo fish\nred fish\nblue fish\n")
    ...     options = CorpusOptions(vocabulary=300, document="line", held_out=1)
    ...     store = build_corpus([path], Path(place, "store"), options)
    ...     store.decode(store.tokens("train"))
    'one fish [SEP] red fish [SEP] blue fish [SEP]'
    """
    options = options or CorpusOptions()
    target = Path(folder)
    sources = [find_source(str(text), options.subset, options.split) for text in texts]
    if options.document is None:
        options = replace(options, document=_usual_document(sources, options))
    if not sources:
        raise CorpusError("no text: expected files, folders, data sets or named corpora")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CorpusError(f"{target}: already exists; choose another folder, or remove it")
    tell = on_progress or (lambda _: None)
    parent = target.resolve().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        building = TemporaryDirectory(prefix=f".{target.name}.", dir=parent)
    except OSError as error:
        raise unwritable(parent, error) from None
    with building as place:
        work = Path(place)
        read = _gather(work, sources, options, tell)
        held_out = _held_out(work, options)
        tokenizer = _make_tokenizer(work, options, held_out, jobs != 1, tell)
        encoder = Encoder(tokenizer, options.unit)
        unknown = _tokenize(work, encoder, jobs or usable_cores(), tell)
        about = {"sources": read, "options": options.about(), "wqk": __version__}
        if "unknown" in encoder.special:
            counts = {"tokens": unknown}
            if options.unit == "characters":
                counts["distinct_characters"] = len(encoder.unknown_characters)
            about["unknown"] = counts
        tell(CorpusProgress("writing"))
        return write_store(
            target,
            {split: _chunks(work, split == "held_out", held_out) for split in SPLITS},
            unit=options.unit,
            vocabulary_size=encoder.vocabulary_size,
            special=encoder.special,
            tokenizer=tokenizer.encode(),
            about=about,
        )


def _usual_document(sources: Sequence[TextSource], options: CorpusOptions) -> str:
    """Return the default way to split plain text into documents.

    Each file is a document. A single file is split into paragraphs, so that some can be held out.
    """
    files = list(chain.from_iterable(source.files for source in sources))
    is_single = len(files) == len(sources) == 1 and ending(files[0]) == ".txt"
    return "paragraph" if is_single and options.held_out != 0 else "file"


def _documents(folder: Path) -> list[Path]:
    """Return the shards of documents of a build, in order; tokens are next to their shard."""
    return sorted(folder.glob("*.texts"))


def _load(path: Path, *columns: str) -> pl.DataFrame:
    """Return columns of a shard, or of its tokens; by default, all columns."""
    return pl.read_parquet(io.BytesIO(path.read_bytes()), columns=list(columns) or None)


def _save(path: Path, frame: pl.DataFrame) -> None:
    """Write a shard, or its tokens."""
    content = io.BytesIO()
    frame.write_parquet(content, compression="zstd", compression_level=1)
    write_atomically(path, content.getvalue(), sync=False)


def _gather(
    work: Path, sources: Sequence[TextSource], options: CorpusOptions, tell: Tell
) -> list[dict[str, Any]]:
    """Copy the documents into shards; return the name and the counts of each source."""
    progress = CorpusProgress("reading")
    tell(progress)
    done: list[pl.DataFrame] = []
    for frame in _shards(sources, options):
        _save(work / f"{len(done):06}.texts", frame)
        done.append(frame.drop("text"))
        progress = progress.plus(frame.height, int(frame["length"].sum()))
        tell(progress)
    if not done:
        raise CorpusError("no text: every document is empty")
    counts = pl.concat(done).group_by("source").agg(pl.len(), pl.col("length").sum())
    taken = {number: (count, characters) for number, count, characters in counts.iter_rows()}
    records = []
    for number, source in enumerate(sources):
        record: dict[str, Any] = {"name": source.name}
        if source.files:
            record["bytes"] = source.bytes
        record["documents"], record["characters"] = taken.get(number, (0, 0))
        records.append(record)
    return records


def _shards(sources: Sequence[TextSource], options: CorpusOptions) -> Iterator[pl.DataFrame]:
    """Yield shards of the documents, up to the limits."""
    documents = characters = 0
    most_documents = options.max_documents or float("inf")
    most_characters = options.max_characters or float("inf")
    shard: list[tuple[Any, ...]] = []
    end = SHARD
    for number, source in enumerate(sources):
        for text in source.documents(options.field, options.document or "file"):
            if documents >= most_documents or characters >= most_characters:
                break
            if not text.strip():
                continue
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            shard.append((number, int.from_bytes(digest, "little"), len(text), text))
            documents += 1
            characters += len(text)
            if characters >= end:
                yield pl.DataFrame(shard, schema=SHARD_SCHEMA, orient="row")
                shard, end = [], characters + SHARD
    if shard:
        yield pl.DataFrame(shard, schema=SHARD_SCHEMA, orient="row")


def _held_out(work: Path, options: CorpusOptions) -> int:
    """Return the limit of hashes: documents with smaller hashes are held out."""
    hashes = np.concatenate([_load(shard, "hash")["hash"] for shard in _documents(work)])
    count = options.count_held_out(len(hashes))
    distinct = np.unique(hashes)
    if count >= len(distinct):
        advice = "split plain text with document=paragraph or document=line, or set held_out=1"
        if len(distinct) == 1:
            advice = (
                "split plain text with document=paragraph or document=line; a text whose parts are "
                "all equal cannot be split"
            )
        raise CorpusError(
            f"{counted(len(distinct), 'different document')}, of which {count} would be held out, "
            f"leave none to train on: {advice}"
        )
    return int(distinct[count])


def _make_tokenizer(
    work: Path, options: CorpusOptions, held_out: int, threads: bool, tell: Tell
) -> str:
    """Return the requested tokenizer; a new tokenizer is learned only from training text."""
    tell(CorpusProgress("learning"))

    def texts() -> Iterator[list[str]]:
        for shard in _documents(work):
            frame = _load(shard, "hash", "text")
            yield frame.filter(pl.col("hash") >= held_out)["text"].to_list()

    lower, vocabulary = options.lowered, options.vocabulary
    if options.tokenizer is not None:
        return read_tokenizer(os.fspath(options.tokenizer))
    if options.text == "characters":
        return learn_characters(texts(), options.characters or ALPHABET, lower)
    if vocabulary is None or isinstance(vocabulary, int):
        return learn_words(texts, vocabulary or VOCABULARY_SIZE, lower, threads=threads)
    return read_words(Path(vocabulary), lower)


def _tokenize(work: Path, encoder: Encoder, jobs: int, tell: Tell) -> int:
    """Tokenize all shards; return the number of unknown tokens."""
    unknown_id = encoder.special.get("unknown")
    unknown = 0
    progress = CorpusProgress("tokenizing")
    tell(progress)
    shards = _documents(work)

    def tokenize(shard: Path) -> tuple[int, tuple[int, int, int]]:
        texts = _load(shard, "text")["text"].to_list()
        chunk = encoder(texts)
        ends = np.cumsum(chunk.lengths)
        tokens_of_texts = np.split(chunk.tokens, ends[:-1])
        schema = {"tokens": pl.List(pl.UInt32)}
        frame = pl.DataFrame({"tokens": tokens_of_texts}, schema=schema)
        _save(shard.with_suffix(".tokens"), frame)
        unknown_of_shard = int((chunk.tokens == unknown_id).sum()) if unknown_id is not None else 0
        return unknown_of_shard, (len(texts), chunk.characters, len(chunk.tokens))

    # Threads suffice: the library releases the interpreter's lock while it works.
    with library_threads(False), ThreadPoolExecutor(jobs) as pool:
        for number, (unknown_of_shard, counts) in enumerate(pool.map(tokenize, shards), 1):
            unknown += unknown_of_shard
            progress = replace(progress.plus(*counts), share=number / len(shards))
            tell(progress)
    return unknown


def _chunks(work: Path, is_held_out: bool, held_out: int) -> Iterator[TokenChunk]:
    """Yield all tokens of a split, shard by shard."""
    is_in_held_out = pl.col("hash") < held_out
    in_split = is_in_held_out if is_held_out else ~is_in_held_out
    for shard in _documents(work):
        frame = _load(shard, "hash", "length").hstack(_load(shard.with_suffix(".tokens")))
        frame = frame.filter(in_split)
        yield TokenChunk(
            frame["tokens"].explode().drop_nulls().to_numpy(),
            frame["tokens"].list.len().to_numpy(),
            int(frame["length"].sum()),
        )
