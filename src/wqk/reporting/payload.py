"""Data of the page's script: scores, details and published values as one JSON object.

Numbers are rounded to six digits. Repeated strings, and the value of a constant column, are stored
once. Sentences of the page are computed from their numbers.
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

from wqk._console import counted
from wqk.reporting.summary import colors, page_number, with_minus_signs
from wqk.tables.details import BlockDetails, Details
from wqk.tables.schema import SCHEMA

if TYPE_CHECKING:
    from wqk.reporting.summary import Group


def outliers(rows: int, columns: int) -> str:
    """Count the rows and columns of a form with outlying norms, as a sentence.

    Examples
    --------
    >>> outliers(1, 5)
    '1 outlying row, 5 outlying columns.'
    """
    return f"{counted(rows, 'outlying row')}, {counted(columns, 'outlying column')}."


def strongest_pair(coupling: np.ndarray) -> str:
    """Describe the pair of heads closest to transposes of each other, up to the sign.

    If the coupling of this pair is negative, the largest positive coupling is added.

    Parameters
    ----------
    coupling
        (H, H); NaN for zero heads.

    Examples
    --------
    >>> parts = strongest_pair(np.array([[1, 0.4, -0.2], [0.4, 1, -0.9], [-0.2, -0.9, 1]]))
    >>> parts.split("; ")[:2]
    ['strongest pair 1 and 2: -0.90 (minus the transpose)', 'most positive 0 and 1: 0.40']
    >>> strongest_pair(np.ones((1, 1)))
    'no two heads to compare'
    """
    first, second = np.triu_indices(len(coupling), 1)
    is_finite = np.isfinite(coupling[first, second])
    first, second = first[is_finite], second[is_finite]
    values = coupling[first, second]
    if not len(values):
        return "no two heads to compare"
    best = np.argmax(np.abs(values))
    description = f"strongest pair {first[best]} and {second[best]}: {values[best]:.2f}"
    if values[best] < 0:
        description += " (minus the transpose)"
        most = np.argmax(values)
        if values[most] > 0:
            description += f"; most positive {first[most]} and {second[most]}: {values[most]:.2f}"
    return f"{description}; {np.mean(values > 0):.0%} of pairs positive"


def training_result(
    name: str,
    step: int,
    first_losses: Sequence[float],
    losses: Sequence[float],
    first_symmetries: Sequence[float],
    symmetries: Sequence[float],
) -> str:
    """Describe the change of loss and symmetry in training, over the seeds of a recipe.

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
    results = [f"the loss {_change(before, after, 3)} nats{spread}"]
    if symmetries:
        first_symmetry, last_symmetry = float(np.mean(first_symmetries)), float(np.mean(symmetries))
        results.append(f"the median symmetry {_change(first_symmetry, last_symmetry, 2)}")
    head = f"{name}, {counted(len(losses), 'seed')}, {counted(step, 'step')}"
    return f"{head}: {', '.join(results)}."


def _change(before: float, after: float, decimals: int) -> str:
    """Describe the change of a number, at the precision of the printed decimals."""
    first, last = page_number(before, decimals), page_number(after, decimals)
    if first == last:
        return f"stayed at {last}"
    verb = "rose" if after > before else "fell"
    return f"{verb} from {first} to {last}"


# Pixels of all images together, and bins of a vector of norms. More would make the file too large
# to send, and would look the same.
PIXELS = 4_000_000
NORM_BINS = 512

# At most this many outlying rows and columns are marked per layer, the largest.
MARKED = 32


