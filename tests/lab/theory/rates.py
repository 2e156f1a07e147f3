"""Count wrong verdicts by chance alone, for the table of docs/theory/false-positives.md.

    python -m tests.lab.theory.rates DRAWS.jsonl [--draws 200]

Draws are appended to the file as they are made, and those that it holds are not made again, so that
an interrupted run goes on where it stopped. Wrong verdicts are counted into a record,
docs/theory/records/rates.csv, and the table is made from the record.

Besides the planted null itself, each sample is moved to where the rule is tried hardest: so that
its mean over all draws lies on the null (or, of "near", on the margin), where "holds" is wrong, and
on the smallest effect that matters, where "fails" is wrong.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.lab.theory.planted import BY_CHANCE, CASES, STATEMENTS, by_chance

from wqk_lab.theory.verdict import Sample, decide

PAGE = Path(__file__).parents[3] / "docs" / "theory" / "false-positives.md"
RECORD = PAGE.parent / "records" / "rates.csv"
COLUMNS = ("statement", "over", "null", "draws", "planted", "holds", "fails")
BEGIN, END = "<!-- rates: begin -->", "<!-- rates: end -->"


class Rate(NamedTuple):
    """A share of draws that were decided wrongly, with its exact 95 % interval."""

    wrong: int
    draws: int

    @property
    def low(self) -> float:
        from scipy.stats import beta

        return float(beta.ppf(0.025, self.wrong, self.draws - self.wrong + 1)) if self.wrong else 0

    @property
    def high(self) -> float:
        from scipy.stats import beta

        right = self.draws - self.wrong
        return float(beta.ppf(0.975, self.wrong + 1, right)) if right else 1

    def __str__(self) -> str:
        share, low, high = (100 * x for x in (self.wrong / self.draws, self.low, self.high))
        return f"{share:.1f} % [{low:.1f}, {high:.1f}]"


class Rates(NamedTuple):
    """Rates of the planted null, and of "holds" and "fails" where they are just barely wrong."""

    planted: Rate
    holds: Rate
    fails: Rate


def rates_of(key: str, samples: Sequence[Sample]) -> Rates:
    """Shares of samples by chance that decide a statement wrongly."""
    statement = STATEMENTS[key]
    mean = np.mean([np.nanmean(sample.values) for sample in samples])
    beyond, matters = statement.null, statement.matters

    def rate(verdict: str, edge: float | None = None) -> Rate:
        by = 0.0 if edge is None else edge - mean
        moved = (replace(sample, values=sample.values + by) for sample in samples)
        verdicts = [decide(statement, sample).verdict for sample in moved]
        return Rate(verdicts.count(verdict), len(samples))  # type: ignore[arg-type]

    planted = rate(CASES[key][3])
    if statement.direction == "near":
        edges = beyond - matters, beyond + matters
        holds = max(rate("holds", edge) for edge in edges)
        fails = max(rate("fails", edge) for edge in edges)
        return Rates(planted, holds, fails)
    edge = beyond + matters * (1 if statement.direction == "above" else -1)
    return Rates(planted, rate("holds", beyond), rate("fails", edge))


def draws(path: Path, count: int) -> dict[str, list[Sample]]:
    """Samples of each statement: from the file, and, up to `count`, new ones, added to the file."""
    made: dict[str, dict[int, Sample]] = defaultdict(dict)
    path.touch()
    complete_lines, newline, _ = path.read_text(encoding="utf-8").rpartition("\n")
    path.write_text(complete_lines + newline, encoding="utf-8")  # without a line that was cut off
    for line in complete_lines.splitlines():
        row = json.loads(line)
        made[row["statement"]][row["draw"]] = Sample(
            np.array(row["values"], float), row["unit"], tuple(row["layers"]), {}, row["chance"]
        )
    with path.open("a", encoding="utf-8") as file:
        for key in BY_CHANCE:
            for draw in sorted({*range(count)} - {*made[key]}):
                sample = made[key][draw] = by_chance(key, draw)[1]
                row = {"statement": key, "draw": draw, "values": sample.values.tolist()}
                row |= {"unit": sample.unit, "layers": sample.layers, "chance": sample.chance}
                file.write(json.dumps(row) + "\n")
                file.flush()
    samples = {}
    for key in BY_CHANCE:
        samples[key] = [made[key][draw] for draw in range(count)]
    return samples


def record(samples: dict[str, list[Sample]]) -> None:
    """Count the wrong verdicts of every statement into the record."""
    rows = []
    for key, drawn in samples.items():
        rates = rates_of(key, drawn)
        count, unit = len(drawn[0].values), drawn[0].unit
        units = f"{count} {unit}" if count > 1 else f"1 {unit.removesuffix('s')}"
        layers = f" × {len(drawn[0].layers)} layers" if drawn[0].layers else ""
        row = {
            "statement": key,
            "over": units + layers,
            "null": CASES[key][3],
            "draws": len(drawn),
            "planted": rates.planted.wrong,
            "holds": rates.holds.wrong,
            "fails": rates.fails.wrong,
        }
        rows.append(row)
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table() -> Iterable[str]:
    """Yield the page's lines, from the record."""
    yield "| statement | over | planted null | “holds” at the edge | “fails” at the edge |"
    yield "|---|---|---|---|---|"
    with RECORD.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            draws = int(line["draws"])
            planted, holds, fails = (
                Rate(int(line[name]), draws) for name in ("planted", "holds", "fails")
            )
            cells = [line["statement"], line["over"], f"{line['null']} {planted}", holds, fails]
            yield f"| {' | '.join(map(str, cells))} |"


def written(text: str) -> str:
    """Return the page's text with the table of the record."""
    before, after = text.split(BEGIN)
    return before + "\n".join([BEGIN, "", *table(), "", END]) + after.split(END)[1]


def main() -> None:
    """Draw what is missing, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, metavar="DRAWS.jsonl")
    parser.add_argument("--draws", type=int, default=200)
    options = parser.parse_args()
    record(draws(options.path, options.draws))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
