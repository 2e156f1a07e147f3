"""Writes the verdicts of docs/theory/assumptions.md: one column for each kind of model.

    python docs/generate_assumptions.py CORPUS decoders=RUN,... encoders=RUN,... MiniLM=MODEL:TEXT
    python docs/generate_assumptions.py     # the page alone, from its record

Several runs of one kind are seeds, and are taken together; a text after a colon replaces CORPUS.
The verdicts go into docs/theory/records/assumptions.csv, and from there into the page.
"""

from __future__ import annotations

import csv
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from wqk_lab.theory.studying import STATEMENTS, study
from wqk_lab.theory.verdict import VERDICTS

if TYPE_CHECKING:
    from wqk_lab.theory.verdict import Finding

PAGE = Path(__file__).parent / "theory" / "assumptions.md"
RECORD = PAGE.parent / "records" / "assumptions.csv"
COLUMNS = ("models", "number", "says", "verdict", "estimate")
BEGIN, END = "<!-- verdicts: begin -->", "<!-- verdicts: end -->"
SHORT = {"holds": "**holds**", "not tested": "–"}
WITHOUT_ESTIMATE = ("not tested", "identity")
OPTIONS = {"batches": 8, "batch": 8, "block": 32, "mask_share": 0.3}


def record_line(models: str, finding: Finding) -> dict[str, str]:
    """Return a finding as a line of the record; identities have no estimate."""
    has_estimate = finding.estimate is not None and finding.verdict not in WITHOUT_ESTIMATE
    return {
        "models": models,
        "number": finding.statement.number,
        "says": finding.statement.says,
        "verdict": finding.verdict,
        "estimate": str(finding.estimate) if has_estimate else "",
    }


def study_columns(corpus: str, columns: list[str]) -> None:
    """Test every column's models, and write the record."""
    lines = []
    for column in columns:
        name, _, refs = column.partition("=")
        refs, _, tokens = refs.partition(":")
        report = study(refs.split(","), tokens or corpus, **OPTIONS)[-1]
        models = name + ("!" if report.caveat else "")
        lines += [record_line(models, finding) for finding in report.findings]
        print(models, report.tally, file=sys.stderr)
    with RECORD.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def cell(line: dict[str, str]) -> str:
    """Return a verdict, with the estimate if the record has one."""
    verdict = SHORT.get(line["verdict"], line["verdict"])
    return f"{verdict} {line['estimate']}".strip().replace("-", "−")


def table() -> list[str]:
    """Return the page's lines: counts of verdicts by kind of model, and the table."""
    with RECORD.open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    by_models: dict[str, dict[tuple[str, str], dict[str, str]]] = {}
    for line in lines:
        by_models.setdefault(line["models"], {})[line["number"], line["says"]] = line
    tallies = []
    about_model = {(s.number, s.says) for s in STATEMENTS if s.about_model}
    for models, verdicts in by_models.items():
        counts = Counter(line["verdict"] for key, line in verdicts.items() if key in about_model)
        named = [verdict for verdict in VERDICTS if counts[verdict] or verdict == "holds"]
        shown = [f"{counts[verdict]} {verdict}" for verdict in named]
        tallies.append(f"{models}: {', '.join(shown)}")
    count_of_random = len(STATEMENTS) - len(about_model)
    counted = (
        f"{count_of_random} statements about random matrices are not counted. {'; '.join(tallies)}."
    )
    rows = [
        *textwrap.wrap(counted, 120),
        "",
        f"| statement | predicted | {' | '.join(by_models)} |",
        "|---" * (2 + len(by_models)) + "|",
    ]
    for statement in STATEMENTS:
        cells = [
            cell(verdicts[statement.number, statement.says]) for verdicts in by_models.values()
        ]
        says = f"{statement.number}: {statement.says}"
        rows.append(f"| {says} | {statement.prediction} | {' | '.join(cells)} |")
    return rows


def written(text: str) -> str:
    """Return the page's text with the table of the record."""
    before, _, later = text.partition(BEGIN)
    return "\n".join([before + BEGIN, "", *table(), "", END]) + later.partition(END)[2]


def main(corpus: str = "", *columns: str) -> None:
    """Test the models of the columns, if there are any, and put the table into the page."""
    if columns:
        study_columns(corpus, list(columns))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
