"""Configurations that other libraries write, with what families need and they leave to their code.

Keys keep their library's names, which families know. Added are the model type, and what the library
computes from other keys or from the name of the architecture.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wqk.checkpoints.checkpoint import TensorInfo
    from wqk.checkpoints.formats import Format


class Embedded(NamedTuple):
    """A configuration inside a file of weights: its key, those that it has to have, its type."""

    key: str
    needs: frozenset[str] = frozenset()
    model_type: str = ""


EMBEDDED = (
    Embedded("model_args", frozenset({"n_layer", "n_head", "n_embd"}), "nanogpt"),
    Embedded("model_args", frozenset({"dim", "n_layers", "n_heads"}), "llama-original"),
    Embedded("args", frozenset({"num_layers", "tensor_model_parallel_size"}), "megatron"),
    Embedded("hyper_parameters"),
    Embedded("model_args"),
    Embedded("config"),
)


def configured(
    name: str,
    config: Mapping[str, Any],
    layout: Format | None,
    about: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> Mapping[str, Any]:
    """The configuration with a model type that families know, and the numbers that they need.

    Parameters
    ----------
    name
        What errors call the checkpoint.
    config
        From the file of configuration; empty without one.
    layout
        The format, where the files' names tell it.
    about
        Plain values that are stored with the weights.
    tensors
        The model's.

    Raises
    ------
    CheckpointError
        The configuration asks for what is not read, or does not fit the tensors.
    """
    section = config.get(layout.section) if layout and layout.section else None
    whole: dict[str, Any] = dict(section if isinstance(section, dict) else config)
    if not whole:
        whole = _embedded(about)
    if "model_type" not in whole:
        kind = layout.model_type if layout and layout.model_type else _kind(whole)
        whole |= {"model_type": kind} if kind else {}
    complete = _COMPLETIONS.get(str(whole.get("model_type")))
    return complete(name, whole, about, tensors) if complete else whole


def _embedded(about: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that is stored with the weights."""
    if isinstance(about.get("code"), str):
        return {"model_type": "modded-nanogpt"}
    for key, needs, model_type in EMBEDDED:
        found = about.get(key)
        if isinstance(found, dict) and needs <= found.keys():
            typed = [v for v in found.values() if isinstance(v, dict) and "model_type" in v]
            found = typed[0] if len(typed) == 1 and "model_type" not in found else found
            return found | ({"model_type": model_type} if model_type else {})
    return {}


def _kind(config: Mapping[str, Any]) -> str:
    """The model type of a configuration that names none."""
    if isinstance(config.get("_class_name"), str):
        return f"diffusers-{config['_class_name']}"
    if isinstance(config.get("architecture"), str):
        return "timm"
    return "llama-original" if {"dim", "n_layers", "n_heads"} <= config.keys() else ""


def _llama(
    name: str,
    config: dict[str, Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Any]:
    """LLaMA's and Mistral's ``params.json``, whose rotary base and scaling are partly in code."""
    width, heads = config.get("head_dim"), config.get("n_heads")
    if not width and isinstance(config.get("dim"), int) and isinstance(heads, int) and heads:
        width = config["dim"] // heads
    query = tensors.get("layers.0.attention.wq.weight")
    if query and isinstance(width, int) and isinstance(heads, int):
        rows = query.shape[0] if query.shape else 0
        if rows != heads * width:
            raise CheckpointError(
                f"{name}: the queries of layer 0 have {rows} rows, and params.json says {heads} "
                f"heads of width {width}: files that hold the other rows are missing"
            )
    if config.get("rope_theta") is None and "head_dim" in config:  # Mistral's own default
        config["rope_theta"] = 1e6 if config.get("sliding_window") is None else 1e4
    if config.get("use_scaled_rope"):
        dim = config.get("dim")
        small = isinstance(dim, int) and dim <= 3072  # LLaMA 3.2, which scales by more
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.get("rope_scaling_factor") or (32 if small else 8),
            "low_freq_factor": 1,
            "high_freq_factor": config.get("rope_high_freq_factor") or 4,
            "original_max_position_embeddings": 8192,
        }
    return config


