"""``wqk lab corpus`` as a stranger uses it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.command import run as run_command
from tests.lab.training.corpus.samples import content

from wqk_lab.training.corpus import CorpusOptions, TokenStore, build_corpus

run = partial(run_command, "lab", "corpus")


def test_the_command_builds_what_the_function_builds(text_file: Path, tmp_path: Path) -> None:
    result = run(
        *(text_file, "-o", tmp_path / "a", "--text", "characters", "--characters", 50),
        *("--lower", "--held-out", 10, "--max-documents", 100, "--jobs", 2),
    )
    options = CorpusOptions(
        text="characters", characters=50, lower=True, held_out=10, max_documents=100
    )
    made = build_corpus([text_file], tmp_path / "b", options)
    assert content(tmp_path / "a") == content(made.folder)
    assert "characters, vocabulary of" in result.stdout
    assert "90 documents" in result.stdout
    assert made.fingerprint[:16] in result.stdout
    assert "wqk lab train --corpus" in result.stderr


def test_unknown_characters_are_counted(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("aaab aaab\n\nabcé éabb\n\nbbaa bbaa\n\naab baab\n")
    line = (text, "--text", "characters", "--document", "paragraph", "--held-out", 1)
    done = run(*line, "-o", tmp_path / "few", "--characters", 3, "--jobs", 2)
    store = TokenStore.open(tmp_path / "few")
    tokens = sum(split.tokens for split in store.splits.values())
    assert store.about["unknown"] == {"tokens": 3, "distinct_characters": 2}
    share = f"{300 / tokens:.2g} % of the tokens"
    assert f"unknown: 2 distinct characters outside the alphabet, {share}" in done.stdout
    assert done.stdout.count("--characters N keeps more") == 1
    done = run(*line, "-o", tmp_path / "learned")
    assert "they occur in the held-out text alone" in done.stdout
    done = run(*line[:-1], 0, "-o", tmp_path / "all")
    assert "outside the alphabet" not in done.stdout
    assert "  unknown: 0 tokens (0 %)\n" in done.stdout
    assert ", vocabulary of 9 (5 characters and 4 special)\n" in done.stdout
    about = TokenStore.open(tmp_path / "all").about
    assert about["unknown"] == {"tokens": 0, "distinct_characters": 0}


def test_json_is_the_whole_header(text_file: Path, tmp_path: Path) -> None:
    result = run(text_file, "-o", tmp_path / "store", "--vocabulary", 300, "--json")
    header = json.loads(result.stdout)
    without_special = header["vocabulary_size"] - len(header["special"])
    assert header["vocabulary_without_special"] == without_special
    store = TokenStore.open(tmp_path / "store")
    assert header["fingerprint"] == store.fingerprint
    assert header["splits"]["train"]["documents"] == store.splits["train"].documents
    assert header["sources"][0]["name"] == "text.jsonl"
    assert header["options"]["vocabulary"] == 300


def test_a_vocabulary_file_is_named_in_the_header(text_file: Path, tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[MASK]\n[UNK]\n[SEP]\nthe\n")
    run(text_file, "-o", tmp_path / "store", "--vocabulary", vocabulary)
    store = TokenStore.open(tmp_path / "store")
    assert store.vocabulary_size == 5
    assert store.about["options"]["vocabulary"] == "vocab.txt"
    rebuilt = build_corpus([text_file], tmp_path / "same", CorpusOptions(vocabulary=vocabulary))
    assert content(rebuilt.folder) == content(store.folder)


def test_real_text(shared: Path, tmp_path: Path) -> None:
    run(
        *(shared / "data/toxic_comments.jsonl.xz", "-o", tmp_path / "store"),
        *("--vocabulary", shared / "data/bert-base-uncased-vocab.txt", "--max-documents", 500),
    )
    made = TokenStore.open(tmp_path / "store")
    made.verify()
    assert made.vocabulary_size == 30_522
    assert made.special == {"padding": 0, "mask": 103, "unknown": 100, "separator": 102}
    assert made.decode(made.tokens()[:6]).startswith("you have yet to identify")


def test_a_store_is_checked(text_file: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    made = run(text_file, "-o", store, "--text", "characters")
    checked = run("--check", store)
    assert checked.stdout == made.stdout
    assert checked.stderr.strip() == "every file matches the header's SHA-256"
    tokens = bytearray((store / "train.tokens").read_bytes())
    tokens[0] ^= 1
    (store / "train.tokens").write_bytes(tokens)
    refused = run("--check", store, exits=2)
    assert "train.tokens: its content does not match the header's SHA-256" in refused.stderr
    refused = run("--check", store, text_file, exits=2)
    assert "leave out TEXT and --out" in refused.stderr


def test_a_store_needs_a_text_and_a_folder(text_file: Path) -> None:
    assert "Missing TEXT...: " in run("-o", "store", exits=2).stderr
    assert "Missing -o: " in run(text_file, exits=2).stderr
    assert "Missing TEXT..., -o: " in run(exits=2).stderr
