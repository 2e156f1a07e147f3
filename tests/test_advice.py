"""What errors tell to do is done: each call or command that they name is run as it stands.

A line has what goes wrong, what the error says, and what is run then: the same words, unless they
leave something to be chosen. Words in capitals, and the names of a call, stand for what `desk` has.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from tests.cases import cases
from tests.checkpoints import test_gguf
from tests.live.test_in_memory import MINE, TOKENS, Wrapped, strong
from tests.test_printed import messages
from tests.test_printed_runs import SMALLER

import wqk
from wqk.attention.block import Head
from wqk.checkpoints.modules import StateDict
from wqk.cli.main import command
from wqk.errors import WqkError
from wqk.scanning.surveys.surveying import survey_table

# Where a line ends in "then", the first thing is done again, and goes right.
ADVICE = cases(__file__, "advice")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"hidden_size": 32, "intermediate_size": 32}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=32)
    llama = transformers.LlamaForCausalLM(config)
    llama.save_pretrained("llama")
    monkeypatch.setattr(test_gguf, "LAYERS", 3)
    wanted = re.compile("[qkv]_proj|input_layernorm")
    state = {n: v.numpy() for n, v in llama.state_dict().items() if wanted.search(n)}
    test_gguf.write(Path("model.gguf"), StateDict(state, config.to_dict(), "llama"), key_heads=2)
    wqk.compose("llama").write("pairs.parquet")
    wqk.scan("llama").write("bare.csv")
    net, unsure = MINE["nanogpt"](), MINE["nanogpt"]()
    del unsure.settings
    torch.save(unsure.state_dict(), "unsaid.pt")
    Path("text.txt").write_text("\n".join(f"some words of text {n}" for n in range(99)), "utf-8")
    return {
        "net": net,
        "model": net,
        "batch": TOKENS,
        "unsure": wqk.open(unsure, heads_per_layer=4),
        "unsaid": dict(unsure.state_dict()),
        "guess": strong(Wrapped()),
        "inputs": torch.randn(2, 7, 32),
        "ref": "llama",
        "layer": 1,
        "head": 0,
        "N": 4,
        "path": "page.html",
        "wqk": wqk,
        "Head": Head,
        "survey_table": survey_table,
        "FILE": Path(wqk.__file__).parent / "families/data/nanogpt.toml",
    }


CHOSEN = {"REF": "llama", "ORIGINAL": "llama", r"\bN\b": "4"}
CHOSEN |= {"TINY": f"--corpus tokens {' '.join(SMALLER)}"}
CHOSEN |= {r"FILE\.gguf": "model.gguf", r"FILE\.": "one."}


def run(text: str, desk: dict[str, Any]) -> str:
    """What a call or some commands say; a call that is refused raises."""
    if not text.startswith("wqk "):
        return repr(eval(text, desk))
    said = ""
    for pattern, chosen in CHOSEN.items():
        text = re.sub(pattern, chosen, text)
    for line in text.split(" && "):
        result = CliRunner().invoke(command, shlex.split(line)[1:])
        said += result.output
        if result.exit_code:
            raise WqkError(f"{line}: {said} {result.exception!r}")
    return said


@pytest.mark.usefixtures("unchecked_arguments")
def test_what_errors_tell_to_do_works(desk: dict[str, Any]) -> None:
    wrong, lines = [], ADVICE.replace("\\\n", "").strip().splitlines()
    for line in lines:
        first, advice, *rest = line.split(" | ")
        first = first.removeprefix("$ ")
        try:
            said = f"no error, but {run(first, desk)}"
        except WqkError as error:
            said = " ".join(str(error).split())
        if advice not in said:
            wrong.append(f"{first}: {advice!r} is not said: {said}")
        for done in [*(rest or [advice])]:
            try:
                run(first if done == "then" else done, desk)
            except Exception as error:
                wrong.append(f"{first}: {done}: {error!r}")
    assert not wrong, "\n".join(wrong)


# Of the laboratory, what is not run here: surveys of pairs, the data of GLUE, and words alone.
ELSEWHERE = {"wqk lab pairs --out DIR", "wqk lab atlas --json prints its rows"}


def test_all_that_errors_tell_to_do_is_here() -> None:
    told = {text for _, text in messages() if text not in ELSEWHERE}
    assert [one for one in told if " ".join(one.rstrip(".").split()[:3]) not in ADVICE] == []
