"""Tiny random models of every type, and what they are given.

Axes: B examples, N tokens, C channels, S side of a picture.
"""

from __future__ import annotations

import importlib
import inspect
import math
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.families.deriving.shrinking import shrunk
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST = 150_000_000  # parameters
TOKENS = 11


def model_classes(model_type: str) -> list[Any]:
    """The classes that are built from a type's configuration: the bare model first."""
    config = CONFIG_MAPPING[model_type]
    found = []
    for name, value in vars(modeling_auto).items():
        if name.endswith("MAPPING_NAMES") and isinstance(value.get(model_type), str):
            found.append((name != "MODEL_MAPPING_NAMES", value[model_type]))
    classes = []
    for _, name in sorted(found, key=lambda pair: pair[0]):
        try:
            classes.append(getattr(transformers, name))
        except (AttributeError, ImportError):
            continue
    module = config.__module__.replace(".configuration_", ".modeling_")
    try:
        code = importlib.import_module(module)
    except ImportError:
        name = model_type_to_module_name(model_type)
        code = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    own = [
        value
        for value in vars(code).values()
        if inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and getattr(value, "config_class", None) is config
        and "forward" in vars(value)
    ]
    own.sort(key=lambda value: (not value.__name__.endswith("Model"), len(value.__name__)))
    return list(dict.fromkeys([*classes, *own]))


def build(model_type: str) -> tuple[Any, str]:
    """A random model, and how it was made.

    Raises
    ------
    RuntimeError
        No class or no smaller configuration makes a model; says why.
    """
    reasons = []
    classes = model_classes(model_type)
    if not classes:
        raise RuntimeError("transformers has a configuration of this type, but no model")
    for variant in range(4):
        try:
            config = shrunk(CONFIG_MAPPING[model_type](), variant)
        except Exception as error:
            reasons.append(f"config {variant}: {_line(error)}")
            continue
        config._attn_implementation = "eager"
        config._experts_implementation = "eager"
        for kind in classes[:4]:
            try:
                with torch.device("meta"):
                    size = sum(p.numel() for p in kind(config).parameters())
            except Exception:
                size = 0
            if size > LARGEST:
                reasons.append(f"{kind.__name__} {variant}: {size} parameters")
                continue
            try:
                torch.manual_seed(0)
                model = kind(config)
            except Exception as error:
                reasons.append(f"{kind.__name__} {variant}: {_line(error)}")
                continue
            if sum(p.numel() for p in model.parameters()) > LARGEST:
                reasons.append(f"{kind.__name__} {variant}: too large")
                continue
            _randomize(model)
            return model.eval(), f"{kind.__name__} {variant}"
    raise RuntimeError(" | ".join(reasons)[:600])


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:160]


