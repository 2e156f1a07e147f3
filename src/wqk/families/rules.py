"""The schema of a family file: a record for each of its tables.

An unknown or missing key is an error, so that a misspelled key is not silently replaced by the
default.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from wqk.families.expressions import parse
from wqk.families.layouts import FUSED_LAYOUTS, LAYOUTS, NORMS

# A key of the configuration, arithmetic with keys, or a condition; see `wqk.families.expressions`.
Expression = Annotated[str, "expression"]

# Keys of the number that norms on the residual stream add to a mean square.
EPSILON = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "norm_epsilon",
    "norm_eps",
)
# Keys of the width of a head.
HEAD_WIDTHS = ("head_dim", "d_kv", "kv_channels", "d_head")
# Keys of names of tensors, besides those of queries and keys themselves.
TENSOR_KEYS = (
    "value",
    "output",
    "output_norm",
    "query_bias",
    "value_bias",
    "query_inner",
    "key_inner",
    "query_inner_norm",
    "key_inner_norm",
    "query_norm",
    "key_norm",
    "input_norm",
    "first_input_norm",
    "key_input_norm",
    "sinks",
    "temperature",
    "softplus",
)
REST = "*"  # width of a section with an equal share of the rest
LOCAL = "local"  # a window without a key for its size

# Allowed values of keys; for keys with lists, allowed entries.
VALUES: Mapping[str, Mapping[str, Collection[str | int]]] = {
    "AttentionRule": {
        "kind": ("self", "cross", "linear", "state-space"),
        "layout": LAYOUTS,
        "norm": NORMS,
        "input_norm_kind": NORMS,
        "position_uses": ("query", "key"),
        "position_uses_if": ("query", "key"),
        "rotary_only": ("norm", "window"),
        "window_axes": (1, 2),
        "window_counts": ("", "each side", "itself"),
    },
    "RotaryRule": {"order": ("half", "interleaved"), "axes": (1, 2, 3)},
}
# Keys that an attention through latents needs.
LATENT_KEYS = ("key_inner", "key_inner_norm", "content_width", "position_width")


class RotaryKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rotary parameters of a kind of layers, under a key with another name."""

    parameters: str  # key in ``rope_parameters``
    base: tuple[Expression, ...]  # keys of the base in files without such parameters
    scaled: bool = True  # whether a scaling for all layers is one of these layers, too
    amplitude: float | None = None  # attention factor of the scaling, unless set

    def __post_init__(self) -> None:
        _require_readable(self)


class RotaryRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rotation of queries and keys by positions.

    Keys of the configuration are tried in order, first in ``rope_parameters`` or ``rope_scaling``.
    """

    order: str  # "half": dimension k turns with k + P; "interleaved": 2k with 2k + 1
    other_order_if: Expression = ""  # switches of models that have the other order
    fraction: tuple[Expression, ...] = ("partial_rotary_factor",)  # rotated share of the head width
    width: tuple[Expression, ...] = ()  # or the number of rotated dimensions itself
    base: tuple[Expression, ...] = ("rope_theta",)
    local_base: tuple[Expression, ...] = ()  # base in windowed layers, if different
    # 2: the first planes turn with a patch's row, as many others with its column; 3: with its time,
    # row and column
    axes: int = 1
    # Number of a head's dimensions that each axis turns, where axes have shares of their own: one
    # expression for each axis, or the key of a list.
    axis_widths: tuple[Expression, ...] = ()
    alternating: bool = False  # each axis takes every second frequency, not all of them
    mixed: bool = False  # planes of columns and of rows take turns, columns first
    columns_first: bool = False  # the first half of the planes turns with the column
    apart: bool = False  # each axis turns a separate part of the head
    last: bool = False  # the last dimensions of a head are rotated, not the first
    kinds: dict[str, RotaryKind] = {}  # by kind of layer
    in_turns: bool = False  # positions are coordinates from -1 to 1, frequencies whole turns
    alpha: bool = False  # "dynamic" scaling may have a fixed `alpha` that stretches the base
    reversed: bool = False  # rotates in the opposite direction
    before_norm: bool = False  # queries and keys are normalized after the rotation
    only_if: Expression = ""  # switches of models that are rotary or not
    layers: tuple[Expression, ...] = ()  # list of rotary layers
    every: tuple[Expression, ...] = ()  # a number n; every n-th layer is not rotary
    backward: bool = False  # counted from the last layer, which is the first that is not rotary
    windowed_only: bool = False  # layers with full attention have no positions

    def __post_init__(self) -> None:
        _require_known_values(self)
        _require_readable(self)


class AttentionRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attention of a model: the names of tensors in every layer, and the rest of the score.

    Names of tensors contain ``{layer}`` and leave out ``.weight`` and any prefix. If names differ
    between files, all spellings are listed. ``{previous}`` is the previous layer, whose last norm
    feeds the layer in post-norm models; ``{last}`` is the highest number that exists; ``{head}`` is
    the number of a head, if heads have separate tensors. An `Expression` is made of keys of the
    configuration.
    """

    stack: str  # encoder, decoder, vision, audio, text, ...
    kind: str = "self"  # or "cross"; without a softmax "linear" or "state-space"
    only_if: Expression = ""  # switches of models that have this attention; see Config.holds

    # Tensors. A bias is named only if it is not the weight's own ".bias".
    layout: str = "separate"  # see wqk.families.layouts
    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    value: tuple[str, ...] = ()
    output: tuple[str, ...] = ()  # W_o, for the value-output circuit
    output_norm: tuple[str, ...] = ()  # norm of the heads' outputs, before W_o
    key_scale: tuple[Expression | float, ...] = ()  # factors of the keys' content, as in ``scale``
    value_scale: tuple[Expression | float, ...] = ()  # factors of the values
    query_bias: tuple[str, ...] = ()
    value_bias: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()  # the tensor with several sides
    # Parts of the fused tensor, unless queries, keys and values: role, heads, width.
    sections: tuple[tuple[str, ...], ...] = ()
    section_blocks: Expression = ""  # number of repetitions of the sections
    query_inner: tuple[str, ...] = ()  # "latent": from the input to the latent
    key_inner: tuple[str, ...] = ()
    query_inner_norm: tuple[str, ...] = ()  # norm of the latent
    key_inner_norm: tuple[str, ...] = ()
    prefix: str | None = None  # text before all names; None for any text
    exact: bool = False  # whether None means one prefix of all attention, as in users' own files

    # Norms between projection and score.
    query_norm: tuple[str, ...] = ()
    key_norm: tuple[str, ...] = ()
    norm: str = "rms"  # or "layer"
    norm_gain: bool = True  # false for norms without a gain, and so without tensors
    norm_offset: float = 0.0  # 1 if stored gains are differences from 1
    norm_epsilon: tuple[Expression, ...] = ("rms_norm_eps", "layer_norm_eps", "norm_eps")

    # The norm before the projections.
    input_norm: tuple[str, ...] = ()  # feeds the queries, and the keys of self-attention
    first_input_norm: tuple[str, ...] = ()  # the same for layer 0, if different
    key_input_norm: tuple[str, ...] = ()  # feeds the keys of cross-attention
    input_scale: tuple[Expression | float, ...] = ()  # factors of the norm's output, see ``scale``
    input_norm_kind: str = "rms"
    input_norm_offset: float = 0.0
    input_norm_epsilon: tuple[Expression, ...] = (
        EPSILON  # layer 0's own norm is asked for these first
    )

    # Numbers.
    layers: tuple[Expression, ...] = ("num_hidden_layers",)
    every_layer: bool = True  # false if some layers lack this attention
    heads: tuple[Expression, ...] = ("num_attention_heads",)
    key_heads: tuple[Expression, ...] = ("num_key_value_heads",)
    value_heads: tuple[Expression, ...] = ()  # if values and keys have different heads
    applied_in_total: tuple[
        Expression | float, ...
    ] = ()  # applications of shared layers, as in ``scale``
    content_width: Expression = (
        ""  # "latent": width of a head without positions, and with them alone
    )
    position_width: Expression = ""

    # From products of queries and keys to scores.
    scale: tuple[Expression | float, ...] = ("head_width ** -0.5",)  # factors of the score
    softcap: Expression = ""
    clip: Expression = ""  # largest absolute value of queries and keys
    sinks: tuple[str, ...] = ()  # scores of a virtual key, one per head
    temperature: tuple[str, ...] = ()  # logarithm of a learned factor of each head's score
    softplus: tuple[str, ...] = ()  # softplus: factor of each query dimension
    # First token from which queries grow with positions, in layers without rotary positions.
    grows_from: tuple[Expression, ...] = ()
    grows_if: Expression = ""  # switch of models with growing queries
    rotary: RotaryRule | None = None
    position: str = ""  # term that is added to the form's scores: alibi, relative, ...
    position_if: Expression = ""
    position_uses: tuple[str, ...] = ()  # sides for the added term, or for a convolution
    position_uses_if: dict[str, Expression] = {}  # by side: switches of models that use the side
    whole_score: bool = True  # false if the score has terms that no key describes
    joint: bool = False  # one softmax over tokens of two streams with separate projections
    causal: bool = False
    causal_if: Expression = ""  # flag of models that may be causal or not
    # Modules in which the running class masks later tokens, or does not.
    causal_under: dict[str, bool] = {}
    window: tuple[Expression, ...] = ()  # size of local attention
    window_axes: int = 1  # 2 if windows are squares of an image
    rotary_only: tuple[str, ...] = ()  # "norm", "window": in rotary layers only
    window_counts: str = ""  # "each side": the tokens on one side; "itself": the token's own too

    config: str = ""  # nested configuration with the keys above
    defaults: dict[str, Any] = {}  # of absent keys
    model_type: str = ""  # type with defaults for further keys; by default its own
    guess: str = ""  # how the rule was guessed from tensor names, if so
    partial: str = ""  # why one form per head is not the whole score
    between: tuple[str, ...] = ()  # "linear": operations between products and outputs
    note: str = ""  # further facts for readers of the form

    def __post_init__(self) -> None:
        _require_known_values(self)
        _require_readable(self)
        self._require_matching_names()
        if self.fused:
            self._require_fused_layout()
        if self.sections:
            self._require_roles_in_sections()
        if self.layout == "latent":
            self._require_latent()

    def _require_matching_names(self) -> None:
        """Check that the placeholders of queries, keys and other tensors agree."""
        if len(self.query) != len(self.key):
            raise ValueError(
                "'query' and 'key' need as many spellings as each other, got "
                f"{len(self.query)} and {len(self.key)}; add the other spellings"
            )
        if not self.fused and not self.query:
            raise ValueError("an attention needs 'query' and 'key', or 'fused'; add them")
        for query, key in zip(self.query, self.key, strict=True):
            if _numbers(query) != _numbers(key):
                raise ValueError(
                    f"'query' and 'key' need the same {{layer}} and further numbers, got {query!r} "
                    f"and {key!r}; correct them"
                )
        most = max(map(_numbers, self.fused or self.query))
        for name in self._tensor_names():
            if _numbers(name) > most:
                raise ValueError(
                    f"{name!r} has more numbers, such as {{layer}}, than the query; expected at "
                    f"most {most}; correct it"
                )

    def _require_fused_layout(self) -> None:
        """Check that a fused tensor has a layout for fused tensors, and no tensors next to it."""
        if self.query:
            raise ValueError(
                "'fused' holds the queries and the keys; expected 'fused', or 'query' and 'key', "
                "got both; remove one of them"
            )
        if self.layout not in FUSED_LAYOUTS and not self.sections:
            raise ValueError(
                f"layout {self.layout!r} is not that of a 'fused' tensor; expected "
                f"{_with_meanings(FUSED_LAYOUTS)}; set 'layout', or list the parts in 'sections'"
            )

    def _require_roles_in_sections(self) -> None:
        """Check the sections of a fused tensor: widths, and exactly one query and one key part."""
        if not self.fused or self.layout not in ("separate", "sectioned"):
            raise ValueError(
                "'sections' are the parts of a 'fused' tensor, stored (out, in); expected 'fused' "
                f"and the layout 'sectioned', got the layout {self.layout!r}"
                f"{'' if self.fused else ' and no fused tensor'}; correct it"
            )
        for section in self.sections:
            if len(section) < 2:
                raise ValueError(
                    f"'sections': a part has no width; expected a role and factors of its width, "
                    f'such as ["q", "num_attention_heads", "head_dim"], got {list(section)}; add '
                    f"the factors, or {REST!r} for an equal share of the rest"
                )
            for factor in section[1:]:
                if factor != REST:
                    _require_expression("sections", factor)
        roles = [role for role, *_ in self.sections]
        if roles.count("q") != 1 or roles.count("k") != 1 or roles.count("v") > 1:
            raise ValueError(
                f"'sections' need one part of queries, 'q', and one of keys, 'k', and have at most "
                f"one of values, 'v'; got {', '.join(map(repr, roles))}; correct these names: "
                "parts with other names are not read"
            )

    def _require_latent(self) -> None:
        """Check that attention through latents has all keys for the latents."""
        needed: tuple[str, ...] = LATENT_KEYS
        if self.query_inner:
            needed = (*LATENT_KEYS, "query_inner_norm")
        missing = [key for key in needed if not getattr(self, key)]
        if missing:
            raise ValueError(
                f"layout 'latent' lacks {', '.join(map(repr, missing))}; expected "
                f"{', '.join(map(repr, needed))}; add the missing keys, or use another layout"
            )

    def _tensor_names(self) -> Iterator[str]:
        """Yield all names of tensors except queries and keys."""
        for key in TENSOR_KEYS:
            yield from getattr(self, key)


