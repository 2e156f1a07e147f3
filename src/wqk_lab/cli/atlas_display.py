"""What the atlas shows: rows, their flags, and comparisons with scans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from wqk._console import count, number
from wqk.cli import display
from wqk.tables.sheet import Sheet
from wqk_lab.atlas import Comparison, flags
from wqk_lab.atlas.agreement import TOLERANCES
from wqk_lab.atlas.ranks import marks, spread

if TYPE_CHECKING:
    import polars as pl

    Row = Mapping[str, Any]

# From these widths on, the checkpoints' ids are shown, and then the quartiles.
ROOM_FOR_MODELS = 100
ROOM_FOR_SPREADS = 140

STYLES = {"agrees": "bold green", "differs": "bold yellow", "artifact": "bold red"}


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
    if console.width < ROOM_FOR_MODELS:
        rows = apart(rows)
    letters = marks(rows)
    columns = _columns(console.width, letters, own=any(r["source"] == "own" for r in rows))
    table = Sheet.of(*columns, text=columns.keys() - TOLERANCES.keys())
    for row in rows:
        table.add(*(cell(row) for cell in columns.values()), style="" if row["sound"] else "dim")
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


def apart(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows whose name several checkpoints of a stack have, with the end of their id.

    Examples
    --------
    >>> rows = [{"name": "x", "stack": "encoder", "model": f"a/x-{size}"} for size in (224, 384)]
    >>> [row["name"] for row in apart(rows)], [row["name"] for row in apart(rows[:1])]
    (['x (x-224)', 'x (x-384)'], ['x'])
    """
    named: dict[tuple[Any, Any], set[Any]] = {}
    for row in rows:
        named.setdefault((row["name"], row["stack"]), set()).add(row["model"])
    return [
        {**row, "name": f"{row['name']} ({row['model'].rpartition('/')[2]})"}
        if len(named[row["name"], row["stack"]]) > 1 and row["model"]
        else dict(row)
        for row in rows
    ]


def _columns(width: int, letters: Mapping[str, str], own: bool) -> dict[str, Callable[[Row], str]]:
    """The text of a row's cell, by the heading of its column."""
    score = spread if width >= ROOM_FOR_SPREADS else lambda row, name: number(row[name], 2)
    columns: dict[str, Callable[[Row], str]] = {"name": lambda row: row["name"]}
    if width >= ROOM_FOR_MODELS:
        columns["checkpoint"] = lambda row: row["model"]
    if own:
        columns[""] = lambda row: "own" if row["source"] == "own" else ""
    return columns | {
        "stack": lambda row: row["stack"],
        "symmetry": lambda row: score(row, "symmetry"),
        "directionality": lambda row: score(row, "directionality"),
        "flags": lambda row: " ".join(sorted(letters[flag] for flag in row["flags"])),
    }


def print_model(
    compared: Sequence[tuple[Mapping[str, Any], Comparison | None]], as_json: bool
) -> None:
    """Rows in full, their flags explained, and below each the scan that it is compared with."""
    if as_json:
        parts = ("scan", "differences", "verdict")
        rows = [
            {**row, "comparison": found and {part: getattr(found, part) for part in parts}}
            for row, found in compared
        ]
        display.print_object({"rows": rows, "flags": _explained(rows)})
        return
    for row, comparison in compared:
        _print_row(row, comparison)


def _explained(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The flags of some rows in full, for JSON."""
    return {name: flags()[name].sentence for name in marks(rows)}


def _print_row(row: Mapping[str, Any], comparison: Comparison | None) -> None:
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
    if comparison:
        scan = comparison.scan
        table.add("scan", spread(scan, "symmetry"), spread(scan, "directionality"))
        changes = (
            f"{comparison.differences[score]:+.2f}" if score in comparison.differences else "–"
            for score in TOLERANCES
        )
        table.add("difference", *changes)
    console.print(table)
    for name in row["flags"]:
        console.print(Text(f"• {flags()[name].sentence}"))
    if comparison:
        console.print(Text.assemble((_verdict(comparison), STYLES[comparison.verdict]), "."))


def _verdict(comparison: Comparison) -> str:
    """A verdict in words, with its tolerances."""
    if comparison.verdict == "artifact":
        return "The published row is an artifact; the scan need not agree with it"
    tolerated = [f"{TOLERANCES[score]:.2f} of {score}" for score in comparison.differences]
    if comparison.verdict == "agrees":
        return f"The scan agrees with the published row, within {' and '.join(tolerated)}"
    beyond = " and ".join(f"{TOLERANCES[score]:.2f} of {score}" for score in comparison.beyond)
    return f"The scan differs from the published row, by more than {beyond}"
