"""Printed commands run: against small models and tables that stand for what their words mean."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from tests.test_printed import OPEN, commands

import wqk
from wqk.cli.main import command

GPT2, LLAMA, BERT = "./a-gpt2", "./a-llama", "./a-bert"

# What a word of a command stands for, by the first pattern that is all of it.
MEANINGS = {
    r"(openai-community/)?gpt2|REF|ID|A|original|\./(my-model|parent|original|merged)": GPT2,
    r"B|converted/?|QUANTIZED|\./(my-conversion|base-with-adapter)": GPT2,
    r"HF_FOLDER|ORIGINAL_FOLDER|ORIGINAL": GPT2,
    r"(meta-llama|Qwen)/.*|MODEL|\./a-model-that-hides-its-parent": LLAMA,
    r"(google-bert/|path/to/|\./)?bert-base-uncased": BERT,
    r"runs/\w+(/checkpoint-\d+)?": GPT2,
    r"RUN|DIR": "./run",
    r"TABLE\.\.\.": "scores.parquet",
    r"FILE\.html": "report.html",
    r"FILE\.toml": "plain.toml",
    r"L|H": "1",
}
THERE = r"\./run(/checkpoint-\d+)?|run/scores\.jsonl|\w+\.(parquet|npz|toml)"
WRITTEN = r"[\w-]+\.(html|png|pdf|npz|parquet)|mine|run-scores"
# Of differences, and of models in a survey that could not be read.
FAILS = {"same", "verify", "survey", "diff"}
# What is not here: networks, other programs and files, models that no stand-in is made of, what
# waits for a run, and verbs that are named without an option that they need.
ELSEWHERE = re.compile(
    r"https?:|--dask|--jobs|paper:|@|\||\$|--revision|gguf|adapter|MiniLM"
    r"|wqk watch|wqk (parts|show) REF$|report RUN$"
)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the commands name, where they run."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 60, "num_hidden_layers": 6, "num_attention_heads": 4}
    wide = sizes | {"hidden_size": 32, "intermediate_size": 64}
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=32, n_positions=80, **sizes))
    for place in (GPT2, "run/checkpoint-1000", "run/checkpoint-2000"):
        gpt2.save_pretrained(place)
        with torch.no_grad():
            gpt2.transformer.h[0].attn.c_attn.weight.mul_(1.1)
    llama = transformers.LlamaConfig(num_key_value_heads=2, **wide)
    transformers.LlamaForCausalLM(llama).save_pretrained(LLAMA)
    transformers.BertForMaskedLM(transformers.BertConfig(**wide)).save_pretrained(BERT)
    for name in ("bert", "gpt2", "scores", "run"):
        wqk.scan(BERT if name == "bert" else GPT2).write(f"{name}.parquet")
    monitor = wqk.Monitor(gpt2, "run/scores.jsonl")
    monitor(0)
    family = Path(wqk.__file__).parent / "families" / "data" / "gpt2.toml"
    Path("plain.toml").write_text(family.read_text("utf-8"), encoding="utf-8")
    return tmp_path


def meant(word: str) -> str | None:
    """A word with what it stands for; None if that is not known."""
    for pattern, meaning in MEANINGS.items():
        if re.fullmatch(pattern, word):
            return meaning
    known = word.startswith("-") or re.fullmatch(rf"{THERE}|{WRITTEN}|[\d:,.-]+|\w+", word)
    return word if known else None


def runnable() -> list[list[str]]:
    """The printed commands that name models or tables, as words, with what these stand for."""
    found = []
    for _, text in dict.fromkeys(commands()):
        text = text.strip().rstrip(".,:")
        if OPEN.search(text) or text.startswith("wqk lab") or ELSEWHERE.search(text):
            continue
        words = [meant(word) for word in shlex.split(text)[1:]]
        named = [w for w in words[1:2] if w and (w.startswith("./") or "." in w)]
        if None not in words and named:
            turned = "--bands" in words or "--distance" in words  # which need rotary positions
            found.append([LLAMA if turned and w == GPT2 else str(w) for w in words])
    return sorted({tuple(words): words for words in found}.values())


@pytest.mark.slow
def test_printed_commands_run(desk: Path) -> None:
    # What a command reads and another one writes.
    some = sorted(runnable(), key=lambda words: ("report" in words, "diff" in words))
    wrong = []
    for words in some:
        result = CliRunner().invoke(command, words)
        usual = (0, 1) if words[0] in FAILS else (0,)
        if result.exit_code not in usual or not result.output.strip():
            wrong.append(f"wqk {' '.join(words)}: {result.exit_code} {result.output[-300:]}")
    assert not wrong, "\n".join(wrong)
    assert len(some) > 50
