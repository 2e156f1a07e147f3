"""Experiments: a file of cells; each cell is trained once for each seed.

::

    [recipe]                      # options of wqk lab train that all cells share
    preset = "fast"
    steps = 3000

    [[cell]]
    name = "random"               # runs go to OUT/random-1, OUT/random-2
    corpus = "wikipedia"          # a token store in the folder of corpora
    seeds = [1, 2]

    [[cell]]
    name = "symmetric"
    corpus = "wikipedia"
    init = "symmetric"
    seeds = [1, 2]
    stop = 2000                   # pause here; the schedule stays that of all steps

    [[cell]]
    name = "converted"
    from = "random"               # continues that cell's runs; seeds, corpus and recipe are theirs
    objective = "causal"

A ``config`` is a file next to this one, or a table.

Runs are ordered by seed, so that comparisons between cells are complete early.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

from wqk._files import read_lines, read_text, unwritable, write_atomically
from wqk.errors import RunError, required_by
from wqk.tables.run import METRICS, SETTINGS, Run, checkpoints_in, open_run
from wqk_lab.runs.groups import comparable
from wqk_lab.training.conversion import continued
from wqk_lab.training.corpus.store import HEADER
from wqk_lab.training.models import read_configuration
from wqk_lab.training.recipe import Recipe, differences, make_recipe

# Seconds between two looks at a running run.
LOOK = 2.0
# Signals that interrupt a run, which its checkpoints continue.
INTERRUPTIONS = {
    getattr(signal, name) for name in ("SIGHUP", "SIGINT", "SIGTERM") if hasattr(signal, name)
}


@dataclass(frozen=True)
class Trial:
    """One run of an experiment."""

    cell: str  #: Name of the cell.
    recipe: Recipe  #: The recipe, including the seed.
    corpus: Path  #: The token store.
    folder: Path  #: The run's folder.
    goal: int  #: Last step of the run.
    threads: int | None  #: Number of CPU threads; None for an equal share of the cores,
    #: and one for a narrow model.
    parent: Path | None = None  #: Folder of the run to continue.

    @property
    def step(self) -> int | None:
        """Last step in the metrics; None if the run does not exist."""
        if not (self.folder / SETTINGS).is_file():
            return None
        lines = read_lines(self.folder / METRICS)
        return int(lines[-1]["step"]) if lines else 0

    @property
    def done(self) -> bool:
        """True if the run has a checkpoint at its goal or later."""
        saved = checkpoints_in(self.folder) if self.folder.is_dir() else []
        return any(step >= self.goal for step, _ in saved)

    @property
    def configuration(self) -> Path:
        """File with the recipe's model configuration, which the command reads."""
        return self.folder / "configuration.json"

    @property
    def log(self) -> Path:
        """The log of the command."""
        return self.folder / "log.txt"

    def command(self, threads: int) -> list[str]:
        """Return the command that trains or resumes the run."""
        train = [sys.executable, "-m", "wqk", "lab", "train", "--out", str(self.folder)]
        train += ["--corpus", str(self.corpus), "--stop", str(self.goal)]
        if self.recipe.fits_one_thread:
            threads = 1
        train += ["--threads", str(self.threads or threads)]
        if self.step is not None:
            return [*train, "--resume"]
        if self.parent is not None:
            train += ["--from", str(self.parent)]
        values = self.recipe.to_json()
        del values["parent"]
        penalty, weight = values.pop("penalty"), values.pop("penalty_weight")
        if penalty != "none":
            train += ["--penalty", f"{penalty}={weight}"]
        if values.pop("config"):
            train += ["--config", str(self.configuration)]
        for name, value in values.items():
            if value is not None:
                train += [f"--{name.replace('_', '-')}", str(value)]
        return train


