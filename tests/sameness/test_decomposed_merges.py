"""Wrong merges of an adapter of DoRA are named. `test_peft` compares what is read with PEFT."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests import small
from tests.sameness.adapting import ALPHA, RANK

import wqk
from wqk.checkpoints.adapters import DoraUpdate, decomposed
from wqk.sameness.decomposed_merges import wrong_merge
from wqk.sameness.mismatches import Kind

Merge = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def norms(weight: np.ndarray, axis: int = 1) -> np.ndarray:
    return np.linalg.norm(weight, axis=axis, keepdims=True)


def right_merge(weight: np.ndarray, product: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """Formula 5 of the paper, as PEFT has it."""
    return magnitude[:, None] * (weight + product) / norms(weight + product)


MISTAKES: dict[str, Merge] = {
    "not merged": lambda weight, product, magnitude: weight,
    "merged as LoRA: its magnitudes are forgotten": lambda weight, product, magnitude: (
        weight + product
    ),
    "merged with norms along the wrong axis": lambda weight, product, magnitude: (
        magnitude[:, None] * (weight + product) / norms(weight + product, 0)
    ),
    "merged with the norms of the base model's weight": lambda weight, product, magnitude: (
        magnitude[:, None] * (weight + product) / norms(weight)
    ),
    "merged without its update of low rank": lambda weight, product, magnitude: right_merge(
        weight, 0 * product, magnitude
    ),
    "merged twice": lambda weight, product, magnitude: right_merge(
        right_merge(weight, product, magnitude), product, magnitude
    ),
    "merged with 0.25 times its scale": lambda weight, product, magnitude: right_merge(
        weight, product / 4, magnitude
    ),
}


def written(folder: Path, merge: Merge, is_trained: bool = True) -> tuple[Path, Path]:
    """An adapter of DoRA on a tiny model, and a merged model."""
    base = small.llama(layers=2, width=24, sides="qkvo")
    random = np.random.default_rng(3)
    tensors = {name: value.astype(np.float32) for name, value in base._arrays.items()}
    merged, factors = dict(tensors), {}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[path] = merged[path] = random.standard_normal((40, 24)).astype(np.float32)
    for name, value in tensors.items():
        if any(word in name for word in ("q_proj", "k_proj", "up_proj")):
            module = name.removesuffix(".weight")
            up = 0.1 * random.standard_normal((len(value), RANK)).astype(np.float32)
            down = random.standard_normal((RANK, value.shape[1])).astype(np.float32)
            magnitude = random.uniform(0.5, 2, len(value)).astype(np.float32)
            if not is_trained:
                up, magnitude = 0 * up, norms(value).ravel()
            factors[f"{module}.lora_A.weight"] = down
            factors[f"{module}.lora_B.weight"] = up
            factors[f"{module}.lora_magnitude_vector"] = magnitude
            merged[name] = merge(value, ALPHA / RANK * up @ down, magnitude).astype(np.float32)
    about = {"r": RANK, "lora_alpha": ALPHA, "use_dora": True}
    about |= {"target_modules": ["q_proj", "k_proj", "up_proj"]}
    source = small.save(folder / "base", tensors, base.config)
    adapter = small.adapter(folder / "adapter", source, factors, **about)
    return adapter, small.save(folder / "merged", merged, base.config)


def test_a_right_merge_is_the_same(tmp_path: Path) -> None:
    adapter, merged = written(tmp_path, right_merge)
    comparison = wqk.same(adapter, merged, everything=True)
    assert comparison.same
    assert "survived the merge: 1.00 in layers 0-1" in comparison.adapter


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_merge_is_named(mistake: str, tmp_path: Path) -> None:
    adapter, merged = written(tmp_path, MISTAKES[mistake])
    comparison = wqk.same(adapter, merged, everything=True)
    assert comparison.same is False
    assert {cause.mismatch.verdict for cause in comparison.causes} == {Kind.ADAPTER}
    assert all(mistake in cause.mismatch.reason for cause in comparison.causes)
    assert comparison.unexplained == ()
    repaired = wqk.same(adapter, merged, everything=True, repair=tmp_path / "fixed").repaired
    assert repaired is not None
    assert wqk.same(adapter, tmp_path / "fixed", everything=True).same


@pytest.mark.parametrize("merge", [right_merge, MISTAKES["not merged"]])
def test_an_adapter_before_its_training_is_merged_by_the_base_model(
    merge: Merge, tmp_path: Path
) -> None:
    """The update is rounding alone, and was reported as not merged."""
    comparison = wqk.same(*written(tmp_path, merge, is_trained=False), everything=True)
    assert comparison.same
    assert comparison.adapter == ""


@pytest.mark.parametrize("update", [0.03, 0.003])
@pytest.mark.parametrize("trained", [0.5, 0.05])
def test_a_right_merge_of_a_small_update_is_no_mistake(update: float, trained: float) -> None:
    """The norms of the base model's weight are nearly those of the sum."""
    random = np.random.default_rng(0)
    base = random.standard_normal((64, 96)).astype(np.float32)
    product = update * random.standard_normal((64, 2)) @ random.standard_normal((2, 96))
    magnitudes = norms(base).ravel() * (1 + trained * random.standard_normal(64))
    merged = decomposed(base, product, magnitudes).astype(np.float32)
    assert wrong_merge(base, DoraUpdate(product, magnitudes, False), merged) == ""
    with_base_norms = magnitudes[:, None] * (base + product) / norms(base)
    mistake = wrong_merge(base, DoraUpdate(product, magnitudes, False), with_base_norms)
    assert mistake == "merged with the norms of the base model's weight"
