"""Rotary positions: which dimensions of a head turn together, and how fast.

With rotary positions the score at relative distance N = i − j is x_i A R(−N) Bᵀ x_jᵀ; the plain
form is the one at N = 0.

Axes: P rotated pairs, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._typing import Array, Float
from wqk.checkpoints.checkpoint import as_number
from wqk.errors import CheckpointError, shown
from wqk.families.config import as_text

if TYPE_CHECKING:
    from wqk.families.config import Config
    from wqk.families.family import RotaryRule

# The share of a head's dimensions that turns; many classes pass it over, unless frequencies are
# scaled, by functions that all of them have in common.
SHARE = "partial_rotary_factor"
PLAIN = ("default", "mrope", "axial")


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation of 2P dimensions of a head, its first ones.

    Attributes
    ----------
    frequencies
        Radians per position of each plane, (P,).
    order
        ``half``: dimension k turns with k + P; ``interleaved``: dimension 2k with 2k + 1.
    amplitude
        The attention factor of YaRN and LongRoPE. It multiplies the rotated dimensions of queries
        and of keys at every distance, including 0.
    axes
        2 for the patches of an image: planes turn with the row or with the column. 3 for those of
        a video: with the time, the row or the column.
    longest
        Tokens of a text beyond which frequencies or queries are others; None where there is no
        such length.
    mixed
        With two axes: planes of columns and of rows take turns. Otherwise the planes of an axis
        follow each other.
    columns_first
        With two axes: the first half of the planes turns with the column, the second half with the
        row.
    apart
        Each axis turns a part of the head of its own, within which the order holds.
    before_norm
        Whether the norm of queries and keys follows the rotation. If the norm has gains, the score
        then depends on both positions and not on their distance alone.
    """

    frequencies: Float[Array, " pairs"]
    order: str
    amplitude: float = 1.0
    axes: int = 1
    longest: int | None = None
    mixed: bool = False
    columns_first: bool = False
    apart: bool = False
    before_norm: bool = False

    @property
    def arrangement(self) -> tuple[object, ...]:
        """Which dimensions turn together, and with which axis, as a value that can be compared."""
        return (self.order, self.axes, self.mixed, self.columns_first, self.apart)

    @property
    def plane_axes(self) -> np.ndarray:
        """The axis of each plane, (P,): 0 for rows or for texts, 1 for columns; 0 for the time.

        Examples
        --------
        >>> Rotary(np.ones(4), "half", axes=2).plane_axes
        array([0, 0, 1, 1])
        >>> Rotary(np.ones(4), "half", axes=2, mixed=True).plane_axes
        array([1, 0, 1, 0])
        """
        count = len(self.frequencies)
        if self.mixed:
            return (1 + np.arange(count)) % self.axes
        axes = np.arange(count) * self.axes // max(count, 1)
        return self.axes - 1 - axes if self.columns_first else axes

    def rotate(self, vectors: Array, positions: np.ndarray) -> Array:
        """Rotate queries or keys (..., N, R) by their positions.

        Parameters
        ----------
        vectors
            NumPy arrays are rotated in float64, PyTorch tensors in their own type.
        positions
            One number for each token, (N,), which counts for every axis; or one for each axis,
            (N, axes).
        """
        positions = np.asarray(positions, np.float64)
        by_plane = positions[:, None] if positions.ndim == 1 else positions[:, self.plane_axes]
        angles = by_plane * self.frequencies
        cosine: Array = self.amplitude * np.cos(angles)
        sine: Array = self.amplitude * np.sin(angles)
        first, second = self.planes
        if isinstance(vectors, np.ndarray):
            turned = np.array(vectors, np.float64)
        else:
            cosine, sine = vectors.new_tensor(cosine), vectors.new_tensor(sine)
            turned = vectors.clone()
        a, b = vectors[..., first], vectors[..., second]
        turned[..., first] = a * cosine - b * sine
        turned[..., second] = a * sine + b * cosine
        return turned

    def stretch(self, vectors: np.ndarray) -> np.ndarray:
        """Queries or keys (..., R) with the attention factors of both sides."""
        stretched = np.array(vectors)
        for dimensions in self.planes:
            stretched[..., dimensions] *= self.amplitude**2
        return stretched

    @property
    def turning(self) -> Rotary:
        """The rotation alone, without the attention factor."""
        return replace(self, amplitude=1.0)

    @property
    def planes(self) -> tuple[Any, Any]:
        """Indices of the two dimensions of each rotated pair: all first ones, all second ones.

        Examples
        --------
        >>> Rotary(np.ones(4), "half").planes
        (slice(0, 4, None), slice(4, 8, None))
        >>> first, second = Rotary(np.ones(4), "half", axes=2, apart=True).planes
        >>> first.tolist(), second.tolist()
        ([0, 1, 4, 5], [2, 3, 6, 7])
        """
        pairs = len(self.frequencies)
        if self.apart:
            own = pairs // self.axes
            parts = np.arange(2 * pairs).reshape(self.axes, 2, own)
            if self.order == "interleaved":
                parts = np.arange(2 * pairs).reshape(self.axes, own, 2).swapaxes(1, 2)
            return parts[:, 0].reshape(-1), parts[:, 1].reshape(-1)
        if self.order == "half":
            return slice(0, pairs), slice(pairs, 2 * pairs)
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)


