"""Fields of the laboratory's progress bars, which are drawn on terminals alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.command import run
from tests.lab.training.making import experiment

import wqk_lab
from wqk_lab.training.corpus import CorpusProgress
from wqk_lab.training.progress import TrainingProgress

Shown = list[dict[str, Any]]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """The fields that a bar would show, of each report."""
    fields: Shown = []

    @contextmanager
    def bar(
        title: str, changes: Callable[..., dict[str, Any]], seconds: float | None = None
    ) -> Iterator[Callable[..., None]]:
        yield lambda *done: fields.append({"title": title, **changes(*done)})

    monkeypatch.setattr("wqk.cli.display.bar", bar)
    return fields


def replaced(monkeypatch: pytest.MonkeyPatch, name: str, *reports: tuple[Any, ...]) -> None:
    """Let a function report its progress and end as if it was interrupted."""

    def work(*_: Any, on_progress: Callable[..., None], **__: Any) -> None:
        for report in reports:
            on_progress(*report)
        raise KeyboardInterrupt

    monkeypatch.setattr(name, work)


def test_a_run_shows_its_steps(shown: Shown, tmp_path: Path, monkeypatch: Any) -> None:
    reports = ((TrainingProgress(3, 7, 2.5, None, 120.0, False),),)
    replaced(monkeypatch, "wqk_lab.training.training.train", *reports)
    run("lab", "train", "--corpus", tmp_path, "-o", tmp_path / "run", exits=130)
    text = "3/7 steps, loss 2.500, 120 tokens/s"
    assert shown == [{"title": "train", "total": 7, "completed": 3, "text": text}]


def test_experiments_show_the_steps_of_all_runs(
    shown: Shown, tmp_path: Path, monkeypatch: Any
) -> None:
    from tests.lab.figures.making import logged

    from wqk_lab.training.experiments import read_experiments

    cells = [{"name": name, "stop": stop} for name, stop in (("a", 6), ("b", 4), ("c", 6))]
    (tmp_path / "own.toml").write_text(experiment(*cells, schedule="constant"))
    trials = read_experiments(tmp_path / "own.toml", tmp_path, tmp_path / "runs")
    for trial, step in zip(trials, (2, 5), strict=False):  # the second is past its goal
        logged(trial.folder, trial.recipe.to_json(), {step: 1.0})
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text("{}")
    replaced(monkeypatch, "wqk_lab.training.experiments.run_experiments", ())
    places = ("--corpora", tmp_path, "-o", tmp_path / "runs")
    done = run("lab", "experiments", tmp_path / "own.toml", *places, exits=130)
    text = "6/16 steps, 1 of 3 runs done"
    assert shown == [{"title": "experiments", "total": 16, "completed": 6, "text": text}]
    assert f"repeat the command to resume in {tmp_path / 'runs'}" in done.stderr


def test_a_corpus_shows_its_stage_and_its_share(
    shown: Shown, tmp_path: Path, monkeypatch: Any
) -> None:
    reports = (
        (CorpusProgress("reading", 1200, 8_000_000),),
        (CorpusProgress("tokenizing", 600, 4_000_000, 900_000, 0.5),),
        (CorpusProgress("writing"),),
    )
    replaced(monkeypatch, "wqk_lab.training.corpus.build_corpus", *reports)
    run("lab", "corpus", tmp_path / "text.txt", "-o", tmp_path / "store", exits=130)
    reading, tokenizing, writing = shown
    assert [fields["description"] for fields in shown] == ["reading", "tokenizing", "writing"]
    assert (reading["total"], tokenizing["total"], tokenizing["completed"]) == (None, 1.0, 0.5)
    assert reading["text"].startswith("1,200 documents, 8.0 M characters, ")
    assert reading["text"].endswith(" M characters/s")
    assert tokenizing["text"].endswith(" M tokens/s")
    assert writing["text"] == ""


def test_the_theory_shows_its_statement(shown: Shown, tmp_path: Path, monkeypatch: Any) -> None:
    replaced(monkeypatch, "wqk_lab.theory.studying.study", ("Theorem 2.3", 4, 31))
    run("lab", "theory", "m", "--corpus", tmp_path / "text.txt", exits=130)
    fields = {"description": "Theorem 2.3", "completed": 4, "total": 31, "text": "4/31"}
    assert shown == [{"title": "model", **fields}]


def test_commands_have_their_names_in_the_package() -> None:
    """By ``wqk_lab.__init__``, or the names of their functions, which say more."""
    assert wqk_lab.corpus is wqk_lab.build_corpus
    assert wqk_lab.experiments is wqk_lab.run_experiments
    assert wqk_lab.glue is wqk_lab.fine_tune
    assert wqk_lab.speedup is wqk_lab.speedups
