"""The text of a subject: a token store, or a file that the model's tokenizer encodes.

Axes: B batch, N tokens of a block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from wqk.errors import CorpusError, first_line
from wqk.live.held_out import tokenizer_of
from wqk.live.running import quiet
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.corpus.reading import is_readable, read_documents
from wqk_lab.training.corpus.store import HEADER, TOKENIZER

# Tokens read from a plain file: enough to count with, and encoded in seconds.
LIMIT = 2_000_000

# Documents that a tokenizer encodes at once.
AT_ONCE = 256

# Errors of transformers and PyTorch on loading or running a model.
FAILURES = (ValueError, TypeError, LookupError, OSError, RuntimeError, ImportError, AttributeError)


@dataclass(frozen=True, eq=False)
class Text:
    """A stream of tokens and the documents in it.

    Attributes
    ----------
    name
        Name for display.
    tokens
        The stream, in one dimension, of ids below ``vocabulary_size``.
    documents
        Start of each document, and end of the last document.
    vocabulary_size, mask_token
        The number of entries, and the id of the mask, if any.
    vocabulary
        The id of each entry; None if only ids are known.

    Examples
    --------
    >>> text = Text("numbers", np.arange(10), np.array([0, 10]), 10, None)
    >>> text.blocks(1, 2, 3, seed=0).shape
    (1, 2, 3)
    """

    name: str
    tokens: np.ndarray
    documents: np.ndarray
    vocabulary_size: int
    mask_token: int | None
    vocabulary: Mapping[str, int] | None = None

    def blocks(self, batches: int, batch: int, length: int, seed: int) -> np.ndarray:
        """Draw blocks from the whole stream, (batches, B, N), without overlap.

        Raises
        ------
        CorpusError
            The text is too short for this many blocks.
        """
        needed, available = batches * batch, len(self.tokens) // length
        if needed > available:
            raise CorpusError(
                f"{self.name}: {batches} batches of {batch} blocks of {length} tokens are more "
                f"than its {len(self.tokens)} tokens; take fewer or shorter ones"
            )
        random = np.random.default_rng(seed)
        offset = random.integers(len(self.tokens) - available * length + 1)
        starts = offset + length * random.choice(available, needed, replace=False)
        blocks = self.tokens[starts[:, None] + np.arange(length)].astype(np.int64)
        return np.asarray(blocks.reshape(batches, batch, length))


# What is read as a text: a path, or an array or a tensor of token ids.
Corpus = str | PathLike[str] | Any

# Name of texts from arrays.
IDS = "token ids"


def name_of(corpus: Corpus) -> str:
    """Return the name of a text for display.

    Examples
    --------
    >>> name_of("corpora/wikipedia"), name_of(np.arange(3))
    ('wikipedia', 'token ids')
    """
    return Path(corpus).name if isinstance(corpus, str | PathLike) else IDS


def open_text(corpus: Corpus, ref: str, revision: str | None = None, limit: int = LIMIT) -> Text:
    """Return the tokens of a store's training split, of a text file, or of token ids.

    Token ids are an .npy file, an array or a tensor: (N,), or (B, N) with a document in each row. A
    text file (.txt, .jsonl, .csv, .parquet, compressed or not) is encoded by the tokenizer of the
    model ``ref``, up to ``limit`` tokens; a paragraph or a row's ``text`` is a document. Raises
    `CorpusError` if the text cannot be read, or the model has no tokenizer for text.
    """
    if not isinstance(corpus, str | PathLike):
        return _text_of_ids(IDS, IDS, _array(corpus))
    corpus = Path(corpus)
    if (corpus / HEADER).is_file():
        store = TokenStore.open(corpus)
        tokens, documents = store.tokens("train"), np.asarray(store.documents("train"))
        size, mask = store.vocabulary_size, store.special.get("mask")
        return Text(corpus.name, tokens, documents, size, mask, vocabulary_of(store.tokenizer))
    if not corpus.is_file():
        missing = "" if corpus.exists() else "no such file or folder; "
        raise CorpusError(
            f"{corpus}: {missing}expected a token store (wqk lab corpus makes one), a text file, "
            "or token ids as .npy"
        )
    if corpus.suffix == ".npy":
        return _text_of_ids(str(corpus), corpus.name, _loaded(corpus))
    if not is_readable(corpus):
        raise CorpusError(
            f"{corpus}: expected a text file (.txt, .jsonl, .csv, .parquet), or token ids as .npy"
        )
    return _tokenized(corpus, ref, revision, limit)


def _loaded(path: Path) -> np.ndarray:
    """Return the array of an .npy file as a memory map."""
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read ({first_line(error)})") from None
    return array


def _array(ids: Any) -> np.ndarray:
    """Return an array, a list or a tensor on any device as an array."""
    return np.asarray(ids.cpu() if hasattr(ids, "cpu") else ids)


def _text_of_ids(source: str, name: str, ids: np.ndarray) -> Text:
    """Return a text of token ids, (N,), or (B, N) with a document in each row.

    ``source`` is the beginning of the error about wrong ids.
    """
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu" or not ids.size or ids.min() < 0:
        raise CorpusError(
            f"{source}: expected token ids, whole numbers from 0 on, (N,) or (B, N); "
            f"got {ids.dtype} {ids.shape}"
        )
    length = ids.shape[-1]
    starts = np.arange(0, ids.size + 1, length)
    return Text(name, ids.reshape(-1), starts, int(ids.max()) + 1, None)


def _require_place_for_tokenizer(ref: str) -> None:
    """Raise `CorpusError` for a configuration file or a model type, which have no tokenizer."""
    from transformers import CONFIG_MAPPING

    path = Path(ref)
    if path.is_file():
        raise CorpusError(
            f"{ref}: is a single file, and has no tokenizer for a text file; give a token store: "
            "wqk lab corpus FILE --text characters -o STORE, then --corpus STORE"
        )
    if ref in CONFIG_MAPPING and not path.exists():
        raise CorpusError(
            f"{ref}: is a model type, and has no tokenizer for a text file; give a token store: "
            "wqk lab corpus FILE --text characters -o STORE, then --corpus STORE"
        )


def _tokenized(path: Path, ref: str, revision: str | None, limit: int) -> Text:
    """Return the first ``limit`` tokens of a file, and the rest of the last document."""
    documents = [np.zeros(0, np.int64)]
    total = 0
    _require_place_for_tokenizer(ref)
    with quiet():
        tokenizer = tokenizer_of(ref, revision=revision)
        texts = filter(str.strip, read_documents(path, "text", "paragraph"))
        while total < limit and (batch := list(islice(texts, AT_ONCE))):
            for ids in _encoded(tokenizer, batch, ref):
                if total < limit:
                    documents.append(np.asarray(ids, np.int64))
                    total += len(ids)
    return Text(
        name=path.name,
        tokens=np.concatenate(documents),
        documents=np.cumsum([len(document) for document in documents]),
        vocabulary_size=len(tokenizer),
        mask_token=tokenizer.mask_token_id,
        vocabulary=tokenizer.get_vocab(),
    )


def _encoded(tokenizer: Any, texts: list[str], ref: str) -> list[list[int]]:
    """Return the token ids of each text; `CorpusError` if the tokenizer cannot encode them."""
    try:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CorpusError(
            f"{ref}: its tokenizer cannot encode the text ({first_line(error)}); give a token "
            "store: wqk lab corpus FILE --text characters -o STORE, then --corpus STORE"
        ) from None
    return ids


def vocabulary_of(source: str | Path, revision: str | None = None) -> Mapping[str, int] | None:
    """Return the ids of a ``tokenizer.json`` or of a model's tokenizer; None without one."""
    from transformers import PreTrainedTokenizerFast

    with quiet():
        try:
            file = Path(source, TOKENIZER) if Path(source).is_dir() else Path(source)
            if file.is_file():
                tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
            else:
                tokenizer = tokenizer_of(str(source), revision=revision)
        except Exception:  # the tokenizers library raises bare exceptions
            return None
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
