"""Checked values of a model's configuration, under the keys that a family names."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import translate
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Any

from wqk.checkpoints.checkpoint import as_number
from wqk.errors import CheckpointError, shown
from wqk.families.expressions import PLAIN_KEY, NotANumber, evaluate, holds, keys_in

# More heads or layers than this are a broken configuration, not a model. Lengths have no limit.
LARGEST_COUNT = 100_000

# Classes that lift the causal mask of a decoder and leave its model type: LLM2Vec's, under both of
# their names, the wrapper of DiffuGPT and DiffuLLaMA, and those that say so (LFM 2.5's encoders,
# Voyage 4 nano).
UNMASKED = re.compile(
    r"(Llama|Mistral|Qwen2|Gemma2?)(Encoder|Bi)(Model|For(MaskedLM|MNTP))|DiscreteDiffusionModel"
    r"|\w+Bidir(ectional)?([A-Z]\w*)?"
)

# What is read in part, and does more.
ALSO = re.compile("mrope|^layer_types$")
# What is read besides the keys that rules name.
TURNING = {"rope_parameters", "rope_scaling", "per_layer_config"}
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


@cache
def _tables(name: str) -> Mapping[str, Any]:
    text = resources.files("wqk.families").joinpath(name).read_text(encoding="utf-8")
    return tomllib.loads(text)


def part_types(model_type: object) -> Mapping[str, str]:
    """The model types that `transformers` gives a composite's parts, by configuration key.

    Examples
    --------
    >>> part_types("qwen2_vl")
    {'text_config': 'qwen2_vl_text', 'vision_config': 'qwen2_vl_vision'}
    """
    return _tables("parts.toml").get(model_type, {}) if isinstance(model_type, str) else {}


def default_values(model_type: object) -> Mapping[str, Any]:
    """What `transformers` takes for granted where a configuration of this type is silent.

    ``voxtral.text_config`` is what a class fills into a part of its own, beyond the part's type.

    Examples
    --------
    >>> default_values("llama4_text")["use_qk_norm"]
    True
    """
    return _tables("defaults.toml").get(model_type, {}) if isinstance(model_type, str) else {}


def unread_keys(model_type: object) -> Sequence[str]:
    """Keys that families read, and that `transformers` ignores in models of this type.

    Examples
    --------
    >>> unread_keys("llama")
    ['partial_rotary_factor', 'sliding_window']
    """
    keys: Sequence[str] = _tables("unread.toml").get(str(model_type), [])
    return keys


def switches(model_type: object) -> Mapping[str, Any]:
    """What models of this type compute with, though no family reads it, or its name tells nothing.

    ``attention`` are keys that change it, and their defaults (``null`` where there is none);
    ``computed`` are those that otherwise no forward pass depends on.

    Examples
    --------
    >>> switches("bros"), switches("camembert")
    ({'attention': {'bbox_scale': 100.0}}, {'computed': ['pad_token_id']})
    """
    known: Mapping[str, Any] = _tables("switches.toml").get(str(model_type), {})
    return known


@cache
def _idle_reasons() -> Mapping[str, tuple[re.Pattern[str], re.Pattern[str]]]:
    """Return, by reason, patterns of idle keys, and of keys that are not idle for this reason."""
    return {
        reason["why"]: (_pattern(reason["keys"]), _pattern(reason.get("except", [])))
        for reason in _tables("idle.toml")["reason"]
    }


def _pattern(globs: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, globs)) or r"(?!)")


@cache
def idle_reason(key: str) -> str | None:
    """Return why no forward pass depends on a key of configurations; None if one may.

    Examples
    --------
    >>> idle_reason("attention_dropout")
    'training: initialization, noise, losses'
    >>> idle_reason("bos_token_id"), idle_reason("num_experts_per_token")
    ('tokens of the vocabulary', None)
    """
    for reason, (idle, active) in _idle_reasons().items():
        if idle.match(key) and not active.match(key):
            return reason
    return None


def proven_version() -> str:
    """Return the version of transformers whose models the families were proven against."""
    return str(_tables("proven.toml")["transformers"])


def always_present(model_type: object) -> Sequence[str]:
    """Roles of tensors that every model of this type has, though others of its family lack them.

    Examples
    --------
    >>> always_present("qwen3"), always_present("llama")
    (['query_norm', 'key_norm'], [])
    """
    roles: Sequence[str] = _tables("always.toml").get(str(model_type), [])
    return roles


def keys_of(*rules: object) -> set[str]:
    """The keys that rules read, among the names of tensors and other words in them."""
    return {*READ, *TURNING, *re.findall(r"\w+", repr(rules))}


def unread_settings(
    config: Mapping[str, Any], rules: Iterable[object]
) -> dict[tuple[str, ...], Any]:
    """What a model computes with besides what rules read: values of its configuration, by keys.

    Keys of a model in memory may be numbers, as in ``pruned_heads``.

    Examples
    --------
    >>> unread_settings({"hidden_act": "silu", "rope_theta": 1e4, "text_config": {"k": 2}}, [])
    {('hidden_act',): 'silu', ('text_config', 'k'): 2}
    >>> said = {"pruned_heads": {0: [1]}, "num_experts_per_token": 2, "bos_token_id": 1}
    >>> unread_settings(said, [])
    {('num_experts_per_token',): 2, ('pruned_heads', '0'): [1]}
    """
    read = keys_of(*rules).union(unread_keys(config.get("model_type")))
    found: dict[tuple[str, ...], Any] = {}
    left: list[tuple[tuple[str, ...], Any, object]] = [((), config, None)]
    while left:
        path, value, kind = left.pop(0)
        if isinstance(value, Mapping):
            kind = value.get("model_type") or kind
            left += [
                ((*path, str(key)), one, part_types(kind).get(str(key), kind))
                for key, one in value.items()
                if idle_reason(str(key)) is None or key in switches(kind).get("computed", ())
            ]
        elif ALSO.search(path[-1]) or not (TURNING.intersection(path) or path[-1] in read):
            found[path] = value
    return found


class Config:
    """A configuration, as `transformers` writes it, seen from one attention of its model.

    ``nested`` is the key of the part that belongs to this attention (``text_config``), with dots
    for nested parts; empty for all of it. ``defaults`` are the values of keys that the
    configuration leaves out. Of further keys `transformers` knows the values of its own model type,
    or else of ``model_type``; and their other names.

    Examples
    --------
    >>> Config({"model_type": "gpt2", "num_attention_heads": 4}).get("n_head")
    4
    >>> Config({"model_type": "gpt2", "n_head": 2, "num_attention_heads": 4}).get("n_head")
    2
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        nested: str = "",
        defaults: Mapping[str, Any] | None = None,
        model_type: str = "",
    ) -> None:
        part: Any = config
        for key in filter(None, nested.split(".")):
            part = part.get(key) if isinstance(part, dict) else None
        chosen = part if isinstance(part, dict) else config
        whole = config.get("model_type")
        named = part.get("model_type") if isinstance(part, dict) else None
        own = named or part_types(whole).get(nested, whole)
        self.own_type = own
        left_out = default_values(own) or default_values(model_type)
        left_out = {**left_out, **default_values(f"{whole}.{nested}")}
        unread = self.passed_over = {*unread_keys(own), *unread_keys(f"{whole}.{nested}")}
        names = left_out.get("names", {})
        chosen = {
            names.get(k, k) if names.get(k) not in chosen else k: v for k, v in chosen.items()
        }
        further = {k: v for k, v in (defaults or {}).items() if k not in left_out}
        self._config = further | {
            k: v for k, v in chosen.items() if v is not None and k not in unread
        }
        self._left_out = {k: v for k, v in left_out.items() if k not in chosen}
        self._left_out["is_part"] = bool(nested)
        self._left_out.setdefault("model_type", own)
        self._nulls = {k for k, v in chosen.items() if v is None}
        turning = chosen.get("rope_parameters")
        said = {**turning, **chosen} if isinstance(turning, dict) else chosen
        self.unread = [k for k in said if k in unread and k not in self._nulls]
        # What changes attention and is not read, where it is not as by default.
        known = switches(own).get("attention", {})
        self.switched = [k for k, v in known.items() if chosen.get(k) not in (None, v)]

    def get(self, *keys: str) -> Any:
        """Return the value of the first key that is not null; of keys of the file first.

        A key is an expression of `wqk.families.expressions`: a dot leads into a nested part, and
        ``size // 2 + 1`` is a number made of a key.
        """
        value = self.told(*keys)
        if value is not None:
            return value
        return next((value for value in map(self._value, keys) if value is not None), None)

    def told(self, *keys: str) -> Any:
        """Like `get`, but without defaults: only what the file sets, and numbers."""
        for key in keys:
            value = self._evaluated(key, self._look_up_in_file)
            if value is None and not PLAIN_KEY.fullmatch(key):
                value = self._partly_told(key)
            if value is not None:
                return value
        return None

    def _partly_told(self, expression: str) -> Any:
        """Return the value of an expression that needs defaults besides what the file sets."""
        names: list[str] = []

        def look_up(name: str) -> Any:
            names.append(name)
            return self._look_up(name)

        value = self._evaluated(expression, look_up)
        is_told = any(self._look_up_in_file(name) is not None for name in names)
        return value if is_told else None

    def default(self, key: str) -> Any:
        """Return the value that `transformers` takes where the key is absent."""
        return self._left_out.get(key)

    def _look_up_in_file(self, name: str) -> Any:
        return _nested(self._config, name)

    def _look_up(self, name: str) -> Any:
        """Return a key's value, of the file or by default; a dot leads into a nested part."""
        value = self._look_up_in_file(name)
        return _nested(self._left_out, name) if value is None else value

    def _value(self, expression: str) -> Any:
        return self._evaluated(expression, self._look_up)

    def _evaluated(self, expression: str, look_up: Callable[[str], Any]) -> Any:
        try:
            return evaluate(expression, look_up, self._look_up)
        except NotANumber as error:
            raise self.wrong([error.key], error.expected, error.value) from None

    def holds(self, condition: str) -> bool:
        """Return whether a condition holds, such as ``multi_query and not alibi``; empty: always.

        Examples
        --------
        >>> config = Config({"alibi": False, "attn_config": {"clip": 8.0}})
        >>> config.holds("attn_config.clip and not alibi")
        True
        >>> config.holds("attn_config.clip == 8.0")
        True
        >>> Config({"pos_att_type": "p2c|c2p"}).holds("'c2p' in pos_att_type")
        True
        """
        try:
            return holds(condition, self._look_up)
        except NotANumber as error:
            raise self.wrong([error.key], error.expected, error.value) from None

    def whole(self, keys: Sequence[str], layer: int = 0) -> int:
        """A required count, as `optional_whole`."""
        return _required(keys, self.optional_whole(keys, layer))

    def optional_whole(self, keys: Sequence[str], layer: int = 0) -> int | None:
        """A count, None if no key has it; a list holds one for each layer."""
        value = None if isinstance(found := self._entry(keys, layer), list) else found
        if value is not None and (type(value) is not int or not 0 < value <= LARGEST_COUNT):
            raise self.wrong(keys, f"a whole number from 1 to {LARGEST_COUNT:,}", value)
        return value

    def _entry(self, keys: Sequence[str], layer: int) -> Any:
        """What these keys hold: of a list, the layer's entry; all of a list that is too short."""
        value = self.get(*keys)
        return value[layer] if isinstance(value, list) and layer < len(value) else value

    def optional_length(self, keys: Sequence[str], layer: int = 0) -> int | None:
        """A number of tokens, None if no key has it: a window, or the longest text.

        A list holds one for each layer. It may be as large as publishers write it, since nothing is
        allocated by it.

        Examples
        --------
        >>> Config({"sliding_window": 131072}).optional_length(["sliding_window"])
        131072
        """
        value = self._entry(keys, layer)
        if value is not None and (type(value) is not int or not 0 < value < 2**63):
            raise self.wrong(keys, "a positive whole number", value)
        return value

    def length(self, keys: Sequence[str]) -> int:
        """A required number of tokens, as `optional_length`."""
        return _required(keys, self.optional_length(keys))

    def wrong(self, keys: Sequence[str], expected: str, value: Any) -> CheckpointError:
        """The error for a value that is not what these keys should hold."""
        return CheckpointError(
            f"config.json: {' or '.join(keys)} must be {expected}, got {shown(value)}"
        )

    @property
    def lifts_mask(self) -> bool:
        """Whether a decoder is said to attend in both directions.

        Either ``is_causal`` is false, or the model's class is one that lifts the mask.

        Examples
        --------
        >>> Config({"architectures": ["MistralBiModel"]}).lifts_mask
        True
        >>> Config({"architectures": ["MistralForCausalLM"]}).lifts_mask
        False
        """
        named, remote = self.get("architectures"), self.get("auto_map")
        classes = [*(named if isinstance(named, list) else ())]
        classes += remote.values() if isinstance(remote, dict) else ()
        names = (name.rpartition(".")[2] for name in classes if isinstance(name, str))
        return self.get("is_causal") is False or any(map(UNMASKED.fullmatch, names))

    @property
    def head_widths(self) -> set[int]:
        """All head widths of attention in any layer: ``head_dim``, ``global_head_dim``, ..."""
        layers = self.get("per_layer_config")
        others = layers.values() if isinstance(layers, dict) else ()
        whole = self._left_out | self._config
        widths: set[int] = set()
        for part in (whole, *(part for part in others if isinstance(part, dict))):
            for key, value in part.items():
                if not key.endswith("head_dim") or key.startswith(("linear_", "mamba_")):
                    continue
                several = value if isinstance(value, list) else [value]
                least = 1 if key == "head_dim" else 0  # latent heads may have no positions
                if not all(type(width) is int and width >= least for width in several):
                    raise self.wrong([key], "a positive whole number", value)
                widths.update(several)
        return widths if "head_dim" in whole else set()

    def pruned_heads(self, layer: int) -> int:
        """How many heads were pruned from a layer of self-attention.

        Examples
        --------
        >>> config = Config({"pruned_heads": {"0": [1, 3]}})
        >>> config.pruned_heads(0), config.pruned_heads(1)
        (2, 0)
        """
        by_layer = self.get("pruned_heads") or {}
        pruned = by_layer.get(str(layer), []) if isinstance(by_layer, dict) else None
        if not isinstance(pruned, list):
            raise self.wrong(["pruned_heads"], "a list of heads for each layer", by_layer)
        return len(pruned)

    def optional_number(self, keys: Sequence[str], layer: int = 0) -> float | None:
        """A finite number, None if no key has it; a list holds one for each layer."""
        value = self._entry(keys, layer)
        number = None if value is None else as_number(value)
        if number is None and value is not None:
            raise self.wrong(keys, "a number", value)
        return number

    def product(self, factors: Sequence[str | float], names: Mapping[str, float]) -> float:
        """Return the product of factors such as ``head_width ** -0.5`` or ``attention_multiplier``.

        A factor is an expression of names of ``names``, of keys of the configuration, and of
        numbers. ``layer_number`` counts layers from 1; ``score_terms`` is the number of terms of
        DeBERTa's score.

        Raises
        ------
        CheckpointError
            A factor is no positive number, or the product is not finite.

        Examples
        --------
        >>> config = Config({"pos_att_type": ["c2p", "p2c"]})
        >>> config.product(["head_width ** -0.5", "score_terms ** -1"], {"head_width": 64})
        0.041666666666666664
        """
        known = {**names, "layer_number": names.get("layer", 0) + 1, "score_terms": self._terms()}

        def look_up(key: str) -> Any:
            return known[key] if key in known else self.optional_number((key,))

        result = 1.0
        for factor in map(str, factors):
            try:
                value = evaluate(factor, look_up, self._look_up)
            except NotANumber as error:
                raise CheckpointError(
                    f"config.json: the scale {factor} needs {error.expected} for {error.key}, got "
                    f"{shown(error.value)}"
                ) from None
            if not isinstance(value, int | float) or value <= 0:
                keys = " or ".join(sorted(keys_in(factor) - known.keys())) or factor
                raise CheckpointError(f"config.json: the scale needs a positive {keys}")
            try:
                result *= value
            except OverflowError:
                raise CheckpointError(f"config.json: {factor} is too large") from None
        if not 0 < result < math.inf:
            raise CheckpointError(
                f"the scale {' · '.join(map(str, factors))} is {result:g}; expected a finite "
                "number above 0"
            )
        return result

    def _terms(self) -> int:
        """Number of terms in DeBERTa's score: content to content, and each positional one."""
        return 1 + sum(self.holds(f"'{kind}' in pos_att_type") for kind in ("c2p", "p2c"))

    def layer_type(self, layer: int) -> str | None:
        """The layer's kind, such as ``sliding_attention``; None where nothing says it.

        It stands in a list; or follows from the rule of the model type, as in `kind_of_layer`.
        """
        kinds = self.get("layer_types", "attention_layers")
        if kinds is None:
            kinds = _expanded(self.get("attention_types")) or self._kinds_by_number()
        known = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
        if kinds is not None and not known:
            raise self.wrong(["layer_types", "attention_layers"], "a list of names", kinds)
        rule = self.default("kinds") or {}
        layers = self.optional_whole(("num_hidden_layers",)) if rule else None
        forced = bool(rule.get("forced")) and layers is not None and layer == layers - 1
        if kinds is not None and layer < len(kinds) and not forced:
            return as_text(kinds[layer])
        if not rule:
            return None
        every, after = rule.get("every", ""), rule.get("after", "")
        return kind_of_layer(
            rule,
            layer,
            layers,
            period=self.optional_whole((every,)) if every else None,
            after=self.get(after) if after else None,
        )

    def _kinds_by_number(self) -> list[Any] | None:
        """Return the kinds of all layers, where a list has a number for each kind."""
        for key, names in (self.get("kinds_by_number") or {}).items():
            numbers = self.get(key)
            if isinstance(numbers, list):
                return [names.get(str(number), number) for number in numbers]
        return None

    def stage(self, depths: Sequence[str], index: Sequence[int]) -> tuple[int, int]:
        """The place in lists of a block's heads, and of its window: its layer, or its stage.

        Where the configuration lists the ``depths`` of stages, lists have an entry for each stage,
        and the first block of a stage still has the window of the stage before.

        Examples
        --------
        >>> config = Config({"depths": [1, 2, 7]})
        >>> config.stage(["depths"], [3]), config.stage(["depths"], [1, 0])
        ((2, 1), (1, 0))
        """
        first, *block = index or (0,)
        listed = self.get(*depths)
        if not isinstance(listed, list):
            return first, first
        if not block:
            counts = [self.whole(depths, stage) for stage in range(len(listed))]
            ends = [*accumulate(counts)]
            stage = sum(first >= end for end in ends[:-1])
            first, block = stage, [first - (ends[stage - 1] if stage else 0)]
        return first, first if block[0] or not first else first - 1

    def sets_to_null(self, keys: Sequence[str]) -> bool:
        """Return whether the file itself sets one of these keys to null."""
        return bool(self._nulls.intersection(keys))


