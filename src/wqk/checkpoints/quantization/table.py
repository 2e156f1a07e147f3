"""Records of the table of quantized formats: keys, companions, and signatures.

Every tensor next to a quantized weight is a `Companion` of its format, and every key of a
quantization configuration is a `Key` of the library that wrote it. A tensor or a key without a
record raises an error, so that no tensor or key is ignored by mistake. The table in the
documentation is written from these records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wqk.checkpoints.quantization.matrix import QuantizedMatrix
    from wqk.checkpoints.quantization.module import Module
    from wqk.checkpoints.quantization.quantization_settings import Settings


class Effect(StrEnum):
    """Effect of a key or a companion on the values."""

    VALUES = "enters the values"
    CHECKED = "is compared with the tensors"
    NONE = "has no effect on the weights"
    REFUSED = "is refused by name"


@dataclass(frozen=True)
class Companion:
    """A tensor next to a quantized weight.

    Attributes
    ----------
    ending
        End of the tensor's name, after the name of the module. ``*`` matches any letters.
    effect
        Effect on the values.
    meaning
        Contents of the tensor, as a noun phrase.
    required
        Setting that requires the tensor; empty if the tensor is optional.
    """

    ending: str
    effect: Effect
    meaning: str
    required: str = ""


@dataclass(frozen=True)
class Key:
    """A key of a quantization configuration.

    Attributes
    ----------
    name
        Path of the key, with dots between the keys of nested objects. ``*`` matches any key.
    effect
        Effect on the values.
    meaning
        Meaning of the key, as a noun phrase.
    neutral
        Allowed values of an excluded key, besides null, false and empty values, because they change
        nothing.
    """

    name: str
    effect: Effect
    meaning: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Signature:
    """Names and types of tensors that identify a format.

    Attributes
    ----------
    ending
        End of the name of the tensor of codes.
    types
        Stored types that this tensor may have.
    next_to
        Ends of other tensors' names; at least one of these tensors must exist.
    weight
        End of the name of the resulting matrix.
    """

    ending: str
    types: frozenset[str]
    next_to: tuple[str, ...]
    weight: str = ".weight"


@dataclass(frozen=True)
class QuantizedFormat:
    """A format of quantized weights, as written by one library.

    Attributes
    ----------
    name
        Name of the format.
    methods
        Spellings of ``quant_method`` for the format; the empty spelling if the format is also read
        without a configuration.
    signatures
        Tensors that identify the format.
    companions, keys
        All tensors and all keys that the format may have.
    settings
        Function that converts the configuration to typed values, once for a file.
    open
        Function of a module and the typed settings that returns the matrix, without reading
        weights.
    proof
        Independent source that the values were compared with.
    """

    name: str
    methods: frozenset[str]
    signatures: tuple[Signature, ...]
    companions: tuple[Companion, ...]
    keys: tuple[Key, ...]
    settings: Callable[[Settings], Any]
    open: Callable[[Module, Any], QuantizedMatrix]
    proof: str

    def companion(self, ending: str) -> Companion | None:
        """Return the record of a companion, by the end of its name."""
        for companion in self.companions:
            start, star, stop = companion.ending.partition("*")
            if ending == companion.ending:
                return companion
            if star and ending.startswith(start) and ending.endswith(stop):
                return companion
        return None


def companions(effect: Effect, **meanings: str) -> tuple[Companion, ...]:
    """Return companions with one effect, from the ends of their names without the leading dot."""
    return tuple(Companion(f".{name}", effect, meaning) for name, meaning in meanings.items())


def keys(effect: Effect, meaning: str, names: str) -> tuple[Key, ...]:
    """Return keys with one effect and meaning, from names with spaces between them."""
    return tuple(Key(name, effect, meaning) for name in names.split())


BIAS = Companion(".bias", Effect.NONE, "bias of the module, a tensor of its own")

# Scales of inputs, outputs and caches: kernels quantize activations with them while a model runs.
ACTIVATIONS = companions(
    Effect.NONE,
    input_scale="scale of quantized inputs",
    input_zero_point="zero point of quantized inputs",
    input_global_scale="scale of the scales of quantized inputs",
    output_scale="scale of quantized outputs",
    output_zero_point="zero point of quantized outputs",
    q_scale="scale of quantized queries",
    k_scale="scale of cached keys",
    v_scale="scale of cached values",
    prob_scale="scale of quantized attention probabilities",
)
