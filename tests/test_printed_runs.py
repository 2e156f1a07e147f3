"""Printed commands and snippets run, on a desk where every name stands for a real file or model.

Models are small and random, in folders and on a hub of this machine; runs and corpora have a few
steps. The shell expands patterns and variables.
"""

from __future__ import annotations

import json
import lzma
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import transformers
from click.testing import CliRunner
from tests.checkpoints import test_gguf
from tests.checkpoints.serving import own_hub
from tests.command import shell
from tests.sameness.adapting import adapter_on
from tests.test_printed import OPEN, PAGES, ROOT, commands, fences

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.cli.main import command

SHOWN_AND_PRINTED = [
    ("a 0.539 │██", "a  0.540 │██", True),
    ("a 0.539 │██", "a  0.549 │██", False),
    ("a\n…\nd", "a\nb\nc\nd", True),
    ("a\nd", "a\nb\nc\nd", False),
    ("a", "a\nb", False),
    ("far 5.4e-01, 1.7e-08", "far 5.0e-01, 0.0e+00", True),
    ("far 5.4e-01", "far 8.0e-01", False),
    ("3 of 3 blocks", "2 of 3 blocks", False),
]

# The stand-in of a model's name: the first whose pattern is all of it.
STAND_INS = {r"(.*/)?gpt2": "gpt2", r".*(bert|MiniLM|to/model).*": "bert", r".*": "llama"}
FOLDERS = [
    "REF",
    "ID",
    "A",
    "B",
    "a",
    "b",
    "FILE",
    "MODEL",
    "REFERENCE",
    "CANDIDATE",
    "HF_MODEL",
    "HF_FOLDER",
    "DCP_FOLDER",
    "ORIGINAL_FOLDER",
    "ORIGINAL",
    "QUANTIZED",
    "original",
    "converted",
    "merged",
    "parent",
    "my-model",
    "my-conversion",
    "base-with-adapter",
    "a-model-that-hides-its-parent",
    "gpt2",
    "bert-base-uncased",
    "path/to/model",
    "path/to/bert-base",
    "path/to/bert-base-uncased",
    "google-bert/bert-base-uncased",
    "all-MiniLM-L6-v2",
]
RUNS = "runs/{0} {0} pair/{0} runs/{0}-1 runs/{0}-2 runs/{0}-3 runs/wikipedia-{0}-1"
# What stands for a number or a file.
VALUES = {
    r"\bL\b|\bH\b": "1",
    r"\b(RUN|DIR)\b": "run",
    r"TABLE\.\.\.|TABLE\\?\|REF(\.\.\.)?": "scores.parquet",
    r"FILE\.": "plain.",
    r"\bNAME\b": "fig2",
}
# Smaller, at the end of commands that train.
SMALLER = shlex.split(
    "--layers 1 --width 16 --heads 2 --intermediate 16 --steps 4 --block 32 --batch 8 --warmup 1 "
    "--held-out-blocks 2 --held-out-every 4 --score-every 2 --save-every 4 --log-every 2"
)
# Smaller, at the end of commands that test the theory.
FEWER = ["--batches", "2", "--batch", "2"]
STEPS = (100, 200, 400, 1000, 1600, 2000, 20_000, 100_000)
# Of differences, and of models in a survey that could not be read.
FAILS = {"same", "verify", "survey", "diff"}
# What a verb says of which a text only speaks.
SPOKEN_OF = re.compile("Missing|requires an argument|expected|needs|give ", re.I)
# What does not run here, and why.
EXCEPTIONS = {
    "--dask": "a cluster's scheduler",
    "example\\.org|owner/adapter": "places that do not exist",
    "lab corpus wikipedia ": "a download of Wikipedia",
    "--data glue": "the data of GLUE",
    "--epochs 0": "a model with a trained head",
    "lab experiments (?!.*--dry-run)|lab pairs (?!--dry-run)|figure pairs": "hours",
    "figure convert": "runs that continue others",
    "https://huggingface": "the public hub",
    "SET": "a choice of two words",
    r"watch (?!.*--(once|until))": "a run that goes on",
}


