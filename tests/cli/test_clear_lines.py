"""Mistakes in files and options are one clear line, never an unexpected error."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.command import run
from tests.limits import failing

import wqk
from wqk.errors import UnknownFamily, WqkError
from wqk.families.family import parse_family

HEAD = 'name = "x"\nmodel_types = ["x"]\n[[attention]]\nstack = "encoder"\n'
QUERY, KEY = (f"encoder.layer.{{layer}}.attention.self.{side}" for side in ("query", "key"))


def family(**keys: str) -> str:
    lines = {"query": QUERY, "key": KEY} | keys
    return HEAD + "".join(f'{key} = "{value}"\n' for key, value in lines.items())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"query": QUERY.replace("{layer}", "0")}, "need the same"),
        ({"key": KEY.replace("{layer}", "0")}, "need the same"),
        ({"value": "a.{layer}.b.{block}"}, "more numbers"),
        ({"input_norm": "a.{layer}.b.{layer}"}, "more numbers"),
        ({"sinks": "a.{x}.b.{y}"}, "more numbers"),
    ],
)
def test_a_family_whose_names_do_not_match_is_refused(keys: dict[str, str], message: str):
    with pytest.raises(UnknownFamily, match=message):
        parse_family(family(**keys), "x.toml")


@pytest.mark.parametrize(
    "scale",
    [
        "head_width ** 1.2.3",
        "head_width ** -.",
        "head_width ** 99999",
        "head_width ** -99999",
        "1e400",
        "1e300 ** 2",
        "head_width ** ",
        "** 2",
        "head_width ^ 2",
        "0 ** 1",
    ],
)
def test_a_scale_that_is_none_is_refused(scale: str, tmp_path: Path):
    path = tmp_path / "x.toml"
    path.write_text(family(scale=scale))
    with pytest.raises(WqkError, match=r"scale|too large"):
        wqk.open(wqk.demo_model("encoder"), family=path)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * 50_000,
        "a = " + "{a=" * 5_000,
        ".".join(["a"] * 50_000) + " = 1",
        "a = 1\n" * 50_000,
        ".".join(["a"] * 2_000) + " = 1",
        "[" + ".".join(["a"] * 2_000) + "]",
    ],
    ids=["arrays", "tables", "keys", "long", "fewer keys", "header"],
)
def test_a_file_that_is_nested_without_end_is_refused_in_time(text: str):
    start = time.process_time()
    with pytest.raises(UnknownFamily):
        parse_family(text, "x.toml")
    assert time.process_time() - start < 5


def test_too_little_memory_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("wqk.attention.factors.load_factor", failing(MemoryError()))
    assert "out of memory" in run("scan", str(wqk.demo_model("encoder")), exits=2).output


def test_a_family_of_a_users_own_that_refuses_says_why(tmp_path: Path):
    path = tmp_path / "x.toml"
    path.write_text('name = "x"\nmodel_types = []\nrefusal = "none has one form"\n')
    with pytest.raises(UnknownFamily, match="x: none has one form"):
        wqk.scan(wqk.open(wqk.demo_model("encoder"), family=path))
