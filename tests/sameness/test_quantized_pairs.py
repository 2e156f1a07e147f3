"""Quantized weights next to exact ones: of the true original, of others, and with an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import small

import wqk
from wqk.sameness.mismatches import Kind
from wqk.sameness.verdicts import Verdict

SIZES = {"width": 128, "head_width": 32, "heads": 4, "key_heads": 2, "layers": 2}
BLOCK = 64
# Distances of neighboring levels of NF4, downwards from -1 to 1.
STEPS = [0.3038, 0.1711, 0.1302, 0.1105, 0.1, 0.0933, 0.0911, 0.0796, 0.0813, 0.0852, 0.0918]
STEPS += [0.1028, 0.1219, 0.1604, 0.277]
LEVELS = (np.cumsum([0.0, *STEPS]) - 1).astype(np.float32)
Tensors = dict[str, np.ndarray]


def original() -> Tensors:
    """A model with feed-forward weights, of the usual size."""
    tensors = {
        name: (0.05 * value).astype(np.float32)
        for name, value in small.llama(sides="qkvo", **SIZES)._arrays.items()
    }
    random = np.random.default_rng(5)
    for layer in range(SIZES["layers"]):
        up = 0.05 * random.standard_normal((192, SIZES["width"]))
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = up.astype(np.float32)
    return tensors


def changed(tensors: Tensors, share: float) -> Tensors:
    """The tensors after training that changed them by a share of their size."""
    random = np.random.default_rng(7)
    return {
        name: value + share * value.std() * random.standard_normal(value.shape).astype(np.float32)
        for name, value in tensors.items()
    }


def in_four_bits(tensors: Tensors, scale: float = 1.0) -> Tensors:
    """The tensors as bitsandbytes stores them in NF4."""
    stored: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        blocks = value.reshape(-1, BLOCK)
        scales = np.abs(blocks).max(axis=1)
        codes = np.abs(blocks[..., None] / scales[:, None, None] - LEVELS).argmin(axis=-1)
        pairs = codes.astype(np.uint8).reshape(-1, 2)
        state = {"shape": list(value.shape), "blocksize": BLOCK, "quant_type": "nf4"}
        stored[name] = (pairs[:, 0] << 4 | pairs[:, 1])[:, None]
        stored[f"{name}.absmax"] = scale * scales
        stored[f"{name}.quant_map"] = LEVELS
        about = np.frombuffer(json.dumps(state).encode(), np.uint8)
        stored[f"{name}.quant_state.bitsandbytes__nf4"] = about
    return stored


def dequantized(stored: Tensors) -> Tensors:
    """The numbers that codes stand for."""
    values = {}
    for name in (name for name in stored if name.endswith(".weight")):
        codes = np.stack([stored[name][:, 0] >> 4, stored[name][:, 0] & 15], axis=1)
        blocks = LEVELS[codes.reshape(-1, BLOCK)] * stored[f"{name}.absmax"][:, None]
        about = json.loads(stored[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())
        values[name] = blocks.reshape(about["shape"]).astype(np.float32)
    return values


def save(folder: Path, tensors: Tensors) -> Path:
    """A folder with these tensors in their own types."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder.mkdir(parents=True)
    kept = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    for name, value in kept.items():
        if value.dtype == np.float64:
            kept[name] = value.astype(np.float32)
    save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(small.llama(**SIZES).config))
    return folder


def same(reference: Path, candidate: Path) -> Any:
    return wqk.same(reference, candidate, everything=True)


@pytest.mark.parametrize("coded_first", [False, True])
def test_the_true_original_of_a_quantized_file_is_the_same(tmp_path: Path, coded_first: bool):
    exact = save(tmp_path / "exact", original())
    coded = save(tmp_path / "coded", in_four_bits(original()))
    pair = (coded, exact) if coded_first else (exact, coded)
    assert same(*pair).verdict is Verdict.SAME


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1])
@pytest.mark.parametrize("coded_first", [False, True])
def test_other_weights_than_those_quantized_are_not_rounding(tmp_path, share, coded_first):
    tuned = save(tmp_path / "tuned", changed(original(), share))
    coded = save(tmp_path / "coded", in_four_bits(original()))
    pair = (coded, tuned) if coded_first else (tuned, coded)
    answer = same(*pair)
    assert answer.verdict is Verdict.DIFFERENT
    assert {cause.mismatch.verdict for cause in answer.causes} == {Kind.QUANTIZED}
    assert "lie beyond half a step of their own scale" in answer.sentence
    assert [tensor.outcome.same for tensor in answer.tensors if "up_proj" in tensor.name] == [
        False
    ] * 2


