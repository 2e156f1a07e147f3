"""``wqk parts``: what the symmetric and the skew part of the scores do to the loss."""

from wqk.cli.verb import Verb

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
