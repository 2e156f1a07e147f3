"""Rotary positions: the dimensions of a head that rotate together, and their frequencies.

With rotary positions the score at relative distance N = i − j is x_i A R(−N) Bᵀ x_jᵀ; the plain
form is the form at N = 0.

Axes: P rotated pairs, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._typing import Array, Float
from wqk.checkpoints.checkpoint import as_number
from wqk.errors import CheckpointError, shown
from wqk.families.config import as_text
from wqk.families.scalings import PLAIN, Unscaled, length_of_change, scaled, yarn_amplitude

if TYPE_CHECKING:
    from wqk.families.config import Config
    from wqk.families.rules import RotaryKind, RotaryRule

# Key of the share of a head's dimensions that turns. Many classes ignore it, unless frequencies are
# scaled, by functions that all classes have in common.
SHARE = "partial_rotary_factor"


@dataclass(frozen=True, eq=False)
class Rotary:
    """The rotation of 2P dimensions of a head.

    Attributes
    ----------
    frequencies
        Radians per position of each plane, (P,).
    order
        ``half``: dimension k turns with k + P; ``interleaved``: dimension 2k with 2k + 1.
    amplitude
        The attention factor of YaRN and LongRoPE, which multiplies the rotated dimensions of
        queries and of keys at every distance, including 0.
    axes
        2 for the patches of an image: planes turn with the row or with the column. 3 for the
        patches of a video: planes turn with the time, the row or the column.
    axis_pairs
        Number of planes of each axis, if axes have different numbers of planes; otherwise empty.
    longest
        Length of texts in tokens beyond which frequencies or queries change; None if they never
        change.
    mixed
        With two axes: planes of columns and of rows take turns. Otherwise the planes of an axis
        follow each other.
    columns_first
        With two axes: the first half of the planes turns with the column, the second half with the
        row.
    apart
        Each axis turns a separate part of the head, with the order within this part.
    start
        The first of the consecutive rotated dimensions.
    before_norm
        Whether the norm of queries and keys follows the rotation. If the norm has gains, the score
        then depends on both positions and not on their distance alone.
    positions
        The model's number of positions; None if the configuration does not set the number.
    """

    frequencies: Float[Array, " pairs"]
    order: str
    amplitude: float = 1.0
    axes: int = 1
    axis_pairs: tuple[int, ...] = ()
    longest: int | None = None
    mixed: bool = False
    columns_first: bool = False
    apart: bool = False
    start: int = 0
    before_norm: bool = False
    positions: int | None = None

    @property
    def arrangement(self) -> tuple[object, ...]:
        """Dimensions that rotate together, and their axes, as a value for comparisons."""
        return (
            self.order,
            self.axes,
            self.axis_pairs,
            self.mixed,
            self.columns_first,
            self.apart,
            self.start,
        )

    def places(self, count: int, distance: int) -> np.ndarray:
        """Return ``count`` equal positions at a distance from 0: (count,), or (count, axes).

        On several axes the distance is multiplied by 1, √2, √3, so that all axes turn differently.

        Examples
        --------
        >>> Rotary(np.ones(4), "half").places(2, 3)
        array([3., 3.])
        >>> Rotary(np.ones(4), "half", axes=2).places(1, 3).round(3)
        array([[3.   , 4.243]])
        """
        if self.axes == 1:
            return np.full(count, float(distance))
        return np.full((count, self.axes), distance * np.sqrt(np.arange(1, self.axes + 1)))

    @property
    def plane_axes(self) -> np.ndarray:
        """The axis of each plane, (P,): 0 for rows or for texts, 1 for columns; 0 for the time.

        Examples
        --------
        >>> Rotary(np.ones(4), "half", axes=2).plane_axes
        array([0, 0, 1, 1])
        >>> Rotary(np.ones(4), "half", axes=2, mixed=True).plane_axes
        array([1, 0, 1, 0])
        >>> Rotary(np.ones(4), "interleaved", axes=3, axis_pairs=(1, 1, 2)).plane_axes
        array([0, 1, 2, 2])
        """
        count = len(self.frequencies)
        if self.axis_pairs:
            return np.repeat(np.arange(self.axes), self.axis_pairs)
        if self.mixed:
            return (1 + np.arange(count)) % self.axes
        axes = np.arange(count) * self.axes // max(count, 1)
        return self.axes - 1 - axes if self.columns_first else axes

    def rotate(self, vectors: Array, positions: np.ndarray) -> Array:
        """Rotate queries or keys (..., N, R) by their positions.

        Parameters
        ----------
        vectors
            NumPy arrays are rotated in float64, PyTorch tensors in their type.
        positions
            One number for each token, (N,), for all axes; or one number for each token and axis,
            (N, axes).
        """
        positions = np.asarray(positions, np.float64)
        if positions.ndim == 1:
            positions_by_plane = positions[:, None]
        else:
            positions_by_plane = positions[:, self.plane_axes]
        angles = positions_by_plane * self.frequencies
        cosine: Array = self.amplitude * np.cos(angles)
        sine: Array = self.amplitude * np.sin(angles)
        first, second = self.planes
        if isinstance(vectors, np.ndarray):
            turned = np.array(vectors, np.float64)
        else:
            cosine, sine = vectors.new_tensor(cosine), vectors.new_tensor(sine)
            turned = vectors.clone()
        x, y = vectors[..., first], vectors[..., second]
        turned[..., first] = x * cosine - y * sine
        turned[..., second] = x * sine + y * cosine
        return turned

    def stretch(self, vectors: np.ndarray) -> np.ndarray:
        """Return queries or keys (..., R) with the attention factors of both sides."""
        stretched = np.array(vectors)
        for dimensions in self.planes:
            stretched[..., dimensions] *= self.amplitude**2
        return stretched

    @property
    def turning(self) -> Rotary:
        """The rotation without the attention factor."""
        return replace(self, amplitude=1.0)

    @property
    def planes(self) -> tuple[Any, Any]:
        """Indices of the two dimensions of the rotated pairs: all first, and all second dimensions.

        Both are slices, or arrays (P,), that index the last axis of vectors (…, R). Pair number k
        is the plane of frequency k.

        Examples
        --------
        >>> Rotary(np.ones(4), "half").planes
        (slice(0, 4, None), slice(4, 8, None))
        >>> first, second = Rotary(np.ones(4), "half", axes=2, apart=True).planes
        >>> first.tolist(), second.tolist()
        ([0, 1, 4, 5], [2, 3, 6, 7])
        """
        pairs, start = len(self.frequencies), self.start
        stop = start + 2 * pairs
        if self.apart:
            return self._planes_apart()
        if self.order == "half":
            return slice(start, start + pairs), slice(start + pairs, stop)
        return slice(start, stop, 2), slice(start + 1, stop, 2)

    def _planes_apart(self) -> tuple[np.ndarray, np.ndarray]:
        """Return `planes` for axes that turn separate parts of the head."""
        pairs = len(self.frequencies)
        pairs_of_axis = pairs // self.axes
        dimensions = np.arange(2 * pairs)
        if self.order == "interleaved":
            by_axis = dimensions.reshape(self.axes, pairs_of_axis, 2)
            return by_axis[:, :, 0].reshape(-1), by_axis[:, :, 1].reshape(-1)
        by_axis = dimensions.reshape(self.axes, 2, pairs_of_axis)
        return by_axis[:, 0].reshape(-1), by_axis[:, 1].reshape(-1)


def rotary_of(
    rule: RotaryRule, config: Config, head_width: int, layer: int, windowed: bool
) -> Rotary | None:
    """Return the rotation of one layer; None if the layer has no rotation.

    Parameters
    ----------
    rule
        The family's description of the rotation.
    config
        The configuration of the layer's model.
    head_width
        Dimensions of a head.
    layer
        Number of the layer.
    windowed
        Whether the layer has a window.

    Raises
    ------
    CheckpointError
        The configuration is wrong or scales frequencies in an unknown way.
    """
    if not _is_rotary(rule, config, layer, windowed):
        return None
    parameters = rotary_parameters(config, layer, windowed, rule.kinds)
    scaling = as_text(parameters.get("rope_type", parameters.get("type", "default")))
    axis_widths = _axis_widths(rule, config, head_width)
    if axis_widths:
        width = sum(axis_widths)
    else:
        width = _rotated_width(rule, config, parameters, scaling, head_width, layer)
    base_keys = _base_keys(rule, config, layer, windowed)
    base = _base(rule, config, parameters, base_keys, layer)
    if rule.alpha and scaling in ("dynamic", "xdrope") and parameters.get("alpha"):
        base *= _alpha(parameters) ** (width / (width - 2))
    frequencies = _frequencies(rule, base, width, axis_widths)
    sign = -1 if rule.reversed else 1
    plain = Rotary(
        sign * frequencies,
        _order(rule, config),
        axes=rule.axes,
        axis_pairs=tuple(axis_width // 2 for axis_width in axis_widths),
        mixed=rule.mixed,
        columns_first=rule.columns_first,
        apart=rule.apart,
        start=head_width - width if rule.last else 0,
        before_norm=rule.before_norm,
        positions=_number_of_positions(config),
    )
    # A scaling leaves windowed layers with a base of their own as they are, unless the type has
    # parameters for each kind of layer.
    own_keys = [key for key in base_keys if key not in rule.base]
    is_shared = parameters is _stored_parameters(config) and config.default("scaled") is None
    has_own_base = is_shared and config.get(*own_keys) is not None
    if scaling in PLAIN or has_own_base:
        return plain
    rotation = Unscaled(frequencies, base, width, parameters, config)
    scaled_frequencies, amplitude = scaled(scaling, rotation)
    return replace(
        plain,
        frequencies=sign * scaled_frequencies,
        amplitude=amplitude,
        longest=length_of_change(scaling, rotation),
    )


def _number_of_positions(config: Config) -> int | None:
    """Return the number of positions of a model; None if the configuration sets no such number."""
    positions = config.get("max_position_embeddings")
    return positions if type(positions) is int and positions > 0 else None


def _is_rotary(rule: RotaryRule, config: Config, layer: int, windowed: bool) -> bool:
    """Return whether a layer has rotary positions."""
    switches = next(filter(None, map(config.get, rule.layers)), None)
    if isinstance(switches, list):
        if layer < len(switches) and not switches[layer]:
            return False
    else:
        period = config.optional_whole(rule.every)
        if period and _is_skipped(config, layer, period, rule.backward):
            return False
        is_full = not windowed and config.get("sliding_window") is not None
        if rule.windowed_only and is_full:
            return False
    return config.holds(rule.only_if)


def _is_skipped(config: Config, layer: int, period: int, backward: bool) -> bool:
    """Return whether a layer is the one layer of each ``period`` without rotary positions."""
    if backward:
        layers = config.whole(("num_hidden_layers",))
        return (layers - 1 - layer) % period == 0
    return (layer + 1) % period == 0


def _order(rule: RotaryRule, config: Config) -> str:
    """Return the order of the rotated pairs in a head."""
    if rule.other_order_if and config.holds(rule.other_order_if):
        return "half" if rule.order == "interleaved" else "interleaved"
    return rule.order


def _rotated_width(
    rule: RotaryRule,
    config: Config,
    parameters: Mapping[str, Any],
    scaling: str,
    head_width: int,
    layer: int,
) -> int:
    """Return the number of rotated dimensions; `CheckpointError` if the head has fewer."""
    width = next((parameters[key] for key in rule.width if key in parameters), None)
    if type(width) is not int:
        width = config.optional_whole(rule.width)
    is_whole = scaling in PLAIN and SHARE in config.ignored_keys
    share = 1.0
    if not is_whole:
        share = _number(config, parameters, rule.fraction, 1.0, SHARE, layer)
    if width is None and 0 < share <= 1:
        width = head_width if scaling == "proportional" else int(head_width * share)
    if width is None or not 0 < width <= head_width:
        raise CheckpointError(
            f"config.json: rotary positions rotate at most each head's "
            f"{head_width} dimensions, got {shown(share if width is None else width)}; correct it"
        )
    if width % 2 and width == head_width:
        raise CheckpointError(
            "config.json: rotary positions turn pairs of dimensions; expected heads of an even "
            f"width, got heads of width {head_width}; correct the number of heads"
        )
    if rule.axes > 1 and width % (2 * rule.axes):
        raise CheckpointError(
            f"config.json: rotary positions on {rule.axes} axes rotate a multiple "
            f"of {2 * rule.axes} dimensions, got {width}; correct the number of heads"
        )
    return width


def _axis_widths(rule: RotaryRule, config: Config, head_width: int) -> tuple[int, ...]:
    """Return the number of dimensions that each axis rotates; empty if axes have equal shares.

    Raises
    ------
    CheckpointError
        A width is missing or odd, or a head has fewer dimensions.
    """
    if not rule.axis_widths:
        return ()
    if len(rule.axis_widths) == 1:
        listed = config.get(*rule.axis_widths)
        if not isinstance(listed, list) or len(listed) != rule.axes:
            raise config.wrong(rule.axis_widths, f"a list of {rule.axes} widths", listed)
        widths = tuple(config.whole(rule.axis_widths, axis) for axis in range(rule.axes))
    else:
        widths = tuple(config.whole((key,)) for key in rule.axis_widths)
    if sum(widths) > head_width or any(width % 2 for width in widths):
        raise CheckpointError(
            f"config.json: rotary positions on {rule.axes} axes rotate even shares of each head's "
            f"{head_width} dimensions, got {', '.join(map(str, widths))}; correct them"
        )
    return widths


def _base_keys(rule: RotaryRule, config: Config, layer: int, windowed: bool) -> tuple[str, ...]:
    """Return the keys of the base of a layer's frequencies."""
    if rule.kinds:
        return _kind(rule.kinds, config, layer).base
    return rule.local_base if windowed and rule.local_base else rule.base


