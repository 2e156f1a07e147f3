"""Every adapter that the installed PEFT can save is read as PEFT merges it, or refused."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from tests import small

from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.adapters import STORED_IN_OUT, WITHOUT_EFFECT, read_adapter
from wqk.checkpoints.formats import local_folder
from wqk.errors import CheckpointError
from wqk.families import families

pytestmark = pytest.mark.filterwarnings("ignore")

VARIANTS = tomllib.loads(Path(__file__).with_name("variants.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("peft")
    # As many key heads as heads: weights are square; only the module's kind shows (in, out).
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    sizes |= {"hidden_size": 32, "intermediate_size": 24, "vocab_size": 40}
    for config in (
        transformers.Qwen2Config(**sizes, tie_word_embeddings=False),
        transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=40, n_positions=16),
    ):
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():  # biases start at zero
            parameter.data.normal_(std=0.1)
        model.save_pretrained(folder / config.model_type)
    return folder


def saved(base: Path, folder: Path, options: dict[str, Any]) -> Any:
    """The adapter's model after noise on all that it trains, and whether PEFT could be asked."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj"], **options}
    adapted = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config))
    generator = torch.Generator().manual_seed(1)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    adapted.save_pretrained(folder)
    return adapted


@pytest.mark.parametrize(
    ("is_read", "options"),
    [(kind == "read", options) for kind, row in VARIANTS.items() for options in row],
    ids=lambda value: str(value)[:60],
)
def test_what_peft_saves_is_read_as_it_merges_or_refused(bases, tmp_path, is_read, options):
    base = bases / ("gpt2" if "c_attn" in options.get("target_modules", ()) else "qwen2")
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    if not options.keys() <= fields:
        pytest.skip("the installed PEFT is too old for it")
    adapted = saved(base, tmp_path / "adapter", options)
    if not is_read:
        with pytest.raises(CheckpointError, match="merge it into its base"):
            open_checkpoint(tmp_path / "adapter")
        return
    checkpoint = open_checkpoint(tmp_path / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    plain = open_checkpoint(base)
    changed = 0
    for name, info in checkpoint.tensors().items():
        (read,) = checkpoint.read([Part(name)])
        assert read.shape == info.shape
        np.testing.assert_allclose(read, merged[name].numpy(), rtol=1e-4, atol=1e-5, err_msg=name)
        changed += not np.allclose(read, plain.read([Part(name)])[0])
    assert changed


def rename_keys(folder: Path, rename: dict[str, str]) -> None:
    """Rename the tensors of a saved adapter whose names contain one of these texts."""
    numpy = pytest.importorskip("safetensors.numpy")
    path = folder / "adapter_model.safetensors"
    renamed = {}
    for name, value in numpy.load_file(path).items():
        for old, new in rename.items():
            name = name.replace(old, new)
        renamed[name] = value
    numpy.save_file(renamed, path)


def merged_by_peft(base: Path, adapter: Path) -> dict[str, np.ndarray]:
    """The weights that PEFT ends with when it loads an adapter and merges it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return {name: value.detach().numpy() for name, value in merged.state_dict().items()}


@pytest.mark.parametrize("prefix", ["language_model.", "base_model.model.", "a.b."])
def test_keys_under_another_prefix_are_not_applied_as_in_peft(bases, tmp_path, prefix):
    base, adapter = bases / "qwen2", tmp_path / "adapter"
    saved(base, adapter, {})
    first_layer = ".model.model.layers.0."
    rename_keys(adapter, {first_layer: f".model.{prefix}model.layers.0."})
    checkpoint = open_checkpoint(adapter)
    merged = merged_by_peft(base, adapter)
    for name in (f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)):
        (read,) = checkpoint.read([Part(name)])
        np.testing.assert_allclose(read, merged[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert any("2 adapted modules" in note and "not applied" in note for note in checkpoint.notes)
    rename_keys(adapter, {".model.model.layers.1.": f".model.{prefix}model.layers.1."})
    with pytest.raises(CheckpointError, match=r"its keys match no module of .*rename the keys"):
        open_checkpoint(adapter)


def test_the_prefix_of_a_model_with_a_head_may_be_missing_in_the_base_file(bases, tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    transformers.AutoModel.from_pretrained(bases / "qwen2").save_pretrained(base)
    saved(base, adapter, {})
    name = "layers.1.self_attn.k_proj.weight"
    (read,) = open_checkpoint(adapter).read([Part(name)])
    merged = merged_by_peft(base, adapter)
    np.testing.assert_allclose(read, merged[f"model.{name}"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [str(kind.value) for kind in peft.PeftType])
def test_every_type_but_lora_is_refused(tmp_path: Path, kind: str):
    factors = {"q_proj.lora_A.weight": np.ones((2, 8), np.float32)}
    small.adapter(tmp_path, "owner/name", factors, peft_type=kind)
    if kind == "LORA":
        assert read_adapter(local_folder(tmp_path)) is not None
        return
    with pytest.raises(CheckpointError, match=rf"\({kind}\) other than W"):
        read_adapter(local_folder(tmp_path))


def test_every_option_of_lora_is_known_to_be_harmless_or_refused(tmp_path: Path):
    """Those that PEFT itself marks as variants are none of the harmless ones."""
    options = dataclasses.fields(peft.LoraConfig)
    variants = {option.name for option in options if option.metadata.get("is_lora_variant")}
    assert not variants & WITHOUT_EFFECT
    assert WITHOUT_EFFECT - {option.name for option in options} <= {"auto_mapping", "peft_version"}
    default = peft.LoraConfig().to_dict()
    assert not [key for key in default.keys() - WITHOUT_EFFECT if default[key]]


def test_models_that_store_in_out_are_those_of_the_families():
    conv1d = {
        kind
        for family in families().values()
        for kind in family.model_types
        if any(rule.layout == "conv1d" for rule in family.attention)
    }
    assert conv1d <= STORED_IN_OUT | {"nanogpt"}
