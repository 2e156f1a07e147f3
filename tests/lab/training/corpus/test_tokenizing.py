"""Tokens against brute force: dictionaries of characters, and the longest piece that fits."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.training.corpus.samples import sentences
from tokenizers import Tokenizer

from wqk.errors import CorpusError
from wqk_lab.training.corpus import TokenChunk
from wqk_lab.training.corpus.tokenizing import (
    Encoder,
    learn_characters,
    learn_words,
    library_threads,
    read_tokenizer,
    read_words,
    special_ids,
)

TEXTS = sentences(150)
SPECIAL = ["[PAD]", "[MASK]", "[UNK]", "[SEP]"]
documents = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=5)


def lowered(text: str) -> str:
    """Capitals and accents taken away, by Python alone."""
    decomposed = unicodedata.normalize("NFD", text)
    return "".join(c for c in decomposed if unicodedata.category(c) != "Mn").lower()


def split(chunk: TokenChunk, separator: int = 3) -> list[list[int]]:
    """Ids of each document, its separator checked and taken off."""
    assert chunk.lengths.sum() == len(chunk.tokens)
    parts = np.split(chunk.tokens, np.cumsum(chunk.lengths)[:-1]) if len(chunk.lengths) else []
    assert all(ids[-1] == separator for ids in parts)
    return [ids[:-1].tolist() for ids in parts]


@given(documents, documents, st.integers(1, 40), st.booleans())
def test_characters_are_looked_up_one_by_one(learned, texts, size, lower):
    def shown(text: str) -> str:
        return lowered(text) if lower else text

    # Where the two standards of Unicode differ, Python's is not the library's.
    if lower:
        learned = [document.encode("ascii", "ignore").decode() for document in learned]
        texts = [document.encode("ascii", "ignore").decode() for document in texts]
    counts = Counter("".join(map(shown, learned)))
    alphabet = [c for c, _ in sorted(counts.items(), key=lambda item: (-item[1], ord(item[0])))]
    names = {c: n for n, c in enumerate([*SPECIAL, *alphabet[:size]])}
    encoder = Encoder(learn_characters([learned], size, lower), "characters")
    chunk = encoder(texts)
    expected = []
    for text in texts:
        expected.append([names.get(character, 2) for character in shown(text)])
    assert split(chunk) == expected
    assert encoder.vocabulary_size == len(names)
    assert (chunk.tokens < encoder.vocabulary_size).all()
    assert chunk.characters == sum(map(len, texts))


@pytest.mark.parametrize("lower", [True, False])
def test_the_library_reads_characters_as_we_do(lower: bool) -> None:
    content = learn_characters([TEXTS], 60, lower)
    library = Tokenizer.from_str(content)
    texts = [*TEXTS, "", "É \r\n\t\0\u2028 ß İ ﬁ 🙂 e\u0301 [SEP] tail"]
    chunk = Encoder(content, "characters")(texts)
    library.encode_special_tokens = True
    ids = [library.encode(text).ids for text in texts]
    assert split(chunk) == ids
    if not lower:
        seen = "".join(sorted(set("".join(TEXTS))))
        unlimited = Tokenizer.from_str(learn_characters([TEXTS], 500, False))
        assert unlimited.decode(unlimited.encode(seen).ids) == seen


def test_cased_words_keep_capitals_and_accents() -> None:
    cased = json.loads(learn_words(lambda: [TEXTS], 400, lower=False, threads=False))
    lower = json.loads(learn_words(lambda: [TEXTS], 400, lower=True, threads=False))
    assert "Zürich" in cased["model"]["vocab"]
    assert "zurich" in lower["model"]["vocab"]
    assert "Zürich" not in lower["model"]["vocab"]


def test_words_met_once_and_spaces_are_no_pieces() -> None:
    learned = json.loads(learn_words(lambda: [["twice twice once"]], 99, False, threads=False))
    pieces = learned["model"]["vocab"]
    assert "twice" in pieces
    assert pieces.keys().isdisjoint(["once", " ", "## "])


def test_names_of_special_tokens_in_a_text_are_no_special_tokens() -> None:
    for content, unit in (
        (learn_words(lambda: [TEXTS], 300, lower=True, threads=False), "words"),
        (learn_characters([TEXTS], 60, lower=False), "characters"),
    ):
        encoder = Encoder(content, unit)
        ids = encoder(["[SEP] [MASK] [PAD]"]).tokens[:-1].tolist()
        assert not {encoder.special[role] for role in ("separator", "mask", "padding")} & set(ids)


def test_a_vocabulary_file_keeps_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[CLS]\n[SEP]\n[UNK]\n[MASK]\nthe\ncat\n##s\n")
    content = read_words(path, lower=True)
    encoder = Encoder(content, "words")
    assert encoder.special == {"padding": 0, "mask": 4, "unknown": 3, "separator": 2}
    assert encoder(["The cats dog"]).tokens.tolist() == [5, 6, 7, 3, 2]
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert read_words(path, lower=True) == content


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"[PAD]\n[MASK]\n[UNK]\n", r"lacks \[SEP\]"),
        (b"[PAD]\n[MASK]\n[UNK]\n[SEP]\na\na\n", "repeats a token"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"", r"lacks \[PAD\]"),
    ],
    ids=repr,
)
def test_a_bad_vocabulary_is_refused(content: bytes, fault: str, tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(content)
    with pytest.raises(CorpusError, match=fault):
        read_words(tmp_path / "vocab.txt", lower=True)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of another kind, with padding and truncation set as for a model."""
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<|endoftext|>"], **alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    return tokenizer


def test_any_tokenizer_can_be_given(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(path))
    for given_as in (path, tmp_path):
        content = read_tokenizer(str(given_as))
        encoder = Encoder(content, "tokenizer")
        assert encoder.special == {"separator": 0}
        texts = ["a long document, cut nowhere 🙂", "<|endoftext|>"]
        ids_of_texts = split(encoder(texts), separator=0)
        assert [Tokenizer.from_str(content).decode(ids) for ids in ids_of_texts] == texts


def test_a_tokenizer_without_a_separator_has_none(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(learn_characters([["ab"]], 2, lower=False))
    content = json.loads(tokenizer.to_str().replace("[SEP]", "[end]"))
    assert "separator" not in special_ids(json.dumps(content))[0]
    chunk = Encoder(json.dumps(content), "characters")(["ab", "", "a"])
    assert (chunk.tokens.tolist(), chunk.lengths.tolist()) == ([4, 5, 4], [2, 0, 1])


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": 1}', "\0"])
def test_a_bad_tokenizer_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(CorpusError, match="no tokenizer can be read from it") as caught:
        read_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_the_librarys_threads_are_asked_for_and_left_as_they_were(monkeypatch):
    import os

    name = "TOKENIZERS_PARALLELISM"
    for before in (None, "true", "0"):
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)
        with library_threads(False):
            assert os.environ[name] == "false"
        assert os.environ.get(name) == before
