"""Scalings of rotary frequencies, which extend a model to longer texts than in training.

Each scaling takes the plain frequencies, and returns the scaled frequencies and the attention
factor, which multiplies the rotated dimensions of queries and keys.

Axes: P rotated pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._typing import Float
from wqk.checkpoints.checkpoint import as_number
from wqk.errors import CheckpointError, shown

if TYPE_CHECKING:
    from wqk.families.config import Config

# Names of a rotation without scaling.
PLAIN = ("default", "mrope", "axial")
# Scalings with different frequencies for texts above some length.
BY_LENGTH = ("longrope", "su", "dynamic")

Frequencies = Float[np.ndarray, " pairs"]


@dataclass(frozen=True)
class Unscaled:
    """A rotation before its scaling, and the configuration of the scaling.

    Attributes
    ----------
    frequencies
        Radians per position, (P,).
    base
        The base of the frequencies.
    width
        Rotated dimensions, 2P.
    parameters
        The rotary parameters of the layer in the configuration.
    config
        The whole configuration, with the lengths of texts.
    """

    frequencies: Frequencies
    base: float
    width: int
    parameters: Mapping[str, Any]
    config: Config

    @property
    def trained_length(self) -> int:
        """The length of texts in training: set explicitly, or else the longest text.

        Raises
        ------
        CheckpointError
            The configuration has neither length.
        """
        key = "original_max_position_embeddings"
        original = as_number(self.config.get(key) or self.parameters.get(key))
        return int(original) if original else self.longest

    @property
    def longest(self) -> int:
        """The longest text of the scaled model."""
        return self.config.length(("max_position_embeddings",))

    @property
    def factor(self) -> float:
        """The factor of the length; `KeyError` if absent."""
        if self.parameters.get("factor") is None:
            raise KeyError("factor")
        return float(self.parameters["factor"])


def scaled(kind: str, rotation: Unscaled) -> tuple[Frequencies, float]:
    """Return the frequencies (P,) and the attention factor of a scaling.

    Parameters
    ----------
    kind
        The name of the scaling in configurations (``rope_type``).
    rotation
        The rotation without the scaling.

    Raises
    ------
    CheckpointError
        The scaling is unknown, or its parameters are missing or wrong.
    """
    if kind not in SCALINGS:
        raise CheckpointError(
            f"config.json: unknown rotary scaling {shown(kind)}; expected one of "
            f"{', '.join(SCALINGS)}; correct rope_type"
        )
    parameters = dict(rotation.parameters)
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            frequencies, amplitude = SCALINGS[kind](rotation)
        if not np.isfinite([amplitude, *frequencies]).all():
            raise ValueError("a finite number")
    except ArithmeticError:
        raise CheckpointError(
            f"config.json: rotary scaling {kind!r} has a number that is zero or too large: "
            f"{shown(parameters)}; correct it"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json: rotary scaling {kind!r} lacks or misstates {error!s:.60}; "
            f"got {shown(parameters)}; correct them"
        ) from None
    return frequencies, amplitude


def length_of_change(kind: str, rotation: Unscaled) -> int | None:
    """Return the length of texts beyond which frequencies or queries change; None if never."""
    depends_on_length = kind in BY_LENGTH and "alpha" not in rotation.parameters
    queries_grow = bool(rotation.parameters.get("llama_4_scaling_beta"))
    is_limited = bool(rotation.config.get("max_position_embeddings"))
    changes = (depends_on_length or queries_grow) and is_limited
    return rotation.trained_length if changes else None


def _linear(rotation: Unscaled) -> tuple[Frequencies, float]:
    """Divide all frequencies by the factor."""
    return rotation.frequencies / rotation.factor, 1.0


def _dynamic(rotation: Unscaled) -> tuple[Frequencies, float]:
    """Keep all frequencies: the base grows only for texts longer than in training."""
    return rotation.frequencies, 1.0


def _llama3(rotation: Unscaled) -> tuple[Frequencies, float]:
    """Stretch long wavelengths, keep short wavelengths, and blend between (Llama 3.1)."""
    fewest_turns = float(rotation.parameters["low_freq_factor"])
    most_turns = float(rotation.parameters["high_freq_factor"])
    # Turns of each pair within the trained length.
    turns = float(rotation.trained_length) * rotation.frequencies / (2 * math.pi)
    if most_turns == fewest_turns:  # Llama 4 Scout: nothing lies in between
        kept_share = (turns >= fewest_turns).astype(np.float64)
    else:
        kept_share = np.clip((turns - fewest_turns) / (most_turns - fewest_turns), 0.0, 1.0)
    return rotation.frequencies * (kept_share + (1 - kept_share) / rotation.factor), 1.0


def _yarn(rotation: Unscaled) -> tuple[Frequencies, float]:
    """Divide slow pairs by the factor, keep fast pairs, and blend between (YaRN).

    A pair is fast if it turns ``beta_fast`` times within the trained length, and slow if it turns
    less than ``beta_slow`` times: Peng et al., "YaRN: Efficient Context Window Extension of Large
    Language Models" (2023).
    """
    frequencies, parameters = rotation.frequencies, rotation.parameters
    trained = float(rotation.trained_length)
    # A null stands for the ratio of both lengths; a file without the key is refused everywhere.
    factor = parameters["factor"]
    factor = rotation.longest / trained if factor is None else float(factor)
    fast_pair = _pair_that_turns(rotation, float(parameters.get("beta_fast") or 32))
    slow_pair = _pair_that_turns(rotation, float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        fast_pair, slow_pair = math.floor(fast_pair), math.ceil(slow_pair)
    fast_pair, slow_pair = max(fast_pair, 0), min(slow_pair, rotation.width - 1)
    pairs = np.arange(len(frequencies))
    divided_share = np.clip((pairs - fast_pair) / max(slow_pair - fast_pair, 1e-3), 0.0, 1.0)
    scaled_frequencies = frequencies * (divided_share / factor + 1 - divided_share)
    return scaled_frequencies, _yarn_attention_factor(parameters, factor)


def _pair_that_turns(rotation: Unscaled, times: float) -> float:
    """Return the number of the pair that turns this many ``times`` within the trained length.

    Pair k turns trained · base^(−2k/R) / 2π times; this equation is solved for k.
    """
    trained = float(rotation.trained_length)
    power_of_base = trained / (times * 2 * math.pi)
    return rotation.width * math.log(power_of_base) / (2 * math.log(rotation.base))


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's attention factor: configured, or computed from weights."""
    configured_factor = parameters.get("attention_factor")
    if configured_factor is not None:
        return float(configured_factor)
    weight, weight_in_scale = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if weight and weight_in_scale:  # DeepSeek: a part of the amplitude is in the scale
        return yarn_amplitude(factor, weight) / yarn_amplitude(factor, weight_in_scale)
    return yarn_amplitude(factor, 1.0)


