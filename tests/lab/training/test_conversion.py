"""Runs that continue another: what they take over, what is refused, and experiments of them."""

from __future__ import annotations

import hashlib
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.numpy import load_file
from tests.command import run as command
from tests.lab.training.making import (
    SPECIAL,
    VOCABULARY,
    experiment,
    make_store,
    one_letter_words,
    tiny,
)

from wqk._files import append_lines
from wqk.errors import RunError
from wqk.tables.run import METRICS, Run, checkpoints_in, create_run, open_run
from wqk_lab.figures import Sources, draw, numbers
from wqk_lab.runs.groups import cells, modes
from wqk_lab.training.conversion import continued, open_parent
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.experiments import Trial, read_experiments, run_experiments
from wqk_lab.training.models import build_model, tokenizer_files
from wqk_lab.training.objectives import TokenRows
from wqk_lab.training.recipe import Recipe, make_recipe
from wqk_lab.training.training import train


@pytest.fixture(scope="module")
def decoder(corpus: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "decoder-1"
    return train(tiny(mode="decoder", steps=6), corpus.folder, folder)


def weights(folder: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(folder / f"checkpoint-{step}" / "model.safetensors")


wqk_train = partial(command, "lab", "train")


@pytest.mark.parametrize(
    ("options", "loss", "mask"),
    [
        ("--objective masked", "masked", "encoder"),
        ("--mode encoder", "causal", "encoder"),
        ("--objective masked --mode decoder", "masked", "decoder"),
        ("", "causal", "decoder"),
    ],
)
def test_loss_and_mask_are_chosen_apart(options, loss, mask, decoder, tmp_path):
    out = tmp_path / "child"
    chosen = (*options.split(), "--keep-checkpoints", "0", "-o", out)
    wqk_train("--from", decoder.folder, *chosen)
    run = open_run(out)
    assert (run.recipe["objective"], run.recipe["mode"]) == (loss, mask)
    kind = "MaskedLM" if mask == "encoder" else "CausalLM"
    assert run.settings["model"]["class"] == f"RobertaPreLayerNormFor{kind}"
    assert run.settings["model"]["config"]["is_decoder"] == (mask == "decoder")
    # The parent is recorded, and its weights are what the run starts with.
    assert {k: run.recipe["parent"][k] for k in ("run", "step")} == {"run": "decoder-1", "step": 6}
    assert run.recipe["parent"]["recipe"] == decoder.recipe
    assert run.settings["parent"]["folder"] == str(decoder.folder.resolve())
    before, after = weights(decoder.folder, 6), weights(out, 0)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert any(not np.array_equal(after[name], weights(out, 6)[name]) for name in after)


def test_blocks_go_on_where_the_parent_s_ended(decoder, tmp_path, monkeypatch):
    recipe = continued(Recipe.from_json(decoder.recipe), "decoder-1", {"steps": 3})
    assert recipe.batches_before == 6
    assert continued(recipe, "child-1", {}).batches_before == 9
    assert continued(recipe, "child-1", {"objective": "masked-next"}).mode == "decoder"
    drawn: list[int] = []
    plain = TokenRows.drawn

    def noted(self: TokenRows, batch: int, *, seed: int, index: int) -> np.ndarray:
        drawn.append(index)
        return plain(self, batch, seed=seed, index=index)

    monkeypatch.setattr(TokenRows, "drawn", noted)
    train(recipe, None, tmp_path / "child", parent=decoder.folder)
    assert drawn[:3] == [6, 7, 8]


def test_a_killed_child_resumes_to_the_same_bits(decoder, tmp_path, caplog):
    recipe = continued(Recipe.from_json(decoder.recipe), "decoder-1", {"objective": "masked"})
    uninterrupted = train(recipe, None, tmp_path / "whole", parent=decoder.folder)
    for stop, kept in ((4, True), (3, False)):
        folder = tmp_path / f"stopped-{stop}"
        train(recipe, None, folder, parent=decoder.folder, stop=stop)
        if not kept:  # with no checkpoint at all, it starts over from the parent's weights
            for _, path in checkpoints_in(folder):
                shutil.rmtree(path)
        train(None, None, folder, resume=True)
        for name, values in weights(uninterrupted.folder, 6).items():
            assert np.array_equal(values, weights(folder, 6)[name]), name
        assert open_run(folder).metrics["loss"].to_list() == uninterrupted.metrics["loss"].to_list()


def test_the_figure_s_numbers_are_those_of_the_weights(decoder: Run, tmp_path: Path) -> None:
    recipe = Recipe.from_json(decoder.recipe)
    runs = []
    for seed in (1, 2):  # two seeds, as far as the figure knows
        chosen = {"objective": "masked", "keep_checkpoints": "0,3", "seed": seed}
        child = continued(recipe, "decoder-1", chosen)
        runs.append(train(child, None, tmp_path / f"child-{seed}", parent=decoder.folder))
    rows = numbers("convert", Sources((decoder, *runs)))
    assert set(rows["run"]) == {"child-1", "child-2"}
    assert rows.select("origin", "loss", "attention").unique().rows() == [
        ("decoder", "masked", "full")
    ]

    def form(step: int) -> np.ndarray:
        named = "roberta_prelayernorm.encoder.layer.1.attention.self.{}.weight"
        query, key = (weights(runs[0].folder, step)[named.format(n)] for n in ("query", "key"))
        return query.T.astype(float) @ key

    def symmetry(matrix: np.ndarray) -> float:
        return float(np.trace(matrix @ matrix) / (matrix**2).sum())

    (row,) = rows.filter(run="child-1", step=6, layer=1).to_dicts()
    change = form(6) - form(0)
    assert row["symmetry"] == pytest.approx(symmetry(form(6)), abs=1e-6)
    assert row["change_symmetry"] == pytest.approx(symmetry(change), abs=1e-4)
    assert row["change_norm"] == pytest.approx(
        np.linalg.norm(change) / np.linalg.norm(form(0)), rel=1e-5
    )
    # What is new is orthogonal to both parts of what was there, and the three add up to the form.
    parts = (form(0) + form(0).T) / 2, (form(0) - form(0).T) / 2
    kept = row["kept_symmetric"], row["kept_skew"]
    new = form(6) - kept[0] * parts[0] - kept[1] * parts[1]
    assert [float((new * part).sum()) for part in parts] == pytest.approx([0, 0], abs=1e-5)
    assert row["new_symmetry"] == pytest.approx(symmetry(new), abs=1e-4)
    first = rows.filter(step=0, run="child-1")
    assert first["change_symmetry"].null_count() == first.height == 3  # two layers and their mean
    panels = draw("convert", Sources(tuple(runs))).axes
    assert len(panels) == 2  # a column for the one parent, a row for each score
    assert all(panel.lines for panel in panels)
    with pytest.raises(RunError, match="convert needs runs that continue others"):
        numbers("convert", Sources((decoder,)))


def test_what_cannot_be_continued(decoder: Run, corpus: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "child"
    shorter = tmp_path / "shorter"
    train(tiny(mode="decoder", steps=6, seed=2), corpus.folder, shorter, stop=3)
    other_store = make_store(tmp_path / "other", seed=3)
    names = one_letter_words(VOCABULARY).decode().replace('"a"', '"A"')
    other_store.tokenizer.write_bytes(names.encode())
    cases = [
        ((tmp_path,), "not a run's folder"),
        ((shorter,), "only a finished run can be continued, and this one has no checkpoint-6"),
        ((decoder.folder, "--objective", "clm"), "'clm' is not one of 'masked', 'causal'"),
        ((decoder.folder, "--layers", 1), "has its model and preset; leave out layers: 2 → 1"),
        ((decoder.folder, "--init", "symmetric"), "has its weights; leave out init"),
        ((decoder.folder, "--corpus", other_store.folder), "its tokenizer is not that of"),
        ((decoder.folder, "--resume"), "leave out --from"),
    ]
    for arguments, message in cases:
        refused = wqk_train("--from", *arguments, "-o", out, exits=2)
        assert message in " ".join(refused.stderr.split()), refused.stderr
        assert not out.exists()
    recipe = continued(open_parent(decoder.folder).recipe, "decoder-1", {})
    with pytest.raises(RunError, match="needs the folder of that run as parent"):
        train(recipe, corpus.folder, out)
    with pytest.raises(RunError, match="is not the run that the recipe continues"):
        train(continued(make_recipe(), "x", {}), corpus.folder, out, parent=decoder.folder)


SHORT: dict[str, Any] = {"layers": 1, "steps": 4, "warmup": 0}
CELLS: list[dict[str, Any]] = [
    {"name": "decoder", "mode": "decoder"},
    {"name": "converted", "from": "decoder", "objective": "masked"},
    {"name": "back", "from": "converted", "steps": 2, "objective": "causal"},
]


def trials_of(folder: Path, cells: list[dict[str, Any]], corpora: Path) -> list[Trial]:
    (folder / "own.toml").write_text(experiment(*cells, **SHORT))
    return read_experiments(folder / "own.toml", corpora, folder / "runs")


def test_experiments_train_parents_and_then_children(corpus: TokenStore, tmp_path: Path) -> None:
    trials = trials_of(tmp_path, CELLS, corpus.folder.parent)
    assert [trial.folder.name for trial in trials] == ["decoder-1", "converted-1", "back-1"]
    for trial in trials:  # what `wqk lab experiments` runs, in this process
        command(*trial.command(1)[3:])
        assert Recipe.from_json(open_run(trial.folder).recipe) == trial.recipe
    runs = [open_run(trial.folder) for trial in trials]
    back = trials[-1].recipe
    assert (back.objective, back.mode, back.batches_before) == ("causal", "decoder", 8)
    first, last = weights(runs[2].folder, 0), weights(runs[1].folder, 4)
    assert all(np.array_equal(values, first[name]) for name, values in last.items())
    # Runs that began with other weights share no cell.
    assert [len(cell.runs) for cell in cells(runs)] == [1, 1, 1]
    assert "from a decoder" in " ".join(group.title for group in modes(runs))


def test_a_child_waits_for_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a worker for every run, and processes that only say that they were there."""
    trials = trials_of(tmp_path, CELLS, tmp_path)

    def pretended(trial: Trial, threads: int) -> list[str]:
        needed = [str(trial.parent / "checkpoint-4")] if trial.parent else []
        saved = str(trial.folder / f"checkpoint-{trial.goal}")
        code = f"import os, sys, time; sys.exit(1) if not all(map(os.path.isdir, {needed})) else 0"
        return [sys.executable, "-c", f"{code}; time.sleep(.2); os.makedirs({saved!r})"]

    monkeypatch.setattr(Trial, "command", pretended)
    assert run_experiments(trials, jobs=3) == []
    assert all(trial.done for trial in trials)


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, {"from": "none"}, "from must name a cell above this one"),
        (2, {"seeds": [3]}, r"among those of converted \(\[1\]\); got \[3\]"),
        (0, {"stop": 2}, "only finished runs can be"),
        (2, {"width": 8}, "leave out width: 16 → 8"),
    ],
)
def test_experiments_that_cannot_be(number: int, change: Any, message: str, tmp_path: Path) -> None:
    cells = [*CELLS]
    cells[number] = cells[number] | change
    with pytest.raises(RunError, match=message):
        trials_of(tmp_path, cells, tmp_path)


@pytest.fixture(scope="module")
def begun(corpus: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has ended, with the weights that it began with: nothing was trained."""
    return kept(
        tmp_path_factory.mktemp("begun") / "parent-1", corpus, tiny(mode="decoder", steps=6)
    )


def kept(folder: Path, corpus: TokenStore, recipe: Recipe, *steps: int, scale: float = 0) -> Run:
    """A run's folder with checkpoints at these steps, by default the last.

    Later weights differ at random, by a share of their size.
    """
    about = {"folder": str(corpus.folder), "fingerprint": corpus.fingerprint}
    settings: dict[str, Any] = {"recipe": recipe.to_json(), "corpus": about}
    if recipe.parent is not None:
        settings["parent"] = {}
    run = create_run(folder, settings)
    model = build_model(recipe, VOCABULARY, SPECIAL)
    random = torch.Generator().manual_seed(recipe.seed)
    for step in steps or (recipe.steps,):
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=random)
                parameter += scale * (step > 0) * parameter.std(unbiased=False) * noise
        checkpoint = run.folder / f"checkpoint-{step}"
        model.save_pretrained(checkpoint)
        for name, content in tokenizer_files(corpus, recipe.block).items():
            (checkpoint / name).write_bytes(content)
        append_lines(run.folder / METRICS, {"step": step, "held_out_loss": 3.0 - step / 100})
    return run


def test_a_child_takes_over_weights_blocks_and_corpus(begun, tmp_path, monkeypatch):
    drawn: list[int] = []
    plain = TokenRows.drawn

    def noted(self: TokenRows, batch: int, *, seed: int, index: int) -> np.ndarray:
        drawn.append(index)
        return plain(self, batch, seed=seed, index=index)

    monkeypatch.setattr(TokenRows, "drawn", noted)
    chosen = {"objective": "masked", "steps": 1, "warmup": 0, "keep_checkpoints": "0"}
    recipe = continued(Recipe.from_json(begun.recipe), "parent-1", chosen)
    child = train(recipe, None, tmp_path / "child", parent=begun.folder)
    before, after = weights(begun.folder, 6), weights(child.folder, 0)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert drawn[0] == 6  # the parent's blocks were 0 to 5
    assert child.corpus["folder"] == begun.corpus["folder"]
    file = begun.folder / "checkpoint-6" / "model.safetensors"
    assert child.settings["parent"] == {
        "folder": str(begun.folder.resolve()),
        "step": 6,
        "fingerprint": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    assert child.recipe["parent"] == {"run": "parent-1", "step": 6, "recipe": begun.recipe}
    assert child.settings["model"]["class"] == "RobertaPreLayerNormForMaskedLM"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, ("causal", "decoder")),
        ({"objective": "masked"}, ("masked", "encoder")),
        ({"objective": "masked-next"}, ("masked-next", "decoder")),
        ({"mode": "encoder"}, ("causal", "encoder")),
        ({"objective": "masked", "mode": "decoder"}, ("masked", "decoder")),
    ],
)
def test_an_objective_alone_brings_its_mask(overrides: Any, expected: Any) -> None:
    before = make_recipe(mode="decoder", init="symmetric", init_values=2.0, seed=3)
    recipe = continued(before, "a", overrides)
    assert (recipe.objective, recipe.mode) == expected
    assert (recipe.init, recipe.init_values, recipe.seed) == ("random", None, 3)
    assert recipe.parent == {"run": "a", "step": before.steps, "recipe": before.to_json()}


