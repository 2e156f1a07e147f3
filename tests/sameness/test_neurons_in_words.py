"""Neurons in another order: a note names the option, and code on the screen stays short."""

from __future__ import annotations

import numpy as np
from tests.sameness.plants import right

import wqk
from wqk._console import plain
from wqk.checkpoints.modules import StateDict
from wqk.sameness.printing import SHORTENED


def models(modules: tuple[str, ...]) -> tuple[StateDict, StateDict]:
    """A model, and a copy with the neurons of layer 1 in another order in some weights."""
    tensors, config, _ = right("LLaMA")
    prefix = "model.layers.1.mlp."
    order = np.random.default_rng(0).permutation(len(tensors[f"{prefix}up_proj.weight"]))
    moved = dict(tensors)
    for module in modules:
        weight = tensors[f"{prefix}{module}.weight"]
        moved[f"{prefix}{module}.weight"] = (
            weight[:, order] if module == "down_proj" else weight[order]
        )
    return StateDict(tensors, config, "reference"), StateDict(moved, config, "candidate")


def test_a_note_names_the_option() -> None:
    pair = models(("gate_proj", "up_proj", "down_proj"))
    comparison = wqk.same(*pair, everything=True)
    (note,) = comparison.notes
    assert "1 feed-forward network" in note
    assert "--up-to neurons" in note
    forgiving = wqk.same(*pair, up_to=["neurons"])
    assert forgiving.same
    assert not any("--up-to" in note for note in forgiving.notes)


def test_rows_alone_are_no_neurons() -> None:
    comparison = wqk.same(*models(("gate_proj",)), everything=True)
    assert comparison.causes
    assert not comparison.notes


def test_long_orders_are_short_on_the_screen_alone() -> None:
    comparison = wqk.same(*models(("gate_proj", "up_proj", "down_proj")), everything=True)
    text = plain(comparison)
    assert SHORTENED in text
    assert "…" not in comparison.repair
    assert "…" not in comparison.to_dict()["causes"][0]["repair"]
    assert "[27, 8, 2, …, 25, 40]" in text
