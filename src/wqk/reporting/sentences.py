"""Sentences that a report writes from data, each a function of the numbers that it states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from wqk._console import counted, number

# At most this many dimensions are named.
NAMED = 6


def outliers(rows: int, columns: int) -> str:
    """How many rows and columns of a form have outlying norms.

    Examples
    --------
    >>> outliers(1, 5)
    '1 outlying row, 5 outlying columns.'
    """
    return f"{counted(rows, 'outlying row')}, {counted(columns, 'outlying column')}."


def strongest_pair(coupling: np.ndarray) -> str:
    """The two heads closest to being each other's transposes, and the share of positive pairs.

    Parameters
    ----------
    coupling
        (H, H); NaN where a head is zero.

    Examples
    --------
    >>> strongest_pair(np.array([[1.0, 0.4, -0.2], [0.4, 1.0, 0.9], [-0.2, 0.9, 1.0]]))
    'Strongest pair: heads 1 and 2, 0.90; 67 % of pairs are positive.'
    >>> strongest_pair(np.ones((1, 1)))
    'A single head.'
    """
    if len(coupling) < 2:
        return "A single head."
    first, second = np.triu_indices(len(coupling), 1)
    values = coupling[first, second]
    known = np.isfinite(values)
    if not known.any():
        return "No two heads to compare: the others are zero."
    first, second, values = first[known], second[known], values[known]
    best = int(np.argmax(values))
    strength = number(float(values[best]), 2).replace("-", "−")
    return (
        f"Strongest pair: heads {first[best]} and {second[best]}, {strength}; "
        f"{round(100 * float(np.mean(values > 0)))} % of pairs are positive."
    )


def recurring(layers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> str:
    """The dimensions whose row or column is an outlier in more than half of the layers.

    Parameters
    ----------
    layers
        Of each layer, its outlying rows and its outlying columns.

    Examples
    --------
    >>> recurring([([46], []), ([46], [7]), ([], [7, 46])])
    'In most of the 3 layers: dimension 46 (row in 2, column in 1), 7 (column in 2).'
    >>> recurring([([46], []), ([46], []), ([], [7]), ([], [8])])
    'No dimension is an outlier in most of the 4 layers.'
    >>> recurring([([], [3])])
    'In the only layer: dimension 3 (column).'
    """
    rows = Counter(place for outlying, _ in layers for place in set(outlying))
    columns = Counter(place for _, outlying in layers for place in set(outlying))
    either = Counter(place for a, b in layers for place in {*a, *b})
    ordered = sorted(either, key=lambda place: (-either[place], place))
    often = [place for place in ordered if 2 * either[place] > len(layers)]
    where = "the only layer" if len(layers) == 1 else f"most of the {len(layers)} layers"
    if not often:
        return f"No dimension is an outlier in {where}."
    named = []
    for place in often[:NAMED]:
        sides = [("row", rows[place]), ("column", columns[place])]
        told = (f"{side} in {n}" if len(layers) > 1 else side for side, n in sides if n)
        named.append(f"{place} ({', '.join(told)})")
    more = len(often) - len(named)
    rest = f", and {more} more" if more else ""
    return f"In {where}: dimension {', '.join(named)}{rest}."


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
