"""Inputs of a model, or of a module of a model, chosen by the name of the argument.

Axes: B examples, N tokens, C channels, S side of a picture, D width.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

TOKENS = 11
GRID = ((1, 4, 4), (1, 4, 6))  # frames, rows and columns of patches of two pictures

# Which arguments are given together, one try after the other; required ones always.
TRIES: tuple[tuple[str, ...], ...] = (
    (
        "MAIN",
        "decoder_input_ids",
        "decoder_input_values",
        "bbox",
        "grid_thw",
        "future_values",
        "future_time_features",
        "visual_feats",
        "visual_pos",
    ),
    (
        "MAIN",
        "input_ids",
        "pixel_values",
        "image_attention_mask",
        "input_features",
        "input_values",
        "decoder_input_ids",
        "bbox",
        "image_grid_thw",
    ),
    ("MAIN",),
    ("MAIN", "MASKS"),
    ("MAIN", "pixel_values", "input_ids", "bbox", "query_embeds", "encoder_hidden_states"),
    ("input_ids", "decoder_input_ids"),
    ("inputs_embeds", "encoder_hidden_states"),
    ("inputs_embeds", "decoder_inputs_embeds"),
    ("query_embeds", "encoder_hidden_states"),
    ("flattened_patches",),
    ("hidden_states",),
)
# Models that mask later tokens only if they receive the mask of the padding, as from tokenizers.
MASKED = {"aimv2_text_model", "videoprism", "videoprism_text_model"}
# The same for a module that is no model.
INNER: tuple[tuple[str, ...], ...] = (
    ("memory_posision_embeddings", "num_spatial_memory_tokens"),
    ("position_embeddings", "encoder_hidden_states", "key_value_states"),
    ("position_embeddings",),
    ("encoder_hidden_states", "key_value_states"),
    (),
    ("position_embeddings", "cu_seqlens"),
)
BINS = (
    "num_mel_bins",
    "feature_size",
    "input_feat_per_channel",
    "n_mels",
    "input_feat_size",
    "feature_projection_input_dim",
    "input_dim",
    "mel_bins",
    "num_mels",
)
PARTS = (
    "text_config",
    "vision_config",
    "audio_config",
    "encoder",
    "decoder",
    "text_encoder",
    "backbone_config",
    "encoder_config",
    "decoder_config",
    "thinker_config",
)
VIDEO = (
    "videomae",
    "vivit",
    "timesformer",
    "vjepa2",
    "xclip_vision_model",
    "xclip",
    "videoprism",
    "videoprism_vision_model",
)
# Sound before time: (B, bins, N).
BINS_FIRST = (
    "whisper",
    "qwen2_audio_encoder",
    "qwen2_audio",
    "voxtral",
    "voxtral_encoder",
    "glmasr",
    "glmasr_encoder",
    "audioflamingo3",
    "audioflamingo3_encoder",
    "musicflamingo",
    "musicflamingo_encoder",
    "vibevoice_asr",
    "qwen3_asr",
    "qwen3_asr_encoder",
)


MASKS = (
    "input_features_mask",
    "feature_attention_mask",
    "padding_mask",
    "feature_lens",
    "target_sizes",
    "pixel_attention_mask",
    "spatial_shapes",
    "merge_sizes",
)


def adapted(inputs: dict[str, Any], error: str) -> dict[str, Any] | None:
    """Change inputs as an error demands; None if the error demands nothing known."""
    floats = {
        n: v for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.is_floating_point()
    }
    changed: dict[str, Any] = {}
    if match := re.search(r"cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)", error):
        _, got, expected = map(int, match.groups())
        for name, value in floats.items():
            width = value.shape[-1]
            if value.ndim == 4 and value[0].numel() % expected == 0:  # patches of a picture
                changed[name] = value.reshape(len(value), -1, expected)
            elif got % width == 0 and width * expected % got == 0:
                changed[name] = torch.randn(*value.shape[:-1], width * expected // got)
    elif match := re.search(
        r"size \[([\d, ]+)\], expected input\[([\d, ]+)\] to have (\d+) ch", error
    ):
        weight, shape = ([int(n) for n in numbers.split(",")] for numbers in match.groups()[:2])
        channels = int(match[3])
        for name, value in floats.items():
            if value.ndim == 2:
                changed[name] = value[:, None].repeat(1, channels, 1)
            elif value.ndim == 3 and value.shape[-1] == channels:
                changed[name] = value.transpose(1, 2).contiguous()
            elif value.ndim == 3 and len(weight) == 4:
                changed[name] = torch.randn(2, channels, 64, 64)
            elif value.ndim == 3:
                changed[name] = torch.randn(2, channels, value.shape[-1])
    elif match := re.search(
        r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at .* dimension 2", error
    ):
        got, expected = map(int, match.groups())
        for name, value in floats.items():
            if value.ndim == 3 and value.shape[-1] == got:
                changed[name] = torch.randn(*value.shape[:-1], expected)
    elif match := re.search(r"to conv2d, but got input of size: \[(\d+), (\d+)\]", error):
        rows, width = map(int, match.groups())
        side = math.isqrt(width // 3)
        changed = {n: v.reshape(rows, 3, side, side) for n, v in floats.items() if v.ndim == 2}
    elif match := re.search(r"not enough values to unpack \(expected (\d), got (\d)\)", error):
        expected, got = map(int, match.groups())
        for name, value in floats.items():
            if value.ndim == got == 2 and expected == 5:
                side = math.isqrt(value.shape[-1] // 3)
                changed[name] = value.reshape(1, len(value), 3, side, side)
            elif expected == got + 1 and value.ndim in (got, expected):  # of several, perhaps
                changed[name] = value[:, None]
    elif "too many values to unpack (expected 4)" in error:  # the frames of a video
        changed = {n: v.flatten(0, 1) for n, v in floats.items() if v.ndim == 5}
    elif "must be a 5D tensor" in error:  # pairs of pictures
        changed = {n: v[:, None].repeat(1, 2, 1, 1, 1) for n, v in floats.items() if v.ndim == 4}
    elif match := re.search(r"index (\d+) is out of range", error):
        changed = {n: v[:, : int(match[1])] for n, v in inputs.items() if n == "input_ids"}
    elif match := re.search(r"mel input features to be of length (\d+)", error):
        changed = {n: torch.randn(*v.shape[:-1], int(match[1])) for n, v in floats.items()}
    elif match := re.search(r"multiple of .*?\((\d+)\), but got (\d+)", error):
        number, got = map(int, match.groups())
        for name, value in inputs.items():
            if got in getattr(value, "shape", ()):
                axis = max(i for i, n in enumerate(value.shape) if n == got)
                shape = list(value.shape)
                shape[axis] = -(-got // number) * number
                new = torch.randn(shape) if name in floats else torch.ones(shape, dtype=value.dtype)
                changed[name] = new
    return inputs | changed if changed else None


def model_feeds(model: Any) -> Iterator[dict[str, Any]]:
    """Yield possible inputs of a model, one try after the other."""
    main = getattr(model, "main_input_name", "input_ids")
    main = main[0] if isinstance(main, list) else main
    makers = _makers(model, _width(model.config), BINS_FIRST)
    if model.config.model_type in MASKED:
        yield from _tries(model, makers, [("MAIN", "attention_mask")], main)
    yield from _tries(model, makers, TRIES, main)
    turned = _makers(model, _width(model.config), ())
    yield from _tries(model, turned | {"input_values": turned["input_features"]}, TRIES[:1], main)


def module_feeds(module: Any, model: Any, width: int) -> Iterator[dict[str, Any]]:
    """Yield possible inputs of a module that takes vectors of this width."""
    makers = _makers(model, width, BINS_FIRST, module)
    yield from _tries(module, makers, INNER, "")
    # Several sets of tokens for each example.
    yield from _tries(
        module, {n: lambda: torch.randn(2, 3, TOKENS, width) for n in makers}, ((),), ""
    )


def _tries(
    module: Any,
    makers: Mapping[str, Callable[[], Any]],
    tries: tuple[tuple[str, ...], ...],
    main: str,
) -> Iterator[dict[str, Any]]:
    accepted = inspect.signature(module.forward).parameters
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    required = [
        name
        for name, parameter in accepted.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in kinds
    ]
    given_before: list[set[str]] = []
    for names in tries:
        argument_names = [*required, *(main if name == "MAIN" else name for name in names)]
        argument_names += MASKS if "MASKS" in names else ()
        argument_names = [n for n in dict.fromkeys(argument_names) if n in accepted and n in makers]
        if "inputs_embeds" in argument_names and "input_ids" in argument_names:
            argument_names.remove("inputs_embeds")
        if argument_names and set(argument_names) not in given_before:
            given_before.append(set(argument_names))
            yield {name: makers[name]() for name in argument_names}


def _first(config: Any, *names: str, default: Any = None) -> Any:
    for part in [config, *(getattr(config, n, None) for n in PARTS)]:
        for name in names:
            # What differs from layer to layer is no attribute of the whole.
            table = part if isinstance(part, dict) else getattr(part, "__dict__", {})
            value = table[name] if name in table else getattr(part, name, None)
            if value is not None:
                return value
    return default


def _text_config(config: Any) -> Any:
    """Configuration of the text model; that of the decoder if there are several (MusicGen)."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def _width(config: Any) -> int:
    text = _text_config(config)
    names = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim")
    width = _first(text, *names, default=96)
    return width if isinstance(width, int) else 96


