"""Experts in another order are the same experts, if their router has them in that order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from tests.families.architectures import NAMED
from tests.families.proving import build

import wqk
from wqk.checkpoints import Part
from wqk.checkpoints.checkpoint import Around
from wqk.checkpoints.modules import StateDict
from wqk.sameness.experts_and_neurons import AxisOrder, Renumbered

Tensors = dict[str, np.ndarray]
ORDER = [2, 0, 3, 1]


def moved(tensors: Tensors, is_moved: Callable[[str], bool]) -> Tensors:
    """Experts, or their routers, in another order."""
    return {
        name: value[ORDER] if is_moved(name) and value.shape[0] == 4 else value
        for name, value in tensors.items()
    }


def by_number(tensors: Tensors) -> Tensors:
    """Each expert's weights apart, as older files have them."""
    entries = {}
    for name, value in tensors.items():
        start, _, end = name.partition("experts.")
        parts = {f"{start}experts.{n}.{end}.weight": entry for n, entry in enumerate(value)}
        entries |= parts if end in ("gate_up_proj", "down_proj") else {name: value}
    return entries


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "deepseek-v3"])
def test_experts_in_any_order(name: str) -> None:
    config = NAMED[name].config | {"num_local_experts": 4}
    model = build(replace(NAMED[name], config=config))
    tensors = {n: v.float().numpy() for n, v in model.state_dict().items()}
    config = model.config.to_dict()

    def compared(candidate: Tensors, **settings: int) -> wqk.CheckpointComparison:
        pair = (StateDict(tensors, config | settings, "m") for tensors in (original, candidate))
        return wqk.same(*pair, everything=True)

    for original in (tensors, by_number(tensors)):
        numbered = original is not tensors
        order = {f"experts.{new}.": f"experts.{old}." for new, old in enumerate(ORDER)}

        def source(tensor: str, order: dict[str, str] = order) -> str:
            key = next((number for number in order if number in tensor), "")
            return tensor.replace(key, order[key]) if key else tensor

        renumbered = {n: original[source(n)] for n in original} if numbered else original
        experts = moved(renumbered, lambda n: ".experts." in n and "shared" not in n)
        router = moved(original, lambda n: ".experts." not in n and (".mlp." in n))
        renumbered_together = moved(experts, lambda n: ".experts." not in n and (".mlp." in n))
        assert any(not np.array_equal(router[n], original[n]) for n in original)
        assert compared(renumbered_together).same, compared(renumbered_together).sentence
        assert not compared(experts).same
        comparison = compared(router)
        assert not comparison.same
        assert all("experts" not in tensor.name for tensor in comparison.differing)
        if "n_group" in config:  # experts change their group
            assert not compared(renumbered_together, n_group=2).same
            assert not compared(renumbered_together, n_group=None, text_config={"n_group": 2}).same
            assert not compared(
                renumbered_together, n_group=None
            ).same  # the class has a number of its own


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bert", "intermediate.dense.weight|intermediate.dense.bias|output.dense.weight"),
        ("opt", "fc1.weight|fc1.bias|fc2.weight"),
        ("gpt2", "c_fc.weight|c_fc.bias|c_proj.weight"),
        ("phi3", "gate_up_proj|down_proj"),
        ("llama3", "gate_proj|up_proj|down_proj"),
    ],
)
def test_neurons_in_any_order(name: str, parts: str) -> None:
    """Rows of one weight and its bias, of gates as of what they gate, and columns of the next."""
    model = build(NAMED[name])
    tensors = {n: v.float().numpy() for n, v in model.state_dict().items()}
    config, dice = model.config.to_dict(), np.random.default_rng(0)
    width = config.get("intermediate_size") or config.get("ffn_dim") or 4 * config["n_embd"]
    order = dice.permutation(width)
    repeated = np.concatenate([order, order + width])
    for left_out in (*parts.split("|"), "gate half", ""):
        reordered, half = dict(tensors), np.concatenate([order, np.arange(width, 2 * width)])
        for tensor, value in tensors.items():
            if (
                re.search(parts, tensor)
                and "att" not in tensor
                and not (left_out and left_out in tensor)
            ):
                axis = value.shape.index(width if width in value.shape else 2 * width)
                rows = (half if left_out == "gate half" else repeated)[: value.shape[axis]]
                reordered[tensor] = np.take(value, rows, axis)
        pair = [StateDict(weights, config, "m") for weights in (tensors, reordered)]
        assert not wqk.same(*pair, everything=True).same
        is_same = not left_out or (left_out == "gate half" and name != "phi3")
        assert wqk.same(*pair, up_to=["neurons"]).same == is_same, left_out


def test_what_lies_in_another_order_is_read_row_by_row() -> None:
    asked: list[Part] = []

    class Recorded(Around):
        def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
            asked.extend(parts)
            return self.inner.read(parts)

    tensors = {name: np.random.default_rng(0).random((3, 3, 2)) for name in "efg"}
    order = np.array([2, 0, 1])
    base = Recorded(StateDict(tensors, {}, "m"))
    view = Renumbered(base, {"e": AxisOrder(0, order), "f": AxisOrder(1, order)}, {"g": "e"})
    parts = [Part("e", ((1, 3),)), Part("f", ((0, 2),)), Part("g"), Part("e")]
    expected = [tensors["e"][[0, 1]], tensors["f"][:2, order], tensors["e"], tensors["e"][order]]
    for value, expected_value in zip(view.read(parts), expected, strict=True):
        assert np.array_equal(value, expected_value)
    assert asked[:3] == [Part("e", ((0, 1), (1, 2))), parts[1], Part("e")]
    assert view.raw(parts[0]) is None
