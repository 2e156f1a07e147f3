"""Two processes, sharded or not, write what one process writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.live import distributed_worker
from tests.live.models import bert, train
from tests.live.test_monitor import same
from threadpoolctl import threadpool_limits

import wqk
from wqk.live.logits import LogitMeter
from wqk.tables.run import read_table


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    command = [sys.executable, "-W", "error", "-m", "tests.live.distributed_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(folder)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    assert [process.wait(timeout=600) for process in processes] == [0, 0]
    return folder / "run"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The number of threads takes part in the order of sums; the two processes have one each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with threadpool_limits(1):
        yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_write_one_process_s_rows(folder: Path, tmp_path: Path, kind: str) -> None:
    alone = train(bert(), tmp_path / "run" / "scores.jsonl", distributed_worker.STEPS)
    assert same(read_table(folder / f"{kind}.jsonl"), alone.table)
    assert same(read_table(folder / f"{kind}-updates.jsonl"), alone.updates)
    assert read_table(folder / f"{kind}.jsonl").metadata == alone.table.metadata


def test_sharded_parameters_are_read_as_they_are_trained(folder: Path) -> None:
    assert same(read_table(folder / "half.jsonl"), wqk.scan(bert()))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_all_processes_clip_by_the_largest_logits_of_all(folder: Path, kind: str) -> None:
    model = bert().train()
    maxima: dict[tuple[int, int], float] = {}
    for rank in (0, 1):
        meter = LogitMeter(model, passes=None)
        meter.start()
        model(distributed_worker.batch(rank))
        model(distributed_worker.batch(rank + 2))
        for (_, _, layer), block in meter.logits.blocks.items():
            for head, largest in enumerate(block.max_logit):
                maxima[layer, head] = max(maxima.get((layer, head), -1), float(largest))
    report = wqk.clip_(model, distributed_worker.LIMIT, logits=maxima)
    assert len(report) > 2
    for rank in (0, 1):
        path = folder.parent / "clipped" / f"{kind}-{rank}"
        state, clipped_heads = torch.load(path, weights_only=False)
        assert [head[:4] for head in clipped_heads] == [head[:4] for head in report.heads]
        for name, value in model.state_dict().items():
            torch.testing.assert_close(state[name], value)
