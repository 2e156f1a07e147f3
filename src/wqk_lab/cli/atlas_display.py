"""What the atlas shows: rows and their flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from wqk._console import count
from wqk.cli import display
from wqk.tables.sheet import Sheet
from wqk_lab.atlas import flags
from wqk_lab.atlas.ranks import marks, spread

if TYPE_CHECKING:
    import polars as pl

    Row = Mapping[str, Any]

SCORES = ("symmetry", "directionality")


def print_rows(frame: pl.DataFrame, as_json: bool) -> None:
    """One line for each row, and what the letters of their flags mean."""
    rows = frame.to_dicts()
    if as_json:
        display.print_object({"rows": rows, "flags": _explained(rows)})
        return
    if not rows:
        display.say("No row matches.")
        return
    rows = once(rows)
    console = display.output()
    letters = marks(rows)
    words = ("name", "checkpoint", "stack", "flags")
    table = Sheet.of(*words[:3], *SCORES, "flags", text=words)
    for row in rows:
        scores = (spread(row, score) for score in SCORES)
        cells = (row["name"], row["model"], row["stack"], *scores)
        flagged = " ".join(sorted(letters[flag] for flag in row["flags"]))
        table.add(*cells, flagged, style="" if row["sound"] else "dim")
    console.print(table)
    known = flags()
    for name, letter in letters.items():
        artifact = "; an artifact" if known[name].artifact else ""
        console.print(Text(f"{letter}: {known[name].title}{artifact}", style="dim"))
    console.print(
        Text(
            "Medians over layers; directionality by excess. wqk lab atlas NAME explains flags.",
            style="dim",
        )
    )


def once(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each model once, under all its printed names, where rows say the same of it.

    Examples
    --------
    >>> same = {"model": "a/b", "stack": "encoder", "symmetry": 0.5, "directionality": None}
    >>> same |= {"source": "published", "flags": []}
    >>> [row["name"] for row in once([{"name": "x", **same}, {"name": "y", **same}])]
    ['x, y']
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    told = ("model", "stack", "symmetry", "directionality", "source")
    for row in rows:
        key = (*(row[name] for name in told), tuple(row["flags"]))
        known = found.setdefault(key, {**row, "name": ""})
        names = [name for name in known["name"].split(", ") if name]
        known["name"] = ", ".join(dict.fromkeys([*names, row["name"]]))
    return list(found.values())


def print_model(rows: Sequence[Row], as_json: bool) -> None:
    """Rows in full, their flags explained."""
    if as_json:
        display.print_object({"rows": rows, "flags": _explained(rows)})
        return
    for row in rows:
        _print_row(row)


def _explained(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The flags of some rows in full, for JSON."""
    return {name: flags()[name].sentence for name in marks(rows)}


def _print_row(row: Row) -> None:
    console = display.output()
    about = [
        row["stack"],
        row["modality"],
        row["parameters"] and f"{count(row['parameters'])} parameters",
    ]
    console.print(
        Text.assemble(
            "\n",
            (row["name"], "bold"),
            f" · {row['model']}\n" if row["model"] != row["name"] else "\n",
            " · ".join(text for text in about if text),
        )
    )
    headings = ("", "symmetry", "directionality (excess)")
    table = Sheet.of(*headings, text=headings)
    table.add(row["source"], spread(row, "symmetry"), spread(row, "directionality"))
    console.print(table)
    for name in row["flags"]:
        console.print(Text(f"• {flags()[name].sentence}"))
