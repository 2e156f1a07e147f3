"""Folders of torch.distributed.checkpoint: written by PyTorch, in chunks, damaged and hostile."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.limits import refused
from torch.distributed.checkpoint import filesystem, metadata

import wqk
from wqk.checkpoints import Part, TensorInfo, open_checkpoint
from wqk.errors import CheckpointError
from wqk.scanning.surveys.watch import watch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")

Tensors = dict[str, torch.Tensor]
# Boxes of a 6 × 5 tensor: where each begins, and its shape; as ranks of a mesh would write them.
BOXES = [((0, 0), (2, 5)), ((2, 0), (4, 2)), ((2, 2), (4, 3))]


def weights(**dtypes: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 5, generator=generator).to(kind) for name, kind in dtypes.items()}


def in_chunks(folder: Path, tensors: Tensors, **changes: Any) -> None:
    """Every tensor in three boxes over two files, described in PyTorch's own records."""
    folder.mkdir(exist_ok=True)
    files = {name: io.BytesIO() for name in ("__0_0.distcp", "__1_0.distcp")}
    described, stored = {}, {}
    for name, tensor in tensors.items():
        for number, (begin, shape) in enumerate(BOXES):
            file, stream = list(files.items())[number % 2]
            offset = stream.tell()
            rows, columns = (slice(a, a + n) for a, n in zip(begin, shape, strict=True))
            torch.save(tensor[rows, columns].clone(), stream)
            place = {"relative_path": file, "offset": offset, "length": stream.tell() - offset}
            index = metadata.MetadataIndex(name, torch.Size(begin), number)
            stored[index] = filesystem._StorageInfo(**(place | changes))
        described[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(tensor.dtype),
            tensor.size(),
            [metadata.ChunkStorageMetadata(torch.Size(b), torch.Size(s)) for b, s in BOXES],
        )
    described["step"] = metadata.BytesStorageMetadata()
    for name, stream in files.items():
        (folder / name).write_bytes(stream.getvalue())
    whole = metadata.Metadata(described, {"a": ("model", "a")}, stored)
    (folder / ".metadata").write_bytes(pickle.dumps(whole))


def test_tensors_are_put_together_from_their_chunks(tmp_path: Path) -> None:
    tensors = weights(a=torch.float32, b=torch.bfloat16, c=torch.float64)
    in_chunks(tmp_path, tensors)
    # PyTorch reads the same from this folder.
    loaded = {name: torch.zeros_like(value) for name, value in tensors.items()}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors()["b"] == TensorInfo("BF16", (6, 5), 60)
    for name, value in loaded.items():
        assert value.equal(tensors[name])
        expected = value.double().numpy()
        np.testing.assert_array_equal(checkpoint.read([Part(name)])[0], expected)
        for rows in [((1, 4), (5, 6)), ((3, 6), (0, 1)), ((0, 2),), ((4, 5),)]:
            some = checkpoint.read([Part(name, rows)])[0]
            np.testing.assert_array_equal(some, np.concatenate([expected[a:b] for a, b in rows]))


