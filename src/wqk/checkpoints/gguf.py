"""GGUF, the format of llama.cpp: metadata and tensors, some of them quantized.

A file begins with ``GGUF``, its version, and the numbers of tensors and of metadata; then follow
the metadata, the tensors' names, shapes, types and offsets, and, aligned, the data. Shapes are
stored innermost axis first, so that a matrix (out, in) is stored as in, out. Specification:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md

The metadata become a configuration with the keys of other files, as llama.cpp reads the metadata.
Many facts are in llama.cpp's code and not in the file: the layers with a window, the rotation of
positions, the scale, the keys of the metadata that have an effect. `llama-cpp.toml` has a row for
every architecture; `tools/llama_cpp.py` writes that file from llama.cpp's sources.

The blocks of quantized tensors are in `wqk.checkpoints.gguf_blocks`.
"""

from __future__ import annotations

import io
import math
import struct
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Grid, Part, TensorInfo
from wqk.checkpoints.files import ITEM_BITS, RowFile, check_sizes, refuse_pointer, truncated
from wqk.checkpoints.gguf_blocks import QUANTIZED
from wqk.errors import CheckpointError, shown
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
# Tensors or metadata of a file; more are a broken header.
MOST_ENTRIES = 1_000_000
# Axes of a tensor; ggml has four.
MOST_AXES = 8
# Arrays of metadata within arrays.
MOST_NESTED = 4
# Bytes of the header that are read at a time.
AHEAD = 2**18

# Last part of messages about a header.
DAMAGED = "download the file again, or convert the model again"


