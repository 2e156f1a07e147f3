"""``wqk verify``: the forms as read against the attention of the running model."""

from wqk.cli.verb import Verb

verify = Verb(
    "wqk.live.verification.comparison:verify",
    fails="some forms are wrong, or could not be compared",
    omit=("batch", "tokens", "length", "tolerance"),
    examples=("wqk verify google-bert/bert-base-uncased",),
)
