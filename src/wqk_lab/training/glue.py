"""Fine-tuning of encoders on sentence tasks, over several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from wqk.errors import CheckpointError, RunError, all_lines, required_by
from wqk.live.running import load_pretrained, quiet
from wqk.model import open as open_model
from wqk.tables.run import SETTINGS, open_run
from wqk_lab.runs.groups import starts
from wqk_lab.runs.seeds import Paired, by_seed, paired
from wqk_lab.training.glue_tasks import SentenceTask, judge


@dataclass(frozen=True)
class FineTuning:
    """Settings of fine-tuning with AdamW; the learning rate falls linearly after 6 % of warmup."""

    epochs: int = 3
    learning_rate: float = 5e-5
    batch: int = 32
    length: int = 128


@dataclass(frozen=True)
class TaskResult:
    """A model's metrics on one task, one value for each seed."""

    model: str
    task: str
    seeds: tuple[int, ...]
    metrics: dict[str, tuple[float, ...]]

    def over_seeds(self, metric: str) -> Paired:
        """Return mean and interval of one metric."""
        return paired(self.metrics[metric])


def fine_tune(
    model: str | PathLike[str],
    task: SentenceTask,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    how: FineTuning | None = None,
) -> TaskResult:
    """Fine-tune a model once per seed, and evaluate it on the validation split.

    The tokenizer encodes texts. If it adds no special tokens, separators are put around texts, so
    that different pairs are different inputs.

    A seed determines the new classifier's weights and the order of the rows. With one CPU thread,
    model, task, seed and software determine the result.

    Parameters
    ----------
    model
        A training run's folder, for its last checkpoint; a checkpoint's folder with its tokenizer;
        or a Hub id.
    task
        Task from `wqk_lab.training.glue_tasks.read_task`.
    seeds
        Seeds, one fine-tuning for each seed.
    how
        Epochs, learning rate and sizes.

    Raises
    ------
    CheckpointError
        The model or its tokenizer cannot be loaded, or the model is causal.
    RunError
        The run has no checkpoint, or the loss is not finite.
    MissingPackage
        PyTorch or transformers is not installed.
    """
    settings, folder = how or FineTuning(), str(model)
    if (Path(model) / SETTINGS).is_file():
        checkpoints = open_run(model).checkpoints
        if not checkpoints:
            raise RunError(f"{model}: the run has no checkpoint yet")
        folder = str(checkpoints[-1][1])
    with required_by("fine-tuning"):
        import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = []
    for seed in seeds:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            tokenizer, network = load_classifier(folder, task)
            network.to(device)
            _train(network, tokenizer, task, settings, seed)
            results.append(judge(task, _predict(network, tokenizer, task, settings)))
    values = {}
    for name in task.metrics:
        values[name] = tuple(result[name] for result in results)
    return TaskResult(str(model), task.name, tuple(seeds), values)


def differences(reference: TaskResult, candidate: TaskResult, metric: str) -> Paired:
    """Subtract the reference's metric from the candidate's, seed by seed.

    Examples
    --------
    >>> one = TaskResult("a", "cola", (1, 2), {"matthews": (0.1, 0.2)})
    >>> other = TaskResult("b", "cola", (2, 1), {"matthews": (0.25, 0.2)})
    >>> round(differences(one, other, "matthews").mean, 3)
    0.075
    """
    reference_values = dict(zip(reference.seeds, reference.metrics[metric], strict=True))
    candidate_values = dict(zip(candidate.seeds, candidate.metrics[metric], strict=True))
    pairs = by_seed(reference_values, candidate_values).values()
    return paired([candidate_value - value for value, candidate_value in pairs])


def over_runs(start: str, results: Mapping[int, TaskResult]) -> TaskResult:
    """Combine runs of one initialization into a result with a value for each seed.

    The value is the run's mean over its fine-tunings; the spread of fine-tunings does not describe
    other runs.

    Examples
    --------
    >>> runs = {seed: TaskResult("run", "cola", (1, 2), {"matthews": (seed / 10, seed / 5)})
    ...         for seed in (1, 2)}
    >>> result = over_runs("random", runs)
    >>> result.seeds, [round(value, 2) for value in result.metrics["matthews"]]
    ((1, 2), [0.15, 0.3])
    """
    first, *_ = results.values()
    metrics = {}
    for name in first.metrics:
        metrics[name] = tuple(fmean(result.metrics[name]) for result in results.values())
    return TaskResult(start, first.task, tuple(results), metrics)


def by_start(models: Sequence[str | PathLike[str]]) -> dict[str, dict[int, str]]:
    """Group runs by initialization: folders of the runs by seed, for each initialization.

    Raises `RunError` unless the runs have two initializations of one recipe, with the same seeds
    and at the same step.
    """
    runs = {str(model): open_run(model) for model in models}
    cells = starts(list(runs.values()), "glue with more than two models", penalties=True)
    model_by_folder = {run.folder: model for model, run in runs.items()}
    groups = {}  # seeds and models of each initialization, by seed
    seeds_by_start = {}
    for start, cell in cells.items():
        members = []
        for run in cell.runs:
            members.append((int(run.recipe.get("seed", 0)), model_by_folder[run.folder]))
        groups[start] = sorted(members)
        seeds_by_start[start] = [seed for seed, _ in groups[start]]
    first_seeds, second_seeds, *further_seeds = seeds_by_start.values()
    has_repeated_seeds = len(set(first_seeds)) < len(first_seeds)
    if further_seeds or first_seeds != second_seeds or has_repeated_seeds:
        listed = "; ".join(f"{start} {seeds}" for start, seeds in seeds_by_start.items())
        raise RunError(
            "glue with more than two models compares two initializations, each with the same "
            f"seeds of pre-training, each once; got {listed}"
        )
    steps = set()
    for run in runs.values():
        steps |= {step for step, _ in run.checkpoints[-1:]}
    if len(steps) > 1:
        raise RunError(
            "glue compares runs at the same step; their last checkpoints are those of the steps "
            f"{', '.join(map(str, sorted(steps)))}: wqk lab train --resume continues the shorter"
        )
    return {start: dict(group) for start, group in groups.items()}