class Every(dict[str, Any]):
    """Every repository of a hub: a stand-in, with some revisions."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> dict[str, Any]:
        stand_in = next(kind for pattern, kind in STAND_INS.items() if re.fullmatch(pattern, name))
        files = {file.name: file.read_bytes() for file in Path("models", stand_in).iterdir()}
        return dict.fromkeys(("main", "step1000", "step2000", "step-1000"), files)


def overridden(arguments: list[str], pairs: list[str]) -> list[str]:
    """Return arguments with other values of options, each option once."""
    arguments = [*arguments]
    for name in pairs[::2]:
        while name in arguments:
            place = arguments.index(name)
            del arguments[place : place + 2]
    return [*arguments, *pairs]


def make_models() -> None:
    """The stand-ins, under every name; a file of llama.cpp's, an adapter, a run and its tables."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 60, "num_hidden_layers": 6, "num_attention_heads": 4}
    wide = sizes | {"hidden_size": 64, "intermediate_size": 64}
    bert = wide | {"hidden_size": 96, "num_attention_heads": 12}  # as many as BERT-base has
    llama = transformers.LlamaConfig(**wide, num_key_value_heads=2, head_dim=32)
    models = {
        "gpt2": transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, **sizes)),
        "bert": transformers.BertForMaskedLM(transformers.BertConfig(**bert)),
        "llama": transformers.LlamaForCausalLM(llama),
    }
    letters = [f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz0123456789"]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "w"]
    unused = [f"[unused{n}]" for n in range(60 - len(letters + special))]
    Path("vocab.txt").write_text("\n".join(special + letters + unused), encoding="utf-8")
    tokenizer = transformers.BertTokenizerFast(vocab="vocab.txt")
    for kind, model in models.items():
        model.save_pretrained(f"models/{kind}")
        tokenizer.save_pretrained(f"models/{kind}")
    shutil.copy("models/bert/tokenizer.json", "tokenizer.json")
    for name in FOLDERS:
        kind = next(kind for pattern, kind in STAND_INS.items() if re.fullmatch(pattern, name))
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).symlink_to(Path("models", kind).resolve(), target_is_directory=True)
    transformers.LlamaForCausalLM(llama).save_pretrained("other-parent")
    state = {n: v.numpy() for n, v in models["llama"].state_dict().items()}
    part = {n: v for n, v in state.items() if re.search("[qkv]_proj|input_layernorm", n)}
    config = models["llama"].config.to_dict()
    test_gguf.write(Path("model-Q8_0.gguf"), StateDict(part, config, "llama"), "Q8_0")
    adapter, _ = adapter_on(Path(), part, {k: config[k] for k in sorted(config)})
    adapter.rename("path/to/adapter")
    Path("adapter").symlink_to("path/to/adapter", target_is_directory=True)
    for name in ("bert", "gpt2", "run", "mine"):
        wqk.scan("./bert-base-uncased" if name == "bert" else "gpt2").write(f"{name}.parquet")
    wqk.scan("models/llama", distances=(0, 8, 64)).write("scores.parquet")
    wqk.compose("models/gpt2").write("pairs.parquet")
    shutil.copy(Path(wqk.__file__).parent / "families" / "data" / "llama.toml", "plain.toml")
    for name in ("models.txt", "part-1.txt"):
        Path(name).write_text("my-model\n", encoding="utf-8")


