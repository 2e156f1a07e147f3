"""What a command cannot do is one line: at once, without secrets, and nothing is written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.cases import cases
from tests.command import ENCODER, run
from tests.reporting.making import rows, table

import wqk

REFUSED = cases(__file__, "refused")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    wqk.compose(wqk.demo_model("induction")).write(path)
    return path.read_bytes()


@pytest.mark.parametrize(("line", "said"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_be_done_is_one_line(line, said, pairs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{}", encoding="utf-8")
    Path("pairs.parquet").write_bytes(pairs)
    table(rows("a")).write("good.csv")
    before, start = {*tmp_path.iterdir()}, time.process_time()
    known = {"ENCODER": ENCODER, "INDUCTION": str(wqk.demo_model("induction"))}
    line = line.replace("NINES", "9" * 4000).replace("LONG", "x" * 5000)
    done = run(*(known.get(word, word) for word in line.split(" ")), exits=2)
    assert done.stdout == ""
    *usage, last = done.stderr.splitlines()
    assert said in last
    assert not usage or usage[0].startswith("Usage: ") or line.startswith("watch")
    for never in ("Traceback", "wqk: unexpected", "hunter2"):
        assert never not in done.stderr
    assert {*tmp_path.iterdir()} == before
    assert time.process_time() - start < 5 or line.startswith("lab")  # which imports PyTorch
