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
from click.testing import CliRunner
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from wqk.cli.main import command
from wqk.errors import CheckpointError, CorpusError, HubError, RunError
from wqk.tables.run import create_run
from wqk_lab.training import glue
from wqk_lab.training.glue import FineTuning, by_start, fine_tune
from wqk_lab.training.glue_tasks import SentenceTask, Split, baselines, judge, read_task

WORDS = ["good", "bad", *(f"w{n}" for n in range(12))]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("encoder")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    numbers = {word: n for n, word in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(numbers, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(names), intermediate_size=64, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    return folder


def rows(count: int, label: Any, seed: int = 0) -> Split:
    rng = np.random.default_rng(seed)
    moods = rng.integers(2, size=count)
    texts = [
        (" ".join([*rng.choice(WORDS[2:], 4), WORDS[1 - mood], *rng.choice(WORDS[2:], 2)]),)
        for mood in moods
    ]
    return Split(texts, [label(int(mood)) for mood in moods])


def task(name: str = "mood", label: Any = int) -> SentenceTask:
    classes = 2 if label is int else None
    return SentenceTask(name, rows(160, label), rows(60, label, 1), classes)


def write_mood(path: Path) -> None:
    known = task()
    lines = zip(known.train.texts, known.train.labels, strict=True)
    path.write_text(
        "\n".join(json.dumps({"sentence": text, "label": label}) for (text,), label in lines)
    )


HOW = FineTuning(epochs=6, learning_rate=2e-3, batch=16)


def test_what_a_word_decides_is_learned(encoder: Path) -> None:
    result = fine_tune(encoder, task(), (1, 2), HOW)
    assert min(result.metrics["accuracy"]) > 0.95
    assert result == fine_tune(encoder, task(), (1, 2), HOW)
    numbers = fine_tune(encoder, task("stsb", lambda mood: 5.0 * mood), (1,), HOW)
    assert numbers.metrics["pearson"][0] > 0.9


def test_without_training_it_is_the_models_own_answer(encoder: Path, tmp_path: Path) -> None:
    network = transformers.BertForSequenceClassification.from_pretrained(encoder)
    network.save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)
    tokenizer.save_pretrained(tmp_path)
    known = task()
    wanted = []
    for (text,) in known.validation.texts:
        logits = network.eval()(**tokenizer(text, return_tensors="pt")).logits
        wanted.append(int(logits.argmax()))
    share = np.mean(np.array(wanted) == known.validation.labels)
    result = fine_tune(tmp_path, known, (1,), FineTuning(epochs=0))
    assert result.metrics["accuracy"] == (pytest.approx(share),)
    with pytest.raises(CheckpointError, match=r"without training, all weights .* classifier"):
        fine_tune(encoder, known, (1,), FineTuning(epochs=0))


def test_long_texts_are_cut_to_what_a_run_s_checkpoint_takes(encoder: Path, tmp_path: Path) -> None:
    # As `wqk train` writes it: RoBERTa's positions begin after the padding token's number.
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaPreLayerNormConfig(
        vocab_size=len(WORDS) + 4, intermediate_size=64, max_position_embeddings=9,
        pad_token_id=0, type_vocab_size=1, **sizes,
    )  # fmt: skip
    transformers.RobertaPreLayerNormModel(config).save_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(encoder, model_max_length=8)
    tokenizer.save_pretrained(tmp_path)
    result = fine_tune(tmp_path, task(), (1,), FineTuning(epochs=1))  # texts of 9 tokens
    assert 0 <= result.metrics["accuracy"][0] <= 1


def test_metrics_by_hand() -> None:
    split = Split([("x",)] * 4, [0, 0, 1, 1])
    assert judge(SentenceTask("cola", split, split, 2), [0, 1, 1, 1])["matthews"] == pytest.approx(
        2 / 12**0.5
    )
    assert judge(SentenceTask("mrpc", split, split, 2), [0, 1, 1, 1]) == {
        "f1": pytest.approx(0.8),
        "accuracy": 0.75,
    }
    numbers = SentenceTask("stsb", split, split, None)
    assert judge(numbers, [1.0, 1.0, 1.0, 1.0]) == {"pearson": 0.0, "spearman": 0.0}


def test_a_bag_of_words_knows_words_and_the_majority_does_not() -> None:
    floor = baselines(task())
    assert floor["bag of words"]["accuracy"] > 0.95
    labels = task().validation.labels
    assert floor["majority"]["accuracy"] in (np.mean(labels), 1 - np.mean(labels))


def test_the_published_tasks_are_read(shared: Path) -> None:
    sizes = {"cola": 1043, "rte": 277, "wnli": 71, "stsb": 1500}
    for name, count in sizes.items():
        known = read_task(shared / "data/glue" / name)
        assert len(known.validation.labels) == count
        assert known.classes == (None if name == "stsb" else 2)


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


def test_no_task_is_a_mistake() -> None:
    result = CliRunner().invoke(command, ["glue", "model", "--tasks", ","])
    assert result.exit_code == 2
    assert "--tasks names no task" in result.stderr


def test_models_that_cannot_be_fine_tuned(tmp_path: Path) -> None:
    create_run(tmp_path / "run", {"recipe": {}})
    with pytest.raises(RunError, match="has no checkpoint yet"):
        fine_tune(tmp_path / "run", task(), (1,))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="not an encoder with a tokenizer"):
        fine_tune(tmp_path / "empty", task(), (1,))


