"""Quantized weights in float64, written from the libraries' formulas and not from our readers.

Each function takes the tensors of one module, by the ends of their names, and the keys of the
quantization configuration, and returns the weight. `CASES` has one module of every way in which a
format stores a weight.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import torch as safetensors

Tensors = dict[str, torch.Tensor]

FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def wide(tensor: torch.Tensor) -> np.ndarray:
    """Values in float64."""
    return tensor.to(torch.float64).numpy()


def codes_of(stored: torch.Tensor, bits: int) -> np.ndarray:
    """Codes in the words of each row, the lowest bits first."""
    raw = np.ascontiguousarray(stored.numpy()).view(np.uint8)
    single = np.unpackbits(raw, axis=1, bitorder="little").astype(np.int64)
    count = single.shape[1] // bits
    fields = single[:, : count * bits].reshape(len(raw), count, bits)
    return (fields << np.arange(bits)).sum(-1)


def of_rows(scales: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """One scale for each row, or for all, of a weight of any number of axes."""
    return wide(scales).reshape(-1, *[1] * (weight.ndim - 1))


def spread(scales: np.ndarray, columns: int, size: int | None = None) -> np.ndarray:
    """Scales of groups of columns, repeated for each column."""
    size = size or columns // scales.shape[1]
    return scales[:, np.arange(columns) // size]


def gptq(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    outputs = tensors["scales"].shape[1]
    bits = 32 * tensors["qzeros"].shape[1] // outputs
    codes = codes_of(tensors["qweight"].T.contiguous(), bits)
    stored_zeros = tensors["qzeros"].numpy().view(np.uint32)
    is_second = "gptq_v2" in (
        str(keys.get(name)).lower() for name in ("checkpoint_format", "format", "version")
    )
    if is_second or bits == 3:
        zeros = codes_of(torch.tensor(stored_zeros.view(np.int32)), bits)
        zeros = zeros if is_second else (zeros + 1) % 8
    else:
        ones_in_all_fields = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        zeros = codes_of(torch.tensor((stored_zeros + ones_in_all_fields).view(np.int32)), bits)
    size = keys.get("group_size") or codes.shape[1] // len(zeros)
    size = codes.shape[1] if size == -1 else size
    group_of = np.arange(codes.shape[1]) // size
    if "g_idx" in tensors:
        group_of = tensors["g_idx"].numpy()
    return (codes - zeros.T[:, group_of]) * wide(tensors["scales"]).T[:, group_of]


def awq(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])

    def unpack(packed_codes: torch.Tensor) -> np.ndarray:
        return (
            codes_of(packed_codes, 4)
            .reshape(len(packed_codes), -1, 8)[..., order]
            .reshape(len(packed_codes), -1)
        )

    size = len(tensors["qweight"]) // len(tensors["scales"])
    group_of = np.arange(len(tensors["qweight"])) // size
    codes, zeros = unpack(tensors["qweight"]), unpack(tensors["qzeros"])
    return ((codes - zeros[group_of]) * wide(tensors["scales"])[group_of]).T


def scheme(keys: dict[str, Any]) -> dict[str, Any]:
    (group,) = keys["config_groups"].values()
    return group["weights"]


def by_columns(tensors: Tensors, scales: np.ndarray, columns: int) -> np.ndarray:
    """Scales of each column, in the order of groups that is stored, if one is."""
    order = tensors.get("weight_g_idx")
    if order is None or (order == -1).any():
        return spread(scales, columns)
    return scales[:, order.numpy()]


def packed(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    bits = scheme(keys)["num_bits"]
    codes = codes_of(tensors["weight_packed"], bits) - 2 ** (bits - 1)
    scales = wide(tensors["weight_scale"]).reshape(len(tensors["weight_scale"]), -1)
    if "weight_zero_point" in tensors:
        packed_zeros = tensors["weight_zero_point"].T.contiguous()
        zeros = codes_of(packed_zeros, bits)[:, : len(codes)].T - 2 ** (bits - 1)
        codes = codes - by_columns(tensors, zeros, codes.shape[1])
    return codes * by_columns(tensors, scales, codes.shape[1])


def integers(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    codes = wide(tensors["weight"])
    if "weight_zero_point" in tensors:
        zeros = wide(tensors["weight_zero_point"]).reshape(len(tensors["weight_zero_point"]), -1)
        codes = codes - by_columns(tensors, zeros, codes.shape[1])
    scales = wide(tensors["weight_scale"]).reshape(len(tensors["weight_scale"]), -1)
    return codes * by_columns(tensors, scales, codes.shape[1])


def float8(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    codes = wide(tensors["weight"])
    (ending,) = (key for key in tensors if key.startswith("weight_scale"))
    stored = tensors[ending]
    scales = wide(stored) if stored.dtype.is_floating_point else 2.0 ** (wide(stored) - 127)
    if scales.size == 1:
        return codes * scales.reshape(())
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
    sides = keys.get("weight_block_size")
    if "config_groups" in keys and scheme(keys).get("block_structure"):
        sides = scheme(keys)["block_structure"]
    if sides is None:
        sides = [n // blocks for n, blocks in zip(codes.shape, scales.shape, strict=True)]
    rows, columns = (np.arange(n) // side for n, side in zip(codes.shape, sides, strict=True))
    return codes * scales[rows % len(scales)][:, columns]


def pairs(stored: torch.Tensor) -> np.ndarray:
    """4-bit floats, the low half of a byte first."""
    codes = stored.numpy()
    halves = np.stack([codes & 15, codes >> 4], axis=-1)
    return FLOAT4[halves].reshape(*codes.shape[:-1], -1)


def nvfp4(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    values = pairs(tensors["weight_packed"])
    scales = wide(tensors["weight_scale"]) / wide(tensors["weight_global_scale"])
    return values * spread(scales, values.shape[1])


def mxfp4(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    values = pairs(tensors["weight_packed"])
    return values * spread(2.0 ** (wide(tensors["weight_scale"]) - 127), values.shape[1])


def modelopt(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    weight = tensors["weight"]
    if weight.dtype == torch.uint8:
        values = pairs(weight)
        scales = wide(tensors["weight_scale"]) * wide(tensors["weight_scale_2"])
        values = values * spread(scales, values.shape[1])
    else:
        values = wide(weight) * of_rows(tensors["weight_scale"], weight)
    factors = tensors.get("pre_quant_scale")
    return values if factors is None else values * wide(factors)


def comfy(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    described = tensors.get("comfy_quant")
    about = {} if described is None else json.loads(described.numpy().tobytes())
    values = wide(tensors["weight"]) * of_rows(tensors["weight_scale"], tensors["weight"])
    if about.get("convrot"):
        size = about.get("convrot_groupsize", 256)
        four = np.ones((4, 4)) - 2 * np.fliplr(np.eye(4))
        turn = np.ones((1, 1))
        while len(turn) < size:
            turn = np.kron(turn, four / 2)
        values = (values.reshape(len(values), -1, size) @ turn.T).reshape(values.shape)
    factors = tensors.get("pre_quant_scale")
    return values if factors is None else values * wide(factors)


def four_bits(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    (name,) = (key for key in tensors if "quant_state" in key)
    about = json.loads(tensors[name].numpy().tobytes())
    flat = tensors["weight"].numpy().reshape(-1)
    codes = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)
    scales = wide(tensors["weight.absmax"])
    if "weight.nested_absmax" in tensors:
        inner = wide(tensors["weight.nested_quant_map"])[tensors["weight.absmax"].numpy()]
        outer = np.repeat(wide(tensors["weight.nested_absmax"]), about["nested_blocksize"])
        scales = inner * outer[: len(inner)] + about["nested_offset"]
    scale_of_codes = np.repeat(scales, about["blocksize"])[: len(codes)]
    return (wide(tensors["weight.quant_map"])[codes] * scale_of_codes).reshape(about["shape"])


def int8(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    return wide(tensors["weight"]) * of_rows(tensors["SCB"], tensors["weight"]) / 127


def torchao(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    codes, scales = wide(tensors["_weight_qdata"]), wide(tensors["_weight_scale"])
    scales = scales.reshape(len(scales), -1)
    if "_weight_zero_point" in tensors:
        zeros = wide(tensors["_weight_zero_point"]).reshape(scales.shape)
        codes = codes - spread(zeros, codes.shape[1])
    values = codes * spread(scales, codes.shape[1])
    factors = tensors.get("_weight_act_pre_scale")
    return values if factors is None else values * wide(factors)


def hqq(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    packing = tensors["packing"].numpy().astype(np.uint8).tobytes().decode()
    bits, count = {"8bit_u8": (8, 1), "4bit_u8": (4, 2), "3bit_32": (3, 10), "2bit_u8": (2, 4)}.get(
        packing, (1, 8)
    )
    outputs, inputs = tensors["shape"].tolist()
    packed_codes = tensors["W_q"].numpy().astype(np.int64)
    shifts = bits * np.arange(count - 1, -1, -1)
    codes = np.concatenate([(packed_codes >> shift) & (2**bits - 1) for shift in shifts])
    codes = codes[: outputs * inputs // packed_codes.shape[1]]
    values = (codes - wide(tensors["zero"])) * wide(tensors["scale"])
    return values.reshape(outputs, inputs)


def mlx(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    bits = keys.get("bits")
    if bits is None:
        bits = 32 * tensors["weight"].shape[1] // (tensors["scales"].shape[1] * keys["group_size"])
    codes = codes_of(tensors["weight"], bits)
    if (keys.get("mode") or "affine") == "affine":
        scales = spread(wide(tensors["scales"]), codes.shape[1])
        return codes * scales + spread(wide(tensors["biases"]), codes.shape[1])
    eight = wide(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn))
    stored = tensors["scales"].numpy()
    scales = eight[stored] if keys["mode"] == "nvfp4" else 2.0 ** (stored.astype(float) - 127)
    values = FLOAT4[codes] if bits == 4 else eight[codes]
    return values * spread(scales, codes.shape[1])


def experts(tensors: Tensors, keys: dict[str, Any]) -> np.ndarray:
    values = pairs(tensors["weight_blocks"])
    values = values * 2.0 ** (wide(tensors["weight_scales"]) - 127)[..., None]
    count, outputs, *_ = values.shape
    return values.reshape(count, outputs, -1).swapaxes(1, 2)


@dataclass(frozen=True)
class Case:
    """A module: its tensors, the configuration, and its weight in float64.

    ``separator`` stands between the module's name and the ends of its tensors' names.
    """

    tensors: Tensors
    config: dict[str, Any]
    weight: Callable[[Tensors, dict[str, Any]], np.ndarray]
    path: str = "quantization_config"

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of the quantization configuration."""
        return self.config.get(self.path, {})


