"""Linear attention and state spaces: the forms are what enters the models' own kernels."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.families.architectures import Architecture
from tests.families.architectures.architecture import GROUPED
from tests.families.proving import edit_config, save, torch
from tests.families.test_hybrids import GRANITE, LATENT, MAMBA, MODELS, WITHOUT_WIDTH
from tools.deriving import building

import wqk
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

GROUPS = MAMBA | {"mamba_n_groups": 2}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
}  # fmt: skip
DENSE = {"num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
         "shared_expert_intermediate_size": 8}  # fmt: skip
KIMI = {
    "q_lora_rank": None, "v_head_dim": 5, "linear_head_dim": 8, "linear_num_heads": 3,
    "linear_conv_kernel_dim": 2, "head_dim": 10,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip

# Each model, the kind of its other layers, and these layers.
CASES: dict[str, tuple[Architecture, str, list[int]]] = {
    name: (Architecture(name, model, config), kind, layers)
    for name, model, config, kind, layers in (
        ("qwen3-next", "Qwen3NextModel", GROUPED | DELTA | DENSE, "linear", [0]),
        ("qwen3.5", "Qwen3_5TextModel", GROUPED | DELTA, "linear", [0]),
        ("qwen3.5-moe", "Qwen3_5MoeTextModel", GROUPED | DELTA | DENSE, "linear", [0]),
        ("olmo-hybrid", "OlmoHybridModel", GROUPED | DELTA, "linear", [0]),
        ("kimi-linear", "KimiLinearModel",
         LATENT | KIMI | {"mlp_layer_types": ["dense", "dense"]}, "linear", [0]),
        ("minimax", "MiniMaxModel",
         GROUPED | {"layer_types": ["linear_attention", "full_attention"], "block_size": 4,
                    "num_local_experts": 2, "num_experts_per_tok": 1}, "linear", [0]),
        ("bamba", "BambaModel", MODELS["bamba"][0].config | GROUPS, "state-space", [0]),
        ("granite-hybrid", "GraniteMoeHybridModel", GRANITE | GROUPS, "state-space", [0]),
        ("falcon-h1", "FalconH1Model",
         MODELS["falcon-h1"][0].config | GROUPS | {"ssm_in_multiplier": 1.0}, "state-space",
         [0, 1]),
        ("nemotron-h", "NemotronHModel",
         GROUPED | {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4,
                    "mamba_head_dim": 12, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 4},
         "state-space", [0]),
        ("zamba2", "Zamba2Model",
         WITHOUT_WIDTH | {
             "num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"],
             "mamba_d_state": 6, "mamba_ngroups": 2, "n_mamba_heads": 4, "mamba_expand": 1,
             "mamba_d_conv": 2, "num_key_value_heads": GROUPED["num_attention_heads"],
             "num_mem_blocks": 1, "use_shared_attention_adapter": False, "chunk_size": 4},
         "state-space", [0, 1, 2]),
    )
}  # fmt: skip

# What a model's own kernel is called, and its arguments that are queries and keys.
KERNELS = {
    "torch_chunk_gated_delta_rule": ("query", "key"),
    "chunk_kimi_delta_attention": ("query", "key"),
    "mamba2_chunk_scan": ("C", "B"),
}


def heard(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Runs the model; the queries and keys (1, N, heads, width) that its kernels are given."""
    file = sys.modules[type(model).__module__]
    model.config._experts_implementation = "eager"  # the fused kernels know no float64
    found: list[tuple[Any, Any]] = []
    for name in KERNELS.keys() & vars(file).keys():
        own = getattr(file, name)

        def listening(*args: Any, _own: Any = own, _name: str = name, **named: Any) -> Any:
            import inspect

            bound = inspect.signature(_own).bind(*args, **named).arguments
            found.append(tuple(bound[side].detach() for side in KERNELS[_name]))
            return _own(*args, **named)

        monkeypatch.setattr(file, name, listening)
    with torch.no_grad():
        model(input_ids=torch.arange(3, 16)[None], use_cache=False)
    return found


def convolved(module: Any, sides: list[np.ndarray]) -> list[np.ndarray]:
    """Sides (N, C) after the module's own convolution over tokens, in its order, and activation."""
    x = torch.from_numpy(np.concatenate(sides, -1)).T[None]
    mixed = torch.nn.functional.silu(module.conv1d(x)[..., : x.shape[-1]])[0].T
    widths = np.cumsum([side.shape[-1] for side in sides])[:-1]
    return np.split(mixed.detach().numpy(), widths, -1)


