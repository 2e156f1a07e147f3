"""Fine-tuning on tasks: rows, metrics, baselines, and a model that can and one that cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.command import run
from tests.limits import failing
from tests.small import sizes
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from wqk.errors import CheckpointError, CorpusError, HubError, RunError
from wqk.tables.run import create_run
from wqk_lab.training import glue
from wqk_lab.training.glue import FineTuning, by_start, fine_tune
from wqk_lab.training.glue_tasks import SentenceTask, TaskSplit, baselines, judge, read_task

WORDS = ["good", "bad", *(f"w{n}" for n in range(12))]
SIZES = sizes(32, 1, 2, intermediate_size=64, vocab_size=len(WORDS) + 4, pad_token_id=0)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("encoder")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(names)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(folder)
    return folder


def rows(count: int, label: Any, seed: int = 0) -> TaskSplit:
    rng = np.random.default_rng(seed)
    moods = rng.integers(2, size=count)
    texts = [
        (" ".join([*rng.choice(WORDS[2:], 4), WORDS[1 - mood], *rng.choice(WORDS[2:], 2)]),)
        for mood in moods
    ]
    return TaskSplit(texts, [label(int(mood)) for mood in moods])


def task(name: str = "mood", label: Any = int) -> SentenceTask:
    classes = 2 if label is int else None
    return SentenceTask(name, rows(160, label), rows(60, label, 1), classes)


def write_mood(path: Path) -> Path:
    train = task().train
    rows = [
        {"sentence": text, "label": label}
        for (text,), label in zip(train.texts, train.labels, strict=True)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


HOW = FineTuning(epochs=6, learning_rate=2e-3, batch=16)


def test_what_a_word_decides_is_learned(encoder: Path) -> None:
    result = fine_tune(encoder, task(), (1, 2), HOW)
    assert min(result.metrics["accuracy"]) > 0.95
    assert result == fine_tune(encoder, task(), (1, 2), HOW)
    numbers = fine_tune(encoder, task("stsb", lambda mood: 5.0 * mood), (1,), HOW)
    assert numbers.metrics["pearson"][0] > 0.9


def test_every_seed_has_a_head_of_its_own(encoder: Path) -> None:
    """With such a small rate, the heads stay as they begin."""
    untrained = FineTuning(epochs=1, learning_rate=1e-12, batch=16)
    result = fine_tune(encoder, task("stsb", lambda mood: 5.0 * mood), (1, 2), untrained)
    first, second = result.metrics["pearson"]
    assert abs(first - second) > 1e-3


def test_a_head_that_was_never_trained_is_not_judged(encoder: Path) -> None:
    with pytest.raises(RunError, match="epochs must be at least 1, got 0"):
        fine_tune(encoder, task(), (1,), FineTuning(epochs=0))


@pytest.fixture
def trained(encoder: Path, tmp_path: Path) -> Path:
    """The encoder with a tokenizer as `wqk lab train` saves it, which adds no special tokens."""
    shutil.copytree(encoder, tmp_path / "trained")
    tokenizer = Tokenizer.from_file(str(encoder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", sep_token="[SEP]"
    ).save_pretrained(tmp_path / "trained")
    return tmp_path / "trained"


def encoded(folder: Path, *texts: tuple[str, ...]) -> list[dict[str, list[int]]]:
    pair = SentenceTask(
        "p", TaskSplit([("w1", "w2")] * 2, [0, 1]), TaskSplit([("w1", "w2")], [0]), 2
    )
    tokenizer, network = glue.load_classifier(str(folder), pair)
    inputs_of_texts = []
    for text in texts:
        batch = glue.encode(tokenizer, [text], network, HOW)
        inputs_of_texts.append({name: values[0].tolist() for name, values in batch.items()})
    return inputs_of_texts


def test_two_pairs_are_never_one_input(trained: Path) -> None:
    inputs, other_inputs = encoded(trained, ("good w1 w2", "bad"), ("good w1", "w2 bad"))
    assert inputs["input_ids"] != other_inputs["input_ids"]
    sep, *ids = inputs["input_ids"]
    assert (sep, ids[3], ids[-1], inputs["input_ids"].count(3)) == (3, 3, 3, 3)
    assert inputs["token_type_ids"] == [0, 0, 0, 0, 0, 1, 1]


def test_a_tokenizer_that_marks_pairs_stays_as_it_is(encoder: Path) -> None:
    (inputs,) = encoded(encoder, ("good w1", "w2 bad"))
    assert [inputs["input_ids"][k] for k in (0, 3, 6)] == [2, 3, 3]


def test_a_vocabulary_without_a_separator_is_refused(trained: Path) -> None:
    settings = json.loads((trained / "tokenizer_config.json").read_text())
    settings.pop("sep_token")
    (trained / "tokenizer_config.json").write_text(json.dumps(settings))
    (trained / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match=r"marks no beginning and end .* sep_token"):
        encoded(trained, ("good", "bad"))


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "BertLMHeadModel"])
def test_causal_models_are_refused(kind: str, encoder: Path, tmp_path: Path) -> None:
    transformers.AutoTokenizer.from_pretrained(encoder).save_pretrained(tmp_path)
    made = getattr(transformers, kind)
    shape = {"n_embd": 32, "n_layer": 1, "n_head": 2} if "GPT2" in kind else {"is_decoder": True}
    made(made.config_class(**SIZES | shape)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"causal.*first token sees none of the text"):
        fine_tune(tmp_path, task(), (1,), FineTuning(epochs=1))


def written(path: Path, labels: list[Any], name: str = "own.jsonl") -> Path:
    lines = [json.dumps({"sentence": f"w{n}", "label": label}) for n, label in enumerate(labels)]
    (path / name).write_text("\n".join(lines))
    return path / name


def test_labels_say_what_the_task_is(tmp_path: Path) -> None:
    for first_label, second_label in ((0, 1), (0.0, 1.0), (False, True)):
        assert read_task(written(tmp_path, [first_label, second_label] * 10)).classes == 2
    named = read_task(written(tmp_path, ["pos", "neg"] * 10))
    assert (named.classes, named.train.labels[:2]) == (2, [1, 0])
    assert read_task(written(tmp_path, [0, 2.5, 4, 5.0] * 5)).classes is None


@pytest.mark.parametrize("labels", [[-1, 1], [-1.0, 1.0], [1, 2], [0, 7], [1.0, 5.0]])
def test_labels_that_could_be_either_are_refused(labels: list[Any], tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="classes are numbered from 0"):
        read_task(written(tmp_path, labels * 10))


def test_validation_rows_are_left_out_of_training(tmp_path: Path) -> None:
    rows = [{"sentence": f"w{n}", "label": n % 2} for n in range(20)]
    twins = [{"sentence": "w1", "label": 1}, {"sentence": "w2", "label": 1}]
    for split, rows_of_split in (("train", rows), ("validation", [*twins, *rows[18:]])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows_of_split)))
    opened = read_task(tmp_path)
    assert (len(opened.train.labels), len(opened.validation.labels), opened.shared) == (16, 4, 4)
    assert not {*opened.train.texts} & {*opened.validation.texts}


def test_long_texts_are_cut_to_what_a_run_s_checkpoint_takes(encoder: Path, tmp_path: Path) -> None:
    # As `wqk lab train` writes it: RoBERTa's positions begin after the padding token's number.
    sizes = SIZES | {"max_position_embeddings": 9, "type_vocab_size": 1}
    config = transformers.RobertaPreLayerNormConfig(**sizes)
    transformers.RobertaPreLayerNormModel(config).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder, model_max_length=8)
    tokenizer.save_pretrained(tmp_path)
    result = fine_tune(tmp_path, task(), (1,), FineTuning(epochs=1))  # texts of 9 tokens
    assert 0 <= result.metrics["accuracy"][0] <= 1


def test_metrics_by_hand() -> None:
    split = TaskSplit([("x",)] * 4, [0, 0, 1, 1])
    for name, classes, guesses, expected in (
        ("cola", 2, [0, 1, 1, 1], {"matthews": 2 / 12**0.5}),
        ("mrpc", 2, [0, 1, 1, 1], {"f1": 0.8, "accuracy": 0.75}),
        ("stsb", None, [1.0] * 4, {"pearson": 0.0, "spearman": 0.0}),
    ):
        metrics = judge(SentenceTask(name, split, split, classes), guesses)
        assert {metric: metrics[metric] for metric in expected} == pytest.approx(expected)


def test_a_bag_of_words_knows_words_and_the_majority_does_not() -> None:
    floor = baselines(task())
    assert floor["bag of words"]["accuracy"] > 0.95
    labels = task().validation.labels
    assert floor["majority"]["accuracy"] in (np.mean(labels), 1 - np.mean(labels))


def test_the_published_tasks_are_read(shared: Path) -> None:
    sizes = {"cola": (1043, 16), "rte": (277, 0), "wnli": (71, 0), "stsb": (1500, 6)}
    for name, (count, twice) in sizes.items():
        opened = read_task(shared / "data/glue" / name)
        assert len(opened.validation.labels) == count
        assert opened.shared >= twice
        assert opened.classes == (None if name == "stsb" else 2)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1: expected sentence"),
        ('{"sentence": 5, "label": 1}', "line 1: expected"),
        ('{"sentence": "x", "label": NaN}', "line 1: expected"),
        ("", "got too few"),
        ('{"sentence": "x", "label": 1}\n' * 10, "two classes"),
    ],
)
def test_files_that_hold_no_task(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text(content)
    with pytest.raises(CorpusError, match=message):
        read_task(tmp_path / "own.jsonl")


def test_models_that_cannot_be_fine_tuned(tmp_path: Path) -> None:
    create_run(tmp_path / "run", {"recipe": {}})
    with pytest.raises(RunError, match="has no checkpoint yet"):
        fine_tune(tmp_path / "run", task(), (1,))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no weights here"):
        fine_tune(tmp_path / "empty", task(), (1,))


def test_an_unknown_name_is_told_without_the_attempts_of_other_libraries(monkeypatch):
    monkeypatch.setattr(glue, "open_model", failing(HubError("nothere: is not a local path")))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", pytest.fail)
    with pytest.raises(HubError, match="nothere: is not a local path"):
        fine_tune("nothere", task(), (1,))


def test_the_command_compares_two(encoder: Path, tmp_path: Path) -> None:
    mood = write_mood(tmp_path / "mood.jsonl")
    arguments = ["lab", "glue", encoder, encoder, "--tasks", mood, "--seeds", "2", "--epochs", "1"]
    shown = run(*arguments, width=120)
    assert "bag of words" in shown.output
    assert "Loading" not in shown.output  # no progress bar of transformers
    assert "+0.0%" in shown.output  # the same model twice
    assert len(json.loads(run(*arguments, "--json").stdout)["tasks"][0]["results"]) == 2


def pretrained(encoder: Path, folder: Path, init: str, seed: int, step: int = 4) -> str:
    """A run whose checkpoint is the encoder."""
    run = create_run(folder / f"{init}-{seed}", {"recipe": {"init": init, "seed": seed}})
    shutil.copytree(encoder, run.folder / f"checkpoint-{step}")
    return str(run.folder)


def test_runs_are_compared_over_seeds_of_pre_training(encoder: Path, tmp_path: Path) -> None:
    cells = [("symmetric", 2), ("symmetric", 1), ("random", 2), ("random", 1)]
    runs = [pretrained(encoder, tmp_path, *cell) for cell in cells]
    starts = {"random": {1: runs[3], 2: runs[2]}, "symmetric": {1: runs[1], 2: runs[0]}}
    assert by_start(runs) == starts
    mood = write_mood(tmp_path / "mood.jsonl")
    shown = run("lab", "glue", *runs, "--tasks", mood, "--seeds", 2, "--epochs", 1, "--json")
    (task,) = json.loads(shown.stdout)["tasks"]
    seeds_by_start = {result["model"]: result["seeds"] for result in task["results"]}
    assert seeds_by_start == {"random": [1, 2], "symmetric": [1, 2]}
    accuracy_by_run = {run["model"]: np.mean(run["metrics"]["accuracy"]) for run in task["runs"]}
    assert task["results"][1]["metrics"]["accuracy"] == [
        accuracy_by_run[runs[1]],
        accuracy_by_run[runs[0]],
    ]


def test_runs_that_cannot_be_paired(encoder: Path, tmp_path: Path) -> None:
    cells = [("random", 1), ("symmetric", 1), ("symmetric", 2), ("random", 2, 8)]
    first, second, third, late = (pretrained(encoder, tmp_path, *cell) for cell in cells)
    for runs, message in (
        ([first, second, third], r"same seeds of pre-training.*random \[1\]; symm.* \[1, 2\]"),
        ([first, second, third, late], r"at the same step; .* 4, 8"),
        ([second, third], "different initializations"),
    ):
        with pytest.raises(RunError, match=message):
            by_start(runs)
