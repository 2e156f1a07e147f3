"""What a family says: which tensors of a model are its queries and keys, and how they are laid out.

A family is a TOML file. The tables here are its schema; an unknown or missing key is an error, so
that a misspelled one cannot pass for a default.
"""

from __future__ import annotations

import tomllib
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from wqk.errors import UnknownFamily
from wqk.families.layouts import LAYOUTS, NORMS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from importlib.resources.abc import Traversable
    from pathlib import Path


@dataclass(frozen=True)
class RotaryRule:
    """How positions rotate queries and keys.

    Keys of the configuration are tried in order; ``rope_parameters`` and ``rope_scaling`` are
    looked through without being named.
    """

    order: str  # "half": dimension k turns with k + P; "interleaved": 2k with 2k + 1
    fraction: tuple[str, ...] = ("partial_rotary_factor",)  # rotated share of the head width
    width: tuple[str, ...] = ()  # or the number of rotated dimensions itself
    base: tuple[str, ...] = ("rope_theta",)
    local_base: tuple[str, ...] = ()  # base in windowed layers, where it differs
    reversed: bool = False  # turns the other way round
    only_if: str = ""  # switches of models that are rotary or not
    layers: str = ""  # list that says of each layer whether it is rotary
    windowed_only: bool = False  # layers that see everything have no positions
    default_fraction: float = 1.0
    default_base: float = 10_000.0


@dataclass(frozen=True)
class AttentionRule:
    """One attention of a model: where its tensors are in every layer.

    Names leave out ``.weight`` and any prefix, and hold ``{layer}``; where a model has been spelled
    in several ways, all spellings are listed. ``{previous}`` is the layer before, whose last norm
    feeds this one in post-norm models, ``{last}`` the last that there is, ``{head}`` each head,
    where they have tensors of their own. Other strings are keys of the configuration.
    """

    stack: str  # encoder, decoder, vision, audio, text, ...
    kind: str = "self"  # or "cross"
    layout: str = "separate"  # see wqk.families.layouts
    query: tuple[str, ...] = ()
    key: tuple[str, ...] = ()
    query_inner: tuple[str, ...] = ()  # "latent": from the input to the latent
    key_inner: tuple[str, ...] = ()
    query_inner_norm: tuple[str, ...] = ()  # norm of the latent
    key_inner_norm: tuple[str, ...] = ()
    content_width: str = ""  # "latent": width of a head without positions, and with them alone
    position_width: str = ""
    value: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()  # the tensor that holds several roles
    order: str = "qkv"  # order of the roles in it
    blocks: int = 1  # "sectioned": how often that order repeats
    output: tuple[str, ...] = ()  # W_o, for the value-output circuit
    query_bias: tuple[str, ...] = ()  # full names, where it is not the tensor's own ".bias"
    value_bias: tuple[str, ...] = ()
    query_norm: tuple[str, ...] = ()  # norm between projection and score
    key_norm: tuple[str, ...] = ()
    input_norm: tuple[str, ...] = ()  # norm that feeds the queries, and the keys of self-attention
    first_input_norm: tuple[str, ...] = ()  # the same in layer 0, where it is another
    key_input_norm: tuple[str, ...] = ()  # norm that feeds the keys of cross-attention; {last}
    input_norm_kind: str = "rms"  # or "layer"
    input_norm_offset: float = 0.0
    norm: str = "rms"  # kind of query_norm and key_norm; see wqk.families.layouts.NORMS
    norm_gain: bool = True  # false where they have none, and so no tensors
    norm_over: str = ""  # "head" where every head is normalized alone with gains of its own
    norm_offset: float = 0.0  # 1 where the gain is stored as its difference from 1
    norm_epsilon: tuple[str, ...] = ("rms_norm_eps", "layer_norm_eps", "norm_eps")
    only_if: str = ""  # switches of models that have this attention; see Settings.holds
    prefix: str | None = None  # what stands before all names; None for anything
    config: str = ""  # the nested configuration that the keys below are in
    layers: tuple[str, ...] = ("num_hidden_layers",)
    every_layer: bool = True  # false where some layers have no such attention
    heads: tuple[str, ...] = ("num_attention_heads",)
    key_heads: tuple[str, ...] = ("num_key_value_heads",)
    single_key_head_if: str = ""  # switches of multi-query models; see Settings.holds
    applied_in_total: str = ""  # applications of shared layers, all together
    applied_twice_if: str = ""
    causal: bool = False
    causal_if: str = ""  # configuration flag of models that are either
    scale: tuple[str, ...] = ("head_width ** -0.5",)  # factors of the score
    softcap: str = ""
    clip: str = ""  # largest absolute value of queries and keys
    sinks: tuple[str, ...] = ()  # scores of a key that is not there, one for each head
    window: tuple[str, ...] = ()  # size of local attention
    window_axes: int = 1  # 2 where windows are squares of a picture
    temperature: tuple[str, ...] = ()  # logarithm of a learned factor of each head's score
    temperature_limit: float = 100.0  # largest factor
    position: str = ""  # what is added to the scores beside the form: alibi, relative, ...
    position_if: str = ""
    rotary: RotaryRule | None = None
    guess: str = ""  # how the rule was guessed from tensor names, where it was
    partial: str = ""  # why one form per head does not hold the whole score
    note: str = ""  # what else a reader of the form should know
    defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of absent keys


