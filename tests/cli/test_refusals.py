"""Impossible commands are refused in one line: at once, without secrets or written files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.command import ENCODER, run
from tests.lab.training.corpus.samples import sentences, write_jsonl
from tests.reporting.making import rows, table

import wqk

REFUSED = [
    ("scan ENCODER --revision main", "only Hub repositories have revisions"),
    ("explain ENCODER --revision main", "only Hub repositories have revisions"),
    ("scan ENCODER --heads-per-layer 2", "knows the number of heads"),
    ("diff ENCODER ENCODER --heads-per-layer 2", "knows the number of heads"),
    ("diff ENCODER ENCODER --revision a", "expected --revision twice"),
    ("diff ENCODER INDUCTION", "cannot be compared layer by layer; "),
    ("show ENCODER --layer 0 --head 1 --coupling", "give one"),
    ("survey ENCODER --jobs 2 --dask x --out y", "Error: "),
    ("tokens INDUCTION --layer 1 --head 2 --through one.2", "one.2"),
    ("same ENCODER ENCODER --up-to stream,head", "'head' is not one of 'stream'"),
    ("scan ENCODER --gamma nan", "expected a finite number, got 'nan'"),
    ("scan ENCODER --gamma 1e400", "Error: "),
    ("watch run --every inf", "expected a finite number, got 'inf'"),
    ("lab figure dose --below nan", "expected a finite number, got 'nan'"),
    ("scan ENCODER --distance 3:1", "expected whole numbers"),
    ("scan ENCODER --distance 0:4", "no rotary positions"),
    ("scan ENCODER --distance 0:100000000", "Error: "),
    ("scan ENCODER --distance 0:50000,60000:200000", "Error: "),
    ("scan ENCODER --distance NINES:9NINES", "Error: "),
    ("scan ENCODER --layers 0:100000000000000", "Error: "),
    ("show ENCODER --layer 4", "no self-attention in layer 4"),
    ("show ENCODER --layer 0 --head 4", "heads are 0 to 3"),
    ("show ENCODER --layer 0 --cross", "no cross-attention"),
    ("compare A B", "no such command: compare; expected wqk same A B, if B should"),
    ("track RUN", "no such command: track; wqk watch RUN scores each checkpoint"),
    ("config MODEL", "no such command: config; wqk explain REF shows"),
    ("plot MODEL", "wqk scan REF --picture FILE.png the scores of all layers"),
    ("logits MODEL", "logits of a text are computed in Python: wqk.logits(model, batch)"),
    (
        "Clip MODEL",
        "weights are clipped in Python: wqk.clip_(model, limit, wqk.logits(model, batch))",
    ),
    ("nonsense MODEL", "No such command 'nonsense'."),
    ("survey --out DIR", "an earlier survey goes on with the names that it had"),
    ("show MODEL", "Missing option '--layer'. Which layer; negative: from the end: "),
    (
        "lab theory MODEL",
        "text file, or token ids as .npy, (N,) or (B, N): command lab theory REF... --corpus PATH",
    ),
    ("scan LONG", "cannot be opened"),
    ("lab theory bert --corpus no-such", "no-such: no such file or folder"),
    ("report no-such -o r.html", "no-such: is not a local path"),
    ("report absent.parquet -o r.html", "cannot be read"),
    ("report bad.jsonl -o r.html", "contains no score table"),
    ("report . -o r.html", "a model is scanned first"),
    ("report good.csv --details good.csv -o r.html", "holds no details"),
    ("report pairs.parquet -o r.html", "expected a score table beside them"),
    ("report good.csv -o r.docx", "written as .html"),
    ("report good.csv -o absent/r.html", "cannot be written"),
    ("scan ENCODER --report r.txt", "written as .html"),
    ("scan ENCODER --details r.txt", "written as .npz"),
    ("scan ENCODER --details absent/t.npz", "cannot be written"),
    ("scan ENCODER --out absent/t.csv", "cannot be written"),
    ("scan ENCODER --out t.xlsx", "a table is written as .parquet"),
    ("diff ENCODER ENCODER --out t.doc", "a table is written as"),
    ("show ENCODER --layer 0 --out t.gif", "a picture is written as .png"),
    ("explain http://me:hunter2%40host/m?a", "http://host/m: not a valid URL"),
    ("watch http://me:hunter2@host/m", "http://host/m: is an address"),
    ("scan ENCODER --family a?token=hunter2", "wqk: a: "),
    ("report a.csv -o b?token=hunter2", "b: "),
    ("explain a b?token=hunter2", "extra argument (b)"),
    ("diff ENCODER --beside \x00", "contains a null character"),
    ("compose INDUCTION --revision main", "only Hub repositories have revisions"),
    ("compose INDUCTION --base ENCODER", "has no base model"),
    ("explain ENCODER --base ENCODER", "has no base model"),
    ("show ENCODER --layer 0 --base ENCODER", "has no base model"),
    ("explain ENCODER --key-heads 4", "knows the number of heads"),
    ("kin ENCODER ENCODER --key-heads 4", "knows the number of heads"),
    ("kin ENCODER ENCODER --heads-per-layer 4", "knows the number of heads"),
    ("lab atlas --modality text", "'text' is not one of 'language', 'vision', 'audio'"),
    ("lab atlas BERT-bass", "did you mean BERT-base"),
    ("lab atlas EleutherAI/pythia-70mm", "did you mean"),
    ("lab atlas BERT-base --stack decoder", "no model with this name"),
    ("lab atlas --sort color", "color"),
    ("lab corpus nofile.txt -o store", "no such file or folder"),
    ("lab corpus text.jsonl -o store --field body", "set --field NAME to one of text"),
    ("lab corpus text.jsonl -o store --vocabulary nofile", "nofile: cannot be read"),
    ("lab corpus text.jsonl -o store --tokenizer text.jsonl", "no tokenizer can be read"),
    (
        "lab corpus text.jsonl -o store --text characters --vocabulary 500",
        "--text characters and --vocabulary 500 contradict",
    ),
    ("lab corpus text.jsonl -o store --held-out 1.5", "must be a fraction below 1"),
    ("lab corpus text.jsonl -o store --held-out 1000", "different document"),
    ("lab figure fig9", "fig9: no such figure or table; figures are fig2, fig3, s1"),
    ("lab figure fig2 --out fig2.doc", "a figure is written as .png, .pdf, .svg, .csv"),
    ("lab figure fig2 --out absent/fig2.csv", "cannot be written"),
    ("lab figure fig2 --from absent.parquet", "absent.parquet: no such file or folder"),
    ("lab figure coupling empty", "contains no training run and no survey"),
    ("lab figure pairs --out a.png", "wqk lab pairs --out DIR"),
    ("lab figure table1 --json", "wqk lab atlas --json"),
    ("lab figure table1 --out table1.png", "table1 is written as .md or .tex"),
    ("lab glue model --tasks ,", "--tasks names no task"),
    ("lab speedup empty", "not a run's folder"),
]
# Optional packages that commands of the laboratory need.
NEEDED = {"theory": "torch", "corpus": "tokenizers", "figure": "matplotlib", "glue": "torch"}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("pairs") / "pairs.parquet"
    wqk.compose(wqk.demo_model("induction")).write(path)
    return path.read_bytes()


@pytest.mark.parametrize(("line", "message"), REFUSED, ids=[line for line, _ in REFUSED])
def test_what_cannot_be_done_is_one_line(line, message, pairs, tmp_path, monkeypatch):
    for verb, package in NEEDED.items():
        if line.startswith(f"lab {verb}"):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text("{}", encoding="utf-8")
    Path("pairs.parquet").write_bytes(pairs)
    table(rows("a")).write("good.csv")
    write_jsonl(Path("text.jsonl"), sentences(20))
    Path("empty").mkdir()
    before, start = {*tmp_path.iterdir()}, time.process_time()
    models = {"ENCODER": ENCODER, "INDUCTION": str(wqk.demo_model("induction"))}
    line = line.replace("NINES", "9" * 4000).replace("LONG", "x" * 5000)
    done = run(*(models.get(word, word) for word in line.split(" ")), exits=2)
    assert done.stdout == ""
    *usage, last = done.stderr.splitlines()
    assert message in last
    assert not usage or usage[0].startswith("Usage: ") or line.startswith("watch")
    for absent in ("Traceback", "wqk: unexpected", "hunter2"):
        assert absent not in done.stderr
    assert {*tmp_path.iterdir()} == before
    assert time.process_time() - start < 5 or line.startswith("lab")  # which imports PyTorch
