"""Runs that continue another: what they take over, what is refused, and experiments of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file
from tests.lab.training.conftest import VOCABULARY, MakeRecipe, make_store, one_letter_words

from wqk.cli.main import command
from wqk.errors import RunError
from wqk.tables.run import Run, checkpoints_in, open_run
from wqk_lab.runs.groups import cells, modes
from wqk_lab.training.conversion import continued, open_parent
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.experiments import read_experiments
from wqk_lab.training.objectives import Rows
from wqk_lab.training.recipe import Recipe, make_recipe
from wqk_lab.training.training import train


@pytest.fixture(scope="module")
def decoder(corpus: TokenStore, tiny: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs") / "decoder-1"
    return train(tiny(mode="decoder", steps=6), corpus.folder, folder)


def weights(folder: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(folder / f"checkpoint-{step}" / "model.safetensors")


def wqk_train(*arguments: object) -> Result:
    return CliRunner().invoke(command, ["train", *map(str, arguments)])


@pytest.mark.parametrize(
    ("options", "loss", "mask", "model"),
    [
        (["--objective", "masked"], "masked", "encoder", "RobertaPreLayerNormForMaskedLM"),
        (["--mode", "encoder"], "causal", "encoder", "RobertaPreLayerNormForMaskedLM"),
        (
            ["--objective", "masked", "--mode", "decoder"],
            "masked", "decoder", "RobertaPreLayerNormForCausalLM",
        ),
        ([], "causal", "decoder", "RobertaPreLayerNormForCausalLM"),
    ],
)  # fmt: skip
def test_loss_and_mask_are_chosen_apart(
    options: list[str], loss: str, mask: str, model: str, decoder: Run, tmp_path: Path
) -> None:
    out = tmp_path / "child"
    done = wqk_train("--from", decoder.folder, *options, "--keep-checkpoints", "0", "-o", out)
    assert done.exit_code == 0, done.output
    run = open_run(out)
    assert (run.recipe["objective"], run.recipe["mode"]) == (loss, mask)
    assert run.settings["model"]["class"] == model
    assert run.settings["model"]["config"]["is_decoder"] == (mask == "decoder")
    # The parent is recorded, and its weights are what the run starts with.
    assert {k: run.recipe["parent"][k] for k in ("run", "step")} == {"run": "decoder-1", "step": 6}
    assert run.recipe["parent"]["recipe"] == decoder.recipe
    assert run.settings["parent"]["folder"] == str(decoder.folder.resolve())
    before, after = weights(decoder.folder, 6), weights(out, 0)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert any(not np.array_equal(after[name], weights(out, 6)[name]) for name in after)


def test_blocks_go_on_where_the_parent_s_ended(decoder: Run, corpus: TokenStore) -> None:
    recipe = continued(Recipe.from_json(decoder.recipe), "decoder-1", {})
    assert recipe.batches_before == 6
    assert continued(recipe, "child-1", {"steps": 3}).batches_before == 12
    rows = Rows.of(corpus, "train", recipe)
    first = [rows.drawn(8, seed=1, index=index) for index in (0, recipe.batches_before)]
    assert not np.array_equal(*first)


def test_a_killed_child_resumes_to_the_same_bits(
    decoder: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = continued(Recipe.from_json(decoder.recipe), "decoder-1", {"objective": "masked"})
    whole = train(recipe, None, tmp_path / "whole", parent=decoder.folder)
    for stop, kept in ((4, True), (3, False)):
        folder = tmp_path / f"stopped-{stop}"
        train(recipe, None, folder, parent=decoder.folder, stop=stop)
        if not kept:  # with no checkpoint at all, it starts over from the parent's weights
            for _, path in checkpoints_in(folder):
                shutil.rmtree(path)
        train(None, None, folder, resume=True)
        for name, values in weights(whole.folder, 6).items():
            assert np.array_equal(values, weights(folder, 6)[name]), name
        assert open_run(folder).metrics["loss"].to_list() == whole.metrics["loss"].to_list()


def test_what_cannot_be_continued(decoder: Run, corpus: TokenStore, tmp_path: Path) -> None:
    out = tmp_path / "child"
    shorter = tmp_path / "shorter"
    train(make_recipe(**{**Recipe.from_json(decoder.recipe).to_json(), "seed": 2}),
          corpus.folder, shorter, stop=3)  # fmt: skip
    other = make_store(tmp_path / "other", seed=3)
    names = one_letter_words(VOCABULARY).decode().replace('"a"', '"A"')
    other.tokenizer.write_bytes(names.encode())
    cases = [
        ((tmp_path,), "not a run's folder"),
        ((shorter,), "only a finished run can be continued, and this one has no checkpoint-6"),
        ((decoder.folder, "--objective", "clm"), "'clm' is not one of 'masked', 'causal'"),
        ((decoder.folder, "--layers", 1), "has its model and preset; leave out layers: 2 → 1"),
        ((decoder.folder, "--init", "symmetric"), "has its weights; leave out init"),
        ((decoder.folder, "--corpus", other.folder), "its tokenizer is not that of"),
        ((decoder.folder, "--resume"), "leave out --from"),
    ]
    for arguments, message in cases:
        refused = wqk_train("--from", *arguments, "-o", out)
        assert refused.exit_code == 2, refused.output
        assert message in " ".join(refused.stderr.split()), refused.stderr
        assert not out.exists()
    recipe = continued(open_parent(decoder.folder).recipe, "decoder-1", {})
    with pytest.raises(RunError, match="needs the folder of that run as parent"):
        train(recipe, corpus.folder, out)
    with pytest.raises(RunError, match="is not the run that the recipe continues"):
        train(continued(make_recipe(), "x", {}), corpus.folder, out, parent=decoder.folder)


EXPERIMENT = """
[recipe]
layers = 1
width = 16
heads = 2
block = 8
batch = 4
steps = 4
warmup = 0
held-out-blocks = 4
threads = 1
corpus = "store"
seeds = [1, 2]
[[cell]]
name = "decoder"
mode = "decoder"
[[cell]]
name = "converted"
from = "decoder"
objective = "masked"
seeds = [2]
[[cell]]
name = "back"
from = "converted"
steps = 2
objective = "causal"
"""


def test_experiments_train_parents_and_then_children(corpus: TokenStore, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(EXPERIMENT)
    done = CliRunner().invoke(
        command,
        ["experiments", str(tmp_path / "own.toml"), "--corpora", str(corpus.folder.parent),
         "-o", str(tmp_path / "runs"), "--jobs", "3"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    runs = [open_run(path) for path in sorted((tmp_path / "runs").iterdir())]
    assert [run.name for run in runs] == ["back-2", "converted-2", "decoder-1", "decoder-2"]
    back = Recipe.from_json(runs[0].recipe)
    assert (back.objective, back.mode, back.batches_before) == ("causal", "decoder", 8)
    assert weights(runs[0].folder, 0).keys() == weights(runs[1].folder, 4).keys()
    # Runs that began with other weights share no cell.
    assert [len(cell.runs) for cell in cells(runs)] == [1, 1, 2]
    assert "from a decoder" in " ".join(group.title for group in modes(runs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('from = "decoder"', 'from = "none"'), "from must name a cell above this one"),
        (("seeds = [2]", "seeds = [3]"), r"among those of decoder \(\[1, 2\]\); got \[3\]"),
        (('name = "decoder"', 'name = "decoder"\nstop = 2'), "only finished runs can be"),
        (("steps = 2", "width = 8"), "leave out width: 16 → 8"),
    ],
)
def test_experiments_that_cannot_be(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(EXPERIMENT.replace(*change))
    with pytest.raises(RunError, match=message):
        read_experiments(tmp_path / "own.toml", tmp_path, tmp_path)


def test_a_recipe_with_a_parent_survives_json(decoder: Run) -> None:
    recipe = continued(Recipe.from_json(decoder.recipe), "decoder-1", {"objective": "masked-next"})
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe
    assert recipe.mode == "decoder"
