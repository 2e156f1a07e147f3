"""GPTQ and AWQ: codes of whole numbers in words of 32 bits, with packed zero points.

Tensors of a weight (O, I) of b-bit codes with G groups of inputs; all are stored transposed, inputs
before outputs:

==============  ==========================  ==================
tensor          GPTQ, b = 2, 3, 4 or 8      AWQ, b = 4
==============  ==========================  ==================
``qweight``     (I·b/32, O) words           (I, O/8) words
``qzeros``      (G, O·b/32) words           (G, O/8) words
``scales``      (G, O)                      (G, O)
``g_idx``       (I,), group of each input   none
==============  ==========================  ==================

Words have 32 bits. A column of GPTQ's ``qweight`` has the codes of one output, a row of ``qzeros``
the consecutive codes of one group, the first code in the lowest bits; a code of 3 bits may extend
over two words. A word of AWQ has the codes of 8 outputs, from the lowest bits in the order of
outputs 0, 2, 4, 6, 1, 3, 5, 7. A value is (code − zero) · scale. Without ``g_idx``, groups are
neighboring inputs.

The first version of GPTQ's files stores zero points minus one. Codes do not show the version of a
file. The configuration sets the version under one of three keys; without these keys, the libraries
and this reader assume the first version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from wqk.checkpoints.files import unpacked
from wqk.checkpoints.quantization.matrix import (
    Arrays,
    QuantizedMatrix,
    ceil_divide,
    group_size,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import CORRECT, DEQUANTIZE, FLOATS, Module
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    BIAS,
    Companion,
    Effect,
    Key,
    QuantizedFormat,
    Signature,
    keys,
)
from wqk.errors import shown

# Outputs that lie one after the other in a word of AWQ, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

GPTQ_BITS = (2, 3, 4, 8)

VERSIONS = {"gptq": 1, "gptq_v2": 2}

# Keys of the settings of single modules.
OVERRIDES = ("bits", "group_size", "desc_act", "sym")


@dataclass(frozen=True)
class GptqSettings:
    """Settings of GPTQ and AWQ.

    Attributes
    ----------
    bits, group_size
        Bits of a code and columns of a group; None if not set. A group size of −1 means all
        columns.
    version
        Version of the zero points; None if not set.
    ordered
        Whether columns were sorted; ``g_idx`` must then be stored.
    overrides
        Settings of single modules, by a pattern of their names.
    """

    bits: int | None = None
    group_size: int | None = None
    version: int | None = None
    ordered: bool = False
    overrides: Mapping[str, Mapping[str, Any]] | None = None

    def of(self, module: str) -> GptqSettings:
        """Return the settings of a module, with overrides of the first pattern that matches it."""
        for pattern, values in (self.overrides or {}).items():
            if not re.match(_without_sign(pattern), module):
                continue
            override = Settings("gptq", values, f"quantization_config.dynamic.{pattern}")
            bits, columns = override.whole("bits"), override.whole("group_size")
            return GptqSettings(
                bits=self.bits if bits is None else bits,
                group_size=self.group_size if columns is None else columns,
                version=self.version,
                ordered=override.switch("desc_act") if "desc_act" in values else self.ordered,
            )
        return self


def _gptq_settings(settings: Settings) -> GptqSettings:
    names = ("checkpoint_format", "format", "version")
    versions = {
        name: settings.word(name) for name in names if settings.values.get(name) is not None
    }
    for name, word in versions.items():
        if word not in VERSIONS:
            raise settings.error(
                f"{name} = {shown(word)} is a format of GPTQ that is not read; expected gptq or "
                f"gptq_v2; {DEQUANTIZE}"
            )
    if len(set(versions.values())) > 1:
        raise settings.error(
            f"{' and '.join(versions)} name different versions; expected one version, got "
            f"{' and '.join(versions.values())}; {CORRECT}"
        )
    word_type = settings.word("pack_dtype")
    if word_type not in ("", "int32", "torch.int32"):
        raise settings.error(
            "pack_dtype must be int32: codes in other words are not read; got "
            f"{shown(word_type)}; {DEQUANTIZE}"
        )
    overrides = settings.get("dynamic")
    if overrides is not None and not _is_overrides(overrides):
        raise settings.error(
            "dynamic must be settings by patterns of module names; expected objects with the keys "
            f"{', '.join(OVERRIDES)}, got {shown(overrides)}; {DEQUANTIZE}"
        )
    return GptqSettings(
        bits=settings.whole("bits", "wbits", "w_bit"),
        group_size=settings.whole("group_size", "q_group_size"),
        version=next((VERSIONS[word] for word in versions.values()), None),
        ordered=settings.switch("desc_act"),
        overrides=overrides,
    )


def _is_overrides(value: Any) -> bool:
    """Return whether a value is an object of settings by patterns, with only known keys."""
    if not isinstance(value, dict):
        return False
    for pattern, override in value.items():
        if not isinstance(override, dict) or not override.keys() <= set(OVERRIDES):
            return False
        try:
            re.compile(_without_sign(pattern))
        except re.error:
            return False
    return True


def _without_sign(pattern: str) -> str:
    """Return a pattern of names without GPTQModel's sign for included or excluded modules."""
    return pattern.removeprefix("+:").removeprefix("-:")


