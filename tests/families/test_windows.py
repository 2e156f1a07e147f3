"""Windows: which keys they contain, and how the score table prints them."""

from __future__ import annotations

import numpy as np
import pytest

from wqk.families import AttentionRule
from wqk.families.config import Config
from wqk.families.windows import ChunkWindow, LocalWindow, Rectangle, Span, Window, window_of

torch = pytest.importorskip("torch")

POSITIONS = np.arange(12)


def rule(**keys: object) -> AttentionRule:
    return AttentionRule("decoder", query=("q",), key=("k",), window=("size",), **keys)


@pytest.mark.parametrize(
    ("window", "printed", "allowed"),
    [
        (Span(back=3, ahead=0, size=4), "4", [2, 3, 4, 5]),
        (Span(back=2, ahead=2, size=5), "5", [3, 4, 5, 6, 7]),
        (Span(back=1, ahead=2), "1 back, 2 ahead", [4, 5, 6, 7]),
        (ChunkWindow(4), "chunk of 4", [4, 5, 6, 7]),
        (Rectangle((7, 7)), "7x7", list(range(12))),
        (LocalWindow(), "local", list(range(12))),
    ],
)
def test_a_window_contains_keys_near_the_query(
    window: Window, printed: str, allowed: list[int]
) -> None:
    assert str(window) == printed
    assert np.flatnonzero(window.allows(5, POSITIONS)).tolist() == allowed
    pairs = window.allows(POSITIONS[:, None], POSITIONS)
    assert pairs.shape == (12, 12)
    assert np.flatnonzero(pairs[5]).tolist() == allowed
    tensor = window.allows(torch.arange(12)[:, None], torch.arange(12))
    np.testing.assert_array_equal(tensor.numpy(), pairs)
    assert window.is_known == (len(allowed) < 12)


@pytest.mark.parametrize(
    ("keys", "causal", "lifted", "window"),
    [
        ({}, True, False, Span(3, 0, 4)),
        ({}, False, False, Span(2, 2, 4)),
        ({}, False, True, Span(4, 4, 8)),  # a causal window, seen from both sides
        ({"window_counts": "each side"}, False, False, Span(4, 4, 8)),
        ({"window_counts": "itself"}, False, False, Span(1, 2)),
        ({"window_axes": 2}, False, False, Rectangle((4, 4))),
    ],
)
def test_a_size_is_counted_as_the_rule_describes(
    keys: dict[str, object], causal: bool, lifted: bool, window: Window
) -> None:
    assert window_of(rule(**keys), Config({"size": 4}), 0, 0, causal, lifted) == window


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"size": None}, None),
        ({"size": 0}, None),
        ({}, None),
        ({"size": 4, "use_sliding_window": False}, None),
        ({"size": [None, 8]}, None),
        ({"size": [True, False]}, LocalWindow()),
        ({"size": 4, "layer_types": ["full_attention"]}, None),
        ({"layer_types": ["sliding_attention"]}, LocalWindow()),
    ],
)
def test_a_layer_has_a_window_only_where_the_configuration_sets_one(
    config: dict[str, object], window: Window | None
) -> None:
    assert window_of(rule(), Config(config), 0, 0, True, False) == window
