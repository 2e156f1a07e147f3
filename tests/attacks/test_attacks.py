"""The attacks: every damaged input is read right, or refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.attacks.outcomes import FAULTS, Outcome, counted, findings
from tests.attacks.table import ATTACKS, SEEDS


def campaign() -> Iterator[Any]:
    """A few cases of each attack always, all of them in the campaign."""
    for name, (_, most) in ATTACKS.items():
        yield name, 12, 0
        for seed in range(SEEDS):
            yield pytest.param(name, most, seed, marks=pytest.mark.campaign)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "count", "seed"), [*campaign()])
def test_damaged_input_is_read_right_or_refused(name, count, seed, tmp_path):
    attack, _ = ATTACKS[name]
    case_findings = findings(attack, tmp_path, count, seed)
    assert [finding for finding in case_findings if finding.outcome in FAULTS] == []
    assert counted(case_findings)[Outcome.RIGHT]
