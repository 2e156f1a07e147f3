"""Rotary positions that differ from Llama's, against the computation of transformers' models.

Positions on one axis, and the side of the rotation on which a norm stands, are proven by all
probabilities of a model that runs in float64. Positions on two axes are proven by queries and keys
before and after the model's own rotation.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
import transformers
from tests import small
from tests.families.proving import edit_config, edit_tensors
from tools.deriving import building
from tools.deriving.probing import record_type

import wqk
from wqk.errors import CheckpointError
from wqk.families import families
from wqk.families.rotary import Rotary

DENSE = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
}
ENCODER_DECODER = {
    "hidden_size": 36,
    "intermediate_size": 40,
    "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 1,
    "encoder_num_attention_heads": 3,
    "decoder_num_attention_heads": 3,
    "encoder_num_key_value_heads": 3,
    "decoder_num_key_value_heads": 3,
    "vocab_size": 60,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "pad_head_dim_to_multiple_of": None,
}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1000.0}
XDROPE = {
    "rope_type": "xdrope",
    "alpha": 50.0,
    "rope_theta": 1000.0,
    "factor": 1.0,
    "xdrope_section": [1, 1, 2, 2],
}
FOURTH = {"head_dim": 12}
LFM3 = {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}

# Class of transformers, its configuration, and whether a norm follows the rotation.
TURNED = {
    "hunyuan-dense": ("HunYuanDenseV1Model", DENSE | FOURTH, True),
    "hunyuan-dense-alpha": (
        "HunYuanDenseV1Model",
        DENSE | FOURTH | {"rope_parameters": ALPHA},
        True,
    ),
    "hunyuan-moe": (
        "HunYuanMoEV1Model",
        DENSE | FOURTH | {"num_experts": 2, "moe_topk": 1},
        True,
    ),
    "hunyuan-vl": ("HunYuanVLTextModel", DENSE | FOURTH | {"rope_parameters": XDROPE}, True),
    "moonshine": ("MoonshineModel", ENCODER_DECODER, False),
    "lfm3": (
        "Lfm3Model",
        DENSE | FOURTH | LFM3,
        False,
    ),
}


def random_model(name: str, settings: dict[str, Any]) -> Any:
    """A model whose attention is far from uniform, with gains that all differ."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.2 / parameter[0].numel() ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def save(case: str) -> Path:
        if case not in folders:
            folders[case] = tmp_path_factory.mktemp(case)
            name, settings, _ = TURNED[case]
            random_model(name, settings).save_pretrained(folders[case])
        return folders[case]

    return save


def verdicts(folder: Path, family: str | Path | None = None) -> set[str]:
    """The verdicts on self-attention of the decoder; Moonshine's encoder is not run."""
    verification = wqk.verify(folder if family is None else wqk.open(folder, family=family))
    return {b.verdict for b in verification.blocks if (b.stack, b.kind) == ("decoder", "self")}


@pytest.mark.parametrize("case", TURNED)
def test_all_probabilities_are_the_models(case: str, saved: Callable[[str], Path]) -> None:
    assert verdicts(saved(case)) == {"right"}
    for plan in wqk.open(saved(case)).plans:
        if plan.kind == "self":
            assert plan.rotary is not None
            assert plan.turns_gains == TURNED[case][2]
            assert not plan.rotation_unknown


WRONG = [
    ("hunyuan-dense", "before_norm = true", "before_norm = false"),
    ("hunyuan-dense", 'order = "half"', 'order = "interleaved"'),
    ("hunyuan-dense-alpha", "alpha = true", "alpha = false"),
    ("moonshine", 'order = "interleaved"', 'order = "half"'),
    ("lfm3", 'order = "half"', 'order = "interleaved"'),
]


