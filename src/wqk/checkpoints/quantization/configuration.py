"""The quantization configuration of a file: found, checked against the table, and parsed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from wqk.checkpoints.quantization.quantization_settings import NO_SETTINGS, Settings
from wqk.checkpoints.quantization.table import Effect, Key, QuantizedFormat
from wqk.errors import CheckpointError, shown

# Methods whose files are known and not read.
UNREAD_METHODS = {
    "aqlm",
    "auto-round",
    "eetq",
    "exl3",
    "fouroversix",
    "fp_quant",
    "higgs",
    "marlin",
    "metal",
    "paroquant",
    "qqq",
    "quanto",
    "quark",
    "quip",
    "sinq",
    "spinquant",
    "spqr",
    "vptq",
}

# Orders of the codes of GPTQ and AWQ, for single kernels, that are not read.
UNREAD_FORMATS = {"marlin", "bitblas", "ipex", "gemv", "gemv_fast", "llm-awq", "exllama"}


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Return the quantization configuration of a model; without one, no settings.

    The configuration may also be in ``text_config``; in MLX, its key is ``quantization``.

    Examples
    --------
    >>> read_settings({"quantization_config": {"quant_method": "GPTQ", "bits": 4}}).method
    'gptq'
    >>> read_settings({"quantization": {"group_size": 64, "bits": 4}}).method
    'mlx'
    """
    mlx = config.get("quantization")
    if isinstance(mlx, dict) and {"group_size", "bits"} & mlx.keys():
        return Settings("mlx", mlx, "quantization")
    inner = config.get("text_config")
    for holder, path in ((config, ""), (inner, "text_config.")):
        values = holder.get("quantization_config") if isinstance(holder, dict) else None
        if isinstance(values, dict) and values:
            settings = Settings("", values, f"{path}quantization_config")
            method = settings.word("quant_method", "method")
            return Settings(method or _unnamed(values), values, settings.path)
        if values:
            raise CheckpointError(
                f"config.json: {path}quantization_config must have keys; expected an object, got "
                f"{shown(values)}; remove it, or use the original checkpoint"
            )
    return NO_SETTINGS


def _unnamed(values: Mapping[str, Any]) -> str:
    """Return the method of a configuration that names no method: early bitsandbytes, or MLX."""
    if {"load_in_4bit", "load_in_8bit"} & values.keys():
        return "bitsandbytes"
    return "mlx" if values.keys() <= {"group_size", "bits", "mode"} else ""


def refuse_unread(config: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a configuration names an unsupported quantized format."""
    settings = read_settings(config)
    names = ("checkpoint_format", "format", "version", "backend")
    formats = {str(settings.values[name]).lower() for name in names if settings.values.get(name)}
    unread_formats = sorted(formats & UNREAD_FORMATS)
    if settings.method in UNREAD_METHODS:
        method = settings.method
    elif settings.method in ("gptq", "awq") and unread_formats:
        method = f"{settings.method} in its {unread_formats[0]} format"
    else:
        return
    raise CheckpointError(
        f"quantized with {method}, whose weights are not read; use the original checkpoint, or "
        "dequantize it first"
    )


def require_known(
    settings: Settings, layout: QuantizedFormat, *, names_unknown: bool = True
) -> None:
    """Raise `CheckpointError` for keys that the table excludes.

    Parameters
    ----------
    settings
        The quantization configuration.
    layout
        The format with the table of keys.
    names_unknown
        Whether a key that is not in the table also raises an error.
    """
    for path, value in _leaves(settings.values, (), layout.keys):
        record = _record(path, layout.keys)
        is_set = value not in (None, False, "") and value != {} and value != []
        if not is_set:
            continue
        name = ".".join(path)
        if record is None and names_unknown:
            raise settings.error(
                f"{name} is not a key that is known for {layout.name}, so it could change the "
                "weights; dequantize the checkpoint first"
            )
        if record and record.effect is Effect.REFUSED and value not in record.neutral:
            raise settings.error(
                f"{name} = {shown(value)} sets {record.meaning}, which is not read; use the "
                "original checkpoint, or dequantize this one first"
            )


def _leaves(
    values: Mapping[str, Any], path: tuple[str, ...], known: Iterable[Key]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield paths of keys with their values: keys of the table, and unknown keys.

    Nested objects are searched only if the table has keys within them.
    """
    for name, value in values.items():
        here = (*path, name)
        within = [key for key in known if _leads_to(here, key)]
        if within and isinstance(value, dict) and _record(here, within) is None:
            yield from _leaves(value, here, within)
        else:
            yield here, value


def _record(path: tuple[str, ...], known: Iterable[Key]) -> Key | None:
    """Return the record of a key if the table has exactly this path; else None."""
    for key in known:
        if _leads_to(path, key) and key.name.count(".") + 1 == len(path):
            return key
    return None


def _leads_to(path: tuple[str, ...], key: Key) -> bool:
    """Return whether a path is the beginning of the path of a key, or the whole path."""
    key_words = key.name.split(".")
    pairs = zip(key_words, path, strict=False)
    return len(path) <= len(key_words) and all(word in ("*", name) for word, name in pairs)
