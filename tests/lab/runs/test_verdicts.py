"""Sentences that name a contrast were written for the verdict that the contrast has.

``verdicts.toml`` has, for each page, the contrasts that its sentences name, with their verdicts
when the sentences were last read. After new runs, read the sentences that name a contrast whose
verdict changed, mend the sentences, and write the file again:

    python -m tests.lab.runs.test_verdicts
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from wqk_lab.claims import claims
from wqk_lab.runs.contrasts import MeasuredContrast, results, verdicts

DOCS = Path(__file__).parents[3] / "docs"
RESULTS = DOCS / "results"
RECORDED = Path(__file__).with_name("verdicts.toml")

FOLDERS = ("conversion", "parts", "starts", "linear", "directionality", "collator", "larger")
OTHER_PAGES = (
    "log.md",
    "paper-and-code.md",
    "paper-and-code-examples.md",
    "theory/growth.md",
    "theory/assumptions.md",
)
PAGES = [
    *sorted(path for path in RESULTS.glob("*.md") if path.name != "all-contrasts.md"),
    *(DOCS / name for name in OTHER_PAGES),
]

GENERATED = re.compile(r"<!-- (.+?): begin -->.*?<!-- \1: end -->", re.DOTALL)
# Predictions stay as they were written, whatever comes out.
PREDICTIONS = re.compile(r"^## Predictions\n.*?(?=^## )", re.DOTALL | re.MULTILINE)


def outcome(result: MeasuredContrast, verdict: str | None) -> str:
    """Return the verdict of a contrast, or the side of zero if no claim predicts it."""
    low, high = result.allowed
    if verdict is None:
        verdict = "above zero" if low > 0 else "below zero" if high < 0 else "around zero"
    if result.borrows:
        verdict += " by borrowed variance"
    return verdict


@cache
def outcomes(folder: str) -> dict[str, str]:
    """Return the outcomes of a folder's contrasts, and of claims that are not run, by name."""
    by_contrast = {claim.contrast: verdict for claim, verdict, _ in verdicts(RESULTS / folder)}
    not_run = {name: verdict for name, verdict in by_contrast.items() if verdict == "not run"}
    measured = results(RESULTS / folder)
    return not_run | {
        name: outcome(result, by_contrast.get(name)) for name, result in measured.items()
    }


@cache
def outcomes_of_all() -> dict[str, str]:
    """Return the outcomes of all folders and of the paper's claims; of equal names, the first."""
    merged: dict[str, str] = {claim.number: claim.verdict for claim in claims().claims}
    for folder in ("", *FOLDERS):
        merged = outcomes(folder) | merged
    return merged


def named_outcomes(page: Path) -> dict[str, str]:
    """Return the contrasts that sentences of a page name, with their outcomes, by name."""
    text = page.read_text(encoding="utf-8")
    if page.parent == RESULTS and page.stem in FOLDERS:
        known = outcomes_of_all() | outcomes(page.stem)
    elif page.name == "index.md":  # its table describes the experiments page by page
        known = outcomes("") | outcomes_of_all() | outcomes("starts")
    else:
        known = outcomes_of_all()
    prose = PREDICTIONS.sub("", GENERATED.sub("", text))
    names = set(re.findall(r"`([A-Za-z0-9.-]+)`", prose)) & known.keys()
    return {name: known[name] for name in sorted(names)}


def key_of(page: Path) -> str:
    """Return the name of a page below docs."""
    return page.relative_to(DOCS).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=key_of)
def test_sentences_name_contrasts_with_the_verdicts_that_were_read(page: Path) -> None:
    recorded = tomllib.loads(RECORDED.read_text(encoding="utf-8")).get(key_of(page), {})
    assert named_outcomes(page) == recorded, "read the sentences again, then write verdicts.toml"


def test_a_changed_verdict_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = RESULTS / "starts.md"
    before = named_outcomes(page)
    assert before["tied"] == "reversed"
    changed = outcomes("starts") | {"tied": "undecided"}
    monkeypatch.setitem(named_outcomes.__globals__, "outcomes", lambda folder: changed)
    assert named_outcomes(page) != before


def main() -> None:
    """Write the outcomes of all contrasts that sentences name."""
    lines = []
    for page in PAGES:
        named = named_outcomes(page)
        if named:
            lines += [f'["{key_of(page)}"]', *(f'"{name}" = "{named[name]}"' for name in named), ""]
    RECORDED.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
