"""Mistakes of converters: each is seen, named and undone in the written file; right ones pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import small
from tests.sameness.converters import (
    LAYOUTS,
    MISTAKES,
    Config,
    Convert,
    Mistake,
    Tensors,
    in_float16,
    right,
    to_litgpt,
    to_megatron,
    to_meta,
    to_older_litgpt,
    to_torchtitan,
    without_prefix,
)

import wqk
from wqk.sameness.mismatches import UNEXPLAINED
from wqk.sameness.verdicts import Verdict

IDS = [f"{mistake.layout}: {mistake.description}" for mistake in MISTAKES]
OTHER_LAYOUTS = (to_meta, to_litgpt, to_older_litgpt, to_torchtitan, to_megatron)


def saved(folder: Path, tensors: Tensors, config: Config) -> Path:
    return small.save(folder, tensors, {k: v for k, v in config.items() if k != "dtype"})


@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
def test_a_mistake_is_seen_named_and_undone(mistake: Mistake, tmp_path: Path) -> None:
    reference = saved(tmp_path / "reference", *right(mistake.layout))
    tensors, config = right(mistake.layout)
    if mistake.convert is not None:
        tensors, config = mistake.convert(tensors, config)
    mistake.change(tensors, config)
    candidate = saved(tmp_path / "candidate", tensors, config)
    everything = mistake.convert is None
    comparison = wqk.same(reference, candidate, everything=everything, repair=tmp_path / "repaired")
    assert comparison.verdict is Verdict.DIFFERENT
    kinds = {cause.mismatch.verdict for cause in comparison.causes}
    assert kinds, comparison.sentence
    assert kinds <= set(mistake.kinds), comparison.sentence
    assert kinds.isdisjoint(UNEXPLAINED)
    assert comparison.unexplained == ()
    assert comparison.repaired is not None
    assert comparison.repaired.verdict is Verdict.SAME


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("change", [without_prefix, in_float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_conversion_is_the_same(
    layout: str, change: Convert, everything: bool, tmp_path: Path
) -> None:
    reference = saved(tmp_path / "reference", *right(layout))
    candidate = saved(tmp_path / "candidate", *change(*right(layout)))
    comparison = wqk.same(reference, candidate, everything=everything)
    assert comparison.verdict is Verdict.SAME, comparison.sentence


@pytest.mark.parametrize("convert", OTHER_LAYOUTS)
def test_a_right_conversion_into_another_layout_is_the_same(
    convert: Convert, tmp_path: Path
) -> None:
    reference = saved(tmp_path / "reference", *right("LLaMA"))
    candidate = saved(tmp_path / "candidate", *convert(*right("LLaMA")))
    comparison = wqk.same(reference, candidate)
    assert comparison.verdict is Verdict.SAME, comparison.sentence