def _randomize(model: Any) -> None:
    """Attention far from uniform, and gains and biases that are all different."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point() or "inv_freq" in name:
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if parameter.ndim > 1:
                parameter.copy_(1.5 * noise / math.sqrt(parameter[0].numel()))
            else:
                parameter.add_(0.2 * noise)


def feeds(module: Any) -> Iterator[dict[str, Any]]:
    """What may be given to a model, one try after the other."""
    config = module.config
    accepted = inspect.signature(module.forward).parameters
    makers = _makers(config)
    required = [
        name
        for name, parameter in accepted.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    main = getattr(module, "main_input_name", "input_ids")
    wholes = [
        [*required, main, *DECODING],
        [*required, *ALL],
        [*required, main],
        [*required, main, "pixel_values", "input_ids", "bbox", "attention_mask"],
        [*required, "input_ids", "decoder_input_ids"],
        [*required, "inputs_embeds"],
        [*required, "inputs_embeds", "decoder_inputs_embeds"],
        [*required, "hidden_states"],
    ]
    tried = []
    for names in wholes:
        given = {}
        for name in dict.fromkeys(names):
            if name in accepted and name in makers:
                value = makers[name]()
                if value is not None:
                    given[name] = value
        if given and set(given) not in tried:
            tried.append(set(given))
            yield given
            if "input_ids" in given and main == "pixel_values":
                continue


BINS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels",
        "feature_projection_input_dim", "input_dim")  # fmt: skip
DECODING = ("decoder_input_ids", "decoder_input_values", "decoder_bbox")
ALL = ("input_ids", "pixel_values", "input_features", "input_values", "decoder_input_ids",
       "attention_mask", "bbox")  # fmt: skip


def _first(config: Any, *names: str, default: Any = None) -> Any:
    parts = [config, *(getattr(config, n, None) for n in PARTS)]
    for part in parts:
        for name in names:
            value = part.get(name) if isinstance(part, dict) else getattr(part, name, None)
            if value is not None:
                return value
    return default


PARTS = ("text_config", "vision_config", "audio_config", "encoder", "decoder", "text_encoder",
         "backbone_config", "encoder_config", "decoder_config", "thinker_config")  # fmt: skip


def _makers(config: Any) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    text = config.get_text_config()
    vocabulary = getattr(text, "vocab_size", None) or _first(config, "vocab_size", default=100)
    largest = vocabulary if isinstance(vocabulary, int) else 100
    top = max(3, min(largest, 120) - 1)
    width = _first(
        text, "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", default=96
    )
    width = width if isinstance(width, int) else 96

    def tokens(length: int) -> torch.Tensor:
        return torch.randint(3, top, (2, length), generator=random)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    def picture() -> torch.Tensor:
        vision = getattr(config, "vision_config", None) or config
        size = _first(vision, "image_size", "img_size", "input_size", default=64)
        if isinstance(size, dict):
            size = [size.get("height", 64), size.get("width", 64)]
        sides = [*size][-2:] if isinstance(size, list | tuple) else [size, size]
        channels = _first(vision, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        frames = _first(vision, "num_frames")
        if isinstance(frames, int) and config.model_type in VIDEO:
            return normal(2, frames, channels, *sides)
        return normal(2, channels, *sides)

    def features() -> torch.Tensor:
        bins = _first(config, *BINS, default=80)
        longest = _first(config, "max_source_positions")
        if config.model_type in CHANNELS_FIRST and isinstance(longest, int):
            return normal(2, bins, 2 * longest)
        return normal(2, 96, bins)

    return {
        "input_ids": lambda: tokens(TOKENS),
        "decoder_input_ids": lambda: tokens(TOKENS + 2),
        "attention_mask": lambda: None,
        "pixel_values": picture,
        "pixel_values_videos": lambda: picture()[:, None].repeat(1, 2, 1, 1, 1),
        "input_features": features,
        "input_values": lambda: normal(2, 4000),
        "decoder_input_values": lambda: normal(
            2, TOKENS, _first(config, "num_mel_bins", default=80)
        ),
        "inputs_embeds": lambda: normal(2, TOKENS, width),
        "decoder_inputs_embeds": lambda: normal(2, TOKENS + 2, width),
        "hidden_states": lambda: normal(2, TOKENS, width),
        "encoder_hidden_states": lambda: normal(
            2,
            TOKENS + 1,
            _first(config, "encoder_hidden_size", "cross_attention_hidden_size", default=width),
        ),
        "bbox": lambda: torch.randint(0, 50, (2, TOKENS, 4), generator=random).sort(-1).values,
        "past_values": lambda: normal(
            2,
            _first(config, "context_length", default=32),
            *([] if _first(config, "num_input_channels") is None else [config.num_input_channels]),
        ),
        "pixel_mask": lambda: None,
    }


VIDEO = ("videomae", "vivit", "timesformer", "vjepa2", "xclip_vision_model", "xclip")
CHANNELS_FIRST = (
    "whisper",
    "qwen2_audio_encoder",
    "qwen2_audio",
    "voxtral",
    "voxtral_encoder",
    "glmasr",
)
