"""Sentences, lines and pictures of a comparison contain what a reader needs next."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import small
from tests.command import run
from tests.sameness.adapting import adapter_on
from tests.sameness.test_sizes import SIZES, complete

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.sameness.answer import CheckpointComparison

Tensors = dict[str, np.ndarray]
KEYS = "model.layers.1.self_attn.k_proj.weight"


def tensors() -> Tensors:
    return {name: np.float32(value) for name, value in complete(**SIZES)._arrays.items()}


def config(**changes: Any) -> dict[str, Any]:
    return dict(complete(**SIZES).config) | changes


def with_noise(size_by_layer: dict[int, float]) -> Tensors:
    """The tensors with noise in the queries of some layers."""
    random = np.random.default_rng(1)
    noisy = tensors()
    for layer, size in size_by_layer.items():
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        noisy[name] += np.float32(size) * random.standard_normal(noisy[name].shape)
    return noisy


def compared(candidate: Tensors, **options: Any) -> CheckpointComparison:
    reference = StateDict(tensors(), config(), "a")
    return wqk.same(reference, StateDict(candidate, config(), "b"), **options)


@pytest.mark.parametrize("everything", [True, False])
def test_the_named_tolerance_accepts_the_candidate(everything: bool) -> None:
    """The distance was rounded down, so that it did not accept itself."""
    for noise in (0.0301, 0.0304, 0.0307):
        noisy = with_noise({0: noise, 1: noise / 2})
        comparison = compared(noisy, everything=everything)
        match = re.search(r"--tolerance (\S+) accepts", comparison.sentence)
        assert match is not None, comparison.sentence
        assert "largest in layer 0" in comparison.sentence
        tolerance = float(match[1])
        assert compared(noisy, everything=everything, tolerance=tolerance).same
        assert tolerance < 1.1 * max(block.farthest for block in comparison.blocks)


def test_no_tolerance_is_named_beside_other_causes() -> None:
    scaled = with_noise({0: 0.01})
    scaled[KEYS] *= 2
    assert "--tolerance" not in compared(scaled).sentence


def test_a_configuration_that_differs_alone_is_named(tmp_path: Path) -> None:
    small.save(tmp_path / "a", tensors(), config())
    incomplete = config()
    del incomplete["num_key_value_heads"]
    small.save(tmp_path / "b", tensors(), incomplete)
    done = run("same", tmp_path / "a", tmp_path / "b", exits=1)
    assert "2 of 2 blocks differ, in the configuration alone" in done.stdout
    assert "0.0e+00" not in done.stdout


def test_exchanged_rows_are_named() -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    exchanged = tensors()
    exchanged[name][[3, 7]] = exchanged[name][[7, 3]]
    comparison = compared(exchanged, everything=True)
    assert comparison.reason == "up_proj: rows 3 and 7 exchanged"


def test_biases_without_the_factor_of_their_weights_are_named() -> None:
    random = np.random.default_rng(2)
    biased = tensors()
    for name in [*biased]:
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            biased[name.replace("weight", "bias")] = random.standard_normal(len(biased[name]))
    negated = {
        name: -value if name.endswith(("q_proj.weight", "k_proj.weight")) else value
        for name, value in biased.items()
    }
    models = [StateDict(values, config(attention_bias=True), "m") for values in (biased, negated)]
    assert "but not their biases (q_proj.bias, k_proj.bias)" in wqk.same(*models).reason


def test_the_outcome_of_a_repair_is_printed_once_and_last(tmp_path: Path) -> None:
    wrong = tensors()
    wrong[KEYS] = -wrong[KEYS]
    small.save(tmp_path / "a", tensors(), config())
    small.save(tmp_path / "b", wrong, config())
    done = run("same", tmp_path / "a", tmp_path / "b", "--repair", tmp_path / "c")
    assert "tensors[" not in done.stdout
    assert done.stdout.count("Not the same") == 1
    assert "Repaired: " in done.stdout.rpartition("\n\n")[2]


def test_tensors_that_all_compares_are_counted_with_the_option() -> None:
    assert "10 other tensors not compared (--all compares them)" in compared(tensors()).sentence
    assert "--all" not in compared(tensors(), layers=[0]).sentence


def test_values_without_outputs_are_a_note() -> None:
    cut = {name: value for name, value in tensors().items() if "o_proj" not in name}
    model = StateDict(cut, config(), "cut")
    (note,) = [note for note in wqk.same(model, model).notes if "values" in note]
    assert note == "values are not compared: cut has no output weights, for the form W_v W_o"


def test_a_picture_tells_nearly_equal_distances_apart() -> None:
    comparison = compared(with_noise({0: 0.02, 1: 0.03}))
    figure = comparison.plot()
    (image,) = figure.axes[0].images
    shades = image.norm(image.get_array())
    assert shades.max() == 1
    assert shades.max() - shades.min() > 0.2
    numbers = [text.get_text() for text in figure.axes[0].texts]
    assert numbers == [f"{d:#.2g}"[1:] for block in comparison.blocks for d in block.heads]


def test_an_adapter_that_is_merged_twice_has_a_strength(tmp_path: Path) -> None:
    adapter, update = adapter_on(tmp_path, tensors(), config())
    for times, title in ((2, "Strength of the adapter"), (0.5, "Share of the adapter")):
        merged = {n: value + times * update.get(n, 0) for n, value in tensors().items()}
        comparison = wqk.same(adapter, StateDict(merged, config(), "merged"))
        assert comparison.adapter.startswith(title)
        assert "(query" not in str(comparison)
        assert "(q_proj, k_proj)" in str(comparison)


def test_layers_that_moved_nearly_as_far_have_distinct_numbers() -> None:
    reference = StateDict(tensors(), config(), "a")
    candidate = StateDict(with_noise({0: 0.3, 1: 0.305}), config(), "b")
    numbers = re.findall(r"by (\S+)", str(wqk.diff(reference, candidate).layers.result))
    assert len({*numbers[:2]}) == 2
