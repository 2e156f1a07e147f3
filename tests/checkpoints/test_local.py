"""Checkpoints on disk: folders, shards, quantized weights, and what is no checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save, save_file
from tests.checkpoints.stored import assert_holds, weights
from tests.limits import failing, within

from wqk.checkpoints import Part, open_checkpoint, steps_of
from wqk.errors import CheckpointError
from wqk.storage import local

BAD_INDEXES = {
    "outside": [{"weight_map": {"a": "../model-1.safetensors"}}, "outside its own folder"],
    "absolute": [{"weight_map": {"a": "/etc/passwd"}}, "outside its own folder"],
    "parent": [{"weight_map": {"a": ".."}}, "outside its own folder"],
    "nothing": [{"weight_map": {"a": ""}}, "outside its own folder"],
    "missing": [{"weight_map": {"a": "model-9.safetensors"}}, "model-9.safetensors is missing"],
    "no name": [{"weight_map": {"a": "nul\x00"}}, "outside its own folder"],
    "a number": [{"weight_map": {"a": 5}}, "shard 5 is missing"],
    "a list": [{"weight_map": ["a"]}, "lacks the 'weight_map'"],
    "empty": [{"weight_map": {}}, "lacks the 'weight_map'"],
    "no map": [{}, "lacks the 'weight_map'"],
    "no object": [[1], "expected a JSON object"],
}

INDEX = "model.safetensors.index.json"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


# Files, and the names of their tensors.
LAYOUTS = {
    "one file": {"model.safetensors": "ab"},
    "shards": {"model-1.safetensors": "ab", "model-2.safetensors": "c"},
    "several files": {"one.safetensors": "a", "two.safetensors": "b"},
    "one among others": {
        "adapter_model.safetensors": "a",
        "old.safetensors": "a",
        "model.safetensors": "ab",
    },
    "one and an adapter": {"adapter_model.safetensors": "a", "weights.safetensors": "a"},
}
PASSED_OVER = ("adapter_model.safetensors", "old.safetensors")


def write(folder: Path, layout: str = "one file") -> dict[str, torch.Tensor]:
    """The tensors that a folder of this layout holds."""
    tensors: dict[str, torch.Tensor] = {}
    places: dict[str, str] = {}
    for seed, (file, names) in enumerate(LAYOUTS[layout].items()):
        tensors_of_file = weights(seed, *names)
        save_file(tensors_of_file, folder / file)
        if file not in PASSED_OVER:
            tensors, places = (
                tensors | tensors_of_file,
                places | dict.fromkeys(tensors_of_file, file),
            )
    if layout == "shards":
        write_json(folder / INDEX, {"metadata": {}, "weight_map": places})
    return tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return path


def read(checkpoint: Any, *names: str) -> list[np.ndarray]:
    return checkpoint.read([Part(name) for name in names])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("linked", [False, True])
def test_a_folder_is_read_whatever_its_layout(folder, layout, linked):
    tensors = write(folder, layout)
    write_json(folder / "config.json", {"model_type": "bert"})
    for path in list(folder.glob("*.safetensors")) if linked else ():  # as in the hub's cache
        blob = path.rename(folder.parent / path.name)
        path.symlink_to(Path("..") / blob.name)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == {"model_type": "bert"}
    assert (checkpoint.name, checkpoint.step) == (str(folder), None)
    assert checkpoint.parameters == 24 * len(tensors)
    assert_holds(checkpoint, tensors)


def test_rows_of_several_tensors_in_one_request(folder):
    tensors = write(folder, "shards")
    parts = [Part("c", ((4, 6), (0, 1))), Part("a"), Part("b", ((2, 3),)), Part("c", ((1, 2),))]
    expected = [
        torch.cat([tensors["c"][4:6], tensors["c"][0:1]]),
        tensors["a"],
        tensors["b"][2:3],
        tensors["c"][1:2],
    ]
    for array, tensor in zip(open_checkpoint(folder).read(parts), expected, strict=True):
        np.testing.assert_array_equal(array, tensor.numpy())


def test_a_single_file_takes_the_configuration_beside_it(folder):
    tensors = write(folder)
    write_json(folder / "config.json", {"model_type": "gpt2"})
    checkpoint = open_checkpoint(str(folder / "model.safetensors"))
    assert checkpoint.config == {"model_type": "gpt2"}
    np.testing.assert_array_equal(read(checkpoint, "b")[0], tensors["b"].numpy())


def test_a_subfolder(tmp_path):
    (tmp_path / "text_encoder").mkdir()
    write(tmp_path / "text_encoder")
    assert set(open_checkpoint(tmp_path, subfolder="text_encoder").tensors()) == {"a", "b"}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("checkpoint-500b", None),
        ("step-500", 500),
        ("stage1-step150-tokens1B", 150),
    ],
)
@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_the_step_is_in_the_folders_name(tmp_path, monkeypatch, name, step, file):
    (tmp_path / name).mkdir()
    write(tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    for ref in (tmp_path / name / file, file or "."):
        assert open_checkpoint(ref).step == step
    assert repr(open_checkpoint(file or ".")) == f"StoredCheckpoint({file or '.'!r}: 2 tensors)"


def test_a_runs_steps_are_in_their_order(tmp_path):
    for name in ("checkpoint-1000", "checkpoint-200", "checkpoint-x"):
        (tmp_path / name).mkdir()
    steps = [str(tmp_path / "checkpoint-200"), str(tmp_path / "checkpoint-1000")]
    assert steps_of(str(tmp_path)) == steps
    write(tmp_path)
    assert steps_of(str(tmp_path)) == [str(tmp_path)]


def test_a_checkpoint_is_returned_as_it_is(folder):
    write(folder)
    checkpoint = open_checkpoint(folder)
    assert open_checkpoint(checkpoint) is checkpoint


@pytest.mark.parametrize("ref", [5, None, b"bytes", ["list"]])
def test_what_is_no_reference_is_refused(ref):
    with pytest.raises(CheckpointError, match="a checkpoint must be a path, a Hub id"):
        open_checkpoint(ref)


# 8-bit floats


def float8_weight(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (100 * torch.randn(shape, generator=generator)).to(torch.float8_e4m3fn)


def block_scales(shape: tuple[int, int], side: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand([-(-n // side) for n in shape], generator=generator) + 0.5


def spread(scales: torch.Tensor, side: int, shape: tuple[int, int]) -> torch.Tensor:
    """Each block's scale at every entry of the block."""
    wide = scales.repeat_interleave(side, 0).repeat_interleave(side, 1)
    return wide[: shape[0], : shape[1]]


