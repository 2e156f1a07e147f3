"""``watch``: runs with torn, broken and strange checkpoints, and damaged tables to resume from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests import small
from tests.attacks.outcomes import Case, Named, are_equal, scores_of

import wqk
from wqk.errors import WqkError
from wqk.scanning.surveys.watch import watch

STEPS = (10, 20, 30)
MOST_WAITS = 6
Result = dict[int, Any]


def damage(path: Path, dice: Random) -> str:
    """Damage one file of a run or of a survey."""
    content = path.read_bytes()
    kind = dice.choice(("cut", "flip", "gone", "empty", "text", "folder", "doubled"))
    if kind == "cut":
        path.write_bytes(content[: dice.randrange(len(content))])
    elif kind == "flip":
        changed = bytearray(content)
        # Most bytes are weights, whose damage is another valid checkpoint: damage the header.
        changed[dice.randrange(min(len(changed), 200))] ^= 1 << dice.randrange(8)
        path.write_bytes(bytes(changed))
    elif kind == "gone":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("{}")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content * 2)
    return f"{kind} {path.parent.name}/{path.name}"


def watched(run: Path, out: Path) -> Result:
    """Scores by step once the last step was scored or failed; torn checkpoints are passed over."""
    waits: list[str] = []

    def wait(folder: str, reason: str) -> None:
        waits.append(folder)
        shutil.rmtree(folder, ignore_errors=True)  # as trainers do with old checkpoints
        if not (run / f"checkpoint-{STEPS[-1]}").is_dir():
            raise Named(f"incomplete: {reason}")

    with ThreadPoolExecutor(1) as threads:
        tables = list(
            watch(run, out=out, every=0.01, until=STEPS[-1], executor=threads, on_wait=wait)
        )
    if not tables:
        raise WqkError("no table")
    table = tables[-1]
    by_step = {}
    for step in table.frame["step"].unique():
        rows = table.frame.filter(table.frame["step"] == step)
        by_step[step] = scores_of(wqk.ScoreTable(rows, {}))
    return by_step


def is_right(result: Result, truths: dict[int, Any], refs: dict[int, Path]) -> bool:
    """Compare with scans of the undamaged checkpoints, or of what is on the disk now."""
    for step, scores in result.items():
        if are_equal(scores, truths[step]):
            continue
        if not refs[step].is_dir() or not are_equal(scores, scores_of(wqk.scan(refs[step]))):
            return False
    return True


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """Runs of three checkpoints, watched once, or resumed from a damaged survey."""
    originals = folder / "originals"
    truths = {}
    for step in STEPS:
        model = small.llama(sides="qkvo", norms=True, seed=step)
        small.save_model(originals / f"checkpoint-{step}", model)
        truths[step] = scores_of(wqk.scan(originals / f"checkpoint-{step}"))
    survey = folder / "survey"
    watched(originals, survey)
    while True:
        run, out = folder / "run", folder / "out"
        for path in (run, out):
            shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(originals, run)
        descriptions = []
        if dice.random() < 0.4:
            shutil.copytree(survey, out)
            # The survey's manifest names the run's folder.
            for path in out.rglob("*.json"):
                path.write_text(path.read_text().replace(str(originals), str(run)))
            files = sorted(path for path in out.rglob("*") if path.is_file())
            descriptions.append(damage(dice.choice(files), dice))
        if not descriptions or dice.random() < 0.3:
            files = sorted(path for path in run.rglob("*") if path.is_file())
            descriptions.append(damage(dice.choice(files), dice))
        refs = {step: run / f"checkpoint-{step}" for step in STEPS}
        yield Case(
            "; ".join(descriptions),
            partial(watched, run, out),
            lambda result, refs=refs: is_right(result, truths, refs),
        )
