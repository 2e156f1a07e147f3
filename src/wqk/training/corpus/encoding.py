"""From texts to tokens, with the tokenizer of a store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from wqk.training.corpus.vocabularies import character_normalizer, code_points, special_ids
from wqk.training.corpus.writing import Chunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

# Characters that are given to the tokenizers library at a time; it needs 30 times their memory.
BATCH = 250_000


class Encoder:
    """Makes tokens of texts; safe to be used by several threads.

    Parameters
    ----------
    tokenizer
        Content of a ``tokenizer.json``.
    unit
        ``characters`` are looked up in a table; everything else the tokenizers library does.

    Examples
    --------
    >>> from wqk.training.corpus.vocabularies import learn_characters
    >>> encoder = Encoder(learn_characters([["abacab"]], size=2, lower=False), "characters")
    >>> chunk = encoder(["ab", "abc"])
    >>> chunk.tokens.tolist(), chunk.lengths.tolist(), chunk.characters
    ([4, 5, 3, 4, 5, 2, 3], [3, 4], 5)
    """

    def __init__(self, tokenizer: str, unit: str) -> None:
        special, self.vocabulary_size = special_ids(tokenizer)
        self.special = special
        self._end = np.array([special["separator"]] if "separator" in special else [], np.uint32)
        encode = _character_encoder if unit == "characters" else _library_encoder
        self._encode = encode(tokenizer)

    def __call__(self, texts: Sequence[str]) -> Chunk:
        """Tokens of each text, followed by the separator where there is one."""
        pieces: list[NDArray[np.uint32]] = []
        lengths = np.empty(len(texts), np.int64)
        for number, ids in enumerate(self._encode(texts)):
            pieces += (ids, self._end)
            lengths[number] = len(ids) + len(self._end)
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        return Chunk(tokens, lengths, sum(map(len, texts)))


def _character_encoder(tokenizer: str) -> Callable[[Sequence[str]], Iterator[NDArray[np.uint32]]]:
    content = json.loads(tokenizer)
    names = content["model"]["vocab"]
    table = np.full(0x110000, names["[UNK]"], np.uint32)
    for name, number in names.items():
        if len(name) == 1:
            table[ord(name)] = number
    normalizer = character_normalizer() if content["normalizer"] else None

    def encode(texts: Sequence[str]) -> Iterator[NDArray[np.uint32]]:
        for text in texts:
            shown = text if normalizer is None else normalizer.normalize_str(text)
            yield table[code_points(shown)]

    return encode


def _library_encoder(content: str) -> Callable[[Sequence[str]], Iterator[NDArray[np.uint32]]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(content)
    # A text that contains "[MASK]" does not contain a mask.
    tokenizer.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> Iterator[NDArray[np.uint32]]:
        for batch in _batches(texts):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array(encoding.ids, np.uint32)

    return encode


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    room = BATCH
    for text in texts:
        batch.append(text)
        room -= len(text)
        if room <= 0:
            yield batch
            batch, room = [], BATCH
    if batch:
        yield batch