def open_gguf(source: ByteSource) -> RowFile:
    """Open a GGUF file; only the header is read. Its metadata are ``about["gguf"]``.

    Raises
    ------
    CheckpointError
        The header does not describe the file.
    """
    cursor = _Cursor(source)
    count, entries = _read_counts(cursor)
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.name()
        metadata[key] = cursor.value(cursor.number(U32))
    entries_of_tensors = [_tensor_entry(cursor) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20:
        raise CheckpointError(
            "general.alignment must be a positive number; expected a number of bytes up to 2**20, "
            f"got {shown(alignment)}; {DAMAGED}"
        )
    _require_contiguous(entries_of_tensors, alignment)
    data_start = _aligned(cursor.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    starts: dict[str, int] = {}
    for name, info, offset in entries_of_tensors:
        start = data_start + offset
        if name in tensors:
            raise CheckpointError(f"tensor {name!r} occurs twice; expected it once; {DAMAGED}")
        tensors[name], starts[name] = info, start
    stored = {name: info for name, info in tensors.items() if info.nbytes}
    beyond = [name for name, info in stored.items() if starts[name] + info.nbytes > source.size]
    if beyond:
        end = max(starts[name] + tensors[name].nbytes for name in beyond)
        raise CheckpointError(truncated(source.size, end, min(beyond, key=starts.__getitem__)))
    file = RowFile(source, tensors, starts, {"gguf": metadata})
    for name in ROTARY_FACTORS:
        if name in tensors and tensors[name].nbytes <= LONGEST:
            metadata[name] = [float(str(value)) for value in file.read(Part(name))]
    return file


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and of metadata, after a check of magic bytes and version."""
    start = cursor.take(4)
    refuse_pointer(start)
    if start != MAGIC:
        raise CheckpointError(f"not a GGUF file; expected it to begin with 'GGUF', got {start!r}")
    version = cursor.number(U32)
    if version not in (2, 3):
        kind = "big-endian" if version > 2**16 else f"version {version}"
        raise CheckpointError(
            "a GGUF file of a kind that is not read; expected version 2 or 3 in little-endian "
            f"order, got {kind}; convert the model again"
        )
    count, entries = cursor.number(U64), cursor.number(U64)
    if max(count, entries) > MOST_ENTRIES:
        raise CheckpointError(
            f"the header claims {max(count, entries)} entries: not a GGUF file, or damaged; "
            f"expected at most {MOST_ENTRIES:,}; {DAMAGED}"
        )
    return count, entries


def _aligned(position: int, alignment: int) -> int:
    """Return the first aligned position at or after a position."""
    return -(-position // alignment) * alignment


class _TensorEntry(NamedTuple):
    """A tensor in the header, and the offset of its first byte in the data."""

    name: str
    info: TensorInfo
    offset: int


def _require_contiguous(entries: Sequence[_TensorEntry], alignment: int) -> None:
    """Check that tensors are stored without gaps, as llama.cpp requires."""
    expected: int | None = 0
    for name, info, offset in entries:
        if expected is not None and offset != expected:
            raise CheckpointError(
                f"the header is damaged: {name!r} begins at byte {offset:,} of the data; expected "
                f"{expected:,}, where the tensor before it ends; {DAMAGED}"
            )
        has_known_size = info.dtype in QUANTIZED or info.dtype in ITEM_BITS
        expected = _aligned(offset + info.nbytes, alignment) if has_known_size else None


def _tensor_entry(cursor: _Cursor) -> _TensorEntry:
    """Read the next tensor of the header: name, axes, shape, type and offset.

    The size of an unsupported type is unknown, and 0 here; its values cannot be read.
    """
    name, axes = cursor.name(), cursor.number(U32)
    if axes > MOST_AXES:
        raise CheckpointError(
            f"{name!r} has {axes} axes: not a GGUF file, or damaged; expected at most {MOST_AXES}; "
            f"{DAMAGED}"
        )
    innermost_first = [cursor.number(U64) for _ in range(axes)]
    shape = tuple(reversed(innermost_first))
    type_number, offset = cursor.number(U32), cursor.number(U64)
    check_sizes(repr(name), shape, (offset,))
    dtype, size = TYPES.get(type_number, f"ggml type {type_number}"), math.prod(shape)
    if dtype not in QUANTIZED:
        nbytes = size * ITEM_BITS.get(dtype, 0) // 8
        return _TensorEntry(name, TensorInfo(dtype, shape, nbytes), offset)
    block = QUANTIZED[dtype]
    if not shape or shape[-1] % block.values:
        raise CheckpointError(
            f"{name!r} of shape {shape} does not divide into blocks, as {dtype} needs; expected "
            f"rows of a multiple of {block.values}, got {shape[-1] if shape else 1}; {DAMAGED}"
        )
    nbytes = size // block.values * block.nbytes
    grid = Grid(block.shared, block.steps)
    return _TensorEntry(name, TensorInfo(dtype, shape, nbytes, grid), offset)


class _Cursor:
    """Reads a header from its start, with a buffer."""

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
            raise CheckpointError(
                f"ends within its header: truncated, or not a GGUF file; {DAMAGED}"
            )

    def number(self, kind: struct.Struct) -> Any:
        """Return the next number of this type."""
        return kind.unpack(self.take(kind.size))[0]

    def name(self) -> str:
        """Return the next name of a tensor, or key of the metadata."""
        name = self.take(self.number(U64))
        try:
            return name.decode("utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{name!r:.60} is no name: not a GGUF file, or damaged; expected UTF-8; {DAMAGED}"
            ) from None

    def value(self, kind: int, depth: int = 0) -> Any:
        """Return the next value of the metadata.

        Parameters
        ----------
        kind
            Number of the value's type: one of `SCALARS`, `STRING` or `ARRAY`.
        depth
            Number of arrays around the value.

        Returns
        -------
        A number, a text, or a list of values; None for long arrays and strings.
        """
        if kind in SCALARS:
            number = self.number(SCALARS[kind])
            # The shortest decimal of this float32: 1e-6 instead of 9.99…e-7.
            return float(str(np.float32(number))) if kind == FLOAT32 else number
        if kind == STRING:
            length = self.number(U64)
            if length <= LONGEST:
                return self.take(length).decode("utf-8", "replace")
            self._pass_over(length)
            return None
        if kind != ARRAY or depth > MOST_NESTED:
            raise CheckpointError(
                f"metadata of the unknown type {kind}: not a GGUF file, or damaged; {DAMAGED}"
            )
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
    """Return a table of the attention in llama.cpp's code, by name of the architecture in files.

    Keys with the usual value are left out:

    ``rotary``
        Order of rotary pairs, ``half`` or ``interleaved``; ``none``; or ``by sections``:
        interleaved unless the file has sections for several axes.
    ``keys``
        Keys of the metadata that this architecture reads, but most architectures do not.
    ``window``
        ``kind`` (``standard``, ``symmetric``, ``chunked``); ``size``, if the file has no size, or
        ``always``; ``every``, the period of layers without a window, which are the last or the
        ``first`` of a period; ``depth``, the only number of layers with windows.
    ``turned``
        Layers with rotary positions: ``windowed`` layers, all except one in ``unturned_every``, or
        by ``finetuned``, a key of the metadata.
    ``local_base``, ``local_scaling``
        Base of windowed layers if the file sets none: 10,000 (``own``) or the base of other layers
        (``same``). Scaling is false if the positions of windowed layers are not scaled.
    ``factors``
        Use of the file's factors of frequencies: in ``all`` layers or ``full`` layers.
    ``scale``, ``wide_scale_at``
        Scale of the score; number of layers for which the scale follows from the model's width
        divided by its heads.
    ``yarn_log``, ``yarn_both``
        Multiplier of the file's YaRN logarithm, if used; true if YaRN's factor is only in the
        scale.
    ``alibi``, ``alibi_at``, ``softcap``, ``causal``
        Constants of the code; the number of layers with linear biases instead of a rotation.
    ``norm``, ``gain``, ``after``, ``head_norm``, ``bare_head_norm``, ``norm_after_rotary``,
    ``latent``, ``gated``, ``sinks``, ``temperature``, ``unread``
        Keys that determine the family.
    """
    return {name: row for name, row in _table().items() if isinstance(row, dict)}


def commit() -> str:
    """Return the commit of llama.cpp that the table was made from."""
    return str(_table()["commit"])


@cache
def _table() -> Mapping[str, Any]:
    text = resources.files("wqk.checkpoints").joinpath("llama-cpp.toml").read_text("utf-8")
    return tomllib.loads(text)


class _File(NamedTuple):
    """Metadata of a file, and the row of its architecture in `architectures`.

    Attributes
    ----------
    own
        Metadata of the architecture, nested, without the architecture's name.
    factors
        Factors of rotary frequencies; None if absent.
    code
        Row of the architecture; empty for an unknown one.
    depth
        Number of layers with attention.
    """

    own: Mapping[str, Any]
    factors: Sequence[float] | None
    code: Mapping[str, Any]
    depth: int

    def is_at_depth(self, key: str) -> bool:
        """Return whether a row of the code applies to models with this number of blocks."""
        return self.code.get(key) == self.whole("block_count", -1)

    @property
    def has_alibi_at_depth(self) -> bool:
        """Return whether the model has biases instead of a rotation, by its number of blocks."""
        return self.is_at_depth("alibi_at")

    def get(self, key: str) -> Any:
        """Return the value under a key with dots, such as ``attention.head_count``; else None."""
        value: Any = self.own
        for word in key.split("."):
            value = value.get(word) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a number of the file."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return default
        return value

    def whole(self, key: str, default: int = 0) -> int:
        """Return a whole number of the file."""
        value = self.get(key)
        return value if type(value) is int else default

    def reads(self, key: str) -> bool:
        """Return whether llama.cpp reads a key for this architecture."""
        return key in self.code.get("keys", ())


def configuration(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in a file's metadata; dots in keys become nested tables.

    The result also contains ``model_type``, the numbers of heads, layers and windows under their
    names in `transformers`, and facts about the architecture from llama.cpp's code.

    Examples
    --------
    >>> about = {"general.architecture": "llama", "llama.attention.head_count": 4}
    >>> configuration(about)["attention"], configuration(about)["model_type"]
    ({'head_count': 4}, 'gguf-llama')
    """
    architecture = metadata.get("general.architecture")
    name = architecture if isinstance(architecture, str) else ""
    configured = _nested(metadata, name)
    file = _File(configured, _rotary_factors(metadata), architectures().get(name, {}), depth=0)
    depth = file.whole("block_count") - file.whole("nextn_predict_layers")
    if "block_count" in configured and depth < 1:
        raise CheckpointError(
            f"{name}.block_count counts no block with attention; expected a number from 1 on, "
            f"got {depth}; {DAMAGED}"
        )
    file = file._replace(depth=min(max(depth, 0), MOST_LAYERS))
    windows = _windows(file)
    return {
        **configured,
        **_heads(file),
        **_scores(file),
        "model_type": f"gguf-{architecture}",
        "layer_count": depth or None,
        **_window_keys(file, windows),
        "pairs": _has_interleaved_pairs(file),
        "turned_layers": _turned(file, windows),
        "rope_parameters": _rotations(file, has_windows=any(windows)),
    }


def _rotary_factors(metadata: Mapping[str, Any]) -> Sequence[float] | None:
    """Return the factors of rotary frequencies in a tensor of the file; None if absent."""
    for name in ROTARY_FACTORS:
        factors = metadata.get(name)
        if isinstance(factors, list):
            return factors
    return None


def _window_keys(file: _File, windows: Sequence[int]) -> dict[str, Any]:
    """Return the keys of windows, named as in `transformers`; empty if no layer has a window."""
    if not any(windows):
        return {}
    kind = file.code["window"]["kind"]
    is_chunked = kind == "chunked"
    windowed = "chunked_attention" if is_chunked else "sliding_attention"
    size = max(windows)
    return {
        "layer_types": [windowed if window else "full_attention" for window in windows],
        "attention_chunk_size" if is_chunked else "sliding_window": (
            size // 2 if kind == "symmetric" else size
        ),
    }


def _has_interleaved_pairs(file: _File) -> bool:
    """Return whether dimension 2k rotates with 2k + 1, and not k with k + P."""
    order = file.code.get("rotary")
    sections = file.get("rope.dimension_sections")
    has_sections = isinstance(sections, list) and len(sections) > 1 and all(sections[:2])
    return order == "interleaved" or (order == "by sections" and not has_sections)


def _rotations(file: _File, has_windows: bool) -> dict[str, dict[str, Any]]:
    """Return the rotary parameters of each kind of layers in a model."""
    rotations = {"full_attention": _rotation(file, is_local=False)}
    if has_windows:
        local = _rotation(file, is_local=True)
        rotations |= {"sliding_attention": local, "chunked_attention": local}
    return rotations


def _nested(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Return the keys of an architecture as nested tables, without the architecture's name.

    Examples
    --------
    >>> _nested({"llama.attention.head_count": 4, "general.name": "x"}, "llama")
    {'attention': {'head_count': 4}}
    """
    nested: dict[str, Any] = {}
    for key, value in metadata.items():
        if not key.startswith(f"{architecture}."):
            continue
        *path, last = key.removeprefix(f"{architecture}.").split(".")
        table = nested
        for word in path:
            inner = table.setdefault(word, {})
            # A key that has a value and keys within loses the latter.
            table = inner if isinstance(inner, dict) else {}
        table[last] = value
    return nested


def _heads(file: _File) -> dict[str, Any]:
    """Return the numbers of heads, and their widths in all layers and in layers with a window."""
    heads, width = file.get("attention.head_count"), file.get("embedding_length")
    counts = heads if isinstance(heads, list) else [heads]
    most_heads = max((count for count in counts if type(count) is int), default=0)
    width_of_share = width // most_heads if type(width) is int and most_heads > 0 else None
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": file.get("attention.head_count_kv") or heads,
        "num_kv_shared_layers": file.whole("attention.shared_kv_layers"),
    }
    head_width = file.get("attention.key_length")
    if head_width is None:
        head_width = width_of_share
    has_head_width = type(head_width) is int and head_width > 0
    if has_head_width:
        local_width = file.whole("attention.key_length_swa") or head_width
        config |= {"head_dim": head_width, "local_head_dim": local_width}
    whole_width = file.whole("attention.key_length_mla") or head_width
    if file.code.get("latent") and type(whole_width) is int:
        position_width = file.whole("rope.dimension_count")
        content_width = whole_width - position_width
        config |= {"qk_nope_head_dim": content_width, "qk_rope_head_dim": position_width}
    if file.is_at_depth("wide_scale_at") and width_of_share is not None:
        config["score_scale"] = width_of_share**-0.5
    elif file.code.get("scale") == "inverse" and has_head_width:
        config["score_scale"] = 1 / head_width
    return config


def _scores(file: _File) -> dict[str, Any]:
    """Return the scale, the limits, the biases and the mask of scores."""
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
    has_alibi = "alibi" in file.code or file.has_alibi_at_depth
    if file.reads("max_alibi_bias") and file.number("attention.max_alibi_bias"):
        has_alibi = True
    config["alibi"] = has_alibi
    if file.get("attention.causal") is False or file.code.get("causal") is False:
        config["is_causal"] = False
    return config


def _windows(file: _File) -> list[int]:
    """Return the size of each layer's window; 0 for a layer without a window."""
    rule = file.code.get("window")
    if not isinstance(rule, Mapping) or rule.get("depth", file.depth) != file.depth:
        return [0] * file.depth
    stored_size = file.get("attention.sliding_window")
    size = stored_size if type(stored_size) is int else rule.get("size", 0)
    if "always" in rule and stored_size != 0:
        size = rule["always"]
    pattern = file.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        switches = [*pattern, *[False] * file.depth]  # layers beyond the list have no window
        return [size if is_windowed else 0 for is_windowed in switches[: file.depth]]
    period = pattern if type(pattern) is int and pattern >= 0 else rule.get("every", 1)
    if period == 0:
        return [size] * file.depth
    # One layer of each period has no window: the first or the last.
    place_without = 0 if rule.get("first") else period - 1
    sizes = []
    for layer in range(file.depth):
        is_windowed = layer % period != place_without
        sizes.append(size if is_windowed else 0)
    return sizes


def _turned(file: _File, windows: Sequence[int]) -> list[bool]:
    """Return whether each layer has rotary positions."""
    code = file.code
    if code.get("rotary", "none") == "none" or file.has_alibi_at_depth:
        return [False] * file.depth
    pattern = file.get("attention.rope_pattern") if file.reads("rope_pattern") else None
    if isinstance(pattern, list):
        switches = [*map(bool, pattern), *[False] * file.depth]
        return switches[: file.depth]
    match code.get("turned"):
        case "windowed" if any(windows):
            return [bool(size) for size in windows]
        case "every" if any(windows) or "window" not in code:
            period = code["unturned_every"]
            place_without = 0 if code.get("unturned_first") else period - 1
            return [layer % period != place_without for layer in range(file.depth)]
        case "finetuned":
            return [file.get("rope.scaling.finetuned") is not False] * file.depth
    return [True] * file.depth


def _rotation(file: _File, is_local: bool) -> dict[str, Any]:
    """Return the rotary parameters of layers with or without a window, as in `transformers`."""
    code, base = file.code, file.number("rope.freq_base", 10_000.0)
    if is_local and "local_base" in code:
        default_base = base if code["local_base"] == "same" else 10_000.0
        base = file.number("rope.freq_base_swa", default_base)
    parameters: dict[str, Any] = {"rope_theta": base}
    local_width = file.get("rope.dimension_count_swa")
    if is_local and local_width is not None:
        parameters["rope.dimension_count"] = local_width
    if is_local and code.get("local_scaling") is False:
        return parameters
    amplitude = file.number("rope.scaling.attn_factor", 1.0) or 1.0
    layers_with_factors = code.get("factors")
    uses_factors = layers_with_factors == "all" or (layers_with_factors == "full" and not is_local)
    if file.factors is not None and uses_factors:
        return parameters | {
            "rope_type": "factors",
            "factors": file.factors,
            "attention_factor": amplitude,
        }
    kind = file.get("rope.scaling.type")
    factor = file.number("rope.scaling.factor") or file.number("rope.scale_linear") or 1.0
    if kind == "yarn":
        return parameters | _yarn(file, factor, amplitude)
    if factor != 1 and kind in (None, "linear"):
        return parameters | {"rope_type": "linear", "factor": factor}
    return parameters


def _yarn(file: _File, factor: float, amplitude: float) -> dict[str, Any]:
    """Return the parameters of YaRN; its attention factor is set by the file or the code."""
    parameters: dict[str, Any] = {}
    multiplier = file.number("rope.scaling.yarn_log_multiplier") or 0
    weight = multiplier * file.code.get("yarn_log", 0)
    if weight:
        whole_weight = weight if file.code.get("yarn_both") else 1.0
        parameters = {"mscale": whole_weight, "mscale_all_dim": weight}
    elif factor > 1:
        parameters = {"attention_factor": amplitude * (0.1 * math.log(factor) + 1)}
    trained = file.get("rope.scaling.original_context_length") or file.get("context_length")
    return parameters | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": trained,
        "beta_fast": file.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.number("rope.scaling.yarn_beta_slow"),
    }
