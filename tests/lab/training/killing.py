"""Trains in forked children that may kill themselves; a helper process: libraries load once.

Reads orders as lines of JSON: what to train; at which of its touches of the run's files the child
is to die, as a cut of the power would have it: a line that is being appended is torn, and whatever
lies in the staging folder has lost its end; and to how many bytes a file may grow, as on a full
disk. Answers each with the child's exit code, and the message of its error.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import wqk_lab.training.loop  # noqa: F401
from wqk.errors import WqkError
from wqk_lab.training.models import build_model
from wqk_lab.training.recipe import Recipe, make_recipe
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


def grow_to(most: int) -> None:
    """Limit the size of files: a write beyond `most` bytes is short, and the next write fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


def load_what_training_loads() -> None:
    """Classes of models, and what optimizers import when the first one is made: 5 s."""
    model = build_model(make_recipe(layers=1, width=4, heads=1), 4, {"padding": 0})
    torch.optim.AdamW(model.parameters())


def obey(order: dict[str, Any]) -> None:
    folder = Path(order["folder"])
    if order["touch"]:
        die_at(order["touch"], folder)
    if order["most"]:
        grow_to(order["most"])
    resume = (folder / "run.json").exists()
    train(Recipe.from_json(order["recipe"]), order["corpus"], folder, resume=resume)


def main() -> None:
    torch.set_num_threads(1)
    load_what_training_loads()
    for line in sys.stdin:
        answer, error_pipe = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                obey(json.loads(line))
                code = 0
            except WqkError as error:
                os.write(error_pipe, str(error).encode())
            finally:
                os._exit(code)
        os.close(error_pipe)
        with os.fdopen(answer) as pipe:
            message = pipe.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), message]), flush=True)


if __name__ == "__main__":
    main()