def read_experiments(
    path: str | PathLike[str], corpora: str | PathLike[str], out: str | PathLike[str]
) -> list[Trial]:
    """Return the runs of a file of experiments, in training order.

    Raises
    ------
    RunError
        The file is not valid TOML, a cell lacks a field or is a duplicate, or a recipe is
        wrong; the message names the cell.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> file = Path(mkdtemp(), "two.toml")
    >>> _ = file.write_text('''
    ... [recipe]
    ... steps = 10
    ... [[cell]]
    ... name = "random"
    ... corpus = "text"
    ... seeds = [1, 2]
    ... [[cell]]
    ... name = "paired"
    ... corpus = "text"
    ... init = "paired"
    ... seeds = [1, 2]
    ... ''')
    >>> [trial.folder.name for trial in read_experiments(file, "corpora", "runs")]
    ['random-1', 'paired-1', 'random-2', 'paired-2']
    """
    path = Path(path)
    text = read_text(path, RunError)
    try:
        content = tomllib.loads(text)
    except ValueError as error:
        raise RunError(f"{path}: not a TOML file ({error})") from None
    cells, shared = content.get("cell"), content.get("recipe", {})
    tables = isinstance(cells, list) and all(isinstance(table, dict) for table in [shared, *cells])
    if not tables or not cells:
        raise RunError(f"{path}: expected [[cell]] tables and a [recipe] table")
    trials: list[tuple[int, Trial]] = []
    for cell in cells:
        name = cell.get("name")
        if any(trial.cell == name for _, trial in trials):
            raise RunError(
                f"{path}: two cells are called {name!r}; a name must be unique, since it names a "
                "run's folder"
            )
        try:
            values = cell if "from" in cell else {**shared, **cell}
            if isinstance(values.get("config"), str):
                values = {**values, "config": read_configuration(path.parent / values["config"])}
            trials += _trials(values, trials, Path(corpora), Path(out))
        except RunError as error:
            raise RunError(f"{path}: cell {name!r}: {error}") from None
    return [trial for _, trial in sorted(trials, key=lambda pair: pair[0])]


def _trials(
    cell: Mapping[str, Any], trials: Sequence[tuple[int, Trial]], corpora: Path, out: Path
) -> list[tuple[int, Trial]]:
    """Return the runs of a cell with their places; a continuing run has its parent's place."""
    values = {name.replace("-", "_"): value for name, value in cell.items()}
    before = values.pop("from", None)
    parents = {trial.recipe.seed: (at, trial) for at, trial in trials if trial.cell == before}
    if before is not None and not parents:
        raise RunError(f"from must name a cell above this one; got {before!r}")
    needed: dict[str, type] = (
        {"name": str} if parents else {"name": str, "corpus": str, "seeds": list}
    )
    for key, kind in needed.items():
        if not values.get(key) or not isinstance(values[key], kind):
            raise RunError(f"a cell needs a {key}, got {values.get(key)!r}")
    name, corpus, stop, threads = (
        values.pop(key, None) for key in ("name", "corpus", "stop", "threads")
    )
    seeds = values.pop("seeds", [*parents])
    if Path(name).name != name:
        raise RunError(f"a cell's name must be a valid folder name; got {name!r}")
    if "seed" in values:
        raise RunError(f"a cell lists its seeds; got seed {values['seed']!r}")
    if parents and (not isinstance(seeds, list) or not {*seeds} <= {*parents}):
        raise RunError(f"seeds must be among those of {before} ({[*parents]}); got {seeds!r}")
    if len(set(map(str, seeds))) < len(seeds):
        raise RunError(f"the seeds of a cell must be distinct; got {seeds}")
    if threads is not None and (type(threads) is not int or threads < 1):
        raise RunError(f"threads must be 1 or more; got {threads!r}")
    trials = []
    for at, seed in enumerate(seeds):
        parent = None
        if parents:
            at, parent = parents[seed]
            if parent.goal < parent.recipe.steps:
                reason = f"{before} stops at {parent.goal}"
                raise RunError(f"only finished runs can be continued; {reason}")
            recipe = continued(parent.recipe, parent.folder.name, values)
            threads = threads or parent.threads
        else:
            recipe = make_recipe(**{"preset": "fast", **values}, seed=seed)
        goal = recipe.steps if stop is None else stop
        if type(goal) is not int or not 0 < goal <= recipe.steps:
            raise RunError(f"stop must be one of the {recipe.steps} steps; got {stop!r}")
        store = parent.corpus if parent and corpus is None else corpora / corpus
        run, continued_run = out / f"{name}-{seed}", parent.folder if parent else None
        trials.append((at, Trial(name, recipe, store, run, goal, threads, continued_run)))
    return trials


def missing_corpora(trials: Sequence[Trial]) -> list[Path]:
    """Return the missing folders of token stores for unfinished runs."""
    folders = dict.fromkeys(trial.corpus for trial in trials if not trial.done)
    return [folder for folder in folders if not (folder / HEADER).is_file()]