@pytest.mark.parametrize(("case", "line", "wrong"), WRONG)
def test_another_rotation_is_noticed(
    case: str, line: str, wrong: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    family = wqk.open(saved(case)).family
    text = (Path(wqk.families.__file__).parent / "data" / f"{family}.toml").read_text("utf-8")
    assert line in text
    file = tmp_path / "family.toml"
    file.write_text(text.replace(line, wrong), "utf-8")
    assert verdicts(saved(case), file) & {"only form right", "wrong"}


def test_a_form_at_a_distance_is_refused_where_gains_follow_the_rotation(
    saved: Callable[[str], Path],
) -> None:
    block = wqk.open(saved("hunyuan-dense"))[0]
    with pytest.raises(CheckpointError, match="normalizes queries and keys after their rotation"):
        block.at(distance=1)
    x = np.random.default_rng(0).standard_normal((3, 32))
    near, far = (block.products(x, x, (at, at)) for at in (np.full(3, 0), np.full(3, 9)))
    assert np.abs(near - far).max() > 1e-3  # positions count, not their distance alone


def test_same_sees_another_order_base_and_side_of_the_norm(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    reference = saved("hunyuan-dense")
    assert wqk.same(reference, reference).same
    for name, change in {
        "base": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        "alpha": {"rope_parameters": {"rope_theta": 10000.0} | ALPHA},
    }.items():
        folder = tmp_path / name
        model = transformers.AutoModel.from_pretrained(reference)
        model.save_pretrained(folder)
        edit_config(folder, change)
        assert wqk.same(reference, folder).same is False, name


V4 = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 24,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "o_groups": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "index_head_dim": 12,
    "index_n_heads": 2,
    "vocab_size": 60,
}
V4_FILE = {
    "model_type": "deepseek_v4",
    "compress_ratios": [0, 4, 128],
    "qk_rope_head_dim": 8,
    "rope_theta": 1000,
    "compress_rope_theta": 5000,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("trained", [2048, 4096])
def test_the_turns_that_yarn_keeps_by_default_are_those_of_transformers(trained: int) -> None:
    """32 and 33 turns within 2048 tokens end at different pairs of 128 dimensions."""
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    parameters["original_max_position_embeddings"] = trained
    sizes = {"head_dim": 128, "max_position_embeddings": 4 * trained}
    config = transformers.LlamaConfig(**sizes, rope_parameters=parameters)
    rotary_class = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    expected = rotary_class(config).inv_freq
    model = small.llama(layers=1, head_width=128, rope_parameters=parameters, **sizes)
    (plan,) = wqk.open(model).plans
    np.testing.assert_allclose(plan.rotary.frequencies, expected, rtol=1e-6)


@pytest.mark.parametrize("of_publisher", [True, False])
def test_the_last_dimensions_turn_by_the_kind_of_layer(of_publisher: bool, tmp_path: Path) -> None:
    """DeepSeek V4: files of the publisher, and those that transformers writes of them."""
    module = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = module.DeepseekV4Config.from_dict(V4 | V4_FILE)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = module.DeepseekV4Model(config).eval()
    model.save_pretrained(tmp_path)
    if of_publisher:
        (tmp_path / "config.json").write_text(json.dumps(V4 | V4_FILE), encoding="utf-8")
    rotate, calls = module.apply_rotary_pos_emb, []

    def recorded(x: Any, cosine: Any, sine: Any, **further: Any) -> Any:
        turned = rotate(x, cosine, sine, **further)
        calls.append((x.detach().numpy(), turned.detach().numpy()))
        return turned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "apply_rotary_pos_emb", recorded)
        for layer in model.layers:
            layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(None))
        model(torch.arange(12)[None])
    starts = [number for number, call in enumerate(calls) if call is None]
    amplitudes = []
    for plan, start in zip(wqk.open(tmp_path).plans, starts, strict=True):
        assert plan.rotary is not None
        assert not plan.rotation_unknown
        amplitudes.append(plan.rotary.amplitude)
        for before, after in calls[start + 1 : start + 3]:  # queries, then keys
            turned = plan.rotary.rotate(before, np.arange(12))
            np.testing.assert_allclose(turned, after, atol=2e-5)
            assert np.abs(before - after).max() > 0.05
    assert amplitudes == [1.0, 1.0, 1.0]
    bases = [plan.rotary.frequencies[1] for plan in wqk.open(tmp_path).plans if plan.rotary]
    assert bases[0] != bases[1] == bases[2]


