"""Matrices as the libraries of quantization store them, next to what they make of them again.

``python -m tools.quantizing FILE`` writes the data of the tests: each case has the tensors of one
module ``a``, what the library itself dequantizes them to (``values``), and the configuration that
stands next to them. Needs what no test does: autoawq, bitsandbytes, compressed-tensors, gptqmodel,
hqq, mlx, torchao, transformers.

Axes: O outputs, I inputs, G groups of columns.
"""

from __future__ import annotations

import gzip
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

O, I, GROUP = 32, 64, 32  # noqa: E741
Case = tuple[str, dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]


def gptq(weight: torch.Tensor) -> Iterator[Case]:
    """Rounded to the nearest, as GPTQModel's own module stores it."""
    O, I = weight.shape  # noqa: E741
    for bits, ordered in ((2, True), (3, False), (3, True), (4, False), (4, True), (8, True)):
        group_of = torch.arange(I) // GROUP
        group_of = group_of[torch.randperm(I)] if ordered else group_of
        scales, zeros = torch.zeros(O, I // GROUP), torch.zeros(O, I // GROUP)
        for group in range(I // GROUP):
            group_weight = weight[:, group_of == group]
            low, high = group_weight.amin(1).clamp(max=0), group_weight.amax(1).clamp(min=0)
            scales[:, group] = ((high - low) / (2**bits - 1)).half().float()
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, 2**bits - 1)
        each, shift = scales[:, group_of], zeros[:, group_of]
        rounded = ((weight / each + shift).round().clamp(0, 2**bits - 1) - shift) * each
        for version, *stored in gptq_stored(rounded, scales, zeros, group_of, bits, ordered):
            yield f"{version}-{bits}{'-ordered' * ordered}", *stored


def gptq_stored(
    rounded: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    group_of: torch.Tensor,
    bits: int,
    ordered: bool,
) -> Iterator[Case]:
    """GPTQModel's own module packs and dequantizes; its first version by its own conversion."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

    O, I = rounded.shape  # noqa: E741
    linear = torch.nn.Linear(I, O, bias=False)
    linear.weight.data = rounded
    module = TorchLinear(
        bits=bits,
        group_size=GROUP,
        sym=False,
        desc_act=ordered,
        in_features=I,
        out_features=O,
        bias=False,
        register_buffers=True,
    )
    module.pack(linear, scales, zeros, group_of.to(torch.int32))
    module.post_init()
    module.scales, module.dequant_dtype = module.scales.float(), torch.int32
    values = module.dequantize_weight().T
    for version in ("gptq_v2", "gptq"):
        if version == "gptq":
            about = types.SimpleNamespace(bits=bits, pack_dtype=torch.int32)
            convert_gptq_v2_to_v1_format_module(module, about)
        names = ("qweight", "qzeros", "scales", "g_idx")
        tensors = {name: getattr(module, name).clone() for name in names}
        settings = {"quant_method": "gptq", "checkpoint_format": version, "bits": bits}
        yield version, tensors, values, {"quantization_config": settings}


def awq(weight: torch.Tensor) -> Iterator[Case]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    O, I = weight.shape  # noqa: E741
    grouped = weight.reshape(O, -1, GROUP)
    scales = (grouped.amax(-1) - grouped.amin(-1)) / 15
    zeros = (-grouped.amin(-1) / scales).round().clamp(0, 15)
    # As its quantizer rounds; packing expects codes of 4 bits.
    codes = ((grouped / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
    linear = torch.nn.Linear(I, O, bias=False)
    linear.weight.data = ((codes - zeros[..., None]) * scales[..., None]).reshape(O, I)
    module = WQLinear_GEMM.from_linear(
        linear.half(), 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous()
    )
    values = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), 4, GROUP).T
    settings = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": GROUP}
    yield "awq", dict(module.state_dict()), values, {"quantization_config": settings}


def compressed_tensors(weight: torch.Tensor) -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    def case(kind: str, scales: torch.Tensor, **quantization: Any) -> Case:
        arguments = QuantizationArgs(**quantization)
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        compressor = BaseCompressor.get_value_from_registry(kind)
        tensors = {"weight": weight.clone(), "weight_scale": scales}
        if not arguments.symmetric:
            half = 2 ** (arguments.num_bits - 1)
            tensors["weight_zero_point"] = torch.randint(-half, half, scales.shape).to(torch.int8)
        if kind.startswith("nvfp4"):
            tensors["weight_global_scale"] = torch.tensor([30.0])
        tensors = compressor.compress(tensors, scheme)
        values = compressor.decompress({k: v.clone() for k, v in tensors.items()}, scheme)
        weights = json.loads(arguments.model_dump_json())
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        settings = {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups}
        name = "-".join(map(str, (kind, arguments.num_bits, arguments.strategy)))
        name += "" if arguments.symmetric else "-zeros"
        return name, tensors, values["weight"], {"quantization_config": settings}

    O, I = weight.shape  # noqa: E741
    grouped = weight.reshape(O, -1, GROUP).abs().amax(-1)
    for bits in (2, 3, 4, 8):
        for symmetric in (True, False):
            yield case(
                "pack-quantized",
                grouped / (2 ** (bits - 1) - 0.5),
                num_bits=bits,
                type="int",
                symmetric=symmetric,
                strategy="group",
                group_size=GROUP,
            )
    rows = weight.abs().amax(1, keepdim=True)
    yield case(
        "pack-quantized", rows / 7.5, num_bits=4, type="int", symmetric=True, strategy="channel"
    )
    for symmetric in (True, False):
        yield case(
            "int-quantized",
            rows / 127,
            num_bits=8,
            type="int",
            symmetric=symmetric,
            strategy="channel",
        )
    for strategy, scales, options in (
        ("channel", rows / 448, {}),
        ("tensor", rows.max().reshape(1) / 448, {}),
        ("block", torch.rand(O // 16, I // 16) / 50, {"block_structure": [16, 16]}),
        ("group", grouped / 448, {"group_size": GROUP}),
    ):
        yield case(
            "float-quantized",
            scales,
            num_bits=8,
            type="float",
            symmetric=True,
            strategy=strategy,
            **options,
        )
    small = weight.reshape(O, -1, 16).abs().amax(-1) / 6
    yield case(
        "nvfp4-pack-quantized",
        (30 * small).to(torch.float8_e4m3fn).float(),
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="tensor_group",
        group_size=16,
    )
    yield case(
        "mxfp4-pack-quantized",
        torch.exp2((grouped / 6).log2().ceil()),
        num_bits=4,
        type="float",
        symmetric=True,
        strategy="group",
        group_size=32,
    )


def bitsandbytes(weight: torch.Tensor) -> Iterator[Case]:
    import bitsandbytes.functional as functional

    about = {"quantization_config": {"quant_method": "bitsandbytes"}}
    for kind in ("nf4", "fp4"):
        for nested in (False, True):
            codes, state = functional.quantize_4bit(
                weight.clone(), quant_type=kind, compress_statistics=nested, blocksize=64
            )
            tensors = {f"weight.{k}": v for k, v in state.as_dict(packed=True).items()}
            values = functional.dequantize_4bit(codes, state)
            yield f"{kind}{'-nested' * nested}", {"weight": codes} | tensors, values, about
    codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
    tensors = {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    yield "int8", tensors, functional.int8_vectorwise_dequant(codes, scales), about


def mlx(weight: torch.Tensor) -> Iterator[Case]:
    import mlx.core as mx

    for bits in (2, 3, 4, 6, 8):
        stored = mx.quantize(mx.array(weight.numpy()), group_size=GROUP, bits=bits)
        values = torch.tensor(np.array(mx.dequantize(*stored, group_size=GROUP, bits=bits)))
        names = ("weight", "scales", "biases")
        tensors = {
            name: torch.tensor(np.array(array)) for name, array in zip(names, stored, strict=True)
        }
        yield f"mlx-{bits}", tensors, values, {"quantization": {"group_size": GROUP, "bits": bits}}


def torchao(weight: torch.Tensor) -> Iterator[Case]:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        quantize_,
    )
    from torchao.quantization.granularity import PerGroup

    for name, settings in (
        ("int8", Int8WeightOnlyConfig(version=2)),
        ("float8", Float8WeightOnlyConfig(version=2)),
        ("int4", IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP))),
    ):
        model = torch.nn.Module()
        model.a = torch.nn.Linear(*weight.shape[::-1], bias=False)
        model.a.weight.data = weight.clone()
        quantize_(model, settings)
        flat, _ = flatten_tensor_state_dict({"a.weight": model.a.weight})
        tensors = {key.removeprefix("a."): value for key, value in flat.items()}
        about = {"quantization_config": {"quant_method": "torchao"}}
        yield f"torchao-{name}", tensors, model.a.weight.dequantize(), about


def gpt_oss(weight: torch.Tensor) -> Iterator[Case]:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, O, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 135, (2, O, 2), dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    tensors = {"weight_blocks": blocks, "weight_scales": scales}
    yield "gpt-oss", tensors, values, {"quantization_config": {"quant_method": "mxfp4"}}


def hqq(weight: torch.Tensor) -> Iterator[Case]:
    """Its own quantizer, with and without its search, and its own encoding as tensors."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    about = {"quantization_config": {"quant_method": "hqq"}}
    for bits, axis, group in (
        (8, 1, GROUP),
        (6, 1, GROUP),
        (4, 1, GROUP),
        (4, 0, GROUP),
        (3, 1, GROUP),
        (3, 0, GROUP),
        (2, 1, 16),
        (1.58, 1, GROUP),
        (1, 0, GROUP),
        (4, 1, None),
    ):
        settings = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
        linear = torch.nn.Linear(*weight.T.shape, bias=False)
        linear.weight.data = weight.clone()
        module = HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
        name = f"hqq-{bits}-axis{axis}" + "-whole" * (group is None)
        yield name, dict(module.state_dict()), module.dequantize(), about


LIBRARIES = (gptq, awq, compressed_tensors, bitsandbytes, mlx, torchao, gpt_oss, hqq)


def main(path: str) -> None:
    """Write all cases into one file."""
    torch.manual_seed(0)
    weight = torch.randn(O, I)
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, str] = {}
    for library in LIBRARIES:
        for name, stored, values, config in library(weight):
            configs[name] = json.dumps(config)
            kept = stored | {"values": values.float()}
            tensors |= {f"{name}/{key}": value.contiguous() for key, value in kept.items()}
    Path(path).write_bytes(gzip.compress(save(tensors, configs), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
