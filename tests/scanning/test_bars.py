"""Terminal tables at several widths, kept as they should look."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from tests.reporting.making import row

import wqk
from wqk._console import plain
from wqk.tables.rendering import MOST_HEADS, measured, one_checkpoint

WIDTHS = (60, 80, 100, 160)
SNAPSHOTS = Path(__file__).with_name("terminal")


def table() -> wqk.ScoreTable:
    """Four layers of four heads with numbers of every kind."""
    common = row(
        family="bert",
        model_type="bert",
        heads=4,
        key_heads=4,
        d_query=128,
        d_key=128,
        applications=1,
        norm=12.5,
    )
    symmetry = (0.902, 0.671, -0.0004, -0.464)
    rows = []
    for layer, score in enumerate(symmetry):
        place = {**common, "layer": layer, "symmetry_null": 0.021 + layer / 100}
        terms = {"symmetry_within_heads": score / 4, "symmetry_between_heads": 3 * score / 4}
        leaning = {"directionality": -score / 2, "directionality_excess": -score}
        chance = {"symmetry_within_random": 0.1}
        status = {"status": "random-looking" if layer == 2 else "ok"}
        rows.append({**place, "symmetry": score, **terms, **leaning, **chance, **status})
        rows += [
            {**place, "head": head, "symmetry": score / (head + 1), **leaning} for head in range(4)
        ]
    return wqk.ScoreTable.from_rows(rows, {"left_out": {"owner/model": ["biases"]}})


def shown(width: int, heads: bool) -> str:
    rows = table() if heads else table().layers
    return plain(*one_checkpoint(rows, width), width=width)


@pytest.mark.parametrize("heads", [False, True], ids=["layers", "heads"])
@pytest.mark.parametrize("width", WIDTHS)
def test_tables_look_as_they_are_kept(width: int, heads: bool) -> None:
    """After a change that is meant: delete the file, run the test once, and look at the file."""
    path = SNAPSHOTS / f"{'heads' if heads else 'layers'}-{width}.txt"
    text = shown(width, heads)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
        pytest.fail(f"{path} did not exist; it has been written and has to be looked at")
    assert text == path.read_text(encoding="utf-8").rstrip("\n")


def test_heads_that_are_too_many_to_list_have_quartiles() -> None:
    symmetries = np.linspace(-0.5, 1, MOST_HEADS + 1)
    common = row(heads=MOST_HEADS + 1, key_heads=MOST_HEADS + 1, symmetry=0.25)
    heads = [common | {"head": head, "symmetry": value} for head, value in enumerate(symmetries)]
    text = plain(*one_checkpoint(wqk.ScoreTable.from_rows([common, *heads]), 100), width=100)
    (line,) = (line for line in text.splitlines() if line.strip().startswith("symmetry  "))
    assert f"{MOST_HEADS + 1:,} heads" in text
    assert [float(cell) for cell in line.split()[1:]] == pytest.approx(
        [-0.5, -0.125, 0.25, 0.625, 1], abs=0.005
    )


def test_a_head_without_a_score_is_a_dash() -> None:
    """Its score is no number in the first layer; the second layer lacks the head."""
    rows = []
    for layer, scores in enumerate([(0.5, math.nan), (0.5,)]):
        common = row(layer=layer, heads=2, key_heads=2, symmetry=0.25)
        rows += [common, *(common | {"head": n, "symmetry": x} for n, x in enumerate(scores))]
    text = plain(*one_checkpoint(wqk.ScoreTable.from_rows(rows), 100), width=100)
    hundredths = text[text.index("symmetry × 100 by head") :].splitlines()
    assert [line.split() for line in hundredths[2:4]] == [["0", "50", "–"], ["1", "50", "–"]]


def test_a_measure_that_a_row_lacks_is_a_dash() -> None:
    table = wqk.scan(wqk.demo_model("encoder"), heads=False, measures=["spectral_norm"])
    lacking = pl.when(pl.col("layer") != 1).then(pl.col("spectral_norm")).alias("spectral_norm")
    rows = wqk.ScoreTable.from_rows(table.frame.with_columns(lacking).to_dicts())
    _, _, values, _ = map(plain, measured(rows, ["spectral_norm"], None, None))
    assert ["–" in line for line in values.splitlines()] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("arguments", "shows"), [(("scan",), "|#####"), (("explain",), "* encoder")]
)
def test_a_terminal_without_unicode_gets_plain_text(arguments: tuple[str], shows: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wqk", *arguments, str(wqk.demo_model("encoder"))],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "COLUMNS": "90", "PATH": ""}
        | {k: v for k, v in os.environ.items() if k == "PYTHONPATH"},
        check=True,
    )
    text = done.stdout.decode("ascii")
    assert shows in text
    assert "?" not in text