def _awq_settings(settings: Settings) -> GptqSettings:
    for name in ("version", "format", "checkpoint_format"):
        if settings.word(name) not in ("", "gemm"):
            raise settings.error(
                f"{name} = {shown(settings.values[name])} is an order of AWQ's codes that is not "
                f"read; expected gemm; {DEQUANTIZE}"
            )
    return GptqSettings(
        bits=settings.whole("bits", "w_bit"),
        group_size=settings.whole("group_size", "q_group_size"),
    )


def _open_gptq(module: Module, settings: GptqSettings) -> QuantizedMatrix:
    settings = settings.of(module.stem)
    column_words, outputs = module.shape(".qweight", "I32")
    scales_shape = module.shape(".scales", FLOATS)
    if scales_shape[1] == 8 * outputs:
        raise module.error(
            ".qweight",
            "is packed as AWQ packs it, and the configuration names GPTQ",
            expected=f"words of shape (words, {scales_shape[1]})",
            actual=(column_words, outputs),
            remedy=CORRECT,
        )
    _require_scales_of_outputs(module, outputs)
    groups = scales_shape[0]
    zeros_shape = module.shape(".qzeros", "I32")
    bits, rest_of_zeros = divmod(32 * zeros_shape[1], outputs)
    if (
        bits not in GPTQ_BITS
        or rest_of_zeros
        or zeros_shape[0] != groups
        or 32 * column_words % bits
    ):
        raise module.error(
            "",
            "qzeros and qweight do not fit the scales",
            expected=f"2, 3, 4 or 8 bits of {outputs} outputs in {groups} groups",
            actual=f"qzeros of shape {zeros_shape} and qweight of shape {(column_words, outputs)}",
        )
    inputs = 32 * column_words // bits
    if settings.ordered:
        module.require_promised(".g_idx", "desc_act, the order of columns")
    components = {role: module.component(f".{role}") for role in ("qweight", "qzeros", "scales")}
    has_order = module.has(".g_idx")
    if has_order:
        module.require(".g_idx", (inputs,), "I32 I64")
        components["group_of"] = module.component(".g_idx")
    columns_of_group = _columns_of_group(module, settings, inputs, groups, has_order)
    is_less_one = settings.version != VERSIONS["gptq_v2"]

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        codes = unpacked(stored["qweight"].T[rows], bits, inputs)
        packed_zeros = stored["qzeros"]
        if is_less_one:
            packed_zeros = _with_one_added(packed_zeros, bits, outputs)
        zeros = unpacked(packed_zeros, bits, outputs)
        group_of = stored.get("group_of")
        if group_of is None:
            group_of = np.arange(inputs) // columns_of_group
        return scaled(codes, stored["scales"].T[rows], zeros.T[rows], group_of)

    kind = f"GPTQ {bits}-bit"
    if settings.version is None:
        kind += " (version not said: taken for the first)"
    return module.matrix(
        kind,
        (outputs, inputs),
        grid=uniform_grid(bits, columns_of_group),
        components=components,
        values=values,
        groups=groups,
        note=_bits_note(settings.bits, bits),
    )


def _require_scales_of_outputs(module: Module, outputs: int) -> None:
    """Raise `CheckpointError` unless ``scales`` are (groups, ``outputs``)."""
    scales_shape = module.shape(".scales", FLOATS)
    if scales_shape[1] != outputs:
        raise module.error(
            ".scales",
            f"of shape {scales_shape} fit neither GPTQ's nor AWQ's qweight of shape "
            f"{module.info('.qweight').shape}",
            expected=f"(groups, {outputs})",
            actual=scales_shape,
        )


