"""Writes the verdicts of docs/theory/assumptions.md: one column for each kind of model.

    python docs/generate_assumptions.py CORPUS decoders=RUN,... encoders=RUN,... MiniLM=MODEL:TEXT

Several runs of one kind are seeds, and are taken together; a text after a colon replaces CORPUS.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from wqk_lab.theory.studying import STATEMENTS, study

if TYPE_CHECKING:
    from wqk_lab.theory.verdict import Finding

PAGE = Path(__file__).parent / "theory" / "assumptions.md"
BEGIN, END = "<!-- verdicts: begin -->", "<!-- verdicts: end -->"
SHORT = {"holds": "**holds**", "not tested": "–", "identity": "identity"}
OPTIONS = {"batches": 8, "batch": 8, "block": 32, "mask_share": 0.3}


def cell(finding: Finding) -> str:
    """A verdict, with its estimate if there is one."""
    verdict = SHORT.get(finding.verdict, finding.verdict)
    if finding.verdict in ("not tested", "identity") or finding.estimate is None:
        return verdict
    return f"{verdict} {finding.estimate}".replace("-", "−")


def main(corpus: str, *columns: str) -> None:
    """Test every column's models, and put the table into the page."""
    names, tables, tallies = [], [], []
    for column in columns:
        name, _, refs = column.partition("=")
        refs, _, tokens = refs.partition(":")
        report = study(refs.split(","), tokens or corpus, **OPTIONS)[-1]
        mark = "!" if report.caveat else ""
        names.append(name + mark)
        tables.append([cell(finding) for finding in report.findings])
        tallies.append(
            f"{name}{mark}: " + ", ".join(f"{count} {v}" for v, count in report.tally.items())
        )
        print(tallies[-1], file=sys.stderr)
    lines = [f"| statement | predicted | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    for statement, *cells in zip(STATEMENTS, *tables, strict=True):
        says = f"{statement.number}: {statement.says}"
        lines.append(f"| {says} | {statement.prediction} | {' | '.join(cells)} |")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    apart = sum(not statement.about_model for statement in STATEMENTS)
    counted = f"{apart} statements about random matrices are not counted. {'; '.join(tallies)}."
    table = "\n".join([BEGIN, "", counted, "", *lines, "", END])
    PAGE.write_text(before + table + after, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
