"""Fine-tuning on tasks: rows, metrics, baselines, and a model that can and one that cannot."""

from __future__ import annotations

import inspect
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
from wqk_lab.training.glue import FineTuning, TaskResult, by_start, fine_tune
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


def test_texts_are_cut_to_the_least_of_three_lengths(encoder: Path) -> None:
    """That of the fine-tuning, of the model's positions, and of the tokenizer."""
    tokenizer, network = glue.load_classifier(str(encoder), task())
    text = [(" ".join(WORDS),)]
    for name, length in (("settings", 5), ("positions", 6), ("tokenizer", 7), ("text", 16)):
        tokenizer.model_max_length = 7 if name == "tokenizer" else 100
        network.config.max_position_embeddings = 6 if name == "positions" else 100
        settings = FineTuning(length=5 if name == "settings" else 100)
        batch = glue.encode(tokenizer, text, network, settings)
        assert {len(values[0]) for values in batch.values()} == {length}, name


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
    assert read_task(written(tmp_path, [0, 1] * 10)).shared == 0  # every fifth row is held out
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


def by_hand(encoder: Path, data: SentenceTask, settings: FineTuning, seed: int) -> list[float]:
    """Predictions after a plain loop: AdamW, clipping, a linear schedule after 6 % of warmup."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = transformers.AutoModelForSequenceClassification
        network = kind.from_pretrained(encoder, num_labels=data.classes or 1)
        tokenizer = transformers.AutoTokenizer.from_pretrained(encoder)

        def logits_of(texts: Any) -> Any:
            cut = {"padding": True, "truncation": True, "max_length": settings.length}
            encoded = tokenizer([text for (text,) in texts], return_tensors="pt", **cut)
            return network(**encoded).logits

        optimizer = torch.optim.AdamW(
            network.parameters(), settings.learning_rate, weight_decay=0.01
        )
        count = len(data.train.labels)
        steps = settings.epochs * ((count + settings.batch - 1) // settings.batch)
        warmup, done = int(0.06 * steps), 0
        rng = np.random.default_rng(seed)
        for _ in range(settings.epochs):
            order = rng.permutation(count)
            for first in range(0, count, settings.batch):
                chosen = order[first : first + settings.batch]
                rising, falling = done / max(warmup, 1), (steps - done) / (steps - warmup)
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * (rising if done < warmup else falling)
                logits = logits_of([data.train.texts[k] for k in chosen])
                labels = torch.tensor([data.train.labels[k] for k in chosen])
                if data.classes:
                    loss = -logits.log_softmax(-1)[range(len(chosen)), labels].mean()
                else:
                    loss = (logits[:, 0] - labels).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
        with torch.no_grad():
            logits = logits_of(data.validation.texts)
    return list((logits.argmax(-1) if data.classes else logits[:, 0]).tolist())


@pytest.mark.parametrize("name", ["mood", "stsb"])
def test_fine_tuning_is_a_plain_loop(name: str, encoder: Path, tmp_path: Path) -> None:
    still = shutil.copytree(encoder, tmp_path / "still")  # without dropout
    config = json.loads((still / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (still / "config.json").write_text(json.dumps(config))
    whole = task(name, int if name == "mood" else lambda mood: 2.5 * mood)
    count = 44 if name == "stsb" else 14
    train = TaskSplit(whole.train.texts[:count], whole.train.labels[:count])
    data = SentenceTask(name, train, whole.validation, whole.classes)
    settings = FineTuning(epochs=3, learning_rate=2e-3, batch=7, length=8)
    result = fine_tune(still, data, (3,), settings)
    assert (result.model, result.task, result.seeds) == (str(still), name, (3,))
    expected = judge(data, by_hand(still, data, settings, 3))
    # Adam amplifies the rounding of small gradients.
    metrics = {metric: value for metric, (value,) in result.metrics.items()}
    assert metrics == pytest.approx(expected, abs=2e-3)


def test_two_models_are_compared_seed_by_seed() -> None:
    reference = TaskResult("a", "mood", (3, 2, 4), {"accuracy": (0.1, 0.5, 0.0)})
    candidate = TaskResult("b", "mood", (1, 2, 3), {"accuracy": (0.9, 0.8, 0.7)})
    compared = glue.differences(reference, candidate, "accuracy")
    assert (compared.count, compared.mean) == (2, pytest.approx((0.3 + 0.6) / 2))
    assert candidate.over_seeds("accuracy").mean == pytest.approx(0.8)


def test_the_command_fine_tunes_each_model_on_each_task(tmp_path, monkeypatch):
    calls: list[tuple[Any, ...]] = []

    def pretended(model: str, data: SentenceTask, seeds: Any, settings: FineTuning) -> TaskResult:
        calls.append((model, data.name, list(seeds), settings))
        accuracies = tuple({"a": 0.5, "b": 0.75}[model] + seed / 100 for seed in seeds)
        return TaskResult(model, data.name, tuple(seeds), {"accuracy": accuracies})

    monkeypatch.setattr(glue, "fine_tune", pretended)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        for split in ("train", "validation"):
            write_mood(tmp_path / name / f"{split}.jsonl")
    lines = (tmp_path / "first/train.jsonl").read_text().splitlines()
    (tmp_path / "first/validation.jsonl").write_text("\n".join(lines[:40]))
    mood_file = write_mood(tmp_path / "own.jsonl")
    options = ("--data", tmp_path, "--tasks", f"first,{mood_file}", "--seeds", 2, "--batch", 3)
    shown = run("lab", "glue", "a", "b", *options, "--epochs", 4, "--length", 9, width=150)
    settings = FineTuning(epochs=4, learning_rate=5e-5, batch=3, length=9)
    names = ("first", "first", "own", "own")
    assert calls == [
        (model, name, [1, 2], settings) for model, name in zip("abab", names, strict=True)
    ]
    rows = [line.split() for line in shown.stdout.splitlines()]
    first = read_task(tmp_path / "first")
    floor = baselines(first)
    cells = [f"{floor[kind]['accuracy']:.1%}" for kind in ("majority", "bag of words")]
    means = "51.5% [45.1%, 57.9%] 76.5% [70.1%, 82.9%] +25.0% – –"
    (line,) = (row for row in rows if row[:1] == ["first"])
    assert line == ["first", "accuracy", *cells, *means.split()]
    headings = "task metric majority bag of words a b difference p detectable"
    assert headings.split() in rows
    assert all(f"\n {name} " in shown.stdout for name in ("first", "own"))
    left_out = f"first: {first.shared} training rows are left out, since validation has them"
    assert first.shared > 0
    assert left_out in shown.stderr
    assert "own: b" in shown.stderr
    monkeypatch.setattr(
        glue, "by_start", lambda _: {"random": {1: "a", 2: "b"}, "symmetric": {1: "b", 2: "a"}}
    )
    done = run("lab", "glue", "a", "b", "a", "--data", tmp_path, "--tasks", "first", "--json")
    (outcome,) = json.loads(done.stdout)["tasks"]
    assert [result["model"] for result in outcome["results"]] == ["random", "symmetric"]
    assert outcome["rows"] == {
        "train": len(first.train.labels),
        "validation": len(first.validation.labels),
        "left_out": first.shared,
    }
    assert [each["model"] for each in outcome["runs"]] == ["a", "b"]
    assert outcome["baselines"] == floor


def test_pairs_are_known_by_the_words_that_both_have(tmp_path: Path) -> None:
    """A label that says whether two texts share a word is learned from none of them alone."""
    rng, rows_of_pairs = np.random.default_rng(0), []
    for number in range(300):
        first, second = (set(rng.choice(WORDS, 3, replace=False)) for _ in range(2))
        texts = {"sentence1": f"{' '.join(first)} {number}", "sentence2": " ".join(second)}
        rows_of_pairs.append(texts | {"label": int(bool(first & second))})
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows_of_pairs)))
    assert baselines(read_task(tmp_path / "pairs.jsonl"))["bag of words"]["accuracy"] > 0.95
    # Nor does any word, but the order of two, decide here.
    ordered = [
        {"sentence": f"w{k} {'good bad' if k % 2 else 'bad good'}", "label": k % 2}
        for k in range(100)
    ]
    (tmp_path / "order.jsonl").write_text("\n".join(map(json.dumps, ordered)))
    assert baselines(read_task(tmp_path / "order.jsonl"))["bag of words"]["accuracy"] == 1
    train = TaskSplit([("w1",), ("w2",), ("w1",)], [1.0, 3.5, 3.0])
    numbers = SentenceTask("numbers", train, TaskSplit([("w1",), ("w2",)], [2.5, 2.0]), None)
    majority = baselines(numbers)["majority"]
    assert majority == {"pearson": 0.0, "spearman": 0.0}  # of one constant, the mean


def test_defaults_of_the_command_are_those_of_fine_tuning() -> None:
    from wqk_lab.cli.glue import glue as command

    options = {option.name: option.default for option in command.params}
    assert {name: options[name] for name in vars(FineTuning())} == vars(FineTuning())
    seeds = inspect.signature(fine_tune).parameters["seeds"].default
    assert seeds == tuple(range(1, options["seeds"] + 1))
