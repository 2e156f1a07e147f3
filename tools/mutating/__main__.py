"""Plant faults, one at a time, and count those that the tests notice.

    python -m tools.mutating [--data N] [--code N] [--seed N] [--only PART] [--out FILE]

Mutants are drawn by the seed from all that can be changed in families' files, and in code. They
are planted in a copy of the tree. For each, the tests that reach its file run until one fails; a
mutant that survives is printed. A mutant that makes no difference by itself (a family
that reads to the same rules) is not counted.
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
from pathlib import Path
from typing import TYPE_CHECKING

from tools.mutating.mutants import code_mutants, data_mutants
from tools.mutating.reach import tests_of

if TYPE_CHECKING:
    from tools.mutating.mutants import Mutant

SECONDS = 240  # for the tests of one mutant; what takes longer is counted as neither
BROKEN = 99
DATA = Path("src/wqk/families/data")
HEAVY = ("numpy", "scipy.stats", "torch", "transformers", "safetensors")


def drawn(kind: str, count: int, seed: int, only: str) -> list[Mutant]:
    """Some mutants of a kind, in a random order that the seed decides."""
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
    return found


def _differs(mutant: Mutant) -> bool:
    """Whether a family reads to other rules, or to none."""
    from wqk.errors import UnknownFamily
    from wqk.families.family import parse_family

    try:
        changed = parse_family(mutant.text, mutant.path.name)
    except UnknownFamily:
        return False  # noticed whenever any family is read
    return changed != parse_family(mutant.path.read_text(encoding="utf-8"), mutant.path.name)


def verdict(mutant: Mutant, tree: Path) -> str:
    """`killed`, `timeout`, or `survived`."""
    calls = tests_of(mutant.path)
    planted = tree / mutant.path
    planted.write_text(mutant.text, encoding="utf-8")
    deadline = time.monotonic() + SECONDS
    try:
        for call in calls:
            status = _tested(call, tree, deadline)
            if status == BROKEN:
                raise SystemExit("the tests could not be run")
            if status is None:
                return "timeout"
            if status not in (0, 5):  # 5: nothing to run
                return "killed"
        return "survived"
    finally:
        shutil.copyfile(mutant.path, planted)


def _tested(call: list[str], tree: Path, deadline: float) -> int | None:
    """The exit status of pytest, forked from here, where the heavy libraries are loaded."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        os.chdir(tree)
        with Path(os.devnull).open("w") as quiet:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
        try:
            for name in [n for n in sys.modules if n.split(".")[0] in ("wqk", "wqk_lab", "tests")]:
                del sys.modules[name]
            sys.path[:] = [str(tree), str(tree / "src"), *(p for p in sys.path if p)]
            os.environ["PYTHONPATH"] = f"{tree}/src"
            import pytest

            options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not campaign"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
            os._exit(int(pytest.main([*options, *call])))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=int, default=60)
    parser.add_argument("--code", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the files' paths")
    parser.add_argument("--out", type=Path, help="a JSON Lines file to add to")
    given = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    default = Path("../shared").resolve()
    os.environ.setdefault("WQK_SHARED", str(default))
    for name in HEAVY:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for kind in ("data", "code"):
            mutants = drawn(kind, getattr(given, kind), given.seed, given.only)
            found: dict[str, int] = {}
            for number, mutant in enumerate(mutants, 1):
                started = time.monotonic()
                ended = verdict(mutant, tree)
                found[ended] = found.get(ended, 0) + 1
                seconds = time.monotonic() - started
                print(f"{number:4} {seconds:5.0f} s  {ended:8}  {mutant}", flush=True)
                if given.out:
                    row = {"kind": kind, "mutant": str(mutant), "verdict": ended}
                    with given.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row, ensure_ascii=False) + "\n")
            noticed, decided = found.get("killed", 0), len(mutants) - found.get("timeout", 0)
            share = f", {100 * noticed / decided:.0f} %" if decided else ""
            print(f"{kind}: {noticed} of {decided} noticed{share}; {found}", flush=True)


if __name__ == "__main__":
    main()
