"""Writes the tables of docs/results/*.md from the records and contrasts beside them.

python docs/generate_results.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from wqk.errors import RunError
from wqk_lab.figures.convert import SCHEMA, over_seeds
from wqk_lab.runs.claims import (
    Records,
    claims_table,
    contrasts_table,
    read_definition,
    read_records,
    unnamed,
)
from wqk_lab.runs.descent import descent
from wqk_lab.runs.seeds import by_seed, interval, paired
from wqk_lab.runs.speedup import saved_share

FOLDER = Path(__file__).parent / "results"
PAGE = FOLDER / "index.md"
CONVERSION = FOLDER / "conversion.md"
PARTS = FOLDER / "parts.md"
STARTS = FOLDER / "starts.md"
PARTS_RECORDS = FOLDER / "parts" / "shares.csv"
CONVERSION_RECORDS = FOLDER / "conversion" / "scores.csv"

# Candidate, baseline, and the step up to which they are compared.
SPEEDUPS = [
    *((start, "random", 1000) for start in ("published", "published-independent")),
    *((start, "random", 1000) for start in ("published-values", "symmetric", "symmetric-norm-1")),
    *(
        (f"{start}-to-3000", "random-to-3000", 3000)
        for start in ("published", "published-independent")
    ),
    ("published-to-3000", "published-independent-to-3000", 3000),
]
# Steps of conversion that the page lists.
DOSES = (0, 20, 40, 80, 160, 320, 800)

# What the pair shows, with its numbers to be filled in.
SIZED = ("random, size of symmetric", "random, size of skew")
WORDS = (
    "> Of the loss that all attention scores explain, the encoder's symmetric part alone "
    "keeps {0}, its skew part {1}, and halves chosen at random {2}; the decoder's keep {3}, "
    "{4} and {5}. A random part as large as the encoder's symmetric part keeps {6}, one as "
    "large as its skew part {7}. So taking the symmetric part away destroys what the "
    "encoder's attention does, which random halves do not, and in the decoder neither part "
    "can be spared; but no part does the work by itself, and each keeps less than a random "
    "part of its size. One pair of models, one text."
)

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
    tables = {"claims": claims_table(folder)}
    for name, quantity in (("symmetry", "symmetry"), ("change", "change_symmetry")):
        tables[f"{name} by step"] = doses_table(quantity)
    for name, quantity in (
        ("symmetry", "symmetry"), ("change", "change_symmetry"),
        ("directionality", "directionality_excess"),
    ):  # fmt: skip
        tables[f"{name} by layer"] = layers_table(quantity)
    tables["kept"] = kept_table()
    return checked(filled(text, tables), folder)


def page(text: str) -> str:
    """The page with its tables made anew."""
    tables = {
        "claims": claims_table(FOLDER),
        "speedups": speedups_table(read_records(FOLDER)),
    }
    return checked(filled(text, tables), FOLDER)


def parts_page(text: str) -> str:
    """The page on parts of the scores with its tables made anew."""
    rows = pl.read_csv(PARTS_RECORDS)
    folder = PARTS_RECORDS.parent
    tables = {"claims": claims_table(folder)}
    tables |= {"shares": shares_table(rows), "curvatures": curvatures_table(rows)}
    return checked(filled(text, tables | {"in words": [in_words(rows)]}), PARTS_RECORDS.parent)


def starts_page(text: str) -> str:
    """The page on the start, taken apart, with its table made anew."""
    folder = STARTS.with_suffix("")
    return checked(filled(text, {"claims": claims_table(folder)}), folder)


def shares_table(rows: pl.DataFrame) -> list[str]:
    """The share that each part keeps, with its 95 % interval over blocks, by model."""
    shown = rows.filter(pl.col("layer").is_null()).drop_nulls("share")
    names = ["symmetric", "skew", "random", "half", *SIZED, "next head"]
    lines = [f"| model | explained | {' | '.join(names)} |", f"|:--|--:|{'--:|' * len(names)}"]
    for model, group in shown.group_by("model", "seed", "step", maintain_order=True):
        parts = {row["part"]: row for row in group.iter_rows(named=True)}
        explained = parts["none"]["loss"] - parts["whole"]["loss"]
        cells = [
            "{share:.0%} [{low:.0%}, {high:.0%}]".format(**parts[name]).replace("-", "−")
            for name in names
        ]
        lines.append(f"| {_model(*model)} | {explained:.3f} | {' | '.join(cells)} |")
    return lines


def curvatures_table(rows: pl.DataFrame) -> list[str]:
    """Derivatives and curvatures along a factor of a half, over the explained loss."""
    names = ["symmetric", "skew", "random", "all"]
    lines = [
        f"| model | {' | '.join(f'slope, {n}' for n in names)} | "
        f"{' | '.join(f'curvature, {n}' for n in names)} |",
        f"|:--|{'--:|' * 2 * len(names)}",
    ]
    shown = rows.drop_nulls("curvature")
    for model, group in shown.group_by("model", "seed", "step", maintain_order=True):
        by_part = {row["part"]: row for row in group.iter_rows(named=True)}
        cells = [
            f"{by_part[name][what]:+.{digits}f}".replace("-", "−")
            for what, digits in (("derivative", 3), ("curvature", 2))
            for name in names
        ]
        lines.append(f"| {_model(*model)} | {' | '.join(cells)} |")
    return lines


def _model(name: str, seed: int | None, step: int | None) -> str:
    return name if step is None else f"{name}-{seed}, step {step:,}"


def in_words(rows: pl.DataFrame) -> str:
    """What the pair shows, with its numbers."""
    shown = rows.filter(pl.col("layer").is_null(), step=1600, seed=1).drop_nulls("share")
    kept = {
        (row["model"], row["part"]): f"{row['share']:.0%}" for row in shown.iter_rows(named=True)
    }
    said = [kept[m, p] for m in ("encoder", "decoder") for p in ("symmetric", "skew", "random")]
    return WORDS.format(*said, kept["encoder", SIZED[0]], kept["encoder", SIZED[1]])


def checked(text: str, folder: Path) -> str:
    """The page; RunError if a bold sentence names no contrast that would refute it."""
    if wrong := unnamed(text, (contrast.name for contrast in read_definition(folder)[0])):
        raise RunError(f"bold, and no contrast named: {'; '.join(wrong)}")
    return text


def filled(text: str, tables: dict[str, list[str]]) -> str:
    """A page with tables between their marks."""
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = "\n".join([before + begin, "", *table, "", end + rest.split(end)[1]])
    return text


def write_contrasts() -> None:
    """Write all contrasts, each by itself, into files that the pages include."""
    for folder in (FOLDER, CONVERSION_RECORDS.parent, PARTS_RECORDS.parent, STARTS.with_suffix("")):
        lines = "\n".join(contrasts_table(folder)) + "\n"
        (folder / "all-contrasts.md").write_text(lines, encoding="utf-8")


def main() -> None:
    """Write the pages."""
    pages = (
        (PAGE, page), (CONVERSION, conversion_page), (PARTS, parts_page), (STARTS, starts_page),
    )  # fmt: skip
    for path, made in pages:
        path.write_text(made(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