def _columns_of_group(
    module: Module, settings: GptqSettings, inputs: int, groups: int, has_order: bool
) -> int:
    """Return the number of inputs of a group; the last group may have fewer.

    Parameters
    ----------
    module, settings
        The module and its settings.
    inputs, groups
        Numbers of inputs and of stored groups.
    has_order
        Whether ``g_idx`` assigns inputs to groups; groups may then have any size.

    Raises
    ------
    CheckpointError
        The configured size contradicts the stored number of groups.
    """
    columns = settings.group_size
    if columns is None:
        if has_order:
            return ceil_divide(inputs, groups)
        return group_size(inputs, groups, module.name(".scales"))
    if columns == -1:
        columns = inputs
    if columns < 1 or ceil_divide(inputs, columns) != groups:
        raise module.error(
            ".scales",
            f"{inputs} inputs in groups of {columns} (group_size of the configuration) are not the "
            f"{groups} groups that are stored",
            expected=f"a group_size such as {ceil_divide(inputs, groups)}",
            actual=columns,
            remedy=CORRECT,
        )
    return columns


def _bits_note(configured: int | None, stored: int) -> str:
    """Return a sentence if the configuration contradicts the bits of the tensors; else empty."""
    if configured in (None, stored):
        return ""
    return (
        f"the configuration sets {configured} bits, and the shapes of the tensors prove {stored}; "
        f"{stored} bits are read"
    )