def test_equal_codes_with_other_scales(tmp_path: Path):
    reference = save(tmp_path / "reference", in_four_bits(original()))
    candidate = save(tmp_path / "candidate", in_four_bits(original(), scale=1.02))
    answer = same(reference, candidate)
    assert answer.verdict is Verdict.DIFFERENT
    assert {cause.mismatch.verdict for cause in answer.causes} == {Kind.BLOCK_SCALES}
    assert "equal codes, other scales" in answer.sentence
    assert same(reference, reference).verdict is Verdict.SAME


def test_a_tensor_that_is_paired_by_its_rows_is_compared_under_its_other_name(tmp_path: Path):
    exact = save(tmp_path / "exact", original())
    tuned = in_four_bits(changed(original(), 0.5))
    renamed = {name.replace("mlp.up_proj", "feed_forward.w3"): tuned[name] for name in tuned}
    answer = same(exact, save(tmp_path / "coded", renamed))
    assert answer.verdict is Verdict.DIFFERENT
    names = [(tensor.name, tensor.other) for tensor in answer.unexplained]
    assert ("model.layers.0.mlp.up_proj.weight", "model.layers.0.feed_forward.w3.weight") in names


# -- adapters ----------------------------------------------------------------------------------


def with_adapter(base: Path, folder: Path, size: float) -> tuple[Path, Tensors]:
    """An adapter of queries, keys and feed-forward weights, and its product with each weight."""
    random = np.random.default_rng(3)
    factors, products = {}, {}
    for name, value in original().items():
        if "v_proj" in name or "o_proj" in name:
            continue
        module = name.removesuffix(".weight")
        down = random.standard_normal((4, value.shape[1])).astype(np.float32)
        up = (size * random.standard_normal((value.shape[0], 4))).astype(np.float32)
        factors |= {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}
        products[name] = 2 * up @ down
    return small.adapter(folder, base, factors, r=4, lora_alpha=8), products


def merged(tensors: Tensors, products: Tensors, only: str = "") -> Tensors:
    return {
        name: value + products[name] if only in name and name in products else value
        for name, value in tensors.items()
    }


def test_an_adapter_that_survives_a_merge_into_a_base_of_four_bits(tmp_path: Path):
    base = save(tmp_path / "base", in_four_bits(original()))
    adapter, products = with_adapter(base, tmp_path / "adapter", 0.002)
    right = merged(dequantized(in_four_bits(original())), products)
    answer = same(adapter, save(tmp_path / "merged", right))
    assert answer.verdict is Verdict.SAME
    assert answer.adapter == "Share of the adapter that survived the merge: 1.00 in layers 0-1."


def test_an_adapter_that_was_not_merged_into_a_base_of_four_bits(tmp_path: Path):
    base = save(tmp_path / "base", in_four_bits(original()))
    adapter, _ = with_adapter(base, tmp_path / "adapter", 0.0005)
    answer = same(adapter, base)
    assert answer.verdict is Verdict.DIFFERENT
    assert answer.adapter == "Share of the adapter that survived the merge: 0.00 in layers 0-1."
    assert "2 of 2 blocks differ: the adapter (LoRA) is not merged in q_proj, k_proj" in (
        answer.sentence
    )
    assert "the adapter (LoRA) is not merged in up_proj, layers 0-1" in answer.sentence


def test_an_adapter_that_a_merge_in_four_bits_rounded_away(tmp_path: Path):
    base = save(tmp_path / "base", in_four_bits(original()))
    adapter, products = with_adapter(base, tmp_path / "adapter", 0.0005)
    again = in_four_bits(merged(dequantized(in_four_bits(original())), products))
    answer = same(adapter, save(tmp_path / "merged", again))
    assert answer.verdict is Verdict.DIFFERENT
    reasons = {cause.mismatch.reason for cause in answer.causes}
    assert all("is mostly removed by rounding" in reason for reason in reasons)


def test_an_adapter_that_was_merged_in_attention_alone(tmp_path: Path):
    base = save(tmp_path / "base", original())
    adapter, products = with_adapter(base, tmp_path / "adapter", 0.01)
    wrong = save(tmp_path / "wrong", merged(original(), products, "self_attn"))
    answer = same(adapter, wrong)
    assert answer.verdict is Verdict.DIFFERENT
    assert "the adapter (LoRA) is not merged in up_proj, layers 0-1" in answer.sentence
    assert "0.00 in layers 0-1 (up_proj), 1.00 in layers 0-1 (k_proj, q_proj)" in answer.adapter
    right = save(tmp_path / "right", merged(original(), products))
    assert same(adapter, right).verdict is Verdict.SAME
