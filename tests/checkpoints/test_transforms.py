"""Rotations that compressed-tensors applies while a model runs, and those that it refuses.

The library itself rotated the weights and ran the modules (``tools/rotating.py``): what is read
must be the matrix and the offset that each module has as a whole.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors
from tests.small import save

from wqk.checkpoints import Checkpoint, Part, open_checkpoint
from wqk.errors import CheckpointError

STORED = gzip.decompress(Path(__file__).with_name("transforms.safetensors.gz").read_bytes())
HEADER = json.loads(STORED[8 : 8 + int.from_bytes(STORED[:8], "little")])
CASES: dict[str, str] = json.loads(HEADER["__metadata__"]["cases"])

Tensors = dict[str, torch.Tensor]


def written(case: str) -> tuple[Tensors, Tensors]:
    """Tensors of a model that the library rotated, and the matrices of its modules."""
    stored = {
        name.removeprefix(f"{case}/"): tensor
        for name, tensor in safetensors.load(STORED).items()
        if name.startswith(f"{case}/")
    }
    effective = {
        name.removeprefix("effective/"): tensor
        for name, tensor in stored.items()
        if name.startswith("effective/")
    }
    return {n: t for n, t in stored.items() if not n.startswith("effective/")}, effective


def configured(case: str) -> dict[str, Any]:
    """The configuration of a case, as the library writes it."""
    settings = {"quant_method": "compressed-tensors", "transform_config": json.loads(CASES[case])}
    return {"quantization_config": settings}


def quantized(tensors: Tensors) -> Tensors:
    """The same tensors, with weights as whole numbers of 8 bits; scales are powers of two."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        scales = torch.exp2((tensor.abs().amax(1, keepdim=True) / 127).log2().ceil())
        stored[name] = (tensor / scales).round().to(torch.int8)
        stored[f"{name}_scale"] = scales
    return stored


def values(checkpoint: Checkpoint, name: str, *rows: tuple[int, int]) -> np.ndarray:
    """Rows of a tensor as they are read; all without any."""
    (read,) = checkpoint.read([Part(name, rows or None)])
    return read


@pytest.mark.parametrize("case", CASES)
def test_modules_are_read_as_the_library_runs_them(case: str, tmp_path: Path) -> None:
    tensors, effective = written(case)
    checkpoint = open_checkpoint(save(tmp_path, tensors, configured(case)))
    assert effective
    for name, expected in effective.items():
        read = values(checkpoint, name)
        np.testing.assert_allclose(read, expected.numpy(), atol=1e-7, err_msg=name)
        np.testing.assert_array_equal(
            values(checkpoint, name, (1, 3), (5, 8)), np.concatenate([read[1:3], read[5:8]])
        )
    assert bool(checkpoint.notes) == (case == "stored")


@pytest.mark.parametrize("case", ["random-hadamard-4", "permuted", "queries", "running"])
def test_quantized_modules_are_rotated_after_they_are_dequantized(
    case: str, tmp_path: Path
) -> None:
    tensors, effective = written(case)
    stored = quantized(tensors)
    rounded = {
        name: tensor.float() * stored[f"{name}_scale"] if f"{name}_scale" in stored else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale")
    }
    plain = open_checkpoint(save(tmp_path / "plain", rounded, configured(case)))
    config = configured(case)
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights}
    config["quantization_config"]["config_groups"] = {"group_0": group}
    coded = open_checkpoint(save(tmp_path / "coded", stored, config))
    for name, expected in effective.items():
        np.testing.assert_array_equal(values(coded, name), values(plain, name))
        np.testing.assert_allclose(values(coded, name), expected.numpy(), atol=0.01)


def with_group(case: str, **settings: Any) -> dict[str, Any]:
    """The configuration of a case with other settings of its first group."""
    config = configured(case)
    groups = config["quantization_config"]["transform_config"]["config_groups"]
    next(iter(groups.values())).update(settings)
    return config


