"""GGUF files: each block type against ggml's own reader, conversions as llama.cpp makes them."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import small
from tests.limits import counts, refused

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.checkpoint import Grid, Part
from wqk.checkpoints.gguf import TYPES
from wqk.checkpoints.gguf_blocks import QUANTIZED
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.sameness.tensor_comparisons import Outcome

gguf = pytest.importorskip("gguf")

LAYERS, D, H, G, R = 2, 64, 4, 2, 32


def named(kind: str) -> Any:
    return getattr(gguf.GGMLQuantizationType, kind)


def test_types_have_ggml_s_names() -> None:
    assert {kind.value: kind.name for kind in gguf.GGMLQuantizationType}.items() <= TYPES.items()


# Block types that ggml's package in Python does not unpack.
ELSEWHERE = {"Q1_0"}


@pytest.mark.parametrize("kind", [kind for kind in QUANTIZED if kind not in ELSEWHERE])
def test_every_block_type_is_unpacked_as_ggml_does(kind: str) -> None:
    quantization = QUANTIZED[kind]
    stored = np.random.default_rng(0).integers(0, 256, (64, quantization.nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some bytes are an infinite scale
        expected = gguf.quants.dequantize(stored.copy(), named(kind))
        values = quantization.unpack(stored)
    assert gguf.GGML_QUANT_SIZES[named(kind)] == (quantization.values, quantization.nbytes)
    assert quantization.values % quantization.shared == 0
    finite = np.isfinite(expected)
    assert finite.mean() > 0.8
    np.testing.assert_array_equal(values.reshape(expected.shape)[finite], expected[finite])


def test_single_bits_are_signs_of_the_scale() -> None:
    """As dequantize_row_q1_0 of ggml: a set bit is the scale, any other minus the scale."""
    stored = np.random.default_rng(0).integers(0, 256, (8, 18), dtype=np.uint8)
    stored[:, :2] = np.array([[0.5]], np.float16).view(np.uint8)
    values = QUANTIZED["Q1_0"].unpack(stored)
    for block, row in zip(stored, values, strict=True):
        for at in range(128):
            is_set = block[2 + at // 8] >> (at % 8) & 1
            assert row[at] == (0.5 if is_set else -0.5)


@pytest.mark.parametrize("kind", ["F32", "NVFP4", "Q8_0", "TQ2_0"])
@pytest.mark.parametrize("ending", ["scale", "input_scale"])
def test_a_factor_next_to_a_weight_multiplies_it(kind: str, ending: str, tmp_path: Path) -> None:
    shape, path = (8, 512), tmp_path / "model.gguf"
    block, nbytes = gguf.GGML_QUANT_SIZES[named(kind)]
    stored = np.random.default_rng(0).integers(0, 100, (8, 512 // block * nbytes), np.uint8)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("blk.0.attn_q.weight", stored, raw_dtype=named(kind))
    writer.add_tensor(f"blk.0.attn_q.{ending}", np.array([3.0], np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_tensors_to_file()
    writer.close()
    weight = gguf.quants.dequantize(stored, named(kind)).astype(np.float64).reshape(shape)
    expected = weight * (3 if ending == "scale" else 1)
    checkpoint = open_checkpoint(path)
    rows, matrix = checkpoint.read(
        [Part("blk.0.attn_q.weight", ((3, 5),)), Part("blk.0.attn_q.weight")]
    )
    np.testing.assert_allclose(matrix, expected, rtol=1e-6)
    np.testing.assert_array_equal(rows, matrix[3:5])


def test_a_factor_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tensor("blk.0.attn_q.weight", np.ones((8, 32), np.float32))
    writer.add_tensor("blk.0.attn_q.scale", np.ones(8, np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"attn_q\.scale: is not one factor .* got the shape \(8,\)"
    ):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "TQ1_0", "TQ2_0"]
)
def test_the_bound_holds_for_what_was_quantized(kind: str) -> None:
    weight = np.random.default_rng(1).standard_t(4, (64, 256)).astype(np.float32)
    stored = gguf.quants.dequantize(gguf.quants.quantize(weight, named(kind)), named(kind))
    quantized_type = QUANTIZED[kind]
    error = np.sqrt(np.mean((weight - stored) ** 2) / np.mean(stored**2))
    bound = Grid(quantized_type.shared, quantized_type.steps).rounding(stored)
    assert 1 < bound / error < (5 if kind.startswith("TQ") else 3)


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS"])
def test_the_widest_step_is_that_of_all_codes(kind: str) -> None:
    quantized_type = QUANTIZED[kind]
    stored = np.full(quantized_type.nbytes, 60, np.uint8)
    stored[-quantized_type.values // 2 :] = np.tile(17 * np.arange(16), quantized_type.values // 32)
    groups = np.sort(quantized_type.unpack(stored[None]).reshape(-1, quantized_type.shared))
    steps = np.diff(groups).max(axis=1) / np.abs(groups).max(axis=1)
    np.testing.assert_allclose(steps, quantized_type.steps, rtol=1e-6)


# The norm before fused queries, keys and values, these, and their shape.
FUSED = {
    "gpt2": ("h.{}.ln_1", "h.{}.attn.c_attn", (D, 3 * D)),
    "gpt_neox": ("layers.{}.input_layernorm", "layers.{}.attention.query_key_value", (3 * D, D)),
}


def hf(kind: str, **config: Any) -> StateDict:
    """A random model as `transformers` stores it, in single precision."""
    sizes = {"layers": LAYERS, "heads": H, "key_heads": G, "head_width": R, "width": D}
    biases = "qkv" if kind in ("llama", "qwen2") else ""
    model = small.llama(
        **sizes, sides="qkv", biases=biases, norms=True, name=kind, model_type=kind, **config
    )
    random, tensors = np.random.default_rng(1), dict(model._arrays)
    if kind == "qwen3":
        for layer, side in product(range(LAYERS), "qk"):
            name = f"model.layers.{layer}.self_attn.{side}_norm.weight"
            tensors[name] = random.uniform(0.5, 2, R)
    about = model.config
    if kind in FUSED:
        norm, fused, shape = FUSED[kind]
        tensors = {}
        for layer in range(LAYERS):
            for end in ("weight", "bias"):
                tensors[f"{norm.format(layer)}.{end}"] = 1 + random.standard_normal(D)
            tensors[f"{fused.format(layer)}.weight"] = random.standard_normal(shape)
            tensors[f"{fused.format(layer)}.bias"] = random.standard_normal(3 * D)
        about = {"n_head": H, "n_layer": LAYERS, "n_embd": D, "model_type": kind}
        about |= {"num_attention_heads": H, "num_hidden_layers": LAYERS, "hidden_size": D} | config
    tensors = {name: value.astype(np.float32) for name, value in tensors.items()}
    return StateDict(tensors, about, kind)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in the order that llama.cpp's conversion gives those of LLaMA's queries and keys."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(
    path: Path,
    model: StateDict,
    kind: str = "F32",
    key_heads: int = G,
    words: int = 5000,
    **facts: Any,
) -> Path:
    """The same model as llama.cpp stores it, its weights of some type."""
    names = {"gpt_neox": "gptneox"}
    config = model.config
    architecture = names.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(D)
    writer.add_head_count(H)
    separate = "head_dim" in config
    writer.add_head_count_kv(G if separate else H)
    if separate:
        writer.add_key_length(R)
        writer.add_rope_dimension_count(config.get("rope_dimension_count", R))
        writer.add_rope_freq_base(config.get("rope_theta", 10_000.0))
    elif architecture == "gptneox":
        writer.add_rope_dimension_count(D // H // 4)
    if separate:
        writer.add_layer_norm_rms_eps(1e-6)
    else:
        writer.add_layer_norm_eps(1e-5)
    writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(words)])
    tensors = [
        _converted(name, np.asarray(array), architecture, key_heads)
        for name, array in model._arrays.items()
    ]
    for new, array in (*tensors, *((name.replace("__", "."), v) for name, v in facts.items())):
        if array.ndim < 2 or kind == "F32":
            writer.add_tensor(new, array.astype(np.float32))
        else:
            stored = gguf.quants.quantize(array.astype(np.float32), named(kind))
            writer.add_tensor(new, stored, raw_dtype=named(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _converted(name: str, array: np.ndarray, architecture: str, groups: int) -> tuple[str, Any]:
    layer = name.split(".")[2 if name.startswith("model.") else 1]
    ending = name.rpartition(".")[2]
    norm = any(word in name for word in ("ln_1", "input_layernorm"))
    if norm:
        return f"blk.{layer}.attn_norm.{ending}", array + (architecture == "gemma")
    for side, heads in (("q", H), ("k", groups)):
        if f"{side}_norm" in name:
            return f"blk.{layer}.attn_{side}_norm.{ending}", array
        if f"{side}_proj" in name:
            rows = permuted(array, heads) if architecture == "llama" else array
            return f"blk.{layer}.attn_{side}.{ending}", np.ascontiguousarray(rows)
    if "v_proj" in name:
        return f"blk.{layer}.attn_v.{ending}", array
    if architecture == "gpt2":
        return f"blk.{layer}.attn_qkv.{ending}", np.ascontiguousarray(array.T)
    sections = array.reshape(H, 3, D // H, *array.shape[1:]).swapaxes(0, 1)
    return f"blk.{layer}.attn_qkv.{ending}", np.ascontiguousarray(sections.reshape(array.shape))


# Each type in a permuted and in a fused layout, each layout exactly and in blocks.
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
CONVERTED = [
    *product(("llama", "gpt_neox"), KINDS),
    *product(("qwen2", "qwen3", "gemma", "gpt2"), ("F32", "Q4_0")),
]


@pytest.mark.parametrize(("model", "kind"), CONVERTED)
def test_a_conversion_is_the_same_within_its_number_type(tmp_path, model, kind):
    original = hf(model)
    converted = write(tmp_path / "model.gguf", original, kind)
    for pair in ((original, converted), (converted, original)):
        comparison = wqk.same(*pair)
        assert comparison.same, comparison.sentence
        # Some of these models have values, but none has outputs.
        assert all("has no output weights" in note for note in comparison.notes)
    distance = comparison.blocks[0].distance[0]
    assert distance < 1e-6 if kind == "F32" else distance > 1e-5
    rounded = [tensor for tensor in comparison.tensors if tensor.outcome is Outcome.ROUNDED]
    assert all(0 < tensor.distance < 1 for tensor in rounded)
    faulty = hf(model)
    name = next(
        n
        for n in faulty._arrays
        if n.endswith(("q_proj.weight", "attn.weight", "key_value.weight"))
    )
    part = faulty._arrays[name]
    part[: R // 2] += (
        0.6 * np.random.default_rng(5).standard_normal(part[: R // 2].shape) * part.std()
    )
    assert not wqk.same(faulty, converted).same


def test_keys_permuted_with_the_queries_heads_are_named(tmp_path: Path) -> None:
    """The mistake of llama.cpp's first conversions of grouped heads."""
    comparison = wqk.same(hf("llama"), write(tmp_path / "a.gguf", hf("llama"), key_heads=H))
    mismatch = comparison.blocks[0].mismatches[0]
    assert mismatch.sides == ("key",)
    assert f"converted with {H} heads of width {R // 2} instead of {G} of {R}" in mismatch.reason


