"""Adapters on their base model: what is refused, and what is the adapter's own.

What is read of one is compared with what PEFT merges in `test_peft`, rows of it in `test_hub`.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import small
from tests.command import run
from tests.sameness.adapting import adapter_on

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.adapters import AdaptedCheckpoint
from wqk.errors import CheckpointError

QUERY, KEY = (f"model.layers.0.self_attn.{side}_proj" for side in "qk")


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 16}
    weights = {f"{QUERY}.weight": draw(16, 16, seed=0), f"{KEY}.weight": draw(16, 16, seed=1)}
    weights[f"{QUERY}.bias"] = draw(16, seed=4)
    weights["model.embed_tokens.weight"] = draw(8, 16, seed=5)
    return small.save(tmp_path / "base", weights, config)


def adapter(base: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    return small.adapter(base.parent / "adapter", base, tensors, **{"lora_alpha": 6, **config})


def factors(module: str, rank: int = 3) -> dict[str, np.ndarray]:
    return {
        f"{module}.lora_A.weight": draw(rank, 16, seed=2),
        f"{module}.lora_B.weight": draw(16, rank, seed=3),
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"base_model_name_or_path": "https://example.org/x"}, "names no base model"),
        ({"base_model_name_or_path": None}, "names no base model"),
        ({"lora_alpha": "six"}, "lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"lora_alpha": float("inf")}, "lora_alpha must be a number"),
        ({"use_rslora": "no"}, "use_rslora must be true or false"),
        ({"a_variant_of_tomorrow": {}}, "a_variant_of_tomorrow"),
    ],
)
def test_other_adapters_are_refused(base: Path, config: dict[str, Any], message: str):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(adapter(base, factors(QUERY), **config))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{KEY}.weight": draw(16, 16, seed=7)}, "k_proj.weight', none of the factors"),
        ({f"{QUERY}.lora_diag": draw(3, seed=7)}, "lora_diag', none of the factors"),
        ({f"{QUERY}.base_layer.bias": draw(16, seed=7)}, "none of the factors .*merge it"),
        ({"model.embed_tokens.token_adapter.delta": draw(2, 16, seed=7)}, "none of the factors"),
        ({"model.embed_tokens.weight": draw(9, 12, seed=7)}, "none of the factors"),
        ({f"{QUERY}.lora_A.other.weight": draw(3, 16, seed=7)}, "of several adapters"),
    ],
)
def test_tensors_that_are_not_understood_are_refused(base, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(adapter(base, factors(QUERY) | tensors))


def test_a_head_saved_whole_is_the_adapters_own_and_a_table_replaces_the_base_models(base: Path):
    table = draw(11, 16, seed=7)
    saved = {
        "score.modules_to_save.default.weight": draw(3, 16, seed=8),
        "score.original_module.weight": draw(3, 16, seed=9),
        "model.embed_tokens.weight": draw(10, 16, seed=6),
        "model.embed_tokens.modules_to_save.weight": table,
    }
    checkpoint = open_checkpoint(adapter(base, factors(QUERY) | saved))
    alone = open_checkpoint(adapter(base, factors(QUERY)))
    assert set(checkpoint.tensors()) == set(alone.tensors())
    assert checkpoint.info("model.embed_tokens.weight").shape == table.shape
    parts = [Part(f"{QUERY}.weight"), Part("model.embed_tokens.weight", ((9, 11),))]
    query, rows = checkpoint.read(parts)
    np.testing.assert_array_equal(query, alone.read(parts[:1])[0])
    np.testing.assert_array_equal(rows, table[9:11])


@pytest.mark.parametrize("module", ["model.layers.7.self_attn.q_proj", "q_proj.q_proj"])
def test_an_adapter_of_another_model_is_refused(base: Path, module: str):
    with pytest.raises(CheckpointError, match="does not hold"):
        open_checkpoint(adapter(base, factors(module)))


def test_factors_that_do_not_fit_are_refused(base: Path):
    tensors = factors(QUERY) | {f"{QUERY}.lora_B.weight": draw(16, 4, seed=0)}
    with pytest.raises(CheckpointError, match="do not fit together"):
        open_checkpoint(adapter(base, tensors))
    tensors = factors(QUERY) | {f"{QUERY}.lora_A.weight": draw(3, 8, seed=0)}
    with pytest.raises(CheckpointError, match=r"adds \(16, 8\)"):
        open_checkpoint(adapter(base, tensors))


def test_an_adapter_on_itself_is_refused(base: Path):
    folder = adapter(base, factors(QUERY))
    adapter(base, factors(QUERY), base_model_name_or_path=str(folder))
    with pytest.raises(CheckpointError, match="an adapter alone"):
        open_checkpoint(folder)


def test_a_base_that_is_missing_is_given_by_an_option(base: Path):
    folder = adapter(base, factors(QUERY), base_model_name_or_path="./gone")
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(folder)
    message = str(refused.value)
    assert "its base model is missing: './gone' is neither here (looked for in /" in message
    assert message.endswith("give it with base=PATH")
    assert "give it with --base PATH" in run("scan", folder, exits=2).stderr
    assert "is missing" not in run("scan", folder, "--base", base, exits=None).stderr
    opened = open_checkpoint(folder, base=base)
    assert isinstance(opened, AdaptedCheckpoint)
    assert opened.adapter.base == str(base)
    assert opened.notes[-1].endswith("with a LoRA adapter on 1 of its tensors")
    assert pickle.loads(pickle.dumps(opened)).notes == opened.notes
    with pytest.raises(CheckpointError, match="has no base model, because it is no LoRA adapter"):
        open_checkpoint(base, base=base)


def test_a_comparison_takes_the_base_of_its_adapter(base: Path):
    config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": 1}
    (base / "config.json").write_text(json.dumps(config))
    folder = adapter(base, factors(QUERY), base_model_name_or_path="./gone")
    assert "give it with --base PATH" in run("same", folder, base, exits=2).stderr
    for reference, candidate in ((folder, base), (base, folder)):
        assert not wqk.same(reference, candidate, base=base).same
    assert "neither of the two" in run("same", base, base, "--base", base, exits=2).stderr


def test_a_home_folder_is_no_place_that_a_base_is_looked_for(base: Path):
    folder = adapter(base, factors(QUERY), base_model_name_or_path="~/gone")
    with pytest.raises(CheckpointError, match=r"looked for in .*/~/gone"):
        open_checkpoint(folder)


def test_rows_of_zeros_that_an_adapter_of_dora_scales_are_not_finite(base: Path):
    (query,) = open_checkpoint(base).read([Part(f"{QUERY}.weight")])
    tensors = {
        f"{QUERY}.lora_A.weight": -query,
        f"{QUERY}.lora_B.weight": np.diag(np.eye(16, dtype=np.float32)[0]),
        f"{QUERY}.lora_magnitude_vector": np.ones(16, np.float32),
    }
    folder = adapter(base, tensors, use_dora=True, lora_alpha=16)
    (adapted,) = open_checkpoint(folder).read([Part(f"{QUERY}.weight")])
    assert np.isnan(adapted[0]).all()
    assert np.isfinite(adapted[1:]).all()


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_factor_under_a_name_that_peft_passes_over_is_refused(base: Path, side: str) -> None:
    tensors = factors(QUERY)
    name = f"{QUERY}.lora_{side}.weight"
    tensors[f"{name}_x"] = tensors.pop(name)
    with pytest.raises(CheckpointError, match=rf"lora_{side}\.weight_x', none of the factors"):
        open_checkpoint(adapter(base, tensors))


# Settings under which PEFT leaves out a module whose factors the file holds, and one that it takes.
LEFT_OUT: list[tuple[dict[str, Any], bool]] = [
    ({"target_modules": ["k_proj"]}, True),
    ({"target_modules": r".*\.k_proj"}, True),
    ({"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]}, True),
    ({"target_modules": ["q_proj"], "layers_to_transform": [1]}, True),
    ({"target_modules": ["q_proj"], "layers_to_transform": 1}, True),
    ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "h"}, True),
    ({"target_modules": ["q_proj"]}, False),
    ({"target_modules": r".*\.q_proj", "exclude_modules": ["k_proj"]}, False),
    ({"target_modules": ["self_attn.q_proj"], "layers_to_transform": [0, 5]}, False),
    ({"target_modules": [QUERY], "layers_to_transform": 0, "layers_pattern": ["layers"]}, False),
]


@pytest.mark.parametrize(("config", "is_left_out"), LEFT_OUT)
def test_factors_that_the_configuration_leaves_out_are_refused(
    base: Path, config: dict[str, Any], is_left_out: bool
):
    folder = adapter(base, factors(QUERY), **config)
    if not is_left_out:
        changed = open_checkpoint(folder).read([Part(f"{QUERY}.weight")])[0]
        assert not np.array_equal(changed, open_checkpoint(base).read([Part(f"{QUERY}.weight")])[0])
        return
    with pytest.raises(CheckpointError, match=r"factors of .*q_proj, which target_modules"):
        open_checkpoint(folder)


@pytest.mark.parametrize("targets", [None, {"q_proj": 2}, "q_proj(", 3])
def test_targets_that_are_no_names_are_refused(base: Path, targets: Any):
    with pytest.raises(CheckpointError, match="target_modules must be a pattern or a list"):
        open_checkpoint(adapter(base, factors(QUERY), target_modules=targets))


@pytest.mark.parametrize(
    "settings", [{"r": 2}, {"r": None}, {"r": True}, {"rank_pattern": {"q_proj": 2}}], ids=str
)
def test_factors_of_another_rank_than_the_configuration_sets_are_refused(tmp_path, settings):
    """PEFT builds factors of that rank, and cannot load these; the scale would be a guess."""
    model = small.llama(layers=1, key_heads=4)
    tensors = {name: value.astype(np.float32) for name, value in model._arrays.items()}
    folder, _ = adapter_on(tmp_path, tensors, model.config)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=r"have rank 4, but .* \(r, rank_pattern\)"):
        open_checkpoint(folder)
