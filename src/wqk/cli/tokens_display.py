"""What ``wqk tokens`` prints."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

from rich.text import Text

from wqk._console import number, sheet
from wqk.cli.display import output

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.table import Table

    from wqk.attention.tokens import TokenMatches, TokenPair


def print_tokens(matches: TokenMatches) -> None:
    """Pairs with the largest and smallest scores side by side, then tokens with themselves."""
    console = output()
    where = (
        f"{matches.stack}, layer {matches.layer}, head {matches.head}, distance {matches.distance}"
    )
    norm = ", normalized" if matches.normalized else ""
    console.print(
        Text.assemble((matches.checkpoint, "bold"), f"\n{where}; {matches.embeddings}{norm}\n")
    )
    arrow = ("query → key", "score")
    console.print(
        _side_by_side(matches.largest, matches.smallest, ("largest", "smallest"), arrow, _both)
    )
    console.print(
        _side_by_side(
            matches.most_alike, matches.least_alike, ("most to itself", "least to itself"),
            ("token", "score"), _one,
        )
    )  # fmt: skip
    console.print(Text(matches.caveat, style="dim"))


def _side_by_side(
    left: tuple[TokenPair, ...],
    right: tuple[TokenPair, ...],
    names: tuple[str, str],
    headings: tuple[str, str],
    label: Callable[[TokenPair], str],
) -> Table:
    columns = [f"{name}: {headings[0]}" for name in names]
    table = sheet(columns[0], headings[1], columns[1], headings[1], left=columns)
    for scores in table.columns[1::2]:
        scores.no_wrap = True
    for pairs in zip_longest(left, right):
        cells = [(label(pair), number(pair.score, 2)) if pair else ("", "") for pair in pairs]
        table.add_row(*(cell for pair in cells for cell in pair))
    return table


def _both(pair: TokenPair) -> str:
    return f"{_name(pair.query, pair.query_name)} → {_name(pair.key, pair.key_name)}"


def _one(pair: TokenPair) -> str:
    return _name(pair.query, pair.query_name)


def _name(number: int, name: str | None) -> str:
    """A token's name with control characters escaped; its number if it has none."""
    if name is None:
        return str(number)
    return name if name.isprintable() else name.encode("unicode_escape").decode()