def rotary_of(
    rule: RotaryRule, config: Config, head_width: int, layer: int, windowed: bool
) -> Rotary | None:
    """The rotation of one layer, from the configuration; None if the layer has none.

    Raises `CheckpointError` if the configuration is wrong or scales frequencies in an unknown way.
    """
    kinds = next(filter(None, map(config.get, rule.layers)), None)
    period = None if isinstance(kinds, list) else config.optional_whole(rule.every)
    if isinstance(kinds, list) and layer < len(kinds) and not kinds[layer]:
        return None
    if period and _is_skipped(config, layer, period, rule.backward):
        return None
    by_window = rule.windowed_only and not isinstance(kinds, list)
    unseen = by_window and not windowed and config.get("sliding_window") is not None
    if unseen or not config.holds(rule.only_if):
        return None
    scaling = _parameters(config, layer, windowed)
    given = next((scaling[key] for key in rule.width if key in scaling), None)
    width = given if type(given) is int else config.optional_whole(rule.width)
    order = rule.order
    if rule.other_order_if and config.holds(rule.other_order_if):
        order = "half" if order == "interleaved" else "interleaved"
    kind = as_text(scaling.get("rope_type", scaling.get("type", "default")))
    whole = kind in PLAIN and SHARE in config.passed_over
    fraction = 1.0 if whole else _number(config, scaling, rule.fraction, 1.0, SHARE, layer)
    if width is None and 0 < fraction <= 1:
        width = head_width if kind == "proportional" else int(head_width * fraction)
    if width is None or not 0 < width <= head_width:
        raise CheckpointError(
            f"config.json: rotary positions rotate at most each head's "
            f"{head_width} dimensions, got {shown(fraction if width is None else width)}"
        )
    if width % 2 and width == head_width:
        raise CheckpointError(
            f"rotary positions turn pairs of dimensions, got heads of width {head_width}"
        )
    if rule.axes > 1 and width % (2 * rule.axes):
        raise CheckpointError(
            f"config.json: rotary positions on {rule.axes} axes rotate a multiple "
            f"of {2 * rule.axes} dimensions, got {width}"
        )
    bases = rule.local_base if windowed and rule.local_base else rule.base
    own = [key for key in bases if key not in rule.base]
    # What scales the others leaves these as they are, where nothing else is known of a type.
    shared = scaling is _given(config) and config.default("scaled") is None
    local = shared and config.get(*own) is not None
    base = _number(config, scaling, bases, 10_000.0, "rope_theta", layer)
    if base <= 0:
        raise CheckpointError(
            f"config.json: the base of rotary positions must be positive, got {base}"
        )
    each = width if rule.alternating else width // rule.axes
    if rule.alpha and kind in ("dynamic", "xdrope") and scaling.get("alpha"):
        base *= _alpha(scaling) ** (width / (width - 2))
    frequencies = base ** -(np.arange(0, each, 2, dtype=np.float64) / each)
    if rule.alternating:
        frequencies = np.concatenate([frequencies[k :: rule.axes] for k in range(rule.axes)])
    elif rule.mixed:
        frequencies = frequencies.repeat(rule.axes)
    else:
        frequencies = np.tile(frequencies, rule.axes)
    if rule.in_turns:
        frequencies = 2 * math.pi * frequencies
    sign = -1 if rule.reversed else 1
    plain = Rotary(
        sign * frequencies,
        order,
        axes=rule.axes,
        mixed=rule.mixed,
        columns_first=rule.columns_first,
        apart=rule.apart,
        before_norm=rule.before_norm,
    )
    if kind in PLAIN or local:
        return plain
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"unknown rotary scaling {shown(kind)}; known are {', '.join(_SCALINGS)}"
        )
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            unscaled = _Unscaled(frequencies, base, width, scaling, config)
            scaled, amplitude = _SCALINGS[kind](unscaled)
        if not np.isfinite([amplitude, *scaled]).all():
            raise ValueError("a finite number")
    except ArithmeticError:
        raise CheckpointError(
            f"config.json: rotary scaling {kind!r} has a number that is zero or too large: "
            f"{shown(scaling)}"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json: rotary scaling {kind!r} lacks or misstates {error!s:.60}; "
            f"got {shown(scaling)}"
        ) from None
    by_length = kind in ("longrope", "su", "dynamic") and "alpha" not in scaling
    by_length = by_length or bool(scaling.get("llama_4_scaling_beta"))  # grows with the position
    longest = _trained(unscaled) if by_length and config.get("max_position_embeddings") else None
    return replace(plain, frequencies=sign * scaled, amplitude=amplitude, longest=longest)


