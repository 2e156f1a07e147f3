"""Building a token store from text: read, choose what is held out, learn, tokenise, write."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._version import __version__
from wqk.errors import CorpusError
from wqk.training.corpus import vocabularies
from wqk.training.corpus.encoding import Encoder
from wqk.training.corpus.options import ALPHABET, VOCABULARY_SIZE, CorpusOptions
from wqk.training.corpus.sources import find_source
from wqk.training.corpus.work import open_work
from wqk.training.corpus.writing import write_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from os import PathLike

    from wqk.training.corpus.sources import Source
    from wqk.training.corpus.store import TokenStore
    from wqk.training.corpus.work import Work

# Characters of a shard: what a thread takes at a time, and what an interruption may cost.
SHARD = 4_000_000


@dataclass(frozen=True)
class CorpusProgress:
    """How far a build has come.

    Attributes
    ----------
    stage
        ``reading``, ``learning``, ``tokenising`` or ``writing``.
    documents, characters, tokens
        Done by this run in this stage.
    share
        Of the stage, from 0 to 1, where it is known; what earlier runs did is counted.
    """

    stage: str
    documents: int = 0
    characters: int = 0
    tokens: int = 0
    share: float | None = None


Tell = "Callable[[CorpusProgress], None]"


def build_corpus(
    texts: Sequence[str | PathLike[str]],
    folder: str | PathLike[str],
    options: CorpusOptions | None = None,
    *,
    jobs: int | None = None,
    on_progress: Callable[[CorpusProgress], None] | None = None,
) -> TokenStore:
    r"""Make a token store from text; interrupted, the same call goes on where it stood.

    Parameters
    ----------
    texts
        Files (.txt, .jsonl, .csv, .parquet, also compressed), folders of them, data sets of the hub
        (``owner/name``), or ``wikipedia``, ``jigsaw``, ``redpajama``.
    folder
        For the store; it appears when all is done.
    options
        How the text becomes tokens; words of a learnt vocabulary by default.
    jobs
        Threads; as many as there are cores by default. The store does not depend on it.
    on_progress
        Called now and then.

    Raises
    ------
    CorpusError
        Text that cannot be read, too few documents to hold some out, a folder that exists or cannot
        be written, or in which another process is building.
    MissingPackage
        The tokenizers library is not installed, or another that a format needs.
    TableError
        The disk is full.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     path = Path(place, "fish.txt")
    ...     _ = path.write_text("one fish\ntwo fish\nred fish\nblue fish\n")
    ...     options = CorpusOptions(vocabulary=100, document="line", held_out=1)
    ...     store = build_corpus([path], Path(place, "store"), options)
    ...     len(store.documents("train")) - 1, store.decode(store.tokens("held_out"))
    (3, 'red fish [SEP]')
    """
    options = options or CorpusOptions()
    place = Path(folder)
    sources = [find_source(str(text), options.subset, options.split) for text in texts]
    if not sources:
        raise CorpusError("no text: expected files, folders, data sets or named corpora")
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        raise CorpusError(f"{place}: exists already; choose another folder, or remove it")
    plan = {
        "options": options.state(),
        "sources": [source.state() for source in sources],
        "wqk": __version__,
    }
    tell = on_progress or (lambda _: None)
    with open_work(place, plan) as work:
        described = work.read() or _read(work, sources, options, tell)
        held_out = _held_out(work, options)
        content = work.tokenizer() or _make_tokenizer(work, options, held_out, jobs != 1, tell)
        encoder = Encoder(content, options.unit)
        _tokenise(work, encoder, held_out, jobs or _cores(), tell)
        tell(CorpusProgress("writing"))
        return write_store(
            place,
            work.chunks(),
            unit=options.unit,
            vocabulary_size=encoder.vocabulary_size,
            special=encoder.special,
            tokenizer=content.encode(),
            about={**described, "options": options.about(), "wqk": __version__},
            beside=work.folder,
        )


def _read(
    work: Work,
    sources: Sequence[Source],
    options: CorpusOptions,
    tell: Callable[[CorpusProgress], None],
) -> dict[str, Any]:
    """Copy the documents into shards, which end where their text tells them to."""
    progress = CorpusProgress("reading")
    tell(progress)
    shards = work.texts()
    done = [work.load_texts(shard, "source", "row", "length") for shard in shards]
    documents, characters = (
        sum(frame.height for frame in done),
        sum(frame["length"].sum() for frame in done),
    )
    most_documents = options.max_documents or float("inf")
    most_characters = options.max_characters or float("inf")
    first, skip = (done[-1]["source"][-1], done[-1]["row"][-1] + 1) if done else (0, 0)
    rows: list[tuple[int, int, int, int, str]] = []
    size = 0
    for number, source in enumerate(sources):
        if number < first:
            continue
        start = skip if number == first else 0
        texts = source.documents(options.field, options.document, start)
        for row, text in enumerate(texts, start):
            if documents >= most_documents or characters >= most_characters:
                break
            if not text.strip():
                continue
            rows.append((number, row, _hash(text), len(text), text))
            documents, characters, size = documents + 1, characters + len(text), size + len(text)
            if size >= SHARD:
                done.append(_save(work, rows))
                progress = replace(
                    progress,
                    documents=progress.documents + len(rows),
                    characters=progress.characters + size,
                )
                tell(progress)
                rows, size = [], 0
    if rows:
        done.append(_save(work, rows))
    if not done:
        raise CorpusError("no text: every document is empty")
    totals = pl.concat(done).group_by("source").agg(pl.len(), pl.col("length").sum())