def run_experiments(
    trials: Sequence[Trial],
    *,
    jobs: int | None = None,
    on_event: Callable[[Trial, str], None] | None = None,
    on_progress: Callable[[], None] | None = None,
) -> list[Trial]:
    """Train the unfinished runs in separate processes; return the failed runs.

    An interrupted run is resumed. The output of a run is in ``log.txt`` in its folder.

    Parameters
    ----------
    trials
        Runs from `read_experiments`.
    jobs
        Number of simultaneous runs; None for one run per GPU, or one run without GPUs. Each process
        uses one GPU.
    on_event
        Called with ``training``, ``done``, ``interrupted`` or ``failed`` as each run begins and
        ends.
    on_progress
        Called every few seconds while runs train; see their ``step``.

    Raises
    ------
    RunError
        An existing run has another recipe; nothing was trained.
    OutputError
        A run's folder cannot be created.
    """
    tell = on_event or (lambda trial, event: None)
    for trial in trials:
        if trial.step is None:
            continue
        before = Recipe.from_json(open_run(trial.folder).recipe)
        if changed := differences(before, trial.recipe):
            raise RunError(
                f"{trial.folder}: trained with a different recipe ({'; '.join(changed)}); choose "
                "another folder, or remove it"
            )
    gpus = visible_gpus()
    jobs = jobs or max(len(gpus), 1)
    threads = max((os.cpu_count() or 1) // jobs, 1)
    devices: SimpleQueue[str | None] = SimpleQueue()
    for job in range(jobs):
        devices.put(gpus[job % len(gpus)] if gpus else None)
    ended = {trial.folder: Event() for trial in trials}

    def train(trial: Trial) -> bool:
        try:
            # Parents come before children, so the parent is running or done.
            if trial.parent in ended:
                ended[trial.parent].wait()
            return trial.done or train_now(trial)
        finally:
            ended[trial.folder].set()

    def train_now(trial: Trial) -> bool:
        device = devices.get()
        try:
            tell(trial, "training")
            try:
                trial.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(trial.folder, error) from None
            if trial.recipe.config:
                write_atomically(trial.configuration, json.dumps(trial.recipe.config).encode())
            chosen = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
            with trial.log.open("a") as file:
                process = subprocess.Popen(
                    trial.command(threads),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **chosen},
                )
                _wait(process, on_progress)
            tell(trial, _outcome(process.returncode))
            return process.returncode == 0
        finally:
            devices.put(device)

    pool = ThreadPoolExecutor(jobs)
    try:
        outcomes = list(pool.map(train, trials))
    finally:
        pool.shutdown(cancel_futures=True)
    return [trial for trial, done in zip(trials, outcomes, strict=True) if not done]


def _outcome(status: int) -> str:
    """Return the outcome of a run by the exit status of its process.

    Examples
    --------
    >>> [_outcome(status) for status in (0, 2, 130, -signal.SIGTERM)]
    ['done', 'failed', 'interrupted', 'interrupted']
    """
    if status == 0:
        return "done"
    # A command that a signal ends reports 128 + its number; a process that it kills, its negative.
    number = -status if status < 0 else status - 128
    return "interrupted" if number in INTERRUPTIONS else "failed"


def _wait(process: subprocess.Popen[bytes], on_progress: Callable[[], None] | None) -> None:
    """Wait for a process; on an error or interruption, end the process."""
    try:
        while True:
            try:
                process.wait(LOOK)
                return
            except subprocess.TimeoutExpired:
                if on_progress:
                    on_progress()
    except BaseException:
        process.terminate()
        raise


def visible_gpus() -> list[str]:
    """Return the GPUs of this process, by name in ``CUDA_VISIBLE_DEVICES``."""
    with required_by("training"):
        import torch

    count = torch.cuda.device_count()
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = listed.split(",") if listed else [str(number) for number in range(count)]
    return names[:count]


def comparable_runs(trials: Iterable[Trial]) -> list[list[Run]]:
    """Return `wqk_lab.runs.groups.comparable` for finished runs, by goal, the earliest first."""
    runs_by_goal: dict[int, list[Run]] = {}
    for trial in trials:
        if trial.done:
            runs_by_goal.setdefault(trial.goal, []).append(open_run(trial.folder))
    groups: list[list[Run]] = []
    for goal in sorted(runs_by_goal):
        groups += comparable(runs_by_goal[goal])
    return groups
