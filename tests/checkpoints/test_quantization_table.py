"""Each companion and each key of each quantized format is understood, or named in a refusal.

A companion or a key is changed, removed or added. Then the values must be those that an independent
computation in float64 (`dequantizing`) gives for the changed file, or the file must be refused by
the name of what was changed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints.dequantizing import CASES, Case, Tensors
from tests.limits import counts
from tests.small import save

from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.quantization import FORMATS
from wqk.checkpoints.quantization.configuration import read_settings
from wqk.checkpoints.quantization.table import Companion, Effect, Key, QuantizedFormat
from wqk.errors import CheckpointError

# Rounding of our products in float32, and of a library that divides where we multiply.
TOLERANCE = 1e-6


def layout_of(case: Case) -> QuantizedFormat:
    """The record of a case's format."""
    method = read_settings(case.config).method
    return next(layout for layout in FORMATS if method in layout.methods)


def read(case: Case, folder: Path) -> tuple[np.ndarray, str]:
    """The weight as our reader has it, and the notes."""
    tensors = {f"a.{ending}": tensor for ending, tensor in case.tensors.items()}
    checkpoint = open_checkpoint(save(folder, tensors, case.config))
    if "a.weight" not in checkpoint.tensors():
        raise CheckpointError("a.weight is missing")
    (values,) = checkpoint.read([Part("a.weight")])
    return values, " ".join(checkpoint.notes)


def outcome(case: Case, folder: Path, name: str) -> str:
    """``read`` if the values are right, and else the message of the refusal."""
    try:
        values, _ = read(case, folder)
    except CheckpointError as error:
        message = str(error)
    else:
        expected = case.weight(case.tensors, case.keys)
        assert values.shape == expected.shape
        largest = np.nanmax(np.abs(expected))
        np.testing.assert_allclose(values, expected, atol=TOLERANCE * largest, err_msg=name)
        return "read"
    assert any(word in message for word in (name, " a.", " a:", "configuration", "quantization")), (
        message
    )
    return message


def changed(tensor: torch.Tensor, dice: torch.Generator) -> torch.Tensor:
    """Other values of the same type: those of a tensor in another order, or one that is larger."""
    flat = tensor.reshape(-1)
    if len(flat) == 1:
        return (tensor.float() * 1.5 + 1).to(tensor.dtype)
    return flat[torch.randperm(len(flat), generator=dice)].reshape(tensor.shape)


def with_tensors(case: Case, tensors: Tensors) -> Case:
    return Case(tensors, case.config, case.weight, case.path)


def with_key(case: Case, path: list[str], value: Any) -> Case:
    """The case with one key of its configuration set."""
    config = copy.deepcopy(case.config)
    table = config.setdefault(case.path, {})
    for name in path[:-1]:
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            return case
    table[path[-1]] = value
    return Case(case.tensors, config, case.weight, case.path)


@pytest.mark.parametrize("name", CASES)
def test_the_reader_agrees_with_the_formula(name: str, tmp_path: Path) -> None:
    assert outcome(CASES[name], tmp_path, "nothing") == "read"


@pytest.mark.parametrize("name", CASES)
def test_changed_companions_change_the_values_as_the_formula_does(
    name: str, tmp_path: Path
) -> None:
    case, dice = CASES[name], torch.Generator().manual_seed(1)
    for ending, tensor in case.tensors.items():
        if tensor.dtype == torch.uint8 and tensor.ndim == 1:  # JSON, and HQQ's small tensors
            continue
        tensors = case.tensors | {ending: changed(tensor, dice)}
        outcome(with_tensors(case, tensors), tmp_path, f"a.{ending}")


