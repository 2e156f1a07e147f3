"""Each mistake of public threads is named, and its repair makes the two checkpoints the same."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.comparing.conversions import (
    CONFIGS,
    LAYERS,
    MISTAKES,
    Conversion,
    Tensors,
    right,
)

from wqk.checkpoints.modules import StateDict
from wqk.comparing.mistakes import unexplained
from wqk.comparing.sameness import same

IDS = [mistake.what for mistake in MISTAKES]


def wrong(mistake: Conversion) -> tuple[Tensors, dict[str, Any]]:
    tensors, config = right(mistake.model)
    mistake.change(tensors, config)
    return tensors, config


def compared(mistake: Conversion, tensors: Tensors, config: dict[str, Any]) -> Any:
    return same(StateDict(*right(mistake.model), "original"), StateDict(tensors, config, "copy"))


@cache
def found(mistake: Conversion) -> Any:
    """What `same` says of the mistake."""
    return compared(mistake, *wrong(mistake))


@pytest.mark.parametrize("model", CONFIGS)
def test_a_right_conversion_is_the_same(model: str) -> None:
    comparison = same(StateDict(*right(model), "a"), StateDict(*right(model), "b"))
    assert comparison.same
    assert len(comparison.blocks) == LAYERS


@pytest.mark.parametrize("mistake", MISTAKES, ids=IDS)
def test_the_mistake_is_named(mistake: Conversion) -> None:
    differing = [block for block in found(mistake).blocks if not block.same]
    assert [b.layer for b in differing] == list(mistake.layers or range(LAYERS))
    for block in differing:
        reasons = {one.verdict: one.reason for one in block.mismatches}
        assert mistake.verdict in reasons, reasons
        assert mistake.named in block.reason
        assert len(reasons) == 1, reasons
        assert all(one.repair for one in block.mismatches), reasons


# Repairs that are code of their own: the others say what to take from the original.
APPLICABLE = [m for m in MISTAKES if m.verdict in {
    "other rotary positions", "same weights, other norm", "scaled", "transposed",
    "stored transposed", "other pairing of query and key heads", "same weights, other biases",
    "heads of other weights", "heads copied from others", "other layout of the fused weight",
    "other setting",
}]  # fmt: skip


@pytest.mark.parametrize("mistake", APPLICABLE, ids=[m.what for m in APPLICABLE])
def test_the_repair_makes_them_the_same(mistake: Conversion) -> None:
    """The code that is printed, run on the tensors of the blocks that it is printed for."""
    torch = pytest.importorskip("torch")
    tensors, config = wrong(mistake)
    original = {name: torch.tensor(value) for name, value in right(mistake.model)[0].items()}
    repaired = {name: torch.tensor(value) for name, value in tensors.items()}
    for block in found(mistake).blocks:
        for mismatch in block.mismatches:
            apply(mismatch, block.layer, repaired, original, config, mistake.model)
    final = {name: value.numpy() for name, value in repaired.items()}
    assert compared(mistake, final, config).same


NAMES = {"query": ("q_proj", "query"), "key": ("k_proj", "key")}


def names_of(side: str, layer: int, tensors: Any, ending: str) -> str | None:
    pattern = rf".*\.{layer}\..*\b({'|'.join(NAMES[side])})\.{ending}"
    return next((name for name in tensors if re.fullmatch(pattern, name)), None)


def apply(
    mismatch: Any, layer: int, tensors: Any, original: Any, config: dict[str, Any], model: str
) -> None:
    """Run a repair's code in the terms that it is written in."""
    import torch

    if "tensor" in mismatch.facts:
        name = mismatch.facts["tensor"]
        scope = {"w": tensors[name], "original": original[name], "torch": torch}
        exec(mismatch.repair, scope)
        tensors[name] = scope["w"]
        return
    if "config[" in mismatch.repair:
        exec(mismatch.repair, {"config": config, "original": right(model)[1]})
        return
    sides = {s: names_of(s, layer, tensors, "weight") for s in NAMES}
    biases = {s: names_of(s, layer, tensors, "bias") for s in NAMES}
    if "w_q" in mismatch.repair or "b_q" in mismatch.repair:
        scope = {"D": tensors[sides["query"]].shape[1]}
        for side, mark in (("query", "q"), ("key", "k")):
            scope[f"w_{mark}"] = tensors[sides[side]]
            scope[f"b_{mark}"] = tensors[biases[side]] if biases[side] else None
        exec(mismatch.repair, scope)
        for side, mark in (("query", "q"), ("key", "k")):
            tensors[sides[side]] = scope[f"w_{mark}"]
            if biases[side]:
                tensors[biases[side]] = scope[f"b_{mark}"]
        return
    if "gain" in mismatch.repair:
        for side in mismatch.sides:
            ending = f"{side[0]}_norm" if "before the score" in mismatch.reason else "layernorm"
            name = next(n for n in tensors if f".{layer}." in n and n.endswith(f"{ending}.weight"))
            scope = {"gain": tensors[name], "original": original[name]}
            if ending != "layernorm" or side == mismatch.sides[0]:  # one norm feeds both sides
                exec(mismatch.repair, scope)
                tensors[name] = scope["gain"]
        return
    target = biases if mismatch.repair.startswith("b =") else sides
    for side in mismatch.sides:
        name = target[side] or sides[side].replace("weight", "bias")
        variable = "b" if target is biases else "w"
        scope = {"original": original[name]}
        scope[variable] = tensors.get(name, original[name]).clone()
        scope["D"] = scope[variable].shape[-1]
        for line in mismatch.repair.split("\n"):
            if "# " not in line or line.endswith(f"# {side}"):
                exec(line, scope)
        tensors[name] = scope[variable]


def test_an_adapter_that_is_known_says_how_it_was_merged(tmp_path: Any) -> None:
    from tests.comparing.adapting import adapter_on

    from wqk.checkpoints import open_checkpoint

    tensors, config = right("llama")
    folder, update = adapter_on(tmp_path, tensors, config)
    adapted = open_checkpoint(folder)
    for times, text in (
        (1, None), (0, "not merged"), (2, "merged twice or merged with alpha / √rank"),
        (1 / 4, "merged without its scale"), (4, "merged with 4 times"),
        (0.3, "merged with 0.3 times its scale"),
    ):  # fmt: skip
        merged = {n: v + times * update.get(n, 0) for n, v in tensors.items()}
        merged = {n: np.asarray(v, np.float32) for n, v in merged.items()}
        for pair in ((adapted, StateDict(merged, config, "merged")),):
            comparison = same(*pair)
            assert comparison.same == (text is None), (times, comparison.sentence)
            if text:
                (mismatch,) = comparison.blocks[0].mismatches
                assert text in mismatch.reason, (times, mismatch.reason)


@pytest.mark.parametrize(
    ("last", "said"),
    [(9e-5, "0 1 2; just within the tolerance in head 3 (9e-05)"), (1e-5, "alone")],
)
def test_heads_that_nearly_differ_are_not_left_out(last: float, said: str) -> None:
    assert unexplained([0.2, 0.3, 0.25, last], [1e-4] * 4).reason.endswith(said)
