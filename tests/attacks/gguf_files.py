"""GGUF files with damaged metadata, tensors and bytes.

The independent computation reads the damaged file with ggml's own package, and dequantizes with it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
from tests.attacks.outcomes import Case, Meaningless, Scores, are_equal, dense_scores, scan
from tests.checkpoints.test_gguf import hf, write

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")


class Unreadable(Meaningless):
    """ggml's package refuses the file."""


INTEGERS = gguf.GGUFValueType.UINT32, gguf.GGUFValueType.UINT64, gguf.GGUFValueType.INT32
INTERESTING = (0, 1, 2, 3, 4, 5, 7, 8, 16, 32, 64, 128, 255, 2**16, 2**31, 2**32 - 1)


def settings_of(reader: Any, architecture: str) -> dict[str, int]:
    """Whole numbers of the metadata, without the name of the architecture."""
    settings = {}
    for name, field in reader.fields.items():
        if name.startswith(f"{architecture}.") and field.types[0] in INTEGERS:
            settings[name.removeprefix(f"{architecture}.")] = int(field.parts[field.data[0]][0])
    return settings


def weight_of(tensor: Any, heads: int, width: int) -> np.ndarray:
    """A weight divided into heads; an order of rows that both sides share changes no form."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
    if values.ndim != 2 or not heads or not width or len(values) != heads * width:
        raise Meaningless(f"{tensor.name} of shape {values.shape} in {heads} heads of {width}")
    if not np.isfinite(values).all():
        raise Meaningless(f"{tensor.name} is not finite")
    return values.reshape(heads, width, -1)


def truth(path: Path) -> Scores:
    """Scores of a file, as ggml's package reads the file."""
    try:
        reader = gguf.GGUFReader(str(path))
        field = reader.fields["general.architecture"]
        architecture = bytes(field.parts[field.data[0]]).decode()
        settings = settings_of(reader, architecture)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        names = [name for name in tensors if name.endswith("attn_q.weight")]
        layers = sorted(int(name.split(".")[1]) for name in names)
        heads = settings["attention.head_count"]
        key_heads = settings.get("attention.head_count_kv", heads)
        count = settings["block_count"]
    except Exception as error:
        raise Unreadable(f"{type(error).__name__}: {error}") from None
    scores: dict[Any, Any] = {}
    for layer in layers:
        if layer >= count:
            continue
        query = tensors[f"blk.{layer}.attn_q.weight"]
        key = tensors.get(f"blk.{layer}.attn_k.weight")
        if key is None or not heads or not key_heads or heads % key_heads:
            raise Meaningless(f"layer {layer} has no keys, or other heads")
        width = int(query.shape[1]) // heads
        query_heads = weight_of(query, heads, width)
        keys = weight_of(key, key_heads, width)
        for head in range(heads):
            weight = keys[head * key_heads // heads]
            scores["self", layer, head] = dense_scores(query_heads[head], weight)
    if not scores or len(scores) != count * heads:
        raise Meaningless("layers are missing")
    return scores


def is_right(scores: Scores, path: Path, original: Scores) -> bool:
    """Compare scores with those of ggml's package, or of the undamaged file if it refuses.

    The package also refuses damage of tensors that a scan does not read.
    """
    try:
        return are_equal(scores, truth(path))
    except Unreadable:
        return are_equal(scores, original)


def damaged_bytes(content: bytes, header: int, dice: Random) -> tuple[bytes, str]:
    """Damage the bytes of the header, or cut the file short."""
    changed = bytearray(content)
    kind = dice.choice(("byte", "byte", "bit", "word", "cut", "insert", "remove"))
    at = dice.randrange(header)
    if kind == "byte":
        changed[at] = dice.randrange(256)
    elif kind == "bit":
        changed[at] ^= 1 << dice.randrange(8)
    elif kind == "word":
        size = dice.choice((4, 8))
        value = dice.choice(INTERESTING)
        changed[at : at + size] = struct.pack("<Q", value)[:size]
    elif kind == "cut":
        at = dice.randrange(len(content))
        del changed[at:]
    elif kind == "insert":
        changed[at:at] = dice.randbytes(dice.randrange(1, 9))
    else:
        del changed[at : at + dice.randrange(1, 9)]
    return bytes(changed), f"{kind} at {at}"


def damaged_value(path: Path, content: bytes, dice: Random) -> tuple[bytes, str]:
    """Damage one number of the metadata or of a tensor's entry, where it is stored."""
    reader = gguf.GGUFReader(str(path))
    changed = bytearray(content)
    if dice.random() < 0.5:
        fields = [f for f in reader.fields.values() if f.types and f.types[0] in INTEGERS]
        field = dice.choice([f for f in fields if not f.name.startswith("GGUF.")])
        part = field.parts[field.data[0]]
        name = field.name
    else:
        tensor = dice.choice(reader.tensors)
        part = tensor.field.parts[dice.choice((2, 3, 4, 5))]
        name = tensor.name
    start = part.ctypes.data - reader.data.ctypes.data
    number = int(part[-1])
    value = dice.choice((number + 1, number * 2, number // 2, *INTERESTING)) % 2**32
    size = part.itemsize
    start += part.nbytes - size
    changed[start : start + size] = value.to_bytes(size, "little")
    return bytes(changed), f"{name}: {value} for {number} at {start}"


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """Damaged GGUF files of LLaMA's and Qwen's layout, in eight number types."""
    originals = {}
    for model in ("llama", "qwen2"):
        for kind in KINDS:
            path = write(folder / f"{model}-{kind}.gguf", hf(model), kind, words=20)
            reader = gguf.GGUFReader(str(path))
            originals[path] = (path.read_bytes(), reader.data_offset, truth(path))
    damaged = folder / "damaged.gguf"
    while True:
        path = dice.choice(sorted(originals))
        content, header, original = originals[path]
        if dice.random() < 0.6:
            content, description = damaged_value(path, content, dice)
        else:
            content, description = damaged_bytes(content, header, dice)
        damaged.unlink(missing_ok=True)
        damaged.write_bytes(content)
        yield Case(
            f"{path.stem}: {description}",
            partial(scan, damaged, folder / "scores.parquet", dice),
            lambda scores, original=original: is_right(scores, damaged, original),
        )
