"""Plant faults, one at a time, and count those that the tests notice.

    python -m tools.mutating [--data N] [--code N] [--seed N] [--only PART] [--proofs] [--fast]
        [--out FILE]

Mutants are drawn by the seed from all that can be changed in families' files, and in code. They
are planted in a copy of the tree. A family's mutants meet its proofs, whose models are built once,
then, without `--proofs`, the other tests that name the family; those of code meet the tests that
reach their file, until one fails; with `--fast`, those of `make test` alone. Every file of tests
first meets the tree as it is: one that is red or takes too long is left out, and named. A mutant
that survives is printed. One that makes no difference by itself (a family that reads to the same
rules) is not counted. What FILE has is not done again. In the end, the shares by room.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tools.mutating.mutants import code_mutants, data_mutants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from tools.mutating.mutants import Mutant

# What one call of tests may take of the processor; what takes more, or hangs, counts as neither.
SECONDS = 120
HANGING = 10 * SECONDS  # by the clock, for all calls of a mutant
BROKEN = 99
EVERY, FAST = "not campaign", "not campaign and not slow"  # the groups of tests
DATA = Path("src/wqk/families/data")
HEAVY = ("numpy", "scipy.stats", "torch", "transformers", "safetensors")


def drawn(kind: str, count: int, seed: int, only: str) -> list[Mutant]:
    """Some mutants of a kind, drawn by the seed, those of a file side by side."""
    files = sorted(DATA.glob("*.toml") if kind == "data" else Path("src").rglob("*.py"))
    make = data_mutants if kind == "data" else code_mutants
    every = [m for f in files if only in str(f) for m in make(f, f.read_text(encoding="utf-8"))]
    random.Random(seed).shuffle(every)
    found: list[Mutant] = []
    for mutant in every:
        if len(found) == count:
            break
        if kind == "code" or _differs(mutant):
            found.append(mutant)
    return sorted(found, key=lambda mutant: mutant.path)


def _differs(mutant: Mutant) -> bool:
    """Whether a family reads to other rules, or to none."""
    from wqk.errors import UnknownFamily
    from wqk.families.family import parse_family

    try:
        changed = parse_family(mutant.text, mutant.path.name)
    except UnknownFamily:
        return False  # noticed whenever any family is read
    return changed != parse_family(mutant.path.read_text(encoding="utf-8"), mutant.path.name)


def verdicts(
    kind: str, mutants: Sequence[Mutant], tree: Path, models: Path, proofs_alone: bool, marks: str
) -> Iterator[tuple[Mutant, str]]:
    """Every mutant with its verdict: `killed`, `timeout`, or `survived`."""
    for path, some in groupby(mutants, key=lambda mutant: mutant.path):
        if kind == "data":
            calls = _tests_of_data(path, tree, models, proofs_alone, marks)
        else:
            calls = _tests_of_code(path, tree, marks)
        for mutant in some:
            yield mutant, _verdict(mutant, tree, calls)


def _tests_of_data(
    path: Path, tree: Path, models: Path, proofs_alone: bool, marks: str
) -> list[Callable[[], int]]:
    """The proofs of a family, which the file as it is passes, and the further tests."""
    from tools.mutating.proofs import forget_families, proofs_of
    from tools.mutating.reach import tests_of_family

    from wqk.families.family import parse_family

    name = parse_family(path.read_text(encoding="utf-8"), path.name).name
    proofs = proofs_of(name, models)

    def proven() -> int:
        forget_families()
        for proof in proofs:
            try:
                proof()
            except Exception:
                return 1
        return 0

    if _ended(proven, time.monotonic() + HANGING) != 0:
        raise SystemExit(f"{path} is not proven as it is")
    further = tests_of_family(name) if not (proofs and proofs_alone) else []
    return [proven, *_green(further, tree, marks)]


def _tests_of_code(path: Path, tree: Path, marks: str) -> list[Callable[[], int]]:
    from tools.mutating.reach import tests_of_code

    return _green(tests_of_code(path), tree, marks)


def _green(files: Sequence[str], tree: Path, marks: str) -> list[Callable[[], int]]:
    """Runs of those files of tests that the tree passes as it is, in time."""
    return [_pytest(file, tree, marks) for file in files if _is_green(file, tree, marks)]


@cache
def _is_green(file: str, tree: Path, marks: str) -> bool:
    status = _ended(_pytest(file, tree, marks), time.monotonic() + HANGING)
    if status in (0, 5):  # 5: nothing to run
        return status == 0
    why = f"takes over {SECONDS} s" if status is None else "fails in the tree as it is"
    print(f"left out, as it {why}: {file}", flush=True)
    return False


def _verdict(mutant: Mutant, tree: Path, calls: Sequence[Callable[[], int]]) -> str:
    planted = tree / mutant.path
    planted.write_text(mutant.text, encoding="utf-8")
    deadline = time.monotonic() + HANGING
    try:
        for call in calls:
            status = _ended(call, deadline)
            if status == BROKEN:
                raise SystemExit("the tests could not be run")
            if status is None:
                return "timeout"
            if status != 0:
                return "killed"
        return "survived"
    finally:
        shutil.copyfile(mutant.path, planted)


def _pytest(file: str, tree: Path, marks: str) -> Callable[[], int]:
    """A run of a file of tests that imports the tree anew."""

    def run() -> int:
        os.chdir(tree)
        for name in [n for n in sys.modules if n.split(".")[0] in ("wqk", "wqk_lab", "tests")]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", marks]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return int(pytest.main([*options, file]))

    return run


def _ended(call: Callable[[], int], deadline: float) -> int | None:
    """What a call returns, in a process forked from here, where the heavy libraries are loaded."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
        with Path(os.devnull).open("w") as quiet:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
        try:
            os._exit(call())
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(BROKEN)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code == -signal.SIGXCPU else code
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.05)


