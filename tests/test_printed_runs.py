"""Printed commands run: against small models and tables that stand for what their words mean."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from tests.command import shell
from tests.test_printed import OPEN, PAGES, ROOT, commands, fences

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


# -- transcripts: commands with what they print -------------------------------------------------

FENCED = re.compile(
    r"^```console\n(?P<console>.*?)^```\n(?:\n?^```text\n(?P<text>.*?)^```)?", re.M | re.S
)
NUMBER = re.compile(r"[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?|[-+]?\.\d+")


def transcripts() -> Iterator[tuple[str, str, str]]:
    """Commands that are shown with their output, and where: the output is in the same fence, or in
    one of text that follows."""
    for page in PAGES:
        for found in FENCED.finditer(page.read_text("utf-8")):
            *_, last = re.split(r"^\$ ", found["console"], flags=re.M)
            line, _, below = last.partition("\n")
            shown = below.strip("\n") or (found["text"] or "").strip("\n")
            if line.startswith("wqk ") and shown:
                yield str(page.relative_to(ROOT)), line.split("  #")[0], shown


def alike(shown: str, printed: str) -> bool:
    """Whether two lines are the same, numbers up to two of their last digit, and up to a quarter
    where they have an exponent, as the distances of a random model; what is below 1e-6 is zero."""
    a, b = (" ".join(text.split()) for text in (shown, printed))
    if NUMBER.sub("#", a) != NUMBER.sub("#", b):
        return False
    for one, other in zip(NUMBER.findall(a), NUMBER.findall(b), strict=True):
        x, y = (float(number.replace(",", "")) for number in (one, other))
        last = 2.01 * 10.0 ** -len(one.partition(".")[2])
        if "e" in one:
            last = max(1e-6, max(abs(x), abs(y)) / 4)
        if abs(x - y) > (last if "." in one else 0):
            return False
    return True


def first_difference(shown: str, printed: str) -> str:
    """The first line of a transcript that is not printed in its place; ``…`` stands for any
    lines."""
    lines = [line for line in printed.splitlines() if line.strip()]
    at, skips = 0, False
    for line in (line for line in shown.splitlines() if line.strip()):
        if line.strip() == "…":
            skips = True
            continue
        places = range(at, len(lines)) if skips else range(at, min(at + 1, len(lines)))
        found = next((n for n in places if alike(line, lines[n])), None)
        if found is None:
            return f"shown: {line}\n  printed: {lines[at] if at < len(lines) else 'nothing'}"
        at, skips = found + 1, False
    return "" if skips or at == len(lines) else f"not shown: {lines[at]}"


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("a 0.539 │██", "a  0.540 │██", True),
        ("a 0.539 │██", "a  0.549 │██", False),
        ("a\n…\nd", "a\nb\nc\nd", True),
        ("a\nd", "a\nb\nc\nd", False),
        ("a", "a\nb", False),
        ("far 5.4e-01, 1.7e-08", "far 5.0e-01, 0.0e+00", True),
        ("far 5.4e-01", "far 8.0e-01", False),
        ("3 of 3 blocks", "2 of 3 blocks", False),
    ],
)
def test_a_stale_transcript_would_be_told(shown: str, printed: str, same: bool) -> None:
    assert (first_difference(shown, printed) == "") == same


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


@pytest.mark.slow
def test_transcripts_show_what_is_printed(models: Path) -> None:
    some, wrong = list(transcripts()), []
    for place, line, shown in some:
        result = shell(line, COLUMNS="80")
        printed = result.stdout + result.stderr
        if why := first_difference(shown, printed):
            wrong.append(f"{place}: {line}\n  {why}")
    assert not wrong, "\n".join(wrong)
    assert len(some) > 8


# -- the laboratory's commands ------------------------------------------------------------------

# Smaller, at the end of commands that train; a paper's size or another's configuration stays out.
SMALLER = (
    "--steps 4 --layers 1 --width 16 --heads 2 --intermediate 16 --block 16 --batch 8 --warmup 1 "
    "--held-out-blocks 2 --held-out-every 4 --score-every 2 --save-every 4 --log-every 2"
)
RUNS = {
    "encoder": "encoder-1 random random-1 random-2 wikipedia-encoder-1",
    "decoder": "decoder-1 decoder-2 decoder-3 wikipedia-decoder-1",
    "symmetric": "symmetric-1 symmetric-2 paired-1 published-1 wikipedia-encoder-symmetric-1",
}
# Networks, other people's data, the paper's sizes, and runs that only a whole experiment leaves.
LABORATORY_ELSEWHERE = re.compile(
    r"glue|lab (train|theory|pairs|corpus|speedup|experiments|figure|glue|atlas)$|wqk lab$"
    r"|lab corpus "
    r"|--survey|--from survey|--from scores|figure (dose|convert|pairs|compose|fig2)"
    r"|figure (table|NAME|losses)"
    r"|pairs --|--preset|--config|--resume|--report-to|--qk-clip|--figure$|--published"
    r"|--scan$|--from$"
    r"|path/to/|google-bert|MODEL|table1-cpu|RUN|experiments |--below|--steps 800|lab train --from"
    r"|\./run |seed-|--sound$|--scan"
)


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus and runs of the names that the laboratory's commands have."""
    desk = tmp_path_factory.mktemp("laboratory")
    words = [f"word{n}" for n in range(30)]
    texts = [" ".join(words[(k * n) % 30] for n in range(60)) + "." for k in range(1, 40)]
    (desk / "book.txt").write_text("\n\n".join(texts), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(desk)
        for line in (
            "lab corpus book.txt --document paragraph --text characters -o wikipedia",
            "lab train --corpus wikipedia -o runs/encoder --keep-checkpoints all",
            "lab train --corpus wikipedia -o runs/decoder --mode decoder --keep-checkpoints all",
            "lab train --corpus wikipedia -o runs/symmetric --init symmetric --init-head-norm 1",
        ):
            more = SMALLER.split() if "train" in line else []
            result = CliRunner().invoke(command, [*line.split(), *more])
            assert result.exit_code == 0, result.output
    for kind, names in RUNS.items():
        for name in (kind, *names.split()):
            for place in (f"runs/{name}", name, f"pair/{name}"):
                if not (desk / place).exists():
                    shutil.copytree(desk / "runs" / kind, desk / place)
    for name in ("store", "corpora/wikipedia"):
        shutil.copytree(desk / "wikipedia", desk / name)
    return desk


def laboratory_commands() -> list[str]:
    texts = (text.strip().rstrip(".,:") for _, text in commands())
    some = [text.split("  #")[0].split(" # ")[0] for text in texts if text.startswith("wqk lab")]
    return [
        t for t in dict.fromkeys(some) if not (OPEN.search(t) or LABORATORY_ELSEWHERE.search(t))
    ]


@pytest.mark.slow
def test_printed_commands_of_the_laboratory_run(
    laboratory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(laboratory)
    some, wrong = laboratory_commands(), []
    for text in some:
        words = []
        for word in shlex.split(text)[1:]:
            found = sorted(str(p) for p in Path().glob(word)) if "*" in word else []
            words += found or [word]
        if "train" in words:
            at = words.index("-o") + 1
            words[at] = f"again/{some.index(text)}"
            words += SMALLER.split()
        if "theory" in words:  # steps and blocks that the small runs have
            words = ["all" if re.fullmatch(r"0,[\d,]+", w) else w for w in words]
            words = ["16" if w in ("32", "64") else w for w in words]
        result = CliRunner().invoke(command, words)
        if result.exit_code or not result.output.strip():
            wrong.append(f"{text}: {result.exit_code} {result.output[-300:]} {result.exception!r}")
    assert not wrong, "\n".join(wrong)
    assert len(some) > 20


# -- snippets of Python that are no sessions ----------------------------------------------------

# Other libraries, networks and texts that are not here, and what a page has defined elsewhere.
SNIPPETS_ELSEWHERE = re.compile(
    r"lightning|wandb|wqk_lab|paper:|store/|openai-community|org/pr|penalty\(\)|PenalizedTrainer"
    r"|path/to/wiki|path/to/bert|wqk\.kin\(|run\.parquet"
)


@pytest.mark.slow
def test_snippets_of_python_run(desk: Path) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=60, n_positions=32)
    ids = torch.arange(16)[None] % 60
    some = [
        (place, text) for place, text in fences("python") if not SNIPPETS_ELSEWHERE.search(text)
    ]
    for number, (place, text) in enumerate(some):
        model = transformers.GPT2LMHeadModel(config)
        batch = {"input_ids": ids, "labels": ids}
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        arguments = transformers.TrainingArguments(
            f"trained-{number}", max_steps=1, report_to=[], use_cpu=True
        )
        names = {
            "wqk": wqk, "model": model, "batch": batch, "batches": [batch], "loader": [batch],
            "optimizer": optimizer, "step": 0,
            "train_step": lambda *_: None,
            "trainer": transformers.Trainer(model, arguments),
        }  # fmt: skip
        shutil.rmtree("run", ignore_errors=True)
        for run in ("run", "healthy"):
            wqk.Monitor(model, f"{run}/scores.jsonl")(0)
        try:
            exec(text, names)
        except Exception as error:
            pytest.fail(f"{place}: {text}\n{type(error).__name__}: {error}")
    assert len(some) > 8
