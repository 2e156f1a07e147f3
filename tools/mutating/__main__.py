"""Plant faults, one at a time, and count those that the tests notice.

    python -m tools.mutating [--data N] [--code N] [--seed N] [--only PART] [--fewest N] [--proofs]
        [--nearest] [--seconds N] [--fast] [--out FILE]

Mutants are drawn by the seed from all that can be changed in families' files, and in code, where
each room has its share. They are planted in a copy of the tree, and each is printed with its
processor time and what became of it: `killed` by a fast test, which is named; with `--fast` it else
`survived`; without, it meets the slow tests of its file, and is `slow` or `unseen`. What takes too
long is a `timeout`, and counts as neither. What FILE has is not done again. In the end, the shares
by room.

A family's mutants meet its proofs, whose models are built once, then, without `--proofs`, the
other tests that name the family; files of tests that are red in the tree as it is, or take too
long, are left out, and named. A mutant that makes no difference by itself (a family that reads to
the same rules) is not counted.

Those of code meet the fast tests that run their statement, the cheapest first, and then the others
that name what its file defines. Which those are is recorded once for a state of the tree, in
`--record` (a quarter of an hour on two cores). With `--nearest` nothing is recorded: they meet the
fast tests of the files that are nearest (`reach.py`), those first that name the changed function.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from functools import cache, partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.mutating.mutants import code_mutants, data_mutants
from tools.mutating.processes import SECONDS, Ended, ended, run_items, run_named, tell
from tools.mutating.reach import tests_of_code, tests_of_family

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tools.mutating.mutants import Mutant

SLOW, FAST = "slow and not campaign", "not campaign and not slow"  # the groups of tests
DATA = Path("src/wqk/families/data")
HEAVY = ("numpy", "scipy.stats", "torch", "transformers", "safetensors")


def drawn(kind: str, count: int, seed: int, only: str, fewest: int = 8) -> list[Mutant]:
    """Some mutants of a kind, drawn by the seed; of code, no fewer of a room than `fewest`."""
    files = sorted(DATA.glob("*.toml") if kind == "data" else Path("src").rglob("*.py"))
    make = data_mutants if kind == "data" else code_mutants
    every = [
        m for f in files if re.search(only, str(f)) for m in make(f, f.read_text(encoding="utf-8"))
    ]
    random.Random(seed).shuffle(every)
    if kind == "data":
        chosen = [*islice(filter(_differs, every), count)]
    else:  # from each room its share, and no less than a few
        rooms = defaultdict(list)
        for mutant in every:
            rooms[room_of(mutant.path)].append(mutant)
        shares = {r: max(fewest, round(count * len(m) / len(every))) for r, m in rooms.items()}
        chosen = [
            m
            for room, mutants_of_room in rooms.items()
            for m in mutants_of_room[: shares[room] if count else 0]
        ]
        random.Random(seed).shuffle(chosen)  # those of a run that is ended early are of all rooms
        return chosen
    return sorted(chosen, key=lambda mutant: mutant.path)  # one family's side by side


def _differs(mutant: Mutant) -> bool:
    """Return whether a changed family file has other rules, or none."""
    from wqk.errors import UnknownFamily
    from wqk.families.family import parse_family

    try:
        changed = parse_family(mutant.text, mutant.path.name)
    except UnknownFamily:
        return False  # noticed whenever any family is read
    return changed != parse_family(mutant.path.read_text(encoding="utf-8"), mutant.path.name)


class MutationRun:
    """Plants mutants in a copy of the tree, and says and keeps what becomes of each."""

    def __init__(self, tree: Path, out: Path) -> None:
        self.tree, self.out = tree, out
        self.known = _known(out)
        self.seconds = 0.0  # of processor time, for the present mutant
        self.stdout = os.dup(1)  # pytest captures the other

    def say(self, line: str) -> None:
        os.write(self.stdout, f"{line}\n".encode())

    def met(self, mutant: Mutant, call: Callable[[], int], limit: float = SECONDS) -> Ended:
        """Run the tests that meet a mutant until one fails."""
        planted = self.tree / mutant.path
        before = planted.read_bytes()
        planted.write_text(mutant.text, encoding="utf-8")
        try:
            outcome = ended(call, limit)
        finally:
            planted.write_bytes(before)
        self.seconds += outcome.seconds
        return outcome

    def plant(self, mutant: Mutant, call: Callable[[], int], noticed: str = "killed") -> bool:
        """Let a mutant meet tests; whether that settles it."""
        outcome = self.met(mutant, call)
        if not outcome.passed:
            self.keep(mutant, noticed if outcome.decided else "timeout", outcome.told)
        return not outcome.passed

    def keep(self, mutant: Mutant, verdict: str, test: str = "") -> None:
        row = {"mutant": str(mutant), "verdict": verdict, "by": test, "seconds": self.seconds}
        with self.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.known[str(mutant)] = verdict
        by = test.partition("\n")[0][:100]
        self.say(f"{len(self.known):4} {self.seconds:5.1f} s  {verdict:8}  {mutant}  {by}")
        self.seconds = 0.0

    def session(self, loop: Callable[[Any], int], files: Sequence[str], marks: str) -> int:
        """Run a loop within a pytest session, with the collected tests of a tree read anew."""
        os.chdir(self.tree)
        sys.dont_write_bytecode = True  # which a change within a second, of the same size, escapes
        for name in [n for n in sys.modules if n.split(".")[0] in ("wqk", "wqk_lab", "tests")]:
            del sys.modules[name]
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", marks]
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        plugin = Loop(loop)
        status = int(pytest.main([*options, *files], plugins=[plugin]))
        return status or plugin.status

    def in_session(self, mutants: Sequence[Mutant], loop: Callable[[Any], int]) -> None:
        if mutants:
            outcome = ended(lambda: self.session(loop, [], FAST), len(mutants) * 10 * SECONDS)
            if not outcome.passed:
                raise SystemExit(f"the session ended early: {outcome.told}")
            self.known = _known(self.out)

    def data(self, mutants: Sequence[Mutant], models: Path, proofs_alone: bool) -> None:
        self.in_session(mutants, lambda session: self._data(session, mutants, models, proofs_alone))

    def _data(
        self, session: Any, mutants: Sequence[Mutant], models: Path, proofs_alone: bool
    ) -> int:
        """The proofs of a family, which the file as it is passes, then the further tests.

        Nothing is run in the session itself: what starts threads could not be forked.
        """
        from tools.mutating.proofs import forget_families, proofs_of

        by_file = {}
        for item in session.items:
            by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)

        @cache
        def green(file: str) -> bool:
            outcome = ended(lambda: run_items(session, by_file[file]))
            status = outcome.status
            if status != 0:
                why = "takes too long" if status is None else "fails in the tree as it is"
                self.say(f"left out, as it {why}: {file} {outcome.told}")
            return status == 0

        for path, mutants_of_file in groupby(mutants, key=lambda mutant: mutant.path):
            name = name_of(path)

            def proven(name: str = name) -> int:
                forget_families()
                try:
                    proofs = proofs_of(name, models)
                    for proof in proofs:
                        proof()
                except Exception:
                    tell("its proofs")
                    return 1
                return 0 if proofs else 5

            as_it_is = ended(proven)
            if not as_it_is.passed:
                raise SystemExit(f"{path} is not proven as it is")
            files = [file for file in tests_of_family(name) if file in by_file]
            for mutant in mutants_of_file:
                if self.plant(mutant, proven):
                    continue
                every = [] if proofs_alone and as_it_is.status == 0 else [*filter(green, files)]
                items = [item for file in every for item in by_file[file]]

                def tested(items: Any = items) -> int:
                    forget_families()
                    return run_items(session, items)

                if not self.plant(mutant, tested):
                    self.keep(mutant, "survived")
        return 0

    def code(self, mutants: Sequence[Mutant], folder: Path) -> None:
        """First those whose functions can be exchanged after all tests are collected."""
        from tools.mutating.recording import read_record
        from tools.mutating.session import choose, exchanged

        record = read_record(recorded(folder, self.tree))
        cost = dict(zip(record.tests, record.seconds, strict=True))
        chosen = {mutant: choose(mutant, record) for mutant in mutants}
        at_once = [mutant for mutant, (_, anew) in chosen.items() if not anew]

        sound: dict[tuple[str, bool], bool] = {}  # whether a test passes as it is

        def meets(mutant: Mutant, run: Callable[[Sequence[str], bool], int]) -> None:
            """Let it meet its tests; one that fails without the mutant, too, is left out."""
            tests, anew = chosen[mutant]
            limit = 30 + 2 * sum(cost[test] for test in tests)
            while not (outcome := self.met(mutant, partial(run, tests, True), limit)).passed:
                test = outcome.told.partition("\n")[0]
                if test in cost and (test, anew) not in sound:
                    alone = ended(partial(run, [test], False))
                    sound[test, anew] = alone.passed
                if sound.get((test, anew), True):
                    return self.keep(
                        mutant, "killed" if outcome.decided else "timeout", outcome.told
                    )
                self.say(f"left out, as it fails in the tree as it is: {alone.told}")
                tests = [remaining for remaining in tests if remaining != test]
            return self.keep(mutant, "survived")

        self.in_session(at_once, lambda session: exchanged(session, at_once, meets))
        for mutant in mutants:
            if str(mutant) not in self.known:
                chosen[mutant] = chosen[mutant][0], True
                meets(mutant, self.anew)

    def nearest(self, mutants: Sequence[Mutant], limit: float) -> None:
        """Let mutants of code meet the tests of the nearest files, which are collected once.

        Mutants that cannot be planted in memory meet one file after the other, each read anew.
        """
        from tools.mutating.session import exchanged, nearest_tests

        files = {mutant: tests_of_code(mutant.path) for mutant in mutants}

        def loop(session: Any) -> int:
            def meets(mutant: Mutant, run: Callable[[Sequence[str], bool], int]) -> None:
                tests = nearest_tests(session.items, mutant, files[mutant])
                while not (outcome := self.met(mutant, partial(run, tests, True), limit)).passed:
                    test = outcome.told.partition("\n")[0]
                    if test not in tests or ended(partial(run, [test], False)).passed:
                        verdict = "killed" if outcome.decided else "timeout"
                        return self.keep(mutant, verdict, outcome.told)
                    self.say(f"left out, as it fails in the tree as it is: {test}")
                    tests = [remaining for remaining in tests if remaining != test]
                return self.keep(mutant, "survived")

            return exchanged(session, mutants, meets)

        every = [*dict.fromkeys(file for nearest in files.values() for file in nearest)]
        if mutants:
            ended(lambda: self.session(loop, every, FAST), len(mutants) * 10 * SECONDS)
            self.known = _known(self.out)
        for mutant in mutants:
            if str(mutant) in self.known:
                continue
            for file in files[mutant]:
                outcome = self.met(mutant, self.fast(file), limit)
                if not outcome.passed and self.sound(file):
                    self.keep(mutant, "killed" if outcome.decided else "timeout", outcome.told)
                    break
            else:
                self.keep(mutant, "survived")

    def fast(self, file: str) -> Callable[[], int]:
        return lambda: self.session(lambda session: run_items(session, session.items), [file], FAST)

    @cache  # noqa: B019
    def sound(self, file: str) -> bool:
        """Return whether the fast tests of a file pass in the tree as it is."""
        outcome = ended(self.fast(file))
        if not outcome.passed:
            self.say(f"left out, as it fails in the tree as it is: {file} {outcome.told}")
        return outcome.passed

    def anew(self, tests: Sequence[str], _: bool = True) -> int:
        """Tests by their names, in a tree that is read anew."""
        files = [*dict.fromkeys(test.partition("::")[0] for test in tests)]
        return self.session(partial(run_named, names=tests), files, FAST) if files else 5

    def all(self, mutants: Sequence[Mutant]) -> None:
        """Those that the fast tests do not notice meet the slow ones, where these are green."""
        for mutant in mutants:
            if self.known[str(mutant)] == "survived":
                is_data = mutant.path.suffix == ".toml"
                named = tests_of_family(name_of(mutant.path)) if is_data else None
                files = [*filter(self.green, named or tests_of_code(mutant.path))]
                if not any(self.plant(mutant, self.slow(file), "slow") for file in files):
                    self.keep(mutant, "unseen")

    def slow(self, file: str) -> Callable[[], int]:
        return lambda: self.session(lambda session: run_items(session, session.items), [file], SLOW)

    @cache  # noqa: B019
    def green(self, file: str) -> bool:
        return ended(self.slow(file)).status == 0


class Loop:
    """A plugin of pytest that runs a function instead of all tests."""

    def __init__(self, loop: Callable[[Any], int]) -> None:
        self.loop, self.status = loop, 0

    def pytest_runtestloop(self, session: Any) -> bool:
        if session.testsfailed:
            tell("a file of tests cannot be imported")
            return False
        self.status = self.loop(session)
        return True


def name_of(path: Path) -> str:
    """The family of a file."""
    from wqk.families.family import parse_family

    return parse_family(path.read_text(encoding="utf-8"), path.name).name


def recorded(folder: Path, tree: Path) -> Path:
    """The folder of the record of which fast tests run which lines; made, if it is not there."""
    every = sorted([*tree.glob("src/**/*.py"), *tree.glob("tests/**/*.py")])
    state = hashlib.sha256(b"".join(f.read_bytes() for f in every)).hexdigest()[:12]
    if not (folder / state).is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as making:
            command = [sys.executable, "-m", "pytest", "-p", "tools.mutating.recording", "-q"]
            command += ["-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "-m", FAST]
            environment = os.environ | {"WQK_RECORD": making}
            environment["PYTHONPATH"] = os.pathsep.join([str(tree / "src"), str(tree)])
            subprocess.run(command, cwd=tree, env=environment, check=False)
            shutil.copytree(making, folder / state)
    return folder / state


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


def _known(out: Path) -> dict[str, str]:
    """Return earlier verdicts, by mutant."""
    if not out.exists():
        return {}
    rows = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    return {row["mutant"]: row["verdict"] for row in rows}


def room_of(path: Path) -> str:
    """The package and the room in it that hold a file; small private files are in none."""
    package, room = path.parts[1:3]
    return f"{package}/{'shared' if room.startswith('_') else room.removesuffix('.py')}"


def share(verdicts: Iterable[str], every: bool) -> str:
    """State the share of noticed mutants among those whose tests ended in time."""
    counts = Counter(verdicts)
    late = counts["timeout"]
    decided = counts.total() - late
    phrases = []
    groups = [counts["killed"], *([counts["killed"] + counts["slow"]] if every else [])]
    for noticed, name in zip(groups, ("fast tests", "all"), strict=False):
        percent = f", {100 * noticed / decided:.0f} %" if decided else ""
        phrases.append(f"{noticed} of {decided} noticed by {name}{percent}")
    return "; ".join([*phrases, *([f"{late} took too long"] if late else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=int, default=60)
    parser.add_argument("--code", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="an expression in the files' paths")
    parser.add_argument("--proofs", action="store_true", help="no further tests of a family")
    parser.add_argument("--fewest", type=int, default=8, help="faults of code in each room")
    parser.add_argument("--nearest", action="store_true", help="only the nearest files of tests")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of processor time for the nearest tests"
    )
    parser.add_argument("--fast", action="store_true", help="only the tests of `make test`")
    parser.add_argument("--models", type=Path, help="a folder for the models that are built")
    parser.add_argument("--out", type=Path, help="a JSON Lines file to add to, and go on from")
    parser.add_argument(
        "--record", type=Path, default=Path("out/mutants"), help="where records are"
    )
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1"}
    default = Path("../shared").resolve()
    os.environ.setdefault("WQK_SHARED", str(default))
    for name in HEAVY:
        __import__(name)
    sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        sys.path[:] = [str(tree), str(tree / "src"), *(p for p in sys.path if p)]
        os.environ["PYTHONPATH"] = f"{tree}/src"
        out, record = (path and path.resolve() for path in (arguments.out, arguments.record))
        models = (arguments.models or tree / "models").resolve()
        os.chdir(tree)  # so that the checkout may change meanwhile
        run = MutationRun(tree, out or tree / "verdicts.jsonl")
        for kind in ("data", "code"):
            mutants = drawn(
                kind, getattr(arguments, kind), arguments.seed, arguments.only, arguments.fewest
            )
            pending = [mutant for mutant in mutants if str(mutant) not in run.known]
            if kind == "data":
                run.data(pending, models, arguments.proofs)
            elif arguments.nearest:
                run.nearest(pending, arguments.seconds)
            elif pending:
                run.code(pending, record)
            if not arguments.fast:
                run.all(mutants)
            verdicts = [(room_of(m.path), run.known[str(m)]) for m in mutants]
            for room in sorted({room for room, _ in verdicts}):
                of_room = [verdict for name, verdict in verdicts if name == room]
                print(f"{room}: {share(of_room, not arguments.fast)}")
            print(
                f"{kind}: {share([verdict for _, verdict in verdicts], not arguments.fast)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
