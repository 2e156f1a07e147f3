"""One training run, from a recipe and a token store to a run's folder."""

from __future__ import annotations

import logging
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk._files import locked, read_lines
from wqk._version import __version__
from wqk.errors import CorpusError, RunError, required_by
from wqk.live.initializing import Initialization, LayerChange
from wqk.tables.run import (
    METRICS,
    Run,
    checkpoints_in,
    create_run,
    drop_after,
    open_run,
    require_no_run,
)
from wqk_lab.training.conversion import Parent
from wqk_lab.training.corpus.store import TokenStore
from wqk_lab.training.models import OPTIMIZER
from wqk_lab.training.progress import TrainingProgress
from wqk_lab.training.recipe import Recipe, changes, differences

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOG = logging.getLogger("wqk_lab.training")

# Settings for the choice of kernels in libraries of matrix products.
KERNELS = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def train(
    recipe: Recipe | None,
    corpus: str | PathLike[str] | None,
    folder: str | PathLike[str],
    *,
    parent: str | PathLike[str] | None = None,
    resume: bool = False,
    stop: int | None = None,
    report_to: Sequence[str] = (),
    on_progress: Callable[[TrainingProgress], None] | None = None,
) -> Run:
    r"""Train a model into a run's folder, or resume an interrupted run.

    In one process on a CPU, recipe, corpus, software, processor and number of threads determine
    every bit of the result, also after interruptions. Under torchrun, every process makes the same
    call, and processes its share of every batch; the first process writes.

    Parameters
    ----------
    recipe
        Recipe; None, when resuming, for the recipe of the run.
    corpus
        Folder of a token store; None for the corpus of the run when resuming, or for the corpus of
        the parent.
    folder
        The run's folder, created unless the run is resumed.
    parent
        Folder of the run that a new run continues; ``recipe`` is then a result of
        `wqk_lab.training.conversion.continued`.
    resume
        Whether to resume from the last checkpoint; without a checkpoint, the run starts again.
    stop
        Step to stop after, with a checkpoint to resume from; the schedule is for all steps.
    report_to
        Trackers of accelerate, such as ``tensorboard``, besides the run's own files.
    on_progress
        Called at every entry of the metrics, in the first process.

    Raises
    ------
    RunError
        The folder already contains a run, or, when resuming, no run or a run with another recipe or
        corpus; the parent is not the parent in the recipe, or is not finished; the corpus has
        another tokenizer; another process trains in the folder; or the loss is no longer finite.
    CorpusError
        The token store cannot be used.
    UnknownFamily
        The queries and keys of the model are unknown.
    MissingPackage
        torch, transformers or accelerate is not installed.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> from wqk_lab.training.corpus import CorpusOptions, build_corpus
    >>> from wqk_lab.training.recipe import make_recipe
    >>> place = Path(mkdtemp())
    >>> _ = Path(place, "roses.txt").write_text("a rose is a rose\nis a rose is a rose\n" * 20)
    >>> options = CorpusOptions(text="characters", document="line", held_out=1)
    >>> store = build_corpus([place / "roses.txt"], place / "corpus", options)
    >>> tiny = {"layers": 1, "width": 16, "heads": 2, "block": 8, "batch": 4, "steps": 3}
    >>> recipe = make_recipe("fast", **tiny, held_out_blocks=4)
    >>> run = train(recipe, store.folder, place / "run")
    >>> run.metrics["step"].to_list(), [step for step, _ in run.checkpoints]
    ([0, 1, 2, 3], [0, 1, 3])
    """
    with required_by("training"):
        import torch
        from accelerate.tracking import get_available_trackers  # type: ignore[import-untyped]

        from wqk_lab.training.loop import make_accelerator, run_loop
    from wqk.live.initializing import initialize_
    from wqk_lab.training.conversion import require_same_tokenizer
    from wqk_lab.training.initializations import STARTS
    from wqk_lab.training.models import build_model, load_checkpoint, tokenizer_files
    from wqk_lab.training.objectives import TokenRows

    folder = Path(folder)
    if not resume:
        require_no_run(folder)  # before the lock, which would change the folder
    before = _parent(recipe, parent, folder, resume)
    if before is not None and not resume:
        corpus = before.run.corpus["folder"] if corpus is None else corpus
    recipe, store = _recipe_and_store(recipe, corpus, folder, resume)
    if "mask" not in store.special:
        raise CorpusError(f"{store.folder}: training needs a vocabulary with a mask token")
    for split in ("train", "held_out"):
        _ = TokenRows.of(store, split, recipe).count  # raises an error if there are no rows
    tokenizer_files(store, recipe.block)
    available = sorted(str(getattr(name, "value", name)) for name in get_available_trackers())
    if odd := sorted(set(report_to) - set(available)):
        raise RunError(
            f"expected installed loggers: {', '.join(available) or 'none'}; got {', '.join(odd)}"
        )
    accelerator = make_accelerator(recipe, folder, report_to)
    processes, first = accelerator.num_processes, accelerator.is_main_process
    if recipe.batch % processes:
        raise RunError(
            f"the batch must be divisible by the number of processes; got {recipe.batch} blocks "
            f"and {processes} processes"
        )
    model = build_model(recipe, store.vocabulary_size, store.special)
    if before is not None:
        require_same_tokenizer(before, store)
        load_checkpoint(before.checkpoint, model)
    start = initialize_(
        model,
        STARTS[recipe.init],
        seed=recipe.seed,
        head_norm_ratio=recipe.init_head_norm,
        norm_ratio=recipe.init_norm,
        value_ratio=recipe.init_values,
    )
    # The holder of the lock creates the run: if two processes start together, one fails.
    lock = locked(folder / ".lock", "training run") if first else nullcontext()
    device = accelerator.device
    # The caller's random numbers stay as they are.
    with lock, torch.random.fork_rng([device] if device.type == "cuda" else []):
        if first and not resume:
            settings = _settings(recipe, store, model, start, accelerator)
            parent_settings = {} if before is None else {"parent": before.settings()}
            create_run(folder, {**settings, **parent_settings})
        saved = checkpoints_in(folder) if resume else []
        complete = [(step, path) for step, path in saved if step and (path / OPTIMIZER).is_file()]
        checkpoint = complete[-1] if complete else None
        is_finished = checkpoint is not None and checkpoint[0] >= min(
            stop or recipe.steps, recipe.steps
        )
        if first and resume and not is_finished:
            begun_in = open_run(folder).settings.get("environment", {})
            _tell_changes(folder, begun_in, _environment(recipe, accelerator))
        seconds = _rewind(folder, checkpoint, recipe) if first else 0.0
        if report_to:
            name = folder.resolve().name
            named = {logger: {"name": name} for logger in ("trackio", "wandb")}
            values = recipe.to_json().items()
            plain = {name: v for name, v in values if isinstance(v, int | float | str)}
            accelerator.init_trackers("wqk", plain, named)
        try:
            run_loop(
                accelerator,
                model,
                recipe,
                store,
                folder,
                checkpoint=checkpoint,
                seconds=seconds,
                stop=stop,
                on_progress=on_progress,
            )
        finally:
            for tracker in accelerator.trackers:
                tracker.finish()
    return open_run(folder)


