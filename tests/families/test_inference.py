"""Families guessed from tensor names: right where names tell, said so, refused elsewhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.stand_in import Module

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError

D, HEADS, KEY_HEADS, WIDTH = 12, 4, 2, 3

# Foreign spellings of a query and the key beside it.
SEPARATE = {
    "openai-whisper": ("decoder.blocks.{}.attn.query", "decoder.blocks.{}.attn.key"),
    "llama2.c": ("layers.{}.attention.wq", "layers.{}.attention.wk"),
    "query_dense": ("bert/layer.{}.query_dense", "bert/layer.{}.key_dense"),
    "Wq": ("net.{}.mixer.Wq", "net.{}.mixer.Wk"),
    "to_q": ("transformer.layers.{}.0.to_q", "transformer.layers.{}.0.to_k"),
    "fairseq": ("encoder.sentence_encoder.layers.{}.self_attn.q_proj",
                "encoder.sentence_encoder.layers.{}.self_attn.k_proj"),
    "queries": ("stack.{}.queries", "stack.{}.keys"),
}  # fmt: skip
FUSED = {
    "timm": ("blocks.{}.attn.qkv.weight", "sectioned"),
    "minGPT": ("transformer.h.{}.attn.c_attn.weight", "sectioned"),
    "nn.MultiheadAttention": ("encoder.layers.{}.self_attn.in_proj_weight", "sectioned"),
    "NeoX": ("model.layers.{}.attention.query_key_value.weight", "grouped"),
    "Conv1D": ("h.{}.attn.c_attn.weight", "conv1d"),
}
CONFIG = {"model_type": "nobody-knows", "n_heads": HEADS}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape)


def check(model: Module, query: np.ndarray, key: np.ndarray, *, key_heads: int = HEADS) -> None:
    """The forms read from the model are those of these weights (H·R, D) and (G·R, D)."""
    for layer in range(2):
        attention = wqk.open(model).block(layer, kind="self")
        width = query.shape[0] // HEADS
        for head in range(HEADS):
            shared = head // (HEADS // key_heads)
            expected = (
                query[head * width : (head + 1) * width].T
                @ key[shared * width : (shared + 1) * width]
            )
            np.testing.assert_allclose(attention[head].dense(), expected, atol=1e-12)


@pytest.mark.parametrize("names", SEPARATE.values(), ids=SEPARATE)
def test_siblings_are_queries_and_keys(names: tuple[str, str]) -> None:
    query, key = draw(HEADS * WIDTH, D), draw(KEY_HEADS * WIDTH, D)
    tensors = {
        name.format(layer) + ".weight": weight
        for layer in range(2)
        for name, weight in zip(names, (query, key), strict=True)
    }
    model = Module(tensors, {**CONFIG, "n_kv_heads": KEY_HEADS})
    check(model, query, key, key_heads=KEY_HEADS)
    table = wqk.scan(model)
    assert set(table.frame["family"]) == {"inferred"}
    assert "confidence high" in table.metadata["inferred"][0]


@pytest.mark.parametrize(("name", "layout"), FUSED.values(), ids=FUSED)
def test_fused_weights_are_taken_apart(name: str, layout: str) -> None:
    query, key, value = (draw(HEADS * WIDTH, D + n)[:, :D] for n in range(3))
    if layout == "grouped":
        heads = zip(*(np.split(w, HEADS) for w in (query, key, value)), strict=True)
        fused = np.concatenate([part for head in heads for part in head])
    else:
        fused = np.concatenate([query, key, value])
    fused = fused.T if layout == "conv1d" else fused
    model = Module({name.format(layer): fused for layer in range(2)}, CONFIG)
    check(model, query, key)
    assert "confidence medium" in wqk.scan(model).metadata["inferred"][0]


def test_a_bare_state_dict_needs_the_number_of_heads() -> None:
    tensors = {f"layers.0.attn.{role}_proj.weight": draw(D, D) for role in "qk"}
    with pytest.raises(wqk.errors.UnknownFamily, match="heads_per_layer=N"):
        wqk.scan(tensors)
    assert wqk.scan(wqk.open(tensors, heads_per_layer=3)).heads.frame.height == 3


def test_towers_and_cross_attention_are_told_apart() -> None:
    names = ["encoder.blocks.0.attn", "decoder.blocks.0.attn", "decoder.blocks.0.cross_attn"]
    tensors = {f"{n}.{role}.weight": draw(D, D) for n in names for role in ("query", "key")}
    plans = wqk.open(open_checkpoint(Module(tensors, {"n_audio_head": 4, "n_text_head": 3}))).plans
    assert [(p.stack, p.kind, p.query.heads) for p in plans] == [
        ("encoder", "self", 4),
        ("decoder", "self", 3),
        ("decoder", "cross", 3),
    ]


def test_a_known_type_with_foreign_names_is_guessed_too() -> None:
    tensors = {f"layers.0.attention.w{role}.weight": draw(D, D) for role in "qk"}
    table = wqk.scan(Module(tensors, {"model_type": "llama", "num_attention_heads": 3}))
    assert set(table.frame["family"]) == {"inferred"}


@pytest.mark.parametrize("names", [["sequence.0.weight"], ["q_proj.weight"], ["h.0.q.weight"]])
def test_what_cannot_be_guessed_is_refused(names: list[str]) -> None:
    with pytest.raises(wqk.errors.UnknownFamily, match="has a query's name next to a key"):
        wqk.scan(Module({name: draw(D, D) for name in names}, CONFIG))


def test_a_guessed_family_gives_a_real_models_own_attention(shared: Path, tmp_path: Path) -> None:
    # minGPT is no transformers model, but computes what GPT-2 does: the same weights, transposed
    # and renamed, are verified as GPT-2, and must have the same forms as the guess.
    transformers = pytest.importorskip("transformers")
    from safetensors.numpy import load_file, save_file

    from wqk.live.verification import verify

    source = shared / "checkpoints" / "gpt-nano-sort"
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    tensors = {
        name: np.ascontiguousarray(value.T) if name.endswith(transposed) else value
        for name, value in load_file(source / "model.safetensors").items()
    }
    vocabulary, width = tensors["transformer.wte.weight"].shape
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=len(tensors["transformer.wpe.weight"]),
        n_embd=width,
        n_layer=3,
        n_head=3,
        tie_word_embeddings=False,
        architectures=["GPT2LMHeadModel"],
    )
    config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert verify(tmp_path, length=8).ok
    columns = ["layer", "head", "norm", "symmetry", "directionality"]
    guessed, proven = (wqk.scan(ref).frame.select(columns) for ref in (source, tmp_path))
    assert guessed.equals(proven)


def test_layers_whose_weights_are_in_another_form_are_not_left_out() -> None:
    tensors = {f"layers.{n}.attn.{r}_proj.weight": draw(D, D) for n in range(2) for r in "qk"}
    for form in ("qweight", "weight_packed", "base_layer.weight"):
        names = {
            name: name.replace("1.attn.q_proj.weight", f"1.attn.q_proj.{form}") for name in tensors
        }
        mixed = {names[name]: weight for name, weight in tensors.items()}
        with pytest.raises(CheckpointError, match=rf"incomplete, 'layers.1.attn.q_proj.{form}'"):
            wqk.scan(wqk.open(mixed, heads_per_layer=3))
