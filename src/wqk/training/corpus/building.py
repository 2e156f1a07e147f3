"""Building a token store from text: read, choose what is held out, learn, tokenize, write."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from wqk._version import __version__
from wqk.errors import CorpusError
from wqk.scanning.scan import usable_cores
from wqk.training.corpus.encoding import Encoder
from wqk.training.corpus.gathering import gather
from wqk.training.corpus.header import SPLITS
from wqk.training.corpus.options import ALPHABET, VOCABULARY_SIZE, CorpusOptions
from wqk.training.corpus.progress import CorpusProgress
from wqk.training.corpus.sources import find_source
from wqk.training.corpus.vocabularies import (
    learn_characters,
    learn_words,
    library_threads,
    read_tokenizer,
    read_words,
)
from wqk.training.corpus.work import open_work
from wqk.training.corpus.writing import write_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from os import PathLike

    from wqk.training.corpus.store import TokenStore
    from wqk.training.corpus.work import Work

    Tell = Callable[[CorpusProgress], None]


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
        How the text becomes tokens; words of a learned vocabulary by default.
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
        described = work.described()
        if described is None:
            described = gather(work, sources, options, tell)
            work.note_described(described)
        held_out = _held_out(work, options)
        content = work.tokenizer() or _make_tokenizer(work, options, held_out, jobs != 1, tell)
        encoder = Encoder(content, options.unit)
        _tokenize(work, encoder, held_out, jobs or usable_cores(), tell)
        tell(CorpusProgress("writing"))
        return write_store(
            place,
            {split: work.chunks(split) for split in SPLITS},
            unit=options.unit,
            vocabulary_size=encoder.vocabulary_size,
            special=encoder.special,
            tokenizer=content.encode(),
            about={"sources": described, "options": options.about(), "wqk": __version__},
            beside=work.folder,
        )


def _held_out(work: Work, options: CorpusOptions) -> int:
    """Documents with a hash below this are held out."""
    hashes = np.concatenate([work.load_texts(shard, "hash")["hash"] for shard in work.texts()])
    count = options.count_held_out(len(hashes))
    distinct = np.unique(hashes)
    if count >= len(distinct):
        raise CorpusError(
            f"{len(distinct)} different documents, of which {count} are to be held out; expected "
            "more: cut plain text with --document paragraph, or change --held-out"
        )
    return int(distinct[count])


def _make_tokenizer(
    work: Work, options: CorpusOptions, held_out: int, threads: bool, tell: Tell
) -> str:
    """The tokenizer that was asked for; what is learned is learned from training text alone."""
    tell(CorpusProgress("learning"))

    def texts() -> Iterator[list[str]]:
        for shard in work.texts():
            frame = work.load_texts(shard, "hash", "text")
            yield frame.filter(pl.col("hash") >= held_out)["text"].to_list()

    lower, vocabulary = options.lowered, options.vocabulary
    if options.tokenizer is not None:
        content = read_tokenizer(os.fspath(options.tokenizer))
    elif options.text == "characters":
        content = learn_characters(texts(), options.characters or ALPHABET, lower)
    elif vocabulary is None or isinstance(vocabulary, int):
        content = learn_words(texts, vocabulary or VOCABULARY_SIZE, lower, threads=threads)
    else:
        content = read_words(Path(vocabulary), lower)
    work.note_tokenizer(content)
    return content


def _tokenize(work: Work, encoder: Encoder, held_out: int, jobs: int, tell: Tell) -> None:
    """Tokens for all shards that have none yet."""
    progress = CorpusProgress("tokenizing")
    tell(progress)
    shards = work.texts()
    missing = [shard for shard in shards if not work.tokens(shard).exists()]

    def tokenize(shard: Path) -> tuple[int, int, int]:
        frame = work.load_texts(shard, "hash", "text")
        parts = {
            "train": frame.filter(pl.col("hash") >= held_out),
            "held_out": frame.filter(pl.col("hash") < held_out),
        }
        chunks = {split: encoder(part["text"].to_list()) for split, part in parts.items()}
        work.save_tokens(shard, chunks)
        return (
            frame.height,
            sum(chunk.characters for chunk in chunks.values()),
            sum(len(chunk.tokens) for chunk in chunks.values()),
        )

    # Python's threads are enough: the library lets go of the interpreter while it works.
    with library_threads(False), ThreadPoolExecutor(jobs) as pool:
        before = len(shards) - len(missing)
        for number, counts in enumerate(pool.map(tokenize, missing), before + 1):
            progress = progress.plus(*counts, share=number / len(shards))
            tell(progress)
