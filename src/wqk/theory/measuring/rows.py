"""One row of numbers for each batch and layer, and what is said of them in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wqk.theory.gradients import LayerGradient

Row = dict[str, Any]


def rows_of(
    batches: Sequence[Sequence[LayerGradient]], measure: Callable[[LayerGradient], Any]
) -> tuple[Row, ...]:
    """What a function says of each self-attention layer on each batch: its attributes as a row."""
    return tuple(
        {"batch": index, **vars(measure(layer))}
        for index, layers in enumerate(batches)
        for layer in layers
        if layer.attention.plan.kind == "self"
    )


def by_layer(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Medians over batches, one for each layer, in their order; NaN is left out.

    Examples
    --------
    >>> by_layer([{"layer": 0, "s": 1.0}, {"layer": 1, "s": 5.0}, {"layer": 0, "s": 2.0}], "s")
    array([1.5, 5. ])
    """
    layers = sorted({row["layer"] for row in rows})
    values = [[row[name] for row in rows if row["layer"] == layer] for layer in layers]
    return np.array([np.nanmedian(some) if np.isfinite(some).any() else np.nan for some in values])


def span(rows: Sequence[Mapping[str, Any]], name: str, form: str = "+.2f") -> str:
    """The layers' medians from the smallest to the largest.

    Examples
    --------
    >>> span([{"layer": 0, "s": 0.25}, {"layer": 1, "s": -0.5}], "s")
    '-0.50 to +0.25'
    """
    values = by_layer(rows, name)
    low, high = (format(value, form) for value in (np.nanmin(values), np.nanmax(values)))
    return low if low == high else f"{low} to {high}"