@dataclass(frozen=True)
class Family:
    """The attentions of the models that share one naming of tensors."""

    name: str
    model_types: tuple[str, ...]
    attention: tuple[AttentionRule, ...] = ()
    refusal: str = ""  # why the attention of these models is not one form per head
    runs_as: str = ""  # model type whose code runs these weights, where transformers has no other
    runs_with_head: bool = False  # whether only the model with its head has all of the attention


def parse_family(text: str, source: str) -> Family:
    """A family from TOML.

    Raises
    ------
    UnknownFamily
        The text is not TOML, or not of this schema.

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
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnknownFamily(f"{source}: not valid TOML ({error})") from None
    rules = table.pop("attention", [])
    if not isinstance(rules, list) or not (rules or table.get("refusal")):
        raise UnknownFamily(f"{source}: a family needs at least one [[attention]] table")
    table["attention"] = tuple(_rule(rule, source) for rule in rules)
    family: Family = _build(Family, table, source)
    return family


def _rule(table: Mapping[str, Any], source: str) -> AttentionRule:
    table = dict(table)
    if isinstance(table.get("rotary"), dict):
        table["rotary"] = _build(RotaryRule, table["rotary"], source)
    rule: AttentionRule = _build(AttentionRule, table, source)
    if rule.layout not in LAYOUTS:
        raise UnknownFamily(
            f"{source}: unknown layout {rule.layout!r}; known are {', '.join(LAYOUTS)}"
        )
    if rule.norm not in NORMS:
        raise UnknownFamily(f"{source}: unknown norm {rule.norm!r}; known are {', '.join(NORMS)}")
    if not isinstance(rule.defaults, dict):
        raise UnknownFamily(f"{source}: 'defaults' must be a table, got {rule.defaults!r}")
    if len(rule.query) != len(rule.key):
        raise UnknownFamily(f"{source}: 'query' and 'key' need as many spellings as each other")
    if not rule.fused and not (rule.query and rule.key):
        raise UnknownFamily(f"{source}: an attention needs 'query' and 'key', or 'fused'")
    return rule


def _build(kind: type[Any], table: Mapping[str, Any], source: str) -> Any:
    """A dataclass from a TOML table, lists as tuples and single strings as tuples of one."""
    known = {f.name: f for f in fields(kind)}
    for key in table:
        if key not in known:
            raise UnknownFamily(f"{source}: unknown key {key!r}; known are {', '.join(known)}")
    values = {}
    for name, known_field in known.items():
        if name not in table:
            if known_field.default is MISSING and known_field.default_factory is MISSING:
                raise UnknownFamily(f"{source}: {kind.__name__} lacks the key {name!r}")
            continue
        value = table[name]
        if str(known_field.type).startswith("tuple"):
            value = tuple(value) if isinstance(value, list | tuple) else (value,)
        values[name] = value
    return kind(**values)


@cache
def families() -> Mapping[str, Family]:
    """Every family that ships with the package, by name."""
    folder: Traversable = resources.files("wqk.families") / "data"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".toml")), key=lambda f: f.name)
    loaded = [parse_family(file.read_text(encoding="utf-8"), file.name) for file in files]
    return {family.name: family for family in loaded}


@cache
def _by_model_type() -> Mapping[str, Family]:
    return {kind: family for family in families().values() for kind in family.model_types}


@cache
def _part_types() -> Mapping[str, Mapping[str, str]]:
    text = resources.files("wqk.families").joinpath("parts.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def part_types(model_type: object) -> Mapping[str, str]:
    """The model types of a composite's parts, by the keys of their configurations.

    Files need not say them: they are what `transformers` takes each part for.

    Examples
    --------
    >>> part_types("qwen2_vl")
    {'text_config': 'qwen2_vl_text', 'vision_config': 'qwen2_vl_vision'}
    """
    return _part_types().get(model_type, {}) if isinstance(model_type, str) else {}


def load_family(path: Path) -> Family:
    """A family from the user's own file, in the format of the shipped ones."""
    try:
        return parse_family(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise UnknownFamily(f"{path}: cannot be read ({error.strerror})") from None


def family_of_type(model_type: object) -> Family | None:
    """The family that lists this ``model_type``, where one does."""
    return _by_model_type().get(model_type) if isinstance(model_type, str) else None