ROWS = [None, ((0, 300),), ((100, 160),), ((250, 300), (0, 3)), ((127, 129), (127, 128))]
# A matrix's shape, its scales and the end of their name, and the side of the blocks that share one;
# 0 if they broadcast.
SCALED = {
    **{
        f"blocks of 128 in {shape}": (shape, "_scale_inv", block_scales(shape, 128), 128)
        for shape in ((300, 200), (300, 256), (384, 128), (300, 70))
    },
    "blocks of a configured size": ((300, 90), "_scale_inv", block_scales((300, 90), 64), 64),
    "one for the tensor": ((300, 200), "_scale", torch.tensor(0.25), 0),
    "one in a list": ((300, 200), "_scale", torch.tensor([0.25]), 0),
    "one for each row": ((300, 200), "_scale", torch.linspace(0.5, 2, 300), 0),
    "a column": ((300, 200), "_scale", torch.linspace(0.5, 2, 300)[:, None], 0),
    "half precision": ((300, 200), "_scale", torch.linspace(0.5, 2, 300).bfloat16(), 0),
    "blocks of 50": ((300, 200), "_scale", block_scales((300, 200), 50), 50),
}


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("files", [1, 2])
def test_float8_is_multiplied_by_its_scales(folder, case, rows, files):
    shape, ending, scales, side = SCALED[case]
    weight = float8_weight(*shape)
    tensors = {"w": weight, f"w{ending}": scales}
    for number, tensors_of_file in enumerate(
        [tensors] if files == 1 else [{n: tensors[n]} for n in tensors]
    ):
        save_file(tensors_of_file, folder / f"{number}.safetensors")
    if side == 64:
        write_json(folder / "config.json", {"quantization_config": {"weight_block_size": [64, 64]}})
    by_row = scales.float()[:, None] if scales.shape == (300,) else scales.float()
    wide = spread(scales.float(), side, shape) if side else by_row
    expected = (weight.float() * wide).numpy()
    (result,) = open_checkpoint(folder).read([Part("w", rows)])
    if rows:
        expected = np.concatenate([expected[start:stop] for start, stop in rows])
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, expected, rtol=1e-6)


BAD_SCALES = {
    "none": (None, "stored as float8 without its scales"),
    "three for 300 rows": (torch.ones(3), r"scales of shape \(3,\)"),
    "blocks that do not divide": (torch.ones(7, 2), "7 blocks of scales do not divide 300 evenly"),
    "no scale": (torch.ones(0, 2), "do not divide"),
    "three axes": (torch.ones(3, 2, 2), r"scales of shape \(3, 2, 2\)"),
    "whole numbers": (torch.ones(3, 2, dtype=torch.int32), "got I32"),
}


