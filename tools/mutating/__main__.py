"""Plant faults, one at a time, and count those that the tests notice.

    python -m tools.mutating [--data N] [--code N] [--seed N] [--only PART] [--proofs] [--out FILE]

Mutants are drawn by the seed from all that can be changed in families' files, and in code. They
are planted in a copy of the tree. A family's mutants meet its proofs, whose models are built once,
then, without `--proofs`, the other tests that name the family; those of code meet the tests that
reach their file, until one fails. A mutant that survives is printed. One that makes no difference
by itself (a family that reads to the same rules) is not counted. What FILE has is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tools.mutating.mutants import code_mutants, data_mutants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tools.mutating.mutants import Mutant

SECONDS = 240  # for the tests of one mutant; what takes longer is counted as neither
BROKEN = 99
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
    kind: str, mutants: Sequence[Mutant], tree: Path, models: Path, proofs_alone: bool
) -> Iterator[tuple[Mutant, str]]:
    """Every mutant with its verdict: `killed`, `timeout`, or `survived`."""
    for path, some in groupby(mutants, key=lambda mutant: mutant.path):
        if kind == "data":
            calls = _tests_of_data(path, tree, models, proofs_alone)
        else:
            calls = _tests_of_code(path, tree)
        for mutant in some:
            yield mutant, _verdict(mutant, tree, calls)


def _tests_of_data(
    path: Path, tree: Path, models: Path, proofs_alone: bool
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

    if _ended(proven, time.monotonic() + SECONDS) != 0:
        raise SystemExit(f"{path} is not proven as it is")
    further = tests_of_family(name) if not (proofs and proofs_alone) else []
    return [proven, *(_pytest(call, tree) for call in further)]


def _tests_of_code(path: Path, tree: Path) -> list[Callable[[], int]]:
    from tools.mutating.reach import tests_of_code

    return [_pytest(call, tree) for call in tests_of_code(path)]


def _verdict(mutant: Mutant, tree: Path, calls: Sequence[Callable[[], int]]) -> str:
    planted = tree / mutant.path
    planted.write_text(mutant.text, encoding="utf-8")
    deadline = time.monotonic() + SECONDS
    try:
        for call in calls:
            status = _ended(call, deadline)
            if status == BROKEN:
                raise SystemExit("the tests could not be run")
            if status is None:
                return "timeout"
            if status not in (0, 5):  # 5: nothing to run
                return "killed"
        return "survived"
    finally:
        shutil.copyfile(mutant.path, planted)


def _pytest(arguments: list[str], tree: Path) -> Callable[[], int]:
    """A run of pytest that imports the tree anew."""

    def run() -> int:
        os.chdir(tree)
        for name in [n for n in sys.modules if n.split(".")[0] in ("wqk", "wqk_lab", "tests")]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not campaign"]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        return int(pytest.main([*options, *arguments]))

    return run


def _ended(call: Callable[[], int], deadline: float) -> int | None:
    """What a call returns, in a process forked from here, where the heavy libraries are loaded."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
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
            return os.waitstatus_to_exitcode(status)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=int, default=60)
    parser.add_argument("--code", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the files' paths")
    parser.add_argument("--proofs", action="store_true", help="no further tests of a family")
    parser.add_argument("--models", type=Path, help="a folder for the models that are built")
    parser.add_argument("--out", type=Path, help="a JSON Lines file to add to, and go on from")
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
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
            found = Counter(known[str(m)] for m in mutants if str(m) in known)
            left = [m for m in mutants if str(m) not in known]
            started = time.monotonic()
            models = given.models or tree / "models"
            for mutant, ended in verdicts(kind, left, tree, models, given.proofs):
                found[ended] += 1
                seconds, started = time.monotonic() - started, time.monotonic()
                print(f"{found.total():4} {seconds:5.0f} s  {ended:8}  {mutant}", flush=True)
                if given.out:
                    row = {"kind": kind, "mutant": str(mutant), "verdict": ended}
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
            decided = found["killed"] + found["survived"]
            share = f", {100 * found['killed'] / decided:.0f} %" if decided else ""
            print(f"{kind}: {found['killed']} of {decided} noticed{share}; {dict(found)}")


if __name__ == "__main__":
    main()