def kind_of_layer(
    rule: Mapping[str, Any],
    layer: int,
    layers: int | None = None,
    period: int | None = None,
    after: object = None,
) -> str:
    """The kind of a layer by a rule: some come first, others repeat, and the last may be another.

    ``layers`` is their number, ``period`` the length of the repetition where the configuration sets
    it, and ``after`` the first layer of the kind ``then``. Some rules count ``backward``.

    Examples
    --------
    >>> rule = {"repeat": ["sliding", "sliding", "full"]}
    >>> [kind_of_layer(rule, layer, period=2) for layer in range(4)]
    ['sliding', 'full', 'sliding', 'full']
    """
    repeat, first = rule["repeat"], rule.get("first", [])
    if rule.get("backward") and layers is not None:
        layer = layers - 1 - layer
    if "last" in rule and layers is not None and layer == layers - 1:
        return str(rule["last"])
    if type(after) is int and layer >= after:
        return str(rule["then"])
    if layer < len(first):
        return str(first[layer])
    if period is None or len(repeat) < 2:
        return str(repeat[layer % len(repeat)])
    # One layer of each period is like no other: its first or its last.
    place, odd = (0, 0) if repeat[0] != repeat[1] and repeat[0] != repeat[-1] else (period - 1, -1)
    return str(repeat[odd] if layer % period == place else repeat[0 if odd else 1])


def _required(keys: Sequence[str], value: int | None) -> int:
    if value is None:
        raise CheckpointError(f"config.json lacks {' or '.join(keys).replace(' | ', ' or ')}")
    return value


def _expanded(runs: Any) -> list[Any] | None:
    """GPT-Neo's list of runs, ``[[["global", "local"], 6]]``, as a list of layers."""
    if not isinstance(runs, list):
        return None
    kinds: list[Any] = []
    for run in runs:
        match run:
            case [[*names], int(times)] if 0 < times <= LARGEST_COUNT:
                kinds += names * times
    return kinds


def _nested(table: Mapping[str, Any], name: str) -> Any:
    """Return the value of a key; a dot leads into a nested part."""
    value: Any = table
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_text(value: Any) -> str:
    """A value as text, whatever it is; numbers that are too long to print are described."""
    return value if isinstance(value, str) else shown(value)
