"""GGUF, the format of llama.cpp: metadata, then tensors, some of them quantized.

A file begins with ``GGUF``, its version, and the numbers of tensors and of metadata; then come the
metadata, the tensors' names, shapes, types and places, and aligned, the data. Shapes are stored
innermost axis first, so that a matrix (out, in) is stored as in, out. Specification:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The metadata become a configuration in the terms of other files, as llama.cpp reads it. Much of what
llama.cpp does is in its code and not in the file: which layers have a window, whose positions
rotate and how, the scale, which keys of the metadata count at all. `llama-cpp.toml` says it of
every architecture; `tools/llama_cpp.py` writes that file from llama.cpp's sources.
"""

from __future__ import annotations

import io
import math
import struct
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Grid, Part, TensorInfo
from wqk.checkpoints.files import (
    ITEM_BITS,
    STORED,
    RowFile,
    Stored,
    check_sizes,
    refuse_pointer,
)
from wqk.errors import CheckpointError
from wqk.storage.byte_source import Raw

if TYPE_CHECKING:
    from wqk.storage.byte_source import ByteSource

MAGIC = b"GGUF"

# Types of metadata by number.
CODES = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
SCALARS = {number: struct.Struct(code) for number, code in CODES.items()}
U32, U64 = SCALARS[4], SCALARS[10]
FLOAT32, STRING, ARRAY = 6, 8, 9

# Types of tensors by number, as ggml counts them. Those that are not read are named in errors.
TYPES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: "BF16",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}

# Metadata longer than this are the tokenizer's: their bytes are passed over.
LONGEST = 4096
MOST_ENTRIES = 1_000_000
AHEAD = 2**18


