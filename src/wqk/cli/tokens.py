"""``wqk tokens``: which tokens a head matches."""

from wqk.cli.verb import Verb

tokens = Verb(
    "wqk.inspecting.tokens:match_tokens",
    examples=(
        "wqk tokens meta-llama/Llama-3.2-1B --layer 0 --head 3 --fold-norm",
        "wqk tokens openai-community/gpt2 --layer 5 --head 1 --through 4.11",
    ),
)