def place(**settings: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "location": "input", "inverse": False, "ignore": []} | settings


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("hadamard-whole", {"type": "spiral"}, "type = 'spiral' is not a transform"),
    ("hadamard-whole", {"angle": 3}, "expected the keys of a transform"),
    ("hadamard-whole", {"head_dim": 5}, "blocks of 5 .* do not divide 16"),
    ("hadamard-whole", {"head_dim": 0}, "head_dim must be a positive number"),
    ("hadamard-whole", {"head_dim": 8}, r"k_proj\.v_input\.weight: .* expected one tensor"),
    ("hadamard-whole", {"apply": [place(location="middle")]}, "location = 'middle'"),
    ("hadamard-whole", {"apply": [place(angle=1)]}, "keys of a place"),
    ("hadamard-whole", {"apply": [place(targets=["re:("])]}, "targets must be names"),
    ("hadamard-whole", {"apply": [place(targets=["x"])]}, "transform_config has none for"),
    ("hadamard-whole", {"apply": [place(), place()]}, "groups v and v .* in an order"),
    ("random-hadamard-4", {"randomize": True, "type": "hadamard"}, r"v_input\.perm"),
    ("random-matrix-4", {"type": "hadamard"}, "must have the entries 1 and -1"),
    ("stored", {"apply": [place(location="q_attn", targets=["a"])]}, "q_attn and k_cache"),
]


@pytest.mark.parametrize(("case", "settings", "message"), REFUSED)
def test_transforms_that_are_not_documented_are_refused(case, settings, message, tmp_path) -> None:
    config = with_group(case, **settings)
    with pytest.raises(CheckpointError, match=message):
        read_all(save(tmp_path, written(case)[0], config))


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.tensors():
        checkpoint.read([Part(name)])


@pytest.mark.parametrize("case", ["hadamard-4", "random-matrix-4", "permuted"])
def test_matrices_that_are_missing_or_changed_are_refused(case: str, tmp_path: Path) -> None:
    tensors, _ = written(case)
    for name in tensors:
        if "v_input" not in name:
            continue
        remaining = {key: tensor for key, tensor in tensors.items() if key != name}
        with pytest.raises(CheckpointError, match="v_input"):
            read_all(save(tmp_path, remaining, configured(case)))
        with pytest.raises(CheckpointError, match="v_input"):
            read_all(save(tmp_path, tensors | {name: tensors[name][:1]}, configured(case)))
        if case != "random-matrix-4":
            with pytest.raises(CheckpointError, match="v_input"):
                read_all(save(tmp_path, tensors | {name: tensors[name] * 3}, configured(case)))


def test_queries_and_keys_that_are_turned_alike_keep_their_scores(tmp_path: Path) -> None:
    sides = [place(targets=["re:.*attn$"], location=at) for at in ("q_attn", "k_cache")]
    config = with_group("stored", apply=sides)
    tensors, _ = written("stored")
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    name = "layers.0.q_proj.weight"
    np.testing.assert_array_equal(values(checkpoint, name), tensors[name].numpy())
    for changed in ({"inverse": True}, {"ignore": ["x"]}):
        config = with_group("stored", apply=[sides[0], sides[1] | changed])
        with pytest.raises(CheckpointError, match="do not turn queries and keys by one"):
            open_checkpoint(save(tmp_path, tensors, config))


def test_a_module_of_an_open_class_is_refused_when_it_is_read(tmp_path: Path) -> None:
    case = "hadamard-whole"
    tensors, _ = written(case)
    tensors |= {"layers.0.gate.weight": torch.ones(4, 16), "embed_tokens.weight": torch.ones(9, 16)}
    checkpoint = open_checkpoint(save(tmp_path, tensors, configured(case)))
    assert (values(checkpoint, "embed_tokens.weight") == 1).all()
    with pytest.raises(CheckpointError, match=r"layers\.0\.gate: .* the file leaves open"):
        values(checkpoint, "layers.0.gate.weight")