def _litgpt(
    name: str,
    config: dict[str, Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Any]:
    """LitGPT's ``model_config.yaml``."""
    windows, bases = config.get("sliding_window_indices"), config.get("rope_indices")
    unread = [key for key in ("latent_attention", "rope_interleave") if config.get(key)]
    if unread or (bases is not None and bases != windows) or config.get("norm_qk_type") == "olmo2":
        raise CheckpointError(
            f"{name}: LitGPT's {unread[0] if unread else 'rope_indices or norm_qk_type'} of this "
            "model is not read; use the original checkpoint"
        )
    if config.get("sliding_window_size") and isinstance(windows, list):
        config["layer_types"] = [
            "sliding_attention" if one else "full_attention" for one in windows
        ]
    config["unit_offset"] = "Gemma" in str(config.get("name"))
    scaling = dict(config.get("rope_adjustments") or {})
    if scaling:
        kind = (
            "llama3" if "low_freq_factor" in scaling else "yarn" if "beta_fast" in scaling else ""
        )
        config["rope_scaling"] = scaling | {
            "rope_type": kind or "linear",
            "original_max_position_embeddings": scaling.get("original_max_seq_len"),
        }
    elif config.get("rope_condense_ratio", 1) != 1:
        config["rope_scaling"] = {"rope_type": "linear", "factor": config["rope_condense_ratio"]}
    return config


def _megatron(
    name: str,
    config: dict[str, Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Any]:
    """Megatron-LM's arguments, as they lie in each of its files."""
    if config.get("pipeline_model_parallel_size", 1) != 1:
        raise CheckpointError(
            f"{name}: Megatron's pipeline parts are not read; convert the checkpoint to one stage"
        )
    unread = (
        "multi_latent_attention", "attention_output_gate", "rotary_interleaved", "qk_l2_norm",
        "apply_layernorm_1p", "experimental_attention_variant",
    )  # fmt: skip
    used = [key for key in unread if config.get(key)]
    position = config.get("position_embedding_type", "learned_absolute")
    version = about.get("checkpoint_version", 3.0)
    if position not in ("learned_absolute", "rope", "none") or used:
        raise CheckpointError(
            f"{name}: Megatron's {used[0] if used else f'positions {position!r}'} is not read"
        )
    if isinstance(version, int | float) and version < 2:
        raise CheckpointError(
            f"{name}: Megatron's checkpoint version {version} orders queries, keys and values "
            "otherwise; load and save it with a newer Megatron"
        )
    parts = config.get("tensor_model_parallel_size", 1)
    queries = next(
        (t for n, t in tensors.items() if re.search(r"(linear_qkv|value)\.weight$", n)), None
    )
    heads, width = config.get("num_attention_heads"), config.get("kv_channels")
    if not config.get("group_query_attention"):
        config["num_query_groups"] = heads
    groups = config.get("num_query_groups")
    if queries and isinstance(heads, int) and isinstance(groups, int) and isinstance(width, int):
        rows, expected = queries.shape[0], (heads + 2 * groups) * width
        if rows != expected:
            raise CheckpointError(
                f"{name}: {rows} of the {expected} rows of queries, keys and values: it is one of "
                f"{parts} tensor-parallel parts; scan the folder that holds mp_rank_00, mp_rank_01…"
            )
    config["is_rotary"] = position == "rope"
    if config.get("use_rope_scaling"):
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": config.get("rope_scaling_factor", 8.0),
            "low_freq_factor": 1,
            "high_freq_factor": 4,
            "original_max_position_embeddings": 8192,
        }
    elif config.get("rotary_seq_len_interpolation_factor"):
        factor = config["rotary_seq_len_interpolation_factor"]
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return config


def _open_clip(
    name: str,
    config: dict[str, Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Any]:
    """OpenCLIP's ``model_cfg``; heads of its vision tower are 64 wide where nothing is said."""
    vision = dict(config.get("vision_cfg") or {})
    if isinstance(vision.get("width"), int) and not vision.get("timm_model_name"):
        vision["heads"] = vision["width"] // (vision.get("head_width") or 64)
    config["vision_cfg"] = vision
    return config


@cache
def _timm_numbers() -> Mapping[str, dict[str, float]]:
    """Heads and the norms' epsilon by architecture."""
    text = resources.files("wqk.checkpoints").joinpath("timm.toml").read_text(encoding="utf-8")
    return {
        name: {"num_heads": int(heads), "layer_norm_epsilon": float(epsilon)}
        for epsilon, table in tomllib.loads(text).items()
        for heads, names in table.items()
        for name in names.split()
    }


def _timm(
    name: str,
    config: dict[str, Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Any]:
    """What timm saves: the number of heads is in its code, by the architecture's name."""
    numbers = _timm_numbers().get(str(config["architecture"]).partition(".")[0])
    if numbers is None or config.get("model_args"):  # another architecture, or other numbers
        return {key: value for key, value in config.items() if key != "model_type"}
    return config | numbers


def _modded_nanogpt(
    name: str,
    config: dict[str, Any],
    about: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, Any]:
    """Speed runs of nanoGPT: the only configuration is the script, which is kept as text."""
    code = about["code"]
    match = re.search(r"\b(?:n_head|num_heads)\s*(?::\s*int\s*)?=\s*(\d{1,4})\b", code)
    config["qk_norm"] = bool(re.search(r"\bnorm\(q\b|rms_norm\(q\b", code))
    return config | ({"n_head": int(match[1])} if match else {})


_COMPLETIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "llama-original": _llama,
    "litgpt": _litgpt,
    "megatron": _megatron,
    "open_clip": _open_clip,
    "timm": _timm,
    "modded-nanogpt": _modded_nanogpt,
}
