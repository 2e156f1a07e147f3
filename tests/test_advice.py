"""The advice of errors works: each call or command that an error names is run.

A case has the call that goes wrong, the part of its message that gives advice, and the calls that
follow the advice. Words in capitals in a command stand for the values of `CHOSEN`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from click.testing import CliRunner
from tests.checkpoints import test_gguf
from tests.live.test_in_memory import MINE, TOKENS, Wrapped, strong
from tests.test_printed import messages
from tests.test_printed_runs import SMALLER

import wqk
from wqk.attention.block import Head
from wqk.checkpoints.modules import StateDict
from wqk.cli.main import command as cli
from wqk.errors import WqkError
from wqk.scanning.surveys.surveying import survey_table

Call = Callable[[], Any]


class Advice(NamedTuple):
    """A call that goes wrong, the advice in its message, and calls that follow the advice."""

    wrong: Call
    message: str
    then: list[Call]


CHOSEN = {
    "REF": "llama",
    "ORIGINAL": "llama",
    r"\bN\b": "4",
    "TINY": f"--corpus tokens {' '.join(SMALLER)}",
    r"FILE\.gguf": "model.gguf",
    r"FILE\.": "one.",
}


def commands(*lines: str) -> Call:
    """Commands to run one after the other; the first that fails raises `WqkError`."""

    def run() -> None:
        for line in lines:
            for pattern, chosen in CHOSEN.items():
                line = re.sub(pattern, chosen, line)
            result = CliRunner().invoke(cli, shlex.split(line))
            if result.exit_code:
                raise WqkError(f"wqk {line}: {result.output} {result.exception!r}")

    return run


def clipped_steps(model: torch.nn.Module) -> None:
    """Two passes that a clipper measures, then the clipping that follows a step."""
    clipper = wqk.Clipper(model, 100)
    for _ in range(2):
        model(TOKENS)
    clipper()
    clipper.close()


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Advice]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {"vocab_size": 60, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"hidden_size": 32, "intermediate_size": 32}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, head_dim=32)
    llama = transformers.LlamaForCausalLM(config)
    llama.save_pretrained("llama")
    monkeypatch.setattr(test_gguf, "LAYERS", 3)
    of_attention = re.compile("[qkv]_proj|input_layernorm")
    state = {n: v.numpy() for n, v in llama.state_dict().items() if of_attention.search(n)}
    test_gguf.write(Path("model.gguf"), StateDict(state, config.to_dict(), "llama"), key_heads=2)
    wqk.compose("llama").write("pairs.parquet")
    wqk.scan("llama").write("bare.csv")
    for step in (10, 20):
        llama.save_pretrained(f"run/checkpoint-{step}")
    net, unsure = MINE["nanogpt"](), MINE["nanogpt"]()
    del unsure.settings
    torch.save(unsure.state_dict(), "unsaid.pt")
    Path("text.txt").write_text("\n".join(f"some words of text {n}" for n in range(99)), "utf-8")
    batch, inputs = TOKENS, torch.randn(2, 7, 32)
    guess = strong(Wrapped())
    maxima = {(0, 0): 400.0}
    unsaid = dict(unsure.state_dict())
    unsure = wqk.open(unsure, heads_per_layer=4)
    family_file = Path(wqk.__file__).parent / "families/data/nanogpt.toml"
    unlike = (wqk.demo_model("encoder"), wqk.demo_model("induction"))  # of 4 layers, and of 2
    return [
        Advice(lambda: Head(3, 0), "wqk.open(ref)[layer, head]", [lambda: wqk.open("llama")[1, 0]]),
        Advice(
            lambda: wqk.symmetry("x"),
            "wqk.open(model)[layer].form",
            [lambda: wqk.open(net)[1].form],
        ),
        Advice(
            lambda: wqk.symmetry("x"), "wqk.open(model)[layer, head]", [lambda: wqk.open(net)[1, 0]]
        ),
        Advice(
            lambda: wqk.scan("llama") - wqk.scan("llama"),
            "wqk.diff(reference, candidate)",
            [lambda: wqk.diff("llama", "llama")],
        ),
        Advice(
            lambda: wqk.scan("llama") + wqk.scan("llama"),
            "wqk.join([table, other])",
            [lambda: wqk.join([wqk.scan("llama"), wqk.scan("llama")])],
        ),
        Advice(
            lambda: wqk.scan(unsaid),
            "wqk.open(ref, heads_per_layer=N)",
            [lambda: wqk.open(unsaid, heads_per_layer=4)],
        ),
        Advice(
            commands("scan unsaid.pt"),
            "--heads-per-layer N",
            [commands("scan unsaid.pt --heads-per-layer N")],
        ),
        Advice(
            lambda: wqk.logits(net), "wqk.logits(model, batch)", [lambda: wqk.logits(net, batch)]
        ),
        Advice(
            lambda: wqk.logits(net),
            "wqk.scan(ref, measures=['ceiling'])",
            [lambda: wqk.scan("llama", measures=["ceiling"])],
        ),
        Advice(
            lambda: wqk.clip_(net, 100),
            "wqk.logits(model, batch)",
            [lambda: wqk.clip_(net, 100, wqk.logits(net, batch))],
        ),
        Advice(
            lambda: wqk.clip_(net, 100), "wqk.Clipper(model, limit)", [lambda: clipped_steps(net)]
        ),
        Advice(
            lambda: wqk.open(wqk.open(net), family="nanogpt"),
            "pass family= to wqk.open()",
            [lambda: wqk.open(net, family="nanogpt")],
        ),
        Advice(
            lambda: wqk.verify(net), "wqk.verify(model, batch)", [lambda: wqk.verify(net, batch)]
        ),
        Advice(
            lambda: wqk.verify("model.gguf"),
            "wqk same ORIGINAL FILE.gguf",
            [commands("same ORIGINAL FILE.gguf")],
        ),
        Advice(
            commands("verify model.gguf"),
            "wqk same ORIGINAL FILE.gguf",
            [commands("same ORIGINAL FILE.gguf")],
        ),
        Advice(
            lambda: wqk.clip_(unsure, 100, maxima),
            'wqk.open(model, family="nanogpt")',
            [lambda: wqk.open(net, family="nanogpt")],
        ),
        Advice(
            lambda: wqk.initialize_(guess, "symmetric"),
            "wqk.open(model, family=FILE)",
            [lambda: wqk.open(net, family=family_file)],
        ),
        Advice(
            lambda: wqk.clip_(guess, 100, maxima),
            "wqk.open(model, family=FILE)",
            [lambda: wqk.open(net, family=family_file)],
        ),
        Advice(
            lambda: wqk.clip_(guess, 100, maxima),
            "wqk.verify(model, batch)",
            [lambda: wqk.verify(guess, inputs), lambda: wqk.clip_(guess, 100, maxima)],
        ),
        Advice(
            lambda: wqk.diff(*unlike), "wqk scan REFERENCE CANDIDATE", [commands("scan REF llama")]
        ),
        Advice(
            lambda: wqk.diff(*unlike),
            "wqk.scan([reference, candidate])",
            [lambda: wqk.scan([*unlike])],
        ),
        Advice(
            lambda: wqk.report(3),
            "wqk.report(wqk.scan(model), path)",
            [lambda: wqk.report(wqk.scan(net), "page.html")],
        ),
        Advice(
            lambda: wqk.report("llama"),
            "wqk scan REF --report FILE.html",
            [commands("scan REF --report FILE.html")],
        ),
        Advice(
            commands("report pairs.parquet -o FILE.html"),
            "wqk scan REF --out scores.parquet",
            [commands("scan REF --out scores.parquet")],
        ),
        Advice(
            lambda: survey_table("llama"), "wqk survey --out", [commands("survey REF --out survey")]
        ),
        Advice(
            commands("watch REF"),
            "wqk.Monitor(model, path)",
            [lambda: wqk.Monitor(net, "run/scores.jsonl")(0)],
        ),
        Advice(
            commands("lab figure distances"),
            "wqk scan REF --distance 0:64 --out FILE",
            [
                commands(
                    "scan REF --distance 0:64 --out t.jsonl", "lab figure distances --from t.jsonl"
                )
            ],
        ),
        Advice(
            commands("lab figure coupling bare.csv"),
            "wqk scan REF --details FILE.npz",
            [commands("scan REF --details FILE.npz", "lab figure coupling --from FILE.npz")],
        ),
        Advice(
            commands("lab figure heads FILE.npz"),
            "wqk scan REF --out FILE",
            [commands("scan REF --out t.csv", "lab figure heads --from t.csv")],
        ),
        Advice(
            commands("lab theory REF --corpus nowhere"),
            "wqk lab corpus",
            [
                commands(
                    "lab corpus text.txt --document line --text characters --held-out 3 -o tokens"
                )
            ],
        ),
        Advice(
            commands("lab train --corpus nowhere -o run2"),
            "wqk lab corpus",
            [
                commands(
                    "lab corpus text.txt --document line --text characters --held-out 3 -o tokens2"
                )
            ],
        ),
        Advice(
            commands("lab figure heads REF"),
            "wqk scan REF --out FILE",
            [commands("scan REF --out h.csv", "lab figure heads h.csv")],
        ),
        Advice(
            commands("lab figure fig3 bare.csv"),
            "wqk scan RUN --out FILE",
            [commands("scan run --out steps.csv", "lab figure fig3 steps.csv")],
        ),
        Advice(
            commands("lab figure updates"),
            "wqk lab train",
            [commands("lab train --mode decoder TINY -o d-1", "lab figure updates d-1")],
        ),
        Advice(
            commands("lab figure fig3 d-1"),
            "wqk lab train --mode encoder and --mode decoder",
            [commands("lab train --mode encoder TINY -o e-1", "lab figure fig3 e-1 d-1")],
        ),
        Advice(
            commands("lab figure s5 e-1"),
            "wqk lab train --init random and --init symmetric",
            [
                commands(
                    "lab train --init symmetric --mode encoder TINY -o e-s", "lab figure s5 e-1 e-s"
                )
            ],
        ),
        Advice(
            commands("lab figure dose e-1 e-s"),
            "wqk lab train --init symmetric --init-norm 2",
            [
                commands(
                    "lab train --init symmetric --init-norm 2 --mode encoder TINY -o e-2",
                    "lab figure dose e-1 e-s e-2",
                )
            ],
        ),
        Advice(
            commands("lab figure convert e-1"),
            "wqk lab train --from RUN --objective masked --keep-checkpoints 0",
            [
                commands(
                    "lab train --from d-1 --objective masked --keep-checkpoints 0,2"
                    " --steps 4 -o child",
                    "lab figure convert child",
                )
            ],
        ),
        Advice(
            commands(
                "lab train --mode decoder TINY --stop 2 -o half", "lab train --from half -o child2"
            ),
            "wqk lab train --resume -o half",
            [commands("lab train --resume -o half")],
        ),
    ]


@pytest.mark.usefixtures("unchecked_arguments")
def test_the_advice_of_errors_works(cases: list[Advice]) -> None:
    failures = []
    for case in cases:
        try:
            case.wrong()
        except WqkError as error:
            message = " ".join(str(error).split())
        else:
            failures.append(f"{case.message!r} is of a call that does not fail")
            continue
        if case.message not in message:
            failures.append(f"{case.message!r} is not in: {message}")
        for call in case.then:
            try:
                call()
            except Exception as error:
                failures.append(f"{case.message}: {error!r}")
    assert not failures, "\n".join(failures)


# Advice that is not run here: surveys of pairs, rows of the atlas, and repairs, which other files
# test.
ELSEWHERE = {
    "wqk lab pairs --out DIR",
    "wqk lab atlas --json prints its rows",
    "wqk.same(reference, candidate, repair=folder)",
}


def test_all_advice_of_errors_is_here() -> None:
    source = Path(__file__).read_text("utf-8")
    advice = {text for _, text in messages() if text not in ELSEWHERE}
    beginnings = {text: " ".join(text.rstrip(".").split()[:3]) for text in advice}
    assert [text for text, beginning in beginnings.items() if beginning not in source] == []
