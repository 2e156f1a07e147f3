"""Inputs of models that need more than their main one, for proofs; others are given a batch.

Axes: B examples, C channels, S side of a picture, T tiles of a picture.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wqk.live.running import MODEL_INPUTS, InputRequest, Inputs, image_input, token_input


def tiled_image_input(config: Any, request: InputRequest) -> Inputs:
    """A text and a picture (B, 1, T, C, S, S) for each, of which the last has one tile only."""
    text = token_input(config, request)
    vision = config.vision_config
    tiles, examples = vision.max_num_tiles, request.examples
    shapes = [width * height for width, height in vision.supported_aspect_ratios]
    side = vision.image_size
    used = np.ones((examples, 1, tiles), np.int64)
    used[-1, :, 1:] = 0
    # The number of a picture's shape, from 1; 0 stands for no picture.
    kinds = np.full((examples, 1), 1 + shapes.index(max(shapes)), np.int64)
    kinds[-1] = 1 + shapes.index(1)
    return text | {
        "pixel_values": request.normal(1, tiles, vision.num_channels, side, side),
        "aspect_ratio_ids": kinds,
        "aspect_ratio_mask": used,
        "cross_attention_mask": np.repeat(used[:, None], text["input_ids"].shape[1], axis=1),
    }


def prompted_image_input(config: Any, request: InputRequest) -> Inputs:
    """A picture and a prompt with its mask, which are stacked to one of the model's size."""
    height, width = config.image_size
    names = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    return {name: request.normal(config.num_channels, height // 2, width) for name in names}


def pointed_image_input(config: Any, request: InputRequest) -> Inputs:
    """A picture and two sets of three points in it, all of which are on the object."""
    picture = image_input(config, request)
    side = picture["pixel_values"].shape[-1]
    return picture | {
        "input_points": request.random.uniform(0, side, (request.examples, 2, 3, 2)),
        "input_labels": np.ones((request.examples, 2, 3), np.int64),
    }


def codebook_input(config: Any, request: InputRequest) -> Inputs:
    """Sound, the codes of each example's codebooks in a row, that follows a text or vectors."""
    decoder, length = getattr(config, "decoder", config), request.length
    shape = (request.examples * decoder.num_codebooks, length + 2)
    codes = request.random.integers(0, decoder.vocab_size, shape)
    if decoder is config:
        heard = request.normal(length - 2, config.hidden_size)
        return {"input_ids": codes, "encoder_hidden_states": heard}
    return token_input(config.text_encoder, request) | {
        "decoder_input_ids": codes,
        "decoder_attention_mask": np.ones((request.examples, length + 2), np.int64),
    }


MODEL_INPUTS |= {
    "mllama": tiled_image_input,
    "seggpt": prompted_image_input,
    "sam": pointed_image_input,
    **dict.fromkeys(
        ("musicgen", "musicgen_melody", "musicgen_decoder", "musicgen_melody_decoder"),
        codebook_input,
    ),
}
