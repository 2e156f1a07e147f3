"""One training run, from a recipe and a token store to a run's directory."""

from __future__ import annotations

import os
import platform
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk._version import __version__
from wqk.errors import CorpusError, MissingPackage, RunError
from wqk.runs import METRICS, Run, create_run, drop_after, open_run, read_lines
from wqk.training.recipe import Recipe, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import PathLike

    from transformers import PreTrainedModel, TrainingArguments

    from wqk.training.corpus.store import TokenStore


@dataclass(frozen=True)
class TrainingProgress:
    """How far a run is: steps, and the latest losses (in nats) and speed, as far as known."""

    steps_done: int
    steps: int
    loss: float | None
    held_out_loss: float | None
    tokens_per_second: float | None
    held_out_is_new: bool


def train(
    recipe: Recipe | None,
    corpus: str | PathLike[str] | None,
    folder: str | PathLike[str],
    *,
    resume: bool = False,
    report_to: tuple[str, ...] = (),
    on_progress: Callable[[TrainingProgress], None] | None = None,
) -> Run:
    """Train a model and leave a run's directory, or go on with one that was interrupted.

    On one process of a CPU the result is a function of recipe, corpus, software and number of
    threads, bit by bit, wherever it was interrupted.

    Parameters
    ----------
    recipe
        What to do; None to take that of the run that is resumed.
    corpus
        A token store's folder; None to take that of the run that is resumed.
    folder
        The run's directory: made here, or, to resume, the one to go on in.
    resume
        Go on from the last checkpoint.
    report_to
        transformers' loggers besides the run's own files, such as ``tensorboard``.
    on_progress
        Called at every entry of the metrics.

    Raises
    ------
    RunError
        There is a run already, or, to resume, none, or one of another recipe or corpus; or the loss
        is no longer finite.
    CorpusError
        The token store cannot be used.
    MissingPackage
        torch, transformers or accelerate are not installed.
    """
    try:
        import accelerate  # type: ignore[import-untyped]  # noqa: F401
        import torch  # noqa: F401

        from wqk.monitor import ScoreCallback
        from wqk.training.trainer import Cadence, RunTrainer
    except ImportError as error:
        raise MissingPackage(f"training needs {error.name}: pip install 'wqk[train]'") from None
    from wqk.training.corpus.store import TokenStore
    from wqk.training.models import build_model

    folder = Path(folder)
    recipe, corpus = _what_to_do(recipe, corpus, folder, resume)
    store = TokenStore.open(corpus)
    if "mask" not in store.special:
        raise CorpusError(f"{store.folder}: training needs a vocabulary with a mask token")
    arguments = _arguments(recipe, folder, report_to)
    if recipe.batch % arguments.world_size:
        raise RunError(
            f"a batch is divided among all processes; got {recipe.batch} blocks and "
            f"{arguments.world_size} processes"
        )
    model = build_model(recipe, store.vocabulary_size, store.special)
    _initialize(model, recipe)
    main = arguments.process_index == 0
    checkpoint = None
    if resume:
        run = open_run(folder)
        _same_corpus(run, store)
        checkpoint = _last_checkpoint(run)
    if main and not resume:
        create_run(folder, _settings(recipe, store, model, arguments))
    step = int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0
    if main and resume:
        drop_after(folder / METRICS, step)
    seconds = max(
        (line.get("seconds", 0.0) for line in read_lines(folder / METRICS) if line["step"] <= step),
        default=0.0,
    )
    with _quiet_transformers():
        trainer = RunTrainer(model, recipe, store, arguments, _penalty(model, recipe), seconds)
        trainer.add_callback(Cadence(trainer))
        trainer.add_callback(ScoreCallback(folder, every=recipe.score_every))
        if on_progress and main:
            trainer.add_callback(_reporter(recipe, on_progress))
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    return open_run(folder)


def _what_to_do(
    recipe: Recipe | None, corpus: str | PathLike[str] | None, folder: Path, resume: bool
) -> tuple[Recipe, str | PathLike[str]]:
    """Recipe and corpus as given, or those of the run to be resumed."""
    if not resume:
        if recipe is None or corpus is None:
            raise RunError("a new run needs a recipe and a corpus; got only one of them, or none")
        return recipe, corpus
    settings = open_run(folder).settings
    before = Recipe.from_json(settings["recipe"])
    if recipe is not None and (changed := differences(before, recipe)):
        raise RunError(
            f"{folder}: a run is resumed by its own recipe; this one differs in "
            f"{'; '.join(changed)}"
        )
    return before, corpus if corpus is not None else settings["corpus"]["folder"]


