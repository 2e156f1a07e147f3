"""`--repair`: the written copy is the reference, and all else is the candidate's, byte by byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.sameness.conversions import MISTAKES, Conversion, right

import wqk
from wqk.errors import CheckpointError, WqkError
from wqk.sameness.rewritten_files import encoded, locations_in, read_location
from wqk.sameness.verdicts import Verdict


def write(folder: Path, tensors: dict[str, np.ndarray], config: dict, dtype=torch.float32) -> Path:
    """A checkpoint in two shards, with metadata."""
    folder.mkdir()
    stored = {name: torch.tensor(value).to(dtype) for name, value in tensors.items()}
    names = sorted(stored)
    for number, part in enumerate((names[::2], names[1::2])):
        shard = {name: stored[name].contiguous() for name in part}
        file = folder / f"model-{number + 1:05}-of-00002.safetensors"
        save_file(shard, file, metadata={"format": "pt", "who": "a test"})
    index = {name: f"model-{names.index(name) % 2 + 1:05}-of-00002.safetensors" for name in names}
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "notes.txt").write_text("kept")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("mistake", MISTAKES, ids=[mistake.description for mistake in MISTAKES])
def test_a_mistake_is_repaired_in_the_files(mistake: Conversion, tmp_path: Path) -> None:
    tensors, config = right(mistake.model)
    original = write(tmp_path / "original", tensors, config)
    mistake.change(tensors, config)
    copy = write(tmp_path / "copy", tensors, config)
    before = files_of(copy)
    comparison = wqk.same(original, copy, repair=tmp_path / "fixed")
    assert comparison.repaired is not None
    assert comparison.repaired.verdict is Verdict.SAME
    assert wqk.same(original, tmp_path / "fixed").same
    assert files_of(copy) == before
    written = files_of(tmp_path / "fixed")
    assert written.keys() == before.keys()
    assert written["notes.txt"] == b"kept"
    for path in copy.glob("*.safetensors"):
        places, fixed_places = locations_in(path), locations_in(tmp_path / "fixed" / path.name)
        header = min(place.start for place in places.values())
        if not comparison.repaired.added:
            assert written[path.name][:header] == before[path.name][:header]
        for name, place in places.items():
            if name not in comparison.repaired.changed:
                original_bytes = before[path.name][place.start : place.end]
                assert (
                    written[path.name][fixed_places[name].start : fixed_places[name].end]
                    == original_bytes
                )


RESIZED = {
    "a weight stored transposed": "transposed",
    "tables with more rows": "padded",
    "a tensor left out": "missing",
}


@pytest.mark.parametrize("change", RESIZED, ids=RESIZED.values())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_tensors_that_change_their_shape_are_repaired(
    change: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """All other bytes, the order of tensors, metadata and the index are kept."""
    tensors, config = right("llama")
    random = np.random.default_rng(3)
    up, table = "model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"
    width = tensors["model.layers.0.self_attn.q_proj.weight"].shape[1]
    tensors[up] = random.standard_normal((24, width)).astype(np.float32)
    tensors[table] = random.standard_normal((40, width)).astype(np.float32)
    config |= {"vocab_size": len(tensors[table]), "tie_word_embeddings": True}
    original = write(tmp_path / "original", tensors, config, dtype)
    match RESIZED[change]:
        case "transposed":
            wrong = tensors | {up: np.ascontiguousarray(tensors[up].T)}
        case "padded":
            wrong = tensors | {table: np.concatenate([tensors[table], tensors[table][:3] + 1])}
            config["vocab_size"] += 3
        case _:
            wrong = {name: value for name, value in tensors.items() if name != up}
    copy = write(tmp_path / "copy", wrong, config, dtype)
    comparison = wqk.same(original, copy, everything=True, repair=tmp_path / "fixed")
    written = comparison.repaired
    assert written is not None
    assert written.verdict is Verdict.SAME
    assert written.added == ((up,) if RESIZED[change] == "missing" else ())
    names, shards = set(), sorted((tmp_path / "fixed").glob("*.safetensors"))
    for path in shards:
        stored = load_file(path)
        names |= {*stored}
        for name, value in stored.items():
            assert torch.equal(value, torch.tensor(tensors[name]).to(dtype)), name
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", "who": "a test"}
    assert names == {*tensors}
    index = json.loads((tmp_path / "fixed" / "model.safetensors.index.json").read_text())
    assert {*index["weight_map"]} == names
    assert all(
        name in locations_in(tmp_path / "fixed" / shard)
        for name, shard in index["weight_map"].items()
    )
    assert not [path for path in (tmp_path / "fixed").iterdir() if path.name.startswith(".")]


def test_orders_of_bfloat16_are_repaired_bit_by_bit(tmp_path: Path) -> None:
    tensors, config = right("llama")
    original = write(tmp_path / "original", tensors, config, torch.bfloat16)
    (mistake, *_) = [m for m in MISTAKES if m.model == "llama" and "rotary" in m.verdict]
    mistake.change(tensors, config)
    copy = write(tmp_path / "copy", tensors, config, torch.bfloat16)
    comparison = wqk.same(original, copy, everything=True, repair=tmp_path / "fixed")
    assert comparison.repaired is not None
    assert not comparison.repaired.supplied
    for path in original.glob("*.safetensors"):
        stored, written = load_file(path), load_file(tmp_path / "fixed" / path.name)
        assert stored.keys() == written.keys()
        assert all(torch.equal(stored[name], written[name]) for name in stored)


def test_bfloat16_is_rounded_as_pytorch_rounds_it() -> None:
    values = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    values[:6] = np.nan, np.inf, -np.inf, 0.0, -0.0, 3.4e38
    expected = torch.tensor(values).bfloat16()
    stored = torch.frombuffer(bytearray(encoded(values, "BF16")), dtype=torch.bfloat16)
    np.testing.assert_array_equal(stored.float().numpy(), expected.float().numpy())


def test_places_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4).bfloat16(),
        "b": torch.randn(5).half(),
        "c": torch.tensor(2.0),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    for name, place in locations_in(tmp_path / "x.safetensors").items():
        np.testing.assert_array_equal(read_location(place), tensors[name].float().numpy())


def test_nothing_is_written_of_a_difference_without_a_cause(tmp_path: Path) -> None:
    tensors, config = right("llama")
    original = write(tmp_path / "original", tensors, config)
    random = np.random.default_rng(1)
    drawn = {name: random.standard_normal(value.shape) for name, value in tensors.items()}
    copy = write(tmp_path / "copy", {n: v.astype(np.float32) for n, v in drawn.items()}, config)
    with pytest.raises(
        CheckpointError, match="no repair is known of this difference: different weights"
    ):
        wqk.same(original, copy, repair=tmp_path / "fixed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "original"]


def test_a_guess_is_not_written(tmp_path: Path) -> None:
    tensors, config = right("llama")
    original = write(tmp_path / "original", tensors, config)
    renamed = {
        name.replace("self_attn", "attention").replace("_proj", "").replace("model", "stack"): value
        for name, value in tensors.items()
    }
    name = next(name for name in renamed if ".q." in name)
    renamed[name] = 2 * renamed[name]
    sizes = {key: config[key] for key in ("hidden_size", "num_attention_heads", "head_dim")}
    sizes["num_key_value_heads"] = config["num_key_value_heads"]
    copy = write(tmp_path / "copy", renamed, sizes)
    with pytest.raises(WqkError):
        wqk.same(original, copy, repair=tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()


@pytest.mark.parametrize("target_kind", ["a file", "a full folder"])
def test_what_exists_is_not_replaced(target_kind: str, tmp_path: Path) -> None:
    tensors, config = right("llama")
    original = write(tmp_path / "original", tensors, config)
    MISTAKES[0].change(tensors, config)
    copy = write(tmp_path / "copy", tensors, config)
    target = tmp_path / "fixed"
    if target_kind == "a file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        wqk.same(original, copy, repair=target)


KILLED = """
import os, signal, sys
import wqk.sameness.rewritten_files as files
write = files.write_location
def write_and_die(place, values):
    write(place, values)
    os.kill(os.getpid(), signal.SIGKILL)
files.write_location = write_and_die
import wqk
wqk.same(*sys.argv[1:3], repair=sys.argv[3])
"""


def test_a_killed_repair_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    tensors, config = right("llama")
    original = write(tmp_path / "original", tensors, config)
    (mistake, *_) = [m for m in MISTAKES if m.model == "llama" and "rotary" in m.verdict]
    mistake.change(tensors, config)
    copy = write(tmp_path / "copy", tensors, config)
    before = files_of(copy)
    command = [sys.executable, "-c", KILLED, original, copy, tmp_path / "fixed"]
    done = subprocess.run(command, capture_output=True, env=os.environ, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "fixed").exists()
    assert files_of(copy) == before
    assert wqk.same(original, copy, repair=tmp_path / "fixed").repaired is not None
    assert load_file(next((tmp_path / "fixed").glob("*.safetensors")))
