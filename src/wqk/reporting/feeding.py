"""Which heads feed which, as a section of a report: arcs that tell their pair, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import polars as pl

from wqk._console import number
from wqk.reporting.pictures.arcs import (
    KINDS,
    LABELED,
    attention,
    attention_names,
    attentions,
    head_count,
    strongest_pairs,
)
from wqk.tables.rendering import label
from wqk.tables.score_table import Table
from wqk.tables.sheet import Sheet

# Arcs and rows of each table, which bound the size of the page.
ARCS, ROWS = 40, 20

# Of the drawing, in its own units.
WIDTH, MARGIN, TOP, BOTTOM = 1000, 50, 30, 56
ROW, LEAST = 14, 160  # heights of a head, and of all at least


def feeding_section(tables: Sequence[Table]) -> str:
    """A drawing and a table for each table of `wqk.compose`, as HTML; empty if there are none."""
    if not tables:
        return ""
    parts = "".join(_part(table.frame) for table in tables)
    return (
        f'<section id="feeding"><h2>Heads that feed heads</h2>{parts}<p class="caption">The pairs '
        "whose composition exceeds chance most: the later head reads what the earlier one writes, "
        "with its queries (Q), keys (K) or values (V). Layers across, heads down; thicker arcs "
        "exceed chance by more; point at one for its numbers. p is the probability of such a score "
        "by chance, corrected for all pairs. A large score says that the weights fit, not that a "
        "text makes use of them.</p></section>"
    )


def _part(frame: pl.DataFrame) -> str:
    if frame.filter(pl.col("excess") > 0).is_empty():
        return "<p>No pair of heads has a score above chance.</p>"
    strongest = strongest_pairs(frame, ARCS)
    sheet = Sheet.of(
        "read with", "writer", "reader", "score", "by chance", "z", "p", text=["read with"]
    )
    for row in strongest.head(ROWS).iter_rows(named=True):
        sheet.add(row["kind"].upper(), _name(row, "writer"), _name(row, "reader"), *_numbers(row))
    heading = escape(label(frame["checkpoint"][0]))
    return (
        f"<h3>{heading}</h3>{_legend(strongest)}"
        f"{_wide('Arcs', _drawing(frame, strongest))}<details><summary>The strongest pairs, in "
        f"numbers</summary>{_wide('Pairs of heads', sheet.html())}</details>"
    )


def _wide(name: str, content: str) -> str:
    return f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{content}</div>'


def _numbers(row: Mapping[str, Any]) -> list[str]:
    p = row["p_corrected"]
    return [
        number(row["score"]),
        number(row["expected"]),
        number(row["z"], 1),
        "–" if p is None else f"{p:.1g}",
    ]


def _name(row: Mapping[str, Any], end: str) -> str:
    """A head as LAYER.HEAD, with what distinguishes its attention."""
    head = row[f"{end}_head"]
    words = [row[f"{end}_stack"]] if row["writer_stack"] != row["reader_stack"] else []
    words += ["cross"] if row[f"{end}_attention"] == "cross" else []
    return " ".join([*words, f"{row[f'{end}_layer']}" + ("" if head is None else f".{head}")])


def _legend(strongest: pl.DataFrame) -> str:
    there = [kind for kind in KINDS if kind in set(strongest["kind"])]
    entries = ", ".join(
        f'<span class="arc-{kind}">━</span> read by {KINDS[kind][1]}' for kind in there
    )
    return f'<p class="caption">{entries}</p>'


def _drawing(frame: pl.DataFrame, strongest: pl.DataFrame) -> str:
    """Layers across and heads down, as dotted lines, and an arc from each writer to its reader."""
    order, heads = attentions(frame), head_count(frame)
    names = attention_names(order)
    step = (WIDTH - 2 * MARGIN) / max(1, len(order) - 1)
    at = {place: MARGIN + step * n for n, place in enumerate(order)}
    line = max(ROW, LEAST // heads)  # from one head to the next
    height = TOP + line * (heads - 1) + BOTTOM
    parts = []
    turned = any(" " in name for name in names)
    for place, name in zip(order, names, strict=True):
        x = at[place]
        parts.append(
            f'<path class="heads" d="M{x:.0f} {TOP}v{line * (heads - 1) + 0.1:g}" '
            f'stroke-dasharray="0 {line}"/>'
        )
        low = height - 20
        turn = f' text-anchor="end" transform="rotate(-35 {x:.0f} {low})"' if turned else ""
        parts.append(f'<text x="{x:.0f}" y="{low}"{turn}>{escape(name)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{height - 3}">layer</text>')
    largest = float(strongest["excess"][0])
    labels: dict[tuple[float, float, str], str] = {}
    # The strongest last, on top of the others.
    for rank, row in reversed(list(enumerate(strongest.iter_rows(named=True)))):
        (x, y), (u, v) = (
            (at[attention(row, end)], TOP + line * (row[f"{end}_head"] or 0))
            for end in ("writer", "reader")
        )
        share = row["excess"] / largest
        bend = min(60, 12 + 0.12 * abs(u - x)) * (1 if v < y else -1)
        middle = (x + u) / 2, (y + v) / 2 + bend
        score, expected, z, p = _numbers(row)
        told = (
            f"{row['kind'].upper()}: {_name(row, 'writer')} → {_name(row, 'reader')}, score "
            f"{score} (by chance {expected}), z {z}, p {p}"
        )
        kind = f"arc-{row['kind']}"
        curve = f"M{x:.0f} {y}Q{middle[0]:.0f} {middle[1]:.0f} {u:.0f} {v}"
        thick = f'stroke-width="{0.8 + 3.2 * share:.1f}" opacity="{0.35 + 0.65 * share:.2f}"'
        parts += [
            f'<path class="arc {kind}" d="{curve}" {thick}><title>{escape(told)}</title></path>',
            f'<circle class="{kind}" cx="{u:.0f}" cy="{v}" r="{1.5 + 2 * share:.1f}"/>',
        ]
        if rank < LABELED:
            labels[x - 6, y + 4, "end"] = _name(row, "writer")
            labels[u + 6, v + 4, "start"] = _name(row, "reader")
    parts += [
        f'<text class="end" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(name)}</text>'
        for (x, y, anchor), name in labels.items()
    ]
    return (
        f'<svg class="arcs" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="'
        f'{strongest.height} strongest pairs of {frame.height:,}">{"".join(parts)}</svg>'
    )
