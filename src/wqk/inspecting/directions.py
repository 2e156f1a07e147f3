"""Singular directions of a head's form, with the tokens at both ends.

M = Σ_k σ_k u_k v_kᵀ. In a query-key form, a query along u_k attends to keys along v_k. In an
output-value form, a head that attends to a token along u_k writes along v_k. The sign of a pair is
arbitrary: (−u_k, −v_k) is the same direction. Therefore tokens are listed at both ends of a
direction.

Axes: V tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.text import Text

from wqk._console import Result, display_name, number
from wqk._typing import Float
from wqk.tables.sheet import Sheet

# Tokens in a line of the table.
TOKENS_SHOWN = 6


class DirectionToken(NamedTuple):
    """A token, the coordinate along a direction, and the token's name; None without a tokenizer."""

    token: int
    coordinate: float
    name: str | None = None

    @property
    def label(self) -> str:
        """The name with control characters escaped; the token's number without a name."""
        if self.name is None:
            return str(self.token)
        return self.name if self.name.isprintable() else self.name.encode("unicode_escape").decode()


class DirectionEnds(NamedTuple):
    """Tokens at the two ends of a direction, the most extreme tokens first."""

    plus: tuple[DirectionToken, ...]
    minus: tuple[DirectionToken, ...]


class Direction(NamedTuple):
    """One pair of singular vectors.

    Attributes
    ----------
    singular_value, share
        σ_k, and σ_k² / Σ σ².
    first, second
        Ends of u_k and of v_k: queries and keys, or attended and written tokens.
    """

    singular_value: float
    share: float
    first: DirectionEnds
    second: DirectionEnds


@dataclass(frozen=True, repr=False)
class TokenDirections(Result):
    """The largest singular directions of a head's form, with tokens.

    Attributes
    ----------
    checkpoint, stack, layer, head, circuit
        The head, and ``qk`` or ``ov``.
    embeddings, unembeddings
        Names of the tables of the tokens of the first and of the second side.
    directions
        The directions, largest singular value first.
    caveat
        Sentences on the meaning of the directions.
    """

    checkpoint: str
    stack: str
    layer: int
    head: int
    circuit: str
    embeddings: str
    unembeddings: str
    directions: tuple[Direction, ...]
    caveat: str

    @property
    def sides(self) -> tuple[str, str]:
        """Names of the two sides."""
        return ("attended", "written") if self.circuit == "ov" else ("query", "key")

    @property
    def sentence(self) -> str:
        """The share of the largest direction."""
        return (
            f"{self.checkpoint}, {self.stack}, layer {self.layer}, head {self.head}: the largest "
            f"of its singular directions holds {self.directions[0].share:.0%} of the squared norm"
        )

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        for place, direction in enumerate(self.directions):
            for side, ends in zip(self.sides, (direction.first, direction.second), strict=True):
                for sign, tokens in (("plus", ends.plus), ("minus", ends.minus)):
                    for token in tokens:
                        yield {
                            "direction": place,
                            "singular_value": direction.singular_value,
                            "share": direction.share,
                            "side": side,
                            "end": sign,
                            **token._asdict(),
                            "checkpoint": display_name(self.checkpoint),
                            "stack": self.stack,
                            "layer": self.layer,
                            "head": self.head,
                            "circuit": self.circuit,
                        }

    def _shown(self, width: int) -> Iterator[Any]:
        """Yield a table with a line for each end of each direction."""
        head = f"{self.stack}, layer {self.layer}, head {self.head}, {self.circuit}"
        yield Text.assemble(
            (display_name(self.checkpoint), "bold"), f"\n{head}; {self.embeddings}\n"
        )
        first, second = self.sides
        columns = (f"{first} tokens", f"{second} tokens")
        table = Sheet.of("", "σ", "share", "end", *columns, text=["end", *columns])
        for place, direction in enumerate(self.directions):
            facts = (str(place), number(direction.singular_value), f"{direction.share:.0%}")
            table.add(*facts, "+", _listed(direction.first.plus), _listed(direction.second.plus))
            table.add(
                "", "", "", "−", _listed(direction.first.minus), _listed(direction.second.minus)
            )
        yield table
        yield Text(self.caveat, style="dim")


def _listed(tokens: Sequence[DirectionToken]) -> str:
    return " ".join(token.label for token in tokens[:TOKENS_SHOWN])


def direction_ends(
    coordinates: Float[np.ndarray, "tokens directions"], names: Mapping[int, str], top: int
) -> list[DirectionEnds]:
    """Return the tokens with the largest and smallest coordinates along each direction.

    Examples
    --------
    >>> (ends,) = direction_ends(np.array([[0.5], [-2.0], [1.0]]), {2: "of"}, 1)
    >>> ends.plus, ends.minus[0].token
    ((DirectionToken(token=2, coordinate=1.0, name='of'),), 1)
    """
    result = []
    for column in coordinates.T:
        order = np.argsort(column, kind="stable")
        minus = [DirectionToken(int(t), float(column[t]), names.get(int(t))) for t in order[:top]]
        plus = [
            DirectionToken(int(t), float(column[t]), names.get(int(t))) for t in order[::-1][:top]
        ]
        result.append(DirectionEnds(tuple(plus), tuple(minus)))
    return result
