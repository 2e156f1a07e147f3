"""Writes the tables of docs/results/index.md from the records and contrasts beside it.

python docs/generate_results.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from wqk_lab.runs.claims import Records, claims_table, contrasts_table, read_records
from wqk_lab.runs.descent import descent
from wqk_lab.runs.speedup import interval, paired, saved_share

FOLDER = Path(__file__).parent / "results"
PAGE = FOLDER / "index.md"

# Candidate, baseline, and the step up to which they are compared.
SPEEDUPS = [
    *((start, "random", 1000) for start in ("published", "published-independent")),
    *((start, "random", 1000) for start in ("published-values", "symmetric", "symmetric-norm-1")),
    *((start, "random", 3000) for start in ("published", "published-independent")),
    ("published", "published-independent", 3000),
]
SCHEDULE, SPACING, SMOOTHING = 3000, 100, 0.05


def speedups_table(records: Records) -> list[str]:
    """Shares of the steps saved, from the recorded losses."""
    lines = ["| start | against | to step | seeds | steps saved |", "|:--|:--|--:|--:|--:|"]
    for start, other, last in SPEEDUPS:
        steps = range(SPACING, last + 1, SPACING)
        looks = [records[f"loss at step {step}"] for step in steps]
        seeds = sorted(
            set.intersection(*({*look[cell]} for look in looks for cell in (start, other)))
        )
        saved = [
            saved_share(
                *(
                    descent(
                        np.array(steps, float),
                        np.array([look[cell][seed] for look in looks]),
                        SMOOTHING * SCHEDULE,
                    )
                    for cell in (other, start)
                )
            )
            for seed in seeds
        ]
        share = interval(paired(saved), "+.0%")
        lines.append(f"| `{start}` | `{other}` | {last:,} | {len(seeds)} | {share} |")
    return lines


def page(text: str) -> str:
    """The page with its tables made anew."""
    tables = {
        "claims": claims_table(FOLDER),
        "contrasts": contrasts_table(FOLDER),
        "speedups": speedups_table(read_records(FOLDER)),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = "\n".join([before + begin, "", *table, "", end + rest.split(end)[1]])
    return text


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
