"""Every stored number type against the library that defines it, code by code."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from wqk.checkpoints import files
from wqk.errors import CheckpointError

EVERY_BYTE = np.arange(256, dtype=np.uint8)
EVERY_PAIR = np.arange(2**16, dtype="<u2")
SOME_BITS = np.random.default_rng(0).integers(0, 2**32, 1000, dtype=np.uint32)

# Stored codes, and PyTorch's name for their type.
CODES = {
    "F8_E4M3": (EVERY_BYTE, torch.float8_e4m3fn),
    "F8_E5M2": (EVERY_BYTE, torch.float8_e5m2),
    "F16": (EVERY_PAIR, torch.float16),
    "BF16": (EVERY_PAIR, torch.bfloat16),
    "F32": (SOME_BITS, torch.float32),
    "F64": (SOME_BITS, torch.float64),
}


def widen(dtype: str, stored: bytes) -> np.ndarray:
    """The values of all bytes, in three ranges with gaps between them in the file."""
    width = files.ITEM_BITS[dtype] // 8
    cuts = [0, len(stored) // width // 3 * width, len(stored) // width // 2 * width, len(stored)]
    file = b"?".join(stored[a:b] for a, b in pairwise(cuts))

    def read(offset: int, buffer: memoryview) -> None:
        buffer[:] = file[offset : offset + len(buffer)]

    ranges = [(a + gap, b + gap) for gap, (a, b) in enumerate(pairwise(cuts))]
    return files.widened(dtype, ranges, read, "w")


@pytest.mark.parametrize("dtype", CODES)
def test_every_code_widens_to_its_value(dtype):
    codes, theirs = CODES[dtype]
    stored = codes.tobytes()
    tensor = torch.frombuffer(bytearray(stored), dtype=theirs)
    expected = tensor.to(torch.float64 if dtype == "F64" else torch.float32).numpy()
    result = widen(dtype, stored)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(np.isnan(result), np.isnan(expected))
    real = ~np.isnan(expected)
    # Bits rather than values, for the sign of zero.
    np.testing.assert_array_equal(result[real].view(np.uint8), expected[real].view(np.uint8))


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 15])
def test_pieces_of_any_length_join_up(monkeypatch, dtype, count):
    codes, _ = CODES[dtype]
    width = files.ITEM_BITS[dtype] // 8
    stored = codes.tobytes()[2**9 :][: count * width]
    expected = widen(dtype, stored)
    monkeypatch.setattr(files, "PIECE", 7)
    np.testing.assert_array_equal(widen(dtype, stored), expected)


@pytest.mark.parametrize("dtype", sorted(set(files.ITEM_BITS) - set(files.FLOATS)))
def test_other_types_are_not_weights(dtype):
    with pytest.raises(CheckpointError, match=f"stored as {dtype}, which is not a floating-point"):
        files.require_floats(dtype, "w")