def test_an_unknown_name_is_told_without_the_attempts_of_other_libraries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(ref: str) -> None:
        raise HubError(f"{ref}: is not a local path")

    monkeypatch.setattr(glue, "open_checkpoint", unknown)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", pytest.fail)
    with pytest.raises(HubError, match="nothere: is not a local path"):
        fine_tune("nothere", task(), (1,))


def test_the_command_compares_two(encoder: Path, tmp_path: Path) -> None:
    write_mood(tmp_path / "mood.jsonl")
    arguments = ["glue", str(encoder), str(encoder), "--tasks", str(tmp_path / "mood.jsonl")]
    arguments += ["--seeds", "2", "--epochs", "1"]
    shown = CliRunner().invoke(command, arguments, env={"COLUMNS": "120"})
    assert shown.exit_code == 0, shown.output
    assert "bag of words" in shown.output
    assert "Loading" not in shown.output  # no progress bar of transformers
    assert "+0.0%" in shown.output  # the same model twice
    told = json.loads(CliRunner().invoke(command, [*arguments, "--json"]).stdout)
    assert len(told["tasks"][0]["results"]) == 2


def pretrained(encoder: Path, folder: Path, init: str, seed: int, step: int = 4) -> str:
    """A run whose checkpoint is the encoder."""
    run = create_run(folder / f"{init}-{seed}", {"recipe": {"init": init, "seed": seed}})
    shutil.copytree(encoder, run.folder / f"checkpoint-{step}")
    return str(run.folder)


def test_runs_are_compared_over_seeds_of_pre_training(encoder: Path, tmp_path: Path) -> None:
    runs = [
        pretrained(encoder, tmp_path, init, seed)
        for init in ("symmetric", "random")
        for seed in (2, 1)
    ]
    assert by_start(runs) == {
        "random": {1: runs[3], 2: runs[2]},
        "symmetric": {1: runs[1], 2: runs[0]},
    }
    write_mood(tmp_path / "mood.jsonl")
    arguments = ["glue", *runs, "--tasks", str(tmp_path / "mood.jsonl"), "--seeds", "2"]
    shown = CliRunner().invoke(command, [*arguments, "--epochs", "1", "--json"])
    assert shown.exit_code == 0, shown.output
    (task,) = json.loads(shown.stdout)["tasks"]
    assert [(result["model"], result["seeds"]) for result in task["results"]] == [
        ("random", [1, 2]),
        ("symmetric", [1, 2]),
    ]
    each = {run["model"]: np.mean(run["metrics"]["accuracy"]) for run in task["runs"]}
    assert task["results"][1]["metrics"]["accuracy"] == [each[runs[1]], each[runs[0]]]


def test_runs_that_cannot_be_paired(encoder: Path, tmp_path: Path) -> None:
    one, other, third = (
        pretrained(encoder, tmp_path, init, seed)
        for init, seed in (("random", 1), ("symmetric", 1), ("symmetric", 2))
    )
    with pytest.raises(
        RunError, match=r"same seeds of pre-training.*random \[1\]; symm.* \[1, 2\]"
    ):
        by_start([one, other, third])
    late = pretrained(encoder, tmp_path, "random", 2, step=8)
    with pytest.raises(RunError, match=r"at the same step; .* 4, 8"):
        by_start([one, other, third, late])
    with pytest.raises(RunError, match="different initializations"):
        by_start([other, third])
