"""Quantization configurations in files of their own, next to ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints.dequantizing import CASES, Case
from tests.small import save

from wqk.checkpoints import Part, open_checkpoint
from wqk.errors import CheckpointError

# As AutoGPTQ 0.7.1, AutoAWQ 0.1 and ModelOpt 0.47 write them.
AUTOGPTQ = {
    "bits": 4,
    "group_size": 32,
    "damp_percent": 0.01,
    "desc_act": False,
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
    "model_name_or_path": None,
    "model_file_base_name": None,
    "is_marlin_format": False,
    "quant_method": "gptq",
    "checkpoint_format": "gptq_v2",
}
AUTOAWQ = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.47.0"},
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
}

FILES: list[tuple[str, str, dict[str, Any]]] = [
    ("gptq_v2-4", "quantize_config.json", AUTOGPTQ),
    ("awq", "quant_config.json", AUTOAWQ),
    ("modelopt-nvfp4", "hf_quant_config.json", MODELOPT),
]


def stored(
    folder: Path, case: Case, config: dict[str, Any], files: dict[str, dict[str, Any]]
) -> np.ndarray:
    """The weight of a case, read from a folder with these configurations."""
    tensors = {f"a.{ending}": tensor for ending, tensor in case.tensors.items()}
    save(folder, tensors, config)
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content), encoding="utf-8")
    (values,) = open_checkpoint(folder).read([Part("a.weight")])
    return values


@pytest.mark.parametrize(("name", "file", "content"), FILES)
@pytest.mark.parametrize("repeats", [False, True])
def test_a_file_alone_or_with_config_json(name, file, content, repeats, tmp_path) -> None:
    case = CASES[name]
    config = case.config if repeats else {"model_type": "llama"}
    values = stored(tmp_path, case, config, {file: content})
    expected = case.weight(case.tensors, case.keys)
    np.testing.assert_allclose(values, expected, atol=1e-6 * np.abs(expected).max())


def test_the_version_of_gptq_is_that_of_the_file(tmp_path: Path) -> None:
    case = CASES["gptq_v2-4"]
    second = stored(tmp_path, case, {}, {"quantize_config.json": AUTOGPTQ})
    first = stored(
        tmp_path, case, {}, {"quantize_config.json": AUTOGPTQ | {"checkpoint_format": "gptq"}}
    )
    expected = case.weight(case.tensors, {"checkpoint_format": "gptq"})
    assert np.abs(first - second).max() > 0.01
    np.testing.assert_allclose(first, expected, atol=1e-6 * np.abs(expected).max())


# Values of the file that config.json, or the rule of the table, contradicts.
REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("gptq_v2-4", "quantize_config.json", AUTOGPTQ | {"bits": 3}, r"sets bits = 3, and .* sets 4"),
    ("gptq_v2-4", "quantize_config.json", AUTOGPTQ | {"wbits": 3}, "bits and wbits .* differ"),
    (
        "gptq_v2-4",
        "quantize_config.json",
        AUTOGPTQ | {"checkpoint_format": "gptq"},
        "sets checkpoint_format = 'gptq'",
    ),
    ("gptq_v2-4", "quantize_config.json", AUTOGPTQ | {"format": "gptq"}, "different versions"),
    ("gptq_v2-4", "quantize_config.json", AUTOGPTQ | {"mystery": 1}, "mystery is not a key"),
    ("gptq_v2-4", "quantize_config.json", AUTOGPTQ | {"is_marlin_format": True}, "is_marlin"),
    ("gptq_v2-4", "quantize_config.json", AUTOGPTQ | {"quant_method": "awq"}, "method awq"),
    ("gptq_v2-4", "quant_config.json", AUTOAWQ, "quant_config.json is for the method awq"),
    ("gptq_v2-4", "hf_quant_config.json", MODELOPT, "is for the method modelopt"),
    ("awq", "quant_config.json", AUTOAWQ | {"version": "GEMV"}, "sets version = 'GEMV'"),
    (
        "modelopt-nvfp4",
        "hf_quant_config.json",
        {"quantization": {"quant_algo": "FP8"}},
        "sets quant_algo = 'FP8'",
    ),
    (
        "modelopt-nvfp4",
        "hf_quant_config.json",
        {"quantization": {"quant_algo": "NVFP4"}, "quant_algo": "FP8"},
        "quant_algo has two values",
    ),
]


@pytest.mark.parametrize(("name", "file", "content", "message"), REFUSED)
def test_files_that_contradict_each_other_are_refused(
    name, file, content, message, tmp_path
) -> None:
    config = {"quantization_config": {"bits": 4} | CASES[name].keys}
    if name.startswith("modelopt"):
        config = CASES[name].config
    with pytest.raises(CheckpointError, match=message):
        stored(tmp_path, CASES[name], config, {file: content})


def test_two_files_that_contradict_each_other_without_config_json(tmp_path: Path) -> None:
    files = {"quantize_config.json": AUTOGPTQ, "hf_quant_config.json": MODELOPT}
    with pytest.raises(CheckpointError, match="is for the method modelopt"):
        stored(tmp_path, CASES["gptq_v2-4"], {}, files)


def test_the_configuration_of_mlx_is_completed_under_its_own_key(tmp_path: Path) -> None:
    case = CASES["mlx-4"]
    values = stored(tmp_path, case, case.config, {"quantize_config.json": {"quant_method": "mlx"}})
    expected = case.weight(case.tensors, case.keys)
    np.testing.assert_allclose(values, expected, atol=1e-6 * np.abs(expected).max())


def test_a_method_that_is_not_read_is_refused(tmp_path: Path) -> None:
    files = {"quantize_config.json": AUTOGPTQ | {"quant_method": "marlin"}}
    with pytest.raises(CheckpointError, match="quantized with marlin"):
        stored(tmp_path, CASES["gptq_v2-4"], {}, files)


def test_the_file_of_a_plain_checkpoint_is_not_read(tmp_path: Path) -> None:
    save(tmp_path, {"a.weight": np.ones((4, 4))}, {})
    (tmp_path / "quantize_config.json").write_text("no JSON", encoding="utf-8")
    assert "a.weight" in open_checkpoint(tmp_path).tensors()