def _is_skipped(config: Config, layer: int, period: int, backward: bool) -> bool:
    """Return whether a layer is one of every ``period`` that have no rotary positions."""
    if backward:
        layers = config.whole(("num_hidden_layers",))
        return (layers - 1 - layer) % period == 0
    return (layer + 1) % period == 0


def _alpha(scaling: Mapping[str, Any]) -> float:
    """Return the factor of HunYuan's "dynamic" scaling, which does not depend on the length."""
    alpha = as_number(scaling["alpha"])
    if alpha is None or alpha <= 0:
        raise CheckpointError(
            "config.json: alpha of the rotary scaling must be a positive number, got "
            f"{shown(scaling['alpha'])}"
        )
    return alpha


def _number(
    config: Config,
    scaling: Mapping[str, Any],
    keys: tuple[str, ...],
    default: float,
    own: str,
    layer: int = 0,
) -> float:
    """A number that has keys: from the rotary parameters, where it is ``own``, or from outside."""
    by_layer = any(isinstance(config.get(key), list) for key in keys)
    every = (own, *keys) if keys and not by_layer else ()
    found = next((scaling[key] for key in every if scaling.get(key) is not None), None)
    value = config.optional_number(keys, layer) if found is None else as_number(found)
    if found is not None and value is None:
        raise config.wrong(keys, "a number", found)
    return default if value is None else value


def _given(config: Config) -> Any:
    """The older key comes first, where a file has both."""
    return config.told("rope_scaling") or config.get("rope_parameters") or {}


def _parameters(config: Config, layer: int, windowed: bool) -> dict[str, Any]:
    """The rotary parameters of a layer: the same for all, or those of its kind of layer."""
    parameters = _given(config)
    if not isinstance(parameters, dict):
        raise config.wrong(("rope_parameters", "rope_scaling"), "a table", parameters)
    kind = config.layer_type(layer) or ("sliding_attention" if windowed else "full_attention")
    scaled = config.default("scaled")  # where kinds of layers have parameters of their own
    own = config.told("rope_parameters") if isinstance(scaled, list) else parameters
    if _is_by_kind(own):
        chosen = own.get(kind)
        found = chosen if isinstance(chosen, dict) else {}
    elif isinstance(scaled, list):
        plain: dict[str, Any] = (config.default("rope_parameters") or {}).get(kind, {})
        found = {"rope_type": "default", **plain}
    else:
        return parameters
    if not isinstance(scaled, list):
        return found
    if kind in scaled and not _is_by_kind(parameters):
        found = found | (config.told("rope_scaling") or {})  # as older files have it
    # Where a class has kinds, transformers looks for `truncate` beside them, and finds none.
    return {key: value for key, value in found.items() if key != "truncate"}


def _is_by_kind(parameters: Any) -> bool:
    """Whether rotary parameters are told for each kind of layer."""
    known = parameters.values() if isinstance(parameters, dict) else ()
    return any(isinstance(one, dict) for one in known)


class _Unscaled(NamedTuple):
    """What a scaling of frequencies depends on."""

    frequencies: np.ndarray
    base: float
    width: int
    scaling: dict[str, Any]  # the configuration's parameters
    config: Config


