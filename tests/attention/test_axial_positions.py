"""Rotary positions on two axes: their planes, against the models' own angles, and their uses."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from tests.small import sizes

import wqk
from wqk import same, scan
from wqk.checkpoints import Part
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.live.recording import recording
from wqk.live.running import double_precision

# Modules of transformers, and the classes' names before VisionConfig and VisionRotaryEmbedding.
MODELS = {
    "qwen2_vl": "Qwen2VL",
    "qwen2_5_vl": "Qwen2_5_VL",
    "qwen3_vl": "Qwen3VL",
    "glm4v": "Glm4v",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoe",
    "cohere_compass": "CohereCompass",
    "exaone4_5": "Exaone4_5_",
    "glm_ocr": "GlmOcr",
}
WIDTH = 16


def tower(config: dict[str, Any]) -> StateDict:
    random = np.random.default_rng(0)
    names = [f"blocks.{layer}.attn.qkv.weight" for layer in range(2)]
    weights = {name: random.standard_normal((3 * WIDTH, WIDTH)).astype("f4") for name in names}
    return StateDict(weights, config, "tower")


PATCHES = torch.tensor([[0, 0], [3, 0], [0, 5], [7, 7]])  # rows and columns


def at_patches(attention: wqk.Block, vectors: np.ndarray) -> np.ndarray:
    """Vectors (4, R), turned along both axes."""
    bands, axial = attention.bands(), attention.plan.axial
    for axis in range(2):
        along = replace(axial, frequencies=axial.frequencies * (bands.axes == axis))
        vectors = along.rotate(vectors, PATCHES[:, axis].numpy())
    return vectors


def configuration(model: str) -> Any:
    module = import_module(f"transformers.models.{model}.configuration_{model}")
    settings = {"depth": 2, "num_heads": 2, "hidden_size": WIDTH, "embed_dim": WIDTH}
    settings |= {"num_key_value_heads": 2} if model == "exaone4_5" else {}
    return getattr(module, f"{MODELS[model]}VisionConfig")(**settings)


@pytest.mark.parametrize("model", MODELS)
def test_planes_turn_with_rows_and_columns(model: str) -> None:
    config = configuration(model)
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    angles = getattr(module, f"{MODELS[model]}VisionRotaryEmbedding")(config)
    queries = torch.randn(4, 1, WIDTH // 2)
    turned, _ = module.apply_rotary_pos_emb_vision(queries, queries, *angles(queries, PATCHES))
    attention = wqk.open(tower(config.to_dict()))[1]
    assert attention.plan.rotary is None
    actual = at_patches(attention, queries[:, 0].numpy())
    np.testing.assert_allclose(actual, turned[:, 0].numpy(), atol=1e-5)


def test_rows_and_columns_with_frequencies_of_their_own() -> None:
    from transformers.models.pixtral import modeling_pixtral as module
    from transformers.models.pixtral.configuration_pixtral import PixtralVisionConfig

    config = PixtralVisionConfig(**sizes(2 * WIDTH, 1, 2, intermediate_size=8))
    model = module.PixtralVisionModel(config)
    attention = wqk.open(model)[0]
    exponents = np.array([0, 2, 4, 6, 1, 3, 5, 7]) / 8
    assert attention.bands().frequencies == pytest.approx(1e4**-exponents)
    queries = torch.randn(1, 1, 4, WIDTH)
    angles = model.patch_positional_embedding(queries, PATCHES)
    turned, _ = module.apply_rotary_pos_emb(queries, queries, *angles, unsqueeze_dim=0)
    actual = at_patches(attention, queries[0, 0].numpy())
    np.testing.assert_allclose(actual, turned[0, 0].numpy(), atol=1e-5)


def test_energies_bound_what_each_plane_adds() -> None:
    attention = wqk.open(tower(configuration("qwen2_vl").to_dict()))[0]
    bands = attention.bands()
    assert bands.axes.tolist() == [0, 0, 1, 1]
    assert bands.frequencies.tolist() == [1, 0.01, 1, 0.01]
    query, key = attention.query.weight[0], attention.key.weight[0]
    for plane in range(4):
        norms = [np.linalg.norm(w[[plane, plane + 4]]) for w in (query, key)]
        assert bands.energies[0, plane] == pytest.approx(np.prod(norms))


def test_bands_in_a_table_and_no_distance() -> None:
    checkpoint = tower(configuration("qwen2_vl").to_dict())
    assert scan(checkpoint, measures=["bands"]).frame["rotary_low_share"].null_count() == 0
    with pytest.raises(CheckpointError, match="rotary, on two axes"):
        scan(checkpoint, distances=[1])


def test_another_rotary_order_is_another_attention() -> None:
    config = configuration("qwen2_vl").to_dict()
    reference = tower(config)
    order = np.arange(WIDTH // 2).reshape(2, -1).T.ravel()  # halves interleaved
    rows = (np.arange(6)[:, None] * (WIDTH // 2) + order).ravel()
    names = list(reference.tensors())
    weights = reference.read([Part(name) for name in names])
    reordered = {name: weight[rows] for name, weight in zip(names, weights, strict=True)}
    candidate = StateDict(reordered, config, "other")
    assert same(reference, reference).same
    (mismatch,) = same(reference, candidate).blocks[0].mismatches
    assert "stored interleaved, read as half" in str(mismatch)


def test_a_width_that_two_axes_cannot_share_is_refused() -> None:
    config = {**configuration("qwen2_vl").to_dict(), "num_heads": 8}
    with pytest.raises(CheckpointError, match="a multiple of 4 dimensions, got 2"):
        wqk.open(tower(config))[0]


@pytest.mark.parametrize("widths", [[2, 2], [2, 2, 5], [2, 4, 4], "2", [2, 2, None]])
def test_widths_of_axes_that_do_not_fit_a_head_are_refused(widths: Any) -> None:
    weights = {
        f"transformer_blocks.0.attn.{name}.weight": np.ones((WIDTH, WIDTH), "f4")
        for name in ("to_q", "to_k", "to_v", "to_out.0")
    }
    weights |= {
        f"transformer_blocks.0.attn.norm_{side}.weight": np.ones(WIDTH // 2, "f4") for side in "qk"
    }
    config = {"model_type": "diffusers-QwenImageTransformer2DModel", "num_attention_heads": 2}
    config |= {"num_layers": 1, "attention_head_dim": WIDTH // 2, "axes_dims_rope": widths}
    with pytest.raises(CheckpointError, match=r"axes_dims_rope|axes rotate even shares"):
        wqk.open(StateDict(weights, config, "transformer"))[0]


def test_the_ceiling_at_any_distance_is_that_of_forms_turned_at_will() -> None:
    """DINOv3's positions are named only; a bound of the form at rest would be too low."""
    random = np.random.default_rng(0)
    prefix = "layer.0.attention"
    weights = {
        f"{prefix}.{side}_proj.weight": random.standard_normal((WIDTH, WIDTH)).astype("f4")
        for side in "qkv"
    }
    weights |= {f"layer.0.norm1.{kind}": np.ones(WIDTH, "f4") for kind in ("weight", "bias")}
    config = {"model_type": "dinov3_vit", "num_hidden_layers": 1, "num_attention_heads": 2}
    rows = scan(StateDict(weights, config, "tower"), heads=True, measures=["ceiling"]).frame
    for row in rows.filter(rows["head"].is_not_null()).iter_rows(named=True):
        bound = row["query_norm"] * row["key_norm"] * (WIDTH // 2) ** -0.5
        assert row["score_ceiling"] < 0.99 * bound
        assert row["score_ceiling_any_distance"] == pytest.approx(bound)


class Memory(torch.nn.Module):
    """The memory attention of a SAM 2, under its name in the model."""

    def __init__(self, model: str, prefix: str) -> None:
        super().__init__()
        configurations = import_module(f"transformers.models.{model}.configuration_{model}")
        self.config = getattr(configurations, f"{prefix}Config")(
            memory_attention_hidden_size=WIDTH,
            memory_attention_num_layers=2,
            rope_parameters={"rope_type": "axial", "rope_theta": 500.0},
        )
        self.config.memory_attention_rope_feat_sizes = [3, 2]
        module = import_module(f"transformers.models.{model}.modeling_{model}")
        self.memory_attention = getattr(module, f"{prefix}MemoryAttention")(self.config)

    def forward(self, picture: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.memory_attention(picture, memory, memory_posision_embeddings=0 * memory)


@pytest.mark.parametrize(
    ("model", "prefix"),
    [("sam2_video", "Sam2Video"), ("sam3_tracker_video", "Sam3TrackerVideo")],
)
def test_a_memory_turns_with_columns_and_rows(model: str, prefix: str) -> None:
    """Products of queries and keys in float64, next to those of the running memory attention."""
    torch.manual_seed(0)
    with double_precision():
        module = Memory(model, prefix).double().eval()
        plans = [plan for plan in wqk.open(module).plans if plan.stack == "memory"]
        assert [plan.kind for plan in plans] == ["self", "self", "cross", "cross"]
        pictures = torch.randn(6, 1, WIDTH, dtype=torch.float64)
        memories = torch.randn(12, 1, 64, dtype=torch.float64)
        with recording(module, plans, plans) as records:
            module(pictures, memories)
    rows_and_columns = np.array([[row, column] for row in range(2) for column in range(3)])
    for plan, (application,) in zip(plans, records, strict=True):
        assert plan.axial is not None
        block = wqk.open(module).block(plan.layer, stack="memory", kind=plan.kind)
        of_keys = np.tile(rows_and_columns, (1 if plan.kind == "self" else 2, 1))
        inputs = (application.query_input.reshape(6, -1), application.key_input.squeeze((0, 1)))
        queries = plan.axial.rotate(block.queries(inputs[0]), rows_and_columns)
        keys = plan.axial.rotate(block.keys(inputs[1]), of_keys)
        (attention,) = application.attentions(1)
        logits = queries @ keys.swapaxes(-1, -2) * plan.scale
        np.testing.assert_allclose(logits, attention.logits[0], atol=1e-12)
        exchanged = replace(plan.axial, columns_first=False)
        wrong = exchanged.rotate(block.queries(inputs[0]), rows_and_columns)
        assert np.abs(wrong - queries).max() > 0.01
