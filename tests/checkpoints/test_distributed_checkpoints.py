"""Folders of torch.distributed.checkpoint: written by PyTorch, in chunks, damaged and hostile."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tests.checkpoints.stored import read_all
from tests.limits import refused
from torch.distributed.checkpoint import filesystem, metadata

import wqk
from wqk.checkpoints import Part, TensorInfo, open_checkpoint
from wqk.errors import CheckpointError, WqkError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")

Tensors = dict[str, torch.Tensor]
# Boxes of a 6 × 5 tensor: where each begins, and its shape; as ranks of a mesh would write them.
BOXES = [((0, 0), (2, 5)), ((2, 0), (4, 2)), ((2, 2), (4, 3))]


def weights(**dtypes: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(6, 5, generator=generator).to(kind) for name, kind in dtypes.items()}


def write_chunks(
    folder: Path,
    tensors: Tensors,
    boxes: dict[str, list[tuple[Any, Any]]] | None = None,
    **changes: Any,
) -> None:
    """Write tensors in boxes over two files, described in PyTorch's own records."""
    folder.mkdir(exist_ok=True, parents=True)
    files = {name: io.BytesIO() for name in ("__0_0.distcp", "__1_0.distcp")}
    described: dict[str, Any] = {"step": metadata.BytesStorageMetadata()}
    stored = {}
    for name, tensor in tensors.items():
        boxes_of_tensor = (boxes or {}).get(name, BOXES)
        for number, (begin, shape) in enumerate(boxes_of_tensor):
            file, stream = list(files.items())[number % 2]
            offset = stream.tell()
            box = tuple(slice(a, a + n) for a, n in zip(begin, shape, strict=True))
            torch.save(tensor[box].clone(), stream)
            place = {"relative_path": file, "offset": offset, "length": stream.tell() - offset}
            index = metadata.MetadataIndex(name, torch.Size(begin), number)
            stored[index] = filesystem._StorageInfo(**(place | changes))
        described[name] = metadata.TensorStorageMetadata(
            metadata.TensorProperties(tensor.dtype),
            tensor.size(),
            [
                metadata.ChunkStorageMetadata(torch.Size(b), torch.Size(s))
                for b, s in boxes_of_tensor
            ],
        )
    for file, stream in files.items():
        (folder / file).write_bytes(stream.getvalue())
    description = metadata.Metadata(described, None, stored)
    (folder / ".metadata").write_bytes(pickle.dumps(description))


