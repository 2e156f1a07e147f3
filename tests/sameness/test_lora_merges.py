"""Wrong merges of an adapter of LoRA are named, and undone by the adapter's own factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import small

import wqk
from wqk.errors import CheckpointError
from wqk.sameness.axis_orders import Stretches
from wqk.sameness.edits import LowRank, Within
from wqk.sameness.execution import ProgramTensors, Tensor, run
from wqk.sameness.mismatches import Kind
from wqk.sameness.repairs import Change
from wqk.sameness.verdicts import Verdict

RANK, ALPHA, WIDTH = 4, 24, 24
SCALE = ALPHA / RANK
STABILIZED = ALPHA / math.sqrt(RANK)
# A merged weight, from the base model's weight, the product B A, and the right scale.
Merge = Callable[[np.ndarray, np.ndarray, float], np.ndarray]


def scaled(factor: Callable[[float], float]) -> Merge:
    return lambda weight, product, scale: weight + factor(scale) * product


MISTAKES: dict[str, Merge] = {
    "not merged": scaled(lambda scale: 0.0),
    "merged twice": scaled(lambda scale: 2 * scale),
    "merged with the wrong sign": scaled(lambda scale: -scale),
    "merged without its scale": scaled(lambda scale: 1.0),
    "merged with its scale twice": scaled(lambda scale: scale**2),
    "merged with alpha instead of alpha": scaled(lambda scale: ALPHA),
    "merged with 0.3 times its scale": scaled(lambda scale: 0.3 * scale),
    "merged with its product transposed": lambda weight, product, scale: (
        weight + scale * (product.T if product.shape[0] == product.shape[1] else product)
    ),
}
SCALE_ERRORS = {
    False: ("merged with alpha / √rank (rank-stabilized) instead of alpha / rank", STABILIZED),
    True: ("merged with alpha / rank instead of alpha / √rank (rank-stabilized)", SCALE),
}


def llama() -> tuple[dict[str, np.ndarray], dict]:
    model = small.llama(layers=2, width=WIDTH, key_heads=4, sides="qkvo")
    random = np.random.default_rng(2)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        model._arrays[name] = random.standard_normal((40, WIDTH))
    return model._arrays, model.config


def gpt2() -> tuple[dict[str, np.ndarray], dict]:
    """Weights are stored (in, out), and queries, keys and values are one tensor."""
    random = np.random.default_rng(2)
    tensors = {}
    for layer in range(2):
        path = f"h.{layer}"
        tensors[f"{path}.attn.c_attn.weight"] = random.standard_normal((WIDTH, 3 * WIDTH))
        tensors[f"{path}.attn.c_attn.bias"] = random.standard_normal(3 * WIDTH)
        tensors[f"{path}.attn.c_proj.weight"] = random.standard_normal((WIDTH, WIDTH))
        tensors[f"{path}.attn.c_proj.bias"] = random.standard_normal(WIDTH)
        tensors[f"{path}.mlp.c_fc.weight"] = random.standard_normal((WIDTH, 40))
    return tensors, {"model_type": "gpt2", "n_embd": WIDTH, "n_head": 4, "n_layer": 2}


MODELS = {"llama": llama, "gpt2": gpt2}
ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "c_attn", "c_proj", "c_fc")


def written(
    folder: Path, model: str, merge: Merge, stabilized: bool = False, where: str = ""
) -> tuple[Path, Path]:
    """An adapter on a tiny model, and a merged model; ``where`` is in the names of wrong merges."""
    tensors, config = MODELS[model]()
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    random = np.random.default_rng(3)
    factors, merged = {}, dict(tensors)
    scale = STABILIZED if stabilized else SCALE
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if not module.endswith(ADAPTED):
            continue
        stored_in_out = model == "gpt2"
        rows, columns = value.T.shape if stored_in_out else value.shape
        down = random.standard_normal((RANK, columns)).astype(np.float32)
        up = 0.1 * random.standard_normal((rows, RANK)).astype(np.float32)
        prefix = "transformer." if model == "gpt2" else ""
        factors[f"{prefix}{module}.lora_A.weight"] = down
        factors[f"{prefix}{module}.lora_B.weight"] = up
        product = (up @ down).T if stored_in_out else up @ down
        used = merge if where in name else scaled(lambda scale: scale)
        merged[name] = used(value, product, scale).astype(np.float32)
    about = {"r": RANK, "lora_alpha": ALPHA, "use_rslora": stabilized}
    base = small.save(folder / "base", tensors, config)
    adapter = small.adapter(folder / "adapter", base, factors, **about)
    return adapter, small.save(folder / "merged", merged, config)


def require_repaired(adapter: Path, merged: Path, folder: Path, mistake: str) -> str:
    """Require that a wrong merge is named and repaired; return the printed repair."""
    comparison = wqk.same(adapter, merged, everything=True, repair=folder)
    assert comparison.same is False
    assert comparison.unexplained == ()
    for cause in comparison.causes:
        assert cause.mismatch.verdict is Kind.ADAPTER
        assert mistake in cause.mismatch.reason
    assert comparison.repaired is not None
    assert comparison.repaired.verdict is Verdict.SAME
    assert comparison.repaired.supplied == ()
    assert "reference[" not in comparison.repair
    assert "# adapter:" in comparison.commented_repair
    return comparison.repair


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_merge_is_named_and_undone(mistake: str, model: str, tmp_path: Path) -> None:
    where = ""
    if "transposed" in mistake:
        where = "c_proj" if model == "gpt2" else "q_proj"
    adapter, merged = written(tmp_path, model, MISTAKES[mistake], where=where)
    repair = require_repaired(adapter, merged, tmp_path / "fixed", mistake)
    assert "adapter[name]" in repair


@pytest.mark.parametrize("model", MODELS)
def test_one_mistake_within_attention_and_elsewhere_is_one_line(model: str, tmp_path: Path) -> None:
    adapter, merged = written(tmp_path, model, MISTAKES["not merged"])
    comparison = wqk.same(adapter, merged, everything=True)
    (cause,) = comparison.causes
    other = {"llama": "up_proj", "gpt2": "c_fc"}[model]
    assert cause.where == f"decoder self, layers 0-1; {other}, layers 0-1"
    described = cause.to_dict()
    assert [block["layer"] for block in described["blocks"]] == [0, 1]
    assert len(described["outside"]) == 2
    assert {name for name in described["tensors"] if other in name} == set(described["outside"])
    assert described["repair"] == comparison.repair
    lines = [str(line) for line in comparison._shown(100)]
    assert sum(line.startswith("•") for line in lines) == 1


def test_two_mistakes_of_one_adapter_are_two_lines(tmp_path: Path) -> None:
    adapter, merged = written(tmp_path, "llama", MISTAKES["not merged"], where="up_proj")
    _, wrong = written(tmp_path / "other", "llama", MISTAKES["merged with the wrong sign"])
    tensors = load_file(merged / "model.safetensors")
    wrong_tensors = load_file(wrong / "model.safetensors")
    mixed = {
        name: (value if "up_proj" in name else wrong_tensors[name]).numpy()
        for name, value in tensors.items()
    }
    candidate = small.save(tmp_path / "mixed", mixed, MODELS["llama"]()[1])
    causes = wqk.same(adapter, candidate, everything=True).causes
    assert [bool(cause.places) for cause in causes] == [True, False]


@pytest.mark.parametrize("stabilized", [False, True])
def test_the_other_formula_of_the_scale_is_named(stabilized: bool, tmp_path: Path) -> None:
    mistake, scale = SCALE_ERRORS[stabilized]
    adapter, merged = written(tmp_path, "llama", scaled(lambda _: scale), stabilized)
    require_repaired(adapter, merged, tmp_path / "fixed", mistake)


def test_the_printed_repair_runs_in_pytorch(tmp_path: Path) -> None:
    adapter, merged = written(tmp_path, "llama", MISTAKES["not merged"])
    repair = wqk.same(adapter, merged, everything=True).repair
    tensors = load_file(merged / "model.safetensors")
    stored = load_file(adapter / "adapter_model.safetensors")
    factors = {}
    for name in tensors:
        module = name.removesuffix(".weight")
        if f"base_model.model.{module}.lora_A.weight" in stored:
            factors[name] = tuple(
                stored[f"base_model.model.{module}.lora_{side}.weight"] for side in "AB"
            )
    exec(repair, {"torch": torch, "tensors": tensors, "adapter": factors})
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    fixed = small.save(tmp_path / "fixed", arrays, llama()[1])
    assert wqk.same(adapter, fixed, everything=True).same


def test_an_adapter_as_the_candidate_is_explained_and_not_written(tmp_path: Path) -> None:
    adapter, merged = written(tmp_path, "llama", MISTAKES["merged twice"])
    comparison = wqk.same(merged, adapter)
    assert "merged twice" in comparison.reason
    assert "w = w + 6 * (b @ a)" in comparison.repair
    with pytest.raises(CheckpointError, match="exchange the two models"):
        wqk.same(merged, adapter, repair=tmp_path / "fixed")


def test_a_part_of_a_fused_weight_takes_its_rows_of_the_factor() -> None:
    random = np.random.default_rng(0)
    down, up = random.standard_normal((RANK, 6)), random.standard_normal((12, RANK))
    weight = random.standard_normal((12, 6))
    rows = Stretches(4, 2, 4, 2)
    edit = Within(0, rows, LowRank(down, up, -1.5, rows=rows))
    expected = weight.copy()
    expected[rows.indices] -= 1.5 * (up @ down)[rows.indices]
    np.testing.assert_allclose(edit.apply(weight), expected)
    tensors = ProgramTensors({"a": weight})
    adapter = {"a": (Tensor(down), Tensor(up))}
    run(Change(("a",), edit).code(), tensors, {}, adapter=adapter)
    np.testing.assert_allclose(tensors.changed["a"], expected)
    transposed = ProgramTensors({"a": weight.T})
    code = Change(("a",), edit.for_transposed()).code()
    run(code, transposed, {}, adapter=adapter)
    np.testing.assert_allclose(transposed.changed["a"], expected.T)