def test_the_scaling_of_llama_3_is_read_from_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    original = hf("llama", rope_scaling=scaling, rope_theta=500_000.0)
    plain = wqk.open(hf("llama", rope_theta=500_000.0))[0].plan.rotary
    scaled = wqk.open(original)[0].plan.rotary
    factors = (plain.frequencies / scaled.frequencies).astype(np.float32)
    facts = {"rope_freqs__weight": factors}
    assert wqk.same(original, write(tmp_path / "a.gguf", original, **facts)).same
    lost = wqk.same(original, write(tmp_path / "b.gguf", original))
    assert "rotary scaling (rope_scaling)" in lost.blocks[0].reason


def test_a_file_that_counts_no_blocks_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", hf("llama"))
    uint32 = (4).to_bytes(4, "little")  # GGUF's number of this type
    before = b"llama.block_count" + uint32
    content = path.read_bytes()
    assert before + LAYERS.to_bytes(4, "little") in content
    path.write_bytes(content.replace(before + LAYERS.to_bytes(4, "little"), before + bytes(4)))
    with pytest.raises(CheckpointError, match=r"llama\.block_count counts no block"):
        wqk.open(path)


def test_a_header_whose_tensors_do_not_follow_each_other_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", hf("llama"), words=20)
    reader = gguf.GGUFReader(str(path))
    offset = reader.tensors[3].field.parts[-1]  # the last number of an entry
    at = offset.ctypes.data - reader.data.ctypes.data
    number = int(offset[0])
    content = bytearray(path.read_bytes())
    content[at : at + 8] = (number + 32).to_bytes(8, "little")
    moved = tmp_path / "moved.gguf"
    moved.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"begins at byte {number + 32:,} .* expected {number:,}"
    ):
        wqk.open(moved)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", hf("llama"), words=20)
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_norm", b"blk.0.attn\x80norm", 1))
    with pytest.raises(CheckpointError, match="is no name"):
        wqk.open(path)