def test_timesfm_normalizes_after_the_rotation() -> None:
    rule = families()["timesfm2-5"].attention[0]
    assert rule.rotary is not None
    assert rule.rotary.before_norm
    assert rule.position == ""


# Positions on two axes: model types, the function that rotates in each one's module, whether the
# positions are centres of patches from -1 to 1.
AXIAL = {
    "dinov3_vit": ("apply_rotary_pos_emb", True),
    "eomt_dinov3": ("apply_rotary_pos_emb", True),
    "sapiens2": ("apply_rotary_pos_emb", True),
    "mlcd_vision_model": ("apply_rotary_pos_emb_vision", False),
    "kimi_k25_vision": ("apply_rotary_pos_emb_vision", False),
    "muse_glimmer_vision": ("apply_rotary_pos_emb_vision", False),
    "paddleocr_vl_vision": ("apply_rotary_pos_emb_vision", False),
    "video_llama_3_vision": ("apply_rotary_pos_emb_vision", False),
    "llama4_vision_model": ("vision_apply_rotary_emb", False),
    "lfm3_vl_vision": ("apply_rotary_pos_emb_vision", False),
    "pixtral": ("apply_rotary_pos_emb", False),
    "sam3_vit_model": ("apply_rotary_pos_emb_2d", False),
    "step3p5_vision": ("apply_rotary_pos_emb_vision", False),
    "minimax_m3_vl_vision": ("apply_rotary_pos_emb_vision", False),
    "gemma4_vision": ("apply_multidimensional_rope", False),
}
MODULES = {
    "eomt_dinov3": "eomt_dinov3",
    "mlcd_vision_model": "mlcd",
    "kimi_k25_vision": "kimi_k25",
    "muse_glimmer_vision": "muse_glimmer",
    "lfm3_vl_vision": "lfm3_vl",
    "sam3_vit_model": "sam3",
    "paddleocr_vl_vision": "paddleocr_vl",
    "video_llama_3_vision": "video_llama_3",
    "llama4_vision_model": "llama4",
    "step3p5_vision": "step3p7",
    "minimax_m3_vl_vision": "minimax_m3_vl",
    "gemma4_vision": "gemma4",
}

# Types whose files hold pairs interleaved, and whose models have halves.
HALVES_IN_MEMORY = {"step3p5_vision"}


def rotations(
    model_type: str, function: str, folder: Path
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Queries and keys (heads, N, R) before and after the model's own rotation."""
    name = MODULES.get(model_type, model_type)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    rotate, calls = getattr(module, function), []

    def recorded(q: Any, k: Any, *angles: Any, **named: Any) -> Any:
        turned = rotate(q, k, *angles, **named)
        if isinstance(turned, torch.Tensor):  # of one side, whose angles are the second argument
            if float((turned - q).abs().max()) > 0.1:
                calls.append([(q, turned)])
            return turned
        if float((turned[0] - q).abs().max()) > 0.1:  # else it runs with all angles zero
            calls.append([(q, turned[0]), (k, turned[1])])
        return turned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, function, recorded)
        record_type(model_type, folder)
    for before, after in calls[0]:
        pair = [vectors.detach().double().numpy() for vectors in (before, after)]
        if "vision" in function or "rope" in function:  # (N, heads, R), or with one example
            pair = [vectors.reshape(-1, *vectors.shape[-2:]).swapaxes(0, 1) for vectors in pair]
        yield tuple(vectors.reshape(-1, *vectors.shape[-2:]) for vectors in pair)