@pytest.mark.parametrize(("architecture", "kind", "layers"), CASES.values(), ids=CASES)
def test_the_forms_are_what_enters_the_kernel(
    architecture: Architecture,
    kind: str,
    layers: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = save(architecture, tmp_path).double().eval()
    assert_enters(model, tmp_path, kind, layers, monkeypatch)


@pytest.mark.parametrize("model_type", ["glm5_next_text", "bailing_hybrid", "qwen4_exp_text"])
def test_so_it_is_in_derived_families(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = building.build(model_type, 0)[0]
    model.save_pretrained(tmp_path)
    model = model.double()
    layers = [plan.layer for plan in wqk.open(tmp_path).mixers]
    assert layers
    assert_enters(model, tmp_path, "linear", layers, monkeypatch)


def assert_enters(
    model: Any, folder: Path, kind: str, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model's kernels are given is what the forms in its files make of the inputs."""
    opened = wqk.open(folder)
    assert [(plan.kind, plan.layer) for plan in opened.mixers] == [(kind, n) for n in layers]
    inputs: dict[str, Any] = {}
    live = wqk.open(model).mixers  # whose names are the module's
    for plan in live:
        name = plan.query.tensor.removesuffix(".weight")
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: inputs.__setitem__(name, args[0].detach())
        )
    kernels = heard(model, monkeypatch)
    for number, plan in enumerate(opened.mixers):
        block, name = opened.block(plan.layer, kind=kind), live[number].query.tensor
        x = inputs[name.removesuffix(".weight")][0].numpy()
        module = model.get_submodule(name.removesuffix(".weight").rpartition(".")[0])
        heads = plan.query.heads
        q, k, v = (
            np.concatenate([x @ np.asarray(head, float).T for head in side], -1)
            for side in (*block.weights(), block.weights("ov")[0])
        )
        if opened.family == "minimax":
            assert_lightning(model, module, x, q, k, v, heads)
            continue
        order = [q, k, v] if kind == "linear" else [v, k, q]
        if opened.family == "falcon-h1":
            multipliers = model.config.ssm_multipliers
            order = [side * multipliers[n] for side, n in zip(order, (1, 2, 3), strict=True)]
        mixed = convolved(module, order)
        found = (mixed[0], mixed[1]) if kind == "linear" else (mixed[2], mixed[1])
        for rebuilt, given in zip(found, kernels[number], strict=True):
            own = given[0].numpy().reshape(len(x), -1, plan.query.head_width)
            rebuilt = rebuilt.reshape(len(x), heads, -1)
            repeats = own.shape[1] // heads  # some kernels are given a head for each value head
            np.testing.assert_allclose(np.repeat(rebuilt, repeats, 1), own, atol=1e-12)


def assert_lightning(model: Any, module: Any, x: Any, q: Any, k: Any, v: Any, heads: int) -> None:
    """The layer's output, by one product of queries and keys with decay, equals its own."""
    q, k, v = (
        torch.nn.functional.silu(torch.from_numpy(side)).view(len(x), heads, -1).transpose(0, 1)
        for side in (q, k, v)
    )
    apart = torch.arange(len(x))[:, None] - torch.arange(len(x))
    decay = torch.exp(-module.slope_rate * apart) * (apart >= 0)
    out = ((q @ k.mT) * decay @ v).transpose(0, 1).reshape(1, len(x), -1)
    x = torch.from_numpy(x)[None]
    out = module.out_proj(module.norm(out) * torch.sigmoid(module.output_gate(x)))
    own = module(x, (None, None), torch.ones(1, x.shape[1]))[0]
    torch.testing.assert_close(out, own, atol=1e-5, rtol=1e-5)  # its rates are in single precision


def test_layers_without_a_softmax_are_scored_beside_the_others(tmp_path: Path) -> None:
    save(CASES["qwen3-next"][0], tmp_path)
    table = wqk.scan(tmp_path)
    kinds = table.layers.frame.select("kind", "layer", "status").rows()
    assert [(kind, layer) for kind, layer, _ in kinds] == [("self", 1), ("linear", 0)]
    assert "partial" in kinds[1][2]
    assert "short convolution" in table.metadata["partial"]["decoder linear"]
    model = wqk.open(tmp_path)
    assert len(model) == 1  # what runs a softmax
    block = model.block(0, kind="linear")
    assert table.layers.frame["symmetry"][1] == pytest.approx(block.form.symmetry, abs=1e-6)
    assert model.select(kind="linear").scored == model.mixers
    notes = " ".join(wqk.explain(tmp_path).notes)
    assert "delta rule" in notes
    assert "has no form" not in notes


def test_at_a_distance_only_positions_are_scored(tmp_path: Path) -> None:
    save(CASES["qwen3-next"][0], tmp_path)
    table = wqk.scan(tmp_path, distances=[4])
    assert set(table.frame["kind"]) == {"self"}


def test_sections_that_do_not_fit_are_an_error(tmp_path: Path) -> None:
    save(CASES["qwen3-next"][0], tmp_path)
    edit_config(tmp_path, {"linear_num_key_heads": 3})
    with pytest.raises(CheckpointError, match=r"in_proj_qkvz.* do not"):
        wqk.open(tmp_path)
