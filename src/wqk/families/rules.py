"""The schema of a family file: one record for each of its tables.

An unknown or missing key is an error: a misspelled key is reported, and not silently replaced by
the default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from wqk.families.expressions import parse
from wqk.families.layouts import LAYOUTS, NORMS

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
REST = "*"  # the width of a section that takes an equal share of what the others leave
LOCAL = "local"  # a window whose size no key has


class RotaryKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rotary parameters of one kind of layers, where their name is not that of the kind."""

    parameters: str  # their key among ``rope_parameters``
    base: tuple[Expression, ...]  # keys of the base in files without such parameters
    scaled: bool = True  # whether a scaling for all layers is one of these layers, too
    amplitude: float | None = None  # attention factor of that scaling, where none is set

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
    local_base: tuple[Expression, ...] = ()  # base in windowed layers, where it may differ
    # 2: the first planes turn with a patch's row, as many others with its column; 3: with its time,
    # row and column
    axes: int = 1
    # Number of a head's dimensions that each axis turns, where axes have shares of their own: one
    # expression for each axis, or the key of a list.
    axis_widths: tuple[Expression, ...] = ()
    alternating: bool = False  # each axis takes every second frequency, not all of them
    mixed: bool = False  # planes of columns and of rows take turns, columns first
    columns_first: bool = False  # the first half of the planes turns with the column
    apart: bool = False  # each axis turns a part of the head of its own
    last: bool = False  # a head's last dimensions are rotated, not its first ones
    kinds: dict[str, RotaryKind] = {}  # by kind of layer
    in_turns: bool = False  # positions are coordinates from -1 to 1, frequencies whole turns
    alpha: bool = False  # "dynamic" scaling may have a fixed `alpha` that stretches the base
    reversed: bool = False  # rotates in the opposite direction
    before_norm: bool = False  # queries and keys are normalized after they have been rotated
    only_if: Expression = ""  # switches of models that are rotary or not
    layers: tuple[Expression, ...] = ()  # list of the layers that are rotary
    every: tuple[Expression, ...] = ()  # a number n; every n-th layer is not rotary
    backward: bool = False  # counted from the last layer, which is the first that is not rotary
    windowed_only: bool = False  # layers with full attention have no positions

    def __post_init__(self) -> None:
        _require_readable(self)


class AttentionRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attention of a model: the names of its tensors in every layer, and the rest of its score.

    Names of tensors contain ``{layer}`` and leave out ``.weight`` and any prefix. If names differ
    between files, all spellings are listed. ``{previous}`` is the layer before, whose last norm
    feeds the layer in post-norm models; ``{last}`` is the highest number that exists; ``{head}`` is
    each head, if heads have tensors of their own. An `Expression` is made of keys of the
    configuration.
    """

    stack: str  # encoder, decoder, vision, audio, text, ...
    kind: str = "self"  # or "cross"; without a softmax "linear" or "state-space"
    only_if: Expression = ""  # switches of models that have this attention; see Config.holds

    # Tensors. A bias has a name only where it is not the weight's own ".bias".
    layout: str = "separate"  # see wqk.families.layouts
    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    value: tuple[str, ...] = ()
    output: tuple[str, ...] = ()  # W_o, for the value-output circuit
    output_norm: tuple[str, ...] = ()  # what heads put out is normalized before W_o
    key_scale: tuple[Expression | float, ...] = ()  # factors of the keys' content, as in ``scale``
    value_scale: tuple[Expression | float, ...] = ()  # factors of the values
    query_bias: tuple[str, ...] = ()
    value_bias: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()  # the tensor that holds several sides
    # What it holds, where that is not queries, keys and values: a role, its heads, its width.
    sections: tuple[tuple[str, ...], ...] = ()
    section_blocks: Expression = ""  # how often these repeat
    query_inner: tuple[str, ...] = ()  # "latent": from the input to the latent
    key_inner: tuple[str, ...] = ()
    query_inner_norm: tuple[str, ...] = ()  # norm of the latent
    key_inner_norm: tuple[str, ...] = ()
    prefix: str | None = None  # what stands before all names; None for anything
    exact: bool = False  # whether None means one prefix of all attention, as in users' own files

    # Norms between projection and score.
    query_norm: tuple[str, ...] = ()
    key_norm: tuple[str, ...] = ()
    norm: str = "rms"  # or "layer"
    norm_gain: bool = True  # false where they have none, and so no tensors
    norm_offset: float = 0.0  # 1 where the gain is stored as its difference from 1
    norm_epsilon: tuple[Expression, ...] = ("rms_norm_eps", "layer_norm_eps", "norm_eps")

    # The norm whose output is projected.
    input_norm: tuple[str, ...] = ()  # feeds the queries, and the keys of self-attention
    first_input_norm: tuple[str, ...] = ()  # the same in layer 0, where it differs
    key_input_norm: tuple[str, ...] = ()  # feeds the keys of cross-attention
    input_scale: tuple[Expression | float, ...] = ()  # factors of what it puts out, as in ``scale``
    input_norm_kind: str = "rms"
    input_norm_offset: float = 0.0
    input_norm_epsilon: tuple[Expression, ...] = (
        EPSILON  # layer 0's own norm is asked for these first
    )

    # Numbers.
    layers: tuple[Expression, ...] = ("num_hidden_layers",)
    every_layer: bool = True  # false where some layers have no such attention
    heads: tuple[Expression, ...] = ("num_attention_heads",)
    key_heads: tuple[Expression, ...] = ("num_key_value_heads",)
    value_heads: tuple[Expression, ...] = ()  # where values have other heads than keys
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
    softplus: tuple[str, ...] = ()  # whose softplus multiplies each dimension of the queries
    # In layers without rotary positions, queries grow with theirs: from which token on.
    grows_from: tuple[Expression, ...] = ()
    grows_if: Expression = ""  # switch of models whose queries grow
    rotary: RotaryRule | None = None
    position: str = ""  # what is added to the scores besides the form: alibi, relative, ...
    position_if: Expression = ""
    position_uses: tuple[str, ...] = ()  # sides that this, or a convolution, is made with
    position_uses_if: dict[str, Expression] = {}  # by side: switches of models that use the side
    whole_score: bool = True  # false if the score has terms that no key describes
    joint: bool = False  # tokens of two streams, with projections of their own, meet in one softmax
    causal: bool = False
    causal_if: Expression = ""  # configuration flag of models that are either
    # Modules under which the class that runs masks later tokens, or does not.
    causal_under: dict[str, bool] = {}
    window: tuple[Expression, ...] = ()  # size of local attention
    window_axes: int = 1  # 2 where windows are squares of an image
    rotary_only: tuple[str, ...] = ()  # "norm", "window": others than rotary layers have none
    window_counts: str = ""  # "each side": the tokens on one side; "itself": the token's own too

    config: str = ""  # the nested configuration that the keys above are in
    defaults: dict[str, Any] = {}  # of absent keys
    model_type: str = ""  # whose other defaults hold where it is not said; by default its own
    guess: str = ""  # how the rule was guessed from tensor names, if it was
    partial: str = ""  # why one form per head is not the whole score
    between: tuple[str, ...] = ()  # "linear": what stands between the products and the outputs
    note: str = ""  # what else a reader of the form should know

    def __post_init__(self) -> None:
        possible = {"layout": LAYOUTS, "norm": NORMS, "input_norm_kind": NORMS}
        for key, known in possible.items():
            value = getattr(self, key)
            if value not in known:
                raise ValueError(
                    f"unknown {key} {value!r}; expected one of {', '.join(known)}; correct it"
                )
        _require_readable(self)
        for section in self.sections:
            for factor in section[1:]:
                if factor != REST:
                    _require_expression("sections", factor)
        self._require_matching_names()

    def _require_matching_names(self) -> None:
        """Check that queries, keys and other tensors have numbers that can be filled in."""
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

    def _tensor_names(self) -> Iterator[str]:
        """Yield all names of tensors besides those of queries and keys."""
        for key in TENSOR_KEYS:
            yield from getattr(self, key)


def _numbers(name: str) -> int:
    """Return how many numbers a tensor's name has to be filled with."""
    return len(re.findall(r"\{(?!previous\}|last\}|head\})\w+\}", name))


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attentions of the models that share one naming of tensors."""

    name: str
    model_types: tuple[str, ...] = ()  # none for one that is given by its file
    attention: tuple[AttentionRule, ...] = ()
    refusal: str = ""  # why the attention of these models is not one form per head
    # Attention without a softmax besides, by name in mixers.toml.
    mixers: tuple[str, ...] = ()
    with_parts: bool = False  # whether parts of known types are read as well
    runs_as: str = ""  # model type whose code runs these weights, where transformers has no other
    runs_with_head: bool = False  # whether only the model with its head has all of the attention


def _require_readable(rule: msgspec.Struct) -> None:
    """Raise `ValueError`, which names the key, if an expression of a table cannot be read."""
    for key in _expression_keys(type(rule)):
        value = getattr(rule, key)
        texts: Iterable[object]
        if isinstance(value, str):
            texts = [value] if value else []  # an empty one is none
        else:
            texts = value.values() if isinstance(value, dict) else value
        for text in texts:
            if text != LOCAL:
                _require_expression(key, str(text))


def _require_expression(key: str, text: str) -> None:
    """Raise `ValueError`, which names the key, if a text is no expression."""
    try:
        parse(text)
    except ValueError as error:
        raise ValueError(f"{key!r}: {error}") from None


@cache
def _expression_keys(table: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the keys of a table that hold expressions, by their types."""
    hints = get_type_hints(table, include_extras=True)
    return tuple(key for key, hint in hints.items() if _holds_expressions(hint))


def _holds_expressions(hint: Any) -> bool:
    """Return whether a type is `Expression`, or has it among its parts."""
    if get_origin(hint) is Annotated:
        return True
    return any(map(_holds_expressions, get_args(hint)))
