"""The text of a subject: a token store, or files that the model's own tokenizer turns into tokens.

Axes: B batch, N tokens of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.attention.verification.running import quiet
from wqk.errors import CorpusError, MissingPackage, first_line
from wqk.theory.models import FAILURES
from wqk.training.corpus import TokenStore
from wqk.training.corpus.reading import is_readable, read_documents
from wqk.training.corpus.store import HEADER, TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# Tokens read of plain files; enough to count with, and seconds to make.
LIMIT = 2_000_000

# Documents handed to a tokenizer at once.
AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class Text:
    """A stream of tokens and the documents in it.

    Attributes
    ----------
    name
        For people.
    tokens
        The stream, one dimension.
    documents
        Where each document starts, and where the last one ends.
    vocabulary_size
        All tokens are below it.
    mask_token
        What stands for a masked token, if there is one.
    vocabulary
        The number of each entry; None where only numbers are known.

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
        """Blocks that begin anywhere in the stream, (batches, B, N), none of them twice.

        Raises
        ------
        CorpusError
            The text is too short for so many blocks that do not overlap.
        """
        wanted, there = batches * batch, len(self.tokens) // length
        if wanted > there:
            raise CorpusError(
                f"{self.name}: {batches} batches of {batch} blocks of {length} tokens are more "
                f"than its {len(self.tokens)} tokens; take fewer or shorter ones"
            )
        random = np.random.default_rng(seed)
        offset = random.integers(len(self.tokens) - there * length + 1)
        starts = offset + length * random.choice(there, wanted, replace=False)
        blocks = self.tokens[starts[:, None] + np.arange(length)].astype(np.int64)
        return np.asarray(blocks.reshape(batches, batch, length))


def open_text(corpus: Path, ref: str, revision: str | None = None, limit: int = LIMIT) -> Text:
    """The tokens of a store's training split, or of files.

    Parameters
    ----------
    corpus
        A token store's folder; a text file (.txt, .jsonl, .csv, .parquet, compressed or not), of
        which a paragraph or a row's ``text`` is a document; or token numbers in a .npy file.
    ref, revision
        The model whose tokenizer reads a text file.
    limit
        Tokens after which no more of a text file is read.

    Raises
    ------
    CorpusError
        The text cannot be read, or the model has no tokenizer for it.
    """
    if (corpus / HEADER).is_file():
        store = TokenStore.open(corpus)
        return Text(
            corpus.name,
            store.tokens("train"),
            np.asarray(store.documents("train")),
            store.vocabulary_size,
            store.special.get("mask"),
            vocabulary_of(store.tokenizer),
        )
    if not corpus.is_file():
        raise CorpusError(f"{corpus}: expected a token store (wqk corpus makes one) or a text file")
    if corpus.suffix == ".npy":
        return _numbers(corpus)
    if not is_readable(corpus):
        raise CorpusError(f"{corpus}: expected a text file: .txt, .jsonl, .csv or .parquet")
    return _tokenized(corpus, ref, revision, limit)


def _numbers(path: Path) -> Text:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read ({first_line(error)})") from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not tokens.size or tokens.min() < 0:
        raise CorpusError(
            f"{path}: expected token numbers in one dimension, got {tokens.dtype} {tokens.shape}"
        )
    return Text(path.name, tokens, np.array([0, len(tokens)]), int(tokens.max()) + 1, None)


def _tokenized(path: Path, ref: str, revision: str | None, limit: int) -> Text:
    with quiet():
        tokenizer = _tokenizer(ref, revision)
        documents, total = [np.zeros(0, np.int64)], 0
        for document in _encoded(path, tokenizer):
            documents.append(document)
            total += len(document)
            if total >= limit:
                break
    offsets = np.cumsum([len(document) for document in documents])
    tokens = np.concatenate(documents)
    return Text(
        path.name,
        tokens,
        offsets,
        len(tokenizer),
        tokenizer.mask_token_id,
        tokenizer.get_vocab(),
    )


def vocabulary_of(source: str | Path, revision: str | None = None) -> Mapping[str, int] | None:
    """The number of each entry of a tokenizer: a ``tokenizer.json``'s, or a model's own.

    None where there is no tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    with quiet():
        try:
            file = Path(source, TOKENIZER) if Path(source).is_dir() else Path(source)
            if file.is_file():
                found = PreTrainedTokenizerFast(tokenizer_file=str(file))
            else:
                found = _tokenizer(str(source), revision)
        except Exception:  # the tokenizers library raises bare exceptions
            return None
    vocabulary: dict[str, int] = found.get_vocab()
    return vocabulary


def _encoded(path: Path, tokenizer: Any) -> Iterator[np.ndarray]:
    """Each document's tokens, without special ones."""
    texts = filter(str.strip, read_documents(path, "text", "paragraph"))
    while some := list(islice(texts, AT_ONCE)):
        for ids in tokenizer(some, add_special_tokens=False)["input_ids"]:
            yield np.asarray(ids, np.int64)


def _tokenizer(ref: str, revision: str | None) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingPackage("text needs transformers: pip install 'wqk[train]'") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(ref, revision=revision, trust_remote_code=False)
        # Where its files are missing, one may be made that knows no words.
        reason = "no vocabulary" if len(tokenizer) <= len(tokenizer.all_special_ids) else ""
    except FAILURES as error:
        reason = first_line(error)
    if reason:
        raise CorpusError(
            f"{ref}: has no tokenizer that reads text ({reason}); "
            "give a token store, or token numbers in a .npy file"
        )
    return tokenizer
