"""Torch archives: their weights, and never their code."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from wqk.checkpoints import Part, open_checkpoint
from wqk.errors import CheckpointError, WqkError

if TYPE_CHECKING:
    from pathlib import Path


def weights(seed: int, *names: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(6, 4, generator=generator) for name in names}


def assert_holds(checkpoint: Any, tensors: dict[str, torch.Tensor]) -> None:
    assert checkpoint.tensors().keys() == tensors.keys()
    arrays = checkpoint.read([Part(name) for name in tensors])
    for array, tensor in zip(arrays, tensors.values(), strict=True):
        np.testing.assert_array_equal(array, tensor.float().numpy())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("zipped", [True, False])
def test_an_archive_is_read_by_folder_or_by_name(tmp_path, name, as_file, zipped):
    tensors = weights(0, "a", "b")
    torch.save(tensors, tmp_path / name, _use_new_zipfile_serialization=zipped)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    checkpoint = open_checkpoint(tmp_path / name if as_file else tmp_path)
    assert checkpoint.config == {"model_type": "bert"}
    assert_holds(checkpoint, tensors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_types_are_widened(tmp_path, dtype):
    tensors = {"w": weights(0, "w")["w"].to(dtype)}
    torch.save(tensors, tmp_path / "model.pt")
    (result,) = open_checkpoint(tmp_path).read([Part("w", ((4, 6), (0, 1)))])
    expected = torch.cat([tensors["w"][4:6], tensors["w"][:1]])
    assert result.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    np.testing.assert_array_equal(result, expected.double().numpy())


def test_shards_and_the_trainers_own_files(tmp_path):
    folder = tmp_path / "checkpoint-20"
    folder.mkdir()
    torch.save(weights(1, "a"), folder / "shard-1.bin")
    torch.save(weights(2, "b"), folder / "shard-2.bin")
    torch.save({"step": 5, "c": torch.ones(1)}, folder / "optimizer.pt")
    weight_map = {"a": "shard-1.bin", "b": "shard-2.bin"}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.step == 20
    assert_holds(checkpoint, weights(1, "a") | weights(2, "b"))
    index.unlink()
    assert_holds(open_checkpoint(folder), weights(1, "a") | weights(2, "b"))


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
def test_weights_nested_in_a_training_scripts_dictionary(tmp_path, key):
    tensors = weights(0, "a")
    torch.save({"epoch": 3, key: {**tensors, "note": "text"}}, tmp_path / "model.pt")
    assert_holds(open_checkpoint(tmp_path), tensors)


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [torch.ones(2)], {"model": [1]}, 5])
def test_an_archive_without_a_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        open_checkpoint(tmp_path)


def test_one_tensor_in_two_archives(tmp_path):
    for name in ("one.pt", "two.pt"):
        torch.save(weights(0, "a"), tmp_path / name)
    with pytest.raises(CheckpointError, match="tensor 'a' occurs in two files"):
        open_checkpoint(tmp_path)


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def bare_pickle(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content))


def legacy_archive(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("save", [torch.save, legacy_archive, bare_pickle])
@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("as_file", [True, False])
def test_code_in_an_archive_is_never_run(tmp_path, save, with_weights, as_file):
    trap, folder = tmp_path / "trap", tmp_path / "model"
    folder.mkdir()
    content = {**(weights(0, "a") if with_weights else {}), "payload": Payload(trap)}
    save(content, folder / "model.bin")
    with pytest.raises(CheckpointError, match=r"not loaded|not a readable torch archive") as caught:
        open_checkpoint(folder / "model.bin" if as_file else folder)
    assert not trap.exists()
    assert "\n" not in str(caught.value)
    # The trap does work.
    pickle.loads(pickle.dumps(Payload(trap)))
    assert trap.exists()


def test_a_pickled_module_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="holds more than weights"):
        open_checkpoint(tmp_path)


def test_without_pytorch_an_archive_says_what_is_missing(tmp_path, monkeypatch):
    torch.save(weights(0, "a"), tmp_path / "pytorch_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match="read through PyTorch, which is not installed"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pipe_is_no_archive(tmp_path, within, name):
    os.mkfifo(tmp_path / name)
    with within(2), pytest.raises(CheckpointError, match="not a regular file"):
        open_checkpoint(tmp_path)


def archive() -> bytes:
    buffer = io.BytesIO()
    torch.save(weights(0, "a", "b"), buffer)
    return buffer.getvalue()


def attempt(path: Path, content: bytes) -> bool:
    """Whether an archive of these bytes is refused, and by an error of ours alone."""
    path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.read([Part(name) for name in checkpoint.tensors()])
    except WqkError:
        return True
    return False


def test_truncated_archives_are_refused(tmp_path):
    content = archive()
    assert not attempt(tmp_path / "model.pt", content)
    for length in range(0, len(content), 7):
        assert attempt(tmp_path / "model.pt", content[:length])


def mutated(content: bytes, dice: random.Random) -> bytes:
    result = bytearray(content)
    for _ in range(dice.choice([1, 2, 8])):
        result[dice.randrange(len(result))] = dice.randrange(256)
    return bytes(result)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 500), pytest.param(1, 20_000, marks=pytest.mark.campaign)]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_mutated_archives_are_read_or_refused(tmp_path, seed, count, zipped):
    buffer = io.BytesIO()
    torch.save(weights(0, "a"), buffer, _use_new_zipfile_serialization=zipped)
    dice = random.Random(seed)
    refused = [attempt(tmp_path / "m.pt", mutated(buffer.getvalue(), dice)) for _ in range(count)]
    assert 0 < sum(refused) < count
