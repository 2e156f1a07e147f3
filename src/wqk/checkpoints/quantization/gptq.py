"""GPTQ and AWQ: codes of whole numbers in words of 32 bits, with packed zero points.

Both store ``qweight``, ``qzeros`` and ``scales`` transposed, inputs before outputs. GPTQ packs the
inputs of a column, AWQ packs eight outputs of a row. A column of GPTQ belongs to the group that
``g_idx`` gives it; otherwise groups are neighboring columns.

The first version of GPTQ's files stores zero points less one. Codes do not show which version a
file has. The configuration sets it under one of three keys; without any, the libraries take the
first version, and so does this reader.
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
    group_size,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import FLOATS, Module
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
from wqk.errors import CheckpointError, shown

# Outputs that lie one after the other in a word of AWQ.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

GPTQ_BITS = (2, 3, 4, 8)

VERSIONS = {"gptq": 1, "gptq_v2": 2}


@dataclass(frozen=True)
class GptqSettings:
    """Settings of GPTQ and AWQ.

    Attributes
    ----------
    bits, group_size
        Bits of a code and columns of a group; None if not set. A group of −1 has all columns.
    version
        Version of the zero points; None if not set.
    ordered
        Whether columns were sorted, so that ``g_idx`` has to be there.
    overrides
        Settings of single modules, by a pattern of their names.
    """

    bits: int | None = None
    group_size: int | None = None
    version: int | None = None
    ordered: bool = False
    overrides: Mapping[str, Mapping[str, Any]] | None = None

    def of(self, module: str) -> GptqSettings:
        """Return the settings of one module."""
        for pattern, values in (self.overrides or {}).items():
            if re.match(pattern.removeprefix("+:").removeprefix("-:"), module):
                module_settings = Settings("gptq", values, f"quantization_config.dynamic.{pattern}")
                bits, size = module_settings.whole("bits"), module_settings.whole("group_size")
                ordered = (
                    module_settings.switch("desc_act") if "desc_act" in values else self.ordered
                )
                return GptqSettings(
                    bits=self.bits if bits is None else bits,
                    group_size=self.group_size if size is None else size,
                    version=self.version,
                    ordered=ordered,
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
                "gptq_v2"
            )
    if len(set(versions.values())) > 1:
        raise settings.error(f"{' and '.join(versions)} name different versions")
    if settings.word("pack_dtype") not in ("", "int32", "torch.int32"):
        raise settings.error("pack_dtype must be int32: codes in other words are not read")
    overrides = settings.get("dynamic")
    if overrides is not None and not _is_overrides(overrides):
        raise settings.error("dynamic must be settings by patterns of module names")
    return GptqSettings(
        bits=settings.whole("bits", "wbits", "w_bit"),
        group_size=settings.whole("group_size", "q_group_size"),
        version=next((VERSIONS[word] for word in versions.values()), None),
        ordered=settings.switch("desc_act"),
        overrides=overrides,
    )


def _is_overrides(value: Any) -> bool:
    if not isinstance(value, dict) or not all(
        isinstance(override, dict) for override in value.values()
    ):
        return False
    try:
        for pattern in value:
            re.compile(pattern.removeprefix("+:").removeprefix("-:"))
    except re.error:
        return False
    known = {"bits", "group_size", "desc_act", "sym"}
    return all(override.keys() <= known for override in value.values())


def _awq_settings(settings: Settings) -> GptqSettings:
    for name in ("version", "format", "checkpoint_format"):
        if settings.word(name) not in ("", "gemm"):
            raise settings.error(
                f"{name} = {shown(settings.values[name])} is an order of AWQ's codes that is not "
                "read; expected gemm"
            )
    return GptqSettings(
        bits=settings.whole("bits", "w_bit"),
        group_size=settings.whole("group_size", "q_group_size"),
    )


def _open_gptq(module: Module, settings: GptqSettings) -> QuantizedMatrix:
    settings = settings.of(module.stem)
    height, outputs = module.shape(".qweight", "I32")
    scales = module.shape(".scales", FLOATS)
    if scales[1] == 8 * outputs:
        raise CheckpointError(
            f"{module.name('.qweight')} of shape {(height, outputs)} is packed as AWQ packs it, "
            "and the configuration names GPTQ"
        )
    if scales[1] != outputs:
        raise CheckpointError(
            f"{module.name('.scales')} of shape {scales} fit neither GPTQ's nor AWQ's qweight of "
            f"shape {(height, outputs)}"
        )
    groups = scales[0]
    zeros = module.shape(".qzeros", "I32")
    bits, remainder = divmod(32 * zeros[1], outputs)
    if bits not in GPTQ_BITS or remainder or zeros[0] != groups or 32 * height % bits:
        raise CheckpointError(
            f"{module.stem}: qzeros of shape {zeros} and qweight of shape {(height, outputs)} are "
            f"not 2, 3, 4 or 8 bits of {outputs} outputs in {groups} groups"
        )
    inputs = 32 * height // bits
    if settings.ordered:
        module.require_promised(".g_idx", "desc_act, the order of columns")
    has_order = module.has(".g_idx")
    if has_order and module.shape(".g_idx", "I32 I64", axes=1) != (inputs,):
        raise CheckpointError(
            f"{module.name('.g_idx')} must have one entry for each of {inputs} inputs"
        )
    components = {role: module.component(f".{role}") for role in ("qweight", "qzeros", "scales")}
    if has_order:
        components["group_of"] = module.component(".g_idx")
    shared = _shared(module, settings, inputs, groups, has_order)
    is_first = settings.version != 2

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        codes = unpacked(stored["qweight"].T[rows], bits, inputs)
        packed = stored["qzeros"]
        if is_first:
            packed = _one_more(packed, bits, outputs)
        zero = unpacked(packed, bits, outputs)
        group_of = stored.get("group_of")
        if group_of is None:
            group_of = np.arange(inputs) // shared
        return scaled(codes, stored["scales"].T[rows], zero.T[rows], group_of)

    kind = f"GPTQ {bits}-bit"
    if settings.version is None:
        kind += " (version not said: taken for the first)"
    return module.matrix(
        kind,
        (outputs, inputs),
        grid=uniform_grid(bits, shared),
        components=components,
        values=values,
        groups=groups,
        note=_bits_note(settings.bits, bits),
    )


def _shared(
    module: Module, settings: GptqSettings, inputs: int, groups: int, has_order: bool
) -> int:
    """Return the columns of a group, of which the last may have fewer.

    Raises `CheckpointError` if the configured size does not give the stored number of groups.
    """
    size = settings.group_size
    if size is None:
        if has_order:
            return -(-inputs // groups)
        return group_size(inputs, groups, module.name(".scales"))
    size = inputs if size == -1 else size
    if size < 1 or -(-inputs // size) != groups:
        raise CheckpointError(
            f"{module.name('.scales')}: {inputs} inputs in groups of {size} (group_size of the "
            f"configuration) are not the {groups} groups that are stored"
        )
    return size


def _bits_note(configured: int | None, stored: int) -> str:
    """Return a sentence if the configuration contradicts the bits that the tensors prove."""
    if configured in (None, stored):
        return ""
    return (
        f"the configuration sets {configured} bits, and the shapes of the tensors prove {stored}; "
        f"{stored} bits are read"
    )


def _one_more(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Add one to each packed code, with its carry into the next one, as the library does."""
    unsigned = np.ascontiguousarray(packed).view(np.uint32)
    if bits == 3:  # codes lie across words, and the library adds code by code
        codes = (unpacked(unsigned, 3, count) + 1) & 7
        bits_of_codes = (codes[..., None] >> np.arange(3)) & 1
        row_bits = bits_of_codes.reshape(len(unsigned), -1).astype(np.uint8)
        return np.packbits(row_bits, axis=1, bitorder="little").view(np.uint32)
    one_in_each = sum(1 << position for position in range(0, 32, bits))
    return unsigned + np.uint32(one_in_each)


