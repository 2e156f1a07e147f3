"""A merged model is a weighted sum of its parents; what is no such sum differs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.sameness.conversions import right
from tests.small import save

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError, NonFiniteWeights

Tensors = dict[str, np.ndarray]
QUERY = "model.layers.1.self_attn.q_proj.weight"


def parents(count: int = 2) -> tuple[list[Tensors], dict[str, object]]:
    """Models that were trained from one: weights differ a little, gains not at all."""
    base, config = right("llama")
    random = np.random.default_rng(7)
    models = []
    for _ in range(count):
        model = dict(base)
        for name, value in base.items():
            if value.ndim > 1:
                noise = 0.05 * value.std() * random.standard_normal(value.shape)
                model[name] = (value + noise).astype(np.float32)
        models.append(model)
    return models, config


def weighted(models: list[Tensors], weights: list[float]) -> Tensors:
    sums: Tensors = {}
    for name in models[0]:
        terms = [w * model[name] for w, model in zip(weights, models, strict=True)]
        sums[name] = np.asarray(sum(terms)).astype("f4")
    return sums


def compared(models: list[Tensors], config: dict[str, object], merged: Tensors):
    opened = [StateDict(model, config, "abcd"[n]) for n, model in enumerate(models)]
    candidate = StateDict(merged, config, "merged")
    return wqk.same(opened[0], candidate, everything=True, merged_with=opened[1:])


@pytest.mark.parametrize("weights", [[0.6, 0.4], [0.5, 0.3, 0.2], [-0.3, 0.8, 0.5], [1.0, 0.5]])
def test_weights_of_parents_are_found(weights: list[float]) -> None:
    models, config = parents(len(weights))
    comparison = compared(models, config, weighted(models, weights))
    assert comparison.same
    terms = " + ".join(f"{w:#.3g} · {name}" for w, name in zip(weights, "abcd", strict=False))
    assert f"compared with the weighted sum {terms}" in comparison.notes


def test_a_parent_without_a_part_is_named() -> None:
    models, config = parents(3)
    comparison = compared(models, config, weighted(models, [0.6, 0.4, 0.0]))
    assert comparison.same
    assert "c has no part in the candidate" in comparison.notes


def test_weights_may_follow_a_gradient_over_layers() -> None:
    models, config = parents()
    merged = {}
    for name in models[0]:
        layer = int(re.search(r"layers\.(\d+)", name)[1])  # type: ignore[index]
        share = 0.2 + 0.2 * layer
        merged[name] = weighted(models, [share, 1 - share])[name]
    comparison = compared(models, config, merged)
    assert comparison.same
    assert any("(0.200 to " in note for note in comparison.notes)


def test_one_tensor_that_was_not_merged_differs() -> None:
    models, config = parents()
    merged = weighted(models, [0.6, 0.4]) | {QUERY: models[0][QUERY]}
    comparison = compared(models, config, merged)
    assert comparison.same is False
    assert [block.layer for block in comparison.blocks if not block.same] == [1]
    (cause,) = comparison.causes
    assert cause.reason == "a alone instead of 0.600 · a + 0.400 · b"
    assert [*cause.tensors] == [QUERY]
    assert f'"{QUERY}"' in cause.repair


@pytest.mark.parametrize("everything", [True, False])
def test_a_layer_of_one_parent_has_one_cause(everything: bool, tmp_path: Path) -> None:
    """Gains of parents are multiples of each other; a factor of a gain was a second cause."""
    models, config = parents()
    for name, value in models[0].items():
        if value.ndim == 1:
            models[1][name] = np.float32(1.1) * value
    merged = weighted(models, [0.6, 0.4])
    for name in merged:
        if "layers.1." in name:
            merged[name] = models[0][name]
    for name, model in zip(("first/a", "second/b", "merged"), (*models, merged), strict=True):
        save(tmp_path / name, model, config)
    comparison = wqk.same(
        tmp_path / "first/a",
        tmp_path / "merged",
        everything=everything,
        merged_with=[tmp_path / "second/b"],
        repair=tmp_path / "repaired",
    )
    assert comparison.same is False
    (cause,) = comparison.causes
    assert cause.reason == "a alone instead of 0.600 · a + 0.400 · b"
    assert "layer 1" in cause.where
    assert comparison.unexplained == ()
    assert comparison.repaired is not None
    assert comparison.repaired.verdict.same


def test_what_cannot_be_summed_is_named() -> None:
    """Parents with other feed-forward networks were said to be summed as a whole."""
    models, config = parents()
    merged = weighted(models, [0.6, 0.4])
    name = "model.layers.1.mlp.up_proj.weight"
    merged[name] = models[0][name] = np.ones((4, 16), np.float32)
    models[1][name] = np.ones((5, 16), np.float32)
    comparison = compared(models, config, merged)
    assert comparison.same
    (note,) = [note for note in comparison.notes if note.startswith("not summed")]
    assert f"1 of {len(merged)} tensors (up_proj, layer 1)" in note
    assert note.endswith("compared with a alone")


def test_what_is_no_sum_is_compared_with_the_reference_alone() -> None:
    models, config = parents(3)
    comparison = compared(models[:2], config, models[2])
    assert comparison.same is False
    assert any(note.startswith("no weighted sum of the parents") for note in comparison.notes)


def test_equal_parents_are_refused() -> None:
    models, config = parents()
    with pytest.raises(CheckpointError, match="weights are not determined"):
        compared([models[0], models[0]], config, models[0])


def test_a_tiny_difference_is_no_constant_that_was_added() -> None:
    """Rounding of a table had a median of 2e-6, and was said to be an offset of 0."""
    tensors, config = right("llama")
    random = np.random.default_rng(1)
    name = "model.embed_tokens.weight"
    table = random.standard_normal((40, 16)).astype(np.float32)
    noise = 2e-5 * random.standard_normal(table.shape) + 3e-6
    reference = StateDict(tensors | {name: table}, config, "a")
    candidate = StateDict(tensors | {name: (table + noise).astype(np.float32)}, config, "b")
    comparison = wqk.same(reference, candidate, everything=True)
    assert comparison.same is False
    assert comparison.causes == ()


def test_one_path_instead_of_a_list_of_parents_is_refused() -> None:
    """Each letter of the path was opened as a model."""
    models, config = parents()
    reference = StateDict(models[0], config, "a")
    with pytest.raises(CheckpointError, match="expected a list of models"):
        wqk.same(reference, reference, merged_with="folder/of/b")


def test_parents_may_be_open_models() -> None:
    models, config = parents()
    opened = [
        wqk.open(StateDict(model, config, name)) for model, name in zip(models, "ab", strict=True)
    ]
    merged = StateDict(weighted(models, [0.6, 0.4]), config, "merged")
    comparison = wqk.same(opened[0], merged, everything=True, merged_with=opened[1:])
    assert comparison.same
    assert "compared with the weighted sum 0.600 · a + 0.400 · b" in comparison.notes
    weights = comparison.to_dict()["weights"]
    assert weights == pytest.approx({"a": 0.6, "b": 0.4}, abs=1e-3)


def test_a_parent_with_nan_is_refused_by_the_tensor() -> None:
    models, config = parents()
    merged = weighted(models, [0.6, 0.4])
    models[1] |= {QUERY: np.full_like(models[1][QUERY], np.nan)}
    with pytest.raises(NonFiniteWeights, match=QUERY):
        compared(models, config, merged)