def load_classifier(folder: str, task: SentenceTask) -> tuple[Any, Any]:
    """Return tokenizer and classifier; with a new head if the checkpoint has none for this task."""
    import transformers

    # An unknown name ends here at once, and not after many attempts.
    if any(plan.causal for plan in open_model(folder).plans):
        raise CheckpointError(
            f"{folder}: is causal, so that its first token sees none of the text; fine-tuning "
            "needs an encoder"
        )
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            kind = transformers.AutoModelForSequenceClassification
            network, _ = load_pretrained(kind, folder, num_labels=task.classes or 1)
    except Exception as error:  # model classes raise different errors
        reason = all_lines(error, 300)
        raise CheckpointError(f"{folder}: not an encoder with a tokenizer ({reason})") from None
    if tokenizer.pad_token is None:
        raise CheckpointError(f"{folder}: fine-tuning needs a tokenizer with a padding token")
    _mark_texts(tokenizer, folder)
    network.config.pad_token_id = tokenizer.pad_token_id
    network.config.problem_type = "regression" if task.classes is None else None
    return tokenizer, network


def _mark_texts(tokenizer: Any, folder: str) -> None:
    """Add separators around texts to a tokenizer that adds no token between pairs."""
    if tokenizer.num_special_tokens_to_add(pair=True) > 1:
        return
    first, between = tokenizer.cls_token or tokenizer.sep_token, tokenizer.sep_token
    if between is None or not tokenizer.is_fast:
        raise CheckpointError(
            f"{folder}: the tokenizer marks no beginning and end of texts, and has no sep_token to "
            "do it with"
        )
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A {between}",
        pair=f"{first} $A {between} $B:1 {between}:1",
        special_tokens=[
            (token, tokenizer.convert_tokens_to_ids(token)) for token in (first, between)
        ],
    )


def _train(
    network: Any, tokenizer: Any, task: SentenceTask, settings: FineTuning, seed: int
) -> None:
    import torch
    from transformers import get_linear_schedule_with_warmup

    if settings.epochs < 1:
        raise RunError(
            f"epochs must be at least 1, got {settings.epochs}: a new head answers at random"
        )
    rows, rng = len(task.train.labels), np.random.default_rng(seed)
    steps = settings.epochs * -(-rows // settings.batch)
    optimizer = torch.optim.AdamW(network.parameters(), settings.learning_rate, weight_decay=0.01)
    schedule = get_linear_schedule_with_warmup(optimizer, int(0.06 * steps), steps)
    labels = torch.tensor(
        task.train.labels, dtype=torch.float32 if task.classes is None else torch.long
    )
    network.train()
    for _ in range(settings.epochs):
        order = rng.permutation(rows)
        for start in range(0, rows, settings.batch):
            chosen = order[start : start + settings.batch]
            batch = encode(tokenizer, [task.train.texts[i] for i in chosen], network, settings)
            loss = network(**batch, labels=labels[chosen].to(network.device)).loss
            if not torch.isfinite(loss):
                raise RunError(f"{task.name}: the loss is {loss.item()}; lower the learning rate")
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def _predict(network: Any, tokenizer: Any, task: SentenceTask, settings: FineTuning) -> list[float]:
    import torch

    texts = task.validation.texts
    network.eval()
    predictions: list[float] = []
    with torch.no_grad():
        for start in range(0, len(texts), settings.batch):
            batch = encode(tokenizer, texts[start : start + settings.batch], network, settings)
            logits = network(**batch).logits
            best = logits[:, 0] if task.classes is None else logits.argmax(-1)
            predictions += best.tolist()
    return predictions


def encode(
    tokenizer: Any, texts: Sequence[tuple[str, ...]], network: Any, settings: FineTuning
) -> dict[str, Any]:
    """Encode a batch of texts, padded to the longest, truncated to the model's limit.

    ``texts`` has one sentence, or two sentences, of each example.
    """
    positions = getattr(network.config, "max_position_embeddings", None) or settings.length
    number_of_types = getattr(network.config, "type_vocab_size", None) or 0
    has_types = number_of_types > 1
    first_and_second_sentences = map(list, zip(*texts, strict=True))
    encoded = tokenizer(
        *first_and_second_sentences,
        padding=True,
        truncation=True,
        max_length=min(settings.length, positions, tokenizer.model_max_length),
        return_tensors="pt",
        return_token_type_ids=has_types,
    )
    names = ["input_ids", "attention_mask"]
    if has_types:
        names.append("token_type_ids")
    return {name: encoded[name].to(network.device) for name in names if name in encoded}