# Written by tools/quantizing.py, which asks the libraries themselves: autoawq 0.2.9, bitsandbytes
# 0.50.2, compressed-tensors 0.20.0, gptqmodel 7.7.0,
# hqq 0.2.8, mlx 0.32.4, torchao 0.18.0, transformers 5.23.
STORED = gzip.decompress(Path(__file__).with_name("quantized.safetensors.gz").read_bytes())
CONFIGS = json.loads(STORED[8 : 8 + int.from_bytes(STORED[:8], "little")])["__metadata__"]


def written(name: str, weight: Callable[[Tensors, dict[str, Any]], np.ndarray]) -> Case:
    """A case that a library wrote."""
    stored = safetensors.load(STORED)
    tensors = {
        name_in_file.removeprefix(f"{name}/"): tensor
        for name_in_file, tensor in stored.items()
        if name_in_file.startswith(f"{name}/")
    }
    del tensors["values"]
    config = json.loads(CONFIGS[name])
    path = "quantization" if "quantization" in config else "quantization_config"
    return Case(tensors, config, weight, path)


def made() -> dict[str, Case]:
    """Cases of formats whose libraries need a GPU or are no part of the stored ones."""
    dice = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (32, 32), dtype=torch.uint8, generator=dice)
    scales = (torch.rand((32, 4), generator=dice) + 0.5).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 130, (32, 2), dtype=torch.uint8, generator=dice)
    integers_of_weight = torch.randint(-127, 128, (32, 64), generator=dice).to(torch.int8)
    rows = torch.rand((32, 1), generator=dice) + 0.5
    floats = torch.randn((32, 64), generator=dice).to(torch.float8_e4m3fn)
    factors = torch.rand(64, generator=dice) + 0.5
    packed_codes = codes.view(torch.uint32)
    # Without the two codes that are NaN.
    eight = (codes.repeat(1, 2) & 0xF7).contiguous().view(torch.uint32)
    algorithms = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}

    def about(**values: Any) -> torch.Tensor:
        return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)

    def float_mode(mode: str, bits: int, size: int, stored: Tensors) -> Case:
        keys = {"mode": mode, "bits": bits, "group_size": size}
        return Case(stored, {"quantization": keys}, mlx, "quantization")

    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": torch.tensor(0.02)}
    ordered = {"weight": integers_of_weight, "weight_scale": rows * torch.ones(32, 4)}
    ordered["weight_g_idx"] = (torch.randperm(64, generator=dice) // 16).int()
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16}
    sorted_keys = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    return {
        "modelopt-nvfp4": Case(tensors, {"quantization_config": algorithms}, modelopt),
        "modelopt-nvfp4-awq": Case(
            tensors | {"pre_quant_scale": factors},
            {"quantization_config": algorithms | {"quant_algo": "NVFP4_AWQ"}},
            modelopt,
        ),
        "modelopt-fp8": Case(
            {"weight": floats, "weight_scale": torch.tensor(0.5)},
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
            modelopt,
        ),
        "modelopt-int8": Case(
            {"weight": integers_of_weight, "weight_scale": rows[:, 0]},
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "W8A16"}},
            modelopt,
        ),
        "fp8": Case(
            {"weight": floats, "weight_scale_inv": torch.rand((2, 4), generator=dice)},
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}},
            float8,
        ),
        "fbgemm-fp8": Case(
            {"weight": floats, "weight_scale": rows},
            {"quantization_config": {"quant_method": "fbgemm_fp8"}},
            float8,
        ),
        "int-quantized-8-group-ordered": Case(
            ordered, {"quantization_config": sorted_keys}, integers
        ),
        "comfy-fp8": Case(
            {
                "weight": floats,
                "weight_scale": torch.tensor(0.5),
                "comfy_quant": about(format="float8_e4m3fn"),
            },
            {},
            comfy,
        ),
        "comfy-int8": Case(
            {
                "weight": integers_of_weight,
                "weight_scale": rows,
                "comfy_quant": about(format="int8_tensorwise"),
                "pre_quant_scale": factors,
            },
            {},
            comfy,
        ),
        "comfy-rotated": Case(
            {
                "weight": integers_of_weight,
                "weight_scale": rows,
                "comfy_quant": about(format="int8_tensorwise", convrot=True, convrot_groupsize=16),
            },
            {},
            comfy,
        ),
        "mlx-mxfp4": float_mode("mxfp4", 4, 32, {"weight": packed_codes, "scales": exponents}),
        "mlx-nvfp4": float_mode(
            "nvfp4", 4, 16, {"weight": packed_codes, "scales": scales.view(torch.uint8)}
        ),
        "mlx-mxfp8": float_mode("mxfp8", 8, 32, {"weight": eight, "scales": exponents}),
    }


WEIGHTS: dict[str, Callable[[Tensors, dict[str, Any]], np.ndarray]] = {
    "gptq-3": gptq,
    "gptq-4-ordered": gptq,
    "gptq_v2-4": gptq,
    "awq": awq,
    "pack-quantized-4-group": packed,
    "pack-quantized-3-group-zeros": packed,
    "pack-quantized-4-channel": packed,
    "int-quantized-8-channel": integers,
    "int-quantized-8-channel-zeros": integers,
    "float-quantized-8-channel": float8,
    "float-quantized-8-tensor": float8,
    "float-quantized-8-block": float8,
    "float-quantized-8-group": float8,
    "nvfp4-pack-quantized-4-tensor_group": nvfp4,
    "mxfp4-pack-quantized-4-group": mxfp4,
    "nf4": four_bits,
    "fp4-nested": four_bits,
    "int8": int8,
    "torchao-int8": torchao,
    "torchao-float8": torchao,
    "torchao-int4": torchao,
    "hqq-4-axis1": hqq,
    "hqq-3-axis0": hqq,
    "mlx-4": mlx,
    "gpt-oss": experts,
}
CASES = {name: written(name, weight) for name, weight in WEIGHTS.items()} | made()
