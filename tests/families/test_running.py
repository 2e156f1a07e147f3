"""Models that cannot be run to be verified, and what is then said."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
import transformers
from tests.families.architectures import NAMED
from tests.families.proving import edit_config, save
from tests.families.test_derived import outcomes

import wqk
from wqk.errors import CheckpointError, FormError, MissingPackage, UnknownFamily
from wqk.families import families
from wqk.live.verification import verify


def test_a_model_that_transformers_does_not_know(tmp_path: Path) -> None:
    save(NAMED["llama"], tmp_path)
    edit_config(tmp_path, {"model_type": "nobody"})
    llama = resources.files("wqk.families") / "data" / "llama.toml"
    with pytest.raises(UnknownFamily, match=r"type 'nobody'.*wqk.verify\(model, batch\)"):
        verify(wqk.open(tmp_path, family=Path(str(llama))))


# Model types that transformers lacks, and the type whose attention their publishers' classes
# inherit or repeat.
REPEATED = {
    "Dream": "qwen2",
    "a2d-llama": "llama",
    "a2d-qwen2": "qwen2",
    "a2d-qwen3": "qwen3",
    "kimi_k2": "deepseek_v3",
    "mobilellm": "llama",
    "sdar": "qwen3",
}


def test_only_types_that_transformers_lacks_run_with_the_code_of_another() -> None:
    """A family that is like another, of types with code of their own, inherits no such code.

    An older transformers, which lacks the code, would otherwise run another model.
    """
    types_of_transformers = {row["type"] for row in outcomes()}
    repeated = {}
    for family in families().values():
        lacking = [kind for kind in family.model_types if kind not in types_of_transformers]
        if family.runs_as:
            assert lacking, f'{family.name} runs as {family.runs_as}; write runs_as = ""'
            assert family.runs_as in types_of_transformers
            repeated |= dict.fromkeys(lacking, family.runs_as)
    assert repeated == REPEATED


def test_transformers_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(NAMED["bert"], tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingPackage, match="needs transformers: pip install"):
        verify(tmp_path)


def test_what_is_run_is_a_folder(tmp_path: Path) -> None:
    model = save(NAMED["bert"], tmp_path)
    for ref in (model, tmp_path / "model.safetensors"):
        with pytest.raises(CheckpointError, match="pass the folder"):
            verify(ref)


def test_a_model_of_few_positions_is_given_a_short_text(tmp_path: Path) -> None:
    roberta = NAMED["roberta"]
    save(replace(roberta, config=roberta.config | {"max_position_embeddings": 9}), tmp_path)
    assert verify(tmp_path).ok


def test_a_text_longer_than_the_model_s_positions(tmp_path: Path) -> None:
    roberta = NAMED["roberta"]  # counts from the position after that of its padding
    short = {"max_position_embeddings": 9, "pad_token_id": 1}
    save(replace(roberta, config=roberta.config | short), tmp_path)
    assert verify(tmp_path, tokens=range(4, 11)).ok
    with pytest.raises(FormError, match="at most 7, as many as the model has positions for"):
        verify(tmp_path, tokens=range(4, 12))
    assert not torch.nn.modules.module._global_forward_hooks  # of a run that failed


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing:FutureWarning")
def test_an_adapter_is_run_on_its_base_model(tmp_path, monkeypatch):
    import peft

    llama = NAMED["llama"]
    model = save(replace(llama, model="LlamaForCausalLM"), tmp_path / "base")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, lora)
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "adapter")
    verification = verify(tmp_path / "adapter")
    assert len(verification.blocks) == llama.block_count
    assert verification.ok
    assert verification.difference < 1e-12
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="its base model is missing"):
        verify(tmp_path / "adapter")
    assert verify(wqk.open(tmp_path / "adapter", base=tmp_path / "moved")).ok
    (tmp_path / "moved").rename(tmp_path / "base")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingPackage, match=r"adapter: .* PEFT: pip install peft"):
        verify(tmp_path / "adapter")


def test_a_configuration_is_not_made_up(tmp_path: Path) -> None:
    model = save(NAMED["bert"], tmp_path / "saved")
    held = {"state_dict": model.state_dict(), "hyper_parameters": model.config.to_dict()}
    (tmp_path / "trained").mkdir()
    torch.save(held, tmp_path / "trained" / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"there is no config\.json"):
        verify(tmp_path / "trained")


def test_a_model_that_predicts_several_tokens_at_once_is_compared_in_its_first_stream(tmp_path):
    config = transformers.ProphetNetConfig(
        vocab_size=64,
        hidden_size=32,
        max_position_embeddings=64,
        encoder_ffn_dim=32,
        num_encoder_layers=1,
        num_encoder_attention_heads=4,
        decoder_ffn_dim=32,
        num_decoder_layers=2,
        num_decoder_attention_heads=2,
    )
    transformers.ProphetNetModel(config).save_pretrained(tmp_path)
    blocks = [b for b in wqk.verify(tmp_path).blocks if (b.stack, b.kind) == ("decoder", "self")]
    assert len(blocks) == 2
    assert all(block.verdict == "right" for block in blocks)


def test_a_checkpoint_of_a_torch_archive_in_float32_is_run(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=20, n_embd=32, n_layer=2, n_head=4, n_positions=32)
    config.save_pretrained(tmp_path)
    state = transformers.GPT2LMHeadModel(config).state_dict()
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert wqk.verify(tmp_path).verdict in ("right", "too uniform to tell")
