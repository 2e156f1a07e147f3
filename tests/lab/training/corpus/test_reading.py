"""Every format gives the same documents; a mistake in a file is an error of one line."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import polars as pl
import pytest
from tests.lab.training.corpus.samples import write_jsonl
from tests.limits import failing

from wqk.errors import CorpusError
from wqk_lab.training.corpus import reading
from wqk_lab.training.corpus.reading import find_source, read_documents

BAD_FILES = {
    "text.jsonl": [
        '{"text": "a"}\n{"body": "a"}\n',
        "line 2: has no 'text'; set field=NAME to one of body",
    ],
    "object.jsonl": ['["a"]\n', "line 1: expected one JSON object, got list"],
    "list.json": ['[\n{"text": "a"}\n]', "line 1: expected"],
    "open.jsonl": ['{"text": "a"}\n{"text": "a\n', "line 2: expected a JSON object"],
    "number.jsonl": ['{"text": 3}\n', "line 1: expected text in 'text', got int"],
    "columns.csv": ["a,b\n1,2\n", "has no 'text'; set field=NAME to one of a, b"],
    "empty.csv": ["", "has no 'text'; set field=NAME to one of none"],
    "quote.csv": ['text\nb\n"a\n', "cannot be read"],
    "wrong.jsonl.xz": ["not xz", "cannot be read completely"],
    "wrong.jsonl.gz": ["not gzip", "cannot be read completely"],
    "wrong.jsonl.bz2": ["not bzip2", "cannot be read completely"],
    "wrong.jsonl.zst": ["not zstd", "cannot be read"],
    "wrong.parquet": ["PAR1 not parquet PAR1", "cannot be read"],
    "empty.parquet": ["", "cannot be read"],
}

ADVICE = [
    ("wikipedia", "20220301.en, and pass their folder"),
    ("jigsaw", "--field comment_text"),
    ("redpajama", "--field raw_content"),
    ("owner/name", "pass their folder"),
]

TEXTS = ["one", "two\nlines, and a comma", 'a "quoted" one', "", "naïve 猫 🙂"]


def read(path: Path, field: str = "text", document: str = "file") -> list[str]:
    return list(read_documents(path, field, document))


def test_all_formats_give_the_same_documents(tmp_path: Path) -> None:
    jsonl = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, ["n", "text"])
        rows.writeheader()
        rows.writerows({"n": n, "text": text} for n, text in enumerate(TEXTS))
    pl.DataFrame({"n": range(5), "text": TEXTS}).write_parquet(tmp_path / "a.parquet")
    raw = jsonl.read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(raw))
    (tmp_path / "b.ndjson.xz").write_bytes(lzma.compress(raw))
    (tmp_path / "b.json.bz2").write_bytes(bz2.compress(raw))
    (tmp_path / "b.jsonl.XZ").write_bytes(lzma.compress(raw))
    import pyarrow

    (tmp_path / "b.jsonl.zst").write_bytes(pyarrow.compress(raw, codec="zstd", asbytes=True))
    for path in tmp_path.iterdir():
        assert read(path) == TEXTS, path.name


def test_plain_text_is_cut_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\r\n \r\n\r\nthree\n".encode())
    assert read(path) == ["one\ntwo\n \n\nthree\n"]
    assert [text for text in read(path, document="line") if text.strip()] == ["one", "two", "three"]
    paragraphs = [text.strip() for text in read(path, document="paragraph")]
    assert [text for text in paragraphs if text] == ["one\ntwo", "three"]


def test_half_of_a_surrogate_pair_becomes_a_replacement_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude42"}\n{"text": "\\udc00"}\n')
    assert read(path) == ["a\ufffd b", "🙂", "\ufffd"]


def test_null_is_an_empty_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n\n{"text": "b"}\n')
    assert read(tmp_path / "a.jsonl") == ["", "b"]
    pl.DataFrame({"text": [None, "b"]}).write_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == ["", "b"]


XZ = lzma.compress(b'{"text": "a"}\n' * 10_000)
BAD = {
    **{name: (text.encode(), message) for name, (text, message) in BAD_FILES.items()},
    "deep.jsonl": (b"[" * 100_000 + b"\n", "line 1: expected a JSON object"),
    "latin.jsonl": ('{"text": "é"}\n'.encode("latin-1"), "line 1: expected UTF-8"),
    "latin.txt": ("é\n".encode("latin-1"), "expected UTF-8 text"),
    "latin.csv": ("text\né\n".encode("latin-1"), "expected UTF-8 text|codec can't decode"),
    "short.jsonl.xz": (XZ[: len(XZ) // 2], "cannot be read completely"),
    "short.jsonl.gz": (gzip.compress(b"a" * 1000)[:-9], "cannot be read completely|JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_its_fault(name: str, tmp_path: Path) -> None:
    content, fault = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=fault) as caught:
        read(tmp_path / name)
    assert name in str(caught.value)


def test_parquet_without_the_field_or_with_numbers_is_refused(tmp_path: Path) -> None:
    pl.DataFrame({"n": [1]}).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match="has no 'text'; set field=NAME to one of n"):
        read(tmp_path / "a.parquet")
    with pytest.raises(CorpusError, match="row 1: expected text in 'n', got int"):
        read(tmp_path / "a.parquet", "n")


def test_what_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "LONGEST_TEXT", 100)
    for name, content, document, fault in (
        ("a.txt", "a" * 101, "file", "document=paragraph"),
        ("a.jsonl", '{"text": "' + "a" * 400 + '"}\n', "file", "line 1: longer than 400 bytes"),
        ("a.jsonl", '{"text": "' + "a" * 101 + '"}\n', "file", "document of more than 100 char"),
        # A text without blank lines is one paragraph: reading stops when that is too long.
        ("a.txt", "a\n" * 51 + "\xff", "paragraph", "paragraph of more than 100 .* document=line"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(CorpusError, match=fault):
            read(tmp_path / name, document=document)
    (tmp_path / "a.txt").write_text("a" * 100)
    assert read(tmp_path / "a.txt") == ["a" * 100]


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/9.txt", "b/10.txt", ".hidden/x.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    source = find_source(str(tmp_path), None, None)
    assert list(source.documents(None, "file")) == ["a/9.txt", "b/10.txt", "b/2.txt"]
    assert source.name == tmp_path.name


@pytest.mark.parametrize(
    ("ref", "fault"),
    [
        ("nofile.txt", "no such file or folder"),
        ("wikipediä", "one of wikipedia, jigsaw, redpajama"),
        ("x" * 300, "cannot be read"),
        ("a\0b", "no such file or folder"),
        ("notes.md", "expected a file with the ending"),
        ("empty", "has no text files"),
    ],
)
def test_what_is_no_source_is_refused(ref, fault, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=fault):
        find_source(ref, None, None)


class Hub:
    """Stands for the hub, as the datasets library shows it."""

    def __init__(self, rows: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows = rows
        self.asked: list[tuple[Any, ...]] = []
        monkeypatch.setattr("datasets.load_dataset", self.load_dataset)
        monkeypatch.setattr(reading, "_require_network", lambda *_: None)

    def load_dataset(self, path: str, name: str | None = None, **options: Any) -> list[Any]:
        self.asked.append((path, name, options))
        return [{"text": "2023-14/0000/en_head"}] if path == "text" else self.rows


def test_data_sets_of_the_hub_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([{"body": text} for text in ("a", None, "b")], monkeypatch)
    source = find_source("owner/name", "en", "test")
    assert list(source.documents("body", "file")) == ["a", "", "b"]
    assert hub.asked == [("owner/name", "en", {"split": "test", "streaming": True})]
    with pytest.raises(CorpusError, match="owner/name, row 1: has no 'text'; set field=NAME to"):
        list(source.documents(None, "file"))
    hub.rows = [{"body": 3}]
    with pytest.raises(CorpusError, match="expected text in 'body', got int"):
        list(source.documents("body", "file"))


FIELDS = {"wikipedia": "text", "jigsaw": "comment_text", "redpajama": "raw_content"}


@pytest.mark.parametrize("name", FIELDS)
def test_named_corpora_are_the_papers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([{FIELDS[name]: "a"}], monkeypatch)
    assert list(find_source(name, None, None).documents(None, "file")) == ["a"]
    if name == "wikipedia":
        assert hub.asked[0][1] == "20220301.en"
    if name == "redpajama":
        (address,) = hub.asked[1][2]["data_files"]
        assert address.endswith("/documents/2023-14/0000/en_head.json.gz")


@pytest.mark.parametrize(("name", "advice"), ADVICE)
def test_without_a_network_one_line_says_what_to_fetch(name, advice, monkeypatch):
    fail = failing(ConnectionError("no route\nto host"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", lambda: Mock(head=fail))
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("asked in vain"))
    with pytest.raises(
        CorpusError, match=f"{name}: no response from the network .*no route to host.*{advice}"
    ):
        list(find_source(name, None, None).documents(None, "file"))


def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub([], monkeypatch)
    monkeypatch.setattr(hub, "rows", property())
    with pytest.raises(CorpusError, match=r"owner/name: cannot be read .*pass their folder"):
        list(find_source("owner/name", None, None).documents(None, "file"))
