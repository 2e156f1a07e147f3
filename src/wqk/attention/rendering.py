"""Explanations and verifications as a terminal, a prompt and a notebook show them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.attention.explanation import Explanation
    from wqk.attention.verification.comparison import Verification, VerifiedBlock


def size(count: float) -> str:
    """A readable number of bytes, in decimal units.

    Examples
    --------
    >>> size(28_311_552)
    '28.3 MB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def explanation_lines(explanation: Explanation) -> Iterator[Any]:
    """The tensors of a scan, and what the form does not hold."""
    yield Text.assemble(
        (explanation.checkpoint, "bold"),
        f"\nmodel type {explanation.model_type or 'unknown'} → family {explanation.family}\n",
    )
    for (stack, kind, layers), uses in groupby(
        explanation.uses, key=lambda use: (use.stack, use.kind, use.layers)
    ):
        yield Text(f"{stack} {kind}-attention, layers {layers}")
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for heading in ("role", "tensor", "layout", "heads", "stored", "bytes"):
            table.add_column(heading, overflow="fold")
        for use in uses:
            stored = f"{use.dtype} {'×'.join(map(str, use.shape))}"
            table.add_row(use.role, use.tensor, use.layout, use.heads, stored, size(use.bytes))
        yield table
        yield ""
    for note in explanation.notes:
        yield Text(f"• {note}")
    share = explanation.bytes_to_read / max(1, explanation.bytes_stored)
    yield Text(
        f"\nA scan reads {size(explanation.bytes_to_read)} of {size(explanation.bytes_stored)} "
        f"({share:.1%})."
    )


def verification_lines(result: Verification) -> Iterator[Any]:
    """One line for each block and application, and the verdict."""
    yield Text.assemble((result.checkpoint, "bold"), f"\nfamily {result.family}\n")
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("attention", "layer", "largest difference", "largest score", "ceiling", ""):
        table.add_column(heading, justify="left" if heading in ("attention", "") else "right")
    for block in result.blocks:
        layer = str(block.layer) + (f", use {block.application}" if block.application else "")
        verdict = "" if block.ok else "WRONG"
        if block.difference <= block.tolerance and not block.ok:
            verdict = "too uniform to tell"
        cells = (f"{block.stack} {block.kind}", layer, f"{block.difference:.1e}", *_scores(block))
        table.add_row(*cells, Text(verdict, style="bold red"))
    yield table
    yield Text(
        "\nThe forms give the model's own attention: largest difference of a probability "
        f"{result.difference:.1e}, in float64."
        if result.ok
        else "\nThe forms do NOT give the model's own attention; its scores are not to be believed."
    )


def _scores(block: VerifiedBlock) -> tuple[str, str]:
    """The largest score of this input and of any, and how many times the first the second is."""
    if block.ceiling is None:
        return f"{block.largest_score:.3g}", "–"
    times = block.ceiling / block.largest_score
    return f"{block.largest_score:.3g}", f"{block.ceiling:.3g} (× {times:.1f})"