def loaded_by_pytorch(folder: Path, tensors: Tensors) -> Tensors:
    """The tensors as PyTorch's own loader reads them."""
    loaded = {name: torch.zeros_like(value) for name, value in tensors.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    return loaded


def test_tensors_are_put_together_from_their_chunks(tmp_path: Path) -> None:
    tensors = weights(a=torch.float32, b=torch.bfloat16, c=torch.float64)
    write_chunks(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tensors()["b"] == TensorInfo("BF16", (6, 5), 60)
    for name, value in loaded_by_pytorch(tmp_path, tensors).items():
        assert value.equal(tensors[name])
        expected = value.double().numpy()
        np.testing.assert_array_equal(checkpoint.read([Part(name)])[0], expected)
        for rows in [((1, 4), (5, 6)), ((3, 6), (0, 1)), ((0, 2),), ((4, 5),)]:
            (chosen_rows,) = checkpoint.read([Part(name, rows)])
            np.testing.assert_array_equal(
                chosen_rows, np.concatenate([expected[a:b] for a, b in rows])
            )


def test_float8_is_listed_with_its_type(tmp_path: Path) -> None:
    write_chunks(tmp_path, {**weights(a=torch.float8_e4m3fn), **weights(b=torch.float32)})
    assert open_checkpoint(tmp_path).tensors()["a"] == TensorInfo("F8_E4M3", (6, 5), 30)
    with pytest.raises(CheckpointError, match="without its scales"):
        open_checkpoint(tmp_path).read([Part("a")])


def save(model: Path, folder: Path, nested: tuple[str, ...] = ("model",)) -> None:
    """Save a model in PyTorch's format, with an optimizer's state, as trainers nest them."""
    tensors: Any = load_file(model / "model.safetensors")
    moments = {f"optimizer.state.{name}.exp_avg": value for name, value in tensors.items()}
    for key in reversed(nested):
        tensors = {key: tensors}
    dcp.save({**tensors, "step": 7, **moments}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize(
    ("place", "nested"),
    [(".", ("model",)), (".", ()), (".", ("app", "model")), ("pytorch_model_fsdp_0", ("model",))],
)
def test_what_pytorch_writes_is_the_model(tmp_path: Path, place: str, nested: Any) -> None:
    model = wqk.demo_model("decoder")
    save(model, tmp_path / "checkpoint-7" / place, nested)
    shutil.copy(model / "config.json", tmp_path)  # of the run
    checkpoint = open_checkpoint(tmp_path / "checkpoint-7")
    assert checkpoint.step == 7
    assert checkpoint.tensors().keys() == open_checkpoint(model).tensors().keys()
    comparison = wqk.same(model, tmp_path / "checkpoint-7", everything=True)
    assert comparison.same, str(comparison)
    frame, expected = (wqk.scan(ref).frame for ref in (tmp_path, model))  # the run's last step
    assert frame["symmetry"].equals(expected["symmetry"])


FSDP = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel
rank, folder, model = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=2
)
network = AutoModel.from_pretrained(model, dtype=torch.bfloat16)
mesh = init_device_mesh("cpu", (2,))
for module in network.modules():
    if type(module).__name__.endswith("DecoderLayer"):
        fully_shard(module, mesh=mesh)
fully_shard(network, mesh=mesh)
optimizer = torch.optim.AdamW(network.parameters())
ids = torch.arange(8)[None]
network(input_ids=ids).last_hidden_state.float().square().mean().backward()
weights, moments = get_state_dict(network, optimizer)
dcp.save({"app": {"model": weights, "optim": moments}}, checkpoint_id=folder)
shards = dcp.HuggingFaceStorageWriter(folder + "-shards", save_distributed=True)
dcp.save(weights, storage_writer=shards)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def small_llama(tmp_path_factory: Any) -> Path:
    """A small LLaMA, whose rows do not divide evenly among two ranks."""
    from transformers import LlamaConfig, LlamaModel

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(hidden_size=24, head_dim=6, intermediate_size=33, vocab_size=51, **sizes)
    LlamaModel(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: Any, small_llama: Path) -> Path:
    """A checkpoint that two ranks of FSDP 2 have written."""
    folder = tmp_path_factory.mktemp("fsdp") / "step-5"
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FSDP, str(rank), str(folder), str(small_llama)],
            env=environment,
        )
        for rank in range(2)
    ]
    assert [rank.wait(240) for rank in ranks] == [0, 0]
    for name in (folder, folder.with_name("step-5-shards")):
        shutil.copy(small_llama / "config.json", name)
    return folder


def test_two_ranks_of_fsdp_are_one_model(fsdp: Path, small_llama: Path) -> None:
    assert len(list(fsdp.glob("*.distcp"))) == 2
    comparison = wqk.same(small_llama, fsdp, everything=True)
    assert comparison.same, str(comparison)
    assert comparison.to_dict()["same"]
    tensors = load_file(small_llama / "model.safetensors")
    nested = {"app": {"model": {name: torch.zeros_like(value) for name, value in tensors.items()}}}
    dcp.load(nested, checkpoint_id=fsdp, no_dist=True)  # PyTorch's own loader
    checkpoint = open_checkpoint(fsdp)
    for name, value in nested["app"]["model"].items():
        (read,) = checkpoint.read([Part(name)])
        np.testing.assert_array_equal(read, value.float().numpy())


def test_shards_of_safetensors_that_ranks_write_are_joined(fsdp: Path, small_llama: Path) -> None:
    folder = fsdp.with_name("step-5-shards")
    if (folder / "sharded").is_dir():
        folder = folder / "sharded"
        shutil.copy(small_llama / "config.json", folder)
    assert len(list(folder.glob("shard-*.safetensors"))) == 2
    assert wqk.same(small_llama, folder, everything=True).same


