"""Labels of heads, of an induction circuit that is built by hand and of a trained one."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.live.models import bert, llama

import wqk
from wqk.errors import CheckpointError, FormError

TOKENS = 16  # of the vocabulary, and the number of positions
# Parts of the stream: the token, its position, and the token before.
TOKEN, POSITION, BEFORE = (slice(TOKENS * n, TOKENS * (n + 1)) for n in range(3))
WIDTH = 3 * TOKENS


def induction() -> Any:
    """A GPT-2 of two layers whose heads 0 are a previous-token head and an induction head.

    Layer 0 copies the token before into a part of the stream of its own; layer 1 attends from a
    token to where this token came before, and copies the token there. Other heads are zero.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": WIDTH, "n_layer": 2, "n_head": 3, "n_positions": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=TOKENS)).double().eval()
    eye, shifted = torch.eye(TOKENS).double(), torch.eye(TOKENS).double().roll(1, 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" not in name:
                parameter.zero_()
        model.transformer.wte.weight[:, TOKEN] = eye
        model.transformer.wpe.weight[:, POSITION] = eye
        first, second = (block.attn for block in model.transformer.h)
        query, key, value = (slice(WIDTH * n, WIDTH * n + TOKENS) for n in range(3))
        first.c_attn.weight[POSITION, query] = 10 * eye
        first.c_attn.weight[POSITION, key] = shifted  # position j looks like j + 1
        first.c_attn.weight[TOKEN, value] = eye
        first.c_proj.weight[:TOKENS, BEFORE] = eye
        second.c_attn.weight[TOKEN, query] = 10 * eye
        second.c_attn.weight[BEFORE, key] = eye
        second.c_attn.weight[TOKEN, value] = eye
        second.c_proj.weight[:TOKENS, TOKEN] = eye
    return model


def test_a_circuit_built_by_hand_has_the_labels_of_its_making() -> None:
    labels = wqk.label_heads(induction())
    assert {(head.layer, head.head): head.labels for head in labels.heads} == {
        (0, 0): ("previous_token",),
        (0, 1): (),
        (0, 2): (),
        (1, 0): ("induction", "copying"),
        (1, 1): (),
        (1, 2): (),
    }
    (induction_head,) = labels.of("induction")
    assert induction_head.induction > 0.9
    assert induction_head.copying == pytest.approx(1.0)
    assert labels.heads[0].copying == 0, "it writes nothing that is read as a token"
    assert "1 previous-token, 0 duplicate-token, 1 induction" in labels.sentence


@pytest.mark.parametrize(
    ("layer", "sign", "label"), [(1, -1, None), (1, 1, "copying")], ids=["erases", "copies"]
)
def test_copying_has_the_sign_of_what_is_written(layer: int, sign: int, label: str | None) -> None:
    model = induction()
    with torch.no_grad():
        model.transformer.h[layer].attn.c_proj.weight.mul_(sign)
    head = wqk.label_heads(model).heads[3]
    assert head.copying == pytest.approx(sign)
    assert ("copying" in head.labels) == (label is not None)


def trained() -> Any:
    """The induction model that comes with the package: attention alone, as a Llama without MLPs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = Path(wqk.demo_model("induction"))
    config = json.loads((folder / "config.json").read_text())
    model = LlamaForCausalLM(LlamaConfig(**config, intermediate_size=8)).eval()
    missing = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert all("mlp" in name or "post_att" in name for name in missing.missing_keys)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_a_trained_induction_model_has_its_two_kinds_of_heads(kernel: str) -> None:
    model = trained()
    model.set_attn_implementation(kernel)
    labels = wqk.label_heads(model, period=20)
    assert {head.layer for head in labels.of("previous_token")} == {0}
    assert {head.layer for head in labels.of("induction")} == {1}
    assert {head.layer for head in labels.of("copying")} == {1}
    # The same scores from the attention that the model returns itself.
    model.set_attn_implementation("eager")
    tokens = torch.stack([torch.randperm(32)[:20] for _ in range(4)]).repeat(1, 2)
    with torch.no_grad():
        attention = model(tokens, output_attentions=True).attentions
    queries = torch.arange(20, 40)
    for head in labels.heads:
        weights = attention[head.layer][:, head.head]
        induction_score = float(weights[:, queries, queries - 19].mean())
        assert head.induction == pytest.approx(induction_score, abs=0.05)
        assert head.first_token == pytest.approx(float(weights[:, 20:, 0].mean()), abs=0.05)


def test_copying_is_that_of_the_whole_matrix_over_the_vocabulary() -> None:
    model = trained()
    labels = wqk.label_heads(model, period=8)
    embeddings = model.model.embed_tokens.weight.double()
    unembeddings = model.lm_head.weight.double()
    for head in labels.heads:
        layer = model.model.layers[head.layer]
        rows = slice(16 * head.head, 16 * head.head + 16)
        gain = layer.input_layernorm.weight.double()
        value = layer.self_attn.v_proj.weight.double()[rows].T * gain[:, None]
        output = layer.self_attn.o_proj.weight.double()[:, rows].T
        matrix = embeddings @ value @ output @ unembeddings.T
        eigenvalues = torch.linalg.eigvals(matrix.detach()).numpy()
        expected = eigenvalues.real.sum() / np.abs(eigenvalues).sum()
        assert head.copying == pytest.approx(expected, abs=1e-4)


def test_settings_that_mean_nothing_and_models_without_tokens_are_refused() -> None:
    with pytest.raises(FormError, match="threshold: expected a number in"):
        wqk.label_heads(llama(), threshold=0)
    with pytest.raises(FormError, match="period and sequences"):
        wqk.label_heads(llama(), period=1)
    with pytest.raises(FormError, match="'sink' is unknown; expected one of previous_token"):
        wqk.label_heads(llama(), period=4).of("sink")
    broken = bert()
    broken.embeddings.word_embeddings = torch.nn.Embedding(2, 32)  # fewer than its configuration
    assert len(wqk.label_heads(broken, period=4)) == 8
    with pytest.raises(CheckpointError, match="no single table of token embeddings of width 32"):
        wqk.label_heads(torch.nn.TransformerEncoderLayer(32, 4, 16))


def test_a_text_too_short_to_repeat_two_tokens_is_refused() -> None:
    """In a period of one token, every key is the previous token and the same token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50, n_positions=3)
    with pytest.raises(CheckpointError, match="50 tokens and 3 positions; expected at least 2"):
        wqk.label_heads(GPT2LMHeadModel(config).eval())
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50, n_positions=5)
    assert len(wqk.label_heads(GPT2LMHeadModel(config).eval())) == 2


