"""``wqk tokens``: which tokens a head matches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from wqk._console import number
from wqk.cli.options import (
    COUNT,
    REF,
    family_file,
    json_output,
    opened,
    revision,
    stack,
)

if TYPE_CHECKING:
    from wqk.inspecting.tokens import TokenMatches, TokenPair
    from wqk.tables.sheet import Sheet


@click.command()
@click.argument("ref", type=REF)
@click.option("--layer", type=int, required=True, metavar="L", help="Negative: from the end.")
@click.option("--head", type=click.IntRange(min=0), required=True, metavar="H")
@click.option("--top", type=COUNT, default=20, metavar="N", help="Number of pairs in each list.")
@click.option(
    "--distance", type=click.IntRange(min=0), default=0, metavar="N",
    help="Distance from key to query in tokens (rotary models).",
)  # fmt: skip
@click.option("--fold-norm", is_flag=True, help="Normalize embeddings as the block's norm does.")
@click.option(
    "--circuit", type=click.Choice(["qk", "ov"]), default="qk",
    help="What the head matches, or what it writes about the token that it attends to.",
)  # fmt: skip
@click.option(
    "--through", metavar="L.H", callback=lambda context, option, text: _place(text),
    help="An earlier head whose output the keys, or with ov the values, are computed from.",
)  # fmt: skip
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
    Examples:
      wqk tokens meta-llama/Llama-3.2-1B --layer 0 --head 3 --fold-norm
      wqk tokens openai-community/gpt2 --layer 5 --head 1 --through 4.11
    """
    from wqk.cli import display
    from wqk.inspecting.tokens import match_tokens

    matches = match_tokens(opened(ref, options), layer, head, **options)
    kinds = ("largest", "smallest", "most_alike", "least_alike")
    lists = {kind: [pair._asdict() for pair in getattr(matches, kind)] for kind in kinds}
    display.show(asdict(matches) | lists, *lines_of(matches), as_json=as_json)


def _place(text: str | None) -> tuple[int, int] | None:
    """A layer and a head, as in 0.2."""
    if text is None:
        return None
    layer, dot, head = text.partition(".")
    if not (dot and layer.isdigit() and head.isdigit()):
        raise click.BadParameter(f"expected a layer and a head, such as 0.2, got {text!r}")
    return int(layer), int(head)


def lines_of(matches: TokenMatches) -> Iterator[Any]:
    """Pairs with the largest and smallest scores side by side, then tokens with themselves."""
    from rich.text import Text

    where = (
        f"{matches.stack}, layer {matches.layer}, head {matches.head}, distance {matches.distance}"
    )
    if matches.through is not None:
        where += f", through {'.'.join(map(str, matches.through))}"
    if matches.circuit == "ov":
        where += f", written: {matches.unembeddings}"
    norm = ", normalized" if matches.normalized else ""
    yield Text.assemble((matches.checkpoint, "bold"), f"\n{where}; {matches.embeddings}{norm}\n")
    ends = "attended → written" if matches.circuit == "ov" else "query → key"
    columns = (f"largest: {ends}", f"smallest: {ends}")
    yield _side_by_side(
        columns, matches.largest, matches.smallest, lambda pair: f"{_query(pair)} → {_key(pair)}"
    )
    columns = ("most to itself: token", "least to itself: token")
    yield _side_by_side(columns, matches.most_alike, matches.least_alike, _query)
    if all(pair.query_name is None for pair in matches.largest):
        yield (
            "Tokens are shown by number: there is no tokenizer.json or vocab.txt beside the model."
        )
    yield Text(matches.caveat, style="dim")


def _side_by_side(
    columns: tuple[str, str],
    left: tuple[TokenPair, ...],
    right: tuple[TokenPair, ...],
    label: Callable[[TokenPair], str],
) -> Sheet:
    """Two lists of token pairs and their scores."""
    from wqk.tables.sheet import Sheet

    table = Sheet.of(columns[0], "score", columns[1], "score", text=columns)
    for pairs in zip_longest(left, right):
        cells = [(label(pair), number(pair.score, 2)) if pair else ("", "") for pair in pairs]
        table.add(*(cell for pair in cells for cell in pair))
    return table


def _query(pair: TokenPair) -> str:
    return _name(pair.query, pair.query_name)


def _key(pair: TokenPair) -> str:
    return _name(pair.key, pair.key_name)


def _name(number: int, name: str | None) -> str:
    """A token's name with control characters escaped; its number if it has none."""
    if name is None:
        return str(number)
    return name if name.isprintable() else name.encode("unicode_escape").decode()
