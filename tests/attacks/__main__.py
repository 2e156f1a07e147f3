"""Run the attacks, print their outcomes: ``python -m tests.attacks [--seeds 0 1] [NAME ...]``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.attacks.outcomes import FAULTS, Outcome, counted, findings
from tests.attacks.table import ATTACKS, SEEDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ATTACKS)}; all by default")
    parser.add_argument("--count", type=int, help="cases of each attack, instead of its own number")
    parser.add_argument("--seeds", type=int, nargs="*", default=[*range(SEEDS)])
    parser.add_argument("--faults", type=int, default=20, help="number of faults to print")
    arguments = parser.parse_args()
    print("| input |", " | ".join(Outcome), "|", flush=True)
    print("|:--|" + "--:|" * len(Outcome))
    total: Counter[Outcome] = Counter()
    for name in arguments.names or ATTACKS:
        attack, count = ATTACKS[name]
        case_findings = []
        for seed in arguments.seeds:
            with tempfile.TemporaryDirectory() as folder:
                case_findings += findings(attack, Path(folder), arguments.count or count, seed)
            counts = {str(outcome): number for outcome, number in counted(case_findings).items()}
            print(f"{name}, up to seed {seed}: {counts}", file=sys.stderr, flush=True)
        counts = counted(case_findings)
        total += counts
        print(f"| {name} |", " | ".join(str(counts[o]) for o in Outcome), "|", flush=True)
        faults = [finding for finding in case_findings if finding.outcome in FAULTS]
        for finding in faults[: arguments.faults]:
            print(f"{finding.outcome}: {finding.description}\n    {finding.detail[:300]}")
    print("| together |", " | ".join(str(total[outcome]) for outcome in Outcome), "|")
    return int(any(total[outcome] for outcome in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
