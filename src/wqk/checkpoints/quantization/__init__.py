"""Quantized matrices, read as dequantized values.

A library stores a matrix (O, I) as codes of a few bits, with a scale, and often a zero, for each
group of columns, in several tensors of the module. Here these tensors become one tensor, called
``weight`` as before quantization; its rows are unpacked on reading. Nothing is executed, and only
the requested rows are read. Values are exact products in float32; the libraries round to the type
that a model runs in.

One table (`FORMATS`) has a record for each format: keys, companions, and a reader. **Every tensor
that shares a prefix with a quantized weight, and every key of its quantization configuration, is
supported by this reader, or named in an error.** These rules hold for all formats, and
`find_quantized` enforces them:

1. A key or a tensor that is not in the table raises an error that contains its name.
2. A tensor that affects the values of a format, and that the reader of the matrix does not use,
   raises an error that contains its name.
3. A tensor that the configuration promises must exist; the reader of the format checks this.
4. Two formats of one matrix, or a plain weight next to a quantized weight, raise an error.
5. If a configuration contradicts the tensors, and the tensors alone determine the values, the
   tensors are read, and a note reports the contradiction; otherwise an error is raised.

To read: `table` (the records), `configuration` (its keys and values), `module` and `matrix` (the
argument and the result of a reader), then one format, such as `gptq`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.quantization.bitsandbytes import BITSANDBYTES
from wqk.checkpoints.quantization.comfy import COMFY, require_described
from wqk.checkpoints.quantization.compressed import COMPRESSED
from wqk.checkpoints.quantization.configuration import (
    read_settings,
    refuse_unread,
    require_known,
)
from wqk.checkpoints.quantization.float8 import FLOAT8_FORMAT
from wqk.checkpoints.quantization.gguf_factors import with_factor
from wqk.checkpoints.quantization.gptq import AWQ, GPTQ, GPTQ_OR_AWQ
from wqk.checkpoints.quantization.hqq import HQQ
from wqk.checkpoints.quantization.matrix import Component, QuantizedMatrix
from wqk.checkpoints.quantization.mlx import MLX
from wqk.checkpoints.quantization.modelopt import MODELOPT
from wqk.checkpoints.quantization.module import (
    CORRECT,
    DEQUANTIZE,
    REQUANTIZE,
    Module,
    Source,
)
from wqk.checkpoints.quantization.mxfp4 import MXFP4
from wqk.checkpoints.quantization.sidecars import with_sidecars
from wqk.checkpoints.quantization.table import Effect, QuantizedFormat, Signature
from wqk.checkpoints.quantization.torchao import TORCHAO
from wqk.checkpoints.quantization.transforms import Transform, Transforms, read_transforms
from wqk.errors import CheckpointError

__all__ = [
    "FORMATS",
    "Component",
    "QuantizedMatrix",
    "Source",
    "find_quantized",
    "quantized_config",
    "refuse_unread",
]

# All formats; the first format that fits a tensor and the configuration is used.
FORMATS = (
    COMFY,
    GPTQ,
    AWQ,
    GPTQ_OR_AWQ,
    BITSANDBYTES,
    TORCHAO,
    HQQ,
    MLX,
    MXFP4,
    FLOAT8_FORMAT,
    COMPRESSED,
    MODELOPT,
)

# Endings of names of tensors, and the part that must be next to each of these tensors.
ORPHANS = {
    ".qweight": "scales",
    ".weight_packed": "weight_scale",
    ".W_q": "scale and nbits",
    "._weight_qdata": "_weight_scale",
    ".weight_scale_2": "a weight of type U8",
    ".pre_quant_scale": "a quantized weight",
    ".comfy_quant": "a quantized weight",
    ".svdquant_lora_a": "a quantized weight",
}

# Ends of names of tensors that would scale or reorder the values of a plain weight next to them.
SCALES_OF_PLAIN = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_zero_point",
    ".weight_global_scale",
    ".weight_g_idx",
    ".SCB",
)

# Stages of compressed-tensors before compression, in which weights are plain and scales unused.
UNCOMPRESSED = ("initialized", "calibration", "frozen")


def quantized_config(
    config: Mapping[str, Any],
    tensors: Iterable[TensorInfo],
    read: Callable[[str], Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Return a configuration with the quantization settings in files next to it.

    Raises
    ------
    CheckpointError
        Two files contradict each other, or name an unsupported format.
    """
    complete = with_sidecars(config, tensors, read, FORMATS)
    if complete is not config:
        refuse_unread(complete)
    return complete


