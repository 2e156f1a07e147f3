"""Quantized matrices next to the values to which their own libraries dequantize them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import torch as safetensors
from tests.checkpoints.attacking import mutated
from tests.checkpoints.dequantizing import CONFIGS, STORED
from tests.limits import counts
from tests.small import save as write
from tests.small import sizes

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.files import unpacked
from wqk.errors import CheckpointError
from wqk.storage.local import LocalFile

# Libraries that round what they dequantize: one to bfloat16, the other divides where we multiply.
ROUNDED = {"nvfp4-pack-quantized-4-tensor_group": 2**-8, "int8": 2**-22}


def case(name: str, at: str = "a") -> tuple[dict[str, Any], np.ndarray, dict[str, Any]]:
    """A case's tensors under a module's name, the values, and the configuration."""
    stored = safetensors.load(STORED)
    tensors = {k.removeprefix(f"{name}/"): v for k, v in stored.items() if k.startswith(f"{name}/")}
    values = tensors.pop("values").numpy()
    return (
        {f"{at}.{key}": value for key, value in tensors.items()},
        values,
        json.loads(CONFIGS[name]),
    )


# Of which rows are no ranges of bytes.
WHOLE = ("awq", "gptq", "hqq", "gpt-oss")


@pytest.mark.parametrize("name", CONFIGS)
def test_values_are_the_librarys_own(name, tmp_path, monkeypatch):
    counts: list[int] = []
    read_into = LocalFile.read_into
    monkeypatch.setattr(
        LocalFile,
        "read_into",
        lambda *arguments: (counts.append(len(arguments[2])), read_into(*arguments)),
    )
    tensors, values, config = case(name)
    checkpoint = open_checkpoint(write(tmp_path, tensors, config))
    (info,) = checkpoint.tensors().values()
    assert [*checkpoint.tensors()] == ["a.weight"]
    assert info.shape == values.shape
    assert info.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    (read,) = checkpoint.read([Part("a.weight")])
    assert read.dtype == np.float32
    np.testing.assert_allclose(read, values, rtol=ROUNDED.get(name, 0))
    counts.clear()
    count = len(values)
    (chosen_rows,) = checkpoint.read([Part("a.weight", ((count // 2, count // 2 + 1), (0, 1)))])
    np.testing.assert_array_equal(chosen_rows, read[[count // 2, 0]])
    assert (sum(counts) < info.nbytes) != name.startswith(WHOLE)


ABOUT = sizes(64, 2, 4, model_type="llama", head_dim=8, num_key_value_heads=4)


def llama(quantize: Callable[[str], tuple[dict[str, Any], np.ndarray, dict[str, Any]]]) -> Any:
    """A LLaMA whose every projection is one case, and the same with the values themselves."""
    stored: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    config: dict[str, Any] = {}
    for layer in range(2):
        for side in "qk":
            at = f"model.layers.{layer}.self_attn.{side}_proj"
            tensors, values, config = quantize(at)
            stored |= tensors
            plain[f"{at}.weight"] = torch.tensor(values)
    return stored, plain, ABOUT, config


@pytest.mark.parametrize(
    "name", ["gptq-4-ordered", "awq", "nf4-nested", "mlx-4", "torchao-int8", "hqq-4-axis0"]
)
def test_a_scan_scores_what_is_stored(name: str, tmp_path: Path) -> None:
    stored, plain, about, config = llama(lambda at: case(name, at))
    table = wqk.scan(write(tmp_path / "quantized", stored, about | config), heads=True)
    expected = wqk.scan(write(tmp_path / "plain", plain, about), heads=True)
    for column in ("symmetry", "directionality", "norm"):
        np.testing.assert_allclose(table.frame[column], expected.frame[column], rtol=1e-6)
    assert set(table.frame["status"]) == {"quantized"}
    (note,) = table.metadata["notes"]
    (kind,) = wqk.open(tmp_path / "quantized").plans[0].quantized
    assert note == f"queries and keys are stored as {kind}"


@pytest.mark.parametrize(
    "name", ["int8", "int-quantized-8-channel", "torchao-int8", "gptq-4-ordered", "hqq-4-axis0"]
)
def test_codes_are_the_same_only_under_the_same_scales(name: str, tmp_path: Path) -> None:
    stored, _, about, config = llama(lambda at: case(name, at))
    at = "layers.0.self_attn.q_proj."
    scales = [key for key in stored if at in key and re.search("SCB|scale$|scales$", key)]
    rescaled = stored | {key: 2 * stored[key] for key in scales}
    first, second = (
        write(tmp_path / f"{number}", tensors, about | config)
        for number, tensors in enumerate((stored, rescaled))
    )
    assert scales
    assert wqk.same(first, first, everything=True).same
    assert not wqk.same(first, second, everything=True).same


def packed(
    weight: np.ndarray, bits: int, order: Any = None, group: int = 32, inputs: Any = None
) -> tuple[Any, Any]:
    """Codes and scales of compressed-tensors' packed whole numbers, rounded to the nearest.

    Columns that share a scale are neighbors in ``order``. With ``inputs`` (N, I) the error of a
    column is compensated in the columns after it (GPTQ).
    """
    half = 2 ** (bits - 1)
    order = np.arange(weight.shape[1]) if order is None else order
    grouped = weight[:, order].reshape(len(weight), -1, group)
    scales = np.abs(grouped).max(axis=-1) / (half - 0.5)
    if inputs is not None:
        remaining, step_by_column = weight.copy(), np.repeat(scales, group, axis=1)
        second = inputs.T @ inputs + 0.01 * np.square(inputs).sum(0).mean() * np.eye(
            remaining.shape[1]
        )
        upper = np.linalg.cholesky(np.linalg.inv(second)).T
        for column, step in enumerate(step_by_column.T):
            error = remaining[:, column] - step * np.clip(
                np.rint(remaining[:, column] / step), -half, half - 1
            )
            remaining[:, column + 1 :] -= np.outer(
                error / upper[column, column], upper[column, column + 1 :]
            )
        grouped = remaining.reshape(grouped.shape)
    codes = np.clip(np.rint(grouped / scales[..., None]), -half, half - 1).astype(np.int64) + half
    codes = codes.reshape(weight.shape)[:, np.argsort(order)].reshape(len(weight), -1, 32 // bits)
    packed_codes = (codes << np.arange(0, 32, bits)).sum(axis=-1).astype(np.uint32).view(np.int32)
    return torch.tensor(packed_codes), torch.tensor(scales).float()


ORDER = np.random.default_rng(1).permutation(64)
Q_PROJ = "layers.1.self_attn.q_proj"


def both(folder: Path, bits: int = 4, order: Any = None) -> tuple[Path, Any, Any]:
    """A LLaMA, the tensors of the same quantized, and their configuration."""
    rng = np.random.default_rng(bits)
    plain: dict[str, Any] = {}
    stored: dict[str, Any] = {}
    for layer in range(2):
        for side in "qk":
            at = f"model.layers.{layer}.self_attn.{side}_proj"
            weight = rng.standard_normal((32, 64)) * rng.uniform(0.2, 2, (32, 1))
            largest = np.abs(weight).reshape(32, 2, 32).max(-1)
            weight = np.where(weight > 0, 0.7 * weight, weight)
            weight[:, ::32] = -largest  # so that codes are at most 14 of 15, and one may be added
            plain[f"{at}.weight"] = torch.tensor(weight.astype(np.float32))
            stored[f"{at}.weight_packed"], stored[f"{at}.weight_scale"] = packed(
                weight, bits, order
            )
            if order is not None:
                stored[f"{at}.weight_g_idx"] = torch.tensor(np.argsort(order) // 32).int()
    groups = {"g": {"weights": {"num_bits": bits}, "targets": ["Linear"]}}
    settings = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": []}
    return write(folder, plain, ABOUT), stored, ABOUT | {"quantization_config": settings}


@pytest.mark.parametrize("bits", [4, 8])
def test_what_quantization_alone_moves_is_expected_and_a_mistake_is_not(bits, tmp_path):
    original, stored, config = both(tmp_path / "original", bits)
    table = wqk.diff(original, write(tmp_path / "quantized", stored, config))
    share = table.frame["moved"] / table.frame["rounding"]
    assert share.min() > 0.7
    assert share.max() < 1.4
    assert "times what quantization alone moves" in table.result
    # Scales that were permuted without their rows.
    wrong = stored | {k: v.flip(0) for k, v in stored.items() if k.endswith("q_proj.weight_scale")}
    moved = wqk.diff(original, write(tmp_path / "wrong", wrong, config)).frame
    assert (moved["moved"] / moved["rounding"]).min() > 1.6


@pytest.mark.parametrize("kind", ["GPTQ", "AWQ"])
@pytest.mark.parametrize("bits", [4, 8])
def test_calibrated_rounding_is_quantization_alone(kind: str, bits: int, tmp_path: Path) -> None:
    original, stored, config = both(tmp_path / "original", bits)
    plain = safetensors.load_file(original / "model.safetensors")
    rng = np.random.default_rng(3)
    inputs = rng.standard_normal((256, 8)) @ rng.standard_normal((8, 64))
    inputs += 0.3 * rng.standard_normal(inputs.shape)
    factors = np.sqrt(np.abs(inputs).mean(0)) if kind == "AWQ" else np.ones(64)
    divided = torch.tensor(factors).float()
    torch.manual_seed(3)
    gains = {f"model.layers.{n}.input_layernorm.weight": torch.rand(64) + 1 for n in (0, 1)}
    write(tmp_path / "original", plain | gains, {k: config[k] for k in config if "quant" not in k})
    stored |= {name: gain / divided for name, gain in gains.items()}
    for name, weight in plain.items():
        wide = weight.numpy().astype(np.float64) * factors
        codes, scales = packed(wide, bits, inputs=inputs if kind == "GPTQ" else None)
        stored |= {f"{name}_packed": codes, f"{name}_scale": scales}
        half = 2 ** (bits - 1)
        values = unpacked(codes.numpy(), bits, 64).astype(np.float64) - half
        values *= np.repeat(scales.numpy(), 32, axis=1)
        nearest = np.clip(np.rint(wide / np.repeat(scales.numpy(), 32, axis=1)), -half, half - 1)
        nearest *= np.repeat(scales.numpy(), 32, axis=1)
        errors = [np.linalg.norm(inputs @ (rounded - wide).T) for rounded in (values, nearest)]
        assert kind == "AWQ" or errors[0] < 0.7 * errors[1]  # it is calibrated
    quantized = write(tmp_path / "quantized", stored, config)
    comparison, table = wqk.same(original, quantized), wqk.diff(original, quantized)
    assert comparison.same, comparison.sentence
    share = table.frame["moved"] / table.frame["rounding"]
    assert 0.7 < share.min() < share.max() < 1.6
    assert table.metadata["folded_norms"]
    if kind == "AWQ":  # the mistake of leaving the norm as it was
        assert not wqk.same(original, write(tmp_path / "wrong", stored | gains, config)).same


def drawn_weight(kind: str, rng: np.random.Generator) -> np.ndarray:
    """A weight (128, 128) with light or heavy tails, or with columns of outliers."""
    if kind == "heavy tails":
        return rng.standard_t(4, (128, 128))
    weight = rng.standard_normal((128, 128))
    if kind == "columns of outliers":
        weight[:, rng.permutation(128)[:5]] *= 6
    return weight


def gptq_with_zeros(weight: np.ndarray, inputs: np.ndarray | None) -> dict[str, torch.Tensor]:
    """GPTQ's four bits in groups of 32 columns, with zero points; calibrated if ``inputs``."""
    remaining, columns = weight.copy(), weight.shape[1]
    second = np.eye(columns)
    if inputs is not None:
        second = inputs.T @ inputs + 0.01 * np.square(inputs).sum(0).mean() * np.eye(columns)
    upper = np.linalg.cholesky(np.linalg.inv(second)).T
    codes, scales, zeros = np.zeros(weight.shape, np.int64), [], []
    for column in range(columns):
        if column % 32 == 0:
            group = remaining[:, column : column + 32]
            low, high = np.minimum(group.min(1), 0), np.maximum(group.max(1), 0)
            scale = ((high - low) / 15).astype(np.float16).astype(np.float64)
            zero = np.rint(-low / scale)
            scales.append(scale)
            zeros.append(zero.astype(np.int64))
        codes[:, column] = np.clip(np.rint(remaining[:, column] / scale) + zero, 0, 15)
        error = remaining[:, column] - scale * (codes[:, column] - zero)
        step = upper[column, column + 1 :] / upper[column, column]
        remaining[:, column + 1 :] -= np.outer(error, step)
    places = np.arange(0, 32, 4)
    packed_codes = (codes.T.reshape(-1, 8, len(weight)) << places[:, None]).sum(axis=1)
    packed_zeros = (((np.stack(zeros) - 1) & 15).reshape(len(zeros), -1, 8) << places).sum(axis=-1)
    return {
        "qweight": torch.tensor(packed_codes.astype(np.uint32).view(np.int32)),
        "qzeros": torch.tensor(packed_zeros.astype(np.uint32).view(np.int32)),
        "scales": torch.tensor(np.stack(scales)).half(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // 32,
    }


@pytest.mark.parametrize("kind", ["light tails", "heavy tails", "columns of outliers"])
@pytest.mark.parametrize("is_calibrated", [False, True])
def test_groups_with_each_others_scales_are_found(
    kind: str, is_calibrated: bool, tmp_path: Path
) -> None:
    """Their distance can be less than twice that of rounding, which calibration may reach."""
    rng = np.random.default_rng(7)
    config = sizes(128, 1, 4, model_type="llama", head_dim=32, num_key_value_heads=4)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
    inputs = rng.standard_normal((256, 12)) @ rng.standard_normal((12, 128))
    inputs += 0.3 * rng.standard_normal(inputs.shape)
    plain, stored = {}, {}
    for side in "qk":
        at = f"model.layers.0.self_attn.{side}_proj"
        weight = drawn_weight(kind, rng)
        plain[f"{at}.weight"] = torch.tensor(weight.astype(np.float32))
        tensors = gptq_with_zeros(weight, inputs if is_calibrated else None)
        stored |= {f"{at}.{name}": tensor for name, tensor in tensors.items()}
    original = write(tmp_path / "original", plain, config)
    config |= {"quantization_config": settings}
    assert wqk.same(original, write(tmp_path / "quantized", stored, config)).same
    at = "model.layers.0.self_attn.q_proj"
    exchanged = stored | {f"{at}.scales": stored[f"{at}.scales"][[2, 1, 0, 3]].contiguous()}
    comparison = wqk.same(original, write(tmp_path / "exchanged", exchanged, config))
    assert not comparison.same
    if kind == "light tails":  # the distance is below the tolerance
        assert max(block.farthest / block.tolerance for block in comparison.blocks) < 1
        (cause,) = comparison.causes
        assert cause.mismatch.verdict == "scales of other blocks"
        assert cause.mismatch.facts["groups"] == {f"{at}.weight": [0, 2]}


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_whose_forms_shrink_with_distance_is_quantized_alone(bits, shared, tmp_path):
    original = shared / "checkpoints" / "llama2xs-260k"
    config = json.loads((original / "config.json").read_text())
    groups = {"g": {"weights": {"num_bits": bits}, "targets": ["Linear"]}}
    config["quantization_config"] = {"quant_method": "compressed-tensors", "config_groups": groups}
    tensors = safetensors.load_file(original / "model.safetensors")
    for name in [n for n in tensors if re.search("[qk]_proj", n)]:
        codes, scales = packed(tensors.pop(name).double().numpy(), bits)
        tensors |= {f"{name}_packed": codes, f"{name}_scale": scales}
    comparison = wqk.same(original, write(tmp_path / "quantized", tensors, config))
    assert comparison.same, comparison.sentence


@pytest.mark.parametrize("name", ["torchao-int4", "torchao-float8", "float-quantized-8-channel"])
def test_rounding_is_told_of_formats_whose_bits_are_not_their_types(name, tmp_path):
    stored, plain, about, config = llama(lambda at: case(name, at))
    quantized = write(tmp_path / "quantized", stored, about | config)
    rounding = wqk.diff(write(tmp_path / "plain", plain, about), quantized).frame["rounding"]
    assert (rounding > 0.02).all()
    for factor in (1, 4):  # of the error that is expected of each of two weights
        moved = {
            k: v + factor * rounding[0] / 2**0.5 * v.std() * torch.randn(v.shape)
            for k, v in plain.items()
        }
        original = write(tmp_path / f"original{factor}", moved, about)
        assert wqk.same(original, quantized).same == (factor == 1)


def swapped(codes: Any) -> Any:
    """Packed codes with the halves of every byte exchanged."""
    packed_codes = codes.numpy().view(np.uint32)
    exchanged = (packed_codes & 0x0F0F0F0F) << 4 | (packed_codes >> 4) & 0x0F0F0F0F
    return torch.tensor(exchanged.view(np.int32))


def in_layer(tensors: dict[str, Any], change: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Tensors of one layer's queries changed, by their endings."""
    ends = {f"model.{Q_PROJ}.weight_{of}": edit for of, edit in change.items()}
    return {k: ends[k](v) if k in ends else v for k, v in tensors.items()}


def in_order(packed_codes: Any) -> Any:
    """Packed codes with their columns in the order of their groups."""
    codes = (
        unpacked(packed_codes.numpy(), 4, 64)[:, ORDER]
        .reshape(len(packed_codes), -1, 8)
        .astype(np.int64)
    )
    return torch.tensor((codes << np.arange(0, 32, 4)).sum(-1).astype(np.uint32).view(np.int32))


def as_bytes(packed_codes: Any) -> Any:
    return torch.tensor(packed_codes.numpy().view(np.uint32).byteswap().view(np.int32))


def neighbors(groups: Any) -> Any:
    return groups.sort().values


# Mistakes in a quantized file: the order in which columns share scales, what is done to which of
# a weight's tensors, and how it is named.
MISTAKES: dict[str, tuple[Any, dict[str, Callable[[Any], Any]], str]] = {
    "scales of other rows": (
        None,
        {"scale": lambda s: s.flip(0)},
        "scales of other rows or blocks",
    ),
    "scales of other blocks": (
        None,
        {"scale": lambda s: s.flip(1)},
        "scales of other rows or blocks",
    ),
    "nibbles": (None, {"packed": swapped}, "lie in another order within each 2"),
    "zero points": (None, {"packed": lambda w: w + 0x11111111}, "a zero point is off"),
    "order of words": (None, {"packed": as_bytes}, "lie in another order within each 8"),
    "act-order ignored": (ORDER, {"g_idx": neighbors}, "act-order (g_idx) is ignored"),
    "act-order not undone": (
        ORDER,
        {"packed": in_order, "g_idx": neighbors},
        "act-order was not undone",
    ),
    "act-order of another weight": (
        ORDER,
        {"g_idx": lambda g: g.flip(0)},
        "columns have the scales of another group",
    ),
}


@pytest.mark.parametrize(("order", "change", "named"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_quantized_file_are_named_and_undone(order, change, named, tmp_path):
    original, stored, config = both(tmp_path / "original", order=order)
    right = wqk.same(original, write(tmp_path / "right", stored, config))
    assert right.same
    assert "but for quantization (INT 4-bit" in right.sentence
    most = max(max(block.distance.values()) for block in right.blocks)
    assert re.search(rf"moved most, as layer.head: [01]\.[0-3] \({most:.2g}\), ", right.sentence)
    assert "by the distance of their scores, with norms, biases and positions." in right.sentence
    comparison = wqk.same(original, write(tmp_path / "wrong", in_layer(stored, change), config))
    assert not comparison.same
    assert [block.same for block in comparison.blocks] == [True, False]
    assert "beyond what quantization explains" in comparison.sentence
    assert named in comparison.sentence
    assert "moved most, as layer.head: 1." in comparison.sentence
    assert comparison.blocks[1].repair


def test_wrong_layers_are_named(tmp_path: Path) -> None:
    """Two exchanged layers; a quantized layer that should be plain, and the reverse."""
    original, stored, config = both(tmp_path / "original")
    places = {"layers.0.": "layers.1.", "layers.1.": "layers.0."}
    swapped = {re.sub(r"layers\.\d\.", lambda m: places[m[0]], k): v for k, v in stored.items()}
    plain = safetensors.load_file(original / "model.safetensors")
    mixed = {k: v for k, v in stored.items() if Q_PROJ not in k}
    mixed[f"model.{Q_PROJ}.weight"] = plain[f"model.{Q_PROJ}.weight"]
    settings = config["quantization_config"]
    listed = config | {"quantization_config": settings | {"ignore": [f"re:.*{Q_PROJ}$"]}}
    for number, (tensors, about, named) in enumerate(
        (
            (swapped, config, "layer 1 has those of layer 0"),
            (
                stored,
                listed,
                "q_proj: plain by the configuration, stored as INT 4-bit, groups of 32",
            ),
            (mixed, config, "q_proj: quantized by the configuration, stored plain"),
            (mixed, listed, "The same"),
        )
    ):
        comparison = wqk.same(original, write(tmp_path / str(number), tensors, about))
        assert named in comparison.sentence
        assert comparison.same == (named == "The same")


def test_weights_of_8_bit_floats_are_where_the_configuration_sets_them(tmp_path: Path) -> None:
    """Quantized weights of 8-bit floats have no uniform grid, and are not stored plain."""
    original, _, config = both(tmp_path / "original")
    groups = {"g": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}}
    settings = config["quantization_config"] | {"config_groups": groups}
    stored = {}
    for name, weight in safetensors.load_file(original / "model.safetensors").items():
        scale = weight.abs().max() / 448
        stored[name] = (weight / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale"] = scale[None]
    config |= {"quantization_config": settings}
    assert wqk.same(original, write(tmp_path / "float8", stored, config)).same
    config |= {"quantization_config": settings | {"ignore": [f"re:.*{Q_PROJ}$"]}}
    excluded = wqk.same(original, write(tmp_path / "excluded", stored, config))
    assert "q_proj: plain by the configuration, stored as F8_E4M3" in excluded.sentence


def test_two_quantizations_stand_side_by_side(tmp_path: Path) -> None:
    original, fine, config = both(tmp_path / "original", 8)
    _, coarse, config_of_coarse = both(tmp_path / "again", 4)
    plain = safetensors.load_file(original / "model.safetensors")
    for name in {name.rpartition(".")[0] for name in coarse}:  # of the same weights
        packed_codes, scales = packed(plain[f"{name}.weight"].numpy(), 4)
        coarse |= {f"{name}.weight_packed": packed_codes, f"{name}.weight_scale": scales}
    four, eight = (
        write(tmp_path / "int4", coarse, config_of_coarse),
        write(tmp_path / "int8", fine, config),
    )
    table = wqk.diff(original, four, beside=eight)
    alone = wqk.diff(original, eight)
    np.testing.assert_array_equal(table.frame["beside"], alone.frame["moved"])
    assert (table.frame["beside"] < 0.1 * table.frame["moved"]).all()
    worst = max(table.heads.frame.iter_rows(named=True), key=lambda row: row["moved"])
    named = f"{worst['layer']}.{worst['head']} ({worst['moved']:.2g}),"
    assert f"Heads that moved most, as layer.head: {named}" in table.result
    assert "by the distance of their forms, without norms, biases or positions." in table.result
    folded = replace(table, metadata=table.metadata | {"folded_norms": True})
    measure = "by the distance of their forms, with norms, without biases or positions."
    assert measure in folded.result
    assert "int8 moved less in 8 of 8 heads; in the median, 0.0" in table.result
    maps = [axis for axis in table.plot().axes if axis.images]
    for axis, column in zip(maps, ("moved", "beside"), strict=True):
        drawn = np.ma.filled(axis.images[0].get_array(), np.nan)
        np.testing.assert_array_equal(drawn.ravel(), table.heads.frame[column])
    titles = [axis.get_title("left") for axis in maps]
    assert titles == ["original → int4", "original → int8"]
    with pytest.raises(wqk.errors.TableError, match="a picture shows heads"):
        wqk.diff(original, four, heads=False).plot()


def hostile(dice: Random, tensors: dict[str, Any], config: Any) -> tuple[str, dict[str, Any], Any]:
    """A case with one thing wrong: its name, the tensors, the configuration."""
    key = dice.choice(sorted(tensors))
    tensor, numbers = tensors[key], np.random.default_rng(dice.randrange(2**32))
    flat = tensor.reshape(-1).clone()
    place, extreme = dice.randrange(len(flat)), dice.choice([-1, 2**31 - 1, -(2**31), 127, 255])
    kind = dice.choice(["shape", "type", "noise", "extreme", "NaN", "settings", "state"])
    match kind:
        case "shape":
            count = dice.choice([0, 1, 2, 3, len(flat) // 2, len(flat) + 1, 2 * len(flat)])
            longer = torch.cat([flat, flat, flat])[:count]
            turned = tensor.T if tensor.ndim == 2 else tensor[None]
            shapes = [longer, turned, tensor[..., None], longer[None], longer[:, None]]
            changed = dice.choice(shapes)
        case "type":
            dtype = dice.choice(["int8", "uint8", "int32", "int64", "float16", "float64"])
            changed = tensor.float().nan_to_num(0).clamp(-100, 100).to(getattr(torch, dtype))
        case "noise":
            raw = flat.contiguous().view(torch.uint8)
            raw = torch.tensor(numbers.integers(0, 256, len(raw)).astype(np.uint8))
            changed = raw.view(tensor.dtype).reshape(tensor.shape)
        case "NaN" if tensor.dtype in (torch.float16, torch.float32) and "map" not in key:
            flat[place] = torch.nan
            changed = flat.reshape(tensor.shape)
        case "state" if "quant_state" in key:
            state = {}  # where it was no JSON any more
            with contextlib.suppress(ValueError):
                state = mutated(json.loads(tensor.numpy().tobytes()), dice)
            changed = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        case "settings":
            return kind, tensors, mutated(config, dice)
        case _:
            kind = "extreme"
            flat[place] = torch.tensor(extreme).to(
                tensor.dtype
            )  # as much of it as there is room for
            changed = flat.reshape(tensor.shape)
    return f"{kind} of {key}", tensors | {key: changed.contiguous()}, config


def survive(name: str, seed: int, folder: Path) -> None:
    """A hostile file gives an error of ours, or values that agree with each other."""
    dice = Random(seed)
    tensors, values, config = case(name)
    description, changed, about = hostile(dice, tensors, config)
    if dice.random() < 0.3:  # and another
        more, changed, about = hostile(dice, changed, about)
        description += f", {more}"
    write(folder, changed, about)
    file = folder / "model.safetensors"
    if dice.random() < 0.05:
        description += ", truncated"
        file.write_bytes(file.read_bytes()[: dice.randrange(file.stat().st_size)])
    try:
        checkpoint = open_checkpoint(folder)
        if "a.weight" not in checkpoint.tensors():
            return
        shape = checkpoint.tensors()["a.weight"].shape
        (read,) = checkpoint.read([Part("a.weight")])
        assert read.shape == shape, description
        (last,) = checkpoint.read([Part("a.weight", ((len(read) - 1, len(read)),))])
        np.testing.assert_array_equal(last[0], read[-1], err_msg=description)
    except CheckpointError:
        return
    # A description that is wrong does not change what is read; without a word of the version, it
    # is GPTQ's first, as for the library.
    if description == "settings" and not name.startswith("gptq_v2"):
        np.testing.assert_allclose(read, values, rtol=ROUNDED.get(name, 0), err_msg=str(about))
    assert np.isnan(read).any() or not re.fullmatch("NaN of [^,]*", description), description


@pytest.mark.parametrize("name", CONFIGS)
@counts(8, 200)
def test_hostile_files_give_an_error_or_values(name: str, count: int, tmp_path: Path) -> None:
    for seed in range(count):  # any other exception fails the test, and so does a warning
        survive(name, seed, tmp_path)


def test_a_version_of_gptq_that_is_not_said_is_a_note(tmp_path: Path) -> None:
    stored, _, about, config = llama(lambda at: case("gptq_v2-4", at))
    del config["quantization_config"]["checkpoint_format"]
    (note,) = wqk.scan(write(tmp_path, stored, about | config)).metadata["notes"]
    assert "GPTQ 4-bit (version not said: taken for the first), groups of 32" in note


def whole(scales: Any) -> Any:
    return torch.ones(scales.shape, dtype=torch.int32)


# A case, which of its tensors is changed, how, and what is then said.
WRONG: list[tuple[str, str, Callable[[Any], Any], str]] = [
    (
        "nvfp4-pack-quantized-4-tensor_group",
        "weight_global_scale",
        lambda _: torch.ones(2),
        "weight_global_scale: .* expected one number, got",
    ),
    ("float-quantized-8-channel", "weight_scale", whole, "weight_scale"),
    (
        "hqq-4-axis1",
        "W_q",
        lambda codes: codes.view(torch.float16),  # view_as_float
        r"a\.W_q: .* the type U8, got F16",
    ),
    ("hqq-4-axis1", "packing", lambda _: None, r"a\.packing: is missing"),
]


@pytest.mark.parametrize(("name", "key", "change", "message"), WRONG)
def test_tensors_of_another_kind_are_refused(name, key, change, message, tmp_path):
    tensors, _, config = case(name)
    tensors[f"a.{key}"] = change(tensors[f"a.{key}"])
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(tmp_path, kept, config)).tensors()


def test_scales_of_rows_may_be_a_vector(tmp_path: Path) -> None:
    tensors, values, config = case("pack-quantized-4-channel")
    tensors["a.weight_scale"] = tensors["a.weight_scale"].reshape(-1)
    checkpoint = open_checkpoint(write(tmp_path, tensors, config))
    arrays = checkpoint.read([Part("a.weight"), Part("a.weight", ((3, 4),))])
    for read, expected in zip(arrays, (values, values[3:4]), strict=True):
        np.testing.assert_array_equal(read, expected)


def test_mlx_settings_that_fit_the_words_and_lie_are_an_error(tmp_path: Path) -> None:
    tensors, _, config = case("mlx-4")
    config["quantization"]["group_size"] = 16  # which would make it 8 bits of half the columns
    with pytest.raises(CheckpointError, match="16 codes of 4 bits"):
        open_checkpoint(write(tmp_path, tensors, config)).tensors()