@pytest.mark.parametrize(("scale", "message"), BAD_SCALES.values(), ids=BAD_SCALES)
def test_float8_that_means_nothing_is_refused(folder, scale, message):
    scales = {} if scale is None else {"w_scale_inv": scale}
    save_file({"w": float8_weight(300, 200), **scales}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read(open_checkpoint(folder), "w")


# What is refused, and by which name


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
ADAPTER = b'{"peft_type": "LORA"}'
NO_WEIGHTS = r"no weights here; expected model\.safetensors"
REFUSED = [  # the files of a folder, what of it is opened, and why not
    ({"model.safetensors": POINTER}, "", r"model\.safetensors: a Git LFS pointer, not the weights"),
    ({"pytorch_model.bin": POINTER}, "", r"pytorch_model\.bin: a Git LFS pointer, not the weights"),
    (
        {"adapter_config.json": ADAPTER, "adapter_model.safetensors": save(weights(0, "lora_A"))},
        "",
        "names no base model",
    ),
    (
        {"adapter_config.json": ADAPTER, "adapter_model.bin": save(weights(0, "lora_A"))},
        "",
        "not a readable torch archive",
    ),
    ({"optimizer.pt": b""}, "", NO_WEIGHTS),
    ({"rng_state.pth": b""}, "", NO_WEIGHTS),
    ({"rng_state_0.pth": b""}, "", NO_WEIGHTS),
    ({"notes.txt": b""}, "", NO_WEIGHTS),
    ({"notes.txt": b"hello"}, "notes.txt", "not a checkpoint file"),
    ({"model.onnx": b"hello"}, "model.onnx", "ONNX"),
    ({}, "missing.safetensors", "no such file or folder"),
    ({}, "missing/folder", "no such file or folder"),
    ({}, "x" * 300 + ".safetensors", "cannot be opened|no such file"),
    ({}, "nul\0.safetensors", "no such file or folder"),
    (
        {"one.safetensors": save(weights(1, "a")), "two.safetensors": save(weights(2, "a"))},
        "",
        "tensor 'a' occurs in two files",
    ),
]


@pytest.mark.parametrize(("files", "opened", "message"), REFUSED)
def test_what_is_refused(folder, files, opened, message):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder / opened)


@pytest.mark.parametrize(
    ("present", "missing", "suggestion"),
    [
        ("mine", "later", ""),
        ("original", "orignal", "original"),
        ("original", "Original", "original"),
        ("tiny.safetensors", "tniy.safetensors", "tiny.safetensors"),
        ("later.txt", "later2", ""),  # no checkpoint has such a name
        ("o", "zzzz", ""),
    ],
)
def test_a_missing_path_suggests_checkpoints_of_similar_names_alone(
    folder, present, missing, suggestion
):
    path = folder / present
    if path.suffix:
        path.touch()
    else:
        path.mkdir()
    with pytest.raises(CheckpointError, match="no such file or folder") as caught:
        open_checkpoint(folder / missing)
    advice = f"did you mean '{folder / suggestion}'?" if suggestion else "check the path"
    assert str(caught.value).endswith(f"; {advice}")


def test_a_broken_link_does_not_suggest_itself(folder):
    link = folder / "model.safetensors"
    link.symlink_to(folder / "absent")
    with pytest.raises(CheckpointError, match="no such file or folder; check the path"):
        open_checkpoint(link)


METHODS = ["AQLM", "SpQR", "quanto"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("file", ["", "model.safetensors"])
def test_quantized_models_are_refused_by_name(folder, method, file):
    write(folder)
    write_json(folder / "config.json", {"quantization_config": {"quant_method": method}})
    with pytest.raises(CheckpointError, match=f"quantized with {method.lower()}, whose") as caught:
        open_checkpoint(folder / file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {}},
        {"quantization_config": None},
        {},
    ],
)
def test_other_configurations_are_not(folder, config):
    write(folder)
    write_json(folder / "config.json", config)
    assert open_checkpoint(folder).config == config


def test_a_quantization_without_keys_is_refused(folder):
    write(folder)
    write_json(folder / "config.json", {"quantization_config": "?"})
    with pytest.raises(CheckpointError, match="must have keys; expected an object, got '\\?'"):
        open_checkpoint(folder)


def test_an_error_begins_with_a_name_that_its_message_also_contains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    with pytest.raises(
        CheckpointError, match=r"^model: no weights here; expected model\.safetensors"
    ):
        open_checkpoint("model")


