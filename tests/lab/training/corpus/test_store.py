"""Stores that are whole open; stores that are not say so in one line."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wqk.errors import CorpusError
from wqk_lab.training.corpus import TokenChunk, TokenStore, write_store


@pytest.fixture
def copy(store: TokenStore, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store.folder, tmp_path / "copy"))


def written(folder: Path, size: int = 10, **chunk: Any) -> TokenStore:
    tokens, lengths = chunk.get("tokens", [7, 8, 3]), chunk.get("lengths", [3])
    splits = {"train": [TokenChunk(np.array(tokens), np.array(lengths), 2)]}
    settings: dict[str, Any] = {"unit": "words", "special": {"separator": 3}, "tokenizer": b"{}"}
    return write_store(folder, splits, vocabulary_size=size, **settings)


def test_a_store_is_read_with_numpy_alone(store: TokenStore) -> None:
    header = json.loads((store.folder / "store.json").read_text())
    tokens = np.fromfile(store.folder / "train.tokens", "<u2")
    offsets = np.fromfile(store.folder / "train.documents", "<i8")
    assert header["splits"]["train"]["tokens"] == len(tokens) == offsets[-1]
    assert np.array_equal(tokens, store.tokens("train"))
    assert np.array_equal(offsets, store.documents("train"))
    names = {n: c for c, n in json.loads(store.tokenizer.read_text())["model"]["vocab"].items()}
    assert store.decode(tokens) == "".join(names[number] for number in tokens.tolist())
    assert header["fingerprint"] == store.fingerprint


def test_tokens_are_mapped_and_cannot_be_changed(store: TokenStore) -> None:
    for split in ("train", "held_out"):
        tokens = store.tokens(split)
        assert isinstance(tokens, np.memmap)
        assert tokens.dtype == np.uint16
        assert tokens.max() < store.vocabulary_size
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 1
    with pytest.raises(CorpusError, match="no such split; splits are train, held_out"):
        store.tokens("test")


def test_ids_beyond_two_bytes_take_four(tmp_path: Path) -> None:
    big = written(tmp_path / "big", 65_536, tokens=[65_535, 3], lengths=[2])
    small = written(tmp_path / "small", 65_535, tokens=[65_534, 3], lengths=[2])
    assert (big.folder / "train.tokens").read_bytes() == b"\xff\xff\x00\x00\x03\x00\x00\x00"
    assert (small.folder / "train.tokens").read_bytes() == b"\xfe\xff\x03\x00"
    for made in (big, small):
        made.verify()
        assert TokenStore.open(made.folder).tokens().tolist() == made.tokens().tolist()


def test_an_empty_split_is_an_empty_array(tmp_path: Path) -> None:
    made = TokenStore.open(written(tmp_path / "store").folder)
    assert made.tokens("held_out").tolist() == []
    assert made.documents("held_out").tolist() == [0]
    assert not made.tokens("held_out").flags.writeable
    made.verify()


@pytest.mark.parametrize(
    "chunk",
    [
        {"tokens": [10, 3], "lengths": [2]},
        {"tokens": [-1, 3], "lengths": [2]},
        {"tokens": [1, 3], "lengths": [3]},
        {"tokens": [1, 3], "lengths": [3, -1]},
    ],
    ids=str,
)
def test_what_is_no_store_is_not_written(chunk: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="expected"):
        written(tmp_path / "store", **chunk)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(CorpusError, match="already exists"):
            written(taken)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_fingerprint_tells_what_a_model_sees(tmp_path: Path) -> None:
    def fingerprint(name: str, **changes: Any) -> str:
        return written(tmp_path / name, **changes).fingerprint

    expected = fingerprint("one")
    assert expected == fingerprint("same")
    assert expected != fingerprint("tokens", tokens=[7, 9, 3])
    assert expected != fingerprint("lengths", lengths=[1, 2])
    assert expected != fingerprint("size", size=11)


VALUES = [None, True, -1, 0, 3.0, 10**30, float("nan"), float("inf"), "1", "uint32", [], {}]
FIELDS = (
    *("format", "version", "fingerprint", "dtype", "unit", "vocabulary_size", "tokenizer_sha256"),
    *("special", "special.mask", "about", "splits", "splits.train", "splits.train.tokens"),
    *("splits.held_out.documents", "splits.train.tokens_sha256"),
)


@pytest.mark.parametrize("field", FIELDS)
def test_no_field_of_a_header_can_be_changed(field: str, copy: Path) -> None:
    content = (copy / "store.json").read_bytes()
    *places, name = field.split(".")
    for value in VALUES:
        if (field, value) == ("about", {}):
            continue
        header = json.loads(content)
        reduce(getitem, places, header)[name] = value
        (copy / "store.json").write_text(json.dumps(header))
        with pytest.raises(CorpusError, match=r"store\.json: "):
            TokenStore.open(copy)
    (copy / "store.json").write_bytes(content)
    TokenStore.open(copy).verify()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"format": "wqk token store", "version": 2}',
        b"[" * 100_000,
        b'{"format": ' + b"9" * 5_000 + b"}",
        b'{"format": NaN}',
    ],
    ids=lambda text: repr(text[:12]),
)
def test_what_is_no_header_is_refused(text: bytes, copy: Path) -> None:
    (copy / "store.json").write_bytes(text)
    with pytest.raises(CorpusError) as caught:
        TokenStore.open(copy)
    assert "build the store again" in str(caught.value)
    assert "\n" not in str(caught.value)


FILES = ("train.tokens", "train.documents", "held_out.tokens", "held_out.documents")


@pytest.mark.parametrize("name", [*FILES, "tokenizer.json", "store.json"])
def test_a_missing_file_is_named(name: str, copy: Path) -> None:
    (copy / name).unlink()
    with pytest.raises(CorpusError, match=name):
        TokenStore.open(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_size_is_refused(name: str, copy: Path) -> None:
    content = (copy / name).read_bytes()
    for damaged in (content[:-1], content[:-2], content + b"\0", b"", content + content):
        (copy / name).write_bytes(damaged)
        with pytest.raises(CorpusError, match=f"{name}: expected {len(content)} bytes"):
            TokenStore.open(copy)


@pytest.mark.parametrize("name", [*FILES, "tokenizer.json"])
def test_verify_finds_a_flipped_bit_anywhere(name: str, copy: Path) -> None:
    content = (copy / name).read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        (copy / name).write_bytes(damaged)
        with pytest.raises(CorpusError, match=name):
            TokenStore.open(copy).verify()


def forged(folder: Path, name: str, array: np.ndarray) -> TokenStore:
    """A store whose file was replaced, and whose header was made to agree."""
    store = TokenStore.open(folder)
    (folder / name).write_bytes(array.tobytes())
    split, kind = name.split(".")
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    changed = replace(store.splits[split], **{f"{kind}_sha256": digest})
    store = replace(store, splits={**store.splits, split: changed})
    (folder / "store.json").write_text(json.dumps(store.header))
    return TokenStore.open(folder)


def test_verify_finds_what_breaks_the_rules_even_if_the_hashes_agree(copy: Path) -> None:
    tokens = np.fromfile(copy / "train.tokens", "<u2")
    offsets = np.fromfile(copy / "train.documents", "<i8")
    beyond = tokens.copy()
    beyond[5] = 60_000
    with pytest.raises(CorpusError, match="holds the id 60000"):
        forged(copy, "train.tokens", beyond).verify()
    forged(copy, "train.tokens", tokens).verify()
    for wrong in (np.flip(offsets), offsets + 1, np.where(offsets > 0, offsets[-1], 0) * 2):
        with pytest.raises(CorpusError, match=r"train\.documents: expected ascending offsets"):
            forged(copy, "train.documents", np.ascontiguousarray(wrong)).documents("train")
    shifted = offsets.copy()
    shifted[1] -= 1
    with pytest.raises(CorpusError, match="does not end with the separator"):
        forged(copy, "train.documents", shifted).verify()


def test_decoding_names_wrong_ids_and_a_wrong_tokenizer(copy: Path) -> None:
    opened = TokenStore.open(copy)
    for wrong in ([opened.vocabulary_size], [-1]):
        with pytest.raises(CorpusError, match="ids to decode: expected 0 to"):
            opened.decode(wrong)
    assert opened.decode([]) == ""
    for text in ("", "[]", '{"model": 1}'):
        (copy / "tokenizer.json").write_text(text)
        with pytest.raises(CorpusError, match=r"tokenizer\.json: cannot be used"):
            TokenStore.open(copy).decode([1])


def test_a_folder_without_a_store_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="make one with wqk lab corpus"):
        TokenStore.open(tmp_path / "nothing")