def test_a_wrong_conversion_is_found(tmp_path: Path) -> None:
    model = wqk.demo_model("decoder")
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("key.weight"))
    tensors[name] = tensors[name].flip(0)
    dcp.save({"model": tensors}, checkpoint_id=tmp_path, no_dist=True)
    shutil.copy(model / "config.json", tmp_path)
    assert not wqk.same(model, tmp_path, everything=True).same


def torchtitan_names(small_llama: Path) -> Tensors:
    """The weights as torchtitan calls and orders them: rotated dimensions lie side by side."""
    config = json.loads((small_llama / "config.json").read_text())
    names = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "embed_tokens": "tok_embeddings",
    }
    tensors = {}
    for name, value in load_file(small_llama / "model.safetensors").items():
        counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for projection, count in counts.items():
            if projection in name:
                heads, width = config[count], value.shape[1]
                value = value.view(heads, 2, -1, width).transpose(1, 2).reshape(-1, width)
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        tensors[name.removeprefix("model.")] = value.contiguous()
    return tensors


def test_a_conversion_to_torchtitan_is_checked(tmp_path: Path, small_llama: Path) -> None:
    tensors = torchtitan_names(small_llama)
    dcp.save(dict(tensors), checkpoint_id=tmp_path / "right", no_dist=True)
    wrong = load_file(small_llama / "model.safetensors")["layers.0.self_attn.q_proj.weight"]
    tensors["layers.0.attention.wq.weight"] = wrong
    dcp.save(tensors, checkpoint_id=tmp_path / "wrong", no_dist=True)
    shutil.copy(small_llama / "config.json", tmp_path)
    right = wqk.same(small_llama, tmp_path / "right", everything=True)
    assert right.same, str(right)
    assert not wqk.same(small_llama, tmp_path / "wrong", everything=True).same


def test_numbers_of_heads_that_are_nowhere_are_asked_for(tmp_path: Path, small_llama: Path) -> None:
    dcp.save(torchtitan_names(small_llama), checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(WqkError, match="heads") as caught:
        wqk.scan(tmp_path)
    assert "\n" not in str(caught.value)
    model = wqk.open(tmp_path, heads_per_layer=4, key_heads=2)
    expected = wqk.scan(small_llama, heads=False).frame["symmetry"]
    np.testing.assert_allclose(wqk.scan(model, heads=False).frame["symmetry"], expected, rtol=1e-5)


def megatron_tensors(small_llama: Path) -> Tensors:
    """The weights in Megatron-core's layout, as its documentation describes it.

    Layers are stacked along the first axis. ``linear_qkv`` has for each group its queries, its key
    and its value; ``linear_fc1`` the gate before what it multiplies.
    """
    tensors = load_file(small_llama / "model.safetensors")
    layers = range(3)

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([tensors[f"layers.{layer}.{name}.weight"] for layer in layers])

    fused = []
    for layer in layers:
        attention = f"layers.{layer}.self_attn"
        query = tensors[f"{attention}.q_proj.weight"].view(2, 12, 24)  # two groups of two heads
        key = tensors[f"{attention}.k_proj.weight"].view(2, 6, 24)
        value = tensors[f"{attention}.v_proj.weight"].view(2, 6, 24)
        fused.append(torch.cat([query, key, value], dim=1).reshape(48, 24))
    decoder = "decoder.layers"
    return {
        f"{decoder}.self_attention.linear_qkv.weight": torch.stack(fused),
        f"{decoder}.self_attention.linear_qkv.layer_norm_weight": stacked("input_layernorm"),
        f"{decoder}.self_attention.linear_proj.weight": stacked("self_attn.o_proj"),
        f"{decoder}.mlp.linear_fc1.layer_norm_weight": stacked("post_attention_layernorm"),
        f"{decoder}.mlp.linear_fc1.weight": torch.cat(
            [stacked("mlp.gate_proj"), stacked("mlp.up_proj")], dim=1
        ),
        f"{decoder}.mlp.linear_fc2.weight": stacked("mlp.down_proj"),
        "decoder.final_layernorm.weight": tensors["norm.weight"],
        "embedding.word_embeddings.weight": tensors["embed_tokens.weight"],
    }


def write_megatron(folder: Path, tensors: Tensors, **changes: Any) -> None:
    """Write one chunk for each layer and tensor-parallel rank, and what the ranks share.

    ``changes`` are other arguments of the training script.
    """
    boxes = {}
    for name, value in tensors.items():
        shape = tuple(value.shape)
        if name.startswith("decoder.layers") and len(shape) == 3:
            half = shape[1] // 2
            boxes[name] = [
                ((layer, start, 0), (1, size, shape[2]))
                for layer in range(shape[0])
                for start, size in ((0, half), (half, shape[1] - half))
            ]
        else:
            boxes[name] = [((0,) * len(shape), shape)]
    write_chunks(folder, tensors, boxes)
    arguments = SimpleNamespace(
        num_layers=3,
        hidden_size=24,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=6,
        position_embedding_type="rope",
        rotary_base=10000,
        rotary_percent=1.0,
        rotary_interleaved=False,
        normalization="RMSNorm",
    )
    vars(arguments).update(changes)
    torch.save({"args": arguments, "iteration": 40}, folder / "common.pt")
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(about))


