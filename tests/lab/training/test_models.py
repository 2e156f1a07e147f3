"""Models: equal starts, no look ahead, and configurations of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import wqk
from wqk.errors import RunError
from wqk_lab.training.initializations import STARTS
from wqk_lab.training.models import build_model, load_checkpoint

VOCABULARY = 40
SPECIAL = {"padding": 0, "mask": 1, "unknown": 2, "separator": 3}

CAUSAL_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    },
}


def decoder(tiny: Any, architecture: str, **overrides: Any) -> Any:
    if architecture in CAUSAL_CONFIGS:
        recipe = tiny(mode="decoder", config=CAUSAL_CONFIGS[architecture], **overrides)
    else:
        recipe = tiny(mode="decoder", norm=architecture, **overrides)
    return build_model(recipe, VOCABULARY, SPECIAL)


@pytest.mark.parametrize("preset", ["paper", "fast"])
def test_encoder_and_decoder_of_a_seed_start_equal(preset: str, tiny: Any) -> None:
    pair = [build_model(tiny(preset, mode=m), VOCABULARY, SPECIAL) for m in ("encoder", "decoder")]
    encoder, decoder = (model.state_dict() for model in pair)
    assert encoder.keys() == decoder.keys()
    assert all(torch.equal(encoder[name], decoder[name]) for name in encoder)
    other = build_model(tiny(preset, seed=2), VOCABULARY, SPECIAL).state_dict()
    assert not torch.equal(next(iter(other.values())), next(iter(encoder.values())))


def test_building_leaves_the_random_numbers_of_others_alone(tiny: Any) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    build_model(tiny(), VOCABULARY, SPECIAL)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("kind", STARTS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["pre", "post", *CAUSAL_CONFIGS])
def test_no_later_token_moves_an_earlier_logit(
    architecture: str, attention: str, kind: str, tiny: Any
) -> None:
    model = decoder(tiny, architecture, attention=attention).eval()
    wqk.initialize_(model, STARTS[kind], seed=1)
    torch.manual_seed(0)
    tokens = torch.randint(4, VOCABULARY, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = torch.randint(4, VOCABULARY, (2, 7))
    with torch.no_grad():
        before, after = (model(input_ids=ids).logits for ids in (tokens, changed))
    assert (before[:, :9] - after[:, :9]).abs().max().item() == 0.0
    assert (before[:, 9:] - after[:, 9:]).abs().max().item() > 1e-3


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_an_encoder_looks_both_ways(norm: str, tiny: Any) -> None:
    model = build_model(tiny(norm=norm), VOCABULARY, SPECIAL).eval()
    tokens = torch.arange(4, 20)[None]
    changed = tokens.clone()
    changed[0, -1] = 30
    difference = model(input_ids=tokens).logits - model(input_ids=changed).logits
    assert difference[0, 0].abs().max() > 0


def test_a_model_is_as_large_as_its_recipe_and_vocabulary(tiny: Any) -> None:
    config = build_model(tiny("paper"), VOCABULARY, SPECIAL).config
    assert config.model_type == "bert"
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (32, 2, 128)
    assert (config.vocab_size, config.pad_token_id) == (VOCABULARY, 0)
    assert (config.max_position_embeddings, config.hidden_act) == (16, "gelu")
    assert config.layer_norm_eps == 1e-12
    pre = build_model(tiny(), VOCABULARY, SPECIAL).config
    assert (pre.model_type, pre.max_position_embeddings) == ("roberta-prelayernorm", 17)


@pytest.mark.parametrize(
    ("mode", "config", "message"),
    [
        ("encoder", {"model_type": "llama", "hidden_size": 32}, "the encoder of type llama"),
        ("decoder", {"model_type": "vit"}, "the decoder of type vit"),
        ("decoder", {"model_type": "nonsense"}, "must be known to transformers; got 'nonsense'"),
        ("decoder", {"hidden_size": 32}, "must be known to transformers; got None"),
        ("decoder", {"model_type": "gpt2", "n_positions": 8}, "the configuration has 8"),
        ("decoder", {"model_type": "gpt2", "n_embd": "wide"}, "from this configuration .*wide"),
    ],
)
def test_configurations_that_make_no_model(
    mode: str, config: dict[str, Any], message: str, tiny: Any
) -> None:
    with pytest.raises(RunError, match=message):
        build_model(tiny(mode=mode, config=config), VOCABULARY, SPECIAL)


def test_a_checkpoint_without_a_tensor_is_not_gone_on_from(tiny: Any, tmp_path: Path) -> None:
    """transformers draws what is missing at random: the run would go on as another one."""
    model = build_model(tiny(), VOCABULARY, SPECIAL)
    model.save_pretrained(tmp_path)
    assert load_checkpoint(tmp_path, model) == {}
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if name.endswith("query.weight"))
    save_file(
        {n: t for n, t in tensors.items() if n != gone},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(RunError, match=f"1 tensors do not fit, {gone} for one"):
        load_checkpoint(tmp_path, model)
