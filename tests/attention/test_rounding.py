"""Half the distance of neighboring numbers is that of each type, by the type's own limits."""

from __future__ import annotations

import pytest
import torch

from wqk.attention.rounding import AT_ZERO, ROUNDING

TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def test_every_type_has_a_rounding() -> None:
    assert ROUNDING.keys() == TYPES.keys()


@pytest.mark.parametrize("name", TYPES)
def test_half_the_distance_of_neighbors_is_that_of_the_type(name: str) -> None:
    assert ROUNDING[name] == torch.finfo(TYPES[name]).eps / 2


def test_half_the_distance_next_to_zero_is_that_of_the_type() -> None:
    assert AT_ZERO["F16"] == torch.finfo(torch.float16).smallest_normal * 2.0**-11