def _open_awq(module: Module, settings: GptqSettings) -> QuantizedMatrix:
    inputs, row_words = module.shape(".qweight", "I32")
    outputs = 8 * row_words
    scales = module.shape(".scales", FLOATS)
    if scales[1] != outputs:
        raise CheckpointError(
            f"{module.name('.scales')} of shape {scales} fit neither GPTQ's nor AWQ's qweight of "
            f"shape {(inputs, row_words)}"
        )
    module.require(".qzeros", (scales[0], row_words), "I32")
    if settings.bits not in (None, 4):
        raise CheckpointError(
            f"{module.stem}: AWQ codes have 4 bits, and the configuration sets {settings.bits}"
        )
    shared = _shared(module, settings, inputs, scales[0], has_order=False)
    if inputs % shared:
        raise CheckpointError(f"{module.stem}: groups of {shared} do not divide {inputs} columns")
    places = np.argsort(AWQ_ORDER)  # of each output in its word

    def codes(packed: np.ndarray, rows: np.ndarray) -> np.ndarray:
        shifts = (4 * places[rows % 8]).astype(np.uint32)
        held = packed.view(np.uint32)[:, rows // 8] >> shifts & np.uint32(15)
        return np.asarray(held.T, np.int32)

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        zeros = codes(stored["qzeros"], rows)
        return scaled(codes(stored["qweight"], rows), stored["scales"].T[rows], zeros)

    roles = ("qweight", "qzeros", "scales")
    return module.matrix(
        "AWQ 4-bit",
        (outputs, inputs),
        grid=uniform_grid(4, shared),
        components={role: module.component(f".{role}") for role in roles},
        values=values,
    )


def _is_awq(module: Module) -> bool:
    """Return whether codes are packed as AWQ packs them, where no configuration names a method."""
    _, row_words = module.shape(".qweight", "I32")
    return module.shape(".scales", FLOATS)[1] == 8 * row_words


def _open_either(module: Module, settings: GptqSettings) -> QuantizedMatrix:
    return (_open_awq if _is_awq(module) else _open_gptq)(module, settings)


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
