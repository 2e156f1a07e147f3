"""Torch archives: their weights, and never their code."""

from __future__ import annotations

import argparse
import collections
import io
import json
import os
import pickle
import random
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints.stored import assert_holds, read_all, weights, write_pickle
from tests.limits import counts, in_memory, refused, within

from wqk.checkpoints import Part, open_checkpoint
from wqk.errors import CheckpointError
from wqk.sameness.stored_tensors import equal_parts


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


@pytest.mark.parametrize("keys", ["state_dict", "model_state_dict", "state_dict model module"])
def test_weights_nested_in_a_training_scripts_dictionary(tmp_path, keys):
    tensors = weights(0, "a")
    content = {**tensors, "note": "text"}
    for key in reversed(keys.split()):
        content = {"epoch": 3, key: content}
    torch.save(content, tmp_path / "model.pt")
    assert_holds(open_checkpoint(tmp_path), tensors)


@pytest.mark.parametrize("key", ["net", "generator"])
def test_the_only_weights_in_a_dictionary_are_read_whatever_they_are_called(tmp_path, key):
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    held = {"loss": torch.ones(()), "optimizer": optimizer, key: weights(0, "a")}
    torch.save(held, tmp_path / "model.pt")
    assert_holds(open_checkpoint(tmp_path), weights(0, "a"))


def test_other_weights_beside_the_model_s_are_told(tmp_path):
    model, further = ({"layers.0.q": tensor} for tensor in weights(0, "a", "b").values())
    torch.save({"ema": further, "model": model}, tmp_path / "model.pt")
    checkpoint = open_checkpoint(tmp_path)
    assert_holds(checkpoint, model)
    assert checkpoint.notes == ("passed over further weights in the archive: ema",)
    torch.save({"student": model, "teacher": further}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="student and teacher may be; save one"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [{}, {"epoch": 3}, [torch.ones(2)], {"model": [1]}, 5])
def test_an_archive_without_a_state_dict(tmp_path, content):
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="contains no state dict"):
        open_checkpoint(tmp_path)


def test_a_text_is_no_archive(tmp_path):
    (tmp_path / "model.bin").write_text("vocabulary\n")
    with pytest.raises(
        CheckpointError, match=r"model\.bin: not a readable torch archive; download or save"
    ):
        open_checkpoint(tmp_path)


@dataclass
class Payload:
    """Unpickling it makes a folder."""

    path: Path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


SAVES = {
    "zipped": torch.save,
    "legacy": partial(torch.save, _use_new_zipfile_serialization=False),
    "bare": lambda content, path: path.write_bytes(pickle.dumps(content)),
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
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


def test_an_archive_is_read_without_pytorch(tmp_path):
    torch.save(weights(0, "a"), tmp_path / "pytorch_model.bin")
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "from wqk.checkpoints import Part, open_checkpoint\n"
        "print(open_checkpoint(sys.argv[1]).read([Part('a')])[0].sum())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(result.stdout) == pytest.approx(weights(0, "a")["a"].sum().item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_program_is_refused_before_anything_of_it_is_read(tmp_path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a TorchScript program"):
        open_checkpoint(tmp_path)
    write_pickle(tmp_path / "pytorch_model.bin", b"no pickle at all", constants=b"")
    with pytest.raises(CheckpointError, match="a TorchScript program"):
        open_checkpoint(tmp_path)


def test_a_transposed_view_is_another_tensor(tmp_path):
    square = torch.randn(4, 4)
    for name, tensor in (("a.pt", square), ("b.pt", square.T)):
        torch.save({"w": tensor}, tmp_path / name)
    checkpoints = [open_checkpoint(tmp_path / name) for name in ("a.pt", "b.pt")]
    assert not equal_parts(checkpoints, [Part("w")] * 2, reads_numbers=True)
    assert equal_parts([checkpoints[1]] * 2, [Part("w")] * 2, reads_numbers=True)


def test_compressed_members_are_refused(tmp_path):
    """Some tools compress an archive to save space."""
    torch.save(weights(0, "a"), tmp_path / "whole.pt")
    plain = zipfile.ZipFile(tmp_path / "whole.pt")
    with plain, zipfile.ZipFile(tmp_path / "model.pt", "w", zipfile.ZIP_DEFLATED) as smaller:
        for name in plain.namelist():
            smaller.writestr(name, plain.read(name))
    for rows in (None, ((0, 1),)):
        with pytest.raises(CheckpointError, match="the data of 'a' is compressed, which"):
            open_checkpoint(tmp_path / "model.pt").read([Part("a", rows)])


def test_values_that_the_archive_lacks_are_named(tmp_path):
    torch.save({"w": torch.ones(4, 4)}, tmp_path / "whole.pt")
    complete = zipfile.ZipFile(tmp_path / "whole.pt")
    with complete, zipfile.ZipFile(tmp_path / "model.pt", "w") as lacking:
        for name in complete.namelist():
            if not name.endswith("data/0"):
                lacking.writestr(name, complete.read(name))
    checkpoint = open_checkpoint(tmp_path / "model.pt")
    for rows in (None, ((0, 1),)):
        with pytest.raises(CheckpointError, match="the data of 'w' is missing"):
            checkpoint.read([Part("w", rows)])


