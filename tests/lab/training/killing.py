"""Trains in forked children that kill themselves; a helper process, so that torch loads once.

Reads orders as lines of JSON: what to train, and at which of its touches of the run's files the
child is to die, as a cut of the power would have it: a line that is being appended is torn, and
whatever lies in the staging folder has lost its end. Answers each with the child's exit code.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import wqk_lab.training.loop  # noqa: F401
from wqk_lab.training.recipe import Recipe
from wqk_lab.training.training import train

TOUCHES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def die_at(touch: int, folder: Path) -> None:
    count = 0

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event not in TOUCHES or str(folder) not in str(arguments[0]):
            return
        if event == "open" and arguments[1] in (None, "r", "rb"):
            return
        count += 1
        if count == touch:
            tear(event, arguments, folder)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def tear(event: str, arguments: tuple[Any, ...], folder: Path) -> None:
    if event == "open" and str(arguments[0]).endswith(".jsonl"):
        descriptor = os.open(str(arguments[0]), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, b'{"step": 1, "lo')
    for path in (folder / ".saving").rglob("*"):
        if path.is_file():
            os.truncate(path, path.stat().st_size // 2)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        folder = Path(order["folder"])
        child = os.fork()
        if not child:
            code = 1
            try:
                if order["touch"]:
                    die_at(order["touch"], folder)
                recipe = Recipe.from_json(order["recipe"])
                resume = (folder / "run.json").exists()
                train(recipe, order["corpus"], folder, resume=resume)
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