def test_megatron_core_is_compared_and_scored(tmp_path: Path, small_llama: Path) -> None:
    folder = tmp_path / "iter_0000040"
    write_megatron(folder, megatron_tensors(small_llama))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.step == 40
    assert checkpoint.config["model_type"] == "megatron-core"
    names = checkpoint.tensors()
    assert names["decoder.layers.2.self_attention.linear_qkv.weight"].shape == (48, 24)
    rows = Part("decoder.layers.1.self_attention.linear_qkv.weight", ((20, 30), (2, 3)))
    (chosen_rows,) = checkpoint.read([rows])
    stored_layer = megatron_tensors(small_llama)["decoder.layers.self_attention.linear_qkv.weight"][
        1
    ]
    np.testing.assert_array_equal(chosen_rows, stored_layer[[*range(20, 30), 2]].float().numpy())
    columns = ["symmetry", "directionality", "norm"]
    expected = wqk.scan(small_llama).frame.select(columns)
    scores = wqk.scan(tmp_path).frame
    np.testing.assert_allclose(scores.select(columns), expected, rtol=1e-6)
    comparison = wqk.same(small_llama, folder)
    assert comparison.same, str(comparison)


def test_gains_of_megatron_may_be_stored_as_differences_from_1(
    tmp_path: Path, small_llama: Path
) -> None:
    tensors = megatron_tensors(small_llama)
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name] - 1
    for is_from_one in (True, False):
        folder = tmp_path / str(is_from_one)
        write_megatron(folder, tensors, apply_layernorm_1p=is_from_one)
        folded = [
            wqk.scan(model, fold_norm=True, heads=False).frame["symmetry"]
            for model in (small_llama, folder)
        ]
        assert np.allclose(*folded, rtol=1e-5) == is_from_one
        assert wqk.same(small_llama, folder).same == is_from_one


@pytest.mark.parametrize(
    ("changes", "rotary", "key_heads"),
    [
        ({}, True, 2),
        ({"position_embedding_type": "none"}, False, 2),
        ({"group_query_attention": False, "num_query_groups": 1}, True, 4),
    ],
)
def test_arguments_of_megatron_become_settings(
    tmp_path: Path,
    small_llama: Path,
    changes: dict[str, Any],
    rotary: bool,
    key_heads: int,
) -> None:
    tensors = megatron_tensors(small_llama)
    if key_heads == 4:  # 48 rows are then the queries, keys and values of 4 heads of width 4
        changes = {**changes, "kv_channels": 4}
        output = "decoder.layers.self_attention.linear_proj.weight"
        tensors[output] = tensors[output][:, :, :16]
    write_megatron(tmp_path, tensors, **changes)
    plan = wqk.open(tmp_path)[1].plan
    assert (plan.rotary is not None) == rotary
    assert plan.key.heads == key_heads