def copied(folder: Path) -> Path:
    """The tree as it is in the checkout: what git knows, and what it would take in."""
    listed = subprocess.check_output(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], text=True
    )
    for name in filter(None, listed.split("\0")):
        if Path(name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(name, folder / name)
    return folder


def _known(out: Path | None) -> dict[str, str]:
    """What was found before, by mutant."""
    if out is None or not out.exists():
        return {}
    rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {row["mutant"]: row["verdict"] for row in rows}


def room_of(path: Path) -> str:
    """The package and the room in it that hold a file."""
    return "/".join(path.parts[1:3]).removesuffix(".py")


def share(verdicts: Iterable[str]) -> str:
    """How many were noticed, of those that ended in time."""
    counts = Counter(verdicts)
    killed, late = counts["killed"], counts["timeout"]
    decided = counts.total() - late
    percent = f", {100 * killed / decided:.0f} %" if decided else ""
    return f"{killed} of {decided} noticed{percent}" + (f"; {late} took too long" if late else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=int, default=60)
    parser.add_argument("--code", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the files' paths")
    parser.add_argument("--proofs", action="store_true", help="no further tests of a family")
    parser.add_argument("--fast", action="store_true", help="only the tests of `make test`")
    parser.add_argument("--models", type=Path, help="a folder for the models that are built")
    parser.add_argument("--out", type=Path, help="a JSON Lines file to add to, and go on from")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    default = Path("../shared").resolve()
    os.environ.setdefault("WQK_SHARED", str(default))
    for name in HEAVY:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    known = _known(given.out)
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        sys.path[:] = [str(tree), str(tree / "src"), *(p for p in sys.path if p)]
        os.environ["PYTHONPATH"] = f"{tree}/src"
        for kind in ("data", "code"):
            mutants = drawn(kind, getattr(given, kind), given.seed, given.only)
            found = [(room_of(m.path), known[str(m)]) for m in mutants if str(m) in known]
            left = [m for m in mutants if str(m) not in known]
            started = time.monotonic()
            models = given.models or tree / "models"
            marks = FAST if given.fast else EVERY
            for mutant, ended in verdicts(kind, left, tree, models, given.proofs, marks):
                found.append((room_of(mutant.path), ended))
                seconds, started = time.monotonic() - started, time.monotonic()
                print(f"{len(found):4} {seconds:5.0f} s  {ended:8}  {mutant}", flush=True)
                if given.out:
                    row = {"kind": kind, "mutant": str(mutant), "verdict": ended}
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
            for room in sorted({room for room, _ in found}):
                print(f"{room}: {share(ended for r, ended in found if r == room)}")
            print(f"{kind}: {share(ended for _, ended in found)}")


if __name__ == "__main__":
    main()