def open_gguf(source: ByteSource) -> RowFile:
    """Open a GGUF file; only the header is read, whose metadata is ``about["gguf"]``.

    Raises `CheckpointError` if the header does not describe the file.
    """
    at = _Cursor(source)
    start = at.take(4)
    refuse_pointer(start)
    if start != MAGIC:
        raise CheckpointError(f"a GGUF file begins with 'GGUF', this one with {start!r}")
    version = at.number(U32)
    if version not in (2, 3):
        kind = "big-endian" if version > 2**16 else f"version {version}"
        raise CheckpointError(f"GGUF files of versions 2 and 3 are read, got {kind}")
    count, entries = at.number(U64), at.number(U64)
    if max(count, entries) > MOST_ENTRIES:
        raise CheckpointError(f"the header claims {max(count, entries)} entries: not a GGUF file")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = at.name()
        metadata[key] = at.value(at.number(U32))
    listed = [_listed(at) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20:
        raise CheckpointError(f"general.alignment must be a positive number, got {alignment!r:.30}")
    _require_contiguous(listed, alignment)
    data = _aligned(at.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    starts: dict[str, int] = {}
    for name, info, offset in listed:
        if name in tensors:
            raise CheckpointError(f"tensor {name!r} occurs twice")
        if info.nbytes and data + offset + info.nbytes > source.size:
            beyond = data + offset + info.nbytes - source.size
            raise CheckpointError(f"{name!r} ends {beyond} bytes beyond the file: truncated")
        tensors[name], starts[name] = info, data + offset
    file = RowFile(source, tensors, starts, {"gguf": metadata})
    for name in ROTARY_FACTORS:
        if name in tensors and tensors[name].nbytes <= LONGEST:
            metadata[name] = [float(str(value)) for value in file.read(Part(name))]
    return file


def _aligned(position: int, alignment: int) -> int:
    """Return the first aligned position from this one on."""
    return -(-position // alignment) * alignment


def _require_contiguous(listed: Sequence[tuple[str, TensorInfo, int]], alignment: int) -> None:
    """Check that each tensor begins where the one before it ends; llama.cpp loads no other file."""
    expected: int | None = 0
    for name, info, offset in listed:
        if expected is not None and offset != expected:
            raise CheckpointError(
                f"the header is damaged: {name!r} begins at byte {offset:,} of the data; expected "
                f"{expected:,}, where the tensor before it ends"
            )
        has_known_size = info.dtype in QUANTIZED or info.dtype in ITEM_BITS
        expected = _aligned(offset + info.nbytes, alignment) if has_known_size else None


def _listed(at: _Cursor) -> tuple[str, TensorInfo, int]:
    """Return a tensor of the header, and its offset in the data."""
    name, axes = at.name(), at.number(U32)
    if axes > 8:
        raise CheckpointError(f"{name!r} has {axes} axes: not a GGUF file")
    shape = tuple(at.number(U64) for _ in range(axes))[::-1]
    kind, offset = at.number(U32), at.number(U64)
    check_sizes(repr(name), shape, (offset,))
    dtype, size = TYPES.get(kind, f"ggml type {kind}"), math.prod(shape)
    if dtype in QUANTIZED:
        block = QUANTIZED[dtype]
        if not shape or shape[-1] % block.values:
            raise CheckpointError(
                f"{name!r} of shape {shape} does not divide into blocks of {block.values}, as "
                f"{dtype} needs"
            )
        grid = Grid(block.shared, block.steps)
        return name, TensorInfo(dtype, shape, size // block.values * block.nbytes, grid), offset
    # The size of other types is not known; reading them is refused by their name.
    return name, TensorInfo(dtype, shape, size * ITEM_BITS.get(dtype, 0) // 8), offset


class _Cursor:
    """Reads a header from its start, some bytes ahead."""

    def __init__(self, source: ByteSource) -> None:
        self.position, self._size = 0, source.size
        self._stream = io.BufferedReader(Raw(source), AHEAD)

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        self._require(count)
        self.position += count
        return self._stream.read(count)

    def _pass_over(self, count: int) -> None:
        self._require(count)
        self.position += count
        self._stream.seek(count, io.SEEK_CUR)

    def _require(self, count: int) -> None:
        if self.position + count > self._size:
            raise CheckpointError("ends within its header: truncated, or not a GGUF file")

    def number(self, kind: struct.Struct) -> Any:
        """Return the next number of this type."""
        return kind.unpack(self.take(kind.size))[0]

    def name(self) -> str:
        """Return the next name, of a tensor or a key of the metadata."""
        name = self.take(self.number(U64))
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{name!r:.60} is no name: not a GGUF file, or damaged") from None

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return the next value of this type; None for long arrays and strings."""
        if kind in SCALARS:
            number = self.number(SCALARS[kind])
            # The shortest decimal that is this float32: what was written as 1e-6 is not 9.99…e-7.
            return float(str(np.float32(number))) if kind == FLOAT32 else number
        if kind == STRING:
            length = self.number(U64)
            if length <= LONGEST:
                return self.take(length).decode("utf-8", "replace")
            self._pass_over(length)
            return None
        if kind != ARRAY or depth > 4:
            raise CheckpointError(f"metadata of the unknown type {kind}: not a GGUF file")
        inner, count = self.number(U32), self.number(U64)
        if inner in SCALARS and count > LONGEST:
            self._pass_over(count * SCALARS[inner].size)
            return None
        self._require(count)
        if inner == STRING and count > LONGEST:
            for _ in range(count):
                self._pass_over(self.number(U64))
            return None
        return [self.value(inner, depth + 1) for _ in range(count)]


# More layers than this are a broken file.
MOST_LAYERS = 100_000

# Factors of rotary frequencies are tensors here, and configuration elsewhere.
ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")


@cache
def architectures() -> Mapping[str, Mapping[str, Any]]:
    """Return the table of each architecture's attention in llama.cpp's code, by name in files.

    Keys are left out where the code does the usual:

    ``rotary``
        How pairs lie, ``half`` or ``interleaved``; ``none``; ``by sections``: interleaved unless
        the file has sections for several axes.
    ``keys``
        Those of the metadata that few architectures read, and this one does.
    ``window``
        ``kind`` (``standard``, ``symmetric``, ``chunked``); its ``size`` where the file has none,
        or ``always``; ``every`` how many layers one has none, the last of them or the ``first``;
        only at this ``depth``.
    ``turned``
        Which layers have rotary positions: ``windowed`` ones, all but one in ``unturned_every``, or
        ``finetuned``, a key of the metadata.
    ``local_base``, ``local_scaling``
        Whether windowed layers have a base of their own, 10,000 (``own``) or as the others
        (``same``) where the file is silent; false if their positions are not scaled.
    ``factors``
        Whether the file's factors of frequencies are used, in ``all`` layers or ``full`` ones.
    ``scale``, ``wide_scale_at``
        The score's, and the depth at which it is that of the model's width over its heads.
    ``yarn_log``, ``yarn_both``
        Multiplier of the file's YaRN logarithm, where it is used; true if it is in the scale alone.
    ``alibi``, ``alibi_at``, ``softcap``, ``causal``
        Constants of the code; the depth at which there are linear biases and no rotation.
    ``norm``, ``gain``, ``after``, ``head_norm``, ``bare_head_norm``, ``norm_after_rotary``,
    ``latent``, ``gated``, ``sinks``, ``temperature``, ``unread``
        What decides the family.
    """
    return {name: row for name, row in _table().items() if isinstance(row, dict)}


def commit() -> str:
    """Return the commit of llama.cpp from whose sources the table was made."""
    return str(_table()["commit"])


@cache
def _table() -> Mapping[str, Any]:
    text = resources.files("wqk.checkpoints").joinpath("llama-cpp.toml").read_text("utf-8")
    return tomllib.loads(text)


class _File(NamedTuple):
    """A file's own metadata, and what the code says of its architecture."""

    own: Mapping[str, Any]  # nested, without the architecture's name
    factors: Sequence[float] | None
    code: Mapping[str, Any]
    depth: int

    def get(self, key: str) -> Any:
        """Return a value by name; None if it is missing, or has another name's place."""
        value: Any = self.own
        for word in key.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a number of the file."""
        value = self.get(key)
        return default if isinstance(value, bool) or not isinstance(value, int | float) else value

    def whole(self, key: str, default: int = 0) -> int:
        """Return a whole number of the file."""
        value = self.get(key)
        return value if type(value) is int else default

    def reads(self, key: str) -> bool:
        """Return whether llama.cpp reads a key that few architectures have."""
        return key in self.code.get("keys", ())


def configuration(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in a file's metadata; dots in keys become nested tables.

    Added are ``model_type``, numbers of heads, layers and windows under the names that
    `transformers` has for them, and what llama.cpp's code knows by architecture.

    Examples
    --------
    >>> about = {"general.architecture": "llama", "llama.attention.head_count": 4}
    >>> configuration(about)["attention"], configuration(about)["model_type"]
    ({'head_count': 4}, 'gguf-llama')
    """
    architecture = metadata.get("general.architecture")
    name = architecture if isinstance(architecture, str) else ""
    configured: dict[str, Any] = {}
    for key, value in metadata.items():
        if key.startswith(f"{name}."):
            *path, last = key.removeprefix(f"{name}.").split(".")
            table = configured
            for word in path:
                inner = table.setdefault(word, {})
                table = inner if isinstance(inner, dict) else {}
            table[last] = value
    factors = next((f for n in ROTARY_FACTORS if isinstance(f := metadata.get(n), list)), None)
    file = _File(configured, factors, architectures().get(name, {}), 0)
    depth = file.whole("block_count") - file.whole("nextn_predict_layers")
    file = file._replace(depth=min(max(depth, 0), MOST_LAYERS))
    windows = _windows(file)
    turned = _turned(file, windows)
    config = configured | _heads(file) | _scores(file)
    if "block_count" in configured and depth < 1:
        raise CheckpointError(
            f"{name}.block_count counts no block with attention; expected a number from 1 on, "
            f"got {depth}"
        )
    config |= {"model_type": f"gguf-{architecture}", "layer_count": depth or None}
    if any(windows):
        chunked, symmetric = (file.code["window"]["kind"] == k for k in ("chunked", "symmetric"))
        kind = "chunked" if chunked else "sliding"
        config["layer_types"] = [f"{kind if size else 'full'}_attention" for size in windows]
        size = max(windows)
        key = "attention_chunk_size" if chunked else "sliding_window"
        config[key] = size // 2 if symmetric else size
    sections = file.get("rope.dimension_sections")
    has_sections = isinstance(sections, list) and len(sections) > 1 and all(sections[:2])
    config["pairs"] = file.code.get("rotary") == "interleaved" or (
        file.code.get("rotary") == "by sections" and not has_sections
    )
    config["turned_layers"] = turned
    full = _rotation(file, local=False)
    config["rope_parameters"] = {"full_attention": full}
    if any(windows):
        local = _rotation(file, local=True)
        config["rope_parameters"] |= {"sliding_attention": local, "chunked_attention": local}
    return config


def _heads(file: _File) -> dict[str, Any]:
    """Their numbers, and their widths in all layers and in windowed ones."""
    heads, width = file.get("attention.head_count"), file.get("embedding_length")
    counts = heads if isinstance(heads, list) else [heads]
    most = max((n for n in counts if type(n) is int), default=0)
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv") or heads,
        "num_kv_shared_layers": file.whole("attention.shared_kv_layers"),
    }
    head_width = file.get("attention.key_length")
    if head_width is None and type(width) is int and most > 0:
        head_width = width // most
    local = file.whole("attention.key_length_swa") or head_width
    if type(head_width) is int and head_width > 0:
        config |= {"head_dim": head_width, "local_head_dim": local}
    latent = file.whole("attention.key_length_mla") or head_width
    position = file.whole("rope.dimension_count")
    if file.code.get("latent") and type(latent) is int:
        config |= {"qk_nope_head_dim": latent - position, "qk_rope_head_dim": position}
    wide = file.code.get("wide_scale_at") == file.whole("block_count", -1)
    if wide and type(width) is int and most > 0:
        config["score_scale"] = (width // most) ** -0.5
    elif file.code.get("scale") == "inverse" and type(head_width) is int and head_width > 0:
        config["score_scale"] = 1 / head_width
    return config


def _scores(file: _File) -> dict[str, Any]:
    """Scale, limits and mask."""
    config: dict[str, Any] = {}
    scale = file.code.get("scale")
    for key in ("scale", "output_scale"):
        if file.reads(key):
            scale = file.number(f"attention.{key}") or scale
    if isinstance(scale, int | float):
        config["score_scale"] = scale
    if file.reads("clamp_kqv"):
        config["clip"] = file.number("attention.clamp_kqv") or None
    if "softcap" in file.code:
        config["softcap"] = file.number("attn_logit_softcapping", file.code["softcap"])
    bias = file.number("attention.max_alibi_bias") if file.reads("max_alibi_bias") else None
    at_depth = file.code.get("alibi_at") == file.whole("block_count", -1)
    config["alibi"] = bool(bias) or "alibi" in file.code or at_depth
    if file.get("attention.causal") is False or file.code.get("causal") is False:
        config["is_causal"] = False
    return config


def _windows(file: _File) -> list[int]:
    """Return the size of each layer's window; 0 for a layer without a window."""
    rule, none = file.code.get("window"), [0] * file.depth
    if not isinstance(rule, Mapping) or rule.get("depth", file.depth) != file.depth:
        return none
    widths = file.get("attention.sliding_window")
    size = rule.get("size", 0) if type(widths) is not int else widths
    if "always" in rule and widths != 0:
        size = rule["always"]
    pattern, every = file.get("attention.sliding_window_pattern"), rule.get("every", 1)
    if isinstance(pattern, list):
        return [size if n < len(pattern) and pattern[n] else 0 for n in range(file.depth)]
    if type(pattern) is int and pattern >= 0:
        every = pattern
    if every == 0:
        return [size] * file.depth
    odd = 0 if rule.get("first") else every - 1
    return [0 if n % every == odd else size for n in range(file.depth)]


def _turned(file: _File, windows: Sequence[int]) -> list[bool]:
    """Return whether each layer has rotary positions."""
    code, layers = file.code, range(file.depth)
    at_depth = code.get("alibi_at") == file.whole("block_count", -1)
    if code.get("rotary", "none") == "none" or at_depth:
        return [False] * file.depth
    pattern = file.get("attention.rope_pattern") if file.reads("rope_pattern") else None
    if isinstance(pattern, list):
        return [n < len(pattern) and bool(pattern[n]) for n in layers]
    match code.get("turned"):
        case "windowed" if any(windows):
            return [bool(size) for size in windows]
        case "every" if any(windows) or "window" not in code:
            step = code["unturned_every"]
            odd = 0 if code.get("unturned_first") else step - 1
            return [n % step != odd for n in layers]
        case "finetuned":
            return [file.get("rope.scaling.finetuned") is not False] * file.depth
    return [True] * file.depth


def _rotation(file: _File, local: bool) -> dict[str, Any]:
    """Return the rotary parameters of layers with or without a window, in `transformers`' keys."""
    code, base = file.code, file.number("rope.freq_base", 10_000.0)
    if local and "local_base" in code:
        silent = base if code["local_base"] == "same" else 10_000.0
        base = file.number("rope.freq_base_swa", silent)
    parameters: dict[str, Any] = {"rope_theta": base}
    if local and (width := file.get("rope.dimension_count_swa")) is not None:
        parameters["rope.dimension_count"] = width
    if local and code.get("local_scaling") is False:
        return parameters
    kind = file.get("rope.scaling.type")
    factor = file.number("rope.scaling.factor") or file.number("rope.scale_linear") or 1.0
    amplitude = file.number("rope.scaling.attn_factor", 1.0) or 1.0
    if file.factors is not None and code.get("factors") in ("all", *["full"] * (not local)):
        return parameters | {
            "rope_type": "factors",
            "factors": file.factors,
            "attention_factor": amplitude,
        }
    if kind == "yarn":
        trained = file.get("rope.scaling.original_context_length") or file.get("context_length")
        logarithm = (file.number("rope.scaling.yarn_log_multiplier") or 0) * code.get("yarn_log", 0)
        if logarithm:
            whole = logarithm if code.get("yarn_both") else 1.0
            parameters |= {"mscale": whole, "mscale_all_dim": logarithm}
        elif factor > 1:
            parameters["attention_factor"] = amplitude * (0.1 * math.log(factor) + 1)
        return parameters | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": trained,
            "beta_fast": file.number("rope.scaling.yarn_beta_fast"),
            "beta_slow": file.number("rope.scaling.yarn_beta_slow"),
        }
    if factor != 1 and kind in (None, "linear"):
        return parameters | {"rope_type": "linear", "factor": factor}
    return parameters


# How blocks of few bits become values.


class Quantization(NamedTuple):
    """The storage of the values of one type."""

    values: int  # in a block
    nbytes: int  # of a block
    unpack: Callable[[np.ndarray], np.ndarray]  # (B, nbytes) to (B, values)
    shared: int  # values that share a scale
    steps: float  # distance of neighboring values, as a share of the largest one with this scale


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """Return a float16 of each block, (B, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(stored: np.ndarray) -> np.ndarray:
    """Return the low halves of each block's bytes, then the high halves."""
    return np.concatenate([stored & 0xF, stored >> 4], axis=1)


def _bits(stored: np.ndarray) -> np.ndarray:
    """Single bits of each block, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(stored), axis=1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8))


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    whole = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return np.asarray(_half(blocks, 0) * (whole.astype(np.float32) - 16))


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    whole = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return np.asarray(_half(blocks, 0) * whole + _half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_half(blocks, 0) * blocks[:, 2:].view(np.int8))


def _shifted(stored: np.ndarray, halves: int, bits: int) -> np.ndarray:
    """Numbers of a few bits that lie over each other: (B, halves, 8 / bits, bytes of a half)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.asarray((stored.reshape(len(stored), halves, 1, -1) >> shifts) & (2**bits - 1))


def _scales_and_offsets(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets of 6 bits each, from 12 bytes: (B, 8) both."""
    first, second, high_bits = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (high_bits & 0xF) | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, (high_bits >> 4) | (second >> 6) << 4], axis=1)
    return scales, offsets


def _scaled(whole: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None = None) -> np.ndarray:
    """Whole numbers of all sub-blocks with their scales (B, S), less their offsets."""
    values = whole.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
    values = values if offsets is None else values - offsets[..., None]
    return np.asarray(values.reshape(len(whole), -1))


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scales, factors = blocks[:, :16], (_half(blocks, 80), _half(blocks, 82))
    whole = _shifted(blocks[:, 16:80], 2, 2)
    return _scaled(whole, factors[0] * (scales & 0xF), factors[1] * (scales >> 4))


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    high_masks, low_bytes = blocks[:, :32], blocks[:, 32:96]
    low_scale_bytes, high_scale_bytes = blocks[:, 96:104], blocks[:, 104:108]
    # Each of the four bytes holds the two upper bits of every fourth scale.
    high_scales = _shifted(high_scale_bytes, 1, 2).reshape(len(blocks), 16)
    low_scales = _nibbles(low_scale_bytes)
    scales = (low_scales | high_scales << 4).astype(np.float32) - 32
    low = _shifted(low_bytes, 2, 2).reshape(len(blocks), 8, 32)
    is_high = _shifted(high_masks, 1, 1).reshape(len(blocks), 8, 32)
    # A code is from −4 to 3: without its highest bit, 4 is taken away.
    codes = low.astype(np.float32) - 4 * (1 - is_high).astype(np.float32)
    return _scaled(codes, _half(blocks, 108) * scales)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scales, offsets = _scales_and_offsets(blocks[:, 4:16])
    whole = _shifted(blocks[:, 16:], 4, 4)
    return _scaled(whole, _half(blocks, 0) * scales, _half(blocks, 2) * offsets)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scales, offsets = _scales_and_offsets(blocks[:, 4:16])
    low = _shifted(blocks[:, 48:], 4, 4).reshape(len(blocks), 8, 32)
    high = _shifted(blocks[:, 16:48], 1, 1).reshape(len(blocks), 8, 32)
    return _scaled(low | high << 4, _half(blocks, 0) * scales, _half(blocks, 2) * offsets)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _shifted(blocks[:, :128], 2, 4).reshape(len(blocks), 2, 4, 32)
    high = _shifted(blocks[:, 128:192], 2, 2)
    whole = (low | high << 4).astype(np.float32) - 32
    return _scaled(whole, _half(blocks, 208) * blocks[:, 192:208].view(np.int8))


# Twice the values of 4-bit floats (a sign, two bits of exponent, one of mantissa), by code.
DOUBLED_FLOAT4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _nvfp4(blocks: np.ndarray) -> np.ndarray:
    """Four scales, then four sub-blocks of 16 values: the low halves of 8 bytes, then the high."""
    scales = _unsigned_float8(blocks[:, :4])
    pairs_of_codes = blocks[:, 4:].reshape(len(blocks), 4, 8)
    codes = np.concatenate([pairs_of_codes & 0xF, pairs_of_codes >> 4], axis=-1)
    return _scaled(DOUBLED_FLOAT4[codes], scales / 2)


def _unsigned_float8(stored: np.ndarray) -> np.ndarray:
    """Values of 8-bit floats without a sign: four bits of exponent (bias 7), three of mantissa.

    ggml reads the code of NaN, 0x7F, as 0, and ignores the highest bit.
    """
    exponents = (stored >> 3 & 0xF).astype(np.int32)
    mantissas = (stored & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    subnormal = np.ldexp(mantissas, -9)
    values = np.where(exponents == 0, subnormal, normal).astype(np.float32)
    values[stored == 0x7F] = 0
    return values


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    """Signs of 128 values, the lowest bit first: a bit that is set is the scale, else minus it."""
    return np.asarray(_half(blocks, 0) * (2 * _bits(blocks[:, 2:]).astype(np.float32) - 1))


def _by_gguf(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """Unpacks blocks of a type with ggml's own package, where it is installed."""

    def unpack(blocks: np.ndarray) -> np.ndarray:
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"values of type {kind} are unpacked by the package gguf, which is not installed: "
                "pip install gguf"
            ) from None
        unpacked = gguf.quants.dequantize(blocks, getattr(gguf.GGMLQuantizationType, kind))
        return np.asarray(unpacked, np.float32)

    return unpack


QUANTIZED: dict[str, Quantization] = {
    "Q4_0": Quantization(32, 18, _q4_0, 32, 1 / 8),
    "Q4_1": Quantization(32, 20, _q4_1, 32, 2 / 15),
    "Q5_0": Quantization(32, 22, _q5_0, 32, 1 / 16),
    "Q5_1": Quantization(32, 24, _q5_1, 32, 2 / 31),
    "Q8_0": Quantization(32, 34, _q8_0, 32, 1 / 127),
    "Q2_K": Quantization(256, 84, _q2_k, 16, 2 / 3),
    "Q3_K": Quantization(256, 110, _q3_k, 16, 1 / 4),
    "Q4_K": Quantization(256, 144, _q4_k, 32, 2 / 15),
    "Q5_K": Quantization(256, 176, _q5_k, 32, 2 / 31),
    "Q6_K": Quantization(256, 210, _q6_k, 16, 1 / 32),
    "NVFP4": Quantization(64, 36, _nvfp4, 16, 1 / 3),
    "Q1_0": Quantization(128, 18, _q1_0, 128, 2.0),
    # Values of a codebook; those of the last are several at once, whose steps are a bound.
    "IQ4_NL": Quantization(32, 18, _by_gguf("IQ4_NL"), 32, 24 / 127),
    "IQ4_XS": Quantization(256, 136, _by_gguf("IQ4_XS"), 32, 24 / 127),
    "MXFP4": Quantization(32, 17, _by_gguf("MXFP4"), 32, 1 / 3),
    "TQ1_0": Quantization(256, 54, _by_gguf("TQ1_0"), 256, 1.0),
    "TQ2_0": Quantization(256, 66, _by_gguf("TQ2_0"), 256, 1.0),
    "IQ3_XXS": Quantization(256, 98, _by_gguf("IQ3_XXS"), 32, 1 / 2),
    "IQ3_S": Quantization(256, 110, _by_gguf("IQ3_S"), 32, 1 / 2),
    "IQ2_XXS": Quantization(256, 66, _by_gguf("IQ2_XXS"), 32, 1.0),
    "IQ2_XS": Quantization(256, 74, _by_gguf("IQ2_XS"), 16, 1.0),
    "IQ2_S": Quantization(256, 82, _by_gguf("IQ2_S"), 16, 1.0),
    "IQ1_S": Quantization(256, 50, _by_gguf("IQ1_S"), 32, 2.0),
    "IQ1_M": Quantization(256, 56, _by_gguf("IQ1_M"), 16, 2.0),
}


def _unpack(kind: Quantization, blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = kind.unpack(blocks).reshape(-1)


STORED |= {
    name: Stored(f"({kind.nbytes},)u1", np.float32, partial(_unpack, kind), kind.values)
    for name, kind in QUANTIZED.items()
}
