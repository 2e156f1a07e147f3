"""Writes the tables of docs/results/*.md from the records and contrasts beside them.

python docs/generate_results.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from wqk_lab.figures.convert import SCHEMA, over_seeds
from wqk_lab.runs.claims import Records, claims_table, contrasts_table, read_records
from wqk_lab.runs.descent import descent
from wqk_lab.runs.seeds import by_seed, interval, paired
from wqk_lab.runs.speedup import saved_share

FOLDER = Path(__file__).parent / "results"
PAGE = FOLDER / "index.md"
CONVERSION = FOLDER / "conversion.md"
CONVERSION_RECORDS = FOLDER / "conversion" / "scores.csv"

# Candidate, baseline, and the step up to which they are compared.
SPEEDUPS = [
    *((start, "random", 1000) for start in ("published", "published-independent")),
    *((start, "random", 1000) for start in ("published-values", "symmetric", "symmetric-norm-1")),
    *((start, "random", 3000) for start in ("published", "published-independent")),
    ("published", "published-independent", 3000),
]
# Steps of conversion that the page lists.
DOSES = (0, 20, 40, 80, 160, 320, 800)

SCHEDULE, SPACING, SMOOTHING = 3000, 100, 0.05


def speedups_table(records: Records) -> list[str]:
    """Shares of the steps saved, from the recorded losses."""
    lines = ["| start | against | to step | seeds | steps saved |", "|:--|:--|--:|--:|--:|"]
    for start, other, last in SPEEDUPS:
        steps = range(SPACING, last + 1, SPACING)
        looks = [records[f"loss at step {step}"] for step in steps]
        losses = by_seed(*(look[cell] for cell in (other, start) for look in looks))
        saved = [
            saved_share(
                *(
                    descent(np.array(steps, float), curve, SMOOTHING * SCHEDULE)
                    for curve in np.reshape(both, (2, -1))
                )
            )
            for both in losses.values()
        ]
        share = interval(paired(saved), "+.0%")
        lines.append(f"| `{start}` | `{other}` | {last:,} | {len(losses)} | {share} |")
    return lines


def conversions() -> pl.DataFrame:
    """The records of conversions."""
    return pl.read_csv(CONVERSION_RECORDS, schema=SCHEMA)


def doses_table(quantity: str) -> list[str]:
    """A score of each condition against steps of conversion: means over layers and seeds."""
    rows = over_seeds(conversions().filter(pl.col("layer").is_null()))
    shown = rows.filter(pl.col("step").is_in(DOSES), quantity=quantity)
    steps = sorted(set(shown["step"]))
    return _conditions_table(shown, "step", [f"step {step}" for step in steps])


def layers_table(quantity: str) -> list[str]:
    """The same by layer, at the last step."""
    rows = over_seeds(conversions().drop_nulls("layer"))
    shown = rows.filter(pl.col("step") == pl.col("step").max(), quantity=quantity)
    layers = sorted(set(shown["layer"]))
    return _conditions_table(shown, "layer", [f"layer {layer}" for layer in layers])


def kept_table() -> list[str]:
    """What is left of the parent's form at the last step, and the symmetry of the rest."""
    names = {"kept_symmetric": "symmetric part", "kept_skew": "skew part", "new_symmetry": "rest"}
    rows = conversions().filter(pl.col("layer").is_null(), pl.col("step") == pl.col("step").max())
    shown = over_seeds(rows, tuple(names)).with_columns(
        pl.col("quantity").replace_strict({name: at for at, name in enumerate(names)})
    )
    return _conditions_table(shown, "quantity", [*names.values()])


def _conditions_table(rows: pl.DataFrame, column: str, heads: list[str]) -> list[str]:
    """Mean and half the width of its 95 % interval (none for one seed), by text and condition."""
    lines = [f"| text | continued from | loss | attention | {' | '.join(heads)} |"]
    lines.append(f"|:--|:--|:--|:--|{'--:|' * len(heads)}")
    keys = ["corpus", "origin", "loss", "attention"]
    for key, group in rows.group_by(keys, maintain_order=True):
        cells = [
            (f"{value:+.2f}" + (f" ± {high - value:.2f}" if high is not None else "")).replace(
                "-", "−"
            )
            for value, high in group.sort(column).select("value", "high").rows()
        ]
        named = [str(name).replace(", ", " → ") for name in key]
        lines.append(f"| {' | '.join(named + cells)} |")
    return lines


def conversion_page(text: str) -> str:
    """The page on conversions with its tables made anew."""
    folder = CONVERSION_RECORDS.parent
    tables = {"claims": claims_table(folder), "contrasts": contrasts_table(folder)}
    for name, quantity in (("symmetry", "symmetry"), ("change", "change_symmetry")):
        tables[f"{name} by step"] = doses_table(quantity)
    for name, quantity in (
        ("symmetry", "symmetry"), ("change", "change_symmetry"),
        ("directionality", "directionality_excess"),
    ):  # fmt: skip
        tables[f"{name} by layer"] = layers_table(quantity)
    tables["kept"] = kept_table()
    return filled(text, tables)


def page(text: str) -> str:
    """The page with its tables made anew."""
    tables = {
        "claims": claims_table(FOLDER),
        "contrasts": contrasts_table(FOLDER),
        "speedups": speedups_table(read_records(FOLDER)),
    }
    return filled(text, tables)


def filled(text: str, tables: dict[str, list[str]]) -> str:
    """A page with tables between their marks."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = "\n".join([before + begin, "", *table, "", end + rest.split(end)[1]])
    return text


def main() -> None:
    """Write the pages."""
    for path, made in ((PAGE, page), (CONVERSION, conversion_page)):
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