def payload(
    groups: Sequence[Group], details: Sequence[Details], published: Any, losses: Sequence[Any] = ()
) -> str:
    """Return the JSON object, safe inside a script element; leaves out details without a group."""
    blocks = _blocks_of_groups(groups, details)
    side = max(64, math.isqrt(PIXELS // max(1, len(blocks))))
    columns = dict.fromkeys(chain.from_iterable(group.rows.columns for group in groups))
    data_of_groups = []
    for group, color in zip(groups, colors(groups), strict=True):
        rows = {name: _column(group.rows[name]) for name in group.rows.columns}
        data_of_groups.append(
            {"label": group.label, "color": color, "rows": rows, "count": group.rows.height}
        )
    data = {
        "extra": [name for name in columns if name not in SCHEMA],
        "groups": data_of_groups,
        "details": [
            {"group": number, **asdict(block.key), **_pictures(block, side)}
            for number, block in blocks
        ],
        "published": published,
        "losses": list(losses),
    }
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return in_script(text)


def in_script(text: str) -> str:
    """Escape JSON, so that no text ends the script element or begins a comment.

    Examples
    --------
    >>> "<" in in_script('"</script>"'), json.loads(in_script('"</script>"'))
    (False, '</script>')
    """
    return text.replace("<", "\\u003c")


def digits(value: float) -> float | None:
    """Return a number rounded to six digits; None for NaN and infinity.

    Examples
    --------
    >>> digits(1 / 3), digits(float("nan"))
    (0.333333, None)
    """
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _column(values: pl.Series) -> dict[str, Any]:
    """Return a column in its shortest form: one value, a list of words and indices, or a list."""
    if values.dtype == pl.Float64:
        return {"values": [None if value is None else digits(value) for value in values]}
    if values.n_unique() <= 1:
        return {"all": values[0] if len(values) else None}
    if values.dtype == pl.String:
        strings = values.unique(maintain_order=True).to_list()
        code = {string: index for index, string in enumerate(strings)}
        return {"words": strings, "codes": [code[string] for string in values]}
    return {"values": values.to_list()}


def _blocks_of_groups(
    groups: Sequence[Group], details: Sequence[Details]
) -> list[tuple[int, BlockDetails]]:
    """Return the blocks of layers in the tables, each with the number of its group."""
    columns = ("checkpoint", "revision", "step", "stack", "kind", "layer", "circuit", "distance")
    group_of: dict[tuple[Any, ...], int] = {}
    for index, group in enumerate(groups):
        group_of |= dict.fromkeys(group.rows.select(columns).iter_rows(), index)
    blocks: dict[tuple[Any, ...], BlockDetails] = {}
    for block in chain.from_iterable(detail_set.blocks for detail_set in details):
        key = tuple(getattr(block.key, name) for name in columns)
        if key in group_of:
            blocks.setdefault(key, block)
    return [(group_of[key], block) for key, block in blocks.items()]


def _pictures(block: BlockDetails, side: int) -> dict[str, Any]:
    """Return a block's images and norms, reduced to the size on screen."""
    pixels = _fewer(_fewer(block.image, side, axis=0), side, axis=1)
    pair = ""
    coupling = None
    if block.coupling is not None:
        pair = with_minus_signs(f"{strongest_pair(block.coupling).capitalize()}.")
        coupling = []
        for row in block.coupling.tolist():
            coupling.append([digits(round(value, 3)) for value in row])
    return {
        "rows": len(block.row_norms),
        "columns": len(block.column_norms),
        "image": base64.b64encode(pixels.tobytes()).decode(),
        "shape": pixels.shape,
        "unit": digits(block.image_unit),
        "row_norms": [digits(norm) for norm in _fewer(block.row_norms, NORM_BINS).tolist()],
        "column_norms": [digits(norm) for norm in _fewer(block.column_norms, NORM_BINS).tolist()],
        "outlying_rows": _largest(block.outlying_rows, block.row_norms),
        "outlying_columns": _largest(block.outlying_columns, block.column_norms),
        "row_mean": digits(block.row_norms.mean()),
        "column_mean": digits(block.column_norms.mean()),
        "said": outliers(len(block.outlying_rows), len(block.outlying_columns)),
        "pair": pair,
        "coupling": coupling,
    }


def _fewer(values: np.ndarray, length: int, axis: int = 0) -> np.ndarray:
    """Reduce an axis to ``length`` bins; the value of a bin is its entry of largest magnitude."""
    size = values.shape[axis]
    if size <= length:
        return values
    ends = np.linspace(0, size, length + 1).round().astype(int)
    starts = ends[:-1]
    highest = np.maximum.reduceat(values, starts, axis)
    lowest = np.minimum.reduceat(values, starts, axis)
    return np.where(highest >= -lowest, highest, lowest)


def _largest(numbers: np.ndarray, norms: np.ndarray) -> list[tuple[int, float | None]]:
    """Return the numbers and norms of the most outlying rows or columns."""
    chosen = numbers[np.argsort(-norms[numbers])][:MARKED]
    return [(int(number), digits(norms[number])) for number in chosen]
