"""Files of other libraries: each holds a model whose attention is known by another route."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, D, H, G, R, V = 2, 48, 6, 2, 8, 40
Tensors = dict[str, torch.Tensor]
# LLaMA's own names, and those of transformers.
NAMES = {
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip
SHAPES = {
    "attention.wq": (H * R, D), "attention.wk": (G * R, D), "attention.wv": (G * R, D),
    "attention.wo": (D, H * R), "attention_norm": (D,), "ffn_norm": (D,),
    "feed_forward.w1": (64, D), "feed_forward.w2": (D, 64), "feed_forward.w3": (64, D),
}  # fmt: skip
PARAMS = {
    "dim": D, "n_layers": LAYERS, "n_heads": H, "n_kv_heads": G, "vocab_size": V, "norm_eps": 1e-5,
}  # fmt: skip


def original() -> Tensors:
    """A tiny LLaMA with grouped heads under its own names; rotated pairs side by side."""
    generator = torch.Generator().manual_seed(0)
    shapes = {
        f"layers.{layer}.{kind}.weight": shape
        for layer in range(LAYERS)
        for kind, shape in SHAPES.items()
    }
    shapes |= {
        "tok_embeddings.weight": (V, D), "norm.weight": (D,), "output.weight": (V, D),
    }  # fmt: skip
    return {
        name: torch.randn(shape, generator=generator) / D**0.5 + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def halved(weight: torch.Tensor) -> torch.Tensor:
    """Rotated pairs R/2 apart instead of side by side, as transformers wants them."""
    return weight.reshape(-1, R // 2, 2, D).transpose(1, 2).reshape(-1, D).contiguous()


def twin(folder: Path, turn: Any = halved, tensors: Tensors | None = None, **config: Any) -> Path:
    """The same model as transformers saves it."""
    folder.mkdir(exist_ok=True)
    named = {}
    for name, value in (tensors or original()).items():
        for theirs, ours in NAMES.items():
            if theirs in name:
                value = turn(value) if theirs in ("attention.wq", "attention.wk") else value
                named[f"model.{name.replace(theirs, ours)}"] = value
    save_file(named, folder / "model.safetensors")
    about = {
        "model_type": "llama", "hidden_size": D, "num_hidden_layers": LAYERS,
        "num_attention_heads": H, "num_key_value_heads": G, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(about | config))
    return folder


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
def test_llamas_original_files_are_their_twin(
    tmp_path: Path, folder: Path, parts: int, embeddings: int
) -> None:
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
    some = checkpoint.read([Part("layers.1.attention.wq.weight", rows)])[0]
    whole = original()["layers.1.attention.wq.weight"].numpy()
    np.testing.assert_array_equal(some, np.concatenate([whole[a:b] for a, b in rows]))


def test_mistrals_single_file_is_its_twin(tmp_path: Path, folder: Path) -> None:
    save_file(original(), folder / "consolidated.safetensors")
    (folder / "params.json").write_text(json.dumps(PARAMS | {"head_dim": R}))
    assert wqk.same(twin(tmp_path / "twin", rope_theta=1e6), folder).same
    (folder / "params.json").write_text(json.dumps(PARAMS | {"head_dim": R, "sliding_window": 9}))
    assert wqk.same(twin(tmp_path / "twin", sliding_window=9), folder).same


def test_scaled_rotary_positions_of_llama_3(tmp_path: Path, folder: Path) -> None:
    save_file(original(), folder / "consolidated.safetensors")
    scaled = PARAMS | {"use_scaled_rope": True, "rope_theta": 5e5}
    (folder / "params.json").write_text(json.dumps(scaled))
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert wqk.same(twin(tmp_path / "a", rope_theta=5e5, rope_scaling=scaling), folder).same
    assert not wqk.same(twin(tmp_path / "b", rope_theta=5e5), folder).same


def test_a_conversion_that_forgets_the_rotary_order_is_named(tmp_path: Path, folder: Path) -> None:
    save_file(original(), folder / "consolidated.safetensors")
    wrong = wqk.same(folder, twin(tmp_path / "twin", turn=lambda weight: weight))
    reason = "rotary order: weights lie interleaved, are read half"
    assert all(reason in block.reason for block in wrong.blocks)
    # The converter's function applied to the keys with the queries' number of heads.
    keys = twin(tmp_path / "keys", turn=lambda w: halved(w) if len(w) == H * R else w)
    assert "key weights alone" in wqk.same(folder, keys).blocks[0].reason


def test_parts_that_are_missing_are_noticed(folder: Path) -> None:
    first, second = split(original(), 2, 1)
    torch.save(first, folder / "consolidated.00.pth")
    with pytest.raises(CheckpointError, match=r"24 rows, and params\.json says 6 heads of width 8"):
        wqk.scan(folder)
    torch.save(second, folder / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match="one of 2 files that each hold some rows"):
        wqk.scan(folder / "consolidated.00.pth")
    second["layers.0.attention.wq.weight"] = torch.zeros(24, D + 1)
    torch.save(second, folder / "consolidated.01.pth")
    with pytest.raises(CheckpointError, match="do not fit together"):
        wqk.scan(folder)


# llama2.c


def llama2c(tensors: Tensors, version: int, own_output: bool) -> bytes:
    """The model as llama2.c's export writes it."""
    vocabulary = -V if own_output and version == 0 else V
    sizes = struct.pack("<7i", D, 64, LAYERS, H, G, vocabulary, 16)
    turns = [torch.ones(16, R // 2)] * 2

    def every(*kinds: str) -> list[torch.Tensor]:
        return [tensors[f"layers.{n}.{kind}.weight"] for kind in kinds for n in range(LAYERS)]

    attention = [f"attention.w{side}" for side in "qkvo"]
    forward = [f"feed_forward.w{number}" for number in (1, 2, 3)]
    embeddings, norm = tensors["tok_embeddings.weight"], tensors["norm.weight"]
    if version:
        header = (b"24ka" + struct.pack("<i", 1) + sizes + bytes([not own_output])).ljust(
            256, b"\0"
        )
        values = [
            *every("attention_norm", "ffn_norm"),
            norm,
            embeddings,
            *every(*attention, *forward),
        ]
    else:
        header = sizes
        values = [
            embeddings, *every("attention_norm", *attention, "ffn_norm", *forward), norm, *turns,
        ]  # fmt: skip
    values += [tensors["output.weight"]] if own_output else []
    return header + b"".join(value.numpy().astype("<f4").tobytes() for value in values)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("own_output", [False, True])
def test_llama2c_files_are_their_twin(tmp_path: Path, version: int, own_output: bool) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(llama2c(original(), version, own_output))
    checkpoint = open_checkpoint(file)
    for name, info in checkpoint.tensors().items():
        if not name.startswith("freqs_"):
            assert info.shape == original()[name].shape
            np.testing.assert_array_equal(
                checkpoint.read([Part(name)])[0], original()[name].numpy()
            )
    assert ("output.weight" in checkpoint.tensors()) == own_output
    rows = checkpoint.read([Part("layers.1.attention.wk.weight", ((9, 12), (2, 3)))])[0]
    expected = original()["layers.1.attention.wk.weight"][[9, 10, 11, 2]]
    np.testing.assert_array_equal(rows, expected.numpy())
    assert wqk.same(twin(tmp_path / "twin"), file).same


def test_a_real_model_of_llama2c(tmp_path: Path, shared: Path) -> None:
    stored = load_file(shared / "checkpoints" / "stories260k" / "model.safetensors")
    layers, dim, heads, keys, hidden = 5, 64, 8, 4, 172

    def interleaved(weight: torch.Tensor) -> torch.Tensor:
        return weight.reshape(-1, 2, 4, dim).transpose(1, 2).reshape(-1, dim)

    def every(kind: str) -> bytes:
        values = [stored[f"model.layers.{n}.{kind}.weight"].float() for n in range(layers)]
        turned = kind.endswith(("q_proj", "k_proj"))
        return b"".join((interleaved(v) if turned else v).numpy().tobytes() for v in values)

    order = ["attention_norm", *(f"attention.w{s}" for s in "qkvo"), "ffn_norm"]
    order += [f"feed_forward.w{n}" for n in (1, 2, 3)]
    content = struct.pack("<7i", dim, hidden, layers, heads, keys, 512, 512)
    content += stored["model.embed_tokens.weight"].float().numpy().tobytes()
    content += b"".join(every(NAMES[kind]) for kind in order)
    content += stored["model.norm.weight"].float().numpy().tobytes() + bytes(4 * 512 * 8)
    (tmp_path / "stories260K.bin").write_bytes(content)
    assert wqk.same(shared / "checkpoints" / "stories260k", tmp_path / "stories260K.bin").same


def test_llama2c_files_that_lie_are_refused(tmp_path: Path) -> None:
    file, content = tmp_path / "model.bin", llama2c(original(), 1, False)
    for wrong, message in {
        content[:-1]: "truncated, or not a file of llama2.c",
        content + b"\0": "truncated, or not",
        content[:4] + struct.pack("<i", 2) + content[8:]: "version 2 .* quantized",
        content[:4] + struct.pack("<i", 7) + content[8:]: "version 7",
        content[:8] + struct.pack("<i", 0) + content[12:]: "no sizes of a model",
        content[:8] + struct.pack("<7i", *[2**30] * 7) + content[36:]: "no sizes of a model",
        content[:8] + struct.pack("<7i", 2, 1, 2**20, 1, 1, 1, 1): "no sizes of a model",
        content[:20]: "no sizes of a model",
        llama2c(original(), 0, False)[:-1]: "not a readable torch archive",
    }.items():
        file.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(file)
