"""Cells, whose runs differ in their seeds alone, and pairs of cells that compare."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.lab.figures.making import RECIPE

from wqk.errors import RunError
from wqk.tables.run import Run
from wqk_lab.runs.groups import cells, modes, one, pairs, starts


def run(name: str = "run", corpus: str = "wikipedia", fingerprint: str = "f", **recipe: Any) -> Run:
    if recipe.get("mode") == "decoder":
        recipe.setdefault("objective", "causal")
    text = {"folder": f"/texts/{corpus}", "fingerprint": fingerprint}
    return Run(Path(name), {"recipe": RECIPE | recipe, "corpus": text})


DECODER: dict[str, Any] = {"mode": "decoder"}


def test_seeds_of_one_recipe_are_one_cell_whatever_their_order() -> None:
    runs = [run("a", seed=1), run("b", seed=1, **DECODER), run("c", seed=2), run("d", steps=7)]
    names_of_cells = []
    for cell in cells(runs):
        names_of_cells.append([member.name for member in cell.runs])
    assert names_of_cells == [["a", "c"], ["b"], ["d"]]


def test_a_field_that_older_runs_lack_does_not_part_them() -> None:
    old, new = run(seed=1), run(seed=2, init_norm=None)
    assert len(cells([old, new])) == 1
    assert len(cells([old, run(init_norm=1.0)])) == 2


def test_runs_older_than_initializations_start_at_random() -> None:
    old = {name: value for name, value in RECIPE.items() if name != "init"}
    (cell,) = cells([Run(Path("old"), {"recipe": old, "corpus": {"folder": "/texts/wikipedia"}})])
    assert cell.start == "random"


def test_runs_on_other_texts_are_other_cells() -> None:
    runs = [run(), run(fingerprint="g")]
    assert len(cells(runs)) == 2
    assert [cell.title for cell in modes(runs)] == ["wikipedia, f", "wikipedia, g"]


def test_what_does_not_touch_the_numbers_does_not_part_runs() -> None:
    assert len(cells([run(), run(preset="paper", save_every=3, keep_checkpoints="all")])) == 1


def test_pairs_differ_in_the_mode_alone() -> None:
    runs = [run(**DECODER), run(), run(steps=7, **DECODER), run(corpus="other", fingerprint="g")]
    (pair,) = pairs(runs, "fig3")
    assert pair.title == "wikipedia"
    assert list(pair.cells) == ["encoder", "decoder"]
    assert [cell.shared["steps"] for cell in pair.cells.values()] == [40, 40]


def test_titles_tell_comparisons_apart_and_no_more() -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"corpus": "toxic", "fingerprint": "g", "steps": 9},
        {"steps": 7, "log_every": 3},
        {"init": "paired"},
    )
    runs = [run(**change) for change in changes]
    runs += [run(**change, **DECODER) for change in changes]
    assert [pair.title for pair in pairs(runs, "s3")] == [
        "wikipedia, random, steps 40",
        "toxic",
        "wikipedia, random, steps 7",
        "wikipedia, paired, steps 40",
    ]


def test_decoders_of_two_objectives_are_two_pairs_with_the_same_encoder() -> None:
    runs = [run(), run(**DECODER), run(mode="decoder", objective="masked-next")]
    titles = [pair.title for pair in pairs(runs, "s3")]
    assert titles == ["wikipedia", "wikipedia, objective masked-next"]


def test_cells_without_a_partner_stand_alone() -> None:
    comparisons = modes([run(), run(init="paired", **DECODER)])
    assert [(c.title, list(c.cells)) for c in comparisons] == [
        ("wikipedia, random", ["encoder"]),
        ("wikipedia, paired", ["decoder"]),
    ]


def test_one_pair_is_asked_for_where_there_are_several() -> None:
    runs = []
    for corpus in "ab":
        runs.append(run(corpus=corpus, fingerprint=corpus))
        runs.append(run(corpus=corpus, fingerprint=corpus, **DECODER))
    with pytest.raises(RunError, match="fig3 shows one pair of recipes; got a; b: give the runs"):
        one(pairs(runs, "fig3"), "fig3", "s3")


def test_what_is_missing_is_told_with_what_there_is() -> None:
    with pytest.raises(RunError, match=r"--mode decoder; got 2 runs \(mode encoder\)"):
        pairs([run(), run(seed=2)], "fig3")
    with pytest.raises(RunError, match=r"--init symmetric; got 1 runs \(init random\)"):
        starts([run()], "s5", penalties=False)
    with pytest.raises(RunError, match="got no run"):
        pairs([], "s3")


def test_starts_are_told_in_words_random_first() -> None:
    runs = [
        run(init="paired"),
        run(),
        run(init="symmetric", init_norm=1.0),
        run(penalty="skew", penalty_weight=0.1),
        run(init="skew", penalty="symmetric", penalty_weight=2.0),
    ]
    assert list(starts(runs, "losses", penalties=True)) == [
        "random",
        "paired",
        "symmetric, norm × 1",
        "skew penalty 0.1",
        "skew, symmetric penalty 2",
    ]
    assert list(starts(runs, "s5", penalties=False)) == ["random", "paired", "symmetric, norm × 1"]


def test_starts_of_two_recipes_are_not_mixed() -> None:
    recipes = itertools.product(("random", "skew"), (7, 40))
    runs = [run(init=init, steps=steps) for init, steps in recipes]
    with pytest.raises(RunError, match="got those of wikipedia, steps 7; wikipedia, steps 40"):
        starts(runs, "s5", penalties=False)
