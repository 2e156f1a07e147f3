"""Facts about model types from data next to this file: keys, defaults, tensors of each type.

Tools write most of the data from the code of transformers. Each function returns one fact about a
type.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from functools import cache
from importlib import resources
from typing import Any

import msgspec

# Keys that are read in part, and do more.
ALSO_UNREAD = re.compile("mrope|^layer_types$")
# Keys with all nested values read.
ROTATIONS = {"rope_parameters", "rope_scaling", "per_layer_config"}
# Keys to read, in addition to the keys in rules.
READ = frozenset(
    {
        "attention_layers",
        "attention_types",
        "global_attention_blocks",
        "global_attn_indexes",
        "head_dim",
        "is_causal",
        "layer_types",
        "max_window_layers",
        "num_kv_shared_layers",
        "pos_att_type",
        "rope_theta",
        "sliding_window",
        "use_sliding_window",
        "windowed_kind",
    }
)
# Keys of `READ` that a guess does not read.
POSITIONS_AND_WINDOWS = READ - {"head_dim"}


@cache
def _data(name: str) -> Mapping[str, Any]:
    text = resources.files("wqk.families").joinpath(name).read_text(encoding="utf-8")
    return tomllib.loads(text)


def _of_type(name: str, model_type: object) -> Mapping[str, Any]:
    """Return the table of a model type in a file; empty for types that are not in the file."""
    if not isinstance(model_type, str):
        return {}
    values: Mapping[str, Any] = _data(name).get(model_type, {})
    return values


def part_types(model_type: object) -> Mapping[str, str]:
    """Return the model types that transformers gives the parts of a composite, by key.

    Examples
    --------
    >>> part_types("qwen2_vl")
    {'text_config': 'qwen2_vl_text', 'vision_config': 'qwen2_vl_vision'}
    """
    return _of_type("parts.toml", model_type)


def composite_types() -> Mapping[str, Mapping[str, str]]:
    """Return the model types of the parts of every composite model type, by key.

    Examples
    --------
    >>> composite_types()["qwen2_vl"]["text_config"]
    'qwen2_vl_text'
    """
    return _data("parts.toml")


def default_values(model_type: object) -> Mapping[str, Any]:
    """Return transformers' values for keys that a configuration omits.

    ``voxtral.text_config`` is also a type: its values are set by a class for one of its parts, in
    addition to the values of the part's type.

    Examples
    --------
    >>> default_values("llama4_text")["use_qk_norm"]
    True
    """
    return _of_type("defaults.toml", model_type)


def unread_defaults(model_type: object) -> Mapping[str, Any]:
    """Return values of omitted keys that no family reads, and that a forward pass may read.

    Only single values are returned that are not empty, zero or false, and do not follow from
    another key.

    Examples
    --------
    >>> unread_defaults("llama")["hidden_act"]
    'silu'
    """
    values: Mapping[str, Any] = _data("unread_defaults.toml").get(str(model_type), {})
    return values


def unread_keys(model_type: object) -> Sequence[str]:
    """Return keys that families read, but transformers ignores in models of a type.

    Examples
    --------
    >>> unread_keys("llama")
    ['partial_rotary_factor', 'sliding_window']
    """
    keys: Sequence[str] = _data("unread.toml").get(str(model_type), [])
    return keys


def switches(model_type: object) -> Mapping[str, Any]:
    """Return keys that change models of a type, although no family reads them.

    Returns
    -------
    Under ``attention``, keys that change attention, and their defaults (``null`` without a
    default). Under ``computed``, keys that change an output although they have names of idle keys.

    Examples
    --------
    >>> switches("bros"), switches("camembert")
    ({'attention': {'bbox_scale': 100.0}}, {'computed': ['pad_token_id']})
    """
    keys: Mapping[str, Any] = _data("switches.toml").get(str(model_type), {})
    return keys


def always_present(model_type: object) -> Sequence[str]:
    """Return roles of tensors that all models of a type have, unlike other types of the family.

    Examples
    --------
    >>> always_present("qwen3"), always_present("llama")
    (['query_norm', 'key_norm'], [])
    """
    roles: Sequence[str] = _data("always.toml").get(str(model_type), [])
    return roles


def proven_version() -> str:
    """Return the version of transformers that the families were verified against."""
    return str(_data("proven.toml")["transformers"])


def hints_for_guesses() -> Mapping[str, Any]:
    """Return layouts, gains and parts that a guess takes from the model type."""
    return _data("guesses.toml")


@cache
def _idle_patterns() -> Mapping[str, tuple[re.Pattern[str], re.Pattern[str]]]:
    """Return patterns of idle keys by reason, and of exceptions for this reason."""
    return {
        reason["why"]: (_pattern(reason["keys"]), _pattern(reason.get("except", [])))
        for reason in _data("idle.toml")["reason"]
    }


def _pattern(globs: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, globs)) or r"(?!)")


@cache
def idle_reason(key: str) -> str | None:
    """Return the reason why no forward pass depends on a key; None if one may depend on the key.

    Examples
    --------
    >>> idle_reason("attention_dropout")
    'training: initialization, noise, losses'
    >>> idle_reason("bos_token_id"), idle_reason("num_experts_per_token")
    ('tokens of the vocabulary', None)
    """
    for reason, (idle, active) in _idle_patterns().items():
        if idle.match(key) and not active.match(key):
            return reason
    return None


def keys_of(*rules: object) -> set[str]:
    """Return all words in rules, including the keys that the rules read."""
    return {*READ, *ROTATIONS, *_words([msgspec.to_builtins(rule) for rule in rules])}


def _words(value: Any) -> Iterator[str]:
    """Yield all words in the keys and texts of nested tables."""
    if isinstance(value, str):
        yield from re.findall(r"\w+", value)
    elif isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _words(name)
            yield from _words(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _words(entry)


def unread_settings(
    config: Mapping[str, Any], rules: Iterable[object], *, guessed: bool = False
) -> dict[tuple[str, ...], Any]:
    """Return the settings that a model may use and that no rule reads, by their keys.

    Keys of a model in memory may be numbers, as in ``pruned_heads``.

    Parameters
    ----------
    config
        The configuration of a model.
    rules
        The rules of the model's attention.
    guessed
        Whether the rules are a guess, which reads neither positions nor windows.

    Examples
    --------
    >>> unread_settings({"hidden_act": "silu", "rope_theta": 1e4, "text_config": {"k": 2}}, [])
    {('hidden_act',): 'silu', ('text_config', 'k'): 2}
    >>> config = {"pruned_heads": {0: [1]}, "num_experts_per_token": 2, "bos_token_id": 1}
    >>> unread_settings(config, [])
    {('num_experts_per_token',): 2, ('pruned_heads', '0'): [1]}
    >>> unread_settings({"rope_theta": 1e4, "head_dim": 64}, [], guessed=True)
    {('rope_theta',): 10000.0}
    """
    read = keys_of(*rules).union(unread_keys(config.get("model_type")))
    rotations = ROTATIONS
    if guessed:
        read -= POSITIONS_AND_WINDOWS
        rotations = set()
    settings: dict[tuple[str, ...], Any] = {}
    # Values to visit, with keys and the model type of their configuration.
    queue: list[tuple[tuple[str, ...], Any, object]] = [((), config, None)]
    while queue:
        path, value, model_type = queue.pop(0)
        if isinstance(value, Mapping):
            model_type = value.get("model_type") or model_type
            computed = switches(model_type).get("computed", ())
            types = part_types(model_type)
            for name, entry in value.items():
                key = str(name)
                if idle_reason(key) is None or name in computed:
                    queue.append(((*path, key), entry, types.get(key, model_type)))
            continue
        is_read = bool(rotations.intersection(path)) or path[-1] in read
        if not is_read or ALSO_UNREAD.search(path[-1]):
            settings[path] = value
    return settings
