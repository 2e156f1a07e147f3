"""The data of the page's script: scores, details and published values as one JSON object.

Numbers are rounded to six digits; repeated strings, and the value of a constant column, are stored
once.

Sentences among them are functions of the numbers that they state.
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

from wqk._console import counted, number
from wqk.reporting.summary import colors
from wqk.tables.details import BlockDetails, Details
from wqk.tables.score_table import SCHEMA

if TYPE_CHECKING:
    from wqk.reporting.summary import Group


def outliers(rows: int, columns: int) -> str:
    """How many rows and columns of a form have outlying norms.

    Examples
    --------
    >>> outliers(1, 5)
    '1 outlying row, 5 outlying columns.'
    """
    return f"{counted(rows, 'outlying row')}, {counted(columns, 'outlying column')}."


def strongest_pair(coupling: np.ndarray) -> str:
    """Return the two heads closest to being each other's transposes, up to their sign.

    Parameters
    ----------
    coupling
        (H, H); NaN where a head is zero.

    Examples
    --------
    >>> strongest_pair(np.array([[1.0, 0.4, -0.2], [0.4, 1.0, -0.9], [-0.2, -0.9, 1.0]]))
    'strongest pair 1 and 2: -0.90; 33% of pairs positive'
    >>> strongest_pair(np.ones((1, 1)))
    'no two heads to compare'
    """
    first, second = np.triu_indices(len(coupling), 1)
    known = np.isfinite(coupling[first, second])
    first, second = first[known], second[known]
    values = coupling[first, second]
    if not len(values):
        return "no two heads to compare"
    best = np.argmax(np.abs(values))
    return (
        f"strongest pair {first[best]} and {second[best]}: {values[best]:.2f}; "
        f"{np.mean(values > 0):.0%} of pairs positive"
    )


def training_result(
    name: str,
    step: int,
    first_losses: Sequence[float],
    losses: Sequence[float],
    first_symmetries: Sequence[float],
    symmetries: Sequence[float],
) -> str:
    """What training did to loss and symmetry, over the seeds of one recipe.

    Examples
    --------
    >>> training_result("encoder", 4000, [4.2, 4.2], [1.6, 1.7], [0.0, 0.02], [0.6, 0.62])
    'encoder, 2 seeds, 4,000 steps: the loss fell from 4.200 to 1.650 nats (1.600 to 1.700 ...'
    >>> training_result("decoder", 10, [4.0], [4.5], [], [])
    'decoder, 1 seed, 10 steps: the loss rose from 4.000 to 4.500 nats.'
    >>> training_result("decoder", 0, [], [], [], [])
    'decoder: nothing was logged.'
    """
    if not losses:
        return f"{name}: nothing was logged."
    before, after = float(np.mean(first_losses)), float(np.mean(losses))
    spread = ""
    if len(losses) > 1:
        spread = f" ({min(losses):.3f} to {max(losses):.3f} over seeds)"
    told = [f"the loss {_change(before, after, 3)} nats{spread}"]
    if symmetries:
        one, other = float(np.mean(first_symmetries)), float(np.mean(symmetries))
        told.append(f"the median symmetry {_change(one, other, 2)}")
    head = f"{name}, {counted(len(losses), 'seed')}, {counted(step, 'step')}"
    return f"{head}: {', '.join(told)}."


def _change(before: float, after: float, decimals: int) -> str:
    """Whether a number rose, fell or stayed, at the decimals that are printed."""
    first, last = number(before, decimals), number(after, decimals)
    if first == last:
        return f"stayed at {last}"
    return f"{'rose' if after > before else 'fell'} from {first} to {last}"


# Pixels of all images together, and bins of a vector of norms: more would look the same, in a file
# too large to send.
PIXELS = 4_000_000
BINS = 512

# At most this many outlying rows and columns are marked per layer, the largest.
MARKED = 32


def payload(
    groups: Sequence[Group], details: Sequence[Details], published: Any, losses: Sequence[Any] = ()
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
                "rows": {name: _column(group.rows[name]) for name in group.rows.columns},
                "count": group.rows.height,
            }
            for group, color in zip(groups, colors(groups), strict=True)
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
    """Return a number to six digits; None for NaN and infinity.

    Examples
    --------
    >>> digits(1 / 3), digits(float("nan"))
    (0.333333, None)
    """
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _column(values: pl.Series) -> dict[str, Any]:
    """Return a column in its shortest form: a single value, words and their indices, or a list."""
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
    """Return the blocks of layers in the tables, each after the number of its group."""
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


def _pictures(block: BlockDetails, side: int) -> dict[str, Any]:
    """Return a block's images and norms, reduced to what a screen shows."""
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
        "pair": "" if coupling is None else f"{strongest_pair(coupling).capitalize()}.",
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