def save(model: Path, folder: Path) -> None:
    """A model in PyTorch's own format, with an optimizer's state, as trainers nest them."""
    tensors = load_file(model / "model.safetensors")
    moments = {f"optimizer.state.{name}.exp_avg": value for name, value in tensors.items()}
    dcp.save({"model": tensors, "step": 7, **moments}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("place", [".", "pytorch_model_fsdp_0"])
def test_what_pytorch_writes_is_read_like_the_model(tmp_path: Path, place: str) -> None:
    model = wqk.demo_model("decoder")
    save(model, tmp_path / "checkpoint-7" / place)
    shutil.copy(model / "config.json", tmp_path)  # of the run
    if place == ".":
        shutil.copy(model / "config.json", tmp_path / "checkpoint-7")
    checkpoint = open_checkpoint(tmp_path / "checkpoint-7")
    assert checkpoint.step == 7
    assert checkpoint.parameters == open_checkpoint(model).parameters
    assert wqk.same(model, tmp_path / "checkpoint-7").same
    here, there = (wqk.scan(ref).frame for ref in (tmp_path, model))  # the run's last step
    assert here["symmetry"].equals(there["symmetry"])


def test_a_run_of_distributed_checkpoints_is_watched(tmp_path: Path) -> None:
    run, model = tmp_path / "run", wqk.demo_model("decoder")
    for step in (5, 10):
        save(model, run / f"step-{step}")
    shutil.copy(model / "config.json", run)
    (run / "step-10" / ".metadata").rename(tmp_path / "later")
    waited: list[str] = []

    def finish(folder: str, reason: str) -> None:
        waited.append(reason)
        (tmp_path / "later").rename(run / "step-10" / ".metadata")

    with ThreadPoolExecutor(1) as threads:
        options: Any = {"out": tmp_path / "out", "until": 10, "every": 0.01, "heads": False}
        *_, table = watch(run, executor=threads, on_wait=finish, **options)
    assert sorted(table.frame["step"].unique()) == [5, 10]
    assert "a distributed checkpoint of PyTorch" in waited[0]


def test_it_is_read_without_pytorch(tmp_path: Path) -> None:
    in_chunks(tmp_path, weights(a=torch.float32))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from wqk.checkpoints import Part, TensorInfo, open_checkpoint\n"
        "print(open_checkpoint(sys.argv[1]).read([Part('a')])[0].sum())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(printed) == pytest.approx(weights(a=torch.float32)["a"].sum().item(), abs=1e-5)


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


@pytest.mark.parametrize("inside", [True, False])
def test_nothing_in_the_description_is_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    planted = metadata.Metadata({"a": Attack()}) if inside else Attack()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(planted))
    with pytest.raises(CheckpointError, match="contains more than the description of tensors"):
        open_checkpoint(tmp_path)
    # What archives of trainers may hold beside their weights has no place here either.
    (tmp_path / ".metadata").write_bytes(pickle.dumps(torch.optim.SGD))
    with pytest.raises(CheckpointError, match="contains more"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_path": "../secret"}, "outside of the folder"),
        ({"relative_path": "/etc/passwd"}, "outside of the folder"),
        ({"relative_path": "__9_0.distcp"}, "__9_0.distcp, which is missing"),
        ({"offset": -1}, "that is not a whole number"),
        ({"offset": 2**40}, "beyond the file: truncated"),
        ({"length": 2**62}, "beyond the file: truncated"),
        ({"transform_descriptors": ["zstd"]}, "is compressed"),
    ],
)
def test_places_that_are_none_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    in_chunks(tmp_path, weights(a=torch.float32), **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 5))], "do not make it up"),
        ([((0, 0), (6, 6))], "outside of it"),
        ([((0,), (30,))], "unknown way"),
        ([((0, 0), (2**62, 2**62))], "impossible shape"),
    ],
)
def test_chunks_that_do_not_make_up_a_tensor_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boxes: Any, message: str
) -> None:
    in_chunks(tmp_path, weights(a=torch.float32))
    content = pickle.loads((tmp_path / ".metadata").read_bytes())
    chunks = [metadata.ChunkStorageMetadata(torch.Size(b), torch.Size(s)) for b, s in boxes]
    content.state_dict_metadata["a"].chunks = chunks
    place = next(iter(content.storage_data.values()))
    content.storage_data = {metadata.MetadataIndex("a", torch.Size(b)): place for b, _ in boxes}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_chunks_that_are_not_what_is_described_are_refused(tmp_path: Path) -> None:
    in_chunks(tmp_path, weights(a=torch.float32))
    content = pickle.loads((tmp_path / ".metadata").read_bytes())
    content.state_dict_metadata["a"].properties.dtype = torch.bfloat16
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="is not the BF16 of shape"):
        open_checkpoint(tmp_path).read([Part("a")])


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    checkpoint.read([Part(name) for name in checkpoint.tensors()])


def test_damaged_descriptions_are_read_or_refused(tmp_path: Path) -> None:
    in_chunks(tmp_path, weights(a=torch.float32))
    whole, found = (tmp_path / ".metadata").read_bytes(), {refused(read_all, tmp_path)}
    for seed in range(40):
        random, content = np.random.default_rng(seed), bytearray(whole)
        for place in random.integers(0, len(content), random.integers(1, 8)):
            content[place] = random.integers(0, 256)
        (tmp_path / ".metadata").write_bytes(content[: random.integers(1, len(content) + 1)])
        found.add(refused(read_all, tmp_path))
    assert found == {True, False}
