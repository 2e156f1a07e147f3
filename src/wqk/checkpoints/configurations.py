"""Configurations of other libraries, completed with values that only the library's code contains.

Keys keep the names of the library, which families use. The model type is added, and values that the
library computes from other keys or from the name of the architecture.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.checkpoint import is_transformer_lens, linear_name
from wqk.checkpoints.gguf import configuration
from wqk.errors import CheckpointError, shown

if TYPE_CHECKING:
    from wqk.checkpoints.checkpoint import TensorInfo
    from wqk.checkpoints.library_formats import Format


def lens_configuration(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> Mapping[str, Any]:
    """Complete a `HookedTransformerConfig` with the keys that families need.

    Only a configuration sets the scale, the mask and the positions of the score. Without a
    configuration, only the kind of norm is inferred from tensors, and the family is a guess.
    """
    if "d_head" not in config:
        has_bias = any(name.endswith("ln1.bias") for name in tensors)
        kind = "LN" if has_bias else "RMS"
        return {"model_type": "transformer-lens", "normalization_type": kind}
    scale = config.get("attn_scale")
    width = config["d_head"]
    if not isinstance(scale, int | float) or scale <= 0:
        scale = width**0.5 if isinstance(width, int) and width > 0 else 1.0
    added: dict[str, Any] = {
        "model_type": "transformer-lens",
        "attn_factor": 1.0 if config.get("use_attn_scale") is False else 1 / scale,
        "normalization_type": str(config.get("normalization_type") or "").removesuffix("Pre"),
    }
    cap = config.get("attn_scores_soft_cap")
    if not isinstance(cap, int | float) or cap <= 0:
        added["attn_scores_soft_cap"] = None
    if config.get("use_local_attn") and isinstance(config.get("attn_types"), list):
        added["layer_types"] = config["attn_types"]
    elif not config.get("use_local_attn"):
        added["window_size"] = None
    if config.get("use_NTK_by_parts_rope"):
        factor, length = config.get("NTK_by_parts_factor", 8.0), config.get("NTK_original_ctx_len")
        low = config.get("NTK_by_parts_low_freq_factor", 1.0)
        high = config.get("NTK_by_parts_high_freq_factor", 4.0)
        added["rope_scaling"] = _llama3_scaling(factor, high, low, length or 8192)
    return {**config, **added}


class Embedded(NamedTuple):
    """A configuration inside files of weights.

    Attributes
    ----------
    place
        Key of the configuration among the plain values of the file.
    keys
        Keys of the configuration.
    model_type
        Model type of the configuration; empty if the configuration sets a type, or is of unknown
        type.
    """

    place: str
    keys: set[str]
    model_type: str


EMBEDDED = (
    Embedded("model_args", {"n_layer", "n_head", "n_embd"}, "nanogpt"),
    Embedded("model_args", {"dim", "n_layers", "n_heads"}, "llama-original"),
    Embedded("dims", {"n_audio_head", "n_text_head"}, ""),  # Whisper's own files
    Embedded("hyper_parameters", set(), ""),
    Embedded("model_args", set(), ""),
    Embedded("config", set(), ""),
)


class Nameless(NamedTuple):
    """A library with configurations that name no model type.

    Attributes
    ----------
    model_type
        Model type of the families.
    keys
        Keys of its configurations.
    query
        Pattern of the names of tensors with queries.
    """

    model_type: str
    keys: set[str]
    query: str

    def fits(self, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
        """Return whether a model was made with the library."""
        if not self.keys <= config.keys():
            return False
        query = re.compile(rf"(.*\.)?{self.query}")
        queries = [info for name, info in tensors.items() if query.fullmatch(name)]
        if self.model_type == "nanogpt":
            # GPT-2 of transformers has nanoGPT's names, and stores weights (in, out).
            queries = [info for info in queries if info.shape[0] == 3 * info.shape[-1]]
        return bool(queries)


NAMELESS = (
    Nameless(
        "litgpt", {"n_layer", "n_head", "n_query_groups"}, r"h\.\d+\.attn\.(qkv|attn)\.weight"
    ),
    Nameless("nanochat", {"n_layer", "n_head", "n_kv_head"}, r"h\.\d+\.attn\.c_q\.weight"),
    Nameless("nanogpt", {"n_layer", "n_head", "n_embd"}, r"h\.\d+\.attn\.c_attn\.weight"),
)

# No size of a model is larger.
LARGEST = 2**31


class Opened(NamedTuple):
    """A configuration, and further parts of the checkpoint that complete it.

    Attributes
    ----------
    config
        The configuration of the library; empty without a configuration.
    about
        Plain values that are stored with the weights.
    tensors
        All tensors by name.
    """

    config: Mapping[str, Any]
    about: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def configured(layout: Format | None, opened: Opened) -> Mapping[str, Any]:
    """Return the configuration with the model type and the numbers that families need.

    Parameters
    ----------
    layout
        Format of the files; None for the format of transformers, and for a module in memory.
    opened
        The configuration, and further parts that complete it.

    Raises
    ------
    CheckpointError
        The configuration contains unsupported settings, or does not fit the tensors.
    """
    section = opened.config.get(layout.section) if layout and layout.section else None
    config = dict(section if isinstance(section, dict) else opened.config)
    config = config or _embedded(opened.about)
    if is_transformer_lens(opened.tensors):
        names = {linear_name(name): info for name, info in opened.tensors.items()}
        return lens_configuration(config, names)
    # A module in memory counts its own heads, which a guess reads; a trainer's family would need a
    # configuration.
    trainer = trainer_of(opened.tensors) if layout is not None else ""
    if "model_type" not in config:
        model_type = layout.model_type if layout and layout.model_type else _kind(config)
        if not model_type and _is_first_gemma(opened.tensors):
            model_type = "gemma"
            # The defaults of transformers are those of another model.
            counts = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
            config = dict.fromkeys(counts) | config
        model_type = model_type or trainer or _nameless(config, opened.tensors)
        if model_type:
            config["model_type"] = model_type
    if trainer and config["model_type"] not in ("llama-original", trainer):
        # The configuration is of transformers, the names of the weights are the trainer's.
        config |= {"model_type": trainer, "converted_from": config["model_type"]}
    kind = config.get("model_type")
    complete = COMPLETIONS.get(kind) if isinstance(kind, str) else None
    return config | complete(opened._replace(config=config)) if complete else config


def _is_first_gemma(tensors: Mapping[str, TensorInfo]) -> bool:
    """Return whether tensors have the names of the first models of google/gemma_pytorch.

    Their files set no model type.
    """
    is_fused = any(name.endswith("layers.0.self_attn.qkv_proj.weight") for name in tensors)
    is_later = any("pre_feedforward_layernorm" in name for name in tensors)
    return is_fused and not is_later and "embedder.weight" in tensors


def _nameless(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """Return the model type of a library whose configurations name no type; else empty."""
    for library in NAMELESS:
        if library.fits(config, tensors):
            return library.model_type
    return ""


def _embedded(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration that is stored with the weights; empty without a configuration."""
    if isinstance(about.get("code"), str):
        return {"model_type": "modded-nanogpt"}
    if isinstance(about.get("gguf"), dict):
        return configuration(about["gguf"])
    for record in EMBEDDED:
        embedded = about.get(record.place)
        if not isinstance(embedded, dict) or not record.keys <= embedded.keys():
            continue
        typed = [v for v in embedded.values() if isinstance(v, dict) and "model_type" in v]
        if "model_type" not in embedded and len(typed) == 1:
            embedded = typed[0]  # the model's part of a whole run's configuration
        if record.model_type:
            return embedded | {"model_type": record.model_type}
        return dict(embedded)
    return {}


