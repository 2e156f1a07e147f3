"""``wqk lab glue``: encoders fine-tuned on sentence tasks, with baselines."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk.cli.options import COUNT, PATH, POSITIVE, REF, json_output
from wqk_lab.training.declared import documented, threads

if TYPE_CHECKING:
    from wqk.tables.sheet import Sheet
    from wqk_lab.training.glue import TaskResult
    from wqk_lab.training.glue_tasks import SentenceTask


@documented
@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...", type=REF)
@click.option("--data", type=PATH, metavar="DIR", default=Path("glue"))
@click.option("--tasks", default="cola,sst2,mrpc,stsb,rte,wnli", metavar="NAMES|FILE.jsonl")
@click.option("--seeds", type=COUNT, default=5)
@click.option("--epochs", type=COUNT, default=3)
@click.option("--learning-rate", type=POSITIVE, default=5e-5)
@click.option("--batch", type=COUNT, default=32)
@click.option("--length", type=click.IntRange(min=2), default=128)
@threads
@json_output
def glue(
    models: tuple[str, ...],
    data: Path,
    tasks: str,
    seeds: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Fine-tune encoders on GLUE or your own tasks and compare two of them over seeds.

    MODEL is a training run (its last checkpoint), a checkpoint with its tokenizer, or a Hub id.
    Metrics depend on the task: Matthews correlation, F1 and accuracy, Pearson and Spearman
    correlation. Two models are compared over seeds of fine-tuning. More than two must be training
    runs from two initializations, which are compared over seeds of pre-training.

    \b
    Examples:
      wqk lab glue runs/random --data glue --tasks sst2,rte
      wqk lab glue runs/random runs/symmetric --data glue --seeds 5
      wqk lab glue runs/random-* runs/symmetric-* --data glue --seeds 3
      wqk lab glue runs/random --tasks reviews.jsonl

    Parameters
    ----------
    data
        Folder of the tasks.
    tasks
        Folders in DIR with train.jsonl and validation.jsonl, or your own files.
    """
    from wqk.cli import display
    from wqk_lab.training.glue import FineTuning, by_start, fine_tune, over_runs
    from wqk_lab.training.glue_tasks import baselines, read_task

    groups = by_start(models) if len(models) > 2 else None
    settings = FineTuning(**options)
    chosen = []
    for name in filter(None, tasks.split(",")):
        is_file = name.endswith(".jsonl")
        chosen.append(read_task(Path(name) if is_file else data / name))
    if not chosen:
        raise click.UsageError("--tasks names no task")
    outcomes, shown = [], []
    for task in chosen:
        if task.shared:
            display.say(
                f"{task.name}: {task.shared} training rows are left out, since validation has them"
            )
        each = {}
        for model in models:
            display.say(f"{task.name}: {model}")
            each[model] = fine_tune(model, task, range(1, seeds + 1), settings)
        results = [each[model] for model in models]
        if groups is not None:
            results = []
            for start, runs in groups.items():
                result_by_seed = {seed: each[model] for seed, model in runs.items()}
                results.append(over_runs(start, result_by_seed))
        shown.append((task, baselines(task), results))
        counts = {"train": len(task.train.labels), "validation": len(task.validation.labels)}
        about: dict[str, Any] = {"task": task.name, "rows": counts | {"left_out": task.shared}}
        about |= {"baselines": shown[-1][1], "results": [*map(asdict, results)]}
        outcomes.append(about | ({"runs": [*map(asdict, each.values())]} if groups else {}))
    value = {"fine_tuning": asdict(settings), "tasks": outcomes}
    display.show(value, _table(shown), as_json=as_json)


def _table(
    outcomes: list[tuple[SentenceTask, dict[str, dict[str, float]], list[TaskResult]]],
) -> Sheet:
    """Return one line for each task and metric, in percent."""
    from wqk.tables.sheet import Sheet
    from wqk_lab.runs.seeds import interval
    from wqk_lab.training.glue import differences

    names = [Path(result.model).name for result in outcomes[0][2]]
    compared = ["difference", "p", "detectable"] if len(names) == 2 else []
    headings = ("task", "metric", "majority", "bag of words", *names, *compared)
    table = Sheet.of(*headings, text=["task", "metric"])
    for task, floor, results in outcomes:
        for metric in task.metrics:
            cells = [f"{floor[name][metric]:.1%}" for name in ("majority", "bag of words")]
            cells += [interval(result.over_seeds(metric), ".1%") for result in results]
            if len(results) == 2:
                difference = differences(results[0], results[1], metric)
                p = "–" if difference.p is None else f"{difference.p:.2g}"
                least = difference.detectable
                cells += [interval(difference, "+.1%"), p, "–" if least is None else f"{least:.1%}"]
            table.add(task.name, metric, *cells)
    return table
