"""The data of the page's script: scores, details and published values as one JSON object.

Numbers are rounded to six digits; repeated strings, and the value of a constant column, are stored
once.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk.reporting.row_groups import colors
from wqk.reporting.sentences import outliers, recurring, strongest_pair
from wqk.tables.details import BlockDetails, Details
from wqk.tables.schema import SCHEMA

if TYPE_CHECKING:
    from wqk.reporting.row_groups import Group

# Pixels of all images together, and bins of a vector of norms: more would look the same, in a file
# too large to send.
PIXELS = 4_000_000
BINS = 512

# At most this many outlying rows and columns are marked per layer, the largest.
MARKED = 32


def payload(
    groups: Sequence[Group],
    details: Sequence[Details],
    published: Any,
    losses: Sequence[Any] = (),
) -> str:
    """The JSON object, safe inside a script element, without details of layers in no group."""
    owned = _owned(groups, details)
    side = max(64, math.isqrt(PIXELS // max(1, len(owned))))
    columns = dict.fromkeys(name for group in groups for name in group.rows.columns)
    data = {
        "extra": [name for name in columns if name not in SCHEMA],
        "groups": [
            {
                "label": group.label,
                "color": color,
                "recurring": _recurring(owned, number),
                "rows": {name: _column(group.rows[name]) for name in group.rows.columns},
                "count": group.rows.height,
            }
            for number, (group, color) in enumerate(zip(groups, colors(groups), strict=True))
        ],
        "details": [
            {"group": number, **asdict(block.key), **_pictures(block, side)}
            for number, block in owned
        ],
        "published": published,
        "losses": list(losses),
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return in_script(text)


def in_script(text: str) -> str:
    """JSON that can neither end its script element nor begin a comment.

    Examples
    --------
    >>> "<" in in_script('"</script>"'), json.loads(in_script('"</script>"'))
    (False, '</script>')
    """
    return text.replace("<", "\\u003c")


def digits(value: float) -> float | None:
    """A number to six digits; None for NaN and infinity.

    Examples
    --------
    >>> digits(1 / 3), digits(float("nan"))
    (0.333333, None)
    """
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _column(values: pl.Series) -> dict[str, Any]:
    """A column in its shortest form: a single value, words and their indices, or a list."""
    if values.dtype == pl.Float64:
        return {"values": [None if value is None else digits(value) for value in values]}
    if values.n_unique() <= 1:
        return {"all": values[0] if len(values) else None}
    if values.dtype == pl.String:
        words = values.unique(maintain_order=True).to_list()
        code = {word: index for index, word in enumerate(words)}
        return {"words": words, "codes": [code[word] for word in values]}
    return {"values": values.to_list()}


def _owned(groups: Sequence[Group], details: Sequence[Details]) -> list[tuple[int, BlockDetails]]:
    """The blocks of layers in the tables, each after the number of its group."""
    columns = ("checkpoint", "revision", "step", "stack", "kind", "layer", "circuit", "distance")
    owner = {
        key: number
        for number, group in enumerate(groups)
        for key in group.rows.select(columns).iter_rows()
    }
    layers: dict[tuple[Any, ...], BlockDetails] = {}
    for block in chain.from_iterable(part.blocks for part in details):
        key = tuple(getattr(block.key, name) for name in columns)
        if key in owner:
            layers.setdefault(key, block)
    return [(owner[key], block) for key, block in layers.items()]


def _recurring(owned: Sequence[tuple[int, BlockDetails]], group: int) -> list[dict[str, Any]]:
    """What is said of a group's outlying dimensions, at each of its steps and distances."""
    parts: dict[tuple[Any, Any], list[BlockDetails]] = {}
    for number, block in owned:
        if number == group:
            parts.setdefault((block.key.step, block.key.distance), []).append(block)
    return [
        {
            "step": step,
            "distance": distance,
            "said": recurring(
                [(b.outlying_rows.tolist(), b.outlying_columns.tolist()) for b in blocks]
            ),
        }
        for (step, distance), blocks in parts.items()
    ]


def _pictures(block: BlockDetails, side: int) -> dict[str, Any]:
    """A block's images and norms, reduced to what a screen shows."""
    pixels = _fewer(_fewer(block.image, side, axis=0), side, axis=1)
    coupling = block.coupling
    return {
        "rows": len(block.row_norms),
        "columns": len(block.column_norms),
        "image": base64.b64encode(pixels.tobytes()).decode(),
        "shape": pixels.shape,
        "unit": digits(block.image_unit),
        "row_norms": [digits(norm) for norm in _fewer(block.row_norms, BINS).tolist()],
        "column_norms": [digits(norm) for norm in _fewer(block.column_norms, BINS).tolist()],
        "outlying_rows": _largest(block.outlying_rows, block.row_norms),
        "outlying_columns": _largest(block.outlying_columns, block.column_norms),
        "row_mean": digits(block.row_norms.mean()),
        "column_mean": digits(block.column_norms.mean()),
        "said": outliers(len(block.outlying_rows), len(block.outlying_columns)),
        "pair": "" if coupling is None else strongest_pair(coupling),
        "coupling": None
        if coupling is None
        else [[digits(round(value, 3)) for value in row] for row in coupling.tolist()],
    }


def _fewer(values: np.ndarray, length: int, axis: int = 0) -> np.ndarray:
    """At most ``length`` values along an axis: of each bin, the largest in magnitude."""
    if values.shape[axis] <= length:
        return values
    starts = np.linspace(0, values.shape[axis], length + 1).round().astype(int)[:-1]
    highest = np.maximum.reduceat(values, starts, axis)
    lowest = np.minimum.reduceat(values, starts, axis)
    return np.where(highest >= -lowest, highest, lowest)


def _largest(numbers: np.ndarray, norms: np.ndarray) -> list[tuple[int, float | None]]:
    """Numbers and norms of the most outlying rows or columns."""
    chosen = numbers[np.argsort(-norms[numbers])][:MARKED]
    return [(int(number), digits(norms[number])) for number in chosen]