def _trained(given: _Unscaled) -> int:
    """The length of texts before scaling: beside the parameters, in them, or the longest."""
    key = "original_max_position_embeddings"
    own = as_number(given.config.get(key) or given.scaling.get(key))
    return int(own) if own else given.config.length(("max_position_embeddings",))


def _factor(given: _Unscaled) -> float:
    if given.scaling.get("factor") is None:
        raise KeyError("factor")
    return float(given.scaling["factor"])


def _llama3(given: _Unscaled) -> tuple[np.ndarray, float]:
    """Long wavelengths are stretched, short ones kept, those in between blended (Llama 3.1)."""
    frequencies, scaling = given.frequencies, given.scaling
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    trained = float(_trained(given))
    turns = trained * frequencies / (2 * math.pi)
    # Llama 4 Scout's two are the same: nothing lies in between.
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0) if high != low else turns >= low
    return frequencies * (kept + (1 - kept) / _factor(given)), 1.0


def _yarn(given: _Unscaled) -> tuple[np.ndarray, float]:
    """Interpolation by parts (Peng et al., 2023)."""
    frequencies, scaling = given.frequencies, given.scaling
    factor, trained = scaling["factor"], float(_trained(given))
    # A null stands for the ratio of both lengths; a file without the key is refused everywhere.
    longest = ("max_position_embeddings",)
    factor = given.config.length(longest) / trained if factor is None else float(factor)

    def pair_turning(times: float) -> float:
        turns = trained / (times * 2 * math.pi)
        return given.width * math.log(turns) / (2 * math.log(given.base))

    low = pair_turning(float(scaling.get("beta_fast") or 32))
    high = pair_turning(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, given.width - 1)
    ramp = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 1e-3), 0.0, 1.0)
    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        whole, part = scaling.get("mscale"), scaling.get("mscale_all_dim")
        amplitude = (
            _yarn_amplitude(factor, whole) / _yarn_amplitude(factor, part)
            if whole and part
            else _yarn_amplitude(factor, 1.0)
        )
    return frequencies * (ramp / factor + 1 - ramp), float(amplitude)


def rotary_stretch(config: Config) -> float:
    """YaRN's factor on queries and keys in models that put it into the score's scale (DeepSeek)."""
    scaling = _parameters(config, 0, False)
    part = config.optional_number(("mscale_all_dim",))
    part = as_number(scaling.get("mscale_all_dim")) if part is None else part
    factor = as_number(scaling.get("factor"))
    return 1.0 if part is None or factor is None else _yarn_amplitude(factor, part)


def _yarn_amplitude(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(given: _Unscaled) -> tuple[np.ndarray, float]:
    """A factor for each pair; those for texts within the trained length."""
    scaling, config = given.scaling, given.config
    trained, longest = _trained(given), config.length(("max_position_embeddings",))
    factor = float(scaling.get("factor") or longest / trained)
    amplitude = scaling.get("short_mscale", scaling.get("attention_factor"))
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return given.frequencies / np.asarray(scaling["short_factor"], np.float64), float(amplitude)


def _proportional(given: _Unscaled) -> tuple[np.ndarray, float]:
    """A share of all pairs turns, at the rates that they have among all (Gemma 4)."""
    share = float(given.scaling.get("partial_rotary_factor") or 1.0)
    turning = np.arange(len(given.frequencies)) < int(share * given.width // 2)
    return given.frequencies * turning / float(given.scaling.get("factor") or 1.0), 1.0


def _factors(given: _Unscaled) -> tuple[np.ndarray, float]:
    """A factor for each pair, as GGUF files store them."""
    factors = np.asarray(given.scaling["factors"], np.float64)
    if factors.shape != given.frequencies.shape:
        raise ValueError(f"{len(given.frequencies)} factors")
    return given.frequencies / factors, float(given.scaling.get("attention_factor") or 1.0)


_SCALINGS: dict[str, Callable[[_Unscaled], tuple[np.ndarray, float]]] = {
    "linear": lambda given: (given.frequencies / _factor(given), 1.0),
    # The base grows only for texts beyond the trained length.
    "dynamic": lambda given: (given.frequencies, 1.0),
    "xdrope": lambda given: (given.frequencies, 1.0),  # HunYuan's name for "dynamic"
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "su": _longrope,
    "factors": _factors,
}
