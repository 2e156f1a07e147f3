"""Training runs: golden losses, what a run leaves, and what is refused."""

from __future__ import annotations

import platform
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.lab.training.conftest import Train
from tests.lab.training.making import SPECIAL, make_store, store_of, tiny, tiny_model

import wqk
from wqk._files import locked, read_lines
from wqk.errors import CorpusError, RunError, UnknownFamily
from wqk.tables.run import CLIPS, METRICS, Run, create_run, open_run
from wqk_lab.training.corpus import TokenChunk, TokenStore
from wqk_lab.training.loop import Learner, held_out_loss, learning_rate, training_batches
from wqk_lab.training.objectives import (
    DROPOUT,
    HELD_OUT_MASKS,
    MASKS,
    Objective,
    RowSelection,
    Task,
    TokenRows,
    loss_of,
    stream_seed,
)
from wqk_lab.training.progress import TrainingProgress
from wqk_lab.training.recipe import Recipe
from wqk_lab.training.training import train

# Held-out losses after 0 and 100 steps, and the last training loss; float32 on a CPU. Libraries
# of other versions, or other processors, sum in another order: 1e-4 of the loss is allowed.
GOLDEN = {
    "masked": (3.847446, 3.321422, 3.455114),
    "causal": (3.904672, 1.058919, 1.748190),
    "masked-next": (3.931306, 1.777845, 2.629494),
}


