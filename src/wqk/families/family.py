"""What a family says: which tensors of a model are its queries and keys, and how they are laid out.

A family is a TOML file. The classes here are its schema. An unknown or missing key is an error, so
that a misspelled key is reported and not silently replaced by its default.
"""

from __future__ import annotations

import os
import re
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import replace

from wqk._files import read_text
from wqk._typing import FilePath
from wqk.errors import UnknownFamily, did_you_mean
from wqk.families.expressions import parse
from wqk.families.layouts import LAYOUTS, NORMS
from wqk.families.model_types import default_values

# Characters of a family file; the shipped ones have at most 6,000.
LARGEST_FILE = 65_536


class RotaryKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rotary parameters of one kind of layers, where their name is not that of the kind."""

    parameters: str  # their key among ``rope_parameters``
    base: tuple[str, ...]  # keys of the base in files without such parameters
    scaled: bool = True  # whether a scaling for all layers is one of these layers, too
    amplitude: float | None = None  # attention factor of that scaling, where none is set


class RotaryRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How positions rotate queries and keys.

    Keys of the configuration are tried in order, first in ``rope_parameters`` or ``rope_scaling``.
    """

    order: str  # "half": dimension k turns with k + P; "interleaved": 2k with 2k + 1
    other_order_if: str = ""  # switches of models that have the other order
    fraction: tuple[str, ...] = ("partial_rotary_factor",)  # rotated share of the head width
    width: tuple[str, ...] = ()  # or the number of rotated dimensions itself
    base: tuple[str, ...] = ("rope_theta",)
    local_base: tuple[str, ...] = ()  # base in windowed layers, where it may differ
    # 2: the first planes turn with a patch's row, as many others with its column; 3: with its time,
    # row and column
    axes: int = 1
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
    only_if: str = ""  # switches of models that are rotary or not
    layers: tuple[str, ...] = ()  # list of the layers that are rotary
    every: tuple[str, ...] = ()  # a number n; every n-th layer is not rotary
    backward: bool = False  # counted from the last layer, which is the first that is not rotary
    windowed_only: bool = False  # layers with full attention have no positions

    def __post_init__(self) -> None:
        _check_expressions(self, ROTARY_EXPRESSIONS)


# Keys of what norms on the residual stream add to a mean square.
EPSILON = (
    "rms_norm_eps",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "layernorm_epsilon",
    "norm_epsilon",
    "norm_eps",
)


# Keys of both tables whose values are expressions, see `wqk.families.expressions`.
ROTARY_EXPRESSIONS = (
    "other_order_if",
    "fraction",
    "width",
    "base",
    "local_base",
    "only_if",
    "layers",
    "every",
)
RULE_EXPRESSIONS = (
    "only_if",
    "key_scale",
    "value_scale",
    "section_blocks",
    "norm_epsilon",
    "input_scale",
    "input_norm_epsilon",
    "layers",
    "heads",
    "key_heads",
    "value_heads",
    "applied_in_total",
    "content_width",
    "position_width",
    "scale",
    "softcap",
    "clip",
    "grows_from",
    "grows_if",
    "position_if",
    "position_uses_if",
    "causal_if",
    "window",
)
REST = "*"  # the width of a section that takes an equal share of what the others leave


def _check_expressions(rule: msgspec.Struct, keys: Iterable[str]) -> None:
    """Raise `ValueError`, which names the key, if an expression of a table cannot be read."""
    for key in keys:
        values = getattr(rule, key)
        if isinstance(values, dict):
            values = tuple(values.values())
        for text in values if isinstance(values, tuple) else (values,):
            if text not in ("", "local"):
                _check_expression(key, str(text))


def _check_expression(key: str, text: str) -> None:
    try:
        parse(text)
    except ValueError as error:
        raise ValueError(f"{key!r}: {error}") from None


class AttentionRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One attention of a model: where its tensors are in every layer, and what its score is.

    Names of tensors contain ``{layer}`` and leave out ``.weight`` and any prefix; where they differ
    between files, all spellings are listed. ``{previous}`` is the layer before, whose last norm
    feeds this one in post-norm models; ``{last}`` is the highest number that exists; ``{head}`` is
    each head, if heads have tensors of their own. Other strings are keys of the configuration.
    """

    stack: str  # encoder, decoder, vision, audio, text, ...
    kind: str = "self"  # or "cross"; without a softmax "linear" or "state-space"
    only_if: str = ""  # switches of models that have this attention; see Config.holds

    # Tensors. A bias has a name only where it is not the weight's own ".bias".
    layout: str = "separate"  # see wqk.families.layouts
    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    value: tuple[str, ...] = ()
    output: tuple[str, ...] = ()  # W_o, for the value-output circuit
    output_norm: tuple[str, ...] = ()  # what heads put out is normalized before W_o
    key_scale: tuple[str | float, ...] = ()  # factors of the keys' content, as in ``scale``
    value_scale: tuple[str | float, ...] = ()  # factors of the values
    query_bias: tuple[str, ...] = ()
    value_bias: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()  # the tensor that holds several sides
    # What it holds, where that is not queries, keys and values: a role, its heads, its width.
    sections: tuple[tuple[str, ...], ...] = ()
    section_blocks: str = ""  # how often these repeat
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
    norm_epsilon: tuple[str, ...] = ("rms_norm_eps", "layer_norm_eps", "norm_eps")

    # The norm whose output is projected.
    input_norm: tuple[str, ...] = ()  # feeds the queries, and the keys of self-attention
    first_input_norm: tuple[str, ...] = ()  # the same in layer 0, where it differs
    key_input_norm: tuple[str, ...] = ()  # feeds the keys of cross-attention
    input_scale: tuple[str | float, ...] = ()  # factors of what it puts out, as in ``scale``
    input_norm_kind: str = "rms"
    input_norm_offset: float = 0.0
    input_norm_epsilon: tuple[str, ...] = EPSILON  # layer 0's own norm is asked for these first

    # Numbers.
    layers: tuple[str, ...] = ("num_hidden_layers",)
    every_layer: bool = True  # false where some layers have no such attention
    heads: tuple[str, ...] = ("num_attention_heads",)
    key_heads: tuple[str, ...] = ("num_key_value_heads",)
    value_heads: tuple[str, ...] = ()  # where values have other heads than keys
    applied_in_total: tuple[str | float, ...] = ()  # applications of shared layers, as in ``scale``
    content_width: str = ""  # "latent": width of a head without positions, and with them alone
    position_width: str = ""

    # From products of queries and keys to scores.
    scale: tuple[str | float, ...] = ("head_width ** -0.5",)  # factors of the score
    softcap: str = ""
    clip: str = ""  # largest absolute value of queries and keys
    sinks: tuple[str, ...] = ()  # scores of a virtual key, one per head
    temperature: tuple[str, ...] = ()  # logarithm of a learned factor of each head's score
    softplus: tuple[str, ...] = ()  # whose softplus multiplies each dimension of the queries
    # In layers without rotary positions, queries grow with theirs: from which token on.
    grows_from: tuple[str, ...] = ()
    grows_if: str = ""  # switch of models whose queries grow
    rotary: RotaryRule | None = None
    position: str = ""  # what is added to the scores besides the form: alibi, relative, ...
    position_if: str = ""
    position_uses: tuple[str, ...] = ()  # sides that this, or a convolution, is made with
    position_uses_if: dict[str, str] = {}  # by side: switches of models that use the side
    whole_score: bool = True  # false if the score has terms that no key describes
    causal: bool = False
    causal_if: str = ""  # configuration flag of models that are either
    # Modules under which the class that runs masks later tokens, or does not.
    causal_under: dict[str, bool] = {}
    window: tuple[str, ...] = ()  # size of local attention
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
        for key, known in (("layout", LAYOUTS), ("norm", NORMS), ("input_norm_kind", NORMS)):
            if getattr(self, key) not in known:
                raise ValueError(
                    f"unknown {key} {getattr(self, key)!r}; known are {', '.join(known)}"
                )
        _check_expressions(self, RULE_EXPRESSIONS)
        for section in self.sections:
            for factor in section[1:]:
                if factor != REST:
                    _check_expression("sections", factor)
        if len(self.query) != len(self.key):
            raise ValueError("'query' and 'key' need as many spellings as each other")
        if not self.fused and not self.query:
            raise ValueError("an attention needs 'query' and 'key', or 'fused'")
        most = max(map(_numbers, self.fused or self.query))
        for query, key in zip(self.query, self.key, strict=True):
            if _numbers(query) != _numbers(key):
                raise ValueError(
                    f"'query' and 'key' need the same {{layer}} and further numbers, got {query!r} "
                    f"and {key!r}"
                )
        for name in self._tensor_names():
            if _numbers(name) > most:
                raise ValueError(f"{name!r} has more numbers, such as {{layer}}, than the query")

    def _tensor_names(self) -> Iterator[str]:
        """All names of tensors, with ``{layer}`` in them."""
        yield from (*self.value, *self.output, *self.query_bias, *self.value_bias, *self.softplus)
        yield from (*self.query_inner, *self.key_inner, *self.query_norm, *self.key_norm)
        yield from (*self.query_inner_norm, *self.key_inner_norm, *self.sinks, *self.temperature)
        yield from (*self.input_norm, *self.first_input_norm, *self.key_input_norm)
        yield from self.output_norm


def _numbers(name: str) -> int:
    """How many numbers a tensor's name has to be filled with."""
    return len(re.findall(r"\{(?!previous\}|last\}|head\})\w+\}", name))


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The attentions of the models that share one naming of tensors."""

    name: str
    model_types: tuple[str, ...] = ()  # none for one that is given by its file
    attention: tuple[AttentionRule, ...] = ()
    refusal: str = ""  # why the attention of these models is not one form per head
    mixers: tuple[
        str, ...
    ] = ()  # attention without a softmax beside it, by its name in mixers.toml
    with_parts: bool = False  # whether parts of known types are read as well, beside this attention
    runs_as: str = ""  # model type whose code runs these weights, where transformers has no other
    runs_with_head: bool = False  # whether only the model with its head has all of the attention


def parse_family(text: str, source: str) -> Family:
    """A family from TOML; `UnknownFamily` if the text is not TOML, or not of this schema.

    Examples
    --------
    >>> family = parse_family('''
    ... name = "toy"
    ... model_types = ["toy"]
    ... [[attention]]
    ... stack = "encoder"
    ... query = "layers.{layer}.q"
    ... key = "layers.{layer}.k"
    ... ''', "toy.toml")
    >>> family.attention[0].query
    ('layers.{layer}.q',)
    """
    table = _inherited(_toml(text, source), source)
    try:
        with _CONVERTING:
            family = msgspec.convert(_listed(table, Family), Family)
    except msgspec.ValidationError as error:
        raise UnknownFamily(f"{source}: {_with_advice(str(error))}") from None
    if not (family.attention or family.mixers or family.refusal):
        raise UnknownFamily(f"{source}: a family needs at least one [[attention]] table")
    known = next(filter(default_values, family.model_types), "")
    if odd := [name for name in family.mixers if name not in _mixers()]:
        raise UnknownFamily(f"{source}: no mixer {odd[0]!r}; known are {', '.join(_mixers())}")
    rules = (
        replace(rule, model_type=known or rule.model_type)
        for rule in (*family.attention, *map(_mixers().__getitem__, family.mixers))
    )
    return replace(family, attention=tuple(rules))


@cache
def _mixers() -> Mapping[str, AttentionRule]:
    """The rules of attention without a softmax, by name."""
    file = resources.files("wqk.families") / "mixers.toml"
    named = _toml(file.read_text(encoding="utf-8"), file.name)
    for name, table in named.items():  # what one is like stands before it
        named[name] = named.get(table.pop("like", ""), {}) | table
    return {
        name: msgspec.convert(_listed(table, AttentionRule), AttentionRule)
        for name, table in named.items()
    }


_types = cache(get_type_hints)

# msgspec 0.22 crashes where two threads convert to one type for the first time.
_CONVERTING = threading.Lock()


def _listed(value: Any, kind: Any) -> Any:
    """Return a value of TOML with single entries as lists of one, wherever its type is a list."""
    if get_origin(kind) is tuple:
        entries = value if isinstance(value, list) else [value]
        return [_listed(entry, get_args(kind)[0]) for entry in entries]
    if not isinstance(value, dict):
        return value
    if get_origin(kind) is dict:
        return {key: _listed(entry, get_args(kind)[1]) for key, entry in value.items()}
    possible = get_args(kind) or [kind]  # a record, or a record or None
    record = next((one for one in possible if hasattr(one, "__struct_fields__")), None)
    if record is None:
        return value
    kinds = _types(record)
    return {key: _listed(entry, kinds.get(key)) for key, entry in value.items()}


def _with_advice(message: str) -> str:
    """What msgspec found, in lower case; for an unknown key, with the one that was meant.

    Examples
    --------
    >>> _with_advice("Object contains unknown field `qeury` - at `$.attention[0]`")
    "unknown key 'qeury' - at `$.attention[0]`; did you mean 'query'?"
    """
    found = re.match(r"Object contains unknown field `(.*?)`(.*)", message)
    if not found:
        return message[0].lower() + message[1:]
    key, place = found.groups()
    table = RotaryRule if "rotary" in place else AttentionRule if place else Family
    known = table.__struct_fields__
    advice = did_you_mean(key, known) or f"; known are {', '.join(known)}"
    return f"unknown key {key!r}{place}{advice}"


def _toml(text: str, source: str) -> dict[str, Any]:
    nested = re.search(r"(\.\s*[\w\"'-]+\s*){50}", text)
    if len(text) > LARGEST_FILE or nested or re.search(r"\S{1000}", text):
        raise UnknownFamily(f"{source}: too long or too deeply nested for a family file")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise UnknownFamily(f"{source}: too deeply nested for a family file") from None
    except tomllib.TOMLDecodeError as error:
        raise UnknownFamily(f"{source}: not valid TOML ({error})") from None


def _inherited(table: dict[str, Any], source: str) -> dict[str, Any]:
    """The table with what it inherits from the shipped family that it is ``like``.

    Its ``[change]`` replaces keys of every attention of that family; a table ``[change.self]`` or
    ``[change.cross]`` in it those of one kind alone.

    Examples
    --------
    >>> gemma = {"like": "gemma3-text", "change": {"rotary": {"order": "interleaved"}}}
    >>> _inherited(gemma, "toy.toml")["attention"][0]["rotary"]["order"]
    'interleaved'
    """
    if isinstance(table.get("attention"), list):
        table["attention"] = _repeated(table["attention"], source)
    like, changes = table.pop("like", None), table.pop("change", {})
    if like is None and not changes:
        return table
    if not isinstance(like, str) or like not in _shipped():
        raise UnknownFamily(f"{source}: 'like' must name a shipped family, got {like!r:.60}")
    if not isinstance(changes, dict):
        raise UnknownFamily(f"{source}: 'change' must be a table, got {changes!r:.60}")
    base = _inherited(_toml(_shipped()[like], f"{like}.toml"), f"{like}.toml")
    own = {"model_type": next(iter(base.get("model_types", ())), "")}
    kinds = {kind: changes.pop(kind, {}) for kind in ("self", "cross")}
    if odd := [kind for kind, table in kinds.items() if not isinstance(table, dict)]:
        raise UnknownFamily(f"{source}: 'change.{odd[0]}' must be a table")
    base["attention"] = [
        own | _merged(rule, changes | kinds.get(rule.get("kind", "self"), {}))
        for rule in base.get("attention", ())
    ]
    return {**base, **table}


def _repeated(rules: list[Any], source: str) -> list[Any]:
    """The tables with the keys of the one before them, by its number, that they are ``like``.

    Examples
    --------
    >>> _repeated([{"query": "q", "key": "k"}, {"like": 0, "key": "c"}], "toy.toml")[1]
    {'query': 'q', 'key': 'c'}
    """
    whole: list[Any] = []
    for rule in rules:
        like = rule.pop("like", None) if isinstance(rule, dict) else None
        if like is not None and (type(like) is not int or like not in range(len(whole))):
            raise UnknownFamily(f"{source}: 'like' of a table must be the number of one before it")
        whole.append(rule if like is None else _merged(whole[like], rule))
    return whole


def _merged(rule: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {
        key: rule[key] | value
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(rule.get(key), dict)
    }
    return rule | changes | nested


@cache
def _shipped() -> Mapping[str, str]:
    """The files of all families, as text, by name."""
    folder: Traversable = resources.files("wqk.families") / "data"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    return {file.name.removesuffix(".toml"): file.read_text(encoding="utf-8") for file in files}


@cache
def shipped_family(name: str) -> Family:
    """The family of this name that ships with the package; KeyError if none does.

    Examples
    --------
    >>> shipped_family("gpt2").attention[0].layout
    'conv1d'
    """
    return parse_family(_shipped()[name], f"{name}.toml")


@cache
def families() -> Mapping[str, Family]:
    """Every family that ships with the package, by name."""
    return {name: shipped_family(name) for name in _shipped()}


def load_family(path: FilePath) -> Family:
    """A shipped family by its name, or one from the user's own file in the same format."""
    if isinstance(path, str) and path in _shipped():
        return shipped_family(path)
    if (name := os.fspath(path)) == Path(path).stem and not Path(path).exists():
        raise UnknownFamily(f"{name}: no known family, no file{did_you_mean(name, _shipped())}")
    family = parse_family(read_text(Path(path), UnknownFamily), name)
    return replace(family, attention=tuple(replace(r, exact=True) for r in family.attention))


def family_of_type(model_type: object) -> Family | None:
    """The family that lists this ``model_type``, if any; parses only files that name it."""
    if not isinstance(model_type, str):
        return None
    named = (name for name, text in _shipped().items() if f'"{model_type}"' in text)
    return next((f for f in map(shipped_family, named) if model_type in f.model_types), None)