BAD_INDEXES = {
    **BAD_INDEXES,
    "long": ({"weight_map": {"a": "x" * 300}}, "File name too long|is missing"),
    "half a character": ({"weight_map": {"a": "\ud800"}}, "is missing"),
}


@pytest.mark.parametrize(("index", "message"), BAD_INDEXES.values(), ids=BAD_INDEXES)
@pytest.mark.parametrize("name", [INDEX, "pytorch_model.bin.index.json"])
def test_an_index_that_lies_is_refused(folder, index, message, name):
    save_file(weights(1, "a"), folder.parent / "model-1.safetensors")
    write_json(folder / name, index)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


UNREADABLE = {
    "a folder": (lambda path: path.mkdir(), "not a regular file"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "an empty file": (lambda path: path.touch(), "0 bytes|not valid JSON"),
    "a link to nothing": (lambda path: path.symlink_to("nothing"), "No such file"),
    "a link to itself": (lambda path: path.symlink_to(path), "symbolic links|cannot be"),
    "a terabyte of zeros": (sparse, "not valid JSON|too large"),
}


@pytest.mark.parametrize(("make", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_file_of_weights(folder, make, message):
    make(folder / "model.safetensors")
    with within(2), pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
@pytest.mark.parametrize("kind", sorted({*UNREADABLE} - {"a link to nothing", "a link to itself"}))
def test_what_is_no_file_of_json(folder, name, kind):
    make, message = UNREADABLE[kind]
    if name == "config.json":
        write(folder)
    make(folder / name)
    with within(2), pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 5000, "\udcff", "null"])
def test_a_configuration_that_is_no_json(folder, text):
    write(folder)
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|.*expected a JSON)"):
        open_checkpoint(folder)


def test_a_file_that_shrinks_after_it_was_opened(folder):
    write(folder)
    checkpoint = open_checkpoint(folder)
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 40)
    with pytest.raises(CheckpointError, match="during the read"):
        read(checkpoint, "a", "b")


@pytest.mark.parametrize("function", ["open", "preadv"])
def test_a_file_that_the_system_refuses(folder, monkeypatch, function):
    # Root reads everything, so the refusal has to be played.
    write(folder)
    monkeypatch.setattr(os, function, failing(PermissionError(13, "Permission denied")))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be .*\(Permission"):
        open_checkpoint(folder)


def test_files_are_closed_with_their_checkpoint(folder):
    write(folder)
    handles = Path("/proc/self/fd")
    if not handles.exists():
        pytest.skip("counts open files through /proc")
    before = len(list(handles.iterdir()))
    for _ in range(20):
        open_checkpoint(folder)
    assert len(list(handles.iterdir())) <= before + 1


def test_a_wanted_part_knows_its_bytes(folder):
    write(folder)
    info = open_checkpoint(folder).info("a")
    assert (info.dtype, info.shape, info.nbytes) == ("F32", (6, 4), 96)
    assert Part("a").nbytes(info) == 96
    assert Part("a", ((0, 1), (3, 5))).nbytes(info) == 48


def test_a_file_that_is_written_to_while_it_is_read_is_refused(folder):
    tensors, path = write(folder), folder / "model.safetensors"
    checkpoint = open_checkpoint(path)
    assert_holds(checkpoint, tensors)
    with path.open("r+b") as file:
        file.write(path.read_bytes())
    os.utime(path, ns=(0, 0))
    with pytest.raises(CheckpointError, match="changed during the read"):
        read(checkpoint, "a")


def test_a_file_that_is_replaced_while_it_is_read_stays_what_it_was(folder):
    tensors = write(folder)
    checkpoint = open_checkpoint(folder)
    save_file(weights(7, "a", "b"), folder / "other.safetensors")
    (folder / "other.safetensors").replace(folder / "model.safetensors")
    assert_holds(checkpoint, tensors)


def test_a_checkpoint_that_is_replaced_while_it_is_opened_is_refused(folder, monkeypatch):
    """Headers of the old shards and of the new ones would be one model."""
    write(folder, "shards")
    plain, opened = local.LocalFile.__init__, []

    def replace_others(file: local.LocalFile, *arguments: object) -> None:
        plain(file, *arguments)
        opened.append(file)
        if len(opened) == 3:  # the index, the configuration, a shard
            for path in folder.glob("*.safetensors"):
                shutil.copy(path, folder / "new")
                (folder / "new").replace(path)

    monkeypatch.setattr(local.LocalFile, "__init__", replace_others)
    with pytest.raises(CheckpointError, match="was replaced while the checkpoint was opened"):
        open_checkpoint(folder)