def _parent(
    recipe: Recipe | None, parent: str | PathLike[str] | None, folder: Path, resume: bool
) -> Parent | None:
    """Return the run that supplies the weights, for a new run and for a run that starts again."""
    from wqk_lab.training.conversion import open_parent

    if resume:
        recorded = open_run(folder).settings.get("parent")
        if recorded is None or any(
            (path / OPTIMIZER).is_file() for _, path in checkpoints_in(folder)
        ):
            return None
        opened = open_parent(recorded["folder"])
        if opened.fingerprint != recorded["fingerprint"]:
            raise RunError(
                f"{folder}: has no checkpoint to resume from, and the weights it began with, those "
                f"of {opened.checkpoint}, are no longer there; train it again"
            )
        return opened
    recipe_parent = None if recipe is None else recipe.parent
    if (recipe_parent is None) != (parent is None):
        raise RunError(
            "a recipe that continues a run needs the folder of that run as parent, and no other "
            f"recipe does; got {parent}"
        )
    if recipe_parent is None or parent is None:
        return None
    opened = open_parent(parent)
    if opened.recipe.to_json() != recipe_parent["recipe"]:
        changes = "; ".join(differences(Recipe.from_json(recipe_parent["recipe"]), opened.recipe))
        raise RunError(f"{parent}: is not the run that the recipe continues ({changes})")
    return opened


