"""Conditions on a model's configuration."""

from __future__ import annotations

import itertools

import pytest

from wqk.families.config import Config

FLAGS = [*itertools.product([False, True], repeat=3)]


@pytest.mark.parametrize(("a", "b", "c"), FLAGS)
def test_conditions_are_those_of_logic(a: bool, b: bool, c: bool) -> None:
    config = Config({"a": a, "b": b, "c": c})
    assert config.holds("a or b") == (a or b)
    assert config.holds("a and b") == (a and b)
    assert config.holds("a and not b or c") == ((a and not b) or c)
    assert config.holds("not a or not b") == (not a or not b)
    assert config.holds("")


@pytest.mark.parametrize(
    ("config", "lifted"),
    [
        ({}, False),
        ({"is_causal": True}, False),
        ({"is_causal": False}, True),
        ({"is_causal": 0}, False),
        ({"architectures": ["MistralBiModel"]}, True),
        ({"architectures": ["MistralModel", "MistralBiModel"]}, True),
        ({"is_causal": True, "architectures": ["MistralBiModel"]}, True),
        ({"auto_map": {"AutoModel": "code.MistralBiModel"}}, True),
        ({"auto_map": {"AutoModel": "code.MistralModel"}}, False),
        ({"architectures": "MistralBiModel", "auto_map": []}, False),
        ({"architectures": [1, None]}, False),
    ],
)
def test_either_of_two_signs_lifts_the_mask(config: dict[str, object], lifted: bool) -> None:
    assert Config(config).lifts_mask is lifted