def test_only_the_rows_that_are_asked_for_are_read(tmp_path: Path) -> None:
    original = hf("llama")
    name = "model.layers.0.self_attn.v_proj.weight"
    checkpoint = open_checkpoint(write(tmp_path / "a.gguf", original, "Q8_0"))
    (rows,) = checkpoint.read([Part("blk.0.attn_v.weight", ((3, 5), (60, 61)))])
    np.testing.assert_allclose(rows, np.asarray(original._arrays[name])[[3, 4, 60]], atol=2e-2)
    assert checkpoint.info("blk.0.attn_v.weight").dtype == "Q8_0"


def test_parts_of_a_model_are_read_together(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", hf("llama"))
    assert wqk.same(hf("llama"), tmp_path).same
    write(tmp_path / "other-Q8_0.gguf", hf("llama"), "Q8_0")
    with pytest.raises(CheckpointError, match=r"several models here: model\.gguf, other-Q8_0"):
        open_checkpoint(tmp_path)
    assert wqk.same(hf("llama"), path).same


@pytest.mark.parametrize("keep", [0, 3, 20, 200, 5000, -100])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "model.gguf", hf("llama"))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"truncated|GGUF"):
        open_checkpoint(path)


def test_hostile_headers_are_refused(tmp_path: Path) -> None:
    """Each byte of a small header set to its greatest value: an error or a checkpoint, no crash."""
    path = write(tmp_path / "model.gguf", hf("llama"))
    content = path.read_bytes()
    outcomes = set()
    for place in [*range(4, 400, 3), *range(len(content) % 7, 3000, 97)]:
        path.write_bytes(content[:place] + b"\xff" + content[place + 1 :])
        outcomes.add(refused(lambda: open_checkpoint(path).tensors()))
    assert outcomes == {True, False}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # some bytes are an infinite scale