@pytest.mark.parametrize("name", CASES)
def test_removed_companions_are_missed_or_change_nothing(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    for ending in case.tensors:
        tensors = {key: value for key, value in case.tensors.items() if key != ending}
        removed = with_tensors(case, tensors)
        try:
            case.weight(tensors, case.keys)
        except (KeyError, ValueError, IndexError):
            with pytest.raises(CheckpointError, match=r"\ba\."):
                read(removed, tmp_path)
        else:
            outcome(removed, tmp_path, "a.")


def added(layout: QuantizedFormat, case: Case) -> Iterator[tuple[str, Companion | None]]:
    """Ends of names of tensors that a case does not have, with their record in its format."""
    endings = {
        companion.ending for file_format in FORMATS for companion in file_format.companions
    } | {".mystery_scale"}
    for ending in sorted(endings):
        is_own = ending.lstrip("._") in {key.lstrip("._") for key in case.tensors}
        if ending.startswith(".") and "*" not in ending and not is_own:
            yield ending, layout.companion(ending)


@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt-oss"])
def test_added_companions_are_refused_by_name_or_have_no_effect(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    layout = layout_of(case)
    columns = case.weight(case.tensors, case.keys).shape[-1]
    for ending, record in added(layout, case):
        tensors = case.tensors | {ending.removeprefix("."): torch.full((columns,), 2.0)}
        message = outcome(with_tensors(case, tensors), tmp_path, f"a{ending}")
        if record is None:
            assert f"a{ending}" in message, ending
        elif record.effect is Effect.NONE:
            assert message == "read", ending


# Values that are tried for each key: a switch, a number, a word, a list, and nested keys.
TRIED: tuple[Any, ...] = (True, False, 3, -1, 0, "other", "gptq_v2", [7, 7], {"x": 1}, None)


def paths(layout: QuantizedFormat, case: Case) -> Iterator[tuple[Key, list[str]]]:
    """All keys of a format with their path in the configuration of a case."""
    for key in layout.keys:
        words_of_key = key.name.split(".")
        groups = [*case.keys.get("config_groups", {"group_0": {}})]
        yield key, [groups[0] if word == "*" else word for word in words_of_key]


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].config])
@counts(2, len(TRIED))
def test_changed_keys_are_refused_or_change_the_values_as_the_formula_does(
    name: str, count: int, tmp_path: Path
) -> None:
    case = CASES[name]
    numbers = np.random.default_rng(len(name))
    for key, path in paths(layout_of(case), case):
        if key.effect is Effect.NONE:
            continue
        for number in numbers.permutation(len(TRIED))[:count]:
            value = TRIED[number]
            message = _with_key(with_key(case, path, value), tmp_path, path[-1])
            if key.effect is Effect.REFUSED and value not in (None, False, 0, *key.neutral):
                assert key.name.rpartition(".")[2] in message, (key.name, value)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].config])
def test_keys_without_an_effect_have_none(name: str, tmp_path: Path) -> None:
    """All of them at once, each with one of the values."""
    case = CASES[name]
    numbers = np.random.default_rng(len(name))
    for key, path in paths(layout_of(case), case):
        if key.effect is Effect.NONE:
            case = with_key(case, path, TRIED[numbers.integers(len(TRIED))])
    assert outcome(case, tmp_path, "") == "read"


def _with_key(case: Case, folder: Path, name: str) -> str:
    """The outcome of a changed key; where the formula has no meaning, it must be a refusal."""
    try:
        case.weight(case.tensors, case.keys)
    except (KeyError, ValueError, IndexError, TypeError, AttributeError, ZeroDivisionError):
        with pytest.raises(CheckpointError) as refusal:
            read(case, folder)
        return str(refusal.value)
    return outcome(case, folder, name)


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].config])
def test_unknown_keys_are_refused_by_name(name: str, tmp_path: Path) -> None:
    case = with_key(CASES[name], ["mystery_rotation"], "hadamard")
    with pytest.raises(CheckpointError, match="mystery_rotation is not a key that is known"):
        read(case, tmp_path)


# The same value under all spellings of the version; and one that is no version.
SPELLINGS = [
    (key, word)
    for key in ("checkpoint_format", "format", "version")
    for word in ("gptq_v2", "GPTQ_V2")
]


@pytest.mark.parametrize(("key", "word"), SPELLINGS)
@pytest.mark.parametrize("method", ["quant_method", "method"])
def test_the_version_of_gptq_is_read_in_every_spelling(key, word, method, tmp_path) -> None:
    case = CASES["gptq_v2-4"]
    config = {"quantization_config": {method: "gptq", key: word}}
    assert outcome(Case(case.tensors, config, case.weight), tmp_path, key) == "read"


def test_versions_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    case = with_key(CASES["gptq_v2-4"], ["format"], "gptq")
    with pytest.raises(CheckpointError, match="checkpoint_format and format name different"):
        read(case, tmp_path)


def test_bits_that_the_tensors_disprove_are_a_note(tmp_path: Path) -> None:
    case = with_key(CASES["gptq-4-ordered"], ["bits"], 8)
    values, notes = read(case, tmp_path)
    np.testing.assert_array_equal(values, case.weight(case.tensors, {}).astype(np.float32))
    assert "the configuration sets 8 bits, and the shapes of the tensors prove 4" in notes


# Promises of a configuration whose companions are missing.
PROMISES = [
    ("int-quantized-8-channel", ["config_groups", "group_0", "weights", "symmetric"], False),
    ("pack-quantized-4-group", ["config_groups", "group_0", "weights", "symmetric"], False),
    ("pack-quantized-4-group", ["config_groups", "group_0", "weights", "actorder"], "group"),
    ("gptq-3", ["desc_act"], True),
]


