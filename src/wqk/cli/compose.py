"""``wqk compose``: which heads feed which."""

from dataclasses import replace

from wqk.cli.verb import Verb

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
