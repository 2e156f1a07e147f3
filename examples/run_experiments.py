"""Train every cell of experiments.toml, several runs at a time; what is done stays done.

::

    python examples/run_experiments.py --corpora CORPORA --out RUNS --jobs 2

A run that was cut off is resumed. Each run prints into a .txt file beside its folder.
"""

import argparse
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any


def commands(
    experiments: dict[str, Any], corpora: Path, out: Path
) -> list[tuple[Path, list[str], int]]:
    """Folder, command line and steps of every run, a cell's seeds one after the other."""
    runs = []
    for cell in experiments["cell"]:
        settings = experiments["recipe"] | cell
        name, seeds = settings.pop("name"), settings.pop("seeds")
        settings["corpus"] = corpora / settings["corpus"]
        options = chain.from_iterable((f"--{key}", str(value)) for key, value in settings.items())
        shared = [sys.executable, "-m", "wqk", "train", *options]
        runs += [
            (folder, [*shared, "--seed", str(seed), "--out", str(folder)], settings["steps"])
            for seed in seeds
            for folder in [out / f"{name}-{seed}"]
        ]
    return runs


def train(folder: Path, command: list[str], steps: int) -> bool:
    """Run one command, from its last checkpoint where it has begun already; whether it is done."""
    if (folder / f"checkpoint-{steps}").is_dir():
        return True
    if (folder / "run.json").is_file():
        command = [*command, "--resume"]
    with folder.with_suffix(".txt").open("a") as printed:
        print(f"{folder.name}: training, see {printed.name}", flush=True)
        status = subprocess.run(command, stdout=printed, stderr=subprocess.STDOUT).returncode
    print(f"{folder.name}: {'done' if status == 0 else f'failed, see {printed.name}'}", flush=True)
    return status == 0


def main() -> None:
    """Train what is not trained yet; exit status 1 if any run failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    beside = Path(__file__).with_name("experiments.toml")
    parser.add_argument("--experiments", type=Path, default=beside, help="(%(default)s)")
    parser.add_argument("--corpora", type=Path, required=True, help="folder of token stores")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (%(default)s)")
    arguments = parser.parse_args()
    experiments = tomllib.loads(arguments.experiments.read_text())
    arguments.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        begun = [
            pool.submit(train, *run)
            for run in commands(experiments, arguments.corpora, arguments.out)
            if arguments.only in run[0].name
        ]
    if not all(run.result() for run in begun):
        sys.exit(1)


if __name__ == "__main__":
    main()
