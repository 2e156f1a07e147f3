"""Files of other libraries: each holds a model whose attention is known by another route."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests import small
from tests.small import sizes

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.library_formats import FORMATS, Format
from wqk.errors import CheckpointError
from wqk.sameness.same import same

REFUSED = {
    "model.onnx": "ONNX",
    "model.onnx_data": "ONNX",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt": "DeepSpeed",
    "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "DeepSpeed",
    "mp_rank_00_model_states.pt": "DeepSpeed",
    "zero_to_fp32.py": "DeepSpeed",
    "model_optim_rng.pt": "Megatron-LM",
    "tf_model.h5": "TensorFlow",
    "model.ckpt.index": "TensorFlow",
    "model.ckpt-1000.data-00000-of-00001": "TensorFlow",
    "saved_model.pb": "TensorFlow",
    "flax_model.msgpack": "Flax",
    "flax_model-00001-of-00002.msgpack": "Flax",
    "_CHECKPOINT_METADATA": "Flax",
}

LAYERS, D, H, G, R, V = 2, 48, 6, 2, 8, 40
Tensors = dict[str, torch.Tensor]
# LLaMA's own names, and those of transformers.
NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}
SHAPES = {
    "attention.wq": (H * R, D),
    "attention.wk": (G * R, D),
    "attention.wv": (G * R, D),
    "attention.wo": (D, H * R),
    "attention_norm": (D,),
    "ffn_norm": (D,),
    "feed_forward.w1": (64, D),
    "feed_forward.w2": (D, 64),
    "feed_forward.w3": (64, D),
}
PARAMS = {
    "dim": D,
    "n_layers": LAYERS,
    "n_heads": H,
    "n_kv_heads": G,
    "vocab_size": V,
    "norm_eps": 1e-5,
}


def original() -> Tensors:
    """A tiny LLaMA with grouped heads under its own names; rotated pairs side by side."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        f"layers.{layer}.{kind}.weight": shape
        for layer in range(LAYERS)
        for kind, shape in SHAPES.items()
    }
    shapes |= {
        "tok_embeddings.weight": (V, D),
        "norm.weight": (D,),
        "output.weight": (V, D),
    }
    return {
        name: torch.randn(shape, generator=generator) / D**0.5 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def halved(weight: torch.Tensor) -> torch.Tensor:
    """Rotated pairs R/2 apart instead of side by side, as transformers wants them."""
    return weight.reshape(-1, R // 2, 2, D).transpose(1, 2).reshape(-1, D).contiguous()


def twin(folder: Path, turn: Any = halved, tensors: Tensors | None = None, **config: Any) -> Path:
    """The same model as transformers saves it."""
    named = {}
    for name, value in (tensors or original()).items():
        for theirs, ours in NAMES.items():
            if theirs in name:
                value = turn(value) if theirs in ("attention.wq", "attention.wk") else value
                named[f"model.{name.replace(theirs, ours)}"] = value
    about = sizes(D, LAYERS, H, model_type="llama", num_key_value_heads=G, rms_norm_eps=1e-5)
    return small.save(folder, named, about | config)


def split(tensors: Tensors, parts: int, embeddings: int) -> list[Tensors]:
    """The model over tensor-parallel files, as LLaMA 2 (1) or LLaMA 3 (0) splits embeddings."""

    def piece(name: str, value: torch.Tensor, part: int) -> torch.Tensor:
        if value.ndim == 1:
            return value
        axis = 1 if name.endswith(("wo.weight", "w2.weight")) else 0
        axis = embeddings if name.startswith("tok_") else axis
        return value.chunk(parts, axis)[part].clone()

    return [{n: piece(n, v, part) for n, v in tensors.items()} for part in range(parts)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "original"
    path.mkdir()
    (path / "params.json").write_text(json.dumps(PARAMS))
    return path


@pytest.mark.parametrize(("parts", "embeddings"), [(1, 0), (2, 0), (2, 1)])
def test_llamas_original_files_are_their_twin(tmp_path, folder, parts, embeddings):
    for number, tensors in enumerate(split(original(), parts, embeddings)):
        torch.save(tensors, folder / f"consolidated.{number:02d}.pth")
    table = wqk.scan(folder, heads=True)
    assert set(table.frame["family"]) == {"llama-original"}
    assert table.frame["parameters"][0] == sum(t.numel() for t in original().values())
    comparison = wqk.same(twin(tmp_path / "twin"), folder)
    assert comparison.same, comparison.blocks[0].reason
    # Every tensor is whole, and any of its rows are read as they lie in it.
    checkpoint = open_checkpoint(folder)
    for name, value in original().items():
        np.testing.assert_array_equal(checkpoint.read([Part(name)])[0], value.numpy())
    rows = ((20, 30), (0, 3))
    chosen_rows = checkpoint.read([Part("layers.1.attention.wq.weight", rows)])[0]
    weight = original()["layers.1.attention.wq.weight"].numpy()
    np.testing.assert_array_equal(chosen_rows, np.concatenate([weight[a:b] for a, b in rows]))


def test_mistrals_single_file_is_its_twin(tmp_path: Path, folder: Path) -> None:
    save_file(original(), folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(PARAMS | {"head_dim": R}))
    assert wqk.same(twin(tmp_path / "twin", rope_theta=1e6), folder).same
    (folder / "params.json").write_text(json.dumps(PARAMS | {"head_dim": R, "sliding_window": 9}))
    assert wqk.same(twin(tmp_path / "twin", model_type="mistral", sliding_window=9), folder).same


def test_scaled_rotary_positions_of_llama_3(tmp_path: Path, folder: Path) -> None:
    save_file(original(), folder / "consolidated.safetensors")
    scaled = PARAMS | {"use_scaled_rope": True, "rope_theta": 5e5, "rope_high_freq_factor": 2}
    (folder / "params.json").write_text(json.dumps(scaled))
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 8192,
    }
    assert wqk.same(twin(tmp_path / "a", rope_theta=5e5, rope_scaling=scaling), folder).same
    assert not wqk.same(twin(tmp_path / "b", rope_theta=5e5), folder).same


def test_a_conversion_that_forgets_the_rotary_order_is_named(tmp_path: Path, folder: Path) -> None:
    save_file(original(), folder / "consolidated.safetensors")
    wrong = wqk.same(folder, twin(tmp_path / "twin", turn=lambda weight: weight))
    reason = "rotary order: stored interleaved, read as half"
    assert all(reason in block.reason for block in wrong.blocks)
    # The converter's function applied to the keys with the queries' number of heads.
    keys = twin(tmp_path / "keys", turn=lambda w: halved(w) if len(w) == H * R else w)
    assert "key weights alone" in wqk.same(folder, keys).blocks[0].reason


def test_parts_that_are_missing_are_noticed(folder: Path) -> None:
    first, second = split(original(), 2, 1)
    torch.save(first, folder / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"24 rows, and params\.json sets 6 heads of width 8"):
        wqk.scan(folder)
    torch.save(second, folder / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match="one of 2 files that each hold some rows"):
        wqk.scan(folder / "consolidated.00.pth")
    second["layers.0.attention.wq.weight"] = torch.zeros(24, D + 1)
    torch.save(second, folder / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match="do not fit together"):
        wqk.scan(folder)


@pytest.mark.parametrize("content", [struct.pack("<7i", 64, 172, 5, 8, 4, -512, 512), b"24ka"])
def test_files_of_llama2c_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.bin").write_bytes(content + bytes(4096))
    with pytest.raises(CheckpointError, match=r"a file of llama2\.c.*use the \.pt file"):
        open_checkpoint(tmp_path / "model.bin")


# Training scripts: the configuration is in the archive, next to the weights.


def test_nanogpts_archive_holds_its_configuration(tmp_path: Path) -> None:
    attn = "_orig_mod.transformer.h.0.attn.c_attn"
    arguments = {"n_layer": 1, "n_head": 3, "n_embd": 24, "block_size": 8, "bias": True}
    held = {
        "model": {f"{attn}.weight": torch.ones(72, 24), f"{attn}.bias": torch.ones(72)},
        "optimizer": {"state": {0: {"step": torch.ones(())}}},
        "model_args": arguments,
        "iter_num": 250,
        "best_val_loss": torch.ones(()),
        "config": {"n_head": 99},
    }
    torch.save(held, tmp_path / "ckpt.pt")
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.step, checkpoint.config["n_head"]) == (250, 3)
    assert min(checkpoint.tensors()) == "transformer.h.0.attn.c_attn.bias"
    assert set(wqk.scan(tmp_path).frame["family"]) == {"nanogpt"}
    # Of several parts of a trainer's configuration, one is the model's.
    parts = {"trainer": {"steps": 9}, "model": {"model_type": "gpt2", "n_head": 6}}
    torch.save({"model": held["model"], "config": parts}, tmp_path / "ckpt.pt")
    assert open_checkpoint(tmp_path).config == parts["model"]


@pytest.mark.parametrize("code", ["n_head : int = 6\nq = rms_norm(q)", ""])
def test_speed_runs_of_nanogpt_tell_their_heads_in_their_code(tmp_path: Path, code: str) -> None:
    names = [f"transformer.h.{n}.attn.c_{side}.weight" for n in range(2) for side in "qkv"]
    model = {name: torch.eye(48) for name in names}
    torch.save({"step": 9, "code": code, "model": model}, tmp_path / "state_step000009.pt")
    if not code:
        with pytest.raises(CheckpointError, match="lacks n_head"):
            wqk.scan(tmp_path)
        return
    frame = wqk.scan(tmp_path / "state_step000009.pt").frame
    assert {*frame["family"], *frame["heads"]} == {"modded-nanogpt", 6}
    assert set(frame["status"]) <= {"partial", "partial, random-looking"}


# Formats that are not read.


@pytest.mark.parametrize(("name", "format_name"), REFUSED.items())
def test_other_formats_are_refused_by_their_names(
    tmp_path: Path, name: str, format_name: str
) -> None:
    (tmp_path / name).write_bytes(b"anything")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=f"{format_name}.*; ") as caught:
        open_checkpoint(tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize("specification", ["TransformerDecoderSpec", "WhisperSpec"])
@pytest.mark.parametrize("as_file", [False, True])
def test_ctranslate2_is_refused_by_its_header(tmp_path, specification, as_file):
    """As its `ModelSpec.save` begins a file: version, name with its length, revision, variables."""
    name = specification.encode() + b"\0"
    header = struct.pack("<IH", 6, len(name)) + name + struct.pack("<II", 8, 2)
    (tmp_path / "model.bin").write_bytes(header + bytes(1000))
    (tmp_path / "config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(CheckpointError, match=rf"CTranslate2 model \({specification}\).*; use"):
        open_checkpoint(tmp_path / "model.bin" if as_file else tmp_path)


def test_an_export_to_onnx_in_a_folder_of_its_own_is_refused_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "decoder_model_merged.onnx").write_bytes(b"graph")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=r"ONNX; .* exported from"):
        open_checkpoint(tmp_path)


