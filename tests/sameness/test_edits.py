"""Each edit does what its printed code does, with PyTorch and with the stand-in for it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from wqk.sameness.axis_orders import (
    Axes,
    HeadOrder,
    Listed,
    Periodic,
    Reversed,
    Rolled,
    RotatedPart,
    Sections,
    Stretches,
)
from wqk.sameness.edits import (
    Clear,
    DivideByGain,
    Edit,
    ExchangeLastAxes,
    LowRank,
    Negate,
    Offset,
    Permute,
    Scale,
    ScaleHeads,
    Take,
    Then,
    Transpose,
    Viewed,
    Within,
)
from wqk.sameness.execution import ProgramTensors, Tensor, run
from wqk.sameness.repairs import Change, Exchange, ForLayers, Recut, Setting, merged_steps, program

RANDOM = np.random.default_rng(0)
ROWS, COLUMNS = 24, 12
WEIGHT, ORIGINAL = RANDOM.standard_normal((2, ROWS, COLUMNS)).astype(np.float32)
GAIN = RANDOM.uniform(0.5, 2, COLUMNS).astype(np.float32)
DOWN = RANDOM.standard_normal((3, COLUMNS)).astype(np.float32)
UP = RANDOM.standard_normal((ROWS, 3)).astype(np.float32)

ORDERS = (
    Axes((2, 3, 4), (0, 2, 1)),
    Axes((2, 3, 4), (1, 0, 2)),
    Axes((2, 3, 4), (1, 2, 0)),
    Axes((2, 3, 2, 2), (0, 3, 2, 1)),
    Rolled(5),
    Rolled(-3),
    Reversed(),
    Listed((1, 0, *range(2, ROWS))),
    Listed(tuple(RANDOM.permutation(ROWS).tolist())),
    Periodic((2, 0, 1)),
    Periodic((1, 0), 3),
    HeadOrder((2, 0, 1), 8),
    RotatedPart(8, (2, 3)),
    Sections((12, 6, 6), 1, (1, 0, 2), 1),
    Sections((12, 6, 6), 2, (0, 1, 2), 1),
    Sections((12, 6, 6), 1, (0, 1, 2), 3),
    Sections((12, 6, 6), 2, (2, 1, 0), 3),
)
EDITS: tuple[Edit, ...] = (
    *(Permute(0, order) for order in ORDERS),
    Scale(1.7),
    Scale(-1.0),
    ScaleHeads(0, (1.7, -0.25, 1 / 3), 8),
    ScaleHeads(1, (1.7, -0.25, 1 / 3), 4),
    Negate(0, (0, 5)),
    Negate(1, (1, 2)),
    Offset(1.0),
    Offset(-1.0),
    Take(),
    Clear(),
    ExchangeLastAxes(),
    DivideByGain(1, "norm.weight", 1 + GAIN, 1.0, 2),
    DivideByGain(1, "norm.weight", GAIN, 0.0, -1, of_reference=True),
    LowRank(DOWN, UP, 2.0),
    Then(LowRank(DOWN, UP, -1.0), LowRank(DOWN, UP, 1 / 3)),
    Within(0, Stretches(2, 2, 6, 3), LowRank(DOWN, UP, -1.5, rows=Stretches(2, 2, 6, 3))),
    Within(0, Stretches(0, 8, 8, 1), Permute(0, Reversed())),
    Within(0, Stretches(2, 2, 6, 3), Scale(2.0)),
    Within(0, Stretches(8, 8, 8, 1), Take()),
    Within(0, Stretches(12, 12, 12, 1), Transpose()),
    Within(0, Stretches(0, 12, 12, 1), Within(0, Stretches(4, 4, 4, 1), Take())),
    Then(Permute(0, Rolled(1)), Scale(0.5)),
    Then(Within(0, Stretches(0, 4, 4, 1), Take()), Within(0, Stretches(8, 4, 4, 1), Take())),
)


def in_pytorch(code: str, weight: np.ndarray, original: np.ndarray) -> np.ndarray:
    """The weight after the code was run with PyTorch."""
    gain = torch.tensor(GAIN)
    scope = {
        "torch": torch,
        "w": torch.tensor(weight),
        "original": torch.tensor(original),
        "tensors": {"norm.weight": gain},
        "reference": {"norm.weight": gain},
        "name": "a",
        "adapter": {"a": (torch.tensor(DOWN), torch.tensor(UP))},
    }
    exec(code, scope)
    return scope["w"].numpy()


def in_stand_in(edit: Edit, weight: np.ndarray, original: np.ndarray) -> np.ndarray:
    """The weight after the code was run without PyTorch."""
    tensors = ProgramTensors({"a": weight, "norm.weight": GAIN})
    reference = ProgramTensors({"a": original, "norm.weight": GAIN})
    run(Change(("a",), edit).code(), tensors, reference, adapter={"a": (Tensor(DOWN), Tensor(UP))})
    return tensors.changed["a"]


@pytest.mark.parametrize("edit", EDITS, ids=repr)
@pytest.mark.parametrize("transposed", [False, True])
def test_printed_code_is_the_edit(edit: Edit, transposed: bool) -> None:
    weight, original = (WEIGHT.T, ORIGINAL.T) if transposed else (WEIGHT, ORIGINAL)
    edit = edit.for_transposed() if transposed else edit
    expected = edit.apply(weight, original)
    np.testing.assert_allclose(in_pytorch(edit.code(), weight, original), expected, rtol=1e-6)
    np.testing.assert_allclose(in_stand_in(edit, weight, original), expected, rtol=1e-6)


@pytest.mark.parametrize("edit", EDITS, ids=repr)
def test_the_edit_of_a_bias_is_that_of_its_rows(edit: Edit) -> None:
    """A column of a weight moves as its bias does."""
    of_bias = edit.on_bias()
    if of_bias is None:
        return
    bias, original = WEIGHT[:, 0].copy(), ORIGINAL[:, 0].copy()
    edited = of_bias.apply(bias, original)
    np.testing.assert_array_equal(edited, edit.apply(WEIGHT, ORIGINAL)[:, 0])
    np.testing.assert_allclose(in_pytorch(of_bias.code(), bias, original), edited, rtol=1e-6)


@pytest.mark.parametrize("exchanges_axes", [False, True])
@pytest.mark.parametrize("edit", [Permute(0, Rolled(5)), Take(), Permute(1, Rolled(1))], ids=repr)
def test_tensors_with_an_axis_for_heads_are_edited_as_matrices(
    edit: Edit, exchanges_axes: bool
) -> None:
    shape = (3, COLUMNS, 8) if exchanges_axes else (3, 8, COLUMNS)
    stored, original = RANDOM.standard_normal((2, *shape)).astype(np.float32)
    viewed = Viewed(shape, exchanges_axes, False, edit)
    expected = viewed.apply(stored, original)
    assert expected.shape == shape
    np.testing.assert_array_equal(in_pytorch(viewed.code(), stored, original), expected)
    np.testing.assert_array_equal(in_stand_in(viewed, stored, original), expected)


def test_steps_of_several_layers_are_one_loop_that_runs() -> None:
    names = [f"layers.{layer}.{side}_proj.weight" for layer, side in product(range(4), "qk")]
    steps = merged_steps(Change((name,), Permute(0, Rolled(1))) for name in names)
    code = program(steps)
    assert code.startswith("for layer in range(4):")
    tensors = {name: torch.tensor(WEIGHT) for name in names}
    exec(code, {"torch": torch, "tensors": tensors, "reference": {}})
    for name in names:
        np.testing.assert_array_equal(tensors[name].numpy(), np.roll(WEIGHT, -1, 0))


@pytest.mark.parametrize("kind", [Exchange, Recut])
def test_moves_in_several_layers_are_one_loop_over_the_same_moves(
    kind: type[Exchange | Recut],
) -> None:
    pairs = [(f"layers.{layer}.q", f"layers.{layer}.k") for layer in range(3)]
    steps: list[Exchange | Recut] = []
    for pair in pairs:
        if kind is Exchange:
            steps.append(Exchange(pair, pair[::-1]))
        else:
            steps.append(Recut(pair, (ROWS, ROWS), Reversed()))
    (loop,) = merged_steps(steps)
    assert isinstance(loop, ForLayers)
    assert loop.singles == steps
    assert loop.edited == tuple(name for pair in pairs for name in pair)
    moved = []
    for code in (program([loop]), "\n".join(step.code() for step in steps)):
        tensors = {q: torch.tensor(WEIGHT) for q, _ in pairs}
        tensors |= {k: torch.tensor(ORIGINAL) for _, k in pairs}
        exec(code, {"torch": torch, "tensors": tensors})
        moved.append(tensors)
    for name in loop.edited:
        torch.testing.assert_close(moved[0][name], moved[1][name], rtol=0, atol=0)


def test_tensors_are_exchanged_and_cut_again() -> None:
    steps = (
        Exchange(("a", "b"), ("b", "a")),
        Recut(("a", "b"), (ROWS, ROWS), Reversed()),
        Setting(("text_config", "rope_theta"), 5e5),
    )
    tensors = {"a": torch.tensor(WEIGHT), "b": torch.tensor(ORIGINAL)}
    config: dict[str, dict[str, float]] = {"text_config": {}}
    exec(program(steps), {"torch": torch, "tensors": tensors, "config": config})
    np.testing.assert_array_equal(tensors["a"].numpy(), WEIGHT[::-1])
    np.testing.assert_array_equal(tensors["b"].numpy(), ORIGINAL[::-1])
    assert config == {"text_config": {"rope_theta": 5e5}}


def test_lines_of_code_are_at_most_100_columns_wide() -> None:
    order = Listed(tuple(RANDOM.permutation(128).tolist()))
    code = program(merged_steps([Change(("layers.0.q",), Permute(0, order))]))
    assert max(map(len, code.splitlines())) <= 100
    tensors = {"layers.0.q": torch.arange(128)}
    exec(code, {"torch": torch, "tensors": tensors})
    assert tensors["layers.0.q"].tolist() == list(order.order)
