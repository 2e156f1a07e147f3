"""The whole build: the same store every time, nothing held out that is trained on."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.training.corpus.samples import content, documents, sentences, write_jsonl

from wqk.errors import CorpusError
from wqk_lab.training.corpus import (
    CorpusOptions,
    CorpusProgress,
    TokenStore,
    build_corpus,
    building,
)

WRONG_OPTIONS = [
    ({"text": "letters"}, "text='letters' must be one of words, characters"),
    ({"document": "page"}, "document='page' must be one of"),
    ({"vocabulary": 5}, "vocabulary=5 must be at least 100"),
    ({"text": "characters", "characters": 0}, "characters=0 must be at least 1"),
    ({"max_documents": 0}, "max_documents=0 must be at least 1"),
    ({"text": "characters", "vocabulary": 500}, "characters and vocabulary=500 contradict"),
    ({"characters": 50}, "text=words and characters=50 contradict"),
    ({"tokenizer": "a", "lower": True}, "tokenizer=a and lower=True contradict"),
]

CHARACTERS = CorpusOptions(text="characters", held_out=20)
WORDS = CorpusOptions(vocabulary=300, held_out=20)


def test_characters_come_back_as_they_were(store: TokenStore) -> None:
    store.verify()
    texts = documents(store, "train") + documents(store, "held_out")
    assert sorted(texts) == sorted(sentences(200))
    assert len(documents(store, "held_out")) == 20
    split = store.splits["train"]
    assert split.characters == sum(map(len, documents(store, "train")))
    assert split.tokens == split.characters + split.documents


def test_a_store_takes_the_place_of_an_empty_folder_however_it_is_named(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, path in enumerate((".", "../1")):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        build_corpus([text_file.absolute()], path, CHARACTERS)
        TokenStore.open(folder).verify()


def test_words_come_back_as_wordpiece_leaves_them(text_file: Path, tmp_path: Path) -> None:
    from transformers import BertTokenizer

    store = build_corpus([text_file], tmp_path / "store", WORDS)
    store.verify()
    names = json.loads(store.tokenizer.read_text())["model"]["vocab"]
    (tmp_path / "vocab.txt").write_text("\n".join([*names, "[CLS]"]), encoding="utf-8")
    bert = BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=True)
    ids_of_documents = []
    for split in ("train", "held_out"):
        for start, end in itertools.pairwise(store.documents(split).tolist()):
            ids_of_documents.append(store.tokens(split)[start : end - 1].tolist())
    expected = [bert(text, add_special_tokens=False)["input_ids"] for text in sentences(200)]
    assert sorted(ids_of_documents) == sorted(expected)


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("options", [CHARACTERS, WORDS], ids=["characters", "words"])
def test_the_store_does_not_depend_on_the_number_of_threads(options, text_file, tmp_path):
    stores = [
        content(build_corpus([text_file], tmp_path / f"{jobs}", options, jobs=jobs).folder)
        for jobs in (1, 2, 5)
    ]
    assert stores[0] == stores[1] == stores[2]


def test_nor_on_the_size_of_shards_nor_on_the_files_format(text_file, tmp_path, monkeypatch):
    import lzma

    store = build_corpus([text_file], tmp_path / "whole", WORDS)
    packed = tmp_path / "text.jsonl.xz"
    packed.write_bytes(lzma.compress(text_file.read_bytes()))
    monkeypatch.setattr(building, "SHARD", 500)
    store_of_archive = build_corpus([packed], tmp_path / "other", WORDS)
    assert store_of_archive.fingerprint == store.fingerprint
    first, second = content(store.folder), content(store_of_archive.folder)
    assert first.pop("store.json") != second.pop("store.json")  # sizes and names of the sources
    assert first == second


def test_a_header_has_no_trace_of_the_machine(text_file: Path, tmp_path: Path) -> None:
    made = build_corpus([text_file], tmp_path / "store", CHARACTERS)
    header = (made.folder / "store.json").read_text()
    assert str(tmp_path) not in header
    assert str(text_file.parent) not in header
    (source,) = json.loads(header)["about"]["sources"]
    counts = {"documents": 200, "characters": sum(map(len, sentences(200)))}
    assert source == {"name": "text.jsonl", "bytes": text_file.stat().st_size, **counts}


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(["a" * n for n in range(1, 13)]), min_size=2, max_size=40),
    st.integers(0, 6) | st.floats(0.01, 0.6),
)
def test_no_text_is_on_both_sides(tmp_path_factory, texts, held_out):
    folder = tmp_path_factory.mktemp("both")
    path = write_jsonl(folder / "text.jsonl", texts)
    options = CorpusOptions(text="characters", held_out=held_out)
    count = held_out if held_out >= 1 or not held_out else max(1, round(held_out * len(texts)))
    if count >= len(set(texts)):
        with pytest.raises(CorpusError, match="leave none to train on"):
            build_corpus([path], folder / "store", options)
        return
    store = build_corpus([path], folder / "store", options)
    train, held_out_texts = documents(store, "train"), documents(store, "held_out")
    assert not set(train) & set(held_out_texts)
    assert len(set(held_out_texts)) == count
    assert sorted(train + held_out_texts) == sorted(texts)


def test_what_is_held_out_does_not_depend_on_the_rest(tmp_path: Path) -> None:
    texts = sentences(120)
    store = build_corpus([write_jsonl(tmp_path / "a.jsonl", texts)], tmp_path / "a", CHARACTERS)
    random.Random(1).shuffle(texts)
    path = write_jsonl(tmp_path / "b.jsonl", texts)
    shuffled = build_corpus([path], tmp_path / "b", CHARACTERS)
    assert set(documents(store, "held_out")) == set(documents(shuffled, "held_out"))


@pytest.mark.parametrize("how", [{"text": "characters"}, {"vocabulary": 500}], ids=str)
def test_the_vocabulary_is_learned_from_training_text_alone(how: Any, tmp_path: Path) -> None:
    texts = [f"{word} {number}" for number, word in enumerate("abcdefghijklmnop")]
    path = write_jsonl(tmp_path / "text.jsonl", texts)
    made = build_corpus([path], tmp_path / "store", CorpusOptions(**how, held_out=4))
    unknown = made.special["unknown"]
    assert (made.tokens("held_out") == unknown).any()
    assert not (made.tokens("train") == unknown).any()


@pytest.mark.usefixtures("small_shards")
def test_limits_stop_at_whole_documents(text_file: Path, tmp_path: Path) -> None:
    texts = sentences(200)
    by_documents = CorpusOptions(text="characters", max_documents=30, held_out=0)
    store = build_corpus([text_file], tmp_path / "documents", by_documents)
    assert documents(store, "train") == texts[:30]
    limit = sum(map(len, texts[:17])) + 1
    by_characters = CorpusOptions(text="characters", max_characters=limit, held_out=0)
    store = build_corpus([text_file, text_file], tmp_path / "characters", by_characters)
    assert documents(store, "train") == texts[:18]
    assert [source["documents"] for source in store.about["sources"]] == [18, 0]


def test_empty_documents_are_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", ["", "one", " \n\t", "two", ""])
    options = CorpusOptions(text="characters", held_out=0)
    assert documents(build_corpus([path], tmp_path / "a", options), "train") == ["one", "two"]
    for texts in (["", " "], []):
        write_jsonl(path, texts)
        with pytest.raises(CorpusError, match="every document is empty"):
            build_corpus([path], tmp_path / "b", options)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "text.jsonl"]


def test_a_document_without_a_token_is_its_separator(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", ["one", "\0\x01", "two"])
    made = build_corpus([path], tmp_path / "store", CorpusOptions(vocabulary=200, held_out=0))
    made.verify()
    assert documents(made, "train") == ["one", "", "two"]


def test_one_document_is_not_enough_to_hold_one_out(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("one\n\ntwo\n\nthree\n")
    with pytest.raises(CorpusError, match=r"1 different document, .*document=paragraph"):
        build_corpus([tmp_path / "book.txt"], tmp_path / "store", CorpusOptions(document="file"))
    options = CorpusOptions(text="characters", document="paragraph")
    made = build_corpus([tmp_path / "book.txt"], tmp_path / "store", options)
    assert len(documents(made, "train")) == 2
    assert len(documents(made, "held_out")) == 1


def test_a_single_text_is_split_into_paragraphs(tmp_path: Path) -> None:
    for name in ("book.txt", "letter.txt"):
        (tmp_path / name).write_text("one\n\ntwo\n\nthree\n")
    usual = CorpusOptions(text="characters")
    made = build_corpus([tmp_path / "book.txt"], tmp_path / "a", usual)
    assert made.about["options"]["document"] == "paragraph"
    assert len(documents(made, "train")) + len(documents(made, "held_out")) == 3
    whole = CorpusOptions(text="characters", held_out=0)
    assert (
        len(documents(build_corpus([tmp_path / "book.txt"], tmp_path / "b", whole), "train")) == 1
    )
    texts = [tmp_path / "book.txt", tmp_path / "letter.txt"]
    assert len(documents(build_corpus(texts, tmp_path / "c", whole), "train")) == 2


SHARE = r"held_out=[-\w.]+ must be a (finite number|fraction below 1)"


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        *WRONG_OPTIONS,
        *(({"held_out": share}, SHARE) for share in (-0.1, 1.5, float("nan"), float("inf"))),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(CorpusError, match=fault):
        CorpusOptions(**options)


def test_progress_is_told(text_file: Path, tmp_path: Path) -> None:
    updates: list[CorpusProgress] = []
    store = build_corpus([text_file], tmp_path / "store", WORDS, on_progress=updates.append)
    stages = list(dict.fromkeys(progress.stage for progress in updates))
    assert stages == ["reading", "learning", "tokenizing", "writing"]
    last = [progress for progress in updates if progress.stage == "tokenizing"][-1]
    splits = store.splits.values()
    assert last.documents == 200
    assert last.tokens == sum(split.tokens for split in splits)
    assert last.characters == sum(split.characters for split in splits)
    assert last.share == 1.0


def test_folders_above_a_store_are_made(text_file: Path, tmp_path: Path) -> None:
    made = build_corpus([text_file], tmp_path / "several" / "above" / "store", CHARACTERS)
    made.verify()
    assert [path.name for path in (tmp_path / "several" / "above").iterdir()] == ["store"]