@dataclass(frozen=True)
class QuantizedWeights:
    """Quantized matrices of a file, by the names of their unquantized weights, and notes."""

    matrices: Mapping[str, QuantizedMatrix]
    notes: Sequence[str]


def find_quantized(source: Source) -> QuantizedWeights:
    """Return the quantized matrices of a file, and notes for users of their scores.

    Raises
    ------
    CheckpointError
        Tensors of a known format do not fit each other, a tensor or a key of the configuration is
        unknown, or the configuration contradicts the tensors.
    """
    finder = _Finder(source)
    matrices = finder.matrices()
    notes = [finder.transforms.note, *(matrix.note for matrix in matrices.values())]
    return QuantizedWeights(matrices, [*dict.fromkeys(note for note in notes if note)])


class _Finder:
    """Finds the quantized matrices of one file.

    Attributes
    ----------
    source
        The file.
    settings
        Quantization configuration of the file.
    transforms
        Rotations of compressed-tensors that the configuration sets.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.settings = read_settings(source.config)
        transforms: tuple[Transform, ...] = ()
        if self.settings.method in COMPRESSED.methods:
            transforms = read_transforms(self.settings)
        self.transforms = Transforms(transforms, source.tensors)
        self._settings_by_format: dict[str, Any] = {}
        self._sorted_names = sorted(source.tensors)

    def matrices(self) -> dict[str, QuantizedMatrix]:
        """Return all matrices by name."""
        require_described(self.source)
        matrices: dict[str, QuantizedMatrix] = {}
        owners: dict[str, str] = {}
        for name, info in self.source.tensors.items():
            fitting = self._fitting(name, info)
            if not fitting:
                continue
            layout, signature = self._chosen(name, fitting)
            stem = name.removesuffix(signature.ending)
            weight = stem + signature.weight
            if weight in matrices:
                raise CheckpointError(
                    f"{weight}: is stored in two formats, as {owners[weight]} and as {name}; "
                    f"expected one of the two; {REQUANTIZE}"
                )
            module = Module(stem, signature.ending, self.source)
            matrix = layout.open(module, self._settings_of(layout))
            if layout is COMPRESSED:
                matrix = self.transforms.applied(stem, matrix)
            self._require_companions(module, layout, matrix)
            if weight != name and weight in self.source.tensors and not _uses(matrix, weight):
                raise CheckpointError(
                    f"{weight}: is stored plain, and also quantized, as {name}; expected one of "
                    f"the two; {REQUANTIZE}"
                )
            matrices[weight], owners[weight] = matrix, name
        if self.source.has_factors:
            matrices |= self._with_factors()
        self._refuse_orphans(matrices)
        if not matrices:
            self._refuse_settings_of_plain_weights()
        if self.transforms.transforms:
            rotated = {
                name: matrix
                for name, matrix in self.transforms.plain().items()
                if name not in matrices
            }
            matrices |= rotated
            self.transforms.refuse_unused()
        return matrices

    def _with_factors(self) -> dict[str, QuantizedMatrix]:
        """Return the weights of a GGUF file that have a factor."""
        matrices = {}
        for name in self._sorted_names:
            stem = name.removesuffix(".scale")
            if stem != name and f"{stem}.weight" in self.source.tensors:
                matrices[f"{stem}.weight"] = with_factor(Module(stem, ".weight", self.source))
        return matrices

    def _refuse_settings_of_plain_weights(self) -> None:
        """Raise `CheckpointError` for keys that change even plain weights."""
        for layout in FORMATS:
            if self.settings.method and self.settings.method in layout.methods:
                require_known(self.settings, layout, names_unknown=False)

    def _fitting(self, name: str, info: TensorInfo) -> list[tuple[QuantizedFormat, Signature]]:
        """Return the formats with signatures that fit a tensor of codes."""
        tensors = self.source.tensors
        fitting = []
        for layout in FORMATS:
            for signature in layout.signatures:
                if info.dtype not in signature.types or not name.endswith(signature.ending):
                    continue
                stem = name.removesuffix(signature.ending)
                if any(stem + ending in tensors for ending in signature.next_to):
                    fitting.append((layout, signature))
                    break
        return fitting

    def _chosen(
        self, name: str, fitting: list[tuple[QuantizedFormat, Signature]]
    ) -> tuple[QuantizedFormat, Signature]:
        """Return the first format that the configuration allows.

        A configuration without a method belongs to the format of the tensors.
        """
        is_unnamed = self.settings.values and not self.settings.method
        for layout, signature in fitting:
            if is_unnamed or self.settings.method in layout.methods:
                return layout, signature
        layout, signature = fitting[0]
        stem = name.removesuffix(signature.ending)
        neighbor = next(e for e in signature.next_to if stem + e in self.source.tensors)
        names = " or ".join(dict.fromkeys(layout.name for layout, _ in fitting))
        raise CheckpointError(
            f"{name}: next to {stem}{neighbor}, it is stored as {names} stores it, and the "
            f"configuration names the method {self.settings.method or 'none'} "
            f"({self.settings.path}); {CORRECT}"
        )

    def _settings_of(self, layout: QuantizedFormat) -> Any:
        """Return the typed settings of a format, read once."""
        if layout.name not in self._settings_by_format:
            if self.settings.values:
                require_known(self.settings, layout)
            self._settings_by_format[layout.name] = layout.settings(self.settings)
        return self._settings_by_format[layout.name]

    def _neighbors(self, module: Module) -> Iterator[str]:
        """Return the names of all tensors with the module's prefix.

        Tensors of a module follow a dot. Companions of parameters without a module, such as
        parameters of experts, follow an underscore.
        """
        is_module = module.codes.startswith(".")
        prefix = module.stem + ("." if is_module else "_")
        first = bisect_left(self._sorted_names, prefix)
        for index in range(first, len(self._sorted_names)):
            name = self._sorted_names[index]
            if not name.startswith(prefix):
                return
            if is_module or "." not in name[len(prefix) :]:
                yield name

    def _require_companions(
        self, module: Module, layout: QuantizedFormat, matrix: QuantizedMatrix
    ) -> None:
        """Raise `CheckpointError` for a tensor that the format does not have or use here."""
        for name in self._neighbors(module):
            record = layout.companion(name.removeprefix(module.stem))
            if record is None:
                raise CheckpointError(
                    f"{name}: lies next to a weight of {layout.name}, and is not a tensor that is "
                    f"known there, so it could change the weight; {DEQUANTIZE}"
                )
            enters = record.effect in (Effect.VALUES, Effect.CHECKED)
            if enters and not _uses(matrix, name):
                raise CheckpointError(
                    f"{name} ({record.meaning}): lies next to {module.name(module.codes)}, which "
                    f"as {matrix.info.dtype} has no such tensor; {REQUANTIZE}"
                )

    def _refuse_orphans(self, matrices: Mapping[str, QuantizedMatrix]) -> None:
        """Raise `CheckpointError` for tensors of quantized formats that no matrix uses."""
        unused_names = self._unused_names(matrices)
        for name in unused_names:
            for ending, needed in ORPHANS.items():
                if name.endswith(ending):
                    raise CheckpointError(
                        f"{name}: belongs to a quantized weight, and {needed} is missing next to "
                        f"it; download the checkpoint again, or {REQUANTIZE}"
                    )
        if self.settings.values.get("quantization_status") in UNCOMPRESSED:
            return
        endings: tuple[str, ...] = SCALES_OF_PLAIN
        if self.settings.method == "mlx":
            endings = (*SCALES_OF_PLAIN, ".scales")
        for name in unused_names:
            scale_ending = next(filter(name.endswith, endings), None)
            if scale_ending is None:
                continue
            weight = f"{name.removesuffix(scale_ending)}.weight"
            if weight in self.source.tensors:
                raise CheckpointError(
                    f"{name}: lies next to {weight}, which is stored plain, as "
                    f"{self.source.tensors[weight].dtype}: whether the values are scaled already, "
                    f"the file leaves open; {REQUANTIZE}"
                )

    def _unused_names(self, matrices: Mapping[str, QuantizedMatrix]) -> list[str]:
        """Return the sorted names of tensors that are not a component of a matrix."""
        used: set[str] = set()
        for matrix in matrices.values():
            used.update(component.name for component in matrix.components.values())
        return [name for name in self._sorted_names if name not in used]


def _uses(matrix: QuantizedMatrix, name: str) -> bool:
    """Return whether a tensor is a component of a matrix."""
    return any(component.name == name for component in matrix.components.values())