def _base(
    rule: RotaryRule,
    config: Config,
    parameters: Mapping[str, Any],
    keys: tuple[str, ...],
    layer: int,
) -> float:
    """Return the base of a layer's frequencies; `CheckpointError` if it is not positive."""
    base = _number(config, parameters, keys, 10_000.0, "rope_theta", layer)
    if base <= 0:
        raise CheckpointError(
            f"config.json: the base of rotary positions must be positive, got {base}; correct it"
        )
    return base


def _frequencies(
    rule: RotaryRule, base: float, width: int, axis_widths: tuple[int, ...]
) -> Float[np.ndarray, " pairs"]:
    """Return the frequencies (P,) of all planes, without sign and scaling."""
    if axis_widths:
        return np.concatenate([_powers(base, axis_width) for axis_width in axis_widths])
    frequencies = _powers(base, width if rule.alternating else width // rule.axes)
    if rule.alternating:
        by_axis = [frequencies[axis :: rule.axes] for axis in range(rule.axes)]
        frequencies = np.concatenate(by_axis)
    elif rule.mixed:
        frequencies = frequencies.repeat(rule.axes)
    else:
        frequencies = np.tile(frequencies, rule.axes)
    return 2 * math.pi * frequencies if rule.in_turns else frequencies


def _powers(base: float, width: int) -> Float[np.ndarray, " pairs"]:
    """Return the frequencies base^(−2k/R) of the planes of ``width`` dimensions."""
    return np.asarray(base ** -(np.arange(0, width, 2, dtype=np.float64) / width))


def _alpha(parameters: Mapping[str, Any]) -> float:
    """Return the factor of HunYuan's "dynamic" scaling, which does not depend on the length."""
    alpha = as_number(parameters["alpha"])
    if alpha is None or alpha <= 0:
        raise CheckpointError(
            "config.json: alpha of the rotary scaling must be a positive number, got "
            f"{shown(parameters['alpha'])}; correct it"
        )
    return alpha


def _number(
    config: Config,
    parameters: Mapping[str, Any],
    keys: tuple[str, ...],
    default: float,
    own_key: str,
    layer: int = 0,
) -> float:
    """Return a number from the rotary parameters; if absent, from the whole configuration.

    Parameters
    ----------
    config, parameters
        The configuration, and its rotary parameters of the layer.
    keys
        Keys of the number; lists in the whole configuration have an entry for each layer.
    default
        The number if no key is set.
    own_key
        The key of the number in the rotary parameters, besides ``keys``.
    layer
        Number of the layer.
    """
    is_by_layer = any(isinstance(config.get(key), list) for key in keys)
    candidates = (own_key, *keys) if keys and not is_by_layer else ()
    entries = (parameters.get(key) for key in candidates)
    entry = next((entry for entry in entries if entry is not None), None)
    if entry is None:
        number = config.optional_number(keys, layer)
        return default if number is None else number
    number = as_number(entry)
    if number is None:
        raise config.wrong(keys, "a number", entry)
    return number


def _stored_parameters(config: Config) -> Any:
    """Return the rotary parameters of a configuration; the older key has priority."""
    return config.in_file("rope_scaling") or config.get("rope_parameters") or {}


def rotary_parameters(
    config: Config, layer: int, windowed: bool, kinds: Mapping[str, RotaryKind] | None = None
) -> Mapping[str, Any]:
    """Return the rotary parameters of a layer: of all layers, or of its kind of layer.

    Parameters
    ----------
    config
        The configuration.
    layer
        Number of the layer.
    windowed
        Whether the layer has a window. If the configuration does not set kinds of layers, the
        window determines the kind.
    kinds
        Kinds of layers with parameters under other names.
    """
    stored = _stored_parameters(config)
    if not isinstance(stored, dict):
        raise config.wrong(("rope_parameters", "rope_scaling"), "a table", stored)
    if kinds:
        return _of_named_kind(stored, _kind(kinds, config, layer))
    kind = config.layer_type(layer) or ("sliding_attention" if windowed else "full_attention")
    scaled_kinds = config.default("scaled")  # kinds of layers have separate parameters
    if not isinstance(scaled_kinds, list):
        if not _is_by_kind(stored):
            return stored
        by_kind = stored.get(kind)
        return by_kind if isinstance(by_kind, dict) else {}
    in_file = config.in_file("rope_parameters")
    if _is_by_kind(in_file):
        by_kind = in_file.get(kind)
        parameters = by_kind if isinstance(by_kind, dict) else {}
    else:
        defaults = config.default("rope_parameters") or {}
        parameters = {"rope_type": "default", **defaults.get(kind, {})}
    if kind in scaled_kinds and not _is_by_kind(stored):
        parameters = parameters | (config.in_file("rope_scaling") or {})  # as in older files
    # For classes with kinds, transformers looks for `truncate` next to the kinds, in vain.
    return {key: value for key, value in parameters.items() if key != "truncate"}


def _kind(kinds: Mapping[str, RotaryKind], config: Config, layer: int) -> RotaryKind:
    """Return the names of the rotary parameters for the kind of a layer."""
    name = config.layer_type(layer) or ""
    if name not in kinds:
        raise CheckpointError(
            f"config.json: layer {layer} must be of one of the kinds {', '.join(kinds)}, got "
            f"{shown(name)}; correct layer_types"
        )
    return kinds[name]


def _of_named_kind(stored: Mapping[str, Any], kind: RotaryKind) -> Mapping[str, Any]:
    """Return the parameters of a kind of layer, or the parameters of all scaled kinds."""
    parameters_of_kind = stored.get(kind.parameters)
    if isinstance(parameters_of_kind, dict):
        return parameters_of_kind
    if not kind.scaled:
        return {}
    parameters = {key: value for key, value in stored.items() if key != "rope_theta"}
    if kind.amplitude is not None:
        parameters.setdefault("attention_factor", kind.amplitude)
    return parameters


def _is_by_kind(parameters: Any) -> bool:
    """Return whether rotary parameters are a table for each kind of layer."""
    values = parameters.values() if isinstance(parameters, dict) else ()
    return any(isinstance(value, dict) for value in values)


def rotary_stretch(config: Config) -> float:
    """Return YaRN's factor of queries and keys if the model's scale includes it (DeepSeek)."""
    parameters = rotary_parameters(config, 0, False)
    weight = config.optional_number(("mscale_all_dim",))
    if weight is None:
        weight = as_number(parameters.get("mscale_all_dim"))
    factor = as_number(parameters.get("factor"))
    if weight is None or factor is None:
        return 1.0
    return yarn_amplitude(factor, weight)
