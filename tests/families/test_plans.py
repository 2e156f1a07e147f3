"""Plans before a model is run: its blocks and their windows, or the reason of a refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.families.architectures import GROUPED, NAMED, Architecture
from tests.families.proving import assert_same_blocks, edit_config, edit_tensors, save

import wqk
from wqk import explain, scan
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.families import families
from wqk.live.verification import verify


def test_every_model_type_belongs_to_one_family() -> None:
    kinds = [kind for family in families().values() for kind in family.model_types]
    assert len(kinds) == len(set(kinds))


def test_windows_are_told_for_the_layers_that_have_them(tmp_path: Path) -> None:
    save(NAMED["sam"], tmp_path)
    plans = [p for p in wqk.open(open_checkpoint(tmp_path)).plans if p.stack == "vision"]
    assert [str(plan.window) for plan in plans] == ["3x3", "None", "3x3"]
    assert all(plan.statuses == ("partial",) for plan in plans)


def test_heads_of_some_layers_may_have_a_width_of_their_own(tmp_path: Path) -> None:
    save(Architecture("llama", "LlamaModel", GROUPED), tmp_path)
    wide = {"layers.1.self_attn.q_proj.weight": 144, "layers.1.self_attn.k_proj.weight": 48}
    edit_tensors(
        tmp_path,
        lambda tensors: tensors | {n: tensors[n].repeat(2, 1)[:rows] for n, rows in wide.items()},
    )
    with pytest.raises(CheckpointError, match="144 rows do not fit 6 query heads of width 12"):
        wqk.open(open_checkpoint(tmp_path))
    edit_config(tmp_path, {"per_layer_config": {"1": {"head_dim": 24}}})
    plans = wqk.open(open_checkpoint(tmp_path)).plans
    assert [plan.query.head_width for plan in plans] == [12, 24]


def test_layers_are_counted_through_the_stages(tmp_path: Path) -> None:
    save(NAMED["swinv2"], tmp_path)
    plans = wqk.open(open_checkpoint(tmp_path)).plans
    assert [plan.layer for plan in plans] == [0, 1, 2, 3, 4]
    assert [plan.query.heads for plan in plans] == [2, 2, 4, 4, 4]
    assert {str(plan.window) for plan in plans} == {"4x4"}
    assert "cosine" in plans[0].reason


def test_a_missing_stage_is_noticed(tmp_path: Path) -> None:
    save(NAMED["swin"], tmp_path)
    edit_tensors(
        tmp_path, lambda tensors: {n: v for n, v in tensors.items() if ".1.blocks.2." not in n}
    )
    with pytest.raises(CheckpointError, match="incomplete"):
        wqk.open(open_checkpoint(tmp_path))


def test_mobilellm_is_llama_whose_layers_are_applied_twice(tmp_path: Path) -> None:
    llama, mobilellm = tmp_path / "known", tmp_path / "mobilellm"
    for folder in (llama, mobilellm):
        save(replace(NAMED["llama"], config=GROUPED), folder)
    edit_config(mobilellm, {"model_type": "mobilellm"})
    assert_same_blocks(llama, mobilellm)
    assert {plan.causal for plan in wqk.open(mobilellm).plans} == {True}
    edit_config(mobilellm, {"layer_sharing": True})
    assert [plan.applications for plan in wqk.open(mobilellm).plans] == [2, 2]
    verification = verify(mobilellm)
    assert verification.family == "mobilellm"
    assert verification.difference < 1e-12


def test_rotary_scaling_without_its_numbers(tmp_path: Path) -> None:
    save(NAMED["llama"], tmp_path)
    edit_config(tmp_path, {"rope_parameters": {"rope_type": "llama3"}})
    with pytest.raises(CheckpointError, match="rotary scaling 'llama3'"):
        wqk.open(open_checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite"])
def test_the_latent_form_is_the_product_of_its_factors(name: str, tmp_path: Path) -> None:
    model = save(NAMED[name], tmp_path)
    attention = wqk.open(tmp_path)[1]
    block = model.get_submodule("layers.1" if name.endswith("lite") else "model.layers.1")
    weights = {key: value.detach().numpy() for key, value in block.self_attn.named_parameters()}
    content, position, rank = 10, 8, 16
    key = weights["kv_b_proj.weight"].reshape(6, -1, rank)[:, :content]
    key = key * weights["kv_a_layernorm.weight"] @ weights["kv_a_proj_with_mqa.weight"][:rank]
    query = weights["q_proj.weight"] if name.endswith("lite") else weights["q_b_proj.weight"]
    query = query.reshape(6, content + position, -1)[:, :content]
    if not name.endswith("lite"):
        query = query * weights["q_a_layernorm.weight"] @ weights["q_a_proj.weight"]
    assert attention[0].rank == content
    for head in range(6):
        expected = query[head].T @ key[head]
        np.testing.assert_allclose(attention[head].dense(), expected, atol=1e-4)
    assert attention.plan.statuses == ("partial",)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_biases_before_the_norm_of_a_latent_are_read(name: str, tmp_path: Path) -> None:
    latent = NAMED[name]
    save(replace(latent, config=latent.config | {"attention_bias": True}), tmp_path)
    verification = wqk.verify(tmp_path)
    assert {block.verdict for block in verification.blocks} == {"right"}
    assert verification.difference < 1e-12
    first = wqk.open(tmp_path).plans[0]
    assert [side.projection.bias is not None for side in (first.query, first.key)] == [True, True]
    assert first.key_bias_counts


def test_a_bias_after_a_latent_is_refused(tmp_path: Path) -> None:
    save(NAMED["deepseek-v2"], tmp_path)
    name = "model.layers.0.self_attn.kv_b_proj"
    edit_tensors(
        tmp_path,
        lambda tensors: tensors | {f"{name}.bias": tensors[f"{name}.weight"][:, 0].clone()},
    )
    with pytest.raises(CheckpointError, match="a bias after the latent is not read"):
        wqk.open(open_checkpoint(tmp_path))


def test_latent_widths_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(NAMED["deepseek-v2"], tmp_path)
    edit_config(tmp_path, {"qk_rope_head_dim": 6})
    with pytest.raises(CheckpointError, match="16 outputs for the latent and 6"):
        wqk.open(open_checkpoint(tmp_path))
    edit_config(tmp_path, {"qk_rope_head_dim": 8, "qk_nope_head_dim": 30})
    with pytest.raises(CheckpointError, match="have no outputs 0 to 30"):
        wqk.open(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("model", "reason"),
    [("DiffLlamaModel", "difference of two softmaxes"), ("HunYuanDenseV1Model", "token by token")],
)
def test_attention_that_is_more_than_its_form_is_partial(model, reason, tmp_path):
    save(Architecture("partial", model, GROUPED), tmp_path)
    plans = wqk.open(open_checkpoint(tmp_path)).plans
    assert {plan.statuses for plan in plans} == {("partial",)}
    assert all(reason in plan.reason for plan in plans)


@pytest.mark.parametrize("pruned", [[1], [1, 3]])
def test_heads_that_were_pruned_are_not_counted(pruned: list[int], tmp_path: Path) -> None:
    """The remaining heads of a layer are unchanged, one after the other."""
    save(NAMED["bert"], tmp_path)
    before = wqk.open(tmp_path)[0]
    kept = [h for h in range(before.head_count) if h not in pruned]
    width = before.query.weight.shape[1]
    rows = np.concatenate([np.arange(h * width, (h + 1) * width) for h in kept])

    def prune(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return tensors | {
            name: value[rows] if ".self." in name else value[:, rows]
            for name, value in tensors.items()
            if ".layer.0.attention.self." in name or ".layer.0.attention.output.dense.w" in name
        }

    edit_tensors(tmp_path, prune)
    expected = f"{len(kept)} heads of width {width}, but config.json has 4 heads"
    with pytest.raises(CheckpointError, match=expected):
        wqk.open(open_checkpoint(tmp_path))
    edit_config(tmp_path, {"pruned_heads": {"0": pruned}})
    plans = wqk.open(open_checkpoint(tmp_path)).plans
    assert [(plan.query.heads, plan.query.head_width) for plan in plans[:2]] == [
        (len(kept), width),
        (before.head_count, width),
    ]
    assert plans[0].scale == before.plan.scale
    after = wqk.open(tmp_path)[0]
    for number, head in enumerate(kept):
        np.testing.assert_array_equal(after[number].dense(), before[head].dense())
    for nonsense in ({"0": 1}, [1], {"0": [0, 1, 2, 3]}):
        edit_config(tmp_path, {"pruned_heads": nonsense})
        with pytest.raises(CheckpointError, match="pruned_heads"):
            wqk.open(open_checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("model_type", "prefix", "settings", "heads"),
    [
        ("convbert", "encoder.layer.0.attention.self", {"head_ratio": 2}, 2),
        ("pix2struct_vision_model", "encoder.layer.0.attention", {"d_kv": 8}, 4),
    ],
)
def test_fewer_rows_than_the_width_of_a_model_may_be_all_heads(
    model_type: str, prefix: str, settings: dict[str, int], heads: int
) -> None:
    """Other heads of ConvBERT are convolutions; the heads of Pix2Struct may have any width."""
    weight = np.ones((32, 64), np.float32)
    names = [f"{prefix}.{side}.weight" for side in ("query", "key", "value")]
    config = {
        "model_type": model_type,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_hidden_layers": 1,
        **settings,
    }
    plans = wqk.open(StateDict(dict.fromkeys(names, weight), config, "made")).plans
    assert [plan.query.heads for plan in plans] == [heads]


def test_some_of_a_model_s_rows_are_no_narrower_heads(tmp_path: Path) -> None:
    """One tensor-parallel part has half of the heads, not heads of half the width."""
    save(replace(NAMED["llama"], config=GROUPED | {"head_dim": 4}), tmp_path)
    edit_tensors(
        tmp_path,
        lambda tensors: (
            tensors
            | {n: v[: len(v) // 2] for n, v in tensors.items() if "q_proj" in n or "k_proj" in n}
        ),
    )
    with pytest.raises(CheckpointError, match="12 rows do not fit 6 query heads of width 4"):
        wqk.open(open_checkpoint(tmp_path))


def test_head_counts_that_a_configuration_leaves_out_can_be_given(tmp_path: Path) -> None:
    save(replace(NAMED["llama"], config=GROUPED), tmp_path)
    expected = scan(tmp_path).frame
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    heads, key_heads = config.pop("num_attention_heads"), config.pop("num_key_value_heads")
    # What transformers fills in, 32, is the number of another model.
    path.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="do not divide into 32 heads"):
        scan(tmp_path)
    assert scan(wqk.open(tmp_path, heads_per_layer=heads)).frame.equals(expected)
    assert scan(wqk.open(tmp_path, heads_per_layer=heads, key_heads=key_heads)).frame.equals(
        expected
    )
    with pytest.raises(CheckpointError, match="do not fit"):
        scan(wqk.open(tmp_path, heads_per_layer=heads, key_heads=heads))
    path.write_text(json.dumps(config | {"num_attention_heads": heads}))
    with pytest.raises(CheckpointError, match="knows the number of heads"):
        scan(wqk.open(tmp_path, heads_per_layer=heads))


def test_key_heads_that_a_configuration_lacks_can_be_given_although_shapes_show_them(
    tmp_path: Path,
) -> None:
    save(replace(NAMED["llama"], config=GROUPED), tmp_path)
    expected = scan(tmp_path).frame
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    heads, key_heads = config["num_attention_heads"], config.pop("num_key_value_heads")
    path.write_text(json.dumps(config))
    assert scan(wqk.open(tmp_path, key_heads=key_heads)).frame.equals(expected)
    with pytest.raises(CheckpointError, match=f"give key_heads={key_heads}, or"):
        wqk.open(tmp_path, key_heads=heads)
    sentence = f"config.json lacks num_key_value_heads; {key_heads} key heads follow from the shape"
    assert sentence in " ".join(wqk.explain(tmp_path).notes)
    path.write_text(json.dumps(config | {"num_key_value_heads": heads}))
    with pytest.raises(CheckpointError, match=f"set num_key_value_heads to {key_heads} in config"):
        wqk.open(tmp_path)
    with pytest.raises(CheckpointError, match="knows the number of heads"):
        wqk.open(tmp_path, key_heads=key_heads)


def test_names_like_the_expected_ones_are_told() -> None:
    name = "layers.0.self_attn.q_proj.base_layer.weight"
    checkpoint = StateDict({name: np.ones((4, 4))}, {"model_type": "llama"}, "adapted")
    with pytest.raises(
        CheckpointError, match=f"such as 'layers.0.self_attn.q_proj.weight', got '{name}'"
    ):
        wqk.open(checkpoint)


def test_norms_and_soft_caps_outside_the_form_are_told() -> None:
    sides = {f"layers.0.self_attn.{side}_proj.weight": np.eye(8) for side in "qk"}
    tensors = sides | {"layers.0.input_layernorm.weight": np.ones(8)}
    config = {"model_type": "gemma2", "num_attention_heads": 2, "num_key_value_heads": 2}
    config |= {
        "num_hidden_layers": 1,
        "head_dim": 4,
        "query_pre_attn_scalar": 4,
        "attn_logit_softcapping": 3.0,
    }
    checkpoint = StateDict(tensors, config, "capped")
    explained = " ".join(explain(checkpoint).notes)
    assert "softly capped at ±3" in explained
    assert "the gains of the norms" in explained
    assert "the soft cap of scores at ±3" in scan(checkpoint).metadata["left_out"]["capped"]


def test_no_family_has_the_name_of_another() -> None:
    misnamed = {file: family.name for file, family in families().items() if family.name != file}
    assert not misnamed, "the name of a family is that of its file in families/data"
