"""Verbs that are a function and no more, each a declaration; and ``wqk lab``, a group of others."""

from __future__ import annotations

from dataclasses import replace

import click

from wqk.cli.main import LABORATORY, Boundary
from wqk.cli.verb import Verb

explain = Verb(
    "wqk.inspecting.explanation:explain",
    examples=("wqk explain google-bert/bert-base-uncased",),
)

verify = Verb(
    "wqk.live.verification.comparison:verify",
    fails="some forms are wrong, or could not be compared",
    omit=("batch", "tokens", "length", "tolerance"),
    examples=("wqk verify google-bert/bert-base-uncased",),
)

tokens = Verb(
    "wqk.inspecting.tokens:match_tokens",
    examples=(
        "wqk tokens meta-llama/Llama-3.2-1B --layer 0 --head 3 --fold-norm",
        "wqk tokens openai-community/gpt2 --layer 5 --head 1 --through 4.11",
    ),
)

compose = Verb(
    "wqk.inspecting.composition:compose",
    examples=(
        "wqk compose openai-community/gpt2 --kind k",
        "wqk compose meta-llama/Llama-3.2-1B --fold-norm --out pairs.parquet",
    ),
    own={"top": {"default": 20, "help": "Number of pairs to print, and to draw."}},
    show=replace,
    table=True,
    picture=True,
)

parts = Verb(
    "wqk.live.parts:parts",
    examples=(
        "wqk parts google-bert/bert-base-uncased --text wikitext.txt --each-layer",
        "wqk parts out/pair/encoder-1 --corpus out/pair/corpus --picture parts.png",
    ),
    picture=True,
    progress="passes_progress",
    omit=("tokens",),
)

diff = Verb(
    "wqk.comparing.differences:diff",
    examples=(
        "wqk diff EleutherAI/pythia-160m ./my-finetuned-pythia",
        "wqk diff ./run/checkpoint-1000 ./run/checkpoint-2000 --terms",
        "wqk diff ./model ./model-int4 --beside ./model-nf4 --heads --picture heads.png",
    ),
    table=True,
    picture=True,
)


@click.group(cls=Boundary, verbs=LABORATORY)
def lab() -> None:
    """Train small models, and test the paper on them.

    These verbs come from packages: the laboratory, wqk_lab, is installed with wqk; others add
    theirs with an entry point of the group wqk.commands.
    """
