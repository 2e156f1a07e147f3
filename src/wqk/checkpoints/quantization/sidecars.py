"""Quantization configurations in separate files next to ``config.json``.

AutoGPTQ writes ``quantize_config.json``, early AutoAWQ ``quant_config.json``, ModelOpt
``hf_quant_config.json``. ``config.json`` often repeats their keys. The settings of such a file
become part of ``quantization_config``, and are checked with the table. Files that contradict each
other raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.quantization.configuration import read_settings
from wqk.checkpoints.quantization.table import Effect
from wqk.errors import CheckpointError, shown

if TYPE_CHECKING:
    from wqk.checkpoints.checkpoint import TensorInfo
    from wqk.checkpoints.quantization.table import QuantizedFormat

# Files, and the method of files that name no method.
SIDECARS = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}

# Stored types of codes. Without any of them, no weight is quantized.
CODES = {"I32", "U32", "I8", "U8", "F8_E4M3", "F8_E5M2"}

NAMES_OF_METHOD = ("quant_method", "method")


def with_sidecars(
    config: Mapping[str, Any],
    tensors: Iterable[TensorInfo],
    read: Callable[[str], Mapping[str, Any]],
    formats: Iterable[QuantizedFormat],
) -> Mapping[str, Any]:
    """Return a configuration with the quantization settings in files next to it.

    Parameters
    ----------
    config
        Contents of ``config.json``.
    tensors
        Stored tensors. If no tensor has a type of codes, the files are not read.
    read
        Function that reads a file of JSON; it returns an empty object for an absent file.
    formats
        The table of formats. Keys without an effect may differ.

    Raises
    ------
    CheckpointError
        Two files set different values.
    """
    if not any(info.dtype in CODES for info in tensors):
        return config
    for file, method in SIDECARS.items():
        content = read(file)
        if content:
            config = _merged(config, file, _flat(content, file, method), formats)
    return config


def _flat(content: Mapping[str, Any], file: str, method: str) -> dict[str, Any]:
    """Return the keys of a file, with the keys of ModelOpt's inner ``quantization``."""
    inner = content.get("quantization")
    if not isinstance(inner, dict):
        flat = dict(content)
    else:
        flat = {name: value for name, value in content.items() if name != "quantization"}
        for name, value in inner.items():
            if flat.setdefault(name, value) != value:
                raise CheckpointError(
                    f"{file}: {name} has two values; expected one, got {shown(flat[name])} and "
                    f"{shown(value)}; correct the file"
                )
    if not any(flat.get(name) for name in NAMES_OF_METHOD):
        flat["quant_method"] = method
    return flat


def _merged(
    config: Mapping[str, Any],
    file: str,
    values: Mapping[str, Any],
    formats: Iterable[QuantizedFormat],
) -> Mapping[str, Any]:
    """Return a configuration with the values of one file; `CheckpointError` for contradictions."""
    before = read_settings(config)
    added = read_settings({"quantization_config": values})
    if not before.values:
        return {**config, "quantization_config": dict(values)}
    if before.method != added.method:
        raise CheckpointError(
            f"{file} is for the method {added.method}, and {before.path} of config.json names "
            f"{before.method or 'none'}; expected one method; remove the file that does not belong "
            "to the weights"
        )
    without_effect = set()
    for layout in formats:
        if before.method in layout.methods:
            without_effect |= {key.name for key in layout.keys if key.effect is Effect.NONE}
    for name, value in values.items():
        if name in without_effect or name in NAMES_OF_METHOD:
            continue
        value_before = before.values.get(name)
        is_set_twice = value is not None and value_before is not None
        if is_set_twice and not _is_equal(value, value_before):
            raise CheckpointError(
                f"{file} sets {name} = {shown(value)}, and {before.path} of config.json "
                f"sets {shown(value_before)}; expected one value; correct the file that does not "
                "belong to the weights"
            )
    # Null stands for a key that is left out.
    set_before = {name: value for name, value in before.values.items() if value is not None}
    merged = {**values, **set_before}
    if before.path in config:
        return {**config, before.path: merged}
    return {**config, "text_config": {**config["text_config"], "quantization_config": merged}}


def _is_equal(value: Any, value_before: Any) -> bool:
    """Return whether two values are equal; words are equal in any case."""
    if isinstance(value, str) and isinstance(value_before, str):
        return value.lower() == value_before.lower()
    return type(value) is type(value_before) and bool(value == value_before)
