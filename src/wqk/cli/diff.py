"""``wqk diff``: how far the forms of two checkpoints differ."""

from wqk.cli.verb import Verb

diff = Verb(
    "wqk.comparing.differences:diff",
    examples=(
        "wqk diff EleutherAI/pythia-160m ./my-finetuned-pythia",
        "wqk diff ./run/checkpoint-1000 ./run/checkpoint-2000 --terms",
    ),
    table=True,
)
