"""Files that would keep a reader busy for ever are refused within seconds."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints.stored import write_pickle
from tests.limits import within

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.pickles import load, plain
from wqk.errors import CheckpointError, WqkError, shown
from wqk.inspecting.tokens import token_names


def each_names_the_next(depth: int, width: int, leaf: Any, kind: type) -> Any:
    """Lists, each of which holds the one before many times: small, and endless written out."""
    value = leaf
    for _ in range(depth):
        value = kind([value] * width)
    return value


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_that_name_each_other_in_an_archive(tmp_path: Path, kind: type):
    content = {"config": each_names_the_next(5, 9000, 1, list), "x": [1]}
    if kind is tuple:
        content = {"config": each_names_the_next(60, 2, 1, tuple)}
    body = pickle.dumps(content, protocol=2)
    assert len(body) < 200_000
    with within(20), pytest.raises(WqkError):
        open_checkpoint(write_pickle(tmp_path / "model.pt", body))


def test_tuples_that_name_each_other_are_no_key_of_anything():
    value = each_names_the_next(200, 2, 1, tuple)
    for place in (value, {"a": value}, [value]):
        with within(5), pytest.raises(pickle.UnpicklingError, match="name each other"):
            load(io.BytesIO(pickle.dumps(place, protocol=2)))


def test_a_dictionary_of_ordinary_size_is_plain():
    assert plain({"lr": 1.0, "betas": (0.9, 0.95), "names": ["a"] * 9000})["betas"] == [0.9, 0.95]
    nested = (3, tuple(range(625)), (1, (2, 3)))
    assert load(io.BytesIO(pickle.dumps(nested, protocol=2))) == nested


def test_what_an_error_quotes_is_short():
    with within(1):
        assert len(shown(each_names_the_next(60, 2, "x", list))) < 100


def test_a_yaml_file_whose_parts_name_each_other(tmp_path: Path):
    lines = ["a0: &a0 {" + ", ".join(f"k{n}: 1" for n in range(400)) + "}"]
    for level in range(1, 6):
        entries = ", ".join(f"k{n}: *a{level - 1}" for n in range(400))
        lines.append(f"a{level}: &a{level} {{{entries}}}")
    (tmp_path / "model_config.yaml").write_text("\n".join(lines))
    (tmp_path / "lit_model.pth").write_bytes(b"")
    with within(20), pytest.raises(WqkError):
        open_checkpoint(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes")
def test_a_named_pipe_is_no_file(tmp_path: Path):
    from wqk_lab.training.corpus.reading import find_source

    for name in ("text.txt", "scores.jsonl", "family.toml", "config.json", "model.safetensors"):
        os.mkfifo(tmp_path / name)
    demo = wqk.demo_model("encoder")
    for call in (
        lambda: find_source(str(tmp_path / "text.txt"), None, None),
        lambda: wqk.read_table(tmp_path / "scores.jsonl"),
        lambda: wqk.open(demo, family=tmp_path / "family.toml"),
        lambda: open_checkpoint(tmp_path),
    ):
        with pytest.raises(WqkError, match="not a regular file"):
            call()


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 1_000_000,
        b'{"model": {"vocab": ' + b'{"a":' * 100_000,
        b'{"model": {"vocab": {"a": Infinity}}}',
        b'{"model": {"vocab": [[]]}}',
        b'{"model": {"vocab": {"a": 1}}, "added_tokens": [{"content": "b", "id": 1e400}]}',
        b'{"model": {"vocab": 3}}',
        b"{}",
        b"[1]",
        b"",
        b"\xff",
    ],
    ids=lambda content: content[:60].decode("latin-1"),
)
def test_a_tokenizer_that_is_none_is_one_line(tmp_path: Path, content: bytes):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: contains no tokenizer"):
        token_names(tmp_path)


def test_a_tokenizer_of_gigabytes_is_not_read(tmp_path: Path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(CheckpointError, match="larger than"):
        token_names(tmp_path)
