"""OpenCLIP against CLIP of `transformers`: towers paired by name, equal to the last bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import torch as safetensors
from tests.small import sizes

from wqk.sameness.same import same

# Of unequal depths, widths and heads, so that a tower taken for the other one cannot pass.
VISION = {"width": 128, "layers": 3, "heads": 2, "head_width": 64}
TEXT = {"width": 48, "layers": 2, "heads": 3}
PARTS = {"vision_model": "visual.transformer", "text_model": "transformer"}
NORMS = {"layer_norm1": "ln_1", "layer_norm2": "ln_2"}


def written(folder: Path) -> tuple[Path, Path, dict[str, Any]]:
    """A random CLIP as `transformers` saves it, and as OpenCLIP's `CLIP` module calls it.

    In OpenCLIP's residual blocks attention is an `nn.MultiheadAttention`, whose queries, keys and
    values are one tensor.
    """

    def tower(measures: dict[str, int]) -> dict[str, int]:
        return sizes(measures["width"], measures["layers"], measures["heads"], intermediate_size=32)

    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config=tower(TEXT) | {"vocab_size": 32, "max_position_embeddings": 8},
        vision_config=tower(VISION) | {"image_size": 8, "patch_size": 4},
    )
    model = transformers.CLIPModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    model.save_pretrained(folder / "hf")
    transformers_tensors, tensors = model.state_dict(), {}
    for part, name in PARTS.items():
        for layer in range((VISION if part == "vision_model" else TEXT)["layers"]):
            at, to = f"{part}.encoder.layers.{layer}", f"{name}.resblocks.{layer}"
            for kind in ("weight", "bias"):
                sides = [
                    transformers_tensors[f"{at}.self_attn.{side}_proj.{kind}"] for side in "qkv"
                ]
                tensors[f"{to}.attn.in_proj_{kind}"] = torch.cat(sides)
                tensors[f"{to}.attn.out_proj.{kind}"] = transformers_tensors[
                    f"{at}.self_attn.out_proj.{kind}"
                ]
                for norm, openclip_norm in NORMS.items():
                    tensors[f"{to}.{openclip_norm}.{kind}"] = transformers_tensors[
                        f"{at}.{norm}.{kind}"
                    ]
    (folder / "open").mkdir()
    # Their order in the file is no order of towers or layers.
    names = random.Random(0).sample(sorted(tensors), len(tensors))
    shuffled = {name: tensors[name].contiguous() for name in names}
    about = {"model_cfg": {"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}}
    (folder / "open" / "open_clip_config.json").write_text(json.dumps(about))
    safetensors.save_file(shuffled, folder / "open" / "open_clip_model.safetensors")
    return folder / "hf", folder / "open", shuffled


def test_towers_are_paired_by_name_and_equal_to_the_last_bit(tmp_path: Path) -> None:
    hf, opened, _ = written(tmp_path)
    for pair in ((hf, opened), (opened, hf)):
        comparison = same(*pair)
        assert comparison.same, (comparison.sentence, comparison.causes)
        assert comparison.missing == comparison.added == comparison.notes == ()
        places = {(block.stack, block.layer) for block in comparison.blocks}
        assert places == {("vision", n) for n in range(3)} | {("text", n) for n in range(2)}
        assert max(max(block.distance.values()) for block in comparison.blocks) == 0


def test_a_mistake_in_one_tower_is_named_there(tmp_path: Path) -> None:
    hf, opened, tensors = written(tmp_path)
    name = "visual.transformer.resblocks.1.attn.in_proj_weight"
    query, key, value = np.split(tensors[name].numpy(), 3)
    tensors[name] = torch.tensor(np.concatenate([key, query, value]))
    safetensors.save_file(tensors, opened / "open_clip_model.safetensors")
    (cause,) = same(hf, opened).causes
    assert cause.places == (("vision", "self", 1),)
    assert cause.mismatch.verdict in ("transposed", "other layout of the fused weight")
