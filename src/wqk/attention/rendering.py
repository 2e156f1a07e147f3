"""Explanations and verifications for terminals, prompts and notebooks."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from wqk._console import sheet

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
    """The tensors that a scan reads, and what the form leaves out."""
    yield Text.assemble(
        (explanation.checkpoint, "bold"),
        f"\nmodel type {explanation.model_type or 'unknown'} → family {explanation.family}\n",
    )
    for (stack, kind, layers), uses in groupby(
        explanation.uses, key=lambda use: (use.stack, use.kind, use.layers)
    ):
        yield Text(f"{stack} {kind}-attention, layers {layers}")
        headings = ("role", "tensor", "layout", "heads", "stored", "bytes")
        table = sheet(*headings, left=headings)
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
    headings = ("attention", "layer", "largest difference", "largest score", "ceiling", "")
    table = sheet(*headings, left=["attention", ""])
    for block in result.blocks:
        layer = str(block.layer) + (f", use {block.application}" if block.application else "")
        shown = block.difference if block.verdict == "right" else block.form_difference
        difference = "–" if shown is None else f"{shown:.1e}"
        cells = (f"{block.stack} {block.kind}", layer, difference, *_scores(block))
        table.add_row(*cells, SHORT[block.verdict])
    yield table
    if result.verdict == "not compared":
        yield from (Text(f"could not be run: {failure}") for failure in result.failures)
    yield Text("\n" + CONCLUSIONS[result.verdict].format(difference=result.difference))


# A block's verdict, and what the worst verdict says of the checkpoint.
SHORT = {
    "right": Text(""),
    "form right": Text("form right"),
    "only form right": Text("WRONG but for the form", style="bold red"),
    "wrong": Text("WRONG", style="bold red"),
    "too uniform to tell": Text("too uniform to tell", style="bold red"),
    "not compared": Text("not compared", style="bold red"),
}
CONCLUSIONS = {
    "right": "The forms give the model's own attention: largest difference of a probability "
    "{difference:.1e}, in float64.",
    "form right": "The forms are right, apart from positions, mask and scale, which are not "
    "known: they give the model's own products of queries and keys, up to a factor.",
    "only form right": "The forms are right, but positions, mask or scale are NOT what the family "
    "says: they do not give the model's own attention.",
    "wrong": "The forms do NOT give the model's own attention; its scores are not to be believed.",
    "too uniform to tell": "Some attention is so uniform that any weights would give it.",
    "not compared": "Not every attention could be compared: some did not run, or compute no "
    "product of all queries and keys.",
}


def _scores(block: VerifiedBlock) -> tuple[str, str]:
    """The largest score of this input and of any input, and their ratio."""
    if block.largest_score is None:
        return "–", "–"
    if block.ceiling is None or not block.largest_score:  # a form of zero
        return f"{block.largest_score:.3g}", "–"
    times = block.ceiling / block.largest_score
    return f"{block.largest_score:.3g}", f"{block.ceiling:.3g} (× {times:.1f})"
