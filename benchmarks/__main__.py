"""The sections of docs/performance.md: ``make bench`` prints them, ``make performance`` keeps them.

Each section is a command of its own that prints Markdown. With ``--page FILE`` what it prints takes
the place of what stands between the section's marks, ``<!-- NAME: begin -->`` and ``<!-- NAME: end
-->``, with a line about the machine; what others printed, and all prose, stays. A command that
fails leaves its section as it was.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Section(NamedTuple):
    """A command, ``python -m ...``, and about how long it runs on two idle cores."""

    command: str
    minutes: float
    always: bool = True  # or only when it is asked for


SECTIONS = {
    "start": Section("benchmarks.start", 0.2),
    "scans": Section("benchmarks.scans --rounds 9", 4),
    "functions": Section("benchmarks.functions", 3),
    "surveys": Section("benchmarks.surveys", 3),
    "looks": Section("benchmarks.monitoring --rounds 3", 2),
    "training": Section("benchmarks.loops", 2.5),
    "composition": Section("benchmarks.composition --only bert", 0.5),
    "all compositions": Section("benchmarks.composition --only llama --layers 32", 4, always=False),
    "pairs": Section("benchmarks.functions --deep LLaMA-3-8B --layers 8", 4, always=False),
    "shards": Section("benchmarks.shards", 1, always=False),
    "slow line": Section("benchmarks.slow_line", 2.5, always=False),
    "peers": Section("benchmarks.peers", 10, always=False),
    "growth": Section("benchmarks.growth --out docs/images/growth.png", 9, always=False),
}
IDLE = 0.2  # busy cores below which nothing else of weight runs


def processor() -> str:
    """Return the processor's name, if the system provides it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def busy_cores(seconds: float = 2.0) -> float:
    """Return the number of cores that other programs keep busy, over some seconds; or NaN."""
    if not Path("/proc/stat").exists():
        return math.nan

    def spent() -> tuple[float, float]:
        """Ticks that cores were busy, and all."""
        ticks = list(map(int, Path("/proc/stat").read_text("ascii").split("\n")[0].split()[1:]))
        return sum(ticks) - sum(ticks[3:5]), sum(ticks)

    before = spent()
    time.sleep(seconds)
    busy, every = np.subtract(spent(), before)
    return float(busy / every * (os.cpu_count() or 1))


def measure(section: Section) -> str:
    """Return the output of the command, under a line on the run.

    Raises `subprocess.CalledProcessError` if it fails.
    """
    busy_before, start = busy_cores(), time.perf_counter()
    command = [sys.executable, "-m", *section.command.split()]
    printed = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    minutes = (time.perf_counter() - start) / 60
    disturbance = "nothing else ran"
    if busy_before >= IDLE:
        disturbance = (
            f"**other programs ran** ({busy_before:.1f} cores): only ratios of processor time count"
        )
    heading = (
        f"`python -m {section.command}`, {minutes:.1f} minutes on {processor()}, {os.cpu_count()} "
        f"cores, NumPy {np.__version__}, {datetime.date.today()}; {disturbance}."
    )
    return f"{heading}\n\n{printed.strip()}"


def replaced(page: str, name: str, text: str) -> str:
    r"""Return the page with this text between a section's marks.

    Examples
    --------
    >>> print(replaced("A\n<!-- x: begin -->\nold\n<!-- x: end -->\nB", "x", "new"))
    A
    <!-- x: begin -->
    <BLANKLINE>
    new
    <BLANKLINE>
    <!-- x: end -->
    B
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, after = page.split(begin)
    return "\n".join([before + begin, "", text, "", end + after.split(end)[1]])


def main() -> None:
    """Run sections, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help="; ".join(f"{name}, {of.minutes:g} min" for name, of in SECTIONS.items())
        + ". By default all but the last four",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="the page to write them into")
    options = parser.parse_args()
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"no section {name!r}; sections are {', '.join(map(repr, SECTIONS))}")
    failed = []
    for name in options.sections or [name for name, of in SECTIONS.items() if of.always]:
        print(f"{name}: about {SECTIONS[name].minutes:g} minutes", file=sys.stderr, flush=True)
        try:
            text = measure(SECTIONS[name])
        except subprocess.CalledProcessError as error:
            failed.append(f"{name} (status {error.returncode})")
            continue
        print(f"\n## {name}\n\n{text}", flush=True)
        if options.page:
            page = options.page.read_text(encoding="utf-8")
            options.page.write_text(replaced(page, name, text), encoding="utf-8")
    if failed:
        sys.exit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()