@pytest.mark.parametrize(("name", "path", "value"), PROMISES)
def test_promised_companions_that_are_missing_are_refused(name, path, value, tmp_path) -> None:
    tensors = {key: tensor for key, tensor in CASES[name].tensors.items() if key != "g_idx"}
    case = with_key(with_tensors(CASES[name], tensors), path, value)
    with pytest.raises(CheckpointError, match="is missing, although the configuration sets"):
        read(case, tmp_path)


@pytest.mark.parametrize("name", ["pack-quantized-4-group", "int-quantized-8-group-ordered"])
def test_an_order_of_minus_ones_is_none(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    order = torch.full((64,), -1, dtype=torch.int32)
    ordered = with_tensors(case, case.tensors | {"weight_g_idx": order})
    assert outcome(ordered, tmp_path, "weight_g_idx") == "read"


def test_modules_of_other_bits_take_the_group_that_targets_them(tmp_path: Path) -> None:
    three, four = CASES["pack-quantized-3-group-zeros"], CASES["pack-quantized-4-group"]
    tensors = {f"x.q_proj.{ending}": tensor for ending, tensor in three.tensors.items()}
    tensors |= {f"x.k_proj.{ending}": tensor for ending, tensor in four.tensors.items()}
    config = copy.deepcopy(four.config)
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = {
        "targets": [r"re:.*q_proj$"],
        "weights": three.keys["config_groups"]["group_0"]["weights"],
    }
    checkpoint = open_checkpoint(save(tmp_path, tensors, config))
    for name, case in (("x.q_proj.weight", three), ("x.k_proj.weight", four)):
        (values,) = checkpoint.read([Part(name)])
        np.testing.assert_allclose(values, case.weight(case.tensors, case.keys), atol=1e-6)
    groups["group_0"]["targets"] = [r"re:.*v_proj$"]
    with pytest.raises(CheckpointError, match=r"x\.k_proj: none of the groups of modules"):
        open_checkpoint(save(tmp_path, tensors, config))


# One matrix in two ways, and global scales of one library under the name of another.
CONTRADICTIONS: list[tuple[str, dict[str, torch.Tensor], str]] = [
    ("gptq-3", {"weight": torch.ones(32, 64)}, r"a\.weight: lies next to a weight of GPTQ"),
    ("fp8", {"weight_scale": torch.tensor(1.0)}, "weight_scale are both there"),
    ("mxfp4-pack-quantized-4-group", {"weight_global_scale": torch.ones(1)}, "leaves open"),
    ("modelopt-nvfp4", {"weight_global_scale": torch.ones(1)}, "weight_global_scale"),
    ("nvfp4-pack-quantized-4-tensor_group", {"weight_scale_2": torch.ones(1)}, "weight_scale_2"),
    ("hqq-4-axis1", {"axis": torch.tensor(0)}, r"a\.axis: .* expected 1, got \[0\]"),
    ("awq", {"weight_packed": torch.ones((32, 8), dtype=torch.int32)}, "weight_packed"),
]


@pytest.mark.parametrize(("name", "tensors", "message"), CONTRADICTIONS)
def test_contradictions_are_refused(name, tensors, message, tmp_path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(with_tensors(CASES[name], CASES[name].tensors | tensors), tmp_path)


@pytest.mark.parametrize("axis", [0, 1])
def test_one_row_of_hqq_codes_has_the_axis_that_is_stored(axis: int, tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    scales = (1, 64) if axis == 0 else (1, 1)
    tensors = {
        "W_q": torch.tensor(dice.integers(0, 256, (1, 64), dtype=np.uint8)),
        "scale": torch.tensor(dice.random(scales) + 0.5, dtype=torch.float32),
        "zero": torch.tensor(dice.random(scales), dtype=torch.float32),
        "packing": torch.tensor(list(b"8bit_u8"), dtype=torch.uint8),
        "shape": torch.tensor([1, 64]),
        "nbits": torch.tensor(8),
        "axis": torch.tensor(axis),
    }
    expected = (tensors["W_q"].double() - tensors["zero"]) * tensors["scale"]
    case = Case(tensors, {"quantization_config": {"quant_method": "hqq"}}, lambda *_: expected)
    values, _ = read(case, tmp_path)
    np.testing.assert_allclose(values, expected, rtol=1e-6)


INT8_OF_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor"},
        }
    },
}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_of_all_may_have_any_number_of_axes(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    codes = torch.arange(32, dtype=torch.int8).reshape(4, 8)
    tensors = {"a.weight": codes, "a.weight_scale": torch.full(shape, 0.5)}
    modelopt = save(
        tmp_path / "modelopt", tensors, {"quantization_config": {"quant_method": "modelopt"}}
    )
    (values,) = open_checkpoint(modelopt).read([Part("a.weight")])
    np.testing.assert_array_equal(values, codes.numpy() * 0.5)
    tensors["a.weight_zero_point"] = torch.full(shape, 3, dtype=torch.int8)
    compressed = save(tmp_path / "compressed", tensors, {"quantization_config": INT8_OF_COMPRESSED})
    (values,) = open_checkpoint(compressed).read([Part("a.weight")])
    np.testing.assert_array_equal(values, (codes.numpy() - 3.0) * 0.5)


def test_a_scale_without_axes_is_none_of_rows(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(1, 8, dtype=torch.int8), "a.SCB": torch.tensor(0.5)}
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    with pytest.raises(CheckpointError, match=r"a\.SCB: .* expected the shape \(1,\), got \(\)"):
        open_checkpoint(save(tmp_path, tensors, config))


def test_orphans_are_refused_by_name(tmp_path: Path) -> None:
    for ending in ("qweight", "weight_packed", "pre_quant_scale", "weight_scale_2"):
        tensors = {f"a.{ending}": torch.ones(64), "a.weight": torch.ones(32, 64)}
        with pytest.raises(CheckpointError, match=rf"a\.{ending}: belongs to a quantized weight"):
            open_checkpoint(save(tmp_path, tensors, {}))


@pytest.mark.parametrize("ending", ["weight_scale", "weight_scale_inv", "weight_g_idx", "SCB"])
def test_scales_next_to_a_plain_weight_are_refused(ending: str, tmp_path: Path) -> None:
    tensors = {"a.weight": torch.ones(32, 64), f"a.{ending}": torch.ones(32, 1)}
    with pytest.raises(CheckpointError, match=rf"a\.{ending}: lies next to a\.weight, .* plain"):
        open_checkpoint(save(tmp_path, tensors, {}))
    settings = {"quant_method": "compressed-tensors", "quantization_status": "frozen"}
    config = {"quantization_config": settings}
    assert "a.weight" in open_checkpoint(save(tmp_path, tensors, config)).tensors()


# Scales of float8 (32, 64) without a configuration: of blocks that lie either way, refused; and
# those of which only one reading fits.
SCALES_OF_FLOAT8 = [
    ((1, 32), False),
    ((1, 8), False),
    ((2, 2), False),
    ((1, 64), True),
    ((1, 1), True),
    ((32, 1), True),
    ((32, 4), True),
    ((32,), True),
]


@pytest.mark.parametrize(("shape", "is_read"), SCALES_OF_FLOAT8)
def test_scales_of_float8_without_a_configuration(shape, is_read, tmp_path) -> None:
    floats = CASES["fp8"].tensors["weight"]
    dice = torch.Generator().manual_seed(0)
    tensors = {"weight": floats, "weight_scale": torch.rand(shape, generator=dice) + 0.5}
    case = Case(tensors, {}, CASES["fp8"].weight)
    if is_read:
        assert outcome(case, tmp_path, "weight_scale") == "read"
        return
    with pytest.raises(CheckpointError, match=r"a\.weight_scale: .* the file leaves open"):
        read(case, tmp_path)


def test_one_block_of_128_rows_is_read_without_a_configuration(tmp_path: Path) -> None:
    floats = CASES["fp8"].tensors["weight"].repeat(1, 6)
    tensors = {"weight": floats, "weight_scale_inv": torch.tensor([[1.0, 2.0, 3.0]])}
    values, _ = read(Case(tensors, {}, CASES["fp8"].weight), tmp_path)
    expected = floats.double() * torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(128)
    np.testing.assert_array_equal(values, expected.numpy())


@counts(1, 40)
def test_two_changes_at_once(count: int, tmp_path: Path) -> None:
    """Any two changes of tensors or keys: values of the formula, or a refusal."""
    dice = torch.Generator().manual_seed(2)
    numbers = np.random.default_rng(2)
    for _ in range(count):
        for case in CASES.values():
            for _ in range(2):
                case = _changed(case, numbers, dice)
            _with_key(case, tmp_path, "")


def _changed(case: Case, numbers: np.random.Generator, dice: torch.Generator) -> Case:
    """A case with one tensor or one key changed."""
    try:
        layout = layout_of(case)
    except (CheckpointError, StopIteration):  # the method was changed
        return case
    keys = [(key, path) for key, path in paths(layout, case) if key.effect != Effect.NONE]
    if numbers.random() < 0.5 and keys and case.config:
        _, path = keys[numbers.integers(len(keys))]
        return with_key(case, path, TRIED[numbers.integers(len(TRIED))])
    usable = [k for k, v in case.tensors.items() if v.dtype != torch.uint8 or v.ndim > 1]
    ending = usable[numbers.integers(len(usable))]
    return with_tensors(case, case.tensors | {ending: changed(case.tensors[ending], dice)})
