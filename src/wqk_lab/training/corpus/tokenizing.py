"""Tokenizers for a corpus, learned or given, as the content of a tokenizer.json, and encoding.

The tokenizers library learns words, reads given tokenizers, and encodes with both. Characters are
counted and looked up in a table.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._files import read_text
from wqk.errors import CorpusError, all_lines, required_by
from wqk_lab.training.corpus.writing import TokenChunk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Encode = Callable[[Sequence[str]], Iterator[NDArray[np.uint32]]]

SPECIAL = ("[PAD]", "[MASK]", "[UNK]", "[SEP]")

# What tokenizers call the tokens of each role.
ROLES = {
    "padding": ("[PAD]", "<pad>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"),
    "mask": ("[MASK]", "<mask>", "<|mask|>"),
    "unknown": ("[UNK]", "<unk>", "<|unk|>"),
    "separator": ("[SEP]", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]"),
}

# Most characters of a WordPiece vocabulary: number, and inverse share.
MOST_CHARACTERS, SHARE_OF_CHARACTERS = 1000, 8

# Characters to pass to the tokenizers library at a time; it needs 30 times their memory.
BATCH = 250_000


def learn_characters(texts: Iterable[list[str]], size: int, lower: bool) -> str:
    """Return a tokenizer of the ``size`` most common characters; others are unknown.

    ``texts`` are lists of documents; ``lower`` removes capitals and accents first.

    Examples
    --------
    >>> tokenizer = learn_characters([["abacab"]], size=2, lower=False)
    >>> json.loads(tokenizer)["model"]["vocab"]
    {'[PAD]': 0, '[MASK]': 1, '[UNK]': 2, '[SEP]': 3, 'a': 4, 'b': 5}
    """
    library = _library()
    normalize = _character_normalizer() if lower else None
    alphabet = _most_common(_count(texts, normalize), size)
    names = {name: number for number, name in enumerate((*SPECIAL, *alphabet))}
    tokenizer = library.Tokenizer(library.models.WordLevel(names, unk_token="[UNK]"))
    if normalize is not None:
        tokenizer.normalizer = normalize
    tokenizer.pre_tokenizer = library.pre_tokenizers.Split(library.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = library.decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return str(tokenizer.to_str())


def learn_words(
    texts: Callable[[], Iterable[list[str]]], size: int, lower: bool, *, threads: bool
) -> str:
    """Return a WordPiece tokenizer with a vocabulary learned from the text, deterministically.

    ``texts`` is called twice. The vocabulary is smaller than ``size`` if the text has too few
    words.
    """
    library = _library()
    tokenizer = _word_tokenizer(library.models.WordPiece(unk_token="[UNK]"), lower)
    most = min(MOST_CHARACTERS, size // SHARE_OF_CHARACTERS)
    counts = _count(texts(), tokenizer.normalizer)
    alphabet = [c for c in _most_common(counts, most + 10) if not c.isspace()][:most]
    # The trainer numbers new pieces in the order in which it meets them, which changes from run to
    # run, and breaks ties by number. Therefore all single characters are numbered beforehand.
    initial_alphabet = [*SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
    trainer = library.trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=initial_alphabet,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
    )
    with library_threads(threads):
        tokenizer.train_from_iterator(texts(), trainer)
    return _from_words(json.loads(tokenizer.to_str())["model"]["vocab"], lower)


def read_words(path: Path, lower: bool) -> str:
    """Return a WordPiece tokenizer from a ``vocab.txt`` with one token per line."""
    lines = read_text(path, CorpusError, "; expected one token per line").split("\n")
    if not lines[-1]:  # the end of the last line
        lines.pop()
    pieces = [line.rstrip("\r") for line in lines]
    names = {piece: number for number, piece in enumerate(pieces)}
    if missing := [name for name in SPECIAL if name not in names]:
        raise CorpusError(f"{path}: lacks {', '.join(missing)}; expected a vocab.txt like BERT's")
    if len(names) < len(pieces):
        raise CorpusError(f"{path}: repeats a token; expected each once")
    return _from_words(names, lower)


def read_tokenizer(text: str) -> str:
    """Return a tokenizer from a ``tokenizer.json``, or from a Hub model with a tokenizer."""
    library, path = _library().Tokenizer, Path(text)
    try:
        if path.exists():
            file = path / "tokenizer.json" if path.is_dir() else path
            tokenizer = library.from_file(str(file))
        else:
            tokenizer = library.from_pretrained(text)
    except Exception as error:  # the library raises nothing narrower
        reason = all_lines(error, 160)
        raise CorpusError(
            f"{text}: no tokenizer can be read from it ({reason}); expected a tokenizer.json, or a "
            "Hub model that has one"
        ) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return str(tokenizer.to_str())


def special_ids(tokenizer: str) -> tuple[dict[str, int], int]:
    """Return the ids of the special tokens by role, and the number of ids.

    Examples
    --------
    >>> special_ids(learn_characters([["abacab"]], size=2, lower=False))
    ({'padding': 0, 'mask': 1, 'unknown': 2, 'separator': 3}, 6)
    """
    ids = _library().Tokenizer.from_str(tokenizer).get_vocab(with_added_tokens=True)
    special = {}
    for role, names in ROLES.items():
        present = [name for name in names if name in ids]
        if present:
            special[role] = ids[present[0]]
    return special, max(ids.values()) + 1


class Encoder:
    """Tokenizes texts with the content of a ``tokenizer.json``; thread-safe.

    Examples
    --------
    >>> encoder = Encoder(learn_characters([["abacab"]], size=2, lower=False), "characters")
    >>> chunk = encoder(["ab", "abc"])
    >>> chunk.tokens.tolist(), chunk.lengths.tolist(), chunk.characters
    ([4, 5, 3, 4, 5, 2, 3], [3, 4], 5)
    """

    def __init__(self, tokenizer: str, unit: str) -> None:
        self.special, self.vocabulary_size = special_ids(tokenizer)
        end = [self.special["separator"]] if "separator" in self.special else []
        self._end = np.array(end, np.uint32)
        #: Characters outside the alphabet that were met so far; empty for other units.
        self.unknown_characters: set[str] = set()
        self._encode: Encode
        if unit == "characters":
            self._encode = _character_encoder(tokenizer, self.unknown_characters)
        else:
            self._encode = _library_encoder(tokenizer)

    def __call__(self, texts: Sequence[str]) -> TokenChunk:
        """Return the tokens of each text, each text followed by the separator, if any."""
        pieces = [np.concatenate([ids, self._end]) for ids in self._encode(texts)]
        tokens = np.concatenate(pieces) if pieces else np.empty(0, np.uint32)
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        return TokenChunk(tokens, lengths, sum(map(len, texts)))


def _character_encoder(tokenizer: str, unknown_characters: set[str]) -> Encode:
    """Return the encoder of an alphabet; it adds other characters to ``unknown_characters``."""
    content = json.loads(tokenizer)
    names = content["model"]["vocab"]
    unknown = names["[UNK]"]
    table = np.full(0x110000, unknown, np.uint32)
    for name, number in names.items():
        if len(name) == 1:
            table[ord(name)] = number
    normalizer = _character_normalizer() if content["normalizer"] else None

    def encode(texts: Sequence[str]) -> Iterator[NDArray[np.uint32]]:
        for text in texts:
            shown = text if normalizer is None else normalizer.normalize_str(text)
            points = _code_points(shown)
            ids = table[points]
            unknown_characters.update(map(chr, np.unique(points[ids == unknown])))
            yield ids

    return encode


def _library_encoder(content: str) -> Encode:
    tokenizer = _library().Tokenizer.from_str(content)
    # A text that contains "[MASK]" does not contain a mask.
    tokenizer.encode_special_tokens = True

    def encode(texts: Sequence[str]) -> Iterator[NDArray[np.uint32]]:
        for batch in _batches(texts):
            for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
                yield np.array(encoding.ids, np.uint32)

    return encode


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch, room = [], BATCH
    for text in texts:
        batch.append(text)
        room -= len(text)
        if room <= 0:
            yield batch
            batch, room = [], BATCH
    if batch:
        yield batch


@contextmanager
def library_threads(allowed: bool) -> Iterator[None]:
    """Allow or forbid threads in the tokenizers library, through its environment variable."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true" if allowed else "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _character_normalizer() -> Any:
    """Return BERT's normalization of capitals and accents, without further steps."""
    return _library().normalizers.BertNormalizer(
        clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=True
    )


def _word_tokenizer(model: Any, lower: bool) -> Any:
    library = _library()
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece(cleanup=False)
    return tokenizer


def _from_words(names: dict[str, int], lower: bool) -> str:
    tokenizer = _word_tokenizer(_library().models.WordPiece(names, unk_token="[UNK]"), lower)
    tokenizer.add_special_tokens(list(SPECIAL))
    return str(tokenizer.to_str())


def _count(texts: Iterable[list[str]], normalizer: Any) -> NDArray[np.int64]:
    """Count the occurrences of each code point."""
    counts = np.zeros(0x110000, np.int64)
    for batch in texts:
        shown = batch if normalizer is None else map(normalizer.normalize_str, batch)
        seen = np.bincount(_code_points("".join(shown)))
        counts[: len(seen)] += seen
    return counts


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")


def _most_common(counts: NDArray[np.int64], size: int) -> list[str]:
    """Return the occurring characters, the most common first, ties by code point."""
    order = np.argsort(-counts, kind="stable")[:size]
    return [chr(code) for code in order if counts[code]]


def _library() -> Any:
    with required_by("a corpus"):
        import tokenizers
    return tokenizers