def unexplained(rotary: Rotary, before: np.ndarray, after: np.ndarray, centred: bool) -> float:
    """Share of tokens that no place on a grid turns like the model does."""
    numbers = np.arange(48.0 if rotary.axes == 2 else 16.0)
    if centred:
        numbers = np.unique([(2 * k + 1) / n - 1 for n in range(2, 17) for k in range(n)])
    grid = np.meshgrid(*[numbers] * rotary.axes, indexing="ij")
    places = np.stack(grid, -1).reshape(-1, rotary.axes)
    missing = 0
    moved = [n for n in range(before.shape[1]) if np.abs(after[0, n] - before[0, n]).max() > 1e-6]
    chosen = moved[:40]
    for token in chosen:
        repeated = np.broadcast_to(before[0, token], (len(places), before.shape[-1]))
        distance = np.abs(rotary.rotate(repeated, places) - after[0, token]).max(axis=-1)
        missing += distance.min() > 2e-4
    assert len(moved) > 3
    return missing / len(chosen)


@pytest.mark.parametrize("model_type", AXIAL)
def test_pictures_turn_by_rows_and_columns(model_type: str, tmp_path: Path) -> None:
    function, centred = AXIAL[model_type]
    pairs = list(rotations(model_type, function, tmp_path / "model"))
    plan = wqk.open(tmp_path / "model").plans[0]
    rotary = plan.axial
    assert rotary is not None
    assert not plan.rotation_unknown
    if model_type in HALVES_IN_MEMORY:
        assert rotary.order == "interleaved"
        rotary = replace(rotary, order="half")
    for before, after in pairs:
        assert unexplained(rotary, before, after, centred) < 0.2  # a class token has its own angles
    before, after = pairs[0]
    exchanged_order = {"half": "interleaved", "interleaved": "half"}[rotary.order]
    for wrong in (
        replace(rotary, order=exchanged_order),
        replace(rotary, mixed=not rotary.mixed),
        *([replace(rotary, apart=not rotary.apart)] if rotary.order == "half" else []),
        replace(rotary, frequencies=rotary.frequencies * 1.3),
    ):
        assert unexplained(wrong, before, after, centred) > 0.3


def test_files_with_interleaved_pairs_are_the_models_with_halves(tmp_path: Path) -> None:
    model, _ = building.build("step3p5_vision", 0)
    model.save_pretrained(tmp_path)
    axial = [wqk.open(source).plans[0].axial for source in (model, tmp_path)]
    assert [rotary and rotary.order for rotary in axial] == ["half", "interleaved"]
    assert wqk.same(model, tmp_path).same


@pytest.mark.parametrize("model_type", ["gemma4_vision", "mlcd_vision_model"])
def test_same_sees_rows_and_columns_exchanged(model_type: str, tmp_path: Path) -> None:
    """A converter took the dimensions of a patch's row for those of its column."""
    reference, candidate = tmp_path / "reference", tmp_path / "candidate"
    record_type(model_type, reference)
    plan = wqk.open(reference).plans[0]
    assert plan.axial is not None
    order = np.arange(plan.query.head_width)
    for dimensions in plan.axial.planes:
        plane = order[dimensions]
        order[dimensions] = np.roll(plane, len(plane) // 2)
    shutil.copytree(reference, candidate)

    def exchanged(tensors: dict[str, Any]) -> dict[str, Any]:
        for name, tensor in tensors.items():
            if "q_norm" in name or "k_norm" in name:
                tensors[name] = tensor[order].contiguous()
            elif ".q_proj" in name or ".k_proj" in name:
                heads = tensor.unflatten(0, (-1, len(order)))
                tensors[name] = heads[:, order].flatten(0, 1).contiguous()
        return tensors

    edit_tensors(candidate, exchanged)
    assert wqk.same(reference, reference).same
    assert wqk.same(reference, candidate).same is False


def test_no_family_but_these_only_names_its_rotation() -> None:
    """Every further one has to be read, or is listed as unknown here and on the page."""
    named = {
        name
        for name, family in families().items()
        for rule in family.attention
        if rule.position.startswith("rotary") and rule.rotary is None
    }
    assert named == {
        "efficientloftr",  # each head has frequencies of its own
        "lightglue",  # frequencies are learned
        "modded-nanogpt",  # versions differ, and no configuration has the version
        "vjepa2",  # not a rotation: both dimensions of a pair have their own angle
    }
