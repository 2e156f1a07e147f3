"""Surveys of many small models: ``python -m benchmarks.surveys --counts 10 100 1000``.

Models of BERT-tiny's shape, each with weights of its own, in one process, in two, and on a Dask
cluster of two workers on this machine. A survey of twice as many models that takes more than twice
as long has stopped growing well: the last column is the exponent of time between the two largest.
Then two processes take turns with one thread. Where other programs run, two processes get a larger
share of the cores; what processor time allows is what one thread takes, over what all processes
take together on two cores.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import wqk
from benchmarks.generate import BERT_BASE, write_checkpoint
from benchmarks.rounds import estimate
from wqk.scanning.surveys.jobs import dask_executor

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL = replace(BERT_BASE, name="BERT-tiny", layers=2, width=128, heads=2, key_heads=2, rest=0)


# How many times as many models two processes are to score as one thread.
AIM = 1.8


def survey_seconds(refs: Sequence[str], place: Path, **where: Any) -> tuple[float, float]:
    """Return the time of a survey into a fresh folder: by the clock, and of all processes."""

    def busy() -> float:
        usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in usages)

    start, before = time.perf_counter(), busy()
    with tempfile.TemporaryDirectory(dir=place) as out:
        table = wqk.survey(refs, out=out, **where)
    assert not table.metadata.get("failed"), table.metadata["failed"]
    return time.perf_counter() - start, busy() - before


def main() -> None:
    """Print models a second."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--counts", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=7, help="of one thread and two processes")
    options = parser.parse_args()
    counts, workers = options.counts, min(2, os.cpu_count() or 1)
    print(
        "| models a second, by the clock | "
        + " | ".join(f"{count:,} models" for count in counts)
        + " | time grows as models to the |\n|:--|"
        + "--:|" * (len(counts) + 1)
    )
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        refs = [
            str(write_checkpoint(place / f"model-{n}", SMALL, seed=n)) for n in range(max(counts))
        ]
        from distributed import LocalCluster

        cluster = stack.enter_context(
            LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
        )
        ways: dict[str, dict[str, Any]] = {
            "this process, one thread": {"executor": stack.enter_context(ThreadPoolExecutor(1))},
            "one worker process": {"jobs": 1},
            f"{workers} worker processes": {"jobs": workers},
            f"Dask, {workers} workers": {
                "executor": stack.enter_context(dask_executor(cluster.scheduler_address))
            },
        }
        for name, where in ways.items():
            seconds = [survey_seconds(refs[:count], place, **where)[0] for count in counts]
            rates = (f"{count / t:.0f}" for count, t in zip(counts, seconds, strict=True))
            power = np.diff(np.log(seconds[-2:])) / np.diff(np.log(counts[-2:]))
            print(
                f"| {name} | {' | '.join(rates)} | {', '.join(f'{p:.2f}' for p in power)} |",
                flush=True,
            )
        single, _, several, _ = ways.values()
        taken = np.array(
            [
                [survey_seconds(refs, place, **where) for where in (single, several)]
                for _ in range(options.rounds)
            ]
        )
    clock = estimate(taken[:, 0, 0] / taken[:, 1, 0])
    allowed = estimate(workers * taken[:, 0, 1] / taken[:, 1, 1])
    each = np.median(taken[..., 1], axis=0) / counts[-1] * 1e3
    verdict = "met" if clock.low >= AIM else "missed" if clock.high < AIM else "undecided"
    print(
        f"\n{workers} processes beside one thread, {counts[-1]:,} models, in turns: {clock} times "
        f"as many a second by the clock (aim {AIM}: {verdict}); by processor time "
        f"({each[1]:.1f} ms a model beside {each[0]:.1f}) {workers} cores allow {allowed}."
    )


if __name__ == "__main__":
    main()