def _with_one_added(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return packed codes plus one, with the arithmetic of the library.

    Parameters
    ----------
    packed
        Words (rows, W) of 32 bits.
    bits, count
        Bits of a code, and codes in a row.

    Returns
    -------
    Words (rows, W), unsigned. Codes of 2, 4 or 8 bits are incremented word by word: the highest
    code becomes 0, and carries one into the next code of the word. Codes of 3 bits, which extend
    over words, are incremented one by one, without a carry.
    """
    packed_words = np.ascontiguousarray(packed).view(np.uint32)
    if bits == 3:
        codes = (unpacked(packed_words, 3, count) + 1) & 0b111
        bits_of_codes = (codes[..., None] >> np.arange(3)) & 1  # (rows, count, 3), lowest first
        bits_of_rows = bits_of_codes.reshape(len(packed_words), 3 * count).astype(np.uint8)
        bytes_of_rows = np.packbits(bits_of_rows, axis=1, bitorder="little")
        return bytes_of_rows.view(np.uint32)
    one_in_each_code = sum(1 << shift for shift in range(0, 32, bits))
    return packed_words + np.uint32(one_in_each_code)


def _open_awq(module: Module, settings: GptqSettings) -> QuantizedMatrix:
    inputs, row_words = module.shape(".qweight", "I32")
    outputs = 8 * row_words
    _require_scales_of_outputs(module, outputs)
    groups, _ = module.shape(".scales", FLOATS)
    module.require(".qzeros", (groups, row_words), "I32")
    if settings.bits not in (None, 4):
        raise module.error(
            "",
            "AWQ codes have 4 bits, and the configuration sets others",
            expected=4,
            actual=settings.bits,
            remedy=CORRECT,
        )
    columns_of_group = _columns_of_group(module, settings, inputs, groups, has_order=False)
    if inputs % columns_of_group:
        raise module.error(
            "",
            f"groups of {columns_of_group} do not divide {inputs} columns",
            expected=f"a divisor of {inputs}",
            actual=columns_of_group,
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        codes = _awq_codes(stored["qweight"], rows)
        zeros = _awq_codes(stored["qzeros"], rows)
        return scaled(codes, stored["scales"].T[rows], zeros)

    roles = ("qweight", "qzeros", "scales")
    return module.matrix(
        "AWQ 4-bit",
        (outputs, inputs),
        grid=uniform_grid(4, columns_of_group),
        components={role: module.component(f".{role}") for role in roles},
        values=values,
    )


def _awq_codes(packed: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """Return the codes of some outputs, (outputs, n), from words (n, O/8), as int32."""
    place_by_output = np.argsort(AWQ_ORDER)  # place in the word, counted from the lowest bits
    shifts = (4 * place_by_output[outputs % 8]).astype(np.uint32)
    packed_words = packed.view(np.uint32)[:, outputs // 8]
    codes = (packed_words >> shifts) & np.uint32(0b1111)
    return np.asarray(codes.T, np.int32)


def _is_awq(module: Module) -> bool:
    """Return whether codes are packed in the layout of AWQ, if no configuration names a method."""
    _, row_words = module.shape(".qweight", "I32")
    return module.shape(".scales", FLOATS)[1] == 8 * row_words


def _open_either(module: Module, settings: GptqSettings) -> QuantizedMatrix:
    if _is_awq(module):
        return _open_awq(module, settings)
    return _open_gptq(module, settings)


_PACKED = (Signature(".qweight", frozenset({"I32"}), (".scales",)),)

_COMPANIONS = (
    Companion(".qweight", Effect.VALUES, "codes", "always"),
    Companion(".qzeros", Effect.VALUES, "zero points of groups", "always"),
    Companion(".scales", Effect.VALUES, "scales of groups", "always"),
    BIAS,
)

# Settings of calibration and of kernels, in the spellings of all libraries that write these files.
_CALIBRATION = keys(
    Effect.NONE,
    "calibration, kernels and provenance",
    "act_bits act_data_type act_dynamic act_group_aware act_group_size act_sym activation amp "
    "auto_forward_data_parallel autoround_version backend batch_size block_name_to_quantize "
    "buffered_fwd cache_block_outputs calibration_data_device compute_device_filter "
    "damp_auto_increment damp_percent data_type dataset dense_vram_strategy "
    "dense_vram_strategy_devices device disable_exllama do_fuse enable_minmax_tuning "
    "enable_quanted_input exllama_config fail_safe fallback foem fuse_max_seq_len gc_mode "
    "gptaq gptaq_alpha gptaq_memory_device gradient_accumulate_steps hessian "
    "hessian_chunk_size hyb_act iters lm_head low_gpu_mem_usage lr max_input_length meta "
    "minmax_lr mock_quantization model_file_base_name model_name_or_path model_seqlen "
    "module_name_preceding_first_block modules_in_block_to_quantize modules_to_fuse moe "
    "moe_vram_strategy moe_vram_strategy_devices mse nsamples offload_to_disk "
    "offload_to_disk_path pack_impl pad_token_id parallel_packing provider quant_block_list "
    "scale_dtype scale_search_chunked_activations seqlen static_groups telemetry "
    "to_quant_block_names tokenizer true_sequential use_cuda_fp16 use_exllama v2 v2_alpha "
    "v2_memory_device "
    "wait_for_submodule_finalizers",
)

_SHARED_KEYS = (
    *keys(Effect.CHECKED, "name of the method", "quant_method method"),
    Key("modules_to_not_convert", Effect.NONE, "modules that are stored plain"),
    Key("sym", Effect.NONE, "symmetric codes; the stored zero points are read in any case"),
    Key("zero_point", Effect.NONE, "as sym, negated; the stored zero points are read"),
    Key("adapter", Effect.REFUSED, "an adapter that is added to the weights"),
    Key("rotation", Effect.REFUSED, "a rotation of the weights"),
    Key("is_marlin_format", Effect.REFUSED, "the order of a kernel"),
    Key("use_marlin", Effect.NONE, "kernels"),
    *_CALIBRATION,
)

GPTQ = QuantizedFormat(
    name="GPTQ",
    methods=frozenset({"gptq"}),
    signatures=_PACKED,
    companions=(
        *_COMPANIONS,
        Companion(".g_idx", Effect.VALUES, "group of each column", "desc_act"),
    ),
    keys=(
        *keys(Effect.CHECKED, "bits of a code", "bits wbits w_bit"),
        *keys(Effect.VALUES, "columns of a group; −1 for all", "group_size q_group_size"),
        *keys(
            Effect.VALUES,
            "version of the zero points: gptq, less one; gptq_v2, as they are",
            "checkpoint_format format version",
        ),
        Key("desc_act", Effect.CHECKED, "sorted columns, which need g_idx"),
        Key("dynamic", Effect.VALUES, "bits and groups of single modules"),
        Key("pack_dtype", Effect.CHECKED, "words of 32 bits"),
        *_SHARED_KEYS,
    ),
    settings=_gptq_settings,
    open=_open_gptq,
    proof="GPTQModel 7.7.0's own packing and dequantizing, bit for bit",
)

AWQ = QuantizedFormat(
    name="AWQ",
    methods=frozenset({"awq"}),
    signatures=_PACKED,
    companions=_COMPANIONS,
    keys=(
        *keys(Effect.CHECKED, "bits of a code, which are 4", "bits w_bit"),
        *keys(Effect.VALUES, "columns of a group; −1 for all", "group_size q_group_size"),
        *keys(
            Effect.CHECKED, "order of the codes, which is gemm", "version format checkpoint_format"
        ),
        Key("desc_act", Effect.REFUSED, "sorted columns, which AWQ does not have"),
        *_SHARED_KEYS,
    ),
    settings=_awq_settings,
    open=_open_awq,
    proof="AutoAWQ 0.2.9, bit for bit",
)

GPTQ_OR_AWQ = QuantizedFormat(
    name="GPTQ or AWQ without a configuration",
    methods=frozenset({""}),
    signatures=_PACKED,
    companions=GPTQ.companions,
    keys=(),
    settings=lambda settings: GptqSettings(),
    open=_open_either,
    proof="as GPTQ and AWQ",
)
