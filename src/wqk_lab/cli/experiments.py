"""``wqk lab experiments``: many runs from one file, several at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk.cli.options import COUNT, PATH, POSITIVE
from wqk_lab.training.declared import below, documented

if TYPE_CHECKING:
    from wqk_lab.training.experiments import Trial


@documented
@click.command()
@click.argument("file", type=PATH, metavar="FILE.toml")
@click.option("--corpora", type=PATH, required=True, metavar="DIR")
@click.option("-o", "--out", type=PATH, required=True, metavar="DIR")
@click.option("--jobs", type=COUNT, metavar="N")
@click.option("--threads", type=COUNT, metavar="N")
@click.option("--only", metavar="NAME", default="", show_default=False)
@click.option("--dry-run", is_flag=True)
@click.option("--speed", type=POSITIVE, metavar="TFLOPS")
@below
def experiments(
    file: Path,
    corpora: Path,
    out: Path,
    jobs: int | None,
    threads: int | None,
    only: str,
    dry_run: bool,
    speed: float | None,
    below: float | None,
) -> None:
    """Train every cell of FILE.toml once per seed, and compare the initializations.

    The same command resumes: finished runs are skipped, interrupted runs continue. Finished runs
    that differ only in initialization are compared seed by seed, as by wqk lab speedup.

    \b
    Examples:
      wqk lab experiments table1-cpu.toml --corpora corpora --out runs --dry-run
      wqk lab experiments table1-cpu.toml --corpora corpora --out runs --jobs 2

    Parameters
    ----------
    corpora
        Folder with the cells' token stores.
    out
        Folder of the runs.
    jobs
        Number of simultaneous runs.  [default: one per GPU, or one]
    threads
        Number of CPU threads of each run, in place of the file's.  [default: an equal share of the
        cores; one up to width 64]
    only
        Only cells whose name contains NAME.
    dry_run
        Show which runs are finished and what the others will cost.
    speed
        For the time of the others: 10¹² operations a second.  [default: as in the runs of --out;
        before the first run, measured in a few training steps]
    """
    from wqk.cli import display
    from wqk.errors import RunError, required_by
    from wqk_lab.training.experiments import missing_corpora, read_experiments, run_experiments

    trials = [trial for trial in read_experiments(file, corpora, out) if only in trial.cell]
    if threads is not None:
        trials = [replace(trial, threads=threads) for trial in trials]
    if not trials:
        raise RunError(f"{file}: no cell has a name that contains {only!r}")
    missing = missing_corpora(trials)
    if not dry_run:
        with required_by("training"):
            import torch  # noqa: F401
    if missing and not dry_run:
        raise RunError(f"{_listed(missing)}; make it with wqk lab corpus, or give its --corpora")
    if not dry_run:
        try:
            with display.bar("experiments", lambda: _progress(trials)) as on_progress:
                failed = run_experiments(
                    trials,
                    jobs=jobs,
                    on_event=lambda trial, event: display.say(f"{trial.folder}: {event}"),
                    on_progress=on_progress,
                )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"repeat the command to resume in {out}") from None
    _print_table(trials, speed, measure=dry_run)
    _print_plateaus(trials)
    _print_comparisons(trials, below)
    if missing:
        display.say(f"{_listed(missing)}; wqk lab corpus makes one")
    if not dry_run and failed:
        logs = ", ".join(str(trial.log) for trial in failed)
        raise RunError(f"{len(failed)} of {len(trials)} runs failed; see {logs}")


def _listed(missing: Sequence[Path]) -> str:
    """Return the missing token stores as the beginning of a sentence."""
    return f"no corpus in {', '.join(map(str, missing))}, which unfinished runs need"


def _progress(trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the fields of the bar: steps of all runs, and number of finished runs."""
    steps = 0
    goal = 0
    finished = 0
    for trial in trials:
        steps_of_trial = min(trial.step or 0, trial.goal)
        steps += steps_of_trial
        goal += trial.goal
        if steps_of_trial >= trial.goal:
            finished += 1
    text = f"{steps:,}/{goal:,} steps, {finished} of {len(trials)} runs done"
    return {"total": goal, "completed": steps, "text": text}


def _state(trial: Trial) -> str:
    if trial.done:
        return "done"
    return "to do" if trial.step is None else "begun"


def _print_table(trials: Sequence[Trial], speed: float | None, *, measure: bool) -> None:
    """Print one line for each run, and the remaining work."""
    from wqk.cli import display
    from wqk.tables.sheet import Sheet

    table = Sheet.of("run", "step", "of", "state", text=["run"])
    for trial in trials:
        table.add(trial.folder.name, str(trial.step or 0), str(trial.goal), _state(trial))
    console = display.output()
    console.print(table)
    if any(not trial.done for trial in trials):
        console.print(_costs(trials, speed, measure=measure), style="dim")


def _costs(trials: Sequence[Trial], speed: float | None, *, measure: bool) -> str:
    """Return a sentence on the unfinished runs: operations and time."""
    from wqk.cli.survey import duration
    from wqk_lab.training.costs import flops_left, speed_of_runs

    unfinished = sum(not trial.done for trial in trials)
    to_do = f"To do: {unfinished} of {len(trials)} runs"
    operations = flops_left(trials)
    if math.isnan(operations):
        return f"{to_do}, at a cost unknown with a configuration of their own."
    to_do += f", {operations:.2g} operations"
    source, approximately = "as given", "about"
    rate = speed * 1e12 if speed else None
    if rate is None:
        source = "as measured in the runs that have begun"
        rate = speed_of_runs(trials[0].folder.parent)
    if rate is None and measure:
        source, approximately = "measured now in a few training steps", "very roughly"
        rate = _speed_now(trials)
    if rate is None:
        return (
            f"{to_do}; their time can be estimated once the token store is there and PyTorch is "
            "installed (or give --speed)."
        )
    return (
        f"{to_do}, {approximately} {duration(operations / rate)} of one device at "
        f"{rate / 1e12:.2g} TFLOP/s, {source}. Held-out losses are included; the start of each "
        "run, scores and checkpoints are not."
    )


def _speed_now(trials: Sequence[Trial]) -> float | None:
    """Return the speed of the first unfinished run's steps; None without its corpus or PyTorch."""
    from wqk.errors import CorpusError, MissingPackage
    from wqk_lab.training.corpus import TokenStore
    from wqk_lab.training.costs import speed_now

    trial = next(trial for trial in trials if not trial.done)
    try:
        return speed_now(trial.recipe, TokenStore.open(trial.corpus))
    except (CorpusError, MissingPackage):
        return None


def _print_plateaus(trials: Sequence[Trial]) -> None:
    """Name the finished runs that have learnt little more than the frequencies of tokens."""
    from wqk.cli import display
    from wqk.tables.run import open_run
    from wqk_lab.training.frequencies import plateau_note

    for trial in trials:
        if trial.done and (note := plateau_note(open_run(trial.folder))):
            display.output().print(f"{trial.folder.name}: {note}", soft_wrap=True)


def _print_comparisons(trials: Sequence[Trial], below: float | None) -> None:
    """Compare the initializations of each recipe with the first, for finished runs."""
    from wqk.cli import display
    from wqk_lab.cli.speedup import lines_of
    from wqk_lab.runs.speedup import SMOOTHING, speedups
    from wqk_lab.training.experiments import comparable_runs

    for group in comparable_runs(trials):
        comparisons = speedups(
            group, level=below, on_skipped=lambda error: display.say(f"not compared: {error}")
        )
        if comparisons:
            lines = lines_of(comparisons, "held-out", SMOOTHING, below)
            display.output().print("", *lines, sep="\n")