def _kind(config: Mapping[str, Any]) -> str:
    """Return the model type of a configuration that names no type; empty if unknown."""
    if isinstance(config.get("_class_name"), str):
        return f"diffusers-{config['_class_name']}"
    if _timm_numbers(config):
        return "timm"
    return "llama-original" if {"dim", "n_layers", "n_heads"} <= config.keys() else ""


def _whole(config: Mapping[str, Any], key: str) -> int | None:
    """Return a positive whole number of a configuration; None if the key is missing."""
    value = config.get(key)
    if value is not None and (type(value) is not int or not 0 < value <= LARGEST):
        raise CheckpointError(
            f"{key} must be a positive whole number, got {shown(value)}; correct the configuration"
        )
    return value


def _llama3_scaling(factor: Any, high: Any = 4, low: Any = 1, length: Any = 8192) -> dict[str, Any]:
    """Return LLaMA 3.1's scaling of rotary positions, switched on by these configurations."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


# Each function returns the keys to add to a configuration.


def _llama(opened: Opened) -> dict[str, Any]:
    """Complete ``params.json`` of LLaMA and Mistral; rotary base and scaling are partly in code."""
    config, added = opened.config, dict[str, Any]()
    dim, heads, width = (_whole(config, key) for key in ("dim", "n_heads", "head_dim"))
    width = dim // heads if dim and heads and not width else width
    query = opened.tensors.get("layers.0.attention.wq.weight")
    rows = query.shape[0] if query and query.shape else 0
    if query and heads and width and rows != heads * width:
        raise CheckpointError(
            f"the queries of layer 0 have {rows} rows, and params.json sets {heads} "
            f"heads of width {width}: files that hold the other rows are missing; expected "
            f"{heads * width} rows; download all files of the checkpoint"
        )
    if config.get("rope_theta") is None and "head_dim" in config:  # Mistral's own default
        added["rope_theta"] = 1e6 if config.get("sliding_window") is None else 1e4
    if config.get("use_scaled_rope"):
        default = 32 if dim and dim <= 3072 else 8  # LLaMA 3.2 scales by more
        added["rope_scaling"] = _llama3_scaling(
            config.get("rope_scaling_factor") or default, config.get("rope_high_freq_factor") or 4
        )
    return added


def _litgpt(opened: Opened) -> dict[str, Any]:
    """Complete LitGPT's ``model_config.yaml``."""
    config = opened.config
    windows, bases = config.get("sliding_window_indices"), config.get("rope_indices")
    unread = [key for key in ("latent_attention", "rope_interleave") if config.get(key)]
    if bases is not None and bases != windows:
        unread.append("rope_indices")
    if unread:
        raise CheckpointError(
            f"LitGPT's {unread[0]} of this model is not read; use the original checkpoint"
        )
    name = config.get("name")
    added: dict[str, Any] = {"unit_offset": isinstance(name, str) and "Gemma" in name}
    _require_head_size(config, opened.tensors)
    if config.get("sliding_window_size") and isinstance(windows, list):
        added["layer_types"] = [
            "sliding_attention" if is_windowed else "full_attention" for is_windowed in windows
        ]
    scaling, ratio = config.get("rope_adjustments"), config.get("rope_condense_ratio")
    if not isinstance(scaling, dict | None):
        raise CheckpointError(
            f"rope_adjustments must be keys with values, got {shown(scaling)}; correct "
            "model_config.yaml"
        )
    if scaling:
        yarn_or_linear = "yarn" if "beta_fast" in scaling else "linear"
        added["rope_scaling"] = scaling | {
            "rope_type": "llama3" if "low_freq_factor" in scaling else yarn_or_linear,
            "original_max_position_embeddings": scaling.get("original_max_seq_len"),
        }
    elif ratio not in (None, 1):
        added["rope_scaling"] = {"rope_type": "linear", "factor": ratio}
    return added


