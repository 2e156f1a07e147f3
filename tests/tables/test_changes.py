"""The summary of a run names what changed most."""

from __future__ import annotations

from typing import Any

import polars as pl

from wqk.tables.changes import largest_changes, sentences
from wqk.tables.score_table import ScoreTable


def run(*changed: tuple[int, int | None, str, float, float], name: str = "run") -> pl.DataFrame:
    """Scores at three steps, of which some go from one value to another."""
    rows: list[dict[str, Any]] = []
    for number, step in enumerate((0, 500, 1000)):
        for layer in range(3):
            for head in (None, 0, 1):
                row: dict[str, Any] = {
                    "checkpoint": f"runs/{name}/checkpoint-{step}",
                    "step": step,
                    "stack": "decoder",
                    "kind": "self",
                    "layer": layer,
                    "head": head,
                    "norm": 2.0,
                    "symmetry": 0.1,
                    "directionality_excess": 0.0,
                }
                for at_layer, at_head, score, before, after in changed:
                    if (layer, head) == (at_layer, at_head):
                        row[score] = before + (after - before) * number / 2
                rows.append(row)
    return ScoreTable.from_rows(rows).frame


def test_a_head_that_grew_is_named() -> None:
    table = run((1, 1, "norm", 2.0, 15.2), (1, None, "norm", 3.0, 4.0))
    (sentence,) = sentences(table)
    assert sentence == (
        "changed most from step 0 to 1,000: norm of layer 1, head 1: 2.000 to 15.200, grew 7.6-fold"
    )


def test_a_head_that_shrank_and_a_layer_that_became_symmetric_are_named() -> None:
    table = run((2, 0, "norm", 6.0, 2.0), (0, None, "symmetry", 0.1, 0.8))
    norm, symmetry = largest_changes(table)
    assert str(norm) == "norm of layer 2, head 0: 6.000 to 2.000, shrank 3.0-fold"
    assert str(symmetry) == "symmetry of layer 0: 0.100 to 0.800"


def test_small_changes_and_single_checkpoints_have_no_sentence() -> None:
    assert not largest_changes(run((0, 0, "norm", 2.0, 2.9), (0, 0, "symmetry", 0.1, 0.19)))
    table = run((0, 0, "norm", 1.0, 9.0))
    assert not largest_changes(table.filter(table["step"] == 0))


def test_two_runs_are_not_compared_with_each_other() -> None:
    """Each row is compared with itself at another step, not with the same layer of another run."""
    small, large = run(name="small"), run((0, 0, "norm", 50.0, 50.0), name="large")
    assert not largest_changes(small.vstack(large))


def test_without_rows_of_heads_the_option_is_named() -> None:
    table = run((1, None, "norm", 1.0, 4.0))
    layers = table.filter(table["head"].is_null())
    (sentence,) = sentences(layers)
    assert sentence.endswith("grew 4.0-fold (--heads names heads)")
