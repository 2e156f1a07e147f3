"""Display of the atlas: rows and their flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import polars as pl
from rich.text import Text

from wqk._console import count, counted, number
from wqk.tables.sheet import Sheet
from wqk_lab.atlas import flags
from wqk_lab.atlas.ranks import marks, spread

Row = Mapping[str, Any]

SCORES = ("symmetry", "directionality")


def listed(rows: Sequence[Row]) -> Iterator[Sheet | Text]:
    """Yield a table with a line for each model, and the meaning of the flags with their counts."""
    lines = once(rows)
    letters = marks(lines)
    text_columns = ("name", "checkpoint", "stack", "flags")
    table = Sheet.of(*text_columns[:3], *SCORES, "flags", text=text_columns)
    for row in lines:
        scores = (spread(row, score) for score in SCORES)
        cells = (row["name"], row["model"], row["stack"], *scores)
        flagged = " ".join(sorted(letters[flag] for flag in row["flags"]))
        table.add(*cells, flagged, style="" if row["sound"] else "dim")
    yield table
    for name, letter in letters.items():
        kind = "an artifact" if flags()[name].artifact else "no artifact, the numbers are sound"
        counts = _rows_with(name, rows)
        yield Text(f"{letter}: {flags()[name].title}; {kind} ({counts})", style="dim")
    if len(lines) < len(rows):
        yield Text(
            f"{len(lines)} lines for {len(rows)} rows of CSV and JSON: printed names of one model "
            "with the same numbers share a line.",
            style="dim",
        )
    note = "Medians over layers; directionality by excess. wqk lab atlas NAME explains flags."
    yield Text(note, style="dim")


def _rows_with(flag: str, rows: Sequence[Row]) -> str:
    """Return the number of rows with a flag, and the number of these rows in the paper's tables.

    Examples
    --------
    >>> rows = [{"flags": ["fused-tensor"], "printed": printed} for printed in (True, False)]
    >>> _rows_with("fused-tensor", rows), _rows_with("fused-tensor", rows[:1])
    ('2 rows, 1 printed in Tables S2 and S3', '1 row, printed in Tables S2 and S3')
    """
    is_printed = [row["printed"] for row in rows if flag in row["flags"]]
    counts = counted(len(is_printed), "row")
    if all(is_printed):
        return f"{counts}, printed in Tables S2 and S3"
    if not any(is_printed):
        return f"{counts}, not printed in a table"
    return f"{counts}, {sum(is_printed)} printed in Tables S2 and S3"


def once(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Merge rows of one model with different printed names only; list all names in ``name``.

    Examples
    --------
    >>> same = {"model": "a/b", "stack": "encoder", "symmetry": 0.5, "directionality": None}
    >>> same |= {"source": "published", "flags": []}
    >>> [row["name"] for row in once([{"name": "x", **same}, {"name": "y", **same}])]
    ['x, y']
    """
    compared_columns = ("model", "stack", "symmetry", "directionality", "source")
    rows_by_content: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        content = [row[column] for column in compared_columns]
        rows_by_content.setdefault((*content, *row["flags"]), []).append(row)
    merged_rows = []
    for equal_rows in rows_by_content.values():
        names = dict.fromkeys(row["name"] for row in equal_rows)
        merged_rows.append({**equal_rows[0], "name": ", ".join(names)})
    return merged_rows


def in_full(rows: Sequence[Row]) -> Iterator[Sheet | Text]:
    """Yield each row in full, with explanations of the row's flags."""
    for rows_of_model in _by_model(rows):
        yield from _in_full(rows_of_model)
    note = "Medians over layers ± [distance to the lower quartile, to the upper quartile]."
    yield Text(f"\n{note}", style="dim")


def _by_model(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows with the same name, checkpoint and stack."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["model"], row["stack"]), []).append(row)
    return list(groups.values())


def _in_full(rows: Sequence[Row]) -> Iterator[Sheet | Text]:
    """Yield the rows of one model and stack, each with its number if there are several."""
    for place, row in enumerate(rows, 1):
        size = f"{count(row['parameters'])} parameters" if row["parameters"] else ""
        about = " · ".join(filter(None, (row["stack"], row["modality"], size)))
        model = f" · {row['model']}" if row["model"] != row["name"] else ""
        if len(rows) > 1:
            about += f" · row {place} of {len(rows)}"
        yield Text.assemble("\n", (row["name"], "bold"), f"{model}\n", about)
        headings = ("", "symmetry", "directionality (excess)")
        table = Sheet.of(*headings, text=headings)
        table.add(row["source"], *(spread(row, score) for score in SCORES))
        yield table
        for flag in row["flags"]:
            yield Text(f"• {flags()[flag].sentence}")
        yield Text(_judgment(row))
    if len(rows) > 1:
        yield Text(f"\n{_contradiction(rows)}")


def _contradiction(rows: Sequence[Row]) -> str:
    """Return a sentence on several rows of one model: the scores in which they differ.

    Examples
    --------
    >>> rows = [{"name": "m", "symmetry": 0.0, "directionality": d} for d in (-0.65, 0.01)]
    >>> _contradiction(rows)
    'The paper has 2 rows of m, which contradict each other: directionality -0.65 or 0.01.'
    """
    differences = []
    for score in SCORES:
        values = dict.fromkeys(_median(row, score) for row in rows)
        if len(values) > 1:
            differences.append(f"{score} {' or '.join(values)}")
    sentence = f"The paper has {len(rows)} rows of {rows[0]['name']}"
    if differences:
        sentence += f", which contradict each other: {'; '.join(differences)}"
    return f"{sentence}."


def _median(row: Row, score: str) -> str:
    """Return a published median as text."""
    return "–" if row[score] is None else number(row[score], 2)


def with_reasons(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows with a last column ``reasons``: the titles of the flags, joined by "; "."""
    titles = {name: flag.title for name, flag in flags().items()}
    reasons = pl.col("flags").list.eval(pl.element().replace(titles)).list.join("; ")
    return rows.with_columns(reasons=reasons)


def _judgment(row: Row) -> str:
    """Return whether the numbers of a row are sound, as a line.

    Examples
    --------
    >>> _judgment({"flags": [], "sound": True})
    'no known problem: the numbers describe the form of the trained model'
    >>> _judgment({"flags": ["untied-pairing"], "sound": False})
    'not sound: the numbers do not describe the form of the trained model'
    """
    if not row["sound"]:
        return "not sound: the numbers do not describe the form of the trained model"
    judgment = "sound" if row["flags"] else "no known problem"
    return f"{judgment}: the numbers describe the form of the trained model"


def explained(rows: Sequence[Row]) -> dict[str, str]:
    """Return the flags of some rows in full, for JSON."""
    return {name: flags()[name].sentence for name in marks(rows)}
