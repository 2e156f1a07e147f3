"""Models in memory are read as they stand, and stay as they are."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from wqk.checkpoints import Part, TensorInfo, open_checkpoint
from wqk.errors import CheckpointError


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.query = nn.Linear(4, 6, dtype=dtype)
        self.register_buffer("positions", torch.arange(3))
        self.config = SimpleNamespace(to_dict=lambda: {"model_type": "bert"})

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def rows(array: np.ndarray) -> np.ndarray:
    return np.concatenate([array[4:6], array[1:2]])


ROWS = Part("query.weight", ((4, 6), (1, 2)))

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@pytest.mark.parametrize(("name", "dtype"), TYPES.items(), ids=TYPES)
def test_a_module(name, dtype):
    model = Model(dtype)
    before = copy.deepcopy(model.query.state_dict())
    checkpoint = open_checkpoint(model)
    assert (checkpoint.name, checkpoint.step, checkpoint.revision) == ("Model", None, None)
    assert checkpoint.config == {"model_type": "bert"}
    assert checkpoint.tensors()["query.weight"] == TensorInfo(name, (6, 4), 24 * dtype.itemsize)
    weight, chosen_rows, bias = checkpoint.read([Part("query.weight"), ROWS, Part("query.bias")])
    wide = np.float64 if dtype == torch.float64 else np.float32
    expected = model.query.weight.detach().double().numpy()
    assert weight.dtype == chosen_rows.dtype == wide
    np.testing.assert_array_equal(weight, expected)
    np.testing.assert_array_equal(chosen_rows, rows(expected))
    np.testing.assert_array_equal(bias, model.query.bias.detach().double().numpy())
    weight[:], chosen_rows[:] = 0, 0
    for key, tensor in model.query.state_dict().items():
        assert tensor.dtype == before[key].dtype
        assert torch.equal(tensor, before[key])
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_what_was_read_stays_while_training_goes_on():
    model = Model()
    checkpoint = open_checkpoint(model)
    before = model.query.weight.detach().clone().numpy()
    weight, chosen_rows = checkpoint.read([Part("query.weight"), ROWS])
    with torch.no_grad():
        model.query.weight.add_(1)
    np.testing.assert_array_equal(weight, before)
    np.testing.assert_array_equal(chosen_rows, rows(before))
    np.testing.assert_allclose(checkpoint.read([Part("query.weight")])[0], before + 1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_a_state_dict_of_numpy_arrays(dtype):
    array = np.random.default_rng(0).standard_normal((6, 4)).astype(dtype)
    checkpoint = open_checkpoint({"query.weight": array, "scale": array[0, 0]})
    assert checkpoint.name == "state dict"
    assert checkpoint.config == {}
    assert checkpoint.parameters == 25
    weight, chosen_rows, scale = checkpoint.read([Part("query.weight"), ROWS, Part("scale")])
    assert weight.dtype == (np.float64 if dtype == np.float64 else np.float32)
    np.testing.assert_array_equal(weight, array)
    np.testing.assert_array_equal(chosen_rows, rows(array))
    assert scale == array[0, 0]
    weight[:] = 0
    assert array.any()


def test_a_state_dict_of_tensors_that_ask_for_gradients():
    tensor = torch.randn(6, 4, requires_grad=True)
    (weight,) = open_checkpoint({"w": tensor.T}).read([Part("w")])
    np.testing.assert_array_equal(weight, tensor.detach().numpy().T)


def test_what_is_no_array_is_passed_over():
    checkpoint = open_checkpoint({"w": np.ones(2), "epoch": 3, "note": "text", "nothing": None})
    assert list(checkpoint.tensors()) == ["w"]
    assert set(open_checkpoint(Model()).tensors()) == {"query.weight", "query.bias", "positions"}


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (torch.arange(3), "I64"),
        (torch.ones(3, dtype=torch.bool), "BOOL"),
        (torch.ones(3).to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (np.ones(3, np.int8), "I8"),
        (np.ones(3, complex), "complex128"),
    ],
    ids=str,
)
def test_numbers_that_are_not_weights_are_refused(value, name):
    with pytest.raises(CheckpointError, match=f"w: holds {name}, not floating-point weights"):
        open_checkpoint({"w": value}).read([Part("w")])


def test_parameters_without_values_are_refused():
    model = torch.nn.Linear(3, 3, device="meta")
    with pytest.raises(
        CheckpointError, match="weight: is on the meta device, so its values are not"
    ):
        open_checkpoint(model).read([Part("weight")])


def test_missing_tensors_and_rows_are_refused():
    checkpoint = open_checkpoint(Model())
    with pytest.raises(CheckpointError, match="Model: no tensor named 'key'"):
        checkpoint.read([Part("key")])
    with pytest.raises(
        CheckpointError, match=r"rows 0:7 requested from a tensor of shape \(6, 4\)"
    ):
        checkpoint.read([Part("query.weight", ((0, 7),))])


def test_a_dictionary_around_a_state_dict_is_answered_with_its_entry() -> None:
    """As training loops save it: the weights next to a step and settings."""
    weights = {"layers.0.q_proj.weight": np.zeros((4, 4))}
    with pytest.raises(CheckpointError, match="got a dictionary that has them under 'model'; pass"):
        open_checkpoint({"model": weights, "args": {"lr": 1}, "step": 3})