def _require_head_size(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> None:
    """Check that LitGPT's ``head_size`` divides the rows of the weights as its heads do."""
    size, heads = config.get("head_size"), _whole(config, "n_head")
    if size is None or not heads:
        return
    groups = _whole(config, "n_query_groups") or heads
    for name, info in tensors.items():
        if not re.fullmatch(r"(.*\.)?h\.\d+\.attn\.(qkv|attn)\.weight", name):
            continue
        if type(size) is not int or info.shape[0] != (heads + 2 * groups) * size:
            raise CheckpointError(
                f"model_config.yaml: head_size is {shown(size)}, but {name} has {info.shape[0]} "
                f"rows for {heads} heads of queries and {groups} of keys and of values; correct "
                "the configuration, or use that of the weights"
            )


def _open_clip(opened: Opened) -> dict[str, Any]:
    """Complete OpenCLIP's ``model_cfg``; heads of the vision tower are 64 wide by default."""
    vision = opened.config.get("vision_cfg")
    if not isinstance(vision, dict) or vision.get("timm_model_name"):
        return {}
    width, head_width = _whole(vision, "width"), _whole(vision, "head_width") or 64
    return {"vision_cfg": vision | {"heads": width // head_width}} if width else {}


def _timm_numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the heads and the norms' epsilon, which timm's code sets by architecture.

    The result is empty for an unknown architecture, and for an architecture built with other
    numbers.
    """
    name = config.get("architecture")
    if not isinstance(name, str) or config.get("model_args"):
        return {}
    return _timm_table().get(name.partition(".")[0], {})


@cache
def _timm_table() -> Mapping[str, dict[str, Any]]:
    """Return the numbers of heads and the epsilons, by architecture."""
    text = resources.files("wqk.checkpoints").joinpath("timm.toml").read_text(encoding="utf-8")
    numbers_by_architecture = {}
    for epsilon, names_by_heads in tomllib.loads(text).items():
        for heads, names in names_by_heads.items():
            numbers = {"num_heads": int(heads), "layer_norm_epsilon": float(epsilon)}
            for name in names.split():
                numbers_by_architecture[name] = numbers
    return numbers_by_architecture


def _modded_nanogpt(opened: Opened) -> dict[str, Any]:
    """Complete models of nanoGPT speed runs; their only configuration is a script."""
    code = opened.about.get("code")
    if not isinstance(code, str):
        return {}
    match = re.search(r"\b(?:n_head|num_heads)\s*(?::\s*int\s*)?=\s*(\d{1,4})\b", code)
    added = {"qk_norm": bool(re.search(r"\bnorm\(q\b|rms_norm\(q\b", code))}
    return added | ({"n_head": int(match[1])} if match else {})


# Names of the weights with queries, by trainer.
TRAINERS = {
    "torchtitan": re.compile(r"(.*\.)?layers\.\d+\.attention\.wq\.weight"),
    "megatron-core": re.compile(r"(.*\.)?decoder\.layers\.\d+\.self_attention\.linear_qkv\.weight"),
}


def trainer_of(tensors: Mapping[str, TensorInfo]) -> str:
    """Return the model type of the trainer that uses these names of tensors; else empty."""
    for model_type, pattern in TRAINERS.items():
        if any(map(pattern.fullmatch, tensors)):
            return model_type
    return ""


def _torchtitan(opened: Opened) -> dict[str, Any]:
    """Return the order of rotated dimensions, as fixed for each model in torchtitan's code."""
    model = opened.config.get("converted_from")
    return {"rotary_half": isinstance(model, str) and model.startswith(("qwen", "gpt_oss"))}


def _megatron(opened: Opened) -> dict[str, Any]:
    """Return settings from Megatron's arguments, or from transformers, in the family's keys."""
    config = opened.config
    positions = config.get("position_embedding_type", "rope")
    biases = ("layer_norm.bias", "input_layernorm.bias")
    has_bias = any(name.endswith(biases) for name in opened.tensors)
    added = {"rotary": positions == "rope" or "converted_from" in config, "layer_norms": has_bias}
    if config.get("multi_latent_attention"):
        raise CheckpointError("Megatron's latent attention is not read; convert it to transformers")
    if "converted_from" not in config and not config.get("group_query_attention"):
        added["num_query_groups"] = config.get("num_attention_heads")
    added["gains_from_one"] = bool(config.get("apply_layernorm_1p"))
    return added


class NanochatCode(NamedTuple):
    """Numbers that only the code of nanochat contains, by its version.

    Attributes
    ----------
    score_factor
        Factor of every score.
    base
        Base of the rotary positions.
    share
        Number of short windows in a sequence.
    tile
        Number of tokens; the size of a short window is a multiple of this number.
    """

    score_factor: float
    base: float
    share: int
    tile: int

    def short_window(self, length: int) -> int:
        """Return the size of a short window, with the token itself, for a sequence length."""
        if self.tile == 1:
            return length // self.share + 1
        tiles = -(-length // (self.share * self.tile))
        return self.tile * tiles + 1


# Default epsilon of PyTorch's norms, in float32 and in narrower types.
FLOAT32_EPSILON = 2.0**-23
# Versions of nanochat's code since January 2026, when it got short windows.
NANOCHAT = NanochatCode(score_factor=1.0, base=1e4, share=2, tile=1)
# From 9 March 2026 on, with gates of values that read 12 channels, not 32.
NANOCHAT_NARROW_GATES = NanochatCode(score_factor=1.15**2, base=1e5, share=3, tile=128)
# From 14 March 2026 on, with a smear.
NANOCHAT_SMEAR = NanochatCode(score_factor=1.2**2, base=1e5, share=4, tile=128)


def _nanochat_code(tensors: Mapping[str, TensorInfo]) -> NanochatCode:
    """Return the version of nanochat's code that a model was trained with."""
    if any(name.endswith("smear_lambda") for name in tensors):
        return NANOCHAT_SMEAR
    gates = [info for name, info in tensors.items() if name.endswith("attn.ve_gate.weight")]
    if any(gate.shape[-1] == 12 for gate in gates):  # of 32 channels before
        return NANOCHAT_NARROW_GATES
    return NANOCHAT


def _nanochat(opened: Opened) -> dict[str, Any]:
    """Return the numbers that only nanochat's code has, and the windows of all layers."""
    added: dict[str, Any] = {}
    code = _nanochat_code(opened.tensors)
    if code != NANOCHAT:  # factor and base are the defaults
        added |= {"score_factor": code.score_factor, "rope_theta": code.base}
    if "n_head" in opened.config:  # not a file of transformers, which sets an epsilon
        added["rms_norm_eps"] = FLOAT32_EPSILON
    pattern = opened.config.get("window_pattern")
    layers = _whole(opened.config, "n_layer")
    if isinstance(pattern, str) and pattern and layers:
        length = _whole(opened.config, "sequence_len")
        short = code.short_window(length) if length else True
        tiled = [pattern[layer % len(pattern)] for layer in range(min(layers, 10**4) - 1)]
        windows = [short if letter in "Ss" else None for letter in tiled]
        added["windows"] = [*windows, None]  # the last layer has no window
    return added


COMPLETIONS: Mapping[str, Callable[[Opened], dict[str, Any]]] = {
    "llama-original": _llama,
    "litgpt": _litgpt,
    "open_clip": _open_clip,
    "timm": lambda opened: _timm_numbers(opened.config),
    "modded-nanogpt": _modded_nanogpt,
    "nanochat": _nanochat,
    "torchtitan": _torchtitan,
    "megatron-core": _megatron,
}