def _recipe_and_store(
    recipe: Recipe | None, corpus: str | PathLike[str] | None, folder: Path, resume: bool
) -> tuple[Recipe, TokenStore]:
    """Return the recipe and the corpus; when resuming, of the run."""
    from wqk_lab.training.corpus.store import TokenStore

    if not resume:
        if recipe is None or corpus is None:
            raise RunError("a new run needs a recipe and a corpus; got only one of them, or none")
        return recipe, TokenStore.open(corpus)
    run = open_run(folder)
    before = Recipe.from_json(run.recipe)
    if recipe is not None and (changed := changes(before, recipe)):
        expected = ", ".join(f"{name} {old}" for name, old, _ in changed)
        got = ", ".join(f"{name} {new}" for name, _, new in changed)
        raise RunError(
            f"{folder}: a run resumes with its own recipe; expected {expected}, as the run began, "
            f"got {got}; leave the options that differ out, or begin a new run in another folder "
            f"(--from {folder} -o OTHER starts from this run's weights, once it has all its steps)"
        )
    store = TokenStore.open(run.corpus["folder"] if corpus is None else corpus)
    if store.fingerprint != (fingerprint := run.corpus["fingerprint"]):
        raise RunError(
            f"{folder}: a run resumes on its own corpus, {fingerprint[:12]}; "
            f"{store.folder} is {store.fingerprint[:12]}"
        )
    return before, store


def _rewind(folder: Path, checkpoint: tuple[int, Path] | None, recipe: Recipe) -> float:
    """Restore a folder to its state at a checkpoint; return the seconds of training until then."""
    from wqk_lab.training.models import clear_staging, thin_out

    clear_staging(folder)
    if checkpoint:
        thin_out(folder, checkpoint[0], recipe)
    else:
        for _, path in checkpoints_in(folder):
            shutil.rmtree(path)
    drop_after(folder / METRICS, checkpoint[0] if checkpoint else -1)
    return max((line.get("seconds", 0.0) for line in read_lines(folder / METRICS)), default=0.0)


def _settings(
    recipe: Recipe,
    store: TokenStore,
    model: PreTrainedModel,
    start: Initialization,
    accelerator: Any,
) -> dict[str, Any]:
    """Return the contents of ``run.json``."""
    return {
        "schema_version": 1,
        "recipe": recipe.to_json(),
        "model": {
            "class": type(model).__name__,
            "parameters": model.num_parameters(),
            "config": model.config.to_dict(),
        },
        "initialization": [_initialization(change) for change in start.layers],
        "corpus": {
            "folder": str(store.folder.resolve()),
            **{name: getattr(store, name) for name in ("fingerprint", "unit", "vocabulary_size")},
        },
        "environment": _environment(recipe, accelerator),
    }


def _initialization(change: LayerChange) -> dict[str, Any]:
    """Return the scores of a layer after initialization."""
    record = {"stack": change.stack, "layer": change.layer, **change.after._asdict()}
    return record | {name: getattr(change, name) for name in change.derived}


def _environment(recipe: Recipe, accelerator: Any) -> dict[str, Any]:
    """Return all facts, besides recipe and corpus, that determine the bits of a run."""
    import accelerate  # type: ignore[import-untyped]
    import torch
    import transformers

    from wqk_lab.training.models import available_precision

    device = accelerator.device
    device_name = device.type
    if device.type == "cuda":
        device_name = torch.cuda.get_device_name(device)
    return {
        "wqk": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": accelerate.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "kernels": {name: os.environ[name] for name in KERNELS if name in os.environ},
        "device": device_name,
        "precision": available_precision(recipe.precision),
        "processes": accelerator.num_processes,
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    """Return the processor's name; libraries choose kernels by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _tell_changes(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Warn if a run is resumed in another environment than at its beginning."""
    changed = [
        f"{name} {now[name]} instead of {before[name]}"
        for name in now
        if name in before and now[name] != before[name]
    ]
    if not changed:
        return
    advice = ""
    if "threads" in before and now["threads"] != before["threads"]:
        advice = f"; --threads {before['threads']} is the run's own number"
    LOG.warning(
        "%s: resumed with %s; its numbers can differ in their last digits from those of a run "
        "that was never interrupted%s",
        folder,
        ", ".join(changed),
        advice,
    )