@pytest.mark.parametrize(
    "changes",
    [{"layers": 1}, {"preset": "paper"}, {"block": 8}, {"vocabulary_multiple": 8}],
    ids=str,
)
def test_weights_are_made_for_their_sizes(changes: dict[str, Any]) -> None:
    before = tiny(mode="decoder")
    ((name, value),) = changes.items()
    with pytest.raises(RunError, match=f"leave out {name}: {getattr(before, name)} → {value}"):
        continued(before, "a", changes)
    assert continued(before, "a", {name: getattr(before, name)}).parent is not None


def test_a_run_is_continued_from_the_end_and_by_its_own_recipe(begun, corpus, tmp_path):
    unfinished = kept(tmp_path / "unfinished", corpus, tiny(mode="decoder", steps=6), 3)
    with pytest.raises(RunError, match=r"only a finished run .* no checkpoint-6; finish it"):
        open_parent(unfinished.folder)
    recipe = continued(Recipe.from_json(begun.recipe), "parent-1", {})
    with pytest.raises(RunError, match="needs the folder of that run as parent"):
        train(recipe, corpus.folder, tmp_path / "child")
    with pytest.raises(RunError, match="needs the folder of that run as parent"):
        train(tiny(), corpus.folder, tmp_path / "child", parent=begun.folder)
    of_other = continued(tiny(mode="decoder", steps=6, seed=2), "other", {})
    with pytest.raises(RunError, match=r"is not the run that the recipe .* \(seed: 2 → 1\)"):
        train(of_other, corpus.folder, tmp_path / "child", parent=begun.folder)
    elsewhere = make_store(tmp_path / "other", seed=3)
    names = one_letter_words(VOCABULARY).decode().replace('"a"', '"A"')
    elsewhere.tokenizer.write_bytes(names.encode())
    with pytest.raises(RunError, match="its tokenizer is not that of"):
        train(recipe, elsewhere.folder, tmp_path / "child", parent=begun.folder)
    assert not (tmp_path / "child").exists()


