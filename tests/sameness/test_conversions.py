"""Each mistake of public threads is named, and its repair makes the two checkpoints the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.sameness.conversions import (
    CONFIGS,
    LAYERS,
    MISTAKES,
    Conversion,
    Tensors,
    right,
)
from tests.sameness.mending import mend

from wqk.checkpoints.modules import StateDict
from wqk.sameness.mismatches import unexplained
from wqk.sameness.same import same

IDS = [mistake.description for mistake in MISTAKES]


def wrong(mistake: Conversion) -> tuple[Tensors, dict[str, Any]]:
    tensors, config = right(mistake.model)
    mistake.change(tensors, config)
    return tensors, config


def compared(mistake: Conversion, tensors: Tensors, config: dict[str, Any]) -> Any:
    return same(StateDict(*right(mistake.model), "original"), StateDict(tensors, config, "copy"))


@cache
def comparison_of(mistake: Conversion) -> Any:
    """Comparison of the original with the mistaken copy."""
    return compared(mistake, *wrong(mistake))


@pytest.mark.parametrize("model", CONFIGS)
def test_a_right_conversion_is_the_same(model: str) -> None:
    comparison = same(StateDict(*right(model), "a"), StateDict(*right(model), "b"))
    assert comparison.same
    assert len(comparison.blocks) == LAYERS


@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
def test_the_mistake_is_named(mistake: Conversion) -> None:
    differing = [block for block in comparison_of(mistake).blocks if not block.same]
    assert [b.layer for b in differing] == list(mistake.layers or range(LAYERS))
    for block in differing:
        reasons = {cause.verdict: cause.reason for cause in block.mismatches}
        assert mistake.verdict in reasons, reasons
        assert mistake.named in block.reason
        assert len(reasons) == 1, reasons
        assert all(cause.repair for cause in block.mismatches), reasons


@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
def test_the_repair_makes_them_the_same(mistake: Conversion) -> None:
    """The code that is printed, run on the tensors of the blocks that it is printed for."""
    tensors, config = wrong(mistake)
    original = right(mistake.model)
    mend(comparison_of(mistake).repair, tensors, original[0], config)
    assert compared(mistake, tensors, config).same


def test_an_adapter_that_is_known_says_how_it_was_merged(tmp_path: Any) -> None:
    from tests.sameness.adapting import adapter_on

    from wqk.checkpoints import open_checkpoint

    tensors, config = right("llama")
    folder, update = adapter_on(tmp_path, tensors, config, 1e-4)  # some roundings of what is stored
    adapted = open_checkpoint(folder)
    for times, text in (
        (1, None),
        (0, "not merged"),
        (2, "merged twice, or merged with alpha / √rank"),
        (1 / 4, "merged without its scale"),
        (4, "merged with its scale twice (4 · 4), or merged with alpha instead of alpha / rank"),
        (0.3, "merged with 0.300"),
    ):
        merged = {n: v + times * update.get(n, 0) for n, v in tensors.items()}
        merged = {n: np.asarray(v, np.float16) for n, v in merged.items()}
        comparison = same(adapted, StateDict(merged, config, "merged"))
        assert comparison.same == (text is None), (times, comparison.sentence)
        reasons = [mismatch.reason for mismatch in comparison.blocks[0].mismatches]
        assert all(text in reason for reason in reasons), (times, reasons)


@pytest.mark.parametrize(
    ("last", "ending"),
    [(9e-5, "0 1 2; just within the tolerance in head 3 (9e-05)"), (1e-5, "alone")],
)
def test_heads_that_nearly_differ_are_not_left_out(last: float, ending: str) -> None:
    distances = np.array([0.2, 0.3, 0.25, last])
    assert unexplained(distances, distances / 1e-4).reason.endswith(ending)
