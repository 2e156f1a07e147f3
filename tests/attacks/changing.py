"""Local files that change while they are read: the old scores, the new ones, or an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from tests import small
from tests.attacks.outcomes import Case, Scores, are_equal, scores_of
from tests.checkpoints.test_gguf import hf
from tests.checkpoints.test_gguf import write as write_gguf

import wqk
from wqk.storage.local import Handle

Tensors = dict[str, np.ndarray]
LAYOUTS = ("one file", "shards", "archive", "GGUF")
CHANGES = ("renamed", "written", "truncated", "grown", "gone", "flipped", "cut by one")


def write(folder: Path, layout: str, tensors: Tensors, config: dict[str, Any]) -> None:
    """Write a model's files of one layout."""
    folder.mkdir(exist_ok=True)
    single = {name: value.astype(np.float32) for name, value in tensors.items()}
    (folder / "config.json").write_text(json.dumps(config))
    if layout == "one file":
        save_file(single, folder / "model.safetensors")
    elif layout == "archive":
        state = {name: torch.from_numpy(value) for name, value in single.items()}
        torch.save(state, folder / "pytorch_model.bin")
    else:
        weight_map = {}
        for number in range(3):
            file = f"model-{number}.safetensors"
            names = sorted(single)[number::3]
            save_file({name: single[name] for name in names}, folder / file)
            weight_map |= dict.fromkeys(names, file)
        index = json.dumps({"weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(index)


def written(folder: Path, layout: str, seed: int) -> Path:
    """A model in a folder, or one of GGUF in a file."""
    if layout == "GGUF":
        folder.mkdir(exist_ok=True)
        model = hf("llama")
        random = np.random.default_rng(seed)
        for value in model._arrays.values():
            value[:] = random.standard_normal(value.shape)
        return write_gguf(folder / "model.gguf", model, words=20)
    model = small.llama(sides="qkvo", norms=True, seed=seed)
    write(folder, layout, model._arrays, model.config)
    return folder


class Changing:
    """Changes files at the n-th read of any file, before or after it."""

    def __init__(self, number: int, before: bool, change: Callable[[], None]) -> None:
        self.left, self.before, self.change = number, before, change

    def __enter__(self) -> None:
        self._plain = Handle.read_into
        plain, changing = self._plain, self

        def read_into(handle: Handle, offset: int, buffer: memoryview) -> int:
            changing.left -= 1
            if changing.before and not changing.left:
                changing.change()
            count = plain(handle, offset, buffer)
            if not changing.before and not changing.left:
                changing.change()
            return count

        Handle.read_into = read_into  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Handle.read_into = self._plain  # type: ignore[method-assign]


def apply(change: str, files: list[Path], new_contents: dict[str, bytes], place: float) -> None:
    """Change the files, to the contents of the new model's files or by damage."""
    for path in files:
        size = path.stat().st_size
        at = int(place * size)
        if change == "renamed":
            temporary = path.with_name(f".{path.name}")
            temporary.write_bytes(new_contents[path.name])
            temporary.replace(path)
        elif change == "written":
            path.write_bytes(new_contents[path.name])
        elif change == "truncated":
            os.truncate(path, at)
        elif change == "cut by one":
            os.truncate(path, size - 1)
        elif change == "grown":
            with path.open("ab") as file:
                file.write(b"x" * 10)
        elif change == "gone":
            path.unlink()
        else:
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 64]))


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """Files of four layouts, changed at some read."""
    truths: dict[str, tuple[Scores, Scores]] = {}
    contents: dict[str, tuple[dict[str, bytes], dict[str, bytes]]] = {}
    for layout in LAYOUTS:
        refs = [written(folder / f"{layout} {seed}", layout, seed) for seed in (1, 2)]
        truths[layout] = (scores_of(wqk.scan(refs[0])), scores_of(wqk.scan(refs[1])))
        folders = [folder / f"{layout} {seed}" for seed in (1, 2)]
        files = []
        for layout_folder in folders:
            files.append({path.name: path.read_bytes() for path in layout_folder.iterdir()})
        contents[layout] = (files[0], files[1])
    while True:
        layout = dice.choice(LAYOUTS)
        old, new = contents[layout]
        target = folder / "changing"
        target.mkdir(exist_ok=True)
        for path in target.iterdir():
            path.unlink()
        for name, content in old.items():
            (target / name).write_bytes(content)
            os.utime(target / name, (1_700_000_000, 1_700_000_000))
        names = [name for name in old if "config" not in name and "index" not in name]
        change = dice.choice(CHANGES)
        # Shards that are replaced one by one are a mixture on the disk, too.
        if change not in ("renamed", "written") and dice.random() < 0.5:
            names = [dice.choice(names)]
        number, before, place = dice.randrange(1, 30), dice.random() < 0.5, dice.random()
        action = partial(apply, change, [target / name for name in names], new, place)
        ref = target / "model.gguf" if layout == "GGUF" else target

        def result(
            ref: Path = ref, number: int = number, before: bool = before, action: Any = action
        ):
            with Changing(number, before, action):
                return scores_of(wqk.scan(ref))

        old_scores, new_scores = truths[layout]
        yield Case(
            f"{layout}: {change} {names} {'before' if before else 'after'} read {number}",
            result,
            lambda s, o=old_scores, n=new_scores: are_equal(s, o) or are_equal(s, n),
        )