def test_a_child_starts_over_from_the_same_weights_alone(begun, corpus, tmp_path):
    """Without a checkpoint, a resumed child needs the weights that it began with."""
    parent = shutil.copytree(begun.folder, tmp_path / "parent-1")
    chosen = {"steps": 1, "warmup": 0, "keep_checkpoints": "last"}
    recipe = continued(Recipe.from_json(begun.recipe), "parent-1", chosen)
    child = train(recipe, None, tmp_path / "child", parent=parent)
    first = weights(child.folder, 1)
    shutil.rmtree(child.folder / "checkpoint-1")
    train(None, None, child.folder, resume=True)
    again = weights(child.folder, 1)
    assert all(np.array_equal(first[name], again[name]) for name in first)
    shutil.rmtree(child.folder / "checkpoint-1")
    file = parent / "checkpoint-6" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(RunError, match=r"weights it began with, those of .*checkpoint-6, are no"):
        train(None, None, child.folder, resume=True)


def test_scores_of_a_conversion_are_those_of_its_forms(begun, corpus, tmp_path):
    """Compare each layer, and their mean, with dense matrices."""
    before = Recipe.from_json(begun.recipe)
    recipe = continued(before, "parent-1", {"objective": "masked", "steps": 10})
    child = kept(tmp_path / "child-1", corpus, recipe, 0, 4, 10, scale=0.5)
    twice = continued(recipe, "child-1", {"mode": "decoder", "seed": 2})
    grandchild = kept(tmp_path / "grandchild-2", corpus, twice, 0, scale=0.5)
    rows = numbers("convert", Sources((begun, grandchild, child)))
    place = rows.select("run", "seed", "corpus", "origin", "loss", "attention").unique()
    assert set(place.rows()) == {
        ("child-1", 1, "store", "decoder", "masked", "full"),
        ("grandchild-2", 2, "store", "decoder, encoder", "masked", "causal"),
    }
    of_child = rows.filter(run="child-1")
    assert of_child["step"].to_list() == [0] * 3 + [4] * 3 + [10] * 3
    assert of_child["layer"].to_list() == [0, 1, None] * 3
    losses = dict(of_child.select("step", "held_out_loss").rows())
    assert losses == pytest.approx({0: 3.0, 4: 2.96, 10: 2.9})

    def form(step: int, layer: int) -> np.ndarray:
        named = f"roberta_prelayernorm.encoder.layer.{layer}.attention.self.{{}}.weight"
        stored = weights(child.folder, step)
        query, key = (stored[named.format(name)].astype(float) for name in ("query", "key"))
        return np.asarray(query.T @ key)

    def symmetry(matrix: np.ndarray) -> float:
        return float(np.trace(matrix @ matrix) / (matrix**2).sum())

    expected: dict[int, list[dict[str, float]]] = {}
    for layer in (0, 1):
        first = form(0, layer)
        for step in (4, 10):
            last = form(step, layer)
            parts = (first + first.T) / 2, (first - first.T) / 2
            symmetric, skew = ((last * part).sum() / (part**2).sum() for part in parts)
            new = last - symmetric * parts[0] - skew * parts[1]
            norms = np.linalg.norm(last - first) / np.linalg.norm(first)
            scores = {"symmetry": symmetry(last), "change_symmetry": symmetry(last - first)}
            scores |= {"change_norm": norms, "kept_symmetric": symmetric, "kept_skew": skew}
            scores |= {"new_symmetry": symmetry(new)}
            expected.setdefault(step, []).append(scores)
            row = of_child.row(
                by_predicate=(pl.col("step") == step) & (pl.col("layer") == layer), named=True
            )
            assert {name: row[name] for name in scores} == pytest.approx(scores, abs=1e-5)
    for step, layers in expected.items():
        is_mean = (pl.col("step") == step) & pl.col("layer").is_null()
        mean = of_child.row(by_predicate=is_mean, named=True)
        for name in layers[0]:
            assert mean[name] == pytest.approx(np.mean([each[name] for each in layers]), abs=1e-5)
    started = of_child.filter(step=0)
    for name in ("change_symmetry", "change_norm", "kept_symmetric", "kept_skew", "new_symmetry"):
        assert started[name].null_count() == 3
    assert started["symmetry"].null_count() == 0
    late = kept(tmp_path / "late", corpus, recipe, 4, 10)
    for runs, message in (
        ((begun,), "convert needs runs that continue others"),
        ((late,), "late: a change needs the checkpoint at step 0"),
    ):
        with pytest.raises(RunError, match=message):
            numbers("convert", Sources(runs))
