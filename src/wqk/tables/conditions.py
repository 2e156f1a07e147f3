"""A description of the forms in a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wqk._console import spans

if TYPE_CHECKING:
    import polars as pl


def conditions(frame: pl.DataFrame, metadata: Mapping[str, Any], *, every: bool) -> list[str]:
    """Circuit, distances, norms, biases and gamma; without ``every`` only non-default ones.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.scan(wqk.demo_model("encoder"), bias=True, gamma=3.0)
    >>> ", ".join(conditions(table.frame, table.metadata, every=False))
    'biases included, gamma 3'
    >>> ", ".join(conditions(table.frame, table.metadata, every=True))
    'circuit qk, distance 0, norms not folded in, biases included, gamma 3'
    """
    return [words for words, is_usual in _conditions(frame, metadata) if every or not is_usual]


def _conditions(frame: pl.DataFrame, metadata: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each condition, and whether it is the default."""
    if "circuit" in frame.columns:
        circuits = frame["circuit"].drop_nulls().unique(maintain_order=True).to_list()
        if circuits:
            yield f"circuit {' and '.join(circuits)}", circuits == ["qk"]
        distances = sorted(frame["distance"].drop_nulls().unique().to_list())
        if distances:
            plural = "s" if len(distances) > 1 else ""
            yield f"distance{plural} {spans(distances)}", distances == [0]
    folded, biases, gamma = (metadata.get(k) for k in ("folded_norms", "biases", "gamma"))
    if folded is not None:
        yield f"norms {'' if folded else 'not '}folded in", not folded
    if biases is not None:
        yield f"biases {'included' if biases else 'left out'}", not biases
    if gamma is not None:
        yield f"gamma {gamma:g}", gamma == 2
