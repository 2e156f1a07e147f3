"""Models: equal starts, no look ahead, and configurations of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.lab.training.making import VOCABULARY, tiny_model

import wqk
from wqk.errors import RunError
from wqk_lab.training.initializations import STARTS
from wqk_lab.training.models import load_checkpoint

NO_MODEL = [
    ("encoder", {"model_type": "llama", "hidden_size": 32}, "the encoder of type llama"),
    ("decoder", {"model_type": "vit"}, "the decoder of type vit"),
    ("decoder", {"model_type": "nonsense"}, "must be known to transformers; got 'nonsense'"),
    ("decoder", {"hidden_size": 32}, "must be known to transformers; got None"),
    ("decoder", {"model_type": "gpt2", "n_positions": 8}, "the configuration has 8"),
    (
        "decoder",
        {"model_type": "gpt2", "n_embd": "wide"},
        "cannot build the decoder of type gpt2 from this configuration",
    ),
]


@pytest.mark.parametrize("preset", ["paper", "fast"])
def test_encoder_and_decoder_of_a_seed_start_equal(preset: str) -> None:
    encoder, decoder, of_other_seed = (
        tiny_model(preset=preset, **fields).state_dict()
        for fields in ({}, {"mode": "decoder"}, {"seed": 2})
    )
    assert encoder.keys() == decoder.keys()
    assert all(torch.equal(encoder[name], decoder[name]) for name in encoder)
    assert not torch.equal(next(iter(of_other_seed.values())), next(iter(encoder.values())))


def test_building_leaves_the_random_numbers_of_others_alone() -> None:
    before = torch.get_rng_state()
    tiny_model()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["pre", "post", "gpt2", "gpt_neox", "llama", "phi3"])
def test_no_later_token_moves_an_earlier_logit(architecture: str, attention: str) -> None:
    """To the last bit, from whatever start."""
    model = tiny_model(architecture, mode="decoder", attention=attention).eval()
    assert model.config._attn_implementation == attention
    torch.manual_seed(0)
    tokens = torch.randint(4, VOCABULARY, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = torch.randint(4, VOCABULARY, (2, 7))
    for kind in STARTS:
        wqk.initialize_(model, STARTS[kind], seed=1)
        with torch.no_grad():
            before, after = (model(input_ids=ids).logits for ids in (tokens, changed))
        assert (before[:, :9] - after[:, :9]).abs().max().item() == 0.0, kind
        assert (before[:, 9:] - after[:, 9:]).abs().max().item() > 1e-3


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_an_encoder_looks_both_ways(norm: str) -> None:
    model = tiny_model(norm).eval()
    tokens = torch.arange(4, 20)[None]
    changed = tokens.clone()
    changed[0, -1] = 30
    difference = model(input_ids=tokens).logits - model(input_ids=changed).logits
    assert difference[0, 0].abs().max() > 0


def test_a_model_is_as_large_as_its_recipe_and_vocabulary() -> None:
    config = tiny_model(preset="paper").config
    assert config.model_type == "bert"
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (32, 2, 128)
    assert (config.vocab_size, config.pad_token_id) == (VOCABULARY, 0)
    assert (config.max_position_embeddings, config.hidden_act) == (16, "gelu")
    assert config.layer_norm_eps == 1e-12
    assert (config.use_cache, config.is_decoder, config.type_vocab_size) == (False, False, 2)
    decoder = tiny_model(dropout=0.25, initial_std=0.5, mode="decoder").config
    dropouts = (decoder.hidden_dropout_prob, decoder.attention_probs_dropout_prob)
    assert (*dropouts, decoder.initializer_range) == (0.25, 0.25, 0.5)
    assert (decoder.use_cache, decoder.is_decoder, decoder.type_vocab_size) == (False, True, 1)
    assert not tiny_model("gpt2", mode="decoder").config.use_cache
    assert tiny_model(vocabulary_multiple=7).config.vocab_size == 42
    pre = tiny_model().config
    assert (pre.model_type, pre.max_position_embeddings) == ("roberta-prelayernorm", 17)


@pytest.mark.parametrize(("mode", "config", "message"), NO_MODEL)
def test_configurations_that_make_no_model(mode: str, config: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        tiny_model(mode=mode, config=config)


def test_a_checkpoint_without_a_tensor_is_not_gone_on_from(tmp_path: Path) -> None:
    """transformers draws what is missing at random: the run would go on as another one."""
    model = tiny_model()
    model.save_pretrained(tmp_path)
    assert load_checkpoint(tmp_path, model) == {}
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("query.weight"))
    del tensors[gone]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError, match=f"1 tensors do not fit, {gone} for one"):
        load_checkpoint(tmp_path, model)