def yarn_amplitude(factor: float, weight: float) -> float:
    """Return the amplitude of YaRN, 0.1 · weight · ln(factor) + 1, for a factor of the length.

    Examples
    --------
    >>> yarn_amplitude(1.0, 1.0), round(yarn_amplitude(16.0, 1.0), 4)
    (1.0, 1.2773)
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rotation: Unscaled) -> tuple[Frequencies, float]:
    """Divide each frequency by its factor for texts within the trained length."""
    parameters = rotation.parameters
    trained = rotation.trained_length
    factor = float(parameters.get("factor") or rotation.longest / trained)
    amplitude = parameters.get("short_mscale", parameters.get("attention_factor"))
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    divisors = np.asarray(parameters["short_factor"], np.float64)
    return rotation.frequencies / divisors, float(amplitude)


def _proportional(rotation: Unscaled) -> tuple[Frequencies, float]:
    """Rotate a share of all pairs, with the frequencies of all pairs (Gemma 4)."""
    share = float(rotation.parameters.get("partial_rotary_factor") or 1.0)
    turns = np.arange(len(rotation.frequencies)) < int(share * rotation.width // 2)
    factor = float(rotation.parameters.get("factor") or 1.0)
    return rotation.frequencies * turns / factor, 1.0


def _factors(rotation: Unscaled) -> tuple[Frequencies, float]:
    """Divide each frequency by its factor, as stored in GGUF files."""
    divisors = np.asarray(rotation.parameters["factors"], np.float64)
    if divisors.shape != rotation.frequencies.shape:
        raise ValueError(f"{len(rotation.frequencies)} factors")
    amplitude = float(rotation.parameters.get("attention_factor") or 1.0)
    return rotation.frequencies / divisors, amplitude


SCALINGS: dict[str, Callable[[Unscaled], tuple[Frequencies, float]]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "xdrope": _dynamic,  # HunYuan's name for "dynamic"
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "su": _longrope,
    "factors": _factors,
}