def _same_corpus(run: Run, store: TokenStore) -> None:
    before = run.settings["corpus"]["fingerprint"]
    if store.fingerprint != before:
        raise RunError(
            f"{run.folder}: a run is resumed on its own corpus, {before[:12]}; "
            f"{store.folder} is {store.fingerprint[:12]}"
        )


def _last_checkpoint(run: Run) -> Path | None:
    """The latest that holds all it takes to go on; None where the run has to begin again."""
    whole = [path for _, path in run.checkpoints if (path / "optimizer.pt").is_file()]
    return whole[-1] if whole else None


def _settings(
    recipe: Recipe, store: TokenStore, model: PreTrainedModel, arguments: TrainingArguments
) -> dict[str, Any]:
    """What ``run.json`` says of a run."""
    import accelerate
    import torch
    import transformers

    return {
        "schema_version": 1,
        "recipe": recipe.to_json(),
        "model": {
            "class": type(model).__name__,
            "parameters": model.num_parameters(),
            "config": model.config.to_dict(),
        },
        "corpus": {
            "folder": str(store.folder.resolve()),
            "fingerprint": store.fingerprint,
            "unit": store.unit,
            "vocabulary_size": store.vocabulary_size,
        },
        "environment": {
            "wqk": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
            "platform": platform.platform(),
            "device": _device_name(arguments),
            "precision": _precision(recipe),
            "processes": arguments.world_size,
            "threads": torch.get_num_threads(),
        },
    }


def _device_name(arguments: TrainingArguments) -> str:
    import torch

    if arguments.device.type == "cuda":
        return str(torch.cuda.get_device_name(arguments.device))
    return str(arguments.device.type)


def _precision(recipe: Recipe) -> str:
    """The recipe's precision where the device has it; float32 on a CPU, to the bit."""
    import torch

    if not torch.cuda.is_available():
        return "float32"
    if recipe.precision == "bf16" and not torch.cuda.is_bf16_supported():
        return "float32"
    return recipe.precision


def _arguments(recipe: Recipe, folder: Path, report_to: tuple[str, ...]) -> TrainingArguments:
    """The recipe in the Trainer's words; what the Trainer would do by itself is switched off."""
    import torch
    from transformers import TrainingArguments

    accelerated, precision = torch.cuda.is_available(), _precision(recipe)
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1  # as torchrun says it
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch,
        gradient_accumulation_steps=recipe.accumulation,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(
            recipe.schedule, recipe.schedule
        ),
        warmup_steps=recipe.warmup,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.clip,
        optim="adamw_torch_fused",
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        use_cpu=not accelerated,
        ddp_backend=None if accelerated or not distributed else "gloo",
        ddp_find_unused_parameters=False,
        torch_compile=accelerated,
        seed=recipe.seed,
        report_to=list(report_to) or "none",
        # The cadence is ours, and a batch is found by its number.
        logging_strategy="no",
        eval_strategy="no",
        save_strategy="no",
        ignore_data_skip=True,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        dataloader_pin_memory=accelerated,
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bar of its own for every checkpoint, and no warning about weights that are tied."""
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


def _initialize(model: PreTrainedModel, recipe: Recipe) -> None:
    """Set queries and keys as the recipe says."""
    from wqk.initialization import initialize_

    initialize_(model, recipe.init, seed=recipe.seed, keep_norm=recipe.init_keep_norm)


def _penalty(model: PreTrainedModel, recipe: Recipe) -> Callable[[], Any] | None:
    """The penalty of the live model as a function without arguments."""
    if recipe.penalty == "none":
        return None
    from wqk.training.penalties import penalty

    return lambda: penalty(model, recipe.penalty)


def _reporter(recipe: Recipe, on_progress: Callable[[TrainingProgress], None]) -> Any:
    """A callback that turns the Trainer's logs into progress."""
    from transformers import TrainerCallback

    latest: dict[str, Any] = {}

    class Reporter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            before = latest.get("tokens"), latest.get("seconds")
            latest.update(logs or {})
            if "tokens" in (logs or {}) and None not in before:
                passed = latest["seconds"] - before[1]
                latest["speed"] = (latest["tokens"] - before[0]) / passed if passed else None
            on_progress(
                TrainingProgress(
                    state.global_step,
                    recipe.steps,
                    latest.get("loss"),
                    latest.get("held_out_loss"),
                    latest.get("speed"),
                    "held_out_loss" in (logs or {}),
                )
            )

    return Reporter()
