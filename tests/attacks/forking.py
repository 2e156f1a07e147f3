"""A process that opened a checkpoint forks, and both read: the same weights, or an error."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tests.attacks.changing import LAYOUTS, written
from tests.attacks.outcomes import Case, Scores, are_equal, dense_scores

import wqk
from wqk.errors import WqkError

MOST_SECONDS = 20


def forms_of(model: wqk.Model, layers: list[int]) -> Scores:
    """Scores from the weights that wqk reads; no table, whose library does not survive a fork."""
    scores: dict[Any, Any] = {}
    for layer in layers:
        block = model.block(layer)
        queries, keys = block.query.weight, block.key.weight
        for head in range(len(queries)):
            key = keys[head * len(keys) // len(queries)]
            scores["self", layer, head] = dense_scores(queries[head], key)
    return scores


def in_child(work: Callable[[], bool]) -> Callable[[], str]:
    """Start work in a forked process; the function that waits for its outcome."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        answer = b"failed"
        try:
            answer = b"right" if work() else b"wrong"
        except WqkError as error:
            answer = b"refused" if "\n" not in str(error) else b"failed"
        finally:
            os.write(writing, answer)
            os._exit(0)
    os.close(writing)

    def wait() -> str:
        ready, _, _ = select.select([reading], [], [], MOST_SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(reading, "rb") as pipe:
            return pipe.read().decode() if ready else "hung"

    return wait


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """Models of four layouts, read before the fork, in children, and in the parent meanwhile."""
    refs, truths = {}, {}
    for layout in LAYOUTS:
        ref = written(folder / layout, layout, 1)
        refs[layout] = folder / layout / "model.gguf" if layout == "GGUF" else ref
        truths[layout] = forms_of(wqk.open(refs[layout]), [0, 1])
    while True:
        layout = dice.choice(LAYOUTS)
        before = dice.choice(([], [0], [1], [0, 1]))
        children = dice.choice((1, 1, 2, 3))
        scans = dice.random() < 0.2

        def result(
            layout: str = layout,
            before: list[int] = before,
            children: int = children,
            scans: bool = scans,
        ) -> list[str]:
            model, truth = wqk.open(refs[layout]), truths[layout]
            forms_of(model, before)

            def work() -> bool:
                if scans:
                    return len(wqk.scan(model)) > 0
                return are_equal(forms_of(model, [1, 0]), truth)

            waiting = [in_child(work) for _ in range(children)]
            parent_agrees = are_equal(forms_of(model, [0, 1]), truth)
            ends = [wait() for wait in waiting]
            reopened_agrees = are_equal(forms_of(wqk.open(refs[layout]), [0, 1]), truth)
            ends += ["right" if np.all([parent_agrees, reopened_agrees]) else "wrong"]
            if "hung" in ends:
                raise AssertionError("a forked process did not end")
            if "failed" in ends:
                raise RuntimeError(f"a forked process failed: {ends}")
            if "refused" in ends:
                raise WqkError("refused in a forked process")
            return ends

        yield Case(
            f"{layout}: {before} before, {children} children, {'scan' if scans else 'forms'}",
            result,
            lambda ends: set(ends) == {"right"},
        )