def _numbers(name: str) -> int:
    """Return the number of placeholders in a tensor's name."""
    return len(re.findall(r"\{(?!previous\}|last\}|head\})\w+\}", name))


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attentions of models with one naming of tensors."""

    name: str
    model_types: tuple[str, ...] = ()  # empty if a file defines the family
    attention: tuple[AttentionRule, ...] = ()
    refusal: str = ""  # why the attention of these models is not one form per head
    # Further attention without a softmax, by name in mixers.toml.
    mixers: tuple[str, ...] = ()
    with_parts: bool = False  # whether parts of known types are read as well
    runs_as: str = ""  # model type with code for these weights, if transformers lacks another
    runs_with_head: bool = False  # whether only the model with its head has all of the attention


def _require_known_values(rule: msgspec.Struct) -> None:
    """Raise `ValueError`, with the key, if a key has an unknown value."""
    for key, allowed in VALUES[type(rule).__name__].items():
        value = getattr(rule, key)
        entries = [value] if isinstance(value, str | int) else value
        for entry in entries:
            if entry not in allowed:
                raise ValueError(
                    f"unknown {key} {entry!r}; expected one of {_with_meanings(allowed)}; correct "
                    "it"
                )


def _with_meanings(values: Collection[str | int]) -> str:
    """Return values as a list, layouts with their meanings.

    Examples
    --------
    >>> _with_meanings((1, 2)), _with_meanings(["separate"])
    ('1, 2', 'separate (a tensor for each role, head after head)')
    """
    texts = []
    for value in values:
        meaning = LAYOUTS.get(str(value))
        text = str(value) or "''"
        texts.append(f"{text} ({meaning})" if meaning else text)
    return ", ".join(texts)


def _require_readable(rule: msgspec.Struct) -> None:
    """Raise `ValueError`, with the key, if an expression of a table is invalid."""
    for key in _expression_keys(type(rule)):
        value = getattr(rule, key)
        texts: Iterable[object]
        if isinstance(value, str):
            texts = [value] if value else []  # "" stands for no expression
        else:
            texts = value.values() if isinstance(value, dict) else value
        for text in texts:
            if text != LOCAL:
                _require_expression(key, str(text))


def _require_expression(key: str, text: str) -> None:
    """Raise `ValueError`, with the key, if a text is not an expression."""
    try:
        parse(text)
    except ValueError as error:
        raise ValueError(f"{key!r}: {error}") from None


@cache
def _expression_keys(table: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the keys of a table that contain expressions, by their types."""
    hints = get_type_hints(table, include_extras=True)
    return tuple(key for key, hint in hints.items() if _holds_expressions(hint))


def _holds_expressions(hint: Any) -> bool:
    """Return whether a type is `Expression`, or contains `Expression`."""
    if get_origin(hint) is Annotated:
        return True
    return any(map(_holds_expressions, get_args(hint)))
