"""Weights as compressed-tensors rotates them, next to what its modules make of them.

``python -m tools.rotating FILE`` writes the data of ``tests/checkpoints/test_transforms.py``. Each
case has the tensors of a model of two layers with the modules ``q_proj`` and ``k_proj``, its
transforms as the library writes them, and the matrix and the offset of each module (``effective``),
measured by running the module on the unit vectors. Needs compressed-tensors, which no test does.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.transform import (
    TransformArgs,
    TransformConfig,
    TransformScheme,
    apply_transform_config,
)
from safetensors.torch import save

INPUTS, QUERIES, KEYS, WIDTH = 16, 16, 8, 4


def model() -> torch.nn.Module:
    """Two layers with random projections of queries, with biases, and of keys."""
    layers = torch.nn.ModuleList()
    for _ in range(2):
        layer = torch.nn.Module()
        layer.q_proj = torch.nn.Linear(INPUTS, QUERIES)
        layer.k_proj = torch.nn.Linear(INPUTS, KEYS, bias=False)
        layers.append(layer)
    whole = torch.nn.Module()
    whole.layers = layers
    return whole


def group(*places: tuple[str, bool], targets: str = "Linear", **settings: Any) -> TransformScheme:
    """A group of transforms at places, each of which is a location and an inverse."""
    apply = [
        TransformArgs(targets=[targets], location=location, inverse=inverse)
        for location, inverse in places
    ]
    return TransformScheme(apply=apply, precision=torch.float64, **settings)


INPUT_SIDE = (("input", False), ("weight_input", True))
OUTPUT_SIDE = (("weight_output", False), ("output", True))


def cases() -> Iterator[tuple[str, dict[str, TransformScheme]]]:
    """All transforms by the name of their case."""
    for kind in ("hadamard", "random-hadamard", "random-matrix"):
        for width in (None, WIDTH):
            yield (
                f"{kind}-{width or 'whole'}",
                {
                    "v": group(*INPUT_SIDE, type=kind, head_dim=width),
                    "u": group(*OUTPUT_SIDE, type=kind, head_dim=width),
                },
            )
    yield "permuted", {"v": group(*INPUT_SIDE, type="hadamard", randomize=True)}
    yield "queries", {"v": group(*INPUT_SIDE, type="random-hadamard", targets="re:.*q_proj$")}
    yield "running", {"v": group(("input", True), ("output", False), type="random-hadamard")}
    yield "stored", {"R1": group(("weight_input", True), type="hadamard")}


def stored(rotated: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All tensors, those that modules share only once, as transformers stores them."""
    tensors: dict[str, torch.Tensor] = {}
    places = set()
    for name, tensor in rotated.state_dict().items():
        if tensor.data_ptr() not in places:
            tensors[name] = tensor
        places.add(tensor.data_ptr())
    return tensors


def main(path: str) -> None:
    """Write all cases into one file."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    configs: dict[str, str] = {}
    for case, schemes in cases():
        rotated = model()
        config = TransformConfig(config_groups=schemes)
        apply_transform_config(rotated, config)
        configs[case] = config.model_dump_json()
        tensors |= {f"{case}/{name}": tensor for name, tensor in stored(rotated).items()}
        rotated.double()
        for name, module in rotated.named_modules():
            if isinstance(module, torch.nn.Linear):
                offset = module(torch.zeros(1, INPUTS, dtype=torch.float64))
                weight = module(torch.eye(INPUTS, dtype=torch.float64)) - offset
                tensors[f"{case}/effective/{name}.weight"] = weight.T
                if module.bias is not None:
                    tensors[f"{case}/effective/{name}.bias"] = offset[0]
    contents = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    Path(path).write_bytes(gzip.compress(save(contents, {"cases": json.dumps(configs)}), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
