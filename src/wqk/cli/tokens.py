"""``wqk tokens``: which tokens a head matches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from wqk.cli.options import COUNT, REF, family_file, json_output, revision, stack


@click.command()
@click.argument("ref", type=REF)
@click.option("--layer", type=int, required=True, metavar="L", help="Negative: from the end.")
@click.option("--head", type=click.IntRange(min=0), required=True, metavar="H")
@click.option("--top", type=COUNT, default=20, metavar="N", help="Number of pairs in each list.")
@click.option(
    "--distance",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Distance from key to query in tokens (rotary models).",
)
@click.option("--fold-norm", is_flag=True, help="Normalize embeddings as the block's norm does.")
@click.option("--embeddings", metavar="TENSOR", help="Name of the embedding table.")
@stack
@revision
@family_file
@json_output
def tokens(ref: str, layer: int, head: int, as_json: bool, **options: Any) -> None:
    """List the token pairs that a head scores highest and lowest.

    Queries and keys are computed from the model's token embeddings. In layer 0 that is what the
    head computes, apart from positions; in deeper layers it is only a hint, because their inputs
    are not embeddings.

    \b
    Example:
      wqk tokens meta-llama/Llama-3.2-1B --layer 0 --head 3 --fold-norm
    """
    from wqk.attention.tokens import match_tokens
    from wqk.cli.display import print_object
    from wqk.cli.tokens_display import print_tokens

    matches = match_tokens(ref, layer, head, **options)
    if not as_json:
        print_tokens(matches)
        return
    kinds = ("largest", "smallest", "most_alike", "least_alike")
    lists = {kind: [pair._asdict() for pair in getattr(matches, kind)] for kind in kinds}
    print_object(asdict(matches) | lists)