@pytest.mark.parametrize("config", [SimpleNamespace(n_head=4), {"n_head": 4}])
def test_a_module_with_a_configuration_of_its_own_is_labeled(config: Any) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 16, dropout=0.0, batch_first=True)
    embeddings = torch.nn.Embedding(50, 32)
    model = torch.nn.Sequential(OrderedDict(embed_tokens=embeddings, layer=layer)).eval()
    model.config = config
    assert len(wqk.label_heads(model, period=8)) == 4


def test_weights_that_are_not_numbers_give_scores_that_are_not() -> None:
    model = llama().eval()
    torch.nn.init.constant_(model.layers[1].self_attn.q_proj.weight, float("nan"))
    labels = wqk.label_heads(model, period=4)
    assert {np.isnan(head.induction) for head in labels.heads if head.layer == 1} == {True}
    assert not any(np.isnan(head.induction) for head in labels.heads if head.layer == 0)


def test_a_stored_model_is_loaded_with_its_head_and_without_absent_mlps() -> None:
    expected = wqk.label_heads(trained())
    for reference in (wqk.demo_model("induction"), "demo:induction", wqk.open("demo:induction")):
        labels = wqk.label_heads(reference)
        assert labels.notes == (
            "the weights of all MLPs are absent or zero: the model was run with attention alone",
        )
        for head, other in zip(labels.heads, expected.heads, strict=True):
            assert head.labels == other.labels
            assert head.induction == pytest.approx(other.induction, abs=1e-5)
            assert head.copying == pytest.approx(other.copying, abs=1e-5)


def test_a_folder_has_the_labels_of_the_module_that_was_saved(tmp_path: Path) -> None:
    model = induction()
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.bias[-1] = 1e-3
    model.save_pretrained(tmp_path)
    labels = wqk.label_heads(tmp_path)
    assert labels.notes == ()
    for head, other in zip(labels.heads, wqk.label_heads(model).heads, strict=True):
        assert head.row() == pytest.approx(other.row())


def test_a_checkpoint_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lacks .* that the model runs with"):
        wqk.label_heads("demo:encoder")
    with pytest.raises(CheckpointError, match="no such file or folder"):
        wqk.label_heads(tmp_path / "absent")


def test_parts_runs_a_model_without_mlps() -> None:
    tokens = torch.stack([torch.randperm(32)[:20] for _ in range(8)]).repeat(1, 2)
    parts = wqk.parts("demo:induction", tokens=tokens)
    loss = dict(parts.shares.select("part", "loss").iter_rows())
    assert loss["whole"] < loss["none"]
