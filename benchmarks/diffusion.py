"""Tiny random models of diffusers' transformers, and what they are called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

HEADS, HEAD_WIDTH, TEXT = 2, 16, 5
WIDTH = HEADS * HEAD_WIDTH
SIZES = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_WIDTH, "num_layers": 2}


def normal(*shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def flux() -> tuple[Any, dict[str, Any]]:
    """Flux: joint blocks of a text and a picture, and blocks of both in one sequence."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        **SIZES,
        in_channels=4,
        num_single_layers=2,
        joint_attention_dim=24,
        pooled_projection_dim=24,
        axes_dims_rope=(4, 4, 8),
    )
    batch = {
        "hidden_states": normal(2, 16, 4),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "pooled_projections": normal(2, 24),
        "timestep": torch.full((2,), 0.5, dtype=torch.float64),
        "img_ids": torch.cartesian_prod(torch.arange(1), torch.arange(4), torch.arange(4)).double(),
        "txt_ids": torch.zeros(TEXT, 3, dtype=torch.float64),
    }
    return model, batch


def sd3() -> tuple[Any, dict[str, Any]]:
    """Stable Diffusion 3.5: joint blocks, of which the first has another attention of pictures."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        **SIZES,
        sample_size=8,
        in_channels=4,
        out_channels=4,
        joint_attention_dim=24,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=24,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    batch = {
        "hidden_states": normal(2, 4, 8, 8),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "pooled_projections": normal(2, 24),
        "timestep": torch.full((2,), 5.0, dtype=torch.float64),
    }
    return model, batch


def qwen() -> tuple[Any, dict[str, Any]]:
    """Qwen-Image: joint blocks with normed queries and keys and rotary positions."""
    from diffusers import QwenImageTransformer2DModel

    model = QwenImageTransformer2DModel(
        **SIZES, in_channels=4, out_channels=1, joint_attention_dim=24, axes_dims_rope=(4, 4, 8)
    )
    batch = {
        "hidden_states": normal(2, 16, 4),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "encoder_hidden_states_mask": torch.ones(2, TEXT, dtype=torch.long),
        "timestep": torch.full((2,), 0.5, dtype=torch.float64),
        "img_shapes": [(1, 4, 4)] * 2,
    }
    return model, batch


def pixart() -> tuple[Any, dict[str, Any]]:
    """PixArt: attention within the picture, and to the text."""
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        **SIZES,
        sample_size=8,
        out_channels=8,
        cross_attention_dim=WIDTH,
        caption_channels=24,
        norm_num_groups=2,
        use_additional_conditions=False,
    )
    batch = {
        "hidden_states": normal(2, 4, 8, 8),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "timestep": torch.full((2,), 5),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return model, batch


def wan() -> tuple[Any, dict[str, Any]]:
    """Wan: attention within the film, and to the text, with norms over all heads."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        **SIZES, in_channels=4, out_channels=4, text_dim=24, freq_dim=16, ffn_dim=32
    )
    batch = {
        "hidden_states": normal(2, 4, 2, 8, 8),
        "encoder_hidden_states": normal(2, TEXT, 24),
        "timestep": torch.full((2,), 5),
    }
    return model, batch


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "flux": flux,
    "sd3": sd3,
    "qwen": qwen,
    "pixart": pixart,
    "wan": wan,
}