def _makers(
    model: Any, width: int, bins_first: tuple[str, ...], module: Any = None
) -> dict[str, Callable[[], Any]]:
    config = model.config
    random = torch.Generator().manual_seed(1)
    accepted = inspect.signature((module or model).forward).parameters
    patches = sum(frames * rows * columns for frames, rows, columns in GRID)
    vocabulary = _first(_text_config(config), "vocab_size", default=100)
    top = min(vocabulary if isinstance(vocabulary, int) else 100, 100)

    def tokens(length: int) -> torch.Tensor:
        low = min(3, max(0, top - 2))
        return torch.randint(low, max(low + 1, top), (2, length), generator=random)

    def heard(length: int) -> torch.Tensor:
        """Tokens of a decoder, which may be of several channels at a time."""
        decoder_config = config if config.model_type == "dia_decoder" else None
        decoder_config = config.decoder_config if config.model_type == "dia" else decoder_config
        shape = (1, 1, decoder_config.num_channels) if decoder_config else None
        return tokens(length)[..., None].repeat(shape) if shape else tokens(length)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    def picture() -> torch.Tensor:
        vision = getattr(config, "vision_config", None) or config
        channels = _first(vision, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        patch = _first(vision, "patch_size", default=16)
        if any("grid_thw" in name for name in accepted):
            frames = _first(vision, "temporal_patch_size", default=1)
            return normal(patches, channels * frames * patch * patch)
        if "spatial_shapes" in accepted:
            return normal(2, 16, channels * patch * patch)
        if "pixel_position_ids" in accepted:
            return normal(2, 36, channels * patch * patch)
        size = _first(vision, "image_size", "img_size", "input_size", "crop_size", default=64)
        if "aspect_ratio_ids" in accepted:
            tiles = _first(config, "max_num_tiles", default=4)
            return normal(1, 1, tiles, channels, size, size)
        if "target_sizes" in accepted:
            return normal(1, channels, patch, 2 * 16 * patch)
        if isinstance(size, dict):
            size = [size.get("height", 64), size.get("width", 64)]
        sides = [*size][-2:] if isinstance(size, list | tuple) else [size, size]
        if "prompt_masks" in accepted:  # one picture below the other
            sides[0] //= 2
        frames = _first(vision, "num_frames", "frames_per_clip")
        if isinstance(frames, int) and config.model_type in VIDEO:
            return normal(2, frames, channels, *sides)
        return normal(2, channels, *sides)

    def video() -> torch.Tensor:
        frames = picture()
        return frames if frames.ndim == 5 else frames[:, None].repeat(1, 2, 1, 1, 1)

    def features() -> torch.Tensor:
        bins = _first(config, *BINS, default=80)
        longest = _first(config, "max_source_positions", "max_position_embeddings", default=48)
        if config.model_type in bins_first and isinstance(longest, int):
            return normal(2, bins, 2 * longest)
        if "feature_lens" in accepted:
            return normal(bins, 96)
        length = _first(config, "max_length", "spec_size", default=96)
        if config.model_type == "audio-spectrogram-transformer":
            return normal(2, length, bins)
        if config.model_type in ("clap", "clap_audio_model"):
            return normal(2, 1, 256, bins)
        return normal(2, 96, bins)

    def vectors(length: int = TOKENS) -> Callable[[], torch.Tensor]:
        return lambda: normal(2, length, width)

    def series() -> torch.Tensor:
        several = _first(config, "num_input_channels", default=0)
        length = _first(config, "context_length", default=32)
        length += max(getattr(config, "lags_sequence", None) or [0])
        return normal(2, length, *([several] if several else []))

    def remembered(width: int) -> Callable[[], torch.Tensor]:
        """Return a memory of each pixel, for attention to earlier pictures."""
        sides = getattr(config, "memory_attention_rope_feat_sizes", None) or [4, 4]
        return lambda: normal(math.prod(sides), 2, width)

    def rotation() -> tuple[torch.Tensor, torch.Tensor]:
        heads = _first(config, "num_attention_heads", default=6)
        head_width = _first(config, "head_dim", default=width // heads)
        shape = (1, TOKENS, getattr(module, "head_dim", head_width))
        return torch.ones(shape), torch.zeros(shape)

    flat = any(name in accepted for name in ("grid_thw", "cu_seqlens"))
    rows = patches if "grid_thw" in accepted else TOKENS
    embedded = (
        _first(config, "temporal_patch_size", default=1)
        * 3
        * _first(config, "patch_size", default=16) ** 2
        if isinstance(_first(config, "patch_size", default=16), int)
        else width
    )
    hidden = vectors()
    if flat:
        hidden = lambda: normal(rows, embedded if "grid_thw" in accepted else width)  # noqa: E731
    makers: dict[str, Callable[[], Any]] = {
        "input_ids": lambda: (heard if config.model_type == "dia_decoder" else tokens)(TOKENS),
        "decoder_input_ids": lambda: heard(TOKENS + 2),
        "pixel_values": picture,
        "prompt_pixel_values": picture,
        "prompt_masks": picture,
        "pixel_values_videos": video,
        "input_features": features,
        "input_values": lambda: normal(2, 3840),
        "input_features_mask": lambda: torch.ones(
            2,
            features().shape[-2:][0]
            if config.model_type not in bins_first
            else features().shape[-1],
            dtype=torch.long,
        ),
        "feature_attention_mask": lambda: torch.ones(2, features().shape[-1], dtype=torch.long),
        "padding_mask": lambda: None,
        "feature_lens": lambda: torch.tensor([48, 48]),
        "mask": lambda: torch.ones(2, TOKENS, dtype=torch.bool),
        "merge_sizes": lambda: torch.tensor([1, 1]),
        "target_sizes": lambda: torch.tensor([[4, 4], [4, 4]], dtype=torch.int32),
        "pixel_attention_mask": lambda: torch.ones(2, 16, dtype=torch.long),
        "spatial_shapes": lambda: torch.tensor([[4, 4], [4, 4]]),
        "pixel_position_ids": lambda: (
            torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="ij"), -1)
            .reshape(1, 36, 2)
            .repeat(2, 1, 1)
        ),
        "num_patches": lambda: TOKENS,
        "codebook_idx": lambda: 1,
        "image": picture,
        "image_embeddings": lambda: normal(2, width, 8, 8),
        "image_positional_embeddings": lambda: normal(2, width, 8, 8),
        "sparse_prompt_embeddings": lambda: normal(2, 1, 3, width),
        "dense_prompt_embeddings": lambda: normal(2, width, 8, 8),
        "multimask_output": lambda: False,
        "high_resolution_features": lambda: [
            normal(2, width // 8, 32, 32),
            normal(2, width // 4, 16, 16),
        ],
        "flattened_patches": lambda: torch.cat(
            [
                torch.arange(1, 17).reshape(1, 16, 1).repeat(2, 1, 2).float(),
                normal(2, 16, 3 * _first(config, "patch_size", default=16) ** 2),
            ],
            -1,
        ),
        "aspect_ratio_ids": lambda: torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": lambda: torch.ones(
            1, 1, _first(config, "max_num_tiles", default=4), dtype=torch.long
        ),
        "audio_mel": lambda: normal(2, 96, _first(config, "input_feat_size", default=128)),
        "audio_mel_mask": lambda: torch.zeros(2, 96, dtype=torch.bool),
        "codes": lambda: torch.randint(0, 50, (2, 4, TOKENS), generator=random),
        "decoder_input_values": lambda: normal(2, TOKENS, _first(config, *BINS, default=80)),
        "bbox": lambda: torch.randint(0, 50, (2, TOKENS, 4), generator=random).sort(-1).values,
        "past_values": series,
        "past_time_features": lambda: normal(*series().shape[:2], config.num_time_features),
        "future_time_features": lambda: normal(
            2, config.prediction_length, config.num_time_features
        ),
        "future_values": lambda: normal(2, config.prediction_length),
        "past_values_padding": lambda: torch.zeros(series().shape).long(),
        "image_attention_mask": lambda: torch.ones(2, TOKENS, 1).long(),
        "current_vision_features": remembered(width),
        "memory": remembered(64),
        "memory_posision_embeddings": remembered(64),
        "num_spatial_memory_tokens": lambda: 1,
        "freq": lambda: torch.zeros(2, 1).long(),
        "past_observed_mask": lambda: torch.ones(series().shape),
        "visual_feats": lambda: normal(2, 5, config.visual_feat_dim),
        "visual_pos": lambda: normal(2, 5, 4),
        "hq_token_only": lambda: False,
        "task_inputs": lambda: tokens(77),
        "grid_thw": lambda: torch.tensor(GRID),
        "image_grid_thw": lambda: torch.tensor(GRID),
        "cu_seqlens": lambda: torch.tensor([0, TOKENS], dtype=torch.int32),
        "position_embeddings": rotation,
        "attention_mask": lambda: torch.ones(2, TOKENS).long() if module is None else None,
        "inputs_embeds": vectors(),
        "decoder_inputs_embeds": vectors(TOKENS + 2),
        "encoder_hidden_states": lambda: normal(
            2,
            TOKENS + 1,
            width if module is not None else _first(config, *CROSS_WIDTHS, default=width),
        ),
        "hidden_states": hidden,
    }
    for name in VECTORS:
        makers.setdefault(name, hidden)
    return makers


CROSS_WIDTHS = ("encoder_hidden_size", "cross_attention_hidden_size")
VECTORS = (
    "hidden_state",
    "vision_pos_encoding",
    "prompt_features",
    "x",
    "query",
    "key",
    "value",
    "key_value_states",
    "context",
    "queries",
    "query_embeds",
    "latents",
    "input_embeds",
    "input_tensor",
    "input",
    "hidden",
    "keys",
    "values",
    "q",
    "k",
    "v",
    "encoder_outputs",
    "inputs",
    "src",
    "tgt",
    "vision_features",
    "image_embeds",
    "text_features",
    "image_features",
    "encoded_hidden_states",
)