def test_latent_attention_of_megatron_is_refused(tmp_path: Path, small_llama: Path) -> None:
    write_megatron(tmp_path, megatron_tensors(small_llama), multi_latent_attention=True)
    with pytest.raises(CheckpointError, match="latent attention is not read"):
        wqk.open(tmp_path)


def test_it_is_read_without_pytorch(tmp_path: Path) -> None:
    write_chunks(tmp_path, weights(a=torch.float32))
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
    planted = metadata.Metadata({"a": Attack()}) if inside else Attack()  # type: ignore[dict-item]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(planted))
    with pytest.raises(CheckpointError, match="contains more than the description of tensors"):
        open_checkpoint(tmp_path)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_path": "../secret"}, "outside of the folder"),
        ({"relative_path": "/etc/passwd"}, "outside of the folder"),
        ({"relative_path": "__9_0.distcp"}, "__9_0.distcp, which is missing"),
        ({"offset": -1}, "'a' has a shape or offset that is not a whole number"),
        ({"offset": 2**40}, "beyond the file: truncated"),
        ({"length": 2**62}, "beyond the file: truncated"),
        ({"transform_descriptors": ["zstd"]}, "is compressed"),
    ],
)
def test_places_that_are_none_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_chunks(tmp_path, weights(a=torch.float32), **changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([((0, 0), (2, 5))], "do not make it up"),
        ([((0, 0), (3, 5)), ((0, 0), (3, 5))], "do not make it up"),
        ([((0, 0), (6, 6))], "outside of it"),
        ([((0,), (30,))], "unknown way|outside of it"),
        ([((0, 0), (2**62, 2**62))], "'a' has an impossible shape"),
    ],
)
def test_chunks_that_do_not_make_up_a_tensor_are_refused(
    tmp_path: Path, boxes: Any, message: str
) -> None:
    write_chunks(tmp_path, weights(a=torch.float32))
    content = pickle.loads((tmp_path / ".metadata").read_bytes())
    chunks = [metadata.ChunkStorageMetadata(torch.Size(b), torch.Size(s)) for b, s in boxes]
    content.state_dict_metadata["a"].chunks = chunks
    place = next(iter(content.storage_data.values()))
    content.storage_data = {metadata.MetadataIndex("a", torch.Size(b)): place for b, _ in boxes}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_chunks_that_are_not_what_is_described_are_refused(tmp_path: Path) -> None:
    write_chunks(tmp_path, weights(a=torch.float32))
    content = pickle.loads((tmp_path / ".metadata").read_bytes())
    content.state_dict_metadata["a"].properties.dtype = torch.bfloat16
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="expected BF16 of shape"):
        open_checkpoint(tmp_path).read([Part("a")])


def test_damaged_descriptions_are_read_or_refused(tmp_path: Path) -> None:
    write_chunks(tmp_path, weights(a=torch.float32))
    undamaged, outcomes = (tmp_path / ".metadata").read_bytes(), {refused(read_all, tmp_path)}
    for seed in range(40):
        random, content = np.random.default_rng(seed), bytearray(undamaged)
        for place in random.integers(0, len(content), random.integers(1, 8)):
            content[place] = random.integers(0, 256)
        (tmp_path / ".metadata").write_bytes(content[: random.integers(1, len(content) + 1)])
        outcomes.add(refused(read_all, tmp_path))
    assert outcomes == {True, False}


def test_a_folder_without_its_description_is_not_complete(tmp_path: Path) -> None:
    write_chunks(tmp_path, weights(a=torch.float32))
    (tmp_path / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"without \.metadata, which is written last"):
        open_checkpoint(tmp_path)


def test_shards_whose_offsets_are_wrong_are_refused(tmp_path: Path) -> None:
    for number, begin in enumerate([(0, 0), (2, 1)]):
        about = {"DCP_SHARDING_INFO": json.dumps({"a": {"saved_offsets": begin}})}
        name = f"shard-0000{number}-model-00001-of-00001.safetensors"
        save_file({"a": torch.zeros(2, 3)}, tmp_path / name, metadata=about)
    with pytest.raises(CheckpointError, match="do not make it up"):
        open_checkpoint(tmp_path)