def test_gemma_as_its_authors_wrote_it(tmp_path: Path) -> None:
    """google/gemma_pytorch: one tensor for queries, keys and values, in a nested state dict."""
    sizes = {"heads": 4, "key_heads": 1, "head_width": 8, "width": 24}
    about = {"rms_norm_eps": 1e-6, "quant": False, "model_type": "gemma"}
    reference = small.llama(**sizes, sides="qkvo", norms=True, name="hf", **about)
    original_tensors: Tensors = {"embedder.weight": torch.ones(5, 24), "freqs_cis": torch.ones(3)}
    for name, value in reference._arrays.items():
        original_tensors[name] = torch.tensor(value, dtype=torch.float32)
    for prefix in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        # GemmaAttention.forward: qkv.split([q_size, kv_size, kv_size], dim=-1)
        sides = [original_tensors.pop(f"{prefix}.{side}_proj.weight") for side in "qkv"]
        original_tensors[f"{prefix}.qkv_proj.weight"] = torch.cat(sides)
    torch.save({"model_state_dict": original_tensors}, tmp_path / "gemma-2b.ckpt")
    bare = same(reference, tmp_path)  # its own releases have no configuration
    assert bare.same
    assert bare.notes[0].endswith("4 query heads, as in hf")
    config = {key: value for key, value in reference.config.items() if key != "model_type"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for pair in ((reference, tmp_path), (tmp_path, reference)):
        comparison = same(*pair)
        assert comparison.same, comparison.sentence
        assert comparison.notes == ()
        assert max(block.distance[1024] for block in comparison.blocks) < 1e-6


@pytest.mark.parametrize(
    "text", ["[1, 2", "- a\n- b", "!!python/object/apply:os.system [ls]", "a: &b [*b"]
)
def test_a_litgpt_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    torch.save({"transformer.h.0.attn.qkv.weight": torch.ones(3, 3)}, tmp_path / "lit_model.pth")
    (tmp_path / "model_config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"not valid YAML|expected keys"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("file_format", FORMATS, ids=lambda file_format: file_format.name)
def test_every_format_is_tested_and_on_the_page(file_format: Format) -> None:
    files = (file for file in Path(__file__).parent.iterdir() if file.suffix in (".py", ".toml"))
    tested = re.findall(r'"([^"\s]+)"', " ".join(file.read_text("utf-8") for file in files))
    assert any(re.fullmatch(file_format.weights, name) for name in tested), (
        f"test {file_format.name}"
    )
    page = Path(__file__).parents[2].joinpath("docs", "formats.md").read_text("utf-8")
    text = re.sub(r"```.*?```", "", page, flags=re.DOTALL)  # fences would shift the pairs of marks
    listed = re.findall(r"`([^`]+)`", text)
    assert {*listed} & {*file_format.config} - {"config.json"} or any(
        re.fullmatch(file_format.weights, name) for name in listed
    ), f"docs/formats.md: a row for {file_format.name}"
