"""``wqk explain``: how a checkpoint is interpreted, before any weight is read."""

from wqk.cli.verb import Verb

explain = Verb(
    "wqk.inspecting.explanation:explain",
    examples=("wqk explain google-bert/bert-base-uncased",),
)
