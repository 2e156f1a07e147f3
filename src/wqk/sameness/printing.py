"""Lines that the command prints for a comparison: sentence, table of distances, causes, repair."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from wqk._console import display_name, spans
from wqk.sameness.blocks import DISTANCES
from wqk.sameness.mismatches import Kind
from wqk.sameness.places_in_words import places_in_words
from wqk.sameness.sentences import commented, differ_in_settings_alone, outcome
from wqk.sameness.tensor_names import title_in_block
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    from wqk.sameness.comparisons import BlockComparison, Cause, Comparison

# Tensors without a known cause that are printed.
MOST_TENSORS = 8
# The footnote of the table of distances.
FOOTNOTE = (
    "relative distance, ‖reference − candidate‖ / ‖reference‖, of the head that differs most; "
    "N tokens from query to key"
)
# Lists of more than 16 numbers: the first three, and the last two.
LONG_LIST = re.compile(r"\[(\d+,\s+\d+,\s+\d+)(?:,\s+\d+){12,},\s+(\d+,\s+\d+)\]")
SHORTENED = "# […]: a long list, shortened here; --json and .repair have all of it"
# Added to the footnote if no block is compared at the usual largest distance.
FEWER_POSITIONS = "; the largest N is the last position that both models have"


def printed(comparison: Comparison) -> Iterator[Any]:
    """Yield the verdict, then each cause with its layers, the distances, and the repair.

    If a repaired copy was written, its outcome replaces the distances and the code of the repair.
    """
    reference, candidate = display_name(comparison.reference), display_name(comparison.candidate)
    yield Text.assemble((reference, "bold"), "  and  ", (candidate, "bold"))
    yield outcome(comparison, with_causes=False)
    for note in comparison.notes:
        yield Text(note, style="dim")
    yield from map(_line_of_cause, comparison.causes)
    yield from _unexplained_tensors(comparison)
    for blocks in comparison.alone:
        yield f"only in {blocks.model}: {places_in_words(blocks.places)}"
    if comparison.adapter:
        yield comparison.adapter
    if comparison.repaired is not None:
        yield ""
        yield comparison.repaired.summary
        return
    differing = comparison.different_blocks
    if differing and not differ_in_settings_alone(differing):
        yield table_of_distances(comparison)
        yield Text(_footnote(comparison.blocks), style="dim")
    if comparison.repair:
        yield ""
        yield _code(with_short_lists(commented(comparison.repair)))


def _line_of_cause(cause: Cause) -> Text:
    """Return the reason of a cause, sides that are not in the reason, and the layers."""
    reason = cause.mismatch.reason
    place = f", {cause.where}"
    if cause.verdict is Kind.LAYER and not cause.outside:
        # The reason has the number of another layer.
        return Text.assemble("• ", f"{cause.where}: ", (reason, "bold"))
    if cause.verdict is Kind.ADAPTER:
        # The sides of a merge are those of scores alone.
        names = {} if cause.outside else cause.mismatch.facts.get("tensors", {})
        titles = ", ".join(dict.fromkeys(map(title_in_block, names)))
        place = f" ({titles}){place}" if titles else place
    elif not any(side in reason for side in cause.mismatch.sides):
        sides = " and ".join(cause.mismatch.sides)
        place = f" ({sides}){place}" if sides else place
    return Text.assemble("• ", (reason, "bold"), place)


def _unexplained_tensors(comparison: Comparison) -> Iterator[Text | str]:
    """Yield a line for each of the first tensors without a known cause."""
    tensors = comparison.unexplained
    for tensor in tensors[:MOST_TENSORS]:
        yield Text.assemble("• ", (tensor.title, "bold"), f": {tensor.reason or tensor.outcome}")
    remaining = len(tensors) - MOST_TENSORS
    if remaining > 0:
        yield f"and {remaining} more tensors that differ (--json lists them)"


def table_of_distances(comparison: Comparison) -> Sheet:
    """Return a table of the distances of blocks that differ; blocks of equal causes are one row."""
    groups: dict[tuple[str, ...], list[BlockComparison]] = {}
    for block in comparison.different_blocks:
        kinds = [str(mismatch.verdict) for mismatch in block.mismatches]
        key = (block.stack, block.kind, *kinds, *block.unequal)
        groups.setdefault(key, []).append(block)
    positions: dict[int, None] = {}
    circuits: dict[str, None] = {}
    for block in comparison.blocks:
        positions |= dict.fromkeys(block.distance)
        circuits |= dict.fromkeys(block.beside)
    scores = [f"scores, N={position}" for position in positions]
    sheet = Sheet.of("attention", "layers", *scores, *circuits, text=["attention", "layers"])
    for blocks in groups.values():
        cells = []
        for position in positions:
            cells.append(_largest(block.distance.get(position) for block in blocks))
        for circuit in circuits:
            cells.append(_largest(block.beside.get(circuit) for block in blocks))
        layers = spans([block.layer for block in blocks])
        sheet.add(f"{blocks[0].stack} {blocks[0].kind}", layers, *cells)
    return sheet


def _footnote(blocks: Sequence[BlockComparison]) -> str:
    """Return the footnote of the table of distances."""
    distances = {distance for block in blocks for distance in block.distance}
    is_short = distances != {0} and max(distances, default=0) < DISTANCES[-1]
    return FOOTNOTE + FEWER_POSITIONS if is_short else FOOTNOTE


def _largest(distances: Iterable[float | None]) -> str:
    """Return the largest distance as text; a dash if no distance is known.

    The distance of blocks with different numbers of heads is NaN.

    Examples
    --------
    >>> _largest([0.5, None, 0.25]), _largest([float("nan"), None])
    ('5.0e-01', '–')
    """
    known = [
        distance for distance in distances if distance is not None and not math.isnan(distance)
    ]
    return f"{max(known):.1e}" if known else "–"


def with_short_lists(code: str) -> str:
    """Return code with its long lists of numbers shortened, and a comment that says so.

    Examples
    --------
    >>> print(with_short_lists(f"w = w[{[*range(20)]}]"))
    # […]: a long list, shortened here; --json and .repair have all of it
    w = w[[0, 1, 2, …, 18, 19]]
    """
    shortened = LONG_LIST.sub(r"[\1, …, \2]", code)
    if shortened == code:
        return code
    return f"{SHORTENED}\n{shortened}"


def _code(text: str) -> Text:
    """Return code as text that is neither wrapped nor indented, for copying."""
    return Text(text, no_wrap=True, overflow="ignore")
