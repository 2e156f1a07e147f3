"""Each cause is planted in each layout, seen, named, and undone by the code that is printed."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("transformers")

from tests.comparing.conversions import MISTAKES
from tests.comparing.plants import LAYOUTS, PLANTS, Case, cases, right, tried

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.comparing.mismatches import UNEXPLAINED, Kind
from wqk.comparing.rewrites import OF_VECTORS, OF_WEIGHTS

# Of all plants, what is not right: seen, but not named.
NAMED = 0.95


def test_every_cause_has_a_plant() -> None:
    """Those of quantized weights, of sizes and of settings stand in other tests."""
    planted = {kind for plant in PLANTS for kind in plant.kinds}
    planted |= {mistake.verdict for mistake in MISTAKES}
    assert planted | {Kind.GROUPS, Kind.SIZES} | UNEXPLAINED == set(Kind)
    assert {kind for one in (*OF_WEIGHTS, *OF_VECTORS) for kind in one.kinds} <= set(Kind)


def judged(some: list[Case]) -> Counter[str]:
    """How many plants are named rightly, and so on; all are seen, and none has a wrong name."""
    counts, wrong = Counter[str](), []
    for case in some:
        verdict = tried(case)
        if verdict is None:
            continue
        counts[verdict.named] += 1
        counts["repaired"] += verdict.repaired is True
        if verdict.named in ("unseen", "wrong") or verdict.repaired is False:
            wrong.append(f"{case}: {verdict}")
    assert not wrong, "\n".join(wrong)
    return counts


@pytest.mark.parametrize("layout", random.Random(11).sample([*LAYOUTS], 3))
def test_some_plants_are_seen_named_and_undone(layout: str) -> None:
    counts = judged(random.Random(12).sample(cases(layout), 12))
    assert counts["right"] >= 6


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_plants_are_seen_named_and_undone(layout: str) -> None:
    counts = judged(cases(layout))
    print(layout, dict(counts))
    assert counts["right"] >= NAMED * (counts.total() - counts["repaired"])


@pytest.mark.parametrize("outputs", [True, False])
def test_the_order_of_heads_is_a_freedom_if_values_and_outputs_share_it(outputs: bool) -> None:
    """Key heads rolled with all that belongs to them; or their outputs forgotten."""
    original, config, _ = right("LLaMA")
    tensors = dict(original)
    for name, value in tensors.items():
        if "attn" in name and "o_proj" not in name:
            tensors[name] = np.roll(value, len(value) // 3, axis=0)
        elif "o_proj" in name and outputs:
            tensors[name] = np.roll(value, value.shape[1] // 3, axis=1)
    pair = StateDict(original, config, "a"), StateDict(tensors, config, "b")
    assert not wqk.same(*pair).same
    assert wqk.same(*pair, up_to=["heads"]).same == outputs