def test_a_description_that_inflates_is_refused_in_little_memory(tmp_path):
    path = write_pickle(tmp_path / "model.pt", bytes(80 * 2**20))
    with (
        in_memory(70 * 2**20),
        pytest.raises(CheckpointError, match="not a readable torch archive"),
    ):
        open_checkpoint(path)


# What C's unpickler would allocate: a memo of 2**31 entries, bytes and lists of claimed lengths.
GREEDY = {
    "memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "bytearray": b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
    "bytes": b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b".",
    "frame": b"\x80\x04\x95" + (2**40).to_bytes(8, "little") + b".",
    "hashing": b"\x80\x02}(" + b")" + b"2\x86" * 60 + b"K\x01u.",
    "a set": b"\x80\x04\x8f(" + b")" + b"2\x86" * 60 + b"\x90.",
    "a frozen set": b"\x80\x04(" + b")" + b"2\x86" * 60 + b"\x91.",
}


@pytest.mark.parametrize("pickled", GREEDY.values(), ids=GREEDY)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_description_that_wants_the_whole_machine(tmp_path, pickled, zipped):
    path = tmp_path / "model.pt"
    write_pickle(path, pickled) if zipped else path.write_bytes(pickled)
    with in_memory(2**25), within(5), pytest.raises(CheckpointError):
        open_checkpoint(path)


ABSENT = {
    "meta": (torch.empty(4, 4, device="meta"), "on the meta device"),
    "sparse": (torch.eye(4).to_sparse(), "a sparse tensor"),
    "expanded": (torch.ones(1, 1).expand(2**20, 2**20), "claims more values than the 1 "),
}


@pytest.mark.parametrize(("tensor", "message"), ABSENT.values(), ids=ABSENT)
def test_tensors_whose_values_are_not_there(tmp_path, tensor, message):
    torch.save({"a": tensor, **weights(0, "b")}, tmp_path / "model.pt")
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.read([Part("b")])
    assert checkpoint.info("a").shape == tuple(tensor.shape)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.read([Part("a")])


def test_parameters_views_and_float8(tmp_path):
    base = torch.randn(8, 6)
    tensors = {
        "parameter": torch.nn.Parameter(torch.randn(3, 2)),
        "transposed": base.T,
        "view": base[2:5, 1:4],
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    torch.save(tensors, tmp_path / "model.pt")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read([Part(name)])[0], tensor.detach().numpy())
    (rows,) = checkpoint.read([Part("transposed", ((4, 6), (0, 1)))])
    np.testing.assert_array_equal(rows, base.T.numpy()[[4, 5, 0]])
    small = torch.randn(4, 4).to(torch.float8_e4m3fn)
    torch.save({"w": small, "w_scale": torch.tensor(2.0)}, tmp_path / "model.pt")
    (read,) = open_checkpoint(tmp_path).read([Part("w")])
    np.testing.assert_array_equal(read, small.float().numpy() * 2)
    # Nothing is read behind the end.
    SAVES["legacy"]({"w": torch.empty(4, 0)}, tmp_path / "model.pt")
    assert open_checkpoint(tmp_path).read([Part("w")])[0].shape == (4, 0)


def test_a_training_scripts_other_values_are_read_as_data(tmp_path):
    content = {
        "model": weights(0, "a"),
        "arguments": argparse.Namespace(lr=0.1, path=tmp_path),
        "counts": collections.defaultdict(list, {1: [2]}),
        "seen": {1, 2, 3},
        "score": np.float64(0.5),
        "device": torch.device("cpu"),
    }
    torch.save(content, tmp_path / "model.pt")
    assert_holds(open_checkpoint(tmp_path), weights(0, "a"))


def archive(zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(weights(0, "a"), buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def attempt(path: Path, content: bytes) -> bool:
    """Return whether an archive of these bytes is refused."""
    path.write_bytes(content)
    return refused(read_all, path)


def test_truncated_archives_are_refused(tmp_path):
    content = archive()
    assert not attempt(tmp_path / "model.pt", content)
    for length in range(0, len(content), 7):
        assert attempt(tmp_path / "model.pt", content[:length])


@counts(500, 20_000)
@pytest.mark.parametrize("zipped", [True, False])
def test_mutated_archives_are_read_or_refused(tmp_path, count, zipped):
    dice, content, refusals = random.Random(count), archive(zipped), 0
    for _ in range(count):
        damaged = bytearray(content)
        for _ in range(dice.choice([1, 2, 8])):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        refusals += attempt(tmp_path / "m.pt", bytes(damaged))
    assert 0 < refusals < count


def test_the_state_of_an_optimizer_is_named(tmp_path):
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="the state of an optimizer; give the folder"):
        open_checkpoint(tmp_path / "optimizer.pt")