@pytest.fixture(scope="module")
def run(corpus: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A short run of an encoder with everything in it."""
    penalty = {"penalty": "symmetric", "penalty_weight": 0.5}
    recipe = tiny(init="symmetric", **penalty, keep_checkpoints="0,4,7")
    return train(recipe, corpus.folder, tmp_path_factory.mktemp("runs") / "run")


@pytest.mark.parametrize("objective", GOLDEN)
def test_golden_losses(objective: str, trained: Train) -> None:
    mode = "encoder" if objective == "masked" else "decoder"
    intervals = {"log_every": 100, "held_out_every": 100, "save_every": 100, "score_every": 100}
    recipe = {"mode": mode, "objective": objective, "steps": 100, "learning_rate": 5e-3}
    metrics = trained(**recipe, **intervals).metrics
    first, last = metrics.row(0, named=True), metrics.row(-1, named=True)
    losses = (first["held_out_loss"], last["held_out_loss"], last["loss"])
    assert losses == pytest.approx(GOLDEN[objective], rel=1e-4)


def test_metrics_say_when_and_how_much(run: Run) -> None:
    # Logged at its cadence, at every checkpoint and at the end; held out every 6 steps.
    assert run.metrics["step"].to_list() == [0, 4, 5, 6, 7, 8, 10, 12]
    assert run.metrics.drop_nulls("held_out_loss")["step"].to_list() == [0, 6, 12]
    lines = run.metrics.drop_nulls("loss")
    assert lines["step"].to_list() == [4, 5, 7, 8, 10, 12]
    assert lines["tokens"].to_list() == [128 * step for step in lines["step"]]
    assert lines["seconds"].is_sorted()
    warmup = lines.filter(lines["step"] == 12)["learning_rate"].item()
    assert warmup == pytest.approx(run.recipe["learning_rate"] * 1 / 10)


def test_settings_tell_all(run: Run, corpus: TokenStore) -> None:
    assert run.recipe["init"] == "symmetric"
    assert run.settings["model"]["class"] == "RobertaPreLayerNormForMaskedLM"
    assert run.settings["model"]["config"]["hidden_size"] == 32
    assert run.settings["corpus"]["fingerprint"] == corpus.fingerprint
    assert run.settings["environment"]["torch"] == torch.__version__
    assert run.settings["environment"]["device"] == "cpu"
    assert [layer["symmetry"] for layer in run.settings["initialization"]] == pytest.approx([1, 1])
    corpus_settings = run.settings["corpus"]
    assert corpus_settings == {
        "folder": str(corpus.folder.resolve()),
        "fingerprint": corpus.fingerprint,
        "unit": "characters",
        "vocabulary_size": 40,
    }
    model = tiny_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert run.settings["model"]["parameters"] == parameters
    assert run.settings["schema_version"] == 1
    environment = run.settings["environment"]
    assert environment["python"] == platform.python_version()
    assert (environment["precision"], environment["processes"]) == ("float32", 1)
    assert environment["threads"] == torch.get_num_threads()
    assert {"wqk", "transformers", "accelerate", "platform", "processor", "kernels"} <= set(
        environment
    )
    first, second = run.settings["initialization"]
    assert (first["stack"], first["layer"], second["layer"]) == ("encoder", 0, 1)
    assert "parent" not in run.settings


def test_a_start_is_recorded_by_what_it_changed(trained: Train) -> None:
    """A random start of twice the norm, and values of three times theirs."""
    run = trained(steps=1, warmup=0, init_norm=2.0, init_values=3.0)
    for layer in run.settings["initialization"]:
        assert layer["norm_ratio"] == pytest.approx(2, rel=1e-4)
        assert layer["value_ratio"] == pytest.approx(3, rel=1e-4)
    by_heads = trained("by-heads", steps=1, warmup=0, init_head_norm=2.0)
    for layer in by_heads.settings["initialization"]:
        assert layer["head_norm_ratio"] == pytest.approx(2, rel=1e-4)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_learning_rates_are_those_of_transformers(schedule: str) -> None:
    import transformers

    recipe = tiny(schedule=schedule, warmup=3, steps=11, learning_rate=0.5)
    kind = "constant_with_warmup" if schedule == "constant" else schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    steps = {} if schedule == "constant" else {"num_training_steps": 11}
    scheduler = transformers.get_scheduler(kind, optimizer, num_warmup_steps=3, **steps)
    for done in range(11):
        assert learning_rate(recipe, done) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


def process(number: int, count: int) -> Any:
    """An accelerator of one of several processes, without the others."""
    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=count,
        process_index=number,
        reduce=lambda sums, _: sums,
    )


def test_processes_share_the_batches_of_one(corpus: TokenStore) -> None:
    """The shares of two processes are the halves of what a single process sees, step by step."""
    recipe = tiny(accumulation=2)
    objective = Objective("masked", recipe.mask_share, "bert", SPECIAL["mask"], 40)

    def batches(number: int, count: int) -> list[Any]:
        begin, end = 3, 5
        return list(training_batches(process(number, count), objective, recipe, corpus, begin, end))

    alone, *shares = (batches(*place) for place in ((0, 1), (0, 2), (1, 2)))
    assert len(alone) == 4
    for index, (whole, first, second) in enumerate(zip(alone, *shares, strict=True), start=6):
        expected = TokenRows(corpus.tokens("train"), 16).drawn(8, seed=1, index=index)
        assert np.array_equal(whole[0], expected)
        draws = zip(whole[1], first[1], second[1], strict=True)
        for tensor, *halves in ((whole[0], first[0], second[0]), *draws):
            assert torch.equal(torch.cat(halves), tensor)


def test_processes_share_the_batches_of_the_held_out_loss(corpus: TokenStore) -> None:
    recipe = tiny(held_out_blocks=21)
    objective = Objective("masked", recipe.mask_share, "mask", SPECIAL["mask"], 40)
    learner = Learner(tiny_model(), objective)
    whole = held_out_loss(process(0, 1), learner, recipe, corpus)
    assert learner.training
    sums = torch.zeros(2, dtype=torch.float64)

    def add(share: torch.Tensor, _: str) -> torch.Tensor:
        return sums.add_(share)

    for number in range(2):
        of_process = process(number, 2)
        of_process.reduce = add
        together = held_out_loss(of_process, learner, recipe, corpus)
    assert together == pytest.approx(whole, rel=1e-6)


def test_kept_checkpoints(run: Run) -> None:
    assert [step for step, _ in run.checkpoints] == [0, 4, 7, 12]
    assert [step for step, path in run.checkpoints if (path / "optimizer.pt").exists()] == [12]
    files = {path.name for path in run.folder.iterdir() if path.is_file()}
    assert files == {".lock", "metrics.jsonl", "run.json", "scores.jsonl", "updates.jsonl"}


@pytest.mark.parametrize(("keep", "steps"), [("last", [12]), ("all", [0, 4, 8, 12])])
def test_keeping_all_checkpoints_or_the_last(keep: str, steps: list[int], trained: Train) -> None:
    run = trained(keep_checkpoints=keep)
    assert [step for step, _ in run.checkpoints] == steps
    assert all((path / "optimizer.pt").exists() for _, path in run.checkpoints)


def test_scores_are_those_of_the_checkpoints(run: Run) -> None:
    # At their own cadence, and at every checkpoint.
    assert set(run.scores.frame["step"]) == {0, 4, 6, 7, 8, 12}
    assert set(run.updates.frame["step"]) == {4, 6, 7, 8, 12}
    # Logits are measured on request only.
    assert "max_logit" not in run.scores.frame.columns
    scanned = wqk.scan(str(run.checkpoints[-1][1]), heads=True).frame
    watched = run.scores.frame.filter(run.scores.frame["step"] == 12)
    for score in ("symmetry", "directionality", "norm"):
        assert watched[score].to_list() == scanned[score].to_list()


def test_checkpoints_are_transformers_own(run: Run, corpus: TokenStore) -> None:
    import transformers

    folder = run.checkpoints[-1][1]
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.mask_token_id == corpus.special["mask"]
    assert tokenizer.convert_ids_to_tokens([4, 5]) == ["a", "b"]
    logits = model(torch.tensor([[4, 5, 6, tokenizer.mask_token_id]])).logits
    assert logits.shape == (1, 4, corpus.vocabulary_size)


def asked(recipe: Recipe, blocks: np.ndarray, stream: int, index: int) -> Task:
    """The task of blocks, from the objective itself."""
    generator = torch.Generator().manual_seed(stream_seed(1, stream, index))
    objective = Objective("masked", recipe.mask_share, recipe.corruption, SPECIAL["mask"], 40)
    return objective.task(torch.from_numpy(blocks), objective.draw(*blocks.shape, generator))


def test_the_held_out_loss_is_what_it_says(run: Run, corpus: TokenStore) -> None:
    import transformers

    model = transformers.AutoModelForMaskedLM.from_pretrained(run.checkpoints[-1][1]).eval()
    blocks = TokenRows(corpus.tokens("held_out"), 16).spaced(16)
    losses = []
    for index in range(2):
        chosen_blocks = blocks[8 * index : 8 * index + 8]
        task = asked(Recipe.from_json(run.recipe), chosen_blocks, HELD_OUT_MASKS, index)
        logits = model(task.inputs).logits.flatten(0, 1).double().log_softmax(1)
        losses.append(-logits[task.rows, task.targets].mean().item())
    assert run.metrics["held_out_loss"][-1] == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_loss_is_that_of_the_start_and_without_the_penalty(corpus, trained):
    once = {"steps": 1, "warmup": 0, "log_every": 1, "dropout": 0.5}
    plain = trained("plain", **once).metrics
    penalty = {"penalty": "symmetric", "penalty_weight": 3.0}
    penalized = trained("penalized", **once, **penalty).metrics
    task = asked(tiny(), TokenRows(corpus.tokens("train"), 16).drawn(8, seed=1, index=0), MASKS, 0)
    model = tiny_model(dropout=0.5).train()
    torch.manual_seed(stream_seed(1, DROPOUT, 1))  # of the first step, in whatever state it begins
    expected = loss_of(model, RowSelection(model), task).item()
    for metrics in (plain, penalized):
        assert metrics["loss"][-1] == pytest.approx(expected, rel=1e-6)
    assert plain["penalty"].is_null().all()
    # As often symmetric as not, the form of a random start has half its square in either part.
    assert penalized["penalty"][-1] == pytest.approx(2.0, abs=0.2)


def test_a_penalty_does_what_it_is_for(trained: Train) -> None:
    run = trained(penalty="symmetric", penalty_weight=1.0, steps=25, learning_rate=1e-2)
    layers = run.scores.layers.frame
    before, after = (layers.filter(layers["step"] == step)["symmetry"] for step in (0, 25))
    assert min(after) > max(before) + 0.2


def test_accumulation_is_a_larger_batch(trained: Train) -> None:
    # The mean over two batches of one step: the losses that its two steps would have begun with.
    common = {"warmup": 0, "log_every": 1, "learning_rate": 1e-12, "weight_decay": 0.0}
    separate = trained("apart", steps=2, **common).metrics
    together = trained("together", steps=1, accumulation=2, **common).metrics
    expected = separate.drop_nulls("loss")["loss"].mean()
    assert together["loss"][-1] == pytest.approx(expected, rel=1e-6)
    assert together["tokens"][-1] == separate["tokens"][-1] == 2 * 8 * 16


def test_progress_is_told_and_loggers_hear_the_same(corpus: TokenStore, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    updates: list[TrainingProgress] = []
    to: dict[str, Any] = {"on_progress": updates.append, "report_to": ["tensorboard"]}
    run = train(tiny(), corpus.folder, tmp_path / "run", **to)
    first, last = updates[0], updates[-1]
    assert (first.steps_done, first.loss, first.held_out_is_new) == (0, None, True)
    assert last.steps_done == last.steps == 12
    lines = run.metrics.drop_nulls("loss")
    tokens, seconds = (lines[name].to_numpy()[-2:] for name in ("tokens", "seconds"))
    assert last.tokens_per_second == pytest.approx(np.diff(tokens)[0] / np.diff(seconds)[0])
    assert (last.loss, last.held_out_loss) == (lines["loss"][-1], run.metrics["held_out_loss"][-1])
    medians = run.scores.layers.frame.filter(step=12)["symmetry"]
    assert last.symmetry == pytest.approx(medians.median(), abs=1e-6)
    assert {update.steps_done for update in updates if update.held_out_is_new} == {0, 6, 12}
    scalars: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(run.folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file))
        events.Reload()
        for name in events.Tags()["scalars"]:
            scalars[name] = [(event.step, event.value) for event in events.Scalars(name)]
    for name in ("loss", "held_out_loss", "learning_rate"):
        expected = run.metrics.drop_nulls(name).select("step", name).rows()
        assert [step for step, _ in scalars[name]] == [step for step, _ in expected]
        assert [value for _, value in scalars[name]] == pytest.approx(
            [value for _, value in expected], rel=1e-6
        )
    assert [step for step, _ in scalars["wqk/symmetry_median"]] == [0, 4, 6, 8, 12]


def test_a_run_that_exists_is_not_begun_again(run: Run, corpus: TokenStore) -> None:
    (run.folder / ".lock").write_text("an earlier process")
    before = {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="already contains a run, which is finished") as refused:
        train(tiny(), corpus.folder, run.folder)
    assert f"--from {run.folder} -o OTHER" in str(refused.value)
    assert {path: path.read_bytes() for path in before} == before
    assert len(before) == sum(path.is_file() for path in run.folder.rglob("*"))


def test_an_unfinished_run_is_resumed_not_begun_again(corpus: TokenStore, tmp_path: Path) -> None:
    run = train(tiny(), corpus.folder, tmp_path / "run", stop=6)
    with pytest.raises(RunError, match="already contains a run; resume it"):
        train(tiny(), corpus.folder, run.folder)


def test_resuming_by_another_recipe_or_corpus_is_refused(run, corpus, tmp_path):
    recipe = replace(Recipe.from_json(run.recipe), steps=13, seed=2)
    with pytest.raises(
        RunError, match="expected steps 12, seed 1, as the run began, got steps 13, seed 2; leave"
    ):
        train(recipe, corpus.folder, run.folder, resume=True)
    other_store = make_store(tmp_path / "other", seed=7)
    with pytest.raises(RunError, match="resumes on its own corpus"):
        train(None, other_store.folder, run.folder, resume=True)


def test_resuming_what_is_finished_changes_nothing(run: Run) -> None:
    def state() -> tuple[bytes, dict[str, int]]:
        saved = {path.name: path.stat().st_mtime_ns for path in run.folder.glob("checkpoint-*")}
        return (run.folder / METRICS).read_bytes(), saved

    before = state()
    train(None, None, run.folder, resume=True)
    assert state() == before


def test_two_do_not_train_in_one_folder(run: Run) -> None:
    with (
        locked(run.folder / ".lock", "training run"),
        pytest.raises(RunError, match="another training run"),
    ):
        train(None, None, run.folder, resume=True)


def test_a_new_run_needs_a_recipe_and_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="needs a recipe and a corpus"):
        train(tiny(), None, tmp_path / "run")
    with pytest.raises(RunError, match=r"not a run's folder; expected a run\.json"):
        train(None, None, tmp_path / "run", resume=True)
    for lacks, settings in (("recipe", {"recipe": None}), ("corpus", {"recipe": tiny().to_json()})):
        create_run(tmp_path / lacks, settings)
        with pytest.raises(RunError, match=f"expected an object '{lacks}', got None"):
            train(None, None, tmp_path / lacks, resume=True)


def test_a_corpus_without_a_mask_or_too_short(tmp_path: Path) -> None:
    def store(name: str, tokens: int, special: dict[str, int]) -> Path:
        chunk = TokenChunk(np.zeros(tokens, np.int64), np.array([tokens]))
        splits = {split: [chunk] for split in ("train", "held_out")}
        return store_of(tmp_path / name, splits, special).folder

    damaged = store("damaged", 100, {"mask": 1})
    (damaged / "tokenizer.json").write_text("{}")
    for folder, message in (
        (store("maskless", 100, {}), "needs a vocabulary with a mask token"),
        (store("short", 9, {"mask": 1}), "a block needs 16 tokens, but the stream has 9"),
        (tmp_path / "nowhere", "not a token store"),
        (damaged, "not a tokenizer"),
    ):
        with pytest.raises(CorpusError, match=message):
            train(tiny(), folder, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_model_whose_queries_nobody_knows(trained: Train, tmp_path: Path) -> None:
    config = {"model_type": "fnet", "hidden_size": 32, "num_hidden_layers": 1}
    with pytest.raises((UnknownFamily, RunError)):
        trained(config=config)
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_no_number_ends_the_run(trained: Train, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the loss is (nan|inf) at step \d+; try a lower"):
        trained(learning_rate=1e30, weight_decay=0.0, steps=20, warmup=0, log_every=1)
    assert open_run(tmp_path / "run").metrics.drop_nulls("loss")["loss"].is_finite().all()


def test_a_padded_vocabulary_is_in_the_model_alone(trained: Train) -> None:
    run = trained(vocabulary_multiple=64, steps=2)
    assert run.settings["model"]["config"]["vocab_size"] == 64
    assert run.settings["corpus"]["vocabulary_size"] == 40


def test_the_task_and_the_loss_are_one_graph() -> None:
    # As on a GPU, where this graph is compiled; fullgraph refuses any break.
    for name, mode in (("masked", "encoder"), ("causal", "decoder"), ("masked-next", "decoder")):
        learner = Learner(tiny_model(mode=mode).eval(), Objective(name, 0.3, "bert", 1, 40))
        blocks = torch.randint(4, 40, (8, 16), generator=torch.Generator().manual_seed(1))
        draws = learner.objective.draw(8, 16, torch.Generator().manual_seed(2))
        compiled = torch.compile(learner, backend="eager", fullgraph=True)
        assert compiled(blocks, draws).item() == pytest.approx(learner(blocks, draws).item())
        assert learner.selection.rows is None
    torch._dynamo.reset()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_gpu(trained: Train) -> None:
    run = trained(steps=20, vocabulary_multiple=64)
    assert run.settings["environment"]["precision"] == "bf16"
    held_out = run.metrics.drop_nulls("held_out_loss")["held_out_loss"]
    assert held_out[-1] < held_out[0]
    assert train(None, None, run.folder, resume=True).metrics.equals(run.metrics)


def test_a_run_is_created_by_the_holder_of_its_lock(trained, monkeypatch):
    def create(folder: Path, settings: Any) -> Run:
        with (
            pytest.raises(RunError, match="another training run"),
            locked(folder / ".lock", "training run"),
        ):
            pass
        return create_run(folder, settings)

    monkeypatch.setattr("wqk_lab.training.training.create_run", create)
    assert trained(steps=1, warmup=0).metrics["step"][-1] == 1


def test_of_several_gpus_one_trains(trained: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    # Batches split over GPUs by a wrapper around the model would not match the asked rows.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.nn.DataParallel, "__init__", lambda *_: pytest.fail("wrapped"))
    assert trained(steps=1, warmup=0).metrics["step"][-1] == 1


@pytest.mark.parametrize(
    ("most", "reason"),
    [
        (1_000, r"run\.json: cannot be written"),
        (20_000, r"checkpoint-0 cannot be written \(.*File too large"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_whole_lines(most, reason, order, tmp_path):
    recipe = tiny(log_every=1, held_out_every=1, keep_checkpoints="spaced")
    code, message = order(recipe, tmp_path / "run", most=most)
    assert code == 1
    assert re.search(reason, message), message
    assert "\n" not in message
    assert not (tmp_path / "run" / ".saving").exists()
    if most > 1_000:
        assert open_run(tmp_path / "run").metrics["step"].to_list() == [0]
        assert train(None, None, tmp_path / "run", resume=True).metrics["step"][-1] == 12


def test_rows_of_single_documents(tmp_path: Path) -> None:
    dice = np.random.default_rng(3)
    lengths = dice.integers(2, 30, size=200)
    tokens = dice.integers(4, 9, size=lengths.sum())
    splits = {split: [TokenChunk(tokens, lengths, len(tokens))] for split in ("train", "held_out")}
    store = store_of(tmp_path / "store", splits, vocabulary_size=9)
    recipe = tiny(rows="documents")
    uninterrupted = train(recipe, store.folder, tmp_path / "whole")
    train(recipe, store.folder, tmp_path / "parts", stop=4)
    resumed = train(None, None, tmp_path / "parts", resume=True)
    losses = (
        run.metrics.select("step", "loss").drop_nulls().rows() for run in (uninterrupted, resumed)
    )
    assert next(losses) == next(losses)
    assert uninterrupted.metrics["held_out_loss"].drop_nulls()[-1] < 2.2
    bare = {name: SPECIAL[name] for name in ("mask", "separator")}
    unpadded = store_of(tmp_path / "bare", splits, bare, vocabulary_size=9)
    with pytest.raises(CorpusError, match="a vocabulary with a padding token"):
        train(recipe, unpadded.folder, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_a_run_can_be_clipped_and_its_logits_measured(trained: Train) -> None:
    run = trained(mode="decoder", objective="causal", qk_clip=1e-6, logits="yes")
    clips = read_lines(run.folder / CLIPS)
    assert {clip["step"] for clip in clips} == set(range(1, 12 + 1))
    measured = run.scores.layers.frame.drop_nulls("max_logit")
    assert set(measured["step"]) == set(run.scores.frame["step"]) - {12}
    assert measured["max_logit"].is_finite().all()