@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", *(kind for kind in QUANTIZED if kind not in ELSEWHERE)]
)
@counts(12, 200)
def test_hostile_tensors_give_an_error_or_values(tmp_path: Path, kind: str, count: int) -> None:
    """One byte of a tensor's description set, or the file cut: an error, or what ggml reads."""
    shape, path = (8, 512), tmp_path / "model.gguf"
    size = gguf.GGML_QUANT_SIZES[named(kind)]
    numbers = np.random.default_rng(list(QUANTIZED).index(kind) if kind in QUANTIZED else 0)
    writer = gguf.GGUFWriter(str(path), "llama")
    for name in ("a.weight", "b.weight"):
        stored = numbers.integers(0, 256, (shape[0], shape[1] // size[0] * size[1]), np.uint8)
        writer.add_tensor(name, stored, raw_dtype=named(kind))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    start = content.index(b"a.weight") + len(b"a.weight")
    outcomes = set()
    for number in range(count):
        changed = bytearray(content)
        if number % 10 == 9:
            del changed[numbers.integers(len(content)) :]
        elif number:
            changed[start + numbers.integers(32)] = numbers.choice([0, 1, 2, 39, 64, 128, 255])
        path.write_bytes(changed)
        try:
            (read,) = open_checkpoint(path).read([Part("a.weight")])
        except CheckpointError:
            outcomes.add("error")
            continue
        (of_library,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "a.weight")
        empty = np.zeros(0)  # of which ggml's own package makes nothing
        expected = (
            gguf.quants.dequantize(of_library.data, of_library.tensor_type)
            if of_library.data.size
            else empty
        )
        np.testing.assert_array_equal(read.reshape(expected.shape), expected)
        outcomes.add("values")
    assert outcomes == {"error", "values"}


def retyped(path: Path, kind: str) -> Path:
    """Write a file of the first queries alone, whose header gives them another type."""
    original = hf("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    queries = StateDict({name: np.asarray(original._arrays[name])}, original.config, "queries")
    write(path, queries, "Q8_0")
    content = bytearray(path.read_bytes())
    at = content.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    assert content[at] == named("Q8_0")
    content[at] = named(kind)
    path.write_bytes(content)
    return path


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(retyped(tmp_path / "model.gguf", "Q8_K"))
    with pytest.raises(CheckpointError, match="Q8_K"):
        checkpoint.read([Part("blk.0.attn_q.weight")])


@pytest.mark.parametrize("kind", ["IQ4_NL", "MXFP4"])
def test_types_of_ggmls_own_package_need_it(tmp_path, monkeypatch, kind):
    path = retyped(tmp_path / "model.gguf", kind)
    part = Part("blk.0.attn_q.weight", ((3, 5),))
    (rows,) = open_checkpoint(path).read([part])
    assert rows.shape == (2, D)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(CheckpointError, match=rf"{kind} .* pip install gguf"):
        open_checkpoint(path).read([part])


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_all_tensors_of_a_conversion_are_found_whatever_they_are_called(tmp_path, kind):
    """Gains that were never trained are equal; quantized weights are only nearly what they were."""
    attention, random = hf("llama"), np.random.default_rng(0)
    ending_by_name = {"post_attention_layernorm": "ffn_norm", "mlp.up_proj": "ffn_up"}
    added = {
        f"{layer}.{name}": random.standard_normal((64, D)) if "mlp" in name else np.ones(D)
        for layer in range(LAYERS)
        for name in ending_by_name
    }
    tensors = {f"model.layers.{name}.weight": v.astype(np.float32) for name, v in added.items()}
    original = StateDict(attention._arrays | tensors, attention.config, "llama")
    facts = {}
    for name, value in tensors.items():
        layer, _, module = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
        facts[f"blk__{layer}__{ending_by_name[module]}__weight"] = value.copy()
    comparison = wqk.same(
        original, write(tmp_path / "a.gguf", attention, kind, **facts), everything=True
    )
    assert comparison.same, comparison
    assert "self 1." not in comparison.sentence  # heads of the only attention are 1.0
    assert comparison.unknown == ("values",)
    facts["blk__1__ffn_up__weight"][3] *= -1
    wrong = wqk.same(
        original, write(tmp_path / "b.gguf", attention, kind, **facts), everything=True
    )
    assert not wrong.same
    assert "mlp.up_proj" in str(wrong)
    exchanged = [f"model.layers.{1 - int(name[0])}{name[1:]}.weight" for name in added]
    facts = dict(zip((name.replace(".", "__") for name in exchanged), added.values(), strict=True))
    exchanged_file = write(tmp_path / "c.gguf", attention, kind, **facts)
    assert not wqk.same(original, exchanged_file, everything=True)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_exchanged_layers_of_a_conversion_are_named(tmp_path: Path, kind: str) -> None:
    """The layers' rows have another rotary order, and quantized ones are only nearly equal."""
    original = hf("llama")
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    exchanged = dict(original._arrays)
    exchanged[names[0]], exchanged[names[1]] = exchanged[names[1]], exchanged[names[0]]
    file = write(tmp_path / "a.gguf", StateDict(exchanged, original.config, "llama"), kind)
    comparison = wqk.same(original, file)
    reasons = [cause.mismatch.reason for cause in comparison.causes]
    assert len(reasons) == 2
    for layer, reason in enumerate(reasons):
        assert f"holds weights of layer {1 - layer}" in reason