def make_runs() -> None:
    """Texts in every form, a corpus, and runs with the steps that the pages name."""
    vocabulary = [f"word{n}" for n in range(30)]
    texts = [" ".join(vocabulary[(k * n) % 30] for n in range(60)) + "." for k in range(1, 90)]
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    Path("texts").mkdir()
    for name in ("book.txt", "wikitext.txt", "texts/one.txt"):
        Path(name).write_text("\n\n".join(texts), encoding="utf-8")
    Path("valid.txt.xz").write_bytes(lzma.compress("\n\n".join(texts).encode()))
    Path("wikipedia.jsonl").write_text(lines, encoding="utf-8")
    for name in ("articles", "wikipedia", "reviews", "toxic_comments"):
        Path(f"{name}.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    pl.DataFrame({"comment_text": texts}).write_csv("comments.csv")
    pl.DataFrame({"text": texts}).write_parquet("more.parquet")
    reviews = [{"sentence": text, "label": n % 2} for n, text in enumerate(texts)]
    Path("reviews.jsonl").write_text("\n".join(map(json.dumps, reviews)), encoding="utf-8")
    for file in ROOT.glob("examples/*.toml"):
        Path(file.name).symlink_to(file)
    Path("examples").symlink_to(ROOT / "examples", target_is_directory=True)
    shutil.copy("table1-cpu.toml", "experiments.toml")
    shutil.copy("models/llama/config.json", "config.json")
    for folder in ("make-train", "conversion"):
        Path("docs/results", folder).mkdir(parents=True)
    shutil.copy(ROOT / "docs/results/make-train/training.csv", "docs/results/make-train")
    for line in (
        "lab corpus book.txt --document paragraph --text characters -o wikipedia",
        "lab train --corpus wikipedia -o runs/encoder --keep-checkpoints all",
        "lab train --corpus wikipedia -o runs/decoder --mode decoder --keep-checkpoints all",
        "lab train --corpus wikipedia -o runs/symmetric --init symmetric --init-head-norm 1",
    ):
        result = CliRunner().invoke(command, overridden(line.split(), SMALLER * ("train" in line)))
        assert result.exit_code == 0, result.output
    line = "lab corpus book.txt --document paragraph --tokenizer tokenizer.json -o path/to/tokens"
    assert CliRunner().invoke(command, line.split()).exit_code == 0
    for run in Path("runs").iterdir():
        for step in STEPS:
            shutil.copytree(run / "checkpoint-4", run / f"checkpoint-{step}")
    for kind, more in {
        "encoder": [
            "random",
            "published-independent",
            "reviews-random",
            "reviews-published-independent",
        ],
        "decoder": [],
        "symmetric": [
            "paired",
            "published",
            "reviews-symmetric",
            "reviews-published",
            "wikipedia-encoder-symmetric",
        ],
    }.items():
        for name in " ".join(RUNS.format(name) for name in (kind, *more)).split():
            if not Path(name).exists():
                shutil.copytree(f"runs/{kind}", name)
    for name in ("run", "seed-1", "seed-2", "seed-3"):
        shutil.copytree("runs/decoder", name)
    for name in ("store", "corpus", "corpora/wikipedia", "characters"):
        shutil.copytree("wikipedia", name)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with everything that is named, and a hub that has every model."""
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(test_gguf, "LAYERS", 6)
        for name, value in {
            "SLURM_ARRAY_TASK_ID": "1",
            "SLURM_CPUS_PER_TASK": "1",
            "SCRATCH": "scratch",
        }.items():
            patch.setenv(name, value)
        make_models()
        make_runs()
        with own_hub(folder, patch) as hub:
            hub.repositories = Every()
            patch.setenv("HF_ENDPOINT", hub.url)  # of processes
            yield folder


def outcome(number: int, text: str) -> str:
    """Run a command and return its failure; empty if the command succeeds."""
    for pattern, value in VALUES.items():
        text = re.sub(pattern, value, text)
    line = f"shopt -s nullglob; printf '%s\\0' {text.split(' | ')[0]}"
    expanded = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    arguments = expanded.stdout.split("\0")[1:-1]
    if len(arguments) - (arguments[:1] == ["lab"]) < 2:  # a verb that is only named
        arguments.append("--help")
    if arguments[:2] == ["lab", "train"] and not {"--resume", "--help"} & {*arguments}:
        arguments = overridden(arguments, SMALLER[8 * ("--config" in arguments) :])
    if arguments[:2] == ["lab", "theory"] and "--help" not in arguments:
        arguments = overridden(arguments, FEWER)
    if (
        arguments[:1] == ["lab"]
        and arguments[1] in ("train", "corpus")
        and "--resume" not in arguments
    ):
        arguments = [
            f"again/{number}" if before == "-o" else word
            for before, word in zip(["", *arguments], arguments, strict=False)
        ]
    Path("report.html").unlink(missing_ok=True)  # a report is not replaced unless it is named
    result = CliRunner().invoke(command, arguments)
    usual = (0, 1) if FAILS & {*arguments[:1]} else (0,)
    if result.exit_code in usual and result.output.strip():
        return ""
    return (
        f"wqk {' '.join(arguments)}: {result.exit_code} {result.output[-300:]} {result.exception!r}"
    )


def test_every_printed_command_runs(desk: Path) -> None:
    """A command that fails is repeated, because it may read another command's file. A verb without
    arguments is asked for its help."""
    lines = [text.strip().rstrip(".,:").split(" # ")[0] for _, text in commands()]
    lines = [t for t in lines if not (OPEN.search(t) or any(re.search(e, t) for e in EXCEPTIONS))]
    shown = {text.strip().split(" # ")[0] for _, text in commands(spoken=False)}
    failure_by_command = dict.fromkeys(lines, "")
    for _ in range(2):
        failure_by_command = {
            t: why for n, t in enumerate(failure_by_command) if (why := outcome(n, t))
        }
    wrong = [
        why
        for text, why in failure_by_command.items()
        if text in shown or not SPOKEN_OF.search(why)
    ]
    assert not wrong, "\n".join(wrong)
    assert len({*lines}) > 180


# -- transcripts: commands with what they print -------------------------------------------------

FENCED = re.compile(
    r"^```console\n(?P<console>.*?)^```\n(?:\n?^```text\n(?P<text>.*?)^```)?", re.M | re.S
)
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?|[-+]?\.\d+")


def transcripts() -> Iterator[tuple[str, str, str]]:
    """Yield place, command and output of every transcript: the output is in the same fence, or in
    the fence of text that follows."""
    for page in PAGES:
        for fences_of_page in FENCED.finditer(page.read_text("utf-8")):
            *_, last = re.split(r"^\$ ", fences_of_page["console"], flags=re.M)
            line, _, below = last.partition("\n")
            shown = below.strip("\n") or (fences_of_page["text"] or "").strip("\n")
            if line.startswith("wqk ") and shown:
                yield str(page.relative_to(ROOT)), line.split("  #")[0], shown


def alike(shown: str, printed: str) -> bool:
    """Return whether two lines are equal: numbers up to two in the last digit; numbers with an
    exponent, as distances of a random model, up to a quarter; numbers below 1e-6 are zero."""
    a, b = (" ".join(text.split()) for text in (shown, printed))
    if NUMBER.sub("#", a) != NUMBER.sub("#", b):
        return False
    for shown_number, printed_number in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True):
        x, y = (float(number.replace(",", "")) for number in (shown_number, printed_number))
        last = 2.01 * 10.0 ** -len(shown_number.partition(".")[2])
        if "e" in shown_number:
            last = max(1e-6, max(abs(x), abs(y)) / 4)
        if abs(x - y) > (last if "." in shown_number else 0):
            return False
    return True


def first_difference(shown: str, printed: str) -> str:
    """The first line of a transcript that is not printed in its place; ``…`` stands for any
    lines."""
    lines = [line for line in printed.splitlines() if line.strip()]
    next_line, skips = 0, False
    for line in (line for line in shown.splitlines() if line.strip()):
        if line.strip() == "…":
            skips = True
            continue
        places = (
            range(next_line, len(lines))
            if skips
            else range(next_line, min(next_line + 1, len(lines)))
        )
        place = next((n for n in places if alike(line, lines[n])), None)
        if place is None:
            printed_line = lines[next_line] if next_line < len(lines) else "nothing"
            return f"shown: {line}\n  printed: {printed_line}"
        next_line, skips = place + 1, False
    return "" if skips or next_line == len(lines) else f"not shown: {lines[next_line]}"


@pytest.mark.parametrize(("shown", "printed", "is_equal"), SHOWN_AND_PRINTED)
def test_a_stale_transcript_would_be_told(shown: str, printed: str, is_equal: bool) -> None:
    assert (first_difference(shown, printed) == "") == is_equal


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: Path) -> Path:
    """A folder with what the transcripts' commands name."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 64}
    config = transformers.LlamaConfig(
        **sizes, num_key_value_heads=2, intermediate_size=128, vocab_size=65
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained("original")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                pairs = weight.view(-1, 2, 8, weight.shape[1]).transpose(1, 2)
                weight.copy_(pairs.reshape(weight.shape).clone())
    model.save_pretrained("converted")
    for place in ("path/to", "google-bert", "."):
        Path(place).mkdir(exist_ok=True, parents=True)
        real = shared / "checkpoints" / "bert-base-uncased"
        Path(place, "bert-base-uncased").symlink_to(real, target_is_directory=True)
    return tmp_path


def test_transcripts_show_what_is_printed(models: Path) -> None:
    printed_transcripts, wrong = list(transcripts()), []
    for place, line, shown in printed_transcripts:
        result = shell(line, COLUMNS="80")
        printed = result.stdout + result.stderr
        if why := first_difference(shown, printed):
            wrong.append(f"{place}: {line}\n  {why}")
    assert not wrong, "\n".join(wrong)
    assert len(printed_transcripts) > 4


# -- snippets of Python that are no sessions ----------------------------------------------------

# What does not run here, and why.
SNIPPETS_EXCEPTED = {
    r"survey_pairs": "hours",
    r"steps=4000": "an hour",
}


def test_snippets_of_python_run(desk: Path) -> None:
    """Snippets of a page run one after the other, with the names that the page assumes."""
    config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=60, n_positions=32)
    ids = torch.arange(16)[None] % 60
    snippets = [
        (place, text)
        for place, text in fences("python")
        if not any(re.search(pattern, text) for pattern in SNIPPETS_EXCEPTED)
    ]
    wrong, pages = [], dict[str, dict[str, Any]]()
    Path("path/to/wikipedia.txt").write_text("some words " * 99, encoding="utf-8")
    for number, (place, text) in enumerate(snippets):
        model: Any = transformers.GPT2LMHeadModel(config)
        if "plain.toml" in text:  # which describes another
            about = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4, vocab_size=60)
            model = transformers.LlamaForCausalLM(about)
        batch = {"input_ids": ids, "labels": ids}
        arguments = transformers.TrainingArguments(
            f"trained-{number}", max_steps=1, report_to=[], use_cpu=True
        )
        names = pages.setdefault(place, {})
        names |= {
            "wqk": wqk,
            "np": np,
            "Path": Path,
            "transformers": transformers,
            "model": model,
            "batch": batch,
            "batches": [batch],
            "loader": [batch],
            "step": 0,
            "token": None,
            "optimizer": torch.optim.AdamW(model.parameters(), 1e-3),
            "train_step": lambda *_: None,
            "inputs": torch.randn(8, 16, 32).numpy(),
            "trainer": transformers.Trainer(model, arguments),
            "wandb": SimpleNamespace(log=lambda *_, **__: None),
            "lightning": SimpleNamespace(Callback=object),
            "penalty": lambda: torch.zeros(()),
            "usual": 1.0,
        }
        if "build_corpus" in text:
            shutil.rmtree("store")
        for run in ("run", "healthy"):
            shutil.rmtree(run, ignore_errors=True)
            wqk.Monitor(model, f"{run}/scores.jsonl")(0)
        try:
            snippet = Path("snippet.py")
            snippet.write_text(text, encoding="utf-8")
            names |= runpy.run_path(str(snippet), init_globals=names)
        except Exception as error:
            wrong.append(f"{place}: {text}\n{type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(snippets) > 10
