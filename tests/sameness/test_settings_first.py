"""One wrong setting is named as a setting; tensors that are right are left alone."""

from __future__ import annotations

import pytest
import torch
import transformers

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.sameness.mismatches import Kind


def audio_model(model_type: str, *, stable: bool) -> StateDict:
    """A tiny encoder of sounds whose norms lie before the attention if it is stable."""
    config = transformers.AutoConfig.for_model(
        model_type,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(16,),
        conv_stride=(2,),
        conv_kernel=(3,),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        do_stable_layer_norm=stable,
    )
    torch.manual_seed(0)
    module = transformers.AutoModel.from_config(config)
    for name, parameter in module.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.1)
    tensors = {name: value.numpy() for name, value in module.state_dict().items()}
    return StateDict(tensors, config.to_dict(), f"stable is {stable}")


@pytest.mark.parametrize("model_type", ["wav2vec2", "wavlm"])
@pytest.mark.parametrize("stable", [True, False])
def test_the_place_of_norms_is_one_setting(model_type: str, stable: bool) -> None:
    """The first layer was said to have wrong gains, and right ones were overwritten."""
    reference = audio_model(model_type, stable=stable)
    config = {**reference.config, "do_stable_layer_norm": not stable}
    candidate = StateDict(reference._arrays, config, "candidate")
    comparison = wqk.same(reference, candidate, everything=True)
    (cause,) = comparison.causes
    assert cause.mismatch.verdict is Kind.SETTING
    assert [place.layer for place in cause.places] == [0, 1]
    assert comparison.repair == f'config["do_stable_layer_norm"] = {stable}'
    mended = StateDict(reference._arrays, {**config, "do_stable_layer_norm": stable}, "mended")
    assert wqk.same(reference, mended, everything=True).same
