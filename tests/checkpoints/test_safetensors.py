"""The safetensors reader against the format's own library, and against files that lie."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors
from tests.limits import in_memory, refused, within

from wqk.checkpoints.checkpoint import Part
from wqk.checkpoints.files import open_safetensors
from wqk.errors import CheckpointError, errors_about

BAD_HEADERS = {
    "not JSON": ["{nonsense", 0, "not valid JSON"],
    "empty header": ["", 0, "not valid JSON"],
    "not an object": [[1, 2], 0, "must be a JSON object"],
    "trailing text": ["{} {}", 0, "not valid JSON"],
    "NaN": ['{"w": NaN}', 0, "NaN is not JSON"],
    "infinity": ['{"w": -Infinity}', 0, "-Infinity is not JSON"],
    "duplicate keys": ['{"w":{"dtype":"F32","dtype":"F64"}}', 16, "a name occurs more than once"],
    "metadata that is a list": [{"__metadata__": [1]}, 0, "metadata must be a JSON object"],
    "entry that is a number": [{"w": 5}, 0, "lacks a dtype"],
    "entry that is null": ['{"w": null}', 0, "lacks a dtype"],
    "no dtype": [{"w": {"shape": [1], "data_offsets": [0, 4]}}, 4, "lacks a dtype"],
    "no shape": [{"w": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, "lacks a dtype"],
    "no offsets": [{"w": {"dtype": "F32", "shape": [1]}}, 4, "two data offsets"],
    "huge float": ['{"w":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}', 4, "whole number"],
}

BAD_ENTRIES = {
    "three offsets": [{"data_offsets": [0, 8, 16]}, 16, "two data offsets"],
    "offsets that are text": [{"data_offsets": "ab"}, 16, "two data offsets"],
    "shape that is text": [{"shape": "22"}, 16, "lacks a dtype"],
    "shape that is an object": [{"shape": {"0": 2}}, 16, "lacks a dtype"],
    "unknown type": [{"dtype": "F99"}, 16, "unknown type 'F99'"],
    "type that is a list": [{"dtype": ["F32"]}, 16, "lacks a dtype"],
    "another width": [{"dtype": "F64"}, 16, "needs 32 bytes, its offsets give 16"],
    "a type of 4 bits": [{"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}, 1, "needs 1 bytes"],
    "float shape": [{"shape": [2.0, 2.0]}, 16, "not a whole number"],
    "float offset": [{"data_offsets": [0.0, 16.0]}, 16, "not a whole number"],
    "boolean shape": [{"shape": [True, 4]}, 16, "not a whole number"],
    "text in the shape": [{"shape": ["2", 2]}, 16, "not a whole number"],
    "negative shape": [{"shape": [-2, -2]}, 16, "not a whole number"],
    "negative start": [{"data_offsets": [-16, 0]}, 16, "not a whole number"],
    "offset of 2**63": [
        {"data_offsets": [9223372036854775808, 9223372036854775824]},
        16,
        "not a whole number",
    ],
    "offset of 2**64": [
        {"data_offsets": [18446744073709551616, 18446744073709551632]},
        16,
        "not a whole number",
    ],
    "last offset": [
        {"data_offsets": [9223372036854775791, 9223372036854775807]},
        16,
        "truncated: has ",
    ],
    "reversed offsets": [{"data_offsets": [16, 0]}, 16, "its offsets give -16"],
    "product that overflows": [{"shape": [4294967296, 4294967296]}, 16, "an impossible shape"],
    "an overflow beside nothing": [
        {"shape": [0, 4611686018427387904, 4611686018427387904], "data_offsets": [0, 0]},
        0,
        "an impossible shape",
    ],
    "65 axes": [
        {
            "shape": [
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
                1,
            ],
            "data_offsets": [0, 4],
        },
        4,
        "an impossible shape",
    ],
    "data that is missing": [{}, 15, "bytes, 1 are missing, from"],
    "data far beyond": [
        {"shape": [1099511627776], "data_offsets": [0, 4398046511104]},
        16,
        "truncated: has ",
    ],
}

TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Memory:
    """A file in memory, as the reader sees one."""

    name, identity = "memory", None

    def __init__(self, content: bytes) -> None:
        self._content, self.size = content, len(content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        assert offset >= 0
        assert offset + len(buffer) <= self.size, "read beyond the file"
        buffer[:] = self._content[offset : offset + len(buffer)]


def read_all(content: bytes) -> dict[str, np.ndarray]:
    """Every tensor; a wrong file must fail while it is opened, or here."""
    with errors_about(Memory.name):
        file = open_safetensors(Memory(content))
    return {name: file.read(Part(name)) for name in file.tensors}


def some_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (5,), (), (2, 3, 4), (0, 4), (4, 0), (0,)], ids=str)
def test_tensors_equal_the_librarys(dtype, shape):
    tensors = {"before": torch.ones(3), "weight": some_tensor(dtype, *shape)}
    tensors["after"] = torch.full((2, 2), 7.0)
    file = open_safetensors(Memory(save_tensors(tensors)))
    assert sorted(file.tensors) == ["after", "before", "weight"]
    info = file.tensors["weight"]
    assert (info.shape, info.nbytes) == (shape, tensors["weight"].nbytes)
    for name, tensor in tensors.items():
        wide = tensor.double() if dtype == torch.float64 and name == "weight" else tensor.float()
        result = file.read(Part(name))
        assert result.dtype == wide.numpy().dtype
        np.testing.assert_array_equal(result, wide.numpy())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "ranges",
    [((0, 6),), ((2, 3),), ((0, 1), (5, 6)), ((4, 6), (0, 2)), ((1, 4), (2, 5))],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6,), (6, 4), (6, 2, 3)], ids=str)
def test_row_ranges_are_joined_in_the_order_asked(dtype, ranges, shape):
    tensor = some_tensor(dtype, *shape)
    file = open_safetensors(Memory(save_tensors({"a": torch.ones(1), "w": tensor})))
    wide = (tensor.double() if dtype == torch.float64 else tensor.float()).numpy()
    expected = np.concatenate([wide[start:stop] for start, stop in ranges])
    np.testing.assert_array_equal(file.read(Part("w", ranges)), expected)


@pytest.mark.parametrize("ranges", [((0, 7),), ((3, 3),), ((4, 2),), ((-1, 2),), ((0, 2), (6, 7))])
def test_rows_outside_the_tensor_are_refused(ranges):
    file = open_safetensors(Memory(save_tensors({"w": torch.ones(6, 2)})))
    with pytest.raises(CheckpointError, match=r"w: rows .* requested from a tensor of shape"):
        file.read(Part("w", ranges))


def test_only_the_wanted_bytes_are_read():
    content = save_tensors({"w": torch.ones(1000, 10), "x": torch.ones(1000, 10)})
    reads: list[int] = []

    class Counting(Memory):
        def read_into(self, offset: int, buffer: memoryview) -> None:
            reads.append(len(buffer))
            super().read_into(offset, buffer)

    file = open_safetensors(Counting(content))
    reads.clear()
    file.read(Part("w", ((10, 20), (500, 505))))
    assert sum(reads) == 15 * 10 * 4


def test_metadata_is_no_tensor(raw_file):
    assert not open_safetensors(Memory(raw_file({"__metadata__": {"format": "pt"}}))).tensors


# Files that lie

GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
BIG = 2**63


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {**GOOD, **changes}}


TWICE = '{"w":%s,"w":%s}' % (json.dumps(GOOD), json.dumps(GOOD))  # noqa: UP031
# name -> header, bytes of data, and what the message must say
LIES: dict[str, tuple[Any, int, str]] = {
    **BAD_HEADERS,
    **{
        name: (entry(**changes), *expectations)
        for name, (changes, *expectations) in BAD_ENTRIES.items()
    },
    "not UTF-8": (b'{"\xff\xfe": 1}', 0, "not valid JSON"),
    "deep lists": ('{"w":' + "[" * 200_000, 0, "not valid JSON"),
    "deep objects": ('{"w":' * 100_000, 0, "not valid JSON"),
    "a number of many digits": ('{"w": ' + "9" * 100_000 + "}", 0, "not valid JSON"),
    "duplicate names": (TWICE, 16, "a name occurs more than once"),
    "a hundred thousand axes": (
        entry(shape=[2**62] * 100_000, data_offsets=[0, 4]),
        4,
        "an impossible shape",
    ),
    "overlap": (entry() | {"v": GOOD | {"shape": [1], "data_offsets": [12, 16]}}, 16, "overlap"),
    "the same data twice": ({"w": GOOD, "v": GOOD}, 16, "overlap"),
}


@pytest.mark.parametrize(("header", "size", "message"), LIES.values(), ids=LIES)
def test_a_header_that_lies_is_refused(raw_file, header, size, message):
    content = raw_file(header, bytes(size))
    # What JSON of this length takes, and no more.
    with in_memory(2**20 + 60 * len(content)), within(5):  # noqa: SIM117
        with pytest.raises(CheckpointError, match=r"^memory: ") as caught:
            read_all(content)
    text = str(caught.value)
    assert message in text
    assert len(text) < 500
    assert "\n" not in text


@pytest.mark.parametrize(
    "length", [17, 2**20, 100_000_001, 2**31, 2**32, 2**62, 2**63, 2**64 - 8, 2**64 - 1]
)
def test_a_header_length_that_lies_is_refused(raw_file, length):
    with pytest.raises(CheckpointError, match=f"claims {length} bytes, the file has 16"):
        open_safetensors(Memory(raw_file(b" " * 16, length=length)))


@pytest.mark.parametrize("size", range(8))
def test_a_file_too_short_for_a_length_is_refused(size):
    with pytest.raises(CheckpointError, match=f"this file has {size} bytes"):
        open_safetensors(Memory(bytes(size)))


def small_file() -> bytes:
    tensors = {"q": torch.randn(3, 2), "k": torch.randn(3, 2).bfloat16(), "b": torch.ones(2)}
    return save_tensors(tensors, metadata={"format": "pt"})


def test_every_truncation_is_refused():
    content = small_file()
    assert len(read_all(content)) == 3
    for length in range(len(content)):
        with pytest.raises(CheckpointError):
            read_all(content[:length])


def mutate(content: bytes, dice: random.Random) -> bytes:
    """Some bytes of the header changed, put in, taken out, or taken from another place."""
    result = bytearray(content)
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(dice.choice([1, 1, 2, 5])):
        place = dice.randrange(end)
        source = dice.randrange(end)
        match dice.randrange(5):
            case 0:
                result[place] = dice.randrange(256)
            case 1:
                result[place] ^= 1 << dice.randrange(8)
            case 2:
                result[place:place] = dice.choice([b"9", b"-", b"[", b"{", b'"', b"e9", b"\\"])
            case 3:
                del result[place : place + dice.randrange(1, 4)]
            case _:
                result[place : place + 4] = result[source : source + 4]
    if dice.random() < 0.5:  # a header length that is right again, so that the JSON is reached
        result[:8] = (end - 8 + len(result) - len(content)).to_bytes(8, "little")
    return bytes(result)


def survive(seed: int, count: int) -> int:
    """Number of mutated files that were refused; any error but a `WqkError` is raised."""
    dice, content, times = random.Random(seed), small_file(), 0
    for _ in range(count):
        mutated = mutate(content, dice)
        with within(5):
            times += refused(read_all, mutated)
    return times


def test_mutated_headers_are_read_or_refused():
    assert 2000 < survive(seed=0, count=4000) < 4000


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_mutated_headers_are_read_or_refused(seed):
    assert survive(seed, count=20_000) > 10_000
